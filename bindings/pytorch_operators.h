// Implementations of PyTorch's own operators: those among which F.scaled_dot_product_attention chooses, those that varlen_attn
// calls, and 8-bit attention. Their signatures depend on the version of PyTorch.

#pragma once

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/_cudnn_attention_forward.h>
#include <ATen/ops/_flash_attention_forward_native.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_native.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <torch/library.h>
#include <torch/version.h>

#define PYTORCH_2(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= minor)  // this one or newer
#if PYTORCH_2(12)
#include <ATen/ops/_flash_attention_forward_no_dropout_inplace_native.h>
#endif
#if PYTORCH_2(14)
#include <ATen/ops/_cudnn_attention_forward_native.h>
#endif
#if PYTORCH_2(15)
#include <ATen/ops/_cudnn_attention_forward_no_dropout_inplace_native.h>
#endif

#include "pytorch_attention.h"
#include "pytorch_autograd.h"
#include "pytorch_backward.h"

// ---- the problem of F.scaled_dot_product_attention ----

// The arguments with which F.scaled_dot_product_attention calls one of its operators.
struct Asked {
  at::SDPBackend backend;  // to which the operator belongs
  const OptionalTensor& mask;
  double dropout;
  bool causal, debug_mask, needs_grad;
  std::optional<double> scale;
};

static bool needs_grad(const Tensor& q, const Tensor& k, const Tensor& v) {
  return at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
}
static bool needs_grad(const OptionalTensor& mask) {
  return mask && at::GradMode::is_enabled() && mask->requires_grad();
}

// Returns the reason why PyTorch's own kernel runs a problem of F.scaled_dot_product_attention, or an empty string.
static std::string why_not(const Tensor& q, const Tensor& k, const Tensor& v, const Asked& asked) {
  if (asked.dropout != 0) return "there is dropout";
  if (asked.debug_mask) return "a debug mask is asked for";
  std::string why = why_not_scale(asked.scale);
  if (why.empty()) why = why_not_tensors(q, k, v, false, false);
  if (why.empty() && asked.mask) {
    why = needs_grad(asked.mask) ? "attn_mask needs a gradient"
                                 : why_not_bias("attn_mask", *asked.mask, q, q.size(0), q.size(2), k.size(2));
    const auto type = asked.mask->scalar_type();
    if (why.empty() && type != at::kBool && type != at::kFloat && type != q.scalar_type()) {
      why = c10::str("attn_mask is of ", type, ", and PyTorch takes bool, float32 or q's type");
    }
  }
  if (!why.empty()) return why;
  if (q.stride(3) != 1 || k.stride(3) != 1 || v.stride(3) != 1) return bad_rows;
  if (asked.needs_grad) {  // the backward reads the same tensors
    if (!fit(q) || !fit(k) || !fit(v)) return c10::str("gradients are needed, and ", bad_rows);
    if (asked.backend == at::SDPBackend::cudnn_attention && cudnn_lse_layout_differs()) {
      return "gradients are needed, and TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 makes cuDNN's backward accept only its own LSE";
    }
    const bool is_efficient = asked.backend == at::SDPBackend::efficient_attention;
    if (is_efficient && asked.mask && asked.mask->is_floating_point() &&
        asked.mask->scalar_type() != q.scalar_type()) {
      return "gradients are needed, and PyTorch's memory-efficient backward accepts only an attn_mask of q's type";
    }
  }
  return why_not_line(q, v, asked.mask ? feature_of(*asked.mask, false) : 0);
}

// The arguments of F.scaled_dot_product_attention in the form of PyTorch's fused kernels: tensors of four dimensions
// with the same batch and contiguous rows, and a mask of four dimensions with contiguous keys. PyTorch passes all other
// arguments to its math kernel.
struct Given {
  Tensor q, k, v;
  OptionalTensor mask;
  bool is_3d = false;  // all inputs have three dimensions, and so has O

  Given(const Tensor& q_any, const Tensor& k_any, const Tensor& v_any, const OptionalTensor& mask_any)
      : q(q_any), k(k_any), v(v_any), mask(mask_any) {
    const auto dims = std::minmax({q.dim(), k.dim(), v.dim()});
    if (q.is_nested() || k.is_nested() || v.is_nested() || dims.first < 3 || dims.second > 4) return;
    is_3d = dims.second == 3;
    for (Tensor* x : {&q, &k, &v}) {
      if (x->dim() == 3) *x = x->unsqueeze(0);
    }
    const c10::SymInt B = std::max({q.sym_size(0), k.sym_size(0), v.sym_size(0)});
    for (Tensor* x : {&q, &k, &v}) {
      if (x->sym_size(0) == B || x->sym_size(0) != 1) continue;
      *x = x->expand_symint({B, x->sym_size(1), x->sym_size(2), x->sym_size(3)}).contiguous();
    }
    for (Tensor* x : {&q, &k, &v}) {
      if (x->sym_stride(3) != 1) *x = x->contiguous();
    }
    if (!mask || needs_grad(mask) || mask->dim() > 4) return;
    while (mask->dim() < 4) mask = mask->unsqueeze(0);
    if (mask->sym_size(3) == 1) {
      mask = mask->expand_symint({mask->sym_size(0), mask->sym_size(1), mask->sym_size(2), k.sym_size(2)});
    }
    if (mask->sym_stride(3) != 1) mask = mask->contiguous();
  }
};

// True if the memory alone does not say the value: a dual number, a lazily negated view, or zeros without memory.
static bool has_lazy_state(const Tensor& x) { return x._fw_grad(0).defined() || x.is_neg() || x._is_zerotensor(); }
static bool is_plain(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask) {
  return !at::areAnyTensorSubclassLike({q, k, v, mask}) && !has_lazy_state(q) && !has_lazy_state(k) &&
         !has_lazy_state(v) && !has_lazy_state(mask);
}

// Returns the reason why sdpa's kernels do not compute the gradient of attn_mask. If it is empty,
// F.scaled_dot_product_attention calls sdpa::attention, which sums the gradient over the dimensions that the mask lacks.
static std::string why_not_gradient_of_mask(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                                            double dropout, bool causal, std::optional<double> scale, bool gqa) {
  const std::string needed = "attn_mask needs a gradient, and ";
  if (preference == Preference::pytorchs) return needed + "PyTorch's backward was asked for";
  if (causal) return needed + "there is a causal mask";
  if (!is_plain(q, k, v, mask)) return needed + "a tensor is traced, negated lazily or a dual number";
  const OptionalTensor read = mask.detach();
  std::string why = why_not(q, k, v, {at::SDPBackend::flash_attention, read, dropout, false, false, true, scale});
  if (why.empty() && q.size(1) != k.size(1) && !gqa) why = "the heads of q are no multiple of those of k";
  if (!why.empty()) return needed + why;
  const int features = feature_of(bias_of(*read, q, k.size(2)), true);
  const int requirements = requirements_of(q, k, true, is_deterministic());
  return backward_line_for({{q.get_device(), dtype_of(q), int(q.size(3)), features, requirements}, "", ""}).trouble;
}

static std::string why_not_op(const Tensor& q_any, const Tensor& k_any, const Tensor& v_any,
                              const OptionalTensor& mask_any, double dropout, bool causal, std::optional<double> scale,
                              bool gqa) {
  const auto [q, k, v, mask, is_3d] = Given(q_any, k_any, v_any, mask_any);
  if (needs_grad(mask)) return why_not_gradient_of_mask(q, k, v, *mask, dropout, causal, scale, gqa);
  const bool on_gpu = q.is_cuda() && k.is_cuda() && v.is_cuda();
  auto choice = at::SDPBackend::cudnn_attention;
  try {
    if (on_gpu) choice = at::SDPBackend(at::_fused_sdp_choice(q, k, v, mask, dropout, causal, scale, gqa));
  } catch (const c10::Error&) {  // all kernels that support the problem are disabled
    choice = at::SDPBackend::error;
  }
  const std::string why = why_not(q, k, v, {choice, mask, dropout, causal, false, needs_grad(q, k, v), scale});
  if (choice == at::SDPBackend::error && why.empty()) {
    return "PyTorch has no kernel: those that support this problem are disabled";
  }
  if (!why.empty() || choice != at::SDPBackend::math) return why;
  return "PyTorch chooses its math kernel: the others are disabled or do not support this problem";
}

// ---- the operators that F.scaled_dot_product_attention chooses from ----

// Computes o and lse and returns true if a line supports the problem. O has the strides that PyTorch's meta functions promise:
// those of empty_like(q), even if rows that do not fit() are copied, or those of [B,Sq,H,D] for the memory-efficient operator.
// cuDNN's LSE has a last dimension of size 1.
static bool run_dense(const Tensor& q, const Tensor& k, const Tensor& v, const Asked& asked, Tensor& o, Tensor& lse) {
  if (!why_not(q, k, v, asked).empty()) return false;
  const bool is_cudnn = asked.backend == at::SDPBackend::cudnn_attention;
  const bool is_flash = asked.backend == at::SDPBackend::flash_attention;
  const std::array<int64_t, 4> sizes{q.size(0), q.size(1), q.size(2), 1};
  if (is_flash || asked.needs_grad) lse = empty(at::IntArrayRef(sizes).slice(0, 3 + is_cudnn), at::kFloat, q);
  if (is_cudnn || is_flash)
    o = empty_like(q, q.scalar_type());
  else
    o = empty({q.size(0), q.size(2), q.size(1), q.size(3)}, q.scalar_type(), q).transpose(1, 2);
  const Tensor written = fit(o) ? o : empty(q.sizes(), q.scalar_type(), q);
  SdpaParams p{};
  p.causal = !asked.causal ? SDPA_CAUSAL_OFF : is_flash ? SDPA_CAUSAL_BOTTOM_RIGHT : SDPA_CAUSAL_TOP_LEFT;
  p.window_left = p.window_right = -1;
  p.scale = scale_of(asked.scale);
  OptionalTensor bias;
  if (asked.mask) bias = bias_of(*asked.mask, q, k.size(2));
  const std::string why = launch(readable(q, false), readable(k, true), readable(v, true), written, lse, p, bias);
  if (bias && asked.needs_grad) hide_empty_rows(lse);
  if (!why.empty()) {
    TORCH_WARN_ONCE("sdpa: ", why, "; PyTorch's own kernel runs instead");
    o = Tensor();
  }
  if (why.empty() && !written.is_same(o)) o.copy_(written);
  return why.empty();
}

// Computes O and LSE [B,H,Sq] by the memory-efficient kernel in float32, PyTorch's only kernel that reads a float32 bias.
static std::tuple<Tensor, Tensor> efficient_in_fp32(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias,
                                                    bool causal, std::optional<double> scale) {
  const auto [o, lse, seed, offset] = at::native::_scaled_dot_product_efficient_attention_cuda(
      q.to(at::kFloat), by_query_heads(k, q, at::kFloat), by_query_heads(v, q, at::kFloat),
      for_efficient(bias, q, k.size(2), at::kFloat), true, 0, causal, scale);
  Tensor rows = lse.narrow(2, 0, q.size(2)).contiguous();
  hide_empty_rows(rows);
  return {empty_like(q, q.scalar_type()).copy_(o), rows};
}

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

// PyTorch's autograd passes O and LSE to cuDNN's backward, which also accepts ours.
static Result cudnn(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask, bool with_lse,
                    double dropout, bool causal, bool debug_mask, std::optional<double> scale) {
  const c10::OptionalDeviceGuard guard(q.device());
  const Asked asked{at::SDPBackend::cudnn_attention, mask, dropout, causal, debug_mask, with_lse, scale};
  Tensor o, lse;
  const bool is_ours = run_dense(q, k, v, asked, o, lse);
  if (!is_ours && mask && is_wide(*mask, q) && dropout == 0 && !debug_mask && !cudnn_lse_layout_differs()) {
    std::tie(o, lse) = efficient_in_fp32(q, k, v, *mask, causal, scale);
    lse = lse.unsqueeze(-1);
  } else if (!is_ours) {
    if (mask && is_wide(*mask, q)) TORCH_WARN_ONCE("sdpa: PyTorch's cuDNN kernel rounds attn_mask to q's type");
    return at::_cudnn_attention_forward(q, k, v, mask ? for_cudnn(*mask, q) : mask, {}, {}, q.size(2), k.size(2),
                                        with_lse, dropout, causal, debug_mask, scale);
  }
  const auto unused = [&] { return empty({}, at::kLong, q); };  // state of the random generator, only read with dropout
  return {o, lse, Tensor(), Tensor(), q.size(2), k.size(2), unused(), unused(), Tensor()};
}

// FlashAttention-2 fails with "misaligned address" on some rows that do not fit(), so they are copied for it, too.
static Result flash(const Tensor& q_any, const Tensor& k_any, const Tensor& v_any, double dropout, bool causal,
                    bool debug_mask, std::optional<double> scale) {
  const c10::OptionalDeviceGuard guard(q_any.device());
  const bool with_grad = needs_grad(q_any, k_any, v_any);
  const Asked asked{at::SDPBackend::flash_attention, {}, dropout, causal, debug_mask, with_grad, scale};
  Tensor o, lse;
  if (run_dense(q_any, k_any, v_any, asked, o, lse)) {
    const auto unused = [&](at::IntArrayRef sizes, at::ScalarType type) { return empty(sizes, type, q_any); };
    return {o,
            lse,
            Tensor(),
            Tensor(),
            q_any.size(2),
            k_any.size(2),
            unused({2}, at::kUInt64),
            unused({}, at::kUInt64),
            unused({0}, q_any.scalar_type())};
  }
  const auto fitting = [](const Tensor& x) { return (x.dim() != 4 || fit(x) ? x : x.contiguous()).transpose(1, 2); };
  const Tensor q = fitting(q_any), k = fitting(k_any), v = fitting(v_any);
  auto [out, out_lse, state, unused, mask] =
      at::native::_flash_attention_forward(q, k, v, {}, {}, q.size(1), k.size(1), dropout, causal, debug_mask, scale);
  out = out.transpose(1, 2);
  if (q_any.dim() == 4 && !fit(q_any)) out = empty_like(q_any, out.scalar_type()).copy_(out);
  return {out, out_lse, Tensor(), Tensor(), q.size(1), k.size(1), state, unused, mask};
}

// PyTorch chooses this operator for masks on most GPUs, and for causal masks with Sq != Sk. Its backward reads O and a padded
// LSE.
static std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& q, const Tensor& k, const Tensor& v,
                                                            const OptionalTensor& mask, bool with_lse, double dropout,
                                                            bool causal, std::optional<double> scale) {
  const c10::OptionalDeviceGuard guard(q.device());
  const Asked asked{at::SDPBackend::efficient_attention, mask, dropout, causal, false, with_lse, scale};
  Tensor o, lse;
  if (!run_dense(q, k, v, asked, o, lse)) {
    return at::native::_scaled_dot_product_efficient_attention_cuda(q, k, v, mask, with_lse, dropout, causal, scale);
  }
  const auto unused = [&] { return empty({}, at::kLong, q); };
  return {o, with_lse ? padded_lse(lse) : empty({q.size(0), q.size(1), 0}, at::kFloat, q), unused(), unused()};
}

// F.scaled_dot_product_attention itself. If nothing is differentiated or traced, our kernels read the mask directly. PyTorch
// would convert a bool mask to an additive one, with -65504 for cuDNN, and O of rows that see no key would become
// softmax(Q @ K.T) @ V.
static Tensor chosen(const Tensor& q_any, const Tensor& k_any, const Tensor& v_any, const OptionalTensor& mask_any,
                     double dropout, bool causal, std::optional<double> scale, bool gqa) {
  const auto pytorchs = [&](const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask) {
    return at::native::scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale, gqa);
  };
  if (!q_any.is_cuda()) return pytorchs(q_any, k_any, v_any, mask_any);
  const auto [q, k, v, mask, is_3d] = Given(q_any, k_any, v_any, mask_any);
  Tensor o, lse;
  if (needs_grad(mask) && why_not_gradient_of_mask(q, k, v, *mask, dropout, causal, scale, gqa).empty()) {
    o = attention_with_bias(q, k, v, *mask, scale);
  } else if (mask && dropout == 0 && !causal && !needs_grad(q, k, v) && !needs_grad(mask) && is_plain(q, k, v, *mask)) {
    const c10::OptionalDeviceGuard guard(q.device());
    const auto choice = at::SDPBackend(at::_fused_sdp_choice(q, k, v, mask, 0, false, scale, gqa));
    if (choice != at::SDPBackend::math) run_dense(q, k, v, {choice, mask, 0, false, false, false, scale}, o, lse);
  }
  if (!o.defined()) o = pytorchs(q, k, v, mask);
  return is_3d ? o.squeeze(0) : o;
}

// ---- PyTorch's FlashAttention and cuDNN operators, which varlen_attn calls, and 8-bit attention ----

// The arguments other than q, k and v, which are [rows,H,D] with starts, otherwise [B,S,H,D]. Masks and windows are
// bottom-right, except in cuDNN's operator without lengths.
struct Sequences {
  const OptionalTensor &q_starts, &k_starts, &k_lengths, &page_table;  // with page_table, k and v are [pages,keys,Hkv,D]
  int64_t most_keys;
  double dropout;
  bool causal, debug_mask;
  std::optional<double> scale;
  std::optional<int64_t> left, right;
  bool top_left = false;
  bool has_slopes = false;
  std::optional<int64_t> splits;  // 1: the bits of a sequence do not depend on the other sequences
};
struct Descales {
  OptionalTensor q, k, v;
};

static Tensor heads_first(const Tensor& x) {
  return x.dim() == 3 ? x.transpose(0, 1).unsqueeze(0) : x.transpose(1, 2);
}

// Returns the reason for refusing a call with tensors [B,H,S,D], or an empty string.
static std::string why_not(const Tensor& q, const Tensor& k, const Tensor& v, const Sequences& asked) {
  if (asked.dropout != 0) return "there is dropout";
  if (asked.debug_mask) return "a debug mask is asked for";
  if (asked.has_slopes) return "there are alibi_slopes";
  if (asked.page_table && !asked.k_lengths) return "there is a block_table without seqused_k";
  if (!asked.page_table && asked.q_starts.has_value() != asked.k_starts.has_value()) {
    return "cum_seq_q or cum_seq_k is missing";
  }
  std::string why = why_not_scale(asked.scale);
  const bool has_lengths = asked.q_starts || asked.k_starts || asked.k_lengths || asked.page_table;
  if (why.empty()) why = why_not_tensors(q, k, v, true, has_lengths);
  if (!why.empty()) return why;
  if (v.size(3) != q.size(3)) return "q and v differ in D";
  if (q.numel() == 0 || k.numel() == 0) return "a tensor is empty";
  if (asked.page_table && !(fit(k) && fit(v))) return bad_rows;  // readable() would copy all pages
  return "";
}

// Computes O and LSE of tensors [1 or B,H,S,D]. If o is defined, it is overwritten. Returns the reason for refusing, or an
// empty string.
static std::string run_sequences(const Tensor& q_any, const Tensor& k_any, const Tensor& v_any, const Sequences& asked,
                         const Descales& descales, Tensor& o, Tensor& lse) {
  std::string why = why_not(q_any, k_any, v_any, asked);
  if (!why.empty()) return why;
  int64_t left = limit(asked.left), right = limit(asked.right);
  const bool causal = asked.causal || (left < 0 && right == 0);
  if (causal) right = -1;
  const bool has_lengths = asked.q_starts || asked.k_starts || asked.k_lengths || asked.page_table;
  const int mask = !causal ? SDPA_CAUSAL_OFF : asked.top_left ? SDPA_CAUSAL_TOP_LEFT : SDPA_CAUSAL_BOTTOM_RIGHT;
  const int alignment = left < 0 && right < 0 ? SDPA_CAUSAL_OFF : SDPA_CAUSAL_BOTTOM_RIGHT;
  const OptionalTensor k_starts = asked.page_table ? no_tensor : asked.k_starts;
  const Tensor q = readable(q_any, false), k = readable(k_any, true), v = readable(v_any, true);
  const Call call{.q = q,
                  .k = k,
                  .v = v,
                  .causal = mask,
                  .left = left,
                  .right = right,
                  .window_alignment = alignment,
                  .scale = asked.scale,
                  .q_descale = descales.q,
                  .k_descale = descales.k,
                  .v_descale = descales.v,
                  .k_lengths = asked.k_lengths,
                  .q_starts = asked.q_starts,
                  .k_starts = k_starts,
                  .page_table = asked.page_table,
                  .most_keys = has_lengths ? std::clamp<int64_t>(asked.most_keys, 0, most_size) : 0,
                  .batch_invariant = asked.splits == 1,
                  .bf16_out = q.scalar_type() == at::kFloat8_e4m3fn};
  int features = has_lengths ? use_lengths : 0;
  if (asked.page_table) features |= pages_feature(k.size(2), false);
  if (call.bf16_out) features |= use_bf16_out;
  why = why_not_line(q, v, features);
  if (why.empty()) lse = attend(call, o);
  return why;
}

// run_sequences() for tensors in the layout of these operators. LSE is [H,rows] with starts, otherwise [B,H,S].
static std::string run_rows(const Tensor& q, const Tensor& k, const Tensor& v, const Sequences& asked,
                              const Descales& descales, Tensor& o, Tensor& lse) {
  if (q.dim() != (asked.q_starts ? 3 : 4)) return c10::str("q has ", q.dim(), " dimensions");
  if (k.dim() != (asked.page_table ? 4 : q.dim()) || v.dim() != k.dim()) {
    return c10::str("k and v have ", k.dim(), " and ", v.dim(), " dimensions");
  }
  if (o.defined() && (o.sizes() != q.sizes() || o.scalar_type() != q.scalar_type() || o.device() != q.device())) {
    return "out is of another shape or type than q";
  }
  Tensor by_heads = o.defined() ? heads_first(o) : o;
  std::string why = run_sequences(heads_first(q), heads_first(k), heads_first(v), asked, descales, by_heads, lse);
  if (!why.empty()) return why;
  if (!o.defined()) o = by_heads.transpose(1, 2);
  if (asked.q_starts) {
    if (o.dim() == 4) o = o.squeeze(0);
    lse = lse.squeeze(0);
  }
  return "";
}

static void warn_of_pytorchs(const std::string& why) {
  TORCH_WARN_ONCE("sdpa: ", why, "; PyTorch's own kernel runs instead");
}
[[noreturn]] static void refuse_8_bits(const std::string& why) {
  TORCH_CHECK(false, "sdpa: ", why, "; PyTorch has no kernel of its own for 8 bits");
}
// The state of the random generator, which is only read with dropout, and a debug mask.
static std::tuple<Tensor, Tensor, Tensor> unused_of_flash(const Tensor& q) {
  const auto state = q.options().dtype(at::kUInt64);
  return {at::empty({2}, state), at::empty({}, state), at::empty({0}, q.options())};
}

#if PYTORCH_2(12)
#define PAGED_PARAMETERS , const OptionalTensor &page_table, std::optional<int64_t> splits
#define PAGED_ARGUMENTS , page_table, splits
#else
#define PAGED_PARAMETERS
#define PAGED_ARGUMENTS
#endif

using FlashResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
static FlashResult flash_forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& q_starts,
                                 const OptionalTensor& k_starts, int64_t most_q, int64_t most_k, double dropout,
                                 bool causal, bool debug_mask, std::optional<double> scale,
                                 std::optional<int64_t> left, std::optional<int64_t> right,
                                 const OptionalTensor& k_lengths, const OptionalTensor& slopes PAGED_PARAMETERS) {
#if !PYTORCH_2(12)
  const OptionalTensor page_table;
  const std::optional<int64_t> splits;
#endif
  Tensor o, lse;
  const std::string why =
      run_rows(q, k, v, {q_starts, k_starts, k_lengths, page_table, most_k, dropout, causal, debug_mask, scale, left,
                           right, false, slopes.has_value(), splits}, {}, o, lse);
  if (why.empty()) return std::tuple_cat(std::make_tuple(o, lse), unused_of_flash(q));
  warn_of_pytorchs(why);
  const c10::OptionalDeviceGuard guard(q.device());
  return at::native::_flash_attention_forward(q, k, v, q_starts, k_starts, most_q, most_k, dropout, causal, debug_mask,
                                              scale, left, right, k_lengths, slopes PAGED_ARGUMENTS);
}

#if PYTORCH_2(12)
static Tensor flash_forward_into(Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v,
                                 const OptionalTensor& q_starts, const OptionalTensor& k_starts, int64_t most_q,
                                 int64_t most_k, double dropout, bool causal, bool debug_mask,
                                 std::optional<double> scale, std::optional<int64_t> left,
                                 std::optional<int64_t> right, const OptionalTensor& k_lengths,
                                 const OptionalTensor& slopes PAGED_PARAMETERS) {
  Tensor lse;
  const std::string why =
      run_rows(q, k, v, {q_starts, k_starts, k_lengths, page_table, most_k, dropout, causal, debug_mask, scale, left,
                           right, false, slopes.has_value(), splits}, {}, out, lse);
  if (why.empty()) return lse;
  warn_of_pytorchs(why);
  const c10::OptionalDeviceGuard guard(q.device());
  return at::native::_flash_attention_forward_no_dropout_inplace(out, q, k, v, q_starts, k_starts, most_q, most_k,
                                                                 dropout, causal, debug_mask, scale, left, right,
                                                                 k_lengths, slopes PAGED_ARGUMENTS);
}
#endif

// For 8-bit inputs, O is bf16. PyTorch raises an error if their gradient is needed.
static FlashResult flash_forward_8_bits(const Tensor& q, const Tensor& k, const Tensor& v,
                                        const OptionalTensor& q_starts, const OptionalTensor& k_starts, int64_t most_q,
                                        int64_t most_k, double dropout, bool causal, bool debug_mask,
                                        const OptionalTensor& q_descale, const OptionalTensor& k_descale,
                                        const OptionalTensor& v_descale, std::optional<double> scale,
                                        std::optional<int64_t> left, std::optional<int64_t> right,
                                        const OptionalTensor& k_lengths, const OptionalTensor& slopes) {
  Tensor o, lse;
  const std::string why =
      run_rows(q, k, v, {q_starts, k_starts, k_lengths, {}, most_k, dropout, causal, debug_mask, scale, left, right,
                           false, slopes.has_value()}, {q_descale, k_descale, v_descale}, o, lse);
  if (!why.empty()) refuse_8_bits(why);
  return std::tuple_cat(std::make_tuple(o, lse), unused_of_flash(q));
}
static Result flash_8_bits(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& q_descale,
                           const OptionalTensor& k_descale, const OptionalTensor& v_descale, double dropout,
                           bool causal, bool debug_mask, std::optional<double> scale) {
  Tensor o, lse;
  const OptionalTensor none;
  const std::string why = run_sequences(q, k, v, {none, none, none, none, 0, dropout, causal, debug_mask, scale},
                                {q_descale, k_descale, v_descale}, o, lse);
  if (!why.empty()) refuse_8_bits(why);
  const auto [state, offset, mask] = unused_of_flash(q);
  return {o, lse, Tensor(), Tensor(), q.size(2), k.size(2), state, offset, mask};
}

#if PYTORCH_2(14)
// varlen_attn may call cuDNN, whose causal mask is top-left unless there are lengths. From PyTorch 2.14 on, its LSE is [H,rows].
// Calls without starts come from F.scaled_dot_product_attention.
static std::string run_cudnn_rows(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& q_starts,
                                    const OptionalTensor& k_starts, int64_t most_k, double dropout, bool causal,
                                    bool debug_mask, std::optional<double> scale, const OptionalTensor& k_lengths,
                                    const OptionalTensor& page_table, Tensor& o, Tensor& lse) {
  return run_rows(q, k, v, {q_starts, k_starts, k_lengths, page_table, most_k, dropout, causal, debug_mask, scale, {},
                              {}, !k_lengths}, {}, o, lse);
}
static Result cudnn_forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
                            const OptionalTensor& q_starts, const OptionalTensor& k_starts, int64_t most_q,
                            int64_t most_k, bool with_lse, double dropout, bool causal, bool debug_mask,
                            std::optional<double> scale, const OptionalTensor& k_lengths,
                            const OptionalTensor& page_table) {
  if (q_starts && !bias) {
    Tensor o, lse;
    const std::string why = run_cudnn_rows(q, k, v, q_starts, k_starts, most_k, dropout, causal, debug_mask, scale,
                                             k_lengths, page_table, o, lse);
    if (why.empty()) {
      const Tensor unused = at::empty({}, q.options().dtype(at::kLong));
      return {o, with_lse ? lse : Tensor(), *q_starts, k_starts.value_or(Tensor()), most_q, most_k, unused, unused,
              Tensor()};
    }
    warn_of_pytorchs(why);
  }
  const c10::OptionalDeviceGuard guard(q.device());
  return at::native::_cudnn_attention_forward(q, k, v, bias, q_starts, k_starts, most_q, most_k, with_lse, dropout,
                                              causal, debug_mask, scale, k_lengths, page_table);
}
#endif
#if PYTORCH_2(15)
static Tensor cudnn_forward_into(Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v,
                                 const Tensor& q_starts, const OptionalTensor& k_starts, int64_t most_q,
                                 int64_t most_k, bool causal, std::optional<double> scale,
                                 const OptionalTensor& k_lengths, const OptionalTensor& page_table) {
  Tensor lse;
  const std::string why = run_cudnn_rows(q, k, v, q_starts, k_starts, most_k, 0, causal, false, scale, k_lengths,
                                           page_table, out, lse);
  if (why.empty()) return lse;
  warn_of_pytorchs(why);
  const c10::OptionalDeviceGuard guard(q.device());
  return at::native::_cudnn_attention_forward_no_dropout_inplace(out, q, k, v, q_starts, k_starts, most_q, most_k,
                                                                 causal, scale, k_lengths, page_table);
}
#endif

// Registers the functions above for PyTorch's operators.
static void register_operators(torch::Library& m) {
  m.impl("_scaled_dot_product_cudnn_attention", cudnn);
  m.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward_op);
  m.impl("_scaled_dot_product_flash_attention", flash);
  m.impl("_scaled_dot_product_flash_attention_backward", flash_backward_op);
  m.impl("_scaled_dot_product_efficient_attention", efficient);
  if (!on_cpu) m.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward_op);
  m.impl("_flash_attention_forward", flash_forward);
  m.impl("_flash_attention_backward", flash_rows_backward_op);
  m.impl("_flash_attention_forward.quantized", flash_forward_8_bits);
  m.impl("_scaled_dot_product_flash_attention.quantized", flash_8_bits);
#if PYTORCH_2(12)
  m.impl("_flash_attention_forward_no_dropout_inplace", flash_forward_into);
#endif
#if PYTORCH_2(14)
  m.impl("_cudnn_attention_forward", cudnn_forward);
#endif
#if PYTORCH_2(15)
  m.impl("_cudnn_attention_forward_no_dropout_inplace", cudnn_forward_into);
#endif
}
