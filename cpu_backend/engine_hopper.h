// The part of engine.cpp for instructions of sm_90; only engine.cpp includes it.
//
//   bulk loads    The destination is poison from the issue on. A load lands when no thread can
//                 continue without it: the oldest, the newest or any one first, as the schedule says; in
//                 random order also earlier.
//   cp.async      that an mbarrier tracks lands like a bulk load. It writes through the generic proxy:
//                 a thread that waits for the mbarrier must then execute fence.proxy.async.
//   bulk copies   from the shared memory of a CTA to that of another one of its cluster read their source
//                 when they land.
//   bulk stores   read shared memory at the wait_group.read that covers them, and write global memory
//                 at the wait_group or at the end of the kernel.
//   wgmma         reads its operands, registers of A included, at the wait_group that covers it; until
//                 then the accumulators are poison. Threads are not synchronized before.
//   setmaxnreg    waits until other threads have released enough registers.
//   mbarriers     are initialised for loads from fence.mbarrier_init on.
//   griddepcontrol.wait  returns when no thread can continue without it, in random order also
//                 earlier. Until then the results of the previous launch are poison, and writes over
//                 them are lost.
//
// For ThreadSanitizer, a bulk load writes when it is issued, and a wait for its mbarrier synchronizes
// with it. Bulk stores, and the products of each warpgroup, are threads of their own. They read at the
// wait, but are synchronized with their issuer (of a warpgroup, its first thread) only at the issue.
#pragma once

namespace simt {
namespace {

// A signalling NaN: arithmetic on accumulators in flight makes it quiet, which is detected.
constexpr uint32_t IN_FLIGHT = 0xffa5a5a5;

void observe_read(const void* pointer, size_t bytes) {
  (void)pointer;
  (void)bytes;
#if defined(SIMT_TSAN)
  __tsan_read_range(const_cast<void*>(pointer), bytes);
#endif
}

void observe_write(void* pointer, size_t bytes) {
  (void)pointer;
  (void)bytes;
#if defined(SIMT_TSAN)
  __tsan_write_range(pointer, bytes);
#endif
}

// Runs f(), which declares reads, as the ThreadSanitizer thread `proxy`: acquires `issue` before and
// releases `proxy` after.
template <class F> void observe_as(void*& proxy, const void* issue, F f) {
  (void)proxy;
  (void)issue;
  (void)f;
#if defined(SIMT_TSAN)
  void* const caller = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(proxy, 1);
  acquire(issue);
  f();
  release(&proxy);
  __tsan_switch_to_fiber(caller, 1);
#endif
}

// For errors that are detected after the thread has continued.
void report_for(const Fiber& issuer, const Site& at, const std::string& text) {
  Runner& c = *issuer.thread.block->runner;
  report(block_name(issuer.thread.block_index) + " " + name_of(issuer.thread) + " at " +
         name_of(at) + ": " + text);
  c.failed = true;
}

void check_shared_range(const void* pointer, uint64_t bytes, int alignment, const char* what,
                        const Site& at) {
  const uint64_t offset = static_cast<const unsigned char*>(pointer) - self->shared;
  if (offset > self->shared_bytes || bytes > self->shared_bytes - offset) {
    fail(at, "%s: %llu bytes at offset %lld of shared memory, which has %zu", what,
         (unsigned long long)bytes, (long long)offset, self->shared_bytes);
  }
  if (offset % alignment) {
    fail(at, "%s: offset %llu of shared memory is not aligned to %d bytes", what,
         (unsigned long long)offset, alignment);
  }
}

// ---- writes through the generic proxy ----

// Fails if [offset, offset + bytes) contains a write whose thread has not executed
// fence.proxy.async since. After a write by cp.async, its thread or this one must have executed the
// fence after a wait for the mbarrier.
void check_marks(uint64_t offset, int bytes, const Site& at) {
  const Block& b = *self->block;
  if (bytes == 16) {  // usually there is none: the fast path
    uint64_t marks[4];
    memcpy(marks, &b.marks[offset / 4], sizeof marks);
    if (!(marks[0] | marks[1] | marks[2] | marks[3])) return;
  }
  for (uint64_t i = offset / 4; i < (offset + bytes + 3) / 4; i++) {
    const Mark& mark = b.marks[i];
    if (!mark.thread_and_1) continue;
    const Thread& writer = b.fibers[mark.thread_and_1 - 1].thread;
    const auto has_fenced = [&](const Thread& thread) {
      const auto landings = thread.landings_fenced.find(mark.tracker);
      return landings != thread.landings_fenced.end() && landings->second >= mark.fences;
    };
    if (mark.tracker ? !has_fenced(writer) && !has_fenced(*self) : writer.proxy_fences == mark.fences) {
      fail(at, "offset %llu of shared memory was written by %s without a fence.proxy.async since",
           (unsigned long long)(4 * i), name_of(writer).c_str());
    }
  }
}

// ---- bulk copies ----

// With lines of 128 bytes, bits 4-6 of an address are XORed with bits 7-9; with 64 bytes, bits 4-5
// with bits 7-8.
uint64_t swizzle(uint64_t address, int line_bytes) {
  return address ^ (address >> 7 & (line_bytes / 16 - 1)) << 4;
}

using Pieces = std::vector<std::pair<unsigned char*, int>>;

// The box at coordinates c, in the order of shared memory before the swizzle.
Pieces pieces_of(const CUtensorMap_st& map, const int* c, const Site& at) {
  Pieces pieces;
  uint32_t i[5] = {};
  const auto add = [&](unsigned char* start, int elements) {
    if (elements <= 0) return;
    const int bytes = elements * int(map.stride[0]);
    if (start) check_global_range(start, bytes, at);
    pieces.push_back({start, bytes});
  };
  for (;;) {
    bool inside = true;
    uint64_t offset = 0;
    for (int dim = 1; dim < map.rank; dim++) {
      const int64_t at_dim = int64_t(c[dim]) + i[dim];
      inside = inside && at_dim >= 0 && uint64_t(at_dim) < map.size[dim];
      offset += uint64_t(at_dim) * map.stride[dim];
    }
    // The parts of the row before, inside and after the tensor.
    const int64_t row = map.box[0], size = int64_t(map.size[0]);
    const int64_t before = std::min(std::max<int64_t>(-int64_t(c[0]), 0), row);
    const int64_t until = std::max(std::min<int64_t>(size - c[0], row), before);
    if (inside) {
      unsigned char* const start = const_cast<unsigned char*>(map.base) + offset;
      add(nullptr, int(before));
      add(start + (c[0] + before) * int64_t(map.stride[0]), int(until - before));
      add(nullptr, int(row - until));
    } else {
      add(nullptr, int(row));
    }
    int dim = 1;
    while (dim < map.rank && ++i[dim] == map.box[dim]) i[dim++] = 0;
    if (dim >= map.rank) return pieces;
  }
}

// Calls f(address in shared memory, address in global memory or null, bytes) for each part of the
// copy that is contiguous on both sides. Lines in shared memory have line_bytes; 0: not swizzled.
template <class F>
void for_parts(unsigned char* shared, int line_bytes, const Pieces& pieces, F f) {
  for (const auto& piece : pieces) {
    for (int done = 0; done < piece.second;) {
      const int in_chunk = 16 - int(reinterpret_cast<uintptr_t>(shared) % 16);
      const int bytes = line_bytes ? std::min(piece.second - done, in_chunk) : piece.second;
      const uint64_t place = swizzle(reinterpret_cast<uintptr_t>(shared), line_bytes);
      f(line_bytes ? reinterpret_cast<unsigned char*>(place) : shared,
        piece.first ? piece.first + done : nullptr, bytes);
      shared += bytes;
      done += bytes;
    }
  }
}

void check_encoded(const CUtensorMap_st* map, const Site& at) {
  if (reinterpret_cast<uintptr_t>(map) % 64 || map->magic != CUtensorMap_st::MAGIC) {
    fail(at, "this is not a tensor map: none was encoded, or it is not aligned to 64 bytes");
  }
}

void check_map(const CUtensorMap_st* map, int rank, const int* coordinates, const void* shared,
               const Site& at) {
  check_encoded(map, at);
  if (map->rank != rank) {
    fail(at, "a tensor map of %d dimensions is used with %d coordinates", map->rank, rank);
  }
  const uint32_t element_bytes = uint32_t(map->stride[0]), line_bytes = map->swizzle_bytes;
  if (map->box[0] * element_bytes != line_bytes) {  // how narrower rows lie is not modelled
    fail(at, "the rows of this box have %u bytes; the CPU backend has rows of %u bytes only",
         map->box[0] * element_bytes, line_bytes);
  }
  if (coordinates[0] * int(element_bytes) % 16) {  // an H200 stops with "illegal instruction"
    fail(at, "the innermost coordinate is %d elements, which is not a multiple of 16 bytes",
         coordinates[0]);
  }
  check_shared_range(
      shared, map->box_bytes(), 8 * line_bytes,
      line_bytes == 64 ? "TMA with the 64-byte swizzle" : "TMA with the 128-byte swizzle", at);
}

// Fails if the mbarrier is not yet visible to asynchronous copies and to other CTAs of the cluster.
void check_fenced(const Block& b, const uint64_t* barrier, const Site& at) {
  for (const Block::Unfenced& u : b.unfenced) {
    if (u.mbarrier == barrier) {
      fail(at, "this mbarrier was initialised without a fence.mbarrier_init since");
    }
  }
}

bool has_returned(const Block& b) { return size_t(b.done) == b.fibers.size(); }

// The CTA of the cluster whose shared memory has these bytes.
Block& block_of(const void* pointer, uint64_t bytes, const Site& at) {
  for (Block& b : self->block->runner->blocks) {
    const uint64_t offset = static_cast<const unsigned char*>(pointer) - b.shared;
    if (offset > b.shared_bytes || bytes > b.shared_bytes - offset) continue;
    if (has_returned(b)) fail(at, "CTA %d of the cluster has returned", b.rank);
    return b;
  }
  fail(at, "%llu bytes at %p are in no shared memory of the cluster", (unsigned long long)bytes, pointer);
}

void start_load(Transfer t) {
  Block& b = *t.to;
  t.parity = Mbarrier::load(t.barrier, t.at).phase;
  check_fenced(b, t.barrier, t.at);
  for_parts(t.dst, t.swizzle, t.pieces, [&](unsigned char* s, unsigned char*, int bytes) {
    memset(s, 0xff, bytes);
    const size_t offset = s - b.shared;
    std::fill(b.marks.begin() + offset / 4, b.marks.begin() + (offset + bytes + 3) / 4, Mark{});
  });
  release(Mbarrier::clock(t.barrier, t.parity));
  b.runner->in_flight.push_back(std::move(t));
}

void write_copies(Block& b, const Transfer& t) {
  const Mark mark = {uint16_t(t.issuer->thread.linear + 1), place_of(b, t.barrier), ++b.landings};
  for (auto copy = t.copies.rbegin(); copy != t.copies.rend(); ++copy) {
    if (copy->src) {
      memcpy(copy->dst, copy->src, copy->bytes);
    } else {
      memset(copy->dst, 0, copy->bytes);
    }
    const size_t offset = copy->dst - b.shared;
    std::fill(b.marks.begin() + offset / 4, b.marks.begin() + (offset + copy->bytes + 3) / 4, mark);
  }
}

// Called by the scheduler.
void land_one(Runner& c) {
  const Unobserved unobserved;
  size_t i = 0;
  if (c.order == Order::reverse) i = c.in_flight.size() - 1;
  if (c.order == Order::random) i = c.draw() % c.in_flight.size();
  const Transfer t = std::move(c.in_flight[i]);
  c.in_flight.erase(c.in_flight.begin() + i);
  if (has_returned(*t.to) || has_returned(*t.issuer->thread.block)) {
    return report_for(*t.issuer, t.at, "a CTA of the cluster returns before this copy between them lands");
  }
  for_parts(t.dst, t.swizzle, t.pieces, [](unsigned char* s, unsigned char* g, int bytes) {
    if (g) {
      memcpy(s, g, bytes);
    } else {
      memset(s, 0, bytes);
    }
  });
  if (t.is_copies) write_copies(*t.to, t);
  Mbarrier m;
  memcpy(&m, t.barrier, sizeof m);
  if (m.unused) return report_for(*t.issuer, t.at, "its mbarrier is gone when the load lands");
  if (int(m.phase) != t.parity) {
    acquire(Mbarrier::clock(t.barrier, t.parity));
    release(Mbarrier::clock(t.barrier, m.phase));
  }
  m.bytes -= t.bytes;
  m.pending -= t.is_copies;
  if (m.pending == 0 && m.bytes < 0) {
    return report_for(
        *t.issuer, t.at,
        std::to_string(-m.bytes) + " bytes more than this mbarrier's phase expects have landed");
  }
  m.store(t.barrier, c);
}

int swizzle_of(const BulkStore& store) { return store.map ? store.map->swizzle_bytes : 0; }

void start_store(BulkStore store) {
  if (self->stores.empty()) self->stores.emplace_back();
  self->stores.back().push_back(std::move(store));
  release(&self->stores.back().back());
}

void read_shared(BulkStore& store) {
  if (store.has_read) return;
  store.has_read = true;
  size_t bytes = 0;
  for (const auto& piece : store.pieces) bytes += piece.second;
  store.data.resize(bytes);
  unsigned char* to = store.data.data();
  for_parts(const_cast<unsigned char*>(store.src), swizzle_of(store), store.pieces,
            [&](unsigned char* s, unsigned char*, int n) {
              memcpy(to, s, n);
              to += n;
            });
}

void add_floats(float* to, const unsigned char* from, int count) {
  for (int i = 0; i < count; i++) {
    float x, old;
    memcpy(&x, from + i * sizeof x, sizeof x);
    __atomic_load(to + i, &old, __ATOMIC_RELAXED);
    float sum = old + x;
    while (!__atomic_compare_exchange(to + i, &old, &sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) sum = old + x;
  }
}

void write_global(Runner& c, const BulkStore& store) {
  const unsigned char* from = store.data.data();
  for (const auto& piece : store.pieces) {
    if (piece.first) {
      if (store.adds) {
        add_floats(reinterpret_cast<float*>(piece.first), from, piece.second / int(sizeof(float)));
      } else {
        memcpy(piece.first, from, piece.second);
      }
      note_write_of(c, piece.first, piece.second);
    }
    from += piece.second;
  }
}

// ---- wgmma ----

Warpgroup& warpgroup(const Site& at) {
  Block& b = *self->block;
  const size_t i = self->linear / 128;
  if (b.fibers.size() < (i + 1) * 128) {
    fail(at, "a warpgroup has 128 threads, here are %d", int(b.fibers.size() - i * 128));
  }
  return b.warpgroups[i];
}

void start_warpgroups(Block& b) {
  b.warpgroups.clear();
  b.warpgroups.resize((b.fibers.size() + 127) / 128);
  b.proxies.resize(b.warpgroups.size() + 1);
#if defined(SIMT_TSAN)
  for (void*& proxy : b.proxies) {  // created here, since a new one has seen all that its creator has
    if (!proxy) proxy = __tsan_create_fiber(0);
  }
#endif
  b.free_registers = 0;
}

// The step of this thread, created if it is the first to arrive.
Step& join(Warpgroup& w, Step::Kind kind, int value, bool& first, const Site& at) {
  const uint64_t i = w.position[self->linear % 128]++ - w.first;
  first = i == w.steps.size();
  if (first) {
    w.steps.emplace_back();
    w.steps.back().kind = kind;
    w.steps.back().at = at;
    w.steps.back().value = value;
  }
  Step& step = w.steps[i];
  if (step.kind != kind || step.value != value || !same_site(step.at, at)) {
    fail(at, "divergent warpgroup: other threads executed %s instead", name_of(step.at).c_str());
  }
  return step;
}

uint32_t checksum(const void* registers, int words) {
  const uint32_t* w = static_cast<const uint32_t*>(registers);
  uint32_t sum = 0;
  for (int i = 0; i < words; i++) sum += (w[i] ^ 0x9e3779b9u) * uint32_t(2 * i + 1);
  return sum;
}

Known* find_known(std::vector<Known>& known, const void* registers, int words) {
  for (Known& k : known) {
    if (k.registers == registers && k.words == words) return &k;
  }
  return nullptr;
}

void remember(std::vector<Known>& known, const void* registers, int words) {
  Known* k = find_known(known, registers, words);
  if (!k) {
    if (known.size() == 64) known.erase(known.begin());
    known.push_back({registers, words, 0});
    k = &known.back();
  }
  k->checksum = checksum(registers, words);
}

// The position of accumulator i of thread t in [64][n]. Four accumulators are two pairs of
// neighbours in rows 8 apart; the next four are 8 columns further.
int row_of(int t, int i) { return t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8; }
int column_of(int t, int i) { return i / 4 * 8 + t % 4 * 2 + i % 2; }

// A matrix in shared memory, given by a descriptor. A line has 128 (or 64) swizzled bytes: a part
// of a row, or (MN-major) 64 (32) rows or columns of one k. k counts 16-bit words; a product uses
// 16.
struct Operand {
  int line_bytes, line_words;
  uint64_t start;  // of the atom that the matrix begins in, as an offset
  int in_line;     // bytes
  uint64_t leading, stride;

  explicit Operand(uint64_t descriptor)
      : line_bytes(descriptor >> 62 == 2 ? 64 : 128),
        line_words(line_bytes / 2),
        start((descriptor & 0x3fff) << 4 & ~uint64_t(line_bytes - 1)),
        in_line(int(descriptor << 4 & uint64_t(line_bytes - 1))),
        leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4) {}

  // The address of the line and 16-byte chunk with row or column r at k.
  uint64_t offset_of(int r, int k, bool mn_major) const {
    const int line = mn_major ? k : r, along = mn_major ? r % line_words : k;
    const uint64_t panel = mn_major ? r / line_words * leading : 0;
    const int in_chunks = (in_line + 2 * along) / 16 * 16;
    return swizzle(start + panel + line / 8 * stride + line % 8 * line_bytes + in_chunks,
                   line_bytes);
  }
};

void check_descriptor(const char* name, uint64_t descriptor, int rows, bool mn_major, const Site& at) {
  const Operand o(descriptor);
  const int mode = int(descriptor >> 62), in_line_bytes = 2 * (mn_major ? std::min(rows, o.line_words) : 16);
  if (mode != 1 && mode != 2) {
    fail(at, "descriptor %s: swizzle mode %d, want 1 (128 bytes) or 2 (64 bytes)", name, mode);
  }
  if (descriptor & 0x3fffc000c000c000) {
    fail(at, "descriptor %s: %016llx has bits that are none of start, leading, stride, swizzle",
         name, (unsigned long long)descriptor);
  }
  const uint64_t atom_bytes = 8 * uint64_t(o.line_bytes);
  if (o.start % atom_bytes) {
    fail(at, "descriptor %s: the start %llu is in line %d of an atom of 8 lines, want line 0", name,
         (unsigned long long)o.start, int(o.start % atom_bytes) / o.line_bytes);
  }
  if (o.stride % atom_bytes || (mn_major && rows > o.line_words && o.leading % atom_bytes)) {
    fail(at, "descriptor %s: stride %llu and leading %llu bytes are not both multiples of %llu",
         name, (unsigned long long)o.stride, (unsigned long long)o.leading,
         (unsigned long long)atom_bytes);
  }
  if (o.in_line + in_line_bytes > o.line_bytes) {
    fail(at, "descriptor %s: %d bytes from byte %d of a line of %d", name, in_line_bytes, o.in_line,
         o.line_bytes);
  }
  const int lines = mn_major ? 16 : rows;
  const uint64_t panels = mn_major ? (rows + o.line_words - 1) / o.line_words : 1;
  const uint64_t end = o.start + (panels - 1) * o.leading + (lines / 8 - 1) * o.stride + atom_bytes;
  if (end > self->shared_bytes) {
    fail(at, "descriptor %s: the matrix ends at offset %llu of shared memory, which has %zu", name,
         (unsigned long long)end, self->shared_bytes);
  }
  for (int r = 0; r < rows; r += mn_major ? 8 : 1) {
    for (int k = 0; k < 16; k += mn_major ? 1 : 8) check_marks(o.offset_of(r, k, mn_major), 16, at);
  }
}

void observe_operand(const Block& b, uint64_t descriptor, int rows, bool mn_major) {
  const Operand o(descriptor);
  for (int r = 0; r < rows; r += mn_major ? 8 : 1) {
    for (int k = 0; k < 16; k += mn_major ? 1 : 8) {
      observe_read(b.shared + o.offset_of(r, k, mn_major), 16);
    }
  }
}

// Converts __half or __nv_bfloat16.
void to_floats(const uint16_t* from, float* to, int count, bool bf16) {
  for (int i = 0; i < count; i++) {
    const uint32_t bits = from[i], magnitude = bits & 0x7fff;
    // fp16: the same fields at fp32's places are 2^112 too small; inf and NaN keep their exponent.
    float x;
    const uint32_t shifted = bf16 ? bits << 16 : magnitude << 13;
    memcpy(&x, &shifted, 4);
    if (!bf16) {
      x *= 0x1p112f;
      uint32_t y;
      memcpy(&y, &x, 4);
      y |= (bits & 0x8000) << 16 | (magnitude >= 0x7c00 ? 0x7f800000 : 0);
      memcpy(&x, &y, 4);
    }
    to[i] = x;
  }
}

// Converts e4m3: the bytes of words [rows][columns] become [2 * rows][columns] or [rows][2 *
// columns].
void to_floats_e4m3(const uint16_t* from, float* to, int rows, int columns, bool by_rows) {
  static const std::vector<float> values = [] {
    std::vector<float> v(256);
    for (int i = 0; i < 256; i++) v[i] = e4m3_to_float(uint8_t(i));
    return v;
  }();
  for (int r = 0; r < rows; r++) {
    for (int c = 0; c < columns; c++) {
      const uint16_t word = from[r * columns + c];
      float* const low = to + 2 * r * columns + (by_rows ? c : 2 * c);
      low[0] = values[word & 0xff];
      low[by_rows ? columns : 1] = values[word >> 8];
    }
  }
}

// sum [64][n] (+)= A [64][32] @ B [32][n], as Hopper adds products of e4m3: all 32 and the sum so
// far are truncated to 14 bits, counted from the highest bit of the largest of them, and added
// exactly; the result is truncated to 14 bits of its own. So 2^p + 1 is 2^p from p = 14 on.
void multiply_add_e4m3(float* sum, const float* A, const float* B, int n, bool accumulate) {
  constexpr int LANES = 8;
  using Row = float __attribute__((vector_size(4 * LANES), aligned(4)));
  using Bits = int32_t __attribute__((vector_size(4 * LANES), aligned(4)));
  constexpr int exponent_bits = 0x7f800000, smallest = 64 << 23, thirteen = 13 << 23;
  for (int i = 0; i < 64; i++) {
    for (int j = 0; j < n; j += LANES) {
      Row d = {}, terms[33];
      if (accumulate) memcpy(&d, sum + i * n + j, sizeof d);
      terms[32] = d;
      Bits largest = Bits{} + smallest;
      for (int k = 0; k < 33; k++) {
        if (k < 32) {
          memcpy(&terms[k], B + k * n + j, sizeof d);
          terms[k] *= A[i * 32 + k];
        }
        const Bits exponent = (Bits)terms[k] & exponent_bits;
        largest = exponent > largest ? exponent : largest;
      }
      const Row unit = (Row)(largest - thirteen), inverse = (Row)((254 << 23) - largest + thirteen);
      Row plain = {};  // for NaN and infinity
      Bits total = {};
      for (const Row& term : terms) {
        plain += term;
        total += __builtin_convertvector(term * inverse, Bits);
      }
      const Row result = __builtin_convertvector(total, Row) * unit;
      d = largest == exponent_bits ? plain : (Row)((Bits)result & ~0x3ff);
      memcpy(sum + i * n + j, &d, sizeof d);
    }
  }
}

// sum [64][n] (+)= A [64][16] @ B [16][n]: fp32, each element adds its products in the order of k.
// n is a multiple of 8 * WIDE.
template <int WIDE> void multiply_add(float* sum, const float* A, const float* B, int n, bool accumulate) {
  using Row = float __attribute__((vector_size(32), aligned(4)));
  constexpr int ROWS = 4;
  for (int j = 0; j < n; j += 8 * WIDE) {
    for (int i = 0; i < 64; i += ROWS) {
      Row d[ROWS][WIDE] = {};
      if (accumulate) {
        for (int r = 0; r < ROWS; r++) memcpy(d[r], sum + (i + r) * n + j, sizeof d[r]);
      }
      for (int k = 0; k < 16; k++) {
        Row b[WIDE];
        memcpy(b, B + k * n + j, sizeof b);
        for (int r = 0; r < ROWS; r++) {
          const float a = A[(i + r) * 16 + k];
          for (int w = 0; w < WIDE; w++) d[r][w] += a * b[w];
        }
      }
      for (int r = 0; r < ROWS; r++) memcpy(sum + (i + r) * n + j, d[r], sizeof d[r]);
    }
  }
}

void compute(Block& b, Warpgroup& w, Step& step) {
  const Product& p = step.product;
  observe_as(b.proxies[&w - b.warpgroups.data()], &step, [&] {
    if (!p.a) observe_operand(b, p.a_s, 64, p.trans_a);
    observe_operand(b, p.b_s, p.n, p.trans_b);
  });
  static thread_local uint16_t a16[64 * 16], b16[16 * 256];
  static thread_local float a32[64 * 32], b32[32 * 256];
  if (p.a) {
    for (int t = 0; t < 128; t++) {
      const Step::RegistersOfA& a = step.a[t];
      if (memcmp(a.at, a.value, sizeof a.value)) {
        return report_for(b.fibers[(&w - b.warpgroups.data()) * 128 + t], step.at,
                          "the registers of A were overwritten while a wgmma read them");
      }
      for (int i = 0; i < 4; i++) {
        memcpy(&a16[row_of(t, i % 2 * 2) * 16 + t % 4 * 2 + i / 2 * 8], &a.value[i], 4);
      }
    }
  } else if (p.trans_a) {
    const Operand o(p.a_s);
    for (int k = 0; k < 16; k++) {
      uint16_t column[64];
      for (int r = 0; r < 64; r += 8) memcpy(column + r, b.shared + o.offset_of(r, k, true), 16);
      for (int r = 0; r < 64; r++) a16[r * 16 + k] = column[r];
    }
  } else {
    const Operand o(p.a_s);
    for (int r = 0; r < 64; r++) {
      for (int k = 0; k < 16; k += 8)
        memcpy(&a16[r * 16 + k], b.shared + o.offset_of(r, k, false), 16);
    }
  }
  const Operand o(p.b_s);
  if (p.trans_b) {
    for (int k = 0; k < 16; k++) {
      for (int j = 0; j < p.n; j += 8) {
        memcpy(&b16[k * p.n + j], b.shared + o.offset_of(j, k, true), 16);
      }
    }
  } else {
    for (int j = 0; j < p.n; j++) {
      uint16_t row[16];
      for (int k = 0; k < 16; k += 8) memcpy(row + k, b.shared + o.offset_of(j, k, false), 16);
      for (int k = 0; k < 16; k++) b16[k * p.n + j] = row[k];
    }
  }
  float* const sum = step.chain->sum.data();
  if (p.element == Element::e4m3) {
    to_floats_e4m3(a16, a32, 64, 16, false);
    to_floats_e4m3(b16, b32, 16, p.n, true);
    return multiply_add_e4m3(sum, a32, b32, p.n, p.accumulate);
  }
  to_floats(a16, a32, 64 * 16, p.element == Element::bf16);
  to_floats(b16, b32, 16 * p.n, p.element == Element::bf16);
  (p.n == 8 ? multiply_add<1> : multiply_add<2>)(sum, a32, b32, p.n, p.accumulate);
}

// Completes a chain of products.
void deliver(Block& b, Warpgroup& w, const Chain& chain, const Site& at) {
  for (int t = 0; t < 128; t++) {
    float* const d = chain.d[t];
    uint32_t touched = 0;
    for (int i = 0; i < chain.n / 2; i++) {
      uint32_t bits;
      memcpy(&bits, d + i, 4);
      touched |= bits ^ IN_FLIGHT;
    }
    if (touched) {
      return report_for(b.fibers[(&w - b.warpgroups.data()) * 128 + t], at,
                        "accumulators were written while a wgmma was in flight on them");
    }
    const float* const rows = &chain.sum[row_of(t, 0) * chain.n + column_of(t, 0)];
    for (int i = 0; i < chain.n / 2; i += 4) {
      memcpy(d + i, rows + 2 * i, 8);
      memcpy(d + i + 2, rows + 8 * chain.n + 2 * i, 8);
    }
    remember(w.known[t], d, chain.n / 2);
  }
}

// Called by the last thread of the warpgroup that arrives at the wait.
void retire(Warpgroup& w, int groups, const Site& at) {
  Block& b = *self->block;
  for (int t = 1; t < 128; t++) {
    if (w.position[t] != w.position[0]) {
      fail(at,
           "divergent warpgroup: its thread %d has executed %lld more wgmma instructions than its "
           "thread 0",
           t, (long long)(w.position[t] - w.position[0]));
    }
  }
  int pending = 0;
  for (const Step& step : w.steps) pending += step.kind == Step::Kind::commit;
  while (pending > groups) {
    Step& step = w.steps.front();
    if (step.kind == Step::Kind::commit) pending--;
    if (step.kind == Step::Kind::product) {
      compute(b, w, step);
      if (--step.chain->left == 0) {
        deliver(b, w, *step.chain, at);
        w.chains.remove_if([&](const Chain& chain) { return &chain == step.chain; });
      }
    }
    w.steps.pop_front();
    w.first++;
    if (b.runner->failed) switch_fibers(fiber_of(self), b.runner->scheduler);
  }
}

// ---- registers, ends ----

// The initial registers of a thread: the SM's 65,536 divided among its threads.
int launch_registers(int threads) { return std::min(65536 / threads / 8 * 8, 256); }

// A thread returns.
void leave(Fiber& f) {
  const Unobserved unobserved;
  const Thread& t = f.thread;
  for (const auto& group : t.stores) {
    for (const BulkStore& store : group) {
      if (!store.has_read) {
        fail(store.at,
             "its thread returns and this store may not have read shared memory yet; wait "
             "with cp.async.bulk.wait_group.read");
      }
    }
  }
  const Warpgroup& w = t.block->warpgroups[t.linear / 128];
  uint64_t number = w.first;
  for (const Step& step : w.steps) {
    if (number++ >= w.position[t.linear % 128]) {
      fail(step.at, "divergent warpgroup: its thread returns without executing this");
    }
    if (step.kind == Step::Kind::product) {
      fail(step.at,
           "its thread returns and this wgmma may be in flight; wait with wgmma.wait_group");
    }
  }
}

// All threads of the cluster have returned.
void finish_cluster(Runner& c) {
  const Unobserved unobserved;
  for (const Transfer& t : c.in_flight) {
    report_for(*t.issuer, t.at, "this bulk load may be in flight when its CTA is gone");
  }
  for (Block& b : c.blocks) {
    for (Fiber& f : b.fibers) {
      for (auto& group : f.thread.stores) {
        for (BulkStore& store : group) c.late.push_back(std::move(store));
      }
      Warpgroup& w = b.warpgroups[f.thread.linear / 128];
      if (w.position[f.thread.linear % 128] != w.first + w.steps.size()) {
        report_for(f, w.steps.back().at, "divergent warpgroup: not all of its threads executed this");
      }
    }
  }
}

}  // namespace

void note_write(const void* dst, int bytes) {
  const size_t offset = static_cast<const unsigned char*>(dst) - self->shared;
  const Mark mark = {uint16_t(self->linear + 1), 0, self->proxy_fences};
  Mark* const marks = self->block->marks.data();
  for (size_t i = offset / 4; 4 * i < offset + bytes; i++) marks[i] = mark;
}

void fence_proxy_async() {
  self->proxy_fences++;
  self->landings_fenced = self->landings_seen;
}

void arrive_after_copies(uint64_t* barrier, const Site& at) {
  const Unobserved unobserved;
  check_shared(barrier, 8, at);
  Mbarrier m = Mbarrier::load(barrier, at);
  m.pending++;
  m.store(barrier, *self->block->runner);
  Transfer t{&fiber_of(self), self->block, at, nullptr, 0, {}, 0, barrier};
  t.is_copies = true;
  for (auto& group : self->copy_groups) t.copies.insert(t.copies.end(), group.begin(), group.end());
  t.copies.insert(t.copies.end(), self->open_copies.begin(), self->open_copies.end());
  self->copy_groups.clear();
  self->open_copies.clear();
  start_load(std::move(t));
}

void bulk_load(void* dst, const void* src, uint32_t bytes, uint64_t* barrier, const Site& at) {
  observe_write(dst, bytes);
  const Unobserved unobserved;
  check_shared_range(dst, bytes, 16, "a bulk copy", at);
  if (reinterpret_cast<uintptr_t>(src) % 16 || bytes % 16) {
    fail(at, "a bulk copy of %u bytes from %p: both must be multiples of 16", bytes, src);
  }
  check_global_range(src, bytes, at);
  check_shared(barrier, 8, at);
  unsigned char* const from = static_cast<unsigned char*>(const_cast<void*>(src));
  if (self->counting) self->block->counters.global_bytes += bytes;
  start_load({&fiber_of(self),
              self->block,
              at,
              static_cast<unsigned char*>(dst),
              0,
              {{from, int(bytes)}},
              int(bytes),
              barrier});
}

void prefetch_tensormap(const CUtensorMap_st* map, const Site& at) {
  const Unobserved unobserved;
  check_encoded(map, at);
}

void tensor_load(void* dst, const CUtensorMap_st* map, const int* c, int rank, uint64_t* barrier,
                 const Site& at) {
  Pieces pieces;
  {
    const Unobserved unobserved;
    check_map(map, rank, c, dst, at);
    check_shared(barrier, 8, at);
    pieces = pieces_of(*map, c, at);
  }
  const int bytes = int(map->box_bytes());
  observe_write(dst, bytes);
  const Unobserved unobserved;
  if (self->counting) {
    for (const auto& piece : pieces) {
      if (piece.first) self->block->counters.global_bytes += piece.second;
    }
  }
  start_load({&fiber_of(self), self->block, at, static_cast<unsigned char*>(dst), map->swizzle_bytes,
              std::move(pieces), bytes, barrier});
}

void bulk_copy_to_cta(void* dst, const void* src, uint32_t bytes, uint64_t* barrier, const Site& at) {
  observe_read(src, bytes);
  observe_write(dst, bytes);
  const Unobserved unobserved;
  check_shared_range(src, bytes, 16, "a bulk copy", at);
  Block& to = block_of(dst, bytes, at);
  if (reinterpret_cast<uintptr_t>(dst) % 16 || bytes % 16) {
    fail(at, "a bulk copy of %u bytes to %p: both must be multiples of 16", bytes, dst);
  }
  if (&block_of(barrier, 8, at) != &to) fail(at, "the mbarrier is not in the CTA that the copy goes to");
  unsigned char* const from = static_cast<unsigned char*>(const_cast<void*>(src));
  check_marks(from - self->shared, int(bytes), at);
  start_load({&fiber_of(self), &to, at, static_cast<unsigned char*>(dst), 0, {{from, int(bytes)}},
              int(bytes), barrier});
}

static void bulk_store_or_add(void* dst, const void* src, uint32_t bytes, bool adds, const Site& at) {
  observe_read(src, bytes);
  const Unobserved unobserved;
  check_shared_range(src, bytes, 16, "a bulk copy", at);
  if (reinterpret_cast<uintptr_t>(dst) % 16 || bytes % 16) {
    fail(at, "a bulk copy of %u bytes to %p: both must be multiples of 16", bytes, dst);
  }
  check_global_range(dst, bytes, at);
  const unsigned char* const from = static_cast<const unsigned char*>(src);
  check_marks(from - self->shared, int(bytes), at);
  start_store({from, {}, false, {{static_cast<unsigned char*>(dst), int(bytes)}}, nullptr, at, adds});
}
void bulk_store(void* dst, const void* src, uint32_t bytes, const Site& at) { bulk_store_or_add(dst, src, bytes, false, at); }
void bulk_add(float* dst, const float* src, uint32_t bytes, const Site& at) { bulk_store_or_add(dst, src, bytes, true, at); }

void tensor_store(const CUtensorMap_st* map, const int* c, int rank, const void* src, const Site& at) {
  {
    const Unobserved unobserved;
    check_map(map, rank, c, src, at);
    for (int d = 0; d < rank; d++) {
      if (c[d] < 0) {  // an H200 stops the kernel with "illegal instruction"
        fail(at, "a box to be stored may reach past the tensor's end, but not begin at %d", c[d]);
      }
    }
  }
  observe_read(src, map->box_bytes());
  const Unobserved unobserved;
  const unsigned char* const from = static_cast<const unsigned char*>(src);
  check_marks(from - self->shared, int(map->box_bytes()), at);
  start_store({from, {}, false, pieces_of(*map, c, at), map, at});
}

void bulk_commit() {
  const Unobserved unobserved;
  if (self->stores.empty()) self->stores.emplace_back();
  self->stores.emplace_back();
}

void bulk_wait(int groups, bool read_only) {
  auto& stores = self->stores;
  const size_t keep = size_t(groups) + 1;  // the last is open
  auto group = stores.begin();
  for (size_t left = stores.size(); left > keep; left--, ++group) {
    for (BulkStore& store : *group) {
      if (!store.has_read) {
        void*& proxy = self->block->proxies.back();
        observe_as(proxy, &store, [&] {
          for_parts(const_cast<unsigned char*>(store.src), swizzle_of(store), store.pieces,
                    [](unsigned char* s, unsigned char*, int bytes) { observe_read(s, bytes); });
        });
        acquire(&proxy);
      }
      if (!read_only) {
        for (const auto& piece : store.pieces) {
          if (piece.first && !store.adds) observe_write(piece.first, piece.second);
        }
      }
      const Unobserved unobserved;
      read_shared(store);
      if (!read_only) write_global(*self->block->runner, store);
    }
  }
  const Unobserved unobserved;
  if (!read_only) {
    while (stores.size() > keep) stores.pop_front();
  }
}

void wgmma(const Product& p, const Site& at) {
  const Unobserved unobserved;
  Warpgroup& w = warpgroup(at);
  const int t = self->linear % 128, words = p.n / 2;
  if (!w.fenced[t]) fail(at, "the first wgmma comes before any wgmma_fence");
  bool first;
  Step& step = join(w, Step::Kind::product, p.n, first, at);
  Chain* mine = nullptr;
  for (Chain& chain : w.chains) {
    const float* const d = chain.d[t];
    if (!d) continue;
    if (d == p.d && chain.n == p.n) {
      mine = &chain;
    } else if (d < p.d + words && p.d < d + chain.n / 2) {
      fail(at, "a wgmma of another shape is in flight on some of these accumulators");
    }
  }
  if (first) {
    if (!p.a) check_descriptor("A", p.a_s, 64, p.trans_a, at);
    check_descriptor("B", p.b_s, p.n, p.trans_b, at);
    step.product = p;
    step.chain = mine;
    step.starts_chain = !mine;
    if (p.a) step.a.resize(128);
    if (!mine) {
      w.chains.emplace_back();
      step.chain = &w.chains.back();
      step.chain->n = p.n;
      step.chain->sum.resize(64 * p.n);
    }
    step.chain->left++;
  }
  const Product& other = step.product;
  if (other.element != p.element || other.trans_a != p.trans_a || other.trans_b != p.trans_b ||
      !other.a != !p.a || other.accumulate != p.accumulate || (!p.a && other.a_s != p.a_s) ||
      other.b_s != p.b_s) {
    fail(at, "divergent warpgroup: other threads gave other descriptors or another scale-d");
  }
  if (mine != (step.starts_chain ? nullptr : step.chain)) {
    fail(at, "divergent warpgroup: other threads gave accumulators of another chain of products");
  }
  if (t == 0) release(&step);
  if (p.a) {
    const Known* const k = find_known(w.known[t], p.a, 4);
    if (k && k->checksum != checksum(p.a, 4)) {
      fail(at, "the registers of A were written after the last wgmma_fence");
    }
    remember(w.known[t], p.a, 4);
    step.a[t].at = p.a;
    memcpy(step.a[t].value, p.a, sizeof step.a[t].value);
  }
  if (!step.starts_chain) return;
  Chain& chain = *step.chain;
  chain.d[t] = p.d;
  if (p.accumulate) {
    const Known* const k = find_known(w.known[t], p.d, words);
    if (k && k->checksum != checksum(p.d, words)) {
      fail(at, "the accumulators were written after the last wgmma_fence");
    }
    float* const rows = &chain.sum[row_of(t, 0) * p.n + column_of(t, 0)];
    for (int i = 0; i < words; i += 4) {
      memcpy(rows + 2 * i, p.d + i, 8);
      memcpy(rows + 8 * p.n + 2 * i, p.d + i + 2, 8);
    }
  }
  for (int i = 0; i < words; i++) memcpy(p.d + i, &IN_FLIGHT, 4);
}

void wgmma_fence(const Site& at) {
  const Unobserved unobserved;
  Warpgroup& w = warpgroup(at);
  const int t = self->linear % 128;
  bool first;
  join(w, Step::Kind::fence, 0, first, at);
  w.fenced[t] = true;
  for (Known& k : w.known[t]) k.checksum = checksum(k.registers, k.words);
}

void wgmma_commit(const Site& at) {
  const Unobserved unobserved;
  bool first;
  join(warpgroup(at), Step::Kind::commit, 0, first, at);
}

void wgmma_wait(int groups, const Site& at) {
  const Unobserved unobserved;
  Warpgroup& w = warpgroup(at);
  if (!w.arrived) {
    w.wait_groups = groups;
    w.wait_at = at;
  }
  if (w.wait_groups != groups || !same_site(w.wait_at, at)) {
    fail(at, "divergent warpgroup: others wait at %s", name_of(w.wait_at).c_str());
  }
  if (++w.arrived < 128) {
    w.waiting.push_back(&fiber_of(self));
    wait(fiber_of(self), "the rest of its warpgroup", at);
  } else {
    w.arrived = 0;
    retire(w, groups, at);
    wake(*self->block->runner, w.waiting);
  }
  acquire(&self->block->proxies[self->linear / 128]);
}

void setmaxnreg(int registers, int ctas, bool increase, const Site& at) {
  const Unobserved unobserved;
  if (registers < 24 || registers > 256 || registers % 8) {
    fail(at, "setmaxnreg: %d registers: want a multiple of 8 from 24 to 256", registers);
  }
  bool first;
  join(warpgroup(at), Step::Kind::registers, registers, first, at);
  const int threads = int(self->block->fibers.size());
  if (self->registers == launch_registers(threads)) self->registers = launch_registers(ctas * threads);
  const int more = registers - self->registers;
  if (increase ? more < 0 : more > 0) {
    fail(at, "setmaxnreg: from %d to %d registers is no %s", self->registers, registers,
         increase ? "increase" : "decrease");
  }
  struct Wanted {
    const Block* block;
    int registers;
  } wanted{self->block, more};
  while (more > self->block->free_registers) {  // several may wake up for the same registers
    wait_until(
        [](const void* context) {
          const Wanted& w = *static_cast<const Wanted*>(context);
          return w.registers <= w.block->free_registers;
        },
        &wanted, "registers (setmaxnreg)", at);
  }
  self->registers = registers;
  self->block->free_registers -= more;
  if (more < 0) wake_pollers(*self->block->runner);
}

}  // namespace simt
