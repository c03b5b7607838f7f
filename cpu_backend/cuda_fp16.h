// __half as CUDA has it: conversions round to nearest even, NaN becomes 0x7fff.
#pragma once

#include <cstdint>
#include <cstring>

namespace simt {

inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

#if defined(__F16C__)
// The processor's conversions; _cvtss_sh() and _cvtsh_ss() without their header, which is slow to compile.
inline uint16_t float_to_half(float x) {
  using Floats = float __attribute__((vector_size(16)));
  return x != x ? 0x7fff : uint16_t(__builtin_ia32_vcvtps2ph(Floats{x}, 0)[0]);
}

inline float half_to_float(uint16_t half) {
  using Halves = short __attribute__((vector_size(16)));
  const float x = __builtin_ia32_vcvtph2ps(Halves{short(half)})[0];
  return x != x ? float_of_bits(0x7fffffff) : x;
}
#else
inline uint16_t float_to_half(float x) {
  const uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7fff;                              // NaN
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);            // rounds to infinity
  if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 puts units of 2^-24 into the low bits
    return uint16_t(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000));
  }
  const uint32_t odd = magnitude >> 13 & 1;  // round half to even
  return uint16_t(sign | ((magnitude + 0xfff + odd - 0x38000000) >> 13));
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff;
  if (magnitude > 0x7c00) return float_of_bits(0x7fffffff);  // NaN
  if (magnitude == 0x7c00) return float_of_bits(sign | 0x7f800000);
  // The same fields at fp32's places, 2^112 too small; the product is exact, also for subnormals.
  return float_of_bits(sign | magnitude << 13) * 0x1p112f;
}
#endif

}  // namespace simt

struct __half {
  uint16_t bits;
  __half() = default;
  explicit __half(float x) : bits(simt::float_to_half(x)) {}
  operator float() const { return simt::half_to_float(bits); }
};
struct alignas(4) __half2 {
  __half x, y;
};

inline __half __float2half_rn(float x) { return __half(x); }
inline float __half2float(__half x) { return float(x); }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
