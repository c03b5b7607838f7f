"""usage: ./run_all.sh ab NAME KNOB=VALUE...       [OPTION...]
       ./run_all.sh ab CONTENDER CONTENDER...   [OPTION...]
Is B faster than A? A is the line NAME of configs.txt, and B is the same line with other knobs; or A is the
first contender, and each of the others is compared with it. A contender is
  NAME [KNOB=VALUE...]          a line of configs.txt; SCORE_MOD and MASK_MOD take an expression, as in
                                SCORE_MOD='s - x0[h] * real(q - k)'
  COMMIT:NAME [KNOB=VALUE...]   the line in another commit, as in main~20:hopper
  torch:cudnn                   a kernel of PyTorch: cudnn, flash, efficient or math; or an installed package:
                                torch:fa3, torch:fa3_tokenspeed, torch:fa4 (FlashAttention-3 and -4), flashinfer
  cublas [DTYPE=BF16]           the unfused baseline: both products by cuBLAS, S and P in global memory
First both are checked. Then they are timed in turns in one process until a 99% interval of the ratio decides: FASTER
or SLOWER (entirely beyond 0.3% and 30 ns), SAME (entirely within 0.5% or 30 ns), or UNCLEAR if the time is up or the
GPU is shared. Without a GPU: checks on the CPU backend and prints the compiler's report, without timing.
  --shape S           the problem: a name of ./run_all.sh --help or B,Hq,Hkv,Sq,Sk[,D[,DTYPE[,CAUSAL[,LEFT]]]], where
                      LEFT is the left window size; repeatable; default mission and long, without a GPU small and
                      mission
  --b-shape S         B's problem, if it differs from A's (as many as --shape); repeatable
  --causal off|br|tl  (default off)
  --sustained         turns of 0.3 s instead of 10 ms. At the power limit, short turns run at a common clock and
                      compare cycles; in long turns, each contender runs at the clock that its own power allows
  --budget N          maximum seconds of timing per problem; default 7.5 per contender, 60 if sustained
Samples and verdicts are appended to results/ab/DATE-DEVICE-samples.csv and results/ab/DATE-DEVICE-verdicts.csv,
sustained ones to separate files.
exit: 0 for any verdict, 1 a contender fails its check, 2 bad usage, 3 a contender could not be run, 130 Ctrl-C
"""
import datetime
import os
import string
import sys

import builds
import cli
import engine
from cli import Refused, say


def parse(argv, default_shapes):
    """Returns the contenders, [(problem of A, problem of the others)], the pace, and the budget in seconds or None."""
    options = cli.parse_options(__doc__, cli.MOST, argv)
    contenders = builds.parse_contenders(options.words)
    if len(contenders) == 1 and getattr(contenders[0], "changes", ()):
        contenders.insert(0, builds.Line(contenders[0].tree, contenders[0].name))
    if len(contenders) < 2:
        raise Refused("give a line and at least one KNOB=VALUE, or two contenders")
    shapes = options.shape or default_shapes
    b_shapes = options.b_shape or shapes
    if len(b_shapes) != len(shapes):
        raise Refused("give as many --b-shape as --shape")
    passes = {isinstance(line, builds.Line) and line.is_backward: line.text for line in contenders}
    if len(passes) > 1:
        raise Refused(f"{passes[True]} computes gradients, and {passes[False]} does not")
    kinds = {(line.D, line.dtype, line.Dv): line for line in contenders if line.D}
    takes_fewer = all(line.takes_fewer for line in contenders)  # accept a D below their own, so theirs may differ
    if len({kind[takes_fewer:] for kind in kinds}) > 1:
        raise Refused("the contenders do not compute the same: " + ", ".join(
            f"{line.text} has D={D}{f',{Dv}' if Dv else ''} {dtype}" for (D, dtype, Dv), line in kinds.items()))
    kind = min(kinds, default=(64, "fp16"))
    problems = [[engine.parse_problem(text, options.causal).typed(*kind, takes_fewer) for text in pair]
                for pair in zip(shapes, b_shapes)]
    return contenders, problems, engine.SUSTAINED if options.sustained else engine.PACE, options.budget


# ---- what else changed ----

def print_facts(facts):
    """Prints the compiler's report, one row per contender; * marks values that differ from A's."""
    rows = {key: {"registers": f.registers, "spilled": f.spilled, "shared bytes": f.shared_bytes,
                  **f.mix, "code bytes": f.code_bytes} for key, f in facts.items()}
    if not rows:
        return
    first = next(iter(rows.values()))
    print("  ".join([" " * 10] + [f"{name:>{len(name) + 1}}" for name in first]))
    for key, row in rows.items():
        print("  ".join([f"{key:<10}"] + [
            f"{row.get(name, ''):>{len(name)}}" + " *"[row.get(name) != value] for name, value in first.items()]))
    if any(row != first for row in rows.values()):
        print("* differs from A")
    if "instructions" not in first:
        print("(no instruction mix: cuobjdump is missing)")


def drop_equal(contenders, facts):
    """The keys to time: of identical lines, only the first."""
    seen = {}
    for key, contender in contenders.items():
        same = seen.setdefault(facts[key].same if key in facts else key, key)
        if same != key:
            print(f"{same} and {key} have identical machine code and launch code: {key} is not timed.")
    return list(seen.values())


# ---- with a GPU ----

def time_problem(gpu, kernels, problems, pace, budget, samples, verdicts):
    """Checks and times the contenders at one problem and prints the verdicts. Returns {key: Verdict} of all but A."""
    bench, names = engine.Bench(gpu, kernels, problems), {key: kernel.text for key, kernel in kernels.items()}
    for key, sentence in bench.trouble().items():
        if key in bench.skipped:
            raise Refused(f"{key} ({names[key]}) cannot compute {problems[key]}: {sentence}", 3)
        raise Refused(f"{key} ({names[key]}) gives wrong results at {problems[key]}, so it is not timed: {sentence}", 1)
    series, found = engine.compare(gpu, bench.graphs, samples.recorder(names, problems["A"]), budget, pace=pace)
    for key in filter(bench.changed_bits, kernels):
        raise Refused(f"{key} ({names[key]}): the result of its last replay at {problems[key]} differs from the checked "
                      "one, so it is not timed", 1)
    width = max(map(len, names.values()))
    print(f"\n{problems['A']} on {gpu.name}")
    for key, name in names.items():
        low, high = series.interval(key)
        shape = "" if problems[key] == problems["A"] else f"  at {problems[key]}"
        print(f"  {key}  {name:<{width}}  PASS  {series.us(key):10.3f} us [{low:.3f}, {high:.3f}]  "
              f"{series.clock(key):.0f} MHz{shape}")
    for key, verdict in found.items():
        verdicts.add(comparison=samples.comparison, **engine.verdict_row(bench, series, "A", key, verdict))
        print("  " + sentence_of(key, verdict))
    if pace is engine.PACE and series.at_power_limit():
        print("  At the power limit, all ran at a common clock. With --sustained, each runs at the clock that its power allows.")
    bench.close()
    return found


def sentence_of(key, v):
    """The verdict as a sentence."""
    counts = f"{v.pairs} pairs, {v.thrown_out} discarded as disturbed"
    if not v.ratio > 0:
        return f"{key} against A is UNCLEAR: too few pairs ({counts})."
    interval = f"99% interval {100 * v.low - 100:+.2f}% to {100 * v.high - 100:+.2f}%; {counts}"
    verdict = "the SAME" if v.verdict == "SAME" else v.verdict
    return f"{key} is {verdict}: {100 * v.ratio - 100:+.2f}% of A's time ({interval})."


def with_gpu(gpu, contenders, problems, pace, budget):
    """Compares the contenders at all problems and yields {key: Verdict} of each."""
    keys = dict(zip(string.ascii_uppercase, contenders))
    lines = {key: line for key, line in keys.items() if isinstance(line, builds.Line)}
    built = builds.build(lines.values(), gpu.arch)
    kernels = {key: engine.load(contender, gpu, built) for key, contender in keys.items()}
    facts = {key: builds.facts(built[line]) for key, line in lines.items()}
    print_names(keys)
    print_facts(facts)
    kind = "sustained-" if pace is engine.SUSTAINED else ""
    samples = engine.Samples(engine.results_path("ab", gpu.name, kind + "samples"),
                             f"{datetime.datetime.now():%H%M%S}-{os.getpid()}")
    verdicts = engine.Table(engine.results_path("ab", gpu.name, kind + "verdicts"), engine.VERDICT_COLUMNS)
    found = {}
    try:
        for a, b in problems:
            chosen = drop_equal(keys, facts) if a == b else list(keys)
            if len(chosen) > 1:
                own = {key: a if key == "A" else b for key in chosen}
                found[a] = time_problem(gpu, {key: kernels[key] for key in own}, own, pace, budget, samples, verdicts)
    except engine.CudaError as error:
        raise Refused(f"{error}; earlier samples are in {samples.name}", 3)
    except KeyboardInterrupt:
        raise Refused(f"stopped; earlier samples are in {samples.name}", 130)
    say(f"samples: {samples.name}")
    return found


def print_names(keys):
    print(*(f"{key}  {contender.text}" for key, contender in keys.items()), sep="\n")


# ---- without a GPU ----

def without_gpu(contenders, problems):
    """Prints the compiler's report and checks the contenders on the CPU backend."""
    say("There is no GPU here: no times. The check runs on the CPU backend.")
    keys = dict(zip(string.ascii_uppercase, contenders))
    print_names(keys)
    lines = {key: line for key, line in keys.items() if type(line) is builds.Line}
    for key in keys.keys() - lines.keys():
        say(f"{key} ({keys[key].text}) is not checked: it needs a GPU.")
    if builds.nvcc():
        built = builds.build(lines.values(), "90a")
        for one in built.values():
            if one.trouble:
                raise Refused(f"{one.line.text} does not compile: {one.trouble}")
        facts = {key: builds.facts(built[line]) for key, line in lines.items()}
        print_facts(facts)
        drop_equal(lines, facts)
    else:
        say("nvcc is missing: no registers and no instruction counts.")
    executables = cpu_executables(dict.fromkeys(lines.values()))
    for a, b in problems:
        for key, line in lines.items():
            check_on_cpu(key, line, executables[line], a if key == "A" else b)


def cpu_executables(lines):
    """{line: its executable for the CPU backend}, built with the CMake files of its commit."""
    executables = {}
    for tree in {line.tree: None for line in lines}:
        own = [line for line in lines if line.tree is tree]
        folder = os.path.join(builds.BUILD, "cpu", tree.sha[:12] or "here")
        configs = os.path.join(folder, "configs.txt")
        os.makedirs(folder, exist_ok=True)
        builds.replace_file(configs, "".join(f"{line.target} {' '.join(line.words)}\n" for line in own))
        done = builds.cmake_build(folder, tree.folder(), SDPA_CPU="ON", SDPA_CONFIGS=configs)
        if done.returncode:
            raise Refused(f"{tree} does not build for the CPU backend: {builds.compiler_words(done.stdout)}")
        executables.update({line: os.path.join(folder, "sdpa_" + line.target) for line in own})
    return executables


def check_on_cpu(key, line, executable, problem):
    """Runs a line's check of a problem and prints the result."""
    sizes = f"{problem.B},{problem.Hq},{problem.Hkv},{problem.Sq},{problem.Sk}"
    window = ["--window", f"{problem.left},-1"] if problem.left >= 0 else []
    done = builds.run([executable, "--check-only", "--shape", sizes, "--causal", problem.causal, *window])
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[0]
        what, code = ("gives wrong results at", 1) if done.returncode == 1 else ("cannot compute", 3)
        raise Refused(f"{key} ({line.text}) {what} {problem} on the CPU backend: {words}", code)
    print(f"{key}  {problem}: PASS on the CPU backend")


def main():
    gpu = engine.find_gpu()
    contenders, problems, *course = parse(sys.argv[1:], ["mission", "long"] if gpu else ["small", "mission"])
    if gpu:
        with_gpu(gpu, contenders, problems, *course)
    else:
        without_gpu(contenders, problems)
