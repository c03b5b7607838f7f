// Appends new rows of K and V to caches and writes the new lengths: flash_attn_with_kvcache(k=, v=) in one launch. The kernel
// reads the lengths from device memory, so that the host does not wait and a graph may be replayed with other lengths. Starts
// are clamped to the new rows. Rows past the end of a cache, and rows of pages that do not exist, are not written.
#include <cuda_runtime.h>

#include "append.h"

namespace sdpa {

constexpr int threads = 128, most_ctas = 4096;

// Copies a row of all heads. All threads of the CTA call it.
template <class Word> static __device__ void copy_row(const SdpaNewRows& x, int heads, const char* from, char* to) {
  const int words = x.bytes / int(sizeof(Word));
  for (int i = int(threadIdx.x); i < heads * words; i += threads) {
    const int head = i / words, word = i % words;
    const Word* const source = reinterpret_cast<const Word*>(from + head * x.source_head) + word;
    reinterpret_cast<Word*>(to + head * x.target_head)[word] = *source;
  }
}

// CTA (b, i, 0 or 1) writes every gridDim.y-th new row of sequence b, of K or of V.
template <class Word> static __global__ void __launch_bounds__(threads) append(SdpaAppend a) {
  const int b = int(blockIdx.x), before = a.lengths[b];
  const int first = a.starts ? max(a.starts[b], 0) : 0;
  const int rows = a.starts ? max(min(a.starts[b + 1], a.new_rows) - first, 0) : a.new_rows;
  const SdpaNewRows& x = blockIdx.z == 0 ? a.k : a.v;
  if (blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0) a.new_lengths[b] = before + rows;
  for (int i = int(blockIdx.y); i < rows; i += int(gridDim.y)) {
    int cache = b, row = before + i;
    if (a.page_table) {
      if (row < 0 || row / a.keys >= a.sequence_pages) continue;
      cache = a.page_table[int64_t(b) * a.page_stride + row / a.keys];
      row %= a.keys;
    }
    if (row < 0 || row >= a.keys || cache < 0 || cache >= a.count) continue;
    const char* const from = x.source + (a.starts ? 0 : b * x.source_sequence) + (first + i) * x.source_row;
    copy_row<Word>(x, a.heads, from, x.target + cache * x.target_cache + row * x.target_row);
  }
}

}  // namespace sdpa

extern "C" int sdpa_append(const SdpaAppend* a, CUstream_st* stream) {
  if (a->B == 0) return cudaSuccess;
  int64_t all = 0;  // its lowest set bit is the alignment of all addresses, strides and sizes
  for (const SdpaNewRows* x : {&a->k, &a->v}) {
    all |= int64_t(x->source) | int64_t(x->target) | x->bytes;
    all |= x->source_sequence | x->source_row | x->source_head | x->target_cache | x->target_row | x->target_head;
  }
  const unsigned parts = unsigned(min(max(a->new_rows, 1), max(sdpa::most_ctas / a->B, 1)));
  const cudaLaunchConfig_t launch{dim3(unsigned(a->B), parts, 2), dim3(sdpa::threads), 0, stream, nullptr, 0};
  return all % 16 == 0  ? cudaLaunchKernelEx(&launch, sdpa::append<uint4>, *a)
         : all % 2 == 0 ? cudaLaunchKernelEx(&launch, sdpa::append<unsigned short>, *a)
                        : cudaLaunchKernelEx(&launch, sdpa::append<char>, *a);
}
