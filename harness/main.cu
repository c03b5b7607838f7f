// The harness: main() of an executable that checks and times a build of sdpa.cu. sdpa.cu includes
// this file unless SDPA_NO_MAIN is defined.
//
// For each problem it compares the results with reference.cpp and, in large problems, every row
// with a reference kernel, times the kernel, and prints a CSV row to stdout. Messages go to stderr.
//
// The harness accesses a build only through `Line`. So CMake compiles the harness once
// (SDPA_HARNESS_ONLY) and each line separately (SDPA_LINE_ONLY); `nvcc sdpa.cu` compiles both
// together. The headers of this folder use declarations of sdpa.cu, which precede them.
// tests/sweep.cu adds harder inputs, layouts and checks.
//
//   line.h build.h mods.h          the interface to a build
//   problem.h sizes.h tensors.h    problems; tensors in device memory
//   draw.h inputs.h                random inputs and their layouts
//   reference_kernel.h             a plain kernel that computes every row
//   accuracy.h check.h backward.h  tolerances; launching and checking a problem
//   timing.h device.h              timing; the GPU
//   options.h row.h                command-line options; CSV rows

#ifndef SDPA_CONFIG_NAME
#define SDPA_CONFIG_NAME custom
#endif

#include "line.h"
#ifndef SDPA_HARNESS_ONLY
#include "build.h"
#endif
#ifndef SDPA_LINE_ONLY

#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <string>
#include <vector>

#include "check.h"
#include "device.h"
#include "options.h"
#include "row.h"
#include "timing.h"

namespace SDPA_NAMESPACE {
namespace {

// The command-line options that reproduce a problem.
string command_of(const vector<Option>& options, const Problem& p) {
  const bool is_short = p.D != line.D || p.Dv != line.Dv;
  return format("--check-only --shape %d,%d,%d,%d,%d", p.B, p.Hq, p.Hkv, p.Sq, p.Sk) +
         (is_short ? format(",%d,%d", p.D, p.Dv) : "") +
         format(" --seeds %llu", (unsigned long long)p.seed) + words_of(options, p, " --");
}

// Checks and times a problem; stores the results in r.
void measure(Run& r, const Options& o) {
  Instance instance(r.problem);
  string trouble;
  for (uint64_t seed : r.seeds) {
    instance.set_inputs(r.problem.seed = seed);
    take_sequences(r.problem, instance.problem);
    trouble = instance.check(r.figures, o.repeats);
    if (!trouble.empty()) break;
  }
  if (trouble.empty() && has_clock && !o.check_only) {
    r.timing = time_kernel(instance, o.warmup, o.iterations);
    trouble = r.timing.trouble;
  }
  r.check = trouble.empty() ? "PASS" : "FAIL";
  if (!trouble.empty()) {
    r.note = trouble;
    r.exit = exit_wrong;
  }
}

// Runs a problem, prints its row and returns its exit code.
ExitCode run_problem(const Problem& p, const Options& o, const vector<Option>& options,
                     const Device& device) {
  Run r;
  r.problem = p;
  r.seeds = o.seeds.empty() ? vector<uint64_t>{p.seed} : o.seeds;
  const auto stop = [&](const char* status, const string& sentence, ExitCode exit) {
    r.status = status;
    r.note = sentence;
    r.exit = exit;
  };
  try {
    set_machine(p.machine);
    const SdpaParams sizes = params_of(p);
    r.kernel = line.facts_of(sizes);
    if (line.is_tuned) {
      const TunedTile t = line.tile_of(sizes);
      r.note = format("tile BLOCK_M=%d BLOCK_N=%d STAGES=%d SPLIT_KV=%d", t.block_m, t.block_n,
                      t.stages, t.split_kv);
    }
    if (!line.takes(p.D, p.Dv)) {
      stop("skipped", format("built with HEAD_DIM=%d and the shape has D=%d", line.D, p.D),
           exit_skipped);
    } else if (!device.missing.empty()) {
      stop("skipped", device.missing, exit_skipped);
    } else {
      if (has_clock) r.resources = resources_of(r.kernel);
      measure(r, o);
    }
  } catch (const TooLarge& error) {
    stop("skipped", error.text, exit_skipped);
  } catch (const CudaError& error) {
    stop("error", error.text, exit_cuda);
  } catch (const std::bad_alloc&) {
    stop("error", "the problem does not fit in this machine's memory", exit_cuda);
  }
  const bool is_terminal = isatty(STDOUT_FILENO);
  if (is_terminal) print_block(r, device, options);
  if (r.exit != exit_pass) {
    fprintf(stderr, "sdpa_%s: %s %s: %s\n", line.name,
            r.check == "FAIL" ? "FAIL" : r.status.c_str(), p.shape.c_str(), r.note.c_str());
  }
  if (r.exit == exit_wrong)
    fprintf(stderr, "repeat with: %s\n", command_of(options, r.problem).c_str());
  if (!is_terminal || o.header) print_csv(columns(r, device), false);
  return r.exit;
}

// Runs all problems. Sets o.passed.
ExitCode run(Options& o, const vector<Option>& options) {
  if (o.help) {
    print_help(options);
    return exit_pass;
  }
  if (o.header) print_csv(columns({}, {}), true);
  if (o.header && !o.shape_given && !o.config) return exit_pass;
  Device device;
  try {
    device = find_device();
  } catch (const CudaError& error) {
    device.missing = error.text;
  }
  if (o.config) {
    print_config(device);
    return exit_pass;
  }
  int counts[128] = {};
  for (const Problem& p : o.problems) {
    counts[run_problem(p, o, options, device)]++;
    if (ferror(stdout)) break;
  }
  o.passed = counts[exit_pass];
  for (ExitCode exit : {exit_wrong, exit_cuda, exit_pass}) {
    if (counts[exit]) return exit;
  }
  return exit_skipped;
}

int refuse(const string& sentence) {
  fprintf(stderr, "sdpa: %s\n", sentence.c_str());
  return exit_usage;
}

// Returns `exit`, or exit_cuda if stdout could not be written.
int finish(ExitCode exit) {
  if (fflush(stdout) == 0 && !ferror(stdout)) return exit;
  fprintf(stderr, "sdpa: stdout cannot be written to (%s), so rows are lost\n", strerror(errno));
  return exit_cuda;
}

}  // namespace
}  // namespace SDPA_NAMESPACE

int main(int argc, char** argv) {
  using namespace SDPA_NAMESPACE;
  signal(SIGPIPE, SIG_IGN);  // finish() reports a closed pipe as it reports a full disk
  Options o;
  const std::vector<Option> options = options_of(o);
  const std::string refusal = parse(options, {argv + 1, argv + argc}, o);
  return refusal.empty() ? finish(run(o, options)) : refuse(refusal);
}

#endif  // SDPA_LINE_ONLY
