// One build of sdpa.cu, or with BACKWARD=1 of sdpa_backward.cu, without the harness. It has the C functions that
// bindings/sdpa.h declares, for C, for PyTorch and for tools/engine.py (through Python's ctypes). `run_all.sh gates` reads
// its symbols.
// cmake --build build --target sdpa_NAME_lib

#define SDPA_NO_MAIN
#ifdef BACKWARD
#include "../sdpa_backward.cu"
#else
#include "../sdpa.cu"
#endif

#include "sdpa.h"

// tests/test_engine.py compares the header's structs with the kernel's member by member.
static_assert(sizeof(SdpaParams) == sizeof(sdpa::SdpaParams), "bindings/sdpa.h: SdpaParams lacks members");
static_assert(SDPA_CAUSAL_TOP_LEFT == int(sdpa::Causal::top_left) &&
                  SDPA_CAUSAL_BOTTOM_RIGHT == int(sdpa::Causal::bottom_right), "bindings/sdpa.h: the masks' numbers");

static const sdpa::SdpaParams& params_of(const SdpaParams* p) { return *reinterpret_cast<const sdpa::SdpaParams*>(p); }

// The shared memory of the build; with tuned tiles, the maximum from row N on. BACKWARD=1: that of the kernel that
// computes dK.
template <int N> constexpr size_t most_shared_bytes() {
#ifdef BACKWARD
  return sizeof(typename sdpa::BackwardKernelOf<sdpa::BuildOf<N>>::Shared);
#else
  constexpr size_t own = sdpa::shared_bytes<sdpa::BuildOf<N>>;
  if constexpr (N >= 0 && sdpa::next_tile(N + 1) < sdpa::tile_count) {
    constexpr size_t others = most_shared_bytes<sdpa::next_tile(N + 1)>();
    return own > others ? own : others;
  }
  return own;
#endif
}

extern "C" {

size_t sdpa_library_params_bytes() { return sizeof(SdpaParams); }
void sdpa_library_defaults(SdpaParams* p) { *reinterpret_cast<sdpa::SdpaParams*>(p) = {}; }
size_t sdpa_library_workspace_bytes(const SdpaParams* p) { return sdpa::sdpa_workspace_bytes(params_of(p)); }
size_t sdpa_library_scratch_bytes(const SdpaParams* p) { return sdpa::sdpa_scratch_bytes(params_of(p)); }
size_t sdpa_library_bias_map_bytes(const SdpaParams* p) { return sdpa::sdpa_bias_map_bytes(params_of(p)); }
static int told(const sdpa::SdpaStatus& status, char* text, size_t text_bytes) {
  if (text && text_bytes) snprintf(text, text_bytes, "%s", status.text);
  return status.code;
}
int sdpa_library_forward(const SdpaParams* p, CUstream_st* stream, char* text, size_t text_bytes) {
  return told(sdpa::sdpa_forward(params_of(p), stream), text, text_bytes);
}
int sdpa_library_map_bias(const SdpaParams* p, CUstream_st* stream, char* text, size_t text_bytes) {
  return told(sdpa::sdpa_map_bias(params_of(p), stream), text, text_bytes);
}
#ifdef BACKWARD
static_assert(sizeof(SdpaBackwardParams) == sizeof(sdpa::SdpaBackwardParams), "bindings/sdpa.h: SdpaBackwardParams");
size_t sdpa_library_backward_workspace_bytes(const SdpaParams* forward) {
  return sdpa::sdpa_backward_workspace_bytes(params_of(forward));
}
int sdpa_library_backward(const SdpaBackwardParams* p, CUstream_st* stream, char* text, size_t text_bytes) {
  return told(sdpa::sdpa_backward(*reinterpret_cast<const sdpa::SdpaBackwardParams*>(p), stream), text, text_bytes);
}
#endif

// For tools/fit.py. sdpa_library_tiles() returns the rows of the table of tiles and their number.
// sdpa_library_tile_clocks() writes the estimated clocks[problem][tile] of any tiles, in the table or not.
int sdpa_library_tiles(const sdpa::TunedTile** first) {
  *first = sdpa::TUNED_TILES.data();
  return sdpa::tile_count;
}
void sdpa_library_tile_clocks(const sdpa::TunedTile* tiles, int tile_count, const sdpa::SdpaParams* problems,
                              int problem_count, int sms, double* clocks) {
  for (int p = 0; p < problem_count; p++) {
    for (int t = 0; t < tile_count; t++) *clocks++ = sdpa::tuned_clocks(tiles[t], problems[p], sms);
  }
}

constexpr int first_row = sdpa::Defines::use_tuned ? sdpa::next_tile(0) : -1;
using FirstBuild = sdpa::BuildOf<first_row>;
// The launch: threads, bytes of shared memory, BLOCK_M. With USE_TUNED: of the first tile, but the maximum of the bytes. A
// library has them as the sizes of three arrays, which tools read from its symbols: a __constant__ made small kernels 0.4 us
// slower (79a1375, one run). Device code without host code has no such symbols, and a __constant__.
#ifdef SDPA_DEVICE_CODE_ALONE
__constant__ int sdpa_library_launch[3] = {FirstBuild::threads, int(most_shared_bytes<first_row>()),
                                           FirstBuild::block_m};
#else
char sdpa_library_threads[FirstBuild::threads];
char sdpa_library_smem_bytes[most_shared_bytes<first_row>()];
char sdpa_library_block_m[FirstBuild::block_m];
#endif
}
