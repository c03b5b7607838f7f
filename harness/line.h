// Line: everything the harness knows about a build. CMake compiles the harness once and links it to
// each line; sdpa_line() is the only interface between the two.
#pragma once

#include "mods.h"

namespace SDPA_NAMESPACE {
namespace {

struct ReferenceKernelArgs {
  SdpaParams p;    // not paged; inputs have the line's types
  int first_head;  // index b * Hq + h
  float scale, v_unit;
  float *O, *LSE;  // [heads,Sq,D] and [heads,Sq], starting with first_head
  int use_bias;
};

// Launches the reference kernel for `heads` query heads, starting with a.first_head.
using LaunchReferenceKernel = cudaError_t (*)(const ReferenceKernelArgs& a, int heads);

struct Knob {
  const char *name, *value, *meaning;
  bool changed;  // from its default
};

constexpr int most_tiles = HOPPER_TILES.size();  // the longest table
static_assert(tile_count <= most_tiles,
              "a table of tiles is longer than that of wgmma; raise most_tiles");

struct KernelFacts {  // the kernel chosen for a problem
  const void* kernel;
  int threads;
  size_t shared_bytes;
  int item_rows;           // query rows of a work item
  size_t workspace_bytes;  // not counting scratch memory; zero before and after each launch
  size_t scratch_bytes, bias_map_bytes;
};

// The tensors of a backward pass, without the types of a build.
struct Gradients {
  const void* dO;
  void *dQ, *dK, *dV;
  Strides d_o, d_q, d_k, d_v;
  const float* dLSE;
  float* dSinks;
  void* dBias;
  Strides d_bias;
  int dBias_sums_keys;
  void* workspace;
};

struct Line {
  const char *name, *family, *archs;
  const Knob* knobs;
  int knob_count, D, Dv, vec_width, barriers_per_tile;
  DType query, input, output;  // types of Q, of K and V, and of O
  int fp16_acc;                // bit 0: Q @ K.T, bit 1: P @ V
  bool has_softcap, has_sinks, has_lengths, has_pages, has_small_pages, tanh_is_approximate;
  int use_bias;
  bool has_key_mask;
  bool has_bias_maps, is_wgmma, has_queue, is_tuned, limits_keys;
  TunedTile tiles[most_tiles];  // one, or the candidates of a tuned line
  int tile_count;
  // SCORE_MOD and MASK_MOD: the arrays that they use, their values in double, and a reference
  // kernel that contains them. Null if the build has none.
  bool uses[6];  // indexed like mod_arrays
  double (*logit)(double s, const ModPlace&, const ModArrays&, double tanh_error);
  bool (*sees)(const ModPlace&, const ModArrays&);
  LaunchReferenceKernel reference_kernel;
  TunedTile (*tile_of)(const SdpaParams&);
  KernelFacts (*facts_of)(const SdpaParams&);
  SdpaStatus (*forward)(const SdpaParams&, cudaStream_t);
  SdpaStatus (*map_bias)(const SdpaParams&, cudaStream_t);
  // Null unless BACKWARD=1. With BACKWARD=1 the harness checks and times the backward pass.
  SdpaStatus (*backward)(const SdpaParams&, const Gradients&, cudaStream_t);
  size_t (*backward_workspace_bytes)(const SdpaParams&);
  bool dq_repeats;  // dQ has the same bits in every run
  const char* pass() const { return backward ? "backward" : "forward"; }
  bool takes(int d, int d_v) const {  // true if the build accepts a problem with these head sizes
    const auto fits = [&](int n, int most) {
      return n == most || (is_wgmma && n > 0 && n < most && n % vec_width == 0);
    };
    return fits(d, D) && fits(d_v, Dv);
  }
};

}  // namespace
}  // namespace SDPA_NAMESPACE

extern "C" const void* sdpa_line();  // returns a Line
