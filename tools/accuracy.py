#!/usr/bin/env python3
"""Errors of O by the number of keys: the relative rms error, and the bias of sums of positive terms.

usage: tools/accuracy.py CONTENDER... [--keys N,N...]

  CONTENDER  as for ab: a line of configs.txt with or without KNOB=VALUE..., or torch:cudnn or torch:fa3, which run with
             every type of the lines
  --keys N,N...  (default 1024,4096,16384,65536,131072)

Each problem has one batch, 2 heads and 256 queries. Inputs: N(0,1); N(0,1) with V from N(1,1) or N(8,1); and equal
logits (Q = 0, V between 1 and 2). Prints CSV and writes it to results/accuracy/DATE-DEVICE.csv, with a row for each
contender, input and number of keys. rel_rms is the rms error divided by the rms of the float64 reference; mean (if V has
a nonzero mean) is the mean of O divided by the mean of the reference. On Hopper cuDNN rounds O to e4m3, by up to 6%: its
rel_rms includes this, but its mean is over 256 launches with different scale factors of O, in which the roundings cancel.
exit: 0, 2 bad usage, 3 the GPU failed
"""
import builds
import cli
import engine
import numpy as np  # after cli, which reports a missing package
from cli import Refused, say

HEADS, QUERIES = 2, 256
FACTORS_OF_O = 2 ** (np.arange(256) * 0.618034 % 1)
BINADE = 2 ** (np.arange(65536) / 65536)
# Mean of e4m3(x) / x, for x on a logarithmic scale: a little less than 1.
SHARE_OF_E4M3 = (engine.as_values(engine.as_bits(BINADE.astype(np.float32), "e4m3"), "e4m3") / BINADE).mean()
COLUMNS = "contender input D dtype Sk rel_rms mean device driver cuda git_sha".split()


def with_v(draw_v, q_is_zero=False):
    """Returns a function that draws Q, K and V in float32, with the interface of engine.normal()."""
    def draw(rng, name, count):
        if name == "V":
            return draw_v(rng, count)
        return np.zeros(count, np.float32) if name == "Q" and q_is_zero else engine.normal(rng, name, count)
    return draw


INPUTS = {"N(0,1)": engine.normal,
          "V of mean 1": with_v(lambda rng, count: 1 + rng.standard_normal(count, np.float32)),
          "V of mean 8": with_v(lambda rng, count: 8 + rng.standard_normal(count, np.float32)),
          "equal logits": with_v(lambda rng, count: 1 + rng.random(count, np.float32), q_is_zero=True)}


def without_rounding(bench, kernel, problem, outputs, launch):
    """O of a contender that multiplies it by a factor and rounds it to e4m3: the mean over all factors."""
    total = 0
    for factor in FACTORS_OF_O:
        kernel.factor_of_o.fill_(factor)
        launch()
        total = total + bench.read(problem, outputs)[0].astype(float) / factor
    return total / len(FACTORS_OF_O) / SHARE_OF_E4M3


def rows_of(gpu, kernels, D, dtype, keys):
    """Yields a row for each contender that supports D and dtype, and each kind of input."""
    problem = engine.parse_problem(f"1,{HEADS},{HEADS},{QUERIES},{keys},{D},{dtype}")
    for kind, draw in INPUTS.items():
        bench = engine.Bench(gpu, {}, {"": problem}, draw=draw)
        for kernel in (one for one in kernels if problem.fits(one.line)):
            try:
                check, (O, _), outputs, launch, _ = bench.run(kernel, problem)
                if outputs.dtype == "e4m3":
                    O = without_rounding(bench, kernel, problem, outputs, launch)
            except engine.CudaError as error:
                say(f"accuracy.py: {kernel.text}: {error}")
                continue
            row = dict(contender=kernel.text, input=kind, D=D, dtype=dtype, Sk=keys, rel_rms=f"{check.rel_rms:.4f}",
                       **engine.measured_on(gpu))
            if draw is not engine.normal:
                reference = bench.references[problem]
                got = O.reshape(1, HEADS, QUERIES, D)[tuple(np.transpose(reference.rows))]
                row["mean"] = f"{got.astype(float).mean() / reference.O.mean():.5f}"
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
