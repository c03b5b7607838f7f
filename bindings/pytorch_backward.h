// dQ, dK and dV by PyTorch's backward kernels (cuDNN, FlashAttention-2 and the memory-efficient ones), and the choice between
// them and ours. All of them read the O and LSE of our forward.

#pragma once

#include <ATen/SDPBackend.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_cudnn_attention_backward.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_backward_native.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward_native.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/env.h>

#include "pytorch_attention.h"
#include "pytorch_own_backward.h"

// True if a PyTorch setting makes cuDNN's backward expect a different layout of LSE than ours.
static bool cudnn_lse_layout_differs() {
  static const bool differs = c10::utils::check_env("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == true;
  return differs;
}

// Replaces the LSE of rows that see no key, -inf, by +inf. Then their P is 0 in a backward, instead of exp(inf).
static void hide_empty_rows(Tensor& lse) { lse.masked_fill_(lse.eq(-INFINITY), INFINITY); }

// cuDNN reads a bias as q's dtype whatever its own, so convert it. A hidden key becomes -65504, as in PyTorch.
static Tensor for_cudnn(const Tensor& bias, const Tensor& q) {
  if (!bias.defined() || bias.scalar_type() != at::kBool) return bias.defined() ? bias.to(q.scalar_type()) : bias;
  const auto value = [&](double x) { return at::scalar_tensor(x, q.options()); };
  return at::where(bias, value(0), value(-65504));
}

// Returns the bias for PyTorch's memory-efficient kernels: additive, [B,H,Sq,Sk], of the given type, with rows that start at
// multiples of 16 bytes.
static Tensor for_efficient(const Tensor& bias_any, const Tensor& q, int64_t Sk, at::ScalarType type) {
  const Tensor given = bias_of(bias_any, q, Sk);
  const std::array<int64_t, 4> sizes{given.size(0), given.size(1), given.size(2), (Sk + 7) / 8 * 8};
  const Tensor bias = at::zeros(sizes, q.options().dtype(type)).narrow(3, 0, Sk);
  if (given.scalar_type() == at::kBool)
    bias.masked_fill_(given.logical_not(), -INFINITY);
  else
    bias.copy_(given);
  return bias.expand({q.size(0), q.size(1), q.size(2), Sk});
}
// Returns k or v in the given type, with its heads repeated to the number of heads of q. These kernels do not support GQA.
static Tensor by_query_heads(const Tensor& x, const Tensor& q, at::ScalarType type) {
  const int64_t group = q.size(1) / x.size(1);
  return (group == 1 ? x : x.repeat_interleave(group, 1)).to(type);
}

// True if a bias has more bits than q's type, which cuDNN would round away.
static bool is_wide(const Tensor& bias, const Tensor& q) {
  return bias.defined() && bias.scalar_type() == at::kFloat && q.scalar_type() != at::kFloat;
}

// Returns LSE [B,H,Sq], padded with inf to a multiple of 32 rows for the memory-efficient backward.
static Tensor padded_lse(const Tensor& lse) {
  const int64_t Sq = lse.size(2);
  const Tensor padded = empty({lse.size(0), lse.size(1), (Sq + 31) / 32 * 32}, at::kFloat, lse);
  padded.fill_(INFINITY);
  padded.narrow(2, 0, Sq).copy_(lse);
  return padded;
}

// Computes dQ, dK and dV by PyTorch's memory-efficient backward. Its causal mask is top-left, and it needs O contiguous as
// [B,Sq,H,D]. With a float32 bias, everything is converted to float32, since the kernel only supports a bias of q's type.
static std::tuple<Tensor, Tensor, Tensor> efficient_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                             const Tensor& v, const Tensor& o, const Tensor& lse,
                                                             const Tensor& bias_any, bool causal,
                                                             std::optional<double> scale) {
  const auto type = is_wide(bias_any, q) ? at::kFloat : q.scalar_type();
  const Tensor bias = bias_any.defined() ? for_efficient(bias_any, q, k.size(2), type) : Tensor();
  const int64_t key_heads = k.size(1), group = q.size(1) / key_heads;
  const auto by_key_heads = [&](const Tensor& dx) {
    return (group == 1 ? dx : dx.unflatten(1, {key_heads, group}).sum(2)).to(q.scalar_type());
  };
  const Tensor unused = empty({}, at::kLong, q);  // state of the random generator, only read with dropout
  // Not through the dispatcher, which would call efficient_backward_op(). On the CPU, tests register their own operator.
  const auto kernel = on_cpu ? at::_scaled_dot_product_efficient_attention_backward
                             : at::native::_scaled_dot_product_efficient_attention_backward_cuda;
  const auto [dq, dk, dv, of_bias] = kernel(
      grad.to(type), q.to(type), by_query_heads(k, q, type), by_query_heads(v, q, type), bias,
      o.to(type).transpose(1, 2).contiguous().transpose(1, 2), padded_lse(lse), unused, unused, 0,
      {true, true, true, false}, causal, scale);
  return {dq.to(q.scalar_type()), by_key_heads(dk), by_key_heads(dv)};
}

// True if cuDNN's backward may return NaN. It does so for rows with an LSE below about -88 in two cases: a single query; or a
// bias, D <= 64 and 1 to 64 queries in the last tile of 128. LSE is not known on the host, so only the shape decides.
static bool cudnn_may_give_nan(const Tensor& q, const Tensor& bias) {
  const int64_t last = q.size(2) % 128;
  return q.size(2) == 1 || (bias.defined() && q.size(3) <= 64 && last >= 1 && last <= 64);
}

// PyTorch caches cuDNN's plans by the layout of q, k and v. A plan expects dO in the layout of the first call. Therefore dO is
// always passed in the layout of O; otherwise gradients would be wrong.
static std::tuple<Tensor, Tensor, Tensor> cudnn_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                         const Tensor& v, const Tensor& o, const Tensor& lse,
                                                         const Tensor& seed, const Tensor& offset, const Tensor& bias,
                                                         const Tensor& q_starts, const Tensor& k_starts, int64_t most_q,
                                                         int64_t most_k, double dropout, bool causal,
                                                         std::optional<double> scale) {
  const c10::OptionalDeviceGuard guard(q.device());
  const bool is_plain = dropout == 0 && !q_starts.defined() && !cudnn_lse_layout_differs();
  if (is_plain && (cudnn_may_give_nan(q, bias) || is_wide(bias, q))) {
    return efficient_backward(grad, q, k, v, o, lse.reshape(q.sizes().slice(0, 3)), bias, causal, scale);
  }
  const Tensor like_o = grad.strides() == o.strides() && fit(grad) ? grad : at::empty_like(o).copy_(grad);
  return at::_cudnn_attention_backward(like_o, q, k, v, o, lse, seed, offset, for_cudnn(bias, q), q_starts, k_starts,
                                       most_q, most_k, dropout, causal, scale);
}

// FlashAttention-2's backward. Not through the dispatcher, which would call flash_rows_backward_op(). On the CPU, tests
// register their own operator.
static std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                         const Tensor& v, const Tensor& o, const Tensor& lse,
                                                         const Tensor& q_starts, const Tensor& k_starts, int64_t most_q,
                                                         int64_t most_k, double dropout, bool causal, const Tensor& seed,
                                                         const Tensor& offset, std::optional<double> scale,
                                                         std::optional<int64_t> left = {},
                                                         std::optional<int64_t> right = {}) {
  if (on_cpu) {
    const c10::DispatchKeySet of_test(c10::DispatchKey::XLA);
    return at::_ops::_flash_attention_backward::redispatch(of_test, grad, q, k, v, o, lse, q_starts, k_starts, most_q,
                                                           most_k, dropout, causal, seed, offset, scale, left, right);
  }
  return at::native::_flash_attention_backward(grad, q, k, v, o, lse, q_starts, k_starts, most_q, most_k, dropout,
                                               causal, seed, offset, scale, left, right);
}

// ---- the backward of PyTorch's operators ----

// Which backward PyTorch's operators run: the faster one, ours if a line supports the problem, or PyTorch's.
enum class Preference { faster, ours, pytorchs };
static auto preference = Preference::faster;

static bool is_deterministic() { return at::globalContext().deterministicAlgorithms(); }

// Computes the gradients of one of PyTorch's operators by our kernels. Returns false if PyTorch's kernels are to run instead.
// is_needed: also if PyTorch's are faster, since they may return NaN, are slow for this bias, or need an LSE that is missing.
static bool ours_instead(const BackwardCall& call, bool is_needed, Gradients& d) {
  const std::string why = why_not_tensors(call.q, call.k, call.v, true, call.has_lengths());
  if (preference == Preference::pytorchs || !why.empty()) return false;
  is_needed = is_needed || preference == Preference::ours || is_deterministic();
  return our_backward(call, is_needed, is_deterministic(), d).empty();
}

static std::tuple<Tensor, Tensor, Tensor> cudnn_backward_op(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
    const Tensor& seed, const Tensor& offset, const Tensor& bias, const Tensor& q_starts, const Tensor& k_starts,
    int64_t most_q, int64_t most_k, double dropout, bool causal, std::optional<double> scale) {
  const c10::OptionalDeviceGuard guard(q.device());
  if (dropout == 0 && !q_starts.defined() && !cudnn_lse_layout_differs()) {
    const Tensor rows_lse = lse.reshape(q.sizes().slice(0, 3));
    const int mask = causal ? SDPA_CAUSAL_TOP_LEFT : SDPA_CAUSAL_OFF;
    const OptionalTensor its_bias = bias.defined() ? OptionalTensor(bias) : std::nullopt;
    const BackwardCall call{{.q = q, .k = k, .v = v, .causal = mask, .scale = scale, .bias = its_bias}, grad, o, rows_lse};
    if (Gradients d; ours_instead(call, cudnn_may_give_nan(q, bias) || is_wide(bias, q), d)) return {d.q, d.k, d.v};
  }
  return cudnn_backward(grad, q, k, v, o, lse, seed, offset, bias, q_starts, k_starts, most_q, most_k, dropout, causal,
                        scale);
}

// FlashAttention-2 takes [B,S,H,D].
static std::tuple<Tensor, Tensor, Tensor> flash_backward_op(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
    const Tensor& q_starts, const Tensor& k_starts, int64_t most_q, int64_t most_k, double dropout, bool causal,
    const Tensor& seed, const Tensor& offset, std::optional<double> scale) {
  const c10::OptionalDeviceGuard guard(q.device());
  if (dropout == 0 && !q_starts.defined()) {
    const int mask = causal ? SDPA_CAUSAL_BOTTOM_RIGHT : SDPA_CAUSAL_OFF;
    const BackwardCall call{{.q = q, .k = k, .v = v, .causal = mask, .scale = scale}, grad, o, lse};
    if (Gradients d; ours_instead(call, false, d)) return {d.q, d.k, d.v};
  }
  const auto rows = [](const Tensor& x) { return x.transpose(1, 2); };
  const auto [dq, dk, dv] =
      flash_backward(rows(grad), rows(q), rows(k), rows(v), rows(o), lse, q_starts, k_starts, most_q, most_k, dropout,
                     causal, seed, offset, scale);
  return {rows(dq), rows(dk), rows(dv)};
}

// The operator of varlen_attn and of nested tensors: with starts, tensors are [rows,H,D] and LSE is [H,rows].
static std::tuple<Tensor, Tensor, Tensor> flash_rows_backward_op(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
    const Tensor& q_starts, const Tensor& k_starts, int64_t most_q, int64_t most_k, double dropout, bool causal,
    const Tensor& seed, const Tensor& offset, std::optional<double> scale, std::optional<int64_t> left,
    std::optional<int64_t> right) {
  const c10::OptionalDeviceGuard guard(q.device());
  const bool is_packed = q_starts.defined() && k_starts.defined() && q.dim() == 3 && k.dim() == 3;
  if (dropout == 0 && is_packed && q.size(2) == v.size(2)) {
    const auto heads_first = [](const Tensor& x) { return x.transpose(0, 1).unsqueeze(0); };
    const auto rows = [](const Tensor& x) { return x.squeeze(0).transpose(0, 1); };
    const bool is_causal = causal || (limit(left) < 0 && limit(right) == 0);
    const OptionalTensor dO = heads_first(grad), q_begins = q_starts, k_begins = k_starts;
    const Tensor q_rows = heads_first(q), k_rows = heads_first(k), v_rows = heads_first(v), o_rows = heads_first(o);
    const Tensor lse_rows = lse.unsqueeze(0);
    const BackwardCall call{{.q = q_rows,
                             .k = k_rows,
                             .v = v_rows,
                             .causal = is_causal ? SDPA_CAUSAL_BOTTOM_RIGHT : SDPA_CAUSAL_OFF,
                             .left = limit(left),
                             .right = is_causal ? -1 : limit(right),
                             .window_alignment = SDPA_CAUSAL_BOTTOM_RIGHT,
                             .scale = scale,
                             .q_starts = q_begins,
                             .k_starts = k_begins,
                             .most_keys = std::clamp<int64_t>(most_k, 0, most_size)},
                            dO, o_rows, lse_rows};
    if (Gradients d; !call.is_empty() && ours_instead(call, false, d)) return {rows(d.q), rows(d.k), rows(d.v)};
  }
  return flash_backward(grad, q, k, v, o, lse, q_starts, k_starts, most_q, most_k, dropout, causal, seed, offset, scale,
                        left, right);
}

static std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward_op(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, const Tensor& o,
    const Tensor& lse, const Tensor& seed, const Tensor& offset, double dropout, std::array<bool, 4> wanted, bool causal,
    std::optional<double> scale) {
  const c10::OptionalDeviceGuard guard(q.device());
  Tensor padded = lse;
  if (dropout == 0 && grad.defined()) {
    const int mask = causal ? SDPA_CAUSAL_TOP_LEFT : SDPA_CAUSAL_OFF;
    const OptionalTensor its_bias = bias.defined() ? OptionalTensor(bias) : std::nullopt;
    const Call forward{.q = q, .k = k, .v = v, .causal = mask, .scale = scale, .bias = its_bias};
    // If only the bias of a compiled function needs a gradient, its forward returns no LSE. Compute it here.
    const bool lacks_lse = lse.size(2) < q.size(2);
    if (lacks_lse) {
      Tensor unused, computed = attend(forward, unused);
      hide_empty_rows(computed);
      padded = padded_lse(computed);
    }
    const Tensor rows_lse = padded.narrow(2, 0, q.size(2));
    const BackwardCall call{forward, grad, o, rows_lse, no_tensor, bias.defined() && wanted[3]};
    if (Gradients d; ours_instead(call, lacks_lse, d)) return {d.q, d.k, d.v, d.bias};
  }
  return at::native::_scaled_dot_product_efficient_attention_backward_cuda(grad, q, k, v, bias, o, padded, seed, offset,
                                                                           dropout, wanted, causal, scale);
}

// ---- sdpa::attention_backward ----

// True if F.scaled_dot_product_attention supports this problem, and PyTorch would choose cuDNN. The causal mask of that
// function is top-left.
static bool is_for_cudnn(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias, int64_t causal,
                         bool limited, std::optional<double> scale) {
  if (limited || cudnn_lse_layout_differs() || (causal == SDPA_CAUSAL_BOTTOM_RIGHT && q.size(2) != k.size(2))) return false;
  try {
    const bool masked = causal != SDPA_CAUSAL_OFF;
    const at::AutoGradMode with_gradients(true);  // for some sizes, there is a forward, but no backward
    const Tensor asked = q.detach().requires_grad_();
    const int64_t choice = at::_fused_sdp_choice(asked, k, v, bias, 0, masked, scale, q.size(1) != k.size(1));
    return at::SDPBackend(choice) == at::SDPBackend::cudnn_attention;
  } catch (const c10::Error&) {  // all kernels that support the problem are disabled
    return false;
  }
}

// Returns o in the layout in which PyTorch's cuDNN operator would return it: that of q, with v's D. Plans are cached by q's
// layout.
static Tensor in_cudnn_layout(const Tensor& o, const Tensor& q) {
  if (o.strides() == q.strides() && o.sizes() == q.sizes() && q.is_non_overlapping_and_dense()) return o;
  std::array<int64_t, 4> order{0, 1, 2, 3}, strides;
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return q.stride(a) < q.stride(b); });
  int64_t next = 1;
  for (const int64_t dim : order) {
    strides[dim] = next;
    next *= o.size(dim);
  }
  Tensor out = o.size(3) == q.size(3) ? at::empty_like(q) : at::empty_strided(o.sizes(), strides, o.options());
  return o.strides() == out.strides() ? o : out.copy_(o);
}

// PyTorch's backward for a call of attention(). If cuDNN does not support the problem, FlashAttention-2 or the memory-efficient
// backward computes it. Masks and windows of FlashAttention-2 are bottom-right, and a limit of -1 means all keys only if both
// limits are -1. The memory-efficient backward supports a bias, a top-left mask with Sq != Sk, and a v with another D than q.
struct PytorchsBackward {
  const BackwardCall& call;
  OptionalTensor bias;  // from bias_of()
  bool limited;         // by a window
  bool masked;          // by a causal mask
  bool by_flash, by_efficient;  // true if this backward supports the problem
  Tensor q, k, v;               // copied if PyTorch's kernels cannot read their rows

  explicit PytorchsBackward(const BackwardCall& c)
      : call(c), q(readable(c.q, false)), k(readable(c.k, false)), v(readable(c.v, false)) {
    if (call.bias && !call.bias_keys) bias = bias_of(call.bias->detach(), q, k.size(2));
    const int64_t Sq = q.size(2), Sk = k.size(2), by = call.window_alignment ? call.window_alignment : call.causal;
    limited = call.left >= 0 || call.right >= 0;
    masked = call.causal != SDPA_CAUSAL_OFF;
    const bool bottom_right = call.causal != SDPA_CAUSAL_TOP_LEFT && (!limited || by == SDPA_CAUSAL_BOTTOM_RIGHT);
    by_flash = !bias && q.size(3) == v.size(3) && (Sq == Sk || bottom_right);
    by_efficient = !limited && (call.causal != SDPA_CAUSAL_BOTTOM_RIGHT || Sq == Sk);
  }

  // Returns the reason why PyTorch has no backward for this call, or an empty string.
  std::string why_not() const {
    if (call.softcap != 0 || call.sinks) return "PyTorch has no backward with softcap or sinks";
    if (!call.mods.score.empty() || !call.mods.mask.empty()) return "PyTorch has no backward with score_mod or mask_mod";
    if (call.has_lengths()) return "attention() does not call PyTorch's backward with lengths or starts";
    if (call.to_bias) return "attention() does not call PyTorch's backward for the gradient of a bias";
    if (call.bias && (masked || limited || call.bias_keys)) {
      return "attention() does not call PyTorch's backward for a bias with a causal mask, a window or bias_keys";
    }
    if (by_flash || by_efficient) return "";
    if (q.size(3) != v.size(3)) {
      return limited ? "PyTorch has no backward with a window if v has another D than q"
                     : "PyTorch has no backward with a bottom-right mask and Sq != Sk if v has another D than q";
    }
    return "PyTorch has a backward for a window and Sq != Sk only if the window and the mask are bottom-right";
  }

  // Returns {dQ, dK, dV} of O = P @ V for any V.
  std::tuple<Tensor, Tensor, Tensor> of_product(const Tensor& grad, const Tensor& of_v, const Tensor& o) const {
    const int64_t Sq = q.size(2), Sk = k.size(2);
    Tensor lse = call.lse;
    if (bias) hide_empty_rows(lse = lse.clone());
    const Tensor its_bias = bias.value_or(Tensor());
    if (is_for_cudnn(q, k, of_v, bias, call.causal, limited, call.scale)) {
      const Tensor unused = empty({}, at::kLong, q);
      return cudnn_backward(grad, q, k, of_v, in_cudnn_layout(o, q), lse.unsqueeze(-1), unused, unused, its_bias, {}, {}, Sq,
                            Sk, 0, masked, call.scale);
    }
    if (!by_flash) return efficient_backward(grad, q, k, of_v, o, lse, its_bias, masked, call.scale);
    const auto rows = [](const Tensor& x) { return x.transpose(1, 2); };
    const Tensor unused = empty({2}, at::kUInt64, q);
    const auto [dq, dk, dv] = flash_backward(
        rows(readable(grad, false)), rows(q), rows(k), rows(of_v), rows(o), lse, {}, {}, Sq, Sk, 0, masked, unused, unused,
        call.scale, limited && call.left < 0 ? Sk : call.left, limited && call.right < 0 ? Sk : call.right);
    return {rows(dq), rows(dk), rows(dv)};
  }

  void run(Gradients& d) const {
    if (call.grad) std::tie(d.q, d.k, d.v) = of_product(*call.grad, v, call.o);
    if (!call.grad) d.v = at::zeros_like(v);
    if (!call.grad_lse) return;
    // dLSE adds dLSE * scale * (P @ K) to dQ, and P.T @ (dLSE * scale * Q) to dK. P @ K is the O of a call whose V is K. The
    // sum for dK is dV for dO = dLSE * scale * Q; it does not depend on V, so K is passed for its shape.
    const Tensor factor = (*call.grad_lse * call.scale.value_or(1 / std::sqrt(double(q.size(3))))).unsqueeze(-1);
    const auto scaled = [&](const Tensor& rows) { return (factor * rows).to(rows.scalar_type()); };
    Tensor sums;
    attend({.q = q, .k = k, .v = k, .causal = call.causal, .left = call.left, .right = call.right,
            .window_alignment = call.window_alignment, .scale = call.scale, .bias = bias}, sums);
    const Tensor of_q = scaled(sums), of_k = std::get<2>(of_product(scaled(q), k, sums));
    d.q = d.q.defined() ? d.q + of_q : of_q;
    d.k = d.k.defined() ? d.k + of_k : of_k;
  }
};

// sdpa::attention_backward: computes dQ, dK, dV, dSinks and dBias from O, LSE and their gradients. `without`: the reason for
// having no backward. It is raised when the backward runs, since a compiled graph may contain a backward that never runs.
// choice: attention()'s argument `backward`.
static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    const OptionalTensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
    int64_t causal, int64_t left, int64_t right, int64_t window_alignment, std::optional<double> scale,
    const OptionalTensor& bias, std::string_view without, double cap, const OptionalTensor& sink,
    const OptionalTensor& grad_lse, std::string_view choice, const OptionalTensor& k_lengths,
    const OptionalTensor& q_starts, const OptionalTensor& k_starts, int64_t most_keys, const OptionalTensor& q_lengths,
    const OptionalTensor& k_firsts, std::string_view score_mod, std::string_view mask_mod, const OptionalTensor& x0,
    const OptionalTensor& x1, const OptionalTensor& x2, const OptionalTensor& x3, const OptionalTensor& i0,
    const OptionalTensor& i1, int64_t bias_keys, bool to_bias) {
  TORCH_CHECK_NOT_IMPLEMENTED(without.empty(), "sdpa.attention: ", without);
  const c10::OptionalDeviceGuard guard(q.device());
  const BackwardCall call{{.q = q,
                           .k = k,
                           .v = v,
                           .causal = causal,
                           .left = left,
                           .right = right,
                           .window_alignment = window_alignment,
                           .scale = scale,
                           .softcap = cap,
                           .sinks = sink,
                           .k_lengths = k_lengths,
                           .q_starts = q_starts,
                           .k_starts = k_starts,
                           .most_keys = most_keys,
                           .bias = bias,
                           .bias_keys = bias_keys,
                           .q_lengths = q_lengths,
                           .mods = {.score = std::string(score_mod),
                                    .mask = std::string(mask_mod),
                                    .arrays = {x0, x1, x2, x3, i0, i1}},
                           .k_firsts = k_firsts},
                          grad, o, lse, grad_lse, to_bias};
  Gradients d;
  if (call.is_empty()) {
    d = {at::zeros_like(q), at::zeros_like(k), at::zeros_like(v), at::zeros({sink ? sink->size(0) : 0}, lse.options())};
    if (to_bias) d.bias = at::zeros(bias->sizes(), bias->options());
  } else {
    const PytorchsBackward theirs(call);
    const std::string why_not_theirs = theirs.why_not();
    const bool is_forced = choice == "sdpa" || choice == "deterministic";
    const bool repeats = choice == "deterministic" || is_deterministic();
    // Needed, since PyTorch's kernels are slow or wrong here: with a gradient of LSE they need a second forward and backward,
    // with a float32 bias they compute in float32, and cuDNN may return NaN for some sizes.
    const bool is_needed = is_forced || repeats || grad_lse || !why_not_theirs.empty() ||
                           (bias && is_wide(*bias, q)) || cudnn_may_give_nan(q, bias.value_or(Tensor()));
    std::string why_not_ours = choice == "torch" ? "backward='torch' was asked for" : "";
    if (why_not_ours.empty()) why_not_ours = our_backward(call, is_needed, repeats, d);
    if (!why_not_ours.empty()) {
      TORCH_CHECK_NOT_IMPLEMENTED(!is_forced && why_not_theirs.empty(), "sdpa.attention: no backward, since ", why_not_ours,
                                  is_forced ? "" : "; ", is_forced ? "" : why_not_theirs);
      theirs.run(d);
    }
  }
  for (Tensor* x : {&d.sinks, &d.bias}) {
    if (!x->defined()) *x = empty({0}, at::kFloat, q);
  }
  return {with_strides_of(d.q, q), with_strides_of(d.k, k), with_strides_of(d.v, v), d.sinks, d.bias};
}
