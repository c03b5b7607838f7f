#!/usr/bin/env python3
"""Times lines of configs.txt against PyTorch's SDPA backends: one process, one run, the same tensors.

usage: tools/peers.py NAME... [--shape PROBLEM]... [--suite] [--peers P,...] [--rested] [--build DIR] > CSV

  NAME       a line of configs.txt; its shared library (target sdpa_NAME_lib of DIR) is built and loaded
  --shape    small, mission, mission2, long or B,Hq,Hkv,Sq,Sk, and behind these if wanted ,D ,DTYPE and
             ,CAUSAL, as in 4,32,32,4096,4096,64,fp16,br; only lines with that D and DTYPE take part.
             Repeatable; default mission, mission2 and long
  --suite    the problems of README's table
  --peers    names separated by commas (default torch_cudnn,torch_flash,torch_efficient,torch_math)
  --rested   one turn each: the first 10 ms, at least a replay, after a rest of 0.3 s, before the power limit
             is reached
  --build    the build folder (default build)

Prints rows with the columns of the executables: per problem each line, then each peer. graph_us is what it
is there: one call's share of a replayed CUDA graph of 20 (of 2 where a call takes over 5 ms), the median of
replays that are taken from all contenders in turn, each at the clock that it leads to. A line's check is
against attention in fp32 by PyTorch on the same inputs, with the limits of the executables; its note has the
largest difference to each peer, and for fp16 on mission what torch.allclose(atol=1e-3) says. Needs PyTorch
with CUDA.
"""
import argparse
import csv
import ctypes
import os
import re
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHAPES = {"small": (1, 1, 1, 32, 32), "mission": (1, 8, 8, 512, 512), "mission2": (2, 8, 8, 512, 512),
          "long": (1, 8, 8, 2048, 2048)}
SUITE = """mission,64 mission2,64 long,64
4,32,32,4096,4096,64,fp16 4,32,32,4096,4096,64,fp16,br
1,32,32,16384,16384,64,fp16 1,32,32,16384,16384,64,fp16,br
16,16,16,1024,1024,128,fp16 16,16,16,1024,1024,128,fp16,br
4,16,16,4096,4096,128,fp16 4,16,16,4096,4096,128,fp16,br
1,16,16,16384,16384,128,fp16 1,16,16,16384,16384,128,fp16,br
1,32,8,8192,8192,128,bf16,br 1,16,16,1000,1777,128,fp16
1,8,8,16384,16384,256,fp16 1,8,8,16384,16384,256,fp16,br""".split()
ROUNDS = 3
REPLAYED_US = 30e3 / ROUNDS  # per contender and round
WARMED_US = 100e3  # before that: a GPU at its power limit keeps for a while the clock that the one before left
REST_S = 0.3
BACKENDS = {"torch_cudnn": "CUDNN_ATTENTION", "torch_flash": "FLASH_ATTENTION",
            "torch_efficient": "EFFICIENT_ATTENTION", "torch_math": "MATH"}
FAMILIES = {"USE_WMMA": "wmma", "USE_MMA_SYNC": "mma", "USE_WGMMA": "wgmma", "USE_CUBLAS": "cublas"}
LIMITS = {"fp16": 1e-3, "bf16": 8e-3}  # of rel_rms, and of the largest error over max(1, max|ref|)


def refuse(sentence):
    sys.exit("peers.py: " + sentence)


try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
except ImportError:
    refuse("PyTorch is missing; install it with: pip install torch")


class Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "head", "row")]


class SdpaParams(ctypes.Structure):
    """sdpa.cu's SdpaParams, member by member."""
    _fields_ = ([(name, ctypes.c_void_p) for name in ("Q", "K", "V", "O", "LSE")] +
                [(name, ctypes.c_int) for name in ("B", "Hq", "Hkv", "Sq", "Sk", "D")] +
                [(name, Strides) for name in "qkvo"] +
                [("scale", ctypes.c_float), ("causal", ctypes.c_int), ("workspace", ctypes.c_void_p),
                 ("max_ctas", ctypes.c_int)])


class Line:
    """A line of configs.txt as a shared library."""

    def __init__(self, name, build):
        self.name = name
        lines = open(os.path.join(build, "configs.tsv")).read().splitlines()
        knobs = {line.split("\t")[0]: line.split("\t")[3] for line in lines}
        if name not in knobs:
            refuse(f"{name}: no line of configs.txt has that name; it has: {' '.join(knobs)}")
        self.knobs = dict(word.split("=") for word in knobs[name].split())
        self.D = int(self.knobs.get("HEAD_DIM", 64))
        self.dtype = self.knobs.get("DTYPE", "FP16").lower()
        target = f"sdpa_{name}_lib"
        done = subprocess.run(["cmake", "--build", build, "--target", target, "-j"], capture_output=True, text=True)
        if done.returncode:
            refuse(f"{target} does not build: " + (done.stderr or done.stdout).strip().split("\n")[-1])
        self.library = ctypes.CDLL(os.path.join(build, f"lib{target}.so"))
        self.library.sdpa_library_params_bytes.restype = ctypes.c_size_t
        self.library.sdpa_library_workspace_bytes.restype = ctypes.c_size_t
        if self.library.sdpa_library_params_bytes() != ctypes.sizeof(SdpaParams):
            refuse("SdpaParams of sdpa.cu is not the one that peers.py knows; bring SdpaParams here up to date")

    def prepare(self, q, k, v, causal):
        """A call without arguments that computes into the tensor it comes with."""
        o = torch.empty_like(q)
        p = SdpaParams(Q=q.data_ptr(), K=k.data_ptr(), V=v.data_ptr(), O=o.data_ptr(), B=q.shape[0], Hq=q.shape[1],
                       Hkv=k.shape[1], Sq=q.shape[2], Sk=k.shape[2], D=q.shape[3],
                       causal={"off": 0, "br": 1, "tl": 2}[causal])
        for name, tensor in zip("qkvo", (q, k, v, o)):
            setattr(p, name, Strides(*tensor.stride()[:3]))
        workspace = torch.zeros(max(1, self.library.sdpa_library_workspace_bytes(ctypes.byref(p))),
                                dtype=torch.uint8, device="cuda")
        p.workspace = workspace.data_ptr()
        text = ctypes.create_string_buffer(256)

        def call(keep=workspace):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            if self.library.sdpa_library_forward(ctypes.byref(p), stream, text, ctypes.c_size_t(256)):
                raise RuntimeError(text.value.decode())
            return o
        return call


def parse_problem(text):
    """(shape's name, five sizes, D or None, dtype or None, causal)"""
    words = text.split(",")
    count = 1 if words[0] in SHAPES else 5
    name, rest = "x".join(words[:count]), words[count:]
    try:
        sizes = SHAPES[words[0]] if count == 1 else tuple(int(word) for word in words[:5])
        D = int(rest[0]) if rest else None
    except ValueError:
        sizes = ()
    dtype, causal = (rest[1:] + [None, None])[:2]
    if (len(sizes) != 5 or min(sizes) < 1 or sizes[1] % sizes[2] or len(rest) > 3 or
            dtype not in (None, "fp16", "bf16") or causal not in (None, "off", "br", "tl")):
        refuse(f"--shape {text}: want small, mission, mission2, long or B,Hq,Hkv,Sq,Sk with Hq a multiple of Hkv, "
               "then if wanted ,D ,fp16|bf16 ,off|br|tl")
    return name, sizes, D, dtype, causal or "off"


def elapsed_us(work):
    """GPU time of work(), in microseconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000


def capture(call):
    """The call, 20 times or 2, as a CUDA graph, and how many times."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    calls = 20 if elapsed_us(call) < 5000 else 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph, calls


def replay(graph, calls, rested):
    """Microseconds of a call in each of some replays: at least 5 (rested: 1), and more of short ones."""
    warmed, times, fewest = 0, [], 1 if rested else 5
    if rested:
        time.sleep(REST_S)
    else:
        while warmed < WARMED_US:
            warmed += elapsed_us(graph.replay)
    while len(times) < fewest or (sum(times) * calls < REPLAYED_US and len(times) < 333):
        times.append(elapsed_us(graph.replay) / calls)
    return times


def visible(Sq, Sk, causal):
    """How many keys each query sees."""
    q = torch.arange(Sq)
    limit = q + 1 + Sk - Sq if causal == "br" else q + 1 if causal == "tl" else torch.full((Sq,), Sk)
    return limit.clamp(0, Sk)


def reference(q, k, v, causal):
    """Attention in fp32, a head at a time."""
    o = torch.empty(q.shape, device="cuda", dtype=torch.float32)
    keys = visible(q.shape[2], k.shape[2], causal).cuda()
    hidden = torch.arange(k.shape[2], device="cuda")[None, :] >= keys[:, None]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            h_kv = h * k.shape[1] // q.shape[1]
            s = q[b, h].float() @ k[b, h_kv].float().T * q.shape[3] ** -0.5
            p = s.masked_fill_(hidden, -torch.inf).softmax(-1).masked_fill(keys[:, None] == 0, 0)
            o[b, h] = p @ v[b, h_kv].float()
    return o


def run_problem(shape, sizes, D, dtype, causal, lines, peers, rested):
    """Rows of the lines and of PyTorch's backends for one problem."""
    B, Hq, Hkv, Sq, Sk = sizes
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, heads, rows, D, device="cuda").to({"fp16": torch.half, "bf16": torch.bfloat16}[dtype])
               for heads, rows in ((Hq, Sq), (Hkv, Sk), (Hkv, Sk)))
    device = torch.cuda.get_device_properties(0)
    common = dict(shape=shape, status="ok", B=B, Hq=Hq, Hkv=Hkv, Sq=Sq, Sk=Sk, D=D, dtype=dtype, causal=causal, seed=0,
                  device=device.name, sm=f"{device.major}{device.minor}", cuda=torch.version.cuda, driver=DRIVER,
                  git_sha=GIT_SHA)

    def backend(name):
        if causal == "br" and Sq != Sk:
            raise RuntimeError("PyTorch's is_causal is top-left")

        def call():
            with sdpa_kernel(getattr(SDPBackend, BACKENDS[name])):
                return scaled_dot_product_attention(q, k, v, is_causal=causal != "off", enable_gqa=Hq != Hkv)
        return call

    contenders = {line.name: lambda line=line: line.prepare(q, k, v, causal) for line in lines}
    contenders.update({name: lambda name=name: backend(name) for name in peers})
    rows, calls, graphs, outputs, times = {}, {}, {}, {}, {}
    for name, prepare in contenders.items():
        rows[name] = dict(common, config=name)
        try:
            call = calls[name] = prepare()  # kept: it holds the memory that its graph writes to
            outputs[name] = call().clone()
            graphs[name] = capture(call)
            times[name] = []
        except (RuntimeError, torch.OutOfMemoryError) as error:
            torch.cuda.synchronize()
            rows[name].update(status="skipped", note=str(error).strip().split("\n")[0][:100])
    for _ in range(1 if rested else ROUNDS):
        for name, graph in graphs.items():
            times[name] += replay(*graph, rested)

    flop = 4 * D * B * Hq * int(visible(Sq, Sk, causal).sum())
    for name, samples in times.items():
        samples.sort()
        skip = int(max(0, len(samples) - 1.96 * len(samples) ** 0.5) / 2)  # 95%, as in the executables
        us = samples[len(samples) // 2]
        rows[name].update(graph_us=f"{us:.3f}", graph_lo_us=f"{samples[skip]:.3f}",
                          graph_hi_us=f"{samples[-1 - skip]:.3f}", tflops=f"{flop / us * 1e-6:.2f}")
    graphs.clear()
    calls.clear()
    exact = reference(q, k, v, causal)
    rest = f"; in 10 ms after {REST_S} s of rest" if rested else ""
    for name, o in outputs.items():
        if name in BACKENDS:
            rows[name].update(family="torch", note="PyTorch " + torch.__version__ + rest)
            continue
        error = (o.float() - exact).abs()
        rel_rms = float(error.square().mean().sqrt() / exact.square().mean().sqrt())
        largest = float(error.max())
        passed = rel_rms <= LIMITS[dtype] and largest <= LIMITS[dtype] * max(1.0, float(exact.abs().max()))
        others = [peer for peer in peers if peer in outputs]
        notes = [f"max diff to {peer} {float((o.float() - outputs[peer].float()).abs().max()):.1e}" for peer in others]
        if shape == "mission" and dtype == "fp16":
            close = all(torch.allclose(o, outputs[peer], atol=1e-3) for peer in others)
            notes.append(f"torch.allclose(atol=1e-3) {close}")
            passed = passed and close
        rows[name].update(check="PASS" if passed else "FAIL", rel_rms=f"{rel_rms:.3g}", max_abs_err=f"{largest:.3g}",
                          note="; ".join(notes) + rest)
    for line in lines:
        family = [name for knob, name in FAMILIES.items() if line.knobs.get(knob) == "1"]
        rows[line.name].update(family=(family or ["scalar"])[0],
                               knobs=" ".join(f"{knob}={value}" for knob, value in line.knobs.items()))
    return rows.values()


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("\n\n")[1][7:], add_help=True)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--shape", action="append", default=[])
    parser.add_argument("--suite", action="store_true")
    parser.add_argument("--peers", default=",".join(BACKENDS))
    parser.add_argument("--rested", action="store_true")
    parser.add_argument("--build", default="build")
    arguments = parser.parse_args()
    peers = arguments.peers.split(",")
    for peer in peers:
        if peer not in BACKENDS:
            refuse(f"--peers {peer}: want {', '.join(BACKENDS)}")
    problems = [parse_problem(text) for text in arguments.shape + (SUITE if arguments.suite else [])]
    problems = problems or [parse_problem(text) for text in ("mission", "mission2", "long")]
    if not torch.cuda.is_available():
        refuse("PyTorch sees no GPU")
    build = os.path.join(ROOT, arguments.build)
    if not os.path.exists(os.path.join(build, "configs.tsv")):
        refuse(f"{arguments.build} is no build folder; make it with: cmake -B {arguments.build}")
    lines = [Line(name, build) for name in arguments.names]
    source = open(os.path.join(ROOT, "sdpa.cu")).read()
    columns = re.findall(r'^    \{"(\w+)", &CsvRow::', source, re.MULTILINE)
    out = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
    out.writeheader()
    failed = False
    for shape, sizes, D, dtype, causal in problems:
        groups = {(line.D, line.dtype) for line in lines
                  if (D is None or line.D == D) and (dtype is None or line.dtype == dtype)}
        if not groups:
            print(f"peers.py: no line for D={D} {dtype or ''}: {shape} is left out", file=sys.stderr)
        for group in sorted(groups):
            rows = run_problem(shape, sizes, *group, causal, [line for line in lines if (line.D, line.dtype) == group],
                               peers, arguments.rested)
            for row in rows:
                failed = failed or row.get("check") == "FAIL"
                out.writerow({name: str(value).replace(",", ";") for name, value in row.items()})
            sys.stdout.flush()
            torch.cuda.empty_cache()
    sys.exit(1 if failed else 0)


def first_line(command):
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip().split("\n")[0]
    except OSError:
        return ""


DRIVER = first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
GIT_SHA = os.environ.get("SDPA_GIT_SHA") or first_line(["git", "describe", "--always", "--dirty", "--abbrev=12",
                                                          "--exclude=*"])

if __name__ == "__main__":
    main()
