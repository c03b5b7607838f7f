#!/usr/bin/env python3
"""How far O is off by the number of keys: of N(0,1) inputs, and of equal logits, which show what a sum loses.

usage: tools/accuracy.py CONTENDER... [--keys N,N...]

  CONTENDER  as for ab: a line of configs.txt with or without KNOB=VALUE..., or torch:cudnn, which takes part in every
             type that the lines have
  --keys N,N...  (default 1024,4096,16384,65536,131072)

Each problem has one batch, 2 heads and 256 queries. CSV on stdout, kept as results/accuracy/DATE-DEVICE.csv too, a row
for each contender, input and number of keys: rel_rms, the rms error over the rms of the reference in float64, and for
equal logits (Q is 0, V from 1 to 2) the mean of O over the mean of V. A peer's O has the type of its inputs.
exit: 0, 2 bad usage, 3 the GPU failed
"""
import builds
import cli
import engine
import numpy as np  # behind cli, which says what to do where it is missing
from cli import Refused, say

HEADS, QUERIES = 2, 256
COLUMNS = "contender input D dtype Sk rel_rms mean device driver cuda git_sha".split()


def equal_logits(rng, name, count):
    """What Q, K or V is then, in float32."""
    if name == "Q":
        return np.zeros(count, np.float32)
    return 1 + rng.random(count, np.float32) if name == "V" else engine.normal(rng, name, count)


def rows_of(gpu, kernels, D, dtype, keys):
    """A row for each contender that takes D and dtype and each kind of input."""
    problem = engine.parse_problem(f"1,{HEADS},{HEADS},{QUERIES},{keys},{D},{dtype}")
    for kind, draw in (("N(0,1)", engine.normal), ("equal logits", equal_logits)):
        bench = engine.Bench(gpu, {}, {"": problem}, draw=draw)
        for kernel in (one for one in kernels if problem.fits(one.line)):
            try:
                check, (O, _), *_ = bench.run(kernel, problem)
            except engine.CudaError as error:
                say(f"accuracy.py: {kernel.text}: {error}")
                continue
            row = dict(contender=kernel.text, input=kind, D=D, dtype=dtype, Sk=keys, rel_rms=f"{check.rel_rms:.4f}",
                       **engine.measured_on(gpu))
            if draw is equal_logits:
                true = np.mean([bench.tensors.rows("V", problem, 0, h) for h in range(HEADS)])
                row["mean"] = f"{O.astype(float).mean() / true:.5f}"
            yield row
        bench.close()


def main():
    options = cli.parse_options(__doc__, cli.MOST)
    contenders = builds.parse_contenders(options.words)
    lines = [one for one in contenders if isinstance(one, builds.Line)]
    if not lines:
        raise Refused("which line?")
    keys = [cli.number("--keys", word) for word in options.keys.split(",")]
    gpu = engine.need_gpu(does="runs kernels")
    built = builds.build(lines, gpu.arch)
    kernels = [engine.load(one, gpu, built) for one in contenders]
    table = engine.Table(engine.results_path("accuracy", gpu.name, new=True), COLUMNS, printed=True)
    for D, dtype in sorted({(line.D, line.dtype) for line in lines}):
        for count in keys:
            for row in rows_of(gpu, kernels, D, dtype, count):
                table.add(**row)


if __name__ == "__main__":
    cli.command("accuracy.py", main)
