// The checker checked: the tolerances, the reference, the witness, and what becomes of results that are wrong in one way.
// Included by unit.cu.

#include <map>
#include <sstream>

using reference::Mask;
using reference::Tolerance;

// The line, which a test may change; it is as before afterwards, and so is what else these tests change.
struct ChangedLine {
  Line& now = const_cast<Line&>(line);
  const Line before = line;
  ~ChangedLine() {
    now = before;
    has_witness = false, affordable_macs = 1.5e9, witness_elements = size_t(1) << 26;
    make_tensor = make_placed_tensor, check_more = [](Instance&) { return string(); };
    simt::gpu = {};
  }
};

// ---- tolerances ----

// Whether results pass of which all elements of O are `all` units of the last place away by turns up and down, the largest
// is `largest` units away, and LSE is wrong by so much of itself.
static bool passes(const Tolerance& tolerance, int bits, double all, double largest, double lse) {
  Comparison c(fp16, false);
  for (int q = 0; q < 64; q++) {
    std::vector<double> ref(64);
    std::vector<float> got(64);
    for (int d = 0; d < 64; d++) {
      ref[d] = q + d == 0 ? 1.999 : normal(q, Tensor::V, d) / 8;
      const double unit = std::ldexp(1.0, std::ilogb(ref[d]) - bits);
      got[d] = float(ref[d] + unit * (q + d == 0 ? largest : d % 2 ? all : -all));
    }
    c.add({0, 0, q}, {ref, 9, std::vector<char>(64)}, got.data(), float(9 + (q == 40 ? 9 * lse : 0)));
  }
  return c.verdict(tolerance) == "";
}

// Rounding moves an element by half a unit. A whole one in every element must pass and two must not; of the largest
// element two and three. Weights of e4m3 and sums in fp16 are coarser than what O is rounded to.
TEST_CASE("tolerances") {
  const struct {
    Tolerance of;
    int bits;  // whose units these are
    double all, too_many, largest, too_large, lse;
  } cases[] = {{fp16.tolerance, 10, 1, 2, 2, 3, 1e-3},
               {reference::bf16.tolerance, 7, 1, 2, 2, 3, 1e-3},
               {reference::u8.tolerance, 10, 2, 2.5, 4, 5, 1e-3},
               {reference::e4m3.tolerance, 3, 0.5, 0.65, 0.9, 1.1, 4e-3},
               {reference::fp16_sums, 10, 6, 8, 9, 11, 5e-3}};
  for (const auto& c : cases) {
    CHECK((passes(c.of, c.bits, c.all, 0, 0) && passes(c.of, c.bits, 0, c.largest, 0) && passes(c.of, c.bits, 0, 0, 0.9 * c.lse)));
    CHECK(!passes(c.of, c.bits, c.too_many, 0, 0));
    CHECK(!passes(c.of, c.bits, 0, c.too_large, 0));
    CHECK((!passes(c.of, c.bits, 0, 0, 1.1 * c.lse) && !passes(c.of, c.bits, 0, 0, -1.1 * c.lse)));
  }
  // Beside an LSE near 0 its error counts as it is.
  Comparison c(fp16, false);
  const float zero = 0;
  c.add({0, 0, 0}, {{0}, 0.01, {0}}, &zero, 0.0108f);
  CHECK((c.verdict(fp16.tolerance) == "" && c.lse_err > 7e-4 && c.lse_err < 9e-4));

  // A line has that of its inputs or of its output, whichever is larger, and of its sums.
  constexpr const reference::Type* types[] = {&fp16, &reference::bf16, &reference::e4m3, &reference::u8};
  constexpr const char* names[] = {"fp16", "bf16", "e4m3", "u8"};
  ChangedLine changed;
  const auto tolerance = [&](DType input, DType output, double scale = 0, double softcap = 0) {
    changed.now.input = input, changed.now.output = output;
    Problem p;
    p.scale = scale, p.softcap = softcap;
    return tolerance_of(p);
  };
  const auto same = [](const Tolerance& a, const Tolerance& b) {
    return a.rel_rms == b.rel_rms && a.max_abs == b.max_abs && a.lse == b.lse && a.weight_bits == b.weight_bits;
  };
  for (int in = 0; in < 4; in++) {
    CHECK(type_of(DType(in)).name == string(names[in]));
    for (int out = 0; out < 2; out++) {
      const Tolerance &a = types[in]->tolerance, &b = types[out]->tolerance;
      const Tolerance larger{std::max(a.rel_rms, b.rel_rms), std::max(a.max_abs, b.max_abs), std::max(a.lse, b.lse),
                             std::min(a.weight_bits, b.weight_bits)};
      CHECK(same(tolerance(DType(in), DType(out)), larger));
    }
  }
  changed.now.fp16_acc = 2;
  CHECK(same(tolerance(DType::fp16, DType::fp16), reference::fp16_sums));
  changed.now.fp16_acc = 0, changed.now.is_wgmma = true, changed.now.D = 256;
  CHECK(tolerance(DType::fp16, DType::fp16).lse == 1e-3);
  CHECK(tolerance(DType::e4m3, DType::fp16).lse == 8e-3);          // sums twice as long
  CHECK(tolerance(DType::e4m3, DType::fp16, 3 / 16.0).lse == 24e-3);  // and thrice as large
  changed.now.D = 64;
  CHECK(tolerance(DType::e4m3, DType::fp16, 1 / 16.0).lse == 4e-3);
  changed.now.is_wgmma = false, changed.now.D = 256;
  CHECK(tolerance(DType::e4m3, DType::fp16).lse == 4e-3);
  CHECK(same(tolerance(DType::bf16, DType::bf16, 0, 64), reference::bf16.tolerance));
  changed.now.tanh_is_approximate = true;
  const Tolerance t = tolerance(DType::bf16, DType::bf16, 0, 64);
  CHECK((t.rel_rms == 8e-3 + 1 / 32.0 && t.max_abs == 8e-3 + 1 / 32.0 && t.lse == 1e-3 + 1 / 32.0));
}

// ---- the reference ----

// Key by key as the formula has it: small problems with all that a problem may have at once.
TEST_CASE("formula") {
  uint64_t state = 1;
  const auto draw = [&](int size) { return int((state = reference::mix(state)) % uint64_t(size)); };
  int rows = 0, right = 0, counts_right = 0;
  constexpr int problems = 2000;
  for (int n = 0; n < problems; n++) {
    reference::Problem p{1 + draw(3), 0, 1 + draw(2), draw(6), draw(7), 8, Mask(draw(3)), draw(2) ? 0 : 0.7};
    p.Hq = p.Hkv * (1 + draw(3)), p.Dv = draw(2) ? 0 : 1 + draw(12);
    if (draw(2)) p.window_left = draw(5) - 1, p.window_right = draw(5) - 1, p.window_alignment = Mask(draw(3));
    p.packs_q = draw(3) == 0, p.packs_k = draw(3) == 0;
    const auto starts = [&](int size) {
      std::vector<int> x;
      for (int b = 0; b <= p.B; b++) x.push_back(draw(size + 1));
      std::sort(x.begin(), x.end());
      return x;
    };
    if (p.packs_q) p.q_starts = starts(p.Sq), p.q_starts[0] = 0, p.q_starts[p.B] = p.Sq;
    if (p.packs_k) p.k_starts = starts(p.Sk);
    if (draw(3) == 0) p.softcap = 1.5;
    for (int b = 0; b < p.B && n % 2; b++) p.k_lengths.push_back(draw(p.Sk + 3));
    for (int h = 0; h < p.Hq && n % 3 == 0; h++) p.sinks.push_back(draw(4) ? normal(n, Tensor::O, h) : -INFINITY);
    const bool has_factors = n % 5 == 0;
    const auto factors = [&](std::vector<double>& x, Tensor t) {
      for (size_t h = 0; h < heads_of(p, t) && has_factors; h++) x.push_back(0.5 + draw(4) / 4.0);
    };
    factors(p.q_factor, Tensor::Q), factors(p.k_factor, Tensor::K), factors(p.v_factor, Tensor::V);
    const int Dv = p.d_v(), k_batches = p.packs_k ? 1 : p.B;
    std::vector<float> Q(rows_of(p, Tensor::Q) * 8), K(rows_of(p, Tensor::K) * 8), V(rows_of(p, Tensor::K) * Dv);
    for (size_t i = 0; i < Q.size(); i++) Q[i] = normal(n, Tensor::Q, i);
    for (size_t i = 0; i < K.size(); i++) K[i] = normal(n, Tensor::K, i);
    for (size_t i = 0; i < V.size(); i++) V[i] = draw(40) ? normal(n, Tensor::V, i) : NAN;
    p.Q = Q.data(), p.K = K.data(), p.V = V.data();

    double pairs = 0;
    for (int b = 0; b < p.B; b++) {
      const int q0 = p.packs_q ? p.q_starts[b] : 0, Sq = p.packs_q ? p.q_starts[b + 1] - q0 : p.Sq;
      const int k0 = p.packs_k ? p.k_starts[b] : 0, most = p.packs_k ? p.k_starts[b + 1] - k0 : p.Sk;
      const int Sk = p.k_lengths.empty() ? most : std::min(most, p.k_lengths[b]);
      const auto sees = [&](int q, int k) {
        const auto place = [&](Mask by) { return by == Mask::bottom_right ? q + Sk - Sq : q; };
        const int own = place(p.window_alignment == Mask::none ? p.mask : p.window_alignment);
        return (p.mask == Mask::none || k <= place(p.mask)) && (p.window_left < 0 || k >= own - p.window_left) &&
               (p.window_right < 0 || k <= own + p.window_right);
      };
      for (int q = 0; q < Sq; q++) {
        for (int k = 0; k < Sk; k++) pairs += sees(q, k);
      }
      for (int i = 0; i < p.Hq * Sq; i++) {
        const int h = i / Sq, q = i % Sq, h_kv = h / (p.Hq / p.Hkv), q_batch = p.packs_q ? 0 : b, k_batch = k_batches == 1 ? 0 : b;
        const size_t q_head = q_batch * p.Hq + h, k_head = k_batch * p.Hkv + h_kv;
        double sum = p.sinks.empty() ? 0 : std::exp(p.sinks[h]);
        std::vector<double> O(Dv);
        std::vector<char> open(Dv);
        for (int k = 0; k < Sk; k++) {
          const float* const v = &V[(k_head * p.Sk + k0 + k) * Dv];
          double x = 0;
          for (int d = 0; d < 8; d++) x += double(Q[(q_head * p.Sq + q0 + q) * 8 + d]) * K[(k_head * p.Sk + k0 + k) * 8 + d];
          x *= p.scale == 0 ? 1 / std::sqrt(8.0) : p.scale;
          if (has_factors) x *= p.q_factor[q_head] * p.k_factor[k_head];
          if (p.softcap != 0) x = p.softcap * std::tanh(x / p.softcap);
          for (int d = 0; d < Dv; d++) {
            if (!sees(q, k)) open[d] |= std::isnan(v[d]);
            else O[d] += std::exp(x) * v[d];
          }
          if (sees(q, k)) sum += std::exp(x);
        }
        const reference::Result got = reference::attend(p, reference::Row{q_batch, h, q0 + q});
        const auto near = [](double a, double b) { return a == b || std::fabs(a - b) < 1e-12 || (std::isnan(a) && std::isnan(b)); };
        bool same = near(got.LSE, std::log(sum)) && int(got.O.size()) == Dv;
        for (int d = 0; same && d < Dv; d++) {
          same = near(got.O[d], sum == 0 ? 0 : O[d] / sum * (has_factors ? p.v_factor[k_head] : 1)) && got.open[d] == open[d];
        }
        rows++, right += same;
      }
    }
    counts_right += reference::visible_pairs(p) == pairs / p.B;
  }
  CHECK((right == rows && rows > 20 * problems));
  CHECK(counts_right == problems);
}
