#!/usr/bin/env python3
"""Times lines and competitors (PyTorch's SDPA backends and others) in one process, on the same tensors.

usage: tools/peers.py CONTENDER... [--shape PROBLEM]... [--suite] [--e4m3] [--field] [--published] [--chunks]
                       [--drawn N [--seed S]] [--rested]

  CONTENDER  as for ab: a line of configs.txt with or without KNOB=VALUE..., COMMIT:LINE, or torch:cudnn,
             torch:flash, torch:efficient, torch:math (default: all four of these)
  --shape S  a name of ./run_all.sh --help or B,Hq,Hkv,Sq,Sk, optionally followed by ,D ,DTYPE ,CAUSAL and ,LEFT (the
             left window size), as in 4,32,32,4096,4096,64,fp16,br,1023; only lines with that D and DTYPE are timed;
             repeatable; default mission, mission2 and long
  --suite    all problems of README; docs/NUMBERS.md has the table
  --e4m3     the e4m3 problems of docs/HOPPER.md; torch:cudnn then uses cuDNN's own front end (nvidia-cudnn-frontend)
  --field    the problems in the figures of FlashAttention's papers: lengths of 512 to 16,384, 16,384 tokens in total,
             2,048 elements in all heads, D of 64, 128 and 256, bf16, with and without a mask; also a matrix product of
             PyTorch, for comparison
  --published  problems with published numbers: from tritonbench, and for cuDNN with Llama 3.1 (also in e4m3), gpt-oss
             (with a window) and DeepSeek V3 (D=192, needs a line with HEAD_DIM_V=128); with a window or in e4m3,
             torch:cudnn uses cuDNN's own front end
  --chunks   the problems with few rows and many keys of docs/HOPPER.md; with --drawn, random problems of this kind
  --drawn N  N random problems: sizes are log-uniform; D, type, mask and heads per key head are uniform; a quarter have
             one query row
  --seed N   the seed of these, from 0; default 0
  --rested   measure the first 10 ms (at least one replay) after a rest of 0.3 s, before the power limit is reached

Prints CSV rows with the columns of the executables: for each problem the lines, then the competitors. graph_us is the
time of a launch in a replayed CUDA graph: the median over turns, in which each contender runs at the clock that its
power allows. The note of a line has its largest difference to each competitor.
exit: 0, 1 a line is wrong, 2 bad usage
"""
import csv
import math
import sys

import builds
import cli
import engine
import numpy as np  # after cli, which reports a missing package
from cli import Refused, say

# FlashAttention-3 and -4 support only bf16. NVIDIA publishes times of cuDNN for the problems with 64 heads.
SUITE = """mission,64,fp16 mission2,64,fp16 long,64,fp16
4,32,32,4096,4096,64,fp16 4,32,32,4096,4096,64,bf16 4,32,32,4096,4096,64,bf16,br
1,32,32,16384,16384,64,bf16 1,32,32,16384,16384,64,bf16,br
16,16,16,1024,1024,128,bf16 16,16,16,1024,1024,128,bf16,br
4,16,16,4096,4096,128,fp16 4,16,16,4096,4096,128,bf16 4,16,16,4096,4096,128,bf16,br
1,16,16,16384,16384,128,bf16 1,16,16,16384,16384,128,bf16,br
1,64,8,2048,2048,128,bf16 1,64,8,2048,2048,128,bf16,br 1,64,8,8192,8192,128,bf16 1,64,8,8192,8192,128,bf16,br
1,64,8,32768,32768,128,bf16 1,64,8,32768,32768,128,bf16,br
1,32,8,8192,8192,128,bf16,br 1,16,16,1000,1777,128,bf16
1,8,8,16384,16384,256,fp16 1,8,8,16384,16384,256,bf16 1,8,8,16384,16384,256,bf16,br""".split()
E4M3 = """1,16,16,16384,16384,128,e4m3 1,16,16,16384,16384,128,e4m3,br
4,16,16,4096,4096,128,e4m3 4,16,16,4096,4096,128,e4m3,br
16,16,16,1024,1024,128,e4m3 16,16,16,1024,1024,128,e4m3,br
1,8,8,16384,16384,256,e4m3 4,32,32,4096,4096,64,e4m3 4,32,32,4096,4096,64,e4m3,br
1,32,32,16384,16384,64,e4m3 long,64,e4m3""".split()
CHUNKS = """1,8,1,512,32768 1,4,1,256,65536 1,16,2,128,16384 1,32,8,64,8192 1,2,2,1024,32768 2,64,4,7,9000
1,32,8,16,32768 1,8,2,300,10000""".split()
FIELD = [f"{16384 // S},{2048 // D},{2048 // D},{S},{S},{D},bf16,{causal}" for D in (64, 128, 256)
         for causal in ("off", "br") for S in (512, 1024, 2048, 4096, 8192, 16384)]
PUBLISHED = [f"{heads},{S},{S},{kind}" for heads, kind, lengths in (
    ("4,48,48", "128,bf16,br", (512, 1024, 2048, 4096, 8192, 16384)), ("1,64,8", "128,bf16,br", (2048, 4096, 8192)),
    ("1,128,128", "192,bf16,br", (2048, 4096, 8192)), ("2,64,8", "64,bf16,br,1023", (8192, 32768)),
    ("1,64,8", "128,e4m3", (2048, 8192, 32768)), ("1,64,8", "128,e4m3,br", (2048, 8192, 32768))) for S in lengths]
MATRIX = 8192  # rows and columns of each matrix
DRAWN = engine.Pace(40e3, 10e3)  # shorter turns, since there are many problems
MOST_ELEMENTS, MOST_FLOPS = 3 << 26, 2e12  # limits of random problems


def draw(count, seed, chunks=False):
    """Random problems. Only problems with Sq = Sk have a mask, since PyTorch's is_causal is top-left; but half of the chunks
    have a bottom-right mask."""
    rng, found = np.random.default_rng(seed), []

    def size(low, high):
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))
    while len(found) < count:
        if chunks:
            pairs, group, Sk, kind = size(1, 16), rng.choice([1, 4, 8]), size(4096, 131072), rng.integers(2)
            Sq = size(2, 2048)
            B = rng.choice([n for n in range(1, pairs + 1) if pairs % n == 0])
            Hkv = pairs // B
        else:
            B, Hkv, group, Sk, kind = size(1, 64), size(1, 16), rng.choice([1, 4, 8]), size(64, 65536), rng.integers(4)
            Sq = (Sk, Sk, 1, size(1, 16384))[kind]
        D, dtype, Hq = rng.choice([64, 128, 256]), rng.choice(["fp16", "bf16"]), Hkv * group
        if B * D * max(Hq * Sq, Hkv * Sk) <= MOST_ELEMENTS and 4 * B * Hq * Sq * Sk * D <= MOST_FLOPS:
            found.append(engine.parse_problem(f"{B},{Hq},{Hkv},{Sq},{Sk},{D},{dtype},{'br' if kind == 1 else 'off'}"))
    return found


def drawn_by(options):
    """The problems of --drawn, --seed and --chunks."""
    if options.seed is not None and not options.drawn:
        raise Refused(f"--seed {options.seed}: the seed of --drawn N; add that option")
    return draw(options.drawn or 0, options.seed or 0, options.chunks)


def run_problem(gpu, kernels, problem, facts, pace, blocks):
    """Yields the rows of all contenders for one problem."""
    lines = problem.lines_for([kernel.line for kernel in kernels.values() if isinstance(kernel.line, builds.Line)])
    lines = [line for line in lines if line.Dv == problem.Dv or problem.D < line.D]
    kernels = {key: kernel for key, kernel in kernels.items()
               if kernel.line in lines or (isinstance(kernel.line, builds.Torch) and problem.fits(kernel.line))}
    bench = engine.Bench(gpu, kernels, dict.fromkeys(kernels, problem))
    series = engine.measure(gpu, bench.fit_to_time(), pace, blocks)
    values = {key: results[0].astype(np.float32) for key, results in bench.results.items()}
    peers = {key: kernel.line.label for key, kernel in kernels.items() if isinstance(kernel.line, builds.Torch)}
    for key, kernel in kernels.items():
        row = engine.result_row(bench, key, facts.get(key), series)
        if key not in bench.skipped:
            notes = [kernel.version()] if key in peers else [
                row["note"], *(f"max diff to {name} {np.abs(values[key] - values[peer]).max():.1e}"
                               for peer, name in peers.items() if peer in values)]
            notes += [f"V of {problem.Dv}"] if problem.Dv else []
            notes += [f"{series.power(key):.0f} W"] if key in series.graphs and series.power(key) else []
            notes += [f"in 10 ms after {pace.rest_s} s of rest"] if pace.rest_s else []
            row["note"] = "; ".join(filter(None, notes))
        yield row
    bench.close()


def product_of_matrices(gpu):
    """The row of a bf16 matrix product of PyTorch (cuBLAS) with N(0,1) inputs: what tensor cores achieve at the power limit
    without softmax."""
    import torch
    a, b, out = (torch.randn(MATRIX, MATRIX, device="cuda").bfloat16() for _ in range(3))
    replay = torch.cuda.CUDAGraph()
    torch.matmul(a, b, out=out)
    with torch.cuda.graph(replay, stream=torch.cuda.current_stream()):
        torch.matmul(a, b, out=out)
    series = engine.measure(gpu, {"": engine.Graph(replay.replay, 1, 1e3)}, engine.STEADY, 2)
    us, (low, high) = series.us(""), series.interval("")
    version = torch.version.cuda
    return dict(config="torch_matmul", family="torch", shape=f"{MATRIX}x{MATRIX}x{MATRIX}", dtype="bf16", status="ok",
                graph_us=f"{us:.3f}", graph_lo_us=f"{low:.3f}", graph_hi_us=f"{high:.3f}", sm=gpu.arch.strip("a"),
                tflops=f"{2 * MATRIX ** 3 / us * 1e-6:.2f}", clock_mhz=f"{series.clock(''):.0f}",
                note=f"PyTorch {torch.__version__} with cuBLAS of CUDA {version}; {series.power(''):.0f} W",
                **engine.measured_on(gpu))


def main():
    options = cli.parse_options(__doc__, cli.MOST)
    contenders = builds.parse_contenders(options.words)
    lines = [one for one in contenders if isinstance(one, builds.Line)]
    if not lines:
        raise Refused("which line?")
    if any(line.is_backward for line in lines):
        raise Refused("it times the forward pass; tools/frameworks.py --gradients times the backward pass")
    peers = [one for one in contenders if isinstance(one, builds.Torch)] or \
            [builds.Torch("torch:" + backend) for backend in builds.TORCH_BACKENDS]
    texts, drawn = (options.shape or []) + SUITE * options.suite + E4M3 * options.e4m3, drawn_by(options)
    texts += FIELD * options.field + PUBLISHED * options.published
    texts += [f"{text},{D},bf16" for D in (64, 128, 256) for text in CHUNKS] * (options.chunks and not drawn)
    texts = texts if texts or drawn else ["mission", "mission2", "long"]
    problems = [*map(engine.parse_problem, texts), *drawn]
    gpu = engine.need_gpu()
    torch = {peer.text: engine.load(peer, gpu, {}) for peer in peers}
    built = builds.build(lines, gpu.arch)
    kernels = {**{line.text: engine.load(line, gpu, built) for line in lines}, **torch}
    facts = {line.text: builds.facts(built[line]) for line in lines}

    out = csv.DictWriter(sys.stdout, engine.row_columns(), lineterminator="\n")
    out.writeheader()
    failed = False
    for problem in problems:
        course = (engine.RESTED, 1) if options.rested else (DRAWN, 1) if problem in drawn else (engine.STEADY, 2)
        kinds = sorted({(problem.D or line.D, line.dtype, line.Dv) for line in problem.lines_for(lines)})
        if not kinds:
            say(f"peers.py: no line for D={problem.D} {problem.dtype}: {problem} is skipped")
        for kind in kinds:
            for row in run_problem(gpu, kernels, problem.typed(*kind), facts, *course):
                failed |= row.get("check") == "FAIL"
                out.writerow(row)
            sys.stdout.flush()
    if options.field:
        out.writerow(product_of_matrices(gpu))
    return 1 if failed else 0


if __name__ == "__main__":
    cli.command("peers.py", main)
