// The CPU backend's own manners: what it reports, and with which words; that it is as unkind as it
// promises to be; and what its switches cost.
#define SDPA_NO_MAIN
#include "../sdpa.cu"

#include <mma.h>

#include <chrono>
#include <string>
#include <vector>

#include "expect.h"

using namespace SDPA_NAMESPACE;

struct Scratch {
  alignas(128) float x[256];
  uint64_t barrier;
};
struct Args {
  float* out;  // [256]
};
using Kernel = void (*)(const Args);

// Runs a kernel on two blocks of 64 threads; returns its outputs, or the report in `report`.
static std::vector<float> run(Kernel kernel, std::string& report) {
  Args a{};
  std::vector<float> out(256);
  cudaMalloc(&a.out, 256 * sizeof(float));
  cudaMemset(a.out, 0, 256 * sizeof(float));
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(2), launch.blockDim = dim3(64);
  launch.dynamicSmemBytes = sizeof(Scratch);
  report = cudaLaunchKernelEx(&launch, kernel, a) == cudaSuccess ? "" : simt::last_report();
  cudaMemcpy(out.data(), a.out, 256 * sizeof(float), cudaMemcpyDeviceToHost);
  cudaFree(a.out);
  return out;
}

static void expect_report(const char* what, Kernel kernel, std::vector<std::string> words) {
  std::string report;
  run(kernel, report);
  words.push_back("block (");
  words.push_back(" lane ");
  words.push_back("backend.cu:");
  for (const std::string& word : words) {
    checks++;
    if (report.find(word) == std::string::npos) {
      failures++;
      fprintf(stderr, "%s: no '%s' in the report: %s\n", what, word.c_str(), report.c_str());
    }
  }
}

static void test_reports() {
  expect_report("deadlock", [](const Args) {
    Scratch& s = dynamic_shared<Scratch>();
    if (threadIdx.x == 0) mbarrier_init(&s.barrier, 2);
    __syncthreads();
    if (threadIdx.x == 5) mbarrier_arrive(&s.barrier);  // the second arrival never comes
    if (threadIdx.x < 32) mbarrier_test_wait_parity(&s.barrier, 0);
  }, {"deadlock in ", "32 threads, first warp 1 lane 0 (thread 32), have returned",
      "32 threads, first warp 0 lane 0 (thread 0), wait for an mbarrier phase"});
  expect_report("two barriers", [](const Args) {
    if (threadIdx.x < 32) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  }, {"divergent barrier: others of the block wait at backend.cu:"});
  expect_report("barrier after return", [](const Args) {
    if (threadIdx.x == 63) return;
    __syncthreads();
  }, {"wait for the block's barrier"});
  expect_report("named barrier", [](const Args) {
    if (threadIdx.x < 32) {
      barrier_sync(2, 64);
    } else {
      barrier_sync(2, 96);
    }
  }, {"a named barrier is used with ", " threads here and with "});
  expect_report("shared out of range", [](const Args) {
    Scratch& s = dynamic_shared<Scratch>();
    st_shared(s.x + 256 + 2 * threadIdx.x, 1.0f);
  }, {"4 bytes at offset ", " of shared memory, which has "});
  expect_report("shared misaligned", [](const Args) {
    Scratch& s = dynamic_shared<Scratch>();
    if (threadIdx.x == 33) ld_shared<uint4>(s.x + 1);
  }, {"warp 1 lane 1 (thread 33)", "16-byte access at offset 4 of shared memory is misaligned"});
  expect_report("global out of range", [](const Args a) {
    if (threadIdx.x == 7) ld_global<float>(a.out + 256);
  }, {"warp 0 lane 7 (thread 7)", "outside every allocation of global memory"});
  expect_report("global misaligned", [](const Args a) {
    st_global(reinterpret_cast<uint2*>(a.out + 1), uint2{1, 2});
  }, {"8-byte access at ", " is misaligned"});
  expect_report("copy from nowhere", [](const Args a) {
    cp_async<16>(dynamic_shared<Scratch>().x, a.out + 254, true);
  }, {"outside every allocation"});
  expect_report("mbarrier without init", [](const Args) {
    mbarrier_arrive(&dynamic_shared<Scratch>().barrier);
  }, {"this mbarrier was never initialised"});
  expect_report("divergent warp", [](const Args a) {
    float x = 1;
    if (threadIdx.x % 2) {
      x = __shfl_xor_sync(0xffffffffu, x, 1);
    } else {
      x = __shfl_xor_sync(0xffffffffu, x, 1);
    }
    a.out[threadIdx.x] = x;
  }, {"divergent warp: lanes "});
  expect_report("mask without the caller", [](const Args) { __ballot_sync(0x1u, true); },
                {"the mask 00000001 leaves out the lane that names it"});
  expect_report("too little shared memory", [](const Args) {
    struct Large { float x[4096]; };
    dynamic_shared<Large>();
  }, {"the kernel wants 16384 bytes of shared memory and was launched with "});
  expect_report("wmma alignment", [](const Args) {
    nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> c;
    nvcuda::wmma::load_matrix_sync(c, dynamic_shared<Scratch>().x + 1, 16,
                                   nvcuda::wmma::mem_row_major);
  }, {"a wmma tile is not 32-byte aligned"});
  expect_report("wmma past the end", [](const Args) {
    nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> c;
    nvcuda::wmma::load_matrix_sync(c, dynamic_shared<Scratch>().x + 64, 16,
                                   nvcuda::wmma::mem_row_major);
  }, {"past the end of shared memory"});
}

static void test_poison() {
  std::string report;
  std::vector<float> out = run([](const Args a) {  // shared memory that nobody wrote
    a.out[blockIdx.x * 64 + threadIdx.x] = dynamic_shared<Scratch>().x[threadIdx.x];
  }, report);
  for (int i = 0; i < 128; i++) EXPECT(std::isnan(out[i]));
  out = run([](const Args a) {  // a copy is not there before its wait, not even what was there before
    Scratch& s = dynamic_shared<Scratch>();
    const int tid = threadIdx.x;
    s.x[tid] = 5;
    a.out[128 + tid] = 2;
    cp_async<4>(s.x + tid, a.out + 128 + tid, true);
    cp_async_commit_group();
    cp_async_commit_group();
    cp_async_wait_group<2>();
    const float early = s.x[tid];
    cp_async_wait_group<1>();
    a.out[blockIdx.x * 64 + tid] = std::isnan(early) ? s.x[tid] : -1;
  }, report);
  EXPECT(report == "");
  for (int i = 0; i < 128; i++) EXPECT(out[i] == 2);
}

// The order in which the threads of block 0 come by, as their numbers in out[128...].
static std::vector<float> order() {
  std::string report;
  std::vector<float> out = run([](const Args a) {
    if (blockIdx.x) return;
    unsigned* const counter = reinterpret_cast<unsigned*>(a.out);
    a.out[128 + atomicAdd(counter, 1u)] = float(threadIdx.x);
  }, report);
  return {out.begin() + 128, out.begin() + 192};
}

static void test_schedules() {
  simt::schedule.alternate = false;
  const std::vector<float> forward = order();
  simt::schedule.order = simt::Order::reverse;
  const std::vector<float> reverse = order();
  simt::schedule.order = simt::Order::random;
  simt::schedule.seed = 1;
  const std::vector<float> one = order(), one_again = order();
  simt::schedule.seed = 2;
  const std::vector<float> two = order();
  for (int i = 0; i < 64; i++) EXPECT(forward[i] == i && reverse[i] == 63 - i);
  EXPECT(one == one_again && one != two && one != forward);
  simt::schedule = {};
}

static void measure() {
  const auto seconds = [](Kernel kernel) {
    const auto begin = std::chrono::steady_clock::now();
    std::string report;
    run(kernel, report);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  constexpr int rounds = 20000;
  // Two blocks at once of two warps each.
  const double mma = seconds([](const Args) {
    uint32_t a[4] = {}, b[2] = {};
    float d[4] = {};
    for (int i = 0; i < rounds; i++) mma_m16n8k16<__half>(d[0], d[1], d[2], d[3], a, b[0], b[1]);
  });
  const double barrier = seconds([](const Args) {
    for (int i = 0; i < rounds; i++) __syncthreads();
  });
  printf("mma.sync m16n8k16: %.2f us a warp; __syncthreads: %.0f ns a thread\n",
         mma / rounds / 2 * 1e6, barrier / rounds / 64 * 1e9);
}

int main() {
  test_reports();
  test_poison();
  test_schedules();
  measure();
  printf("%d checks, %d failed\n", checks, failures);
  return failures != 0;
}
