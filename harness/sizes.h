// The sizes of a problem as SdpaParams. Included after sdpa.cu, also by tests without the rest of the harness.
#pragma once

namespace SDPA_NAMESPACE {

// Sets the sizes, and the strides of contiguous tensors [B,H,S,D]. The tensors and all options are unset.
[[maybe_unused]] static SdpaParams params_of_sizes(int B, int Hq, int Hkv, int Sq, int Sk, int D, int Dv) {
  const auto contiguous = [](int H, int S, int width) { return Strides{int64_t(H) * S * width, int64_t(S) * width, width}; };
  SdpaParams p{};
  p.B = B;
  p.Hq = Hq;
  p.Hkv = Hkv;
  p.Sq = Sq;
  p.Sk = Sk;
  p.D = D;
  p.Dv = Dv;
  p.q = contiguous(Hq, Sq, D);
  p.k = contiguous(Hkv, Sk, D);
  p.v = contiguous(Hkv, Sk, Dv);
  p.o = contiguous(Hq, Sq, Dv);
  return p;
}

}  // namespace SDPA_NAMESPACE
