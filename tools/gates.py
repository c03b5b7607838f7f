"""usage: ./run_all.sh gates [--only REGEX] [--time | --steps CSV]
Compiles the kernels of all lines for sm_80, sm_89 and sm_90a (or SDPA_ARCHS), some also for sm_120, and checks
their limits of spills, registers and shared memory, warnings about serialized wgmma, lines with the machine code
and launch of another line, and speed-up claims, using measured times. Needs nvcc but no GPU.
  --only REGEX   only lines whose names match
  --time         first time the claims on this machine's GPU, into results/ladder/DATE-DEVICE-claims.csv
  --steps CSV    the times for gate:step-over (default: the newest claims of results/ladder)
Gates in configs.txt: gate:regs<=N  gate:smem<=BYTES  gate:spill<=BYTES:WHY  gate:also=ARCH
  gate:step-over=NAME:FACTOR[@SHAPE]
exit: 0 no gate failed, 1 one did, 2 bad usage or a missing tool
"""
import os
import re
from dataclasses import dataclass
from pathlib import Path

import builds
import cli
import engine
import report_rows
from cli import Refused, say

STEP_COLUMNS = "line over shape speed_up low high pairs thrown_out line_us over_us device driver git_sha".split()


@dataclass(frozen=True)
class Found:
    """A gate of a line, and the result."""
    line: str
    gate: str
    wanted: str
    found: str
    verdict: str

    def __str__(self):
        return f"{self.line:<24} {self.gate:<28} {self.wanted:<16} {self.found:<28} {self.verdict}"


def judge(kernels, rows):
    """Yields the results of all gates. kernels: from compiled(); rows: from time_claims(), or None."""
    owners = {}
    for name, (gates, facts) in kernels.items():
        if isinstance(facts, str):
            yield Found(name, "compiles", "yes", "no: " + facts, "FAIL")
        elif not facts.registers:
            yield Found(name, "ptxas report", "one", "none", "FAIL")
        else:
            yield from judge_resources(name, gates, facts)
            if facts.wgmma:
                yield Found(name, "wgmma as written", "yes", "no: " + " ".join(facts.wgmma), "FAIL")
            owner = owners.setdefault((facts.code, facts.threads, facts.shared_bytes, facts.block_m), name)
            if owner != name:
                yield Found(name, "duplicate", "its own code", f"all of {owner}'s", "FAIL")
            yield from judge_claims(name, gates, rows)


def judge_resources(name, gates, facts):
    own = dict(gate[5:].split("<=", 1) for gate in gates if "<=" in gate)
    spill, _, why = own.get("spill", "0").partition(":")
    # Registers are allocated per warp in units of 256, so per thread in multiples of 8.
    registers = min(65536 // facts.threads // 8 * 8, 255)
    has_less = any(arch.startswith(("8", "12")) for arch in facts.archs)  # sm_89, sm_120
    shared = (99 if has_less else 227) * 1024
    for gate, limit, found, reason in (("bytes spilled", spill, facts.spilled, f" ({why})" if why else ""),
                                       ("registers", own.get("regs", registers), facts.registers, ""),
                                       ("shared bytes", own.get("smem", shared), facts.shared_bytes, "")):
        yield Found(name, gate, f"<= {limit}", f"{found}{reason}", "ok" if found <= int(limit) else "FAIL")


def judge_claims(name, gates, rows):
    for other, factor, shape in parse_claims(gates):
        gate = f"over {other}" + (f" at {shape}" if shape else "")
        fitting = [row for row in rows or ()
                   if (row["line"], row["over"]) == (name, other) and shape in ("", row["shape"])]
        for row in fitting:
            low, high = float(row["low"]), float(row["high"])
            verdict = "ok" if low >= float(factor) else "FAIL" if high < float(factor) else "UNCLEAR"
            yield Found(name, gate, f">= {factor}", f"{row['low']} to {row['high']}", verdict)
        if not fitting:
            yield Found(name, gate, f">= {factor}", "not timed" + ": gates --time" * (rows is None), "UNCLEAR")


# ---- speed-up claims, gate:step-over=NAME:FACTOR[@SHAPE]: both lines are timed in turns ----

def parse_claims(gates):
    """(other line, FACTOR, SHAPE or "") of each claim among a line's gates."""
    return re.findall(r"gate:step-over=(\w+):([\d.]+)(?:@(\w+))?", " ".join(gates))


def claims(only):
    """(line, other line, shape) of each claim of the lines whose names match."""
    for line in builds.lines_named(only):
        for other, _, shape in parse_claims(line.gates):
            yield from ((line.name, other, one) for one in ([shape] if shape else ["mission", "long"]))


def time_claim(gpu, kernels, shape):
    """The row of two lines at a shape; None if either is wrong."""
    line = kernels["line"].line
    problem = engine.parse_problem(shape).typed(line.D, line.dtype, line.Dv)
    bench = engine.Bench(gpu, kernels, dict.fromkeys(kernels, problem))
    row = None
    if len(bench.fit_to_time()) == 2:
        series, found = engine.compare(gpu, bench.graphs)
        v = found["line"]
        row = dict(line=line.name, over=kernels["over"].line.name, shape=shape, speed_up=f"{1 / v.ratio:.4f}",
                   low=f"{1 / v.high:.4f}", high=f"{1 / v.low:.4f}", pairs=v.pairs, thrown_out=v.thrown_out,
                   line_us=f"{series.us('line'):.3f}", over_us=f"{series.us('over'):.3f}", **engine.measured_on(gpu))
    bench.close()
    return row


def time_claims(only):
    """Times the claims of the lines whose names match. Returns the path of the rows."""
    gpu = engine.need_gpu("; without --time the newest times of results/ladder are used")
    wanted = list(claims(only))
    names = list(dict.fromkeys(name for line, other, _ in wanted for name in (other, line)))
    lines = {line.name: line for line in builds.parse_contenders(names) if line.runs_on(gpu.arch)}
    built = builds.build(lines.values(), gpu.arch)
    loaded = {name: engine.load(line, gpu, built) for name, line in lines.items()}
    table = engine.Table(engine.results_path("ladder", gpu.name, "claims", new=True), STEP_COLUMNS)
    for name, other, shape in wanted:
        if name in loaded and other in loaded:
            if row := time_claim(gpu, {"over": loaded[other], "line": loaded[name]}, shape):
                table.add(**row)
            else:
                say(f"gates: {name} over {other} at {shape}: one of them is wrong, so neither is timed")
    return os.path.join(builds.ROOT, table.name)


# ---- the command ----

def report(found):
    """Prints the table. Returns the exit code."""
    found = list(found)
    print(f"{'line':<24} {'gate':<28} {'wanted':<16} found", *found, sep="\n")
    failed, names = any(one.verdict == "FAIL" for one in found), {one.line.split()[0] for one in found}
    print(f"{len(names)} lines, {'A GATE FAILED' if failed else 'no gate failed'}")
    return 1 if failed or not names else 0


def compiled(lines, archs):
    """{name: (gates, builds.Facts or the reason why it does not compile)}. Lines with gate:also=ARCH also have an entry "NAME
    sm_ARCH", since machine code can be compared only if lines are compiled for the same architectures."""
    kernels = {}
    for also, some in (("", lines), *also_for(lines).items()):
        if also and f"compute_{also}" not in builds.run([builds.nvcc(), "--list-gpu-arch"]).stdout.split():
            say(f"sm_{also} is skipped: this nvcc does not support it")
            continue
        built = builds.build(some, *([also] if also else archs), kind="-fatbin", progress=builds.show_progress())
        for line, one in built.items():
            own = [gate for gate in line.gates if "<=" in gate or not also]
            kernels[line.name + f" sm_{also}" * bool(also)] = (own, one.trouble or builds.facts(one))
    return kernels


def also_for(lines):
    """{ARCH: lines with gate:also=ARCH}."""
    words = sorted({gate for line in lines for gate in line.gates if gate.startswith("gate:also=")})
    return {word[10:]: [line for line in lines if word in line.gates] for word in words}


def main():
    options = cli.parse_options(__doc__)
    if options.steps and not os.path.exists(options.steps):
        raise Refused(f"{options.steps}: no such file")
    lines = builds.lines_named(options.only or "")
    has_bad_lines = builds.has_bad_lines()
    newest = max(Path(builds.ROOT, "results", "ladder").glob("*-claims*.csv"), key=report_rows.by_name, default=None)
    path = options.steps or (time_claims(options.only or "") if options.time else newest)
    rows = None
    if path:
        rows = report_rows.read(Path(path), ["claims"]).rows
        say(f"speed claims are judged by {os.path.relpath(path)}")
    kernels = compiled(lines, re.findall(r"\d+a?", os.environ.get("SDPA_ARCHS", "")) or ["80", "89", "90a"])
    return report(judge(kernels, rows)) or has_bad_lines
