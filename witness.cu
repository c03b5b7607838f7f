// The witness: attention by another kernel, in fp32, quick enough for every row of a large problem. The harness
// of sdpa.cu includes this file. Sections 4 to 6 have no part in it: it has its own mask, heads and strides.
// It goes over the keys twice: m = max of S, then P = exp((S - m) * scale), l = sum of P, O = P @ V / l.

namespace SDPA_NAMESPACE {
namespace {

struct WitnessArgs {
  const void *Q, *K, *V;
  Strides q, k, v;
  int Hq, Hkv, Sq, Sk;
  int first_head;  // counted over batches: b * Hq + h
  int diagonal;    // key k is visible to query q if k - q <= diagonal
  float scale;
  float *O, *LSE;  // [heads,Sq,D] and [heads,Sq] from first_head on
};

// A thread has 64 elements of a query row, and its neighbours the others. Tiles of K and V are in shared
// memory, the parts of a row 4 floats apart, so that neighbours read from different banks.
template <int D> struct WitnessShared {
  static constexpr int SLICE = 64, LANES = D / SLICE, KEYS = 32, THREADS = 128;
  static constexpr int ROWS = THREADS / LANES;
  using TileRow = float[LANES][SLICE + 4];
  TileRow K[KEYS], V[KEYS];

  // tile[j] = row k0 + j of x, zeros past the end
  template <class T>
  static __device__ void load(TileRow* tile, const T* x, int64_t row_stride, int k0, int rows) {
    for (int i = threadIdx.x; i < KEYS * D; i += THREADS) {
      const int j = i / D, d = i % D;
      tile[j][d / SLICE][d % SLICE] = k0 + j < rows ? float(x[(k0 + j) * row_stride + d]) : 0.0f;
    }
  }
};

template <class T, int D>
__global__ void __launch_bounds__(WitnessShared<D>::THREADS) witness(WitnessArgs a) {
  using W = WitnessShared<D>;
  W& s = dynamic_shared<W>();
  const int row_tiles = (a.Sq + W::ROWS - 1) / W::ROWS, slice = threadIdx.x % W::LANES;
  const int of_grid = int(blockIdx.x) / row_tiles, head = a.first_head + of_grid;
  const int row = int(blockIdx.x) % row_tiles * W::ROWS + int(threadIdx.x) / W::LANES;
  const int b = head / a.Hq, h = head % a.Hq, h_kv = h / (a.Hq / a.Hkv);
  const T* const Q_g = static_cast<const T*>(a.Q) + b * a.q.batch + h * a.q.head;
  const T* const K_g = static_cast<const T*>(a.K) + b * a.k.batch + h_kv * a.k.head;
  const T* const V_g = static_cast<const T*>(a.V) + b * a.v.batch + h_kv * a.v.head;
  const int q_row = row < a.Sq ? row : a.Sq - 1;  // threads past the end work for nothing
  float q[W::SLICE], O[W::SLICE] = {}, m = -INFINITY, l = 0;
#pragma unroll
  for (int d = 0; d < W::SLICE; d++) q[d] = float(Q_g[q_row * a.q.row + slice * W::SLICE + d]);

  // Q[q_row] @ K[k0 + j], -inf where that key is not visible
  const auto score = [&](int k0, int j) {
    float4 sum{};
#pragma unroll
    for (int d = 0; d < W::SLICE; d += 4) {
      const float4 k = *reinterpret_cast<const float4*>(&s.K[j][slice][d]);
      sum.x = fmaf(q[d], k.x, sum.x), sum.y = fmaf(q[d + 1], k.y, sum.y);
      sum.z = fmaf(q[d + 2], k.z, sum.z), sum.w = fmaf(q[d + 3], k.w, sum.w);
    }
    float S = (sum.x + sum.y) + (sum.z + sum.w);
    for (int n = 1; n < W::LANES; n *= 2) S += __shfl_xor_sync(0xffffffffu, S, n);
    return k0 + j < a.Sk && k0 + j - q_row <= a.diagonal ? S : -INFINITY;
  };
  for (int k0 = 0; k0 < a.Sk; k0 += W::KEYS) {
    __syncthreads();  // hazard: K still being read
    W::load(s.K, K_g, a.k.row, k0, a.Sk);
    __syncthreads();
#pragma unroll 1
    for (int j = 0; j < W::KEYS; j++) m = fmaxf(m, score(k0, j));
  }
  for (int k0 = 0; k0 < a.Sk; k0 += W::KEYS) {
    __syncthreads();  // hazard: K and V still being read
    W::load(s.K, K_g, a.k.row, k0, a.Sk), W::load(s.V, V_g, a.v.row, k0, a.Sk);
    __syncthreads();
    float tile_O[W::SLICE] = {}, tile_l = 0;  // summed apart: fewer roundings of the long sum
#pragma unroll 1
    for (int j = 0; j < W::KEYS; j++) {
      const float S = score(k0, j), P = S == -INFINITY ? 0.0f : expf((S - m) * a.scale);
      tile_l += P;
#pragma unroll
      for (int d = 0; d < W::SLICE; d++) tile_O[d] = fmaf(P, s.V[j][slice][d], tile_O[d]);
    }
    l += tile_l;
#pragma unroll
    for (int d = 0; d < W::SLICE; d++) O[d] += tile_O[d];
  }
  if (row >= a.Sq) return;
  const int64_t out = int64_t(of_grid) * a.Sq + row;
  if (slice == 0) a.LSE[out] = m * a.scale + logf(l);
#pragma unroll
  for (int d = 0; d < W::SLICE; d++) {
    a.O[out * D + slice * W::SLICE + d] = l == 0 ? 0.0f : O[d] / l;
  }
}

template <class T, int D> cudaError_t launch_witness(const WitnessArgs& a, int heads) {
  using W = WitnessShared<D>;
  const cudaError_t error = cudaFuncSetAttribute(
      witness<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(W)));
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(heads * ((a.Sq + W::ROWS - 1) / W::ROWS));
  config.blockDim = dim3(W::THREADS);
  config.dynamicSmemBytes = sizeof(W);
  return cudaLaunchKernelEx(&config, witness<T, D>, a);
}

// O [heads,Sq,D] and LSE [heads,Sq] of query heads [first, first + heads), counted over batches.
template <class T>
cudaError_t launch_witness(const SdpaParams& p, int first, int heads, float* O, float* LSE) {
  const int diagonal = p.causal == Causal::off            ? p.Sk
                       : p.causal == Causal::bottom_right ? p.Sk - p.Sq
                                                          : 0;
  const float scale = p.scale == 0 ? float(1 / std::sqrt(double(p.D))) : p.scale;
  const WitnessArgs a{p.Q,  p.K,  p.V,   p.q,      p.k,   p.v, p.Hq, p.Hkv,
                      p.Sq, p.Sk, first, diagonal, scale, O,   LSE};
  return p.D == 64    ? launch_witness<T, 64>(a, heads)
         : p.D == 128 ? launch_witness<T, 128>(a, heads)
                      : launch_witness<T, 256>(a, heads);
}

}  // namespace
}  // namespace SDPA_NAMESPACE
