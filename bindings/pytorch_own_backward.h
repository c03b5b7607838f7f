// The gradients by our kernels: the lines with BACKWARD=1 and their launch.

#pragma once

#include <ATen/Context.h>
#include <ATen/ops/zeros.h>

#include "pytorch_attention.h"

struct BackwardLine {
  decltype(&sdpa_library_backward_workspace_bytes) workspace_bytes;
  decltype(&sdpa_library_backward) backward;
  int64_t head_dim;   // D and Dv are padded to it; 0: no padding
  int64_t is_final;   // 1: the next call would get the same answer
  char trouble[512];  // the reason for having no line, or empty
};
// Device, dtype, max(D, Dv), features and the result of requirements_of() for the call; SCORE_MOD and MASK_MOD.
using BackwardKey = std::tuple<std::array<int, 5>, std::string, std::string>;
static auto& backward_lines = *new std::map<BackwardKey, BackwardLine>;
// pytorch.py's function that builds a line if necessary and fills *line. Unless the line is needed, it is refused where
// it is not known to be faster than PyTorch's backward.
using LoadBackward = void (*)(int device, int dtype, int D, int features, int requirements, const char* score_mod,
                              const char* mask_mod, BackwardLine* line);
static LoadBackward load_backward;

static bool is_final(const BackwardLine& line) { return line.is_final != 0; }
static const BackwardLine& backward_line_for(const BackwardKey& key) {
  return loaded_for(backward_lines, key, [&](BackwardLine* line) {
    const auto& [numbers, score_mod, mask_mod] = key;
    const auto [device, dtype, D, features, requirements] = numbers;
    load_backward(device, dtype, D, features, requirements, score_mod.c_str(), mask_mod.c_str(), line);
    if (!line->backward && !*line->trouble) strcpy(line->trouble, interrupted);
  });
}

// 1 if our line is needed, plus 2 if it must be deterministic, plus 4 if there are at most 64 queries and keys.
static int requirements_of(const Tensor& q, const Tensor& k, bool is_needed, bool is_deterministic) {
  return int(is_needed) + 2 * int(is_deterministic) + 4 * int(q.size(2) <= 64 && k.size(2) <= 64);
}

// The arguments and results of the forward, and the gradients of the results.
struct BackwardCall : Call {
  const OptionalTensor& grad;  // of O
  const Tensor &o, &lse;
  const OptionalTensor& grad_lse = no_tensor;
  bool to_bias = false;  // the bias needs a gradient

  // Number of sequences.
  int64_t count() const { return q_starts ? q_starts->numel() - 1 : k_starts ? k_starts->numel() - 1 : q.size(0); }
  // True if all gradients are 0.
  bool is_empty() const { return q.numel() == 0 || k.numel() == 0 || count() == 0; }
};
struct Gradients {
  Tensor q, k, v;
  Tensor sinks{};  // float32
  Tensor bias{};   // like the bias
};

// Returns x, or a copy with rows of D elements that the kernels can read. The padding is 0, which changes no product.
static Tensor padded_rows(const Tensor& x, int64_t D) {
  if (x.size(3) == D) return fit(x) ? x : x.clone(at::MemoryFormat::Contiguous);
  const Tensor padded = at::zeros({x.size(0), x.size(1), x.size(2), D}, x.options());
  padded.narrow(3, 0, x.size(3)).copy_(x);
  return padded;
}
// Returns dx in the layout of x, as the fake kernel promises.
static Tensor with_strides_of(const Tensor& dx, const Tensor& x) {
  const bool already = x.is_non_overlapping_and_dense() && dx.strides() == x.strides();
  return already ? dx : empty_like(x, x.scalar_type()).copy_(dx);
}

// Returns the reason why the kernels cannot read the lengths and starts, or an empty string.
static std::string why_not_lengths(const BackwardCall& call) {
  const int64_t B = call.count();
  const struct {
    const char* name;
    const OptionalTensor& x;
    int64_t size;
  } all[] = {{"k_lengths", call.k_lengths, B},
             {"q_starts", call.q_starts, B + 1},
             {"k_starts", call.k_starts, B + 1},
             {"q_lengths", call.q_lengths, B},
             {"k_firsts", call.k_firsts, B}};
  for (const auto& [name, x, size] : all) {
    if (x && (x->scalar_type() != at::kInt || x->device() != call.q.device() || !x->is_contiguous() || x->dim() != 1 ||
              x->size(0) != size)) {
      return c10::str(name, " is not a contiguous int32 tensor [", size, "] on q's device");
    }
  }
  for (const auto& [x, starts] : {std::tie(call.q, call.q_starts), std::tie(call.k, call.k_starts)}) {
    const int64_t batches = starts ? 1 : B;
    if (x.size(0) != batches) return c10::str("q or k has a batch of ", x.size(0), ", not ", batches);
  }
  return "";
}

// Allocates the gradient of the bias in the layout that the kernel writes, [B or 1,Hq or 1,Sq or 1,keys or 1], and sets the
// members of p. Returns the reason for refusing, or an empty string.
static std::string set_bias_gradient(SdpaBackwardParams& p, const BackwardCall& call, at::ScalarType type, Tensor& written) {
  if (call.q_starts || call.k_starts) return "a bias of packed sequences has no gradient";
  if (call.bias_keys && call.has_lengths()) return "a bias of bias_keys has no gradient with lengths";
  std::array<int64_t, 4> sizes{1, 1, 1, 1};
  const auto given = call.bias->sizes();
  std::copy(given.begin(), given.end(), sizes.end() - given.size());
  written = empty(sizes, type, call.q);
  const auto kept = [&](int dim) { return sizes[dim] > 1 ? written.stride(dim) : 0; };
  p.dBias = written.mutable_data_ptr();
  p.d_bias = {kept(0), kept(1), kept(2)};
  p.dBias_sums_keys = sizes[3] == 1;
  return "";
}

// Enqueues the kernels that compute the gradients. The forward has checked the shapes. Returns the reason for refusing, or an
// empty string.
static std::string our_backward(const BackwardCall& call, bool is_needed, bool is_deterministic, Gradients& d) {
  const Tensor& q_any = call.q;
  if (!q_any.is_cuda() && !on_cpu) return c10::str("a tensor is on ", q_any.device());
  if (call.v.element_size() == 1) return "there is none for e4m3";
  if (const std::string why = why_not_lengths(call); !why.empty()) return why;
  OptionalTensor bias;  // as the kernel reads it
  if (call.bias) {
    const int64_t keys = call.most_keys ? std::min(call.most_keys, call.k.size(2)) : call.k.size(2);
    bias = bias_of(call.bias->detach(), q_any, call.bias_keys ? call.bias_keys : keys);
  }
  const int features = (call.softcap != 0 ? use_softcap : 0) | (call.sinks ? use_sinks : 0) |
                       (call.has_lengths() ? use_lengths : 0) |
                       (bias ? feature_of(*bias, true) : 0);  // the kernels have no masks or biases of keys
  const int most = int(std::max(q_any.size(3), call.v.size(3)));
  const BackwardLine& line = backward_line_for(
      {{q_any.get_device(), dtype_of(q_any), most, features, requirements_of(q_any, call.k, is_needed, is_deterministic)},
       call.mods.score,
       call.mods.mask});
  if (!line.backward) return line.trouble;

  const auto padded = [&](const Tensor& x) { return padded_rows(x, line.head_dim ? line.head_dim : x.size(3)); };
  const Tensor q = padded(q_any), k = padded(call.k), v = padded(call.v);
  const Tensor o = padded(call.o), lse = call.lse.contiguous();
  const Tensor zero = call.grad ? Tensor() : at::zeros({1, 1, 1, v.size(3)}, q.options());
  const Tensor grad = call.grad ? padded(*call.grad) : zero.expand(o.sizes());
  const auto result = [](const Tensor& x, const Tensor& with_padding) {
    const bool as_x = with_padding.size(3) == x.size(3) && x.is_non_overlapping_and_dense() && fit(x);
    return as_x ? empty_like(x, x.scalar_type()) : empty(with_padding.sizes(), x.scalar_type(), x);
  };
  const Tensor dq = result(q_any, q), dk = result(call.k, k), dv = result(call.v, v);

  SdpaBackwardParams p{};
  SdpaParams& of = p.forward;
  set_mask(of, call);
  of.scale = scale_of(call.scale.value_or(1 / std::sqrt(double(q_any.size(3)))));  // without padding
  set_arrays(of, call.mods, q_any);
  const auto ints = [](const OptionalTensor& x) { return x ? x->const_data_ptr<int>() : nullptr; };
  of.k_lengths = ints(call.k_lengths);
  of.q_starts = ints(call.q_starts);
  of.k_starts = ints(call.k_starts);
  of.q_lengths = ints(call.q_lengths);
  of.k_firsts = ints(call.k_firsts);
  if (call.q_starts || call.k_starts) of.B = int(call.count());
  set_tensors(of, q, k, v, o, lse, {});
  of.Hkv = int(k.size(1));  // each head has its own gradient, even if heads are expanded
  p.dO = grad.const_data_ptr();
  p.d_o = strides_of(grad);
  p.dQ = dq.mutable_data_ptr();
  p.d_q = strides_of(dq);
  p.dK = dk.mutable_data_ptr();
  p.d_k = strides_of(dk);
  p.dV = dv.mutable_data_ptr();
  p.d_v = strides_of(dv);
  Tensor grad_lse, sinks;
  if (call.grad_lse) {
    grad_lse = call.grad_lse->to(at::kFloat).contiguous();
    p.dLSE = grad_lse.const_data_ptr<float>();
  }
  if (call.sinks) {
    sinks = call.sinks->to(at::kFloat).contiguous();
    of.sinks = sinks.const_data_ptr<float>();
    d.sinks = empty({q.size(1)}, at::kFloat, q);
    p.dSinks = d.sinks.mutable_data_ptr<float>();
  }
  Tensor d_bias;
  if (bias) {
    set_bias(of, *bias);
    of.bias_keys = int(call.bias_keys);
  }
  if (call.to_bias) {
    const std::string why = set_bias_gradient(p, call, bias->scalar_type(), d_bias);
    if (!why.empty()) return why;
  }
  const LaunchStream at(q);
  Tensor workspace;  // may be freed after the launch is enqueued: later work on the stream may reuse it
  if (const size_t bytes = line.workspace_bytes(&of)) {
    workspace = empty({int64_t(bytes)}, at::kByte, q);
    p.workspace = workspace.mutable_data_ptr();
  }
  char text[256];
  if (line.backward(&p, at.stream, text, sizeof text)) return text;
  const auto without_padding = [](const Tensor& dx, const Tensor& x) {
    return with_strides_of(dx.size(3) == x.size(3) ? dx : dx.narrow(3, 0, x.size(3)), x);
  };
  d.q = without_padding(dq, q_any);
  d.k = without_padding(dk, call.k);
  d.v = without_padding(dv, call.v);
  if (call.to_bias) d.bias = d_bias.view(call.bias->sizes()).to(call.bias->scalar_type());
  return "";
}
