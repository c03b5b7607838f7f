// How a project that pastes the kernel uses it: set the knobs, include the file (or paste the
// marked region), fill in SdpaParams, call sdpa_forward. A second build with other knobs lives in
// paste_second.cu, in the same program. Exit 77: no GPU to run on.
#define SDPA_NO_MAIN
#define SDPA_NAMESPACE attention64  // only needed because there are two builds in this program
#define HEAD_DIM 64
#define BLOCK_N 64
#define VEC_WIDTH 8
#define SYNC_POLICY 1
#include "../sdpa.cu"

#include <vector>

int run_second_build();  // paste_second.cu; 0 if its result is right

int main() {
  using namespace attention64;
  const int B = 1, H = 2, S = 100, D = 64;
  const size_t n = size_t(B) * H * S * D;
  // Q = 0 gives equal weights: every row of O is the mean of V, here the mean of 0..99 in each head.
  std::vector<Element> Q(n, Element(0.0f)), K(n, Element(1.0f)), V(n), O(n);
  for (size_t i = 0; i < n; i++) V[i] = Element(float(i / D % S));

  SdpaParams p{};
  Element *Q_g = nullptr, *K_g = nullptr, *V_g = nullptr;
  if (cudaMalloc(&Q_g, n * sizeof(Element)) != cudaSuccess) {
    printf("no GPU: compiled and linked, not run\n");
    return 77;
  }
  cudaMalloc(&K_g, n * sizeof(Element));
  cudaMalloc(&V_g, n * sizeof(Element));
  cudaMalloc(&p.O, n * sizeof(Element));
  cudaMemcpy(Q_g, Q.data(), n * sizeof(Element), cudaMemcpyHostToDevice);
  cudaMemcpy(K_g, K.data(), n * sizeof(Element), cudaMemcpyHostToDevice);
  cudaMemcpy(V_g, V.data(), n * sizeof(Element), cudaMemcpyHostToDevice);
  p.Q = Q_g, p.K = K_g, p.V = V_g;
  p.B = B, p.Hq = p.Hkv = H, p.Sq = p.Sk = S, p.D = D;
  p.q = p.k = p.v = p.o = {int64_t(H) * S * D, int64_t(S) * D, D};  // [B,H,S,D]
  if (const size_t bytes = sdpa_workspace_bytes(p)) {  // of a persistent build, for one
    cudaMalloc(&p.workspace, bytes);
    cudaMemset(p.workspace, 0, bytes);
  }

  const SdpaStatus status = sdpa_forward(p, /*stream=*/0);
  if (!status.ok()) {
    printf("%s\n", status.text);
    return 1;
  }
  if (cudaMemcpy(O.data(), p.O, n * sizeof(Element), cudaMemcpyDeviceToHost) != cudaSuccess)
    return 1;
  for (size_t i = 0; i < n; i++) {
    if (!(std::fabs(float(O[i]) - 49.5f) <= 0.05f)) {
      printf("O[%zu] = %g, want 49.5\n", i, double(float(O[i])));
      return 1;
    }
  }
  return run_second_build();
}
