// The scheduler behind engine.h: fibers, barriers, collectives, reports, counters.

#include "engine.h"

#include "cuda.h"
#include "cuda_fp8.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

#if defined(SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(SIMT_TSAN)
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);  // flags 1: no happens-before
void __tsan_destroy_fiber(void* fiber);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
}
#endif

namespace simt {

thread_local Thread* self;
thread_local Grid grid;
Schedule schedule;
Gpu gpu;

namespace {

// While an object exists, ThreadSanitizer ignores this CUDA thread: the engine's own data (whose
// memmove and malloc it intercepts) are shared by all threads of a block on purpose.
struct Unobserved {
#if defined(SIMT_TSAN)
  Unobserved() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unobserved() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  Unobserved() {}
#endif
  Unobserved(const Unobserved&) = delete;
};

// ThreadSanitizer does not see this lock. The CUDA runtime does not synchronize host threads, so
// races between them must be reported.
class Lock {
 public:
  explicit Lock(std::mutex& mutex) : mutex_(mutex) {
    const Unordered unordered;
    mutex_.lock();
  }
  ~Lock() {
    const Unordered unordered;
    mutex_.unlock();
  }
  Lock(const Lock&) = delete;

 private:
  struct Unordered {
#if defined(SIMT_TSAN)
    Unordered() { AnnotateIgnoreSyncBegin(__FILE__, __LINE__); }
    ~Unordered() { AnnotateIgnoreSyncEnd(__FILE__, __LINE__); }
#else
    Unordered() {}
#endif
  };
  const Unobserved unobserved_;
  std::mutex& mutex_;
};

// ---- fibers ----

constexpr size_t STACK_BYTES = 256 << 10, GUARD_BYTES = 4096;

#if defined(__x86_64__)
// Saves the callee-saved registers on this stack and its pointer in *from, and switches to stack
// `to`.
extern "C" void simt_switch_stack(void** from, void* to);
asm(R"(
.text
.globl simt_switch_stack
.type simt_switch_stack, @function
simt_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch_stack, .-simt_switch_stack
.section .note.GNU-stack,"",@progbits
.text
)");
struct Context {
  void* stack_pointer = nullptr;
  void start(unsigned char* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + STACK_BYTES) - 2;  // entry sees rsp % 16 == 8
    *top = reinterpret_cast<void*>(entry);
    stack_pointer = top - 6;
    memset(stack_pointer, 0, 6 * sizeof(void*));
  }
  static void switch_between(Context& from, Context& to) {
    simt_switch_stack(&from.stack_pointer, to.stack_pointer);
  }
};
#else  // any other processor: correct, but a system call per switch
#include <ucontext.h>
struct Context {
  ucontext_t context;
  void start(unsigned char* stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
  static void switch_between(Context& from, Context& to) {
    swapcontext(&from.context, &to.context);
  }
};
#endif

enum class State { ready, waiting, done };

struct Fiber {
  Thread thread;
  Context context;
  unsigned char* stack = nullptr;
  size_t stack_bytes = STACK_BYTES;
  State state = State::ready;
  bool started = false;
  Site waits_at{};
  const char* waits_for = "";
  bool (*is_ready)(const void*) = nullptr;  // wait_until
  const void* is_ready_context = nullptr;
  const uint64_t* mbarrier = nullptr;  // that it waits for
  std::string missing() const;         // of this mbarrier's phase, in words
  void* tsan = nullptr;
  void* asan_fake_stack = nullptr;
};

// For ThreadSanitizer, for objects that are used repeatedly: one clock for even uses and one for
// odd ones, so that a thread that continues late does not see later actions of others.
struct Clocks {
  char of[2];
  bool odd = false;
  const void* now() const { return &of[odd]; }
};

struct Meeting {  // of some lanes of a warp, in one collective
  unsigned mask = 0, arrived = 0;
  Site at{};
  Collective compute = nullptr;
  void* args[32] = {};
  Clocks clocks;
};

struct Barrier {
  int count = 0, arrived = 0;
  bool open = false;  // a thread has arrived
  bool all[2];        // votes of even and of odd uses
  Site at{};
  std::vector<Fiber*> waiting;
  Clocks clocks;
};

struct Mark {             // the last write to 4 bytes of shared memory through the generic proxy
  uint16_t thread_and_1;  // 0: none
  uint16_t tracker;       // written by cp.async: place_of() the mbarrier that tracks it; else 0
  uint32_t fences;        // that this thread had executed; with a tracker: number of the landing
};

struct Transfer {  // a bulk copy to shared memory in flight, or the cp.async of a thread that an mbarrier tracks
  Fiber* issuer;
  Block* to;  // whose shared memory has dst and barrier
  Site at;
  unsigned char* dst;
  int swizzle;  // bytes, 0: none
  std::vector<std::pair<unsigned char*, int>> pieces;  // of the source, null: zeros
  int bytes;
  uint64_t* barrier;
  int parity = 0;                 // of the mbarrier's phase when this was issued
  bool is_copies = false;         // cp.async: has no pieces
  std::vector<AsyncCopy> copies;  // in any order
};

// The accumulators of a warpgroup, from the first product in flight to the wait that completes
// them. Until then the threads' own copies are poisoned.
struct Chain {
  int n = 0, left = 0;     // columns; products not yet computed
  float* d[128] = {};      // by thread
  std::vector<float> sum;  // [64][n]
};

// A step that all threads of a warpgroup do in the same order, at different times.
struct Step {
  enum class Kind { fence, product, commit, registers } kind;
  Site at;
  int value = 0;      // registers
  Product product{};  // of the thread that came first
  Chain* chain = nullptr;
  bool starts_chain = false;
  struct RegistersOfA {
    const uint32_t* at;
    uint32_t value[4];
  };
  std::vector<RegistersOfA> a;  // by thread
};

// Registers of a thread that products used: their contents when they were last synchronized.
struct Known {
  const void* registers;
  int words;
  uint32_t checksum;
};

struct Warpgroup {
  std::deque<Step> steps;  // of which the products' results are not there yet
  uint64_t first = 0;      // number of the oldest step
  uint64_t position[128] = {};
  bool fenced[128] = {};
  std::vector<Known> known[128];
  std::list<Chain> chains;
  int arrived = 0, wait_groups = 0;  // at wgmma_wait_group
  Site wait_at{};
  std::vector<Fiber*> waiting;
};

struct Range {  // of global memory
  uintptr_t begin, end;
};

// Data that the previous launch has written and a dependent launch must not see yet. Its memory is
// poisoned.
struct Withheld {
  std::vector<Range> ranges;
  std::vector<unsigned char> bytes;  // of the ranges, one behind the other
  int workers = 0;                   // with CTAs left
  int waiting = 0;                   // of these, at griddepcontrol.wait
  bool back = false;
  std::mutex mutex;
  std::condition_variable came_back;

  explicit Withheld(std::vector<Range> written);
  void give_back();
  void worker_ends();
};

// The workers of a launch, some of which wait for CTAs of others. See wait_for_clusters().
struct Workers {
  std::mutex mutex;
  std::condition_variable has_changed;
  std::atomic<uint64_t> changes{0};  // stores for which a cluster may wait; changed with the mutex
  int running = 0;                   // workers that have not ended
  int waiting = 0;                   // since the latest change
  std::deque<std::thread> threads;
  std::function<void()> replace;  // starts a worker in the place of a waiting one; none: they are not replaced
};

struct Access {  // one warp-wide access to shared memory, being put together lane by lane
  uint64_t address[32];
  unsigned lanes = 0;
};

bool same_site(const Site& a, const Site& b) {
  return a.line == b.line && (a.function == b.function || !strcmp(a.function, b.function));
}

}  // namespace

struct Runner;

struct Block {  // a CTA
  std::vector<Fiber> fibers;
  Runner* runner = nullptr;
  int rank = 0;  // in its cluster
  Index3 index{};
  unsigned char* shared = nullptr;
  size_t shared_bytes = 0;
  int done = 0;
  Barrier all, named[16];
  std::vector<std::vector<Meeting>> meetings;  // by warp; reserved, so that none moves
  std::vector<Mark> marks;
  uint32_t landings = 0;  // of cp.async that mbarriers track
  struct Unfenced {
    const uint64_t* mbarrier;
    const Thread* thread;  // that has initialised it
  };
  std::vector<Unfenced> unfenced;  // without a fence.mbarrier_init since
  std::vector<Warpgroup> warpgroups;
  // The threads to which ThreadSanitizer attributes asynchronous reads: one for each warpgroup's
  // products, and one for bulk stores.
  std::vector<void*> proxies;
  int free_registers = 0;
  Counters counters;
  // Accesses that only some lanes have made so far, by warp and site, oldest first.
  struct Pending {
    uint64_t first = 0;  // number of the oldest
    int bytes = 0;
    Site at{};
    std::vector<Access> open;
  };
  std::map<std::pair<int, const void*>, Pending> accesses;
};

struct Runner {  // of one cluster after another, on one OS thread
  std::vector<Block> blocks;  // the CTAs of the cluster; without clusters one
  Barrier cluster;            // of all their threads
  std::vector<Fiber*> ready;  // that can run; pick() chooses
  size_t next_ready = 0;
  std::vector<Fiber*> pollers;
  std::vector<Transfer> in_flight;                  // bulk loads
  std::vector<Range> writes;                        // to global memory, of all CTAs of this worker
  std::vector<BulkStore> late;                      // that no thread waited for; complete after the last CTA
  Workers* workers = nullptr;                       // of this launch
  Withheld* withheld = nullptr;                     // of this launch; null: it depends on none
  bool sees_all = true;                             // nothing is withheld any more
  bool awaits_launch = false;                       // a thread is at griddepcontrol.wait
  std::deque<std::array<unsigned char, 16>> early;  // what cp.async read while bytes were withheld
  bool failed = false;
  Fiber scheduler;  // the worker thread itself
  void (*body)(const void*) = nullptr;
  const void* args = nullptr;
  Order order = Order::forward;
  unsigned char poison = 0xff;  // of shared memory
  uint64_t random = 1;

  uint64_t draw() {
    random = random * 6364136223846793005u + 1442695040888963407u;
    return random >> 33;
  }
};

namespace {

std::mutex host_mutex;  // of all host functions; a launch holds it to its end
std::mutex report_mutex;
std::string report_line;
std::atomic<bool> launch_failed{false};
bool is_counting = false;  // changed only between launches, like all_counters
Counters all_counters;
struct Allocation {
  size_t bytes;
  int device;
};
std::map<uintptr_t, Allocation> allocations;  // changed only between launches

Fiber& fiber_of(Thread* t) { return t->block->fibers[t->linear]; }

// Switches to `to`; returns when another fiber switches back. For ThreadSanitizer, the first and
// the last switch of a fiber synchronize with the scheduler, which orders blocks; other switches do
// not synchronize.
void switch_fibers(Fiber& from, Fiber& to) {
  self = &to.thread;
#if defined(SIMT_ASAN)
  __sanitizer_start_switch_fiber(from.state == State::done ? nullptr : &from.asan_fake_stack,
                                 to.stack, to.stack_bytes);
#endif
#if defined(SIMT_TSAN)
  __tsan_switch_to_fiber(to.tsan, to.started && from.state != State::done ? 1 : 0);
#endif
  to.started = true;
  Context::switch_between(from.context, to.context);
#if defined(SIMT_ASAN)
  __sanitizer_finish_switch_fiber(from.asan_fake_stack, nullptr, nullptr);
#endif
}

void leave(Fiber& f);

void fiber_main() {
  Fiber& f = fiber_of(self);
  Block& b = *f.thread.block;
#if defined(SIMT_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  b.runner->body(b.runner->args);
  leave(f);
  f.state = State::done;
  b.done++;
  switch_fibers(f, b.runner->scheduler);
}

void make_ready(Runner& c, Fiber& f) {
  f.state = State::ready;
  c.ready.push_back(&f);
}

void wake(Runner& c, std::vector<Fiber*>& waiting) {
  if (c.order == Order::reverse) std::reverse(waiting.begin(), waiting.end());
  for (Fiber* f : waiting) make_ready(c, *f);
  waiting.clear();
}

Fiber& pick(Runner& c) {  // the choice stays at ready[next_ready - 1]
  if (c.next_ready > 1024) {
    c.ready.erase(c.ready.begin(), c.ready.begin() + c.next_ready);
    c.next_ready = 0;
  }
  if (c.order == Order::random) {
    const size_t i = c.next_ready + c.draw() % (c.ready.size() - c.next_ready);
    std::swap(c.ready[i], c.ready[c.next_ready]);
  }
  return *c.ready[c.next_ready++];
}

// Lets other fibers run until f is ready. Switches directly to the next ready fiber, except that
// fibers are started by the scheduler.
void wait(Fiber& f, const char* what, const Site& at) {
  Runner& c = *f.thread.block->runner;
  f.state = State::waiting;
  f.waits_at = at;
  f.waits_for = what;
  const bool to_scheduler =
      c.order == Order::random && (!c.in_flight.empty() || c.awaits_launch) && c.draw() % 8 == 0;
  if (c.next_ready < c.ready.size() && !to_scheduler) {  // else a load may land, a launch end
    Fiber& next = pick(c);
    if (next.started) return switch_fibers(f, next);
    c.next_ready--;
  }
  switch_fibers(f, c.scheduler);
}

// "warp 2 lane 5 (thread 69)"
std::string name_of(const Thread& t) {
  char text[80];
  snprintf(text, sizeof text, "warp %d lane %d (thread %d)", t.warp, t.lane, t.linear);
  return text;
}

std::string name_of(const Site& at) {
  const char* file = strrchr(at.file, '/');
  std::string text = file ? file + 1 : at.file;
  text += ":" + std::to_string(at.line);
  // The last template argument of a pretty function name, which distinguishes instances.
  const char* h = strstr(at.function, "H = ");
  if (h) {
    const char* value = strstr(h, "Hazard::");
    const char* end = value ? strpbrk(value, "];,") : nullptr;
    if (end) text += " (" + std::string(value, end) + ")";
  }
  return text;
}

void report(const std::string& text) {
  const Lock lock(report_mutex);
  if (!launch_failed.exchange(true)) {
    report_line = text.substr(0, text.find('\n'));
    fprintf(stderr, "simt: %s\n", text.c_str());
  }
}

std::string block_name(const Index3& block) {
  char text[64];
  snprintf(text, sizeof text, "block (%u,%u,%u)", block.x, block.y, block.z);
  return text;
}

void report_deadlock(Runner& c) {
  std::string text = "deadlock in " + block_name(c.blocks[0].index) + ":";
  std::map<std::string, std::vector<const Thread*>> groups;
  for (const Block& b : c.blocks) {
    for (const Fiber& f : b.fibers) {
      groups[f.state == State::done ? "have returned"
                                    : std::string("wait for ") + f.waits_for + " at " +
                                          name_of(f.waits_at) + f.missing()]
          .push_back(&f.thread);
    }
  }
  for (const auto& group : groups) {
    text += (group.first == groups.begin()->first ? " " : "; ") +
            std::to_string(group.second.size()) + " threads, first " + name_of(*group.second[0]) +
            ", " + group.first;
  }
  report(text);
}

// Makes the waiting fibers ready whose condition holds. With an mbarrier, whose phase is complete, skips those that wait
// for another mbarrier.
void wake_pollers(Runner& c, const uint64_t* completed = nullptr) {
  size_t kept = 0;
  for (Fiber* f : c.pollers) {
    const bool may_be_ready = !completed || !f->mbarrier || f->mbarrier == completed;
    if (may_be_ready && f->is_ready(f->is_ready_context)) {
      make_ready(c, *f);
    } else {
      c.pollers[kept++] = f;
    }
  }
  c.pollers.resize(kept);
}

// Waits until ready(context); wake_pollers() evaluates it again.
void wait_until(bool (*ready)(const void*), const void* context, const char* what, const Site& at) {
  Fiber& f = fiber_of(self);
  if (ready(context)) return;
  f.is_ready = ready;
  f.is_ready_context = context;
  self->block->runner->pollers.push_back(&f);
  wait(f, what, at);
}

void reach(Barrier& barrier, int count, bool wait_here, const char* what, const Site& at, bool same) {
  Fiber& f = fiber_of(self);
  Block& b = *self->block;
  if (!barrier.open) {
    barrier.open = true;
    barrier.at = at;
    barrier.count = count;
  }
  if (same && !same_site(barrier.at, at)) {
    fail(at, "divergent barrier: others of the block wait at %s", name_of(barrier.at).c_str());
  }
  if (barrier.count != count) {
    fail(at, "%s is used with %d threads here and with %d at %s", what, count, barrier.count,
         name_of(barrier.at).c_str());
  }
  const void* const clock = barrier.clocks.now();
  release(clock);
  if (++barrier.arrived == barrier.count) {
    barrier.open = false;
    barrier.arrived = 0;
    barrier.clocks.odd ^= true;
    wake(*b.runner, barrier.waiting);
    acquire(clock);
  } else if (wait_here) {
    barrier.waiting.push_back(&f);
    wait(f, what, at);
    acquire(clock);
  }
}

// Excess wavefronts of a warp's access: 16-byte accesses are processed for 8 lanes at a time,
// 8-byte accesses for 16, and within such a phase, accesses to different words of a bank are
// serialized.
uint64_t conflicts_of(const Access& access, int bytes) {
  const int lanes_per_phase = std::min(32, 128 / bytes);
  uint64_t extra = 0;
  for (int first = 0; first < 32; first += lanes_per_phase) {
    std::vector<uint64_t> words[32];
    for (int lane = first; lane < first + lanes_per_phase; lane++) {
      if (!(access.lanes >> lane & 1)) continue;
      const uint64_t begin = access.address[lane] / 4, end = (access.address[lane] + bytes - 1) / 4;
      for (uint64_t word = begin; word <= end; word++) {
        std::vector<uint64_t>& bank = words[word % 32];
        if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
      }
    }
    size_t deepest = 1;
    for (const auto& bank : words) deepest = std::max(deepest, bank.size());
    extra += deepest - 1;
  }
  return extra;
}

void close_access(Block& b, const Access& access, int bytes, const Site& at) {
  AccessCount& count = b.counters.shared[name_of(at) + " " + at.function];
  count.where = name_of(at) + " " + at.function;
  count.accesses++;
  count.conflicts += conflicts_of(access, bytes);
}

// The 8 bytes of an mbarrier. In poisoned memory, `unused` is not 0 or nothing is expected.
struct Mbarrier {
  uint32_t pending : 12, expected : 12, phase : 1, unseen : 1, unused : 6;  // unseen: that the phase before has ended
  int32_t bytes;  // announced and not yet landed; negative when they land first

  static Mbarrier load(const uint64_t* word, const Site& at) {
    Mbarrier m;
    memcpy(&m, word, sizeof m);
    if (m.unused || !m.expected) fail(at, "this mbarrier was never initialised");
    return m;
  }
  void store(uint64_t* word, Runner& c) {
    const bool complete = pending == 0 && bytes == 0;
    if (complete) {
      phase ^= 1;
      unseen = 1;
      pending = expected;
    }
    memcpy(word, this, sizeof *this);
    if (complete) wake_pollers(c, word);
  }
  // True if the phase of this parity is complete; records that a thread has observed it.
  static bool see(uint64_t* word, int parity) {
    Mbarrier m;
    memcpy(&m, word, sizeof m);
    if (int(m.phase) == parity) return false;
    m.unseen = 0;
    memcpy(word, &m, sizeof m);
    return true;
  }
  // For ThreadSanitizer, of the phases of one parity.
  static const void* clock(const uint64_t* word, int parity) {
    return reinterpret_cast<const char*>(word) + parity;
  }
};
static_assert(sizeof(Mbarrier) == 8, "an mbarrier is 8 bytes");

void arrive(uint64_t* barrier, int expect_bytes, const Site& at) {
  Mbarrier m = Mbarrier::load(barrier, at);
  if (m.pending == 0) fail(at, "more arrivals at this mbarrier than the %d of a phase", m.expected);
  if (m.unseen) fail(at, "this mbarrier enters a new phase, and no thread has waited for the end of the one before");
  release(Mbarrier::clock(barrier, m.phase));
  m.bytes += expect_bytes;
  m.pending--;
  if (m.pending == 0 && m.bytes < 0) {
    fail(at, "%d bytes more than this mbarrier's phase expects have landed", -m.bytes);
  }
  m.store(barrier, *self->block->runner);
}

// Number of an 8-byte word in shared memory, starting at 1.
uint16_t place_of(const Block& b, const uint64_t* word) {
  return uint16_t((reinterpret_cast<const unsigned char*>(word) - b.shared) / 8 + 1);
}
// Records that this thread has waited for the mbarrier.
void note_wait(const uint64_t* barrier, int parity) {
  acquire(Mbarrier::clock(barrier, parity));
  const Block& b = *self->block;
  if (b.landings > 0) self->landings_seen[place_of(b, barrier)] = b.landings;
}

std::string Fiber::missing() const {
  if (!mbarrier) return "";
  Mbarrier m;
  memcpy(&m, mbarrier, sizeof m);
  return " (" + std::to_string(m.pending) + " arrivals and " + std::to_string(m.bytes) +
         " bytes are missing)";
}

// ---- programmatic dependent launch ----

void note_write_of(Runner& c, const void* dst, int bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(dst), end = begin + bytes;
  if (!c.writes.empty() && begin >= c.writes.back().begin && begin <= c.writes.back().end) {
    c.writes.back().end = std::max(c.writes.back().end, end);
  } else {
    c.writes.push_back({begin, end});
  }
}

Withheld::Withheld(std::vector<Range> written) {
  std::sort(written.begin(), written.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (const Range& range : written) {
    if (!ranges.empty() && range.begin <= ranges.back().end) {
      ranges.back().end = std::max(ranges.back().end, range.end);
    } else {
      ranges.push_back(range);
    }
  }
  for (const Range& range : ranges) {
    unsigned char* const at = reinterpret_cast<unsigned char*>(range.begin);
    bytes.insert(bytes.end(), at, at + (range.end - range.begin));
    memset(at, 0xff, range.end - range.begin);
  }
}

// Overwrites data that the dependent launch has written too early.
void Withheld::give_back() {
  const unsigned char* from = bytes.data();
  for (const Range& range : ranges) {
    memcpy(reinterpret_cast<void*>(range.begin), from, range.end - range.begin);
    from += range.end - range.begin;
  }
  back = true;
  came_back.notify_all();
}

void Withheld::worker_ends() {
  const std::lock_guard<std::mutex> lock(mutex);
  workers--;
  if (!back && waiting && waiting == workers) give_back();
}

}  // namespace
}  // namespace simt

#include "engine_hopper.h"

namespace simt {
namespace {

// Initializes the CTA's threads. Returns false if there is no memory.
bool start_block(Runner& c, Block& b, Index3 index, size_t shared_bytes, bool counting) {
  b.runner = &c;
  b.rank = int(&b - c.blocks.data());
  b.index = index;
  b.shared_bytes = shared_bytes;
  b.shared = nullptr;
  void* shared = nullptr;  // its own allocation, so that AddressSanitizer sees its ends
  if (posix_memalign(&shared, 1024, std::max<size_t>(shared_bytes, 1))) return false;
  b.shared = static_cast<unsigned char*>(shared);
  memset(b.shared, c.poison, shared_bytes);
  const int n = int(b.fibers.size());
  b.done = 0;
  b.all = Barrier();
  for (Barrier& barrier : b.named) barrier = Barrier();
  b.meetings.assign((n + 31) / 32, {});
  b.marks.assign((shared_bytes + 3) / 4, {});
  b.unfenced.clear();
  start_warpgroups(b);
  b.counters = Counters();
  b.accesses.clear();
  for (int i = 0; i < n; i++) {
    Fiber& f = b.fibers[i];
    f.thread = Thread();
    f.thread.linear = i;
    f.thread.warp = i / 32;
    f.thread.lane = i % 32;
    f.thread.index = {i % grid.block_dim.x, i / grid.block_dim.x % grid.block_dim.y,
                      i / grid.block_dim.x / grid.block_dim.y};
    f.thread.block_index = index;
    f.thread.block = &b;
    f.thread.shared = b.shared;
    f.thread.shared_bytes = shared_bytes;
    f.thread.counting = counting;
    f.thread.registers = launch_registers(n);
    f.state = State::ready;
    f.started = false;
    f.mbarrier = nullptr;
    f.context.start(f.stack, fiber_main);
    c.ready.push_back(&f);
  }
  return true;
}

void close_counters(Block& b) {
  for (auto& site : b.accesses) {  // those that not all lanes took part in
    for (const Access& access : site.second.open) {
      if (access.lanes) close_access(b, access, site.second.bytes, site.second.at);
    }
  }
  const Lock lock(report_mutex);
  all_counters.barriers += b.counters.barriers;
  all_counters.global_bytes += b.counters.global_bytes;
  for (const auto& site : b.counters.shared) {
    AccessCount& sum = all_counters.shared[site.first];
    sum.where = site.second.where;
    sum.accesses += site.second.accesses;
    sum.conflicts += site.second.conflicts;
  }
}

// Called by the scheduler. Operations in flight have accessed global memory without the results of
// the previous launch. All workers arrive here, or have no more CTAs, before the bytes are
// restored.
void launch_before_ends(Runner& c) {
  const Unobserved unobserved;
  const auto read_early = [&](std::vector<AsyncCopy>& copies) {
    for (AsyncCopy& copy : copies) {
      if (!copy.src) continue;
      c.early.emplace_back();
      memcpy(c.early.back().data(), copy.src, copy.bytes);
      copy.src = c.early.back().data();
    }
  };
  for (Block& b : c.blocks) {
    for (Fiber& f : b.fibers) {
      for (auto& group : f.thread.copy_groups) read_early(group);
      read_early(f.thread.open_copies);
      for (auto& group : f.thread.stores) {
        for (BulkStore& store : group) {
          read_shared(store);
          write_global(c, store);
          for (auto& piece : store.pieces) piece.first = nullptr;
        }
      }
    }
  }
  Withheld& w = *c.withheld;
  std::unique_lock<std::mutex> lock(w.mutex);
  if (++w.waiting == w.workers) w.give_back();
  w.came_back.wait(lock, [&] { return w.back; });
  c.awaits_launch = false;
  c.sees_all = true;
}

struct AwaitedValue {
  const uint32_t* counter;
  uint32_t value;
};
bool has_value(const void* context) {
  const AwaitedValue& awaited = *static_cast<const AwaitedValue*>(context);
  return __atomic_load_n(awaited.counter, __ATOMIC_ACQUIRE) == awaited.value;
}
bool waits_for_clusters(const Fiber* f) { return f->is_ready == has_value; }

// No thread of the cluster can continue, and some wait for other clusters. Waits until one of these may be ready.
// Returns false if no cluster runs any more that could make them ready.
bool other_clusters_run(Runner& c, uint64_t changes) {
  Workers& w = *c.workers;
  std::unique_lock<std::mutex> lock(w.mutex);
  if (w.changes != changes) return true;
  if (w.replace) w.replace();
  w.waiting++;
  // A worker that fails or finds the deadlock notifies nobody.
  const auto is_over = [&] { return w.changes != changes || launch_failed || w.waiting == w.running; };
  while (!w.has_changed.wait_for(lock, std::chrono::milliseconds(10), is_over)) {
  }
  if (w.changes != changes) return true;
  w.waiting--;
  return false;
}

// first: index of the cluster's first CTA. The others follow it in x.
void run_cluster(Runner& c, Index3 first, size_t shared_bytes, bool counting) {
  c.ready.clear();
  c.pollers.clear();
  c.in_flight.clear();
  c.next_ready = 0;
  c.failed = false;
  c.sees_all = true;
  c.awaits_launch = false;
  c.early.clear();
  if (c.withheld) {
    const std::lock_guard<std::mutex> lock(c.withheld->mutex);
    c.sees_all = c.withheld->back;
  }
  c.cluster = Barrier();
  for (Block& b : c.blocks) {
    if (start_block(c, b, first, shared_bytes, counting && b.rank == 0)) {
      first.x++;
      continue;
    }
    report("no host memory for a block's shared memory");
    c.failed = true;
  }
  if (c.order == Order::reverse) std::reverse(c.ready.begin(), c.ready.end());
  const auto done = [&] { return std::all_of(c.blocks.begin(), c.blocks.end(), has_returned); };
  while (!c.failed && !done()) {
    const uint64_t changes = c.workers->changes;
    if (c.next_ready == c.ready.size()) wake_pollers(c);
    const bool idle = c.next_ready == c.ready.size();
    const auto now = [&] { return idle || (c.order == Order::random && c.draw() % 4 == 0); };
    if (!c.in_flight.empty() && now()) {
      land_one(c);
    } else if (c.awaits_launch && now()) {
      launch_before_ends(c);
    } else if (idle && std::any_of(c.pollers.begin(), c.pollers.end(), waits_for_clusters)) {
      if (other_clusters_run(c, changes)) continue;
      if (!launch_failed) report_deadlock(c);
      break;
    } else if (idle) {
      report_deadlock(c);
      break;
    } else {
      switch_fibers(c.scheduler, pick(c));
    }
  }
  if (!c.failed && done()) finish_cluster(c);
  if (counting) close_counters(c.blocks[0]);
  for (Block& b : c.blocks) free(b.shared);
}

}  // namespace

// ---- waiting ----

void sync_threads(const Site& at) {
  const Unobserved unobserved;
  Block& b = *self->block;
  if (b.done) fail(at, "divergent barrier: %d threads of the block have returned", b.done);
  if (self->linear == 0) b.counters.barriers++;
  reach(b.all, int(b.fibers.size()), true, "the block's barrier", at, true);
}

bool named_barrier(int id, int count, bool wait_here, const Site& at, bool vote) {
  const Unobserved unobserved;
  if (id < 0 || id > 15) fail(at, "barrier %d: there are 0 to 15", id);
  if (count <= 0 || count % 32) fail(at, "barrier %d: %d threads: want a multiple of 32", id, count);
  if (self->linear == 0 && wait_here) self->block->counters.barriers++;
  Barrier& barrier = self->block->named[id];
  bool& all = barrier.all[barrier.clocks.odd];
  all = vote && (!barrier.open || all);
  reach(barrier, count, wait_here, "a named barrier", at, false);
  return all;
}

void sync_cluster(const Site& at) {
  const Unobserved unobserved;
  Runner& c = *self->block->runner;
  for (const Block& b : c.blocks) {
    if (b.done) fail(at, "divergent barrier: %d threads of the cluster have returned", b.done);
  }
  const int threads = int(c.blocks.size() * self->block->fibers.size());
  reach(c.cluster, threads, true, "the cluster's barrier", at, true);
}

int cluster_rank() { return self->block->rank; }

void wait_for_clusters(const uint32_t* counter, uint32_t value, const Site& at) {
  const Unobserved unobserved;
  const AwaitedValue awaited{counter, value};
  wait_until(has_value, &awaited, "another CTA", at);
}

void wake_other_clusters() {
  const Unobserved unobserved;
  Workers& w = *self->block->runner->workers;
  const std::lock_guard<std::mutex> lock(w.mutex);
  w.changes++;
  w.waiting = 0;  // each of them looks again
  w.has_changed.notify_all();
}

void* address_in_cta(const void* pointer, int rank, const Site& at) {
  const Unobserved unobserved;
  check_shared(pointer, 1, at);
  std::vector<Block>& blocks = self->block->runner->blocks;
  if (rank < 0 || size_t(rank) >= blocks.size()) fail(at, "the cluster has no CTA %d", rank);
  return blocks[rank].shared + (static_cast<const unsigned char*>(pointer) - self->shared);
}

void warp_collective(unsigned mask, void* mine, Collective compute, const Site& at) {
  void* args[32];  // of the meeting, which others may reuse
  const void* clock;
  {
    const Unobserved unobserved;
    Fiber& f = fiber_of(self);
    Block& b = *self->block;
    const unsigned bit = 1u << self->lane;
    if (!(mask & bit)) fail(at, "the mask %08x does not contain the calling lane", mask);
    std::vector<Meeting>& meetings = b.meetings[self->warp];
    Meeting* meeting = nullptr;
    for (Meeting& m : meetings) {
      if (m.mask == mask && m.arrived) meeting = &m;
    }
    if (!meeting) {
      for (Meeting& m : meetings) {
        if (!m.arrived) meeting = &m;
      }
      if (meetings.empty()) meetings.reserve(32);  // one for each lane
      if (!meeting) {
        meetings.emplace_back();
        meeting = &meetings.back();
      }
      meeting->mask = mask;
      meeting->at = at;
      meeting->compute = compute;
    }
    if (meeting->compute != compute || !same_site(meeting->at, at)) {
      fail(at, "divergent warp: lanes %08x are at %s", meeting->arrived,
           name_of(meeting->at).c_str());
    }
    meeting->args[self->lane] = mine;
    meeting->arrived |= bit;
    clock = meeting->clocks.now();
    release(clock);
    if (meeting->arrived != mask) {
      wait(f, "the other lanes", at);
      acquire(clock);
      return;
    }
    acquire(clock);
    std::copy(meeting->args, meeting->args + 32, args);
    meeting->arrived = 0;
    meeting->clocks.odd ^= true;
  }
  if (compute) compute(args, mask);  // observed: it touches the kernel's memory
  const Unobserved unobserved;
  Block& b = *self->block;
  Runner& c = *b.runner;
  release(clock);
  for (int i = 0; i < 32; i++) {
    const int lane = c.order == Order::reverse ? 31 - i : i;
    if (lane != self->lane && (mask >> lane & 1)) make_ready(c, b.fibers[self->warp * 32 + lane]);
  }
}

void mbarrier_init(uint64_t* barrier, int count, const Site& at) {
  const Unobserved unobserved;
  check_shared(barrier, 8, at);
  if (count < 1 || count > 4095) fail(at, "an mbarrier of %d arrivals", count);
  Mbarrier m{};
  m.pending = m.expected = unsigned(count);
  memcpy(barrier, &m, sizeof m);
  for (Block::Unfenced& u : self->block->unfenced) {
    if (u.mbarrier == barrier) return void(u.thread = self);
  }
  self->block->unfenced.push_back({barrier, self});
}

void fence_mbarrier_init() {
  const Unobserved unobserved;
  auto& unfenced = self->block->unfenced;
  const auto fenced = [](const Block::Unfenced& u) { return u.thread == self; };
  unfenced.erase(std::remove_if(unfenced.begin(), unfenced.end(), fenced), unfenced.end());
}

void mbarrier_arrive(uint64_t* barrier, int expect_bytes, const Site& at) {
  const Unobserved unobserved;
  check_shared(barrier, 8, at);
  arrive(barrier, expect_bytes, at);
}

void mbarrier_arrive_in_cluster(uint64_t* barrier, const Site& at) {
  const Unobserved unobserved;
  Block& b = block_of(barrier, 8, at);
  check_fenced(b, barrier, at);
  arrive(barrier, 0, at);
}

void mbarrier_wait(uint64_t* barrier, int parity, const Site& at) {
  const Unobserved unobserved;
  check_shared(barrier, 8, at);
  Mbarrier::load(barrier, at);
  struct Phase {
    uint64_t* barrier;
    int parity;
  } phase{barrier, parity};
  Fiber& f = fiber_of(self);
  f.mbarrier = barrier;
  wait_until(
      [](const void* context) {
        const Phase& p = *static_cast<const Phase*>(context);
        return Mbarrier::see(p.barrier, p.parity);
      },
      &phase, "an mbarrier phase", at);
  f.mbarrier = nullptr;
  note_wait(barrier, parity);
}

bool mbarrier_peek(uint64_t* barrier, int parity, const Site& at) {
  const Unobserved unobserved;
  check_shared(barrier, 8, at);
  Mbarrier::load(barrier, at);
  const bool complete = Mbarrier::see(barrier, parity);
  if (complete) note_wait(barrier, parity);
  return complete;
}

void note_global_write(const void* dst, int bytes) {
  const Unobserved unobserved;
  note_write_of(*self->block->runner, dst, bytes);
}

void griddepcontrol_wait(const Site& at) {
  const Unobserved unobserved;
  Runner& c = *self->block->runner;
  if (c.sees_all) return;
  c.awaits_launch = true;
  wait_until([](const void* runner) { return static_cast<const Runner*>(runner)->sees_all; }, &c,
             "the launch before this one", at);
}

void release(const void* object) {
  (void)object;
#if defined(SIMT_TSAN)
  __tsan_release(const_cast<void*>(object));
#endif
}

void acquire(const void* object) {
  (void)object;
#if defined(SIMT_TSAN)
  __tsan_acquire(const_cast<void*>(object));
#endif
}

// ---- reports ----

void fail(const Site& at, const char* format, ...) {
  char text[400];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  Runner& c = *self->block->runner;
  report(block_name(self->block_index) + " " + name_of(*self) + " at " + name_of(at) + ": " + text);
  c.failed = true;
  switch_fibers(fiber_of(self), c.scheduler);
  abort();  // a failed block is never resumed
}

void check_shared_slow(const void* pointer, int bytes, const Site& at) {
  const ptrdiff_t offset = static_cast<const unsigned char*>(pointer) - self->shared;
  const bool outside = offset < 0 || size_t(offset) + bytes > self->shared_bytes;
  if (outside) {
    fail(at, "%d bytes at offset %lld of shared memory, which has %zu", bytes, (long long)offset,
         self->shared_bytes);
  }
  fail(at, "%d-byte access at offset %lld of shared memory is misaligned", bytes,
       (long long)offset);
}

void check_global_range(const void* pointer, uint64_t bytes, const Site& at) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  static thread_local std::pair<uintptr_t, size_t> last;  // most accesses hit the same allocation
  if (!(address >= last.first && address + bytes <= last.first + last.second)) {
    auto it = allocations.upper_bound(address);
    last = {};
    if (it == allocations.begin() ||
        address + bytes > std::prev(it)->first + std::prev(it)->second.bytes) {
      fail(at, "%llu bytes at %p are outside every allocation of global memory",
           (unsigned long long)bytes, pointer);
    }
    --it;
    if (it->second.device != grid.device) {
      fail(at, "%llu bytes at %p are memory of device %d, and the kernel runs on device %d",
           (unsigned long long)bytes, pointer, it->second.device, grid.device);
    }
    last = {it->first, it->second.bytes};
  }
}

void check_global(const void* pointer, int bytes, const Site& at) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  check_global_range(pointer, uint64_t(bytes), at);
  if (address % bytes) fail(at, "%d-byte access at %p is misaligned", bytes, pointer);
}

// ---- counters ----

void count_shared(const void* pointer, int bytes, const Site& at) {
  const Unobserved unobserved;
  Block& b = *self->block;
  const uint64_t number = self->accesses_at[at.file + at.line]++;  // file + line: a key, not a text
  Block::Pending& pending = b.accesses[{self->warp, at.file + at.line}];
  pending.bytes = bytes;
  pending.at = at;
  while (pending.first + pending.open.size() <= number) pending.open.emplace_back();
  Access& access = pending.open[number - pending.first];
  access.address[self->lane] = static_cast<const unsigned char*>(pointer) - self->shared;
  access.lanes |= 1u << self->lane;
  size_t complete = 0;
  while (complete < pending.open.size() && pending.open[complete].lanes == ~0u) {
    close_access(b, pending.open[complete++], bytes, at);
  }
  pending.open.erase(pending.open.begin(), pending.open.begin() + complete);
  pending.first += complete;
}

void count_global(int bytes) { self->block->counters.global_bytes += bytes; }

void start_counting() { is_counting = true; }

Counters stop_counting() {
  is_counting = false;
  Counters counted;
  std::swap(counted, all_counters);
  return counted;
}

// ---- launches ----

namespace {

// Allocates stacks with guard pages. Returns null if there is no memory.
unsigned char* map_stacks(size_t count) {
  void* const memory = mmap(nullptr, count * (STACK_BYTES + GUARD_BYTES), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  unsigned char* const stacks = static_cast<unsigned char*>(memory);
  for (size_t i = 0; i < count; i++) {
    mprotect(stacks + i * (STACK_BYTES + GUARD_BYTES), GUARD_BYTES, PROT_NONE);
  }
  return stacks;
}

#if defined(SIMT_ASAN) || defined(SIMT_TSAN)
constexpr bool KEEPS_STACKS = false;  // a sanitizer remembers what was on them
#else
constexpr bool KEEPS_STACKS = true;
#endif
std::mutex kept_stacks_mutex;
std::multimap<size_t, unsigned char*> kept_stacks;  // by count: new ones take longer than most launches

struct Worker {  // one OS thread's cluster, with stacks that all its clusters use in turn
  Runner runner;
  unsigned char* stacks = nullptr;
  size_t stack_count = 0;

  bool prepare(int ctas, int threads) {
    stack_count = size_t(ctas) * threads;
    {
      const std::lock_guard<std::mutex> lock(kept_stacks_mutex);
      const auto kept = kept_stacks.find(stack_count);
      if (kept != kept_stacks.end()) {
        stacks = kept->second;
        kept_stacks.erase(kept);
      }
    }
    if (!stacks) stacks = map_stacks(stack_count);
    if (!stacks) return false;
    unsigned char* guard = stacks;
    runner.blocks.resize(ctas);
    for (Block& b : runner.blocks) {
      b.fibers.resize(threads);
      for (Fiber& f : b.fibers) {
        f.stack = guard + GUARD_BYTES;
        guard += STACK_BYTES + GUARD_BYTES;
#if defined(SIMT_TSAN)
        f.tsan = __tsan_create_fiber(0);
#endif
      }
    }
    runner.scheduler.started = true;
#if defined(SIMT_TSAN)
    runner.scheduler.tsan = __tsan_get_current_fiber();
#endif
#if defined(SIMT_ASAN)
    pthread_attr_t attributes;
    void* stack;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &stack, &runner.scheduler.stack_bytes);
    pthread_attr_destroy(&attributes);
    runner.scheduler.stack = static_cast<unsigned char*>(stack);
#endif
    return true;
  }
  ~Worker() {
#if defined(SIMT_TSAN)
    for (Block& b : runner.blocks) {
      for (Fiber& f : b.fibers) {
        if (f.tsan) __tsan_destroy_fiber(f.tsan);
      }
      for (void* proxy : b.proxies) {
        if (proxy) __tsan_destroy_fiber(proxy);
      }
    }
#endif
    if (!stacks) return;
    if (KEEPS_STACKS) {
      const std::lock_guard<std::mutex> lock(kept_stacks_mutex);
      kept_stacks.emplace(stack_count, stacks);
    } else {
      munmap(stacks, stack_count * (STACK_BYTES + GUARD_BYTES));
    }
  }
};

// The data that the last launch of each device and stream has written, unless it was synchronized since.
std::map<std::pair<int, const void*>, std::vector<Range>> written;
std::map<std::pair<int, const void*>, int> shared_allowed;  // by device and kernel

struct PlannedFailure {
  int error, successes;  // so many calls before it
};
// The state of a host thread.
thread_local std::map<std::string, PlannedFailure> planned_failures;
thread_local Launch latest_launch;
thread_local int launches_of_thread;
thread_local std::string latest_report;

}  // namespace

thread_local std::vector<Launch>* launch_log = nullptr;

void synchronise() {
  const Lock lock(host_mutex);
  written.clear();
}

void synchronise(const void* stream) {
  const Lock lock(host_mutex);
  for (auto it = written.begin(); it != written.end();) {
    it = it->first.second == stream ? written.erase(it) : std::next(it);
  }
}

bool launch(const Launch& l, void (*body)(const void*), const void* args) {
  const Lock lock(host_mutex);
  latest_launch = l;
  launches_of_thread++;
  if (launch_log) launch_log->push_back(l);
  // Initial contents of shared memory: NaN, then 61,296 and -61,296 in fp16, since fmaxf() drops
  // NaN. Every other launch starts with zeros, which shows reads that only affect a decision.
  constexpr unsigned char poisons[] = {0xff, 0x7b, 0xfb};
  static int launches = 0;
  const unsigned char poison = launches % 2 ? 0 : poisons[launches / 2 % 3];
  Order order = schedule.order;
  if (schedule.alternate) order = launches % 2 ? Order::reverse : Order::forward;
  launches++;
  launch_failed = false;
  const Index3& n = l.grid_dim;
  const uint64_t all_clusters = uint64_t(n.x) * n.y * n.z / l.cluster_ctas;
  const uint64_t clusters = schedule.parts > 1 ? std::max<uint64_t>(all_clusters / schedule.parts, 1) : all_clusters;
  // At least two, so that CTAs run concurrently on any machine.
  const uint64_t cores = std::max(2u, std::thread::hardware_concurrency());
  const int workers = int(std::max<uint64_t>(1, std::min(cores, clusters)));
  std::unique_ptr<Withheld> withheld;
  const std::pair<int, const void*> stream(l.device, l.stream);
  const auto before = written.find(stream);
  if (before != written.end() && l.dependent) withheld.reset(new Withheld(std::move(before->second)));
  if (withheld) withheld->workers = workers;
  std::vector<Range> writes;
  std::atomic<uint64_t> next{0};
  std::vector<uint64_t> order_of_clusters(clusters);
  std::iota(order_of_clusters.begin(), order_of_clusters.end(), all_clusters - clusters);
  if (order == Order::reverse) std::reverse(order_of_clusters.begin(), order_of_clusters.end());
  if (order == Order::random) {
    std::shuffle(order_of_clusters.begin(), order_of_clusters.end(), std::mt19937_64(schedule.seed));
  }
  Workers team;
  const auto work = [&] {
    Worker worker;
    grid = {l.grid_dim, l.block_dim, l.device};
    Runner& c = worker.runner;
    if (!worker.prepare(l.cluster_ctas, int(l.block_dim.x * l.block_dim.y * l.block_dim.z))) {
      report("no host memory for the stacks of a block");
    }
    c.body = body;
    c.args = args;
    c.order = order;
    c.poison = poison;
    c.workers = &team;
    c.withheld = withheld.get();
    for (uint64_t i; !launch_failed && (i = next++) < clusters;) {
      const uint64_t at = order_of_clusters[i] * l.cluster_ctas;
      c.random = (schedule.seed + 1) * 0x9e3779b97f4a7c15u + at;
      run_cluster(c, {unsigned(at % n.x), unsigned(at / n.x % n.y), unsigned(at / n.x / n.y)},
                  l.shared_bytes, is_counting && at == 0);
    }
    for (const BulkStore& store : c.late) write_global(c, store);
    if (withheld) withheld->worker_ends();
    {
      const std::lock_guard<std::mutex> lock(team.mutex);
      team.running--;
      team.has_changed.notify_all();
    }
    const Lock lock(report_mutex);
    writes.insert(writes.end(), c.writes.begin(), c.writes.end());
  };
  // Always on a new thread, whose thread-local state ends with the launch.
  const auto start_worker = [&] {
    team.running++;
    team.threads.emplace_back(work);
  };
  if (order != Order::forward && !withheld) {
    team.replace = [&] {
      if (next < clusters) start_worker();
    };
  }
  const auto thread_of = [&](size_t i) {
    const std::lock_guard<std::mutex> lock(team.mutex);
    return i < team.threads.size() ? &team.threads[i] : nullptr;
  };
  {
    const std::lock_guard<std::mutex> lock(team.mutex);
    for (int t = 0; t < workers; t++) start_worker();
  }
  for (size_t i = 0; std::thread* t = thread_of(i); i++) t->join();
  if (withheld && !withheld->back) {
    withheld->give_back();
    report(
        "no thread of a dependent launch has called griddepcontrol.wait: the launch after it may "
        "start before the one before it has ended");
  }
  written[stream] = std::move(writes);
  if (launch_failed) latest_report = report_line;
  return !launch_failed;
}

const Launch& last_launch() { return latest_launch; }
int launches() { return launches_of_thread; }
const std::string& last_report() { return latest_report; }

namespace {

// Unallocated bytes on both sides of an allocation, so that far out-of-bounds accesses do not reach
// another one.
constexpr size_t ALLOCATION_GAP = size_t(1) << 20;
constexpr size_t LARGE_ALLOCATION = size_t(1) << 30;  // only touched pages cost memory

void poison_gaps(unsigned char* pointer, size_t bytes, bool poison) {
#if defined(SIMT_ASAN)
  for (unsigned char* gap : {pointer - ALLOCATION_GAP, pointer + bytes}) {
    (poison ? __asan_poison_memory_region : __asan_unpoison_memory_region)(gap, ALLOCATION_GAP);
  }
#else
  (void)pointer;
  (void)bytes;
  (void)poison;
#endif
}

}  // namespace

void* allocate(size_t bytes, int device) {
  const Lock lock(host_mutex);
  const size_t all = bytes + 2 * ALLOCATION_GAP;
  void* memory;
  if (bytes >= LARGE_ALLOCATION) {
    memory = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
  } else if (posix_memalign(&memory, 256, all)) {
    return nullptr;
  }
  unsigned char* const pointer = static_cast<unsigned char*>(memory) + ALLOCATION_GAP;
  poison_gaps(pointer, bytes, true);
  allocations[reinterpret_cast<uintptr_t>(pointer)] = {bytes, device};
  return pointer;
}

void deallocate(void* pointer) {
  const Lock lock(host_mutex);
  const auto it = allocations.find(reinterpret_cast<uintptr_t>(pointer));
  if (it == allocations.end()) return;
  const size_t bytes = it->second.bytes;
  unsigned char* const memory = static_cast<unsigned char*>(pointer) - ALLOCATION_GAP;
  poison_gaps(static_cast<unsigned char*>(pointer), bytes, false);
  if (bytes >= LARGE_ALLOCATION) {
    munmap(memory, bytes + 2 * ALLOCATION_GAP);
  } else {
    free(memory);
  }
  allocations.erase(it);
}

void allow_shared(const void* kernel, int device, int bytes) {
  const Lock lock(host_mutex);
  shared_allowed[{device, kernel}] = bytes;
}

int allowed_shared(const void* kernel, int device) {
  const Lock lock(host_mutex);
  const auto it = shared_allowed.find({device, kernel});
  return std::max(it == shared_allowed.end() ? 0 : it->second, 48 << 10);
}

void fail_next(const char* function, int error, int successes) {
  if (error == 0) planned_failures.erase(function);
  else planned_failures[function] = {error, successes};
}

int planned_failure(const char* function) {
  const auto it = planned_failures.find(function);
  if (it == planned_failures.end() || it->second.successes-- > 0) return 0;
  const int error = it->second.error;
  planned_failures.erase(it);
  return error;
}

}  // namespace simt
