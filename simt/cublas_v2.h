// Stands in for cuBLAS on the CPU: the one product that sdpa.cu asks for, column-major as cuBLAS has it,
// summed in fp32 in the order of k.
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

using cublasHandle_t = struct cublasContext*;
enum cublasStatus_t { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_INVALID_VALUE = 7 };
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68 };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1 };
enum cudaDataType { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 };

inline cublasStatus_t cublasCreate(cublasHandle_t*) { return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasDestroy(cublasHandle_t) { return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSetStream(cublasHandle_t, cudaStream_t) {
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetWorkspace(cublasHandle_t, void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
inline const char* cublasGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_INVALID_VALUE";
}

namespace simt {

inline float cublas_load(const void* p, cudaDataType type, int64_t i) {
  if (type == CUDA_R_16F) return static_cast<float>(static_cast<const __half*>(p)[i]);
  if (type == CUDA_R_16BF) return static_cast<float>(static_cast<const __nv_bfloat16*>(p)[i]);
  return static_cast<const float*>(p)[i];
}

inline void cublas_store(void* p, cudaDataType type, int64_t i, float x) {
  if (type == CUDA_R_16F) {
    static_cast<__half*>(p)[i] = static_cast<__half>(x);
  } else if (type == CUDA_R_16BF) {
    static_cast<__nv_bfloat16*>(p)[i] = static_cast<__nv_bfloat16>(x);
  } else {
    static_cast<float*>(p)[i] = x;
  }
}

}  // namespace simt

// C = alpha * op(A) @ op(B) + beta * C for `count` matrices: op(A) [m,k], op(B) [k,n], C [m,n].
inline cublasStatus_t cublasGemmStridedBatchedEx_64(
    cublasHandle_t, cublasOperation_t op_a, cublasOperation_t op_b, int64_t m, int64_t n, int64_t k,
    const void* alpha, const void* A, cudaDataType type_a, int64_t ld_a, int64_t stride_a,
    const void* B, cudaDataType type_b, int64_t ld_b, int64_t stride_b, const void* beta, void* C,
    cudaDataType type_c, int64_t ld_c, int64_t stride_c, int64_t count, cublasComputeType_t,
    cublasGemmAlgo_t) {
  const int64_t rows_a = op_a == CUBLAS_OP_N ? m : k, rows_b = op_b == CUBLAS_OP_N ? k : n;
  if (m < 0 || n < 0 || k < 0 || count < 0 || ld_a < std::max<int64_t>(1, rows_a) ||
      ld_b < std::max<int64_t>(1, rows_b) || ld_c < std::max<int64_t>(1, m)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  const float scale = *static_cast<const float*>(alpha), keep = *static_cast<const float*>(beta);
  for (int64_t batch = 0; batch < count; batch++) {
    for (int64_t j = 0; j < n; j++) {
      for (int64_t i = 0; i < m; i++) {
        float sum = 0;
        for (int64_t l = 0; l < k; l++) {
          const int64_t at_a = op_a == CUBLAS_OP_N ? l * ld_a + i : i * ld_a + l;
          const int64_t at_b = op_b == CUBLAS_OP_N ? j * ld_b + l : l * ld_b + j;
          sum += simt::cublas_load(A, type_a, batch * stride_a + at_a) *
                 simt::cublas_load(B, type_b, batch * stride_b + at_b);
        }
        const int64_t at_c = batch * stride_c + j * ld_c + i;
        const float old = keep == 0 ? 0 : keep * simt::cublas_load(C, type_c, at_c);
        simt::cublas_store(C, type_c, at_c, scale * sum + old);
      }
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}
