/* One line of configs.txt as a library with C functions: what C, C++ without nvcc, ctypes and other languages call.
   Build:  cmake --build build --target sdpa_NAME_lib    (build/libsdpa_NAME_lib.so), or by hand with the line's knobs
           nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -DKNOB=VALUE ... -shared -Xcompiler -fPIC \
                bindings/library.cu -o libattention.so
   Every library has the same seven names. A program that needs two lines opens each by dlopen(path, RTLD_LOCAL).
   docs/USING.md has examples that run. */
#ifndef SDPA_H
#define SDPA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#ifdef __GNUC__ /* also where a project hides its symbols */
#pragma GCC visibility push(default)
#endif

typedef struct SdpaStrides { /* in elements; the D elements of a row are contiguous */
  int64_t batch, head, row;
} SdpaStrides;

typedef struct SdpaDescale { /* of 8-bit tensors: element (b, h, ...) stands for itself * factor[b * batch + h * head] */
  const float* factor;       /* in device memory, none negative; null: 1. Q @ K.T without it must be finite too */
  int64_t batch, head;
} SdpaDescale;

enum { SDPA_CAUSAL_OFF, SDPA_CAUSAL_BOTTOM_RIGHT, SDPA_CAUSAL_TOP_LEFT };

/* The problem. sdpa.cu's SdpaParams says of each member what it may hold; all pointers are to device memory. */
typedef struct SdpaParams {
  const void *Q, *K, *V;   /* [B,Hq,Sq,D], [B,Hkv,Sk,D], [B,Hkv,Sk,D] of the line's DTYPE; K, V of its KV_DTYPE */
  void* O;                 /* [B,Hq,Sq,D] of OUT_DTYPE */
  float* LSE;              /* [B,Hq,Sq] contiguous, natural logarithm; or null */
  int B, Hq, Hkv, Sq, Sk;  /* Hq is a multiple of Hkv; strides of inputs may be 0 */
  int D;                   /* the line's HEAD_DIM; of a line with USE_WGMMA=1 or fewer, a multiple of 8, of 8 bits of 16 */
  SdpaStrides q, k, v, o;
  float scale;             /* 0: 1/sqrt(D). A scale of 0, by which all visible keys weigh alike, is FLT_MIN */
  int causal;              /* SDPA_CAUSAL_... */
  void* workspace;         /* sdpa_library_workspace_bytes(), zeroed once; one per library and stream */
  int max_ctas;            /* 0: all that fit */
  int window_left, window_right; /* keys that a query sees before and after its own position; -1: all */
  SdpaDescale q_descale, k_descale, v_descale;
  int window_alignment; /* whose position the window counts from: SDPA_CAUSAL_...; OFF: that of causal */
  float softcap;        /* lines with USE_SOFTCAP: x becomes softcap * tanh(x / softcap), 1e-18 to 1e18; 0: x */
  const float* sinks;   /* lines with USE_SINKS: [Hq], exp(sink) joins the sum of a row; or null */
  /* Lines with USE_LENGTHS, in device memory, each or null. Sequence b has the rows from starts[b] to starts[b + 1] of Sq
     or Sk in all; such tensors have a batch of 1, and LSE is [Hq,Sq]. O and LSE of rows of no sequence stay as they are.
     Rows of K and V that are no key of a sequence may hold anything, NaN too. Rows that causal, the window, a bias or
     MASK_MOD hides must be finite in V: their weight is 0, and 0 * NaN is NaN in O, as in PyTorch. */
  const int* k_lengths;             /* [B]: of its keys the first so many count */
  const int *q_starts, *k_starts;   /* [B + 1] */
  int most_keys;                    /* that a sequence has, later ones do not count; 0: Sk */
  /* Lines with USE_PAGES: key k of sequence b is row k % page_size of page page_table[b * page_stride + k / page_size] of K
     and V [pages,Hkv,page_size,D], whose batch strides go from page to page. With USE_PAGES=1 page_size is a multiple of 16. */
  const int* page_table;
  int page_stride, page_size, pages;
  int Dv;                  /* of V and O, to the line's HEAD_DIM_V as D to HEAD_DIM; 0: D */
  /* Lines with USE_BIAS, or null: a row of elements for each query of a sequence, contiguous along its last bias_keys keys (0:
     all; keys before them have none), at strides in elements, 0 where batches, heads or queries share rows. USE_BIAS=1: of
     the line's DTYPE, added to scale * Q @ K.T, behind a softcap; -inf hides the key. USE_BIAS=3: the same in float32.
     USE_BIAS=2: bytes, of which 0 hides the key. A tile that is hidden whole may be left out, even where a score is NaN. */
  const void* bias;
  SdpaStrides bias_strides;
  int bias_keys;
  void* bias_map;          /* of sdpa_library_map_bias(), aligned to 8 bytes, for several launches; null: each makes its own */
  size_t bias_map_bytes;   /* sdpa_library_bias_map_bytes() */
  const int* q_lengths;    /* lines with USE_LENGTHS, [B] in device memory: of its queries the first so many count; or null */
  int batch_invariant;     /* 1: a row's bits are the same whatever sequences are in the batch with it, see docs/USING.md */
  /* Lines with SCORE_MOD or MASK_MOD: the arrays that the expressions name, in device memory; null if they are not named. */
  const float *x0, *x1, *x2, *x3;
  const int *i0, *i1;
  /* sdpa_library_scratch_bytes(), with any contents, which only this launch uses; the workspace is then 64 KB or less, and
     all libraries may share one per stream. Null: the scratch memory is a part of the workspace. */
  void* scratch;
  const int* k_firsts;     /* lines with USE_LENGTHS but not USE_PAGES=1, [B] in device memory: of the keys that k_lengths and
                              most_keys leave, the first so many do not count either, and key 0 is the next one; or null */
  /* Lines with USE_KEY_MASK, or null: [B,Sk] bytes in device memory, of which 0 hides a key from all queries and heads of
     the batch. Any alignment, any stride from batch to batch; 0: they share the mask. Tiles without a visible key are left out. */
  const uint8_t* key_mask;
  int64_t key_mask_stride;
} SdpaParams;

struct CUstream_st; /* cudaStream_t is a pointer to it */

/* sizeof(SdpaParams) in the library, for a caller in another language to compare with its own. */
size_t sdpa_library_params_bytes(void);

/* Fills *p: no tensor, no size, no mask, no limit of the window. Zeros alone would be a window of one key. */
void sdpa_library_defaults(SdpaParams* p);

/* Bytes that p->workspace must have for this problem, on the current device, fewer if p->scratch is set; 0: it may be
   null. */
size_t sdpa_library_workspace_bytes(const SdpaParams* p);

/* Bytes that p->scratch must have if it is set; 0: it may be null. */
size_t sdpa_library_scratch_bytes(const SdpaParams* p);

/* Bytes of the map by which lines with USE_BIAS or MASK_MOD skip hidden tiles; 0: this problem has none. */
size_t sdpa_library_bias_map_bytes(const SdpaParams* p);

/* Enqueues the kernel that writes p->bias_map. Make a new map when the contents of the bias change, or those of the arrays
   that MASK_MOD names: nothing checks them, and a launch with an old map skips the tiles that were hidden then. A map also
   depends on bias_keys and on which strides of the bias are 0; on B, Hq, Hkv, Sq, Sk, D and Dv; on causal, the window and its
   alignment; on batch_invariant; on the library and on the GPU. A launch in which these differ ignores the map and skips
   nothing (or is refused if bias_map_bytes differs): O is right, but the launch takes longer. Q, K, V, O, scale and sinks do
   not matter. Returns as sdpa_library_forward() does. */
int sdpa_library_map_bias(const SdpaParams* p, struct CUstream_st* stream, char* text, size_t text_bytes);

/* Enqueues O, LSE = attention(Q, K, V) on the stream of the current device, and returns at once. Allocates nothing, and
   may be captured into a CUDA graph. Returns 0, or a cudaError_t with one sentence in text (text_bytes of it at most,
   ended by 0; text may be null). */
int sdpa_library_forward(const SdpaParams* p, struct CUstream_st* stream, char* text, size_t text_bytes);

#ifdef __GNUC__
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
#endif
