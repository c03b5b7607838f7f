"""Tests of bindings/transformers_attention.py: logits and tokens of tiny models with random weights, with our attention and eager
attention. Without a GPU a reference replaces the kernels.  usage: python3 -m pytest tests/test_transformers.py"""
import os
import re
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "bindings"))
torch, transformers = pytest.importorskip("torch", minversion="2.11"), pytest.importorskip("transformers", minversion="5.24")
import pytorch as sdpa  # noqa: E402
import transformers_attention as ours  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE, DTYPE, LIMIT = ("cuda", torch.bfloat16, 3e-2) if GPU else ("cpu", torch.float32, 1e-5)
SIZES = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=64, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=None)
EXPERTS = dict(num_local_experts=2, num_experts_per_tok=2)  # all, since rounding could choose another one
LAYERS = dict(sliding_window=16, layer_types=["sliding_attention", "full_attention"])
MODELS = {"Llama": dict(head_dim=128), "Mistral": dict(sliding_window=16), "Qwen3": {}, "GptOss": dict(**LAYERS, **EXPERTS),
          "Gemma2": dict(**LAYERS, attn_logit_softcapping=2.0, query_pre_attn_scalar=16), "Gemma3": LAYERS,
          "Llama4": dict(**EXPERTS, intermediate_size_mlp=96, attention_chunk_size=16, attn_temperature_tuning=False,
                         layer_types=["chunked_attention", "full_attention"]), "GPT2": {},
          "Bert": {}, "Bart": {}}
CLASSES = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"), "Llama4": ("Llama4TextConfig", "Llama4ForCausalLM"),
           "GPT2": ("GPT2Config", "GPT2LMHeadModel"), "Bert": ("BertConfig", "BertForMaskedLM"),
           "Bart": ("BartConfig", "BartForConditionalGeneration")}
DECODERS = [kind for kind in MODELS if kind not in ("Bert", "Bart")]


def quickly(*kinds):
    """All decoders for tests that take long. Without --all these: each kind of layer is in one of them."""
    return [kind if kind in kinds else pytest.param(kind, marks=pytest.mark.long) for kind in DECODERS]


TOKENS = 40


def reference(q, k, v, causal=None, window=(None, None), scale=None, softcap=None, sinks=None, k_lengths=None, q_starts=None,
              k_starts=None, most_keys=0, bias=None):
    """attention() of bindings/pytorch.py. Reads only visible keys; rows outside all sequences are NaN."""
    (B, Hq, Sq, D), (_, Hkv, Sk, _) = q.shape, k.shape
    rows, keys = torch.arange(Sq, dtype=torch.int32)[:, None], torch.arange(Sk, dtype=torch.int32)
    assert causal in (None, "br") and all(x.stride(3) == 1 and x.dtype == q.dtype and x.shape[0] == B for x in (q, k, v))
    if not torch.compiler.is_compiling():
        for x, numbers, length in ((q, q_starts, Sq), (k, k_starts, Sk)):
            assert numbers is None or (numbers.dtype == torch.int32 and numbers.is_contiguous())
            assert numbers is None or numbers.shape == q_starts.shape
            assert numbers is None or ((numbers.diff() >= 0).all() and numbers[0] == 0 and numbers[-1] <= length and B == 1)
        assert k_starts is None or not most_keys or k_starts.diff().max() <= most_keys
        assert k_lengths is None or (k_lengths.dtype == torch.int32 and k_lengths.is_contiguous() and k_lengths.shape == (B,)
                                     and k_lengths.min() >= 0 and k_lengths.max() <= Sk)
    of_none = torch.zeros(Sq, 1, dtype=torch.bool)
    if q_starts is not None:  # the sequence of a row and of a key, and their places in it
        last = q_starts.shape[0] - 1
        row_of, key_of = (torch.searchsorted(starts, x, right=True) - 1 for starts, x in ((q_starts, rows), (k_starts, keys)))
        of_none, mine = row_of == last, (row_of == key_of) & (row_of < last)
        place = row_of.clamp(max=last - 1)
        rows, keys = rows - q_starts[row_of], keys - k_starts[key_of]
        more = k_starts.diff()[place] - q_starts.diff()[place]
    else:
        length = Sk if k_lengths is None else k_lengths[:, None, None, None]
        mine, more = keys < length, length - Sq
    own = rows + (0 if "tl" in window else more)
    seen = mine & ((keys <= own) if causal else True)
    seen = seen if window[0] is None else seen & (keys >= own - window[0])
    seen = seen if window[1] is None else seen & (keys <= own + window[1])
    seen = seen.expand(B, 1, Sq, Sk)
    k, v = (x.masked_fill(~seen.any(2)[..., None], 0).repeat_interleave(Hq // Hkv, 1) for x in (k, v))
    S = q @ k.mT * (D ** -0.5 if scale is None else scale)
    S = softcap * torch.tanh(S / softcap) if softcap else S
    if bias is not None:
        assert q_starts is None and bias.shape[-1] == Sk
        hides = bias.dtype == torch.bool
        seen, S = (seen & bias, S) if hides else (seen & (bias > torch.finfo(bias.dtype).min), S + bias)
    S = S.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        S = torch.cat([S, sinks[:, None, None].expand(B, Hq, Sq, 1)], 3)
    P = torch.softmax(S, -1)[..., :Sk].masked_fill(~seen, 0)  # a row that sees no key is 0
    return (P @ v).masked_fill(of_none, torch.nan)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Records the arguments of each kernel call."""
    seen, kernel = [], sdpa.attention if GPU else reference
    monkeypatch.setattr(sdpa, "attention", lambda *x, **more: seen.append(more) or kernel(*x, **more))
    return seen


def model_of(kind, **more):
    sizes = {**SIZES, **MODELS[kind], **more}
    if kind == "GPT2":
        sizes = dict(vocab_size=97, n_positions=128, n_embd=128, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=None) | more
    if kind == "Bert":
        sizes |= dict(hidden_size=128, num_attention_heads=2)
    if kind == "Bart":
        sizes = dict(vocab_size=97, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
                     decoder_attention_heads=2, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=128,
                     pad_token_id=0, bos_token_id=1, eos_token_id=None, decoder_start_token_id=1, forced_eos_token_id=None) | more
    config, model = (getattr(transformers, name) for name in CLASSES.get(kind, (kind + "Config", kind + "ForCausalLM")))
    torch.manual_seed(0)
    return drawn(model(config(**sizes)))


def drawn(model):
    """Draws weights that make the logits depend on what attention sees."""
    model = model.to(DEVICE, DTYPE).eval()
    for name, x in model.named_parameters():
        if name.endswith("sinks") or x.dim() > 1:
            x.data.normal_(0, 1 if name.endswith("sinks") else x.shape[-1] ** -0.5)
    return model


def both(model, run):
    """Results of run() with eager attention and with ours."""
    results = []
    for name in ("eager", ours.NAME):
        model.set_attn_implementation(name)
        torch.manual_seed(1)
        with torch.no_grad():
            results.append(run())
    return results


def assert_close(got, want, where=None):
    """Compares the logits of tokens that are not padding."""
    got, want = ((x if where is None else x[where.bool()]).double() for x in (got, want))
    assert float((got - want).norm() / want.norm()) <= LIMIT


def tokens_of(batch=2, count=TOKENS):
    torch.manual_seed(2)
    return torch.randint(1, 97, (batch, count), device=DEVICE)


def padding(*pads, count=TOKENS):
    """A mask [B,count] with (left, right) zeros in each sequence."""
    mask = torch.ones(len(pads), count, dtype=torch.long, device=DEVICE)
    for row, (left, right) in zip(mask, pads):
        row[:left] = 0
        row[count - right:] = 0
    return mask


def positions(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


PADDINGS = {"none": None, "ones": [(0, 0)] * 3, "left": [(5, 0), (0, 0), (23, 0)], "right": [(0, 7), (0, 0), (0, 30)],
            "both": [(3, 4), (0, 9), (20, 0)], "all": [(0, 0), (TOKENS, 0), (1, 1)]}


@pytest.mark.parametrize("kind", [*DECODERS, "Bert"])
def test_prefill(kind, calls):
    model, tokens = model_of(kind), tokens_of(3)
    for name, pads in PADDINGS.items():
        mask = pads and padding(*pads)
        more = {} if mask is None or kind == "Bert" else dict(position_ids=positions(mask))
        want, got = both(model, lambda: model(tokens, attention_mask=mask, **more).logits)
        assert torch.isfinite(got).all(), name
        assert_close(got, want, mask)
    for more in calls:
        assert (more["softcap"] == 2.0) == (kind == "Gemma2") and (more["sinks"] is not None) == (kind == "GptOss")


def steps(model, tokens, mask, cache, sizes):
    """Logits of tokens that are fed in chunks of these sizes."""
    out, at = [], 0
    for size in sizes:
        now = slice(at, at := at + size)
        more = {} if mask is None else dict(attention_mask=mask[:, :at], position_ids=positions(mask)[:, now])
        out.append(model(tokens[:, now], cache=cache, **more).logits)
    assert at == tokens.shape[1]
    return torch.cat(out, 1)


@pytest.mark.parametrize("kind", quickly("Llama", "GptOss", "Gemma2", "Llama4"))
def test_caches(kind, calls):
    """A prefill in chunks, then single tokens, with each kind of cache. Unwritten elements of a static cache are NaN."""
    model = model_of(kind)
    config = model.config
    some = (20, 9, 1, 1, 8, 1)
    for pads, sizes, length in ((None, some, 64), ([(5, 0), (0, 0)], some, 64), ([(11, 0), (4, 0)], (7, 30, 1, 2), 40),
                                (None, (9, 1, 1, 29), 40), (None, (1,) * 20 + (20,), 40)):
        tokens, mask = tokens_of(), pads and padding(*pads)
        for static in (False, True):
            def run():
                cache = DynamicCache(config=config) if not static else StaticCache(config=config, max_cache_len=length)
                if static and config._attn_implementation == ours.NAME:
                    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
                    size = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
                    cache.early_initialization(2, heads, size, DTYPE, torch.device(DEVICE))
                    for layer in cache.layers:
                        layer.keys.fill_(torch.nan), layer.values.fill_(torch.nan)
                return steps(model, tokens, mask, cache, sizes)
            want, got = both(model, run)
            assert_close(got, want, mask)
    assert any("k_lengths" in more for more in calls) and any("q_starts" in more for more in calls)


@pytest.mark.parametrize("kind", DECODERS)
def test_packed(kind):
    """Packed sequences give each sequence's own logits: with position_ids that restart, in batches of 1 and 2, and with cu_seq_lens."""
    model, tokens = model_of(kind), tokens_of()
    with torch.no_grad():
        for rows in ([[3, 25, 12], [40]], [[1, 1, 38]]):
            ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows]).to(DEVICE)
            model.set_attn_implementation("eager")
            want = torch.stack([torch.cat([model(x[None], use_cache=False).logits[0] for x in one.split(row)])
                                for one, row in zip(tokens, rows)])
            model.set_attn_implementation(ours.NAME)
            if kind != "GptOss":  # its model keeps them from its masks
                assert_close(model(tokens[:len(rows)], position_ids=ids, use_cache=False).logits, want)
        starts = torch.tensor([0, 1, 2, TOKENS], device=DEVICE)
        more = dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=38, max_length_k=38)
        assert_close(model(tokens[:1], position_ids=ids, use_cache=False, **more).logits, want)


@pytest.mark.parametrize("kind", [*quickly("Llama", "GptOss", "Llama4"), "Bart"])
def test_generate(kind):
    """Compares tokens and logits; on a GPU only the first step's, since rounding may change later tokens. There transformers
    compiles the steps of a static cache."""
    model, tokens, mask = model_of(kind), tokens_of(2, 24), padding((5, 0), (0, 0), count=24)
    if kind == "Bart":
        mask = padding((0, 5), (0, 0), count=24)
    steps = 1 if GPU else 8
    static = dict(cache_implementation="static")
    for more in (dict(), static | dict(disable_compile=True), dict(num_beams=3), *[static] * (GPU and kind == "Llama")):
        for rows in (torch.ones_like(tokens), mask):
            options = dict(max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0)
            want, got = both(model, lambda: model.generate(tokens, attention_mask=rows, **options, **more))
            assert_close(torch.stack(got.logits[:steps]), torch.stack(want.logits[:steps]))
            assert GPU or torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize("pads", PADDINGS)
def test_cross_attention(pads):
    """BART with padded encoder and decoder inputs in one pass."""
    model, tokens, mask = model_of("Bart"), tokens_of(3), PADDINGS[pads] and padding(*PADDINGS[pads])
    behind = padding((0, 3), (0, 0), (0, 5), count=17)
    inputs = dict(decoder_input_ids=tokens[:, :17], decoder_attention_mask=behind)
    want, got = both(model, lambda: model(tokens, attention_mask=mask, **inputs).logits)
    assert torch.isfinite(got).all()
    if mask is not None:  # what sees no key
        behind = behind * mask.any(1, keepdim=True)
    assert_close(got, want, behind)


def test_a_bidirectional_window():
    """ModernBERT, whose layers alternate between full and windowed attention, with keys padded on either side."""
    config = transformers.ModernBertConfig(vocab_size=97, hidden_size=128, intermediate_size=96, num_hidden_layers=2,
                                           pad_token_id=0, num_attention_heads=2, local_attention=12,
                                           global_attn_every_n_layers=2)
    model, tokens = drawn(transformers.ModernBertForMaskedLM(config)), tokens_of(3)
    for pads in PADDINGS.values():
        mask = pads and padding(*pads)
        want, got = both(model, lambda: model(tokens, attention_mask=mask).logits)
        assert_close(got, want, mask)


HOLES = torch.ones(3, TOKENS, dtype=torch.long, device=DEVICE)
HOLES[0, 7:9] = HOLES[1, :4] = HOLES[1, 20] = HOLES[2, 30:35] = 0


@pytest.mark.parametrize("kind", [*DECODERS, "Bert"])
def test_holes(kind, calls):
    """A padding mask with zeros between tokens becomes a mask tensor, also with a window, chunks or a cache."""
    model, tokens = model_of(kind), tokens_of(3)
    more = {} if kind == "Bert" else dict(position_ids=positions(HOLES))
    want, got = both(model, lambda: model(tokens, attention_mask=HOLES, **more).logits)
    assert_close(got, want, HOLES)
    assert any(one["bias"] is not None and one["bias"].dtype == torch.bool for one in calls)
    if kind != "Bert":
        want, got = both(model, lambda: steps(model, tokens, HOLES, DynamicCache(config=model.config), (25, 1, 14)))
        assert_close(got, want, HOLES)


@pytest.mark.parametrize("kind", ["Llama", "Gemma2", "GptOss"])
def test_a_mask_of_four_dimensions(kind, calls):
    """A caller's 4D mask, additive or bool, replaces causality and windows."""
    model, tokens = model_of(kind), tokens_of()
    seen = (torch.rand(2, 1, TOKENS, TOKENS, device=DEVICE) > 0.5) | torch.eye(TOKENS, dtype=torch.bool, device=DEVICE)
    added = torch.zeros(seen.shape, device=DEVICE, dtype=DTYPE).masked_fill(~seen, torch.finfo(DTYPE).min)
    want, got = both(model, lambda: model(tokens, attention_mask=added).logits)
    assert_close(got, want)
    assert all(one["bias"] is added and one["causal"] is None and one["window"] == (None, None) for one in calls)
    with torch.no_grad():
        assert_close(model(tokens, attention_mask=seen).logits, want)


def test_a_mask_function_that_it_does_not_know(calls):
    """Gemma 3 with images, whose tokens see each other, has such a mask function."""
    model, tokens = model_of("Gemma3", use_bidirectional_attention=True), tokens_of()
    for mask in (None, padding((5, 0), (0, 0))):
        want, got = both(model, lambda: model(tokens, attention_mask=mask).logits)
        assert_close(got, want, mask)
    assert any(one["bias"] is not None for one in calls)


@pytest.mark.parametrize("name", ["none", "right", "holes", "added"])
def test_position_bias(name, calls):
    """T5's position bias with and without padding, also as numbers to add, in the encoder, the decoder and cross attention, and
    with a cache."""
    config = transformers.T5Config(vocab_size=97, d_model=64, d_kv=64, d_ff=96, num_layers=2, num_heads=2, pad_token_id=0,
                                   decoder_start_token_id=0, eos_token_id=None, dropout_rate=0.0)
    torch.manual_seed(0)
    model, tokens = drawn(transformers.T5ForConditionalGeneration(config)), tokens_of(3)
    added = torch.zeros(HOLES.shape, device=DEVICE, dtype=DTYPE).masked_fill(HOLES == 0, torch.finfo(DTYPE).min)[:, None, None]
    mask = dict(none=None, right=padding(*PADDINGS["right"]), holes=HOLES, added=added)[name]
    want, got = both(model, lambda: model(tokens, attention_mask=mask, decoder_input_ids=tokens[:, :17]).logits)
    assert_close(got, want)
    assert all(one["bias"] is not None for one in calls)
    if name == "added":
        return  # generate() takes no such mask
    want, got = both(model, lambda: model.generate(tokens, attention_mask=mask, max_new_tokens=8, do_sample=False))
    assert GPU or torch.equal(got, want)


def gradients(model, **inputs):
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    (logits.float() * inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))[..., None]).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_training():
    """A training step has eager attention's gradients, also packed and with padding on either side."""
    model, tokens = model_of("Llama").train(), tokens_of(3)
    ids = (torch.arange(TOKENS, device=DEVICE) % 17)[None].expand(3, -1)
    cases = [{}, dict(attention_mask=padding(*PADDINGS["ones"])), dict(attention_mask=padding(*PADDINGS["right"]))]
    for more in cases + [dict(position_ids=ids), dict(attention_mask=padding(*PADDINGS["left"]))]:
        model.set_attn_implementation("eager")
        want = gradients(model, input_ids=tokens, **more)
        model.set_attn_implementation(ours.NAME)
        assert_close(gradients(model, input_ids=tokens, **more), want)


@pytest.mark.long
def test_compiled():
    """The graph of a whole model breaks at its mask. The graph of a step gets the mask as an input, as from generate()."""
    model, tokens, mask = model_of("Gemma3"), tokens_of(), padding((5, 0), (0, 0))
    model.set_attn_implementation(ours.NAME)
    compiled, step = torch.compile(model, backend="aot_eager"), torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for more in (dict(use_cache=False), dict(attention_mask=mask, use_cache=False)):
            assert_close(compiled(tokens, **more).logits, model(tokens, **more).logits)
        cache = StaticCache(config=model.config, max_cache_len=64)
        got = [model(tokens[:, :TOKENS - 3], cache=cache).logits]
        for i in range(TOKENS - 3, TOKENS):
            inputs = dict(next_sequence_length=1, cache=cache, attention_mask=None)
            got.append(step(**model.prepare_inputs_for_generation(tokens[:, :i + 1], **inputs)).logits)
        assert_close(torch.cat(got, 1), model(tokens, use_cache=False).logits)
    torch._dynamo.reset()


# ---- what raises ----

def raises(words, kind="Llama", train=False, config={}, **inputs):
    model = model_of(kind, **config).train(train)
    model.set_attn_implementation(ours.NAME)
    with pytest.raises(ValueError, match="^sdpa: .*" + words):
        model(**{"input_ids": tokens_of(), **inputs})


def test_refusals():
    raises("dropout of LlamaAttention", train=True, config=dict(attention_dropout=0.1))
    raises("output_attentions", output_attentions=True)
    raises("some_new_argument", some_new_argument=1)
    raises("attention_mask is not supported", attention_mask=torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.long, device=DEVICE))
    starts = torch.tensor([0, TOKENS], device=DEVICE)
    raises("cu_seq_lens_q cannot be combined with padding", attention_mask=padding((5, 0), (0, 0)), cu_seq_lens_q=starts)
    q = torch.zeros(2, 2, 8, 64, device=DEVICE, dtype=DTYPE)
    for words, keys in (("is for 9 keys, and the layer has 8", 9), ("sliding_window is 4", 8)):
        with pytest.raises(ValueError, match=words):
            ours.attention(torch.nn.Module(), q, q, q, ours.mask(2, keys, keys, device=DEVICE), sliding_window=4)
    with pytest.raises(ValueError, match="is for 3 sequences, and the layer has 2"):
        ours.attention(torch.nn.Module(), q, q, q, ours.described("lengths", {"causal": True}, torch.zeros(3, 1, 2, device=DEVICE)))
    model = model_of("Llama")
    model.set_attn_implementation(ours.NAME)
    cache = DynamicCache(config=model.config)
    model(tokens_of(), cache=cache)
    with pytest.raises(ValueError, match="40 columns and not 80"):
        model(tokens_of(), cache=cache, attention_mask=padding((0, 0), (0, 0)))


@pytest.mark.parametrize("name", ["head_mask", "block_table", "dropout"])
def test_an_argument_that_it_does_not_know(name):
    q = torch.zeros(1, 2, 8, 64, device=DEVICE, dtype=DTYPE)
    for nothing in (None, False):
        ours.attention(torch.nn.Module(), q, q, q, None, is_causal=True, **{name: nothing})
    with pytest.raises(ValueError, match=f"cannot honour {name} of Module"):
        ours.attention(torch.nn.Module(), q, q, q, None, **{name: 0.5})
    for words, more in (("what 8 queries see of 4 keys", dict(key=q[:, :, :4], value=q[:, :, :4], is_causal=True)),
                        ("attention_mask and the argument is_causal are None, which does not say what the queries of Module see", {}),
                        ("what 8 queries see of 8 keys", dict(is_causal=False, sliding_window=4))):
        with pytest.raises(ValueError, match=words):
            ours.attention(torch.nn.Module(), **{**dict(query=q, key=q, value=q, attention_mask=None), **more})


@pytest.mark.parametrize("window", [None, 1, 4, 8, 9])
def test_no_mask(window, calls):
    """Without a mask the layer's is_causal and sliding window apply."""
    q, k = torch.randn(2, 4, 8, 64, device=DEVICE, dtype=DTYPE), torch.randn(2, 2, 8, 64, device=DEVICE, dtype=DTYPE)
    got, _ = ours.attention(torch.nn.Module(), q, k, k, None, is_causal=True, sliding_window=window)
    ahead = torch.arange(8, device=DEVICE) - torch.arange(8, device=DEVICE)[:, None]
    seen = (ahead <= 0) & (ahead > -(window or 8))
    want = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, k)), attn_mask=seen, enable_gqa=True)
    assert_close(got, want.transpose(1, 2))
    assert len(calls) == 1 and calls[0]["bias"] is None


@pytest.mark.parametrize("pads", [None, *([(left, 0), (0, 0)] for left in (0, 5)), "static"])
def test_o_is_contiguous(pads):
    """O is contiguous for any layout of q, k and v, including strided rows after a convolution, since models call view() on it."""
    q = torch.randn(2, 64, 8, 4, device=DEVICE, dtype=DTYPE).permute(0, 3, 2, 1)
    mask = ours.mask(2, 8, 8, attention_mask=padding(*pads, count=8) if isinstance(pads, list) else None, device=DEVICE,
                     q_offset=torch.tensor(0, device=DEVICE) if pads == "static" else 0)
    for key in (q[:, :2], q[:, :2].contiguous(), q):
        o, _ = ours.attention(torch.nn.Module(), q, key, key, mask)
        again, _ = ours.attention(torch.nn.Module(), q.contiguous(), key.contiguous(), key.contiguous(), mask)
        assert o.is_contiguous() and o.shape == (2, 8, 4, 64)
        assert_close(o, again, padding(*pads, count=8) if isinstance(pads, list) else None)


def test_an_argument_of_a_mask():
    with pytest.raises(ValueError, match="an argument cache_position"):
        ours.mask(1, 8, 8, cache_position=torch.arange(8))
    q = torch.zeros(2, 2, 8, 64, device=DEVICE, dtype=DTYPE)
    padded = ours.mask(2, 8, 8, attention_mask=padding((5, 0), (0, 0), count=8), device=DEVICE)
    with pytest.raises(ValueError, match="a bias or a mask tensor is not supported with padding on the left, chunks or packed sequences; pad on the right"):
        ours.attention(torch.nn.Module(), q, q, q, padded, position_bias=torch.zeros(1, 2, 8, 8, device=DEVICE, dtype=DTYPE))


def test_the_documentation():
    """Runs the example in docs/USING.md verbatim."""
    text = open(os.path.join(ROOT, "docs/USING.md")).read()
    section = re.search(r"^## transformers.*?(?=^## )", text, re.DOTALL | re.MULTILINE).group()
    block, = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    model = model_of("Llama")
    space = {"model": model, "tokens": tokens_of()}
    want = model(space["tokens"]).logits.detach()
    exec(block, space)
    assert model.config._attn_implementation == ours.NAME
    assert_close(model(space["tokens"]).logits.detach(), want)
