// ==== a program: one problem, checked against a naive kernel and timed ===========================
using namespace SPACE;
constexpr int64_t B = 2, H = 16, S = 2048, ROWS = B * H * S;
__managed__ KeyValue qkv[3][ROWS * MOST];  // [B,H,S,D] each
__managed__ Output O[ROWS * DV];
__managed__ float expected[ROWS * DV];
__global__ void naive() {  // A thread has one query.
  const int64_t row = blockIdx.x * 64 + threadIdx.x, q = row * D_QK, first = row / S * S;
  float m = -INFINITY, l = 0, sums[DV] = {};
  for (int64_t k = first; k < first + S; k++) {
    float score = 0;
    for (int d = 0; d < D_QK; d++) score += NUMBER(QUERIES[q + d]) * NUMBER(qkv[1][k * D_QK + d]);
    const float m_new = fmaxf(m, score *= rsqrtf(D_QK)), alpha = expf(m - m_new), weight = expf(score - m_new);
    for (int d = 0; d < DV; d++) sums[d] = sums[d] * alpha + weight * NUMBER(qkv[2][k * DV + d]);
    m = m_new;
    l = l * alpha + weight;
  }
  for (int d = 0; d < DV; d++) expected[row * DV + d] = sums[d] / l;
}
int main(int words, char**) {
  if (words > 1) {
    printf("this program takes no arguments: it checks and times B=%d, H=%d, Sq=Sk=%d\n", int(B), int(H), int(S));
    return 2;
  }
  cudaFuncAttributes known;  // none where the GPU cannot run what this was compiled for
  if (const cudaError_t error = cudaFuncGetAttributes(&known, naive)) {
    puts(cudaGetErrorString(error));
    return 1;
  }
  for (size_t i = 0; i < sizeof qkv; i++) ((unsigned char*)qkv)[i] = LAST ? (rand() & 0x87) | 0x30 : rand();
  SdpaParams p{};
  p.Q = QUERIES;
  p.K = qkv[1];
  p.V = qkv[2];
  p.O = O;
  p.B = B;
  p.Hq = p.Hkv = H;
  p.Sq = p.Sk = S;
  p.D = D_QK;
  p.q = p.k = {H * S * D_QK, S * D_QK, D_QK};
  p.v = p.o = {H * S * DV, S * DV, DV};
  if (const size_t bytes = sdpa_workspace_bytes(p)) {
    cudaMalloc(&p.workspace, bytes);
    cudaMemset(p.workspace, 0, bytes);
  }
  cudaEvent_t start, end;
  cudaEventCreate(&start);
  cudaEventCreate(&end);
  for (int n = -3; n < 20; n++) {
    if (n == 0) cudaEventRecord(start);
    if (const SdpaStatus status = sdpa_forward(p, nullptr); !status.ok()) {
      puts(status.text);
      return 1;
    }
  }
  cudaEventRecord(end);
  naive<<<ROWS / 64, 64>>>();
  if (const cudaError_t error = cudaDeviceSynchronize()) {
    puts(cudaGetErrorString(error));
    return 1;
  }
  float ms, largest = 0, wrong = 0;
  cudaEventElapsedTime(&ms, start, end);
  for (float x : expected) largest = fmaxf(largest, fabsf(x));
  for (int64_t i = 0; i < ROWS * DV; i++) wrong += !(fabsf(float(O[i]) - expected[i]) <= TOLERANCE * largest);
  printf("%.1f us, %.1f TFLOP/s, %.0f wrong\n", ms * 50, 4e-8 * ROWS * S * (D_QK + DV) / ms, wrong);
  return wrong > 0;
}
