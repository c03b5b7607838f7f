// SCORE_MOD and MASK_MOD as plain C++, for the CPU reference (double) and the reference kernel
// (float).
#pragma once

namespace SDPA_NAMESPACE {
namespace {

struct ModPlace {  // position of a score within its sequence
  int b, h, q, k, Sq, Sk;
};

// The names that an expression may use. `real` is double in the CPU reference and float in the
// reference kernel.
namespace plain_expression {

using std::abs, std::cos, std::exp, std::exp2, std::floor, std::log, std::log2, std::pow, std::sin,
    std::sqrt, std::tanh;
template <class X, class Y> __host__ __device__ std::common_type_t<X, Y> min(X x, Y y) {
  return x < y ? x : y;
}
template <class X, class Y> __host__ __device__ std::common_type_t<X, Y> max(X x, Y y) {
  return x > y ? x : y;
}

// tanh_error is added to the result of each tanh_approx().
template <class real, class Reals>
__host__ __device__ real logit(real s, const ModPlace& at, [[maybe_unused]] Reals x0,
                               [[maybe_unused]] Reals x1, [[maybe_unused]] Reals x2,
                               [[maybe_unused]] Reals x3, real tanh_error) {
  [[maybe_unused]] const int b = at.b, h = at.h, q = at.q, k = at.k, Sq = at.Sq, Sk = at.Sk;
  [[maybe_unused]] const real NONE = s;
  [[maybe_unused]] const auto tanh_approx = [=](real x) { return std::tanh(x) + tanh_error; };
  return real(SCORE_MOD);
}
template <class real, class Reals, class Ints>
__host__ __device__ bool sees(const ModPlace& at, [[maybe_unused]] Reals x0,
                              [[maybe_unused]] Reals x1, [[maybe_unused]] Reals x2,
                              [[maybe_unused]] Reals x3, [[maybe_unused]] Ints i0,
                              [[maybe_unused]] Ints i1) {
  [[maybe_unused]] const int b = at.b, h = at.h, q = at.q, k = at.k, Sq = at.Sq, Sk = at.Sk;
  [[maybe_unused]] constexpr bool NONE = true;
  return MASK_MOD;
}

}  // namespace plain_expression

struct NoMods {
  static constexpr bool changes_logits = false;
  static __device__ float logit(float s, const ModPlace&, const SdpaParams&) { return s; }
  static __device__ bool sees(const ModPlace&, const SdpaParams&) { return true; }
};
struct OwnMods {  // those of the build
  static constexpr bool changes_logits = Defines::changes_logits;
  static __device__ float logit(float s, const ModPlace& at, const SdpaParams& p) {
    return plain_expression::logit<float>(s, at, p.x0, p.x1, p.x2, p.x3, 0);
  }
  static __device__ bool sees(const ModPlace& at, const SdpaParams& p) {
    return plain_expression::sees<float>(at, p.x0, p.x1, p.x2, p.x3, p.i0, p.i1);
  }
};

// The arrays in host memory, with `size` elements each.
constexpr const char* mod_arrays[] = {"x0", "x1", "x2", "x3", "i0", "i1"};
struct ModArrays {
  const float* x[4] = {};
  const int* i[2] = {};
  size_t size = 0;
  bool* outside = nullptr;  // set to true by an out-of-bounds read
};

}  // namespace
}  // namespace SDPA_NAMESPACE
