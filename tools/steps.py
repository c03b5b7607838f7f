#!/usr/bin/env python3
"""usage: ./run_all.sh gates --time [--only REGEX]     (it runs this first)
Times the claims of configs.txt, gate:step-over=NAME:FACTOR[@SHAPE]: each line in turns with the one that it
claims to be FACTOR times as fast as, on SHAPE, or mission and long. Writes results/steps/DATE-DEVICE.csv and
prints its name."""
import re
import sys

import builds
import engine

COLUMNS = "line over shape speed_up low high pairs thrown_out line_us over_us device driver git_sha".split()


def claims(only):
    """(line, the other, shape) of each gate:step-over of the lines whose names match."""
    for name, line in builds.Tree().config_lines().items():
        for other, shape in re.findall(r"gate:step-over=(\w+):[\d.]+(?:@(\w+))?", " ".join(line.gates)):
            if re.search(only, name):
                yield from ((name, other, one) for one in ([shape] if shape else ["mission", "long"]))


def time_claim(gpu, kernels, shape):
    """A row for two lines at one shape; a line that is wrong has none."""
    line = kernels["line"].line
    problem = engine.parse_problem(shape).typed(line.D, line.dtype)
    bench = engine.Bench(gpu, kernels, dict.fromkeys(kernels, problem))
    row = None
    if len(bench.fit_to_time()) == 2:
        series, found = engine.compare(gpu, bench.graphs)
        v = found["line"]
        row = dict(line=line.name, over=kernels["over"].line.name, shape=shape, speed_up=f"{1 / v.ratio:.4f}",
                   low=f"{1 / v.high:.4f}", high=f"{1 / v.low:.4f}", pairs=v.pairs, thrown_out=v.thrown_out,
                   line_us=f"{series.us('line'):.3f}", over_us=f"{series.us('over'):.3f}", device=gpu.name,
                   driver=gpu.nvml.driver, git_sha=engine.git_sha())
    bench.close()
    return row


def main():
    gpu = engine.find_gpu()
    if not gpu:
        raise builds.Refused("--time needs a GPU, and there is none here; without it the claims are judged by the newest "
                             "of results/steps")
    wanted = list(claims(sys.argv[1] if sys.argv[1:] else ""))
    names = list(dict.fromkeys(name for line, other, _ in wanted for name in (other, line)))
    lines = dict(zip(names, builds.parse_contenders(names)))
    lines = {name: line for name, line in lines.items() if line.knob("arch", gpu.arch) == gpu.arch}
    built = builds.build(lines.values(), gpu.arch)
    loaded = {name: engine.load(line, gpu, built) for name, line in lines.items()}
    table = engine.Table(engine.results_path("steps", gpu.name, new=True), COLUMNS)
    for name, other, shape in wanted:
        if name in loaded and other in loaded:
            row = time_claim(gpu, {"over": loaded[other], "line": loaded[name]}, shape)
            if row:
                table.add(**row)
            else:
                print(f"gates: {name} over {other} at {shape}: one of them is wrong, so neither gets a time", file=sys.stderr)
    print(table.name)
    return 0


if __name__ == "__main__":
    engine.command("gates", main)
