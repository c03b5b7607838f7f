// __nv_bfloat16 as CUDA has it: conversions round to nearest even, NaN becomes 0x7fff.
#pragma once

#include "cuda_fp16.h"

namespace simt {

inline uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = bits_of_float(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace simt

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) : bits(simt::float_to_bfloat16(x)) {}
  operator float() const { return simt::float_of_bits(uint32_t(bits) << 16); }
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return float(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__nv_bfloat16(x), __nv_bfloat16(y)};
}
