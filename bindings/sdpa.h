/* The C interface of a library that contains one line (configuration) of configs.txt. It can be called from C, from
   C++ without nvcc, through ctypes and from other languages.
   Build:  cmake --build build --target sdpa_NAME_lib    (creates build/libsdpa_NAME_lib.so), or with the line's knobs
           nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -DKNOB=VALUE ... -shared -Xcompiler -fPIC \
                bindings/library.cu -o libattention.so
   Every library has the same seven names, and those of lines with BACKWARD=1 have two more. A program that needs two
   lines opens each by dlopen(path, RTLD_NOW | RTLD_LOCAL).
   docs/USING.md has examples that run. */
#ifndef SDPA_H
#define SDPA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#ifdef __GNUC__ /* keeps the names visible with -fvisibility=hidden */
#pragma GCC visibility push(default)
#endif

typedef struct SdpaStrides { /* in elements; the D elements of a row are contiguous */
  int64_t batch, head, row;
} SdpaStrides;

/* Dequantization factors of an 8-bit tensor: element x of head (b, h) counts as x * factor[b * batch + h * head]. */
typedef struct SdpaDescale {
  const float* factor; /* in device memory, each 0 or more; null: 1. Q @ K.T without the factors must be finite */
  int64_t batch, head;
} SdpaDescale;

enum { SDPA_CAUSAL_OFF, SDPA_CAUSAL_BOTTOM_RIGHT, SDPA_CAUSAL_TOP_LEFT };

/* The problem. All pointers point to device memory. SdpaParams in sdpa.cu documents the limits of each member. */
typedef struct SdpaParams {
  const void *Q, *K, *V;   /* [B,Hq,Sq,D], [B,Hkv,Sk,D], [B,Hkv,Sk,Dv]; type DTYPE, or KV_DTYPE for K and V */
  void* O;                 /* [B,Hq,Sq,Dv]; type OUT_DTYPE */
  float* LSE;              /* [B,Hq,Sq] contiguous, natural logarithm; or null */
  int B, Hq, Hkv, Sq, Sk;  /* Hq is a multiple of Hkv */
  int D;                   /* the line's HEAD_DIM. USE_WGMMA=1: or less, a multiple of 8, or of 16 for 8-bit types */
  SdpaStrides q, k, v, o;  /* of inputs: may be 0; of O: at least Dv. Ignored for dimensions of size 1 */
  float scale;             /* 0: 1/sqrt(D). For equal weights of all visible keys (a scale of 0), pass FLT_MIN */
  int causal;              /* SDPA_CAUSAL_... */
  void* workspace;         /* sdpa_library_workspace_bytes(), 256-byte aligned, zeroed once; one per library and stream */
  int max_ctas;            /* lines with USE_PERSISTENT_CTA: upper limit of CTAs; 0: all that are resident */
  int window_left, window_right; /* keys that a query sees before and after its own position; -1: no limit */
  SdpaDescale q_descale, k_descale, v_descale;
  int window_alignment; /* the position that the window is relative to: SDPA_CAUSAL_...; OFF: that of causal */
  float softcap;        /* lines with USE_SOFTCAP: logits are softcap * tanh(x / softcap); 1e-18 to 1e18, 0: off */
  const float* sinks;   /* lines with USE_SINKS: [Hq]; exp(sink) is added to the row sum; or null */
  /* Lines with USE_LENGTHS; each array may be null. With q_starts or k_starts, the sequences of that side are
     packed into tensors with a batch size of 1: sequence b has the rows [starts[b], starts[b + 1]), and Sq or Sk
     is the total. With q_starts, LSE is [Hq,Sq]. O and LSE of rows that belong to no sequence are not written.
     Rows of K and V that are no key of a sequence may contain anything, including NaN. Rows of V that causal, the
     window, a bias or MASK_MOD hides must be finite: their weight is 0, and 0 * NaN gives NaN in O, as in
     PyTorch. */
  const int* k_lengths;             /* [B]: number of keys of each sequence; later keys are ignored */
  const int *q_starts, *k_starts;   /* [B + 1] */
  int most_keys;                    /* maximum number of keys per sequence; later keys are ignored; 0: Sk */
  /* Lines with USE_PAGES. K and V are [pages,Hkv,page_size,D]; their batch strides are the distance of two pages.
     Key k of sequence b is row k % page_size of page page_table[b * page_stride + k / page_size]. With
     USE_PAGES=1, page_size is a multiple of 16. */
  const int* page_table;
  int page_stride, page_size, pages;
  int Dv;                  /* D of V and O: the line's HEAD_DIM_V. USE_WGMMA=1: or less, as for D. 0: D */
  /* Lines with USE_BIAS; null: no bias. The bias has one row of elements per query of a sequence. A row is
     contiguous and covers the last bias_keys keys; earlier keys have no bias (0: the row covers all keys).
     Strides are in elements; 0 where batches, heads or queries share rows.
     USE_BIAS=1: elements of the line's DTYPE, added to scale * Q @ K.T after a softcap; -inf hides the key.
     USE_BIAS=2: bytes; 0 hides the key.
     USE_BIAS=3: as 1, with elements of type float.
     USE_BIAS=4, 5: as 1, 3, with one row per batch for all of its queries and heads: the strides of heads and rows
     are 0 where Hq and Sq are over 1, and bias_keys is 0.
     A tile that is hidden completely may be skipped, even if one of its scores is NaN. */
  const void* bias;
  SdpaStrides bias_strides;
  int bias_keys;
  void* bias_map;          /* from sdpa_library_map_bias(), 8-byte aligned. Null: a launch makes its own map
                              if all heads share it and there are at least 16 tiles of keys, or skips no tile */
  size_t bias_map_bytes;   /* sdpa_library_bias_map_bytes() */
  const int* q_lengths;    /* lines with USE_LENGTHS: [B], number of queries of each sequence; or null */
  int batch_invariant;     /* 1: the bits of a row do not depend on the rest of the batch; see docs/USING.md */
  /* Lines with SCORE_MOD or MASK_MOD: the arrays that the expressions name. Null for arrays that they do not
     name. */
  const float *x0, *x1, *x2, *x3;
  const int *i0, *i1;
  /* sdpa_library_scratch_bytes(), 256-byte aligned, any contents; used only by this launch. The workspace is then at most 64
     KB, and all libraries may share one workspace per stream. Null: scratch memory is part of the workspace. */
  void* scratch;
  /* Lines with USE_LENGTHS but without USE_PAGES=1: [B], number of keys to skip at the start of each sequence; or
     null. k_lengths and most_keys include the skipped keys. Key 0 is the first key that is not skipped. */
  const int* k_firsts;
  /* Lines with USE_KEY_MASK, or null: [B,Sk] bytes in device memory, of which 0 hides a key from all queries and heads of
     the batch. Any alignment, any stride from batch to batch; 0: they share the mask. Tiles without a visible key are left out. */
  const uint8_t* key_mask;
  int64_t key_mask_stride;
} SdpaParams;

/* Lines with BACKWARD=1: the gradients of a call of sdpa_library_forward(), of this library or of another one. */
typedef struct SdpaBackwardParams {
  const void* dO;                 /* [B,Hq,Sq,Dv] of OUT_DTYPE, the gradient of O */
  void *dQ, *dK, *dV;             /* like Q, K and V, written whole; no element of them may alias another tensor's.
                                     Rows that are no query or key of a sequence get 0 */
  SdpaStrides d_o, d_q, d_k, d_v; /* those of d_o may be 0; the others are at least the D or Dv of their rows */
  const float* dLSE;              /* [B,Hq,Sq] contiguous, the gradient of LSE; null: 0 */
  float* dSinks;                  /* lines with USE_SINKS: [Hq], written whole; or null */
  /* Lines with USE_BIAS=1 or 3: [B,Hq,Sq,keys] of the bias' type, written whole; or null. A row is contiguous and has
     bias_keys elements; if that is 0, Sk or most_keys elements, whichever is less. A stride of 0: the dimension has size
     1, and dBias is summed over it, in fp32 and in a fixed order. Other strides are at least the number of elements of
     a row. The strides of the bias may differ. Not with q_starts and k_starts, nor with bias_keys and any of k_lengths,
     k_firsts and most_keys. */
  void* dBias;
  SdpaStrides d_bias;
  int dBias_sums_keys;            /* 1: a row of dBias has one element, the sum over the keys; otherwise 0 */
  void* workspace;                /* sdpa_library_backward_workspace_bytes(), 256-byte aligned, any contents; one per stream */
  SdpaParams forward;             /* of that call; O and LSE are inputs here */
} SdpaBackwardParams;

struct CUstream_st; /* cudaStream_t is a pointer to it */

/* sizeof(SdpaParams) in the library. A caller in another language compares it with the size of its own struct. */
size_t sdpa_library_params_bytes(void);

/* Sets *p to the defaults: null pointers, sizes of 0, no mask, and no window. (All-zero bytes would mean a window
   of one key.) */
void sdpa_library_defaults(SdpaParams* p);

/* Size in bytes of p->workspace for this problem on the current device; smaller if p->scratch is set. 0: it may
   be null. */
size_t sdpa_library_workspace_bytes(const SdpaParams* p);

/* Size in bytes of p->scratch, if it is set. 0: it may be null. */
size_t sdpa_library_scratch_bytes(const SdpaParams* p);

/* Size in bytes of the map that lines with USE_BIAS=1, 2, 3 or MASK_MOD use to skip hidden tiles. 0: this problem has no
   map. */
size_t sdpa_library_bias_map_bytes(const SdpaParams* p);

/* Enqueues the kernel that writes p->bias_map. Make a new map when the contents of the bias change, or those of
   the arrays that MASK_MOD names. This is not checked: a launch with an old map skips the tiles that were hidden
   before. A map also depends on bias_keys and on which strides of the bias are 0; on B, Hq, Hkv, Sq, Sk, D and
   Dv; on causal, the window and its alignment; on batch_invariant; on the library and on the GPU. If one of these
   differs, a launch ignores the map and skips nothing: O is correct, but the launch takes longer. If
   bias_map_bytes differs, the launch is refused. A map does not depend on Q, K, V, O, scale and sinks. Returns
   the same values as sdpa_library_forward(). */
int sdpa_library_map_bias(const SdpaParams* p, struct CUstream_st* stream, char* text, size_t text_bytes);

/* Enqueues O, LSE = attention(Q, K, V) on the stream of the current device and returns without waiting. It
   allocates no memory and may be captured into a CUDA graph. Returns 0, or a cudaError_t and its reason in one
   sentence in `text`. At most text_bytes bytes are written, including the terminating 0; text may be null. */
int sdpa_library_forward(const SdpaParams* p, struct CUstream_st* stream, char* text, size_t text_bytes);

/* Lines with BACKWARD=1: bytes that SdpaBackwardParams::workspace must have for this problem; 0: it may be null. */
size_t sdpa_library_backward_workspace_bytes(const SdpaParams* forward);

/* Lines with BACKWARD=1: enqueues dQ, dK and dV of p->forward, and dSinks and dBias if they are set. LSE is a natural logarithm
   and includes the scale; for a row that sees no key, it is -inf or the row's sink, and dQ is 0. With ONE_PASS=1, or
   USE_WARP_SPECIALIZATION=1 without ORDERED_ADDS=1, the last bits of dQ differ from run to run. Otherwise like
   sdpa_library_forward(). */
int sdpa_library_backward(const SdpaBackwardParams* p, struct CUstream_st* stream, char* text, size_t text_bytes);

#ifdef __GNUC__
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
#endif
