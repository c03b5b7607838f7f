// sdpa_backward: the gradients of scaled dot-product attention. Includes sdpa.cu and adds backward kernels.
// Copyright (c) 2026 the sdpa authors. MIT license, see LICENSE.
//
// ==== 0 MANUAL ===================================================================================
//
//   Given dO, the gradient of O, compute dQ, dK and dV. Per head: Q [Sq,D]  K [Sk,D]  V [Sk,Dv]  O,dO [Sq,Dv]
//
//   S  = Q @ K.T                            recomputed, never stored in global memory
//   P  = exp(scale * S - LSE), masked       the forward's LSE replaces the row maximum and the row sum
//   dP = dO @ V.T
//   delta = row sum of dO * O, minus dLSE   dO * O and P * dP have equal row sums; dLSE is 0 if absent
//   dS = P * (dP - delta)                   the gradient of scale * S
//   dV = P.T @ dO,   dK = scale * dS.T @ Q,   dQ = scale * dS @ K
//   dBias = dS, summed over the batches, heads, queries or keys that share an element of it
//
// Every build first runs sdpa_backward_rows, which computes delta of each row.
//
// Two passes (the default): sdpa_backward_q computes dQ, sdpa_backward_kv computes dK and dV. Both compute S
// and dP, so there are seven products, not the five of the formulas. If dK and dV need separate launches,
// there are eight. In return, all sums stay in the registers of one CTA: no atomics, no accumulators in
// global memory, and bitwise identical results in every run.
//
// One pass (ONE_PASS=1, or USE_WGMMA=1 USE_WARP_SPECIALIZATION=1): sdpa_backward_kv or sdpa_backward_wgmma
// computes S and dP once, so there are five products. A CTA accumulates dK and dV in registers and adds its
// partial dQ atomically to fp32 sums in the workspace. sdpa_backward_convert_rows or sdpa_backward_convert
// scales and rounds these sums. The order of the additions differs from run to run, and so do the last bits
// of dQ. dK and dV are bitwise identical in every run. With ORDERED_ADDS=1 (sdpa_backward_wgmma only), the
// CTAs add in a fixed order, so dQ is bitwise identical, too.
//
// With a bias (USE_BIAS=1, 3), sdpa_backward_bias recomputes S and dP and sums dS to dBias.
//
// Build one variant   nvcc -O3 -std=c++17 -arch=native -DBACKWARD=1 -DBLOCK_M=64 sdpa_backward.cu -o sdpa_backward
// Check and time it   ./sdpa_backward --shape mission
// Use it              #define SDPA_NO_MAIN
//                     #include "sdpa_backward.cu"; call sdpa_forward(), then sdpa_backward().
//
// Letters and suffixes are those of sdpa.cu.
//
// Sections  1 KNOBS  2 PROBLEM  3 BLOCKS  4 KERNELS  5 LAUNCH  6 REFUSALS  7 CALL

#ifndef SDPA_NO_MAIN
#define SDPA_NO_MAIN  // sdpa.cu does not include main()
#define SDPA_BACKWARD_MAIN
#endif
#include "sdpa.cu"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#pragma nv_diag_suppress 177

namespace SDPA_NAMESPACE {

// ==== 1 KNOBS ====================================================================================

namespace {

// Rows have the columns of SDPA_KNOBS. backward_knobs: the knobs of sdpa.cu that the backward kernels
// support. Section 6 refuses the others.
// clang-format off
#define SDPA_BACKWARD_KNOBS(X) \
  X(BACKWARD, 0, backward, "0 1", "scalar mma wgmma", "1: builds sdpa_backward.cu, which computes dQ, dK and dV") \
  X(ONE_PASS, 0, one_pass, "0 1", "mma", "five products instead of seven; adds dQ atomically to sums in global memory") \
  X(ORDERED_ADDS, 0, ordered_adds, "0 1", "wgmma", "USE_WARP_SPECIALIZATION=1: CTAs add dQ in a fixed order, so that two runs give the same bits")
// clang-format on
SDPA_BACKWARD_KNOBS(SDPA_KNOB)
constexpr std::string_view backward_knobs =
    "HEAD_DIM HEAD_DIM_V DTYPE BLOCK_M BLOCK_N NUM_WARPS VEC_WIDTH USE_CP_ASYNC STAGES SWIZZLE_XOR USE_MMA_SYNC "
    "USE_WGMMA USE_WARP_SPECIALIZATION USE_SOFTCAP USE_SINKS USE_LENGTHS USE_BIAS SCORE_MOD MASK_MOD";
// Registers per thread for S, dP and sums with `columns` columns in total: a warp has BLOCK_M / NUM_WARPS rows of
// 2 * BLOCK_N + columns elements, divided by 32 lanes.
template <class B> constexpr int accumulator_registers(int columns) {
  return B::block_m / B::num_warps * (columns / 2 + B::block_n) / 16;
}

}  // namespace

// ==== 2 PROBLEM ==================================================================================

using Input = KeyValue;  // element type of Q, K, V, dQ, dK and dV

struct SdpaGradients {
  const Output* dO;             // [B,Hq,Sq,Dv]
  Input *dQ, *dK, *dV;          // shaped like Q, K, V; every element is written; elements must not overlap
  Strides d_o, d_q, d_k, d_v;   // of dO, dQ, dK, dV, as in SdpaParams: dO is an input, the others are outputs like O
  const float* dLSE = nullptr;  // [B,Hq,Sq] contiguous, the gradient of LSE; null: 0
  float* dSinks = nullptr;      // USE_SINKS=1: [Hq], every element is written; or null
  void* dBias = nullptr;        // USE_BIAS=1, 3: [B,Hq,Sq,columns], every element is written; or null.
                                // columns: bias_keys, or if that is 0: Sk, limited to most_keys if set
  Strides d_bias = {0, 0, 0};   // of dBias. Stride 0: the dimension has size 1, and dBias is summed over it. Other
                                // strides are at least the number of columns, or 1 with dBias_sums_keys=1
  int dBias_sums_keys = 0;      // 1: a row of dBias has one element, the sum over the keys
  void* workspace = nullptr;    // device memory, 256-byte aligned, one per stream; for its size see
                                // sdpa_backward_workspace_bytes()
};

// dQ of a row that sees no key is 0, and so are dK and dV of a key that no row sees. O and LSE may come from
// another implementation. LSE is the natural logarithm of the sum of exp(logit). For a row that sees no key,
// it is -inf or the sink of its head.
// USE_BIAS: dBias has the type of the bias, but its own strides. An element is the sum of dS over the
// dimensions with stride 0, and with dBias_sums_keys=1 also over the keys, in fp32 and in a fixed order.
// Hidden keys, and keys with a bias of -inf, add 0. The bias_map of the forward pass is ignored.
// USE_LENGTHS: tensors are packed as in struct Sequence: dO, dQ and O like Q, dK and dV like K. dLSE has the
// shape of LSE. Padding rows are rows that are no query or key of any sequence. In dQ, dK and dV they are 0.
// In Q, K, V, O, dO, LSE and dLSE they may contain anything, including NaN.
struct SdpaBackwardParams : SdpaGradients {
  SdpaParams forward{};  // of the sdpa_forward() call that wrote O and LSE; both are inputs here
};

namespace {

struct GradientMaps { CUtensorMap d_o, d_k, d_v; };
// USE_BIAS: how sdpa_backward_bias computes dBias. A dimension is either kept, or dBias is summed over it.
//   tiles   the tiles of dBias: the kept dimensions
//   steps   the tiles of dS that are added to one tile of dBias: the summed dimensions
// Dims decodes a linear index over (batch, head, query tile, key tile); the key tile varies fastest.
struct BiasPlan {
  struct Dims {
    Divisor heads, queries, keys;  // sizes of the last three dimensions
    uint32_t count;
  };
  Dims tiles, steps;
  uint32_t ranges;           // CTAs per tile. Each sums a range of the steps
  bool sums_queries, sums_keys;
  bool has_one_bias;         // all steps of a tile have the same bias
  int columns;               // keys that have a bias
};

// True for sdpa_backward_wgmma, which has producer and consumer warpgroups.
template <class B> constexpr bool has_roles = B::kernel == KernelKind::wgmma_roles;
// True for the one-pass kernels, which add dQ to fp32 sums in global memory.
template <class B> constexpr bool adds_dq = has_roles<B> || value_of(ONE_PASS_text) == 1;
// True if the CTAs add to dQ in a fixed order. See "additions to dQ".
template <class B> constexpr bool orders_adds = has_roles<B> && value_of(ORDERED_ADDS_text) == 1;

// True for has_roles with HEAD_DIM=256. dK and dV of 128 keys do not fit into the registers of two consumer
// warpgroups. Two CTAs with 64 keys each form a cluster. See "clusters of two CTAs".
template <class B> constexpr bool in_clusters = has_roles<B> && B::head_dim == 256;
// has_roles: a piece of dQ is [64 queries][64 elements] of a tile. Each consumer warpgroup of the CTA or
// cluster computes one piece of a tile.
constexpr int dq_piece_floats = 64 * 64;
// has_roles: true if the consumers add their pieces to the dQ sums; false if the adding warps do it by bulk operations
// from shared memory. In clusters, shared memory has no room for the pieces. For D=64, bulk operations are
// not faster, and are used only with ORDERED_ADDS, so that the consumers do not wait for other CTAs.
template <class B> constexpr bool adds_directly = in_clusters<B> || (B::head_dim == 64 && !orders_adds<B>);
// has_roles: true if there are adding warps: warps 1 and 2 of the producer warpgroup, which run add_pieces().
template <class B> constexpr bool has_adding_warps = !adds_directly<B> || orders_adds<B>;
// Keys per CTA of the kernel that computes dK, CTAs per cluster, and keys per cluster.
template <class B> constexpr int CTA_KEYS = in_clusters<B> ? 64 : B::block_m;
template <class B> constexpr int CLUSTER_CTAS = in_clusters<B> ? 2 : 1;
template <class B> constexpr int CLUSTER_KEYS = CTA_KEYS<B> * CLUSTER_CTAS<B>;

// Number of tiles of `size` rows that cover the `rows` rows of a head. If `starts` is set, no tile has rows of
// two sequences, so this is an upper bound. first_tile() is the index of the first tile of sequence b.
__host__ __device__ inline int64_t tiles_of_head(const SdpaParams& p, const int* starts, int rows, int size) {
  return ceil_div(rows, size) + (Defines::use_lengths && starts ? int64_t(p.B) : 0);
}
__device__ inline int first_tile(int start, int b, int size) { return start / size + b; }

// Rows per query head in the workspace. has_roles: padded to whole tiles of BLOCK_N rows.
inline int64_t padded_rows_of(const SdpaParams& p) {
  return has_roles<Defines> ? tiles_of_head(p, p.q_starts, p.Sq, Defines::block_n) * Defines::block_n : p.Sq;
}
// Factor of LSE in the workspace. The weight of a logit is 2^((logit - LSE) * log2(e)). Without a bias the
// factor is log2(e), which saves an instruction. With a bias it is 1: a logit may be the least finite float,
// and its product with log2(e) would be -inf.
template <class B> constexpr float lse_factor = B::adds_bias ? 1 : 1 / ln2;

// The workspace. It consists of these arrays, in this order:
//
//   LSE * lse_factor, delta   of each row; LSE is +inf instead of -inf
//   dQ sums                   adds_dq: D floats per row, dQ / gradient_scale. has_roles: ordered as in add_to_dq_sums()
//   add counters              orders_adds: for each piece of dQ, the number of CTAs that have added to it
//   dBias partials            USE_BIAS=1, 3
struct BackwardWorkspace {
  int64_t heads;  // B * Hq, or Hq with q_starts
  int padded_rows;     // per head
  float2* lse_delta;   // pairs of LSE and delta
  float *lse, *delta;  // has_roles: two arrays instead of lse_delta
  float* dQ_sums;      // adds_dq

  BackwardWorkspace(const SdpaParams& p, void* workspace)
      : heads(int64_t(batches_of(p, p.q_starts)) * p.Hq),
        padded_rows(int(padded_rows_of(p))),
        lse_delta(static_cast<float2*>(workspace)),
        lse(static_cast<float*>(workspace)),
        delta(lse + heads * padded_rows),
        dQ_sums(lse + lse_and_delta_floats(heads * padded_rows)) {}
  // Sizes of the arrays, in floats. all_rows: heads * padded_rows.
  static int64_t lse_and_delta_floats(int64_t all_rows) { return (2 * all_rows + 3) / 4 * 4; }  // 16-byte aligned
  __host__ __device__ __forceinline__ static int64_t dq_sum_floats(int64_t all_rows) {
    return adds_dq<Defines> ? all_rows * Defines::head_dim : 0;
  }
  __host__ __device__ __forceinline__ static int64_t add_counter_floats(int64_t all_rows) {
    return orders_adds<Defines> ? ceil_div(dq_sum_floats(all_rows) / dq_piece_floats, 4) * 4 : 0;  // 16-byte aligned
  }
  __device__ __forceinline__ uint32_t* add_counter(int64_t piece) const {
    return reinterpret_cast<uint32_t*>(dQ_sums + dq_sum_floats(heads * padded_rows)) + piece;
  }
  __device__ __forceinline__ float* dBias_partials() const {
    return dQ_sums + dq_sum_floats(heads * padded_rows) + add_counter_floats(heads * padded_rows);
  }
  // Stores, or loads, LSE and delta of a row.
  __device__ __forceinline__ void set(int64_t head, int row, float2 pair) const {
    const int64_t i = head * padded_rows + row;
    if (has_roles<Defines>) {
      st_global(lse + i, pair.x);
      st_global(delta + i, pair.y);
      return;
    }
    st_global(lse_delta + i, pair);
  }
  __device__ __forceinline__ float2 get(int64_t head, int row) const {
    const int64_t i = head * padded_rows + row;
    if (has_roles<Defines>) return {ld_global<float>(lse + i), ld_global<float>(delta + i)};
    return ld_global<float2>(lse_delta + i);
  }
};

// The arguments of the backward kernels. KernelArgs::mask is made for tiles of rows_of_mask queries and
// keys_of_mask keys: the tiles that a warp, a warpgroup (wgmma) or a CTA (sdpa_backward_bias) can skip.
struct BackwardArgs : KernelArgs, SdpaGradients {
  BackwardWorkspace work;
  float gradient_scale;   // the factor of dQ and dK: scale
  int heads_per_section = 1;  // has_roles: see key_tile_of_cluster()
  std::conditional_t<has_roles<Defines>, GradientMaps, Nothing> gradient_maps;
  std::conditional_t<Defines::adds_bias, BiasPlan, Nothing> bias_plan;

  BackwardArgs(const SdpaBackwardParams& params, int rows_of_mask, int keys_of_mask, const Grid& grid = {})
      : KernelArgs(params.forward, rows_of_mask, keys_of_mask, grid),
        SdpaGradients(params),
        work(params.forward, params.workspace),
        gradient_scale(scale_log2_of(params.forward) * ln2) {}
};

// USE_BIAS: number of elements of a row of the bias, if the keys are not packed.
__host__ __device__ inline int bias_columns(const SdpaParams& p) {
  return p.bias_keys > 0 ? p.bias_keys : p.most_keys > 0 ? min(p.most_keys, p.Sk) : p.Sk;
}
// Returns the range of queries that see at least one key in [first, last].
__host__ __device__ inline Interval queries_of_keys(const KeyBounds& keys, int first, int last, int queries) {
  return {max(first - keys.to + 1, 0), min(last - keys.from + 1, queries)};
}

// ==== 3 BLOCKS ===================================================================================

// ---- PTX ----

#ifndef SDPA_SIMT

// Starts a bulk copy to shared memory, which completes on the mbarrier. `bytes` is a multiple of 16. One
// thread calls it.
__device__ __forceinline__ void cp_async_bulk_load(void* dst_s, const void* src_g, uint32_t bytes,
                                                   uint64_t* barrier_s) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(dst_s)),
               "l"(src_g), "r"(bytes), "r"(shared_address(barrier_s))
               : "memory");
}

// Clusters of CTAs. The shared memory of a CTA can be addressed by all CTAs of its cluster.

// Index of this CTA in its cluster.
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
}
// Waits for all threads of the cluster. Writes to shared memory before it are visible to them after it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
// The address of the same variable in the shared memory of CTA `rank`.
__device__ __forceinline__ SharedAddress address_in_cta(const void* p_s, int rank) {
  SharedAddress address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p_s)), "r"(rank));
  return address;
}
// Starts a copy from the shared memory of this CTA to that of another CTA of the cluster. It completes on an
// mbarrier of the destination CTA. `bytes` is a multiple of 16. One thread calls it.
__device__ __forceinline__ void cp_async_bulk_copy_to_cta(SharedAddress dst, const void* src_s, uint32_t bytes,
                                                          SharedAddress barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "r"(shared_address(src_s)), "r"(bytes), "r"(barrier)
               : "memory");
}
// arrive_by_warp() for an mbarrier of any CTA of the cluster.
__device__ __forceinline__ void arrive_in_cluster_by_warp(SharedAddress barrier) {
  asm volatile(
      "{ .reg .pred p; bar.warp.sync -1; elect.sync _|p, -1; "
      "@p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0]; }" ::"r"(barrier)
      : "memory");
}

// Adds to four floats in global memory by four separate atomic additions.
__device__ __forceinline__ void red_global_add_v4(float* dst_g, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(dst_g), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}
// Adds to two adjacent floats in global memory by two separate atomic additions.
__device__ __forceinline__ void red_global_add_v2(float* dst_g, float a, float b) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(dst_g), "f"(a), "f"(b) : "memory");
#else
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(dst_g), "f"(a) : "memory");
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(dst_g + 1), "f"(b) : "memory");
#endif
}
// Starts a bulk operation that adds floats from shared memory to global memory by separate atomic additions.
// `bytes` is a multiple of 16. The thread that calls it must also commit and wait.
__device__ __forceinline__ void cp_reduce_async_bulk_add(float* dst_g, const float* src_s, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst_g),
               "r"(shared_address(src_s)), "r"(bytes)
               : "memory");
}
// Waits until at most N of this thread's latest bulk groups are pending. Completed writes are visible to it.
template <int N> __device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
// Orders this thread's earlier accesses to global memory before its later ones through the async proxy.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// Waits until the counter has this value. Writes that precede the st_release() of the value are then visible.
__device__ __forceinline__ void wait_for_value(const uint32_t* counter_g, uint32_t value) {
  uint32_t now;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter_g) : "memory");
  } while (now != value);
}
__device__ __forceinline__ void st_release(uint32_t* counter_g, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(counter_g), "r"(value) : "memory");
}

#endif  // SDPA_SIMT

// ---- items: the rows of a sequence in the tensors ----
// An Item names a sequence b, a head h and a first row q0. Functions that also take a head or a row use only
// the sequence of the Item. Without USE_LENGTHS, each batch has one sequence.

// Address of row `row` of head h in batch b.
template <class T>
__device__ __forceinline__ T* head_of(T* x_g, const Strides& s, int b, int h, int row) {
  return x_g + b * s.batch + h * s.head + row * s.row;
}
// USE_LENGTHS: the last sequence b with first(b) <= i, or sequence 0. first() is nondecreasing.
template <class First> __device__ __forceinline__ int last_sequence(int sequences, int i, const First& first) {
  int b = 0;
  for (int end = sequences; end - b > 1;) {
    const int middle = b + (end - b) / 2;
    if (first(middle) <= i) {
      b = middle;
    } else {
      end = middle;
    }
  }
  return b;
}
// The item of head h of sequence b whose rows start with q0.
template <class B> __device__ __forceinline__ Item<B> item_of(const SdpaParams& p, int b, int h, int q0) {
  Item<B> item{};
  item.b = b;
  item.h = h;
  item.q0 = q0;
  if constexpr (B::use_lengths) item.sequence = Sequence(p, b);
  return item;
}
// USE_LENGTHS: tile i of SIZE rows in a tensor with `heads` heads. q0 is the tile's first row in its
// sequence. The tile is empty if q0 is past the last row.
template <class B, int SIZE>
__device__ __forceinline__ Item<B> sequence_tile(const SdpaParams& p, const int* starts, int rows, int heads,
                                                uint32_t i) {
  const uint32_t tiles = uint32_t(tiles_of_head(p, starts, rows, SIZE)), head = i / tiles;
  const int tile = int(i % tiles);
  if (!starts) return item_of<B>(p, int(head / heads), int(head % heads), tile * SIZE);
  const auto first = [&](int b) { return first_tile(min(max(ld_global<int>(starts + b), 0), rows), b, SIZE); };
  const int b = last_sequence(p.B, tile, first);
  return item_of<B>(p, b, int(head), (tile - first(b)) * SIZE);
}
// Item i of BLOCK_M queries.
template <class B> __device__ __forceinline__ Item<B> query_item(const BackwardArgs& a, uint32_t i) {
  if constexpr (B::use_lengths) return sequence_tile<B, B::block_m>(a.p, a.p.q_starts, a.p.Sq, a.p.Hq, i);
  return work_item<B>(a, i);
}
// The queries from q0 on of query head h, in the sequence of `item`.
template <class B> __device__ __forceinline__ Item<B> query_tile(Item<B> item, int h, int q0) {
  item.h = h;
  item.q0 = q0;
  return item;
}
template <class B> __device__ __forceinline__ int key_count(const SdpaParams& p, const Item<B>& item) {
  if constexpr (B::use_lengths) return item.sequence.Sk;
  return p.Sk;
}
// Returns the mask of an item, with tiles of ROWS queries and KEYS keys. Without USE_LENGTHS, this is a.mask,
// which the launch constructs with the same ROWS and KEYS.
template <class B, int ROWS, int KEYS>
__device__ __forceinline__ decltype(auto) mask_of(const BackwardArgs& a, const Item<B>& item) {
  if constexpr (B::use_lengths) {
    const KeyBounds keys(a.p, item.sequence.Sq, item.sequence.Sk);
    return Mask{{keys, ROWS, KEYS}, keys};
  } else {
    return (a.mask);
  }
}
// Index of head h of the item's batch in LSE and in the workspace.
template <class B> __device__ __forceinline__ int64_t head_index(const SdpaParams& p, const Item<B>& item, int h) {
  return int64_t(item.batch(p.q_starts)) * p.Hq + h;
}
// Row of query q in its head of the workspace. has_roles: sequences start at multiples of BLOCK_N.
template <class B> __device__ __forceinline__ int workspace_row(const SdpaParams& p, const Item<B>& item, int q) {
  if (B::use_lengths && has_roles<B> && p.q_starts) {
    return first_tile(item.q_row(0), item.b, B::block_n) * B::block_n + q;
  }
  return item.q_row(q);
}

// ---- pairs of tensors ----

// The build B with head dimension D for all tensors. OfQK: D is that of Q and K. OfV: that of V and dO.
template <class B, int D> struct OneWidth : B {
  static constexpr int head_dim = D, d_v = D, qk_bytes = D * B::element_bytes, v_bytes = qk_bytes;
};
template <class B, int D> using OfWidth = std::conditional_t<B::head_dim == B::d_v, B, OneWidth<B, D>>;
template <class B> using OfQK = OfWidth<B, B::head_dim>;
template <class B> using OfV = OfWidth<B, B::d_v>;

// The rows of one head in two tensors that are loaded together: x and y are Q and dO, or K and V.
struct RowPair {
  const Input *x, *y;
  int64_t x_stride, y_stride;
  int count;
};
template <class B>
__device__ __forceinline__ RowPair queries_of_head(const BackwardArgs& a, const Item<B>& item, int h) {
  return {head_of(a.p.Q, a.p.q, item.batch(a.p.q_starts), h, item.q_row(0)),
          head_of(a.dO, a.d_o, item.batch(a.p.q_starts), h, item.q_row(0)), a.p.q.row, a.d_o.row,
          item.query_count(a.p)};
}
template <class B>
__device__ __forceinline__ RowPair keys_of_head(const BackwardArgs& a, const Item<B>& item, int h) {
  return {head_of(a.p.K, a.p.k, item.batch(a.p.k_starts), h, item.k_row(0)),
          head_of(a.p.V, a.p.v, item.batch(a.p.k_starts), h, item.k_row(0)), a.p.k.row, a.p.v.row,
          key_count(a.p, item)};
}

// A tile of a RowPair in shared memory. wgmma: in the panel layout.
template <class B> constexpr int TILE_ALIGNMENT = B::is_wgmma ? 1024 : 16;
template <class B, int ROWS> struct PairTile {
  alignas(TILE_ALIGNMENT<B>) Element<B> x[ROWS * TILE_STRIDE<OfQK<B>>];
  alignas(TILE_ALIGNMENT<B>) Element<B> y[ROWS * TILE_STRIDE<OfV<B>>];
};
// wgmma: starts the copy of rows [first, first + ROWS) to panels. Columns at or past `width` and rows at or
// past `count` are zero-filled.
template <class B, int ROWS, int D>
__device__ __forceinline__ void copy_to_panels(Input* panels_s, const Input* from_g, int64_t row_stride, int width,
                                               int first, int count) {
  for (int i = threadIdx.x; i < ROWS * D / 8; i += B::threads) {
    const int r = i / (D / 8), d = i % (D / 8) * 8;
    VectorCopy<true>::template copy<16>(panels_s + panel_offset<ROWS>(r, d), from_g + (first + r) * row_stride + d,
                                        first + r < count && d < width);
  }
}
// Starts the copy of rows [first, first + ROWS). Rows at or past from.count are zero-filled.
template <class B, int ROWS>
__device__ __forceinline__ void copy_pair(PairTile<B, ROWS>& tile, const RowPair& from, int first,
                                          const SdpaParams& p) {
  if constexpr (B::is_wgmma) {
    copy_to_panels<B, ROWS, B::head_dim>(tile.x, from.x, from.x_stride, p.D, first, from.count);
    copy_to_panels<B, ROWS, B::d_v>(tile.y, from.y, from.y_stride, p.Dv, first, from.count);
    return;
  }
  const TileCopy<OfQK<B>, B::threads, B::head_dim> x_copy(threadIdx.x);
  const TileCopy<OfV<B>, B::threads, B::d_v> y_copy(threadIdx.x);
  const int x_row = first + x_copy.row, y_row = first + y_copy.row;
  x_copy.template copy<ROWS>(tile.x, from.x + x_row * from.x_stride + x_copy.col, from.x_stride, from.count - x_row);
  y_copy.template copy<ROWS>(tile.y, from.y + y_row * from.y_stride + y_copy.col, from.y_stride, from.count - y_row);
}

template <class B> constexpr bool copies_async = B::use_cp_async || B::is_wgmma;

// The pipeline of the streamed tiles. It loads STAGES - 1 tiles ahead. load(n, stage) starts the
// copies of tile n.
template <class B, class Load> struct StreamedTiles {
  using Copy = VectorCopy<copies_async<B>>;
  const Load& load;
  const int count;

  __device__ __forceinline__ StreamedTiles(const Load& load_, int count_) : load(load_), count(count_) {
    for (int n = 0; n < B::stages - 1; n++) begin(n);
  }
  // Commits a group even if there is no tile n, since acquire() counts groups.
  __device__ __forceinline__ void begin(int n) {
    if (n < count) load(n, n % B::stages);
    Copy::commit();
  }
  // Waits until tile n and all earlier copies have landed. Returns the tile's stage.
  // wgmma: before the barrier, each thread makes its copies visible to wgmma, which reads by the async proxy.
  __device__ __forceinline__ int acquire(int n) {
    if (B::stages == 1) {
      __syncthreads();  // hazard: tile n - 1 read by all warps
      begin(n);
    }
    Copy::template wait<(B::stages > 1 ? B::stages - 2 : 0)>();
    if constexpr (B::is_wgmma) fence_proxy_async();
    __syncthreads();  // hazard: tile n copied by all warps, tile n - 1 read by all warps
    return n % B::stages;
  }
  // Starts the load of tile n + STAGES - 1 into the stage of tile n - 1, which all warps have read by
  // acquire(n). Called once per tile, even if the warp skips tile n.
  // wgmma: called after S and dP of tile n have been issued. finish() and settle() have completed the
  // products that read tile n - 1.
  __device__ __forceinline__ void load_ahead(int n) {
    if (B::stages > 1) begin(n + B::stages - 1);
  }
};

// ---- the derivative of SCORE_MOD ----
//
// SCORE_MOD is evaluated with a dual number instead of s, the scaled score. A dual number consists of a value
// and its derivative with respect to s.

namespace expression {

struct Dual {
  float value, slope;
  // The variable s = score * factor. Same parameters as the constructor of Score.
  __device__ __forceinline__ Dual(float score, float factor, float) : value(score * factor), slope(1) {}
  __device__ __forceinline__ Dual(float value_, float slope_) : value(value_), slope(slope_) {}
  // A constant, as in the expression  s > 0 ? s : 0
  template <class X, If<is_operand<X>> = 0> __device__ __forceinline__ Dual(X x) : value(float(x)), slope(0) {}
  __device__ __forceinline__ explicit operator int() const { return int(value); }
};
template <class X, class Y> constexpr bool has_dual = is_any_of<Dual, X, Y>;

__device__ __forceinline__ float number_of(Dual x) { return x.value; }
template <class X> __device__ __forceinline__ float number_of(X x) { return float(x); }
// The chain rule: returns d f(x) / d s, where `derivative` is f'(x). Returns -0 for constants, since the
// compiler removes the addition of -0.
__device__ __forceinline__ float chain(Dual x, float derivative) { return x.slope * derivative; }
template <class X> __device__ __forceinline__ float chain(X, float) { return -0.0f; }

template <class X, class Y, If<has_dual<X, Y>> = 0> __device__ __forceinline__ Dual operator+(X x, Y y) {
  return {number_of(x) + number_of(y), chain(x, 1) + chain(y, 1)};
}
template <class X, class Y, If<has_dual<X, Y>> = 0> __device__ __forceinline__ Dual operator-(X x, Y y) {
  return {number_of(x) - number_of(y), chain(x, 1) + chain(y, -1)};
}
template <class X, class Y, If<has_dual<X, Y>> = 0> __device__ __forceinline__ Dual operator*(X x, Y y) {
  return {number_of(x) * number_of(y), chain(x, number_of(y)) + chain(y, number_of(x))};
}
template <class X, class Y, If<has_dual<X, Y>> = 0> __device__ __forceinline__ Dual operator/(X x, Y y) {
  const float inverse = 1 / number_of(y), quotient = number_of(x) * inverse;
  return {quotient, chain(x, inverse) + chain(y, -quotient * inverse)};
}
__device__ __forceinline__ Dual operator-(Dual x) { return {-x.value, -x.slope}; }
template <class X, class Y, If<has_dual<X, Y>> = 0> __device__ __forceinline__ bool operator<(X x, Y y) {
  return number_of(x) < number_of(y);
}
template <class X, class Y, If<has_dual<X, Y>> = 0> __device__ __forceinline__ bool operator>(X x, Y y) {
  return number_of(x) > number_of(y);
}
template <class X, class Y, If<has_dual<X, Y>> = 0> __device__ __forceinline__ bool operator<=(X x, Y y) {
  return number_of(x) <= number_of(y);
}
template <class X, class Y, If<has_dual<X, Y>> = 0> __device__ __forceinline__ bool operator>=(X x, Y y) {
  return number_of(x) >= number_of(y);
}
template <class X, class Y, If<has_dual<X, Y>> = 0> __device__ __forceinline__ bool operator==(X x, Y y) {
  return number_of(x) == number_of(y);
}
template <class X, class Y, If<has_dual<X, Y>> = 0> __device__ __forceinline__ bool operator!=(X x, Y y) {
  return number_of(x) != number_of(y);
}

__device__ __forceinline__ Dual real(Dual x) { return x; }
__device__ __forceinline__ Dual exp(Dual x) {
  const float y = ::expf(x.value);
  return {y, chain(x, y)};
}
__device__ __forceinline__ Dual exp2(Dual x) {
  const float y = ::exp2f(x.value);
  return {y, chain(x, y * ln2)};
}
__device__ __forceinline__ Dual log(Dual x) { return {::logf(x.value), chain(x, 1 / x.value)}; }
__device__ __forceinline__ Dual log2(Dual x) { return {::log2f(x.value), chain(x, log2e / x.value)}; }
__device__ __forceinline__ Dual sqrt(Dual x) {
  const float y = ::sqrtf(x.value);
  return {y, chain(x, 0.5f / y)};
}
__device__ __forceinline__ Dual sin(Dual x) { return {::sinf(x.value), chain(x, ::cosf(x.value))}; }
__device__ __forceinline__ Dual cos(Dual x) { return {::cosf(x.value), chain(x, -::sinf(x.value))}; }
__device__ __forceinline__ Dual floor(Dual x) { return {::floorf(x.value), 0}; }
__device__ __forceinline__ Dual tanh(Dual x) {
  const float y = SDPA_NAMESPACE::tanh_exact(x.value);
  return {y, chain(x, fmaf(-y, y, 1))};
}
__device__ __forceinline__ Dual tanh_approx(Dual x) {
  const float y = SDPA_NAMESPACE::tanh_approx(x.value);
  return {y, chain(x, fmaf(-y, y, 1))};
}
__device__ __forceinline__ Dual abs(Dual x) { return x.value < 0 ? -x : x; }
template <class X, class Y, If<has_dual<X, Y>> = 0> __device__ __forceinline__ Dual pow(X x, Y y) {
  const float power = ::powf(number_of(x), number_of(y));
  return {power, chain(x, number_of(y) * ::powf(number_of(x), number_of(y) - 1)) + chain(y, power * ::logf(number_of(x)))};
}
template <class X, class Y, If<has_dual<X, Y>> = 0> __device__ __forceinline__ Dual min(X x, Y y) {
  return number_of(y) < number_of(x) ? Dual(y) : Dual(x);
}
template <class X, class Y, If<has_dual<X, Y>> = 0> __device__ __forceinline__ Dual max(X x, Y y) {
  return number_of(y) > number_of(x) ? Dual(y) : Dual(x);
}

}  // namespace expression

// True if d logit / d s may differ from 1. s: the scaled score.
template <class B> constexpr bool has_slope = B::use_softcap != 0 || B::changes_logits;
// USE_SOFTCAP: d logit / d s. `tanh` is tanh(s / softcap), or -inf for a hidden key, whose slope is 0.
template <class B> __device__ __forceinline__ float slope_of_cap(const KernelArgs& a, float tanh) {
  return replaces_scores<B>(a) ? fmaxf(fmaf(-tanh, tanh, 1), 0) : 1;
}
// USE_BIAS: adds the bias from global memory to a ScoreTile, which may have more or fewer than BLOCK_N keys.
struct BiasFromMemory {
  template <class B, class View> __device__ __forceinline__ void add(View& S, const ScoreTile<B>& tile) const {
    BiasInMemory<B>().add(S, tile.a, tile.item, tile.mask.keys.Sk, tile.q0, tile.k0);
  }
};
// A ScoreTile that also stores the slopes [ROWS][COLS] of the thread's view. It adds the bias by `reader`.
template <class B, class Slopes, class Reader> struct SlopeTile : ScoreTile<B> {
  Slopes& slope;
  const Reader& reader;

  // Adds the bias, or returns false if there is none. USE_SOFTCAP: first computes the slope from the tanh.
  template <class View> __device__ __forceinline__ bool add_bias(View& S) const {
    if constexpr (B::use_bias != 0) {
      const ScoreTile<B>& tile = *this;
      SDPA_UNROLL for (int i = 0; B::adds_bias && B::use_softcap != 0 && i < View::ROWS; i++) {
        SDPA_UNROLL for (int j = 0; j < View::COLS; j++) slope[i][j] = slope_of_cap<B>(tile.a, S.x[i][j]);
      }
      if (!tile.a.p.bias) return false;
      reader.add(S, tile);
      return true;
    }
    return false;
  }
};
// Overload of the score hook's modify_scores() that also computes the slopes.
template <class B, class View, class Slopes, class Reader>
__device__ __forceinline__ void modify_scores(View& S, const SlopeTile<B, Slopes, Reader>& tile, bool unmasked) {
  const ScoreTile<B>& score_tile = tile;
  const auto modify = [&](int i, int j, auto logit, bool visible) {
    if constexpr (B::changes_logits) {
      const expression::Dual x(logit);
      S.x[i][j] = x.value;
      tile.slope[i][j] = x.slope;
    }
    if (!visible) S.x[i][j] = -INFINITY;
  };
  using expression::Dual;
  if (unmasked) ScoreMod<B>::template each<true, Dual>(S, 0, View::COLS, score_tile, modify);
  else ScoreMod<B>::template each<false, Dual>(S, 0, View::COLS, score_tile, modify);
}

// ---- P and dS ----

// A view of the transpose of T.
template <class View> struct Transposed {
  static constexpr int ROWS = View::COLS, COLS = View::ROWS;
  struct Row {
    View& T;
    int i;
    __device__ __forceinline__ float& operator[](int j) const { return T.x[j][i]; }
  };
  struct Elements {
    View& T;
    __device__ __forceinline__ Row operator[](int i) const { return {T, i}; }
  };
  Elements x;

  __device__ __forceinline__ explicit Transposed(View& T) : x{T} {}
  __device__ __forceinline__ int row(int i) const { return x.T.col(i); }
  __device__ __forceinline__ int col(int j) const { return x.T.row(j); }
};

// Computes P and dS of a tile in place: P overwrites S, and dS overwrites dP. Rows of View are queries.
template <class B, class View> struct WeightsOfTile {
  View &P, &dS;
  float slope[has_slope<B> ? View::ROWS : 1][View::COLS];  // d logit / d s

  // Replaces S by P = exp(logit - LSE). Scores of hidden keys and of keys past Sk are first set to -inf. A
  // key past Sk has score 0, and exp(0 - LSE) would overflow if LSE is below -88. Queries past Sq add 0 to
  // all sums: their P is finite, and their dO, dP and delta are 0. has_roles: their P is 0, since their LSE
  // is +inf. SCORE_MOD, USE_BIAS=1, 3: their P is 0, since their logits are set to -inf.
  //
  // Without softcap, SCORE_MOD and USE_BIAS=1, 3, `tile` acts as a ScoreTile, and the loop only computes
  // P = exp2(S * scale_log2 - LSE * log2(e)).
  //
  // q0, k0: the query of row 0 and the key of column 0, from which P.row() and P.col() count
  // unmasked: the mask hides no key of the tile.   lse: LSE * lse_factor of this thread's queries
  template <class Reader = BiasFromMemory>
  __device__ __forceinline__ void set_p(const BackwardArgs& a, const Item<B>& item, const Mask& mask, int q0, int k0,
                                        bool unmasked, const float (&lse)[View::ROWS], const Reader& reader = {}) {
    const ScoreTile<B> score_tile{a, item, mask, q0, k0, item_hook_scale<B>(a, item)};
    SlopeTile<B, decltype(slope), Reader> tile{score_tile, slope, reader};
    finish_scores<B>(P, tile, unmasked);
    SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
      // The logit of a query past Sq is arbitrary here, and its exponential could overflow.
      constexpr bool any_logit = B::changes_logits || (B::adds_bias && !has_roles<B>);
      const bool exists = !any_logit || q0 + P.row(i) < item.query_count(a.p);
      SDPA_UNROLL for (int j = 0; j < View::COLS; j++) {
        float& x = P.x[i][j];
        if constexpr (B::use_softcap != 0 && !B::adds_bias) slope[i][j] = slope_of_cap<B>(a, x);
        if (B::adds_bias && !exists) x = -INFINITY;
        if (B::changes_logits && (!exists || x == -INFINITY)) {
          x = -INFINITY;
          slope[i][j] = 0;  // SCORE_MOD may have no derivative at a hidden key
        }
        x = ex2_approx_ftz(B::adds_bias ? (x - lse[i]) * a.scale_log2 : fmaf(x, a.scale_log2, -lse[i]));
      }
    }
  }
  // Multiplies P by the slope. Called after P has been packed for P.T @ dO, which needs P without the slope.
  __device__ __forceinline__ void multiply_by_slope() {
    if constexpr (has_slope<B>) {
      SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
        SDPA_UNROLL for (int j = 0; j < View::COLS; j++) P.x[i][j] *= slope[i][j];
      }
    }
  }
  // Replaces dP by dS = P * (dP - delta).   delta: of this thread's queries
  __device__ __forceinline__ void set_ds(const float (&delta)[View::ROWS]) {
    SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
      SDPA_UNROLL for (int j = 0; j < View::COLS; j++) dS.x[i][j] = P.x[i][j] * (dS.x[i][j] - delta[i]);
    }
  }
};

// ---- epilogue ----

// Stores factor * T, rounded, to the rows of a tensor from `first` on. Rows at or past `count` are skipped.
// wgmma: so are columns at or past width_of_row.
template <class B, class View>
__device__ __forceinline__ void store_gradient(const View& T, float factor, Input* to_g, int64_t row_stride, int first,
                                               int count, int width_of_row) {
  constexpr int run = View::RUN < 8 ? View::RUN : 8, width = B::vec_width < run ? B::vec_width : run;
  using Vector = VectorType<width * sizeof(Input)>;
  SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
    const int row = first + T.row(i);
    if (row >= count) continue;
    SDPA_UNROLL for (int j = 0; j < View::COLS; j += width) {
      if (Defines::is_wgmma && T.col(j) >= width_of_row) break;
      Input e[width];
      SDPA_UNROLL for (int n = 0; n < width; n++) e[n] = rounded<Input>(T.x[i][j + n] * factor);
      Vector x;
      memcpy(&x, e, sizeof x);
      st_global(to_g + row * row_stride + T.col(j), x);
    }
  }
}

// ---- products: on the FMA pipes, by mma.sync and by wgmma ----
// B is OfQK or OfV. In shared memory: `kept` [BLOCK_M][D], loaded once, and `streamed` [BLOCK_N][D], another
// tile in each iteration. sdpa_backward_bias streams both. In registers: T [BLOCK_M][BLOCK_N] and a sum
// [BLOCK_M][D]. A warp computes BLOCK_M / NUM_WARPS rows of T and the same rows of the sum.
//
//              wgmma                                                      mma.sync               FMA
//   begin()    issues T = kept @ streamed.T                               -                      -
//   finish()   waits for T; up to PENDING later groups stay in flight     T = kept @ streamed.T  the same
//   add()      rounds T to `operand`, issues sum += operand @ streamed;   sum += T @ streamed    the same;
//              `operand` must stay unchanged until settle()               with T rounded         T stays fp32
//   settle()   waits for all products                                     -                      -
//
// Order of the calls of wgmma_commit_group() in a tile: S, dP, dV, then dQ or dK. settle() is called for each
// sum, but the first call waits for both.

template <class B> constexpr int WARP_ROWS = B::block_m / B::num_warps;
// Rows of T that skip a masked tile together: those of a warp, or of a warpgroup (wgmma).
template <class B> constexpr int SKIPPING_ROWS = B::is_wgmma ? 64 : WARP_ROWS<B>;
template <class B> __device__ __forceinline__ int first_skipping_row(int warp) {
  return warp_uniform(warp * WARP_ROWS<B> / SKIPPING_ROWS<B> * SKIPPING_ROWS<B>);
}

template <class B, KernelKind = B::kernel> struct Products;

template <class B> struct Products<B, KernelKind::scalar> {
  using Scores = ScalarScores<B>;
  using Sums = ScalarOutput<B>;
  // T [BLOCK_M][BLOCK_N]. A lane holds only some columns of T, but add() needs all columns of its rows.
  // Lanes of the same warp write them, so __syncwarp() suffices.
  using Scratch = float[B::block_m * ScalarShared<B>::P_STRIDE];
  using Operand = Nothing;

  // Sets the rows and columns of this thread.
  static __device__ __forceinline__ void place(Scores& T, int warp, int lane) {
    T.first_row = warp * WARP_ROWS<B> + lane / COL_LANES;
    T.row_step = ROW_LANES;
    T.first_col = lane % COL_LANES;
  }
  static __device__ __forceinline__ void place(Sums& T, int warp, int lane) {
    T.first_row = warp * WARP_ROWS<B> + lane / COL_LANES;
    T.first_col = lane % COL_LANES * T.RUN;
  }
  static __device__ __forceinline__ void begin(Scores&, const Element<B>*, const Element<B>*, int) {}
  template <int PENDING>
  static __device__ __forceinline__ void finish(Scores& T, const Element<B>* kept_s, const Element<B>* streamed_s,
                                                int, int) {
    scalar_qk<B>(T, kept_s, streamed_s);
  }
  static __device__ __forceinline__ void settle(Sums&) {}
  static __device__ __forceinline__ void add(Sums& sum, const Scores& T, const Element<B>* streamed_s,
                                             Scratch& scratch_s, Operand&, int) {
    float unchanged[Sums::ROWS];  // scalar_pv() rescales the sum by this factor
    SDPA_UNROLL for (int i = 0; i < Sums::ROWS; i++) unchanged[i] = 1;
    write_view(scratch_s, ScalarShared<B>::P_STRIDE, T);
    __syncwarp();  // hazard: T written by the other lanes
    scalar_pv<B>(sum, unchanged, scratch_s, streamed_s);
    __syncwarp();  // hazard: T read by the other lanes
  }
};

template <class B> struct Products<B, KernelKind::mma> {
  using Scores = MmaAccumulator<B, B::block_n>;
  using Sums = MmaSums<B>;
  using Halves = MmaHalves<B>;
  // ONE_PASS: dS.T of all warps, [BLOCK_M][BLOCK_N]. add() needs no scratch: accumulators of T have the lane
  // layout of A operands.
  static constexpr int SCRATCH_STRIDE = B::block_n + 8;  // + 8 avoids bank conflicts
  using Scratch = std::conditional_t<adds_dq<B>, Element<B>[B::block_m * SCRATCH_STRIDE], Nothing>;
  using Operand = Nothing;

  template <class View> static __device__ __forceinline__ void place(View& T, int warp, int lane) {
    T.first_row = warp * WARP_ROWS<B> + lane / 4;
    T.first_col = lane % 4 * 2;
  }
  template <class View>
  static __device__ __forceinline__ void begin(View&, const Element<B>*, const Element<B>*, int) {}
  static __device__ __forceinline__ void settle(Sums&) {}
  template <int PENDING, class View>
  static __device__ __forceinline__ void finish(View& T, const Element<B>* kept_s, const Element<B>* streamed_s,
                                                int warp, int lane) {
    const SharedAddress a_lane =
        shared_address(kept_s + tile_offset<B>(warp * WARP_ROWS<B> + lane % 16, lane / 16 * CHUNK<B>));
    const SharedAddress b_lane =
        shared_address(streamed_s + tile_offset<B>(lane / 16 * 8 + lane % 8, lane / 8 % 2 * CHUNK<B>));
    clear(T);
    SDPA_UNROLL for (int step = 0; step < B::head_dim / MMA_K<B>; step++) {
      uint32_t rows[Scores::M_TILES][4];
      SDPA_UNROLL for (int m = 0; m < Scores::M_TILES; m++) {
        Halves::read(rows[m], tile_step<B>(a_lane, 16 * m, MMA_K<B> * step));
      }
      SDPA_UNROLL for (int n = 0; n < B::block_n / 16; n++) {
        uint32_t columns[4];
        ldmatrix_x4<false>(columns, tile_step<B>(b_lane, 16 * n, MMA_K<B> * step));
        multiply_columns<Halves>(T, n, rows, columns);
      }
    }
  }
  template <class View>
  static __device__ __forceinline__ void add(Sums& sum, const View& T, const Element<B>* streamed_s, Scratch&,
                                             Operand&, int lane) {
    SDPA_UNROLL for (int step = 0; step < B::block_n / 16; step++) {
      MmaStepOfP<B> rows;
      SDPA_UNROLL for (int m = 0; m < Sums::M_TILES; m++) {
        SDPA_UNROLL for (int i = 0; i < 4; i++) {
          rows[m][i] = Halves::pack_p(&T.x[2 * m + i % 2][4 * step + 2 * (i / 2)]);
        }
      }
      Halves::pv(sum, rows, streamed_s, step, lane);
    }
  }
};

// `kept` consists of panels [BLOCK_M][64], `streamed` of panels [BLOCK_N][64]. A warpgroup multiplies its 64
// rows of `kept`, which start at element 64 * 64 * (warp / 4) of a panel. The comment of wgmma_descriptor()
// explains the strides.
template <class B> struct Products<B, KernelKind::wgmma_plain> {
  using Scores = WgmmaAccumulator<B::block_n>;
  using Sums = WgmmaAccumulator<B::head_dim>;
  using Scratch = Nothing;
  using Operand = WgmmaProbabilities<B>;

  template <class View> static __device__ __forceinline__ void place(View& T, int warp, int lane) {
    T.first_row = warp * 16 + lane / 4;
    T.first_col = lane % 4 * 2;
  }
  static __device__ __forceinline__ void begin(Scores& T, const Input* kept_s, const Input* streamed_s, int warp) {
    const uint64_t kept = wgmma_descriptor(warp_uniform(shared_address(kept_s + warp / 4 * 64 * 64)), 16, 1024);
    const uint64_t streamed = wgmma_descriptor(warp_uniform(shared_address(streamed_s)), 16, 1024);
    forget(T.x.d);
    wgmma_fence();
    SDPA_UNROLL for (int step = 0; step < B::head_dim / 16; step++) {
      wgmma_ss<Input, B::block_n, 0>(T.x.d, descriptor_at(kept, panel_step<128>(step, B::block_m)),
                                     descriptor_at(streamed, panel_step<128>(step, B::block_n)), step > 0);
    }
    wgmma_commit_group();
  }
  template <int PENDING>
  static __device__ __forceinline__ void finish(Scores& T, const Input*, const Input*, int, int) {
    wgmma_wait_group<PENDING>();
    hold(T.x.d);
  }
  static __device__ __forceinline__ void add(Sums& sum, const Scores& T, const Input* streamed_s, Scratch&,
                                             Operand& operand, int) {
    SDPA_UNROLL for (int step = 0; step < B::block_n / 16; step++) {
      pack_step<Input>(operand[step], T, step);
      hold(operand[step]);
    }
    const uint64_t streamed = wgmma_descriptor(warp_uniform(shared_address(streamed_s)), B::block_n * 128, 1024);
    wgmma_pv<B>(sum, operand, streamed, true);
  }
  static __device__ __forceinline__ void settle(Sums& sum) {
    wgmma_wait_group<0>();
    hold(sum.x.d);
  }
};

// ==== 4 KERNELS ==================================================================================

// ---- delta of each row ----

// Number of lanes that share a row. Each reads VEC_WIDTH elements at a time.
template <class B> __host__ __device__ constexpr int lanes_of_row() {
  int lanes = 1;
  while (lanes < 32 && lanes * B::vec_width < B::d_v) lanes *= 2;
  return lanes;
}

// Number of rows of an item's sequence in the workspace.
template <class B> __device__ __forceinline__ int workspace_rows(const BackwardArgs& a, const Item<B>& item) {
  if constexpr (!B::use_lengths) return a.work.padded_rows;
  const int queries = item.query_count(a.p);
  return has_roles<B> ? ceil_div(queries, B::block_n) * B::block_n : queries;
}
// Writes LSE * lse_factor and delta of an item's BLOCK_M queries to the workspace, see BackwardWorkspace.
// adds_dq: also clears their dQ sums. orders_adds: also clears their counts of additions. has_roles: also
// writes the padding rows past the last query, with LSE = +inf, so that their P and dS are 0.
template <class B>
__global__ void __launch_bounds__(32 * B::num_warps) sdpa_backward_rows(const __grid_constant__ BackwardArgs a) {
  constexpr int LANES = lanes_of_row<B>(), width = B::vec_width, rows_at_once = 32 * B::num_warps / LANES;
  using Vector = VectorType<width * sizeof(Output)>;
  const SdpaParams& p = a.p;
  const Item<B> item = query_item<B>(a, blockIdx.x);
  const int queries = item.query_count(p), rows = workspace_rows(a, item);
  if (B::use_lengths && item.q0 >= rows) return;
  const int64_t head = head_index(p, item, item.h);
  const int lane = threadIdx.x % LANES, batch = item.batch(p.q_starts);
  const Output* const O_g = head_of(p.O, p.o, batch, item.h, item.q_row(0));
  const Output* const dO_g = head_of(a.dO, a.d_o, batch, item.h, item.q_row(0));
  for (int first = 0; first < B::block_m; first += rows_at_once) {
    const int r = first + int(threadIdx.x) / LANES, q = item.q0 + r;
    const bool exists = r < B::block_m && q < queries;
    float dot = 0;  // of a row of dO and of O
    for (int d = lane * width; exists && d < p.Dv; d += LANES * width) {
      const Vector O_vector = ld_global<Vector>(O_g + q * p.o.row + d);
      const Vector dO_vector = ld_global<Vector>(dO_g + q * a.d_o.row + d);
      Output O[width], dO[width];
      memcpy(O, &O_vector, sizeof O);
      memcpy(dO, &dO_vector, sizeof dO);
      SDPA_UNROLL for (int i = 0; i < width; i++) dot = fmaf(to_float(O[i]), to_float(dO[i]), dot);
    }
    dot = row_sum<LANES>(dot);
    if (r >= B::block_m || q >= rows) continue;
    const int row = workspace_row(p, item, q);
    if (adds_dq<B>) {
      float* const sums = a.work.dQ_sums + (head * a.work.padded_rows + row) * B::head_dim;
      for (int d = lane * 4; d < B::head_dim; d += LANES * 4) st_global(sums + d, float4{0, 0, 0, 0});
    }
    if (lane > 0) continue;
    if (orders_adds<B>) {
      const int64_t offset = (head * a.work.padded_rows + row) * B::head_dim;  // of the row in dQ_sums
      if (offset % dq_piece_floats == 0) st_global(a.work.add_counter(offset / dq_piece_floats), 0u);
    }
    const float lse = exists ? ld_global<float>(p.LSE + head * p.Sq + item.q_row(q)) : -INFINITY;
    // A row that sees no key has LSE = -inf, and its P would be NaN. With +inf instead, P is 0.
    const float scaled_lse = lse == -INFINITY ? INFINITY : lse * lse_factor<B>;
    // d LSE / d S = P, so dLSE adds P * dLSE to dS.
    const float dLSE = exists && a.dLSE ? ld_global<float>(a.dLSE + head * p.Sq + item.q_row(q)) : 0;
    a.work.set(head, row, {scaled_lse, dot - dLSE});
  }
}

// ---- two passes: shared memory ----
// A CTA keeps BLOCK_M rows of one RowPair in shared memory and streams tiles of BLOCK_N rows of the other.
// The kept rows are copied in the same group as tile 0, so acquire(0) waits for both.

template <class B> struct BackwardShared {
  PairTile<B, B::block_m> kept;
  PairTile<B, B::block_n> streamed[B::stages];
  float2 lse_delta[B::stages][B::block_n];  // sdpa_backward_kv: of the streamed queries
  typename Products<OfV<B>>::Scratch scratch;
};

// ---- two passes: dQ. Q and dO are kept, K and V are streamed ----

//   for each tile of keys:
//     S = Q @ K.T,  dP = dO @ V.T         [BLOCK_M queries][BLOCK_N keys]
//     P = exp(logit - LSE)                logit: scale * S after the score hook
//     dS = P * (dP - delta)
//     dQ += dS @ K                        [BLOCK_M][D]
//   store scale * dQ
template <class B>
__global__ void __launch_bounds__(B::threads, 1) sdpa_backward_q(const __grid_constant__ BackwardArgs a) {
  using QkProducts = Products<OfQK<B>>;  // products with rows of Q or K, of D elements
  using VProducts = Products<OfV<B>>;    // products with rows of V or dO, of Dv elements
  using Scores = typename Products<B>::Scores;
  BackwardShared<B>& s = dynamic_shared<BackwardShared<B>>();
  const SdpaParams& p = a.p;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Item<B> item = query_item<B>(a, blockIdx.x);
  const int queries = item.query_count(p);
  if (B::use_lengths && item.q0 >= queries) return;
  const Mask& mask = mask_of<B, SKIPPING_ROWS<B>, B::block_n>(a, item);
  const Interval keys = mask.keys.of_rows(item.q0, min(item.q0 + B::block_m, queries) - 1);
  const RowPair streamed = keys_of_head(a, item, item.h / (p.Hq / p.Hkv));

  copy_pair(s.kept, queries_of_head(a, item, item.h), item.q0, p);
  const auto load = [&](int n, int stage) {
    copy_pair(s.streamed[stage], streamed, keys.begin + n * B::block_n, p);
  };
  StreamedTiles<B, decltype(load)> tiles(load, ceil_div(keys.end - keys.begin, B::block_n));

  Scores S, dP;
  Scores& dS = dP;  // P overwrites S, and dS overwrites dP
  typename QkProducts::Sums dQ;
  QkProducts::place(S, warp, lane);
  QkProducts::place(dP, warp, lane);
  QkProducts::place(dQ, warp, lane);
  clear(dQ);
  float lse[Scores::ROWS], delta[Scores::ROWS];
  SDPA_UNROLL for (int i = 0; i < Scores::ROWS; i++) {
    const int q = item.q0 + S.row(i);
    const int64_t head = head_index(p, item, item.h);
    const float2 pair = q < queries ? a.work.get(head, workspace_row(p, item, q)) : float2{0, 0};
    lse[i] = pair.x;
    delta[i] = pair.y;
  }

  typename QkProducts::Operand dS_operand;
  const int q = item.q0 + first_skipping_row<B>(warp);  // first of the rows that skip tiles together
  for (int n = 0; n < tiles.count; n++) {
    const int k0 = keys.begin + n * B::block_n;
    const PairTile<B, B::block_n>& tile = s.streamed[tiles.acquire(n)];
    if (!mask.tiles.touch(q, k0)) {
      tiles.load_ahead(n);
      continue;
    }
    QkProducts::begin(S, s.kept.x, tile.x, warp);
    VProducts::begin(dP, s.kept.y, tile.y, warp);
    tiles.load_ahead(n);
    QkProducts::template finish<1>(S, s.kept.x, tile.x, warp, lane);
    WeightsOfTile<B, Scores> weights{S, dP, {}};
    weights.set_p(a, item, mask, item.q0, k0, mask.tiles.cover(q, k0), lse);
    weights.multiply_by_slope();
    VProducts::template finish<0>(dP, s.kept.y, tile.y, warp, lane);
    weights.set_ds(delta);
    QkProducts::add(dQ, dS, tile.x, s.scratch, dS_operand, lane);
    QkProducts::settle(dQ);
  }
  store_gradient<B>(dQ, a.gradient_scale, head_of(a.dQ, a.d_q, item.batch(p.q_starts), item.h, item.q_row(0)),
                    a.d_q.row, item.q0, queries, p.D);
}

// ---- two passes: dK and dV. K and V are kept, Q and dO are streamed ----
// The products are transposed: S.T = K @ Q.T, dP.T = V @ dO.T. A CTA streams the tiles of all query heads of
// the GQA group, so that dK and dV are summed over these heads in registers. If dK and dV together need too
// many registers, the kernel is launched once for each of them.
//
// ONE_PASS: for each tile, the kernel also adds the partial dQ of its BLOCK_M keys to the dQ sums.

template <int WIDTH> struct MmaBlockOfDq : QuadRuns<2, WIDTH, 2> {  // [16][WIDTH], the accumulators of a warp
  static constexpr int M_TILES = 1;
};
// ONE_PASS: adds dQ = dS @ K of BLOCK_N queries to their sums, except for queries at or past `count`. A warp
// computes blocks of [16 queries][32 or 64 elements]. The warps exchange dS.T through shared memory, since a
// block needs dS of all keys. Before dS_s is overwritten, acquire() of the next tile waits for all warps.
//
//   K [BLOCK_M][D]   sums [count][D]
template <class B, class View>
__device__ __forceinline__ void add_dq(float* sums_g, int count, const View& dS, typename Products<B>::Scratch& dS_s,
                                       const Element<B>* K_s, int warp, int lane) {
  constexpr int stride = Products<B>::SCRATCH_STRIDE, width = B::head_dim % 64 ? 32 : 64;
  constexpr int blocks_per_row = B::head_dim / width;
  SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
    SDPA_UNROLL for (int j = 0; j < View::COLS; j += 2) {
      st_shared(&dS_s[dS.row(i) * stride + dS.col(j)], pack<Input>(dS.x[i][j], dS.x[i][j + 1]));
    }
  }
  __syncthreads();  // hazard: dS written by all warps
  for (int n = warp; n < B::block_n / 16 * blocks_per_row; n += B::num_warps) {
    const int r0 = n / blocks_per_row * 16, d0 = n % blocks_per_row * width;
    const SharedAddress dS_lane =
        shared_address(&dS_s[(lane / 16 * 8 + lane % 8) * stride + r0 + lane / 8 % 2 * 8]);
    const SharedAddress K_lane = shared_address(K_s + tile_offset<B>(lane % 16, lane / 16 * 8));
    MmaBlockOfDq<width> dQ;
    dQ.first_row = r0 + lane / 4;
    dQ.first_col = d0 + lane % 4 * 2;
    clear(dQ);
    SDPA_UNROLL for (int step = 0; step < B::block_m / 16; step++) {
      uint32_t rows[1][4];
      ldmatrix_x4<true>(rows[0], dS_lane + step * 16 * stride * int(sizeof(Input)));
      SDPA_UNROLL for (int i = 0; i < width / 16; i++) {
        uint32_t columns[4];
        ldmatrix_x4<true>(columns, tile_step<B>(K_lane, 16 * step, d0 + 16 * i));
        multiply_columns<MmaHalves<B>>(dQ, i, rows, columns);
      }
    }
    SDPA_UNROLL for (int i = 0; i < dQ.ROWS; i++) {
      if (dQ.row(i) >= count) continue;
      float* const row_g = sums_g + int64_t(dQ.row(i)) * B::head_dim;
      SDPA_UNROLL for (int j = 0; j < dQ.COLS; j += 2) {
        red_global_add_v2(row_g + dQ.col(j), dQ.x[i][j], dQ.x[i][j + 1]);
      }
    }
  }
}

// True if the sums of dK and dV fit into the registers of one launch.
template <class B> constexpr bool has_room_for_both = accumulator_registers<B>(B::head_dim + B::d_v) <= 192;

// The keys of a CTA: those of KV head h_kv from k0 on.
template <class B> struct KeyTile {
  Item<B> item;  // the sequence
  int h_kv, k0;
};
// USE_LENGTHS: tile i of CLUSTER_KEYS keys. Here item.h is a KV head, and item.q0 is the tile's first key.
// Consecutive tiles of a head share its Q and dO in L2.
template <class B> __device__ __forceinline__ KeyTile<B> key_tile_of_sequence(const BackwardArgs& a, uint32_t i) {
  const Item<B> item = sequence_tile<B, CLUSTER_KEYS<B>>(a.p, a.p.k_starts, a.p.Sk, a.p.Hkv, i);
  return {item, item.h, item.q0};
}
// Without a mask, consecutive CTAs have tiles of the same head and share its Q and dO in L2. With a mask, CTAs
// are ordered by key and then by head. Under a causal mask, the most queries see the first keys, so the longest
// CTAs start first.
template <class B> __device__ __forceinline__ KeyTile<B> key_tile(const BackwardArgs& a, int i) {
  if constexpr (B::use_lengths) return key_tile_of_sequence<B>(a, i);
  const int tiles = ceil_div(a.p.Sk, B::block_m), heads = a.p.B * a.p.Hkv;
  const bool by_head = a.mask.keys.all();
  const int head = by_head ? i / tiles : i % heads, k0 = (by_head ? i % tiles : i / heads) * B::block_m;
  return {item_of<B>(a.p, head / a.p.Hkv, 0, 0), head % a.p.Hkv, k0};
}

//   for each query head of the group, for each tile of its queries:
//     S.T = K @ Q.T,  dP.T = V @ dO.T                  [BLOCK_M keys][BLOCK_N queries]
//     P.T = exp(logit - LSE)
//     dV += P.T @ dO                                   [BLOCK_M][Dv]
//     dS.T = P.T * (dP.T - delta);  dK += dS.T @ Q     [BLOCK_M][D]
//   store dV and scale * dK
template <class B, bool HAS_DK, bool HAS_DV>
__global__ void __launch_bounds__(B::threads, 1) sdpa_backward_kv(const __grid_constant__ BackwardArgs a) {
  using QkProducts = Products<OfQK<B>>;
  using VProducts = Products<OfV<B>>;
  using Scores = typename Products<B>::Scores;
  using ByQuery = Transposed<Scores>;
  BackwardShared<B>& s = dynamic_shared<BackwardShared<B>>();
  const SdpaParams& p = a.p;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const KeyTile<B> keys = key_tile<B>(a, blockIdx.x);
  const Item<B>& item = keys.item;
  const int h_kv = keys.h_kv, k0 = keys.k0, heads_per_kv = p.Hq / p.Hkv, key_end = key_count(p, item);
  if (B::use_lengths && k0 >= key_end) return;
  const Mask& mask = mask_of<B, B::block_n, SKIPPING_ROWS<B>>(a, item);
  const Interval queries = queries_of_keys(mask.keys, k0, min(k0 + B::block_m, key_end) - 1, item.query_count(p));
  const int tiles_per_head = max(ceil_div(queries.end - queries.begin, B::block_n), 0);

  const auto head_of_tile = [&](int n) { return h_kv * heads_per_kv + n / tiles_per_head; };
  const auto query_of_tile = [&](int n) { return queries.begin + n % tiles_per_head * B::block_n; };
  const auto load = [&](int n, int stage) {
    const int h = head_of_tile(n), q0 = query_of_tile(n);
    if (n == 0) copy_pair(s.kept, keys_of_head(a, item, h_kv), k0, p);
    copy_pair(s.streamed[stage], queries_of_head(a, item, h), q0, p);
    // Here work.padded_rows is Sq.
    const float2* const from_g = a.work.lse_delta + head_index(p, item, h) * p.Sq + workspace_row(p, item, q0);
    for (int r = threadIdx.x; r < B::block_n; r += B::threads) {
      VectorCopy<copies_async<B>>::template copy<sizeof(float2)>(&s.lse_delta[stage][r], from_g + r,
                                                                  q0 + r < item.query_count(p));
    }
  };
  StreamedTiles<B, decltype(load)> tiles(load, heads_per_kv * tiles_per_head);

  Scores S, dP;
  Scores &P = S, &dS = dP;  // P overwrites S, dS overwrites dP
  typename QkProducts::Sums dK;
  typename VProducts::Sums dV;
  QkProducts::place(S, warp, lane);
  QkProducts::place(dP, warp, lane);
  QkProducts::place(dK, warp, lane);
  VProducts::place(dV, warp, lane);
  clear(dK);
  clear(dV);
  ByQuery S_by_query(S), dP_by_query(dP);

  typename VProducts::Operand P_operand;
  typename QkProducts::Operand dS_operand;
  const int k = k0 + first_skipping_row<B>(warp);  // first of the keys that skip tiles together
  for (int n = 0; n < tiles.count; n++) {
    const int stage = tiles.acquire(n), q0 = query_of_tile(n);
    const PairTile<B, B::block_n>& tile = s.streamed[stage];
    if (!adds_dq<B> && !mask.tiles.touch(q0, k)) {  // add_dq() has a barrier of all warps
      tiles.load_ahead(n);
      continue;
    }
    QkProducts::begin(S, s.kept.x, tile.x, warp);
    if (HAS_DK) {
      VProducts::begin(dP, s.kept.y, tile.y, warp);
    }
    tiles.load_ahead(n);
    float row_values[ByQuery::ROWS];  // LSE, later delta: both at once would need too many registers
    SDPA_UNROLL for (int i = 0; i < ByQuery::ROWS; i++) {
      row_values[i] = ld_shared<float>(&s.lse_delta[stage][S_by_query.row(i)].x);
    }
    QkProducts::template finish<HAS_DK ? 1 : 0>(S, s.kept.x, tile.x, warp, lane);  // dP stays in flight
    WeightsOfTile<B, ByQuery> weights{S_by_query, dP_by_query, {}};
    weights.set_p(a, query_tile(item, head_of_tile(n), q0), mask, q0, k0, mask.tiles.cover(q0, k), row_values);
    if (HAS_DV) VProducts::add(dV, P, tile.y, s.scratch, P_operand, lane);
    if (HAS_DK) {
      weights.multiply_by_slope();
      VProducts::template finish<HAS_DV ? 1 : 0>(dP, s.kept.y, tile.y, warp, lane);  // dV stays in flight
      SDPA_UNROLL for (int i = 0; i < ByQuery::ROWS; i++) {
        row_values[i] = ld_shared<float>(&s.lse_delta[stage][S_by_query.row(i)].y);
      }
      weights.set_ds(row_values);
      QkProducts::add(dK, dS, tile.x, s.scratch, dS_operand, lane);
      QkProducts::settle(dK);
    }
    if (HAS_DV) VProducts::settle(dV);  // hazard: the stage of this tile read by wgmma
    if constexpr (adds_dq<B>) {
      const int64_t row = head_index(p, item, head_of_tile(n)) * p.Sq + workspace_row(p, item, q0);
      add_dq<OfQK<B>>(a.work.dQ_sums + row * B::head_dim, item.query_count(p) - q0, dS, s.scratch, s.kept.x, warp,
                      lane);
    }
  }
  const int batch = item.batch(p.k_starts), row = item.k_row(0);
  if (HAS_DK) {
    store_gradient<B>(dK, a.gradient_scale, head_of(a.dK, a.d_k, batch, h_kv, row), a.d_k.row, k0, key_end, p.D);
  }
  if (HAS_DV) {
    store_gradient<B>(dV, 1, head_of(a.dV, a.d_v, batch, h_kv, row), a.d_v.row, k0, key_end, p.Dv);
  }
}

// ONE_PASS: scales and rounds dQ of an item's BLOCK_M queries.
template <class B>
__global__ void __launch_bounds__(B::threads) sdpa_backward_convert_rows(const __grid_constant__ BackwardArgs a) {
  constexpr int D = B::head_dim;
  const SdpaParams& p = a.p;
  const Item<B> item = query_item<B>(a, blockIdx.x);
  const int64_t first_row = head_index(p, item, item.h) * p.Sq + workspace_row(p, item, item.q0);
  const int rows = min(item.query_count(p) - item.q0, B::block_m);
  Input* const dQ_g = head_of(a.dQ, a.d_q, item.batch(p.q_starts), item.h, item.q_row(item.q0));
  for (int i = threadIdx.x; i < rows * (D / 4); i += B::threads) {
    const int r = i / (D / 4), d = i % (D / 4) * 4;
    const float4 x = ld_global<float4>(a.work.dQ_sums + (first_row + r) * D + d);
    const uint2 packed{pack<Input>(x.x * a.gradient_scale, x.y * a.gradient_scale),
                       pack<Input>(x.z * a.gradient_scale, x.w * a.gradient_scale)};
    st_global(dQ_g + r * a.d_q.row + d, packed);
  }
}

// ---- one pass by wgmma: five products, a producer warpgroup and two consumer warpgroups (has_roles) ----
// A CTA keeps 128 keys, 64 per consumer warpgroup, and streams tiles of BLOCK_N queries. S.T = K @ Q.T and
// dP.T = V @ dO.T have keys as rows, so that P.T is an A operand in registers. The warpgroups write dS.T to
// shared memory. Then each computes half of the tile's dQ from all 128 keys. For D=256, see "clusters of two
// CTAs".
//
//   producer, warp 0                      consumer warpgroup w
//   load Q, LSE of tile 0;  load K, V     before the first tile:  S, dP, P of tile 0
//   for each tile n:                      for each tile n:
//     wait do_empty;  load dO, delta        dS = P * (dP - delta), to shared memory
//     wait q_empty;  load Q, LSE            wait for the turn
//       of tile n + 1                       dV += P.T @ dO                          release dO of tile n
//                                           dQ = dS @ K of tile n - 1
//                                           S.T = K @ Q.T of tile n + 1
//                                           dK += dS.T @ Q
//                                           pass dQ to adding warp w, which adds it to the dQ sums
//                                           dP.T = V @ dO.T of tile n + 1;  pass the turn on
//                                           P = exp(logit - LSE) of tile n + 1      release Q of tile n
//                                         after the last tile:  its dQ;  store dK, dV
//
// The warpgroups take turns: one issues products while the other computes P and dS. When a warpgroup's turn
// for tile n starts, both halves of dS of tile n - 1 are complete: the other warpgroup stored its half before
// its latest turn.

template <class B> constexpr int DQ_PIECES = B::block_n / 64 * (B::head_dim / 64);  // of a tile

// Ids of named barriers, and the number of threads that arrive or wait. w: a consumer warpgroup.
constexpr int backward_turn = 1, backward_turn_threads = 256;  // backward_turn + w: the turn of w
constexpr int both_warpgroups = 3, both_warpgroups_threads = 256;
constexpr int own_warpgroup = 4, own_warpgroup_threads = 128;  // own_warpgroup + w: the warps of w
constexpr int p_stored = 6, p_read = 7, p_threads = 256;  // in_clusters: P written by warpgroup 0, read by 1
constexpr int dq_free = 8, dq_passed = 10, dq_threads = 160;  // + w: w and its adding warp

template <class B> struct KeysAndMask {
  KeyTile<B> keys;
  Mask mask;
};

// in_clusters: K and dS of the other CTA, and P for warpgroup 1.
struct ClusterShared {
  alignas(1024) Input K[2][64 * 64];   // panels. Rows: keys of the other CTA; columns: those of this CTA's dQ
  alignas(1024) Input dS[2][64 * 64];  // dS.T of the other CTA
  float4 P[8][128];                    // P.T of this CTA: the accumulators of the threads
  uint64_t ds_full[2], ds_empty[2];
};

// A piece of dQ of each warpgroup, ordered as in add_to_dq_sums().
struct PiecesShared { alignas(128) float dQ[2][dq_piece_floats]; };

template <class B> struct BackwardWgmmaShared {
  // A tile's Q is read before its dO and released after it, so Q has an additional stage. For D=64 with pieces of dQ
  // in shared memory, there is no room for it.
  static constexpr int Q_STAGES = B::stages + (B::head_dim > 64 || adds_directly<B>);
  // One warpgroup reads dS of tiles n - 1 and n while the other writes n + 1. in_clusters: one reads n while
  // the other writes n + 1.
  static constexpr int DS_STAGES = in_clusters<B> ? 2 : 3;
  alignas(1024) Input K[CTA_KEYS<B> / 64][64 * B::head_dim];  // [64][D], later dK
  alignas(1024) Input V[CTA_KEYS<B> / 64][64 * B::head_dim];  // later dV
  alignas(1024) Input dS[DS_STAGES][CTA_KEYS<B> * B::block_n];  // dS.T, in panels [CTA_KEYS][64 queries]
  alignas(1024) Input Q[Q_STAGES][B::block_n * B::head_dim];
  alignas(1024) Input dO[B::stages][B::block_n * B::head_dim];
  alignas(16) float lse[Q_STAGES][B::block_n];  // times lse_factor
  alignas(16) float delta[B::stages][B::block_n];
  uint64_t kv_full, q_full[Q_STAGES], q_empty[Q_STAGES], do_full[B::stages], do_empty[B::stages];
  // USE_LENGTHS: neither the producer nor the consumers have registers for these.
  std::conditional_t<B::use_lengths, KeysAndMask<B>, Nothing> keys_and_mask;
  std::conditional_t<in_clusters<B>, ClusterShared, Nothing> cluster;
  std::conditional_t<adds_directly<B>, Nothing, PiecesShared> pieces;
};

// USE_BIAS=1: in the turn of tile n, a warpgroup prefetches the bias for its 64 keys and tile n + 1 into its
// half of the dS stage of tile n + 1. The last products that read this stage, dQ of tile n - 2, are complete
// when the turn begins. Layout: panels [64 queries][64 keys], as far apart as the panels of dS, with swizzled
// chunks of 8 keys.
template <class B> struct BiasOfStage {
  static constexpr int CHUNK = 8, CHUNKS = 64 / CHUNK;
  const Bias* tile_s;  // null: the bias is read from global memory

  static __device__ __forceinline__ int offset(int q, int chunk) {
    return q / 64 * (B::block_m * 64) + (q % 64 * CHUNKS + (chunk ^ q % CHUNKS)) * CHUNK;
  }
  // True if all chunks are aligned and none extends past the end of a row of the bias.
  static __device__ __forceinline__ bool is_possible(const SdpaParams& p) {
    const Strides& s = p.bias_strides;
    return p.bias && p.bias_keys == 0 && !p.k_starts &&
           ((s.batch | s.head | s.row | bias_columns(p)) * sizeof(Bias) | reinterpret_cast<uintptr_t>(p.bias)) % 16 == 0;
  }
  // Starts the copy. The threads of a warpgroup call it.
  static __device__ __forceinline__ void load(Bias* tile_s, const SdpaParams& p, const Item<B>& item, int h, int q0,
                                              int k0) {
    const int thread = threadIdx.x % 128, chunk = thread % CHUNKS, k = k0 + chunk * CHUNK;
    const int queries = item.query_count(p), columns = bias_columns(p);
    const Bias* from = head_of(static_cast<const Bias*>(p.bias), p.bias_strides, item.b, h, q0 + thread / CHUNKS) + k;
    SDPA_UNROLL for (int q = 0; q < B::block_n; q += 128 / CHUNKS, from += 128 / CHUNKS * p.bias_strides.row) {
      const int row = q + thread / CHUNKS;
      cp_async<16>(tile_s + offset(row, chunk), from, q0 + row < queries && k < columns);
    }
    cp_async_commit_group();
  }
  template <class View> __device__ __forceinline__ void add(View& S, const ScoreTile<B>& tile) const {
    if (!tile_s) return BiasFromMemory().add(S, tile);
    SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
      SDPA_UNROLL for (int j = 0; j < View::COLS; j++) {
        const Bias* const at = tile_s + offset(S.row(i), S.col(j) / CHUNK) + S.col(j) % CHUNK;
        S.x[i][j] = with_bias(S.x[i][j], ld_shared<Bias>(at), tile.a.logit_scale);
      }
    }
  }
};

// Returns the keys of this CTA's cluster. The KV heads are divided into sections of heads_per_section heads, so that
// L2 holds the data of a section. Only the first section may have fewer. Within a section, clusters are ordered by
// key and then by head. Under a causal mask, the most queries see the first keys, so the longest CTAs start first.
template <class B> __device__ __forceinline__ KeyTile<B> key_tile_of_cluster(const BackwardArgs& a) {
  const uint32_t i = blockIdx.x / CLUSTER_CTAS<B>;
  if constexpr (B::use_lengths) return key_tile_of_sequence<B>(a, i);
  const uint32_t tiles = ceil_div(a.p.Sk, CLUSTER_KEYS<B>), most_heads = a.heads_per_section;
  // The first section has most_heads - missing heads.
  const uint32_t missing = most_heads - 1 - (a.p.B * a.p.Hkv - 1) % most_heads;
  const uint32_t section = (i + missing * tiles) / (most_heads * tiles);
  const uint32_t first = section > 0 ? section * most_heads - missing : 0;
  const uint32_t heads = section > 0 ? most_heads : most_heads - missing;
  const uint32_t j = i - first * tiles, head = first + j % heads;
  return {item_of<B>(a.p, int(head / a.p.Hkv), 0, 0), int(head % a.p.Hkv), int(j / heads * CLUSTER_KEYS<B>)};
}

// Iterates over the tiles of queries that see a key of the cluster, from last to first. The inner loop iterates
// over the query heads of the GQA group. Only ORDERED_ADDS depends on this order, see "Short waits" below.
template <class B> struct QueryTileIterator {
  int tiles_per_head;
  int h, tile;  // the current tile: its query head and its index in the sequence

  __device__ __forceinline__ QueryTileIterator(const BackwardArgs& a, const KeyTile<B>& keys, const Mask& mask)
      : h(keys.h_kv * (a.p.Hq / a.p.Hkv)) {
    const int last_key = min(keys.k0 + CLUSTER_KEYS<B>, key_count(a.p, keys.item)) - 1;
    const Interval queries = queries_of_keys(mask.keys, keys.k0, last_key, keys.item.query_count(a.p));
    const int first = queries.begin / B::block_n;
    const bool is_empty = queries.end <= queries.begin || (B::use_lengths && last_key < keys.k0);
    tiles_per_head = is_empty ? 0 : ceil_div(queries.end, B::block_n) - first;
    tile = first + tiles_per_head - 1;
  }
  __device__ __forceinline__ int count(const SdpaParams& p) const { return tiles_per_head * (p.Hq / p.Hkv); }
  __device__ __forceinline__ int query() const { return tile * B::block_n; }
  // Index of the tile's first row in the workspace.
  __device__ __forceinline__ int64_t row(const BackwardArgs& a, const Item<B>& item) const {
    return head_index(a.p, item, h) * a.work.padded_rows + workspace_row(a.p, item, query());
  }
  __device__ __forceinline__ void advance(const BackwardArgs& a) {
    h++;
    if (a.q_heads_per_kv.remainder(h) > 0) return;
    h -= a.q_heads_per_kv.divisor;
    tile--;
  }
};

// A template, since only has_roles has these maps.
template <class B> __device__ __forceinline__ const auto& gradient_maps(const BackwardArgs& a) {
  return a.gradient_maps;
}

// L2 cache policy: the default eviction priority.
constexpr uint64_t evict_normal = 0x1000000000000000;

// USE_LENGTHS: copies a tile that ends past the last row of its sequence, and zero-fills the missing rows.
// TMA would load rows of the next sequence instead. The producer warp calls it. The copies have landed when
// it returns. The caller then arrives at the mbarrier, so that the consumers may read them.
//
//   from_g: the tile's first row   count: number of rows of the tile that exist
template <int ROWS, int D>
__device__ __forceinline__ void copy_last_tile(Input* panels_s, const Input* from_g, int64_t row_stride, int width,
                                               int count) {
  constexpr int row_lanes = D / 8, rows_at_once = 32 / row_lanes;
  uint32_t lane[] = {threadIdx.x};
  hold(lane);  // without it, values derived from the lane would occupy registers of the consumers
  const int d = int(lane[0]) % row_lanes * 8;
#pragma unroll 1  // the producer has few registers
  for (int r = int(lane[0]) / row_lanes; r < ROWS; r += rows_at_once) {
    cp_async<16>(panels_s + panel_offset<ROWS>(r, d), from_g + r * row_stride + d, r < count && d < width);
  }
  cp_async_commit_group();
  cp_async_wait_group<0>();
  fence_proxy_async();  // wgmma reads the rows
  __syncwarp();  // hazard: rows copied by all lanes
}

// Loads K and V of the CTA's keys. in_clusters: also K of the other CTA. The producer calls it.
template <class B>
__device__ __forceinline__ void load_keys(BackwardWgmmaShared<B>& s, const BackwardArgs& a, const KeyTile<B>& keys) {
  constexpr int D = B::head_dim;
  const Item<B>& item = keys.item;
  const auto& maps = tensor_maps<B>(a);
  const bool is_first_lane = !B::use_lengths || threadIdx.x == 0;
  // in_clusters: first key of the other CTA, and first column of this CTA's half of dQ
  const int other_k0 = in_clusters<B> ? keys.k0 ^ CTA_KEYS<B> : keys.k0;
  const int first_d = in_clusters<B> ? cluster_rank() * (D / 2) : 0;
  if (B::use_lengths && max(keys.k0, other_k0) + CTA_KEYS<B> > key_count(a.p, item)) {
    const RowPair rows = keys_of_head(a, item, keys.h_kv);
#pragma unroll 1  // the producer has few registers
    for (int w = 0; w < CTA_KEYS<B> / 64; w++) {
      const int k = keys.k0 + 64 * w, count = rows.count - k;
      copy_last_tile<64, D>(s.K[w], rows.x + k * rows.x_stride, rows.x_stride, a.p.D, count);
      copy_last_tile<64, D>(s.V[w], rows.y + k * rows.y_stride, rows.y_stride, a.p.Dv, count);
    }
    if constexpr (in_clusters<B>) {
      for (int n = 0; n < 2; n++) {
        const int d = first_d + 64 * n;
        copy_last_tile<64, 64>(s.cluster.K[n], rows.x + other_k0 * rows.x_stride + d, rows.x_stride, a.p.D - d,
                               rows.count - other_k0);
      }
    }
    if (is_first_lane) mbarrier_arrive(&s.kv_full);
  } else if (is_first_lane) {
    mbarrier_arrive_expect_tx(&s.kv_full, sizeof s.K + sizeof s.V + (in_clusters<B> ? sizeof(ClusterShared::K) : 0));
    for (int w = 0; w < CTA_KEYS<B> / 64; w++) {
      const int box_origin[5] = {0, item.k_row(keys.k0 + 64 * w), 0, keys.h_kv, item.batch(a.p.k_starts)};
      load_rows<D, sizeof(Input), 64, in_clusters<B>>(a, s.K[w], &maps.k, box_origin, &s.kv_full, evict_first);
      load_rows<D, sizeof(Input), 64>(a, s.V[w], &maps.v, box_origin, &s.kv_full, evict_first);
    }
    if constexpr (in_clusters<B>) {
      for (int n = 0; n < 2; n++) {
        const int box_origin[5] = {first_d + 64 * n, item.k_row(other_k0), 0, keys.h_kv, item.batch(a.p.k_starts)};
        cp_async_bulk_tensor_load(s.cluster.K[n], &maps.k, box_origin, &s.kv_full, evict_first);
      }
    }
  }
}

// The producer: thread 0, or with USE_LENGTHS its warp. Loads K and V once, then Q, LSE, dO and delta of each
// query tile.
template <class B>
__device__ __forceinline__ void produce_backward(BackwardWgmmaShared<B>& s, const BackwardArgs& a,
                                                 const KeyTile<B>& keys, QueryTileIterator<B> tile) {
  constexpr int D = B::head_dim;
  constexpr int tile_bytes = B::block_n * D * sizeof(Input);  // of Q, or of dO
  constexpr int lse_bytes = B::block_n * sizeof(float);       // of LSE, or of delta
  using Shared = BackwardWgmmaShared<B>;
  const Item<B>& item = keys.item;
  const auto& maps = tensor_maps<B>(a);
  const bool is_first_lane = !B::use_lengths || threadIdx.x == 0;
  // Loads a tile of Q or dO, which map and rows_g describe, and the LSE or delta of its rows.
  const auto load_tile = [&](const QueryTileIterator<B>& t, Input* tile_s, const CUtensorMap* map, const Input* rows_g,
                             int64_t row_stride, int width, float* lse_s, const float* lse_g, uint64_t* full) {
    const int count = item.query_count(a.p) - t.query();
    const bool is_last = B::use_lengths && count < B::block_n;
    if (is_last) copy_last_tile<B::block_n, D>(tile_s, rows_g + t.query() * row_stride, row_stride, width, count);
    if (!is_first_lane) return;
    const int box_origin[5] = {0, item.q_row(t.query()), 0, t.h, item.batch(a.p.q_starts)};
    mbarrier_arrive_expect_tx(full, is_last ? lse_bytes : tile_bytes + lse_bytes);
    if (!is_last) load_rows<D, sizeof(Input), B::block_n>(a, tile_s, map, box_origin, full, evict_normal);
    cp_async_bulk_load(lse_s, lse_g + t.row(a, item), lse_bytes, full);
  };
  StageRing<Shared::Q_STAGES> q_ring;
  StageRing<B::stages> do_ring;
  const auto load_q = [&](const QueryTileIterator<B>& t) {
    mbarrier_wait(&s.q_empty[q_ring.stage], q_ring.parity ^ 1);
    const RowPair rows = queries_of_head(a, item, t.h);
    load_tile(t, s.Q[q_ring.stage], &maps.q, rows.x, rows.x_stride, a.p.D, s.lse[q_ring.stage], a.work.lse,
              &s.q_full[q_ring.stage]);
    q_ring.advance();
  };
  const auto load_do = [&](const QueryTileIterator<B>& t) {
    mbarrier_wait(&s.do_empty[do_ring.stage], do_ring.parity ^ 1);
    const RowPair rows = queries_of_head(a, item, t.h);
    load_tile(t, s.dO[do_ring.stage], &gradient_maps<B>(a).d_o, rows.y, rows.y_stride, a.p.Dv,
              s.delta[do_ring.stage], a.work.delta, &s.do_full[do_ring.stage]);
    do_ring.advance();
  };
  load_q(tile);
  load_keys(s, a, keys);
  for (int left = tile.count(a.p); left > 0; left--) {
    load_do(tile);
    tile.advance(a);
    if (left > 1) load_q(tile);
  }
}

// Issues dK += dS.T @ Q.   dS.T [64 keys][BLOCK_N queries] of this warpgroup, Q [BLOCK_N][D]
template <class B>
__device__ __forceinline__ void wgmma_dk(WgmmaAccumulator<B::head_dim>& dK, uint64_t dS, uint64_t Q, bool accumulate) {
  hold(dK.x.d);
  wgmma_fence();
  SDPA_UNROLL for (int step = 0; step < B::block_n / 16; step++) {
    wgmma_ss<Input, B::head_dim, 1>(dK.x.d, descriptor_at(dS, panel_step<128>(step, B::block_m)),
                                    descriptor_at(Q, step * 16 * 128), step || accumulate);
  }
  wgmma_commit_group();
}
// Issues dQ = dS @ K for one piece. dS describes a panel of dS.T [BLOCK_M keys][64 queries]. K describes a
// panel [64 keys][64] of warpgroup 0; the same panel of warpgroup 1 is 64 * D elements further.
template <class B>
__device__ __forceinline__ void wgmma_dq(WgmmaAccumulator<64>& dQ, uint64_t dS, uint64_t K) {
  forget(dQ.x.d);
  wgmma_fence();
  SDPA_UNROLL for (int step = 0; step < B::block_m / 16; step++) {
    const int K_step = step / 4 * 64 * B::head_dim * int(sizeof(Input)) + step % 4 * 16 * 128;
    wgmma_ss<Input, 64, 1, 1>(dQ.x.d, descriptor_at(dS, step * 16 * 128), descriptor_at(K, K_step), step > 0);
  }
  wgmma_commit_group();
}

// ---- additions to dQ ----
// Consumer warpgroup w writes its piece of dQ to shared memory. Adding warp w, which is warp 1 + w of the producer
// warpgroup, adds it to the dQ sums by a bulk operation, so that the consumers do not wait for the addition.
//
//   adding warp w                               consumer warpgroup w
//   ORDERED_ADDS: wait for the counter          compute a piece of dQ
//   wait dq_passed                              wait dq_free
//   add the piece; wait until it is read        write the piece to shared memory
//   arrive dq_free                              arrive dq_passed
//   ORDERED_ADDS: wait until it is added;
//     increment the counter
//
// adds_directly: the consumers add the pieces. With ORDERED_ADDS, the adding warp arrives at dq_free when the
// counter permits the addition, and the consumers wait for it.
//
// ORDERED_ADDS: floating-point addition is not associative, so results are bitwise identical only if the CTAs
// add to each piece in a fixed order: by ascending keys. The counter of a piece is the number of CTAs that
// have added to it. A CTA waits until all CTAs with smaller keys have added.
//
// No deadlock, provided that CTAs start in the order of blockIdx, as they do on NVIDIA GPUs (CUDA does not
// guarantee it). A CTA waits only for CTAs with a smaller blockIdx, and all visit the pieces in the same
// order. So the unfinished CTA with the smallest blockIdx has started and waits for none.
//
// Short waits: all CTAs of a head visit its query tiles in descending order. Under a mask, a CTA with smaller
// keys begins at the same tile or one with a smaller index, so it reaches a common tile first. The heads of a GQA
// group are the inner loop. If they were the outer loop, CTAs with more tiles per head would delay the others at
// each head.

// Number of CTAs that add to a piece of the query tile at q0 before the CTA whose first key is k0.
template <class B> __device__ __forceinline__ uint32_t adds_before(const Mask& mask, int q0, int k0) {
  return k0 / CLUSTER_KEYS<B> - mask.keys.begin(q0) / CLUSTER_KEYS<B>;
}

// Adds a piece of dQ to the dQ sums. Accumulators 4i to 4i + 3 of thread t are added to floats 512i + 4t and
// following, so that the warp's addresses are contiguous.
__device__ __forceinline__ void add_to_dq_sums(const WgmmaAccumulator<64>& dQ, float* piece_g) {
  float* const to_g = piece_g + threadIdx.x % 128 * 4;
  SDPA_UNROLL for (int i = 0; i < 8; i++) {
    const float* const d = dQ.x.d + 4 * i;
    red_global_add_v4(to_g + i * 512, d[0], d[1], d[2], d[3]);
  }
}
// Passes a piece of dQ of warpgroup w to its adding warp, ordered as in add_to_dq_sums(). adds_directly: adds it
// to the dQ sums at piece_g.
template <class B>
__device__ __forceinline__ void pass_dq(BackwardWgmmaShared<B>& s, const WgmmaAccumulator<64>& dQ, int w,
                                        float* piece_g) {
  // hazard: previous piece read by the bulk operation. adds_directly: pieces of smaller keys added by other CTAs
  if (has_adding_warps<B>) barrier_sync(dq_free + w, dq_threads);
  if constexpr (adds_directly<B>) {
    add_to_dq_sums(dQ, piece_g);
  } else {
    SDPA_UNROLL for (int i = 0; i < 8; i++) {
      const float* const d = dQ.x.d + 4 * i;
      st_shared(s.pieces.dQ[w] + i * 512 + threadIdx.x % 128 * 4, float4{d[0], d[1], d[2], d[3]});
    }
    fence_proxy_async();  // the bulk operation reads the piece
  }
  if (has_adding_warps<B>) barrier_arrive(dq_passed + w, dq_threads);
}

// Adding warp w: adds the pieces of warpgroup w to the dQ sums. adds_directly: only orders the additions.
template <class B>
__device__ __forceinline__ void add_pieces(BackwardWgmmaShared<B>& s, const BackwardArgs& a, const KeyTile<B>& keys,
                                           const Mask& mask, QueryTileIterator<B> tile, int w) {
  const bool is_first_lane = threadIdx.x % 32 == 0;
  const int piece_of_tile = in_clusters<B> ? 2 * cluster_rank() + w : w;
  if (!adds_directly<B>) barrier_arrive(dq_free + w, dq_threads);
  for (int left = tile.count(a.p); left > 0; left--) {
    const int64_t piece = tile.row(a, keys.item) / B::block_n * DQ_PIECES<B> + piece_of_tile;
    const uint32_t before = adds_before<B>(mask, tile.query(), keys.k0);
    if (orders_adds<B> && is_first_lane) wait_for_value(a.work.add_counter(piece), before);
    __syncwarp();
    if constexpr (adds_directly<B>) {
      barrier_arrive(dq_free + w, dq_threads);
      barrier_sync(dq_passed + w, dq_threads);
    } else {
      barrier_sync(dq_passed + w, dq_threads);  // hazard: piece written by the warpgroup
      if (is_first_lane) {
        if (orders_adds<B>) fence_proxy_async_global();
        cp_reduce_async_bulk_add(a.work.dQ_sums + piece * dq_piece_floats, s.pieces.dQ[w], sizeof s.pieces.dQ[w]);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
      }
      __syncwarp();
      if (left > 1) barrier_arrive(dq_free + w, dq_threads);
      if (orders_adds<B> && is_first_lane) cp_async_bulk_wait_group<0>();
    }
    if (orders_adds<B> && is_first_lane) st_release(a.work.add_counter(piece), before + 1);
    tile.advance(a);
  }
}

// Stores 16 columns of a tile with 64 rows, given as an A operand, to panels of PANEL_ROWS rows. tile_s: the
// tile's row 0 in panel 0.
template <int PANEL_ROWS>
__device__ __forceinline__ void store_step_to_panels(Input* tile_s, int step, const uint32_t (&x)[4]) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
  const SharedAddress lane_s = shared_address(tile_s + panel_offset<PANEL_ROWS>(row, lane / 16 * 8));
  stmatrix_x4<false>((lane_s ^ step % 4 * 32) + step / 4 * PANEL_ROWS * 128, x);
}
// Stores factor * T [64][WIDTH], rounded.
template <int PANEL_ROWS, int WIDTH>
__device__ __forceinline__ void store_to_panels(const WgmmaAccumulator<WIDTH>& T, float factor, Input* tile_s) {
  SDPA_UNROLL for (int step = 0; step < WIDTH / 16; step++) {
    uint32_t x[4];
    SDPA_UNROLL for (int i = 0; i < 4; i++) {
      x[i] = pack<Input>(T.x.d[8 * step + 2 * i] * factor, T.x.d[8 * step + 2 * i + 1] * factor);
    }
    store_step_to_panels<PANEL_ROWS>(tile_s, step, x);
  }
}

// Loads one value per query (column of T), for the columns that this thread holds.
template <class View>
__device__ __forceinline__ void load_columns(float (&x)[View::COLS], const View& T, const float* row_s) {
  SDPA_UNROLL for (int j = 0; j < View::COLS; j += 2) {
    const float2 pair = ld_shared<float2>(row_s + T.col(j));
    x[j] = pair.x;
    x[j + 1] = pair.y;
  }
}

// Starts the store of dK or dV of keys [k0, k0 + 64) from panels. All threads of a warpgroup call it. The
// caller waits until the panels have been read.
template <class B>
__device__ __forceinline__ void store_key_gradient(const BackwardArgs& a, const KeyTile<B>& keys, int k0,
                                                   const Input* panels_s, Input* gradient_g, const Strides& strides,
                                                   const CUtensorMap* map, int width) {
  constexpr int D = B::head_dim;
  const int batch = keys.item.batch(a.p.k_starts), row = keys.item.k_row(0) + k0;
  const int rows = key_count(a.p, keys.item) - k0;
  if (B::use_lengths && rows < 64) {  // later rows belong to the next sequence
    Input* const to_g = head_of(gradient_g, strides, batch, keys.h_kv, row);
    for (int i = threadIdx.x % 128; i < rows * (D / 8); i += 128) {
      const int r = i / (D / 8), d = i % (D / 8) * 8;
      if (d < width) st_global(to_g + r * strides.row + d, ld_shared<uint4>(panels_s + panel_offset<64>(r, d)));
    }
    return;
  }
  if (threadIdx.x % 128 > 0) return;
  for (int n = 0; n < (a.has_short_rows ? D / 64 : 1); n++) {  // short rows: one box per panel
    const int box_origin[5] = {n * 64, row, 0, keys.h_kv, batch};
    cp_async_bulk_tensor_store(map, box_origin, panels_s + n * 64 * 64);
  }
  cp_async_bulk_commit_group();
}

// Consumer warpgroup w. Computes dK and dV of its 64 keys, and its piece of every tile's dQ.
template <class B>
__device__ __forceinline__ void consume_backward(BackwardWgmmaShared<B>& s, const BackwardArgs& a,
                                                 const KeyTile<B>& keys, const Mask& mask,
                                                 QueryTileIterator<B> tile, int w) {
  using Shared = BackwardWgmmaShared<B>;
  using Scores = WgmmaAccumulator<B::block_n>;
  using ByQuery = Transposed<Scores>;
  constexpr int D = B::head_dim;
  const int lane = threadIdx.x % 32, k0 = keys.k0 + 64 * w;
  Scores S, dP;
  Scores &P = S, &dS = dP;  // P overwrites S, dS overwrites dP
  WgmmaAccumulator<D> dK, dV;
  S.first_row = dP.first_row = threadIdx.x % 128 / 32 * 16 + lane / 4;
  S.first_col = dP.first_col = lane % 4 * 2;
  forget(dK.x.d);  // the products of the first tile overwrite dK and dV
  forget(dV.x.d);
  // D=128: dK += dS.T @ Q takes dS.T from registers, which saves reads of shared memory. With D=64 or a
  // slope, there are too few registers.
  constexpr bool dS_in_registers = D == 128 && !has_slope<B>;
  WgmmaProbabilities<B> dS_operand;
  WgmmaProbabilities<B> P_operand;  // P.T, rounded
  const auto pack_p = [&] {
    SDPA_UNROLL for (int step = 0; step < B::block_n / 16; step++) pack_step<Input>(P_operand[step], P, step);
  };

  // Descriptors. The leading byte offset matters only for transposed B operands with several panels: Q in dK
  // and dO in dV.
  const auto descriptor_of = [](const void* at_s, int leading_bytes = 16) {
    return wgmma_descriptor(shared_address(at_s), leading_bytes, 1024);
  };
  const uint64_t K = descriptor_of(s.K[w]), V = descriptor_of(s.V[w]);
  const uint64_t Q_0 = descriptor_of(s.Q[0], B::block_n * 128), dO_0 = descriptor_of(s.dO[0], B::block_n * 128);
  const uint64_t dS_0 = descriptor_of(s.dS[0]);
  // For dQ of w: 64 columns of K, and the panel of 64 queries of dS.
  const uint64_t K_panel = descriptor_at(descriptor_of(s.K[0]), w % (D / 64) * 64 * 128);
  constexpr int query_panel_bytes = B::block_m * 128, own_keys_bytes = 64 * 128;
  const int dq_panel = w / (D / 64) * query_panel_bytes;
  const auto Q_of = [&](int stage) { return descriptor_at(Q_0, stage * int(sizeof s.Q[0])); };
  const auto dO_of = [&](int stage) { return descriptor_at(dO_0, stage * int(sizeof s.dO[0])); };
  const auto dS_of = [&](int stage) { return descriptor_at(dS_0, stage * int(sizeof s.dS[0])); };

  StageRing<Shared::Q_STAGES> q_ring;
  StageRing<B::stages> do_ring;
  int ds_stage = Shared::DS_STAGES - 1;  // of the previous tile
  float* dQ_sums_g = nullptr;            // this warpgroup's piece of the previous tile's dQ sums

  // USE_BIAS=1: bias_of_next() is the buffer for the bias of the next tile.
  constexpr bool may_prefetch_bias = B::use_bias == 1;
  const bool prefetches_bias = may_prefetch_bias && BiasOfStage<B>::is_possible(a.p);
  const auto bias_of_next = [&] {
    const int stage = ds_stage + 1 == Shared::DS_STAGES ? 0 : ds_stage + 1;
    return reinterpret_cast<Bias*>(s.dS[stage] + 64 * 64 * w);
  };
  const auto prefetch_bias = [&](const QueryTileIterator<B>& next) {
    if (prefetches_bias) BiasOfStage<B>::load(bias_of_next(), a.p, keys.item, next.h, next.query(), k0);
  };

  // Replaces S by P = exp(logit - LSE). has_slope: packs P.T, then multiplies P by the slope.
  const auto set_p = [&](int q_stage) {
    ByQuery S_by_query(S), dP_by_query(dP);
    WeightsOfTile<B, ByQuery> weights{S_by_query, dP_by_query, {}};
    float lse[Scores::COLS];
    load_columns(lse, S, s.lse[q_stage]);
    const int q0 = tile.query();
    if constexpr (may_prefetch_bias) {
      if (prefetches_bias) {
        cp_async_wait_group<0>();
        barrier_sync(own_warpgroup + w, own_warpgroup_threads);  // hazard: bias copied by all warps
      }
      const BiasOfStage<B> bias{prefetches_bias ? bias_of_next() : nullptr};
      weights.set_p(a, query_tile(keys.item, tile.h, q0), mask, q0, k0, mask.tiles.cover(q0, k0), lse, bias);
      if (prefetches_bias) barrier_sync(own_warpgroup + w, own_warpgroup_threads);  // hazard: bias read by all warps
    } else {
      weights.set_p(a, query_tile(keys.item, tile.h, q0), mask, q0, k0, mask.tiles.cover(q0, k0), lse);
    }
    if (has_slope<B>) pack_p();
    weights.multiply_by_slope();
  };
  // Computes a tile, given its P and dP. Replaces them by those of the next tile.
  const auto process_tile = [&](bool first, auto is_last) {
    constexpr bool last = decltype(is_last)::value;
    const int q_stage = q_ring.stage, do_stage = do_ring.stage, ds_before = ds_stage;
    q_ring.advance();
    do_ring.advance();
    ds_stage = ds_stage + 1 == Shared::DS_STAGES ? 0 : ds_stage + 1;

    // dS = P * (dP - delta), to shared memory
    {
      ByQuery S_by_query(S), dP_by_query(dP);
      float delta[Scores::COLS];
      load_columns(delta, P, s.delta[do_stage]);
      WeightsOfTile<B, ByQuery>{S_by_query, dP_by_query, {}}.set_ds(delta);
      SDPA_UNROLL for (int step = 0; dS_in_registers && step < B::block_n / 16; step++) {
        pack_step<Input>(dS_operand[step], dS, step);
        hold(dS_operand[step]);
      }
      store_to_panels<B::block_m>(dS, 1, s.dS[ds_stage] + 64 * 64 * w);
    }
    fence_proxy_async();
    // The turn. hazard: dS of tile n - 1 written by both warpgroups
    barrier_sync(backward_turn + w, backward_turn_threads);
    if constexpr (may_prefetch_bias && !last) {
      QueryTileIterator<B> next = tile;
      next.advance(a);
      prefetch_bias(next);
    }

    // dV += P.T @ dO, and dQ = dS @ K of the previous tile. In the first tile, this dQ is undefined and not
    // used.
    if (!has_slope<B>) pack_p();
    wgmma_pv<B>(dV, P_operand, dO_of(do_stage), !first);
    WgmmaAccumulator<64> dQ;
    wgmma_dq<B>(dQ, descriptor_at(dS_of(ds_before), dq_panel), K_panel);
    wgmma_wait_group<1>();
    hold(dV.x.d);
    arrive_by_warp(&s.do_empty[do_stage]);

    // S.T = K @ Q.T of the next tile, and dK += dS.T @ Q of this one
    Scores next_S, next_dP;
    if constexpr (!last) {
      mbarrier_wait(&s.q_full[q_ring.stage], q_ring.parity);
      wgmma_qk<B>(next_S, K, Q_of(q_ring.stage));
    }
    if constexpr (dS_in_registers) {
      wgmma_pv<B>(dK, dS_operand, Q_of(q_stage), !first);
    } else {
      wgmma_dk<B>(dK, descriptor_at(dS_of(ds_stage), own_keys_bytes * w), Q_of(q_stage), !first);
    }
    wgmma_wait_group<last ? 1 : 2>();
    hold(dQ.x.d);
    if (!first) pass_dq<B>(s, dQ, w, dQ_sums_g);
    dQ_sums_g = a.work.dQ_sums + tile.row(a, keys.item) * D + w * dq_piece_floats;

    if constexpr (last) {
      if (w == 0) barrier_arrive(backward_turn + 1, backward_turn_threads);  // warpgroup 1's last turn
      wgmma_wait_group<0>();
      hold(dK.x.d);
    } else {
      // dP.T = V @ dO.T and P of the next tile
      mbarrier_wait(&s.do_full[do_ring.stage], do_ring.parity);
      wgmma_qk<B>(next_dP, V, dO_of(do_ring.stage));
      barrier_arrive(backward_turn + 1 - w, backward_turn_threads);
      tile.advance(a);
      wgmma_wait_group<2>();
      hold(next_S.x.d);
      SDPA_UNROLL for (int i = 0; i < B::block_n / 2; i++) S.x.d[i] = next_S.x.d[i];
      set_p(q_ring.stage);
      wgmma_wait_group<1>();
      hold(dK.x.d);
      arrive_by_warp(&s.q_empty[q_stage]);
      wgmma_wait_group<0>();
      hold(next_dP.x.d);
      SDPA_UNROLL for (int i = 0; i < B::block_n / 2; i++) dP.x.d[i] = next_dP.x.d[i];
    }
  };

  // The first tile's S, dP and P
  const int tiles = tile.count(a.p);
  if constexpr (may_prefetch_bias) prefetch_bias(tile);
  mbarrier_wait(&s.kv_full, 0);
  mbarrier_wait(&s.q_full[0], 0);
  wgmma_qk<B>(S, K, Q_0);
  mbarrier_wait(&s.do_full[0], 0);
  wgmma_qk<B>(dP, V, dO_0);
  wgmma_wait_group<1>();
  hold(S.x.d);
  set_p(0);
  wgmma_wait_group<0>();
  hold(dP.x.d);
  if (w == 1) barrier_arrive(backward_turn, backward_turn_threads);  // the first turn is warpgroup 0's

  for (int n = 0; n + 1 < tiles; n++) process_tile(n == 0, std::false_type{});
  process_tile(tiles == 1, std::true_type{});

  // dQ of the last tile
  barrier_sync(both_warpgroups, both_warpgroups_threads);  // hazard: dS written by both warpgroups
  WgmmaAccumulator<64> dQ;
  wgmma_dq<B>(dQ, descriptor_at(dS_of(ds_stage), dq_panel), K_panel);
  wgmma_wait_group<0>();
  hold(dQ.x.d);
  pass_dq<B>(s, dQ, w, dQ_sums_g);

  // Write dV over this warpgroup's V and dK over its K, then store both by TMA.
  store_to_panels<64>(dV, 1, s.V[w]);
  barrier_sync(both_warpgroups, both_warpgroups_threads);  // hazard: K read by both warpgroups
  store_to_panels<64>(dK, a.gradient_scale, s.K[w]);
  fence_proxy_async();
  barrier_sync(own_warpgroup + w, own_warpgroup_threads);  // hazard: dK and dV written by all warps
  store_key_gradient<B>(a, keys, k0, s.K[w], a.dK, a.d_k, &gradient_maps<B>(a).d_k, a.p.D);
  store_key_gradient<B>(a, keys, k0, s.V[w], a.dV, a.d_v, &gradient_maps<B>(a).d_v, a.p.Dv);
  cp_async_bulk_wait_group_read<0>();
}

// ---- clusters of two CTAs (in_clusters) ----
// dK and dV of 128 keys with 256 elements would take 256 registers per thread of two warpgroups, so a CTA has
// 64 keys. Separate CTAs of 64 keys would double the number of additions to dQ. So two CTAs form a cluster
// with 128 keys and iterate over the same query tiles. They exchange dS, and each computes half of the
// columns of dQ from all 128 keys.
//
//   warpgroup 0                                warpgroup 1
//   before the first tile:  S, P of tile 0     dP, dS of tile 0
//   for each tile n:                           for each tile n:
//     dV += P.T @ dO             release dO      dK += dS.T @ Q             release Q
//     dQ of tile n - 1, 64 columns               dQ of tile n - 1, 64 columns
//     S.T = K @ Q.T of tile n + 1                dP.T = V @ dO.T of tile n + 1
//     add dQ to the dQ sums                      add dQ to the dQ sums
//     P = exp(logit - LSE) of tile n + 1         wait for P of tile n + 1
//     pass P to warpgroup 1      release Q       dS = P * (dP - delta)
//                                                send dS to the other CTA   release dO
//   after the last tile:  its dQ; store dV     after the last tile:  its dQ; store dK
//
// Both warpgroups release each stage of Q and dO. P.T and dS.T are A operands in registers. One warpgroup
// multiplies while the other computes P or dS. Each of the two buffers of dS has two mbarriers. ds_full
// completes when dS of both CTAs has been written. ds_empty completes when all consumer warpgroups of the
// cluster have computed dQ from it.

// Issues dQ = dS @ K for one piece, from the keys of both CTAs. The caller commits the group.
//   dS.T [64 keys][64 queries]   K [64 keys][64]
template <class B>
__device__ __forceinline__ void wgmma_dq_of_cluster(WgmmaAccumulator<64>& dQ, uint64_t dS, uint64_t K,
                                                    uint64_t other_dS, uint64_t other_K) {
  forget(dQ.x.d);
  wgmma_fence();
  SDPA_UNROLL for (int step = 0; step < 4; step++) {
    wgmma_ss<Input, 64, 1, 1>(dQ.x.d, descriptor_at(dS, step * 16 * 128), descriptor_at(K, step * 16 * 128), step > 0);
  }
  SDPA_UNROLL for (int step = 0; step < 4; step++) {
    wgmma_ss<Input, 64, 1, 1>(dQ.x.d, descriptor_at(other_dS, step * 16 * 128),
                              descriptor_at(other_K, step * 16 * 128), true);
  }
}

// Consumer warpgroup W. W == 0 computes P and dV, W == 1 computes dS and dK.
template <class B, int W>
__device__ __forceinline__ void consume_in_cluster(BackwardWgmmaShared<B>& s, const BackwardArgs& a,
                                                   const KeyTile<B>& keys, const Mask& mask, QueryTileIterator<B> tile) {
  using Shared = BackwardWgmmaShared<B>;
  using Scores = WgmmaAccumulator<B::block_n>;
  using ByQuery = Transposed<Scores>;
  constexpr int D = B::head_dim, tile_bytes = sizeof s.Q[0];
  const int tid = threadIdx.x % 128, lane = threadIdx.x % 32, piece = 2 * cluster_rank() + W;
  Scores T;                       // W == 0: S.T, then P.T. W == 1: dP.T, then dS.T
  WgmmaProbabilities<B> operand;  // P.T or dS.T, rounded
  WgmmaAccumulator<D> sum;        // dV or dK
  WgmmaAccumulator<64> dQ;
  T.first_row = tid / 32 * 16 + lane / 4;
  T.first_col = lane % 4 * 2;
  forget(sum.x.d);  // the products of the first tile overwrite it

  // t_ring: stages of Q (W == 1: of dO), which T is computed from. sum_ring: stages of dO (W == 1: of Q),
  // which the sum is computed from. T is one tile ahead of the sum.
  constexpr int T_STAGES = W == 0 ? Shared::Q_STAGES : B::stages, SUM_STAGES = W == 0 ? B::stages : Shared::Q_STAGES;
  uint64_t *const t_full = W == 0 ? s.q_full : s.do_full, *const t_empty = W == 0 ? s.q_empty : s.do_empty;
  uint64_t *const sum_full = W == 0 ? s.do_full : s.q_full, *const sum_empty = W == 0 ? s.do_empty : s.q_empty;
  StageRing<T_STAGES> t_ring;
  StageRing<SUM_STAGES> sum_ring;
  StageRing<2> ds_ring, ds_before{1};  // stages of dS: of the operand's tile, and of the tile before it
  float* dQ_sums_g = nullptr;          // this warpgroup's piece of the previous tile's dQ sums

  // Called for each tile: if descriptors were kept across tiles, those of all steps would occupy registers.
  const auto descriptor_of = [](const void* at_s, int leading_bytes = 16) {
    return wgmma_descriptor(warp_uniform(shared_address(at_s)), leading_bytes, 1024);
  };
  const auto issue_scores = [&] {
    const Input* const tiles_s = W == 0 ? s.Q[0] : s.dO[0];
    mbarrier_wait(&t_full[t_ring.stage], t_ring.parity);
    wgmma_qk<B>(T, descriptor_of(W == 0 ? s.K[0] : s.V[0]),
                descriptor_at(descriptor_of(tiles_s), t_ring.stage * tile_bytes));
  };
  const auto issue_dq = [&](int stage) {
    wgmma_dq_of_cluster<B>(dQ, descriptor_of(s.dS[stage]), descriptor_of(s.K[0] + piece * 64 * 64),
                           descriptor_of(s.cluster.dS[stage]), descriptor_of(s.cluster.K[W]));
  };
  const auto pack_operand = [&] {
    SDPA_UNROLL for (int step = 0; step < B::block_n / 16; step++) {
      pack_step<Input>(operand[step], T, step);
      hold(operand[step]);
    }
  };
  // Given T, computes P or dS of a tile and the operand of the sum.
  const auto compute_operand = [&](bool first) {
    const int stage = ds_ring.stage;
    if constexpr (W == 0) {
      ByQuery S_by_query(T);
      WeightsOfTile<B, ByQuery> weights{S_by_query, S_by_query, {}};  // no dS in this warpgroup
      float lse[Scores::COLS];
      load_columns(lse, T, s.lse[t_ring.stage]);
      const int q0 = tile.query();
      weights.set_p(a, query_tile(keys.item, tile.h, q0), mask, q0, keys.k0, mask.tiles.cover(q0, keys.k0), lse);
      pack_operand();
      weights.multiply_by_slope();
      if (!first) barrier_sync(p_read, p_threads);  // hazard: P of the previous tile read by warpgroup 1
      SDPA_UNROLL for (int i = 0; i < B::block_n / 8; i++) {
        const float* const d = T.x.d + 4 * i;
        st_shared(&s.cluster.P[i][tid], float4{d[0], d[1], d[2], d[3]});
      }
      barrier_arrive(p_stored, p_threads);
    } else {
      Scores P;
      float delta[Scores::COLS];
      load_columns(delta, T, s.delta[t_ring.stage]);
      barrier_sync(p_stored, p_threads);  // hazard: P written by warpgroup 0
      SDPA_UNROLL for (int i = 0; i < B::block_n / 8; i++) {
        const float4 x = ld_shared<float4>(&s.cluster.P[i][tid]);
        memcpy(P.x.d + 4 * i, &x, sizeof x);
      }
      ByQuery P_by_query(P), dP_by_query(T);
      WeightsOfTile<B, ByQuery>{P_by_query, dP_by_query, {}}.set_ds(delta);
      pack_operand();
      mbarrier_wait(&s.cluster.ds_empty[stage], ds_ring.parity ^ 1);
      SDPA_UNROLL for (int step = 0; step < 4; step++) store_step_to_panels<64>(s.dS[stage], step, operand[step]);
      fence_proxy_async();
      barrier_sync(own_warpgroup + W, own_warpgroup_threads);  // hazard: dS written by all warps
      if (tid == 0) {
        const int other = cluster_rank() ^ 1;
        mbarrier_arrive_expect_tx(&s.cluster.ds_full[stage], sizeof s.cluster.dS[0]);  // from the other CTA
        cp_async_bulk_copy_to_cta(address_in_cta(s.cluster.dS[stage], other), s.dS[stage], sizeof s.dS[0],
                                  address_in_cta(&s.cluster.ds_full[stage], other));
      }
    }
    arrive_by_warp(&t_empty[t_ring.stage]);
    t_ring.advance();
  };
  // Adds a tile to the sum, given its operand. Replaces the operand by that of the next tile.
  const auto process_tile = [&](bool first, auto is_last) {
    constexpr bool last = decltype(is_last)::value;
    if (W == 1 && !last) barrier_arrive(p_read, p_threads);
    // dV += P.T @ dO or dK += dS.T @ Q, and dQ = dS @ K of the previous tile. For the first tile, there is no
    // dQ, and its group is empty.
    const Input* const tiles_s = W == 0 ? s.dO[0] : s.Q[0];
    mbarrier_wait(&sum_full[sum_ring.stage], sum_ring.parity);
    const uint64_t tiles = descriptor_of(tiles_s, B::block_n * 128);
    wgmma_pv<B>(sum, operand, descriptor_at(tiles, sum_ring.stage * tile_bytes), !first);
    if (!first) {
      mbarrier_wait(&s.cluster.ds_full[ds_before.stage], ds_before.parity);
      issue_dq(ds_before.stage);
    }
    wgmma_fence();  // for the path without dQ; otherwise ptxas inserts one here
    wgmma_commit_group();
    if constexpr (!last) issue_scores();

    wgmma_wait_group<last ? 1 : 2>();
    hold(sum.x.d);
    arrive_by_warp(&sum_empty[sum_ring.stage]);
    sum_ring.advance();
    wgmma_wait_group<last ? 0 : 1>();
    hold(dQ.x.d);
    if (!first) {
      SDPA_UNROLL for (int rank = 0; rank < 2; rank++) {
        arrive_in_cluster_by_warp(address_in_cta(&s.cluster.ds_empty[ds_before.stage], rank));
      }
      pass_dq<B>(s, dQ, W, dQ_sums_g);
    }
    dQ_sums_g = a.work.dQ_sums + tile.row(a, keys.item) * D + piece * dq_piece_floats;
    ds_before = ds_ring;
    ds_ring.advance();
    if constexpr (!last) {
      tile.advance(a);
      wgmma_wait_group<0>();
      hold(T.x.d);
      compute_operand(false);
    }
  };

  const int tiles = tile.count(a.p);
  mbarrier_wait(&s.kv_full, 0);
  issue_scores();
  wgmma_wait_group<0>();
  hold(T.x.d);
  compute_operand(true);
  for (int n = 0; n + 1 < tiles; n++) process_tile(n == 0, std::false_type{});
  process_tile(tiles == 1, std::true_type{});

  // dQ of the last tile
  mbarrier_wait(&s.cluster.ds_full[ds_before.stage], ds_before.parity);
  issue_dq(ds_before.stage);
  wgmma_commit_group();
  wgmma_wait_group<0>();
  hold(dQ.x.d);
  pass_dq<B>(s, dQ, W, dQ_sums_g);

  // Warpgroup 0 writes dV over V, warpgroup 1 writes dK over K. Then TMA stores both.
  barrier_sync(both_warpgroups, both_warpgroups_threads);  // hazard: K and V read by both warpgroups
  Input* const sum_s = W == 0 ? s.V[0] : s.K[0];
  store_to_panels<64>(sum, W == 0 ? 1 : a.gradient_scale, sum_s);
  fence_proxy_async();
  barrier_sync(own_warpgroup + W, own_warpgroup_threads);  // hazard: the sum written by all warps
  const auto& maps = gradient_maps<B>(a);
  store_key_gradient<B>(a, keys, keys.k0, sum_s, W == 0 ? a.dV : a.dK, W == 0 ? a.d_v : a.d_k,
                        W == 0 ? &maps.d_v : &maps.d_k, W == 0 ? a.p.Dv : a.p.D);
  cp_async_bulk_wait_group_read<0>();
}

// Stores 0 to dK and dV of the CTA's keys, which no query sees.
template <class B>
__device__ __forceinline__ void store_zero_gradients(const BackwardArgs& a, const KeyTile<B>& keys) {
  const int rows = min(key_count(a.p, keys.item) - keys.k0, CTA_KEYS<B>);
  const int batch = keys.item.batch(a.p.k_starts), row = keys.item.k_row(0);
  const auto clear_keys = [&](Input* to_g, int64_t row_stride, int D) {
    for (int i = threadIdx.x; i < rows * (D / 8); i += B::threads) {
      st_global(to_g + (keys.k0 + i / (D / 8)) * row_stride + i % (D / 8) * 8, uint4{});
    }
  };
  clear_keys(head_of(a.dK, a.d_k, batch, keys.h_kv, row), a.d_k.row, a.p.D);
  clear_keys(head_of(a.dV, a.d_v, batch, keys.h_kv, row), a.d_v.row, a.p.Dv);
}

template <class B>
__device__ __forceinline__ void run_backward_roles(BackwardWgmmaShared<B>& s, const BackwardArgs& a,
                                                   const KeyTile<B>& keys, const Mask& mask,
                                                   QueryTileIterator<B> tiles, int warpgroup) {
  using Registers = WgmmaRegisters<B, 24>;  // a producer thread keeps 24
  if (warpgroup == 0) {
    setmaxnreg_dec<Registers::producer>();
    const int warp = warp_uniform(threadIdx.x / 32);
    if (warp == 0) {
      if (B::use_lengths || threadIdx.x == 0) produce_backward(s, a, keys, tiles);
    } else if (warp <= 2 && has_adding_warps<B>) {
      add_pieces(s, a, keys, mask, tiles, warp - 1);
    }
  } else {
    setmaxnreg_inc<Registers::consumer>();
    if constexpr (in_clusters<B>) {
      if (warpgroup == 1) {
        consume_in_cluster<B, 0>(s, a, keys, mask, tiles);
      } else {
        consume_in_cluster<B, 1>(s, a, keys, mask, tiles);
      }
    } else {
      consume_backward(s, a, keys, mask, tiles, warpgroup - 1);
    }
  }
}

template <class B>
__global__ void __launch_bounds__(B::threads, 1) sdpa_backward_wgmma(const __grid_constant__ BackwardArgs a) {
  BackwardWgmmaShared<B>& s = dynamic_shared<BackwardWgmmaShared<B>>();
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  KeyTile<B> keys = key_tile_of_cluster<B>(a);
  const Mask& mask = mask_of<B, B::block_n, 64>(a, keys.item);
  QueryTileIterator<B> tiles(a, keys, mask);
  if (in_clusters<B>) keys.k0 += cluster_rank() * CTA_KEYS<B>;
  if (tiles.count(a.p) == 0) return store_zero_gradients<B>(a, keys);
  if (threadIdx.x == 0) {
    mbarrier_init(&s.kv_full, 1);
    mbarriers_init(s.q_full, 1);
    mbarriers_init(s.do_full, 1);
    mbarriers_init(s.q_empty, B::num_warps);
    mbarriers_init(s.do_empty, B::num_warps);
    if constexpr (in_clusters<B>) {
      mbarriers_init(s.cluster.ds_full, 1);
      mbarriers_init(s.cluster.ds_empty, 2 * B::num_warps);
    }
    fence_mbarrier_init();
    if constexpr (B::use_lengths) s.keys_and_mask = {keys, mask};
  }
  // hazard: mbarriers initialized and keys_and_mask written by thread 0
  if constexpr (in_clusters<B>) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  if constexpr (B::use_lengths) {
    run_backward_roles(s, a, s.keys_and_mask.keys, s.keys_and_mask.mask, tiles, warpgroup);
  } else {
    run_backward_roles(s, a, keys, mask, tiles, warpgroup);
  }
  if constexpr (in_clusters<B>) cluster_sync();  // hazard: shared memory of this CTA accessed by the other one
}

// ---- one pass by wgmma: dQ from its sums ----

struct ConvertShared {
  Input rows[64][64 + 8];  // + 8 avoids bank conflicts
};

// Tile i of the dQ sums.
template <class B> __device__ __forceinline__ Item<B> tile_of_dq_sums(const BackwardArgs& a, uint32_t i) {
  if constexpr (B::use_lengths) return sequence_tile<B, B::block_n>(a.p, a.p.q_starts, a.p.Sq, a.p.Hq, i);
  const int tiles = a.work.padded_rows / B::block_n, head = i / tiles, tile = i % tiles;
  return item_of<B>(a.p, head / a.p.Hq, head % a.p.Hq, tile * B::block_n);
}
// Scales and rounds dQ. One CTA per piece of [64 queries][64 elements].
template <class B>
__global__ void __launch_bounds__(128) sdpa_backward_convert(const __grid_constant__ BackwardArgs a) {
  ConvertShared& s = dynamic_shared<ConvertShared>();
  const int piece = blockIdx.x % DQ_PIECES<B>;
  const Item<B> item = tile_of_dq_sums<B>(a, blockIdx.x / DQ_PIECES<B>);
  const int q0 = item.q0 + piece / (B::head_dim / 64) * 64, d0 = piece % (B::head_dim / 64) * 64;
  const int queries = item.query_count(a.p);
  if (B::use_lengths && q0 >= queries) return;
  const int tid = threadIdx.x, row = tid / 32 * 16 + tid % 32 / 4, col = tid % 4 * 2;
  const float* const piece_g = a.work.dQ_sums + int64_t(blockIdx.x) * dq_piece_floats;
  SDPA_UNROLL for (int i = 0; i < 8; i++) {
    const float4 x = ld_global<float4>(piece_g + i * 512 + tid * 4);
    st_shared(&s.rows[row][i * 8 + col], pack<Input>(x.x * a.gradient_scale, x.y * a.gradient_scale));
    st_shared(&s.rows[row + 8][i * 8 + col], pack<Input>(x.z * a.gradient_scale, x.w * a.gradient_scale));
  }
  __syncthreads();  // hazard: rows written by all threads
  Input* const dQ_g = head_of(a.dQ, a.d_q, item.batch(a.p.q_starts), item.h, item.q_row(0));
  SDPA_UNROLL for (int i = 0; i < 4; i++) {
    const int r = i * 16 + tid / 8, d = tid % 8 * 8;
    if (q0 + r < queries && d0 + d < a.p.D) {
      st_global(dQ_g + (q0 + r) * a.d_q.row + d0 + d, ld_shared<uint4>(&s.rows[r][d]));
    }
  }
}

// ---- the gradient of a sink (USE_SINKS) ----

constexpr int sink_warps = 8;
struct SinksShared {
  float sums[sink_warps];
};

// A sink is a logit with P = exp(sink - LSE) and dP = 0. So dSink = sum of -P * delta over the rows of a head
// in all batches. One CTA per query head.
template <class B>
__global__ void __launch_bounds__(32 * sink_warps) sdpa_backward_sinks(const __grid_constant__ BackwardArgs a) {
  SinksShared& s = dynamic_shared<SinksShared>();
  const SdpaParams& p = a.p;
  const int h = blockIdx.x;
  const float sink = ld_global<float>(p.sinks + h) * lse_factor<B>;
  float sum = 0;
  for (int b = 0; b < p.B; b++) {
    const Item<B> item = item_of<B>(p, b, h, 0);
    for (int q = threadIdx.x; q < item.query_count(p); q += 32 * sink_warps) {
      const float2 pair = a.work.get(head_index(p, item, h), workspace_row(p, item, q));  // LSE, delta
      sum = fmaf(-ex2_approx_ftz((sink - pair.x) * (1 / ln2 / lse_factor<B>)), pair.y, sum);
    }
  }
  sum = row_sum<32>(sum);
  if (threadIdx.x % 32 == 0) st_shared(&s.sums[threadIdx.x / 32], sum);
  __syncthreads();  // hazard: sums written by all warps
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < sink_warps; warp++) sum += ld_shared<float>(&s.sums[warp]);
  st_global(a.dSinks + h, sum);
}

// ---- the gradient of a bias (USE_BIAS = 1, USE_BIAS = 3) ----
// dBias = dS, summed over the dimensions in which dBias has stride 0, and with dBias_sums_keys=1 over the
// keys. A CTA computes one tile of dBias. If there are few tiles, it computes a partial: the sum over a range
// of the steps. The kernel recomputes S and dP. In return, the sums are in registers: no atomics, no dS in
// global memory, and bitwise identical results in every run.

// The build of sdpa_backward_bias. has_roles: a wgmma build without roles. There are two stages, if the build has at
// least two and shared memory has room for them: 227 KB, of which the other arrays take at most 7.
template <class B> struct OfBias : B {
  static constexpr KernelKind kernel = has_roles<B> ? KernelKind::wgmma_plain : B::kernel;
  static constexpr int block_m = has_roles<B> ? 128 : B::block_m, block_n = has_roles<B> ? 64 : B::block_n;
  static constexpr int num_warps = has_roles<B> ? 8 : B::num_warps, split_warps = num_warps, threads = 32 * num_warps;
  static constexpr int step_bytes = (block_m + block_n) * (B::head_dim + B::d_v) * int(sizeof(Input));
  static constexpr int stages = B::stages >= 2 && 2 * step_bytes <= 220 * 1024 ? 2 : 1;
};

template <class B> struct BiasShared {
  static constexpr int SUM_STRIDE = B::block_n + 1;  // + 1 avoids bank conflicts
  struct Step {
    PairTile<B, B::block_m> queries;
    PairTile<B, B::block_n> keys;
  };
  union {
    Step steps[B::stages];
    float sums[B::block_m * SUM_STRIDE];  // after the last step
  };
  float2 lse_delta[B::stages][B::block_m];
};

// A template, since only builds with USE_BIAS=1 or 3 have a plan.
template <class B, class Args> __host__ __device__ __forceinline__ auto& bias_plan(Args& a) { return a.bias_plan; }

// A position in dS or in dBias: batch, head, first query and first column of the bias.
struct BiasPlace { int b, h, q0, column; };
template <class B> __device__ __forceinline__ BiasPlace bias_place(const BiasPlan::Dims& dims, uint32_t i) {
  const uint32_t row = dims.keys.divide(i), head = dims.queries.divide(row);  // row: of tiles, counted in all heads
  return {int(dims.heads.divide(head)), int(dims.heads.remainder(head)), int(dims.queries.remainder(row)) * B::block_m,
          int(dims.keys.remainder(i)) * B::block_n};
}
// Number of columns, and number of floats, of a tile of dBias. A tile is one row if dBias is summed over the
// queries, and one column if it is summed over the keys.
template <class B> __host__ __device__ __forceinline__ int bias_columns_of_tile(const BiasPlan& plan) {
  return plan.sums_keys ? 1 : B::block_n;
}
template <class B> __host__ __device__ __forceinline__ int bias_tile_size(const BiasPlan& plan) {
  return (plan.sums_queries ? 1 : B::block_m) * bias_columns_of_tile<B>(plan);
}
// Stores a tile of dBias. value(r, c) returns an element. Called by `threads` threads, numbered from 0.
template <class B, class Value>
__device__ __forceinline__ void store_bias_tile(const BackwardArgs& a, const BiasPlan& plan, uint32_t tile, int thread,
                                                int threads, const Value& value) {
  const BiasPlace at = bias_place<B>(plan.tiles, tile);
  const int columns = bias_columns_of_tile<B>(plan), last_row = plan.sums_queries ? 0 : a.p.Sq - 1 - at.q0,
            last_column = plan.sums_keys ? 0 : plan.columns - 1 - at.column;
  Bias* const tile_g = head_of(static_cast<Bias*>(a.dBias), a.d_bias, at.b, at.h, at.q0) + at.column;
  for (int i = thread; i < bias_tile_size<B>(plan); i += threads) {
    const int r = i / columns, c = i % columns;
    if (r <= last_row && c <= last_column) {
      st_global(tile_g + r * a.d_bias.row + c, rounded<Bias>(value(r, c)));
    }
  }
}

// Adds the bias from registers.
template <class Scores> struct BiasFromRegisters {
  const Scores& bias;

  template <class B> __device__ __forceinline__ void add(Scores& S, const ScoreTile<B>& tile) const {
    SDPA_UNROLL for (int i = 0; i < Scores::ROWS; i++) {
      SDPA_UNROLL for (int j = 0; j < Scores::COLS; j++) S.x[i][j] = fmaf(S.x[i][j], tile.a.logit_scale, bias.x[i][j]);
    }
  }
};

// Sums a tile of dS over its queries, into row 0, and over its keys, into column 0, as the plan says.
template <class B> __device__ __forceinline__ void reduce_bias_tile(float* sums_s, const BiasPlan& plan) {
  constexpr int stride = BiasShared<B>::SUM_STRIDE;
  if (plan.sums_queries) {
    for (int c = threadIdx.x; c < B::block_n; c += B::threads) {
      float x = 0;
      for (int r = 0; r < B::block_m; r++) x += ld_shared<float>(&sums_s[r * stride + c]);
      st_shared(&sums_s[c], x);
    }
    __syncthreads();  // hazard: row 0 written by all warps
  }
  if (plan.sums_keys) {
    for (int r = threadIdx.x; r < (plan.sums_queries ? 1 : B::block_m); r += B::threads) {
      float x = 0;
      for (int c = 0; c < B::block_n; c++) x += ld_shared<float>(&sums_s[r * stride + c]);
      st_shared(&sums_s[r * stride], x);
    }
    __syncthreads();  // hazard: column 0 written by all warps
  }
}

template <class Build>
__global__ void __launch_bounds__(OfBias<Build>::threads, 1) sdpa_backward_bias(const __grid_constant__ BackwardArgs a) {
  using B = OfBias<Build>;
  using QkProducts = Products<OfQK<B>>;
  using VProducts = Products<OfV<B>>;
  using Scores = typename Products<B>::Scores;
  BiasShared<B>& s = dynamic_shared<BiasShared<B>>();
  const SdpaParams& p = a.p;
  const BiasPlan& plan = bias_plan<B>(a);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t tile = blockIdx.x / plan.ranges, range = blockIdx.x % plan.ranges;
  const BiasPlace of_tile = bias_place<B>(plan.tiles, tile);
  const uint32_t first = uint32_t(uint64_t(plan.steps.count) * range / plan.ranges),
                 end = uint32_t(uint64_t(plan.steps.count) * (range + 1) / plan.ranges);
  const auto place_of = [&](int n) {
    const BiasPlace at = bias_place<B>(plan.steps, first + n);
    return BiasPlace{of_tile.b + at.b, of_tile.h + at.h, of_tile.q0 + at.q0, of_tile.column + at.column};
  };
  const auto item_at = [&](const BiasPlace& at) { return item_of<B>(p, at.b, at.h, at.q0); };
  const auto first_key = [&](const Item<B>& item, const BiasPlace& at) {
    return first_biased_key(p, key_count(p, item)) + at.column;
  };
  // True if a query of the step may see one of its keys.
  const auto sees = [&](const Item<B>& item, const Mask& mask, int k0) {
    return item.q0 < item.query_count(p) && k0 < key_count(p, item) && mask.tiles.touch(item.q0, k0);
  };
  const auto load = [&](int n, int stage) {
    const BiasPlace at = place_of(n);
    const Item<B> item = item_at(at);
    const int k0 = first_key(item, at);
    if (!sees(item, mask_of<B, B::block_m, B::block_n>(a, item), k0)) return;
    copy_pair(s.steps[stage].queries, queries_of_head(a, item, item.h), item.q0, p);
    copy_pair(s.steps[stage].keys, keys_of_head(a, item, item.h / (p.Hq / p.Hkv)), k0, p);
    const int64_t row = head_index(p, item, item.h) * a.work.padded_rows + item.q_row(item.q0);
    using Copy = VectorCopy<copies_async<B>>;
    for (int r = threadIdx.x; r < B::block_m; r += B::threads) {
      const bool exists = item.q0 + r < item.query_count(p);
      float2& to_s = s.lse_delta[stage][r];
      if (has_roles<Build>) {
        Copy::template copy<4>(&to_s.x, a.work.lse + row + r, exists);
        Copy::template copy<4>(&to_s.y, a.work.delta + row + r, exists);
      } else {
        Copy::template copy<8>(&to_s, a.work.lse_delta + row + r, exists);
      }
    }
  };
  StreamedTiles<B, decltype(load)> steps(load, int(end - first));

  Scores S, dP, sum, bias;
  Scores& dS = dP;  // P overwrites S, and dS overwrites dP
  QkProducts::place(S, warp, lane);
  QkProducts::place(dP, warp, lane);
  QkProducts::place(sum, warp, lane);
  QkProducts::place(bias, warp, lane);
  clear(sum);
  for (int n = 0; n < steps.count; n++) {
    const BiasPlace at = place_of(n);
    const Item<B> item = item_at(at);
    if (n == 0 || !plan.has_one_bias) {
      clear(bias);
      BiasInMemory<B>().add(bias, a, item, key_count(p, item), item.q0, first_key(item, at));
    }
    const int stage = steps.acquire(n), k0 = first_key(item, at);
    const Mask& mask = mask_of<B, B::block_m, B::block_n>(a, item);
    if (!sees(item, mask, k0)) {
      steps.load_ahead(n);
      continue;
    }
    QkProducts::begin(S, s.steps[stage].queries.x, s.steps[stage].keys.x, warp);
    VProducts::begin(dP, s.steps[stage].queries.y, s.steps[stage].keys.y, warp);
    steps.load_ahead(n);
    float lse[Scores::ROWS], delta[Scores::ROWS];
    SDPA_UNROLL for (int i = 0; i < Scores::ROWS; i++) {
      const float2 pair = ld_shared<float2>(&s.lse_delta[stage][S.row(i)]);
      lse[i] = pair.x;
      delta[i] = pair.y;
    }
    QkProducts::template finish<1>(S, s.steps[stage].queries.x, s.steps[stage].keys.x, warp, lane);
    WeightsOfTile<B, Scores> weights{S, dP, {}};
    weights.set_p(a, item, mask, item.q0, k0, mask.tiles.cover(item.q0, k0), lse, BiasFromRegisters<Scores>{bias});
    // dBias is the gradient of the logit, so P is not multiplied by the slope.
    VProducts::template finish<0>(dP, s.steps[stage].queries.y, s.steps[stage].keys.y, warp, lane);
    weights.set_ds(delta);
    SDPA_UNROLL for (int i = 0; i < Scores::ROWS; i++) {
      SDPA_UNROLL for (int j = 0; j < Scores::COLS; j++) sum.x[i][j] += dS.x[i][j];
    }
  }

  constexpr int stride = BiasShared<B>::SUM_STRIDE;
  __syncthreads();  // hazard: tiles of the last steps read by all warps
  write_view(s.sums, stride, sum);
  __syncthreads();  // hazard: sums written by all warps
  reduce_bias_tile<B>(s.sums, plan);
  const auto value = [&](int r, int c) { return ld_shared<float>(&s.sums[r * stride + c]); };
  if (plan.ranges == 1) return store_bias_tile<B>(a, plan, tile, threadIdx.x, B::threads, value);
  const int size = bias_tile_size<B>(plan), columns = bias_columns_of_tile<B>(plan);
  float* const partial_g = a.work.dBias_partials() + int64_t(blockIdx.x) * size;
  for (int i = threadIdx.x; i < size; i += B::threads) st_global(partial_g + i, value(i / columns, i % columns));
}

// Adds the partials of the ranges, in order. One thread per element of dBias.
template <class Build>
__global__ void __launch_bounds__(OfBias<Build>::threads) sdpa_backward_merge_bias(const __grid_constant__ BackwardArgs a) {
  using B = OfBias<Build>;
  const BiasPlan& plan = bias_plan<B>(a);
  const int size = bias_tile_size<B>(plan), columns = bias_columns_of_tile<B>(plan);
  const int ctas = ceil_div(size, B::threads), tile = blockIdx.x / ctas, cta = blockIdx.x % ctas;
  const float* const partials_g = a.work.dBias_partials() + int64_t(tile) * plan.ranges * size;
  store_bias_tile<B>(a, plan, tile, cta * B::threads + threadIdx.x, size, [&](int r, int c) {
    float x = 0;
#pragma unroll 8
    for (uint32_t range = 0; range < plan.ranges; range++) {
      x += ld_global<float>(partials_g + int64_t(range) * size + r * columns + c);
    }
    return x;
  });
}

// ---- padding rows (USE_LENGTHS) ----

constexpr int padding_warps = 8;

// Clears the padding rows of dQ, dK and dV (see SdpaBackwardParams). A warp clears a row of all heads.
template <class B>
__global__ void __launch_bounds__(32 * padding_warps) sdpa_backward_padding(const __grid_constant__ BackwardArgs a) {
  constexpr int width = B::vec_width;
  const SdpaParams& p = a.p;
  const int lane = threadIdx.x % 32;
  const auto clear_row = [&](Input* x_g, const Strides& s, int heads, int D, int batch, int row) {
    for (int i = lane * width; i < heads * D; i += 32 * width) {
      st_global(head_of(x_g, s, batch, i / D, row) + i % D, VectorType<width * sizeof(Input)>{});
    }
  };
  // Calls clear(batch, row) for the padding rows of a tensor with these starts.
  const auto for_each_padding_row = [&](const int* starts, int rows, auto used_rows, auto clear) {
    const int64_t all = int64_t(batches_of(p, starts)) * rows;
    for (int64_t i = int64_t(blockIdx.x) * padding_warps + threadIdx.x / 32; i < all; i += gridDim.x * padding_warps) {
      const int batch = int(i / rows), row = int(i % rows);
      const auto first = [&](int b) { return min(max(ld_global<int>(starts + b), 0), rows); };
      const Interval used = used_rows(Sequence(p, starts ? last_sequence(p.B, row, first) : batch));
      if (row < used.begin || row >= used.end) clear(batch, row);
    }
  };
  for_each_padding_row(
      p.q_starts, p.Sq, [](const Sequence& s) { return Interval{s.q_row, s.q_row + s.Sq}; },
      [&](int batch, int row) { clear_row(a.dQ, a.d_q, p.Hq, p.D, batch, row); });
  for_each_padding_row(
      p.k_starts, p.Sk, [](const Sequence& s) { return Interval{s.k_row, s.k_row + s.Sk}; },
      [&](int batch, int row) {
        clear_row(a.dK, a.d_k, p.Hkv, p.D, batch, row);
        clear_row(a.dV, a.d_v, p.Hkv, p.Dv, batch, row);
      });
}

// ==== 5 LAUNCH ===================================================================================

constexpr int most_ctas = 2147483647;  // maximum gridDim.x

// Number of CTAs of CTA_KEYS keys, rounded up to whole clusters.
template <class B> int64_t kv_ctas(const SdpaParams& p) {
  const int64_t clusters = batches_of(p, p.k_starts) * p.Hkv * tiles_of_head(p, p.k_starts, p.Sk, CLUSTER_KEYS<B>);
  return clusters * CLUSTER_CTAS<B>;
}

// USE_BIAS: maximum number of partials of dBias, one per CTA: at most one CTA per tile of dS, and at most 512
// threads per SM.
template <class B> int64_t most_bias_partials(const SdpaParams& p) {
  using Own = OfBias<B>;
  if (!p.bias) return 0;
  const double tiles = double(p.B) * p.Hq * ceil_div(p.Sq, Own::block_m) * ceil_div(p.Sk, Own::block_n);
  return int64_t(std::fmin(tiles, double(max(512 / Own::threads, 1)) * sm_count()));
}
// Number of floats in the workspace for partials of dBias.
template <class B> int64_t dBias_partial_floats(const SdpaParams& p) {
  if constexpr (B::adds_bias) {
    return most_bias_partials<B>(p) * OfBias<B>::block_m * OfBias<B>::block_n;
  } else {
    return 0;
  }
}
size_t backward_workspace_bytes(const SdpaParams& p) {
  using Work = BackwardWorkspace;
  const int64_t all_rows = int64_t(batches_of(p, p.q_starts)) * p.Hq * padded_rows_of(p);
  const int64_t dQ_sums = Work::dq_sum_floats(all_rows) + Work::add_counter_floats(all_rows);
  return size_t(Work::lse_and_delta_floats(all_rows) + dQ_sums + dBias_partial_floats<Defines>(p)) * sizeof(float);
}

SdpaStatus launch_backward(void (*kernel)(BackwardArgs), const BackwardArgs& a, int64_t ctas, int threads, size_t bytes,
                           cudaStream_t stream, int ctas_of_cluster = 1) {
  if (ctas == 0) return {};
  const SdpaStatus status = allow_shared_bytes(kernel, bytes);
  if (!status.ok()) return status;
  const char* const what = "launching a backward kernel";
  if (ctas_of_cluster == 1) return enqueue(kernel, a, uint32_t(ctas), threads, bytes, false, stream, what);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {unsigned(ctas_of_cluster), 1, 1};
  const cudaLaunchConfig_t launch{dim3(uint32_t(ctas)), dim3(threads), bytes, stream, &cluster, 1};
  const cudaError_t error = cudaLaunchKernelEx(&launch, kernel, a);
  return error == cudaSuccess ? SdpaStatus{} : cuda_failure(error, what);
}

// USE_BIAS=1, 3: P is computed from logits even if the problem has no bias, since lse_factor is 1.
template <class B> void set_backward_scales(KernelArgs& a) {
  set_scales<B>(a);
  if (!B::adds_bias || a.p.bias) return;
  a.logit_scale = a.scale_log2 * ln2;
  a.scale_log2 = 1 / ln2;
}

template <class B> SdpaStatus launch_sinks(const BackwardArgs& a, cudaStream_t stream) {
  if constexpr (B::use_sinks) {
    if (a.dSinks) return launch_backward(sdpa_backward_sinks<B>, a, a.p.Hq, 32 * sink_warps, sizeof(SinksShared), stream);
  }
  return {};
}

// USE_BIAS=1, 3: sets the plan of sdpa_backward_bias.
template <class B> SdpaStatus set_bias_plan(BiasPlan& plan, const SdpaBackwardParams& params) {
  using Own = OfBias<B>;
  const SdpaParams& p = params.forward;
  plan.columns = bias_columns(p);
  const struct {
    int size;
    bool is_summed;
  } dims[] = {{p.B, params.d_bias.batch == 0},
              {p.Hq, params.d_bias.head == 0},
              {int(ceil_div(p.Sq, Own::block_m)), params.d_bias.row == 0},
              {int(ceil_div(plan.columns, Own::block_n)), params.dBias_sums_keys == 1}};
  const int64_t bias_strides[] = {p.bias_strides.batch, p.bias_strides.head, p.bias_strides.row, 1};
  plan.has_one_bias = !B::use_lengths;
  for (int i = 0; i < 4; i++) {
    if (dims[i].is_summed && dims[i].size > 1 && bias_strides[i] != 0) plan.has_one_bias = false;
  }
  plan.sums_queries = dims[2].is_summed;
  plan.sums_keys = dims[3].is_summed;
  // Sets the sizes of the summed or of the kept dimensions. Returns false if there are too many tiles.
  const auto set_dims = [&](BiasPlan::Dims& to, bool summed) {
    double count = 1;
    uint32_t sizes[4];
    for (int i = 0; i < 4; i++) {
      sizes[i] = dims[i].is_summed == summed ? uint32_t(dims[i].size) : 1;
      count *= sizes[i];
    }
    to.heads = Divisor(max(sizes[1], 1u));
    to.queries = Divisor(max(sizes[2], 1u));
    to.keys = Divisor(max(sizes[3], 1u));
    to.count = uint32_t(std::fmin(count, double(most_ctas)));
    return count <= most_ctas;
  };
  if (!set_dims(plan.tiles, false) || !set_dims(plan.steps, true)) {
    return failure(refused, "dBias has more than %d tiles, or is summed over more; split the batch", most_ctas);
  }
  plan.ranges = max(min(uint32_t(most_bias_partials<B>(p)) / max(plan.tiles.count, 1u), plan.steps.count), 1u);
  return {};
}
// Launches the kernels that compute dBias. They read LSE and delta from the workspace.
template <class B> SdpaStatus launch_bias(const SdpaBackwardParams& params, cudaStream_t stream) {
  if constexpr (B::adds_bias) {
    if (!params.dBias) return {};
    using Own = OfBias<B>;
    BackwardArgs a(params, Own::block_m, Own::block_n);
    set_backward_scales<B>(a);
    BiasPlan& plan = bias_plan<B>(a);
    SdpaStatus status = set_bias_plan<B>(plan, params);
    if (!status.ok()) return status;
    const int64_t tiles = plan.tiles.count;
    status = launch_backward(sdpa_backward_bias<B>, a, tiles * plan.ranges, Own::threads, sizeof(BiasShared<Own>), stream);
    if (status.ok() && plan.ranges > 1) {
      const int64_t ctas = tiles * ceil_div(bias_tile_size<Own>(plan), Own::threads);
      status = launch_backward(sdpa_backward_merge_bias<B>, a, ctas, Own::threads, 0, stream);
    }
    return status;
  } else {
    return {};
  }
}

template <class B> SdpaStatus launch_padding(const BackwardArgs& a, cudaStream_t stream) {
  if constexpr (B::use_lengths) {
    const SdpaParams& p = a.p;
    const int64_t rows_of_q = int64_t(batches_of(p, p.q_starts)) * p.Sq;
    const int64_t rows_of_k = int64_t(batches_of(p, p.k_starts)) * p.Sk;
    const int64_t ctas = min(ceil_div(max(rows_of_q, rows_of_k), padding_warps), int64_t(sm_count()) * 8);
    return launch_backward(sdpa_backward_padding<B>, a, ctas, 32 * padding_warps, 0, stream);
  } else {
    return {};
  }
}

// Launches the kernels of build B. `entry` is the kernel that computes dK, with the shared memory Shared.
template <class B, bool = has_roles<B>> struct BackwardKernelOf {
  using Shared = BackwardShared<B>;
  static constexpr auto entry = sdpa_backward_kv<B, true, has_room_for_both<B>>;
  static SdpaStatus launch(const SdpaBackwardParams& params, const Items& items, const Grid& grid, cudaStream_t stream) {
    BackwardArgs q_args(params, SKIPPING_ROWS<B>, B::block_n, grid), kv_args(params, B::block_n, SKIPPING_ROWS<B>);
    set_backward_scales<B>(q_args);
    set_backward_scales<B>(kv_args);
    SdpaStatus status = launch_backward(sdpa_backward_rows<B>, q_args, items.count, 32 * B::num_warps, 0, stream);
    if (status.ok()) status = launch_sinks<B>(q_args, stream);
    if (status.ok()) status = launch_bias<B>(params, stream);
    if (status.ok()) status = launch_padding<B>(q_args, stream);
    if constexpr (!adds_dq<B>) {
      if (status.ok()) {
        status = launch_backward(sdpa_backward_q<B>, q_args, items.count, B::threads, sizeof(Shared), stream);
      }
    }
    const int64_t ctas = kv_ctas<B>(params.forward);
    if (status.ok()) status = launch_backward(entry, kv_args, ctas, B::threads, sizeof(Shared), stream);
    if constexpr (!has_room_for_both<B>) {
      if (status.ok()) {
        status = launch_backward(sdpa_backward_kv<B, false, true>, kv_args, ctas, B::threads, sizeof(Shared), stream);
      }
    }
    if constexpr (adds_dq<B>) {
      if (status.ok()) {
        status = launch_backward(sdpa_backward_convert_rows<B>, q_args, items.count, B::threads, 0, stream);
      }
    }
    return status;
  }
};

template <class B> struct BackwardKernelOf<B, true> {
  using Shared = BackwardWgmmaShared<B>;
  static constexpr auto entry = sdpa_backward_wgmma<B>;

  // Returns the number of KV heads per section. `wanted` is the number of heads whose Q, dO and dQ sums fit
  // into 8/15 of L2, as in grid_of(), but at least one CTA per SM. The heads are divided into sections of
  // about equal size, with `wanted` to 2 * wanted heads.
  static int choose_heads_per_section(const SdpaParams& p, int padded_rows) {
    const int64_t heads = int64_t(p.B) * p.Hkv;
    const double head_bytes = double(p.Hq / p.Hkv) * padded_rows * B::head_dim * (2 * sizeof(Input) + sizeof(float));
    const double in_l2 = device_attribute(cudaDevAttrL2CacheSize, 60 << 20) * 8.0 / 15 / std::fmax(head_bytes, 1);
    const double least = ceil_div(sm_count(), max(int(ceil_div(p.Sk, CLUSTER_KEYS<B>)) * CLUSTER_CTAS<B>, 1));
    const int64_t wanted = int64_t(std::fmin(std::fmax(in_l2, least), double(heads)));
    return int(ceil_div(heads, max(heads / max(wanted, int64_t(1)), int64_t(1))));
  }
  // A template, since other builds have no maps.
  template <class Args> static SdpaStatus encode_maps(Args& a) {
    SdpaParams& p = a.p;
    std::array<TensorView, 4> inputs = tensors_of(p);
    const int q_batches = batches_of(p, p.q_starts), k_batches = batches_of(p, p.k_starts);
    auto& maps = a.maps;
    auto& gradient_maps = a.gradient_maps;
    const struct {
      TensorView tensor;
      int rows;
      CUtensorMap* map;
    } boxes[] = {{inputs[0], B::block_n, &maps.q},
                 {inputs[1], 64, &maps.k},
                 {inputs[2], 64, &maps.v},
                 {view_of("dO", a.dO, a.d_o, q_batches, p.Hq, p.Sq, p.Dv), B::block_n, &gradient_maps.d_o},
                 {view_of("dK", a.dK, a.d_k, k_batches, p.Hkv, p.Sk, p.D), 64, &gradient_maps.d_k},
                 {view_of("dV", a.dV, a.d_v, k_batches, p.Hkv, p.Sk, p.Dv), 64, &gradient_maps.d_v}};
    for (const auto& x : boxes) {
      RowBoxes row_boxes;
      const bool by_panels = a.has_short_rows || (in_clusters<B> && x.map == &maps.k);
      SdpaStatus status = boxes_of_rows(row_boxes, x.tensor, B::head_dim, by_panels ? x.tensor.width : 0, x.rows);
      if (status.ok()) status = encode_boxes(*x.map, x.tensor, row_boxes);
      if (!status.ok()) return status;
    }
    return {};
  }
  static SdpaStatus launch(const SdpaBackwardParams& params, const Items& items, const Grid& grid, cudaStream_t stream) {
    BackwardArgs a(params, B::block_n, 64, grid);
    const SdpaParams& p = a.p;
    set_backward_scales<B>(a);
    const int64_t pieces = a.work.heads * (a.work.padded_rows / B::block_n) * DQ_PIECES<B>;
    if (pieces > most_ctas) {
      return failure(refused, "dQ has %lld tiles of 64x64, but a grid has at most %d CTAs; split the batch",
                     (long long)pieces, most_ctas);
    }
    a.heads_per_section = choose_heads_per_section(p, a.work.padded_rows);
    // Without queries or keys, no kernel reads a map, and an empty tensor cannot have one.
    SdpaStatus status;
    if (items.count > 0 && p.Sk > 0) status = encode_maps(a);
    if (status.ok()) status = launch_backward(sdpa_backward_rows<B>, a, items.count, 32 * B::num_warps, 0, stream);
    if (status.ok()) status = launch_sinks<B>(a, stream);
    if (status.ok()) status = launch_bias<B>(params, stream);
    if (status.ok()) status = launch_padding<B>(a, stream);
    if (status.ok()) {
      status = launch_backward(entry, a, kv_ctas<B>(p), B::threads, sizeof(Shared), stream, CLUSTER_CTAS<B>);
    }
    if (!status.ok()) return status;
    return launch_backward(sdpa_backward_convert<B>, a, pieces, 128, sizeof(ConvertShared), stream);
  }
};

template <class B> SdpaStatus backward(const SdpaBackwardParams& params, cudaStream_t stream) {
  const SdpaParams& p = params.forward;
  const bool has_rows = p.Hq > 0 && p.Sq > 0;
  const Items items = has_rows ? items_of_tile(p, 1, B::block_m) : Items{1, B::block_m, 0};
  // padded_rows_of() may exceed Sq, since every sequence has a padded last tile.
  if (items.count > most_ctas || kv_ctas<B>(p) > most_ctas || padded_rows_of(p) > most_ctas) {
    return failure(refused, "B*Hq*ceil(Sq/%d) or B*Hkv*ceil(Sk/%d) is over %d tiles; split the batch", B::block_m,
                   CTA_KEYS<B>, most_ctas);
  }
  static_assert(sizeof(typename BackwardKernelOf<B>::Shared) <= 227 * 1024,
                "BLOCK_M, BLOCK_N, STAGES: over the 227 KB of shared memory of a CTA; type smaller BLOCK_N or STAGES");
  return BackwardKernelOf<B>::launch(params, items, has_rows ? grid_of<B>(p, items) : Grid{}, stream);
}

// ---- the checks ----

SdpaStatus check_bias_gradient(SdpaBackwardParams& d) {
  const SdpaParams& p = d.forward;
  if (d.dBias_sums_keys != 0 && d.dBias_sums_keys != 1) {
    return failure(refused, "dBias_sums_keys=%d is outside [0, 1]", d.dBias_sums_keys);
  }
  if (!d.dBias) return {};
  if (!Defines::adds_bias) {
    return failure(refused, Defines::use_bias ? "dBias is set, but a mask of USE_BIAS=2 has no gradient; set dBias to 0"
                                              : "dBias is for builds with USE_BIAS=1 or USE_BIAS=3; set it to 0");
  }
  if (!p.bias) return failure(refused, "dBias is set, but bias is a null pointer; set both or only bias");
  const int columns = d.dBias_sums_keys ? 1 : bias_columns(p);
  TensorView t = view_of("dBias", static_cast<Bias*>(d.dBias), d.d_bias, p.B, p.Hq, p.Sq, columns);
  for (auto& dim : t.dims) dim.size = dim.stride ? dim.size : 1;  // dBias is summed over dimensions of stride 0
  const SdpaStatus status = check_overlap(t);
  if (!status.ok()) return status;
  if (p.q_starts || p.k_starts) {
    return failure(refused, "dBias is set, but its size is unknown for packed sequences; set q_starts and k_starts to 0");
  }
  if (p.bias_keys > 0 && (p.k_lengths || p.k_firsts || p.most_keys > 0)) {
    return failure(refused, "dBias is set, but a sequence may have fewer keys than bias_keys=%d; set bias_keys to 0",
                   p.bias_keys);
  }
  return {};
}
SdpaStatus check_backward(SdpaBackwardParams& d) {
  SdpaParams& p = d.forward;
  SdpaStatus status = check_params(p);
  if (!status.ok()) return status;
  if (p.B && p.Hq && p.Sq && !p.LSE) return failure(refused, "LSE is a null pointer; let sdpa_forward() write it");
  const int q_batches = batches_of(p, p.q_starts), k_batches = batches_of(p, p.k_starts);
  const TensorView tensors[] = {
      view_of("dO", d.dO, d.d_o, q_batches, p.Hq, p.Sq, p.Dv), view_of("dQ", d.dQ, d.d_q, q_batches, p.Hq, p.Sq, p.D),
      view_of("dK", d.dK, d.d_k, k_batches, p.Hkv, p.Sk, p.D), view_of("dV", d.dV, d.d_v, k_batches, p.Hkv, p.Sk, p.Dv)};
  for (const TensorView& t : tensors) {
    const bool is_empty = t.dims[0].size == 0 || t.dims[1].size == 0 || t.dims[2].size == 0;
    if (!is_empty) status = check_tensor(t, &t != tensors);
    if (!status.ok()) return status;
  }
  const struct {
    const char* name;
    uintptr_t address;
    int alignment;
  } pointers[] = {
      {"dLSE", uintptr_t(d.dLSE), 4},
      {"dSinks", uintptr_t(d.dSinks), 4},
      {"dBias", uintptr_t(d.dBias), int(sizeof(Bias))},
      {"workspace", uintptr_t(d.workspace), 256}};
  for (const auto& x : pointers) {
    if (x.address % x.alignment) return failure(refused, "%s is not aligned to %d bytes", x.name, x.alignment);
  }
  if (d.dSinks && !Defines::use_sinks) {
    return failure(refused, "dSinks is for builds with USE_SINKS=1; set it to 0");
  }
  if (d.dSinks && !p.sinks) {
    return failure(refused, "dSinks is set, but sinks is a null pointer; set both or only sinks");
  }
  status = check_bias_gradient(d);
  if (!status.ok()) return status;
  if (!d.workspace && backward_workspace_bytes(p) > 0) {
    return failure(refused, "workspace is null, but this problem needs %zu bytes", backward_workspace_bytes(p));
  }
  return {};
}

// ==== 6 REFUSALS =================================================================================

SDPA_BACKWARD_KNOBS(SDPA_LEGAL)
SDPA_BACKWARD_KNOBS(SDPA_FAMILIES)
#define SDPA_NOT_BACKWARD(name, fallback, member, values, families, meaning) \
  SDPA_NEW_LINE                                                              \
  SDPA_REFUSE(name##_changed && index_of(#name, backward_knobs) < 0, \
              #name ": the backward kernels lack it; drop it or BACKWARD=1");
SDPA_KNOBS(SDPA_NOT_BACKWARD)
SDPA_REFUSE(Defines::kv_bytes == 1,
            "DTYPE: the backward kernels take 16 bits; type DTYPE=FP16 or DTYPE=BF16, or drop BACKWARD=1");
SDPA_REFUSE(Defines::key_bias,
            "USE_BIAS=4, 5: the backward kernels lack a bias per key; type USE_BIAS=1 or 3, whose strides may be 0");
SDPA_REFUSE(Defines::use_warp_specialization && (Defines::block_m != 128 || Defines::num_warps != 8),
            "BLOCK_M, NUM_WARPS: the backward kernels of USE_WARP_SPECIALIZATION=1 have two consumer warpgroups per "
            "CTA for 128 keys; type BLOCK_M=128 NUM_WARPS=8");
SDPA_REFUSE(Defines::is_wgmma && (Defines::head_dim % 64 || Defines::d_v % 64),
            "HEAD_DIM: the wgmma backward kernels support 64, 128, 192 and 256; type one of them for HEAD_DIM and "
            "HEAD_DIM_V");
SDPA_REFUSE(Defines::use_warp_specialization &&
                (Defines::head_dim == 192 || Defines::block_n != (Defines::head_dim == 64 ? 128 : 64)),
            "BLOCK_N, HEAD_DIM: each of two warpgroups, or of four with HEAD_DIM=256, computes 64x64 elements of dQ; type "
            "HEAD_DIM=64 BLOCK_N=128, HEAD_DIM=128 BLOCK_N=64 or HEAD_DIM=256 BLOCK_N=64");
SDPA_REFUSE(!Defines::use_warp_specialization && accumulator_registers<Defines>(Defines::head_dim) > 192,
            "BLOCK_M, BLOCK_N: S, dP and dQ or dK would take over 192 registers and spill; type a smaller BLOCK_N, or "
            "BLOCK_M=16*NUM_WARPS");
SDPA_REFUSE(value_of(ONE_PASS_text) == 1 && Defines::head_dim % 32,
            "ONE_PASS, HEAD_DIM: a warp computes 32 or 64 elements of a row of dQ; type a multiple of 32 for HEAD_DIM");
SDPA_REFUSE(value_of(ONE_PASS_text) == 1 &&
                accumulator_registers<Defines>(Defines::head_dim + Defines::d_v) > 192 - 32,  // 32: a block of dQ
            "ONE_PASS, BLOCK_M, BLOCK_N: S, dP, dQ, dK and dV would take over 192 registers and spill; type a smaller "
            "BLOCK_N, or BLOCK_M=16*NUM_WARPS, or drop ONE_PASS");
SDPA_REFUSE(value_of(ORDERED_ADDS_text) == 1 && !Defines::use_warp_specialization,
            "ORDERED_ADDS: only the kernel of USE_WARP_SPECIALIZATION=1 adds to dQ in a fixed order; drop it or type "
            "USE_WARP_SPECIALIZATION=1");
SDPA_REFUSE(HEAD_DIM_V_changed && (Defines::kernel == KernelKind::scalar || Defines::use_warp_specialization),
            "HEAD_DIM_V: only the mma and the plain wgmma backward kernels support it; drop it or type "
            "USE_MMA_SYNC=1");

}  // namespace

// ==== 7 CALL =====================================================================================

// Returns the size of SdpaGradients::workspace for this problem, in bytes. It is 0 for an empty problem, and
// for sizes that sdpa_backward() refuses.
[[maybe_unused]] static size_t sdpa_backward_workspace_bytes(SdpaParams forward) {
  return check_sizes(forward).ok() ? backward_workspace_bytes(forward) : 0;
}

// Computes the gradients from the inputs of sdpa_forward(), O, LSE and dO. Enqueues kernels on a stream of
// the current device, with the guarantees of sdpa_forward(). Two runs on the same inputs give the same bits,
// except for dQ with ONE_PASS=1, and with USE_WARP_SPECIALIZATION=1 unless ORDERED_ADDS=1.
[[maybe_unused]] static SdpaStatus sdpa_backward(const SdpaBackwardParams& params, cudaStream_t stream) {
  SdpaBackwardParams p = params;
  const SdpaStatus status = check_backward(p);
  if (!status.ok() || !p.forward.B || !p.forward.Hkv) return status;
  return leaving_no_error([&] { return backward<Defines>(p, stream); });
}

}  // namespace SDPA_NAMESPACE

#pragma nv_diag_default 177
#pragma GCC diagnostic pop

#ifdef SDPA_BACKWARD_MAIN
#include "harness/main.cu"
#endif
