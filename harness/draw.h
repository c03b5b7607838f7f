// Draws sequence lengths, starts and sinks from a seed.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "problem.h"

namespace SDPA_NAMESPACE {
namespace {

// Of 8 successive heads, one has no sink (NaN or inf if the inputs contain those), one has a sink whose
// weight vanishes, and one has a sink that outweighs all keys; not the first head, so that one is left.
vector<float> drawn_sinks(const Problem& p, uint64_t seed) {
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
// With odd seeds, half of the lengths are a multiple of `unit`, one less or one more.
int near_edge(int length, int most, int unit, uint64_t seed, int b) {
  const uint64_t r = reference::mix(seed * 1000037 + b);
  if (seed % 2 == 0 || r % 2 || most < unit - 1) return length;
  return std::min((1 + std::max(length, 0) % std::max(most / unit, 1)) * unit - 1 + int(r / 2 % 3),
                  most);
}
int rows_at_edge() { return std::min(line.tiles[0].block_m, 64); }  // of a warpgroup or a tile
int keys_at_edge() { return line.tiles[0].block_n; }

// Of 8 successive sequences, one length exceeds Sk, one is negative, one is 1, and one is Sk or 0.
vector<int> drawn_lengths(const Problem& p, uint64_t seed) {
  const int most = p.page_size && !p.narrow_table ? p.Sk : p.Sk + 9;
  vector<int> lengths(p.B);
  for (int b = 0; b < p.B; b++) {
    const uint64_t turn = (seed + b) % 8;
    lengths[b] = near_edge(int(reference::mix(seed * 1000003 + b) % (p.Sk + 1)), p.Sk,
                           keys_at_edge(), seed, b);
    if (turn == 4) lengths[b] = (seed + b) / 8 % 2 ? 0 : p.Sk;
    if (turn >= 5) lengths[b] = turn == 5 ? most : turn == 6 ? -4 : std::min(1, most);
  }
  return lengths;
}
// Lengths from -4 to more than Sq.
vector<int> drawn_q_lengths(const Problem& p, uint64_t seed) {
  vector<int> lengths(p.B);
  for (int b = 0; b < p.B; b++) {
    lengths[b] = near_edge(int(reference::mix(seed * 1000033 + b) % (p.Sq + 12)) - 4, p.Sq,
                           rows_at_edge(), seed, b);
  }
  return lengths;
}
// Of 8 successive sequences, one value is negative, one is 0, and one is Sk or more.
vector<int> drawn_k_firsts(const Problem& p, uint64_t seed) {
  vector<int> firsts(p.B);
  for (int b = 0; b < p.B; b++) {
    const uint64_t turn = (seed + b) % 8;
    firsts[b] = turn == 1   ? -3
                : turn == 3 ? 0
                            : int(reference::mix(seed * 1000081 + b) % (p.Sk / 2 + 1));
    if (turn == 4) firsts[b] = p.Sk + int(seed / 8 % 2);
  }
  return firsts;
}
// The number of keys of each sequence: its length, limited by Sk and most_keys.
vector<int> clamped_k_lengths(const Problem& p, uint64_t seed) {
  vector<int> lengths = p.has_lengths ? drawn_lengths(p, seed) : vector<int>(p.B, p.Sk);
  for (int& length : lengths) {
    length = std::max(0, std::min(length, p.Sk));
    if (p.most_keys) length = std::min(length, p.most_keys);
  }
  return lengths;
}

// A third of the sequences is empty. With even seeds, up to Sk / 8 rows at either end of K belong
// to no sequence.
vector<int> drawn_starts(const Problem& p, Tensor t, uint64_t seed) {
  const int rows = t == Tensor::Q ? p.Sq : p.Sk,
            most_left = t == Tensor::Q || seed % 2 ? 0 : rows / 8;
  seed += 1 + uint64_t(t);
  vector<int> starts(p.B + 1, rows);
  for (int b = 0; b < p.B; b++) {
    const uint64_t r = reference::mix(seed * 1000003 + b);
    starts[b] = b == 0 ? 0 : r % 3 == 0 ? starts[b - 1] : int(r / 3 % (rows + 1));
  }
  std::sort(starts.begin(), starts.end());
  const int first = int(reference::mix(seed + 7) % (most_left + 1)),
            end = rows - int(reference::mix(seed + 8) % (most_left + 1));
  for (int& start : starts) start = std::max(first, std::min(start, end));
  for (int b = 1; b < p.B; b++) {
    const int length = starts[b] - starts[b - 1];
    starts[b] =
        starts[b - 1] +
        near_edge(length, length, t == Tensor::Q ? rows_at_edge() : keys_at_edge(), seed, b);
  }
  return starts;
}
// The starts as the kernel gets them. The kernel clamps them to the tensor, so starts at its ends
// may be moved out of bounds.
vector<int> beyond_tensor(vector<int> starts, int rows, uint64_t seed) {
  constexpr int far[] = {1, 100, 1000000}, most = std::numeric_limits<int>::max();
  for (size_t b = 0; b < starts.size(); b++) {
    const uint64_t r = reference::mix(seed * 1000033 + b) % 5;
    if (starts[b] == rows)
      starts[b] = r < 3 ? rows + far[r] : r == 3 ? most : rows;
    else if (starts[b] == 0)
      starts[b] = r < 3 ? -far[r] : r == 3 ? -most - 1 : 0;
  }
  return starts;
}

}  // namespace
}  // namespace SDPA_NAMESPACE
