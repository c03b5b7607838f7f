#!/usr/bin/env python3
"""usage: tools/frameworks.py [--problems] [--models] [--lengths] [--invariant] [--mods] [--training] [--gradients] [--host]
                           [--contenders REGEX] [--only REGEX] [--repeats N] >rows.csv
Measures bindings/pytorch.py and competitors on this GPU and prints CSV. Needs PyTorch 2.11 and transformers 5.
  --problems   README's problems, as a loop of calls and as a CUDA graph: the line's C function,
               F.scaled_dot_product_attention with sdpa's kernels, and the same function without sdpa
  --models     models of transformers with random weights: prefill of 8,192 tokens, the share of attention in it, and a
               token of generate()
  --lengths    sequences of mixed lengths, packed, in caches and paged: attention(), and FlashAttention-3 (fa3-fwd) and
               FlashInfer (flashinfer-python) if they are installed; bf16, D=128, 32 query heads, 8 key heads
  --invariant  the same sequences, and problems of one length: attention() with and without batch_invariant; ratio is the
               time with it divided by the time without it
  --mods       score_mod and mask_mod of attention(), the same without them, and FlexAttention (its FLASH backend needs
               flash_attn.cute); ratio is relative to the first row of the case, rel_rms compares one head with the
               formula in float32
  --training   a training step of F.scaled_dot_product_attention in bf16, with PyTorch's and with sdpa's kernels; ratio is
               PyTorch's time divided by the contender's, rel_rms the largest one of the gradients
  --gradients  the backward pass alone, as a CUDA graph, in bf16, also with deterministic algorithms: attention(), PyTorch's
               cuDNN and FlashAttention-2, and FlashAttention-4 (flash-attn-4) if it is installed; ratio is the contender's
               time divided by attention()'s, rel_rms the largest one of dQ, dK and dV of one KV head against float32. For a
               newer cuDNN, preload its libcudnn.so.9
  --contenders REGEX  with --gradients, only measure matching contenders, and attention()
  --only REGEX  with --gradients, only measure matching problems, such as 1,8,8,16384,256 causal
  --host       CPU time of a call of a tiny problem: F.scaled_dot_product_attention without and with sdpa's kernels,
               attention() with and without lengths, pages and sinks, and FlashAttention-3 (fa3-fwd)
  --repeats N  report the minimum of this number of measurements (default 5)
exit: 0, 1 gradients are wrong, 2 bad usage, or no GPU
"""
import contextlib
import csv
import ctypes
import functools
import importlib.metadata
import importlib.util
import itertools
import math
import random
import re
import statistics
import sys
import time
from pathlib import Path

import cli
import engine
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, restore_flash_attention_impl, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.utils.benchmark import Timer

sys.path.insert(0, str(Path(engine.ROOT) / "bindings"))
import pytorch as sdpa  # noqa: E402

PROBLEMS = ("1,8,8,512,512,64 1,8,8,2048,2048,64 4,32,32,4096,4096,64 4,32,32,4096,4096,64c 16,16,16,1024,1024,128 "
            "4,16,16,4096,4096,128c 1,16,16,1000,1777,128 32,32,8,1,8192,128 1,8,8,16384,16384,256c").split()
SIZES = dict(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=16,
             max_position_embeddings=16384, pad_token_id=0, num_key_value_heads=8)
MODELS = {"Llama": dict(SIZES, head_dim=128, num_attention_heads=32),
          "Mistral": dict(SIZES, head_dim=128, num_attention_heads=32, sliding_window=1024),
          "Gemma": dict(SIZES, head_dim=256, num_attention_heads=16)}
CONTENDERS = (("PyTorch's choice", "sdpa", None), ("PyTorch FlashAttention", "sdpa", SDPBackend.FLASH_ATTENTION),
              ("sdpa", "sdpa", None), ("sdpa, by attention()", "attention_cu", None))


def drawn(count, low, high, seed=0):
    """Random log-uniform lengths."""
    rng = random.Random(seed)
    return [round(math.exp(rng.uniform(math.log(low), math.log(high)))) for _ in range(count)]


# Queries of each sequence, and keys of its cache.
SEQUENCES = {"32 of 100 to 8,192, packed": (None, drawn(32, 100, 8192)),
             "1 to 64 caches of 1,024 to 65,536": (1, drawn(64, 1024, 65536)), "1 to 32 of 8,192": (1, [8192] * 32),
             "1 to 64 of 2,048": (1, [2048] * 64), "1 to 256 of 1,024": (1, [1024] * 256),
             "1 to one of 131,072 and 31 of 1,024": (1, [131072] + [1024] * 31),
             "256 to one of 131,072 and 31 of 1,024": (256, [131072] + [1024] * 31),
             "256 to 8 of 16,384": (256, [16384] * 8), "512 to 32 of 512 to 8,192": (512, drawn(32, 512, 8192)),
             "2,048 to 8 of 2,048": (2048, [2048] * 8), "8,192 to 4 of 8,192": (8192, [8192] * 4)}


# Decode, chunks and prefill, as single sequences and in batches.
INVARIANT = ("1,32,8,1,8192 8,32,8,1,8192 32,32,8,1,8192 128,32,8,1,2048 1,32,8,1,131072 1,32,8,256,16384c 8,32,8,256,16384c "
             "1,32,8,2048,2048c 8,32,8,2048,2048c 1,16,16,512,512 16,16,16,512,512").split()


def loop_us(run, repeats, count=50):
    """Time of a call in a loop without synchronization: the longer one of CPU and GPU time."""
    return min(Timer("run()", globals={"run": run}).timeit(count).mean for _ in range(repeats)) * 1e6


def graph_of(run, calls=20, stream=None):
    """Replays a number of calls. stream: the one to capture, for a backward pass that of its forward pass."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            run()
    return graph.replay


def graph_us(run, repeats):
    """Time of a call in a CUDA graph of 20 calls."""
    return loop_us(graph_of(run), repeats) / 20


def rel_rms(got, want):
    """The rms error divided by the rms of the expected result."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def by_c_function(q, k, v, causal):
    """A function that calls the C function through ctypes and returns O."""
    capability = torch.cuda.get_device_capability()
    library = sdpa.library_of(sdpa.line_of(capability, q.dtype, q.shape[3]), capability)
    library.sdpa_library_workspace_bytes.restype = ctypes.c_size_t
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
    p = engine.SdpaParams(*(x.data_ptr() for x in (q, k, v, out, lse)), *q.shape[:2], k.shape[1], q.shape[2],
                          *k.shape[2:], *(engine.Strides(*x.stride()[:3]) for x in (q, k, v, out)),
                          causal=int(causal), window_left=-1, window_right=-1)
    size = library.sdpa_library_workspace_bytes(ctypes.byref(p))
    workspace = torch.zeros(max(size, 1), dtype=torch.uint8, device="cuda")
    p.workspace = workspace.data_ptr()

    def run(tensors=(q, k, v, out, lse, workspace)):  # kept alive by the function
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if library.sdpa_library_forward(ctypes.byref(p), stream, None, 0):
            raise RuntimeError("the C function refused the problem")
        return out
    return run


def problems(repeats):
    """Yields the rows of --problems."""
    for text in PROBLEMS:
        B, Hq, Hkv, Sq, Sk, D = map(int, text.rstrip("c").split(","))
        causal = text[-1] == "c"
        q, k, v = (torch.randn(B, H, S, D, device="cuda", dtype=torch.half) for H, S in [(Hq, Sq)] + 2 * [(Hkv, Sk)])

        def call():
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=Hq != Hkv)
        want = call()
        for contender, run in (("C function", by_c_function(q, k, v, causal)), ("PyTorch", call), ("sdpa", call)):
            if contender == "sdpa":
                sdpa.activate()
            error = rel_rms(run(), want)
            for what, measure in (("loop", loop_us), ("graph", graph_us)):
                yield dict(what=what, problem=text.replace("c", " causal"), contender=contender,
                           us=measure(run, repeats), rel_rms=error)
        restore_flash_attention_impl()


TRAINING = ("4,32,32,4096,64c 4,16,16,4096,128c 4,32,8,4096,128c 1,32,8,16384,128c 8,16,16,1024,128 2,8,8,4096,256c "
            "1,8,8,512,64 1,16,16,1000,128").split()


def training(repeats):
    """Yields the rows of --training: medians over steps. PyTorch and sdpa alternate after a few steps, so that both run at the
    same clock, in alternating order."""
    for text in TRAINING:
        B, Hq, Hkv, S, D = map(int, text.rstrip("c").split(","))
        q, k, v = (torch.randn(B, H, S, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                   for H in (Hq, Hkv, Hkv))
        grad = torch.randn_like(q)

        def step():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=text[-1] == "c", enable_gqa=Hq != Hkv)
            return torch.autograd.grad(out, (q, k, v), grad)
        times, results = {"PyTorch": [], "sdpa": []}, {}
        for name in [name for turn in range(4 * repeats + 1) for name in list(times)[::(-1) ** turn]]:
            if name == "sdpa":
                sdpa.activate()
            results[name] = step()
            starts = [torch.cuda.Event(enable_timing=True) for _ in range(7)]
            for start in starts:
                start.record()
                step()
            torch.cuda.synchronize()
            times[name] += [a.elapsed_time(b) * 1e3 for a, b in zip(starts[1:], starts[2:])]
            if name == "sdpa":
                restore_flash_attention_impl()
        medians = {name: statistics.median(us[5:]) for name, us in times.items()}  # the first turn builds and warms up
        error = max(map(rel_rms, results["sdpa"], results["PyTorch"]))
        for name, us in medians.items():
            yield dict(what="step", problem=text.replace("c", " causal"), contender=name, us=us,
                       ratio=medians["PyTorch"] / us, rel_rms=error if name == "sdpa" else 0.0)


# ---- the backward pass alone ----

# B,Hq,Hkv,S,D.
GRADIENTS = ("4,16,16,4096,128 1,16,16,16384,128 1,32,8,8192,128 16,16,16,1024,128 4,32,32,4096,64 1,32,32,16384,64 "
             "2,8,8,4096,256 1,8,8,16384,256").split()
PACKED = {"16 of 256 to 4,096, packed": drawn(16, 256, 4096)}  # lengths of sequences; 16 heads, D=128
WRONG = 2 * engine.LIMITS["bf16"][0]  # as for the gradients in tools/engine.py
TURN_US = 20e3


@contextlib.contextmanager
def deterministic_algorithms(is_on):
    """PyTorch's setting, without its kernels that fill new tensors."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(is_on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def packed_rows(tensors):
    """[1,H,rows,D] as [rows,H,D]."""
    return [x.squeeze(0).transpose(0, 1) for x in tensors]


def unpacked(rows):
    return rows.transpose(0, 1)[None]


def by_backend(backend, q, k, v, causal, starts, most):
    """A function that calls PyTorch's operator with one of its kernels and returns O [B,Hq,Sq,D]. Packed sequences are a nested
    tensor."""
    def run():
        rows = q, k, v
        if starts is not None:
            rows = [torch.nested.nested_tensor_from_jagged(x, starts, max_seqlen=most).transpose(1, 2) for x in packed_rows(rows)]
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*rows, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        return out if starts is None else unpacked(out.transpose(1, 2).values())
    return run


def by_flash_attention_4(q, k, v, causal, starts, most, deterministic):
    """The same for FlashAttention-4. None if it is not installed."""
    call = installed("flash_attn.cute.interface", "flash_attn_func" if starts is None else "flash_attn_varlen_func")
    if not call:
        return None
    options = dict(causal=causal, deterministic=deterministic)
    if starts is not None:
        options |= dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=most, max_seqlen_k=most)

    def run():
        rows = packed_rows((q, k, v)) if starts is not None else [x.transpose(1, 2) for x in (q, k, v)]
        out = call(*rows, **options)
        out = out[0] if isinstance(out, tuple) else out
        return unpacked(out) if starts is not None else out.transpose(1, 2)
    return run


def gradient_calls(q, k, v, causal, starts, most, deterministic):
    """{contender: function that returns O}, for packed sequences if there are starts."""
    limits = {} if starts is None else dict(q_starts=starts, k_starts=starts, most_keys=most)
    mode = "deterministic" if deterministic else "sdpa"
    calls = {"sdpa": lambda: sdpa.attention(q, k, v, "br" if causal else None, backward=mode, **limits)}
    major, minor, patch = (torch.backends.cudnn.version() // n % 100 for n in (10000, 100, 1))
    calls[f"cuDNN {major}.{minor}.{patch}"] = by_backend(SDPBackend.CUDNN_ATTENTION, q, k, v, causal, starts, most)
    if starts is None:
        calls["FlashAttention-2"] = by_backend(SDPBackend.FLASH_ATTENTION, q, k, v, causal, starts, most)
    else:
        limits_of_both, window = (starts, starts, most, most), (-1, 0) if causal else (-1, -1)
        calls["FlashAttention-2"] = lambda: unpacked(varlen_attn(*packed_rows((q, k, v)), *limits_of_both, window_size=window))
    if flash_attention_4 := by_flash_attention_4(q, k, v, causal, starts, most, deterministic):
        calls[f"FlashAttention-4 {importlib.metadata.version('flash-attn-4')}"] = flash_attention_4
    return calls


def part_of_one_head(tensors, rows):
    """The last KV head of the last batch and its query heads, in float32. tensors: q, k, v and dO, or dQ, dK and dV."""
    Hkv = tensors[1].shape[1]
    return [x.detach()[-1:, -(x.shape[1] // Hkv):, rows].float() for x in tensors]


def gradients_in_float32(tensors, causal, rows):
    """dQ, dK and dV of part_of_one_head()."""
    *inputs, grad = part_of_one_head(tensors, rows)
    for x in inputs:
        x.requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=True)
    return torch.autograd.grad(out, inputs, grad)


def turn_us(replay, us):
    """Median time of the replays of a turn, after a warm-up."""
    count = math.ceil(TURN_US / us)
    for _ in range(count):
        replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(events))


def gradients_of(problem, sizes, lengths, causal, repeats, wanted):
    """The rows of --gradients for one problem."""
    B, Hq, Hkv, S, D = sizes
    starts = most = None
    if lengths:
        starts, most = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda"), max(lengths)
    q, k, v = (torch.randn(B, H, S, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for H in (Hq, Hkv, Hkv))
    grad = torch.randn(B, Hq, S, D, device="cuda", dtype=torch.bfloat16)
    rows = slice(S - (lengths or [S])[-1], S)
    want = gradients_in_float32((q, k, v, grad), causal, rows)
    pairs = Hq * sum(n * (n + 1) // 2 if causal else n * n for n in lengths or B * [S])
    runs, error, kept = {}, {}, []  # kept: what the graphs read
    for is_deterministic in (False, True):
        calls = gradient_calls(q, k, v, causal, starts, most, is_deterministic)
        for name in [name for name in calls if name == "sdpa" or wanted.search(name)]:
            key = name, is_deterministic
            try:
                with deterministic_algorithms(is_deterministic):
                    out = calls[name]()
                    kept.append(out)

                    def backward(out=out):
                        return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
                    got = backward()
                    if is_deterministic and not all(map(torch.equal, got, backward())):
                        raise RuntimeError("two runs differ")
                    error[key] = max(map(rel_rms, part_of_one_head(got, rows), want))
                    runs[key] = graph_of(backward, 1, torch.cuda.current_stream())
            except Exception as trouble:  # some kernels do not support all problems
                if name == "sdpa":
                    raise
                print(f"{problem}: {name}{', deterministic' * is_deterministic}: {str(trouble).splitlines()[0]}", file=sys.stderr)
    times, first = {key: [] for key in runs}, {key: loop_us(replay, 1, 3) for key, replay in runs.items()}
    for turn in range(repeats):
        at = turn % len(runs)
        for key in [*runs][at:] + [*runs][:at]:
            times[key].append(turn_us(runs[key], first[key]))
    medians = {key: statistics.median(of_turns) for key, of_turns in times.items()}
    return [dict(what="backward" + ", deterministic" * is_deterministic, problem=problem + " causal" * causal, contender=name,
                 us=us, ratio=us / medians["sdpa", is_deterministic], rel_rms=error[name, is_deterministic],
                 tflops=10 * D * pairs / us * 1e-6) for (name, is_deterministic), us in medians.items()]


def gradients(repeats, wanted, only):
    """Yields the rows of --gradients."""
    problems_of_one_length = {text: ([*map(int, text.split(","))], None) for text in GRADIENTS}
    packed = {problem: ([1, 16, 16, sum(lengths), 128], lengths) for problem, lengths in PACKED.items()}
    for problem, (sizes, lengths) in {**problems_of_one_length, **packed}.items():
        for causal in [causal for causal in (False, True) if only.search(problem + " causal" * causal)]:
            with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
                rows = gradients_of(problem, sizes, lengths, causal, repeats, wanted)
            yield from rows


def host_us(run, repeats, count=200):
    """CPU time of a call; the GPU is faster, or its queue holds all calls."""
    def once():
        torch.cuda.synchronize()
        since = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - since) / count
    run()
    return min(once() for _ in range(3 * repeats)) * 1e6


def host(repeats):
    """Yields the rows of --host."""
    q, k, v = (torch.randn(2, H, S, 128, device="cuda", dtype=torch.bfloat16) for H, S in ((8, 1), (2, 256), (2, 256)))
    lengths = torch.tensor([200, 256], dtype=torch.int32, device="cuda")
    pages = [x.unflatten(2, (16, 16)).transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v)]
    table = torch.arange(32, dtype=torch.int32, device="cuda").view(2, 16)
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    fa3 = installed("fa3_fwd_interface", "flash_attn_with_kvcache")

    def pytorchs():
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    sinks = torch.zeros(8, device="cuda")
    calls = {"PyTorch": pytorchs, "F.scaled_dot_product_attention, sdpa": pytorchs,
             "attention()": lambda: sdpa.attention(q, k, v),
             "attention(), k_lengths": lambda: sdpa.attention(q, k, v, "br", k_lengths=lengths),
             "attention(), pages": lambda: sdpa.attention(q, *pages, "br", k_lengths=lengths, page_table=table),
             "attention(), sinks": lambda: sdpa.attention(q, k, v, "br", (127, 0), sinks=sinks)}
    if fa3:
        calls["FlashAttention-3"] = lambda: fa3(*rows)
        calls["FlashAttention-3, lengths"] = lambda: fa3(*rows, cache_seqlens=lengths, causal=True)
    with torch.no_grad():
        for name, call in calls.items():
            if "sdpa" in name:
                sdpa.activate()
            yield dict(what="host", problem="2,8,2,1,256,128", contender=name, us=host_us(call, repeats), rel_rms=0.0)
            if "sdpa" in name:
                restore_flash_attention_impl()


def attention_share(run):
    """The share of attention in the GPU time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    kernels = [(event.name, event.time_range.elapsed_us()) for event in profile.events()
               if event.device_type == torch.autograd.DeviceType.CUDA]
    of_attention = sum(us for name, us in kernels if re.search("sdpa|flash|fmha|attention", name))
    return of_attention / sum(us for _, us in kernels)


def models(repeats):
    """Yields the rows of --models."""
    import transformers
    importlib.import_module("transformers_attention")  # registers "attention_cu"
    for kind, sizes in MODELS.items():
        config = getattr(transformers, kind + "Config")(dtype=torch.bfloat16, **sizes)
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = getattr(transformers, kind + "ForCausalLM")(config).to(torch.bfloat16).eval()
        tokens = torch.randint(1, SIZES["vocab_size"], (1, 8192), device="cuda")

        def prefill():
            return model(tokens, logits_to_keep=64).logits

        def generate_us(count):
            options = dict(max_new_tokens=count, min_new_tokens=count, do_sample=False)
            return loop_us(lambda: model.generate(tokens, attention_mask=torch.ones_like(tokens), **options), 1, 1)
        want = None
        for contender, name, backend in CONTENDERS:
            if backend and kind == "Mistral":
                continue  # a window is a mask tensor, which PyTorch's FlashAttention does not support
            if contender == "sdpa":
                sdpa.activate()
            model.set_attn_implementation(name)
            with torch.no_grad(), sdpa_kernel(backend) if backend else contextlib.nullcontext():
                got = prefill()
                want = got if want is None else want
                values = {"prefill": loop_us(prefill, repeats, 1), "attention's share": attention_share(prefill),
                          "token": (generate_us(33) - generate_us(1)) / 32}
            for what, value in values.items():
                yield dict(what=what, problem=kind, contender=contender, us=value, rel_rms=rel_rms(got, want))
        restore_flash_attention_impl()
        del model


def installed(module, function):
    """A function of a package; None if it is not installed."""
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as missing:
        if module.startswith(missing.name):
            return None
        raise


def in_pages(x, lengths, size, places):
    """Splits x [B,Hkv,Sk,D] into pages [pages,Hkv,size,D]; sequence b has the pages places[b]."""
    pages = x.new_zeros(sum(map(len, places)), x.shape[1], size, x.shape[3])
    for one, length, place in zip(x, lengths, places):
        whole = F.pad(one[:, :length], (0, 0, 0, len(place) * size - length))
        pages[place] = whole.view(x.shape[1], len(place), size, x.shape[3]).transpose(0, 1)
    return pages


def by_flashinfer(q, k, v, lengths, places):
    """A function that calls FlashInfer with paged K and V and a causal mask, after planning, and returns O."""
    (B, Hq, Sq, D), (_, Hkv, size, _) = q.shape, k.shape
    ends = [sum(map(len, places[:b])) for b in range(B + 1)]
    tables = ends, torch.cat(places), [(n - 1) % size + 1 for n in lengths]
    tables = [torch.as_tensor(x, dtype=torch.int32, device="cuda") for x in ([*range(0, (B + 1) * Sq, Sq)], *tables)]
    kind, options = ("BatchPrefill", dict(backend="fa3")) if Sq > 1 else ("BatchDecode", dict(use_tensor_cores=True))
    room = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    call = installed("flashinfer", kind + "WithPagedKVCacheWrapper")(room, "HND", **options)
    call.plan(*tables[Sq == 1:], Hq, Hkv, D, size, q_data_type=q.dtype, kv_data_type=q.dtype,
              **(dict(causal=True) if Sq > 1 else {}))
    packed = q.transpose(1, 2).reshape(B * Sq, Hq, D)
    return lambda: call.run(packed, (k, v)).view(B, Sq, Hq, D).transpose(1, 2)


def calls_of(queries, lengths, more):
    """{contender: function that returns O}, for these numbers of queries and cache lengths; without queries, for packed
    sequences. `more` has additional arguments of attention()."""
    B, Sq, Sk = (len(lengths), queries, max(lengths)) if queries else (1, *[sum(lengths)] * 2)
    q, k, v = (torch.randn(B, H, S, 128, device="cuda", dtype=torch.bfloat16) for H, S in ((32, Sq), (8, Sk), (8, Sk)))
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    fa3 = installed("fa3_fwd_interface", "flash_attn_with_kvcache" if queries else "flash_attn_varlen_func")
    if not queries:
        starts = torch.tensor([sum(lengths[:b]) for b in range(len(lengths) + 1)], dtype=torch.int32, device="cuda")
        limits = dict(q_starts=starts, k_starts=starts, most_keys=max(lengths))
        calls = {"sdpa": lambda: sdpa.attention(q, k, v, "br", **limits, **more)}
        packed = [x[0] for x in rows] + [starts] * 2 + [max(lengths)] * 2
        return calls | ({"FlashAttention-3": lambda: fa3(*packed, causal=True)[None].transpose(1, 2)} if fa3 else {})
    limits = dict(causal="br", k_lengths=torch.tensor(lengths, dtype=torch.int32, device="cuda"))
    calls = {"sdpa": lambda: sdpa.attention(q, k, v, **limits, **more)}
    if fa3:
        calls["FlashAttention-3"] = lambda: fa3(*rows, cache_seqlens=limits["k_lengths"], causal=True).transpose(1, 2)
    for size in (16, 64, 256):
        counts = [-(-n // size) for n in lengths]
        places = torch.randperm(sum(counts)).split(counts)
        pages = [in_pages(x, lengths, size, places) for x in (k, v)]
        table = torch.nn.utils.rnn.pad_sequence(places, batch_first=True).int().cuda()
        calls[f"sdpa, pages of {size}"] = lambda kv=pages, to=table: sdpa.attention(q, *kv, page_table=to, **limits, **more)
        if installed("flashinfer", "__version__"):
            calls[f"FlashInfer, pages of {size}"] = by_flashinfer(q, *pages, lengths, places)
    return calls


def sequences(repeats):
    """Yields the rows of --lengths; contenders alternate."""
    for problem, (queries, lengths) in SEQUENCES.items():
        calls = calls_of(queries, lengths, {})
        want = calls["sdpa"]()
        error = {name: rel_rms(call(), want) for name, call in calls.items()}
        replays = {name: graph_of(call) for name, call in calls.items()}
        times = dict.fromkeys(calls, math.inf)
        for name in [name for turn in range(repeats) for name in list(calls)[::(-1) ** turn]]:
            times[name] = min(times[name], loop_us(replays[name], 1, 2) / 20)
        for name, us in times.items():
            yield dict(what="graph", problem=problem, contender=name, us=us, rel_rms=error[name])
        del calls, replays, want


def invariant(repeats):
    """Yields the rows of --invariant, alternating with and without batch_invariant."""
    for problem, numbers in (*SEQUENCES.items(), *((text, None) for text in INVARIANT)):
        more = {}
        if numbers:
            calls = {name: call for name, call in calls_of(*numbers, more).items() if name.startswith("sdpa")}
        else:
            B, Hq, Hkv, Sq, Sk = map(int, problem.rstrip("c").split(","))
            x = [torch.randn(B, H, S, 128, device="cuda", dtype=torch.bfloat16) for H, S in [(Hq, Sq)] + 2 * [(Hkv, Sk)]]
            calls = {"sdpa": lambda x=x, causal=problem[-1] == "c", more=more: sdpa.attention(*x, "br" if causal else None, **more)}
        for name, call in calls.items():
            replays, results = {}, {}
            for on in (False, True):
                more["batch_invariant"] = on
                results[on], replays[on] = call(), graph_of(call)
            times = dict.fromkeys(replays, math.inf)
            for on in [on for turn in range(2 * repeats) for on in (False, True)[::(-1) ** turn]]:
                times[on] = min(times[on], loop_us(replays[on], 1, 2) / 20)
            for on, us in times.items():
                yield dict(what="graph", problem=problem if numbers else problem.replace("c", " causal"),
                           contender=name + ", batch_invariant" * on, us=us, ratio=us / times[False],
                           rel_rms=rel_rms(results[on], results[False]))


# ---- score_mod and mask_mod ----

def alibi_case(B, Hq, Hkv, Sq, Sk, D):
    slopes = 2 ** (-8 / Hq * torch.arange(1, Hq + 1, device="cuda"))
    return {}, dict(score_mod="s - x0[h] * real(q + Sk - Sq - k)", args=[slopes]), \
        lambda s, b, h, q, k: s - slopes[h] * (q + Sk - Sq - k), None


def softcap_case(*_):
    return dict(softcap=30.0), dict(score_mod="30 * tanh_approx(s / 30)"), lambda s, b, h, q, k: 30 * torch.tanh(s / 30), None


def causal_case(*_):
    return dict(causal="br"), dict(mask_mod="k <= q + Sk - Sq"), None, lambda b, h, q, k: k <= q


def documents_case(B, Hq, Hkv, Sq, Sk, D, count=16):
    document = (torch.arange(Sk, device="cuda") * count // Sk).int()
    return dict(bias=document[:, None] == document[None]), dict(mask_mod="i0[q] == i0[k]", args=[document]), None, \
        lambda b, h, q, k: document[q] == document[k]


# {case: attention()'s options without and with the expression, and FlexAttention's score_mod and mask_mod}.
MODIFIED = [("identity", lambda *_: ({}, dict(score_mod="s + 0.f"), None, None), "4,16,16,4096,4096,128 4,32,32,4096,4096,64"),
            ("ALiBi", alibi_case, "4,16,16,4096,4096,128 4,32,32,4096,4096,64 32,32,8,1,8192,128"),
            ("softcap", softcap_case, "4,16,16,4096,4096,128 4,32,32,4096,4096,64"),
            ("causal", causal_case, "4,16,16,4096,4096,128 4,32,32,4096,4096,64"),
            ("16 documents", documents_case, "1,16,16,16384,16384,128")]


def by_flex(q, k, v, score_mod, mask_mod, backend):
    """A function that calls compiled FlexAttention with a backend and returns O."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    sizes = q.shape[2], k.shape[2]
    torch._dynamo.reset()  # otherwise it stops compiling after 8 functions
    kept = create_block_mask(mask_mod, None, None, *sizes, device="cuda") if mask_mod else None
    compiled = torch.compile(flex_attention, dynamic=False)
    options = dict(block_mask=kept, enable_gqa=q.shape[1] != k.shape[1], kernel_options={"BACKEND": backend})
    return lambda: compiled(q, k, v, score_mod=score_mod, **options)


def mods(repeats):
    """Yields the rows of --mods; contenders alternate."""
    for case, make, problems_of_case in MODIFIED:
        for problem in problems_of_case.split():
            B, Hq, Hkv, Sq, Sk, D = sizes = [*map(int, problem.split(","))]
            q, k, v = (torch.randn(B, H, S, D, device="cuda", dtype=torch.bfloat16) for H, S in [(Hq, Sq)] + 2 * [(Hkv, Sk)])
            without, options, score_mod, mask_mod = make(*sizes)
            calls = {}
            for name, more in (("sdpa, without the expression", without), ("sdpa", options)):
                kept = sdpa.block_mask(q, k, v, **more) if {"mask_mod", "bias"} & more.keys() else None
                calls[name] = lambda more=more, kept=kept: sdpa.attention(q, k, v, block_mask=kept, **more)
            backends = ["TRITON"] + ["FLASH"] * bool(importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute"))
            calls |= {f"FlexAttention, {backend}": by_flex(q, k, v, score_mod, mask_mod, backend) for backend in backends}
            # Compute one head with the formula.
            at_q, at_k = torch.arange(Sq, device="cuda")[:, None], torch.arange(Sk, device="cuda")
            logits = q[0, -1].float() @ k[0, -1].float().T / math.sqrt(D)
            logits = score_mod(logits, 0, Hq - 1, at_q, at_k) if score_mod else logits
            logits = logits.masked_fill(~mask_mod(0, Hq - 1, at_q, at_k), -math.inf) if mask_mod else logits
            want = logits.softmax(-1) @ v[0, -1].float()
            del logits
            error, replays = {}, {}
            for name in [*calls]:
                try:
                    error[name], replays[name] = rel_rms(calls[name]()[0, -1], want), graph_of(calls[name])
                except Exception as trouble:  # this backend of FlexAttention does not support the case
                    print(f"{case} {problem}: {name}: {str(trouble).splitlines()[0]}", file=sys.stderr)
                    del calls[name]
            times = {name: [] for name in calls}
            for name in [name for turn in range(2 * repeats) for name in list(calls)[::(-1) ** turn]]:
                times[name].append(loop_us(replays[name], 1, 1) / 20)
            first = statistics.median(times["sdpa, without the expression"])
            for name in calls:
                us = statistics.median(times[name])
                yield dict(what=case, problem=problem, contender=name, us=us, ratio=us / first, rel_rms=error[name])
            del calls, replays


def main():
    options = cli.parse_options(__doc__)
    facts = dict(engine.measured_on(engine.need_gpu()), torch=torch.__version__)
    columns = ["what", "problem", "contender", "us", "ratio", "rel_rms", *["tflops"] * options.gradients, *facts]
    writer, are_wrong = csv.DictWriter(sys.stdout, columns), False
    writer.writeheader()
    patterns = {}
    for name in ("contenders", "only"):
        try:
            patterns[name] = re.compile(getattr(options, name) or "")
        except re.error:
            raise cli.Refused(f"--{name} {getattr(options, name)}: not a regular expression") from None
    of_gradients = functools.partial(gradients, wanted=patterns["contenders"], only=patterns["only"])
    for is_wanted, measure in ((options.problems, problems), (options.models, models), (options.lengths, sequences),
                              (options.invariant, invariant), (options.mods, mods),
                              (options.training, training), (options.gradients, of_gradients), (options.host, host)):
        for row in measure(options.repeats) if is_wanted else ():
            ratio = f"{row['ratio']:.3f}" if "ratio" in row else ""
            if "tflops" in row:
                are_wrong |= row["contender"] == "sdpa" and not row["rel_rms"] <= WRONG
                row["tflops"] = f"{row['tflops']:.1f}"
            writer.writerow({**facts, **row, "us": f"{row['us']:.4g}", "ratio": ratio, "rel_rms": f"{row['rel_rms']:.2e}"})
            sys.stdout.flush()
    return int(are_wrong)


if __name__ == "__main__":
    cli.command("frameworks.py", main)
