"""usage: ./run_all.sh micro [--family F|--from LINE] [--head-dim D] [--tiles N] [--top N] [--output CSV]
       ./run_all.sh micro --backward [--output CSV]
Measures the time per iteration of the tile loop in a family's kernels, for many tiles. `tune --seed-from CSV` starts with
the best ones. Each kernel runs with as many CTAs as fit on the GPU, all with the same K and V, which stay in L2, for two
numbers of keys; the difference excludes launch, prologue and epilogue. Times are from replayed graphs, so the kernels are
unchanged. The tiles are LINE with other BLOCK_M, BLOCK_N, STAGES, VEC_WIDTH and NUM_WARPS: the N legal ones that are
nearest in tune's search space.
  --family F    scalar, wmma, mma or wgmma; default wgmma if the GPU has it, else mma
  --from LINE   a line of configs.txt, optionally followed by knobs; default the family's fastest at long in results/lines
  --head-dim D  a multiple of 16; default LINE's
  --tiles N     number of timed tiles, including LINE's own (default 64)
  --top N       number of printed tiles (default 8); the CSV has all
  --backward    instead of tiles, times parts of the loop of backward_hopper_d128_bf16: its products, the store of dS to shared
                memory, the additions to dQ and the exchange of dS in a cluster
  --output CSV  a new file; default results/tuning/DATE-DEVICE-micro-NAME.csv, or results/variants/DATE-DEVICE-backward-parts.csv
exit: 0, 2 bad usage, 3 no tile could be timed, or the GPU or the disk failed
"""
import csv
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import backward_parts
import builds
import cli
import engine
import report_rows
from cli import Refused, say
from search import Space, base_line, family_lines, knobs_of, parse_line, refusal

WALKS = {"USE_TUNED=0", "PACK_GQA=0", "SPLIT_CTAS=1"}  # a CTA has rows of one head and iterates over all keys
KEYS = (2048, 6144)  # rounded down to whole iterations
COLUMNS = ("family D dtype sm line BLOCK_M BLOCK_N STAGES VEC_WIDTH NUM_WARPS ctas_per_sm registers few_us many_us "
           "ns_iteration ns_per_1000_pairs clock_mhz device driver cuda git_sha").split()
KIND, SIZES = COLUMNS[:4], COLUMNS[5:10]  # columns that must match the search, and columns of a tile


def trouble(line, arch):
    """The reason why the tile loop cannot be timed on a GPU; "" if it can."""
    if line.is_backward:
        return "a line of the backward pass, which has two loops over tiles"
    if lacks := WALKS - {*line.effective_knobs()}:
        return f"its CTAs split the keys, pack heads or choose the tile; append {' '.join(sorted(lacks))}"
    return refusal(line) if line.runs_on(arch) else f"it is a line for sm_{line.knob('arch')}, and the GPU is sm_{arch}"


def loop_line(options, arch):
    """The line to time."""
    line = base_line(options, arch)
    if not options.from_:
        source, = report_rows.newest(Path(builds.ROOT, "results"))["lines"]
        us = {row["config"]: us for row, us in report_rows.timed(source) if row["shape"] == "long"}
        line = min((one for one in family_lines(line.tree, line.family) if not trouble(one, arch)), default=line,
                   key=lambda one: (one.D != line.D, one.dtype != line.dtype, us.get(one.name, math.inf)))
    line = builds.change_line(line, f"HEAD_DIM={options.head_dim}") if options.head_dim else line
    if sentence := trouble(line, arch):
        raise Refused(f"{line.text}: {sentence}")
    return line


def tiles(line, count):
    """Legal lines with other tiles, sorted by their distance in the search space; the line itself is first."""
    space, own = Space(line, {}), knobs_of(line)
    axes, found = {knob: space.values.get(knob, [own[knob]]) for knob in SIZES}, []
    nearest = sorted(itertools.product(*axes.values()), key=lambda values: sum(
        abs(axis.index(value) - axis.index(own[knob])) for (knob, axis), value in zip(axes.items(), values)))
    with ThreadPoolExecutor(builds.JOBS) as pool:
        while nearest and len(found) < count:
            few, nearest = [space.line(dict(zip(axes, values))) for values in nearest[:count]], nearest[count:]
            found += [one for one, sentence in zip(few, pool.map(refusal, few)) if not sentence]
    return found[:count]


def ctas_per_sm(gpu, facts):
    """Computes the occupancy; each of an SM's four partitions allocates registers to warps in units of 256."""
    threads, shared, registers, most, reserved = map(gpu.attribute, (39, 81, 82, 106, 111))  # per SM; 111: reserved per CTA
    by_registers = 4 * 32 * (registers // 4 // (256 * math.ceil(facts.registers / 8)))
    return max(1, min(most, min(threads, by_registers) // facts.threads, shared // (facts.shared_bytes + reserved)))


def time_tile(gpu, line, built):
    """The row of a tile. Refuses a kernel that is wrong or does not run."""
    kernel, facts, knobs = engine.load(line, gpu, {line: built}), builds.facts(built), knobs_of(line)
    ctas, rows, keys = ctas_per_sm(gpu, facts), int(knobs["BLOCK_M"]), int(knobs["BLOCK_N"]) * int(knobs["SPLIT_KV"])
    sizes = f"1,{ctas * gpu.attribute(engine.SM_COUNT)},1,{rows}"
    problems = {n: engine.parse_problem(f"{sizes},{n // keys * keys}").typed(line.D, line.dtype, line.Dv) for n in KEYS}
    bench = engine.Bench(gpu, dict.fromkeys(KEYS, kernel), problems)
    for sentence in bench.trouble().values():
        raise Refused(f"{line.text}: {sentence}")
    series = engine.measure(gpu, bench.graphs, engine.PACE, blocks=3)
    bench.close()
    few, many = map(series.us, KEYS)
    ns = 1e3 * (many - few) / (KEYS[1] // keys - KEYS[0] // keys)  # of an iteration of a CTA
    if not ns > 0:
        raise Refused(f"{line.text}: more keys did not take longer, so the GPU is shared")
    return dict(knobs, family=line.family, D=line.D, dtype=line.dtype, sm=gpu.arch, line=line.text, ctas_per_sm=ctas,
                registers=facts.registers, few_us=f"{few:.3f}", many_us=f"{many:.3f}", ns_iteration=f"{ns:.1f}",
                ns_per_1000_pairs=round(1e3 * ns / (ctas * rows * keys), 4), clock_mhz=f"{series.clock(KEYS[1]):.0f}",
                **engine.measured_on(gpu))


def seeds(path, space, arch, count):
    """The best tiles of a CSV that are in the search space for a GPU ("": any), as lines."""
    wanted, found = [space.base.family, str(space.base.D), space.base.dtype, *[arch] * bool(arch)], []
    try:
        with open(path, newline="") as file:
            rows = sorted(csv.DictReader(file), key=lambda row: float(row["ns_per_1000_pairs"]))
        rows = [([row[name] for name in KIND], knobs_of(parse_line(space.tree, row["line"]))) for row in rows]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, csv.Error):
        raise Refused(f"{path}: want a CSV of ./run_all.sh micro, for a line of configs.txt") from None
    for kind, knobs in rows:
        if kind[:len(wanted)] != wanted:
            raise Refused(f"{path} has tiles for {' '.join(kind)}, but the search is for {' '.join(wanted)}")
        if all(knobs[knob] in values for knob, values in space.values.items()):
            found.append(space.line({knob: knobs[knob] for knob in space.values}))
    if not found:
        raise Refused(f"{path}: none of its tiles is in this search space")
    return found[:count]


def main():
    options, gpu, rows = cli.parse_options(__doc__), engine.find_gpu(), []
    if options.backward and (options.family or options.from_ or options.head_dim):
        raise Refused("--backward has a line of its own; omit --family, --from and --head-dim")
    line = None if options.backward else loop_line(options, gpu.arch if gpu else "90a")
    if options.output and Path(options.output).exists():
        raise Refused(f"--output {options.output}: this file already exists")
    if options.backward:
        say(f"rows: {backward_parts.measure(gpu or engine.need_gpu(), options.output)}")
        return 0
    gpu, name = gpu or engine.need_gpu(), f"micro-{line.family}-D{line.D}-{line.dtype}"
    table = engine.Table(options.output or engine.results_path("tuning", gpu.name, name, new=True), COLUMNS)
    for one, built in builds.build(tiles(line, options.tiles), gpu.arch, progress=builds.show_progress()).items():
        try:
            rows.append(time_tile(gpu, one, built))
            table.add(**rows[-1])
        except Refused as error:
            say(error)
            gpu.synchronize()  # fails if the CUDA context is broken
    if not rows:
        raise Refused("no tile could be timed", 3)
    print(f"{line.text}, D={line.D} {line.dtype}, on {gpu.name}: {len(rows)} tiles by ns per 1,000 (row, key) pairs on an SM,")
    print("since larger tiles have longer iterations\nns/1000 pairs  ns/iteration", *SIZES, sep="  ")
    for row in sorted(rows, key=lambda row: row["ns_per_1000_pairs"])[:options.top]:
        sizes = (f"{row[knob]:>{len(knob)}}" for knob in SIZES)
        print(f"{row['ns_per_1000_pairs']:13.4f}", f"{row['ns_iteration']:>12}", *sizes, sep="  ")
    say(f"rows: {table.name}; to start a search with them: ./run_all.sh tune --family {line.family} "
        f"--head-dim {line.D} --dtype {line.dtype} --seed-from {table.name}")
    return 0
