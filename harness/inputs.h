// The inputs of a problem: values drawn from a seed and copied to device memory in the problem's
// layout.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "draw.h"
#include "tensors.h"

namespace SDPA_NAMESPACE {
namespace {

bool adds_bias() { return line.use_bias != 0 && line.use_bias != 2; }
bool has_float_bias() { return line.use_bias == 3 || line.use_bias == 5; }
bool has_key_bias() { return line.use_bias >= 4; }  // one row for all queries and heads of a batch
int bias_bytes() { return line.use_bias == 2 ? 1 : has_float_bias() ? 4 : 2; }  // per element

// The layout of a bias, which depends on the layout of the other tensors.
struct BiasRows {
  const char *layout, *name;
  int unit;      // row strides are a multiple of this number of elements; 0: odd
  bool shifted;  // the tensor starts one element after the allocation
  bool gaps;     // one element between heads, so that their rows are not aligned
};
BiasRows bias_rows(const string& layout) {
  const int chunk = 16 / bias_bytes();  // elements per 16 bytes
  const BiasRows rows[] = {{"bhsd", "contiguous", 1, false, false},
                           {"bshd", "padded", chunk, false, false},
                           {"packed", "shifted", chunk, true, false},
                           {"zero", "gaps", chunk, false, true}};
  for (const BiasRows& r : rows) {
    if (layout == r.layout) return r;
  }
  return {"", "odd", 0, true, false};
}

// A problem, its tensors in device memory, and the parameters that point to them.
class Inputs {
 public:
  explicit Inputs(const Problem& p) : problem(p), params(params_of(p)) {
    // Host memory for the inputs as floats and as elements, two copies of the outputs, and two
    // copies of one tensor during a comparison. In double, since the sizes are not limited.
    const double host_need =
        (14.0 * p.B * p.Hq * p.Sq + 12.0 * p.B * p.Hkv * p.Sk) * std::max(p.D, p.Dv);
    const double host_bytes = double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGESIZE));
    if (host_need > host_bytes) {
      throw CudaError{format("checking the problem needs %.1f GB of host memory of %.1f GB",
                             host_need * 1e-9, host_bytes * 1e-9)};
    }
    for (int t = 0; t < 4; t++) tensors[t] = make_tensor(p, Tensor(t));
    const auto set = [&](auto*& pointer, Strides& strides, Tensor t) {
      pointer = static_cast<std::remove_reference_t<decltype(pointer)>>(at(t).first());
      strides = at(t).strides;
    };
    set(params.Q, params.q, Tensor::Q);
    set(params.K, params.k, Tensor::K);
    set(params.V, params.v, Tensor::V);
    set(params.O, params.o, Tensor::O);
    Descale* const descales[] = {&params.q_descale, &params.k_descale, &params.v_descale};
    for (int t = 0; t < 3; t++) {
      if (element_bytes(dtype_of(Tensor(t))) == 2) continue;
      factors_[t].reset(new DeviceFactors(p, Tensor(t)));
      *descales[t] = factors_[t]->descale;
    }
    if (p.has_sinks) {
      sinks_.reset(new Guarded("the sinks", p.Hq * sizeof(float)));
      params.sinks = sinks_->data<float>();
    }
    const auto allocate = [&](bool has, std::unique_ptr<Guarded>& of, const int*& pointer,
                              int count) {
      if (!has) return;
      of.reset(new Guarded("the lengths", count * sizeof(int)));
      pointer = of->data<int>();
    };
    allocate(p.has_lengths, lengths_, params.k_lengths, p.B);
    allocate(p.has_q_lengths, q_lengths_, params.q_lengths, p.B);
    allocate(p.has_k_firsts, firsts_, params.k_firsts, p.B);
    allocate(p.packs_q, starts_[0], params.q_starts, p.B + 1);
    allocate(p.packs_k, starts_[1], params.k_starts, p.B + 1);
    if (!p.bias_kind.empty()) allocate_bias();
    if (!p.key_mask_kind.empty()) allocate_key_mask();
    allocate_mods();
    if (p.page_size) allocate_pages();
  }

  void set_inputs(uint64_t seed) {
    problem.seed = seed;
    if (starts_[0])
      starts_[0]->store(beyond_tensor(problem.q_starts = drawn_starts(problem, Tensor::Q, seed),
                                      problem.Sq, seed));
    if (starts_[1])
      starts_[1]->store(beyond_tensor(problem.k_starts = drawn_starts(problem, Tensor::K, seed),
                                      problem.Sk, seed));
    if (sinks_) {
      const vector<float> sinks = drawn_sinks(problem, seed);
      sinks_->store(sinks);
      problem.sinks.assign(sinks.begin(), sinks.end());
    }
    if (lengths_) lengths_->store(drawn_lengths(problem, seed));
    if (problem.has_lengths || problem.most_keys)
      problem.k_lengths = clamped_k_lengths(problem, seed);
    if (q_lengths_) q_lengths_->store(problem.q_lengths = drawn_q_lengths(problem, seed));
    if (firsts_) firsts_->store(problem.k_firsts = drawn_k_firsts(problem, seed));
    vector<double>* const factors[] = {&problem.q_factor, &problem.k_factor, &problem.v_factor};
    for (int t = 0; t < 3; t++) {
      vector<float>& x = inputs_[t];
      x = make_input(problem, Tensor(t), *reference::dist_named(problem.dist), seed,
                     problem.same_heads);
      const float step =
          problem.descale == "none" ? float(unit_of(line.input)) : step_for(x, dtype_of(Tensor(t)));
      if (factors_[t]) *factors[t] = factors_[t]->set(step, seed);
      held_[t] = round_to_elements(x, step, dtype_of(Tensor(t)));
      // Unused rows of Q matter to the backward pass only.
      if (line.has_lengths && (t > 0 || line.backward))
        poison_unused_rows(problem, Tensor(t), x, held_[t]);
      tensors[t]->write(held_[t]);
    }
    if (bias_) set_bias(seed);
    if (key_mask_) set_key_mask(seed);
    set_mods(seed);
    make_map();
    if (table_) set_pages(seed);
    problem.Q = inputs_[0].data();
    problem.K = inputs_[1].data();
    problem.V = inputs_[2].data();
  }

  DeviceTensor& at(Tensor t) { return *tensors[int(t)]; }

  Problem problem;
  SdpaParams params;
  std::unique_ptr<DeviceTensor> tensors[4];  // Q, K, V, O

 protected:
  // Allocates paged copies of K and V, which only the tested kernel reads: [pages,Hkv,page_size,D]
  // for the layout bhsd, else [pages,page_size,Hkv,D]; the layout "padded" has gaps between rows
  // and between pages. Each sequence has its own pages, and one more page is shared by all.
  void allocate_pages() {
    const int64_t size = problem.page_size, per_sequence = (problem.Sk + size - 1) / size;
    const int64_t pages = problem.B * per_sequence + 1, H = problem.Hkv;
    const bool by_heads = problem.layout == "bhsd";
    const int64_t gap = problem.layout == "padded" ? line.vec_width : 0;
    for (int t = 0; t < 2; t++) {
      const int64_t D = width_of(problem, Tensor(1 + t)) + gap, page = H * size * D + gap;
      pages_[t].reset(new DeviceTensor(problem, Tensor(1 + t), pages * page));
      (t ? params.v : params.k) = {page, by_heads ? size * D : D, by_heads ? D : H * D};
    }
    params.K = pages_[0]->data<KeyValue>();
    params.V = pages_[1]->data<KeyValue>();
    params.pages = int(pages);
    params.page_stride = std::max(int(per_sequence), params.Sk / problem.page_size) + 3;
    if (problem.narrow_table) params.page_stride = int(per_sequence);
    table_.reset(new Guarded("the page table", problem.B * params.page_stride * sizeof(int)));
    params.page_table = table_->data<int>();
  }
  // Draws the order of the pages. Table entries that no visible key needs are out of bounds, or the
  // shared page, which has no key. The kernel must clamp entries that are out of bounds.
  void set_pages(uint64_t seed) {
    constexpr int wild[] = {-7, 2147483647};
    const int size = problem.page_size, pages = params.pages,
              per_sequence = (problem.Sk + size - 1) / size;
    vector<int> order(pages - 1), table(size_t(problem.B) * params.page_stride);
    std::iota(order.begin(), order.end(), 0);
    for (int i = pages - 2; i > 0; i--)
      std::swap(order[i], order[reference::mix(seed * 77 + i) % (i + 1)]);
    for (int b = 0; b < problem.B; b++) {
      const reference::Sequence own = reference::sequence_of(problem, b);
      size_t first = own.Sk, end = 0;  // range of visible keys; below, their rows in K
      for (int q = 0; q < own.Sq; q++) {
        if (reference::first_key(problem, own, q) >= reference::past_last_key(problem, own, q))
          continue;
        first = std::min(first, reference::first_key(problem, own, q));
        end = std::max(end, reference::past_last_key(problem, own, q));
      }
      first += own.first_key;
      end += own.first_key * (end > 0);
      for (int i = 0; i < params.page_stride; i++) {
        const size_t k = size_t(i) * size;
        const bool needed = k < end && k + size > first;
        const uint64_t r = reference::mix(seed * 78 + table.size() * b + i) % 3;
        table[b * params.page_stride + i] = needed  ? order[b * per_sequence + i]
                                            : r < 2 ? wild[r]
                                                    : pages - 1;
      }
    }
    for (int t = 0; t < 2; t++) {
      const Strides& s = t ? params.v : params.k;
      const Bits& x = held_[1 + t];
      const int D = width_of(problem, Tensor(1 + t));
      Bits paged(size_t(pages) * s.batch);
      for (size_t i = 0; i < paged.size(); i++) paged[i] = poison_of_row(line.input, i / D);
      for (int64_t row = 0; row < int64_t(x.size()) / D; row++) {
        const int64_t b = row / problem.Sk / problem.Hkv, h = row / problem.Sk % problem.Hkv,
                      k = row % problem.Sk;
        const int64_t page = order[b * per_sequence + k / size];
        std::copy_n(&x[row * D], D, &paged[page * s.batch + h * s.head + k % size * s.row]);
      }
      pages_[t]->write(paged);
    }
    table_->store(table);
  }

  void allocate_bias() {
    reference::Bias& bias = problem.bias;
    const auto size_of = [&](char dim, int size) {
      return problem.bias_dims.find(dim) == string::npos ? 1 : size;
    };
    bias.batches = size_of('b', problem.B);
    bias.heads = size_of('h', problem.Hq);
    bias.rows = size_of('q', problem.Sq);
    bias.of_last_keys = problem.bias_kind == "tree";
    bias.hides = line.use_bias == 2;
    bias.keys = bias.of_last_keys
                    ? std::max(std::min(problem.Sk, problem.Sq), std::min(problem.Sk, 1))
                    : problem.Sk;
    params.bias_keys = bias.of_last_keys ? bias.keys : 0;
    const BiasRows rows = bias_rows(problem.layout);
    bias_row_ = rows.unit > 0 ? (bias.keys + rows.unit - 1) / rows.unit * rows.unit
                              : bias.keys + 1 - bias.keys % 2;
    bias_head_ = bias_row_ * bias.rows + rows.gaps;
    params.bias_strides = {bias.batches > 1 ? bias_head_ * bias.heads : 0,
                           bias.heads > 1 ? bias_head_ : 0, bias.rows > 1 ? bias_row_ : 0};
    const size_t elements = size_t(bias.batches) * bias.heads * bias_head_ + 1;
    bias_.reset(new Guarded("the bias", elements * bias_bytes()));
    params.bias = bias_->data<char>() + rows.shifted * bias_bytes();
    params.bias_map_bytes =
        problem.bias_dims.find('m') == string::npos ? 0 : line.facts_of(params).bias_map_bytes;
    if (params.bias_map_bytes == 0) return;
    bias_map_.reset(new Guarded("the map of the bias", params.bias_map_bytes));
    params.bias_map = bias_map_->data();
  }
  void set_bias(uint64_t seed) {
    reference::Bias& bias = problem.bias;
    const float infinity = std::numeric_limits<float>::infinity();
    bias.x.assign(size_t(bias.batches) * bias.heads * bias.rows * bias.keys, 0);
    const bool has_floats = has_float_bias();
    const bool has_large = adds_bias() && (line.input == DType::bf16 || has_floats);
    const string& kind = problem.bias_kind;
    reference::parallel_for(bias.x.size() / std::max(bias.keys, 1), [&](size_t row) {
      const int q = int(row % bias.rows);
      const uint64_t of_row = reference::mix(reference::mix(seed + 33) + row);
      for (int k = 0; k < bias.keys; k++) {
        float& x = bias.x[row * bias.keys + k];
        const uint64_t r = reference::mix(of_row + k);
        bool seen = true;
        if (kind == "causal") seen = k <= q;
        const int64_t block_column = int64_t(k) * 16 / bias.keys,
                      block_row = int64_t(q) * 16 / bias.rows;
        if (kind == "documents") seen = block_column == block_row;
        if (kind == "blocks")
          seen = (block_column ^ block_row ^ int64_t(row / bias.rows)) % 4 == 0;  // differs between heads
        if (kind ==
            "tree") {  // key k is node k of a binary tree; the parent of node n is (n - 1) / 2
          int node = q % bias.keys;
          while (node > k) node = (node - 1) / 2;
          seen = node == k;
        }
        if (kind == "add" || kind == "bool") {
          // In the first 1,024 rows, also hides runs of 200 keys, and in one of 32 rows all keys.
          const bool is_special = q < 1024;
          seen = r % 16 > 0 &&
                 !(is_special && (reference::mix(of_row % 64 * 999 + k / 200 + seed) % 4 == 0 ||
                                  of_row % 32 == 0));
          if (kind == "add") x = 2 * reference::normal(seed + 34, Tensor::O, row * bias.keys + k);
          if (kind == "add" && has_floats) x += 1000;  // 16-bit types have steps of 0.5 or 4 here
          // With -3.3e38 for all keys, LSE as a float would lose log(sum), so P could not be recomputed.
          const bool is_least = r % 64 == 33 || (of_row % 32 == 1 && !line.backward);
          if (kind == "add" && has_large && is_special && is_least) x = -3.3e38f;
        }
        if (kind == "padding") {
          const int length = bias.keys / 2 + int(of_row % (bias.keys / 2 + 1));
          seen = of_row % 8 > 0 && (of_row / 8 % 3 == 0   ? k < length
                                    : of_row / 8 % 3 == 1 ? k >= bias.keys - length
                                                          : r % 64 > 0);
          if (!seen && has_large && !line.backward && of_row / 32 % 2) {
            seen = true;
            x = -3.3e38f;
          }
        }
        x = !seen        ? -infinity
            : has_floats ? x
                         : element_value(line.input, element_bits(line.input, x));
      }
    });
    vector<char> bytes(bias_->bytes, char(0xff));  // gaps are NaN, or true
    const size_t start = static_cast<const char*>(params.bias) - bias_->data<char>();
    for (size_t i = 0; i < bias.x.size(); i++) {
      const uint16_t short_bits =
          line.use_bias == 2 ? bias.x[i] == 0 : element_bits(line.input, bias.x[i]);
      const void* const bits = has_floats ? static_cast<const void*>(&bias.x[i]) : &short_bits;
      const size_t row = i / bias.keys,
                   at = row / bias.rows * bias_head_ + row % bias.rows * bias_row_ + i % bias.keys;
      memcpy(&bytes[start + at * bias_bytes()], bits, bias_bytes());
    }
    bias_->store(bytes);
  }

  // Rows are contiguous for the layout bhsd. Otherwise row strides and the first address are odd.
  void allocate_key_mask() {
    const bool is_shared = problem.key_mask_kind.find(',') != string::npos,
               is_odd = problem.layout != "bhsd";
    key_mask_row_ = is_odd ? problem.Sk / 2 * 2 + 1 : problem.Sk;
    key_mask_.reset(new Guarded("the mask of keys", size_t(problem.B) * key_mask_row_ + 1));
    params.key_mask = key_mask_->data<uint8_t>() + is_odd;
    params.key_mask_stride = is_shared ? 0 : key_mask_row_;
  }
  // Of 8 successive batches, one sees no key, one sees all keys, and one sees a single key.
  void set_key_mask(uint64_t seed) {
    const int Sk = problem.Sk, rows = params.key_mask_stride == 0 ? 1 : problem.B;
    const string kind = problem.key_mask_kind.substr(0, problem.key_mask_kind.find(','));
    problem.key_mask.assign(size_t(rows) * Sk, 0);
    vector<uint8_t> bytes(key_mask_->bytes, 1);
    for (int b = 0; b < rows; b++) {
      const uint64_t turn = (seed + b) % 8, of_row = reference::mix(reference::mix(seed + 55) + b);
      const int drawn = int(of_row % (Sk + 1)), seen = turn == 5   ? 0
                                                       : turn == 6 ? Sk
                                                       : turn == 7 ? std::min(Sk, 1)
                                                                   : drawn;
      for (int k = 0; k < Sk; k++) {
        const uint64_t r = reference::mix(of_row + k);
        const bool in_stretch = seed % 2 && reference::mix(of_row + 999 + k / 200) % 2;
        const bool is_seen = kind == "right"  ? k < seen
                             : kind == "left" ? k >= Sk - seen
                             : turn < 5       ? r % 8 > 0 && !in_stretch
                                              : turn == 6 || (seen == 1 && k == drawn % Sk);
        problem.key_mask[size_t(b) * Sk + k] = is_seen;
        // Any nonzero byte shows a key.
        bytes[(params.key_mask - key_mask_->data<uint8_t>()) + b * key_mask_row_ + k] =
            is_seen ? uint8_t(1 + r / 8 % 255) : 0;
      }
    }
    key_mask_->store(bytes);
  }

  // Allocates the arrays that SCORE_MOD and MASK_MOD use. Each has B * Hq * (Sq + Sk) + 1,024
  // elements, so that most index expressions of b, h, q and k are in bounds.
  void allocate_mods() {
    const Problem& p = problem;
    mods_.size = size_t(p.B) * std::max(p.Hq, 1) * (p.Sq + p.Sk) + 1024;
    mods_.outside = &outside_;
    const float** const x[] = {&params.x0, &params.x1, &params.x2, &params.x3};
    const int** const i[] = {&params.i0, &params.i1};
    for (int n = 0; n < 6; n++) {
      if (!line.uses[n]) continue;
      mod_arrays_[n].reset(new Guarded(mod_arrays[n], mods_.size * sizeof(float)));
      if (n < 4)
        *x[n] = mod_arrays_[n]->data<float>();
      else
        *i[n - 4] = mod_arrays_[n]->data<int>();
    }
    if (!line.sees || !p.keeps_map) return;
    params.bias_map_bytes = line.facts_of(params).bias_map_bytes;
    if (params.bias_map_bytes == 0) return;
    bias_map_.reset(new Guarded("the map of MASK_MOD", params.bias_map_bytes));
    params.bias_map = bias_map_->data();
  }
  // x0: ALiBi slopes, powers of two from 2^-8 to 1/2. x1 and x3: N(0,1). x2: uniform in [0.5, 1.5).
  // i0: document numbers, with document lengths from 1 to max(Sq, Sk) / 8. i1: uniform in {0, 1, 2,
  // 3}.
  void set_mods(uint64_t seed) {
    for (int n = 0; n < 6; n++) {
      if (!mod_arrays_[n]) continue;
      const auto drawn = [&](size_t i) {
        return reference::mix(reference::mix(seed + 44 + n) + i);
      };
      if (n < 4) {
        vector<float>& x = mod_reals_[n];
        x.resize(mods_.size);
        mods_.x[n] = x.data();
        for_all(x.size(), [&](size_t i) {
          const uint64_t r = drawn(i);
          x[i] = n == 0   ? std::exp2(-float(1 + r % 8))
                 : n == 2 ? 0.5f + float(r % 4096) / 4096
                          : reference::normal(seed + 44 + n, Tensor::O, i);
        });
        mod_arrays_[n]->store(x);
      } else {
        vector<int>& x = mod_ints_[n - 4];
        x.resize(mods_.size);
        mods_.i[n - 4] = x.data();
        const uint64_t longest = std::max(std::max(problem.Sq, problem.Sk) / 8, 1);
        int document = 0;
        for (size_t i = 0, end = 0; i < x.size(); i++) {
          if (i == end) {
            end += 1 + drawn(i) % longest;
            document++;
          }
          x[i] = n == 4 ? document : int(drawn(i) % 4);
        }
        mod_arrays_[n]->store(x);
      }
    }
    const auto place = [](int b, int h, int q, int k, int Sq, int Sk) {
      return ModPlace{b, h, q, k, Sq, Sk};
    };
    if (line.logit) {
      problem.logit = [=](double s, auto... at) { return line.logit(s, place(at...), mods_, 0); };
    }
    if (line.sees) problem.sees = [=](auto... at) { return line.sees(place(at...), mods_); };
  }
  void make_map() {
    if (!bias_map_) return;
    bias_map_->fill(0xff);
    const SdpaStatus status = line.map_bias(params, nullptr);
    if (!status.ok()) throw CudaError{status.text};
  }
  std::unique_ptr<Guarded> mod_arrays_[6];  // indexed like mod_arrays
  vector<float> mod_reals_[4];
  vector<int> mod_ints_[2];
  ModArrays mods_;
  bool outside_ = false;  // an expression read out of bounds
  std::unique_ptr<Guarded> sinks_, lengths_, q_lengths_, firsts_, bias_, bias_map_, key_mask_;
  std::unique_ptr<Guarded> starts_[2];       // of Q and K
  int64_t bias_row_ = 0, bias_head_ = 0, key_mask_row_ = 0;  // strides in elements
  std::unique_ptr<DeviceTensor> pages_[2];   // of K and V
  std::unique_ptr<Guarded> table_;
  std::unique_ptr<DeviceFactors> factors_[3];  // of 8-bit Q, K and V
  vector<float> inputs_[3];                    // Q, K and V, rounded
  Bits held_[3];                               // the same as bits of elements
};

}  // namespace
}  // namespace SDPA_NAMESPACE
