// The C++ part of pytorch.py, between PyTorch's dispatcher and the C functions of sdpa.h. In Python, a call would take longer
// than a small kernel. It contains no kernels: pytorch.py builds them and passes pointers to their functions. This file
// registers the operators that the headers implement.

#include "pytorch.h"
#include "pytorch_append.h"
#include "pytorch_attention.h"
#include "pytorch_autograd.h"
#include "pytorch_backward.h"
#include "pytorch_operators.h"
#include "pytorch_own_backward.h"

TORCH_LIBRARY_IMPL(sdpa, CUDA, m) {
  m.impl("attention", with_call<attention>);
  m.impl("block_mask", with_call<block_mask>);
  m.impl("attention_backward", attention_backward);
  m.impl("append", append);
}
TORCH_LIBRARY_IMPL(sdpa, Autograd, m) {
  m.impl("attention", torch::CppFunction::makeFromBoxedFunction<&attention_autograd>());
  m.impl("attention_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("append", append_autograd);
}
TORCH_LIBRARY_IMPL(sdpa, AutocastCUDA, m) {
  m.impl("attention", torch::CppFunction::makeFromBoxedFunction<&autocast>());
  m.impl("block_mask", torch::CppFunction::makeFromBoxedFunction<&autocast>());
  m.impl("why_not", torch::CppFunction::makeFromBoxedFunction<&autocast>());
}
TORCH_LIBRARY_IMPL(sdpa, CompositeExplicitAutograd, m) {
  m.impl("why_not", why_not_op);
  m.impl("bias_of", [](const Tensor& x, const Tensor& q, int64_t keys, bool cudnns) {
    return cudnns ? for_cudnn(bias_of(x, q, keys), q) : bias_of(x, q, keys);
  });
}

extern "C" {

void sdpa_torch_load_lines_by(Load function) { load = function; }
void sdpa_torch_load_appender_by(LoadAppender function) { load_appender = function; }
void sdpa_torch_load_backward_by(LoadBackward function) { load_backward = function; }
void sdpa_torch_prefer_backward(int number) { preference = Preference(number); }

// Registers our kernels for PyTorch's operators, or removes them.
void sdpa_torch_activate(bool on) {
  static std::unique_ptr<torch::Library> library, composite;
  library.reset();
  composite.reset();
  if (!on) return;
  struct : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } quiet;  // no warning that a kernel is overridden
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  register_operators(*library);
  const auto for_all = c10::DispatchKey::CompositeImplicitAutograd;
  composite = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", for_all, __FILE__, __LINE__);
  composite->impl("scaled_dot_product_attention", chosen);
}

// For tests without a GPU: registers these operators and sdpa's own ones for tensors on the CPU. The test's loaders
// (Load, LoadAppender, LoadBackward) return functions that run on the CPU.
void sdpa_torch_activate_on_cpu(bool on) {
  static std::unique_ptr<torch::Library> library, own;
  library.reset();
  own.reset();
  on_cpu = on;
  if (!on) return;
  const auto key = c10::DispatchKey::CPU;
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  register_operators(*library);
  own = std::make_unique<torch::Library>(torch::Library::IMPL, "sdpa", key, __FILE__, __LINE__);
  own->impl("attention", with_call<attention>);
  own->impl("block_mask", with_call<block_mask>);
  own->impl("attention_backward", attention_backward);
  own->impl("append", append);
}
}
