// A CPU that runs CUDA kernels: one fiber per CUDA thread, one block at a time per worker thread.
// This header is what kernels see of it; engine.cpp has the scheduler, which is compiled without
// sanitizers so that ThreadSanitizer sees the CUDA threads and their barriers, and nothing else.
//
// It is stricter than the hardware: asynchronous copies land only at the wait that covers them,
// shared memory starts as NaN, warps do not run in lockstep, and threads run in the order that
// simt::schedule says. What it finds it reports with block, warp, lane and source line, and the
// launch fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace simt {

struct Index3 {
  unsigned x, y, z;
};

// A place in the kernel's source. `function` may carry template arguments (__PRETTY_FUNCTION__).
struct Site {
  const char* file;
  int line;
  const char* function;
};
#define SIMT_HERE (::simt::Site{__FILE__, __LINE__, __PRETTY_FUNCTION__})
// As default arguments: the place of the call.
#define SIMT_CALLER ::simt::Site at = {__builtin_FILE(), __builtin_LINE(), __builtin_FUNCTION()}

struct AsyncCopy {  // one cp.async
  unsigned char* dst;
  const unsigned char* src;  // null: zeros
  int bytes;
};

struct Block;

struct Thread {  // one CUDA thread
  Index3 index;
  int linear, warp, lane;
  Block* block;
  unsigned char* shared;  // the block's dynamic shared memory
  size_t shared_bytes;
  bool counting;          // this block's accesses are counted
  std::vector<AsyncCopy> open_copies;                   // cp.async since the last commit
  std::vector<std::vector<AsyncCopy>> copy_groups;      // committed, oldest first
  std::map<const void*, uint64_t> accesses_at;          // by site, for the conflict counters
};

struct Grid {
  Index3 dim, block_dim;
};

extern thread_local Thread* self;     // the CUDA thread that runs now
extern thread_local Index3 block_index;
extern thread_local Grid grid;

// ---- waiting; all of these may switch to other CUDA threads ----

// The barrier of the whole block. Threads at different sites, or gone, are a divergent barrier.
void sync_threads(Site at);
// bar.sync (wait) and bar.arrive (!wait) on barrier `id` of `count` threads.
void named_barrier(int id, int count, bool wait, Site at);
// The lanes of `mask` meet; the last to arrive runs compute(args) on all their arguments, indexed by
// lane. Lanes that meet in different operations are reported.
using Collective = void (*)(void* const args[32], unsigned mask);
void warp_collective(unsigned mask, void* mine, Collective compute, Site at);
// Waits until ready(context); notify() makes waiting threads ask again.
void wait_until(bool (*ready)(const void*), const void* context, Site at);
void notify();
// mbarriers, in 8 bytes of shared memory: count arrivals and bytes in flight; a phase is complete when
// both are used up. wait() returns once the phase of that parity is complete.
void mbarrier_init(uint64_t* barrier, int count, Site at);
void mbarrier_arrive(uint64_t* barrier, int expect_bytes, Site at);
void mbarrier_complete_bytes(uint64_t* barrier, int bytes, Site at);
void mbarrier_wait(uint64_t* barrier, int parity, Site at);
// Ordering for ThreadSanitizer on an object that is not one of the above.
void release(const void* object);
void acquire(const void* object);

// ---- reports ----

// Prints a report with the thread's place, fails the launch and leaves the thread. Never returns.
[[noreturn]] void fail(Site at, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Fails unless [pointer, pointer + bytes) is aligned to `bytes` and inside the block's shared memory,
// or inside one allocation of global memory.
void check_shared_slow(const void* pointer, int bytes, Site at);
void check_global(const void* pointer, int bytes, Site at);
inline void check_shared(const void* pointer, int bytes, Site at) {
  const size_t offset = static_cast<const unsigned char*>(pointer) - self->shared;
  if (offset + bytes > self->shared_bytes || offset % bytes) check_shared_slow(pointer, bytes, at);
}

// ---- counters, of the first block of a launch ----

struct AccessCount {  // one access site of shared memory
  std::string where;
  uint64_t accesses = 0, conflicts = 0;  // warp-wide; wavefronts beyond one per 128 bytes asked for
};
struct Counters {
  uint64_t barriers = 0;      // CTA barriers that thread 0 passed
  uint64_t global_bytes = 0;  // read from global memory by all threads
  std::map<std::string, AccessCount> shared;
};
Counters take_counters();  // of the launches since the last call
void count_shared(const void* pointer, int bytes, Site at);
void count_global(int bytes);

// ---- launches ----

enum class Order { forward, reverse, random };
struct Schedule {
  Order order = Order::forward;
  uint64_t seed = 0;
  bool alternate = true;  // forward, reverse, forward ...: one order per launch
};
extern Schedule schedule;

// Runs body() as every thread of every block. Returns false if something was reported.
bool launch(Index3 grid_dim, Index3 block_dim, size_t shared_bytes, void (*body)(const void*),
            const void* args);
const std::string& last_report();  // first line of the report that failed the last launch

void* allocate(size_t bytes);  // "global memory"; null if it cannot be had
void deallocate(void* pointer);

}  // namespace simt
