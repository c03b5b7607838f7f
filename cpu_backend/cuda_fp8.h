// __nv_fp8_e4m3 as CUDA has it: conversions round to nearest even, beyond 448 to 448; NaN becomes
// 0x7f.
#pragma once

#include <cmath>

#include "cuda_fp16.h"

namespace simt {

inline uint8_t float_to_e4m3(float x) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const float magnitude = std::fabs(x);
  if (x != x) return 0x7f;
  if (magnitude >= 448) return uint8_t(sign | 0x7e);
  if (magnitude < 0x1p-6f) return uint8_t(sign | int(std::nearbyint(magnitude * 512)));
  // The same fields at fp32's places, of which 20 bits are rounded away; a carry goes into the
  // exponent.
  const uint32_t bits = bits_of_float(magnitude), odd = bits >> 20 & 1;
  return uint8_t(sign | (((bits + 0x7ffff + odd) >> 20) - (120 << 3)));
}

inline float e4m3_to_float(uint8_t bits) {
  const uint32_t sign = uint32_t(bits & 0x80) << 24, magnitude = bits & 0x7f;
  if (magnitude == 0x7f) return float_of_bits(0x7fffffff);  // NaN
  // The same fields at fp32's places, 2^120 too small; the product is exact, also for subnormals.
  return float_of_bits(sign | magnitude << 20) * 0x1p120f;
}

}  // namespace simt

struct __nv_fp8_e4m3 {
  uint8_t __x;
  __nv_fp8_e4m3() = default;
  explicit __nv_fp8_e4m3(float x) : __x(simt::float_to_e4m3(x)) {}
  explicit operator float() const { return simt::e4m3_to_float(__x); }
};
