/* bindings/append.cu's function, which pytorch.cpp calls. */
#ifndef SDPA_APPEND_H
#define SDPA_APPEND_H

#include <stdint.h>

/* New rows, [B,new_rows,heads] or with starts [new_rows,heads] of `bytes` each, and caches or pages [count,keys,heads].
   Strides are in bytes. */
typedef struct SdpaNewRows {
  const char* source;
  char* target;
  int64_t source_sequence, source_row, source_head, target_cache, target_row, target_head;
  int bytes;
} SdpaNewRows;

/* All pointers are to device memory. */
typedef struct SdpaAppend {
  SdpaNewRows k, v;
  int B, heads, new_rows;
  int count, keys;                 /* caches or pages, and rows of each */
  const int* lengths;              /* [B]: rows that a sequence has */
  int* new_lengths;                /* [B]: with the new ones */
  const int* starts;               /* [B + 1], or null: the new rows of b are those from starts[b] to starts[b + 1] */
  const int* page_table;           /* [B,pages of a sequence] at page_stride, or null */
  int page_stride, sequence_pages;
} SdpaAppend;

struct CUstream_st; /* cudaStream_t is a pointer to it */
#ifdef __cplusplus
extern "C"
#endif
/* Enqueues the kernel on the current device; returns a cudaError_t. */
int sdpa_append(const SdpaAppend* a, struct CUstream_st* stream);

#endif
