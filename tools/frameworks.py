#!/usr/bin/env python3
"""usage: tools/frameworks.py [--problems] [--models] [--repeats N] >rows.csv
What bindings/pytorch.py is worth, measured on this GPU, as CSV: needs PyTorch 2.11 and transformers 5.
  --problems  README's problems: a loop of calls and a CUDA graph of them, by the line's C function, by F.scaled_dot_product_attention
              with sdpa's kernels, and by that function as PyTorch has it
  --models    models of transformers with random weights: prefill of 8,192 tokens, attention's share of it, and a token of generate()
"""
import argparse
import csv
import ctypes
import os
import re
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, restore_flash_attention_impl, sdpa_kernel

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "bindings"))
import pytorch as sdpa  # noqa: E402

PROBLEMS = ("1,8,8,512,512,64 1,8,8,2048,2048,64 4,32,32,4096,4096,64 4,32,32,4096,4096,64c 16,16,16,1024,1024,128 "
            "4,16,16,4096,4096,128c 1,16,16,1000,1777,128 32,32,8,1,8192,128 1,8,8,16384,16384,256c").split()
MODELS = {"Llama": dict(head_dim=128, num_attention_heads=32, num_key_value_heads=8),
          "Mistral": dict(head_dim=128, num_attention_heads=32, num_key_value_heads=8, sliding_window=1024),
          "Gemma": dict(head_dim=256, num_attention_heads=16, num_key_value_heads=8)}


def loop_us(run, repeats):
    """Of a call in a loop without a wait: the CPU's or the GPU's time, whichever is longer."""
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            run()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / 50)
    return best * 1e6


def graph_us(run, repeats):
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            run()
    graph.replay()
    return min(event_us(graph.replay) for _ in range(repeats)) / 20


def event_us(run):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def by_c_function(q, k, v, causal):
    """The call without PyTorch: a function, through ctypes."""
    sys.path.insert(0, os.path.join(ROOT, "tools"))
    import engine
    capability = torch.cuda.get_device_capability()
    library = sdpa.library_of(sdpa.line_of(capability, q.dtype, q.shape[3]), capability)
    library.sdpa_library_workspace_bytes.restype = ctypes.c_size_t
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
    p = engine.SdpaParams(*(x.data_ptr() for x in (q, k, v, out, lse)), *q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3],
                          *(engine.Strides(*x.stride()[:3]) for x in (q, k, v, out)), causal=int(causal), window_left=-1, window_right=-1)
    workspace = torch.zeros(max(library.sdpa_library_workspace_bytes(ctypes.byref(p)), 1), dtype=torch.uint8, device="cuda")
    p.workspace = workspace.data_ptr()
    keep = (q, k, v, out, lse, workspace, p)
    return lambda: library.sdpa_library_forward(ctypes.byref(keep[-1]), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), None, 0)


def problems(repeats, row):
    for text in PROBLEMS:
        B, Hq, Hkv, Sq, Sk, D = map(int, text.rstrip("c").split(","))
        causal = text[-1] == "c"
        q, k, v = (torch.randn(B, H, S, D, device="cuda", dtype=torch.half) for H, S in ((Hq, Sq), (Hkv, Sk), (Hkv, Sk)))
        call = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=Hq != Hkv)  # noqa: E731
        want = call()
        for contender in ("C function", "sdpa", "PyTorch"):
            run = by_c_function(q, k, v, causal) if contender == "C function" else call
            if contender == "sdpa":
                sdpa.activate()
            error = float((call().double() - want.double()).norm() / want.double().norm())
            for how, us in (("loop", loop_us(run, repeats)), ("graph", graph_us(run, repeats))):
                row(what=how, problem=text.replace("c", " causal"), contender=contender, us=us, rel_rms=error)
            if contender == "sdpa":
                restore_flash_attention_impl()


def attention_share(run):
    """Of the GPU's time in kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    kernels = [(event.name, event.time_range.elapsed_us()) for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    of_attention = sum(us for name, us in kernels if re.search("sdpa|flash|fmha|attention", name))
    return of_attention / sum(us for _, us in kernels)


def models(repeats, row):
    import transformers
    adapter = re.search(r"```python\n(from transformers.*?)```", open(os.path.join(ROOT, "docs", "USING.md")).read(), re.DOTALL).group(1)
    exec(adapter, {"sdpa": sdpa})
    for kind, sizes in MODELS.items():
        config = getattr(transformers, kind + "Config")(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=16,
                                                        max_position_embeddings=16384, pad_token_id=0, dtype=torch.bfloat16, **sizes)
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = getattr(transformers, kind + "ForCausalLM")(config).to(torch.bfloat16).eval()
        tokens = torch.randint(1, 32000, (1, 8192), device="cuda")
        prefill = lambda: model(tokens, logits_to_keep=64).logits  # noqa: E731
        generate = lambda n: model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=n, min_new_tokens=n,  # noqa: E731
                                            do_sample=False)
        want = None
        for contender, name, backends in (("PyTorch's choice", "sdpa", None), ("PyTorch FlashAttention", "sdpa", SDPBackend.FLASH_ATTENTION),
                                          ("sdpa", "sdpa", None), ("sdpa, by attention()", "sdpa_cu", None)):
            if backends and kind == "Mistral":
                continue  # a window is a mask tensor, which PyTorch's FlashAttention does not take
            if contender == "sdpa":
                sdpa.activate()
            model.set_attn_implementation(name)
            with torch.no_grad(), sdpa_kernel(backends) if backends else torch.no_grad():
                got = prefill().double()
                want = got if want is None else want
                values = {"prefill": min(event_us(prefill) for _ in range(repeats)), "attention's share": attention_share(prefill),
                          "token": (event_us(lambda: generate(33)) - event_us(lambda: generate(1))) / 32}
            for what, value in values.items():
                row(what=what, problem=kind, contender=contender, us=value, rel_rms=float((got - want).norm() / want.norm()))
        restore_flash_attention_impl()
        del model


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--problems", action="store_true")
    parser.add_argument("--models", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    git = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True).stdout.split()
    facts = {"device": torch.cuda.get_device_name(), "driver": driver[0] if driver else "", "torch": torch.__version__,
             "git_sha": os.environ.get("SDPA_GIT_SHA") or git}
    writer = csv.DictWriter(sys.stdout, ["what", "problem", "contender", "us", "rel_rms", *facts])
    writer.writeheader()

    def row(us, rel_rms, **values):
        writer.writerow({**values, "us": f"{us:.4g}", "rel_rms": f"{rel_rms:.2e}", **facts})
        sys.stdout.flush()
    if options.problems:
        problems(options.repeats, row)
    if options.models:
        models(options.repeats, row)


if __name__ == "__main__":
    main()
