// A library for `./run_all.sh micro --backward`: parts of the loop of sdpa_backward_wgmma(), alone and together. The
// build is backward_hopper_d128_bf16. Q and dO are the same for all tiles and stay in shared memory. P = S and dS = dP,
// without exponentials.
#define SDPA_NO_MAIN
#include "../sdpa_backward.cu"

namespace SDPA_NAMESPACE {

using B = Defines;
constexpr int D = B::head_dim, tile_floats = 64 * D;
constexpr int tiles_per_head = 64, ctas_per_head = 32;  // those of 4,096 queries and keys

enum class Adds { none, half, all, bulk };

struct PartsShared {
  alignas(1024) Input K[2][64 * D];  // [64 keys][D] of each warpgroup
  Input V[2][64 * D];
  Input Q[64 * D], dO[64 * D];       // [64 queries][D]
  Input dS[2][128 * 64];             // dS.T [128 keys][64 queries], two buffers
  Input dS_of_other[2][128 * 64];    // of the other CTA of the cluster
  alignas(16) float dQ[2][64 * 64];  // Adds::bulk: the piece of each warpgroup
  uint64_t full[2], empty[2];        // of dS_of_other
};

// Element i of input `which`: a multiple of 1/128 in [-1, 1), which is exact in bf16.
__device__ __forceinline__ float input_value(int which, int i) {
  return int((uint32_t(which * tile_floats + i) * 2654435761u) >> 24) / 128.0f - 1;
}

// multiplies: the kernel computes the five products of a tile; otherwise dQ is 1. stages: dS goes through shared memory,
// and the warpgroups wait for each other once per tile. adds: how dQ is added to its sums. exchanges: each CTA sends dS to
// the other CTA of its cluster, and computes dQ from the dS that it received for the previous tile.
//   sums_g: dQ of all heads; accumulators 4i to 4i + 3 of thread t are floats 512i + 4t and following of its warpgroup
//   results_g: the sum of each thread's dV and dK
template <bool multiplies, bool stages, Adds adds, bool exchanges>
__global__ void __launch_bounds__(256, 1) backward_parts(float* sums_g, float* results_g, int tiles) {
  PartsShared& s = dynamic_shared<PartsShared>();
  const int w = threadIdx.x / 128, tid = threadIdx.x % 128, rank = cluster_rank(), other = rank ^ 1;
  for (int i = threadIdx.x; i < tile_floats; i += 256) {
    const int at = panel_offset<64>(i / D, i % D);
    s.Q[at] = Input(input_value(0, i));
    s.dO[at] = Input(input_value(1, i));
    for (int n = 0; n < 2; n++) {  // twice as large in the odd CTAs
      s.K[n][at] = Input(input_value(2 + n, i) * (1 + rank));
      s.V[n][at] = Input(input_value(4 + n, i) * (1 + rank));
      s.dS[n][i] = s.dS_of_other[n][i] = Input(0.0f);
    }
  }
  if (threadIdx.x == 0) {
    for (int n = 0; n < 2; n++) {
      mbarrier_init(&s.full[n], 1);
      mbarrier_init(&s.empty[n], 8);  // warps of the other CTA
    }
    fence_mbarrier_init();
  }
  fence_proxy_async();
  cluster_sync();

  // Called for each use. Descriptors kept across tiles would occupy registers for every step.
  const auto descriptor_of = [](const void* at_s, int leading_bytes = 16) {
    return wgmma_descriptor(warp_uniform(shared_address(at_s)), leading_bytes, 1024);
  };
  WgmmaAccumulator<64> S, dP, dQ;
  WgmmaAccumulator<D> dK, dV;
  WgmmaProbabilities<B> P_operand;
  // Issues S.T = K @ Q.T and dP.T = V @ dO.T, and waits for all products.
  const auto compute_s_and_dp = [&] {
    wgmma_qk<B>(S, descriptor_of(s.K[w]), descriptor_of(s.Q));
    wgmma_qk<B>(dP, descriptor_of(s.V[w]), descriptor_of(s.dO));
    wgmma_wait_group<0>();
  };
  if constexpr (multiplies) {
    compute_s_and_dp();
    hold(S.x.d);
    hold(dP.x.d);
    for (int n = 0; n < 2; n++) store_to_panels<128>(dP, 1, s.dS[n] + 64 * 64 * w);
    fence_proxy_async();
    barrier_sync(both_warpgroups, both_warpgroups_threads);  // hazard: dS written by both warpgroups
  }
  SDPA_UNROLL for (int i = 0; i < 32; i++) dQ.x.d[i] = 1;
  SDPA_UNROLL for (int i = 0; i < D / 2; i++) dK.x.d[i] = dV.x.d[i] = 0;
  float unused = 0;  // keeps products whose results nothing else reads
  float* const of_head_g = sums_g + int64_t(blockIdx.x / ctas_per_head) * tiles_per_head * tile_floats + w * (64 * 64);

#pragma unroll 1
  for (int n = 0; n < tiles; n++) {
    const int stage = n % 2, before = (n + 1) % 2;
    if constexpr (multiplies) {
      SDPA_UNROLL for (int step = 0; step < 4; step++) pack_step<Input>(P_operand[step], S, step);
    }
    if constexpr (exchanges) mbarrier_wait(&s.empty[stage], n / 2 % 2 ^ 1);
    if constexpr (stages) {
      if constexpr (multiplies) store_to_panels<128>(dP, 1, s.dS[stage] + 64 * 64 * w);
      fence_proxy_async();
      barrier_sync(both_warpgroups, both_warpgroups_threads);  // hazard: dS written by both warpgroups
    }
    if constexpr (exchanges) {
      if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(&s.full[stage], sizeof s.dS_of_other[stage]);
        cp_async_bulk_copy_to_cta(address_in_cta(s.dS_of_other[stage], other), s.dS[stage], sizeof s.dS[stage],
                                  address_in_cta(&s.full[stage], other));
      }
      if (n > 0) mbarrier_wait(&s.full[before], (n - 1) / 2 % 2);
    }
    if constexpr (multiplies) {
      wgmma_pv<B>(dV, P_operand, descriptor_of(s.dO, 64 * 128), true);
      wgmma_dq<B>(dQ, descriptor_of(exchanges ? s.dS_of_other[before] : s.dS[stage]), descriptor_of(s.K[0] + w * 64 * 64));
      wgmma_dk<B>(dK, descriptor_of(s.dS[stage] + 64 * 64 * w), descriptor_of(s.Q, 64 * 128), true);
      wgmma_wait_group<1>();
      hold(dV.x.d);
      hold(dQ.x.d);
      if constexpr (adds == Adds::none) unused += dQ.x.d[0];
    }
    if constexpr (exchanges) {
      if (n > 0) arrive_in_cluster_by_warp(address_in_cta(&s.empty[before], other));
    }
    float* const dQ_g = of_head_g + n % tiles_per_head * tile_floats;
    constexpr int pieces = adds == Adds::all ? 8 : adds == Adds::half ? 4 : 0;
    SDPA_UNROLL for (int i = 0; i < pieces; i++) {
      const float* const d = dQ.x.d + 4 * i;
      red_global_add_v4(dQ_g + i * 512 + tid * 4, d[0], d[1], d[2], d[3]);
    }
    if constexpr (adds == Adds::bulk) {
      if (tid == 0) cp_async_bulk_wait_group_read<0>();
      barrier_sync(own_warpgroup + w, own_warpgroup_threads);  // hazard: dQ of the previous tile has been read
      SDPA_UNROLL for (int i = 0; i < 8; i++) {
        const float* const d = dQ.x.d + 4 * i;
        *reinterpret_cast<float4*>(s.dQ[w] + i * 512 + tid * 4) = float4{d[0], d[1], d[2], d[3]};
      }
      fence_proxy_async();
      barrier_sync(own_warpgroup + w, own_warpgroup_threads);  // hazard: dQ written by all warps
      if (tid == 0) {
        cp_reduce_async_bulk_add(dQ_g, s.dQ[w], sizeof s.dQ[w]);
        cp_async_bulk_commit_group();
      }
    }
    if constexpr (multiplies) {
      compute_s_and_dp();
      hold(dK.x.d);
      hold(S.x.d);
      hold(dP.x.d);
      if constexpr (!stages) unused += dP.x.d[0];
    }
  }
  if constexpr (exchanges) {
    if (tiles > 0) mbarrier_wait(&s.full[(tiles - 1) % 2], (tiles - 1) / 2 % 2);
    cluster_sync();  // hazard: the other CTA still signals this one
  }
  if (adds == Adds::bulk && tid == 0) cp_async_bulk_wait_group_read<0>();
  float sum = unused == -1.0f / 3 ? 1 : 0;  // 0, since no sum has this value
  for (int i = 0; i < D / 2; i++) sum += dV.x.d[i] + dK.x.d[i];
  results_g[blockIdx.x * 256 + threadIdx.x] = sum;
}

struct Part {
  const char* name;
  void (*kernel)(float*, float*, int);
};
constexpr Part parts[] = {
    {"products", backward_parts<true, false, Adds::none, false>},
    {"products, dS staged", backward_parts<true, true, Adds::none, false>},
    {"products, dS staged, red.v4", backward_parts<true, true, Adds::all, false>},
    {"products, dS staged, cp.reduce.async.bulk", backward_parts<true, true, Adds::bulk, false>},
    {"products, dS staged, dS exchanged, half of red.v4", backward_parts<true, true, Adds::half, true>},
    {"red.v4", backward_parts<false, false, Adds::all, false>},
    {"cp.reduce.async.bulk", backward_parts<false, false, Adds::bulk, false>},
    {"half of red.v4", backward_parts<false, false, Adds::half, false>},
    {"dS exchanged", backward_parts<false, true, Adds::none, true>},
    {"dS exchanged, half of red.v4", backward_parts<false, true, Adds::half, true>}};

}  // namespace SDPA_NAMESPACE

extern "C" {

// The name of part i; null past the last one.
const char* backward_part_name(int i) { return i < int(std::size(sdpa::parts)) ? sdpa::parts[i].name : nullptr; }

// Enqueues part i. `ctas` is even. Returns a cudaError_t.
int backward_part(int i, int ctas, int tiles, float* sums, float* results, cudaStream_t stream) {
  using namespace sdpa;
  const auto kernel = parts[i].kernel;
  if (!allow_shared_bytes(kernel, sizeof(PartsShared)).ok()) return cudaErrorInvalidValue;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {2, 1, 1};
  const cudaLaunchConfig_t launch{dim3(uint32_t(ctas)), dim3(256), sizeof(PartsShared), stream, &cluster, 1};
  return cudaLaunchKernelEx(&launch, kernel, sums, results, tiles);
}
}
