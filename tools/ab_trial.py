#!/usr/bin/env python3
"""usage: tools/ab_trial.py [OPTION...]
Are the verdicts of ab to be trusted? Comparisons whose answer is known, on this machine's GPU:
  same       60 of a line with itself (each side a library of its own); at most 1 may be other than SAME
  1%         40 in which B has 1% more keys; at least 39 must be SLOWER
  0.5%       20 in which B has 0.5% more keys; at least 12 must be SLOWER, none FASTER
  neighbour  20 of the first two kinds while, from somewhere in the middle on, another process copies memory;
             none may be wrong: UNCLEAR is right
Each is a row of results/ab/DATE-DEVICE.csv as soon as it is decided. Takes minutes.
  --only same|1%|0.5%|neighbour  these alone; repeatable
exit: 0 all of that holds, 1 it does not, 2 bad usage
"""
import os
import random
import shutil
import subprocess
import sys
import threading
import time

import builds
import cli
import engine
from cli import say

SMALL_PROBLEMS = [(line, shape) for shape in ("small", "mission", "long") for line in
                  ("scalar_async2_tile64", "wmma_all", "mma_split2", "mma_lazy", "wgmma", "hopper")]
LARGE_PROBLEMS = [(line, "4,32,32,4096,4096") for line in ("mma_lazy", "wgmma", "hopper")] + \
                 [(line, "4,32,32,8192,8192,128,fp16,br") for line in ("mma_d128", "wgmma_d128_causal", "hopper_d128")] + \
                 [(line, "1,8,8,4096,4096") for line in ("mma_d256", "wgmma_d256")]
# Lines that compute every problem by the same tile, and sizes with fewer keys than the second by a tile of each.
MORE_KEYS = [("scalar_async2_tile64", "1,8,8,512"), ("wmma_all", "1,8,8,1024"), ("mma_split4", "1,8,8,512"),
             ("mma_split2", "1,8,8,2048"), ("mma_lazy", "1,8,8,2048"), ("wgmma_192x128", "1,8,8,2048"),
             ("wgmma", "4,32,32,4096"), ("mma_d128", "1,16,16,4096"), ("wgmma_d128_causal", "1,16,16,4096"),
             ("wgmma_d256", "1,8,8,4096")]
COLUMNS = ("kind expected seconds " + " ".join(engine.VERDICT_COLUMNS)).split()


def trials():
    """(kind, line, problem of A, problem of B, how many) of every case."""
    for line, shape in SMALL_PROBLEMS:
        yield "same", line, shape, shape, 2
    for line, shape in LARGE_PROBLEMS:
        yield "same", line, shape, shape, 3
    for line, shape in MORE_KEYS:
        yield "1%", line, shape + ",12800", shape + ",12928", 4
    for line, shape in MORE_KEYS[1::2]:
        yield "0.5%", line, shape + ",25600", shape + ",25728", 4
    for line, shape in MORE_KEYS[::2]:
        yield "neighbour", line, shape + ",12800", shape + ",12800", 2
        yield "neighbour", line, shape + ",12800", shape + ",12928", 2


def expected(kind, a, b):
    """The verdicts that are right."""
    right = "SAME" if a == b else "SLOWER"
    return (right, "UNCLEAR") if kind == "neighbour" else (right,)


def holds(kind, found):
    """Whether the verdicts of a kind, (expected, found) each, keep what is claimed of it."""
    right = sum(verdict in wanted for wanted, verdict in found)
    if kind == "0.5%":
        return right >= 0.6 * len(found) and all(verdict != "FASTER" for _, verdict in found)
    return right >= len(found) - (0 if kind == "neighbour" else 1)


class Neighbour:
    """Another process that copies memory to and fro while it is told to."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, __file__, "--be-the-neighbour"], stdin=subprocess.PIPE, text=True)

    def tell(self, word):
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def be_the_neighbour():
    gpu, size, copying = engine.Cuda(), 1 << 28, threading.Event()
    a, b = gpu.allocate(size), gpu.allocate(size)

    def copy():
        gpu("cuCtxSetCurrent", gpu.context)
        while True:
            copying.wait()
            for to, source in ((a, b), (b, a)):
                gpu("cuMemcpyDtoDAsync_v2", to, source, size, gpu.stream)
            gpu.synchronize()
    threading.Thread(target=copy, daemon=True).start()
    for word in sys.stdin:
        copying.set() if word.strip() == "go" else copying.clear()
    os._exit(0)


def run_case(gpu, kernels, kind, a, b, count, neighbour, table):
    """So many trials of one case; yields their verdicts."""
    bench = engine.Bench(gpu, kernels, {"A": a, "B": b})
    trouble = list(bench.skipped.values()) + [check.sentence for check in bench.checks.values() if not check.passed]
    if trouble:
        raise builds.Refused(f"{kernels['A'].text} at {a}: {trouble[0]}", 1)
    for _ in range(count):
        begin = time.monotonic()
        if kind == "neighbour":
            timer = threading.Timer(engine.FIRST_WARM_UP_S + random.random() * 0.6, neighbour.tell, ["go"])
            timer.start()
        series, found = engine.compare(gpu, bench.graphs)
        if kind == "neighbour":
            timer.join()
            neighbour.tell("stop")
            time.sleep(0.1)
        wanted = expected(kind, a, b)
        table.add(kind=kind, expected=" or ".join(wanted), seconds=f"{time.monotonic() - begin:.2f}",
                  **engine.verdict_row(bench, series, "A", "B", found["B"]))
        yield wanted, found["B"].verdict
    bench.close()


def main():
    if sys.argv[1:] == ["--be-the-neighbour"]:
        be_the_neighbour()
    only = cli.parse_options(__doc__).only
    gpu = engine.need_gpu()
    cases = [case for case in trials() if not only or case[0] in only]
    lines = dict(zip((case[1] for case in cases), builds.parse_contenders([case[1] for case in cases])))
    runs_here = {name: line for name, line in lines.items() if line.runs_on(gpu.arch)}
    built = builds.build(runs_here.values(), gpu.arch)
    kernels = {}
    for name, line in runs_here.items():
        a = engine.load(line, gpu, built)
        shutil.copy(built[line].path, built[line].path + ".copy")
        kernels[name] = {"A": a, "B": engine.LoadedLine(line, built[line].path + ".copy")}
    table = engine.Table(engine.results_path("ab", gpu.name, new=True), COLUMNS)
    neighbour, found, begin = Neighbour(), {}, time.monotonic()
    for kind, name, a, b, count in cases:
        if name not in kernels:
            say(f"{name} is left out: {gpu.name} is sm_{gpu.arch}")
            continue
        line = lines[name]
        a, b = (engine.parse_problem(text).typed(line.D, line.dtype) for text in (a, b))
        verdicts = list(run_case(gpu, kernels[name], kind, a, b, count, neighbour, table))
        found.setdefault(kind, []).extend(verdicts)
        print(f"{time.monotonic() - begin:5.0f} s  {kind:<9}  {name:<20} {str(a):<22} {str(b):<22} "
              f"{' '.join(verdict for _, verdict in verdicts)}", file=sys.stderr)
    neighbour.close()
    failed = False
    for kind, verdicts in found.items():
        failed |= not holds(kind, verdicts)
        right = sum(verdict in wanted for wanted, verdict in verdicts)
        print(f"{kind}: {right} of {len(verdicts)} right, {'as claimed' if holds(kind, verdicts) else 'NOT AS CLAIMED'}")
    print(f"rows: {table.name}")
    return 1 if failed else 0


if __name__ == "__main__":
    cli.command("ab_trial.py", main)
