"""usage: ./run_all.sh fit [--table LINE] [--head-dim D]... [--chunks] [--drawn N [--seed S] | --from CSV]
       ./run_all.sh fit [--table LINE] --check [CSV]...
Does TUNED_TILES choose well, and would other costs choose better? Times each tile of the table, built as a separate line,
on a list of problems; fits the costs of sdpa.cu's model to the times; prints for each problem the fastest tile and the
tiles that both tables choose, with their loss; and prints the rows with the fitted costs, to paste into sdpa.cu. This is
how to make a table for another GPU. The times go to results/tuning/DATE-DEVICE-LINE[-chunks][-drawn].csv.
  --table hopper|hopper_bf16|ampere|hopper_e4m3|hopper_kv8_d128_bf16  the table (default hopper); ampere: mma.sync
  --head-dim 64|128|256  repeatable; default all with two or more tiles
  --drawn N      use N random problems, drawn as by tools/peers.py, instead of the list: a test of the table
  --seed N       the seed of these, from 0; default 0
  --chunks       use problems with few rows and many keys instead of the list; with --drawn, random ones
  --from CSV     fit to these rows without measuring
  --check        check the table in sdpa.cu with rows of results/tuning (default: the newest of the list and of --chunks),
                 without measuring
exit: 0, 1 with --check: the table chooses badly (a loss above 8% on a problem, or 35% with one query and K and V of
about the size of L2; or above 1% on average, also with costs fitted without the problem) or a tile was never timed,
2 bad usage, 3 a tile could not be run
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
FEW_ROWS = 1024  # query rows per key head
PACE, BLOCKS = engine.Pace(30e3, 10e3), 1
COLUMNS = ("D dtype shape B Hq Hkv Sq Sk causal tile us lo_us hi_us clock_mhz check device sms driver cuda "
           "git_sha").split()
NEW_COSTS = (5000, 6)  # of a tile, before fitting
LEAST = np.log([100, 1e-3])  # lower bounds of the logarithms of the costs
KEEP = 0.01  # residual of a cost that changes by a factor of e
SLOW = 2  # times slower than this multiple of the fastest tile are ignored
WORST_LOSS, MEAN_LOSS, FOLDS = 0.08, 0.01, 6
# Sizes of K and V close to an H200's L2, where times depend on the other contents of L2.
L2_EDGE, WORST_LOSS_THERE = (30e6, 55e6), 0.35
# {line with USE_TUNED=1: its type, and knobs of a build for the host that contains its table}.
TABLES = {"hopper": ("fp16", ""), "hopper_bf16": ("bf16", "DTYPE=BF16"), "ampere": ("fp16", "USE_MMA_SYNC=1 BLOCK_M=64"),
          "hopper_e4m3": ("e4m3", "DTYPE=FP8_E4M3 VEC_WIDTH=16"),
          "hopper_kv8_d128_bf16": ("bf16/e4m3", "DTYPE=BF16 KV_DTYPE=FP8_E4M3 VEC_WIDTH=16 USE_WGMMA=1 "
                                   "USE_WARP_SPECIALIZATION=1 BLOCK_M=64 NUM_WARPS=4")}


# ---- sdpa.cu's table and its model ----

class Tile(ctypes.Structure):
    """TunedTile of sdpa.cu: the knobs, then the costs."""
    _fields_ = ([(name.lower(), ctypes.c_bool if knob.values == "0 1" else ctypes.c_int)
                 for name, knob in builds.Tree().knob_rows().items()] +
                [("ctas", ctypes.c_int), ("item_clocks", ctypes.c_double), ("scores_per_clock", ctypes.c_double)])
    SIZES = ("HEAD_DIM", "BLOCK_M", "BLOCK_N", "NUM_WARPS", "STAGES", "SPLIT_KV")
    FLAGS = ("USE_WARP_SPECIALIZATION", "OVERLAP", "USE_PERSISTENT_CTA", "USE_PING_PONG", "SKIP_MASKED", "SWAP_AB",
             "PACK_GQA", "USE_MMA_SYNC", "SPLIT_CTAS")

    @property
    def flags(self):
        """The knobs that are on. SPLIT_CTAS=0 chooses the splits by the problem, 1 does not split."""
        return [knob for knob in self.FLAGS if getattr(self, knob.lower()) != (knob == "SPLIT_CTAS")]

    @property
    def sizes(self):
        return [getattr(self, knob.lower()) for knob in self.SIZES]

    @property
    def knobs(self):
        """The KNOB=VALUE list of a line with only this tile."""
        return " ".join([*map("{}={}".format, self.SIZES, self.sizes),
                         *(f"{knob}={int(knob != 'SPLIT_CTAS')}" for knob in self.flags), "USE_LAZY_MAX=1"])

    def line(self, tree, *words, table=None):
        """The line with only this tile of the table."""
        base = table or ("ampere" if self.use_mma_sync else "hopper")
        if self.use_mma_sync and base != "ampere":
            words = ("USE_WGMMA=0", "USE_CP_ASYNC=1", "SWIZZLE_XOR=1", *words)
        elif base == "hopper_e4m3" and self.block_n <= 64:  # the default is 8 tiles
            words = ("FP8_FLUSH=16", *words)
        return builds.Line(tree, base, ("USE_TUNED=0", *self.knobs.split(), *words))

    def suits(self, problem):
        """True if the tile is timed on a problem. Tiles with few rows and packed GQA are too slow for many rows."""
        is_small, rows = self.pack_gqa and self.block_m < 64, problem.Hq // problem.Hkv * problem.Sq
        return problem.D == self.head_dim and not (is_small and rows > FEW_ROWS)

    @classmethod
    def of(cls, line):
        """The row of the table for a line, before fitting; None if no row can represent the line."""
        tile = cls(ctas=1, item_clocks=NEW_COSTS[0], scores_per_clock=NEW_COSTS[1])
        for knob in cls.SIZES + cls.FLAGS:
            setattr(tile, knob.lower(), int(knobs_of(line)[knob]))
        twin = tile.line(line.tree, f"DTYPE={knobs_of(line)['DTYPE']}")
        return tile if identity(twin) == identity(line) else None

    @property
    def costs(self):
        return np.array([self.item_clocks, self.scores_per_clock])

    def row(self, table):
        """The row as source text."""
        implied = ["USE_WARP_SPECIALIZATION"] * self.overlap + ["USE_MMA_SYNC"] * (table == "ampere")
        implied += ["SPLIT_CTAS"] * self.pack_gqa
        flags = " ".join(knob for knob in self.flags if knob not in implied)
        costs = f"{self.item_clocks:g}, {self.scores_per_clock!r}"
        return f'    tile({", ".join(map(str, self.sizes))}, "{flags}", {self.ctas}, {costs}),'


class Model:
    """The tiles of a table and the cost model, compiled from sdpa.cu for the host."""

    def __init__(self, table="hopper"):
        self.table, (self.dtype, knobs) = table, TABLES[table]
        self.library = ctypes.CDLL(builds.host_library(*knobs.split()))
        first = ctypes.POINTER(Tile)()
        count = self.library.sdpa_library_tiles(ctypes.byref(first))
        self.tiles = [tile for tile in first[:count] if tile.head_dim]  # without the tiles of builds with a bias

    def clocks(self, tiles, params, sms):
        """Model times [problem][tile] of the problems from params()."""
        clocks = np.empty((len(params), len(tiles)))
        self.library.sdpa_library_tile_clocks((Tile * len(tiles))(*tiles), len(tiles), params, len(params), sms,
                                              clocks.ctypes.data_as(ctypes.c_void_p))
        return clocks

    @staticmethod
    def params(problems):
        """The problems as input of the model."""
        return (engine.SdpaParams * len(problems))(*map(engine.params_of, problems))


# ---- times ----

def listed(dims, dtype, shapes):
    """The problems at each D, with and without a mask; a mask has no effect on a single query."""
    problems = [engine.parse_problem(shape, causal).typed(D, dtype)
                for D in dims for causal in ("off", "br") for shape in shapes]
    return [one for one in problems if one.Sq > 1 or one.causal == "off"]


def measure(gpu, model, tiles, problems, table):
    """Times the suitable tiles on all problems and adds the rows to the table. Returns the rows."""
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
    """The rows of a CSV of fit. Refuses incomplete rows."""
    if not Path(path).exists():
        raise Refused(f"{path}: no such file")
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
        raise Refused(f"{path}: no row passed its check")
    return rows


def newest(table, kind=""):
    """The newest file with times of a table's tiles, for the list of problems or another kind; None if there is none."""
    wanted = {table, kind} - {""}
    files = [file for file in Path(builds.ROOT, "results", "tuning").glob("*.csv")
             if {mark for mark in (*TABLES, "chunks", "drawn") if f"-{mark}-" in f"{file.stem}-"} == wanted]
    return max(files, key=report_rows.by_name, default=None)


def committed(table):
    """The newest rows of the list and of --chunks."""
    files = [newest(table), newest(table, "chunks")]
    if not files[0]:
        raise Refused(f"results/tuning has no rows of {table}; measure them with: ./run_all.sh fit --table {table}")
    return [row for file in files if file for row in read_rows(file)]


def problem_of(row):
    """The problem of a row of fit or of an executable."""
    sizes = (int(row[name]) for name in ("B", "Hq", "Hkv", "Sq", "Sk", "D"))
    left = (row.get("window") or "-1").split(":")[0]
    return engine.Problem(row["shape"], *sizes, row["dtype"], row["causal"], int(left))


def measured(rows):
    """{problem: {knobs of a tile: us}} of the rows that passed, the number of SMs, and the highest clock in MHz."""
    found, passed = {}, [row for row in rows if row["check"] == "PASS"]
    for row in passed:
        found.setdefault(problem_of(row), {})[row["tile"]] = float(row["us"])
    return found, int(rows[0]["sms"]), max(float(row["clock_mhz"]) for row in passed)


# ---- the fit ----

def with_costs(tile, costs):
    """The tile with other costs."""
    return Tile(*(getattr(tile, name) for name, _ in Tile._fields_[:-2]), *costs)


def fit_costs(model, tiles, times, sms, mhz):
    """Fits the costs of the tiles to the logarithms of their times. The weight of a time is inversely proportional to its
    ratio to the fastest tile, and 0 if the tile is SLOW there, since it is not chosen then. Costs that do not affect any time
    are unchanged."""
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
    """{problem: (the tile that the model chooses, its loss relative to the fastest tile)}."""
    found = {}
    for problem, us in times.items():
        own = [tile for tile in tiles if tile.head_dim == problem.D and tile.knobs in us]
        # The first of equal costs, like choose_tile().
        chosen = own[int(model.clocks(own, model.params([problem]), sms).argmin())]
        found[problem] = chosen, us[chosen.knobs] / min(us[tile.knobs] for tile in own) - 1
    return found


def left_out(model, tiles, times, sms, mhz):
    """losses() by cross-validation: each of FOLDS fits leaves out other problems."""
    found, order = {}, np.random.default_rng(1).permutation(len(times))
    for fold in range(FOLDS):
        tested = {problem: us for (problem, us), place in zip(times.items(), order) if place % FOLDS == fold}
        known = {problem: us for problem, us in times.items() if problem not in tested}
        found.update(losses(model, fit_costs(model, tiles, known, sms, mhz), tested, sms))
    return found


def worst_loss(problem):
    """The largest acceptable loss on a problem."""
    bytes_of_kv = 1 if problem.dtype.rpartition("/")[2] in engine.FACTORS else 2
    size = 2 * problem.B * problem.Hkv * problem.Sk * problem.D * bytes_of_kv
    return WORST_LOSS_THERE if problem.Sq == 1 and L2_EDGE[0] < size < L2_EDGE[1] else WORST_LOSS


def short(tile):
    """A short name of a tile."""
    marks = "".join(mark for knob, mark in zip(tile.FLAGS[3:], "pstgmr") if knob in tile.flags)
    return f"{tile.block_m}x{tile.block_n}x{tile.split_kv}{marks}"


def print_choices(tiles, times, tables):
    """Prints the fastest tile of each problem, and the loss of each table's choice."""
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
    print(f"{title}: the fastest tile on {lost.count(0)} of {len(lost)} problems, "
          f"loss {100 * np.mean(lost):.2f}% on average and {100 * max(lost):.1f}% at most")


def check(rows):
    """Checks the table in sdpa.cu with rows and prints bad choices. Returns True if there are none."""
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
    """Fits the tiles that rows have times of. Prints their choices and the fitted table."""
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
