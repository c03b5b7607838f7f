// ==== a program: one problem, checked against naive kernels and timed ============================
using namespace SPACE;
using Half = std::remove_pointer_t<decltype(SdpaGradients::dQ)>;
constexpr int64_t B = 2, H = 16, S = 2048, ROWS = B * H * S;
__managed__ Half Q[ROWS * D_QK], K[ROWS * D_QK], V[ROWS * DV], dO[ROWS * DV], O[ROWS * DV];  // [B,H,S,D] each
__managed__ Half gradients[3][ROWS * MOST];  // dQ, dK, dV
__managed__ float LSE[ROWS], naive_lse[ROWS], naive_delta[ROWS], expected[3][ROWS * MOST];
template <int D> __device__ float product(const Half* x, const Half* y) {
  float sum = 0;
  for (int d = 0; d < D; d++) sum += float(x[d]) * float(y[d]);
  return sum;
}
__global__ void naive_queries() {  // A thread has one query: LSE, delta and dQ.
  const int64_t q = blockIdx.x * 64 + threadIdx.x, first = q / S * S;
  float m = -INFINITY, l = 0, o[DV] = {}, dQ[D_QK] = {}, delta = 0;
  for (int64_t k = first; k < first + S; k++) {
    const float score = product<D_QK>(Q + q * D_QK, K + k * D_QK) * rsqrtf(D_QK);
    const float m_new = fmaxf(m, score), alpha = expf(m - m_new), weight = expf(score - m_new);
    for (int d = 0; d < DV; d++) o[d] = o[d] * alpha + weight * float(V[k * DV + d]);
    m = m_new;
    l = l * alpha + weight;
  }
  const float lse = m + logf(l);
  for (int d = 0; d < DV; d++) delta += o[d] / l * float(dO[q * DV + d]);
  for (int64_t k = first; k < first + S; k++) {
    const float weight = expf(product<D_QK>(Q + q * D_QK, K + k * D_QK) * rsqrtf(D_QK) - lse);
    const float dS = weight * (product<DV>(dO + q * DV, V + k * DV) - delta) * rsqrtf(D_QK);
    for (int d = 0; d < D_QK; d++) dQ[d] += dS * float(K[k * D_QK + d]);
  }
  naive_lse[q] = lse;
  naive_delta[q] = delta;
  for (int d = 0; d < D_QK; d++) expected[0][q * D_QK + d] = dQ[d];
}
__global__ void naive_keys() {  // A thread has one key: dK and dV.
  const int64_t k = blockIdx.x * 64 + threadIdx.x, first = k / S * S;
  float dK[D_QK] = {}, dV[DV] = {};
  for (int64_t q = first; q < first + S; q++) {
    const float weight = expf(product<D_QK>(Q + q * D_QK, K + k * D_QK) * rsqrtf(D_QK) - naive_lse[q]);
    const float dS = weight * (product<DV>(dO + q * DV, V + k * DV) - naive_delta[q]) * rsqrtf(D_QK);
    for (int d = 0; d < D_QK; d++) dK[d] += dS * float(Q[q * D_QK + d]);
    for (int d = 0; d < DV; d++) dV[d] += weight * float(dO[q * DV + d]);
  }
  for (int d = 0; d < D_QK; d++) expected[1][k * D_QK + d] = dK[d];
  for (int d = 0; d < DV; d++) expected[2][k * DV + d] = dV[d];
}
int main(int words, char**) {
  if (words > 1) {
    printf("this program takes no arguments: it checks and times B=%d, H=%d, Sq=Sk=%d\n", int(B), int(H), int(S));
    return 2;
  }
  cudaFuncAttributes known;  // none where the GPU cannot run what this was compiled for
  if (const cudaError_t error = cudaFuncGetAttributes(&known, naive_keys)) {
    puts(cudaGetErrorString(error));
    return 1;
  }
  const auto draw = [](Half* x, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] = Half(float(rand()) / RAND_MAX * 4 - 2);
  };
  draw(Q, ROWS * D_QK);
  draw(K, ROWS * D_QK);
  draw(V, ROWS * DV);
  draw(dO, ROWS * DV);
  SdpaBackwardParams p{};
  SdpaParams& f = p.forward;
  f.Q = Q;
  f.K = K;
  f.V = V;
  f.O = O;
  f.LSE = LSE;
  f.B = B;
  f.Hq = f.Hkv = H;
  f.Sq = f.Sk = S;
  f.D = D_QK;
  f.q = f.k = p.d_q = p.d_k = {H * S * D_QK, S * D_QK, D_QK};
  f.v = f.o = p.d_o = p.d_v = {H * S * DV, S * DV, DV};
  p.dO = dO;
  p.dQ = gradients[0];
  p.dK = gradients[1];
  p.dV = gradients[2];
  if (const size_t bytes = sdpa_workspace_bytes(f)) {
    cudaMalloc(&f.workspace, bytes);
    cudaMemset(f.workspace, 0, bytes);
  }
  cudaMalloc(&p.workspace, sdpa_backward_workspace_bytes(f));
  cudaEvent_t start, end;
  cudaEventCreate(&start);
  cudaEventCreate(&end);
  SdpaStatus status = sdpa_forward(f, nullptr);
  for (int n = -3; n < 20 && status.ok(); n++) {
    if (n == 0) cudaEventRecord(start);
    status = sdpa_backward(p, nullptr);
  }
  if (!status.ok()) {
    puts(status.text);
    return 1;
  }
  cudaEventRecord(end);
  naive_queries<<<ROWS / 64, 64>>>();
  naive_keys<<<ROWS / 64, 64>>>();
  if (const cudaError_t error = cudaDeviceSynchronize()) {
    puts(cudaGetErrorString(error));
    return 1;
  }
  float ms, wrong = 0;
  cudaEventElapsedTime(&ms, start, end);
  const int64_t counts[] = {ROWS * D_QK, ROWS * D_QK, ROWS * DV};
  for (int g = 0; g < 3; g++) {
    float largest = 0;
    for (int64_t i = 0; i < counts[g]; i++) largest = fmaxf(largest, fabsf(expected[g][i]));
    for (int64_t i = 0; i < counts[g]; i++) {
      wrong += !(fabsf(float(gradients[g][i]) - expected[g][i]) <= TOLERANCE * largest);
    }
  }
  printf("%.1f us, %.1f TFLOP/s, %.0f wrong\n", ms * 50, 4e-8 * ROWS * S * (3 * D_QK + 2 * DV) / ms, wrong);
  return wrong > 0;
}
