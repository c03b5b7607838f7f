// The contract of sdpa_forward() besides numerical results, on the CPU backend: refusals, error
// handling, grid sizes, and independence of host threads and devices. Built for one line of each
// kind.
#define SDPA_NO_MAIN
#ifndef SDPA_SOURCE
#define SDPA_SOURCE "../sdpa.cu"
#endif
#include SDPA_SOURCE

#include <climits>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "../harness/sizes.h"
#include "../reference.cpp"
#include "check.h"
#include "members.h"

using namespace SDPA_NAMESPACE;
using std::string;
using std::vector;

// Zero-initialized device memory.
class Workspace {
 public:
  explicit Workspace(size_t bytes) : bytes(bytes) {
    cudaMalloc(&memory_, bytes);
    cudaMemset(memory_, 0, bytes);
  }
  ~Workspace() { cudaFree(memory_); }
  Workspace(const Workspace&) = delete;
  operator void*() const { return memory_; }
  const size_t bytes;

 private:
  void* memory_;
};
// Scratch memory. on_stream() fills this thread's with 0xff before each call.
struct Scratch : Workspace {
  explicit Scratch(size_t bytes) : Workspace(bytes) { all.insert(this); }
  ~Scratch() { all.erase(this); }
  static inline thread_local std::set<const Scratch*> all;
};
// Exactly the memory that a problem needs; the backend reports out-of-bounds accesses.
struct Owned {
  Owned(SdpaParams& p, const LaunchMemory& memory) : workspace(memory.state), scratch(memory.scratch) {
    p.workspace = workspace;
    p.scratch = scratch;
  }
  explicit Owned(SdpaParams& p) : Owned(p, memory_for(p)) {}
  const Workspace workspace;
  const Scratch scratch;

 private:
  static LaunchMemory memory_for(SdpaParams p) {
    p.scratch = &p;
    return {sdpa_workspace_bytes(p), sdpa_scratch_bytes(p)};
  }
};

// Calls enqueue(stream) with a new stream. All launches must use this stream and the current
// device.
template <class Enqueue> static SdpaStatus on_stream(const Enqueue& enqueue, vector<simt::Launch>* launches = nullptr) {
  thread_local char stream;
  vector<simt::Launch> log;
  for (const Scratch* scratch : Scratch::all) cudaMemset(*scratch, 0xff, scratch->bytes);
  simt::launch_log = &log;
  const SdpaStatus status = enqueue(static_cast<cudaStream_t>(&stream));
  simt::launch_log = nullptr;
  bool all_there = true;
  for (const simt::Launch& launch : log) {
    all_there = all_there && launch.stream == &stream && launch.device == simt::current_device;
  }
  CHECK(all_there);
  if (launches) *launches = log;
  return status;
}

struct Memory {
  const void* data;
  size_t bytes;
};
struct Copies {
  static constexpr int most = 16;
  struct { unsigned char* to; const unsigned char* from; int64_t bytes; } each[most];
};
// A kernel that writes the inputs of the next launch, which must wait before it reads them.
static void copy_kernel(const Copies copies) {
  for (const auto& copy : copies.each) {
    for (int64_t i = threadIdx.x; i < copy.bytes / 16; i += blockDim.x) {
      st_global(reinterpret_cast<uint4*>(copy.to) + i, reinterpret_cast<const uint4*>(copy.from)[i]);
    }
    for (int64_t i = copy.bytes / 16 * 16 + threadIdx.x; i < copy.bytes; i += blockDim.x) {
      st_global(copy.to + i, copy.from[i]);
    }
  }
}
// Launches it. Until then the inputs are 0xff bytes.
static void write_by_kernel(const vector<Memory>& inputs, vector<vector<unsigned char>>& held, cudaStream_t stream) {
  Copies copies{};
  REQUIRE(inputs.size() <= Copies::most);
  for (size_t n = 0; n < inputs.size(); n++) {
    auto* const data = static_cast<unsigned char*>(const_cast<void*>(inputs[n].data));
    held.emplace_back(data, data + inputs[n].bytes);
    memset(data, 0xff, inputs[n].bytes);
    copies.each[n] = {data, held.back().data(), int64_t(inputs[n].bytes)};
  }
  const cudaLaunchConfig_t launch{dim3(1), dim3(64), 0, stream, nullptr, 0};
  REQUIRE(cudaLaunchKernelEx(&launch, copy_kernel, copies) == cudaSuccess);
}

// The rows of sequence b in a tensor with `rows` rows.
struct Rows { int first, count; };
static Rows rows_of(const int* starts, int b, int rows) {
  if (!starts) return {0, rows};
  const auto cut_off = [&](int start) { return std::max(0, std::min(start, rows)); };
  return {cut_off(starts[b]), std::max(0, cut_off(starts[b + 1]) - cut_off(starts[b]))};
}
static Rows queries_of(const SdpaParams& p, int b) {
  const Rows rows = rows_of(p.q_starts, b, p.Sq);
  return {rows.first, p.q_lengths ? std::max(0, std::min(p.q_lengths[b], rows.count)) : rows.count};
}
static Rows keys_of(const SdpaParams& p, int b) {
  Rows keys = rows_of(p.k_starts, b, p.Sk);
  if (p.k_lengths) keys.count = std::max(0, std::min(p.k_lengths[b], keys.count));
  if (p.most_keys > 0) keys.count = std::min(keys.count, p.most_keys);
  const int left_out = p.k_firsts ? std::max(0, std::min(p.k_firsts[b], keys.count)) : 0;
  return {keys.first + left_out, keys.count - left_out};
}
constexpr bool takes_firsts = Defines::use_lengths && Defines::use_pages != 1;

// A problem with contiguous tensors [B,H,S,D] on the current device.
class Attention {
 public:
  SdpaParams p;

  Attention(int B, int Hq, int Hkv, int Sq, int Sk, Causal causal = Causal::off, uint32_t seed = 1)
      : p(params_of_sizes(B, Hq, Hkv, Sq, Sk, Defines::head_dim, Defines::head_dim)) {
    constexpr int D = Defines::head_dim;
    p.causal = causal;
    o_elements_ = size_t(B) * Hq * Sq * D;
    p.Q = input<Query>(q_, o_elements_, seed);
    p.K = input<KeyValue>(k_, size_t(B) * Hkv * Sk * D, seed + 1);
    p.V = input<KeyValue>(v_, k_.size(), seed + 2);
    p.O = allocate<Output>(o_elements_);
    p.LSE = allocate<float>(o_elements_ / D);
    owned_.emplace(p);
  }
  ~Attention() {
    for (void* pointer : memory_) cudaFree(pointer);
  }
  Attention(const Attention&) = delete;
  Attention& operator=(const Attention&) = delete;

  // Poisons the outputs, launches and waits. Returns the text of the status.
  string forward() const { return forward(p); }
  string forward(const SdpaParams& changed) const { return call(changed).text; }
  SdpaStatus call(const SdpaParams& changed, vector<simt::Launch>* launches = nullptr) const {
    return call_by([&](cudaStream_t stream) { return sdpa_forward(changed, stream); }, launches);
  }
  template <class Enqueue> SdpaStatus call_by(const Enqueue& enqueue, vector<simt::Launch>* launches = nullptr) const {
    cudaMemset(p.O, 0xff, o_elements_ * sizeof(Output));
    cudaMemset(p.LSE, 0xff, o_elements_ / p.D * sizeof(float));
    const SdpaStatus status = on_stream(enqueue, launches);
    cudaDeviceSynchronize();
    return status;
  }
  vector<Memory> inputs() const {
    const auto of = [](const auto* data, const vector<float>& x) { return Memory{data, x.size() * sizeof *data}; };
    return {of(p.Q, q_), of(p.K, k_), of(p.V, v_)};
  }
  // True if O and LSE equal the reference. `keys` limits the number of keys, for problems with one
  // key head.
  bool is_right(int keys = -1) const {
    const auto mask = p.causal == Causal::bottom_right ? reference::Mask::bottom_right
                      : p.causal == Causal::top_left   ? reference::Mask::top_left
                                                       : reference::Mask::none;
    const reference::Problem problem{p.B,       p.Hq,      p.Hkv,    p.Sq,
                                     keys < 0 ? p.Sk : keys, p.D, mask, 1 / std::sqrt(double(p.D)),
                                     q_.data(), k_.data(), v_.data()};
    vector<Output> O(o_elements_);
    vector<float> LSE(o_elements_ / p.D);
    cudaMemcpy(O.data(), p.O, O.size() * sizeof(Output), cudaMemcpyDeviceToHost);
    cudaMemcpy(LSE.data(), p.LSE, LSE.size() * sizeof(float), cudaMemcpyDeviceToHost);
    const bool bf16 = Defines::q_type == DType::bf16 || Defines::o_type == DType::bf16;
    const double limit = bf16 ? 2e-2 : 2e-3;
    for (size_t row = 0; row < LSE.size(); row++) {
      const int q = int(row % p.Sq), h = int(row / p.Sq % p.Hq), b = int(row / p.Sq / p.Hq);
      const reference::Result want = reference::attend(problem, {b, h, q});
      if (LSE[row] != want.LSE && !(std::fabs(LSE[row] - want.LSE) <= limit)) return false;
      for (int d = 0; d < p.D; d++) {
        if (!(std::fabs(float(O[row * p.D + d]) - want.O[d]) <= limit)) return false;
      }
    }
    return true;
  }
  // True if O and LSE are correct for all members of p, and no other memory was written. Reads
  // device memory directly, which the CPU backend permits.
  bool is_right(const SdpaParams& p) const {
    constexpr int D = Defines::head_dim, Dv = Defines::d_v;
    const double unit = element_unit<Defines>, limit = Defines::q_type == DType::bf16 || Defines::o_type == DType::bf16 ? 2e-2 : 2e-3;
    vector<char> is_written(o_elements_, 0), has_lse(o_elements_ / D, 0);
    bool right = true;
    for (int b = 0; b < p.B; b++) {
      const Rows queries = queries_of(p, b), of_k = keys_of(p, b);
      const int keys = of_k.count, q_batch = p.q_starts ? 0 : b, k_batch = p.k_starts ? 0 : b;
      for (int h = 0; h < p.Hq; h++) {
        const int h_kv = h / (p.Hq / p.Hkv);
        vector<float> Q, K, V;
        const auto append = [](vector<float>& x, const auto* row, int width) {
          for (int d = 0; d < width; d++) x.push_back(to_float(row[d]));
        };
        const auto key = [&](const KeyValue* tensor, const Strides& s, int k) {
          if (!p.page_table) return tensor + k_batch * s.batch + h_kv * s.head + (of_k.first + k) * s.row;
          const int row = of_k.first + k, page = p.page_table[int64_t(b) * p.page_stride + row / p.page_size];
          return tensor + std::max(0, std::min(page, p.pages - 1)) * s.batch + h_kv * s.head + row % p.page_size * s.row;
        };
        for (int q = 0; q < queries.count; q++) {
          append(Q, p.Q + q_batch * p.q.batch + h * p.q.head + (queries.first + q) * p.q.row, D);
        }
        for (int k = 0; k < keys; k++) {
          append(K, key(p.K, p.k, k), D);
          append(V, key(p.V, p.v, k), Dv);
        }
        reference::Problem of{1, 1, 1, queries.count, keys, D, reference::Mask(int(p.causal)),
                              p.scale == 0 ? 1 / std::sqrt(double(D)) : double(p.scale), Q.data(), K.data(), V.data()};
        of.window_left = p.window_left;
        of.window_right = p.window_right;
        of.window_alignment = reference::Mask(int(p.window_alignment));
        of.softcap = p.softcap;
        of.Dv = Dv;
        of.q_factor = {unit * p.q_descale.of_head(b, h)};
        of.k_factor = {unit * p.k_descale.of_head(b, h_kv)};
        of.v_factor = {unit * p.v_descale.of_head(b, h_kv)};
        if (p.sinks) of.sinks = {p.sinks[h]};
        for (int k = 0; p.key_mask && k < keys; k++) of.key_mask.push_back(p.key_mask[b * p.key_mask_stride + k] != 0);
        if (p.bias) {
          const int columns = p.bias_keys ? p.bias_keys : keys;
          of.bias = {{}, 1, 1, queries.count, columns, p.bias_keys > 0, Defines::use_bias == 2};
          for (int at = 0; at < queries.count * columns; at++) {
            const int64_t element = b * p.bias_strides.batch + h * p.bias_strides.head +
                                    at / columns * p.bias_strides.row + at % columns;
            const float x = to_float(static_cast<const Bias*>(p.bias)[element]);
            of.bias.x.push_back(Defines::adds_bias ? x : x == to_float(Bias(0)) ? -INFINITY : 0);
          }
        }
        for (int q = 0; q < queries.count; q++) {
          const Output* const O = p.O + q_batch * p.o.batch + h * p.o.head + (queries.first + q) * p.o.row;
          const size_t row = (size_t(q_batch) * p.Hq + h) * p.Sq + queries.first + q, at = O - this->p.O;
          const bool is_others = is_written[at];  // a row of several sequences is that of one of them
          if (p.LSE) has_lse[p.LSE + row - this->p.LSE] = 1;
          std::fill_n(is_written.begin() + at, Dv, 1);
          if (is_others) continue;
          const reference::Result want = reference::attend(of, {0, 0, q});
          const float LSE = p.LSE ? p.LSE[row] : float(want.LSE);
          right = right && (LSE == want.LSE || std::fabs(LSE - want.LSE) <= limit * std::max(1.0, std::fabs(want.LSE)));
          for (int d = 0; d < Dv; d++) right = right && std::fabs(to_float(O[d]) - want.O[d]) <= limit;
        }
      }
    }
    const auto untouched = [](const auto* memory, const vector<char>& but_for) {
      const auto* const bytes = reinterpret_cast<const unsigned char*>(memory);
      for (size_t i = 0; i < but_for.size() * sizeof *memory; i++) {
        if (!but_for[i / sizeof *memory] && bytes[i] != 0xff) return false;
      }
      return true;
    };
    return right && untouched(this->p.O, is_written) && untouched(this->p.LSE, has_lse);
  }

 private:
  template <class T> T* allocate(size_t count) {
    T* pointer = nullptr;
    cudaMalloc(&pointer, count * sizeof(T));
    memory_.push_back(pointer);
    return pointer;
  }
  // Numbers from -2 to 2 on the device and, rounded equally, in `host`.
  template <class E> const E* input(vector<float>& host, size_t elements, uint32_t seed) {
    vector<E> x(elements);
    host.resize(elements);
    for (size_t i = 0; i < elements; i++) {
      uint32_t h = (uint32_t(i) + 77 * seed) * 2654435761u;
      h = (h ^ h >> 15) * 0x85ebca6bu;
      x[i] = rounded<E>(float(h >> 8 & 0xffff) / 16384 - 2);
      host[i] = to_float(x[i]);
    }
    E* const pointer = allocate<E>(elements);
    cudaMemcpy(pointer, x.data(), elements * sizeof(E), cudaMemcpyHostToDevice);
    return pointer;
  }

  vector<void*> memory_;
  std::optional<Owned> owned_;
  vector<float> q_, k_, v_;
  size_t o_elements_;
};

static bool begins(const string& text, const char* words) { return text.find(words) == 0; }
static bool contains(const string& text, const char* words) {
  return text.find(words) != string::npos;
}

// CASE("name") and CASE_IF("name", condition) define test cases, which are compiled only if the condition is true and
// CASES, if it is not empty, contains the name.
#ifndef CASES
#define CASES ""
#endif
constexpr bool is_named(std::string_view name) {
  std::string_view names = CASES;
  if (names.empty()) return true;
  while (!names.empty()) {
    const size_t length = std::min(names.find(','), names.size());
    if (names.substr(0, length) == name) return true;
    names.remove_prefix(std::min(length + 1, names.size()));
  }
  return false;
}
template <template <bool> class Case, bool IS_COMPILED> static void run_case() {
  if constexpr (IS_COMPILED) Case<true>::run();
}
#define CASE(name) CASE_IF(name, true)
#define CASE_IF(name, ...) CASE_OF(DOCTEST_ANONYMOUS(Case), name, (is_named(name) && (__VA_ARGS__)))
#define CASE_OF(Case, name, is_compiled)                                               \
  template <bool> struct Case { static void run(); };                                  \
  TEST_CASE(name * doctest::skip(!is_compiled)) { run_case<Case, is_compiled>(); }     \
  template <bool IS_COMPILED> void Case<IS_COMPILED>::run()

template <class T> static T* moved(T* pointer, int bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(pointer) + bytes);
}

CASE("pointers") {
  const Attention a(1, 2, 1, 40, 30);
  CHECK((a.forward() == "" && a.is_right()));
  const auto refusal = [&](const auto& change) {
    SdpaParams p = a.p;
    change(p);
    return a.forward(p);
  };
  CHECK(refusal([](SdpaParams& p) { p.Q = nullptr; }) == "Q is a null pointer");
  CHECK(refusal([](SdpaParams& p) { p.K = nullptr; }) == "K is a null pointer");
  CHECK(refusal([](SdpaParams& p) { p.V = nullptr; }) == "V is a null pointer");
  CHECK(refusal([](SdpaParams& p) { p.O = nullptr; }) == "O is a null pointer");
  constexpr int element = sizeof(KeyValue), vec = Defines::vec_width;
  for (int bytes = element == 1 ? 1 : element / 2; bytes < vec * element; bytes *= 2) {
    CHECK(begins(refusal([&](SdpaParams& p) { p.Q = moved(p.Q, bytes); }), "Q is not aligned to"));
    CHECK(begins(refusal([&](SdpaParams& p) { p.K = moved(p.K, bytes); }), "K is not aligned to"));
    CHECK(begins(refusal([&](SdpaParams& p) { p.V = moved(p.V, bytes); }), "V is not aligned to"));
    CHECK(begins(refusal([&](SdpaParams& p) { p.O = moved(p.O, bytes); }), "O is not aligned to"));
  }
  for (int bytes = 1; bytes < 4; bytes++) {
    CHECK(refusal([&](SdpaParams& p) { p.LSE = moved(p.LSE, bytes); }) ==
          "LSE is not aligned to 4 bytes");
  }
  static const float factors[2] = {};
  for (Descale SdpaParams::*d :
       {&SdpaParams::q_descale, &SdpaParams::k_descale, &SdpaParams::v_descale}) {
    const std::string no = refusal([&](SdpaParams& p) { (p.*d).factor = moved(factors, 2); });
    const bool of_q = d == &SdpaParams::q_descale;
    CHECK(contains(no, (of_q ? Defines::q_bytes == 1 : Defines::kv_bytes == 1) ? "_descale is not aligned to 4 bytes"
                       : of_q ? "_descale is for builds with an 8-bit DTYPE; set it to 0"
                              : "_descale is for builds with an 8-bit DTYPE or KV_DTYPE; set it to 0"));
  }
  if (sdpa_workspace_bytes(a.p)) {
    CHECK(begins(refusal([](SdpaParams& p) { p.workspace = nullptr; }), "workspace is null"));
  }
  if (sdpa_scratch_bytes(a.p)) {
    CHECK(begins(refusal([](SdpaParams& p) { p.workspace = p.scratch = nullptr; }), "workspace is null"));
  }
  for (const auto& [name, member] : {std::pair{"workspace", &SdpaParams::workspace}, {"scratch", &SdpaParams::scratch}}) {
    for (int bytes = 1; bytes < 256; bytes *= 2) {
      const string said = refusal([&, m = member](SdpaParams& p) { p.*m = moved(static_cast<char*>(p.*m), bytes); });
      CHECK(begins(said, (name + string(" is not aligned to")).c_str()));
    }
  }
  // Without LSE, its memory is not written.
  SdpaParams p = a.p;
  p.LSE = nullptr;
  CHECK((a.forward(p) == "" && !a.is_right()));
  CHECK((a.forward() == "" && a.is_right()));
}

// Strides of dimensions of size 1 may have any value.
CASE("idle_strides") {
  const int64_t anything[] = {1, 12345677, -3, int64_t(1) << 62, -(int64_t(1) << 62)};
  const int shapes[][2] = {{40, 30}, {1, 30}, {40, 1}, {1, 1}};
  for (const auto& shape : shapes) {
    const Attention a(1, 1, 1, shape[0], shape[1]);
    for (int64_t x : anything) {
      SdpaParams p = a.p;
      for (Strides* s : {&p.q, &p.k, &p.v, &p.o}) s->batch = s->head = x;
      if (p.Sq == 1) p.q.row = p.o.row = x;
      if (p.Sk == 1) p.k.row = p.v.row = x;
      CHECK((a.forward(p) == "" && a.is_right()));
    }
  }
}

// The same memory with other sizes, strides, heads, masks and tiles: earlier calls have no effect. With lengths,
// changed_members includes these changes.
CASE_IF("changed_tensors", (Defines::is_wgmma || Defines::use_tuned) && !Defines::use_lengths) {
  const Attention a(1, 4, 4, 40, 60);
  const auto bits = [&](const SdpaParams& p) {
    CHECK(a.forward(p) == "");
    vector<Output> O(4 * 40 * size_t(a.p.D));
    cudaMemcpy(O.data(), a.p.O, O.size() * sizeof(Output), cudaMemcpyDeviceToHost);
    return O;
  };
  using Change = void (*)(SdpaParams&);
  const Change same = [](SdpaParams&) {};
  const Change fewer_rows = [](SdpaParams& p) { p.Sq = 20; };
  const Change fewer_keys = [](SdpaParams& p) { p.Sk = 33; };
  const Change later_q = [](SdpaParams& p) {
    p.Sq = 20;
    p.Q += 20 * p.D;
  };
  const Change later_o = [](SdpaParams& p) {
    p.Sq = 20;
    p.O += 20 * p.D;
  };
  const Change later_k = [](SdpaParams& p) {
    p.Sk = 33;
    p.K += 20 * p.D;
  };
  const Change one_tensor = [](SdpaParams& p) { p.V = p.K; };
  const Change causal = [](SdpaParams& p) { p.causal = Causal::bottom_right; };
  const Change window = [](SdpaParams& p) {
    p.window_left = 9;
    p.window_right = 3;
  };
  const Change groups = [](SdpaParams& p) { p.Hkv = 2; };
  const Change fewer_heads = [](SdpaParams& p) { p.Hkv = p.Hq = 2; };
  const Change batches = [](SdpaParams& p) {
    p.B = 2;
    p.Hq = p.Hkv = 2;
    for (Strides* s : {&p.q, &p.k, &p.v, &p.o}) s->batch = 2 * s->head;
  };
  const Change narrow_v = [](SdpaParams& p) {
    p.Sk = 33;
    p.Dv = Defines::is_wgmma ? 32 : p.Dv;
  };
  const Change other_way = [](SdpaParams& p) {  // [B,S,H,D]
    for (Strides* s : {&p.q, &p.k, &p.v, &p.o}) {
      s->head = p.D;
      s->row = 4 * p.D;
    }
  };
  for (Change change : {same, fewer_rows, later_q, fewer_rows, later_o, same, fewer_keys, later_k, fewer_keys, same,
                        one_tensor, same, causal, window, same, groups, fewer_heads, same, batches, same, other_way, same,
                        narrow_v, fewer_keys}) {
    SdpaParams p = a.p;
    change(p);
    for (int sms : {1, 132}) {  // a tuned line takes another tile
      if (sms > 1 && !Defines::use_tuned) break;
      simt::gpu.sms[0] = sms;
      const vector<Output> O = bits(p);
      vector<Output> first_of_its_thread;
      std::thread([&] { first_of_its_thread = bits(p); }).join();
      CHECK(memcmp(O.data(), first_of_its_thread.data(), O.size() * sizeof(Output)) == 0);
    }
  }
  simt::gpu = {};
}

// An array in device memory, without padding.
template <class T> class Held {
 public:
  Held(const vector<T>& x) : bytes_(x.size() * sizeof(T)) {
    cudaMalloc(&memory_, bytes_);
    *this = x;
  }
  ~Held() { cudaFree(memory_); }
  Held(const Held&) = delete;
  void operator=(const vector<T>& x) { cudaMemcpy(memory_, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice); }
  operator const T*() const { return memory_; }
  operator Memory() const { return {memory_, bytes_}; }

 private:
  size_t bytes_;
  T* memory_;
};
using Ints = Held<int>;
using Floats = Held<float>;

// Calls use(B()) for each build B from which this one chooses.
template <int N = next_tile(0), class Use> static void for_each_build(const Use& use) {
  if constexpr (!Defines::use_tuned) {
    use(Defines());
  } else if constexpr (N < tile_count) {
    use(BuildOf<N>());
    for_each_build<next_tile(N + 1)>(use);
  }
}
template <int N> constexpr bool lists_from() {
  if constexpr (N < tile_count) return lists_from_map<BuildOf<N>> || lists_from<next_tile(N + 1)>();
  return false;
}
constexpr bool has_map_of_bias = Defines::use_tuned ? lists_from<next_tile(0)>() : lists_from_map<Defines>;

static SdpaStatus map_bias_of(const SdpaParams& p) {
  return on_stream([&](cudaStream_t stream) { return sdpa_map_bias(p, stream); });
}

// True if this build accepts the member.
static bool is_of_build(const string& member) {
  if (member == "Dv" && Defines::head_dim != Defines::d_v) return false;
  if (member == "bias_map_bytes" && !lists_from_map<Defines>) return false;
  if ((member == "bias_map" || member == "bias_keys") && Defines::key_bias) return false;
  return takes_member({Defines::use_persistent_cta != 0, Defines::use_softcap != 0, Defines::kv_bytes == 1, Defines::q_bytes == 1, Defines::use_sinks != 0,
                       Defines::use_lengths != 0, Defines::use_pages != 0, takes_firsts, Defines::use_bias != 0, Defines::use_key_mask}, member);
}

// A problem with all features of this build.
struct Featured {
  static constexpr int D = Defines::head_dim, Q_ROWS = 24, K_ROWS = 80;
  const Attention a{3, 4, 2, Q_ROWS, K_ROWS};
  const Ints lengths{{70, 41}}, table{{3, 1, 11, 0, 5, 9, 2, 6, 8, 10, 7, 1}};
  // Numbers from -2 to 2, or bytes with some zeros; the memory ends with the last key of the last
  // query.
  const Held<Bias> bias{[] {
    vector<Bias> x(1 + 3600 + 3 * 900 + 11 * 75 + 70);
    for (int i = 0; i < int(x.size()); i++) {
      x[i] = rounded<Bias>(Defines::use_bias == 2 ? float(i % 8 * (i % 11)) : float(i * 37 % 64) / 16 - 2);
    }
    return x;
  }()};
  // Two batches with an odd stride: a run of keys and some other keys are hidden.
  const Held<uint8_t> key_mask{[] {
    vector<uint8_t> x(1 + 2 * 71);
    for (int i = 0; i < int(x.size()); i++) x[i] = i % 71 / 16 == 2 ? 0 : uint8_t(i % 7 * 42);
    return x;
  }()};
  const Floats sinks{{1, -2, 3, 0}}, factors{{0.5, 1, 0.75, 1.25, 0.625, 1.5, 0.875, 1}};
  SdpaParams p = a.p;

  Featured() {
    p.B = 2;
    p.Sq = 12;
    p.Sk = 70;
    p.o.batch = 5 * p.o.head;
    if (Defines::use_lengths) p.k_lengths = lengths;
    if (Defines::use_sinks) p.sinks = sinks;
    if (Defines::use_bias) {
      p.bias = static_cast<const Bias*>(bias);
      p.bias_strides = {3600, Defines::key_bias ? 0 : 900, Defines::key_bias ? 0 : 75};
    }
    if (Defines::use_key_mask) {
      p.key_mask = key_mask;
      p.key_mask_stride = 71;
    }
    if (Defines::kv_bytes == 1) {
      p.k_descale = p.v_descale = {factors, 2, 1};
      if (Defines::q_type == Defines::kv_type) p.q_descale = p.k_descale;
    }
    if (Defines::use_pages) {
      p.page_table = table;
      p.page_stride = 6;
      p.page_size = 16;
      p.pages = 11;
      for (Strides* s : {&p.k, &p.v}) *s = {40 * D, 16 * D, D};
    }
  }
  vector<Memory> inputs() const {
    vector<Memory> all = a.inputs();
    all.insert(all.end(), {lengths, table, bias, key_mask, sinks, factors});
    return all;
  }
};

// A call after one that differs in a single member, or in memory that a member points to: the first
// call has no effect.
CASE("changed_members") {
  constexpr int D = Featured::D, Q_ROWS = Featured::Q_ROWS;
  const Featured featured;
  const Attention& a = featured.a;
  const SdpaParams& base = featured.p;
  const Ints other_lengths({12, 66}), few_queries({3, 11}), firsts({7, 33}), q_starts({0, 5, 12}), k_starts({0, 30, 70});
  const Ints other_table({9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 10, 2});
  const Floats other_sinks({-1, 2, 0, 3});

  using Change = std::function<void(SdpaParams&)>;
  vector<std::pair<string, Change>> changes;
  void *one = nullptr, *other = nullptr, *other_scratch = nullptr;  // workspaces, which have room for scratch memory
  const auto add = [&](bool can, const char* name, const Change& change) {
    if (can) changes.push_back({name, change});
  };
  constexpr bool lengths_ = Defines::use_lengths, starts = lengths_ && !Defines::use_pages;
  add(true, "Q", [](SdpaParams& p) { p.Q += D; });
  add(true, "K", [](SdpaParams& p) { p.K += D; });
  add(true, "V", [](SdpaParams& p) { p.V += D; });
  add(true, "O", [](SdpaParams& p) { p.O += 3 * D; });
  add(true, "LSE", [](SdpaParams& p) { p.LSE = nullptr; });
  add(true, "LSE's place", [](SdpaParams& p) { p.LSE += 5; });
  add(true, "B", [](SdpaParams& p) { p.B = 1; });
  add(true, "Hq", [](SdpaParams& p) { p.Hq = 2; });
  add(true, "Hkv", [](SdpaParams& p) { p.Hkv = 1; });
  add(true, "Sq", [](SdpaParams& p) { p.Sq = 7; });
  add(true, "Sk", [](SdpaParams& p) { p.Sk = 33; });
  static const std::pair<const char*, Strides SdpaParams::*> strides[] = {
      {"q", &SdpaParams::q}, {"k", &SdpaParams::k}, {"v", &SdpaParams::v}, {"o", &SdpaParams::o}};
  for (const auto& [name, member] : strides) {
    const bool is_o = member == &SdpaParams::o;
    add(true, name, [m = member](SdpaParams& p) { (p.*m).row = 2 * D; });
    add(true, name, [m = member, is_o](SdpaParams& p) { (p.*m).head = (is_o ? 30 : 8) * D; });
    add(true, name, [m = member, is_o](SdpaParams& p) { (p.*m).batch = is_o ? 4 * Q_ROWS * D : 24 * D; });
  }
  add(true, "scale", [](SdpaParams& p) { p.scale = 0.3f; });
  add(true, "workspace", [&](SdpaParams& p) { p.workspace = other; });
  add(true, "scratch", [&](SdpaParams& p) { p.scratch = other_scratch; });
  add(true, "causal", [](SdpaParams& p) { p.causal = Causal::bottom_right; });
  add(true, "causal", [](SdpaParams& p) { p.causal = Causal::top_left; });
  add(Defines::use_persistent_cta, "max_ctas", [](SdpaParams& p) { p.max_ctas = 1; });
  add(true, "window_left", [](SdpaParams& p) { p.window_left = 3; });
  add(true, "window_right", [](SdpaParams& p) { p.window_right = 9; });
  add(true, "window_alignment", [](SdpaParams& p) {
    p.window_left = p.window_right = 6;
    p.window_alignment = Causal::bottom_right;
  });
  static const std::pair<const char*, Descale SdpaParams::*> descales[] = {
      {"q_descale", &SdpaParams::q_descale}, {"k_descale", &SdpaParams::k_descale}, {"v_descale", &SdpaParams::v_descale}};
  for (const auto& [name, member] : descales) {
    const bool has = Defines::kv_bytes == 1 && (Defines::q_type == Defines::kv_type || member != &SdpaParams::q_descale);
    add(has, name, [m = member](SdpaParams& p) { (p.*m).factor++; });
    add(has, name, [m = member](SdpaParams& p) { (p.*m).factor = nullptr; });
    add(has, name, [m = member](SdpaParams& p) { (p.*m).head = 0; });
    add(has, name, [m = member](SdpaParams& p) { (p.*m).batch = 0; });
  }
  add(Defines::use_softcap != 0, "softcap", [](SdpaParams& p) { p.softcap = 2; });
  add(Defines::use_sinks, "sinks", [](SdpaParams& p) { p.sinks = nullptr; });
  add(Defines::use_sinks, "sinks", [&](SdpaParams& p) { p.sinks = other_sinks; });
  constexpr bool has_bias = Defines::use_bias != 0, has_rows = has_bias && !Defines::key_bias;
  add(has_bias, "bias", [](SdpaParams& p) { p.bias = nullptr; });
  add(has_bias, "bias", [](SdpaParams& p) { p.bias = static_cast<const Bias*>(p.bias) + 1; });
  add(has_bias, "bias_strides", [](SdpaParams& p) { p.bias_strides.batch = 0; });
  add(has_rows, "bias_strides", [](SdpaParams& p) { p.bias_strides.head = 0; });
  add(has_rows, "bias_strides", [](SdpaParams& p) { p.bias_strides.row = 0; });
  add(has_rows, "bias_keys", [](SdpaParams& p) { p.bias_keys = 9; });
  add(Defines::use_key_mask, "key_mask", [](SdpaParams& p) { p.key_mask = nullptr; });
  add(Defines::use_key_mask, "key_mask", [](SdpaParams& p) { p.key_mask++; });
  add(Defines::use_key_mask, "key_mask_stride", [](SdpaParams& p) { p.key_mask_stride = 0; });
  const Workspace map(4096);
  add(has_rows, "bias_map", [&](SdpaParams& p) {
    p.bias_map = map;
    p.bias_map_bytes = sdpa_bias_map_bytes(p);
    CHECK((p.bias_map_bytes <= map.bytes && map_bias_of(p).ok()));
  });
  add(lengths_, "k_lengths", [](SdpaParams& p) { p.k_lengths = nullptr; });
  add(lengths_, "k_lengths", [&](SdpaParams& p) { p.k_lengths = other_lengths; });
  add(lengths_, "q_lengths", [&](SdpaParams& p) { p.q_lengths = few_queries; });
  add(takes_firsts, "k_firsts", [&](SdpaParams& p) { p.k_firsts = firsts; });
  add(lengths_, "q_starts", [&](SdpaParams& p) { p.q_starts = p.q_starts ? nullptr : static_cast<const int*>(q_starts); });
  add(starts, "k_starts", [&](SdpaParams& p) { p.k_starts = p.k_starts ? nullptr : static_cast<const int*>(k_starts); });
  add(lengths_, "most_keys", [](SdpaParams& p) { p.most_keys = 20; });
  add(lengths_, "most_keys", [](SdpaParams& p) { p.most_keys = 50; });
  add(true, "batch_invariant", [](SdpaParams& p) { p.batch_invariant = 1; });
  add(Defines::use_pages, "page_table", [&](SdpaParams& p) { p.page_table = other_table; });
  add(Defines::use_pages, "page_stride", [](SdpaParams& p) { p.page_stride = 5; });
  add(Defines::use_pages, "page_size", [](SdpaParams& p) { p.page_size = 32; });
  add(Defines::use_pages, "pages", [](SdpaParams& p) { p.pages = 4; });
  add(Defines::use_pages, "pages", [](SdpaParams& p) { p.pages = 12; });  // the last is one that the table names
  add(Defines::head_dim == Defines::d_v, "Dv", [](SdpaParams& p) { p.Dv = 0; });

  // Batched; with lengths also with inputs that all batches share, and packed.
  SdpaParams own = base;
  own.scratch = nullptr;
  SdpaParams shared = own, packed = own;
  shared.q.batch = shared.k.batch = shared.v.batch = 0;
  if (starts) packed.k_starts = k_starts;
  packed.q_starts = q_starts;
  vector<SdpaParams> bases = {own};
  if (starts) bases.push_back(shared);  // with pages only q could be shared, which no plan depends on
  if (lengths_) bases.push_back(packed);
  size_t bytes = 0;
  for (const SdpaParams& from : bases) {
    for (const auto& [name, change] : changes) {
      SdpaParams p = from;
      change(p);
      bytes = std::max({bytes, sdpa_workspace_bytes(from), sdpa_workspace_bytes(p)});
    }
  }
  const Workspace memory(bytes), other_memory(bytes);
  const Scratch scratch(bytes);
  one = memory;
  other = other_memory;
  other_scratch = scratch;
  std::set<string> changed = {"D"};
  const std::set<string> of_sequences = {"B", "Sq", "Sk", "q", "k", "v", "o", "causal", "k_lengths", "q_lengths", "k_firsts", "q_starts",
                                         "k_starts", "most_keys", "batch_invariant", "page_table", "page_size"};
  for (SdpaParams from : bases) {
    from.workspace = one;
    const bool is_own = !from.q_starts && from.q.batch != 0;
    for (const auto& [name, change] : changes) {
      if (!is_own && !of_sequences.count(name)) continue;
      SdpaParams p = from;
      change(p);
      vector<string> was;
      for_each_member(from, [&](const string&, const string& bytes) { was.push_back(bytes); });
      size_t i = 0;
      for_each_member(p, [&](const string& member, const string& bytes) {
        if (bytes != was[i++]) changed.insert(member);
      });
      INFO(name);
      CHECK((a.forward(from) == "" && a.is_right(from)));
      CHECK((a.forward(p) == "" && a.is_right(p)));
    }
  }
  for_each_member(base, [&](const string& member, const string&) {
    INFO(member);
    CHECK((changed.count(member) || !is_of_build(member)));
  });
  // The same memory with other contents.
  if (!lengths_) return;
  SdpaParams p = packed;
  p.workspace = one;
  Ints q({0, 5, 12}), k({0, 30, 70}), n({70, 41}), pages({3, 1, 4, 0, 5, 9, 2, 6, 8, 10, 7, 1});
  p.q_starts = q;
  p.k_lengths = n;
  p.k_starts = starts ? static_cast<const int*>(k) : nullptr;
  if (Defines::use_pages) p.page_table = pages;
  const auto right = [&] { return a.forward(p) == "" && a.is_right(p); };
  CHECK(right());
  q = {0, 11, 12};
  CHECK(right());
  k = {0, 64, 70};
  CHECK(right());
  n = {3, 70};
  CHECK(right());
  pages = {9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 10, 2};
  CHECK(right());
}

// Rounds without a visible key are skipped, and their contents do not affect any row. A split
// without a visible key keeps its first round. An item with more rounds than a list can hold keeps
// all of them. The mask and the bias may start at any element.
CASE_IF("rounds_without_visible_keys", Defines::has_key_bits && Defines::is_wgmma) {
  for_each_build([](auto build) {
    using B = decltype(build);
    if (B::kernel == KernelKind::wgmma_plain) return;
    // The last round is partial, or the bias does not change it, or is far below 0 in a partial one.
    enum Last { is_partial, is_whole, is_far };
    const struct { int rounds, shift; Last last; } cases[] = {
        {33, 0, is_partial}, {most_listed<B> + 1, 0, is_partial}, {5, 1, is_partial}, {5, 2, is_whole}, {5, 3, is_far}};
    for (const auto& [rounds, shift, last] : cases) {
      constexpr int round = B::round_keys;
      const int keys = rounds * round - (last == is_partial ? 1 : last == is_far ? round - 3 : 0);
      if (limits_keys<B> && keys > most_keys_at_once) continue;  // refused
      const float least = std::is_same_v<Bias, __half> ? -65504 : -3.3e38f;
      const int Sq = last == is_far ? B::block_m + 40 : 40;  // more than one tile
      const Attention a(1, 2, 1, Sq, keys);
      vector<uint8_t> seen(shift + keys);
      vector<Bias> added(shift + keys);  // the same, with other changes in the last round
      const auto is_seen = [last = rounds - 1](int n) { return n == 2 || n == 12 || n == last; };
      for (int k = 0; k < keys; k++) {
        const bool is_shown = is_seen(k / round) && (k / round != 2 || k % 9 > 0);
        const float of_last = last == is_partial ? float(k % 5) / 4 : last == is_far ? least : 0;
        seen[shift + k] = is_shown;
        added[shift + k] = rounded<Bias>(!is_shown ? -INFINITY : k / round == rounds - 1 ? of_last : 0);
      }
      const Held<uint8_t> mask(seen);
      const Held<Bias> bias(added);
      SdpaParams p = a.p;
      if (Defines::use_key_mask) p.key_mask = static_cast<const uint8_t*>(mask) + shift;
      else p.bias = static_cast<const Bias*>(bias) + shift;
      p.Dv = p.D;
      p.scratch = nullptr;  // it is that of the chosen tile
      const Workspace workspace(workspace_bytes<B>(p));
      p.workspace = workspace;
      vector<vector<unsigned char>> held;
      const auto forward_by = [&] {  // the kernel before it writes the mask and the bias
        return a.call_by([&](cudaStream_t stream) {
          write_by_kernel({mask, bias}, held, stream);
          return forward<B>(p, stream);
        }).ok();
      };
      CHECK((forward_by() && a.is_right(p)));
      const vector<Output> O(p.O, p.O + 2 * Sq * p.D);
      const int ranges = B::split_ctas == 1 ? 1 : items_of<B>(p).ranges;
      KeyValue* const V = const_cast<KeyValue*>(p.V);
      for (int n = 0, end = 0; n < ranges; n++) {
        const int begin = end;
        end += rounds / ranges + (n < rounds % ranges);
        if (end - begin > most_listed<B>) continue;
        bool is_first_taken = true;
        for (int of_range = begin; of_range < end; of_range++) is_first_taken &= !is_seen(of_range);
        for (int of_range = begin + is_first_taken; of_range < end; of_range++) {
          if (is_seen(of_range)) continue;
          for (int k = of_range * round; k < (of_range + 1) * round; k++) {
            std::fill_n(V + k * p.v.row, p.Dv, rounded<KeyValue>(NAN));
          }
        }
      }
      // With a bias the reference adds 0 * NaN.
      CHECK((forward_by() && std::equal(O.begin(), O.end(), p.O, [](Output x, Output y) { return to_float(x) == to_float(y); })));
    }
  });
}

// The expected map of a bias, as described in section 5g of sdpa.cu: for each tile of rows a list
// of the K tiles with a key that the bias does not hide, as 2 * K tile, plus 1 if the bias changes
// a score in it.
template <class B> struct ExpectedMap {
  const SdpaParams& p;
  const vector<float>& bias;  // as numbers to add, from p.bias on
  static constexpr size_t header_bytes = 8;

  int blocks() const { return ceil_div(p.Sq, B::block_m); }
  // If warpgroups can skip tiles, unused warpgroups of 64 rows come before query 0.
  int shift() const {
    return B::split_kv == 1 && !B::use_ping_pong ? (blocks() * B::block_m - p.Sq) / 64 * 64 : 0;
  }
  int batches() const { return p.bias_strides.batch ? p.B : 1; }
  int heads() const { return p.bias_strides.head ? p.Hq : 1; }
  size_t list_words() const { return 1 + size_t(std::max(ceil_div(p.Sk, B::round_keys), 1)); }
  size_t bytes() const { return header_bytes + 4 * size_t(batches()) * heads() * blocks() * list_words(); }

  vector<uint32_t> list(int b, int h, int block) const {
    reference::Problem of{1, 1, 1, p.Sq, p.Sk, Defines::head_dim, reference::Mask(int(p.causal)), 0, {}, {}, {}};
    of.window_left = p.window_left;
    of.window_right = p.window_right;
    const reference::Sequence all = sequence_of(of, 0);
    const int begin = std::max(block * B::block_m - shift(), 0);
    const int end = std::min((block + 1) * B::block_m - shift(), p.Sq);
    const int first_key = int(reference::first_key(of, all, begin)), past = int(reference::past_last_key(of, all, end - 1));
    const int columns = p.bias_keys ? p.bias_keys : p.Sk;
    vector<uint32_t> rounds;
    for (int round = 0; round < std::max(ceil_div(past - first_key, B::round_keys), 1); round++) {
      bool shows = false, changes = false;
      const int from = first_key + round * B::round_keys;
      for (int k = from; k < std::min(from + B::round_keys, p.Sk); k++) {
        const int column = k - (p.Sk - columns);
        for (int q = begin; q < end; q++) {
          const int64_t row = b * p.bias_strides.batch + h * p.bias_strides.head + q * p.bias_strides.row;
          const float x = column < 0 ? 0 : bias[row + column];
          shows |= x != -INFINITY;
          changes |= x != 0;
        }
      }
      if (shows) rounds.push_back(2 * round + changes);
    }
    if (rounds.empty()) rounds = {1};  // an item has one round
    rounds.insert(rounds.begin(), uint32_t(rounds.size()));
    return rounds;
  }
  bool is(const void* map) const {
    for (int n = 0; n < batches() * heads() * blocks(); n++) {
      const vector<uint32_t> want = list(n / blocks() / heads(), n / blocks() % heads(), n % blocks());
      const char* const list_n = static_cast<const char*>(map) + header_bytes + 4 * n * list_words();
      if (memcmp(list_n, want.data(), 4 * want.size())) return false;
    }
    return true;
  }
};

// A random problem: the map is exact, no memory after it is written, and launches with it, with
// their own map and without a map are correct. The previous kernel writes the inputs, and the map,
// just before. Every fourth problem has no mask, and unused warpgroups first, each with different
// hidden blocks.
template <class B> static void check_map(uint32_t seed) {
  uint32_t state = seed;
  const bool moves = seed % 4 == 3;
  const auto draw = [&](int size) { return int((state = state * 1664525u + 1013904223u) >> 8) % size; };
  const int keys = seed % 5 == 0 ? 16 * B::round_keys + draw(100) : 1 + draw(4 * B::round_keys);
  const int Sq = moves ? B::block_m + 1 + draw(std::max(B::block_m - 64, 1)) : 1 + draw(2 * B::block_m);
  const Attention a(1 + draw(2), 2, 1, Sq, keys, moves ? Causal::off : Causal(draw(3)), seed);
  SdpaParams p = a.p;
  p.Dv = p.D;
  if (draw(3) == 0 && !moves) p.window_left = draw(keys);
  if (draw(4) == 0 && !moves) p.window_right = draw(keys);
  p.bias_keys = draw(2) || moves ? 0 : 1 + draw(keys);
  const int columns = p.bias_keys ? p.bias_keys : keys, by = 16 / int(sizeof(Bias));
  // Rows of multiples of 16 bytes or not, aligned or not; shared by queries, heads and batches or
  // not.
  const int row = draw(2) ? ceil_div(columns, by) * by : columns + draw(3);
  p.bias_strides.row = draw(6) || moves ? row : 0;
  const int of_head = p.bias_strides.row ? p.Sq * row : row;
  if (seed % 10 && draw(2)) p.bias_strides.head = of_head;
  if (draw(2)) p.bias_strides.batch = p.bias_strides.head ? p.Hq * of_head : of_head;
  const int first = draw(2);
  const Strides& strides = p.bias_strides;
  const int64_t last = (p.B - 1) * strides.batch + (p.Hq - 1) * strides.head + (p.Sq - 1) * strides.row + columns - 1;

  // Hidden blocks, blocks without changes, and mixed blocks; or everything is hidden or unchanged
  // except single elements.
  const int kind = moves ? 0 : draw(3);
  vector<float> numbers(last + 1, kind == 2 ? 0 : -INFINITY);
  const auto at = [&](int b, int h, int q, int k) -> float& {
    return numbers[b * strides.batch + h * strides.head + q * strides.row + k];
  };
  for (int n = 0; n < p.B * p.Hq; n++) {
    const int b = n / p.Hq, h = n % p.Hq;
    for (int q = 0; kind == 0 && q < p.Sq; q++) {
      for (int k = 0; k < columns; k++) {
        const uint32_t of_block = (q / 64 * 131 + k / (B::round_keys / 2) * 31 + n * 17 + seed) * 2654435761u >> 28;
        const float mixed = Defines::use_bias == 2 ? 0 : float(k % 7) / 4 - 1;
        at(b, h, q, k) = of_block < 9 ? -INFINITY : of_block < 13 ? 0 : (q + k) % 5 ? mixed : -INFINITY;
      }
    }
    for (int single = 0; kind && single < 3; single++) {
      const auto edge = [&](int block, int size) {
        const int edges[] = {0, size - 1, std::min(block, size) - 1, std::min(block, size - 1), draw(size)};
        return edges[draw(5)];
      };
      const int q = edge(B::block_m, p.Sq);
      at(b, h, q, edge(B::round_keys, columns)) = kind == 1 ? 0 : -INFINITY;
    }
  }
  vector<Bias> elements(first, rounded<Bias>(1));
  for (const float x : numbers) elements.push_back(rounded<Bias>(Defines::adds_bias ? x : x == -INFINITY ? 0 : 1 + x));
  const Held<Bias> bias(elements);
  p.bias = static_cast<const Bias*>(bias) + first;
  vector<Memory> inputs = a.inputs();
  inputs.push_back(bias);
  INFO("seed ", seed, ": B=", p.B, " Sq=", p.Sq, " Sk=", keys, " bias_keys=", p.bias_keys, " strides=", strides.batch, ",",
       strides.head, ",", strides.row, " first=", first, " kind=", kind);

  const ExpectedMap<B> expected{p, numbers};
  CHECK(bias_map_bytes<B>(p) == expected.bytes());
  const Workspace map(expected.bytes());
  const Owned memory(p, memory_of<B>(p));
  vector<vector<unsigned char>> held;
  const auto is_right = [&](const SdpaParams& call, bool maps_before, size_t count) {
    vector<simt::Launch> launches;
    const SdpaStatus status = a.call_by([&](cudaStream_t stream) {
      write_by_kernel(inputs, held, stream);
      const SdpaStatus made = maps_before ? map_bias<B>(call, stream) : SdpaStatus{};
      return made.ok() ? forward<B>(call, stream) : made;
    }, &launches);
    return status.ok() && a.is_right(call) && launches.size() == count;
  };
  // A launch makes its own map if all heads share it and there are 16 or more K tiles.
  const bool has_own = p.bias_strides.head == 0 && columns >= 16 * B::round_keys;
  CHECK(is_right(p, false, has_own ? 3 : 2));
  CHECK((!has_own || expected.is(static_cast<char*>(p.scratch))));
  p.bias_map = map;
  p.bias_map_bytes = expected.bytes();
  CHECK((is_right(p, true, 3) && expected.is(map)));
}

CASE_IF("bias_map", has_map_of_bias) {
  for_each_build([](auto build) {
    using B = decltype(build);
    if constexpr (lists_from_map<B>) {
      for (uint32_t seed = 0; seed < 11; seed++) check_map<B>(seed);
    }
  });
}

// O is correct with a map for a problem with another mask, size or sharing of the bias, and with a
// map that was never made.
template <class B> static void check_maps_of_others() {
  const int Sq = B::block_m + std::min(B::block_m - 4, 70), Sk = 5 * B::round_keys - 3, row = Sk + 7;
  const Attention a(2, 2, 1, Sq, Sk);
  vector<Bias> elements(2 * 2 * Sq * row);
  for (size_t i = 0; i < elements.size(); i++) {
    const int q = int(i / row), k = int(i % row);
    const uint32_t block = (q / 64 * 131 + k / B::round_keys * 31 + 7) * 2654435761u >> 28;
    const bool hidden = block < 9 || (block < 12 && (q + k) % 5 == 0);
    elements[i] = rounded<Bias>(Defines::use_bias == 2 ? !hidden : hidden ? -INFINITY : 0);
  }
  const Held<Bias> bias(elements);
  SdpaParams base = a.p;
  base.Dv = base.D;
  base.bias = bias;
  base.bias_strides = {0, int64_t(Sq) * row, row};

  using Change = std::function<void(SdpaParams&)>;
  const std::pair<const char*, Change> changes[] = {
      {"nothing", [](SdpaParams&) {}},
      {"causal=br", [](SdpaParams& p) { p.causal = Causal::bottom_right; }},
      {"causal=tl", [](SdpaParams& p) { p.causal = Causal::top_left; }},
      {"window_left", [&](SdpaParams& p) { p.window_left = B::round_keys + 5; }},
      {"window_right", [&](SdpaParams& p) { p.window_right = B::round_keys; }},
      {"window_alignment",
       [&](SdpaParams& p) {
         p.window_left = p.window_right = B::round_keys + 5;
         p.window_alignment = Causal::bottom_right;
       }},
      {"bias_keys", [&](SdpaParams& p) { p.bias_keys = Sk - B::round_keys - 20; }},
      {"bias_strides",
       [&](SdpaParams& p) {
         p.bias_strides.head = 0;
         p.bias_strides.batch = int64_t(Sq - 64) * row;
       }},
      {"Sq", [](SdpaParams& p) { p.Sq -= 20; }},  // whose rows move up by 64 more
      {"Sk", [](SdpaParams& p) { p.Sk -= B::round_keys / 2; }}};
  vector<SdpaParams> problems;
  size_t most = 0;
  for (const auto& [name, change] : changes) {
    problems.push_back(base);
    change(problems.back());
    most = std::max(most, bias_map_bytes<B>(problems.back()));
  }
  const Workspace map(most), memory(sizeof(uint32_t));
  const auto is_right = [&](SdpaParams p, const SdpaParams* made_for) {
    p.bias_map = map;
    p.workspace = memory;
    p.bias_map_bytes = bias_map_bytes<B>(p);
    cudaMemset(map, 0x01, most);  // of 0x01010101 rounds, if the map is never made
    const SdpaStatus status = a.call_by([&](cudaStream_t stream) {
      if (!made_for) return forward<B>(p, stream);
      SdpaParams other = *made_for;
      other.bias_map = map;
      other.bias_map_bytes = p.bias_map_bytes;
      const SdpaStatus made = map_bias<B>(other, stream);
      return made.ok() ? forward<B>(p, stream) : made;
    });
    return status.ok() && a.is_right(p);
  };
  CHECK(is_right(base, nullptr));
  for (size_t i = 0; i < problems.size(); i++) {
    for (size_t j = 0; j < problems.size(); j++) {
      if (i != 0 && j != 0) continue;  // enough pairs
      INFO("map for ", string(changes[i].first), ", launch with ", string(changes[j].first));
      CHECK((bias_map_bytes<B>(problems[i]) == bias_map_bytes<B>(problems[j]) && is_right(problems[j], &problems[i])));
    }
  }
}
CASE_IF("bias_map_of_others", has_map_of_bias) {
  for_each_build([](auto build) {
    using B = decltype(build);
    if constexpr (lists_from_map<B>) check_maps_of_others<B>();
  });
}

// While the kernels run, V of hidden rounds is NaN. A launch that did not use its list, because it read the map before
// sdpa_map() had written it, would compute these rounds, and O would be NaN.
template <class B> static void check_hidden_values() {
  const int keys = 16 * B::round_keys;
  const Attention a(1, 2, 1, B::block_m, keys);
  SdpaParams p = a.p;
  const auto is_hidden = [](int k) { return k / B::round_keys % 3 == 1; };
  vector<Bias> elements;
  for (int k = 0; k < keys; k++) {
    const float visible = Defines::use_bias == 2 ? 1 : 0, hidden = Defines::use_bias == 2 ? 0 : -INFINITY;
    elements.push_back(rounded<Bias>(is_hidden(k) ? hidden : visible));
  }
  const vector<KeyValue> V(static_cast<const KeyValue*>(p.V), static_cast<const KeyValue*>(p.V) + keys * p.v.row);
  const Held<Bias> bias(elements);
  p.bias = bias;
  p.bias_strides = {};
  const size_t bytes = bias_map_bytes<B>(p);
  const Workspace map(bytes);
  const Owned memory(p, memory_of<B>(p));
  for (const bool maps_before : {false, true}) {
    INFO("the map is made by ", string(maps_before ? "sdpa_map_bias()" : "the launch"));
    p.bias_map = maps_before ? static_cast<void*>(map) : nullptr;
    p.bias_map_bytes = maps_before ? bytes : 0;
    KeyValue* const rows = const_cast<KeyValue*>(p.V);
    for (int k = 0; k < keys; k++) {
      if (is_hidden(k)) memset(rows + k * p.v.row, 0xff, p.D * sizeof(KeyValue));
    }
    const SdpaStatus status = a.call_by([&](cudaStream_t stream) {
      const SdpaStatus made = maps_before ? map_bias<B>(p, stream) : SdpaStatus{};
      return made.ok() ? forward<B>(p, stream) : made;
    });
    std::copy(V.begin(), V.end(), rows);
    CHECK((status.ok() && a.is_right(p)));
  }
}
CASE_IF("hidden_values", has_map_of_bias) {
  for_each_build([](auto build) {
    using B = decltype(build);
    if constexpr (lists_from_map<B>) check_hidden_values<B>();
  });
}

// A bias of one row per batch has no strides of heads and queries, except where these have size 1.
CASE_IF("bias_of_keys_refusals", Defines::key_bias) {
  const Featured featured;
  for (const bool of_head : {false, true}) {
    SdpaParams p = featured.p;
    (of_head ? p.bias_strides.head : p.bias_strides.row) = 75;
    const string refusal = featured.a.forward(p);
    CHECK(begins(refusal, "bias_strides: this build takes a bias that all heads and queries of a batch share"));
    (of_head ? p.Hq : p.Sq) = 1;
    if (of_head) p.Hkv = 1;
    CHECK((featured.a.forward(p) == "" && featured.a.is_right(p)));
  }
}

// A bias_map of the wrong size is refused. A failed launch of the map kernel fails the call.
CASE_IF("bias_map_refusals", Defines::use_bias && !Defines::key_bias) {
  const Featured featured;
  SdpaParams p = featured.p;
  const size_t bytes = sdpa_bias_map_bytes(p);
  CHECK((bytes > 0 || !has_map_of_bias || Defines::use_tuned));
  const Workspace map(bytes + 4);
  const Owned memory(p);
  p.bias_map_bytes = bytes + 4;
  const string null_map = "bias_map_bytes is " + std::to_string(bytes + 4) + ", but bias_map is null; set both or neither";
  SdpaParams without = p;
  without.workspace = nullptr;
  for (const SdpaParams& call : {p, without}) CHECK((featured.a.forward(call) == null_map && map_bias_of(call).text == null_map));
  p.bias_map = map;
  const string other_size = "bias_map has " + std::to_string(bytes + 4) +
                            " bytes, but the map of this problem has " + std::to_string(bytes);
  CHECK(begins(featured.a.forward(p), other_size.c_str()));
  CHECK(begins(map_bias_of(p).text, other_size.c_str()));
  if (bytes == 0) return;
  p.bias_map_bytes = 0;
  CHECK(begins(featured.a.forward(p), "bias_map has 0 bytes"));
  p.bias_map_bytes = bytes;
  simt::fail_next("cudaLaunchKernelEx", cudaErrorMemoryAllocation);
  const SdpaStatus failed = map_bias_of(p);
  CHECK((failed.code == cudaErrorMemoryAllocation && begins(failed.text, "launching the map failed: ")));
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  CHECK((map_bias_of(p).ok() && featured.a.forward(p) == "" && featured.a.is_right(p)));
}

// The workspace of a launch that maps a bias is also a valid workspace for splits, whose counters
// must be zero.
CASE_IF("map_and_ranges", Defines::use_bias && Defines::use_tuned && Defines::is_wgmma) {
  simt::gpu.sms[0] = 8;
  const Attention a(1, 4, 4, 200, 4200);
  const Held<Bias> bias(vector<Bias>(200 * 4200, rounded<Bias>(Defines::use_bias == 2)));
  SdpaParams many = a.p;  // rows
  many.bias = static_cast<const Bias*>(bias);
  many.bias_strides = {0, 0, 4200};
  many.scratch = nullptr;
  SdpaParams few = many;
  few.Sq = 3;
  const bool maps = with_build(many, [&](auto build) { return makes_map<decltype(build)>(many); });
  const bool counts = with_build(few, [&](auto build) {
    return !merges_by_kernel<decltype(build)> && items_of<decltype(build)>(few).ranges > 1;
  });
  CHECK((maps && counts));
  const Workspace memory(std::max(sdpa_workspace_bytes(many), sdpa_workspace_bytes(few)));
  many.workspace = few.workspace = memory;
  CHECK((a.forward(many) == "" && a.forward(few) == "" && a.is_right(few)));
  simt::gpu = {};
}

CASE("no_keys") {
  const Attention a(1, 2, 1, 40, 0);
  SdpaParams p = a.p;
  p.K = p.V = nullptr;
  CHECK((a.forward(p) == "" && a.is_right()));
}

// The effect of max_ctas on the grid.
CASE_IF("max_ctas", Defines::use_persistent_cta) {
  const Attention a(2, 2, 1, 3 * Defines::block_m, 30);
  SdpaParams p = a.p;
  CHECK((a.forward(p) == "" && a.is_right()));
  const unsigned resident = simt::last_launch().grid_dim.x;
  for (int ctas : {1, 2, 3, 1000}) {
    p.max_ctas = ctas;
    CHECK((a.forward(p) == "" && a.is_right()));
    CHECK(simt::last_launch().grid_dim.x == std::min(unsigned(ctas), resident));
  }
}

// Concurrent host threads with different tensors each get their own result.
CASE("host_threads") {
  std::atomic<int> right{0};
  const auto work = [&](uint32_t seed) {
    const Attention first(1, 1, 1, 40, 30, Causal::off, seed);
    const Attention second(1, 2, 1, 20, 50, Causal::off, seed + 10);
    for (int n = 0; n < 3; n++) {
      for (const Attention* a : {&first, &second}) right += a->forward() == "" && a->is_right();
    }
  };
  std::thread one(work, 100), other(work, 200);
  one.join();
  other.join();
  CHECK(right == 12);
}

// The kernel that is chosen for a problem.
static const void* kernel_of(const SdpaParams& p) {
  return with_build(p, [](auto build) { return reinterpret_cast<const void*>(+KernelOf<decltype(build)>::entry); });
}

// The maximum dynamic shared memory is an attribute of the kernel, which another thread may launch
// concurrently for a problem with more or fewer CTAs, so it must be the same for both.
CASE("shared_memory") {
  const Attention few(1, 1, 1, 1, 30), many(10, 1, 1, 1, 30);
  const auto allowed = [&] { return simt::allowed_shared(kernel_of(few.p), 0); };
  CHECK((few.forward() == "" && few.is_right()));
  const int before = allowed();
  CHECK((many.forward() == "" && many.is_right()));
  CHECK(allowed() == before);
}

CASE("devices") {
  for (int device : {0, 1, 0, 1}) {
    CHECK(cudaSetDevice(device) == cudaSuccess);
    const Attention a(1, 3, 1, 40, 70, Causal::bottom_right);
    CHECK((a.forward() == "" && a.is_right()));
    CHECK(simt::last_launch().device == device);
  }
  cudaSetDevice(0);
}

// Errors are reported only by the status.
CASE("errors") {
  const Attention a(1, 1, 1, 40, 30);
  const auto failing = [&](const char* call, int error, int successes = 0) {
    simt::fail_next(call, error, successes);
    const string text = a.forward();
    CHECK((a.forward() == "" && a.is_right()));  // it is not remembered
    return text;
  };
  const char* const set_attribute = "cudaFuncSetAttribute";
  CHECK(begins(failing(set_attribute, cudaErrorInvalidValue), "this GPU cannot run this build ("));
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  CHECK(begins(failing(set_attribute, cudaErrorLaunchFailure),
               "preparing the launch, or earlier work of this process"));
  CHECK(begins(failing("cudaLaunchKernelEx", cudaErrorInvalidConfiguration),
               Defines::use_lengths ? "launching the plan failed" : "launching the kernel failed"));
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  if (Defines::use_persistent_cta) {
    CHECK(begins(failing("cudaOccupancyMaxActiveBlocksPerMultiprocessor", cudaErrorInvalidValue),
                 "querying the occupancy failed"));
    CHECK(cudaPeekAtLastError() == cudaSuccess);
  }
  // An earlier error of the caller is preserved, whether the call succeeds or not.
  CHECK(cudaSetDevice(99) == cudaErrorInvalidDevice);
  CHECK((a.forward() == "" && cudaPeekAtLastError() == cudaErrorInvalidDevice));
  simt::fail_next(set_attribute, cudaErrorInvalidValue);
  CHECK((a.forward() != "" && cudaPeekAtLastError() != cudaSuccess));
  cudaGetLastError();

  // Properties that a host thread queries in its first call are queried again if that failed.
  const auto first_call_failing = [](const char* call, int error) {
    string text;
    std::thread([&] {
      const Attention b(1, 1, 1, 40, 30);
      simt::fail_next(call, error);
      text = b.forward();
      CHECK(cudaPeekAtLastError() == cudaSuccess);
      CHECK((b.forward() == "" && b.is_right()));
    }).join();
    return text;
  };
  if (Defines::is_wgmma) {
    for (const char* call : {"cudaGetDriverEntryPoint", "symbol"}) {
      CHECK(begins(first_call_failing(call, cudaErrorInsufficientDriver),
                   "the driver cannot encode a tensor map of Q: "));
    }
  }
}

// The launches of a call in order, and the status if one fails: the map of a bias, the plan, the
// kernel, the merge; without a plan, pairs of the last two until all items are done.
struct ExpectedLaunch {
  const void* kernel;
  const char* failure;
};
static vector<ExpectedLaunch> launches_of(const SdpaParams& p) {
  vector<ExpectedLaunch> all;
  with_build(p, [&](auto build) {
    using B = decltype(build);
    const auto add = [&](auto* kernel, const char* what) { all.push_back({reinterpret_cast<const void*>(kernel), what}); };
    if constexpr (lists_from_map<B>) {
      if (p.bias && !p.bias_map) add(sdpa_map<B>, "launching the map");
    }
    if constexpr (B::use_lengths) add(sdpa_plan<B>, "launching the plan");
    const Items items = items_of<B>(p);
    const int64_t turns = B::use_lengths ? 1 : ceil_div(items.count, items_per_launch<B>(items));
    for (int64_t turn = 0; turn < turns; turn++) {
      add(KernelOf<B>::entry, "launching the kernel");
      if constexpr (merges_by_kernel<B>) add(sdpa_merge<B>, "launching the merge");
    }
  });
  return all;
}

// Problems with all kinds of launches. simt::gpu.sms[0] = 1, so that 40 items need several launches
// if a kernel merges.
struct Launching {
  const int one = simt::gpu.sms[0] = 1;  // before the workspaces, whose sizes depend on the chosen tile
  const Attention few{1, 1, 1, 40, 30}, many{1, 40, 40, 3, 130, Causal::bottom_right};
  const Attention mapped{1, 2, 1, 70, has_map_of_bias ? 4200 : 30};
  const Held<Bias> bias{vector<Bias>(4200, rounded<Bias>(Defines::use_bias == 2))};  // shared by all rows
  const Workspace workspace{has_map_of_bias ? size_t(1) << 20 : 0};
  vector<std::pair<const Attention*, SdpaParams>> calls = {{&few, few.p}, {&many, many.p}};

  Launching() {
    if (!has_map_of_bias) return;
    SdpaParams p = mapped.p;
    p.bias = static_cast<const Bias*>(bias);
    p.workspace = workspace;
    p.scratch = nullptr;
    REQUIRE(sdpa_workspace_bytes(p) <= workspace.bytes);
    calls.push_back({&mapped, p});
  }
  ~Launching() { simt::gpu = {}; }
};

// All launches use the stream of the call, as on_stream() checks, and there are no others.
CASE("streams") {
  const Launching launching;
  std::set<const void*> kernels;
  for (const auto& [a, p] : launching.calls) {
    vector<simt::Launch> launches;
    CHECK((a->call(p, &launches).ok() && a->is_right(p)));
    const vector<ExpectedLaunch> expected = launches_of(p);
    CHECK(launches.size() == expected.size());
    for (size_t n = 0; n < std::min(launches.size(), expected.size()); n++) {
      CHECK(launches[n].kernel == expected[n].kernel);
      kernels.insert(launches[n].kernel);
    }
  }
  const size_t kinds = 1 + has_map_of_bias + Defines::use_lengths + merges_by_kernel<Defines>;
  CHECK(kernels.size() >= kinds);
}

// If a launch of a call fails, the status has its error, nothing is launched after it, and the next
// call is correct.
CASE("failed_launches") {
  const Launching launching;
  for (const auto& [a, p] : launching.calls) {
    const vector<ExpectedLaunch> expected = launches_of(p);
    for (size_t n = 0; n <= expected.size(); n++) {
      const cudaError_t error = n % 2 ? cudaErrorMemoryAllocation : cudaErrorInvalidConfiguration;
      simt::fail_next("cudaLaunchKernelEx", error, int(n));
      const int before = simt::launches();
      const SdpaStatus status = a->call(p);
      CHECK(simt::launches() - before == int(n));
      if (n < expected.size()) {
        CHECK((status.code == error && status.text == string(expected[n].failure) + " failed: " + cudaGetErrorString(error)));
      }
      simt::fail_next("cudaLaunchKernelEx", 0);
      CHECK(cudaPeekAtLastError() == cudaSuccess);
      CHECK((n < expected.size() || (status.ok() && a->is_right(p))));
      CHECK((a->forward(p) == "" && a->is_right(p)));
    }
  }
}

// Inputs that the previous kernel writes. A kernel that starts early must wait before it reads any
// of them.
CASE_IF("waits", Defines::is_wgmma) {
  const Featured featured;
  SdpaParams p = featured.p;
  const Owned memory(p);
  vector<Memory> inputs = featured.inputs();
  inputs.push_back({memory.workspace, memory.workspace.bytes});
  inputs.push_back({memory.scratch, memory.scratch.bytes});  // another operator's until then
  vector<vector<unsigned char>> held;
  for (int n = 0; n < 2; n++) {  // the second time tensor maps are those of the first one
    const SdpaStatus status = featured.a.call_by([&](cudaStream_t stream) {
      write_by_kernel(inputs, held, stream);
      return sdpa_forward(p, stream);
    });
    CHECK((status.ok() && featured.a.is_right(p)));
  }
}

// Members that the build does not support must be 0 and are refused by name otherwise. Misaligned
// pointers are refused. Strides are exempt, since they have no effect without their pointer.
static void* some_memory() {
  alignas(256) static unsigned char memory[1024];
  return memory;
}
template <class T> static bool make_set(T*& pointer) {
  pointer = static_cast<T*>(some_memory());
  return true;
}
static bool make_set(Descale& descale) { return make_set(descale.factor); }
static bool make_set(Strides&) { return false; }
template <class T> static std::enable_if_t<!std::is_pointer_v<T> && !std::is_class_v<T>, bool> make_set(T& number) {
  number = T(std::is_floating_point_v<T> ? 0.5 : 1);
  return true;
}
template <class T> static bool move_pointer(T*& pointer, int bytes) {
  pointer = moved(static_cast<T*>(some_memory()), bytes);
  return true;
}
static bool move_pointer(Descale& descale, int bytes) { return move_pointer(descale.factor, bytes); }
template <class T> static std::enable_if_t<!std::is_pointer_v<T>, bool> move_pointer(T&, int) { return false; }

CASE("refusals") {
  const Featured featured;
  SdpaParams base = featured.p;
  const Owned memory(base);
  CHECK((featured.a.forward(base) == "" && featured.a.is_right(base)));
  const int launches = simt::launches();
  // The status text of a call if change(member) returns true; else "-".
  const auto refusal = [&](const string& name, const auto& change) {
    SdpaParams p = base;
    bool has_changed = false;
    visit_members(p, [&](const string& member, auto& value) {
      if (member == name) has_changed = change(value);
    });
    if (!has_changed) return string("-");
    const SdpaStatus status = sdpa_forward(p, /*stream=*/0);
    CHECK((status.ok() || status.code == cudaErrorInvalidValue));
    return string(status.text);
  };
  const auto alignment_of = [](const string& name) {
    if (name == "workspace" || name == "scratch") return 256;
    if (name == "bias") return int(sizeof(Bias));
    if (name == "bias_map") return 8;
    if (name == "key_mask") return 1;
    if (name == "Q") return std::min(Defines::vec_width * int(sizeof(Query)), 16);
    if (name == "K" || name == "V") return std::min(Defines::vec_width * int(sizeof(KeyValue)), 16);
    if (name == "O") return std::min(Defines::vec_width * int(sizeof(Output)), 16);
    return 4;
  };
  int refused_members = 0;
  for_each_member(base, [&](const string& name, const string&) {
    INFO(name);
    if (!is_of_build(name)) {
      const string said = refusal(name, [](auto& member) { return make_set(member); });
      CHECK((said == "-" || contains(said, name.c_str())));
      refused_members += said != "-";
      return;
    }
    for (int bytes = 1; bytes < alignment_of(name); bytes *= 2) {
      const string said = refusal(name, [&](auto& member) { return move_pointer(member, bytes); });
      CHECK((said == "-" || begins(said, (name + " is not aligned to " + std::to_string(alignment_of(name))).c_str())));
    }
  });
  CHECK(refused_members > 0);
  // Strides with which rows of O overlap.
  const int width = base.Dv ? base.Dv : base.D;
  for (int64_t Strides::*const dim : {&Strides::batch, &Strides::head, &Strides::row}) {
    for (const int stride : {16 - width, -16, 0, 16, width - 16}) {
      SdpaParams p = base;
      p.o.*dim = stride;
      const SdpaStatus status = sdpa_forward(p, /*stream=*/0);
      const string words = " stride of " + std::to_string(stride) + ": its rows of " + std::to_string(width) + " elements would overlap";
      CHECK((status.code == cudaErrorInvalidValue && begins(status.text, "O has a ") && contains(status.text, words.c_str())));
    }
  }
  CHECK(simt::launches() == launches);
}

// If a tensor map cannot be encoded, the status names its tensor. Afterwards, calls with these
// tensors and with those of the previous call are correct.
CASE_IF("failed_maps", Defines::is_wgmma) {
  const Attention a(1, 2, 1, 40, 30), b(1, 2, 1, 33, 50, Causal::off, 7);
  const char* const names[] = {"Q", "K", "V", "O"};
  for (int turn = 0; turn < 10; turn++) {
    const int n = turn / 2;  // maps that can be made
    CHECK((a.forward() == "" && a.is_right()));
    simt::fail_next("cuTensorMapEncodeTiled", cudaErrorInvalidValue, n);
    const SdpaStatus status = b.call(b.p);
    simt::fail_next("cuTensorMapEncodeTiled", 0);
    if (status.ok()) {  // O has a map only if it is stored by TMA
      CHECK((n >= 3 && b.is_right()));
      continue;
    }
    CHECK((n < 4 && status.code == cudaErrorInvalidValue));
    CHECK(begins(
        status.text,
        (string("the driver cannot encode a tensor map of ") + names[n % 4] + ": ").c_str()));
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    const Attention& next = turn % 2 ? a : b;
    CHECK((next.forward() == "" && next.is_right() && b.forward() == "" && b.is_right()));
  }
}

// Sizes that overflow 32 bits.
CASE("sizes") {
  const Attention a(1, 1, 1, 40, 30);
  SdpaParams p = a.p;
  p.Sq = p.Sk = 1000000000;
  p.causal = Causal::bottom_right;
  CHECK(kernel_of(p) != nullptr);  // chosen without overflow
  p.Sk = 0;
  p.window_left = 1000000000;
  CHECK(kernel_of(p) != nullptr);
  p.Sq = 1;
  p.Sk = 1000000000;
  p.causal = Causal::off;
  p.window_right = 1000000000;
  CHECK(kernel_of(p) != nullptr);
  p = a.p;
  p.scale = 3e38f;
  CHECK(begins(a.forward(p), "scale=3e+38: must be 0 or more, below 10^38"));
  p = a.p;
  p.B = 1 << 15;
  p.Hq = p.Hkv = 1 << 12;
  p.Sq = 16 * 512;  // 2^31 items or more
  CHECK(contains(a.forward(p), " tiles; split the batch"));
  p.B = p.Hq = p.Hkv = p.Sq = 1000000000;  // 10^27 rows are more than 64 bits count
  CHECK(a.forward(p) == "B*Hq*Sq is over 10^16 rows; split the batch");
}

// The sizes of workspace and scratch memory can be queried for any int members; they are 0 for
// refused sizes.
CASE("extremes") {
  constexpr int most = 1000000000;
  const vector<int> legal = {0, 1, 2, most - 1, most}, any = {INT_MIN, -1, 0, 1, 2, most - 1, most, most + 1, INT_MAX};
  const Attention a(1, 2, 1, 3, 30);
  static const int held[3] = {};
  uint32_t state = 1;
  const auto draw = [&](int size) { return int((state = state * 1664525u + 1013904223u) >> 8) % size; };
  int refused_ones = 0, taken = 0;
  for (int n = 0; n < 20000; n++) {
    SdpaParams p = a.p;
    const vector<int>& values = n % 2 ? any : legal;
    visit_members(p, [&](const string& name, auto& member) {
      if constexpr (std::is_same_v<decltype(member), int&>) {
        const bool is_size = string(" B Hq Hkv Sq Sk ").find(" " + name + " ") != string::npos;
        if (draw(is_size ? 2 : 8) == 0) member = values[draw(int(values.size()))];
      }
    });
    if (Defines::use_lengths && draw(2)) p.q_starts = held;
    if (Defines::use_lengths && draw(2)) p.k_lengths = held;
    if (Defines::use_bias && draw(2)) p.bias = held;
    const size_t bytes = sdpa_workspace_bytes(p) + sdpa_bias_map_bytes(p) + sdpa_scratch_bytes(p);
    SdpaParams checked = p;
    checked.scratch = some_memory();
    CHECK(sdpa_workspace_bytes(checked) <= 65536);  // as sdpa.h says
    const bool is_refused = !check_sizes(checked).ok();
    if (is_refused) CHECK((bytes == 0 && sdpa_forward(p, /*stream=*/0).code == cudaErrorInvalidValue));
    (is_refused ? refused_ones : taken)++;
  }
  CHECK((refused_ones > 1000 && taken > 1000));
}

// The largest logits that a float holds: they, their differences and LSE times log2(e) may exceed it.
CASE_IF("largest_logits", Defines::kernel != KernelKind::wgmma_e4m3) {
  const Attention a(1, 2, 1, 20, 70);
  double largest = 0;
  for (int row = 0; row < a.p.Hq * a.p.Sq * a.p.Sk; row++) {
    double score = 0;
    for (int d = 0; d < a.p.D; d++) {
      score += double(to_float(a.p.Q[row / a.p.Sk * a.p.D + d])) * double(to_float(a.p.K[row % a.p.Sk * a.p.D + d]));
    }
    largest = std::max(largest, std::fabs(score));
  }
  SdpaParams p = a.p;
  p.scale = float(3.2e38 / (largest * element_unit<Defines> * element_unit<Defines>));
  CHECK((a.forward(p) == "" && a.is_right(p)));
}

// Sums are limited to 65,536 keys: a build without splits refuses more, unless a window hides them;
// a tuned one chooses a tile with splits. The workspace is bounded.
CASE_IF("many_keys", Defines::kernel != KernelKind::scalar) {
  const auto problem = [](int B, int Sq, int Sk) {
    SdpaParams p{};
    p.B = B;
    p.Hq = p.Hkv = 3;
    p.Sq = Sq;
    p.Sk = Sk;
    p.D = Defines::head_dim;
    return p;
  };
  const auto bytes = [&](int B, int Sk) { return sdpa_workspace_bytes(problem(B, 999, Sk)); };
  const Attention a(1, 1, 1, 3, 65537);
  SdpaParams p = a.p;
  const string said = a.forward(p);
  if (limits_keys<Defines> && !Defines::use_tuned) {
    CHECK(begins(said, "a query sees 65537 keys, but this build takes at most 65536"));
  } else {
    CHECK((said == "" && a.is_right()));
  }
  p.window_left = 4096;
  p.causal = Causal::bottom_right;
  CHECK(!begins(a.forward(p), "a query sees"));
  if (Defines::use_lengths) {  // keys are limited by Sk and most_keys; the sequence has five
    const Ints length({5});
    for (int most_keys : {0, 65536, 65537, 1 << 20}) {
      SdpaParams few = a.p;
      few.k_lengths = length;
      few.most_keys = most_keys;
      const bool is_refused = limits_keys<Defines> && !Defines::use_tuned && most_keys != 65536;
      const string text = a.forward(few);
      CHECK((is_refused ? begins(text, "a query sees 65537 keys") : text == "" && a.is_right(few)));
    }
    SdpaParams long_ones = problem(2, 999, 1 << 20), of_few = long_ones;
    of_few.most_keys = 65536;
    if constexpr (Defines::use_tuned) {
      CHECK(TUNED_TILES[choose_tile(long_ones)].split_ctas == 0);
      CHECK(TUNED_TILES[choose_tile(of_few)].split_ctas == 1);
      of_few.batch_invariant = 1;
      of_few.k_lengths = length;  // of which some may be long in another batch
      CHECK(TUNED_TILES[choose_tile(of_few)].split_ctas == 0);
    }
  }
  CHECK((bytes(2, 1 << 20) >= bytes(2, 65537) && bytes(2, 65537) >= bytes(2, 65536)));
  CHECK((Defines::pack_gqa || bytes(2000, 1 << 20) < size_t(1) << 30));
  if (Defines::split_ctas != 1 && !Defines::use_lengths) CHECK(items_of<Defines>(problem(2, 1, 1 << 20)).ranges >= 16);
  if (Defines::pack_gqa && !Defines::use_lengths && !merges_by_kernel<Defines>) {
    CHECK(items_of<Defines>(problem(9000, 1, 1 << 20)).ranges == 1);  // 27,000 items have no counters
    CHECK(sdpa_workspace_bytes(problem(9000, 1, 1 << 20)) == 0);
  }
  if constexpr (Defines::use_tuned) CHECK(TUNED_TILES[choose_tile(problem(2, 999, 65537))].split_ctas == 0);
}

// One workspace, zeroed once, for problems of several sizes, with and without scratch memory; and
// if SPLIT_CTAS is fixed, a row does not depend on the rest of the batch.
CASE("workspace") {
  const Attention a(1, 2, 1, 3, 300), b(3, 4, 2, 40, 500, Causal::bottom_right), c(1, 4, 1, 1, 30);
  const auto in_one = [](SdpaParams p) {
    p.scratch = nullptr;
    return p;
  };
  size_t bytes = 0;
  for (const Attention* problem : {&a, &b, &c}) bytes = std::max(bytes, sdpa_workspace_bytes(in_one(problem->p)));
  const Workspace workspace(bytes);
  for (int round = 0; round < 4; round++) {
    for (const Attention* problem : {&a, &b, &c}) {
      SdpaParams p = round % 2 ? problem->p : in_one(problem->p);
      p.workspace = workspace;
      CHECK((problem->forward(p) == "" && problem->is_right()));
    }
  }
  SdpaParams p = in_one(b.p);
  p.workspace = workspace;
  const size_t elements = size_t(b.p.Hq) * b.p.Sq * b.p.D;  // of a batch
  vector<Output> together(elements), alone(elements);
  CHECK(b.forward(p) == "");
  cudaMemcpy(together.data(), p.O + elements, elements * sizeof(Output), cudaMemcpyDeviceToHost);
  p.B = 1;
  p.Q += p.q.batch;
  p.K += p.k.batch;
  p.V += p.v.batch;
  CHECK(b.forward(p) == "");
  cudaMemcpy(alone.data(), p.O, elements * sizeof(Output), cudaMemcpyDeviceToHost);
  if (Defines::split_ctas != 0 && !Defines::use_tuned) {
    CHECK(memcmp(together.data(), alone.data(), elements * sizeof(Output)) == 0);
  }
  // Queries must handle sizes that were not checked, and sizes of packed sequences that exceed 32
  // bits.
  SdpaParams absurd = c.p;
  absurd.Sk = INT_MAX - 1000;
  absurd.window_left = 0;
  absurd.B = 1000000;
  sdpa_workspace_bytes(absurd);
  absurd = c.p;
  absurd.B = 65536;
  absurd.Hq = absurd.Hkv = 16;
  absurd.Sq = 65536;
  absurd.Sk = 0;
  CHECK(with_build(absurd, [&](auto build) {
    using B = decltype(build);
    return grid_of<B>(absurd, items_of_tile(absurd, 1, 16)).items_in_l2.divisor > 0;
  }));
}

// Scratch memory is no larger than necessary: its last partial is used.
CASE_IF("last_partial", !Defines::use_lengths) {
  for (const int sms : {1, 3, 132}) {
    simt::gpu.sms[0] = sms;
    for (const int heads : {2, 90}) {
      const Attention a(1, heads, heads / 2, 3, 300);
      const size_t bytes = sdpa_scratch_bytes(a.p);
      if (bytes == 0) continue;  // there are none
      CHECK((a.forward() == "" && a.is_right()));
      float last;
      const size_t size = with_build(a.p, [](auto build) { return sizeof(RangePartial<decltype(build)>); });
      cudaMemcpy(&last, static_cast<char*>(a.p.scratch) + bytes - size, sizeof last, cudaMemcpyDeviceToHost);
      CHECK(!std::isnan(last));
    }
  }
  simt::gpu = {};
}

// Tiles with few and with many splits, with fewer and with more CTAs than splits to merge.
CASE_IF("ranges", Defines::split_ctas != 1 || Defines::use_tuned) {
  simt::gpu.keys_at_once = 64;
  for (const int sms : {1, 3, 132}) {
    simt::gpu.sms[0] = sms;
    for (const int heads : {1, 4, 17}) {
      const Attention a(2, 2 * heads, heads, 3, 700 / (1 + heads / 4), Causal::bottom_right);
      CHECK((a.forward() == "" && a.is_right()));
    }
  }
  simt::gpu = {};
}

// Groups with more heads than a tile has rows: items have the largest fitting divisor of the group
// size, or 1 if that is prime.
CASE_IF("groups", Defines::pack_gqa || Defines::use_tuned) {
  for (const auto& [group, sms] : {std::pair(71, 132), {24, 1}}) {
    simt::gpu.sms[0] = sms;
    const Attention a(1, group, 1, 3, 150, Causal::bottom_right), b(2, group, 1, 1, 90);
    CHECK((a.forward() == "" && a.is_right() && b.forward() == "" && b.is_right()));
  }
  simt::gpu = {};
}

// Paged K and V. Invalid page tables are refused; out-of-bounds entries, and lengths beyond the
// table, are clamped, so no memory outside the tensors is read.
CASE_IF("pages", Defines::use_pages) {
  constexpr int most = 2147483647, size = Defines::use_pages == 2 ? 3 : 16, pages = 19 * 16 / size;
  const Attention a(1, 2, 1, 50, size * pages);
  SdpaParams p = a.p;
  p.B = 3;
  p.page_size = size;
  p.pages = pages;
  for (Strides* s : {&p.k, &p.v}) {
    s->batch = size * s->row;
    s->head = size * pages * s->row;
  }
  const Ints starts({0, 20, 37, 50}), lengths({most, 40, 41}), table(vector<int>(3 * pages));
  p.q_starts = starts;
  p.k_lengths = lengths;
  const Owned memory(p);
  // All pairs of a size, a table and a length.
  const int sizes[] = {size * pages, 43, 32}, steps[] = {1, 7, 100000000, -100000000, -1};
  for (int s = 0; s < 3; s++) {  // the table of the last sequence ends with its last page
    const int keys = sizes[s], width = (keys + size - 1) / size, lengths_above[] = {most, keys + 1, keys + 100, keys, -5};
    vector<int> entries(3 * width);
    for (int t = 0; t < 5; t++) {
      for (int i = 0; i < 3 * width; i++) entries[i] = int(i * int64_t(steps[t]) % most) - (steps[t] == 7 ? 30 : 0);
      const Ints exact(entries);
      p.page_table = exact;
      p.page_stride = width;
      p.Sk = keys;
      for (int n : {s + t, s + t + 2}) {
        const int above = lengths_above[n % 5];
        const Ints wild({above, 29, above});
        p.k_lengths = above == keys ? nullptr : static_cast<const int*>(wild);
        CHECK((a.forward(p) == "" && a.is_right(p)));
      }
    }
  }
  {  // rows of the table are so far apart that the last one is beyond 2^31 entries
    p.page_stride = 1100000000;
    p.Sk = 2 * size;
    p.k_lengths = nullptr;
    int* far = nullptr;
    REQUIRE(cudaMalloc(&far, (2 * size_t(p.page_stride) + 2) * sizeof(int)) == cudaSuccess);
    for (int64_t b = 0; b < 3; b++) {
      for (int i = 0; i < 2; i++) far[b * p.page_stride + i] = int(5 * b + 3 * i);
    }
    p.page_table = far;
    CHECK((a.forward(p) == "" && a.is_right(p)));
    cudaFree(far);
  }
  p.page_table = table;
  p.page_stride = pages;
  p.Sk = size * pages;
  p.k_lengths = lengths;
  const auto refused = [&](const auto& change) {
    SdpaParams changed = p;
    change(changed);
    const char* const pages_of = Defines::use_pages == 2 ? "1 key or more, with" : "a multiple of 16 keys (USE_PAGES=2";
    return a.forward(changed).find(string("this build takes K and V in pages of ") + pages_of) != string::npos;
  };
  CHECK(a.forward(p) == "");
  CHECK(refused([](SdpaParams& x) { x.page_table = nullptr; }));
  for (int keys : {-16, -1, 0, 1, 24}) {
    const bool is_size = keys > 0 && Defines::use_pages == 2;
    CHECK((refused([&](SdpaParams& x) { x.page_size = keys; }) != is_size));
  }
  CHECK(refused([](SdpaParams& x) { x.pages = 0; }));
  CHECK(refused([](SdpaParams& x) { x.page_stride = -19; }));
  CHECK(refused([](SdpaParams& x) { x.k_starts = x.page_table; }));
}

// Invalid starts and lengths are clamped, for one and for several sequences, in the middle and at
// either end: no memory outside the tensors and the workspace is accessed, and valid rows are
// correct.
CASE_IF("starts", Defines::use_lengths) {
  constexpr int most = 2147483647, least = -most - 1, Sq = 60, Sk = Defines::use_pages ? 96 : 90;
  const Attention a(1, 2, 1, Sq, Sk);
  SdpaParams no_heads = a.p;
  no_heads.Hq = no_heads.Hkv = 0;
  CHECK(sdpa_scratch_bytes(no_heads) > 0);
  const auto run = [&](const vector<int>& q, const vector<int>& k, const vector<int>& lengths, int most_keys = 0, bool of_queries = false) {
    const Ints q_starts(q), k_starts(k), k_lengths(lengths), table({0, 1, 2, 3, 4, 5});
    SdpaParams p = a.p;
    p.B = int(q.size()) - 1;
    p.q_starts = q_starts;
    p.k_starts = k_starts;
    p.most_keys = most_keys;
    if (!lengths.empty()) p.k_lengths = k_lengths;
    if (of_queries) p.q_lengths = p.k_lengths;
    p.k.batch = p.v.batch = 0;
    if (k.empty()) p.k_starts = nullptr;  // all have the same keys
    if (Defines::use_pages) {
      p.page_table = table;
      p.page_size = 16;
      p.pages = 6;
      p.k_starts = nullptr;
      for (Strides* s : {&p.k, &p.v}) s->batch = 16 * s->row;
    }
    const Owned memory(p);
    return a.forward(p) == "" && a.is_right(p);
  };
  const vector<vector<int>> q_starts[] = {
      {{0, Sq}, {0, Sq + 100}, {-9, most}, {least, 31}, {5, Sq + 1}, {Sq + 50, Sq + 100}, {-50, -20}, {most, least}},
      {{0, 33, Sq}, {0, 33, Sq + 100}, {-3, 0, most}, {least, Sq, Sq + 1}, {0, Sq + 100, Sq + 200}, {-20, -10, 17}},
      {{0, 10, 10, 31, Sq}, {-7, 3, 40, most, most}, {least, 1, 2, 3, Sq + 1000}, {1, 1, 1, 1, Sq + 1}}};
  const vector<vector<int>> k_starts[] = {
      {{0, Sk}, {0, Sk + 100}, {least, most}, {-100, 40}, {Sk - 1, Sk + 1}, {Sk + 50, Sk + 100}, {-50, -20}, {}},
      {{0, 50, Sk}, {0, 50, Sk + 100}, {-5, Sk + 100, 20}, {40, most, least}, {0, Sk + 100, Sk + 200}, {}},
      {{0, 20, 60, 60, Sk}, {-7, 60, 50, most, 99}, {99, least, 5, 5, Sk + 1}, {}}};
  for (int n : {0, 1, 2}) {
    const size_t B = q_starts[n][0].size() - 1;
    const vector<vector<int>> lengths = {{}, vector<int>(B, most), vector<int>(B, Sk + 100), vector<int>(B, 37), vector<int>(B, least)};
    size_t i = 0;
    for (const auto& q : q_starts[n]) {
      for (const auto& k : k_starts[n]) {
        i++;
        if (uint32_t(i) * 2654435761u % 3) continue;  // a third of the pairs suffices
        INFO(B << " sequences, case " << i);
        CHECK(run(q, k, lengths[i % lengths.size()], i % 3 == 0 ? 0 : i % 3 == 1 ? 25 : Sk + 100, i % 2));
      }
    }
  }
  const vector<int> one = {0, Sq, Sq, Sq, Sq, Sq, Sq, Sq, Sq};
  CHECK(run(one, {0, Sk, Sk, Sk, Sk, Sk, Sk, Sk, Sk}, vector<int>(8, most)));
  CHECK(run(one, vector<int>(9, 0), {}));
}

// Decreasing starts, with which rows belong to several sequences and the plan would overflow: the
// call does nothing, and the next call with the same workspace is correct.
CASE_IF("backwards", Defines::use_lengths && !Defines::use_pages) {
  constexpr int B = 64;
  const Attention a(1, 2, 1, 100, 30);
  vector<int> twice(B + 1, 0), one(B + 1, 100), keys(B + 1, 30);
  for (int b = 1; b < B; b += 2) twice[b] = 100;
  one[0] = keys[0] = 0;
  const Ints twice_g(twice), one_g(one), keys_g(keys);
  SdpaParams p = a.p;
  p.B = B;
  p.q_starts = twice_g;
  p.k_starts = keys_g;
  const Owned memory(p);
  CHECK(a.forward(p) == "");
  p.q_starts = one_g;
  CHECK((a.forward(p) == "" && a.is_right()));
}

// The memory for partials does not depend on the maximum number of keys, and no number of sequences
// is refused.
CASE_IF("room", Defines::use_lengths && (!limits_keys<Defines> || Defines::use_tuned)) {
  constexpr int B = 300, most = 140000, D = Defines::head_dim;
  SdpaParams wide{};
  wide.B = 4096;
  wide.Hq = 64;
  wide.Hkv = 8;
  wide.Sq = 1;
  wide.Sk = 1 << 20;
  wide.D = D;
  simt::gpu.sms[0] = 132;
  CHECK((sdpa_workspace_bytes(wide) <= size_t(64) << 20 || Defines::block_m > 64 || Defines::split_ctas > 1));
  const size_t bytes = sdpa_workspace_bytes(wide);
  wide.Sk = 1000;
  CHECK(sdpa_workspace_bytes(wide) == bytes);
  wide.Hq = wide.Hkv = 20000;
  if constexpr (!Defines::use_tuned && !merges_by_kernel<Defines>) {
    CHECK(plan_args<Defines>(wide, items_of<Defines>(wide)).partials * 20000 <= most_split_items);
  }
  simt::gpu = {};
  const Attention a(1, 2, 1, 1, most);
  SdpaParams p = a.p;
  vector<int> lengths(B);
  for (int b = 0; b < B; b++) lengths[b] = b == 7 ? 3000 : b % 50 + 1;
  int* held = nullptr;
  cudaMalloc(&held, B * sizeof(int));
  cudaMalloc(&p.O, B * 2 * D * sizeof(Output));
  cudaMalloc(&p.LSE, B * 2 * sizeof(float));
  cudaMemcpy(held, lengths.data(), B * sizeof(int), cudaMemcpyHostToDevice);
  p.B = B;
  p.k_lengths = held;
  p.q.batch = p.k.batch = p.v.batch = 0;
  p.o.batch = 2 * D;
  p.o.head = D;
  const Owned memory(p);
  const SdpaStatus status = on_stream([&](cudaStream_t stream) { return sdpa_forward(p, stream); });
  CHECK(string(status.text) == "");
  vector<Output> O(B * 2 * D), one(2 * D);
  cudaMemcpy(O.data(), p.O, O.size() * sizeof(Output), cudaMemcpyDeviceToHost);
  for (const int length : {1, 33, 50, 3000}) {
    SdpaParams alone = a.p;
    alone.Sk = length;
    CHECK((a.forward(alone) == "" && a.is_right(length)));
    cudaMemcpy(one.data(), a.p.O, one.size() * sizeof(Output), cudaMemcpyDeviceToHost);
    for (int b = 0; b < B; b++) {
      for (int i = 0; i < 2 * D && lengths[b] == length; i++) {
        REQUIRE(std::fabs(to_float(O[b * 2 * D + i]) - to_float(one[i])) <= 1e-2f);
      }
    }
  }
  cudaFree(held);
  cudaFree(p.O);
  cudaFree(p.LSE);
}

// A stride of 0 shares a head or batch, also with TMA; with TMA, negative strides are refused with
// a message.
CASE("shared_heads") {
  const Attention a(2, 4, 2, 33, 130);
  SdpaParams p = a.p, q = a.p;
  p.k.head = p.v.head = 0;
  q.k.head = q.v.head = 0;
  q.Hkv = 1;
  vector<Output> shared(2 * 4 * 33 * Defines::head_dim), want(shared.size());
  const auto run = [&](const SdpaParams& x, vector<Output>& O) {
    CHECK(a.forward(x) == "");
    cudaMemcpy(O.data(), a.p.O, O.size() * sizeof(Output), cudaMemcpyDeviceToHost);
  };
  run(p, shared);
  run(q, want);
  if (!Defines::use_tuned && Defines::split_ctas != 0 && !Defines::pack_gqa) CHECK(memcmp(shared.data(), want.data(), want.size() * sizeof(Output)) == 0);
  for (size_t i = 0; i < want.size(); i++) REQUIRE(std::fabs(to_float(shared[i]) - to_float(want[i])) <= 1e-2f);
  p = a.p;
  p.k.batch = p.v.batch = 0;
  run(p, shared);
  const size_t half = want.size() / 2;
  p.B = 1;
  p.Q += p.q.batch;
  p.O = a.p.O;  // the second batch alone
  run(p, want);
  for (size_t i = 0; i < half; i++) REQUIRE(std::fabs(to_float(shared[half + i]) - to_float(want[i])) <= 1e-2f);
  p = a.p;
  p.K += p.k.batch;
  p.k.batch = -p.k.batch;
  if (Defines::is_wgmma) CHECK(contains(a.forward(p), "TMA takes 0 to 2^40 bytes"));
}
