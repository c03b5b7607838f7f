#!/usr/bin/env python3
"""usage: tests/ab_trial.py [OPTION...]
Are the verdicts of ab correct? Runs comparisons with known results on this machine's GPU:
  same       60 of a line with itself (in separate libraries); at most 1 verdict may differ from SAME
  1%         40 in which B has 1% more keys; at least 39 must be SLOWER
  0.5%       20 in which B has 0.5% more keys; at least 12 must be SLOWER, none FASTER
  neighbour  20 of the first two kinds, during which another process starts to copy memory; none may be wrong (UNCLEAR
             is accepted)
Each verdict is immediately added to results/ab/DATE-DEVICE-trial.csv. Takes minutes.
  --only same|1%|0.5%|neighbour  run only this kind; repeatable
exit: 0 all requirements are met, 1 they are not, 2 bad usage
"""
import collections
import itertools
import multiprocessing
import os
import random
import shutil
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tools"))
import builds  # noqa: E402
import cli  # noqa: E402
import engine  # noqa: E402
from cli import say  # noqa: E402

SMALL = "scalar_async2_tile64 wmma_all mma_split2 mma_lazy wgmma hopper"
SAME = [("small", SMALL, 2), ("mission", SMALL, 2), ("long", SMALL, 2),
        ("4,32,32,4096,4096", "mma_lazy wgmma hopper", 3), ("1,8,8,4096,4096", "mma_d256 wgmma_d256", 3),
        ("4,32,32,8192,8192,128,fp16,br", "mma_d128 wgmma_d128_causal hopper_d128", 3)]
# Lines with a single tile, and pairs of sizes that differ by one tile of keys.
MORE_KEYS = [("scalar_async2_tile64", "1,8,8,512"), ("wmma_all", "1,8,8,1024"), ("mma_split4", "1,8,8,512"),
             ("mma_split2", "1,8,8,2048"), ("mma_lazy", "1,8,8,2048"), ("wgmma_192x128", "1,8,8,2048"),
             ("wgmma", "4,32,32,4096"), ("mma_d128", "1,16,16,4096"), ("wgmma_d128_causal", "1,16,16,4096"),
             ("wgmma_d256", "1,8,8,4096")]
COLUMNS = ("kind expected seconds " + " ".join(engine.VERDICT_COLUMNS)).split()


def trials():
    """(kind, line, problem of A, problem of B, count) of all cases."""
    for shape, lines, count in SAME:
        yield from (("same", line, shape, shape, count) for line in lines.split())
    for line, shape in MORE_KEYS:
        yield "1%", line, shape + ",12800", shape + ",12928", 4
    for line, shape in MORE_KEYS[1::2]:
        yield "0.5%", line, shape + ",25600", shape + ",25728", 4
    for line, shape in MORE_KEYS[::2]:
        yield "neighbour", line, shape + ",12800", shape + ",12800", 2
        yield "neighbour", line, shape + ",12800", shape + ",12928", 2


def expected(kind, a, b):
    """The correct verdicts."""
    right = "SAME" if a == b else "SLOWER"
    return (right, "UNCLEAR") if kind == "neighbour" else (right,)


def holds(kind, found):
    """True if the verdicts of a kind, (expected, found) each, meet its requirements."""
    right = sum(verdict in wanted for wanted, verdict in found)
    if kind == "0.5%":
        return right >= 0.6 * len(found) and all(verdict != "FASTER" for _, verdict in found)
    return right >= len(found) - (0 if kind == "neighbour" else 1)


def copy_memory(copying):
    """The neighbour, a separate process: copies memory while the event is set."""
    gpu, size = engine.Cuda(), 1 << 28
    a, b = gpu.allocate(size), gpu.allocate(size)
    while multiprocessing.parent_process().is_alive():
        if copying.wait(1):
            for to, source in ((a, b), (b, a)):
                gpu("cuMemcpyDtoDAsync_v2", to, source, size, gpu.stream)
            gpu.synchronize()


def run_case(gpu, kernels, kind, a, b, count, copying, table):
    """Runs trials of a case and yields their verdicts."""
    bench, wanted = engine.Bench(gpu, kernels, {"A": a, "B": b}), expected(kind, a, b)
    bad = bench.trouble()
    if bad:
        raise builds.Refused(f"{kernels['A'].text} at {a}: {next(iter(bad.values()))}", 1)
    for _ in range(count):
        begin = time.monotonic()
        if kind == "neighbour":
            timer = threading.Timer(engine.FIRST_WARM_UP_S + random.random() * 0.6, copying.set)
            timer.start()
        series, found = engine.compare(gpu, bench.graphs)
        if kind == "neighbour":
            timer.join()
            copying.clear()
            time.sleep(0.1)
        table.add(kind=kind, expected=" or ".join(wanted), seconds=f"{time.monotonic() - begin:.2f}",
                  **engine.verdict_row(bench, series, "A", "B", found["B"]))
        yield wanted, found["B"].verdict
    bench.close()


def main():
    only = cli.parse_options(__doc__).only
    gpu = engine.need_gpu()
    cases = [case for case in trials() if not only or case[0] in only]
    lines = {line.name: line for line in builds.parse_contenders([case[1] for case in cases])}
    built = builds.build([line for line in lines.values() if line.runs_on(gpu.arch)], gpu.arch)
    kernels = {}
    for line, one in built.items():
        kernels[line.name] = {"A": engine.load(line, gpu, built)}
        kernels[line.name]["B"] = engine.LoadedLine(line, shutil.copy(one.path, one.path + ".copy"))
    table = engine.Table(engine.results_path("ab", gpu.name, "trial", new=True), COLUMNS)
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    copying, found, begin = context.Event(), collections.defaultdict(list), time.monotonic()
    context.Process(target=copy_memory, args=(copying,), daemon=True).start()
    for kind, name, a, b, count in cases:
        if name not in kernels:
            say(f"{name} is left out: {gpu.name} is sm_{gpu.arch}")
            continue
        a, b = (engine.parse_problem(text).typed(lines[name].D, lines[name].dtype) for text in (a, b))
        verdicts = list(run_case(gpu, kernels[name], kind, a, b, count, copying, table))
        found[kind] += verdicts
        say(f"{time.monotonic() - begin:5.0f} s  {kind:<9}  {name:<20} {str(a):<22} {str(b):<22} "
            f"{' '.join(verdict for _, verdict in verdicts)}")
    for kind, verdicts in found.items():
        right = sum(verdict in wanted for wanted, verdict in verdicts)
        claimed = "as claimed" if holds(kind, verdicts) else "NOT AS CLAIMED"
        print(f"{kind}: {right} of {len(verdicts)} right, {claimed}")
    print(f"rows: {table.name}")
    return 0 if all(itertools.starmap(holds, found.items())) else 1


if __name__ == "__main__":
    cli.command("ab_trial.py", main)
