// sdpa_forward() of a wgmma build caches the tensor maps of a thread's last call for the next call
// on the same tensors. Whatever changes between two calls, the second must give the same results as
// in a new thread, since stale maps would access the wrong memory.
#define SDPA_NO_MAIN
#define USE_WGMMA 1
#define USE_WARP_SPECIALIZATION 1
#define VEC_WIDTH 8
#define BLOCK_M 64
#define NUM_WARPS 4
#define BLOCK_N 32
#define STAGES 2
#include "../sdpa.cu"

#include <thread>
#include <vector>

#include "../harness/sizes.h"
#include <doctest/doctest.h>

using namespace SDPA_NAMESPACE;

// Strides of the base problem in elements, large enough for each size and stride of the table
// below. Each tensor exists twice with different values, TENSOR elements apart.
constexpr int64_t ROW = 72, HEAD = 6000, BATCH = 40000, TENSOR = 140000;

static KeyValue* two_tensors(uint32_t seed) {
  std::vector<KeyValue> x(2 * TENSOR);
  for (KeyValue& e : x) {
    seed = seed * 1664525 + 1013904223;
    e = rounded<KeyValue>(float(int32_t(seed)) / float(1 << 30));  // in [-2, 2]
  }
  KeyValue* x_g = nullptr;
  CHECK(cudaMalloc(&x_g, x.size() * sizeof(KeyValue)) == cudaSuccess);
  cudaMemcpy(x_g, x.data(), x.size() * sizeof(KeyValue), cudaMemcpyHostToDevice);
  return x_g;
}

static Output* O_memory;  // two of them

// The memory of both O after the last of these calls, which run in a new thread. It is poisoned
// before each call, which shows missing and excess elements.
static std::vector<uint16_t> O_after(std::initializer_list<SdpaParams> calls) {
  std::vector<uint16_t> O(2 * TENSOR);
  std::thread([&] {
    SdpaStatus status;
    for (const SdpaParams& p : calls) {
      cudaMemset(O_memory, 0xff, O.size() * sizeof(Output));
      status = sdpa_forward(p, /*stream=*/0);
    }
    CHECK(status.ok());
    cudaMemcpy(O.data(), O_memory, O.size() * sizeof(Output), cudaMemcpyDeviceToHost);
  }).join();
  return O;
}

// The changes, one property each. Sizes grow, since a map that is too small always shows. A map
// that is too large shows only for Sq and Sk, which the test therefore also reduces.
static const struct {
  const char* name;
  void (*change)(SdpaParams&);
} changes[] = {
    {"Q", [](SdpaParams& p) { p.Q += TENSOR; }},
    {"K", [](SdpaParams& p) { p.K += TENSOR; }},
    {"V", [](SdpaParams& p) { p.V += TENSOR; }},
    {"O", [](SdpaParams& p) { p.O += TENSOR; }},
    {"B", [](SdpaParams& p) { p.B = 3; }},
    {"Hq", [](SdpaParams& p) { p.Hq = 6; }},
    {"Hkv", [](SdpaParams& p) { p.Hkv = 4; }},
    {"Sq", [](SdpaParams& p) { p.Sq = 70; }},
    {"Sk", [](SdpaParams& p) { p.Sk = 40; }},
    {"q.batch", [](SdpaParams& p) { p.q.batch += 400; }},
    {"q.head", [](SdpaParams& p) { p.q.head += 400; }},
    {"q.row", [](SdpaParams& p) { p.q.row += 8; }},
    {"k.batch", [](SdpaParams& p) { p.k.batch += 400; }},
    {"k.head", [](SdpaParams& p) { p.k.head += 400; }},
    {"k.row", [](SdpaParams& p) { p.k.row += 8; }},
    {"v.batch", [](SdpaParams& p) { p.v.batch += 400; }},
    {"v.head", [](SdpaParams& p) { p.v.head += 400; }},
    {"v.row", [](SdpaParams& p) { p.v.row += 8; }},
    {"o.batch", [](SdpaParams& p) { p.o.batch += 400; }},
    {"o.head", [](SdpaParams& p) { p.o.head += 400; }},
    {"o.row", [](SdpaParams& p) { p.o.row += 8; }},
    // Not part of a tensor map: the maps are reused, but the change must take effect.
    {"scale", [](SdpaParams& p) { p.scale = 0.5f; }},
    {"causal", [](SdpaParams& p) { p.causal = Causal::bottom_right; }},
};

TEST_CASE("tensor maps") {
  SdpaParams base = params_of_sizes(2, 4, 2, 50, 20, Defines::head_dim, Defines::d_v);
  KeyValue* const V = two_tensors(3);
  base.Q = two_tensors(1);
  base.K = two_tensors(2);
  base.V = V;
  base.O = O_memory = reinterpret_cast<Output*>(two_tensors(4));
  base.q = base.k = base.v = base.o = {BATCH, HEAD, ROW};
  const KeyValue inf = rounded<KeyValue>(INFINITY);  // behind the last key: 0 * inf = NaN, were it loaded
  cudaMemcpy(V + base.Sk * ROW, &inf, sizeof inf, cudaMemcpyHostToDevice);

  const std::vector<uint16_t> O = O_after({base});
  CHECK(O_after({base, base}) == O);
  for (const auto& c : changes) {
    CAPTURE(c.name);  // what changes
    SdpaParams changed = base;
    c.change(changed);
    const std::vector<uint16_t> fresh = O_after({changed});
    CHECK(fresh != O);
    CHECK(O_after({base, changed}) == fresh);
    CHECK(O_after({changed, base}) == O);
  }
  SdpaParams refused = base;  // after its map of Q is made
  refused.Q += TENSOR;
  refused.k.row = -ROW;
  for (int n = 0; n < 2; n++) CHECK(sdpa_forward(refused, 0).code == cudaErrorInvalidValue);
  CHECK(O_after({base, refused, base}) == O);
}
