// sdpa: scaled dot-product attention for NVIDIA GPUs, forward pass. All kernels are in this file.
// Copyright (c) 2026 the sdpa authors. MIT license, see LICENSE.
//
// ==== 0 MANUAL ===================================================================================
//
//   O = softmax(scale * Q @ K.T + mask) @ V          per head:  Q [Sq,D]  K,V [Sk,D]  O [Sq,D]
//
// A CTA computes BLOCK_M rows of O at a time. It iterates over the keys once (online softmax), so the scores
// never reach global memory:
//
//   m = -inf, l = 0, O = 0                  per row
//   for each tile of BLOCK_N keys:
//     S = Q @ K.T, masked                   [BLOCK_M][BLOCK_N]
//     m' = max(m, row max of S)
//     alpha = exp(scale * (m - m'))         rescales l and O to the new maximum
//     P = exp(scale * (S - m')),  m = m'
//     l = l * alpha + row sum of P
//     O = O * alpha + P @ V                 [BLOCK_M][D]
//   O = O / l,  LSE = scale * m + log l     log-sum-exp; for the backward pass, and to merge O of several calls
//
// Build one variant   nvcc -O3 -std=c++17 -arch=native -DBLOCK_M=64 -DVEC_WIDTH=8 sdpa.cu -o sdpa
// Check and time it   ./sdpa --shape mission            (B=1, H=8, Sq=Sk=512; CSV row on stdout, messages on stderr)
// Print its knobs     ./sdpa --config
// Copy it             Copy the text between COPY FROM HERE and COPY TO HERE into your own .cu file, or write
//                     `#define SDPA_NO_MAIN` and `#include "sdpa.cu"`. Then call sdpa::sdpa_forward().
//
// Letters   B batch; H heads (Hq of Q and O, Hkv of K and V); Sq query rows; Sk key rows; D head dimension
//           (Dv of V and O); q, k, d global indices; r, j row and column inside a tile; m, l running row max
//           and row sum of the softmax; alpha the factor that rescales l and O when m grows.
// Suffixes  _g global memory; _s shared memory; _bytes; _us; _log2 logarithm to base 2.
// Terms     item     work item: BLOCK_M query rows of one head and batch
//           split    one of SPLIT_KV groups of warps of a CTA, and the keys that this group processes
//           range    the keys of one CTA, if SPLIT_CTAS CTAs share an item
//           K tile   BLOCK_N keys of one split; a stage is a buffer for K and V of one K tile in shared memory
//           round    one K tile of each split: SPLIT_KV * BLOCK_N keys
//           partial  m, l and O of a split or a range; the partials of an item are merged
//           score    an element of Q @ K.T; a logit is an argument of exp
//           mask     the causal mask, the window and the number of keys
//           hook     score hook: modifies scores (softcap, SCORE_MOD, bias); may hide more keys
//           stale    a row max of earlier tiles that is used without an update (USE_LAZY_MAX)
//
// Sections  1 KNOBS  2 PROBLEM  3 PTX  4 BLOCKS  5 KERNELS  6 LAUNCH  7 TABLES  8 CALL. harness/ contains main().
//           docs/READING.md explains the order in which to read them. Parentheses after a section title name
//           the builds that need the section; (typed): it processes -D, so `./run_all.sh extract` omits it.
// Kernels   5a scalar: the loop above on the FMA pipes. 5b mma: mma.sync, with S, P and O in registers. 5c wgmma:
//           Hopper's tensor cores; first a plain kernel, then producer and consumer warps, then e4m3. 5d: transposed
//           wgmma, for few query rows. 5e wmma: S and P in shared memory.
// Options   5f functions of a score: fast exp2, softcap, SCORE_MOD, MASK_MOD. 5g bias, key mask, lists of visible
//           rounds. 5h ranges of keys, sequences of different lengths. 5i merge of partials. 5j pages. 5k conversion of
//           8-bit elements. 5l wgmma instructions.

// ==== COPY FROM HERE =============================================================================

#include <array>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <type_traits>

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mma.h>

// Unrolls the following loop, so that the arrays it indexes stay in registers.
#define SDPA_UNROLL _Pragma("unroll")

#ifndef SDPA_NAMESPACE  // define it to link two builds into one program
#define SDPA_NAMESPACE sdpa
#endif

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunknown-pragmas"  // g++ does not know nvcc's pragmas
#pragma nv_diag_suppress 177  // unused functions and variables: a build uses only what its knobs select

namespace SDPA_NAMESPACE {

// ==== 1 KNOBS ====================================================================================

namespace {  // internal linkage: two builds in one program must not share constants and kernels

// ---- the list of knobs (typed) ----
// A knob is a compile-time option, set with -DNAME=VALUE. Each row lists its name, default, member of Config,
// legal values ("a..b" is a range), the kernel families that support it, and its meaning and cost. Outside
// this section, only 5f (SCORE_MOD, MASK_MOD) and one #if in 5c read the knobs' macros. The tools parse this
// list.

// clang-format off
#define SDPA_KNOBS(X) \
  X(HEAD_DIM, 64, head_dim, "32..256", "all", "D: elements per row of Q and K") \
  X(HEAD_DIM_V, 0, head_dim_v, "0..256", "scalar mma wgmma", "elements per row of V and O; 0: HEAD_DIM") \
  X(DTYPE, FP16, dtype, "FP16 BF16 FP8_E4M3 U8", "all", "type of Q, K and V; accumulation is in fp32") \
  X(KV_DTYPE, AUTO, kv_dtype, "AUTO FP8_E4M3", "mma wgmma", "type of K and V; AUTO: DTYPE, which is Q's type") \
  X(OUT_DTYPE, AUTO, out_dtype, "AUTO FP16 BF16", "all", "type of O; AUTO: DTYPE, or FP16 if DTYPE is an 8-bit type") \
  X(BLOCK_M, 32, block_m, "4..256", "all", "query rows per tile; larger: more reuse of K and V, fewer CTAs") \
  X(BLOCK_N, 32, block_n, "8..256", "all", "keys per tile; larger: fewer barriers, more shared memory") \
  X(NUM_WARPS, 4, num_warps, "1..16", "all", "compute warps per CTA; they share the tile's query rows") \
  X(VEC_WIDTH, 1, vec_width, "1 2 4 8 16", "all", "elements per global access; strides must be multiples of it") \
  X(SYNC_POLICY, 1, sync_policy, "5 2 1 0", "scalar wmma", "CTA barriers per K/V tile: 5 six, 2 four, 1 two, 0 none (a data race)") \
  X(USE_CP_ASYNC, 0, use_cp_async, "0 1", "scalar wmma mma", "copies by cp.async; uses no registers, prefetches") \
  X(STAGES, 1, stages, "1..4", "all", "ring of K/V tiles in shared memory, filled by cp.async or producers") \
  X(SWIZZLE_XOR, 0, swizzle_xor, "0 1", "scalar wmma mma", "XOR-swizzled rows (wmma: padded) avoid bank conflicts") \
  X(USE_PERSISTENT_CTA, 0, use_persistent_cta, "0 1", "wmma wgmma", "resident CTAs fetch work items from a queue") \
  X(USE_FAST_EXP, 0, use_fast_exp, "0 1", "all", "2^x by a cubic polynomial on the FMA pipes (error 1e-4), not ex2") \
  X(USE_LAZY_MAX, 0, use_lazy_max, "0 1", "mma wgmma", "lazy rescaling: rescales O only if the row max grew too much") \
  X(SPLIT_KV, 1, split_kv, "1 2 4", "mma wgmma", "splits: groups of warps divide the keys; for few queries") \
  X(USE_WMMA, 0, use_wmma, "0 1", "all", "computes Q @ K.T by nvcuda::wmma") \
  X(USE_WMMA_PV, 0, use_wmma_pv, "0 1", "wmma", "computes P @ V by nvcuda::wmma") \
  X(USE_MMA_SYNC, 0, use_mma_sync, "0 1", "all", "uses mma.sync and ldmatrix") \
  X(FP16_ACC, NONE, fp16_acc, "NONE QK PV BOTH", "wmma", "accumulates per tile in fp16; twice as fast on Ada") \
  X(USE_WGMMA, 0, use_wgmma, "0 1", "all", "uses wgmma and TMA (sm_90a)") \
  X(USE_PING_PONG, 0, use_ping_pong, "0 1", "wgmma", "warpgroups alternate on the tensor cores") \
  X(OVERLAP, 0, overlap, "0 1", "wgmma", "overlaps the softmax with P @ V of the previous tile") \
  X(SKIP_MASKED, 0, skip_masked, "0 1", "wgmma", "a warpgroup skips tiles that are masked for all of its rows") \
  X(FP8_FLUSH, 8, fp8_flush, "0 1 2 4 8 16", "wgmma", "e4m3: adds P @ V to O in fp32 after every n tiles; 0: never") \
  X(SWAP_AB, 0, swap_ab, "0 1", "wgmma", "S.T = K @ Q.T: keys are wgmma's M; 8, 16 or 32 query rows per CTA") \
  X(PACK_GQA, 0, pack_gqa, "0 1", "mma wgmma", "packs the query heads of a KV head into the rows of one tile") \
  X(SPLIT_CTAS, 1, split_ctas, "0..256", "wmma mma wgmma", "CTAs that share an item's keys; 0: chosen per problem") \
  X(USE_SOFTCAP, 0, use_softcap, "0 1 2", "scalar mma wgmma", "logits are c * tanh(x / c): 1 tanh.approx, 2 exact") \
  X(USE_SINKS, 0, use_sinks, "0 1", "scalar mma wgmma", "attention sinks: adds exp(sink) of the head to each row sum") \
  X(USE_BIAS, 0, use_bias, "0 1 2 3 4 5", "scalar mma wgmma", "adds a bias: 1 of Q's type, 3 fp32; 4, 5: the same, a row per batch; 2: bytes hide keys") \
  X(USE_LENGTHS, 0, use_lengths, "0 1", "scalar mma wgmma", "reads the length of each sequence from device memory") \
  X(USE_PAGES, 0, use_pages, "0 1 2", "scalar mma wgmma", "paged K and V; page size: 1 a multiple of 16 keys, 2 any") \
  X(USE_TUNED, 0, use_tuned, "0 1", "mma wgmma", "chooses the tile per problem from a table; set knobs restrict it") \
  X(USE_WARP_SPECIALIZATION, 0, use_warp_specialization, "0 1", "wmma wgmma", "producer and consumer warps") \
  X(NUM_PRODUCER_WARPS, 1, num_producer_warps, "1 2 4", "wmma", "number of producer warps") \
  SDPA_LOGIT_KNOBS(X) SDPA_MASK_KNOBS(X)
// The values of two of these knobs:
//
//   SYNC_POLICY   5  six CTA barriers per K/V tile, one at each hazard (section 5e)
//                 2  four: without the two that are redundant
//                 1  two, around the reads of K and V. Each row of S and P stays in one warp
//                 0  none: a data race, so the check of O must fail
//   USE_BIAS      1  adds a bias of Q's type to the logits. The bias has an element per batch, head, query and key; its
//                    strides may be 0
//                 2  as 1, but an element is a byte, and 0 hides the key
//                 3  as 1, in fp32
//                 4  adds a bias of Q's type that has an element per batch and key
//                 5  as 4, in fp32
//
// Two lists of knobs of the score hook: those of the first change logits, those of the second hide keys.
#define SDPA_LOGIT_KNOBS(X) \
  X(SCORE_MOD, NONE, score_mod, "NONE expression", "all", "the logit, an expression of s, b, h, q, k, Sq, Sk, x0 to x3")
#define SDPA_MASK_KNOBS(X) \
  X(MASK_MOD, NONE, mask_mod, "NONE expression", "all", "true if q sees k; of b, h, q, k, ..., x0 to x3, i0, i1") \
  X(USE_KEY_MASK, 0, use_key_mask, "0 1", "all", "bytes hide keys of a batch from all of its queries and heads")
// clang-format on
// `LIST(SDPA_IS_ON) false` is true if a knob of LIST is on. `LIST(SDPA_COUNT_ON) 0` is the number of those that are on.
#define SDPA_IS_ON(name, fallback, member, values, families, meaning) K::member != 0 ||
#define SDPA_COUNT_ON(name, fallback, member, values, families, meaning) (K::member != 0) +

// ---- the knobs as set with -D (typed) ----

// Index of a word in the list "a b c", counted from 0; -1 if the list does not contain it.
constexpr int index_of(std::string_view word, std::string_view words) {
  for (int index = 0;; index++) {
    const size_t end = words.find(' ');
    if (words.substr(0, end) == word && !word.empty()) return index;
    if (end == words.npos) return -1;
    words.remove_prefix(end + 1);
  }
}
// Legal values of SCORE_MOD and MASK_MOD: NONE, or a C++ expression of the names in section 5f.
constexpr std::string_view expressions = "NONE expression";
// Converts the text of a value to an int: a number to itself, a word to its index in `values`, the expressions
// NONE and s (which change nothing) to 0, other expressions to 1, anything else to -1.
constexpr int value_of(std::string_view value, std::string_view values = "") {
  if (values == expressions) return value != "NONE" && value != "s";
  int number = value.empty() ? -1 : 0;
  for (char c : value) number = number < 0 || number > 99999 || c < '0' || c > '9' ? -1 : number * 10 + (c - '0');
  return number < 0 ? index_of(value, values) : number;
}

// If a knob is not set, its name is not a macro: SDPA_TEXT(name) is the name itself, and the knob has its default.
#define SDPA_TEXT_AS_IS(...) #__VA_ARGS__
#define SDPA_TEXT(...) SDPA_TEXT_AS_IS(__VA_ARGS__)
// For an error, nvcc prints the whole source line, here all rows of SDPA_KNOBS. A pragma ends that line.
#define SDPA_NEW_LINE _Pragma("GCC diagnostic push") _Pragma("GCC diagnostic pop")
#define SDPA_KNOB(name, fallback, member, values, families, meaning)                                                  \
  SDPA_NEW_LINE                                                                                                       \
  constexpr std::string_view name##_text = std::string_view(SDPA_TEXT(name)) == #name ? #fallback : SDPA_TEXT(name);  \
  constexpr bool name##_changed = name##_text != #fallback;
SDPA_KNOBS(SDPA_KNOB)
#define SDPA_MEMBER(name, fallback, member, values, families, meaning) \
  std::conditional_t<std::string_view(values) == "0 1", bool, int> member = value_of(name##_text, values);
struct Config {  // each member is initialized to the value that -D sets, or to the default
  SDPA_KNOBS(SDPA_MEMBER)
};
// The values of all knobs. ROW -1: as set with -D; otherwise: row ROW of the table of tuned tiles (section 7).
template <int ROW> constexpr Config config_of();
template <> constexpr Config config_of<-1>() { return {}; }
#define SDPA_CONSTANT(name, fallback, member, values, families, meaning) static constexpr auto member = config.member;
template <int ROW> struct Knobs {
  static constexpr Config config = config_of<ROW>();
  SDPA_KNOBS(SDPA_CONSTANT)
};
// Where section 5f evaluates the expressions, NONE is a variable: the unchanged logit, or true for MASK_MOD.
#ifndef SCORE_MOD
#define SCORE_MOD NONE
#endif
#ifndef MASK_MOD
#define MASK_MOD NONE
#endif

// ---- what follows from the knobs ----

// The kernel of a build. The scalar, wmma and mma families have one kernel each, the wgmma family has five, three of
// which are instances of sdpa_wgmma().
enum class KernelKind {
  scalar,
  wmma,
  mma,
  wgmma_plain,       // all warps load and compute
  wgmma_roles,       // producer and consumer warps
  wgmma_converting,  // KV_DTYPE: as wgmma_roles; the producers also convert tiles
  wgmma_e4m3,        // DTYPE=FP8_E4M3: as wgmma_roles; the producers also transpose V
  wgmma_transposed,  // SWAP_AB: S.T = K @ Q.T and O.T = V.T @ P.T, in sdpa_wgmma_columns
};
// Number formats, in the order of the legal values of DTYPE. fp32 occurs only as product_type.
enum class DType { fp16, bf16, e4m3, u8, fp32 };

// The template argument B of every kernel and device function: the knobs and the constants derived from them.
// ROW: see config_of().
template <int ROW> struct BuildOf : Knobs<ROW> {
  using K = Knobs<ROW>;
  // True for the kernels of the wgmma family. Tuned tiles with USE_WGMMA=1 may use mma.sync instead. wgmma
  // kernels copy tiles by TMA, except if copies_rows. With programmatic dependent launch (griddepcontrol),
  // they may start before the preceding kernel in the stream has ended.
  static constexpr bool is_wgmma = K::use_wgmma && !K::use_mma_sync && !K::use_wmma;
  // USE_WGMMA: D and Dv may be less than HEAD_DIM and HEAD_DIM_V, also in tuned tiles that use mma.sync.
  static constexpr bool takes_short_rows = K::use_wgmma;
  // USE_PAGES=2: a page may be too small for an efficient TMA box, so cp.async copies the rows of K and V.
  static constexpr bool copies_rows = is_wgmma && K::use_pages == 2;
  // The number formats of the inputs: in global memory (q_type, kv_type), of K and V in shared memory (tile_type),
  // and of the operands of the products (product_type). Kernels convert elements where these differ:
  //
  //   build                          q_type  kv_type  tile_type  product_type  conversion to product_type
  //   DTYPE=FP16, BF16               16-bit  q_type   q_type     q_type        none
  //   DTYPE=FP8_E4M3 (mma, wgmma)    e4m3    e4m3     e4m3       e4m3          none
  //   DTYPE=FP8_E4M3, mma, PACK_GQA  e4m3    e4m3     e4m3       fp16          Q, K, V: in registers
  //   KV_DTYPE=FP8_E4M3, mma         16-bit  e4m3     e4m3       q_type        K, V: in registers (V and P: to fp16)
  //   KV_DTYPE=FP8_E4M3, wgmma       16-bit  e4m3     fp16       fp16          K, V: tile by tile; a bf16 Q: per item
  //   DTYPE=U8, wmma                 u8      u8       fp16       fp16          Q, K, V: while they are copied
  //   scalar, any                    any     q_type   q_type     fp32          Q, K, V: in registers
  static constexpr DType q_type = DType(K::dtype), kv_type = K::kv_dtype != 0 ? DType::e4m3 : q_type;
  static constexpr DType tile_type =
      (is_wgmma && q_type != kv_type) || (K::use_wmma && kv_type == DType::u8) ? DType::fp16 : kv_type;
  static constexpr DType product_type = is_wgmma || K::use_wmma                ? tile_type
                                        : !K::use_mma_sync                     ? DType::fp32
                                        : K::pack_gqa && q_type == DType::e4m3 ? DType::fp16
                                                                               : q_type;
  // Bytes per element. Types with 1 byte have descale factors.
  static constexpr int q_bytes = q_type == DType::e4m3 || q_type == DType::u8 ? 1 : 2;     // of Q
  static constexpr int kv_bytes = kv_type == DType::e4m3 || kv_type == DType::u8 ? 1 : 2;  // of K and V
  static constexpr int element_bytes = tile_type == kv_type ? kv_bytes : 2;                // of tiles
  static constexpr DType o_type = K::out_dtype != 0 ? DType(K::out_dtype - 1)
                                  : q_bytes == 1    ? DType::fp16
                                                    : q_type;
  static constexpr KernelKind kernel = K::use_mma_sync               ? KernelKind::mma
                                       : K::use_wmma                 ? KernelKind::wmma
                                       : !K::use_wgmma               ? KernelKind::scalar
                                       : K::swap_ab                  ? KernelKind::wgmma_transposed
                                       : product_type == DType::e4m3 ? KernelKind::wgmma_e4m3
                                       : tile_type != kv_type        ? KernelKind::wgmma_converting
                                       : K::use_warp_specialization  ? KernelKind::wgmma_roles
                                                                     : KernelKind::wgmma_plain;
  // USE_SOFTCAP: tiles that use a stale maximum compute tanh by a polynomial. No gain at D=256.
  static constexpr bool caps_by_polynomial = K::use_softcap == 1 && is_wgmma && K::head_dim <= 128 &&
                                             K::use_warp_specialization && kv_bytes == 2 &&
                                             K::use_bias == 0 && !K::use_key_mask;
  // changes_logits: a knob of SDPA_LOGIT_KNOBS is on. hides_keys: a knob of SDPA_MASK_KNOBS is on.
  static constexpr bool changes_logits = SDPA_LOGIT_KNOBS(SDPA_IS_ON) false;
  static constexpr bool hides_keys = SDPA_MASK_KNOBS(SDPA_IS_ON) false;
  static constexpr bool modifies_scores = changes_logits || hides_keys;
  static constexpr int mask_knobs = SDPA_MASK_KNOBS(SDPA_COUNT_ON) 0;  // number of mask knobs that are on
  // USE_BIAS: the bias is added to the logits; it has Q's type, or fp32. key_bias: one row is the bias of all queries
  // and heads of a batch.
  static constexpr bool adds_bias = K::use_bias != 0 && K::use_bias != 2, key_bias = K::use_bias >= 4;
  // hides_rounds: the score hook may hide all keys of a round; the other rounds are called visible. has_hook_scale:
  // the hook multiplies scores by hook_scale.
  static constexpr bool hides_rounds = K::use_bias != 0 || hides_keys;
  static constexpr bool has_hook_scale = K::use_softcap != 0 || changes_logits;
  // takes_map: a separate kernel may list the visible rounds of all items. has_key_bits: all queries and heads of a
  // batch share the key mask or the bias (KeyBits); each CTA may list the visible rounds of its items instead.
  static constexpr bool has_key_bits = K::use_key_mask || key_bias;
  static constexpr bool takes_map = hides_rounds && !has_key_bits;
  // FP16_ACC: S, or each tile's P @ V, is accumulated in fp16.
  static constexpr bool qk_in_fp16 = K::fp16_acc & 1, pv_in_fp16 = K::fp16_acc & 2;
  // producer_threads: producer threads of a CTA. threads: all threads of a CTA.
  static constexpr int producer_threads = !K::use_warp_specialization ? 0
                                          : is_wgmma                  ? 128
                                                                      : K::num_producer_warps * 32;
  static constexpr int threads = K::num_warps * 32 + producer_threads;
  static constexpr int d_v = K::head_dim_v > 0 ? K::head_dim_v : K::head_dim;  // elements of a row of V and O
  // wgmma: bytes of a row of Q and K, and of a row of V and O, in shared memory.
  static constexpr int qk_bytes = K::head_dim * element_bytes, v_bytes = d_v * element_bytes;
  // mma: tile elements per row of Q. With KV_DTYPE, an element of Q occupies two tile elements.
  static constexpr int d_q = q_type != kv_type ? 2 * K::head_dim : K::head_dim;
  static constexpr int round_keys = K::split_kv * K::block_n;
  static constexpr int split_warps = K::num_warps / K::split_kv;  // warps that share a split of the keys
  static constexpr int split_threads = split_warps * 32;
  static constexpr int warpgroups = K::num_warps / 4;  // consumers only
  // wgmma: true if each row of scores has its own scale: the head of each row has its own descale factor, or the
  // conversion of a bf16 Q to fp16 multiplies each row by its own power of two.
  static constexpr bool has_row_scales =
      is_wgmma && ((K::pack_gqa && product_type == DType::e4m3) || q_type != product_type);
  // mma: true if each row of scores is multiplied by the descale factor of its head of Q.
  static constexpr bool has_row_descale = kernel == KernelKind::mma && K::pack_gqa && q_bytes == 1;
};

// The build as set with -D. With USE_TUNED, a row of the table of tuned tiles changes some knobs, so kernels
// use their template argument B instead. Use Defines for host code, for refusals and for constants that are
// equal in all rows of the table, such as the types of the tensors.
using Defines = BuildOf<-1>;

}  // namespace

// ==== 2 PROBLEM ==================================================================================

template <DType T>
using ElementOf = std::conditional_t<
    T == DType::fp16, __half,
    std::conditional_t<T == DType::bf16, __nv_bfloat16, std::conditional_t<T == DType::e4m3, __nv_fp8_e4m3, uint8_t>>>;
// Element types in global memory.
using Query = ElementOf<Defines::q_type>;      // of Q
using KeyValue = ElementOf<Defines::kv_type>;  // of K and V
using Output = ElementOf<Defines::o_type>;     // of O
using Bias = std::conditional_t<Defines::use_bias == 2 || Defines::q_bytes == 1, uint8_t,
                                std::conditional_t<Defines::use_bias == 3 || Defines::use_bias == 5, float, Query>>;
// Element type of tiles in shared memory. It may differ between the kernels of a build. With mma.sync and
// KV_DTYPE, an element of Q occupies two of these elements.
template <class B> using Element = std::conditional_t<B::tile_type == B::kv_type, KeyValue, __half>;

// The causal mask, and the position of query q among the keys. With a causal mask, q sees no later key.
enum class Causal : int {
  off,           // no causal mask; the position is q
  bottom_right,  // the position is q + Sk - Sq: the last query sees the last key
  top_left,      // the position is q
};

struct Strides {  // in elements; the D elements of a row are contiguous
  int64_t batch, head, row;
};

// Dequantization factors of an 8-bit tensor: element x of head (b, h) counts as x * factor[b * batch + h * head].
// An element u of type U8 counts as x = (u - 128) / 127 * 448.
struct Descale {
  const float* factor = nullptr;  // in device memory, each 0 or more; null: 1
  int64_t batch = 0, head = 0;    // strides, in floats

  __device__ float of_head(int b, int h) const { return factor ? factor[b * batch + h * head] : 1.0f; }
};

struct SdpaParams {
  const Query* Q;          // [B,Hq,Sq,D]
  const KeyValue* K;       // [B,Hkv,Sk,D]
  const KeyValue* V;       // [B,Hkv,Sk,Dv]
  Output* O;               // [B,Hq,Sq,Dv], every query row is written; no element may alias an input
  float* LSE = nullptr;    // [B,Hq,Sq] contiguous, 4-byte aligned, natural logarithm; null: not stored
  int B, Hq, Hkv, Sq, Sk;  // Hq is a multiple of Hkv; query head h reads KV head h / (Hq / Hkv)
  int D;                   // HEAD_DIM; USE_WGMMA=1: or a smaller multiple of VEC_WIDTH
  // Strides are multiples of VEC_WIDTH elements or of 16 bytes, whichever is less. Strides of inputs may be 0 or
  // negative. Strides of O are Dv or more, or -Dv or less. TMA takes no negative strides. The stride of a
  // dimension of size 1 is ignored.
  Strides q, k, v, o;
  float scale = 0;  // 0: 1/sqrt(D). To give all visible keys the same weight, pass FLT_MIN instead of 0
  Causal causal = Causal::off;
  // sdpa_workspace_bytes() bytes of device memory, 256-byte aligned, one per stream. Zero it once before the
  // first launch; it then serves all problems that need no more bytes.
  void* workspace = nullptr;
  int max_ctas = 0;                         // USE_PERSISTENT_CTA=1: maximum number of CTAs; 0: as many as fit
  int window_left = -1, window_right = -1;  // keys that a query sees before and after its own position; -1: no limit
  Descale q_descale, k_descale, v_descale;  // 8-bit types: q_descale per query head, the others per KV head
  Causal window_alignment = Causal::off;    // the position that the window is relative to; off: that of `causal`
  float softcap = 0;                        // USE_SOFTCAP: logits are softcap * tanh(x / softcap); 1e-18..1e18; 0: off
  const float* sinks = nullptr;             // USE_SINKS=1: [Hq] in device memory; exp(sink) is added to the row sum
  const int *k_lengths = nullptr, *q_starts = nullptr, *k_starts = nullptr;  // USE_LENGTHS=1: see struct Sequence
  int most_keys = 0;                        // USE_LENGTHS=1: maximum number of keys per sequence; 0: Sk
  const int* page_table = nullptr;          // USE_PAGES: K, V are [pages,Hkv,page_size,D]; see page_of()
  int page_stride = 0, page_size = 0, pages = 0;
  int Dv = 0;                               // length of rows of V and O; limited like D, by HEAD_DIM_V; 0: D
  const void* bias = nullptr;               // USE_BIAS: see bias_row(); or null
  Strides bias_strides = {0, 0, 0};         // in elements, any value; 0 where batches, heads or queries share a bias
  int bias_keys = 0;                        // USE_BIAS=1, 2, 3: the last bias_keys keys have a bias; 0: all keys
  void* bias_map = nullptr;                 // USE_BIAS=1, 2, 3, MASK_MOD: see sdpa_map_bias(); or null
  size_t bias_map_bytes = 0;                // size of bias_map, from sdpa_bias_map_bytes()
  const int* q_lengths = nullptr;           // USE_LENGTHS=1: see struct Sequence
  int batch_invariant = 0;                  // 1: the bits of a row do not depend on the other sequences of the batch
  // Arrays in device memory that SCORE_MOD and MASK_MOD name and that nothing writes while the kernel runs.
  const float* x0 = nullptr;
  const float* x1 = nullptr;
  const float* x2 = nullptr;
  const float* x3 = nullptr;
  const int* i0 = nullptr;
  const int* i1 = nullptr;
  // sdpa_scratch_bytes() bytes of device memory, 256-byte aligned, with any contents; used only by this
  // launch. The workspace is then smaller: it holds only data that is zero between launches. Null: scratch
  // memory is part of the workspace.
  void* scratch = nullptr;
  const int* k_firsts = nullptr;            // USE_LENGTHS=1 without USE_PAGES=1: see struct Sequence
  const uint8_t* key_mask = nullptr;        // USE_KEY_MASK=1: [B,Sk] bytes, 0 hides a key of the batch; or null
  int64_t key_mask_stride = 0;              // from batch to batch, any; 0: they share the mask
};
// A row that sees no key, or only keys with logit -inf, gets O = 0, and LSE = -inf or the sink of its head.
// NaN and inf propagate as in the formula. NaN and inf of V at a masked key may reach the row, since 0 * inf is
// NaN. Rows of K and V past the end of a sequence never affect O.
// Logits may be any finite float. P @ V is accumulated in fp32 and divided by the row sum of P at the end. A
// row is correct as long as its row sum times max|V| is below 3.4e38. The row sum is at most Sk.
// USE_LAZY_MAX: it is at most 2^16 * Sk, with DTYPE=BF16 2^60 * Sk, so that max|V| must be below 2.9e20 / Sk.

namespace {

constexpr int size_limit = 1000000000;  // maximum size of a dimension; as a bound of a mask: no limit
template <class T> __host__ __device__ constexpr T ceil_div(T n, typename std::common_type<T>::type size) {
  return (n + size - 1) / size;
}

// Batch size of a tensor with these starts (q_starts or k_starts): packed sequences have a batch size of 1.
__host__ __device__ inline int batches_of(const SdpaParams& p, const int* starts) {
  return Defines::use_lengths && starts ? min(p.B, 1) : p.B;
}

// Dimensions of the tensor maps: [B][H][panels][S][elements of a panel], where a panel is 128 or 64 bytes of a row.
// Short rows and pages, where a TMA box is one panel: [B][H][1][S][D]. PACK_GQA, for Q: [B][1][Hq][Sq][D].
struct TensorMaps { CUtensorMap q, k, v, o; };
struct Nothing {};

struct Interval { int begin, end; };  // [begin, end)
// The mask: query q sees the existing keys in [q + from, q + to). Bounds are at most size_limit, so no sum overflows.
struct KeyBounds {
  int from, to, Sk;

  __host__ __device__ KeyBounds(const SdpaParams& p, int queries, int keys) : from(-size_limit), to(keys), Sk(keys) {
    const auto position_of_query_0 = [&](Causal by) { return by == Causal::bottom_right ? keys - queries : 0; };
    const int window_position = position_of_query_0(p.window_alignment == Causal::off ? p.causal : p.window_alignment);
    if (p.causal != Causal::off) to = min(position_of_query_0(p.causal) + 1, to);
    if (p.window_right >= 0) to = min(window_position + p.window_right + 1, to);
    if (p.window_left >= 0) from = min(max(window_position - p.window_left, -size_limit), to);
  }
  // True only if every query sees every key.
  __host__ __device__ bool all() const { return from == -size_limit && to == Sk; }
  // begin(q) <= end(q). Both are nondecreasing in q.
  __host__ __device__ int begin(int q) const { return min(max(q + from, 0), Sk); }
  __host__ __device__ int end(int q) const { return min(max(q + to, 0), Sk); }
  // The keys that at least one of the queries [first, last] sees.
  __host__ __device__ Interval of_rows(int first, int last) const { return {begin(first), end(last)}; }
};

// The mask of a tile with queries [q0, q0 + rows) and keys [k0, k0 + keys), as limits of k0 - q0
// (whole_to: of k0). The tile may extend past the last query or the last key.
struct TileBounds {
  int touch_from, touch_to, cover_from, cover_to, whole_to;

  __host__ __device__ TileBounds(const KeyBounds& b, int rows, int keys)
      : touch_from(b.from - keys + 1),
        touch_to(b.to + rows - 1),
        cover_from(b.from + rows - 1),
        cover_to(b.to - keys),
        whole_to(b.Sk - keys) {}
  // True if one of the queries may see one of the keys.
  __device__ __forceinline__ bool touch(int q0, int k0) const { return k0 - q0 >= touch_from && k0 - q0 < touch_to; }
  // True if all queries see all keys; mask_scores() would then change nothing.
  __device__ __forceinline__ bool cover(int q0, int k0) const {
    return k0 - q0 >= cover_from && k0 - q0 <= cover_to && k0 <= whole_to;
  }
  // The values of k0 for which cover(q0, k0) is true.
  __device__ __forceinline__ Interval covered(int q0) const {
    return {q0 + cover_from, min(q0 + cover_to, whole_to) + 1};
  }
};

// The mask of the launch, or with USE_LENGTHS that of an item's sequence.
struct Mask { TileBounds tiles; KeyBounds keys; };
// USE_BIAS: index of the first of `keys` keys that has a bias; `keys` if none has one.
__device__ __forceinline__ int first_biased_key(const SdpaParams& p, int keys) {
  return p.bias ? p.bias_keys > 0 ? keys - p.bias_keys : 0 : keys;
}
// Division of n < 2^31 by a divisor that is known on the host, as a multiplication and a shift. Let 2^(s-1) <
// divisor <= 2^s and multiplier = ceil(2^(31+s) / divisor). Then n * multiplier / 2^(31+s) exceeds n / divisor
// by less than 2^-s <= 1 / divisor, so both round down to the same integer.
struct Divisor {
  uint32_t divisor = 1, multiplier = 1u << 31;
  int shift = 31;

  Divisor() = default;
  explicit Divisor(uint32_t d) : divisor(d) {
    while (uint64_t(1) << (shift - 31) < d) shift++;
    multiplier = uint32_t(((uint64_t(1) << shift) + d - 1) / d);
  }
  __device__ __forceinline__ uint32_t divide(uint32_t n) const { return uint32_t(uint64_t(n) * multiplier >> shift); }
  __device__ __forceinline__ uint32_t remainder(uint32_t n) const { return n - divide(n) * divisor; }
};

struct PlanArgs {  // USE_LENGTHS: sizes of the plan, the list of items that sdpa_plan() makes in scratch memory
  // Maximum numbers per group of item_heads heads. balancing_partials: those with which sdpa_plan() balances the load
  // (batch_invariant: per sequence); an explicit SPLIT_CTAS adds others.
  uint32_t items, partials, balancing_partials;
  Divisor page_size;  // USE_PAGES
  int box_rows = 0;   // keys per TMA box; a box lies within one page and one tile
};
// USE_SOFTCAP: for a score s, tanh(s * hook_scale) * scale_log2 is about ((s^2 + shift)^2 + rest) * s * factor.
struct CapPolynomial {
  float shift = 0, rest = 0, factor = 0;  // factor 0: no polynomial
};
struct BiasMap {  // USE_BIAS=1, 2, 3, MASK_MOD: lists of visible rounds, which items may share; lists null: no map
  uint32_t *lists = nullptr, list_words = 0;
  Divisor heads, batches;  // numbers of heads and batches with lists of their own; 1: they share the lists
  uint64_t made_for = 0;  // hash of the problem for which the lists are made; stored in front of them
};
// Scales convert scores to logits or to exponents. A score is an element of Q @ K.T. A logit x has the softmax weight
// exp(x) = 2^y, where y is the exponent of 2. The input of the softmax, which the score hook computes, is a score, or
// with USE_SOFTCAP a tanh, or with SCORE_MOD or an added bias a logit.
//
//   name              multiplies                   result                          used by
//   hook_scale        a score                      USE_SOFTCAP: tanh's argument    cap_scores, ScoreMod
//                                                  SCORE_MOD: s, a logit
//   logit_scale       a score or a tanh            a logit, before a bias is added  with_bias, scale_scores
//   score_scale_log2  a score or a tanh            an exponent of 2                 ItemScales, ScoreMod
//   scale_log2        the input of the softmax, m  an exponent of 2                 softmax, merges, LSE
//
// KernelArgs has the scales of a launch. item_hook_scale() and item_scale_log2() return those of a work item,
// and ItemScales keeps them. With 8-bit types, the first scale that multiplies a score includes the descale
// factors of Q and K.

struct Grid {  // maps the index of an item to its batch, head and rows
  alignas(64) int unmasked_rounds = 0;  // rounds over all keys (1 or more) if nothing is masked; otherwise 0
  uint32_t work_items = 0;              // B * q_heads * q_blocks
  Divisor q_blocks;                     // ceil(Sq / BLOCK_M), or with PACK_GQA ceil(Sq / item_queries)
  Divisor q_heads;                      // Hq, or with PACK_GQA Hq / item_heads
  Divisor q_heads_per_kv;               // Hq / Hkv
  Divisor items_in_l2;                  // heads_in_l2 * q_blocks
  uint32_t heads_in_l2 = 1;             // number of q_heads whose K and V take about 8/15 of L2 at most; at least 1
  // Factor from the input of the softmax to an exponent of 2; if that is a score, scale * log2(e).
  // USE_SOFTCAP: for a tanh, softcap * log2(e). USE_BIAS=1, 3, 4, 5, SCORE_MOD: for a logit, log2(e).
  float scale_log2 = 0;                 // the first line of the constant cache ends here
  Divisor item_queries;                 // PACK_GQA: queries per head of an item
  int item_heads = 1;                   // PACK_GQA: query heads of an item
  Divisor ranges;                       // SPLIT_CTAS: CTAs per item
};
// The argument of a kernel: SdpaParams, and values that the host derives from them. The first line of the
// constant cache is Grid up to scale_log2. Reading another line before the first tile costs a kernel about 0.04 us.
//
// sdpa_plan() has the same argument; it runs before the attention kernel and lists its items: the plan. sdpa_map() runs
// before the attention kernel and lists the visible rounds of all items: the map. sdpa_merge() runs after the attention
// kernel and merges the partials of CTAs that share an item.
struct KernelArgs : Grid {
  Mask mask;
  bool has_short_rows;  // USE_WGMMA: D or Dv is less than the build's
  SdpaParams p;
  uint32_t first_item = 0;  // index of the launch's first item; 0 unless sdpa_merge() merges the partials
  float inverse_scale_log2 = 0;  // 1 / scale_log2
  float hook_scale = 0;          // USE_SOFTCAP: scale / softcap; SCORE_MOD: scale
  float logit_scale = 1;         // USE_BIAS=1, 3, 4, 5: scale for a score, softcap for a tanh
  float score_scale_log2 = 0;    // the value of scale_log2 without SCORE_MOD and bias
  BiasMap bias_map;              // USE_BIAS=1, 2, 3, MASK_MOD
  std::conditional_t<Defines::is_wgmma, TensorMaps, Nothing> maps;
  std::conditional_t<Defines::use_lengths, PlanArgs, Nothing> plan;
  CapPolynomial cap_polynomial;
  KernelArgs(const SdpaParams& params, int rows, int keys_of_tile, const Grid& grid = {})
      : Grid(grid),
        mask{{{params, params.Sq, params.Sk}, rows, keys_of_tile}, {params, params.Sq, params.Sk}},
        has_short_rows(params.D < Defines::head_dim || params.Dv < Defines::d_v),
        p(params) {}
};

// A work item: BLOCK_M rows of O, of query head h in batch b, from query q0 on. PACK_GQA: rows of several heads,
// h is the first; see rows_of_item(). USE_LENGTHS has its own specialization. In this template, a sequence
// ends where its tensor ends. The copies handle that end, so ends_before() is false and keys_in_tile() is BLOCK_N.
template <class B, bool = B::use_lengths> struct Item {
  using ItemMask = const Mask&;  // result of mask()
  int b, h, q0;
  __device__ bool exists() const { return true; }                         // false: this CTA has no item
  __device__ int batch(const int*) const { return b; }                    // batch index in tensors with these starts
  __device__ int q_row(int q) const { return q; }                         // row of query q in Q and O
  __device__ int k_row(int k) const { return k; }                         // row of key k in K and V
  __device__ int query_count(const SdpaParams& p) const { return p.Sq; }  // queries of the sequence
  __device__ bool ends_before(int) const { return false; }                // true if query_count() < q
  __device__ int keys_in_tile(int) const { return B::block_n; }           // keys of the sequence in the tile at key k0
  static __device__ ItemMask mask(const KernelArgs& a) { return a.mask; }
  // The keys that the item's rows see, or with SPLIT_CTAS this CTA's range of them.
  __device__ __forceinline__ Interval keys_of_cta(const KernelArgs& a, const Mask& mask) const;
  // SPLIT_CTAS: number of ranges of the item; index of this CTA's partial; index of the item's first partial;
  // index of the item's counter.
  __device__ uint32_t range_count(const KernelArgs& a) const { return a.ranges.divisor; }
  __device__ uint32_t partial_index(const KernelArgs&) const { return blockIdx.x; }
  __device__ uint32_t first_partial_index(const KernelArgs& a) const { return counter(a) * a.ranges.divisor; }
  __device__ uint32_t counter(const KernelArgs& a) const { return a.ranges.divide(blockIdx.x); }
  // The counter of the items fetched from the queue.
  static __device__ uint32_t* queue(const KernelArgs& a) { return static_cast<uint32_t*>(a.p.workspace); }
};

// ==== 3 PTX ======================================================================================
// One function per instruction, named after it. The other instructions are in section 5.

#ifdef SDPA_SIMT
#include "cpu_backend/ptx.h"
#else

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "these kernels need sm_80 or newer; type -arch=sm_80 or -arch=native"
#endif
// The dynamic shared memory of the CTA, aligned to 1024 bytes.
template <class T> __device__ __forceinline__ T& dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char dynamic_shared_bytes[];
  return *reinterpret_cast<T*>(dynamic_shared_bytes);
}

// Loads and stores of a T of 1 to 16 bytes, at an address aligned to its size. They are plain C++ rather than
// asm, so that the compiler folds constant offsets into the instructions.
template <class T> __device__ __forceinline__ T ld_shared(const void* src_s) { return *static_cast<const T*>(src_s); }
template <class T> __device__ __forceinline__ void st_shared(void* dst_s, T value) { *static_cast<T*>(dst_s) = value; }
template <class T> __device__ __forceinline__ T ld_global(const void* src_g) { return *static_cast<const T*>(src_g); }
// Only for data that no kernel writes while this one runs. Before griddepcontrol.wait, the preceding kernel
// may still run.
template <class T> __device__ __forceinline__ T ld_global_nc(const void* src_g) {
  return __ldg(static_cast<const T*>(src_g));
}
template <class T> __device__ __forceinline__ void st_global(void* dst_g, T value) { *static_cast<T*>(dst_g) = value; }
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// log2(x) with an absolute or relative error of 2^-22; -inf for 0 and subnormal x.
__device__ __forceinline__ float lg2_approx_ftz(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x with an error of 1 ulp; inf for 0 and subnormal x.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// max(a, b); NaN if either is NaN, unlike fmaxf.
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
// Waits at barrier `id` for `threads` threads, a multiple of 32. `id` is 1 to 15, since 0 is __syncthreads().
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
#endif  // SDPA_SIMT

// ==== 4 BLOCKS ===================================================================================

// ---- element types and vectors ----

// Conversions to float. They are functions because PyTorch's extensions are compiled without the conversion operators
// of the 16-bit types. The descale factors of 8-bit types are part of the scale and of 1 / l.
__host__ __device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__host__ __device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__host__ __device__ __forceinline__ float to_float(__nv_fp8_e4m3 x) { return static_cast<float>(x); }
// Rounds to nearest, ties to even.
template <class E> __host__ __device__ __forceinline__ E rounded(float x) { return static_cast<E>(x); }
template <> __host__ __device__ __forceinline__ __half rounded(float x) { return __float2half_rn(x); }
template <> __host__ __device__ __forceinline__ __nv_bfloat16 rounded(float x) { return __float2bfloat16_rn(x); }
template <int BYTES, int SIZE, class T, class OTHERWISE>
using IfBytes = std::conditional_t<BYTES == SIZE, T, OTHERWISE>;
template <int N>
using VectorType = IfBytes<
    N, 16, uint4, IfBytes<N, 8, uint2, IfBytes<N, 4, uint32_t, IfBytes<N, 2, uint16_t, IfBytes<N, 1, uint8_t, void>>>>>;
template <class B> constexpr int CHUNK = 16 / sizeof(Element<B>);  // elements per 16 bytes, the unit of the swizzle

// ---- the swizzle of tiles in shared memory ----

// Rows of a tile start in the same few banks, so reads of one column in several rows would cause bank conflicts.
// Therefore the index of each 16-byte chunk of a row is XORed with bits of the row index. The XOR moves a chunk only
// within a group of chunks, at most 128 bytes. A column of chunks of any 8 adjacent rows then covers all 32 banks.
// SWIZZLE_GROUP: chunks per group, in rows of CHUNKS chunks.
template <int CHUNKS>
constexpr unsigned SWIZZLE_GROUP = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : CHUNKS % 2 == 0 ? 2 : 1;
// The position in its row where element x is stored. N: chunks per group; UNIT: elements per chunk. With UNIT = 1, x
// is the index of a chunk. Unsigned, so that the compiler sees that rows 8 apart have the same swizzle.
template <unsigned N, unsigned UNIT = 1> __device__ __forceinline__ unsigned swizzled(unsigned row, unsigned x) {
  return x ^ row / (8 / N) % N * UNIT;
}

// ---- elements of type U8 (DTYPE = U8) ----

__host__ __device__ __forceinline__ float to_float(uint8_t x) { return static_cast<float>(x) - 128; }

// ---- tiles in shared memory (scalar, wmma, mma) ----

// TILE_STRIDE: elements from one row of a tile to the next. With SWIZZLE_XOR, wmma pads rows by 16 bytes.
template <class B> constexpr bool pads_rows = B::swizzle_xor && B::kernel == KernelKind::wmma;
template <class B, int D = B::head_dim> constexpr int TILE_STRIDE = D + (pads_rows<B> ? CHUNK<B> : 0);
// Offset in elements of (row, col) in a tile.
template <class B, int D = B::head_dim> __device__ __forceinline__ int tile_offset(int row, int col) {
  return row * TILE_STRIDE<B, D> +
         (B::swizzle_xor && !pads_rows<B> ? swizzled<SWIZZLE_GROUP<D / CHUNK<B>>, CHUNK<B>>(row, col) : col);
}

// ---- accumulator views ----
// A view is the part of a tile that a thread holds: ROWS x COLS floats x[i][j] at (row(i), col(j)). LANES adjacent
// lanes share these rows. In a view of O, every RUN elements of x[i] have adjacent columns. The mask, the softmax and
// the epilogue below use only this interface.

template <class View> __device__ __forceinline__ void clear(View& T) {
  SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) { SDPA_UNROLL for (int j = 0; j < View::COLS; j++) T.x[i][j] = 0; }
}
// T = T * factor, per row.   factor [ROWS]
template <class View> __device__ __forceinline__ void scale_rows(View& T, const float (&factor)[View::ROWS]) {
  SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
    SDPA_UNROLL for (int j = 0; j < View::COLS; j++) T.x[i][j] *= factor[i];
  }
}

// ---- the score hook: the scales of scores ----

// The scale of a thread's scores: one number, or with B::has_row_scales one for each of its two rows, which may belong
// to different heads.
struct RowScales { float factor[2]; };
template <class B> using ScoreScale = std::conditional_t<B::has_row_scales, RowScales, float>;
__device__ __forceinline__ float of_row(float scale, int) { return scale; }
__device__ __forceinline__ float of_row(const RowScales& scales, int i) { return scales.factor[i]; }
template <class B>
constexpr float element_unit = B::kv_type == DType::u8 ? 448.0f / 127 : 1;  // value per unit of to_float()
// True if the hook replaces scores by tanh (USE_SOFTCAP) or by logits (SCORE_MOD).
template <class B> __device__ __forceinline__ bool replaces_scores(const KernelArgs& a) {
  return B::changes_logits || (B::use_softcap != 0 && a.hook_scale != 0);
}
// The scale, clamped so that it is neither 0 nor infinite. Then -inf * scale is -inf, and 0 * scale is 0.
__device__ __forceinline__ float finite_scale(float scale) {
  return scale > 3.4e38f ? 3.4e38f : max_nan(scale, 1.2e-38f);
}
// A scale times the descale factors of Q and K of an item's heads. A 16-bit Q has no factor. With PACK_GQA,
// multiply_qk() of the mma kernel applies the factor of each row of Q.
template <class B>
__device__ __forceinline__ float with_descale(const KernelArgs& a, const Item<B>& item, float scale) {
  const bool has_factor_of_q = B::q_bytes == 1 && !B::has_row_descale;
  const float q_descale = has_factor_of_q ? a.p.q_descale.of_head(item.b, item.h) : 1;
  const float k_descale = a.p.k_descale.of_head(item.b, int(a.q_heads_per_kv.divide(item.h)));
  // Multiply the descale factors first. One may be 0, and the other times a large scale may be infinite.
  return finite_scale(scale * (q_descale * k_descale));
}
// hook_scale of an item.
template <class B> __device__ __forceinline__ float item_hook_scale(const KernelArgs& a, const Item<B>& item) {
  if constexpr (!B::has_hook_scale) return 1;  // not read
  else if constexpr (B::kv_bytes == 2) return a.hook_scale;
  else return with_descale<B>(a, item, a.hook_scale);
}
// scale_log2 of an item. If the hook replaces scores, hook_scale includes the descale factors instead.
template <class B> __device__ __forceinline__ float item_scale_log2(const KernelArgs& a, const Item<B>& item) {
  if (B::kv_bytes == 2 || replaces_scores<B>(a)) return a.scale_log2;
  return with_descale<B>(a, item, a.scale_log2);
}
// The descale factor of an item's V.
template <class B> __device__ __forceinline__ float item_v_descale(const KernelArgs& a, const Item<B>& item) {
  if constexpr (B::kv_bytes == 2) return 1;
  return element_unit<B> * a.p.v_descale.of_head(item.b, int(a.q_heads_per_kv.divide(item.h)));
}

// ---- mask ----

// Index of the query in row r of a tile whose first query is q0.
template <class B> __device__ __forceinline__ int query_of(const KernelArgs& a, int q0, int r) {
  return q0 + (B::pack_gqa ? int(a.item_queries.remainder(uint32_t(r))) : r);
}
// S = -inf where the query of row r does not see key k0 + j.
template <class B, class View>
__device__ __forceinline__ void mask_scores(View& S, const KernelArgs& a, const Mask& mask, int q0, int k0) {
  const KeyBounds& keys = mask.keys;
  const auto hide = [&](const auto& hidden) {
    SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
      const int q = query_of<B>(a, q0, S.row(i));
      SDPA_UNROLL for (int j = 0; j < View::COLS; j++) {
        if (hidden(S.col(j), q)) S.x[i][j] = -INFINITY;
      }
    }
  };
  hide([&](int j, int q) { return j >= keys.end(q) - k0; });
  if (keys.from > -size_limit) hide([&](int j, int q) { return j < keys.begin(q) - k0; });
}

// ---- the score hook ----
// Between Q @ K.T and the softmax, the scores of a tile pass through finish_scores(), or with USE_LAZY_MAX through
// exp_by_stale_max(). Nothing else modifies scores. The steps of finish_scores() are declared first, in the
// order of the calls.

// USE_SOFTCAP: x becomes tanh(x * hook_scale) in this thread's columns [first, last) of S.
template <class B, class View>
__device__ __forceinline__ void cap_scores(View& S, const KernelArgs& a, ScoreScale<B> hook_scale, int first = 0,
                                           int last = View::COLS);
// Applies SCORE_MOD, MASK_MOD and the key mask to the tile. unmasked: it needs no mask, so all of its keys exist.
template <class B, class View, class Tile>
__device__ __forceinline__ void modify_scores(View& S, const Tile& tile, bool unmasked);
// USE_BIAS: address of the bias of row r of the tile at query q0.
template <class B>
__device__ __forceinline__ const Bias* bias_row(const KernelArgs& a, const Item<B>& item, int q0, int r);
// USE_BIAS: true if keys of the tile at key k0 have a bias.
template <class B> __device__ __forceinline__ bool has_bias(const KernelArgs& a, const Mask& mask, int k0) {
  return B::use_bias != 0 && a.p.bias && k0 + B::block_n > first_biased_key(a.p, mask.keys.Sk);
}
// USE_BIAS=1, 3, 4, 5: converts the scores of a tile without bias to logits.
template <class B, class View> __device__ __forceinline__ void scale_scores(View& S, const KernelArgs& a) {
  if constexpr (B::adds_bias) {
    SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
      SDPA_UNROLL for (int j = 0; j < View::COLS; j++) S.x[i][j] *= a.logit_scale;
    }
  }
}
// True if the tile needs neither mask nor bias: all queries see all of its keys, and no key has a bias. Only such
// tiles use a stale maximum in sdpa_mma(). A tile with a bias is masked even where the mask changes nothing.
template <class B>
__device__ __forceinline__ bool is_unmasked(const KernelArgs& a, const Mask& mask, int q0, int k0) {
  return mask.tiles.cover(q0, k0) && !has_bias<B>(a, mask, k0);
}
// SWAP_AB: S.col() is relative to this column, which is recomputed at each use to save a register. Other views: 0.
template <class B, class View> __device__ __forceinline__ int column_offset(const View& S) {
  if constexpr (B::swap_ab) return S.first_col();
  return 0;
}

template <class B> struct KeyBits;  // USE_KEY_MASK, USE_BIAS=4, 5: a bit per key of a tile, 1 if it is visible
// USE_KEY_MASK, USE_BIAS=4, 5: a tile's entry in the item's list of visible rounds. unknown: the kernel has no list.
// unchanged: the key mask hides none of its keys, and the bias is 0 for all of them.
enum class ListedTile { unknown, unchanged, changed };

// The tile that the score hook processes: its item, mask and position. WgmmaRows has the same interface and
// prefetches the bias.
template <class B> struct ScoreTile {
  const KernelArgs& a;
  const Item<B>& item;
  const Mask& mask;
  const int q0, k0;  // first query and first key
  const ScoreScale<B> scale;  // hook_scale of the item
  std::conditional_t<B::has_key_bits, ListedTile, Nothing> listed{};
  std::conditional_t<B::key_bias && B::swap_ab, const Bias*, Nothing> bias_of_columns{};  // of the thread's columns

  __device__ ScoreScale<B> hook_scale() const { return scale; }
  __device__ int batch_of_item() const { return item.b; }
  __device__ int query_count() const { return item.query_count(a.p); }
  // Does nothing; WgmmaRows sets the first row and column of the view here.
  template <class View> static __device__ void locate(View&) {}
  // False if SCORE_MOD, MASK_MOD and the key mask leave the tile unchanged.
  __device__ __forceinline__ bool needs_modify_scores() const {
    if constexpr (B::use_key_mask && !B::changes_logits) {
      if (listed == ListedTile::unknown) return !KeyBits<B>(a, item.b, k0).all();
      return listed == ListedTile::changed;
    }
    return B::modifies_scores;
  }
  // USE_KEY_MASK: a bit per key of the tile, 1 if it is visible. Words without a key in [first, last] are
  // undefined.
  __device__ __forceinline__ auto key_bits(int first, int last) const {
    if constexpr (B::use_key_mask) return KeyBits<B>(a, item.b, k0, first, last);
  }
  // USE_BIAS: if the tile has a bias that changes it, adds the bias and returns true. Scores become logits,
  // or -inf if the key is hidden.
  template <class View> __device__ __forceinline__ bool add_bias(View& S) const;
  // USE_BIAS=4, 5: only WgmmaRows adds a bias to tiles that use a stale maximum.
  template <class View, class Softmax> __device__ bool exp_with_bias(View&, int, int, Softmax&) const { return false; }
};

// Applies softcap, SCORE_MOD, MASK_MOD, the key mask and the bias to the scores of a tile, and the mask unless the
// tile is unmasked. are_logits: S was recovered from P and has already passed the hook, so only the mask is applied.
template <class B, class View, class Tile>
__device__ __forceinline__ void finish_scores(View& S, Tile& tile, bool unmasked, bool are_logits = false) {
  if (!are_logits) {
    cap_scores<B>(S, tile.a, tile.hook_scale());
    if (B::modifies_scores && tile.needs_modify_scores()) modify_scores<B>(S, tile, unmasked);
    if (!tile.add_bias(S)) scale_scores<B>(S, tile.a);
  }
  if (!unmasked) {
    tile.locate(S);
    mask_scores<B>(S, tile.a, tile.mask, tile.q0, tile.k0 + column_offset<B>(S));
  }
}
template <class B, class View>
__device__ __forceinline__ void finish_item_scores(View& S, const KernelArgs& a, const Item<B>& item, const Mask& mask,
                                                   int q0, int k0, bool unmasked) {
  ScoreTile<B> tile{a, item, mask, q0, k0, item_hook_scale<B>(a, item)};
  finish_scores<B>(S, tile, unmasked);
}

// ---- online softmax ----

// 2^t; with USE_FAST_EXP by a polynomial.
template <class B> __device__ __forceinline__ float exp2_polynomial(float t);
template <class B> __device__ __forceinline__ float softmax_exp2(float t) {
  return B::use_fast_exp ? exp2_polynomial<B>(t) : ex2_approx_ftz(t);
}

// P and l are scaled by 2^p_log2, because the range of e4m3 is 2^-9 to 448. With 8 instead of 3, P would overflow
// sooner with a stale maximum. With 0, the error of long rows would grow.
template <class B> constexpr float p_log2 = B::product_type == DType::e4m3 ? 3 : 0;

// The value to subtract from S: m, or 0 for a row without a visible key so far. This avoids -inf - -inf.
__device__ __forceinline__ float finite_max(float m) { return m == -INFINITY ? 0.0f : m; }

// m' = max(m, row max of S);  alpha = 2^((m - m') * scale_log2)   [ROWS]
template <class B, class View, int COLS = View::COLS>
__device__ __forceinline__ void softmax_max(const View& S, ScoreScale<B> scale_log2, float (&m)[View::ROWS],
                                            float (&alpha)[View::ROWS]) {
  SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
    float m_new = m[i];
    SDPA_UNROLL for (int j = 0; j < COLS; j++) m_new = fmaxf(m_new, S.x[i][j]);
    SDPA_UNROLL for (int lane = 1; lane < View::LANES; lane *= 2) {
      m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffffu, m_new, lane));
    }
    alpha[i] = softmax_exp2<B>((m[i] - finite_max(m_new)) * of_row(scale_log2, i));
    m[i] = m_new;
  }
}

// The largest |m * scale_log2| that may be subtracted in the exponent. Its rounding changes P by at most 2^-15.
constexpr float shift_limit = 1024;
// The limit of a build. SCORE_MOD may add terms as large as the sequence length, so its limit is higher, and P
// changes by at most 2^-12.
template <class B> constexpr float shift_limit_of = B::changes_logits ? 8192 : shift_limit;

// P = 2^(S * scale_log2 - m_log2) in place;  sum += P
template <class B, class View>
__device__ __forceinline__ void softmax_exp(View& S, int first, int last, ScoreScale<B> scale_log2,
                                            const float (&m_log2)[View::ROWS], float (&sum)[View::ROWS]) {
  SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
    SDPA_UNROLL for (int j = first; j < last; j++) {
      S.x[i][j] = softmax_exp2<B>(fmaf(S.x[i][j], of_row(scale_log2, i), -m_log2[i]));
      sum[i] += S.x[i][j];
    }
  }
}

// P = 2^((S - m) * scale_log2) in place;  l' = l * alpha + row sum of P over this thread's columns.
// The FMA that scales S subtracts m_log2 = m * scale_log2. If |m_log2| is above the limit, the rounding error of that
// product would be visible; near 2^31 it changes P by a factor of 2^64. Then S - m is computed first, which is exact
// near the maximum, and m_log2 is 0. Returns true if every m may be kept as a stale maximum: it is not -inf and
// within the limit.
template <class B, class View>
__device__ __forceinline__ bool softmax_sum(View& S, ScoreScale<B> scale_log2, const float (&m)[View::ROWS],
                                            const float (&alpha)[View::ROWS], float (&l)[View::ROWS]) {
  float m_log2[View::ROWS], sum[View::ROWS] = {};
  bool may_be_kept = true;
  SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
    const float shift = finite_max(m[i]);
    m_log2[i] = shift * of_row(scale_log2, i) - p_log2<B>;
    if (m[i] == -INFINITY) may_be_kept = false;
    if (fabsf(m_log2[i]) <= shift_limit_of<B>) continue;
    may_be_kept = false;
    m_log2[i] = 0 - p_log2<B>;
    SDPA_UNROLL for (int j = 0; j < View::COLS; j++) S.x[i][j] -= shift;
  }
  softmax_exp<B>(S, 0, View::COLS, scale_log2, m_log2, sum);
  SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) l[i] = fmaf(l[i], alpha[i], sum[i]);
  return may_be_kept;
}

// Returns x, which is equal in all lanes. After the shuffle, the compiler keeps values derived from x in uniform
// registers, which wgmma descriptors require.
__device__ __forceinline__ int warp_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// The sum of x over the lanes that share a row. The order is fixed.
template <int LANES> __device__ __forceinline__ float row_sum(float x) {
  SDPA_UNROLL for (int lane = 1; lane < LANES; lane *= 2) { x += __shfl_xor_sync(0xffffffffu, x, lane); }
  return x;
}

// ---- epilogue ----

constexpr float ln2 = 0.693147180559945f;
// USE_SINKS: the sink of the item's head; -inf if it has none.
template <class B> __device__ __forceinline__ float sink_of(const KernelArgs& a, const Item<B>& item) {
  return a.p.sinks ? a.p.sinks[item.h] : -INFINITY;
}
// The final row sum: l, or with USE_SINKS l + 2^p_log2 * e^(sink - m). If the second term is above 2^126, O is 0.
template <class B>
__device__ __forceinline__ float with_sink(float m, float l, const KernelArgs& a, const Item<B>& item) {
  if (!B::use_sinks) return l;
  const float sink = sink_of<B>(a, item);
  if (!(sink < INFINITY) && l != 0) return NAN;  // a sink of NaN or inf, and a visible key
  const float above_m = fmaf(-finite_max(m), item_scale_log2<B>(a, item), sink * (1 / ln2));
  return l + ex2_approx_ftz(fminf(above_m + p_log2<B>, 127));  // 127: 1 / sum is flushed to 0
}

// Stores LSE = ln2 * (m * scale_log2 + log2(sum / 2^p_log2)) of query q, unless p.LSE is null. scale_log2 is
// multiplied by ln2 first, because m * scale_log2 may overflow.
template <class B>
__device__ __forceinline__ void store_lse(float m, float sum, const KernelArgs& a, const Item<B>& item, int q) {
  if (a.p.LSE) {
    const int64_t row = (int64_t(item.batch(a.p.q_starts)) * a.p.Hq + item.h) * a.p.Sq + item.q_row(q);
    float lse = fmaf(finite_max(m), item_scale_log2<B>(a, item) * ln2, ln2 * (lg2_approx_ftz(sum) - p_log2<B>));
    if (B::use_sinks) lse = max_nan(lse, sink_of<B>(a, item));  // with_sink() clamps e^(sink - m)
    st_global(a.p.LSE + row, lse);
  }
}

// The final row sum, which includes the sink, and the final factor of O: 1 / sum, which is inf for a row without a
// visible key and without a sink. 8-bit types: times the descale factor of V.
struct FinalSum { float sum, factor; };
template <class B>
__device__ __forceinline__ FinalSum final_sum(float m, float l, const KernelArgs& a, const Item<B>& item) {
  const float sum = with_sink<B>(m, l, a, item);
  return {sum, rcp_approx_ftz(sum) * item_v_descale<B>(a, item)};
}

// ---- the store of O and LSE from views (scalar, wmma, mma, wgmma) ----

// Stores O / l and LSE of the rows that have a query. O of a row without a visible key is 0. m, l [ROWS] are
// final in all lanes.
template <class B, class View>
__device__ __forceinline__ void store_output(const View& O, const float (&m)[View::ROWS], const float (&l)[View::ROWS],
                                             const KernelArgs& a, const Item<B>& item) {
  constexpr int run = View::RUN < 8 ? View::RUN : 8;
  constexpr int width = B::vec_width < run ? B::vec_width : run;  // elements per store, at most 16 bytes
  using Vector = VectorType<width * sizeof(Output)>;
  const SdpaParams& p = a.p;
  const int columns = B::takes_short_rows && a.has_short_rows ? p.Dv : B::d_v;
  Output* const O_g = p.O + item.b * p.o.batch + item.h * p.o.head;
  SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
    const int q = item.q0 + O.row(i);
    if (q >= item.query_count(p)) continue;
    const FinalSum total = final_sum<B>(m[i], l[i], a, item);
    SDPA_UNROLL for (int j = 0; j < View::COLS; j += width) {
      Output e[width];
      SDPA_UNROLL for (int n = 0; n < width; n++) {
        e[n] = rounded<Output>(l[i] == 0.0f ? 0 : O.x[i][j + n] * total.factor);
      }
      Vector x;
      memcpy(&x, e, sizeof x);
      if (!B::takes_short_rows || O.col(j) < columns) st_global(O_g + item.q_row(q) * p.o.row + O.col(j), x);
    }
    if (O.col(0) == 0) store_lse<B>(m[i], total.sum, a, item, q);  // the first lane of the row
  }
}

// ---- declarations of the copies; the definitions follow the first kernel ----

// The item of this CTA, in kernels where each CTA has one item.
template <class B> __device__ __forceinline__ Item<B> item_of_cta(const KernelArgs& a);
// The keys and the mask of an item. copy_q() copies its rows of Q; copy_kv() copies the next tile of K and V.
template <class B> struct ItemTiles;
// acquire(k0) waits for the tile at key k0 and returns its stage. release() ends this warp's reads of it.
template <class B, class Shared> struct CopyTogether;

// ---- scores in shared memory (scalar, wmma) ----

constexpr int RUN_READ = 8;  // adjacent elements of a row that a lane reads at once

// Loads N elements from src_s, which is aligned to N elements, and converts them to float.
template <class E, int N> __device__ __forceinline__ void load_run(float (&x)[N], const E* src_s) {
  const auto run = ld_shared<VectorType<N * sizeof(E)>>(src_s);
  E e[N];
  memcpy(e, &run, sizeof run);
  SDPA_UNROLL for (int i = 0; i < N; i++) x[i] = to_float(e[i]);
}

// Lane layout of the next two views: 4 lanes along the rows, 8 along the columns.
constexpr int ROW_LANES = 4, COL_LANES = 8;

// S or P [BLOCK_M][BLOCK_N]. Columns are interleaved over the lanes, so that adjacent lanes read adjacent keys.
template <class B> struct ScalarScores {
  static constexpr int ROWS = B::block_m / (ROW_LANES * B::num_warps);
  static constexpr int COLS = B::block_n / COL_LANES, LANES = COL_LANES;
  float x[ROWS][COLS];
  int first_row, row_step, first_col;
  __device__ int row(int i) const { return first_row + row_step * i; }
  __device__ int col(int j) const { return first_col + COL_LANES * j; }
};

// O [BLOCK_M][Dv]. A lane has the same rows as in ScalarScores, and runs of RUN adjacent columns.
template <class B> struct ScalarOutput {
  static constexpr int ROWS = ScalarScores<B>::ROWS, COLS = B::d_v / COL_LANES;
  static constexpr int RUN = COLS % RUN_READ ? 2 : RUN_READ;  // adjacent elements of x with adjacent d
  float x[ROWS][COLS];
  int first_row, first_col;
  __device__ int row(int i) const { return first_row + ROW_LANES * i; }
  __device__ int col(int j) const { return first_col + j / RUN * (COL_LANES * RUN) + j % RUN; }
};

// Stores a view in shared memory.
template <class T, class View> __device__ __forceinline__ void write_view(T* P_s, int stride, const View& S) {
  SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
    SDPA_UNROLL for (int j = 0; j < View::COLS; j++) {
      st_shared(P_s + S.row(i) * stride + S.col(j), rounded<T>(S.x[i][j]));
    }
  }
}

template <class B> struct ScalarShared {
  static constexpr int P_STRIDE = B::block_n + 8;         // the 4 rows of lanes use 4 groups of 8 banks
  Element<B> Q[B::block_m * TILE_STRIDE<B>];              // [BLOCK_M][D]
  Element<B> K[B::stages][B::block_n * TILE_STRIDE<B>];   // [BLOCK_N][D]
  Element<B> V[B::stages][B::block_n * TILE_STRIDE<B, B::d_v>];  // [BLOCK_N][Dv]
  float P[B::block_m * P_STRIDE];                         // [BLOCK_M][BLOCK_N]; CtaSoftmax: first S, then P
  float m[B::block_m], l[B::block_m], alpha[B::block_m];  // used if a row moves between warps

  __device__ void write_p(const ScalarScores<B>& S) { write_view(P, P_STRIDE, S); }
  __device__ void write_alpha(const ScalarScores<B>&, const float (&)[ScalarScores<B>::ROWS]) {}  // USE_WMMA only
};

// O = O * alpha + P @ V   [BLOCK_M][Dv]
template <class B>
__device__ __forceinline__ void scalar_pv(ScalarOutput<B>& O, const float (&alpha)[ScalarOutput<B>::ROWS],
                                          const float* P_s, const Element<B>* V_s) {
  using View = ScalarOutput<B>;
  constexpr int KEYS = 4;  // one 16-byte read of P
  scale_rows(O, alpha);
#pragma unroll 2
  for (int k = 0; k < B::block_n; k += KEYS) {
    float p[View::ROWS][KEYS];
    SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
      const float4 x = ld_shared<float4>(P_s + O.row(i) * ScalarShared<B>::P_STRIDE + k);
      p[i][0] = x.x;
      p[i][1] = x.y;
      p[i][2] = x.z;
      p[i][3] = x.w;
    }
    SDPA_UNROLL for (int n = 0; n < KEYS; n++) {
      SDPA_UNROLL for (int j = 0; j < View::COLS; j += View::RUN) {
        float v[View::RUN];
        load_run(v, V_s + tile_offset<B, B::d_v>(k + n, O.col(j)));
        SDPA_UNROLL for (int e = 0; e < View::RUN; e++) {
          SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) { O.x[i][j + e] = fmaf(p[i][n], v[e], O.x[i][j + e]); }
        }
      }
    }
  }
}

// Softmax for rows that stay in the warp that computed their scores. m and l are in registers; the lanes of the
// warp exchange P through shared memory.
template <class B, class Shared> struct WarpSoftmax {
  static constexpr int ROWS = ScalarScores<B>::ROWS;
  float m[ROWS], l[ROWS];

  __device__ void start(Shared&, const ScalarScores<B>&) {
    SDPA_UNROLL for (int i = 0; i < ROWS; i++) {
      m[i] = -INFINITY;
      l[i] = 0;
    }
  }
  // Writes P to shared memory. USE_WMMA: writes alpha, too. Returns alpha of this thread's rows.
  __device__ void step(Shared& s, ScalarScores<B>& S, float scale_log2, float (&alpha)[ROWS]) {
    softmax_max<B>(S, scale_log2, m, alpha);
    softmax_sum<B>(S, scale_log2, m, alpha, l);
    s.write_p(S);
    s.write_alpha(S, alpha);
    __syncwarp();  // hazard: what other lanes wrote to shared memory is read
  }
  // The final m and l of this thread's rows.
  __device__ void finish(Shared&, const ScalarScores<B>&, float (&m_out)[ROWS], float (&l_out)[ROWS]) {
    SDPA_UNROLL for (int i = 0; i < ROWS; i++) {
      m_out[i] = m[i];
      l_out[i] = row_sum<COL_LANES>(l[i]);
    }
  }
};

template <class B, class Shared> struct CtaSoftmax;  // softmax for rows that move between warps
template <class B, class Shared>
using TileSoftmax = std::conditional_t<B::sync_policy == 1, WarpSoftmax<B, Shared>, CtaSoftmax<B, Shared>>;

// ==== 5 KERNELS ==================================================================================

// ---- the path to a kernel ----

// True if a second kernel, sdpa_merge(), merges the partials of an item's ranges. With SWAP_AB, and with mma,
// PACK_GQA and SPLIT_KV > 1, the last CTA of an item merges them instead.
template <class B>
constexpr bool merges_by_kernel =
    B::split_ctas != 1 && !B::swap_ab && !(B::kernel == KernelKind::mma && B::pack_gqa && B::split_kv > 1);
// True if the CTAs of an item increment a counter. The CTA that does so last merges the partials.
template <class B> constexpr bool counts_ranges = B::split_ctas != 1 && !merges_by_kernel<B>;
// KernelOf describes a kernel to the launch code: `Shared` is its shared memory, `entry` its __global__ function.
template <class B, KernelKind = B::kernel> struct KernelOf;
template <class B> constexpr size_t shared_bytes = sizeof(typename KernelOf<B>::Shared);

// ---- 5a scalar: Q @ K.T and P @ V on the FMA pipes (scalar) ----

// S = Q @ K.T   [BLOCK_M][BLOCK_N]
template <class B>
__device__ __forceinline__ void scalar_qk(ScalarScores<B>& S, const Element<B>* Q_s, const Element<B>* K_s) {
  using View = ScalarScores<B>;
  clear(S);
#pragma unroll 2
  for (int d = 0; d < B::head_dim; d += RUN_READ) {
    float q[View::ROWS][RUN_READ];
    SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) { load_run(q[i], Q_s + tile_offset<B>(S.row(i), d)); }
    SDPA_UNROLL for (int j = 0; j < View::COLS; j++) {
      float k[RUN_READ];
      load_run(k, K_s + tile_offset<B>(S.col(j), d));
      SDPA_UNROLL for (int e = 0; e < RUN_READ; e++) {
        SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) S.x[i][j] = fmaf(q[i][e], k[e], S.x[i][j]);
      }
    }
  }
}

template <class B> __global__ void __launch_bounds__(B::threads, 1) sdpa_scalar(const __grid_constant__ KernelArgs a) {
  ScalarShared<B>& s = dynamic_shared<ScalarShared<B>>();
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;

  ScalarScores<B> S;
  ScalarOutput<B> O;
  S.first_row = warp * (B::block_m / B::num_warps) + lane / COL_LANES;
  S.row_step = ROW_LANES;
  S.first_col = lane % COL_LANES;
  O.first_row = S.first_row;
  O.first_col = lane % COL_LANES * O.RUN;

  const Item<B> item = item_of_cta<B>(a);
  if (!item.exists()) return;
  const ItemTiles<B> t(a, item, 0, tid);
  t.template copy_q<B::block_m, B::threads>(s.Q, 0, tid);
  CopyTogether<B, ScalarShared<B>> pipeline(s, t);

  clear(O);
  TileSoftmax<B, ScalarShared<B>> softmax;
  softmax.start(s, S);
  const float scale_log2 = item_scale_log2<B>(a, item);

  for (int k0 = t.keys.begin; k0 < t.keys.end; k0 += B::block_n) {
    const int stage = pipeline.acquire(k0);
    scalar_qk<B>(S, s.Q, s.K[stage]);
    finish_item_scores<B>(S, a, item, t.mask, item.q0, k0, is_unmasked<B>(a, t.mask, item.q0, k0));
    float alpha[O.ROWS];
    softmax.step(s, S, scale_log2, alpha);
    scalar_pv<B>(O, alpha, s.P, s.V[stage]);
    pipeline.release();
  }

  float m[O.ROWS], l[O.ROWS];
  softmax.finish(s, S, m, l);
  store_output<B>(O, m, l, a, item);
}

template <class B> struct KernelOf<B, KernelKind::scalar> {
  using Shared = ScalarShared<B>;
  static constexpr auto entry = sdpa_scalar<B>;
};

// ---- vector copies from global to shared memory (scalar, wmma, mma) ----

// copy() copies a vector, or writes zeros if !valid. commit() ends a group of copies. wait() waits until at
// most IN_FLIGHT groups are in flight. CONVERTS: copy() converts U8 elements to fp16.
template <bool ASYNC, bool CONVERTS = false> struct VectorCopy;

// ---- vector copies through registers (scalar, wmma, mma and USE_CP_ASYNC = 0) ----

template <> struct VectorCopy<false> {
  template <int BYTES> __device__ static __forceinline__ void copy(void* dst_s, const void* src_g, bool valid) {
    using Vector = VectorType<BYTES>;
    Vector x{};
    if (valid) x = ld_global_nc<Vector>(src_g);
    st_shared(dst_s, x);
  }
  __device__ static __forceinline__ void commit() {}
  template <int IN_FLIGHT> __device__ static __forceinline__ void wait() {}
};

// ---- tile copies (scalar, wmma, mma) ----

// The vectors of a tile that a thread copies: (row + i * ROW_STEP, col + j * COL_STEP), so its addresses advance by a
// constant. A row with more vectors than threads takes several passes. If the number of threads is not a multiple of
// the vectors per row, the last threads are idle.
template <class B, int NTHREADS, int D> struct TileCopy {
  static constexpr int PER_ROW = D / B::vec_width;  // vectors
  static constexpr int ROW_STEP = NTHREADS > PER_ROW ? NTHREADS / PER_ROW : 1;
  static constexpr int COL_STEP = NTHREADS > PER_ROW ? D : NTHREADS * B::vec_width;
  int row, col;

  __device__ __forceinline__ explicit TileCopy(int tid) : row(tid / PER_ROW), col(tid % PER_ROW * B::vec_width) {}

  // Copies a tile to dst_s [ROWS][D]. src_g points to this thread's first vector. `rows`: number of valid rows,
  // counted from the row of this vector; later rows are zero-filled. With USE_CP_ASYNC, the data is valid only
  // after a wait.
  template <int ROWS, class Rows>
  __device__ __forceinline__ void copy(Element<B>* dst_s, Rows src_g, int64_t row_stride, int rows) const {
    using Copy = VectorCopy<B::use_cp_async, B::tile_type != B::kv_type>;
    [[maybe_unused]] constexpr int unrolled = B::use_cp_async ? 16 : 8;  // plain loads occupy registers
#pragma unroll unrolled
    for (int r = 0; r < ROWS; r += ROW_STEP, src_g += ROW_STEP * row_stride) {
      if ((ROWS % ROW_STEP != 0 && row + r >= ROWS) || row >= ROW_STEP) break;
      SDPA_UNROLL for (int c = 0; c < D; c += COL_STEP) {
        if (D % COL_STEP != 0 && col + c >= D) break;
        Element<B>* const to_s = dst_s + tile_offset<B, D>(row + r, col + c);
        Copy::template copy<B::vec_width * sizeof(KeyValue)>(to_s, src_g + c, r < rows);
      }
    }
  }
};

// ---- barriers ----
// Synchronizes all warps of the CTA if across_warps (a compile-time constant), otherwise only the lanes of the warp.
// SPLIT_KV: all warps of split n, by named barrier 1 + n, since barrier 0 is that of __syncthreads().
template <class B> __device__ __forceinline__ void split_sync(bool across_warps) {
  if (!across_warps || B::split_threads == 32) {
    __syncwarp();
  } else if constexpr (B::split_kv > 1) {
    SDPA_UNROLL for (int split = 0; split < B::split_kv; split++) {  // unrolled, so that the id is a constant
      if (int(threadIdx.x / B::split_threads) == split) barrier_sync(1 + split, B::split_threads);
    }
  } else {
    __syncthreads();
  }
}

// ---- copies of an item's tiles by all threads (scalar, wmma, mma) ----

template <class B> struct PagedRows;  // USE_PAGES: replaces a pointer to rows of K or V

// Copies the tiles of an item. SPLIT_KV: the threads of split n copy the K/V tiles n, SPLIT_KV + n, and so on.
template <class B> struct ItemTiles {
  static constexpr int COPY_THREADS = B::use_warp_specialization ? B::producer_threads : B::split_threads;
  const SdpaParams& p;
  const Item<B>& item;
  typename Item<B>::ItemMask mask;
  TileCopy<B, COPY_THREADS, B::head_dim> k_copy;  // the vectors that this thread copies
  TileCopy<B, COPY_THREADS, B::d_v> v_copy;
  using Rows = std::conditional_t<B::use_pages != 0, PagedRows<B>, const KeyValue*>;
  Rows K_g, V_g;  // this thread's first vectors of the next tile
  Interval keys;  // keys that the item's rows see; SPLIT_CTAS: this CTA's range of them
  int first_key;  // first key to copy

  __device__ __forceinline__ ItemTiles(const KernelArgs& a, const Item<B>& item_, int split, int tid)
      : p(a.p), item(item_), mask(item.mask(a)), k_copy(tid), v_copy(tid) {
    const int h_kv = item.h / (p.Hq / p.Hkv);
    keys = item.keys_of_cta(a, mask);
    first_key = keys.begin + split * B::block_n;
    if constexpr (B::use_pages != 0) {
      K_g = {&a, &item, &p.k, p.K + h_kv * p.k.head + k_copy.col, first_key + k_copy.row};
      V_g = {&a, &item, &p.v, p.V + h_kv * p.v.head + v_copy.col, first_key + v_copy.row};
    } else {
      const auto first = [&](const KeyValue* tensor, const Strides& strides, int row, int col) {
        return tensor + item.b * strides.batch + h_kv * strides.head +
               item.k_row(first_key) * strides.row + row * strides.row + col;
      };
      K_g = first(p.K, p.k, k_copy.row, k_copy.col);
      V_g = first(p.V, p.v, v_copy.row, v_copy.col);
    }
  }
  // Copies query rows to shared memory, beginning at row first_row of the item.
  // KV_DTYPE: an element of Q is copied as two elements of K.
  template <int ROWS, int NTHREADS>
  __device__ __forceinline__ void copy_q(Element<B>* Q_s, int first_row, int tid) const {
    const TileCopy<B, NTHREADS, B::d_q> q_copy(tid);
    const int q = item.q0 + first_row;
    const Query* const Q_g = p.Q + item.b * p.q.batch + item.h * p.q.head + item.q_row(q) * p.q.row;
    q_copy.template copy<ROWS>(Q_s, reinterpret_cast<const KeyValue*>(Q_g + q_copy.row * p.q.row) + q_copy.col,
                              (B::q_type != B::kv_type ? 2 : 1) * p.q.row,
                              item.query_count(p) - q - q_copy.row);
  }
  // Copies the next tile of K and V, whose first key is k0, to a stage. Does nothing past the last key.
  template <class Shared> __device__ __forceinline__ void copy_kv(Shared& s, int stage, int k0) {
    if (k0 < keys.end) {
      const int rows = keys.end - k0;
      // PagedRows advances by rows, a pointer by elements.
      const auto row_stride = [](const Strides& strides) { return B::use_pages ? 1 : strides.row; };
      k_copy.template copy<B::block_n>(s.K[stage], K_g, row_stride(p.k),
                                       !B::takes_short_rows || k_copy.col < p.D ? rows - k_copy.row : 0);
      v_copy.template copy<B::block_n>(s.V[stage], V_g, row_stride(p.v),
                                       !B::takes_short_rows || v_copy.col < p.Dv ? rows - v_copy.row : 0);
      K_g += B::round_keys * row_stride(p.k);  // the next tile
      V_g += B::round_keys * row_stride(p.v);
    }
  }
};

// All threads copy the tiles of K and V, STAGES - 1 tiles ahead of the current one. Past the last tile they commit
// empty groups of copies, so that the wait counts stay constant. SPLIT_KV: the threads of a split copy its tiles.
template <class B, class Shared> struct CopyTogether {
  using Copy = VectorCopy<B::use_cp_async>;
  ItemTiles<B> t;
  Shared& s;
  int stage = B::stages - 1;  // stage of the current tile
  // mma.sync with two or more stages: after the barrier in acquire(), all warps have read the previous tile,
  // so its stage is refilled there. Other kernels refill it before that barrier and need a barrier in release().
  static constexpr bool REFILLS_AFTER_BARRIER = B::kernel == KernelKind::mma && B::stages > 1;

  // Starts copying the first STAGES - 1 tiles, with one group of copies per tile.
  __device__ __forceinline__ CopyTogether(Shared& s_, const ItemTiles<B>& t_) : t(t_), s(s_) {
    for (int n = 0; n < B::stages - 1; n++) {
      t.copy_kv(s, n, t.first_key + n * B::round_keys);
      Copy::commit();
    }
  }
  // Starts the copy of the tile that is STAGES - 1 tiles after the one at k0, and waits for the one at k0.
  __device__ __forceinline__ int acquire(int k0) {
    if (B::stages > 1) stage = stage + 1 == B::stages ? 0 : stage + 1;
    const int previous = B::stages == 1 || stage == 0 ? B::stages - 1 : stage - 1;
    const int next_k0 = k0 + (B::stages - 1) * B::round_keys;
    if constexpr (B::kernel != KernelKind::mma && B::sync_policy == 5) {
      split_sync<B>(true);  // hazard: Q copied by all warps (redundant)
    }
    if (!REFILLS_AFTER_BARRIER) {
      t.copy_kv(s, previous, next_k0);
      Copy::commit();
    }
    Copy::template wait<REFILLS_AFTER_BARRIER ? B::stages - 2 : B::stages - 1>();
    split_sync<B>(B::sync_policy >= 1);  // hazard: Q, K and V were copied by all warps
    if (REFILLS_AFTER_BARRIER) {
      t.copy_kv(s, previous, next_k0);
      Copy::commit();
    }
    return stage;
  }
  __device__ __forceinline__ void release() {
    // hazard: K, V and P still being read by other warps
    split_sync<B>(!REFILLS_AFTER_BARRIER && B::sync_policy >= 1);
  }
};

// ---- PTX instructions that the scalar kernel does not need ----

#ifndef SDPA_SIMT

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
static_assert(!(Defines::kernel == KernelKind::mma && Defines::kv_type == DType::e4m3),
              "FP8_E4M3: mma.sync and cvt take e4m3 from sm_89 on; type -arch=sm_89, or DTYPE=FP16 without KV_DTYPE");
#endif

// Maximum number of keys that one accumulator of a tensor core sums. Tensor cores truncate each sum: 524,288 equal
// addends lose 0.13%. The CPU backend has a variable instead.
constexpr int most_keys_at_once = 65536;

// An address in shared memory as an integer of 32 bits. Pointers have 64 bits.
using SharedAddress = uint32_t;
__device__ __forceinline__ SharedAddress shared_address(const void* p_s) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(p_s));
}

// tanh(x) with a relative error of 2^-11.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// min(a, b); NaN if either is NaN.
__device__ __forceinline__ float min_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
// a + b rounded towards -infinity.
__device__ __forceinline__ float add_rm(float a, float b) {
  float y;
  asm("add.rm.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
__host__ __device__ __forceinline__ float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
// Loads from L2 and bypasses L1, for data that another SM wrote.
template <class T> __device__ __forceinline__ T ld_global_cg(const void* src_g) {
  return __ldcg(static_cast<const T*>(src_g));
}
// atom.inc: increments the counter, which wraps from `last` to 0, and returns the old value. Release and
// acquire: earlier writes of this thread, and of threads with which it has synchronized at a barrier, are
// visible to every thread that increments the counter later.
__device__ __forceinline__ uint32_t atom_inc_acq_rel(uint32_t* counter_g, uint32_t last) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter_g), "r"(last) : "memory");
  return old;
}
// Selects four of the eight bytes of (b, a), where a has the low four bytes. Each hexadecimal digit of the
// selector is the index of a byte.
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}
// Converts two e4m3 numbers, the low 16 bits of x, to fp16.
__device__ __forceinline__ uint32_t cvt_rn_f16x2_e4m3x2(uint32_t x) {
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(uint16_t(x)));
  return pair;
}
// a - b for two pairs of fp16 numbers.
__device__ __forceinline__ uint32_t sub_f16x2(uint32_t a, uint32_t b) {
  uint32_t difference;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}
// Waits like barrier_sync(). Returns true if `vote` is true in all threads.
__device__ __forceinline__ bool barrier_and(int id, int threads, bool vote) {
  uint32_t all;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %3, 0; barrier.red.and.aligned.pred q, %1, %2, p; "
      "selp.b32 %0, 1, 0, q; }"
      : "=r"(all)
      : "r"(id), "r"(threads), "r"(uint32_t(vote))
      : "memory");
  return all;
}
// Arrives at barrier `id` without waiting. Other threads wait there with barrier_sync().
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Initializes an mbarrier, 8 bytes of shared memory. Its phase completes after `arrivals` arrivals and after
// the transfer of all bytes that the arrivals announced.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier_s, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier_s)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier_s) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier_s))
               : "memory");
}
// True if the phase of this parity is complete.
__device__ __forceinline__ bool mbarrier_test_wait_parity(uint64_t* barrier_s, int parity) {
  uint32_t complete;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
               : "=r"(complete)
               : "r"(shared_address(barrier_s)), "r"(parity)
               : "memory");
  return complete;
}

// Loads four 8x8 matrices of 16-bit elements from shared memory. Lane 8i + r passes the address of row r of
// matrix i. Lane 4g + q gets columns 2q and 2q + 1 of row g of each matrix. TRANS: it gets rows 2q and 2q + 1
// of column g.
template <bool TRANS> __device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], SharedAddress row) {
  if constexpr (TRANS) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row));
  }
}
// Loads the 8 bytes at an address.
__device__ __forceinline__ void ld_shared_v2(uint32_t (&r)[2], SharedAddress from) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(from));
}

// D += A @ B, [16][16] @ [16][8]. Lane 4g + q holds:
//
//   d0, d1  row g,     columns 2q, 2q + 1      a[0]  row g,     k = 2q, 2q + 1      b0  column g, k = 2q, 2q + 1
//   d2, d3  row g + 8, columns 2q, 2q + 1      a[1]  row g + 8, k = 2q, 2q + 1      b1  column g, k = 2q + 8, 2q + 9
//                                              a[2]  row g,     k = 2q + 8, 2q + 9
//                                              a[3]  row g + 8, k = 2q + 8, 2q + 9
#define SDPA_MMA(types)                                                                                     \
  asm volatile("mma.sync.aligned." types " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <class E>
__device__ __forceinline__ void mma_m16n8k16(float& d0, float& d1, float& d2, float& d3, const uint32_t (&a)[4],
                                             uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<E, __half>) {
    SDPA_MMA("m16n8k16.row.col.f32.f16.f16.f32");
  } else {
    SDPA_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
  }
}
// The same for [16][32] @ [32][8]. Each register holds four elements: k = 4q to 4q + 3 in a[0], a[1] and b0, and
// k = 4q + 16 to 4q + 19 in a[2], a[3] and b1.
__device__ __forceinline__ void mma_m16n8k32_e4m3(float& d0, float& d1, float& d2, float& d3, const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  SDPA_MMA("m16n8k32.row.col.f32.e4m3.e4m3.f32");
}

// Converts four numbers to e4m3, with `a` in the low byte. It rounds to nearest even and saturates at 448;
// NaN remains NaN.
__device__ __forceinline__ uint32_t cvt_rn_satfinite_e4m3x4(float a, float b, float c, float d) {
  uint32_t out;
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; "
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high}; }"
      : "=r"(out)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return out;
}

// ---- cp.async (USE_CP_ASYNC, USE_BIAS = 1..3, USE_PAGES = 2) ----

// Copies BYTES (4, 8 or 16) asynchronously. If !valid, it reads nothing and writes zeros.
template <int BYTES> __device__ __forceinline__ void cp_async(void* dst_s, const void* src_g, bool valid) {
  const SharedAddress dst = shared_address(dst_s);
  const int src_bytes = valid ? BYTES : 0;
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src_g), "r"(src_bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst), "l"(src_g), "n"(BYTES), "r"(src_bytes)
                 : "memory");
  }
}
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// Arrives when all earlier cp.async of this thread have completed.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint64_t* barrier_s) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier_s)) : "memory");
}
// Adds 1 to the pending count of the phase until all earlier cp.async of this thread have completed.
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint64_t* barrier_s) {
  asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(shared_address(barrier_s)) : "memory");
}

#endif  // SDPA_SIMT

// ---- vector copies by cp.async (USE_CP_ASYNC) ----

template <> struct VectorCopy<true> {
  template <int BYTES> __device__ static __forceinline__ void copy(void* dst_s, const void* src_g, bool valid) {
    cp_async<BYTES>(dst_s, src_g, valid);
  }
  __device__ static __forceinline__ void commit() { cp_async_commit_group(); }
  template <int IN_FLIGHT> __device__ static __forceinline__ void wait() { cp_async_wait_group<IN_FLIGHT>(); }
};

// ---- work items: their rows and their order ----

// Without PACK_GQA, the number of query rows of a TileBounds: the rows of a warp, a warpgroup or the CTA.
template <class B>
constexpr int mask_rows = B::kernel == KernelKind::mma                ? B::block_m / B::split_warps
                          : B::is_wgmma && B::use_warp_specialization ? 64
                                                                      : B::block_m;
// Number of queries of an item per head.
template <class B> __device__ __forceinline__ int queries_of_item(const KernelArgs& a) {
  return B::pack_gqa ? int(a.item_queries.divisor) : B::block_m;
}
// Number of rows of an item. PACK_GQA packs n = item_queries queries of item_heads heads that share K and V:
//
//   row of the tile    0 ... n - 1           n ... 2n - 1          ...
//   head, query        h, q0 ... q0 + n - 1  h + 1, q0 ... q0 + n - 1
template <class B> __device__ __forceinline__ int rows_of_item(const KernelArgs& a) {
  return B::pack_gqa ? a.item_heads * int(a.item_queries.divisor) : B::block_m;
}

// The item that consists of one row of a tile: the head and the query of that row.
template <class B> __device__ __forceinline__ Item<B> row_item(const KernelArgs& a, const Item<B>& item, int row) {
  Item<B> one = item;
  if (B::pack_gqa) one.h += int(a.item_queries.divide(uint32_t(row)));
  one.q0 = query_of<B>(a, item.q0, row);
  return one;
}

// Returns a.plan. As a template, it delays the lookup of members that do not exist without USE_LENGTHS.
template <class B> __host__ __device__ __forceinline__ const auto& plan_sizes(const KernelArgs& a) { return a.plan; }

// USE_BIAS, MASK_MOD: true if items may have lists of their visible rounds, from a map that sdpa_map() makes.
// Only the 16-bit kernel with producer and consumer warps reads a map. It does not if USE_LENGTHS or
// SPLIT_CTAS is set.
template <class B>
constexpr bool lists_from_map =
    B::takes_map && B::kernel == KernelKind::wgmma_roles && !B::use_lengths && B::split_ctas == 1;
template <class B> __device__ __forceinline__ bool has_map(const KernelArgs& a) {
  return lists_from_map<B> && a.bias_map.lists;
}
// USE_KEY_MASK, USE_BIAS=4, 5: true if each CTA lists the visible rounds of its items.
template <class B>
constexpr bool lists_by_cta = B::has_key_bits && B::is_wgmma && B::kernel != KernelKind::wgmma_plain;

// The item with query block `block` of head `head`. Heads are numbered across all batches.
template <class B>
__device__ __forceinline__ Item<B> item_of_block(const KernelArgs& a, uint32_t head, uint32_t block) {
  Item<B> item;
  item.b = int(a.q_heads.divide(head));
  item.h = int(a.q_heads.remainder(head));
  item.q0 = int(block) * queries_of_item<B>(a);
  if (B::pack_gqa) item.h *= a.item_heads;
  return item;
}

// USE_LENGTHS: item i of the plan.
template <class B> __device__ __forceinline__ Item<B> item_of_plan(const KernelArgs& a, uint32_t i);

// Work item i. Without a mask, the items of a head are consecutive, because they share its K and V in L2.
// With a mask, the heads are divided into sections whose K and V fit into L2. In each section the longest items
// come first, so that no long item starts last. Sections are counted from the end, so only the first one may have
// fewer heads; a small last section would leave SMs idle.
template <class B> __device__ __forceinline__ Item<B> work_item(const KernelArgs& a, uint32_t i) {
  if constexpr (B::use_lengths) return item_of_plan<B>(a, i);
  uint32_t head, block;
  if (a.mask.keys.all() && !has_map<B>(a)) {
    head = a.q_blocks.divide(i);
    block = a.q_blocks.remainder(i);
  } else {
    const uint32_t from_end = a.work_items - 1 - i;
    const uint32_t section = a.items_in_l2.divide(from_end), j = a.items_in_l2.remainder(from_end);
    const uint32_t first = section * a.heads_in_l2;
    const uint32_t count = min(a.heads_in_l2, a.p.B * a.q_heads.divisor - first);
    head = first + j % count;
    block = j / count;
  }
  return item_of_block<B>(a, head, block);
}

// Index of this CTA's item; with persistent CTAs, of its first item.
template <class B> __device__ __forceinline__ uint32_t item_index_of_cta(const KernelArgs& a) {
  if (B::split_ctas == 1) return blockIdx.x;
  return (merges_by_kernel<B> ? a.first_item : 0) + a.ranges.divide(blockIdx.x);
}

// USE_PERSISTENT_CTA: fetches this CTA's next item from the queue. The first item of a CTA is item blockIdx.x. The
// queue contains the other items: position i has item gridDim.x + i. Returns the position. There is one fetch per
// item, and the last fetch wraps the counter to 0 for the next launch.
template <class B> __device__ __forceinline__ uint32_t fetch_queue_position(const KernelArgs& a) {
  return B::use_persistent_cta ? atomicInc(Item<B>::queue(a), a.work_items - 1) : 0;
}

// SPLIT_CTAS: the rounds [begin, end) of an item that this CTA computes, out of `rounds`.
__device__ __forceinline__ Interval range_of_rounds(const KernelArgs& a, int rounds) {
  const int range = int(a.ranges.remainder(blockIdx.x));
  const int each = int(a.ranges.divide(uint32_t(rounds)));
  const int rest = int(a.ranges.remainder(uint32_t(rounds)));  // the first `rest` ranges have one more
  const int first = each * range + min(range, rest);
  return {first, first + each + (range < rest)};
}

template <class B> __device__ __forceinline__ Item<B> item_of_cta(const KernelArgs& a) {
  return work_item<B>(a, item_index_of_cta<B>(a));
}
template <class B, bool PLANNED>
__device__ __forceinline__ Interval Item<B, PLANNED>::keys_of_cta(const KernelArgs& a, const Mask& mask) const {
  const Interval keys = mask.keys.of_rows(q0, min(q0 + queries_of_item<B>(a), a.p.Sq) - 1);
  if (B::split_ctas == 1) return keys;
  const Interval rounds = range_of_rounds(a, max(ceil_div(keys.end - keys.begin, B::round_keys), 0));
  return {keys.begin + rounds.begin * B::round_keys, min(keys.begin + rounds.end * B::round_keys, keys.end)};
}

// True if a warpgroup skips an item in which none of its rows has a query. Then shifted_rows() may start the
// first item of a head before query 0.
template <class B>
constexpr bool skips_empty_warpgroups =
    B::is_wgmma && B::use_warp_specialization && B::split_kv == 1 && !B::use_ping_pong && B::split_ctas == 1;

// A ring of N stages: the current stage, and the parity of the current phase of its mbarriers.
template <int N> struct StageRing {
  int stage = 0, parity = 0;
  __device__ void advance() {
    if (++stage == N) {
      stage = 0;
      parity ^= 1;
    }
  }
};
template <int N> __device__ __forceinline__ void mbarriers_init(uint64_t (&barriers_s)[N], int arrivals) {
  for (uint64_t& barrier : barriers_s) mbarrier_init(&barrier, arrivals);
}

// ---- operand pairs, scales of an item, lazy rescaling (wmma, mma, wgmma) ----

// Rounds two values of a row and packs them into one register of an A operand of a tensor core.
template <class E> __device__ __forceinline__ uint32_t pack(float low, float high) {
  const E e[2] = {rounded<E>(low), rounded<E>(high)};
  uint32_t word;
  memcpy(&word, e, sizeof word);
  return word;
}

// The scales of an item. 8-bit types: in registers. 16-bit types: kernel arguments, read at each use to save
// registers.
template <class B> struct ItemScales {
  const KernelArgs& a;
  // 8-bit types: the scale that includes the descale factors, of the item or of its rows.
  ScoreScale<B> descaling{};

  __device__ __forceinline__ explicit ItemScales(const KernelArgs& a_) : a(a_) {}
  __device__ __forceinline__ ItemScales(const KernelArgs& a_, const Item<B>& item) : a(a_) { start(item, 0); }
  // row: the thread's first row; its other row is row + 8. Padding rows get the scale of a valid head.
  __device__ __forceinline__ void start(const Item<B>& item, int row) {
    if constexpr (B::has_row_scales) {
      SDPA_UNROLL for (int i = 0; i < 2; i++) {
        Item<B> head = row_item<B>(a, item, row + 8 * i);
        head.h = min(head.h, a.p.Hq - 1);
        descaling.factor[i] = first_scale(head);
      }
    } else if constexpr (B::kv_bytes == 1) {
      descaling = first_scale(item);
    }
  }
  // The scale that multiplies a score of the item first.
  __device__ __forceinline__ float first_scale(const Item<B>& item) const {
    return replaces_scores<B>(a) ? item_hook_scale<B>(a, item) : item_scale_log2<B>(a, item);
  }
  __device__ __forceinline__ ScoreScale<B> hook_scale() const {
    if constexpr (B::kv_bytes == 1) return descaling;
    else if constexpr (B::has_hook_scale) return a.hook_scale;
    else return 1;  // not read
  }
  __device__ __forceinline__ ScoreScale<B> scale_log2() const {
    if (B::kv_bytes == 1 && !replaces_scores<B>(a)) return descaling;
    if constexpr (B::has_row_scales) return {a.scale_log2, a.scale_log2};
    else return a.scale_log2;
  }
  __device__ __forceinline__ ScoreScale<B> scale_log2_without_bias() const {
    if constexpr (B::adds_bias) return a.score_scale_log2;
    else return scale_log2();
  }
};

// The stale maximum is kept as long as each thread's sum of P over its part of the tile is within this limit.
// Then every element of P is within it, too. The largest e4m3 number is 448. The largest fp16 number is
// 65504. bf16 has the exponent range of fp32.
template <class B>
constexpr float lazy_limit = B::product_type == DType::e4m3 ? 448
                             : B::kv_type == DType::bf16    ? 0x1p60f
                                                            : 65504;

// Computes P and l relative to the stale maximum m [ROWS] of earlier tiles (lazy rescaling).
// There is no row max, no alpha and no rescaling of O, and each exponential depends on one score only. m may
// be less than the row max as long as P does not overflow. The row sum does not underflow, since m is a score
// of the row.
template <class B, int ROWS> struct StaleSoftmax {
  ScoreScale<B> tile_scale_log2;  // scale_log2_without_bias(), or scale_log2 once the tile has its bias
  float m_log2[ROWS], sum[ROWS];

  __device__ __forceinline__ StaleSoftmax(const float (&m)[ROWS], const ItemScales<B>& scales)
      : tile_scale_log2(scales.scale_log2_without_bias()) {
    const ScoreScale<B> scale_log2 = scales.scale_log2();
    SDPA_UNROLL for (int i = 0; i < ROWS; i++) {
      m_log2[i] = m[i] * of_row(scale_log2, i) - p_log2<B>;
      sum[i] = 0;
    }
  }
  // True if log2(P) recovers the logits.
  __device__ bool keeps_logits() const { return true; }
  // Adds the sums to l and returns true. If a sum of the warp is NaN or above the limit, it returns false and
  // leaves l unchanged; P must then be recomputed.
  __device__ __forceinline__ bool add_to(float (&l)[ROWS], float limit = lazy_limit<B>) const {
    float all = 0;
    SDPA_UNROLL for (int i = 0; i < ROWS; i++) all += sum[i];
    if (!__all_sync(0xffffffffu, all <= limit)) return false;
    SDPA_UNROLL for (int i = 0; i < ROWS; i++) l[i] += sum[i];
    return true;
  }
};

// ---- the score hook with a stale maximum (mma, wgmma) ----

template <class B> struct ScoreMod;  // SCORE_MOD and MASK_MOD as functions of a score
// The type of the tile that the score hook processes in kernels with USE_LAZY_MAX.
template <class B> struct WgmmaRows;
template <class B> using StaleTile = std::conditional_t<B::is_wgmma, WgmmaRows<B>, ScoreTile<B>>;
// capped(): tanh(x * hook_scale). softmax_input(): the result of the hook for score x in a tile without bias,
// expression and mask.
template <class B> __device__ __forceinline__ float capped(float x, float hook_scale);
template <class B> __device__ __forceinline__ float softmax_input(float x, const KernelArgs& a, float hook_scale) {
  return (replaces_scores<B>(a) ? capped<B>(x, hook_scale) : x) * (B::adds_bias ? a.logit_scale : 1);
}

// Replaces columns [first, last) of S by P, relative to the stale maximum, in a tile that needs no mask. The first
// call for a tile has first = 0. USE_BIAS=1, 2, 3: sets are_logits if the tile has a bias.
template <class B, class View, class Softmax>
__device__ __forceinline__ void exp_by_stale_max(View& S, int first, int last, Softmax& softmax, StaleTile<B>& tile,
                                                 bool& are_logits) {
  if constexpr (B::key_bias) {
    cap_scores<B>(S, tile.a, tile.hook_scale(), first, last);
    if (tile.exp_with_bias(S, first, last, softmax)) return;
  } else if constexpr (B::use_bias != 0) {
    if (first == 0) {
      cap_scores<B>(S, tile.a, tile.hook_scale());
      are_logits = tile.add_bias(S);
      if (are_logits) softmax.tile_scale_log2 = tile.a.scale_log2;
    }
  } else if constexpr (!B::caps_by_polynomial) {  // otherwise CappedSoftmax applies the cap
    cap_scores<B>(S, tile.a, tile.hook_scale(), first, last);
  }
  if constexpr (B::modifies_scores) {
    using Mod = ScoreMod<B>;
    if (tile.needs_modify_scores()) {
      const auto exp = [&](int i, int j, auto logit, bool visible) {
        const float exponent = Mod::exponent(logit, of_row(softmax.tile_scale_log2, i), softmax.m_log2[i]);
        if constexpr (B::use_key_mask) {  // the exponentials start before the bits are known
          const float p = softmax_exp2<B>(exponent);
          S.x[i][j] = visible ? p : 0;
        } else {
          S.x[i][j] = softmax_exp2<B>(visible ? exponent : -INFINITY);
        }
        softmax.sum[i] += S.x[i][j];
      };
      // 8 columns at a time need fewer registers.
      constexpr bool in_steps = (B::hides_keys && !B::use_key_mask) || B::pack_gqa;
      return Mod::template each_in_steps<true, in_steps>(S, first, last, tile, exp);
    }
  }
  if constexpr (B::caps_by_polynomial) {
    softmax.exp_capped(S, first, last);
  } else {
    softmax_exp<B>(S, first, last, softmax.tile_scale_log2, softmax.m_log2, softmax.sum);
  }
}

// SCORE_MOD, MASK_MOD: loads the values that the expressions use and that are constant for the item.
template <class B, class Rows> __device__ __forceinline__ void start_expressions(Rows& rows) {
  if constexpr (B::modifies_scores) ScoreMod<B>::start(rows);
}

// ---- merge weights (wmma, mma, wgmma) ----

// Computes m and l of a row from its N partials, and the weight of each partial. The merged O is the sum of
// O[n] * weight[n].
//
//   m = max of m[n];  weight[n] = 2^((m[n] - m) * scale_log2);  l = sum of l[n] * weight[n];  m_l[n] = {m[n], l[n]}
template <class B, int N>
__device__ __forceinline__ void merge_weights(const float2 (&m_l)[N], float scale_log2, float (&weight)[N], float& m,
                                              float& l) {
  m = m_l[0].x;
  l = 0;
  SDPA_UNROLL for (int n = 1; n < N; n++) m = fmaxf(m, m_l[n].x);
  SDPA_UNROLL for (int n = 0; n < N; n++) {
    weight[n] = softmax_exp2<B>((m_l[n].x - finite_max(m)) * scale_log2);
    l = fmaf(m_l[n].y, weight[n], l);
  }
}

// Floats from one row of O to the next in a partial in shared memory; padded against bank conflicts.
template <class B> constexpr int PARTIAL_STRIDE = B::d_v + 4;

// O[0] to O[3] += x * weight
__device__ __forceinline__ void add_weighted(float* O, const float4& x, float weight) {
  O[0] = fmaf(x.x, weight, O[0]);
  O[1] = fmaf(x.y, weight, O[1]);
  O[2] = fmaf(x.z, weight, O[2]);
  O[3] = fmaf(x.w, weight, O[3]);
}

// A view of HEIGHT rows that are 8 apart, in a tile of WIDTH columns. Four lanes share a row; a lane has RUN adjacent
// columns of every 4 * RUN.
template <int HEIGHT, int WIDTH, int LENGTH> struct QuadRuns {
  static constexpr int ROWS = HEIGHT, RUN = LENGTH, COLS = WIDTH / (4 * RUN) * RUN;
  float x[ROWS][COLS];
  int first_row, first_col;
  __device__ int row(int i) const { return first_row + 8 * i; }
  __device__ int col(int j) const { return first_col + j / RUN * 4 * RUN + j % RUN; }
};

// ---- 5b mma.sync: S, P and O in registers (mma) ----

// A warp has M_TILES row tiles of 16 rows. Lane 4g + q has rows g and g + 8 of each row tile, and columns 2q
// and 2q + 1 of every 8. With an 8-bit V, O has columns 4q to 4q + 3 of every 16 instead, as in MmaRuns, and
// col() does not apply.
template <class B, int WIDTH>
struct MmaAccumulator : QuadRuns<B::block_m / B::split_warps / 8, WIDTH, 2> {  // [16 * M_TILES of BLOCK_M][WIDTH]
  static constexpr int M_TILES = B::block_m / B::split_warps / 16, LANES = 4;
};
template <class B> using MmaSums = MmaAccumulator<B, B::d_v>;            // O
template <class B> using MmaStepOfP = uint32_t[MmaSums<B>::M_TILES][4];  // A operands: P of one step's keys

// The address of element (row + r, col + c) of a tile, where `origin` is the address of (row, col). r is a
// multiple of 8, and c has no bit in common with col. The swizzle XORs the low bits of the column, so the low
// bits of c are XORed, too. The high bits are added as an immediate if D is not a power of 2, since row * D may
// have the same bits, and if D > 128, to save registers. Otherwise all bits are XORed: with an immediate at
// D=128, the compiler would keep the few XORed addresses in registers and spill.
template <class B, int D = B::head_dim>
__device__ __forceinline__ SharedAddress tile_step(SharedAddress origin, int r, int c) {
  constexpr int xored = D > 128 || D & (D - 1) ? int(SWIZZLE_GROUP<D / CHUNK<B>>) * CHUNK<B> : D;
  return (origin ^ c % xored * int(sizeof(Element<B>))) + (r * D + c / xored * xored) * int(sizeof(Element<B>));
}

// The partial of a split, in the layout of its threads' accumulators.
template <class B> struct MmaPartial {
  using View = MmaSums<B>;
  float O[View::ROWS][View::COLS][B::split_threads];
  float2 m_l[View::ROWS][B::split_threads];
};

template <class B> struct MmaPacked;  // PACK_GQA: copies Q and stores O
// The partials of all splits but the first.
template <class B, bool PACKED = (B::pack_gqa && !merges_by_kernel<B>)> struct MmaPartials {
  static constexpr int OTHERS = B::split_kv > 1 ? B::split_kv - 1 : 1;
  using type = std::conditional_t<(B::split_kv > 1), MmaPartial<B>[OTHERS], char>;
};

template <class B> struct MmaShared {
  struct Tiles {
    Element<B> K[B::stages][B::block_n * B::head_dim];  // [BLOCK_N][D]
    Element<B> V[B::stages][B::block_n * B::d_v];       // [BLOCK_N][Dv]
  };
  struct Inputs {
    Element<B> Q[B::block_m * B::d_q];  // [BLOCK_M][D]
    Tiles split[B::split_kv];
  };
  union {
    Inputs in;
    typename MmaPartials<B>::type partial;  // after the last round
  };
  Item<B> item;  // copy of the CTA's item, which finish_scores() and the epilogue read to save registers
};

// T += A @ B for columns 16 * n to 16 * n + 15 of T. a holds the A operand of each row tile; b holds two
// registers of B for each 8 columns.
template <class Operands, class View>
__device__ __forceinline__ void multiply_columns(View& T, int n,
                                                 const uint32_t (&a)[View::M_TILES][Operands::REGISTERS],
                                                 const uint32_t (&b)[4]) {
  SDPA_UNROLL for (int m = 0; m < View::M_TILES; m++) {
    float *const top = T.x[2 * m] + 4 * n, *const bottom = T.x[2 * m + 1] + 4 * n;
    Operands::multiply(top[0], top[1], bottom[0], bottom[1], a[m], b[0], b[1]);
    Operands::multiply(top[2], top[3], bottom[2], bottom[3], a[m], b[2], b[3]);
  }
}

// Elements of d per step of Q @ K.T: 32 bytes of each row of K.
template <class B> constexpr int MMA_K = 2 * CHUNK<B>;
// The operands of a step for 16-bit types. Section 5k has the operands for DTYPE=FP8_E4M3 and KV_DTYPE.
template <class B> struct MmaHalves {
  static constexpr int REGISTERS = 4;  // registers per A operand of 16 rows
  static constexpr int KEYS = 16;      // keys per step of P @ V

  // [16][8] += A @ B
  static __device__ __forceinline__ void multiply(float& d0, float& d1, float& d2, float& d3, const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
    mma_m16n8k16<Element<B>>(d0, d1, d2, d3, a, b0, b1);
  }
  // Reads an A operand of 16 rows.
  static __device__ __forceinline__ void read(uint32_t (&a)[4], SharedAddress from) { ldmatrix_x4<false>(a, from); }
  // Rounds adjacent elements of a row of P and packs them into one register.
  static __device__ __forceinline__ uint32_t pack_p(const float* x) { return pack<Element<B>>(x[0], x[1]); }
  // O += P @ V for the keys of a step   [16 * M_TILES][Dv] per warp
  static __device__ __forceinline__ void pv(MmaSums<B>& O, const MmaStepOfP<B>& p, const Element<B>* V_s, int step,
                                            int lane) {
    const SharedAddress lane_address = shared_address(V_s + tile_offset<B, B::d_v>(lane % 16, lane / 16 * 8));
    SDPA_UNROLL for (int n = 0; n < B::d_v / 16; n++) {
      uint32_t v[4];
      ldmatrix_x4<true>(v, tile_step<B, B::d_v>(lane_address, 16 * step, 16 * n));
      multiply_columns<MmaHalves>(O, n, p, v);
    }
  }
};
template <class B> struct MmaE4m3;          // multiplies e4m3
template <class B> struct MmaE4m3AsHalves;  // converts e4m3 to fp16 in registers
template <class B> struct MmaMixedTypes;    // converts e4m3: K to the type of Q, V to fp16
template <class B>
using MmaOperands = std::conditional_t<
    B::q_type != B::kv_type, MmaMixedTypes<B>,
    std::conditional_t<B::product_type != B::tile_type, MmaE4m3AsHalves<B>,
                       std::conditional_t<B::product_type == DType::e4m3, MmaE4m3<B>, MmaHalves<B>>>>;
// Q of a warp, as A operands. The first KEPT steps stay in registers, as many as fit in addition to O and S. The
// other steps are read from shared memory at each use.
template <class B> struct MmaQueries {
  static constexpr int M_TILES = MmaSums<B>::M_TILES, STEPS = B::head_dim / MMA_K<B>;
  static constexpr int O_AND_S = M_TILES * (B::d_v + B::block_n) / 2;  // registers of O and S
  static constexpr int REGISTERS = MmaOperands<B>::REGISTERS;
  static constexpr int BUDGET = 184;  // registers of a thread for O, S and Q
  static constexpr int ROOM = O_AND_S < BUDGET ? (BUDGET - O_AND_S) / (REGISTERS * M_TILES) : 0;
  static constexpr int KEPT = ROOM < STEPS ? ROOM : STEPS;
  uint32_t kept[KEPT ? KEPT : 1][M_TILES][REGISTERS];
  SharedAddress lane_address;  // the lane's address in the first 16 rows and MMA_K columns

  __device__ void read(uint32_t (&a)[M_TILES][REGISTERS], int step) const {
    SDPA_UNROLL for (int m = 0; m < M_TILES; m++) {
      MmaOperands<B>::read(
          a[m], tile_step<B, B::d_q>(lane_address, 16 * m,
                                     B::q_type != B::kv_type ? 2 * MMA_K<B> * step : MMA_K<B> * step));
    }
  }
  // Call it after Q has been copied to Q_s.
  __device__ void start(const Element<B>* Q_s, int warp, int lane) {
    lane_address =
        shared_address(Q_s + (B::q_type != B::kv_type
                                  ? tile_offset<B, B::d_q>(warp * 16 * M_TILES + lane / 4, lane % 4 * 8)
                                  : tile_offset<B>(warp * 16 * M_TILES + lane % 16, lane / 16 * CHUNK<B>)));
    SDPA_UNROLL for (int step = 0; step < KEPT; step++) read(kept[step], step);
  }
};

// The state of a warp's rows: O, m and l over the tiles so far, and P of the latest tile.
template <class B> struct MmaRows {
  using Scores = MmaAccumulator<B, B::block_n>;
  using Sums = MmaSums<B>;
  static constexpr int ROWS = Sums::ROWS;
  static constexpr int STEPS = B::block_n / MmaOperands<B>::KEYS;
  static constexpr int COLS = MmaOperands<B>::KEYS / 4;  // columns of S per thread and step
  // ---- state of the work item ----
  Sums O;
  float m[ROWS], l[ROWS];
  float q_descale[B::has_row_descale ? ROWS : 1];  // of the rows' heads
  bool keeps_max;  // USE_LAZY_MAX: all rows of the warp may keep m as a stale maximum
  // ---- state of the tile ----
  MmaStepOfP<B> P[STEPS];

  __device__ void start(int first_row, int first_col) {
    O.first_row = first_row;
    O.first_col = first_col;
    keeps_max = false;
    clear(O);
    SDPA_UNROLL for (int i = 0; i < ROWS; i++) {
      m[i] = -INFINITY;
      l[i] = 0;
    }
  }

  // Rounds P of a step and packs it into A operands. Each lane holds the same elements in the accumulators and
  // in the A operands, so no data moves between lanes.
  __device__ void pack_operands(const Scores& S, int step) {
    SDPA_UNROLL for (int m = 0; m < O.M_TILES; m++) {
      SDPA_UNROLL for (int i = 0; i < 4; i++) {
        P[step][m][i] = MmaOperands<B>::pack_p(&S.x[2 * m + i % 2][COLS * step + COLS / 2 * (i / 2)]);
      }
    }
  }

  // S = Q @ K.T   [16 * M_TILES][BLOCK_N] per warp
  __device__ void multiply_qk(Scores& S, const MmaQueries<B>& Q, const Element<B>* K_s, int lane) {
    // An ldmatrix of 16 keys and MMA_K elements of d reads b0 and b1 for two groups of 8 columns.
    const int key = lane / 16 * 8 + lane % 8, d = lane / 8 % 2 * CHUNK<B>;
    const SharedAddress lane_address = shared_address(K_s + tile_offset<B>(key, d));
    S.first_row = O.first_row;
    S.first_col = O.first_col;
    clear(S);
    SDPA_UNROLL for (int step = 0; step < Q.STEPS; step++) {
      uint32_t q[Scores::M_TILES][MmaOperands<B>::REGISTERS];
      if (step < Q.KEPT) memcpy(q, Q.kept[step], sizeof q);
      else Q.read(q, step);
      SDPA_UNROLL for (int n = 0; n < B::block_n / 16; n++) {
        uint32_t k[4];
        ldmatrix_x4<false>(k, tile_step<B>(lane_address, 16 * n, MMA_K<B> * step));
        multiply_columns<MmaOperands<B>>(S, n, q, k);
      }
    }
    if constexpr (B::has_row_descale) scale_rows(S, q_descale);
  }
  // Computes P of the unmasked tile at key k0 with the stale maximum. Returns false if P is unusable because the
  // stale maximum was too small.
  __device__ bool compute_p_by_stale_max(const MmaQueries<B>& Q, const Element<B>* K_s, const ItemScales<B>& scales,
                                         const Item<B>& item, const Mask& mask, int q0, int k0, int lane) {
    Scores S;
    multiply_qk(S, Q, K_s, lane);
    ScoreTile<B> tile{scales.a, item, mask, q0, k0, scales.hook_scale()};
    StaleSoftmax<B, ROWS> softmax(m, scales);
    bool are_logits = false;
    SDPA_UNROLL for (int step = 0; step < STEPS; step++) {
      exp_by_stale_max<B>(S, COLS * step, COLS * (step + 1), softmax, tile, are_logits);
      pack_operands(S, step);
    }
    return softmax.add_to(l);
  }
  // Computes P of the tile at key k0 with the new row max; rescales O and l. unmasked: the tile needs no mask.
  __device__ void compute_p_by_exact_max(const MmaQueries<B>& Q, const Element<B>* K_s, const ItemScales<B>& scales,
                                         const Item<B>& item, const Mask& mask, int q0, int k0, bool unmasked,
                                         int lane) {
    Scores S;
    multiply_qk(S, Q, K_s, lane);
    finish_item_scores<B>(S, scales.a, item, mask, q0, k0, unmasked);
    float alpha[ROWS];
    softmax_max<B>(S, scales.scale_log2(), m, alpha);
    const bool may_be_kept = softmax_sum<B>(S, scales.scale_log2(), m, alpha, l);
    if (B::use_lazy_max) keeps_max = __all_sync(0xffffffffu, may_be_kept);
    scale_rows(O, alpha);
    SDPA_UNROLL for (int step = 0; step < STEPS; step++) pack_operands(S, step);
  }

  // Stores the partial of this split.
  __device__ void store(MmaPartial<B>& partial, int tid) const {
    SDPA_UNROLL for (int i = 0; i < ROWS; i++) {
      st_shared(&partial.m_l[i][tid], float2{m[i], l[i]});
      SDPA_UNROLL for (int j = 0; j < O.COLS; j++) st_shared(&partial.O[i][j][tid], O.x[i][j]);
    }
  }

  // Merges O, m and l with the partials of the other splits.
  template <int OTHERS> __device__ void merge(const MmaPartial<B> (&others)[OTHERS], float scale_log2, int tid) {
    SDPA_UNROLL for (int i = 0; i < ROWS; i++) {
      float2 m_l[OTHERS + 1] = {{m[i], l[i]}};
      float weight[OTHERS + 1];
      SDPA_UNROLL for (int n = 0; n < OTHERS; n++) { m_l[n + 1] = ld_shared<float2>(&others[n].m_l[i][tid]); }
      merge_weights<B>(m_l, scale_log2, weight, m[i], l[i]);
      SDPA_UNROLL for (int j = 0; j < O.COLS; j++) {
        O.x[i][j] *= weight[0];
        SDPA_UNROLL for (int n = 0; n < OTHERS; n++) {
          O.x[i][j] = fmaf(ld_shared<float>(&others[n].O[i][j][tid]), weight[n + 1], O.x[i][j]);
        }
      }
    }
  }
};

// O of a warp, as runs of adjacent columns for wide stores. The accumulators have runs of 2, which are
// rearranged to runs of 8 if Dv is a multiple of 32. Accumulators with an 8-bit V have runs of 4.
template <class B>
using MmaRuns = QuadRuns<MmaSums<B>::ROWS, B::d_v, sizeof(Element<B>) == 1 ? 4 : B::d_v % 32 ? 2 : 8>;

// Rearranges O from accumulators to runs. The 4 lanes of a row exchange pairs of columns twice. Lane q
// then has columns 8q to 8q + 7 of every 32.
template <class B>
__device__ __forceinline__ void rearrange_runs(MmaRuns<B>& R, const MmaSums<B>& O, int lane) {
  const int q = lane % 4;
  R.first_row = O.first_row;
  R.first_col = q * R.RUN;
  if constexpr (MmaRuns<B>::RUN != 8) {
    memcpy(R.x, O.x, sizeof R.x);
  } else {
    SDPA_UNROLL for (int i = 0; i < R.ROWS; i++) {
      SDPA_UNROLL for (int j = 0; j < R.COLS; j += 8) {
        // A 4x4 transposition: pairs[t] of lane q has columns 8t + 2q and 8t + 2q + 1 before, and columns
        // 8q + 2t and 8q + 2t + 1 afterwards. Each step exchanges one bit of t with the same bit of q.
        float pairs[4][2];
        memcpy(pairs, &O.x[i][j], sizeof pairs);
        SDPA_UNROLL for (int step = 1; step <= 2; step *= 2) {
          const bool odd = q & step;
          SDPA_UNROLL for (int t = 0; t < 4; t++) {
            if (t & step) continue;
            SDPA_UNROLL for (int e = 0; e < 2; e++) {
              float& lower = pairs[t][e];
              float& upper = pairs[t + step][e];
              const float received = __shfl_xor_sync(0xffffffffu, odd ? lower : upper, step);
              (odd ? lower : upper) = received;
            }
          }
        }
        memcpy(&R.x[i][j], pairs, sizeof pairs);
      }
    }
  }
}

// ---- 5b the kernel (mma) ----

// Reads the descale factor of each row of Q; see section 5i.
template <class B>
__device__ __forceinline__ void read_q_descale(MmaRows<B>& rows, const KernelArgs& a, const Item<B>& item);
// Stores O / l and LSE, or a partial if sdpa_merge() merges the item's ranges; see section 5i.
template <class B, class View, class Rows>
__device__ __forceinline__ void store_result(const View& O, const Rows& m, const Rows& l, const KernelArgs& a,
                                             const Item<B>& item);

template <class B> __global__ void __launch_bounds__(B::threads, 1) sdpa_mma(const __grid_constant__ KernelArgs a) {
  const SdpaParams& p = a.p;
  MmaShared<B>& s = dynamic_shared<MmaShared<B>>();
  const int split = B::split_kv == 1 ? 0 : threadIdx.x / B::split_threads;
  const int tid = B::split_kv == 1 ? threadIdx.x : threadIdx.x % B::split_threads;
  const int warp = tid / 32, lane = tid % 32;
  constexpr int WARP_ROWS = B::block_m / B::split_warps;

  const Item<B> item = item_of_cta<B>(a);
  if (!item.exists()) return;
  const ItemTiles<B> t(a, item, split, tid);
  if constexpr (B::pack_gqa) {
    MmaPacked<B>::copy_q(s, t, a);
  } else {
    t.template copy_q<B::block_m, B::threads>(s.in.Q, 0, threadIdx.x);
  }
  if (threadIdx.x == 0) s.item = item;
  VectorCopy<B::use_cp_async>::commit();
  CopyTogether<B, typename MmaShared<B>::Tiles> pipeline(s.in.split[split], t);
  VectorCopy<B::use_cp_async>::template wait<B::stages - 1>();
  __syncthreads();  // hazard: Q was copied by all warps, s.item was written by thread 0
  MmaQueries<B> Q;
  MmaRows<B> rows;
  const ItemScales<B> scales(a, item);
  // The first query of the warp; PACK_GQA: of the item. With a mask, some warps skip tiles that other warps
  // of the CTA compute.
  const int q = item.q0 + (B::pack_gqa ? 0 : warp * WARP_ROWS);
  Q.start(s.in.Q, warp, lane);
  rows.start(warp * WARP_ROWS + lane / 4, lane % 4 * 2);
  if constexpr (B::has_row_descale) read_q_descale(rows, a, s.item);
  // SPLIT_KV: all splits take part in all rounds, though a split may have no tile in the last one.
  for (int round_k0 = t.keys.begin; round_k0 < t.keys.end; round_k0 += B::round_keys) {
    const int k0 = round_k0 + split * B::block_n;
    const int stage = pipeline.acquire(k0);
    if (q < item.query_count(p) && k0 < t.keys.end && t.mask.tiles.touch(q, k0) &&
        (!B::has_key_bits || KeyBits<B>(a, item.b, k0).any())) {
      const bool unmasked = is_unmasked<B>(a, t.mask, q, k0);
      const Element<B>* const K_s = s.in.split[split].K[stage];
      const Element<B>* const V_s = s.in.split[split].V[stage];
      bool done = false;
      if (B::use_lazy_max && rows.keeps_max && unmasked) {
        done = rows.compute_p_by_stale_max(Q, K_s, scales, s.item, t.mask, s.item.q0, k0, lane);
      }
      if (!done) rows.compute_p_by_exact_max(Q, K_s, scales, s.item, t.mask, s.item.q0, k0, unmasked, lane);
      SDPA_UNROLL for (int n = 0; n < rows.STEPS; n++) MmaOperands<B>::pv(rows.O, rows.P[n], V_s, n, lane);
    }
    pipeline.release();
  }

  SDPA_UNROLL for (int i = 0; i < rows.ROWS; i++) rows.l[i] = row_sum<MmaSums<B>::LANES>(rows.l[i]);
  if constexpr (B::pack_gqa && !merges_by_kernel<B>) {
    MmaPacked<B>::store(s, rows, a, split, lane);
  } else {
    if constexpr (B::split_kv > 1) {
      __syncthreads();  // hazard: other warps still read Q, K and V, which the partials overwrite
      if (split > 0) rows.store(s.partial[split - 1], tid);
      __syncthreads();  // hazard: the partials were written
      if (split > 0) return;
      rows.merge(s.partial, scales.scale_log2(), tid);
    }
    MmaRuns<B> runs;
    rearrange_runs<B>(runs, rows.O, lane);
    store_result(runs, rows.m, rows.l, a, s.item);
  }
}

template <class B> struct KernelOf<B, KernelKind::mma> {
  using Shared = MmaShared<B>;
  static constexpr auto entry = sdpa_mma<B>;
};

// ---- 5c instructions of sm_90a (wgmma) ----
// TMA and wgmma access shared memory through the async proxy; ordinary loads and stores use the generic
// proxy. A generic write requires fence_proxy_async() before an async access to the same data. A generic read after
// a TMA load only requires the wait for its mbarrier.

#ifndef SDPA_SIMT

#if USE_WGMMA
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "the wgmma kernel needs an H100 or H200; type -gencode arch=compute_90a,code=sm_90a"
#endif
#endif  // USE_WGMMA

// Reads threadIdx.x again, so that values computed from it need not stay in registers.
__device__ __forceinline__ uint32_t mov_tid_x() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// Stores 16 bytes with one instruction. nvcc may split a plain store whose words are computed separately.
__device__ __forceinline__ void st_global_v4(void* dst_g, uint4 value) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(dst_g), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

// Arrives once for the warp, after all its lanes have reached this point. elect.sync chooses the lane that
// arrives, so no register has to hold its index.
__device__ __forceinline__ void arrive_by_warp(uint64_t* barrier_s) {
  asm volatile("{ .reg .pred p; bar.warp.sync -1; elect.sync _|p, -1; @p mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::
                   "r"(shared_address(barrier_s)) : "memory");
}
// Arrives, and announces how many bytes asynchronous copies have to transfer before the phase completes.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier_s, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier_s)), "r"(bytes)
               : "memory");
}
// True if the phase of this parity is complete. The hardware may suspend the thread for a limited time.
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint64_t* barrier_s, int parity) {
  uint32_t complete;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
      "selp.b32 %0, 1, 0, p; }"
      : "=r"(complete)
      : "r"(shared_address(barrier_s)), "r"(parity)
      : "memory");
  return complete;
}
// mbarrier_test_wait_parity() for a poll outside a loop: the CPU backend lets other threads run in
// mbarrier_test_wait_parity(), but not here.
__device__ __forceinline__ bool mbarrier_peek_parity(uint64_t* barrier_s, int parity) {
  return mbarrier_test_wait_parity(barrier_s, parity);
}
// Makes the mbarriers that this thread initialized visible to the async proxy.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Makes this thread's writes to shared memory visible to the async proxy.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// TMA copies a box of a tensor. The tensor map describes the tensor, the box and the swizzle in shared
// memory; c has the coordinates of the box, innermost first. Out-of-bounds elements are read as zeros and are
// not written.

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Called by one thread. The mbarrier counts all bytes of the box, including out-of-bounds elements.
__device__ __forceinline__ void cp_async_bulk_tensor_load(void* dst_s, const CUtensorMap* map, const int (&c)[5],
                                                          uint64_t* barrier_s, uint64_t cache_policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(shared_address(dst_s)),
      "l"(map), "r"(shared_address(barrier_s)), "l"(cache_policy), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4])
      : "memory");
}
// Called by one thread, which must also commit and wait.
__device__ __forceinline__ void cp_async_bulk_tensor_store(const CUtensorMap* map, const int (&c)[5],
                                                           const void* src_s) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], "
      "[%1];" ::"l"(map),
      "r"(shared_address(src_s)), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4])
      : "memory");
}
__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all but the latest N groups of this thread's stores have read shared memory.
template <int N> __device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// wgmma: asynchronous matrix products of a warpgroup, which is threads 128w to 128w + 127 of the CTA. The order
// is fence, products, commit, wait. From the first product until the wait, no thread may access the
// accumulators or the registers of A, or write the operands in shared memory.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N of the latest groups are pending.
template <int N> __device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from moving uses of these registers across this point.
template <int N> __device__ __forceinline__ void hold(float (&d)[N]) {
  SDPA_UNROLL for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N> __device__ __forceinline__ void hold(uint32_t (&r)[N]) {
  SDPA_UNROLL for (int i = 0; i < N; i++) asm volatile("" : "+r"(r[i])::"memory");
}
// Declares the values of these registers dead. The registers are free until they are written again.
template <int N> __device__ __forceinline__ void forget(float (&d)[N]) {
  SDPA_UNROLL for (int i = 0; i < N; i++) asm volatile("" : "=f"(d[i])::"memory");
}

// The descriptor of a matrix in shared memory with the 128-byte swizzle, which XORs bits 4-6 of an
// address with bits 7-9. The matrix consists of atoms of 8 lines of 128 bytes, aligned to 1024 bytes.
//
//   K-major   A line is part of a row; each wgmma reads 32 bytes of it. stride_bytes is the distance from 8
//             rows to the next 8. leading_bytes is ignored.
//   MN-major  16-bit types: a line has 64 rows or columns at one k. stride_bytes is the distance from 8 k to
//             the next 8. leading_bytes is the distance from 64 rows or columns to the next 64.
//
// stride_bytes = 512 selects the 64-byte swizzle, which XORs bits 4-5 with bits 7-8. Lines then have 64 bytes
// and atoms 512.
__device__ __forceinline__ uint64_t wgmma_descriptor(SharedAddress start, int leading_bytes, int stride_bytes) {
  return uint64_t((start & 0x3ffff) >> 4) | uint64_t(leading_bytes >> 4) << 16 | uint64_t(stride_bytes >> 4) << 32 |
         uint64_t(stride_bytes == 512 ? 2 : 1) << 62;
}

// D = A @ B (+ D if accumulate), [64][16] @ [16][N], with A and B in shared memory:
//
//   D  lane 4g + q of warp w has in d[i] row 16w + g + 8 * (i / 2 % 2), column 8 * (i / 4) + 2q + i % 2
//   A  [64][16] (K-major); with TRANS_A [16][64] (MN-major)
//   B  [N][16] (K-major); with TRANS_B [16][N] (MN-major)
//
// For E = __nv_fp8_e4m3, there are 32 k instead of 16, A and B are K-major, and sums are truncated to 14 bits.
template <class E, int N, int TRANS_B, int TRANS_A = 0>
__device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate);
// wgmma_ss() with A in registers. In lane 4g + q of warp w, a[0] and a[2] are in row 16w + g, a[1] and a[3] in
// row 16w + g + 8. a[0] and a[1] hold k = 2q and 2q + 1, a[2] and a[3] hold k = 2q + 8 and 2q + 9. For e4m3 they
// hold k = 4q to 4q + 3 and k = 4q + 16 to 4q + 19.
template <class E, int N, int TRANS_B>
__device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate);

// Called by all warps of a warpgroup. setmaxnreg_dec() releases the registers above N per thread to the CTA.
// setmaxnreg_inc() waits until N per thread are available. CTAS: CTAs per SM of the launch bounds, for the
// CPU backend.
template <int N, int CTAS = 1> __device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N, int CTAS = 1> __device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// Stores four 8x8 matrices of 16-bit elements: the reverse of ldmatrix_x4<TRANS>.
template <bool TRANS> __device__ __forceinline__ void stmatrix_x4(SharedAddress row, const uint32_t (&r)[4]) {
  if constexpr (TRANS) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
  }
}

// Programmatic dependent launch: the first function waits for the preceding grid, the second lets the next
// grid start.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- 5c instructions for tensor maps (wgmma and SWAP_AB) ----

// hold() for the address of a tensor map.
__device__ __forceinline__ void hold(const CUtensorMap*& map) { asm volatile("" : "+l"(map)::"memory"); }
#endif  // SDPA_SIMT

// ---- 5c wgmma: shared by its kernels (wgmma) ----
// If D is a multiple of 64, a 16-bit tile in shared memory consists of D/64 panels of [rows][64]; a line has
// 128 bytes. TMA and wgmma swizzle the 16-byte chunks of each line:
//
//   line 0 (8, 16, ...)   0 1 2 3 4 5 6 7        line 2   2 3 0 1 6 7 4 5
//   line 1 (9, 17, ...)   1 0 3 2 5 4 7 6        line r   chunk c at c ^ r % 8

// Layout of an accumulator: 64 rows per warpgroup, 16 per warp w. In each group of 8 columns, lane 4g + q has these
// elements, in the order of the instruction:
//
//   column            0 1    2 3    4 5    6 7   |  8 9  ...
//   row 16w + g       q = 0  q = 1  q = 2  q = 3 |           d[0] d[1]  |  d[4] d[5]  ...
//   row 16w + g + 8                              |           d[2] d[3]  |  d[6] d[7]  ...
struct WgmmaView {
  static constexpr int ROWS = 2, LANES = 4;
  static constexpr int RUN = 2;
};
template <int WIDTH> struct WgmmaAccumulator : WgmmaView {  // [64][WIDTH]
  static constexpr int COLS = WIDTH / 4;
  struct Elements {
    float d[WIDTH / 2];
    struct Row {
      float* first;
      __device__ float& operator[](int j) const { return first[4 * (j / 2) + j % 2]; }
    };
    __device__ Row operator[](int i) const { return {const_cast<float*>(d) + 2 * i}; }
  };
  Elements x;
  int first_row, first_col;
  __device__ int row(int i) const { return first_row + 8 * i; }
  __device__ int col(int j) const { return first_col + j / 2 * 8 + j % 2; }
};

// Layout of a tile with BYTES bytes per row: panels with lines of 128 bytes, or of 64 if 128 does not divide ROW_BYTES.
template <int BYTES> constexpr int ROW_BYTES = ceil_div(BYTES, 64) * 64;  // with padding, which TMA zero-fills
template <int BYTES> constexpr int PANEL_BYTES = ROW_BYTES<BYTES> % 128 ? 64 : 128;
template <int BYTES> constexpr int PANELS = ROW_BYTES<BYTES> / PANEL_BYTES<BYTES>;
template <int BYTES> constexpr int PANEL_ATOM = 8 * PANEL_BYTES<BYTES>;  // swizzle atom: 8 lines of a panel
constexpr int STEP_BYTES = 32;  // bytes of a row of A per wgmma instruction

// Offset in bytes of (row, byte) in a tile whose panels have ROWS lines of LINE bytes.
template <int ROWS, int LINE = 128> __device__ __forceinline__ uint32_t panel_byte(uint32_t row, uint32_t byte) {
  const uint32_t chunk = swizzled<LINE / 16>(row, byte / 16 % (LINE / 16));
  return (byte / LINE * ROWS + row) * LINE + chunk * 16 + byte % 16;
}
// Offset in elements of (row, column) in a 16-bit tile whose panels have ROWS lines of LINE bytes.
template <int ROWS, int LINE = 128> __device__ __forceinline__ uint32_t panel_offset(uint32_t row, uint32_t column) {
  return panel_byte<ROWS, LINE>(row, column * 2) / 2;
}

// Waits until the phase with this parity completes. The hardware may suspend the thread meanwhile.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier_s, int parity) {
  while (!mbarrier_try_wait_parity(barrier_s, parity)) {
  }
}

// The tensor maps. As a template it delays the lookup of members that other families do not have.
template <class B> __device__ __forceinline__ const auto& tensor_maps(const KernelArgs& a) { return a.maps; }

// Descriptor of the matrix that begins `bytes` later. The sum does not overflow the address field.
__device__ __forceinline__ uint64_t descriptor_at(uint64_t descriptor, int bytes) {
  return (descriptor & ~uint64_t(0xffffffff)) | uint32_t(uint32_t(descriptor) + bytes / 16);
}

// Rounds 16 columns of P to an A operand. Accumulators and A operands have the same lane layout.
template <class E, class View> __device__ __forceinline__ void pack_step(uint32_t (&out)[4], const View& P, int step) {
  SDPA_UNROLL for (int i = 0; i < 4; i++) out[i] = pack<E>(P.x.d[8 * step + 2 * i], P.x.d[8 * step + 2 * i + 1]);
}
// Waits for the preceding kernel, then lets the next one start. Letting it start before the wait is up to 5% slower.
__device__ __forceinline__ void wait_then_let_next_kernel_start() {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
}

// L2 cache policies of loads. Q is read once, with SPLIT_CTAS once per range. K and V are read by many CTAs, with
// SWAP_AB and PACK_GQA usually by one.
constexpr uint64_t evict_first = 0x12f0000000000000, evict_last = 0x14f0000000000000;
template <class B> constexpr bool reads_kv_once = B::swap_ab && B::pack_gqa;
template <class B> constexpr uint64_t kv_cache_policy = reads_kv_once<B> ? evict_first : evict_last;

// True if a producer warp stores O from shared memory by TMA; otherwise the consumers store O.
template <class B>
constexpr bool stores_by_tma =
    (B::kernel == KernelKind::wgmma_roles || B::kernel == KernelKind::wgmma_converting) && B::split_kv == 1 &&
    B::split_ctas == 1;

// Starts the TMA load of ROWS rows of D elements at coordinates c, as one box. BY_PANELS: one box per panel.
// Rows shorter than D are also loaded panel by panel, so that TMA zero-fills the end of each row.
template <int D, int ELEMENT_BYTES, int ROWS, bool BY_PANELS = false>
__device__ __forceinline__ void load_rows(const KernelArgs& a, void* to_s, const CUtensorMap* map, const int (&c)[5],
                                          uint64_t* full, uint64_t cache_policy) {
  constexpr int bytes = D * ELEMENT_BYTES, line = PANEL_BYTES<bytes>;
  for (int n = 0; n < (BY_PANELS || a.has_short_rows ? PANELS<bytes> : 1); n++) {
    const int panel_origin[5] = {n * line / ELEMENT_BYTES, c[1], c[2], c[3], c[4]};
    unsigned char* const panel_s = reinterpret_cast<unsigned char*>(to_s) + n * ROWS * line;
    cp_async_bulk_tensor_load(panel_s, map, panel_origin, full, cache_policy);
  }
}
// Starts the TMA load of ROWS rows of Q, from query q of the item on. PACK_GQA: rows of all heads of the item.
template <class B, int ROWS>
__device__ __forceinline__ void load_rows_of_q(const KernelArgs& a, Element<B>* Q_s, const CUtensorMap* map,
                                               const Item<B>& item, int q, uint64_t* full) {
  const int row = item.q_row(q), b = item.batch(a.p.q_starts), h = item.h;
  const int box_origin[5] = {0, row, B::pack_gqa ? h : 0, B::pack_gqa ? 0 : h, b};
  load_rows<B::head_dim, B::element_bytes, ROWS, B::pack_gqa>(a, Q_s, map, box_origin, full, evict_first);
}

// Waits until a tile of K or V has landed, unless `has_landed`. Called by the threads that then issue wgmma.
template <class B>
__device__ __forceinline__ void wait_for_tile(uint64_t* full, int parity, bool has_landed = false) {
  if (!has_landed) mbarrier_wait(full, parity);
  if (B::copies_rows) fence_proxy_async();  // cp.async wrote by the generic proxy, wgmma reads by the async proxy
}

// Number of warps that copy a K or V tile together. Each arrives once at the tile's mbarrier.
template <class B>
constexpr int copying_warps = !B::copies_rows                             ? 1
                              : B::kernel == KernelKind::wgmma_transposed ? 4
                              : B::kernel == KernelKind::wgmma_converting ? 4
                              : B::kernel == KernelKind::wgmma_roles      ? 2 / B::split_kv
                                                                          : 1;

// Copies a tile of K or V, from key k0 on, by one warp; lane 0 issues the load. Rows past the end of the
// tensor are zero-filled.
template <class B, int D, bool = B::use_pages != 0> struct TileBox {
  int box_origin[5];  // coordinates in the tensor map

  __device__ __forceinline__ TileBox(const KernelArgs& a, const Item<B>& item, int h_kv, int k0)
      : box_origin{0, item.k_row(k0), 0, h_kv, item.batch(a.p.k_starts)} {}
  __device__ __forceinline__ void load(const KernelArgs& a, const CUtensorMap* map, KeyValue* to_s,
                                       uint64_t* full) const {
    if (threadIdx.x % 32 > 0) return;
    if (B::kernel != KernelKind::wgmma_plain && a.mask.keys.Sk == 0) {
      return mbarrier_arrive(full);  // all scores of this tile are masked
    }
    mbarrier_arrive_expect_tx(full, B::block_n * ROW_BYTES<D * B::kv_bytes>);
    load_rows<D, B::kv_bytes, B::block_n>(a, to_s, map, box_origin, full, kv_cache_policy<B>);
  }
};
template <class B> struct RowPages;         // the pages of the rows that a warp copies
template <class B, int D> struct TileRows;  // copies rows of a tile by cp.async
template <class B, int D> using TileLoad = std::conditional_t<B::copies_rows, TileRows<B, D>, TileBox<B, D>>;

// Offset in bytes of the operand of wgmma number `step` in a tile of `rows` rows. A step is STEP_BYTES of
// each row.
template <int LINE> __host__ __device__ constexpr int panel_step(int step, int rows) {
  constexpr int steps = LINE / STEP_BYTES;  // per panel
  return step / steps * LINE * rows + step % steps * STEP_BYTES;
}

// Rows per panel of Q: 64, one warpgroup's. PACK_GQA: BLOCK_M, since one TMA box loads a panel of all heads.
template <class B> constexpr int Q_PANEL_ROWS = B::pack_gqa ? B::block_m : 64;

// Issues S = Q @ K.T of a warpgroup. Q [64][D] and K [BLOCK_N][D] are given as descriptors.   [64][BLOCK_N]
template <class B> __device__ __forceinline__ void wgmma_qk(WgmmaAccumulator<B::block_n>& S, uint64_t Q, uint64_t K) {
  forget(S.x.d);
  wgmma_fence();
  constexpr int line = PANEL_BYTES<B::qk_bytes>;
  SDPA_UNROLL for (int step = 0; step < B::qk_bytes / STEP_BYTES; step++) {
    wgmma_ss<Element<B>, B::block_n, 0>(S.x.d, descriptor_at(Q, panel_step<line>(step, Q_PANEL_ROWS<B>)),
                                        descriptor_at(K, panel_step<line>(step, B::block_n)), step > 0);
  }
  wgmma_commit_group();
}

// P of a tile, rounded: the A operands of P @ V.
template <class B> using WgmmaProbabilities = uint32_t[B::block_n * B::element_bytes / STEP_BYTES][4];
// e4m3: keys per panel of the transposed V [Dv][BLOCK_N], which are also the bytes of a line.
template <class B> constexpr int V_LINE = B::block_n > 64 ? 128 : 64;

// Issues O [64][Dv] = P @ V, or += if accumulate. V [BLOCK_N][Dv] is a descriptor. DTYPE=FP8_E4M3: V
// [Dv][BLOCK_N].
template <class B>
__device__ __forceinline__ void wgmma_pv(WgmmaAccumulator<B::d_v>& O, const WgmmaProbabilities<B>& P, uint64_t V,
                                         bool accumulate) {
  hold(O.x.d);
  wgmma_fence();
  SDPA_UNROLL for (int step = 0; step < B::block_n * B::element_bytes / STEP_BYTES; step++) {
    if constexpr (B::product_type == DType::e4m3) {
      const uint64_t V_step = descriptor_at(V, panel_step<V_LINE<B>>(step, B::d_v));
      wgmma_rs<Element<B>, B::d_v, 0>(O.x.d, P[step], V_step, step || accumulate);
    } else {
      wgmma_rs<Element<B>, B::d_v, 1>(O.x.d, P[step], descriptor_at(V, step * 16 * PANEL_BYTES<B::v_bytes>),
                                      step || accumulate);
    }
  }
  wgmma_commit_group();
}

// One thread prefetches the tensor maps, before the first TMA loads.
template <class B> __device__ __forceinline__ void prefetch_tensor_maps(const KernelArgs& a) {
  if (threadIdx.x != 64) return;
  prefetch_tensormap(&tensor_maps<B>(a).q);
  prefetch_tensormap(&tensor_maps<B>(a).k);
  prefetch_tensormap(&tensor_maps<B>(a).v);
}

// Zero-fills the rows in [begin, end) of a tile for which clears(row) is true. The tile has rows of BYTES bytes and
// panels of panel_rows rows.
template <int BYTES, class Clears>
__device__ __forceinline__ void clear_rows(void* tile_s, int panel_rows, int begin, int end, int thread, int threads,
                                           const Clears& clears) {
  constexpr int chunks = PANEL_BYTES<BYTES> / 16;  // per line
  for (int i = begin * chunks + thread; i < end * chunks; i += threads) {
    if (!clears(i / chunks)) continue;
    SDPA_UNROLL for (int n = 0; n < PANELS<BYTES>; n++) {
      st_shared(static_cast<uint4*>(tile_s) + n * panel_rows * chunks + i, uint4{});
    }
  }
}
// USE_LENGTHS: zero-fills the rows of V past the last key, since 0 * NaN is NaN. A fence of the async proxy must
// follow.
template <class B> __device__ __forceinline__ void clear_rows_of_v(void* V_s, int keys, int thread, int threads) {
  clear_rows<B::d_v * B::kv_bytes>(V_s, B::block_n, keys, B::block_n, thread, threads, [](int) { return true; });
}

// ---- 5c the plain kernel (wgmma and USE_WARP_SPECIALIZATION = 0 and SWAP_AB = 0) ----
//
//   start the loads of Q[g] for each warpgroup g, and of the first STAGES tiles
//   for each tile of BLOCK_N keys:
//     S = Q[g] @ K.T          64 rows per warpgroup; Q and K from shared memory
//     P, m, l = softmax(S)    in registers; rescales O to the new maximum
//     O = O + P @ V           P from registers, V from shared memory
//     wait until all warpgroups have read K and V; start the load of tile + STAGES into the same stage
//   O / l
//
// Per CTA: the item, Q, m, l and O. Per tile: the stage, S and P. All threads wait for q_full once and for
// full[stage] in every tile. The __syncthreads() at the end of a tile protects its K and V from the next load into
// the same stage.

template <class B> struct WgmmaPlainShared {
  alignas(1024) Element<B> Q[B::warpgroups][64 * B::head_dim];      // [64][D] each
  alignas(1024) Element<B> K[B::stages][B::block_n * B::head_dim];  // [BLOCK_N][D]
  alignas(1024) Element<B> V[B::stages][B::block_n * B::d_v];       // [BLOCK_N][Dv]
  uint64_t q_full, full[B::stages];                                 // mbarriers: the data has landed
};

// One warp starts the loads of K and V of a tile. The mbarrier of the stage completes when both have landed.
template <class B>
__device__ __forceinline__ void load_tile(WgmmaPlainShared<B>& s, const KernelArgs& a, int stage, int k0, int h_kv,
                                          const Item<B>& item) {
  TileLoad<B, B::head_dim>(a, item, h_kv, k0).load(a, &tensor_maps<B>(a).k, s.K[stage], &s.full[stage]);
  TileLoad<B, B::d_v>(a, item, h_kv, k0).load(a, &tensor_maps<B>(a).v, s.V[stage], &s.full[stage]);
}

template <class B>
__global__ void __launch_bounds__(B::threads, 1) sdpa_wgmma_plain(const __grid_constant__ KernelArgs a) {
  const SdpaParams& p = a.p;
  WgmmaPlainShared<B>& s = dynamic_shared<WgmmaPlainShared<B>>();
  const int tid = threadIdx.x, lane = tid % 32, warpgroup = warp_uniform(tid / 128);
  const Item<B> item = item_of_cta<B>(a);
  if (!item.exists()) return;
  const int h_kv = item.h / (p.Hq / p.Hkv);
  const Mask& mask = item.mask(a);
  const Interval keys = item.keys_of_cta(a, mask);
  const int tiles = ceil_div(keys.end - keys.begin, B::block_n);

  if (tid == 0) {
    mbarrier_init(&s.q_full, 1);
    mbarriers_init(s.full, 2);
    fence_mbarrier_init();
  }
  __syncthreads();  // hazard: mbarriers initialized by thread 0
  wait_then_let_next_kernel_start();
  if (tid == 0) {
    mbarrier_arrive_expect_tx(&s.q_full, sizeof s.Q);
    for (int g = 0; g < B::warpgroups; g++) {
      load_rows_of_q<B, 64>(a, s.Q[g], &tensor_maps<B>(a).q, item, item.q0 + 64 * g, &s.q_full);
    }
  }
  if (tid < 32) {
    for (int tile = 0; tile < min(tiles, B::stages); tile++) {
      load_tile(s, a, tile, keys.begin + tile * B::block_n, h_kv, item);
    }
  }

  WgmmaAccumulator<B::block_n> S;
  WgmmaAccumulator<B::d_v> O;
  S.first_row = O.first_row = warpgroup * 64 + tid % 128 / 32 * 16 + lane / 4;
  S.first_col = O.first_col = lane % 4 * 2;
  clear(O);
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};
  const uint64_t Q = wgmma_descriptor(warp_uniform(shared_address(s.Q[warpgroup])), 16, PANEL_ATOM<B::qk_bytes>);
  mbarrier_wait(&s.q_full, 0);

  for (int tile = 0; tile < tiles; tile++) {
    const int stage = tile % B::stages, k0 = keys.begin + tile * B::block_n;
    wait_for_tile<B>(&s.full[stage], tile / B::stages % 2);
    if (B::use_lengths && item.keys_in_tile(k0) < B::block_n) {
      clear_rows_of_v<B>(s.V[stage], item.keys_in_tile(k0), tid, B::threads);
      fence_proxy_async();
      __syncthreads();  // hazard: rows of V zero-filled by all warps
    }

    // S = Q @ K.T   [64][BLOCK_N]
    const uint64_t K = wgmma_descriptor(warp_uniform(shared_address(s.K[stage])), 16, PANEL_ATOM<B::qk_bytes>);
    wgmma_qk<B>(S, Q, K);
    wgmma_wait_group<0>();
    hold(S.x.d);

    // P, m, l = softmax(S); rescales O
    float alpha[2];
    finish_item_scores<B>(S, a, item, mask, item.q0, k0, is_unmasked<B>(a, mask, item.q0, k0));
    softmax_max<B>(S, a.scale_log2, m, alpha);
    softmax_sum<B>(S, a.scale_log2, m, alpha, l);
    scale_rows(O, alpha);
    WgmmaProbabilities<B> P;
    SDPA_UNROLL for (int step = 0; step < B::block_n / 16; step++) {
      pack_step<Element<B>>(P[step], S, step);
      hold(P[step]);
    }

    // O = O + P @ V   [64][Dv]
    const uint64_t V = wgmma_descriptor(warp_uniform(shared_address(s.V[stage])), B::block_n * PANEL_BYTES<B::v_bytes>,
                                        PANEL_ATOM<B::v_bytes>);
    wgmma_pv<B>(O, P, V, true);
    wgmma_wait_group<0>();
    hold(O.x.d);

    __syncthreads();  // hazard: K and V read by all warps
    if (tid < 32 && tile + B::stages < tiles) load_tile(s, a, stage, k0 + B::stages * B::block_n, h_kv, item);
  }

  SDPA_UNROLL for (int i = 0; i < 2; i++) l[i] = row_sum<O.LANES>(l[i]);
  store_result(O, m, l, a, item);
}

template <class B> struct KernelOf<B, KernelKind::wgmma_plain> {
  using Shared = WgmmaPlainShared<B>;
  static constexpr auto entry = sdpa_wgmma_plain<B>;
};

// ---- 5c work items and their rounds (wgmma) ----

struct ListFromMap;                    // refers to a list in the map
template <class B> struct ListByCta;   // refers to a list that the CTA has written to shared memory
template <class B> struct ListMemory;  // the contents of such a list
template <class B> constexpr bool may_have_list = lists_from_map<B> || lists_by_cta<B>;
template <class B>
using ListOf = std::conditional_t<lists_by_cta<B>, ListByCta<B>,
                                  std::conditional_t<lists_from_map<B>, ListFromMap, Nothing>>;

// USE_BIAS, MASK_MOD, USE_KEY_MASK: an item may have a list of its visible rounds. Then the kernel skips the hidden
// ones, so a NaN among their scores has no effect.
//
//   visible   a query of the item sees one of the round's keys, according to the score hook
//   hidden    not visible. The causal mask, the window and the last key do not count
//   changed   the score hook changes a score of the round, possibly to -inf; the hook skips the tiles of other rounds
//   entry     element of the list: 2 * the index of the round among all rounds, plus 1 if the round is changed
//
// sdpa_map() writes the lists of all items to global memory, before the attention kernel: the map.
// list_visible_rounds() writes the list of an item to shared memory, within the attention kernel. Consumer warps
// iterate over a list of either kind by RoundWalk.
__device__ __forceinline__ constexpr uint32_t make_entry(int number, uint32_t changed) { return 2 * number + changed; }
__device__ __forceinline__ constexpr int entry_number(uint32_t entry) { return int(entry / 2); }
__device__ __forceinline__ constexpr bool entry_changed(uint32_t entry) { return entry % 2; }

// A work item and its rounds; in each round, every split (SPLIT_KV) computes one tile of BLOCK_N keys. The
// last round is computed first. With a causal mask, the masked tiles then come first, and their row max
// suffices as the stale maximum of most other tiles. A round has up to two indices:
//   round   among the rounds that the item computes, 0 to rounds - 1; with a list, the position in the list
//   number  among all rounds of the item; it gives the keys. Without a list, it equals `round`
template <class B> struct alignas(16) WgmmaItem : Item<B>, ListOf<B> {
  int h_kv, first_key, rounds;  // zero rounds: no more items, or with SPLIT_CTAS an empty range
};
// First key of the tile of a split in a round of the item.
template <class B> __device__ __forceinline__ int first_key_of(const WgmmaItem<B>& item, int round, int split) {
  if constexpr (may_have_list<B>) round = entry_number(item.entry(round));
  return item.first_key + (round * B::split_kv + split) * B::block_n;
}
// If false, the item computes all of its rounds, and `round` equals `number`.
template <class B> __device__ __forceinline__ bool has_list(const KernelArgs& a, const WgmmaItem<B>& item) {
  if constexpr (B::has_key_bits) return !item.computes_all;
  return has_map<B>(a);
}

// USE_KEY_MASK, USE_BIAS=4, 5: sets tile.listed from the entry of the round in the item's list.
template <class B>
__device__ __forceinline__ void set_listed(ScoreTile<B>& tile, const WgmmaItem<B>& item, int round) {
  if constexpr (B::has_key_bits) {
    tile.listed = entry_changed(item.entry(round)) ? ListedTile::changed : ListedTile::unchanged;
  }
}

// skips_empty_warpgroups, with a mask or a map: the items of a head are shifted to earlier rows, by 64 rows for each
// warpgroup of the last item that would have no query. The warpgroups without queries are then in the first item,
// before query 0, and own_rounds() gives them no rounds. With a causal mask, the first item then loads fewer keys, and
// the last item loads all keys in any case.
// Example with a causal mask, Sq = 200 and BLOCK_M = 192: the shift is (2 * 192 - 200) / 64 * 64 = 128 rows.
//
//               queries of item 0               queries of item 1               keys loaded by items 0, 1
//   unshifted     0- 63   64-127  128-191  |  192-199  none     none            192, 200
//   shifted     none     none       0- 63  |   64-127  128-191  192-199          64, 200
template <class B> __device__ __forceinline__ int shifted_rows(int items_of_head, int Sq) {
  return (items_of_head * B::block_m - Sq) / 64 * 64;
}
// Shifts an item's rows. Sets its first key and number of rounds: at least one, since zero would mean that there are
// no more items.
template <class B> __device__ __forceinline__ void set_rounds(const KernelArgs& a, WgmmaItem<B>& item) {
  if (skips_empty_warpgroups<B> && !B::use_lengths) item.q0 -= shifted_rows<B>(int(a.q_blocks.divisor), a.p.Sq);
  const int last = min(item.q0 + queries_of_item<B>(a), a.p.Sq) - 1;
  Interval keys = item.mask(a).keys.of_rows(max(item.q0, 0), last);
  if constexpr (B::use_lengths) keys = item.keys_of_cta(a, item.mask(a));
  item.first_key = keys.begin;
  item.rounds = max(ceil_div(keys.end - keys.begin, B::round_keys), int(item.exists()));
}
template <class B> __device__ __forceinline__ WgmmaItem<B> wgmma_item(const KernelArgs& a, uint32_t i) {
  WgmmaItem<B> item;
  if (!B::use_lengths && a.unmasked_rounds > 0) {  // equals work_item(), but reads fewer arguments
    static_cast<Item<B>&>(item) = item_of_block<B>(a, a.q_blocks.divide(i), a.q_blocks.remainder(i));
    item.first_key = 0;
    item.rounds = a.unmasked_rounds;
  } else {
    static_cast<Item<B>&>(item) = work_item<B>(a, i);
    set_rounds<B>(a, item);
  }
  if (has_map<B>(a)) read_list_of_map(a, item);
  if (!B::use_lengths && B::split_ctas != 1) {
    const Interval range = range_of_rounds(a, item.rounds);
    item.first_key += range.begin * B::round_keys;
    item.rounds = range.end - range.begin;
  }
  item.h_kv = int(a.q_heads_per_kv.divide(item.h));
  return item;
}

// ---- 5c rows of Q without a query (wgmma) ----

// PACK_GQA: zero-fills the rows of Q past those of the item's heads. Their contents would affect the rounding of other
// rows, since a warp keeps a stale maximum only if all of its rows allow it.
template <class B> __device__ __forceinline__ void clear_rows_without_query(Element<B>* Q_s, const KernelArgs& a) {
  if (!B::pack_gqa) return;
  clear_rows<B::qk_bytes>(Q_s, B::block_m, rows_of_item<B>(a), B::block_m, threadIdx.x, B::threads,
                          [](int) { return true; });
  fence_proxy_async();
}
// batch_invariant: zero-fills the rows of Q past the last query of the sequence, among the tile's `rows` rows
// that begin at first_row. They belong to another sequence. They would affect the result, since a warp keeps
// a stale maximum only if all of its rows allow it. Returns true if the item has such rows; readers of Q must
// then wait for all calling threads.
template <class B>
__device__ __forceinline__ bool clear_queries_of_others(Element<B>* Q_s, int panel_rows, const KernelArgs& a,
                                                        const Item<B>& item, int first_row, int rows, int thread) {
  if (!a.p.batch_invariant || !item.ends_before(item.q0 + queries_of_item<B>(a))) return false;
  clear_rows<B::qk_bytes>(Q_s, panel_rows, 0, rows, thread, B::swap_ab ? B::threads : 128, [&](int row) {
    return query_of<B>(a, item.q0, first_row + row) >= item.query_count(a.p);
  });
  fence_proxy_async();
  return true;
}

// ---- 5c producers and consumers: shared by their kernels (wgmma and USE_WARP_SPECIALIZATION) ----
//
//   producer warps                              consumer warpgroups, 64 rows each
//   for each item:                              for each item:
//     wait q_empty;  load Q                       wait q_full
//     for each tile, the last key first:          for each tile, the last key first:
//       wait k_empty;  load K                       wait k_full;  S = Q @ K.T;  arrive at k_empty
//       wait v_empty;  load V                       P, m, l = softmax(S)
//   one warp, for each item:                        wait v_full;  O = O + P @ V;  arrive at v_empty
//     wait o_done;  store O;                      write O / l, rounded, over Q;  arrive at o_done
//     arrive at q_empty
//
// OVERLAP=1: Q @ K.T of the next tile is issued before P @ V. With persistent CTAs, the producers continue
// with the next item while the consumers compute; they load its Q early if shared memory has room for two.
// SPLIT_KV=2: two warpgroups compute two splits of the keys for the same rows. This helps if there are fewer
// items than SMs.
//
//   lifetime   state
//   CTA        the role of a warp; its rings, each a stage and a parity, which continue from item to item
//   item       s.item[stage of Q]; in WgmmaRows: O, m, l, the first query, the scale, the mask, and the range of keys
//              in which m may be used as the stale maximum
//   tile       k0, S, P, and the stage of its K and V
//
//   mbarrier          completed by                                 awaited by           signals that
//   q_full            the warp that starts the item, and TMA       all readers          Q and s.item were written
//   q_empty           the last readers of Q, or the warp           the warp that        Q and s.item were read, and
//                     that has stored O                            starts the item      O was stored
//   k_full, v_full    TMA, or the warps that wrote the tile        consumers            the tile was written
//   k_empty, v_empty  all consumer warps of the split              producers            the tile was read
//   o_done            the 4 warps of a warpgroup                   the warp storing O   O was written over Q

// Named barriers, and the number of threads that arrive or wait. Barrier 0 is __syncthreads(). w: a consumer
// warpgroup. q_read_barrier, or partials_barrier with two splits, also protects the rows of Q that clear_queries()
// zero-fills.
constexpr int turn_barrier = 1, turn_threads = 256;      // turn_barrier + w: w has issued, the next warpgroup may issue
constexpr int q_read_barrier = 5, q_read_threads = 128;  // q_read_barrier + w: all warps of w have read Q
constexpr int partials_barrier = 9;                      // the partials of both splits are in shared memory
template <class B> constexpr int partials_threads = B::warpgroups * 128;

template <class B> struct BiasTiles;     // USE_BIAS=1, 2, 3: the bias of the tiles of a split, in shared memory
template <class B> struct KeyBiasTiles;  // USE_BIAS=4, 5: the same
template <class B>
using TileBias =
    std::conditional_t<B::key_bias, KeyBiasTiles<B>, std::conditional_t<B::use_bias != 0, BiasTiles<B>, Nothing>>;

// The stages of a split's K and V tiles, and their mbarriers. full: the tile was written. empty: all consumers have
// read the tile.
template <class B, int V_ELEMENTS = (B::block_n * B::d_v)> struct TileRing {
  using E = Element<B>;
  alignas(1024) E K[B::stages][B::block_n * ROW_BYTES<B::qk_bytes> / sizeof(E)];  // [BLOCK_N][D]
  alignas(1024) E V[B::stages][V_ELEMENTS];                                       // [BLOCK_N][Dv]
  uint64_t k_full[B::stages], k_empty[B::stages], v_full[B::stages], v_empty[B::stages];
  // V of the item's last round has landed. Then its rows past the last key are zero-filled, and v_full completes.
  std::conditional_t<B::use_lengths, uint64_t, Nothing> last_v_landed;
  TileBias<B> bias;
  __device__ __forceinline__ void init_full(int k_arrivals, int v_arrivals) {
    mbarriers_init(k_full, k_arrivals);
    mbarriers_init(v_full, v_arrivals);
    if constexpr (B::use_lengths) mbarrier_init(&last_v_landed, 1);
  }
  __device__ __forceinline__ void init_empty() {
    mbarriers_init(k_empty, B::split_warps);
    mbarriers_init(v_empty, B::split_warps);
  }
  // Called by each consumer warp. Releases `tiles` stages without reading them, each after it is full.
  __device__ __forceinline__ void skip(StageRing<B::stages>& ring, int tiles) {
    for (; tiles > 0; tiles--, ring.advance()) {
      mbarrier_wait(&k_full[ring.stage], ring.parity);
      arrive_by_warp(&k_empty[ring.stage]);
      mbarrier_wait(&v_full[ring.stage], ring.parity);
      arrive_by_warp(&v_empty[ring.stage]);
    }
  }
};

// The partials that two splits of the same rows exchange. Split 0 finalizes rows 0-7 of each warp, split 1 rows
// 8-15. O[to]: the other split's O in the rows that split `to` finalizes, by thread.
template <class B> struct SplitPartial {
  float4 O[2][B::d_v / 16][128];
  float2 m_l[2][64];
  alignas(16) Output out[2][4][8][B::d_v + 8];  // O by split, warp, row; 8: padding against bank conflicts
};
template <class B>
using SplitPartials = std::conditional_t<(B::split_kv > 1), SplitPartial<B>[B::block_m / 64], Nothing>;

// CTAs per SM for the launch bounds, which limit the registers per thread. Without the limit, a kernel with a
// bias or a key mask and one consumer warpgroup would use more than half of the SM's registers. Only one CTA
// would fit, and it would mostly wait. COLUMNS: columns of S and O.
template <class B, int COLUMNS = B::block_n + B::d_v>
constexpr int ctas_by_registers = (B::use_bias == 0 && !(B::use_key_mask && B::kv_bytes == 2)) ||
                                          B::warpgroups > 1 || COLUMNS > 192  ? 1
                                  : COLUMNS > 128 || B::copies_rows           ? 2
                                                                              : 3;
// Registers per thread. All threads start with the same number, then producers release some to the consumers.
// setmaxnreg takes multiples of 8. A producer keeps PRODUCER registers, or PRODUCER_OF_MANY if there are three or four
// consumer warpgroups.
template <class B, int PRODUCER, int PRODUCER_OF_MANY = 32> struct WgmmaRegisters {
  static constexpr int at_launch = 65536 / ctas_by_registers<B> / B::threads / 8 * 8;
  static constexpr int producer = B::warpgroups > 2 ? PRODUCER_OF_MANY : PRODUCER;
  static constexpr int spare = at_launch * (B::warpgroups + 1) - producer;
  static constexpr int consumer = spare / B::warpgroups < 240 ? spare / B::warpgroups / 8 * 8 : 240;
  // False with one consumer warpgroup and one CTA per SM: the consumers have enough registers at launch.
  static constexpr bool redistributes = consumer > at_launch;
};

// USE_KEY_MASK, USE_BIAS=4, 5: number of lists in shared memory. With persistent CTAs: one per stage of Q and
// one for the next item. Otherwise: one per warp that loads or converts.
template <class B, int Q_STAGES>
constexpr int list_count = B::use_persistent_cta        ? Q_STAGES + 1
                            : B::tile_type != B::kv_type ? 4
                                                         : 2 * B::split_kv;
template <class B> struct ListedItem : WgmmaItem<B> { int all_rounds; };  // visible and hidden rounds
template <class B, int LISTS> struct ListsOfCta {
  ListMemory<B> of[LISTS];
  ListedItem<B> last;  // USE_PERSISTENT_CTA: the item whose list was written last
};
template <class B, int Q_STAGES>
using ListsInShared = std::conditional_t<B::has_key_bits, ListsOfCta<B, list_count<B, Q_STAGES>>, Nothing>;

enum WgmmaRole { idle = 0, load_k = 1, load_v = 2, store_o = 4 };  // tasks of a producer warp; bits

// A producer warp. Its state lives as long as the CTA and is equal in all lanes, except `issues`: lane 0
// issues the TMA copies. RING_STAGES: stages of the buffers that it loads into.
template <class B, class Shared, int RING_STAGES = B::stages> struct WgmmaProducer {
  Shared& s;
  const KernelArgs& a;
  const bool issues = threadIdx.x % 32 == 0;
  StageRing<RING_STAGES> ring;         // of the next tile
  StageRing<Shared::Q_STAGES> q_ring;  // of the next item
  // USE_LENGTHS: keys in the next tile of V, less than BLOCK_N only in an item's last round; parity of last_v_landed.
  int keys_in_next_v = B::block_n, landed_parity = 0;
  std::conditional_t<B::has_key_bits, StageRing<list_count<B, Shared::Q_STAGES>>, Nothing> list_ring;

  __device__ WgmmaProducer(Shared& s_, const KernelArgs& a_) : s(s_), a(a_) {}

  // Work item i; past the last one, an item with zero rounds.
  __device__ __forceinline__ WgmmaItem<B> find_item(uint32_t i) {
    if (B::use_persistent_cta && !B::use_lengths && i >= a.work_items) return {};
    if constexpr (B::has_key_bits) return find_listed_item(i);
    return wgmma_item<B>(a, i);
  }
  // USE_KEY_MASK, USE_BIAS=4, 5: work item i with a list of its visible rounds. Without persistent CTAs, each
  // warp writes its own list. With persistent CTAs, warp 0 writes the lists for all warps. When it lists the
  // next item, it has started the current one, so the consumers have finished the item that is Q_STAGES items
  // before the current one. Therefore Q_STAGES + 1 lists suffice.
  __device__ __forceinline__ WgmmaItem<B> find_listed_item(uint32_t i) {
    WgmmaItem<B> item = wgmma_item<B>(a, i);
    if (B::use_persistent_cta && warp_uniform(int(threadIdx.x)) >= 32) return item;
    const int rounds = item.rounds;
    auto& last = s.lists.last;
    // Also true after the ring has wrapped twice. Then the list is made again, although it may be the same.
    const bool is_first = list_ring.stage == 0 && list_ring.parity == 0;
    if (B::use_persistent_cta && !is_first && item.b == last.b && item.first_key == last.first_key &&
        rounds == last.all_rounds) {
      static_cast<ListByCta<B>&>(item) = last;  // same keys: reuses the last list
      item.rounds = last.rounds;
      return item;
    }
    list_visible_rounds(a, item, s.lists.of[B::use_persistent_cta ? list_ring.stage : int(threadIdx.x / 32)]);
    list_ring.advance();
    if (B::use_persistent_cta && issues) {
      static_cast<WgmmaItem<B>&>(last) = item;
      last.all_rounds = rounds;
    }
    __syncwarp();  // hazard: `last` written by lane 0
    return item;
  }
  // Waits until the buffer of Q is free (`empty`), starts the TMA load of Q and publishes the item in s.item.
  // All other warps that read the item wait on q_full.
  __device__ __forceinline__ void start_item(const WgmmaItem<B>& item, uint64_t* empty, int parity) {
    const int stage = q_ring.stage;
    uint64_t* const full = &s.q_full[stage];
    if (B::use_persistent_cta) mbarrier_wait(empty, parity);
    if (issues) {
      s.item[stage] = item;
      mbarrier_arrive_expect_tx(full, item.rounds > 0 ? rows_of_item<B>(a) * ROW_BYTES<B::qk_bytes> : 0);
      for (int n = 0; item.rounds > 0 && n < (B::pack_gqa ? 1 : Shared::ROW_GROUPS); n++) {  // PACK_GQA: once
        load_rows_of_q<B, Q_PANEL_ROWS<B>>(a, s.queries(stage, n), &tensor_maps<B>(a).q, item, item.q0 + n * 64, full);
      }
    }
    q_ring.advance();
  }
  // Waits until another warp has published an item, and returns it.
  __device__ __forceinline__ WgmmaItem<B> follow_item() {
    mbarrier_wait(&s.q_full[q_ring.stage], q_ring.parity);
    const WgmmaItem<B> item = s.item[q_ring.stage];
    __syncwarp();  // hazard: item read by all lanes; once lane 0 has issued the copies, it may be overwritten
    q_ring.advance();
    return item;
  }
  // Loads a split's tile of K or V of a round once its stage is empty. With pages, reads the page table before the
  // wait. Without pages, computing the coordinates before the wait is 2% slower.
  template <int D>
  __device__ __forceinline__ void load(const WgmmaItem<B>& item, int round, int split, const CUtensorMap* map,
                                       KeyValue* tile_s, uint64_t* full, uint64_t* empty) {
    if (!B::use_pages) mbarrier_wait(empty, ring.parity ^ 1);
    TileLoad<B, D> box(a, item, item.h_kv, first_key_of<B>(item, round, split));
    if (B::use_pages) mbarrier_wait(empty, ring.parity ^ 1);
    box.load(a, map, tile_s, full);
  }
  // Waits until V has landed, zero-fills its rows past the last key, and then signals `full`.
  __device__ __forceinline__ void finish_v_of_last_round(KeyValue* V_s, uint64_t* landed, uint64_t* full) {
    mbarrier_wait(landed, landed_parity);
    landed_parity ^= 1;
    clear_rows_of_v<B>(V_s, keys_in_next_v, threadIdx.x % 32, 32);
    keys_in_next_v = B::block_n;
    fence_proxy_async();
    arrive_by_warp(full);
  }
  // Loads a split's tiles of a round as selected by `role`: K into a stage of k, V into a stage of v.
  template <class K, class V>
  __device__ __forceinline__ void load_round(int role, const WgmmaItem<B>& item, int round, int split, K& k, V& v) {
    const auto& maps = tensor_maps<B>(a);
    const int n = ring.stage;
    if (role & load_k) load<B::head_dim>(item, round, split, &maps.k, k.K[n], &k.k_full[n], &k.k_empty[n]);
    if (!(role & load_v)) return;
    uint64_t* landed = &v.v_full[n];
    if constexpr (B::use_lengths) {
      if (keys_in_next_v < B::block_n) landed = &s.split[split].last_v_landed;
    }
    load<B::d_v>(item, round, split, &maps.v, v.V[n], landed, &v.v_empty[n]);
    if (B::use_lengths && keys_in_next_v < B::block_n) finish_v_of_last_round(v.V[n], landed, &v.v_full[n]);
  }
  // Loads a split's tiles of all items. If there are enough warps, separate warps load K and V, so that neither blocks
  // the other. `starts`: this warp also starts each item, by start(item). With persistent CTAs, the others follow it.
  template <class K, class V, class Start>
  __device__ __forceinline__ void load_items(int role, int split, K& k, V& v, bool starts, const Start& start) {
    WgmmaItem<B> item = find_item(item_index_of_cta<B>(a));
    griddepcontrol_wait();  // for the preceding kernel, which may have written the inputs
    while (true) {
      const StageRing<Shared::Q_STAGES> item_stage = q_ring;
      if (starts) start(item);
      if (!starts && B::use_persistent_cta) item = follow_item();
      if (item.rounds == 0) break;
      uint32_t next_position = 0;
      // Computed before the loop to save registers.
      keys_in_next_v = item.keys_in_tile(first_key_of<B>(item, item.rounds - 1, split));
      for (int round = item.rounds - 1; round >= 0; round--, ring.advance()) {
        // Fetch just before the last loads of this item. An earlier fetch would starve idle CTAs.
        if (starts && issues && round == 0) next_position = fetch_queue_position<B>(a);
        load_round(role, item, round, split, k, v);
      }
      if constexpr (B::copies_rows && stores_by_tma<B>) {
        if ((role & store_o) && issues) store_item(item_stage);
      }
      if (!B::use_persistent_cta) break;
      if (starts) item = find_item(gridDim.x + warp_uniform(next_position));
    }
  }
  // One thread stores O, which the consumers have written over the item's Q. TMA does not write rows past Sq.
  // Boxes before query 0 still hold Q and are skipped. USE_LENGTHS: the consumers store the boxes in which a
  // sequence ends.
  __device__ __forceinline__ void store_item(const StageRing<Shared::Q_STAGES>& item_stage) {
    const int stage = item_stage.stage;
    const WgmmaItem<B>& item = s.item[stage];
    for (int row_group = 0; row_group < s.ROW_GROUPS; row_group++) {
      mbarrier_wait(&s.o_done[stage][row_group], item_stage.parity);
      const int q = item.q0 + row_group * 64;
      if (q < 0 || item.ends_before(q + 64)) continue;
      constexpr int width = PANEL_BYTES<B::v_bytes> / B::element_bytes;
      for (int n = 0; n < (a.has_short_rows ? PANELS<B::v_bytes> : 1); n++) {
        const int panel_origin[5] = {n * width, item.q_row(q), 0, item.h, item.batch(a.p.q_starts)};
        cp_async_bulk_tensor_store(&tensor_maps<B>(a).o, panel_origin, s.Q[stage][row_group] + 64 * panel_origin[0]);
      }
      cp_async_bulk_commit_group();
    }
    cp_async_bulk_wait_group_read<0>();
    mbarrier_arrive(&s.q_empty[stage]);
  }
  // Stores O of all items.
  __device__ __forceinline__ void store_items() {
    do {
      mbarrier_wait(&s.q_full[q_ring.stage], q_ring.parity);
      if (s.item[q_ring.stage].rounds == 0) break;
      store_item(q_ring);
      q_ring.advance();
    } while (B::use_persistent_cta);
  }
};

// USE_PING_PONG: the warpgroups issue their products in turn, so that the softmax of one overlaps the products of
// another. The last warpgroup gives warpgroup 0 the first turn. leave() consumes the arrival that remains at the
// end.
template <class B, bool = B::use_ping_pong> struct WgmmaTurns {  // without turns
  __device__ explicit WgmmaTurns(int) {}
  __device__ void await() const {}
  __device__ void pass_on() const {}
  __device__ void leave() const {}
};
template <class B> struct WgmmaTurns<B, true> {
  // Barrier id: turn_barrier + arriving warpgroup. ptxas may recompute an id at each use. pass_on() is on the
  // critical path, so its id is the simpler expression.
  const int warpgroup;
  __device__ explicit WgmmaTurns(int index) : warpgroup(index) {
    if (warpgroup == B::warpgroups - 1) pass_on();
  }
  __device__ void await() const {
    barrier_sync(turn_barrier + (warpgroup > 0 ? warpgroup : B::warpgroups) - 1, turn_threads);
  }
  __device__ void pass_on() const { barrier_arrive(turn_barrier + warpgroup, turn_threads); }
  __device__ __forceinline__ void leave() const {
    if (warpgroup == 0) await();
  }
};

// The item's rounds [begin, end) that the warpgroup with first query q0 computes. skips_empty_warpgroups: none if its
// rows have no query. SKIP_MASKED and no list: only the rounds with a key that one of its rows sees, but at least one.
template <class B>
__device__ __forceinline__ Interval own_rounds(const KernelArgs& a, const Mask& mask, const WgmmaItem<B>& item,
                                               int rounds, int q0) {
  if (skips_empty_warpgroups<B> && (q0 < 0 || q0 >= item.query_count(a.p))) return {0, 0};
  if (!B::skip_masked || has_list<B>(a, item)) return {0, rounds};
  const int last = item.query_count(a.p) - 1;
  const Interval keys = mask.keys.of_rows(min(q0, last), min(q0 + 63, last));
  const int first_key = warp_uniform(item.first_key);
  const int end = min(max(ceil_div(keys.end - first_key, B::round_keys), 1), rounds);
  return {min((keys.begin - first_key) / B::round_keys, end - 1), end};
}

template <class B> struct TileWalk;  // score hook: a tile's bias and its position in the list of rounds

// The softmax state of a warpgroup's 64 rows over its split of the keys, in registers. It is also the `tile` of the
// score hook.
template <class B> struct WgmmaRows {
  using Scores = WgmmaAccumulator<B::block_n>;
  using Sums = WgmmaAccumulator<B::d_v>;
  static constexpr int ROWS = Sums::ROWS;

  const KernelArgs& a;
  // ---- state of the work item, constant: run_items() sets it before the first tile ----
  int q0 = 0;                          // first query
  const WgmmaItem<B>* item = nullptr;  // in shared memory
  ItemScales<B> scales;
  typename Item<B>::ItemMask mask;
  // SCORE_MOD, MASK_MOD, USE_KEY_MASK: batch and head of the item, in uniform registers.
  int b = 0, h = 0;
  float x_of_head[4] = {};  // x0[h] to x3[h]

  // ---- state of the work item, updated by each tile: start() resets it ----
  Sums O;
  float m[ROWS], l[ROWS];
  bool accumulates = false;  // O has a value from an earlier tile of the item
  // USE_LAZY_MAX: tiles with k0 in [stale_from, stale_from + stale_keys) may use the stale maximum.
  int stale_from = 0;
  uint32_t stale_keys = 0;
  // SCORE_MOD: the stale maximum was too small for a tile of the item. It is then not used again, since scores may
  // increase towards the first key, so that it would be too small for most of the following tiles, too.
  bool stale_max_failed = false;

  // ---- state of the tile: run_items() sets it for the item's first tile, advance() for the next one ----
  int k0 = 0;  // first key
  std::conditional_t<B::hides_rounds, TileWalk<B>, Nothing> walk;

  __device__ explicit WgmmaRows(const KernelArgs& a_) : a(a_), scales(a_), mask(Item<B>{}.mask(a_)) {}

  __device__ __forceinline__ void start() {
    accumulates = false;
    stale_keys = 0;
    if (B::changes_logits) stale_max_failed = false;
    SDPA_UNROLL for (int i = 0; i < ROWS; i++) {
      m[i] = -INFINITY;
      l[i] = 0;
    }
  }
  // The partial of a range without keys.
  __device__ __forceinline__ void set_empty() {
    start();
    clear(O);
  }
  __device__ __forceinline__ bool needs_mask() const { return !mask.tiles.cover(q0, k0); }
  // If the item's first tile needs no mask, bias or expression, it uses a stale maximum, too: the maximum of
  // some columns of S. With more columns, more tiles can use it.
  __device__ __forceinline__ void take_estimated_max(const Scores& S) {
    if (!B::use_lazy_max || needs_mask() || needs_modify_scores_or_bias()) return;
    constexpr int columns = B::product_type == DType::e4m3                   ? Scores::COLS
                            : B::kv_type == DType::bf16 || Scores::COLS < 16 ? 4
                                                                             : 16;
    float alpha[ROWS];
    softmax_max<B, Scores, columns>(S, scales.scale_log2(), m, alpha);
    SDPA_UNROLL for (int i = 0; i < 2; i++) m[i] = softmax_input<B>(m[i], a, of_row(scales.hook_scale(), i));
    const ScoreScale<B> scale = scales.scale_log2();
    keep_max(fmaxf(fabsf(m[0]), fabsf(m[1])) * fmaxf(of_row(scale, 0), of_row(scale, 1)) <= shift_limit_of<B>);
  }
  // If `fits` is true in all lanes of the warp, the following tiles without a mask may use m as the stale
  // maximum.
  __device__ __forceinline__ void keep_max(bool fits) {
    if (!B::use_lazy_max) return;
    const Interval covered = mask.tiles.covered(q0);
    stale_from = covered.begin;
    if (B::changes_logits) fits &= !stale_max_failed;
    stale_keys = __all_sync(0xffffffffu, fits) ? max(covered.end - covered.begin, 0) : 0;
  }
  __device__ __forceinline__ bool may_use_stale_max() const {
    return B::use_lazy_max && uint32_t(k0 - stale_from) < stale_keys;
  }
  // Sets the first row and column of S, counted from q0. Computed at each use to save registers. PACK_GQA: q0 is the
  // first query of the item, otherwise of the warpgroup.
  static __device__ __forceinline__ void locate(Scores& S) {
    const uint32_t tid = B::pack_gqa ? mov_tid_x() - B::producer_threads : mov_tid_x() % 128;
    S.first_row = tid / 32 * 16 + tid % 32 / 4;
    S.first_col = tid % 4 * 2;
  }
  // The interface of a tile for the score hook, as in ScoreTile.
  __device__ __forceinline__ ScoreScale<B> hook_scale() const { return scales.hook_scale(); }
  __device__ int batch_of_item() const { return b; }
  __device__ int query_count() const { return item->query_count(a.p); }
  __device__ __forceinline__ bool needs_modify_scores() const {
    if constexpr (B::hides_rounds) return walk.needs_modify_scores();
    return B::changes_logits;
  }
  __device__ __forceinline__ bool needs_modify_scores_or_bias() const {
    if constexpr (B::hides_rounds) return walk.needs_modify_scores() || walk.needs_bias(k0);
    return B::changes_logits;
  }
  __device__ __forceinline__ auto key_bits(int, int) const {
    if constexpr (B::use_key_mask) return walk.bits;
  }
  __device__ __forceinline__ bool add_bias(Scores& S) {
    if constexpr (B::hides_rounds) return walk.add_bias(S, *this);
    return false;
  }
  template <class Softmax>
  __device__ __forceinline__ bool exp_with_bias(Scores& S, int first, int last, Softmax& softmax) {
    if constexpr (B::key_bias) return walk.exp_with_bias(S, first, last, *this, softmax);
    return false;
  }
  __device__ __forceinline__ void advance() {
    if constexpr (B::hides_rounds) {
      k0 -= walk.step();
      walk.advance();
    } else {
      k0 -= B::round_keys;
    }
  }
  // USE_BIAS=4, 5: stores the bias of the item's first tile in shared memory.
  __device__ __forceinline__ void write_first_bias() {
    if constexpr (B::key_bias) walk.write_first_bias();
  }
  // Prepares the key mask or the bias of the next tile, while the warpgroup waits for products.
  __device__ __forceinline__ void look_ahead() {
    if constexpr (B::has_key_bits) walk.look_ahead(*this);
  }
  // Replaces S by P and updates m and l; the caller multiplies O by alpha. are_logits: S has already passed the
  // hook.
  __device__ __forceinline__ void softmax_by_exact_max(Scores& S, float (&alpha)[ROWS], bool are_logits = false) {
    finish_scores<B>(S, *this, !needs_mask(), are_logits);
    softmax_max<B>(S, scales.scale_log2(), m, alpha);
    keep_max(softmax_sum<B>(S, scales.scale_log2(), m, alpha, l));
  }
  // Four bytes of a row of an operand, from `byte` on. Converts e4m3 to 16 bits if the tiles have 16 bits.
  static __device__ __forceinline__ uint32_t word(const KeyValue* row_g, int byte) {
    if constexpr (B::tile_type != B::kv_type) return cvt_rn_f16x2_e4m3x2(ld_global<uint16_t>(row_g + byte / 2));
    return ld_global<uint32_t>(reinterpret_cast<const char*>(row_g) + byte);
  }
  // Recomputes S = Q @ K.T for this warp only, by mma.sync. Reads K from global memory, since its tile in shared
  // memory may have been overwritten. read_q(q, byte) loads the A operand of Q that begins at `byte` of each
  // row. Rarely called, so the loop over bytes is not unrolled.
  template <class ReadQ>
  __device__ __forceinline__ void recompute_qk(Scores& S, const WgmmaItem<B>& item, const ReadQ& read_q) const;
};

// True if the consumers wait for the previous P @ V after half of the exponentials of a tile: P is then rounded while
// the other half is computed. This is faster at D=128 and 256 with two warpgroups, which do not saturate the pipes of
// an SM. With more warpgroups or splits it is faster to wait after the softmax.
template <class B>
constexpr bool waits_within_softmax =
    B::use_lazy_max && B::warpgroups == 2 && B::split_kv == 1 && B::element_bytes == 2;

// A consumer warpgroup: 64 rows (row_group) over its split of the keys. Each kernel derives from it and adds its
// products and stores. State per CTA: the descriptors and the rings, which continue from item to item. State per work
// item: last_k0. For rows, see WgmmaRows.
template <class B, class Shared> struct WgmmaConsumer {
  using Rows = WgmmaRows<B>;
  using Scores = typename Rows::Scores;
  Shared& s;
  const KernelArgs& a;
  const int lane = int(threadIdx.x - B::producer_threads) % 32;
  const int warpgroup = warp_uniform(int(threadIdx.x - B::producer_threads) / 128);
  const int split = warpgroup / Shared::ROW_GROUPS, row_group = warpgroup % Shared::ROW_GROUPS;
  // Descriptors of the first stages. Q: the warpgroup's rows.
  const uint64_t Q =
      wgmma_descriptor(warp_uniform(shared_address(s.queries(0, row_group))), 16, PANEL_ATOM<B::qk_bytes>);
  const uint64_t K = wgmma_descriptor(warp_uniform(shared_address(s.split[split].K[0])), 16, PANEL_ATOM<B::qk_bytes>);
  const uint64_t V =
      wgmma_descriptor(warp_uniform(shared_address(s.split[split].V[0])),
                       B::product_type == DType::e4m3 ? 16 : B::block_n * PANEL_BYTES<B::v_bytes>,
                       B::product_type == DType::e4m3 ? 8 * V_LINE<B> : PANEL_ATOM<B::v_bytes>);
  Rows rows;
  StageRing<Shared::Q_STAGES> q_ring;
  StageRing<B::stages> ring;  // stage and parity of this tile's K and V
  int last_k0 = 0;            // first key of the tile that is computed last
  const WgmmaTurns<B> turns{warpgroup};

  __device__ WgmmaConsumer(Shared& s_, const KernelArgs& a_) : s(s_), a(a_), rows(a_) {
    if constexpr (B::hides_rounds) rows.walk.bind(s.split[split].bias);
  }

  __device__ __forceinline__ const WgmmaItem<B>& item() const { return s.item[q_ring.stage]; }
  // Loads the A operand of the wgmma that begins at byte `step_byte` of each row of Q. tid: the thread in its warpgroup.
  static __device__ __forceinline__ void load_q(uint32_t (&q)[4], SharedAddress Q_s, uint32_t tid, int step_byte) {
    const uint32_t row = tid / 32 * 16 + tid % 16, byte = step_byte + tid % 32 / 16 * 16;
    ldmatrix_x4<false>(q, Q_s + panel_byte<Q_PANEL_ROWS<B>, PANEL_BYTES<B::qk_bytes>>(row, byte));
  }
  // USE_LENGTHS: with batch_invariant, zero-fills the rows of Q past the sequence's last query. Both splits
  // read the same rows of Q.
  __device__ __forceinline__ void clear_queries() {
    auto* const Q_s = s.queries(q_ring.stage, row_group);
    if (!clear_queries_of_others<B>(Q_s, Q_PANEL_ROWS<B>, a, item(), row_group * 64, 64, threadIdx.x % 128)) return;
    // hazard: rows zero-filled by all readers
    if constexpr (B::split_kv > 1) barrier_sync(partials_barrier, partials_threads<B>);
    else barrier_sync(q_read_barrier + warpgroup, q_read_threads);
  }
  // Computes all items. `consumer`: this object as the derived type, which defines the steps of an item:
  //
  //   begin_item       Q has landed
  //   begin_rounds     the scales of the item are set; not called if the warpgroup has no rounds
  //   serial_loop      OVERLAP=0: m, l and O over the rounds of the warpgroup; otherwise overlapped_loop() below
  //   finish_item      completes O; stores it unless CTAs share the item; not called if it has no rounds
  //   end_item         the warpgroup no longer reads Q
  //   store_range      SPLIT_CTAS: stores the partial of the CTA's only item, which may have no keys
  //
  // The stages of rounds that the warpgroup does not compute are released without being read.
  template <class Consumer> __device__ __forceinline__ void run_items(Consumer& consumer) {
    auto& t = s.split[split];
    do {
      mbarrier_wait(&s.q_full[q_ring.stage], q_ring.parity);
      const int rounds = warp_uniform(item().rounds);
      if (rounds == 0) break;
      rows.q0 = warp_uniform(item().q0 + (B::pack_gqa ? 0 : row_group * 64));
      rows.item = &item();
      start_expressions<B>(rows);
      if constexpr (B::use_lengths) rows.mask = item().mask(a);
      const Interval own = own_rounds<B>(a, rows.mask, item(), rounds, rows.q0);
      if constexpr (B::use_lengths) clear_queries();
      consumer.begin_item();
      t.skip(ring, rounds - own.end);
      if (own.end > 0) {
        rows.k0 = warp_uniform(first_key_of<B>(item(), own.end - 1, split));
        last_k0 = warp_uniform(first_key_of<B>(item(), own.begin, split));
        if constexpr (B::hides_rounds) rows.walk.start_item(rows, item(), own.end - 1);
        rows.scales.start(item(), row_group * 64 + int(mov_tid_x() % 128 / 32 * 16 + lane / 4));
        rows.start();
        consumer.begin_rounds();
        if constexpr (B::overlap) overlapped_loop(consumer);
        else consumer.serial_loop();
        SDPA_UNROLL for (int i = 0; i < 2; i++) rows.l[i] = row_sum<Rows::Sums::LANES>(rows.l[i]);
        consumer.finish_item();
      }
      t.skip(ring, own_rounds<B>(a, rows.mask, item(), rounds, rows.q0).begin);  // recomputed to save registers
      consumer.end_item();
      q_ring.advance();
    } while (B::use_persistent_cta);
    turns.leave();
    if constexpr (B::split_ctas != 1) {
      if (s.item[0].rounds == 0) rows.set_empty();
      consumer.store_range();
    }
  }
  // Issues O += P @ V.   [64][Dv]
  __device__ __forceinline__ void issue_pv(const WgmmaProbabilities<B>& P, bool v_landed) {
    wait_for_tile<B>(&s.split[split].v_full[ring.stage], ring.parity, v_landed);
    wgmma_pv<B>(rows.O, P, descriptor_at(V, ring.stage * int(sizeof s.split[0].V[0])), rows.accumulates);
    rows.accumulates = true;
  }
  // OVERLAP=1: issues Q @ K.T of the next tile before P @ V of this tile, which then overlaps the softmax of the
  // next tile. `consumer` has the products and the softmax of its kernel.
  template <class Consumer> __device__ __forceinline__ void overlapped_loop(Consumer& consumer) {
    auto& t = s.split[split];
    Scores S;
    WgmmaProbabilities<B> P;
    int last_stage = 0;  // stage of V of the P @ V in flight
    const auto wait_for_last_pv = [&] {
      wgmma_wait_group<0>();
      hold(rows.O.x.d);
      hold(S.x.d);  // P, in place of S, is rounded only after the wait
      if (rows.accumulates) arrive_by_warp(&t.v_empty[last_stage]);
    };
    consumer.issue_qk(S, ring, false);
    rows.write_first_bias();
    wgmma_wait_group<0>();
    hold(S.x.d);
    rows.take_estimated_max(S);
    for (;; rows.advance()) {
      arrive_by_warp(&t.k_empty[ring.stage]);
      StageRing<B::stages> next = ring;
      next.advance();
      // The next K and this V have usually landed. The softmax hides the latency of these polls.
      const bool k_landed = mbarrier_peek_parity(&t.k_full[next.stage], next.parity);
      const bool v_landed = mbarrier_peek_parity(&t.v_full[ring.stage], ring.parity);
      if constexpr (waits_within_softmax<B>) {
        consumer.template softmax_with_wait<Scores::COLS / 2>(S, P, wait_for_last_pv);
      } else {
        consumer.softmax_then_wait(S, P, wait_for_last_pv);
      }
      if constexpr (B::product_type == DType::e4m3) consumer.flush(/*overlaps_qk=*/false);
      turns.await();
      if (rows.k0 != last_k0) consumer.issue_qk(S, next, k_landed);
      if constexpr (B::product_type == DType::e4m3) consumer.flush(/*overlaps_qk=*/true);
      issue_pv(P, v_landed);
      turns.pass_on();
      rows.look_ahead();
      last_stage = ring.stage;
      ring = next;
      wgmma_wait_group<1>();
      hold(S.x.d);
      if (rows.k0 == last_k0) break;
    }
    wgmma_wait_group<0>();
    hold(rows.O.x.d);
    arrive_by_warp(&t.v_empty[last_stage]);
  }
};

// The kernel of producer and consumer warps.
template <class B>
__global__ void __launch_bounds__(B::threads, ctas_by_registers<B>) sdpa_wgmma(const __grid_constant__ KernelArgs a) {
  using Kernel = KernelOf<B>;
  using Registers = typename Kernel::Registers;
  auto& s = dynamic_shared<typename Kernel::Shared>();
  const int warp = warp_uniform(threadIdx.x / 32);
  if (!B::use_persistent_cta && !item_of_cta<B>(a).exists()) return;
  if (warp == 1 && threadIdx.x % 32 == 0) {  // two threads share the initialization
    s.init_full();
    fence_mbarrier_init();
  }
  if (warp == 2 && threadIdx.x % 32 == 0) {
    s.init_empty();
    fence_mbarrier_init();
  }
  prefetch_tensor_maps<B>(a);
  clear_rows_without_query<B>(s.queries(0, 0), a);
  __syncthreads();  // hazard: mbarriers initialized by two threads, rows of Q zero-filled by all
  if (warp < B::producer_threads / 32) {
    if (Registers::redistributes) setmaxnreg_dec<Registers::producer, ctas_by_registers<B>>();
    typename Kernel::Producer producer(s, a);
    producer.run(warp);
  } else {
    if (Registers::redistributes) setmaxnreg_inc<Registers::consumer, ctas_by_registers<B>>();
    wait_then_let_next_kernel_start();
    typename Kernel::Consumer consumer(s, a);
    consumer.run_items(consumer);
  }
}

template <class B>
template <class ReadQ>
__device__ void WgmmaRows<B>::recompute_qk(Scores& S, const WgmmaItem<B>& item, const ReadQ& read_q) const {
  const KeyValue* const K_g = a.p.K + (B::use_pages ? 0 : item.b * a.p.k.batch) + item.h_kv * a.p.k.head;
  // With 16-bit types, too few registers are free for unrolling.
  [[maybe_unused]] constexpr int unrolled = B::product_type == DType::e4m3 ? B::block_n / 8 : 1;
#pragma unroll unrolled
  for (int n = 0; n < B::block_n / 8; n++) {
    const int lane = int(mov_tid_x() % 32), k = k0 + lane / 4 + 8 * n;
    float d[4] = {};
    const KeyValue* K_row = K_g;
    if constexpr (B::use_pages != 0) {
      // Rows without a query may see keys that no query of the item sees. Such keys may have no page.
      const int in_item = min(max(k, item.keys.begin), item.keys.end - 1);
      K_row = PagedRows<B>{&a, &item, &a.p.k, K_g, in_item} + lane % 4 * 4 / B::element_bytes;
    } else {
      K_row += item.k_row(k) * a.p.k.row;
      K_row += lane % 4 * 4 / B::element_bytes;
    }
#pragma unroll 1
    for (int byte = 0; byte < ROW_BYTES<B::qk_bytes>; byte += STEP_BYTES) {
      uint32_t of_q[4], of_k[2] = {0, 0};  // zero past the end of a short row
      read_q(of_q, byte);
      if (byte < a.p.D * B::element_bytes) of_k[0] = word(K_row, byte);
      if (byte + 16 < a.p.D * B::element_bytes) of_k[1] = word(K_row, byte + 16);
      if constexpr (B::product_type == DType::e4m3)
        mma_m16n8k32_e4m3(d[0], d[1], d[2], d[3], of_q, of_k[0], of_k[1]);
      else mma_m16n8k16<Element<B>>(d[0], d[1], d[2], d[3], of_q, of_k[0], of_k[1]);
    }
    SDPA_UNROLL for (int i = 0; i < B::block_n / 2; i++) S.x.d[i] = i / 4 == n ? d[i % 4] : S.x.d[i];
  }
}

// ---- 5c merge of splits (wgmma and USE_WARP_SPECIALIZATION and SPLIT_KV > 1) ----

// Merges the partials of both splits; each split finalizes half of the rows. Stores LSE and calls store(share, row).
// share[4v + i]: O / l in `row` and accumulator column 16v + i / 2 * 8 + lane % 4 * 2 + i % 2.
template <class B, class Store>
__device__ __forceinline__ void merge_splits(const WgmmaRows<B>& rows, SplitPartial<B>& partial, int split,
                                             const Item<B>& item, const Store& store) {
  const uint32_t tid = mov_tid_x() % 128, lane = tid % 32, warp = tid / 32;
  const int row = warp * 16 + split * 8 + lane / 4, q = rows.q0 + row;  // the row that the thread finalizes
  float share[B::d_v / 4];
  SDPA_UNROLL for (int to = 0; to < 2; to++) {
    SDPA_UNROLL for (int v = 0; v < B::d_v / 16; v++) {
      const float* const d = rows.O.x.d + v * 8 + to * 2;
      const float4 x = {d[0], d[1], d[4], d[5]};
      if (to == split) {
        memcpy(share + 4 * v, &x, sizeof x);
      } else {
        st_shared(&partial.O[to][v][tid], x);
      }
    }
  }
  if (lane % 4 == 0) {
    SDPA_UNROLL for (int i = 0; i < 2; i++) {
      st_shared(&partial.m_l[split][warp * 16 + lane / 4 + 8 * i], float2{rows.m[i], rows.l[i]});
    }
  }
  barrier_sync(partials_barrier, partials_threads<B>);  // hazard: partials written

  const float2 row_m_l = split == 0 ? float2{rows.m[0], rows.l[0]} : float2{rows.m[1], rows.l[1]};
  const float2 m_l[2] = {row_m_l, ld_shared<float2>(&partial.m_l[1 - split][row])};
  float weight[2], m, l;
  merge_weights<B>(m_l, rows.scales.scale_log2(), weight, m, l);
  const FinalSum total = final_sum<B>(m, l, rows.a, item);
  SDPA_UNROLL for (int v = 0; v < B::d_v / 16; v++) {
    const float4 x = ld_shared<float4>(&partial.O[split][v][tid]);
    const float others[4] = {x.x, x.y, x.z, x.w};
    SDPA_UNROLL for (int i = 0; i < 4; i++) {
      float& d = share[4 * v + i];
      d = l == 0 ? 0 : fmaf(others[i], weight[1] * total.factor, d * (weight[0] * total.factor));
    }
  }
  store(share, row);
  if (lane % 4 == 0 && q < item.query_count(rows.a.p)) store_lse<B>(m, total.sum, rows.a, item, q);
}

// ---- 5c room for a bias (wgmma and USE_WARP_SPECIALIZATION) ----

// True if a row of the bias has at most one 16-byte chunk per lane, and if shared memory has room for the bias next to
// K, V, the partials of splits and q_stages tiles of Q; 3 KB are reserved for barriers and items. USE_BIAS=4, 5: a row
// of floats per warp.
template <class B> constexpr bool bias_fits(int q_stages) {
  if (!B::key_bias && B::block_n * sizeof(Bias) > 32 * 16) return false;
  const int rows = B::split_kv * B::block_m, ring = B::split_kv * B::stages * B::block_n * (B::head_dim + B::d_v) * 2;
  const int bias = B::block_n * (B::key_bias ? B::num_warps * 4 : rows * int(sizeof(Bias)));
  const int partial = (B::split_kv > 1) * rows * (B::d_v + 8) * 4;
  return q_stages * B::block_m * B::head_dim * 2 + ring + bias + partial <= 224 * 1024;
}
// True if shared memory has room for the bias. If it has not, each element is read where it is added.
template <class B> constexpr bool bias_has_room = B::use_bias != 0 && bias_fits<B>(1);
// True if the bias leaves room for Q of two items in shared memory.
template <class B> constexpr bool bias_leaves_room =
    B::use_bias == 0 || (!B::key_bias && !bias_has_room<B>) || bias_fits<B>(2);

// ---- 5c 16 bits: the kernel (wgmma and USE_WARP_SPECIALIZATION and DTYPE = FP16, DTYPE = BF16) ----
//
// Producer warp 0 loads K, warp 1 loads V, warp 2 stores O. Q stays in shared memory for the whole item; O overwrites
// it. With two stages of Q, Q of the next item is loaded while this item is computed and its O is stored. The state,
// mbarriers and named barriers are those of the section on producers and consumers.

// KV_DTYPE: LandedTiles has the 8-bit tiles of K and V as loaded. converter_warps convert them to 16 bits.
template <class B> struct LandedTiles;
constexpr int converter_warps = 4;

template <class B> struct WgmmaShared {
  // With persistent CTAs, Q of the next item is loaded during an item if shared memory has room for both.
  static constexpr bool Q_FITS_TWICE = B::head_dim <= 128 && bias_leaves_room<B>;
  static constexpr int ROW_GROUPS = B::block_m / 64, Q_STAGES = B::use_persistent_cta && Q_FITS_TWICE ? 2 : 1;
  alignas(1024) Element<B> Q[Q_STAGES][ROW_GROUPS][64 * B::head_dim];  // [64][D] each; then O, until it is stored
  TileRing<B> split[B::split_kv];
  std::conditional_t<B::tile_type != B::kv_type, LandedTiles<B>, Nothing> landed;
  SplitPartials<B> partial;
  ListsInShared<B, Q_STAGES> lists;
  WgmmaItem<B> item[Q_STAGES];  // the item of each stage of Q
  // q_full: Q has landed, and `item` is set. o_done: all warps have written O over Q. q_empty: O has been stored.
  uint64_t q_full[Q_STAGES], o_done[Q_STAGES][ROW_GROUPS], q_empty[Q_STAGES];

  // The warpgroup's 64 rows of Q, or with PACK_GQA their lines in the first panel.
  __device__ __forceinline__ Element<B>* queries(int stage, int row_group) {
    return Q[stage][0] + row_group * 64 * B::head_dim / (B::pack_gqa ? PANELS<B::qk_bytes> : 1);
  }
  // Initializes the full mbarriers. KV_DTYPE: also initializes all mbarriers of `landed`.
  __device__ __forceinline__ void init_full() {
    mbarriers_init(q_full, 1);
    constexpr int arrivals = B::tile_type != B::kv_type ? converter_warps : copying_warps<B>;
    for (auto& t : split) t.init_full(arrivals, arrivals);
    if constexpr (B::tile_type != B::kv_type) landed.init_mbarriers();
  }
  __device__ __forceinline__ void init_empty() {
    mbarriers_init(q_empty, 1);
    for (auto& of_stage : o_done) mbarriers_init(of_stage, 4);
    for (auto& t : split) t.init_empty();
  }
};

template <class B> struct Wgmma16Producer : WgmmaProducer<B, WgmmaShared<B>> {
  using Base = WgmmaProducer<B, WgmmaShared<B>>;
  using Base::s, Base::q_ring, Base::Base;

  __device__ __forceinline__ void run(int warp) {
    // SPLIT_KV=2: each split has one warp that loads K and one that loads V, and the consumers store O.
    // USE_PAGES=2: with one split, two warps copy each tile, and the second one for V also stores O, since an
    // item needs V later than K.
    constexpr bool four_loaders = B::split_kv > 1 || B::copies_rows;
    const int role = warp == 0                       ? load_k
                     : warp == 1                     ? load_v
                     : four_loaders && warp == 2     ? load_k
                     : four_loaders                  ? (stores_by_tma<B> ? load_v | store_o : load_v)
                     : warp == 2 && stores_by_tma<B> ? store_o
                                                     : idle;
    const int split = copying_warps<B> > 1 ? 0 : warp / 2;
    // USE_PERSISTENT_CTA=0: the warp that loads V starts an item, so that Q and K are requested at the same time.
    // USE_PERSISTENT_CTA=1: the warp that loads K starts an item, since this warp is ahead of the other.
    constexpr int starts = B::use_persistent_cta ? 0 : 1;
    if (role & (load_k | load_v)) {
      auto& t = s.split[split];
      Base::load_items(role, split, t, t, warp == starts, [&](const WgmmaItem<B>& item) {
        Base::start_item(item, &s.q_empty[q_ring.stage], q_ring.parity ^ 1);
      });
    } else if (role == store_o && Base::issues) {
      Base::store_items();
    }
  }
};

// USE_SOFTCAP=1: the StaleSoftmax that also caps the scores, by a polynomial.
template <class B> struct CappedSoftmax;

template <class B> struct Wgmma16Consumer : WgmmaConsumer<B, WgmmaShared<B>> {
  using Base = WgmmaConsumer<B, WgmmaShared<B>>;
  using Scores = typename Base::Scores;
  using Probabilities = WgmmaProbabilities<B>;
  using Softmax = std::conditional_t<B::caps_by_polynomial, CappedSoftmax<B>, StaleSoftmax<B, 2>>;
  using Base::a, Base::s, Base::lane, Base::split, Base::row_group, Base::rows, Base::ring, Base::q_ring, Base::last_k0;
  using Base::Base;

  // ---- the products ----

  // Issues S = Q @ K.T.   [64][BLOCK_N]
  __device__ __forceinline__ void issue_qk(Scores& S, const StageRing<B::stages>& k_ring, bool k_landed) {
    wait_for_tile<B>(&s.split[split].k_full[k_ring.stage], k_ring.parity, k_landed);
    wgmma_qk<B>(S, descriptor_at(Base::Q, q_ring.stage * int(sizeof s.Q[0])),
                descriptor_at(Base::K, k_ring.stage * int(sizeof s.split[0].K[0])));
  }

  // ---- the softmax: first by the stale maximum; if that fails, by the exact one ----

  // Recomputes Q @ K.T with Q from shared memory.
  __device__ __forceinline__ void recompute_qk(Scores& S) const {
    const uint32_t tid = mov_tid_x() % 128;
    const SharedAddress Q_s = shared_address(s.queries(q_ring.stage, row_group));
    rows.recompute_qk(S, Base::item(), [&](uint32_t (&q)[4], int step_byte) { Base::load_q(q, Q_s, tid, step_byte); });
  }
  // Called if the stale maximum was too small. Recovers S = log2(P) / scale_log2 + m in place. Recomputes
  // Q @ K.T if P may have overflowed. Reads m and a kernel argument again, since keeping m_log2 or the scale in
  // registers would slow down the exponentials.
  __device__ __forceinline__ void recover_logits(Scores& P, const Softmax& softmax, bool& are_logits) {
    if (B::changes_logits) rows.stale_max_failed = true;
    const bool fits = softmax.sum[0] + softmax.sum[1] < 0x1p120f;
    are_logits = softmax.keeps_logits() && __all_sync(0xffffffffu, fits);
    if (!are_logits) return recompute_qk(P);
    SDPA_UNROLL for (int i = 0; i < B::block_n / 2; i++) {
      const float inverse_scale =
          B::kv_bytes == 1 ? 1 / of_row(rows.scales.scale_log2(), i / 2 % 2) : a.inverse_scale_log2;
      P.x.d[i] = fmaf(lg2_approx_ftz(P.x.d[i]), inverse_scale, rows.m[i / 2 % 2]);
    }
  }
  // Rounds P. hold() keeps the rounding before the fence of P @ V. Otherwise nvcc moves some of it after the fence,
  // ptxas splits P @ V into two groups (warning C7519), and the wait for the next S also waits for the first of
  // these groups.
  static __device__ __forceinline__ void pack_all(Probabilities& out, const Scores& P) {
    SDPA_UNROLL for (int n = 0; n < B::block_n / 16; n++) {
      pack_step<Element<B>>(out[n], P, n);
      hold(out[n]);
    }
  }
  // Waits for the previous P @ V after the first FIRST columns of the stale softmax, which overlap it.
  // P can be rounded only after the wait, since the previous P @ V reads its operand from the same registers. After
  // an early wait, the rounding overlaps the other exponentials. After a late one, as in softmax_then_wait(), it
  // overlaps none, but more exponentials overlap P @ V.
  //
  //   if stale: P = exp of the first FIRST columns of S
  //   wait for the previous P @ V
  //   if stale: P of the other columns; round P; done if the row sums fit
  //   if not done: recover S if stale; exact m, alpha, P; O = O * alpha; round P
  template <int FIRST, class Wait>
  __device__ __forceinline__ void softmax_with_wait(Scores& S, Probabilities& P, const Wait& wait_for_last_pv) {
    const bool stale = rows.may_use_stale_max();
    bool done = false;
    bool are_logits = false;
    Softmax softmax(rows.m, rows.scales);
    if (stale) exp_by_stale_max<B>(S, 0, FIRST, softmax, rows, are_logits);
    wait_for_last_pv();
    if (stale) {
      exp_by_stale_max<B>(S, FIRST, S.COLS, softmax, rows, are_logits);
      pack_all(P, S);
      done = softmax.add_to(rows.l);
      if (!done) recover_logits(S, softmax, are_logits);
    }
    // Tests `done` three times, since with a single test nvcc places P in the registers of S.
    float alpha[2];
    if (!done) rows.softmax_by_exact_max(S, alpha, are_logits);
    if (!done && !__all_sync(0xffffffffu, alpha[0] == 1 && alpha[1] == 1)) scale_rows(rows.O, alpha);
    if (!done) pack_all(P, S);
  }
  // Waits for the previous P @ V after the softmax, which overlaps it.
  //
  //   if stale: P = exp of S; done if the row sums fit
  //   if not done: recover S if stale; exact m, alpha, P
  //   wait for the previous P @ V
  //   if not done: O = O * alpha
  //   round P
  template <class Wait>
  __device__ __forceinline__ void softmax_then_wait(Scores& S, Probabilities& P, const Wait& wait_for_last_pv) {
    bool done = false, are_logits = false;
    float alpha[2];
    if (rows.may_use_stale_max()) {
      Softmax softmax(rows.m, rows.scales);
      exp_by_stale_max<B>(S, 0, S.COLS, softmax, rows, are_logits);
      done = softmax.add_to(rows.l);
      if (!done) recover_logits(S, softmax, are_logits);
    }
    if (!done) rows.softmax_by_exact_max(S, alpha, are_logits);
    wait_for_last_pv();
    if (!done && !__all_sync(0xffffffffu, alpha[0] == 1 && alpha[1] == 1)) scale_rows(rows.O, alpha);
    pack_all(P, S);
  }

  // ---- the loops over the tiles of an item ----

  __device__ __forceinline__ void serial_loop() {
    TileRing<B>& t = s.split[split];
    Scores S;
    Probabilities P;
    for (bool first = true;; first = false, rows.advance()) {
      issue_qk(S, ring, false);
      if (first) rows.write_first_bias();
      wgmma_wait_group<0>();
      hold(S.x.d);
      arrive_by_warp(&t.k_empty[ring.stage]);
      const bool v_landed = mbarrier_peek_parity(&t.v_full[ring.stage], ring.parity);
      if (first) rows.take_estimated_max(S);
      softmax_with_wait<S.COLS>(S, P, [] {});
      Base::turns.await();
      Base::issue_pv(P, v_landed);
      Base::turns.pass_on();
      rows.look_ahead();
      wgmma_wait_group<0>();
      hold(rows.O.x.d);
      arrive_by_warp(&t.v_empty[ring.stage]);
      ring.advance();
      if (rows.k0 == last_k0) break;
    }
  }

  // ---- items ----

  // Waits until all warps of the warpgroup have read Q, writes O / l, rounded, over Q, and stores LSE.
  __device__ __forceinline__ void write_output() {
    auto& O = rows.O;
    const uint32_t tid = mov_tid_x() % 128, lane = tid % 32;
    const int first_row = tid / 32 * 16, stage = q_ring.stage;  // first row of the warp in its warpgroup
    // hazard: Q read by all warps of the warpgroup, which write O over it
    barrier_sync(q_read_barrier + Base::warpgroup, q_read_threads);
    SDPA_UNROLL for (int i = 0; i < 2; i++) {  // rows without a visible key have O = 0, even if V has inf or NaN
      if (rows.l[i] != 0) continue;
      SDPA_UNROLL for (int j = 0; j < O.COLS; j++) O.x[i][j] = 0;
    }
    float factor[2];
    SDPA_UNROLL for (int i = 0; i < 2; i++) {
      const FinalSum total = final_sum<B>(rows.m[i], rows.l[i], a, s.item[stage]);
      const int q = rows.q0 + first_row + int(lane) / 4 + 8 * i;
      const bool stores = lane % 4 == 0 && q < s.item[stage].query_count(a.p);
      if (stores) store_lse<B>(rows.m[i], total.sum, a, s.item[stage], q);
      factor[i] = rows.l[i] == 0 ? 0 : total.factor;
    }
    SDPA_UNROLL for (int n = 0; n < B::d_v / 16; n++) {
      WgmmaAccumulator<16> columns;
      memcpy(columns.x.d, O.x.d + 8 * n, sizeof columns.x.d);
      scale_rows(columns, factor);
      uint32_t o[4];
      pack_step<Output>(o, columns, 0);
      const int o_offset = panel_offset<64, PANEL_BYTES<B::v_bytes>>(first_row + lane % 16, n * 16 + lane / 16 * 8);
      stmatrix_x4<false>(shared_address(s.Q[stage][row_group] + o_offset), o);
    }
    fence_proxy_async();
    if constexpr (B::use_lengths) store_last_rows(s.item[stage], s.Q[stage][row_group], first_row, lane);
  }
  // USE_LENGTHS: if the sequence ends within the warpgroup's rows, stores O of the warp's rows from shared
  // memory. TMA would overwrite rows of the next sequence.
  __device__ __forceinline__ void store_last_rows(const Item<B>& item, const Element<B>* O_s, int first_row,
                                                  int lane) {
    if (!item.ends_before(rows.q0 + 64)) return;
    __syncwarp();  // hazard: O_s written by all lanes
    constexpr int chunks = B::d_v / 8, line = PANEL_BYTES<B::v_bytes>;
    Output* const O_g = a.p.O + item.b * a.p.o.batch + item.h * a.p.o.head;
    for (int i = lane; i < 16 * chunks; i += 32) {
      const int row = first_row + i / chunks, col = i % chunks * 8, q = rows.q0 + row;
      const uint4 o = ld_shared<uint4>(O_s + panel_offset<64, line>(row, col));
      if (q < item.query_count(a.p) && col < a.p.Dv) st_global_v4(O_g + item.q_row(q) * a.p.o.row + col, o);
    }
  }
  // Merges the splits and stores O through shared memory, so that each lane stores 16 bytes at a time.
  __device__ __forceinline__ void merge_and_store() {
    const Item<B> item = s.item[0];  // read before the barrier, whose wait hides the latency
    SplitPartial<B>& partial = s.partial[row_group];
    merge_splits<B>(rows, partial, split, item, [&](const float (&share)[B::d_v / 4], int row) {
      const uint32_t lane = mov_tid_x() % 32, warp = mov_tid_x() / 32 % 4;
      auto& out_s = partial.out[split][warp];
      SDPA_UNROLL for (int n = 0; n < B::d_v / 32; n++) {
        uint32_t o[4];
        SDPA_UNROLL for (int i = 0; i < 4; i++) o[i] = pack<Output>(share[8 * n + 2 * i], share[8 * n + 2 * i + 1]);
        stmatrix_x4<false>(shared_address(&out_s[lane % 8][n * 32 + lane / 8 * 8]), o);
      }
      __syncwarp();  // hazard: out_s written by all lanes
      constexpr int TIMES = B::d_v / 32, ROWS_AT_ONCE = 8 / TIMES;  // each of 32 lanes stores 8 elements at once
      const int first = lane / (B::d_v / 8), col = lane % (B::d_v / 8) * 8;
      uint4 o[TIMES];  // all loads come before the first store, since a load waits for preceding stores
      SDPA_UNROLL for (int i = 0; i < TIMES; i++) o[i] = ld_shared<uint4>(&out_s[first + i * ROWS_AT_ONCE][col]);
      Output* const O_g = a.p.O + item.b * a.p.o.batch + item.h * a.p.o.head + col;
      SDPA_UNROLL for (int i = 0; i < TIMES; i++) {
        const int q = rows.q0 + row - int(lane / 4) + first + i * ROWS_AT_ONCE;
        if (q < item.query_count(a.p) && col < a.p.Dv) st_global_v4(O_g + item.q_row(q) * a.p.o.row, o[i]);
      }
    });
  }

  // KV_DTYPE with bf16 Q: converts the warpgroup's rows of Q to fp16, each scaled by a power of two.
  __device__ __forceinline__ void convert_q_to_fp16();
  // Undoes the scaling of Q in the maxima m.
  __device__ __forceinline__ void undo_scale_of_q();

  __device__ __forceinline__ void begin_item() {}
  __device__ __forceinline__ void begin_rounds() {
    if constexpr (B::q_type != B::product_type) convert_q_to_fp16();
  }
  __device__ __forceinline__ void finish_item() {
    if constexpr (B::q_type != B::product_type) undo_scale_of_q();
    if constexpr (B::split_kv > 1) {
      merge_and_store();
    } else if constexpr (stores_by_tma<B>) {
      write_output();
    }
  }
  __device__ __forceinline__ void end_item() {
    if (stores_by_tma<B>) arrive_by_warp(&s.o_done[q_ring.stage][row_group]);
  }
  __device__ __forceinline__ void store_range() {
    const int thread = int(threadIdx.x) - B::producer_threads;
    rows.O.first_row = thread / 32 * 16 + lane / 4;
    rows.O.first_col = lane % 4 * 2;
    store_result(rows.O, rows.m, rows.l, a, s.item[0]);
  }
};

template <class B> struct KernelOf<B, KernelKind::wgmma_roles> {
  using Shared = WgmmaShared<B>;
  using Producer = Wgmma16Producer<B>;
  using Consumer = Wgmma16Consumer<B>;
  using Registers = WgmmaRegisters<B, (B::copies_rows ? 80 : B::has_key_bits ? 40 : 24), (B::copies_rows ? 56 : 32)>;
  static constexpr auto entry = sdpa_wgmma<B>;
};

// ---- 5c e4m3: Q in registers, V transposed, sums in fp32 (wgmma and DTYPE = FP8_E4M3) ----
// wgmma cannot transpose 8-bit operands, so two producer warps transpose V. wgmma accumulates e4m3 products
// with 14 bits: it truncates each product to a multiple of 2^-13 of the accumulator. If the mean of V is not
// 0, O becomes too small, and after some thousand keys it stops growing. Therefore O is added to fp32 sums in
// shared memory after every FP8_FLUSH tiles (flush()). OVERLAP is always 1. SPLIT_KV=2: warps 0 and 1 each
// load K and V of one split; warps 2 and 3 each transpose V of one split.
//
//   producer warps                                    consumer warpgroups
//   0: for each tile: wait k_empty;  load K           for each item:
//   1: for each tile:                                   wait q_full;  load Q into registers;  arrive at q_empty
//     wait landed.v_empty;  load V into `landed`        for each tile: as in the 16-bit kernel, and flush()
//   2, 3: for each tile:                                O = (O + flushed sums) / l, stored from registers
//     wait v_empty, landed.v_full;  transpose V;
//     arrive at landed.v_empty, v_full
//
// State per item: Q in registers, the sums and the number of `tiles`. If Q stays in shared memory, or if the sums
// overwrite it, the consumers arrive at q_empty at the end of the item.

template <class B> struct E4m3Shared {
  // Q_STAGES: stages of `item` and its mbarriers; Q itself has one buffer.
  static constexpr int ROW_GROUPS = B::block_m / 64, Q_STAGES = B::use_persistent_cta ? 2 : 1;
  static constexpr int TRANSPOSERS = 2 / B::split_kv;  // warps per split that transpose V
  // Q is in registers if there are enough. From shared memory, each wgmma would also read 64 rows of Q.
  static constexpr bool Q_IN_REGISTERS = B::warpgroups < 4, FLUSHES = B::fp8_flush != 0;
  // If shared memory has no room for Q and the sums, the sums overwrite Q after it has been read.
  static constexpr bool SUMS_OVERWRITE_Q = Q_IN_REGISTERS && FLUSHES && B::head_dim == 256;
  struct Landed {  // V as loaded, before transposition
    alignas(1024) KeyValue V[B::stages][B::block_n * ROW_BYTES<B::v_bytes> / sizeof(KeyValue)];  // [BLOCK_N][Dv]
    uint64_t v_full[B::stages], v_empty[B::stages];
  };
  using Queries = Element<B>[ROW_GROUPS][64 * ROW_BYTES<B::qk_bytes> / sizeof(Element<B>)];
  using Flushed = float4[B::warpgroups][B::d_v / 8][128];  // by thread
  alignas(1024) std::conditional_t<SUMS_OVERWRITE_Q, Flushed, Queries> Q;
  TileRing<B, ceil_div(B::block_n, V_LINE<B>) * V_LINE<B> * B::d_v> split[B::split_kv];  // V [Dv][BLOCK_N]
  Landed landed[B::split_kv];
  SplitPartials<B> partial;
  ListsInShared<B, Q_STAGES> lists;
  WgmmaItem<B> item[Q_STAGES];
  // q_full: Q has landed, and `item` is set. q_empty: all consumer warps have read Q.
  uint64_t q_full[Q_STAGES], q_empty[Q_STAGES];
  std::conditional_t<FLUSHES && !SUMS_OVERWRITE_Q, Flushed, Nothing> flushed_sums;

  __device__ __forceinline__ Element<B>* queries(int, int row_group) {
    if (B::pack_gqa) return reinterpret_cast<Element<B>*>(Q[0]) + row_group * 64 * PANEL_BYTES<B::qk_bytes>;
    return reinterpret_cast<Element<B>*>(Q[row_group]);
  }
  __device__ __forceinline__ auto& flushed(int warpgroup) {
    if constexpr (SUMS_OVERWRITE_Q) {
      return Q[warpgroup];
    } else {
      return flushed_sums[warpgroup];
    }
  }
  // Initializes the full mbarriers, and all mbarriers of `landed`.
  __device__ __forceinline__ void init_full() {
    mbarriers_init(q_full, 1);
    for (auto& t : split) t.init_full(1, TRANSPOSERS);
    for (Landed& t : landed) {
      mbarriers_init(t.v_full, 1);
      mbarriers_init(t.v_empty, TRANSPOSERS);
    }
  }
  __device__ __forceinline__ void init_empty() {
    mbarriers_init(q_empty, B::num_warps);
    for (auto& t : split) t.init_empty();
  }
};

template <class B> struct E4m3Producer : WgmmaProducer<B, E4m3Shared<B>> {
  using Shared = E4m3Shared<B>;
  using Base = WgmmaProducer<B, Shared>;
  StageRing<Shared::Q_STAGES> last_q{Shared::Q_STAGES - 1, 1};  // of the previous item, whose Q must have been read

  using Base::Base;

  // Transposes the V tiles of a split, for all items. Its TRANSPOSERS warps alternate in blocks of 16 d.
  // transposer: index of the warp among them.
  __device__ __forceinline__ void transpose_items(int split, int transposer) {
    auto& to = this->s.split[split];
    auto& from = this->s.landed[split];
    StageRing<B::stages>& ring = this->ring;
    do {
      const WgmmaItem<B> item = this->follow_item();
      if (item.rounds == 0) break;
      for (int round = 0; round < item.rounds; round++, ring.advance()) {
        const int n = ring.stage;
        mbarrier_wait(&to.v_empty[n], ring.parity ^ 1);
        mbarrier_wait(&from.v_full[n], ring.parity);
        transpose(shared_address(to.V[n]), shared_address(from.V[n]), transposer);
        fence_proxy_async();  // orders these writes before P @ V reads them, and these reads before TMA overwrites V
        __syncwarp();         // hazard: V read and written by all lanes
        if (this->issues) {
          mbarrier_arrive(&from.v_empty[n]);
          mbarrier_arrive(&to.v_full[n]);
        }
      }
    } while (B::use_persistent_cta);
  }
  // Transposes blocks of 16 d and 32 keys. ldmatrix gives lane 4g + q the bytes of d = 2g and 2g + 1 of two
  // keys. prmt separates the even d from the odd d, which puts the keys in the order of P. Within 16 d, the
  // even d come first: these 8 adjacent lines are in different banks.
  static __device__ __forceinline__ void transpose(SharedAddress to, SharedAddress from, int transposer) {
    constexpr int FROM_LINE = PANEL_BYTES<B::v_bytes>, TO_LINE = V_LINE<B>, STEP = 16 * Shared::TRANSPOSERS;
    constexpr int MOST = B::warpgroups == 2 && B::split_kv == 1 ? 4 : 2;  // registers limit the loads at once
    constexpr int AT_ONCE = B::d_v / STEP < MOST ? B::d_v / STEP : MOST;
    const uint32_t lane = threadIdx.x % 32;
    from += panel_byte<B::block_n, FROM_LINE>(lane, transposer * 16);
    to += panel_byte<B::d_v, TO_LINE>(transposer * 16 + lane % 16, lane / 16 * 16);
    SDPA_UNROLL for (int key = 0; key < B::block_n; key += 32) {
      const SharedAddress to_key = (to ^ key % TO_LINE) + key / TO_LINE * B::d_v * TO_LINE;
      SDPA_UNROLL for (int d0 = 0; d0 < B::d_v; d0 += STEP * AT_ONCE) {
        uint32_t v[AT_ONCE][4];
        // The swizzle XORs low bits of the address, so a step within a line is an XOR as well.
        SDPA_UNROLL for (int n = 0; n < AT_ONCE && d0 + n * STEP < B::d_v; n++) {
          const int d = d0 + n * STEP;
          ldmatrix_x4<true>(v[n], (from ^ d % FROM_LINE) + (d / FROM_LINE * B::block_n + key) * FROM_LINE);
        }
        SDPA_UNROLL for (int n = 0; n < AT_ONCE && d0 + n * STEP < B::d_v; n++) {
          const uint32_t out[4] = {prmt(v[n][0], v[n][1], 0x6420), prmt(v[n][0], v[n][1], 0x7531),
                                   prmt(v[n][2], v[n][3], 0x6420), prmt(v[n][2], v[n][3], 0x7531)};
          stmatrix_x4<false>(to_key + (d0 + n * STEP) * TO_LINE, out);
        }
      }
    }
  }

  __device__ __forceinline__ void run(int warp) {
    if (warp >= 2) return transpose_items((warp - 2) % B::split_kv, (warp - 2) / B::split_kv);
    const int split = warp % B::split_kv, starts = B::use_persistent_cta || B::split_kv > 1 ? 0 : 1;
    const int role = B::split_kv > 1 ? load_k | load_v : warp == 0 ? load_k : load_v;
    auto& k = this->s.split[split];
    auto& v = this->s.landed[split];
    this->load_items(role, split, k, v, warp == starts, [&](const WgmmaItem<B>& item) {
      const StageRing<Shared::Q_STAGES> stage = this->q_ring;
      this->start_item(item, &this->s.q_empty[last_q.stage], last_q.parity);
      last_q = stage;
    });
  }
};

template <class B> struct E4m3Consumer : WgmmaConsumer<B, E4m3Shared<B>> {
  using Shared = E4m3Shared<B>;
  using Base = WgmmaConsumer<B, Shared>;
  using Scores = typename Base::Scores;
  using Probabilities = WgmmaProbabilities<B>;
  using Base::a, Base::s, Base::lane, Base::split, Base::row_group, Base::rows, Base::ring, Base::q_ring, Base::last_k0;
  using Base::Base;
  uint32_t queries[B::qk_bytes / STEP_BYTES][4];  // per item: Q as A operands, if Q_IN_REGISTERS
  uint32_t tiles = 0;                              // per item: tiles whose P @ V has completed

  // ---- the products ----

  __device__ __forceinline__ void load_queries() {
    const uint32_t tid = mov_tid_x() % 128;
    const SharedAddress Q_s = shared_address(s.queries(0, row_group));
    SDPA_UNROLL for (int step = 0; step < B::qk_bytes / STEP_BYTES; step++) {
      Base::load_q(queries[step], Q_s, tid, step * STEP_BYTES);
    }
  }
  // Lets the producer overwrite the buffer of Q.
  __device__ __forceinline__ void release_queries() {
    fence_proxy_async();  // orders the reads of Q before TMA overwrites it
    arrive_by_warp(&s.q_empty[q_ring.stage]);
  }
  // Issues S = Q @ K.T.   [64][BLOCK_N]
  __device__ __forceinline__ void issue_qk(Scores& S, const StageRing<B::stages>& k_ring, bool k_landed) {
    wait_for_tile<B>(&s.split[split].k_full[k_ring.stage], k_ring.parity, k_landed);
    const uint64_t K_at = descriptor_at(Base::K, k_ring.stage * int(sizeof s.split[0].K[0]));
    if constexpr (Shared::Q_IN_REGISTERS) {
      forget(S.x.d);
      wgmma_fence();
      SDPA_UNROLL for (int step = 0; step < B::qk_bytes / STEP_BYTES; step++) {
        const uint64_t K_step = descriptor_at(K_at, panel_step<PANEL_BYTES<B::qk_bytes>>(step, B::block_n));
        wgmma_rs<Element<B>, B::block_n, 0>(S.x.d, queries[step], K_step, step > 0);
      }
      wgmma_commit_group();
    } else {
      wgmma_qk<B>(S, Base::Q, K_at);
    }
  }

  // ---- the softmax ----

  // Recomputes Q @ K.T with Q from global memory, since the buffer of Q may have been overwritten.
  __device__ __forceinline__ void recompute_qk(Scores& S) const {
    const SdpaParams& p = a.p;
    const WgmmaItem<B>& item = Base::item();
    const Query* Q_g = p.Q + item.b * p.q.batch + item.h * p.q.head;
    const uint32_t tid = mov_tid_x() % 128;
    const int row = rows.q0 + int(tid / 32 * 16 + tid % 32 / 4), byte = tid % 4 * 4;
    rows.recompute_qk(S, item, [&](uint32_t (&q)[4], int step_byte) {
      SDPA_UNROLL for (int i = 0; i < 4; i++) {
        int query = row + i % 2 * 8;
        if constexpr (B::pack_gqa) {
          const Item<B> one_row = row_item<B>(a, item, query - item.q0 + row_group * 64);
          Q_g = p.Q + one_row.b * p.q.batch + min(one_row.h, p.Hq - 1) * p.q.head;
          query = one_row.q0;
        }
        query = item.q_row(min(query, item.query_count(p) - 1));
        q[i] = rows.word(Q_g + query * p.q.row, min(step_byte + i / 2 * 16 + byte, p.D - 4));  // K is 0 past D
      }
    });
  }
  // Like softmax_then_wait() of the 16-bit kernel, but if the stale maximum was too small, first tries to
  // raise it. P is rounded after the wait, since the previous P @ V reads its operand from the same registers.
  template <class Wait>
  __device__ __forceinline__ void softmax_then_wait(Scores& S, Probabilities& P, const Wait& wait_for_last_pv) {
    float alpha[2];
    const bool stale = rows.may_use_stale_max();
    bool done = stale;
    StaleSoftmax<B, 2> softmax(rows.m, rows.scales);
    if (stale) {
      bool are_logits = false;
      exp_by_stale_max<B>(S, 0, S.COLS, softmax, rows, are_logits);
      done = softmax.add_to(rows.l);
    }
    if (!done && !(stale && raise_max(S, softmax, alpha))) {
      if (stale) recompute_qk(S);
      rows.softmax_by_exact_max(S, alpha);
    }
    wait_for_last_pv();
    if (!done && !__all_sync(0xffffffffu, alpha[0] == 1 && alpha[1] == 1)) {
      scale_rows(rows.O, alpha);
      scale_flushed(alpha);
    }
    // The accumulators of 32 columns have the lane layout of an A operand with permuted keys: in each group
    // of 16, k = 4q + r is column r / 2 * 8 + 2q + r % 2. V is stored with its keys in the same order.
    SDPA_UNROLL for (int step = 0; step < B::block_n / 32; step++) {
      SDPA_UNROLL for (int i = 0; i < 4; i++) {
        const float* const d = S.x.d + 16 * step + i / 2 * 8 + i % 2 * 2;
        P[step][i] = cvt_rn_satfinite_e4m3x4(d[0], d[1], d[4], d[5]);
      }
      hold(P[step]);
    }
  }
  // Called if the stale maximum was too small. Raises m so that alpha is a power of two and no P exceeds
  // 2^p_log2. Rescales P and l by alpha, without using S; the caller rescales O. Returns false and changes
  // nothing if P may have overflowed or, with USE_FAST_EXP, have been clamped at 2^127.
  __device__ __forceinline__ bool raise_max(Scores& P, const StaleSoftmax<B, 2>& softmax, float (&alpha)[2]) {
    constexpr float most = B::use_fast_exp ? 0x1p120f : INFINITY;
    if (!__all_sync(0xffffffffu, softmax.sum[0] + softmax.sum[1] < most)) return false;
    SDPA_UNROLL for (int i = 0; i < 2; i++) {
      float largest = 1;
      SDPA_UNROLL for (int j = 0; j < P.COLS; j++) largest = fmaxf(largest, P.x[i][j]);
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      // alpha = 2^-exponent, where 2^exponent is at least largest / 2^p_log2.
      const int exponent = max(int(bits_of(largest) >> 23) - 126 - int(p_log2<B>), 0);
      alpha[i] = float_of(uint32_t(127 - exponent) << 23);
      rows.m[i] += float(exponent) / of_row(rows.scales.scale_log2(), i);
      rows.l[i] = (rows.l[i] + softmax.sum[i]) * alpha[i];
      SDPA_UNROLL for (int j = 0; j < P.COLS; j++) P.x[i][j] *= alpha[i];
    }
    return true;
  }

  // ---- the fp32 sums in shared memory ----

  // Calls use(sum_s, d) for each group of four elements d of O and its sums in shared memory.
  template <class Use> __device__ __forceinline__ void for_each_flushed(const Use& use) {
    if constexpr (Shared::FLUSHES) {
      const uint32_t tid = mov_tid_x() % 128;
      auto& sums = s.flushed(Base::warpgroup);
      SDPA_UNROLL for (int n = 0; n < B::d_v / 8; n++) use(&sums[n][tid], rows.O.x.d + 4 * n);
    }
  }
  // After every FP8_FLUSH tiles, before the next P @ V, adds 3/2 O to the sums in shared memory and sets O to -O / 2.
  // Both are relative to the same maximum, so the total is unchanged. If the tiles between two flushes add x, O goes
  // from -x / 3 to 2x / 3 instead of from 0 to x, which halves the truncation error. At D=256 the flush overlaps
  // Q @ K.T. With smaller D it comes before Q @ K.T, since P @ V would wait for it.
  __device__ __forceinline__ void flush(bool overlaps_qk) {
    if (overlaps_qk != (B::head_dim == 256)) return;
    if (!Shared::FLUSHES || !rows.accumulates || ++tiles % B::fp8_flush != 0) return;
    const bool first = tiles == B::fp8_flush;
    for_each_flushed([&](float4* sum_s, float* d) {
      SDPA_UNROLL for (int i = 0; i < 4; i++) d[i] *= -0.5f;
      float sum[4] = {-3 * d[0], -3 * d[1], -3 * d[2], -3 * d[3]};
      if (!first) add_weighted(sum, ld_shared<float4>(sum_s), 1);
      st_shared(sum_s, float4{sum[0], sum[1], sum[2], sum[3]});
    });
  }
  // Rescales the sums in shared memory, as scale_rows() rescales O.
  __device__ __forceinline__ void scale_flushed(const float (&alpha)[2]) {
    if (tiles < B::fp8_flush) return;  // not flushed yet
    for_each_flushed([&](float4* sum_s, float*) {
      const float4 x = ld_shared<float4>(sum_s);
      st_shared(sum_s, float4{x.x * alpha[0], x.y * alpha[0], x.z * alpha[1], x.w * alpha[1]});
    });
  }

  // ---- items ----

  // Stores O / l and LSE from registers. In each 16 columns the even d come first, as in the transposed V, so a thread
  // has four adjacent d.
  __device__ __forceinline__ void store() {
    const Item<B>& item = Base::item();
    if constexpr (B::split_kv > 1) {
      const Item<B> cta_item = item;  // read before the barrier, whose wait hides the latency
      merge_splits<B>(rows, s.partial[row_group], split, cta_item, [&](const float (&share)[B::d_v / 4], int row) {
        const int q = rows.q0 + row;
        Output* const O_g = a.p.O + cta_item.b * a.p.o.batch + cta_item.h * a.p.o.head + cta_item.q_row(q) * a.p.o.row;
        SDPA_UNROLL for (int v = 0; v < B::d_v / 16 && q < cta_item.query_count(a.p); v++) {
          const float* const x = share + 4 * v;
          if (16 * v + lane % 4 * 4 >= a.p.Dv) continue;
          st_global(O_g + 16 * v + lane % 4 * 4, uint2{pack<Output>(x[0], x[2]), pack<Output>(x[1], x[3])});
        }
      });
    } else {
      const uint32_t tid = mov_tid_x() % 128;
      QuadRuns<2, B::d_v, 4> four;  // O in the order of d
      // SPLIT_CTAS: rows.q0 is not set if the CTA's range is empty.
      four.first_row = (B::split_ctas != 1 ? row_group * 64 : rows.q0 - item.q0) + tid / 32 * 16 + tid % 32 / 4;
      four.first_col = tid % 4 * 4;
      SDPA_UNROLL for (int i = 0; i < four.ROWS; i++) {
        SDPA_UNROLL for (int j = 0; j < four.COLS; j++) {
          four.x[i][j] = rows.O.x.d[2 * i + j / 4 * 8 + j % 2 * 4 + j / 2 % 2];
        }
      }
      store_result(four, rows.m, rows.l, a, item);
    }
  }
  // True if the buffer of Q is used until the end of the item.
  static constexpr bool q_stays = !Shared::Q_IN_REGISTERS || Shared::SUMS_OVERWRITE_Q;
  __device__ __forceinline__ void begin_item() {
    if constexpr (Shared::Q_IN_REGISTERS) load_queries();
    if (!q_stays) release_queries();
  }
  __device__ __forceinline__ void begin_rounds() { tiles = 0; }
  __device__ __forceinline__ void finish_item() {
    if (tiles >= B::fp8_flush) {  // O has been flushed: adds the sums in shared memory
      for_each_flushed([](float4* sum_s, float* d) { add_weighted(d, ld_shared<float4>(sum_s), 1); });
    }
    if constexpr (B::split_ctas == 1) store();
  }
  __device__ __forceinline__ void end_item() {
    if (q_stays && B::split_kv == 1) release_queries();  // with splits, no producer waits for it
  }
  __device__ __forceinline__ void store_range() { store(); }
};

template <class B> struct KernelOf<B, KernelKind::wgmma_e4m3> {
  using Shared = E4m3Shared<B>;
  using Producer = E4m3Producer<B>;
  using Consumer = E4m3Consumer<B>;
  // With 32 registers per producer thread, the copy of rows spills: 1.26 times slower at D=128 with pages of 1 key.
  using Registers = WgmmaRegisters<B, (B::copies_rows ? (B::head_dim > 128 ? 56 : 72) : 40), B::copies_rows ? 56 : 32>;
  static constexpr auto entry = sdpa_wgmma<B>;
};

// ---- 5d wgmma, transposed: keys are the M dimension, for few query rows (wgmma and SWAP_AB) ----
//
// S.T = K @ Q.T and O.T = V.T @ P.T. Keys and d are the M dimension of wgmma, which is 64; query rows are its N
// dimension, which may be as small as 8. There are no producer warps. Each warpgroup computes one split of the keys:
//
//   issue S.T = K @ Q.T of the last tile
//   for each tile of the split, the last key first:
//     m, P.T = softmax(S.T)      a query is spread over 8 lanes of each of the four warps
//     issue V.T @ P.T            P.T is read from shared memory
//     issue S.T = K @ Q.T        of the next tile; overlaps V.T @ P.T
//     wait for both; start the loads of later tiles into the stages that both have read
//     O.T += V.T @ P.T
//   merge the splits; O = O / l
//
// The warps of a split also load its tiles. USE_LAZY_MAX: a tile with a stale maximum needs only one barrier.
// SPLIT_CTAS: the last CTA of an item to finish merges the partials that all of its CTAs have written to scratch
// memory.
//
// A CTA computes one item. State per item: m, l, O; m_log2 and keeps_max, which are computed from m.
// State per tile: S, P, and the stage of `ring`.
//
//   barrier                    completed by                      awaited by           protects
//   mbarriers q_full, k_full,  TMA, or the warps that copied     all threads that     Q, K, V: written
//     v_full                   the tile                          read the tile
//   split_barrier + split      the 128 threads of the split      the same             P and per_warp: written
//   k_issued_barrier           warps that load K                 warps that load V    the order of the first loads
//   all_barrier                all threads                       the same             partials: written
//
// There are no `empty` mbarriers: a warp starts a load into a stage after wgmma_wait_group<0>(), when the products of
// all warps of the split have read the stage.

// Named barriers, and the number of threads that arrive or wait; barrier 0 is __syncthreads().
// k_issued_barrier and all_barrier share an id: the first one completes before any thread reaches the second
// one.
constexpr int split_barrier = 1, split_barrier_threads = 128;  // split_barrier + split
template <class B> constexpr int k_issued_barrier = 1 + B::split_kv;
template <class B> constexpr int k_issued_threads = 64 * B::split_kv;
template <class B> constexpr int all_barrier = 1 + B::split_kv;
template <class B> constexpr int all_threads = B::warpgroups * 128;

template <class B> struct WgmmaColumnsShared {
  struct Split {
    union {
      alignas(1024) Element<B> K[B::stages][B::block_n * B::head_dim];  // [BLOCK_N][D]
      float O[B::block_m][PARTIAL_STRIDE<B>];                           // the split's partial, after its last round
    };
    alignas(1024) Element<B> V[B::stages][B::block_n * B::d_v];  // [BLOCK_N][Dv]
    alignas(1024) Element<B> P[B::block_n * B::block_m];         // [BLOCK_M][BLOCK_N]
    float2 m_l[B::block_m];
    float per_warp[4][32];                          // row maxima or row sums of each warp
    uint64_t k_full[B::stages], v_full[B::stages];  // mbarriers: the tile has landed
  };
  alignas(1024) Element<B> Q[B::block_m * B::head_dim];  // [BLOCK_M][D]
  Split split[B::split_kv];
  std::conditional_t<B::has_key_bits, ListMemory<B>[B::num_warps], Nothing> lists;
  WgmmaItem<B> item;
  uint64_t q_full;  // mbarrier: Q has landed, and `item` is set
  std::conditional_t<counts_ranges<B>, bool, Nothing> is_last;  // written and read by store_merged()
};

// Loads the tiles of a split. Separate warps load K and V, since issuing a load takes a warp about 100 clocks. In
// split 0, a third warp loads Q. With cp.async, all warps copy rows of K and V.
template <class B> struct WgmmaColumnsLoader {
  WgmmaColumnsShared<B>& s;
  const KernelArgs& a;
  const int split, warp;  // warp: index in the split
  WgmmaItem<B> item;      // has zero rounds in a warp that loads nothing

  __device__ bool loads_k() const { return B::copies_rows || warp == 0; }
  __device__ bool loads_v() const { return B::copies_rows || warp == 1; }
  __device__ bool loads_q() const { return warp == 2 && split == 0; }
  __device__ bool loads() const { return loads_k() || loads_v() || loads_q(); }

  __device__ static bool issues() { return threadIdx.x % 32 == 0; }
  __device__ __forceinline__ void find_item() {
    item = wgmma_item<B>(a, item_index_of_cta<B>(a));
    if constexpr (B::has_key_bits) list_visible_rounds(a, item, s.lists[threadIdx.x / 32]);
  }
  __device__ __forceinline__ void load_q() {
    if (!loads_q() || !issues()) return;
    const CUtensorMap* map = &tensor_maps<B>(a).q;
    s.item = item;
    mbarrier_arrive_expect_tx(&s.q_full, rows_of_item<B>(a) * ROW_BYTES<B::qk_bytes>);
    hold(map);              // keeps the computation of the address before the wait
    griddepcontrol_wait();  // for the preceding kernel, as late as possible
    load_rows_of_q<B, B::block_m>(a, s.Q, map, item, item.q0, &s.q_full);
  }
  // Starts the load of the split's tile of a round into a free stage. FIRST: the warp's first tile.
  template <bool FIRST> __device__ __forceinline__ void load_tile(int round, int stage) {
    typename WgmmaColumnsShared<B>::Split& t = s.split[split];
    if (loads_k()) load<B::head_dim, FIRST>(round, &tensor_maps<B>(a).k, t.K[stage], &t.k_full[stage]);
    if (loads_v()) load<B::d_v, FIRST>(round, &tensor_maps<B>(a).v, t.V[stage], &t.v_full[stage]);
  }
  template <int D, bool FIRST>
  __device__ __forceinline__ void load(int round, const CUtensorMap* map, KeyValue* tile_s, uint64_t* full) {
    TileLoad<B, D> box(a, item, item.h_kv, first_key_of<B>(item, round, split));
    if (FIRST) {
      hold(map);
      griddepcontrol_wait();
    }
    box.load(a, map, tile_s, full);
  }
  // Starts the loads into all stages. The first K tiles of all splits are needed first, so they precede V.
  __device__ __forceinline__ void load_first_tiles() {
    if (item.rounds == 0) return;
    if constexpr (B::copies_rows) return load_first_rows();
    if (loads_v()) barrier_sync(k_issued_barrier<B>, k_issued_threads<B>);
    load_tile<true>(item.rounds - 1, 0);
    if (loads_k()) barrier_arrive(k_issued_barrier<B>, k_issued_threads<B>);
    for (int n = 1; n < B::stages && n < item.rounds; n++) load_tile<false>(item.rounds - 1 - n, n);
  }
  // ---- copies of rows by cp.async; the page table is read one round earlier, to hide the latency ----
  __device__ __forceinline__ RowPages<B> find_pages(int round) const {
    return round < 0 ? RowPages<B>() : RowPages<B>(a, item, first_key_of<B>(item, round, split));
  }
  __device__ __forceinline__ void load_rows_of_k(int round, int stage, const RowPages<B>& pages) const {
    typename WgmmaColumnsShared<B>::Split& t = s.split[split];
    TileRows<B, B::head_dim>(item, item.h_kv, first_key_of<B>(item, round, split), pages)
        .load(a, &tensor_maps<B>(a).k, t.K[stage], &t.k_full[stage]);
  }
  __device__ __forceinline__ void load_rows_of_v(int round, int stage, const RowPages<B>& pages) const {
    typename WgmmaColumnsShared<B>::Split& t = s.split[split];
    TileRows<B, B::d_v>(item, item.h_kv, first_key_of<B>(item, round, split), pages)
        .load(a, &tensor_maps<B>(a).v, t.V[stage], &t.v_full[stage]);
  }
  __device__ __forceinline__ void load_first_rows() const {
    RowPages<B> pages[B::stages];
    SDPA_UNROLL for (int n = 0; n < B::stages; n++) pages[n] = find_pages(item.rounds - 1 - n);
    SDPA_UNROLL for (int n = 0; n < B::stages; n++) {
      if (n >= item.rounds) break;
      load_rows_of_k(item.rounds - 1 - n, n, pages[n]);
      load_rows_of_v(item.rounds - 1 - n, n, pages[n]);
    }
  }
};

// A view of a warpgroup's S.T or O.T with queries as rows: a thread has ROWS queries, each with COLS
// keys (S.T) or elements of d (O.T).
//
// In lane t of warp w, x[2i + e][2 block + h] is d[block][4i + 2h + e], which belongs to
//   query 8i + 2(t % 4) + e
//   key   64 block + 16w + t / 4 + 8h   (O.T: element of d)
//
// The 8 lanes with equal t % 4 in each of the four warps have the same queries.
template <class B, int BLOCKS> struct WgmmaColumnsView {
  static constexpr int ROWS = B::block_m / 4, COLS = 2 * BLOCKS;
  struct Elements {
    float d[BLOCKS][B::block_m / 2];
    struct Row {
      float* first;
      __device__ float& operator[](int j) const { return first[j / 2 * (B::block_m / 2) + j % 2 * 2]; }
    };
    __device__ Row operator[](int i) const { return {const_cast<float*>(d[0]) + i / 2 * 4 + i % 2}; }
  };
  Elements x;

  static __device__ int row(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }
  static __device__ int col(int j) { return j / 2 * 64 + j % 2 * 8; }  // relative to first_col(), so a constant
  static __device__ int first_col() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }
  __device__ __forceinline__ void forget_all() { SDPA_UNROLL for (auto& block : x.d) forget(block); }
  __device__ __forceinline__ void hold_all() { SDPA_UNROLL for (auto& block : x.d) hold(block); }
};

// A warpgroup: computes one split of the item's keys.
template <class B> struct WgmmaColumns {
  using Shared = WgmmaColumnsShared<B>;
  static constexpr int KEY_BLOCKS = B::block_n / 64, D_BLOCKS = B::d_v / 64;
  using Scores = WgmmaColumnsView<B, KEY_BLOCKS>;  // S.T
  using Sums = WgmmaColumnsView<B, D_BLOCKS>;      // O.T
  static constexpr int ROWS = Scores::ROWS;        // 2, 4 or 8

  Shared& s;
  const KernelArgs& a;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;  // warp: index in the warpgroup
  const int split = int(threadIdx.x / 128);
  const SharedAddress Q_s, K_s, V_s, P_s;  // K_s, V_s: stage 0
  StageRing<B::stages> ring;               // stage and parity of this round's K and V
  float m, l;          // of the query that the thread owns (see combine_pair); l sums only the keys of its warp
  float m_log2[ROWS];  // m * scale_log2 of the thread's queries; 0 if S has been replaced by S - m
  bool keeps_max = false;  // m may be kept as the stale maximum; equal in all threads of the split
  std::conditional_t<B::copies_rows, RowPages<B>, Nothing> k_pages, v_pages;  // pages of the tiles to load next
  std::conditional_t<B::key_bias, Bias[Scores::COLS], Nothing> next_bias;     // of the thread's keys of the next round

  __device__ WgmmaColumns(Shared& s_, const KernelArgs& a_)
      : s(s_),
        a(a_),
        Q_s(warp_uniform(shared_address(s.Q))),
        K_s(warp_uniform(shared_address(s.split[split].K[0]))),
        V_s(warp_uniform(shared_address(s.split[split].V[0]))),
        P_s(warp_uniform(shared_address(s.split[split].P))) {}

  __device__ __forceinline__ typename Shared::Split& own_split() const { return s.split[split]; }
  __device__ void sync() const { barrier_sync(split_barrier + split, split_barrier_threads); }

  // ---- the products ----
  // They add to descriptors directly: with descriptor_at(), the kernel has up to 5% more instructions.

  // Issues S.T = K @ Q.T of the tile in the stage of k_ring.   [BLOCK_N][BLOCK_M]
  __device__ __forceinline__ void issue_kq(Scores& S, const StageRing<B::stages>& k_ring) {
    wait_for_tile<B>(&own_split().k_full[k_ring.stage], k_ring.parity);
    const uint64_t Q = wgmma_descriptor(Q_s, 16, PANEL_ATOM<B::qk_bytes>);
    const uint64_t K = wgmma_descriptor(K_s + k_ring.stage * sizeof s.split[0].K[0], 16, PANEL_ATOM<B::qk_bytes>);
    wgmma_fence();
    SDPA_UNROLL for (int block = 0; block < KEY_BLOCKS; block++) {
      SDPA_UNROLL for (int step = 0; step < B::head_dim / 16; step++) {
        constexpr int line = PANEL_BYTES<B::qk_bytes>;
        const int K_step = panel_step<line>(step, B::block_n) + block * 64 * line;
        const int Q_step = panel_step<line>(step, B::block_m);
        wgmma_ss<Element<B>, B::block_m, 0>(S.x.d[block], K + K_step / 16, Q + Q_step / 16, step > 0);
      }
    }
    wgmma_commit_group();
  }
  // Issues VP = V.T @ P.T of this round.   [Dv][BLOCK_M]
  __device__ __forceinline__ void issue_vp(Sums& VP) {
    constexpr int line = 128;  // of V and P, since Dv and BLOCK_N are multiples of 64
    const uint64_t P = wgmma_descriptor(P_s, 16, 8 * line);
    const uint64_t V = wgmma_descriptor(V_s + ring.stage * sizeof s.split[0].V[0], 16, 8 * line);
    wgmma_fence();
    SDPA_UNROLL for (int step = 0; step < B::block_n / 16; step++) {
      SDPA_UNROLL for (int block = 0; block < D_BLOCKS; block++) {
        const int V_step = (block * B::block_n + step * 16) * line;
        const int P_step = panel_step<line>(step, B::block_m);
        wgmma_ss<Element<B>, B::block_m, 0, 1>(VP.x.d[block], V + V_step / 16, P + P_step / 16,
                                               step > 0);
      }
    }
    wgmma_commit_group();
  }
  // Waits for both products, which complete for all warps of the warpgroup at once. Then starts the loads of
  // later tiles into the stages that the products have read. S: the scores of `round`, whose K is in the stage of
  // k_ring.
  __device__ __forceinline__ void wait_and_load(Scores& S, int round, int rounds,
                                                const StageRing<B::stages>& k_ring) {
    wgmma_wait_group<0>();
    S.hold_all();
    if constexpr (B::copies_rows) return load_next_rows(round - B::stages, rounds, k_ring.stage);
    const int next_round = round - B::stages + (warp == 1);  // warp 0 loads K; warp 1 loads V, one round behind
    if (warp < 2 && next_round >= 0 && next_round < rounds - B::stages) {
      WgmmaColumnsLoader<B>{s, a, split, int(warp), s.item}.template load_tile<false>(
          next_round, warp == 0 ? k_ring.stage : ring.stage);
    }
  }

  // Loads K of `round` and V of round + 1, and looks up the pages of round - 1. V is in the pages that were
  // looked up for K of its round.
  __device__ __forceinline__ void load_next_rows(int round, int rounds, int k_stage) {
    if (round < -1) return;
    const WgmmaColumnsLoader<B> loader{s, a, split, int(warp), s.item};
    const RowPages<B> found = loader.find_pages(round - 1);
    if (round >= 0) loader.load_rows_of_k(round, k_stage, k_pages);
    if (round + 1 < rounds - B::stages) loader.load_rows_of_v(round + 1, ring.stage, v_pages);
    v_pages = k_pages;
    k_pages = found;
  }

  // ---- row max and row sum of the queries ----
  // 8 lanes reduce the values of their ROWS queries, by exchanges at distances of 16, 8 and 4 lanes. In each
  // exchange, a lane with several queries keeps half of them: it sends its values of the other half and
  // receives the partner's values of the kept half. At the end each lane owns one query, and 8 / ROWS lanes
  // own the same one.

  template <int DISTANCE, class Combine>
  __device__ __forceinline__ void combine_pair(float (&x)[ROWS], Combine combine) const {
    // Before the exchange, a lane has max(ROWS * DISTANCE / 16, 1) queries.
    constexpr bool halve = ROWS * DISTANCE >= 32;
    constexpr int kept = halve ? ROWS * DISTANCE / 32 : 1;
    const uint32_t upper = 0 - lane / DISTANCE % 2;  // a bit mask, since nvcc compiles a condition to branches
    SDPA_UNROLL for (int i = 0; i < kept; i++) {
      const uint32_t low = bits_of(x[i]), high = bits_of(x[halve ? i + kept : i]);
      const uint32_t swap = (low ^ high) & upper;
      const float theirs = __shfl_xor_sync(0xffffffffu, float_of(high ^ swap), DISTANCE);
      x[i] = combine(float_of(low ^ swap), theirs);
    }
  }
  // Reduces the values of the thread's own query over the lanes. x: the result of combine_pair<16>().
  template <class Combine> __device__ __forceinline__ float combine_lanes(float (&x)[ROWS], Combine combine) const {
    combine_pair<8>(x, combine);
    combine_pair<4>(x, combine);
    return x[0];
  }
  // Reduces the values of the thread's own query over the four warps, in a fixed order.
  template <class Combine> __device__ __forceinline__ float combine_warps(float value, Combine combine) {
    st_shared(&own_split().per_warp[warp][lane], value);
    sync();  // hazard: written by all warps
    value = ld_shared<float>(&own_split().per_warp[0][lane]);
    SDPA_UNROLL for (int n = 1; n < 4; n++) value = combine(value, ld_shared<float>(&own_split().per_warp[n][lane]));
    return value;
  }
  static __device__ __forceinline__ float sum_of(float x, float y) { return x + y; }
  static __device__ __forceinline__ float larger_of(float x, float y) { return fmaxf(x, y); }
  // The largest element of S of the thread's own query.
  __device__ __forceinline__ float row_max(const Scores& S) {
    float x[ROWS];
    SDPA_UNROLL for (int i = 0; i < ROWS; i++) {
      x[i] = S.x[i][0];
      SDPA_UNROLL for (int j = 1; j < S.COLS; j++) x[i] = fmaxf(x[i], S.x[i][j]);
    }
    combine_pair<16>(x, larger_of);
    return combine_warps(combine_lanes(x, larger_of), larger_of);
  }
  // Returns the value of the thread's query i, from the lane that owns this query.
  __device__ __forceinline__ float from_owner(float value, int i) const {
    return __shfl_sync(0xffffffffu, value, i * 8 / ROWS * 4 + lane % 4);
  }

  // ---- the softmax ----

  // Updates m to max(m, row max of S), and rescales l and O. FIRST: m, l and O have no values yet. If
  // |m_log2| of a query of the warp exceeds shift_limit, replaces S by S - m for all queries of the warp.
  template <bool FIRST> __device__ __forceinline__ void update_max(Scores& S, Sums& O) {
    float m_new = row_max(S), alpha;
    if (!FIRST) {
      m_new = fmaxf(m, m_new);
      alpha = softmax_exp2<B>((m - finite_max(m_new)) * a.scale_log2);
      l *= alpha;
    }
    m = m_new;
    float own_m_log2 = finite_max(m) * a.scale_log2;
    bool may_be_kept = m != -INFINITY;
    if (!__all_sync(0xffffffffu, fabsf(own_m_log2) <= shift_limit)) {
      SDPA_UNROLL for (int i = 0; i < ROWS; i++) {
        const float row_m = finite_max(from_owner(m, i));
        SDPA_UNROLL for (int j = 0; j < S.COLS; j++) S.x[i][j] -= row_m;
      }
      own_m_log2 = 0;
      may_be_kept = false;
    }
    keeps_max = B::use_lazy_max && __all_sync(0xffffffffu, may_be_kept);
    SDPA_UNROLL for (int i = 0; i < ROWS; i++) {
      m_log2[i] = from_owner(own_m_log2, i);
      if (FIRST) continue;
      const float factor = from_owner(alpha, i);
      SDPA_UNROLL for (int j = 0; j < O.COLS; j++) O.x[i][j] *= factor;
    }
  }
  // Writes P = 2^(S * scale_log2 - m_log2), rounded, to shared memory, sets `sum` to the thread's sums of P, and
  // waits for V.
  template <bool FIRST> __device__ __forceinline__ void write_p(const Scores& S, float (&sum)[ROWS]) {
    const uint32_t row = (ROWS < 4 ? 0 : lane / 16 * 8) + lane % 8, column = warp * 16 + lane / 8 % 2 * 8;
    const SharedAddress P_at = shared_address(own_split().P + panel_offset<B::block_m>(row, column));
    SDPA_UNROLL for (float& x : sum) x = 0;
    SDPA_UNROLL for (int block = 0; block < KEY_BLOCKS; block++) {
      SDPA_UNROLL for (int q = 0; q < B::block_m; q += 16) {
        uint32_t P[4];  // pairs of queries
        SDPA_UNROLL for (int j = 0; j < (ROWS < 4 ? 2 : 4); j++) {
          const int i = q / 4 + j / 2 * 2;
          const float* const pair = S.x.d[block] + q / 2 + 2 * j;
          const float x = softmax_exp2<B>(fmaf(pair[0], a.scale_log2, -m_log2[i]));
          const float y = softmax_exp2<B>(fmaf(pair[1], a.scale_log2, -m_log2[i + 1]));
          sum[i] += x;
          sum[i + 1] += y;
          P[j] = pack<Element<B>>(x, y);
        }
        if (ROWS < 4) {  // both halves of the warp store the same elements
          P[2] = P[0];
          P[3] = P[1];
        }
        stmatrix_x4<true>(P_at + (block * B::block_m + q) * 128, P);
      }
    }
    if (FIRST) combine_pair<16>(sum, sum_of);  // overlaps the stores of P
    fence_proxy_async();
    wait_for_tile<B>(&own_split().v_full[ring.stage], ring.parity);
  }
  // Writes P to shared memory for all warps. Unless the stale maximum suffices, updates m and rescales l and
  // O. The caller adds `sum` to l.
  template <bool FIRST> __device__ __forceinline__ void softmax(Scores& S, Sums& O, float (&sum)[ROWS]) {
    bool fits = false;
    if (!FIRST && keeps_max) {
      write_p<FIRST>(S, sum);
      float all = 0;
      SDPA_UNROLL for (const float& x : sum) all += x;
      // hazard: P written by all warps
      fits = barrier_and(split_barrier + split, split_barrier_threads, all <= lazy_limit<B>);
    }
    if (!fits) {
      update_max<FIRST>(S, O);
      write_p<FIRST>(S, sum);
      sync();  // hazard: P written by all warps
    }
  }

  // ---- rounds ----

  // USE_BIAS=4, 5: loads the bias of the round's keys, if it changes their scores. Overlaps the products.
  __device__ __forceinline__ void load_bias(const WgmmaItem<B>& item, int round, const Scores& S) {
    if constexpr (B::key_bias) {
      if (!entry_changed(item.entry(round))) return;
      const int k = first_key_of<B>(item, round, split) + S.first_col();
      load_bias_of_keys(next_bias, S, bias_row<B>(a, item, 0, 0) + k, a.p.Sk - k);
    }
  }
  // Computes a round whose scores are in S: O.T += V.T @ P.T. Also computes the scores of the next round into S.
  template <bool FIRST>
  __device__ __forceinline__ void compute_round(int round, const WgmmaItem<B>& item, Scores& S, Sums& O) {
    const int k0 = first_key_of<B>(item, round, split);
    if (B::use_lengths && FIRST && item.keys_in_tile(k0) < B::block_n) {
      mbarrier_wait(&own_split().v_full[ring.stage], ring.parity);
      // The fence in write_p() orders these writes before the reads of wgmma.
      clear_rows_of_v<B>(own_split().V[ring.stage], item.keys_in_tile(k0), threadIdx.x % 128, 128);
    }
    const Mask& mask = item.mask(a);
    ScoreTile<B> tile{a, item, mask, item.q0, k0, item_hook_scale<B>(a, item)};
    set_listed<B>(tile, item, round);
    if constexpr (B::key_bias) tile.bias_of_columns = next_bias;
    finish_scores<B>(S, tile, mask.tiles.cover(item.q0, k0));
    float sum[ROWS];
    softmax<FIRST>(S, O, sum);
    Sums product;
    Sums& VP = FIRST ? O : product;
    S.forget_all();
    VP.forget_all();
    issue_vp(VP);
    StageRing<B::stages> next = ring;
    next.advance();
    if (round > 0) issue_kq(S, next);
    if (round > 0) load_bias(item, round - 1, S);
    if (!FIRST) combine_pair<16>(sum, sum_of);  // overlaps the products
    const float own_sum = combine_lanes(sum, sum_of);
    l = FIRST ? own_sum : l + own_sum;
    if (round == 0) write_m_l();
    wait_and_load(S, round - 1, item.rounds, next);
    ring = next;
    VP.hold_all();
    if constexpr (!FIRST) {
      SDPA_UNROLL for (int block = 0; block < D_BLOCKS; block++) {
        SDPA_UNROLL for (int j = 0; j < B::block_m / 2; j++) O.x.d[block][j] += VP.x.d[block][j];
      }
    }
  }
  // Writes m and l of the split's partial to shared memory.
  __device__ __forceinline__ void write_m_l() {
    l = combine_warps(l, sum_of);
    constexpr int owners = 8 / ROWS;  // lanes that own the same query
    const int i = int(lane) / 4 / owners;
    if (warp == 0 && lane / 4 % owners == 0) st_shared(&own_split().m_l[Scores::row(i)], float2{m, l});
  }
  // Computes the item. The loads of its first tiles have been started.
  __device__ __forceinline__ void run() {
    mbarrier_wait(&s.q_full, 0);
    const WgmmaItem<B> item = s.item;
    if constexpr (B::use_lengths) {
      const bool cleared = clear_queries_of_others<B>(s.Q, B::block_m, a, item, 0, B::block_m, int(threadIdx.x));
      if (cleared) __syncthreads();  // hazard: rows of Q zero-filled by all warps
    }
    Sums O;
    int round = item.rounds - 1;
    if (B::split_ctas == 1 || round >= 0) {
      Scores S;
      S.forget_all();
      if constexpr (B::copies_rows) {
        k_pages = WgmmaColumnsLoader<B>{s, a, split, int(warp), item}.find_pages(round - B::stages);
      }
      issue_kq(S, ring);
      load_bias(item, round, S);
      wait_and_load(S, round, item.rounds, ring);
      compute_round<true>(round, item, S, O);
      while (round-- > 0) compute_round<false>(round, item, S, O);
    } else {  // the range has no keys
      m = -INFINITY;
      l = 0;
      clear(O);
      write_m_l();
    }
    // Writes O of the split's partial to shared memory, over K, which is no longer read.
    SDPA_UNROLL for (int i = 0; i < ROWS; i++) {
      SDPA_UNROLL for (int j = 0; j < O.COLS; j++) {
        st_shared(&own_split().O[O.row(i)][O.first_col() + O.col(j)], O.x[i][j]);
      }
    }
    barrier_sync(all_barrier<B>, all_threads<B>);  // hazard: partials of all splits written
    store_merged(s, a, item, int(threadIdx.x));
  }
};

template <class B>
__global__ void __launch_bounds__(B::threads, 1) sdpa_wgmma_columns(const __grid_constant__ KernelArgs a) {
  WgmmaColumnsShared<B>& s = dynamic_shared<WgmmaColumnsShared<B>>();
  const int warp = warp_uniform(threadIdx.x / 32);
  if (!item_of_cta<B>(a).exists()) return;
  if (threadIdx.x == 32) {
    mbarrier_init(&s.q_full, 1);
    for (auto& t : s.split) {
      mbarriers_init(t.k_full, copying_warps<B>);
      mbarriers_init(t.v_full, copying_warps<B>);
    }
    fence_mbarrier_init();
  }
  prefetch_tensor_maps<B>(a);
  clear_rows_without_query<B>(s.Q, a);
  WgmmaColumnsLoader<B> loader{s, a, warp / 4, warp % 4, {}};
  if (loader.loads()) loader.find_item();
  __syncthreads();  // hazard: mbarriers initialized by one thread, rows of Q zero-filled by all
  loader.load_q();
  loader.load_first_tiles();
  wait_then_let_next_kernel_start();
  WgmmaColumns<B>(s, a).run();
}

template <class B> struct KernelOf<B, KernelKind::wgmma_transposed> {
  using Shared = WgmmaColumnsShared<B>;
  static constexpr auto entry = sdpa_wgmma_columns<B>;
};

// ---- 5e softmax with rows that move between warps (scalar, wmma) ----

// Loads a thread's elements of S. load(i): element i of a matrix in shared memory whose rows are `stride` elements
// apart.
template <class View, class Load> __device__ __forceinline__ void load_scores(View& S, int stride, const Load& load) {
  SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
    SDPA_UNROLL for (int j = 0; j < View::COLS; j++) S.x[i][j] = load(S.row(i) * stride + S.col(j));
  }
}

// Softmax for rows that move between warps: the warp that owns a row in the softmax is not the warp that owns it
// in Q @ K.T and P @ V. S, P, m, l and alpha are in shared memory.
//
// SYNC_POLICY=5 has a CTA barrier at every hazard of the tile loop. SYNC_POLICY=2 omits two redundant barriers:
// the barrier for K and V covers Q, too, and each lane reads back only m and alpha that it has computed. With
// SYNC_POLICY=1, a row has one owner throughout (WarpSoftmax), so warps share only the tiles of K and V, as in the
// mma kernel.
// SYNC_POLICY=0 has no CTA barrier in the tile loop and is racy.
template <class B, class Shared> struct CtaSoftmax {
  static constexpr int ROWS = ScalarScores<B>::ROWS;

  // The rows that this thread owns during the softmax.
  __device__ static ScalarScores<B> softmax_rows() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    ScalarScores<B> S;
    S.first_row = warp * ROW_LANES + lane / COL_LANES;
    S.row_step = ROW_LANES * B::num_warps;
    S.first_col = lane % COL_LANES;
    return S;
  }
  __device__ void start(Shared& s, const ScalarScores<B>&) {
    const ScalarScores<B> S = softmax_rows();
    SDPA_UNROLL for (int i = 0; i < ROWS; i++) {
      if (S.first_col == 0) {
        s.m[S.row(i)] = -INFINITY;
        s.l[S.row(i)] = 0;
      }
    }
    __syncthreads();  // hazard: if there is no tile, other warps read m and l in finish()
  }
  __device__ void step(Shared& s, const ScalarScores<B>& scores, float scale_log2, float (&alpha_out)[ROWS]) {
    write_view(s.P, s.P_STRIDE, scores);
    split_sync<B>(B::sync_policy >= 2);  // hazard: S was written and is read by other warps

    ScalarScores<B> S = softmax_rows();
    load_scores(S, s.P_STRIDE, [&](int i) { return ld_shared<float>(s.P + i); });
    float m[ROWS], l[ROWS], alpha[ROWS];
    SDPA_UNROLL for (int i = 0; i < ROWS; i++) m[i] = s.m[S.row(i)];
    __syncwarp();  // hazard: m still being read by the row's other lanes
    softmax_max<B>(S, scale_log2, m, alpha);
    SDPA_UNROLL for (int i = 0; i < ROWS; i++) {
      if (S.first_col == 0) {
        s.m[S.row(i)] = m[i];
        s.alpha[S.row(i)] = alpha[i];
      }
    }
    split_sync<B>(B::sync_policy == 5);  // hazard: m and alpha of the rows were written

    SDPA_UNROLL for (int i = 0; i < ROWS; i++) {
      m[i] = s.m[S.row(i)];
      alpha[i] = s.alpha[S.row(i)];
      l[i] = S.first_col == 0 ? s.l[S.row(i)] : 0.0f;
    }
    softmax_sum<B>(S, scale_log2, m, alpha, l);
    s.write_p(S);
    SDPA_UNROLL for (int i = 0; i < ROWS; i++) {
      l[i] = row_sum<COL_LANES>(l[i]);
      if (S.first_col == 0) s.l[S.row(i)] = l[i];
    }
    split_sync<B>(B::sync_policy >= 2);  // hazard: P, l and alpha were written and are read by other warps

    SDPA_UNROLL for (int i = 0; i < ROWS; i++) alpha_out[i] = s.alpha[scores.row(i)];
  }
  __device__ void finish(Shared& s, const ScalarScores<B>& scores, float (&m_out)[ROWS], float (&l_out)[ROWS]) {
    SDPA_UNROLL for (int i = 0; i < ROWS; i++) {
      m_out[i] = s.m[scores.row(i)];
      l_out[i] = s.l[scores.row(i)];
    }
  }
};

// ---- 5e wmma: tensor cores through nvcuda::wmma, S and P in shared memory (wmma) ----

namespace wmma = nvcuda::wmma;
template <class B, class Use, class Layout>
using Operand = wmma::fragment<Use, 16, 16, 16, ElementOf<B::product_type>, Layout>;
template <class T> using AccumulatorOf = wmma::fragment<wmma::accumulator, 16, 16, 16, T>;
using Accumulator = AccumulatorOf<float>;
// The type of S in shared memory. Rows of fp16 have the same stride in bytes as rows of fp32.
template <class B> using WmmaScore = std::conditional_t<B::qk_in_fp16, __half, float>;
template <class B> constexpr int SCORE_STRIDE = ScalarShared<B>::P_STRIDE* int(sizeof(float) / sizeof(WmmaScore<B>));

template <class B> struct WmmaShared : ScalarShared<B> {
  static constexpr int P16_STRIDE = B::block_n + 8;  // 8 adjacent rows start in different groups of 4 banks
  alignas(32) Element<B> P16[B::use_wmma_pv ? B::block_m * P16_STRIDE : 1];  // P for wmma, [BLOCK_M][BLOCK_N]
  uint64_t full[B::stages], empty[B::stages];  // mbarriers: tile was copied, tile was read by all consumers
  uint32_t queue_position;                     // written by next_item()

  __device__ void write_p(const ScalarScores<B>& S) {
    if (B::use_wmma_pv) write_view(P16, P16_STRIDE, S);
    else write_view(this->P, this->P_STRIDE, S);
  }
  // Stores alpha, because the lanes of S and of WmmaOutput have different rows.
  __device__ void write_alpha(const ScalarScores<B>& S, const float (&row_alpha)[ScalarScores<B>::ROWS]) {
    SDPA_UNROLL for (int i = 0; i < S.ROWS; i++) {
      if (S.first_col == 0) this->alpha[S.row(i)] = row_alpha[i];
    }
  }
};

// mbarrier_wait() for sm_80, which has no mbarrier.try_wait.
__device__ __forceinline__ void mbarrier_spin(uint64_t* barrier_s, int parity) {
  while (!mbarrier_test_wait_parity(barrier_s, parity)) {
  }
}

// Replaces CopyTogether in consumer warps if producer warps copy the tiles. The ring continues from one item
// to the next.
template <class B> struct CopyByProducers {
  WmmaShared<B>& s;
  StageRing<B::stages>& ring;

  __device__ __forceinline__ int acquire(int) {
    mbarrier_spin(&s.full[ring.stage], ring.parity);
    return ring.stage;
  }
  __device__ __forceinline__ void release() {
    mbarrier_arrive(&s.empty[ring.stage]);
    ring.advance();
  }
};

// S = Q @ K.T   [16][BLOCK_N] per warp, in shared memory
template <class B>
__device__ __forceinline__ void wmma_qk(WmmaScore<B>* S_s,
                                        const Operand<B, wmma::matrix_a, wmma::row_major> (&Q)[B::head_dim / 16],
                                        const Element<B>* K_s) {
  SDPA_UNROLL for (int n = 0; n < B::block_n; n += 16) {
    AccumulatorOf<WmmaScore<B>> S;
    wmma::fill_fragment(S, rounded<WmmaScore<B>>(0));
    SDPA_UNROLL for (int d = 0; d < B::head_dim; d += 16) {
      Operand<B, wmma::matrix_b, wmma::col_major> K;
      wmma::load_matrix_sync(K, K_s + tile_offset<B>(n, d), TILE_STRIDE<B>);
      wmma::mma_sync(S, Q[d / 16], K, S);
    }
    wmma::store_matrix_sync(S_s + n, S, SCORE_STRIDE<B>, wmma::mem_row_major);
  }
}

// O of a warp in wmma accumulators, whose layout is unspecified. To find the rows of its elements, each lane
// loads a tile of row numbers as an accumulator.
template <class B, bool = B::use_wmma_pv> struct WmmaOutput {
  Accumulator x[B::head_dim / 16];
  int row[Accumulator::num_elements];

  // scratch_s [16][P_STRIDE] belongs to this warp.
  __device__ void start(ScalarOutput<B>&, float* scratch_s, int lane) {
    __syncwarp();  // hazard: scratch_s still being read by other lanes in finish() of the previous item
    for (int i = lane; i < 16 * 16; i += 32) {
      st_shared(scratch_s + i / 16 * ScalarShared<B>::P_STRIDE + i % 16, float(i / 16));
    }
    __syncwarp();  // hazard: row numbers were written by other lanes
    Accumulator rows;
    wmma::load_matrix_sync(rows, scratch_s, ScalarShared<B>::P_STRIDE, wmma::mem_row_major);
    SDPA_UNROLL for (int e = 0; e < rows.num_elements; e++) row[e] = int(rows.x[e]);
    __syncwarp();  // hazard: scratch_s still being read by other lanes
    SDPA_UNROLL for (int n = 0; n < B::head_dim / 16; n++) wmma::fill_fragment(x[n], 0.0f);
  }

  // O = O * alpha + P @ V   [16][D]. alpha [16] and P16 [16][P16_STRIDE] are in s, from first_row on.
  __device__ __forceinline__ void multiply(ScalarOutput<B>&, const float (&)[ScalarOutput<B>::ROWS],
                                           const WmmaShared<B>& s, int first_row, const Element<B>* V_s) {
    const float* const alpha_s = s.alpha + first_row;
    const Element<B>* const P_s = s.P16 + first_row * s.P16_STRIDE;
    float alpha[Accumulator::num_elements];
    SDPA_UNROLL for (int e = 0; e < Accumulator::num_elements; e++) { alpha[e] = ld_shared<float>(alpha_s + row[e]); }
    SDPA_UNROLL for (int n = 0; n < B::head_dim / 16; n++) {
      SDPA_UNROLL for (int e = 0; e < Accumulator::num_elements; e++) x[n].x[e] *= alpha[e];
    }
    if constexpr (B::pv_in_fp16) {
      AccumulatorOf<__half> product[B::head_dim / 16];
      SDPA_UNROLL for (auto& fragment : product) wmma::fill_fragment(fragment, rounded<__half>(0));
      add_products(product, P_s, V_s);
      SDPA_UNROLL for (int n = 0; n < B::head_dim / 16; n++) {
        SDPA_UNROLL for (int e = 0; e < Accumulator::num_elements; e++) { x[n].x[e] += to_float(product[n].x[e]); }
      }
    } else {
      add_products(x, P_s, V_s);
    }
  }
  // sums += P @ V. Accumulators of fp16 and fp32 have the same layout; tests/conformance.cu checks that.
  template <class Sums>
  static __device__ __forceinline__ void add_products(Sums& sums, const Element<B>* P_s, const Element<B>* V_s) {
    SDPA_UNROLL for (int k = 0; k < B::block_n; k += 16) {
      Operand<B, wmma::matrix_a, wmma::row_major> P;
      wmma::load_matrix_sync(P, P_s + k, WmmaShared<B>::P16_STRIDE);
      SDPA_UNROLL for (int d = 0; d < B::head_dim; d += 16) {
        Operand<B, wmma::matrix_b, wmma::row_major> V;
        wmma::load_matrix_sync(V, V_s + tile_offset<B>(k, d), TILE_STRIDE<B>);
        wmma::mma_sync(sums[d / 16], P, V, sums[d / 16]);
      }
    }
  }

  // Copies the accumulators to the view O through this warp's scratch_s [16][P_STRIDE], BLOCK_N columns at a
  // time. Row 0 of scratch_s is row first_row of O.
  __device__ void finish(ScalarOutput<B>& O, float* scratch_s, int first_row) const {
    SDPA_UNROLL for (int begin = 0; begin < B::head_dim; begin += B::block_n) {
      constexpr int stride = ScalarShared<B>::P_STRIDE;
      const int end = begin + B::block_n < B::head_dim ? begin + B::block_n : B::head_dim;
      __syncwarp();  // hazard: scratch_s still being read by other lanes
      SDPA_UNROLL for (int d = begin; d < end; d += 16) {
        wmma::store_matrix_sync(scratch_s + d - begin, x[d / 16], stride, wmma::mem_row_major);
      }
      __syncwarp();  // hazard: scratch_s was written by other lanes
      SDPA_UNROLL for (int i = 0; i < O.ROWS; i++) {
        SDPA_UNROLL for (int j = 0; j < O.COLS; j++) {
          if (O.col(j) < begin || O.col(j) >= end) continue;
          O.x[i][j] = ld_shared<float>(scratch_s + (O.row(i) - first_row) * stride + O.col(j) - begin);
        }
      }
    }
  }
};

// USE_WMMA_PV=0: P @ V runs on the FMA pipes, so O is always a view.
template <class B> struct WmmaOutput<B, false> {
  __device__ void start(ScalarOutput<B>& O, float*, int) { clear(O); }
  __device__ __forceinline__ void multiply(ScalarOutput<B>& O, const float (&alpha)[ScalarOutput<B>::ROWS],
                                           const WmmaShared<B>& s, int, const Element<B>* V_s) {
    scalar_pv<B>(O, alpha, s.P, V_s);
  }
  __device__ void finish(ScalarOutput<B>&, float*, int) const {}
};

// Computes a consumer warp's 16 rows of an item, with the tiles of K and V that the pipeline provides.
template <class B, class Pipeline>
__device__ __forceinline__ void wmma_consume(WmmaShared<B>& s, const KernelArgs& a, const Item<B>& item,
                                             const ItemTiles<B>& t, Pipeline& pipeline) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = warp * 16;
  float* const S_s = s.P + first_row * s.P_STRIDE;

  ScalarScores<B> S;
  ScalarOutput<B> O;
  S.first_row = first_row + lane / COL_LANES;
  S.row_step = ROW_LANES;
  S.first_col = lane % COL_LANES;
  O.first_row = S.first_row;
  O.first_col = lane % COL_LANES * O.RUN;

  // Each warp copies its own rows of Q.
  Element<B>* const Q_s = s.Q + tile_offset<B>(first_row, 0);
  t.template copy_q<16, 32>(Q_s, first_row, lane);
  VectorCopy<B::use_cp_async>::commit();
  VectorCopy<B::use_cp_async>::template wait<0>();
  __syncwarp();  // hazard: Q was copied by other lanes
  Operand<B, wmma::matrix_a, wmma::row_major> Q[B::head_dim / 16];
  SDPA_UNROLL for (int d = 0; d < B::head_dim; d += 16) { wmma::load_matrix_sync(Q[d / 16], Q_s + d, TILE_STRIDE<B>); }

  const ItemScales<B> scales(a, item);
  WmmaOutput<B> sums;
  sums.start(O, S_s, lane);
  TileSoftmax<B, WmmaShared<B>> softmax;
  softmax.start(s, S);
  for (int k0 = t.keys.begin; k0 < t.keys.end; k0 += B::block_n) {
    const int stage = pipeline.acquire(k0);
    wmma_qk<B>(reinterpret_cast<WmmaScore<B>*>(S_s), Q, s.K[stage]);
    __syncwarp();  // hazard: S was written by other lanes
    load_scores(S, SCORE_STRIDE<B>, [&](int i) {
      if constexpr (B::qk_in_fp16) return to_float(ld_shared<__half>(reinterpret_cast<const __half*>(s.P) + i));
      else return ld_shared<float>(s.P + i);
    });
    // hazard: fp32 values overwrite the fp16 S, which other lanes still read. With an fp32 S, each lane overwrites only
    // what it has read.
    if (B::qk_in_fp16) __syncwarp();
    finish_item_scores<B>(S, a, item, t.mask, item.q0, k0, is_unmasked<B>(a, t.mask, item.q0, k0));
    float alpha[ScalarOutput<B>::ROWS];
    softmax.step(s, S, scales.scale_log2(), alpha);
    sums.multiply(O, alpha, s, first_row, s.V[stage]);
    pipeline.release();
  }
  sums.finish(O, S_s, first_row);
  float m[ScalarOutput<B>::ROWS], l[ScalarOutput<B>::ROWS];
  softmax.finish(s, S, m, l);
  store_result(O, m, l, a, item);
}

// Sets i to the index of the CTA's next item. Returns false if there is none.
template <class B> __device__ __forceinline__ bool next_item(const KernelArgs& a, uint32_t& position_s, uint32_t& i) {
  if (!B::use_persistent_cta) return false;
  __syncthreads();  // hazard: other warps still read position_s and the tiles of the previous item
  if (threadIdx.x == 0) position_s = fetch_queue_position<B>(a);
  __syncthreads();  // hazard: position_s was written by thread 0
  i = gridDim.x + position_s;
  return i < a.work_items;
}

template <class B> __global__ void __launch_bounds__(B::threads, 1) sdpa_wmma(const __grid_constant__ KernelArgs a) {
  WmmaShared<B>& s = dynamic_shared<WmmaShared<B>>();
  const int tid = threadIdx.x;
  constexpr int consumers = B::num_warps * 32;
  StageRing<B::stages> ring;
  if constexpr (B::use_warp_specialization) {
    if (tid == 0) {
      mbarriers_init(s.full, B::producer_threads);
      mbarriers_init(s.empty, consumers);
    }
    __syncthreads();  // hazard: mbarriers were initialized by thread 0
  }

  uint32_t i = item_index_of_cta<B>(a);
  do {
    const Item<B> item = work_item<B>(a, i);
    if constexpr (!B::use_warp_specialization) {
      const ItemTiles<B> t(a, item, 0, tid);
      CopyTogether<B, WmmaShared<B>> pipeline(s, t);
      wmma_consume<B>(s, a, item, t, pipeline);
    } else if (tid >= consumers) {
      ItemTiles<B> t(a, item, 0, tid - consumers);
      for (int k0 = t.keys.begin; k0 < t.keys.end; k0 += B::block_n) {
        mbarrier_spin(&s.empty[ring.stage], ring.parity ^ 1);  // no wait at the first use of a stage
        t.copy_kv(s, ring.stage, k0);
        if (B::use_cp_async) cp_async_mbarrier_arrive_noinc(&s.full[ring.stage]);
        else mbarrier_arrive(&s.full[ring.stage]);
        ring.advance();
      }
    } else {
      const ItemTiles<B> t(a, item, 0, tid);
      CopyByProducers<B> pipeline{s, ring};
      wmma_consume<B>(s, a, item, t, pipeline);
    }
  } while (next_item<B>(a, s.queue_position, i));
}

template <class B> struct KernelOf<B, KernelKind::wmma> {
  using Shared = WmmaShared<B>;
  static constexpr auto entry = sdpa_wmma<B>;
};

// ---- 5f 2^x on the FMA pipes (USE_FAST_EXP) ----

// Returns 2^t, computed on the FMA pipes. t = n + f with n = floor(t). 2^f is approximated by a cubic p with
// p(0) = 1, whose maximum relative error on [0,1] is 8.6e-5 (tests/unit.cu tests [-126, 0]).
// Adding `magic`, rounded down, leaves n + 127 in the low bits of the sum: the biased exponent. Results below
// 2^-126 are 0, as with ex2.approx.ftz; 2^0 is exactly 1; NaN gives NaN. Only lazy rescaling passes t > 127,
// which is clamped.
template <class B> __device__ __forceinline__ float exp2_polynomial(float t) {
  constexpr float magic = 12582912.0f + 127.0f;  // 1.5 * 2^23 + exponent bias
  if (B::use_lazy_max) t = min_nan(t, 127.0f);
  t = max_nan(t, -127.0f);
  const float shifted = add_rm(t, magic);
  const float f = t - (shifted - magic);
  const float power = fmaf(fmaf(fmaf(0.07706704f, f, 0.22764499f), f, 0.69511679f), f, 1.0f);
  return power * float_of(bits_of(shifted) << 23);
}

// ---- 5f tanh (USE_SOFTCAP = 1, USE_SOFTCAP = 2, SCORE_MOD, MASK_MOD) ----

// Returns 1 - 2 / (1 + e^2t). Near 0, where the subtraction cancels, returns the Taylor series.
__device__ __forceinline__ float tanh_exact(float t) {
  const float square = t * t;
  const float series = t * fmaf(square, fmaf(square, fmaf(square, -17.0f / 315, 2.0f / 15), -1.0f / 3), 1);
  const float exact = 1 - 2 * rcp_approx_ftz(1 + ex2_approx_ftz(t * 2.88539008f));  // 2 * log2(e)
  return square < 0.0625f ? series : exact;
}

// ---- 5f softcap ----

// USE_SOFTCAP: tanh(x * hook_scale).
template <class B> __device__ __forceinline__ float capped(float x, float hook_scale) {
  return B::use_softcap == 1 ? tanh_approx(x * hook_scale) : tanh_exact(x * hook_scale);
}
// If the tanh is exact or a polynomial, replaces_scores() is tested once per tile, so that the tanh of several
// scores overlap. Otherwise it is tested per score, since a branch per tile is up to 4% slower.
template <class B, class View>
__device__ __forceinline__ void cap_scores(View& S, const KernelArgs& a, ScoreScale<B> hook_scale, int first, int last) {
  if constexpr (B::use_softcap != 0) {
    if ((B::use_softcap == 2 || B::caps_by_polynomial) && !replaces_scores<B>(a)) return;
    SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
      SDPA_UNROLL for (int j = first; j < last; j++) {
        float& x = S.x[i][j];
        x = B::use_softcap == 2 || replaces_scores<B>(a) ? capped<B>(x, of_row(hook_scale, i)) : x;
      }
    }
  }
}

// ---- 5f arrays that expressions index by head (SCORE_MOD, MASK_MOD) ----

// True if the expression `text` contains x<number>[h]. Spaces may follow the number, [ and h.
constexpr bool reads_by_head(std::string_view text, int number) {
  const char wanted[] = {'x', char('0' + number), '[', 'h', ']'};
  for (size_t at = text.find(wanted[0]); at != text.npos; at = text.find(wanted[0], at + 1)) {
    size_t end = at, found = 0;
    for (; end < text.size() && found < 5 && (text[end] == wanted[found] || (text[end] == ' ' && found > 1)); end++) {
      found += text[end] != ' ';
    }
    if (found == 5) return true;
  }
  return false;
}
template <int N> constexpr bool is_read_by_head = reads_by_head(SCORE_MOD_text, N) || reads_by_head(MASK_MOD_text, N);

// ---- 5f expressions of scores (SCORE_MOD, MASK_MOD) ----
//
// The types of the names in an expression. Their operators keep a logit in the following form, so that the
// exponent of P takes at most two FMAs:
//
//   logit = score * factor + base + slope * column
//   exponent = score * factor_log2 + ((slope * log2e) * column + (base * log2e - m_log2))
//
// column is a compile-time constant. factor, base and slope usually are the same in all columns of a row.
// Then the terms in parentheses are computed once per row. An expression without this form becomes a Number.

namespace expression {

constexpr float log2e = 1.44269504f;
// The index of a query or a key: base + slope * column.
struct Position {
  int base, slope, column;
  __device__ __forceinline__ operator int() const { return base + slope * column; }
};
// The index of a head, and x0[h] to x3[h]. Those that an expression contains are loaded once per item.
struct Head {
  int h;
  float x[4];
  __device__ __forceinline__ operator int() const { return h; }
};
struct Number {
  float value;
  __device__ __forceinline__ operator float() const { return value; }
};
// base + slope * column. Adding -0 leaves every float unchanged, so the compiler removes the addition.
struct Linear {
  float base = -0.0f, slope = -0.0f;
  int column = 0;
  __device__ __forceinline__ operator float() const { return slope * float(column) + base; }
};
struct Sum {
  float score, factor, factor_log2;  // factor_log2: factor * log2e
  Linear offset;
  __device__ __forceinline__ operator float() const { return score * factor + float(offset); }
};
// The score s in an expression.
struct Score {
  float score, factor, factor_log2;
  __device__ __forceinline__ operator float() const { return score * factor; }
};

template <class T, class... Types> constexpr bool is_any_of = (std::is_same_v<T, Types> || ...);
template <class T> constexpr bool is_value = is_any_of<T, Number, Linear, Sum, Score>;
template <class T> constexpr bool is_position = is_any_of<T, Position>;
template <class T> constexpr bool is_integer = std::is_integral_v<T> || is_any_of<T, Position, Head>;
template <class T> constexpr bool is_operand = is_value<T> || is_integer<T> || std::is_floating_point_v<T>;
template <class X, class Y> constexpr bool are_operands = is_operand<X> && is_operand<Y>;
// True if the operators below apply to X and Y: one of them is a value, or one is a Position and the other
// floating-point.
template <class X, class Y>
constexpr bool is_value_operation = are_operands<X, Y> &&
                                    (is_value<X> || is_value<Y> || (is_position<X> && std::is_floating_point_v<Y>) ||
                                     (is_position<Y> && std::is_floating_point_v<X>));
template <bool CONDITION> using If = std::enable_if_t<CONDITION, int>;

// Converts an operand to a Number, a Linear or a Sum.
__device__ __forceinline__ Linear term(Position x) {
  return {float(x.base), x.slope ? float(x.slope) : -0.0f, x.column};
}
__device__ __forceinline__ Number term(Head x) { return {float(x.h)}; }
__device__ __forceinline__ Linear term(Linear x) { return x; }
__device__ __forceinline__ Sum term(Sum x) { return x; }
__device__ __forceinline__ Sum term(Score x) { return {x.score, x.factor, x.factor_log2, {}}; }
__device__ __forceinline__ Number term(Number x) { return x; }
template <class T, If<std::is_arithmetic_v<T>> = 0> __device__ __forceinline__ Number term(T x) { return {float(x)}; }

__device__ __forceinline__ Number plus(Number x, Number y) { return {x.value + y.value}; }
__device__ __forceinline__ Linear plus(Linear x, Number y) { return {x.base + y.value, x.slope, x.column}; }
__device__ __forceinline__ Linear plus(Number x, Linear y) { return plus(y, x); }
__device__ __forceinline__ Linear plus(Linear x, Linear y) {
  return {x.base + y.base, x.slope + y.slope, x.column ? x.column : y.column};
}
template <class Y> __device__ __forceinline__ Sum plus(Sum x, Y y) {
  return {x.score, x.factor, x.factor_log2, plus(x.offset, y)};
}
template <class X> __device__ __forceinline__ Sum plus(X x, Sum y) { return plus(y, x); }
__device__ __forceinline__ Number plus(Sum x, Sum y) { return {float(x) + float(y)}; }

__device__ __forceinline__ Number times(Number x, Number y) { return {x.value * y.value}; }
__device__ __forceinline__ Linear times(Linear x, Number y) { return {x.base * y.value, x.slope * y.value, x.column}; }
__device__ __forceinline__ Sum times(Sum x, Number y) {
  return {x.score, x.factor * y.value, x.factor_log2 * y.value, times(x.offset, y)};
}
template <class X> __device__ __forceinline__ auto times(Number x, X y) { return times(y, x); }
template <class X, class Y> __device__ __forceinline__ Number times(X x, Y y) { return {float(x) * float(y)}; }

template <class X, class Y, If<is_value_operation<X, Y>> = 0> __device__ __forceinline__ auto operator+(X x, Y y) {
  return plus(term(x), term(y));
}
template <class X, class Y, If<is_value_operation<X, Y>> = 0> __device__ __forceinline__ auto operator*(X x, Y y) {
  return times(term(x), term(y));
}
template <class X, If<is_value<X>> = 0> __device__ __forceinline__ auto operator-(X x) {
  return times(term(x), Number{-1});
}
template <class X, class Y, If<is_value_operation<X, Y>> = 0> __device__ __forceinline__ auto operator-(X x, Y y) {
  return plus(term(x), times(term(y), Number{-1}));
}
template <class X, class Y, If<is_value_operation<X, Y>> = 0> __device__ __forceinline__ auto operator/(X x, Y y) {
  return times(term(x), Number{1 / float(y)});
}
__device__ __forceinline__ Position operator-(Position x) { return {-x.base, -x.slope, x.column}; }
__device__ __forceinline__ Position operator+(Position x, Position y) {
  return {x.base + y.base, x.slope + y.slope, x.column};
}
__device__ __forceinline__ Position operator-(Position x, Position y) { return x + -y; }
template <class N, If<std::is_integral_v<N>> = 0> __device__ __forceinline__ Position operator+(Position x, N n) {
  return {x.base + int(n), x.slope, x.column};
}
template <class N, If<std::is_integral_v<N>> = 0> __device__ __forceinline__ Position operator+(N n, Position x) {
  return x + n;
}
template <class N, If<std::is_integral_v<N>> = 0> __device__ __forceinline__ Position operator-(Position x, N n) {
  return x + -int(n);
}
template <class N, If<std::is_integral_v<N>> = 0> __device__ __forceinline__ Position operator-(N n, Position x) {
  return -x + n;
}

// The functions that expressions may call. real() makes an index a floating-point operand.
template <class X> __device__ __forceinline__ auto real(X x) { return term(x); }
template <class X> __device__ __forceinline__ Number exp(X x) { return {::expf(float(x))}; }
template <class X> __device__ __forceinline__ Number exp2(X x) { return {::exp2f(float(x))}; }
template <class X> __device__ __forceinline__ Number log(X x) { return {::logf(float(x))}; }
template <class X> __device__ __forceinline__ Number log2(X x) { return {::log2f(float(x))}; }
template <class X> __device__ __forceinline__ Number sqrt(X x) { return {::sqrtf(float(x))}; }
template <class X> __device__ __forceinline__ Number sin(X x) { return {::sinf(float(x))}; }
template <class X> __device__ __forceinline__ Number cos(X x) { return {::cosf(float(x))}; }
template <class X> __device__ __forceinline__ Number floor(X x) { return {::floorf(float(x))}; }
template <class X, class Y, If<are_operands<X, Y>> = 0> __device__ __forceinline__ Number pow(X x, Y y) {
  return {::powf(float(x), float(y))};
}
template <class X> __device__ __forceinline__ Sum tanh(X x) {
  return {SDPA_NAMESPACE::tanh_exact(float(x)), 1, log2e, {}};
}
// tanh in one instruction; its error is at most 2^-11.
template <class X> __device__ __forceinline__ Sum tanh_approx(X x) {
  return {SDPA_NAMESPACE::tanh_approx(float(x)), 1, log2e, {}};
}
template <class X> __device__ __forceinline__ auto abs(X x) {
  if constexpr (is_integer<X>) return int(x) < 0 ? -int(x) : int(x);
  else return Number{fabsf(float(x))};
}
template <class X, class Y, If<are_operands<X, Y>> = 0> __device__ __forceinline__ auto min(X x, Y y) {
  if constexpr (is_integer<X> && is_integer<Y>) return int(x) < int(y) ? int(x) : int(y);
  else return Number{fminf(float(x), float(y))};
}
template <class X, class Y, If<are_operands<X, Y>> = 0> __device__ __forceinline__ auto max(X x, Y y) {
  if constexpr (is_integer<X> && is_integer<Y>) return int(x) > int(y) ? int(x) : int(y);
  else return Number{fmaxf(float(x), float(y))};
}
// The array x<NUMBER>.
template <int NUMBER> struct Reals {
  const float* at;
  __device__ __forceinline__ Number operator[](Head head) const {
    if constexpr (is_read_by_head<NUMBER>) return {head.x[NUMBER]};
    return {ld_global_nc<float>(at + head.h)};
  }
  __device__ __forceinline__ Number operator[](int64_t i) const { return {ld_global_nc<float>(at + i)}; }
};
struct Ints {
  const int* at;
  __device__ __forceinline__ int operator[](int64_t i) const { return ld_global_nc<int>(at + i); }
};
// The result of mask_mod() in builds that hide no key.
struct Always {
  __device__ __forceinline__ constexpr operator bool() const { return true; }
};

// SCORE_MOD and MASK_MOD as functions. Their default NONE means s in score_mod() and true in mask_mod().
template <class S, class H>  // H: int or Head
__device__ __forceinline__ auto score_mod(S s, int b, H h, Position q, Position k, int Sq, int Sk,
                                          const SdpaParams& p) {
  [[maybe_unused]] const Reals<0> x0{p.x0};
  [[maybe_unused]] const Reals<1> x1{p.x1};
  [[maybe_unused]] const Reals<2> x2{p.x2};
  [[maybe_unused]] const Reals<3> x3{p.x3};
  [[maybe_unused]] const S NONE = s;
  (void)b, (void)h, (void)q, (void)k, (void)Sq, (void)Sk;
  return SCORE_MOD;
}
template <class H>
__device__ __forceinline__ auto mask_mod(int b, H h, Position q, Position k, int Sq, int Sk, const SdpaParams& p) {
  [[maybe_unused]] const Reals<0> x0{p.x0};
  [[maybe_unused]] const Reals<1> x1{p.x1};
  [[maybe_unused]] const Reals<2> x2{p.x2};
  [[maybe_unused]] const Reals<3> x3{p.x3};
  [[maybe_unused]] const Ints i0{p.i0}, i1{p.i1};
  [[maybe_unused]] constexpr Always NONE;
  (void)b, (void)h, (void)q, (void)k, (void)Sq, (void)Sk;
  return MASK_MOD;
}

}  // namespace expression

// Returns array[h], where the array is x<N>, in a uniform register. Returns 0 if no expression contains
// x<N>[h].
template <int N> __device__ __forceinline__ float value_of_head(const float* array, int h) {
  if constexpr (is_read_by_head<N>) return __shfl_sync(0xffffffffu, ld_global_nc<float>(array + h), 0);
  return 0;
}
// True if `text` contains `name` as a whole word.
constexpr bool contains_word(std::string_view name, std::string_view text) {
  const auto in_word = [](char c) {
    return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  };
  for (size_t at = text.find(name); at != text.npos; at = text.find(name, at + 1)) {
    const size_t end = at + name.size();
    if ((at == 0 || !in_word(text[at - 1])) && (end == text.size() || !in_word(text[end]))) return true;
  }
  return false;
}
// True if SCORE_MOD or MASK_MOD contains `name`.
constexpr bool mods_contain(std::string_view name) {
  return contains_word(name, SCORE_MOD_text) || contains_word(name, MASK_MOD_text);
}

template <class B> struct ScoreMod {
  using Score = expression::Score;
  using Position = expression::Position;
  // logit() returns the logit of a score; sees() returns true if query q sees key k. To add a modification
  // with its own knob, extend one of them and list the knob in SDPA_LOGIT_KNOBS or SDPA_MASK_KNOBS. S: Score,
  // or another type with its operators. H: int or Head.
  template <class S, class H>
  static __device__ __forceinline__ auto logit(S s, int b, H h, Position q, Position k, int Sq, int Sk,
                                               const SdpaParams& p) {
    return expression::score_mod(s, b, h, q, k, Sq, Sk, p);
  }
  template <class H>
  static __device__ __forceinline__ auto sees(int b, H h, Position q, Position k, int Sq, int Sk,
                                              const SdpaParams& p) {
    return expression::mask_mod(b, h, q, k, Sq, Sk, p);
  }
  static __device__ int expression_head(const ScoreTile<B>& tile) { return tile.item.h; }
  // True if registers hold x0[h] to x3[h] for a whole item. With 16 warps, a thread has too few registers.
  // With packed GQA, the rows of an item belong to several heads.
  static constexpr bool keeps_head = B::num_warps < 16 && !B::pack_gqa;
  template <class Rows> static __device__ __forceinline__ auto expression_head(const Rows& rows) {
    const auto& x = rows.x_of_head;
    if constexpr (keeps_head) return expression::Head{rows.h, {x[0], x[1], x[2], x[3]}};
    else return rows.h;
  }
  // Called at the start of an item. Loads its batch, its head and x0[h] to x3[h].
  template <class Rows> static __device__ __forceinline__ void start(Rows& rows) {
    rows.b = warp_uniform(rows.item->b);
    rows.h = warp_uniform(rows.item->h);
    if constexpr (!keeps_head) return;
    const SdpaParams& p = rows.a.p;
    rows.x_of_head[0] = value_of_head<0>(p.x0, rows.h);
    rows.x_of_head[1] = value_of_head<1>(p.x1, rows.h);
    rows.x_of_head[2] = value_of_head<2>(p.x2, rows.h);
    rows.x_of_head[3] = value_of_head<3>(p.x3, rows.h);
  }
  template <class H> static __device__ __forceinline__ auto head_of_row(H h, const KernelArgs& a, int row) {
    if constexpr (B::pack_gqa) return min(int(h) + int(a.item_queries.divide(uint32_t(row))), a.p.Hq - 1);
    else return h;
  }
  // Calls use(i, j, logit, visible) for the thread's columns [first, last) of S. SCORE: Score, or the Dual of the
  // backward pass. WHOLE: all keys of the tile exist. Otherwise indices of keys past the end are clamped to the
  // last key. Indices of padding rows are clamped to the first or the last query.
  template <bool WHOLE, class SCORE = Score, class View, class Tile, class Use>
  static __device__ __forceinline__ void each(View& S, int first, int last, const Tile& tile, const Use& use) {
    const KernelArgs& a = tile.a;
    const int b = tile.batch_of_item();
    const auto item_h = expression_head(tile);
    const int Sq = tile.query_count(), Sk = tile.mask.keys.Sk, last_key = max(Sk, 1) - 1;
    const int k0 = tile.k0 + column_offset<B>(S);
    const ScoreScale<B> hook_scale = tile.hook_scale();
    tile.locate(S);
    SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
      const int row = S.row(i), q = min(max(query_of<B>(a, tile.q0, row), 0), Sq - 1);
      const auto h = head_of_row(item_h, a, row);
      SDPA_UNROLL for (int j = first; j < last; j++) {
        const int column = S.col(j) - S.col(0);
        const Position query{q, 0, column};
        const Position key = WHOLE ? Position{k0 + S.col(0), 1, column}
                                   : Position{min(k0 + S.col(j), last_key), 0, column};
        const float factor = of_row(hook_scale, i);
        const SCORE score{S.x[i][j], factor,
                          B::kv_bytes == 1 ? factor * expression::log2e : a.score_scale_log2};
        const bool visible = !B::hides_keys || sees(b, h, query, key, Sq, Sk, a.p);
        use(i, j, logit(score, b, h, query, key, Sq, Sk, a.p), visible);
      }
    }
  }
  // USE_KEY_MASK: like each(), but `visible` is false for keys that the mask hides.
  template <bool WHOLE, class View, class Tile, class Use>
  static __device__ __forceinline__ void each_by_key_mask(View& S, int first, int last, const Tile& tile,
                                                          const Use& use) {
    tile.locate(S);
    const KeyBits<B> keys(tile, S, first, last);
    each<WHOLE>(S, first, last, tile, [&](int i, int j, auto logit, bool visible) {
      use(i, j, logit, visible && keys.has(S.col(j) - S.col(0)));
    });
  }
  // Like each() or each_by_key_mask(). STEPS: 8 columns at a time, to need fewer registers. The condition
  // scale_log2 == 0 is never true. It begins a new basic block, without which ptxas spills.
  template <bool WHOLE, bool STEPS, class View, class Tile, class Use>
  static __device__ __forceinline__ void each_in_steps(View& S, int first, int last, const Tile& tile, const Use& use) {
    const int at_once = STEPS && (last - first) % 8 == 0 ? 8 : last - first;
    SDPA_UNROLL for (int step = first; step < last; step += at_once) {
      if (STEPS && tile.a.scale_log2 == 0) return;
      if constexpr (B::use_key_mask) each_by_key_mask<WHOLE>(S, step, step + at_once, tile, use);
      else each<WHOLE>(S, step, step + at_once, tile, use);
    }
  }
  // Returns log2(P) = logit * log2e - m_log2. Without SCORE_MOD: score * scale_log2 - m_log2.
  template <class T> static __device__ __forceinline__ float exponent(T logit, float scale_log2, float m_log2) {
    using namespace expression;
    const auto y = term(logit);
    if constexpr (!B::changes_logits) {
      return fmaf(y.score, scale_log2, -m_log2);
    } else if constexpr (std::is_same_v<decltype(y), const Sum>) {
      const float offset = y.offset.slope * log2e * float(y.offset.column) + fmaf(y.offset.base, log2e, -m_log2);
      return fmaf(y.score, y.factor_log2, offset);
    } else {
      return fmaf(float(y), log2e, -m_log2);
    }
  }
};

template <class B, class View, class Tile>
__device__ __forceinline__ void modify_scores(View& S, const Tile& tile, bool unmasked) {
  if constexpr (B::modifies_scores) {
    using Mod = ScoreMod<B>;
    const auto modify = [&](int i, int j, auto logit, bool visible) {
      if constexpr (B::changes_logits) S.x[i][j] = float(logit);
      if (!visible) S.x[i][j] = -INFINITY;
    };
    // With lazy rescaling, few tiles reach this code, so unmasked tiles use the code of masked ones, unless
    // there is a key mask.
    if (B::use_key_mask && unmasked) Mod::template each_in_steps<true, false>(S, 0, View::COLS, tile, modify);
    else if (!B::use_lazy_max && unmasked) Mod::template each<true>(S, 0, View::COLS, tile, modify);
    else Mod::template each_in_steps<false, B::use_lazy_max>(S, 0, View::COLS, tile, modify);
  }
}

// Builds in which no knob changes logits or hides keys do not call the hook. Then logit() and sees() must
// have no effect.
[[maybe_unused]] __device__ inline void check_expressions(const SdpaParams& p) {
  using Logit = decltype(ScoreMod<Defines>::logit(expression::Score{}, 0, 0, {}, {}, 0, 0, p));
  using Seen = decltype(ScoreMod<Defines>::sees(0, 0, {}, {}, 0, 0, p));
  static_assert(Defines::changes_logits || std::is_same_v<Logit, expression::Score>,
                "ScoreMod::logit() changes logits, but no knob of SDPA_LOGIT_KNOBS is set: add its knob there");
  static_assert(Defines::hides_keys || std::is_same_v<Seen, expression::Always>,
                "ScoreMod::sees() hides keys, but no knob of SDPA_MASK_KNOBS is set: add its knob there");
}

// ---- 5f softcap by a polynomial (wgmma and USE_WARP_SPECIALIZATION and USE_SOFTCAP = 1) ----
//
// tanh.approx and ex2.approx have the same throughput. With both per score, the special-function unit is as
// busy as the tensor cores. Therefore tanh(x) is approximated by the minimax polynomial x * (k0 + k1 * x^2
// + k2 * x^4), whose error for |x| <= 0.85 is at most 2^-11, as is that of tanh.approx. For |x| > 0.85 the
// polynomial grows faster than tanh.
//
// Scores need no range check if the row max m is within the bounds that the constructor tests:
//   x > 0.85     P is larger than 2^16, which add_to() detects by the sum of P
//   x < -0.85    P is below 2^-30 with the polynomial and with tanh
//
// The square is completed, so that every FMA reads one operand from constant memory. Three register operands
// would be slower.

template <class Args> void set_cap_polynomial(Args& a) {
  const double h = a.hook_scale, k0 = 0.9995825, k1 = -0.3226164, k2 = 0.08978852, shift = k1 / (2 * k2);
  if (h < 1e-7 || h > 1e7) return;  // the powers of h would overflow or underflow
  a.cap_polynomial = {float(shift / (h * h)), float((k0 / k2 - shift * shift) / (h * h * h * h)),
                      float(k2 * h * h * h * h * h * a.scale_log2)};
}

template <class B> struct CappedSoftmax : StaleSoftmax<B, 2> {
  using Base = StaleSoftmax<B, 2>;
  using Base::m_log2, Base::sum;
  const KernelArgs& a;
  bool by_polynomial;

  __device__ __forceinline__ CappedSoftmax(const float (&m)[2], const ItemScales<B>& scales)
      : Base(m, scales), a(scales.a) {
    const float exponent_at_bound = 0.691f * a.scale_log2;  // of x = 0.85: tanh(0.85) * scale_log2
    bool is_in_bounds = a.cap_polynomial.factor != 0;
    SDPA_UNROLL for (int i = 0; i < 2; i++) {
      is_in_bounds &= 30 - exponent_at_bound <= m_log2[i] && m_log2[i] <= exponent_at_bound - 16;
    }
    by_polynomial = __all_sync(0xffffffffu, is_in_bounds);
  }
  // Replaces columns [first, last) of S by P of the capped scores.
  template <class View> __device__ __forceinline__ void exp_capped(View& S, int first, int last) {
    if (!by_polynomial) {
      cap_scores<B>(S, a, a.hook_scale, first, last);
      return softmax_exp<B>(S, first, last, Base::tile_scale_log2, m_log2, sum);
    }
    SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
      SDPA_UNROLL for (int j = first; j < last; j++) {
        const CapPolynomial& fit = a.cap_polynomial;
        const float s = S.x[i][j], y = fmaf(s, s, fit.shift);
        S.x[i][j] = softmax_exp2<B>(fmaf(s * fmaf(y, y, fit.rest), fit.factor, -m_log2[i]));
        sum[i] += S.x[i][j];
      }
    }
  }
  // For |x| > 0.85 log2(P) does not recover the logit, because the polynomial differs from tanh.
  __device__ bool keeps_logits() const { return !by_polynomial; }
  __device__ __forceinline__ bool add_to(float (&l)[2]) const {
    return Base::add_to(l, by_polynomial ? fminf(lazy_limit<B>, 0x1p16f) : lazy_limit<B>);
  }
};

// ---- 5g the bias in global memory (USE_BIAS = 1..5) ----

// Returns the address of the bias of row r of the tile at query q0. The bias has one row per query. A row has
// a contiguous element for each of the last bias_keys keys of the sequence; earlier keys have no bias. The
// strides may be 0. USE_BIAS=1, 3: the element, of Q's type or fp32, is added to the logit; -inf hides the
// key. USE_BIAS=4, 5: as 1, 3, with one row per batch. USE_BIAS=2: the element is a byte; 0 hides the key.
// The query and the head of a padding row are clamped to valid ones.
template <class B>
__device__ __forceinline__ const Bias* bias_row(const KernelArgs& a, const Item<B>& item, int q0, int r) {
  const SdpaParams& p = a.p;
  const int q = min(max(query_of<B>(a, q0, r), 0), item.query_count(p) - 1);
  const int h = min(item.h + (B::pack_gqa ? int(a.item_queries.divide(uint32_t(r))) : 0), p.Hq - 1);
  return static_cast<const Bias*>(p.bias) + item.b * p.bias_strides.batch + h * p.bias_strides.head +
         q * p.bias_strides.row;
}
__host__ __device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float with_bias(float x, Bias bias, float logit_scale) {
  if constexpr (Defines::use_bias == 2) return bias ? x : -INFINITY;
  return fmaf(x, logit_scale, to_float(bias));
}
using BiasPair = VectorType<2 * sizeof(Bias)>;
// Adds two adjacent elements of the bias to x and y. The element for x is in the low bits.
template <class Pair> __device__ __forceinline__ void add_pair(float& x, float& y, Pair pair, const KernelArgs& a) {
  Bias bias[2];
  memcpy(bias, &pair, sizeof bias);
  x = with_bias(x, bias[0], a.logit_scale);
  y = with_bias(y, bias[1], a.logit_scale);
}
// USE_BIAS=4, 5: load_bias_of_keys() loads the bias of a thread's columns, add_bias_of_keys() adds it to the
// thread's rows. bias_g: address of the bias of the thread's first column; `columns` columns from there on
// have a bias.
template <class View>
__device__ __forceinline__ void load_bias_of_keys(Bias (&bias)[View::COLS], const View& S, const Bias* bias_g,
                                                  int columns) {
  SDPA_UNROLL for (int j = 0; j < View::COLS; j++) {
    bias[j] = S.col(j) - S.col(0) < columns ? ld_global_nc<Bias>(bias_g + (S.col(j) - S.col(0))) : rounded<Bias>(0);
  }
}
template <class View> __device__ __forceinline__ void add_bias_of_keys(View& S, const KernelArgs& a, const Bias* bias) {
  SDPA_UNROLL for (int j = 0; j < View::COLS; j++) {
    SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) S.x[i][j] = fmaf(S.x[i][j], a.logit_scale, to_float(bias[j]));
  }
}
// Reads the bias of a tile from global memory, in pairs where the address and the tile allow it.
template <class B> struct BiasInMemory {
  template <class View>
  __device__ __forceinline__ void add(View& S, const KernelArgs& a, const Item<B>& item, int keys, int q0, int k0) {
    const int first = first_biased_key(a.p, keys), col = k0 - first + S.col(0), cols = keys - first;
    if constexpr (B::key_bias) {
      Bias column_bias[View::COLS];
      load_bias_of_keys(column_bias, S, bias_row<B>(a, item, q0, 0) + col, cols - col);
      return add_bias_of_keys(S, a, column_bias);
    }
    SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
      const Bias* const row = bias_row<B>(a, item, q0, S.row(i)) + col;
      const bool has_pairs = View::COLS % 2 == 0 && S.col(1) - S.col(0) == 1 && k0 >= first &&
                             k0 + B::block_n <= keys;
      if (has_pairs && reinterpret_cast<uintptr_t>(row) % sizeof(BiasPair) == 0) {
        SDPA_UNROLL for (int j = 0; j + 1 < View::COLS; j += 2) {
          add_pair(S.x[i][j], S.x[i][j + 1], ld_global_nc<BiasPair>(row + (S.col(j) - S.col(0))), a);
        }
      } else {
        SDPA_UNROLL for (int j = 0; j < View::COLS; j++) {
          const int at = S.col(j) - S.col(0);
          const bool exists = uint32_t(col + at) < uint32_t(cols);
          if (exists) S.x[i][j] = with_bias(S.x[i][j], ld_global_nc<Bias>(row + at), a.logit_scale);
          else if (B::adds_bias) S.x[i][j] *= a.logit_scale;
        }
      }
    }
  }
};

template <class B>
template <class View>
__device__ __forceinline__ bool ScoreTile<B>::add_bias(View& S) const {
  if (!has_bias<B>(a, mask, k0)) return false;
  if constexpr (B::key_bias) {
    if (listed == ListedTile::unchanged) return false;
  }
  if constexpr (B::key_bias && B::swap_ab) add_bias_of_keys(S, a, bias_of_columns);
  else if constexpr (B::use_bias != 0) BiasInMemory<B>().add(S, a, item, mask.keys.Sk, q0, k0 + column_offset<B>(S));
  return true;
}

// ---- 5g the bias of a warp (wgmma and USE_WARP_SPECIALIZATION and USE_BIAS = 1..3) ----

// The bias of one warp for one tile: 16 rows, BLOCK_N keys. Lanes read one 16-byte chunk of each of 8 rows at
// a time (fp32: two chunks of each of 4 rows). The XOR swizzle by the row puts these chunks in different
// banks.
template <class B> struct alignas(128) BiasTile {
  static constexpr int PER_CHUNK = 16 / sizeof(Bias), CHUNKS = B::block_n / PER_CHUNK;
  static constexpr int XORED = SWIZZLE_GROUP<CHUNKS>;
  Bias x[16][B::block_n];

  __device__ __forceinline__ Bias* at(int row, int chunk) {
    return &x[row][swizzled<XORED>(row * (sizeof(Bias) == 4 ? 2 : 1), chunk) * PER_CHUNK];
  }
};
template <class B> struct BiasTiles {
  std::conditional_t<bias_has_room<B>, BiasTile<B>[B::split_warps], Nothing> per_warp;
};

// Adds the bias to the rows of a warp. Prefetches the bias of the next tile into shared memory; without room
// there, reads it from global memory.
template <class B, bool = bias_has_room<B>> struct BiasOfWarp : BiasInMemory<B> {
  __device__ void bind(BiasTiles<B>&) {}
  __device__ void start(const KernelArgs&, const Item<B>&, int, int, int) {}
  __device__ void load(const KernelArgs&, const Item<B>&, int, int, int) {}
};
template <class B> struct BiasOfWarp<B, true> {
  using Tile = BiasTile<B>;
  static constexpr int LANES = Tile::CHUNKS, ROWS = 32 / LANES;  // LANES lanes copy a row; ROWS rows are copied at once
  Tile* tile;
  int loaded_k0 = -1;             // per tile: first key of the tile that is in shared memory or in flight; -1: none
  int column_at_0 = 0;            // per item: bias column of the lane's chunk, for a tile at key 0
  const Bias* chunk_g = nullptr;  // per item: address of this chunk, in the lane's first row
  int rows_left = 0;              // per item: queries that exist from the lane's first row on
  int alignment = 0;              // per item: alignment of chunks in global memory: 16, 4, or 1 for less

  __device__ void bind(BiasTiles<B>& tiles) {
    tile = &tiles.per_warp[(threadIdx.x - B::producer_threads) / 32 % B::split_warps];
  }
  // First row of the warp, counted in its warpgroup. PACK_GQA: counted in the item.
  static __device__ __forceinline__ int first_row() {
    return int(mov_tid_x() - B::producer_threads) / 32 % (B::pack_gqa ? B::split_warps : 4) * 16;
  }
  // Starts an item whose keys from `first` on have a bias; k0: first key of one of its tiles. Computes addresses and
  // alignment once per item, since 64-bit multiplications and tests would delay the softmax of each tile.
  __device__ __forceinline__ void start(const KernelArgs& a, const Item<B>& item, int first, int q0, int k0) {
    const Strides& strides = a.p.bias_strides;
    const int lane = int(mov_tid_x() % 32), q = q0 + first_row() + lane / LANES;
    loaded_k0 = -1;
    column_at_0 = lane % LANES * Tile::PER_CHUNK - first;
    // An OR of offsets is a multiple of a power of 2 if all of them are.
    const int64_t elements = strides.batch | strides.head | strides.row;
    // k0 - first gives the alignment of all tiles of the item. With a window, k0 may be any key.
    const uint64_t offsets = uint64_t((elements | (k0 - first)) * int64_t(sizeof(Bias)));
    const uint64_t low = offsets | reinterpret_cast<uintptr_t>(a.p.bias);
    alignment = low % 16 == 0 ? 16 : low % 4 == 0 ? 4 : 1;
    if (B::pack_gqa) return;
    chunk_g = bias_row<B>(a, item, 0, 0) + q * strides.row + column_at_0;
    rows_left = item.query_count(a.p) - q;
  }
  // Starts the copy of the bias of the tile at key k0, unless it has been started. A lane copies its chunk by
  // one cp.async if the chunk is aligned and lies inside the bias; otherwise by words or elements.
  __device__ __forceinline__ void load(const KernelArgs& a, const Item<B>& item, int keys, int q0, int k0) {
    if (loaded_k0 == k0) return;
    const int lane = int(mov_tid_x() % 32), chunk = lane % LANES, column = k0 + column_at_0;
    const int columns = keys - chunk * Tile::PER_CHUNK + column_at_0;  // columns of the bias: keys - first
    cp_async_wait_group<0>();  // the copy of a tile that was not used may be in flight
    __syncwarp();              // hazard: previous tile read by all lanes
    if (alignment == 16 && column >= 0 && column + Tile::PER_CHUNK <= columns) {
      const Bias* from = chunk_g + k0;
      SDPA_UNROLL for (int n = 0; n < ceil_div(16, ROWS); n++, from += ROWS * a.p.bias_strides.row) {
        const int r = lane / LANES + ROWS * n;
        if ((LANES * ROWS == 32 && ROWS <= 16) || (lane < LANES * ROWS && r < 16)) {
          if (B::pack_gqa) from = bias_row<B>(a, item, q0, first_row() + r) + column;  // rows may have different heads
          cp_async<16>(tile->at(r, chunk), from, B::pack_gqa || ROWS * n < rows_left);
        }
      }
    } else if (alignment == 4 && k0 >= keys - columns && k0 + B::block_n <= keys) {
      copy_words(a, item, q0, column - chunk * Tile::PER_CHUNK);
    } else if (lane < LANES * ROWS) {
      copy_elements(a, item, columns, q0, column);
    }
    cp_async_commit_group();
    loaded_k0 = k0;
  }
  // Copies a tile whose keys all have a bias, 4 bytes at a time. Adjacent lanes copy adjacent words. tile_column:
  // the bias column of the tile's first key.
  __device__ __forceinline__ void copy_words(const KernelArgs& a, const Item<B>& item, int q0, int tile_column) const {
    constexpr int WORDS = B::block_n * sizeof(Bias) / 4, IN_CHUNK = 4;  // words per row, per chunk
    const int lane = int(mov_tid_x() % 32), queries = item.query_count(a.p) - q0 - first_row();
    const Bias* from = bias_row<B>(a, item, q0, first_row()) + tile_column;
#pragma unroll 1
    for (int r = 0; r < 16; r++, from += a.p.bias_strides.row) {
      if (B::pack_gqa) from = bias_row<B>(a, item, q0, first_row() + r) + tile_column;  // rows may have different heads
      SDPA_UNROLL for (int n = 0; n < ceil_div(WORDS, 32); n++) {
        const int word = lane + 32 * n;
        if (WORDS % 32 != 0 && word >= WORDS) break;
        void* const to = reinterpret_cast<uint32_t*>(tile->at(r, word / IN_CHUNK)) + word % IN_CHUNK;
        cp_async<4>(to, from + word * (4 / int(sizeof(Bias))), B::pack_gqa || r < queries);
      }
    }
  }
  // Copies the lane's chunks element by element, from any address. The loads of AT_ONCE rows overlap.
  __device__ __forceinline__ void copy_elements(const KernelArgs& a, const Item<B>& item, int columns, int q0,
                                                int column) {
    constexpr int AT_ONCE = 2;
    const int lane = int(mov_tid_x() % 32);
#pragma unroll 1
    for (int r = lane / LANES; r < 16; r += AT_ONCE * ROWS) {
      alignas(16) Bias chunks[AT_ONCE][Tile::PER_CHUNK];
      SDPA_UNROLL for (int n = 0; n < AT_ONCE; n++) {
        const Bias* const from = bias_row<B>(a, item, q0, first_row() + r + ROWS * n) + column;
        SDPA_UNROLL for (int i = 0; i < Tile::PER_CHUNK; i++) {
          const bool exists = uint32_t(column + i) < uint32_t(columns);
          chunks[n][i] = exists ? ld_global_nc<Bias>(from + i) : rounded<Bias>(B::use_bias == 2);
        }
      }
      SDPA_UNROLL for (int n = 0; n < AT_ONCE; n++) {
        uint4 bytes;
        memcpy(&bytes, chunks[n], sizeof bytes);
        if (r + ROWS * n < 16) st_shared(tile->at(r + ROWS * n, lane % LANES), bytes);
      }
    }
  }
  template <class View>
  __device__ __forceinline__ void add(View& S, const KernelArgs& a, const Item<B>& item, int keys, int q0, int k0) {
    load(a, item, keys, q0, k0);  // again, if S was recomputed: the next tile's bias has overwritten it
    cp_async_wait_group<0>();
    __syncwarp();  // hazard: tile copied by all lanes
    if constexpr (sizeof(Bias) == 4)
      add_as_read(S, a);
    else
      add_after_reads(S, a);
  }
  template <class View> __device__ __forceinline__ void add_after_reads(View& S, const KernelArgs& a) {
    uint32_t pairs[View::ROWS][View::COLS / 2];
    if constexpr (sizeof(Bias) == 2) {
      // Reads rows 0-7 and 8-15 of two chunks, in the lane layout of the accumulators.
      const int lane = int(mov_tid_x() % 32);
      const SharedAddress from = shared_address(tile->at(lane % 16, lane / 16));
      SDPA_UNROLL for (int j = 0; j < View::COLS / 2; j += 2) {
        uint32_t x[4];
        ldmatrix_x4<false>(x, (from ^ j % Tile::XORED * 16) + j / Tile::XORED * Tile::XORED * 16);
        SDPA_UNROLL for (int i = 0; i < 4; i++) pairs[i % 2][j + i / 2] = x[i];
      }
    } else {
      SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
        SDPA_UNROLL for (int j = 0; j < View::COLS; j += 2) {
          const Bias* const at = tile->at(S.row(i) % 16, S.col(j) / Tile::PER_CHUNK) + S.col(j) % Tile::PER_CHUNK;
          pairs[i][j / 2] = ld_shared<BiasPair>(at);
        }
        hold(pairs[i]);  // otherwise nvcc reads element by element
      }
    }
    SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
      SDPA_UNROLL for (int j = 0; j < View::COLS; j += 2) add_pair(S.x[i][j], S.x[i][j + 1], pairs[i][j / 2], a);
    }
  }
  // Adds each pair of floats right after its load. Loading all of them first would take as many registers as S.
  template <class View> __device__ __forceinline__ void add_as_read(View& S, const KernelArgs& a) {
    SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
      SDPA_UNROLL for (int j = 0; j < View::COLS; j += 2) {
        const Bias* const at = tile->at(S.row(i) % 16, S.col(j) / Tile::PER_CHUNK) + S.col(j) % Tile::PER_CHUNK;
        add_pair(S.x[i][j], S.x[i][j + 1], ld_shared<BiasPair>(at), a);
      }
    }
  }
};

// ---- 5g the bias of a tile's keys (wgmma and USE_WARP_SPECIALIZATION and USE_BIAS = 4..5) ----

template <class B> struct alignas(16) KeyBiasTile { float x[B::block_n]; };
template <class B> struct KeyBiasTiles { KeyBiasTile<B> per_warp[B::split_warps]; };

// Adds the bias of the keys to the rows of a warp. Each warp has its own copy of the tile's bias in shared memory, as
// floats, so that warps need not wait for each other. The bias of the next tile is loaded to registers before the
// exponentials of this tile, and stored while the warpgroup waits for products.
template <class B> struct BiasOfKeys {
  static constexpr int PER_LANE = ceil_div(B::block_n, 32);
  float* tile;                   // of this warp
  const Bias* lane_g = nullptr;  // per item: the bias of key `lane`
  Bias next[PER_LANE];           // of keys lane, lane + 32, ... of the next tile

  __device__ void bind(KeyBiasTiles<B>& tiles) {
    tile = tiles.per_warp[(threadIdx.x - B::producer_threads) / 32 % B::split_warps].x;
  }
  __device__ __forceinline__ void start(const KernelArgs& a, const Item<B>& item, int, int, int) {
    lane_g = bias_row<B>(a, item, 0, 0) + mov_tid_x() % 32;
  }
  // Loads the bias of the tile at key k0. keys: keys of the sequence.
  __device__ __forceinline__ void load(const KernelArgs&, const Item<B>&, int keys, int, int k0) {
    const Bias* const from = lane_g + k0;
    if (k0 + PER_LANE * 32 <= keys) {
      SDPA_UNROLL for (int n = 0; n < PER_LANE; n++) next[n] = ld_global_nc<Bias>(from + 32 * n);
    } else {
      const int left = keys - k0 - int(mov_tid_x() % 32);
      SDPA_UNROLL for (int n = 0; n < PER_LANE; n++) {
        next[n] = 32 * n < left ? ld_global_nc<Bias>(from + 32 * n) : rounded<Bias>(0);
      }
    }
  }
  // Stores the loaded bias to shared memory, for the next add() or exp().
  __device__ __forceinline__ void store() const {
    const int lane = int(mov_tid_x() % 32);
    __syncwarp();  // hazard: previous tile read by all lanes
    SDPA_UNROLL for (int n = 0; n < PER_LANE; n++) {
      if (B::block_n % 32 == 0 || 32 * n + lane < B::block_n) st_shared(tile + 32 * n + lane, to_float(next[n]));
    }
    __syncwarp();  // hazard: tile written by all lanes
  }
  // Calls use(i, j, logit) for the thread's columns [first, last) of S.
  template <class View, class Use>
  __device__ __forceinline__ void each(const View& S, int first, int last, const KernelArgs& a, const Use& use) const {
    SDPA_UNROLL for (int j = first; j < last; j += 2) {
      const float2 bias = ld_shared<float2>(tile + S.col(j));
      SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
        use(i, j, fmaf(S.x[i][j], a.logit_scale, bias.x));
        use(i, j + 1, fmaf(S.x[i][j + 1], a.logit_scale, bias.y));
      }
    }
  }
  template <class View>
  __device__ __forceinline__ void add(View& S, const KernelArgs& a, const Item<B>&, int, int, int) const {
    each(S, 0, View::COLS, a, [&](int i, int j, float logit) { S.x[i][j] = logit; });
  }
  // Adds the bias to columns [first, last) and replaces them by P. One pass over the columns, so that the
  // exponentials hide the latency of the additions.
  template <class View, class Softmax>
  __device__ __forceinline__ void exp(View& S, int first, int last, const KernelArgs& a, Softmax& softmax) const {
    each(S, first, last, a, [&](int i, int j, float logit) {
      S.x[i][j] = softmax_exp2<B>(fmaf(logit, a.scale_log2, -softmax.m_log2[i]));
      softmax.sum[i] += S.x[i][j];
    });
  }
};

// ---- 5g the key mask (USE_KEY_MASK, USE_BIAS = 4..5) ----

// Returns a word whose lowest `count` bits are set; all bits if count > 32.
__device__ __forceinline__ constexpr uint32_t low_bits(int count) { return count >= 32 ? ~0u : (1u << count) - 1; }
// An element of the key mask or of the bias.
template <class B> using KeyElement = std::conditional_t<B::key_bias, Bias, uint8_t>;
// The key mask or the bias of a batch, one element per key; null: no key is hidden.
template <class B> __device__ __forceinline__ const KeyElement<B>* key_elements(const SdpaParams& p, int b) {
  if constexpr (B::key_bias) return p.bias ? static_cast<const Bias*>(p.bias) + b * p.bias_strides.batch : nullptr;
  else return p.key_mask ? p.key_mask + b * p.key_mask_stride : nullptr;
}
__device__ __forceinline__ bool is_visible_key(uint8_t byte) { return byte; }
template <class E> __device__ __forceinline__ bool is_visible_key(E bias) { return to_float(bias) != -INFINITY; }

// One bit per key of a tile: 1 if the key exists and neither the key mask nor the bias hides it.
template <class B> struct KeyBits {
  static constexpr int WORDS = ceil_div(B::block_n, 32);
  uint32_t word[WORDS];

  KeyBits() = default;
  // Reads the bits of the tile at key k0. Each lane reads one key, and a ballot packs 32 keys into a word.
  // Words without a key in [first, last] stay undefined.
  __device__ __forceinline__ KeyBits(const KernelArgs& a, int b, int k0, int first = 0, int last = B::block_n - 1) {
    const KeyElement<B>* const row = key_elements<B>(a.p, b);
    SDPA_UNROLL for (int w = first / 32; w <= last / 32; w++) {
      const int column = 32 * w + int(threadIdx.x % 32), k = k0 + column;
      bool visible = column < B::block_n && k < a.p.Sk;
      if (row && visible) visible = is_visible_key(ld_global<KeyElement<B>>(row + k));
      word[w] = __ballot_sync(0xffffffffu, visible);
    }
  }
  // The bits of a thread's columns [first, last) of a view: bit S.col(j) - S.col(0) is column j. The shift moves
  // none of these bits across a word boundary, so each word is shifted separately. SWAP_AB: these are bits 0, 8,
  // 64, 72, ..., so words 1, 3, ... are not used.
  template <class Tile, class View>
  __device__ __forceinline__ KeyBits(const Tile& tile, const View& S, int first, int last) {
    const int from = column_offset<B>(S) + S.col(0), skipped = from / 32;
    const int begin = B::swap_ab ? 0 : S.col(first) - S.col(0);
    const int end = B::swap_ab ? B::block_n - 1 : S.col(last - 1) - S.col(0);
    const KeyBits bits = tile.key_bits(begin, end);
    SDPA_UNROLL for (int w = begin / 32; w <= end / 32; w++) {
      word[w] = (!B::swap_ab || skipped == 0 || w + 1 == WORDS ? bits.word[w] : bits.word[w + 1]) >> from % 32;
    }
  }
  __device__ __forceinline__ bool all() const {
    bool result = true;
    SDPA_UNROLL for (int w = 0; w < WORDS; w++) result &= word[w] == low_bits(B::block_n - 32 * w);
    return result;
  }
  __device__ __forceinline__ bool any() const {
    uint32_t some = 0;
    SDPA_UNROLL for (int w = 0; w < WORDS; w++) some |= word[w];
    return some != 0;
  }
  __device__ __forceinline__ bool has(int column) const { return word[column / 32] & 1u << column % 32; }
};

// ---- 5g lists of visible rounds (wgmma and USE_BIAS = 1..5, MASK_MOD, USE_KEY_MASK) ----

// The state of a round, as bits. all_states: further keys cannot change it.
enum RoundState { has_visible_key = 1, is_changed = 2, all_states = has_visible_key | is_changed };

// ---- 5g lists in shared memory (USE_KEY_MASK, USE_BIAS = 4..5) ----

// Bytes of shared memory for Q of two items and all stages of K and V, if Dv = D. The rest holds the lists.
template <class B>
constexpr int bytes_beside_lists = (2 * B::block_m + 2 * B::split_kv * B::stages * B::block_n) * B::head_dim * 2;
template <class B> constexpr bool lists_are_short = B::swap_ab || B::kv_bytes == 1;
// Maximum number of rounds of an item with a list. An item with more rounds computes all of them.
template <class B>
constexpr int most_listed = lists_are_short<B> ? 64 : bytes_beside_lists<B> > 200 * 1024 ? 128 : 512;
// USE_KEY_MASK: maximum number of changed rounds whose bits are stored with the list. The bits of further rounds are
// computed from the key mask at each use.
template <class B>
constexpr int most_stored_bits = lists_are_short<B> ? 1 : bytes_beside_lists<B> > 200 * 1024 ? 32 : 128;
// Index of stored bits that no list has, even after RoundWalk has decremented it once per round.
constexpr int no_stored_bits = 1 << 30;
// bits: USE_KEY_MASK: for each of the first most_stored_bits changed rounds, one bit per key, 1 if it is visible.
template <class B> struct ListMemory {
  using Bits = uint32_t[most_stored_bits<B>][ceil_div(B::round_keys, 32)];
  alignas(16) std::conditional_t<B::use_key_mask, Bits, Nothing> bits;
  uint16_t entries[most_listed<B> * (B::key_bias ? 2 : 1)];  // USE_BIAS=4, 5: see list_rounds_of_bias()
};
template <class B> struct ListByCta {
  int memory_offset = 0;  // of the ListMemory in shared memory
  int computes_all = 0;   // 1: all rounds are computed; the only entry says whether any of them may be changed
  int bits_end = 0;       // USE_KEY_MASK: number of changed rounds in the list, or no_stored_bits
  std::conditional_t<B::key_bias, int, Nothing> first_entry{};  // USE_BIAS=4, 5: its index in `entries`
  __device__ __forceinline__ ListMemory<B>& memory() const {
    return *reinterpret_cast<ListMemory<B>*>(&dynamic_shared<unsigned char>() + memory_offset);
  }
  __device__ uint32_t entry(int round) const {
    int at = computes_all ? 0 : round;
    if constexpr (B::key_bias) at += first_entry;
    const uint32_t listed = ld_shared<uint16_t>(&memory().entries[at]);
    return computes_all ? make_entry(round, listed) : listed;
  }
};

// ---- 5g four bytes of a bias (USE_BIAS = 1..5) ----

// Returns the RoundState of four bytes of a bias.
__device__ __forceinline__ int state_of_bias(uint32_t word) {
  constexpr uint32_t hidden = sizeof(Bias) == 1                 ? 0
                              : sizeof(Bias) == 4               ? 0xff800000
                              : Defines::q_type == DType::bf16 ? 0xff80ff80
                                                                : 0xfc00fc00;
  const uint32_t changed = sizeof(Bias) == 1   ? (word - 0x01010101) & ~word & 0x80808080
                           : sizeof(Bias) == 4 ? word & 0x7fffffff
                                               : word & 0x7fff7fff;
  return has_visible_key * (word != hidden) + is_changed * (changed != 0);
}

// ---- 5g lists of visible rounds that each CTA makes (wgmma and USE_KEY_MASK, USE_BIAS = 4..5) ----

// Reads `count` bytes, at most 4, of a key mask; the other bytes are 0.
__device__ __forceinline__ uint32_t bytes_of_keys(const uint8_t* from, int count) {
  uint32_t byte[4] = {};
  SDPA_UNROLL for (int i = 0; i < 4; i++) {
    if (i < count) byte[i] = ld_global<uint8_t>(from + i);
  }
  return byte[0] | byte[1] << 8 | byte[2] << 16 | byte[3] << 24;
}

struct ListedRounds { int count, changed; };  // the number of listed rounds, and how many of them are changed

// Writes an entry to `list` for each visible round, and the bits of changed rounds. Called by one warp; four lanes
// process a round. row: the key mask from the item's first key on.
template <class B>
__device__ __forceinline__ ListedRounds list_rounds_of_mask(const KernelArgs& a, const WgmmaItem<B>& item,
                                                            ListMemory<B>& list, const uint8_t* row) {
  uint16_t* const list_s = list.entries;
  const bool is_aligned = reinterpret_cast<uintptr_t>(row) % 4 == 0;
  const int lane = threadIdx.x % 32, keys = a.p.Sk - item.first_key;
  const uint32_t lanes_of_round = 0xfu << lane / 4 * 4;
  constexpr int STEPS = ceil_div(B::round_keys, 16);
  constexpr int AT_ONCE = B::warpgroups > 2 && !B::swap_ab ? 2 : 4;  // limited by registers
  ListedRounds total{0, 0};
  for (int first = 0; first < item.rounds; first += 8) {
    const int number = first + lane / 4;
    const int begin = number * B::round_keys + lane % 4 * 4;
    const auto existing = [&](int n) {  // number of keys in word n of the lane
      return 16 * n + lane % 4 * 4 < B::round_keys ? min(max(keys - begin - 16 * n, 0), 4) : 0;
    };
    bool visible = false, changed = false;  // of the lane's keys; after the ballots, of the round
    uint32_t bits[ceil_div(B::round_keys, 32)] = {};
    SDPA_UNROLL for (int step = 0; step < STEPS; step += AT_ONCE) {
      uint32_t words[AT_ONCE] = {};
      SDPA_UNROLL for (int i = 0; i < AT_ONCE; i++) {
        if (is_aligned && existing(step + i) == 4) words[i] = ld_global<uint32_t>(row + begin + 16 * (step + i));
      }
      hold(words);
      SDPA_UNROLL for (int i = 0; i < AT_ONCE && step + i < STEPS; i++) {
        const int n = step + i, count = existing(n);
        if (count > 0 && !(is_aligned && count == 4)) words[i] = bytes_of_keys(row + begin + 16 * n, count);
        const uint32_t missing = count == 4 ? 0 : ~0u << 8 * count;
        // Bit 7 of each byte: the byte is not 0.
        const uint32_t visible_bytes = (((words[i] & 0x7f7f7f7f) + 0x7f7f7f7f) | words[i]) & 0x80808080;
        visible |= visible_bytes != 0;
        changed |= (visible_bytes | missing) != (0x80808080 | missing);
        const uint32_t four_bits = (visible_bytes >> 7) * 0x01020408 >> 24;  // one per byte
        bits[n / 2] |= four_bits << (n % 2 * 16 + lane % 4 * 4);
      }
    }
    visible = __ballot_sync(0xffffffffu, visible) & lanes_of_round;
    changed = __ballot_sync(0xffffffffu, changed) & lanes_of_round;
    const bool lists = lane % 4 == 0 && number < item.rounds && visible;
    const uint32_t listed_lanes = __ballot_sync(0xffffffffu, lists);
    const uint32_t changed_lanes = __ballot_sync(0xffffffffu, lists && changed);
    const int position = total.count + __popc(listed_lanes & low_bits(lane));
    if (lists) st_shared(list_s + position, uint16_t(make_entry(number, changed)));
    const int bits_index = total.changed + __popc(changed_lanes & low_bits(lane));
    SDPA_UNROLL for (int w = 0; changed_lanes != 0 && w < ceil_div(B::round_keys, 32); w++) {
      SDPA_UNROLL for (int other = 1; other < 4; other *= 2) bits[w] |= __shfl_xor_sync(0xffffffffu, bits[w], other);
      if (lists && changed && bits_index < most_stored_bits<B>) st_shared(&list.bits[bits_index][w], bits[w]);
    }
    total.count += __popc(listed_lanes);
    total.changed += __popc(changed_lanes);
  }
  return total;
}

// Reads four bytes of a bias. Only their first `count` elements exist; the others get the value of the first.
// is_aligned: the address is a multiple of four bytes.
__device__ __forceinline__ uint32_t word_of_bias(const Bias* from, int count, bool is_aligned) {
  if constexpr (sizeof(Bias) == 2) {
    if (is_aligned && count > 1) return ld_global<uint32_t>(from);
    const uint32_t first = ld_global<uint16_t>(from);
    return first | (count > 1 ? ld_global<uint16_t>(from + 1) : first) << 16;
  }
  return ld_global<uint32_t>(from);
}
// Like list_rounds_of_mask(), for a bias and without bits.
//
// A far round has only elements far below 0, as in padding with finfo.min; the other rounds are near. Far
// rounds come first in the list. The kernel starts with the last entry. So the row max of the near rounds is
// known when a far round is computed, and is a good stale maximum for it. An element is far below 0 if its
// three highest bits are set: fp16 from -512 down, bf16 and fp32 from -2^65 down. Entries of near rounds are
// written from the middle of the list up, those of far rounds from the middle down.
template <class B>
__device__ __forceinline__ ListedRounds list_rounds_of_bias(const KernelArgs& a, WgmmaItem<B>& item,
                                                            ListMemory<B>& list, const Bias* row) {
  constexpr int PER_WORD = 4 / int(sizeof(Bias)), WORDS = ceil_div(B::round_keys, 4 * PER_WORD), AT_ONCE = 8;
  constexpr uint32_t far = sizeof(Bias) == 2 ? 0xe000e000 : 0xe0000000;
  const bool is_aligned = reinterpret_cast<uintptr_t>(row) % 4 == 0;
  const int lane = threadIdx.x % 32, keys = a.p.Sk - item.first_key;
  const uint32_t lanes_of_round = 0xfu << lane / 4 * 4;
  int changed_rounds = 0, begin = most_listed<B>, end = begin;
  for (int first = 0; first < item.rounds; first += 8) {
    const int number = first + lane / 4, past = min((number + 1) * B::round_keys, keys);
    int state = 0;
    uint32_t common = ~0u;  // bits that all elements have
    SDPA_UNROLL for (int step = 0; step < WORDS; step += AT_ONCE) {
      uint32_t words[AT_ONCE];
      int counts[AT_ONCE];
      SDPA_UNROLL for (int i = 0; i < AT_ONCE; i++) {
        const int k = number * B::round_keys + ((step + i) * 4 + lane % 4) * PER_WORD;
        counts[i] = step + i < WORDS ? past - k : 0;
        if (counts[i] > 0) words[i] = word_of_bias(row + k, counts[i], is_aligned);
      }
      SDPA_UNROLL for (int i = 0; i < AT_ONCE; i++) {
        if (counts[i] <= 0) continue;
        state |= state_of_bias(words[i]);
        common &= words[i];
      }
    }
    const bool visible = __ballot_sync(0xffffffffu, state & has_visible_key) & lanes_of_round;
    const bool changed = __ballot_sync(0xffffffffu, state & is_changed) & lanes_of_round;
    const bool is_near = __ballot_sync(0xffffffffu, (common & far) != far) & lanes_of_round;
    const bool lists = lane % 4 == 0 && number < item.rounds && visible;
    const uint32_t near_lanes = __ballot_sync(0xffffffffu, lists && is_near);
    const uint32_t listed_lanes = __ballot_sync(0xffffffffu, lists), far_lanes = listed_lanes & ~near_lanes;
    const int position = is_near ? end + __popc(near_lanes & low_bits(lane))
                                 : begin - 1 - __popc(far_lanes & low_bits(lane));
    if (lists) st_shared(&list.entries[position], uint16_t(make_entry(number, changed)));
    changed_rounds += __popc(__ballot_sync(0xffffffffu, lists && changed));
    end += __popc(near_lanes);
    begin -= __popc(far_lanes);
  }
  item.first_entry = begin;
  return {end - begin, changed_rounds};
}

// Writes the visible rounds of the item to `list` and sets item.rounds to their number. If all rounds are
// computed anyway, it writes one entry for all of them. One warp calls it.
template <class B>
__device__ __forceinline__ void list_visible_rounds(const KernelArgs& a, WgmmaItem<B>& item, ListMemory<B>& list) {
  item.memory_offset = int(reinterpret_cast<unsigned char*>(&list) - &dynamic_shared<unsigned char>());
  // Makes the item compute all rounds. changed: one of them may be changed.
  const auto compute_all = [&](bool changed) {
    if (threadIdx.x % 32 == 0) st_shared(&list.entries[0], uint16_t(make_entry(0, changed)));
    __syncwarp();  // hazard: the entry written by lane 0
    item.computes_all = 1;
    item.bits_end = no_stored_bits;
  };
  const KeyElement<B>* const row = key_elements<B>(a.p, item.b);
  // An item computes at least one round. For a bias, a list of two rounds costs more time than it saves.
  if (!row || item.rounds <= 1 + B::key_bias || item.rounds > most_listed<B>) return compute_all(row != nullptr);
  griddepcontrol_wait();  // the preceding kernel may write the mask
  ListedRounds listed;
  if constexpr (B::key_bias) listed = list_rounds_of_bias<B>(a, item, list, row + item.first_key);
  else listed = list_rounds_of_mask<B>(a, item, list, row + item.first_key);
  if (listed.count == item.rounds && listed.changed == 0) {
    if constexpr (B::key_bias) item.first_entry = 0;
    return compute_all(false);
  }
  item.bits_end = listed.changed;
  if (listed.count == 0) {  // zero rounds would mean that there are no more items, so list round number 0
    int at = 0;
    if constexpr (B::key_bias) at = item.first_entry;
    if (threadIdx.x % 32 == 0) st_shared(&list.entries[at], uint16_t(make_entry(0, true)));
    item.bits_end = no_stored_bits;
  }
  __syncwarp();  // hazard: entries written by all lanes
  item.rounds = max(listed.count, 1);
}

// ---- 5g lists in global memory: the map (wgmma and USE_WARP_SPECIALIZATION and USE_BIAS = 1..3, MASK_MOD) ----
//
// Items that read the same rows of the bias, or the same values of MASK_MOD, share a list. A list contains the number
// of visible rounds, and an entry for each of them. A map that was made for another mask, window, problem size or tile
// is ignored, and all rounds are computed.

struct ListFromMap {
  const uint32_t* entries = nullptr;  // null: all rounds are computed, and any of them may be changed
  __device__ uint32_t entry(int round) const {
    return entries ? ld_global<uint32_t>(entries + round) : make_entry(round, true);
  }
};
__device__ __forceinline__ uint64_t* map_header(const BiasMap& map) {
  return reinterpret_cast<uint64_t*>(map.lists) - 1;
}

// Returns the list of an item. set_rounds() may have reduced q0 by less than the item's rows, so the division
// rounds up.
template <class B> __device__ __forceinline__ uint32_t* list_of(const KernelArgs& a, const Item<B>& item) {
  const int queries = queries_of_item<B>(a), block = (item.q0 + queries - 1) / queries;
  const int head = B::pack_gqa ? item.h / a.item_heads : item.h;
  const BiasMap& map = a.bias_map;
  const uint32_t head_index = map.batches.remainder(item.b) * map.heads.divisor + map.heads.remainder(head);
  return map.lists + size_t(head_index * a.q_blocks.divisor + block) * map.list_words;
}
template <class B> __device__ __forceinline__ void read_list_of_map(const KernelArgs& a, WgmmaItem<B>& item) {
  if constexpr (lists_from_map<B>) {
    griddepcontrol_wait();  // sdpa_map() has finished
    const uint32_t* const list = list_of<B>(a, item);
    const int rounds = int(ld_global<uint32_t>(list));
    if (ld_global<uint64_t>(map_header(a.bias_map)) != a.bias_map.made_for) return;
    item.rounds = rounds;
    item.entries = list + 1;
  }
}
// The RoundState of all lanes together.
__device__ __forceinline__ int state_of_warp(int state) {
  return has_visible_key * __any_sync(0xffffffffu, state & has_visible_key) +
         is_changed * __any_sync(0xffffffffu, state & is_changed);
}
// Returns the RoundState of the round of an item at key k0, according to MASK_MOD. Called by a warp; each lane
// evaluates every 32nd key.
template <class B> __device__ __forceinline__ int state_of_mask(const KernelArgs& a, const Item<B>& item, int k0) {
  const int lane = threadIdx.x % 32, end = min(k0 + B::round_keys, a.p.Sk);
  int state = 0;
  for (int first = k0; first < end && state < all_states; first += 32) {
    for (int row = 0; row < rows_of_item<B>(a); row++) {
      const Item<B> query = row_item<B>(a, item, row);
      if (first + lane >= end || query.q0 < 0 || query.q0 >= a.p.Sq || query.h >= a.p.Hq) continue;
      const bool visible =
          ScoreMod<B>::sees(query.b, query.h, {query.q0, 0, 0}, {first + lane, 0, 0}, a.p.Sq, a.p.Sk, a.p);
      state |= visible ? has_visible_key : is_changed;
    }
    state = state_of_warp(state);
  }
  return state;
}
// The same according to the bias or MASK_MOD.
template <class B> __device__ __forceinline__ int state_of_round(const KernelArgs& a, const Item<B>& item, int k0) {
  if constexpr (B::hides_keys) return state_of_mask<B>(a, item, k0);
  constexpr int chunk = 16 / sizeof(Bias), loads_at_once = 8;
  // The factor that repeats an element until it fills 4 bytes.
  constexpr uint32_t repeat = sizeof(Bias) == 1 ? 0x01010101 : sizeof(Bias) == 2 ? 0x00010001 : 1;
  const int first = first_biased_key(a.p, a.p.Sk), begin = max(k0, first) - first;
  const int keys = min(k0 + B::round_keys, a.p.Sk) - first - begin;
  const Strides& strides = a.p.bias_strides;
  // An OR of offsets is a multiple of a power of 2 if all of them are.
  const int64_t elements = strides.batch | strides.head | strides.row | begin | keys;
  const bool by_chunks = (elements * sizeof(Bias) | reinterpret_cast<uintptr_t>(a.p.bias)) % 16 == 0;
  const int columns = by_chunks ? keys / chunk : keys, lane = threadIdx.x % 32;
  // `lanes` adjacent lanes read a row, so that the warp reads rows_per_load rows at once.
  const int lanes = min(max(columns, 1), 32), rows_per_load = 32 / lanes;
  const int rows = lane < lanes * rows_per_load ? rows_of_item<B>(a) : 0;
  int state = k0 < first ? has_visible_key : 0;  // keys without a bias are visible
  for (int column = 0; column < columns; column += lanes) {
    const int lane_column = column + lane % lanes;
    for (int row = 0; row < rows_of_item<B>(a) && state < all_states; row += loads_at_once * rows_per_load) {
      uint4 x[loads_at_once];
      bool exists[loads_at_once];
      SDPA_UNROLL for (int n = 0; n < loads_at_once; n++) {
        const int r = row + n * rows_per_load + lane / lanes, q = query_of<B>(a, item.q0, r);
        exists[n] = lane_column < columns && r < rows && q >= 0 && q < a.p.Sq;
        const Bias* const at = bias_row<B>(a, item, item.q0, r) + begin + lane_column * (by_chunks ? chunk : 1);
        if (exists[n] && by_chunks) x[n] = ld_global_nc<uint4>(at);
        if (exists[n] && !by_chunks) x[n].x = ld_global_nc<VectorType<sizeof(Bias)>>(at) * repeat;
      }
      SDPA_UNROLL for (int n = 0; n < loads_at_once; n++) {
        if (exists[n]) state |= state_of_bias(x[n].x);
        if (exists[n] && by_chunks) state |= state_of_bias(x[n].y) | state_of_bias(x[n].z) | state_of_bias(x[n].w);
      }
      state = state_of_warp(state);
    }
  }
  return state;
}

constexpr int map_threads = 1024;
// Each CTA writes one list, that of one item.
template <class B> __global__ void __launch_bounds__(map_threads) sdpa_map(const __grid_constant__ KernelArgs a) {
  wait_then_let_next_kernel_start();
  if (blockIdx.x == 0 && threadIdx.x == 0) st_global(map_header(a.bias_map), a.bias_map.made_for);
  constexpr uint32_t no_entry = 0xffffffff;  // of a hidden round
  const uint32_t head = a.q_blocks.divide(blockIdx.x);  // index among the heads with separate lists
  const uint32_t b = a.bias_map.heads.divide(head), h = a.bias_map.heads.remainder(head);
  WgmmaItem<B> item;
  static_cast<Item<B>&>(item) = item_of_block<B>(a, b * a.q_heads.divisor + h, a.q_blocks.remainder(blockIdx.x));
  set_rounds<B>(a, item);
  uint32_t* const list = list_of<B>(a, item);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int number = warp; number < item.rounds; number += map_threads / 32) {
    const int state = state_of_round<B>(a, item, item.first_key + number * B::round_keys);
    if (lane == 0) {
      st_global(list + 1 + number, state & has_visible_key ? make_entry(number, state / is_changed) : no_entry);
    }
  }
  __syncthreads();  // hazard: entries written by all warps
  // Warp 0 moves the entries of visible rounds to the front.
  if (warp > 0) return;
  int count = 0;
  for (int first = 0; first < item.rounds; first += 32) {
    const uint32_t entry = first + lane < item.rounds ? ld_global<uint32_t>(list + 1 + first + lane) : no_entry;
    const uint32_t visible = __ballot_sync(0xffffffffu, entry != no_entry);  // hazard: read before overwritten
    if (entry != no_entry) st_global(list + 1 + count + __popc(visible & ((1u << lane) - 1)), entry);
    count += __popc(visible);
  }
  // A list has at least one round. If none has a visible key, it is number 0, which the bias or the mask
  // hides.
  if (lane == 0) st_global(list, uint32_t(max(count, 1)));
  if (lane == 0 && count == 0) st_global(list + 1, make_entry(0, true));
}

// ---- 5g iteration over visible rounds (wgmma and USE_WARP_SPECIALIZATION and USE_BIAS = 1..5, MASK_MOD, USE_KEY_MASK) ----

// USE_KEY_MASK: returns the visible keys of the split's tile at key k0, whose round is changed. bits_index: index of
// the round's stored bits; if there are none, or if splits share a word, this reads the key mask.
template <class B>
__device__ __forceinline__ KeyBits<B> listed_bits(const KernelArgs& a, int b, const ListMemory<B>& list, int bits_index,
                                                  int k0) {
  if (bits_index >= most_stored_bits<B> || (B::split_kv > 1 && B::block_n % 32 != 0)) return KeyBits<B>(a, b, k0);
  const int warpgroup = warp_uniform(int(threadIdx.x - B::producer_threads) / 128);
  const int split = B::split_kv == 1 ? 0 : warpgroup / (B::block_m / 64);
  KeyBits<B> bits;
  SDPA_UNROLL for (int w = 0; w < KeyBits<B>::WORDS; w++) {
    bits.word[w] = ld_shared<uint32_t>(&list.bits[bits_index][split * bits.WORDS + w]);
  }
  return bits;
}

// Iterates over the item's list of rounds for one warpgroup, from the last entry to the first. Without a
// list, iterates over all rounds. Rows: WgmmaRows.
template <class B, bool = may_have_list<B>> struct RoundWalk {
  __device__ void start(const WgmmaItem<B>&, int) {}
  // False if the list says that the round of this tile is not changed; next_: the round of the next tile.
  __device__ bool may_be_changed() const { return true; }
  __device__ bool next_may_be_changed() const { return true; }
  __device__ int step() const { return B::round_keys; }  // first key of this tile minus that of the next one
  __device__ void advance() {}
};
template <class B> struct RoundWalk<B, true> {
  ListOf<B> list;
  int round;
  uint32_t entries[2];  // list entries of this round and the next one; 0 past the last round
  // USE_KEY_MASK: the visible keys of this tile, if its round is changed; after look_ahead(), those of the next tile.
  std::conditional_t<B::use_key_mask, KeyBits<B>, Nothing> bits;
  std::conditional_t<B::use_key_mask, int, Nothing> bits_index;  // of these bits in the list

  // Before advance(), the item's first round counts as the next one.
  __device__ __forceinline__ void start(const WgmmaItem<B>& item, int first) {
    list = item;
    if constexpr (B::use_key_mask) bits_index = item.bits_end;
    round = first + 1;
    entries[0] = entries[1] = list.entry(first);  // step() is 0
  }
  __device__ bool may_be_changed() const { return entry_changed(entries[0]); }
  __device__ bool next_may_be_changed() const { return entry_changed(entries[1]); }
  __device__ int step() const { return (entry_number(entries[0]) - entry_number(entries[1])) * B::round_keys; }
  __device__ __forceinline__ void advance() {
    hold(entries);  // otherwise nvcc waits for each entry right after its load
    entries[0] = warp_uniform(entries[1]);
    round--;
    entries[1] = round > 0 ? list.entry(round - 1) : 0;
  }
  // Reads the bits of the next tile, while the warpgroup waits for products.
  template <class Rows> __device__ __forceinline__ void look_ahead(const Rows& rows) {
    if constexpr (B::use_key_mask) {
      if (entry_changed(warp_uniform(entries[1]))) {
        bits_index--;
        bits = listed_bits<B>(rows.a, rows.b, list.memory(), bits_index, rows.k0 - step());
      } else if (B::changes_logits) {  // with SCORE_MOD, every tile reads its bits
        SDPA_UNROLL for (uint32_t& word : bits.word) word = ~0u;
      }
    }
  }
};

// ---- 5g the score hook: per-tile state of a warpgroup (wgmma and USE_WARP_SPECIALIZATION) ----

// The state of the score hook for the tile of a warpgroup: its position in the list of rounds, and its bias. Rows:
// WgmmaRows.
template <class B> struct TileWalk : RoundWalk<B> {
  std::conditional_t<B::key_bias, BiasOfKeys<B>, std::conditional_t<B::use_bias != 0, BiasOfWarp<B>, Nothing>> bias;
  int first_biased = 0;  // the item's first key with a bias; if there is none, greater than all keys

  __device__ __forceinline__ void bind(TileBias<B>& tiles) {
    if constexpr (B::use_bias != 0) bias.bind(tiles);
  }
  template <class Rows>
  __device__ __forceinline__ void start_item(const Rows& rows, const WgmmaItem<B>& item, int first_round) {
    if constexpr (B::use_bias != 0) {
      first_biased = 2 * size_limit;
      if (rows.a.p.bias) {
        first_biased = first_biased_key(rows.a.p, rows.mask.keys.Sk);
        bias.start(rows.a, *rows.item, first_biased, rows.q0, rows.k0);
      }
    }
    RoundWalk<B>::start(item, first_round);
    if constexpr (B::use_key_mask) RoundWalk<B>::look_ahead(rows);
    this->advance();
    if constexpr (B::use_bias != 0) prefetch_bias(rows, this->may_be_changed(), rows.k0);
  }
  // Stores the bias of the item's first tile, while the warpgroup waits for Q @ K.T.
  __device__ __forceinline__ void write_first_bias() {
    if constexpr (B::key_bias) write_bias(this->may_be_changed());
  }
  // USE_BIAS=4, 5: stores the prefetched bias, if there is one, to shared memory.
  __device__ __forceinline__ void write_bias(bool is_prefetched) {
    if (is_prefetched) bias.store();
  }
  // Prepares the key mask or the bias of the next tile, while the warpgroup waits for products.
  template <class Rows> __device__ __forceinline__ void look_ahead(const Rows& rows) {
    RoundWalk<B>::look_ahead(rows);
    if constexpr (B::key_bias) write_bias(this->next_may_be_changed());
  }
  // False if SCORE_MOD, MASK_MOD and the key mask leave this tile unchanged.
  __device__ __forceinline__ bool needs_modify_scores() const {
    return B::changes_logits || (B::hides_keys && this->may_be_changed());
  }
  // True if keys of the tile at key k0 have a bias.
  __device__ __forceinline__ bool has_bias(int k0) const { return B::use_bias != 0 && k0 + B::block_n > first_biased; }
  // False if this tile, at key k0, has no bias or a bias without effect.
  __device__ __forceinline__ bool needs_bias(int k0) const { return has_bias(k0) && this->may_be_changed(); }
  // Starts the copy of the bias of the tile at key k0, if the tile has one.
  template <class Rows> __device__ __forceinline__ void prefetch_bias(const Rows& rows, bool may_be_changed, int k0) {
    if (may_be_changed && k0 >= 0 && has_bias(k0)) bias.load(rows.a, *rows.item, rows.mask.keys.Sk, rows.q0, k0);
  }
  template <class Rows> __device__ __forceinline__ void prefetch_next_bias(const Rows& rows) {
    prefetch_bias(rows, this->next_may_be_changed(), rows.k0 - this->step());
  }
  // Adds the bias of this tile, if it has one, and prefetches that of the next tile. USE_BIAS=1, 2, 3: the
  // next tile has lower key indices, so it has a bias only if this tile has one. Returns true if it has
  // added a bias.
  template <class View, class Rows> __device__ __forceinline__ bool add_bias(View& S, const Rows& rows) {
    if constexpr (B::use_bias != 0) {
      if (!has_bias(rows.k0) || !(this->may_be_changed() || this->next_may_be_changed())) return false;
      if constexpr (B::key_bias) prefetch_next_bias(rows);  // to registers; shared memory holds this tile's
      if (this->may_be_changed()) {
        rows.locate(S);
        bias.add(S, rows.a, *rows.item, rows.mask.keys.Sk, rows.q0, rows.k0);
      }
      if constexpr (!B::key_bias) prefetch_next_bias(rows);
      return this->may_be_changed();
    }
    return false;
  }
  // USE_BIAS=4, 5: adds the bias of this tile to columns [first, last) of S and replaces them by P. Returns
  // false if the tile has no bias.
  template <class View, class Rows, class Softmax>
  __device__ __forceinline__ bool exp_with_bias(View& S, int first, int last, const Rows& rows, Softmax& softmax) {
    if (first == 0) prefetch_next_bias(rows);
    if (!needs_bias(rows.k0)) return false;
    rows.locate(S);
    bias.exp(S, first, last, rows.a, softmax);
    return true;
  }
};

// ---- 5h ranges of keys ----

// SPLIT_CTAS: maximum number of items per launch that have several ranges and a counter.
// USE_LENGTHS: maximum number of ranges of all these items together.
constexpr uint32_t most_split_items = Defines::use_lengths ? 131072 : 16384;
// Number of ranges whose partials a thread loads at once. For up to few_ranges ranges it loads more columns
// instead.
constexpr int ranges_at_once = 16, few_ranges = 4;
// SPLIT_CTAS=0: the least limit of rounds per range: about 256 KB of K and V.
__host__ __device__ __forceinline__ int least_rounds(int round_keys) {
  return max(1, 256 * 1024 / int(round_keys * Defines::head_dim * sizeof(KeyValue) * 2));
}
// Maximum number of rounds that one accumulator sums.
__host__ __device__ __forceinline__ int rounds_at_once(int round_keys) {
  return max(most_keys_at_once / round_keys, 1);
}
// batch_invariant, SPLIT_CTAS=0: maximum number of rounds in a range, for a sequence of `tiles` query tiles
// with at most `rounds` rounds each. It is chosen so that a head group (the heads of an item) has at most about
// `partials` ranges of the sequence. It is at least least_rounds() and at most rounds_at_once().
__host__ __device__ __forceinline__ int invariant_rounds(int rounds, int round_keys, int tiles, int partials) {
  const int share = ceil_div(rounds, max(partials / max(tiles, 1), 1));
  return min(max(least_rounds(round_keys), share), rounds_at_once(round_keys));
}
// The partial of a range. O is not divided by l.
template <class B> struct alignas(256) RangePartial {
  float O[B::block_m][B::d_v];
  float2 m_l[B::block_m];
};

// The partials of all CTAs, in scratch memory.
template <class B> __device__ __forceinline__ RangePartial<B>* range_partials(const KernelArgs& a) {
  unsigned char* partials = static_cast<unsigned char*>(a.p.scratch);
  if constexpr (B::use_lengths) partials += plan_bytes(plan_sizes<B>(a));
  return reinterpret_cast<RangePartial<B>*>(partials);
}
// One counter for each item with several ranges, 0 when the kernel starts. USE_LENGTHS: they follow the
// partials.
template <class B> __device__ __forceinline__ uint32_t* range_counters(const KernelArgs& a) {
  if constexpr (!B::use_lengths) return static_cast<uint32_t*>(a.p.workspace);
  else return reinterpret_cast<uint32_t*>(range_partials<B>(a) + plan_sizes<B>(a).partials * a.q_heads.divisor);
}

// ---- 5h planned items (USE_LENGTHS) ----
// sdpa_plan() runs before the attention kernel. For one head group, it divides the tiles of query rows of all
// sequences into ranges of keys and lists them, longest first. With USE_LENGTHS, each range is an item.

// USE_LENGTHS: the position of a sequence in the tensors, and its number of rows. These arrays are in device
// memory:
//   q_starts, k_starts    [B + 1] Sequence b has the rows [starts[b], starts[b + 1]) of the Sq rows of Q and O,
//                         or of the Sk rows of K and V. Such tensors have a batch size of 1. LSE is [Hq,Sq].
//   q_lengths, k_lengths  [B] Only the first lengths[b] rows are queries or keys. Keys are limited to most_keys.
//   k_firsts              [B] The first k_firsts[b] of these keys are skipped. Key 0 is the one after them.
// Rows of O and LSE without a query are not written. Values that exceed the tensors are clamped.
struct Sequence {
  int q_row, k_row, Sq, Sk;

  Sequence() = default;
  __device__ Sequence(const SdpaParams& p, int b) : q_row(0), k_row(0), Sq(p.Sq), Sk(p.Sk) {
    const auto find = [&](const int* starts, int& row, int& rows) {
      if (!starts) return;
      row = min(max(starts[b], 0), rows);
      rows = max(min(starts[b + 1], rows), row) - row;
    };
    find(p.q_starts, q_row, Sq);
    find(p.k_starts, k_row, Sk);
    if (p.q_lengths) Sq = min(max(p.q_lengths[b], 0), Sq);
    if (p.k_lengths) Sk = min(max(p.k_lengths[b], 0), Sk);
    if (p.most_keys > 0) Sk = min(Sk, p.most_keys);
    if (p.k_firsts) {
      const int first = min(max(p.k_firsts[b], 0), Sk);
      k_row += first;
      Sk -= first;
    }
  }
};
// First key of the first tile of `keys`. With pages by TMA, tiles begin at multiples of BLOCK_N, so that no
// box crosses the end of a page.
template <class B> __device__ __forceinline__ int first_tile_key(const Interval& keys) {
  return B::use_pages && B::is_wgmma && !B::copies_rows ? keys.begin / B::block_n * B::block_n : keys.begin;
}
// One range of a tile of query rows. q0 is relative to the sequence. If the tile has several ranges,
// their partials have the indices first_partial ... first_partial + ranges - 1. ranges = 0: an item past the
// last one.
struct alignas(16) PlannedItem {
  int b, h, q0;
  Sequence sequence;
  Interval keys;
  int range, ranges, first_partial;
};
// The beginning of the scratch memory: the number of items, of tiles with several ranges, and of items fetched
// from the queue. The items follow, then the index of the first range of each of these tiles.
struct Plan { uint32_t count, merges, fetched, unused; };
constexpr int plan_header_bytes = 256;
__host__ __device__ constexpr size_t plan_bytes(const PlanArgs& plan) {
  return plan_header_bytes + ceil_div(plan.items * (sizeof(PlannedItem) + sizeof(uint32_t)), 256) * 256;
}
__device__ __forceinline__ Plan& plan_of(const KernelArgs& a) {
  return *static_cast<Plan*>(a.p.scratch);
}
template <class B> struct Item<B, true> : PlannedItem {
  using ItemMask = Mask;
  __device__ bool exists() const { return ranges > 0; }
  __device__ int batch(const int* starts) const { return starts ? 0 : b; }
  __device__ int q_row(int q) const { return sequence.q_row + q; }
  __device__ int k_row(int k) const { return sequence.k_row + k; }
  __device__ int query_count(const SdpaParams&) const { return sequence.Sq; }
  __device__ bool ends_before(int q) const { return q > sequence.Sq; }
  __device__ int keys_in_tile(int k0) const {
    if (B::copies_rows) return B::block_n;  // TileRows writes zeros past the last key
    return min(max(sequence.Sk - k0, 0), B::block_n);
  }
  __device__ Mask mask(const KernelArgs& a) const {
    const KeyBounds bounds(a.p, sequence.Sq, sequence.Sk);
    return {{bounds, B::pack_gqa ? queries_of_item<B>(a) : mask_rows<B>, B::block_n}, bounds};
  }
  __device__ Interval keys_of_cta(const KernelArgs&, const Mask&) const {
    return {first_tile_key<B>(keys), keys.end};
  }
  __device__ uint32_t range_count(const KernelArgs&) const { return ranges; }
  __device__ uint32_t partial_index(const KernelArgs&) const { return first_partial + range; }
  __device__ uint32_t first_partial_index(const KernelArgs&) const { return first_partial; }
  // The index is unique, because an item with a counter has at least two partials.
  __device__ uint32_t counter(const KernelArgs&) const { return first_partial / 2; }
  static __device__ uint32_t* queue(const KernelArgs& a) { return &plan_of(a).fetched; }
};

__device__ __forceinline__ PlannedItem* planned_items(const KernelArgs& a) {
  return reinterpret_cast<PlannedItem*>(reinterpret_cast<unsigned char*>(&plan_of(a)) + plan_header_bytes);
}
// Item i of the list, for the head group with index head_group.
template <class B> __device__ __forceinline__ Item<B> planned_item(const KernelArgs& a, uint32_t i, int head_group) {
  Item<B> item{planned_items(a)[i]};
  item.h = head_group * a.item_heads;
  item.first_partial = item.first_partial * int(a.q_heads.divisor) + head_group * item.ranges;
  return item;
}

// USE_LENGTHS: item i of the launch, in which every item of the plan occurs once per head group. Past the
// last one, an item with ranges = 0.
template <class B> __device__ __forceinline__ Item<B> item_of_plan(const KernelArgs& a, uint32_t i) {
  if constexpr (B::is_wgmma) griddepcontrol_wait();  // sdpa_plan() has finished
  const uint32_t number = a.q_heads.divide(i);
  if (number >= plan_of(a).count) return {};
  return planned_item<B>(a, number, int(a.q_heads.remainder(i)));
}

// ---- 5h the planning kernel (USE_LENGTHS) ----

// batch_invariant: number of ranges of a tile with `rounds` rounds, which belongs to the sequence.
template <class B>
__device__ __forceinline__ uint32_t invariant_ranges(const KernelArgs& a, const Sequence& sequence, uint32_t rounds) {
  const KeyBounds keys(a.p, sequence.Sq, sequence.Sk);
  const int queries = queries_of_item<B>(a), most_keys = min(sequence.Sk, keys.to - keys.from + queries + B::block_n);
  const int limit = B::split_ctas != 0
                        ? rounds_at_once(B::round_keys)
                        : invariant_rounds(ceil_div(most_keys, B::round_keys), B::round_keys,
                                           ceil_div(sequence.Sq, queries), plan_sizes<B>(a).balancing_partials);
  return B::split_ctas == 1 ? 1 : max(ceil_div(rounds, limit), uint32_t(max(B::split_ctas, 1)));
}
// One CTA computes the plan. It sorts the items into classes by their number of rounds. Class 0 has the most rounds.
constexpr int plan_threads = 1024, plan_classes = 64;
struct PlanShared {
  uint32_t rounds, rounds_65536;  // all items together have rounds + 65536 * rounds_65536 rounds
  uint32_t most_rounds;           // rounds of all keys of the longest sequence
  uint32_t partials, count, merges;  // number of partials, of items, and of tiles to merge
  uint32_t count_of[plan_classes];  // number of items of a class
  uint32_t first[plan_classes];     // index of the next item of a class in the list
};
// The steps of sdpa_plan(). A tile is a tile of query rows; each of its ranges of keys becomes an item.
template <class B> struct Planner {
  const KernelArgs& a;
  PlanShared& s;
  int shift = 0;              // 2^shift lanes share a sequence
  uint32_t limit = 0;         // maximum number of rounds in a range
  uint32_t least_ranges = 0;  // minimum number of ranges per tile
  uint32_t longest = 0;       // number of rounds of an item in class 0

  static __device__ __forceinline__ uint32_t rounds_of(const Interval& keys) {
    return uint32_t(max(ceil_div(keys.end - first_tile_key<B>(keys), B::round_keys), 0));
  }
  // Calls use(b, sequence, q0, keys) for every tile. q0 is shifted as in set_rounds(). The lanes that share a sequence
  // begin with its last rows.
  template <class Use> __device__ __forceinline__ void each_tile(Use use) const {
    const int tid = threadIdx.x, queries = queries_of_item<B>(a);
    for (int b = tid / 32 + (tid % 32 >> shift) * (plan_threads / 32); b < a.p.B; b += plan_threads >> shift) {
      const Sequence sequence(a.p, b);
      const KeyBounds keys(a.p, sequence.Sq, sequence.Sk);
      const int tiles = ceil_div(sequence.Sq, queries);
      const int shifted = skips_empty_warpgroups<B> && !keys.all() ? shifted_rows<B>(tiles, sequence.Sq) : 0;
      for (int i = tiles - 1 - tid % (1 << shift); i >= 0; i -= 1 << shift) {
        const int q0 = i * queries - shifted;
        use(b, sequence, q0, keys.of_rows(max(q0, 0), min(q0 + queries, sequence.Sq) - 1));
      }
    }
  }
  __device__ __forceinline__ void clear_counters() {
    const int tid = threadIdx.x;
    if (tid == 0) {
      s.rounds = 0;
      s.rounds_65536 = 0;
      s.most_rounds = 0;
      s.partials = 0;
      s.merges = 0;
    }
    if (tid < plan_classes) s.count_of[tid] = 0;
  }
  // Adds up the rounds. Lanes per sequence: one per tile, but at most 32; with q_starts always 32.
  __device__ __forceinline__ void count_rounds() {
    while (shift < 5 && (a.p.q_starts || 1 << shift < ceil_div(a.p.Sq, queries_of_item<B>(a)))) shift++;
    uint64_t rounds_of_thread = 0;
    each_tile([&](int, const Sequence& sequence, int, const Interval& keys) {
      rounds_of_thread += rounds_of(keys);
      atomicMax(&s.most_rounds, rounds_of({0, sequence.Sk}));
    });
    atomicAdd(&s.rounds, uint32_t(rounds_of_thread % 65536));  // in two halves: a 64-bit add would be a CAS loop
    atomicAdd(&s.rounds_65536, uint32_t(rounds_of_thread / 65536));
  }
  // The limit is at least `even`, so that all partials fit: only tiles of more than `even` rounds are divided, into at
  // most 2 * rounds / even ranges, in total fewer than balancing_partials. If `even` exceeds `most`, an accumulator
  // sums more keys than most_keys_at_once. A tile has at least SPLIT_CTAS ranges, if there is room for them.
  __device__ __forceinline__ void set_limits() {
    const uint32_t least = least_rounds(B::round_keys);
    const auto& sizes = plan_sizes<B>(a);
    const uint32_t most = rounds_at_once(B::round_keys), balancing = sizes.balancing_partials;
    least_ranges = sizes.partials > balancing ? B::split_ctas : 1;
    const uint64_t rounds_of_all = uint64_t(s.rounds_65536) * 65536 + s.rounds;
    const uint32_t even =
        balancing > 0 ? uint32_t(min(2 * rounds_of_all / balancing + 1, uint64_t(0x7fffffff))) : 0x7fffffff;
    limit = max(even, B::split_ctas == 0 ? min(least, most) : most);
    longest = max(a.p.batch_invariant ? s.most_rounds : min(s.most_rounds, limit), 1u);
  }
  __device__ __forceinline__ uint32_t ranges_of_tile(const Sequence& sequence, uint32_t rounds) const {
    if (a.p.batch_invariant) return invariant_ranges<B>(a, sequence, rounds);
    return max(ceil_div(rounds, limit), least_ranges);
  }
  // The class depends on the rounds of the item's range. With SPLIT_CTAS=1 it depends on the rounds of the sequence, so
  // that the tiles of a sequence are adjacent in the list and share its K and V in L2.
  __device__ __forceinline__ int class_of(const Sequence& sequence, uint32_t rounds, uint32_t ranges) const {
    const uint32_t cost = B::split_ctas == 1 ? rounds_of({0, sequence.Sk}) : ceil_div(rounds, ranges);
    return plan_classes - 1 - int(cost * (plan_classes - 1) / longest);
  }
  __device__ __forceinline__ void count_items() {
    each_tile([&](int, const Sequence& sequence, int, const Interval& keys) {
      const uint32_t rounds = rounds_of(keys), ranges = ranges_of_tile(sequence, rounds);
      atomicAdd(&s.count_of[class_of(sequence, rounds, ranges)], ranges);
    });
  }
  // Sets the index of the first item of each class, and the number of items. If q_starts decreases, rows belong to
  // several sequences, and there may be more items than fit. Then the plan is empty.
  __device__ __forceinline__ void order_classes() {
    const int tid = threadIdx.x;
    if (tid > plan_classes) return;
    uint32_t before = 0;
    for (int n = 0; n < tid; n++) before += s.count_of[n];
    if (tid < plan_classes) s.first[tid] = before;
    if (tid == plan_classes) s.count = before <= plan_sizes<B>(a).items ? before : 0;
  }
  // Appends the ranges of all tiles to the list. The lanes of a warp append range by range, so that items with the same
  // keys are adjacent.
  __device__ __forceinline__ void list_items() {
    PlannedItem* const items = planned_items(a);
    uint32_t* const merges = reinterpret_cast<uint32_t*>(items + plan_sizes<B>(a).items);
    each_tile([&](int b, const Sequence& sequence, int q0, const Interval& keys) {
      const uint32_t rounds = rounds_of(keys), ranges = ranges_of_tile(sequence, rounds);
      const uint32_t first_partial = ranges > 1 ? atomicAdd(&s.partials, ranges) : 0;
      const uint32_t each = rounds / ranges, rest = rounds % ranges;  // `rest` ranges have one more round
      for (uint32_t range = 0; range < ranges; range++) {
        const uint32_t number = atomicAdd(&s.first[class_of(sequence, rounds, ranges)], 1u);
        if (number >= plan_sizes<B>(a).items) return;
        if (ranges > 1 && range == 0) st_global(merges + atomicAdd(&s.merges, 1u), number);
        const int begin = first_tile_key<B>(keys) + int(each * range + min(range, rest)) * B::round_keys;
        const int end = min(begin + int(each + (range < rest)) * B::round_keys, keys.end);
        const PlannedItem item{b, 0, q0, sequence, {max(begin, keys.begin), end}, int(range), int(ranges),
                               int(first_partial)};
        uint4 words[sizeof item / 16];
        memcpy(words, &item, sizeof item);
        for (int i = 0; i < int(sizeof item / 16); i++) {
          st_global(reinterpret_cast<uint4*>(items + number) + i, words[i]);
        }
      }
    });
  }
  // Writes the numbers of items and of tiles to merge, and clears the counters of ranges.
  __device__ __forceinline__ void write_counts() {
    if (threadIdx.x == 0) st_global(&plan_of(a), uint4{s.count, s.count > 0 ? s.merges : 0, 0, 0});
    if constexpr (counts_ranges<B>) {
      const uint32_t counters = min(s.partials, plan_sizes<B>(a).partials) * a.q_heads.divisor / 2;
#pragma unroll 1
      for (uint32_t i = threadIdx.x; i < counters; i += plan_threads) st_global(range_counters<B>(a) + i, 0u);
    }
  }
};
template <class B> __global__ void __launch_bounds__(plan_threads, 1) sdpa_plan(const __grid_constant__ KernelArgs a) {
  if constexpr (B::is_wgmma) wait_then_let_next_kernel_start();
  Planner<B> planner{a, dynamic_shared<PlanShared>()};
  planner.clear_counters();
  __syncthreads();  // hazard: counters cleared by other threads
  planner.count_rounds();
  __syncthreads();  // hazard: rounds added up by all threads
  planner.set_limits();
  planner.count_items();
  __syncthreads();  // hazard: count_of added up by all threads
  planner.order_classes();
  __syncthreads();  // hazard: first and count written by other threads
  planner.list_items();
  __syncthreads();  // hazard: partials and merges added up by all threads
  planner.write_counts();
}

// ---- 5i partials of ranges, and their merge (wmma, mma, wgmma) ----

// Stores the O, m and l of a view in a partial, with store(address, vector).
template <class Partial, class View, class Store>
__device__ __forceinline__ void store_partial(Partial& partial, const View& O, const float (&m)[View::ROWS],
                                              const float (&l)[View::ROWS], const Store& store) {
  constexpr int width = View::RUN < 4 ? View::RUN : 4;
  SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
    SDPA_UNROLL for (int j = 0; j < View::COLS; j += width) {
      VectorType<width * sizeof(float)> x;
      memcpy(&x, &O.x[i][j], sizeof x);
      store(&partial.O[O.row(i)][O.col(j)], x);
    }
    if (O.col(0) == 0) store(&partial.m_l[O.row(i)], float2{m[i], l[i]});
  }
}

// A view of row i of another view, as row 0 of an item.
template <class View> struct OneRow {
  static constexpr int ROWS = 1, COLS = View::COLS, RUN = View::RUN;
  const View& view;
  const int i;
  struct Rows {
    const View& view;
    const int i;
    __device__ auto operator[](int) const { return view.x[i]; }
  } x{view, i};
  __device__ int row(int) const { return 0; }
  __device__ int col(int j) const { return view.col(j); }
};

// Stores the CTA's result: O / l and LSE, or a partial if sdpa_merge() merges the item's ranges.
template <class B, class View, class Rows>
__device__ __forceinline__ void store_result(const View& O, const Rows& m, const Rows& l, const KernelArgs& a,
                                             const Item<B>& item) {
  if constexpr (B::split_ctas != 1) {
    if (!B::use_lengths || item.range_count(a) != 1) {
      RangePartial<B>& partial = range_partials<B>(a)[item.partial_index(a)];
      return store_partial(partial, O, m, l, [](void* dst_g, auto x) { st_global(dst_g, x); });
    }
  }
  if constexpr (B::use_lengths && B::pack_gqa) {
    SDPA_UNROLL for (int i = 0; i < View::ROWS; i++) {
      if (O.row(i) >= rows_of_item<B>(a)) continue;
      const float row_m[1] = {m[i]}, row_l[1] = {l[i]};
      store_output<B>(OneRow<View>{O, i}, row_m, row_l, a, row_item<B>(a, item, O.row(i)));
    }
  } else {
    store_output<B>(O, m, l, a, item);
  }
}

// Merges the partials of all ranges of an item in a fixed order, and stores O and LSE. A thread loads COLS
// columns of AT_ONCE ranges at once.
template <class B, int AT_ONCE, int COLS>
__device__ __forceinline__ void merge_ranges(const RangePartial<B>* partial, const KernelArgs& a, const Item<B>& item,
                                             int thread, int threads = B::num_warps * 32) {
  constexpr int row_vectors = B::d_v / COLS;
  const int ranges = int(item.range_count(a));
  const int vectors = rows_of_item<B>(a) * row_vectors;
  for (int vector = thread; vector < vectors; vector += threads) {
    const int row = vector / row_vectors;
    const float scale_log2 = item_scale_log2<B>(a, row_item<B>(a, item, row));
    QuadRuns<1, 4 * COLS, COLS> O;
    O.first_row = 0;
    O.first_col = vector % row_vectors * COLS;
    clear(O);
    float m[1] = {-INFINITY}, l[1] = {0};
    for (int first = 0; first < ranges; first += AT_ONCE) {
      float2 m_l[1 + AT_ONCE] = {{m[0], l[0]}};
      float4 x[AT_ONCE][COLS / 4] = {};
      SDPA_UNROLL for (int n = 0; n < AT_ONCE; n++) {
        m_l[1 + n] = {-INFINITY, 0};
        if (first + n >= ranges) continue;
        m_l[1 + n] = ld_global_cg<float2>(&partial[first + n].m_l[row]);
        SDPA_UNROLL for (int c = 0; c < COLS / 4; c++) {
          x[n][c] = ld_global_cg<float4>(&partial[first + n].O[row][O.first_col + 4 * c]);
        }
      }
      float weight[1 + AT_ONCE];
      merge_weights<B>(m_l, scale_log2, weight, m[0], l[0]);
      SDPA_UNROLL for (int j = 0; j < COLS; j++) O.x[0][j] *= weight[0];
      SDPA_UNROLL for (int n = 0; n < AT_ONCE; n++) {
        SDPA_UNROLL for (int c = 0; c < COLS / 4; c++) add_weighted(O.x[0] + 4 * c, x[n][c], weight[1 + n]);
      }
    }
    store_output<B>(O, m, l, a, row_item<B>(a, item, row));
  }
}

// ---- 5i the merge kernel (SPLIT_CTAS = 0, SPLIT_CTAS > 1) ----
// A thread merges four columns of a row, so that all SMs share the work. With one CTA per item they would
// not.

constexpr int merge_threads = 128;
template <class B> constexpr int merge_ctas = ceil_div(B::block_m * B::d_v / 4, merge_threads);  // per item

template <class B> __global__ void __launch_bounds__(merge_threads) sdpa_merge(const __grid_constant__ KernelArgs a) {
  if constexpr (B::is_wgmma) wait_then_let_next_kernel_start();
  if constexpr (B::use_lengths) {  // the plan lists the first ranges of the tiles to merge
    const uint32_t head_groups = a.q_heads.divisor, ctas = plan_of(a).merges * head_groups * merge_ctas<B>;
    const uint32_t* const merges = reinterpret_cast<const uint32_t*>(planned_items(a) + plan_sizes<B>(a).items);
    for (uint32_t i = blockIdx.x; i < ctas; i += gridDim.x) {
      const uint32_t merge = i / merge_ctas<B>;
      const Item<B> item = planned_item<B>(a, merges[merge / head_groups], int(merge % head_groups));
      merge_ranges<B, ranges_at_once, 4>(range_partials<B>(a) + item.first_partial, a, item,
                                         int(i % merge_ctas<B> * merge_threads + threadIdx.x),
                                         merge_ctas<B> * merge_threads);
    }
  } else {
    const uint32_t number = blockIdx.x / merge_ctas<B>, cta = blockIdx.x % merge_ctas<B>;
    merge_ranges<B, ranges_at_once, 4>(range_partials<B>(a) + number * a.ranges.divisor, a,
                                       work_item<B>(a, a.first_item + number), int(cta * merge_threads + threadIdx.x),
                                       merge_ctas<B> * merge_threads);
  }
}

// ---- 5i partials of splits in shared memory ----

// The partial of a split, row by row.
template <class B> struct RowsPartial {
  alignas(16) float O[B::block_m][PARTIAL_STRIDE<B>];
  float2 m_l[B::block_m];
};

// Merges the partials of the splits in a fixed order. Calls put(row, O, m, l) for every four columns of a
// row.
template <class B, class Partials, class Put>
__device__ __forceinline__ void merge_split_partials(const Partials& partials_s, const ItemScales<B>& scales,
                                                     int thread, const Put& put) {
  constexpr int row_vectors = B::d_v / 4, threads = B::num_warps * 32;
  const int rows = rows_of_item<B>(scales.a);
#pragma unroll 4
  for (int first = 0; first < B::block_m * row_vectors; first += threads) {
    const int i = first + thread, row = i / row_vectors;
    if (row >= rows) break;
    QuadRuns<1, 16, 4> O;  // four adjacent columns of a row
    O.first_row = 0;
    O.first_col = i % row_vectors * 4;
    clear(O);
    float m[1], l[1], weight[B::split_kv];
    float2 m_l[B::split_kv];
    SDPA_UNROLL for (int n = 0; n < B::split_kv; n++) m_l[n] = ld_shared<float2>(&partials_s[n].m_l[row]);
    merge_weights<B>(m_l, scales.scale_log2(), weight, m[0], l[0]);
    SDPA_UNROLL for (int n = 0; n < B::split_kv; n++) {
      add_weighted(O.x[0], ld_shared<float4>(&partials_s[n].O[row][O.first_col]), weight[n]);
    }
    put(row, O, m, l);
  }
}

// Merges the partials of the splits, s.split, and stores O / l and LSE of the item's rows. If the item has several
// ranges, stores the partial of the CTA's range instead. The last CTA of the item to do so merges the partials.
template <class B, class Shared>
__device__ __forceinline__ void store_merged(Shared& s, const KernelArgs& a, const Item<B>& item, int thread) {
  const ItemScales<B> scales(a, item);
  if (B::split_ctas == 1 || item.range_count(a) == 1) {
    merge_split_partials<B>(s.split, scales, thread, [&](int row, const auto& O, auto& m, auto& l) {
      store_output<B>(O, m, l, a, row_item<B>(a, item, row));
    });
    return;
  }
  if constexpr (counts_ranges<B>) {
    const uint32_t ranges = item.range_count(a);
    uint32_t* const counters = range_counters<B>(a);
    RangePartial<B>* const partials = range_partials<B>(a);
    merge_split_partials<B>(s.split, scales, thread, [&](int row, const auto& O, auto& m, auto& l) {
      RangePartial<B>& partial = partials[item.partial_index(a)];
      st_global(&partial.O[row][O.first_col], float4{O.x[0][0], O.x[0][1], O.x[0][2], O.x[0][3]});
      if (O.first_col == 0) st_global(&partial.m_l[row], float2{m[0], l[0]});
    });
    __syncthreads();  // hazard: the partial is written by all threads
    if (thread == 0) s.is_last = atom_inc_acq_rel(&counters[item.counter(a)], ranges - 1) == ranges - 1;
    __syncthreads();  // hazard: is_last is written by thread 0
    if (!s.is_last) return;
    const RangePartial<B>* const first = partials + item.first_partial_index(a);
    ranges > few_ranges ? merge_ranges<B, ranges_at_once, 4>(first, a, item, thread)
                        : merge_ranges<B, 2, 16>(first, a, item, thread);
  }
}

// ---- 5i packed GQA with mma.sync (mma and PACK_GQA) ----

template <class B> struct MmaPartials<B, true> {
  struct type {
    RowsPartial<B> split[B::split_kv];
    std::conditional_t<counts_ranges<B>, bool, Nothing> is_last;  // written and read by store_merged()
  };
};

// Reads the descale factor of each row of Q. Padding rows get the factor of a valid head.
template <class B>
__device__ __forceinline__ void read_q_descale(MmaRows<B>& rows, const KernelArgs& a, const Item<B>& item) {
  SDPA_UNROLL for (int i = 0; i < rows.ROWS; i++) {
    const Item<B> one_row = row_item<B>(a, item, rows.O.row(i));
    rows.q_descale[i] = a.p.q_descale.of_head(one_row.b, min(one_row.h, a.p.Hq - 1));
  }
}

template <class B> struct MmaPacked {
  static __device__ __forceinline__ void copy_q(MmaShared<B>& s, const ItemTiles<B>& t, const KernelArgs& a) {
    constexpr int per_row = B::d_q / B::vec_width;
    const SdpaParams& p = a.p;
    const int rows = rows_of_item<B>(a);
    for (int i = threadIdx.x; i < B::block_m * per_row; i += B::threads) {
      const int row = i / per_row, col = i % per_row * B::vec_width,
                column_of_q = B::q_type != B::kv_type ? col / 2 : col;
      const Item<B> from = row_item<B>(a, t.item, row);
      VectorCopy<B::use_cp_async>::template copy<B::vec_width * sizeof(KeyValue)>(
          s.in.Q + tile_offset<B, B::d_q>(row, col),
          p.Q + from.b * p.q.batch + from.h * p.q.head + from.q_row(from.q0) * p.q.row + column_of_q,
          row < rows && from.q0 < from.query_count(p) && (!B::takes_short_rows || column_of_q < p.D));
    }
  }
  static __device__ __forceinline__ void store(MmaShared<B>& s, const MmaRows<B>& rows, const KernelArgs& a, int split,
                                               int lane) {
    MmaRuns<B> runs;
    rearrange_runs<B>(runs, rows.O, lane);
    __syncthreads();  // hazard: the partials overwrite Q, K and V
    RowsPartial<B>& partial = s.partial.split[split];
    store_partial(partial, runs, rows.m, rows.l, [](void* dst_s, auto x) { st_shared(dst_s, x); });
    __syncthreads();  // hazard: partials written by all warps
    store_merged(s.partial, a, s.item, threadIdx.x);
  }
};

// ---- 5j pages (USE_PAGES = 1, USE_PAGES = 2) ----

// K and V are [pages,Hkv,page_size,D]; their batch stride is the stride from page to page. Row k of sequence
// b is row k % page_size of page page_table[b * page_stride + k / page_size]. A row of the page table covers
// Sk keys. USE_PAGES=1: key k is row k, since there is no k_firsts.

// Returns the page of the item's keys [k, k + keys), which are in one page. If the item sees none of them,
// returns p.pages, which is out of bounds, so that TMA zero-fills the box.
template <class B>
__device__ __forceinline__ int page_of(const KernelArgs& a, const Item<B>& item, int k, int keys = 1) {
  if (max(k, item.keys.begin) >= min(k + keys, item.keys.end)) return a.p.pages;
  const int index = int(plan_sizes<B>(a).page_size.divide(uint32_t(B::use_pages == 1 ? k : item.k_row(k))));
  return min(max(ld_global<int>(a.p.page_table + int64_t(item.b) * a.p.page_stride + index), 0), a.p.pages - 1);
}
// Acts as a pointer to row k of K or V, for rows in pages. head_g: row 0 of the head in page 0.
template <class B> struct PagedRows {
  const KernelArgs* a;
  const Item<B>* item;
  const Strides* strides;
  const KeyValue* head_g;
  int k;
  __device__ __forceinline__ const KeyValue* operator+(int column) const {
    const int row = int(plan_sizes<B>(*a).page_size.remainder(uint32_t(B::use_pages == 1 ? k : item->k_row(k))));
    return head_g + page_of<B>(*a, *item, k) * strides->batch + row * strides->row + column;
  }
};

// ---- 5j pages: the steps of a copy (scalar, wmma, mma and USE_PAGES = 1, USE_PAGES = 2) ----

template <class B> __device__ __forceinline__ void operator+=(PagedRows<B>& at, int64_t rows) { at.k += int(rows); }

// ---- 5j pages by TMA (wgmma and USE_PAGES = 1) ----

// Each lane copies one box: rows of one page in one panel. The constructor reads the page table. Call it while
// the stage is still full, which hides the latency of that read.
template <class B, int D> struct TileBox<B, D, true> {
  static constexpr int BYTES = D * B::kv_bytes, PANEL_WIDTH = PANEL_BYTES<BYTES> / B::kv_bytes;
  int box_origin[5], row;  // of this lane's box: coordinates in the tensor map, and its first row in the tile

  __device__ __forceinline__ TileBox(const KernelArgs& a, const Item<B>& item, int h_kv, int k0)
      : box_origin{0, 0, 0, h_kv, 0} {
    const int lane = threadIdx.x % 32, rows = plan_sizes<B>(a).box_rows;
    row = lane / PANELS<BYTES> * rows;
    box_origin[0] = lane % PANELS<BYTES> * PANEL_WIDTH;
    box_origin[1] = int(plan_sizes<B>(a).page_size.remainder(uint32_t(k0 + row)));
    box_origin[4] = page_of<B>(a, item, k0 + row, rows);
  }
  __device__ __forceinline__ void load(const KernelArgs&, const CUtensorMap* map, KeyValue* to_s,
                                       uint64_t* full) const {
    if (row >= B::block_n) return;
    if (threadIdx.x % 32 == 0) mbarrier_arrive_expect_tx(full, B::block_n * ROW_BYTES<BYTES>);
    to_s += box_origin[0] * B::block_n + row * PANEL_WIDTH;
    cp_async_bulk_tensor_load(to_s, map, box_origin, full, kv_cache_policy<B>);
  }
};

// ---- 5j pages of any size by cp.async (wgmma and USE_PAGES = 2) ----

// The pages of the rows of a tile that a warp copies: ROWS rows from first_row(). Each lane has the page of
// every 32nd row.
template <class B> struct RowPages {
  static constexpr int ROWS = ceil_div(B::block_n, 8 * copying_warps<B>) * 8, COUNT = ceil_div(ROWS, 32);
  int page[COUNT];

  static __device__ __forceinline__ int first_row() {
    return warp_uniform(threadIdx.x / 32 % 4 / (4 / copying_warps<B>)) * ROWS;
  }
  RowPages() = default;
  __device__ __forceinline__ RowPages(const KernelArgs& a, const Item<B>& item, int k0) {
    SDPA_UNROLL for (int n = 0; n < COUNT; n++) {
      page[n] = page_of<B>(a, item, k0 + first_row() + 32 * n + int(threadIdx.x % 32));
    }
  }
};
// Copies a warp's rows of a tile, in the panel layout that TMA writes. LANES lanes copy a line of a panel, 16
// bytes each. Rows that the item does not see are zero-filled. `map` tells load() which of K and V to copy.
template <class B, int D> struct TileRows {
  static constexpr int BYTES = ROW_BYTES<D * B::kv_bytes>, LINE = PANEL_BYTES<BYTES>;
  static constexpr int LANES = LINE / 16, AT_ONCE = 32 / LANES;  // lanes per line; lines that a warp copies at once
  const Item<B>& item;
  const int h_kv, k0;
  const RowPages<B> pages;

  __device__ __forceinline__ TileRows(const KernelArgs& a, const Item<B>& item_, int head, int first_key)
      : TileRows(item_, head, first_key, RowPages<B>(a, item_, first_key)) {}
  __device__ __forceinline__ TileRows(const Item<B>& item_, int head, int first_key, const RowPages<B>& found)
      : item(item_), h_kv(head), k0(first_key), pages(found) {}
  __device__ __forceinline__ void load(const KernelArgs& a, const CUtensorMap* map, KeyValue* to_s,
                                       uint64_t* full) const {
    const SdpaParams& p = a.p;
    const bool is_v = map == &tensor_maps<B>(a).v;
    const Strides& strides = is_v ? p.v : p.k;
    const KeyValue* const head_g = (is_v ? p.V : p.K) + h_kv * strides.head;
    const int lane = threadIdx.x % 32, line = lane / LANES, byte = lane % LANES * 16, first = pages.first_row();
    const int bytes = (is_v ? p.Dv : p.D) * B::kv_bytes;
    // The swizzle repeats every 8 rows, and `first` is a multiple of 8. So the loop only applies the swizzle
    // of row % 8 to `offset`.
    char* const first_s = reinterpret_cast<char*>(to_s) + first * LINE;
    const uint32_t offset = panel_byte<B::block_n, LINE>(line, byte);
    SDPA_UNROLL for (int n = 0; n < pages.COUNT; n++) {
      const int key = k0 + first + 32 * n + lane;
      const int in_page = int(plan_sizes<B>(a).page_size.remainder(uint32_t(item.k_row(key))));
      const KeyValue* row_g = head_g + pages.page[n] * strides.batch + in_page * strides.row;
      if (pages.page[n] >= p.pages) row_g = nullptr;
      SDPA_UNROLL for (int row = 32 * n; row < min(32 * n + 32, pages.ROWS); row += AT_ONCE) {
        const char* const from_g = reinterpret_cast<const char*>(
            __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(row_g), row % 32 + line));
        if (pages.ROWS * copying_warps<B> > B::block_n && first + row >= B::block_n) break;
        const uint32_t at = (offset ^ panel_byte<B::block_n, LINE>(row % 8, 0) % LINE) + row * LINE;
        SDPA_UNROLL for (int panel = 0; panel < PANELS<BYTES>; panel++) {
          const int column = panel * LINE + byte;
          cp_async<16>(first_s + panel * B::block_n * LINE + at, from_g + column, from_g && column < bytes);
        }
      }
    }
    cp_async_mbarrier_arrive(full);
    __syncwarp();  // hazard: the phase must not end before every lane has raised its pending count
    if (lane == 0) mbarrier_arrive(full);
  }
};

// ---- 5k copies that convert U8 (wmma and DTYPE = U8) ----

// Converts two bytes u of a word, the low or the high ones, to u - 128 in fp16. The bits 0x6400 | u are the
// fp16 number 1024 + u.
__device__ __forceinline__ uint32_t f16x2_of_u8x2(uint32_t word, bool high) {
  constexpr uint32_t halves_of_1152 = 0x64806480;
  return sub_f16x2(prmt(word, 0x64646464, high ? 0x4342 : 0x4140), halves_of_1152);
}
// Copies a vector of 8 or 16 elements and converts them to fp16, the type of the products.
template <> struct VectorCopy<false, true> {
  template <int BYTES> __device__ static __forceinline__ void copy(void* dst_s, const void* src_g, bool valid) {
    VectorType<BYTES> vector{};
    if (valid) vector = ld_global_nc<decltype(vector)>(src_g);
    uint32_t words[BYTES / 4];
    memcpy(words, &vector, sizeof vector);
    SDPA_UNROLL for (int i = 0; i < BYTES / 4; i += 2) {
      const uint32_t low = words[i], high = words[i + 1];
      st_shared(static_cast<uint4*>(dst_s) + i / 2, uint4{f16x2_of_u8x2(low, false), f16x2_of_u8x2(low, true),
                                                          f16x2_of_u8x2(high, false), f16x2_of_u8x2(high, true)});
    }
  }
};

// ---- 5k conversion of e4m3 to 16 bits (DTYPE = FP8_E4M3, KV_DTYPE = FP8_E4M3) ----

// Converts four e4m3 elements to two pairs of fp16.
__device__ __forceinline__ void f16_of_e4m3(uint32_t (&pairs)[2], uint32_t bytes) {
  SDPA_UNROLL for (int n = 0; n < 2; n++) pairs[n] = cvt_rn_f16x2_e4m3x2(bytes >> 16 * n);
}
// Converts two pairs of fp16 that hold e4m3 values to bf16, which represents e4m3 exactly.
__device__ __forceinline__ void bf16_of_f16(uint32_t (&pairs)[2]) {
  SDPA_UNROLL for (int n = 0; n < 2; n++) {
    __half x[2];
    memcpy(x, &pairs[n], sizeof x);
    pairs[n] = pack<__nv_bfloat16>(to_float(x[0]), to_float(x[1]));
  }
}

// ---- 5k mma.sync with e4m3 (mma and DTYPE = FP8_E4M3, KV_DTYPE = FP8_E4M3) ----

// P @ V with m16n8k32. The keys of a step are permuted, so that lanes need not exchange P: k = 4q + i of both
// operands is key i / 2 * 8 + 2q + i % 2, and k = 16 + 4q + i is 16 keys further. In lane 4g + q, a register
// of V from ldmatrix has the bytes d = 2g and d = 2g + 1 of two keys. prmt separates the even d from the odd
// d, which are the operands of two products. Together the products give a lane 4 adjacent d of 16.
template <class B> struct MmaE4m3 {
  static constexpr int REGISTERS = 4, KEYS = 32;

  static __device__ __forceinline__ void multiply(float& d0, float& d1, float& d2, float& d3, const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
    mma_m16n8k32_e4m3(d0, d1, d2, d3, a, b0, b1);
  }
  static __device__ __forceinline__ void read(uint32_t (&a)[4], SharedAddress from) { ldmatrix_x4<false>(a, from); }
  static __device__ __forceinline__ uint32_t pack_p(const float* x) {
    return cvt_rn_satfinite_e4m3x4(x[0], x[1], x[2], x[3]);
  }
  static __device__ __forceinline__ void pv(MmaSums<B>& O, const MmaStepOfP<B>& p, const Element<B>* V_s, int step,
                                            int lane) {
    const SharedAddress lane_address = shared_address(V_s + tile_offset<B, B::d_v>(lane, 0));
    SDPA_UNROLL for (int n = 0; n < B::d_v / 16; n++) {
      uint32_t v[4];  // keys 0-7, 8-15, 16-23 and 24-31
      ldmatrix_x4<true>(v, tile_step<B, B::d_v>(lane_address, MMA_K<B> * step, 16 * n));
      const uint32_t even[2] = {prmt(v[0], v[1], 0x6420), prmt(v[2], v[3], 0x6420)};
      const uint32_t odd[2] = {prmt(v[0], v[1], 0x7531), prmt(v[2], v[3], 0x7531)};
      SDPA_UNROLL for (int m = 0; m < O.M_TILES; m++) {
        float *const top = O.x[2 * m] + 4 * n, *const bottom = O.x[2 * m + 1] + 4 * n;
        multiply(top[0], top[2], bottom[0], bottom[2], p[m], even[0], even[1]);
        multiply(top[1], top[3], bottom[1], bottom[3], p[m], odd[0], odd[1]);
      }
    }
  }
};

// mma.sync with 16-bit operands, which are converted when they are read. A step of Q @ K.T takes two
// products: the first multiplies the lane's bytes k = 4q ... 4q + 3, the second k = 16 + 4q ... 16 + 4q + 3.
template <class B> struct MmaE4m3AsHalves {
  static constexpr int REGISTERS = 8, KEYS = 16;

  static __device__ __forceinline__ void multiply(float& d0, float& d1, float& d2, float& d3, const uint32_t (&a)[8],
                                                  uint32_t b0, uint32_t b1) {
    const uint32_t b[2] = {b0, b1};
    SDPA_UNROLL for (int n = 0; n < 2; n++) {
      uint32_t pairs[2], a_of_product[4];
      f16_of_e4m3(pairs, b[n]);
      memcpy(a_of_product, a + 4 * n, sizeof a_of_product);
      if constexpr (B::product_type == DType::bf16) bf16_of_f16(pairs);
      mma_m16n8k16<ElementOf<B::product_type>>(d0, d1, d2, d3, a_of_product, pairs[0], pairs[1]);
    }
  }
  static __device__ __forceinline__ void read(uint32_t (&a)[8], SharedAddress from) {
    uint32_t bytes[4], pairs[2];
    ldmatrix_x4<false>(bytes, from);
    SDPA_UNROLL for (int i = 0; i < 4; i++) {  // rows g and g + 8 of the first 16 k, then of the next 16
      f16_of_e4m3(pairs, bytes[i]);
      a[i / 2 * 4 + i % 2] = pairs[0];
      a[i / 2 * 4 + i % 2 + 2] = pairs[1];
    }
  }
  static __device__ __forceinline__ uint32_t pack_p(const float* x) { return pack<__half>(x[0], x[1]); }
  static __device__ __forceinline__ void pv(MmaSums<B>& O, const MmaStepOfP<B>& p, const Element<B>* V_s, int step,
                                            int lane) {
    const SharedAddress lane_address = shared_address(V_s + tile_offset<B, B::d_v>(lane % 16, lane / 16 * CHUNK<B>));
    SDPA_UNROLL for (int n = 0; n < B::d_v / 16; n += 2) {
      uint32_t v[4];  // keys 0-7 and 8-15 of 16 d, then of the next 16 d
      ldmatrix_x4<true>(v, tile_step<B, B::d_v>(lane_address, 16 * step, 16 * n));
      SDPA_UNROLL for (int next = 0; next < 2; next++) {
        uint32_t low[2], high[2];  // keys 0-7 and 8-15; the even d and the odd d of each
        f16_of_e4m3(low, prmt(v[2 * next], 0, 0x3120));
        f16_of_e4m3(high, prmt(v[2 * next + 1], 0, 0x3120));
        SDPA_UNROLL for (int m = 0; m < O.M_TILES; m++) {
          float* const top = O.x[2 * m] + 4 * (n + next);
          float* const bottom = O.x[2 * m + 1] + 4 * (n + next);
          mma_m16n8k16<__half>(top[0], top[2], bottom[0], bottom[2], p[m], low[0], high[0]);
          mma_m16n8k16<__half>(top[1], top[3], bottom[1], bottom[3], p[m], low[1], high[1]);
        }
      }
    }
  }
};

// ---- 5k mma.sync with a 16-bit Q and e4m3 K and V (mma and KV_DTYPE = FP8_E4M3) ----

template <class B> struct MmaMixedTypes : MmaE4m3AsHalves<B> {
  // A lane reads 4 of every 16 elements of a row: 8 bytes.
  static __device__ __forceinline__ void read(uint32_t (&a)[8], SharedAddress from) {
    SDPA_UNROLL for (int i = 0; i < 4; i++) {  // rows g and g + 8 of the first 16 k, then of the next 16
      uint32_t pairs[2];
      ld_shared_v2(pairs, tile_step<B, B::d_q>(from, i % 2 * 8, i / 2 * 32));
      a[i / 2 * 4 + i % 2] = pairs[0];
      a[i / 2 * 4 + i % 2 + 2] = pairs[1];
    }
  }
};

// ---- 5k wgmma with a 16-bit Q and e4m3 K and V (wgmma and KV_DTYPE = FP8_E4M3) ----
//
// The producer warps convert each tile of K and V to fp16 after it has landed. A conversion to bf16 would
// take four times as many instructions. P is fp16, too. The conversion reads 1 byte of shared memory and
// writes 2 per element. For comparison, TMA writes 1 byte, and the wgmma of each warpgroup reads 2. A bf16 Q
// is converted to fp16 once per item: each row is multiplied by a power of two, and its scale is divided by
// it.

// The 8-bit stages of K and V. full: the tile has landed. empty: all producer warps have read the tile.
template <class B> struct LandedTiles {
  // With D > 128, K and V have one stage each. That suffices, since one of them lands while the other is converted.
  static constexpr int COUNT = B::head_dim > 128 ? 1 : B::stages;
  alignas(1024) KeyValue K[COUNT][B::block_n * ROW_BYTES<B::head_dim * B::kv_bytes>];  // [BLOCK_N][D]
  alignas(1024) KeyValue V[COUNT][B::block_n * ROW_BYTES<B::d_v * B::kv_bytes>];       // [BLOCK_N][Dv]
  uint64_t k_full[COUNT], k_empty[COUNT], v_full[COUNT], v_empty[COUNT];

  __device__ __forceinline__ void init_mbarriers() {
    mbarriers_init(k_full, copying_warps<B>);
    mbarriers_init(v_full, copying_warps<B>);
    mbarriers_init(k_empty, converter_warps);
    mbarriers_init(v_empty, converter_warps);
  }
};

// Converts the warpgroup's rows of Q from bf16 to fp16 in place. Each row is multiplied by the power of two
// that brings its largest element between 2^14 and 2^15, but by no more than 2^126. So no element overflows,
// and rounding errors of small elements are below 2^-38 of the largest element (if that is at least 2^-112).
// The scale of the row is divided by the same power.
template <class B> __device__ void Wgmma16Consumer<B>::convert_q_to_fp16() {
  const uint32_t tid = mov_tid_x() % 128, first_row = tid / 32 * 16 + tid % 32 / 4;
  char* const Q_s = reinterpret_cast<char*>(s.queries(q_ring.stage, row_group));
  SDPA_UNROLL for (int i = 0; i < 2; i++) {
    constexpr int TIMES = ceil_div(B::qk_bytes, 64);  // four lanes share a row and read 64 bytes of it at once
    uint32_t words[TIMES][4];                         // two elements each
    const auto chunk = [&](int n) {
      return Q_s + panel_byte<Q_PANEL_ROWS<B>, PANEL_BYTES<B::qk_bytes>>(first_row + 8 * i, 64 * n + tid % 4 * 16);
    };
    const auto has_chunk = [&](int n) { return B::qk_bytes % 64 == 0 || 64 * n + int(tid) % 4 * 16 < B::qk_bytes; };
    float largest = 0;
    SDPA_UNROLL for (int n = 0; n < TIMES; n++) {
      const uint4 x = has_chunk(n) ? ld_shared<uint4>(chunk(n)) : uint4{};
      memcpy(words[n], &x, sizeof x);
      for (const uint32_t word : words[n]) {
        largest = fmaxf(largest, fmaxf(fabsf(float_of(word << 16)), fabsf(float_of(word & 0xffff0000u))));
      }
    }
    SDPA_UNROLL for (int lane = 1; lane < 4; lane *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lane));
    }
    const int exponent = max(int(bits_of(largest) >> 23), 127 + 14 - 126) - (127 + 14);
    const float factor = float_of(uint32_t(127 - exponent) << 23);
    SDPA_UNROLL for (int n = 0; n < TIMES; n++) {
      uint4 x;
      for (uint32_t& word : words[n]) {
        word = pack<__half>(float_of(word << 16) * factor, float_of(word & 0xffff0000u) * factor);
      }
      memcpy(&x, words[n], sizeof x);
      if (has_chunk(n)) st_shared(chunk(n), x);
    }
    float& scale = rows.scales.descaling.factor[i];
    scale = finite_scale(scale * float_of(uint32_t(127 + exponent) << 23));
  }
  fence_proxy_async();  // hazard: Q written here, read by wgmma
  barrier_sync(q_read_barrier + Base::warpgroup, q_read_threads);  // hazard: rows written by all warps
}
// Divides m by the power of two by which the row of Q was multiplied, so that the merge, the sink and LSE can
// use the item's scale. With a softcap or SCORE_MOD, m is a maximum of tanh values or logits: no change.
template <class B> __device__ void Wgmma16Consumer<B>::undo_scale_of_q() {
  const uint32_t tid = mov_tid_x() % 128;
  ItemScales<B> item_scales(a);
  item_scales.start(Base::item(), row_group * 64 + tid / 32 * 16 + tid % 32 / 4);
  SDPA_UNROLL for (int i = 0; i < 2; i++) {
    if (!replaces_scores<B>(a)) rows.m[i] *= rows.scales.descaling.factor[i] / item_scales.descaling.factor[i];
  }
}

// A producer warp. It converts its share of every tile. Warp 0 loads the tiles by TMA; with cp.async all
// warps load.
template <class B> struct WgmmaConverter : WgmmaProducer<B, WgmmaShared<B>, LandedTiles<B>::COUNT> {
  using Base = WgmmaProducer<B, WgmmaShared<B>, LandedTiles<B>::COUNT>;
  using Base::s, Base::a, Base::ring, Base::issues, Base::Base;
  // tile_ring: the 16-bit stage to write. ring: the 8-bit stage to read and reload, in the phase of the reload.
  StageRing<B::stages> tile_ring;

  // Converts a tile's rows to fp16. Each warp converts 8 of every 32 rows. Eight lanes convert 64 bytes of
  // each of two rows, whose indices differ in bits 0 and 2. This avoids bank conflicts of the reads and of
  // the writes, which are twice as long.
  template <int D> static __device__ __forceinline__ void convert(void* to_s, const void* from_s, int warp) {
    constexpr int LINE = PANEL_BYTES<D * B::element_bytes>, LANDED_LINE = PANEL_BYTES<D * B::kv_bytes>;
    constexpr int ROWS = 8 * converter_warps, CHUNKS = ceil_div(D, 64), AT_ONCE = CHUNKS < 2 ? CHUNKS : 2;
    constexpr int TIMES = ceil_div(CHUNKS, AT_ONCE);  // steps for 8 rows
    const uint32_t lane = threadIdx.x % 32, row = warp * 8 + (lane / 8 ^ lane / 4 % 2 * 5), byte = lane % 4 * 16;
    uint4 x[2][AT_ONCE];  // double buffer: this step and the next one
    const auto has_column = [&](int column) { return column < D && (D % 64 == 0 || column + byte < D); };
    const auto has_row = [&](int first) { return B::block_n % ROWS == 0 || first + warp * 8 < B::block_n; };
    const auto load = [&](int step) {
      SDPA_UNROLL for (int n = 0; n < AT_ONCE; n++) {
        const int first = step / TIMES * ROWS, column = (step % TIMES * AT_ONCE + n) * 64;
        if (!has_column(column) || !has_row(first)) continue;
        const uint32_t at = panel_byte<B::block_n, LANDED_LINE>(row, column + byte) + first * LANDED_LINE;
        x[step % 2][n] = ld_shared<uint4>(static_cast<const char*>(from_s) + at);
      }
    };
    constexpr int steps = ceil_div(B::block_n, ROWS) * TIMES;
    load(0);
    SDPA_UNROLL for (int step = 0; step < steps; step++) {
      if (step + 1 < steps) load(step + 1);
      SDPA_UNROLL for (int n = 0; n < AT_ONCE; n++) {
        const int first = step / TIMES * ROWS, column = (step % TIMES * AT_ONCE + n) * 64;
        if (!has_column(column) || !has_row(first)) continue;
        uint32_t words[4], pairs[4][2];
        memcpy(words, &x[step % 2][n], sizeof words);
        SDPA_UNROLL for (int i = 0; i < 4; i++) f16_of_e4m3(pairs[i], words[i]);
        const uint32_t at = panel_byte<B::block_n, LINE>(row, 2 * (column + byte));
        char *const low_s = static_cast<char*>(to_s) + at, *const high_s = static_cast<char*>(to_s) + (at ^ 16);
        st_shared(low_s + first * LINE, uint4{pairs[0][0], pairs[0][1], pairs[1][0], pairs[1][1]});
        st_shared(high_s + first * LINE, uint4{pairs[2][0], pairs[2][1], pairs[3][0], pairs[3][1]});
      }
    }
  }
  // Converts the warp's share of a tile when the tile has landed and the 16-bit stage is empty.
  template <int D>
  __device__ __forceinline__ void convert_tile(void* to_s, uint64_t* empty, uint64_t* full, const void* from_s,
                                               uint64_t* landed, uint64_t* read, int warp) {
    mbarrier_wait(empty, tile_ring.parity ^ 1);
    mbarrier_wait(landed, ring.parity ^ 1);
    convert<D>(to_s, from_s, warp);
    fence_proxy_async();  // hazard: to_s written here, read by wgmma; from_s read here, written by TMA
    __syncwarp();         // hazard: one lane arrives for the warp
    if (issues) {
      mbarrier_arrive(read);
      mbarrier_arrive(full);
    }
  }
  // Loads the first landed_stages rounds at once. Then converts each tile, and loads another into its 8-bit
  // stage.
  __device__ __forceinline__ void run(int warp) {
    auto& to = s.split[0];
    auto& from = s.landed;
    constexpr int landed_stages = LandedTiles<B>::COUNT;
    const WgmmaItem<B> item = Base::find_item(item_index_of_cta<B>(a));
    griddepcontrol_wait();  // the preceding kernel has ended, and its writes are visible
    const auto load = [&](int role, int round) {
      if ((B::copies_rows || warp == 0) && round >= 0) Base::load_round(role, item, round, 0, from, from);
    };
    if (warp == 0) Base::start_item(item, nullptr, 0);
    Base::keys_in_next_v = item.keys_in_tile(first_key_of<B>(item, item.rounds - 1, 0));
    for (int n = 1; n <= landed_stages; n++, ring.advance()) load(load_k | load_v, item.rounds - n);
    for (int round = item.rounds - 1; round >= 0; round--, tile_ring.advance(), ring.advance()) {
      const int n = tile_ring.stage, at = ring.stage;
      convert_tile<B::head_dim>(to.K[n], &to.k_empty[n], &to.k_full[n], from.K[at], &from.k_full[at],
                                &from.k_empty[at], warp);
      load(load_k, round - landed_stages);
      convert_tile<B::d_v>(to.V[n], &to.v_empty[n], &to.v_full[n], from.V[at], &from.v_full[at], &from.v_empty[at],
                           warp);
      load(load_v, round - landed_stages);
    }
    if (stores_by_tma<B> && warp == 0 && issues) {
      Base::q_ring = {};
      Base::store_items();
    }
  }
};

template <class B> struct KernelOf<B, KernelKind::wgmma_converting> : KernelOf<B, KernelKind::wgmma_roles> {
  using Producer = WgmmaConverter<B>;
  using Registers = WgmmaRegisters<B, (B::head_dim > 128 ? 56 : 48), (B::head_dim > 64 ? 40 : 32)>;
};

// ---- 5l wgmma instructions of all shapes (wgmma) ----

#ifndef SDPA_SIMT

// SDPA_D<R>(F) expands to F(1) ... F(R - 1), for R accumulators; accumulator 0 is written without a comma.
#define SDPA_D4(F) F(1) F(2) F(3)
#define SDPA_D8(F) SDPA_D4(F) F(4) F(5) F(6) F(7)
#define SDPA_D16(F) SDPA_D8(F) F(8) F(9) F(10) F(11) F(12) F(13) F(14) F(15)
#define SDPA_D24(F) SDPA_D16(F) F(16) F(17) F(18) F(19) F(20) F(21) F(22) F(23)
#define SDPA_D32(F) SDPA_D24(F) F(24) F(25) F(26) F(27) F(28) F(29) F(30) F(31)
#define SDPA_D40(F) SDPA_D32(F) F(32) F(33) F(34) F(35) F(36) F(37) F(38) F(39)
#define SDPA_D48(F) SDPA_D40(F) F(40) F(41) F(42) F(43) F(44) F(45) F(46) F(47)
#define SDPA_D56(F) SDPA_D48(F) F(48) F(49) F(50) F(51) F(52) F(53) F(54) F(55)
#define SDPA_D64(F) SDPA_D56(F) F(56) F(57) F(58) F(59) F(60) F(61) F(62) F(63)
#define SDPA_D72(F) SDPA_D64(F) F(64) F(65) F(66) F(67) F(68) F(69) F(70) F(71)
#define SDPA_D80(F) SDPA_D72(F) F(72) F(73) F(74) F(75) F(76) F(77) F(78) F(79)
#define SDPA_D88(F) SDPA_D80(F) F(80) F(81) F(82) F(83) F(84) F(85) F(86) F(87)
#define SDPA_D96(F) SDPA_D88(F) F(88) F(89) F(90) F(91) F(92) F(93) F(94) F(95)
#define SDPA_D104(F) SDPA_D96(F) F(96) F(97) F(98) F(99) F(100) F(101) F(102) F(103)
#define SDPA_D112(F) SDPA_D104(F) F(104) F(105) F(106) F(107) F(108) F(109) F(110) F(111)
#define SDPA_D120(F) SDPA_D112(F) F(112) F(113) F(114) F(115) F(116) F(117) F(118) F(119)
#define SDPA_D128(F) SDPA_D120(F) F(120) F(121) F(122) F(123) F(124) F(125) F(126) F(127)
#define SDPA_D_TEXT(i) ", %" #i
#define SDPA_D_OPERAND(i) , "+f"(d[i])
// X(N, R, R + 1, ..., R + 6) for each N. A thread has R = N / 2 accumulators, the operands 0 ... R - 1 of the
// asm statement. Operand R is scale-d, R + 1 the descriptor of B, and R + 2 imm-trans-b. A begins at operand
// R + 3: four registers, or a descriptor followed by imm-trans-a.
// clang-format off
#define SDPA_WGMMA_SHAPES(X) \
  X(8, 4, 5, 6, 7, 8, 9, 10) X(16, 8, 9, 10, 11, 12, 13, 14) X(32, 16, 17, 18, 19, 20, 21, 22) \
  X(48, 24, 25, 26, 27, 28, 29, 30) X(64, 32, 33, 34, 35, 36, 37, 38) X(80, 40, 41, 42, 43, 44, 45, 46) \
  X(96, 48, 49, 50, 51, 52, 53, 54) X(112, 56, 57, 58, 59, 60, 61, 62) X(128, 64, 65, 66, 67, 68, 69, 70) \
  X(144, 72, 73, 74, 75, 76, 77, 78) X(160, 80, 81, 82, 83, 84, 85, 86) X(176, 88, 89, 90, 91, 92, 93, 94) \
  X(192, 96, 97, 98, 99, 100, 101, 102) X(208, 104, 105, 106, 107, 108, 109, 110) \
  X(224, 112, 113, 114, 115, 116, 117, 118) X(240, 120, 121, 122, 123, 124, 125, 126) \
  X(256, 128, 129, 130, 131, 132, 133, 134)
#define SDPA_WGMMA(types, n, r, r1, a_text, immediates, ...)                        \
  asm volatile(                                                                     \
      "{ .reg .pred p; setp.ne.b32 p, %" #r ", 0; "                                 \
      "wgmma.mma_async.sync.aligned.m64n" #n types                                  \
      " {%0" SDPA_D##r(SDPA_D_TEXT) "}, " a_text ", %" #r1 ", p, " immediates "; }" \
      : "+f"(d[0]) SDPA_D##r(SDPA_D_OPERAND)                                        \
      : "r"(int(accumulate)), "l"(b), "n"(TRANS_B), __VA_ARGS__)
#define SDPA_WGMMA_E(n, r, r1, a, transposes, ...)                                  \
  if constexpr (N == n && std::is_same_v<E, __half>) {                              \
    SDPA_WGMMA("k16.f32.f16.f16", n, r, r1, a, "1, 1, " transposes, __VA_ARGS__);   \
  } else if constexpr (N == n && std::is_same_v<E, __nv_bfloat16>) {                \
    SDPA_WGMMA("k16.f32.bf16.bf16", n, r, r1, a, "1, 1, " transposes, __VA_ARGS__); \
  } else if constexpr (N == n && std::is_same_v<E, __nv_fp8_e4m3>) {                \
    SDPA_WGMMA("k32.f32.e4m3.e4m3", n, r, r1, a, "1, 1", __VA_ARGS__);              \
  }
#define SDPA_WGMMA_SS(n, r, r1, r2, r3, r4, ...) SDPA_WGMMA_E(n, r, r1, "%" #r3, "%" #r4 ",%" #r2, "l"(a), "n"(TRANS_A))
#define SDPA_WGMMA_RS(n, r, r1, r2, r3, r4, r5, r6) \
  SDPA_WGMMA_E(n, r, r1, "{%" #r3 ",%" #r4 ",%" #r5 ",%" #r6 "}", "%" #r2, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]))
#define SDPA_WGMMA_HAS_N(n, ...) || N == n
// clang-format on

template <class E, int N, int TRANS_B, int TRANS_A>
__device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(false SDPA_WGMMA_SHAPES(SDPA_WGMMA_HAS_N), "SDPA_WGMMA_SHAPES lacks this number of columns");
  SDPA_WGMMA_SHAPES(SDPA_WGMMA_SS)
}
template <class E, int N, int TRANS_B>
__device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(false SDPA_WGMMA_SHAPES(SDPA_WGMMA_HAS_N), "SDPA_WGMMA_SHAPES lacks this number of columns");
  SDPA_WGMMA_SHAPES(SDPA_WGMMA_RS)
}

#endif  // SDPA_SIMT

// ==== 6 LAUNCH ===================================================================================

}  // namespace

struct SdpaStatus {
  cudaError_t code = cudaSuccess;  // cudaErrorInvalidValue: the problem was refused
  char text[256] = "";             // the reason in one sentence; empty on success
  bool ok() const { return code == cudaSuccess; }
};

namespace {

constexpr cudaError_t refused = cudaErrorInvalidValue;
[[gnu::format(printf, 2, 3)]] SdpaStatus failure(cudaError_t code, const char* format, ...) {
  SdpaStatus status;
  status.code = code;
  va_list values;
  va_start(values, format);
  vsnprintf(status.text, sizeof status.text, format, values);
  va_end(values);
  return status;
}
SdpaStatus cuda_failure(cudaError_t code, const char* what) {
  return failure(code, "%s failed: %s", what, cudaGetErrorString(code));
}

// True if the number of keys between the two limits of the mask may differ between sequences: the limits have
// different alignments, and the host does not know the lengths.
bool has_unknown_width(const SdpaParams& p) {
  const bool has_lengths = p.q_starts || p.q_lengths || p.k_starts || p.k_lengths || p.k_firsts;
  const bool has_both = p.causal != Causal::off && p.window_alignment != Causal::off;
  const bool is_aligned = !has_both || p.causal == p.window_alignment;
  return Defines::use_lengths && has_lengths && !is_aligned;
}
// Maximum number of keys between the two limits of the mask.
int most_width(const SdpaParams& p) {
  if (!has_unknown_width(p)) {
    const KeyBounds bounds(p, p.Sq, p.Sk);
    return bounds.to - bounds.from;
  }
  if (p.window_left < 0 || p.window_right < 0) return size_limit;
  return int(min(int64_t(p.window_left) + p.window_right + 1, int64_t(size_limit)));
}
// Maximum number of keys that a query of the problem sees.
int most_visible_keys(const SdpaParams& p) {
  const bool has_limit = Defines::use_lengths && p.most_keys > 0;
  const int end = has_limit ? min(p.most_keys, p.Sk) : KeyBounds(p, p.Sq, p.Sk).end(p.Sq - 1);
  return max(min(end, most_width(p)), 0);
}

// ---- tensors, the GPU and items ----

struct TensorView {  // Q, K, V or O
  const char* name;
  const void* data;
  int element_bytes, width;  // width: elements per row
  struct {
    const char* name;
    int size;
    int64_t& stride;
  } dims[3];
};

template <class T> TensorView view_of(const char* name, T* data, Strides& s, int B, int H, int S, int D) {
  return {name, data, sizeof(T), D, {{"row", S, s.row}, {"head", H, s.head}, {"batch", B, s.batch}}};
}
std::array<TensorView, 4> tensors_of(SdpaParams& p) {
  const int q_batches = batches_of(p, p.q_starts);
  const int k_batches = Defines::use_pages ? p.pages : batches_of(p, p.k_starts);
  const int rows = Defines::use_pages ? p.page_size : p.Sk;
  return {{view_of("Q", p.Q, p.q, q_batches, p.Hq, p.Sq, p.D),
           view_of("K", p.K, p.k, k_batches, p.Hkv, rows, p.D),
           view_of("V", p.V, p.v, k_batches, p.Hkv, rows, p.Dv),
           view_of("O", p.O, p.o, q_batches, p.Hq, p.Sq, p.Dv)}};
}

// The attribute of the current device. Without a device: that of an H200.
int device_attribute(cudaDeviceAttr attribute, int otherwise) {
  int device = 0, value = 0;
  const bool known = !cudaGetDevice(&device) && !cudaDeviceGetAttribute(&value, attribute, device);
  return known ? value : otherwise;
}
int sm_count() { return device_attribute(cudaDevAttrMultiProcessorCount, 132); }
// Shared memory of an SM. The system uses 1 KB of it per CTA.
int shared_of_sm() { return device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, 228 << 10); }
// Maximum number of resident CTAs per SM, as limited by shared memory.
template <class B> int most_resident_ctas() { return max(shared_of_sm() / int(shared_bytes<B> + 1024), 1); }

// Partition of a problem into items.
struct Items {
  int heads, queries;  // query heads per item, and queries per head
  int64_t count;       // number of items
  int ranges = 1;      // CTAs per item
};

// Estimated clocks of sdpa_merge(): 1000 for the launch, 2000 per group of ranges_at_once ranges, and the time
// to write and read the partials.
double merge_kernel_clocks(const Items& items, int D, int ranges, int sms) {
  const double bytes = double(items.count) * ranges * items.heads * items.queries * D * 8;
  return 1000 + 2000.0 * ceil_div(ranges, ranges_at_once) + bytes / sms / 40;
}

// Estimated number of steps of the merge by an item's last CTA. In a step, a thread waits for one batch of loads.
int64_t merge_steps(const Items& items, int D, int threads, int ranges) {
  if (ranges == 1) return 0;
  const int64_t vectors = ceil_div(items.heads * items.queries * (D / 4), threads);  // float4s of O per thread
  return ranges > few_ranges ? ceil_div(ranges, ranges_at_once) * vectors : ceil_div(ranges, 2) * ceil_div(vectors, 4);
}

// Throughput of a CTA that is alone on an SM, relative to the SM's throughput with two CTAs.
constexpr double sole_rate = 0.75;

// SPLIT_CTAS=0: the number of ranges with the least estimated time. The unit of time is the 50 clocks in
// which an SM reads 1 KB. The estimate, fitted to an H200, is the sum of the KB of an SM's rounds, 64 KB per
// wave of CTAs with `resident` CTAs per SM, and 24 KB per step of the merge by the last CTA. With
// sdpa_merge(), its time replaces the last term. No range exceeds most_keys_at_once keys, unless that would
// take more than 256 ranges or there are more items than counters.
int ranges_of(const SdpaParams& p, const Items& items, bool by_kernel, int round_keys, int threads, int resident,
              int sms) {
  const int64_t keys = max(most_visible_keys(p), 1);  // 64 bits, because the sizes may not have been checked yet
  const int rounds = int(ceil_div(keys, round_keys));
  const double round_kb = round_keys * p.D * sizeof(KeyValue) / 512.0;  // K and V
  if (p.batch_invariant) {
    const int tiles = ceil_div(p.Sq, items.queries), partials = sms / max(p.Hq / items.heads, 1);
    return ceil_div(rounds, invariant_rounds(rounds, round_keys, tiles, partials));
  }
  const int most = by_kernel || items.count <= most_split_items ? min(rounds, 256) : 1;
  int best = 0;
  double best_kb = 0;
  for (int n = min(int(ceil_div(keys, most_keys_at_once)), most); n <= most; n++) {
    const int64_t ctas = items.count * n;
    const double merge_kb = by_kernel ? merge_kernel_clocks(items, p.D, n, sms) / 50
                                      : 24.0 * merge_steps(items, p.D, threads, n);
    const double busy = by_kernel && resident > 1 && ctas <= sms ? 1 / sole_rate : ceil_div(ctas, sms);
    const double kb = round_kb * busy * ceil_div(rounds, n) + 64.0 * ceil_div(ctas, resident * sms) + merge_kb;
    if (best == 0 || kb < best_kb) {
      best = n;
      best_kb = kb;
    }
  }
  return best;
}

// batch_invariant: true if Sq depends on the batch. Then the number of queries in a packed tile must not depend on Sq.
bool sq_depends_on_batch(const SdpaParams& p) {
  return Defines::use_lengths && p.batch_invariant && (p.q_starts || p.q_lengths);
}

// Partition of a problem into items.
Items items_of_tile(const SdpaParams& p, int heads, int queries) {
  const int64_t head_groups = p.Hq / heads, tiles = ceil_div(p.Sq, queries);
  // q_starts: each sequence may end in a partial tile.
  return {heads, queries, head_groups * (Defines::use_lengths && p.q_starts ? p.B + tiles : p.B * tiles)};
}
// PACK_GQA: the number of query heads per item is the largest divisor of Hq / Hkv that is at most block_m.
Items items_of_packed_tile(const SdpaParams& p, int block_m) {
  const int group = p.Hkv > 0 ? max(p.Hq / p.Hkv, 1) : 1;
  int heads = min(group, block_m);
  while (group % heads) heads--;
  return items_of_tile(p, heads, min(block_m / heads, sq_depends_on_batch(p) ? block_m : max(p.Sq, 1)));
}

template <class B> Items items_of(const SdpaParams& p) {
  Items items = B::pack_gqa ? items_of_packed_tile(p, B::block_m) : items_of_tile(p, 1, B::block_m);
  if constexpr (B::use_lengths) return items;  // sdpa_plan() chooses the ranges
  if (B::split_ctas > 1) items.ranges = max(B::split_ctas, int(ceil_div(most_visible_keys(p), most_keys_at_once)));
  if (B::split_ctas == 0 && items.count > 0) {
    items.ranges = ranges_of(p, items, merges_by_kernel<B>, B::round_keys, B::num_warps * 32,
                             most_resident_ctas<B>(), sm_count());
  }
  return items;
}

// USE_LENGTHS: the sizes of the plan. It aims at four ranges per resident CTA, so that the last range takes
// at most a quarter of the time. It has room for twice as many partials, but at most most_split_items
// unless sdpa_merge() merges them. An explicit SPLIT_CTAS adds its partials if there is room.
template <class B> PlanArgs plan_args(const SdpaParams& p, const Items& items) {
  const uint32_t head_groups = uint32_t(max(p.Hq / items.heads, 1)), tiles = uint32_t(items.count / head_groups);
  PlanArgs plan{tiles, 0, 0, {}};
  const int page_size = max(p.page_size, 1), bits = page_size | B::block_n;
  plan.page_size = Divisor(uint32_t(page_size));
  plan.box_rows = bits & -bits;  // the largest power of 2 that divides both
  if (B::split_ctas == 1) return plan;
  // batch_invariant: balancing_partials counts those of one sequence, partials those of all sequences. The limit of
  // rounds per range is from least_limit to most_limit. Sequences of more than most_limit rounds may need more
  // than balancing_partials.
  if (p.batch_invariant) {
    plan.balancing_partials = max(sm_count() / int(head_groups), 1);
    const int keys = p.most_keys > 0 ? min(p.most_keys, p.Sk) : p.Sk;
    const int rounds = int(ceil_div(keys, B::round_keys));
    const int least_limit = invariant_rounds(1, B::round_keys, 1, 1), most_limit = rounds_at_once(B::round_keys);
    const auto all_partials = [&](int limit) {  // number of partials with this limit
      return uint64_t(tiles) * max(int(ceil_div(rounds, limit)), B::split_ctas);
    };
    uint64_t partials = all_partials(B::split_ctas > 1 ? most_limit : least_limit);
    if (B::split_ctas == 0) {
      const uint64_t long_partials = rounds > most_limit ? all_partials(most_limit) : 0;
      partials = rounds > least_limit ? min(partials, uint64_t(p.B) * plan.balancing_partials + long_partials) : 0;
    }
    plan.partials = uint32_t(min(partials, uint64_t(0x7fffffff)));
    plan.items += plan.partials;
    return plan;
  }
  const uint32_t most_partials = merges_by_kernel<B> ? 0x7fffffff : most_split_items / head_groups;
  const uint32_t resident = uint32_t(most_resident_ctas<B>() * sm_count());
  plan.balancing_partials = min(2 * ceil_div(4 * resident, head_groups), most_partials);
  const uint64_t requested = B::split_ctas > 1 ? uint64_t(B::split_ctas) * tiles : 0;
  const bool has_room = requested + plan.balancing_partials <= min(most_partials, most_split_items);
  plan.partials = plan.balancing_partials + (has_room ? uint32_t(requested) : 0);
  plan.items += plan.partials;
  return plan;
}

// Number of items per launch: all, or with sdpa_merge() those of 32 CTAs per SM. Their partials take up to
// 0.6 GB.
template <class B> int64_t items_per_launch(const Items& items) {
  if (!merges_by_kernel<B>) return items.count;
  return max(min(items.count, int64_t(32 * sm_count() / items.ranges)), int64_t(1));
}

// ---- tensor maps (wgmma) ----

// Encodes the tensor map of a tensor with elements of 1 or 2 bytes. sizes: innermost first. strides_bytes: of
// all dimensions but the innermost, multiples of 16. box: the box of one copy; its rows have 128 or 64 bytes
// and are swizzled. Elements out of bounds are zero-filled. The L2 promotion is 256 bytes, or 128 bytes for
// data that is read once, for which 256 bytes are 8% slower.
inline cudaError_t encode_tensor_map(CUtensorMap& map, int rank, const void* base, const cuuint64_t* sizes,
                                     const cuuint64_t* strides_bytes, const cuuint32_t* box, int element_bytes = 2,
                                     bool read_once = false) {
  thread_local void* encoder = nullptr;  // found by the runtime, so that programs need not link libcuda
  if (!encoder) {
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encoder, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &encoder, cudaEnableDefault, &found);
#endif
    if (error != cudaSuccess) return error;
    if (found != cudaDriverEntryPointSuccess || !encoder) return cudaErrorInsufficientDriver;
  }
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encoder)(
      &map, element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, cuuint32_t(rank),
      const_cast<void*>(base), sizes, strides_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      box[0] * element_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
      read_once ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Arguments of a tensor map for rows of a tensor. TMA copies boxes of these rows in panels of 128 or 64 bytes.
struct RowBoxes {
  cuuint64_t sizes[5], strides[4];  // innermost first; strides in bytes
  uint32_t box[5];
};
// Boxes of `rows` rows of D elements. present > 0: only the first `present` elements exist, and a box is one panel.
SdpaStatus boxes_of_rows(RowBoxes& boxes, const TensorView& t, int D, int present, int rows) {
  uint64_t bytes[3];
  for (int i = 0; i < 3; i++) {
    const auto& dim = t.dims[i];
    bytes[i] = dim.size > 1 ? uint64_t(dim.stride) * t.element_bytes : 16;
    if (dim.size > 1 && (dim.stride < 0 || bytes[i] >= uint64_t(1) << 40)) {
      return failure(refused, "%s has a %s stride of %lld; TMA takes 0 to 2^40 bytes: copy it or drop USE_WGMMA",
                     t.name, dim.name, (long long)dim.stride);
    }
  }
  const uint32_t row_bytes = ceil_div(D * t.element_bytes, 64) * 64, line = row_bytes % 128 ? 64 : 128;
  const uint32_t panel = line / t.element_bytes, panels = row_bytes / line;
  boxes = {{uint32_t(min(int(panel), D)), uint32_t(t.dims[0].size), panels, uint32_t(t.dims[1].size),
            uint32_t(t.dims[2].size)},
           {bytes[0], line, bytes[1], bytes[2]},
           {panel, uint32_t(rows), panels, 1, 1}};
  if (present > 0) {
    boxes.sizes[0] = uint32_t(present);
    boxes.sizes[2] = 1;
    boxes.box[2] = 1;
  }
  return {};
}
SdpaStatus encode_boxes(CUtensorMap& map, const TensorView& t, const RowBoxes& boxes, bool read_once = false) {
  const cudaError_t error =
      encode_tensor_map(map, 5, t.data, boxes.sizes, boxes.strides, boxes.box, t.element_bytes, read_once);
  if (error == cudaSuccess) return {};
  return failure(error, "the driver cannot encode a tensor map of %s: %s", t.name, cudaGetErrorString(error));
}

// True if two problems have the same tensor maps. These depend on the tensors, the rows of a packed tile, and whether
// k_starts and q_starts are null. Strides show q_starts: O has a batch stride of 0 only with q_starts or B = 1.
bool same_tensor_maps(const SdpaParams& a, const SdpaParams& b) {
  constexpr size_t sizes = offsetof(SdpaParams, B), end = offsetof(SdpaParams, scale);  // sizes and strides
  return a.Q == b.Q && a.K == b.K && a.V == b.V && a.O == b.O && a.page_size == b.page_size && a.pages == b.pages &&
         a.Dv == b.Dv && !a.k_starts == !b.k_starts && sq_depends_on_batch(a) == sq_depends_on_batch(b) &&
         memcmp(reinterpret_cast<const char*>(&a) + sizes, reinterpret_cast<const char*>(&b) + sizes, end - sizes) == 0;
}

// Encodes the tensor maps, or reuses those of this thread's last call if the tensors are the same.
template <class B> SdpaStatus encode_tensor_maps(TensorMaps& maps, KernelArgs& a) {
  SdpaParams& p = a.p;
  thread_local SdpaParams last{};
  thread_local TensorMaps last_maps;
  if (same_tensor_maps(last, p)) {
    maps = last_maps;
    return {};
  }
  const auto encode_rows = [&](CUtensorMap& map, const TensorView& t, int D, bool is_q, bool is_kv) {
    const bool by_panels = a.has_short_rows || (B::pack_gqa && is_q) || (B::use_pages != 0 && is_kv);
    RowBoxes boxes;
    const int rows = is_kv ? B::block_n : B::swap_ab ? B::block_m : 64;
    const SdpaStatus status = boxes_of_rows(boxes, t, D, by_panels ? t.width : 0, rows);
    if (!status.ok()) return status;
    if constexpr (B::use_pages != 0) {
      if (is_kv) boxes.box[1] = uint32_t(plan_sizes<B>(a).box_rows);
    }
    if (B::pack_gqa && is_q) {  // the heads of an item are rows of its panels
      boxes.sizes[2] = boxes.sizes[3];
      boxes.sizes[3] = 1;
      boxes.strides[1] = boxes.strides[2];
      boxes.box[1] = a.item_queries.divisor;
      boxes.box[2] = uint32_t(a.item_heads);
    }
    return encode_boxes(map, t, boxes, reads_kv_once<B>);
  };
  const std::array<TensorView, 4> tensors = tensors_of(p);  // Q, K, V, O
  SdpaStatus status = encode_rows(maps.q, tensors[0], B::head_dim, true, false);
  if (B::copies_rows || tensors[1].dims[0].size == 0) {  // TMA copies no K and V, but the maps are prefetched
    maps.k = maps.v = maps.q;
  } else {
    if (status.ok()) status = encode_rows(maps.k, tensors[1], B::head_dim, false, true);
    if (status.ok()) status = encode_rows(maps.v, tensors[2], B::d_v, false, true);
  }
  if constexpr (stores_by_tma<B>) {
    if (status.ok()) status = encode_rows(maps.o, tensors[3], B::d_v, false, false);
  }
  if (!status.ok()) return status;
  last = p;
  last_maps = maps;
  return {};
}

// ---- the launch ----

// SPLIT_CTAS: dynamic shared memory per CTA. CTAs that are launched early (PDL) go to whichever SMs have room,
// so that some SMs get three CTAs and others one. Requesting more shared memory limits each SM to an even share
// of the CTAs. It also leaves less room for other kernels.
size_t even_share(size_t bytes, uint32_t ctas) {
  const int share = int(ceil_div(ctas, sm_count()));
  return max(int(bytes), shared_of_sm() / share / 1024 * 1024 - 1024);
}

// Raises the kernel's limit of dynamic shared memory to `bytes`.
template <class Kernel> SdpaStatus allow_shared_bytes(Kernel kernel, size_t bytes) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  if (error == cudaErrorInvalidValue || error == cudaErrorInvalidDeviceFunction ||
      error == cudaErrorNoKernelImageForDevice) {
    const char* const why = cudaGetErrorString(error);
    return failure(error, "this GPU cannot run this build (%zu bytes of shared memory per CTA): %s", bytes, why);
  }
  return error == cudaSuccess ? SdpaStatus{} : cuda_failure(error, "preparing the launch, or earlier work of "
                                                                   "this process,");
}

// Enqueues a kernel. early: it may start before the preceding kernel in the stream has ended (programmatic
// dependent launch), and waits for that kernel before it accesses memory. It lets the next kernel with this
// attribute start early, too. That kernel must call cudaGridDependencySynchronize() before it reads O or
// writes an input.
template <class Args>
SdpaStatus enqueue(void (*kernel)(Args), const Args& a, uint32_t ctas, int threads, size_t shared, bool early,
                   cudaStream_t stream, const char* what) {
  cudaLaunchConfig_t launch{dim3(ctas), dim3(threads), shared, stream, nullptr, 0};
  cudaLaunchAttribute attribute{};
  if (early) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    launch.attrs = &attribute;
    launch.numAttrs = 1;
  }
  const cudaError_t error = cudaLaunchKernelEx(&launch, kernel, a);
  return error == cudaSuccess ? SdpaStatus{} : cuda_failure(error, what);
}

// Launches the kernel with one CTA per item. SPLIT_CTAS: with one per range of an item. USE_PERSISTENT_CTA: launches at
// most the CTAs that are resident, and at most max_ctas.
template <class B> SdpaStatus launch_kernel(const KernelArgs& a, uint32_t items, cudaStream_t stream) {
  uint32_t ctas = items * (B::split_ctas == 1 ? 1 : a.ranges.divisor);
  static_assert(shared_bytes<B> <= 227 * 1024,
                "BLOCK_M, BLOCK_N, STAGES: more than 227 KB of shared memory per CTA; type a smaller BLOCK_N or "
                "STAGES");
  constexpr auto entry = KernelOf<B>::entry;
  size_t bytes = shared_bytes<B>, most = bytes;
  // Other host threads share the kernel's attribute, so it is set to the maximum that any launch requests.
  if (B::is_wgmma && B::split_ctas != 1) {
    most = even_share(bytes, 1);
    bytes = even_share(bytes, ctas);
  }
  SdpaStatus status = allow_shared_bytes(entry, most);
  if (!status.ok()) return status;
  if (B::use_persistent_cta) {
    int ctas_per_sm = 0;
    const cudaError_t error =
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas_per_sm, entry, B::threads, shared_bytes<B>);
    if (error != cudaSuccess) return cuda_failure(error, "querying the occupancy");
    const uint32_t resident = uint32_t(sm_count()) * uint32_t(max(ctas_per_sm, 1)), asked = uint32_t(a.p.max_ctas);
    ctas = min(ctas, asked > 0 ? min(asked, resident) : resident);
  }
  constexpr bool early = B::is_wgmma;
  if constexpr (B::use_lengths) {
    status = enqueue(sdpa_plan<B>, a, 1, plan_threads, sizeof(PlanShared), early, stream, "launching the plan");
    if (!status.ok()) return status;
  }
  status = enqueue(entry, a, ctas, B::threads, bytes, early, stream, "launching the kernel");
  if constexpr (merges_by_kernel<B>) {
    uint32_t merging = items * merge_ctas<B>;
    if (B::use_lengths) merging = min(merging, 8 * uint32_t(sm_count()));
    if (status.ok()) status = enqueue(sdpa_merge<B>, a, merging, merge_threads, 0, early, stream, "launching the merge");
  }
  return status;
}

float scale_log2_of(const SdpaParams& p) {  // scale * log2(e). DTYPE=U8: times the units of Q and K
  const double unit = 1.4426950408889634 * element_unit<Defines> * element_unit<Defines>;
  return float((p.scale == 0 ? 1 / std::sqrt(double(p.D)) : double(p.scale)) * unit);
}

// ---- the score hook: its constants ----

// Sets the scales of KernelArgs. Softcap: a hook_scale of 0 turns it off.
template <class B> void set_scales(KernelArgs& a) {
  a.scale_log2 = scale_log2_of(a.p);
  if (B::use_softcap != 0 && a.p.softcap != 0) {
    a.hook_scale = std::fmin(std::fmax(a.scale_log2 * ln2 / a.p.softcap, 1.2e-38f), 3.4e38f);
    a.scale_log2 = a.p.softcap / ln2;
    if constexpr (B::caps_by_polynomial) set_cap_polynomial(a);
  }
  a.score_scale_log2 = a.scale_log2;
  if (B::changes_logits) {
    a.hook_scale = a.scale_log2 * ln2;
    a.scale_log2 = 1 / ln2;
  }
  // Without a bias, S holds scores instead of logits, since the product with the scale would add a rounding error.
  if (B::adds_bias && a.p.bias) {
    a.logit_scale = a.scale_log2 * ln2;
    a.scale_log2 = 1 / ln2;
  }
  a.inverse_scale_log2 = 1 / a.scale_log2;
}

// ---- the grid ----

template <class B> Grid grid_of(const SdpaParams& p, const Items& items) {
  Grid grid;
  const uint32_t q_blocks = uint32_t(ceil_div(p.Sq, items.queries));
  grid.work_items = uint32_t(items.count);
  grid.q_blocks = Divisor(q_blocks);
  grid.q_heads = Divisor(uint32_t(p.Hq / items.heads));
  grid.q_heads_per_kv = Divisor(uint32_t(p.Hq / p.Hkv));
  grid.item_queries = Divisor(uint32_t(items.queries));
  grid.item_heads = items.heads;
  if (B::split_ctas != 1) grid.ranges = Divisor(uint32_t(items.ranges));
  const bool all = KeyBounds(p, p.Sq, p.Sk).all() && !B::use_lengths;
  grid.unmasked_rounds = all ? max(int(ceil_div(p.Sk, B::round_keys)), 1) : 0;
  const double kv_bytes = 2.0 * p.Sk * p.D * sizeof(KeyValue);  // K and V of one KV head
  const double l2_bytes = device_attribute(cudaDevAttrL2CacheSize, 60 << 20);
  // The heads are divided into sections of equal size, whose K and V take at most about 32 of 60 MB of L2.
  const double kv_heads = double(p.B) * p.Hkv, sections = std::ceil(kv_heads * kv_bytes / (l2_bytes * 8 / 15));
  const double heads = std::fmax(1, std::ceil(kv_heads / std::fmax(sections, 1)) * (p.Hq / p.Hkv / items.heads));
  grid.heads_in_l2 = uint32_t(std::fmin(heads, size_limit));  // clamped only with USE_LENGTHS, which ignores it
  grid.items_in_l2 = Divisor(uint32_t(std::fmin(double(grid.heads_in_l2) * q_blocks, 0x7fffffff)));
  return grid;
}

// True if the tensor cores accumulate O over all keys of a row. Then a query may see at most most_keys_at_once keys.
// SWAP_AB, and e4m3 with wgmma, add the products of tiles on the FMA pipes; FP8_FLUSH=0 does not, but is not
// limited. SPLIT_CTAS splits the keys into ranges.
template <class B>
constexpr bool limits_keys =
    B::split_ctas == 1 && (B::kernel == KernelKind::mma || B::use_wmma_pv ||
                           (B::is_wgmma && !B::swap_ab && B::product_type != DType::e4m3));

// ---- the map of visible rounds (USE_BIAS = 1..3, MASK_MOD) ----

// True if the launch may have a map, that is, lists of visible rounds.
template <class B> bool may_have_map(const SdpaParams& p) {
  return lists_from_map<B> && (B::hides_keys || p.bias);
}
// True if the mask may depend on the argument `name` of MASK_MOD: MASK_MOD names it, or another knob hides keys.
template <class B> constexpr bool mask_depends_on(std::string_view name) {
  return B::mask_knobs > B::mask_mod || contains_word(name, MASK_MOD_text);
}
// True if the map has different lists for different heads.
template <class B> bool differs_by_head(const SdpaParams& p) {
  return B::hides_keys ? mask_depends_on<B>("h") : p.bias_strides.head != 0;
}
// True if the map has different lists for different batches.
template <class B> bool differs_by_batch(const SdpaParams& p) {
  return B::hides_keys ? mask_depends_on<B>("b") : p.bias_strides.batch != 0;
}
// Hash of everything that the lists of a map depend on, except for the contents of the bias and of the arrays
// that MASK_MOD names. Maps that differ in a single number have different hashes.
template <class B> uint64_t hash_of_map(const BiasMap& map, const SdpaParams& p, const Items& items) {
  const KeyBounds keys(p, p.Sq, p.Sk);
  const int64_t numbers[] = {B::block_m, B::round_keys, skips_empty_warpgroups<B>, items.heads, items.queries, p.Sq, p.Sk,
                             map.batches.divisor, map.heads.divisor, p.bias_keys, keys.from, keys.to};
  uint64_t hash = 0;
  const auto add = [&](int64_t number) {
    hash = (hash ^ uint64_t(number)) * 0x9e3779b97f4a7c15;
    hash ^= hash >> 32;
  };
  for (const int64_t number : numbers) add(number);
  if constexpr (B::hides_keys) {
    for (const char c : std::string_view(MASK_MOD_text)) add(c);
  }
  return hash;
}
// The sizes and the hash of the problem's map. `lists` is still null.
template <class B> BiasMap bias_map_of(const SdpaParams& p, const Items& items) {
  BiasMap map;
  map.heads = Divisor(differs_by_head<B>(p) ? uint32_t(p.Hq / items.heads) : 1);
  map.batches = Divisor(differs_by_batch<B>(p) ? uint32_t(p.B) : 1);
  map.list_words = 1 + max(int(ceil_div(p.Sk, B::round_keys)), 1);
  map.made_for = hash_of_map<B>(map, p, items);
  return map;
}
template <class B> size_t bias_map_bytes(const SdpaParams& p) {
  if (!may_have_map<B>(p)) return 0;
  const Items items = items_of<B>(p);
  const BiasMap map = bias_map_of<B>(p, items);
  const size_t lists = size_t(map.batches.divisor) * map.heads.divisor * ceil_div(p.Sq, items.queries);
  return sizeof(map.made_for) + sizeof(uint32_t) * map.list_words * lists;
}
// True if a launch without bias_map makes a map itself: all heads share it, and there are enough rounds to skip.
template <class B> bool makes_map(const SdpaParams& p) {
  return may_have_map<B>(p) && !p.bias_map && !differs_by_head<B>(p) &&
         (p.bias_keys > 0 ? p.bias_keys : p.Sk) >= 16 * B::round_keys;
}
// Refuses a bias_map whose size differs from that of the problem's map.
template <class B> SdpaStatus check_bias_map(const SdpaParams& p) {
  const size_t bytes = bias_map_bytes<B>(p);
  if (p.bias_map_bytes == bytes && (p.bias_map || bytes == 0)) return {};
  return failure(refused, "bias_map has %zu bytes, but the map of this problem has %zu; call sdpa_bias_map_bytes()",
                 p.bias_map ? p.bias_map_bytes : 0, bytes);
}
// Sets the map at `at` as the map of the launch. makes: first enqueues the kernel that writes it.
template <class B>
SdpaStatus set_bias_map(KernelArgs& a, const Items& items, void* at, bool makes, cudaStream_t stream) {
  a.bias_map = bias_map_of<B>(a.p, items);
  a.bias_map.lists = reinterpret_cast<uint32_t*>(static_cast<uint64_t*>(at) + 1);
  a.unmasked_rounds = 0;  // the number of rounds differs between items
  if constexpr (lists_from_map<B>) {
    const uint32_t lists = a.bias_map.heads.divisor * a.bias_map.batches.divisor * a.q_blocks.divisor;
    if (makes) return enqueue(sdpa_map<B>, a, lists, map_threads, 0, true, stream, "launching the map");
  }
  return {};
}
// Sets the map of a launch: the caller's, or one that the launch makes in scratch memory, or none.
template <class B> SdpaStatus take_bias_map(KernelArgs& a, const Items& items, cudaStream_t stream) {
  if (a.p.bias_map || a.p.bias_map_bytes > 0) {
    const SdpaStatus status = check_bias_map<B>(a.p);
    return status.ok() && a.p.bias_map_bytes > 0 ? set_bias_map<B>(a, items, a.p.bias_map, false, stream) : status;
  }
  if (!lists_from_map<B> || !makes_map<B>(a.p)) return {};
  return set_bias_map<B>(a, items, a.p.scratch, true, stream);
}
template <class B> SdpaStatus map_bias(const SdpaParams& p, cudaStream_t stream) {
  const SdpaStatus status = check_bias_map<B>(p);
  if (!status.ok() || p.bias_map_bytes == 0) return status;
  const Items items = items_of<B>(p);
  KernelArgs a(p, B::block_m, B::block_n, grid_of<B>(p, items));
  return set_bias_map<B>(a, items, p.bias_map, true, stream);
}

// ---- the launch of a build ----

// The memory of a launch in bytes. state: the queue, or a counter per item with several ranges. The state is
// zero before and after each launch. scratch: the plan, the partials or the map, which the launch writes before
// it reads them.
struct LaunchMemory { size_t state, scratch; };
template <class B> constexpr bool has_scratch = B::use_lengths || B::split_ctas != 1 || lists_from_map<B>;
template <class B> constexpr size_t queue_bytes() { return B::use_persistent_cta ? sizeof(uint32_t) : 0; }
template <class B> LaunchMemory memory_of(const SdpaParams& p) {
  if (!has_scratch<B>) return {queue_bytes<B>(), 0};
  if (lists_from_map<B>) return {queue_bytes<B>(), makes_map<B>(p) ? bias_map_bytes<B>(p) : 0};
  const Items items = items_of<B>(p);
  if constexpr (B::use_lengths) {
    const PlanArgs plan = plan_args<B>(p, items);
    const size_t partials = size_t(plan.partials) * (p.Hq / items.heads);
    const size_t counters = counts_ranges<B> ? partials / 2 : 0;
    return {0, plan_bytes(plan) + partials * sizeof(RangePartial<B>) + counters * sizeof(uint32_t)};
  }
  if (items.ranges == 1 && counts_ranges<B>) return {0, 0};
  const size_t counters = counts_ranges<B> ? size_t(min(items.count, int64_t(most_split_items))) : 0;
  // size_t: the product may wrap around for sizes that cannot be allocated anyway.
  const size_t partials = size_t(items_per_launch<B>(items)) * size_t(items.ranges);
  return {counters * sizeof(uint32_t), partials * sizeof(RangePartial<B>)};
}
template <class B> size_t scratch_bytes(const SdpaParams& p) { return has_scratch<B> ? memory_of<B>(p).scratch : 0; }
// Offset of the scratch memory if it is part of the workspace: the maximum size of the state, so that no launch
// overwrites the state of another.
constexpr size_t most_state_bytes = Defines::use_lengths ? 0 : most_split_items * sizeof(uint32_t);
template <class B> size_t workspace_bytes(const SdpaParams& p) {
  if (!has_scratch<B>) return queue_bytes<B>();
  const LaunchMemory memory = memory_of<B>(p);
  if (p.scratch || memory.scratch == 0) return memory.state;
  return most_state_bytes + memory.scratch;
}

template <class B> SdpaStatus forward(const SdpaParams& p, cudaStream_t stream) {
  if (!p.workspace && workspace_bytes<B>(p) > 0) {
    return failure(refused, "workspace is null, but this problem needs %zu zeroed bytes", workspace_bytes<B>(p));
  }
  const Items items = items_of<B>(p);
  constexpr int most = 2147483647;  // maximum number of CTAs of a grid
  if (double(items.count) * items.ranges > most) {
    return failure(refused, "B*Hq*ceil(Sq/%d) is over %d tiles; split the batch", items.queries, most);
  }
  if (limits_keys<B> && most_visible_keys(p) > most_keys_at_once) {
    return failure(refused,
                   "a query sees %d keys, but this build takes at most %d; type SPLIT_CTAS=0 or pass most_keys",
                   most_visible_keys(p), most_keys_at_once);
  }
  if (B::split_ctas != 1 && !merges_by_kernel<B> && items.ranges > 1 && items.count > most_split_items) {
    return failure(refused, "SPLIT_CTAS=%d takes at most %u tiles, but this problem has %lld; split the batch",
                   B::split_ctas, most_split_items, (long long)items.count);
  }
  KernelArgs a(p, B::pack_gqa ? items.queries : mask_rows<B>, B::block_n, grid_of<B>(p, items));
  if (has_scratch<B> && !p.scratch && p.workspace) a.p.scratch = static_cast<char*>(p.workspace) + most_state_bytes;
  set_scales<B>(a);
  if constexpr (B::use_lengths) {
    const PlanArgs plan = plan_args<B>(p, items);
    const uint64_t head_groups = p.Hq / items.heads;
    if (plan.items * head_groups > most) return failure(refused, "the plan has over %d tiles; split the batch", most);
    if (!merges_by_kernel<B> && plan.partials * head_groups > most_split_items) {
      return failure(refused, "batch_invariant: %llu ranges of keys exceed the limit of %u; split the batch or "
                              "pass most_keys",
                     (unsigned long long)(plan.partials * head_groups), most_split_items);
    }
    [&](auto& args) { args.plan = plan; }(a);  // generic, since other builds have no plan
    a.work_items = uint32_t(plan.items * head_groups);
  }
  if constexpr (B::is_wgmma) {
    const SdpaStatus status = encode_tensor_maps<B>(a.maps, a);
    if (!status.ok()) return status;
  }
  if constexpr (B::takes_map) {
    const SdpaStatus status = take_bias_map<B>(a, items, stream);
    if (!status.ok()) return status;
  }
  if constexpr (merges_by_kernel<B> && !B::use_lengths) {
    const int64_t per_launch = items_per_launch<B>(items);
    SdpaStatus status;
    for (int64_t first = 0; first < items.count && status.ok(); first += per_launch) {
      a.first_item = uint32_t(first);
      status = launch_kernel<B>(a, uint32_t(min(per_launch, items.count - first)), stream);
    }
    return status;
  }
  return launch_kernel<B>(a, a.work_items, stream);
}

// ---- the checks ----

// Refuses strides of an output with which rows overlap: those below the row's width.
SdpaStatus check_overlap(const TensorView& t) {
  for (const auto& dim : t.dims) {
    if (dim.size > 1 && dim.stride > -t.width && dim.stride < t.width) {
      return failure(refused, "%s has a %s stride of %lld: its rows of %d elements would overlap", t.name, dim.name,
                     (long long)dim.stride, t.width);
    }
  }
  return {};
}
// Checks pointer, alignment and strides. As in PyTorch, the stride of a dimension of size 1 may have any value;
// it is set to 0, so that no address depends on it.
SdpaStatus check_tensor(const TensorView& t, bool is_output) {
  const int vec = min(Defines::vec_width, 16 / t.element_bytes), alignment = vec * t.element_bytes;
  const bool has_rows = t.dims[0].size > 0;
  if (has_rows && !t.data) return failure(refused, "%s is a null pointer", t.name);
  if (has_rows && reinterpret_cast<uintptr_t>(t.data) % alignment) {
    return failure(refused,
                   Defines::use_wgmma ? "%s is not aligned to %d bytes; align it"
                                      : "%s is not aligned to %d bytes; align it or lower VEC_WIDTH",
                   t.name, alignment);
  }
  for (const auto& dim : t.dims) {
    if (dim.size <= 1) dim.stride = 0;
    if (has_rows && dim.stride % vec) {
      return failure(refused,
                     Defines::use_wgmma ? "%s has a %s stride of %lld; pad it to a multiple of %d"
                                        : "%s has a %s stride of %lld; pad it to a multiple of %d or lower VEC_WIDTH",
                     t.name, dim.name, (long long)dim.stride, vec);
    }
  }
  return is_output ? check_overlap(t) : SdpaStatus{};
}
SdpaStatus check_tensors(SdpaParams& p) {
  for (const TensorView& t : tensors_of(p)) {
    const SdpaStatus status = check_tensor(t, *t.name == 'O');
    if (!status.ok()) return status;
  }
  return {};
}

// Checks that all sizes are within their limits, so that no later sum overflows. Sets Dv if it is 0.
SdpaStatus check_sizes(SdpaParams& p) {
  const struct {
    const char* name;
    int value, least = 0, most = size_limit;
  } numbers[] = {{"B", p.B}, {"Hq", p.Hq}, {"Hkv", p.Hkv}, {"Sq", p.Sq}, {"Sk", p.Sk}, {"max_ctas", p.max_ctas},
                 {"window_left", p.window_left, -1}, {"window_right", p.window_right, -1},
                 {"causal", int(p.causal), 0, 2}, {"window_alignment", int(p.window_alignment), 0, 2},
                 {"bias_keys", p.bias_keys, 0, Defines::use_lengths ? size_limit : p.Sk},
                 {"most_keys", p.most_keys}, {"batch_invariant", p.batch_invariant, 0, 1}};
  for (const auto& x : numbers) {
    if (x.value >= x.least && x.value <= x.most) continue;
    return failure(refused, "%s=%d is outside [%d, %d]", x.name, x.value, x.least, x.most);
  }
  if (double(p.B) * p.Hq * p.Sq > 1e16) return failure(refused, "B*Hq*Sq is over 10^16 rows; split the batch");
  if (p.Dv == 0) p.Dv = p.D;
  constexpr int D = Defines::head_dim, Dv = Defines::d_v;
  const auto fits = [](int size, int most) { return size > 0 && size <= most && size % Defines::vec_width == 0; };
  if (Defines::is_wgmma ? !fits(p.D, D) || !fits(p.Dv, Dv) : p.D != D || p.Dv != Dv) {
    return failure(refused,
                   Defines::is_wgmma
                       ? "D=%d, Dv=%d: this build takes 1 to %d and 1 to %d, in multiples of VEC_WIDTH"
                       : "D=%d, Dv=%d: this build takes D=%d, Dv=%d",
                   p.D, p.Dv, D, Dv);
  }
  if (p.Hq && (p.Hkv == 0 || p.Hq % p.Hkv)) return failure(refused, "Hq=%d is not a multiple of Hkv=%d", p.Hq, p.Hkv);
  return {};
}

// Refuses options that this build does not support, and pointers that are not aligned.
SdpaStatus check_options(const SdpaParams& p) {
  const char* needs_8bit_q = Defines::q_bytes == 1 ? "" : "an 8-bit DTYPE";
  const char *needs_8bit = Defines::kv_bytes == 1 ? "" : "an 8-bit DTYPE or KV_DTYPE",
             *needs_cap = Defines::use_softcap ? "" : "USE_SOFTCAP";
  const char *needs_lengths = Defines::use_lengths ? "" : "USE_LENGTHS=1",
             *needs_pages = Defines::use_pages ? "" : "USE_PAGES=1";
  const char* needs_firsts = !Defines::use_lengths     ? "USE_LENGTHS=1"
                          : Defines::use_pages == 1 ? "USE_PAGES=2"
                                                    : "";
  const char* needs_queue = Defines::use_persistent_cta ? "" : "USE_PERSISTENT_CTA=1";
  const char* needs_mods = Defines::modifies_scores ? "" : "SCORE_MOD or MASK_MOD";
  const struct {
    const char *name, *needs;  // needs: the knobs that support it; empty if this build does
    uintptr_t value;
    int alignment = 4;
  } options[] = {
      {"q_descale", needs_8bit_q, uintptr_t(p.q_descale.factor)},
      {"q_starts", needs_lengths, uintptr_t(p.q_starts)},
      {"k_descale", needs_8bit, uintptr_t(p.k_descale.factor)},
      {"k_starts", needs_lengths, uintptr_t(p.k_starts)},
      {"v_descale", needs_8bit, uintptr_t(p.v_descale.factor)},
      {"workspace", "", uintptr_t(p.workspace), 256},
      {"scratch", "", uintptr_t(p.scratch), 256},
      {"k_lengths", needs_lengths, uintptr_t(p.k_lengths)},
      {"page_table", needs_pages, uintptr_t(p.page_table)},
      {"sinks", Defines::use_sinks ? "" : "USE_SINKS=1", uintptr_t(p.sinks)},
      {"LSE", "", uintptr_t(p.LSE)},
      {"max_ctas", needs_queue, uintptr_t(p.max_ctas), 1},
      {"softcap", needs_cap, p.softcap != 0, 1},
      {"bias", Defines::use_bias ? "" : "USE_BIAS", uintptr_t(p.bias), int(sizeof(Bias))},
      {"bias_map", Defines::takes_map ? "" : "USE_BIAS=1, 2, 3 or MASK_MOD", uintptr_t(p.bias_map), 8},
      {"bias_map_bytes", Defines::takes_map ? "" : "USE_BIAS=1, 2, 3 or MASK_MOD", uintptr_t(p.bias_map_bytes), 1},
      {"bias_keys", Defines::use_bias && !Defines::key_bias ? "" : "USE_BIAS=1, 2, 3", uintptr_t(p.bias_keys), 1},
      {"page_stride", needs_pages, uintptr_t(p.page_stride), 1},
      {"page_size", needs_pages, uintptr_t(p.page_size), 1},
      {"pages", needs_pages, uintptr_t(p.pages), 1},
      {"x0", needs_mods, uintptr_t(p.x0)},
      {"x1", needs_mods, uintptr_t(p.x1)},
      {"x2", needs_mods, uintptr_t(p.x2)},
      {"x3", needs_mods, uintptr_t(p.x3)},
      {"i0", needs_mods, uintptr_t(p.i0)},
      {"i1", needs_mods, uintptr_t(p.i1)},
      {"key_mask", Defines::use_key_mask ? "" : "USE_KEY_MASK=1", uintptr_t(p.key_mask), 1},
      {"key_mask_stride", Defines::use_key_mask ? "" : "USE_KEY_MASK=1", uintptr_t(p.key_mask_stride), 1},
      {"q_lengths", needs_lengths, uintptr_t(p.q_lengths)},
      {"k_firsts", needs_firsts, uintptr_t(p.k_firsts)},
      {"most_keys", needs_lengths, uintptr_t(p.most_keys), 1}};
  for (const auto& x : options) {
    if (x.value && *x.needs) return failure(refused, "%s is for builds with %s; set it to 0", x.name, x.needs);
    if (x.value % x.alignment) return failure(refused, "%s is not aligned to %d bytes", x.name, x.alignment);
    if constexpr (Defines::modifies_scores) {
      const bool is_array = x.name[1] >= '0' && x.name[1] <= '9';  // x0 to x3, i0, i1
      if (is_array && !x.value != !mods_contain(x.name)) {
        return failure(refused, x.value ? "%s is set, but neither SCORE_MOD nor MASK_MOD names it"
                                        : "%s is a null pointer, but SCORE_MOD or MASK_MOD names it", x.name);
      }
    }
  }
  return {};
}

SdpaStatus check_params(SdpaParams& p) {
  const SdpaStatus sizes = check_sizes(p);
  if (!sizes.ok()) return sizes;
  if (!(p.scale >= 0 && scale_log2_of(p) < INFINITY)) {
    return failure(refused, "scale=%g: must be 0 or more, below 10^38", double(p.scale));
  }
  if (p.softcap != 0 && !(p.softcap >= 1e-18 && p.softcap <= 1e18)) {
    return failure(refused, "softcap=%g: must be 0, or 1e-18 to 1e18", double(p.softcap));
  }
  const SdpaStatus options = check_options(p);
  if (!options.ok()) return options;
  if (Defines::key_bias && p.bias && ((p.bias_strides.head && p.Hq > 1) || (p.bias_strides.row && p.Sq > 1))) {
    return failure(refused, "bias_strides: this build takes a bias that all heads and queries of a batch share; set head and "
                            "row to 0, or build with USE_BIAS=%d", Defines::use_bias == 4 ? 1 : 3);
  }
  if (Defines::takes_map && p.bias_map_bytes > 0 && !p.bias_map) {
    return failure(refused, "bias_map_bytes is %zu, but bias_map is null; set both or neither", p.bias_map_bytes);
  }
  if (Defines::use_pages != 0 && (!p.page_table || p.k_starts || p.page_size <= 0 || p.pages <= 0 ||
                                  p.page_stride < 0 || (Defines::use_pages == 1 && p.page_size % 16))) {
    return failure(
        refused,
        "page_size=%d, pages=%d, page_stride=%d: this build takes K and V in pages of %s, with a page_table "
        "and no k_starts",
        p.page_size, p.pages, p.page_stride,
        Defines::use_pages == 1 ? "a multiple of 16 keys (USE_PAGES=2: of 1 or more)" : "1 key or more");
  }
  return p.B && p.Hq && p.Sq ? check_tensors(p) : SdpaStatus{};
}

// ==== 7 TABLES ===================================================================================

// ---- refusals (typed) ----
// To add a variant, add a line to configs.txt. To add a knob, add a row to SDPA_KNOBS with the families that
// support it, its refusals below, and one function that it selects. If only few kernels support it, the
// function belongs to the options of section 5. A knob selects functions and types; no #if cuts a kernel.
// The title of a section may end in families or knobs, as in (wmma, USE_CP_ASYNC, USE_BIAS = 1..3): other builds do
// not need the section. Sections marked (typed) process the knobs as set with -D; in an extract, knobs are
// constants. tools/extract.py removes sections by these words.
//
// Each refusal of a knob without effect or of an impossible combination says what is refused, why, and what to type.

#define SDPA_REFUSE(condition, sentence) static_assert(!(condition), sentence)
constexpr const char* family_name = Defines::is_wgmma                     ? "wgmma"
                                    : Defines::kernel == KernelKind::mma  ? "mma"
                                    : Defines::kernel == KernelKind::wmma ? "wmma"
                                                                        : "scalar";
constexpr bool is_one_of(std::string_view value, std::string_view values) {  // "a b c" or "low..high"
  if (values == expressions) return !value.empty() && value != "1";  // -DKNOB without a value defines KNOB as 1
  const size_t dots = values.find("..");
  if (dots == values.npos) return index_of(value, values) >= 0;
  const int n = value_of(value);
  return n >= value_of(values.substr(0, dots)) && n <= value_of(values.substr(dots + 2));
}
#define SDPA_LEGAL(name, fallback, member, values, families, meaning) \
  SDPA_NEW_LINE                                                       \
  SDPA_REFUSE(!is_one_of(name##_text, values),                        \
              #name ": not a legal value; it takes one of: " values " (default " #fallback ")");
SDPA_KNOBS(SDPA_LEGAL)
#define SDPA_FAMILIES(name, fallback, member, values, families, meaning)                                      \
  SDPA_NEW_LINE                                                                                               \
  SDPA_REFUSE(name##_changed && std::string_view(families) != "all" && !is_one_of(family_name, families),     \
              #name ": only kernels of these families have it: " families "; drop it or select one of them ("      \
                    "scalar: without USE_WMMA=1, USE_MMA_SYNC=1 and USE_WGMMA=1)");
SDPA_KNOBS(SDPA_FAMILIES)
SDPA_REFUSE(USE_WMMA_changed + USE_MMA_SYNC_changed + USE_WGMMA_changed > 1,
            "USE_WMMA=1, USE_MMA_SYNC=1 and USE_WGMMA=1: a build has one kernel family; keep one of them");
SDPA_REFUSE(Defines::kv_dtype != 0 && Defines::q_bytes == 1,
            "KV_DTYPE=FP8_E4M3: 8-bit K and V require a 16-bit Q; type DTYPE=FP16 or DTYPE=BF16, or drop KV_DTYPE");
SDPA_REFUSE(OUT_DTYPE_changed &&
                DType(Defines::out_dtype - 1) == (Defines::q_bytes == 1 ? DType::fp16 : Defines::q_type),
            "OUT_DTYPE: O has that type by default; drop OUT_DTYPE");
SDPA_REFUSE(HEAD_DIM_V_changed && Defines::head_dim_v == Defines::head_dim,
            "HEAD_DIM_V: V and O have that D by default; drop HEAD_DIM_V");
SDPA_REFUSE(Defines::kernel == KernelKind::mma && Defines::use_tuned && Defines::kv_bytes == 1,
            "USE_TUNED=1: the table has no tiles for an 8-bit DTYPE with mma.sync or for KV_DTYPE with it; "
            "drop USE_TUNED or the 8-bit type");
SDPA_REFUSE(NUM_PRODUCER_WARPS_changed && !Defines::use_warp_specialization,
            "NUM_PRODUCER_WARPS: only builds with USE_WARP_SPECIALIZATION=1 have producer warps; add that or "
            "drop NUM_PRODUCER_WARPS");
SDPA_REFUSE(Defines::kv_type == DType::e4m3 && Defines::kernel == KernelKind::wmma,
            "DTYPE=FP8_E4M3: nvcuda::wmma does not support e4m3; drop USE_WMMA or type DTYPE=U8");
SDPA_REFUSE(Defines::kv_type == DType::u8 && (Defines::kernel == KernelKind::mma || Defines::is_wgmma),
            "DTYPE=U8: only the scalar and wmma kernels support it; type DTYPE=FP8_E4M3 or USE_WMMA=1");
SDPA_REFUSE(Defines::use_bias != 0 && Defines::kv_bytes == 1,
            "USE_BIAS: a bias would be added before the descale factors of 8-bit types; type DTYPE=FP16 or DTYPE=BF16");
SDPA_REFUSE((SCORE_MOD_changed || Defines::changes_logits || (Defines::hides_keys && !Defines::use_key_mask)) &&
                (Defines::use_softcap != 0 || Defines::use_bias != 0),
            "SCORE_MOD and MASK_MOD: the soft cap or the bias can be a part of the expression, as in "
            "30 * tanh(s / 30); drop USE_SOFTCAP and USE_BIAS");
SDPA_REFUSE(Defines::use_key_mask && (Defines::use_bias != 0 || Defines::mask_knobs > 1),
            "USE_KEY_MASK=1: a bias or a MASK_MOD can hide the keys as well; drop USE_KEY_MASK, or USE_BIAS and "
            "MASK_MOD");
SDPA_REFUSE(Defines::key_bias && Defines::use_lengths,
            "USE_BIAS=4, 5: USE_LENGTHS counts keys from the start of their sequence; type USE_BIAS=1 or 3, or drop "
            "USE_LENGTHS");
SDPA_REFUSE(Defines::use_key_mask && Defines::use_lengths,
            "USE_KEY_MASK=1: USE_LENGTHS counts keys from the start of their sequence; drop USE_KEY_MASK or "
            "USE_LENGTHS");
SDPA_REFUSE(Defines::use_pages && !Defines::use_lengths,
            "USE_PAGES: the page table is indexed by sequence; add USE_LENGTHS=1");
SDPA_REFUSE(FP8_FLUSH_changed && Defines::product_type != DType::e4m3,
            "FP8_FLUSH: only the wgmma kernel with DTYPE=FP8_E4M3 accumulates in 14 bits; drop FP8_FLUSH");
SDPA_REFUSE(FP16_ACC_changed && Defines::kv_type != DType::fp16,
            "FP16_ACC: only the wmma kernel with DTYPE=FP16 can accumulate in fp16; drop FP16_ACC");
SDPA_REFUSE(Defines::pv_in_fp16 && !Defines::use_wmma_pv,
            "FP16_ACC=PV: P @ V runs on the FMA pipes; add USE_WMMA_PV=1 or type FP16_ACC=QK");

// Refuses combinations that cannot work, whether they were set with -D or come from a row of the table.
template <class B> constexpr bool check_wgmma() {
  constexpr bool wgmma = B::is_wgmma, roles = wgmma && B::use_warp_specialization && !B::swap_ab;
  SDPA_REFUSE(wgmma && !B::swap_ab && (B::split_warps % 4 != 0 || B::block_m != 16 * B::split_warps),
              "BLOCK_M and NUM_WARPS: a warpgroup has 4 warps and 64 query rows, so BLOCK_M must be "
              "16*NUM_WARPS/SPLIT_KV; type BLOCK_M=128 NUM_WARPS=8, or BLOCK_M=64 NUM_WARPS=8 SPLIT_KV=2");
  SDPA_REFUSE(wgmma && B::use_pages == 1 &&
                  B::block_n * B::head_dim / (B::head_dim % 64 || B::d_v % 64 ? 512 : 1024) > 32,
              "USE_PAGES=1: each of 32 lanes copies one TMA box, and this tile may have more than 32; type a "
              "smaller BLOCK_N");
  SDPA_REFUSE(wgmma && B::product_type == DType::e4m3 && (!roles || !B::overlap),
              "DTYPE=FP8_E4M3: producer warps transpose V during the softmax; add USE_WARP_SPECIALIZATION=1 "
              "OVERLAP=1");
  SDPA_REFUSE(wgmma && B::tile_type != B::kv_type && B::swap_ab,
              "KV_DTYPE: the transposed kernel does not support it; drop SWAP_AB, or type USE_MMA_SYNC=1 for "
              "few query rows");
  SDPA_REFUSE(wgmma && B::tile_type != B::kv_type && (!roles || B::use_persistent_cta || B::split_kv > 1),
              "KV_DTYPE: with wgmma all producer warps convert tiles of one split, so none can store O "
              "meanwhile; add USE_WARP_SPECIALIZATION=1 and drop USE_PERSISTENT_CTA and SPLIT_KV");
  SDPA_REFUSE(wgmma && B::vec_width != 16 / B::kv_bytes,
              "VEC_WIDTH: TMA requires addresses and strides in multiples of 16 bytes; type VEC_WIDTH=8, or 16 "
              "with an 8-bit DTYPE or KV_DTYPE");
  SDPA_REFUSE(wgmma && !roles && (B::overlap || B::use_persistent_cta || B::use_ping_pong),
              "OVERLAP, USE_PERSISTENT_CTA and USE_PING_PONG: only the wgmma kernel with producer warps "
              "supports them; add USE_WARP_SPECIALIZATION=1 or drop them");
  SDPA_REFUSE(wgmma && !roles && !B::swap_ab && (B::use_lazy_max || B::split_kv > 1),
              "USE_LAZY_MAX, SPLIT_KV: the plain wgmma kernel supports neither; add USE_WARP_SPECIALIZATION=1 "
              "or drop them");
  SDPA_REFUSE(roles && B::split_kv > 2,
              "SPLIT_KV=4: the wgmma kernel with producer warps has at most two splits; type "
              "SPLIT_KV=2 or SWAP_AB=1");
  SDPA_REFUSE(wgmma && B::use_persistent_cta && B::split_kv > 1,
              "USE_PERSISTENT_CTA=1: the wgmma kernel does not support it with SPLIT_KV; drop one of them");
  SDPA_REFUSE(wgmma && !B::swap_ab && B::warpgroups == 1 && B::use_ping_pong,
              "USE_PING_PONG: a single warpgroup has no other to alternate with; drop USE_PING_PONG or type "
              "BLOCK_M=128 NUM_WARPS=8");
  SDPA_REFUSE(wgmma && B::skip_masked && (!roles || B::use_ping_pong || B::block_m == 64),
              "SKIP_MASKED=1: warpgroups skip different tiles, which requires USE_WARP_SPECIALIZATION=1, "
              "BLOCK_M over 64 and no USE_PING_PONG; type BLOCK_M=128 NUM_WARPS=8 or drop SKIP_MASKED");
  SDPA_REFUSE(wgmma && B::swap_ab && (B::num_warps != 4 * B::split_kv || B::block_n % 64 != 0),
              "SWAP_AB=1: each warpgroup is a split and takes multiples of 64 keys; type BLOCK_N=128 "
              "NUM_WARPS=16 SPLIT_KV=4");
  SDPA_REFUSE(wgmma && B::swap_ab && (B::block_m % 8 != 0 || 32 % B::block_m != 0),
              "BLOCK_M: with SWAP_AB=1 a CTA has 8, 16 or 32 query rows; type BLOCK_M=32");
  SDPA_REFUSE(wgmma && B::swap_ab &&
                  (B::block_n + 2 * B::d_v) / 64 * B::block_m / 2 > (B::num_warps > 8 ? 64 : 160),
              "SWAP_AB=1: S and two copies of O would take too many registers of a thread; type a smaller "
              "BLOCK_M or BLOCK_N");
  SDPA_REFUSE(wgmma && B::swap_ab && B::use_warp_specialization,
              "SWAP_AB=1: the compute warps of the transposed kernel also load; drop USE_WARP_SPECIALIZATION");
  return true;
}
template <class B> constexpr bool check() {
  constexpr bool scalar = B::kernel == KernelKind::scalar, wmma = B::kernel == KernelKind::wmma;
  constexpr bool mma = B::kernel == KernelKind::mma, wgmma = B::is_wgmma;
  constexpr int D = B::head_dim, Dv = B::d_v;
  constexpr bool usual = D == Dv && (D == 64 || D == 128 || D == 256);
  SDPA_REFUSE(D % 16 != 0 || Dv % 16 != 0 || Dv < 32 ||
                  (mma && B::kv_type == DType::e4m3 && (D % 32 != 0 || Dv % 32 != 0)),
              "HEAD_DIM and HEAD_DIM_V: kernels take multiples of 16 from 32 to 256, mma.sync with e4m3 "
              "multiples of 32; type HEAD_DIM=64");
  SDPA_REFUSE(wmma && !usual, "HEAD_DIM: nvcuda::wmma takes 64, 128 and 256; type one of them or USE_MMA_SYNC=1");
  SDPA_REFUSE(wgmma && ((D % 64 != 0 && D != 96) || (Dv % 64 != 0 && Dv != 96) || Dv > D),
              "HEAD_DIM: wgmma takes 64, 96, 128, 192, 256, and HEAD_DIM_V up to HEAD_DIM; type one or "
              "USE_MMA_SYNC=1");
  SDPA_REFUSE(wgmma && (B::swap_ab ? Dv % 64 != 0 : B::split_kv > 1 && 256 % Dv != 0),
              "HEAD_DIM_V: SWAP_AB=1 takes multiples of 64, SPLIT_KV=2 powers of 2; type HEAD_DIM=128 or drop them");
  SDPA_REFUSE(B::block_n % (scalar ? 8 : B::product_type == DType::e4m3 ? 32 : 16) != 0,
              "BLOCK_N: the scalar kernel takes multiples of 8, the others of 16, e4m3 of 32; type BLOCK_N=64");
  SDPA_REFUSE(B::kernel == KernelKind::wgmma_plain && B::pack_gqa,
              "PACK_GQA: the plain wgmma kernel does not support it; add USE_WARP_SPECIALIZATION=1 or SWAP_AB=1 "
              "or drop it");
  SDPA_REFUSE(merges_by_kernel<B> && (B::use_persistent_cta || (wgmma && (B::split_kv > 1 || B::skip_masked))),
              "SPLIT_CTAS: a CTA computes one range; drop USE_PERSISTENT_CTA, with wgmma also SPLIT_KV and "
              "SKIP_MASKED");
  SDPA_REFUSE(wgmma && B::use_warp_specialization && B::pack_gqa && B::split_ctas == 1,
              "PACK_GQA: with producer warps its rows can only be stored as partials of ranges; type SPLIT_CTAS=0");
  SDPA_REFUSE(wmma && B::use_warp_specialization && B::sync_policy != 1,
              "USE_WARP_SPECIALIZATION: CTA barriers would stop producers, so each warp must keep its rows; "
              "type SYNC_POLICY=1");
  SDPA_REFUSE(wmma && B::block_m != 16 * B::num_warps,
              "BLOCK_M: a wmma warp owns 16 query rows, so BLOCK_M must be 16*NUM_WARPS; type BLOCK_M=64 "
              "NUM_WARPS=4");
  SDPA_REFUSE(scalar && B::block_m % (4 * B::num_warps) != 0,
              "BLOCK_M: a warp takes a multiple of 4 query rows, so it must be a multiple of 4*NUM_WARPS; type "
              "BLOCK_M=64 NUM_WARPS=4");
  SDPA_REFUSE(scalar && B::block_m / (4 * B::num_warps) * (B::block_n + B::d_v) / 8 > 176,
              "BLOCK_M: S and O would take over 176 registers and spill; type a smaller BLOCK_M or more NUM_WARPS");
  SDPA_REFUSE(mma && B::num_warps % B::split_kv != 0,
              "SPLIT_KV: all splits have the same number of warps, so NUM_WARPS must be a multiple of SPLIT_KV; "
              "type SPLIT_KV=2 NUM_WARPS=8");
  SDPA_REFUSE(mma && B::block_m != 16 * B::split_warps && B::block_m != 32 * B::split_warps,
              "BLOCK_M: with mma.sync it must be 16 or 32 times NUM_WARPS/SPLIT_KV; type BLOCK_M=128 NUM_WARPS=4");
  SDPA_REFUSE(!wgmma && !B::use_cp_async && !B::use_warp_specialization && B::stages > 1,
              "STAGES: a plain copy finishes before the next one starts, so STAGES does nothing without "
              "cp.async or producer warps; add USE_CP_ASYNC=1 or drop STAGES");
  SDPA_REFUSE(B::kv_bytes == 2 && B::vec_width == 16,
              "VEC_WIDTH=16: an access has at most 16 bytes, but 16 elements have 32; type VEC_WIDTH=8");
  SDPA_REFUSE(wmma && B::tile_type != B::kv_type && B::vec_width < 8,
              "DTYPE=U8: 8 elements are converted to fp16 at a time; type VEC_WIDTH=16");
  SDPA_REFUSE(wmma && B::tile_type != B::kv_type && B::use_cp_async,
              "USE_CP_ASYNC=1: U8 is converted to fp16 in registers; drop USE_CP_ASYNC");
  SDPA_REFUSE(B::use_cp_async && B::vec_width * B::kv_bytes < 4,
              "USE_CP_ASYNC=1: cp.async moves 4, 8 or 16 bytes, but this VEC_WIDTH has fewer; type VEC_WIDTH=8");
  return check_wgmma<B>();
}

// ---- tuned tiles (USE_TUNED) ----

// A build and its cost on an SM with `ctas` resident CTAs: item_clocks per item, and one clock per
// scores_per_clock scores. The costs are fitted to the times of whole problems on an H200 (./run_all.sh fit).
struct TunedTile : Config {
  int ctas;
  double item_clocks, scores_per_clock;
};
inline void a_row_of_tiles_names_an_unknown_knob() {}  // not constexpr, so that calling it stops the compilation
// Returns the knobs that were set with -D, with these sizes and costs and USE_LAZY_MAX=1. `knobs`: the other
// knobs that are on. SPLIT_CTAS and PACK_GQA in it mean SPLIT_CTAS=0; USE_BIAS: see for_maps.
constexpr TunedTile tile(int head_dim, int block_m, int block_n, int num_warps, int stages, int split_kv,
                         std::string_view knobs, int ctas, double item_clocks, double scores_per_clock) {
  TunedTile t{{}, ctas, item_clocks, scores_per_clock};
  size_t known = 0;  // characters of the string that were recognized, plus one space per knob
  const auto on = [&](std::string_view knob) { return knobs.find(knob) != knobs.npos && (known += knob.size() + 1); };
  const bool for_maps = on("USE_BIAS");  // only for builds with a bias or a MASK_MOD
  // A build uses the rows of its own D, and those of its D rounded up to 64, 128 or 256. Its D is the larger
  // of HEAD_DIM and HEAD_DIM_V.
  const int build_D = Defines::head_dim > Defines::d_v ? Defines::head_dim : Defines::d_v;
  const bool is_for_build = head_dim == build_D || head_dim == (build_D <= 64 ? 64 : build_D <= 128 ? 128 : 256);
  if (!is_for_build) t.head_dim = head_dim == Defines::head_dim ? 0 : head_dim;  // a D that tile_fits() refuses
  if (for_maps && (!Defines::takes_map || !is_for_build)) t.head_dim = 0;
  t.block_m = block_m;
  t.block_n = block_n;
  t.num_warps = num_warps;
  t.stages = stages;
  t.split_kv = split_kv;
  const bool uses_mma = (on("USE_MMA_SYNC") && Defines::kv_type == DType::e4m3) || Defines::kernel == KernelKind::mma;
  if (uses_mma) t.use_mma_sync = t.use_cp_async = t.swizzle_xor = true;
  t.overlap = on("OVERLAP");
  t.use_warp_specialization = on("USE_WARP_SPECIALIZATION") || t.overlap;
  t.use_persistent_cta = on("USE_PERSISTENT_CTA");
  t.use_ping_pong = on("USE_PING_PONG");
  t.skip_masked = on("SKIP_MASKED");
  t.swap_ab = on("SWAP_AB");
  t.use_lazy_max = true;
  t.pack_gqa = on("PACK_GQA");
  t.split_ctas = on("SPLIT_CTAS") || t.pack_gqa ? 0 : 1;
  if (known != knobs.size() + !knobs.empty()) a_row_of_tiles_names_an_unknown_knob();
  // wgmma flushes O after about 1,024 keys.
  if (Defines::product_type == DType::e4m3) t.fp8_flush = block_n > 64 ? 8 : 16;
  return t;
}
//   D, BLOCK_M, BLOCK_N, NUM_WARPS, STAGES, SPLIT_KV, other knobs, CTAs per SM, item_clocks, scores_per_clock
constexpr std::array HOPPER_TILES = {
    tile(64, 64, 128, 8, 2, 2, "USE_WARP_SPECIALIZATION", 1, 5020, 6.86),
    tile(64, 32, 128, 16, 1, 4, "SWAP_AB", 1, 4710, 3.99),
    tile(64, 128, 64, 16, 4, 2, "OVERLAP USE_PING_PONG", 1, 6220, 9.23),
    tile(64, 256, 64, 16, 4, 1, "OVERLAP USE_PERSISTENT_CTA USE_PING_PONG", 1, 2670, 9.55),
    tile(64, 256, 64, 16, 3, 1, "OVERLAP USE_PERSISTENT_CTA SKIP_MASKED", 1, 2320, 8.88),
    tile(64, 64, 64, 4, 2, 1, "OVERLAP USE_PERSISTENT_CTA", 2, 1560, 6.61),
    tile(64, 192, 96, 12, 4, 1, "OVERLAP PACK_GQA", 1, 9950, 8.86),
    tile(64, 128, 128, 8, 4, 1, "OVERLAP PACK_GQA", 1, 9090, 7.09),
    tile(64, 64, 128, 4, 4, 1, "OVERLAP PACK_GQA", 1, 8190, 5.64),
    tile(64, 16, 128, 8, 2, 2, "SWAP_AB PACK_GQA", 1, 3940, 1.77),
    tile(64, 16, 128, 4, 2, 1, "SWAP_AB PACK_GQA", 3, 4090, 1.55),
    tile(64, 32, 128, 8, 2, 2, "SWAP_AB PACK_GQA", 1, 4520, 3.0),
    tile(64, 32, 128, 4, 2, 1, "SWAP_AB PACK_GQA", 2, 5290, 2.71),
    tile(128, 64, 64, 8, 2, 2, "OVERLAP", 1, 5240, 4.28),
    tile(128, 128, 128, 8, 2, 1, "OVERLAP USE_PERSISTENT_CTA USE_PING_PONG", 1, 3430, 5.72),
    tile(128, 192, 64, 12, 4, 1, "OVERLAP USE_PERSISTENT_CTA SKIP_MASKED", 1, 2960, 5.5),
    tile(128, 64, 64, 4, 2, 1, "OVERLAP USE_PERSISTENT_CTA", 1, 1780, 3.63),
    tile(128, 128, 128, 8, 2, 1, "OVERLAP PACK_GQA", 1, 13000, 5.6),
    tile(128, 64, 128, 4, 2, 1, "OVERLAP PACK_GQA", 1, 11100, 4.14),
    tile(128, 16, 64, 8, 2, 2, "SWAP_AB PACK_GQA", 1, 3820, 0.82),
    tile(128, 32, 64, 8, 2, 2, "SWAP_AB PACK_GQA", 1, 5220, 1.49),
    tile(128, 16, 64, 4, 2, 1, "SWAP_AB PACK_GQA", 3, 4710, 0.767),
    tile(128, 32, 64, 4, 2, 1, "SWAP_AB PACK_GQA", 2, 6570, 1.44),
    tile(96, 192, 64, 12, 4, 1, "OVERLAP USE_PERSISTENT_CTA SKIP_MASKED", 1, 2960, 6.1),
    tile(192, 128, 128, 8, 2, 1, "OVERLAP USE_PERSISTENT_CTA USE_PING_PONG", 1, 7140, 3.15),
    tile(192, 128, 128, 8, 2, 1, "OVERLAP USE_PERSISTENT_CTA SKIP_MASKED", 1, 7140, 3.1),
    tile(256, 128, 64, 8, 2, 1, "OVERLAP USE_PERSISTENT_CTA SKIP_MASKED", 1, 7140, 2.99),
    tile(256, 64, 64, 4, 2, 1, "OVERLAP USE_PERSISTENT_CTA", 1, 4820, 2.32),
    tile(256, 128, 64, 8, 2, 1, "OVERLAP PACK_GQA", 1, 23100, 2.59),
    tile(256, 64, 64, 4, 2, 1, "OVERLAP PACK_GQA", 1, 18600, 2.12),
    tile(256, 8, 64, 4, 2, 1, "SWAP_AB PACK_GQA", 1, 5000, 0.306),
    tile(256, 32, 64, 4, 2, 1, "SWAP_AB PACK_GQA", 1, 8240, 0.823),
    tile(64, 192, 128, 12, 2, 1, "OVERLAP USE_PERSISTENT_CTA USE_BIAS", 1, 2600, 9),
};
constexpr std::array AMPERE_TILES = {
    tile(64, 32, 32, 8, 2, 4, "", 2, 7710, 4.5),
    tile(64, 64, 64, 4, 2, 2, "", 2, 9030, 5.35),
    tile(64, 128, 64, 4, 3, 1, "", 2, 5950, 5.38),
    tile(64, 128, 64, 4, 3, 1, "PACK_GQA", 2, 11700, 5.02),
    tile(64, 64, 64, 4, 3, 1, "PACK_GQA", 3, 8070, 3.82),
    tile(64, 16, 32, 4, 3, 4, "PACK_GQA", 2, 8260, 2.5),
    tile(128, 64, 32, 8, 2, 2, "", 1, 6890, 2.28),
    tile(128, 128, 64, 4, 2, 1, "", 2, 8960, 3.14),
    tile(128, 128, 64, 4, 2, 1, "PACK_GQA", 2, 20500, 3.08),
    tile(128, 64, 64, 4, 2, 1, "PACK_GQA", 2, 16700, 2.45),
    tile(128, 16, 16, 4, 2, 4, "PACK_GQA", 3, 8560, 1.11),
    tile(256, 64, 64, 4, 1, 1, "", 2, 8270, 1.23),
    tile(256, 64, 64, 4, 1, 1, "PACK_GQA", 2, 35400, 1.13),
    tile(256, 16, 16, 2, 2, 2, "PACK_GQA", 3, 19800, 0.64),
};
// For few query rows in e4m3 the table uses mma.sync, because the transposed kernel does not support 8-bit
// types. The costs of D=96 and D=192 are not fitted.
constexpr std::array E4M3_TILES = {
    tile(64, 64, 128, 8, 3, 2, "OVERLAP", 1, 7150, 7.71),
    tile(64, 128, 64, 16, 4, 2, "OVERLAP USE_PING_PONG", 1, 8080, 10.7),
    tile(64, 192, 128, 12, 4, 1, "OVERLAP USE_PERSISTENT_CTA SKIP_MASKED", 1, 4850, 10.4),
    tile(64, 192, 128, 12, 4, 1, "OVERLAP PACK_GQA", 1, 13300, 10.2),
    tile(64, 128, 128, 8, 4, 1, "OVERLAP PACK_GQA", 1, 10700, 7.55),
    tile(64, 64, 128, 4, 4, 1, "OVERLAP PACK_GQA", 1, 10800, 5.93),
    tile(64, 16, 64, 4, 3, 4, "PACK_GQA USE_MMA_SYNC", 2, 9240, 3.23),
    tile(128, 64, 64, 8, 2, 2, "OVERLAP", 1, 6410, 5.68),
    tile(128, 128, 128, 8, 2, 1, "OVERLAP USE_PERSISTENT_CTA USE_PING_PONG", 1, 4400, 7.0),
    tile(128, 128, 128, 8, 2, 1, "OVERLAP PACK_GQA", 1, 12400, 7.18),
    tile(128, 64, 128, 4, 2, 1, "OVERLAP PACK_GQA", 1, 11400, 4.82),
    tile(128, 192, 64, 12, 4, 1, "OVERLAP USE_PERSISTENT_CTA SKIP_MASKED", 1, 4410, 7.21),
    tile(128, 16, 32, 4, 3, 4, "PACK_GQA USE_MMA_SYNC", 2, 9800, 1.53),
    tile(256, 128, 64, 8, 2, 1, "OVERLAP USE_PERSISTENT_CTA SKIP_MASKED", 1, 5000, 4.26),
    tile(256, 128, 64, 8, 2, 1, "OVERLAP SPLIT_CTAS", 1, 15000, 4.15),
    tile(256, 128, 64, 8, 2, 1, "OVERLAP PACK_GQA", 1, 17600, 3.72),
    tile(256, 64, 64, 4, 2, 1, "OVERLAP PACK_GQA", 1, 13800, 2.84),
    tile(256, 16, 32, 2, 2, 2, "PACK_GQA USE_MMA_SYNC", 3, 15000, 0.612),
    tile(96, 192, 96, 12, 3, 1, "OVERLAP USE_PERSISTENT_CTA SKIP_MASKED", 1, 4600, 8.6),
    tile(192, 128, 128, 8, 2, 1, "OVERLAP USE_PERSISTENT_CTA USE_PING_PONG", 1, 4700, 5.8),
    tile(192, 128, 128, 8, 2, 1, "OVERLAP USE_PERSISTENT_CTA SKIP_MASKED", 1, 4700, 5.9),
};
// KV_DTYPE. The costs are fitted with a bf16 Q.
constexpr std::array KV_TILES = {
    tile(64, 256, 64, 16, 3, 1, "OVERLAP USE_PING_PONG", 1, 10400, 9.2),
    tile(64, 128, 128, 8, 2, 1, "OVERLAP USE_PING_PONG", 1, 8330, 7.76),
    tile(64, 64, 64, 4, 2, 1, "OVERLAP", 2, 6300, 5.08),
    tile(64, 192, 96, 12, 3, 1, "OVERLAP PACK_GQA", 1, 15600, 9.36),
    tile(64, 64, 128, 4, 3, 1, "OVERLAP PACK_GQA", 1, 9960, 5.09),
    tile(64, 16, 64, 4, 3, 4, "PACK_GQA USE_MMA_SYNC", 2, 7040, 2.75),
    tile(128, 128, 128, 8, 2, 1, "OVERLAP USE_PING_PONG", 1, 10400, 5.67),
    tile(128, 192, 64, 12, 3, 1, "OVERLAP SKIP_MASKED", 1, 9710, 4.94),
    tile(128, 64, 128, 4, 2, 1, "OVERLAP", 1, 8250, 3.61),
    tile(128, 64, 64, 4, 2, 1, "OVERLAP", 1, 6660, 2.58),
    tile(128, 128, 128, 8, 2, 1, "OVERLAP PACK_GQA", 1, 16700, 5.17),
    tile(128, 64, 128, 4, 2, 1, "OVERLAP PACK_GQA", 1, 12800, 3.62),
    tile(128, 16, 32, 4, 2, 4, "PACK_GQA USE_MMA_SYNC", 3, 8020, 1.44),
    tile(256, 128, 64, 8, 2, 1, "OVERLAP SKIP_MASKED", 1, 12400, 2.48),
    tile(256, 64, 64, 4, 2, 1, "OVERLAP", 1, 9130, 1.82),
    tile(256, 128, 64, 8, 2, 1, "OVERLAP PACK_GQA", 1, 21900, 2.46),
    tile(256, 64, 64, 4, 2, 1, "OVERLAP PACK_GQA", 1, 15600, 1.67),
    tile(256, 16, 32, 2, 2, 2, "PACK_GQA USE_MMA_SYNC", 3, 14000, 0.561),
};
constexpr auto TUNED_TILES = [] {
  if constexpr (Defines::q_type != Defines::kv_type) return KV_TILES;
  else if constexpr (Defines::kv_type == DType::e4m3) return E4M3_TILES;
  else if constexpr (Defines::kernel == KernelKind::mma) return AMPERE_TILES;
  else return HOPPER_TILES;
}();
constexpr int tile_count = TUNED_TILES.size();
template <int ROW> constexpr Config config_of() { return TUNED_TILES[ROW]; }
// merges_by_kernel of the tile's build. check_all() verifies that it is the same.
constexpr bool merges_by_kernel_of(const TunedTile& t) {
  return t.split_ctas != 1 && !t.swap_ab && !(t.use_mma_sync && t.pack_gqa && t.split_kv > 1);
}

// ---- tiles that agree with the knobs as set with -D (typed) ----

#define SDPA_AGREES(name, fallback, member, values, families, meaning) \
  &&(!name##_changed || t.member == as_set.member)
// True if this build may use the tile: the tile has the values of all knobs that were set with -D.
constexpr bool tile_fits(const TunedTile& t) {
  constexpr Config as_set{};  // with -D
  const bool wgmma = Defines::is_wgmma && !t.use_mma_sync;
  const bool is_unsupported =
      (wgmma && (t.swap_ab ? Defines::d_v % 64 != 0 : t.split_kv > 1 && 256 % Defines::d_v != 0)) ||
      (t.head_dim == 192 && t.block_n == 128 && Defines::d_v > 128) ||
      (Defines::takes_map && t.num_warps == 16 && !t.swap_ab) ||  // maps and biases need registers
      (Defines::use_key_mask && t.num_warps == 16 && t.swap_ab);
  return as_set.use_tuned && t.head_dim == as_set.head_dim && !is_unsupported SDPA_KNOBS(SDPA_AGREES);
}

// ---- iteration over the tiles (USE_TUNED) ----

// The first row from n on whose tile fits; tile_count if there is none.
constexpr int next_tile(int n) {
  while (n < tile_count && !tile_fits(TUNED_TILES[n])) n++;
  return n;
}

// ---- refusals of rows (typed) ----

SDPA_REFUSE(Defines::use_tuned && next_tile(0) == tile_count,
            "USE_TUNED=1: no tile of the table has all the knobs that were set; drop some of them or USE_TUNED");
// N = -1: checks the knobs that were set with -D. Otherwise: checks the tiles from row N on.
template <int N> constexpr bool check_all() {
  if constexpr (N < tile_count) {
    static_assert(N < 0 || merges_by_kernel_of(TUNED_TILES[N < 0 ? 0 : N]) == merges_by_kernel<BuildOf<N>>, "");
    return check<BuildOf<N>>() && check_all<(N < 0 ? tile_count : next_tile(N + 1))>();
  }
  return true;
}
static_assert(check_all<Defines::use_tuned ? next_tile(0) : -1>(), "");

// ---- the choice of a tile (USE_TUNED) ----

// Estimated clocks of the problem with this tile on `sms` SMs, from the tile's two costs and constants that all
// tiles share.
double tuned_clocks(const TunedTile& t, const SdpaParams& p, int sms) {
  const KeyBounds bounds(p, p.Sq, p.Sk);
  const int round_keys = t.block_n * t.split_kv, threads = t.num_warps * 32, Sq = max(p.Sq, 1);
  const Items items = t.pack_gqa ? items_of_packed_tile(p, t.block_m) : items_of_tile(p, 1, t.block_m);
  const bool by_kernel = merges_by_kernel_of(t);
  // SPLIT_CTAS=0: each CTA takes one range of the keys.
  const int ranges = t.split_ctas ? 1 : ranges_of(p, items, by_kernel, round_keys, threads, t.ctas, sms);
  const double merge = by_kernel    ? merge_kernel_clocks(items, p.D, ranges, sms)
                       : ranges > 1 ? 500 + 2000.0 * merge_steps(items, p.D, threads, ranges)
                                    : 0;
  struct { double most, least, mean; } keys{};  // keys per item; most and least in whole rounds
  const auto in_rounds = [&](int64_t count) { return double(ceil_div(count, round_keys)) * round_keys; };
  const auto visible_to = [&](int q) { return bounds.end(q) - bounds.begin(q); };
  keys.most = keys.least = std::fmax(in_rounds(visible_to(p.Sq - 1)), round_keys);
  for (int i = 1; i < 32; i += 2) {  // samples 16 rows
    const int visible = visible_to(int(i / 32.0 * p.Sq));
    keys.mean += visible / 16.0;
    keys.most = std::fmax(keys.most, in_rounds(visible));
    keys.least = std::fmin(keys.least, in_rounds(visible));
  }
  // At each edge of the mask an item computes half a tile more than is visible; the edge also costs the time of
  // 64 keys.
  const int edges = (bounds.to < p.Sk) + (bounds.from > -size_limit), edge_rows = t.skip_masked ? 64 : t.block_m;
  keys.mean = std::fmin(keys.mean + edges * ((edge_rows + round_keys) / 2.0 + 64), in_rounds(p.Sk));
  const double share = ceil_div(int64_t(keys.most) / round_keys, ranges) * round_keys / keys.most;
  keys = {keys.most * share, keys.least * share, keys.mean * share};
  // Clocks per key of an item at the full throughput of an SM. With a mask, ping-pong warpgroups wait for
  // each other at its edge. With SKIP_MASKED, a single active warpgroup takes half of the time of the whole
  // tile.
  double clocks_per_key = t.block_m / t.scores_per_clock * (t.use_ping_pong && !bounds.all() ? 1.07 : 1);
  const double used = 64.0 * ceil_div(Sq, 64) / ceil_div(Sq, t.block_m);  // rows per tile that are not skipped
  if (t.skip_masked) clocks_per_key *= 0.5 + 0.5 * (used - 64) / (t.block_m - 64);
  // The time of the products and the softmax is the largest of three lower bounds. CTAs on an SM share its
  // throughput. A CTA that is alone reaches sole_rate of it; with SWAP_AB it reaches all of it, because latency
  // dominates there.
  const double ctas_per_sm = double(items.count) / sms * ranges, ctas = std::ceil(ctas_per_sm);
  const double rate_alone = t.ctas > 1 && !t.swap_ab ? sole_rate : 1, waves = std::ceil(ctas / t.ctas);
  // Bound 1, the longest item. If items share SMs, it runs alone only for its last (keys.most - keys.least) /
  // ctas_per_sm keys: the longest items start first (with a mask), and short ones fill the SM beside it.
  const bool shares = t.ctas > 1 && ctas_per_sm > 1;
  const double shared_keys = shares ? keys.most - (keys.most - keys.least) / ctas_per_sm : 0;
  const double full_rate_keys = shared_keys * std::fmin(ctas, t.ctas) + (keys.most - shared_keys) / rate_alone;
  const double longest = t.item_clocks + clocks_per_key * full_rate_keys;
  // Bound 2, all items spread evenly over the SMs. Bound 3, waves of t.ctas CTAs per SM, all as short as the shortest.
  const double spread = ctas_per_sm * (t.item_clocks / t.ctas + clocks_per_key * keys.mean);
  const double in_waves = waves * t.item_clocks + clocks_per_key * keys.least * ctas;
  const double work = std::fmax(longest, std::fmax(spread, in_waves)) + merge;
  // K and V are read once, from L2 if they take less than 52 MB, otherwise from device memory. Reading overlaps
  // with computing, which the 4-norm of both times models.
  const double bytes = 2.0 * sizeof(KeyValue) * p.D * (bounds.end(p.Sq - 1) - bounds.begin(0)) * p.B * p.Hkv;
  const double read = bytes / sms / (bytes < 52e6 ? 22 : t.pack_gqa && !by_kernel ? 18 : 15);
  const double start = t.use_persistent_cta ? 3500 : -700;  // -700: overlap with the preceding launch
  return start + std::sqrt(std::hypot(work * work, read * read));
}

// USE_LENGTHS: the same problem with `sequences` sequences of equal lengths. The host does not know the real lengths.
SdpaParams with_equal_lengths(SdpaParams p, int sequences) {
  if (p.q_starts && p.B > 0) p.Sq = ceil_div(p.Sq, p.B);
  if (p.k_starts && p.B > 0) p.Sk = ceil_div(p.Sk, p.B);
  p.q_starts = p.k_starts = nullptr;
  p.B = sequences;
  return p;
}

// batch_invariant: the problem with typical values of everything that depends on the batch or is in device memory.
SdpaParams with_typical_batch(SdpaParams p) {
  if (p.q_starts || p.q_lengths) p.Sq = 2048;
  if (p.k_lengths || p.k_starts) p.Sk = p.k_starts && !p.k_lengths && p.q_starts ? p.Sq : max(p.Sq, 8192);
  p.q_starts = p.q_lengths = p.k_starts = nullptr;
  p.most_keys = 0;
  p.B = 8;
  return p;
}
// Maximum number of keys that a query may see. batch_invariant: in any batch, so with k_lengths there is no limit.
int most_visible_keys_of_any_batch(const SdpaParams& p) {
  if (!p.batch_invariant) return most_visible_keys(p);
  if (p.k_lengths) return size_limit;
  return has_unknown_width(p) ? most_width(p) : most_visible_keys(with_typical_batch(p));
}

// The row of the tile with the shortest estimated time. The model takes up to 20 us, so the result of the last
// problem is kept. The choice must not depend on max_ctas, because the bits of O depend on the tile.
int choose_tile(const SdpaParams& p) {
  const int sms = sm_count();
  const int given = !p.k_lengths + 2 * !p.q_starts + 4 * !p.k_starts + 8 * !p.q_lengths + 16 * !p.k_firsts;
  const std::array now{sms, given, p.B, p.Hq, p.Hkv, p.Sq, p.Sk, p.D, int(p.causal), p.window_left, p.window_right,
                       int(p.window_alignment), p.most_keys, p.batch_invariant};
  thread_local auto last = now;
  thread_local int best = -1;
  if (best >= 0 && now == last) return best;
  best = -1;
  last = now;
  double best_clocks = 0;
  for (int n = next_tile(0); n < tile_count; n = next_tile(n + 1)) {
    const TunedTile& t = TUNED_TILES[n];
    double clocks = tuned_clocks(
        t, p.batch_invariant ? with_typical_batch(p) : Defines::use_lengths ? with_equal_lengths(p, p.B) : p, sms);
    // One sequence may have nearly all keys. Add the time of that problem, with weight sqrt(B).
    if (Defines::use_lengths && !p.batch_invariant && p.k_lengths) {
      clocks += std::sqrt(p.B) * tuned_clocks(t, with_equal_lengths(p, 1), sms);
    }
    // A tile that may sum more than most_keys_at_once keys is the last choice.
    if (t.split_ctas == 1 && !t.swap_ab && most_visible_keys_of_any_batch(p) > most_keys_at_once) clocks *= 1e9;
    if (best < 0 || clocks < best_clocks) {
      best = n;
      best_clocks = clocks;
    }
  }
  return best;
}

// Calls use(B()) with the build B of row `row` >= N.
template <int N, class Use> auto with_row(int row, const Use& use) {
  if constexpr (next_tile(N + 1) < tile_count) {
    if (row != N) return with_row<next_tile(N + 1)>(row, use);
  }
  return use(BuildOf<N>());
}

// ==== 8 CALL =====================================================================================

// Calls use(B()) with the build B that was chosen for the problem.
template <class Use> auto with_build(const SdpaParams& p, const Use& use) {
  if constexpr (Defines::use_tuned) {
    return with_row<next_tile(0)>(choose_tile(p), use);
  } else {
    return use(Defines());
  }
}

// Errors are reported only in the status: if launch() fails, clears the thread's last CUDA error, unless it was set
// before this call.
template <class Launch> SdpaStatus leaving_no_error(const Launch& launch) {
  const bool clean = cudaPeekAtLastError() == cudaSuccess;
  const SdpaStatus status = launch();
  if (!status.ok() && clean) cudaGetLastError();
  return status;
}

}  // namespace

// ---- a map of visible rounds for several launches (USE_BIAS = 1..3, MASK_MOD) ----

// Size in bytes of the map that sdpa_map_bias() writes. 0: this problem has no map, or its sizes are refused.
[[maybe_unused]] static size_t sdpa_bias_map_bytes(SdpaParams p) {
  if (!check_sizes(p).ok()) return 0;
  return with_build(p, [&](auto build) { return bias_map_bytes<decltype(build)>(p); });
}
// Enqueues a kernel that writes bias_map. Launches that use the map must have the same contents of the bias and of
// the arrays that MASK_MOD names; this is not checked. If another parameter differs (the tile, a size, the causal
// mask, the window, bias_keys, or whether heads and batches share the bias), a launch with the wrong
// bias_map_bytes is refused. With the right size, it ignores the map and computes all rounds: O is correct,
// but takes longer.
[[maybe_unused]] static SdpaStatus sdpa_map_bias(const SdpaParams& params, cudaStream_t stream) {
  SdpaParams p = params;
  const SdpaStatus status = check_params(p);
  if (!status.ok() || !p.B || !p.Hq || !p.Sq) return status;
  return leaving_no_error([&] {
    return with_build(p, [&](auto build) { return map_bias<decltype(build)>(p, stream); });
  });
}

// ---- one launch ----

// Size in bytes that SdpaParams::workspace must have for this problem; smaller if `scratch` is set. 0: it may
// be null, or the sizes are refused.
[[maybe_unused]] static size_t sdpa_workspace_bytes(SdpaParams p) {
  if (!check_sizes(p).ok()) return 0;
  return with_build(p, [&](auto build) { return workspace_bytes<decltype(build)>(p); });
}
// Size in bytes that SdpaParams::scratch must have for this problem if it is set. 0: it may be null.
[[maybe_unused]] static size_t sdpa_scratch_bytes(SdpaParams p) {
  if (!check_sizes(p).ok()) return 0;
  return with_build(p, [&](auto build) { return scratch_bytes<decltype(build)>(p); });
}

// Enqueues O, LSE = attention(Q, K, V) on `stream`, of the current device, and returns without waiting. It
// does not print or allocate memory, and may be captured into a CUDA graph. A problem that this build does
// not support is refused before anything is launched.
[[maybe_unused]] static SdpaStatus sdpa_forward(const SdpaParams& params, cudaStream_t stream) {
  SdpaParams p = params;
  const SdpaStatus status = check_params(p);
  if (!status.ok() || !p.B || !p.Hq || !p.Sq) return status;
  return leaving_no_error([&] {
    return with_build(p, [&](auto build) { return forward<decltype(build)>(p, stream); });
  });
}

}  // namespace SDPA_NAMESPACE

#pragma nv_diag_default 177
#pragma GCC diagnostic pop

// ==== COPY TO HERE ===============================================================================

#ifndef SDPA_NO_MAIN
#include "harness/main.cu"
#endif
