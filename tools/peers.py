#!/usr/bin/env python3
"""Times PyTorch's SDPA backends on the problems of measured rows, in one run on one GPU.

usage: build/sdpa_NAME --header --shape S | tools/peers.py > results/peers/DATE-DEVICE.csv

Reads rows of sdpa executables on stdin (headers may repeat) and prints, with fewer columns, each row
and behind the last row of a problem one row per backend: torch_flash, torch_cudnn. graph_us is what it
is in the executables: one call's share of a replayed CUDA graph of 20. Needs PyTorch with CUDA.
"""
import csv
import sys

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    sys.exit("peers.py: PyTorch is missing; install it with: pip install torch")

COLUMNS = ("config shape status check graph_us tflops B Hq Hkv Sq Sk D dtype causal device cuda driver "
           "git_sha note").split()
PROBLEM = "B Hq Hkv Sq Sk D dtype causal".split()
CALLS = 20  # in a graph
BACKENDS = {"torch_flash": SDPBackend.FLASH_ATTENTION, "torch_cudnn": SDPBackend.CUDNN_ATTENTION}


def graph_us(call):
    """Median over 7 replays of one call's share of a graph, in microseconds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / CALLS)
    return sorted(times)[len(times) // 2]


def peer_rows(row):
    """Rows of PyTorch's backends for the problem of an executable's row."""
    B, Hq, Hkv, Sq, Sk, D = (int(row[name]) for name in PROBLEM[:6])
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[row["dtype"]]
    q, k, v = (torch.randn(B, heads, rows, D, device="cuda", dtype=dtype)
               for heads, rows in ((Hq, Sq), (Hkv, Sk), (Hkv, Sk)))
    for name, backend in BACKENDS.items():
        peer = {column: row[column] for column in COLUMNS}
        peer.update(config=name, check="", git_sha="", note="PyTorch " + torch.__version__)
        try:
            if row["causal"] not in ("off", "br" if Sq == Sk else "tl"):
                raise RuntimeError("PyTorch's is_causal is top-left")
            with sdpa_kernel(backend):
                us = graph_us(lambda: torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=row["causal"] != "off", enable_gqa=Hq != Hkv))
            flop = float(row["tflops"]) * float(row["graph_us"])  # 10^6, as the row counts it
            peer.update(status="ok", graph_us=f"{us:.3f}", tflops=f"{flop / us:.2f}")
        except RuntimeError as error:
            peer.update(status="skipped", graph_us="", tflops="", note=str(error).split("\n")[0][:80])
        yield peer


def main():
    if sys.stdin.isatty():
        sys.exit(__doc__)
    if not torch.cuda.is_available():
        sys.exit("peers.py: PyTorch sees no GPU")
    lines = [line for line in sys.stdin.read().splitlines() if line]
    if not lines or not lines[0].startswith("config,"):
        sys.exit("peers.py: no rows on stdin; give it what an executable prints with --header")
    rows = list(csv.DictReader([lines[0]] + [line for line in lines if line != lines[0]]))
    out = csv.DictWriter(sys.stdout, COLUMNS, extrasaction="ignore", lineterminator="\n")
    out.writeheader()
    problems = {}
    for row in rows:
        problems.setdefault(tuple(row[name] for name in PROBLEM), []).append(row)
    for group in problems.values():
        out.writerows(group)
        if group[-1]["graph_us"]:
            out.writerows(peer_rows(group[-1]))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
