// The unfused baseline, a contender of tools/engine.py: both products by cuBLAS, with S and P in
// global memory. Exports the C functions of a line's library (bindings/library.cu). Requires
// contiguous, nonempty tensors. To time it: `ab hopper cublas`, or `cublas DTYPE=BF16
// HEAD_DIM=128`.
#define SDPA_NO_MAIN
#include "../sdpa.cu"

#include <cublas_v2.h>

namespace sdpa {
namespace {

// The workspace that cuBLAS recommends for sm_90. In SdpaParams::workspace it is followed by S,
// float [B,Hq,Sq,Sk], and P, of type KeyValue.
constexpr size_t cublas_bytes = 32 << 20;

size_t scores_of(const SdpaParams& p) { return size_t(p.B) * p.Hq * p.Sq * p.Sk; }
size_t bytes_before_P(const SdpaParams& p) { return cublas_bytes + (scores_of(p) * sizeof(float) + 255) / 256 * 256; }

constexpr int rows_of_cta = 4;

// P[i,:] = softmax(scale * S[i,:] + mask) and LSE[i]; a warp per query row.
__global__ void softmax_rows(SdpaParams p, KeyBounds keys, float scale_log2, const float* S, KeyValue* P) {
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t(blockIdx.x) * rows_of_cta + threadIdx.x / 32;
  if (row >= int64_t(p.B) * p.Hq * p.Sq) return;
  S += row * p.Sk;
  P += row * p.Sk;
  const int q = int(row % p.Sq), begin = keys.begin(q), end = keys.end(q);

  float m = -INFINITY, l = 0;
  for (int k = begin + lane; k < end; k += 32) m = fmaxf(m, S[k]);
  for (int other = 1; other < 32; other *= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, other));
  m = finite_max(m);
  for (int k = begin + lane; k < end; k += 32) l += ex2_approx_ftz((S[k] - m) * scale_log2);
  l = row_sum<32>(l);
  const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
  for (int k = lane; k < p.Sk; k += 32) {
    const float t = k >= begin && k < end ? (S[k] - m) * scale_log2 : -INFINITY;
    P[k] = rounded<KeyValue>(ex2_approx_ftz(t) * inverse);
  }
  constexpr float ln2 = 0.693147180559945f;
  if (p.LSE && lane == 0) p.LSE[row] = fmaf(m, scale_log2 * ln2, ln2 * log2f(l));
}

// The first call of a thread creates a handle, which allocates, so it must not be captured.
SdpaStatus cublas_forward(SdpaParams p, cudaStream_t stream) {
  const SdpaStatus status = check_params(p);
  if (!status.ok()) return status;
  thread_local cublasHandle_t handle = nullptr;
  cublasStatus_t done = handle ? CUBLAS_STATUS_SUCCESS : cublasCreate(&handle);
  if (done == CUBLAS_STATUS_SUCCESS) done = cublasSetStream(handle, stream);
  if (done == CUBLAS_STATUS_SUCCESS) done = cublasSetWorkspace(handle, p.workspace, cublas_bytes);

  constexpr cudaDataType type = Defines::kv_type == DType::bf16 ? CUDA_R_16BF : CUDA_R_16F;
  // C = A @ B for each key head. The rows of all of its query heads form one A [rows,K]; B is
  // [Sk,D] or its transpose. cuBLAS is column-major, so compute C.T = B.T @ A.T.
  const auto multiply = [&](const void* A, const void* B, cublasOperation_t of_B, int64_t K, void* C, int64_t columns,
                            cudaDataType type_of_C) {
    const float one = 1, zero = 0;
    const int64_t rows = int64_t(p.Hq / p.Hkv) * p.Sq;
    if (done != CUBLAS_STATUS_SUCCESS) return;
    done = cublasGemmStridedBatchedEx_64(handle, of_B, CUBLAS_OP_N, columns, rows, K, &one, B, type, p.D,
                                         int64_t(p.Sk) * p.D, A, type, K, rows * K, &zero, C, type_of_C,
                                         columns, rows * columns, int64_t(p.B) * p.Hkv, CUBLAS_COMPUTE_32F,
                                         CUBLAS_GEMM_DEFAULT);
  };
  unsigned char* const workspace = static_cast<unsigned char*>(p.workspace);
  float* const S = reinterpret_cast<float*>(workspace + cublas_bytes);
  KeyValue* const P = reinterpret_cast<KeyValue*>(workspace + bytes_before_P(p));
  multiply(p.Q, p.K, CUBLAS_OP_T, p.D, S, p.Sk, CUDA_R_32F);
  const unsigned ctas = unsigned(ceil_div(int64_t(p.B) * p.Hq * p.Sq, rows_of_cta));
  softmax_rows<<<ctas, 32 * rows_of_cta, 0, stream>>>(p, KeyBounds(p, p.Sq, p.Sk), scale_log2_of(p), S, P);
  const cudaError_t launched = cudaGetLastError();
  if (launched != cudaSuccess) return cuda_failure(launched, "launching the softmax");
  multiply(P, p.V, CUBLAS_OP_N, p.Sk, p.O, p.D, type);
  if (done == CUBLAS_STATUS_SUCCESS) return {};
  return failure(cudaErrorUnknown, "cuBLAS failed: %s", cublasGetStatusString(done));
}

}  // namespace
}  // namespace sdpa

extern "C" {

size_t sdpa_library_params_bytes() { return sizeof(sdpa::SdpaParams); }
size_t sdpa_library_workspace_bytes(const sdpa::SdpaParams* p) {
  return sdpa::bytes_before_P(*p) + sdpa::scores_of(*p) * sizeof(sdpa::KeyValue);
}
int sdpa_library_forward(const sdpa::SdpaParams* p, cudaStream_t stream, char* text, size_t text_bytes) {
  const sdpa::SdpaStatus status = sdpa::cublas_forward(*p, stream);
  if (text && text_bytes) snprintf(text, text_bytes, "%s", status.text);
  return status.code;
}
}
