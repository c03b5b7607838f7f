"""Tests of ./run_all.sh tune without a GPU: the search space, the gates on a fake GPU, logs of interrupted searches, the export,
and the quality of the search on measured lists. usage: python3 -m pytest tests/test_tune.py"""
import glob
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import optuna
import pytest

import builds
import engine
import search
import tool
import tune
from test_engine import FakeGpu, FakeKernel

ROOT = builds.ROOT
LISTS = sorted(glob.glob(os.path.join(ROOT, "results", "tuning", "*-all.jsonl")))
TREE = builds.Tree()


def line_of(*words):
    return search.parse_line(TREE, " ".join(words))


def dry(log, *words):
    return tool.run("tune", "--dry-run", "--from", "mma_lazy", "--log", str(log), *words)


def records_of(log):
    return [dict(one.user_attrs, value=one.value) for one in tune.read_log(str(log)).trials]


# ---- the space ----

def test_options_of_a_problem_are_not_searched():
    options = set(re.findall(r"^  X\((USE_(?:KEY_MASK|SOFTCAP|SINKS|LENGTHS|PAGES|BIAS))\b", TREE.read("sdpa.cu"), re.MULTILINE))
    assert len(options) == 6 and options <= set(search.PROBLEMS_OWN)


@pytest.mark.usefixtures("quick_refusals")
def test_candidates_compute_the_function_of_the_base():
    """This includes searches that start from another line, and candidates that a log stores as text."""
    base = line_of("mma_lazy USE_SOFTCAP=2")
    for line in search.Space(base, {}).starts(engine.parse_problem("long").typed(base.D, base.dtype)):
        assert search.knobs_of(line)["USE_SOFTCAP"] == "2" and search.parse_line(TREE, line.text) == line


def test_a_line_to_paste_is_the_candidate(tmp_path, monkeypatch):
    line = line_of("mma_lazy", "BLOCK_M=64", "SPLIT_KV=2", "STAGES=3")
    text = tune.paste(line)
    assert text == "mma_tuned : mma_split2 STAGES=3"
    with open(os.path.join(ROOT, "configs.txt")) as file:
        (tmp_path / "configs.txt").write_text(file.read() + text + "\n")
    monkeypatch.setenv("SDPA_CONFIGS", str(tmp_path / "configs.txt"))
    assert search.identity(builds.Line(builds.Tree(), "mma_tuned")) == search.identity(line)
    assert tune.paste(line_of("mma_lazy")) == "mma_lazy is a line already"


# ---- the gates, on a fake GPU ----

class Gpu(FakeGpu):
    def attribute(self, which):
        return 232448


@pytest.fixture
def judged(monkeypatch, quick_refusals):
    """Judges lines whose kernel takes us(line) with the fault harm(line); returns the study and the judge."""
    def judge(lines, us=lambda line: 20.0, harm=lambda line: None, facts=lambda line: builds.Facts(100, 0, shared_bytes=9)):
        tool.on_a_gpu(monkeypatch, None, lambda line: FakeKernel(harm(line) or (lambda O, LSE: None), us(line), line))
        monkeypatch.setattr(builds, "build_one", lambda line, *_: builds.Built(line, trouble="error: no" * (line.knob("STAGES") == "4")))
        monkeypatch.setattr(builds, "facts", lambda built: facts(built.line))
        monkeypatch.setattr(engine, "RANDOM_BLOCK", 1 << 20)
        problem = engine.parse_problem("1,2,2,40,70").typed(64, "fp16")
        judge, study = tune.GpuJudge(Gpu(), [problem], lambda record: None), optuna.create_study()
        tune.search(study, search.Space(lines[0], {}, True), judge, lines, lambda: True, breed=False)
        return study, judge
    return judge


def fates(study):
    return {one.user_attrs["line"]: one.user_attrs["fate"] for one in study.trials}


def test_gates_in_order(judged):
    base = line_of("mma_lazy")
    lines = [base, *(line_of("mma_lazy", word) for word in ("BLOCK_N=40", "STAGES=4", "BLOCK_N=32", "BLOCK_N=96", "STAGES=3"))]
    spills = lambda line: builds.Facts(100, 8 * (line.knob("BLOCK_N") == "32"),  # noqa: E731
                                       shared_bytes=300000 if line.knob("BLOCK_N") == "96" else 9)
    study, judge = judged(lines, lambda line: 18.0 if line.knob("STAGES") == "3" else 20.0, facts=spills)
    assert fates(study) == dict(zip((line.text for line in lines), ["timed", "refused", "compile", "gate", "gate", "timed"]))
    best = study.best_trial
    assert best.value == pytest.approx(0.9, abs=0.005) and best.user_attrs["registers"] == 100
    assert best.user_attrs["line"] == "mma_lazy STAGES=3" and judge.champion == best.user_attrs["knobs"]
    assert [len(bench.graphs) for bench in judge.benches.values()] == [1]  # of the champion alone


def test_a_wrong_candidate_is_never_the_best(judged):
    """One with random results, zeros, NaN, or an error that appears only in its last replays, like a race that the checks do not hit."""
    runs, rng = itertools.count(1), np.random.default_rng(0)
    harms = (lambda O, LSE: O.__setitem__((..., 0), rng.integers(0, 0x3000)), lambda O, LSE: O.fill(0),
             lambda O, LSE: O.__setitem__((0, -1, -1, 5), 0xffff),
             lambda O, LSE: O.__setitem__((0, 0, 0, 0), O[0, 0, 0, 0] ^ (next(runs) > 15)))
    wrong = {line_of("scalar_vec8", f"BLOCK_N={16 * n}"): harm for n, harm in enumerate(harms, 3)}
    good = [line_of("scalar_minimal"), line_of("scalar_vec8")]
    study, judge = judged([good[0], *wrong, good[1]], lambda line: 10.0 if line in wrong else 20.0, wrong.get)
    assert list(fates(study).values()) == ["timed", *["wrong"] * 4, "timed"] and judge.champion in map(search.identity, good)


def test_what_breaks_the_gpu_is_wrong_and_restarts(judged, monkeypatch):
    lost = []

    class Broken(FakeKernel):
        def prepare(self, gpu, tensors, problem):
            gpu.synchronize = self.fail
            self.fail()

        def fail(self):
            raise engine.CudaError("an illegal memory access was encountered")
    _, judge = judged([line_of("mma_lazy")])
    judge.restart = lost.append
    monkeypatch.setattr(engine, "load", lambda line, *_: Broken())
    line = line_of("mma_lazy", "STAGES=3")
    assert judge.judge(line, judge.prepare(line))["fate"] == "wrong"
    assert lost[0]["line"] == line.text and "illegal memory access" in lost[0]["sentence"] and lost[0]["spent_s"] >= 0


def test_a_judge_goes_on_beside_the_best_of_a_log(judged):
    lines = [line_of("mma_lazy"), line_of("mma_lazy", "STAGES=3")]
    study, first = judged(lines, lambda line: 18.0 if line.knob("STAGES") == "3" else 20.0)
    again = tune.GpuJudge(Gpu(), list(first.benches), None)
    again.resume(study, search.Space(lines[0], {}, True))
    assert (again.champion, again.score, again.spills) == (search.identity(lines[1]), study.best_value, 0) != (None, 1, None)
    assert again.seconds() >= study.trials[-1].user_attrs["spent_s"]
    assert all(again.champion in bench.graphs for bench in again.benches.values())


# ---- the log ----

@pytest.mark.long
def test_a_killed_search_goes_on(tmp_path):
    log = tmp_path / "log.jsonl"
    process = subprocess.Popen([sys.executable, os.path.join(ROOT, "tools"), "tune", "--dry-run", "--from", "mma_lazy",
                                "--log", str(log), "--budget", "0.5"], stderr=subprocess.DEVNULL)
    while not log.exists() or log.read_bytes().count(b"\n") < 20:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = log.read_bytes().rpartition(b"\n")[0] + b"\n"
    log.write_bytes(kept + b'{"op_code":4,"wor')  # what a kill in the middle of a line leaves
    code, out, err = dry(log, "--budget", "0.5")
    assert code == 0 and "to paste into configs.txt" in out, err
    assert log.read_bytes().startswith(kept)
    knobs = [record["knobs"] for record in records_of(log)]
    assert len(knobs) == len(set(knobs)) > 40
    before = log.read_bytes()
    assert dry(log, "--budget", "0.5")[1] == out and log.read_bytes() == before  # the same command measures nothing twice


def test_a_full_disk_leaves_a_valid_log(tmp_path):
    path, (soft, hard) = str(tmp_path / "log.jsonl"), resource.getrlimit(resource.RLIMIT_FSIZE)
    log, size = tune.Log(path, dict(all=False)), os.path.getsize(path)
    refused = [optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL, user_attrs=dict(knobs=f"A={n}")) for n in range(50)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, hard))
    try:
        with pytest.raises(builds.Refused, match="cannot be written: .* is valid, and the same command continues") as error:
            for one in refused:
                log.add(one)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.code == 3 and os.path.getsize(path) == size + 1000
    kept = len(records_of(path))
    again = tune.Log(path, dict(all=False))
    again.add(refused[kept])
    assert kept > 0 and [record["knobs"] for record in records_of(path)] == [f"A={n}" for n in range(kept + 1)]


@pytest.mark.parametrize("path,code,sentence", [
    (os.path.join(ROOT, "configs.txt"), 2, "configs.txt: want a log of ./run_all.sh tune"),
    ("/proc/no/log", 3, "/proc/no/log cannot be written")])
@pytest.mark.usefixtures("quick_refusals")
def test_a_file_that_is_no_log(path, code, sentence):
    found, out, err = tool.run("tune", "--dry-run", "--log", path)
    assert found == code and sentence in err and err.count("\n") == 1 and not out, err


# ---- what is made of a log ----

def test_t4():
    """The members that the schema of T4 results 1.0.0 requires."""
    code, out, _ = tool.run("tune", "--export", "t4", LISTS[0])
    exported, own = json.loads(out), records_of(LISTS[0])
    assert code == 0 and len(exported["results"]) == len(own) > 5 and re.fullmatch(r"\d+\.\d+\.\d+", exported["schema_version"])
    for one in exported["results"]:
        assert {"configuration", "times", "invalidity", "correctness"} <= one.keys() and isinstance(one["correctness"], (int, float))
        assert one["invalidity"] in ("timeout", "compile", "runtime", "correctness", "constraints", "correct")
    assert exported["results"][0]["configuration"]["USE_MMA_SYNC" if "mma" in own[0]["line"][:3] else "USE_WGMMA"] == "1"


# ---- how good the search is ----

@pytest.mark.long
@pytest.mark.parametrize("log", LISTS)
def test_the_search_on_measured_lists(log):
    code, out, err = tool.run("tune", "--replay", log)
    assert code == 0, err
    rows = re.findall(r"^(\S.*?) {2,}(\d+) +(\d+) +[\d.]+% +(\d+) of 20$", out, re.M)
    found = {kind: tuple(map(int, figures)) for kind, *figures in rows}  # median, 18 of 20, runs of 20 within 15% of the list
    assert found["from the family's lines"][2] >= 18 and found["random search"][2] <= 9, found
    with open(os.path.join(ROOT, "docs", "TUNING.md")) as file:
        page = file.read()
    family = "wgmma" if "wgmma" in os.path.basename(log) else "mma"
    for kind, (median, most, good) in found.items():
        assert re.search(rf"^\| {family} \| [^|]* \| {median} \| {most} \| {good} of 20 \|$", page, re.M), kind
