"""usage: ./run_all.sh rungs [LADDER]... [--output FILE] [--launch]
Measures the steps of docs/LADDER.md: the time of each rung at the problems of its ladder, those of the forward
pass next to PyTorch's cuDNN and FlashAttention-2 and, if its wheel is installed, FlashAttention-3. If ncu may read the
GPU's counters, it then measures which unit limits each rung's kernel, in the backward pass the one that computes dK.
`./run_all.sh results` draws the page's tables and pictures from the rows.
  LADDER              scalar, wgmma, decode or backward (default: all of them)
  --output FILE       the CSV (default: results/ladder/DATE-DEVICE[-LADDER]-rungs.csv); must not exist
  --launch            only launch each rung at each problem; this is what ncu profiles
exit: 0, 2 bad usage, 3 a build could not be run

usage: ./run_all.sh ablate NAME [--shape S]... [--causal C] [--svg]
Measures what each knob of the line NAME of configs.txt contributes. It resets one knob at a time to its default
(together with others if it cannot be reset alone; HEAD_DIM and DTYPE stay), checks these builds, times them in turns
with the line, and prints the cost of each reset. The rows go to results/ablation/DATE-DEVICE-NAME.csv.
  --shape S           the problem, as for ab (the results show only its name or sizes); repeatable; default mission and
                      long
  --causal off|br|tl  (default off)
  --svg               also draw results/ablation/NAME.svg
exit: 0, 1 a build is wrong, 2 bad usage, 3 a build could not be run
"""
import functools
import itertools
import os
import re
import shutil
import sys

import builds
import cli
import engine
import ladders
import ncu
import peers
from cli import Refused, say
from search import PROBLEMS_OWN

COLUMNS = ("unit", "unit_share", "waits_for")
# No kernels that plan or merge; one kernel per launch of the backward pass.
KERNELS = "sdpa_(scalar|wmma|mma|wgmma|backward_kv|backward_wgmma)"


def load(gpu, built, lines):
    """({text of a line: its kernel}, {text of a line: its facts})."""
    return ({line.text: engine.load(line, gpu, built) for line in lines},
            {line.text: builds.facts(built[line]) for line in lines})


# ---- rungs ----

@functools.cache
def judged(text):
    """The line. Refuses an illegal combination of knobs."""
    return builds.parse_contenders(text.split())[0]


def wanted(names):
    """{(problem, is it the backward pass?): the lines to measure}, in the order of the ladders."""
    found = {}
    for one in map(ladders.LADDERS.get, names):
        for what in one.problems.values():
            lines = found.setdefault((engine.parse_problem(what.replace(" ", ",")), ladders.is_backward(one)), {})
            lines |= {line.text: judged(line.text) for rung in one.rungs if (line := ladders.contender(rung, what))}
    return {key: [*lines.values()] for key, lines in found.items()}


def launch_all(gpu, built, names):
    """Launches each line twice at each problem. Only the second launch, with a warm L2 cache, is profiled."""
    for (problem, _), lines in wanted(names).items():
        tensors = engine.Tensors(gpu, [problem])
        for line in lines:
            launch, _, workspace = engine.load(line, gpu, built).prepare(gpu, tensors, problem)
            gpu.fill(workspace[0], 0, workspace[1])
            launch()
            gpu.synchronize()
            gpu("cuProfilerStart")
            launch()
            gpu.synchronize()
            gpu("cuProfilerStop")
        tensors.free()


def profiled(names):
    """{(problem, label of a line): its counters}, from ncu profiling a process that launches all lines."""
    if not shutil.which("ncu"):
        raise Refused("ncu is missing; add the folder of Nsight Compute (part of the CUDA Toolkit) to PATH")
    done = builds.run(ncu.command_of("--profile-from-start", "off", "--kernel-name", f"regex:{KERNELS}", sys.executable,
                                     os.path.join(builds.ROOT, "tools"), "rungs", *names, "--launch"))
    ncu.judge_words(done.stdout + done.stderr)
    keys = [(problem, line.label) for (problem, _), lines in wanted(names).items() for line in lines]
    try:
        found = ncu.launches_of(done.stdout)
    except ValueError:
        found = []
    if len(found) != len(keys):
        words = "".join(re.findall("^==.*|^rungs: .*", done.stdout + done.stderr, re.MULTILINE)[-1:])
        raise Refused(f"ncu saw {len(found)} of {len(keys)} launches: {words}")
    return dict(zip(keys, found))


def peaks(gpu):
    """(peak FLOP/s of 16-bit products, peak bytes/s of the memory), from the table that the executables use; 0: unknown."""
    rates = re.search(r"rates\[\] = \{(\{.*?\})\};", builds.Tree().read("harness/device.h"), re.S)[1]
    flops = dict(re.findall(r"\{(\d+), (\d+)\}", rates)).get(gpu.arch.strip("a"), 0)
    clock, memory_clock, width, sms = map(gpu.attribute, (13, 36, 37, engine.SM_COUNT))  # kHz, kHz, bits
    return 1e3 * int(flops) * sms * clock, 2e3 * memory_clock * width / 8


def share(problem, us, flops, bytes_s, is_backward=False):
    """{peak_share, bound}: the lower bound of the time, by matrix products or by memory traffic, divided by us."""
    p = problem
    moved = 2 * p.D * p.B * 2 * (p.Hq * p.Sq + p.Hkv * p.Sk) * (2 if is_backward else 1)  # also the gradients
    least = {"matrix": flops and p.flops(is_backward) / flops, "memory": bytes_s and moved / bytes_s}
    bound = max(least, key=least.get)
    return dict(peak_share=f"{1e6 * least[bound] / us:.4f}", bound=bound)


def measure_rungs(options):
    names = options.words or [*ladders.LADDERS]
    for name in {*names} - {*ladders.LADDERS}:
        raise Refused(f"{name}: no such ladder; docs/LADDER.md has {', '.join(ladders.LADDERS)}")
    if options.output and os.path.exists(options.output):
        raise Refused(f"--output {options.output}: this file already exists")
    gpu = engine.need_gpu()
    lines = [line for of_problem in wanted(names).values() for line in of_problem]
    built = builds.build(lines, gpu.arch, progress=(lambda *_: None) if options.launch else builds.show_progress())
    if options.launch:
        return launch_all(gpu, built, names)
    kernels, facts = load(gpu, built, lines)
    others = {}
    for text in () if all(is_backward for _, is_backward in wanted(names)) else ("torch:cudnn", "torch:flash", "torch:fa3"):
        try:
            others[text] = engine.load(builds.Torch(text), gpu, {})
        except Refused as error:
            say(f"rungs: without {error}")
    path = options.output or engine.results_path("ladder", gpu.name, "-".join([*options.words, "rungs"]), new=True)
    columns, failed, (flops, bytes_s), found = [*engine.row_columns(), *COLUMNS], False, peaks(gpu), {}
    table = engine.Table(path, columns)
    for (problem, is_backward), of_problem in wanted(names).items():
        here = {line.text: kernels[line.text] for line in of_problem}
        beside = {} if is_backward else others
        here |= {text: kernel for text, kernel in beside.items() if text not in builds.PACKAGES}
        rows = [*peers.run_problem(gpu, here, problem, facts, engine.STEADY, 2)]
        in_bf16 = {text: kernel for text, kernel in beside.items() if text in builds.PACKAGES}  # these support only bf16
        rows += peers.run_problem(gpu, in_bf16, problem._replace(dtype="bf16"), {}, engine.STEADY, 2) if in_bf16 else []
        for row in rows:
            failed |= row.get("check") == "FAIL"
            if row.get("graph_us"):
                row |= share(problem, float(row["graph_us"]), flops, bytes_s, is_backward)
            found[problem, row["config"]] = row
            table.add(**row)
        say(f"rungs: {problem}{', backward,' * is_backward} done")
    try:  # profile last, after the times have been written, since it takes longest
        for key, counters in profiled(names).items():
            unit, use, stalls = ncu.bound_of(found[key], counters)
            found[key] |= dict(unit=unit, unit_share=f"{use:.1f}", waits_for=stalls[0][0])
        whole = engine.Table(path + ".whole", columns)
        for row in found.values():
            whole.add(**row)
        os.replace(path + ".whole", path)
    except Refused as error:
        say(f"rungs: no limiting units in the rows: {error}")
    say(f"rows: {table.name}; ./run_all.sh results draws the tables of docs/LADDER.md")
    return 1 if failed else 0


# ---- ablate ----

def removals(line):
    """For each knob that the line sets: (KNOB=DEFAULT, the changes that reset it or None, the reason why it cannot be
    reset alone). Tries to reset it together with the knobs that the reason suggests, then with one or two others."""
    defaults = {name: knob.default for name, knob in line.knob_rows().items()}
    back = [f"{knob}={defaults[knob]}" for knob, value in (word.split("=", 1) for word in line.words)
            if knob in defaults and knob not in (*PROBLEMS_OWN, "BACKWARD") and defaults[knob] != value]
    for knob in back:
        def refusal(along=()):
            return line.tree.refusal(builds.changed(line.words, [knob, *along]))
        sentence, others = refusal(), [other for other in back if other != knob]
        advice = [word for word in re.findall(r"[A-Z][A-Z0-9_]*=[A-Z0-9_]+", sentence.partition("type ")[2])
                  if word.split("=")[0] != knob.split("=")[0]]
        tries = [(), advice, *itertools.combinations(others, 1), *itertools.combinations(others, 2)]
        yield knob, next(([knob, *along] for along in tries if not refusal(along)), None), sentence


def removed(text, name):
    """The changes in a contender's text."""
    return text[len(name) + 1:].replace(" ", ", ")


def run_problem(gpu, kernels, problem, facts, table):
    """Checks and times the line and its variants and prints the cost of each knob, largest first. Returns True if all passed."""
    bench = engine.Bench(gpu, kernels, dict.fromkeys(kernels, problem))
    name, *_ = kernels
    bad = bench.trouble()
    if name in bad:
        raise Refused(f"{name} is not timed at {problem}: {bad[name]}", 1)
    graphs = bench.fit_to_time()
    series, ratios = engine.compare(gpu, graphs)
    bad.update({key: "the result of its last replay differs" for key in graphs if bench.changed_bits(key)})
    for key in kernels:
        table.add(**engine.result_row(bench, key, facts[key], None if key in bad else series))
    print(f"\n{problem} on {gpu.name}: {name}, {series.us(name):.3f} us")
    for key in sorted(ratios.keys() - bad.keys(), key=lambda key: -ratios[key].ratio):
        v = ratios[key]
        bar = "#" * min(40, round(25 * (v.ratio - 1)))
        print(f"  {removed(key, name):<44} {series.us(key):10.3f} us {100 * v.ratio - 100:+6.1f}% "
              f"[{100 * v.low - 100:+.1f}, {100 * v.high - 100:+.1f}] {v.verdict:<7} {bar}")
    for key, sentence in bad.items():
        print(f"  {removed(key, name):<44} not timed: {sentence}")
    bench.close()
    return not bad


def ablate(options):
    if options.svg:
        import page  # fail before measuring if matplotlib is missing
    found = builds.parse_contenders(options.words)
    if len(found) != 1 or type(found[0]) is not builds.Line:
        raise Refused("one line at a time" if found else "which line?")
    line, = found
    problems = [engine.parse_problem(text, options.causal).typed(line.D, line.dtype, line.Dv)
                for text in options.shape or ["mission", "long"]]
    gpu = engine.need_gpu(" (check without times: ./run_all.sh --cpu)")
    why_not = {builds.Line(line.tree, line.name, tuple(builds.changed(line.changes, changes or [knob]))):
               "" if changes else sentence for knob, changes, sentence in removals(line)}
    built = builds.build([line, *(one for one in why_not if not why_not[one])], gpu.arch)
    why_not.update({one: built[one].trouble for one in why_not if one in built})
    lines = [line, *(one for one in why_not if not why_not[one])]
    kernels, facts = load(gpu, built, lines)
    table = engine.Table(engine.results_path("ablation", gpu.name, line.name, new=True), engine.row_columns())
    passed = [run_problem(gpu, kernels, problem, facts, table) for problem in problems]
    for one in filter(why_not.get, why_not):
        print(f"cannot be reset: {removed(one.text, line.text)}: {why_not[one]}")
        table.add(config=one.target, status="error", note=why_not[one])
    say(f"rows: {table.name}")
    if options.svg:
        page.draw_ablation(table.name)
    return 0 if all(passed) else 1


def main():
    command = sys.argv[0]
    options = cli.parse_options(cli.usage_of(command, __doc__), cli.MOST)
    return measure_rungs(options) if command == "rungs" else ablate(options)
