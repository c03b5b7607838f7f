"""Tests of ./run_all.sh tune without a GPU: the search space, the gates on a fake GPU, logs of interrupted searches, exports,
and the quality of the search on measured lists. usage: python3 -m pytest tests/test_tune.py"""
import glob
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
import types
from unittest import mock

import numpy as np
import optuna
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import builds  # noqa: E402
import engine  # noqa: E402
import search  # noqa: E402
import tool  # noqa: E402
import tune  # noqa: E402
from test_engine import FakeGpu, FakeKernel  # noqa: E402

LISTS = sorted(glob.glob(os.path.join(ROOT, "results", "tuning", "*-all.jsonl")))


TREE = builds.Tree()


def line_of(*words):
    return search.parse_line(TREE, " ".join(words))


def run(*words):
    return tool.run("tune", *words)


def dry(log, *words):
    return run("--dry-run", "--from", "mma_lazy", "--log", str(log), *words)


def records_of(log):
    return [dict(one.user_attrs, value=one.value) for one in tune.read_log(str(log)).trials]


# ---- the space ----

@pytest.mark.long
def test_the_space_is_asked_of_the_code():
    space = search.Space(line_of("scalar_vec8"), {})
    assert space.values["SYNC_POLICY"] == ["5", "2", "1"]  # 0 is the negative control's
    assert space.values["BLOCK_N"] == [str(16 * n) for n in range(1, 17)]
    features = {"USE_BIAS", "USE_LENGTHS", "USE_PAGES", "USE_SINKS", "USE_SOFTCAP"}  # which a problem asks for
    assert not {"USE_WMMA", "SPLIT_KV", "HEAD_DIM", *features} & set(space.values)
    space = search.Space(line_of("wgmma_ws"), {"BLOCK_M": ["64", "128"]})
    assert not features & set(space.values)
    assert "USE_FAST_EXP" in space.free  # legal, though no wgmma line of configs.txt has it
    assert space.values["BLOCK_M"] == ["64", "128"] and "SWIZZLE_XOR" not in space.free


def test_options_of_a_problem_are_not_searched():
    options = set(re.findall(r"^  X\((USE_(?:KEY_MASK|SOFTCAP|SINKS|LENGTHS|PAGES|BIAS))\b", TREE.read("sdpa.cu"), re.MULTILINE))
    assert len(options) == 6 and options <= set(search.PROBLEMS_OWN)


@pytest.mark.long
def test_lines_that_fit_have_the_problems_type():
    problem = engine.parse_problem("long").typed(128, "bf16")
    starts = search.Space(line_of("mma_lazy"), {"STAGES": ["2"]}).starts(problem)
    assert len(starts) > 3 and all((one.D, one.dtype, one.knob("STAGES")) == (128, "bf16", "2") for one in starts)
    starts = search.Space(line_of("mma_lazy"), {"BLOCK_M": ["48"]}).starts(problem)  # of which no line is legal
    assert len(starts) == 1 and not starts[0].tree.refusal(starts[0].words) and starts[0].knob("BLOCK_M") == "48"


@pytest.mark.parametrize("text, knob", [
    pytest.param("mma_alibi", "SCORE_MOD", marks=pytest.mark.long), ("mma_lazy USE_SOFTCAP=2", "USE_SOFTCAP")])
@pytest.mark.usefixtures("quick_refusals")
def test_candidates_compute_the_function_of_the_base(text, knob):
    """This includes searches that start from another line, and candidates that a log stores as text."""
    base = line_of(text)
    value = search.knobs_of(base)[knob]
    for line in search.Space(base, {}).starts(engine.parse_problem("long").typed(base.D, base.dtype)):
        assert search.knobs_of(line)[knob] == value != TREE.knobs()[knob]
        assert search.parse_line(TREE, line.text) == line


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
        monkeypatch.setattr(builds, "build_one", lambda line, *_: builds.Built(
            line, trouble="error: no" if line.knob("STAGES") == "4" else ""))
        monkeypatch.setattr(builds, "facts", lambda built: facts(built.line))
        monkeypatch.setattr(engine, "load", lambda line, *_: FakeKernel(harm(line) or (lambda O, LSE: None), us(line), line))
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


def random_elements(O, LSE):
    O[..., 0] = np.random.default_rng().integers(0, 0x3000)


class Late:
    """Correct until the last replay, like a race that the checks do not hit."""
    def __init__(self):
        self.runs = 0

    def __call__(self, O, LSE):
        self.runs += 1
        if self.runs > 15:
            O[0, 0, 0, 0] ^= 1


def test_a_wrong_candidate_is_never_the_best(judged):
    harms = random_elements, lambda O, LSE: O.fill(0), lambda O, LSE: O.__setitem__((0, -1, -1, 5), 0xffff), Late()
    wrong = {line_of("scalar_vec8", f"BLOCK_N={16 * n}"): harm for n, harm in enumerate(harms, 3)}
    good = [line_of("scalar_minimal"), line_of("scalar_vec8")]
    study, judge = judged([good[0], *wrong, good[1]], lambda line: 10.0 if line in wrong else 20.0, wrong.get)
    assert list(fates(study).values()) == ["timed", *["wrong"] * 4, "timed"]
    assert judge.champion in map(search.identity, good)


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


def test_a_judge_goes_on_beside_the_best_of_a_log(judged, monkeypatch):
    lines = [line_of("mma_lazy"), line_of("mma_lazy", "STAGES=3"), line_of("mma_lazy", "STAGES=1")]
    study, first = judged(lines, lambda line: 18.0 if line.knob("STAGES") == "3" else 20.0)
    monkeypatch.setattr(builds, "build", lambda *_: {})
    again = tune.GpuJudge(Gpu(), list(first.benches), None)
    again.resume(study, search.Space(lines[0], {}, True))
    assert (again.champion, again.score, again.spills) == (search.identity(lines[1]), study.best_value, 0) != (None, 1, None)
    assert again.seconds() >= study.trials[-1].user_attrs["spent_s"]
    assert all(again.champion in bench.graphs for bench in again.benches.values())


def test_what_is_plainly_slower_is_dropped_early(judged):
    _, judge = judged([line_of("mma_lazy")])
    bench, = judge.benches.values()
    problem, turns = list(judge.benches)[0], []
    for us in (26.0, 20.1):
        bench.add("B", FakeKernel(us=us), problem)
        now = judge.gpu.now
        assert judge.beside_champion(bench, "B")[0] == pytest.approx(math.log(us / 20), abs=0.01)
        turns.append(judge.gpu.now - now)
        bench.drop("B")
    assert turns[1] > 4 * turns[0]


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


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """The log of a search."""
    log = tmp_path_factory.mktemp("searched") / "log.jsonl"
    assert dry(log, "--budget", "0.5", "--seed", "3")[0] == 0
    return log


@pytest.mark.long
def test_refused_candidates_say_why(searched):
    records, tree = records_of(searched), builds.Tree()
    assert {record["fate"] for record in records} >= {"refused", "timed"}
    for record in records:
        line = search.parse_line(tree, record["line"])
        assert search.identity(line) == record["knobs"]
        assert tree.refusal(line.words) == (record["sentence"] if record["fate"] == "refused" else "")


@pytest.mark.parametrize("words,sentence", [
    (["--fix", "BLOCK_Q=3"], "no knob is called BLOCK_Q in the working tree; did you mean BLOCK_N?"),
    (["--fix", "BLOCK_M=5000"], "--fix BLOCK_M=5000: BLOCK_M: not a legal value"),
    (["--fix", "BLOCK_M=64", "--fix", "BLOCK_M=32"], "--fix BLOCK_M=32 contradicts --fix BLOCK_M=64"),
    (["--family", "mma", "--fix", "USE_WGMMA=1"], "--fix USE_WGMMA=1 contradicts the family, mma"),
    pytest.param(["--from", "mma_lazy", "--fix", "NUM_WARPS=7", "--fix", "BLOCK_M=64"],
                 "the space is empty: BLOCK_M: with mma.sync it must be 16 or 32 times", marks=pytest.mark.long),
    (["--budget", "0.05"], "--budget 0.05: 3 s is less than the 6 s that a candidate takes"),
    (["--budget", "soon"], "--budget soon: want minutes"),
    (["--shape", "long,64,fp16", "--head-dim", "128"], "--shape long has D=64 fp16, but 128 fp16 was requested"),
    (["--shape", "long,64,fp16,br,9"], "the search does not support windows; omit the last number of --shape"),
    (["--all"], "--all needs --from LINE"), (["--export", "t4"], "--export takes one log"), (["x"], "x: only --export accepts"),
    (["--replay", "/no/such"], "no such file"),
])
def test_refusals(words, sentence):
    code, out, err = run("--dry-run", *words)
    assert code == 2 and sentence in err and err.count("\n") == 1 and not out, err


@pytest.mark.parametrize("path,code,sentence", [
    (os.path.join(ROOT, "configs.txt"), 2, "configs.txt: want a log of ./run_all.sh tune"),
    ("/proc/no/log", 3, "/proc/no/log cannot be written")])
@pytest.mark.usefixtures("quick_refusals")
def test_a_file_that_is_no_log(path, code, sentence):
    found, out, err = run("--dry-run", "--log", path)
    assert found == code and sentence in err and err.count("\n") == 1 and not out, err


def test_without_a_gpu():
    if engine.find_gpu() is None:
        assert run()[::2] == (2, "tune: it times kernels and there is no GPU here; --dry-run, --replay and --export need none\n")


# ---- what is made of a log ----

@pytest.mark.parametrize("log", [pytest.param("", marks=pytest.mark.long), *LISTS])
def test_t4(log, request):
    """The members that the schema of T4 results 1.0.0 requires, and their types."""
    log = log or request.getfixturevalue("searched")
    code, out, _ = run("--export", "t4", str(log))
    exported, own, number = json.loads(out), records_of(log), (int, float)
    assert code == 0 and len(exported["results"]) == len(own) > 5 and re.fullmatch(r"\d+\.\d+\.\d+", exported["schema_version"])
    for one in exported["results"]:
        kinds = dict(configuration=dict, times=dict, invalidity=str, correctness=number, objectives=list, measurements=list, timestamp=str)
        assert {"configuration", "times", "invalidity", "correctness"} <= one.keys() <= kinds.keys()
        assert all(isinstance(value, kinds[name]) for name, value in one.items())
        assert all(isinstance(value, list if name == "runtimes" else number) for name, value in one["times"].items())
        assert one["invalidity"] in ("timeout", "compile", "runtime", "correctness", "constraints", "correct")
        assert all(isinstance(each["name"], str) and isinstance(each["value"], (str, list, *number)) for each in one["measurements"])
    assert {one["invalidity"] for one in exported["results"]} >= {"correct"}
    assert exported["results"][0]["configuration"]["USE_MMA_SYNC" if "mma" in own[0]["line"][:3] else "USE_WGMMA"] == "1"


@pytest.mark.long
def test_pictures(searched):
    code, out, err = run("--export", "svg", str(searched))
    assert code == 0 and not err, err
    history, knobs = (open(path).read() for path in out.split())
    assert "Optimization History" in history and "BLOCK_M" in knobs


@pytest.mark.long
def test_a_tile_worth_a_row_goes_to_fit(monkeypatch):
    """tune --table finds a tile twice as fast as the table's, and `fit` times it together with them."""
    tried = []

    def search_of(options, gpu, lines):
        study = optuna.create_study()
        study.add_trials([optuna.trial.create_trial(value=value, user_attrs=dict(line=text))
                          for text, value in ((lines[0].text, 2.0), (lines[0].text.replace("STAGES=2", "STAGES=4"), 1.0))])
        return None, study, None, None
    monkeypatch.setattr(tune, "run_search", search_of)
    monkeypatch.setattr(tune, "find_gpu", lambda options: FakeGpu())
    monkeypatch.setattr(tune.fit, "SHAPES", ["mission"])
    monkeypatch.setattr(tune.fit, "measure", mock.create_autospec(tune.fit.measure, side_effect=lambda *given: tried.append(given)))
    monkeypatch.setattr(tune.fit, "print_fit", mock.create_autospec(tune.fit.print_fit))
    monkeypatch.setattr(engine, "results_path", mock.create_autospec(engine.results_path))
    monkeypatch.setattr(engine, "Table", mock.create_autospec(engine.Table))
    assert tune.table(types.SimpleNamespace(head_dim="128", budget_s=60, fix=[])) == 0
    (_, model, tiles, problems, _), = tried
    assert {tile.head_dim for tile in tiles} == {problem.D for problem in problems} == {128}
    assert {problem.causal for problem in problems} == {"off", "br"}
    assert tiles[-1].knobs == tiles[0].knobs.replace("STAGES=2", "STAGES=4") != tiles[0].knobs


# ---- how good the search is ----

def replayed(log):
    """{search: (median, 18 of 20, runs of 20 within 15% of the list)}."""
    code, out, err = run("--replay", str(log))
    assert code == 0, err
    rows = re.findall(r"^(\S.*?) {2,}(\d+) +(\d+) +[\d.]+% +(\d+) of 20$", out, re.M)
    return {kind: tuple(map(int, figures)) for kind, *figures in rows}


@pytest.mark.long
def test_the_search_beats_random_search(tmp_path):
    """Compares both on a list of timings from the cost model."""
    fix = [word for knob in ("BLOCK_M=16,32,64,128,256", "BLOCK_N=32,48,64,96,128", "NUM_WARPS=2,4,8", "STAGES=1,2,3",
                             "SPLIT_KV=1,2,4") for word in ("--fix", knob)]
    assert dry(tmp_path / "all.jsonl", "--all", "--budget", "60", *fix)[0] == 0
    knobs = [record["knobs"] for record in records_of(tmp_path / "all.jsonl")[1:]]
    assert len(knobs) == len(set(knobs)) > 200
    found = replayed(tmp_path / "all.jsonl")
    assert found["from mma_lazy"][2] >= 18 and found["random search"][2] <= 10, found


@pytest.mark.long
@pytest.mark.parametrize("log", LISTS)
def test_the_search_on_measured_lists(log):
    found = replayed(log)
    assert found["from the family's lines"][2] >= 18 and found["random search"][2] <= 9, found
    with open(os.path.join(ROOT, "docs", "TUNING.md")) as file:
        page = file.read()
    family = "wgmma" if "wgmma" in os.path.basename(log) else "mma"
    for kind, (median, most, good) in found.items():
        assert re.search(rf"^\| {family} \| [^|]* \| {median} \| {most} \| {good} of 20 \|$", page, re.M), kind
