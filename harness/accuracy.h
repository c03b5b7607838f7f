// Tolerances of a check, and the errors that it reports.
#pragma once

#include <string>
#include <vector>

#include "problem.h"

namespace SDPA_NAMESPACE {
namespace {

// The largest change of a logit by the error of tanh_approx() in SCORE_MOD, which is at most 2^-11.
double error_by_tanh_approx() {
  if (!line.logit || !contains_word("tanh_approx", knob_value("SCORE_MOD"))) return 0;
  const vector<float> ones(4096, 1.0f);
  const vector<int> zeros(4096, 0);
  bool outside = false;
  const ModArrays arrays{
      {&ones[0], &ones[0], &ones[0], &ones[0]}, {&zeros[0], &zeros[0]}, ones.size(), &outside};
  double most = 0;
  for (double s = -32; s <= 32; s++) {
    const ModPlace at{0, 0, 5, 3, 64, 64};
    most = std::max(
        most, std::fabs(line.logit(s, at, arrays, 1.0 / 2048) - line.logit(s, at, arrays, 0)));
  }
  return most;
}
// The tolerance for a problem.
reference::Tolerance tolerance_of(const reference::Problem& p) {
  reference::Tolerance t = max(type_of(line.query).tolerance, type_of(line.output).tolerance);
  if (line.fp16_acc) t = max(t, reference::fp16_sums);
  // An e4m3 logit is the scale times a sum of D products, and wgmma truncates each of them. So the
  // error grows with D and with the scale.
  if (line.is_wgmma && line.query == DType::e4m3) {
    t.lse *= std::max(1.0, p.D / 128.0) * std::max(1.0, std::fabs(p.scale) * std::sqrt(p.D));
  }
  // tanh.approx has a relative error of 2^-11. The absolute error of a logit, at most the softcap,
  // is the relative error of its weight.
  const double of_weight = line.tanh_is_approximate
                               ? std::min(p.softcap, reference::largest_logit(p)) / 2048
                               : error_by_tanh_approx();
  t.rel_rms += of_weight;
  t.max_abs += of_weight;
  t.lse += of_weight;
  return t;
}

struct Figures {  // the largest errors of a check, and how many rows it compared
  double rel_rms = 0, rel_rms_limit = 0, max_abs_err = 0, lse_err = 0;
  long rows_checked = 0, rows_witnessed = 0;  // with the CPU reference, the reference kernel

  void include(const reference::Comparison& c) {
    rel_rms = std::max(rel_rms, c.rel_rms);
    rel_rms_limit = std::max(rel_rms_limit, c.rel_rms_limit);
    max_abs_err = std::max(max_abs_err, c.max_abs_err);
    lse_err = std::max(lse_err, c.lse_err);
  }
  void include(const reference::GradientComparison& c) {
    rel_rms = std::max(rel_rms, c.rel_rms());
    rel_rms_limit = std::max(rel_rms_limit, c.rel_rms_limit());
    max_abs_err = std::max(max_abs_err, c.max_abs_err);
  }
};

// tests/unit.cu changes these: whether rows that the CPU reference skips are compared with the
// reference kernel, the work that the CPU reference may do, and the size of the reference kernel's
// O.
bool has_reference_kernel = has_clock;
double affordable_macs = 1.5e9;
size_t reference_kernel_elements = size_t(1) << 26;

}  // namespace
}  // namespace SDPA_NAMESPACE
