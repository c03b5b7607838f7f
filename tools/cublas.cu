// The unfused baseline as a contender of tools/engine.py: both products by cuBLAS, S and P in global memory. It has the
// C functions of a line's library (tools/library.cu). `ab hopper cublas` times it, `cublas DTYPE=BF16 HEAD_DIM=128`
// likewise.
#define SDPA_NO_MAIN
#include "../sdpa.cu"

#include <cublas_v2.h>

namespace sdpa {
namespace {

struct Workspace {  // where things lie in SdpaParams::workspace, in bytes
  static constexpr size_t scores = 32 << 20;  // float [B,Hq,Sq,Sk], behind what cuBLAS recommends for sm_90
  size_t probabilities, bytes;                // Input, likewise
  __host__ __device__ explicit Workspace(const SdpaParams& p) {
    const size_t elements = size_t(p.B) * p.Hq * p.Sq * p.Sk;
    probabilities = scores + (elements * sizeof(float) + 255) / 256 * 256;
    bytes = probabilities + elements * sizeof(Input);
  }
  static float* S(const SdpaParams& p) {
    return reinterpret_cast<float*>(static_cast<unsigned char*>(p.workspace) + scores);
  }
  static Input* P(const SdpaParams& p) {
    return reinterpret_cast<Input*>(static_cast<unsigned char*>(p.workspace) + Workspace(p).probabilities);
  }
};

constexpr int rows_of_cta = 4;

// P[i,:] = softmax(scale * S[i,:] + mask) and LSE[i]: a warp to a query row.
__global__ void softmax_rows(SdpaParams p, KeyBounds keys, float scale_log2, const float* S, Input* P) {
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t(blockIdx.x) * rows_of_cta + threadIdx.x / 32;
  if (row >= int64_t(p.B) * p.Hq * p.Sq) return;
  S += row * p.Sk, P += row * p.Sk;
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
    P[k] = rounded<Input>(ex2_approx_ftz(t) * inverse);
  }
  constexpr float ln2 = 0.693147180559945f;
  if (p.LSE && lane == 0) p.LSE[row] = fmaf(m, scale_log2 * ln2, ln2 * log2f(l));
}

// The products of all heads of a batch, or with grouped queries of those that share a key head, in one call each.
// cuBLAS counts rows and columns the other way round, so that it sees S.T = K @ Q.T and O.T = V.T @ P.T.
struct Products {
  const SdpaParams& p;
  cublasHandle_t handle;
  static constexpr cudaDataType type = Build::input == DType::bf16 ? CUDA_R_16BF : CUDA_R_16F;

  static int64_t leading(const Strides& s) { return s.row > Build::head_dim ? s.row : int64_t(Build::head_dim); }
  template <class Call> cublasStatus_t for_each(const Call& call) const {
    const bool grouped = p.Hq != p.Hkv;
    const int groups = grouped ? p.Hkv : 1, heads = p.Hq / groups;
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    for (int b = 0; b < p.B; b++) {
      for (int g = 0; g < groups && status == CUBLAS_STATUS_SUCCESS; g++) {
        status = call(b, g, heads, grouped, (int64_t(b) * p.Hq + g * heads) * p.Sq * p.Sk);
      }
    }
    return status;
  }
  cublasStatus_t scores(float* S) const {
    const float one = 1, zero = 0;
    return for_each([&](int b, int g, int heads, bool grouped, int64_t first) {
      return cublasGemmStridedBatchedEx_64(
          handle, CUBLAS_OP_T, CUBLAS_OP_N, p.Sk, p.Sq, p.D, &one, p.K + b * p.k.batch + g * p.k.head, type,
          leading(p.k), grouped ? 0 : p.k.head, p.Q + b * p.q.batch + g * heads * p.q.head, type, leading(p.q),
          p.q.head, &zero, S + first, CUDA_R_32F, p.Sk, int64_t(p.Sq) * p.Sk, heads, CUBLAS_COMPUTE_32F,
          CUBLAS_GEMM_DEFAULT);
    });
  }
  cublasStatus_t output(const Input* P) const {
    const float one = 1, zero = 0;
    return for_each([&](int b, int g, int heads, bool grouped, int64_t first) {
      return cublasGemmStridedBatchedEx_64(
          handle, CUBLAS_OP_N, CUBLAS_OP_N, p.D, p.Sq, p.Sk, &one, p.V + b * p.v.batch + g * p.v.head, type,
          leading(p.v), grouped ? 0 : p.v.head, P + first, type, p.Sk, int64_t(p.Sq) * p.Sk, &zero,
          p.O + b * p.o.batch + g * heads * p.o.head, type, leading(p.o), p.o.head, heads, CUBLAS_COMPUTE_32F,
          CUBLAS_GEMM_DEFAULT);
    });
  }
};

// Its first call of a thread makes a handle, which allocates: it must not be captured.
SdpaStatus cublas_forward(const SdpaParams& params, cudaStream_t stream) {
  SdpaParams p = params;
  SdpaStatus status = check_params(p);
  if (!status.ok() || !p.B || !p.Hq || !p.Sq) return status;
  if (!p.Sk || !p.workspace) return failure(cudaErrorInvalidValue, "cublas wants keys, and a workspace");
  for (const Strides* s : {&p.q, &p.k, &p.v, &p.o}) {
    if (s->row && s->row < p.D) {
      return failure(cudaErrorInvalidValue, "cublas takes no rows that overlap or run backwards");
    }
  }
  thread_local cublasHandle_t handle = nullptr;
  cublasStatus_t done = handle ? CUBLAS_STATUS_SUCCESS : cublasCreate(&handle);
  if (done == CUBLAS_STATUS_SUCCESS) done = cublasSetStream(handle, stream);
  if (done == CUBLAS_STATUS_SUCCESS) done = cublasSetWorkspace(handle, p.workspace, Workspace::scores);
  const Products products{p, handle};
  if (done == CUBLAS_STATUS_SUCCESS) done = products.scores(Workspace::S(p));
  if (done == CUBLAS_STATUS_SUCCESS) {
    const int64_t rows = int64_t(p.B) * p.Hq * p.Sq;
    softmax_rows<<<unsigned(shares(rows, rows_of_cta)), 32 * rows_of_cta, 0, stream>>>(
        p, KeyBounds(p), log2_scale(p), Workspace::S(p), Workspace::P(p));
    const cudaError_t launched = cudaGetLastError();
    if (launched != cudaSuccess) return cuda_failure(launched, "launching the softmax");
    done = products.output(Workspace::P(p));
  }
  return done == CUBLAS_STATUS_SUCCESS ? SdpaStatus{}
                                       : failure(cudaErrorUnknown, "cuBLAS failed: %s", cublasGetStatusString(done));
}

}  // namespace
}  // namespace sdpa

extern "C" {

size_t sdpa_library_params_bytes() { return sizeof(sdpa::SdpaParams); }
size_t sdpa_library_workspace_bytes(const sdpa::SdpaParams* p) { return sdpa::Workspace(*p).bytes; }
int sdpa_library_forward(const sdpa::SdpaParams* p, cudaStream_t stream, char* text, size_t text_bytes) {
  const sdpa::SdpaStatus status = sdpa::cublas_forward(*p, stream);
  if (text && text_bytes) snprintf(text, text_bytes, "%s", status.text);
  return status.code;
}
}
