"""Runs a command of tools/ like ./run_all.sh, but in this process, so that its packages are loaded only once."""
import contextlib
import importlib
import io
import os
import random
import re
import sys
from unittest import mock

import builds
import cli
import search

QUICK_LINES = ["mma_lazy", "wgmma_d128_lazy"]  # that nvcc compiles without --all, for sm_80 and sm_90a


def drawn(found):
    """One of them, chosen by the commit: in time CI tries all that --all tries at once."""
    import engine  # it loads SciPy, which few tests need
    return random.Random(engine.git_sha()).choice(found)


def run(name, *words):
    """Returns the exit code, stdout and stderr."""
    module = importlib.import_module(cli.MODULES.get(name, name))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch.object(sys, "argv", [name, *words]):
        try:
            cli.command(name, module.main)
        except SystemExit as end:
            return end.code or 0, out.getvalue(), err.getvalue()


def on_a_gpu(patch, gpu, kernel_of):
    """Commands use this GPU and load kernel_of(contender); nothing is compiled."""
    import engine
    patch.setattr(engine, "find_gpu", lambda: gpu)
    patch.setattr(engine, "load", lambda contender, gpu, built: kernel_of(contender))
    patch.setattr(builds, "build", lambda lines, arch, **_: {line: builds.Built(line) for line in lines})
    patch.setattr(builds, "facts", lambda built: builds.Facts(40, 8))


def judge_quickly(patch):
    """Replaces the compiler by these rules for validating knobs, since it takes 0.1 s per candidate. For tests of how a search
    handles refusals; tests/test_knobs.py tests the refusals of sdpa.cu."""
    rows = re.findall(r'^  X\((\w+), (\w+), \w+, "[^"]*", "([^"]*)"', builds.Tree().read("sdpa.cu"), re.MULTILINE)
    defaults, families = {row[0]: row[1] for row in rows}, {row[0]: row[2].split() for row in rows}

    def refusal(tree, words):
        knobs = defaults | dict(word.split("=", 1) for word in words if word.split("=")[0] in defaults)
        family = next((name for name, knob in builds.FAMILIES.items() if knobs.get(knob) == "1"), "scalar")
        for knob, value in knobs.items():
            if value != defaults[knob] and not {"all", family} & {*families[knob]}:
                return f"{knob}: {family} lacks it"
        rows_of_warps = 16 * int(knobs["NUM_WARPS"]) // int(knobs["SPLIT_KV"])
        if family == "mma" and int(knobs["BLOCK_M"]) not in (rows_of_warps, 2 * rows_of_warps):
            return "BLOCK_M: 16 or 32 for a warp"
        if int(knobs["BLOCK_N"]) % 16 or knobs["VEC_WIDTH"] == "16":
            return "BLOCK_N and VEC_WIDTH: not these"
        if family != "wgmma" and knobs["USE_CP_ASYNC"] + knobs["USE_WARP_SPECIALIZATION"] == "00" and knobs["STAGES"] != "1":
            return "STAGES: it does nothing here"
        return ""
    patch.setattr(builds.Tree, "refusal", refusal)
    search.refusal.cache_clear()


UNOPTIMIZED = """#!/bin/sh
for word; do
  case $last in -o) out=$word ;; -MF) deps=$word ;; esac
  last=$word
done
case $* in
  *-DSDPA_HARNESS_ONLY*) made="{harness}" ;;
  */cpu_backend/engine.cpp) made="{engine}" ;;
esac
[ -n "$made" ] || exec {compiler} "$@" -O0
cp "$made" "$out" && echo "$out:" >"$deps"
"""


def unoptimized(folder):
    """A compiler for CXX without optimization, which takes half the time, for short programs. The CPU backend is not compiled but
    copied from the build folder, where all tests share it, and the harness from $SDPA_HARNESS, which ctest sets."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "unoptimized-c++")
    with open(path, "w") as file:
        file.write(UNOPTIMIZED.format(engine=builds.host_engine(), harness=os.environ.get("SDPA_HARNESS", ""), compiler=builds.CXX))
    os.chmod(path, 0o755)
    return path
