/* The function of bindings/append.cu, which pytorch.cpp calls. */
#ifndef SDPA_APPEND_H
#define SDPA_APPEND_H

#include <stdint.h>

/* New rows, [B,new_rows,heads] or with starts [new_rows,heads], and caches or pages, [count,keys,heads]. A row of a head has
   `bytes` bytes. Strides are in bytes. */
typedef struct SdpaNewRows {
  const char* source;
  char* target;
  int64_t source_sequence, source_row, source_head, target_cache, target_row, target_head;
  int bytes;
} SdpaNewRows;

/* All pointers point to device memory. */
typedef struct SdpaAppend {
  SdpaNewRows k, v;
  int B, heads, new_rows;
  int count, keys;                 /* number of caches or pages, and of rows in each */
  const int* lengths;              /* [B]: number of rows of each sequence before the call */
  int* new_lengths;                /* [B]: number of rows after the call */
  const int* starts;               /* [B + 1]: sequence b has the new rows [starts[b], starts[b + 1]); or null */
  const int* page_table;           /* [B,sequence_pages] with row stride page_stride; or null */
  int page_stride, sequence_pages;
} SdpaAppend;

struct CUstream_st; /* cudaStream_t is a pointer to it */
#ifdef __cplusplus
extern "C"
#endif
/* Enqueues the kernel on the current device; returns a cudaError_t. */
int sdpa_append(const SdpaAppend* a, struct CUstream_st* stream);

#endif
