// The clock of an SM, for who reads it right behind the load that is timed: sdpa.cu's harness and tools/micro.cu.
#pragma once

namespace SDPA_NAMESPACE {
namespace {

// Cycles of one SM and nanoseconds of the same stretch, some 300 us long.
__global__ void count_clocks(long long* cycles_and_ns) {
  const auto now_ns = [] {
    long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
  };
  const long long ns = now_ns(), cycles = clock64();
  while (now_ns() - ns < 300000) {
  }
  cycles_and_ns[0] = clock64() - cycles;
  cycles_and_ns[1] = now_ns() - ns;
}

}  // namespace
}  // namespace SDPA_NAMESPACE
