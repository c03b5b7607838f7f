// sdpa_backward: the gradients of scaled dot-product attention. It includes sdpa.cu and adds the backward kernels.
// Copyright (c) 2026 the sdpa authors. MIT license, see LICENSE.
//
// ==== 0 MANUAL ===================================================================================
//
//   Given dO, the gradient of O, compute dQ, dK and dV. One head:  Q,O,dO [Sq,D]  K,V [Sk,D]
//
//   S  = scale * Q @ K.T                    recomputed, so that no score is ever in global memory
//   P  = exp(S - LSE), masked               the forward's LSE replaces the row maximum and the row sum
//   dP = dO @ V.T
//   D  = row sum of dO * O                  equals the row sum of P * dP
//   dS = P * (dP - D)
//   dV = P.T @ dO,   dK = scale * dS.T @ Q,   dQ = scale * dS @ K
//
// Three kernels: sdpa_backward_rows computes D of each row, sdpa_backward_q computes dQ, sdpa_backward_kv computes dK
// and dV. The last two both compute S and dP: seven products instead of five. In return every sum stays in the registers
// of one CTA: no atomics, no accumulators in global memory, and the same bits in every run.
//
// Build one variant   nvcc -O3 -std=c++17 -arch=native -DBACKWARD=1 -DBLOCK_M=64 sdpa_backward.cu -o sdpa_backward
// Check and time it   ./sdpa_backward --shape mission
// Use it              #define SDPA_NO_MAIN, #include "sdpa_backward.cu"; call sdpa_forward(), then sdpa_backward().
//
// Letters and suffixes are those of sdpa.cu.
//
// Sections  1 KNOBS  2 PROBLEM  3 BLOCKS  4 KERNELS  5 LAUNCH  6 REFUSALS  7 CALL

#ifndef SDPA_NO_MAIN
#define SDPA_NO_MAIN  // of sdpa.cu
#define SDPA_BACKWARD_MAIN
#endif
#include "sdpa.cu"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#pragma nv_diag_suppress 177

namespace SDPA_NAMESPACE {

// ==== 1 KNOBS ====================================================================================

namespace {

// Rows as in SDPA_KNOBS. backward_knobs: the knobs of sdpa.cu that the backward kernels have; the others are refused.
// clang-format off
#define SDPA_BACKWARD_KNOBS(X) \
  X(BACKWARD, 0, backward, "0 1", "scalar mma", "1: the line is built from sdpa_backward.cu and computes dQ, dK and dV")
// clang-format on
SDPA_BACKWARD_KNOBS(SDPA_KNOB)
constexpr std::string_view backward_knobs =
    "HEAD_DIM DTYPE BLOCK_M BLOCK_N NUM_WARPS VEC_WIDTH USE_CP_ASYNC STAGES SWIZZLE_XOR USE_MMA_SYNC USE_SOFTCAP "
    "USE_SINKS";

}  // namespace

// ==== 2 PROBLEM ==================================================================================

struct SdpaGradients {
  const Output* dO;             // [B,Hq,Sq,D]
  Input *dQ, *dK, *dV;          // like Q, K and V, written whole; no element of them may alias another tensor's
  Strides d_o, d_q, d_k, d_v;   // of dO, dQ, dK and dV, as in SdpaParams; of dO also 0 or negative
  const float* dLSE = nullptr;  // [B,Hq,Sq] contiguous, the gradient of LSE; null: 0
  float* dSinks = nullptr;      // USE_SINKS=1: [Hq], written whole, or null
  void* workspace = nullptr;    // sdpa_backward_workspace_bytes() of device memory, 256-byte aligned; one per stream
};

struct SdpaBackwardParams : SdpaGradients {
  SdpaParams forward{};  // of the call of sdpa_forward() that wrote O and LSE, which are inputs here
};
// A row that sees no key has a zero dQ, and a key that no row sees a zero dK and dV. LSE and O may come from another
// implementation: LSE is a natural logarithm, includes the scale, and is -inf for a row that sees no key.

namespace {

// The tensors of a launch, and what all CTAs read. The mask's tiles are those of a warp.
struct BackwardArgs : KernelArgs, SdpaGradients {
  float2* rows;          // [B,Hq,Sq] in the workspace: LSE * log2(e), and D - dLSE
  float gradient_scale;  // of dQ and dK

  BackwardArgs(const SdpaBackwardParams& params, int rows_of_mask, int keys_of_mask, const Grid& grid = {})
      : KernelArgs(params.forward, rows_of_mask, keys_of_mask, grid),
        SdpaGradients(params),
        rows(static_cast<float2*>(params.workspace)),
        gradient_scale(log2_scale(params.forward) * ln2) {}
};

// The queries that see at least one of the keys [first, last].
__host__ __device__ inline KeyRange queries_of_keys(const KeyBounds& keys, int first, int last, int queries) {
  return {max(first - keys.to + 1, 0), min(last - keys.from + 1, queries)};
}

// ==== 3 BLOCKS ===================================================================================

// ---- pairs of tensors ----

// Rows of two tensors that are used together, of one head: Q and dO, or K and V.
struct RowPair {
  const Input *x, *y;
  int64_t x_stride, y_stride;
  int count;
};
__device__ __forceinline__ RowPair queries_of_head(const BackwardArgs& a, int b, int h) {
  return {a.p.Q + b * a.p.q.batch + h * a.p.q.head, a.dO + b * a.d_o.batch + h * a.d_o.head, a.p.q.row, a.d_o.row,
          a.p.Sq};
}
__device__ __forceinline__ RowPair keys_of_head(const BackwardArgs& a, int b, int h) {
  return {a.p.K + b * a.p.k.batch + h * a.p.k.head, a.p.V + b * a.p.v.batch + h * a.p.v.head, a.p.k.row, a.p.v.row,
          a.p.Sk};
}

// A tile of both.
template <class B, int ROWS> struct PairTile {
  Element<B> x[ROWS * TILE_STRIDE<B>], y[ROWS * TILE_STRIDE<B>];
};
// Begins to copy ROWS rows from `first` on; rows that do not exist become zeros.
template <class B, int ROWS>
__device__ __forceinline__ void copy_pair(PairTile<B, ROWS>& tile, const RowPair& from, int first) {
  const TileCopy<B> share(threadIdx.x, B::threads);
  const int row = first + share.row;
  share.template copy<ROWS>(tile.x, from.x + row * from.x_stride + share.col, from.x_stride, from.count - row);
  share.template copy<ROWS>(tile.y, from.y + row * from.y_stride + share.col, from.y_stride, from.count - row);
}

// The tiles that pass by, STAGES - 1 of them ahead. load(n, stage) begins the copies of tile n.
template <class B, class Load> struct PassingTiles {
  using Copy = VectorCopy<B::use_cp_async>;
  const Load& load;
  const int count;

  __device__ __forceinline__ PassingTiles(const Load& load_, int count_) : load(load_), count(count_) {
    for (int n = 0; n < B::stages - 1; n++) begin(n);
  }
  __device__ __forceinline__ void begin(int n) {
    if (n < count) load(n, n % B::stages);
    Copy::commit();
  }
  // Returns the stage of tile n once it has landed, with all copies before it.
  __device__ __forceinline__ int acquire(int n) {
    if (B::stages == 1) {
      __syncthreads();  // hazard: tile n - 1 read by all warps
      begin(n);
    }
    Copy::template wait<(B::stages > 1 ? B::stages - 2 : 0)>();
    __syncthreads();  // hazard: tile n copied by all warps, tile n - 1 read by all warps
    if (B::stages > 1) begin(n + B::stages - 1);
    return n % B::stages;
  }
};

// ---- P and dS ----

// A view of T.T: rows of T are its columns.
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

// P and dS of a tile whose view has queries as rows. rows: LSE_log2 and D of this thread's queries.
template <class B, class View> struct WeightsOfTile {
  View &P, &dS;
  const float2 (&rows)[View::ROWS];
  float slope[B::use_softcap != 0 ? View::ROWS : 1][View::COLS];  // USE_SOFTCAP: of the logits by the scores

  // P = exp2(S * scale_log2 - LSE_log2) in place. A hidden score becomes -inf first, also that of a key past Sk: its S is
  // 0, and exp2(0 - LSE_log2) overflows where LSE is below -88. Queries past Sq have S = 0, LSE = 0 and dO = 0: their P
  // is 1, and its products are 0.
  __device__ __forceinline__ void set_p(const BackwardArgs& a, const Item<B>& item, int q0, int k0, bool plain) {
    finish_scores<B>(P, a, item, a.mask, q0, k0, plain);
    SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
      SDPA_UNROLL for (int j = 0; j < View::COLS; j++) {
        float& x = P.x[i][j];
        if constexpr (B::use_softcap != 0) {  // x is a tanh, or -inf
          slope[i][j] = is_capped<B>(a) ? fmaxf(fmaf(-x, x, 1), 0) : 1;
        }
        x = ex2_approx_ftz(fmaf(x, a.scale_log2, -rows[i].x));
      }
    }
  }
  // dS = P * (dP - D) in the place of dP
  __device__ __forceinline__ void set_ds() {
    SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
      SDPA_UNROLL for (int j = 0; j < View::COLS; j++) {
        float& x = dS.x[i][j];
        x = P.x[i][j] * (x - rows[i].y);
        if constexpr (B::use_softcap != 0) x *= slope[i][j];
      }
    }
  }
};

// ---- epilogue ----

// Stores factor * T to rows [first, count) of a tensor.
template <class B, class View>
__device__ __forceinline__ void store_gradient(const View& T, float factor, Input* to_g, int64_t row_stride, int first,
                                               int count) {
  constexpr int run = View::RUN < 8 ? View::RUN : 8, width = B::vec_width < run ? B::vec_width : run;
  using Vector = VectorType<width * sizeof(Input)>;
  SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
    const int row = first + T.row(i);
    if (row >= count) continue;
    SDPA_UNROLL for (int j = 0; j < View::COLS; j += width) {
      Input e[width];
      SDPA_UNROLL for (int n = 0; n < width; n++) e[n] = rounded<Input>(T.x[i][j + n] * factor);
      Vector x;
      memcpy(&x, e, sizeof x);
      st_global(to_g + row * row_stride + T.col(j), x);
    }
  }
}

// ---- products: on the FMA pipes, and by mma.sync ----
// `kept` are BLOCK_M rows of D elements in shared memory, `passing` BLOCK_N of them; T is [BLOCK_M][BLOCK_N], a sum
// [BLOCK_M][D]. A warp has the same BLOCK_M / NUM_WARPS rows of all of them.

template <class B> constexpr int WARP_ROWS = B::block_m / B::num_warps;

template <class B, Family = B::family> struct Products;

template <class B> struct Products<B, Family::scalar> {
  using Scores = ScalarScores<B>;
  using Sums = ScalarOutput<B>;
  // The rows of T of all warps: a lane needs all columns of its rows.
  using Scratch = float[B::block_m * ScalarShared<B>::P_STRIDE];

  // Sets the rows and columns of this thread.
  static __device__ __forceinline__ void place(Scores& T, int warp, int lane) {
    T.first_row = warp * WARP_ROWS<B> + lane / COL_LANES, T.row_step = ROW_LANES;
    T.first_col = lane % COL_LANES;
  }
  static __device__ __forceinline__ void place(Sums& T, int warp, int lane) {
    T.first_row = warp * WARP_ROWS<B> + lane / COL_LANES;
    T.first_col = lane % COL_LANES * T.RUN;
  }
  // T = kept @ passing.T
  static __device__ __forceinline__ void multiply(Scores& T, const Element<B>* kept_s, const Element<B>* passing_s, int,
                                                  int) {
    scalar_qk<B>(T, kept_s, passing_s);
  }
  // sum += T @ passing
  static __device__ __forceinline__ void add(Sums& sum, const Scores& T, const Element<B>* passing_s,
                                             Scratch& scratch_s, int) {
    float unchanged[Sums::ROWS];  // the factor of the sum so far
    SDPA_UNROLL for (int i = 0; i < Sums::ROWS; i++) unchanged[i] = 1;
    store_scores(scratch_s, ScalarShared<B>::P_STRIDE, T);
    __syncwarp();  // hazard: T written by the other lanes
    scalar_pv<B>(sum, unchanged, scratch_s, passing_s);
    __syncwarp();  // hazard: T read by the other lanes
  }
};

template <class B> struct Products<B, Family::mma> {
  using Scores = MmaAccumulator<B, B::block_n>;
  using Sums = MmaSums<B>;
  using Operands = MmaHalves<B>;
  using Scratch = Nothing;  // accumulators of T are A operands as they stand

  template <class View> static __device__ __forceinline__ void place(View& T, int warp, int lane) {
    T.first_row = warp * WARP_ROWS<B> + lane / 4;
    T.first_col = lane % 4 * 2;
  }
  // T = kept @ passing.T
  static __device__ __forceinline__ void multiply(Scores& T, const Element<B>* kept_s, const Element<B>* passing_s,
                                                  int warp, int lane) {
    const SharedAddress a_lane =
        shared_address(kept_s + tile_offset<B>(warp * WARP_ROWS<B> + lane % 16, lane / 16 * CHUNK<B>));
    const SharedAddress b_lane =
        shared_address(passing_s + tile_offset<B>(lane / 16 * 8 + lane % 8, lane / 8 % 2 * CHUNK<B>));
    clear(T);
    SDPA_UNROLL for (int step = 0; step < B::head_dim / MMA_K<B>; step++) {
      uint32_t rows[Scores::M_TILES][4];
      SDPA_UNROLL for (int m = 0; m < Scores::M_TILES; m++) {
        Operands::read(rows[m], tile_step<B>(a_lane, 16 * m, MMA_K<B> * step));
      }
      SDPA_UNROLL for (int n = 0; n < B::block_n / 16; n++) {
        uint32_t columns[4];
        ldmatrix_x4<false>(columns, tile_step<B>(b_lane, 16 * n, MMA_K<B> * step));
        multiply_columns<Operands>(T, n, rows, columns);
      }
    }
  }
  // sum += T @ passing, with T rounded to the type of the inputs
  static __device__ __forceinline__ void add(Sums& sum, const Scores& T, const Element<B>* passing_s, Scratch&,
                                             int lane) {
    SDPA_UNROLL for (int step = 0; step < B::block_n / 16; step++) {
      MmaStepOfP<B> rows;
      SDPA_UNROLL for (int m = 0; m < Sums::M_TILES; m++) {
        SDPA_UNROLL for (int i = 0; i < 4; i++) {
          rows[m][i] = Operands::pack_p(&T.x[2 * m + i % 2][4 * step + 2 * (i / 2)]);
        }
      }
      Operands::pv(sum, rows, passing_s, step, lane);
    }
  }
};

// ==== 4 KERNELS ==================================================================================

// ---- D of each row ----

// A warp takes a row of the CTA's BLOCK_M queries at a time.
template <class B>
__global__ void __launch_bounds__(B::threads, 1) sdpa_backward_rows(const __grid_constant__ BackwardArgs a) {
  const SdpaParams& p = a.p;
  const Item<B> item = work_item<B>(a, blockIdx.x);
  const int lane = threadIdx.x % 32, end = min(item.q0 + B::block_m, p.Sq);
  const Output* const O_g = p.O + item.b * p.o.batch + item.h * p.o.head;
  const Output* const dO_g = a.dO + item.b * a.d_o.batch + item.h * a.d_o.head;
  for (int q = item.q0 + int(threadIdx.x) / 32; q < end; q += B::num_warps) {
    float sum = 0;
    for (int d = lane; d < B::head_dim; d += 32) {
      const float x = to_float(ld_global<Output>(O_g + q * p.o.row + d));
      sum = fmaf(x, to_float(ld_global<Output>(dO_g + q * a.d_o.row + d)), sum);
    }
    sum = row_sum<32>(sum);
    if (lane == 0) {
      const int64_t row = (int64_t(item.b) * p.Hq + item.h) * p.Sq + q;
      const float lse = ld_global<float>(p.LSE + row);
      // A row that sees no key: +inf makes each P 0, and -inf would make it NaN.
      const float lse_log2 = lse == -INFINITY ? INFINITY : lse * (1 / ln2);
      // dLSE / dS = P, so that dS = P * (dP - D + dLSE).
      st_global(a.rows + row, float2{lse_log2, a.dLSE ? sum - ld_global<float>(a.dLSE + row) : sum});
    }
  }
}

// ---- what the other two kernels share ----
// A CTA keeps BLOCK_M rows of a pair of tensors in shared memory, and tiles of BLOCK_N rows of the other pair pass by.

template <class B> struct BackwardShared {
  PairTile<B, B::block_m> kept;
  PairTile<B, B::block_n> passing[B::stages];
  float2 rows[B::stages][B::block_n];  // of passing queries
  typename Products<B>::Scratch scratch;
};

// ---- dQ: Q and dO stay, K and V pass by ----

template <class B>
__global__ void __launch_bounds__(B::threads, 1) sdpa_backward_q(const __grid_constant__ BackwardArgs a) {
  using Multiply = Products<B>;
  using Scores = typename Multiply::Scores;
  BackwardShared<B>& s = dynamic_shared<BackwardShared<B>>();
  const SdpaParams& p = a.p;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Item<B> item = work_item<B>(a, blockIdx.x);
  const KeyRange keys = a.mask.keys.of_rows(item.q0, min(item.q0 + B::block_m, p.Sq) - 1);
  const RowPair passing = keys_of_head(a, item.b, item.h / (p.Hq / p.Hkv));

  copy_pair(s.kept, queries_of_head(a, item.b, item.h), item.q0);
  const auto load = [&](int n, int stage) { copy_pair(s.passing[stage], passing, keys.begin + n * B::block_n); };
  PassingTiles<B, decltype(load)> tiles(load, ceil_div(keys.end - keys.begin, B::block_n));

  Scores P, dS;
  typename Multiply::Sums dQ;
  Multiply::place(P, warp, lane), Multiply::place(dS, warp, lane), Multiply::place(dQ, warp, lane);
  clear(dQ);
  float2 rows[Scores::ROWS];
  SDPA_UNROLL for (int i = 0; i < Scores::ROWS; i++) {
    const int q = item.q0 + P.row(i);
    const int64_t row = (int64_t(item.b) * p.Hq + item.h) * p.Sq + q;
    rows[i] = q < p.Sq ? ld_global<float2>(a.rows + row) : float2{0, 0};
  }

  const int q = item.q0 + warp * WARP_ROWS<B>;
  for (int n = 0; n < tiles.count; n++) {
    const int k0 = keys.begin + n * B::block_n;
    const PairTile<B, B::block_n>& tile = s.passing[tiles.acquire(n)];
    if (!a.mask.tiles.touch(q, k0)) continue;
    Multiply::multiply(P, s.kept.x, tile.x, warp, lane);
    WeightsOfTile<B, Scores> weights{P, dS, rows, {}};
    weights.set_p(a, item, item.q0, k0, is_plain<B>(a, a.mask, q, k0));
    Multiply::multiply(dS, s.kept.y, tile.y, warp, lane);
    weights.set_ds();
    Multiply::add(dQ, dS, tile.x, s.scratch, lane);
  }
  store_gradient<B>(dQ, a.gradient_scale, a.dQ + item.b * a.d_q.batch + item.h * a.d_q.head, a.d_q.row, item.q0, p.Sq);
}

// ---- dK and dV: K and V stay, Q and dO pass by ----
// Everything is transposed: S.T = K @ Q.T, dP.T = V @ dO.T. The tiles of all query heads of the group pass by, so that
// dK and dV sum over them in registers.

template <class B>
__global__ void __launch_bounds__(B::threads, 1) sdpa_backward_kv(const __grid_constant__ BackwardArgs a) {
  using Multiply = Products<B>;
  using Scores = typename Multiply::Scores;
  using ByQuery = Transposed<Scores>;
  BackwardShared<B>& s = dynamic_shared<BackwardShared<B>>();
  const SdpaParams& p = a.p;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Without a mask consecutive CTAs take the tiles of one head and share its Q and dO in L2. With a mask the first keys
  // of all heads come first: if it is causal, most queries see them.
  const int blocks = ceil_div(p.Sk, B::block_m), heads = p.B * p.Hkv, i = blockIdx.x;
  const bool by_head = a.mask.keys.all();
  const int head = by_head ? i / blocks : i % heads, k0 = (by_head ? i % blocks : i / heads) * B::block_m;
  const int b = head / p.Hkv, h_kv = head % p.Hkv, group = p.Hq / p.Hkv;
  const KeyRange queries = queries_of_keys(a.mask.keys, k0, min(k0 + B::block_m, p.Sk) - 1, p.Sq);
  const int tiles_of_head = max(ceil_div(queries.end - queries.begin, B::block_n), 0);

  const auto head_of_tile = [&](int n) { return h_kv * group + n / tiles_of_head; };
  const auto query_of_tile = [&](int n) { return queries.begin + n % tiles_of_head * B::block_n; };
  const auto load = [&](int n, int stage) {
    const int h = head_of_tile(n), q0 = query_of_tile(n);
    if (n == 0) copy_pair(s.kept, keys_of_head(a, b, h_kv), k0);
    copy_pair(s.passing[stage], queries_of_head(a, b, h), q0);
    const float2* const rows_g = a.rows + (int64_t(b) * p.Hq + h) * p.Sq + q0;
    for (int r = threadIdx.x; r < B::block_n; r += B::threads) {
      VectorCopy<B::use_cp_async>::template copy<sizeof(float2)>(&s.rows[stage][r], rows_g + r, q0 + r < p.Sq);
    }
  };
  PassingTiles<B, decltype(load)> tiles(load, group * tiles_of_head);

  Scores P, dS;
  typename Multiply::Sums dK, dV;
  Multiply::place(P, warp, lane), Multiply::place(dS, warp, lane);
  Multiply::place(dK, warp, lane), Multiply::place(dV, warp, lane);
  clear(dK), clear(dV);
  ByQuery P_by_query(P), dS_by_query(dS);

  const int k = k0 + warp * WARP_ROWS<B>;
  for (int n = 0; n < tiles.count; n++) {
    const int stage = tiles.acquire(n), q0 = query_of_tile(n);
    const PairTile<B, B::block_n>& tile = s.passing[stage];
    if (!a.mask.tiles.touch(q0, k)) continue;
    float2 rows[ByQuery::ROWS];
    SDPA_UNROLL for (int i = 0; i < ByQuery::ROWS; i++) rows[i] = ld_shared<float2>(&s.rows[stage][P_by_query.row(i)]);
    Multiply::multiply(P, s.kept.x, tile.x, warp, lane);
    WeightsOfTile<B, ByQuery> weights{P_by_query, dS_by_query, rows, {}};
    weights.set_p(a, {b, head_of_tile(n), q0}, q0, k0, is_plain<B>(a, a.mask, q0, k));
    Multiply::add(dV, P, tile.y, s.scratch, lane);
    Multiply::multiply(dS, s.kept.y, tile.y, warp, lane);
    weights.set_ds();
    Multiply::add(dK, dS, tile.x, s.scratch, lane);
  }
  store_gradient<B>(dK, a.gradient_scale, a.dK + b * a.d_k.batch + h_kv * a.d_k.head, a.d_k.row, k0, p.Sk);
  store_gradient<B>(dV, 1, a.dV + b * a.d_v.batch + h_kv * a.d_v.head, a.d_v.row, k0, p.Sk);
}

// ---- the gradient of a sink (USE_SINKS) ----

constexpr int sink_warps = 8;
struct SinksShared {
  float sums[sink_warps];
};

// A sink is a logit whose P is exp(sink - LSE) and whose dP is 0. A CTA takes a head: dSink = sum of -P * (D - dLSE).
template <class B>
__global__ void __launch_bounds__(32 * sink_warps) sdpa_backward_sinks(const __grid_constant__ BackwardArgs a) {
  SinksShared& s = dynamic_shared<SinksShared>();
  const SdpaParams& p = a.p;
  const int h = blockIdx.x;
  const float sink_log2 = ld_global<float>(p.sinks + h) * (1 / ln2);
  float sum = 0;
  for (int b = 0; b < p.B; b++) {
    for (int q = threadIdx.x; q < p.Sq; q += 32 * sink_warps) {
      const float2 row = ld_global<float2>(a.rows + (int64_t(b) * p.Hq + h) * p.Sq + q);
      sum = fmaf(-ex2_approx_ftz(sink_log2 - row.x), row.y, sum);
    }
  }
  sum = row_sum<32>(sum);
  if (threadIdx.x % 32 == 0) st_shared(&s.sums[threadIdx.x / 32], sum);
  __syncthreads();  // hazard: sums written by all warps
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < sink_warps; warp++) sum += ld_shared<float>(&s.sums[warp]);
  st_global(a.dSinks + h, sum);
}

// ==== 5 LAUNCH ===================================================================================

// CTAs of sdpa_backward_kv.
template <class B> int64_t kv_tiles(const SdpaParams& p) { return int64_t(p.B) * p.Hkv * ceil_div(p.Sk, B::block_m); }

size_t backward_workspace_bytes(const SdpaParams& p) { return size_t(p.B) * p.Hq * p.Sq * sizeof(float2); }

SdpaStatus launch_backward(void (*kernel)(BackwardArgs), const BackwardArgs& a, int64_t ctas, int threads, size_t bytes,
                           cudaStream_t stream) {
  if (ctas == 0) return {};
  const SdpaStatus status = allow_shared_bytes(kernel, bytes);
  if (!status.ok()) return status;
  const cudaLaunchConfig_t launch{dim3(uint32_t(ctas)), dim3(threads), bytes, stream, nullptr, 0};
  const cudaError_t error = cudaLaunchKernelEx(&launch, kernel, a);
  return error == cudaSuccess ? SdpaStatus{} : cuda_failure(error, "launching a backward kernel");
}

template <class B> SdpaStatus backward(const SdpaBackwardParams& params, cudaStream_t stream) {
  const SdpaParams& p = params.forward;
  const bool has_rows = p.Hq > 0 && p.Sq > 0;
  const Items items = has_rows ? items_of_tile(p, 1, B::block_m) : Items{1, B::block_m, 0};
  constexpr int most = 2147483647;  // of a grid
  if (items.count > most || kv_tiles<B>(p) > most) {
    return failure(refused, "B*Hq*ceil(Sq/%d) or B*Hkv*ceil(Sk/%d) is over %d tiles; split the batch", B::block_m,
                   B::block_m, most);
  }
  BackwardArgs of_q(params, WARP_ROWS<B>, B::block_n, has_rows ? grid_of<B>(p, items) : Grid{});
  BackwardArgs of_kv(params, B::block_n, WARP_ROWS<B>);
  set_scales<B>(of_q), set_scales<B>(of_kv);
  constexpr size_t bytes = sizeof(BackwardShared<B>);
  static_assert(bytes <= 227 * 1024,
                "BLOCK_M, BLOCK_N, STAGES: over the 227 KB of shared memory of a CTA; type smaller BLOCK_N or STAGES");
  SdpaStatus status = launch_backward(sdpa_backward_rows<B>, of_q, items.count, B::threads, 0, stream);
  if constexpr (B::use_sinks) {
    if (status.ok() && params.dSinks) {
      status = launch_backward(sdpa_backward_sinks<B>, of_q, p.Hq, 32 * sink_warps, sizeof(SinksShared), stream);
    }
  }
  if (status.ok()) status = launch_backward(sdpa_backward_q<B>, of_q, items.count, B::threads, bytes, stream);
  if (status.ok()) status = launch_backward(sdpa_backward_kv<B>, of_kv, kv_tiles<B>(p), B::threads, bytes, stream);
  return status;
}

// ---- the checks ----

SdpaStatus check_backward(SdpaBackwardParams& d) {
  SdpaParams& p = d.forward;
  SdpaStatus status = check_params(p);
  if (!status.ok()) return status;
  if (p.B && p.Hq && p.Sq && !p.LSE) return failure(refused, "LSE is a null pointer; let sdpa_forward() write it");
  const auto view = [&](const char* name, auto* data, Strides& s, int H, int S) {
    return TensorView{name, data, sizeof *data, {{"row", S, s.row}, {"head", H, s.head}, {"batch", p.B, s.batch}}};
  };
  const TensorView tensors[] = {view("dO", d.dO, d.d_o, p.Hq, p.Sq), view("dQ", d.dQ, d.d_q, p.Hq, p.Sq),
                                view("dK", d.dK, d.d_k, p.Hkv, p.Sk), view("dV", d.dV, d.d_v, p.Hkv, p.Sk)};
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
      {"dLSE", uintptr_t(d.dLSE), 4}, {"dSinks", uintptr_t(d.dSinks), 4}, {"workspace", uintptr_t(d.workspace), 256}};
  for (const auto& x : pointers) {
    if (x.address % x.alignment) return failure(refused, "%s is not aligned to %d bytes", x.name, x.alignment);
  }
  if (d.dSinks && !Build::use_sinks) return failure(refused, "dSinks is for builds with USE_SINKS=1; set it to 0");
  if (d.dSinks && !p.sinks) {
    return failure(refused, "dSinks is set, but sinks is a null pointer; set both or only sinks");
  }
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
  SDPA_REFUSE(name##_changed && place_of(#name, backward_knobs) < 0, \
              #name ": the backward kernels lack it; drop it or BACKWARD=1");
SDPA_KNOBS(SDPA_NOT_BACKWARD)
SDPA_REFUSE(Build::is_8bit,
            "DTYPE: the backward kernels take 16 bits; type DTYPE=FP16 or DTYPE=BF16, or drop BACKWARD=1");
SDPA_REFUSE(is_mma && Build::block_m / Build::num_warps / 16 * (Build::head_dim + Build::block_n) > 192,
            "BLOCK_N, HEAD_DIM: S, dP, dK and dV would take over 192 registers and spill; type a smaller BLOCK_N, or "
            "BLOCK_M=16*NUM_WARPS");
SDPA_REFUSE(!is_mma && Build::block_m / (4 * Build::num_warps) * (Build::head_dim + Build::block_n) / 4 > 192,
            "BLOCK_M: S, dP, dK and dV would take over 192 registers and spill; type a smaller BLOCK_M or more NUM_WARPS");

}  // namespace

// ==== 7 CALL =====================================================================================

// Bytes of device memory that SdpaGradients::workspace must have for this problem. 0: none, or its sizes are refused.
static inline size_t sdpa_backward_workspace_bytes(SdpaParams forward) {
  return check_sizes(forward).ok() ? backward_workspace_bytes(forward) : 0;
}

// dQ, dK, dV = the gradients of sdpa_forward(), given O, LSE and dO. Enqueued on the stream of the current device, with
// the promises of sdpa_forward(). Two runs on the same inputs give the same bits.
static inline SdpaStatus sdpa_backward(const SdpaBackwardParams& params, cudaStream_t stream) {
  SdpaBackwardParams p = params;
  SdpaStatus status = check_backward(p);
  if (!status.ok() || !p.forward.B || !p.forward.Hkv) return status;
  const bool clean = cudaPeekAtLastError() == cudaSuccess;  // as in sdpa_forward()
  status = backward<Build>(p, stream);
  if (!status.ok() && clean) cudaGetLastError();
  return status;
}

}  // namespace SDPA_NAMESPACE

#pragma nv_diag_default 177
#pragma GCC diagnostic pop

#ifdef SDPA_BACKWARD_MAIN
#include "harness/main.cu"
#endif
