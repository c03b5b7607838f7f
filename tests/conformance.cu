// Runs every instruction wrapper on all lanes, with operands whose sums are exact in any order, and
// prints hashes of the results. The same source runs on a GPU (nvcc, sm_90a) and on the CPU backend.
// Both must give the hashes of conformance.golden, which are from an H200.
//   conformance [GOLDEN]     prints NAME HASH lines; with GOLDEN, exits with 1 if one differs
#define SDPA_NO_MAIN
#include "../sdpa_backward.cu"

#include <mma.h>

#include <fstream>
#include <map>
#include <string>
#include <vector>

using namespace SDPA_NAMESPACE;

// Instructions that no kernel of sdpa.cu uses; on the CPU backend they are in cpu_backend/ptx.h.
#ifndef SDPA_SIMT
template <int N, bool TRANS> __device__ void ldmatrix(uint32_t (&r)[N], const void* row_s) {
  const uint32_t row = shared_address(row_s);
  if constexpr (N == 1 && !TRANS) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(row));
  } else if constexpr (N == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(row));
  } else if constexpr (N == 2 && !TRANS) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(row));
  } else if constexpr (N == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(row));
  } else {
    ldmatrix_x4<TRANS>(r, row);
  }
}

template <int N, bool TRANS> __device__ void stmatrix(void* row_s, const uint32_t (&r)[N]) {
  const uint32_t row = shared_address(row_s);
  if constexpr (N == 4 && !TRANS) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
  } else if constexpr (N == 4) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
  } else if constexpr (!TRANS) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(r[0]),
                 "r"(r[1])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row),
                 "r"(r[0]), "r"(r[1])
                 : "memory");
  }
}

// sdpa.cu has wrappers for rank 5.
template <int RANK>
__device__ void cp_async_bulk_tensor_load(void* dst_s, const CUtensorMap* map, const int (&c)[RANK],
                                          uint64_t* barrier_s, uint64_t cache_policy) {
  const SharedAddress dst = shared_address(dst_s), barrier = shared_address(barrier_s);
  if constexpr (RANK == 3) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(dst),
        "l"(map), "r"(barrier), "l"(cache_policy), "r"(c[0]), "r"(c[1]), "r"(c[2])
        : "memory");
  } else if constexpr (RANK == 4) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(dst),
        "l"(map), "r"(barrier), "l"(cache_policy), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3])
        : "memory");
  } else {
    cp_async_bulk_tensor_load(dst_s, map, c, barrier_s, cache_policy);
  }
}
template <int RANK>
__device__ void cp_async_bulk_tensor_store(const CUtensorMap* map, const int (&c)[RANK],
                                           const void* src_s) {
  const SharedAddress src = shared_address(src_s);
  if constexpr (RANK == 3) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::
            "l"(map),
        "r"(src), "r"(c[0]), "r"(c[1]), "r"(c[2])
        : "memory");
  } else if constexpr (RANK == 4) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], "
        "[%1];" ::"l"(map),
        "r"(src), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3])
        : "memory");
  } else {
    cp_async_bulk_tensor_store(map, c, src_s);
  }
}

__device__ void cp_async_bulk_store(void* dst_g, const void* src_s, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst_g),
               "r"(shared_address(src_s)), "r"(bytes)
               : "memory");
}
#endif

constexpr int THREADS = 64, WORDS = 64;  // results per thread

struct Args {
  uint32_t* out;      // [THREADS][WORDS]
  const uint8_t* in;  // 4096 bytes: byte i is i * 37 + 11
  uint32_t* counter;
  uint16_t* tensor;                    // [HEADS][ROWS][ROW_STRIDE], words 0, 1, ...
  CUtensorMap map_3d, map_4d, map_5d;  // of its first 64 columns
  CUtensorMap map_bytes;               // of their first 64 bytes
};
constexpr int HEADS = 3, ROWS = 40, ROW_STRIDE = 80;

__device__ int small(int i) { return (i * 7 + 3) % 17 - 8; }  // integers from -8 to 8

// Two 16-bit elements, or four e4m3 ones, of small integers in one register.
template <class E> __device__ uint32_t pair_of(int i) {
  E e[2] = {static_cast<E>(float(small(2 * i))), static_cast<E>(float(small(2 * i + 1)))};
  uint32_t word;
  memcpy(&word, e, sizeof word);
  return word;
}
__device__ uint32_t e4m3(int value) {  // exact for |value| <= 16
  if (value == 0) return 0;
  const uint32_t sign = value < 0 ? 0x80 : 0;
  int magnitude = value < 0 ? -value : value, exponent = 0;
  while (magnitude >> exponent > 1) exponent++;
  return sign | uint32_t(exponent + 7) << 3 | ((magnitude << 3 >> exponent) & 7);
}
__device__ uint32_t packed_e4m3(int i) {
  uint32_t word = 0;
  for (int n = 0; n < 4; n++) word |= e4m3(small(4 * i + n)) << 8 * n;
  return word;
}

struct Scratch {
  alignas(128) uint8_t bytes[4096];
  uint64_t barriers[4];
};

__device__ Scratch& fill_shared(int first) {  // 16-bit words first, first + 1, ...
  Scratch& s = dynamic_shared<Scratch>();
  for (int i = threadIdx.x; i < 2048; i += THREADS) {
    const uint16_t word = uint16_t(first + i);
    memcpy(s.bytes + 2 * i, &word, 2);
  }
  __syncthreads();
  return s;
}

template <int N, bool TRANS> __global__ void test_ldmatrix(const Args a) {
  const Scratch& s = fill_shared(100);
  uint32_t r[N];
  // Rows in a scrambled order, each 16 bytes of a 32-byte line.
  ldmatrix<N, TRANS>(r, s.bytes + threadIdx.x * 5 % 64 * 32);
  for (int i = 0; i < N; i++) a.out[threadIdx.x * WORDS + i] = r[i];
}

template <int N, bool TRANS> __global__ void test_stmatrix(const Args a) {
  Scratch& s = fill_shared(0);
  uint32_t r[N];
  for (int i = 0; i < N; i++) r[i] = threadIdx.x * 0x10001 + i * 0x1000;
  const int row = threadIdx.x / 32 * 32 + threadIdx.x * 5 % 32;
  stmatrix<N, TRANS>(s.bytes + row * 32, r);
  __syncthreads();
  for (int i = 0; i < 16; i++)
    a.out[threadIdx.x * WORDS + i] = ld_shared<uint32_t>(s.bytes + 4 * (threadIdx.x * 16 + i));
}

template <class E> __global__ void test_mma(const Args a) {
  uint32_t x[4], y[2];
  float d[4];
  for (int i = 0; i < 4; i++) x[i] = pair_of<E>(threadIdx.x * 4 + i);
  for (int i = 0; i < 2; i++) y[i] = pair_of<E>(threadIdx.x * 9 + i + 500);
  for (int i = 0; i < 4; i++) d[i] = float(small(threadIdx.x + i * 3));
  mma_m16n8k16<E>(d[0], d[1], d[2], d[3], x, y[0], y[1]);
  mma_m16n8k16<E>(d[0], d[1], d[2], d[3], x, y[0], y[1]);
  for (int i = 0; i < 4; i++) a.out[threadIdx.x * WORDS + i] = bits_of(d[i]);
}

__global__ void test_mma_e4m3(const Args a) {
  uint32_t x[4], y[2];
  float d[4];
  for (int i = 0; i < 4; i++) x[i] = packed_e4m3(threadIdx.x * 4 + i);
  for (int i = 0; i < 2; i++) y[i] = packed_e4m3(threadIdx.x * 9 + i + 500);
  for (int i = 0; i < 4; i++) d[i] = float(small(threadIdx.x + i * 3));
  mma_m16n8k32_e4m3(d[0], d[1], d[2], d[3], x, y[0], y[1]);
  for (int i = 0; i < 4; i++) a.out[threadIdx.x * WORDS + i] = bits_of(d[i]);
}

// C = A @ B (+ C), with B row-major or column-major, in shared memory with a stride of 24.
// Fragments of fp32 and of fp16 sums (class Sum) have the same layout.
template <class E, class LayoutB, class Sum = float> __global__ void test_wmma(const Args a) {
  namespace wmma = nvcuda::wmma;
  Scratch& s = dynamic_shared<Scratch>();
  E* const A = reinterpret_cast<E*>(s.bytes);
  E* const B = reinterpret_cast<E*>(s.bytes + 1024);
  float* const C = reinterpret_cast<float*>(s.bytes + 2048);
  for (int i = threadIdx.x; i < 16 * 24; i += THREADS) {
    A[i] = static_cast<E>(float(small(i)));
    B[i] = static_cast<E>(float(small(i * 3 + 1)));
    C[i] = float(small(i * 5 + 2));
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, E, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, E, LayoutB> fb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
    wmma::fragment<wmma::accumulator, 16, 16, 16, Sum> sum;
    wmma::load_matrix_sync(fa, A, 24);
    wmma::load_matrix_sync(fb, B, 24);
    wmma::load_matrix_sync(fc, C, 24, wmma::mem_row_major);
    wmma::fill_fragment(sum, Sum(2.0f));
    for (int i = 0; i < sum.num_elements; i++) sum.x[i] = Sum(float(sum.x[i]) + fc.x[i]);
    wmma::mma_sync(sum, fa, fb, sum);
    wmma::store_matrix_sync(reinterpret_cast<Sum*>(C), sum, 24, wmma::mem_col_major);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * 24; i += THREADS) {
    a.out[threadIdx.x * WORDS + i / THREADS] = bits_of(float(reinterpret_cast<Sum*>(C)[i]));
  }
}

__global__ void test_shuffles(const Args a) {
  const int lane = threadIdx.x % 32;
  const float x = float(threadIdx.x * 3 + 1);
  uint32_t* const out = a.out + threadIdx.x * WORDS;
  for (int i = 0; i < 5; i++) out[i] = bits_of(__shfl_xor_sync(0xffffffffu, x, 1 << i));
  out[5] = bits_of(__shfl_sync(0xffffffffu, x, (lane * 7) % 32));
  out[6] = __ballot_sync(0xffffffffu, lane % 3 == 1);
  out[7] = __any_sync(0xffffffffu, lane == 40) ? 1 : 0;
  out[8] = __all_sync(0xffffffffu, lane < 32) ? 1 : 0;
  if (lane < 16) out[9] = bits_of(__shfl_xor_sync(0x0000ffffu, x, 3));
  if (lane >= 16) out[10] = bits_of(__shfl_xor_sync(0xffff0000u, x, 5));
}

template <int BYTES> __global__ void test_cp_async(const Args a) {
  Scratch& s = fill_shared(7);
  const int tid = threadIdx.x;
  cp_async<BYTES>(s.bytes + tid * 16, a.in + (63 - tid) * 16, tid % 5 != 2);
  cp_async_commit_group();
  cp_async<BYTES>(s.bytes + 1024 + tid * 16, a.in + 2048 + tid * 16, tid % 3 != 1);
  cp_async_commit_group();
  cp_async_commit_group();
  cp_async_wait_group<2>();
  __syncthreads();
  for (int i = 0; i < 4; i++) {
    a.out[tid * WORDS + i] = ld_shared<uint32_t>(s.bytes + 4 * (tid * 4 + i));
  }
  cp_async_wait_group<0>();
  __syncthreads();
  for (int i = 4; i < 8; i++) {
    a.out[tid * WORDS + i] = ld_shared<uint32_t>(s.bytes + 1024 + 4 * (tid * 4 + i - 4));
  }
}

__global__ void test_memory(const Args a) {
  Scratch& s = fill_shared(9);
  const int tid = threadIdx.x;
  uint32_t* const out = a.out + tid * WORDS;
  st_shared(s.bytes + 16 * tid, ld_global<uint4>(a.in + 16 * tid));
  st_shared(s.bytes + 1024 + 8 * tid, ld_global<uint2>(a.in + 8 * tid));
  st_shared(s.bytes + 2048 + 4 * tid, ld_global<unsigned>(a.in + 4 * tid));
  st_shared(s.bytes + 3072 + 2 * tid, ld_global<unsigned short>(a.in + 2 * tid));
  __syncthreads();
  const uint4 x = ld_shared<uint4>(s.bytes + 16 * (63 - tid));
  const uint2 y = ld_shared<uint2>(s.bytes + 1024 + 8 * (63 - tid));
  st_global(out, x);
  st_global(out + 4, y);
  st_global(out + 6, ld_shared<unsigned>(s.bytes + 2048 + 4 * (63 - tid)));
  st_global(reinterpret_cast<unsigned short*>(out + 7),
            ld_shared<unsigned short>(s.bytes + 3072 + 2 * (63 - tid)));
  atomicAdd(a.counter, unsigned(tid));
}

// Eight threads add to the same four floats.
__global__ void test_red_add(const Args a) {
  const int tid = threadIdx.x;
  float* const sums = reinterpret_cast<float*>(a.out) + tid / 8 * 4;
  red_global_add_v4(sums, float(tid), 2.0f * tid, -0.5f * tid, 1);
}
// Eight threads add to the same two floats.
__global__ void test_red_add_v2(const Args a) {
  const int tid = threadIdx.x;
  float* const sums = reinterpret_cast<float*>(a.out) + tid / 8 * 2;
  red_global_add_v2(sums, float(tid), -0.5f * tid);
}

// Threads 32, 0 and 32 add 2^24, 1 and -2^24 to each of 256 floats, in this order, so the sums are 0.
__global__ void test_bulk_adds_in_turn(const Args a) {
  Scratch& s = dynamic_shared<Scratch>();
  float* const x = reinterpret_cast<float*>(s.bytes);
  for (int i = threadIdx.x; i < 3 * 256; i += THREADS) st_shared(x + i, i / 256 == 1 ? 1.0f : i < 256 ? 0x1p24f : -0x1p24f);
  float* const sums = reinterpret_cast<float*>(a.out);
  for (int i = threadIdx.x; i < 256; i += THREADS) sums[i] = float(i % 2);
  fence_proxy_async();
  fence_proxy_async_global();
  __syncthreads();
  if (threadIdx.x % 32 > 0) return;
  for (int turn = threadIdx.x > 0 ? 0 : 1; turn < 3; turn += 2) {
    wait_for_value(a.counter, turn);
    fence_proxy_async_global();
    cp_reduce_async_bulk_add(sums, x + 256 * turn, 1024);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group<0>();
    st_release(a.counter, turn + 1);
  }
}

// Warp 0 passes numbers to warp 1 and back, synchronized by a named barrier and by mbarriers.
__global__ void test_barriers(const Args a) {
  Scratch& s = dynamic_shared<Scratch>();
  uint32_t* const box = reinterpret_cast<uint32_t*>(s.bytes);
  const int tid = threadIdx.x, lane = tid % 32;
  if (tid == 0) {
    mbarrier_init(&s.barriers[0], 32);
    mbarrier_init(&s.barriers[1], 32);
  }
  __syncthreads();
  uint32_t sum = 0;
  for (int round = 0; round < 4; round++) {
    if (tid < 32) {
      while (!mbarrier_test_wait_parity(&s.barriers[1], (round & 1) ^ 1)) {
      }
      box[lane] = uint32_t(round * 100 + lane * 3);
      mbarrier_arrive(&s.barriers[0]);
    } else {
      while (!mbarrier_test_wait_parity(&s.barriers[0], round & 1)) {
      }
      sum = sum * 5 + box[31 - lane];
      mbarrier_arrive(&s.barriers[1]);
    }
  }
  if (tid < 32) {
    box[64 + lane] = uint32_t(lane * lane);
    barrier_arrive(3, 64);
  } else {
    barrier_sync(3, 64);
    sum += box[64 + (lane ^ 5)];
  }
  sum += barrier_and(4, 64, true) * 7 + barrier_and(4, 64, tid != 41) * 11;
  a.out[tid * WORDS] = sum;
}

// float -> 16 bits -> float over special, halfway and scattered values; and all 16-bit values.
template <class E> __global__ void test_conversions(const Args a) {
  uint32_t* const out = a.out + threadIdx.x * WORDS;
  uint32_t forth = 2166136261u, back = 2166136261u;
  for (int i = 0; i < 1024; i++) {
    const uint32_t bits16 = threadIdx.x * 1024 + i;
    E e;
    const uint16_t half_bits = uint16_t(bits16);
    memcpy(static_cast<void*>(&e), &half_bits, 2);
    const uint32_t value = bits_of(float(e));
    const bool is_nan = (value & 0x7fffffff) > 0x7f800000;
    back = (back ^ (is_nan ? 0x7fffffff : value)) * 16777619u;
    // This value, and the ones just below, at and just above the middle to its neighbour.
    const uint32_t middle = std::is_same<E, __half>::value ? 0x1000 : 0x8000;
    const uint32_t tries[5] = {value, value + middle - 1, value + middle, value + middle + 1,
                               bits16 * 2654435761u};
    for (uint32_t t : tries) {
      const E rounded = static_cast<E>(float_of(t));
      uint16_t result;
      memcpy(&result, &rounded, 2);
      forth = (forth ^ result) * 16777619u;
    }
  }
  out[0] = forth;
  out[1] = back;
}

__global__ void test_arithmetic(const Args a) {
  const float values[12] = {0.0f,        -0.0f,     1.0f,       -1.0f, 1.5f,      -127.0f,
                            12583039.0f, 0x1p-149f, -0x1p-126f, 3.25f, -0x1p-30f, -INFINITY};
  uint32_t* const out = a.out + threadIdx.x * WORDS;
  const float x = values[threadIdx.x % 12];
  for (int i = 0; i < 12; i++) {
    out[i] = bits_of(max_nan(x, values[i]));
    out[12 + i] = bits_of(add_rm(x, values[i]));
  }
  out[24] = bits_of(max_nan(x, NAN));
  out[25] = bits_of(max_nan(NAN, x));
  uint32_t hash = 2166136261u;
  for (int i = 0; i < 4096; i++) {  // 2^18 values from 0 down to -131
    hash = (hash ^ bits_of(exp2_polynomial<Defines>(float(threadIdx.x * 4096 + i) * -0.0005f))) * 16777619u;
  }
  out[26] = hash;
  out[27] = bits_of(exp2_polynomial<Defines>(-INFINITY));
  out[28] = bits_of(exp2_polynomial<Defines>(NAN)) | 0x80000000u;
}

// ---- sm_90 ----

struct HopperScratch {
  alignas(1024) uint8_t a[64 * 128];
  alignas(1024) uint8_t b[256 * 128];
  uint64_t barriers[2];
};

__device__ HopperScratch& hopper_scratch() {
  HopperScratch& s = dynamic_shared<HopperScratch>();
  if (threadIdx.x == 0) {
    mbarrier_init(&s.barriers[0], 1);
    mbarrier_init(&s.barriers[1], 1);
    fence_mbarrier_init();
  }
  for (int i = threadIdx.x; i < int(sizeof s.a + sizeof s.b) / 4; i += blockDim.x) {
    st_shared(s.a + 4 * i, 0u);
  }
  fence_proxy_async();
  __syncthreads();
  return s;
}

__device__ void wait_for(uint64_t* barrier_s, int parity) {
  while (!mbarrier_try_wait_parity(barrier_s, parity)) {
  }
}

// Swizzled boxes that are out of bounds before or after the tensor, or inside.
template <int RANK> __global__ void test_tma_load(const __grid_constant__ Args a) {
  HopperScratch& s = hopper_scratch();
  const int tid = threadIdx.x;
  if (tid == 0) {
    constexpr uint64_t evict_first = 0x12f0000000000000;
    mbarrier_arrive_expect_tx(&s.barriers[0], 4 * 2048);
    if constexpr (RANK == 3) {
      prefetch_tensormap(&a.map_3d);
      cp_async_bulk_tensor_load<3>(s.a, &a.map_3d, {-8, 30, 1}, &s.barriers[0], evict_first);
      cp_async_bulk_tensor_load<3>(s.a + 2048, &a.map_3d, {24, -3, 2}, &s.barriers[0], evict_first);
      cp_async_bulk_tensor_load<3>(s.a + 4096, &a.map_3d, {0, 7, 0}, &s.barriers[0], evict_first);
      cp_async_bulk_tensor_load<3>(s.a + 6144, &a.map_3d, {0, 7, 3}, &s.barriers[0], evict_first);
    } else if constexpr (RANK == 4) {
      cp_async_bulk_tensor_load<4>(s.a, &a.map_4d, {0, 16, 0, 1}, &s.barriers[0], evict_first);
      cp_async_bulk_tensor_load<4>(s.a + 2048, &a.map_4d, {-8, -3, 1, 2}, &s.barriers[0],
                                   evict_first);
      cp_async_bulk_tensor_load<4>(s.a + 4096, &a.map_4d, {0, 7, 0, 0}, &s.barriers[0],
                                   evict_first);
      cp_async_bulk_tensor_load<4>(s.a + 6144, &a.map_4d, {40, 7, -1, 2}, &s.barriers[0],
                                   evict_first);
    } else {
      cp_async_bulk_tensor_load<5>(s.a, &a.map_5d, {0, 8, 0, 0, 1}, &s.barriers[0], evict_first);
      cp_async_bulk_tensor_load<5>(s.a + 2048, &a.map_5d, {-8, -3, 1, 1, 2}, &s.barriers[0],
                                   evict_first);
      cp_async_bulk_tensor_load<5>(s.a + 4096, &a.map_5d, {0, 3, 0, 1, 0}, &s.barriers[0],
                                   evict_first);
      cp_async_bulk_tensor_load<5>(s.a + 6144, &a.map_5d, {16, 7, -1, 0, 2}, &s.barriers[0],
                                   evict_first);
    }
  }
  wait_for(&s.barriers[0], 0);
  for (int i = 0; i < 16; i++) a.out[tid * 16 + i] = ld_shared<uint32_t>(s.a + 4 * (tid * 16 + i));
}

// Stores and loads a tile that is partly out of bounds, and plain bytes.
template <int RANK> __global__ void test_tma_store(const __grid_constant__ Args a) {
  HopperScratch& s = hopper_scratch();
  const int tid = threadIdx.x;
  for (int i = 0; i < 4; i++) st_shared(s.a + 4 * (tid * 4 + i), 0x10001u * (tid * 4 + i));
  fence_proxy_async();
  __syncthreads();
  if (tid == 0) {
    if constexpr (RANK == 3) {
      cp_async_bulk_tensor_store<3>(&a.map_3d, {0, 30, 1}, s.a);
    } else if constexpr (RANK == 4) {
      cp_async_bulk_tensor_store<4>(&a.map_4d, {0, 16, 0, 1}, s.a);
    } else {
      cp_async_bulk_tensor_store<5>(&a.map_5d, {0, 7, 0, 1, 1}, s.a);
    }
    cp_async_bulk_commit_group();
    cp_async_bulk_store(a.tensor + ROWS * ROW_STRIDE * 2 + 8, s.a + 512, 96);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group_read<1>();
    cp_async_bulk_wait_group<0>();
  }
  __syncthreads();
  for (int i = tid; i < HEADS * ROWS * ROW_STRIDE / 2; i += blockDim.x) {
    a.out[i] = reinterpret_cast<const volatile uint32_t*>(a.tensor)[i];
  }
}

__global__ void test_bulk_load(const __grid_constant__ Args a) {
  HopperScratch& s = hopper_scratch();
  const int tid = threadIdx.x;
  for (int round = 0; round < 3; round++) {
    if (tid == 0) {
      mbarrier_arrive_expect_tx(&s.barriers[0], 1024 + 48);
      cp_async_bulk_load(s.a, a.in + 16 * round, 1024, &s.barriers[0]);
      cp_async_bulk_load(s.b + 16, a.in + 2048, 48, &s.barriers[0]);
    }
    wait_for(&s.barriers[0], round & 1);
    a.out[tid * 8 + round] =
        ld_shared<uint32_t>(s.a + 4 * tid) + ld_shared<uint32_t>(s.b + tid / 2 * 4);
    __syncthreads();
  }
}

// Completes a wgmma group and adds its accumulators to the hash.
template <int N> __device__ __forceinline__ void end_products(float (&d)[N], uint32_t& hash) {
  wgmma_commit_group();
  wgmma_wait_group<0>();
  hold(d);
#pragma unroll
  for (int i = 0; i < N; i++) hash = (hash ^ bits_of(d[i] + 0.0f)) * 16777619u;
}

// D += A @ B in four steps of 16 k, then D = A @ B. Lines have LINE bytes, and panels have 64
// lines.
template <class E, int N, int TRANS_B, bool RS, int TRANS_A = 0, int LINE = 128>
__global__ void test_wgmma(const __grid_constant__ Args a) {
  HopperScratch& s = hopper_scratch();
  const int tid = threadIdx.x, lane = tid % 32;
  constexpr int PANEL = 64 * LINE, ELEMENTS = LINE / 2;
  const auto line = [](uint8_t* panels, int r, int i) {  // element i of line r, swizzled
    const int chunk = i % ELEMENTS / 8 ^ r * LINE / 128 % (LINE / 16);
    return panels + i / ELEMENTS * PANEL + r * LINE + chunk * 16 + i % 8 * 2;
  };
  const auto step = [](int k, bool transposed) {  // of a descriptor
    return transposed ? k * LINE : k * 32 / LINE * (PANEL / 16) + k * 2 % (LINE / 16);
  };
  for (int i = tid; i < 64 * 64; i += 128) {
    uint8_t* const place = TRANS_A ? line(s.a, i % 64, i / 64) : line(s.a, i / 64, i % 64);
    st_shared(place, static_cast<E>(float(small(i * 3 + 1))));
  }
  for (int i = tid; i < 64 * N; i += 128) {
    const int k = i / N, j = i % N;
    uint8_t* const place = TRANS_B ? line(s.b, k, j) : line(s.b, j, k);
    st_shared(place, static_cast<E>(float(small(i * 5 + 2))));
  }
  fence_proxy_async();
  __syncthreads();
  float d[N / 2];
  uint32_t x[4][4];
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const int row = tid / 32 * 16 + lane / 4 + i % 2 * 8,
              k = i / 4 * 16 + i % 4 / 2 * 8 + lane % 4 * 2;
    x[i / 4][i % 4] = ld_shared<uint32_t>(line(s.a, row, k));
  }
#pragma unroll
  for (int i = 0; i < N / 2; i++) d[i] = float(small(tid * 11 + i));
  const uint64_t da = wgmma_descriptor(shared_address(s.a), LINE == 64 ? PANEL : 16, 8 * LINE);
  const uint64_t db = wgmma_descriptor(shared_address(s.b), PANEL, 8 * LINE);
  uint32_t hash = 2166136261u;
#pragma unroll
  for (int round = 0; round < 2; round++) {
    hold(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const bool accumulate = round == 0 || k > 0;
      if constexpr (RS) {
        wgmma_rs<E, N, TRANS_B>(d, x[k], db + step(k, TRANS_B), accumulate);
      } else {
        wgmma_ss<E, N, TRANS_B, TRANS_A>(d, da + step(k, TRANS_A), db + step(k, TRANS_B), accumulate);
      }
    }
    end_products(d, hash);
  }
  a.out[tid * 2] = hash;
  a.out[tid * 2 + 1] = bits_of(d[N / 2 - 1] + 0.0f);
}

// The same for e4m3, with 32 k per step. Before the last step the sum is 2^14, which shows how many
// bits a sum has.
template <int N, int LINE, bool RS>
__global__ void test_wgmma_e4m3(const __grid_constant__ Args a) {
  HopperScratch& s = hopper_scratch();
  const int tid = threadIdx.x, lane = tid % 32;
  const auto byte = [](uint8_t* panel, int r, int k) {  // of line r
    return panel + r * LINE + (k / 16 ^ r * LINE / 128 % (LINE / 16)) * 16 + k % 16;
  };
  const auto value_a = [](int r, int k) { return uint8_t(e4m3(small((r * 64 + k) * 3 + 1))); };
  for (int i = tid; i < 64 * 64; i += 128)
    st_shared(byte(s.a, i / 64, i % 64), value_a(i / 64, i % 64));
  for (int i = tid; i < 64 * N; i += 128) {
    st_shared(byte(s.b, i / 64, i % 64), uint8_t(e4m3(small(i * 5 + 2))));
  }
  fence_proxy_async();
  __syncthreads();
  float d[N / 2];
  uint32_t x[2][4];
  for (int step = 0; step < 2; step++) {
    for (int i = 0; i < 4; i++) {
      const int row = tid / 32 * 16 + lane / 4 + i % 2 * 8;
      const int k = step * 32 + lane % 4 * 4 + i / 2 * 16;
      x[step][i] = 0;
      for (int n = 0; n < 4; n++) x[step][i] |= uint32_t(value_a(row, k + n)) << 8 * n;
    }
  }
#pragma unroll
  for (int i = 0; i < N / 2; i++) d[i] = float(small(tid * 11 + i));
  const uint64_t da = wgmma_descriptor(shared_address(s.a), 16, 8 * LINE);
  const uint64_t db = wgmma_descriptor(shared_address(s.b), 16, 8 * LINE);
  uint32_t hash = 2166136261u;
#pragma unroll
  for (int round = 0; round < 3; round++) {
    if (round == 2) {
#pragma unroll
      for (int i = 0; i < N / 2; i++) d[i] = 16384;
    }
    hold(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 2; step++) {
      const bool accumulate = round != 1 || step > 0;
      if constexpr (RS) {
        wgmma_rs<__nv_fp8_e4m3, N, 0>(d, x[step], db + 2 * step, accumulate);
      } else {
        wgmma_ss<__nv_fp8_e4m3, N, 0>(d, da + 2 * step, db + 2 * step, accumulate);
      }
    }
    end_products(d, hash);
  }
  a.out[tid * 2] = hash;
  a.out[tid * 2 + 1] = bits_of(d[N / 2 - 1] + 0.0f);
}

// Conversions and bytes in registers.
__global__ void test_bytes(const __grid_constant__ Args a) {
  const uint32_t tid = threadIdx.x;
  for (uint32_t i = 0; i < 16; i++) {
    const uint32_t n = tid * 16 + i;
    const float x = float_of((n << 20) ^ (n * 0x9e3779b9u >> 12)),
                y = float(small(n)) * 0.0009765625f;
    a.out[tid * WORDS + i] = cvt_rn_satfinite_e4m3x4(x, y, -x, float(small(n)) * 64.5f);
    a.out[tid * WORDS + 16 + i] = prmt(n * 0x01234567u, n * 0x89abcdefu, n * 0x1357u & 0x7777);
    const uint32_t u = prmt(n * 0x01234567u, 0x64646464, i % 2 ? 0x4342 : 0x4140);
    a.out[tid * WORDS + 32 + i] = sub_f16x2(u, 0x64806480);
    const uint32_t pair = n % 127 | n * 5 % 127 << 8 | (n & 0x40) << 1 | (n & 0x80) << 8;
    a.out[tid * WORDS + 48 + i] = cvt_rn_f16x2_e4m3x2(pair);
  }
}

// A box of bytes with lines of 64 bytes.
__global__ void test_tma_load_bytes(const __grid_constant__ Args a) {
  HopperScratch& s = hopper_scratch();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(&s.barriers[0], 2 * 1024);
    cp_async_bulk_tensor_load<3>(s.a, &a.map_bytes, {-16, 30, 1}, &s.barriers[0],
                                 0x12f0000000000000);
    cp_async_bulk_tensor_load<3>(s.a + 1024, &a.map_bytes, {16, 7, 0}, &s.barriers[0],
                                 0x12f0000000000000);
  }
  wait_for(&s.barriers[0], 0);
  for (int i = 0; i < 4; i++) {
    a.out[threadIdx.x * 4 + i] = ld_shared<uint32_t>(s.a + 4 * (threadIdx.x * 4 + i));
  }
}

template <bool TRANS> __global__ void test_stmatrix_x4(const __grid_constant__ Args a) {
  HopperScratch& s = hopper_scratch();
  uint32_t r[4];
  for (int i = 0; i < 4; i++) r[i] = threadIdx.x * 0x10001 + i * 0x1000;
  const int row = threadIdx.x / 32 * 32 + threadIdx.x * 5 % 32;
  stmatrix_x4<TRANS>(shared_address(s.a + row * 48), r);
  __syncthreads();
  for (int i = 0; i < 12; i++) {
    a.out[threadIdx.x * 12 + i] = ld_shared<uint32_t>(s.a + 4 * (threadIdx.x * 12 + i));
  }
}

// Three warpgroups exchange registers (setmaxnreg) and compute the same sum. Without a dependent
// launch, the two griddepcontrol instructions do nothing.
__global__ void __launch_bounds__(384, 1) test_setmaxnreg(const __grid_constant__ Args a) {
  griddepcontrol_wait();
  if (threadIdx.x >= 256) {
    setmaxnreg_dec<24>();
  } else {
    setmaxnreg_inc<240>();
  }
  a.out[threadIdx.x] = threadIdx.x * 3 + 1;
  griddepcontrol_launch_dependents();
}

static std::map<std::string, std::string> hashes;
static bool failed = false;

static void encode_maps(Args& a) {
  const uint64_t row = ROW_STRIDE * 2, head = ROWS * row;
  const cuuint64_t sizes_3d[3] = {64, ROWS, HEADS}, strides_3d[2] = {row, head};
  const cuuint32_t box_3d[3] = {64, 16, 1};
  const cuuint64_t sizes_4d[4] = {64, ROWS / 2, 2, HEADS}, strides_4d[3] = {row, head / 2, head};
  const cuuint32_t box_4d[4] = {64, 8, 2, 1};
  const cuuint64_t sizes_5d[5] = {64, ROWS / 4, 2, 2, HEADS};
  const cuuint64_t strides_5d[4] = {row, head / 2, head / 4, head};
  const cuuint32_t box_5d[5] = {64, 4, 2, 2, 1};
  const cuuint64_t sizes_bytes[3] = {64, ROWS, HEADS};
  if (encode_tensor_map(a.map_bytes, 3, a.tensor, sizes_bytes, strides_3d, box_3d, 1) !=
          cudaSuccess ||
      encode_tensor_map(a.map_3d, 3, a.tensor, sizes_3d, strides_3d, box_3d) != cudaSuccess ||
      encode_tensor_map(a.map_4d, 4, a.tensor, sizes_4d, strides_4d, box_4d) != cudaSuccess ||
      encode_tensor_map(a.map_5d, 5, a.tensor, sizes_5d, strides_5d, box_5d) != cudaSuccess) {
    printf("no tensor map\n");
    failed = true;
  }
}

// Hashes threads * words results of a kernel.
static void run(const char* name, void (*kernel)(const Args), int threads = THREADS,
                size_t results = THREADS * WORDS) {
  Args a{};
  uint8_t* in = nullptr;
  std::vector<uint8_t> bytes(4096);
  for (size_t i = 0; i < bytes.size(); i++) bytes[i] = uint8_t(i * 37 + 11);
  std::vector<uint32_t> out(results + 1);
  std::vector<uint16_t> tensor(HEADS * ROWS * ROW_STRIDE);
  for (size_t i = 0; i < tensor.size(); i++) tensor[i] = uint16_t(i);
  cudaMalloc(&a.tensor, tensor.size() * 2);
  cudaMemcpy(a.tensor, tensor.data(), tensor.size() * 2, cudaMemcpyHostToDevice);
  encode_maps(a);
  cudaMalloc(&a.out, out.size() * 4);
  cudaMalloc(&in, bytes.size());
  cudaMemset(a.out, 0, out.size() * 4);
  cudaMemcpy(in, bytes.data(), bytes.size(), cudaMemcpyHostToDevice);
  a.in = in;
  a.counter = a.out + results;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(1);
  launch.blockDim = dim3(threads);
  launch.dynamicSmemBytes = sizeof(HopperScratch);
  cudaError_t error = cudaLaunchKernelEx(&launch, kernel, a);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error == cudaSuccess) {
    error = cudaMemcpy(out.data(), a.out, out.size() * 4, cudaMemcpyDeviceToHost);
  }
  if (error != cudaSuccess) {
    printf("%s: %s\n", name, cudaGetErrorString(error));
    failed = true;
  }
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (uint32_t word : out) hash = (hash ^ word) * 1099511628211u;
  char text[32];
  snprintf(text, sizeof text, "%016llx", (unsigned long long)hash);
  hashes[name] = text;
  cudaFree(a.out);
  cudaFree(a.tensor);
  cudaFree(in);
}

// All wgmma shapes, with one hash.
template <int N> static void run_wgmma(const char* name) {
  const auto run_one = [&](const char* kind, void (*kernel)(const Args)) {
    run((name + std::string(kind)).c_str(), kernel, 128, 256);
  };
  run_one("_ss_fp16_k", test_wgmma<__half, N, 0, false>);
  run_one("_ss_fp16_mn", test_wgmma<__half, N, 1, false>);
  run_one("_ss_bf16_k", test_wgmma<__nv_bfloat16, N, 0, false>);
  run_one("_ss_bf16_mn", test_wgmma<__nv_bfloat16, N, 1, false>);
  run_one("_ss_fp16_mn_k", test_wgmma<__half, N, 0, false, 1>);  // A, then B
  run_one("_ss_bf16_mn_mn", test_wgmma<__nv_bfloat16, N, 1, false, 1>);
  run_one("_ss_fp16_k_mn_64", test_wgmma<__half, N, 1, false, 0, 64>);  // lines of 64 bytes
  run_one("_ss_bf16_mn_mn_64", test_wgmma<__nv_bfloat16, N, 1, false, 1, 64>);
  run_one("_rs_fp16_k", test_wgmma<__half, N, 0, true>);
  run_one("_rs_fp16_mn", test_wgmma<__half, N, 1, true>);
  run_one("_rs_bf16_k", test_wgmma<__nv_bfloat16, N, 0, true>);
  run_one("_rs_bf16_mn", test_wgmma<__nv_bfloat16, N, 1, true>);
  run_one("_ss_e4m3_128", test_wgmma_e4m3<N, 128, false>);
  run_one("_ss_e4m3_64", test_wgmma_e4m3<N, 64, false>);
  run_one("_rs_e4m3_128", test_wgmma_e4m3<N, 128, true>);
  run_one("_rs_e4m3_64", test_wgmma_e4m3<N, 64, true>);
}

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    printf("no GPU: compiled and linked, not run\n");
    return 77;
  }
  using nvcuda::wmma::col_major;
  using nvcuda::wmma::row_major;
  run("ldmatrix_x1", test_ldmatrix<1, false>);
  run("ldmatrix_x1_trans", test_ldmatrix<1, true>);
  run("ldmatrix_x2", test_ldmatrix<2, false>);
  run("ldmatrix_x2_trans", test_ldmatrix<2, true>);
  run("ldmatrix_x4", test_ldmatrix<4, false>);
  run("ldmatrix_x4_trans", test_ldmatrix<4, true>);
  run("stmatrix_x2", test_stmatrix<2, false>);
  run("stmatrix_x2_trans", test_stmatrix<2, true>);
  run("stmatrix_x4", test_stmatrix<4, false>);
  run("stmatrix_x4_trans", test_stmatrix<4, true>);
  run("mma_m16n8k16_fp16", test_mma<__half>);
  run("mma_m16n8k16_bf16", test_mma<__nv_bfloat16>);
  run("mma_m16n8k32_e4m3", test_mma_e4m3);
  run("wmma_fp16_row", test_wmma<__half, row_major>);
  run("wmma_fp16_col", test_wmma<__half, col_major>);
  run("wmma_fp16_sums", test_wmma<__half, row_major, __half>);
  run("wmma_bf16_row", test_wmma<__nv_bfloat16, row_major>);
  run("wmma_bf16_col", test_wmma<__nv_bfloat16, col_major>);
  run("shuffles_and_votes", test_shuffles);
  run("cp_async_4", test_cp_async<4>);
  run("cp_async_8", test_cp_async<8>);
  run("cp_async_16", test_cp_async<16>);
  run("loads_stores_atomic", test_memory);
  run("red_add", test_red_add);
  run("red_add_v2", test_red_add_v2);
  run("bulk_adds_in_turn", test_bulk_adds_in_turn);
  run("barriers", test_barriers);
  run("conversions_fp16", test_conversions<__half>);
  run("conversions_bf16", test_conversions<__nv_bfloat16>);
  run("arithmetic", test_arithmetic);
  run("bytes", test_bytes);
  run("tma_load_bytes", test_tma_load_bytes, 128, 512);
  run("tma_load_3d", test_tma_load<3>, 128, 2048);
  run("tma_load_4d", test_tma_load<4>, 128, 2048);
  run("tma_load_5d", test_tma_load<5>, 128, 2048);
  run("tma_store_3d", test_tma_store<3>, 128, HEADS * ROWS * ROW_STRIDE / 2);
  run("tma_store_4d", test_tma_store<4>, 128, HEADS * ROWS * ROW_STRIDE / 2);
  run("tma_store_5d", test_tma_store<5>, 128, HEADS * ROWS * ROW_STRIDE / 2);
  run("bulk_load", test_bulk_load, 24, 24 * 8);
  run("stmatrix_x4_address", test_stmatrix_x4<false>, 128, 128 * 12);
  run("stmatrix_x4_address_trans", test_stmatrix_x4<true>, 128, 128 * 12);
  run("setmaxnreg", test_setmaxnreg, 384, 384);
  run_wgmma<8>("wgmma_n8");
  run_wgmma<16>("wgmma_n16");
  run_wgmma<32>("wgmma_n32");
  run_wgmma<64>("wgmma_n64");
  run_wgmma<80>("wgmma_n80");
  run_wgmma<128>("wgmma_n128");
  run_wgmma<176>("wgmma_n176");
  run_wgmma<256>("wgmma_n256");
  for (const auto& h : hashes) printf("%s %s\n", h.first.c_str(), h.second.c_str());
  if (argc < 2) return failed;

  std::ifstream golden(argv[1]);
  std::string name, hash;
  size_t compared = 0;
  while (golden >> name >> hash) {
    compared++;
    if (hashes[name] != hash) {
      printf("%s differs from the golden hash %s\n", name.c_str(), hash.c_str());
      failed = true;
    }
  }
  if (compared != hashes.size()) {
    printf("%s has %zu hashes, here are %zu\n", argv[1], compared, hashes.size());
    failed = true;
  }
  return failed;
}
