"""Tests of ./run_all.sh profile, stress and sweep with faked programs, and the refusals of all commands.
usage: python3 -m pytest tests/test_tools.py"""
import csv
import errno
import io
import itertools
import math
import os
import subprocess

import numpy as np
import pytest

import builds
import cli
import engine
import fit
import ncu
import stress
import tool
from test_engine import FakeGpu, FakeKernel, HostGpu

ROOT = builds.ROOT
LINE, = builds.parse_contenders(["scalar_vec8"])
needs_no_gpu = pytest.mark.skipif(engine.find_gpu() is not None, reason="there is a GPU")


# ---- how a command ends ----

@pytest.mark.parametrize("ends,code,said", [
    (lambda: None, None, ""), (lambda: 1, 1, ""),
    (cli.Refused("no such line"), 2, "it: no such line\n"), (cli.Refused("the GPU is gone", 3), 3, "it: the GPU is gone\n"),
    (KeyboardInterrupt(), 130, "it: stopped\n"), (BrokenPipeError(), 3, "it: stdout is closed, so not all of it was printed\n"),
    (OSError(errno.EROFS, "not now", builds.BUILD + "/y"), 3,
     f"it: {builds.BUILD}/y: not now; set SDPA_BUILD_DIR to a writable folder\n"),
    (OSError(errno.ENOSPC, "full", "/x/y"), 3, "it: /x/y: full\n")], ids=repr)
def test_how_a_command_ends(ends, code, said, monkeypatch, capfd):
    def main():
        if isinstance(ends, BaseException):
            raise ends
        return ends()
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        cli.command("it", main)
    assert (ended.value.code, capfd.readouterr().err) == (code, said)


# ---- profile ----

REPORT = [("gpu__time_duration.sum", "ns", "1,500,000.00"),
          ("sm__cycles_elapsed.avg.per_second", "hz", "1,800,000,000.00"),
          ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", "%", "60.00"),
          ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed", "%", "40.00"),
          ("smsp__issue_active.avg.pct_of_peak_sustained_active", "%", "39.00"),
          ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", "", "1,000"),
          ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "", "250"), ("lts__t_bytes.sum", "byte", "4,000,000"),
          ("dram__bytes_read.sum", "byte", "900,000"), ("dram__bytes_write.sum", "byte", "100,000"),
          ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", "%", "3.00"),
          ("smsp__average_warps_issue_stalled_wait_per_issue_active.ratio", "", "3"),
          ("smsp__average_warps_issue_stalled_selected_per_issue_active.ratio", "", "1")]


def printed_by_ncu():
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows(zip(*[("ID", "", "0"), ("Host Name", "", "127.0.0.1"), *REPORT]))
    return "==PROF== words\n" + out.getvalue()


SAID = [
    "mma_lazy at mission causal br on GPU: 1500.00 us under ncu, SM at 1800 MHz",
    "tensor pipe     60.0%  93% of what mma.sync can reach", "25.0% of its wavefronts are bank conflicts",
    # Q and O 2*512*64, K and V 1*512*64 elements of 2 bytes each, LSE 2*512 floats
    "4.0 MB, 10.1 times the tensors", "1.0 MB, 2.52 of the 0.4 MB", "wait 75%", "tensor pipe >= 50%: yes; DRAM < 50%: yes",
    "bound by               tensor pipe, at 93% of its limit"]
ROW = "config,family,shape,B,Hq,Hkv,Sq,Sk,D,sm,device,causal\nmma_lazy,mma,mission,1,2,1,512,512,64,90,GPU,br\n"


@pytest.mark.parametrize("trouble,checked,out,err,code,said", [
    ("", (0, ROW, ""), printed_by_ncu(), "", 0, SAID),
    ("", (0, ROW.replace(",mma,", ",wgmma,"), ""), printed_by_ncu(), "", 0,  # which does not have mma.sync's peak
     ["bound by               latency: the busiest unit is the tensor pipe at 60%"]),
    ("error: no", (0, ROW, ""), "", "", 2, ["mma_lazy STAGES=3: error: no"]),
    ("", (1, ROW, "words"), "", "", 1, ["mma_lazy STAGES=3 gives wrong results, so there is nothing to profile"]),
    ("", (2, "", "too large\n"), "", "", 2, ["mma_lazy STAGES=3 does not run on this problem: too large"]),
    ("", (0, ROW, ""), "", "==ERROR== ERR_NVGPUCTRPERM - more\n", 2, ["this user may not read the GPU's counters (ERR_NVGPUCTRPERM)"]),
    ("", (0, ROW, ""), "", "==PROF== a\n==ERROR== b\n", 2, ["ncu printed no counters: ==ERROR== b (its output: "])])
def test_a_profile_of_a_line(trouble, checked, out, err, code, said, monkeypatch, tmp_path):
    """Options after -- go to the executable. It is checked first; then ncu profiles its second launch."""
    commands, line = [], builds.parse_contenders(["mma_lazy", "STAGES=3"])

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, *(checked if command[0] == "program" else (0, out, err)))
    tool.on_a_gpu(monkeypatch, FakeGpu(), None)
    monkeypatch.setattr(ncu.shutil, "which", lambda name: name)
    monkeypatch.setattr(builds, "BUILD", str(tmp_path))
    monkeypatch.setattr(builds, "build", lambda lines, arch, **of: {
        line: builds.Built(line, "program", trouble) for line in lines if of == dict(program="sdpa.cu", kind="")})
    monkeypatch.setattr(builds, "parse_contenders", lambda words: line if words == ["mma_lazy", "STAGES=3"] else [])
    monkeypatch.setattr(builds, "run", run)
    found, printed, refused = tool.run("profile", *"mma_lazy STAGES=3 --shape 1,2,1,512,512 -- --causal br --header".split())
    assert found == code and not [sentence for sentence in said if sentence not in (refused if code else printed)]
    own = "program --check-only --shape 1,2,1,512,512 --causal br --header".split()
    assert [command[-len(own):] if command[0] == "ncu" else command for command in commands] == [[*own, "--header"], own][:len(commands)]
    for command in commands[1:]:
        named = dict(zip(command[:-len(own)], command[1:]))
        assert (named["--launch-skip"], named["--launch-count"], named["--kernel-name"]) == ("1", "1", "regex:sdpa_")
        assert set(named["--metrics"].split(",")) >= {name for name, *_ in REPORT} and named["--print-units"] == "base"


# ---- peers ----

WRONG = "1,1,1,40,50"  # the problem in which wrong() is


def wrong(O, LSE):
    O[...] *= O.shape[2] != 40


@pytest.fixture
def compared(monkeypatch):
    """Runs tools/peers.py on a fake GPU with faults in some contenders; returns exit code, rows, stderr and the pace."""
    def run(*words, **harms):
        courses, measure = [], engine.measure
        tool.on_a_gpu(monkeypatch, FakeGpu(), lambda one: FakeKernel(
            harms.get(one.label, lambda O, LSE: None), 40.0 if isinstance(one, builds.Torch) else 20.0, one, one.text))
        with monkeypatch.context() as patch:
            patch.setattr(engine, "measure", lambda gpu, graphs, *course: courses.append(course) or measure(gpu, graphs, *course))
            patch.setattr(engine.time, "sleep", lambda seconds: None)
            code, out, err = tool.run("peers", *words)
        return code, list(csv.DictReader(io.StringIO(out))), err, courses
    return run


def test_peers_fail_if_a_line_is_wrong_on_any_problem(compared):
    problems = "--shape", WRONG, "--shape", "1,1,1,41,50"
    code, rows, _, courses = compared("scalar_vec8", "torch:math", *problems, scalar_vec8=wrong)
    assert code == 1 and [(row["config"], row["shape"], row["check"]) for row in rows] == [
        ("scalar_vec8", "1x1x1x40x50", "FAIL"), ("torch_math", "1x1x1x40x50", ""), ("scalar_vec8", "1x1x1x41x50", "PASS"),
        ("torch_math", "1x1x1x41x50", "")]
    assert [bool(row["graph_us"]) for row in rows] == [False, True, True, True] and courses == [(engine.STEADY, 2)] * 2
    assert rows[0]["note"].startswith("O(0,0,") and "max diff to torch_math " in rows[0]["note"]
    assert (rows[2]["regs"], rows[2]["spill_bytes"], rows[3]["family"]) == ("40", "8", "torch")
    for row, us in ((rows[2], 20), (rows[3], 40)):
        assert us - 1 < float(row["graph_lo_us"]) <= float(row["graph_us"]) <= float(row["graph_hi_us"]) < us + 1
        assert row["clock_mhz"] == "1980" and float(row["tflops"]) == pytest.approx(4 * 64 * 41 * 50 / float(row["graph_us"]) * 1e-6, abs=0.006)
    code, rows, *_ = compared("scalar_vec8", "scalar_vec2", *problems[:2], torch_flash=wrong)
    assert code == 0 and [row["config"] for row in rows] == ["scalar_vec8", "scalar_vec2", "torch_cudnn", "torch_flash",
                                                             "torch_efficient", "torch_math"]  # all of them, unless some are typed
    notes = {row["config"]: row["note"] for row in rows}
    assert notes["scalar_vec8"].count("max diff to ") == 4 and "max diff to torch_math 0.0e+00" in notes["scalar_vec8"]
    assert "max diff to torch_flash 0.0e+00" not in notes["scalar_vec8"] and notes["torch_math"] == "PyTorch 2.0"


def test_rows_of_peers(compared):
    """A problem that no line takes has no rows. Lines with another HEAD_DIM_V are not compared with the others; the note says so."""
    code, rows, err, courses = compared("scalar_vec8", "scalar_vec8", "HEAD_DIM_V=32", "torch:math", "--shape", "1,1,1,9,9,128",
                                        "--shape", "1,1,1,9,9,64", "--rested")
    assert code == 0 and {row["D"] for row in rows} == {"64"} and courses == [(engine.RESTED, 1)] * 2
    assert err == "peers.py: no line for D=128 : 1x1x1x9x9 is skipped\n"
    assert all("in 10 ms after 0.3 s of rest" in row["note"] for row in rows)
    assert [(row["config"], row["note"].partition("; V of 32")[1]) for row in rows] == [
        ("scalar_vec8", ""), ("torch_math", ""), ("scalar_vec8__HEAD_DIM_V_32", "; V of 32"), ("torch_math", "; V of 32")]


# ---- stress ----

class Changing(FakeKernel):
    """A kernel whose Nth run gives other bits or writes nothing."""

    def __init__(self, change, at):
        super().__init__()
        self.change, self.runs_left = change, at

    def prepare(self, gpu, tensors, problem):
        launch, *more = super().prepare(gpu, tensors, problem)

        def changed():
            self.runs_left -= 1
            if self.runs_left or self.change:
                launch()
            if not self.runs_left and self.change:
                self.change(gpu, tensors)
        return changed, *more


def flip_last_bit(name):
    def flip(gpu, tensors):
        size = dict(O=2 * 2 * 40 * 64, LSE=4 * 2 * 40)[name]
        gpu.memory[tensors.address[name]][size - 1] ^= 0x80
    return flip


@pytest.mark.parametrize("change,sentence", [
    (flip_last_bit("O"), "run 3 differs from the first one in 1 elements of O, the first O(0,1,39,63)"),
    (flip_last_bit("LSE"), "run 3 differs from the first one in 1 elements of LSE, the first LSE(0,1,39)"),
    (None, "run 3 differs from the first one in 5120 elements of O, the first O(0,0,0,0)")])
def test_stress_sees_a_bit_and_a_run_that_writes_nothing(change, sentence):
    problem = engine.parse_problem("1,2,1,40,50,64,fp16")
    others = {"good": FakeKernel(), "bad": Changing(change, 3), "late": Changing(change, 6)}
    found = dict(stress.stress(FakeGpu(), FakeKernel(line=LINE), others, None, problem, 5))
    assert found == {"alone": "", "good": "", "bad": sentence, "late": ""}
    wrong = FakeKernel(lambda O, LSE: O.fill(0), line=LINE)
    assert dict(stress.stress(FakeGpu(), wrong, {}, None, problem, 2))["alone"].startswith("O(")


@pytest.mark.long
def test_stress_of_a_line_on_the_cpu_backend():
    """The number of CTAs arrives: a line that is not persistent refuses it."""
    line, other = builds.parse_contenders(["wmma_persistent", "scalar_vec8"])
    kernel, plain = (engine.LoadedLine(one, builds.host_library(*one.words, program="tests/host_library.cu")) for one in (line, other))
    problem = engine.parse_problem("2,4,2,100,177,64,fp16,br")
    found = dict(stress.stress(HostGpu(kernel.library), kernel, {}, None, problem, 2))
    assert found == dict.fromkeys(("alone", "max_ctas_1", "max_ctas_3", "max_ctas_7"), "")
    with pytest.raises(engine.CudaError, match="max_ctas is for builds with USE_PERSISTENT_CTA=1"):
        stress.repeat(engine.Bench(HostGpu(plain.library), {}, {"": problem}), plain, problem, None, 1, 2)


class ChangingGradients(engine.LoadedBackward):
    """A line of the backward pass whose third run multiplies an element of a gradient."""

    def prepare(self, gpu, tensors, problem):
        launch, outputs, workspace = super().prepare(gpu, tensors, problem)
        runs = itertools.count(1)

        def changed():
            launch()
            gpu.synchronize()
            if next(runs) == 3:
                for name in self.names:
                    gpu.memory[tensors.address[name]].view(np.float16)[self.at] *= self.factor
        return changed, outputs, workspace


@pytest.mark.parametrize("names,factor,sentence", [
    ("dV", 1.001, "run 3 differs from the first one in 1 elements of dV, the first dV(0,0,7,7)"),
    ("dQ dV", 1.001, "run 3 differs from the first one in 1 elements of dV, the first dV(0,0,7,7)"),
    ("dQ", 1.001, ""), ("dQ", -1.0, "run 3 differs from the first one by a rel_rms of"), ("dQ", math.nan, "run 3 differs from")])
def test_stress_of_gradients(names, factor, sentence):
    """Bits of dK and dV must repeat. dQ of backward_mma5 is a sum in any order, so it may differ by rounding."""
    line, = builds.parse_contenders(["backward_mma5"])
    kernel = ChangingGradients(line, builds.host_library(*line.words, program="tests/host_library.cu"))
    kernel.names, kernel.at, kernel.factor = names.split(), 7 * 64 + 7, factor
    problem = engine.parse_problem("1,2,1,20,30,64,fp16,br")
    other = engine.LoadedBackward(line, kernel.library._name)
    found = dict(stress.stress(HostGpu(kernel.library), other, {"bad": kernel}, None, problem, 4))
    assert found["alone"] == "" and found["bad"].startswith(sentence) and bool(found["bad"]) == bool(sentence), found


@pytest.fixture
def stressed(monkeypatch):
    """Runs the command; returns the exit code, the rows and stderr. broken: lines that do not compile. wrong: (case, Sq)."""
    def run(*words, broken=(), wrong=(), refusal=""):
        tool.on_a_gpu(monkeypatch, FakeGpu(), lambda line: line)
        monkeypatch.setattr(builds, "build", lambda lines, arch, **_: {
            line: builds.Built(line, "path", "error: no" * (line.text in broken)) for line in lines})
        monkeypatch.setattr(builds.Tree, "refusal", lambda *_: refusal)
        monkeypatch.setattr(stress, "Hog", lambda gpu, path: path)
        monkeypatch.setattr(stress, "stress", lambda gpu, kernel, others, hog, problem, repeats: [
            (case, "words" * ((case, problem.Sq) == wrong)) for case in ("alone", *others) if hog == "path"])
        code, out, err = tool.run("stress", *words, "--repeats", "7")
        return code, out.splitlines(), err
    return run


def test_rows_and_exit_codes_of_stress(stressed, monkeypatch, tmp_path):
    """The exit code is the worst of the lines'. A variant that sdpa.cu refuses is no error; the line itself is."""
    code, rows, err = stressed("wgmma_plain", "wgmma_decode", broken=["wgmma_plain STAGES=4"], wrong=("stages_2", 1000))
    assert code == 3 and rows[:7] == ["config,case,problem,repeats,check", *(
        f"wgmma_plain,{case},{name},7,{'FAIL' if (case, name[:6]) == ('stages_2', '2x8x2x') else 'PASS'}"
        for name in ("1x8x8x512x512", "2x8x2x1000x1777_br", "1x8x8x4096x4096_br") for case in ("alone", "stages_2"))]
    assert rows[7].startswith("wgmma_decode,alone,") and err == ("stress: wgmma_plain STAGES=4: not built: error: no\n"
                                                               "stress: wgmma_plain, stages_2, 2x8x2x1000x1777_br: words\n")
    assert stressed("wgmma_plain", "wgmma_decode", wrong=("stages_4", 512))[0] == 1
    assert stressed("wgmma_plain", broken=["wgmma_plain STAGES=4"], refusal="STAGES: no")[0] == 0
    assert stressed("wgmma_plain", broken=["wgmma_plain"], refusal="STAGES: no")[0] == 3
    (tmp_path / "two.txt").write_text("good USE_WGMMA=1 BLOCK_M=64 VEC_WIDTH=8\nbad FOO=1\n")
    monkeypatch.setenv("SDPA_CONFIGS", str(tmp_path / "two.txt"))
    code, _, err = stressed()
    assert code == 1 and "two.txt:2: no knob is called FOO" in err


# ---- sweep ----

@pytest.mark.parametrize("kinds,bad_line,code", [
    ("ok,PASS ok,PASS", "", 0), ("ok,PASS skipped,", "", 0), ("ok,PASS ok,FAIL", "", 1), ("ok,PASS error,", "", 1), ("ok,PASS", "", 1),
    ("ok,PASS ok,PASS", "bad FOO=1\n", 1)])
def test_the_command_sweep(kinds, bad_line, code, monkeypatch, tmp_path):
    """Every line runs all its problems with the seed of its position in configs.txt; negative controls are excluded."""
    (tmp_path / "few.txt").write_text("first VEC_WIDTH=2\nracy SYNC_POLICY=0 expect=FAIL\nlast VEC_WIDTH=2\n" + bad_line)
    (tmp_path / "build-cpu").mkdir()
    for name, found in (("first", "ok,PASS ok,PASS"), ("racy", ""), ("last", kinds)):
        rows = "".join(f"{name},{kind},64,fp16,GPU,90,13.0,1,abc\n" for kind in found.split())
        (tmp_path / f"{name}.csv").write_text("config,status,check,D,dtype,device,sm,cuda,driver,git_sha\n" + rows)
        program = tmp_path / f"build-cpu/sweep_{name}"
        program.write_text(f"#!/bin/sh\necho $* >{tmp_path}/{name}.words; echo words of {name} >&2; cat {tmp_path}/{name}.csv\n")
        program.chmod(0o755)
    monkeypatch.setenv("SDPA_CONFIGS", str(tmp_path / "few.txt"))
    monkeypatch.setattr(builds, "BUILD", str(tmp_path / "build"))
    monkeypatch.setattr(builds, "cmake_build", lambda *_, **__: None)
    found, out, err = tool.run("sweep", *"2 --series 100 --cpu --jobs 1".split())
    rows = list(csv.DictReader(io.StringIO(out)))
    assert found == code and [row["config"] for row in rows] == ["first", "last"] and "words of last" in err
    assert not (tmp_path / "racy.words").exists() and (tmp_path / "last.words").read_text() == "--header --sweep 2 --seeds 103\n"
    counts = [kinds.split().count(kind) for kind in ("ok,PASS", "ok,FAIL", "error,", "skipped,")]
    assert [*rows[1].values()] == ["last", "103", *map(str, (sum(counts), *counts)), "64", "fp16", "GPU", "90", "13.0", "1", "abc"]
    assert ("few.txt:4: no knob is called FOO" in err) == bool(bad_line)


# ---- what is refused ----

@pytest.mark.parametrize("words,sentence", [
    ("ablate nobody", "ablate: nobody: no line of configs.txt has that name"),
    ("ab backward_mma BLOCK_N=40", "ab: backward_mma BLOCK_N=40: BLOCK_N: the scalar kernel takes multiples of 8"),
    ("ab backward_mma mma_lazy", "ab: backward_mma computes gradients, and mma_lazy does not"),
    ("ab mma_lazy BACKWARD=1", "ab: BACKWARD=1: a line has either the forward or the backward pass"),
    ("ab mma_lazy ONE_PASS=1", "ab: ONE_PASS=1: a knob of sdpa_backward.cu, and mma_lazy is a line of the forward pass"),
    ("micro --from backward_mma", "micro: backward_mma: a line of the backward pass"),
    ("micro --from hopper", "micro: hopper: its CTAs split the keys, pack heads or choose the tile; append USE_TUNED=0"),
    (f"micro --from mma_lazy --output {__file__}", f"micro: --output {__file__}: this file already exists"),
    ("micro --backward --head-dim 64", "micro: --backward has a line of its own; omit --family, --from and --head-dim"),
    ("micro --from mma_lazy --family wgmma", "micro: --from mma_lazy has the family mma; omit --family wgmma"),
    ("tune --from backward_mma --dry-run --budget 1", "tune: backward_mma: --dry-run has no cost model of the backward pass"),
    ("tune --dry-run --fix BLOCK_Q=3", "tune: BLOCK_Q=3: no knob is called BLOCK_Q in the working tree; did you mean BLOCK_N?"),
    ("tune --dry-run --fix BLOCK_M=5000", "tune: --fix BLOCK_M=5000: BLOCK_M: not a legal value"),
    ("tune --dry-run --budget 0.05", "tune: --budget 0.05: 3 s is less than the 6 s that a candidate takes"),
    ("tune --dry-run --shape long,64,fp16 --head-dim 128", "tune: --shape long has D=64 fp16, but 128 fp16 was requested"),
    ("tune --replay /no/such", "tune: /no/such: no such file"),
    (f"fit --check {ROOT}/configs.txt", f"fit: {ROOT}/configs.txt: want rows that ./run_all.sh fit wrote, with"),
    (f"fit --from {fit.newest('ampere')}", "fit: these rows are not of the tiles of hopper; type another --table"),
    ("fit --check --head-dim 64", "fit: --check takes files by themselves and judges all of their rows"),
    ("fit --seed 3", "fit: --seed 3: the seed of --drawn N; add that option"),
    ("report --results /no/such", "report: /no/such: no such folder"),
    (f"report --results {ROOT}/docs", f"report: {ROOT}/docs has no CSV"),
    ("rungs x", "rungs: x: no such ladder; docs/LADDER.md has scalar, wgmma, decode, backward"),
    ("sanitize [", "sanitize: REGEX [: not a regular expression"), ("sanitize --tool lint", "sanitize: --tool: invalid choice"),
    (f"gates --steps {ROOT}/configs.txt", f"gates: {ROOT}/configs.txt lacks the columns line, over, shape, low, high; measure"),
    ("ablate", "ablate: which line?"), ("stress torch:math", "stress: it runs lines of configs.txt"),
    ("extract backward_mma USE_BIAS=1", "extract: backward_mma: it cannot extract the gradient of a bias"),
    ("profile wmma_all mma_lazy", "profile: one line at a time"),
    ("sweep 0", "sweep: N 0: want a whole number from 1 to 999999"),
    ("sweep --jobs x", "sweep: --jobs x: want a whole number from 1 to"),
    ("fit --tabel x", "fit: --tabel: no such option; did you mean --table?"),
    ("gates --only", "gates: --only: its value is missing"),
    *(pytest.param(words, f"{words.split()[0]}: it {does} and there is no GPU here", marks=needs_no_gpu) for words, does in (
        ("stress", "runs kernels side by side"), ("sanitize", "runs kernels"), *((words, "times kernels") for words in (
            "profile wmma_all -- --help", "ablate wmma_all", "peers mma_lazy", "rungs", "fit", "micro --from mma_lazy"))))])
def test_refusals(words, sentence):
    """One sentence that starts with the command, exit code 2, and nothing on stdout."""
    code, out, err = tool.run(*words.split())
    assert code == 2 and err.startswith(sentence) and err.count("\n") == 1 and not out, err
