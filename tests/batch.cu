// SdpaParams::batch_invariant, on the CPU backend: the results of a sequence in random batches are
// bitwise equal to those of the sequence alone, for every kind of call. Without batch_invariant
// some results must differ, which shows that the batches can detect it.
#define SDPA_NO_MAIN
#ifndef SDPA_SOURCE
#define SDPA_SOURCE "../sdpa.cu"
#endif
#include SDPA_SOURCE

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "../reference.cpp"
#include <doctest/doctest.h>

using namespace SDPA_NAMESPACE;
using std::string;
using std::vector;

namespace {

constexpr int D = Defines::head_dim, Dv = Defines::d_v;

struct Rng {
  uint64_t state;
  int operator()(int below) { return int((state = reference::mix(state)) % uint64_t(below)); }
};

// Element d of a row of a tensor. Some rows of Q are so large that a stale row max does not suffice
// for later keys. All rows of every fifth sequence are NaN.
float element(int tensor, int id, int head, int row, int d) {
  const uint64_t of_row = reference::mix(reference::mix(uint64_t(id) * 4 + tensor) + uint64_t(head) * 1000003 + row);
  const float x = float(reference::mix(of_row + d) % 4096) / 1024 - 2;
  if (tensor != 0) return x;
  if (id % 5 == 4) return NAN;
  constexpr float factors[] = {1, 1, 0.25f, 12};
  return x * factors[of_row % 4];
}

// A sequence with its rows of Q [Hq,Sq,D], K and V.
struct Own {
  int id, Sq, Sk;
  vector<KeyValue> Q, K, V;
  Own(int number, int queries, int keys, int Hq, int Hkv) : id(number), Sq(queries), Sk(keys) {
    const auto fill = [&](vector<KeyValue>& x, int tensor, int heads, int rows, int width) {
      for (int i = 0; i < heads * rows * width; i++) {
        x.push_back(rounded<KeyValue>(element(tensor, id, i / width / rows, i / width % rows, i % width)));
      }
    };
    fill(Q, 0, Hq, Sq, D);
    fill(K, 1, Hkv, Sk, D);
    fill(V, 2, Hkv, Sk, Dv);
  }
};

// The layout of the sequences of a call: packed or batched; K and V also paged.
enum class Layout { plain, lengths, packed, packed_q, pages, packed_pages };
struct Kind {
  Layout layout;
  bool packs_k() const { return layout == Layout::packed; }
  bool packs_q() const { return packs_k() || layout == Layout::packed_q || layout == Layout::packed_pages; }
  bool has_pages() const { return layout == Layout::pages || layout == Layout::packed_pages; }
};

// The device memory of a call.
struct Memory {
  vector<void*> all;
  template <class T> T* hold(const vector<T>& x) {
    void* pointer = nullptr;
    cudaMalloc(&pointer, x.size() * sizeof(T));
    all.push_back(pointer);
    memcpy(pointer, x.data(), x.size() * sizeof(T));
    return static_cast<T*>(pointer);
  }
  ~Memory() {
    for (void* x : all) cudaFree(x);
  }
};

using Bits = vector<unsigned char>;  // of O and LSE of one sequence
constexpr float unwritten = -12345;

// Runs a call with the mask, heads and batch_invariant of p. Unused rows, which exist with `spare`,
// are NaN.
vector<Bits> results(const Kind& kind, const vector<const Own*>& sequences, Rng draw, bool spare, SdpaParams p) {
  Memory memory;
  const int B = int(sequences.size()), Hq = p.Hq, Hkv = p.Hkv;
  const bool is_plain = kind.layout == Layout::plain;
  const auto room = [&](int most) { return spare && !is_plain ? draw(most) : 0; };
  vector<int> q_starts = {0}, k_starts = {0}, q_lengths, k_lengths;
  int Sq = 0, Sk = 0;
  for (const Own* x : sequences) {
    Sq = std::max(Sq, x->Sq);
    Sk = std::max(Sk, x->Sk);
    q_lengths.push_back(x->Sq);
    k_lengths.push_back(x->Sk);
    q_starts.push_back(q_starts.back() + x->Sq);
    k_starts.push_back(k_starts.back() + x->Sk);
  }
  p.B = B;
  p.D = D;
  p.Dv = Dv;
  p.Sq = (kind.packs_q() ? q_starts.back() : Sq) + room(100);
  p.Sk = (kind.packs_k() ? k_starts.back() : Sk) + room(3000);
  const int pages[] = {16, 48, 64}, page = pages[room(3)];
  const bool rows_first = room(2);  // Q and O are [B,S,H,D]
  if (kind.has_pages()) p.Sk = (p.Sk + page - 1) / page * page;
  const int q_batches = kind.packs_q() ? 1 : B, k_batches = kind.packs_k() ? 1 : B, page_stride = p.Sk / page;
  vector<int> table(size_t(B) * page_stride);
  if (kind.has_pages()) {
    std::iota(table.begin(), table.end(), 0);
    for (size_t i = table.size(); i > 1; i--) std::swap(table[i - 1], table[draw(int(i))]);
  }
  vector<KeyValue> Q(size_t(q_batches) * Hq * p.Sq * D, rounded<KeyValue>(NAN));
  vector<KeyValue> K(size_t(k_batches) * Hkv * p.Sk * D, rounded<KeyValue>(NAN));
  vector<KeyValue> V(K.size() / D * Dv, rounded<KeyValue>(NAN));
  const auto q_row = [&](int b, int h, int row) {
    const size_t of_head = kind.packs_q() ? q_starts[b] + row : row, batch = kind.packs_q() ? 0 : size_t(b) * Hq * p.Sq;
    return batch + (rows_first ? of_head * Hq + h : h * p.Sq + of_head);
  };
  const auto lse_row = [&](int b, int h, int row) {
    return kind.packs_q() ? size_t(h) * p.Sq + q_starts[b] + row : (size_t(b) * Hq + h) * p.Sq + row;
  };
  const auto k_row = [&](int b, int h, int row) {
    if (kind.has_pages()) return (size_t(table[size_t(b) * page_stride + row / page]) * Hkv + h) * page + row % page;
    return kind.packs_k() ? size_t(h) * p.Sk + k_starts[b] + row : (size_t(b) * Hkv + h) * p.Sk + row;
  };
  for (int b = 0; b < B; b++) {
    const Own& x = *sequences[b];
    for (int i = 0; i < Hq * x.Sq; i++) std::copy_n(&x.Q[i * D], D, &Q[q_row(b, i / x.Sq, i % x.Sq) * D]);
    for (int i = 0; i < Hkv * x.Sk; i++) {
      const size_t row = k_row(b, i / x.Sk, i % x.Sk);
      std::copy_n(&x.K[i * D], D, &K[row * D]);
      std::copy_n(&x.V[i * Dv], Dv, &V[row * Dv]);
    }
  }
  p.Q = memory.hold(Q);
  p.K = memory.hold(K);
  p.V = memory.hold(V);
  p.O = memory.hold(vector<Output>(Q.size() / D * Dv));
  p.LSE = memory.hold(vector<float>(Q.size() / D, unwritten));
  const int rows = kind.has_pages() ? page : p.Sk;
  p.q = {int64_t(Hq) * p.Sq * D, int64_t(p.Sq) * D, D};
  p.o = {int64_t(Hq) * p.Sq * Dv, int64_t(p.Sq) * Dv, Dv};
  if (rows_first) {
    p.q.head = D;
    p.q.row = Hq * D;
    p.o.head = Dv;
    p.o.row = Hq * Dv;
  }
  p.k = {int64_t(Hkv) * rows * D, int64_t(rows) * D, D};
  p.v = {int64_t(Hkv) * rows * Dv, int64_t(rows) * Dv, Dv};
  if (!is_plain) {
    if (kind.packs_q()) p.q_starts = memory.hold(q_starts);
    else p.q_lengths = memory.hold(q_lengths);
    if (kind.packs_k()) p.k_starts = memory.hold(k_starts);
    else p.k_lengths = memory.hold(k_lengths);
  }
  if (kind.has_pages()) {
    p.page_table = memory.hold(table);
    p.page_stride = page_stride;
    p.page_size = page;
    p.pages = int(table.size());
  }
  if (!is_plain && spare && draw(2)) p.most_keys = Sk + draw(100);
  vector<float> factors(size_t(3) * B * Hq);  // of a sequence and a head
  for (size_t i = 0; i < factors.size(); i++) factors[i] = 0.5f + float((sequences[i / Hq % B]->id + i % Hq) % 7) / 8;
  if (Defines::kv_bytes == 1) {
    const float* const held = memory.hold(factors);
    p.q_descale = {held, Hq, 1};
    p.k_descale = {held + B * Hq, Hq, 1};
    p.v_descale = {held + 2 * B * Hq, Hq, 1};
  }
  if (Defines::use_bias != 0) {  // of a sequence, for all heads
    vector<Bias> bias(size_t(B) * Sq * Sk, rounded<Bias>(1));
    for (int b = 0; b < B; b++) {
      const Own& x = *sequences[b];
      for (int i = 0; i < x.Sq * x.Sk; i++) {
        const float drawn = element(3, x.id, 0, i / x.Sk, i % x.Sk);
        bias[(size_t(b) * Sq + i / x.Sk) * Sk + i % x.Sk] = rounded<Bias>(Defines::adds_bias ? drawn : drawn > -1);
      }
    }
    p.bias = memory.hold(bias);
    p.bias_strides = {int64_t(Sq) * Sk, 0, Sk};
  }
  p.scratch = memory.hold(vector<unsigned char>(sdpa_scratch_bytes(p) + 1, 0xff));
  p.workspace = memory.hold(vector<unsigned char>(sdpa_workspace_bytes(p)));
  const SdpaStatus status = sdpa_forward(p, /*stream=*/0);
  REQUIRE(string(status.text) == "");
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  vector<Bits> bits(B);
  bool is_whole = true;
  for (int b = 0; b < B; b++) {
    for (int h = 0; h < Hq; h++) {
      for (int row = 0; row < sequences[b]->Sq; row++) {
        const auto add = [&](const void* x, size_t bytes) {
          const auto* const first = static_cast<const unsigned char*>(x);
          bits[b].insert(bits[b].end(), first, first + bytes);
        };
        add(p.O + q_row(b, h, row) * Dv, Dv * sizeof(Output));
        add(p.LSE + lse_row(b, h, row), sizeof(float));
        is_whole = is_whole && p.LSE[lse_row(b, h, row)] != unwritten;
      }
    }
  }
  REQUIRE(is_whole);
  return bits;
}

// The number of sequences in `batches` random batches whose results differ from those of the
// sequence alone. `rows` and `keys` are the sizes of the sequences; a plain call uses the first
// ones.
struct Sizes { vector<int> rows, keys; };
int different(const Kind& kind, const Sizes& sizes, SdpaParams p, int batches, uint64_t seed) {
  constexpr int count = 6, most = 6;
  const bool is_plain = kind.layout == Layout::plain;
  Rng draw{seed};
  vector<Own> own;
  for (int i = 0; i < count; i++) {
    const auto of = [&](const vector<int>& x) { return x[is_plain ? 0 : i % x.size()]; };
    own.push_back(Own(i, of(sizes.rows), of(sizes.keys), p.Hq, p.Hkv));
  }
  vector<Bits> alone;
  for (const Own& x : own) alone.push_back(results(kind, {&x}, draw, /*spare=*/false, p)[0]);
  int wrong = 0;
  for (int n = 0; n < batches; n++) {
    vector<const Own*> batch;
    for (int i = 1 + draw(most); i > 0; i--) batch.push_back(&own[draw(count)]);
    const vector<Bits> together = results(kind, batch, Rng{seed + 1000 + n}, /*spare=*/true, p);
    for (size_t b = 0; b < batch.size(); b++) wrong += together[b] != alone[batch[b]->id];
  }
  return wrong;
}

vector<Kind> kinds() {
  vector<Kind> all = {{Layout::plain}};
  if (Defines::use_pages) return {{Layout::pages}, {Layout::packed_pages}};
  if (Defines::use_lengths) all.insert(all.end(), {{Layout::lengths}, {Layout::packed}, {Layout::packed_q}});
  return all;
}

struct Problem {
  Sizes sizes;
  int sms, keys_at_once;
  Causal causal;
  int window_left;
};
// The same for all kinds of calls. `may_differ`: without batch_invariant some results must differ.
void check(const Problem& x, bool may_differ) {
  int without = 0;
  for (const Kind& kind : kinds()) {
    INFO("layout " << int(kind.layout));
    simt::gpu.sms[0] = x.sms;
    if (!limits_keys<Defines> || Defines::use_tuned) simt::gpu.keys_at_once = x.keys_at_once;
    SdpaParams p{};
    p.Hq = x.causal == Causal::bottom_right ? 4 : 2;
    p.Hkv = 2;
    p.causal = x.causal;
    p.window_left = x.window_left;
    if (may_differ) without += different(kind, x.sizes, p, 4, 7);
    p.batch_invariant = 1;
    CHECK(different(kind, x.sizes, p, 5, 7) == 0);
  }
  simt::gpu = {};
  CHECK((without > 0 || !may_differ));
}
// A tile contains rows of other sequences, which affect the decisions of a warp.
constexpr bool meets_others = Defines::use_lengths && Defines::is_wgmma && Defines::use_lazy_max;
constexpr bool has_ranges = Defines::use_tuned || Defines::split_ctas == 0;

}  // namespace

TEST_CASE("prefill") {
  // A tile may have many rows of other sequences, or only one.
  check({{{127, 3, 63, 129}, {150, 90, 129, 333}}, 16, 65536, Causal::bottom_right, -1},
        meets_others || Defines::use_tuned);
}
TEST_CASE("chunks") { check({{{20, 33, 5}, {400, 170, 1000}}, 6, 192, Causal::bottom_right, -1}, meets_others); }
TEST_CASE("window") { check({{{130, 64, 7}, {260, 64, 90}}, 132, 65536, Causal::top_left, 50}, false); }
TEST_CASE("decode") { check({{{1}, {1500, 64, 2100, 129}}, 132, 65536, Causal::off, -1}, false); }
TEST_CASE("long_decode") {
  check({{{1}, {2600, 100, 1300}}, Defines::use_lengths ? 1 : 12, 65536, Causal::bottom_right, -1}, has_ranges);
}
