"""Tests of ./run_all.sh ab on this project's lines without a GPU; test_engine.py has its parts. usage: python3 -m pytest tests/test_ab.py"""
import os
import subprocess

import pytest

import builds
import tool


def run(*words):
    done = subprocess.run([os.path.join(builds.ROOT, "run_all.sh"), "ab", *words, "--shape", "small"], capture_output=True, text=True,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "CXX": tool.unoptimized(builds.BUILD)})
    return done.returncode, done.stdout, done.stderr


@pytest.mark.long
def test_builds_of_a_line():
    """The line is built from the working tree and, in a git repository, from a commit."""
    is_repository = not subprocess.run(["git", "rev-parse", "HEAD"], cwd=builds.ROOT, capture_output=True).returncode
    words = "scalar_minimal scalar_minimal VEC_WIDTH=1 scalar_minimal VEC_WIDTH=2" + " HEAD:scalar_minimal" * is_repository
    code, out, err = run(*words.split())
    assert code == 0 and "There is no GPU here: no times." in err and " us " not in out, err
    assert "A and B have identical machine code and launch code: B is not timed." in out
    assert "A and C" not in out and out.count("small: PASS on the CPU backend") == 3 + is_repository
    rows = {line[0]: line.split() for line in out.splitlines() if line[1:4] == "   "}
    assert rows["A"] == rows["A"][:1] + rows["B"][1:] and rows["C"][-1].endswith("*")  # code bytes
    assert "\n* differs from A\n" in out and int(rows["A"][1]) > 20 and int(rows["A"][3]) > 1000  # registers, shared bytes


@pytest.mark.long
def test_a_wrong_line_is_told():
    code, _, err = run("scalar_racy", "scalar_minimal")
    assert code == 1 and "ab: A (scalar_racy) gives wrong results at small on the CPU backend: " in err
