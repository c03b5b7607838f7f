// A problem: its sizes, masks and features, and the element types of its tensors.
#pragma once

#include <string>
#include <vector>

#include "../reference.cpp"
#include "line.h"
#include "sizes.h"

namespace SDPA_NAMESPACE {
namespace {

using reference::format;
using reference::Tensor;
using std::string;
using std::to_string;
using std::vector;

const Line& line = *static_cast<const Line*>(sdpa_line());
const reference::Type& type_of(DType t) {
  constexpr const reference::Type* types[] = {&reference::fp16, &reference::bf16, &reference::e4m3,
                                              &reference::u8};
  return *types[int(t)];
}
const reference::Type &query_type = type_of(line.query), &output_type = type_of(line.output);
// The types of Q, K and V as CSV rows name them.
const string dtype = line.query == line.input
                         ? query_type.name
                         : string(query_type.name) + "/" + type_of(line.input).name;
string knob_value(const string& name) {
  for (const Knob* k = line.knobs; k < line.knobs + line.knob_count; k++) {
    if (name == k->name) return k->value;
  }
  return "";
}
DType dtype_of(Tensor t) {
  return t == Tensor::O || t == Tensor::dO   ? line.output
         : t == Tensor::Q || t == Tensor::dQ ? line.query
                                             : line.input;
}
const char* name_of(Tensor t) {
  constexpr const char* names[] = {"Q", "K", "V", "O", "dO", "dQ", "dK", "dV"};
  return names[int(t)];
}

#ifdef SDPA_SIMT
constexpr bool has_clock = false;
#else
constexpr bool has_clock = true;  // runs on a GPU
#endif

struct CudaError {
  string text;
};
struct TooLarge : CudaError {};  // the problem does not fit in GPU memory

void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw CudaError{string(what) + ": " + cudaGetErrorString(error)};
}

struct Problem : reference::Problem {
  string shape, dist = "normal", layout = "bhsd";
  uint64_t seed = 0;
  int max_ctas = 0;         // for every launch except the checked one
  bool same_heads = false;  // all heads of an input are equal
  // Descale factors of 8-bit inputs: "heads" (one per head), "gaps" (with gaps between them),
  // "zeros" (some are 0), "shared" (one per tensor) or "none".
  string descale = "heads";
  string machine;  // --machine of tests/sweep.cu
  // Drawn from the seed.
  bool has_sinks = false, has_lengths = false, has_q_lengths = false, has_k_firsts = false;
  int page_size;              // 0: K and V are not paged
  bool narrow_table = false;  // the page table has room for Sk keys only; lengths may exceed Sk
  int most_keys = 0;          // as in SdpaParams
  bool batch_invariant = false;
  // bias_kind is one of bias_kinds, or "" for no bias. bias_dims lists which of b, h and q are
  // dimensions of the bias, and m if its map is made once for all launches. For its gradient: B, H, Q or
  // K if only one of the bias and dBias has this dimension (K: dBias is summed over the keys), and N if
  // dBias is not computed.
  string bias_kind, bias_dims = "q";
  bool keeps_map = false;  // MASK_MOD: one map for all launches
  // One of key_mask_kinds, with ",shared" if all batches share the mask; "" for no mask.
  string key_mask_kind;

  Problem() : reference::Problem{}, page_size(line.has_pages ? 64 : 0) {
    D = line.D;
    Dv = line.Dv;
  }
};

// Padding at the end, at the beginning, or anywhere (with odd seeds also in runs of 200 keys).
constexpr const char* key_mask_kinds[] = {"right", "left", "scattered"};
// add and bool: random, including rows that see no key. tree: covers the last keys only; a node
// sees its ancestors. causal: a causal mask. documents: 16 documents, each sees only itself.
// blocks: a different quarter of the blocks for each head.
constexpr const char* bias_kinds[] = {"add", "bool", "tree", "causal", "documents", "blocks", "padding"};
string bias_text(const Problem& p) {
  return p.bias_kind.empty() ? "" : p.bias_kind + "," + p.bias_dims;
}

// The tensors whose sequences are packed: "q", "k", "qk" or "".
const char* packed_text(const Problem& p) {
  return p.packs_q ? p.packs_k ? "qk" : "q" : p.packs_k ? "k" : "";
}

SdpaParams params_of(const Problem& p) {  // without the tensors
  SdpaParams params = params_of_sizes(p.B, p.Hq, p.Hkv, p.Sq, p.Sk, p.D, p.Dv);
  params.scale = float(p.scale);
  params.causal = Causal(int(p.mask));
  params.window_left = p.window_left;
  params.window_right = p.window_right;
  params.window_alignment = Causal(int(p.window_alignment));
  params.softcap = float(p.softcap);
  params.most_keys = p.most_keys;
  params.page_size = p.page_size;
  params.batch_invariant = p.batch_invariant;
  // A page table as wide as a large cache, whatever the lengths are. A build that accepts at most
  // 65,536 keys per query gets no more.
  if (p.page_size && p.has_lengths && !p.narrow_table)
    params.Sk = line.limits_keys && !p.most_keys ? 1 << 16 : 1 << 20;
  return params;
}

// Converts a number, already divided by its factor, to the bits of an element and back. The bits of
// an 8-bit element are in the low byte.
uint16_t element_bits(DType t, float x) {
  const auto bits_of = [](auto element) {
    uint16_t bits = 0;
    memcpy(&bits, static_cast<const void*>(&element), sizeof element);
    return bits;
  };
  switch (t) {
    case DType::bf16:
      return bits_of(static_cast<__nv_bfloat16>(x));
    case DType::e4m3:
      return bits_of(static_cast<__nv_fp8_e4m3>(x));
    case DType::u8:
      return uint16_t(128 + std::lround(std::fmin(std::fmax(x, -128), 127)));
    default:
      return bits_of(static_cast<__half>(x));
  }
}
float element_value(DType t, uint16_t bits) {
  const auto value_of = [&](auto element) {
    memcpy(static_cast<void*>(&element), &bits, sizeof element);
    return static_cast<float>(element);
  };
  switch (t) {
    case DType::bf16:
      return value_of(__nv_bfloat16());
    case DType::e4m3:
      return value_of(__nv_fp8_e4m3());
    case DType::u8:
      return float(bits) - 128;
    default:
      return value_of(__half());
  }
}
float output_value(uint16_t bits) { return element_value(line.output, bits); }

size_t element_bytes(DType t) { return t == DType::e4m3 || t == DType::u8 ? 1 : 2; }
// The value of one step of a U8 element; 1 for other types.
double unit_of(DType t) { return t == DType::u8 ? 448.0 / 127 : 1; }

using Bits = vector<uint16_t>;  // bits of elements, in the order [B,H,S,D]

// Calls f(i) for i in [0, n) on all cores.
template <class F> void for_all(size_t n, const F& f) {
  constexpr size_t block = 1 << 16;
  reference::parallel_for((n + block - 1) / block, [&](size_t part) {
    for (size_t i = part * block; i < std::min(n, (part + 1) * block); i++) f(i);
  });
}

// Copies what was drawn for the sequences of a problem, which decides how many pairs of a query and a key are visible.
void take_sequences(Problem& to, const Problem& from) {
  to.k_lengths = from.k_lengths;
  to.q_lengths = from.q_lengths;
  to.k_firsts = from.k_firsts;
  to.q_starts = from.q_starts;
  to.k_starts = from.k_starts;
}

// Rounds x / step to an element type. Returns the bits and replaces x by the rounded numbers.
Bits round_to_elements(vector<float>& x, float step, DType type = line.input) {
  Bits bits(x.size());
  for_all(x.size(), [&](size_t i) {
    bits[i] = element_bits(type, x[i] / step);
    x[i] = element_value(type, bits[i]);
  });
  return bits;
}

// The power of 2 that scales 8-bit elements to the range of x.
float step_for(const vector<float>& x, DType type) {
  if (element_bytes(type) == 2) return 1;
  float largest = 0;
  for (float value : x) {
    if (std::isfinite(value)) largest = std::max(largest, std::fabs(value));
  }
  const float range = type == DType::u8 ? 127 : 448;
  const float step = largest > 0 ? std::exp2(std::ceil(std::log2(largest / range))) : 1;
  return type == DType::u8 ? step : std::max(step, 1.0f);
}

}  // namespace
}  // namespace SDPA_NAMESPACE
