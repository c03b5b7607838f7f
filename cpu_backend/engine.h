// A CPU that runs CUDA kernels: one fiber per CUDA thread, one block at a time per worker thread.
// This header is what kernels see of it; engine.cpp has the scheduler, which is compiled without
// sanitizers so that ThreadSanitizer sees the CUDA threads and their barriers, and nothing else.
//
// It is stricter than the hardware: asynchronous copies and products land as late as the rules allow,
// a dependent launch starts before what the launch before it has written can be seen, shared memory
// starts as NaN, as large numbers or as zeros, warps do not run in lockstep, and threads run in the order
// that simt::schedule says.
// What it finds it reports with block, warp, lane and source line, and the launch fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

struct CUtensorMap_st;

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

struct BulkStore {  // one TMA store, or a plain one of `bytes`
  const unsigned char* src;
  std::vector<unsigned char> data;  // what it read of shared memory, once it has
  bool has_read;
  std::vector<std::pair<unsigned char*, int>> pieces;  // in global memory, null: outside the tensor
  const CUtensorMap_st* map;                           // null: plain
  Site at;
};

struct Block;

struct Thread {  // one CUDA thread
  Index3 index, block_index;
  int linear, warp, lane;
  Block* block;
  unsigned char* shared;  // the block's dynamic shared memory
  size_t shared_bytes;
  bool counting;                                    // this block's accesses are counted
  std::vector<AsyncCopy> open_copies;               // cp.async since the last commit
  std::vector<std::vector<AsyncCopy>> copy_groups;  // committed, oldest first
  std::map<const void*, uint64_t> accesses_at;      // by site, for the conflict counters
  std::deque<std::deque<BulkStore>> stores;         // bulk groups; the last is open
  uint32_t proxy_fences;                            // fence.proxy.async so far
  // For each mbarrier that tracks cp.async: the copies that had landed at the last wait, and at the last wait before a fence.
  std::map<uint16_t, uint32_t> landings_seen, landings_fenced;
  int registers;                                    // setmaxnreg
};

struct Grid {
  Index3 dim, block_dim;
  int device;
};

extern thread_local Thread* self;  // the CUDA thread that runs now
extern thread_local Grid grid;

// ---- waiting; all of these may switch to other CUDA threads ----

// The barrier of the whole block. Threads at different sites, or gone, are a divergent barrier.
void sync_threads(Site at);
// bar.sync (wait) and bar.arrive (!wait) on barrier `id` of `count` threads. Of those that wait: whether `vote` is true
// in all of them (bar.red.and).
bool named_barrier(int id, int count, bool wait, Site at, bool vote = true);
// The lanes of `mask` meet; the last to arrive runs compute(args) on all their arguments, indexed by
// lane. Lanes that meet in different operations are reported.
using Collective = void (*)(void* const args[32], unsigned mask);
void warp_collective(unsigned mask, void* mine, Collective compute, Site at);
// mbarriers, in 8 bytes of shared memory: count arrivals and bytes in flight; a phase is complete when
// both are used up. wait() returns once the phase of that parity is complete.
void mbarrier_init(uint64_t* barrier, int count, Site at);
void mbarrier_arrive(uint64_t* barrier, int expect_bytes, Site at);
void mbarrier_wait(uint64_t* barrier, int parity, Site at);
bool mbarrier_peek(uint64_t* barrier, int parity, Site at);
// The mbarriers that this thread has initialised are so for asynchronous copies.
void fence_mbarrier_init();
// Ordering for ThreadSanitizer on an object that is not one of the above.
void release(const void* object);
void acquire(const void* object);

// ---- sm_90: TMA, wgmma, registers; engine_hopper.h says how strict they are ----

void bulk_load(void* dst, const void* src, uint32_t bytes, uint64_t* barrier, Site at);
void prefetch_tensormap(const CUtensorMap_st* map, Site at);
void tensor_load(void* dst, const CUtensorMap_st* map, const int* c, int rank, uint64_t* barrier,
                 Site at);
void bulk_store(void* dst, const void* src, uint32_t bytes, Site at);
void tensor_store(const CUtensorMap_st* map, const int* c, int rank, const void* src, Site at);
void bulk_commit();
void bulk_wait(int groups, bool read_only);
// A write of this thread through the generic proxy, for the check of fence.proxy.async. Writes
// through plain pointers do not come by here: for those only the missing barrier shows.
void note_write(const void* dst, int bytes);
void fence_proxy_async();
// cp.async.mbarrier.arrive: the thread's copies land later, and the phase does not end before.
void arrive_after_copies(uint64_t* barrier, Site at);

enum class Element { fp16, bf16, e4m3 };  // of matrices

// One wgmma of a thread: d (+)= A @ B, [64][K] @ [K][n], where K elements have 32 bytes.
struct Product {
  int n;
  Element element;
  bool trans_a, trans_b, accumulate;
  float* d;           // [n / 2]
  const uint32_t* a;  // [4], or null: descriptor a_s
  uint64_t a_s, b_s;
};
void wgmma(const Product& p, Site at);
void wgmma_fence(Site at);
void wgmma_commit(Site at);
void wgmma_wait(int groups, Site at);

// ctas: that the kernel's launch bounds ask for on an SM, since the registers at the start depend on them.
void setmaxnreg(int registers, int ctas, bool increase, Site at);

// ---- programmatic dependent launch ----

// A write of this thread to global memory, or an atomic: a dependent launch does not see it before it has
// waited. Plain stores do not come by here: those it sees at once.
void note_global_write(const void* dst, int bytes);
// Returns when no thread of the CTAs that run can go on without it, in random order also earlier. From then
// on the launch sees what the one before it has written.
void griddepcontrol_wait(Site at);

// ---- reports ----

// Prints a report with the thread's place, fails the launch and leaves the thread. Never returns.
[[noreturn]] void fail(Site at, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Fails unless [pointer, pointer + bytes) is aligned to `bytes` and inside the block's shared memory,
// or inside one allocation of the device's global memory.
void check_shared_slow(const void* pointer, int bytes, Site at);
void check_global(const void* pointer, int bytes, Site at);
void check_global_range(const void* pointer, uint64_t bytes, Site at);  // of any alignment
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

// ---- the host's side; all of it may be called by several host threads at once ----

// What the runtime says of the GPU, and where kernels end a sum. Tests change it between launches.
struct Gpu {
  int sms[2] = {3, 5};       // by device: a persistent grid is smaller than most problems
  int l2_bytes = 120 << 10;  // holds K and V of one or two heads of a few hundred keys
  int ctas_per_sm = 1;       // at most; shared memory may allow fewer
  int keys_at_once = 65536;  // sdpa.cu's most_keys_at_once
};
extern Gpu gpu;

enum class Order { forward, reverse, random };
struct Schedule {
  Order order = Order::forward;
  uint64_t seed = 0;
  bool alternate = true;  // forward, reverse, forward ...: one order per launch
};
extern Schedule schedule;

struct Launch {
  const void* kernel;
  Index3 grid_dim, block_dim;
  size_t shared_bytes;
  int device;
  const void* stream;
  bool dependent;  // may start before the launch before it on the stream has ended
};
// Runs body() as every thread of every block. Returns false if something was reported. Launches of
// several host threads come one after another.
bool launch(const Launch& l, void (*body)(const void*), const void* args);
const Launch& last_launch();       // of this host thread
extern thread_local std::vector<Launch>* launch_log;  // if not null, gets every launch of this host thread
int launches();                    // of this host thread so far, without those that a test made fail
const std::string& last_report();  // first line of the report that failed its last failed launch
// All launches before, or those of one stream, have ended: a dependent launch has nothing to wait for.
void synchronise();
void synchronise(const void* stream);

void* allocate(size_t bytes, int device);  // "global memory"; null if it cannot be had
void deallocate(void* pointer);

// Dynamic shared memory that a launch of the kernel may ask for on a device.
void allow_shared(const void* kernel, int device, int bytes);
int allowed_shared(const void* kernel, int device);

// For tests of error paths: after `successes` more calls of the named function by this host thread, the
// next one fails with this cudaError_t and does nothing. 0 takes a planned failure back.
void fail_next(const char* function, int error, int successes = 0);
int planned_failure(const char* function);  // of this call; 0: none

}  // namespace simt
