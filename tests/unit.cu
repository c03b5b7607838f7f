// Tests that need no GPU: knobs, inputs, reference, comparison, command line and the polynomial
// exp2. Includes the harness with the extensions of sweep.cu.
#define VEC_WIDTH 8
#define SWEEP_NO_MAIN
#include "sweep.cu"

#include <array>
#include <mutex>
#include <set>
#include <tuple>

#include "check.h"

using namespace SDPA_NAMESPACE;
using reference::Comparison;
using reference::dist_named;
using reference::fp16;
using reference::normal;
using reference::ulp;

#define CHECK_NEAR(a, b, tol) CHECK(std::fabs((a) - (b)) <= (tol))

static const bool has_dists = (add_dists(), true);

TEST_CASE("knob_text") {
  CHECK((index_of("64", "64 128 256") == 0 && index_of("256", "64 128 256") == 2));
  CHECK((index_of("6", "64 128 256") < 0 && index_of("640", "64 128 256") < 0));
  CHECK((index_of("", "64 128") < 0 && index_of("64 128", "64 128 256x") < 0));
  CHECK((is_one_of("BF16", "FP16 BF16") && !is_one_of("BF", "FP16 BF16")));
  CHECK((is_one_of("4", "4..256") && is_one_of("256", "4..256") && !is_one_of("3", "4..256") && !is_one_of("257", "4..256")));
  CHECK((!is_one_of("ON", "1..16") && !is_one_of("-1", "1..16") && !is_one_of("8x", "1..16") && !is_one_of("", "1..16")));
  CHECK(!is_one_of("99999999999999999999", "1..16"));
  CHECK((value_of("48") == 48 && value_of("") == -1 && value_of("4.5") == -1 && value_of("x") == -1));
  CHECK((value_of("1", "0 1") == 1 && value_of("BF16", "FP16 BF16") == 1 && value_of("48", "4..256") == 48));
}

static std::vector<float> make_input(const Problem& p, Tensor tensor) {
  auto x = reference::make_input(p, tensor, *dist_named(p.dist), p.seed, p.same_heads);
  round_to_elements(x, 1);
  return x;
}

// 8-bit elements: every value converts exactly, values between two round to nearest, and NaN.
TEST_CASE("bytes") {
  for (int bits = 0; bits < 256; bits++) {
    CHECK(element_value(DType::u8, bits) == bits - 128.0f);
    CHECK(element_bits(DType::u8, bits - 128.0f) == bits);
    const float x = element_value(DType::e4m3, bits);
    const int magnitude = bits & 0x7f;
    if (magnitude == 0x7f) {
      CHECK(std::isnan(x));
      continue;
    }
    const int exponent = magnitude >> 3, fraction = magnitude & 7;
    const double want =
        exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
    CHECK((x == float(bits & 0x80 ? -want : want) && element_bits(DType::e4m3, x) == bits));
    if (magnitude == 0x7e) continue;
    const float next = element_value(DType::e4m3, bits + 1), middle = (x + next) / 2;
    CHECK(element_bits(DType::e4m3, middle) == bits + bits % 2);  // a tie, to the even one
    CHECK(element_bits(DType::e4m3, std::nextafter(middle, x)) == bits);
    CHECK(element_bits(DType::e4m3, std::nextafter(middle, next)) == bits + 1);
  }
  const float inf = INFINITY;
  CHECK((element_bits(DType::e4m3, 1e9f) == 0x7e && element_bits(DType::e4m3, -inf) == 0xfe));
  CHECK(element_bits(DType::e4m3, NAN) == 0x7f);
  CHECK((element_bits(DType::u8, 1e9f) == 255 && element_bits(DType::u8, -1e9f) == 0));
  // The CPU backend's versions of the instructions.
  CHECK(cvt_rn_satfinite_e4m3x4(1, -2, 500, NAN) == 0x7f7ec038);
  CHECK(cvt_rn_f16x2_e4m3x2(0xffff017e) == 0x18005f00);  // 2^-9 and 448
  CHECK(prmt(0x03020100, 0x07060504, 0x6420) == 0x06040200);
  CHECK(prmt(0x03020100, 0x07060504, 0x7531) == 0x07050301);
  CHECK(prmt(0x00ff7f80, 0, 0xba98) == 0x00ff00ff);
  for (int u = 0; u < 256; u++) {
    const uint32_t pair = prmt(u | (255 - u) << 8, 0x64646464, 0x4140);
    const uint32_t halves = sub_f16x2(pair, 0x64806480);
    CHECK(simt::half_to_float(uint16_t(halves)) == float(u - 128));
    CHECK(simt::half_to_float(uint16_t(halves >> 16)) == float(127 - u));
  }
}

// Golden values from an independent model of the generator (exact: sums of integers over 2^16).
TEST_CASE("inputs") {
  CHECK(normal(0, Tensor::Q, 0) == 0.54412841796875f);
  CHECK(normal(0, Tensor::Q, 1) == -1.03558349609375f);
  CHECK(normal(0, Tensor::K, 0) == 0.471038818359375f);
  CHECK(normal(0, Tensor::V, 12345) == -0.40167236328125f);
  CHECK(normal(7, Tensor::Q, (uint64_t(1) << 33) + 5) == 1.49176025390625f);
  CHECK(normal(uint64_t(1) << 40, Tensor::V, 3) == 0.106292724609375f);
  Problem p;
  p.B = 100;
  p.Hq = p.Hkv = 1;
  p.Sq = p.Sk = 64;
  const auto moments = [&](Tensor tensor) {
    double sum = 0, squares = 0;
    const std::vector<float> x = make_input(p, tensor);
    for (float v : x) {
      sum += v;
      squares += double(v) * v;
    }
    return std::make_pair(sum / double(x.size()), squares / double(x.size()));
  };
  CHECK_NEAR(moments(Tensor::K).first, 0, 0.01);  // 409600 samples: standard error 0.0016
  CHECK_NEAR(moments(Tensor::K).second, 1, 0.02);
  p.dist = "large";
  CHECK_NEAR(moments(Tensor::Q).second, 256, 6);
  CHECK_NEAR(moments(Tensor::V).second, 1, 0.02);
  p.dist = "outliers";  // variance 1 + 99 / 256
  CHECK_NEAR(moments(Tensor::V).second, 1 + 99 / 256.0, 0.1);
  p.dist = "uniform";
  CHECK(moments(Tensor::Q).second == 0);
  CHECK_NEAR(moments(Tensor::V).first, 1, 0.01);
  const auto value = [&](float (*of)(const InputAt&), uint64_t seed, Tensor tensor, InputAt at) {
    return of({p, seed, tensor, at.index, at.head, at.row, at.d, at.x});
  };
  const auto at = [&](uint64_t index, uint64_t head, uint64_t row, uint64_t d, float x) {
    return InputAt{p, 0, Tensor::Q, index, head, row, d, x};
  };
  CHECK(value(huge, 0, Tensor::Q, at(321, 0, 5, 1, 0)) == 20000);  // a head of one constant
  CHECK(value(huge, 0, Tensor::K, at(4931, 1, 13, 3, 0)) == 12000);
  CHECK(value(huge, 7, Tensor::K, at(636, 2, 9, 60, 0)) == -0x1p-8f);
  CHECK(value(huge, 0, Tensor::Q, at(321, 3, 5, 1, 0)) == -0.5f);
  CHECK(value(stairs, 0, Tensor::Q, at(0, 0, 9, 0, 7)) == 32);
  CHECK(value(stairs, 0, Tensor::Q, at(0, 0, 9, 2, 7)) == 32768);
  CHECK(value(stairs, 0, Tensor::K, at(0, 0, 1057, 1, 7)) == 5);
  CHECK(value(stairs, 0, Tensor::K, at(0, 0, 9, 3, 7)) == 1);
  CHECK(value(stairs, 0, Tensor::K, at(0, 0, 9, 3, -0.4f)) == 0);
  p.dist = "stairs";  // every element is exact, and neighbouring logits are 20 apart
  const auto q = make_input(p, Tensor::Q), k = make_input(p, Tensor::K);
  for (int i = 1; i < 64; i++) {
    const auto logit = [&](int key) {
      return reference::dot(&q[0], &k[size_t(key) * Defines::head_dim], Defines::head_dim) / 8;
    };
    CHECK_NEAR(logit(i) - logit(i - 1), 20, 6);
  }
  p.dist = "huge";
  const auto huge = make_input(p, Tensor::K);
  double largest = 0, smallest = 1;
  for (float x : huge) {
    largest = std::max(largest, double(std::fabs(x)));
    if (x != 0) smallest = std::min(smallest, double(std::fabs(x)));
  }
  CHECK((largest > 30000 && largest < 65504 && smallest == 0x1p-14));
  p.dist = "nonfinite";
  int nan_rows = 0;
  for (float v : make_input(p, Tensor::K)) nan_rows += !std::isfinite(v);
  CHECK((nan_rows > 5 && nan_rows < 60));  // one element in about a quarter of 100 heads
}

struct SmallAttention {  // one problem with its tensors, all zero at first
  reference::Problem p;
  std::vector<float> Q, K, V;
  SmallAttention(int B, int Hq, int Hkv, int Sq, int Sk, reference::Mask mask, double scale = 1)
      : p{B, Hq, Hkv, Sq, Sk, 8, mask, scale, nullptr, nullptr, nullptr},
        Q(size_t(B) * Hq * Sq * 8),
        K(size_t(B) * Hkv * Sk * 8),
        V(K.size()) {}
  reference::Result row(int b, int h, int q) {
    p.Q = Q.data();
    p.K = K.data();
    p.V = V.data();
    return reference::attend(p, reference::Row{b, h, q});
  }
};

TEST_CASE("reference") {
  using reference::Mask;
  {  // Q = 0: uniform weights, O is the mean of the visible V, LSE = log(number of visible keys)
    SmallAttention a(1, 1, 1, 3, 5, Mask::none);
    for (int k = 0; k < 5; k++) a.V[k * 8] = float(k * k);
    CHECK_NEAR(a.row(0, 0, 1).O[0], (0 + 1 + 4 + 9 + 16) / 5.0, 1e-15);
    CHECK_NEAR(a.row(0, 0, 1).LSE, std::log(5.0), 1e-15);
    a.p.mask = Mask::bottom_right;  // the last of 3 queries sees all 5 keys, the first sees 3
    CHECK_NEAR(a.row(0, 0, 2).O[0], 6.0, 1e-15);
    CHECK_NEAR(a.row(0, 0, 0).O[0], (0 + 1 + 4) / 3.0, 1e-15);
    CHECK_NEAR(a.row(0, 0, 0).LSE, std::log(3.0), 1e-15);
    a.p.mask = Mask::top_left;  // query 0 sees only key 0
    CHECK((a.row(0, 0, 0).O[0] == 0 && a.row(0, 0, 0).LSE == 0));
    CHECK_NEAR(a.row(0, 0, 1).O[0], 0.5, 1e-15);
    CHECK(reference::visible_pairs(a.p) == 1 + 2 + 3);
    a.p.window_left = 1;  // and no more than the key before its own
    CHECK_NEAR(a.row(0, 0, 2).O[0], (1 + 4) / 2.0, 1e-15);
    CHECK(reference::visible_pairs(a.p) == 1 + 2 + 2);
    a.p.mask = Mask::none;
    a.p.window_right = 0;  // the same, by the window alone
    CHECK_NEAR(a.row(0, 0, 2).O[0], (1 + 4) / 2.0, 1e-15);
    a.p.window_left = -1;
    a.p.window_right = 2;
    CHECK((a.row(0, 0, 0).O[0] == (0 + 1 + 4) / 3.0 && a.row(0, 0, 2).LSE == std::log(5.0)));
    a.p.mask = Mask::bottom_right;
    a.p.window_left = 0;  // each its own key, 2 further than with top-left
    CHECK((a.row(0, 0, 1).O[0] == 9 && reference::visible_pairs(a.p) == 3));
    a.p.window_alignment = Mask::top_left;  // the window from the first key on, the mask to the last
    CHECK((a.row(0, 0, 1).O[0] == (1 + 4 + 9) / 3.0 && reference::visible_pairs(a.p) == 3 + 3 + 3));
    a.p.mask = Mask::top_left;
    a.p.window_alignment = Mask::bottom_right;  // no key in both
    CHECK((a.row(0, 0, 1).O[0] == 0 && a.row(0, 0, 1).LSE == -INFINITY && reference::visible_pairs(a.p) == 0));
  }
  {  // two sequences with 4 and 0 of 5 keys: the last query sees the last key of its sequence
    SmallAttention a(2, 1, 1, 3, 5, Mask::bottom_right);
    for (int k = 0; k < 10; k++) a.V[k * 8] = float(k % 5);
    a.p.k_lengths = {4, 0};
    CHECK((a.row(0, 0, 0).O[0] == 0.5 && a.row(0, 0, 2).O[0] == 1.5 && a.row(1, 0, 2).LSE == -INFINITY));
    CHECK(reference::visible_pairs(a.p) == (2 + 3 + 4) / 2.0);
  }
  {  // KeyBounds agrees with the reference, for masks and windows of any alignment
    SdpaParams p{};
    int tried = 0, right = 0;
    for (int n = 0; n < 6 * 6 * 5 * 5 * 3 * 3; n++, tried++) {
      p.Sq = n % 6 + 1;
      p.Sk = n / 6 % 6;
      p.window_left = n / 36 % 5 - 1;
      p.window_right = n / 180 % 5 - 1;
      p.causal = Causal(n / 900 % 3);
      p.window_alignment = Causal(n / 2700);
      reference::Problem of{1, 1, 1, p.Sq, p.Sk, 8, Mask(n / 900 % 3)};
      of.window_left = p.window_left;
      of.window_right = p.window_right;
      of.window_alignment = Mask(n / 2700);
      const KeyBounds keys(p, p.Sq, p.Sk);
      bool same = true;
      for (int q = 0; q < p.Sq; q++) {
        const int begin = int(first_key(of, sequence_of(of, 0), q));
        const int end = int(past_last_key(of, sequence_of(of, 0), q));
        same &= begin == end ? keys.begin(q) == keys.end(q) : keys.begin(q) == begin && keys.end(q) == end;
      }
      right += same;
    }
    CHECK(right == tried);
  }
  {  // one logit far above the rest: O is that row of V, LSE that logit
    SmallAttention a(1, 1, 1, 1, 4, Mask::none, 0.5);
    a.Q[3] = 40;
    a.K[2 * 8 + 3] = 50;
    for (int k = 0; k < 4; k++) a.V[k * 8 + 7] = float(k + 1);
    CHECK_NEAR(a.row(0, 0, 0).O[7], 3.0, 1e-12);
    CHECK_NEAR(a.row(0, 0, 0).LSE, 1000.0, 1e-12);
  }
  {  // factors: of Q by query head, of K and V by key head
    SmallAttention a(2, 4, 2, 1, 1, Mask::none);
    std::fill(a.Q.begin(), a.Q.end(), 1);
    std::fill(a.K.begin(), a.K.end(), 1);
    std::fill(a.V.begin(), a.V.end(), 1);
    for (int h = 0; h < 8; h++) a.p.q_factor.push_back(h + 1);
    a.p.k_factor = {1, 10, 100, 1000};
    a.p.v_factor = {2, 3, 4, 5};
    CHECK((a.row(0, 1, 0).LSE == 8 * 2 && a.row(0, 1, 0).O[0] == 2));
    CHECK((a.row(1, 2, 0).LSE == 8 * 7 * 1000 && a.row(1, 2, 0).O[0] == 5));
    a.p.packs_q = a.p.packs_k = true;
    a.p.q_starts = a.p.k_starts = {0, 1, 2};
    a.p.Sq = a.p.Sk = 2;  // of sequence 1
    CHECK((a.row(0, 2, 1).LSE == 8 * 7 * 1000 && a.row(0, 2, 1).O[0] == 5));
  }
  {  // two keys by hand: logits log(3) and 0 give weights 3/4 and 1/4
    SmallAttention a(1, 1, 1, 1, 2, Mask::none, std::log(3.0));
    a.Q[0] = 1;
    a.K[0] = 1;
    a.V[1] = 8;
    a.V[8 + 1] = -4;
    CHECK_NEAR(a.row(0, 0, 0).O[1], 0.75 * 8 - 0.25 * 4, 1e-14);
    CHECK_NEAR(a.row(0, 0, 0).LSE, std::log(4.0), 1e-15);
  }
  {  // grouped queries: head h reads key head h / (Hq / Hkv), batches apart
    SmallAttention a(2, 6, 2, 1, 1, Mask::none);
    for (int i = 0; i < 4; i++) a.V[i * 8] = float(i);  // [b=0,h=0] [0,1] [1,0] [1,1]
    const int expected[2][6] = {{0, 0, 0, 1, 1, 1}, {2, 2, 2, 3, 3, 3}};
    for (int b = 0; b < 2; b++) {
      for (int h = 0; h < 6; h++) CHECK(a.row(b, h, 0).O[0] == expected[b][h]);
    }
  }
  {  // more queries than keys: bottom-right leaves the first rows without a key
    SmallAttention a(1, 1, 1, 5, 2, Mask::bottom_right);
    a.V.assign(16, 1.0f);
    CHECK((a.row(0, 0, 2).O[0] == 0 && a.row(0, 0, 2).LSE == -INFINITY));
    CHECK((a.row(0, 0, 3).O[0] == 1 && a.row(0, 0, 3).LSE == 0));
    CHECK(reference::visible_pairs(a.p) == 1 + 2);
  }
  {  // no keys at all
    SmallAttention a(1, 1, 1, 2, 0, Mask::none);
    CHECK((a.row(0, 0, 1).O[5] == 0 && a.row(0, 0, 1).LSE == -INFINITY));
  }
  {  // NaN and inf
    SmallAttention a(1, 1, 1, 2, 2, Mask::top_left);
    a.Q.assign(16, 1.0f);
    a.V[8 + 2] = NAN;  // at key 1: query 0 does not see it, query 1 does
    CHECK((a.row(0, 0, 0).O[2] == 0 && a.row(0, 0, 0).open[2] && !a.row(0, 0, 0).open[3]));
    CHECK((std::isnan(a.row(0, 0, 1).O[2]) && a.row(0, 0, 1).O[3] == 0));
    a.K[8] = INFINITY;  // a logit of +inf makes the row NaN, where it is seen
    CHECK((a.row(0, 0, 0).O[3] == 0 && std::isnan(a.row(0, 0, 1).O[3])));
    CHECK(std::isnan(a.row(0, 0, 1).LSE));
    a.K[0] = -INFINITY;  // every visible logit -inf: as if fully masked
    CHECK((a.row(0, 0, 0).O[3] == 0 && a.row(0, 0, 0).LSE == -INFINITY));
    a.K[0] = NAN;
    CHECK((std::isnan(a.row(0, 0, 0).O[3]) && std::isnan(a.row(0, 0, 0).LSE)));
  }
}

// The reference's gradients of sum(dO * O) + sum(dLSE * LSE) are the central differences of its
// forward pass.
TEST_CASE("gradients") {
  using reference::Mask;
  const struct {
    int Hq, Hkv, Sq, Sk, window_left;
    Mask mask;
    double softcap;
    bool has_sinks, has_mods;
    reference::Bias bias{};  // without values
  } cases[] = {{2, 1, 3, 5, -1, Mask::none, 0, false, false},        {3, 1, 5, 3, -1, Mask::bottom_right, 0, false, false},
               {4, 2, 4, 4, 1, Mask::top_left, 0, true, false},       {2, 2, 3, 6, -1, Mask::none, 0.7, false, false},
               {2, 1, 5, 4, -1, Mask::bottom_right, 2, true, false}, {1, 1, 2, 0, -1, Mask::none, 0, true, false},
               {4, 2, 5, 6, -1, Mask::bottom_right, 0, true, true},
               {4, 2, 3, 5, -1, Mask::none, 0.7, true, false, {{}, 1, 4, 3, 5}},
               {2, 1, 4, 5, -1, Mask::bottom_right, 0, false, false, {{}, 2, 1, 1, 5}},
               {2, 2, 3, 6, -1, Mask::none, 0, false, false, {{}, 1, 1, 1, 2, true}}};
  for (const auto& c : cases) {
    SmallAttention a(2, c.Hq, c.Hkv, c.Sq, c.Sk, c.mask, 0.6);
    a.p.softcap = c.softcap;
    a.p.window_left = c.window_left;
    for (int h = 0; h < c.Hq && c.has_sinks; h++) a.p.sinks.push_back(0.5 * h - 0.3);
    if (c.has_mods) {
      a.p.logit = [](double s, int b, int h, int q, int k, int, int Sk) {
        return s * s / (3 + h) + std::sin(s + b) - 0.1 * (Sk - q - k);
      };
      a.p.sees = [](int b, int h, int q, int k, int, int) { return (b + 2 * h + 3 * q + 5 * k) % 4 > 0; };
    }
    reference::Bias& bias = a.p.bias = c.bias;
    bias.x.resize(size_t(bias.batches) * bias.heads * bias.rows * bias.keys);
    for (size_t i = 0; i < bias.x.size(); i++) bias.x[i] = i == 3 ? -INFINITY : normal(9, Tensor::O, i);
    const size_t rows = size_t(2) * c.Hq * c.Sq;
    std::vector<float> dO(rows * 8);
    std::vector<double> dLSE(rows);
    std::vector<float>* const inputs[] = {&a.Q, &a.K, &a.V, &dO};
    for (int t = 0; t < 4; t++) {
      for (size_t i = 0; i < inputs[t]->size(); i++) (*inputs[t])[i] = normal(7, Tensor(t), i);
    }
    for (size_t i = 0; i < rows; i++) dLSE[i] = normal(8, Tensor::dO, i);
    const auto row_at = [&](size_t i) {
      return reference::Row{int(i / c.Sq / c.Hq), int(i / c.Sq % c.Hq), int(i % c.Sq)};
    };
    const auto result = [&](size_t i) { return a.row(row_at(i).b, row_at(i).h, row_at(i).q); };
    const auto loss = [&] {
      double sum = 0;
      for (size_t i = 0; i < rows; i++) {
        const reference::Result r = result(i);
        for (int d = 0; d < 8; d++) sum += dO[i * 8 + d] * r.O[d];
        if (r.LSE != -INFINITY) sum += dLSE[i] * r.LSE;
      }
      return sum;
    };
    // d loss / dx
    const auto difference = [&](auto& x) {
      const auto at = x;
      const double step = 0x1p-10;
      x = std::remove_reference_t<decltype(x)>(at + step);
      const double above = x, more = loss();
      x = std::remove_reference_t<decltype(x)>(at - step);
      const double below = x, less = loss();
      x = at;
      return (more - less) / (above - below);
    };
    loss();  // sets the pointers of a.p
    reference::Backward of(a.p, dO.data(), fp16);
    for (size_t i = 0; i < rows; i++) of.set_row(i, result(i).O.data(), result(i).LSE, dLSE[i]);
    double worst = 0;
    const auto compare = [&](double want, double got) { worst = std::fmax(worst, reference::distance(want, got)); };
    for (size_t i = 0; i < rows; i++) {
      const reference::Gradient dQ = of.of_query(row_at(i));
      for (int d = 0; d < 8; d++) compare(difference(a.Q[i * 8 + d]), dQ.x[d]);
    }
    for (int j = 0; j < 2 * c.Hkv * c.Sk; j++) {
      reference::Gradient dK(8), dV(8);
      of.of_key({j / c.Sk / c.Hkv, j / c.Sk % c.Hkv, j % c.Sk}, dK, dV);
      for (int d = 0; d < 8; d++) {
        compare(difference(a.K[j * 8 + d]), dK.x[d]);
        compare(difference(a.V[j * 8 + d]), dV.x[d]);
      }
    }
    for (int h = 0; h < c.Hq && c.has_sinks; h++) compare(difference(a.p.sinks[h]), of.of_sink(h).x[0]);
    const auto index = [](size_t i, int size) { return size == 1 ? -1 : int(i % size); };
    for (size_t row = 0; row * bias.keys < bias.x.size(); row++) {
      const size_t head = row / bias.rows, b = head / bias.heads;
      const auto of_row = [&](const reference::Backward::Columns& columns, bool sums_keys) {
        return of.of_bias(index(b, bias.batches), index(head, bias.heads), index(row, bias.rows), columns, sums_keys, fp16);
      };
      const reference::Gradient all = of_row({0, 1, bias.keys}, false), odd = of_row({1, 2, bias.keys}, false);
      double sum = 0;
      for (int k = 0; k < bias.keys; k++) {
        float& x = bias.x[row * bias.keys + k];
        compare(x == -INFINITY ? 0 : difference(x), all.x[k]);
        if (k % 2) compare(all.x[k], odd.x[k / 2]);
        sum += all.x[k];
      }
      compare(sum, of_row({0, 1, bias.keys}, true).x[0]);
    }
    CHECK(worst < 1e-5);
  }
}

// The gradient errors that a comparison accepts and rejects, in units of the rounding error.
TEST_CASE("gradient_comparison") {
  reference::Gradient want(64);
  const auto verdict_of = [&](double units, double largest, double zero = 0, bool rows_differ = true) {
    reference::GradientComparison c("dQ");
    for (int row = 0; row < 100; row++) {
      float got[64];
      for (int d = 0; d < 64; d++) {
        want.x[d] = d % 2 ? 100 : 1e-3;
        want.variance[d] = std::pow(want.x[d] * 1e-3, 2);
        got[d] = float(want.x[d] * (1 + units * (d % 3 ? 1e-3 : -1e-3)));
      }
      want.x[5] = want.variance[5] = 0;
      got[5] = float(zero);
      if (row == 40) got[8] = float(want.x[8] * (1 + largest * 1e-3));
      if (rows_differ) want.x[1] = got[1] = float(100 + row);
      c.add({0, 0, row}, want, got);
    }
    return c.verdict();
  };
  CHECK((verdict_of(1, 1).empty() && verdict_of(1.4, 7).empty()));
  CHECK((!verdict_of(2.2, 1).empty() && !verdict_of(1, 9).empty() && !verdict_of(1, NAN).empty() && !verdict_of(1, INFINITY).empty()));
  CHECK(!verdict_of(1, 1, 1e-30).empty());  // no visible pair: must be exactly 0
  CHECK(verdict_of(2.2, 1, 0, false).empty());  // 100 equal rows are one
}

// Equal weights have equal rounding errors, which the expected error of their sum contains.
TEST_CASE("gradient_of_equal_weights") {
  const int Sq = 64, Sk = 255;
  SmallAttention a(1, 1, 1, Sq, Sk, reference::Mask::none, 0);  // all weights are 1 / 255
  std::vector<float> dO(Sq * 8, 1.0f);
  a.row(0, 0, 0);  // sets the pointers of a.p
  reference::Backward of(a.p, dO.data(), reference::bf16);
  const std::vector<float> O(8, 0.0f);
  for (int q = 0; q < Sq; q++) of.set_row(q, O.data(), std::log(255.0));
  reference::Gradient dK(8), dV(8);
  of.of_key({0, 0, 3}, dK, dV);
  // 1 / 255 is rounded to 129 / 2^15, and each sum by a random error.
  const double common = 129 / 32768.0 - 1 / 255.0, each = std::sqrt(0.541 / 12) / 128 / 255;
  CHECK_NEAR(std::sqrt(dV.variance[0]) / Sq, std::sqrt(common * common + each * each), 1e-6);
}

// The verdict for a single row.
static std::string verdict(std::vector<double> ref, double ref_lse, std::vector<float> got,
                           float got_lse, std::vector<char> open = {}) {
  Comparison c(fp16, true);
  open.resize(ref.size());
  c.add({0, 1, 2}, {ref, ref_lse, open}, got.data(), got_lse);
  return c.verdict({1e-3, 1e-3, 1e-3});
}

TEST_CASE("comparison") {
  const double inf = INFINITY;
  CHECK(verdict({1, -2}, 3, {1, -2}, 3) == "");
  CHECK(verdict({1, -2}, 3, {1.0005f, -2.0005f}, 3.001f) == "");
  CHECK(verdict({1, -2}, 3, {1, -2.1f}, 3) ==
        "O(b=0,h=1,q=2,d=1) ref=-2 got=-2.0999999 err=0.1 tol=0.002");
  CHECK(verdict({1, -2}, 3, {NAN, -2}, 3).find("got=nan err=inf") != std::string::npos);
  CHECK(verdict({1, -2}, 3, {1, -2}, NAN).find("LSE(b=0,h=1,q=2)") == 0);
  CHECK(verdict({1, -2}, 3, {1, float(inf)}, 3) != "");
  CHECK(verdict({1, inf}, 3, {1, float(inf)}, 3) == "");
  CHECK(verdict({1, inf}, 3, {1, -float(inf)}, 3) != "");
  CHECK(verdict({1, NAN}, NAN, {1, NAN}, NAN) == "");
  CHECK(verdict({1, NAN}, 3, {1, 0}, 3) != "");
  CHECK(verdict({1, 2}, 3, {1, NAN}, 3, {0, 1}) == "");     // open: NaN is right as well
  CHECK(verdict({1, 2}, 3, {1, 2.5f}, 3, {0, 1}) != "");    // but not another number
  CHECK(verdict({0, 0}, -inf, {0, 0}, float(-inf)) == "");  // fully masked
  CHECK(verdict({0, 0}, -inf, {0, 1e-6f}, float(-inf)) != "");
  CHECK(verdict({0, 0}, -inf, {0, 0}, 0) != "");
  CHECK(verdict({1, 1}, std::log(8.0), {1, 1}, 3) != "");  // LSE to base 2
  // Long rows have small outputs, so zeros pass an absolute limit; the relative limit must reject
  // them.
  CHECK(verdict({5e-4, -4e-4}, 9, {0, 0}, 9).find("rel_rms=1 ") == 0);
  // The poison of each type.
  CHECK(std::isnan(output_value(0xffff)));
  CHECK(verdict({1}, 0, {output_value(0xffff)}, 0) != "");
  CHECK(std::isnan(float_of(~0u)));
}

// Rounding of O to nearest passes; towards zero or away from zero fails, from 32 rows on.
TEST_CASE("rounding") {
  CHECK((ulp(fp16, 1.0) == 0x1p-10 && ulp(fp16, -1.99) == 0x1p-10 && ulp(fp16, 0.5) == 0x1p-11));
  for (double x : {0.0, 0x1p-15, 1e6, double(NAN), double(INFINITY)}) CHECK(ulp(fp16, x) == 0);
  const auto judged = [](int rows, int direction) {
    Comparison c(fp16, true);
    for (int q = 0; q < rows; q++) {
      std::vector<double> ref(64);
      std::vector<float> got(64);
      for (int d = 0; d < 64; d++) {
        ref[d] = normal(q, Tensor::V, d) / 8;
        got[d] = float(rounded<Output>(float(ref[d])));
        const double unit = std::copysign(ulp(fp16, ref[d]), ref[d]);
        const bool inward = std::fabs(got[d]) < std::fabs(ref[d]);
        if (direction > 0 && inward) got[d] += float(unit);
        if (direction < 0 && !inward) got[d] -= float(unit);
      }
      c.add({0, 0, q}, {ref, 0, std::vector<char>(64)}, got.data(), 0);
    }
    return c.verdict(fp16.tolerance);
  };
  CHECK((judged(32, 0) == "" && judged(400, 0) == ""));
  CHECK(judged(32, -1).find("O is not rounded to nearest: its mean error is -0.") == 0);
  CHECK(judged(32, 1).find("O is not rounded to nearest: its mean error is 0.") == 0);
  CHECK(judged(31, -1) == "");
  // Elements of 40 rows that are too small by a fraction of a unit.
  const auto too_small = [](int elements, double units) {
    Comparison c(fp16, true);
    for (int q = 0; q < 40; q++) {
      std::vector<double> ref(elements);
      std::vector<float> got(elements);
      for (int d = 0; d < elements; d++) {
        ref[d] = normal(q, Tensor::V, d) / 8;
        got[d] = float(ref[d] - std::copysign(units * ulp(fp16, ref[d]), ref[d]));
      }
      c.add({0, 0, q}, {ref, 0, std::vector<char>(elements)}, got.data(), 0);
    }
    return c.verdict(fp16.tolerance);
  };
  CHECK((too_small(64, 0.24) == "" && too_small(64, -0.24) == "" && too_small(6, 0.4) == ""));
  for (double units : {0.26, -0.26}) {
    CHECK((too_small(64, units).find("O is not rounded") == 0 && too_small(7, units).find("O is not rounded") == 0));
  }
}

// In few rows with 3-bit weights a single rounding may dominate, so the limit is higher; in many
// rows the same error fails. For types with more bits, no limit depends on the rows.
TEST_CASE("few_rows") {
  const auto judged = [](int rows, double error, double others = 1) {
    Comparison c(fp16, false);
    for (int q = 0; q < rows; q++) {
      std::vector<double> ref(64);
      std::vector<float> got(64);
      for (int d = 0; d < 64; d++) {
        ref[d] = normal(0, Tensor::V, d) / 2 * (q == 0 ? 1 : others);
        got[d] = float(ref[d] * (1 + error));
      }
      c.add({0, 0, q}, {ref, 0, std::vector<char>(64)}, got.data(), 0);
    }
    return c.verdict(reference::e4m3.tolerance);
  };
  CHECK((judged(1, 0.058) == "" && judged(1, 0.06).find("rel_rms=0.06 tol=0.0588") == 0));
  CHECK((judged(8, 0.0422) == "" && judged(8, 0.046).find("rel_rms=0.046 tol=0.0447") == 0));
  CHECK(judged(2000, 0.0395) == "");
  for (int rows : {20, 100, 2000})
    CHECK(judged(rows, 0.0422).find("rel_rms=0.0422 tol=0.04;") == 0);
  CHECK(judged(2000, 0.0422, 1e-3) == "");  // effectively one row
  for (const reference::Type& type : {fp16, reference::bf16, reference::u8}) {
    for (double rows : {1.0, 3.0, 1e6})
      CHECK(type.tolerance.rel_rms_of(rows) == type.tolerance.rel_rms);
  }
  for (double rows : {17.0, 1e3, 1e9}) CHECK(reference::e4m3.tolerance.rel_rms_of(rows) == 4e-2);
}

TEST_CASE("rows_to_check") {
  Problem p;
  const auto rows_to_check = [&](int item_rows, double macs) {
    return reference::rows_to_check(p, 0, item_rows, macs);
  };
  p.B = 1;
  p.Hq = p.Hkv = 8;
  p.Sq = p.Sk = 512;
  CHECK(rows_to_check(384, 1e12).size() == 8 * 512);
  p.B = 3;
  p.Sq = 2000;
  p.Sk = 100000;
  for (int item_rows : {32, 256, 384, 2048}) {
    const auto rows = rows_to_check(item_rows, 1.0);
    const int items = (p.Sq + item_rows - 1) / item_rows;
    std::set<std::array<int, 3>> seen, items_seen;
    for (const auto& row : rows) {
      CHECK((row.b >= 0 && row.b < 3 && row.h >= 0 && row.h < 8 && row.q >= 0 && row.q < 2000));
      seen.insert({row.b, row.h, row.q});
      items_seen.insert({row.b, row.h, row.q / item_rows});
    }
    CHECK((seen.size() == rows.size() && int(items_seen.size()) == 3 * 8 * items));
    for (int q = 0; q < 2000; q++) {
      const int r = q % item_rows, item = q / item_rows;
      const bool group_edge = q % 64 == 0 || q % 64 == 63;
      if (q == 1999 || r == 0 || r == item_rows - 1 ||
          (group_edge && (item == 0 || item == items - 1))) {
        CHECK((seen.count({0, 0, q}) && seen.count({2, 7, q})));
      }
    }
    CHECK(int(rows.size()) <= 3 * 8 * items + 2 * (2 * items + 2 * 32 + 1));
  }
  CHECK(rows_to_check(256, 5e9).size() >= 300);  // 390 rows, less those drawn twice
  // For packed sequences also the first and last row of each, in the first and last head, and no
  // unused row.
  p.packs_q = true;
  p.q_starts = {0, 101, 101, 700, 2000};
  p.q_lengths = {99, 5, 2000, 1234};
  std::set<std::array<int, 2>> seen;
  for (const auto& row : rows_to_check(256, 1.0)) {
    CHECK((row.b == 0 && reference::is_query(p, row)));
    seen.insert({row.h, row.q});
  }
  for (int head : {0, 7}) {
    for (int q : {0, 101, 699, 700}) CHECK(seen.count({head, q}));
    for (int q : {99, 100, 1934, 1999}) CHECK(!seen.count({head, q}));
  }
  p.packs_q = false;
  p.q_starts.clear();
  p.q_lengths.clear();
  // README's largest problem, 2.2e12 FLOP, takes half a second on 16 cores.
  p.B = 1;
  p.Hq = p.Hkv = 32;
  p.Sq = p.Sk = 16384;
  CHECK(double(rows_to_check(256, 1.5e9).size()) * p.Sk * 64 * 2 < 7e9);
}

// The layouts: rows of O do not overlap, inputs have the strides of the layout, and downloads
// return the uploaded values.
TEST_CASE("layouts") {
  constexpr int64_t D = Defines::head_dim, far = int64_t(1) << 31;
  Problem p;
  p.B = 2;
  p.Hq = 4;
  p.Hkv = 2;
  p.Sq = 3;
  p.Sk = 5;
  const auto same_strides = [](const Strides& a, const Strides& b) {
    return a.batch == b.batch && a.head == b.head && a.row == b.row;
  };
  const auto placed = [&](const char* layout, Tensor tensor) {
    p.layout = layout;
    return place(p, tensor);
  };
  CHECK(same_strides(placed("bhsd", Tensor::K).strides, {2 * 5 * D, 5 * D, D}));
  CHECK(same_strides(placed("bshd", Tensor::Q).strides, {3 * 4 * D, D, 4 * D}));
  CHECK(same_strides(placed("packed", Tensor::V).strides, {5 * 8 * D, D, 8 * D}));
  CHECK(same_strides(placed("padded", Tensor::K).strides,
                     {2 * (5 * (D + 8) + 8) + 8, 5 * (D + 8) + 8, D + 8}));
  CHECK(same_strides(placed("zero", Tensor::K).strides, {0, 0, D}));
  CHECK(same_strides(placed("zero", Tensor::O).strides, {4 * 3 * D, 3 * D, D}));
  CHECK(same_strides(placed("reversed", Tensor::K).strides, {2 * 5 * D, -5 * D, -D}));
  CHECK(same_strides(placed("reversed", Tensor::O).strides, {4 * 3 * D, 3 * D, D}));
  CHECK(same_strides(placed("far", Tensor::K).strides, {2 * 5 * D + far, 5 * D, D}));
  CHECK(same_strides(placed("far_heads", Tensor::K).strides, {2 * (5 * D + far), 5 * D + far, D}));
  CHECK(same_strides(placed("far_rows", Tensor::K).strides,
                     {10 * (D + far), 5 * (D + far), D + far}));
  CHECK((placed("reversed", Tensor::K).first == 9 * D &&
         placed("reversed", Tensor::K).span == 20 * D));
  CHECK((placed("zero", Tensor::K).span == 5 * D && placed("zero", Tensor::K).piece_span == 5 * D));
  CHECK(
      (placed("far", Tensor::K).piece_rows == 10 && placed("far", Tensor::K).piece_span == 10 * D));
  CHECK((placed("far_heads", Tensor::K).piece_rows == 5 &&
         placed("far_rows", Tensor::K).piece_rows == 1));
  for (const char* layout : layouts) {
    p.layout = layout;
    p.same_heads = p.layout == "zero";
    const auto K = make_placed_tensor(p, Tensor::K);
    auto values = make_input(p, Tensor::K);
    const Bits x = round_to_elements(values, 1);
    K->write(x);
    std::string trouble;
    CHECK((K->read(trouble) == x && trouble == ""));
    for (size_t row = 0; row < 2 * 2 * 5; row++) {
      const Strides& s = K->strides;
      const int64_t b = row / 10, h = row / 5 % 2, k = row % 5;
      const uint16_t* const first = static_cast<uint16_t*>(K->first());
      CHECK(!memcmp(first + b * s.batch + h * s.head + k * s.row, &x[row * D], D * 2));
    }
  }
}

// The reference kernel, which checks use only on a GPU, compared with the CPU reference.
TEST_CASE("reference_kernel") {
  constexpr int D = Defines::head_dim;
  struct Case {
    const char *shape, *layout, *dist;
    reference::Mask mask;
    float scale;
  };
  using reference::Mask;
  const Case cases[] = {{"1,1,1,40,70", "bhsd", "normal", Mask::none, 0},
                        {"2,4,2,33,31", "packed", "outliers", Mask::bottom_right, 0.2f},
                        {"1,6,2,31,65", "padded", "normal", Mask::top_left, 0},
                        {"1,2,1,70,20", "bshd", "large", Mask::bottom_right, 0},
                        {"1,2,1,3,0", "bhsd", "normal", Mask::none, 0},
                        {"2,4,2,33,70", "bhsd", "huge", Mask::bottom_right, 0},
                        {"2,4,2,33,70", "bhsd", "huge", Mask::none, 1e10f},
                        {"1,2,2,65,65", "bshd", "stairs", Mask::bottom_right, 0},
                        {"1,2,2,33,300", "bhsd", "uniform", Mask::top_left, 0}};
  for (const Case& c : cases) {
    Problem p;
    CHECK(parse_shape(c.shape, p) == "");
    p.layout = c.layout;
    p.dist = c.dist;
    p.mask = c.mask;
    p.scale = c.scale;
    Instance instance(p);
    instance.set_inputs(3);
    const auto rows = reference::rows_to_check(p, 0, 32, 1e12);
    const auto want = reference::attend(instance.problem, rows);
    const int heads = p.B * p.Hq, first = heads / 2;  // the second half alone
    std::vector<float> O(size_t(heads - first) * p.Sq * D), LSE(size_t(heads - first) * p.Sq);
    CHECK(launch_reference_kernel<__half, __half>(instance.params, first, heads - first, O.data(), LSE.data()) ==
          cudaSuccess);
    Comparison comparison(fp16, true);
    for (size_t i = size_t(first) * p.Sq; i < rows.size(); i++) {
      const size_t row = i - size_t(first) * p.Sq;
      comparison.add(rows[i], want[i], &O[row * D], LSE[row]);
    }
    const double limit = std::string(c.dist) == "large" ? 1e-4 : 2e-6;
    const std::string trouble = comparison.verdict({limit, limit, limit});
    CHECK(trouble == "");
    if (trouble != "") fprintf(stderr, "%s %s: %s\n", c.shape, c.dist, trouble.c_str());
  }
}

static std::string command_of(const Problem& p) {
  SweepOptions o;
  return command_of(sweep_options(o), p);
}
static SweepOptions parse(const std::vector<std::string>& args, std::string& refusal) {
  SweepOptions o;
  refusal = parse_sweep(sweep_options(o), args, o);
  return o;
}

TEST_CASE("command_line") {
  std::string refusal;
  const auto parsed = [&](const std::vector<std::string>& args) { return parse(args, refusal); };
  CHECK((parsed({}).problems.size() == 1 && parsed({}).problems[0].shape == "mission"));
  CHECK((parsed({}).problems[0].Hq == 8 && !parsed({}).shape_given));
  const Options o = parsed({"--shape", "small", "--shape", "2,8,4,100,37", "--causal", "tl",
                            "--seeds", "3,4", "--dist", "large", "--iters", "7", "--warmup", "0",
                            "--layout", "packed", "--check-only", "--scale", "0.5"});
  CHECK((refusal == "" && o.problems.size() == 2 && o.problems[1].Sk == 37 && o.shape_given));
  CHECK((o.problems[1].shape == "2x8x4x100x37" && o.problems[0].Sq == 32));
  CHECK(
      (o.problems[0].shape == "small" && parsed({"--shape", "1x8x8x64x64"}).problems[0].Sq == 64));
  CHECK((o.problems[0].mask == reference::Mask::top_left && o.problems[1].layout == "packed"));
  CHECK((o.seeds == std::vector<uint64_t>({3, 4}) && o.iterations == 7 && o.warmup == 0));
  CHECK((o.check_only && o.problems[1].dist == "large" && o.problems[0].scale == 0.5));
  const struct {
    std::vector<std::string> args;
    const char* sentence;
  } refused[] = {
      {{"--shap", "small"}, "--shap: no such option; did you mean --shape?"},
      {{"--shape"}, "--shape: its value is missing"},
      {{"--check-only=1"}, "--check-only: it takes no value"},
      {{"--shape", "1,2,3"},
       "--shape 1,2,3: want small, mission, mission2, long, decode, decode1, chunk or sizes B,Hq,Hkv,Sq,Sk from 0 "
       "to 10^9, optionally with D or D,Dv, such as 1,8,2,512,512 or 1,8,2,512,512,64"},
      {{"--shape", "1,8,8,64,64,64,64,1"}, "--shape 1,8,8,64,64,64,64,1: want small"},
      {{"--shape", "1,8,3,64,64"}, "--shape 1,8,3,64,64: Hq must be a multiple of Hkv"},
      {{"--shape", "1,8,0,64,64"}, "--shape 1,8,0,64,64: Hq must be a multiple of Hkv"},
      {{"--shape", "-1,8,8,64,64"}, "--shape -1,8,8,64,64: want small"},
      {{"--shape", "1,8,8,64,9999999999"}, "--shape 1,8,8,64,9999999999: want small"},
      {{"--causal", "yes"}, "--causal yes: want br (bottom-right), tl or off"},
      {{"--seeds", "1,,2"}, "--seeds 1,,2: want whole numbers separated by commas, such as 0,1"},
      {{"--seeds", ""}, "--seeds : want whole numbers"},
      {{"--dist", "gauss"},
       "--dist gauss: want one of normal outliers large uniform nonfinite huge stairs"},
      {{"--layout", "hsbd"},
       "--layout hsbd: want one of bhsd bshd packed padded zero reversed far far_heads far_rows"},
      {{"--schedule", "random:"}, "--schedule random:: want forward, reverse or random:SEED"},
      {{"--scale", "0"}, "--scale 0: want a number greater than 0, below 10^38"},
      {{"--scale", "nan"}, "--scale nan: want a number greater than 0, below 10^38"},
      {{"--scale", "inf"}, "--scale inf: want a number greater than 0, below 10^38"},
      {{"--iters", "0"}, "--iters 0: want a whole number from 1 to 1000000"},
      {{"--max-ctas", "-1"}, "--max-ctas -1: want a whole number from 0 to 1000000"},
      {{"--max-ctas", "8"},
       "--max-ctas: only builds with USE_PERSISTENT_CTA=1 accept it; build with"},
      {{"--warmup", "x"}, "--warmup x: want a whole number from 0 to 1000000"},
      {{"--sweep", "5", "--shape", "small"}, "--sweep and --edges have their own problems; drop --shape"},
      {{"--causal", "br", "--causal", "tl"}, "--causal is given twice"},
      {{"--sweep", "2", "--sweep", "2"}, "--sweep is given twice"},
      {{"--layout", "packed", "--layout", "packed"}, "--layout is given twice"},
      {{"--sweep", "0"}, "--sweep 0: want a whole number from 1 to 1000000"},
      {{"--causal", "br", "--sweep", "5"}, "--sweep and --edges have their own problems; drop --causal"},
      {{"--sweep", "5", "--dist", "huge"}, "--sweep and --edges have their own problems; drop --dist"},
      {{"--sweep", "5", "--layout", "bhsd"}, "--sweep and --edges have their own problems; drop --layout"},
      {{"--sweep", "5", "--scale", "1"}, "--sweep and --edges have their own problems; drop --scale"},
  };
  for (const auto& r : refused) {
    std::string error;
    parse(r.args, error);
    if (error.find(r.sentence) != 0)
      fprintf(stderr, "got: %s\nfor: %s\n", error.c_str(), r.sentence);
    CHECK(error.find(r.sentence) == 0);
  }
  // The command that is printed for a problem of a sweep reproduces it. The problems cover every
  // kind of input, layout and head ratio.
  std::set<std::string> kinds;
  std::set<int> ratios;
  vector<Problem> problems;
  draw_problems(5, 400, false, problems);
  for (const Problem& p : problems) {
    kinds.insert(p.dist);
    kinds.insert(p.layout);
    ratios.insert(p.Hq / p.Hkv);
    CHECK((p.Sq >= 0 && p.Sk >= 0 && double(p.B) * p.Hq * p.Sq * p.Sk < 2e6));
    std::vector<std::string> words;
    const std::string text = command_of(p) + " ";
    for (size_t at = 0, end; (end = text.find(' ', at)) != std::string::npos; at = end + 1) {
      words.push_back(text.substr(at, end - at));
    }
    const Options o2 = parsed(words);
    CHECK((refusal == "" && o2.seeds.size() == 1 && o2.seeds[0] == p.seed));
    const Problem& q = o2.problems[0];
    CHECK((q.B == p.B && q.Hq == p.Hq && q.Hkv == p.Hkv && q.Sq == p.Sq && q.Sk == p.Sk));
    CHECK((q.mask == p.mask && q.layout == p.layout && q.dist == p.dist && q.scale == p.scale));
    CHECK((q.window_left == p.window_left && q.window_right == p.window_right && q.machine == p.machine));
    CHECK((!p.has_window() || q.window_alignment == p.window_alignment));
  }
  size_t of_this_line = std::size(layouts);
  for (const Dist& d : reference::dists) of_this_line += takes_dist(d.name);
  CHECK((kinds.size() == of_this_line && ratios.size() == 8));
  CHECK((takes_layout("far") && takes_layout("zero") && takes_layout("reversed")));
}

TEST_CASE("percentile") {
  std::vector<double> x;
  for (int i = 100; i >= 1; i--) x.push_back(i);
  CHECK((percentile(x, 0) == 1 && percentile(x, 0.5) == 50 && percentile(x, 0.9) == 90));
  CHECK((percentile(x, 0.99) == 99 && percentile({7}, 0.99) == 7));
}

// The interval contains the median unless outside_of_interval(n) samples or fewer are on one side of
// it, which has a probability of about 5%.
TEST_CASE("interval_of_median") {
  CHECK((outside_of_interval(1) == 0 && outside_of_interval(3) == 0));
  for (int n : {30, 100, 300, 1000}) {
    double term = std::exp2(-n), outside = 0;  // the probability of k samples on one side
    for (size_t k = 0; k <= outside_of_interval(n); k++) {
      outside += 2 * term;
      term *= double(n - k) / double(k + 1);
    }
    CHECK_NEAR(1 - outside, 0.95, 0.012);
  }
}

static SdpaParams valid_params() {
  SdpaParams p{};
  static KeyValue buffer[64];
  p.Q = p.K = p.V = p.O =
      reinterpret_cast<KeyValue*>((reinterpret_cast<uintptr_t>(buffer) + 15) / 16 * 16);
  p.B = 2;
  p.Hq = 4;
  p.Hkv = 2;
  p.Sq = 3;
  p.Sk = 5;
  p.D = Defines::head_dim;
  p.q = p.k = p.v = p.o = {4096, 1024, Defines::head_dim};
  return p;
}

TEST_CASE("preconditions") {
  SdpaParams valid = valid_params();
  CHECK(check_params(valid).ok());
  const auto refusal = [](void (*change)(SdpaParams&)) {
    SdpaParams p = valid_params();
    change(p);
    const SdpaStatus status = sdpa_forward(p, 0);  // refuses before it asks for a GPU
    CHECK(status.code == cudaErrorInvalidValue);
    return std::string(status.text);
  };
  CHECK(refusal([](SdpaParams& p) { p.Q = nullptr; }) == "Q is a null pointer");
  CHECK(refusal([](SdpaParams& p) { p.D = 96; }) ==
        "D=96, Dv=96: this build takes D=64, Dv=64");
  CHECK(refusal([](SdpaParams& p) { p.Dv = 128; }).find("D=64, Dv=128: this build takes D=64") == 0);
  CHECK(refusal([](SdpaParams& p) { p.Hkv = 3; }) == "Hq=4 is not a multiple of Hkv=3");
  CHECK(refusal([](SdpaParams& p) { p.Sk = -1; }) == "Sk=-1 is outside [0, 1000000000]");
  CHECK(refusal([](SdpaParams& p) { p.scale = -1; }) ==
        "scale=-1: must be 0 or more, below 10^38");
  CHECK(refusal([](SdpaParams& p) { p.scale = NAN; }).find("scale=nan:") == 0);
  CHECK(refusal([](SdpaParams& p) { p.causal = Causal(7); }) == "causal=7 is outside [0, 2]");
  CHECK(refusal([](SdpaParams& p) { p.window_alignment = Causal(3); }) ==
        "window_alignment=3 is outside [0, 2]");
  CHECK(refusal([](SdpaParams& p) { p.softcap = NAN; }) == "softcap=nan: must be 0, or 1e-18 to 1e18");
  CHECK(refusal([](SdpaParams& p) { p.softcap = 1e-40f; }) == "softcap=9.99995e-41: must be 0, or 1e-18 to 1e18");
  CHECK(refusal([](SdpaParams& p) { p.softcap = 50; }) ==
        "softcap is for builds with USE_SOFTCAP; set it to 0");
  static const float sinks[8] = {};
  CHECK(refusal([](SdpaParams& p) { p.sinks = sinks; }) == "sinks is for builds with USE_SINKS=1; set it to 0");
  CHECK(refusal([](SdpaParams& p) { p.bias = sinks; }) == "bias is for builds with USE_BIAS; set it to 0");
  CHECK(refusal([](SdpaParams& p) { p.bias_keys = p.Sk + 1; }).find("bias_keys=") == 0);
  CHECK(refusal([](SdpaParams& p) { p.bias_keys = -1; }).find("bias_keys=-1 is outside [0, ") == 0);
  CHECK(refusal([](SdpaParams& p) { p.k_lengths = reinterpret_cast<const int*>(sinks); }) ==
        "k_lengths is for builds with USE_LENGTHS=1; set it to 0");
  CHECK(refusal([](SdpaParams& p) { p.page_table = reinterpret_cast<const int*>(sinks); }) ==
        "page_table is for builds with USE_PAGES=1; set it to 0");
  CHECK(refusal([](SdpaParams& p) { p.most_keys = 7; }) == "most_keys is for builds with USE_LENGTHS=1; set it to 0");
  CHECK(refusal([](SdpaParams& p) { p.most_keys = -7; }) == "most_keys=-7 is outside [0, 1000000000]");
  CHECK(refusal([](SdpaParams& p) { p.window_left = -2; }) ==
        "window_left=-2 is outside [-1, 1000000000]");
  CHECK(refusal([](SdpaParams& p) { p.max_ctas = -1; }) ==
        "max_ctas=-1 is outside [0, 1000000000]");
  CHECK(refusal([](SdpaParams& p) { p.max_ctas = 8; }) ==
        "max_ctas is for builds with USE_PERSISTENT_CTA=1; set it to 0");
  CHECK(refusal([](SdpaParams& p) { p.k.row = 65; }) ==
        "K has a row stride of 65; pad it to a multiple of 8 or lower VEC_WIDTH");
  CHECK(refusal([](SdpaParams& p) { p.V = p.V + 1; }).find("V is not aligned to 16 bytes") == 0);
  CHECK(refusal([](SdpaParams& p) { p.o.head = 0; }) ==
        "O has a head stride of 0: its rows of 64 elements would overlap");
  CHECK(refusal([](SdpaParams& p) {
          p.B = p.Hq = p.Hkv = 1 << 15;
          p.Sq = 1 << 20;
        }).find("B*Hq*ceil(Sq/32) is over 2147483647 tiles") == 0);
  CHECK(refusal([](SdpaParams& p) { p.O = nullptr; }) == "O is a null pointer");
  SdpaParams p = valid_params();  // nothing to write: fine, whatever the pointers
  p.Sq = 0;
  p.Q = p.K = p.V = p.O = nullptr;
  CHECK(sdpa_forward(p, 0).ok());
}

// Every 331st float in [-150, 0], and all floats near multiples of 1/2, where the argument is
// split. If 2^t is a normal float, the relative error is at most 1e-4; otherwise the result is
// between 0 and the smallest normal float.
TEST_CASE("exp2") {
  CHECK((exp2_polynomial<Defines>(0.0f) == 1 && exp2_polynomial<Defines>(-0.0f) == 1));
  CHECK((exp2_polynomial<Defines>(-INFINITY) == 0 && std::isnan(exp2_polynomial<Defines>(NAN))));
  CHECK(exp2_polynomial<Defines>(-1e30f) == 0);
  for (int n = 0; n <= 126; n++) CHECK(exp2_polynomial<Defines>(float(-n)) == std::ldexp(1.0f, -n));
  std::mutex mutex;
  double worst = 0;
  bool flushed = true;
  const auto check = [&](uint32_t begin, uint32_t end, uint32_t step) {
    double largest = 0;
    bool all_flushed = true;
    for (uint32_t bits = begin; bits < end; bits += step) {
      const float t = float_of(bits);
      const double got = exp2_polynomial<Defines>(t);
      if (t < -126) {
        all_flushed &= got >= 0 && got <= 0x1p-126;
        continue;
      }
      // Near 0 the first terms of the series are accurate to 1e-13 and much faster.
      const double want = t > -1e-6f ? 1 + double(t) * 0.6931471805599453 : std::exp2(double(t));
      const double error = std::fabs(got / want - 1);
      if (!(error <= largest)) largest = error;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    if (!(largest <= worst)) worst = largest;
    flushed &= all_flushed;
  };
  const uint32_t first = bits_of(-0.0f), last = bits_of(-150.0f), chunk = 331 << 13;
  reference::parallel_for((last - first) / chunk + 1, [&](size_t c) {
    const uint32_t begin = first + uint32_t(c) * chunk;
    check(begin, std::min(last, begin + chunk), 331);
  });
  for (int n = 1; n < 300; n++) {
    const uint32_t half = bits_of(float(-n) / 2);
    check(half - 1000, half + 1000, 1);
  }
  printf("exp2_polynomial: largest relative error %.3g over floats in [-126, 0]\n", worst);
  CHECK(worst <= 1e-4);
  CHECK(flushed);
}

// SCORE_MOD, MASK_MOD: operators of all pairs of operand kinds give the same results as plain
// numbers.
template <class X, class Y> static void check_operators(X x, Y y) {
  const auto near = [](float got, float want) { CHECK(std::fabs(got - want) <= 1e-5f * (1 + std::fabs(want))); };
  const auto is = [&](auto got, float want) {
    near(float(got), want);
    if constexpr (std::is_same_v<decltype(got), expression::Sum>) near(got.factor_log2, got.factor * expression::log2e);
  };
  is(x + y, float(x) + float(y));
  is(x - y, float(x) - float(y));
  is(x * y, float(x) * float(y));
  if constexpr (expression::is_integer<X> && expression::is_integer<Y>) CHECK(x / y == int(x) / int(y));
  else is(x / y, float(x) / float(y));
  is(-x, -float(x));
  near(float(expression::min(x, y)), std::min(float(x), float(y)));
  near(float(expression::max(x, y)), std::max(float(x), float(y)));
}
TEST_CASE("expressions") {
  using namespace expression;
  constexpr int column = 3;  // one of a tile
  const auto values = std::make_tuple(7, 2.5f, Head{3, {}}, Number{1.5f}, Position{5, 0, column}, Position{40, 1, column}, Position{40, -2, column},
                                      Linear{2, 0.5f, column}, Score{0.75f, 3, 3 * log2e},
                                      Sum{1.25f, 2, 2 * log2e, {1, -0.5f, column}});
  std::apply([&](auto... x) {
    ([&](auto one) { (check_operators(one, x), ...); }(x), ...);
  }, values);
}

TEST_CASE("read_by_head") {
  for (const char* text : {"x2[h]", "s - x2[h] * 3", "s+x2 [ h ]", "x2[x2[h]]", "x1[h] + x2[h]"}) CHECK(reads_by_head(text, 2));
  for (const char* text : {"", "x2", "x2[h", "x2[h + 1]", "x1[h]", "x2[(h)]", "x 2[h]", "x2[q]", "s - x2[hh]"}) {
    CHECK_FALSE(reads_by_head(text, 2));
  }
}

// Divisor compared with /, for every kind of divisor and near its multiples.
TEST_CASE("divisor") {
  bool equal = true;
  for (uint64_t d = 1; d < 1u << 31; d = d < 1000 ? d + 1 : d * 17 / 16 + d % 3) {
    const Divisor divisor{uint32_t(d)};
    for (uint64_t n = 0; n < uint64_t(1) << 32; n = n < 4 ? n + 1 : n * 3 / 2) {
      for (int64_t i = -1; i <= 1; i++) {
        const int64_t x = int64_t(n / d * d) + i;
        if (x < 0 || x >= int64_t(1) << 31) continue;
        equal = equal && divisor.divide(uint32_t(x)) == uint32_t(x) / d &&
                divisor.remainder(uint32_t(x)) == uint32_t(x) % d;
      }
    }
    equal = equal && divisor.divide(0x7fffffff) == 0x7fffffff / d;
  }
  CHECK(equal);
}

// KeyBounds and TileBounds compared with the masks' definition, for all small problems and tiles inside them.
TEST_CASE("bounds_of_tiles") {
  bool in_range = true, touches = true, covers = true, intervals = true;
  const Causal kinds[] = {Causal::off, Causal::bottom_right, Causal::top_left};
  SdpaParams p{};
  const auto check = [&](int Sq, int Sk, int rows, int keys) {
    const KeyBounds bounds(p, Sq, Sk);
    const TileBounds tile(bounds, rows, keys);
    const auto position = [&](Causal by, int q) { return by == Causal::bottom_right ? q + Sk - Sq : q; };
    const auto sees = [&](int q, int k) {
      const int by_window = position(p.window_alignment == Causal::off ? p.causal : p.window_alignment, q);
      return (p.causal == Causal::off || k <= position(p.causal, q)) && (p.window_left < 0 || k >= by_window - p.window_left) &&
             (p.window_right < 0 || k <= by_window + p.window_right);
    };
    for (int q = 0; q < Sq; q++) {
      for (int k = 0; k < Sk; k++) in_range = in_range && sees(q, k) == (k >= bounds.begin(q) && k < bounds.end(q));
    }
    for (int q0 = 0; q0 + rows <= Sq; q0++) {
      for (int k0 = 0; k0 + keys <= Sk; k0++) {
        int seen = 0;
        for (int i = 0; i < rows * keys; i++) seen += sees(q0 + i / keys, k0 + i % keys);
        const Interval covered = tile.covered(q0);
        // Without a visible key at all, tiles may still count as touched.
        touches = touches && (bounds.from == bounds.to ? seen == 0 : tile.touch(q0, k0) == (seen > 0));
        covers = covers && tile.cover(q0, k0) == (seen == rows * keys);
        intervals = intervals && tile.cover(q0, k0) == (k0 >= covered.begin && k0 < covered.end);
      }
      covers = covers && !tile.cover(q0, Sk - keys + 1);  // a key that does not exist
    }
  };
  for (int i = 0; i < 3 * 3 * 5 * 5; i++) {
    p.causal = kinds[i % 3];
    p.window_alignment = kinds[i / 3 % 3];
    p.window_left = i / 9 % 5 - 1;
    p.window_right = i / 45 - 1;
    for (int Sq = 1; Sq <= 9; Sq++) {
      for (int Sk = 1; Sk <= 9; Sk++) {
        for (int size = 0; size < 9; size++) check(Sq, Sk, 1 + size % 3, 1 + size / 3);
      }
    }
  }
  CHECK(in_range);
  CHECK(touches);
  CHECK(covers);
  CHECK(intervals);
}

// With a mask, each group of heads_in_l2 heads starts with its longest rows. A smaller group comes
// first.
TEST_CASE("order_of_items") {
  SdpaParams p{};
  p.B = 1;
  p.Hq = p.Hkv = 3;
  p.Sq = p.Sk = 2 * Defines::block_m;
  p.D = 64;
  p.causal = Causal::bottom_right;
  KernelArgs a(p, mask_rows<Defines>, Defines::block_n);
  a.work_items = 6;
  a.q_blocks = Divisor(2);
  a.q_heads = Divisor(3);
  a.heads_in_l2 = 2;
  a.items_in_l2 = Divisor(4);
  string order;
  for (uint32_t i = 0; i < a.work_items; i++) {
    const Item<Defines> item = work_item<Defines>(a, i);
    order += format("%d:%d ", item.h, item.q0 / Defines::block_m);
  }
  CHECK(order == "2:1 2:0 1:1 0:1 1:0 0:0 ");
}

// The tile that is chosen for D=64 on an H200.
static const TunedTile& tile_of_d64(int B, int H, int Sq, int Sk, Causal causal) {
  SdpaParams p{};
  p.B = B;
  p.Hq = p.Hkv = H;
  p.Sq = Sq;
  p.Sk = Sk;
  p.D = 64;
  p.causal = causal;
  const TunedTile* best = &HOPPER_TILES[0];
  for (const TunedTile& t : HOPPER_TILES) {
    if (t.head_dim == 64 && tuned_clocks(t, p, 132) < tuned_clocks(*best, p, 132)) best = &t;
  }
  return *best;
}
TEST_CASE("tile_choice") {
  const auto rows = [](int B, int H, int Sq, int Sk, Causal causal) {
    return tile_of_d64(B, H, Sq, Sk, causal).block_m;
  };
  CHECK(rows(1, 8, 512, 512, Causal::off) == 32);     // 128 tiles: no SM has two
  CHECK(rows(2, 8, 512, 512, Causal::off) == 64);     // 128
  CHECK(rows(1, 8, 2048, 2048, Causal::off) == 128);  // 256 of 64 rows would be two waves
  CHECK(rows(1, 32, 16384, 16384, Causal::off) == 256);
  CHECK(rows(4, 32, 4096, 4096, Causal::off) == 256);
  CHECK(rows(66, 1, 384, 8192, Causal::off) == 192);  // one wave of 132, without a row too many
  CHECK(rows(4, 32, 4096, 4096, Causal::bottom_right) == 256);
  CHECK(rows(8, 32, 1024, 1024, Causal::bottom_right) == 256);  // 384 leave a third over
  CHECK(rows(132, 1, 64, 4096, Causal::top_left) == 64);
  CHECK(rows(1, 8, 2048, 2048, Causal::bottom_right) == 64);  // 128 rows: the longest decides
  CHECK(rows(1, 8, 3072, 3072, Causal::bottom_right) == 128);
  CHECK(rows(4, 8, 1024, 1024, Causal::bottom_right) == 64);  // two of them share an SM
  CHECK(rows(47, 48, 140, 140, Causal::off) == 256);
  CHECK(rows(16, 56, 76, 76, Causal::off) == 64);  // two of them share an SM
  // Without a mask the tile with ping-pong, with a mask the one that skips masked tiles.
  CHECK(tile_of_d64(4, 32, 4096, 4096, Causal::off).use_ping_pong);
  CHECK(tile_of_d64(4, 32, 4096, 4096, Causal::bottom_right).skip_masked);
}

#include "checker.h"
