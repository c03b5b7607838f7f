// The self-check: whether what a kernel wrote is right, and nothing else was written. The harness of sdpa.cu
// includes this file. The right results are those of reference.cpp and, for every row of a large problem, of
// the witness, another kernel.
//
// In this order: problems, tensors in device memory, the witness, Instance (a problem that can be launched and
// checked).

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <unistd.h>

#include "reference.cpp"

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
const reference::Type &input_type = type_of(line.input), &output_type = type_of(line.output);
// What an error may be with this softmax scale, of which 0 means 1/sqrt(D).
reference::Tolerance tolerance_of(double scale) {
  reference::Tolerance t = max(input_type.tolerance, output_type.tolerance);
  if (line.fp16_acc) t = max(t, reference::fp16_sums);
  // An e4m3 logit is the scale times a sum of D products, each of which wgmma cuts off: twice as much is lost at D=256
  // as at 128, or at twice the scale.
  if (line.is_wgmma && line.input == DType::e4m3) {
    t.lse *= std::max(1.0, line.D / 128.0) * std::max(1.0, std::fabs(scale) * std::sqrt(line.D));
  }
  return t;
}

#ifdef SDPA_SIMT
constexpr bool has_clock = false;
#else
constexpr bool has_clock = true;  // a GPU, not the CPU backend
#endif

struct CudaError {
  string text;
};
struct TooLarge : CudaError {};  // for this GPU's memory

void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw CudaError{string(what) + ": " + cudaGetErrorString(error)};
}

// ---- problems and their elements ----

struct Problem : reference::Problem {
  string shape, dist = "normal", layout = "bhsd";
  uint64_t seed = 0;
  int max_ctas = 0;         // of the launches but the first, whose results are checked
  bool same_heads = false;  // every head of an input is the first one
  // Factors of 8-bit inputs: one to a head, with gaps between them or zeros among them as well, one to a tensor, or none.
  string descale = "heads";
  string machine;  // --machine of tests/sweep.cu

  Problem() : reference::Problem{} { D = line.D; }
};

SdpaParams params_of(const Problem& p) {  // but for the tensors
  SdpaParams params{};
  params.B = p.B, params.Hq = p.Hq, params.Hkv = p.Hkv, params.Sq = p.Sq, params.Sk = p.Sk;
  params.D = line.D, params.scale = float(p.scale), params.causal = Causal(int(p.mask));
  params.window_left = p.window_left, params.window_right = p.window_right;
  return params;
}

// Of a number as an element of the type, without its factor; and the number. A byte is in the low half.
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
// What 1 stands for in U8, whose elements are multiples of it.
double unit_of(DType t) { return t == DType::u8 ? 448.0 / 127 : 1; }

using Bits = vector<uint16_t>;  // of elements, in the order [B,H,S,D]

// Calls f(i) for i in [0, n) on all cores.
template <class F> void for_all(size_t n, const F& f) {
  constexpr size_t block = 1 << 16;
  reference::parallel_for((n + block - 1) / block, [&](size_t part) {
    for (size_t i = part * block; i < std::min(n, (part + 1) * block); i++) f(i);
  });
}

// x / step in the type of the inputs, as bits and, in the place of x, as numbers.
Bits round_to_elements(vector<float>& x, float step) {
  Bits bits(x.size());
  for_all(x.size(), [&](size_t i) {
    bits[i] = element_bits(line.input, x[i] / step);
    x[i] = element_value(line.input, bits[i]);
  });
  return bits;
}

// A power of 2 by which 8-bit elements are multiplied to have the range of x.
float step_for(const vector<float>& x) {
  if (element_bytes(line.input) == 2) return 1;
  float largest = 0;
  for (float value : x) {
    if (std::isfinite(value)) largest = std::max(largest, std::fabs(value));
  }
  const float range = line.input == DType::u8 ? 127 : 448;
  const float step = largest > 0 ? std::exp2(std::ceil(std::log2(largest / range))) : 1;
  return line.input == DType::u8 ? step : std::max(step, 1.0f);
}

// ---- tensors in device memory ----

constexpr size_t GUARD = 512;  // bytes before and after that nobody may touch; 0xff, a NaN

// Device memory between guards.
class Guarded {
 public:
  Guarded(const string& name, size_t bytes) : name(name), bytes(bytes) {
    const cudaError_t error = cudaMalloc(&base_, bytes + 2 * GUARD);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw TooLarge{{format("%s needs %.1f GB of GPU memory, which is not free", name.c_str(),
                             double(bytes) * 1e-9)}};
    }
    require(error, "allocating memory on the GPU");
    require(cudaMemset(base_, 0xff, GUARD), "poisoning memory");
    require(cudaMemset(base_ + GUARD + bytes, 0xff, GUARD), "poisoning memory");
  }
  virtual ~Guarded() { cudaFree(base_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  template <class T = char> T* data() const { return reinterpret_cast<T*>(base_ + GUARD); }
  void fill(int byte) { require(cudaMemset(data(), byte, bytes), "filling memory on the GPU"); }
  template <class T> vector<T> fetch(size_t size, ptrdiff_t at = 0) const {  // of `size` bytes
    vector<T> x(size / sizeof(T));
    require(cudaMemcpy(x.data(), data() + at, size, cudaMemcpyDeviceToHost),
            "copying from the GPU");
    return x;
  }
  template <class T> void store(const vector<T>& x, ptrdiff_t at = 0) {
    require(cudaMemcpy(data() + at, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice),
            "copying to the GPU");
  }
  // Sets `trouble` to a sentence if a guard was written.
  void expect_guards(string& trouble) const {
    const vector<char> poison(GUARD, char(0xff));
    const bool before = fetch<char>(GUARD, -ptrdiff_t(GUARD)) != poison;
    const bool after = fetch<char>(GUARD, ptrdiff_t(bytes)) != poison;
    if (trouble.empty() && before) trouble = "the kernel wrote before " + name;
    if (trouble.empty() && after) trouble = "the kernel wrote after " + name;
  }

  const string name;
  const size_t bytes;

 private:
  char* base_ = nullptr;
};

// A tensor [B,H,S,D], contiguous; tests/sweep.cu has others.
class DeviceTensor : public Guarded {
 public:
  DeviceTensor(const Problem& p, Tensor t, size_t elements)
      : Guarded(string(1, "QKVO"[int(t)]), elements * bytes_of(t)), element_bytes(bytes_of(t)) {
    const int64_t S = of_query(t) ? p.Sq : p.Sk, H = of_query(t) ? p.Hq : p.Hkv;
    strides = {H * S * line.D, S * line.D, line.D};
  }
  DeviceTensor(const Problem& p, Tensor t) : DeviceTensor(p, t, rows_of(p, t) * line.D) {}

  virtual void* first() const { return data(); }  // element (0,0,0,0)
  virtual void poison() { fill(0xff); }
  virtual void write(const Bits& x) { store_elements(x); }
  // Sets `trouble` to a sentence if anything but the elements was written.
  virtual Bits read(string& trouble) const {
    expect_guards(trouble);
    return fetch_elements(bytes / element_bytes);
  }

  Strides strides;

 protected:
  // Elements of the allocation from the first-th on.
  void store_elements(const Bits& x, ptrdiff_t first = 0) {
    if (element_bytes == 2) return store(x, 2 * first);
    store(vector<uint8_t>(x.begin(), x.end()), first);
  }
  Bits fetch_elements(size_t count, ptrdiff_t first = 0) const {
    if (element_bytes == 2) return fetch<uint16_t>(2 * count, 2 * first);
    const vector<uint8_t> x = fetch<uint8_t>(count, first);
    return {x.begin(), x.end()};
  }

  const size_t element_bytes;

 private:
  static size_t bytes_of(Tensor t) {
    return SDPA_NAMESPACE::element_bytes(t == Tensor::O ? line.output : line.input);
  }
};

// The factors of an input's heads.
class DeviceFactors : public Guarded {
 public:
  DeviceFactors(const Problem& p, Tensor t)
      : Guarded("a factor", p.descale == "none" ? 0 : elements(p, t) * sizeof(float)),
        tensor_(t),
        heads_(of_query(t) ? p.Hq : p.Hkv),
        batches_(p.B) {
    descale.factor = p.descale == "none" ? nullptr : data<float>();
    if (p.descale == "heads" || p.descale == "zeros") descale.head = 1, descale.batch = heads_;
    has_zeros_ = p.descale == "zeros";
    if (p.descale == "gaps") descale.head = 2, descale.batch = 2 * heads_ + 3;
  }
  // About `step`, different for every one; with "zeros" one in three is 0. Returns what the elements are multiplied
  // with, by head.
  vector<double> set(float step, uint64_t seed) {
    const double unit = unit_of(line.input);
    vector<float> x(bytes / sizeof(float), NAN);
    vector<double> of_heads;
    for (int head = 0; head < batches_ * heads_; head++) {
      double factor = 1;
      if (descale.factor) {
        const size_t at = head / heads_ * descale.batch + head % heads_ * descale.head;
        const uint64_t r = reference::mix(reference::mix(seed + 66 + int(tensor_)) + at);
        factor = x[at] = float(step / unit * (0.75 + 0.75 * double(r % 1024) / 1024));
        if (has_zeros_ && r % 3 == 0) factor = x[at] = 0;
      }
      of_heads.push_back(factor * unit);
    }
    store(x);
    return of_heads;
  }

  Descale descale;

 private:
  static size_t elements(const Problem& p, Tensor t) {
    const size_t heads = heads_of(p, t);
    return p.descale == "shared" ? 1 : p.descale == "gaps" ? 2 * heads + 3 * p.B : heads;
  }
  Tensor tensor_;
  int64_t heads_, batches_;
  bool has_zeros_ = false;
};

// ---- the witness: every row on the GPU by another kernel ----
// Sections 4 to 6 have no part in it: it has its own mask, heads and strides. All of it is fp32. It goes
// over the keys twice: m = max of S, then P = exp((S - m) * scale), l = sum of P, O = P @ V / l.

struct WitnessArgs {
  const void *Q, *K, *V;
  Strides q, k, v;
  int Hq, Hkv, Sq, Sk;
  int first_head;   // counted over batches: b * Hq + h
  int least, most;  // key k is visible to query q if least <= k - q <= most
  float scale;
  Descale q_factor, k_factor, v_factor;
  float v_unit;
  float *O, *LSE;  // [heads,Sq,D] and [heads,Sq] from first_head on
};

inline __device__ float number(__half x) { return float(x); }
inline __device__ float number(__nv_bfloat16 x) { return float(x); }
inline __device__ float number(__nv_fp8_e4m3 x) { return float(x); }
inline __device__ float number(uint8_t x) { return float(x) - 128; }
inline __device__ float factor(const Descale& d, int b, int h) {
  return d.factor ? d.factor[b * d.batch + h * d.head] : 1;
}

// A thread has 64 elements of a query row, and its neighbours the others. Tiles of K and V are in shared
// memory, the parts of a row 4 floats apart, so that neighbours read from different banks.
template <int D> struct WitnessShared {
  static constexpr int SLICE = 64, LANES = D / SLICE, KEYS = 32, THREADS = 128;
  static constexpr int ROWS = THREADS / LANES;
  using TileRow = float[LANES][SLICE + 4];
  TileRow K[KEYS], V[KEYS];

  // tile[j] = row k0 + j of x, zeros past the end
  template <class T>
  static __device__ void load(TileRow* tile, const T* x, int64_t row_stride, int k0, int rows) {
    for (int i = threadIdx.x; i < KEYS * D; i += THREADS) {
      const int j = i / D, d = i % D;
      tile[j][d / SLICE][d % SLICE] = k0 + j < rows ? number(x[(k0 + j) * row_stride + d]) : 0.0f;
    }
  }
};

template <class T, int D>
__global__ void __launch_bounds__(WitnessShared<D>::THREADS) witness(WitnessArgs a) {
  using W = WitnessShared<D>;
  W& s = dynamic_shared<W>();
  const int row_tiles = (a.Sq + W::ROWS - 1) / W::ROWS, slice = threadIdx.x % W::LANES;
  const int of_grid = int(blockIdx.x) / row_tiles, head = a.first_head + of_grid;
  const int row = int(blockIdx.x) % row_tiles * W::ROWS + int(threadIdx.x) / W::LANES;
  const int b = head / a.Hq, h = head % a.Hq, h_kv = h / (a.Hq / a.Hkv);
  const T* const Q_g = static_cast<const T*>(a.Q) + b * a.q.batch + h * a.q.head;
  const T* const K_g = static_cast<const T*>(a.K) + b * a.k.batch + h_kv * a.k.head;
  const T* const V_g = static_cast<const T*>(a.V) + b * a.v.batch + h_kv * a.v.head;
  const int q_row = row < a.Sq ? row : a.Sq - 1;  // threads past the end work for nothing
  float q[W::SLICE], O[W::SLICE] = {}, m = -INFINITY, l = 0;
#pragma unroll
  for (int d = 0; d < W::SLICE; d++) q[d] = number(Q_g[q_row * a.q.row + slice * W::SLICE + d]);
  const float scale = a.scale * factor(a.q_factor, b, h) * factor(a.k_factor, b, h_kv);
  const float v_factor = a.v_unit * factor(a.v_factor, b, h_kv);

  // Q[q_row] @ K[k0 + j], -inf where that key is not visible
  const auto score = [&](int k0, int j) {
    float4 sum{};
#pragma unroll
    for (int d = 0; d < W::SLICE; d += 4) {
      const float4 k = *reinterpret_cast<const float4*>(&s.K[j][slice][d]);
      sum.x = fmaf(q[d], k.x, sum.x), sum.y = fmaf(q[d + 1], k.y, sum.y);
      sum.z = fmaf(q[d + 2], k.z, sum.z), sum.w = fmaf(q[d + 3], k.w, sum.w);
    }
    float S = (sum.x + sum.y) + (sum.z + sum.w);
    for (int n = 1; n < W::LANES; n *= 2) S += __shfl_xor_sync(0xffffffffu, S, n);
    const int distance = k0 + j - q_row;
    return k0 + j < a.Sk && distance >= a.least && distance <= a.most ? S : -INFINITY;
  };
  for (int k0 = 0; k0 < a.Sk; k0 += W::KEYS) {
    __syncthreads();  // hazard: K still being read
    W::load(s.K, K_g, a.k.row, k0, a.Sk);
    __syncthreads();
#pragma unroll 1
    for (int j = 0; j < W::KEYS; j++) m = fmaxf(m, score(k0, j));
  }
  for (int k0 = 0; k0 < a.Sk; k0 += W::KEYS) {
    __syncthreads();  // hazard: K and V still being read
    W::load(s.K, K_g, a.k.row, k0, a.Sk), W::load(s.V, V_g, a.v.row, k0, a.Sk);
    __syncthreads();
    float tile_O[W::SLICE] = {}, tile_l = 0;  // summed apart: fewer roundings of the long sum
#pragma unroll 1
    for (int j = 0; j < W::KEYS; j++) {
      const float S = score(k0, j), P = S == -INFINITY ? 0.0f : expf((S - m) * scale);
      tile_l += P;
#pragma unroll
      for (int d = 0; d < W::SLICE; d++) tile_O[d] = fmaf(P, s.V[j][slice][d], tile_O[d]);
    }
    l += tile_l;
#pragma unroll
    for (int d = 0; d < W::SLICE; d++) O[d] += tile_O[d];
  }
  if (row >= a.Sq) return;
  const int64_t out = int64_t(of_grid) * a.Sq + row;
  if (slice == 0) a.LSE[out] = m * scale + logf(l);
#pragma unroll
  for (int d = 0; d < W::SLICE; d++) {
    a.O[out * D + slice * W::SLICE + d] = l == 0 ? 0.0f : O[d] / l * v_factor;
  }
}

template <class T, int D> cudaError_t launch_witness(const WitnessArgs& a, int heads) {
  using W = WitnessShared<D>;
  const cudaError_t error = cudaFuncSetAttribute(
      witness<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(W)));
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(heads * ((a.Sq + W::ROWS - 1) / W::ROWS));
  config.blockDim = dim3(W::THREADS);
  config.dynamicSmemBytes = sizeof(W);
  return cudaLaunchKernelEx(&config, witness<T, D>, a);
}

// O [heads,Sq,D] and LSE [heads,Sq] of query heads [first, first + heads), counted over batches.
template <class T>
cudaError_t launch_witness(const SdpaParams& p, int first, int heads, float* O, float* LSE) {
  const int own = p.causal == Causal::bottom_right ? p.Sk - p.Sq : 0, none = 2000000000;
  const int right = p.causal == Causal::off ? p.window_right : 0;
  const int least = p.window_left < 0 ? -none : own - p.window_left;
  const int most = right < 0 ? none : own + right;
  const double unit = unit_of(line.input);
  const double scale = (p.scale == 0 ? 1 / std::sqrt(double(p.D)) : p.scale) * unit * unit;
  const WitnessArgs a{p.Q,         p.K,         p.V,         p.q,         p.k,   p.v,  p.Hq,
                      p.Hkv,       p.Sq,        p.Sk,        first,       least, most, float(scale),
                      p.q_descale, p.k_descale, p.v_descale, float(unit), O,     LSE};
  return p.D == 64    ? launch_witness<T, 64>(a, heads)
         : p.D == 128 ? launch_witness<T, 128>(a, heads)
                      : launch_witness<T, 256>(a, heads);
}

// ---- Instance: a problem on the GPU, ready to launch and to check ----

struct Figures {  // of checks: the worst errors, and over how many rows
  double rel_rms = 0, rel_rms_limit = 0, max_abs_err = 0, lse_err = 0;
  long rows_checked = 0, rows_witnessed = 0;  // compared with the reference, with the witness

  void include(const reference::Comparison& c) {
    rel_rms = std::max(rel_rms, c.rel_rms);
    rel_rms_limit = std::max(rel_rms_limit, c.rel_rms_limit);
    max_abs_err = std::max(max_abs_err, c.max_abs_err);
    lse_err = std::max(lse_err, c.lse_err);
  }
};

class Instance;

// What tests/sweep.cu changes.
std::unique_ptr<DeviceTensor> (*make_tensor)(const Problem&, Tensor) =
    [](const Problem& p, Tensor t) { return std::make_unique<DeviceTensor>(p, t); };
string (*check_more)(Instance&) = [](Instance&) { return string(); };  // a sentence on failure
void (*set_machine)(const string&) = [](const string&) {};            // before anything is asked of the GPU

class Instance {
 public:
  explicit Instance(const Problem& p) : problem(p), params(params_of(p)) {
    // Inputs as floats and as elements, outputs twice, and of one tensor what it holds and must hold.
    // In double: a problem may have any sizes.
    const double host_need =
        (14.0 * p.B * p.Hq * p.Sq + 12.0 * p.B * p.Hkv * p.Sk) * double(line.D);
    const double host_bytes = double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGESIZE));
    if (host_need > host_bytes) {
      throw CudaError{format("checking the problem needs %.1f GB of host memory of %.1f GB",
                             host_need * 1e-9, host_bytes * 1e-9)};
    }
    for (int t = 0; t < 4; t++) tensors[t] = make_tensor(p, Tensor(t));
    lse_.reset(new Guarded("LSE", rows_of(p, Tensor::O) * sizeof(float)));
    const auto set = [&](auto*& pointer, Strides& strides, Tensor t) {
      pointer = static_cast<std::remove_reference_t<decltype(pointer)>>(at(t).first());
      strides = at(t).strides;
    };
    set(params.Q, params.q, Tensor::Q), set(params.K, params.k, Tensor::K);
    set(params.V, params.v, Tensor::V), set(params.O, params.o, Tensor::O);
    params.LSE = lse_->data<float>();
    Descale* const descales[] = {&params.q_descale, &params.k_descale, &params.v_descale};
    for (int t = 0; t < 3 && element_bytes(line.input) == 1; t++) {
      factors_[t].reset(new DeviceFactors(p, Tensor(t)));
      *descales[t] = factors_[t]->descale;
    }
    workspace_.reset(new Guarded("the workspace", line.facts_of(params).workspace_bytes(params)));
    workspace_->fill(0);
    params.workspace = workspace_->data();
  }

  void set_inputs(uint64_t seed) {
    problem.seed = seed;
    vector<double>* const factors[] = {&problem.q_factor, &problem.k_factor, &problem.v_factor};
    for (int t = 0; t < 3; t++) {
      vector<float>& x = inputs_[t];
      x = make_input(problem, Tensor(t), *reference::dist_named(problem.dist), seed,
                     problem.same_heads);
      const float step = problem.descale == "none" ? float(unit_of(line.input)) : step_for(x);
      if (factors_[t]) *factors[t] = factors_[t]->set(step, seed);
      tensors[t]->write(held_[t] = round_to_elements(x, step));
    }
    problem.Q = inputs_[0].data(), problem.K = inputs_[1].data(), problem.V = inputs_[2].data();
  }

  // Launches and compares the outputs with the reference, then launches `repeats` times more, which must
  // leave the same bits: the first time with as many CTAs as are resident, then with max_ctas, on which
  // no bit may depend. Returns a sentence on failure.
  string check(Figures& figures, int repeats) {
    params.max_ctas = 0;
    string trouble = run_once();
    params.max_ctas = problem.max_ctas;
    if (trouble.empty()) trouble = compare(figures);
    checked = got;
    if (trouble.empty()) trouble = check_more(*this);
    for (int n = 0; n < repeats && trouble.empty(); n++) {
      trouble = check_again("of two runs on the same inputs differs");
    }
    return trouble;
  }
  // Another run must give the bits of the checked one; else a sentence.
  string check_again(const char* sentence) {
    const string trouble = run_once();
    return trouble.empty() ? difference(sentence) : trouble;
  }
  // Of launches since poison() the last must have left the bits of the checked run; else a sentence.
  string check_last(const char* sentence) {
    const string trouble = collect();
    return trouble.empty() ? difference(sentence) : trouble;
  }

  void poison() { at(Tensor::O).poison(), lse_->fill(0xff); }
  static void launch(const SdpaParams& p, cudaStream_t stream = 0) {
    const SdpaStatus status = line.forward(p, stream);
    if (!status.ok()) throw CudaError{status.text};
  }
  // Launches once. Returns a sentence if something but the outputs was written.
  string run_once() {
    poison();
    launch(params);
    string trouble = collect();
    for (int t = 0; t < 3; t++) {
      const bool same = tensors[t]->read(trouble) == held_[t];
      if (!same && trouble.empty()) trouble = "the kernel wrote into " + tensors[t]->name;
    }
    return trouble;
  }

  DeviceTensor& at(Tensor t) { return *tensors[int(t)]; }
  // Empty, or the first element in which two results differ.
  string difference(const char* name, const Bits& want, const Bits& other,
                    const char* sentence) const {
    const size_t i = std::mismatch(other.begin(), other.end(), want.begin()).first - other.begin();
    if (i == other.size()) return "";
    return name + where(i) +
           format(" %s: %.9g and %.9g", sentence, double(output_value(want[i])),
                  double(output_value(other[i])));
  }

  Problem problem;
  SdpaParams params;
  std::unique_ptr<DeviceTensor> tensors[4];  // Q, K, V, O
  struct Outputs {
    Bits O;
    vector<uint32_t> LSE;
  } got, checked;  // of the last run, and of the one that was compared

 private:
  // Waits, and fetches the outputs into `got`. Returns a sentence if anything around them or around the
  // workspace was written, or if the workspace is not as the next launch must find it.
  string collect() {
    require(cudaDeviceSynchronize(), "running the kernel");
    string trouble;
    got.O = at(Tensor::O).read(trouble);
    got.LSE = lse_->fetch<uint32_t>(lse_->bytes);
    lse_->expect_guards(trouble), workspace_->expect_guards(trouble);
    if (!trouble.empty()) return trouble;
    for (uint32_t word : workspace_->fetch<uint32_t>(line.facts_of(params).zeroed_bytes)) {
      if (word) return format("the kernel left %u in the workspace, which must be zero", word);
    }
    return "";
  }

  // Empty if `got` has the bits of `checked`.
  string difference(const char* sentence) const {
    if (checked.LSE != got.LSE) return string("LSE ") + sentence;
    return difference("O", checked.O, got.O, sentence);
  }

  // `got` with the reference and, where that has not seen every row, with the witness.
  string compare(Figures& figures) {
    for (size_t i = 0; i < got.O.size(); i++) {
      if (got.O[i] == 0xffff) return "O" + where(i) + " was never written";
    }
    for (size_t row = 0; row < got.LSE.size(); row++) {
      if (got.LSE[row] == ~0u) return "LSE" + where(row * line.D) + " was never written";
    }
    const Problem& p = problem;
    const auto rows = reference::rows_to_check(p, p.seed, line.facts_of(params).item_rows, 1.5e9);
    const auto want = reference::attend(p, rows);
    reference::Comparison comparison(output_type, judges_rounding());
    for (size_t i = 0; i < rows.size(); i++) {
      const Row row = output_row(rows[i]);
      comparison.add(rows[i], want[i], row.O, row.LSE);
    }
    const string trouble = comparison.verdict(tolerance_of(problem.scale));
    figures.include(comparison);
    figures.rows_checked += comparison.rows;
    if (!trouble.empty() || rows.size() == got.LSE.size() || problem.dist == "nonfinite")
      return trouble;
    return has_clock ? compare_with_witness(figures, rows, want) : all_finite();
  }

  // Every row with the witness, and the witness with the reference on the rows of `sample`.
  string compare_with_witness(Figures& figures, const vector<reference::Row>& sample,
                              const vector<reference::Result>& want) {
    const size_t D = line.D, S = problem.Sq, heads = heads_of(problem, Tensor::O);
    const size_t most_heads = std::min(heads, std::max<size_t>(1, (size_t(1) << 26) / (S * D)));
    const Guarded O_g("O of the witness", most_heads * S * D * sizeof(float));
    const Guarded LSE_g("LSE of the witness", most_heads * S * sizeof(float));
    reference::Comparison with_reference(output_type, false),
        with_witness(output_type, judges_rounding());
    size_t next = 0;  // of the sample, which is in order
    for (size_t first = 0; first < heads; first += most_heads) {
      const size_t count = std::min(most_heads, heads - first);
      constexpr decltype(&launch_witness<__half>) launches[] = {
          launch_witness<__half>, launch_witness<__nv_bfloat16>, launch_witness<__nv_fp8_e4m3>,
          launch_witness<uint8_t>};
      const auto launch = launches[int(line.input)];
      require(launch(params, int(first), int(count), O_g.data<float>(), LSE_g.data<float>()),
              "launching the witness");
      const vector<float> O = O_g.fetch<float>(count * S * D * sizeof(float));
      const vector<float> LSE = LSE_g.fetch<float>(count * S * sizeof(float));
      for (; next < sample.size(); next++) {
        const size_t row = row_number(sample[next]) - first * S;
        if (row >= count * S) break;
        with_reference.add(sample[next], want[next], &O[row * D], LSE[row]);
      }
      vector<reference::Comparison> of_head(count, reference::Comparison(output_type, false));
      reference::parallel_for(count, [&](size_t i) {
        const int b = int(first + i) / problem.Hq, h = int(first + i) % problem.Hq;
        for (size_t row = i * S; row < (i + 1) * S; row++) {
          const reference::Row at{b, h, int(row - i * S)};
          const Row ours = output_row(at);
          of_head[i].add(at, line.D, &O[row * D], LSE[row], nullptr, ours.O, ours.LSE);
        }
      });
      for (const reference::Comparison& c : of_head) with_witness.merge(c);
    }
    // Sums in fp32 lose with the size of the logits.
    const double limit = 1e-5 * std::min(30.0, std::max(1.0, with_reference.largest_lse / 32));
    string trouble = with_reference.verdict({limit, limit, limit});
    if (!trouble.empty()) return "the witness is wrong: " + trouble;
    trouble = with_witness.verdict(tolerance_of(problem.scale));
    figures.include(with_witness);
    figures.rows_witnessed += with_witness.rows;
    return trouble.empty() ? "" : "against the witness: " + trouble;
  }

  // cuBLAS has its own rounding of O, and of P after the division by its sum; tensor cores truncate their
  // sums, which adds up over very many keys; P of a coarser type than O, and sums in fp16, hide how O was rounded; of u8
  // a single weight is often no power of two, and its own rounding shows in all of a row.
  bool judges_rounding() const {
    return !line.is_cublas && !line.fp16_acc && line.input != DType::u8 && problem.Sk <= 1 << 14 &&
           input_type.mantissa_bits >= output_type.mantissa_bits;
  }

  string all_finite() const {
    for (size_t i = 0; i < got.O.size(); i++) {
      if (!std::isfinite(output_value(got.O[i]))) return "O" + where(i) + " is not finite";
    }
    return "";
  }

  struct Row {
    float O[256], LSE;
  };
  Row output_row(const reference::Row& at) const {
    const size_t n = row_number(at);
    Row row;
    for (int d = 0; d < line.D; d++) row.O[d] = output_value(got.O[n * line.D + d]);
    row.LSE = float_of(got.LSE[n]);
    return row;
  }
  size_t row_number(const reference::Row& at) const {  // in [B,Hq,Sq]
    return (size_t(at.b) * problem.Hq + at.h) * problem.Sq + at.q;
  }
  string where(size_t i) const {
    const size_t D = line.D, S = problem.Sq, H = problem.Hq;
    return format("(b=%d,h=%d,q=%d,d=%d)", int(i / D / S / H), int(i / D / S % H), int(i / D % S),
                  int(i % D));
  }

  std::unique_ptr<Guarded> lse_, workspace_;
  std::unique_ptr<DeviceFactors> factors_[3];  // of Q, K and V with 8 bits
  vector<float> inputs_[3];                    // Q, K, V, rounded
  Bits held_[3];                               // what they are in device memory
};

}  // namespace
}  // namespace SDPA_NAMESPACE
