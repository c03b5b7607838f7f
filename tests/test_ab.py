"""Tests of ./run_all.sh ab on this project's lines without a GPU; test_engine.py has its parts. usage: python3 -m pytest tests/test_ab.py"""
import os
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import builds  # noqa: E402
import tool  # noqa: E402


def run(*words, **environment):
    done = subprocess.run([os.path.join(ROOT, "run_all.sh"), *words], capture_output=True, text=True,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "CXX": tool.unoptimized(builds.BUILD), **environment})
    return done.returncode, done.stdout, done.stderr


@pytest.mark.long
def test_three_builds_of_a_line():
    code, out, err = run("ab", "scalar_minimal", "scalar_minimal", "VEC_WIDTH=1", "scalar_minimal", "VEC_WIDTH=2",
                         "--shape", "small")
    assert code == 0, err
    assert "There is no GPU here: no times." in err and " us " not in out
    assert "A and B have identical machine code and launch code: B is not timed." in out
    assert "A and C" not in out and out.count("small: PASS on the CPU backend") == 3
    rows = {line[0]: line.split() for line in out.splitlines() if line[1:4] == "   "}
    assert rows["A"] == rows["A"][:1] + rows["B"][1:] and rows["C"][-1].endswith("*")  # code bytes
    assert "\n* differs from A\n" in out
    assert int(rows["A"][1]) > 20 and int(rows["A"][3]) > 1000  # registers, shared bytes


@pytest.mark.long
def test_a_commit_against_the_working_tree():
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).returncode:
        return  # an unpacked archive has no commits
    code, out, err = run("ab", "HEAD:scalar_minimal", "scalar_minimal", "--shape", "small")
    assert code == 0 and out.count("PASS") == 2, err


@pytest.mark.long
def test_a_wrong_line_is_told():
    code, out, err = run("ab", "scalar_racy", "scalar_minimal", "--shape", "small")
    assert code == 1 and "ab: A (scalar_racy) gives wrong results at small on the CPU backend: " in err
