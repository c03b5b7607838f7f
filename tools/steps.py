"""The speed claims of configs.txt, gate:step-over=NAME:FACTOR[@SHAPE]: a line is timed in turns with the one that it
claims to be FACTOR times as fast as, on SHAPE, or mission and long. `./run_all.sh gates --time` does so, into
results/steps/DATE-DEVICE.csv."""
import os
import re
import sys

import builds
import engine

COLUMNS = "line over shape speed_up low high pairs thrown_out line_us over_us device driver git_sha".split()


def parse_claims(gates):
    """(the other, FACTOR, SHAPE or "") of each claim among a line's gates."""
    return re.findall(r"gate:step-over=(\w+):([\d.]+)(?:@(\w+))?", " ".join(gates))


def claims(only):
    """(line, the other, shape) of each claim of the lines whose names match."""
    for line in builds.lines_named(only):
        for other, _, shape in parse_claims(line.gates):
            yield from ((line.name, other, one) for one in ([shape] if shape else ["mission", "long"]))


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


def time_claims(only):
    """Times the claims of the lines whose names match; the path of the rows."""
    gpu = engine.need_gpu("; without --time the claims are judged by the newest of results/steps")
    wanted = list(claims(only))
    names = list(dict.fromkeys(name for line, other, _ in wanted for name in (other, line)))
    lines = dict(zip(names, builds.parse_contenders(names)))
    lines = {name: line for name, line in lines.items() if line.runs_on(gpu.arch)}
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
    return os.path.join(builds.ROOT, table.name)
