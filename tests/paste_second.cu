// The marked region of sdpa.cu on its own (test_paste.py cuts it out into pasted_region.cuh), with other knobs than
// the example of docs/USING.md, in the same program.
#define SDPA_NAMESPACE attention128
#define HEAD_DIM 128
#define DTYPE BF16
#define USE_WMMA 1
#define NUM_WARPS 2
#define USE_PERSISTENT_CTA 1
#include "pasted_region.cuh"

#include <vector>

int run_second_build() {
  using namespace attention128;
  const int S = 50, D = 128;
  const std::vector<KeyValue> ones(S * D, KeyValue(1.0f));
  std::vector<Output> O(S * D);
  SdpaParams p{};
  KeyValue* Q = nullptr;
  cudaMalloc(&Q, ones.size() * sizeof(KeyValue));
  cudaMalloc(&p.O, ones.size() * sizeof(Output));
  cudaMemcpy(Q, ones.data(), ones.size() * sizeof(KeyValue), cudaMemcpyHostToDevice);
  p.Q = p.K = p.V = Q;  // all ones, so O is all ones
  p.B = p.Hq = p.Hkv = 1;
  p.Sq = p.Sk = S;
  p.D = D;
  p.q = p.k = p.v = p.o = {S * D, S * D, D};
  cudaMalloc(&p.workspace, sdpa_workspace_bytes(p));
  cudaMemset(p.workspace, 0, sdpa_workspace_bytes(p));
  for (int run = 0; run < 2; run++) {  // the second run needs the queue that the first one reset
    cudaMemset(p.O, 0xff, O.size() * sizeof(Output));
    if (!sdpa_forward(p, 0).ok()) return 1;
    if (cudaMemcpy(O.data(), p.O, O.size() * sizeof(Output), cudaMemcpyDeviceToHost) !=
        cudaSuccess) {
      return 1;
    }
    for (Output x : O) {
      if (!(std::fabs(float(x) - 1.0f) <= 0.01f)) return 1;
    }
  }
  return 0;
}
