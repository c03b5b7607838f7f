// Tests of the checks: tolerances, the CPU reference, the reference kernel, and results with a
// single fault. Included by unit.cu.

#include <iterator>
#include <map>
#include <sstream>

using Hides = reference::Mask;
using reference::Tolerance;

// The fault of a wrong kernel, set by the tests below.
static std::function<void(const SdpaParams&, int)> spoil;  // called after each launch, with its number
static SdpaStatus (*spoilt)(const SdpaParams&, cudaStream_t) = sdpa_forward;

namespace {

// Lets a test change the line, and restores it and other settings afterwards.
struct ChangedLine {
  Line& now = const_cast<Line&>(line);
  const Line before = line;
  ~ChangedLine() {
    now = before;
    has_reference_kernel = false;
    affordable_macs = 1.5e9;
    reference_kernel_elements = size_t(1) << 26;
    make_tensor = make_placed_tensor;
    check_more = [](Instance&) { return string(); };
    spoil = nullptr;
    spoilt = sdpa_forward;
    simt::gpu = {};
  }
};

}  // namespace

// ---- tolerances ----

// True if results pass in which all elements of O have an error of `all` units in the last place
// with alternating signs, the largest element has an error of `largest` units, and LSE has this
// relative error.
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

// Rounding changes an element by half a unit. An error of one unit in every element must pass and
// two must fail; in the largest element two must pass and three fail. Weights in e4m3 and sums in
// fp16 are coarser than the rounding of O.
TEST_CASE("tolerances") {
  const struct {
    Tolerance of;
    int bits;  // mantissa bits, which give the unit
    double all, too_many, largest, too_large, lse;
  } cases[] = {{fp16.tolerance, 10, 1, 2, 2, 3, 1e-3},
               {reference::bf16.tolerance, 7, 1, 2, 2, 3, 1e-3},
               {reference::u8.tolerance, 10, 2, 2.5, 4, 5, 1e-3},
               {reference::e4m3.tolerance, 3, 0.4, 0.5, 0.9, 1.1, 4e-3},
               {reference::fp16_sums, 10, 6, 8, 9, 11, 5e-3}};
  for (const auto& c : cases) {
    CHECK((passes(c.of, c.bits, c.all, 0, 0) && passes(c.of, c.bits, 0, c.largest, 0) && passes(c.of, c.bits, 0, 0, 0.9 * c.lse)));
    CHECK(!passes(c.of, c.bits, c.too_many, 0, 0));
    CHECK(!passes(c.of, c.bits, 0, c.too_large, 0));
    CHECK((!passes(c.of, c.bits, 0, 0, 1.1 * c.lse) && !passes(c.of, c.bits, 0, 0, -1.1 * c.lse)));
  }
  // If LSE is near 0, its error is absolute.
  Comparison c(fp16, false);
  const float zero = 0;
  c.add({0, 0, 0}, {{0}, 0.01, {0}}, &zero, 0.0108f);
  CHECK((c.verdict(fp16.tolerance) == "" && c.lse_err > 7e-4 && c.lse_err < 9e-4));

  // The tolerance of a line is the maximum of those of its inputs, its output and its sums.
  constexpr const reference::Type* types[] = {&fp16, &reference::bf16, &reference::e4m3, &reference::u8};
  constexpr const char* names[] = {"fp16", "bf16", "e4m3", "u8"};
  ChangedLine changed;
  const auto tolerance = [&](DType input, DType output, double scale = 0, double softcap = 0) {
    changed.now.query = changed.now.input = input;
    changed.now.output = output;
    Problem p;
    p.scale = scale;
    p.softcap = softcap;
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
  changed.now.query = DType::fp16;
  changed.now.input = DType::e4m3;
  changed.now.output = DType::fp16;  // KV_DTYPE
  CHECK(same(tolerance_of(Problem()), fp16.tolerance));
  changed.now.fp16_acc = 2;
  CHECK(same(tolerance(DType::fp16, DType::fp16), reference::fp16_sums));
  changed.now.fp16_acc = 0;
  changed.now.is_wgmma = true;
  changed.now.D = 256;
  CHECK(tolerance(DType::fp16, DType::fp16).lse == 1e-3);
  CHECK(tolerance(DType::e4m3, DType::fp16).lse == 8e-3);          // sums twice as long
  CHECK(tolerance(DType::e4m3, DType::fp16, 3 / 16.0).lse == 24e-3);  // and thrice as large
  changed.now.D = 64;
  CHECK(tolerance(DType::e4m3, DType::fp16, 1 / 16.0).lse == 4e-3);
  changed.now.is_wgmma = false;
  changed.now.D = 256;
  CHECK(tolerance(DType::e4m3, DType::fp16).lse == 4e-3);
  CHECK(same(tolerance(DType::bf16, DType::bf16, 0, 64), reference::bf16.tolerance));
  changed.now.tanh_is_approximate = true;
  const Tolerance t = tolerance(DType::bf16, DType::bf16, 0, 64);
  CHECK((t.rel_rms == 8e-3 + 1 / 32.0 && t.max_abs == 8e-3 + 1 / 32.0 && t.lse == 1e-3 + 1 / 32.0));
}

// Comparing heads separately and merging, as for the reference kernel, must give the same verdict
// and errors as one comparison of all rows. Each fault affects another statistic of the merged
// rows.
TEST_CASE("merged_rows") {
  const Tolerance usual = fp16.tolerance, e4m3 = reference::e4m3.tolerance;
  const struct {
    const char* sentence;  // how the verdict begins
    Tolerance tolerance;
    double all, largest, lse;  // errors: of each element, of one element, of one LSE, relative to it
    double inward;             // units of the last place by which every element is too small
    double other_rows;         // the size of all rows but the first
  } faults[] = {{"", usual, 0, 0, 0, 0, 1},
                {"O(b=0,h=0,q=17,d=5) ref=", usual, 0, 0.02, 0, 0, 1},
                {"rel_rms=0.002 tol=0.001; worst ", usual, 2e-3, 0, 0, 0, 1},
                {"LSE(b=0,h=0,q=30) ref=", usual, 0, 0, 2e-3, 0, 1},
                {"O is not rounded to nearest: its mean error is -0.4", usual, 0, 0, 0, 0.4, 1},
                {"", usual, 0, 0, 0, 0.2, 1},
                {"rel_rms=0.0422 tol=0.04; worst ", e4m3, 0.0422, 0, 0, 0, 1},
                {"", e4m3, 0.0422, 0, 0, 0, 1e-3},  // effectively one row
                {"", usual, 0, 0.01, 0, 0, 64},     // the error is small relative to elements of 20
                {"O(b=0,h=0,q=17,d=5) ref=", usual, 0, 0.04, 0, 0, 64}};
  for (const auto& fault : faults) {
    for (int parts : {1, 3, 8}) {
      const bool judges_rounding = fault.tolerance.weight_bits > 10;  // as for e4m3 it is not
      Comparison whole(fp16, judges_rounding), merged(fp16, judges_rounding);
      std::vector<Comparison> of_part(parts, Comparison(fp16, false));
      for (int q = 0; q < 48; q++) {
        std::vector<double> ref(64);
        std::vector<float> got(64);
        for (int d = 0; d < 64; d++) {
          ref[d] = normal(q, Tensor::V, d) / 8 * (q ? fault.other_rows : 1);
          const double rounded = fault.inward != 0 ? ref[d] - std::copysign(fault.inward * ulp(fp16, ref[d]), ref[d]) : ref[d];
          got[d] = float(rounded * (1 + (d % 2 ? fault.all : -fault.all)) + (q == 17 && d == 5 ? fault.largest : 0));
        }
        const double lse = 1 + q;
        const float got_lse = float(lse * (1 + (q == 30 ? fault.lse : 0)));
        const reference::Result want{ref, lse, std::vector<char>(64)};
        for (Comparison* c : {&whole, &of_part[q % parts]}) c->add({0, 0, q}, want, got.data(), got_lse);
      }
      for (const Comparison& c : of_part) merged.merge(c);
      const std::string verdict = merged.verdict(fault.tolerance);
      CAPTURE(parts);
      CAPTURE(verdict);
      CHECK((whole.verdict(fault.tolerance) == verdict && (*fault.sentence ? verdict.find(fault.sentence) == 0 : verdict == "")));
      CHECK((merged.rows == 48 && merged.max_abs_err == whole.max_abs_err && merged.lse_err == whole.lse_err));
      CHECK((merged.rel_rms == doctest::Approx(whole.rel_rms) && merged.rel_rms_limit == doctest::Approx(whole.rel_rms_limit)));
      CHECK((merged.largest_lse == 48 && whole.largest_lse == 48));
    }
  }
}

// ---- the reference ----

// A direct implementation of the formula: small problems with all features at once.
TEST_CASE("formula") {
  uint64_t state = 1;
  const auto draw = [&](int size) { return int((state = reference::mix(state)) % uint64_t(size)); };
  int rows = 0, right = 0, counts_right = 0;
  constexpr int problems = 2000;
  for (int n = 0; n < problems; n++) {
    reference::Problem p{1 + draw(3), 0, 1 + draw(2), draw(6), draw(7), 8, Hides(draw(3)), draw(2) ? 0 : 0.7};
    p.Hq = p.Hkv * (1 + draw(3));
    p.Dv = draw(2) ? 0 : 1 + draw(12);
    if (draw(2)) {
      p.window_left = draw(5) - 1;
      p.window_right = draw(5) - 1;
      p.window_alignment = Hides(draw(3));
    }
    p.packs_q = draw(3) == 0;
    p.packs_k = draw(3) == 0;
    const auto starts = [&](int size) {
      std::vector<int> x;
      for (int b = 0; b <= p.B; b++) x.push_back(draw(size + 1));
      std::sort(x.begin(), x.end());
      return x;
    };
    if (p.packs_q) {
      p.q_starts = starts(p.Sq);
      p.q_starts[0] = 0;
      p.q_starts[p.B] = p.Sq;
    }
    if (p.packs_k) p.k_starts = starts(p.Sk);
    if (draw(3) == 0) p.softcap = 1.5;
    for (int b = 0; b < p.B && n % 2; b++) p.k_lengths.push_back(draw(p.Sk + 3));
    for (int b = 0; b < p.B && n % 4 / 2; b++) p.q_lengths.push_back(draw(p.Sq + 4) - 1);
    for (int h = 0; h < p.Hq && n % 3 == 0; h++) p.sinks.push_back(draw(4) ? normal(n, Tensor::O, h) : -INFINITY);
    const bool has_factors = n % 5 == 0;
    const auto factors = [&](std::vector<double>& x, Tensor t) {
      for (int h = 0; h < p.B * (t == Tensor::Q ? p.Hq : p.Hkv) && has_factors; h++) x.push_back(0.5 + draw(4) / 4.0);
    };
    factors(p.q_factor, Tensor::Q);
    factors(p.k_factor, Tensor::K);
    factors(p.v_factor, Tensor::V);
    const int Dv = p.d_v(), k_batches = p.packs_k ? 1 : p.B;
    std::vector<float> Q(rows_of(p, Tensor::Q) * 8), K(rows_of(p, Tensor::K) * 8), V(rows_of(p, Tensor::K) * Dv);
    for (size_t i = 0; i < Q.size(); i++) Q[i] = normal(n, Tensor::Q, i);
    for (size_t i = 0; i < K.size(); i++) K[i] = normal(n, Tensor::K, i);
    for (size_t i = 0; i < V.size(); i++) V[i] = draw(40) ? normal(n, Tensor::V, i) : NAN;
    p.Q = Q.data();
    p.K = K.data();
    p.V = V.data();

    double pairs = 0;
    for (int b = 0; b < p.B; b++) {
      const int q0 = p.packs_q ? p.q_starts[b] : 0, most_queries = p.packs_q ? p.q_starts[b + 1] - q0 : p.Sq;
      const int Sq = p.q_lengths.empty() ? most_queries : std::clamp(p.q_lengths[b], 0, most_queries);
      const int k0 = p.packs_k ? p.k_starts[b] : 0, most = p.packs_k ? p.k_starts[b + 1] - k0 : p.Sk;
      const int Sk = p.k_lengths.empty() ? most : std::min(most, p.k_lengths[b]);
      const auto sees = [&](int q, int k) {
        const auto place = [&](Hides by) { return by == Hides::bottom_right ? q + Sk - Sq : q; };
        const int own = place(p.window_alignment == Hides::none ? p.mask : p.window_alignment);
        return (p.mask == Hides::none || k <= place(p.mask)) && (p.window_left < 0 || k >= own - p.window_left) &&
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
          if (has_factors) x *= p.q_factor[b * p.Hq + h] * p.k_factor[b * p.Hkv + h_kv];
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
          same = near(got.O[d], sum == 0 ? 0 : O[d] / sum * (has_factors ? p.v_factor[b * p.Hkv + h_kv] : 1)) && got.open[d] == open[d];
        }
        rows++;
        right += same;
      }
    }
    counts_right += reference::visible_pairs(p) == pairs / p.B;
  }
  CHECK((right == rows && rows > 5 * problems));
  CHECK(counts_right == problems);
}

// ---- the reference kernel ----

template <class Q, class T = Q> static cudaError_t reference_kernel_of(const Instance& instance, float* O, float* LSE) {
  return launch_reference_kernel<Q, T>(instance.params, 0, int(heads_of(instance.problem, Tensor::O)), O, LSE);
}

// The reference kernel compared with the CPU reference, for all input types and features.
TEST_CASE("reference_kernel_of_all") {
  ChangedLine changed;
  make_tensor = make_placed_tensor;
  changed.now.has_lengths = true;
  uint64_t state = 3;
  const auto draw = [&](int size) { return int((state = reference::mix(state)) % uint64_t(size)); };
  constexpr int sizes[][2] = {{64, 64}, {32, 48}, {48, 32}, {128, 128}, {96, 64}, {64, 192}, {256, 40}, {80, 80}};
  constexpr decltype(&reference_kernel_of<__half>) reference_kernels[] = {reference_kernel_of<__half>, reference_kernel_of<__nv_bfloat16>, reference_kernel_of<__nv_fp8_e4m3>,
                                                         reference_kernel_of<uint8_t>, reference_kernel_of<__half, __nv_fp8_e4m3>,
                                                         reference_kernel_of<__nv_bfloat16, __nv_fp8_e4m3>};
  const char* const dists_of_all[] = {"normal", "outliers", "uniform", "ramps"};
  for (int n = 0; n < 48; n++) {
    const int types = n % 6;  // the last two: 16-bit Q, 8-bit K and V
    changed.now.query = DType(types % 4);
    changed.now.input = types > 3 ? DType::e4m3 : changed.now.query;
    changed.now.D = sizes[n / 6 % 8][0];
    changed.now.Dv = sizes[n / 6 % 8][1];
    Problem p;
    p.B = 1 + draw(5);
    p.Hkv = 1 + draw(2);
    p.Hq = p.Hkv * (1 + draw(3));
    p.Sq = 1 + draw(40);
    p.Sk = draw(90);
    p.mask = Hides(draw(3));
    p.dist = dists_of_all[draw(4)];
    p.layout = layouts[draw(6)];
    p.same_heads = p.layout == "zero";
    if (draw(2)) {
      p.window_left = draw(30) - 1;
      p.window_right = draw(30) - 1;
      p.window_alignment = Hides(draw(3));
    }
    if (draw(3) == 0) p.softcap = 3;
    if (draw(3) == 0) p.scale = 0.3f;
    p.has_sinks = draw(3) == 0;
    p.has_lengths = draw(2);
    p.packs_q = draw(3) == 0;
    p.packs_k = draw(3) == 0;
    if (p.has_sinks && p.dist == "ramps") p.dist = "normal";
    p.descale = descales[draw(DESCALES)];
    changed.now.use_bias = types < 2 ? draw(4) : 0;  // of 16 bits
    if (line.use_bias) {
      p.bias_kind = draw(2) ? "tree" : line.use_bias == 2 ? "bool" : "add";
      p.bias_dims = draw(2) ? "bhq" : "q";
    }
    p.shape = format("%dx%dx%dx%dx%d", p.B, p.Hq, p.Hkv, p.Sq, p.Sk);
    Instance instance(p);
    instance.set_inputs(n);
    const auto rows = reference::rows_to_check(instance.problem, 0, 32, 1e12);
    const auto want = reference::attend(instance.problem, rows);
    std::vector<float> O(rows.size() * line.Dv), LSE(rows.size());
    CHECK(reference_kernels[types](instance, O.data(), LSE.data()) == cudaSuccess);
    Comparison comparison(fp16, false);
    for (size_t i = 0; i < rows.size(); i++) comparison.add(rows[i], want[i], &O[i * line.Dv], LSE[i]);
    const double limit = 1e-5 * std::max(1.0, comparison.largest_lse / 32);
    const string trouble = comparison.verdict({limit, limit, limit});
    CHECK(trouble == "");
    if (trouble != "") fprintf(stderr, "%d %s: %s\n", n, command_of(p).c_str(), trouble.c_str());
  }
}

// ---- inputs of a kernel ----

// Q, K and V read from device memory through strides, pages, lengths and factors, compared with
// those of the reference. All other elements that a tile could read are poison.
TEST_CASE("given") {
  ChangedLine changed;
  make_tensor = make_placed_tensor;
  changed.now.has_lengths = true;
  for (int n = 0; n < 48; n++) {
    const bool paged = n % 3 == 0;
    changed.now.query = changed.now.input = n % 2 ? DType::e4m3 : DType::fp16;
    changed.now.Dv = n % 4 < 2 ? 64 : 48;
    Problem p;
    p.B = 9;
    p.Hkv = 2;
    p.Hq = 8;
    p.Sq = 21;
    p.Sk = 70;
    p.has_sinks = true;
    p.has_lengths = n % 5 > 0;
    p.packs_q = n % 7 > 3;
    p.packs_k = !paged && n % 7 % 2;
    p.page_size = paged ? 16 : 0;
    p.layout = paged ? n % 2 ? "bhsd" : "bshd" : layouts[n % 6];
    p.same_heads = p.layout == "zero";
    p.descale = descales[n / 2 % DESCALES];
    Instance instance(p);
    instance.set_inputs(n);
    const SdpaParams& g = instance.params;
    const reference::Problem& want = instance.problem;
    const auto value = [&](const void* tensor, int64_t at) {
      if (n % 2) return element_value(line.input, static_cast<const uint8_t*>(tensor)[at]);
      return element_value(line.input, static_cast<const uint16_t*>(tensor)[at]);
    };
    // Lengths: one exceeds Sk (or is Sk, with pages), one is negative, one is 1.
    int wild = 0;
    for (int b = 0; b < p.B; b++) {
      const int length = g.k_lengths ? g.k_lengths[b] : p.Sk;
      if (g.k_lengths) CHECK(want.k_lengths[b] == std::min(std::max(length, 0), p.Sk));
      wild += length > p.Sk - paged || length < 0 || ((n + b) % 8 == 7 && length == 1);
    }
    CHECK((!g.k_lengths || wild >= 3));
    // Starts at either end of a tensor may be passed out of bounds.
    const auto is_given = [&](const int* starts, const std::vector<int>& own, int rows) {
      return std::equal(own.begin(), own.end(), starts, [&](int a, int b) { return a == std::min(std::max(b, 0), rows); });
    };
    CHECK((!g.q_starts || is_given(g.q_starts, want.q_starts, p.Sq)));
    CHECK((!g.k_starts || is_given(g.k_starts, want.k_starts, p.Sk)));
    for (const auto& starts : {std::make_pair(g.q_starts, want.q_starts), std::make_pair(g.k_starts, want.k_starts)}) {
      CHECK((starts.first != nullptr) == !starts.second.empty());
      CHECK((!starts.first || (starts.second.size() == 10 && std::is_sorted(starts.second.begin(), starts.second.end()))));
    }
    for (int h = 0; h < 8; h++) CHECK(g.sinks[h] == want.sinks[h]);
    for (int h = 0; h < 8; h++) {
      const int turn = (n + h) % 8;
      CHECK(g.sinks[h] == (turn == 5 ? -INFINITY : turn == 6 && h > 0 ? 100 : turn == 7 ? -150 : g.sinks[h]));
      CHECK((turn >= 5 || std::fabs(g.sinks[h]) < 20));
    }

    bool same = true, factors_same = true;
    const auto factor = [&](const Descale& d, int b, int h) { return d.factor ? double(d.factor[b * d.batch + h * d.head]) : 1.0; };
    const double unit = n % 2 ? 1 : 0;
    for (int b = 0; b < (p.packs_q ? 1 : p.B); b++) {
      for (int h = 0; h < p.Hq; h++) {
        if (unit != 0) factors_same &= want.q_factor[b * p.Hq + h] == factor(g.q_descale, b, h);
        for (int i = 0; i < p.Sq * line.D; i++) {
          const int64_t at = b * g.q.batch + h * g.q.head + i / line.D * g.q.row + i % line.D;
          same &= value(g.Q, at) == want.Q[(size_t(b * p.Hq + h) * p.Sq) * line.D + i];
        }
      }
    }
    for (int b = 0; b < (p.packs_k ? 1 : p.B); b++) {
      for (int h = 0; h < p.Hkv; h++) {
        if (unit != 0) factors_same &= want.k_factor[b * p.Hkv + h] == factor(g.k_descale, b, h);
        if (unit != 0) factors_same &= want.v_factor[b * p.Hkv + h] == factor(g.v_descale, b, h);
        for (int k = 0; k < p.Sk; k++) {
          bool is_key = false;
          for (int own = p.packs_k || p.same_heads ? 0 : b; own < (p.packs_k || p.same_heads ? p.B : b + 1); own++) {
            const int first = p.packs_k ? want.k_starts[own] : 0, keys = p.packs_k ? want.k_starts[own + 1] - first : p.Sk;
            is_key |= k >= first && k < first + (g.k_lengths ? std::min(want.k_lengths[own], keys) : keys);
          }
          for (int t = 0; t < 2; t++) {
            const Strides& s = t ? g.v : g.k;
            const int D = t ? line.Dv : line.D;
            const float* const row = (t ? want.V : want.K) + (size_t(b * p.Hkv + h) * p.Sk + k) * D;
            const int64_t batch = paged ? g.page_table[b * g.page_stride + k / 16] : b;
            if (paged && (batch < 0 || batch >= g.pages - 1)) {  // no query sees it
              same &= !is_key || (p.packs_q && want.q_starts[b] == want.q_starts[b + 1]);
              continue;
            }
            const int64_t at = batch * s.batch + h * s.head + (paged ? k % 16 : k) * s.row;
            for (int d = 0; d < D; d++) {
              const float x = value(t ? static_cast<const void*>(g.V) : g.K, at + d);
              same &= is_key ? x == row[d] : !std::isfinite(x) && std::isnan(row[d]);
            }
          }
        }
      }
    }
    CHECK((same && factors_same));
    if (p.descale == "zeros" && n % 2) CHECK(std::count(want.k_factor.begin(), want.k_factor.end(), 0.0) > 0);
    if (paged) {  // entries that no visible key needs: out of bounds, or the shared page
      const int* const table = g.page_table;
      const int entries = p.B * g.page_stride;
      CHECK((std::count(table, table + entries, -7) > 0 && std::count(table, table + entries, 2147483647) > 0));
      CHECK(std::count(table, table + entries, g.pages - 1) > 0);
    }
  }
}

// ---- results with a single fault ----

// The reference kernel, rounded, as the tested kernel: supports all features except pages. Does not
// write unused rows.
static SdpaStatus forward_by_reference_kernel(const SdpaParams& p, cudaStream_t) {
  const int heads = (p.q_starts ? 1 : p.B) * p.Hq, rows = heads * p.Sq;
  std::vector<float> O(size_t(rows) * p.Dv), LSE(rows);
  launch_reference_kernel<__half, __half>(p, 0, heads, O.data(), LSE.data());
  cudaDeviceSynchronize();
  for (int row = 0; row < rows; row++) {
    const int head = row / p.Sq, q = row % p.Sq;
    int own = head / p.Hq, first = 0, queries = p.Sq;
    if (p.q_starts) {
      for (own = 0; p.q_starts[own + 1] <= q;) own++;
      first = std::max(p.q_starts[own], 0);
      queries = std::min(p.q_starts[own + 1], p.Sq) - first;
    }
    if (p.q_lengths) queries = std::min(queries, p.q_lengths[own]);
    if (q - first >= queries) continue;
    Output* const to = p.O + head / p.Hq * p.o.batch + head % p.Hq * p.o.head + q * p.o.row;
    for (int d = 0; d < p.Dv; d++) to[d] = rounded<Output>(O[size_t(row) * p.Dv + d]);
    if (p.LSE) p.LSE[row] = LSE[row];
  }
  return {};
}

// A kernel whose results are modified after it has run.
static std::vector<SdpaParams> launches;
static bool was_poisoned;
static SdpaStatus forward_and_spoil(const SdpaParams& p, cudaStream_t stream) {
  const auto is_poison = [](const void* x, size_t bytes) {
    return std::all_of(static_cast<const char*>(x), static_cast<const char*>(x) + bytes, [](char c) { return c == char(0xff); });
  };
  const bool lies_plain = p.o.row == p.D && p.o.head == p.D * p.Sq;
  if (lies_plain) was_poisoned &= is_poison(p.O, size_t(p.B) * p.Hq * p.Sq * p.D * 2);
  if (p.LSE) was_poisoned &= is_poison(p.LSE, size_t(p.B) * p.Hq * p.Sq * 4);
  launches.push_back(p);
  if (p.Sk == 13) return failure(cudaErrorLaunchFailure, "no luck");
  SdpaParams ours = p;
  ours.max_ctas = 0;
  ours.workspace = ours.scratch = nullptr;
  const SdpaStatus status = spoilt(ours, stream);
  cudaDeviceSynchronize();
  if (spoil) spoil(p, int(launches.size()));
  return status;
}

struct Swept {
  int code;
  std::string said;                                       // to stderr
  std::vector<std::map<std::string, std::string>> rows;  // of CSV, by column
  const std::string& of(const char* column) { return rows.at(0)[column]; }
};
// Runs sweep_NAME with these arguments and a modified kernel.
static Swept sweep(const std::string& words, std::function<void(const SdpaParams&, int)> spoil_ = nullptr) {
  spoil = spoil_;
  launches.clear();
  was_poisoned = true;
  std::istringstream in("sweep " + words);
  std::vector<std::string> text{std::istream_iterator<std::string>(in), {}};
  std::vector<char*> argv;
  for (std::string& word : text) argv.push_back(&word[0]);
  fflush(stdout);
  fflush(stderr);
  const int old[] = {dup(1), dup(2)};
  FILE* const files[] = {tmpfile(), tmpfile()};
  for (int i : {0, 1}) dup2(fileno(files[i]), i + 1);
  Swept run{sweep_main(int(argv.size()), argv.data()), "", {}};
  fflush(stdout);
  fflush(stderr);
  std::string contents[2];
  for (int i : {0, 1}) {
    dup2(old[i], i + 1);
    close(old[i]);
    rewind(files[i]);
    for (int c; (c = fgetc(files[i])) != EOF;) contents[i] += char(c);
    fclose(files[i]);
  }
  run.said = contents[1];
  std::istringstream lines(contents[0]);
  for (std::string row; std::getline(lines, row);) {
    run.rows.emplace_back();
    std::istringstream cells(row);
    for (const Column& c : columns({}, {})) std::getline(cells, run.rows.back()[c.name], ',');
  }
  return run;
}
static bool says(const Swept& run, const std::string& words) {
  const bool found = run.said.find(words) != std::string::npos;
  if (!found) fprintf(stderr, "wanted: %s\nsaid: %s\n", words.c_str(), run.said.c_str());
  return found;
}
static Output& element(const SdpaParams& p, int row, int d) {
  return p.O[row / p.Sq / p.Hq * p.o.batch + row / p.Sq % p.Hq * p.o.head + row % p.Sq * p.o.row + d];
}
// Changes an element by a number of units in the last place.
static void move(Output& x, int units) {
  uint16_t bits;
  memcpy(&bits, &x, 2);
  bits = uint16_t(bits + units);
  memcpy(static_cast<void*>(&x), &bits, 2);
}

// Every row, its first and last element, and LSE are checked, and the sentence names the wrong one.
TEST_CASE("every_row") {
  ChangedLine changed;
  changed.now.forward = forward_and_spoil;
  const int rows = 2 * 3 * 5, D = Defines::head_dim;
  const std::string shape = "--check-only --shape 2,3,1,5,7 --seeds 4 --layout packed";
  Swept clean = sweep(shape + " --repeats 2");
  CHECK((clean.code == 0 && clean.said == "" && launches.size() == 1 + 3 + 2 && clean.of("check") == "PASS" && clean.of("status") == "ok"));
  CHECK((clean.of("rows_checked") == "30" && clean.of("rows_witnessed") == "0" && clean.of("seed") == "4"));
  CHECK(sweep(shape + " --repeats 1").code + launches.size() == 1 + 3 + 1);
  for (int row = 0; row < rows; row++) {
    for (int d : {0, 17, D - 1}) {
      const Swept run = sweep(shape, [&](const SdpaParams& p, int) {
        if (p.LSE) element(p, row, d) = rounded<Output>(to_float(element(p, row, d)) + 0.02f);
      });
      CHECK(run.code == 1);
      CHECK(says(run, format("FAIL 2x3x1x5x7: O(b=%d,h=%d,q=%d,d=%d) ref=", row / 15, row / 5 % 3, row % 5, d)));
      CHECK(says(run, "repeat with: --check-only --shape 2,3,1,5,7 --seeds 4 --layout packed\n"));
    }
    const Swept run = sweep(shape, [&](const SdpaParams& p, int) {
      if (p.LSE) p.LSE[row] += 0.02f;
    });
    CHECK((run.code == 1 && says(run, format("LSE(b=%d,h=%d,q=%d) ref=", row / 15, row / 5 % 3, row % 5))));
  }
}

// Other faults that must fail, and their messages. Launch 1 is compared with the reference, 2 to 4
// are the chain, then the repeats.
TEST_CASE("spoiled") {
  ChangedLine changed;
  changed.now.forward = forward_and_spoil;
  using P = const SdpaParams&;
  const auto spoiled = [&](const char* words, const std::string& sentence, std::function<void(P, int)> how) {
    const Swept run = sweep(words, how);
    CHECK((run.code == 1 && says(run, sentence)));
    CHECK((run.rows.size() == 1 && run.rows[0].at("check") == "FAIL" && run.rows[0].at("note") != ""));
  };
  const char* const words = "--check-only --shape 1,2,1,40,30 --repeats 2";
  CHECK((sweep(words).code == 0 && was_poisoned && launches.size() == 6));
  spoiled(words, "O(b=0,h=1,q=2,d=3) was never written", [](P p, int n) { if (n == 1) memset(static_cast<void*>(&element(p, 42, 3)), 255, 2); });
  spoiled(words, "LSE(b=0,h=1,q=2,d=0) was never written", [](P p, int n) { if (n == 1) memset(p.LSE + 42, 255, 4); });
  spoiled(words, "got=nan err=inf", [](P p, int n) { if (n == 1) element(p, 42, 3) = rounded<Output>(NAN); });
  spoiled(words, "got=inf err=inf", [](P p, int n) { if (n == 1) element(p, 42, 3) = rounded<Output>(INFINITY); });
  spoiled(words, "LSE(b=0,h=0,q=9)", [](P p, int n) { if (n == 1) p.LSE[9] = NAN; });
  spoiled(words, "LSE(b=0,h=0,q=9)", [](P p, int n) { if (n == 1) p.LSE[9] = -INFINITY; });
  for (int nth : {5, 6}) {
    spoiled(words, "O(b=0,h=1,q=39,d=63) of two runs on the same inputs differs: ", [&](P p, int n) { if (n == nth) move(element(p, 79, 63), 1); });
    spoiled(words, "LSE of two runs on the same inputs differs", [&](P p, int n) { if (n == nth) p.LSE[79] = std::nextafter(p.LSE[79], 9.0f); });
    spoiled(words, "the kernel wrote into K", [&](P p, int n) { if (n == nth) move(const_cast<KeyValue&>(p.K[5]), 1); });
  }
  spoiled(words, "O(b=0,h=0,q=0,d=0) in a chain of kernels differs", [](P p, int n) { if (n == 3) move(element(p, 0, 0), 1); });
  spoiled(words, "LSE in a chain of kernels differs", [](P p, int n) { if (n == 3) p.LSE[0] += 1e-6f; });
  for (int nth : {2, 4}) {
    spoiled(words, "O of the second kernel(b=0,h=1,q=39,d=63) in a chain of kernels differs", [&](P p, int n) { if (n == nth) move(element(p, 79, 63), 1); });
    spoiled(words, "the kernel wrote after O", [&](P p, int n) { if (n == nth) element(p, 79, 64) = rounded<Output>(0); });
  }
  // A truncated O; not detected if P or the approximation of tanh is coarser than O.
  const auto truncated = [](P p, int) {
    for (int i = 0; i < 80 * 64 && p.LSE; i++) {
      Output& x = element(p, i / 64, i % 64);
      if (i % 4 && std::fabs(to_float(x)) < 0.5f) move(x, -1);
    }
  };
  spoiled(words, "O is not rounded to nearest", truncated);
  changed.now.tanh_is_approximate = changed.now.has_softcap = true;
  CHECK(sweep(words).code == 0);
  spoiled(words, "O is not rounded to nearest", truncated);
  changed.now = changed.before;
  changed.now.forward = forward_and_spoil;

  // The workspace must be zero after a launch.
  changed.now.facts_of = [](P p) {
    KernelFacts facts = facts_of(p);
    facts.workspace_bytes = 64;
    facts.scratch_bytes = 256;
    return facts;
  };
  CHECK(sweep(words).code == 0);
  spoiled(words, "the kernel left 7 in the workspace", [](P p, int n) { if (n == 1) static_cast<int*>(p.workspace)[15] = 7; });
  const auto scratch_is_poisoned = [](P p, int n) {
    int* const scratch = static_cast<int*>(p.scratch);
    if (n == 1 || n > 4) CHECK(std::count(scratch, scratch + 64, -1) == 64);  // before each launch outside the chain
    std::fill(scratch, scratch + 64, 7);
  };
  CHECK((sweep(words, scratch_is_poisoned).code == 0 && launches.size() == 6));

  // The first launch has as many CTAs as are resident, the others max_ctas.
  changed.now.has_queue = true;
  CHECK(sweep("--check-only --shape 1,1,1,40,30 --max-ctas 3 --repeats 2").code == 0);
  for (size_t n = 0; n < launches.size(); n++) CHECK(launches[n].max_ctas == (n == 0 ? 0 : 3));
}

// The first row of [B,Hq,Sq] that is a query, or that is unused.
static int first_row(const SdpaParams& p, bool is_query) {
  for (int row = 0;; row++) {
    if ((row % p.Sq < p.q_lengths[row / p.Sq / p.Hq]) == is_query) return row;
  }
}

// Unused rows must not be written, and all others must be. The fault is the same in each launch, so
// that runs do not differ.
TEST_CASE("spoiled_queries") {
  ChangedLine changed;
  changed.now.forward = forward_and_spoil;
  changed.now.has_lengths = true;
  spoilt = forward_by_reference_kernel;
  for (const char* words : {"--check-only --shape 5,2,1,12,30 --q-lengths --seeds 2", "--check-only --shape 5,2,1,12,30 --q-lengths --lengths --seeds 3"}) {
    CHECK(sweep(words).code == 0);
    for (bool is_query : {false, true}) {
      std::string row;
      const auto spoils = [&](bool of_lse) {
        return [&, of_lse](const SdpaParams& p, int) {
          if (!p.LSE) return;
          const int n = first_row(p, is_query), width = of_lse ? 4 : 2;
          row = format("(b=%d,h=%d,q=%d,d=%d)", n / p.Sq / p.Hq, n / p.Sq % p.Hq, n % p.Sq, of_lse ? 0 : 63);
          void* const at = of_lse ? static_cast<void*>(&p.LSE[n]) : &element(p, n, 63);
          memset(at, is_query ? 255 : 0, width);
        };
      };
      const char* const trouble = is_query ? " was never written" : " was written, and its row is no query";
      for (bool of_lse : {false, true}) {
        const Swept run = sweep(words, spoils(of_lse));
        CHECK((run.code == 1 && says(run, (of_lse ? "LSE" : "O") + row + trouble)));
      }
    }
  }
  // Poison fails even where NaN is the expected result.
  changed.now = changed.before;
  changed.now.forward = forward_and_spoil;
  spoilt = sdpa_forward;
  for (bool of_lse : {false, true}) {
    bool has_nan = false;
    const Swept run = sweep("--check-only --shape 1,4,2,20,30 --dist nonfinite --seeds 1", [&](const SdpaParams& p, int) {
      for (int row = 0; p.LSE && row < 80; row++) {
        if (!std::isnan(p.LSE[row]) || !std::isnan(to_float(element(p, row, 9)))) continue;
        if (of_lse) memset(&p.LSE[row], 255, 4);
        else memset(static_cast<void*>(&element(p, row, 9)), 255, 2);
        has_nan = true;
        break;
      }
    });
    CHECK((has_nan && run.code == 1 && says(run, " was never written")));
  }
}

// Writes a byte outside of each input and output, adjacent and at the far end of the guard, in the
// checked and in the repeated launch; between rows; and an element of each input.
TEST_CASE("guards") {
  ChangedLine changed;
  changed.now.forward = forward_and_spoil;
  changed.now.use_bias = 2;
  spoilt = forward_by_reference_kernel;
  changed.now.facts_of = [](const SdpaParams& p) {
    KernelFacts facts = facts_of(p);
    facts.workspace_bytes = facts.scratch_bytes = facts.bias_map_bytes = 256;
    return facts;
  };
  changed.now.map_bias = [](const SdpaParams&, cudaStream_t) { return SdpaStatus{}; };
  struct Place {
    const char* name;
    char *begin, *end;
  };
  const auto places = [](const SdpaParams& p) {
    const auto tensor = [](const char* name, const void* x, const Strides& s, int heads, int rows) {
      char* const first = static_cast<char*>(const_cast<void*>(x));
      return Place{name, first, first + 2 * (s.batch + (heads - 1) * s.head + (rows - 1) * s.row + 64)};
    };
    const auto plain = [](const char* name, void* x, int bytes) { return Place{name, static_cast<char*>(x), static_cast<char*>(x) + bytes}; };
    return std::vector<Place>{tensor("Q", p.Q, p.q, 2, 5), tensor("K", p.K, p.k, 1, 7), tensor("V", p.V, p.v, 1, 7),
                              tensor("O", p.O, p.o, 2, 5), plain("LSE", p.LSE, 2 * 2 * 5 * 4),
                              plain("the workspace", p.workspace, 256), plain("the scratch memory", p.scratch, 256),
                              plain("the map of the bias", p.bias_map, 256)};
  };
  const auto found = [&](const char* layout, const std::function<void(const SdpaParams&, int)>& how) {
    Problem p;
    p.B = 2;
    p.Hq = 2;
    p.Hkv = 1;
    p.Sq = 5;
    p.Sk = 7;
    p.layout = layout;
    p.bias_kind = "bool";
    p.bias_dims = "qm";
    launches.clear();
    spoil = nullptr;
    Instance instance(p);
    instance.set_inputs(0);
    spoil = how;
    Figures figures;
    return instance.check(figures, 1);
  };
  for (const char* layout : {"", "bhsd", "padded"}) {
    make_tensor = make_placed_tensor;
    if (!*layout) make_tensor = [](const Problem& p, Tensor t) { return std::make_unique<DeviceTensor>(p, t); };
    CHECK(found(layout, nullptr) == "");
    for (int place = 0; place < 8; place++) {
      for (int i = 0; i < 8; i++) {
        const bool before = i & 1, is_far = i & 2;
        const int launch = i & 4 ? 2 : 1, far = int(GUARD) + (place < 4 && *layout ? 2 * int(MARGIN) : 0);
        std::string want;
        const std::string trouble = found(layout, [&](const SdpaParams& p, int n) {
          const Place at = places(p)[place];
          want = string("the kernel wrote ") + (before ? "before " : "after ") + at.name;
          if (n == launch) *(before ? at.begin - (is_far ? far : 1) : at.end + (is_far ? far - 1 : 0)) = 3;
        });
        CAPTURE(layout);
        CHECK(trouble == want);
      }
    }
  }
  make_tensor = make_placed_tensor;
  const auto set = [](const KeyValue* x) { memset(static_cast<void*>(const_cast<KeyValue*>(x)), 3, 1); };
  CHECK(found("padded", [&](const SdpaParams& p, int) { set(p.Q + 64); }) == "the kernel wrote between the rows of Q");
  CHECK(found("packed", [&](const SdpaParams& p, int) { set(p.Q + 70); }) == "the kernel wrote into Q");
  CHECK(found("packed", [&](const SdpaParams& p, int) { set(p.K + p.k.row); }) == "the kernel wrote into K");
  CHECK(found("packed", [&](const SdpaParams& p, int) { set(p.V + p.v.batch + p.v.row); }) == "the kernel wrote into V");
}

// The inputs of each seed, and a failing seed among passing ones.
TEST_CASE("seeds") {
  ChangedLine changed;
  changed.now.forward = forward_and_spoil;
  Problem p;
  p.B = p.Hq = p.Hkv = 1;
  p.Sq = 9;
  p.Sk = 7;
  p.D = 64;
  const auto first_of = [&](uint64_t seed) {
    p.seed = seed;
    return make_input(p, Tensor::K)[0];
  };
  std::vector<float> first;
  Swept run = sweep("--check-only --shape 1,1,1,9,7 --seeds 3,8,5", [&](const SdpaParams& p, int) { first.push_back(to_float(p.K[0])); });
  CHECK((run.code == 0 && run.of("seed") == "3+8+5" && run.of("rows_checked") == "27" && first.size() == 15));
  for (size_t n = 0; n < first.size(); n++) CHECK(first[n] == first_of(n < 5 ? 3 : n < 10 ? 8 : 5));
  for (uint64_t bad : {3, 8, 5}) {
    run = sweep("--check-only --shape 1,1,1,9,7 --seeds 3,8,5", [&](const SdpaParams& p, int) {
      if (to_float(p.K[0]) == first_of(bad)) element(p, 4, 0) = rounded<Output>(9);
    });
    CHECK((run.code == 1 && says(run, format("--seeds %d\n", int(bad)))));
  }
  // A seed reproduces the problems, and another seed gives others; a single failure is counted.
  const auto series = [](const char* seed) {
    std::string refusal, text;
    for (const Problem& p : parse({"--sweep", "9", "--seeds", seed}, refusal).problems) text += command_of(p) + " ";
    return text;
  };
  CHECK((series("7") == series("7") && series("7") != series("6")));
  run = sweep("--sweep 2 --seeds 7");
  CHECK((run.code == 0 && says(run, "2 of 2 passed")));
  const std::string bad = run.rows[1]["shape"];
  run = sweep("--sweep 2 --seeds 7", [&](const SdpaParams& p, int) {
    if (p.LSE && format("%dx%dx%dx%dx%d", p.B, p.Hq, p.Hkv, p.Sq, p.Sk) == bad) p.LSE[0] = 1e9f;
  });
  CHECK((run.code == 1 && says(run, "1 of 2 passed") && says(run, "repeat with: ")));
}

// Exit codes for one problem and for several.
TEST_CASE("exit_codes") {
  ChangedLine changed;
  changed.now.forward = forward_and_spoil;
  const auto code = [](const std::string& shapes, int wrong_keys = 0) {
    std::string words = "--check-only";
    std::istringstream in(shapes);
    for (std::string shape; in >> shape;) words += " --shape " + shape;
    return sweep(words, [=](const SdpaParams& p, int) {
      if (p.Sk == wrong_keys && p.LSE) p.LSE[0] = 77;
    });
  };
  const std::string ok = " 1,1,1,5,7", wrong = " 1,1,1,5,8", error = " 1,1,1,5,13", skipped = " 1,1,1,5,7,128";
  CHECK((code(ok, 8).code == 0 && code(wrong, 8).code == 1 && code(error, 8).code == 3 && code(skipped, 8).code == 77));
  CHECK((code(wrong + ok, 8).code == 1 && code(ok + wrong, 8).code == 1 && code(error + wrong, 8).code == 1 && code(wrong + error, 8).code == 1));
  CHECK((code(error + ok).code == 3 && code(ok + error).code == 3 && code(skipped + ok).code == 0 && code(ok + skipped).code == 0));
  CHECK((code(skipped + wrong, 8).code == 1 && code(error + skipped).code == 3 && code(skipped + skipped).code == 77));
  Swept run = code(ok + wrong + error + skipped, 8);
  CHECK((run.rows.size() == 4 && run.rows[0]["check"] == "PASS" && run.rows[1]["check"] == "FAIL" && run.rows[2]["status"] == "error"));
  CHECK((run.rows[3]["status"] == "skipped" && run.rows[2]["check"] == "" && run.rows[2]["note"] == "no luck"));
  CHECK((says(run, "sdpa_custom: FAIL 1x1x1x5x8: LSE(") && says(run, "sdpa_custom: error 1x1x1x5x13: no luck")));
  CHECK(sweep("--frob").code == 2);
}

// ---- gradients with a single fault ----

// The gradients by the reference, rounded, as the tested backward pass; spoil_gradients changes them.
static const Instance* of_gradients;
static int backward_launches;
static std::function<void(const SdpaParams&, const Gradients&, int)> spoil_gradients;

static uint16_t& bits_at(const void* tensor, size_t i) { return static_cast<uint16_t*>(const_cast<void*>(tensor))[i]; }

static SdpaStatus backward_by_reference(const SdpaParams& p, const Gradients& g, cudaStream_t) {
  const Problem& problem = of_gradients->problem;
  const int D = problem.D, H = problem.Hq, Hkv = problem.Hkv;
  const size_t rows = rows_of(problem, Tensor::O), keys = rows_of(problem, Tensor::K);
  const auto numbers = [&](const void* tensor, size_t i) { return output_value(bits_at(tensor, i)); };
  std::vector<float> O(rows * D), dO(rows * D);
  for (size_t i = 0; i < rows * D; i++) {
    O[i] = numbers(p.O, i);
    dO[i] = numbers(g.dO, i);
  }
  reference::Backward of(problem, dO.data(), output_type);
  for (size_t i = 0; i < rows; i++) of.set_row(i, &O[i * D], p.LSE[i], g.dLSE ? g.dLSE[i] : 0);
  const auto store = [&](void* tensor, size_t at, const reference::Gradient& x) {
    for (size_t d = 0; d < x.x.size(); d++) bits_at(tensor, at + d) = element_bits(line.output, float(x.x[d]));
  };
  for (int i = 0; i < int(rows); i++) {
    store(g.dQ, size_t(i) * D, of.of_query({i / p.Sq / H, i / p.Sq % H, i % p.Sq}));
  }
  for (int j = 0; j < int(keys); j++) {
    reference::Gradient dK(D), dV(D);
    of.of_key({j / p.Sk / Hkv, j / p.Sk % Hkv, j % p.Sk}, dK, dV);
    store(g.dK, size_t(j) * D, dK);
    store(g.dV, size_t(j) * D, dV);
  }
  for (int h = 0; h < H; h++) g.dSinks[h] = float(of.of_sink(h).x[0]);
  for (int q = 0; q < p.Sq; q++) {
    store(g.dBias, size_t(q) * p.Sk, of.of_bias(-1, -1, q, {0, 1, p.Sk}, false, type_of(line.input)));
  }
  if (spoil_gradients) spoil_gradients(p, g, ++backward_launches);
  return {};
}

// Faults of each gradient are detected: wrong values, missing writes, writes elsewhere or to unused rows, and
// bits that differ in a second launch.
TEST_CASE("spoiled_gradients") {
  ChangedLine changed;
  make_tensor = [](const Problem& p, Tensor t) { return std::make_unique<DeviceTensor>(p, t); };
  changed.now.forward = forward_by_reference_kernel;
  changed.now.backward = backward_by_reference;
  changed.now.backward_workspace_bytes = [](const SdpaParams&) { return size_t(256); };
  changed.now.has_lengths = changed.now.has_sinks = changed.now.dq_repeats = true;
  changed.now.use_bias = 1;
  constexpr int B = 3, H = 2, Sq = 6, Sk = 7, D = 64;
  Problem p;
  p.B = B;
  p.Hq = H;
  p.Hkv = 1;
  p.Sq = Sq;
  p.Sk = Sk;
  p.has_sinks = p.has_lengths = p.has_q_lengths = true;
  p.bias_kind = "add";
  Figures figures;
  SdpaParams forward;  // of the case
  using G = const Gradients&;
  using Spoil = std::function<void(G, int)>;
  const auto found = [&](const Spoil& spoil) {
    Instance instance(p);
    of_gradients = &instance;
    instance.set_inputs(1);  // with dLSE
    spoil_gradients = [&](const SdpaParams& params, G g, int n) {
      forward = params;
      spoil(g, n);
    };
    backward_launches = 0;
    figures = {};
    return instance.check(figures, 1);
  };
  const auto says = [&](const std::string& want, const Spoil& spoil) {
    const std::string said = found(spoil);
    CAPTURE(want);
    CAPTURE(said);
    CHECK(said.find(want) != std::string::npos);
  };
  CHECK((found([](G, int) {}) == "" && backward_launches == 2));
  CHECK((figures.rel_rms > 0 && figures.rel_rms_limit > figures.rel_rms && figures.max_abs_err > 0 && figures.rows_checked > Sq));

  // A row of Q or K that is used, and one that is not.
  Instance of_lengths(p);
  of_lengths.set_inputs(1);
  const reference::Problem& drawn = of_lengths.problem;
  const auto row_of = [&](bool of_q, bool is_used) {
    const int S = of_q ? Sq : Sk, heads = of_q ? H : 1;
    for (int row = 0;; row++) {
      REQUIRE(row < B * heads * S);
      const reference::Row at{row / S / heads, row / S % heads, row % S};
      if ((of_q ? is_query(drawn, at) : is_key(drawn, at)) == is_used) return row;
    }
  };
  struct Found {
    const char* name;  // in sentences
    std::function<void*(G)> data;
    size_t bytes, used, element;  // used: the index of an element
  };
  const size_t query = row_of(true, true), key = row_of(false, true);
  const Found all[] = {{"dQ", [](G g) { return g.dQ; }, size_t(B) * H * Sq * D * 2, query * D + 5, 2},
                       {"dK", [](G g) { return g.dK; }, size_t(B) * Sk * D * 2, key * D + 5, 2},
                       {"dV", [](G g) { return g.dV; }, size_t(B) * Sk * D * 2, key * D + 5, 2},
                       {"dBias", [](G g) { return g.dBias; }, Sq * Sk * 2, 0, 2},
                       {"dSinks", [](G g) { return static_cast<void*>(g.dSinks); }, H * 4, 0, 4},
                       {"dO", [](G g) { return const_cast<void*>(g.dO); }, size_t(B) * H * Sq * D * 2, query * D, 2},
                       {"dLSE", [](G g) { return static_cast<void*>(const_cast<float*>(g.dLSE)); }, B * H * Sq * 4, 0, 4},
                       {"the workspace of the backward pass", [](G g) { return g.workspace; }, 256, 0, 4}};
  for (const Found& x : all) {
    const auto bytes = [&x](G g) { return static_cast<char*>(x.data(g)); };
    for (int nth : {1, 2}) {
      says(string("the kernel wrote before ") + x.name, [&](G g, int n) { if (n == nth) bytes(g)[-1] = 3; });
      says(string("the kernel wrote after ") + x.name, [&](G g, int n) { if (n == nth) bytes(g)[x.bytes] = 3; });
    }
    const bool is_result = &x - all < 5, is_row = &x - all < 3;
    if (!is_result) continue;
    const auto fill = [&](G g, int byte) { memset(bytes(g) + x.used * x.element, byte, x.element); };
    const string element = string(x.name == string("dSinks") ? "dSink" : x.name) + "(";
    says(element, [&](G g, int) { fill(g, 0x45); });
    says(element, [&](G g, int) { fill(g, 0xff); });
    says("of two runs on the same inputs differs", [&](G g, int n) { bytes(g)[x.used * x.element] ^= n == 2; });
    if (!is_row) continue;
    says("was never written", [&](G g, int) { fill(g, 0xff); });
    says("is NaN", [&](G g, int) { fill(g, 0x7f); });
    const size_t unused = row_of(&x == all, false) * D;
    says(element, [&](G g, int) { bits_at(x.data(g), unused) = 0x3c00; });
    says("is not 0, but its row is unused", [&](G g, int) { bits_at(x.data(g), unused + D - 1) = 1; });
  }
  // Bits of a dQ that need not repeat may differ, but must be right in each launch.
  changed.now.dq_repeats = false;
  CHECK(found([&](G g, int n) { bits_at(g.dQ, query * D) ^= n == 2; }) == "");
  says("dQ(", [&](G g, int n) { if (n == 2) bits_at(g.dQ, query * D) = 0x4500; });
  says("was never written", [&](G g, int n) { if (n == 2) bits_at(g.dQ, query * D) = 0xffff; });
  says("dK", [&](G g, int n) { bits_at(g.dK, key * D) ^= n == 2; });
  // Inputs must not change.
  says("the kernel wrote into dO", [&](G g, int) { bits_at(g.dO, query * D) ^= 1; });
  says("the kernel wrote into Q", [&](G, int) { bits_at(forward.Q, 0) ^= 1; });
  says("the kernel wrote into K", [&](G, int) { bits_at(forward.K, 0) ^= 1; });
  says("the kernel wrote into V", [&](G, int) { bits_at(forward.V, 0) ^= 1; });
  says("the kernel wrote into O or LSE", [&](G, int) { bits_at(forward.O, 0) ^= 1; });
  says("the kernel wrote into O or LSE", [&](G, int) { bits_at(forward.LSE, 0) ^= 1; });
  spoil_gradients = nullptr;
}

// Before the chain of kernels all inputs have other contents, which detects a kernel that does not
// wait.
TEST_CASE("chain") {
  ChangedLine changed;
  changed.now.forward = forward_and_spoil;
  spoil = nullptr;
  launches.clear();
  static const Instance* watched;
  static std::vector<KeyValue> before[3];
  static int times, right;
  struct Watched : PlacedTensor {
    Watched(const Problem& p, Tensor t) : PlacedTensor(p, t, place(p, t)) {}
    void poison() override {
      PlacedTensor::poison();
      if (!watched || launches.size() != 2) return;
      times++;
      for (int t = 0; t < 3; t++) {
        const KeyValue* const x = (const KeyValue* const[]){watched->params.Q, watched->params.K, watched->params.V}[t];
        bool others = true;
        for (int i = 0; i < 5 * 64; i++) others &= std::isfinite(to_float(x[i])) && to_float(x[i]) != to_float(before[t][i]);
        right += others;
      }
    }
  };
  make_tensor = [](const Problem& p, Tensor t) -> std::unique_ptr<DeviceTensor> { return std::make_unique<Watched>(p, t); };
  check_more = check_chain;
  Problem p;
  p.B = p.Hq = p.Hkv = 1;
  p.Sq = p.Sk = 5;
  Instance instance(p);
  instance.set_inputs(0);
  const SdpaParams& g = instance.params;
  before[0].assign(g.Q, g.Q + 5 * 64);
  before[1].assign(g.K, g.K + 5 * 64);
  before[2].assign(g.V, g.V + 5 * 64);
  watched = &instance;
  times = right = 0;
  Figures figures;
  CHECK((instance.check(figures, 0) == "" && launches.size() == 4));
  CHECK((times == 2 && right == 6));  // of O and of the second kernel's O
  CHECK((launches[3].Q == reinterpret_cast<const KeyValue*>(g.O) && launches[3].K == g.K && launches[3].O != g.O));
  watched = nullptr;
}

// If the CPU reference checks only a sample of the rows, the reference kernel finds errors in the
// others, several heads at a time, and is itself compared with the CPU reference.
TEST_CASE("every_row_by_the_reference_kernel") {
  ChangedLine changed;
  changed.now.forward = forward_and_spoil;
  const std::string words = "--check-only --shape 2,3,1,70,9 --repeats 1";
  CHECK(sweep(words).of("rows_checked") == "420");
  has_reference_kernel = true;
  affordable_macs = 1e4;
  for (int heads_at_once : {1, 2, 4, 6}) {
    reference_kernel_elements = heads_at_once * 70 * 64;
    Swept run = sweep(words);
    CHECK((run.code == 0 && run.of("rows_witnessed") == "420" && std::stoi(run.of("rows_checked")) < 100));
    for (int head = 0; head < 6; head += heads_at_once == 2 ? 1 : 5) {
      const int row = head * 70 + 37;  // not at an edge, and not in these samples
      run = sweep(words, [&](const SdpaParams& p, int) { if (p.LSE) element(p, row, 63) = rounded<Output>(4); });
      CHECK((run.code == 1 && says(run, format("against the reference kernel: O(b=%d,h=%d,q=37,d=63)", head / 3, head % 3))));
      run = sweep(words, [&](const SdpaParams& p, int) { if (p.LSE) p.LSE[row] += 1; });
      CHECK((run.code == 1 && says(run, format("against the reference kernel: LSE(b=%d,h=%d,q=37)", head / 3, head % 3))));
    }
  }
  // A truncated O is found although the sample of the CPU reference, and each head, have too few
  // rows to detect it.
  for (int heads_at_once : {1, 4}) {
    reference_kernel_elements = heads_at_once * 12 * 64;
    const Swept run = sweep("--check-only --shape 2,3,1,12,9", [](const SdpaParams& p, int) {
      for (int i = 0; i < 72 * 64 && p.LSE; i++) {
        Output& x = element(p, i / 64, i % 64);
        if (i % 4 && std::fabs(to_float(x)) < 0.5f) move(x, -1);
      }
    });
    CHECK((run.code == 1 && says(run, "against the reference kernel: O is not rounded to nearest")));
  }
  Problem p;
  p.B = 2;
  p.Hq = 3;
  p.Hkv = 1;
  p.Sq = 70;
  p.Sk = 9;
  // A correct kernel, and a reference kernel with another scale.
  spoil = nullptr;
  changed.now.forward = [](const SdpaParams& g, cudaStream_t stream) {
    SdpaParams right = g;
    right.scale = 0;
    return sdpa_forward(right, stream);
  };
  Instance instance(p);
  instance.set_inputs(0);
  instance.params.scale = 0.13f;
  Figures figures;
  CHECK(instance.check(figures, 0).find("the reference kernel is wrong: ") == 0);
  // Without a reference kernel, rows that are not compared must be finite.
  has_reference_kernel = false;
  changed.now.forward = forward_and_spoil;
  const Swept run = sweep(words, [&](const SdpaParams& p, int) { if (p.LSE) element(p, 37, 1) = rounded<Output>(INFINITY); });
  CHECK((run.code == 1 && says(run, "O(b=0,h=0,q=37,d=1) is not finite")));
}

// ---- CSV rows ----

// The reported errors are those that were injected; the other columns were computed by hand.
TEST_CASE("columns") {
  ChangedLine changed;
  changed.now.forward = forward_and_spoil;
  const auto near = [](const std::string& cell, double want) { return std::fabs(std::stod(cell) / want - 1) < 0.02; };
  double squares = 0, wrong = 0;
  Swept run = sweep("--check-only --shape 2,2,1,30,7 --seeds 0,1", [&](const SdpaParams& p, int) {
    for (int i = 0; i < 120 * 64 && p.LSE; i++) {
      const double was = to_float(element(p, i / 64, i % 64));
      if (std::fabs(was) < 1) move(element(p, i / 64, i % 64), i % 2 ? 1 : -1);
      if (launches.size() == 1) {
        squares += was * was;
        wrong += std::pow(to_float(element(p, i / 64, i % 64)) - was, 2);
      }
    }
    for (int i = 0; i < 120 && p.LSE; i++) p.LSE[i] *= i == 77 ? 1.0008f : 1;
    if (p.LSE) element(p, 7, 7) = rounded<Output>(to_float(element(p, 7, 7)) + 1 / 1024.0f);
  });
  // The kernel's own rounding adds at most half a unit.
  CHECK((run.code == 0 && run.of("rows_checked") == "240" && std::fabs(std::stod(run.of("rel_rms")) / std::sqrt(wrong / squares) - 1) < 0.15));
  CHECK((std::stod(run.of("max_abs_err")) > 0.9e-3 && std::stod(run.of("max_abs_err")) < 3e-3));
  CHECK(near(run.of("lse_err"), 8e-4));

  Run r;
  Device d;
  r.problem.B = 2;
  r.problem.Hq = 4;
  r.problem.Hkv = 2;
  r.problem.Sq = 100;
  r.problem.Sk = 300;
  r.problem.shape = "s";
  r.check = "PASS";
  r.seeds = {1, 2};
  r.resources = {96, 8, 3};
  r.kernel.shared_bytes = 4096;
  r.timing.p50_us = 50;
  r.timing.p90_us = 90;
  r.timing.p99_us = 99;
  r.timing.min_us = 40;
  r.timing.graph_us = 10;
  r.timing.graph_lo_us = 9;
  r.timing.graph_hi_us = 11;
  r.timing.cold_us = 20;
  r.timing.clock_mhz = 1500;
  r.figures.rel_rms = 1e-4;
  r.figures.max_abs_err = 2e-4;
  r.figures.lse_err = 3e-4;
  r.figures.rows_checked = 5;
  r.figures.rows_witnessed = 6;
  d.name = "gpu";
  d.sm = "90";
  d.driver = "1.2";
  d.matrix_flops = 1e13;
  d.memory_bytes = 1e12;
  const auto cell = [&](const char* name) {
    for (const Column& c : columns(r, d)) {
      if (string(name) == c.name) return c.value;
    }
    return string("none");
  };
  const std::map<std::string, std::string> want = {
      {"config", "custom"}, {"family", "scalar"}, {"shape", "s"}, {"status", "ok"}, {"check", "PASS"}, {"p50_us", "50.000"},
      {"p90_us", "90.000"}, {"p99_us", "99.000"}, {"min_us", "40.000"}, {"graph_us", "10.000"}, {"cold_us", "20.000"},
      // 4 * 64 * 2 * 4 * 100 * 300 = 61.44e6 FLOP in 10 us; at 1e13 a second 6.144 us
      {"tflops", "6.14"}, {"peak_share", "0.614"}, {"bound", "matrix"}, {"rel_rms", "0.0001"}, {"max_abs_err", "0.0002"},
      {"rows_checked", "5"}, {"B", "2"}, {"Hq", "4"}, {"Hkv", "2"}, {"Sq", "100"}, {"Sk", "300"}, {"D", "64"}, {"dtype", "fp16"},
      {"causal", "off"}, {"seed", "1+2"}, {"regs", "96"}, {"spill_bytes", "8"}, {"smem_bytes", "4096"}, {"ctas_per_sm", "3"},
      {"device", "gpu"}, {"sm", "90"}, {"clock_mhz", "1500"}, {"driver", "1.2"}, {"note", ""}, {"layout", "bhsd"},
      {"dist", "normal"}, {"lse_err", "0.0003"}, {"graph_lo_us", "9.000"}, {"graph_hi_us", "11.000"}, {"max_ctas", "0"},
      {"rows_witnessed", "6"}, {"window", ""}, {"out_dtype", "fp16"}, {"softcap", ""}, {"sinks", ""}, {"lengths", ""}, {"packed", ""},
      {"pages", ""}};
  for (const auto& one : want) {
    CHECK(cell(one.first.c_str()) == one.second);
    if (cell(one.first.c_str()) != one.second) fprintf(stderr, "%s: %s\n", one.first.c_str(), cell(one.first.c_str()).c_str());
  }
  // 128 bytes per row: 2 * 4 * 100 rows of Q and O each, 2 * 2 * 300 of K and V each: 512000
  // bytes in 5.12 us
  d.memory_bytes = 1e11;
  CHECK((cell("bound") == "matrix" && r.memory_us(d) == doctest::Approx(5.12)));
  r.problem.mask = Hides::top_left;  // 5050 of 30000 pairs: 1.03 us
  CHECK((cell("tflops") == "1.03" && cell("peak_share") == "0.512" && cell("bound") == "memory" && cell("causal") == "tl"));
  r.problem.mask = Hides::bottom_right;  // 200 keys more for every query
  CHECK((cell("tflops") == "5.13" && cell("causal") == "br"));
  r.problem.mask = Hides::none;
  r.problem.window_left = 9;
  r.problem.window_right = 0;  // 10 keys, and 45 fewer at the beginning
  CHECK((cell("tflops") == "0.20" && cell("window") == "9:0"));
  r.problem.window_alignment = Hides::bottom_right;
  CHECK((cell("tflops") == "0.20" && cell("window") == "9:0:br"));
  changed.now.Dv = r.problem.Dv = 32;
  CHECK(cell("tflops") == "0.15");
  r.problem = Problem();
  r.problem.B = 3;
  r.problem.Hq = r.problem.Hkv = 1;
  r.problem.Sq = 10;
  r.problem.Sk = 400;
  r.problem.has_lengths = r.problem.has_sinks = true;
  r.problem.softcap = 2.5;
  r.problem.page_size = 32;
  r.problem.packs_q = true;
  r.problem.k_lengths = {400, 0, 100};
  r.problem.q_starts = {0, 5, 8, 10};
  r.problem.max_ctas = 4;
  // 5 * 400 + 2 * 100 pairs of 4 * 48 FLOP; 192 bytes per row: 10 rows of queries, 500 of keys
  CHECK((flops_of(r.problem) == doctest::Approx(192 * 2200.0) && r.memory_us(d) == doctest::Approx(510 * 192 / 1e5)));
  for (vector<int> Problem::*drawn : {&Problem::k_lengths, &Problem::q_lengths, &Problem::k_firsts}) {
    Problem with = r.problem, own = r.problem;
    (with.*drawn).assign(with.B, 3);
    take_sequences(own, with);
    CHECK((flops_of(own) == flops_of(with) && flops_of(own) < flops_of(r.problem)));
  }
  CHECK((cell("softcap") == "2.5" && cell("sinks") == "1" && cell("lengths") == "1" && cell("packed") == "q" && cell("pages") == "32"));
  r.check = "";
  r.timing = {};
  r.resources = {};
  for (const char* empty : {"rel_rms", "rows_checked", "tflops", "p50_us", "regs", "peak_share", "bound"}) CHECK(cell(empty) == "");
}
