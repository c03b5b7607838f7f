// The parts of sdpa_backward()'s contract that the harness does not test: refusals, problems
// without rows or keys, strides of dimensions of size 1, the stream of all launches, consecutive launches
// with one workspace, which queries a tile of keys iterates over, the derivatives of dual numbers, and a bias whose
// elements are the lowest float.
#define SDPA_NO_MAIN
#include "../sdpa_backward.cu"

#include <algorithm>
#include <cfloat>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../harness/sizes.h"
#include "check.h"

using namespace SDPA_NAMESPACE;

namespace {

constexpr int D = Defines::head_dim;

// Device memory filled with NaN.
template <class T> struct Memory {
  T* data = nullptr;
  size_t count;
  explicit Memory(size_t n) : count(n) {
    REQUIRE(cudaMalloc(&data, (n + 1) * sizeof(T)) == cudaSuccess);
    REQUIRE(cudaMemset(data, 0xff, (n + 1) * sizeof(T)) == cudaSuccess);
  }
  ~Memory() { cudaFree(data); }
  std::vector<uint8_t> bytes() const {
    std::vector<uint8_t> x(count * sizeof(T));
    REQUIRE(cudaMemcpy(x.data(), data, x.size(), cudaMemcpyDeviceToHost) == cudaSuccess);
    return x;
  }
};

// A problem with its tensors, after the forward pass.
struct Gradients {
  size_t q_rows, k_rows;
  Memory<Input> Q{q_rows * D}, K{k_rows * D}, V{k_rows * D}, O{q_rows * D}, dO{q_rows * D}, dQ{q_rows * D},
      dK{k_rows * D}, dV{k_rows * D};
  Memory<float> LSE{q_rows}, sinks{16}, dSinks{16};
  Memory<Bias> bias, dBias;  // [Hq,Sq,Sk] of all batches
  std::unique_ptr<Memory<uint8_t>> workspace, of_forward;
  SdpaBackwardParams p{};

  Gradients(int B, int Hq, int Hkv, int Sq, int Sk, Causal causal = Causal::off)
      : q_rows(size_t(B) * Hq * Sq),
        k_rows(size_t(B) * Hkv * Sk),
        bias(size_t(Hq) * Sq * Sk),
        dBias(bias.count) {
    uint32_t state = 1;
    for (Memory<Input>* x : {&Q, &K, &V, &dO}) {
      std::vector<Input> values(x->count);
      for (Input& value : values)
        value = rounded<Input>(float((state = state * 1664525 + 1013904223) >> 8) / (1 << 23) - 1);
      REQUIRE(cudaMemcpy(x->data, values.data(), values.size() * sizeof(Input), cudaMemcpyHostToDevice) == cudaSuccess);
    }
    const std::vector<float> half(16, 0.5f);
    REQUIRE(cudaMemcpy(sinks.data, half.data(), sizeof(float) * 16, cudaMemcpyHostToDevice) == cudaSuccess);
    SdpaParams& f = p.forward;
    f = params_of_sizes(B, Hq, Hkv, Sq, Sk, D, D);
    f.Q = Q.data;
    f.K = K.data;
    f.V = V.data;
    f.O = O.data;
    f.LSE = LSE.data;
    f.sinks = sinks.data;
    f.causal = causal;
    p.d_o = p.d_q = f.q;
    p.d_k = p.d_v = f.k;
    p.dO = dO.data;
    p.dQ = dQ.data;
    p.dK = dK.data;
    p.dV = dV.data;
    if (Defines::use_sinks) p.dSinks = dSinks.data;
    REQUIRE(cudaMemset(bias.data, 0, bias.count * sizeof(Bias)) == cudaSuccess);
    if (Defines::adds_bias) {
      f.bias = bias.data;
      p.dBias = dBias.data;
      f.bias_strides = p.d_bias = {0, int64_t(Sq) * Sk, Sk};
    }
    forward();
  }
  // Allocates the memory of both passes and runs the forward pass.
  void forward() {
    SdpaParams& f = p.forward;
    workspace.reset(new Memory<uint8_t>(sdpa_backward_workspace_bytes(f)));
    p.workspace = workspace->data;
    of_forward.reset(new Memory<uint8_t>(sdpa_workspace_bytes(f)));
    REQUIRE(cudaMemset(of_forward->data, 0, of_forward->count) == cudaSuccess);
    f.workspace = of_forward->data;
    const SdpaStatus status = sdpa_forward(f, 0);
    REQUIRE_MESSAGE(status.ok(), status.text);
  }
  std::vector<std::vector<uint8_t>> results() const {
    return {dQ.bytes(), dK.bytes(), dV.bytes(), dSinks.bytes(), dBias.bytes()};
  }
  // Returns true if the call succeeds and all of its launches are on its stream.
  bool run() {
    char stream;
    std::vector<simt::Launch> log;
    simt::launch_log = &log;
    const SdpaStatus status = sdpa_backward(p, reinterpret_cast<cudaStream_t>(&stream));
    simt::launch_log = nullptr;
    const bool is_on_stream =
        std::all_of(log.begin(), log.end(), [&](const simt::Launch& launch) { return launch.stream == &stream; });
    return status.ok() && is_on_stream && cudaDeviceSynchronize() == cudaSuccess;
  }
};

// A tensor of a problem: its rows, contiguous in `from`, and where sdpa_backward() finds it.
struct Tensor {
  const Input* from;
  Strides* strides;
  std::function<void(Input*)> set;
  int B, H, S;
};
std::vector<Tensor> tensors_of(Gradients& g, int tensor_batches) {
  SdpaParams& f = g.p.forward;
  const int B = tensor_batches;
  return {{f.Q, &f.q, [&](Input* x) { f.Q = x; }, B, f.Hq, f.Sq},
          {f.K, &f.k, [&](Input* x) { f.K = x; }, B, f.Hkv, f.Sk},
          {f.V, &f.v, [&](Input* x) { f.V = x; }, B, f.Hkv, f.Sk},
          {f.O, &f.o, [&](Input* x) { f.O = x; }, B, f.Hq, f.Sq},
          {g.p.dO, &g.p.d_o, [&](Input* x) { g.p.dO = x; }, B, f.Hq, f.Sq},
          {g.p.dQ, &g.p.d_q, [&](Input* x) { g.p.dQ = x; }, B, f.Hq, f.Sq},
          {g.p.dK, &g.p.d_k, [&](Input* x) { g.p.dK = x; }, B, f.Hkv, f.Sk},
          {g.p.dV, &g.p.d_v, [&](Input* x) { g.p.dV = x; }, B, f.Hkv, f.Sk}};
}
constexpr int inputs = 5;  // of these tensors
// Calls visit(offset in `from`, offset in a tensor with these strides) for each row.
template <class Visit> void each_row(const Tensor& t, const Strides& s, const Visit& visit) {
  for (int row = 0; row < t.B * t.H * t.S; row++) {
    visit(row * D, row / t.S / t.H * s.batch + row / t.S % t.H * s.head + row % t.S * s.row);
  }
}
void copy_rows(const Tensor& t, Input* to) {
  each_row(t, *t.strides, [&](int64_t at, int64_t there) {
    REQUIRE(cudaMemcpy(to + there, t.from + at, D * sizeof(Input), cudaMemcpyDeviceToDevice) == cudaSuccess);
  });
}

bool all_zero(const std::vector<uint8_t>& bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](uint8_t x) { return x == 0; });
}

}  // namespace

// Each refusal is a sentence that names the error, and no gradient is written.
TEST_CASE("refusals") {
  Gradients g(2, 4, 2, 20, 30);
  const std::vector<std::vector<uint8_t>> before = g.results();
  using Spoil = std::function<void(SdpaBackwardParams&)>;
  const std::string needs_memory =
      "workspace is null, but this problem needs " + std::to_string(g.workspace->count) + " bytes";
  std::vector<std::pair<std::string, Spoil>> refused = {
      {"LSE is a null pointer", [](auto& p) { p.forward.LSE = nullptr; }},
      {"O is a null pointer", [](auto& p) { p.forward.O = nullptr; }},
      {"dO is a null pointer", [](auto& p) { p.dO = nullptr; }},
      {"dQ is a null pointer", [](auto& p) { p.dQ = nullptr; }},
      {"dK is a null pointer", [](auto& p) { p.dK = nullptr; }},
      {"dV is a null pointer", [](auto& p) { p.dV = nullptr; }},
      {"dO is not aligned to",
       [](auto& p) { p.dO = reinterpret_cast<const Output*>(uintptr_t(p.dO) + 2); }},
      {"dK has a row stride of 65", [](auto& p) { p.d_k.row++; }},
      {"dLSE is not aligned to 4 bytes",
       [](auto& p) { p.dLSE = reinterpret_cast<const float*>(uintptr_t(p.forward.LSE) + 2); }},
      {"dSinks is not aligned to 4 bytes",
       [](auto& p) { p.dSinks = reinterpret_cast<float*>(uintptr_t(p.dSinks) + 1); }},
      {"dSinks is set, but sinks is a null pointer", [](auto& p) { p.forward.sinks = nullptr; }},
      {needs_memory, [](auto& p) { p.workspace = nullptr; }},
      {"workspace is not aligned to 256 bytes",
       [](auto& p) { p.workspace = static_cast<char*>(p.workspace) + 8; }},
      {"Hq=3 is not a multiple of Hkv=2", [](auto& p) { p.forward.Hq = 3; }},
      {"D=264", [](auto& p) { p.forward.D = 264; }},
      {"over 2147483647 tiles", [](auto& p) { p.dBias = nullptr, p.forward.B = p.forward.Sk = 1000000; }}};
  if (!Defines::use_lengths) {
    refused.push_back({"k_lengths is for builds with USE_LENGTHS=1",
                       [](auto& p) { p.forward.k_lengths = reinterpret_cast<const int*>(p.forward.LSE); }});
  }
  if (Defines::adds_bias && Defines::use_lengths) {
    const auto ints = [](auto& p) { return reinterpret_cast<const int*>(p.forward.LSE); };
    const auto with = [&refused](const char* sentence, const Spoil& spoil) { refused.push_back({sentence, spoil}); };
    const char *const few = "dBias is set, but a sequence may have fewer keys than bias_keys=5", *const packed = "packed sequences";
    with(few, [=](auto& p) { p.forward.bias_keys = 5, p.forward.k_lengths = ints(p); });
    with(few, [=](auto& p) { p.forward.bias_keys = 5, p.forward.k_firsts = ints(p); });
    with(few, [=](auto& p) { p.forward.bias_keys = 5, p.forward.most_keys = 9; });
    with(packed, [=](auto& p) { p.forward.q_starts = ints(p); });
    with(packed, [=](auto& p) { p.forward.k_starts = ints(p); });
  }
  if (Defines::adds_bias) {
    refused.push_back({"dBias is not aligned to", [](auto& p) { p.dBias = static_cast<char*>(p.dBias) + 1; }});
    refused.push_back({"dBias is set, but bias is a null pointer", [](auto& p) { p.forward.bias = nullptr; }});
    refused.push_back({"dBias_sums_keys=2 is outside [0, 1]", [](auto& p) { p.dBias_sums_keys = 2; }});
  } else {
    refused.push_back({"bias is for builds with USE_BIAS", [](auto& p) { p.forward.bias = p.forward.Q; }});
    refused.push_back({"dBias is for builds with USE_BIAS=1 or USE_BIAS=3", [](auto& p) { p.dBias = p.dQ; }});
  }
  if (Defines::is_wgmma) {
    refused.push_back({"dO has a row stride of -64; TMA takes 0 to 2^40 bytes",
                       [](auto& p) { p.d_o.row = -64; }});
    refused.push_back({"dV has a head stride of -64; TMA takes 0 to 2^40 bytes",
                       [](auto& p) { p.d_v.head = -64; }});
  }
  // Strides with which rows of an output overlap. dBias is summed over dimensions with stride 0.
  const auto forbid_overlap = [&](const char* name, int width, int step, Strides SdpaBackwardParams::*strides) {
    const std::pair<const char*, int64_t Strides::*> dims[] = {
        {" has a batch stride of ", &Strides::batch}, {" has a head stride of ", &Strides::head}, {" has a row stride of ", &Strides::row}};
    for (const auto& [words, dim] : dims) {
      for (const int64_t stride : {-width + step, -step, 0, step, width - step}) {
        const std::string rows = ": its rows of " + std::to_string(width) + " elements would overlap";
        if (stride == 0 && strides == &SdpaBackwardParams::d_bias) continue;
        refused.push_back({name + (words + std::to_string(stride)) + rows, [=, dim = dim](auto& p) { p.*strides.*dim = stride; }});
      }
    }
  };
  forbid_overlap("dQ", D, 16, &SdpaBackwardParams::d_q);
  forbid_overlap("dK", D, 16, &SdpaBackwardParams::d_k);
  forbid_overlap("dV", D, 16, &SdpaBackwardParams::d_v);
  if (Defines::adds_bias) forbid_overlap("dBias", g.p.forward.Sk, 1, &SdpaBackwardParams::d_bias);
  for (const auto& [sentence, spoil] : refused) {
    SdpaBackwardParams p = g.p;
    spoil(p);
    const SdpaStatus status = sdpa_backward(p, 0);
    CHECK_MESSAGE(
        (status.code == cudaErrorInvalidValue && std::string(status.text).find(sentence) != std::string::npos),
        sentence, ": ", status.text);
  }
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  CHECK((g.results() == before && cudaGetLastError() == cudaSuccess));
  CHECK((g.run() && g.results() != before));
}

// Without rows or keys, gradients are zeros and no workspace is needed.
TEST_CASE("empty") {
  Gradients without_keys(2, 4, 2, 20, 0), without_queries(2, 4, 2, 0, 20);
  CHECK((without_keys.run() && all_zero(without_keys.dQ.bytes())));
  // A gradient that is summed over no rows or no keys.
  for (Gradients* g : {&without_keys, &without_queries}) {
    if (!Defines::adds_bias) break;
    Memory<Bias> sums(20 * 4);
    g->p.dBias = sums.data;
    g->p.d_bias = {0, 20, g == &without_keys ? 1 : 0};
    g->p.dBias_sums_keys = g == &without_keys;
    CHECK((g->run() && all_zero(sums.bytes())));
    g->p.dBias = nullptr;
  }
  CHECK(sdpa_backward_workspace_bytes(without_queries.p.forward) == 0);
  SdpaBackwardParams& p = without_queries.p;
  p.workspace = nullptr;
  p.dO = nullptr;
  p.dQ = nullptr;
  p.forward.LSE = nullptr;
  p.forward.O = nullptr;
  p.forward.Q = nullptr;
  const int lengths[] = {5, 20};  // the other keys are padding
  Memory<int> k_lengths(2);
  cudaMemcpy(k_lengths.data, lengths, sizeof lengths, cudaMemcpyHostToDevice);
  if (Defines::use_lengths) p.forward.k_lengths = k_lengths.data;
  for (auto* x : {&without_queries.dK, &without_queries.dV}) cudaMemset(x->data, 0xff, x->count * sizeof(Input));
  CHECK((without_queries.run() && all_zero(without_queries.dK.bytes()) && all_zero(without_queries.dV.bytes())));
  std::vector<uint8_t> of_sinks = without_queries.dSinks.bytes();
  of_sinks.resize(4 * sizeof(float));
  CHECK(all_zero(of_sinks));
  SdpaBackwardParams none{};
  none.forward.D = D;
  none.forward.Sq = none.forward.Sk = 5;
  CHECK((sdpa_backward(none, 0).ok() && sdpa_backward_workspace_bytes(none.forward) == 0));
  none.forward.Sq = -1;
  CHECK((!sdpa_backward(none, 0).ok() && sdpa_backward_workspace_bytes(none.forward) == 0));
}

// Strides of dimensions of size 1 may have any value.
TEST_CASE("strides") {
  Gradients g(1, 1, 1, 1, 1);
  REQUIRE(g.run());
  const std::vector<std::vector<uint8_t>> want = g.results();
  for (Strides* s :
       {&g.p.forward.q, &g.p.forward.k, &g.p.forward.v, &g.p.forward.o, &g.p.d_o, &g.p.d_q, &g.p.d_k, &g.p.d_v}) {
    *s = {-3, int64_t(1) << 50, 7};
  }
  CHECK((g.run() && g.results() == want));
}

// Tensors have different layouts and gaps, and gaps are not written.
TEST_CASE("strides_of_each") {
  Gradients g(2, 4, 2, 20, 30);
  REQUIRE(g.run());
  const std::vector<std::vector<uint8_t>> want = g.results();
  const std::vector<Tensor> tensors = tensors_of(g, 2);
  std::vector<std::unique_ptr<Memory<Input>>> memory;
  for (const Tensor& t : tensors) {
    const int64_t n = int64_t(memory.size()) + 1, row = D + 8 * n, head = t.S * row + 16 * n;
    *t.strides = {t.H * head + 24 * n, head, row};
    memory.emplace_back(new Memory<Input>(2 * t.strides->batch));
    Input* const to = memory.back()->data;
    if (n <= inputs) copy_rows(t, to);
    t.set(to);
  }
  REQUIRE(g.run());
  for (int i = 0; i < 3; i++) {
    std::vector<uint8_t> bytes = memory[inputs + i]->bytes(), rows(want[i].size());
    each_row(tensors[inputs + i], *tensors[inputs + i].strides, [&](int64_t at, int64_t there) {
      std::copy_n(&bytes[there * sizeof(Input)], D * sizeof(Input), &rows[at * sizeof(Input)]);
      std::fill_n(&bytes[there * sizeof(Input)], D * sizeof(Input), uint8_t(0xff));
    });
    CHECK((rows == want[i] && std::all_of(bytes.begin(), bytes.end(), [](uint8_t x) { return x == 0xff; })));
  }
}

// Rows, heads or batches are over 2^31 elements apart. There are two tiles of queries and of keys, and packed sequences that
// begin in the middle of the tensors, so that each product of an index and a stride is over 2^31.
TEST_CASE("far") {
  for (int far_dimension = 0; far_dimension < 3; far_dimension++) {
    const bool is_packed = Defines::use_lengths && far_dimension < 2;
    const int B = is_packed ? 1 : 2;
    Gradients g(B, 2, 2, 150, 140);
    SdpaParams& f = g.p.forward;
    const int q_starts[] = {3, 15, 150}, k_starts[] = {2, 9, 139};
    Memory<int> starts[] = {Memory<int>(3), Memory<int>(3)};
    f.bias = nullptr;
    g.p.dBias = nullptr;
    if (is_packed) {
      cudaMemcpy(starts[0].data, q_starts, sizeof q_starts, cudaMemcpyHostToDevice);
      cudaMemcpy(starts[1].data, k_starts, sizeof k_starts, cudaMemcpyHostToDevice);
      f.B = 2;
      f.q_starts = starts[0].data;
      f.k_starts = starts[1].data;
    }
    g.forward();
    REQUIRE(g.run());
    const std::vector<std::vector<uint8_t>> want = g.results();
    std::vector<Input*> memory;
    const std::vector<Tensor> tensors = tensors_of(g, B);
    for (const Tensor& t : tensors) {
      const auto gap = [&](int dimension) { return dimension == far_dimension ? int64_t(1) << 31 : 0; };
      const int64_t row = D + gap(0), head = t.S * row + gap(1);
      *t.strides = {t.H * head + gap(2), head, row};
      memory.emplace_back();
      REQUIRE(cudaMalloc(&memory.back(), t.B * t.strides->batch * sizeof(Input)) == cudaSuccess);
      if (memory.size() <= inputs) copy_rows(t, memory.back());
      t.set(memory.back());
    }
    REQUIRE(g.run());
    for (int i = 0; i < 3; i++) {
      std::vector<uint8_t> rows(want[i].size());
      each_row(tensors[inputs + i], *tensors[inputs + i].strides, [&](int64_t at, int64_t there) {
        cudaMemcpy(&rows[at * sizeof(Input)], memory[inputs + i] + there, D * sizeof(Input), cudaMemcpyDeviceToHost);
      });
      CHECK_MESSAGE(rows == want[i], "dimension ", far_dimension, ", gradient ", i);
    }
    for (Input* x : memory) cudaFree(x);
  }
}

// Two problems share a workspace, without synchronization between them.
TEST_CASE("one_workspace") {
  Gradients a(1, 4, 2, 70, 50, Causal::bottom_right), b(2, 3, 1, 40, 60);
  REQUIRE((a.run() && b.run()));
  const std::vector<std::vector<uint8_t>> want_a = a.results(), want_b = b.results();
  Memory<uint8_t> shared(std::max(a.workspace->count, b.workspace->count));
  a.p.workspace = b.p.workspace = shared.data;
  for (Gradients* g : {&a, &b}) {
    for (Memory<Input>* x : {&g->dQ, &g->dK, &g->dV}) cudaMemset(x->data, 0xff, x->count * sizeof(Input));
  }
  for (int n = 0; n < 3; n++) {
    for (Gradients* g : {&a, &b}) REQUIRE(sdpa_backward(g->p, 0).ok());
  }
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  CHECK((a.results() == want_a && b.results() == want_b));
}

// dBias that one CTA sums over sequences of different lengths is the sum of the dBias of each.
TEST_CASE("bias_of_sequences") {
  if (!Defines::adds_bias || !Defines::use_lengths) return;
  simt::gpu.sms[0] = 1;
  constexpr int B = 3, H = 2, Sq = 40, Sk = 70, count = H * Sq * Sk;
  Gradients g(B, H, 1, Sq, Sk);
  std::vector<Bias> values(count);
  for (int i = 0; i < count; i++) values[i] = rounded<Bias>(float(i * 37 % 64) / 16 - 2);
  cudaMemcpy(g.bias.data, values.data(), count * sizeof(Bias), cudaMemcpyHostToDevice);
  const int lengths[B] = {9, Sk, 41};
  Memory<int> k_lengths(B);
  cudaMemcpy(k_lengths.data, lengths, sizeof lengths, cudaMemcpyHostToDevice);
  g.p.forward.k_lengths = k_lengths.data;
  g.forward();
  REQUIRE(g.run());
  Memory<Bias> each(B * count);
  g.p.dBias = each.data;
  g.p.d_bias.batch = count;
  REQUIRE(g.run());
  float worst = 0, largest = 0;
  for (int i = 0; i < count; i++) {
    float sum = 0;
    for (int b = 0; b < B; b++) sum += to_float(each.data[b * count + i]);
    worst = std::max(worst, std::fabs(sum - to_float(g.dBias.data[i])));
    largest = std::max(largest, std::fabs(sum));
  }
  CHECK((largest > 0.1f && worst <= 2e-3f * largest));
  simt::gpu = {};
}

// A row whose biases are all the lowest finite float has finite gradients. Rows that see no key add nothing to them.
TEST_CASE("least_bias") {
  if (!Defines::adds_bias || !Defines::use_sinks) return;
  Gradients g(1, 2, 1, 40, 70);
  g.p.forward.sinks = nullptr;  // a sink would be the largest logit
  g.p.dSinks = nullptr;
  std::vector<Bias> bias(g.bias.count, rounded<Bias>(0));
  const float least = sizeof(Bias) == 4 ? -FLT_MAX : -65504;
  for (int q = 0; q < 40; q++) {
    for (int k = 0; k < 70; k++) bias[q * 70 + k] = rounded<Bias>(q % 3 == 0 ? least : q % 3 == 1 ? -INFINITY : 0);
  }
  REQUIRE(cudaMemcpy(g.bias.data, bias.data(), bias.size() * sizeof(Bias), cudaMemcpyHostToDevice) == cudaSuccess);
  REQUIRE((sdpa_forward(g.p.forward, 0).ok() && g.run()));
  long wrong = 0;
  const auto count_nans = [&](const auto& memory) {
    using T = std::remove_pointer_t<decltype(memory.data)>;
    const std::vector<uint8_t> bytes = memory.bytes();
    for (size_t i = 0; i < memory.count; i++) {
      T x;
      memcpy(static_cast<void*>(&x), &bytes[i * sizeof(T)], sizeof(T));
      wrong += !std::isfinite(to_float(x));
    }
  };
  count_nans(g.dQ);
  count_nans(g.dK);
  count_nans(g.dV);
  count_nans(g.dBias);
  const std::vector<uint8_t> dBias = g.dBias.bytes();
  for (int q = 1; q < 40; q += 3) {
    const size_t row = size_t(q) * 70 * sizeof(Bias);
    wrong += 70 * sizeof(Bias) - std::count(&dBias[row], &dBias[row + 70 * sizeof(Bias)], 0);
  }
  CHECK(wrong == 0);
}

namespace of_doubles {
using std::abs, std::cos, std::exp, std::exp2, std::floor, std::log, std::log2, std::max, std::min, std::pow, std::sin,
    std::sqrt, std::tanh;
double real(double x) { return x; }
double tanh_approx(double x) { return std::tanh(x); }
}  // namespace of_doubles

// Each operator and function that SCORE_MOD may use, compared with finite differences in double.
TEST_CASE("dual_numbers") {
  using expression::Dual, expression::Number;
  struct Case {
    const char* text;
    std::function<Dual(Dual, Number)> dual;
    std::function<double(double, double)> plain;
  };
#define CASE(...)                                                                                  \
  {#__VA_ARGS__, [](Dual s, [[maybe_unused]] Number c) -> Dual { using namespace expression; return __VA_ARGS__; }, \
   [](double s, [[maybe_unused]] double c) -> double { using namespace of_doubles; return __VA_ARGS__; }}
  const Case cases[] = {
      CASE(s), CASE(-s), CASE(s + s), CASE(s + c), CASE(c + s), CASE(2 + s), CASE(s - 3.0), CASE(s - s * s), CASE(c - s),
      CASE(1 - s), CASE(s * s), CASE(s * c), CASE(c * s), CASE(3 * s), CASE(s / c), CASE(c / s), CASE(s / (s + 2)),
      CASE(1.5f / s), CASE(real(s) * s), CASE(exp(s)), CASE(exp2(s)), CASE(log(s)), CASE(log2(s)), CASE(sqrt(s)),
      CASE(sin(s)), CASE(cos(s)), CASE(tanh(s)), CASE(tanh_approx(s)), CASE(floor(s) + s), CASE(abs(s)), CASE(abs(-s)),
      CASE(min(s, c)), CASE(min(c, s)), CASE(max(s, c)), CASE(max(c, s)), CASE(min(s * s, s)), CASE(max(s * s, s)),
      CASE(pow(s, c)), CASE(pow(c, s)), CASE(pow(s, s)), CASE(s > c ? s * s : s), CASE(s < c ? s : c),
      CASE(s >= 1 ? 2 * s : s), CASE(s <= 1 ? 2 * s : s), CASE(s == c || s != c ? s : 3 * s), CASE(s * int(s) + s),
      CASE(exp(-s * s / 2) * tanh(s))};
#undef CASE
  for (const Case& x : cases) {
    for (const float s : {0.3f, 0.7f, 1.3f, 2.6f}) {
      const float c = 1.1f;
      const double step = 1e-6, slope = (x.plain(s + step, c) - x.plain(s - step, c)) / (2 * step);
      const Dual got = x.dual(Dual(s / 2, 2, 0), Number{c});
      const double size = std::max(1.0, std::fabs(slope)) * (std::string(x.text).find("approx") < 99 ? 2e-3 : 1e-5);
      CHECK_MESSAGE((std::fabs(got.value - x.plain(s, c)) <= size * std::max(1.0, std::fabs(x.plain(s, c))) &&
                     std::fabs(got.slope - slope) <= size),
                    x.text, " at ", s, ": ", got.slope, ", not ", slope);
    }
  }
}

// The range of queries from the first to the last one that sees a key of the tile.
TEST_CASE("queries_of_keys") {
  long wrong = 0;
  for (int n = 0; n < 6 * 7 * 5 * 5 * 3 * 3; n++) {
    SdpaParams p{};
    p.Sq = n % 6 + 1;
    p.Sk = n / 6 % 7 + 1;
    p.window_left = n / 42 % 5 - 1;
    p.window_right = n / 210 % 5 - 1;
    p.causal = Causal(n / 1050 % 3);
    p.window_alignment = Causal(n / 3150);
    const KeyBounds keys(p, p.Sq, p.Sk);
    for (int first = 0; first < p.Sk; first++) {
      for (int last = first; last < p.Sk; last++) {
        int begin = p.Sq, end = 0;
        for (int q = 0; q < p.Sq; q++) {
          if (std::max(keys.begin(q), first) >= std::min(keys.end(q), last + 1)) continue;
          begin = std::min(begin, q);
          end = q + 1;
        }
        const Interval got = queries_of_keys(keys, first, last, p.Sq);
        wrong += begin < end ? got.begin > begin || got.end < end || (begin > 0 && got.begin < begin) : false;
      }
    }
  }
  CHECK(wrong == 0);
}
