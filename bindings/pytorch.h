// Shared by the parts of pytorch.cpp: lines and their loading, checks of tensors, workspaces, and the launch. pytorch.cpp
// includes all parts in one translation unit, since PyTorch's headers take most of the compile time.

#pragma once

#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime.h>

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

#include "sdpa.h"

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
static const OptionalTensor no_tensor;
constexpr int64_t most_size = 1000000000;  // maximum of dimensions, lengths and window limits

// ---- the lines ----

struct Line {
  decltype(&sdpa_library_workspace_bytes) workspace_bytes;
  decltype(&sdpa_library_scratch_bytes) scratch_bytes;
  decltype(&sdpa_library_forward) forward;
  decltype(&sdpa_library_bias_map_bytes) bias_map_bytes;
  decltype(&sdpa_library_map_bias) map_bias;
  char trouble[512];  // the reason for having no line, or empty
};
// The features of a problem, as bits. Each combination is a separate build of a line.
enum Feature {
  use_softcap = 1,
  use_sinks = 2,
  use_lengths = 4,
  use_pages = 8,
  use_bias = 16,
  use_mask = 32,
  use_bf16_out = 64,
  use_8_bit_kv = 128,
  use_fp32_bias = 256,
  use_any_pages = 512,  // page sizes that are no multiples of 16, or k_firsts; excludes use_pages
  use_key_mask = 1024,  // one row for all heads and queries; excludes use_mask
  use_key_bias = 2048,  // likewise; excludes use_bias
  use_fp32_key_bias = 4096  // excludes use_fp32_bias
};
// The arguments of attention() that modify scores, and the map of hidden tiles that block_mask() returned.
struct Mods {
  std::string score{}, mask{};             // expressions; empty: none
  std::array<OptionalTensor, 6> arrays{};  // x0 to x3, i0, i1
  OptionalTensor block_mask{};
  std::string made_for{};  // result of dependencies_of() for the call that made the map
};
// Device, dtype, D, D of v, features, SCORE_MOD and MASK_MOD.
using LineKey = std::tuple<std::array<int, 5>, std::string, std::string>;
static auto& lines = *new std::map<LineKey, Line>;

// Returns the value of a key. A value that is not known yet is filled by load(&value), which calls pytorch.py. If it is not
// final, the next call loads it again.
template <class Key, class Value, class Load>
static const Value& loaded_for(std::map<Key, Value>& known, const Key& key, const Load& load) {
  static std::mutex mutex;  // guards `known`. Not held during load(), which takes Python's GIL
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = known.find(key);
    if (found != known.end()) return found->second;
  }
  thread_local Value loaded;
  loaded = {};
  load(&loaded);
  if (!is_final(loaded)) return loaded;
  const std::lock_guard<std::mutex> lock(mutex);
  return known.emplace(key, loaded).first->second;
}

// Set by tests, whose kernels run on the CPU: why_not_line() and our_backward() accept tensors on the CPU, and the test's
// operators replace PyTorch's backward kernels.
static bool on_cpu = false;

// pytorch.py's function that builds a line if necessary and fills *line.
using Load = void (*)(int device, int dtype, int D, int Dv, int features, const char* score_mod, const char* mask_mod,
                      Line* line);
static Load load;

static int dtype_of(const Tensor& q) {
  return q.scalar_type() == at::kHalf ? 0 : q.scalar_type() == at::kBFloat16 ? 1 : 2;
}
static LineKey key_of(const Tensor& q, const Tensor& v, int features, const Mods& mods) {
  if (v.scalar_type() != q.scalar_type()) features |= use_8_bit_kv;
  return {{q.get_device(), dtype_of(q), int(q.size(3)), int(v.size(3)), features}, mods.score, mods.mask};
}

static const char* const interrupted = "the line was not built, since it was interrupted";
static bool is_final(const Line& line) { return line.forward != nullptr; }
static const Line& line_for(const LineKey& key) {
  return loaded_for(lines, key, [&](Line* line) {
    const auto& [numbers, score_mod, mask_mod] = key;
    const auto [device, dtype, D, Dv, features] = numbers;
    load(device, dtype, D, Dv, features, score_mod.c_str(), mask_mod.c_str(), line);
    if (!line->forward && !*line->trouble) strcpy(line->trouble, interrupted);
  });
}

// ---- unsupported problems ----

// Each function why_not...() returns the reason why the kernels cannot compute the problem, or an empty string.

// Checks shapes, types and devices. own: also accepts e4m3, and a v whose D differs from that of q and k, which
// F.scaled_dot_product_attention does not pass to these kernels.
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
    if (size > most_size) return "a dimension is over 10^9";
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

// True if all rows start at a multiple of 16 bytes and are contiguous. The kernels' copies require both.
static bool fit(const Tensor& x) {
  bool all = x.stride(3) == 1 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  for (int i = 0; i < 3; i++) all = all && (x.size(i) <= 1 || x.stride(i) * x.element_size() % 16 == 0);
  return all;
}
static const char* const bad_rows =
    "the rows of q, k or v are not contiguous or do not all start at a multiple of 16 bytes";

// True if a dimension in [first, last] has stride 0.
static bool is_expanded(const Tensor& x, int first, int last) {
  for (int i = first; i <= last; i++) {
    if (x.size(i) > 1 && x.stride(i) == 0) return true;
  }
  return false;
}

// Returns x, or a contiguous copy if the kernels cannot read x. Our kernels read expanded batches and heads of k and v,
// PyTorch's kernels do not.
static Tensor readable(const Tensor& x, bool may_be_expanded) {
  return fit(x) && !is_expanded(x, may_be_expanded ? 2 : 0, 2) ? x : x.clone(at::MemoryFormat::Contiguous);
}

// True if all heads and queries share the mask or bias, so that it has one element per key of a batch.
static bool is_of_keys(const Tensor& mask) {
  const auto is_shared = [&](int64_t dim) { return dim < 0 || mask.size(dim) == 1 || mask.stride(dim) == 0; };
  return is_shared(mask.dim() - 2) && is_shared(mask.dim() - 3);
}
// The Feature of a bias. no_key_bias: the build has no kernels for masks and biases of keys, as with USE_LENGTHS.
static int feature_of(const Tensor& bias, bool no_key_bias) {
  const bool of_keys = is_of_keys(bias) && !no_key_bias;
  if (bias.scalar_type() == at::kBool) return of_keys ? use_key_mask : use_mask;
  if (bias.scalar_type() == at::kFloat) return of_keys ? use_fp32_key_bias : use_fp32_bias;
  return of_keys ? use_key_bias : use_bias;
}

// Checks a mask (bool, true: visible) or an additive bias x for these queries and keys of [B,Hq].
static std::string why_not_bias(const char* name, const Tensor& x, const Tensor& q, int64_t B, int64_t queries,
                                int64_t keys) {
  if (x.device() != q.device()) return c10::str(name, " is on ", x.device(), ", not on q's device");
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

// ---- the state between launches ----

#if CUDART_VERSION < 13000
#define cudaStreamGetCaptureInfo cudaStreamGetCaptureInfo_v2
#endif

constexpr size_t state_bytes = 65536;  // maximum size of the workspace if scratch memory is separate, see sdpa.h
struct GraphState {
  void* data = nullptr;
  unsigned long long capture = 0;
};
using Place = std::pair<int, cudaStream_t>;                    // a device and one of its streams
static auto& stream_states = *new std::map<Place, void*>;      // never destroyed, since CUDA may be shut down before
static auto& graph_states = *new std::map<Place, GraphState>;  // of the newest capture
static std::mutex states_mutex;                                // guards both maps
static auto& of_dead_graphs = *new std::vector<void*>;
static std::mutex of_dead_graphs_mutex;

// Allocates by cudaMalloc. PyTorch's allocator would use the current pool, which may belong to a graph.
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

// Returns a workspace that the captured graph owns. It is zeroed immediately: a memset node would run in each replay.
static void* graph_state(GraphState& state, cudaStream_t captured) {
  cudaStreamCaptureStatus status;
  unsigned long long capture = 0;
  cudaGraph_t graph = nullptr;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(captured, &status, &capture, &graph));
  if (state.capture == capture) return state.data;
  void* data = allocated_state();
  const auto free_later = [](void* dead) {  // a callback, in which CUDA must not be called
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

// Returns the workspace of a launch: that of the stream, or of the graph into which the launch is captured. All lines share
// it, since each launch leaves it zeroed.
static void* state_of(cudaStream_t stream, bool captured) {
  const std::lock_guard<std::mutex> lock(states_mutex);
  if (!captured) free_of_dead_graphs();
  const Place place{c10::cuda::current_device(), stream};
  return captured ? graph_state(graph_states[place], stream) : stream_state(stream_states[place], stream);
}

// ---- a launch ----

// Allocate without the dispatcher, whose overhead exceeds the allocation's. empty() returns a contiguous tensor on the
// device of `beside`. empty_like() also copies the strides of x if x is dense.
static Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, const Tensor& beside) {
  if (!beside.is_cuda()) return at::empty(sizes, beside.options().dtype(dtype));
  return at::detail::empty_cuda(sizes, dtype, beside.device(), std::nullopt);
}
static Tensor empty_like(const Tensor& x, at::ScalarType dtype) {
  if (!x.is_cuda() || !x.is_non_overlapping_and_dense()) return at::empty_like(x, x.options().dtype(dtype));
  return at::detail::empty_strided_cuda(x.sizes(), x.strides(), dtype, x.device());
}

// The current stream; the caller has set the device. While the object exists, a launch may load a module and allocate memory
// even during the capture of a graph.
struct LaunchStream {
  cudaStream_t stream = nullptr;
  bool captured = false;
  std::optional<c10::cuda::CUDAStreamCaptureModeGuard> relaxed;

  explicit LaunchStream(const Tensor& beside) {
    if (!beside.is_cuda()) return;  // in a test whose kernels run on the CPU
    stream = c10::cuda::getCurrentCUDAStream();
    captured = c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
    if (captured) relaxed.emplace(cudaStreamCaptureModeRelaxed);
  }
};

static SdpaStrides strides_of(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(2)}; }

static int pages_feature(int64_t keys, bool has_firsts) { return keys % 16 || has_firsts ? use_any_pages : use_pages; }
static int features_of(const SdpaParams& p, const OptionalTensor& bias, bool in_bf16) {
  const bool has_lengths = p.k_lengths || p.q_lengths || p.q_starts || p.k_starts || p.page_table || p.k_firsts;
  return (p.softcap != 0 ? use_softcap : 0) | (p.sinks ? use_sinks : 0) | (has_lengths ? use_lengths : 0) |
         (p.page_table ? pages_feature(p.page_size, p.k_firsts) : 0) |
         (bias ? feature_of(*bias, has_lengths || p.bias_keys) : 0) | (in_bf16 ? use_bf16_out : 0);
}

// SdpaParams::scale, where 0 means the default. A scale of 0, or one too small for a float, becomes FLT_MIN, so that all
// logits are about 0.
static float scale_of(std::optional<double> scale) { return scale ? std::max(float(*scale), FLT_MIN) : 0; }

// Sets the members for a bias that bias_of() returned.
static void set_bias(SdpaParams& p, const Tensor& bias) {
  const auto shared = [&](int dim) { return bias.size(dim) == 1 ? 0 : bias.stride(dim); };
  p.bias = bias.const_data_ptr();
  p.bias_strides = {shared(0), shared(1), shared(2)};
}
// Sets the pointers, sizes and strides of the tensors. p.B: the number of sequences if tensors are packed, otherwise 0. LSE may
// be undefined.
static void set_tensors(SdpaParams& p, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                        const Tensor& lse, const OptionalTensor& bias) {
  if (bias && features_of(p, bias, false) & use_key_mask) {
    p.key_mask = static_cast<const uint8_t*>(bias->const_data_ptr());
    p.key_mask_stride = bias->size(0) == 1 ? 0 : bias->stride(0);
  } else if (bias) {
    set_bias(p, *bias);
  }
  p.Q = q.const_data_ptr();
  p.K = k.const_data_ptr();
  p.V = v.const_data_ptr();
  p.O = o.mutable_data_ptr();
  if (lse.defined()) p.LSE = static_cast<float*>(lse.mutable_data_ptr());
  if (p.B == 0) p.B = int(q.size(0));
  p.Hq = int(q.size(1));
  p.Hkv = int(k.size(1));
  p.Sq = int(q.size(2));
  if (!p.page_table) p.Sk = int(k.size(2));
  p.D = int(q.size(3));
  p.Dv = int(v.size(3));
  p.q = strides_of(q);
  p.k = strides_of(k);
  p.v = strides_of(v);
  p.o = strides_of(o);
  // Expanded heads count as one KV head: GQA with one head is faster than several equal heads.
  if (p.k.head == 0 && p.v.head == 0 && p.k_descale.head == 0 && p.v_descale.head == 0) p.Hkv = std::min(p.Hkv, 1);
}

// Returns everything that a map of hidden tiles depends on, except the contents of arrays and biases, one item per line.
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

// Sets the map of hidden tiles if the call has one. Returns the reason for refusing it, or an empty string.
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

// Enqueues O, LSE = attention(q, k, v) with the mask, scale and other members of p, and a bias from bias_of(). Shapes have
// been checked. in_bf16: O of e4m3 inputs is bf16 instead of fp16. Returns the reason for refusing, or an empty string.
static std::string launch(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                          SdpaParams p, const OptionalTensor& bias, bool in_bf16 = false, const Mods& mods = {}) {
  const LineKey key = key_of(q, v, features_of(p, bias, in_bf16), mods);
  const Line& line = line_for(key);
  set_tensors(p, q, k, v, o, lse, bias);
  const std::string why = set_block_mask(p, key, mods);
  if (!why.empty()) return why;
  const LaunchStream at(q);
  char text[256];
  Tensor scratch;  // may be freed after the launch is enqueued: later work on the stream may reuse it
  if (const size_t bytes = line.scratch_bytes(&p)) {
    scratch = empty({int64_t(bytes)}, at::kByte, q);
    p.scratch = scratch.mutable_data_ptr();
  }
  if (line.workspace_bytes(&p) > 0) p.workspace = state_of(at.stream, at.captured);
  return line.forward(&p, at.stream, text, sizeof text) ? text : "";
}

// Enqueues the kernel that writes mods.block_mask for a launch with these arguments, and sets mods.made_for. The map is empty
// if the build has no map for these sizes. Returns the reason for refusing, or an empty string.
static std::string make_block_mask(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                                   SdpaParams p, const OptionalTensor& bias, bool in_bf16, Mods& mods) {
  const LineKey key = key_of(q, v, features_of(p, bias, in_bf16), mods);
  const Line& line = line_for(key);
  set_tensors(p, q, k, v, o, lse, bias);
  mods.made_for = dependencies_of(p, key);
  const size_t bytes = o.numel() > 0 ? line.bias_map_bytes(&p) : 0;
  mods.block_mask = empty({int64_t(bytes)}, at::kByte, q);
  if (bytes == 0) return "";
  p.bias_map = mods.block_mask->mutable_data_ptr();
  p.bias_map_bytes = bytes;
  const LaunchStream at(q);
  char text[256];
  return line.map_bias(&p, at.stream, text, sizeof text) ? text : "";
}
