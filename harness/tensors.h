// Tensors in device memory, surrounded by guard bytes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "problem.h"

namespace SDPA_NAMESPACE {
namespace {

constexpr size_t GUARD = 512;  // guard bytes on each side: 0xff, which is a NaN in every type

// An allocation in device memory with guard bytes on both sides.
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
  template <class T> vector<T> fetch(size_t size, ptrdiff_t at = 0) const {  // `size` in bytes
    vector<T> x(size / sizeof(T));
    require(cudaMemcpy(x.data(), data() + at, size, cudaMemcpyDeviceToHost),
            "copying from the GPU");
    return x;
  }
  template <class T> void store(const vector<T>& x, ptrdiff_t at = 0) {
    require(cudaMemcpy(data() + at, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice),
            "copying to the GPU");
  }
  // If guard bytes were overwritten, sets `trouble` to a sentence.
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

// A contiguous tensor [B,H,S,D]. tests/sweep.cu adds other layouts.
class DeviceTensor : public Guarded {
 public:
  DeviceTensor(const Problem& p, Tensor t, size_t elements)
      : Guarded(name_of(t), elements * bytes_of(t)), element_bytes(bytes_of(t)) {
    const int64_t S = of_query(t) ? p.Sq : p.Sk, H = of_query(t) ? p.Hq : p.Hkv;
    const int64_t D = width_of(p, t);
    strides = {H * S * D, S * D, D};
  }
  DeviceTensor(const Problem& p, Tensor t) : DeviceTensor(p, t, rows_of(p, t) * width_of(p, t)) {}

  virtual void* first() const { return data(); }  // element (0,0,0,0)
  virtual void poison() { fill(0xff); }
  virtual void write(const Bits& x) { store_elements(x); }
  // If anything except the elements was overwritten, sets `trouble` to a sentence.
  virtual Bits read(string& trouble) const {
    expect_guards(trouble);
    return fetch_elements(bytes / element_bytes);
  }

  Strides strides;

 protected:
  // These access elements of the allocation, starting with number `first`.
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
  static size_t bytes_of(Tensor t) { return SDPA_NAMESPACE::element_bytes(dtype_of(t)); }
};

// The descale factors of an input, for each head of each batch or packed sequence.
class DeviceFactors : public Guarded {
 public:
  DeviceFactors(const Problem& p, Tensor t)
      : Guarded("a factor", p.descale == "none" ? 0 : elements(p, t) * sizeof(float)),
        tensor_(t),
        heads_(of_query(t) ? p.Hq : p.Hkv),
        batches_(p.B) {
    descale.factor = p.descale == "none" ? nullptr : data<float>();
    if (p.descale == "heads" || p.descale == "zeros") {
      descale.head = 1;
      descale.batch = heads_;
    }
    has_zeros_ = p.descale == "zeros";
    if (p.descale == "gaps") {
      descale.head = 2;
      descale.batch = 2 * heads_ + 3;
    }
  }
  // Draws a different factor near `step` for each head; with "zeros", one in three is 0. Returns
  // the numbers by which the elements of each head are multiplied.
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
    const size_t heads = size_t(p.B) * (of_query(t) ? p.Hq : p.Hkv);
    return p.descale == "shared" ? 1 : p.descale == "gaps" ? 2 * heads + 3 * p.B : heads;
  }
  Tensor tensor_;
  int64_t heads_, batches_;
  bool has_zeros_ = false;
};

// The bits of unused rows: NaN, inf and -inf in turn.
uint16_t poison_of_row(DType type, size_t row) {
  constexpr uint16_t fp16[] = {0x7e00, 0x7c00, 0xfc00}, bf16[] = {0x7fc0, 0x7f80, 0xff80},
                     e4m3[] = {0x7f, 0xff, 0x7f};
  return type == DType::fp16   ? fp16[row % 3]
         : type == DType::bf16 ? bf16[row % 3]
         : type == DType::e4m3 ? e4m3[row % 3]
                               : 255;
}
// Fills rows that are no query or no key of a sequence with NaN and inf, which must not affect any
// result.
void poison_unused_rows(const Problem& p, Tensor t, vector<float>& x, Bits& bits) {
  const size_t S = of_query(t) ? p.Sq : p.Sk, H = of_query(t) ? p.Hq : p.Hkv;
  const size_t D = width_of(p, t), batches = batches_of(p, t);
  vector<char> is_used(batches * S, 0);
  for (int b = 0; b < p.B; b++) {
    const reference::Sequence own = reference::sequence_of(p, b);
    const int first = of_query(t) ? own.first_query : own.first_key;
    const int count = of_query(t) ? own.Sq : own.Sk;
    for (size_t batch = 0; batch < batches; batch++) {
      if (!p.same_heads && batches > 1 && batch != size_t(b))
        continue;  // with same_heads all batches share memory
      for (int i = 0; i < count; i++) is_used[batch * S + first + i] = 1;
    }
  }
  for (size_t row = 0; row < x.size() / D; row++) {
    if (is_used[row / S / H * S + row % S]) continue;
    std::fill_n(x.begin() + row * D, D, NAN);
    std::fill_n(bits.begin() + row * D, D, poison_of_row(dtype_of(t), row % S));
  }
}

// tests/sweep.cu replaces it to add layouts.
std::unique_ptr<DeviceTensor> (*make_tensor)(const Problem&, Tensor) =
    [](const Problem& p, Tensor t) { return std::make_unique<DeviceTensor>(p, t); };

}  // namespace
}  // namespace SDPA_NAMESPACE
