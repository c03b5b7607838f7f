// BackwardPass: a backward pass that can be launched and checked. Instance owns one if the line has
// BACKWARD=1. O and LSE are inputs; Instance has already run and checked the forward pass.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "accuracy.h"
#include "inputs.h"
#include "tensors.h"

namespace SDPA_NAMESPACE {
namespace {

constexpr Tensor gradient_tensors[] = {Tensor::dQ, Tensor::dK, Tensor::dV};

// True if the kernels can compute the gradient of the problem's bias.
bool has_bias_gradient(const Problem& p) {
  const bool has_lengths = p.has_lengths || p.has_k_firsts || p.most_keys;
  return adds_bias() && !p.bias_kind.empty() && p.bias_dims.find('N') == string::npos && !p.packs_q &&
         !p.packs_k && !(p.bias_kind == "tree" && has_lengths);
}
// dBias [batches,heads,queries,keys] in device memory. Dimensions over which it is summed have size 1.
class BiasGradient {
 public:
  BiasGradient(const Problem& p, const Strides& q)
      : keys(p.most_keys ? std::min(p.most_keys, p.bias.keys) : p.bias.keys) {
    const struct {
      char name;
      int size;
    } dims[] = {{'b', p.B}, {'h', p.Hq}, {'q', p.Sq}, {'k', keys}};
    for (int i = 0; i < 4; i++) {
      const auto names = [&](int c) { return p.bias_dims.find(char(c)) != string::npos; };
      keeps[i] = (i == 3 || names(dims[i].name)) != names(std::toupper(dims[i].name));
      size[i] = keeps[i] ? dims[i].size : 1;
    }
    // Gaps of 3 elements unless the layout is bhsd, and of 2^31 more where a stride of Q is as large.
    const int64_t gap = p.layout == "bhsd" ? 0 : 3, far = int64_t(1) << 31;
    const auto gap_of = [&](int64_t of_q) { return gap + (of_q >= far ? far : 0); };
    const int64_t row = size[3] + gap_of(q.row), head = size[2] * row + gap_of(q.head),
                  batch = size[1] * head + gap_of(q.batch);
    all_strides_ = {batch, head, row};
    is_far_ = batch >= far;
    strides = {keeps[0] ? batch : 0, keeps[1] ? head : 0, keeps[2] ? row : 0};
    memory_.reset(new Guarded("dBias", size_t(size[0]) * batch * bias_bytes()));
  }
  void* data() const { return memory_->data(); }
  size_t rows() const { return size_t(size[0]) * size[1] * size[2]; }
  void poison() {
    if (!is_far_) return memory_->fill(0xff);
    const vector<uint8_t> row((size[3] + 3) * bias_bytes(), 0xff);
    for (size_t r = 0; r < rows(); r++) memory_->store(row, place_of(r) * bias_bytes());
  }
  // The elements without gaps. Sets `trouble` to a sentence if anything else was overwritten.
  vector<float> read(string& trouble) const {
    memory_->expect_guards(trouble);
    const int64_t bytes = bias_bytes();
    vector<uint8_t> all;
    if (!is_far_) all = memory_->fetch<uint8_t>(memory_->bytes);
    vector<float> x(rows() * size[3]);
    for (size_t r = 0; r < rows(); r++) {
      const int64_t begin = place_of(r) * bytes, row_bytes = size[3] * bytes;
      const auto row = is_far_ ? memory_->fetch<uint8_t>((size[3] + 3) * bytes, begin) : vector<uint8_t>();
      uint8_t* const at = is_far_ ? const_cast<uint8_t*>(row.data()) : &all[begin];
      for (int k = 0; k < size[3]; k++) {
        uint32_t bits = 0;
        memcpy(&bits, at + k * bytes, bytes);
        x[r * size[3] + k] = bytes == 4 ? float_of(bits) : element_value(line.input, uint16_t(bits));
      }
      std::fill_n(at, row_bytes, uint8_t(0xff));
      const bool is_kept = std::count(row.begin(), row.end(), 0xff) == std::ptrdiff_t(row.size());
      if (!is_kept && trouble.empty()) trouble = "the kernel wrote after a row of dBias";
    }
    if (trouble.empty() && std::count(all.begin(), all.end(), 0xff) != std::ptrdiff_t(all.size()))
      trouble = "the kernel wrote between the rows of dBias";
    return x;
  }
  const int keys;  // that have a bias
  bool keeps[4];   // of [batches,heads,queries,keys]: false if dBias is summed over the dimension
  int size[4];
  Strides strides;

 private:
  int64_t place_of(size_t row) const {
    return int64_t(row) / size[2] / size[1] * all_strides_.batch +
           int64_t(row) / size[2] % size[1] * all_strides_.head +
           int64_t(row) % size[2] * all_strides_.row;
  }
  Strides all_strides_;  // `strides` is 0 where dBias is summed
  bool is_far_;
  std::unique_ptr<Guarded> memory_;
};

class BackwardPass {
 public:
  explicit BackwardPass(const Problem& p, const SdpaParams& params) {
    for (Tensor t : {Tensor::dO, Tensor::dQ, Tensor::dK, Tensor::dV})
      tensors_[place(t)] = make_tensor(p, t);
    dO().write({});
    const auto set = [&](auto& pointer, Strides& strides, Tensor t) {
      pointer = tensors_[place(t)]->first();
      strides = tensors_[place(t)]->strides;
    };
    set(gradients_.dO, gradients_.d_o, Tensor::dO);
    set(gradients_.dQ, gradients_.d_q, Tensor::dQ);
    set(gradients_.dK, gradients_.d_k, Tensor::dK);
    set(gradients_.dV, gradients_.d_v, Tensor::dV);
    const size_t rows = rows_of(p, Tensor::dO);
    dLSE_.reset(new Guarded("dLSE", rows * sizeof(float)));
    dSinks_.reset(new Guarded("dSinks", p.has_sinks ? p.Hq * sizeof(float) : 0));
    if (p.has_sinks) gradients_.dSinks = dSinks_->data<float>();
    if (has_bias_gradient(p)) {
      dBias_.reset(new BiasGradient(p, params.q));
      gradients_.dBias = dBias_->data();
      gradients_.d_bias = dBias_->strides;
      gradients_.dBias_sums_keys = !dBias_->keeps[3];
    }
    workspace_.reset(
        new Guarded("the workspace of the backward pass", line.backward_workspace_bytes(params)));
    gradients_.workspace = workspace_->data();
  }

  // dO is N(0,1), with outliers if the inputs have them, or 1 if the logits are uniform. With
  // same_heads, all rows of dO are equal. With odd seeds, LSE has a gradient.
  void set_inputs(const Problem& p) {
    const reference::Dist ones{"ones", [](const reference::InputAt&) { return 1.0f; }};
    const reference::Dist& dist =
        p.dist == "uniform" ? ones
                            : *reference::dist_named(p.dist == "outliers" ? "outliers" : "normal");
    dO_ = make_input(p, Tensor::dO, dist, p.seed, p.same_heads);
    if (p.same_heads) {
      for (size_t i = p.Dv; i < dO_.size(); i++) dO_[i] = dO_[i - p.Dv];
    }
    held_dO_ = round_to_elements(dO_, 1, line.output);
    if (line.has_lengths && !p.same_heads) poison_unused_rows(p, Tensor::dO, dO_, held_dO_);
    dO().write(held_dO_);
    gradients_.dLSE = p.seed % 2 ? dLSE_->data<float>() : nullptr;
    dLSE_values_.assign(dLSE_->bytes / sizeof(float), 0);
    for (size_t i = 0; i < dLSE_values_.size() && gradients_.dLSE; i++) {
      const bool is_query = reference::is_query(p, row_at(p, Tensor::dO, i));
      dLSE_values_[i] = is_query ? reference::normal(p.seed + 88, Tensor::dO, i) : NAN;
    }
    dLSE_->store(dLSE_values_);
  }

  void poison() {
    for (Tensor t : gradient_tensors) tensors_[place(t)]->poison();
    dSinks_->fill(0xff);
    if (dBias_) dBias_->poison();
    workspace_->fill(0xff);
  }
  void launch(const SdpaParams& params, cudaStream_t stream) const {
    const SdpaStatus status = line.backward(params, gradients_, stream);
    if (!status.ok()) throw CudaError{status.text};
  }
  // Copies the gradients to got_. Returns a sentence if anything else was overwritten.
  string collect() {
    string trouble;
    for (int t = 0; t < 3; t++) got_.x[t] = tensors_[place(gradient_tensors[t])]->read(trouble);
    got_.sinks = dSinks_->fetch<uint32_t>(dSinks_->bytes);
    for (const Guarded* x : {dLSE_.get(), dSinks_.get(), workspace_.get()})
      x->expect_guards(trouble);
    if (dBias_) got_.bias = dBias_->read(trouble);
    if (dO().read(trouble) != held_dO_ && trouble.empty()) trouble = "the kernel wrote into dO";
    return trouble;
  }
  void keep() { checked_ = got_; }
  // Returns the first difference between the gradients and those stored by keep(), or an empty
  // string. A dQ whose bits may differ between runs is compared with the reference instead.
  string difference(const Problem& p, const char* sentence) const {
    for (int t = 0; t < 3; t++) {
      if (gradient_tensors[t] == Tensor::dQ && !line.dq_repeats) {
        const string trouble = unwritten(p, t);
        if (!trouble.empty()) return trouble;
        const string verdict = compare_dq(p).verdict();
        if (!verdict.empty()) return verdict;
        continue;
      }
      const size_t i =
          std::mismatch(got_.x[t].begin(), got_.x[t].end(), checked_.x[t].begin()).first -
          got_.x[t].begin();
      if (i < got_.x[t].size()) return where(p, gradient_tensors[t], i) + " " + sentence;
    }
    if (got_.bias != checked_.bias) return string("dBias ") + sentence;
    return got_.sinks == checked_.sinks ? "" : string("dSinks ") + sentence;
  }

  // Compares the gradients with the reference, for all rows or, in large problems, a sample of
  // them. O and LSE are the forward results as numbers. Fails on any NaN. Returns a sentence on
  // failure.
  string compare(const Problem& p, const vector<float>& O, const vector<float>& LSE,
                 Figures& figures) {
    for (int t = 0; t < 3; t++) {
      string trouble = unwritten(p, t);
      if (trouble.empty()) trouble = unused_but_not_0(p, t);
      if (!trouble.empty()) return trouble;
    }
    reference::Backward of(p, dO_.data(), output_type, line.tanh_is_approximate ? 1.0 / 2048 : 0,
                           p.same_heads, error_by_tanh_approx());
    for_all(LSE.size(), [&](size_t i) { of.set_row(i, &O[i * p.Dv], LSE[i], dLSE_values_[i]); });
    reference::GradientComparison dK("dK"), dV("dV"), sinks("dSink");

    const double macs = affordable_macs / 4;
    q_rows_ = reference::rows_to_check(p, p.seed, line.tiles[0].block_m, macs);
    of_q_.assign(q_rows_.size(), reference::Gradient(p.D));
    reference::parallel_for(q_rows_.size(), [&](size_t n) { of_q_[n] = of.of_query(q_rows_[n]); });
    reference::GradientComparison dQ = compare_dq(p);

    reference::Problem keys = p;  // for rows_to_check(): rows of K in the role of queries
    keys.B = batches_of(p, Tensor::K);
    keys.q_starts = p.k_starts;
    keys.packs_q = false;
    keys.q_lengths.clear();
    keys.Hq = p.Hkv;
    keys.Sq = p.Sk;
    keys.Sk = p.Sq * std::max(p.Hq / std::max(p.Hkv, 1), 1);
    const auto k_rows = reference::rows_to_check(keys, p.seed, line.tiles[0].block_m, macs);
    vector<reference::Gradient> of_k(k_rows.size(), reference::Gradient(p.D)),
        of_v(k_rows.size(), reference::Gradient(p.Dv));
    reference::parallel_for(k_rows.size(),
                            [&](size_t n) { of.of_key(k_rows[n], of_k[n], of_v[n]); });
    for (size_t n = 0; n < k_rows.size(); n++) {
      add(dK, p, Tensor::dK, k_rows[n], of_k[n]);
      add(dV, p, Tensor::dV, k_rows[n], of_v[n]);
    }
    for (int h = 0; h < p.Hq && p.has_sinks; h++) {
      const float got = float_of(got_.sinks[h]);
      sinks.add({0, h, 0}, of.of_sink(h), &got);
    }
    reference::GradientComparison bias = compare_bias(p, of, macs);
    figures.rows_checked += long(q_rows_.size() + k_rows.size() + bias.rows);
    string trouble;
    for (const reference::GradientComparison* c : {&dQ, &dK, &dV, &sinks, &bias}) {
      figures.include(*c);
      if (trouble.empty()) trouble = c->verdict();
    }
    return trouble;
  }

 private:
  // Empty, or the first element of a gradient that is NaN.
  string unwritten(const Problem& p, int t) const {
    for (size_t i = 0; i < got_.x[t].size(); i++) {
      if (got_.x[t][i] == 0xffff) return where(p, gradient_tensors[t], i) + " was never written";
      if (std::isnan(output_value(got_.x[t][i])))
        return where(p, gradient_tensors[t], i) + " is NaN";
    }
    return "";
  }
  // Empty, or the first element of a row that is no query or no key and whose gradient is not 0.
  string unused_but_not_0(const Problem& p, int t) const {
    const size_t D = width_of(p, gradient_tensors[t]);
    for (size_t i = 0; i < got_.x[t].size(); i++) {
      if (output_value(got_.x[t][i]) == 0) continue;
      const reference::Row row = row_at(p, gradient_tensors[t], i / D);
      if (of_query(gradient_tensors[t]) ? is_query(p, row) : is_key(p, row)) continue;
      return where(p, gradient_tensors[t], i) + " is not 0, but its row is unused";
    }
    return "";
  }
  // The rows of dQ that compare() has computed.
  reference::GradientComparison compare_dq(const Problem& p) const {
    reference::GradientComparison dQ("dQ");
    for (size_t n = 0; n < q_rows_.size(); n++) add(dQ, p, Tensor::dQ, q_rows_[n], of_q_[n]);
    return dQ;
  }
  // Compares every row_step-th row of dBias, and of its columns every column_step-th.
  reference::GradientComparison compare_bias(const Problem& p, const reference::Backward& of, double macs) const {
    reference::GradientComparison dBias("dBias");
    if (!dBias_) return dBias;
    const BiasGradient& x = *dBias_;
    const size_t rows = x.rows(), width = x.size[3];
    const double all_macs = 2.0 * (p.D + p.Dv) * p.B * p.Hq * p.Sq * x.keys, part = std::max(all_macs / macs, 1.0);
    const size_t row_step = std::max<size_t>(std::min(double(rows), std::ceil(part)), 1);
    const int column_step = x.keeps[3] ? int(std::ceil(part / double(row_step))) : 1;
    const size_t first_row = p.seed % row_step, first_column = p.seed % column_step;
    vector<reference::Gradient> want((rows + row_step - 1 - first_row) / row_step, reference::Gradient(0));
    const auto place = [&](size_t n) {
      const int row = int(first_row + n * row_step), q = row % x.size[2], head = row / x.size[2];
      const auto index = [&](int dim, int i) { return x.keeps[dim] ? i : -1; };
      return reference::Row{index(0, head / x.size[1]), index(1, head % x.size[1]), index(2, q)};
    };
    const reference::Type& type = bias_bytes() == 4 ? reference::fp32 : type_of(line.input);
    reference::parallel_for(width ? want.size() : 0, [&](size_t n) {
      const reference::Row at = place(n);
      want[n] = of.of_bias(at.b, at.h, at.q, {int(first_column), column_step, x.keys}, !x.keeps[3], type);
    });
    for (size_t n = 0; n < want.size(); n++) {
      vector<float> got;
      for (size_t k = first_column; k < width; k += column_step)
        got.push_back(got_.bias[(first_row + n * row_step) * width + k]);
      dBias.add(place(n), want[n], got.data());
    }
    return dBias;
  }
  static int place(Tensor t) { return int(t) - int(Tensor::dO); }
  DeviceTensor& dO() const { return *tensors_[0]; }
  // The name and coordinates of an element.
  static string where(const Problem& p, Tensor t, size_t i) {
    const reference::Row row = row_at(p, t, i / width_of(p, t));
    return format("%s(b=%d,h=%d,row=%d,d=%d)", name_of(t), row.b, row.h, row.q,
                  int(i % width_of(p, t)));
  }
  // The coordinates of row `number` of a tensor.
  static reference::Row row_at(const Problem& p, Tensor t, size_t number) {
    const size_t S = of_query(t) ? p.Sq : p.Sk, H = of_query(t) ? p.Hq : p.Hkv;
    return {int(number / S / H), int(number / S % H), int(number % S)};
  }
  void add(reference::GradientComparison& to, const Problem& p, Tensor t, const reference::Row& at,
           const reference::Gradient& want) const {
    const size_t D = width_of(p, t), S = of_query(t) ? p.Sq : p.Sk, H = of_query(t) ? p.Hq : p.Hkv;
    const size_t first = ((at.b * H + at.h) * S + at.q) * D;
    float row[256];
    for (size_t d = 0; d < D; d++) {
      row[d] = output_value(got_.x[place(t) - 1][first + d]);
      const bool overflows = std::fabs(want.x[d]) > output_type.largest && std::isinf(row[d]);
      if (overflows && std::signbit(row[d]) == std::signbit(want.x[d])) row[d] = float(want.x[d]);
    }
    to.add(at, want, row);
  }

  std::unique_ptr<DeviceTensor> tensors_[4];  // dO, dQ, dK, dV
  std::unique_ptr<Guarded> dLSE_, dSinks_, workspace_;
  std::unique_ptr<BiasGradient> dBias_;  // null: not computed
  Gradients gradients_{};
  vector<float> dO_, dLSE_values_;
  vector<reference::Row> q_rows_;     // the rows of Q that are checked
  vector<reference::Gradient> of_q_;  // their expected dQ
  Bits held_dO_;
  struct Outputs {
    Bits x[3];  // dQ, dK, dV
    vector<uint32_t> sinks;
    vector<float> bias;
  } got_, checked_;
};

}  // namespace
}  // namespace SDPA_NAMESPACE
