// CPU reference for attention, in double. It shares nothing with the kernels: no code, no types, no
// strides. The harness of sdpa.cu includes this file, and so do the tests.
//
//   O = softmax(scale * Q @ K.T + mask) @ V,   LSE = log(sum(exp(scale * Q @ K.T + mask)))

#ifndef SDPA_REFERENCE_CPP
#define SDPA_REFERENCE_CPP

#include <atomic>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <thread>
#include <vector>

namespace reference {

enum class Mask { none, bottom_right, top_left };

struct Problem {
  int B, Hq, Hkv, Sq, Sk, D;
  Mask mask;
  double scale;
  const float *Q, *K, *V;  // contiguous [B,Hq,Sq,D], [B,Hkv,Sk,D], [B,Hkv,Sk,D], already rounded to
                           // the type that the kernel reads
  int window_left = -1, window_right = -1;  // keys to each side of the query's own position; -1: all
};

struct Row {  // one query row
  int b, h, q;
};

// What the kernel's row must come out as. `open[d]` is 1 where V has a NaN or inf at a key that is
// masked for the row: 0 * NaN is NaN by the dense formula and nothing by the sparse one, so there
// NaN is right as well as O[d].
struct Result {
  std::vector<double> O;  // [D]
  double LSE;
  std::vector<char> open;  // [D]
};

// The first key that query q sees, and the one past the last. Its own position is key q, or with
// bottom-right such that the last query has the last key; a mask hides all keys after it.
inline size_t clamp_key(const Problem& p, long long k) {
  return size_t(k < 0 ? 0 : k > p.Sk ? p.Sk : k);
}
inline size_t first_key(const Problem& p, long long q) {
  if (p.window_left < 0) return 0;
  return clamp_key(p, (p.mask == Mask::bottom_right ? q + p.Sk - p.Sq : q) - p.window_left);
}
inline size_t past_last_key(const Problem& p, long long q) {
  if (p.mask == Mask::none && p.window_right < 0) return size_t(p.Sk);
  const long long own = p.mask == Mask::bottom_right ? q + p.Sk - p.Sq : q;
  return clamp_key(p, (p.mask == Mask::none ? own + p.window_right : own) + 1);
}

// Visible (query, key) pairs of one head.
inline double visible_pairs(const Problem& p) {
  double pairs = 0;
  for (int q = 0; q < p.Sq; q++) pairs += double(past_last_key(p, q) - first_key(p, q));
  return pairs;
}

// Runs body(i) for i in [0, n) on all cores.
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

inline double dot(const float* x, const float* y, int n) {  // n a multiple of 8
  double sums[8] = {};  // independent chains, which the compiler may put into vector registers
  for (int i = 0; i < n; i += 8) {
    for (int j = 0; j < 8; j++) sums[j] += double(x[i + j]) * double(y[i + j]);
  }
  double sum = 0;
  for (int j = 0; j < 8; j++) sum += sums[j];
  return sum;
}

// One row. A row whose every visible logit is -inf (or that sees no key) gives O = 0, LSE = -inf.
inline Result attend(const Problem& p, const Row& row) {
  const int h_kv = row.h / (p.Hq / p.Hkv), D = p.D;
  const float* const Q = p.Q + (((size_t)row.b * p.Hq + row.h) * p.Sq + row.q) * D;
  const float* const K = p.K + ((size_t)row.b * p.Hkv + h_kv) * p.Sk * D;
  const float* const V = p.V + ((size_t)row.b * p.Hkv + h_kv) * p.Sk * D;
  const size_t first = first_key(p, row.q), end = past_last_key(p, row.q);
  const double infinity = std::numeric_limits<double>::infinity();

  Result result{std::vector<double>(D, 0.0), -infinity, std::vector<char>(D, 0)};
  const auto leave_open = [&](size_t k) {
    for (int d = 0; d < D; d++) {
      if (!std::isfinite(V[k * D + d])) result.open[d] = 1;
    }
  };
  for (size_t k = 0; k < (size_t)p.Sk; k++) {
    if (k < first || k >= end) leave_open(k);
  }
  std::vector<double> logits(end);
  double max = -infinity;
  bool any_nan = false;
  for (size_t k = first; k < end; k++) {
    logits[k] = p.scale * dot(Q, K + k * D, D);
    if (std::isnan(logits[k])) any_nan = true;
    if (logits[k] > max) max = logits[k];
  }
  if (max == -infinity && !any_nan) {  // every weight is 0
    for (size_t k = first; k < end; k++) leave_open(k);
    return result;
  }
  double sum = 0;
  for (size_t k = first; k < end; k++) {
    const double weight = std::exp(logits[k] - max);  // inf - inf = NaN: a row with a logit of +inf
    sum += weight;
    for (int d = 0; d < D; d++) result.O[d] += weight * double(V[k * D + d]);
  }
  for (int d = 0; d < D; d++) result.O[d] /= sum;
  result.LSE = max + std::log(sum);
  return result;
}

inline std::vector<Result> attend(const Problem& p, const std::vector<Row>& rows) {
  std::vector<Result> results(rows.size());
  parallel_for(rows.size(), [&](size_t i) { results[i] = attend(p, rows[i]); });
  return results;
}

}  // namespace reference

#endif
