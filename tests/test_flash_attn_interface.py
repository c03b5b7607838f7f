"""Tests of bindings/flash_attn_interface.py: signatures, results against a reference in double for each sequence, writes to
caches, refusals, and transformers' own FlashAttention-3. Without a GPU a reference replaces the kernels.
usage: python3 -m pytest tests/test_flash_attn_interface.py"""
import ctypes
import functools
import inspect
import itertools
import math
import os
import random
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, name) for name in ("bindings", "bindings/flash_attn_3", "tools", "tests")]
torch = pytest.importorskip("torch", minversion="2.11", reason="PyTorch 2.11 or newer is missing")
AllPairs = pytest.importorskip("allpairspy").AllPairs
import builds  # noqa: E402
import flash_attn_interface as fa  # noqa: E402
import pytorch as sdpa  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402

GPU, ATTENTION = torch.cuda.is_available(), sdpa.attention
DEVICE, DTYPE, LIMIT, LSE_LIMIT = ("cuda", torch.bfloat16, 1.6e-2, 1e-2) if GPU else ("cpu", torch.float32, 1e-5, 1e-5)
E4M3 = torch.float8_e4m3fn
LIMITS = {DTYPE: LIMIT, E4M3: 6e-2 if GPU else 5e-3}  # O of e4m3 is rounded to bf16
D = 64

# FlashAttention-3's arguments in their order, with their defaults.
DESCALES = "q_descale=None k_descale=None v_descale=None "
WINDOW = "window_size=(-1,-1) attention_chunk=0 "
HINTS = "num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
SIGNATURES = {
    "flash_attn_func": f"q k v softmax_scale=None causal=False qv=None {DESCALES} {WINDOW} softcap=0.0 {HINTS}",
    "flash_attn_qkvpacked_func": f"qkv softmax_scale=None causal=False {DESCALES} {WINDOW} softcap=0.0 deterministic=False "
                                 "num_heads_q=None sm_margin=0 return_attn_probs=False",
    "flash_attn_varlen_func":
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q=None seqused_k=None softmax_scale=None "
        f"causal=False qv=None {DESCALES} {WINDOW} softcap=0.0 {HINTS}",
    "flash_attn_with_kvcache":
        "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None cache_seqlens=None "
        "cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None "
        f"max_seqlen_q=None rotary_seqlens=None {DESCALES} softmax_scale=None causal=False {WINDOW} softcap=0.0 "
        "rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 "
        "return_softmax_lse=False",
    "flash_attn_combine": "out_partial lse_partial out=None out_dtype=None",
    "get_scheduler_metadata":
        "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens qkv_dtype=torch.bfloat16 "
        "headdim_v=None cu_seqlens_q=None cu_seqlens_k_new=None cache_leftpad=None page_size=None max_seqlen_k_new=0 "
        f"causal=False {WINDOW} has_softcap=False num_splits=0 pack_gqa=None sm_margin=0"}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    """Signatures are FlashAttention-3's; our additional arguments are keyword-only."""
    found = inspect.signature(getattr(fa, name)).parameters.values()
    positional = [(x.name, x.default) for x in found if x.kind == x.POSITIONAL_OR_KEYWORD]
    words = [word.partition("=") for word in SIGNATURES[name].split()]
    assert positional == [(word, eval(value) if equals else inspect.Parameter.empty) for word, equals, value in words]
    assert {x.name for x in found if x.kind == x.KEYWORD_ONLY} <= {"learnable_sink", "page_table", "alibi_slopes"}
    assert {x.name for x in found if x.kind not in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)} <= {"others"}


# ---- the two references ----

def formula(q, k, v, seen, scale, softcap, sinks):
    """O and LSE in double of one sequence, q [Hq,Sq,D], k and v [Hkv,Sk,D], seen [Sq,Sk]."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    S = q @ k.mT * (q.shape[2] ** -0.5 if scale is None else scale)
    S = (softcap * torch.tanh(S / softcap) if softcap else S).masked_fill(~seen, -torch.inf)
    if sinks is not None:  # one more key, whose V is 0
        S = torch.cat([S, sinks.double()[:, None, None].expand(*S.shape[:2], 1)], 2)
        v = torch.cat([v, v.new_zeros(len(v), 1, v.shape[2])], 1)
    any_seen = (S > -torch.inf).any(2, keepdim=True)
    return torch.softmax(S.where(any_seen, 0), 2).where(any_seen, 0) @ v, torch.logsumexp(S, 2)


def attention(q, k, v, causal=None, window=(None, None), scale=None, q_descale=None, k_descale=None, v_descale=None,
              return_lse=False, softcap=None, sinks=None, k_lengths=None, q_starts=None, k_starts=None, most_keys=0,
              page_table=None, q_lengths=None, out_dtype=None, k_firsts=None, backward=None):
    """attention() of bindings/pytorch.py with pytorch.cpp's checks. Rows outside all sequences are NaN."""
    assert causal in (None, "br") and (window == (None, None) or window[2] == "br")
    assert all(x.dim() == 4 and x.stride(3) == 1 and x.dtype == q.dtype for x in (q, k, v))
    B = next((len(x) - 1 for x in (q_starts, k_starts) if x is not None), len(q))
    for x, length in ((q_starts, B + 1), (k_starts, B + 1), (k_lengths, B), (q_lengths, B), (k_firsts, B)):
        assert x is None or (x.dtype == torch.int32 and x.is_contiguous() and x.shape == (length,))
    has_pages = page_table is not None
    if has_pages:
        assert page_table.dtype == torch.int32 and page_table.stride(1) == 1 and len(page_table) == B
        assert k_starts is None and k.shape[2] > 0
    assert len(q) == (B if q_starts is None else 1) and (has_pages or len(k) == (B if k_starts is None else 1))
    assert most_keys == 0 or has_pages or any(x is not None for x in (k_lengths, q_lengths, q_starts, k_starts))

    def factors(x, factor, batch):
        """Factors [batch,H]; q's may also be per key head."""
        if factor is None:
            return torch.ones(batch, x.shape[1], dtype=torch.double, device=q.device)
        assert q.dtype == E4M3 and factor.dtype == torch.float32
        by_key_head = x is q and factor.dim() and factor.shape[-1] == k.shape[1]
        factor = factor.repeat_interleave(q.shape[1] // k.shape[1], -1) if by_key_head else factor
        return factor.expand(batch, x.shape[1])
    key_batch = len(k) if k_starts is None and not has_pages else B
    wide = [x.double() for x in (q, k, v)]
    scales = [factors(q, q_descale, len(q) if q_starts is None else B), factors(k, k_descale, key_batch), factors(v, v_descale, key_batch)]
    out, lse = (wide[0].new_full((*q.shape[:3], size), torch.nan) for size in (v.shape[3], 1))
    results = []
    for b in range(B):
        def rows(x, starts):
            return x[b] if starts is None else x[0, :, int(starts[b]):int(starts[b + 1])]
        keys = [x[page_table[b].long()].transpose(0, 1).flatten(1, 2) if has_pages else rows(x, k_starts)
                for x in wide[1:]]
        count = keys[0].shape[1] if k_lengths is None else min(int(k_lengths[b]), keys[0].shape[1])
        count = min(count, most_keys) if most_keys else count
        first = 0 if k_firsts is None else min(max(int(k_firsts[b]), 0), count)
        queries = rows(wide[0], q_starts)
        queries = queries if q_lengths is None else queries[:, :int(q_lengths[b])]
        one_q, *keys = (x * factor[min(b, len(factor) - 1)][:, None, None]
                        for x, factor in zip((queries, *(x[:, first:count] for x in keys)), scales))
        count -= first
        key = torch.arange(count, device=q.device)
        place = torch.arange(one_q.shape[1], device=q.device)[:, None] + count - one_q.shape[1]
        seen = (key <= place) if causal else (key >= 0) & (place >= place)
        seen = seen if window[0] is None else seen & (key >= place - window[0])
        seen = seen if window[1] is None else seen & (key <= place + window[1])
        results.append(formula(one_q, *keys, seen, scale, softcap, sinks))
    lse = lse[..., 0]
    for b, (one_out, one_lse) in enumerate(results):
        batch, first = (b, 0) if q_starts is None else (0, int(q_starts[b]))
        own = slice(first, first + one_out.shape[1])
        out[batch, :, own], lse[batch, :, own] = one_out, one_lse
    assert out_dtype is None or q.dtype == E4M3
    dtype = out_dtype or (torch.half if q.dtype == E4M3 else q.dtype)
    like = torch.empty_like(q, dtype=dtype) if v.shape[3] == q.shape[3] else out.new_empty(out.shape, dtype=dtype)
    out = like.copy_(out)
    return (out, lse.float()) if return_lse else out


@functools.cache
def appender():
    """append.cu on the CPU backend, and its structs."""
    structs = builds.structs_of(builds.Tree().read("bindings/append.h"))
    library = ctypes.CDLL(builds.host_library(program="tests/host_append.cu"))
    library.host_last_stream.restype = ctypes.c_void_p
    return library, structs["SdpaAppend"], structs["SdpaNewRows"]


def append(k_cache, v_cache, k, v, lengths, page_table, starts):
    """sdpa::append with pytorch.cpp's signature."""
    library, SdpaAppend, SdpaNewRows = appender()

    def rows_of(cache, x):
        size = x.element_size()
        strides = *((0, *x.stride()) if starts is not None else x.stride())[:3], *cache.stride()[:3]
        return SdpaNewRows(x.data_ptr(), cache.data_ptr(), *(n * size for n in strides), x.shape[-1] * size)
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    ints = [x if x is None else x.to(torch.int32) for x in (lengths, starts, page_table)]
    ints = [x if x is None or x.stride(-1) == 1 else x.contiguous() for x in ints]
    pointers = [x if x is None else x.data_ptr() for x in ints]
    new = torch.empty_like(ints[0])
    table = (0, 0) if page_table is None else (ints[2].stride(0), ints[2].shape[1])
    sizes = len(lengths), k.shape[-2], k.shape[0 if starts is not None else 1], *k_cache.shape[:2]
    a = SdpaAppend(rows_of(k_cache, k), rows_of(v_cache, v), *sizes, pointers[0], new.data_ptr(), *pointers[1:], *table)
    stream = ctypes.create_string_buffer(1)  # the CPU backend knows a stream by its address
    assert library.sdpa_append(ctypes.byref(a), stream) == 0
    assert library.host_last_stream() == ctypes.addressof(stream)
    return new


if not GPU:
    sdpa.first_call.library = None  # fake tensors and stand-ins do without pytorch.cpp
    ON_CPU = torch.library.Library("sdpa", "IMPL")
    ON_CPU.impl("append", append, "CPU")


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Records the arguments of each kernel call."""
    seen, kernel = [], sdpa.attention if GPU else attention
    monkeypatch.setattr(sdpa, "attention", lambda *x, **more: seen.append(more) or kernel(*x, **more))
    return seen


def one(q, k, v, causal=False, window_size=(-1, -1), softmax_scale=None, softcap=0.0, learnable_sink=None,
        factors=(1, 1, 1)):
    """O [Sq,Hq,Dv] and LSE [Hq,Sq] of one sequence as FlashAttention defines them: query i is key i + Sk - Sq."""
    q, k, v = (x.double() * (f[..., None] if isinstance(f, torch.Tensor) else f) for x, f in zip((q, k, v), factors))
    seen = torch.zeros(len(q), len(k), dtype=bool)
    for i, j in itertools.product(range(len(q)), range(len(k))):
        ahead = j - (i + len(k) - len(q))
        seen[i, j] = not (causal and ahead > 0 or -1 < window_size[0] < -ahead or -1 < window_size[1] < ahead)
    heads = (x.transpose(0, 1) for x in (q, k, v))
    out, lse = formula(*heads, seen.to(q.device), softmax_scale, softcap, learnable_sink)
    return out.transpose(0, 1), lse


def close(got, want, dtype=DTYPE):
    got, want = got.double(), want.double()
    assert got.shape == want.shape and float((got - want).norm()) <= LIMITS[dtype] * max(float(want.norm()), 1e-6)


def close_lse(got, want):
    assert got.shape == want.shape and torch.equal(got.isfinite(), want.isfinite()) and got.dtype == torch.float32
    assert not want.isfinite().any() or float((got - want)[want.isfinite()].abs().max()) <= LSE_LIMIT


def drawn(*shape, dtype=DTYPE):
    return torch.randn(shape, device=DEVICE).to(dtype)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, device=DEVICE, dtype=dtype)


def starts_of(lengths):
    return ints(0, *itertools.accumulate(lengths))


def bits(x):
    """Returns the bytes of an e4m3 tensor, which supports neither indexing nor comparison."""
    return x.view(torch.uint8) if x.dtype == E4M3 else x


def pairs(is_none, **choices):
    """Covering arrays: each value of a name occurs with each value of every other, except for combinations that is_none()
    rejects. Returns three with shuffled values, since allpairspy always sets undetermined values to the same one."""
    torch.manual_seed(0)
    shuffled, names, found = random.Random(0), list(choices), []
    for _ in range(3):
        values = [shuffled.sample(x, len(x)) for x in choices.values()]
        rows = AllPairs(values, filter_func=lambda row: not is_none(dict(zip(names, row))))
        found += [SimpleNamespace(**dict(zip(names, row))) for row in rows]
    return found


# Each option of a mask is a build of the kernels, so a GPU has fewer.
WINDOWS = [(-1, -1), (3, 0), (2, 2), (-1, 4), (5, -1), (-1, 0)]
COMMON = dict(heads=[(4, 4), (4, 2), (4, 1)], causal=[False, True], window_size=WINDOWS, softmax_scale=[None, 0.3],
              softcap=[0.0] if GPU else [0.0, 2.0], sink=[False] if GPU else [False, True],
              dtype=[DTYPE, E4M3], with_factors=[True, False], with_lse=[False, True])


def options_of(c):
    sink = drawn(c.heads[0], dtype=torch.float32) if c.sink else None
    return dict(causal=c.causal, window_size=c.window_size, softmax_scale=c.softmax_scale, softcap=c.softcap,
                learnable_sink=sink)


def factors_of(c, B):
    """{name: [B,Hkv], or [1,Hkv] shared by all sequences}, and the three factors of each sequence, q's per query head."""
    if c.dtype != E4M3 or not c.with_factors:
        return {}, [(1, 1, 1)] * B
    Hq, Hkv = c.heads
    factors = [torch.rand(B if c.causal else 1, Hkv, device=DEVICE) + 0.5 for _ in "qkv"]
    named = {name + "_descale": x for name, x in zip("qkv", factors)}
    q, k, v = (x.expand(B, -1) for x in factors)
    return named, list(zip(q.repeat_interleave(Hq // Hkv, 1), k, v))


# ---- values ----

LAYOUTS = {"plain": lambda B, S, H, size, dtype: drawn(B, S, H, size, dtype=dtype),
           "packed QKV": lambda B, S, H, size, dtype: drawn(B, S, 3, H, size, dtype=dtype)[:, :, 1],
           "by heads": lambda B, S, H, size, dtype: drawn(B, H, S, size, dtype=dtype).transpose(1, 2),
           "by columns": lambda B, S, H, size, dtype: drawn(B, S, size, H, dtype=dtype).transpose(2, 3)}


def test_func():
    def is_none(c):
        return c.get("dtype") == E4M3 and c.get("Dv", D) != D  # 32 is none of e4m3's
    sizes = [(5, 9), (9, 5), (7, 7), (1, 12)]
    for c in pairs(is_none, sizes=sizes, layout=list(LAYOUTS), Dv=[D] if GPU else [D, 32], **COMMON):
        (Sq, Sk), (Hq, Hkv), options = c.sizes, c.heads, options_of(c)
        named, factors = factors_of(c, 2)
        shapes = (2, Sq, Hq, D), (2, Sk, Hkv, D), (2, Sk, Hkv, c.Dv)
        tensors = [LAYOUTS[c.layout](*shape, c.dtype) for shape in shapes]
        result = fa.flash_attn_func(*tensors, **options, **named, return_attn_probs=c.with_lse)
        out, lse = result if c.with_lse else (result, None)
        assert out.dtype == (torch.bfloat16 if c.dtype == E4M3 else c.dtype), c
        assert out.is_contiguous() or c.layout == "by heads", c  # as q lies, without gaps
        for b in range(2):
            want, want_lse = one(*(x[b] for x in tensors), **options, factors=factors[b])
            close(out[b], want, c.dtype)
            if c.with_lse:
                close_lse(lse[b], want_lse)


ROWS, KEYS, USED = (3, 0, 5, 1), (4, 2, 0, 9), (2, 2, 0, 7)


def in_pages(x, lengths, table):
    """Copies the rows [T,H,D] of sequences to pages of 16."""
    pages = drawn(table.numel(), 16, *x.shape[1:]).to(x.dtype)
    for own, part in zip(table, x.split(lengths)):
        for i, row in enumerate(part):
            bits(pages)[own[i // 16], i % 16] = bits(row)
    return pages


def test_varlen(calls):
    def is_none(c):
        plain = (c.get("rows") == "batch" and c.get("keys") == "batch" and not c.get("used", True)
                 and not c.get("used_q", True))
        return (c.get("dtype") == E4M3 and c.get("keys") == "pages" and GPU) or (plain and c.get("most") == "short")
    for c in pairs(is_none, keys=["packed", "batch", "pages"], rows=["packed", "batch"], used=[False, True], used_q=[False, True],
                   most=["none", "tensor", "right", "short"], **COMMON):
        packs_q, packs_k = c.rows == "packed", c.keys == "packed"
        (Hq, Hkv), options = c.heads, options_of(c)
        named, factors = factors_of(c, 4)
        rows, lengths = ROWS if packs_q else (3,) * 4, (9,) * 4 if c.keys == "batch" else KEYS
        used = USED if c.used or c.keys == "pages" else lengths
        q = drawn(sum(rows), Hq, D, dtype=c.dtype)
        k, v = given = [drawn(sum(lengths), Hkv, D, dtype=c.dtype) for _ in "kv"]
        more = dict(seqused_k=ints(*used) if used != lengths else None)
        used_q = [max(n - b, 0) if c.used_q else n for b, n in enumerate(rows)]
        more["seqused_q"] = ints(*used_q) if c.used_q else None
        if c.keys == "pages":
            table = torch.randperm(8, device=DEVICE).view(4, 2)
            given, more["page_table"] = [in_pages(x, lengths, table) for x in (k, v)], table.int()
        elif c.keys == "batch":
            given = [x.view(4, 9, Hkv, D) for x in (k, v)]
        most = {"none": None, "tensor": ints(9).max(), "right": 9, "short": 4}[c.most]
        seen = [min(n, 4) if c.most == "short" else n for n in used]  # callers get the bound that they have said
        given_q = q if packs_q else q.view(4, 3, Hq, D)
        starts = starts_of(rows) if packs_q else None, starts_of(lengths) if packs_k else None
        result = fa.flash_attn_varlen_func(given_q, *given, *starts, max(rows), most, **more, **options, **named,
                                           return_attn_probs=c.with_lse)
        out, lse = result if c.with_lse else (result, None)
        assert out.shape == given_q.shape and out.is_contiguous()
        if c.with_lse:
            assert lse.shape == ((Hq, sum(rows)) if packs_q else (4, Hq, 3))
            lse = lse if packs_q else lse.transpose(0, 1).flatten(1)
        parts = zip(q.split(rows), k.split(lengths), v.split(lengths), out.view(-1, Hq, D).split(rows))
        for b, (part_q, part_k, part_v, got) in enumerate(parts):
            part_q, got = part_q[:used_q[b]], got[:used_q[b]]
            want, want_lse = one(part_q, part_k[:seen[b]], part_v[:seen[b]], **options, factors=factors[b])
            close(got, want, c.dtype)
            if c.with_lse:
                close_lse(lse[:, sum(rows[:b]):sum(rows[:b]) + used_q[b]], want_lse)
    assert any(call["most_keys"] for call in calls)


# Keys of a cache or of a page. Indexed: cache_batch_idx selects three of five caches, or rows of the table.
CACHES = {"plain": 32, "indexed": 32, "indexed, odd": 29, "pages": 16, "pages of 1": 1, "pages of 4": 4, "pages of 128": 128,
          "indexed pages": 16, "indexed pages of 1": 1, "indexed pages of 4": 4}
LENGTHS, NEW, LEFTPAD, ROTARY_SEQLENS = (7, 0, 20), (3, 1, 4), (2, 1, 9), (5, 2, 0)


def turned(x, factors, interleaved):
    """Rotates x [H,D]: multiplies each leading pair of elements, as a complex number, by a factor."""
    wide, size = x.double(), 2 * len(factors)
    pairs = wide[:, :size].unflatten(1, (-1, 2) if interleaved else (2, -1))
    z = torch.complex(*pairs.unbind(2 if interleaved else 1)) * factors
    both = torch.stack([z.real, z.imag], 2 if interleaved else 1).flatten(1)
    return torch.cat([both, wide[:, size:]], 1).to(x.dtype)


def test_kvcache():
    """Checks O, LSE, and that only the new keys are written to the caches."""
    def is_none(c):
        of_pages = c.get("cache", "plain") != "plain"  # of e4m3 builds of their own
        return (c.get("lengths") == "none" and (c.get("new", "none") != "none" or "pages" in c.get("cache", ""))
                or c.get("dtype") == E4M3 and of_pages and GPU
                or c.get("rotary", "none") != "none" and c.get("new") == "none")
    for c in pairs(is_none, cache=list(CACHES), lengths=["tensor", "int64", "int", "none"],
                   new=["none", "rows", "packed", "spare"], rows=["packed", "batch"], leftpad=[False, True],
                   rotary=["none", "interleaved", "halves", "interleaved, seqlens", "halves of 32, seqlens"], **COMMON):
        (Hq, Hkv), options, size, packs = c.heads, options_of(c), CACHES[c.cache], c.rows == "packed"
        named, factors = factors_of(c, 3)
        is_paged, index = "pages" in c.cache, [4, 0, 3] if "indexed" in c.cache else [0, 1, 2]
        width = -(-24 // size)  # of the table
        caches = [drawn(5 * width + 3 if is_paged else 3 if c.cache == "plain" else 5, size, Hkv, D, dtype=c.dtype) for _ in "kv"]
        before = {"none": (size,) * 3, "int": (11,) * 3}.get(c.lengths, LENGTHS)
        given = {"none": None, "int": 11, "int64": ints(*before, dtype=torch.int64), "tensor": ints(*before)}
        more = dict(cache_seqlens=given[c.lengths])
        table = torch.randperm(5 * width + 3, device=DEVICE)[:5 * width].view(5, width)
        if is_paged:
            more["page_table"] = (table if "indexed" in c.cache else table[:3]).int()
        if "indexed" in c.cache:
            more["cache_batch_idx"] = ints(*index)
        if c.leftpad:
            more["cache_leftpad"] = ints(*LEFTPAD)

        def where(b, i):
            return (int(table[index[b], i // size]), i % size) if is_paged else (index[b], i)
        added = {"none": (0,) * 3, "rows": (2,) * 3}.get(c.new, NEW)
        angles = torch.rand(64, 16 if "32" in c.rotary else D // 2, device=DEVICE, dtype=torch.double) * 7
        if c.rotary != "none":
            cos, sin = angles.cos().to(c.dtype), angles.sin().to(c.dtype)
            more |= dict(rotary_cos=cos, rotary_sin=sin, rotary_interleaved="interleaved" in c.rotary)
            turns = torch.complex(cos.double(), sin.double())
        position = ROTARY_SEQLENS if "seqlens" in c.rotary else before
        more |= dict(rotary_seqlens=ints(*position)) if "seqlens" in c.rotary else {}

        def at_position(x, b, i):
            return x if c.rotary == "none" else turned(x, turns[position[b] + i], "interleaved" in c.rotary)
        want_caches = [x.clone() for x in caches]
        if c.new != "none":
            new = [drawn(sum(added) + 2 * (c.new == "spare"), Hkv, D, dtype=c.dtype) for _ in "kv"]
            for n, (x, cache) in enumerate(zip(new, want_caches)):
                for b, part in enumerate(x[:sum(added)].split(added)):
                    for i, row in enumerate(part):
                        bits(cache)[where(b, before[b] + i)] = bits(row if n else at_position(row, b, i))
            if c.new == "rows":
                new = [x.view(3, 2, Hkv, D) for x in new]
            else:
                more["cu_seqlens_k_new"] = starts_of(added)
            more["k"], more["v"] = new
        rows = (2, 0, 3) if packs else (2,) * 3
        q = drawn(sum(rows), Hq, D, dtype=c.dtype)
        if packs:
            more |= dict(cu_seqlens_q=starts_of(rows), max_seqlen_q=3)
        result = fa.flash_attn_with_kvcache(q if packs else q.view(3, 2, Hq, D), *caches, **more, **options, **named,
                                            return_softmax_lse=c.with_lse)
        for n, (got, want) in enumerate(zip(caches, want_caches)):
            if n == 0 and c.rotary != "none":
                changed = {where(b, before[b] + i) for b in range(3) for i in range(added[b])}
                for place in changed:
                    close(got[place], want[place], c.dtype)
                    got[place] = want[place]
            assert torch.equal(bits(got), bits(want)), c
        out = result
        if c.with_lse:
            out, lse, *parts = result
            assert [x.numel() for x in parts] == [0, 0]
            lse = lse if packs else lse.transpose(0, 1).flatten(1)
        for b, (part, got) in enumerate(zip(q.split(rows), out.view(-1, Hq, D).split(rows))):
            count = before[b] + added[b]
            keys = [x.new_empty(count, Hkv, D) for x in want_caches]
            for x, cache in zip(keys, want_caches):
                for i in range(count):
                    bits(x)[i] = bits(cache)[where(b, i)]
            keys = [x[LEFTPAD[b] if c.leftpad else 0:] for x in keys]
            turns_rows = c.causal or c.window_size != (-1, -1)
            part = torch.stack([at_position(row, b, i if turns_rows else 0) for i, row in enumerate(part)]) if len(part) else part
            want, want_lse = one(part, *keys, **options, factors=factors[b])
            close(got, want, c.dtype)
            if c.with_lse:
                close_lse(lse[:, sum(rows[:b]):sum(rows[:b + 1])], want_lse)


def test_rotary_saturates():
    """A rotation of two elements 448, the largest number of e4m3, gives 0 and 448, not NaN."""
    largest, angles = torch.full((1, 1, 1, D), 448.0, device=DEVICE).to(E4M3), torch.full((1, D // 2), 0.75, device=DEVICE).to(E4M3)
    caches = [torch.zeros(1, 1, 1, D, device=DEVICE).to(E4M3) for _ in "kv"]
    fa.flash_attn_with_kvcache(largest, *caches, largest, largest, rotary_cos=angles, rotary_sin=angles, cache_seqlens=0)
    assert caches[0].float().flatten().tolist() == [0, 448] * (D // 2)


FAR = 2**32 + 2**16  # bytes; 32 bits of it are another offset within the same tensor


def far_tensor(path, shape, far):
    """Bytes in a sparse file, with a stride of FAR in dimension `far`."""
    strides = [math.prod(shape[dim + 1:]) for dim in range(len(shape))]
    if far is not None:
        strides[far] = FAR
    count = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides))
    x = torch.from_file(str(path), shared=True, size=count, dtype=torch.uint8).as_strided(shape, strides)
    return x.copy_(torch.randint(256, shape, dtype=torch.uint8))


@pytest.mark.parametrize("tensor, dim", [*itertools.product(["k_cache", "v_cache", "k", "v"], range(3)), ("page_table", 0)])
def test_append_far_rows(tensor, dim, tmp_path):
    """Each stride of each tensor in turn gives offsets beyond 32 bits."""
    shapes = dict(k_cache=(3, 32, 2, D), v_cache=(3, 32, 2, D), k=(3, 4, 2, D), v=(3, 4, 2, D))
    x = {name: far_tensor(tmp_path / name, shape, dim if name == tensor else None) for name, shape in shapes.items()}
    before, page_table = torch.tensor([3, 0, 11]), None
    if tensor == "page_table":  # int page_stride counts elements
        memory = torch.from_file(str(tmp_path / tensor), shared=True, size=2 * (2**31 - 1) + 1, dtype=torch.int32)
        page_table = memory.as_strided((3, 1), (2**31 - 1, 1)).copy_(torch.tensor([[2], [0], [1]]))
    want = {name: x[name].clone() for name in ("k_cache", "v_cache")}
    for b, first in enumerate(before.tolist()):
        cache = b if page_table is None else int(page_table[b, 0])
        for name in "kv":
            want[name + "_cache"][cache, first:first + 4] = x[name][b]
    new = append(**x, lengths=before, page_table=page_table, starts=None)
    assert torch.equal(new, before.int() + 4)
    for name, cache in want.items():
        assert torch.equal(x[name], cache), name


def test_no_new_rows():
    """An empty cu_seqlens_k_new changes no key."""
    caches = [drawn(2, 32, 2, D) for _ in "kv"]
    kept = [x.clone() for x in caches]
    q, k = drawn(2, 1, 4, D), drawn(3, 2, D)
    lengths = ints(5, 9)
    out = fa.flash_attn_with_kvcache(q, *caches, k, k, cache_seqlens=lengths, cu_seqlens_k_new=ints(0, 0, 0))
    for x, was in zip(caches, kept):
        for b, n in enumerate((5, 9)):
            assert torch.equal(x[b, :n], was[b, :n])
    close(out, fa.flash_attn_with_kvcache(q, *kept, cache_seqlens=lengths))


@pytest.mark.parametrize("n", [1, 3])
def test_combine(n):
    """Partial results combine to the whole; a part without visible keys may hold NaN."""
    q, k, v = (drawn(S, H, D, dtype=torch.float32) for S, H in ((5, 4), (12, 2), (12, 2)))
    want, want_lse = one(q, k, v)
    parts = [one(q, x, y) for x, y in zip(k.chunk(n), v.chunk(n))]
    parts.append((torch.full_like(parts[0][0], torch.nan), torch.full_like(parts[0][1], -torch.inf)))
    out_partial, lse_partial = (torch.stack([part[i] for part in parts])[:, None].float() for i in range(2))
    lse_partial = lse_partial.transpose(2, 3)
    out, lse = fa.flash_attn_combine(out_partial, lse_partial)
    assert out.shape == (1, 5, 4, D) and lse.shape == (1, 5, 4) and out.dtype == lse.dtype == torch.float32
    for got, expected in ((out[0], want), (lse[0].T, want_lse)):
        assert float((got - expected).norm() / expected.norm()) <= 1e-6
    assert fa.flash_attn_combine(out_partial, lse_partial, out_dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    given = torch.empty_like(out)
    assert fa.flash_attn_combine(out_partial, lse_partial, given)[0] is given and torch.equal(given, out)
    nothing, lse = fa.flash_attn_combine(out_partial[-1:], lse_partial[-1:])
    assert not nothing.any() and (lse == -torch.inf).all()


def test_scheduler_metadata():
    lengths = ints(3, 4)
    metadata = fa.get_scheduler_metadata(2, 1, 32, 4, 2, D, lengths, causal=True)
    assert (metadata.numel(), metadata.dtype, metadata.device) == (0, torch.int32, lengths.device)
    q, k = drawn(2, 1, 4, D), drawn(2, 32, 2, D)
    want = fa.flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths)
    assert torch.equal(fa.flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths, scheduler_metadata=metadata), want)


def test_hints_change_nothing():
    q, k = drawn(2, 5, 4, D), drawn(2, 9, 2, D)
    hints = dict(num_splits=3, pack_gqa=True, sm_margin=8, deterministic=True, dropout_p=0.0, alibi_slopes=None)
    assert torch.equal(fa.flash_attn_func(q, k, k, **hints), fa.flash_attn_func(q, k, k))
    more = dict(rotary_seqlens=ints(3, 4), rotary_interleaved=False, max_seqlen_q=5, num_splits=2, pack_gqa=False,
                sm_margin=1)
    caches = [drawn(2, 32, 2, D) for _ in "kv"]
    want = fa.flash_attn_with_kvcache(q, *caches, cache_seqlens=ints(9, 3))
    assert torch.equal(fa.flash_attn_with_kvcache(q, *caches, cache_seqlens=ints(9, 3), **more), want)


def test_the_choice_of_a_backward(calls):
    q = drawn(2, 5, 4, D)
    fa.flash_attn_func(q, q, q), fa.flash_attn_func(q, q, q, deterministic=True)
    fa.flash_attn_qkvpacked_func(torch.stack([q, q, q], 2), deterministic=True)
    for deterministic in False, True:
        fa.flash_attn_varlen_func(q[0], q[0], q[0], ints(0, 5), ints(0, 5), 5, 5, deterministic=deterministic)
    assert [call["backward"] for call in calls] == [None, *["deterministic"] * 2, None, "deterministic"]


def test_windows_of_any_kind(calls):
    """A window may be a tuple, a list or a host tensor; None means no limit, as in FlashAttention-4."""
    q, k = drawn(2, 5, 4, D), drawn(2, 9, 2, D)
    for window in (3, 0), [3, 0], torch.tensor([3, 0]):
        fa.flash_attn_func(q, k, k, window_size=window)
    fa.flash_attn_func(q, k, k, window_size=(3, None)), fa.flash_attn_func(q, k, k, window_size=(None, None))
    assert [call["window"] for call in calls] == [(3, 0, "br")] * 3 + [(3, None, "br"), (None, None)]
    assert all(type(call["window"][0]) is int for call in calls[:4])


def test_gradients():
    for Hkv, options in ((4, dict(causal=True)), (2, dict(softcap=3.0, learnable_sink=drawn(4).float())), (2, {})):
        tensors = [drawn(2, 64, H, D).requires_grad_() for H in (4, Hkv, Hkv)]
        grad = drawn(2, 64, 4, D)
        got = torch.autograd.grad(fa.flash_attn_func(*tensors, **options), tensors, grad)
        wide = [x.detach().double().requires_grad_() for x in tensors]
        want = torch.stack([one(*(x[b] for x in wide), **options)[0] for b in range(2)])
        for a, b in zip(got, torch.autograd.grad(want, wide, grad.double())):
            assert a.shape == b.shape and float((a - b).norm() / b.norm()) <= 2 * LIMIT
    out, lse = fa.flash_attn_func(*tensors, return_attn_probs=True)
    one_run, other = (torch.autograd.grad(fa.flash_attn_func(*tensors, deterministic=True), tensors, grad) for _ in range(2))
    assert all(torch.equal(a, b) and float((a - c).norm() / c.norm()) <= 2 * LIMIT for a, b, c in zip(one_run, other, got))
    with torch.no_grad():
        fa.flash_attn_func(*tensors, deterministic=True)


def test_caches_need_no_gradient():
    """A leaf that requires a gradient is written to as well, since there is no backward."""
    caches = [drawn(2, 32, 2, D).requires_grad_() for _ in "kv"]
    new = drawn(2, 1, 2, D)
    with torch.no_grad():
        kept = [x.clone() for x in caches]
        for x in kept:
            x[0, 4], x[1, 5] = new[:, 0]
    fa.APPEND(*caches, new.requires_grad_(), new, ints(4, 5), None, None)
    assert all(x.grad_fn is None and torch.equal(x, want) for x, want in zip(caches, kept))


def test_appended_keys_have_no_gradient():
    q, cache, new = drawn(2, 1, 4, D), drawn(2, 32, 2, D), drawn(2, 1, 2, D).requires_grad_()
    for k, v in (new, new.detach()), (new.detach(), new):
        for queries in q, q.clone().requires_grad_():
            out = fa.flash_attn_with_kvcache(queries, cache, cache.clone(), k, v, cache_seqlens=ints(4, 5))
            with pytest.raises(NotImplementedError, match="^flash_attn_with_kvcache: no gradient of k and v that are appended"):
                out.sum().backward()
    with torch.no_grad():
        assert not fa.flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=ints(4, 5)).requires_grad


def test_qkv_in_one_tensor():
    q, k, v = drawn(2, 20, 4, D), drawn(2, 20, 2, D), drawn(2, 20, 2, D)
    want, lse = fa.flash_attn_func(q, k, v, causal=True, window_size=(2**31 - 1, 0), return_attn_probs=True)
    got, own = fa.flash_attn_qkvpacked_func(torch.cat([q, k, v], 2), causal=True, num_heads_q=4, return_attn_probs=True)
    assert torch.equal(got, want) and torch.equal(own, lse)
    assert torch.equal(fa.flash_attn_qkvpacked_func(torch.stack([q, q, q], 2)), fa.flash_attn_func(q, q, q))
    for shape, heads in (((2, 20, 4, D), None), ((2, 20, 4, D), 1), ((2, 20, 2, 4, D), None)):
        with pytest.raises(ValueError, match="^flash_attn_qkvpacked_func: qkv is .*; want"):
            fa.flash_attn_qkvpacked_func(drawn(*shape), num_heads_q=heads)


# ---- what is refused ----

def test_refusals():
    q, k, lengths = drawn(2, 5, 4, D), drawn(2, 32, 2, D), ints(3, 4)
    packed = *(x.flatten(0, 1) for x in (q, k, k)), ints(0, 5, 10), ints(0, 32, 64), 5, 32
    functions = {
        "flash_attn_func": lambda **more: fa.flash_attn_func(q, k, k, **more),
        "flash_attn_varlen_func": lambda **more: fa.flash_attn_varlen_func(*packed, **more),
        "flash_attn_with_kvcache":
            lambda **more: fa.flash_attn_with_kvcache(q, k, k, **dict(cache_seqlens=lengths) | more)}
    unknown = {"flash_attn_func": "qv dropout_p attention_chunk",
               "flash_attn_varlen_func": "qv dropout_p attention_chunk leftpad_k",
               "flash_attn_with_kvcache": "qv dropout_p attention_chunk"}
    for name, words in unknown.items():
        for word in words.split():
            for value in (ints(1, 1), 1, 0.5):
                with pytest.raises(ValueError, match=f"^{name}: {word} is not supported; [^.]*$"):
                    functions[name](**{word: value})
            functions[name](**{word: None})
        with pytest.raises(TypeError, match=rf"^{name}\(\) has no argument block_tables$"):
            functions[name](block_tables=None)

    def raises(name, words, **more):
        with pytest.raises(ValueError, match=f"^{name}: {words}"):
            functions[name](**more)
    for name in functions:
        raises(name, "alibi_slopes is a float, not a tensor$", alibi_slopes=0.5)
        for slopes in torch.ones(3), torch.ones(3, 4), torch.ones(1, 2, 4), torch.ones(4, dtype=DTYPE).half():
            raises(name, r"alibi_slopes is torch.float(32|16) \[.*\]; want float32 \[4\] or \[2,4\]$", alibi_slopes=slopes)
    table, of_0 = ints(0, 1)[:, None], drawn(2, 0, 2, D)
    raises("flash_attn_with_kvcache", "k is missing", v=q)
    raises("flash_attn_with_kvcache", "v is missing", k=q)
    raises("flash_attn_with_kvcache", "cache_seqlens is missing", k=k, v=k, cache_seqlens=None)
    half, new, kvcache = drawn(9, D // 4), dict(k=k[:, :1], v=k[:, :1]), "flash_attn_with_kvcache"
    for one_of, other in (("rotary_cos", "rotary_sin"), ("rotary_sin", "rotary_cos")):
        raises(kvcache, f"{other} is missing; pass it with {one_of}$", **new, **{one_of: half})
    wrong = drawn(9, D // 4 + 4), drawn(9, D), drawn(9), drawn(9, D // 4, dtype=torch.half if GPU else torch.double)
    for x in wrong:
        raises(kvcache, r"rotary_cos is torch.\w+ \[.*\]; want torch.\w+ \[positions,d / 2\] of both", **new, rotary_cos=x, rotary_sin=x)
    raises(kvcache, "rotary_sin is torch", **new, rotary_cos=half, rotary_sin=half[:8])
    raises(kvcache, "rotary_cos is for k and v that are appended, and k is missing$", rotary_cos=half, rotary_sin=half)
    raises(kvcache, "rotary_seqlens has 3 elements for 2 sequences$", **new, rotary_cos=half, rotary_sin=half, rotary_seqlens=ints(1, 2, 3))
    raises(kvcache, "cache_seqlens has 3 elements for 2 sequences$", **new, rotary_cos=half, rotary_sin=half, cache_seqlens=ints(1, 2, 3))
    for name in functions:
        raises(name, "softcap=-3: must be 0, or 1e-18 to 1e18$", alibi_slopes=torch.ones(4), softcap=-3.0)
    raises("flash_attn_varlen_func", "cu_seqlens_k cannot be combined with page_table", page_table=table)
    for run in (lambda: fa.flash_attn_with_kvcache(q, of_0, of_0, page_table=table, cache_seqlens=lengths),
                lambda: fa.flash_attn_varlen_func(q, of_0, of_0, None, None, 5, 8, page_table=table)):
        with pytest.raises(ValueError, match="a page of page_table has 0 keys; .* of 1 key or more$"):
            run()
    wide = drawn(2, 32, 2, 512)
    for run in (lambda: fa.flash_attn_func(q, k, wide),
                lambda: fa.flash_attn_varlen_func(*packed[:2], wide.flatten(0, 1), *packed[3:]),
                lambda: fa.flash_attn_with_kvcache(q, k, wide, cache_seqlens=lengths)):
        with pytest.raises(ValueError, match=rf"^flash_attn_\w+: q has D={D} and v has D=512; sdpa's kernels support up to 256$"):
            run()


def test_integer_tensors_of_another_type():
    """Fractional numbers are refused, not rounded."""
    q, k, starts, lengths = drawn(2, 5, 4, D), drawn(2, 32, 2, D), ints(0, 5, 10), ints(3, 4)
    rows = q.flatten(0, 1)
    names = {fa.flash_attn_varlen_func: "cu_seqlens_q cu_seqlens_k seqused_q seqused_k page_table",
             fa.flash_attn_with_kvcache: "cache_seqlens cache_batch_idx page_table cu_seqlens_q cu_seqlens_k_new cache_leftpad "
                                         "rotary_seqlens"}
    given = {fa.flash_attn_varlen_func: dict(q=rows, k=rows, v=rows, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=5, max_seqlen_k=5),
             fa.flash_attn_with_kvcache: dict(q=q, k_cache=k, v_cache=k, cache_seqlens=lengths)}
    for function, words in names.items():
        for name, dtype in itertools.product(words.split(), (torch.float32, torch.half, torch.bool)):
            with pytest.raises(ValueError, match=f"^{function.__name__}: {name} is of {dtype}; want int32 or another integer type$"):
                function(**given[function] | {name: ints(0, 1, dtype=dtype)})


# ---- graphs ----

def test_no_graph_break():
    """Each function is one attention() call in one graph without host synchronization; the append is one node."""
    nodes = []

    def graph_of(function):
        torch.compiler.reset()
        torch.compile(function, fullgraph=True, backend=lambda graph, _: nodes.append(graph.graph.nodes) or graph)()
        return [x.target for x in nodes[-1] if x.op.startswith("call")]
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        def empty(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, device="cuda", dtype=dtype)
        q, k, cache, pages = empty(2, 1, 8, 128), empty(2, 1, 2, 128), empty(2, 64, 2, 128), empty(9, 16, 2, 128)
        lengths, starts, table = (empty(*shape, dtype=torch.int32) for shape in ((2,), (3,), (2, 4)))
        by_index = dict(cache_seqlens=5, cache_batch_idx=table[0, :2])
        in_pages = dict(cache_seqlens=lengths, page_table=table, cu_seqlens_k_new=starts, return_softmax_lse=True)
        patch.setattr(sdpa, "attention", ATTENTION)
        for function, writes in (
                (lambda: fa.flash_attn_func(q, cache, cache, causal=True, window_size=(5, 0)), 0),
                (lambda: fa.flash_attn_varlen_func(q[0], k[0], k[0], starts, starts, 1, 1, seqused_k=lengths), 0),
                (lambda: fa.flash_attn_varlen_func(q[0], k[0], k[0], starts, starts, lengths[0], lengths[0]), 0),
                (lambda: fa.flash_attn_with_kvcache(q, cache, cache, k, k, cache_seqlens=lengths, causal=True), 1),
                (lambda: fa.flash_attn_with_kvcache(q, cache, cache, k, k, **by_index), 1),
                (lambda: fa.flash_attn_with_kvcache(q, pages, pages, k[:, 0], k[:, 0], **in_pages), 1)):
            found = graph_of(function)
            assert found.count(sdpa.OPERATOR) == 1 and found.count(fa.APPEND) == writes, found


# ---- transformers ----

PROGRAM = """
import sys
sys.path[:0] = ["tests", "bindings"]
exec(BLOCK.splitlines()[0])
import torch
import pytorch as sdpa, test_flash_attn_interface as here
if not here.GPU:  # without one transformers takes no FlashAttention, which it finds out once
    torch.cuda.is_available, real = lambda: True, torch.cuda.is_available
    sdpa.attention = here.attention
from transformers.utils import is_flash_attn_3_available
assert is_flash_attn_3_available()
if not here.GPU:
    torch.cuda.is_available = real
import test_transformers as models
kernel, calls = sdpa.attention, []
sdpa.attention = lambda *x, **more: calls.append(more) or kernel(*x, **more)
tokens = models.tokens_of()
ids = torch.cat([torch.arange(n) for n in (3, 25, 12)])[None].to(models.DEVICE)
for kind in ("Llama", "Mistral", "Gemma2", "Bert"):
    model = models.model_of(kind)
    mask = models.padding((5, 0), (0, 0))
    more = dict(attention_mask=mask[:, :24], max_new_tokens=1 if here.GPU else 8, do_sample=False, output_logits=True,
                return_dict_in_generate=True, pad_token_id=0)
    runs = [lambda: model(tokens).logits, lambda: model(tokens, attention_mask=mask).logits[mask.bool()]]
    if kind != "Bert":
        runs += [lambda: model(tokens[:1], position_ids=ids, use_cache=False).logits,
                 lambda: torch.stack(model.generate(tokens[:, :24], **more).logits)]
    with torch.no_grad():
        want = [run() for run in runs]
        exec(BLOCK)
        calls.clear()
        for run, expected in zip(runs, want):
            models.assert_close(run(), expected)
    packed = ["q_starts" in more for more in calls]
    assert len(calls) >= 2 * len(runs) and any(packed) and not all(packed), kind
    assert kind != "Gemma2" or all(more["softcap"] == 2.0 for more in calls)
import flash_attn_interface, transformers.modeling_flash_attention_utils as loaded
assert loaded._flash_fn is flash_attn_interface.flash_attn_func and loaded._loaded_implementation == "flash_attention_3"
# Its step of continuous batching: pages, to which keys are appended, of sequences of 20 and 7 keys.
q, k, v = (here.drawn(1, 2, H, 64) for H in (4, 2, 2))
caches, table = [here.drawn(8, 16, 2, 64) for _ in "kv"], here.ints(5, 0, 3, 2).view(2, 2)
got = loaded._flash_attention_forward(
    q, k, v, None, 1, True, attn_implementation="flash_attention_3", block_table=table, k_cache=caches[0],
    v_cache=caches[1], cu_seq_lens_k=here.ints(0, 20, 27), max_length_q=1, max_length_k=20)
for b, count in enumerate((20, 7)):
    own = [x[table[b].long()].flatten(0, 1)[:count] for x in caches]
    assert torch.equal(own[0][-1], k[0, b]) and torch.equal(own[1][-1], v[0, b])
    here.close(got[0, b:b + 1], here.one(q[0, b:b + 1], *own)[0])
"""


@pytest.mark.long
def test_the_transformers_example():
    """Runs the example in docs/USING.md: transformers' FlashAttention-3 path with our kernels gives eager attention's logits for
    full, padded and packed batches and generated tokens; its continuous batching appends to pages."""
    pytest.importorskip("transformers", minversion="5.24")
    program = f"BLOCK = {blocks()[1]!r}" + PROGRAM
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def blocks():
    text = open(os.path.join(ROOT, "docs/USING.md")).read()
    section = re.search(r"^## FlashAttention-3's module.*?(?=^## )", text, re.DOTALL | re.MULTILINE).group()
    return re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def test_the_documentation(calls, monkeypatch):
    monkeypatch.chdir(ROOT)
    space = {}
    exec(blocks()[0].replace("cuda", DEVICE), space)
    shapes = {name: tuple(space[name].shape) for name in ("out", "lse", "packed", "step")}
    assert shapes == dict(out=(2, 128, 32, 128), lse=(2, 32, 128), packed=(256, 32, 128), step=(2, 1, 32, 128))
    assert space["pages"][0][:, :, 0].any(2).sum() == 2 and len(calls) == 3
