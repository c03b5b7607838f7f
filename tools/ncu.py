"""usage: ./run_all.sh profile NAME [KNOB=VALUE...] [--shape S] [-- EXECUTABLE-OPTION...]
Profiles the kernel of the line NAME with ncu (Nsight Compute) and prints the relevant counters, what limits the
kernel, and how close it is to that limit.
  --shape S   the problem (default long)
exit: 0, 1 the kernel gives wrong results, 2 bad usage, no ncu, or no permission to read the counters
"""
import csv
import re
import shutil
import sys
from collections import defaultdict

import builds
import cli
import engine
from cli import Refused
from report_rows import FULL

STALLS = """barrier branch_resolving dispatch_stall drain gmma imc_miss lg_throttle long_scoreboard math_pipe_throttle
membar mio_throttle no_instruction not_selected selected short_scoreboard sleeping wait""".split()
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
OF_PEAK = ".pct_of_peak_sustained_elapsed"
WAVES = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
UNITS = {"tensor pipe": "sm__pipe_tensor_cycles_active.avg" + OF_PEAK,
         "XU (MUFU)": "sm__inst_executed_pipe_xu.avg" + OF_PEAK,
         "FMA pipes": "sm__pipe_fma_cycles_active.avg" + OF_PEAK,
         "ALU": "sm__pipe_alu_cycles_active.avg" + OF_PEAK,
         "issue slots": "smsp__issue_active.avg.pct_of_peak_sustained_active",
         "shared memory": WAVES + OF_PEAK,
         "L2": "lts__throughput.avg" + OF_PEAK,
         "DRAM": "gpu__dram_throughput.avg" + OF_PEAK}
METRICS = [*UNITS.values(), *map(STALLED.format, STALLS), WAVES, "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
           "gpu__time_duration.sum", "sm__cycles_elapsed.avg.per_second", "lts__t_bytes.sum", "dram__bytes_read.sum",
           "dram__bytes_write.sum", "sm__warps_active.avg.per_cycle_active"]
# mma.sync cannot saturate Hopper's tensor pipe: it reaches 2640 of wgmma's 4096 FLOP per cycle and SM (6.2 cycles per
# m16n8k16 and scheduler, measured with independent instructions).
MMA_SYNC_REACH = 2640 / 4096


def launches_of(text):
    """[{name: value}] from the output of `ncu --csv --page raw`: messages, then names, units, and a line per launch."""
    rows = list(csv.reader(text[text.index('"ID"'):].splitlines())) if '"ID"' in text else []
    if len(rows) < 3:
        raise ValueError("no counters")
    return [defaultdict(float, {name: float(value.replace(",", "")) for name, value in zip(rows[0], row)
                                if re.fullmatch(r"[\d,]+(\.\d+)?", value)}) for row in rows[2:]]


def command_of(*words):
    """The command line of ncu, with the counters and more arguments."""
    return ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base", "--metrics",
            ",".join(METRICS), *words]


def judge_words(said):
    """Refuses if only an administrator may read the counters."""
    if "ERR_NVGPUCTRPERM" in said:
        raise Refused("this user may not read the GPU's counters (ERR_NVGPUCTRPERM): run as root, or load the driver "
                      "with NVreg_RestrictProfilingToAdminUsers=0")


def held_against_mma_sync(row):
    """True if the kernel of a row uses mma.sync on Hopper."""
    return row["sm"].startswith("9") and row["family"] in ("mma", "wmma")


def bound_of(row, counters):
    """The busiest unit, its utilization in %, and [(stall reason, %)], largest first."""
    use = {unit: counters[name] for unit, name in UNITS.items()}
    use["tensor pipe"] /= MMA_SYNC_REACH if held_against_mma_sync(row) else 1
    busiest = max(use, key=use.get)
    stalls = {reason: counters[STALLED.format(reason)] for reason in STALLS}
    total = sum(stalls.values()) or 1
    return busiest, use[busiest], [(reason, 100 * stalls[reason] / total) for reason in
                                   sorted(stalls, key=stalls.get, reverse=True) if reason != "selected"]


def verdict(row, counters):
    """The report. row: the CSV row of the executable."""
    B, Hq, Hkv, Sq, Sk, D = (int(row[name]) for name in ("B", "Hq", "Hkv", "Sq", "Sk", "D"))
    tensors = 2 * 2 * D * B * (Hq * Sq + Hkv * Sk) + 4 * B * Hq * Sq  # bytes: Q and O, K and V, LSE
    l2, moved = counters["lts__t_bytes.sum"], counters["dram__bytes_read.sum"] + counters["dram__bytes_write.sum"]
    conflicts = counters["l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"] / (counters[WAVES] or 1)
    busy = {unit: counters[name] for unit, name in UNITS.items()}
    of_reach = (f"{busy['tensor pipe'] / MMA_SYNC_REACH:.0f}% of what mma.sync can reach on Hopper "
                f"({100 * MMA_SYNC_REACH:.1f}%)")
    busiest, use, stalls = bound_of(row, counters)
    waits = [f"{reason} {share:.0f}%" for reason, share in stalls[:3]]
    bound = f"{busiest}, at {use:.0f}% of its limit"
    if use < FULL:
        bound = f"latency: the busiest unit is the {bound.replace(',', '')}; warps wait for {waits[0]}"
    units = {"tensor pipe": of_reach if held_against_mma_sync(row) else "",
             "XU (MUFU)": "", "FMA pipes": f"{busy['ALU']:.1f}%",
             "issue slots": f"{counters['sm__warps_active.avg.per_cycle_active']:.1f} warps on an SM",
             "shared memory": f"{100 * conflicts:.1f}% of its wavefronts are bank conflicts",
             "L2": f"{l2 / 1e6:.1f} MB, {l2 / tensors:.1f} times the tensors",
             "DRAM": f"{moved / 1e6:.1f} MB, {moved / tensors:.2f} of the {tensors / 1e6:.1f} MB of the tensors"}
    mask = "".join(f" {name} {row[name]}" for name in ("causal", "window") if row.get(name, "") not in ("", "off"))
    return [f"{row['config']} at {row['shape']}{mask} on "
            f"{row['device']}: {counters['gpu__time_duration.sum'] / 1e3:.2f} us under ncu, "
            f"SM at {counters['sm__cycles_elapsed.avg.per_second'] / 1e6:.0f} MHz",
            *(f"  {'FMA, ALU' if unit == 'FMA pipes' else unit:<15}{busy[unit]:5.1f}%  {words}"
              for unit, words in units.items()),
            f"  {'warps wait for':<23}{', '.join(waits)}",
            f"  {'gates':<23}tensor pipe >= 50%: {'yes' if busy['tensor pipe'] >= 50 else 'no'}; "
            f"DRAM < 50%: {'yes' if busy['DRAM'] < 50 else 'no'}",
            f"  {'bound by':<23}{bound}"]


def main():
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = cli.parse_options(__doc__, cli.MOST, sys.argv[1:split])
    lines = builds.parse_contenders(options.words)
    if len(lines) != 1 or isinstance(lines[0], builds.Torch):
        raise Refused("one line at a time" if lines else "which line?")
    line, = lines
    if line.family == "cublas":
        raise Refused(f"{line.text} runs three kernels, two of them cuBLAS's; use ncu itself")
    engine.parse_problem(options.shape)
    gpu = engine.need_gpu("; run it on a machine with one (check without times: ./run_all.sh --cpu)")
    if not shutil.which("ncu"):
        raise Refused("ncu is missing; add the folder of Nsight Compute (part of the CUDA Toolkit) to PATH")
    built = builds.build(lines, gpu.arch, program="sdpa.cu", kind="")[line]
    if built.trouble:
        raise Refused(f"{line.text}: {built.trouble}")
    command = [built.path, "--check-only", "--shape", options.shape, *sys.argv[split + 1:]]
    checked = builds.run([*command, "--header"])
    if checked.returncode == 1:
        raise Refused(f"{line.text} gives wrong results, so there is nothing to profile", 1)
    if checked.returncode:
        raise Refused(f"{line.text} does not run on this problem: {checked.stderr.strip()}")
    # Profile the second launch, since L2 is cold in the first one.
    done = builds.run(command_of("--kernel-name", "regex:sdpa_", "--launch-skip", "1", "--launch-count", "1", *command))
    said = done.stdout + done.stderr
    judge_words(said)
    try:
        counters = launches_of(done.stdout)[0]
    except ValueError:
        report = f"{builds.BUILD}/ncu.csv"
        builds.replace_file(report, said)
        words = "".join(re.findall("^==.*", said, re.MULTILINE)[-1:])
        raise Refused(f"ncu printed no counters: {words} (its output: {report})") from None
    print("\n".join(verdict(next(csv.DictReader(checked.stdout.splitlines())), counters)))
