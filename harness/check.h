// Instance: a problem in device memory that can be launched and checked.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "accuracy.h"
#include "backward.h"
#include "inputs.h"
#include "reference_kernel.h"

namespace SDPA_NAMESPACE {
namespace {

// Computes O [heads,Sq,D] and LSE [heads,Sq] of the query heads [first, first + heads), where head
// h of batch b has the index b * Hq + h. A line with SCORE_MOD or MASK_MOD has its own reference
// kernel.
template <class Q, class T>
cudaError_t launch_reference_kernel(const SdpaParams& p, int first, int heads, float* O,
                                    float* LSE) {
  const double unit = unit_of(line.input);
  const double scale = (p.scale == 0 ? 1 / std::sqrt(double(p.D)) : p.scale) * unit * unit;
  const ReferenceKernelArgs a{p, first, float(scale), float(unit), O, LSE, line.use_bias};
  return line.reference_kernel ? line.reference_kernel(a, heads)
                               : launch_reference_kernel_of<Q, T, NoMods>(a, heads);
}

class Instance;

// tests/sweep.cu replaces these.
// Returns a sentence on failure.
string (*check_more)(Instance&) = [](Instance&) { return string(); };
void (*set_machine)(const string&) = [](const string&) {};  // called before the GPU is used
// Returns the parameters with which a problem is launched.
SdpaParams (*prepare_launch)(const Problem&, const SdpaParams&) =
    [](const Problem&, const SdpaParams& p) { return p; };

class Instance : public Inputs {
 public:
  explicit Instance(const Problem& p) : Inputs(p) {
    lse_.reset(new Guarded("LSE", rows_of(p, Tensor::O) * sizeof(float)));
    params.LSE = lse_->data<float>();
    const KernelFacts facts = line.facts_of(params);
    workspace_.reset(new Guarded("the workspace", facts.workspace_bytes));
    workspace_->fill(0);
    scratch_.reset(new Guarded("the scratch memory", facts.scratch_bytes));
    params.workspace = workspace_->data();
    params.scratch = scratch_->data();
    if (line.backward) backward_.reset(new BackwardPass(problem, params));
  }

  void set_inputs(uint64_t seed) {
    has_forward_ = false;
    Inputs::set_inputs(seed);
    if (backward_) backward_->set_inputs(problem);
  }

  // Launches with all resident CTAs and compares the outputs with the reference. Then launches
  // `repeats` more times with max_ctas, which must give bitwise equal results. Returns a sentence
  // on failure.
  string check(Figures& figures, int repeats) {
    params.max_ctas = 0;
    string trouble = run_once();
    params.max_ctas = problem.max_ctas;
    Figures of_forward;
    if (trouble.empty()) trouble = compare(backward_ ? of_forward : figures);
    checked = got;
    if (trouble.empty()) trouble = check_more(*this);
    if (trouble.empty() && backward_) trouble = check_backward(figures);
    for (int n = 0; n < repeats && trouble.empty(); n++) {
      trouble = check_again();
    }
    return trouble;
  }
  // Runs again. Returns a sentence if the results are not bitwise equal to those of the checked
  // run.
  string check_again(const char* sentence = "of two runs on the same inputs differs") {
    const string trouble = run_once();
    return trouble.empty() ? difference(sentence) : trouble;
  }
  // The same for the last of several launches since poison().
  string check_last(const char* sentence) {
    const string trouble = collect();
    return trouble.empty() ? difference(sentence) : trouble;
  }

  // poison() and launch_pass() apply to the forward pass, and after check_backward() to the backward
  // pass.
  void poison() {
    if (backward_ && has_forward_) {
      backward_->poison();
    } else {
      poison_forward();
    }
  }
  void launch_pass(cudaStream_t stream = 0) {
    if (backward_ && has_forward_) {
      backward_->launch(prepare_launch(problem, params), stream);
    } else {
      launch(params, stream);
    }
  }
  void launch(const SdpaParams& p, cudaStream_t stream = 0) const {
    const SdpaStatus status = line.forward(prepare_launch(problem, p), stream);
    if (!status.ok()) throw CudaError{status.text};
  }
  // Launches once. Returns a sentence if anything except the outputs was overwritten.
  string run_once() {
    poison();
    launch_pass();
    string trouble = collect();
    for (int t = 0; t < 3; t++) {
      const bool same = tensors[t]->read(trouble) == held_[t];
      if (!same && trouble.empty()) trouble = "the kernel wrote into " + tensors[t]->name;
    }
    return trouble;
  }

  // Returns the first element in which two results differ, or an empty string.
  string difference(const char* name, const Bits& want, const Bits& other,
                    const char* sentence) const {
    const size_t i = std::mismatch(other.begin(), other.end(), want.begin()).first - other.begin();
    if (i == other.size()) return "";
    return name + where(i) +
           format(" %s: %.9g and %.9g", sentence, double(output_value(want[i])),
                  double(output_value(other[i])));
  }

  // The coordinates of an element of O.
  string where(size_t i) const {
    const size_t D = problem.Dv, S = problem.Sq, H = problem.Hq;
    return format("(b=%d,h=%d,q=%d,d=%d)", int(i / D / S / H), int(i / D / S % H), int(i / D % S),
                  int(i % D));
  }

  struct Outputs {
    Bits O;
    vector<uint32_t> LSE;
  } got, checked;  // of the last run and of the checked run

 private:
  void poison_forward() {
    at(Tensor::O).poison();
    lse_->fill(0xff);
    scratch_->fill(0xff);
  }
  // Launches the backward pass with the results of the checked forward pass and compares the
  // gradients with the reference. From here on, run_once() and launch_pass() launch the backward
  // pass.
  string check_backward(Figures& figures) {
    has_forward_ = true;
    string trouble = run_once();
    if (!trouble.empty()) return trouble;
    vector<float> O(checked.O.size()), LSE(checked.LSE.size());
    for_all(O.size(), [&](size_t i) { O[i] = output_value(checked.O[i]); });
    for (size_t i = 0; i < LSE.size(); i++) LSE[i] = float_of(checked.LSE[i]);
    trouble = backward_->compare(problem, O, LSE, figures);
    backward_->keep();
    return trouble;
  }
  // Waits and copies the outputs to `got`. Returns a sentence if guard bytes were overwritten or
  // the workspace is not zero, as the next launch requires.
  string collect() {
    require(cudaDeviceSynchronize(), "running the kernel");
    string trouble;
    got.O = at(Tensor::O).read(trouble);
    got.LSE = lse_->fetch<uint32_t>(lse_->bytes);
    for (const auto* memory : {&lse_, &workspace_, &scratch_}) (*memory)->expect_guards(trouble);
    if (bias_map_) bias_map_->expect_guards(trouble);
    if (trouble.empty() && backward_ && has_forward_) {
      trouble = backward_->collect();
      if (trouble.empty() && (got.O != checked.O || got.LSE != checked.LSE))
        trouble = "the kernel wrote into O or LSE";
    }
    if (!trouble.empty()) return trouble;
    for (uint32_t word : workspace_->fetch<uint32_t>(workspace_->bytes)) {
      if (word) return format("the kernel left %u in the workspace, which must be zero", word);
    }
    return "";
  }

  // Returns an empty string if `got` and `checked` are bitwise equal.
  string difference(const char* sentence) const {
    if (backward_ && has_forward_) return backward_->difference(problem, sentence);
    if (checked.LSE != got.LSE) return string("LSE ") + sentence;
    return difference("O", checked.O, got.O, sentence);
  }

  // Compares `got` with the CPU reference and, unless that computed every row, with the reference
  // kernel.
  string compare(Figures& figures) {
    const Problem& p = problem;
    size_t queries = 0;
    for (size_t row = 0; row < got.LSE.size(); row++) {
      const bool is_query = reference::is_query(p, row_at(row));
      const char* const trouble =
          is_query ? " was never written" : " was written, and its row is no query";
      for (size_t i = row * p.Dv; i < (row + 1) * p.Dv; i++) {
        if ((got.O[i] != 0xffff) != is_query) return "O" + where(i) + trouble;
      }
      if ((got.LSE[row] != ~0u) != is_query) return "LSE" + where(row * p.Dv) + trouble;
      queries += is_query;
    }
    const auto rows =
        reference::rows_to_check(p, p.seed, line.facts_of(params).item_rows, affordable_macs);
    const auto want = reference::attend(p, rows);
    if (outside_) {
      return format(
          "SCORE_MOD or MASK_MOD reads an array past its end; in these checks it has "
          "B*Hq*(Sq+Sk)+1024 = %zu "
          "elements",
          mods_.size);
    }
    reference::Comparison comparison(output_type, judges_rounding());
    for (size_t i = 0; i < rows.size(); i++) {
      const Row row = output_row(rows[i]);
      comparison.add(rows[i], want[i], row.O, row.LSE);
    }
    const string trouble = comparison.verdict(tolerance_of(problem));
    figures.include(comparison);
    figures.rows_checked += comparison.rows;
    if (!trouble.empty() || rows.size() == queries || problem.dist == "nonfinite") return trouble;
    return has_reference_kernel ? compare_with_reference_kernel(figures, rows, want) : all_finite();
  }

  // Compares every row with the reference kernel, and the reference kernel with the CPU reference
  // on the rows of `sample`.
  string compare_with_reference_kernel(Figures& figures, const vector<reference::Row>& sample,
                                       const vector<reference::Result>& want) {
    const size_t D = problem.Dv, S = problem.Sq, heads = heads_of(problem, Tensor::O);
    const size_t most_heads =
        std::min(heads, std::max<size_t>(1, reference_kernel_elements / (S * D)));
    const Guarded O_g("O of the reference kernel", most_heads * S * D * sizeof(float));
    const Guarded LSE_g("LSE of the reference kernel", most_heads * S * sizeof(float));
    reference::Comparison with_reference(output_type, false),
        with_reference_kernel(output_type, judges_rounding());
    size_t next = 0;  // position in the sample, which is sorted
    for (size_t first = 0; first < heads; first += most_heads) {
      const size_t count = std::min(most_heads, heads - first);
      constexpr auto of_e4m3 = launch_reference_kernel<__nv_fp8_e4m3, __nv_fp8_e4m3>;
      constexpr decltype(of_e4m3) launches[] = {
          launch_reference_kernel<__half, __half>,
          launch_reference_kernel<__nv_bfloat16, __nv_bfloat16>, of_e4m3,
          launch_reference_kernel<uint8_t, uint8_t>};
      constexpr decltype(of_e4m3) of_mixed_types[] = {
          launch_reference_kernel<__half, __nv_fp8_e4m3>,
          launch_reference_kernel<__nv_bfloat16, __nv_fp8_e4m3>};
      const auto launch =
          line.query == line.input ? launches[int(line.input)] : of_mixed_types[int(line.query)];
      // Without pages: the page table may have room for more than Sk keys.
      SdpaParams plain = params;
      plain.Sk = problem.Sk;
      plain.K = static_cast<const KeyValue*>(tensors[1]->first());
      plain.k = tensors[1]->strides;
      plain.V = static_cast<const KeyValue*>(tensors[2]->first());
      plain.v = tensors[2]->strides;
      require(launch(plain, int(first), int(count), O_g.data<float>(), LSE_g.data<float>()),
              "launching the reference kernel");
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
          if (!reference::is_query(problem, at)) continue;
          const Row ours = output_row(at);
          of_head[i].add(at, int(D), &O[row * D], LSE[row], nullptr, ours.O, ours.LSE);
        }
      });
      for (const reference::Comparison& c : of_head) with_reference_kernel.merge(c);
    }
    // The error of fp32 sums grows with the size of the logits.
    const double limit = 1e-5 * std::min(30.0, std::max(1.0, with_reference.largest_lse / 32));
    string trouble = with_reference.verdict({limit, limit, limit});
    if (!trouble.empty()) return "the reference kernel is wrong: " + trouble;
    trouble = with_reference_kernel.verdict(tolerance_of(problem));
    figures.include(with_reference_kernel);
    figures.rows_witnessed += with_reference_kernel.rows;
    return trouble.empty() ? "" : "against the reference kernel: " + trouble;
  }

  // True if the mean error of O shows how the kernel rounded O. It does not if
  // - more than 16,384 keys are summed: tensor cores truncate their sums;
  // - P has fewer bits than O, or sums are in fp16: their errors are larger than the rounding of O;
  // - the type is u8: the rounding of a single weight affects a whole row;
  // - V has 8 bits and O has few different values: with --dist huge, or if all heads are equal and a row
  //   of O is the mean of fewer than 16 rows of V.
  bool judges_rounding() const {
    if ((line.tanh_is_approximate && problem.softcap != 0) || error_by_tanh_approx() > 0)
      return false;
    const auto& mask = problem.key_mask;
    const bool averages_few_rows =
        problem.dist == "stairs" || (!mask.empty() && std::count(mask.begin(), mask.end(), 1) < 16);
    const bool has_one_head = problem.same_heads || problem.B * problem.Hkv == 1;
    const bool has_few_values = problem.dist == "huge" || (averages_few_rows && has_one_head);
    if (has_few_values && element_bytes(line.input) == 1) return false;
    return !line.fp16_acc && line.input != DType::u8 && problem.Sk <= 1 << 14 &&
           query_type.mantissa_bits >= output_type.mantissa_bits;
  }

  string all_finite() const {
    for (size_t i = 0; i < got.O.size(); i++) {
      const bool is_query = reference::is_query(problem, row_at(i / problem.Dv));
      if (is_query && !std::isfinite(output_value(got.O[i])))
        return "O" + where(i) + " is not finite";
    }
    return "";
  }

  struct Row {
    float O[256], LSE;
  };
  Row output_row(const reference::Row& at) const {
    const size_t n = row_number(at);
    Row row;
    for (int d = 0; d < problem.Dv; d++) row.O[d] = output_value(got.O[n * problem.Dv + d]);
    row.LSE = float_of(got.LSE[n]);
    return row;
  }
  size_t row_number(const reference::Row& at) const {  // index in [B,Hq,Sq]
    return (size_t(at.b) * problem.Hq + at.h) * problem.Sq + at.q;
  }
  reference::Row row_at(size_t number) const {
    const size_t S = problem.Sq, H = problem.Hq;
    return {int(number / S / H), int(number / S % H), int(number % S)};
  }

  std::unique_ptr<Guarded> lse_, workspace_, scratch_;
  std::unique_ptr<BackwardPass> backward_;  // null for lines without a backward pass
  bool has_forward_ = false;  // O and LSE hold the checked forward results of these inputs
};

}  // namespace
}  // namespace SDPA_NAMESPACE
