// Inputs, the CPU reference in double precision, and the comparison of a kernel's results with it.
// This file shares no code, types or strides with the kernels. The harness and the tests include
// it.
//
//   O = softmax(scale * Q @ K.T + mask) @ V,   LSE = log(sum(exp(scale * Q @ K.T + mask)))
//
// Before the mask, a softcap c replaces each logit x by c * tanh(x / c); then SCORE_MOD is applied,
// and a bias is added. MASK_MOD hides keys, like the mask. A sink is an additional logit of each
// row without a V.

#ifndef SDPA_REFERENCE_CPP
#define SDPA_REFERENCE_CPP

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <thread>
#include <vector>

// The loops below would take a third of the time of tests, which are compiled with -Og.
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#pragma GCC push_options
#pragma GCC optimize("O2")
#endif

namespace reference {

enum class Mask { none, bottom_right, top_left };

// A contiguous bias [batches,heads,rows,keys]. Dimensions of size 1 are broadcast.
struct Bias {
  std::vector<float> x;
  int batches = 0, heads = 0, rows = 0, keys = 0;
  bool of_last_keys = false;  // covers the last keys of each sequence, not the first
  bool hides = false;  // -inf hides a key even if its logit or V is NaN; otherwise -inf is added

  // The bias of query q and key k of sequence b with Sk keys, in head h.
  double of(int b, int h, int q, int k, int Sk) const {
    const int column = of_last_keys ? k - (Sk - keys) : k;
    if (x.empty() || column < 0) return 0;
    const auto at = [](int i, int size) { return size == 1 ? 0 : i; };
    return x[((size_t(at(b, batches)) * heads + at(h, heads)) * rows + at(q, rows)) * keys +
             column];
  }
};

struct Problem {
  int B, Hq, Hkv, Sq, Sk, D;
  Mask mask;
  double scale;  // 0 means 1/sqrt(D)
  // Contiguous [B,Hq,Sq,D], [B,Hkv,Sk,D] and [B,Hkv,Sk,Dv], already rounded to the kernel's types.
  const float *Q, *K, *V;
  // Visible keys on each side of the query's position; -1: no limit.
  int window_left = -1, window_right = -1;
  Mask window_alignment = Mask::none;  // alignment of the window's positions; none: as `mask`
  // Descale factors of Q, K and V, per head of each batch or packed sequence. Empty: 1.
  std::vector<double> q_factor, k_factor, v_factor;
  double softcap = 0;          // 0: none
  std::vector<double> sinks;   // one per query head; empty: none
  std::vector<int> k_lengths;  // number of keys of each sequence; empty: all
  std::vector<int> q_lengths;  // number of queries of each sequence; the other rows are unused
  std::vector<int> k_firsts;   // number of hidden first keys of each sequence; empty: 0
  // Packed tensors have no batch dimension; sequence b has the rows [starts[b], starts[b + 1]).
  bool packs_q = false, packs_k = false;
  std::vector<int> q_starts, k_starts;

  // SCORE_MOD and MASK_MOD, for query q and key k of sequence b with Sq queries and Sk keys, in
  // head h.
  std::function<double(double s, int b, int h, int q, int k, int Sq, int Sk)> logit;
  std::function<bool(int b, int h, int q, int k, int Sq, int Sk)> sees;
  Bias bias;  // may be empty
  // [B,Sk], or [Sk] for all batches: 0 hides a key. Empty: no key is hidden.
  std::vector<char> key_mask;
  bool shows_key(int b, int k) const {
    return key_mask.empty() || key_mask[(key_mask.size() > size_t(Sk) ? size_t(b) * Sk : 0) + k];
  }
  int Dv = 0;  // of V and O; 0: D
  int d_v() const { return Dv ? Dv : D; }
  bool has_window() const { return window_left >= 0 || window_right >= 0; }
};

// Calls body(i) for i in [0, n) on all cores.
inline void parallel_for(size_t n, const std::function<void(size_t)>& body) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i; (i = next++) < n;) body(i);
  };
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> threads;
  for (size_t t = 1; t < cores && t < n; t++) threads.emplace_back(work);
  work();
  for (std::thread& t : threads) t.join();
}

// ---- inputs: bitwise equal on every machine ----

// splitmix64's output function: a bijection in which every input bit affects every output bit.
inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

enum class Tensor { Q, K, V, O, dO, dQ, dK, dV };

inline bool of_query(Tensor t) {
  return t == Tensor::Q || t == Tensor::O || t == Tensor::dO || t == Tensor::dQ;
}
// Number of elements of a row.
inline int width_of(const Problem& p, Tensor t) {
  return t == Tensor::Q || t == Tensor::K || t == Tensor::dQ || t == Tensor::dK ? p.D : p.d_v();
}
inline int batches_of(const Problem& p, Tensor t) {
  return (of_query(t) ? p.packs_q : p.packs_k) ? std::min(p.B, 1) : p.B;
}
inline size_t heads_of(const Problem& p, Tensor t) {  // number of heads in all batches
  return size_t(batches_of(p, t)) * (of_query(t) ? p.Hq : p.Hkv);
}
inline size_t rows_of(const Problem& p, Tensor t) {  // number of rows in all heads
  return heads_of(p, t) * (of_query(t) ? p.Sq : p.Sk);
}

// The scale, with the default applied.
inline double scale_of(const Problem& p) {
  return p.scale == 0 ? 1 / std::sqrt(double(p.D)) : p.scale;
}

// An upper bound of |logit| before a softcap: the scale times the largest norms of rows of Q and K
// (Cauchy-Schwarz). Infinite without inputs.
inline double largest_logit(const Problem& p) {
  const auto longest_row = [&](const float* x, Tensor t, const std::vector<double>& factors) {
    double longest = 0;
    for (size_t row = 0; x && row < rows_of(p, t); row++) {
      double squares = 0;
      for (int d = 0; d < p.D; d++) squares += double(x[row * p.D + d]) * x[row * p.D + d];
      if (!std::isnan(squares))
        longest = std::max(longest, squares);  // skips unused rows, which may be NaN
    }
    const auto largest_factor = std::max_element(factors.begin(), factors.end());
    return std::sqrt(longest) * (factors.empty() ? 1 : *largest_factor);
  };
  if (!p.Q || !p.K) return INFINITY;
  return longest_row(p.Q, Tensor::Q, p.q_factor) * longest_row(p.K, Tensor::K, p.k_factor) *
         scale_of(p);
}

// N(0,1) by the central limit theorem: the sum of 12 uniform 16-bit integers has the variance
// 12 * (2^32 - 1) / 12, so dividing it by 2^16 gives a variance of 1. All steps are exact.
inline float normal(uint64_t seed, Tensor tensor, uint64_t index) {
  const uint64_t stream = mix(seed * 4 + uint64_t(tensor));
  int sum = 0;
  for (uint64_t n = 0; n < 3; n++) {
    const uint64_t word = mix(stream + 3 * index + n);
    for (int shift = 0; shift < 64; shift += 16) sum += int(word >> shift & 0xffff);
  }
  return float(sum - 12 * 65535 / 2) / 65536.0f;
}

struct InputAt {  // an element: its index in [B,H,S,D], and its head's index in [B,H]
  const Problem& problem;
  uint64_t seed;
  Tensor tensor;
  uint64_t index, head, row, d;
  float x;  // N(0,1)
};
struct Dist {
  const char* name;
  float (*value)(const InputAt&);
};
// outliers: one element in 256 is multiplied by 10. large: Q and K are multiplied by 16, so that
// logits have a standard deviation of 256. uniform: all logits are 0 and V has a mean of 1, which
// exposes sums that lose small addends. tests/sweep.cu adds more.
inline std::vector<Dist> dists = {
    {"normal", [](const InputAt& i) { return i.x; }},
    {"outliers",
     [](const InputAt& i) { return mix(mix(i.seed + 77) + i.index) % 256 ? i.x : i.x * 10; }},
    {"large", [](const InputAt& i) { return i.tensor == Tensor::V ? i.x : i.x * 16; }},
    {"uniform", [](const InputAt& i) {
       return i.tensor == Tensor::Q ? 0 : i.tensor == Tensor::V ? 1 + i.x / 8 : i.x;
     }}};

inline const Dist* dist_named(const std::string& name) {
  for (const Dist& d : dists) {
    if (name == d.name) return &d;
  }
  return nullptr;
}

// A tensor [B,H,S,D], not rounded. same_heads: all heads are copies of the first one.
inline std::vector<float> make_input(const Problem& p, Tensor tensor, const Dist& dist,
                                     uint64_t seed, bool same_heads) {
  const size_t heads = heads_of(p, tensor), D = width_of(p, tensor);
  const size_t per_head = heads ? rows_of(p, tensor) / heads * D : 0;
  std::vector<float> x(heads * per_head);
  parallel_for(heads, [&](size_t h) {
    const size_t head = same_heads ? 0 : h;
    for (size_t i = 0; i < per_head; i++) {
      const size_t index = head * per_head + i;
      const InputAt at{p, seed, tensor, index, head, i / D, i % D, normal(seed, tensor, index)};
      x[h * per_head + i] = dist.value(at);
    }
  });
  return x;
}

// ---- the reference ----

struct Row {  // coordinates of a query row in [B,Hq,Sq]
  int b, h, q;
};

// The expected result of a row. open[d] is 1 if column d of V is NaN or inf at a masked key of the
// sequence. A kernel that multiplies it by a weight of 0 gets NaN, and a kernel that skips the key
// gets O[d]; both are accepted.
struct Result {
  std::vector<double> O;  // [Dv]
  double LSE;
  std::vector<char> open;  // [Dv]
};

// Sequence b: its numbers of queries and keys, and its first rows in the tensors.
struct Sequence {
  int b, Sq, Sk, first_query, first_key;
};
inline Sequence sequence_of(const Problem& p, int b) {
  Sequence s{b, p.Sq, p.Sk, 0, 0};
  if (p.packs_q) {
    s.first_query = p.q_starts[b];
    s.Sq = p.q_starts[b + 1] - s.first_query;
  }
  if (p.packs_k) {
    s.first_key = p.k_starts[b];
    s.Sk = p.k_starts[b + 1] - s.first_key;
  }
  if (!p.k_lengths.empty()) s.Sk = std::min(s.Sk, p.k_lengths[b]);
  if (!p.q_lengths.empty()) s.Sq = std::max(0, std::min(s.Sq, p.q_lengths[b]));
  if (!p.k_firsts.empty()) {
    const int first = std::max(0, std::min(s.Sk, p.k_firsts[b]));
    s.first_key += first;
    s.Sk -= first;
  }
  return s;
}
inline Sequence sequence_of(const Problem& p, const Row& row) {
  if (!p.packs_q) return sequence_of(p, row.b);
  return sequence_of(
      p,
      int(std::upper_bound(p.q_starts.begin(), p.q_starts.end(), row.q) - p.q_starts.begin()) - 1);
}
inline bool is_query(const Problem& p, const Row& row) {
  const Sequence s = sequence_of(p, row);
  return row.q - s.first_query < s.Sq;
}
// The sequence of a row of K or V, given by its batch, KV head and row. b = -1: none.
inline Sequence sequence_of_key(const Problem& p, const Row& row) {
  if (!p.packs_k) return sequence_of(p, row.b);
  const auto next = std::upper_bound(p.k_starts.begin(), p.k_starts.end(), row.q);
  const int b = int(next - p.k_starts.begin()) - 1;
  return b >= 0 && b < p.B ? sequence_of(p, b) : Sequence{-1, 0, 0, 0, 0};
}
inline bool is_key(const Problem& p, const Row& row) {
  const Sequence s = sequence_of_key(p, row);
  return row.q >= s.first_key && row.q - s.first_key < s.Sk;
}
// first_key() and past_last_key() delimit the keys that query q of a sequence sees. The position of
// query q is key q, or with bottom-right alignment key q + Sk - Sq. A causal mask hides the keys
// after it.
inline size_t clamp_key(const Sequence& s, long long k) {
  return size_t(k < 0 ? 0 : k > s.Sk ? s.Sk : k);
}
inline long long position_in_window(const Problem& p, const Sequence& s, long long q) {
  const Mask by = p.window_alignment == Mask::none ? p.mask : p.window_alignment;
  return by == Mask::bottom_right ? q + s.Sk - s.Sq : q;
}
inline size_t first_key(const Problem& p, const Sequence& s, long long q) {
  if (p.window_left < 0) return 0;
  return clamp_key(s, position_in_window(p, s, q) - p.window_left);
}
inline size_t past_last_key(const Problem& p, const Sequence& s, long long q) {
  size_t end = size_t(s.Sk);
  if (p.mask == Mask::top_left) end = clamp_key(s, q + 1);
  if (p.mask == Mask::bottom_right) end = clamp_key(s, q + s.Sk - s.Sq + 1);
  if (p.window_right >= 0)
    end = std::min(end, clamp_key(s, position_in_window(p, s, q) + p.window_right + 1));
  return std::max(end, first_key(p, s, q));
}

// Number of visible (query, key) pairs per head, averaged over the sequences.
inline double visible_pairs(const Problem& p) {
  const int sequences =
      p.k_lengths.empty() && p.q_lengths.empty() && p.k_firsts.empty() && !p.packs_q && !p.packs_k
          ? 1
          : p.B;
  double pairs = 0;
  for (int b = 0; b < sequences; b++) {
    const Sequence s = sequence_of(p, b);
    for (int q = 0; q < s.Sq; q++) pairs += double(past_last_key(p, s, q) - first_key(p, s, q));
  }
  return pairs / std::max(sequences, 1);
}

inline double dot(const float* x, const float* y, int n) {  // n must be a multiple of 8
  double sums[8] = {};  // independent sums that the compiler can vectorize
  for (int i = 0; i < n; i += 8) {
    for (int j = 0; j < 8; j++) sums[j] += double(x[i + j]) * double(y[i + j]);
  }
  double sum = 0;
  for (int j = 0; j < 8; j++) sum += sums[j];
  return sum;
}

// Computes one row. If it sees no key or all logits are -inf, O = 0 and LSE is the sink, or -inf.
inline Result attend(const Problem& p, const Row& row) {
  const int h_kv = row.h / (p.Hq / p.Hkv), D = p.D, Dv = p.d_v();
  const Sequence s = sequence_of(p, row);
  const size_t first = s.first_key + first_key(p, s, row.q - s.first_query);
  const size_t end = s.first_key + past_last_key(p, s, row.q - s.first_query);
  const double infinity = std::numeric_limits<double>::infinity();
  const size_t head = size_t(row.b) * p.Hq + row.h,
               kv_head = size_t(p.packs_k ? 0 : s.b) * p.Hkv + h_kv;
  const size_t factor_head = size_t(s.b) * p.Hkv + h_kv;
  const auto factor = [](const std::vector<double>& of_heads, size_t h) {
    return of_heads.empty() ? 1.0 : of_heads[h];
  };
  const double scale = scale_of(p) * factor(p.q_factor, size_t(s.b) * p.Hq + row.h) *
                       factor(p.k_factor, factor_head);
  const double v_factor = factor(p.v_factor, factor_head);
  const float* const Q = p.Q + (head * p.Sq + row.q) * D;
  const float* const K = p.K + kv_head * p.Sk * D;
  const float* const V = p.V + kv_head * p.Sk * Dv;

  Result result{std::vector<double>(Dv, 0.0), -infinity, std::vector<char>(Dv, 0)};
  const auto leave_open = [&](size_t k) {
    for (int d = 0; d < Dv; d++) {
      if (!std::isfinite(V[k * Dv + d])) result.open[d] = 1;
    }
  };
  const size_t end_of_keys = s.first_key + std::max(s.Sk, 0);
  for (size_t k = s.first_key; k < end_of_keys; k++) {
    if (k < first || k >= end) leave_open(k);
  }
  std::vector<double> logits(end);
  std::vector<char> hidden(end);
  const double sink = p.sinks.empty() ? -infinity : p.sinks[row.h];
  double max = sink;
  bool sees_any = false;
  for (size_t k = first; k < end; k++) {
    logits[k] = scale * dot(Q, K + k * D, D);
    if (p.softcap != 0) logits[k] = p.softcap * std::tanh(logits[k] / p.softcap);
    const int query = row.q - s.first_query, key = int(k) - s.first_key;
    if (p.logit) logits[k] = p.logit(logits[k], s.b, row.h, query, key, s.Sq, s.Sk);
    const double bias = p.bias.of(s.b, row.h, query, key, s.Sk);
    hidden[k] = (p.bias.hides && bias == -infinity) || !p.shows_key(s.b, key) ||
                (p.sees && !p.sees(s.b, row.h, query, key, s.Sq, s.Sk));
    logits[k] = hidden[k] ? -infinity : logits[k] + bias;
    if (hidden[k]) leave_open(k);
    sees_any |= logits[k] != -infinity;
    if (logits[k] > max) max = logits[k];
  }
  if (!sees_any) {  // all weights are 0, with or without a sink
    for (size_t k = first; k < end; k++) leave_open(k);
    result.LSE = sink;
    return result;
  }
  double sum = std::exp(sink - max);
  double* const O = result.O.data();
  for (size_t k = first; k < end; k++) {
    const double weight =
        std::exp(logits[k] - max);  // NaN (inf - inf) in a row with a logit of +inf
    if (hidden[k]) continue;
    sum += weight;
    const float* const V_k = V + k * Dv;
    for (int d = 0; d < Dv; d++) O[d] += weight * double(V_k[d]);
  }
  for (int d = 0; d < Dv; d++) result.O[d] = result.O[d] / sum * v_factor;
  result.LSE = max + std::log(sum);
  return result;
}

inline std::vector<Result> attend(const Problem& p, const std::vector<Row>& rows) {
  std::vector<Result> results(rows.size());
  parallel_for(rows.size(), [&](size_t i) { results[i] = attend(p, rows[i]); });
  return results;
}

// ---- which rows to compare ----

// Returns all queries in order if affordable. Otherwise a sample:
// - of every work item (`item_rows` rows), at least one row, chosen by a hash;
// - in the first and last head, the first and last row of every work item and sequence;
// - in the first and last work item of these heads, the first and last row of every group of 64 rows.
inline std::vector<Row> rows_to_check(const Problem& p, uint64_t seed, int item_rows,
                                      double affordable_macs) {
  std::vector<Row> rows;
  const double all = double(rows_of(p, Tensor::O)), macs_per_row = 2.0 * p.Sk * p.D;
  const double affordable = macs_per_row > 0 ? affordable_macs / macs_per_row : all;
  const bool sampled = all > affordable;
  const int heads = int(heads_of(p, Tensor::O));
  const double items = double(heads) * ((p.Sq + item_rows - 1) / item_rows);
  const int wanted_of_item = int(std::min(double(item_rows), std::max(1.0, affordable / items)));
  for (int head = 0; head < heads; head++) {
    for (int q0 = 0; q0 < p.Sq; q0 += item_rows) {
      const int end = std::min(q0 + item_rows, p.Sq);
      std::vector<int> of_item;
      for (int n = 0; n < wanted_of_item && sampled; n++) {
        const uint64_t place = uint64_t(head) * p.Sq + q0;
        of_item.push_back(q0 + int(mix(mix(mix(seed + 55) + place) + n) % (end - q0)));
      }
      for (int q = q0; q < end; q++) {
        const bool of_group = (q0 == 0 || end == p.Sq) && (q % 64 == 0 || q % 64 == 63);
        const auto begins = [&](int row) {
          return std::binary_search(p.q_starts.begin(), p.q_starts.end(), row);
        };
        const bool edge = q == q0 || q == end - 1 || of_group || begins(q) || begins(q + 1);
        if (!sampled || ((head == 0 || head == heads - 1) && edge)) of_item.push_back(q);
      }
      std::sort(of_item.begin(), of_item.end());
      of_item.erase(std::unique(of_item.begin(), of_item.end()), of_item.end());
      for (int q : of_item) {
        const Row row{head / p.Hq, head % p.Hq, q};
        if (is_query(p, row)) rows.push_back(row);
      }
    }
  }
  return rows;
}

// ---- comparison ----

struct Tolerance {
  double rel_rms;        // limit of rms(error) / rms(reference)
  double max_abs;        // limit of the largest error / max(1, largest |reference|)
  double lse;            // limit of the error of LSE / max(1, |reference|)
  int weight_bits = 53;  // mantissa bits of the weights, if their rounding dominates the error

  // The limit of rel_rms over a number of rows. In the worst case each row has one large weight, and
  // rounding it causes a relative error of at most `worst` = 1 / (2^(bits+1) + 1). rel_rms^2 is the
  // mean of the squares of these errors over the rows. If the logarithms of the weights are uniform, a
  // square has the mean u = 0.541 * 2^(-2 bits) / 12 and the standard deviation 1.04 u. The limit
  // allows five standard deviations of the mean.
  double rel_rms_of(double rows) const {
    const double worst = 1 / (std::ldexp(1.0, weight_bits + 1) + 1);
    const double u = std::ldexp(0.541 / 12, -2 * weight_bits);
    const double uniform = std::sqrt(u * (1 + 5 * 1.04 / std::sqrt(rows)));
    return std::max(rel_rms, std::min(uniform, worst));
  }
};
inline Tolerance max(const Tolerance& a, const Tolerance& b) {
  return {std::max(a.rel_rms, b.rel_rms), std::max(a.max_abs, b.max_abs), std::max(a.lse, b.lse),
          std::min(a.weight_bits, b.weight_bits)};
}

// An element type. Its tolerance is a few times the rounding error of O and of the weights.
struct Type {
  const char* name;
  int mantissa_bits;
  double smallest, largest;  // range of normal numbers
  Tolerance tolerance;
};
constexpr Type fp16{"fp16", 10, 0x1p-14, 65504, {1e-3, 1e-3, 1e-3}};
constexpr Type bf16{"bf16", 7, 0x1p-126, 0x1p127, {8e-3, 8e-3, 1e-3}};
const Type fp32{"fp32", 23, 0x1p-126, 0x1p127, {1e-6, 1e-6, 1e-6}};  // only for a bias
// Types of inputs only. With e4m3 the weights have 3 mantissa bits and the logits are sums with
// 14 bits. With u8 the weights are fp16.
constexpr Type e4m3{"e4m3", 3, 0x1p-6, 448, {4e-2, 6e-2, 4e-3, 3}};
constexpr Type u8{"u8", 10, 1, 127, {1.5e-3, 2e-3, 1e-3}};

// For sums in fp16: a logit between 32 and 64 has 5 fractional bits and is rounded D / 16 times.
constexpr Tolerance fp16_sums{5e-3, 5e-3, 5e-3};

// The unit in the last place of x; 0 if x is not a normal number.
inline double ulp(const Type& type, double x) {
  x = std::fabs(x);
  const bool normal = x >= type.smallest && x <= type.largest;
  return normal ? std::ldexp(1.0, std::ilogb(x) - type.mantissa_bits) : 0;
}

// |ref - got|; 0 if both are NaN or the same infinity; infinity if only one is NaN or infinite.
inline double distance(double ref, double got) {
  if (ref == got || (std::isnan(ref) && std::isnan(got))) return 0;
  const double err = std::fabs(ref - got);
  return std::isnan(err) ? std::numeric_limits<double>::infinity() : err;
}

template <class... Values> std::string format(const char* pattern, Values... values) {
  char text[512];
  snprintf(text, sizeof text, pattern, values...);
  return text;
}

// Accumulates the errors of rows of O and LSE. All comparisons with limits fail on NaN.
class Comparison {
 public:
  // The limit of the mean of |got| - |ref| over O, in units in the last place; truncation gives
  // -0.5. Requires a minimum of rows and elements, since the errors of a row are correlated: all of
  // them contain the rounding of its weights.
  static constexpr double mean_limit = 0.25;
  static constexpr long least_rows = 32, least_elements = 256;

  explicit Comparison(const Type& type, bool judges_rounding)
      : type_(&type), judges_rounding_(judges_rounding) {}

  long rows = 0;
  double rel_rms = 0, rel_rms_limit = 0, max_abs_err = 0, lse_err = 0, largest_lse = 1;

  void add(const Row& at, const Result& want, const float* O, float LSE) {
    add(at, int(want.O.size()), want.O.data(), want.LSE, want.open.data(), O, LSE);
  }
  // open[d]: NaN is accepted too. May be null.
  template <class Real>
  void add(const Row& at, int D, const Real* want_O, double want_LSE, const char* open,
           const float* O, float LSE) {
    rows++;
    const double squares_before = squares_ref_;
    for (int d = 0; d < D; d++) {
      if (!(std::isnan(O[d]) && open && open[d])) add_element(at, d, want_O[d], O[d]);
    }
    squares_of_rows_ += std::pow(squares_ref_ - squares_before, 2);
    if (std::fabs(want_LSE) > double(FLT_MAX)) want_LSE = std::copysign(INFINITY, want_LSE);
    const double size = std::isfinite(want_LSE) ? std::max(1.0, std::fabs(want_LSE)) : 1.0;
    const double err = distance(want_LSE, LSE) / size;
    largest_lse = std::max(largest_lse, size);
    if (!(err <= lse_err)) {
      lse_err = err;
      worst_lse_ = format("LSE(b=%d,h=%d,q=%d) ref=%.9g got=%.9g relative err=%.3g", at.b, at.h,
                          at.q, want_LSE, double(LSE), err);
    }
  }

  void merge(const Comparison& other) {  // adds the errors of other rows
    rows += other.rows;
    elements_ += other.elements_;
    squares_err_ += other.squares_err_;
    squares_ref_ += other.squares_ref_;
    squares_of_rows_ += other.squares_of_rows_;
    signed_err_ += other.signed_err_;
    units_ += other.units_;
    max_ref_ = std::max(max_ref_, other.max_ref_);
    largest_lse = std::max(largest_lse, other.largest_lse);
    if (!(other.max_abs_err <= max_abs_err)) {
      max_abs_err = other.max_abs_err;
      worst_ = other.worst_;
    }
    if (!(other.lse_err <= lse_err)) {
      lse_err = other.lse_err;
      worst_lse_ = other.worst_lse_;
    }
  }

  // Returns an empty string, or a sentence with the worst element and the limit that it exceeds.
  std::string verdict(const Tolerance& tol) {
    rel_rms = squares_err_ == 0 ? 0 : std::sqrt(squares_err_ / squares_ref_);
    // Kish's effective sample size: rows that are small relative to others hardly count.
    rel_rms_limit = tol.rel_rms_of(
        squares_of_rows_ > 0 ? squares_ref_ * squares_ref_ / squares_of_rows_ : double(rows));
    const double abs_limit = tol.max_abs * std::max(1.0, max_ref_);
    const double mean = units_ > 0 ? signed_err_ / units_ : 0;
    if (!(max_abs_err <= abs_limit)) return worst_ + format(" tol=%.3g", abs_limit);
    if (!(rel_rms <= rel_rms_limit)) {
      return format("rel_rms=%.3g tol=%.3g; worst ", rel_rms, rel_rms_limit) + worst_;
    }
    if (!(lse_err <= tol.lse)) return worst_lse_ + format(" tol=%.3g", tol.lse);
    if (judges_rounding_ && rows >= least_rows && elements_ >= least_elements &&
        !(std::fabs(mean) <= mean_limit)) {
      return format(
          "O is not rounded to nearest: its mean error is %.3g units of the last place, tol=%.3g",
          mean, mean_limit);
    }
    return "";
  }

 private:
  void add_element(const Row& at, int d, double ref, double got) {
    const double err = distance(ref, got), unit = ulp(*type_, ref);
    squares_err_ += err * err;
    if (unit > 0 && std::isfinite(got)) {
      signed_err_ += std::fabs(got) - std::fabs(ref);
      units_ += unit;
      elements_++;
    }
    if (std::isfinite(ref)) {
      squares_ref_ += ref * ref;
      max_ref_ = std::max(max_ref_, std::fabs(ref));
    }
    if (!(err <= max_abs_err)) {
      max_abs_err = err;
      worst_ = format("O(b=%d,h=%d,q=%d,d=%d) ref=%.9g got=%.9g err=%.3g", at.b, at.h, at.q, d, ref,
                      got, err);
    }
  }

  const Type* type_;
  bool judges_rounding_;
  double squares_err_ = 0, squares_ref_ = 0, max_ref_ = 0;
  double squares_of_rows_ = 0;         // sum over rows of (their share of squares_ref_)^2
  double signed_err_ = 0, units_ = 0;  // over the elements_ that are normal numbers
  long elements_ = 0;
  std::string worst_, worst_lse_;
};

// ---- gradients ----
//
//   P = exp(x - LSE)    dP = dO @ V.T    delta = sum(dO * O) - dLSE    dS = P * (dP - delta) * dx/ds
//   dV = P.T @ dO    dK = scale * dS.T @ Q    dQ = scale * dS @ K    dsink = -sum(exp(sink - LSE) * delta)
//   dbias = sum of P * (dP - delta) over the dimensions that share an element of the bias
//
// s = scale * Q @ K.T, and x is the logit: s, the softcap of s, or SCORE_MOD of s, plus a bias. MASK_MOD
// may hide keys. O and LSE are inputs, since a kernel gets them from a forward pass with rounded results,
// which is checked separately. Does not support descale factors or key masks.

// A row of a gradient: a weighted sum of rows of a tensor.
struct Gradient {
  std::vector<double> x;         // the sum
  std::vector<double> variance;  // of the error of x, if all roundings of a kernel are random
  std::vector<double> total;     // the unweighted sum; of_bias(): the sum of absolute values
  std::vector<double> rounded;   // the sum weighted with the rounding errors of the weights
  explicit Gradient(int width)
      : x(width, 0.0), variance(width, 0.0), total(width, 0.0), rounded(width, 0.0) {}
};

class Backward {
 public:
  // dO [B,Hq,Sq,Dv] is rounded to `type`; the kernel rounds P, dS and the gradients to the same
  // type. tanh_error: relative error of tanh in the softcap. same_heads: all heads of each tensor
  // are equal, so their rounding errors are equal too. logit_error: absolute error of a logit by
  // tanh_approx() in SCORE_MOD.
  Backward(const Problem& p, const float* dO, const Type& type, double tanh_error = 0,
           bool same_heads = false, double logit_error = 0)
      : p_(p),
        dO_(dO),
        type_(type),
        tanh_error_(tanh_error),
        logit_error_(logit_error),
        copies_(same_heads ? p.Hq / std::max(p.Hkv, 1) : 1),
        rows_(rows_of(p, Tensor::Q)) {
    unit_ = std::sqrt(0.541 / 12) * std::ldexp(1.0, -type.mantissa_bits);
    tiny_ = std::max(type.smallest * std::ldexp(1.0, -type.mantissa_bits) / std::sqrt(12.0),
                     double(FLT_MIN));
    k_norms_ = norms(p.K, rows_of(p, Tensor::K), p.D);
    v_norms_ = norms(p.V, rows_of(p, Tensor::V), p.d_v());
    const std::vector<double> of_q = norms(p.Q, rows_.size(), p.D),
                              of_dO = norms(dO, rows_.size(), p.d_v());
    for (size_t i = 0; i < rows_.size(); i++) {
      rows_[i].q_norm = of_q[i];
      rows_[i].dO_norm = of_dO[i];
    }
  }

  // Sets the forward results of row i of [B,Hq,Sq] and the gradient of its LSE. Call it for all
  // rows first.
  template <class Real> void set_row(size_t i, const Real* O, double LSE, double dLSE = 0) {
    double delta = -dLSE;
    for (int d = 0; d < p_.d_v(); d++) delta += double(dO_[i * p_.d_v() + d]) * double(O[d]);
    rows_[i].LSE = LSE;
    rows_[i].delta = delta;
  }

  // Computes dQ of a row of Q, which is 0 if the row is no query.
  Gradient of_query(const Row& at) const {
    Gradient dQ(p_.D);
    if (!is_query(p_, at)) return dQ;
    const Sequence s = sequence_of(p_, at);
    const int q = at.q - s.first_query;
    const size_t i = (size_t(at.b) * p_.Hq + at.h) * p_.Sq + at.q,
                 kv_head = size_t(p_.packs_k ? 0 : s.b) * p_.Hkv + at.h / group();
    for (size_t k = first_key(p_, s, q); k < past_last_key(p_, s, q); k++) {
      const Place place{s.b, at.h, q, int(k), s.Sq, s.Sk};
      if (hides(place)) continue;
      const size_t j = kv_head * p_.Sk + s.first_key + k;
      const Pair pair = pair_of(i, j, place);
      for (int d = 0; d < p_.D; d++) add(dQ, d, pair.dS, pair.dS_variance, pair.dS_rounding, p_.K[j * p_.D + d]);
    }
    finish(dQ, scale_of(p_), lse_error(rows_[i]));
    return dQ;
  }
  // Computes dK and dV of row at.q in head at.h of K and V. They are 0 if the row is no key.
  void of_key(const Row& at, Gradient& dK, Gradient& dV) const {
    if (!is_key(p_, at)) return;
    const Sequence s = sequence_of_key(p_, at);
    const size_t k = size_t(at.q - s.first_key), q_batch = p_.packs_q ? 0 : s.b;
    const size_t j = (size_t(at.b) * p_.Hkv + at.h) * p_.Sk + at.q;
    for (int h = at.h * group(); h < (at.h + 1) * group(); h++) {
      for (int q = 0; q < s.Sq; q++) {
        if (k < first_key(p_, s, q) || k >= past_last_key(p_, s, q)) continue;
        const Place place{s.b, h, q, int(k), s.Sq, s.Sk};
        if (hides(place)) continue;
        const size_t i = (q_batch * p_.Hq + h) * p_.Sq + s.first_query + q;
        const Pair pair = pair_of(i, j, place);
        for (int d = 0; d < p_.D; d++)
          add(dK, d, pair.dS, copies_ * pair.dS_variance, pair.dS_rounding, p_.Q[i * p_.D + d]);
        for (int d = 0; d < p_.d_v(); d++)
          add(dV, d, pair.P, copies_ * pair.P_variance, pair.P_rounding, dO_[i * p_.d_v() + d]);
      }
    }
    finish(dK, scale_of(p_), 0);
    finish(dV, 1, 0);
  }
  struct Columns {  // first, first + step, ... below end
    int first, step, end;
  };
  // Computes elements of a row of dBias: those in some columns, or with sums_keys one element, the sum over
  // these columns. b, h or q is -1 if dBias is summed over all batches, heads or queries. A kernel sums in
  // fp32 and stores dBias as `type`. Does not support packed sequences.
  Gradient of_bias(int b, int h, int q, const Columns& columns, bool sums_keys, const Type& type) const {
    Gradient sum(sums_keys ? 1 : (columns.end - columns.first + columns.step - 1) / columns.step);
    const auto range = [](int i, int size) { return i < 0 ? std::make_pair(0, size) : std::make_pair(i, i + 1); };
    const auto [b_begin, b_end] = range(b, p_.B);
    const auto [h_begin, h_end] = range(h, p_.Hq);
    for (int batch = b_begin; batch < b_end; batch++) {
      const Sequence s = sequence_of(p_, batch);
      const auto [q_begin, q_end] = range(q, s.Sq);
      for (int head = h_begin; head < h_end; head++) {
        for (int query = q_begin; query < std::min(q_end, s.Sq); query++) {
          const size_t i = (size_t(batch) * p_.Hq + head) * p_.Sq + s.first_query + query;
          double row_error = 0;  // of dP - delta, if the errors of all keys are equal: they share delta
          for (int column = columns.first; column < columns.end; column += columns.step) {
            const int k = p_.bias.of_last_keys ? column + s.Sk - p_.bias.keys : column;
            if (k < int(first_key(p_, s, query)) || k >= int(past_last_key(p_, s, query))) continue;
            const Place place{batch, head, query, k, s.Sq, s.Sk};
            if (hides(place)) continue;
            const size_t j = (size_t(batch) * p_.Hkv + head / group()) * p_.Sk + s.first_key + k;
            const Pair pair = pair_of(i, j, place);
            const size_t at = sums_keys ? 0 : (column - columns.first) / columns.step;
            sum.x[at] += pair.dLogit;
            sum.variance[at] += pair.dLogit_variance;
            sum.total[at] += std::fabs(pair.dLogit);
            row_error += pair.dP_error;
          }
          if (sums_keys) sum.variance[0] += row_error * row_error;
        }
      }
    }
    const double unit = std::sqrt(0.541 / 12) * std::ldexp(1.0, -type.mantissa_bits);
    const double tiny = std::max(type.smallest * std::ldexp(1.0, -type.mantissa_bits), double(FLT_MIN));
    for (size_t at = 0; at < sum.x.size(); at++) {
      if (sum.variance[at] == 0) continue;  // no visible pair: exactly 0
      sum.variance[at] += std::pow(std::ldexp(sum.total[at], -22), 2) + std::pow(sum.x[at] * unit, 2) + tiny * tiny;
    }
    return sum;
  }
  // The gradient of the sink of query head h, which a kernel sums in fp32.
  Gradient of_sink(int h) const {
    Gradient sink(1);
    double terms = 0;
    for (int b = 0; b < batches_of(p_, Tensor::Q); b++) {
      for (int q = 0; q < p_.Sq; q++) {
        if (!is_query(p_, {b, h, q})) continue;
        const OfRow& row = rows_[(size_t(b) * p_.Hq + h) * p_.Sq + q];
        if (row.LSE == -std::numeric_limits<double>::infinity()) continue;
        const double P = std::exp(p_.sinks[h] - row.LSE),
                     error = std::ldexp(1.0, -20) + lse_error(row);
        sink.x[0] -= P * row.delta;
        sink.variance[0] += std::pow(P * error * (std::fabs(row.delta) + row.dO_norm), 2);
        terms += std::fabs(P * row.delta);
      }
    }
    sink.variance[0] += std::pow(std::ldexp(terms, -22), 2) + std::ldexp(1.0, -252);
    return sink;
  }

 private:
  struct OfRow {
    double LSE = 0, delta = 0, q_norm = 0, dO_norm = 0;
  };
  struct Place {  // of a pair in its sequence
    int b, h, q, k, Sq, Sk;
  };
  struct Logit {  // of a scaled score s; slope: its derivative with respect to s
    double value, slope, slope_error;
  };
  struct Pair {  // a query and a visible key
    double P = 0, P_variance = 0, P_rounding = 0, dS = 0, dS_variance = 0, dS_rounding = 0;
    // P * (dP - delta), not rounded, and its errors: all of them, and the one from dP and delta.
    double dLogit = 0, dLogit_variance = 0, dP_error = 0;
  };

  int group() const { return p_.Hq / p_.Hkv; }
  // The relative error of P = exp(x - LSE) that comes from LSE being a float.
  static double lse_error(const OfRow& row) {
    return std::isfinite(row.LSE) ? std::ldexp(std::fabs(row.LSE), -22) : 0;
  }

  bool hides(const Place& at) const {
    return p_.sees && !p_.sees(at.b, at.h, at.q, at.k, at.Sq, at.Sk);
  }

  static std::vector<double> norms(const float* x, size_t rows, int width) {
    std::vector<double> found(rows);
    for (size_t i = 0; i < rows; i++)
      found[i] = std::sqrt(dot(x + i * width, x + i * width, width));
    return found;
  }

  // s_error: absolute error of s in a kernel.
  Logit logit_of(double s, double s_error, const Place& at) const {
    if (p_.softcap != 0) {
      const double t = std::tanh(s / p_.softcap);
      // The slope falls with |s|, and a small softcap makes it change much within the error of s.
      const double t_of_least = std::tanh(std::max(std::fabs(s) - s_error, 0.0) / p_.softcap);
      const double by_s = t * t - t_of_least * t_of_least;
      return {p_.softcap * t, 1 - t * t,
              by_s + 2 * std::fabs(t) * tanh_error_ + std::ldexp(1.0, -21)};
    }
    if (!p_.logit) return {s, 1, 0};
    // Finite differences: kernels compute the slope with dual numbers.
    const double step = std::ldexp(std::max(1.0, std::fabs(s)), -17);
    const auto f = [&](double at_s) { return p_.logit(at_s, at.b, at.h, at.q, at.k, at.Sq, at.Sk); };
    const double value = f(s), above = f(s + step), below = f(s - step);
    const double slope = (above - below) / (2 * step);
    const double curvature = (above - 2 * value + below) / (step * step);
    return {value, slope,
            std::fabs(curvature) * s_error + std::ldexp(std::fabs(slope), -20) +
                (logit_error_ > 0 ? std::ldexp(1.0, -10) : 0)};
  }

  // The pair of row i of Q and row j of K.
  Pair pair_of(size_t i, size_t j, const Place& place) const {
    const OfRow& row = rows_[i];
    if (row.LSE == -std::numeric_limits<double>::infinity()) return {};  // all weights are 0
    const double s = scale_of(p_) * dot(p_.Q + i * p_.D, p_.K + j * p_.D, p_.D);
    const double s_error = std::ldexp(std::fabs(scale_of(p_)) * row.q_norm * k_norms_[j], -23);
    const auto [unbiased, slope, of_slope] = logit_of(s, s_error, place);
    const double bias = p_.bias.of(place.b, place.h, place.q, place.k, place.Sk), x = unbiased + bias;
    if (bias == -std::numeric_limits<double>::infinity()) return {};
    const double P = std::exp(x - row.LSE),
                 dP = dot(dO_ + i * p_.d_v(), p_.V + j * p_.d_v(), p_.d_v());
    const double dS = P * (dP - row.delta) * slope;
    // Relative errors of P, from the product, the exponent, LSE and tanh; absolute errors of dP -
    // delta and of the slope.
    const double of_p = std::fabs(slope) * s_error + std::ldexp(std::max(std::fabs(x), std::fabs(unbiased)), -22) +
                        lse_error(row) + tanh_error_ * std::fabs(unbiased) + logit_error_;
    const double of_dp = std::ldexp(row.dO_norm * v_norms_[j] + std::fabs(row.delta), -23);
    const double rounding = unit_ * unit_ + of_p * of_p;
    Pair pair;
    pair.P = P;
    pair.P_variance = P * P * rounding + tiny_ * tiny_;
    pair.P_rounding = rounding_error(P);
    pair.dS = dS;
    pair.dS_variance = dS * dS * rounding + tiny_ * tiny_;
    pair.dS_rounding = rounding_error(dS);
    pair.dS_variance +=
        std::pow(P * slope * of_dp, 2) + std::pow(P * (dP - row.delta) * of_slope, 2);
    const double of_flush = FLT_MIN * (dP - row.delta);  // if P is flushed to 0
    pair.dS_variance += std::pow(of_flush * slope, 2);
    pair.dLogit = P * (dP - row.delta);
    pair.dP_error = P * of_dp;
    pair.dLogit_variance = std::pow(pair.dLogit * (of_p + std::ldexp(1.0, -22)), 2) + std::pow(pair.dP_error, 2) +
                           of_flush * of_flush + double(FLT_MIN) * FLT_MIN;
    return pair;
  }
  // The error of rounding x to nearest; 0 unless x is a normal number.
  double rounding_error(double x) const {
    const double unit = ulp(type_, x);
    return unit > 0 ? std::nearbyint(x / unit) * unit - x : 0;
  }
  static void add(Gradient& sum, int d, double weight, double variance, double rounding, double x) {
    sum.x[d] += weight * x;
    sum.variance[d] += variance * x * x;
    sum.total[d] += x;
    sum.rounded[d] += rounding * x;
  }
  // `error`: a relative error that all terms have in common. Equal weights have equal rounding
  // errors, which add up: 255 weights of 1/255 in bf16 change the sum by 2^-8. So the variance is at
  // least the square of the sum of the rounding errors. This sum excludes subnormal numbers, whose
  // error has the variance tiny_^2.
  void finish(Gradient& sum, double scale, double error) const {
    for (size_t d = 0; d < sum.x.size(); d++) {
      sum.variance[d] = std::max(sum.variance[d], std::pow(sum.rounded[d], 2));
      sum.variance[d] += std::pow(tiny_ * sum.total[d], 2);
      sum.x[d] *= scale;
      sum.variance[d] *= scale * scale;
      if (sum.variance[d] == 0) continue;  // no visible pair: exactly 0
      sum.variance[d] += sum.x[d] * sum.x[d] * (unit_ * unit_ + error * error) + tiny_ * tiny_;
    }
  }

  const Problem& p_;
  const float* const dO_;
  const Type type_;
  double unit_;  // rms of the relative rounding error, see Tolerance::rel_rms_of()
  double tiny_;  // rms of the absolute rounding error of subnormal numbers
  double tanh_error_, logit_error_;
  int copies_;  // number of heads with equal rounding errors
  std::vector<OfRow> rows_;
  std::vector<double> k_norms_, v_norms_;
};

// Accumulates the errors of rows of a gradient, in units of the expected rounding error. An
// absolute or relative limit would accept wrong gradients or reject right ones, since the terms of
// a gradient may cancel. All comparisons with limits fail on NaN.
class GradientComparison {
 public:
  // Limits of the rms error over all elements and of the largest error.
  static constexpr double rms_limit = 1.5, largest_limit = 8;

  explicit GradientComparison(const char* name) : name_(name) {}

  double max_abs_err = 0;
  long rows = 0;

  void add(const Row& at, const Gradient& want, const float* got) {
    rows++;
    size_t hash = 0;
    for (double x : want.x) hash = hash * 1000003 + std::hash<float>()(float(x));
    distinct_.insert(hash);
    for (size_t d = 0; d < want.x.size(); d++) {
      const double err = distance(want.x[d], got[d]);
      const double units = err == 0 ? 0 : err / std::sqrt(want.variance[d]);
      squares_err_ += err * err;
      squares_ref_ += want.x[d] * want.x[d];
      variance_ += want.variance[d];
      if (!(err <= max_abs_err)) max_abs_err = err;
      if (!(units <= largest_)) {
        largest_ = units;
        worst_ = format("%s(b=%d,h=%d,row=%d,d=%d) ref=%.9g got=%.9g err=%.3g", name_, at.b, at.h,
                        at.q, int(d), want.x[d], double(got[d]), err);
      }
    }
  }
  // Relative errors; 0 if the gradient is not larger than the expected rounding error.
  double rel_rms() const {
    return squares_ref_ > variance_ ? std::sqrt(squares_err_ / squares_ref_) : 0;
  }
  double rel_rms_limit() const {
    return squares_ref_ > variance_ ? rms_limit * std::sqrt(variance_ / squares_ref_) : 0;
  }
  double rms() const { return variance_ > 0 ? std::sqrt(squares_err_ / variance_) : 0; }
  double largest() const { return largest_; }
  // Returns an empty string, or a sentence with the worst element and the limit that it exceeds.
  std::string verdict() const {
    if (!(largest_ <= largest_limit)) {
      return worst_ +
             format(", %.3g times the expected rounding error, tol=%g", largest_, largest_limit);
    }
    // The limit is higher for few rows, since the errors of a row are correlated. Equal rows have equal errors.
    const double limit = rms_limit * (1 + 3 / std::sqrt(double(std::max<size_t>(distinct_.size(), 1))));
    if (!(rms() <= limit)) {
      return format("%s: rms error is %.3g times the expected one, tol=%.3g; worst ", name_, rms(),
                    limit) +
             worst_;
    }
    return "";
  }

 private:
  const char* const name_;
  double squares_err_ = 0, squares_ref_ = 0, variance_ = 0, largest_ = 0;
  std::set<size_t> distinct_;  // hashes of the rows
  std::string worst_;
};

}  // namespace reference

#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#pragma GCC pop_options
#endif

#endif
