// A library with a kernel that keeps some SMs and the memory busy, for `./run_all.sh stress`.
#include <cstdint>

constexpr int THREADS = 1024;
constexpr uint32_t CHUNK = 64 * THREADS;  // vectors between two reads of `stop`: 1 MB
constexpr uint32_t CHUNKS = 32;           // per CTA: 16 CTAs use ten times the size of an H200's L2
constexpr long long MOST_NS = 100ll * 1000 * 1000 * 1000;  // maximum duration

// Each CTA repeatedly reads and writes its part of the buffer. stop and moved (bytes per CTA) are
// in host memory.
__global__ void __launch_bounds__(THREADS) hog(uint4* buffer, volatile uint64_t* moved, const volatile uint64_t* stop) {
  const auto now_ns = [] {
    long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
  };
  uint4* const part = buffer + size_t(blockIdx.x) * CHUNKS * CHUNK;
  const long long begin = now_ns();
  uint64_t sum = 0;
  for (uint32_t chunk = 0;; chunk = (chunk + 1) % CHUNKS) {
    const bool over = threadIdx.x == 0 && (*stop || now_ns() - begin > MOST_NS);
    if (__syncthreads_or(over)) return;
#pragma unroll 8
    for (uint32_t i = threadIdx.x; i < CHUNK; i += THREADS) {
      uint4 x = part[chunk * CHUNK + i];
      x.x++;
      part[chunk * CHUNK + i] = x;
    }
    sum += 2 * sizeof(uint4) * CHUNK;
    if (threadIdx.x == 0) moved[blockIdx.x] = sum;
  }
}

extern "C" {

// Buffer size per CTA, in bytes.
size_t hog_bytes() { return sizeof(uint4) * CHUNKS * CHUNK; }

// `moved` has a number for each CTA, followed by `stop`. Returns a cudaError_t.
int hog_start(int ctas, uint4* buffer, uint64_t* moved, cudaStream_t stream) {
  hog<<<ctas, THREADS, 0, stream>>>(buffer, moved, moved + ctas);
  return cudaGetLastError();
}
}
