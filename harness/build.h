// Describes the build that is being compiled as a Line.
#pragma once

#include "line.h"
#include "reference_kernel.h"

namespace SDPA_NAMESPACE {
namespace {

constexpr Knob all_knobs[] = {
#define SDPA_KNOB_ROW(name, fallback, member, values, families, meaning) \
  {#name, name##_text.data(), meaning, name##_changed},
    SDPA_KNOBS(SDPA_KNOB_ROW)
#ifdef SDPA_BACKWARD_KNOBS  // defined by sdpa_backward.cu
        SDPA_BACKWARD_KNOBS(SDPA_KNOB_ROW)
#endif
};

// Barriers per K/V tile, of a CTA or of a group of warps.
int barriers_per_tile() {
  constexpr int of_policy[] = {0, 2, 4, 0, 0, 6};
  if (Defines::kernel == KernelKind::mma) return Defines::stages > 1 ? 1 : 2;
  if (Defines::is_wgmma && Defines::swap_ab) return Defines::use_lazy_max ? 1 : 2;
  if (Defines::use_warp_specialization) return 0;
  return Defines::is_wgmma ? 1 : of_policy[Defines::sync_policy];
}

TunedTile tile_of(const SdpaParams& p) {
  return Defines::use_tuned ? TUNED_TILES[choose_tile(p)] : TunedTile{};
}

KernelFacts facts_of(const SdpaParams& p) {
  return with_build(p, [&](auto build) {
    using B = decltype(build);
    return KernelFacts{reinterpret_cast<const void*>(+KernelOf<B>::entry),
                       B::threads,
                       shared_bytes<B>,
                       B::block_m,
                       memory_of<B>(p).state,
                       scratch_bytes<B>(p),
                       bias_map_bytes<B>(p)};
  });
}

// An array of T whose elements are read as Real, with bounds checks.
template <class T, class Real> struct HostArray {
  const T* x;
  const ModArrays& all;
  __host__ __device__ Real operator[](int64_t i) const {
    if (uint64_t(i) < all.size) return x[i];
    *all.outside = true;
    return 0;
  }
};
double logit_on_host(double s, const ModPlace& at, const ModArrays& arrays, double tanh_error) {
  const auto x = [&](int n) { return HostArray<float, double>{arrays.x[n], arrays}; };
  return plain_expression::logit<double>(s, at, x(0), x(1), x(2), x(3), tanh_error);
}
bool sees_on_host(const ModPlace& at, const ModArrays& arrays) {
  const auto x = [&](int n) { return HostArray<float, double>{arrays.x[n], arrays}; };
  const auto i = [&](int n) { return HostArray<int, int>{arrays.i[n], arrays}; };
  return plain_expression::sees<double>(at, x(0), x(1), x(2), x(3), i(0), i(1));
}

#ifdef SDPA_BACKWARD_KNOBS
KernelFacts backward_facts_of(const SdpaParams& p) {
  KernelFacts facts = facts_of(p);
  facts.kernel = reinterpret_cast<const void*>(+BackwardKernelOf<Defines>::entry);
  facts.shared_bytes = sizeof(BackwardKernelOf<Defines>::Shared);
  return facts;
}
SdpaStatus run_backward(const SdpaParams& forward, const Gradients& g, cudaStream_t stream) {
  const auto as_output = [](void* x) { return static_cast<KeyValue*>(x); };
  SdpaBackwardParams p{};
  p.forward = forward;
  p.dO = static_cast<const Output*>(g.dO);
  p.dQ = as_output(g.dQ);
  p.dK = as_output(g.dK);
  p.dV = as_output(g.dV);
  p.d_o = g.d_o;
  p.d_q = g.d_q;
  p.d_k = g.d_k;
  p.d_v = g.d_v;
  p.dLSE = g.dLSE;
  p.dSinks = g.dSinks;
  p.dBias = g.dBias;
  p.d_bias = g.d_bias;
  p.dBias_sums_keys = g.dBias_sums_keys;
  p.workspace = g.workspace;
  return sdpa_backward(p, stream);
}
#endif

Line describe_build() {
  Line l{};
  l.name = SDPA_TEXT(SDPA_CONFIG_NAME);
  l.family = family_name;
  l.archs = SDPA_TEXT(__CUDA_ARCH_LIST__);  // nvcc defines the macro
  l.knobs = all_knobs;
  l.knob_count = sizeof all_knobs / sizeof all_knobs[0];
  l.D = Defines::head_dim;
  l.Dv = Defines::d_v;
  l.vec_width = Defines::vec_width;
  l.barriers_per_tile = barriers_per_tile();
  l.query = Defines::q_type;
  l.input = Defines::kv_type;
  l.output = Defines::o_type;
  l.fp16_acc = Defines::fp16_acc;
  l.has_softcap = Defines::use_softcap != 0;
  l.tanh_is_approximate = Defines::use_softcap == 1;
  l.has_sinks = Defines::use_sinks;
  l.has_lengths = Defines::use_lengths;
  l.has_pages = Defines::use_pages != 0;
  l.has_small_pages = Defines::use_pages == 2;
  l.use_bias = Defines::use_bias;
  l.has_key_mask = Defines::use_key_mask;
  l.has_bias_maps = Defines::is_wgmma && Defines::takes_map && !Defines::use_lengths &&
                    (Defines::use_tuned || lists_from_map<Defines>);
  for (int n = 0; n < 6; n++) l.uses[n] = mods_contain(mod_arrays[n]);
  if (Defines::changes_logits) l.logit = logit_on_host;
  constexpr bool hides_by_expression = Defines::hides_keys && !Defines::use_key_mask;
  if (hides_by_expression) l.sees = sees_on_host;
  if constexpr (Defines::changes_logits || hides_by_expression)
    l.reference_kernel = launch_reference_kernel_of<Query, KeyValue, OwnMods>;
  l.is_wgmma = Defines::is_wgmma;
  l.has_queue = Defines::use_persistent_cta;
  l.is_tuned = Defines::use_tuned;
  l.limits_keys = limits_keys<Defines> && !Defines::use_tuned;
  for (int n = next_tile(0); n < tile_count; n = next_tile(n + 1)) {
    l.tiles[l.tile_count++] = TUNED_TILES[n];
  }
  if (!Defines::use_tuned) l.tiles[l.tile_count++] = tile_of({});
  l.tile_of = tile_of;
  l.facts_of = facts_of;
  l.forward = sdpa_forward;
  l.map_bias = sdpa_map_bias;
#ifdef SDPA_BACKWARD_KNOBS
  l.facts_of = backward_facts_of;
  l.backward = run_backward;
  l.backward_workspace_bytes = backward_workspace_bytes;
  l.dq_repeats = !adds_dq<Defines> || orders_adds<Defines>;
#endif
  return l;
}

}  // namespace
}  // namespace SDPA_NAMESPACE

extern "C" const void* sdpa_line() {
  // Not const: tests/unit.cu changes it.
  static SDPA_NAMESPACE::Line line = SDPA_NAMESPACE::describe_build();
  return &line;
}
