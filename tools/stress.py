#!/usr/bin/env python3
"""usage: ./run_all.sh stress [NAME...] [--repeats N]
Runs these lines of configs.txt (by default those with USE_WGMMA=1 or SPLIT_CTAS=0) N times on each of three problems and
compares O and LSE bit by bit with those of a first run. CSV on stdout, one row a case:
config,case,problem,repeats,check, which is PASS or FAIL. The cases:
  alone       the same launch again
  max_ctas_N  persistent lines: at most 1, 3 or 7 CTAs
  beside      beside a kernel that keeps an eighth of the SMs and the memory busy; what it moved meanwhile
              stands on stderr
  stages_N    the line with STAGES=2, 3 or 4, whose bits must be the line's; one that cannot be built is
              named on stderr. Not of lines with SPLIT_CTAS=0, which deal the keys by the CTAs that fit
  --repeats N  runs of each case (default 1000)
exit: 0 all bits are the same, 1 some are not, 2 bad usage, 3 something could not be run
"""
import re
import subprocess
import sys

import builds
import engine
from builds import Refused


def say(sentence):
    print(f"stress: {sentence}", file=sys.stderr, flush=True)


def variants(line):
    """{case: the line with other STAGES}, whose bits must be the line's."""
    own = line.knob("STAGES", "1")
    if line.knob("SPLIT_CTAS") == "0":
        return {}
    return {f"stages_{stages}": builds.Line(line.tree, line.name, tuple(builds.changed(line.changes, [f"STAGES={stages}"])))
            for stages in "234" if stages != own}


def run(line, built, case, repeats, *words):
    """Runs a build and prints its rows, a variant's under its line's name. The exit code, at most 3."""
    seconds = 120 + repeats // 4  # a kernel that waits for one that waits for it would never end
    process = subprocess.Popen(["timeout", str(seconds), built.path, "--repeats", str(repeats), *words],
                               stdout=subprocess.PIPE, text=True)
    for row in process.stdout:
        print(re.sub(f"^{built.line.target},alone,", f"{line.target},{case},", row), end="", flush=True)
    code = process.wait()
    if code == 124:
        say(f"{built.line.text}: no end after {seconds} seconds")
    elif code > 1:
        say(f"{built.line.text} ended with exit code {code}")
    return code if code <= 1 else 3


def stress(line, built, repeats):
    """All cases of a line; the exit codes."""
    if built[line].trouble:
        say(f"{line.text}: not built: {built[line].trouble}")
        yield 3
        return
    bits = built[line].path + ".bits"
    yield run(line, built[line], "alone", repeats, "--save", bits)
    for case, variant in variants(line).items():
        if built[variant].trouble:
            say(f"{variant.text}: not built: {built[variant].trouble}")
            # What sdpa.cu refuses in words cannot be; anything else is an error.
            yield 0 if variant.tree.refusal(variant.words) else 3
        else:
            yield run(line, built[variant], case, repeats, "--like", bits)


def main():
    parser = engine.new_parser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--repeats", default="1000")
    options = engine.parse_options(parser, sys.argv[1:], __doc__)
    repeats = engine.number("--repeats", options.repeats)
    lines = builds.parse_contenders(options.names) or [line for line in builds.lines_named("")
                                                           if line.knob("USE_WGMMA") == "1" or line.knob("SPLIT_CTAS") == "0"]
    if any(type(line) is not builds.Line for line in lines):
        raise Refused("it runs lines of configs.txt")
    if not lines:
        raise Refused("no line of configs.txt has USE_WGMMA=1 or SPLIT_CTAS=0; name the lines")
    gpu = engine.need_gpu("; run it on a machine with one", "runs kernels side by side")
    all_lines = [one for line in lines for one in (line, *variants(line).values())]
    built = builds.build(all_lines, gpu.arch, program="tools/stress.cu", kind="", progress=builds.show_progress())
    print("config,case,problem,repeats,check", flush=True)
    return max(code for line in lines for code in stress(line, built, repeats))  # 3 is worse than 1


if __name__ == "__main__":
    engine.command("stress", main)
