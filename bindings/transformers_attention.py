"""sdpa.cu's kernels as an attention implementation of transformers 5 (docs/USING.md). Importing this module registers it:

    import sys; sys.path.insert(0, ".../bindings")
    import transformers_attention
    model.set_attn_implementation("attention_cu")

A model calls mask() before its layers, once for each kind of layer, and each layer passes the result to attention(). The
result is not a matrix but a few numbers per sequence, which determine the kernel's arguments. Masks that these cannot express
are bool tensors [B,1,Sq,Sk], which the kernels support as well, like masks of the caller and T5's position_bias. Unsupported
arguments raise."""
import inspect

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

import pytorch as sdpa

if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
    raise ImportError("sdpa: this transformers makes masks in another way; install transformers 5.5 or newer")

NAME = "attention_cu"  # transformers treats names with "sdpa" or "flash" in a special way
# Arguments of a layer without effect here. mask() has already used position_ids.
IGNORED = {"position_ids", "position_embeddings", "use_cache", "cache", "past_key_values", "cache_position", "return_dict",
           "output_hidden_states", "output_router_logits", "num_items_in_batch", "logits_to_keep", "layer_idx", "deterministic",
           "max_length_q", "max_length_k"}
IGNORED_BY_MASK = {"allow_is_causal_skip", "allow_is_bidirectional_skip", "local_size", "dtype", "config"}

# Mask functions are closures; those of one factory share their code object. Not all versions of transformers have all of these.
FACTORIES = {"and": ("and_masks", bool), "causal window": ("sliding_window_overlay", 1), "chunks": ("chunked_overlay", 1, None),
             "window": ("sliding_window_bidirectional_overlay", 1), "packed": ("packed_sequence_mask_function", None),
             "positions": ("remap_positions_for_packed_sequence", None, None)}
NAMES = {getattr(masking_utils, factory)(*arguments).__code__: name for name, (factory, *arguments) in FACTORIES.items()
         if hasattr(masking_utils, factory)}


class NeedsTensor(Exception):
    """A mask that the numbers cannot express."""


def read(function):
    """Describes a mask function of transformers: {"causal": True, "left", "right": window sizes, "chunk": its size, "packed":
    the sequence number of each row, "positions": positions within the sequences}."""
    if function is masking_utils.causal_mask_function:
        return {"causal": True}
    if function is masking_utils.bidirectional_mask_function:
        return {}
    code = getattr(function, "__code__", None)
    name = NAMES.get(code)
    if name is None:
        raise NeedsTensor
    of = dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__)))
    if name == "and":
        parts = [read(part) for part in of["mask_functions"]]
        if sum(map(len, parts)) != len({key for part in parts for key in part}):
            raise NeedsTensor  # two masks of the same kind
        return {key: value for part in parts for key, value in part.items()}
    if name == "positions":
        return {**read(of["mask_function"]), "positions": of["position_ids"]}
    if name == "packed":
        return {"packed": of["packed_sequence_mask"]}
    if name == "chunks":
        return {"chunk": of["chunk_size"]}
    window = of["sliding_window"]
    return {"left": window - 1} if name == "causal window" else {"left": window, "right": window}


KINDS = []  # (form, causal, left, right) of the masks so far


def described(form, says, numbers):
    """The tensor that a model passes to its layers instead of a mask: int32 [B,1 + index in KINDS,n,2]. The kind is encoded in
    the shape, which survives .to(), .contiguous(), graphs and splitting the batch. "plain": no numbers, [B,.,0,Sk]. "lengths": the
    number of keys of a sequence, twice, [B,.,1,2]. "starts" and "packed": the first row in K and in Q of each of n sequences,
    [B,.,n,2]."""
    kind = form, says.get("causal", False), says.get("left"), says.get("right")
    if kind not in KINDS:
        KINDS.append(kind)
    return numbers.to(torch.int32)[:, None].expand(-1, 1 + KINDS.index(kind), -1, -1)


@torch.compiler.disable(reason="sdpa's mask() reads the mask; a graph gets what it returns")
def mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=masking_utils.causal_mask_function,
         attention_mask=None, device="cpu", use_vmap=False, **others):
    """The description of the mask of a kind of layer, or transformers' own mask for torch's sdpa if there is none."""
    for name in others.keys() - IGNORED_BY_MASK:
        raise ValueError(f"sdpa: transformers makes a mask with an argument {name}, which is not known here")
    asked = batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask
    try:
        return numbers_of(*asked, device)
    except NeedsTensor:
        return masking_utils.sdpa_mask(*asked, allow_is_causal_skip=False, use_vmap=use_vmap, device=device)


def numbers_of(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device):
    """The description of a mask. The host waits for attention_mask [B,keys so far], if there is one, and for packed
    position_ids, but not for the length of a static cache."""
    says = read(mask_function)
    causal, chunk, kv_end = says.get("causal", False), says.get("chunk"), kv_offset + kv_length
    if not causal and not says.keys() <= {"left", "right"}:
        raise NeedsTensor  # chunks or packed sequences
    if not causal and "left" in says and (isinstance(q_offset, torch.Tensor) or q_offset != kv_offset):
        raise NeedsTensor  # a window over a cache
    arange = lambda n: torch.arange(n, device=device)  # noqa: E731
    if "packed" in says:
        new = F.pad(says["packed"].diff(dim=1) != 0, (1, 0), value=True)
        if chunk:
            new = new | (says.get("positions", arange(q_length)[None]) % chunk == 0)
        rows = torch.where(new, arange(q_length), q_length).sort(1).values[:, :int(new.sum(1).max())]
        return described("packed", says, torch.stack([rows, rows], 2))

    end = q_offset + q_length if causal else kv_end  # of the keys; a tensor for a static cache, unknown to the host
    known = None if isinstance(end, torch.Tensor) else end
    zero, padded, short = arange(batch_size) * 0, False, False
    first, last = zero, zero + end  # keys from `first` to `last` belong to the sequence
    if attention_mask is not None:
        own = attention_mask if causal else F.pad(attention_mask, (0, kv_end - attention_mask.shape[1]))
        first, count = (own.cumsum(1) == 0).sum(1), own.sum(1)
        last = (own.shape[1] - (own.flip(1).cumsum(1) == 0).sum(1)).maximum(first)
        facts = torch.stack([first.max(), last.min(), (last - first - count).max(), (zero + end).max()])
        padded, shortest, holes, known = facts.tolist()
        short = shortest < known
        if own.shape[1] < known:
            raise ValueError(f"sdpa: attention_mask has {own.shape[1]} columns and not {known}, for the cache and the new tokens")
        if holes:
            raise NeedsTensor
    if known is not None and known > kv_end:
        raise ValueError("sdpa: the queries are past the last key of the cache")

    if not causal:
        if not padded and not short:
            return described("plain", says, first.new_empty(batch_size, 0, kv_length))
        k = torch.stack([zero, first, last], 1).clamp(min=kv_offset) - kv_offset
        if not padded:
            return described("lengths", says, k[:, None, 2:].expand(-1, 1, 2))
        if "left" in says and q_length != kv_length:
            raise NeedsTensor
        # Three sequences: padding on the left, the tokens, and padding on the right. With a window, the queries are split as
        # the keys; otherwise all of them belong to the tokens.
        return described("starts", says, torch.stack([k, k if "left" in says else k * 0 + q_length * (arange(3) > 1)], 2))

    # Tokens after the end of a sequence are visible only to such tokens, whose outputs are unused, so `last` is irrelevant.
    zero = zero[:, None]
    if not padded and (not chunk or (known is not None and known <= chunk)):
        if known == kv_end:
            return described("plain", says, first.new_empty(batch_size, 0, kv_length))
        return described("lengths", says, (zero + end - kv_offset)[:, None].expand(-1, 1, 2))
    begins = first[:, None]
    if chunk:  # the chunks with keys in the buffer
        begins = begins + chunk * ((kv_offset - begins) // chunk + arange(kv_length // chunk + 2))
    # Padding becomes a separate sequence, and the unwritten part of a static cache a sequence without queries.
    begins = torch.cat([zero, begins, zero + end], 1)
    rows = [begins.maximum(zero + start).minimum(zero + end) - start for start in (kv_offset, q_offset)]
    return described("starts", says, torch.stack(rows, 2))


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None, softcap=None, s_aux=None,
              is_causal=None, cu_seq_lens_q=None, cu_seq_lens_k=None, position_bias=None, **others):
    """O [B,Sq,Hq,D] of a layer, and None instead of weights, which no kernel computes."""
    for name, given in [("dropout", dropout or None), *others.items()]:
        if name not in IGNORED and given is not None and given is not False:
            raise ValueError(f"sdpa: the kernels cannot honour {name} of {type(module).__name__}; take 'eager' attention for it")
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    (B, Hq, Sq, _), (_, Hkv, Sk, _) = query.shape, key.shape
    bias, dtype = position_bias, getattr(attention_mask, "dtype", torch.int32)
    if dtype == torch.bool or dtype.is_floating_point:
        form, causal, left, right = "plain", False, None, None  # the tensor says all
        if bias is None:
            bias = attention_mask
        else:
            bias = bias.masked_fill(~attention_mask, -torch.inf) if dtype == torch.bool else bias + attention_mask
    elif attention_mask is None:  # no mask was requested
        form, right = "plain", None
        if Sq > 1 and is_causal is None and getattr(module, "is_causal", True):  # 'sdpa' and 'eager' interpret this differently
            raise ValueError(f"sdpa: attention_mask and the argument is_causal are None, which does not say what the queries of "
                             f"{type(module).__name__} see; pass is_causal, or take 'eager' attention for it")
        causal = Sq > 1 and bool(is_causal)
        left = sliding_window - 1 if sliding_window else None
        if (causal and Sq != Sk) or (sliding_window and not causal):
            raise ValueError(f"sdpa: attention_mask is None, which does not say what {Sq} queries see of {Sk} keys")
    else:
        ours = isinstance(attention_mask, torch.Tensor) and dtype == torch.int32 and attention_mask.dim() == 4
        place = attention_mask.shape[1] - 1 if ours else -1
        if not 0 <= place < len(KINDS):
            raise ValueError("sdpa: attention_mask is not supported; pass [batch,tokens] of ones and zeros")
        form, causal, left, right = KINDS[place]
        if form == "plain" and attention_mask.shape[3] != Sk:
            raise ValueError(f"sdpa: attention_mask is for {attention_mask.shape[3]} keys, and the layer has {Sk}")
        if form != "plain" and attention_mask.shape[0] != B:
            raise ValueError(f"sdpa: attention_mask is for {attention_mask.shape[0]} sequences, and the layer has {B}")
        if sliding_window and (left is None or (causal and left != sliding_window - 1)) and Sk > sliding_window:
            raise ValueError(f"sdpa: sliding_window is {sliding_window}, and of attention_mask it is {left and left + 1}")
    window = (None, None) if left is None else (left, 0) if causal else (left, right, "tl")
    options = dict(causal="br" if causal else None, window=window, scale=scaling, softcap=softcap, sinks=s_aux, bias=bias)
    if cu_seq_lens_q is not None and (form in ("lengths", "starts") or Sq != Sk):
        raise ValueError("sdpa: cu_seq_lens_q cannot be combined with padding, tokens in a cache or cross attention")
    by_user = cu_seq_lens_q is not None and form == "plain"
    if form == "plain" and not by_user:
        return sdpa.attention(query, key, value, **options).transpose(1, 2).contiguous(), None
    if form == "lengths":
        lengths = attention_mask[:, 0, 0, 0].contiguous()
        return sdpa.attention(query, key, value, **options, k_lengths=lengths).transpose(1, 2).contiguous(), None

    if bias is not None:
        raise ValueError("sdpa: a bias or a mask tensor is not supported with padding on the left, chunks or packed sequences; pad on the right")
    # Pack all sequences into a batch of 1: [1,H,B*S,D] if that is a view. It would copy a cache [B,H,S,D]; then each head of K
    # and V becomes a sequence, [1,1,B*Hkv*S,D], and Q is [1,group,B*Hkv*S,D]. Sinks are per head and need the first layout.
    by_rows = by_user or B == 1 or s_aux is not None or key.stride(0) == Sk * key.stride(2)
    if by_rows:
        q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))
    else:
        q = query.unflatten(1, (Hkv, -1)).permute(2, 0, 1, 3, 4).flatten(1, 3)[None]
        k, v = (x.flatten(0, 2)[None, None] for x in (key, value))
    count = B if by_rows else B * Hkv
    if by_user:  # rows after the last sequence become another sequence
        starts, most = (cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k, cu_seq_lens_q), 0
    else:
        numbers, most = attention_mask[:, 0].repeat_interleave(count // B, 0), Sk
        offsets = torch.arange(count, dtype=torch.int32, device=key.device)[:, None]
        starts = [(numbers[:, :, i] + offsets * S).flatten() for i, S in enumerate((Sk, Sq))]
    k_starts, q_starts = (F.pad(x.int(), (0, 1), value=count * S) for x, S in zip(starts, (Sk, Sq)))
    out = sdpa.attention(q, k, v, **options, q_starts=q_starts, k_starts=k_starts, most_keys=most)[0]
    if by_rows:
        return out.unflatten(1, (B, Sq)).permute(1, 2, 0, 3).contiguous(), None
    return out.unflatten(1, (B, Hkv, Sq)).permute(1, 3, 2, 0, 4).flatten(2, 3).contiguous(), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
