// Tests of the CPU backend: its error reports and their texts, the adverse orders and contents that
// it must produce, and the cost of its options.
#define SDPA_NO_MAIN
#include "../sdpa.cu"

#include <mma.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

using namespace SDPA_NAMESPACE;

struct Scratch {
  alignas(128) float x[256];
  uint64_t barrier;
};
struct Args {
  float* out;  // [256]
};
using Kernel = void (*)(const Args);

// Runs a kernel on blocks of 64 threads. Returns its outputs, or an error report in `report`.
static std::vector<float> run(Kernel kernel, std::string& report, unsigned blocks = 2) {
  Args a{};
  std::vector<float> out(256);
  cudaMalloc(&a.out, 256 * sizeof(float));
  cudaMemset(a.out, 0, 256 * sizeof(float));
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(blocks);
  launch.blockDim = dim3(64);
  launch.dynamicSmemBytes = sizeof(Scratch);
  report = cudaLaunchKernelEx(&launch, kernel, a) == cudaSuccess ? "" : simt::last_report();
  cudaMemcpy(out.data(), a.out, 256 * sizeof(float), cudaMemcpyDeviceToHost);
  cudaFree(a.out);
  return out;
}

// True if the report contains all of these words.
static void check_report(const char* what, const std::string& report,
                         const std::vector<std::string>& words) {
  CAPTURE(what);
  CAPTURE(report);
  for (const std::string& word : words) {
    CAPTURE(word);
    CHECK(report.find(word) != std::string::npos);
  }
}

static void expect_report(const char* what, Kernel kernel, std::vector<std::string> words) {
  std::string report;
  run(kernel, report);
  words.push_back("block (");
  words.push_back(" lane ");
  words.push_back("backend.cu:");
  check_report(what, report, words);
}

TEST_CASE("reports") {
  expect_report("deadlock",
                [](const Args) {
                  Scratch& s = dynamic_shared<Scratch>();
                  if (threadIdx.x == 0) mbarrier_init(&s.barrier, 2);
                  __syncthreads();
                  if (threadIdx.x == 5)
                    mbarrier_arrive(&s.barrier);  // the second arrival never comes
                  if (threadIdx.x < 32) mbarrier_test_wait_parity(&s.barrier, 0);
                },
                {"deadlock in ", "32 threads, first warp 1 lane 0 (thread 32), have returned",
                 "32 threads, first warp 0 lane 0 (thread 0), wait for an mbarrier phase"});
  expect_report("two barriers",
                [](const Args) {
                  if (threadIdx.x < 32) {
                    __syncthreads();
                  } else {
                    __syncthreads();
                  }
                },
                {"divergent barrier: others of the block wait at backend.cu:"});
  expect_report("barrier after return",
                [](const Args) {
                  if (threadIdx.x == 63) return;
                  __syncthreads();
                },
                {"wait for the block's barrier"});
  expect_report("named barrier",
                [](const Args) {
                  if (threadIdx.x < 32) {
                    barrier_sync(2, 64);
                  } else {
                    barrier_sync(2, 96);
                  }
                },
                {"a named barrier is used with ", " threads here and with "});
  expect_report("shared out of range",
                [](const Args) {
                  Scratch& s = dynamic_shared<Scratch>();
                  st_shared(s.x + 256 + 2 * threadIdx.x, 1.0f);
                },
                {"4 bytes at offset ", " of shared memory, which has "});
  expect_report(
      "shared misaligned",
      [](const Args) {
        Scratch& s = dynamic_shared<Scratch>();
        if (threadIdx.x == 33) ld_shared<uint4>(s.x + 1);
      },
      {"warp 1 lane 1 (thread 33)", "16-byte access at offset 4 of shared memory is misaligned"});
  expect_report("global out of range",
                [](const Args a) {
                  if (threadIdx.x == 7) ld_global<float>(a.out + 256);
                },
                {"warp 0 lane 7 (thread 7)", "outside every allocation of global memory"});
  expect_report("global misaligned",
                [](const Args a) {
                  st_global(reinterpret_cast<uint2*>(a.out + 1), uint2{1, 2});
                },
                {"8-byte access at ", " is misaligned"});
  expect_report("copy from nowhere",
                [](const Args a) { cp_async<16>(dynamic_shared<Scratch>().x, a.out + 254, true); },
                {"outside every allocation"});
  expect_report("mbarrier without init",
                [](const Args) { mbarrier_arrive(&dynamic_shared<Scratch>().barrier); },
                {"this mbarrier was never initialised"});
  expect_report("mbarrier that nobody waits for",
                [](const Args) {
                  Scratch& s = dynamic_shared<Scratch>();
                  if (threadIdx.x == 0) {
                    mbarrier_init(&s.barrier, 64);
                    fence_mbarrier_init();
                  }
                  __syncthreads();
                  mbarrier_arrive(&s.barrier);
                  mbarrier_arrive(&s.barrier);
                },
                {"this mbarrier enters a new phase, and no thread has waited for the end of the one before"});
  expect_report("divergent warp",
                [](const Args a) {
                  float x = 1;
                  if (threadIdx.x % 2) {
                    x = __shfl_xor_sync(0xffffffffu, x, 1);
                  } else {
                    x = __shfl_xor_sync(0xffffffffu, x, 1);
                  }
                  a.out[threadIdx.x] = x;
                },
                {"divergent warp: lanes "});
  expect_report("mask without the caller", [](const Args) { __ballot_sync(0x1u, true); },
                {"the mask 00000001 does not contain the calling lane"});
  expect_report("too little shared memory",
                [](const Args) {
                  struct Large {
                    float x[4096];
                  };
                  dynamic_shared<Large>();
                },
                {"the kernel wants 16384 bytes of shared memory and was launched with "});
  expect_report("wmma alignment",
                [](const Args) {
                  nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> c;
                  nvcuda::wmma::load_matrix_sync(c, dynamic_shared<Scratch>().x + 1, 16,
                                                 nvcuda::wmma::mem_row_major);
                },
                {"a wmma tile is not 32-byte aligned"});
  expect_report("wmma past the end",
                [](const Args) {
                  nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> c;
                  nvcuda::wmma::load_matrix_sync(c, dynamic_shared<Scratch>().x + 64, 16,
                                                 nvcuda::wmma::mem_row_major);
                },
                {"past the end of shared memory"});
}

TEST_CASE("poison") {
  std::string report;
  std::vector<float> out;
  const Kernel read_unwritten = [](const Args a) {
    a.out[blockIdx.x * 64 + threadIdx.x] = dynamic_shared<Scratch>().x[threadIdx.x];
  };
  std::map<uint32_t, int> launches;
  for (int n = 0; n < 6; n++) {
    out = run(read_unwritten, report);
    for (int i = 0; i < 128; i++) CHECK(bits_of(out[i]) == bits_of(out[0]));
    launches[bits_of(out[0])]++;
  }
  CHECK(launches == std::map<uint32_t, int>{{0, 3}, {~0u, 1}, {0x7b7b7b7b, 1}, {0xfbfbfbfb, 1}});
  out = run(
      [](const Args a) {  // before its wait, a copy's destination has neither new nor old contents
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
      },
      report);
  CHECK(report == "");
  for (int i = 0; i < 128; i++) CHECK(out[i] == 2);
}

// Writes the order in which the threads of block 0 run to out[128...].
static std::vector<float> order() {
  std::string report;
  std::vector<float> out = run(
      [](const Args a) {
        if (blockIdx.x) return;
        unsigned* const counter = reinterpret_cast<unsigned*>(a.out);
        a.out[128 + atomicAdd(counter, 1u)] = float(threadIdx.x);
      },
      report);
  return {out.begin() + 128, out.begin() + 192};
}

TEST_CASE("schedules") {
  simt::schedule.alternate = false;
  const std::vector<float> forward = order();
  simt::schedule.order = simt::Order::reverse;
  const std::vector<float> reverse = order();
  simt::schedule.order = simt::Order::random;
  simt::schedule.seed = 1;
  const std::vector<float> one = order(), one_again = order();
  simt::schedule.seed = 2;
  const std::vector<float> two = order();
  for (int i = 0; i < 64; i++) CHECK((forward[i] == i && reverse[i] == 63 - i));
  CHECK((one == one_again && one != two && one != forward));
  simt::schedule = {};
}

TEST_CASE("red_global_add_v4") {
  std::string report;
  // All threads of all blocks add to the same floats.
  std::vector<float> out = run([](const Args a) { red_global_add_v4(a.out + 4, 1, 2, 3, float(threadIdx.x)); }, report);
  CHECK((report == "" && out[4] == 128 && out[5] == 256 && out[6] == 384 && out[7] == 2 * 63 * 64 / 2));
  run([](const Args a) { red_global_add_v4(a.out + 2, 1, 2, 3, 4); }, report);
  CHECK(report.find("misaligned") != report.npos);
}

// ---- sm_90: TMA, wgmma, registers ----

constexpr int ROWS = 40, HEADS = 3;  // of the tensor [HEADS][ROWS][64] that the maps describe
constexpr int BOX = 16;              // rows of a box

struct HopperScratch {
  alignas(1024) __half a[64 * 64];   // one panel, 64 lines of 64
  alignas(1024) __half b[256 * 64];  // up to 4 panels of 64 lines, or one of 256
  uint64_t barriers[4];
};
struct HopperArgs {
  CUtensorMap map;  // rank 3: (64, ROWS, HEADS), box (64, BOX, 1)
  __half* tensor;   // [HEADS][ROWS][80], 64 used of a row
  float* out;       // [64 * 256]
};
using HopperKernel = void (*)(const HopperArgs);
constexpr int OUT = 64 * 256;
constexpr int ROW_STRIDE = 80;

static float tensor_value(int head, int row, int i) { return float(head * 512 + row * 8 + i % 8); }

// Runs a CTA of `threads` threads, or one cluster of `ctas` CTAs.
static std::vector<float> run_hopper(HopperKernel kernel, std::string& report, int threads = 128,
                                     std::vector<float>* tensor = nullptr, unsigned ctas = 1) {
  HopperArgs a{};
  const size_t elements = HEADS * ROWS * ROW_STRIDE;
  std::vector<float> out(OUT, -1.0f);
  cudaMalloc(&a.tensor, elements * sizeof(__half));
  cudaMalloc(&a.out, OUT * sizeof(float));
  cudaMemcpy(a.out, out.data(), OUT * sizeof(float), cudaMemcpyHostToDevice);
  for (int h = 0; h < HEADS; h++) {
    for (int r = 0; r < ROWS; r++) {
      for (int i = 0; i < ROW_STRIDE; i++) {
        a.tensor[(h * ROWS + r) * ROW_STRIDE + i] = __half(i < 64 ? tensor_value(h, r, i) : -7.0f);
      }
    }
  }
  const cuuint64_t sizes[3] = {64, ROWS, HEADS}, strides[2] = {ROW_STRIDE * 2, ROWS * ROW_STRIDE * 2};
  const cuuint32_t box[3] = {64, BOX, 1};
  CHECK(encode_tensor_map(a.map, 3, a.tensor, sizes, strides, box) == cudaSuccess);
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(ctas);
  launch.blockDim = dim3(threads);
  launch.dynamicSmemBytes = sizeof(HopperScratch);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {ctas, 1, 1};
  launch.attrs = &cluster;
  launch.numAttrs = ctas > 1;
  report = cudaLaunchKernelEx(&launch, kernel, a) == cudaSuccess ? "" : simt::last_report();
  cudaMemcpy(out.data(), a.out, OUT * sizeof(float), cudaMemcpyDeviceToHost);
  if (tensor) {
    for (size_t i = 0; i < elements; i++) tensor->push_back(float(a.tensor[i]));
  }
  cudaFree(a.tensor);
  cudaFree(a.out);
  return out;
}

static void expect_hopper_report(const char* what, HopperKernel kernel,
                                 std::vector<std::string> words, int threads = 128, unsigned ctas = 1) {
  const simt::Schedule schedule = simt::schedule;
  for (simt::Order order : {simt::Order::forward, simt::Order::reverse}) {
    simt::schedule.alternate = false;
    simt::schedule.order = order;
    std::string report;
    run_hopper(kernel, report, threads, nullptr, ctas);
    check_report(what, report, words);
  }
  simt::schedule = schedule;
}

// Calls f with each order of threads and of completing copies.
template <class F> static void under_all_orders(F f) {
  const simt::Schedule schedule = simt::schedule;
  simt::schedule.alternate = false;
  for (simt::Order order : {simt::Order::forward, simt::Order::reverse}) {
    simt::schedule.order = order;
    f();
  }
  simt::schedule.order = simt::Order::random;
  for (uint64_t seed = 0; seed < 8; seed++) {
    simt::schedule.seed = seed;
    f();
  }
  simt::schedule = schedule;
}

// The position of element i of line r with the 128-byte swizzle.
static int swizzled(int r, int i) { return r * 64 + ((i / 8 ^ r % 8) * 8 + i % 8); }

static void init_barriers(HopperScratch& s) {
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : s.barriers) mbarrier_init(&barrier, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
}
static void wait_for(uint64_t* barrier, int parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}
constexpr int BOX_BYTES = BOX * 128;

// A box that is partly out of bounds on both sides of the tensor, and one inside; out: their
// contents in shared memory.
static void load_boxes(const HopperArgs a) {
  HopperScratch& s = dynamic_shared<HopperScratch>();
  init_barriers(s);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(&s.barriers[0], 2 * BOX_BYTES);
    cp_async_bulk_tensor_load<3>(s.a, &a.map, {-8, 30, 1}, &s.barriers[0], 0);
    cp_async_bulk_tensor_load<3>(s.b, &a.map, {0, 3, 2}, &s.barriers[0], 0);
  }
  wait_for(&s.barriers[0], 0);
  for (int i = threadIdx.x; i < BOX * 64; i += blockDim.x) {
    a.out[i] = float(s.a[swizzled(i / 64, i % 64)]);
    a.out[1024 + i] = float(s.b[swizzled(i / 64, i % 64)]);
  }
}

TEST_CASE("tma_loads") {
  under_all_orders([] {
    std::string report;
    const std::vector<float> out = run_hopper(load_boxes, report);
    CHECK(report == "");
    bool right = true;
    for (int i = 0; i < BOX * 64; i++) {
      const int r = i / 64, c = i % 64 - 8;
      right = right && out[i] == (c >= 0 && 30 + r < ROWS ? tensor_value(1, 30 + r, c) : 0.0f);
      right = right && out[1024 + i] == tensor_value(2, 3 + r, i % 64);
    }
    CHECK(right);
  });

  // Two loads with separate barriers: waiting for one does not complete the other.
  int early = 0, late = 0;
  under_all_orders([&] {
    std::string report;
    const std::vector<float> out = run_hopper(
        [](const HopperArgs a) {
          HopperScratch& s = dynamic_shared<HopperScratch>();
          init_barriers(s);
          if (threadIdx.x == 0) {
            for (int i = 0; i < 2; i++) {
              mbarrier_arrive_expect_tx(&s.barriers[i], BOX_BYTES);
              cp_async_bulk_tensor_load<3>(s.b + i * BOX * 64, &a.map, {0, 0, i}, &s.barriers[i],
                                           0);
            }
          }
          wait_for(&s.barriers[1], 0);
          a.out[threadIdx.x] = float(s.b[threadIdx.x]);
          wait_for(&s.barriers[0], 0);
          a.out[128 + threadIdx.x] = float(s.b[threadIdx.x]);
        },
        report);
    CHECK((report == "" && out[128] == tensor_value(0, 0, 0)));
    (std::isnan(out[0]) ? late : early)++;
  });
  CHECK((early > 0 && late > 0));

  // Phases: a ring with one stage, used four times.
  under_all_orders([] {
    std::string report;
    const std::vector<float> out = run_hopper(
        [](const HopperArgs a) {
          HopperScratch& s = dynamic_shared<HopperScratch>();
          if (threadIdx.x == 0) {
            mbarrier_init(&s.barriers[0], 1);
            mbarrier_init(&s.barriers[1], 96);
            fence_mbarrier_init();
          }
          __syncthreads();
          float sum = 0;
          for (int i = 0; i < 4; i++) {
            if (threadIdx.x == 0) {
              wait_for(&s.barriers[1], (i & 1) ^ 1);
              mbarrier_arrive_expect_tx(&s.barriers[0], BOX_BYTES);
              cp_async_bulk_tensor_load<3>(s.a, &a.map, {0, i * 4, 1}, &s.barriers[0], 0);
            } else if (threadIdx.x >= 32) {
              wait_for(&s.barriers[0], i & 1);
              sum = sum * 8 + float(s.a[swizzled(1, 3)]);
              mbarrier_arrive(&s.barriers[1]);
            }
          }
          a.out[threadIdx.x] = sum;
        },
        report);
    float sum = 0;
    for (int i = 0; i < 4; i++) sum = sum * 8 + tensor_value(1, i * 4 + 1, 3);
    CHECK(report == "");
    for (int t = 32; t < 128; t++) CHECK(out[t] == sum);
  });

  // Ranks 4 and 5 and plain bulk copies.
  std::string report;
  const std::vector<float> out = run_hopper(
      [](const HopperArgs a) {
        HopperScratch& s = dynamic_shared<HopperScratch>();
        init_barriers(s);
        CUtensorMap four, five;
        const cuuint64_t sizes[5] = {64, 10, 4, 1, HEADS};  // the rows of a head in 4 groups of 10
        const cuuint64_t strides[4] = {ROW_STRIDE * 2, 10 * ROW_STRIDE * 2, 16,
                                     ROWS * ROW_STRIDE * 2};
        const cuuint32_t box[5] = {64, 4, 2, 1, 1};
        encode_tensor_map(four, 4, a.tensor, sizes, strides, box);
        encode_tensor_map(five, 5, a.tensor, sizes, strides, box);
        if (threadIdx.x == 0) {
          mbarrier_arrive_expect_tx(&s.barriers[0], 2 * 4 * 2 * 128 + 64);
          cp_async_bulk_tensor_load<4>(s.a, &four, {0, 7, 2, 0}, &s.barriers[0], 0);
          cp_async_bulk_tensor_load<5>(s.b, &five, {0, 2, 1, 0, 2}, &s.barriers[0], 0);
          cp_async_bulk_load(s.b + 2048, a.tensor + 16, 64, &s.barriers[0]);
        }
        wait_for(&s.barriers[0], 0);
        for (int i = threadIdx.x; i < 8 * 64; i += blockDim.x) {
          a.out[i] = float(s.a[swizzled(i / 64, i % 64)]);
          a.out[512 + i] = float(s.b[swizzled(i / 64, i % 64)]);
        }
        if (threadIdx.x < 32) a.out[1024 + threadIdx.x] = float(s.b[2048 + threadIdx.x]);
      },
      report);
  CHECK(report == "");
  bool right = true;
  for (int i = 0; i < 512; i++) {
    const int row = i / 64 % 4, ten = i / 256, c = i % 64;
    right = right && out[i] == (7 + row < 10 ? tensor_value(0, 20 + ten * 10 + 7 + row, c) : 0.0f);
    right = right && out[512 + i] == tensor_value(2, 10 + ten * 10 + 2 + row, c);
  }
  for (int i = 0; i < 32; i++) right = right && out[1024 + i] == tensor_value(0, 0, 16 + i);
  CHECK(right);
}

TEST_CASE("tma_reports") {
  expect_hopper_report(
      "bytes that never come",
      [](const HopperArgs a) {
        HopperScratch& s = dynamic_shared<HopperScratch>();
        init_barriers(s);
        if (threadIdx.x == 0) {
          mbarrier_arrive_expect_tx(&s.barriers[0], 2 * BOX_BYTES);
          cp_async_bulk_tensor_load<3>(s.a, &a.map, {0, 0, 0}, &s.barriers[0], 0);
        }
        wait_for(&s.barriers[0], 0);
      },
      {"deadlock in ", "wait for an mbarrier phase", "(0 arrivals and 2048 bytes are missing)"});
  expect_hopper_report(
      "bytes of what is inside",
      [](const HopperArgs a) {  // the full box counts
        HopperScratch& s = dynamic_shared<HopperScratch>();
        init_barriers(s);
        if (threadIdx.x == 0) {
          mbarrier_arrive_expect_tx(&s.barriers[0], 4 * 128);
          cp_async_bulk_tensor_load<3>(s.a, &a.map, {0, ROWS - 4, 0}, &s.barriers[0], 0);
        }
        wait_for(&s.barriers[0], 0);
      },
      {"1536 bytes more than this mbarrier's phase expects have landed"});
  expect_hopper_report(
      "load without wait",
      [](const HopperArgs a) {
        HopperScratch& s = dynamic_shared<HopperScratch>();
        init_barriers(s);
        if (threadIdx.x == 5) {
          mbarrier_arrive_expect_tx(&s.barriers[0], BOX_BYTES);
          cp_async_bulk_tensor_load<3>(s.a, &a.map, {0, 0, 0}, &s.barriers[0], 0);
          if (a.map.rank) return;
        }
      },
      {"warp 0 lane 5 (thread 5)", "this bulk load may be in flight when its CTA is gone"});
  expect_hopper_report("too many arrivals",
                       [](const HopperArgs) {
                         HopperScratch& s = dynamic_shared<HopperScratch>();
                         init_barriers(s);
                         if (threadIdx.x == 0) mbarrier_arrive_expect_tx(&s.barriers[0], 16);
                         if (threadIdx.x == 0) mbarrier_arrive(&s.barriers[0]);
                       },
                       {"more arrivals at this mbarrier than the 1 of a phase"});
  expect_hopper_report(
      "misaligned tile",
      [](const HopperArgs a) {
        HopperScratch& s = dynamic_shared<HopperScratch>();
        init_barriers(s);
        cp_async_bulk_tensor_load<3>(s.a + 64, &a.map, {0, 0, 0}, &s.barriers[0], 0);
      },
      {"offset 128 of shared memory is not aligned to 1024 bytes"});
  expect_hopper_report(
      "innermost coordinate",
      [](const HopperArgs a) {
        HopperScratch& s = dynamic_shared<HopperScratch>();
        init_barriers(s);
        cp_async_bulk_tensor_load<3>(s.a, &a.map, {4, 0, 0}, &s.barriers[0], 0);
      },
      {"the innermost coordinate is 4 elements, which is not a multiple of 16 bytes"});
  expect_hopper_report(
      "tile past the end",
      [](const HopperArgs a) {
        HopperScratch& s = dynamic_shared<HopperScratch>();
        init_barriers(s);
        cp_async_bulk_tensor_load<3>(s.b + 256 * 64, &a.map, {0, 0, 0}, &s.barriers[0], 0);
      },
      {"2048 bytes at offset 40960 of shared memory, which has "});
  expect_hopper_report("rank",
                       [](const HopperArgs a) {
                         HopperScratch& s = dynamic_shared<HopperScratch>();
                         init_barriers(s);
                         cp_async_bulk_tensor_load<4>(s.a, &a.map, {0, 0, 0, 0}, &s.barriers[0], 0);
                       },
                       {"a tensor map of 3 dimensions is used with 4 coordinates"});
  expect_hopper_report("no map",
                       [](const HopperArgs) {
                         HopperScratch& s = dynamic_shared<HopperScratch>();
                         init_barriers(s);
                         CUtensorMap map{};
                         cp_async_bulk_tensor_load<3>(s.a, &map, {0, 0, 0}, &s.barriers[0], 0);
                       },
                       {"this is not a tensor map"});
  expect_hopper_report("no map to prefetch",
                       [](const HopperArgs a) {
                         CUtensorMap map{};
                         prefetch_tensormap(&a.map);
                         prefetch_tensormap(&map);
                       },
                       {"this is not a tensor map"});
  expect_hopper_report("load to a barrier without init",
                       [](const HopperArgs a) {
                         HopperScratch& s = dynamic_shared<HopperScratch>();
                         cp_async_bulk_tensor_load<3>(s.a, &a.map, {0, 0, 0}, &s.barriers[0], 0);
                       },
                       {"this mbarrier was never initialised"});
  const std::string unfenced = "this mbarrier was initialised without a fence.mbarrier_init since";
  expect_hopper_report("load to a barrier without fence",
                       [](const HopperArgs a) {
                         HopperScratch& s = dynamic_shared<HopperScratch>();
                         init_barriers(s);
                         if (threadIdx.x == 0) mbarrier_init(&s.barriers[2], 128);
                         __syncthreads();
                         mbarrier_arrive(&s.barriers[2]);  // by the CTA's threads: needs no fence
                         wait_for(&s.barriers[2], 0);
                         cp_async_bulk_load(s.a, a.tensor, 16, &s.barriers[2]);
                       },
                       {"(thread ", unfenced});
  expect_hopper_report("fence by another thread",
                       [](const HopperArgs a) {
                         HopperScratch& s = dynamic_shared<HopperScratch>();
                         if (threadIdx.x == 0) mbarrier_init(&s.barriers[0], 1);
                         __syncthreads();
                         if (threadIdx.x == 1) fence_mbarrier_init();
                         __syncthreads();
                         cp_async_bulk_tensor_load<3>(s.a, &a.map, {0, 0, 0}, &s.barriers[0], 0);
                       },
                       {unfenced});
  expect_hopper_report("misaligned bulk copy",
                       [](const HopperArgs a) {
                         HopperScratch& s = dynamic_shared<HopperScratch>();
                         init_barriers(s);
                         cp_async_bulk_load(s.a, a.tensor + 4, 16, &s.barriers[0]);
                       },
                       {"a bulk copy of 16 bytes from ", "both must be multiples of 16"});

  // Arguments that the driver refuses.
  alignas(16) static __half memory[1024];
  const auto encode = [](int rank, const void* base, uint64_t size, uint64_t stride, uint32_t box0,
                         uint32_t box1) {
    CUtensorMap map;
    const cuuint64_t sizes[6] = {64, size, 1, 1, 1, 1}, strides[5] = {stride, 256, 256, 256, 256};
    const cuuint32_t box[6] = {box0, box1, 1, 1, 1, 1};
    return encode_tensor_map(map, rank, base, sizes, strides, box) == cudaSuccess;
  };
  CHECK(encode(3, memory, 8, 128, 64, 8));
  CHECK(encode(5, memory, 8, 128, 64, 256));
  CHECK(!encode(6, memory, 8, 128, 64, 8));
  CHECK(!encode(3, memory + 4, 8, 128, 64, 8));
  CHECK(!encode(3, nullptr, 8, 128, 64, 8));
  CHECK(!encode(3, memory, 0, 128, 64, 8));
  CHECK(!encode(3, memory, 8, 136, 64, 8));
  CHECK(!encode(3, memory, 8, uint64_t(1) << 40, 64, 8));
  CHECK(!encode(3, memory, 8, 128, 128, 8));
  CHECK(!encode(3, memory, 8, 128, 60, 8));
  CHECK(!encode(3, memory, 8, 128, 64, 257));
  CHECK(!encode(3, memory, 8, 128, 64, 0));
}

enum class Omit { nothing, fence, wait, read_wait, last_wait };
// Writes a tile of 0, 1, ... to shared memory and stores it to rows ROW ... of head 1, omitting the
// step WHAT.
template <Omit WHAT, int ROW = 30> static void store_tile(const HopperArgs a) {
  HopperScratch& s = dynamic_shared<HopperScratch>();
  for (int i = threadIdx.x; i < BOX * 64; i += blockDim.x) {
    st_shared(s.a + swizzled(i / 64, i % 64), __half(float(i)));
  }
  if (WHAT != Omit::fence) fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    cp_async_bulk_tensor_store<3>(&a.map, {0, ROW, 1}, s.a);
    cp_async_bulk_commit_group();
    if (WHAT == Omit::nothing || WHAT == Omit::last_wait) cp_async_bulk_wait_group_read<0>();
  }
  __syncthreads();
  st_shared(s.a + threadIdx.x, __half(-5.0f));
  if (threadIdx.x == 0) {
    a.out[0] = float(a.tensor[(ROWS + 30) * ROW_STRIDE + 1]);  // not yet there
    if (WHAT != Omit::wait && WHAT != Omit::last_wait) cp_async_bulk_wait_group<0>();
    a.out[1] = float(a.tensor[(ROWS + 30) * ROW_STRIDE + 1]);
  }
}

TEST_CASE("tma_stores") {
  under_all_orders([] {
    std::string report;
    std::vector<float> tensor;
    const std::vector<float> out = run_hopper(store_tile<Omit::nothing>, report, 128, &tensor);
    CHECK((report == "" && out[0] == tensor_value(1, 30, 1) && out[1] == 1));
    bool right = true;
    for (int h = 0; h < HEADS; h++) {
      for (int r = 0; r < ROWS; r++) {
        for (int i = 0; i < ROW_STRIDE; i++) {
          const bool stored = h == 1 && r >= 30 && i < 64;  // 10 of 16 rows, the others dropped
          const float old = i < 64 ? tensor_value(h, r, i) : -7.0f;
          right = right && tensor[(h * ROWS + r) * ROW_STRIDE + i] ==
                               (stored ? float(__half(float((r - 30) * 64 + i))) : old);
        }
      }
    }
    CHECK(right);
    // Without the last wait, the store completes at the end of the kernel, and not earlier.
    std::vector<float> at_end;
    const std::vector<float> during = run_hopper(store_tile<Omit::last_wait>, report, 128, &at_end);
    CHECK((report == "" && during[1] == tensor_value(1, 30, 1) && at_end == tensor));
    // Thread 0 overwrites the first element of the tile before it was read.
    tensor.clear();
    run_hopper(store_tile<Omit::read_wait>, report, 128, &tensor);
    CHECK((report == "" && tensor[(ROWS + 30) * ROW_STRIDE] == -5));
    CHECK(tensor[(ROWS + 35) * ROW_STRIDE + 1] == 5 * 64 + 1);
  });
  expect_hopper_report("no proxy fence", store_tile<Omit::fence>,
                       {"was written by warp ", "without a fence.proxy.async since"});
  expect_hopper_report("no wait before the end", store_tile<Omit::wait>,
                       {"this store may not have read shared memory yet"});
  expect_hopper_report("begins before the tensor", store_tile<Omit::nothing, -1>,
                       {"may reach past the tensor's end, but not begin at -1"});
}

// ---- clusters ----

enum class Fault {
  none, fence, init_fence, wait_for_read, own_barrier, past_end, early_return, no_waits, no_last_barrier, divergent, no_such_cta
};
// Each CTA of a cluster of two sends the other one a row of 128 bytes that it has written, and overwrites it once the
// other one has told it that the row has arrived.
template <Fault FAULT> static void exchange_rows(const HopperArgs a) {
  HopperScratch& s = dynamic_shared<HopperScratch>();
  const int rank = cluster_rank(), peer = rank ^ 1, tid = int(threadIdx.x);
  if (tid == 0) {
    mbarrier_init(&s.barriers[0], 1);  // the row has arrived
    mbarrier_init(&s.barriers[1], 4);  // the other CTA has its row
    if (FAULT != Fault::init_fence) fence_mbarrier_init();
  }
  if (FAULT == Fault::early_return && rank == 1) return;
  if (FAULT == Fault::divergent && rank == 1) cluster_sync();
  if (FAULT != Fault::divergent || rank == 0) cluster_sync();
  if (tid < 64) {
    st_shared(&s.a[tid], __half(float(100 * rank + tid)));
    if (FAULT != Fault::fence) fence_proxy_async();
  }
  __syncthreads();
  if (tid == 0) {
    mbarrier_arrive_expect_tx(&s.barriers[0], 128);
    const SharedAddress arrived = address_in_cta(&s.barriers[0], FAULT == Fault::no_such_cta ? 2 : peer);
    cp_async_bulk_copy_to_cta(address_in_cta(s.b, peer) + (FAULT == Fault::past_end ? sizeof s : 0), s.a, 128,
                              FAULT == Fault::own_barrier ? shared_address(&s.barriers[0]) : arrived);
  }
  if (FAULT == Fault::no_waits) return;
  a.out[128 * rank + tid] = tid < 64 ? float(s.b[tid]) : 0;
  wait_for(&s.barriers[0], 0);
  arrive_in_cluster_by_warp(address_in_cta(&s.barriers[1], peer));
  if (FAULT != Fault::wait_for_read) wait_for(&s.barriers[1], 0);
  if (tid < 64) {
    st_shared(&s.a[tid], __half(-1.0f));
    a.out[256 + 64 * rank + tid] = float(s.b[tid]);
  }
  if (FAULT != Fault::no_last_barrier || rank == 0) cluster_sync();
}

TEST_CASE("clusters") {
  int early = 0, late = 0;
  under_all_orders([&] {
    std::string report;
    const std::vector<float> out = run_hopper(exchange_rows<Fault::none>, report, 128, nullptr, 2);
    CHECK(report == "");
    bool right = true;
    for (int i = 0; i < 128; i++) right = right && out[256 + i] == float(100 * (i / 64 ^ 1) + i % 64);
    CHECK(right);
    (std::isnan(out[0]) ? late : early)++;
    CHECK(simt::last_launch().cluster_ctas == 2);
  });
  CHECK((late > 0 && early > 0));
  // The copy reads its source when it lands.
  int overwritten = 0;
  under_all_orders([&] {
    std::string report;
    const std::vector<float> out = run_hopper(exchange_rows<Fault::wait_for_read>, report, 128, nullptr, 2);
    for (int i = 0; i < 128; i++) overwritten += out[256 + i] == -1;
  });
  CHECK(overwritten > 0);
  expect_hopper_report("no proxy fence", exchange_rows<Fault::fence>,
                       {"was written by warp ", "without a fence.proxy.async since"}, 128, 2);
  expect_hopper_report("no mbarrier fence", exchange_rows<Fault::init_fence>,
                       {"this mbarrier was initialised without a fence.mbarrier_init since"}, 128, 2);
  expect_hopper_report("mbarrier of the wrong CTA", exchange_rows<Fault::own_barrier>,
                       {"the mbarrier is not in the CTA that the copy goes to"}, 128, 2);
  expect_hopper_report("past the end", exchange_rows<Fault::past_end>, {"are in no shared memory of the cluster"}, 128, 2);
  expect_hopper_report("no such CTA", exchange_rows<Fault::no_such_cta>, {"the cluster has no CTA 2"}, 128, 2);
  expect_hopper_report("a CTA that returns", exchange_rows<Fault::early_return>, {"cluster"}, 128, 2);
  expect_hopper_report("CTAs that do not wait", exchange_rows<Fault::no_waits>, {"CTA"}, 128, 2);
  expect_hopper_report("two barriers", exchange_rows<Fault::divergent>,
                       {"divergent barrier: others of the block wait at backend.cu:"}, 128, 2);
  expect_hopper_report("a CTA without the last barrier", exchange_rows<Fault::no_last_barrier>, {"cluster"}, 128, 2);
  HopperArgs a{};
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {2, 1, 1};
  const cudaLaunchConfig_t launch{dim3(3), dim3(128), 0, nullptr, &cluster, 1};
  CHECK(cudaLaunchKernelEx(&launch, exchange_rows<Fault::none>, a) == cudaErrorInvalidConfiguration);
}

enum class Turn { right, read_only, no_wait, no_signal, descending };
// Each block adds 256 floats after the blocks before it. The magnitudes differ so much that a sum depends on the order.
template <Turn FAULT> static void add_in_turn(const Args a) {
  Scratch& s = dynamic_shared<Scratch>();
  const unsigned blocks = gridDim.x, turn = FAULT == Turn::descending ? blocks - 1 - blockIdx.x : blockIdx.x;
  for (int i = threadIdx.x; i < 128; i += 64) st_shared(&s.x[i], turn % 3 == 0 ? 1e8f : turn % 3 == 1 ? -1e8f : 1 + i);
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x > 0) return;
  uint32_t* const counter = reinterpret_cast<uint32_t*>(a.out + 255);
  if (FAULT != Turn::no_wait) wait_for_value(counter, turn);
  fence_proxy_async_global();
  cp_reduce_async_bulk_add(a.out, s.x, 128 * sizeof(float));
  cp_async_bulk_commit_group();
  cp_async_bulk_wait_group_read<0>();
  if (FAULT != Turn::read_only) cp_async_bulk_wait_group<0>();
  if (FAULT != Turn::no_signal) st_release(counter, turn + 1);
}

TEST_CASE("blocks_in_turn") {
  const unsigned blocks = 2 * std::max(2u, std::thread::hardware_concurrency()) + 1;
  std::vector<float> want(128);
  for (unsigned turn = 0; turn < blocks; turn++) {
    for (int i = 0; i < 128; i++) want[i] += turn % 3 == 0 ? 1e8f : turn % 3 == 1 ? -1e8f : 1 + i;
  }
  const auto is_right = [&](Kernel kernel) {
    std::string report;
    const std::vector<float> out = run(kernel, report, blocks);
    CHECK(report == "");
    return std::equal(want.begin(), want.end(), out.begin());
  };
  int read_only = 0, no_wait = 0;
  under_all_orders([&] {
    CHECK(is_right(add_in_turn<Turn::right>));
    read_only += !is_right(add_in_turn<Turn::read_only>);
    no_wait += !is_right(add_in_turn<Turn::no_wait>);
    std::string report;
    run(add_in_turn<Turn::no_signal>, report, blocks);
    check_report("no signal", report, {"deadlock in block (", "1 threads, first warp 0 lane 0", "wait for another CTA at backend.cu:"});
  });
  CHECK((read_only > 0 && no_wait > 0));
  // In the order in which the hardware starts blocks, one must not wait for a later one.
  const simt::Schedule schedule = simt::schedule;
  simt::schedule.alternate = false;
  std::string report;
  run(add_in_turn<Turn::descending>, report, blocks);
  check_report("later blocks", report, {"deadlock in block (", "wait for another CTA"});
  simt::schedule = schedule;
}

enum class Fence { none, before_wait, after_wait, by_writers };
// A warp copies the first rows of the tensor with cp.async, whose completion arrives on an
// mbarrier. Thread 64 reads one of them before the wait, and after the wait stores all to rows 16
// ... of head 2 by TMA.
template <Fence WHERE> static void copy_rows(const HopperArgs a) {
  HopperScratch& s = dynamic_shared<HopperScratch>();
  init_barriers(s);
  const int tid = threadIdx.x;
  if (tid < 32) {
    for (int i = tid; i < BOX * 8; i += 32) {
      cp_async<16>(s.a + swizzled(i / 8, i % 8 * 8), a.tensor + i / 8 * ROW_STRIDE + i % 8 * 8, i / 8 != 3);
    }
    cp_async_mbarrier_arrive(&s.barriers[0]);
    __syncwarp();
    if (tid == 0) mbarrier_arrive(&s.barriers[0]);
  }
  if (WHERE == Fence::before_wait) fence_proxy_async();
  const float early = ld_shared<__half>(s.a + 1);
  wait_for(&s.barriers[0], 0);
  if (WHERE == Fence::after_wait || (WHERE == Fence::by_writers && tid < 32)) fence_proxy_async();
  if (WHERE == Fence::by_writers) __syncthreads();
  if (tid == 64) {
    a.out[0] = early;
    a.out[1] = float(s.a[1]);
    a.out[2] = float(s.a[swizzled(3, 1)]);
    cp_async_bulk_tensor_store<3>(&a.map, {0, 16, 2}, s.a);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group<0>();
  }
}

TEST_CASE("cp_async_and_mbarriers") {
  under_all_orders([] {
    for (HopperKernel kernel : {copy_rows<Fence::after_wait>, copy_rows<Fence::by_writers>}) {
      std::string report;
      std::vector<float> tensor;
      const std::vector<float> out = run_hopper(kernel, report, 128, &tensor);
      CHECK(report == "");
      if (simt::schedule.order != simt::Order::random) CHECK(std::isnan(out[0]));  // there copies may land sooner
      CHECK((out[1] == tensor_value(0, 0, 1) && out[2] == 0));
      for (int r = 0; r < BOX; r++) {
        CHECK(tensor[(2 * ROWS + 16 + r) * ROW_STRIDE + 1] == (r == 3 ? 0 : tensor_value(0, r, 1)));
      }
    }
  });
  for (HopperKernel kernel : {copy_rows<Fence::none>, copy_rows<Fence::before_wait>}) {
    expect_hopper_report("no proxy fence after the wait", kernel, {"without a fence.proxy.async since"});
  }
  expect_hopper_report("a phase that ends before its copies land",
                       [](const HopperArgs a) {
                         HopperScratch& s = dynamic_shared<HopperScratch>();
                         init_barriers(s);
                         cp_async<16>(s.a + 8 * threadIdx.x, a.tensor, true);
                         if (threadIdx.x == 0) mbarrier_arrive(&s.barriers[0]);
                         wait_for(&s.barriers[0], 0);
                         cp_async_mbarrier_arrive(&s.barriers[0]);
                       },
                       {"may be in flight when its CTA is gone"});
}

// D [64][N] += A [64][64] @ B [64][N], twice; all are small integers.
static float wgmma_a(int i, int k) { return float((i * 3 + k * 5) % 7 - 3); }
static float wgmma_b(int k, int j) { return float((k * 2 + j * 11) % 9 - 4); }
static float wgmma_d(int i, int j) { return float((i + j) % 5); }

template <class E, int N, int TRANS_B, int TRANS_A = 0>
static void write_operands(HopperScratch& s) {
  E* const A = reinterpret_cast<E*>(s.a);
  E* const B = reinterpret_cast<E*>(s.b);
  for (int i = threadIdx.x; i < 64 * 64; i += blockDim.x) {
    const int row = i / 64, k = i % 64;
    st_shared(A + (TRANS_A ? swizzled(k, row) : swizzled(row, k)), E(wgmma_a(row, k)));
  }
  for (int i = threadIdx.x; i < 64 * N; i += blockDim.x) {
    const int k = i / N, j = i % N;
    // MN-major: panels of 64 columns, a line for each k; K-major: a line for each column.
    const int place = TRANS_B ? j / 64 * 64 * 64 + swizzled(k, j % 64) : swizzled(j, k);
    st_shared(B + place, E(wgmma_b(k, j)));
  }
  fence_proxy_async();
  __syncthreads();
}

template <int N, int TRANS_B> static uint64_t descriptor_b(HopperScratch& s, int k) {
  return wgmma_descriptor(shared_address(s.b), 64 * 128, 1024) + (TRANS_B ? k * 128 : k * 2) / 16;
}

static int row_of(int tid, int i) { return tid / 32 * 16 + tid % 32 / 4 + i / 2 % 2 * 8; }
static int column_of(int tid, int i) { return i / 4 * 8 + tid % 4 * 2 + i % 2; }

template <class E, int N, int TRANS_B, bool RS, int TRANS_A>
static void multiply(const HopperArgs a) {
  HopperScratch& s = dynamic_shared<HopperScratch>();
  write_operands<E, N, TRANS_B, TRANS_A>(s);
  const int tid = threadIdx.x;
  float d[N / 2];
  uint32_t x[4][4];
  for (int k = 0; k < 4; k++) {
    for (int i = 0; i < 4; i++) {
      const int row = tid / 32 * 16 + tid % 32 / 4 + i % 2 * 8,
                c = k * 16 + tid % 4 * 2 + i / 2 * 8;
      x[k][i] = pack<E>(wgmma_a(row, c), wgmma_a(row, c + 1));
    }
  }
  for (int i = 0; i < N / 2; i++) d[i] = wgmma_d(row_of(tid, i), column_of(tid, i));
  const uint64_t da = wgmma_descriptor(shared_address(s.a), 16, 1024);
  for (int round = 0; round < 2; round++) {
    hold(d);
    wgmma_fence();
    for (int k = 0; k < 4; k++) {
      const uint64_t db = descriptor_b<N, TRANS_B>(s, 16 * k);
      const bool accumulate = true;
      if constexpr (RS) {
        wgmma_rs<E, N, TRANS_B>(d, x[k], db, accumulate);
      } else {
        wgmma_ss<E, N, TRANS_B, TRANS_A>(d, da + (TRANS_A ? 128 : 2) * k, db, accumulate);
      }
    }
    wgmma_commit_group();
    if (round == 0) a.out[OUT - 128 + tid] = d[tid % (N / 2)];  // too early
    wgmma_wait_group<0>();
    hold(d);
  }
  for (int i = 0; i < N / 2; i++) {
    if (row_of(tid, i) * N + column_of(tid, i) < OUT - 128) {
      a.out[row_of(tid, i) * N + column_of(tid, i)] = d[i];
    }
  }
}

template <class E, int N, int TRANS_B, bool RS, int TRANS_A = 0> static void expect_product() {
  std::string report;
  const std::vector<float> out = run_hopper(multiply<E, N, TRANS_B, RS, TRANS_A>, report);
  CHECK(report == "");
  int wrong = 0;
  for (int i = 0; i < 64; i++) {
    for (int j = 0; j < N && i * N + j < OUT - 128; j++) {
      float sum = wgmma_d(i, j);
      for (int k = 0; k < 64; k++) sum += 2 * wgmma_a(i, k) * wgmma_b(k, j);
      wrong += out[i * N + j] != sum;
    }
  }
  CHECK(wrong == 0);
  for (int t = 0; t < 128; t++) CHECK(std::isnan(out[OUT - 128 + t]));
}

template <int N> static void expect_products() {
  expect_product<__half, N, 0, false>();
  expect_product<__half, N, 1, false>();
  expect_product<__half, N, 0, false, 1>();
  expect_product<__nv_bfloat16, N, 1, false, 1>();
  expect_product<__half, N, 0, true>();
  expect_product<__half, N, 1, true>();
  expect_product<__nv_bfloat16, N, 0, false>();
  expect_product<__nv_bfloat16, N, 1, true>();
}

// The rule of wgmma that the kernel below violates.
enum class Break {
  nothing,
  no_fence,
  fence_too_early,
  late_write,
  read_modify,
  a_overwritten,
  a_after_fence,
  other_descriptor,
  other_order,
  one_warp_less,
  one_warp_first,
  no_wait,
  swizzle_mode,
  line,
  across_line,
  past_end,
  stride,
  operand_overwritten,
  no_proxy_fence
};
template <Break HOW> static void break_rules(const HopperArgs a) {
  HopperScratch& s = dynamic_shared<HopperScratch>();
  write_operands<__half, 64, 0>(s);
  const int tid = threadIdx.x;
  float d[32], other[32];
  uint32_t x[4] = {pack<__half>(1, 1), pack<__half>(1, 1), pack<__half>(1, 1), pack<__half>(1, 1)};
  for (int i = 0; i < 32; i++) d[i] = other[i] = 0;
  uint64_t da = wgmma_descriptor(shared_address(s.a), 16, 1024);
  uint64_t db = wgmma_descriptor(shared_address(s.b), 16, 1024);
  if (HOW == Break::swizzle_mode) db |= uint64_t(2) << 62;
  if (HOW == Break::line) db += 128 / 16;
  if (HOW == Break::across_line) db += 112 / 16;
  if (HOW == Break::past_end) db += 36 * 1024 / 16;
  if (HOW == Break::stride) db += uint64_t(512 / 16) << 32;
  if (HOW == Break::other_descriptor && tid == 70) db += 2;
  if (HOW == Break::no_proxy_fence && tid == 9) st_shared(s.b, __half(1.0f));
  if (HOW == Break::no_proxy_fence) __syncthreads();
  if (HOW == Break::one_warp_first && tid >= 96) barrier_arrive(1, 128);
  if ((HOW == Break::one_warp_first || HOW == Break::one_warp_less) && tid >= 96) return;
  if (HOW == Break::one_warp_first) barrier_sync(1, 128);
  if (HOW != Break::no_fence) wgmma_fence();
  if (HOW == Break::other_order && tid % 2) {
    wgmma_ss<__half, 64, 0>(other, da, db, true);
    wgmma_ss<__half, 64, 0>(d, da, db, true);
  } else {
    wgmma_ss<__half, 64, 0>(d, da, db, true);
    wgmma_rs<__half, 64, 0>(other, x, db, true);
  }
  wgmma_commit_group();
  if (HOW == Break::late_write && tid == 3) d[5] = 1;
  if (HOW == Break::read_modify) {
    for (int i = 0; i < 32; i++) d[i] *= 2;
  }
  if (HOW == Break::a_overwritten) x[1] = tid;
  if (HOW == Break::operand_overwritten) {
    for (int i = tid; i < 64 * 64; i += 128) s.b[i] = __half(0.0f);
  }
  if (HOW == Break::no_wait) return;
  wgmma_wait_group<0>();
  if (HOW == Break::fence_too_early) wgmma_fence();
  for (int i = 0; i < 32; i++) d[i] = d[i] * 2 + 1;
  if (HOW != Break::fence_too_early) wgmma_fence();
  if (HOW == Break::a_after_fence) x[2] = tid;
  wgmma_ss<__half, 64, 0>(d, da, db, true);
  wgmma_rs<__half, 64, 0>(other, x, db, true);
  wgmma_commit_group();
  wgmma_wait_group<0>();
  a.out[tid] = d[0];
}

TEST_CASE("wgmma") {
  expect_products<16>();
  expect_products<32>();
  expect_products<64>();
  expect_products<128>();
  expect_products<176>();
  expect_products<256>();
  std::string report;
  run_hopper(break_rules<Break::nothing>, report);
  CHECK(report == "");
  expect_hopper_report("no fence", break_rules<Break::no_fence>,
                       {"the first wgmma comes before any wgmma_fence"});
  expect_hopper_report("fence too early", break_rules<Break::fence_too_early>,
                       {"the accumulators were written after the last wgmma_fence"});
  expect_hopper_report("written in flight", break_rules<Break::late_write>,
                       {"thread 3)", "accumulators were written while a wgmma was in flight"});
  expect_hopper_report("scaled in flight", break_rules<Break::read_modify>,
                       {"accumulators were written while a wgmma was in flight"});
  expect_hopper_report("A overwritten", break_rules<Break::a_overwritten>,
                       {"the registers of A were overwritten while a wgmma read them"});
  expect_hopper_report("A after the fence", break_rules<Break::a_after_fence>,
                       {"the registers of A were written after the last wgmma_fence"});
  expect_hopper_report("other descriptor", break_rules<Break::other_descriptor>,
                       {"divergent warpgroup: other threads gave other descriptors"});
  expect_hopper_report("other order", break_rules<Break::other_order>,
                       {"divergent warpgroup: other threads executed backend.cu:"});
  expect_hopper_report("one warp less", break_rules<Break::one_warp_less>,
                       {"divergent warpgroup: its thread returns without executing this"});
  expect_hopper_report("one warp less, and first", break_rules<Break::one_warp_first>,
                       {"deadlock in ",
                        "96 threads, first warp 0 lane 0 (thread 0), wait for the rest "
                        "of its warpgroup",
                        "32 threads, first warp 3 lane 0"});
  expect_hopper_report("half a warpgroup", break_rules<Break::nothing>,
                       {"a warpgroup has 128 threads, here are 64"}, 192);
  expect_hopper_report("no wait", break_rules<Break::no_wait>, {"this wgmma may be in flight"});
  expect_hopper_report("swizzle", break_rules<Break::swizzle_mode>,
                       {"descriptor B: swizzle mode 3, want 1 (128 bytes)"});
  expect_hopper_report("line", break_rules<Break::line>,
                       {"descriptor B: the start 8320 is in line 1 of an atom"});
  expect_hopper_report("across the line", break_rules<Break::across_line>,
                       {"descriptor B: 32 bytes from byte 112 of a line of 128"});
  expect_hopper_report("past the end", break_rules<Break::past_end>,
                       {"descriptor B: the matrix ends at offset 53248 of shared memory"});
  expect_hopper_report("stride", break_rules<Break::stride>,
                       {"descriptor B: stride 1536 and leading 16 bytes are not both multiples"});
  expect_hopper_report("no proxy fence", break_rules<Break::no_proxy_fence>,
                       {"was written by warp 0 lane 9 (thread 9) without a fence.proxy.async"});
  const float right = run_hopper(break_rules<Break::nothing>, report)[1];
  const float wrong = run_hopper(break_rules<Break::operand_overwritten>, report)[1];
  CHECK((report == "" && right != wrong));  // operands are read at the wait

  // Two groups in flight: waiting for the older one does not complete the accumulators of the
  // younger one.
  const std::vector<float> out = run_hopper(
      [](const HopperArgs a) {
        HopperScratch& s = dynamic_shared<HopperScratch>();
        write_operands<__half, 64, 0>(s);
        const uint64_t da = wgmma_descriptor(shared_address(s.a), 16, 1024);
        const uint64_t db = wgmma_descriptor(shared_address(s.b), 16, 1024);
        float older[32], younger[32];
        wgmma_fence();
        wgmma_ss<__half, 64, 0>(older, da, db, false);
        wgmma_commit_group();
        wgmma_ss<__half, 64, 0>(younger, da, db, false);
        wgmma_commit_group();
        wgmma_wait_group<1>();
        a.out[threadIdx.x] = older[3];
        a.out[128 + threadIdx.x] = younger[3];
        wgmma_wait_group<0>();
        a.out[256 + threadIdx.x] = younger[3];
      },
      report);
  CHECK(report == "");
  for (int t = 0; t < 128; t++) CHECK((out[t] == out[256 + t] && std::isnan(out[128 + t])));
}

TEST_CASE("registers") {
  std::string report;  // 384 threads start with 168 each
  under_all_orders([&] {
    run_hopper(
        [](const HopperArgs) {
          if (threadIdx.x >= 256) {
            setmaxnreg_dec<24>();
          } else {
            setmaxnreg_inc<240>();
          }
        },
        report, 384);
    CHECK(report == "");
  });
  expect_hopper_report(
      "too many registers",
      [](const HopperArgs) {
        if (threadIdx.x >= 256) {
          setmaxnreg_dec<32>();
        } else {
          setmaxnreg_inc<240>();
        }
      },
      {"deadlock in ", "wait for registers (setmaxnreg)"}, 384);
  expect_hopper_report(
      "too many registers beside other CTAs",  // with three, 256 threads start with 80 each
      [](const HopperArgs) {
        if (threadIdx.x >= 128) {
          setmaxnreg_dec<24, 3>();
        } else {
          setmaxnreg_inc<144, 3>();
        }
      },
      {"deadlock in ", "wait for registers (setmaxnreg)"}, 256);
  expect_hopper_report(
      "no increase", [](const HopperArgs) { setmaxnreg_inc<160>(); },
      {"setmaxnreg: from 168 to 160 registers is no increase"}, 384);
  expect_hopper_report(
      "by one warp",
      [](const HopperArgs) {
        if (threadIdx.x < 32) setmaxnreg_dec<24>();
      },
      {"divergent warpgroup: "}, 384);
}

// ---- warp-wide matrices ----

// Each lane reads what another lane has written; one of the two accesses is a warp-wide
// instruction. out: 1 if a lane reads row lane / 8 + 1. SYNC: __syncwarp between the accesses.
template <bool STMATRIX, bool SYNC> static void exchange_rows(const HopperArgs a) {
  HopperScratch& s = dynamic_shared<HopperScratch>();
  const int lane = threadIdx.x % 32, other = lane ^ 31;
  __half* const rows = s.a + threadIdx.x / 32 * 32 * 8;
  const auto row_value = [](int i) { return pack<__half>(float(i / 8 + 1), float(i / 8 + 1)); };
  uint32_t r[4];
  bool right = true;
  if (STMATRIX) {
    for (int i = 0; i < 4; i++) r[i] = row_value(8 * i);
    stmatrix_x4<false>(shared_address(rows + 8 * lane), r);
    if (SYNC) __syncwarp();
    right = ld_shared<uint32_t>(rows + 8 * other) == row_value(other);
  } else {
    const uint32_t x = row_value(other);
    st_shared(rows + 8 * other, uint4{x, x, x, x});
    if (SYNC) __syncwarp();
    ldmatrix_x4<false>(r, shared_address(rows + 8 * lane));
    for (int i = 0; i < 4; i++) right = right && r[i] == row_value(8 * i);
  }
  a.out[threadIdx.x] = right;
}

TEST_CASE("matrices") {
  under_all_orders([] {
    std::string report;
    const auto all_right = [&](HopperKernel kernel) {
      const std::vector<float> out = run_hopper(kernel, report);
      return report == "" && std::count(out.begin(), out.begin() + 128, 1.0f) == 128;
    };
    CHECK((all_right(exchange_rows<true, true>) && all_right(exchange_rows<false, true>)));
    CHECK((!all_right(exchange_rows<true, false>) && !all_right(exchange_rows<false, false>)));
  });
}

// ---- programmatic dependent launch ----

constexpr int CHAIN_CTAS = 5, CHAIN_THREADS = 64, CHAIN = CHAIN_CTAS * CHAIN_THREADS;
struct ChainArgs {
  float *data, *seen;  // [CHAIN]
  unsigned* counter;
  bool bulk;
};
struct ChainScratch {
  alignas(128) float x[CHAIN_THREADS];
  uint64_t full;
};
using ChainKernel = void (*)(const ChainArgs);

static cudaError_t launch_chain(ChainKernel kernel, const ChainArgs& a, bool dependent,
                                cudaStream_t stream = nullptr) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = dependent;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(CHAIN_CTAS);
  launch.blockDim = dim3(CHAIN_THREADS);
  launch.dynamicSmemBytes = sizeof(ChainScratch);
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = 1;
  return cudaLaunchKernelEx(&launch, kernel, a);
}

static int chain_index() { return int(blockIdx.x * CHAIN_THREADS + threadIdx.x); }

// data[i] = i in one of two ways, and an atomic increment of the counter.
static void first_of_chain(const ChainArgs a) {
  ChainScratch& s = dynamic_shared<ChainScratch>();
  const int i = chain_index();
  if (a.bulk) {
    st_shared(s.x + threadIdx.x, float(i));
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) cp_async_bulk_store(a.data + i, s.x, sizeof s.x);
    if (threadIdx.x == 0) {
      cp_async_bulk_commit_group();
      cp_async_bulk_wait_group_read<0>();
    }
  } else {
    st_global(a.data + i, float(i));
  }
  if (threadIdx.x == 0) atomicAdd(a.counter, 1u);
  griddepcontrol_launch_dependents();
}

// Accesses of a launch to the data before it waits for the previous launch.
enum class Early { nothing, read, write, draw, bulk_load, bulk_store, cp_async };
// seen = data * 2, after the step EARLY.
template <Early EARLY, bool WAIT = true> static void second_of_chain(const ChainArgs a) {
  ChainScratch& s = dynamic_shared<ChainScratch>();
  const int i = chain_index();
  float* const mine_s = s.x + threadIdx.x;
  if (EARLY == Early::bulk_load && threadIdx.x == 0) {
    mbarrier_init(&s.full, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(&s.full, sizeof s.x);
    cp_async_bulk_load(s.x, a.data + i, sizeof s.x, &s.full);
  }
  if (EARLY == Early::bulk_store) {
    st_shared(mine_s, -1.0f);
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) cp_async_bulk_store(a.data + i, s.x, sizeof s.x);
    if (threadIdx.x == 0) cp_async_bulk_commit_group();
  }
  __syncthreads();
  float x = 0;
  if (EARLY == Early::read) x = ld_global<float>(a.data + i);
  if (EARLY == Early::write) st_global(a.data + i, -1.0f);
  if (EARLY == Early::draw && threadIdx.x == 0) atomicAdd(a.counter, 1u);
  if (EARLY == Early::cp_async) {
    cp_async<4>(mine_s, a.data + i, true);
    cp_async_commit_group();
  }
  if (WAIT) griddepcontrol_wait();
  if (EARLY == Early::bulk_store && threadIdx.x == 0) cp_async_bulk_wait_group<0>();
  if (EARLY == Early::cp_async) cp_async_wait_group<0>();
  if (EARLY == Early::bulk_load) wait_for(&s.full, 0);
  __syncthreads();
  if (EARLY == Early::bulk_load || EARLY == Early::cp_async) x = ld_shared<float>(mine_s);
  if (EARLY != Early::read && EARLY != Early::bulk_load && EARLY != Early::cp_async) {
    x = ld_global<float>(a.data + i);
  }
  st_global(a.seen + i, 2 * x);
}

struct Chain : ChainArgs {
  std::vector<float> data_after = std::vector<float>(CHAIN), seen_after = data_after;
  unsigned drawn = 0;
  std::string report;
  Chain() {
    cudaMalloc(&data, CHAIN * sizeof(float));
    cudaMalloc(&seen, CHAIN * sizeof(float));
    cudaMalloc(&counter, sizeof *counter);
    cudaMemset(counter, 0, sizeof *counter);
    bulk = false;
  }
  ~Chain() {
    cudaFree(data);
    cudaFree(seen);
    cudaFree(counter);
  }
  Chain& launch(ChainKernel kernel, bool dependent, cudaStream_t stream = nullptr) {
    if (launch_chain(kernel, *this, dependent, stream) != cudaSuccess) report = simt::last_report();
    return *this;
  }
  Chain& fetch() {
    cudaMemcpy(data_after.data(), data, CHAIN * sizeof(float), cudaMemcpyDeviceToHost);
    cudaMemcpy(seen_after.data(), seen, CHAIN * sizeof(float), cudaMemcpyDeviceToHost);
    cudaMemcpy(&drawn, counter, sizeof drawn, cudaMemcpyDeviceToHost);
    return *this;
  }
  // The number of elements that the second launch has seen, and of those that still have the first
  // launch's value.
  int count_seen() const {
    int n = 0;
    for (int i = 0; i < CHAIN; i++) n += seen_after[i] == 2.0f * i;
    return n;
  }
  int count_kept() const {
    int n = 0;
    for (int i = 0; i < CHAIN; i++) n += data_after[i] == float(i);
    return n;
  }
};

TEST_CASE("dependent_launches") {
  int early = 0, late = 0;
  under_all_orders([&] {
    const bool random = simt::schedule.order == simt::Order::random;
    for (const bool bulk : {false, true}) {
      const auto after_first = [&](ChainKernel second, bool dependent, cudaStream_t stream) {
        Chain c;
        c.bulk = bulk;
        c.launch(first_of_chain, false).launch(second, dependent, stream).fetch();
        CHECK(c.report == "");
        return c.count_seen();
      };
      // A kernel that waits first, and one that does not need to wait.
      CHECK(after_first(second_of_chain<Early::nothing>, true, nullptr) == CHAIN);
      CHECK(after_first(second_of_chain<Early::read>, false, nullptr) == CHAIN);
      for (ChainKernel kernel : {second_of_chain<Early::read>, second_of_chain<Early::bulk_load>,
                                 second_of_chain<Early::cp_async>}) {
        int& seen = after_first(kernel, true, nullptr) < CHAIN ? early : late;
        seen++;
        CHECK((random || &seen == &early));
      }
      for (ChainKernel kernel :
           {second_of_chain<Early::write>, second_of_chain<Early::bulk_store>}) {
        Chain c;
        c.bulk = bulk;
        c.launch(first_of_chain, false).launch(kernel, true).fetch();
        CHECK((c.report == "" && (random || c.count_kept() >= CHAIN_THREADS)));  // too early: lost
      }
    }
    Chain drawn;
    drawn.launch(first_of_chain, false).launch(second_of_chain<Early::draw>, true).fetch();
    CHECK((drawn.report == "" && (random || drawn.drawn < 2 * CHAIN_CTAS)));
    Chain again;
    again.launch(first_of_chain, true).launch(first_of_chain, false).fetch();
    CHECK((again.report == "" && again.drawn == 2 * CHAIN_CTAS));
    // Three launches: the results of the first one are visible when the second one has ended.
    Chain three;
    three.launch(first_of_chain, false).launch(second_of_chain<Early::nothing>, true);
    std::swap(three.data, three.seen);
    three.launch(second_of_chain<Early::nothing>, true).fetch();
    CHECK((three.report == "" && three.seen_after[7] == 28));
    // No kernel waits.
    Chain none;
    none.launch(first_of_chain, false).launch(second_of_chain<Early::nothing, false>, true).fetch();
    CHECK(none.report.find("no thread of a dependent launch has called griddepcontrol.wait") == 0);
    CHECK(none.count_kept() == CHAIN);
  });
  CHECK(early > late);

  // Every synchronizing call completes earlier launches.
  const auto seen_after = [](void (*synchronise)(Chain&)) {
    Chain c;
    c.launch(first_of_chain, false);
    synchronise(c);
    return c.launch(second_of_chain<Early::read, false>, true).fetch().count_seen();
  };
  CHECK(seen_after([](Chain&) {}) == 0);
  CHECK(seen_after([](Chain&) { cudaDeviceSynchronize(); }) == CHAIN);
  CHECK(seen_after([](Chain& c) { cudaMemset(c.seen, 0, 4); }) == CHAIN);
  CHECK(seen_after([](Chain& c) { cudaMemcpy(c.seen, c.data, 4, cudaMemcpyDeviceToHost); }) ==
        CHAIN);
  CHECK(seen_after([](Chain&) {
          float* other;
          cudaMalloc(&other, 4);
          cudaFree(other);
        }) == CHAIN);
  cudaStream_t one, two;
  cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking);
  cudaStreamCreateWithFlags(&two, cudaStreamNonBlocking);
  for (const bool same : {false, true}) {
    Chain c;
    c.launch(first_of_chain, false, one);
    cudaStreamSynchronize(two);
    c.launch(second_of_chain<Early::read>, true, same ? one : two).fetch();
    CHECK((c.count_seen() == CHAIN) == !same);
  }
  Chain c;
  c.launch(first_of_chain, false, one);
  cudaStreamSynchronize(one);
  c.launch(second_of_chain<Early::read>, true, one).fetch();
  CHECK(c.count_seen() == CHAIN);
  cudaStreamDestroy(one);
  cudaStreamDestroy(two);
}

// ---- the runtime: devices, errors, host threads ----

TEST_CASE("devices") {
  int count = 0, device = -1, value[2][2];
  CHECK((cudaGetDeviceCount(&count) == cudaSuccess && count == 2));
  for (int i = 0; i < 2; i++) {
    cudaDeviceGetAttribute(&value[i][0], cudaDevAttrMultiProcessorCount, i);
    cudaDeviceGetAttribute(&value[i][1], cudaDevAttrL2CacheSize, i);
  }
  CHECK((value[0][0] == 3 && value[1][0] == 5 && value[0][1] == 120 << 10));
  simt::gpu.sms[0] = 132;
  simt::gpu.l2_bytes = 1;
  simt::gpu.ctas_per_sm = 4;
  for (int shared_kb : {0, 60, 100}) {
    int sms = 0, l2_bytes = 0, ctas = 0;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
    cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, 0);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, Kernel(), 32, shared_kb << 10);
    CHECK((sms == 132 && l2_bytes == 1 && ctas == (shared_kb == 0 ? 4 : shared_kb == 60 ? 3 : 2)));
  }
  simt::gpu = {};
  CHECK((cudaSetDevice(2) == cudaErrorInvalidDevice && cudaGetDevice(&device) == cudaSuccess));
  CHECK((device == 0 && cudaGetLastError() == cudaErrorInvalidDevice));

  // The current device is per thread.
  CHECK(cudaSetDevice(1) == cudaSuccess);
  std::thread([&] { cudaGetDevice(&device); }).join();
  CHECK(device == 0);

  // Each device has its own memory.
  std::string report;
  const Kernel kernel = [](const Args a) { st_global(a.out + threadIdx.x, 1.0f); };
  run(kernel, report);
  CHECK(report == "");
  Args a{};
  cudaMalloc(&a.out, 256 * sizeof(float));
  cudaSetDevice(0);
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(1);
  launch.blockDim = dim3(64);
  CHECK(cudaLaunchKernelEx(&launch, kernel, a) == cudaErrorLaunchFailure);
  CHECK(simt::last_report().find("are memory of device 1, and the kernel runs on device 0") !=
        std::string::npos);
  CHECK(cudaGetLastError() == cudaErrorLaunchFailure);
  cudaSetDevice(1);
  CHECK(cudaLaunchKernelEx(&launch, kernel, a) == cudaSuccess);

  // And its own limit of dynamic shared memory.
  launch.dynamicSmemBytes = 48 << 10;
  CHECK(cudaLaunchKernelEx(&launch, kernel, a) == cudaSuccess);
  launch.dynamicSmemBytes++;
  CHECK(cudaLaunchKernelEx(&launch, kernel, a) == cudaErrorInvalidValue);
  CHECK(cudaPeekAtLastError() == cudaErrorInvalidValue);
  CHECK((cudaGetLastError() == cudaErrorInvalidValue && cudaGetLastError() == cudaSuccess));
  const auto allow = [&](int bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  };
  CHECK(allow((227 << 10) + 1) == cudaErrorInvalidValue);
  CHECK(allow(64 << 10) == cudaSuccess);
  CHECK(cudaLaunchKernelEx(&launch, kernel, a) == cudaSuccess);
  cudaFree(a.out);
  cudaSetDevice(0);
  cudaMalloc(&a.out, 256 * sizeof(float));
  CHECK(cudaLaunchKernelEx(&launch, kernel, a) == cudaErrorInvalidValue);
  for (const dim3& grid : {dim3(0), dim3(0x80000000), dim3(1, 65536)}) {
    launch.gridDim = grid;
    CHECK(cudaLaunchKernelEx(&launch, kernel, a) == cudaErrorInvalidConfiguration);
  }
  launch.gridDim = dim3(1);
  launch.blockDim = dim3(1025);
  CHECK(cudaLaunchKernelEx(&launch, kernel, a) == cudaErrorInvalidConfiguration);
  cudaFree(a.out);
  cudaGetLastError();
}

TEST_CASE("planned_failures") {
  int device = 0, blocks = 0;
  const Kernel kernel = [](const Args) {};
  simt::fail_next("cudaGetDevice", cudaErrorUnknown);
  simt::fail_next("cudaOccupancyMaxActiveBlocksPerMultiprocessor", cudaErrorInvalidValue, 1);
  CHECK((cudaGetDevice(&device) == cudaErrorUnknown && cudaGetDevice(&device) == cudaSuccess));
  CHECK(cudaGetLastError() == cudaErrorUnknown);
  for (int i = 0; i < 3; i++) {
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 32, 0) ==
          (i == 1 ? cudaErrorInvalidValue : cudaSuccess));
  }
  cudaGetLastError();
}

// Two host threads with separate tensors, launches and errors.
TEST_CASE("host_threads") {
  const auto work = [](int ctas, bool* right) {
    for (int i = 0; i < 20; i++) {
      Chain c;
      c.launch(first_of_chain, false).launch(second_of_chain<Early::nothing>, true).fetch();
      *right = *right && c.report == "" && c.count_seen() == CHAIN;
      Args a{};
      cudaLaunchConfig_t launch{};
      launch.gridDim = dim3(ctas);
      launch.blockDim = dim3(32);
      const Kernel bad = [](const Args) { barrier_sync(int(16 + gridDim.x), 32); };
      const cudaError_t error = cudaLaunchKernelEx(&launch, bad, a);
      const std::string text = "barrier " + std::to_string(16 + ctas);
      *right = *right && error == cudaErrorLaunchFailure && cudaGetLastError() == error &&
               simt::last_report().find(text) != std::string::npos &&
               int(simt::last_launch().grid_dim.x) == ctas && simt::last_launch().block_dim.x == 32;
    }
  };
  bool right[2] = {true, true};
  std::thread other(work, 3, &right[1]);
  work(2, &right[0]);
  other.join();
  CHECK((right[0] && right[1]));
}

TEST_CASE("measure_wgmma") {
  std::string report;
  const auto begin = std::chrono::steady_clock::now();
  run_hopper(
      [](const HopperArgs) {
        HopperScratch& s = dynamic_shared<HopperScratch>();  // poison is as good as numbers
        const uint64_t da = wgmma_descriptor(shared_address(s.a), 16, 1024);
        const uint64_t db = wgmma_descriptor(shared_address(s.b), 16, 1024);
        float d[64] = {};
        for (int round = 0; round < 500; round++) {
          wgmma_fence();
          for (int k = 0; k < 4; k++) wgmma_ss<__half, 128, 0>(d, da + 2 * k, db + 2 * k, true);
          wgmma_commit_group();
          wgmma_wait_group<0>();
        }
      },
      report);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  printf("wgmma m64n128k16, in chains of 4: %.1f us per warpgroup\n", seconds / 2000 * 1e6);
}

TEST_CASE("measure") {
  const auto seconds = [](Kernel kernel) {
    const auto begin = std::chrono::steady_clock::now();
    std::string report;
    run(kernel, report);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  constexpr int rounds = 20000;
  // Two concurrent blocks of two warps each.
  const double mma = seconds([](const Args) {
    uint32_t a[4] = {}, b[2] = {};
    float d[4] = {};
    for (int i = 0; i < rounds; i++) mma_m16n8k16<__half>(d[0], d[1], d[2], d[3], a, b[0], b[1]);
  });
  const double barrier = seconds([](const Args) {
    for (int i = 0; i < rounds; i++) __syncthreads();
  });
  printf("mma.sync m16n8k16: %.2f us per warp; __syncthreads: %.0f ns per thread\n",
         mma / rounds / 2 * 1e6, barrier / rounds / 64 * 1e9);
}
