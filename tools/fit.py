"""usage: ./run_all.sh fit [--table LINE] [--head-dim D]... [--chunks] [--drawn N [--seed S] | --from CSV]
       ./run_all.sh fit [--table LINE] --check [CSV]...
Does TUNED_TILES choose well, and would other costs choose better? Times every tile of the table, as a line of its own,
on a list of problems; fits the costs of sdpa.cu's model to the times; prints for each problem the tiles that both
tables choose, the quickest one, and what the choices lose; and prints the rows with the fitted costs, to paste. A GPU
other than the one of sdpa.cu's table gets its own table so. The times go to results/tuning/DATE-DEVICE-LINE[-chunks][-drawn].csv.
  --table hopper|hopper_bf16|ampere|hopper_e4m3|hopper_kv8_d128_bf16  whose tiles (default hopper); ampere: mma.sync's
  --head-dim 64|128|256  repeatable; default all that have two tiles or more
  --drawn N      not the list but N problems drawn at random, as tools/peers.py draws them: a test of the table
  --seed N       the series of these, from 0; default 0
  --chunks       not the list but problems of few rows and many keys; with --drawn, problems of this kind
  --from CSV     fits to these rows and measures nothing
  --check        judges the table in sdpa.cu by rows of results/tuning (default: the newest of the list and of --chunks);
                 measures nothing
exit: 0, 1 with --check: the table chooses badly (above 8% lost on a problem, or 35% where K and V of one query just
fill L2, or 1% on average, or costs fitted to five sixths of the problems above 1% on average on the others) or a tile
was never timed, 2 bad usage, 3 a tile could not be run
"""
import collections
import csv
import ctypes
import math
import sys
from pathlib import Path

import numpy as np

import builds
import cli
import engine
import peers
import report_rows
from cli import Refused, say
from search import identity, knobs_of

SHAPES = """1,8,8,128,128 1,8,8,256,256 mission mission2 1,8,8,512,8192 1,8,8,768,768 1,8,8,1024,1024 1,16,16,1000,1777
long 1,2,2,8192,8192 1,4,4,4096,4096 8,16,16,512,512 4,8,8,1024,1024 2,16,16,2048,2048 16,16,16,1024,1024
4,16,16,4096,4096 4,32,32,4096,4096 1,16,16,16384,16384 1,32,32,16384,16384
16,48,6,80,80 4,48,6,90,90 64,16,4,40,120 32,16,16,196,196 30,32,4,128,128 64,8,1,16,64 2,16,2,40,16000
decode decode1 8,32,8,1,2048 1,32,8,1,4096 128,32,8,1,1024 1,16,16,1,8192 48,8,8,1,500 10,64,8,1,800 7,8,8,1,3000
8,32,8,4,8192 8,32,8,8,8192 1,16,2,6,8000 chunk
16,56,7,76,76 41,8,2,125,958 24,8,2,463,463 47,48,6,140,140 55,7,7,1,436 64,16,4,1,300
32,7,7,1,8192 32,32,32,1,4096 8,32,32,1,4096 64,12,12,1,1000""".split()
CHUNKS = peers.CHUNKS + "1,16,4,500,2000 1,24,3,200,6000 1,20,20,128,4000".split()
FEW_ROWS = 1024  # of a key head
PACE, BLOCKS = engine.Pace(30e3, 10e3), 1
COLUMNS = ("D dtype shape B Hq Hkv Sq Sk causal tile us lo_us hi_us clock_mhz check device sms driver cuda "
           "git_sha").split()
NEW_COSTS = (5000, 6)  # of a tile before it is fitted
LEAST, KEEP = np.log([100, 1e-3]), 0.01  # costs; residual of one that is e times what it was
SLOW = 2  # times the quickest tile: such times do not count
WORST_LOSS, MEAN_LOSS, FOLDS = 0.08, 0.01, 6
# Bytes of K and V that an H200's L2 just holds or not: what one query takes there depends on what else lies in L2.
L2_EDGE, WORST_LOSS_THERE = (30e6, 55e6), 0.35
# Line with USE_TUNED=1: its type, and the knobs of a build for the host that has its table.
TABLES = {"hopper": ("fp16", ""), "hopper_bf16": ("bf16", "DTYPE=BF16"), "ampere": ("fp16", "USE_MMA_SYNC=1 BLOCK_M=64"),
          "hopper_e4m3": ("e4m3", "DTYPE=FP8_E4M3 VEC_WIDTH=16"),
          "hopper_kv8_d128_bf16": ("bf16/e4m3", "DTYPE=BF16 KV_DTYPE=FP8_E4M3 VEC_WIDTH=16 USE_WGMMA=1 "
                                   "USE_WARP_SPECIALIZATION=1 BLOCK_M=64 NUM_WARPS=4")}


# ---- sdpa.cu's table and its model ----

class Tile(ctypes.Structure):
    """sdpa.cu's TunedTile, member by member: every knob, then the costs."""
    _fields_ = ([(name.lower(), ctypes.c_bool if knob.values == "0 1" else ctypes.c_int)
                 for name, knob in builds.Tree().knob_rows().items()] +
                [("ctas", ctypes.c_int), ("item_clocks", ctypes.c_double), ("scores_per_clock", ctypes.c_double)])
    SIZES = ("HEAD_DIM", "BLOCK_M", "BLOCK_N", "NUM_WARPS", "STAGES", "SPLIT_KV")
    FLAGS = ("USE_WARP_SPECIALIZATION", "OVERLAP", "USE_PERSISTENT_CTA", "USE_PING_PONG", "SKIP_MASKED", "SWAP_AB",
             "PACK_GQA", "USE_MMA_SYNC", "SPLIT_CTAS")

    @property
    def flags(self):
        """What is on. SPLIT_CTAS has ranges by the problem: 0, and 1 is none."""
        return [knob for knob in self.FLAGS if getattr(self, knob.lower()) != (knob == "SPLIT_CTAS")]

    @property
    def sizes(self):
        return [getattr(self, knob.lower()) for knob in self.SIZES]

    @property
    def knobs(self):
        """What a line types to be this tile alone."""
        return " ".join([*map("{}={}".format, self.SIZES, self.sizes),
                         *(f"{knob}={int(knob != 'SPLIT_CTAS')}" for knob in self.flags), "USE_LAZY_MAX=1"])

    def line(self, tree, *words, table=None):
        """The line that is this tile alone, of the table of that line."""
        base = table or ("ampere" if self.use_mma_sync else "hopper")
        if self.use_mma_sync and base != "ampere":
            words = ("USE_WGMMA=0", "USE_CP_ASYNC=1", "SWIZZLE_XOR=1", *words)
        elif base == "hopper_e4m3" and self.block_n <= 64:  # 8 tiles is the default
            words = ("FP8_FLUSH=16", *words)
        return builds.Line(tree, base, ("USE_TUNED=0", *self.knobs.split(), *words))

    def suits(self, problem):
        """Whether it is timed on the problem: tiles of few rows that pack heads take long on many."""
        is_small, rows = self.pack_gqa and self.block_m < 64, problem.Hq // problem.Hkv * problem.Sq
        return problem.D == self.head_dim and not (is_small and rows > FEW_ROWS)

    @classmethod
    def of(cls, line):
        """The row of a line, at costs that are still to be fitted; None if none can be that line."""
        tile = cls(ctas=1, item_clocks=NEW_COSTS[0], scores_per_clock=NEW_COSTS[1])
        for knob in cls.SIZES + cls.FLAGS:
            setattr(tile, knob.lower(), int(knobs_of(line)[knob]))
        twin = tile.line(line.tree, f"DTYPE={knobs_of(line)['DTYPE']}")
        return tile if identity(twin) == identity(line) else None

    @property
    def costs(self):
        return np.array([self.item_clocks, self.scores_per_clock])

    def row(self, table):
        """The row of that line's table."""
        implied = ["USE_WARP_SPECIALIZATION"] * self.overlap + ["USE_MMA_SYNC"] * (table == "ampere")
        implied += ["SPLIT_CTAS"] * self.pack_gqa
        flags = " ".join(knob for knob in self.flags if knob not in implied)
        costs = f"{self.item_clocks:g}, {self.scores_per_clock!r}"
        return f'    tile({", ".join(map(str, self.sizes))}, "{flags}", {self.ctas}, {costs}),'


class Model:
    """The tiles of a table and the cost model that chooses, out of sdpa.cu itself, compiled for the host."""

    def __init__(self, table="hopper"):
        self.table, (self.dtype, knobs) = table, TABLES[table]
        self.library = ctypes.CDLL(builds.host_library(*knobs.split()))
        first = ctypes.POINTER(Tile)()
        count = self.library.sdpa_library_tiles(ctypes.byref(first))
        self.tiles = [tile for tile in first[:count] if tile.head_dim]  # those of builds with a bias have none here

    def clocks(self, tiles, params, sms):
        """[problem][tile], of the problems that params() was given."""
        clocks = np.empty((len(params), len(tiles)))
        self.library.sdpa_library_tile_clocks((Tile * len(tiles))(*tiles), len(tiles), params, len(params), sms,
                                              clocks.ctypes.data_as(ctypes.c_void_p))
        return clocks

    @staticmethod
    def params(problems):
        """The problems as the model takes them."""
        return (engine.SdpaParams * len(problems))(*map(engine.params_of, problems))


# ---- times ----

def listed(dims, dtype, shapes):
    """These problems at each D, with and without a mask; which hides nothing from the last query."""
    problems = [engine.parse_problem(shape, causal).typed(D, dtype)
                for D in dims for causal in ("off", "br") for shape in shapes]
    return [one for one in problems if one.Sq > 1 or one.causal == "off"]


def measure(gpu, model, tiles, problems, table):
    """Times those of the tiles that suit on every problem; rows go to the table. Returns them."""
    tree, rows = builds.Tree(), []
    lines = {tile.knobs: tile.line(tree, table=model.table) for tile in tiles}
    built = builds.build(lines.values(), gpu.arch)
    kernels = {knobs: engine.load(line, gpu, built) for knobs, line in lines.items()}
    for number, problem in enumerate(problems):
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {len(problems)} problems", end="", file=sys.stderr)
        own = {tile.knobs: kernels[tile.knobs] for tile in tiles if tile.suits(problem)}
        bench = engine.Bench(gpu, own, dict.fromkeys(own, problem))
        for knobs, sentence in bench.skipped.items():
            raise Refused(f"{knobs}: cannot run {problem}: {sentence}", 3)
        series = engine.measure(gpu, bench.fit_to_time(), PACE, BLOCKS)
        about = dict(problem.columns(), sms=gpu.attribute(engine.SM_COUNT), **engine.measured_on(gpu))
        for knobs in own:
            row = dict(about, tile=knobs, check="FAIL")
            if knobs in series.graphs:
                low, high = series.interval(knobs)
                row.update(check="PASS", us=f"{series.us(knobs):.3f}", lo_us=f"{low:.3f}", hi_us=f"{high:.3f}",
                           clock_mhz=f"{series.clock(knobs):.0f}")
            rows.append(row)
            table.add(**row)
        bench.close()
    return rows


def read_rows(path):
    """The rows of a CSV of fit, all of them whole; else it is refused."""
    if not Path(path).exists():
        raise Refused(f"{path}: there is no such file")
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Refused(f"{path} cannot be read: {error}") from None
    if not rows or set(COLUMNS) - set(rows[0]) or None in rows[0]:
        raise Refused(f"{path}: want rows that ./run_all.sh fit wrote, with the columns {' '.join(COLUMNS)}")
    for number, row in enumerate(rows, 2):
        wanted = ["B", "Hq", "Hkv", "Sq", "Sk", "D", "sms", *["us", "clock_mhz"] * (row["check"] == "PASS")]
        try:
            good = all(0 < float(row[name]) < math.inf for name in wanted)
        except (ValueError, TypeError):
            good = False
        if not good:
            raise Refused(f"{path}: row {number} lacks a number or has one that is not positive")
    if not any(row["check"] == "PASS" for row in rows):
        raise Refused(f"{path}: no row of it has passed")
    return rows


def newest(table, kind=""):
    """The newest file of a table's tiles on the list of problems, or of that kind; None if there is none."""
    wanted = {table, kind} - {""}
    files = [file for file in Path(builds.ROOT, "results", "tuning").glob("*.csv")
             if {mark for mark in (*TABLES, "chunks", "drawn") if f"-{mark}-" in f"{file.stem}-"} == wanted]
    return max(files, key=report_rows.by_name, default=None)


def committed(table):
    """The newest rows of the list, and of --chunks."""
    files = [newest(table), newest(table, "chunks")]
    if not files[0]:
        raise Refused(f"results/tuning has no rows of {table}; measure them with: ./run_all.sh fit --table {table}")
    return [row for file in files if file for row in read_rows(file)]


def problem_of(row):
    """The problem of a row of fit, or of an executable."""
    sizes = (int(row[name]) for name in ("B", "Hq", "Hkv", "Sq", "Sk", "D"))
    left = (row.get("window") or "-1").split(":")[0]
    return engine.Problem(row["shape"], *sizes, row["dtype"], row["causal"], int(left))


def measured(rows):
    """Of the rows that passed {problem: {tile's knobs: us}}, the SMs, and the highest clock in MHz."""
    found, passed = {}, [row for row in rows if row["check"] == "PASS"]
    for row in passed:
        found.setdefault(problem_of(row), {})[row["tile"]] = float(row["us"])
    return found, int(rows[0]["sms"]), max(float(row["clock_mhz"]) for row in passed)


# ---- the fit ----

def with_costs(tile, costs):
    """The same tile at other costs."""
    return Tile(*(getattr(tile, name) for name, _ in Tile._fields_[:-2]), *costs)


def fit_costs(model, tiles, times, sms, mhz):
    """These tiles at the costs for which the model comes nearest to their times, in logarithms. A problem on which a
    tile takes twice as long as the quickest one counts half for it, and one on which it is SLOW not at all, since there
    it is not chosen anyway. A cost on which no time depends stays."""
    from scipy import optimize

    def fitted(tile):
        problems = [problem for problem, us in times.items() if us.get(tile.knobs, math.inf) < SLOW * min(us.values())]
        clocks = np.array([times[problem][tile.knobs] * mhz for problem in problems])
        weights = np.array([min(times[problem].values()) / times[problem][tile.knobs] for problem in problems])
        params = model.params(problems)
        start = np.maximum(np.log(tile.costs), LEAST)

        def misses(logarithms):
            modelled = model.clocks([with_costs(tile, np.exp(logarithms))], params, sms)[:, 0]
            return np.append(weights * np.log(modelled / clocks), KEEP * (logarithms - start))
        found = optimize.least_squares(misses, start, bounds=(LEAST - 1e-6, math.inf), loss="soft_l1", f_scale=0.05).x
        return with_costs(tile, [float(f"{cost:.3g}") for cost in np.exp(found)])
    return [fitted(tile) for tile in tiles]


def losses(model, tiles, times, sms):
    """{problem: (the tile that the model chooses, how much longer than the quickest one it takes, as a share)}."""
    found = {}
    for problem, us in times.items():
        own = [tile for tile in tiles if tile.head_dim == problem.D and tile.knobs in us]
        # Of equal costs the first, as choose_tile() has it.
        chosen = own[int(model.clocks(own, model.params([problem]), sms).argmin())]
        found[problem] = chosen, us[chosen.knobs] / min(us[tile.knobs] for tile in own) - 1
    return found


def left_out(model, tiles, times, sms, mhz):
    """losses() of problems that the costs were not fitted to: FOLDS fits, each of which leaves other problems out."""
    found, order = {}, np.random.default_rng(1).permutation(len(times))
    for fold in range(FOLDS):
        tested = {problem: us for (problem, us), place in zip(times.items(), order) if place % FOLDS == fold}
        known = {problem: us for problem, us in times.items() if problem not in tested}
        found.update(losses(model, fit_costs(model, tiles, known, sms, mhz), tested, sms))
    return found


def worst_loss(problem):
    """How much the table may lose on it."""
    bytes_of_kv = 1 if problem.dtype.rpartition("/")[2] in engine.FACTORS else 2
    size = 2 * problem.B * problem.Hkv * problem.Sk * problem.D * bytes_of_kv
    return WORST_LOSS_THERE if problem.Sq == 1 and L2_EDGE[0] < size < L2_EDGE[1] else WORST_LOSS


def short(tile):
    """A name for a column."""
    marks = "".join(mark for knob, mark in zip(tile.FLAGS[3:], "pstgmr") if knob in tile.flags)
    return f"{tile.block_m}x{tile.block_n}x{tile.split_kv}{marks}"


def print_choices(tiles, times, tables):
    """For each problem the quickest tile, and what each table's choice loses."""
    names = {tile.knobs: short(tile) for tile in tiles}
    print(f"{'D':>3} {'problem':<24} {'quickest':<12} {'us':>9}" +
          "".join(f"  {title:<12} {'loses':>6}" for title in tables))
    for problem, us in times.items():
        best = min((knobs for knobs in us if knobs in names), key=us.get)
        print(f"{problem.D:>3} {str(problem):<24} {names[best]:<12} {us[best]:9.2f}" + "".join(
            f"  {short(found[problem][0]):<12} {100 * found[problem][1]:5.1f}%" for found in tables.values()))
    for title, found in tables.items():
        print_losses(title, found)
    print("(tile: BLOCK_M x BLOCK_N x SPLIT_KV; p ping-pong, s skips the mask, t transposed, g heads as rows, "
          "m mma.sync, r ranges)")


def print_losses(title, found):
    lost = [loss for _, loss in found.values()]
    print(f"{title}: the quickest on {lost.count(0)} of {len(lost)} problems, "
          f"loses {100 * np.mean(lost):.2f}% on average and {100 * max(lost):.1f}% at most")


def check(rows):
    """Judges the table in sdpa.cu by rows; prints what is bad. Whether nothing is."""
    has_mma, dtype = any("USE_MMA_SYNC=1" in row["tile"] for row in rows), rows[0]["dtype"]
    table_of = {type_: table for table, (type_, _) in TABLES.items() if type_ != "fp16"}
    model = Model(table_of.get(dtype, "ampere" if has_mma else "hopper"))
    times, sms, mhz = measured(rows)
    tiles = [tile for tile in model.tiles if any(map(tile.suits, times))]
    found = losses(model, tiles, times, sms)
    print_choices(tiles, times, {"sdpa.cu": found})
    unknown = left_out(model, tiles, times, sms, mhz)
    print_losses("fitted without the problem", unknown)
    bad = [f"never timed: {tile.knobs}; run ./run_all.sh fit on {rows[0]['device']}" for tile in tiles
           if not any(tile.knobs in us for us in times.values())]
    for problem, (tile, loss) in found.items():
        if loss > worst_loss(problem):
            bad.append(f"D={problem.D} {problem}: {short(tile)} loses {100 * loss:.1f}%, "
                       f"more than {100 * worst_loss(problem):.0f}%")
    for what, each in (("the table", found), ("a table fitted without the problem", unknown)):
        mean = np.mean([loss for _, loss in each.values()])
        if mean > MEAN_LOSS:
            bad.append(f"{what} loses {100 * mean:.2f}% on average, more than {100 * MEAN_LOSS:.0f}%")
    print("\n".join(bad), end="\n" * bool(bad))
    return not bad


def print_fit(model, tiles, rows):
    """Fits those of the tiles that rows have times of; prints what they choose, and the table to paste."""
    times, sms, mhz = measured(rows)
    tiles = [tile for tile in tiles if any(tile.knobs in us for us in times.values())]
    if {problem.D for problem in times} - {tile.head_dim for tile in tiles}:
        raise Refused(f"these rows are not of the tiles of {model.table}; type another --table of {', '.join(TABLES)}")
    fitted = fit_costs(model, tiles, times, sms, mhz)
    print_choices(tiles, times, {"sdpa.cu": losses(model, tiles, times, sms),
                                 "fitted": losses(model, fitted, times, sms)})
    print(f"\n// For {rows[0]['device']}, fitted by ./run_all.sh fit:")
    for tile in fitted:
        print(tile.row(model.table))


def main():
    options = cli.parse_options(__doc__, cli.MOST)
    if options.words and not options.check:
        raise Refused(f"{options.words[0]}: only --check takes files by themselves; fit to one with --from")
    if options.check and (options.from_ or options.head_dim):
        raise Refused("--check takes files by themselves and judges all of their rows; drop --from and --head-dim")
    drawn = peers.drawn_by(options)
    if drawn and (options.check or options.from_):
        raise Refused("--drawn measures; --check and --from do not")
    if options.check:
        sets = [read_rows(path) for path in options.words] or [committed(options.table)]
        return 0 if all([check(rows) for rows in sets]) else 1
    model, dims = Model(options.table), [int(D) for D in options.head_dim or [64, 128, 256]]
    if options.from_:
        rows = [row for row in read_rows(options.from_) if int(row["D"]) in dims]
    else:
        gpu = engine.need_gpu("; --from CSV and --check need none")
        count = collections.Counter(tile.head_dim for tile in model.tiles)
        dims = [D for D in dims if options.head_dim or count[D] > 1]
        problems = [one._replace(dtype=model.dtype) for one in drawn if one.D in dims] if drawn else listed(
            dims, model.dtype, CHUNKS if options.chunks else SHAPES)
        if not problems:
            raise Refused("none of the drawn problems has such a --head-dim")
        name = "-".join([options.table, *["chunks"] * bool(options.chunks), *["drawn"] * bool(drawn)])
        table = engine.Table(engine.results_path("tuning", gpu.name, name, new=True), COLUMNS)
        rows = measure(gpu, model, [tile for tile in model.tiles if tile.head_dim in dims], problems, table)
        say(f"rows: {table.name}")
    print_fit(model, model.tiles, rows)
    return 0
