// The compiled half of pytorch.py: what is between PyTorch's dispatcher and the C functions of sdpa.h, in C++ because a
// call in Python costs more than a small kernel. It knows no kernel; pytorch.py builds them and hands over their
// functions.

#include <ATen/core/Tensor.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/SDPBackend.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/_cudnn_attention_backward.h>
#include <ATen/ops/_cudnn_attention_forward.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward_native.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/env.h>
#include <cuda_runtime.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
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

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "append.h"
#include "sdpa.h"

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// ---- the lines ----

struct Line {
  decltype(&sdpa_library_workspace_bytes) workspace_bytes;
  decltype(&sdpa_library_scratch_bytes) scratch_bytes;
  decltype(&sdpa_library_forward) forward;
  decltype(&sdpa_library_bias_map_bytes) bias_map_bytes;
  decltype(&sdpa_library_map_bias) map_bias;
  char trouble[512];  // why there is none
};
enum Feature {
  softcap = 1,
  sinks = 2,
  lengths = 4,
  pages = 8,
  biases = 16,
  masks = 32,
  bf16_out = 64,
  kv_in_8_bits = 128,
  biases_in_fp32 = 256,
  any_pages = 512,  // instead of pages
  key_mask = 1024
};  // of what a problem asks beyond a line's own: builds of their own
// The arguments of attention() that modify scores, and a kept map of the tiles that are hidden.
struct Mods {
  std::string score{}, mask{};             // expressions; empty: none
  std::array<OptionalTensor, 6> arrays{};  // x0 to x3, i0, i1
  OptionalTensor block_mask{};
  std::string made_for{};  // dependencies_of() the map
};
// Device, dtype, D, D of v, features, SCORE_MOD and MASK_MOD.
using LineKey = std::tuple<std::array<int, 5>, std::string, std::string>;
static auto& lines = *new std::map<LineKey, Line>;
static std::mutex mutex;  // of `lines`

// A test's switch: attend() takes tensors on the CPU too, for kernels that run there.
static bool on_cpu = false;

// pytorch.py's: builds a line if need be, and fills what it is given. Called without the mutex, since it takes the GIL.
using Load = void (*)(int device, int dtype, int D, int Dv, int features, const char* score_mod, const char* mask_mod,
                      Line* line);
static Load load;

static LineKey key_of(const Tensor& q, const Tensor& v, int features, const Mods& mods) {
  if (v.scalar_type() != q.scalar_type()) features |= kv_in_8_bits;
  const int dtype = q.scalar_type() == at::kHalf ? 0 : q.scalar_type() == at::kBFloat16 ? 1 : 2;
  return {{q.get_device(), dtype, int(q.size(3)), int(v.size(3)), features}, mods.score, mods.mask};
}

static const Line& line_for(const LineKey& key) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = lines.find(key);
    if (found != lines.end()) return found->second;
  }
  thread_local Line loaded;
  loaded = {};
  const auto& [numbers, score_mod, mask_mod] = key;
  const auto [device, dtype, D, Dv, features] = numbers;
  load(device, dtype, D, Dv, features, score_mod.c_str(), mask_mod.c_str(), &loaded);
  if (!loaded.forward && !*loaded.trouble) strcpy(loaded.trouble, "the line was not built, since it was interrupted");
  if (!loaded.forward) return loaded;  // the next call asks again
  const std::lock_guard<std::mutex> lock(mutex);
  return lines.emplace(key, loaded).first->second;
}

// ---- what no line takes ----

// Of these functions each says in one sentence why not; an empty one means that nothing stands against it.

// The tensors' shapes and types, on whatever device. own: of attention(), which has e4m3 and sizes between the lines'.
static std::string why_not_tensors(const Tensor& q, const Tensor& k, const Tensor& v, bool own, bool has_lengths) {
  for (const Tensor* x : {&q, &k, &v}) {
    if (x->dim() != 4) return c10::str("a tensor has ", x->dim(), " dimensions, not [B,H,S,D]");
    if (x->device() != q.device()) return c10::str("tensors are on ", q.device(), " and ", x->device());
    if (x->scalar_type() != (x == &q ? q : v).scalar_type()) return "q, k and v have different dtypes";
    if ((x != &v && x->size(3) != q.size(3)) || (!has_lengths && x->size(0) != q.size(0)))
      return "q, k and v differ in B or D";
  }
  const auto type = q.scalar_type();
  if (type != at::kHalf && type != at::kBFloat16 && !(own && type == at::kFloat8_e4m3fn)) {
    return c10::str("there is no line for ", type);
  }
  const bool mixed = v.scalar_type() != type;
  if (mixed && !(own && v.scalar_type() == at::kFloat8_e4m3fn)) return "q, k and v have different dtypes";
  for (const int64_t D : {q.size(3), v.size(3)}) {
    if (D <= 0 || D > 256 || D % (16 / v.element_size())) return c10::str("there is no line for D=", D);
  }
  if (!own && v.size(3) != q.size(3)) return "q, k and v differ in B or D";
  if (k.sizes().slice(0, 3) != v.sizes().slice(0, 3)) return "k and v have different shapes";
  if (k.size(1) == 0 || q.size(1) % k.size(1)) return "the heads of q are no multiple of those of k";
  for (const int64_t size : {q.size(0), q.size(1), q.size(2), k.size(2)}) {
    if (size > 1000000000) return "a dimension is over 10^9";
  }
  return "";
}

static std::string why_not_scale(std::optional<double> scale) {
  if (!scale || (*scale >= 0 && *scale < 1e38)) return "";
  return c10::str("scale=", *scale, " is not from 0 to 10^38");
}

static std::string why_not_line(const Tensor& q, const Tensor& v, int features, const Mods& mods = {}) {
  if (!q.is_cuda() && !on_cpu) return c10::str("a tensor is on ", q.device(), "; sdpa's kernels run on CUDA devices");
  return line_for(key_of(q, v, features, mods)).trouble;
}

// Whether all rows start at a multiple of 16 bytes and are contiguous, as the kernels' copies need.
static bool fit(const Tensor& x) {
  bool all = x.stride(3) == 1 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  for (int i = 0; i < 3; i++) all = all && (x.size(i) <= 1 || x.stride(i) * x.element_size() % 16 == 0);
  return all;
}
static const char* const bad_rows =
    "the rows of q, k or v are not contiguous or do not all start at a multiple of 16 bytes";

// Whether a dimension from first to last has been expanded, so that its elements are one.
static bool is_expanded(const Tensor& x, int first, int last) {
  for (int i = first; i <= last; i++) {
    if (x.size(i) > 1 && x.stride(i) == 0) return true;
  }
  return false;
}

// x, or a copy that kernels can read. Ours read expanded batches and heads of k and v as they are, PyTorch's do not.
static Tensor readable(const Tensor& x, bool may_be_expanded) {
  return fit(x) && !is_expanded(x, may_be_expanded ? 2 : 0, 2) ? x : x.clone(at::MemoryFormat::Contiguous);
}

// True if all heads and queries share the mask, so that it hides keys of a batch.
static bool is_of_keys(const Tensor& mask) {
  const auto is_shared = [&](int64_t dim) { return dim < 0 || mask.size(dim) == 1 || mask.stride(dim) == 0; };
  return mask.scalar_type() == at::kBool && is_shared(mask.dim() - 2) && is_shared(mask.dim() - 3);
}
// Builds that count keys by sequences take masks of keys as those of queries.
static int feature_of(const Tensor& bias, bool has_lengths) {
  if (bias.scalar_type() == at::kFloat) return biases_in_fp32;
  return bias.scalar_type() != at::kBool ? biases : is_of_keys(bias) && !has_lengths ? key_mask : masks;
}

// Whether x is a mask (bool, true: visible) or an additive bias for these queries and keys of [B,Hq].
static std::string why_not_bias(const char* name, const Tensor& x, const Tensor& q, int64_t B, int64_t queries,
                                int64_t keys) {
  if (x.device() != q.device()) return c10::str(name, " is on ", x.device(), ", not beside q");
  const at::ScalarType types[] = {at::kBool, at::kFloat, at::kHalf, at::kBFloat16};
  if (std::count(std::begin(types), std::end(types), x.scalar_type()) == 0) {
    return c10::str(name, " is of ", x.scalar_type(), ", not bool, float32, float16 or bfloat16");
  }
  const int64_t sizes[] = {B, q.size(1), queries, keys};
  if (at::is_expandable_to(x.sizes(), sizes)) return "";
  return c10::str(name, " is of shape ", x.sizes(), ", which does not expand to ", at::IntArrayRef(sizes));
}

// The bias as kernels read it, [B or 1,Hq or 1,queries or 1,keys]: bool, of q's type or float32, with contiguous keys. Returns
// a view if x has such a type and layout. Another 16-bit type becomes float32. Expanded dimensions get size 1.
static Tensor bias_of(const Tensor& x, const Tensor& q, int64_t keys) {
  Tensor bias = x;
  while (bias.dim() < 4) bias = bias.unsqueeze(0);
  for (int i = 0; i < 3; i++) {
    if (bias.stride(i) == 0 && bias.size(i) > 1) bias = bias.narrow(i, 0, 1);
  }
  if (bias.scalar_type() != at::kBool && bias.scalar_type() != q.scalar_type()) bias = bias.to(at::kFloat);
  if (bias.size(3) == keys && (bias.stride(3) == 1 || keys <= 1)) return bias;
  return bias.expand({bias.size(0), bias.size(1), bias.size(2), keys}).contiguous();
}

// What F.scaled_dot_product_attention asks of one of the operators that it chooses from.
struct Asked {
  at::SDPBackend behind;  // whose operator it is
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

// PyTorch's setting by which cuDNN's backward takes an LSE that lies otherwise than ours.
static bool lse_lies_otherwise() {
  static const bool it_does = c10::utils::check_env("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == true;
  return it_does;
}

// Why a problem of F.scaled_dot_product_attention's runs PyTorch's own kernel: this decides, and why_not() says it.
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
    if (asked.behind == at::SDPBackend::cudnn_attention && lse_lies_otherwise()) {
      return "gradients are needed, and TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 lets cuDNN's backward take its own LSE alone";
    }
    const bool is_efficients = asked.behind == at::SDPBackend::efficient_attention;
    if (is_efficients && asked.mask && asked.mask->is_floating_point() &&
        asked.mask->scalar_type() != q.scalar_type()) {
      return "gradients are needed, and PyTorch's memory-efficient backward takes an attn_mask of q's type alone";
    }
  }
  return why_not_line(q, v, asked.mask ? feature_of(*asked.mask, false) : 0);
}

// What F.scaled_dot_product_attention is given, as PyTorch's fused kernels take it: tensors of four dimensions of one
// batch with contiguous rows, and a mask of four with contiguous keys. All else PyTorch leaves to its math kernel.
struct Given {
  Tensor q, k, v;
  OptionalTensor mask;
  bool is_3d = false;  // O is then, too

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

static std::string why_not_op(const Tensor& q_any, const Tensor& k_any, const Tensor& v_any,
                              const OptionalTensor& mask_any, double dropout, bool causal, std::optional<double> scale,
                              bool gqa) {
  const auto [q, k, v, mask, is_3d] = Given(q_any, k_any, v_any, mask_any);
  const bool on_gpu = q.is_cuda() && k.is_cuda() && v.is_cuda();
  auto choice = at::SDPBackend::cudnn_attention;
  try {
    if (on_gpu) choice = at::SDPBackend(at::_fused_sdp_choice(q, k, v, mask, dropout, causal, scale, gqa));
  } catch (const c10::Error&) {  // those that take it are disabled
    choice = at::SDPBackend::error;
  }
  const std::string why = why_not(q, k, v, {choice, mask, dropout, causal, false, needs_grad(q, k, v), scale});
  if (choice == at::SDPBackend::error && why.empty()) return "PyTorch has no kernel: those that take this are disabled";
  if (!why.empty() || choice != at::SDPBackend::math) return why;
  return "PyTorch chooses its math kernel: the others are disabled or do not take this";
}

// ---- the state between launches ----

#if CUDART_VERSION < 13000
#define cudaStreamGetCaptureInfo cudaStreamGetCaptureInfo_v2
#endif

constexpr size_t state_bytes = 65536;  // the largest workspace beside scratch memory, as sdpa.h says
struct GraphState {
  void* data = nullptr;
  unsigned long long capture = 0;
};
using Place = std::pair<int, cudaStream_t>;                    // a device, and a stream of it
static auto& stream_states = *new std::map<Place, void*>;      // never destroyed: CUDA may be gone by then
static auto& graph_states = *new std::map<Place, GraphState>;  // of the newest capture
static std::mutex states_mutex;                                // of both
static auto& of_dead_graphs = *new std::vector<void*>;
static std::mutex of_dead_graphs_mutex;

// Plain memory: PyTorch's belongs to the pool in use, a graph's or torch.cuda.use_mem_pool()'s.
static void* allocated_state() {
  void* data = nullptr;
  for (const bool again : {false, true}) {
    if (again) c10::cuda::CUDACachingAllocator::emptyCache();
    const cudaError_t error = cudaMalloc(&data, state_bytes);
    if (error != cudaErrorMemoryAllocation) {
      C10_CUDA_CHECK(error);
      return data;
    }
    (void)cudaGetLastError();
  }
  TORCH_CHECK_WITH(OutOfMemoryError, false, "sdpa: the GPU has no memory for a workspace of ", state_bytes, " bytes");
}

// One that the graph owns. It is zeroed here and now: as a node of the graph that would cost each replay a launch.
static void* graph_state(GraphState& state, cudaStream_t captured) {
  cudaStreamCaptureStatus status;
  unsigned long long capture = 0;
  cudaGraph_t graph = nullptr;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(captured, &status, &capture, &graph));
  if (state.capture == capture) return state.data;
  void* data = allocated_state();
  const auto free_later = [](void* dead) {  // CUDA may not be called here
    const std::lock_guard<std::mutex> lock(of_dead_graphs_mutex);
    of_dead_graphs.push_back(dead);
  };
  cudaUserObject_t owner;
  C10_CUDA_CHECK(cudaUserObjectCreate(&owner, data, free_later, 1, cudaUserObjectNoDestructorSync));
  C10_CUDA_CHECK(cudaGraphRetainUserObject(graph, owner, 1, cudaGraphUserObjectMove));
  cudaStream_t stream;
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  C10_CUDA_CHECK(cudaMemsetAsync(data, 0, state_bytes, stream));
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  C10_CUDA_CHECK(cudaStreamDestroy(stream));
  state = {data, capture};
  return data;
}

static void free_of_dead_graphs() {
  std::vector<void*> dead;
  {
    const std::lock_guard<std::mutex> lock(of_dead_graphs_mutex);
    dead.swap(of_dead_graphs);
  }
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);  // for another thread's capture
  for (void* data : dead) C10_CUDA_CHECK(cudaFree(data));
}

static void* stream_state(void*& state, cudaStream_t stream) {
  if (state) return state;
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);  // for another thread's capture
  void* data = allocated_state();
  C10_CUDA_CHECK(cudaMemsetAsync(data, 0, state_bytes, stream));
  return state = data;
}

// The workspace of a launch beside scratch memory: the stream's, or the graph's that the launch is captured into.
// Launches of all lines share it, since each finds it zero and leaves it zero.
static void* state_of(cudaStream_t stream, bool captured) {
  const std::lock_guard<std::mutex> lock(states_mutex);
  if (!captured) free_of_dead_graphs();
  const Place place{c10::cuda::current_device(), stream};
  return captured ? graph_state(graph_states[place], stream) : stream_state(stream_states[place], stream);
}

// ---- a launch ----

// Tensors beside another one, without the dispatcher, which takes longer than the allocation: contiguous, or with its
// sizes and, where they leave no gaps, its strides.
static Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, const Tensor& beside) {
  if (!beside.is_cuda()) return at::empty(sizes, beside.options().dtype(dtype));
  return at::detail::empty_cuda(sizes, dtype, beside.device(), std::nullopt);
}
static Tensor empty_like(const Tensor& x, at::ScalarType dtype) {
  if (!x.is_cuda() || !x.is_non_overlapping_and_dense()) return at::empty_like(x, x.options().dtype(dtype));
  return at::detail::empty_strided_cuda(x.sizes(), x.strides(), dtype, x.device());
}

// The current stream of the tensor's device. While this lives, the launch may load a kernel's module and allocate memory
// even if a graph is being captured.
struct LaunchStream {
  cudaStream_t stream = nullptr;
  bool captured = false;
  std::optional<c10::cuda::CUDAStreamCaptureModeGuard> relaxed;

  explicit LaunchStream(const Tensor& beside) {
    if (!beside.is_cuda()) return;  // a test's, whose kernel runs on the CPU
    stream = c10::cuda::getCurrentCUDAStream();
    captured = c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
    if (captured) relaxed.emplace(cudaStreamCaptureModeRelaxed);
  }
};

static SdpaStrides strides_of(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(2)}; }

static int pages_of(int64_t keys, bool has_firsts) { return keys % 16 || has_firsts ? any_pages : pages; }
static int features_of(const SdpaParams& p, const OptionalTensor& bias, bool in_bf16) {
  const bool has_lengths = p.k_lengths || p.q_lengths || p.q_starts || p.k_starts || p.page_table || p.k_firsts;
  return (p.softcap != 0 ? softcap : 0) | (p.sinks ? sinks : 0) | (has_lengths ? lengths : 0) |
         (p.page_table ? pages_of(p.page_size, p.k_firsts) : 0) |
         (bias ? feature_of(*bias, has_lengths || p.bias_keys) : 0) | (in_bf16 ? bf16_out : 0);
}

// A scale as the C function has it, where 0 stands for the default: one of 0, or too small for a float, is the least
// float, with which logits vanish.
static float scale_of(std::optional<double> scale) { return scale ? std::max(float(*scale), FLT_MIN) : 0; }

// Sets the members of the tensors. p.B: the number of sequences if tensors are packed, else 0. LSE may be undefined.
static void set_tensors(SdpaParams& p, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                        const Tensor& lse, const OptionalTensor& bias) {
  if (bias && features_of(p, bias, false) & key_mask) {
    p.key_mask = static_cast<const uint8_t*>(bias->const_data_ptr());
    p.key_mask_stride = bias->size(0) == 1 ? 0 : bias->stride(0);
  } else if (bias) {
    const auto shared = [&](int dim) { return bias->size(dim) == 1 ? 0 : bias->stride(dim); };
    p.bias = bias->const_data_ptr(), p.bias_strides = {shared(0), shared(1), shared(2)};
  }
  p.Q = q.const_data_ptr(), p.K = k.const_data_ptr(), p.V = v.const_data_ptr(), p.O = o.mutable_data_ptr();
  if (lse.defined()) p.LSE = static_cast<float*>(lse.mutable_data_ptr());
  if (p.B == 0) p.B = int(q.size(0));
  p.Hq = int(q.size(1)), p.Hkv = int(k.size(1)), p.Sq = int(q.size(2));
  if (!p.page_table) p.Sk = int(k.size(2));
  p.D = int(q.size(3)), p.Dv = int(v.size(3));
  p.q = strides_of(q), p.k = strides_of(k), p.v = strides_of(v), p.o = strides_of(o);
  // Expanded heads are one key head, of which GQA is faster than of so many that happen to be alike.
  if (p.k.head == 0 && p.v.head == 0 && p.k_descale.head == 0 && p.v_descale.head == 0) p.Hkv = std::min(p.Hkv, 1);
}

// Everything that a map of hidden tiles depends on, except for the contents of arrays and biases: a line each.
static std::string dependencies_of(const SdpaParams& p, const LineKey& key) {
  const auto& [numbers, score_mod, mask_mod] = key;
  const auto& [device, dtype, D, Dv, features] = numbers;
  static const char* const types[] = {"float16", "bfloat16", "float8_e4m3fn"};
  return c10::str("score_mod='", score_mod, "'\nmask_mod='", mask_mod, "'\ndevice=", device, "\ndtype=", types[dtype],
                  "\noptions=", features, "\nB=", p.B, "\nHq=", p.Hq, "\nHkv=", p.Hkv, "\nSq=", p.Sq, "\nSk=", p.Sk,
                  "\nD=", D, "\nDv=", Dv, "\ncausal=", p.causal, "\nwindow_left=", p.window_left, "\nwindow_right=",
                  p.window_right, "\nwindow_alignment=", p.window_alignment, "\nbatch_invariant=", p.batch_invariant,
                  "\nbias_keys=", p.bias_keys, "\nbias of each batch=", p.bias_strides.batch != 0,
                  "\nbias of each head=", p.bias_strides.head != 0);
}

// Sets the kept map, if there is one. Returns the reason for refusing it, or an empty string.
static std::string set_block_mask(SdpaParams& p, const LineKey& key, const Mods& mods) {
  if (!mods.block_mask) return "";
  std::istringstream made_for(mods.made_for), needed(dependencies_of(p, key));
  for (std::string its, own; std::getline(needed, own);) {
    if (!std::getline(made_for, its) || its != own) {
      return c10::str("block_mask was made for ", its, ", and this call has ", own);
    }
  }
  p.bias_map_bytes = size_t(mods.block_mask->numel());
  p.bias_map = p.bias_map_bytes ? mods.block_mask->mutable_data_ptr() : nullptr;
  return "";
}

// Enqueues O, LSE = attention(q, k, v) with the mask, the scale and the other members of p, and with a bias of bias_of().
// Returns the reason for refusing, or an empty string. Shapes have been checked. in_bf16: O of e4m3 is bf16, else fp16.
static std::string launch(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                          SdpaParams p, const OptionalTensor& bias, bool in_bf16 = false, const Mods& mods = {}) {
  const LineKey key = key_of(q, v, features_of(p, bias, in_bf16), mods);
  const Line& line = line_for(key);
  set_tensors(p, q, k, v, o, lse, bias);
  const std::string why = set_block_mask(p, key, mods);
  if (!why.empty()) return why;
  const LaunchStream at(q);
  char text[256];
  Tensor scratch;  // when the launch is enqueued, what follows it on the stream may have this memory
  if (const size_t bytes = line.scratch_bytes(&p)) {
    scratch = empty({int64_t(bytes)}, at::kByte, q);
    p.scratch = scratch.mutable_data_ptr();
  }
  if (line.workspace_bytes(&p) > 0) p.workspace = state_of(at.stream, at.captured);
  return line.forward(&p, at.stream, text, sizeof text) ? text : "";
}

// Enqueues the kernel that makes mods.block_mask for such a launch, and sets mods.made_for. The map is empty if the build
// has none for these sizes. Returns as launch() does.
static std::string make_block_mask(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                                   SdpaParams p, const OptionalTensor& bias, bool in_bf16, Mods& mods) {
  const LineKey key = key_of(q, v, features_of(p, bias, in_bf16), mods);
  const Line& line = line_for(key);
  set_tensors(p, q, k, v, o, lse, bias);
  mods.made_for = dependencies_of(p, key);
  const size_t bytes = o.numel() > 0 ? line.bias_map_bytes(&p) : 0;
  mods.block_mask = empty({int64_t(bytes)}, at::kByte, q);
  if (bytes == 0) return "";
  p.bias_map = mods.block_mask->mutable_data_ptr(), p.bias_map_bytes = bytes;
  const LaunchStream at(q);
  char text[256];
  return line.map_bias(&p, at.stream, text, sizeof text) ? text : "";
}

// ---- the operators that F.scaled_dot_product_attention chooses from ----

// The LSE of rows that see no key is -inf, which would make their P exp(inf) in a backward; with inf it is 0.
static void hide_empty_rows(Tensor& lse) { lse.masked_fill_(lse.eq(-INFINITY), INFINITY); }

// cuDNN reads a bias as q's type whatever its own, so convert it. A hidden key has -65504, as in PyTorch.
static Tensor for_cudnn(const Tensor& bias, const Tensor& q) {
  if (!bias.defined() || bias.scalar_type() != at::kBool) return bias.defined() ? bias.to(q.scalar_type()) : bias;
  const auto value = [&](double x) { return at::scalar_tensor(x, q.options()); };
  return at::where(bias, value(0), value(-65504));
}

// Whether a line takes a problem; then o and lse are its results. O has the strides that PyTorch's meta functions
// promise, those of empty_like(q), also where rows that do not fit() are copied; behind the memory-efficient operator it
// is [B,Sq,H,D]. cuDNN's LSE has a last dimension of 1.
static bool taken(const Tensor& q, const Tensor& k, const Tensor& v, const Asked& asked, Tensor& o, Tensor& lse) {
  if (!why_not(q, k, v, asked).empty()) return false;
  const bool is_cudnns = asked.behind == at::SDPBackend::cudnn_attention;
  const bool is_flashs = asked.behind == at::SDPBackend::flash_attention;
  const std::array<int64_t, 4> sizes{q.size(0), q.size(1), q.size(2), 1};
  if (is_flashs || asked.needs_grad) lse = empty(at::IntArrayRef(sizes).slice(0, 3 + is_cudnns), at::kFloat, q);
  if (is_cudnns || is_flashs)
    o = empty_like(q, q.scalar_type());
  else
    o = empty({q.size(0), q.size(2), q.size(1), q.size(3)}, q.scalar_type(), q).transpose(1, 2);
  const Tensor written = fit(o) ? o : empty(q.sizes(), q.scalar_type(), q);
  SdpaParams p{};
  p.causal = !asked.causal ? SDPA_CAUSAL_OFF : is_flashs ? SDPA_CAUSAL_BOTTOM_RIGHT : SDPA_CAUSAL_TOP_LEFT;
  p.window_left = p.window_right = -1, p.scale = scale_of(asked.scale);
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

// The additive bias [B,H,Sq,Sk] of PyTorch's memory-efficient kernels, of the given type, whose rows start at multiples of
// 16 bytes.
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
// k or v with a head for each of q's, which these kernels need, of the given type.
static Tensor by_query_heads(const Tensor& x, const Tensor& q, at::ScalarType type) {
  const int64_t group = q.size(1) / x.size(1);
  return (group == 1 ? x : x.repeat_interleave(group, 1)).to(type);
}

// True if a bias has more bits than q's type, which cuDNN would round away.
static bool is_wide(const Tensor& bias, const Tensor& q) {
  return bias.defined() && bias.scalar_type() == at::kFloat && q.scalar_type() != at::kFloat;
}
// O and LSE [B,H,Sq] by the memory-efficient kernel in float32, the only one of PyTorch's that reads a float32 bias.
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

// PyTorch's autograd takes O and LSE to cuDNN's backward, which is content with ours.
static Result cudnn(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask, bool with_lse,
                    double dropout, bool causal, bool debug_mask, std::optional<double> scale) {
  const c10::OptionalDeviceGuard guard(q.device());
  const Asked asked{at::SDPBackend::cudnn_attention, mask, dropout, causal, debug_mask, with_lse, scale};
  Tensor o, lse;
  const bool is_ours = taken(q, k, v, asked, o, lse);
  if (!is_ours && mask && is_wide(*mask, q) && dropout == 0 && !debug_mask && !lse_lies_otherwise()) {
    std::tie(o, lse) = efficient_in_fp32(q, k, v, *mask, causal, scale);
    lse = lse.unsqueeze(-1);
  } else if (!is_ours) {
    if (mask && is_wide(*mask, q)) TORCH_WARN_ONCE("sdpa: PyTorch's cuDNN kernel rounds attn_mask to q's type");
    return at::_cudnn_attention_forward(q, k, v, mask ? for_cudnn(*mask, q) : mask, {}, {}, q.size(2), k.size(2),
                                        with_lse, dropout, causal, debug_mask, scale);
  }
  const auto unused = [&] { return empty({}, at::kLong, q); };  // a random generator's state, read with dropout alone
  return {o, lse, Tensor(), Tensor(), q.size(2), k.size(2), unused(), unused(), Tensor()};
}

// LSE [B,H,Sq] as the memory-efficient backward reads it: padded with inf to a multiple of 32 rows.
static Tensor padded_lse(const Tensor& lse) {
  const int64_t Sq = lse.size(2);
  const Tensor padded = empty({lse.size(0), lse.size(1), (Sq + 31) / 32 * 32}, at::kFloat, lse);
  padded.fill_(INFINITY), padded.narrow(2, 0, Sq).copy_(lse);
  return padded;
}

// dQ, dK, dV by PyTorch's memory-efficient backward, whose causal mask is top-left. It needs O contiguous as [B,Sq,H,D]. With
// a float32 bias all of it is in float32, since the kernel takes a bias of q's type only.
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
  const Tensor unused = empty({}, at::kLong, q);  // a random generator's state, read with dropout alone
  const auto [dq, dk, dv, of_bias] = at::_scaled_dot_product_efficient_attention_backward(
      grad.to(type), q.to(type), by_query_heads(k, q, type), by_query_heads(v, q, type), bias,
      o.to(type).transpose(1, 2).contiguous().transpose(1, 2), padded_lse(lse), unused, unused, 0,
      {true, true, true, false}, causal, scale);
  return {dq.to(q.scalar_type()), by_key_heads(dk), by_key_heads(dv)};
}

// True if cuDNN's backward gives NaN once the LSE of a row is below about -88: with a single query, and with a bias where
// the last tile of 128 queries is at most half full. LSE is device data, so the shape alone decides.
static bool cudnn_may_give_nan(const Tensor& q, const Tensor& bias) {
  const int64_t last = q.size(2) % 128;
  return q.size(2) == 1 || (bias.defined() && q.size(3) <= 64 && last >= 1 && last <= 64);
}

// PyTorch keeps cuDNN's plans by how q, k and v lie, and each has dO as it lay in the first such call: so dO comes as O
// lies, or gradients of another layout were wrong.
static std::tuple<Tensor, Tensor, Tensor> cudnn_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                         const Tensor& v, const Tensor& o, const Tensor& lse,
                                                         const Tensor& seed, const Tensor& offset, const Tensor& bias,
                                                         const Tensor& q_starts, const Tensor& k_starts, int64_t most_q,
                                                         int64_t most_k, double dropout, bool causal,
                                                         std::optional<double> scale) {
  const c10::OptionalDeviceGuard guard(q.device());
  const bool is_plain = dropout == 0 && !q_starts.defined() && !lse_lies_otherwise();
  if (is_plain && (cudnn_may_give_nan(q, bias) || is_wide(bias, q))) {
    return efficient_backward(grad, q, k, v, o, lse.reshape(q.sizes().slice(0, 3)), bias, causal, scale);
  }
  const Tensor like_o = grad.strides() == o.strides() && fit(grad) ? grad : at::empty_like(o).copy_(grad);
  return at::_cudnn_attention_backward(like_o, q, k, v, o, lse, seed, offset, for_cudnn(bias, q), q_starts, k_starts,
                                       most_q, most_k, dropout, causal, scale);
}

// FlashAttention-2 fails with "misaligned address" on some rows that do not fit(), which are copied for it too.
static Result flash(const Tensor& q_any, const Tensor& k_any, const Tensor& v_any, double dropout, bool causal,
                    bool debug_mask, std::optional<double> scale) {
  const c10::OptionalDeviceGuard guard(q_any.device());
  const bool with_grad = needs_grad(q_any, k_any, v_any);
  const Asked asked{at::SDPBackend::flash_attention, {}, dropout, causal, debug_mask, with_grad, scale};
  Tensor o, lse;
  if (taken(q_any, k_any, v_any, asked, o, lse)) {
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

// PyTorch's choice for masks on most GPUs, and for causal ones with Sq != Sk. Its backward takes O and a padded LSE.
static std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& q, const Tensor& k, const Tensor& v,
                                                            const OptionalTensor& mask, bool with_lse, double dropout,
                                                            bool causal, std::optional<double> scale) {
  const c10::OptionalDeviceGuard guard(q.device());
  const Asked asked{at::SDPBackend::efficient_attention, mask, dropout, causal, false, with_lse, scale};
  Tensor o, lse;
  if (!taken(q, k, v, asked, o, lse)) {
    return at::native::_scaled_dot_product_efficient_attention_cuda(q, k, v, mask, with_lse, dropout, causal, scale);
  }
  const auto unused = [&] { return empty({}, at::kLong, q); };
  return {o, with_lse ? padded_lse(lse) : empty({q.size(0), q.size(1), 0}, at::kFloat, q), unused(), unused()};
}

// F.scaled_dot_product_attention itself. Where nothing is differentiated or traced a mask is read as it is: PyTorch would
// make a bool one additive, with -65504 for cuDNN, by which rows that see no key become softmax(Q @ K.T) @ V.
static Tensor chosen(const Tensor& q_any, const Tensor& k_any, const Tensor& v_any, const OptionalTensor& mask_any,
                     double dropout, bool causal, std::optional<double> scale, bool gqa) {
  const auto pytorchs = [&](const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask) {
    return at::native::scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale, gqa);
  };
  if (!q_any.is_cuda()) return pytorchs(q_any, k_any, v_any, mask_any);
  const auto [q, k, v, mask, is_3d] = Given(q_any, k_any, v_any, mask_any);
  Tensor o, lse;
  // Whether its elements are not just those of its memory: a dual number, -x, 0.
  const auto is_more = [](const Tensor& x) { return x._fw_grad(0).defined() || x.is_neg() || x._is_zerotensor(); };
  if (mask && dropout == 0 && !causal && !needs_grad(q, k, v) && !needs_grad(mask) &&
      !at::areAnyTensorSubclassLike({q, k, v, *mask}) && !is_more(q) && !is_more(k) && !is_more(v) && !is_more(*mask)) {
    const c10::OptionalDeviceGuard guard(q.device());
    const auto choice = at::SDPBackend(at::_fused_sdp_choice(q, k, v, mask, 0, false, scale, gqa));
    if (choice != at::SDPBackend::math) taken(q, k, v, {choice, mask, 0, false, false, false, scale}, o, lse);
  }
  if (!o.defined()) o = pytorchs(q, k, v, mask);
  return is_3d ? o.squeeze(0) : o;
}

// ---- sdpa::attention ----

// A factor for each head of `of`: x is float32, of a shape that expands to [B,H], or of q one for each key head.
static SdpaDescale descale(const char* name, const OptionalTensor& x, const Tensor& of, int64_t batches,
                           int64_t key_heads, Tensor& kept) {
  if (!x) return {};
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

// Whether it is a problem of F.scaled_dot_product_attention's, whose causal mask is top-left, for which PyTorch would
// choose cuDNN.
static bool is_for_cudnn(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias, int64_t causal,
                         bool limited, std::optional<double> scale) {
  if (limited || lse_lies_otherwise() || (causal == SDPA_CAUSAL_BOTTOM_RIGHT && q.size(2) != k.size(2))) return false;
  try {
    const bool masked = causal != SDPA_CAUSAL_OFF;
    const at::AutoGradMode with_gradients(true);  // some sizes have a forward alone
    const Tensor asked = q.detach().requires_grad_();
    const int64_t choice = at::_fused_sdp_choice(asked, k, v, bias, 0, masked, scale, q.size(1) != k.size(1));
    return at::SDPBackend(choice) == at::SDPBackend::cudnn_attention;
  } catch (const c10::Error&) {  // there is no choice, since those that take it have been disabled
    return false;
  }
}

static const OptionalTensor no_tensor;
// The arguments of sdpa::attention, in its order.
struct Call {
  const Tensor &q, &k, &v;
  int64_t causal, left, right, window_alignment;
  std::optional<double> scale;
  double softcap;
  const OptionalTensor &q_descale, &k_descale, &v_descale, &sinks, &k_lengths, &q_starts, &k_starts, &page_table;
  int64_t most_keys;
  const OptionalTensor& bias;
  int64_t bias_keys;
  const OptionalTensor& q_lengths;
  bool batch_invariant, bf16_out;
  Mods mods{};
  const OptionalTensor& k_firsts = no_tensor;
};

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

// LSE; O is written into `o`, or into a new tensor if that is undefined. makes: instead of a launch, makes its block_mask.
static Tensor attend(const Call& call, Tensor& o, Mods* makes = nullptr) {
  const auto& [q_any, k_any, v_any, causal, left, right, window_alignment, scale, cap, q_descale, k_descale, v_descale,
               sink, k_lengths, q_starts, k_starts, page_table, most_keys, bias_any, bias_keys, q_lengths,
               batch_invariant, in_bf16, mods, k_firsts] = call;
  const auto check = [](const std::string& why) { TORCH_CHECK(why.empty(), "sdpa.attention: ", why); };
  const bool has_lengths = k_lengths || q_lengths || q_starts || k_starts || page_table || k_firsts;
  check(why_not_tensors(q_any, k_any, v_any, true, has_lengths));
  check(why_not_scale(scale));
  check(fit(q_any) && fit(k_any) && fit(v_any) ? "" : bad_rows);
  const auto within = [&](const char* name, int64_t x, int64_t least) {
    TORCH_CHECK(x >= least && x <= 1000000000, "sdpa.attention: ", name, "=", x, " is outside [", least, ", 1000000000]");
  };
  within("window_left", left, -1), within("window_right", right, -1), within("most_keys", most_keys, 0);
  within("bias_keys", bias_keys, 0);
  TORCH_CHECK(most_keys == 0 || has_lengths, "sdpa.attention: most_keys is for sequences of k_lengths, starts or pages");
  TORCH_CHECK(cap == 0 || float(cap) != 0, "sdpa.attention: softcap=", cap, " is not from 1e-18 to 1e18");
  const c10::OptionalDeviceGuard guard(q_any.device());
  const Tensor q = readable(q_any, false), k = readable(k_any, true), v = readable(v_any, true);
  const bool e4m3 = q.scalar_type() == at::kFloat8_e4m3fn;
  TORCH_CHECK(e4m3 || !in_bf16, "sdpa.attention: O has the type of q, and another one with e4m3 alone");
  TORCH_CHECK(v.scalar_type() != at::kFloat8_e4m3fn || !bias_any || (is_of_keys(*bias_any) && !has_lengths && !bias_keys),
              "sdpa.attention: e4m3 has no bias but a bool mask of keys, which all queries and heads share, without lengths");
  TORCH_CHECK(bias_any || bias_keys == 0, "sdpa.attention: bias_keys is for a bias");
  TORCH_CHECK((mods.score.empty() && mods.mask.empty()) || (cap == 0 && !bias_any),
              "sdpa.attention: softcap and bias are parts of the expression beside score_mod or mask_mod, as in "
              "score_mod='30 * tanh(s / 30) + x0[k]'");
  TORCH_CHECK(!mods.block_mask || (mods.block_mask->device() == q.device() && mods.block_mask->is_contiguous() &&
                                   mods.block_mask->scalar_type() == at::kByte),
              "sdpa.attention: block_mask is not on ", q.device());
  TORCH_CHECK(!sink || (sink->device() == q.device() && sink->sizes() == q.sizes().slice(1, 1)),
              "sdpa.attention: sinks is not a tensor [Hq] beside q");
  Tensor sinks_kept;
  if (sink) sinks_kept = sink->scalar_type() == at::kFloat ? sink->contiguous() : sink->to(at::kFloat).contiguous();
  SdpaParams p{};
  set_arrays(p, mods, q);
  int64_t B = q.size(0);
  for (const OptionalTensor* starts : {&q_starts, &k_starts}) {
    if (*starts) B = p.B = int((*starts)->numel() - 1);
  }
  TORCH_CHECK(!page_table || (page_table->scalar_type() == at::kInt && page_table->device() == q.device() &&
                              page_table->dim() == 2 && page_table->size(0) == B &&
                              (page_table->stride(1) == 1 || page_table->size(1) == 1) &&
                              k.size(2) > 0 && !k_starts && page_table->size(1) * k.size(2) <= 1000000000),
              "sdpa.attention: page_table is not an int32 tensor [", B,
              ",pages of a sequence] beside q, without k_starts, of pages of 1 key or more");
  const Tensor& keys = page_table ? q : k;  // whose batch is one of sequences
  const bool packs_k = (page_table ? q_starts : k_starts).has_value();
  // Its data, if x is a tensor [length] beside q; of starts `packed` has a batch of 1, else B.
  const auto ints = [&](const char* name, const OptionalTensor& x, int64_t length, const Tensor& packed, bool packs) {
    TORCH_CHECK(packed.size(0) == (packs ? 1 : B), "sdpa.attention: q or k has a batch of ", packed.size(0), ", not ",
                packs ? 1 : B);
    TORCH_CHECK(!x || (x->scalar_type() == at::kInt && x->device() == q.device() && x->is_contiguous() &&
                       x->dim() == 1 && x->size(0) == length && (B > 0 || q.numel() == 0)),
                "sdpa.attention: ", name, " is not a contiguous int32 tensor [", length, "] beside q");
    return x ? x->const_data_ptr<int>() : nullptr;
  };
  p.q_starts = ints("q_starts", q_starts, B + 1, q, q_starts.has_value());
  p.k_starts = ints("k_starts", k_starts, B + 1, keys, packs_k);
  p.k_lengths = ints("k_lengths", k_lengths, B, keys, packs_k);
  p.q_lengths = ints("q_lengths", q_lengths, B, q, q_starts.has_value());
  p.k_firsts = ints("k_firsts", k_firsts, B, keys, packs_k);
  if (page_table) {
    // A table of no columns has no data, and a kernel that sees no key does not read it.
    p.page_table = static_cast<const int*>(page_table->numel() ? page_table->const_data_ptr() : q.const_data_ptr());
    p.page_stride = int(page_table->stride(0));
    p.page_size = int(k.size(2)), p.pages = int(k.size(0)), p.Sk = int(page_table->size(1) * k.size(2));
  }
  p.most_keys = int(most_keys), p.batch_invariant = batch_invariant;
  p.scale = scale_of(scale), p.causal = int(causal), p.window_left = int(left), p.window_right = int(right);
  p.window_alignment = int(window_alignment), p.softcap = float(cap);
  p.sinks = sink ? sinks_kept.const_data_ptr<float>() : nullptr;
  OptionalTensor bias;
  if (bias_any) {
    const int64_t Sk = page_table ? p.Sk : k.size(2), most = most_keys ? std::min(most_keys, Sk) : Sk;
    const int64_t queries = !q_starts ? q.size(2) : bias_any->dim() > 1 ? bias_any->size(-2) : 1;
    check(why_not_bias("bias", *bias_any, q, B, queries, bias_keys ? bias_keys : most));
    bias = bias_of(*bias_any, q, bias_keys ? bias_keys : most), p.bias_keys = int(bias_keys);
  }
  const bool same_sizes = v.size(3) == q.size(3);
  check(why_not_line(q, v, features_of(p, bias, in_bf16), mods));
  Tensor kept[3];
  const int64_t key_batches = page_table || k_starts ? B : k.size(0);  // packed sequences have factors of their own
  p.q_descale = descale("q_descale", q_descale, q, q_starts ? B : q.size(0), k.size(1), kept[0]);
  p.k_descale = descale("k_descale", k_descale, k, key_batches, 0, kept[1]);
  p.v_descale = descale("v_descale", v_descale, v, key_batches, 0, kept[2]);
  const auto type = in_bf16 ? at::kBFloat16 : e4m3 ? at::kHalf : q.scalar_type();
  if (!o.defined()) {
    o = same_sizes ? empty_like(q_any, type) : empty({q.size(0), q.size(1), q.size(2), v.size(3)}, type, q);
  }
  const Tensor written = fit(o) ? o : empty(o.sizes(), type, q);
  const Tensor lse = empty({q.size(0), q.size(1), q.size(2)}, at::kFloat, q);
  if (makes) {
    check(make_block_mask(q, k, v, written, lse, p, bias, in_bf16, *makes));
    return lse;
  }
  check(launch(q, k, v, written, lse, p, bias, in_bf16, mods));
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

// run() on the arguments of sdpa::attention and sdpa::block_mask.
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
                      const OptionalTensor& k_firsts) {
  return run({q, k, v, causal, left, right, window_alignment, scale, cap, q_descale, k_descale, v_descale, sink, k_lengths,
              q_starts, k_starts, page_table, most_keys, bias, bias_keys, q_lengths, batch_invariant, in_bf16,
              {std::string(score_mod), std::string(mask_mod), {x0, x1, x2, x3, i0, i1}, kept, std::string(made_for)}, k_firsts});
}

// O as PyTorch's cuDNN would have laid it out: as q, with v's D, since its plans are kept by how q lies.
static Tensor laid_out_by(const Tensor& q, const Tensor& o) {
  if (o.strides() == q.strides() && o.sizes() == q.sizes() && q.is_non_overlapping_and_dense()) return o;
  std::array<int64_t, 4> order{0, 1, 2, 3}, strides;
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return q.stride(a) < q.stride(b); });
  int64_t next = 1;
  for (const int64_t dim : order) strides[dim] = next, next *= o.size(dim);
  Tensor out = o.size(3) == q.size(3) ? at::empty_like(q) : at::empty_strided(o.sizes(), strides, o.options());
  return o.strides() == out.strides() ? o : out.copy_(o);
}

// dQ, dK, dV from O and LSE: by cuDNN where PyTorch would choose it; else by FlashAttention-2, whose masks and windows are
// bottom-right, and which takes a limit of -1 for all keys if both are; or by the memory-efficient backward, for a bias, a
// top-left mask with Sq != Sk, and a v with its own D. `without`: the reason for having none. It is raised only when the
// backward runs, so that a graph that is compiled ahead may contain it.
static std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& q_any,
                                                             const Tensor& k_any, const Tensor& v_any, const Tensor& o,
                                                             const Tensor& lse, int64_t causal, int64_t left,
                                                             int64_t right, int64_t window_alignment,
                                                             std::optional<double> scale,
                                                             const OptionalTensor& bias_any,
                                                             std::string_view without) {
  TORCH_CHECK_NOT_IMPLEMENTED(without.empty(), "sdpa.attention: ", without);
  const c10::OptionalDeviceGuard guard(q_any.device());
  const Tensor q = readable(q_any, false), k = readable(k_any, false), v = readable(v_any, false);
  OptionalTensor bias;
  if (bias_any) bias = bias_of(bias_any->detach(), q, k.size(2));
  const int64_t Sq = q.size(2), Sk = k.size(2), by = window_alignment ? window_alignment : causal;
  const bool limited = left >= 0 || right >= 0;
  const bool masked = causal != SDPA_CAUSAL_OFF;
  const bool bottom_right = causal != SDPA_CAUSAL_TOP_LEFT && (!limited || by == SDPA_CAUSAL_BOTTOM_RIGHT);
  Tensor rows_lse = lse;
  if (bias) hide_empty_rows(rows_lse = rows_lse.clone());
  const Tensor its_bias = bias.value_or(Tensor());
  Tensor dq, dk, dv;
  if (q.numel() == 0 || k.numel() == 0) {
    dq = at::zeros_like(q), dk = at::zeros_like(k), dv = at::zeros_like(v);
  } else if (is_for_cudnn(q, k, v, bias, causal, limited, scale)) {
    const Tensor unused = empty({}, at::kLong, q);
    std::tie(dq, dk, dv) = cudnn_backward(grad, q, k, v, laid_out_by(q, o), rows_lse.unsqueeze(-1), unused, unused,
                                          its_bias, {}, {}, Sq, Sk, 0, masked, scale);
  } else if (!bias && q.size(3) == v.size(3) && (Sq == Sk || bottom_right)) {
    const auto rows = [](const Tensor& x) { return x.transpose(1, 2); };
    const Tensor unused = empty({2}, at::kUInt64, q);
    std::tie(dq, dk, dv) = at::_flash_attention_backward(
        rows(readable(grad, false)), rows(q), rows(k), rows(v), rows(o), lse, {}, {}, Sq, Sk, 0, masked, unused, unused,
        scale, limited && left < 0 ? Sk : left, limited && right < 0 ? Sk : right);
    dq = rows(dq), dk = rows(dk), dv = rows(dv);
  } else {
    const bool top_left = causal != SDPA_CAUSAL_BOTTOM_RIGHT || Sq == Sk;
    TORCH_CHECK_NOT_IMPLEMENTED(!limited && top_left, "sdpa.attention: no backward of PyTorch's takes top-left windows "
                                "with Sq != Sk, or v's own D beside a window or a bottom-right mask with Sq != Sk");
    std::tie(dq, dk, dv) = efficient_backward(grad, q, k, v, o, rows_lse, its_bias, masked, scale);
  }
  // As the fake kernel promises them.
  const auto laid_out = [](const Tensor& dx, const Tensor& x) {
    const bool already = x.is_non_overlapping_and_dense() && dx.strides() == x.strides();
    return already ? dx : empty_like(x, x.scalar_type()).copy_(dx);
  };
  return {laid_out(dq, q_any), laid_out(dk, k_any), laid_out(dv, v_any)};
}

// ---- PyTorch's FlashAttention and cuDNN themselves, which varlen_attn calls, and 8 bits ----

// What a call asks besides q, k and v, [rows,H,D] with starts, else [B,S,H,D]. Masks and windows count from the last
// key, but for a packed cuDNN's.
struct Sequences {
  const OptionalTensor &q_starts, &k_starts, &k_lengths, &page_table;  // k and v of a table are [pages,keys,Hkv,D]
  int64_t most_keys;
  double dropout;
  bool causal, debug_mask;
  std::optional<double> scale;
  std::optional<int64_t> left, right;
  bool top_left = false;
  bool has_slopes = false;
  std::optional<int64_t> splits;  // 1: the bits of a sequence do not depend on the others
};
struct Descales {
  OptionalTensor q, k, v;
};

static Tensor heads_first(const Tensor& x) {
  return x.dim() == 3 ? x.transpose(0, 1).unsqueeze(0) : x.transpose(1, 2);
}

// Why not, of a call with tensors as attention() has them.
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
  if (asked.page_table && !(fit(k) && fit(v))) return bad_rows;  // a copy would be of all pages
  return "";
}

// O and LSE of a call on [1 or B,H,S,D], or why not. A given O is written into.
static std::string taken(const Tensor& q_any, const Tensor& k_any, const Tensor& v_any, const Sequences& asked,
                         const Descales& descales, Tensor& o, Tensor& lse) {
  std::string why = why_not(q_any, k_any, v_any, asked);
  if (!why.empty()) return why;
  const auto limit = [](std::optional<int64_t> keys) { return std::clamp<int64_t>(keys.value_or(-1), -1, 1000000000); };
  int64_t left = limit(asked.left), right = limit(asked.right);
  const bool causal = asked.causal || (left < 0 && right == 0);
  if (causal) right = -1;
  const bool has_lengths = asked.q_starts || asked.k_starts || asked.k_lengths || asked.page_table;
  const int mask = !causal ? SDPA_CAUSAL_OFF : asked.top_left ? SDPA_CAUSAL_TOP_LEFT : SDPA_CAUSAL_BOTTOM_RIGHT;
  const int alignment = left < 0 && right < 0 ? SDPA_CAUSAL_OFF : SDPA_CAUSAL_BOTTOM_RIGHT;
  const OptionalTensor none, k_starts = asked.page_table ? none : asked.k_starts;
  const Tensor q = readable(q_any, false), k = readable(k_any, true), v = readable(v_any, true);
  const Call call{q, k, v, mask, left, right, alignment, asked.scale, 0, descales.q, descales.k, descales.v, none,
                  asked.k_lengths, asked.q_starts, k_starts, asked.page_table,
                  has_lengths ? std::clamp<int64_t>(asked.most_keys, 0, 1000000000) : 0, none, 0, none,
                  asked.splits == 1, q.scalar_type() == at::kFloat8_e4m3fn};
  int features = has_lengths ? lengths : 0;
  if (asked.page_table) features |= pages_of(k.size(2), false);
  if (call.bf16_out) features |= bf16_out;
  why = why_not_line(q, v, features);
  if (why.empty()) lse = attend(call, o);
  return why;
}

// The same on tensors as these operators have them: LSE is [H,rows] with starts, else [B,H,S].
static std::string rows_taken(const Tensor& q, const Tensor& k, const Tensor& v, const Sequences& asked,
                              const Descales& descales, Tensor& o, Tensor& lse) {
  if (q.dim() != (asked.q_starts ? 3 : 4)) return c10::str("q has ", q.dim(), " dimensions");
  if (k.dim() != (asked.page_table ? 4 : q.dim()) || v.dim() != k.dim()) {
    return c10::str("k and v have ", k.dim(), " and ", v.dim(), " dimensions");
  }
  if (o.defined() && (o.sizes() != q.sizes() || o.scalar_type() != q.scalar_type() || o.device() != q.device())) {
    return "out is of another shape or type than q";
  }
  Tensor by_heads = o.defined() ? heads_first(o) : o;
  std::string why = taken(heads_first(q), heads_first(k), heads_first(v), asked, descales, by_heads, lse);
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
// A random generator's state, which is read with dropout alone, and a debug mask.
static std::tuple<Tensor, Tensor, Tensor> unused_of_flash(const Tensor& q) {
  const auto state = q.options().dtype(at::kUInt64);
  return {at::empty({2}, state), at::empty({}, state), at::empty({0}, q.options())};
}

#if PYTORCH_2(12)
#define MORE_OF_FLASH , const OptionalTensor &page_table, std::optional<int64_t> splits
#define ITS_MORE , page_table, splits
#else
#define MORE_OF_FLASH
#define ITS_MORE
#endif

using FlashResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
static FlashResult flash_forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& q_starts,
                                 const OptionalTensor& k_starts, int64_t most_q, int64_t most_k, double dropout,
                                 bool causal, bool debug_mask, std::optional<double> scale,
                                 std::optional<int64_t> left, std::optional<int64_t> right,
                                 const OptionalTensor& k_lengths, const OptionalTensor& slopes MORE_OF_FLASH) {
#if !PYTORCH_2(12)
  const OptionalTensor page_table;
  const std::optional<int64_t> splits;
#endif
  Tensor o, lse;
  const std::string why =
      rows_taken(q, k, v, {q_starts, k_starts, k_lengths, page_table, most_k, dropout, causal, debug_mask, scale, left,
                           right, false, slopes.has_value(), splits}, {}, o, lse);
  if (why.empty()) return std::tuple_cat(std::make_tuple(o, lse), unused_of_flash(q));
  warn_of_pytorchs(why);
  const c10::OptionalDeviceGuard guard(q.device());
  return at::native::_flash_attention_forward(q, k, v, q_starts, k_starts, most_q, most_k, dropout, causal, debug_mask,
                                              scale, left, right, k_lengths, slopes ITS_MORE);
}

#if PYTORCH_2(12)
static Tensor flash_forward_into(Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v,
                                 const OptionalTensor& q_starts, const OptionalTensor& k_starts, int64_t most_q,
                                 int64_t most_k, double dropout, bool causal, bool debug_mask,
                                 std::optional<double> scale, std::optional<int64_t> left,
                                 std::optional<int64_t> right, const OptionalTensor& k_lengths,
                                 const OptionalTensor& slopes MORE_OF_FLASH) {
  Tensor lse;
  const std::string why =
      rows_taken(q, k, v, {q_starts, k_starts, k_lengths, page_table, most_k, dropout, causal, debug_mask, scale, left,
                           right, false, slopes.has_value(), splits}, {}, out, lse);
  if (why.empty()) return lse;
  warn_of_pytorchs(why);
  const c10::OptionalDeviceGuard guard(q.device());
  return at::native::_flash_attention_forward_no_dropout_inplace(out, q, k, v, q_starts, k_starts, most_q, most_k,
                                                                 dropout, causal, debug_mask, scale, left, right,
                                                                 k_lengths, slopes ITS_MORE);
}
#endif

// O of 8 bits is bf16. PyTorch has no backward for them, and says so.
static FlashResult flash_forward_8_bits(const Tensor& q, const Tensor& k, const Tensor& v,
                                        const OptionalTensor& q_starts, const OptionalTensor& k_starts, int64_t most_q,
                                        int64_t most_k, double dropout, bool causal, bool debug_mask,
                                        const OptionalTensor& q_descale, const OptionalTensor& k_descale,
                                        const OptionalTensor& v_descale, std::optional<double> scale,
                                        std::optional<int64_t> left, std::optional<int64_t> right,
                                        const OptionalTensor& k_lengths, const OptionalTensor& slopes) {
  Tensor o, lse;
  const std::string why =
      rows_taken(q, k, v, {q_starts, k_starts, k_lengths, {}, most_k, dropout, causal, debug_mask, scale, left, right,
                           false, slopes.has_value()}, {q_descale, k_descale, v_descale}, o, lse);
  if (!why.empty()) refuse_8_bits(why);
  return std::tuple_cat(std::make_tuple(o, lse), unused_of_flash(q));
}
static Result flash_8_bits(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& q_descale,
                           const OptionalTensor& k_descale, const OptionalTensor& v_descale, double dropout,
                           bool causal, bool debug_mask, std::optional<double> scale) {
  Tensor o, lse;
  const OptionalTensor none;
  const std::string why = taken(q, k, v, {none, none, none, none, 0, dropout, causal, debug_mask, scale},
                                {q_descale, k_descale, v_descale}, o, lse);
  if (!why.empty()) refuse_8_bits(why);
  const auto [state, offset, mask] = unused_of_flash(q);
  return {o, lse, Tensor(), Tensor(), q.size(2), k.size(2), state, offset, mask};
}

#if PYTORCH_2(14)
// varlen_attn calls cuDNN too, whose causal mask is top-left unless there are lengths. Its LSE is [H,rows] from 2.14
// on; what has no starts is F.scaled_dot_product_attention's.
static std::string cudnn_rows_taken(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& q_starts,
                                    const OptionalTensor& k_starts, int64_t most_k, double dropout, bool causal,
                                    bool debug_mask, std::optional<double> scale, const OptionalTensor& k_lengths,
                                    const OptionalTensor& page_table, Tensor& o, Tensor& lse) {
  return rows_taken(q, k, v, {q_starts, k_starts, k_lengths, page_table, most_k, dropout, causal, debug_mask, scale, {},
                              {}, !k_lengths}, {}, o, lse);
}
static Result cudnn_forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
                            const OptionalTensor& q_starts, const OptionalTensor& k_starts, int64_t most_q,
                            int64_t most_k, bool with_lse, double dropout, bool causal, bool debug_mask,
                            std::optional<double> scale, const OptionalTensor& k_lengths,
                            const OptionalTensor& page_table) {
  if (q_starts && !bias) {
    Tensor o, lse;
    const std::string why = cudnn_rows_taken(q, k, v, q_starts, k_starts, most_k, dropout, causal, debug_mask, scale,
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
  const std::string why = cudnn_rows_taken(q, k, v, q_starts, k_starts, most_k, 0, causal, false, scale, k_lengths,
                                           page_table, out, lse);
  if (why.empty()) return lse;
  warn_of_pytorchs(why);
  const c10::OptionalDeviceGuard guard(q.device());
  return at::native::_cudnn_attention_forward_no_dropout_inplace(out, q, k, v, q_starts, k_starts, most_q, most_k,
                                                                 causal, scale, k_lengths, page_table);
}
#endif

static void put_behind(torch::Library& m) {
  m.impl("_scaled_dot_product_cudnn_attention", cudnn);
  m.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward);
  m.impl("_scaled_dot_product_flash_attention", flash);
  m.impl("_scaled_dot_product_efficient_attention", efficient);
  m.impl("_flash_attention_forward", flash_forward);
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

// ---- sdpa::append ----

struct Appender {
  decltype(&sdpa_append) append;
  char trouble[512];  // why there is none
};
static auto& appenders = *new std::map<int, Appender>;  // by device
using LoadAppender = void (*)(int device, Appender* appender);
static LoadAppender load_appender;

static const Appender& appender_for(int device) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = appenders.find(device);
    if (found != appenders.end()) return found->second;
  }
  thread_local Appender loaded;
  loaded = {};
  load_appender(device, &loaded);
  if (!loaded.append) return loaded;  // the next call tries again
  const std::lock_guard<std::mutex> lock(mutex);
  return appenders.emplace(device, loaded).first->second;
}

// Of a cache [caches or pages,keys,H,D] and of x, [B,rows,H,D] or with starts [rows,H,D].
static SdpaNewRows new_rows_of(const Tensor& cache, const Tensor& x) {
  const int64_t size = x.element_size();
  const int last = int(x.dim());
  return {static_cast<const char*>(x.const_data_ptr()), static_cast<char*>(cache.mutable_data_ptr()),
          last == 4 ? x.stride(0) * size : 0, x.stride(last - 3) * size, x.stride(last - 2) * size,
          cache.stride(0) * size, cache.stride(1) * size, cache.stride(2) * size, int(x.size(last - 1) * size)};
}

// Rows of k and v behind the first lengths[b] ones of caches, in place; returns the new lengths.
static Tensor append(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k_any, const Tensor& v_any,
                     const Tensor& lengths_any, const OptionalTensor& page_table, const OptionalTensor& starts) {
  const c10::OptionalDeviceGuard guard(k_cache.device());
  const auto check = [](bool holds, const auto&... words) {
    TORCH_CHECK(holds, "flash_attn_with_kvcache: ", words...);
  };
  const auto with_rows = [](const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); };
  const auto ints = [&](const char* name, const Tensor& x, int64_t dims, int64_t length) {
    check(x.device() == k_cache.device() && at::isIntegralType(x.scalar_type(), false) && x.dim() == dims &&
              x.size(0) == length, name, " has no ", length, " integers beside the caches");
    const Tensor whole = x.scalar_type() == at::kInt ? x : x.to(at::kInt);
    return whole.stride(-1) == 1 || whole.size(-1) <= 1 ? whole : whole.contiguous();
  };
  const int64_t B = lengths_any.numel();
  for (const Tensor* x : {&k_any, &v_any}) {
    const Tensor& cache = x == &k_any ? k_cache : v_cache;
    check(cache.dim() == 4 && x->dim() == (starts ? 3 : 4), "the caches have ", cache.dim(), " dimensions, and k or v ",
          x->dim());
    check(x->device() == cache.device() && x->scalar_type() == cache.scalar_type() && x->size(-1) == cache.size(3) &&
              x->size(-2) == cache.size(2) && (starts || x->size(0) == B),
          "k and v are not of the caches' device, type, heads and D, or not of ", B, " sequences");
    check(cache.stride(3) == 1, "rows of the caches are not contiguous");
    check(page_table || cache.size(0) == B, "there are ", cache.size(0), " caches for ", B, " sequences");
  }
  check(k_any.sizes().slice(0, k_any.dim() - 1) == v_any.sizes().slice(0, v_any.dim() - 1) &&
            k_cache.sizes().slice(0, 3) == v_cache.sizes().slice(0, 3), "k and v, or their caches, differ in shape");
  const Tensor k = with_rows(k_any), v = with_rows(v_any), lengths = ints("cache_seqlens", lengths_any, 1, B);
  const Tensor new_lengths = at::empty({B}, lengths.options());
  SdpaAppend a{};
  a.k = new_rows_of(k_cache, k), a.v = new_rows_of(v_cache, v);
  a.B = int(B), a.heads = int(k.size(-2)), a.new_rows = int(k.size(starts ? 0 : 1));
  a.count = int(k_cache.size(0)), a.keys = int(k_cache.size(1));
  a.lengths = lengths.const_data_ptr<int>(), a.new_lengths = new_lengths.mutable_data_ptr<int>();
  Tensor kept[2];
  if (starts) kept[0] = ints("cu_seqlens_k_new", *starts, 1, B + 1), a.starts = kept[0].const_data_ptr<int>();
  if (page_table) {
    check(k_cache.size(1) > 0, "page_table is of pages of 0 keys");
    kept[1] = ints("page_table", *page_table, 2, B), a.page_table = kept[1].const_data_ptr<int>();
    a.page_stride = int(kept[1].stride(0)), a.sequence_pages = int(kept[1].size(1));
  }
  const Appender& appender = appender_for(k_cache.get_device());
  check(appender.append, appender.trouble);
  const LaunchStream at(k_cache);
  const auto error = cudaError_t(appender.append(&a, at.stream));
  check(error == cudaSuccess, cudaGetErrorString(error));
  return new_lengths;
}

// There is no gradient; that the caches have changed is told to what has saved them for one.
static Tensor append_autograd(c10::DispatchKeySet keys, const Tensor& k_cache, const Tensor& v_cache, const Tensor& k,
                              const Tensor& v, const Tensor& lengths, const OptionalTensor& page_table,
                              const OptionalTensor& starts) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("sdpa::append", "").typed<decltype(append)>();
  for (const Tensor* cache : {&k_cache, &v_cache}) {
    if (!cache->is_inference()) cache->unsafeGetTensorImpl()->bump_version();
  }
  return op.redispatch(keys & c10::after_autograd_keyset, k_cache, v_cache, k, v, lengths, page_table, starts);
}

// ---- autograd and autocast, for whatever else the operator's arguments are ----

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

// Puts ours behind PyTorch's operators, or takes them away again.
void sdpa_torch_activate(bool on) {
  static std::unique_ptr<torch::Library> library, composite;
  library.reset(), composite.reset();
  if (!on) return;
  struct : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } quiet;  // that the operators had kernels before is known
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  put_behind(*library);
  const auto for_all = c10::DispatchKey::CompositeImplicitAutograd;
  composite = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", for_all, __FILE__, __LINE__);
  composite->impl("scaled_dot_product_attention", chosen);
}

// For tests without a GPU: all of these and sdpa's own operators for tensors on the CPU, of which PyTorch has none. The
// test's Load and LoadAppender give them kernels that run there.
void sdpa_torch_activate_on_cpu(bool on) {
  static std::unique_ptr<torch::Library> library, own;
  library.reset(), own.reset();
  on_cpu = on;
  if (!on) return;
  const auto key = c10::DispatchKey::CPU;
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  put_behind(*library);
  own = std::make_unique<torch::Library>(torch::Library::IMPL, "sdpa", key, __FILE__, __LINE__);
  own->impl("attention", with_call<attention>);
  own->impl("block_mask", with_call<block_mask>);
  own->impl("attention_backward", attention_backward);
  own->impl("append", append);
}
}
