// Autograd and autocast of sdpa::attention. They are boxed kernels, which get the arguments as a stack. at_...: the index of an
// argument in the schema in pytorch.py.

#pragma once

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "pytorch_attention.h"

// Declared as in ATen/autocast_mode.h. That header includes those of all operators, a quarter of the compile time.
namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);
}

using torch::autograd::variable_list;
constexpr int at_causal = 3, at_softcap = 8, at_sinks = 12, at_k_lengths = 13, at_q_starts = 14, at_k_starts = 15,
              at_page_table = 16, at_most_keys = 17, at_bias = 18, at_bias_keys = 19, at_q_lengths = 20, at_score_mod = 23,
              at_mask_mod = 24, at_x0 = 25, at_i1 = 30, at_k_firsts = 33, at_backward = 34, arguments = 35;

// Calls one of our operators and returns its results. Integers may be symbols of a traced graph.
static torch::jit::Stack called(const char* name, torch::jit::Stack stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
  return stack;
}

// Returns O of sdpa::attention with a bias, called through the dispatcher, so that autograd records it.
static Tensor attention_with_bias(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias,
                                  std::optional<double> scale) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("sdpa::attention", "");
  const c10::IValue none;
  torch::jit::Stack stack{q, k, v, SDPA_CAUSAL_OFF, -1, -1, SDPA_CAUSAL_OFF, scale, 0.0};
  while (stack.size() < at_most_keys) stack.push_back(none);
  stack.insert(stack.end(), {0, bias});
  for (size_t i = stack.size(); i < arguments; i++) stack.push_back(*op.schema().arguments()[i].default_value());
  op.callBoxed(stack);
  return stack[0].toTensor();
}

struct Attention : torch::autograd::Function<Attention> {
  // tensors: q, k, v, and the other tensors that require a gradient.
  static variable_list forward(torch::autograd::AutogradContext* ctx, at::TensorList tensors,
                               const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto argument = [&](int at) -> const c10::IValue& { return (*stack)[stack->size() - arguments + at]; };
    const auto bias = argument(at_bias).toOptional<Tensor>(), sink = argument(at_sinks).toOptional<Tensor>();
    const bool to_bias = bias && bias->requires_grad(), to_sinks = sink && sink->requires_grad();
    bool has_none = tensors.size() > 3 + size_t(to_bias) + size_t(to_sinks) ||
                    tensors[2].scalar_type() == at::kFloat8_e4m3fn;
    has_none = has_none || !argument(at_page_table).isNone();
    const auto of_lengths = {at_k_lengths, at_q_starts, at_k_starts, at_q_lengths, at_k_firsts};
    auto& data = ctx->saved_data;
    data["without"] = has_none ? "no backward for e4m3, pages" : "";
    for (int i = 0; i < 5; i++) data["mask" + std::to_string(i)] = argument(at_causal + i);
    data["softcap"] = argument(at_softcap);
    data["backward"] = argument(at_backward);
    data["most_keys"] = argument(at_most_keys);
    data["bias_keys"] = argument(at_bias_keys);
    data["score_mod"] = argument(at_score_mod);
    data["mask_mod"] = argument(at_mask_mod);
    std::vector<Tensor> others;  // the lengths, and the arrays of the expressions
    for (const int i : of_lengths) others.push_back(argument(i).toOptional<Tensor>().value_or(Tensor()));
    for (int i = at_x0; i <= at_i1; i++) others.push_back(argument(i).toOptional<Tensor>().value_or(Tensor()));
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
    }
    const Tensor lse = torch::jit::pop(*stack).toTensor(), o = torch::jit::pop(*stack).toTensor();
    variable_list saved{tensors[0], tensors[1], tensors[2], o, lse, bias.value_or(Tensor()), sink.value_or(Tensor())};
    saved.insert(saved.end(), others.begin(), others.end());
    ctx->save_for_backward(saved);
    ctx->set_materialize_grads(false);  // LSE rarely has a gradient
    data["tensors"] = int64_t(tensors.size());
    data["to_sinks"] = to_sinks;
    data["to_bias"] = to_bias;
    return {o, lse};
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, variable_list grads) {
    auto& data = ctx->saved_data;
    variable_list out(data["tensors"].toInt() + 3);  // + 3: op, keys and stack, which have no gradient
    if (!grads[0].defined() && !grads[1].defined()) return out;
    const variable_list x = ctx->get_saved_variables();
    const auto given = [](const Tensor& tensor) { return tensor.defined() ? c10::IValue(tensor) : c10::IValue(); };
    torch::jit::Stack stack{given(grads[0]), x[0], x[1], x[2], x[3], x[4]};
    for (int i = 0; i < 5; i++) stack.push_back(data["mask" + std::to_string(i)]);
    stack.insert(stack.end(), {given(x[5]), data["without"], data["softcap"], given(x[6]), given(grads[1]),
                               data["backward"], given(x[7]), given(x[8]), given(x[9]), data["most_keys"], given(x[10]),
                               given(x[11]), data["score_mod"], data["mask_mod"]});
    for (int i = 12; i < 18; i++) stack.push_back(given(x[i]));
    stack.insert(stack.end(), {data["bias_keys"], data["to_bias"]});
    const auto d = called("sdpa::attention_backward", std::move(stack));
    for (int i = 0; i < 3; i++) out[i] = d[i].toTensor();
    // After q, k and v, `tensors` may contain the sinks and the bias, in this order.
    const bool to_sinks = data["to_sinks"].toBool();
    if (to_sinks) out[3] = d[3].toTensor().to(x[6].scalar_type());
    if (data["to_bias"].toBool()) out[3 + to_sinks] = d[4].toTensor();
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
    // Refused here and not in the backward: a compiled graph would drop a backward without a gradient of the array.
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

// Converts q, k and v, the first three arguments, to the type of autocast, as F.scaled_dot_product_attention does. e4m3 and
// float64 are not converted.
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
