"""Attention over a sequence that is distributed over GPUs: PyTorch's context_parallel (ring attention over NCCL) with sdpa's
kernels.

    torchrun --nproc-per-node 2 bindings/context_parallel.py [--shape B,Hq,Hkv,S,D] [--dtype float16]

For PyTorch's FlashAttention and for sdpa, prints the time of one GPU with the whole sequence and of all GPUs with a balanced
share each (causal), and the difference of the results.
"""
import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.nn.attention import SDPBackend, sdpa_kernel

import pytorch as sdpa


def milliseconds(run, repeats=5, calls=4):
    """The median time of a call on the slowest GPU, over consecutive calls, so that the CPU runs ahead of the GPU."""
    run()
    times = torch.zeros(repeats, device="cuda")
    for i in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        times[i] = start.elapsed_time(end) / calls
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return float(times.median())


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--shape", default="1,16,16,131072,128")
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"])
    options = parser.parse_args()
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*){4}", options.shape):
        parser.error(f"--shape {options.shape}: want B,Hq,Hkv,S,D")
    B, Hq, Hkv, S, D = map(int, options.shape.split(","))
    if Hq % Hkv:
        parser.error(f"--shape {options.shape}: Hq is not a multiple of Hkv")
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node=N")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    torch.manual_seed(0)  # the same tensors on all GPUs
    tensors = [torch.randn(B, H, S, D, device="cuda").to(getattr(torch, options.dtype)) for H in (Hq, Hkv, Hkv)]

    def attention(q, k, v):  # looked up here, since context_parallel replaces F.scaled_dot_product_attention
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=Hq != Hkv)

    for kernel in ("PyTorch", "sdpa"):
        if kernel == "sdpa":
            sdpa.activate()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.no_grad():
            alone = milliseconds(lambda: attention(*tensors))
            want = attention(*tensors)
            mesh = init_device_mesh("cuda", (dist.get_world_size(),))
            shards = [x.clone() for x in tensors]  # context_parallel replaces them by the GPU's share
            with context_parallel(mesh, buffers=shards, buffer_seq_dims=[2, 2, 2]):
                together = milliseconds(lambda: attention(*shards))
                got, = context_parallel_unshard(mesh, [attention(*shards)], [2])
        error = float((got.double() - want.double()).norm() / want.double().norm())
        if dist.get_rank() == 0:
            print(f"{kernel:8} 1 GPU {alone:8.2f} ms   {dist.get_world_size()} GPUs {together:8.2f} ms   "
                  f"{alone / together:.2f} times as fast   rel_rms {error:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
