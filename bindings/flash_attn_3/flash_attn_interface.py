"""FlashAttention-3's functions with sdpa.cu's kernels. Arguments, order, defaults, shapes and results are those of its module
of the same name, so existing code runs unchanged. docs/USING.md explains how callers find this module.

Tensors are [B,S,H,D], or [rows,H,D] with cu_seqlens; LSE is [B,H,S], or [H,rows] with cu_seqlens_q. O has the layout and
type of q (bfloat16 for e4m3). Masks and windows are bottom-right aligned. learnable_sink [Hq] is from FlashAttention-4.
alibi_slopes, float32 [Hq] or [B,Hq], is from FlashAttention-2 and adds -slope * |i + Sk - Sq - j| to a logit. Hints have no
effect: num_splits, pack_gqa, sm_margin, scheduler_metadata, max_seqlen_q. Unsupported arguments raise an error that names
the argument."""
import torch

import pytorch as sdpa

APPEND = torch.ops.sdpa.append.default  # appends k and v to the caches and returns the new lengths

MOST_KEYS = 10**9  # the limit of sdpa's kernels; a larger window is no window

# Unsupported arguments of FlashAttention-2 and -3, and alternatives.
UNKNOWN = {
    "leftpad_k": "pass k and v without the padding, or use flash_attn_with_kvcache with cache_leftpad",
    "qv": "leave it out", "dropout_p": "pass 0",
    "attention_chunk": "make each chunk a sequence of flash_attn_varlen_func"}


def refuse(function, **arguments):
    """Raises for unsupported arguments, unless they are None, 0 or False."""
    for name, value in arguments.items():
        if name not in UNKNOWN:
            raise TypeError(f"{function}() has no argument {name}")
        if isinstance(value, torch.Tensor) or value:
            raise ValueError(f"{function}: {name} is not supported; {UNKNOWN[name]}")


def check_call(function, causal, window_size, **tensors):
    """tensors: (a tensor or None, its number of dimensions) by name."""
    for name, (x, dims) in tensors.items():
        if x is not None and x.dim() != dims:
            raise ValueError(f"{function}: {name} has {x.dim()} dimensions; want {'[rows,H,D]' if dims == 3 else '[B,S,H,D]'}")
    if isinstance(causal, torch.Tensor):
        raise TypeError(f"{function}: causal is a Tensor, not True or False")
    is_pair = isinstance(window_size, (tuple, list)) or isinstance(window_size, torch.Tensor) and window_size.device.type == "cpu"
    if not is_pair or len(window_size) != 2 or any(isinstance(keys, (float, str, tuple, list)) for keys in window_size):
        raise ValueError(f"{function}: window_size={window_size!r} is not (keys before, keys after)")


def check_integers(function, page_table=None, **tensors):
    for name, x, dims in (("page_table", page_table, 2), *((name, x, 1) for name, x in tensors.items())):
        if x is None:
            continue
        sdpa.check_tensors(function, **{name: x})
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            raise ValueError(f"{function}: {name} is of {x.dtype}; want int32 or another integer type")
        if x.dim() != dims:
            raise ValueError(f"{function}: {name} has {x.dim()} dimensions; want {dims}")


def check_counts(function, q, table_has_own_rows=False, page_table=None, **tensors):
    """Raises unless each integer tensor has an element for each sequence, cu_seqlens one more, and page_table a row."""
    if torch.compiler.is_compiling():
        return  # the fake kernel checks sizes, which may be symbols
    name = next((name for name in ("cu_seqlens_q", "cu_seqlens_k") if tensors.get(name) is not None), None)
    sequences = q.shape[0] if name is None else tensors[name].shape[0] - 1
    if name is not None and (sequences < 0 or sequences == 0 and q.numel() > 0):
        raise ValueError(f"{function}: {name} has {sequences + 1} elements; want one more than the number of sequences, which is 0 only "
                         "if q is empty")
    if page_table is not None and not table_has_own_rows and page_table.shape[0] != sequences:
        raise ValueError(f"{function}: page_table has {page_table.shape[0]} rows for {sequences} sequences")
    for name, x in tensors.items():
        if x is not None and x.shape[0] != sequences + name.startswith("cu_seqlens"):
            raise ValueError(f"{function}: {name} has {x.shape[0]} elements for {sequences} sequences")


def rotated(x, cos, sin, first, starts, turns_rows, interleaved):
    """Rotates the first elements of x [B,S,H,D], or [rows,H,D] with starts [B+1]: pairs of neighbours if interleaved, else pairs
    from the two halves. Row i of sequence b has the angles of position first[b] + i, or of first[b] unless turns_rows. e4m3
    saturates, since a rotation can enlarge an element by sqrt(2)."""
    if starts is None:
        position = first[:, None] + torch.arange(x.shape[1], device=x.device) * turns_rows
    else:
        row = torch.arange(x.shape[0], device=x.device, dtype=starts.dtype)
        b = (torch.searchsorted(starts, row, right=True) - 1).clamp(0, first.shape[0] - 1)
        position = first[b] + (row - starts[b]) * turns_rows
    position = position.clamp(0, cos.shape[0] - 1)  # unused rows may be out of range
    cos, sin = (angles[position].float()[..., None, :] for angles in (cos, sin))
    size = 2 * cos.shape[-1]
    turned = x[..., :size].float()
    one, other = turned.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turned.chunk(2, -1)
    turned = one * cos - other * sin, one * sin + other * cos
    turned = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    both = torch.cat([turned, x[..., size:].float()], -1)
    return (both.clamp(-448, 448) if x.dtype == torch.float8_e4m3fn else both).to(x.dtype)


def check_rotary(function, q, k, cos, sin):
    for name, x, other in (("rotary_cos", cos, "rotary_sin"), ("rotary_sin", sin, "rotary_cos")):
        if x is None:
            raise ValueError(f"{function}: {name} is missing; pass it with {other}")
        sdpa.check_tensors(function, **{name: x})
        if x.dtype != q.dtype or x.dim() != 2 or x.shape != cos.shape or 2 * x.shape[1] > q.shape[-1] or x.shape[1] % 8:
            raise ValueError(f"{function}: {name} is {x.dtype} {list(x.shape)}; want {q.dtype} [positions,d / 2] of both, d a "
                             f"multiple of 16 up to {q.shape[-1]}")
    if k is None:
        raise ValueError(f"{function}: rotary_cos is for k and v that are appended, and k is missing")


def alibi(function, slopes, heads, sequences, causal, softcap):
    """The arguments of attention() for alibi_slopes. The expression includes the softcap, which is applied first."""
    if not isinstance(slopes, torch.Tensor):
        raise ValueError(f"{function}: alibi_slopes is a {type(slopes).__name__}, not a tensor")
    if slopes.dtype != torch.float32 or tuple(slopes.shape) not in ((heads,), (sequences, heads)):
        what = f"{slopes.dtype} {list(slopes.shape)}"
        raise ValueError(f"{function}: alibi_slopes is {what}; want float32 [{heads}] or [{sequences},{heads}]")
    if softcap and not 1e-18 <= softcap <= 1e18:
        raise ValueError(f"{function}: softcap={softcap:g}: must be 0, or 1e-18 to 1e18")
    slope = "x0[h]" if slopes.dim() == 1 else f"x0[b * {heads} + h]"
    # The causal mask hides keys with a negative distance, so abs(), which is slower, is not needed.
    distance = "real(q + Sk - Sq - k)" if causal else "real(abs(q + Sk - Sq - k))"
    score = f"{softcap:.9g} * tanh_approx(s / {softcap:.9g})" if softcap else "s"
    return dict(score_mod=f"{score} - {slope} * {distance}", args=[slopes.contiguous()])


def attend(function, q, k, v, scale, causal, window_size, softcap, q_descale, k_descale, v_descale, sinks, slopes,
           q_starts=None, k_starts=None, k_lengths=None, page_table=None, most_keys=0, q_lengths=None, k_firsts=None,
           backward=None):
    """O and LSE of attention(), in FlashAttention's shapes."""
    D, Dv = q.shape[-1], v.shape[-1]
    if max(D, Dv) > 256:
        raise ValueError(f"{function}: q has D={D} and v has D={Dv}; sdpa's kernels support up to 256")
    left, right = (None if keys is None or keys < 0 else min(int(keys), MOST_KEYS) for keys in window_size)
    if causal or (right == 0 and left is None):
        causal, right = "br", None if left is None else 0
    window = (None, None) if left is None and right is None else (left, right, "br")
    if page_table is not None and k.shape[1] == 0:
        raise ValueError(f"{function}: a page of page_table has 0 keys; sdpa's kernels read pages of 1 key or more")
    numbers = dict(q_starts=q_starts, k_starts=k_starts, k_lengths=k_lengths, page_table=page_table, q_lengths=q_lengths,
                   k_firsts=k_firsts)
    numbers = {name: x if x.dtype == torch.int32 and x.is_contiguous() else x.to(torch.int32).contiguous()
               for name, x in numbers.items() if x is not None}
    tensors = []
    for x, starts in ((q, q_starts), (k, k_starts), (v, k_starts)):
        x = x if x.stride(-1) == 1 else x.contiguous()
        tensors.append((x if starts is None else x[None]).transpose(1, 2))
    mods = dict(softcap=softcap)
    if slopes is not None:
        sequences = q.shape[0] if q_starts is None else q_starts.shape[0] - 1
        mods = alibi(function, slopes, q.shape[-2], sequences, causal == "br", softcap)
    out, lse = sdpa.attention(
        *tensors, causal=causal or None, window=window, scale=scale, sinks=sinks, return_lse=True, **mods,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        most_keys=most_keys if numbers else 0, **numbers, backward=backward,
        out_dtype=torch.bfloat16 if q.dtype == torch.float8_e4m3fn else None)
    out = out.transpose(1, 2)
    if q.shape[-1] != v.shape[-1]:
        out = out.contiguous()  # attention() returns [B,H,S,Dv]
    return (out, lse) if q_starts is None else (out[0], lse[0])


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
                    deterministic=False, sm_margin=0, return_attn_probs=False, *, learnable_sink=None, alibi_slopes=None,
                    **others):
    """O [B,Sq,Hq,Dv] of q [B,Sq,Hq,D], k [B,Sk,Hkv,D] and v [B,Sk,Hkv,Dv], and with return_attn_probs the LSE. Supports the
    backward pass of attention(), deterministic or not."""
    refuse("flash_attn_func", qv=qv, attention_chunk=attention_chunk, **others)
    sdpa.check_tensors("flash_attn_func", q=q, k=k, v=v)
    check_call("flash_attn_func", causal, window_size, q=(q, 4), k=(k, 4), v=(v, 4))
    out, lse = attend("flash_attn_func", q, k, v, softmax_scale, causal, window_size, softcap, q_descale, k_descale,
                      v_descale, learnable_sink, alibi_slopes, backward="deterministic" if deterministic else None)
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None,
                              window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False,
                              num_heads_q=None, sm_margin=0, return_attn_probs=False, **others):
    """flash_attn_func() for qkv [B,S,3,H,D], or [B,S,Hq + 2 * Hkv,D] with num_heads_q."""
    sdpa.check_tensors("flash_attn_qkvpacked_func", qkv=qkv)
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif qkv.dim() == 4 and isinstance(num_heads_q, int) and 0 < num_heads_q < qkv.shape[2] and (qkv.shape[2] - num_heads_q) % 2 == 0:
        q, k, v = qkv.split([num_heads_q, *[(qkv.shape[2] - num_heads_q) // 2] * 2], 2)
    else:
        raise ValueError(f"flash_attn_qkvpacked_func: qkv is {list(qkv.shape)}; want [B,S,3,H,D], or [B,S,Hq + 2 * Hkv,D] and "
                         "num_heads_q")
    return flash_attn_func(q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk,
                           softcap, deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs, **others)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
                           seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
                           v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
                           pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False, *, page_table=None,
                           learnable_sink=None, alibi_slopes=None, **others):
    """flash_attn_func() for packed sequences: sequence b has the rows from cu_seqlens[b] to cu_seqlens[b + 1], or only the first
    seqused_q[b] queries and seqused_k[b] keys of them. Other rows of O and LSE are not written. If cu_seqlens_q or _k is None,
    q, or k and v, are [B,S,H,D]; with page_table k and v are paged. max_seqlen_k bounds the keys of a sequence, unless it is a
    tensor, for which the host would have to wait. Supports the backward pass of attention(), deterministic or not, except with
    page_table; rows of q, k and v that are no query or key have a gradient of 0."""
    refuse("flash_attn_varlen_func", qv=qv, attention_chunk=attention_chunk, **others)
    sdpa.check_tensors("flash_attn_varlen_func", q=q, k=k, v=v)
    integers = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k, page_table=page_table)
    check_integers("flash_attn_varlen_func", **integers)
    of_keys = 4 if cu_seqlens_k is None else 3
    check_call("flash_attn_varlen_func", causal, window_size, q=(q, 4 if cu_seqlens_q is None else 3), k=(k, of_keys), v=(v, of_keys))
    check_counts("flash_attn_varlen_func", q, **integers)
    if page_table is not None and cu_seqlens_k is not None:
        raise ValueError("flash_attn_varlen_func: cu_seqlens_k cannot be combined with page_table, which orders the keys")
    most_keys = 0 if isinstance(max_seqlen_k, torch.Tensor) else max_seqlen_k or 0
    out, lse = attend("flash_attn_varlen_func", q, k, v, softmax_scale, causal, window_size, softcap, q_descale,
                      k_descale, v_descale, learnable_sink, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table,
                      most_keys, seqused_q, backward="deterministic" if deterministic else None)
    return (out, lse) if return_attn_probs else out


class AppendedKeys(torch.autograd.Function):
    """Returns q. The result depends on k and v through the caches, which autograd does not see, so the backward pass is refused."""
    @staticmethod
    def forward(ctx, q, k, v):
        return q.view_as(q)

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("flash_attn_with_kvcache: no gradient of k and v that are appended to caches; detach them")


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
                            cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
                            cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
                            q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
                            window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
                            scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
                            *, learnable_sink=None, alibi_slopes=None, **others):
    """flash_attn_func() for caches [B,Sk,Hkv,D] with cache_seqlens (an int or [B]) valid keys, or paged caches
    [pages,page size,Hkv,D] with page_table [B,N]. Sequence b uses the cache, or the row of the table, cache_batch_idx[b].
    k and v [B,new,Hkv,D], or [rows,Hkv,D] with cu_seqlens_k_new, are appended to the caches first. The first cache_leftpad [B]
    keys are hidden. With rotary_cos and rotary_sin [positions,d / 2], the first d elements of q and k are rotated, before k is
    written: row i by the angles of position rotary_seqlens[b] + i (default: cache_seqlens), but all rows of q by those of the
    first one if there is neither a causal mask nor a window. With return_softmax_lse, also returns LSE and two empty tensors in
    place of the partials of splits."""
    name = "flash_attn_with_kvcache"
    refuse(name, qv=qv, attention_chunk=attention_chunk, **others)
    sdpa.check_tensors(name, q=q, k_cache=k_cache, v_cache=v_cache,
                       **{which: x for which, x in (("k", k), ("v", v)) if x is not None})
    used = None if isinstance(cache_seqlens, int) else cache_seqlens
    if used is None and cache_seqlens is not None and not 0 <= cache_seqlens <= MOST_KEYS:
        raise ValueError(f"{name}: cache_seqlens={cache_seqlens} is outside [0, {MOST_KEYS}]")
    integers = dict(cache_seqlens=used, cache_batch_idx=cache_batch_idx, page_table=page_table, cu_seqlens_q=cu_seqlens_q,
                    cu_seqlens_k_new=cu_seqlens_k_new, cache_leftpad=cache_leftpad, rotary_seqlens=rotary_seqlens)
    check_integers(name, **integers)
    of_new = 4 if cu_seqlens_k_new is None else 3
    check_call(name, causal, window_size, q=(q, 4 if cu_seqlens_q is None else 3), k_cache=(k_cache, 4), v_cache=(v_cache, 4), k=(k, of_new),
               v=(v, of_new))
    check_counts(name, q, table_has_own_rows=cache_batch_idx is not None, **integers)
    if rotary_cos is not None or rotary_sin is not None:
        check_rotary(name, q, k, rotary_cos, rotary_sin)
    if (k is None) != (v is None):
        raise ValueError(f"{name}: {'k' if k is None else 'v'} is missing; keys are appended with their values")
    if k is not None and cache_seqlens is None:
        raise ValueError(f"{name}: cache_seqlens is missing, which says where k and v are appended")
    sequences = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if cache_seqlens is not None and not isinstance(cache_seqlens, torch.Tensor):
        cache_seqlens = torch.full((sequences,), cache_seqlens, dtype=torch.int32, device=k_cache.device)
    if rotary_cos is not None:
        first = cache_seqlens if rotary_seqlens is None else rotary_seqlens
        if first.shape[0] != sequences:  # check_counts() skips compiled calls
            which = "cache_seqlens" if rotary_seqlens is None else "rotary_seqlens"
            raise ValueError(f"{name}: {which} has {first.shape[0]} elements for {sequences} sequences")
        turns_rows = causal or any(keys is not None and keys >= 0 for keys in window_size)
        q = rotated(q, rotary_cos, rotary_sin, first, cu_seqlens_q, turns_rows, rotary_interleaved)
        k = rotated(k, rotary_cos, rotary_sin, first, cu_seqlens_k_new, True, rotary_interleaved)
    if cache_batch_idx is not None:
        # Each cache is a page, and the table has one column.
        page_table = cache_batch_idx[:, None] if page_table is None else page_table.index_select(0, cache_batch_idx)
    if k is not None:
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            q = AppendedKeys.apply(q, k, v)
        cache_seqlens = APPEND(k_cache, v_cache, k, v, cache_seqlens, page_table, cu_seqlens_k_new)
    out, lse = attend(name, q, k_cache, v_cache, softmax_scale, causal, window_size, softcap, q_descale, k_descale,
                      v_descale, learnable_sink, alibi_slopes, cu_seqlens_q, None, cache_seqlens, page_table,
                      k_firsts=cache_leftpad)
    if not return_softmax_lse:
        return out
    none = torch.empty(0, device=q.device)
    return out, lse, none, none


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Merges n partials [n,B,S,H,D] over different keys with their LSEs [n,B,S,H], all fp32, to O [B,S,H,D] and LSE [B,S,H]."""
    name = "flash_attn_combine"
    sdpa.check_tensors(name, out_partial=out_partial, lse_partial=lse_partial, **{} if out is None else {"out": out})
    if out_partial.dim() == 0 or out_partial.shape[:-1] != lse_partial.shape:
        raise ValueError(f"{name}: out_partial is {list(out_partial.shape)} and lse_partial {list(lse_partial.shape)}; want [n,B,S,H,D] and "
                         "[n,B,S,H]")
    if out is not None and out.shape != out_partial.shape[1:]:
        raise ValueError(f"{name}: out is {list(out.shape)}, not {list(out_partial.shape[1:])}")
    if not isinstance(out_dtype, (torch.dtype, type(None))):
        raise TypeError(f"{name}: out_dtype is a {type(out_dtype).__name__}, not a dtype of PyTorch")
    lse = lse_partial.logsumexp(0)
    weights = (lse_partial - lse.where(lse > -torch.inf, 0)).exp()[..., None]
    whole = (out_partial.where(weights > 0, 0) * weights).sum(0)  # a partial without keys may have any contents
    return whole.to(out_dtype or out_partial.dtype) if out is None else out.copy_(whole), lse


def get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
                           qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
                           cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1),
                           attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0):
    """An empty tensor for scheduler_metadata, which has no effect, since the kernels plan their work themselves."""
    sdpa.check_tensors("get_scheduler_metadata", cache_seqlens=cache_seqlens)
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)
