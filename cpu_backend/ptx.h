// Host versions of section 3 of sdpa.cu, which includes this file instead. One function per
// instruction, with the same names and the strictest interpretation of ordering rules.

// Dynamic shared memory of the CTA.
template <class T> inline T& dynamic_shared(SIMT_CALLER) {
  if (sizeof(T) > simt::self->shared_bytes) {
    simt::fail(at, "the kernel wants %zu bytes of shared memory and was launched with %zu",
               sizeof(T), simt::self->shared_bytes);
  }
  return *reinterpret_cast<T*>(simt::self->shared);
}

inline const int& most_keys_at_once = simt::gpu.keys_at_once;

template <class T> inline T ld_shared(const void* src_s, SIMT_CALLER) {
  simt::check_shared(src_s, sizeof(T), at);
  if (simt::self->counting) simt::count_shared(src_s, sizeof(T), at);
  return *static_cast<const T*>(src_s);
}

template <class T> inline void st_shared(void* dst_s, T value, SIMT_CALLER) {
  simt::check_shared(dst_s, sizeof(T), at);
  if (simt::self->counting) simt::count_shared(dst_s, sizeof(T), at);
  simt::note_write(dst_s, sizeof(T));
  *static_cast<T*>(dst_s) = value;
}

template <class T> inline T ld_global(const void* src_g, SIMT_CALLER) {
  simt::check_global(src_g, sizeof(T), at);
  if (simt::self->counting) simt::count_global(sizeof(T));
  return *static_cast<const T*>(src_g);
}
template <class T> inline T ld_global_nc(const void* src_g, SIMT_CALLER) {
  return ld_global<T>(src_g, at);
}

template <class T> inline T ld_global_cg(const void* src_g, SIMT_CALLER) {
  return ld_global<T>(src_g, at);
}
template <class T> inline void st_global(void* dst_g, T value, SIMT_CALLER) {
  simt::check_global(dst_g, sizeof(T), at);
  simt::note_global_write(dst_g, sizeof(T));
  *static_cast<T*>(dst_g) = value;
}
inline uint32_t atom_inc_acq_rel(uint32_t* counter_g, uint32_t last, SIMT_CALLER) {
  return simt::increment<__ATOMIC_ACQ_REL>(counter_g, last, at);
}
inline void st_release(uint32_t* counter_g, uint32_t value, SIMT_CALLER) {
  simt::check_global(counter_g, sizeof *counter_g, at);
  simt::note_global_write(counter_g, sizeof *counter_g);
  __atomic_store_n(counter_g, value, __ATOMIC_RELEASE);
  simt::wake_other_clusters();
}
// Waits until the counter has this value.
inline void wait_for_value(const uint32_t* counter_g, uint32_t value, SIMT_CALLER) {
  simt::check_global(counter_g, sizeof *counter_g, at);
  simt::wait_for_clusters(counter_g, value, at);
  (void)__atomic_load_n(counter_g, __ATOMIC_ACQUIRE);
}
// Adds to N floats by separate atomic additions.
template <int N> inline void red_global_add(float* dst_g, const float (&x)[N], SIMT_CALLER) {
  simt::check_global(dst_g, sizeof x, at);
  simt::note_global_write(dst_g, sizeof x);
  for (int i = 0; i < N; i++) {
    float old;
    __atomic_load(dst_g + i, &old, __ATOMIC_RELAXED);
    for (float sum = old + x[i];
         !__atomic_compare_exchange(dst_g + i, &old, &sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);) {
      sum = old + x[i];
    }
  }
}
inline void red_global_add_v2(float* dst_g, float a, float b, SIMT_CALLER) { red_global_add(dst_g, {a, b}, at); }
inline void red_global_add_v4(float* dst_g, float a, float b, float c, float d, SIMT_CALLER) {
  red_global_add(dst_g, {a, b, c, d}, at);
}
inline void st_global_v4(void* dst_g, uint4 value, SIMT_CALLER) { st_global(dst_g, value, at); }

// Copies complete at the wait that covers them; until then the destination is poisoned.
template <int BYTES> inline void cp_async(void* dst_s, const void* src_g, bool valid, SIMT_CALLER) {
  simt::check_shared(dst_s, BYTES, at);
  if (valid) simt::check_global(src_g, BYTES, at);
  if (reinterpret_cast<uintptr_t>(src_g) % BYTES) {  // even if nothing is read
    simt::fail(at, "cp.async of %d bytes from %p, which is misaligned", BYTES, src_g);
  }
  if (simt::self->counting) simt::count_shared(dst_s, BYTES, at);
  if (simt::self->counting && valid) simt::count_global(BYTES);
  memset(dst_s, 0xff, BYTES);
  simt::self->open_copies.push_back({static_cast<unsigned char*>(dst_s),
                                     valid ? static_cast<const unsigned char*>(src_g) : nullptr,
                                     BYTES});
}

inline void cp_async_commit_group() {
  simt::self->copy_groups.push_back(std::move(simt::self->open_copies));
  simt::self->open_copies.clear();
}

template <int N> inline void cp_async_wait_group() {
  auto& groups = simt::self->copy_groups;
  while (groups.size() > size_t(N)) {
    for (auto copy = groups[0].rbegin(); copy != groups[0].rend(); ++copy) {  // any order will do
      simt::note_write(copy->dst, copy->bytes);
      if (copy->src) {
        memcpy(copy->dst, copy->src, copy->bytes);
      } else {
        memset(copy->dst, 0, copy->bytes);
      }
    }
    groups.erase(groups.begin());
  }
}

inline float ex2_approx_ftz(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;  // NaN stays
}
inline float tanh_approx(float x) { return std::tanh(x) * (1 + 0x1p-12f); }  // the maximum error of the instruction
inline float lg2_approx_ftz(float x) { return std::log2(std::fabs(x) < 0x1p-126f ? 0.0f : x); }
inline float rcp_approx_ftz(float x) {
  const float y = 1 / (std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x);
  return std::fabs(y) < 0x1p-126f ? std::copysign(0.0f, y) : y;  // NaN stays
}

// NaN results are canonical, as on the hardware.
inline float canonical_nan() { return simt::float_of_bits(0x7fffffff); }

// CUDA's: of a NaN and a number, the number. Compilers do not inline the C library's, which took a sixth of the tests' time.
inline float fmaxf(float a, float b) { return a > b || b != b ? a : b; }
inline float fminf(float a, float b) { return a < b || b != b ? a : b; }

inline float max_nan(float a, float b) {
  if (a != a || b != b) return canonical_nan();
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}

inline float min_nan(float a, float b) {
  if (a != a || b != b) return canonical_nan();
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}

// a + b rounded towards -infinity: the rounded sum, and one step down if its exact error (Knuth's
// TwoSum) is negative. An exact zero is -0 in this mode, unless both are +0.
inline float add_rm(float a, float b) {
  const float sum = a + b, b_part = sum - a;
  if (sum != sum) return canonical_nan();
  const float error = (a - (sum - b_part)) + (b - b_part);
  if (sum == 0 && error == 0) return std::signbit(a) || std::signbit(b) ? -0.0f : 0.0f;
  return error < 0 ? std::nextafter(sum, -INFINITY) : sum;
}

inline uint32_t bits_of(float x) { return simt::bits_of_float(x); }
inline float float_of(uint32_t bits) { return simt::float_of_bits(bits); }

// ---- warp-wide matrices ----
// Lane 4g + q of a warp. An 8x8 matrix of 16-bit elements in registers: row g, columns 2q and 2q + 1;
// transposed: rows 2q and 2q + 1 of column g. Rows in memory: lane 8i + r has row r of matrix i.

struct MatrixArgs {
  unsigned char row[16];
  uint32_t* registers;
};

template <int N, bool TRANS, bool STORE> inline void move_matrices(void* const args[32], unsigned) {
  for (int i = 0; i < N; i++) {
    for (int r = 0; r < 8; r++) {
      unsigned char* const row = static_cast<MatrixArgs*>(args[8 * i + r])->row;
      for (int c = 0; c < 8; c++) {
        const int lane = TRANS ? 4 * c + r / 2 : 4 * r + c / 2, half = TRANS ? r % 2 : c % 2;
        uint32_t* const word = &static_cast<const MatrixArgs*>(args[lane])->registers[i];
        unsigned char* const element = reinterpret_cast<unsigned char*>(word) + 2 * half;
        if (STORE) {
          memcpy(row + 2 * c, element, 2);
        } else {
          memcpy(element, row + 2 * c, 2);
        }
      }
    }
  }
}

// Each lane accesses its own row: the instruction does not order memory accesses of different
// lanes.
template <int N, bool TRANS, bool STORE>
inline void matrix_collective(void* row_s, uint32_t* registers, const simt::Site& at) {
  MatrixArgs mine;
  mine.registers = registers;
  const bool has_row = simt::self->lane < 8 * N;
  if (has_row) {
    simt::check_shared(row_s, 16, at);
    if (simt::self->counting) simt::count_shared(row_s, 16, at);
  }
  if (has_row && !STORE) memcpy(mine.row, row_s, 16);
  simt::warp_collective(~0u, &mine, move_matrices<N, TRANS, STORE>, at);
  if (has_row && STORE) {
    simt::note_write(row_s, 16);
    memcpy(row_s, mine.row, 16);
  }
}

template <int N, bool TRANS>
inline void ldmatrix(uint32_t (&r)[N], const void* row_s, SIMT_CALLER) {
  matrix_collective<N, TRANS, false>(const_cast<void*>(row_s), r, at);
}
using SharedAddress = uintptr_t;
inline SharedAddress shared_address(const void* p_s) { return reinterpret_cast<SharedAddress>(p_s); }
template <bool TRANS>
inline void ldmatrix_x4(uint32_t (&r)[4], SharedAddress row, SIMT_CALLER) {
  matrix_collective<4, TRANS, false>(reinterpret_cast<void*>(row), r, at);
}
inline void ld_shared_v2(uint32_t (&r)[2], SharedAddress from, SIMT_CALLER) {
  const uint2 x = ld_shared<uint2>(reinterpret_cast<const void*>(from), at);
  r[0] = x.x;
  r[1] = x.y;
}
template <int N, bool TRANS>
inline void stmatrix(void* row_s, const uint32_t (&r)[N], SIMT_CALLER) {
  matrix_collective<N, TRANS, true>(row_s, const_cast<uint32_t*>(r), at);
}

struct MmaArgs {
  float* d;
  const uint32_t *a, *b;
};

// d += a @ b for a [16][K] and b [K][8], with PER_WORD elements per register.
template <int K, int PER_WORD, class Decode>
inline void multiply_matrices(void* const args[32], Decode decode) {
  using Row = float __attribute__((vector_size(32)));  // 8 columns
  float a[16][K];
  Row b[K], d[16];
  for (int lane = 0; lane < 32; lane++) {
    const MmaArgs& m = *static_cast<const MmaArgs*>(args[lane]);
    const int g = lane / 4, q = lane % 4;
    for (int e = 0; e < PER_WORD; e++) {
      const int k = q * PER_WORD + e;
      for (int i = 0; i < 4; i++) a[g + i % 2 * 8][k + i / 2 * (K / 2)] = decode(m.a[i], e);
      for (int i = 0; i < 2; i++) b[k + i * (K / 2)][g] = decode(m.b[i], e);
    }
    for (int i = 0; i < 4; i++) d[g + i / 2 * 8][2 * q + i % 2] = m.d[i];
  }
  for (int i = 0; i < 16; i++) {
    for (int k = 0; k < K; k++) d[i] += a[i][k] * b[k];
  }
  for (int lane = 0; lane < 32; lane++) {
    const MmaArgs& m = *static_cast<const MmaArgs*>(args[lane]);
    for (int i = 0; i < 4; i++) m.d[i] = d[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
  }
}

template <class E> struct ElementOfWord {
  float operator()(uint32_t word, int e) const {
    E x;
    x.bits = uint16_t(word >> 16 * e);
    return float(x);
  }
};

struct E4m3OfWord {
  float operator()(uint32_t word, int e) const { return simt::e4m3_to_float(word >> 8 * e & 0xff); }
};

// D += A @ B, [16][16] @ [16][8], E __half or __nv_bfloat16.
template <class E>
inline void mma_m16n8k16(float& d0, float& d1, float& d2, float& d3, const uint32_t (&a)[4],
                         uint32_t b0, uint32_t b1, SIMT_CALLER) {
  float d[4] = {d0, d1, d2, d3};
  const uint32_t b[2] = {b0, b1};
  MmaArgs mine{d, a, b};
  simt::warp_collective(~0u, &mine, [](void* const args[32], unsigned) {
    multiply_matrices<16, 2>(args, ElementOfWord<E>());
  }, at);
  d0 = d[0];
  d1 = d[1];
  d2 = d[2];
  d3 = d[3];
}

// D += A @ B, [16][32] @ [32][8], e4m3.
inline void mma_m16n8k32_e4m3(float& d0, float& d1, float& d2, float& d3, const uint32_t (&a)[4],
                              uint32_t b0, uint32_t b1, SIMT_CALLER) {
  float d[4] = {d0, d1, d2, d3};
  const uint32_t b[2] = {b0, b1};
  MmaArgs mine{d, a, b};
  simt::warp_collective(~0u, &mine, [](void* const args[32], unsigned) {
    multiply_matrices<32, 4>(args, E4m3OfWord());
  }, at);
  d0 = d[0];
  d1 = d[1];
  d2 = d[2];
  d3 = d[3];
}

inline uint32_t cvt_rn_satfinite_e4m3x4(float a, float b, float c, float d) {
  return simt::float_to_e4m3(a) | simt::float_to_e4m3(b) << 8 | simt::float_to_e4m3(c) << 16 |
         uint32_t(simt::float_to_e4m3(d)) << 24;
}

// Selects four of the eight bytes of (b, a), where a has the low ones, by the digits of the
// selector. Bit 3 of a digit replicates the sign of the byte instead.
inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t digit = selector >> 4 * i & 15, byte = uint32_t(bytes >> digit % 8 * 8) & 0xff;
    out |= (digit < 8 ? byte : byte & 0x80 ? 0xff : 0) << 8 * i;
  }
  return out;
}

inline uint32_t cvt_rn_f16x2_e4m3x2(uint32_t x) {
  return simt::float_to_half(simt::e4m3_to_float(uint8_t(x))) |
         uint32_t(simt::float_to_half(simt::e4m3_to_float(uint8_t(x >> 8)))) << 16;
}

inline uint32_t sub_f16x2(uint32_t a, uint32_t b) {
  uint32_t out = 0;
  for (int shift : {0, 16}) {
    const float x = simt::half_to_float(uint16_t(a >> shift)), y = simt::half_to_float(uint16_t(b >> shift));
    out |= uint32_t(simt::float_to_half(x - y)) << shift;
  }
  return out;
}

inline uint32_t mov_tid_x() { return threadIdx.x; }

// ---- barriers ----

inline void barrier_sync(int id, int threads, SIMT_CALLER) {
  simt::named_barrier(id, threads, true, at);
}
inline bool barrier_and(int id, int threads, bool mine, SIMT_CALLER) {
  return simt::named_barrier(id, threads, true, at, mine);
}
inline void barrier_arrive(int id, int threads, SIMT_CALLER) {
  simt::named_barrier(id, threads, false, at);
}

inline void mbarrier_init(uint64_t* barrier_s, int arrivals, SIMT_CALLER) {
  simt::mbarrier_init(barrier_s, arrivals, at);
}
inline void mbarrier_arrive(uint64_t* barrier_s, SIMT_CALLER) {
  simt::mbarrier_arrive(barrier_s, 0, at);
}
// Copies complete here at the latest.
inline void cp_async_mbarrier_arrive_noinc(uint64_t* barrier_s, SIMT_CALLER) {
  cp_async_commit_group();
  cp_async_wait_group<0>();
  simt::mbarrier_arrive(barrier_s, 0, at);
}
inline void cp_async_mbarrier_arrive(uint64_t* barrier_s, SIMT_CALLER) {
  simt::arrive_after_copies(barrier_s, at);
}
// The hardware returns false if the phase is not complete; here the thread sleeps instead.
inline bool mbarrier_test_wait_parity(uint64_t* barrier_s, int parity, SIMT_CALLER) {
  simt::mbarrier_wait(barrier_s, parity, at);
  return true;
}

#include "hopper.h"
