"""usage: ./run_all.sh micro [--family F|--from LINE] [--head-dim D] [OPTION...]
What a round over a K/V tile costs the kernel of each legal tile, in clocks of one CTA alone and of as many as the GPU
holds. Tiles have the sizes that lines of the family have, in any combination that sdpa.cu allows, and LINE's other
knobs. Prints the N tiles that should be the fastest for a problem, by waves of CTAs times rounds, and writes all to
results/micro/DATE-DEVICE-NAME.json, from which `tune` starts. Barriers, bytes from global memory and bank conflicts
of a round are counted on the CPU backend: of the N tiles, or without a GPU of all.
  --family F          scalar, wmma, mma or wgmma; default wgmma
  --from LINE         the line that has the other knobs; default the family's first of this D
  --head-dim D        64, 128 or 256; default LINE's
  --shape S           the problem, as for ab (default long)
  --causal off|br|tl  (default off)
  --top N             so many tiles are printed (default 10)
  --only REGEX        these lines of configs.txt instead of tiles
exit: 0, 2 bad usage, 3 a tile could not be run
"""
import ctypes
import json
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import builds
import cli
import engine
import report_rows
from cli import Refused, say
from search import Space, base_line, family_lines, identity, knobs_of, parse_line

PROGRAM = "tools/micro.cu"
COUNTS = ("barriers", "global_bytes", "conflicts")  # of a round, on the CPU backend
GRID_ONLY = ("PACK_GQA", "SPLIT_CTAS")  # at other values than their defaults the grid deals the keys


# ---- what is measured ----

def tiles(line, D):
    """The line with every combination of sizes that lines of its family type."""
    lines = family_lines(line.tree, line.family)
    sizes = {knob: sorted({knobs_of(one)[knob] for one in lines}, key=int)
             for knob, (default, _, legal) in line.tree.knob_rows().items()
             if default.isdigit() and legal != "0 1" and knob not in ("HEAD_DIM", *GRID_ONLY)}
    space = Space(line, {knob: values for knob, values in sizes.items() if len(values) > 1}, True)
    space.base = space.line({"HEAD_DIM": str(D)})
    say(f"micro: asking the compiler which of {space.count()} combinations of sizes sdpa.cu allows")
    return list({identity(one): one for one in space.all()}.values())


def measurable(line):
    return not any(f"{knob}=" in identity(line) for knob in ("USE_TUNED", *GRID_ONLY))


def measure(lines, gpu):
    """{line, family, D, knobs, registers, and what tools/micro.cu prints} of each line that can be built and run."""
    progress, built = builds.show_progress(), []

    def host_library(line):
        try:
            return builds.Built(line, builds.host_library(*line.words, program=PROGRAM))
        except Refused as trouble:
            return builds.Built(line, trouble=str(trouble))
    if gpu:
        built = builds.build(lines, gpu.arch, program=PROGRAM, progress=progress).values()
    else:
        with ThreadPoolExecutor(builds.JOBS) as pool:
            for one in pool.map(host_library, lines):
                built.append(one)
                progress(len(built), len(lines), one.line.text)
    for one in built:
        text = ctypes.create_string_buffer(1024)
        if one.trouble or ctypes.CDLL(one.path).sdpa_micro(text, ctypes.c_size_t(1024)):
            say(f"micro: {one.line.text}: {one.trouble or text.value.decode()}")
            continue
        registers, spilled, *_ = builds.ptxas_report(one.log)
        yield dict(line=one.line.text, family=one.line.family, D=one.line.D, knobs=identity(one.line),
                   registers=registers, spilled=spilled, **json.loads(text.value))


# ---- what it says of a problem ----

def rows_and_keys(tile):
    """Of a round."""
    knobs = dict(word.split("=") for word in tile["knobs"].split())
    return int(knobs.get("BLOCK_M", 32)), int(knobs.get("BLOCK_N", 32)) * int(knobs.get("SPLIT_KV", 1))


def predict(tile, problem):
    """Clocks of the problem: waves of items, each of so many rounds."""
    rows, keys = rows_and_keys(tile)
    waves = math.ceil(problem.B * problem.Hq * math.ceil(problem.Sq / rows) / (tile["sms"] * tile["ctas_per_sm"]))
    rounds = math.ceil(problem.Sk / keys) if problem.causal == "off" else problem.visible().mean() / keys + 0.5
    round_clocks, item_clocks = tile["all_sms"]
    return waves * (item_clocks + rounds * round_clocks)


def read(path):
    try:
        with open(path) as file:
            return json.load(file)["tiles"]
    except (OSError, ValueError, KeyError, TypeError):
        raise Refused(f"{path}: want a file that ./run_all.sh micro wrote") from None


def newest(device, family, D):
    """The newest file of tiles that this GPU has for the family and D; None if there is none."""
    device = re.sub("[^A-Za-z0-9]+", "-", device)
    files = Path(builds.ROOT, "results", "micro").glob(f"????-??-??-{device}-{family}-D{D}*.json")
    return max(files, key=report_rows.by_name, default=None)


def seeds(path, space, problem, count):
    """The lines of a search's space that should be the fastest for the problem, by this file; without a file none."""
    own = [tile for tile in (read(path) if path else [])
           if (tile["family"], tile["D"]) == (space.base.family, problem.D) and "all_sms" in tile]
    found = {}
    for tile in sorted(own, key=lambda tile: predict(tile, problem)):
        line = parse_line(space.tree, tile["line"])
        if all(knobs_of(line)[knob] in values for knob, values in space.values.items()):
            line = space.line(space.knobs(line))
            found.setdefault(identity(line), line)
    return list(found.values())[:count]


def table(best, problem, count):
    """The best of `count` tiles, with a row of figures each."""
    print(f"{problem}: the first {len(best)} of {count} tiles, by waves * (item + rounds * round)")
    print(f"{'clocks':>10} {'round, 1 SM':>11} {'all SMs':>8} {'a score':>8} {'item':>7} {'CTAs/SM':>7} {'regs':>4} "
          f"{'barriers':>8} {'conflicts':>9}  line")
    for tile in best:
        a_score = tile["all_sms"][0] / math.prod(rows_and_keys(tile)) / tile["ctas_per_sm"]
        print(f"{predict(tile, problem):10.0f} {tile['one_sm'][0]:11.0f} {tile['all_sms'][0]:8.0f} {a_score:8.4f} "
              f"{tile['all_sms'][1]:7.0f} {tile['ctas_per_sm']:7} {tile['registers']:4} {tile.get('barriers', ''):>8} "
              f"{tile.get('conflicts', ''):>9}  {tile['line']}")


def counts(found, top):
    """Without a GPU: those with the fewest bytes and conflicts to a score."""
    print(f"{'bytes/score':>11} {'conflicts/score':>15} {'barriers':>8}  line")

    def of_a_score(tile):
        return [tile[name] / math.prod(rows_and_keys(tile)) for name in ("global_bytes", "conflicts")]
    for tile in sorted(found, key=of_a_score)[:top]:
        print("{:11.3f} {:15.3f} {:8}  {}".format(*of_a_score(tile), tile["barriers"], tile["line"]))


def main():
    options = cli.parse_options(__doc__)
    top, problem = options.top, engine.parse_problem(options.shape, options.causal)
    if options.only:
        lines, name = [line for line in builds.lines_named(options.only) if measurable(line)], "lines"
        if not lines:
            raise Refused("none of these lines has a tile of its own")
    else:
        options.head_dim = options.head_dim or str(problem.D or "")
        line = base_line(options)
        problem = problem.typed(int(options.head_dim or line.D), line.dtype)
        name = f"{line.family}-D{problem.D}"
    gpu = engine.find_gpu()
    if not gpu:
        say("micro: there is no GPU here: the CPU backend counts barriers, bytes and conflicts instead of clocks")
    if not options.only:
        lines = [one for one in tiles(line, problem.D) if measurable(one)]
    found = list(measure([line for line in lines if not gpu or line.knob("arch", gpu.arch) == gpu.arch], gpu))
    if not found:
        raise Refused("none of the tiles could be run", 3)
    if not gpu:
        counts(found, top)
        return 0
    best = sorted(found, key=lambda tile: predict(tile, problem))[:top]
    counted = {tile["line"]: tile for tile in measure([parse_line(lines[0].tree, tile["line"]) for tile in best], None)}
    for tile in best:
        tile.update({name: counted[tile["line"]][name] for name in COUNTS if tile["line"] in counted})
    path = engine.results_path("micro", gpu.name, name, new=True, ending=".json")
    about = dict(device=gpu.name, driver=gpu.nvml.driver, cuda=gpu.cuda, commit=engine.git_sha(), tiles=found)
    builds.replace_file(path, json.dumps(about, indent=1) + "\n")
    table(best, problem, len(found))
    say(f"micro: tiles: {os.path.relpath(path, builds.ROOT)}")
    return 0
