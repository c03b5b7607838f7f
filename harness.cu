// What makes a program of sdpa.cu, which includes this file unless SDPA_NO_MAIN is defined: it checks the kernel
// against reference.cpp and, for every row of a large problem, against the witness, another kernel; times it; and
// prints a CSV row for each problem. CSV alone goes to stdout, words to stderr. It knows of the build what `Line` says
// and no more, so that CMake compiles it once (SDPA_HARNESS_ONLY) and each line without it (SDPA_LINE_ONLY); `nvcc
// sdpa.cu` takes both together. tests/sweep.cu adds harder inputs, layouts and checks.
//
// In this order: the line, problems, tensors in device memory, the witness, Instance (a problem that can be launched
// and checked), timing, the GPU, a run and its row, the command line, main.

#ifndef SDPA_CONFIG_NAME
#define SDPA_CONFIG_NAME custom
#endif

namespace SDPA_NAMESPACE {
namespace {

// ---- SCORE_MOD and MASK_MOD as plain C++, for the reference and the witness ----

struct ModPlace {  // of a score, in its sequence
  int b, h, q, k, Sq, Sk;
};

// What the names in an expression are. `real` is double in the reference and float in the witness.
namespace plain_expression {

using std::abs, std::cos, std::exp, std::exp2, std::floor, std::log, std::log2, std::pow, std::sin, std::sqrt, std::tanh;
template <class X, class Y> __host__ __device__ std::common_type_t<X, Y> min(X x, Y y) { return x < y ? x : y; }
template <class X, class Y> __host__ __device__ std::common_type_t<X, Y> max(X x, Y y) { return x > y ? x : y; }

// tanh_error is added to each tanh_approx.
template <class real, class Reals>
__host__ __device__ real logit(real s, const ModPlace& at, Reals x0, Reals x1, Reals x2, Reals x3, real tanh_error) {
  [[maybe_unused]] const int b = at.b, h = at.h, q = at.q, k = at.k, Sq = at.Sq, Sk = at.Sk;
  [[maybe_unused]] const real NONE = s;
  [[maybe_unused]] const auto tanh_approx = [=](real x) { return std::tanh(x) + tanh_error; };
  (void)x0, (void)x1, (void)x2, (void)x3;
  return real(SCORE_MOD);
}
template <class real, class Reals, class Ints>
__host__ __device__ bool sees(const ModPlace& at, Reals x0, Reals x1, Reals x2, Reals x3, Ints i0, Ints i1) {
  [[maybe_unused]] const int b = at.b, h = at.h, q = at.q, k = at.k, Sq = at.Sq, Sk = at.Sk;
  [[maybe_unused]] constexpr bool NONE = true;
  (void)x0, (void)x1, (void)x2, (void)x3, (void)i0, (void)i1;
  return MASK_MOD;
}

}  // namespace plain_expression

struct NoMods {
  static constexpr bool changes_logits = false;
  static __device__ float logit(float s, const ModPlace&, const SdpaParams&) { return s; }
  static __device__ bool sees(const ModPlace&, const SdpaParams&) { return true; }
};
struct OwnMods {  // of the build
  static constexpr bool changes_logits = Build::changes_logits;
  static __device__ float logit(float s, const ModPlace& at, const SdpaParams& p) {
    return plain_expression::logit<float>(s, at, p.x0, p.x1, p.x2, p.x3, 0);
  }
  static __device__ bool sees(const ModPlace& at, const SdpaParams& p) {
    return plain_expression::sees<float>(at, p.x0, p.x1, p.x2, p.x3, p.i0, p.i1);
  }
};

// The arrays on the host, each of `size` elements.
constexpr const char* mod_arrays[] = {"x0", "x1", "x2", "x3", "i0", "i1"};
struct ModArrays {
  const float* x[4] = {};
  const int* i[2] = {};
  size_t size = 0;
  bool* outside = nullptr;  // set when an element is read that is none
};

// ---- the witness: every row on the GPU by another kernel ----
// Sections 4 to 6 have no part in it: it has its own mask, heads and strides. All of it is fp32. It goes
// over the keys twice: m = max of S, then P = exp((S - m) * scale), l = sum of P, O = P @ V / l.

struct WitnessArgs {
  SdpaParams p;    // without pages; the inputs are of the line's type
  int first_head;  // counted over batches: b * Hq + h
  float scale, v_unit;
  float *O, *LSE;  // [heads,Sq,D] and [heads,Sq] from first_head on
  int use_bias;
};

// How a kernel is launched for query heads [first, first + heads), counted over batches.
using LaunchWitness = cudaError_t (*)(const WitnessArgs& a, int heads);

inline __device__ float number(__half x) { return float(x); }
inline __device__ float number(__nv_bfloat16 x) { return float(x); }
inline __device__ float number(__nv_fp8_e4m3 x) { return float(x); }
inline __device__ float number(uint8_t x) { return float(x) - 128; }
inline __device__ float factor(const Descale& d, int b, int h) {
  return d.factor ? d.factor[b * d.batch + h * d.head] : 1;
}

// A thread has 64 elements of a query row, and its neighbours the others, of D in all; rows that have fewer end in zeros. Tiles of K and V are in shared
// memory, the parts of a row 4 floats apart, so that neighbours read from different banks.
template <int D> struct WitnessShared {
  static constexpr int SLICE = 64, LANES = D / SLICE, KEYS = 32, THREADS = 128;
  static constexpr int ROWS = THREADS / LANES;
  using TileRow = float[LANES][SLICE + 4];
  TileRow K[KEYS], V[KEYS];

  // tile[j] = row k0 + j of x, which has `width` elements; zeros past the end
  template <class T>
  static __device__ void load(TileRow* tile, const T* x, int64_t row_stride, int k0, int rows, int width) {
    for (int i = threadIdx.x; i < KEYS * D; i += THREADS) {
      const int j = i / D, d = i % D;
      tile[j][d / SLICE][d % SLICE] = k0 + j < rows && d < width ? number(x[(k0 + j) * row_stride + d]) : 0.0f;
    }
  }
};

template <class Q, class T, class Mods, int D>
__global__ void __launch_bounds__(WitnessShared<D>::THREADS) witness(WitnessArgs a) {
  using W = WitnessShared<D>;
  W& s = dynamic_shared<W>();
  const SdpaParams& p = a.p;
  const int row_tiles = (p.Sq + W::ROWS - 1) / W::ROWS, slice = threadIdx.x % W::LANES;
  const int of_grid = int(blockIdx.x) / row_tiles, head = a.first_head + of_grid;
  const int row = int(blockIdx.x) % row_tiles * W::ROWS + int(threadIdx.x) / W::LANES;
  const int b = head / p.Hq, h = head % p.Hq, h_kv = h / (p.Hq / p.Hkv);
  const Q* const Q_g = reinterpret_cast<const Q*>(p.Q) + b * p.q.batch + h * p.q.head;
  const int q_row = row < p.Sq ? row : p.Sq - 1;  // threads past the end work for nothing
  float q[W::SLICE], O[W::SLICE] = {}, m = -INFINITY, l = 0;
#pragma unroll
  for (int d = 0; d < W::SLICE; d++) {
    q[d] = slice * W::SLICE + d < p.D ? number(Q_g[q_row * p.q.row + slice * W::SLICE + d]) : 0.0f;
  }

  // The row's sequence, and its rows in the tensors.
  int own = b, Sq = p.Sq, Sk = p.Sk, first_query = 0, first_key = 0;
  const auto row_at = [](int start, int rows) { return start < 0 ? 0 : start > rows ? rows : start; };
  if (p.q_starts) {
    for (own = 0; p.q_starts[own + 1] <= q_row;) own++;
    first_query = row_at(p.q_starts[own], p.Sq), Sq = row_at(p.q_starts[own + 1], p.Sq) - first_query;
  }
  if (p.k_starts) first_key = row_at(p.k_starts[own], p.Sk), Sk = row_at(p.k_starts[own + 1], p.Sk) - first_key;
  if (p.k_lengths) Sk = max(0, min(p.k_lengths[own], Sk));
  if (p.q_lengths) Sq = max(0, min(p.q_lengths[own], Sq));
  if (p.most_keys > 0 && Sk > p.most_keys) Sk = p.most_keys;
  if (p.k_firsts) {
    const int first = row_at(p.k_firsts[own], Sk);
    first_key += first, Sk -= first;
  }
  const float of_logit = a.scale * factor(p.q_descale, own, h) * factor(p.k_descale, own, h_kv);
  // With a bias or a SCORE_MOD S is the logit itself.
  const float unit = p.softcap != 0 ? p.softcap : of_logit, scale = p.bias || Mods::changes_logits ? 1 : unit;
  const float v_factor = a.v_unit * factor(p.v_descale, own, h_kv);

  // Key k < Sk of a sequence is visible to its query q if first <= k - q <= last.
  const int none = 2000000000;
  const auto position = [&](Causal by) { return by == Causal::bottom_right ? Sk - Sq : 0; };
  const int windows_own = position(p.window_alignment == Causal::off ? p.causal : p.window_alignment);
  const int first = p.window_left < 0 ? -none : windows_own - p.window_left;
  int last = p.causal == Causal::off ? none : position(p.causal);
  if (p.window_right >= 0) last = min(last, windows_own + p.window_right);

  // Where rows of several sequences are in one tile, each goes over the keys of all.
  const bool is_mixed = p.q_starts && !p.k_starts;
  const int first_batch = p.k_starts || is_mixed ? 0 : b, batches = is_mixed ? p.B : 1;
  // Q[q_row] @ K[k0 + j] of a batch, -inf where that key is not visible
  const auto score = [&](int batch, int k0, int j) {
    float4 sum{};
#pragma unroll
    for (int d = 0; d < W::SLICE; d += 4) {
      const float4 k = *reinterpret_cast<const float4*>(&s.K[j][slice][d]);
      sum.x = fmaf(q[d], k.x, sum.x), sum.y = fmaf(q[d + 1], k.y, sum.y);
      sum.z = fmaf(q[d + 2], k.z, sum.z), sum.w = fmaf(q[d + 3], k.w, sum.w);
    }
    float S = (sum.x + sum.y) + (sum.z + sum.w);
    for (int n = 1; n < W::LANES; n *= 2) S += __shfl_xor_sync(0xffffffffu, S, n);
    if (p.softcap != 0) S = tanhf(S * of_logit / p.softcap);
    const int k = k0 + j - first_key, distance = k - (q_row - first_query);
    const bool is_own = (!is_mixed || batch == own) && k >= 0 && k < Sk;
    if (!is_own || distance < first || distance > last) return -INFINITY;
    if (p.key_mask && !p.key_mask[own * p.key_mask_stride + k]) return -INFINITY;
    const ModPlace place{own, h, q_row - first_query, k, Sq, Sk};
    if (!Mods::sees(place, p)) return -INFINITY;
    if (Mods::changes_logits) S = Mods::logit(S * of_logit, place, p);
    const int column = k - (p.bias_keys > 0 ? Sk - p.bias_keys : 0);
    if (!p.bias) return S;
    const int64_t at = own * p.bias_strides.batch + h * p.bias_strides.head + (q_row - first_query) * p.bias_strides.row + column;
    const float bias = column < 0          ? 0
                       : a.use_bias == 2 ? static_cast<const uint8_t*>(p.bias)[at] ? 0 : -INFINITY
                       : a.use_bias == 3 ? static_cast<const float*>(p.bias)[at]
                                         : number(static_cast<const T*>(p.bias)[at]);
    return a.use_bias == 2 && bias == -INFINITY ? bias : S * unit + bias;
  };
  const auto each_tile = [&](const auto& use) {
    for (int batch = first_batch; batch < first_batch + batches; batch++) {
      const T* const K_g = reinterpret_cast<const T*>(p.K) + batch * p.k.batch + h_kv * p.k.head;
      const T* const V_g = reinterpret_cast<const T*>(p.V) + batch * p.v.batch + h_kv * p.v.head;
      for (int k0 = 0; k0 < p.Sk; k0 += W::KEYS) {
        __syncthreads();  // hazard: K and V still being read
        W::load(s.K, K_g, p.k.row, k0, p.Sk, p.D), W::load(s.V, V_g, p.v.row, k0, p.Sk, p.Dv);
        __syncthreads();
        use(batch, k0);
      }
    }
  };
  each_tile([&](int batch, int k0) {
#pragma unroll 1
    for (int j = 0; j < W::KEYS; j++) m = fmaxf(m, score(batch, k0, j));
  });
  each_tile([&](int batch, int k0) {
    float tile_O[W::SLICE] = {}, tile_l = 0;  // summed apart: fewer roundings of the long sum
#pragma unroll 1
    for (int j = 0; j < W::KEYS; j++) {
      const float S = score(batch, k0, j), P = expf((S - m) * scale);
      if (S == -INFINITY) continue;  // V may be anything there
      tile_l += P;
#pragma unroll
      for (int d = 0; d < W::SLICE; d++) tile_O[d] = fmaf(P, s.V[j][slice][d], tile_O[d]);
    }
    l += tile_l;
#pragma unroll
    for (int d = 0; d < W::SLICE; d++) O[d] += tile_O[d];
  });
  if (row >= p.Sq) return;
  const int64_t out = int64_t(of_grid) * p.Sq + row;
  float most = m == -INFINITY ? m : m * scale, of_keys = 1;  // a factor may be 0
  if (p.sinks && p.sinks[h] != -INFINITY) {
    most = fmaxf(most, p.sinks[h]), of_keys = l == 0 ? 0 : expf(m * scale - most);
    l = l * of_keys + expf(p.sinks[h] - most);
  }
  if (slice == 0) a.LSE[out] = most + logf(l);
#pragma unroll
  for (int d = 0; d < W::SLICE; d++) {
    if (slice * W::SLICE + d >= p.Dv) break;
    a.O[out * p.Dv + slice * W::SLICE + d] = l == 0 || (of_keys == 0 && l < INFINITY) ? 0.0f : O[d] * of_keys / l * v_factor;
  }
}

template <class Q, class T, class Mods, int D> cudaError_t launch_witness_of(const WitnessArgs& a, int heads) {
  using W = WitnessShared<D>;
  constexpr auto kernel = witness<Q, T, Mods, D>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(W)));
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(heads * ((a.p.Sq + W::ROWS - 1) / W::ROWS));
  config.blockDim = dim3(W::THREADS);
  config.dynamicSmemBytes = sizeof(W);
  return cudaLaunchKernelEx(&config, kernel, a);
}
template <class Q, class T, class Mods> cudaError_t launch_witness_of(const WitnessArgs& a, int heads) {
  const int widest = max(a.p.D, a.p.Dv);
  return widest <= 64    ? launch_witness_of<Q, T, Mods, 64>(a, heads)
         : widest <= 128 ? launch_witness_of<Q, T, Mods, 128>(a, heads)
                         : launch_witness_of<Q, T, Mods, 256>(a, heads);
}

// ---- the line: a build as the harness sees it ----

struct Knob {
  const char *name, *value, *meaning;
  bool changed;  // from its default
};

constexpr int most_tiles = HOPPER_TILES.size();  // of all tables
static_assert(tile_count <= most_tiles, "a table of tiles is longer than that of wgmma; raise most_tiles");

struct KernelFacts {  // of the kernel that takes a problem
  const void* kernel;
  int threads;
  size_t shared_bytes;
  int item_rows;  // query rows of a work item
  size_t workspace_bytes;  // beside scratch memory: zero before a launch and after it
  size_t scratch_bytes, bias_map_bytes;
};

// The tensors of a backward pass: SdpaGradients of any build.
struct Gradients {
  const void* dO;
  void *dQ, *dK, *dV;
  Strides d_o, d_q, d_k, d_v;
  const float* dLSE;
  float* dSinks;
  void* workspace;
};

struct Line {
  const char *name, *family, *archs;
  const Knob* knobs;
  int knob_count, D, Dv, vec_width, barriers_per_tile;
  DType query, input, output;  // of Q; of K and V; of O
  int fp16_acc;  // bits: of Q @ K.T, of P @ V
  bool has_softcap, has_sinks, has_lengths, has_pages, has_small_pages, tanh_is_approximate;
  int use_bias;
  bool has_key_mask;
  bool has_bias_maps, is_wgmma, has_queue, is_tuned, sums_end;
  TunedTile tiles[most_tiles];  // one, or those that it may take
  int tile_count;
  // SCORE_MOD and MASK_MOD: whether they name an array, their values in double, and the witness that has them; null: none.
  bool names[6];  // of mod_arrays
  double (*logit)(double s, const ModPlace&, const ModArrays&, double tanh_error);
  bool (*sees)(const ModPlace&, const ModArrays&);
  LaunchWitness witness;
  TunedTile (*tile_of)(const SdpaParams&);
  KernelFacts (*facts_of)(const SdpaParams&);
  SdpaStatus (*forward)(const SdpaParams&, cudaStream_t);
  SdpaStatus (*map_bias)(const SdpaParams&, cudaStream_t);
  // Null unless BACKWARD=1: such a line is checked and timed by its backward pass.
  SdpaStatus (*backward)(const SdpaParams&, const Gradients&, cudaStream_t);
  size_t (*backward_workspace_bytes)(const SdpaParams&);
  const char* pass() const { return backward ? "backward" : "forward"; }
  bool takes(int d, int d_v) const {  // as widths of a problem
    const auto fits = [&](int n, int most) { return n == most || (is_wgmma && n > 0 && n < most && n % vec_width == 0); };
    return fits(d, D) && fits(d_v, Dv);
  }
};

}  // namespace
}  // namespace SDPA_NAMESPACE

extern "C" const void* sdpa_line();  // a Line

#ifndef SDPA_HARNESS_ONLY

namespace SDPA_NAMESPACE {
namespace {

constexpr Knob all_knobs[] = {
#define SDPA_KNOB_ROW(name, fallback, member, values, families, meaning) \
    {#name, name##_text.data(), meaning, name##_changed},
    SDPA_KNOBS(SDPA_KNOB_ROW)
#ifdef SDPA_BACKWARD_KNOBS  // compiled from sdpa_backward.cu
    SDPA_BACKWARD_KNOBS(SDPA_KNOB_ROW)
#endif
};

// Barriers of a CTA, or of a group of warps, per K/V tile.
int barriers_per_tile() {
  constexpr int of_policy[] = {0, 2, 4, 0, 0, 6};
  if (is_mma) return Build::stages > 1 ? 1 : 2;
  if (is_wgmma && Build::swap_ab) return Build::use_lazy_max ? 1 : 2;
  if (Build::use_warp_specialization) return 0;
  return is_wgmma ? 1 : of_policy[Build::sync_policy];
}

TunedTile tile_of(const SdpaParams& p) {
  return Build::use_tuned ? TUNED_TILES[choose_tile(p)] : TunedTile{};
}

KernelFacts facts_of(const SdpaParams& p) {
  return with_build(p, [&](auto build) {
    using B = decltype(build);
    return KernelFacts{reinterpret_cast<const void*>(+KernelOf<B>::entry), B::threads, shared_bytes<B>, B::block_m,
                       memory_of<B>(p).state, scratch_bytes<B>(p), bias_map_bytes<B>(p)};
  });
}

// Elements of an array of T, as Real.
template <class T, class Real> struct HostArray {
  const T* x;
  const ModArrays& all;
  __host__ __device__ Real operator[](int64_t i) const {
    if (uint64_t(i) < all.size) return x[i];
    *all.outside = true;
    return 0;
  }
};
double logit_on_host(double s, const ModPlace& at, const ModArrays& arrays, double tanh_error) {
  const auto x = [&](int n) { return HostArray<float, double>{arrays.x[n], arrays}; };
  return plain_expression::logit<double>(s, at, x(0), x(1), x(2), x(3), tanh_error);
}
bool sees_on_host(const ModPlace& at, const ModArrays& arrays) {
  const auto x = [&](int n) { return HostArray<float, double>{arrays.x[n], arrays}; };
  const auto i = [&](int n) { return HostArray<int, int>{arrays.i[n], arrays}; };
  return plain_expression::sees<double>(at, x(0), x(1), x(2), x(3), i(0), i(1));
}

#ifdef SDPA_BACKWARD_KNOBS
KernelFacts backward_facts_of(const SdpaParams& p) {
  KernelFacts facts = facts_of(p);
  facts.kernel = reinterpret_cast<const void*>(+sdpa_backward_kv<Build>);
  facts.shared_bytes = sizeof(BackwardShared<Build>);
  return facts;
}
SdpaStatus run_backward(const SdpaParams& forward, const Gradients& g, cudaStream_t stream) {
  const auto as_output = [](void* x) { return static_cast<Input*>(x); };
  SdpaBackwardParams p{};
  p.forward = forward;
  p.dO = static_cast<const Output*>(g.dO), p.dQ = as_output(g.dQ), p.dK = as_output(g.dK), p.dV = as_output(g.dV);
  p.d_o = g.d_o, p.d_q = g.d_q, p.d_k = g.d_k, p.d_v = g.d_v;
  p.dLSE = g.dLSE, p.dSinks = g.dSinks, p.workspace = g.workspace;
  return sdpa_backward(p, stream);
}
#endif

Line describe_build() {
  Line l{};
  l.name = SDPA_TEXT(SDPA_CONFIG_NAME), l.family = family_name;
  l.archs = SDPA_TEXT(__CUDA_ARCH_LIST__);  // the macro is nvcc's
  l.knobs = all_knobs, l.knob_count = sizeof all_knobs / sizeof all_knobs[0];
  l.D = Build::head_dim, l.Dv = Build::d_v, l.vec_width = Build::vec_width;
  l.barriers_per_tile = barriers_per_tile();
  l.query = Build::q_type, l.input = Build::input, l.output = Build::output, l.fp16_acc = Build::fp16_acc;
  l.has_softcap = Build::use_softcap != 0, l.tanh_is_approximate = Build::use_softcap == 1;
  l.has_sinks = Build::use_sinks, l.has_lengths = Build::use_lengths, l.has_pages = Build::use_pages != 0;
  l.has_small_pages = Build::use_pages == 2;
  l.use_bias = Build::use_bias, l.has_key_mask = Build::use_key_mask;
  l.has_bias_maps = is_wgmma && Build::hides_rounds && !Build::use_lengths && (Build::use_tuned || lists_rounds<Build>);
  for (int n = 0; n < 6; n++) l.names[n] = mods_name(mod_arrays[n]);
  if (Build::changes_logits) l.logit = logit_on_host;
  if (Build::hides_keys) l.sees = sees_on_host;
  if constexpr (Build::changes_logits || Build::hides_keys) l.witness = launch_witness_of<Query<Build>, Input, OwnMods>;
  l.is_wgmma = is_wgmma;
  l.has_queue = Build::use_persistent_cta, l.is_tuned = Build::use_tuned;
  l.sums_end = sums_end<Build> && !Build::use_tuned;
  for (int n = next_tile(0); n < tile_count; n = next_tile(n + 1)) {
    l.tiles[l.tile_count++] = TUNED_TILES[n];
  }
  if (!Build::use_tuned) l.tiles[l.tile_count++] = tile_of({});
  l.tile_of = tile_of, l.facts_of = facts_of, l.forward = sdpa_forward, l.map_bias = sdpa_map_bias;
#ifdef SDPA_BACKWARD_KNOBS
  l.facts_of = backward_facts_of, l.backward = run_backward, l.backward_workspace_bytes = backward_workspace_bytes;
#endif
  return l;
}

}  // namespace
}  // namespace SDPA_NAMESPACE

extern "C" const void* sdpa_line() {
  static SDPA_NAMESPACE::Line line = SDPA_NAMESPACE::describe_build();  // tests/unit.cu changes it
  return &line;
}

#endif  // SDPA_HARNESS_ONLY
#ifndef SDPA_LINE_ONLY

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "reference.cpp"

// Linked in by CMake, so that a new commit relinks but does not recompile; absent in a plain build.
extern "C" __attribute__((weak)) const char* sdpa_git_sha();

namespace SDPA_NAMESPACE {
namespace {

using reference::format;
using reference::Tensor;
using std::string;
using std::to_string;
using std::vector;

const Line& line = *static_cast<const Line*>(sdpa_line());
const reference::Type& type_of(DType t) {
  constexpr const reference::Type* types[] = {&reference::fp16, &reference::bf16, &reference::e4m3,
                                              &reference::u8};
  return *types[int(t)];
}
const reference::Type &query_type = type_of(line.query), &output_type = type_of(line.output);
// The types of Q, K and V in rows; the type of a tensor's elements.
const string dtype = line.query == line.input ? query_type.name : string(query_type.name) + "/" + type_of(line.input).name;
string knob_value(const string& name) {
  for (const Knob* k = line.knobs; k < line.knobs + line.knob_count; k++) {
    if (name == k->name) return k->value;
  }
  return "";
}
DType dtype_of(Tensor t) {
  return t == Tensor::O || t == Tensor::dO ? line.output : t == Tensor::Q || t == Tensor::dQ ? line.query : line.input;
}
const char* name_of(Tensor t) {
  constexpr const char* names[] = {"Q", "K", "V", "O", "dO", "dQ", "dK", "dV"};
  return names[int(t)];
}
// What a tanh_approx of SCORE_MOD moves a logit by, at most: it is within 2^-11.
double error_by_tanh_approx() {
  if (!line.logit || !expression_names("tanh_approx", knob_value("SCORE_MOD"))) return 0;
  const vector<float> ones(4096, 1.0f);
  const vector<int> zeros(4096, 0);
  bool outside = false;
  const ModArrays arrays{{&ones[0], &ones[0], &ones[0], &ones[0]}, {&zeros[0], &zeros[0]}, ones.size(), &outside};
  double most = 0;
  for (double s = -32; s <= 32; s++) {
    const ModPlace at{0, 0, 5, 3, 64, 64};
    most = std::max(most, std::fabs(line.logit(s, at, arrays, 1.0 / 2048) - line.logit(s, at, arrays, 0)));
  }
  return most;
}
// What an error may be in this problem.
reference::Tolerance tolerance_of(const reference::Problem& p) {
  reference::Tolerance t = max(type_of(line.query).tolerance, type_of(line.output).tolerance);
  if (line.fp16_acc) t = max(t, reference::fp16_sums);
  // An e4m3 logit is the scale times a sum of D products, each of which wgmma cuts off: twice as much is lost at D=256
  // as at 128, or at twice the scale.
  if (line.is_wgmma && line.query == DType::e4m3) {
    t.lse *= std::max(1.0, p.D / 128.0) * std::max(1.0, std::fabs(p.scale) * std::sqrt(p.D));
  }
  // tanh.approx moves a logit by 2^-11 of itself, and its weight by as much as the logit. No logit is over the softcap.
  const double of_weight = line.tanh_is_approximate ? std::min(p.softcap, reference::largest_logit(p)) / 2048
                                                    : error_by_tanh_approx();
  t.rel_rms += of_weight, t.max_abs += of_weight, t.lse += of_weight;
  return t;
}

#ifdef SDPA_SIMT
constexpr bool has_clock = false;
#else
constexpr bool has_clock = true;  // a GPU, not the CPU backend
#endif

struct CudaError {
  string text;
};
struct TooLarge : CudaError {};  // for this GPU's memory

void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw CudaError{string(what) + ": " + cudaGetErrorString(error)};
}

// ---- problems and their elements ----

struct Problem : reference::Problem {
  string shape, dist = "normal", layout = "bhsd";
  uint64_t seed = 0;
  int max_ctas = 0;         // of the launches but the first, whose results are checked
  bool same_heads = false;  // every head of an input is the first one
  // Factors of 8-bit inputs: one to a head, with gaps between them or zeros among them as well, one to a tensor, or
  // none.
  string descale = "heads";
  string machine;                              // --machine of tests/sweep.cu
  bool has_sinks = false, has_lengths = false, has_q_lengths = false, has_k_firsts = false;  // of the seed
  int page_size;                                // 0: K and V do not lie in pages
  bool narrow_table = false;                    // of pages: it ends with Sk, and lengths may be above
  int most_keys = 0;                            // as SdpaParams has it
  bool batch_invariant = false;
  // What the bias is like, one of bias_kinds, which of b, h and q it has dimensions for, and m if its map is made once for
  // all launches; "": there is none.
  string bias_kind, bias_dims = "q";
  bool keeps_map = false;  // MASK_MOD: one map for all launches
  string key_mask_kind;    // one of key_mask_kinds, perhaps with ",shared" by all batches; "": there is none

  Problem() : reference::Problem{}, page_size(line.has_pages ? 64 : 0) { D = line.D, Dv = line.Dv; }
};

// add and bool: at random, with rows that see nothing. tree: the last keys alone, each seen by what descends from it.
// causal, documents: what a causal mask hides, and all keys of 15 others of 16 documents.
// Which keys of a batch are padding: those behind, those before, or any of them and, with odd seeds, stretches of 200.
constexpr const char* key_mask_kinds[] = {"right", "left", "scattered"};
constexpr const char* bias_kinds[] = {"add", "bool", "tree", "causal", "documents", "blocks"};
string bias_text(const Problem& p) { return p.bias_kind.empty() ? "" : p.bias_kind + "," + p.bias_dims; }

// Which tensors have the sequences one after the other.
const char* packed_text(const Problem& p) { return p.packs_q ? p.packs_k ? "qk" : "q" : p.packs_k ? "k" : ""; }

SdpaParams params_of(const Problem& p) {  // but for the tensors
  SdpaParams params{};
  params.B = p.B, params.Hq = p.Hq, params.Hkv = p.Hkv, params.Sq = p.Sq, params.Sk = p.Sk;
  params.D = p.D, params.Dv = p.Dv, params.scale = float(p.scale), params.causal = Causal(int(p.mask));
  params.window_left = p.window_left, params.window_right = p.window_right;
  params.window_alignment = Causal(int(p.window_alignment));
  params.softcap = float(p.softcap), params.most_keys = p.most_keys;
  params.page_size = p.page_size, params.batch_invariant = p.batch_invariant;
  // A table as wide as a cache could become, whatever the lengths are; no wider where a sum ends.
  if (p.page_size && p.has_lengths && !p.narrow_table) params.Sk = line.sums_end && !p.most_keys ? 1 << 16 : 1 << 20;
  return params;
}

// Of a number as an element of the type, without its factor; and the number. A byte is in the low half.
uint16_t element_bits(DType t, float x) {
  const auto bits_of = [](auto element) {
    uint16_t bits = 0;
    memcpy(&bits, static_cast<const void*>(&element), sizeof element);
    return bits;
  };
  switch (t) {
    case DType::bf16:
      return bits_of(static_cast<__nv_bfloat16>(x));
    case DType::e4m3:
      return bits_of(static_cast<__nv_fp8_e4m3>(x));
    case DType::u8:
      return uint16_t(128 + std::lround(std::fmin(std::fmax(x, -128), 127)));
    default:
      return bits_of(static_cast<__half>(x));
  }
}
float element_value(DType t, uint16_t bits) {
  const auto value_of = [&](auto element) {
    memcpy(static_cast<void*>(&element), &bits, sizeof element);
    return static_cast<float>(element);
  };
  switch (t) {
    case DType::bf16:
      return value_of(__nv_bfloat16());
    case DType::e4m3:
      return value_of(__nv_fp8_e4m3());
    case DType::u8:
      return float(bits) - 128;
    default:
      return value_of(__half());
  }
}
float output_value(uint16_t bits) { return element_value(line.output, bits); }

size_t element_bytes(DType t) { return t == DType::e4m3 || t == DType::u8 ? 1 : 2; }
// What 1 stands for in U8, whose elements are multiples of it.
double unit_of(DType t) { return t == DType::u8 ? 448.0 / 127 : 1; }

using Bits = vector<uint16_t>;  // of elements, in the order [B,H,S,D]

// Calls f(i) for i in [0, n) on all cores.
template <class F> void for_all(size_t n, const F& f) {
  constexpr size_t block = 1 << 16;
  reference::parallel_for((n + block - 1) / block, [&](size_t part) {
    for (size_t i = part * block; i < std::min(n, (part + 1) * block); i++) f(i);
  });
}

// x / step in an input's type, as bits and, in the place of x, as numbers.
Bits round_to_elements(vector<float>& x, float step, DType type = line.input) {
  Bits bits(x.size());
  for_all(x.size(), [&](size_t i) {
    bits[i] = element_bits(type, x[i] / step);
    x[i] = element_value(type, bits[i]);
  });
  return bits;
}

// A power of 2 by which 8-bit elements are multiplied to have the range of x.
float step_for(const vector<float>& x, DType type) {
  if (element_bytes(type) == 2) return 1;
  float largest = 0;
  for (float value : x) {
    if (std::isfinite(value)) largest = std::max(largest, std::fabs(value));
  }
  const float range = type == DType::u8 ? 127 : 448;
  const float step = largest > 0 ? std::exp2(std::ceil(std::log2(largest / range))) : 1;
  return type == DType::u8 ? step : std::max(step, 1.0f);
}

// ---- tensors in device memory ----

constexpr size_t GUARD = 512;  // bytes before and after that nobody may touch; 0xff, a NaN

// Device memory between guards.
class Guarded {
 public:
  Guarded(const string& name, size_t bytes) : name(name), bytes(bytes) {
    const cudaError_t error = cudaMalloc(&base_, bytes + 2 * GUARD);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw TooLarge{{format("%s needs %.1f GB of GPU memory, which is not free", name.c_str(),
                             double(bytes) * 1e-9)}};
    }
    require(error, "allocating memory on the GPU");
    require(cudaMemset(base_, 0xff, GUARD), "poisoning memory");
    require(cudaMemset(base_ + GUARD + bytes, 0xff, GUARD), "poisoning memory");
  }
  virtual ~Guarded() { cudaFree(base_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  template <class T = char> T* data() const { return reinterpret_cast<T*>(base_ + GUARD); }
  void fill(int byte) { require(cudaMemset(data(), byte, bytes), "filling memory on the GPU"); }
  template <class T> vector<T> fetch(size_t size, ptrdiff_t at = 0) const {  // of `size` bytes
    vector<T> x(size / sizeof(T));
    require(cudaMemcpy(x.data(), data() + at, size, cudaMemcpyDeviceToHost),
            "copying from the GPU");
    return x;
  }
  template <class T> void store(const vector<T>& x, ptrdiff_t at = 0) {
    require(cudaMemcpy(data() + at, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice),
            "copying to the GPU");
  }
  // Sets `trouble` to a sentence if a guard was written.
  void expect_guards(string& trouble) const {
    const vector<char> poison(GUARD, char(0xff));
    const bool before = fetch<char>(GUARD, -ptrdiff_t(GUARD)) != poison;
    const bool after = fetch<char>(GUARD, ptrdiff_t(bytes)) != poison;
    if (trouble.empty() && before) trouble = "the kernel wrote before " + name;
    if (trouble.empty() && after) trouble = "the kernel wrote after " + name;
  }

  const string name;
  const size_t bytes;

 private:
  char* base_ = nullptr;
};

// A tensor [B,H,S,D], contiguous; tests/sweep.cu has others.
class DeviceTensor : public Guarded {
 public:
  DeviceTensor(const Problem& p, Tensor t, size_t elements)
      : Guarded(name_of(t), elements * bytes_of(t)), element_bytes(bytes_of(t)) {
    const int64_t S = of_query(t) ? p.Sq : p.Sk, H = of_query(t) ? p.Hq : p.Hkv;
    const int64_t D = width_of(p, t);
    strides = {H * S * D, S * D, D};
  }
  DeviceTensor(const Problem& p, Tensor t) : DeviceTensor(p, t, rows_of(p, t) * width_of(p, t)) {}

  virtual void* first() const { return data(); }  // element (0,0,0,0)
  virtual void poison() { fill(0xff); }
  virtual void write(const Bits& x) { store_elements(x); }
  // Sets `trouble` to a sentence if anything but the elements was written.
  virtual Bits read(string& trouble) const {
    expect_guards(trouble);
    return fetch_elements(bytes / element_bytes);
  }

  Strides strides;

 protected:
  // Elements of the allocation from the first-th on.
  void store_elements(const Bits& x, ptrdiff_t first = 0) {
    if (element_bytes == 2) return store(x, 2 * first);
    store(vector<uint8_t>(x.begin(), x.end()), first);
  }
  Bits fetch_elements(size_t count, ptrdiff_t first = 0) const {
    if (element_bytes == 2) return fetch<uint16_t>(2 * count, 2 * first);
    const vector<uint8_t> x = fetch<uint8_t>(count, first);
    return {x.begin(), x.end()};
  }

  const size_t element_bytes;

 private:
  static size_t bytes_of(Tensor t) {
    return SDPA_NAMESPACE::element_bytes(dtype_of(t));
  }
};

// The factors of an input's heads, of each batch or packed sequence.
class DeviceFactors : public Guarded {
 public:
  DeviceFactors(const Problem& p, Tensor t)
      : Guarded("a factor", p.descale == "none" ? 0 : elements(p, t) * sizeof(float)),
        tensor_(t),
        heads_(of_query(t) ? p.Hq : p.Hkv),
        batches_(p.B) {
    descale.factor = p.descale == "none" ? nullptr : data<float>();
    if (p.descale == "heads" || p.descale == "zeros") descale.head = 1, descale.batch = heads_;
    has_zeros_ = p.descale == "zeros";
    if (p.descale == "gaps") descale.head = 2, descale.batch = 2 * heads_ + 3;
  }
  // About `step`, different for every one; with "zeros" one in three is 0. Returns what the elements are multiplied
  // with, by head.
  vector<double> set(float step, uint64_t seed) {
    const double unit = unit_of(line.input);
    vector<float> x(bytes / sizeof(float), NAN);
    vector<double> of_heads;
    for (int head = 0; head < batches_ * heads_; head++) {
      double factor = 1;
      if (descale.factor) {
        const size_t at = head / heads_ * descale.batch + head % heads_ * descale.head;
        const uint64_t r = reference::mix(reference::mix(seed + 66 + int(tensor_)) + at);
        factor = x[at] = float(step / unit * (0.75 + 0.75 * double(r % 1024) / 1024));
        if (has_zeros_ && r % 3 == 0) factor = x[at] = 0;
      }
      of_heads.push_back(factor * unit);
    }
    store(x);
    return of_heads;
  }

  Descale descale;

 private:
  static size_t elements(const Problem& p, Tensor t) {
    const size_t heads = size_t(p.B) * (of_query(t) ? p.Hq : p.Hkv);
    return p.descale == "shared" ? 1 : p.descale == "gaps" ? 2 * heads + 3 * p.B : heads;
  }
  Tensor tensor_;
  int64_t heads_, batches_;
  bool has_zeros_ = false;
};

// ---- the witness of this line ----

// O [heads,Sq,D] and LSE [heads,Sq] of query heads [first, first + heads), counted over batches, by the line's own
// witness if it has SCORE_MOD or MASK_MOD.
template <class Q, class T>
cudaError_t launch_witness(const SdpaParams& p, int first, int heads, float* O, float* LSE) {
  const double unit = unit_of(line.input);
  const double scale = (p.scale == 0 ? 1 / std::sqrt(double(p.D)) : p.scale) * unit * unit;
  const WitnessArgs a{p, first, float(scale), float(unit), O, LSE, line.use_bias};
  return line.witness ? line.witness(a, heads) : launch_witness_of<Q, T, NoMods>(a, heads);
}

// ---- Instance: a problem on the GPU, ready to launch and to check ----

struct Figures {  // of checks: the worst errors, and over how many rows
  double rel_rms = 0, rel_rms_limit = 0, max_abs_err = 0, lse_err = 0;
  long rows_checked = 0, rows_witnessed = 0;  // compared with the reference, with the witness

  void include(const reference::Comparison& c) {
    rel_rms = std::max(rel_rms, c.rel_rms);
    rel_rms_limit = std::max(rel_rms_limit, c.rel_rms_limit);
    max_abs_err = std::max(max_abs_err, c.max_abs_err);
    lse_err = std::max(lse_err, c.lse_err);
  }
  void include(const reference::GradientComparison& c) {
    rel_rms = std::max(rel_rms, c.rel_rms());
    rel_rms_limit = std::max(rel_rms_limit, c.rel_rms_limit());
    max_abs_err = std::max(max_abs_err, c.max_abs_err);
  }
};

bool adds_bias() { return line.use_bias == 1 || line.use_bias == 3; }
int bias_bytes() { return line.use_bias == 2 ? 1 : line.use_bias == 3 ? 4 : 2; }  // of an element

// How the rows of a bias lie, by the layout of the other tensors.
struct BiasRows {
  const char *layout, *name;
  int unit;      // the stride of a row is a multiple of so many elements; 0: odd
  bool shifted;  // the tensor begins an element further
};
BiasRows bias_rows(const string& layout) {
  const int chunk = 16 / bias_bytes();  // elements in 16 bytes
  const BiasRows rows[] = {{"bhsd", "contiguous", 1, false}, {"bshd", "padded", chunk, false}, {"packed", "shifted", chunk, true}};
  for (const BiasRows& r : rows) {
    if (layout == r.layout) return r;
  }
  return {"", "odd", 0, true};
}

class Instance;

// What tests/sweep.cu changes.
std::unique_ptr<DeviceTensor> (*make_tensor)(const Problem&, Tensor) =
    [](const Problem& p, Tensor t) { return std::make_unique<DeviceTensor>(p, t); };
string (*check_more)(Instance&) = [](Instance&) { return string(); };  // a sentence on failure
void (*set_machine)(const string&) = [](const string&) {};            // before anything is asked of the GPU
// Returns the parameters that are launched for a problem; tests replace it.
SdpaParams (*prepare_launch)(const Problem&, const SdpaParams&) = [](const Problem&, const SdpaParams& p) { return p; };
// What tests/unit.cu changes: whether rows that the reference does not see are compared with the witness, what work of
// the reference a check may cost, and how many elements of O the witness has at once.
bool has_witness = has_clock;
double affordable_macs = 1.5e9;
size_t witness_elements = size_t(1) << 26;

}  // namespace
}  // namespace SDPA_NAMESPACE

#include "harness_backward.cu"

namespace SDPA_NAMESPACE {
namespace {

class Instance {
 public:
  explicit Instance(const Problem& p) : problem(p), params(params_of(p)) {
    // Inputs as floats and as elements, outputs twice, and of one tensor what it holds and must hold.
    // In double: a problem may have any sizes.
    const double host_need =
        (14.0 * p.B * p.Hq * p.Sq + 12.0 * p.B * p.Hkv * p.Sk) * std::max(p.D, p.Dv);
    const double host_bytes = double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGESIZE));
    if (host_need > host_bytes) {
      throw CudaError{format("checking the problem needs %.1f GB of host memory of %.1f GB",
                             host_need * 1e-9, host_bytes * 1e-9)};
    }
    for (int t = 0; t < 4; t++) tensors[t] = make_tensor(p, Tensor(t));
    lse_.reset(new Guarded("LSE", rows_of(p, Tensor::O) * sizeof(float)));
    const auto set = [&](auto*& pointer, Strides& strides, Tensor t) {
      pointer = static_cast<std::remove_reference_t<decltype(pointer)>>(at(t).first());
      strides = at(t).strides;
    };
    set(params.Q, params.q, Tensor::Q), set(params.K, params.k, Tensor::K);
    set(params.V, params.v, Tensor::V), set(params.O, params.o, Tensor::O);
    params.LSE = lse_->data<float>();
    Descale* const descales[] = {&params.q_descale, &params.k_descale, &params.v_descale};
    for (int t = 0; t < 3; t++) {
      if (element_bytes(dtype_of(Tensor(t))) == 2) continue;
      factors_[t].reset(new DeviceFactors(p, Tensor(t)));
      *descales[t] = factors_[t]->descale;
    }
    if (p.has_sinks) {
      sinks_.reset(new Guarded("the sinks", p.Hq * sizeof(float)));
      params.sinks = sinks_->data<float>();
    }
    const auto hold = [&](bool has, std::unique_ptr<Guarded>& of, const int*& pointer, int count) {
      if (!has) return;
      of.reset(new Guarded("the lengths", count * sizeof(int)));
      pointer = of->data<int>();
    };
    hold(p.has_lengths, lengths_, params.k_lengths, p.B), hold(p.has_q_lengths, q_lengths_, params.q_lengths, p.B);
    hold(p.has_k_firsts, firsts_, params.k_firsts, p.B);
    hold(p.packs_q, starts_[0], params.q_starts, p.B + 1), hold(p.packs_k, starts_[1], params.k_starts, p.B + 1);
    if (!p.bias_kind.empty()) hold_bias();
    if (!p.key_mask_kind.empty()) hold_key_mask();
    hold_mods();
    if (p.page_size) hold_pages();
    const KernelFacts facts = line.facts_of(params);
    workspace_.reset(new Guarded("the workspace", facts.workspace_bytes));
    workspace_->fill(0);
    scratch_.reset(new Guarded("the scratch memory", facts.scratch_bytes));
    params.workspace = workspace_->data(), params.scratch = scratch_->data();
    if (line.backward) backward_.reset(new BackwardPass(problem, params));
  }

  void set_inputs(uint64_t seed) {
    problem.seed = seed, has_forward_ = false;
    if (starts_[0]) starts_[0]->store(beyond_tensor(problem.q_starts = drawn_starts(problem, Tensor::Q, seed), problem.Sq, seed));
    if (starts_[1]) starts_[1]->store(beyond_tensor(problem.k_starts = drawn_starts(problem, Tensor::K, seed), problem.Sk, seed));
    if (sinks_) {
      const vector<float> sinks = drawn_sinks(problem, seed);
      sinks_->store(sinks), problem.sinks.assign(sinks.begin(), sinks.end());
    }
    if (lengths_) lengths_->store(drawn_lengths(problem, seed));
    if (problem.has_lengths || problem.most_keys) problem.k_lengths = keys_that_count(problem, seed);
    if (q_lengths_) q_lengths_->store(problem.q_lengths = drawn_q_lengths(problem, seed));
    if (firsts_) firsts_->store(problem.k_firsts = drawn_k_firsts(problem, seed));
    vector<double>* const factors[] = {&problem.q_factor, &problem.k_factor, &problem.v_factor};
    for (int t = 0; t < 3; t++) {
      vector<float>& x = inputs_[t];
      x = make_input(problem, Tensor(t), *reference::dist_named(problem.dist), seed,
                     problem.same_heads);
      const float step = problem.descale == "none" ? float(unit_of(line.input)) : step_for(x, dtype_of(Tensor(t)));
      if (factors_[t]) *factors[t] = factors_[t]->set(step, seed);
      held_[t] = round_to_elements(x, step, dtype_of(Tensor(t)));
      if (t > 0 && line.has_lengths) poison_what_is_no_key(Tensor(t));
      tensors[t]->write(held_[t]);
    }
    if (bias_) set_bias(seed);
    if (key_mask_) set_key_mask(seed);
    set_mods(seed);
    make_map();
    if (table_) set_pages(seed);
    problem.Q = inputs_[0].data(), problem.K = inputs_[1].data(), problem.V = inputs_[2].data();
    if (backward_) backward_->set_inputs(problem);
  }

  // Of 8 heads one has no sink (beside inputs of NaN and inf such a sink), one a sink that is nothing of its sum, and one, if
  // others are left to compare, a sink that is all of it.
  static vector<float> drawn_sinks(const Problem& p, uint64_t seed) {
    vector<float> sinks(p.Hq);
    for (int h = 0; h < p.Hq; h++) {
      const uint64_t turn = (seed + h) % 8;
      sinks[h] = 2 * reference::normal(seed + 99, Tensor::O, h);
      if (turn == 5) sinks[h] = p.dist != "nonfinite" ? -INFINITY : seed % 2 ? NAN : INFINITY;
      if (turn == 6 && h > (p.dist == "nonfinite")) sinks[h] = 100;
      if (turn == 7) sinks[h] = -150;
    }
    return sinks;
  }
  // Odd seeds: half of the lengths are a multiple of the tile's rows or keys, or one less or more.
  static int near_edge(int length, int most, int unit, uint64_t seed, int b) {
    const uint64_t r = reference::mix(seed * 1000037 + b);
    if (seed % 2 == 0 || r % 2 || most < unit - 1) return length;
    return std::min((1 + std::max(length, 0) % std::max(most / unit, 1)) * unit - 1 + int(r / 2 % 3), most);
  }
  static int rows_at_edge() { return std::min(line.tiles[0].block_m, 64); }  // a warpgroup's, or the tile's
  static int keys_at_edge() { return line.tiles[0].block_n; }

  // Of 8 sequences one says more keys than there are, one less than none, one has a single key, and one all or none.
  static vector<int> drawn_lengths(const Problem& p, uint64_t seed) {
    const int most = p.page_size && !p.narrow_table ? p.Sk : p.Sk + 9;
    vector<int> lengths(p.B);
    for (int b = 0; b < p.B; b++) {
      const uint64_t turn = (seed + b) % 8;
      lengths[b] = near_edge(int(reference::mix(seed * 1000003 + b) % (p.Sk + 1)), p.Sk, keys_at_edge(), seed, b);
      if (turn == 4) lengths[b] = (seed + b) / 8 % 2 ? 0 : p.Sk;
      if (turn >= 5) lengths[b] = turn == 5 ? most : turn == 6 ? -4 : std::min(1, most);
    }
    return lengths;
  }
  // From less than nothing to more rows than there are.
  static vector<int> drawn_q_lengths(const Problem& p, uint64_t seed) {
    vector<int> lengths(p.B);
    for (int b = 0; b < p.B; b++) {
      lengths[b] = near_edge(int(reference::mix(seed * 1000033 + b) % (p.Sq + 12)) - 4, p.Sq, rows_at_edge(), seed, b);
    }
    return lengths;
  }
  // Among 8 sequences one value is negative, one is 0, and one removes all keys or more.
  static vector<int> drawn_k_firsts(const Problem& p, uint64_t seed) {
    vector<int> firsts(p.B);
    for (int b = 0; b < p.B; b++) {
      const uint64_t turn = (seed + b) % 8;
      firsts[b] = turn == 1 ? -3 : turn == 3 ? 0 : int(reference::mix(seed * 1000081 + b) % (p.Sk / 2 + 1));
      if (turn == 4) firsts[b] = p.Sk + int(seed / 8 % 2);
    }
    return firsts;
  }
  // What the lengths and most_keys leave of each sequence's keys.
  static vector<int> keys_that_count(const Problem& p, uint64_t seed) {
    vector<int> lengths = p.has_lengths ? drawn_lengths(p, seed) : vector<int>(p.B, p.Sk);
    for (int& length : lengths) {
      length = std::max(0, std::min(length, p.Sk));
      if (p.most_keys) length = std::min(length, p.most_keys);
    }
    return lengths;
  }

  // A third of the sequences has no row; and with even seeds of up to Sk / 8 rows of K at either end none is one's.
  static vector<int> drawn_starts(const Problem& p, Tensor t, uint64_t seed) {
    const int rows = t == Tensor::Q ? p.Sq : p.Sk, most_left = t == Tensor::Q || seed % 2 ? 0 : rows / 8;
    seed += 1 + uint64_t(t);
    vector<int> starts(p.B + 1, rows);
    for (int b = 0; b < p.B; b++) {
      const uint64_t r = reference::mix(seed * 1000003 + b);
      starts[b] = b == 0 ? 0 : r % 3 == 0 ? starts[b - 1] : int(r / 3 % (rows + 1));
    }
    std::sort(starts.begin(), starts.end());
    const int first = int(reference::mix(seed + 7) % (most_left + 1)), end = rows - int(reference::mix(seed + 8) % (most_left + 1));
    for (int& start : starts) start = std::max(first, std::min(start, end));
    for (int b = 1; b < p.B; b++) {
      const int length = starts[b] - starts[b - 1];
      starts[b] = starts[b - 1] + near_edge(length, length, t == Tensor::Q ? rows_at_edge() : keys_at_edge(), seed, b);
    }
    return starts;
  }
  // The same for the kernel, which cuts off what is not within the tensor: a start at its end may be beyond it.
  static vector<int> beyond_tensor(vector<int> starts, int rows, uint64_t seed) {
    constexpr int far[] = {1, 100, 1000000}, most = std::numeric_limits<int>::max();
    for (size_t b = 0; b < starts.size(); b++) {
      const uint64_t r = reference::mix(seed * 1000033 + b) % 5;
      if (starts[b] == rows) starts[b] = r < 3 ? rows + far[r] : r == 3 ? most : rows;
      else if (starts[b] == 0) starts[b] = r < 3 ? -far[r] : r == 3 ? -most - 1 : 0;
    }
    return starts;
  }

  // What lies in row number `row` of K or V where no sequence has a key: NaN, inf and -inf by turns.
  static uint16_t poison_of_row(size_t row) {
    constexpr uint16_t fp16[] = {0x7e00, 0x7c00, 0xfc00}, bf16[] = {0x7fc0, 0x7f80, 0xff80}, e4m3[] = {0x7f, 0xff, 0x7f};
    return line.input == DType::fp16 ? fp16[row % 3] : line.input == DType::bf16 ? bf16[row % 3]
           : line.input == DType::e4m3 ? e4m3[row % 3] : 255;
  }
  // Rows that are a key of no sequence may hold anything, and nothing of it may reach O or LSE.
  void poison_what_is_no_key(Tensor t) {
    const size_t Sk = problem.Sk, D = width_of(problem, t), batches = batches_of(problem, t);
    vector<char> is_key(batches * Sk, 0);
    for (int b = 0; b < problem.B; b++) {
      const reference::Sequence own = reference::sequence_of(problem, b);
      for (size_t batch = 0; batch < batches; batch++) {
        if (!problem.same_heads && batches > 1 && batch != size_t(b)) continue;  // same_heads: one memory for all
        for (int k = 0; k < own.Sk; k++) is_key[batch * Sk + own.first_key + k] = 1;
      }
    }
    for (size_t row = 0; row < inputs_[int(t)].size() / D; row++) {
      if (is_key[row / Sk / problem.Hkv * Sk + row % Sk]) continue;
      std::fill_n(inputs_[int(t)].begin() + row * D, D, NAN);
      std::fill_n(held_[int(t)].begin() + row * D, D, poison_of_row(row % Sk));
    }
  }

  // K and V once more, in pages, for the kernel alone: as [pages,Hkv,page_size,D], or with a layout of its own as
  // [pages,page_size,Hkv,D], padded with gaps between rows and between pages. Each sequence has pages of its own, and
  // one more is for all.
  void hold_pages() {
    const int64_t size = problem.page_size, per_sequence = (problem.Sk + size - 1) / size;
    const int64_t pages = problem.B * per_sequence + 1, H = problem.Hkv;
    const bool by_heads = problem.layout == "bhsd";
    const int64_t gap = problem.layout == "padded" ? line.vec_width : 0;
    for (int t = 0; t < 2; t++) {
      const int64_t D = width_of(problem, Tensor(1 + t)) + gap, page = H * size * D + gap;
      pages_[t].reset(new DeviceTensor(problem, Tensor(1 + t), pages * page));
      (t ? params.v : params.k) = {page, by_heads ? size * D : D, by_heads ? D : H * D};
    }
    params.K = pages_[0]->data<Input>(), params.V = pages_[1]->data<Input>();
    params.pages = int(pages), params.page_stride = std::max(int(per_sequence), params.Sk / problem.page_size) + 3;
    if (problem.narrow_table) params.page_stride = int(per_sequence);
    table_.reset(new Guarded("the page table", problem.B * params.page_stride * sizeof(int)));
    params.page_table = table_->data<int>();
  }
  // In a drawn order. An entry that no visible key needs is wild, which is to become the first page or the last, or the
  // last: the page for all, which has no key.
  void set_pages(uint64_t seed) {
    constexpr int wild[] = {-7, 2147483647};
    const int size = problem.page_size, pages = params.pages, per_sequence = (problem.Sk + size - 1) / size;
    vector<int> order(pages - 1), table(size_t(problem.B) * params.page_stride);
    std::iota(order.begin(), order.end(), 0);
    for (int i = pages - 2; i > 0; i--) std::swap(order[i], order[reference::mix(seed * 77 + i) % (i + 1)]);
    for (int b = 0; b < problem.B; b++) {
      const reference::Sequence own = reference::sequence_of(problem, b);
      size_t first = own.Sk, end = 0;  // keys that some query sees, then their rows
      for (int q = 0; q < own.Sq; q++) {
        if (reference::first_key(problem, own, q) >= reference::past_last_key(problem, own, q)) continue;
        first = std::min(first, reference::first_key(problem, own, q));
        end = std::max(end, reference::past_last_key(problem, own, q));
      }
      first += own.first_key, end += own.first_key * (end > 0);
      for (int i = 0; i < params.page_stride; i++) {
        const size_t k = size_t(i) * size;
        const bool needed = k < end && k + size > first;
        const uint64_t r = reference::mix(seed * 78 + table.size() * b + i) % 3;
        table[b * params.page_stride + i] = needed ? order[b * per_sequence + i] : r < 2 ? wild[r] : pages - 1;
      }
    }
    for (int t = 0; t < 2; t++) {
      const Strides& s = t ? params.v : params.k;
      const Bits& x = held_[1 + t];
      const int D = width_of(problem, Tensor(1 + t));
      Bits paged(size_t(pages) * s.batch);
      for (size_t i = 0; i < paged.size(); i++) paged[i] = poison_of_row(i / D);
      for (int64_t row = 0; row < int64_t(x.size()) / D; row++) {
        const int64_t b = row / problem.Sk / problem.Hkv, h = row / problem.Sk % problem.Hkv, k = row % problem.Sk;
        const int64_t page = order[b * per_sequence + k / size];
        std::copy_n(&x[row * D], D, &paged[page * s.batch + h * s.head + k % size * s.row]);
      }
      pages_[t]->write(paged);
    }
    table_->store(table);
  }

  // Launches and compares the outputs with the reference, then launches `repeats` times more, which must
  // leave the same bits: the first time with as many CTAs as are resident, then with max_ctas, on which
  // no bit may depend. Returns a sentence on failure.
  string check(Figures& figures, int repeats) {
    params.max_ctas = 0;
    string trouble = run_once();
    params.max_ctas = problem.max_ctas;
    Figures of_forward;
    if (trouble.empty()) trouble = compare(backward_ ? of_forward : figures);
    checked = got;
    if (trouble.empty()) trouble = check_more(*this);
    if (trouble.empty() && backward_) trouble = check_backward(figures);
    for (int n = 0; n < repeats && trouble.empty(); n++) {
      trouble = check_again("of two runs on the same inputs differs");
    }
    return trouble;
  }
  // Another run must give the bits of the checked one; else a sentence.
  string check_again(const char* sentence) {
    const string trouble = run_once();
    return trouble.empty() ? difference(sentence) : trouble;
  }
  // Of launches since poison() the last must have left the bits of the checked run; else a sentence.
  string check_last(const char* sentence) {
    const string trouble = collect();
    return trouble.empty() ? difference(sentence) : trouble;
  }

  // poison() and launch_pass() serve the pass that the line is timed by.
  void poison() { backward_ && has_forward_ ? backward_->poison() : poison_forward(); }
  void launch_pass(cudaStream_t stream = 0) {
    backward_ && has_forward_ ? backward_->launch(prepare_launch(problem, params), stream) : launch(params, stream);
  }
  void launch(const SdpaParams& p, cudaStream_t stream = 0) const {
    const SdpaStatus status = line.forward(prepare_launch(problem, p), stream);
    if (!status.ok()) throw CudaError{status.text};
  }
  // Launches once. Returns a sentence if something but the outputs was written.
  string run_once() {
    poison();
    launch_pass();
    string trouble = collect();
    for (int t = 0; t < 3; t++) {
      const bool same = tensors[t]->read(trouble) == held_[t];
      if (!same && trouble.empty()) trouble = "the kernel wrote into " + tensors[t]->name;
    }
    return trouble;
  }

  DeviceTensor& at(Tensor t) { return *tensors[int(t)]; }
  // Empty, or the first element in which two results differ.
  string difference(const char* name, const Bits& want, const Bits& other,
                    const char* sentence) const {
    const size_t i = std::mismatch(other.begin(), other.end(), want.begin()).first - other.begin();
    if (i == other.size()) return "";
    return name + where(i) +
           format(" %s: %.9g and %.9g", sentence, double(output_value(want[i])),
                  double(output_value(other[i])));
  }

  // The place of an element of O.
  string where(size_t i) const {
    const size_t D = problem.Dv, S = problem.Sq, H = problem.Hq;
    return format("(b=%d,h=%d,q=%d,d=%d)", int(i / D / S / H), int(i / D / S % H), int(i / D % S),
                  int(i % D));
  }

  Problem problem;
  SdpaParams params;
  std::unique_ptr<DeviceTensor> tensors[4];  // Q, K, V, O
  struct Outputs {
    Bits O;
    vector<uint32_t> LSE;
  } got, checked;  // of the last run, and of the one that was compared

 private:
  void poison_forward() { at(Tensor::O).poison(), lse_->fill(0xff), scratch_->fill(0xff); }
  // Launches the backward pass on what the checked forward pass left, and compares the gradients with the reference. From
  // here on it is the pass that is launched.
  string check_backward(Figures& figures) {
    has_forward_ = true;
    string trouble = run_once();
    if (!trouble.empty()) return trouble;
    vector<float> O(checked.O.size()), LSE(checked.LSE.size());
    for_all(O.size(), [&](size_t i) { O[i] = output_value(checked.O[i]); });
    for (size_t i = 0; i < LSE.size(); i++) LSE[i] = float_of(checked.LSE[i]);
    trouble = backward_->compare(problem, O, LSE, figures);
    backward_->keep();
    return trouble;
  }
  // Waits, and fetches the outputs into `got`. Returns a sentence if anything around them or around the
  // workspace was written, or if the workspace is not as the next launch must find it.
  string collect() {
    require(cudaDeviceSynchronize(), "running the kernel");
    string trouble;
    got.O = at(Tensor::O).read(trouble);
    got.LSE = lse_->fetch<uint32_t>(lse_->bytes);
    for (const auto* memory : {&lse_, &workspace_, &scratch_}) (*memory)->expect_guards(trouble);
    if (bias_map_) bias_map_->expect_guards(trouble);
    if (trouble.empty() && backward_ && has_forward_) {
      trouble = backward_->collect();
      if (trouble.empty() && (got.O != checked.O || got.LSE != checked.LSE)) trouble = "the kernel wrote into O or LSE";
    }
    if (!trouble.empty()) return trouble;
    for (uint32_t word : workspace_->fetch<uint32_t>(workspace_->bytes)) {
      if (word) return format("the kernel left %u in the workspace, which must be zero", word);
    }
    return "";
  }

  // Empty if `got` has the bits of `checked`.
  string difference(const char* sentence) const {
    if (backward_ && has_forward_) return backward_->difference(problem, sentence);
    if (checked.LSE != got.LSE) return string("LSE ") + sentence;
    return difference("O", checked.O, got.O, sentence);
  }

  // `got` with the reference and, where that has not seen every row, with the witness.
  string compare(Figures& figures) {
    const Problem& p = problem;
    size_t queries = 0;
    for (size_t row = 0; row < got.LSE.size(); row++) {
      const bool is_query = reference::is_query(p, row_at(row));
      const char* const trouble = is_query ? " was never written" : " was written, and its row is no query";
      for (size_t i = row * p.Dv; i < (row + 1) * p.Dv; i++) {
        if ((got.O[i] != 0xffff) != is_query) return "O" + where(i) + trouble;
      }
      if ((got.LSE[row] != ~0u) != is_query) return "LSE" + where(row * p.Dv) + trouble;
      queries += is_query;
    }
    const auto rows = reference::rows_to_check(p, p.seed, line.facts_of(params).item_rows, affordable_macs);
    const auto want = reference::attend(p, rows);
    if (outside_) {
      return format("SCORE_MOD or MASK_MOD reads an array past its end; in these checks it has B*Hq*(Sq+Sk)+1024 = %zu "
                    "elements", mods_.size);
    }
    reference::Comparison comparison(output_type, judges_rounding());
    for (size_t i = 0; i < rows.size(); i++) {
      const Row row = output_row(rows[i]);
      comparison.add(rows[i], want[i], row.O, row.LSE);
    }
    const string trouble = comparison.verdict(tolerance_of(problem));
    figures.include(comparison);
    figures.rows_checked += comparison.rows;
    if (!trouble.empty() || rows.size() == queries || problem.dist == "nonfinite")
      return trouble;
    return has_witness ? compare_with_witness(figures, rows, want) : all_finite();
  }

  // Every row with the witness, and the witness with the reference on the rows of `sample`.
  string compare_with_witness(Figures& figures, const vector<reference::Row>& sample,
                              const vector<reference::Result>& want) {
    const size_t D = problem.Dv, S = problem.Sq, heads = heads_of(problem, Tensor::O);
    const size_t most_heads = std::min(heads, std::max<size_t>(1, witness_elements / (S * D)));
    const Guarded O_g("O of the witness", most_heads * S * D * sizeof(float));
    const Guarded LSE_g("LSE of the witness", most_heads * S * sizeof(float));
    reference::Comparison with_reference(output_type, false),
        with_witness(output_type, judges_rounding());
    size_t next = 0;  // of the sample, which is in order
    for (size_t first = 0; first < heads; first += most_heads) {
      const size_t count = std::min(most_heads, heads - first);
      constexpr auto of_e4m3 = launch_witness<__nv_fp8_e4m3, __nv_fp8_e4m3>;
      constexpr decltype(of_e4m3) launches[] = {launch_witness<__half, __half>, launch_witness<__nv_bfloat16, __nv_bfloat16>,
                                                of_e4m3, launch_witness<uint8_t, uint8_t>};
      constexpr decltype(of_e4m3) of_both[] = {launch_witness<__half, __nv_fp8_e4m3>, launch_witness<__nv_bfloat16, __nv_fp8_e4m3>};
      const auto launch = line.query == line.input ? launches[int(line.input)] : of_both[int(line.query)];
      SdpaParams plain = params;  // without pages, whose table may have room for more keys than there are
      plain.Sk = problem.Sk;
      plain.K = static_cast<const Input*>(tensors[1]->first()), plain.k = tensors[1]->strides;
      plain.V = static_cast<const Input*>(tensors[2]->first()), plain.v = tensors[2]->strides;
      require(launch(plain, int(first), int(count), O_g.data<float>(), LSE_g.data<float>()),
              "launching the witness");
      const vector<float> O = O_g.fetch<float>(count * S * D * sizeof(float));
      const vector<float> LSE = LSE_g.fetch<float>(count * S * sizeof(float));
      for (; next < sample.size(); next++) {
        const size_t row = row_number(sample[next]) - first * S;
        if (row >= count * S) break;
        with_reference.add(sample[next], want[next], &O[row * D], LSE[row]);
      }
      vector<reference::Comparison> of_head(count, reference::Comparison(output_type, false));
      reference::parallel_for(count, [&](size_t i) {
        const int b = int(first + i) / problem.Hq, h = int(first + i) % problem.Hq;
        for (size_t row = i * S; row < (i + 1) * S; row++) {
          const reference::Row at{b, h, int(row - i * S)};
          if (!reference::is_query(problem, at)) continue;
          const Row ours = output_row(at);
          of_head[i].add(at, int(D), &O[row * D], LSE[row], nullptr, ours.O, ours.LSE);
        }
      });
      for (const reference::Comparison& c : of_head) with_witness.merge(c);
    }
    // Sums in fp32 lose with the size of the logits.
    const double limit = 1e-5 * std::min(30.0, std::max(1.0, with_reference.largest_lse / 32));
    string trouble = with_reference.verdict({limit, limit, limit});
    if (!trouble.empty()) return "the witness is wrong: " + trouble;
    trouble = with_witness.verdict(tolerance_of(problem));
    figures.include(with_witness);
    figures.rows_witnessed += with_witness.rows;
    return trouble.empty() ? "" : "against the witness: " + trouble;
  }

  // Tensor cores truncate their sums, which adds up over very many keys; P of a coarser type than O, and sums in fp16,
  // hide how O was rounded; of u8 a single weight is often no power of two, and its own rounding shows in all of a row;
  // on stairs, or where a mask shows few keys, O is a row of V, which in 8 bits has few values if all heads are one.
  bool judges_rounding() const {
    if ((line.tanh_is_approximate && problem.softcap != 0) || error_by_tanh_approx() > 0) return false;
    const auto& mask = problem.key_mask;
    const bool is_row_of_v = problem.dist == "stairs" || (!mask.empty() && std::count(mask.begin(), mask.end(), 1) < 16);
    const bool has_one_head = problem.same_heads || problem.B * problem.Hkv == 1;
    if (is_row_of_v && has_one_head && element_bytes(line.input) == 1) return false;
    return !line.fp16_acc && line.input != DType::u8 && problem.Sk <= 1 << 14 &&
           query_type.mantissa_bits >= output_type.mantissa_bits;
  }

  string all_finite() const {
    for (size_t i = 0; i < got.O.size(); i++) {
      const bool is_query = reference::is_query(problem, row_at(i / problem.Dv));
      if (is_query && !std::isfinite(output_value(got.O[i]))) return "O" + where(i) + " is not finite";
    }
    return "";
  }

  struct Row {
    float O[256], LSE;
  };
  Row output_row(const reference::Row& at) const {
    const size_t n = row_number(at);
    Row row;
    for (int d = 0; d < problem.Dv; d++) row.O[d] = output_value(got.O[n * problem.Dv + d]);
    row.LSE = float_of(got.LSE[n]);
    return row;
  }
  size_t row_number(const reference::Row& at) const {  // in [B,Hq,Sq]
    return (size_t(at.b) * problem.Hq + at.h) * problem.Sq + at.q;
  }
  reference::Row row_at(size_t number) const {
    const size_t S = problem.Sq, H = problem.Hq;
    return {int(number / S / H), int(number / S % H), int(number % S)};
  }

  void hold_bias() {
    reference::Bias& bias = problem.bias;
    const auto size_of = [&](char dim, int size) { return problem.bias_dims.find(dim) == string::npos ? 1 : size; };
    bias.batches = size_of('b', problem.B), bias.heads = size_of('h', problem.Hq), bias.rows = size_of('q', problem.Sq);
    bias.of_last_keys = problem.bias_kind == "tree", bias.hides = line.use_bias == 2;
    bias.keys = bias.of_last_keys ? std::max(std::min(problem.Sk, problem.Sq), std::min(problem.Sk, 1)) : problem.Sk;
    params.bias_keys = bias.of_last_keys ? bias.keys : 0;
    const BiasRows rows = bias_rows(problem.layout);
    bias_row_ = rows.unit > 0 ? (bias.keys + rows.unit - 1) / rows.unit * rows.unit : bias.keys + 1 - bias.keys % 2;
    params.bias_strides = {bias.batches > 1 ? bias_row_ * bias.rows * bias.heads : 0,
                           bias.heads > 1 ? bias_row_ * bias.rows : 0, bias.rows > 1 ? bias_row_ : 0};
    const size_t elements = size_t(bias.batches) * bias.heads * bias.rows * bias_row_ + 1;
    bias_.reset(new Guarded("the bias", elements * bias_bytes()));
    params.bias = bias_->data<char>() + rows.shifted * bias_bytes();
    params.bias_map_bytes = problem.bias_dims.find('m') == string::npos ? 0 : line.facts_of(params).bias_map_bytes;
    if (params.bias_map_bytes == 0) return;
    bias_map_.reset(new Guarded("the map of the bias", params.bias_map_bytes));
    params.bias_map = bias_map_->data();
  }
  void set_bias(uint64_t seed) {
    reference::Bias& bias = problem.bias;
    const float infinity = std::numeric_limits<float>::infinity();
    bias.x.assign(size_t(bias.batches) * bias.heads * bias.rows * bias.keys, 0);
    const bool has_floats = line.use_bias == 3;
    const string& kind = problem.bias_kind;
    reference::parallel_for(bias.x.size() / std::max(bias.keys, 1), [&](size_t row) {
      const int q = int(row % bias.rows);
      const uint64_t of_row = reference::mix(reference::mix(seed + 33) + row);
      for (int k = 0; k < bias.keys; k++) {
        float& x = bias.x[row * bias.keys + k];
        const uint64_t r = reference::mix(of_row + k);
        bool seen = true;
        if (kind == "causal") seen = k <= q;
        const int64_t column = int64_t(k) * 16 / bias.keys, of_rows = int64_t(q) * 16 / bias.rows;
        if (kind == "documents") seen = column == of_rows;
        if (kind == "blocks") seen = (column ^ of_rows ^ int64_t(row / bias.rows)) % 4 == 0;  // others for each head
        if (kind == "tree") {  // key k is node k of a tree whose node n has the parent (n - 1) / 2
          int node = q % bias.keys;
          while (node > k) node = (node - 1) / 2;
          seen = node == k;
        }
        if (kind == "add" || kind == "bool") {
          // Of the first 1,024 queries' whole stretches of 200 keys as well, and of 32 rows one that sees nothing.
          const bool is_special = q < 1024;
          seen = r % 16 > 0 && !(is_special && (reference::mix(of_row % 64 * 999 + k / 200 + seed) % 4 == 0 || of_row % 32 == 0));
          if (kind == "add") x = 2 * reference::normal(seed + 34, Tensor::O, row * bias.keys + k);
          if (kind == "add" && has_floats) x += 1000;  // where 16 bits would have steps of 0.5 or 4
          if (kind == "add" && (line.input == DType::bf16 || has_floats) && is_special && (r % 64 == 33 || of_row % 32 == 1)) x = -3.3e38f;
        }
        x = !seen ? -infinity : has_floats ? x : element_value(line.input, element_bits(line.input, x));
      }
    });
    vector<char> bytes(bias_->bytes, char(0xff));  // what is no element is NaN, or true
    const size_t start = static_cast<const char*>(params.bias) - bias_->data<char>();
    for (size_t i = 0; i < bias.x.size(); i++) {
      const uint16_t short_bits = line.use_bias == 2 ? bias.x[i] == 0 : element_bits(line.input, bias.x[i]);
      const void* const bits = has_floats ? static_cast<const void*>(&bias.x[i]) : &short_bits;
      memcpy(&bytes[start + (i / bias.keys * bias_row_ + i % bias.keys) * bias_bytes()], bits, bias_bytes());
    }
    bias_->store(bytes);
  }

  // Rows without gaps, or of other layouts an odd number of bytes apart, the first at an odd address.
  void hold_key_mask() {
    const bool is_shared = problem.key_mask_kind.find(',') != string::npos, is_odd = problem.layout != "bhsd";
    key_mask_row_ = is_odd ? problem.Sk / 2 * 2 + 1 : problem.Sk;
    key_mask_.reset(new Guarded("the mask of keys", size_t(problem.B) * key_mask_row_ + 1));
    params.key_mask = key_mask_->data<uint8_t>() + is_odd, params.key_mask_stride = is_shared ? 0 : key_mask_row_;
  }
  // Of 8 batches one sees no key, one sees all, and one sees a single key.
  void set_key_mask(uint64_t seed) {
    const int Sk = problem.Sk, rows = params.key_mask_stride == 0 ? 1 : problem.B;
    const string kind = problem.key_mask_kind.substr(0, problem.key_mask_kind.find(','));
    problem.key_mask.assign(size_t(rows) * Sk, 0);
    vector<uint8_t> bytes(key_mask_->bytes, 1);
    for (int b = 0; b < rows; b++) {
      const uint64_t turn = (seed + b) % 8, of_row = reference::mix(reference::mix(seed + 55) + b);
      const int drawn = int(of_row % (Sk + 1)), seen = turn == 5 ? 0 : turn == 6 ? Sk : turn == 7 ? std::min(Sk, 1) : drawn;
      for (int k = 0; k < Sk; k++) {
        const uint64_t r = reference::mix(of_row + k);
        const bool in_stretch = seed % 2 && reference::mix(of_row + 999 + k / 200) % 2;
        const bool is_seen = kind == "right"  ? k < seen
                             : kind == "left" ? k >= Sk - seen
                             : turn < 5       ? r % 8 > 0 && !in_stretch
                                              : turn == 6 || (seen == 1 && k == drawn % Sk);
        problem.key_mask[size_t(b) * Sk + k] = is_seen;
        // Any byte but 0 shows a key.
        bytes[(params.key_mask - key_mask_->data<uint8_t>()) + b * key_mask_row_ + k] = is_seen ? uint8_t(1 + r / 8 % 255) : 0;
      }
    }
    key_mask_->store(bytes);
  }

  // The arrays that SCORE_MOD and MASK_MOD name. Each has an element for every row of Q, K and V and each query head, and
  // 1,024 more, so that an index may be made of b, h, q and k in many ways.
  void hold_mods() {
    const Problem& p = problem;
    mods_.size = size_t(p.B) * std::max(p.Hq, 1) * (p.Sq + p.Sk) + 1024, mods_.outside = &outside_;
    const float** const x[] = {&params.x0, &params.x1, &params.x2, &params.x3};
    const int** const i[] = {&params.i0, &params.i1};
    for (int n = 0; n < 6; n++) {
      if (!line.names[n]) continue;
      mod_arrays_[n].reset(new Guarded(mod_arrays[n], mods_.size * sizeof(float)));
      if (n < 4) *x[n] = mod_arrays_[n]->data<float>();
      else *i[n - 4] = mod_arrays_[n]->data<int>();
    }
    if (!line.sees || !p.keeps_map) return;
    params.bias_map_bytes = line.facts_of(params).bias_map_bytes;
    if (params.bias_map_bytes == 0) return;
    bias_map_.reset(new Guarded("the map of MASK_MOD", params.bias_map_bytes));
    params.bias_map = bias_map_->data();
  }
  // x0: slopes, powers of two from 2^-8 to 1/2. x1 and x3: N(0,1). x2: uniform in [0.5, 1.5). i0: numbers of documents,
  // which have a length from 1 to an eighth of the longer of Sq and Sk. i1: uniform among 0, 1, 2 and 3.
  void set_mods(uint64_t seed) {
    for (int n = 0; n < 6; n++) {
      if (!mod_arrays_[n]) continue;
      const auto drawn = [&](size_t i) { return reference::mix(reference::mix(seed + 44 + n) + i); };
      if (n < 4) {
        vector<float>& x = mod_reals_[n];
        x.resize(mods_.size), mods_.x[n] = x.data();
        for_all(x.size(), [&](size_t i) {
          const uint64_t r = drawn(i);
          x[i] = n == 0   ? std::exp2(-float(1 + r % 8))
                 : n == 2 ? 0.5f + float(r % 4096) / 4096
                          : reference::normal(seed + 44 + n, Tensor::O, i);
        });
        mod_arrays_[n]->store(x);
      } else {
        vector<int>& x = mod_ints_[n - 4];
        x.resize(mods_.size), mods_.i[n - 4] = x.data();
        const uint64_t longest = std::max(std::max(problem.Sq, problem.Sk) / 8, 1);
        int document = 0;
        for (size_t i = 0, end = 0; i < x.size(); i++) {
          if (i == end) end += 1 + drawn(i) % longest, document++;
          x[i] = n == 4 ? document : int(drawn(i) % 4);
        }
        mod_arrays_[n]->store(x);
      }
    }
    const auto place = [](int b, int h, int q, int k, int Sq, int Sk) { return ModPlace{b, h, q, k, Sq, Sk}; };
    if (line.logit) {
      problem.logit = [=](double s, auto... at) { return line.logit(s, place(at...), mods_, 0); };
    }
    if (line.sees) problem.sees = [=](auto... at) { return line.sees(place(at...), mods_); };
  }
  void make_map() {
    if (!bias_map_) return;
    bias_map_->fill(0xff);
    const SdpaStatus status = line.map_bias(params, nullptr);
    if (!status.ok()) throw CudaError{status.text};
  }

  std::unique_ptr<Guarded> mod_arrays_[6];  // named as mod_arrays
  vector<float> mod_reals_[4];
  vector<int> mod_ints_[2];
  ModArrays mods_;
  bool outside_ = false;  // an expression read what is no element of an array
  std::unique_ptr<Guarded> lse_, workspace_, scratch_, sinks_, lengths_, q_lengths_, firsts_, bias_, bias_map_, key_mask_,
      starts_[2];                              // of Q, of K
  int64_t bias_row_ = 0, key_mask_row_ = 0;    // elements from a row to the next
  std::unique_ptr<DeviceTensor> pages_[2];     // of K, of V
  std::unique_ptr<Guarded> table_;
  std::unique_ptr<DeviceFactors> factors_[3];  // of Q, K and V with 8 bits
  vector<float> inputs_[3];                    // Q, K, V, rounded
  Bits held_[3];                               // what they are in device memory
  std::unique_ptr<BackwardPass> backward_;     // of a line that has one
  bool has_forward_ = false;                   // O and LSE are those of the checked forward pass of these inputs
};

enum ExitCode { exit_pass = 0, exit_wrong = 1, exit_usage = 2, exit_cuda = 3, exit_skipped = 77 };

const char* const causal_names[] = {"off", "br", "tl"};  // by reference::Mask, by Causal

// ---- timing ----

struct Timing {
  double p50_us = 0, p90_us = 0, p99_us = 0, min_us = 0, graph_us = 0, graph_lo_us = 0,
         graph_hi_us = 0, cold_us = 0, clock_mhz = 0;
  string trouble;  // a sentence, if a series of launches left other bits than the checked run
};

inline double percentile(vector<double> samples, double fraction) {  // nearest rank
  std::sort(samples.begin(), samples.end());
  const double rank = std::ceil(fraction * double(samples.size()));
  return samples[size_t(std::max(1.0, rank)) - 1];
}

#ifdef SDPA_SIMT
Timing time_kernel(Instance&, int, int) { return {}; }
#else

// Cycles of one SM and nanoseconds of the same stretch, some 300 us long.
__global__ void count_clocks(long long* cycles_and_ns) {
  const auto now_ns = [] {
    long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
  };
  const long long ns = now_ns(), cycles = clock64();
  while (now_ns() - ns < 300000) {
  }
  cycles_and_ns[0] = clock64() - cycles;
  cycles_and_ns[1] = now_ns() - ns;
}

class Timer {
 public:
  Timing t;

  explicit Timer(Instance& instance)
      : instance_(instance), clocks_("the clock", 2 * sizeof(long long)) {
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
    require(cudaEventCreate(&begin_), "creating an event");
    require(cudaEventCreate(&end_), "creating an event");
  }
  ~Timer() { cudaEventDestroy(begin_), cudaEventDestroy(end_), cudaStreamDestroy(stream_); }

  // A pair of events around each launch, and then some back to back.
  void time_launches(int warmup, int iterations) {
    vector<double> us;
    checked("in the last of several launches differs", [&] {
      for (int i = 0; i < warmup; i++) launch();
      for (int i = 0; i < iterations; i++) us.push_back(time_us([&] { launch(); }));
      for (int i = 0; i < 3; i++) launch();
    });
    t.p50_us = percentile(us, 0.5), t.p90_us = percentile(us, 0.9);
    t.p99_us = percentile(us, 0.99), t.min_us = percentile(us, 0);
  }

  // A launch's share of a replayed graph: the kernel without what a launch costs.
  void time_graph(int least_replays) {
    constexpr int launches = 20, most_replays = 1000;
    // An H200 clocks a kernel that draws much power down as it warms up: replays of 0.1 s before the
    // measured ones bring the figures of processes from within 1% of each other to 0.3%.
    constexpr double warm_up_us = 100e3, replayed_us = 30e3;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    require(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capturing a graph");
    for (int i = 0; i < launches; i++) launch();
    require(cudaStreamEndCapture(stream_, &graph), "capturing a graph");
    require(cudaGraphInstantiate(&executable, graph, 0), "instantiating a graph");
    const auto replay = [&] { require(cudaGraphLaunch(executable, stream_), "replaying a graph"); };
    vector<double> us;
    checked("in the last replay of the graph differs", [&] {
      for (double spent = 0; spent < warm_up_us;) spent += time_us(replay);
      double spent = 0;
      for (int i = 0; i < least_replays || (spent < replayed_us && i < most_replays); i++) {
        us.push_back(time_us(replay) / launches), spent += us.back() * launches;
      }
      replay();
      t.clock_mhz = clock_mhz();  // right after the load, before clocks change
    });
    // Bounds that hold the median with 95%: the samples whose ranks are 1.96 standard deviations of a
    // binomial(n, 1/2) from the middle (David and Nagaraja, Order Statistics, 7.1).
    std::sort(us.begin(), us.end());
    const double n = double(us.size());
    const size_t skipped = size_t(std::max(0.0, (n - 1.96 * std::sqrt(n)) / 2));
    t.graph_us = percentile(us, 0.5);
    t.graph_lo_us = us[skipped], t.graph_hi_us = us[us.size() - 1 - skipped];
    require(cudaGraphExecDestroy(executable), "destroying a graph");
    require(cudaGraphDestroy(graph), "destroying a graph");
  }

  // Each launch after the L2 cache was filled with something else.
  void time_cold(int iterations) {
    const size_t bytes = 4 * size_t(device_attribute(cudaDevAttrL2CacheSize, 0)) + (32 << 20);
    const Guarded other("what flushes L2", bytes);
    vector<double> us;
    checked("in the last launch with a cold L2 differs", [&] {
      for (int i = 0; i < iterations; i++) {
        require(cudaMemsetAsync(other.data(), i, bytes, stream_), "flushing L2");
        us.push_back(time_us([&] { launch(); }));
      }
    });
    t.cold_us = percentile(us, 0.5);
  }

 private:
  void launch() { instance_.launch_pass(stream_); }

  // Runs the series; what its last launch left must have the bits of the checked run.
  template <class Series> void checked(const char* sentence, const Series& series) {
    instance_.poison();
    require(cudaDeviceSynchronize(), "poisoning the outputs");  // on another stream
    series();
    if (t.trouble.empty()) t.trouble = instance_.check_last(sentence);
  }
  // Microseconds of GPU time from before work() to after it.
  template <class Work> double time_us(const Work& work) {
    require(cudaEventRecord(begin_, stream_), "recording an event");
    work();
    require(cudaEventRecord(end_, stream_), "recording an event");
    require(cudaEventSynchronize(end_), "running the kernel");
    float ms = 0;
    require(cudaEventElapsedTime(&ms, begin_, end_), "reading an event");
    return 1e3 * ms;
  }
  double clock_mhz() {
    count_clocks<<<1, 1, 0, stream_>>>(clocks_.data<long long>());
    require(cudaStreamSynchronize(stream_), "reading the clock");
    const vector<long long> c = clocks_.fetch<long long>(clocks_.bytes);
    return c[1] ? 1e3 * double(c[0]) / double(c[1]) : 0;
  }

  Instance& instance_;
  const Guarded clocks_;
  cudaStream_t stream_;
  cudaEvent_t begin_, end_;
};

Timing time_kernel(Instance& instance, int warmup, int iterations) {
  Timer timer(instance);
  timer.time_launches(warmup, iterations);
  timer.time_graph(std::min(iterations, 15));
  timer.time_cold(std::min(iterations, 20));
  if (timer.t.trouble.empty()) {
    timer.t.trouble = instance.check_again("in the run after timing differs");
  }
  return timer.t;
}
#endif  // SDPA_SIMT

// ---- the GPU ----

struct Device {
  string name, sm, driver;
  string missing;                             // why nothing can run here; empty if it can
  double matrix_flops = 0, memory_bytes = 0;  // a second at most; 0: not known
};

string driver_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  string word;
  while (file >> word) {
    const bool number = word.find_first_not_of("0123456789.") == string::npos;
    if (number && word.find('.') != string::npos) return word;
  }
  return "";
}

#ifdef SDPA_SIMT
void find_peaks(Device&, const cudaDeviceProp&) {}
#else
void find_peaks(Device& d, const cudaDeviceProp& prop) {
  const struct {
    int sm, flops;  // per SM and clock: dense 16-bit products with fp32 sums (GeForce: half of it)
  } rates[] = {{80, 2048}, {86, 1024}, {89, 1024}, {90, 4096}, {100, 8192}, {120, 1024}};
  for (const auto& rate : rates) {
    if (rate.sm != prop.major * 10 + prop.minor) continue;
    const int in_16_bits = line.query == DType::e4m3 ? 2 : 1;  // products to one of 16-bit elements
    d.matrix_flops = 1e3 * rate.flops * in_16_bits * prop.multiProcessorCount *
                     device_attribute(cudaDevAttrClockRate, 0);
  }
  d.memory_bytes = 2e3 * device_attribute(cudaDevAttrMemoryClockRate, 0) * prop.memoryBusWidth / 8;
}
#endif  // SDPA_SIMT

Device find_device() {
  Device d;
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    const bool none =
        error == cudaSuccess || error == cudaErrorNoDevice || driver_version().empty();
    d.missing = none ? "no CUDA GPU in this machine"
                     : string("no usable CUDA GPU: ") + cudaGetErrorString(error);
    return d;
  }
  cudaDeviceProp prop;
  require(cudaGetDeviceProperties(&prop, 0), "asking for the GPU's properties");
  d.name = prop.name;
  if (!has_clock) return d;
  d.sm = to_string(prop.major) + to_string(prop.minor), d.driver = driver_version();
  find_peaks(d, prop);
  const KernelFacts k = line.facts_of({});
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, k.kernel);
  if (error != cudaSuccess) {
    cudaGetLastError();
    d.missing = format("built for sm_%s and this GPU is sm_%s (%s); build again on this machine",
                       line.archs, d.sm.c_str(), cudaGetErrorString(error));
  } else if (k.shared_bytes > prop.sharedMemPerBlockOptin) {
    d.missing = format("needs %zu bytes of shared memory a CTA and this GPU has %zu",
                       k.shared_bytes, prop.sharedMemPerBlockOptin);
  }
  return d;
}

struct Resources {  // of a kernel on this GPU
  int regs = 0, spill_bytes = 0, ctas_per_sm = 0;
};

Resources resources_of(const KernelFacts& k) {
  cudaFuncAttributes attributes;
  Resources r;
  require(cudaFuncGetAttributes(&attributes, k.kernel), "asking for the kernel's registers");
  require(cudaFuncSetAttribute(k.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               int(k.shared_bytes)),
          "setting the kernel's shared memory");
  require(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&r.ctas_per_sm, k.kernel, k.threads,
                                                        k.shared_bytes),
          "asking for occupancy");
  r.regs = attributes.numRegs, r.spill_bytes = int(attributes.localSizeBytes);
  return r;
}

// ---- a run of a problem, and its row ----

// Two products, each a multiply and an add for every visible pair and element of D. Of the backward pass five, of which
// three have D elements and two Dv, whatever a kernel computes twice.
double flops_of(const Problem& p) {
  const double widths = line.backward ? 3.0 * p.D + 2.0 * p.Dv : p.D + p.Dv;
  return 2 * widths * p.B * p.Hq * reference::visible_pairs(p);
}

struct Run {
  Problem problem;
  vector<uint64_t> seeds;
  KernelFacts kernel{};
  Resources resources;
  string status = "ok", check, note;
  Figures figures;
  Timing timing;
  ExitCode exit = exit_pass;

  bool timed() const { return timing.graph_us > 0; }
  double tflops() const { return flops_of(problem) / timing.graph_us * 1e-6; }
  // The least time that the products take at the rate of the matrix units, and that Q, K, V and O take at the
  // rate of the memory, each moved once. The longer one binds.
  double matrix_us(const Device& d) const { return flops_of(problem) / d.matrix_flops * 1e6; }
  double memory_us(const Device& d) const {
    double bytes = 0, keys = 0;
    for (int b = 0; b < problem.B; b++) keys += reference::sequence_of(problem, b).Sk;
    for (Tensor t : {Tensor::Q, Tensor::K, Tensor::V, Tensor::O}) {
      bytes += (of_query(t) ? double(rows_of(problem, t)) : problem.Hkv * keys) * width_of(problem, t) * element_bytes(dtype_of(t));
    }
    if (line.backward) bytes *= 2;  // each has a gradient of its size
    return bytes / d.memory_bytes * 1e6;
  }
  bool memory_binds(const Device& d) const { return memory_us(d) > matrix_us(d); }
  double share_of_peak(const Device& d) const {
    return std::max(memory_us(d), matrix_us(d)) / timing.graph_us;
  }
};

string knob_texts(bool changed_alone) {
  string text;
  for (const Knob* k = line.knobs; k < line.knobs + line.knob_count; k++) {
    if (changed_alone && !k->changed) continue;
    const string quote = strpbrk(k->value, " ()[]<>*&|?!'\"") ? "'" : "";  // of an expression
    text += (text.empty() ? "" : " ") + string(k->name) + "=" + quote + k->value + quote;
  }
  return text;
}

struct Column {
  const char* name;
  string value;
};

// "" without a window, else L, R and whose position it counts from, if that is named.
string window_text(const Problem& p, const char* comma) {
  if (!p.has_window()) return "";
  const string by = p.window_alignment == reference::Mask::none ? "" : causal_names[int(p.window_alignment)];
  return to_string(p.window_left) + comma + to_string(p.window_right) + (by.empty() ? "" : comma + by);
}

// The columns in their order; new ones come last.
vector<Column> columns(const Run& r, const Device& d) {
  const Problem& p = r.problem;
  const Timing& t = r.timing;
  const Figures& f = r.figures;
  const bool on_gpu = r.resources.regs > 0,
             has_peak = r.timed() && d.matrix_flops > 0 && d.memory_bytes > 0;
  const auto us = [&](double x) { return r.timed() ? format("%.3f", x) : ""; };
  const auto error = [&](double x) { return r.check.empty() ? "" : format("%.3g", x); };
  const auto rows = [&](long n) { return r.check.empty() ? "" : to_string(n); };
  const auto of_gpu = [&](int x) { return on_gpu ? to_string(x) : ""; };
  string seeds;
  for (uint64_t seed : r.seeds) seeds += (seeds.empty() ? "" : "+") + to_string(seed);
  // clang-format off
  return {
      {"config", line.name}, {"family", line.family}, {"shape", p.shape}, {"status", r.status},
      {"check", r.check}, {"p50_us", us(t.p50_us)}, {"p90_us", us(t.p90_us)}, {"p99_us", us(t.p99_us)},
      {"min_us", us(t.min_us)}, {"graph_us", us(t.graph_us)}, {"cold_us", us(t.cold_us)},
      {"tflops", r.timed() ? format("%.2f", r.tflops()) : ""}, {"rel_rms", error(f.rel_rms)},
      {"max_abs_err", error(f.max_abs_err)}, {"rows_checked", rows(f.rows_checked)},
      {"B", to_string(p.B)}, {"Hq", to_string(p.Hq)}, {"Hkv", to_string(p.Hkv)},
      {"Sq", to_string(p.Sq)}, {"Sk", to_string(p.Sk)}, {"D", to_string(p.D)}, {"dtype", dtype},
      {"causal", causal_names[int(p.mask)]}, {"seed", seeds}, {"regs", of_gpu(r.resources.regs)},
      {"spill_bytes", of_gpu(r.resources.spill_bytes)},
      {"smem_bytes", to_string(r.kernel.shared_bytes)},
      {"ctas_per_sm", of_gpu(r.resources.ctas_per_sm)},
      {"barriers_per_tile", to_string(line.barriers_per_tile)}, {"device", d.name}, {"sm", d.sm},
      {"clock_mhz", r.timed() ? format("%.0f", t.clock_mhz) : ""},
      {"cuda", has_clock ? format("%d.%d", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10) : ""},
      {"driver", d.driver}, {"git_sha", sdpa_git_sha ? sdpa_git_sha() : "unknown"},
      {"knobs", knob_texts(false)}, {"note", r.note}, {"layout", p.layout}, {"dist", p.dist},
      {"lse_err", error(f.lse_err)}, {"graph_lo_us", us(t.graph_lo_us)},
      {"graph_hi_us", us(t.graph_hi_us)}, {"max_ctas", to_string(p.max_ctas)},
      {"rows_witnessed", rows(f.rows_witnessed)},
      {"peak_share", has_peak ? format("%.3f", r.share_of_peak(d)) : ""},
      {"bound", has_peak ? r.memory_binds(d) ? "memory" : "matrix" : ""},
      {"window", window_text(p, ":")},
      {"out_dtype", output_type.name}, {"softcap", p.softcap != 0 ? format("%.9g", p.softcap) : ""},
      {"sinks", p.has_sinks ? "1" : ""}, {"lengths", p.has_q_lengths ? p.has_lengths ? "kq" : "q" : p.has_lengths ? "1" : ""},
      {"packed", packed_text(p)}, {"pages", p.page_size ? to_string(p.page_size) : ""}, {"bias", bias_text(p)},
      {"batch_invariant", p.batch_invariant ? "1" : ""}, {"key_mask", p.key_mask_kind}, {"pass", line.pass()}};
  // clang-format on
}

// A cell as CSV has it: in one line, and between quotes where a comma or a quote would end it.
string csv_cell(string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  if (text.find_first_of(",\"") == string::npos) return text;
  for (size_t at = 0; (at = text.find('"', at)) != string::npos; at += 2) text.insert(at, "\"");
  return '"' + text + '"';
}

void print_csv(const vector<Column>& columns, bool header) {
  string text;
  for (const Column& c : columns) text += (text.empty() ? "" : ",") + csv_cell(header ? c.name : c.value);
  puts(text.c_str());
  fflush(stdout);  // whatever happens next, this row is out
}

struct Option {
  const char *name, *value, *help;                   // value: its name in the help; "" of a flag
  std::function<string(const string&)> take;         // returns what is wanted instead, or ""
  std::function<string(const Problem&)> given = {};  // the value that a problem has, as it is typed; "" of the default
};

// Of a member of Problem.
template <class T, class Of> auto given(T Of::*member) {
  return [member](const Problem& p) -> string {
    if (p.*member == Problem().*member) return "";
    if constexpr (std::is_same_v<T, string>) return p.*member;
    else return format("%.9g", double(p.*member));
  };
}

// All that is not the default in a problem, as it is typed, each behind `before`.
string words_of(const vector<Option>& options, const Problem& p, const char* before) {
  string text;
  for (const Option& o : options) {
    const string value = o.given ? o.given(p) : "";
    if (!value.empty()) text += string(before) + (o.name + 2) + (*o.value ? " " + value : "");
  }
  return text;
}

// For who reads along: stdout is a terminal.
void print_block(const Run& r, const Device& d, const vector<Option>& options) {
  const Problem& p = r.problem;
  const Figures& f = r.figures;
  const reference::Tolerance tol = tolerance_of(p);
  const string changed = knob_texts(true);
  fprintf(stderr, "sdpa_%s (%s%s) on %s\n", line.name, line.family, line.backward ? ", backward" : "", d.name.c_str());
  fprintf(stderr, "  problem  %s: B=%d Hq=%d Hkv=%d Sq=%d Sk=%d D=%d %s%s\n", p.shape.c_str(), p.B, p.Hq, p.Hkv,
          p.Sq, p.Sk, p.D, dtype.c_str(), words_of(options, p, ", ").c_str());
  fprintf(stderr, "  knobs    %s\n", changed.empty() ? "all at their defaults" : changed.c_str());
  if (r.exit == exit_pass && !r.note.empty()) fprintf(stderr, "  note     %s\n", r.note.c_str());
  if (!r.check.empty()) {
    fprintf(stderr, "  check    %s: %ld rows against the reference, %ld against the witness\n",
            r.check.c_str(), f.rows_checked, f.rows_witnessed);
    fprintf(stderr, "           rel_rms %.2g (limit %.2g), max_abs_err %.2g", f.rel_rms, f.rel_rms_limit, f.max_abs_err);
    if (!line.backward) fprintf(stderr, " (%.2g), lse_err %.2g (%.2g)", tol.max_abs, f.lse_err, tol.lse);
    fprintf(stderr, "\n");
  }
  if (!r.timed()) return;
  fprintf(stderr, "  time     %.2f us a launch (median), %.2f us in a graph\n", r.timing.p50_us,
          r.timing.graph_us);
  fprintf(stderr, "  speed    %.1f TFLOP/s", r.tflops());
  if (d.matrix_flops > 0 && d.memory_bytes > 0) {
    fprintf(stderr, ", %.1f%% of what the %s allows (%.0f TFLOP/s, %.2f TB/s)",
            100 * r.share_of_peak(d), r.memory_binds(d) ? "memory" : "matrix units",
            d.matrix_flops * 1e-12, d.memory_bytes * 1e-12);
  }
  fprintf(stderr, "\n");
}

// ---- the command line ----

struct Options {
  vector<Problem> problems;
  vector<uint64_t> seeds;  // none: each problem has its own
  Problem common;          // what all of them share
  int warmup = 20, iterations = 100, repeats = 1;
  bool check_only = false, config = false, header = false, help = false, shape_given = false;
  int passed = 0;  // problems
};

// Whole numbers separated by commas, each in [low, high]; none if `text` is anything else.
vector<long long> parse_numbers(const string& text, long long low, long long high) {
  vector<long long> numbers;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    const string word = text.substr(at, comma - at);
    const size_t sign = word[0] == '-';
    if (word.size() == sign || word.size() > 18) return {};
    if (word.find_first_not_of("0123456789", sign) != string::npos) return {};
    numbers.push_back(std::atoll(word.c_str()));
    if (numbers.back() < low || numbers.back() > high) return {};
    at = comma + 1;
  }
  return numbers;
}

const struct {
  const char *name, *sizes;
} named_shapes[] = {{"small", "1,1,1,32,32"},      {"mission", "1,8,8,512,512"},
                    {"mission2", "2,8,8,512,512"}, {"long", "1,8,8,2048,2048"},
                    {"decode", "32,32,8,1,8192"},  {"decode1", "1,32,8,1,32768"},
                    {"chunk", "1,32,8,256,8192"}};

string shape_names() {  // small, mission, ...
  string names;
  for (const auto& named : named_shapes) names += (names.empty() ? "" : ", ") + string(named.name);
  return names;
}

string parse_shape(const string& text, Problem& p) {
  string sizes = text;
  for (const auto& named : named_shapes) {
    if (text == named.name) sizes = named.sizes;
  }
  const bool is_named = sizes != text;
  std::replace(sizes.begin(), sizes.end(), 'x', ',');  // as rows have them
  const vector<long long> n = parse_numbers(sizes, 0, most_rows);
  if (n.size() < 5 || n.size() > 7) {
    return "want " + shape_names() +
           " or sizes B,Hq,Hkv,Sq,Sk from 0 to 10^9 and if wanted D or D,Dv, such as 1,8,2,512,512 or 1,8,2,512,512,64";
  }
  p.B = int(n[0]), p.Hq = int(n[1]), p.Hkv = int(n[2]), p.Sq = int(n[3]), p.Sk = int(n[4]);
  if (n.size() > 5) p.D = int(n[5]), p.Dv = line.Dv == line.D ? p.D : std::min(p.D, line.Dv);
  if (n.size() > 6) p.Dv = int(n[6]);
  p.shape = is_named ? text : format("%dx%dx%dx%dx%d", p.B, p.Hq, p.Hkv, p.Sq, p.Sk);
  return p.Hq && (p.Hkv == 0 || p.Hq % p.Hkv) ? "Hq must be a multiple of Hkv" : "";
}

vector<Option> options_of(Options& o) {
  const auto count = [](int& value, int least) {
    return [&value, least](const string& text) {
      const vector<long long> n = parse_numbers(text, least, 1000000);
      if (n.size() == 1) value = int(n[0]);
      return n.size() == 1 ? "" : format("want a whole number from %d to 1000000", least);
    };
  };
  const auto flag = [](bool& value) {
    return [&value](const string&) { return value = true, ""; };
  };
  const auto positive = [](double& value) {
    return [&value](const string& text) {
      char* end = nullptr;
      value = std::strtof(text.c_str(), &end);
      const bool is_decimal = text.find_first_not_of("0123456789.eE+-") == string::npos;  // no 0x10, inf or blank
      const bool good = is_decimal && !text.empty() && !*end && value > 0 && !std::isinf(value);
      return good ? "" : "want a number greater than 0, below 10^38";
    };
  };
  return {
      {"--shape", "S",
       "B,Hq,Hkv,Sq,Sk[,D[,Dv]], small, mission (the default), mission2, long, decode, decode1 or chunk; "
       "repeatable",
       [](const string& text) {
         Problem p;
         return parse_shape(text, p);
       }},
      {"--causal", "br|tl|off", "br: the last query sees the last key; tl: query q sees keys 0..q",
       [&o](const string& text) {
         const auto names = std::begin(causal_names), end = std::end(causal_names);
         const auto found = std::find(names, end, text);
         if (found != end) o.common.mask = reference::Mask(found - names);
         return found != end ? "" : "want br (bottom-right), tl or off";
       },
       [](const Problem& p) { return p.mask == reference::Mask::none ? "" : causal_names[int(p.mask)]; }},
      {"--window", "L,R[,br|,tl]",
       "a query sees L keys before its own position and R after it; -1: no limit; br, tl: as --causal has the position",
       [&o](const string& text) {
         const size_t comma = text.find(',', text.find(',') + 1);
         const vector<long long> n = parse_numbers(text.substr(0, comma), -1, most_rows);
         const string by = comma == string::npos ? "off" : text.substr(comma + 1);
         const auto names = std::begin(causal_names), end = std::end(causal_names);
         const auto found = std::find(names, end, by);
         if (n.size() != 2 || found == end) {
           return "want two numbers from -1 to 10^9 and perhaps br or tl, such as 1024,0 or 1024,0,br";
         }
         o.common.window_left = int(n[0]), o.common.window_right = int(n[1]);
         o.common.window_alignment = reference::Mask(found - names);
         return "";
       },
       [](const Problem& p) { return window_text(p, ","); }},
      {"--dist", "D", "inputs: normal (the default), outliers, large (logits) or uniform (logits)",
       [&o](const string& text) {
         string names;
         for (const reference::Dist& d : reference::dists) names += string(" ") + d.name;
         if (reference::dist_named(text)) o.common.dist = text;
         return reference::dist_named(text) ? "" : "want one of" + names;
       },
       given(&Problem::dist)},
      {"--scale", "X", "of the logits (default: 1/sqrt(D))", positive(o.common.scale), given(&Problem::scale)},
      {"--softcap", "X", "logits x become X * tanh(x / X) (a build with USE_SOFTCAP)", positive(o.common.softcap),
       given(&Problem::softcap)},
      {"--sinks", "", "a logit more in the sum of each row, drawn for each head (a build with USE_SINKS)",
       flag(o.common.has_sinks), given(&Problem::has_sinks)},
      {"--lengths", "", "sequences have as many keys as is drawn for each, Sk at most (a build with USE_LENGTHS)",
       flag(o.common.has_lengths), given(&Problem::has_lengths)},
      {"--q-lengths", "", "sequences have as many queries as is drawn for each, Sq at most (a build with USE_LENGTHS)",
       flag(o.common.has_q_lengths), given(&Problem::has_q_lengths)},
      {"--k-firsts", "", "sequences lack as many of their first keys as is drawn for each (a build with USE_LENGTHS)",
       flag(o.common.has_k_firsts), given(&Problem::has_k_firsts)},
      {"--packed", "q|k|qk", "Sq, Sk or both are those of all sequences, drawn for each (a build with USE_LENGTHS)",
       [&o](const string& text) {
         o.common.packs_q = text.find('q') == 0, o.common.packs_k = !text.empty() && text.back() == 'k';
         return !text.empty() && text == packed_text(o.common) ? "" : "want q, k or qk";
       },
       packed_text},
      {"--bias", "KIND[,bhqm]",
       "a bias of each query and key, shared but for the batches, heads and queries named (default q): add, bool, or of "
       "the last keys tree; or what is hidden otherwise, causal, documents or blocks; m: one map of it for all launches (a build "
       "with USE_BIAS)",
       [&o](const string& text) {
         const size_t comma = std::min(text.find(','), text.size());
         o.common.bias_kind = text.substr(0, comma);
         if (comma < text.size()) o.common.bias_dims = text.substr(comma + 1);
         const bool is_known = std::count(std::begin(bias_kinds), std::end(bias_kinds), o.common.bias_kind) > 0;
         const bool named = o.common.bias_dims.find_first_not_of("bhqm") == string::npos;
         const bool suits = o.common.bias_kind != (line.use_bias == 2 ? "add" : line.use_bias ? "bool" : "");
         return is_known && named && suits ? "" : "want add (USE_BIAS=1, 3), bool (USE_BIAS=2), tree, causal, documents or blocks, "
                                                  "and perhaps letters of b, h, q and m, such as tree,bq";
       },
       bias_text},
      {"--key-mask", "KIND[,shared]",
       "padding, other of each batch or shared by all: keys that are right, left or scattered (a build with USE_KEY_MASK)",
       [&o](const string& text) {
         const size_t comma = std::min(text.find(','), text.size());
         o.common.key_mask_kind = text;
         const string kind = text.substr(0, comma), rest = text.substr(comma);
         const bool is_known = std::count(std::begin(key_mask_kinds), std::end(key_mask_kinds), kind) > 0;
         return is_known && (rest.empty() || rest == ",shared") ? "" : "want right, left or scattered, and perhaps ,shared";
       },
       given(&Problem::key_mask_kind)},
      {"--keep-map", "", "one map of what MASK_MOD hides for all launches; otherwise each makes its own",
       flag(o.common.keeps_map), given(&Problem::keeps_map)},
      {"--most-keys", "N", "keys that a sequence has at most, whatever its length says (a build with USE_LENGTHS)",
       count(o.common.most_keys, 1), given(&Problem::most_keys)},
      {"--batch-invariant", "", "a row's bits are the same whatever sequences are in the batch with it",
       flag(o.common.batch_invariant), given(&Problem::batch_invariant)},
      {"--pages", "N", "keys of a page, a multiple of 16 (a build with USE_PAGES; default 64)",
       count(o.common.page_size, 1), given(&Problem::page_size)},
      {"--seeds", "0,1,2", "of the inputs (default 0); the check is done for each",
       [&o](const string& text) {
         const vector<long long> n = parse_numbers(text, 0, 1ll << 40);
         o.seeds.assign(n.begin(), n.end());
         return n.empty() ? "want whole numbers separated by commas, such as 0,1" : "";
       }},
      {"--iters", "N", "timed launches (default 100)", count(o.iterations, 1)},
      {"--warmup", "N", "launches before these (default 20)", count(o.warmup, 0)},
      {"--repeats", "N", "launches that must leave the bits of the checked one (default 1)",
       count(o.repeats, 1)},
      {"--max-ctas", "N",
       "USE_PERSISTENT_CTA=1: CTAs of all launches but the checked one (0: all that fit)",
       count(o.common.max_ctas, 0), given(&Problem::max_ctas)},
      {"--check-only", "", "time nothing", flag(o.check_only)},
      {"--config", "", "print the knobs of this build and stop", flag(o.config)},
      {"--header", "", "print the CSV header first (alone without --shape)", flag(o.header)},
      {"--help", "", "print this and stop", flag(o.help)}};
}

// Edits that make one word of another; a swap of neighbours is one.
size_t edits_between(const string& a, const string& b) {
  vector<vector<size_t>> d(a.size() + 1, vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); i++) {
    for (size_t j = 0; j <= b.size(); j++) {
      size_t least = i == 0 ? j : j == 0 ? i : d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
      if (i > 0) least = std::min(least, d[i - 1][j] + 1);
      if (j > 0) least = std::min(least, d[i][j - 1] + 1);
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) least = std::min(least, d[i - 2][j - 2] + 1);
      d[i][j] = least;
    }
  }
  return d[a.size()][b.size()];
}

// What to type instead of an option that there is none of: the one with the fewest edits, if those are few.
string hint_for(const vector<Option>& options, const string& name) {
  string nearest;
  size_t fewest = (name.size() + 2) / 3 + 1;
  for (const Option& o : options) {
    const size_t edits = edits_between(name, o.name);
    if (edits < fewest) fewest = edits, nearest = o.name;
  }
  return nearest.empty() ? "--help lists them" : "did you mean " + nearest + "?";
}

// Returns a sentence if the arguments are refused.
string parse(const vector<Option>& options, const vector<string>& args, Options& o) {
  vector<string> given, shapes;
  for (size_t i = 0; i < args.size(); i++) {
    const size_t equals = args[i].find('=');  // --NAME VALUE or --NAME=VALUE
    const string name = args[i].substr(0, equals);
    const auto option = std::find_if(options.begin(), options.end(),
                                     [&](const Option& x) { return name == x.name; });
    if (option == options.end()) return name + ": no such option; " + hint_for(options, name);
    const bool is_joined = equals != string::npos;
    if (is_joined && !*option->value) return name + ": it takes no value";
    if (*option->value && !is_joined && i + 1 == args.size()) return name + ": its value is missing";
    const bool again = std::count(given.begin(), given.end(), name);
    if (again && name != "--shape") return name + " is given twice";
    given.push_back(name);
    const string value = is_joined ? args[i].substr(equals + 1) : *option->value ? args[++i] : "";
    const string wanted = option->take(value);
    if (name == "--shape") shapes.push_back(value);
    if (!wanted.empty()) return name + " " + value + ": " + wanted;
  }
  if (o.common.max_ctas && !line.has_queue) {
    return "--max-ctas: only builds with USE_PERSISTENT_CTA=1 take it; build with "
           "USE_PERSISTENT_CTA=1 or drop it";
  }
  o.shape_given = !shapes.empty();
  if (shapes.empty()) shapes.push_back("mission");
  for (const string& shape : shapes) {
    o.problems.push_back(o.common);
    parse_shape(shape, o.problems.back());
  }
  return "";
}

void print_help(const vector<Option>& options) {
  puts("usage: sdpa [OPTION]...   (on a terminal it tells in words; rows of CSV go to a file or a pipe)");
  for (const Option& o : options) {
    printf("  %-26s %s\n", (string(o.name) + " " + o.value).c_str(), o.help);
  }
  puts("exit: 0 pass, 1 wrong result, 2 bad usage, 3 CUDA error or a problem that the build refuses, 77 skipped (all of it)");
}

void print_config(const Device& d) {
  printf("config %s, family %s\n", line.name, line.family);
  for (const Knob* k = line.knobs; k < line.knobs + line.knob_count; k++) {
    printf("  %-24s %-6s %-12s %s\n", k->name, k->value, k->changed ? "" : "(default)", k->meaning);
  }
  const string changed = knob_texts(true);
  printf("changed: %s\n",
         changed.empty() ? "nothing, all knobs are at their defaults" : changed.c_str());
  const KernelFacts k = line.facts_of({});
  printf("threads %d, shared memory %zu bytes, %d CTA barriers per K/V tile\n", k.threads,
         k.shared_bytes, line.barriers_per_tile);
  if (!d.missing.empty()) printf("here: %s\n", d.missing.c_str());
  if (!has_clock || !d.missing.empty()) return;
  const Resources r = resources_of(k);
  printf("on %s: %d registers, %d bytes spilled, %d CTAs per SM\n", d.name.c_str(), r.regs,
         r.spill_bytes, r.ctas_per_sm);
}

// ---- main ----

// The options that repeat this one problem.
string command_of(const vector<Option>& options, const Problem& p) {
  const bool is_short = p.D != line.D || p.Dv != line.Dv;
  return format("--check-only --shape %d,%d,%d,%d,%d", p.B, p.Hq, p.Hkv, p.Sq, p.Sk) +
         (is_short ? format(",%d,%d", p.D, p.Dv) : "") + format(" --seeds %llu", (unsigned long long)p.seed) +
         words_of(options, p, " --");
}

// Checks and times; what happened stands in the run.
void measure(Run& r, const Options& o) {
  Instance instance(r.problem);
  string trouble;
  for (uint64_t seed : r.seeds) {
    instance.set_inputs(r.problem.seed = seed);
    r.problem.k_lengths = instance.problem.k_lengths;
    r.problem.q_starts = instance.problem.q_starts, r.problem.k_starts = instance.problem.k_starts;
    trouble = instance.check(r.figures, o.repeats);
    if (!trouble.empty()) break;
  }
  if (trouble.empty() && has_clock && !o.check_only) {
    r.timing = time_kernel(instance, o.warmup, o.iterations);
    trouble = r.timing.trouble;
  }
  r.check = trouble.empty() ? "PASS" : "FAIL";
  if (!trouble.empty()) r.note = trouble, r.exit = exit_wrong;
}

// One problem, start to end.
ExitCode run_problem(const Problem& p, const Options& o, const vector<Option>& options, const Device& device) {
  Run r;
  r.problem = p, r.seeds = o.seeds.empty() ? vector<uint64_t>{p.seed} : o.seeds;
  const auto stop = [&](const char* status, const string& sentence, ExitCode exit) {
    r.status = status, r.note = sentence, r.exit = exit;
  };
  try {
    set_machine(p.machine);
    const SdpaParams sizes = params_of(p);
    r.kernel = line.facts_of(sizes);
    if (line.is_tuned) {
      const TunedTile t = line.tile_of(sizes);
      r.note = format("tile BLOCK_M=%d BLOCK_N=%d STAGES=%d SPLIT_KV=%d", t.block_m, t.block_n,
                      t.stages, t.split_kv);
    }
    if (!line.takes(p.D, p.Dv)) {
      stop("skipped", format("built with HEAD_DIM=%d and the shape has D=%d", line.D, p.D), exit_skipped);
    } else if (!device.missing.empty()) {
      stop("skipped", device.missing, exit_skipped);
    } else {
      if (has_clock) r.resources = resources_of(r.kernel);
      measure(r, o);
    }
  } catch (const TooLarge& error) {
    stop("skipped", error.text, exit_skipped);
  } catch (const CudaError& error) {
    stop("error", error.text, exit_cuda);
  } catch (const std::bad_alloc&) {
    stop("error", "the problem does not fit in this machine's memory", exit_cuda);
  }
  const bool reader = isatty(STDOUT_FILENO);
  if (reader) print_block(r, device, options);
  if (r.exit != exit_pass) {
    fprintf(stderr, "sdpa_%s: %s %s: %s\n", line.name,
            r.check == "FAIL" ? "FAIL" : r.status.c_str(), p.shape.c_str(), r.note.c_str());
  }
  if (r.exit == exit_wrong) fprintf(stderr, "repeat with: %s\n", command_of(options, r.problem).c_str());
  if (!reader || o.header) print_csv(columns(r, device), false);
  return r.exit;
}

// All that the arguments ask for. Sets o.passed.
ExitCode run(Options& o, const vector<Option>& options) {
  if (o.help) return print_help(options), exit_pass;
  if (o.header) print_csv(columns({}, {}), true);
  if (o.header && !o.shape_given && !o.config) return exit_pass;
  Device device;
  try {
    device = find_device();
  } catch (const CudaError& error) {
    device.missing = error.text;
  }
  if (o.config) return print_config(device), exit_pass;
  int counts[128] = {};
  for (const Problem& p : o.problems) {
    counts[run_problem(p, o, options, device)]++;
    if (ferror(stdout)) break;
  }
  o.passed = counts[exit_pass];
  for (ExitCode exit : {exit_wrong, exit_cuda, exit_pass}) {
    if (counts[exit]) return exit;
  }
  return exit_skipped;
}

int refuse(const string& sentence) {
  fprintf(stderr, "sdpa: %s\n", sentence.c_str());
  return exit_usage;
}

// The exit code, unless rows were lost on their way.
int finish(ExitCode exit) {
  if (fflush(stdout) == 0 && !ferror(stdout)) return exit;
  fprintf(stderr, "sdpa: stdout cannot be written to (%s), so rows are lost\n", strerror(errno));
  return exit_cuda;
}

}  // namespace
}  // namespace SDPA_NAMESPACE

int main(int argc, char** argv) {
  using namespace SDPA_NAMESPACE;
  signal(SIGPIPE, SIG_IGN);  // a reader that has gone is told like a full disk
  Options o;
  const std::vector<Option> options = options_of(o);
  const std::string refusal = parse(options, {argv + 1, argv + argc}, o);
  return refusal.empty() ? finish(run(o, options)) : refuse(refusal);
}

#endif  // SDPA_LINE_ONLY
