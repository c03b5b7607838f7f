"""bindings/flash_attn_interface.py: its signatures, values against a reference in double for each sequence by itself, what it writes into
caches, what it refuses, and transformers' own FlashAttention-3. Without a GPU a reference stands in for the kernels.
usage: python3 -m pytest tests/test_flash_attn_interface.py"""
import inspect
import itertools
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "bindings"), os.path.dirname(os.path.abspath(__file__))]
torch = pytest.importorskip("torch", minversion="2.11", reason="PyTorch 2.11 or newer is missing")
AllPairs = pytest.importorskip("allpairspy").AllPairs
import flash_attn_interface as fa  # noqa: E402
import pytorch as sdpa  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402

GPU, ATTENTION = torch.cuda.is_available(), sdpa.attention
DEVICE, DTYPE, LIMIT = ("cuda", torch.bfloat16, 1.6e-2) if GPU else ("cpu", torch.float32, 1e-5)
E4M3 = torch.float8_e4m3fn
LIMITS = {DTYPE: LIMIT, E4M3: 6e-2 if GPU else 5e-3}  # O of e4m3 is rounded to bf16
D = 64

# FlashAttention-3's arguments in their order, and the defaults of those behind "|".
DESCALES = "q_descale=None k_descale=None v_descale=None "
HINTS = "num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
SIGNATURES = {
    "flash_attn_func": "q k v softmax_scale=None causal=False qv=None " + DESCALES + "window_size=(-1,-1) attention_chunk=0 softcap=0.0 " + HINTS,
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q=None seqused_k=None softmax_scale=None "
                              "causal=False qv=None " + DESCALES + "window_size=(-1,-1) attention_chunk=0 softcap=0.0 " + HINTS,
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None cache_seqlens=None "
                               "cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None "
                               "max_seqlen_q=None rotary_seqlens=None " + DESCALES + "softmax_scale=None causal=False window_size=(-1,-1) "
                               "attention_chunk=0 softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None "
                               "sm_margin=0 return_softmax_lse=False",
    "flash_attn_combine": "out_partial lse_partial out=None out_dtype=None",
    "get_scheduler_metadata": "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens "
                              "qkv_dtype=torch.bfloat16 headdim_v=None cu_seqlens_q=None cu_seqlens_k_new=None cache_leftpad=None "
                              "page_size=None max_seqlen_k_new=0 causal=False window_size=(-1,-1) attention_chunk=0 has_softcap=False "
                              "num_splits=0 pack_gqa=None sm_margin=0"}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    """FlashAttention-3's; what is ours besides has to be named."""
    found = inspect.signature(getattr(fa, name)).parameters.values()
    positional = [x for x in found if x.kind == x.POSITIONAL_OR_KEYWORD]
    want = [word.partition("=") for word in SIGNATURES[name].split()]
    assert [(x.name, x.default) for x in positional] == [(word, eval(value) if has else inspect.Parameter.empty) for word, has, value in want]
    assert {x.name for x in found if x.kind == x.KEYWORD_ONLY} <= {"learnable_sink", "page_table"}
    assert all(x.kind == x.VAR_KEYWORD for x in found if x.kind not in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY))


# ---- the two references ----

def formula(q, k, v, seen, scale, softcap, sinks):
    """O and LSE in double of one sequence, q [Hq,Sq,D], k and v [Hkv,Sk,D], seen [Sq,Sk]."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    S = q @ k.mT * (q.shape[2] ** -0.5 if scale is None else scale)
    S = (softcap * torch.tanh(S / softcap) if softcap else S).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        S, v = torch.cat([S, sinks.double()[:, None, None].expand(*S.shape[:2], 1)], 2), torch.cat([v, v.new_zeros(len(v), 1, v.shape[2])], 1)
    any_seen = (S > -torch.inf).any(2, keepdim=True)
    return torch.softmax(S.where(any_seen, 0), 2).where(any_seen, 0) @ v, torch.logsumexp(S, 2)


def attention(q, k, v, causal=None, window=(None, None), scale=None, q_descale=None, k_descale=None, v_descale=None, return_lse=False,
              softcap=None, sinks=None, k_lengths=None, q_starts=None, k_starts=None, most_keys=0, page_table=None):
    """attention() of bindings/pytorch.py, and what pytorch.cpp checks. Rows of no sequence are NaN."""
    Hq, Hkv = q.shape[1], k.shape[1]
    assert causal in (None, "br") and len(window) in (2, 3) and (window == (None, None) or window[2] == "br")
    assert all(x.dim() == 4 and x.stride(3) == 1 and x.dtype == q.dtype for x in (k, v)) and q.stride(3) == 1
    B = next((len(x) - 1 for x in (q_starts, k_starts) if x is not None), len(q))
    assert len(q) == (B if q_starts is None else 1) and (page_table is not None or len(k) == (B if k_starts is None else 1))
    for x, length in ((q_starts, B + 1), (k_starts, B + 1), (k_lengths, B)):
        assert x is None or (x.dtype == torch.int32 and x.is_contiguous() and x.shape == (length,))
    if page_table is not None:
        assert page_table.dtype == torch.int32 and page_table.stride(1) == 1 and len(page_table) == B
        assert k_starts is None and k.shape[2] % 16 == 0
    assert most_keys == 0 or any(x is not None for x in (k_lengths, q_starts, k_starts, page_table))
    wide, batch_of_k = [], B if page_table is not None else len(k)
    for x, factor, batch in ((q, q_descale, len(q)), (k, k_descale, batch_of_k), (v, v_descale, batch_of_k)):
        if factor is not None:
            assert q.dtype == E4M3 and factor.dtype == torch.float32
            heads = factor.repeat_interleave(Hq // Hkv, -1) if x is q and factor.dim() and factor.shape[-1] == Hkv < Hq else factor
            factor = heads.expand(batch, x.shape[1])[..., None, None].double()
        wide.append((x.double(), factor))
    out, lse = (torch.full((*q.shape[:3], size), torch.nan, dtype=torch.double, device=q.device) for size in (v.shape[3], 1))
    out, lse = list(out.unbind(0)), list(lse[..., 0].unbind(0))
    parts = {}
    for b in range(B):
        rows = slice(None) if q_starts is None else slice(int(q_starts[b]), int(q_starts[b + 1]))
        keys = slice(None) if k_starts is None else slice(int(k_starts[b]), int(k_starts[b + 1]))
        at, own = (0 if q_starts is not None else b), (0 if k_starts is not None else b)
        one_q, (one_k, one_v) = wide[0][0][at][:, rows], (
            (x[page_table[b].long()].transpose(0, 1).flatten(1, 2) if page_table is not None else x[own][:, keys]) for x, _ in wide[1:])
        count = one_k.shape[1] if k_lengths is None else min(int(k_lengths[b]), one_k.shape[1])
        count = min(count, most_keys) if most_keys else count
        one_k, one_v = one_k[:, :count], one_v[:, :count]
        one_q, one_k, one_v = (x if factor is None else x * factor[min(b, len(factor) - 1)]
                               for x, (_, factor) in zip((one_q, one_k, one_v), wide))
        place, key = torch.arange(one_q.shape[1], device=q.device)[:, None] + count - one_q.shape[1], torch.arange(count, device=q.device)
        seen = (key <= place) if causal else torch.ones_like(key <= place)
        seen &= (key >= place - window[0]) if window[0] is not None else seen
        seen &= (key <= place + window[1]) if window[1] is not None else seen
        parts[b] = formula(one_q, one_k, one_v, seen, scale, softcap, sinks)
    if q_starts is None:
        out, lse = (torch.stack([parts[b][i] for b in range(B)]) for i in range(2))
    else:
        out, lse = out[0].clone()[None], lse[0].clone()[None]
        for b in range(B):
            rows = slice(int(q_starts[b]), int(q_starts[b + 1]))
            out[0, :, rows], lse[0, :, rows] = parts[b]
    dtype = torch.half if q.dtype == E4M3 else q.dtype
    like = torch.empty_like(q, dtype=dtype) if v.shape[3] == q.shape[3] else torch.empty(out.shape, dtype=dtype, device=q.device)
    out = like.copy_(out)
    return (out, lse.float()) if return_lse else out


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The arguments of each call of the kernels."""
    seen, kernel = [], sdpa.attention if GPU else attention
    monkeypatch.setattr(sdpa, "attention", lambda *x, **more: seen.append(more) or kernel(*x, **more))
    return seen


def one(q, k, v, causal=False, window_size=(-1, -1), softmax_scale=None, softcap=0.0, learnable_sink=None, factors=(1, 1, 1)):
    """O [Sq,Hq,Dv] and LSE [Hq,Sq] in double of one sequence, as FlashAttention defines them: query i is key i + Sk - Sq."""
    q, k, v = (x.double() * (f[..., None] if isinstance(f, torch.Tensor) else f) for x, f in zip((q, k, v), factors))
    seen = torch.zeros(len(q), len(k), dtype=bool)
    for i, j in itertools.product(range(len(q)), range(len(k))):
        ahead = j - (i + len(k) - len(q))
        seen[i, j] = not (causal and ahead > 0) and not -1 < window_size[0] < -ahead and not -1 < window_size[1] < ahead
    out, lse = formula(*(x.transpose(0, 1) for x in (q, k, v)), seen.to(q.device), softmax_scale, softcap, learnable_sink)
    return out.transpose(0, 1), lse


def close(got, want, dtype=DTYPE):
    got, want = got.double(), want.double()
    assert got.shape == want.shape and torch.equal(got.isfinite(), want.isfinite())
    got, want = got[want.isfinite()], want[want.isfinite()]
    assert float((got - want).norm()) <= LIMITS[dtype] * max(float(want.norm()), 1e-6)


def drawn(*shape, dtype=DTYPE):
    return torch.randn(shape, device=DEVICE).to(dtype)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, device=DEVICE, dtype=dtype)


def starts_of(lengths):
    return ints(0, *itertools.accumulate(lengths))


def pairs(**choices):
    """A covering array: each value of a name meets each value of any other one."""
    torch.manual_seed(0)
    return [SimpleNamespace(**dict(zip(choices, row))) for row in AllPairs(list(choices.values()))]


# Each option of a mask is a build of the kernels, so a GPU has fewer.
MASKS = dict(causal=[False, True], window_size=[(-1, -1), (3, 0), (2, 2), (-1, 4), (5, -1), (-1, 0)], softmax_scale=[None, 0.3])
BUILDS = dict(softcap=[0.0] if GPU else [0.0, 2.0], sink=[False] if GPU else [False, True])
HEADS = [(4, 4), (4, 2), (4, 1)]
FACTORS = dict(dtype=[DTYPE, E4M3], with_factors=[True, False])


def options_of(c, heads):
    more = dict(causal=c.causal, window_size=c.window_size, softmax_scale=c.softmax_scale, softcap=c.softcap)
    return more | dict(learnable_sink=drawn(heads[0], dtype=torch.float32) if c.sink else None)


def factors_of(c, B, heads):
    """{name: [B,Hkv]}, and the three of each sequence, those of q for its heads."""
    if c.dtype != E4M3 or not c.with_factors:
        return {}, [(1, 1, 1)] * B
    drawn = {name + "_descale": torch.rand(B, heads[1], device=DEVICE) + 0.5 for name in "qkv"}
    q, k, v = drawn.values()
    return drawn, list(zip(q.repeat_interleave(heads[0] // heads[1], 1), k, v))


# ---- values ----

LAYOUTS = {"plain": lambda B, S, H, size, dtype: drawn(B, S, H, size, dtype=dtype),
           "packed QKV": lambda B, S, H, size, dtype: drawn(B, S, 3, H, size, dtype=dtype)[:, :, 1],
           "by heads": lambda B, S, H, size, dtype: drawn(B, H, S, size, dtype=dtype).transpose(1, 2),
           "by columns": lambda B, S, H, size, dtype: drawn(B, S, size, H, dtype=dtype).transpose(2, 3)}


def test_func():
    cases = pairs(heads=HEADS, sizes=[(5, 9), (9, 5), (7, 7), (1, 12)], layout=list(LAYOUTS), Dv=[D] if GPU else [D, 32],
                  return_attn_probs=[False, True], **MASKS, **BUILDS, **FACTORS)
    for c in cases:
        if c.dtype == E4M3 and (c.softcap or c.Dv != D):
            continue
        (Sq, Sk), (Hq, Hkv), options = c.sizes, c.heads, options_of(c, c.heads)
        named, factors = factors_of(c, 2, c.heads)
        q, k, v = (LAYOUTS[c.layout](2, S, H, size, c.dtype) for S, H, size in ((Sq, Hq, D), (Sk, Hkv, D), (Sk, Hkv, c.Dv)))
        result = fa.flash_attn_func(q, k, v, **options, **named, return_attn_probs=c.return_attn_probs)
        out, lse = result if c.return_attn_probs else (result, None)
        assert out.dtype == (torch.bfloat16 if c.dtype == E4M3 else c.dtype), c
        assert out.is_contiguous() or c.layout == "by heads", c  # as q lies, without gaps
        for b in range(2):
            want, want_lse = one(q[b], k[b], v[b], **options, factors=factors[b])
            close(out[b], want, c.dtype)
            if c.return_attn_probs:
                close(lse[b], want_lse, c.dtype)


ROWS, KEYS, USED = (3, 0, 5, 1), (4, 2, 0, 9), (2, 2, 0, 7)


def in_pages(x, lengths, table):
    """Rows [T,H,D] of sequences in pages of 16."""
    pages = drawn(table.numel(), 16, *x.shape[1:]).to(x.dtype)
    for own, part in zip(table, x.split(lengths)):
        for i, row in enumerate(part):
            bits(pages)[own[i // 16], i % 16] = bits(row)
    return pages


def bits(x):
    return x.view(torch.uint8) if x.dtype == E4M3 else x


def test_varlen(calls):
    cases = pairs(heads=HEADS, keys=["packed", "batch", "pages"], rows=["packed", "batch"], used=[False, True],
                  most=[None, "tensor", 9, 4], return_attn_probs=[False, True], **MASKS, **BUILDS, **FACTORS)
    ran = 0
    for c in cases:
        if c.dtype == E4M3 and (c.softcap or (c.keys == "pages" and GPU)):
            continue
        ran += 1
        (Hq, Hkv), options = c.heads, options_of(c, c.heads)
        named, factors = factors_of(c, 4, c.heads)
        rows = ROWS if c.rows == "packed" else (3,) * 4
        lengths = (9,) * 4 if c.keys == "batch" else KEYS
        used = USED if c.used or c.keys == "pages" else lengths
        q, k, v = drawn(sum(rows), Hq, D, dtype=c.dtype), *(drawn(sum(lengths), Hkv, D, dtype=c.dtype) for _ in "kv")
        given_q, given = q if c.rows == "packed" else q.view(4, 3, Hq, D), [k, v]
        more = dict(seqused_k=ints(*used) if used != lengths else None)
        if c.keys == "pages":
            table = torch.randperm(8, device=DEVICE).view(4, 2)
            given, more["page_table"] = [in_pages(x, lengths, table) for x in (k, v)], table.int()
        elif c.keys == "batch":
            given = [x.view(4, 9, Hkv, D) for x in (k, v)]
        most = {None: None, "tensor": ints(9).max(), 9: 9, 4: 4}[c.most]
        if most == 4 and not isinstance(most, torch.Tensor):
            used = tuple(min(n, 4) for n in used)  # as FlashAttention, of which callers get what they have said
            if not (c.rows == "packed" or c.keys != "batch" or more["seqused_k"] is not None):
                continue
        if c.dtype == E4M3 and c.with_factors:  # what packed rows can have: one for all sequences, given once or expanded
            for name, starts in (("q_descale", c.rows), ("k_descale", c.keys), ("v_descale", c.keys)):
                if starts == "packed":
                    first = named[name][:1]
                    named[name] = first if c.causal else first.expand(4, -1)
            q_f = named["q_descale"].expand(4, -1).repeat_interleave(Hq // Hkv, 1)
            factors = list(zip(q_f, named["k_descale"].expand(4, -1), named["v_descale"].expand(4, -1)))
        result = fa.flash_attn_varlen_func(given_q, *given, starts_of(rows) if c.rows == "packed" else None,
                                           starts_of(lengths) if c.keys == "packed" else None, max(rows), most, **more, **options, **named,
                                           return_attn_probs=c.return_attn_probs)
        out, lse = result if c.return_attn_probs else (result, None)
        assert out.shape == given_q.shape and out.is_contiguous()
        if lse is not None:
            assert lse.shape == ((Hq, sum(rows)) if c.rows == "packed" else (4, Hq, 3))
            lse = lse if c.rows == "packed" else lse.transpose(0, 1).flatten(1)
        for b, (part_q, part_k, part_v, got) in enumerate(zip(*(x.split(n) for x, n in (
                (q, rows), (k, lengths), (v, lengths), (out.view(-1, Hq, D), rows))))):
            want, want_lse = one(part_q, part_k[:used[b]], part_v[:used[b]], **options, factors=factors[b])
            close(got, want, c.dtype)
            if lse is not None:
                close(lse[:, sum(rows[:b]):sum(rows[:b + 1])], want_lse, c.dtype)
    assert ran > 20 and any(call["most_keys"] for call in calls)


CACHES = {"plain": 32, "indexed": 32, "indexed, odd": 29, "pages": 16}
LENGTHS, NEW = (7, 0, 20), (3, 1, 4)


def test_kvcache():
    """O, LSE, and that the caches have the new keys and nothing else is changed."""
    cases = pairs(heads=HEADS, cache=list(CACHES), lengths=["tensor", "int64", "int", "none"], new=["none", "rows", "packed", "more rows"],
                  rows=["packed", "batch"], return_softmax_lse=[False, True], **MASKS, **BUILDS, **FACTORS)
    ran = 0
    for c in cases:
        appends = c.new != "none"
        if (c.lengths == "none" and (appends or c.cache == "pages")) or (c.dtype == E4M3 and (c.softcap or (GPU and c.cache != "plain"))):
            continue
        ran += 1
        (Hq, Hkv), options = c.heads, options_of(c, c.heads)
        named, factors = factors_of(c, 3, c.heads)
        if "q_descale" in named and c.rows == "packed":
            named["q_descale"] = named["q_descale"][:1]
            factors = [(factors[0][0], *own[1:]) for own in factors]
        size = CACHES[c.cache]
        caches = [drawn(16 if c.cache == "pages" else 5, size, Hkv, D, dtype=c.dtype) for _ in "kv"]
        before = {"none": (size,) * 3, "int": (11,) * 3}.get(c.lengths, LENGTHS)
        more = dict(cache_seqlens={"none": None, "int": 11, "int64": ints(*before, dtype=torch.int64), "tensor": ints(*before)}[c.lengths])
        if c.cache == "pages":
            table = torch.randperm(16, device=DEVICE)[:9].view(3, 3).int()
            more["page_table"] = table
            where = lambda b, i: (int(table[b, i // 16]), i % 16)  # noqa: E731
        else:
            index = [0, 1, 2] if c.cache == "plain" else [4, 0, 3]
            if c.cache == "plain":
                caches = [x[:3] for x in caches]
            else:
                more["cache_batch_idx"] = ints(*index)
            where = lambda b, i: (index[b], i)  # noqa: E731
        added = {"none": (0,) * 3, "rows": (2,) * 3}.get(c.new, NEW)
        want_caches = [x.clone() for x in caches]
        if appends:
            spare = 2 if c.new == "more rows" else 0  # behind the last sequence
            k, v = (drawn(sum(added) + spare, Hkv, D, dtype=c.dtype) for _ in "kv")
            for x, cache in zip((k, v), want_caches):
                for b, part in enumerate(x[:sum(added)].split(added)):
                    for i, row in enumerate(part):
                        bits(cache)[where(b, before[b] + i)] = bits(row)
            if c.new == "rows":
                k, v = (x.view(3, 2, Hkv, D) for x in (k, v))
            else:
                more["cu_seqlens_k_new"] = starts_of(added)
            more |= dict(k=k, v=v)
        rows = (2, 0, 3) if c.rows == "packed" else (2,) * 3
        q = drawn(sum(rows), Hq, D, dtype=c.dtype)
        if c.rows == "packed":
            more |= dict(cu_seqlens_q=starts_of(rows), max_seqlen_q=3)
        result = fa.flash_attn_with_kvcache(q if c.rows == "packed" else q.view(3, 2, Hq, D), *caches, **more, **options, **named,
                                            return_softmax_lse=c.return_softmax_lse)
        for got, want in zip(caches, want_caches):
            assert torch.equal(bits(got), bits(want)), c
        out = result
        if c.return_softmax_lse:
            out, lse, *parts = result
            assert [x.numel() for x in parts] == [0, 0]
            lse = lse if c.rows == "packed" else lse.transpose(0, 1).flatten(1)
        for b, (part, got) in enumerate(zip(q.split(rows), out.view(-1, Hq, D).split(rows))):
            keys = [torch.stack([bits(x)[where(b, i)] for i in range(before[b] + added[b])] or [bits(x)[0, 0]])[:before[b] + added[b]].view(c.dtype)
                    for x in want_caches]
            want, want_lse = one(part, *keys, **options, factors=factors[b])
            close(got, want, c.dtype)
            if c.return_softmax_lse:
                close(lse[:, sum(rows[:b]):sum(rows[:b + 1])], want_lse, c.dtype)
    assert ran > 20


def test_no_new_rows():
    """cu_seqlens_k_new of nothing changes no key."""
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
    """Parts of the keys give the whole; a part that has seen no key may hold NaN."""
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
    hints = dict(num_splits=3, pack_gqa=True, sm_margin=8, deterministic=True, dropout_p=0.0, alibi_slopes=None, qv=None)
    assert torch.equal(fa.flash_attn_func(q, k, k, **hints), fa.flash_attn_func(q, k, k))


def test_gradients():
    for Hkv, causal in ((4, True), (2, False)):
        tensors = [drawn(2, 64, H, D).requires_grad_() for H in (4, Hkv, Hkv)]
        grad = drawn(2, 64, 4, D)
        got = torch.autograd.grad(fa.flash_attn_func(*tensors, causal=causal), tensors, grad)
        wide = [x.detach().double().requires_grad_() for x in tensors]
        want = torch.stack([one(*(x[b] for x in wide), causal=causal)[0] for b in range(2)])
        for a, b in zip(got, torch.autograd.grad(want, wide, grad.double())):
            assert a.shape == b.shape and float((a - b).norm() / b.norm()) <= 2 * LIMIT
    out, lse = fa.flash_attn_func(*tensors, return_attn_probs=True)
    with pytest.raises(ValueError, match=r"^flash_attn_func: deterministic is of the backward.*use_deterministic_algorithms\(True\)$"):
        fa.flash_attn_func(*tensors, deterministic=True)
    with torch.no_grad():
        fa.flash_attn_func(*tensors, deterministic=True)


def test_caches_need_no_gradient():
    """A leaf that wants a gradient is written to as well: there is no backward."""
    caches = [drawn(2, 32, 2, D).requires_grad_() for _ in "kv"]
    new = drawn(2, 1, 2, D)
    with torch.no_grad():
        kept = [x.clone() for x in caches]
    fa.append(*caches, new.requires_grad_(), new, ints(4, 5), None, None, None)
    for x, was in zip(caches, kept):
        assert x.grad_fn is None and torch.equal(x[0, 4], new[0, 0]) and torch.equal(x[1, 5], new[1, 0]) and torch.equal(x[:, 6:], was[:, 6:])


# ---- what is refused ----

def test_refusals():
    q, k, starts, lengths = drawn(2, 5, 4, D), drawn(2, 32, 2, D), ints(0, 5, 10), ints(3, 4)
    functions = {
        "flash_attn_func": lambda **more: fa.flash_attn_func(q, k, k, **more),
        "flash_attn_varlen_func": lambda **more: fa.flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1), starts,
                                                                           ints(0, 32, 64), 5, 32, **more),
        "flash_attn_with_kvcache": lambda **more: fa.flash_attn_with_kvcache(q, k, k, **{"cache_seqlens": lengths, **more})}
    for name, words in {"flash_attn_func": "qv dropout_p alibi_slopes attention_chunk",
                        "flash_attn_varlen_func": "qv dropout_p alibi_slopes attention_chunk seqused_q leftpad_k",
                        "flash_attn_with_kvcache": "qv dropout_p attention_chunk rotary_cos rotary_sin rotary_seqlens cache_leftpad"}.items():
        for word in words.split():
            for value in (ints(1, 1), 1, 0.5):
                with pytest.raises(ValueError, match=f"^{name}: sdpa's kernels have no {word}; [^.]*$"):
                    functions[name](**{word: value})
            functions[name](**{word: None})
        with pytest.raises(TypeError, match=rf"^{name}\(\) has no argument block_tables$"):
            functions[name](block_tables=None)

    def raises(name, words, **more):
        with pytest.raises(ValueError, match=f"^{name}: {words}"):
            functions[name](**more)
    table, of_8 = ints(0, 1)[:, None], drawn(2, 8, 2, D)
    raises("flash_attn_with_kvcache", "k is missing", v=q)
    raises("flash_attn_with_kvcache", "v is missing", k=q)
    raises("flash_attn_with_kvcache", "cache_seqlens is missing", k=k, v=k, cache_seqlens=None)
    raises("flash_attn_with_kvcache", "cache_batch_idx is not for K and V in pages", page_table=table, cache_batch_idx=lengths)
    raises("flash_attn_varlen_func", "cu_seqlens_k is not for K and V in pages", page_table=table)
    for run in (lambda: fa.flash_attn_with_kvcache(q, of_8, of_8, page_table=table, cache_seqlens=lengths),
                lambda: fa.flash_attn_varlen_func(q, of_8, of_8, None, None, 5, 8, page_table=table, seqused_k=lengths)):
        with pytest.raises(ValueError, match="page_table is of pages of 8 keys; .* a multiple of 16 keys$"):
            run()
    for word in ("q_descale", "k_descale", "v_descale"):
        raises("flash_attn_varlen_func", f"sdpa's kernels have no {word} of each sequence of packed rows",
               **{word: torch.ones(2, 2, device=DEVICE)})


# ---- graphs ----

def test_no_graph_break():
    """Each function is one call of attention() in one graph, in which no host waits; what is appended is two nodes."""
    nodes = []

    def graph_of(function):
        torch.compiler.reset()
        torch.compile(function, fullgraph=True, backend=lambda graph, _: nodes.append([
            x.target for x in graph.graph.nodes if x.op.startswith("call")]) or graph)()
        return nodes[-1]
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        empty = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, device="cuda", dtype=dtype)  # noqa: E731
        q, k, cache, pages = empty(2, 1, 8, 128), empty(2, 1, 2, 128), empty(2, 64, 2, 128), empty(9, 16, 2, 128)
        lengths, starts, table = (empty(*shape, dtype=torch.int32) for shape in ((2,), (3,), (2, 4)))
        patch.setattr(sdpa, "attention", ATTENTION)
        for function, writes in (
                (lambda: fa.flash_attn_func(q, cache, cache, causal=True, window_size=(5, 0), return_attn_probs=True), 0),
                (lambda: fa.flash_attn_varlen_func(q[0], k[0], k[0], starts, starts, 1, 1, seqused_k=lengths), 0),
                (lambda: fa.flash_attn_varlen_func(q[0], k[0], k[0], starts, starts, lengths[0], lengths[0]), 0),
                (lambda: fa.flash_attn_with_kvcache(q, cache, cache, k, k, cache_seqlens=lengths, causal=True), 2),
                (lambda: fa.flash_attn_with_kvcache(q, cache, cache, k, k, cache_seqlens=5, cache_batch_idx=lengths), 2),
                (lambda: fa.flash_attn_with_kvcache(q, pages, pages, k[:, 0], k[:, 0], cache_seqlens=lengths, page_table=table,
                                                    cu_seqlens_k_new=starts, return_softmax_lse=True), 2)):
            found = graph_of(function)
            assert found.count(sdpa.OPERATOR) == 1 and found.count("index_put_") == writes, found


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
    runs = [lambda: model(tokens).logits, lambda: model(tokens, attention_mask=mask).logits[mask.bool()]]
    mask = models.padding((5, 0), (0, 0))
    if kind != "Bert":
        runs += [lambda: model(tokens[:1], position_ids=ids, use_cache=False).logits,
                 lambda: torch.stack(model.generate(tokens[:, :24], attention_mask=mask[:, :24], max_new_tokens=1 if here.GPU else 8, do_sample=False,
                                                    output_logits=True, return_dict_in_generate=True, pad_token_id=0).logits)]
    with torch.no_grad():
        want = [run() for run in runs]
        exec(BLOCK)
        calls.clear()
        for run, expected in zip(runs, want):
            models.assert_close(run(), expected)
    assert len(calls) >= 2 * len(runs) and any("q_starts" in more for more in calls) and any("q_starts" not in more for more in calls), kind
    assert kind != "Gemma2" or all(more["softcap"] == 2.0 for more in calls)
import flash_attn_interface, transformers.modeling_flash_attention_utils as loaded
assert loaded._flash_fn is flash_attn_interface.flash_attn_func and loaded._loaded_implementation == "flash_attention_3"
"""


def test_the_transformers_example():
    """The block of docs/USING.md: transformers' own FlashAttention-3, by ours, gives the logits of eager attention for whole batches,
    padded ones, packed ones and generated tokens."""
    pytest.importorskip("transformers", minversion="5.24")
    done = subprocess.run([sys.executable, "-c", f"BLOCK = {blocks()[1]!r}" + PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def blocks():
    text = open(os.path.join(ROOT, "docs/USING.md")).read()
    section = re.search(r"^## FlashAttention-3's module.*?(?=^## )", text, re.DOTALL | re.MULTILINE).group()
    return re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def test_the_documentation(calls, monkeypatch):
    monkeypatch.chdir(ROOT)
    space = {}
    exec(blocks()[0].replace("cuda", DEVICE), space)
    assert space["out"].shape == space["q"].shape and space["lse"].shape == (2, 32, 128) and space["packed"].shape == (256, 32, 128)
    assert space["step"].shape == (2, 1, 32, 128) and space["pages"][0][:, :, 0].any(2).sum() == 2 and len(calls) == 3
