// Runs CUDA kernels on the CPU: one fiber per CUDA thread, one block or cluster at a time per worker thread.
// This header is the interface for kernels. engine.cpp has the scheduler, which is compiled without
// sanitizers, so that ThreadSanitizer sees only the CUDA threads and their barriers.
//
// It is stricter than the hardware: asynchronous copies and products complete as late as allowed,
// dependent launches start before the results of the previous launch are visible, shared memory is
// initialized with NaN, large numbers or zeros, warps do not run in lockstep, and simt::schedule
// sets the order of threads. Errors are reported with block, warp, lane and source line, and the
// launch fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <vector>

struct CUtensorMap_st;

namespace simt {

struct Index3 {
  unsigned x, y, z;
};

// A source location. `function` may contain template arguments (__PRETTY_FUNCTION__).
struct Site {
  const char* file;
  int line;
  const char* function;
};
#define SIMT_HERE (::simt::Site{__FILE__, __LINE__, __PRETTY_FUNCTION__})
// As default arguments: the location of the call.
#define SIMT_CALLER const ::simt::Site& at = {__builtin_FILE(), __builtin_LINE(), __builtin_FUNCTION()}

struct AsyncCopy {  // one cp.async
  unsigned char* dst;
  const unsigned char* src;  // null: zeros
  int bytes;
};

struct BulkStore {  // one TMA store, or a plain one
  const unsigned char* src;
  std::vector<unsigned char> data;  // what it read of shared memory, once it has
  bool has_read;
  std::vector<std::pair<unsigned char*, int>> pieces;  // in global memory, null: outside the tensor
  const CUtensorMap_st* map;                           // null: plain
  Site at;
  bool adds = false;  // floats, by separate atomic additions
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
  std::list<std::list<BulkStore>> stores;           // bulk groups; the last is open
  uint32_t proxy_fences;                            // fence.proxy.async so far
  // For each mbarrier that tracks cp.async: the copies completed at the last wait, and at the last
  // wait before a fence.
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

// __syncthreads(). Reports a divergent barrier if threads are at different sites or have exited.
void sync_threads(const Site& at);
// bar.sync (wait) and bar.arrive (!wait) on barrier `id` of `count` threads. Returns true if `vote`
// is true in all waiting threads (bar.red.and).
bool named_barrier(int id, int count, bool wait, const Site& at, bool vote = true);
// barrier.cluster of all threads of the cluster.
void sync_cluster(const Site& at);
int cluster_rank();  // of this CTA
// The address in CTA `rank` of the cluster that corresponds to this CTA's `pointer` to shared memory.
void* address_in_cta(const void* pointer, int rank, const Site& at);
// A collective of the lanes of `mask`: the last to arrive runs compute(args) on the arguments of
// all lanes. Reports lanes in different operations.
using Collective = void (*)(void* const args[32], unsigned mask);
void warp_collective(unsigned mask, void* mine, Collective compute, const Site& at);
// mbarriers, in 8 bytes of shared memory: count arrivals and bytes in flight; a phase is complete
// when both are 0. wait() returns when the phase of that parity is complete.
void mbarrier_init(uint64_t* barrier, int count, const Site& at);
void mbarrier_arrive(uint64_t* barrier, int expect_bytes, const Site& at);
void mbarrier_arrive_in_cluster(uint64_t* barrier, const Site& at);  // in any CTA of the cluster
void mbarrier_wait(uint64_t* barrier, int parity, const Site& at);
bool mbarrier_peek(uint64_t* barrier, int parity, const Site& at);
// Makes the mbarriers that this thread has initialized visible to asynchronous copies.
void fence_mbarrier_init();
// Waits until *counter == value, which another CTA stores and reports by wake_other_clusters(). In forward
// order, a waiting cluster keeps its worker, as if it occupied an SM: if all wait, that is a deadlock. In
// other orders, clusters start in an order that the hardware does not have. So another worker takes the
// place of one that waits.
void wait_for_clusters(const uint32_t* counter, uint32_t value, const Site& at);
void wake_other_clusters();
// Ordering for ThreadSanitizer on other objects.
void release(const void* object);
void acquire(const void* object);

// ---- sm_90: TMA, wgmma, registers; engine_hopper.h says how strict they are ----

void bulk_load(void* dst, const void* src, uint32_t bytes, uint64_t* barrier, const Site& at);
void prefetch_tensormap(const CUtensorMap_st* map, const Site& at);
void tensor_load(void* dst, const CUtensorMap_st* map, const int* c, int rank, uint64_t* barrier,
                 const Site& at);
void bulk_store(void* dst, const void* src, uint32_t bytes, const Site& at);
void bulk_add(float* dst, const float* src, uint32_t bytes, const Site& at);
// Copies to the shared memory of a CTA of the cluster, which also has the mbarrier.
void bulk_copy_to_cta(void* dst, const void* src, uint32_t bytes, uint64_t* barrier, const Site& at);
void tensor_store(const CUtensorMap_st* map, const int* c, int rank, const void* src, const Site& at);
void bulk_commit();
void bulk_wait(int groups, bool read_only);
// A write through the generic proxy, for the check of fence.proxy.async. Writes through plain
// pointers are not tracked; for those only a missing barrier is detected.
void note_write(const void* dst, int bytes);
void fence_proxy_async();
// cp.async.mbarrier.arrive: the phase completes only after the thread's copies.
void arrive_after_copies(uint64_t* barrier, const Site& at);

enum class Element { fp16, bf16, e4m3 };  // of matrices

// A thread's part of a wgmma: d (+)= A @ B, [64][K] @ [K][n], where K elements have 32 bytes.
struct Product {
  int n;
  Element element;
  bool trans_a, trans_b, accumulate;
  float* d;           // [n / 2]
  const uint32_t* a;  // [4], or null: descriptor a_s
  uint64_t a_s, b_s;
};
void wgmma(const Product& p, const Site& at);
void wgmma_fence(const Site& at);
void wgmma_commit(const Site& at);
void wgmma_wait(int groups, const Site& at);

// ctas: CTAs per SM in the kernel's launch bounds, which determine the initial register count.
void setmaxnreg(int registers, int ctas, bool increase, const Site& at);

// ---- programmatic dependent launch ----

// A write or atomic to global memory, which a dependent launch sees only after it has waited. Plain
// stores are not tracked and visible immediately.
void note_global_write(const void* dst, int bytes);
// Returns when no thread of the running CTAs can continue without it (with random order also
// earlier). From then on, the launch sees the results of the previous one.
void griddepcontrol_wait(const Site& at);

// ---- reports ----

// Prints a report with the thread's location, fails the launch and ends the thread. Never returns.
[[noreturn]] void fail(const Site& at, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Fails unless [pointer, pointer + bytes) is aligned to `bytes` and inside the block's shared
// memory, or inside one allocation of the device's global memory.
void check_shared_slow(const void* pointer, int bytes, const Site& at);
void check_global(const void* pointer, int bytes, const Site& at);
void check_global_range(const void* pointer, uint64_t bytes, const Site& at);  // of any alignment
inline void check_shared(const void* pointer, int bytes, const Site& at) {
  const size_t offset = static_cast<const unsigned char*>(pointer) - self->shared;
  if (offset + bytes > self->shared_bytes || offset % bytes) check_shared_slow(pointer, bytes, at);
}

// ---- counters, of the first block of each launch between start_counting() and stop_counting() ----

struct AccessCount {  // one access site of shared memory
  std::string where;
  uint64_t accesses = 0, conflicts = 0;  // warp-wide; wavefronts beyond one per 128 bytes asked for
};
struct Counters {
  uint64_t barriers = 0;      // CTA barriers that thread 0 passed
  uint64_t global_bytes = 0;  // read from global memory by all threads
  std::map<std::string, AccessCount> shared;
};
void start_counting();
Counters stop_counting();
void count_shared(const void* pointer, int bytes, const Site& at);
void count_global(int bytes);

// ---- the host's side; all of it may be called by several host threads at once ----

// The properties of the GPU, and the maximum length of sums. Tests change it between launches.
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
  uint64_t parts = 1;     // only the last of so many equal parts of a launch's clusters runs, at least one cluster
};
extern Schedule schedule;

struct Launch {
  const void* kernel;
  Index3 grid_dim, block_dim;
  size_t shared_bytes;
  int device;
  const void* stream;
  bool dependent;  // may start before the launch before it on the stream has ended
  int cluster_ctas = 1;  // of consecutive x
};
// Runs body() for every thread of every block. Returns false if an error was reported. Launches of
// several host threads are serialized.
bool launch(const Launch& l, void (*body)(const void*), const void* args);
const Launch& last_launch();       // of this host thread
extern thread_local std::vector<Launch>* launch_log;  // if not null, gets every launch of this host thread
int launches();                    // of this host thread so far, without those that a test made fail
const std::string& last_report();  // first line of the report that failed its last failed launch
// Completes all earlier launches, or those of a stream: a dependent launch then has nothing to wait
// for.
void synchronise();
void synchronise(const void* stream);

void* allocate(size_t bytes, int device);  // "global memory"; null if it cannot be had
void deallocate(void* pointer);

// The maximum dynamic shared memory of a kernel on a device.
void allow_shared(const void* kernel, int device, int bytes);
int allowed_shared(const void* kernel, int device);

// For tests of error paths: after `successes` more calls of the named function by this host thread,
// the next one fails with this cudaError_t and does nothing. 0 cancels a planned failure.
void fail_next(const char* function, int error, int successes = 0);
int planned_failure(const char* function);  // of this call; 0: none

}  // namespace simt
