// Autograd and autocast of sdpa::attention. They take the operator's arguments as a stack and know only those that they
// need.

#pragma once

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "pytorch_attention.h"

using torch::autograd::variable_list;
// Places of the operator's arguments.
constexpr int at_causal = 3, at_softcap = 8, at_sinks = 12, at_page_table = 16, at_bias = 18, at_q_lengths = 20,
              at_score_mod = 23, at_mask_mod = 24, at_x0 = 25, at_i1 = 30, at_k_firsts = 33, arguments = 34;

// What an operator of ours gives, whose numbers may be a graph's symbols.
static torch::jit::Stack called(const char* name, torch::jit::Stack stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
  return stack;
}

struct Attention : torch::autograd::Function<Attention> {
  static variable_list forward(torch::autograd::AutogradContext* ctx, at::TensorList tensors,
                               const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto argument = [&](int at) -> const c10::IValue& { return (*stack)[stack->size() - arguments + at]; };
    const auto is_given = [&](int at, int64_t least) { return argument(at).toSymInt() >= least; };
    const auto bias = argument(at_bias).toOptional<Tensor>();
    const bool to_bias = bias && bias->requires_grad();
    bool has_none = argument(at_softcap).toDouble() != 0 || tensors.size() > 3 + size_t(to_bias) ||
                    tensors[2].scalar_type() == at::kFloat8_e4m3fn;
    for (int i = at_sinks; i <= at_page_table; i++) has_none = has_none || !argument(i).isNone();
    has_none = has_none || !argument(at_q_lengths).isNone() || !argument(at_k_firsts).isNone() || !argument(at_score_mod).toStringRef().empty() ||
               !argument(at_mask_mod).toStringRef().empty();
    const bool bias_has_none = to_bias || (bias && (argument(at_causal).toInt() != 0 || is_given(at_causal + 1, 0) ||
                                                    is_given(at_causal + 2, 0) || is_given(at_bias + 1, 1)));
    ctx->saved_data["without"] =
        has_none ? "no backward for e4m3, softcap, sinks, lengths, starts, pages, score_mod, mask_mod"
        : bias_has_none ? "no gradient of a bias, and no backward for one beside a causal mask, a window or bias_keys"
                        : "";
    static const char* const names[] = {"causal", "left", "right", "window_alignment", "scale"};
    for (int i = 0; i < 5; i++) ctx->saved_data[names[i]] = argument(at_causal + i);
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
    }
    const Tensor lse = torch::jit::pop(*stack).toTensor(), o = torch::jit::pop(*stack).toTensor();
    ctx->save_for_backward({tensors[0], tensors[1], tensors[2], o, lse, bias.value_or(Tensor())});
    ctx->set_materialize_grads(false);  // of LSE, which few use
    ctx->saved_data["tensors"] = int64_t(tensors.size());
    return {o, lse};
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, variable_list grads) {
    auto& data = ctx->saved_data;
    const variable_list x = ctx->get_saved_variables();
    const Tensor &q = x[0], &k = x[1], of_o = grads[0], of_lse = grads[1];
    const c10::IValue none, bias = x[5].defined() ? c10::IValue(x[5]) : none;
    const auto &causal = data["causal"], &left = data["left"], &right = data["right"], &by = data["window_alignment"];
    const auto &scale = data["scale"], &without = data["without"];
    // {dq, dk, dv} of O = P @ v.
    const auto of_product = [&](const Tensor& grad, const Tensor& v, const Tensor& o) {
      return called("sdpa::attention_backward", {grad, q, k, v, o, x[4], causal, left, right, by, scale, bias, without});
    };
    variable_list out(data["tensors"].toInt() + 3);  // and of op, keys and stack
    if (of_o.defined() || (of_lse.defined() && !without.toStringRef().empty())) {
      const auto d = of_product(of_o.defined() ? of_o : x[3], x[2], x[3]);
      for (int i = 0; i < 3; i++) out[i] = d[i].toTensor();
    }
    // LSE's are scale * P @ k, and of k scale * P.T @ q: P.T @ (dLSE * scale * q) is dv of a product whose v is k.
    if (of_lse.defined() && without.toStringRef().empty()) {
      const double by_default = 1 / std::sqrt(double(q.sym_size(3).guard_int(__FILE__, __LINE__)));
      const Tensor factor = (of_lse * scale.toOptional<double>().value_or(by_default)).unsqueeze(-1);
      const auto scaled = [&](const Tensor& rows) { return (factor * rows).to(rows.scalar_type()); };
      const std::string empty;
      const Tensor sums = called("sdpa::attention", {q, k, k, causal, left, right, by, scale, 0.0, none, none, none, none,
                                                     none, none, none, none, 0, bias, 0, none, false, false, empty, empty,
                                                     none, none, none, none, none, none, none, empty, none})[0]
                              .toTensor();
      const Tensor d[] = {scaled(sums), of_product(scaled(q), k, sums)[2].toTensor()};
      for (int i = 0; i < 2; i++) out[i] = out[i].defined() ? out[i] + d[i] : d[i];
    }
    return out;
  }
};

static void attention_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t first = stack->size() - arguments;
  variable_list tensors;
  bool requires_grad = false;
  for (int i = 0; i <= at_i1; i++) {
    const c10::IValue& x = (*stack)[first + i];
    if (!x.isTensor() || !x.toTensor().defined()) continue;
    TORCH_CHECK_NOT_IMPLEMENTED(!x.toTensor()._fw_grad(0).defined(), "sdpa.attention: no forward-mode derivative");
    // Refused before the launch: a compiled graph would drop a backward that gives an array no gradient.
    TORCH_CHECK(i < at_x0 || !x.toTensor().requires_grad() || !at::GradMode::is_enabled(),
                "sdpa.attention: no gradient of args; detach them");
    if (i > at_softcap && !x.toTensor().requires_grad()) continue;
    tensors.push_back(x.toTensor());
    requires_grad = requires_grad || tensors.back().requires_grad();
  }
  if (!requires_grad || !at::GradMode::is_enabled()) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }
  variable_list outputs = Attention::apply(at::TensorList(tensors), op, keys, stack);
  torch::jit::push(*stack, std::move(outputs[0]), std::move(outputs[1]));
}

// As PyTorch does of its own function: q, k and v, the first arguments, become autocast's type, but not from 8 bits or
// doubles.
static void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  const size_t first = stack->size() - op.schema().arguments().size();
  for (size_t i = first; i < first + 3; i++) {
    const Tensor x = (*stack)[i].toTensor();
    if (x.element_size() == 1) continue;
    (*stack)[i] = at::autocast::cached_cast(at::autocast::get_autocast_dtype(at::kCUDA), x, at::kCUDA);
  }
  op.callBoxed(stack);
}
