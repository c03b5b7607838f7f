// Stands in for cuBLAS on the CPU: the one product that sdpa.cu asks for, column-major as cuBLAS has it,
// summed in fp32 in the order of k.
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

#include <deque>
#include <mutex>

struct cublasContext {
  int device;
  cudaStream_t stream;
  bool destroyed;
};
using cublasHandle_t = cublasContext*;
enum cublasStatus_t {
  CUBLAS_STATUS_SUCCESS = 0,
  CUBLAS_STATUS_NOT_INITIALIZED = 1,
  CUBLAS_STATUS_ALLOC_FAILED = 3,
  CUBLAS_STATUS_INVALID_VALUE = 7,
  CUBLAS_STATUS_EXECUTION_FAILED = 13,
};
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68 };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1 };
enum cudaDataType { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 };

inline const char* cublasGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
  }
  return "unknown";
}

namespace simt {

// Ends the program if the handle is gone: the program would go wrong anywhere.
inline void check_handle(const char* function, cublasHandle_t handle) {
  if (handle && !handle->destroyed) return;
  fprintf(stderr, "simt: %s of a cuBLAS handle that %s\n", function,
          handle ? "was destroyed before" : "is null");
  abort();
}

// Of a call with this handle, which works on one device alone.
inline cublasStatus_t handle_status(const char* function, cublasHandle_t handle) {
  check_handle(function, handle);
  if (const int planned = planned_failure(function)) return static_cast<cublasStatus_t>(planned);
  return handle->device == current_device ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // namespace simt

inline cublasStatus_t cublasCreate(cublasHandle_t* handle) {
  static std::mutex mutex;
  static std::deque<cublasContext> contexts;  // kept, so that one that was destroyed is known
  if (const int planned = simt::planned_failure(__func__)) {
    return static_cast<cublasStatus_t>(planned);
  }
  const std::lock_guard<std::mutex> lock(mutex);
  contexts.push_back({simt::current_device, nullptr, false});
  return *handle = &contexts.back(), CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasDestroy(cublasHandle_t handle) {
  simt::check_handle(__func__, handle);
  return handle->destroyed = true, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
  const cublasStatus_t status = simt::handle_status(__func__, handle);
  if (status == CUBLAS_STATUS_SUCCESS) handle->stream = stream;
  return status;
}
inline cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void*, size_t) {
  return simt::handle_status(__func__, handle);
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
    cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int64_t m, int64_t n, int64_t k,
    const void* alpha, const void* A, cudaDataType type_a, int64_t ld_a, int64_t stride_a,
    const void* B, cudaDataType type_b, int64_t ld_b, int64_t stride_b, const void* beta, void* C,
    cudaDataType type_c, int64_t ld_c, int64_t stride_c, int64_t count, cublasComputeType_t,
    cublasGemmAlgo_t) {
  const cublasStatus_t status = simt::handle_status(__func__, handle);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  simt::synchronise(handle->stream);
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
