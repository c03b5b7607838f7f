"""usage: ./run_all.sh rungs [--output FILE] [--launch]
Times the rungs of docs/LADDER.md and the peers (PyTorch's cuDNN and FlashAttention-2, and FlashAttention-3 if its wheel
is there) at the problems of each ladder, as tools/peers.py does, and asks ncu, if it may read the GPU's counters, which
unit binds each rung's kernel, which comes last: the times are in the file by then. `./run_all.sh results` makes the
page's tables and pictures of it.
  --output FILE  the CSV (default: results/ladder/DATE-DEVICE-rungs.csv); there must be none
  --launch       only launches each rung at each problem, which is what ncu is asked to look at
exit: 0, 1 a rung is wrong, 2 bad usage
"""
import functools
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

COLUMNS = ("unit", "unit_share", "waits_for")
KERNELS = "sdpa_(scalar|wmma|mma|wgmma)"  # not those that plan or merge


@functools.cache
def judged(text):
    """The line, unless its knobs cannot go together: that is refused."""
    return builds.parse_contenders(text.split())[0]


def wanted():
    """{problem: its lines}, in the order of the ladders."""
    found = {}
    for one in ladders.LADDERS.values():
        for what in one.problems.values():
            lines = found.setdefault(engine.parse_problem(what.replace(" ", ",")), {})
            lines |= {line.text: judged(line.text) for rung in one.rungs if (line := ladders.contender(rung, what))}
    return {problem: [*lines.values()] for problem, lines in found.items()}


def launch_all(gpu, built):
    """Each line at each problem twice: the first launch finds L2 cold, and of the second one the profiler is told."""
    for problem, lines in wanted().items():
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


def profiled():
    """{(problem, a line's name in rows): its counters}, by ncu over a process that launches everything."""
    if not shutil.which("ncu"):
        raise Refused("ncu is missing; it is Nsight Compute of the CUDA Toolkit, put its folder on PATH")
    done = builds.run(ncu.command_of("--profile-from-start", "off", "--kernel-name", f"regex:{KERNELS}", sys.executable,
                                     os.path.join(builds.ROOT, "tools"), "rungs", "--launch"))
    ncu.judge_words(done.stdout + done.stderr)
    keys = [(problem, line.label) for problem, lines in wanted().items() for line in lines]
    try:
        found = ncu.launches_of(done.stdout)
    except ValueError:
        found = []
    if len(found) != len(keys):
        words = "".join(re.findall("^==.*|^rungs: .*", done.stdout + done.stderr, re.MULTILINE)[-1:])
        raise Refused(f"ncu saw {len(found)} of {len(keys)} launches: {words}")
    return dict(zip(keys, found))


def peaks(gpu):
    """FLOP/s of 16-bit products and bytes/s of the memory, as the executables count them; 0: not known."""
    rates = re.search(r"rates\[\] = \{(\{.*?\})\};", builds.Tree().read("harness.cu"), re.S)[1]
    flops = dict(re.findall(r"\{(\d+), (\d+)\}", rates)).get(gpu.arch.strip("a"), 0)
    clock, memory_clock, width, sms = map(gpu.attribute, (13, 36, 37, engine.SM_COUNT))  # kHz, kHz, bits
    return 1e3 * int(flops) * sms * clock, 2e3 * memory_clock * width / 8


def share(problem, us, flops, bytes_s):
    """{peak_share, bound}: the least time that products or the reading of all tensors take, over us."""
    p = problem
    moved = 2 * p.D * p.B * 2 * (p.Hq * p.Sq + p.Hkv * p.Sk)
    least = {"matrix": flops and p.flops() / flops, "memory": bytes_s and moved / bytes_s}
    bound = max(least, key=least.get)
    return dict(peak_share=f"{1e6 * least[bound] / us:.4f}", bound=bound)


def main():
    options = cli.parse_options(__doc__)
    lines = [line for of_problem in wanted().values() for line in of_problem]
    if options.output and os.path.exists(options.output):
        raise Refused(f"--output {options.output}: there is such a file already")
    gpu = engine.need_gpu()
    built = builds.build(lines, gpu.arch, progress=(lambda *_: None) if options.launch else builds.show_progress())
    if options.launch:
        return launch_all(gpu, built)
    kernels = {line.text: engine.load(line, gpu, built) for line in lines}
    others = {}
    for text in ("torch:cudnn", "torch:flash", "torch:fa3"):
        try:
            others[text] = engine.load(builds.Torch(text), gpu, {})
        except Refused as error:
            say(f"rungs: without {error}")
    path = options.output or engine.results_path("ladder", gpu.name, "rungs", new=True)
    columns, failed, (flops, bytes_s), found = [*engine.row_columns(), *COLUMNS], False, peaks(gpu), {}
    table = engine.Table(path, columns)
    facts = {line.text: builds.facts(built[line]) for line in lines}
    for problem, of_problem in wanted().items():
        here = {line.text: kernels[line.text] for line in of_problem}
        here |= {text: kernel for text, kernel in others.items() if text not in builds.PACKAGES}
        rows = [*peers.run_problem(gpu, here, problem, facts, engine.STEADY, 2)]
        in_bf16 = {text: kernel for text, kernel in others.items() if text in builds.PACKAGES}  # which takes it alone
        rows += peers.run_problem(gpu, in_bf16, problem._replace(dtype="bf16"), {}, engine.STEADY, 2) if in_bf16 else []
        for row in rows:
            failed |= row.get("check") == "FAIL"
            if row.get("graph_us"):
                row |= share(problem, float(row["graph_us"]), flops, bytes_s)
            found[problem, row["config"]] = row
            table.add(**row)
        say(f"rungs: {problem} done")
    try:  # last, since it takes longest: the times are in the file by now
        for key, counters in profiled().items():
            unit, use, stalls = ncu.bound_of(found[key], counters)
            found[key] |= dict(unit=unit, unit_share=f"{use:.1f}", waits_for=stalls[0][0])
        whole = engine.Table(path + ".whole", columns)
        for row in found.values():
            whole.add(**row)
        os.replace(path + ".whole", path)
    except Refused as error:
        say(f"rungs: without the units that bind: {error}")
    say(f"rows: {table.name}; ./run_all.sh results makes the tables of docs/LADDER.md of them")
    return 1 if failed else 0
