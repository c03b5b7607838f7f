// Kernels that pass shared memory between threads, TMA and wgmma, each with one synchronization removed,
// and two host threads that launch. ThreadSanitizer must report a data race with the bug, and none
// without it.
// `forward` is sdpa_forward() of the build, without a bug.
//   races NAME     one of the names below; exit code 0 and no report for `none` and `forward`
#define SDPA_NO_MAIN
#include "../sdpa.cu"

#include "../harness/sizes.h"
#include <string>
#include <thread>
#include <vector>

using namespace SDPA_NAMESPACE;

enum class Bug {
  none,
  no_wait_for_full,         // wgmma reads a tile whose load may be under way
  released_before_wait,     // a stage is released while wgmma may still read it
  released_by_one,          // ... while other threads may still read it
  read_before_full,         // a thread reads a tile that others have waited for
  staging_overwritten,      // a store's tile is written again before the store has read it
  no_sync_after_stmatrix,   // a lane reads a row that stmatrix has another lane store
  no_sync_before_ldmatrix,  // ldmatrix has a lane read a row that another lane has stored
  host_static,              // two host threads share a static variable
};

struct Scratch {
  alignas(1024) __half tile[64 * 64];
  alignas(1024) __half staging[64 * 64];
  uint4 rows[4][32];  // by warp and lane
  uint64_t full, empty;
};
struct Args {
  CUtensorMap map;  // (64, 64, 6), box (64, 64, 1)
  float* out;       // [256]
};

static void wait_for(uint64_t* barrier, int parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// Two warpgroups: a thread of the second one loads four tiles through one stage; the first one
// multiplies each by itself, reads it, writes new contents and stores them over the tile.
template <Bug BUG> static void hand_over(const Args a) {
  Scratch& s = dynamic_shared<Scratch>();
  const int tid = threadIdx.x;
  if (tid == 0) {
    mbarrier_init(&s.full, 1);
    mbarrier_init(&s.empty, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  float sum = 0;
  if (tid == 128) {
    for (int i = 0; i < 4; i++) {
      wait_for(&s.empty, (i & 1) ^ 1);
      mbarrier_arrive_expect_tx(&s.full, sizeof s.tile);
      cp_async_bulk_tensor_load<3>(s.tile, &a.map, {0, 0, i}, &s.full, 0);
    }
    if (BUG == Bug::no_wait_for_full || BUG == Bug::read_before_full) wait_for(&s.full, 1);
  } else if (tid < 128) {
    float d[32];
    for (float& x : d) x = 0;
    for (int i = 0; i < 4; i++) {
      if (BUG != Bug::no_wait_for_full && !(BUG == Bug::read_before_full && tid == 9)) {
        wait_for(&s.full, i & 1);
      }
      if (BUG == Bug::read_before_full && tid == 9) sum += float(s.tile[tid]);
      const uint64_t tile = wgmma_descriptor(shared_address(s.tile), 16, 1024);
      wgmma_fence();
      wgmma_ss<__half, 64, 0>(d, tile, tile, true);
      wgmma_commit_group();
      if (BUG == Bug::released_before_wait && tid == 0) mbarrier_arrive(&s.empty);
      wgmma_wait_group<0>();
      if (BUG != Bug::released_before_wait) {
        if (BUG != Bug::read_before_full) sum += float(s.tile[tid]);
        if (BUG != Bug::released_by_one) barrier_sync(1, 128);
        if (tid == 0) mbarrier_arrive(&s.empty);
      }
    }
    uint4(&rows)[32] = s.rows[tid / 32];
    uint32_t r[4] = {};
    stmatrix_x4<false>(shared_address(&rows[tid % 32]), r);
    if (BUG != Bug::no_sync_after_stmatrix) __syncwarp();
    const uint4 row = ld_shared<uint4>(&rows[tid % 32 ^ 31]);
    __syncwarp();
    st_shared(&rows[tid % 32 ^ 31], row);
    if (BUG != Bug::no_sync_before_ldmatrix) __syncwarp();
    ldmatrix_x4<false>(r, shared_address(&rows[tid % 32]));
    for (int i = 0; i < 2; i++) {
      for (int j = 0; j < 32; j++) st_shared(s.staging + j * 128 + tid, __half(d[j]));
      fence_proxy_async();
      barrier_sync(1, 128);
      if (tid == 0) {
        cp_async_bulk_tensor_store<3>(&a.map, {0, 0, 4 + i}, s.staging);
        cp_async_bulk_commit_group();
        if (BUG != Bug::staging_overwritten) cp_async_bulk_wait_group_read<0>();
      }
      barrier_sync(1, 128);
    }
    if (tid == 0) cp_async_bulk_wait_group<0>();
  }
  __syncthreads();
  a.out[tid] = sum;
}

static int launches;  // of all host threads, if they share it

// A launch with tensors of this host thread.
template <Bug BUG> static bool launch() {
  if (BUG == Bug::host_static) launches++;
  __half* tensor;
  Args a{};
  cudaMalloc(&tensor, 6 * 64 * 64 * sizeof(__half));
  cudaMemset(tensor, 0, 6 * 64 * 64 * sizeof(__half));
  cudaMalloc(&a.out, 256 * sizeof(float));
  const cuuint64_t sizes[3] = {64, 64, 6}, strides[2] = {128, 64 * 128};
  const cuuint32_t box[3] = {64, 64, 1};
  if (encode_tensor_map(a.map, 3, tensor, sizes, strides, box) != cudaSuccess) return false;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(1);
  launch.blockDim = dim3(256);
  launch.dynamicSmemBytes = sizeof(Scratch);
  const cudaError_t error = cudaLaunchKernelEx(&launch, hand_over<BUG>, a);
  cudaFree(tensor);
  cudaFree(a.out);
  return error == cudaSuccess;
}

// sdpa_forward() with tensors of this host thread.
static bool forward() {
  SdpaParams p = params_of_sizes(1, 2, 1, 20, 50, Defines::head_dim, Defines::head_dim);
  std::vector<void*> memory;
  const auto allocate = [&](auto*& pointer, size_t elements) {
    memory.emplace_back();
    cudaMalloc(&memory.back(), elements * sizeof *pointer);
    cudaMemset(memory.back(), 0, elements * sizeof *pointer);
    pointer = static_cast<std::remove_reference_t<decltype(pointer)>>(memory.back());
  };
  constexpr int D = Defines::head_dim;
  allocate(p.Q, 2 * 20 * D);
  allocate(p.K, 50 * D);
  allocate(p.V, 50 * D);
  allocate(p.O, 2 * 20 * D);
  const bool ok = sdpa_forward(p, nullptr).ok() && cudaDeviceSynchronize() == cudaSuccess;
  for (void* one : memory) cudaFree(one);
  return ok;
}

int main(int argc, char** argv) {
  const struct {
    const char* name;
    bool (*launch)();
  } cases[] = {
      {"forward", forward},
      {"none", launch<Bug::none>},
      {"no_wait_for_full", launch<Bug::no_wait_for_full>},
      {"released_before_wait", launch<Bug::released_before_wait>},
      {"released_by_one", launch<Bug::released_by_one>},
      {"read_before_full", launch<Bug::read_before_full>},
      {"staging_overwritten", launch<Bug::staging_overwritten>},
      {"no_sync_after_stmatrix", launch<Bug::no_sync_after_stmatrix>},
      {"no_sync_before_ldmatrix", launch<Bug::no_sync_before_ldmatrix>},
      {"host_static", launch<Bug::host_static>},
  };
  for (const auto& one : cases) {
    if (argc != 2 || std::string(argv[1]) != one.name) continue;
    bool ok[2];
    std::thread other([&] { ok[1] = one.launch() && one.launch(); });
    ok[0] = one.launch() && one.launch();
    other.join();
    return ok[0] && ok[1] ? 0 : 1;
  }
  return 2;
}
