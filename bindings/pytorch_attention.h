// sdpa::attention and sdpa::block_mask on CUDA tensors: the checks of their arguments, and the launch.

#pragma once

#include "pytorch.h"

// Checks and returns the dequantization factors x of the tensor `of`. x is float32 and expands to [B,H]; that of q may also be
// [B,Hkv]. `kept` keeps the memory alive.
static SdpaDescale descale(const char* name, const OptionalTensor& x, const Tensor& of, int64_t batches,
                           int64_t key_heads, Tensor& kept) {
  if (!x) return {};
  TORCH_CHECK(of.scalar_type() == at::kFloat8_e4m3fn, "sdpa.attention: ", name, " is for e4m3");
  TORCH_CHECK(x->scalar_type() == at::kFloat && x->device() == of.device(), "sdpa.attention: ", name,
              " is not a float32 tensor on ", of.device());
  const int64_t heads = of.size(1), sizes[2] = {batches, heads};
  const bool by_key_head = key_heads > 1 && key_heads != heads && x->dim() > 0 && x->size(-1) == key_heads;
  kept = by_key_head ? x->repeat_interleave(heads / key_heads, -1) : *x;
  TORCH_CHECK(at::is_expandable_to(kept.sizes(), sizes), "sdpa.attention: ", name, " is of shape ", x->sizes(),
              ", which does not expand to [", batches, ",", heads, "]");
  kept = kept.expand(sizes);
  return {kept.const_data_ptr<float>(), batches > 1 ? kept.stride(0) : 0, heads > 1 ? kept.stride(1) : 0};
}

// The arguments of sdpa::attention.
struct Call {
  const Tensor &q, &k, &v;
  int64_t causal = SDPA_CAUSAL_OFF, left = -1, right = -1, window_alignment = SDPA_CAUSAL_OFF;
  std::optional<double> scale{};
  double softcap = 0;
  const OptionalTensor& q_descale = no_tensor;
  const OptionalTensor& k_descale = no_tensor;
  const OptionalTensor& v_descale = no_tensor;
  const OptionalTensor& sinks = no_tensor;
  const OptionalTensor& k_lengths = no_tensor;
  const OptionalTensor& q_starts = no_tensor;
  const OptionalTensor& k_starts = no_tensor;
  const OptionalTensor& page_table = no_tensor;
  int64_t most_keys = 0;
  const OptionalTensor& bias = no_tensor;
  int64_t bias_keys = 0;
  const OptionalTensor& q_lengths = no_tensor;
  bool batch_invariant = false, bf16_out = false;
  Mods mods{};
  const OptionalTensor& k_firsts = no_tensor;

  bool has_lengths() const { return k_lengths || q_lengths || q_starts || k_starts || page_table || k_firsts; }
};

// Converts a window limit of PyTorch's operators: none or a negative one becomes -1.
static int64_t limit(std::optional<int64_t> keys) { return std::clamp<int64_t>(keys.value_or(-1), -1, most_size); }

// Sets the mask, the softcap and the maximum number of keys, both for the forward and the backward pass.
static void set_mask(SdpaParams& p, const Call& call) {
  p.causal = int(call.causal);
  p.window_alignment = int(call.window_alignment);
  p.window_left = int(call.left);
  p.window_right = int(call.right);
  p.softcap = float(call.softcap);
  p.most_keys = int(call.most_keys);
}

// Sets the members of the arrays that SCORE_MOD and MASK_MOD name. The kernel refuses an expression whose arrays are null.
static void set_arrays(SdpaParams& p, const Mods& mods, const Tensor& q) {
  const float** const reals[] = {&p.x0, &p.x1, &p.x2, &p.x3};
  const int** const ints[] = {&p.i0, &p.i1};
  for (int i = 0; i < 6; i++) {
    const OptionalTensor& x = mods.arrays[i];
    if (!x) continue;
    TORCH_CHECK(x->device() == q.device() && x->is_contiguous() && x->scalar_type() == (i < 4 ? at::kFloat : at::kInt) &&
                    x->numel() > 0, "sdpa.attention: ", i < 4 ? 'x' : 'i', i % 4, " of args is not a contiguous ",
                i < 4 ? "float32" : "int32", " tensor with elements on ", q.device());
    if (i < 4)
      *reals[i] = x->const_data_ptr<float>();
    else
      *ints[i - 4] = x->const_data_ptr<int>();
  }
}

// Computes O and returns LSE. O is written into `o`, or into a new tensor if `o` is undefined. map_out: only writes the
// block_mask of this call to *map_out, and does not compute O and LSE.
static Tensor attend(const Call& call, Tensor& o, Mods* map_out = nullptr) {
  const OptionalTensor& page_table = call.page_table;
  const Mods& mods = call.mods;
  const auto check = [](const std::string& why) { TORCH_CHECK(why.empty(), "sdpa.attention: ", why); };
  const bool has_lengths = call.has_lengths();
  check(why_not_tensors(call.q, call.k, call.v, true, has_lengths));
  check(why_not_scale(call.scale));
  check(fit(call.q) && fit(call.k) && fit(call.v) ? "" : bad_rows);
  const auto within = [&](const char* name, int64_t x, int64_t least) {
    TORCH_CHECK(x >= least && x <= most_size, "sdpa.attention: ", name, "=", x, " is outside [", least, ", ", most_size,
                "]");
  };
  within("window_left", call.left, -1);
  within("window_right", call.right, -1);
  within("most_keys", call.most_keys, 0);
  within("bias_keys", call.bias_keys, 0);
  TORCH_CHECK(call.most_keys == 0 || has_lengths,
              "sdpa.attention: most_keys is for sequences of k_lengths, starts or pages");
  TORCH_CHECK(call.softcap == 0 || float(call.softcap) != 0, "sdpa.attention: softcap=", call.softcap,
              " is not from 1e-18 to 1e18");
  const c10::OptionalDeviceGuard guard(call.q.device());
  const Tensor q = readable(call.q, false), k = readable(call.k, true), v = readable(call.v, true);
  const bool e4m3 = q.scalar_type() == at::kFloat8_e4m3fn;
  TORCH_CHECK(e4m3 || !call.bf16_out, "sdpa.attention: bf16_out is for e4m3 only; otherwise O has the dtype of q");
  TORCH_CHECK(v.scalar_type() != at::kFloat8_e4m3fn || !call.bias ||
                  (call.bias->scalar_type() == at::kBool && is_of_keys(*call.bias) && !has_lengths && !call.bias_keys),
              "sdpa.attention: e4m3 supports no bias except a bool mask that all heads and queries share, "
              "without lengths and bias_keys");
  TORCH_CHECK(call.bias || call.bias_keys == 0, "sdpa.attention: bias_keys is for a bias");
  TORCH_CHECK(
      (mods.score.empty() && mods.mask.empty()) || (call.softcap == 0 && !call.bias),
      "sdpa.attention: softcap and bias cannot be combined with score_mod or mask_mod; write them into the "
      "expression, as in score_mod='30 * tanh(s / 30) + x0[k]'");
  TORCH_CHECK(
      !mods.block_mask || (mods.block_mask->device() == q.device() && mods.block_mask->is_contiguous() &&
                           mods.block_mask->scalar_type() == at::kByte),
      "sdpa.attention: block_mask is not on ", q.device());
  TORCH_CHECK(
      !call.sinks || (call.sinks->device() == q.device() && call.sinks->sizes() == q.sizes().slice(1, 1)),
      "sdpa.attention: sinks is not a tensor [Hq] on q's device");
  Tensor sinks_kept;
  if (call.sinks) sinks_kept = call.sinks->to(at::kFloat).contiguous();
  SdpaParams p{};
  set_arrays(p, mods, q);
  int64_t B = q.size(0);
  const auto count_by = [&](const char* name, const OptionalTensor& starts) {
    if (!starts) return;
    B = p.B = int(starts->numel() - 1);
    TORCH_CHECK(B > 0 || (B == 0 && q.numel() == 0), "sdpa.attention: ", name, " has ", starts->numel(),
                " elements; want one more than the number of sequences, which is 0 only if q is empty");
  };
  count_by("q_starts", call.q_starts);
  count_by("k_starts", call.k_starts);
  TORCH_CHECK(!page_table || (page_table->scalar_type() == at::kInt && page_table->device() == q.device() &&
                              page_table->dim() == 2 && page_table->size(0) == B &&
                              (page_table->stride(1) == 1 || page_table->size(1) == 1)),
              "sdpa.attention: page_table is not an int32 tensor [", B,
              ",pages of a sequence] with contiguous rows on q's device");
  TORCH_CHECK(!page_table || !call.k_starts, "sdpa.attention: page_table and k_starts exclude each other");
  TORCH_CHECK(!page_table || k.size(2) > 0, "sdpa.attention: the pages of k and v have 0 keys");
  TORCH_CHECK(!page_table || page_table->size(1) * k.size(2) <= most_size,
              "sdpa.attention: a row of page_table has pages for over 10^9 keys");
  const Tensor& batched = page_table ? q : k;  // its batch size is the number of sequences; k has pages instead
  const bool packs_k = (page_table ? call.q_starts : call.k_starts).has_value();
  // Checks that x is an int32 tensor [length] and returns its data. packs: `rows` has a batch size of 1, otherwise B.
  const auto ints = [&](const char* name, const OptionalTensor& x, int64_t length, const Tensor& rows,
                        bool packs) {
    TORCH_CHECK(rows.size(0) == (packs ? 1 : B), "sdpa.attention: q or k has a batch of ", rows.size(0),
                ", not ", packs ? 1 : B);
    TORCH_CHECK(!x || (x->scalar_type() == at::kInt && x->device() == q.device() && x->is_contiguous() &&
                       x->dim() == 1 && x->size(0) == length),
                "sdpa.attention: ", name, " is not a contiguous int32 tensor [", length, "] on q's device");
    return x ? x->const_data_ptr<int>() : nullptr;
  };
  p.q_starts = ints("q_starts", call.q_starts, B + 1, q, call.q_starts.has_value());
  p.k_starts = ints("k_starts", call.k_starts, B + 1, batched, packs_k);
  p.k_lengths = ints("k_lengths", call.k_lengths, B, batched, packs_k);
  p.q_lengths = ints("q_lengths", call.q_lengths, B, q, call.q_starts.has_value());
  p.k_firsts = ints("k_firsts", call.k_firsts, B, batched, packs_k);
  if (page_table) {
    // A table without columns has no data. The kernel does not read it, but the pointer must not be null.
    p.page_table =
        static_cast<const int*>(page_table->numel() ? page_table->const_data_ptr() : q.const_data_ptr());
    p.page_stride = int(page_table->stride(0));
    p.page_size = int(k.size(2));
    p.pages = int(k.size(0));
    p.Sk = int(page_table->size(1) * k.size(2));
  }
  set_mask(p, call);
  p.batch_invariant = call.batch_invariant;
  p.scale = scale_of(call.scale);
  p.sinks = call.sinks ? sinks_kept.const_data_ptr<float>() : nullptr;
  OptionalTensor bias;
  if (call.bias) {
    const int64_t Sk = page_table ? p.Sk : k.size(2);
    const int64_t most = call.most_keys ? std::min(call.most_keys, Sk) : Sk;
    const int64_t queries = !call.q_starts ? q.size(2) : call.bias->dim() > 1 ? call.bias->size(-2) : 1;
    check(why_not_bias("bias", *call.bias, q, B, queries, call.bias_keys ? call.bias_keys : most));
    bias = bias_of(*call.bias, q, call.bias_keys ? call.bias_keys : most);
    p.bias_keys = int(call.bias_keys);
  }
  const bool same_sizes = v.size(3) == q.size(3);
  check(why_not_line(q, v, features_of(p, bias, call.bf16_out), mods));
  Tensor kept[3];
  // With packed sequences, there are factors for each sequence.
  const int64_t key_batches = page_table || call.k_starts ? B : k.size(0);
  p.q_descale = descale("q_descale", call.q_descale, q, call.q_starts ? B : q.size(0), k.size(1), kept[0]);
  p.k_descale = descale("k_descale", call.k_descale, k, key_batches, 0, kept[1]);
  p.v_descale = descale("v_descale", call.v_descale, v, key_batches, 0, kept[2]);
  const auto type = call.bf16_out ? at::kBFloat16 : e4m3 ? at::kHalf : q.scalar_type();
  if (!o.defined()) {
    o = same_sizes ? empty_like(call.q, type) : empty({q.size(0), q.size(1), q.size(2), v.size(3)}, type, q);
  }
  const Tensor written = fit(o) ? o : empty(o.sizes(), type, q);
  const Tensor lse = empty({q.size(0), q.size(1), q.size(2)}, at::kFloat, q);
  if (map_out) {
    check(make_block_mask(q, k, v, written, lse, p, bias, call.bf16_out, *map_out));
    return lse;
  }
  check(launch(q, k, v, written, lse, p, bias, call.bf16_out, mods));
  if (!written.is_same(o)) o.copy_(written);
  return lse;
}

static std::tuple<Tensor, Tensor> attention(const Call& call) {
  Tensor o;
  const Tensor lse = attend(call, o);
  return {o, lse};
}
static std::tuple<Tensor, std::string> block_mask(const Call& call) {
  Tensor o;
  Mods made{call.mods.score, call.mods.mask};
  attend(call, o, &made);
  return {*made.block_mask, made.made_for};
}

// Calls run() with the arguments of sdpa::attention and sdpa::block_mask, in the order of their schema in pytorch.py.
template <auto run>
static auto with_call(const Tensor& q, const Tensor& k, const Tensor& v, int64_t causal, int64_t left, int64_t right,
                      int64_t window_alignment, std::optional<double> scale, double cap, const OptionalTensor& q_descale,
                      const OptionalTensor& k_descale, const OptionalTensor& v_descale, const OptionalTensor& sink,
                      const OptionalTensor& k_lengths, const OptionalTensor& q_starts, const OptionalTensor& k_starts,
                      const OptionalTensor& page_table, int64_t most_keys, const OptionalTensor& bias, int64_t bias_keys,
                      const OptionalTensor& q_lengths, bool batch_invariant, bool in_bf16, std::string_view score_mod,
                      std::string_view mask_mod, const OptionalTensor& x0, const OptionalTensor& x1,
                      const OptionalTensor& x2, const OptionalTensor& x3, const OptionalTensor& i0,
                      const OptionalTensor& i1, const OptionalTensor& kept, std::string_view made_for,
                      const OptionalTensor& k_firsts, std::string_view /* backward */) {
  return run({.q = q,
              .k = k,
              .v = v,
              .causal = causal,
              .left = left,
              .right = right,
              .window_alignment = window_alignment,
              .scale = scale,
              .softcap = cap,
              .q_descale = q_descale,
              .k_descale = k_descale,
              .v_descale = v_descale,
              .sinks = sink,
              .k_lengths = k_lengths,
              .q_starts = q_starts,
              .k_starts = k_starts,
              .page_table = page_table,
              .most_keys = most_keys,
              .bias = bias,
              .bias_keys = bias_keys,
              .q_lengths = q_lengths,
              .batch_invariant = batch_invariant,
              .bf16_out = in_bf16,
              .mods = {.score = std::string(score_mod),
                       .mask = std::string(mask_mod),
                       .arrays = {x0, x1, x2, x3, i0, i1},
                       .block_mask = kept,
                       .made_for = std::string(made_for)},
              .k_firsts = k_firsts});
}
