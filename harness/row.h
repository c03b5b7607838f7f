// The result of a problem: its CSV row, and the text shown on a terminal.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "device.h"
#include "options.h"
#include "timing.h"

// CMake links it, so that a new commit relinks without recompiling. A plain nvcc build does not
// have it.
extern "C" __attribute__((weak)) const char* sdpa_git_sha();

namespace SDPA_NAMESPACE {
namespace {

enum ExitCode { exit_pass = 0, exit_wrong = 1, exit_usage = 2, exit_cuda = 3, exit_skipped = 77 };

// Forward: two matrix products, with a multiply and an add for each visible (query, key) pair and
// element of D. Backward: five products, three of width D and two of width Dv; recomputation does
// not count.
double flops_of(const Problem& p) {
  const double widths = line.backward ? 3.0 * p.D + 2.0 * p.Dv : p.D + p.Dv;
  return 2 * widths * p.B * p.Hq * reference::visible_pairs(p);
}

struct Run {
  Problem problem;
  vector<uint64_t> seeds;
  KernelFacts kernel{};
  Resources resources;
  string status = "ok", check, note;
  Figures figures;
  Timing timing;
  ExitCode exit = exit_pass;

  bool timed() const { return timing.graph_us > 0; }
  double tflops() const { return flops_of(problem) / timing.graph_us * 1e-6; }
  // Lower bounds of the time: the matrix products at the peak rate of the tensor cores, and moving
  // Q, K, V and O once at the peak memory bandwidth. The larger one is the bound.
  double matrix_us(const Device& d) const { return flops_of(problem) / d.matrix_flops * 1e6; }
  double memory_us(const Device& d) const {
    double bytes = 0, keys = 0;
    for (int b = 0; b < problem.B; b++) keys += reference::sequence_of(problem, b).Sk;
    for (Tensor t : {Tensor::Q, Tensor::K, Tensor::V, Tensor::O}) {
      bytes += (of_query(t) ? double(rows_of(problem, t)) : problem.Hkv * keys) *
               width_of(problem, t) * element_bytes(dtype_of(t));
    }
    if (line.backward) bytes *= 2;  // each tensor has a gradient of the same size
    return bytes / d.memory_bytes * 1e6;
  }
  bool memory_binds(const Device& d) const { return memory_us(d) > matrix_us(d); }
  double share_of_peak(const Device& d) const {
    return std::max(memory_us(d), matrix_us(d)) / timing.graph_us;
  }
};

string knob_texts(bool changed_only) {
  string text;
  for (const Knob* k = line.knobs; k < line.knobs + line.knob_count; k++) {
    if (changed_only && !k->changed) continue;
    const string quote = strpbrk(k->value, " ()[]<>*&|?!'\"") ? "'" : "";  // for expressions
    text += (text.empty() ? "" : " ") + string(k->name) + "=" + quote + k->value + quote;
  }
  return text;
}

struct Column {
  const char* name;
  string value;
};

// The columns of a CSV row. New columns are added at the end.
vector<Column> columns(const Run& r, const Device& d) {
  const Problem& p = r.problem;
  const Timing& t = r.timing;
  const Figures& f = r.figures;
  const bool on_gpu = r.resources.regs > 0,
             has_peak = r.timed() && d.matrix_flops > 0 && d.memory_bytes > 0;
  const auto us = [&](double x) { return r.timed() ? format("%.3f", x) : ""; };
  const auto error = [&](double x) { return r.check.empty() ? "" : format("%.3g", x); };
  const auto rows = [&](long n) { return r.check.empty() ? "" : to_string(n); };
  const auto of_gpu = [&](int x) { return on_gpu ? to_string(x) : ""; };
  string seeds;
  for (uint64_t seed : r.seeds) seeds += (seeds.empty() ? "" : "+") + to_string(seed);
  // clang-format off
  return {
      {"config", line.name}, {"family", line.family}, {"shape", p.shape}, {"status", r.status},
      {"check", r.check}, {"p50_us", us(t.p50_us)}, {"p90_us", us(t.p90_us)}, {"p99_us", us(t.p99_us)},
      {"min_us", us(t.min_us)}, {"graph_us", us(t.graph_us)}, {"cold_us", us(t.cold_us)},
      {"tflops", r.timed() ? format("%.2f", r.tflops()) : ""}, {"rel_rms", error(f.rel_rms)},
      {"max_abs_err", error(f.max_abs_err)}, {"rows_checked", rows(f.rows_checked)},
      {"B", to_string(p.B)}, {"Hq", to_string(p.Hq)}, {"Hkv", to_string(p.Hkv)},
      {"Sq", to_string(p.Sq)}, {"Sk", to_string(p.Sk)}, {"D", to_string(p.D)}, {"dtype", dtype},
      {"causal", causal_names[int(p.mask)]}, {"seed", seeds}, {"regs", of_gpu(r.resources.regs)},
      {"spill_bytes", of_gpu(r.resources.spill_bytes)},
      {"smem_bytes", to_string(r.kernel.shared_bytes)},
      {"ctas_per_sm", of_gpu(r.resources.ctas_per_sm)},
      {"barriers_per_tile", to_string(line.barriers_per_tile)}, {"device", d.name}, {"sm", d.sm},
      {"clock_mhz", r.timed() ? format("%.0f", t.clock_mhz) : ""},
      {"cuda", has_clock ? format("%d.%d", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10) : ""},
      {"driver", d.driver}, {"git_sha", sdpa_git_sha ? sdpa_git_sha() : "unknown"},
      {"knobs", knob_texts(false)}, {"note", r.note}, {"layout", p.layout}, {"dist", p.dist},
      {"lse_err", error(f.lse_err)}, {"graph_lo_us", us(t.graph_lo_us)},
      {"graph_hi_us", us(t.graph_hi_us)}, {"max_ctas", to_string(p.max_ctas)},
      {"rows_witnessed", rows(f.rows_witnessed)},
      {"peak_share", has_peak ? format("%.3f", r.share_of_peak(d)) : ""},
      {"bound", has_peak ? r.memory_binds(d) ? "memory" : "matrix" : ""},
      {"window", window_text(p, ":")},
      {"out_dtype", output_type.name}, {"softcap", p.softcap != 0 ? format("%.9g", p.softcap) : ""},
      {"sinks", p.has_sinks ? "1" : ""}, {"lengths", p.has_q_lengths ? p.has_lengths ? "kq" : "q" : p.has_lengths ? "1" : ""},
      {"packed", packed_text(p)}, {"pages", p.page_size ? to_string(p.page_size) : ""}, {"bias", bias_text(p)},
      {"batch_invariant", p.batch_invariant ? "1" : ""}, {"key_mask", p.key_mask_kind}, {"pass", line.pass()}};
  // clang-format on
}

// Escapes a CSV cell: newlines become spaces, and cells with commas or quotes are quoted.
string csv_cell(string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  if (text.find_first_of(",\"") == string::npos) return text;
  for (size_t at = 0; (at = text.find('"', at)) != string::npos; at += 2) text.insert(at, "\"");
  return '"' + text + '"';
}

void print_csv(const vector<Column>& columns, bool header) {
  string text;
  for (const Column& c : columns)
    text += (text.empty() ? "" : ",") + csv_cell(header ? c.name : c.value);
  puts(text.c_str());
  fflush(stdout);  // so that a later crash does not lose this row
}

// The text that is printed if stdout is a terminal.
void print_block(const Run& r, const Device& d, const vector<Option>& options) {
  const Problem& p = r.problem;
  const Figures& f = r.figures;
  const reference::Tolerance tol = tolerance_of(p);
  const string changed = knob_texts(true);
  fprintf(stderr, "sdpa_%s (%s%s) on %s\n", line.name, line.family,
          line.backward ? ", backward" : "", d.name.c_str());
  fprintf(stderr, "  problem  %s: B=%d Hq=%d Hkv=%d Sq=%d Sk=%d D=%d %s%s\n", p.shape.c_str(), p.B,
          p.Hq, p.Hkv, p.Sq, p.Sk, p.D, dtype.c_str(), words_of(options, p, ", ").c_str());
  fprintf(stderr, "  knobs    %s\n", changed.empty() ? "all at their defaults" : changed.c_str());
  if (r.exit == exit_pass && !r.note.empty()) fprintf(stderr, "  note     %s\n", r.note.c_str());
  if (!r.check.empty()) {
    fprintf(stderr,
            "  check    %s: %ld rows with the CPU reference, %ld with the reference kernel\n",
            r.check.c_str(), f.rows_checked, f.rows_witnessed);
    fprintf(stderr, "           rel_rms %.2g (limit %.2g), max_abs_err %.2g", f.rel_rms,
            f.rel_rms_limit, f.max_abs_err);
    if (!line.backward)
      fprintf(stderr, " (%.2g), lse_err %.2g (%.2g)", tol.max_abs, f.lse_err, tol.lse);
    fprintf(stderr, "\n");
  }
  if (!r.timed()) return;
  fprintf(stderr, "  time     %.2f us per launch (median), %.2f us in a graph\n", r.timing.p50_us,
          r.timing.graph_us);
  fprintf(stderr, "  speed    %.1f TFLOP/s", r.tflops());
  if (d.matrix_flops > 0 && d.memory_bytes > 0) {
    fprintf(stderr, ", %.1f%% of what the %s allows (%.0f TFLOP/s, %.2f TB/s)",
            100 * r.share_of_peak(d), r.memory_binds(d) ? "memory" : "matrix units",
            d.matrix_flops * 1e-12, d.memory_bytes * 1e-12);
  }
  fprintf(stderr, "\n");
}

void print_config(const Device& d) {
  printf("config %s, family %s\n", line.name, line.family);
  for (const Knob* k = line.knobs; k < line.knobs + line.knob_count; k++) {
    printf("  %-24s %-6s %-12s %s\n", k->name, k->value, k->changed ? "" : "(default)", k->meaning);
  }
  const string changed = knob_texts(true);
  printf("changed: %s\n",
         changed.empty() ? "nothing, all knobs are at their defaults" : changed.c_str());
  const KernelFacts k = line.facts_of({});
  printf("threads %d, shared memory %zu bytes, %d CTA barriers per K/V tile\n", k.threads,
         k.shared_bytes, line.barriers_per_tile);
  if (!d.missing.empty()) printf("here: %s\n", d.missing.c_str());
  if (!has_clock || !d.missing.empty()) return;
  const Resources r = resources_of(k);
  printf("on %s: %d registers, %d bytes spilled, %d CTAs per SM\n", d.name.c_str(), r.regs,
         r.spill_bytes, r.ctas_per_sm);
}

}  // namespace
}  // namespace SDPA_NAMESPACE
