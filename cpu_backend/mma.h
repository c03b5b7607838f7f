// nvcuda::wmma for 16x16x16 tiles: fragments, loads, stores and mma_sync. CUDA does not specify the
// layout of fragments, so kernels cannot depend on it; here lane 4g + q holds rows g and g + 8,
// columns 2q, 2q + 1, 2q + 8 and 2q + 9.
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

namespace nvcuda {
namespace wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int M, int N, int K, class T, class Layout = void> struct fragment {
  static_assert(M == 16 && N == 16 && K == 16, "the CPU backend has wmma tiles of 16x16x16 only");
  static constexpr int num_elements = 8;
  T x[num_elements];
};

namespace detail {

inline int row_of(int lane, int i) { return lane / 4 + i / 2 % 2 * 8; }
inline int col_of(int lane, int i) { return 2 * (lane % 4) + i % 2 + i / 4 * 8; }

template <class T> void check(const T* tile, unsigned ldm, const simt::Site& at) {
  if (reinterpret_cast<uintptr_t>(tile) % 32) simt::fail(at, "a wmma tile is not 32-byte aligned");
  if (ldm * sizeof(T) % 16) simt::fail(at, "wmma: a leading dimension of %u elements is not a multiple "
                                           "of 16 bytes", ldm);
  // The first and last element; tiles may be in shared or global memory.
  const unsigned char* const begin = reinterpret_cast<const unsigned char*>(tile);
  const size_t offset = begin - simt::self->shared;
  const size_t bytes = (15 * size_t(ldm) + 16) * sizeof(T);
  if (offset < simt::self->shared_bytes) {
    if (offset + bytes > simt::self->shared_bytes) {
      simt::fail(at, "a wmma tile ends %zu bytes past the end of shared memory",
                 offset + bytes - simt::self->shared_bytes);
    }
  } else {
    simt::check_global(tile, sizeof(T), at);
    simt::check_global(tile + 15 * size_t(ldm) + 15, sizeof(T), at);
  }
}

// The shared-memory accesses of a load, as on sm_80 and newer. 16-bit elements: an ldmatrix of four
// 8x8 matrices, where lane 8i + r accesses row r of matrix i. 32-bit accumulators: pairs of
// columns.
template <class T> void count(const T* tile, unsigned ldm, const simt::Site& at) {
  if (!simt::self->counting) return;
  const size_t offset = reinterpret_cast<const unsigned char*>(tile) - simt::self->shared;
  if (offset >= simt::self->shared_bytes) return;
  const int lane = simt::self->lane;
  if (sizeof(T) == 2) {
    simt::count_shared(tile + lane % 16 * size_t(ldm) + lane / 16 * 8, 16, at);
  } else {
    for (int i = 0; i < 8; i += 2) {
      simt::count_shared(tile + row_of(lane, i) * size_t(ldm) + col_of(lane, i), 8, at);
    }
  }
}

inline void meet(const simt::Site& at) { simt::warp_collective(~0u, nullptr, nullptr, at); }

template <class T, class Sum> struct MmaArgs {
  const T *a, *b;
  const Sum* c;
  Sum* d;
};

}  // namespace detail

template <class Use, class T, class Layout>
__attribute__((noinline)) void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout>& f, const T* tile, unsigned ldm,
                      SIMT_CALLER) {
  detail::check(tile, ldm, at);
  detail::count(tile, ldm, at);
  for (int i = 0; i < f.num_elements; i++) {
    const int r = detail::row_of(simt::self->lane, i), c = detail::col_of(simt::self->lane, i);
    f.x[i] = std::is_same<Layout, row_major>::value ? tile[r * ldm + c] : tile[c * ldm + r];
  }
  detail::meet(at);
}

template <class T>
__attribute__((noinline)) void load_matrix_sync(fragment<accumulator, 16, 16, 16, T>& f, const T* tile, unsigned ldm,
                      layout_t layout, SIMT_CALLER) {
  detail::check(tile, ldm, at);
  detail::count(tile, ldm, at);
  for (int i = 0; i < f.num_elements; i++) {
    const int r = detail::row_of(simt::self->lane, i), c = detail::col_of(simt::self->lane, i);
    f.x[i] = layout == mem_row_major ? tile[r * ldm + c] : tile[c * ldm + r];
  }
  detail::meet(at);
}

template <class T>
__attribute__((noinline)) void store_matrix_sync(T* tile, const fragment<accumulator, 16, 16, 16, T>& f, unsigned ldm,
                       layout_t layout, SIMT_CALLER) {
  detail::check(tile, ldm, at);
  detail::count(tile, ldm, at);
  detail::meet(at);
  for (int i = 0; i < f.num_elements; i++) {
    const int r = detail::row_of(simt::self->lane, i), c = detail::col_of(simt::self->lane, i);
    (layout == mem_row_major ? tile[r * ldm + c] : tile[c * ldm + r]) = f.x[i];
  }
}

template <class Use, class T, class Layout>
void fill_fragment(fragment<Use, 16, 16, 16, T, Layout>& f, T value) {
  for (T& x : f.x) x = value;
}

// D = A @ B + C, rounded once if D is in fp16
template <class T, class Sum, class LayoutA, class LayoutB>
__attribute__((noinline)) void mma_sync(fragment<accumulator, 16, 16, 16, Sum>& d,
              const fragment<matrix_a, 16, 16, 16, T, LayoutA>& a,
              const fragment<matrix_b, 16, 16, 16, T, LayoutB>& b,
              const fragment<accumulator, 16, 16, 16, Sum>& c, SIMT_CALLER) {
  detail::MmaArgs<T, Sum> mine{a.x, b.x, c.x, d.x};
  simt::warp_collective(~0u, &mine, [](void* const args[32], unsigned) {
    float A[16][16], B[16][16], D[16][16];
    for (int lane = 0; lane < 32; lane++) {
      const auto& m = *static_cast<const detail::MmaArgs<T, Sum>*>(args[lane]);
      for (int i = 0; i < 8; i++) {
        const int r = detail::row_of(lane, i), col = detail::col_of(lane, i);
        A[r][col] = float(m.a[i]);
        B[r][col] = float(m.b[i]);
        D[r][col] = float(m.c[i]);
      }
    }
    for (int i = 0; i < 16; i++) {
      for (int k = 0; k < 16; k++) {
        for (int j = 0; j < 16; j++) D[i][j] += A[i][k] * B[k][j];
      }
    }
    for (int lane = 0; lane < 32; lane++) {
      const auto& m = *static_cast<const detail::MmaArgs<T, Sum>*>(args[lane]);
      for (int i = 0; i < 8; i++) m.d[i] = Sum(D[detail::row_of(lane, i)][detail::col_of(lane, i)]);
    }
  }, at);
}

}  // namespace wmma
}  // namespace nvcuda
