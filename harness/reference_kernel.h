// The reference kernel: a plain fp32 kernel that computes every row of a problem on the GPU. It
// uses nothing from sections 4 to 6 of sdpa.cu; masks, heads and strides are implemented again. It
// reads the keys twice: first m = max(S), then P = exp((S - m) * scale), l = sum(P), O = P @ V / l.
#pragma once

#include "line.h"

namespace SDPA_NAMESPACE {
namespace {

inline __device__ float number(__half x) { return float(x); }
inline __device__ float number(__nv_bfloat16 x) { return float(x); }
inline __device__ float number(__nv_fp8_e4m3 x) { return float(x); }
inline __device__ float number(uint8_t x) { return float(x) - 128; }
inline __device__ float factor(const Descale& d, int b, int h) {
  return d.factor ? d.factor[b * d.batch + h * d.head] : 1;
}

// LANES neighbouring threads share a query row; each holds SLICE of its D elements. Shorter rows
// are zero-padded. In shared memory the slices of a row of K or V have a padding of 4 floats, so
// that neighbouring threads access different banks.
template <int D> struct ReferenceKernelShared {
  static constexpr int SLICE = 64, LANES = D / SLICE, KEYS = 32, THREADS = 128;
  static constexpr int ROWS = THREADS / LANES;
  using TileRow = float[LANES][SLICE + 4];
  TileRow K[KEYS], V[KEYS];

  // tile[j] = row k0 + j of x, which has `width` elements. Zero-fills out-of-bounds elements.
  template <class T>
  static __device__ void load(TileRow* tile, const T* x, int64_t row_stride, int k0, int rows,
                              int width) {
    for (int i = threadIdx.x; i < KEYS * D; i += THREADS) {
      const int j = i / D, d = i % D;
      tile[j][d / SLICE][d % SLICE] =
          k0 + j < rows && d < width ? number(x[(k0 + j) * row_stride + d]) : 0.0f;
    }
  }
};

template <class Q, class T, class Mods, int D>
__global__ void __launch_bounds__(ReferenceKernelShared<D>::THREADS)
    reference_kernel(ReferenceKernelArgs a) {
  using W = ReferenceKernelShared<D>;
  W& s = dynamic_shared<W>();
  const SdpaParams& p = a.p;
  const int row_tiles = (p.Sq + W::ROWS - 1) / W::ROWS, slice = threadIdx.x % W::LANES;
  const int of_grid = int(blockIdx.x) / row_tiles, head = a.first_head + of_grid;
  const int row = int(blockIdx.x) % row_tiles * W::ROWS + int(threadIdx.x) / W::LANES;
  const int b = head / p.Hq, h = head % p.Hq, h_kv = h / (p.Hq / p.Hkv);
  const Q* const Q_g = reinterpret_cast<const Q*>(p.Q) + b * p.q.batch + h * p.q.head;
  const int q_row = row < p.Sq ? row : p.Sq - 1;  // out-of-bounds rows repeat the last one
  float q[W::SLICE], O[W::SLICE] = {}, m = -INFINITY, l = 0;
#pragma unroll
  for (int d = 0; d < W::SLICE; d++) {
    q[d] = slice * W::SLICE + d < p.D ? number(Q_g[q_row * p.q.row + slice * W::SLICE + d]) : 0.0f;
  }

  // The sequence of the row, its lengths, and its first rows in the tensors.
  int own = b, Sq = p.Sq, Sk = p.Sk, first_query = 0, first_key = 0;
  const auto row_at = [](int start, int rows) {
    return start < 0 ? 0 : start > rows ? rows : start;
  };
  if (p.q_starts) {
    for (own = 0; p.q_starts[own + 1] <= q_row;) own++;
    first_query = row_at(p.q_starts[own], p.Sq);
    Sq = row_at(p.q_starts[own + 1], p.Sq) - first_query;
  }
  if (p.k_starts) {
    first_key = row_at(p.k_starts[own], p.Sk);
    Sk = row_at(p.k_starts[own + 1], p.Sk) - first_key;
  }
  if (p.k_lengths) Sk = max(0, min(p.k_lengths[own], Sk));
  if (p.q_lengths) Sq = max(0, min(p.q_lengths[own], Sq));
  if (p.most_keys > 0 && Sk > p.most_keys) Sk = p.most_keys;
  if (p.k_firsts) {
    const int first = row_at(p.k_firsts[own], Sk);
    first_key += first;
    Sk -= first;
  }
  const float score_scale = a.scale * factor(p.q_descale, own, h) * factor(p.k_descale, own, h_kv);
  // score() returns a score, or with a softcap a tanh, or with a bias or a SCORE_MOD a logit. `scale`
  // converts the result to a logit.
  const float logit_scale = p.softcap != 0 ? p.softcap : score_scale,
              scale = p.bias || Mods::changes_logits ? 1 : logit_scale;
  const float v_factor = a.v_unit * factor(p.v_descale, own, h_kv);

  // Query q of a sequence sees key k < Sk if first <= k - q <= last.
  const int none = 2000000000;
  const auto position = [&](Causal by) { return by == Causal::bottom_right ? Sk - Sq : 0; };
  const int window_position =
      position(p.window_alignment == Causal::off ? p.causal : p.window_alignment);
  const int first = p.window_left < 0 ? -none : window_position - p.window_left;
  int last = p.causal == Causal::off ? none : position(p.causal);
  if (p.window_right >= 0) last = min(last, window_position + p.window_right);

  // If a tile has rows of several sequences, every row iterates over the keys of all sequences.
  const bool is_mixed = p.q_starts && !p.k_starts;
  const int first_batch = p.k_starts || is_mixed ? 0 : b, batches = is_mixed ? p.B : 1;
  // The score of key k0 + j of a batch; -inf if the row does not see it
  const auto score = [&](int batch, int k0, int j) {
    float4 sum{};
#pragma unroll
    for (int d = 0; d < W::SLICE; d += 4) {
      const float4 k = *reinterpret_cast<const float4*>(&s.K[j][slice][d]);
      sum.x = fmaf(q[d], k.x, sum.x);
      sum.y = fmaf(q[d + 1], k.y, sum.y);
      sum.z = fmaf(q[d + 2], k.z, sum.z);
      sum.w = fmaf(q[d + 3], k.w, sum.w);
    }
    float S = (sum.x + sum.y) + (sum.z + sum.w);
    for (int n = 1; n < W::LANES; n *= 2) S += __shfl_xor_sync(0xffffffffu, S, n);
    if (p.softcap != 0) S = tanhf(S * score_scale / p.softcap);
    const int k = k0 + j - first_key, distance = k - (q_row - first_query);
    const bool is_own = (!is_mixed || batch == own) && k >= 0 && k < Sk;
    if (!is_own || distance < first || distance > last) return -INFINITY;
    if (p.key_mask && !p.key_mask[own * p.key_mask_stride + k]) return -INFINITY;
    const ModPlace place{own, h, q_row - first_query, k, Sq, Sk};
    if (!Mods::sees(place, p)) return -INFINITY;
    if (Mods::changes_logits) S = Mods::logit(S * score_scale, place, p);
    const int column = k - (p.bias_keys > 0 ? Sk - p.bias_keys : 0);
    if (!p.bias) return S;
    const int64_t at = own * p.bias_strides.batch + h * p.bias_strides.head +
                       (q_row - first_query) * p.bias_strides.row + column;
    const float bias = column < 0        ? 0
                       : a.use_bias == 2 ? static_cast<const uint8_t*>(p.bias)[at] ? 0 : -INFINITY
                       : a.use_bias == 3 || a.use_bias == 5 ? static_cast<const float*>(p.bias)[at]
                                         : number(static_cast<const T*>(p.bias)[at]);
    return a.use_bias == 2 && bias == -INFINITY ? bias : S * logit_scale + bias;
  };
  const auto each_tile = [&](const auto& use) {
    for (int batch = first_batch; batch < first_batch + batches; batch++) {
      const T* const K_g = reinterpret_cast<const T*>(p.K) + batch * p.k.batch + h_kv * p.k.head;
      const T* const V_g = reinterpret_cast<const T*>(p.V) + batch * p.v.batch + h_kv * p.v.head;
      for (int k0 = 0; k0 < p.Sk; k0 += W::KEYS) {
        __syncthreads();  // hazard: K and V of the previous tile read by all threads
        W::load(s.K, K_g, p.k.row, k0, p.Sk, p.D);
        W::load(s.V, V_g, p.v.row, k0, p.Sk, p.Dv);
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
    float tile_O[W::SLICE] = {}, tile_l = 0;  // partial sums of a tile: less rounding error
#pragma unroll 1
    for (int j = 0; j < W::KEYS; j++) {
      const float S = score(batch, k0, j), P = expf((S - m) * scale);
      if (S == -INFINITY) continue;  // V may be NaN or inf there
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
  float most = m == -INFINITY ? m : m * scale, of_keys = 1;  // scale may be 0
  if (p.sinks && p.sinks[h] != -INFINITY) {
    most = fmaxf(most, p.sinks[h]);
    of_keys = l == 0 ? 0 : expf(m * scale - most);
    l = l * of_keys + expf(p.sinks[h] - most);
  }
  if (slice == 0) a.LSE[out] = most + logf(l);
#pragma unroll
  for (int d = 0; d < W::SLICE; d++) {
    if (slice * W::SLICE + d >= p.Dv) break;
    a.O[out * p.Dv + slice * W::SLICE + d] =
        l == 0 || (of_keys == 0 && l < INFINITY) ? 0.0f : O[d] * of_keys / l * v_factor;
  }
}

template <class Q, class T, class Mods, int D>
cudaError_t launch_reference_kernel_of(const ReferenceKernelArgs& a, int heads) {
  using W = ReferenceKernelShared<D>;
  constexpr auto kernel = reference_kernel<Q, T, Mods, D>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(W)));
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(heads * ((a.p.Sq + W::ROWS - 1) / W::ROWS));
  config.blockDim = dim3(W::THREADS);
  config.dynamicSmemBytes = sizeof(W);
  return cudaLaunchKernelEx(&config, kernel, a);
}
template <class Q, class T, class Mods>
cudaError_t launch_reference_kernel_of(const ReferenceKernelArgs& a, int heads) {
  const int widest = max(a.p.D, a.p.Dv);
  return widest <= 64    ? launch_reference_kernel_of<Q, T, Mods, 64>(a, heads)
         : widest <= 128 ? launch_reference_kernel_of<Q, T, Mods, 128>(a, heads)
                         : launch_reference_kernel_of<Q, T, Mods, 256>(a, heads);
}

}  // namespace
}  // namespace SDPA_NAMESPACE
