"""What ./run_all.sh profile, stress and sweep make of what they run, which is a fake here, and what they refuse.
usage: python3 -m pytest tests/test_tools.py"""
import csv
import io
import os
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import builds  # noqa: E402
import cli  # noqa: E402
import engine  # noqa: E402
import ncu  # noqa: E402
import stress  # noqa: E402
import sweep  # noqa: E402
import tool  # noqa: E402
from test_engine import FakeGpu, FakeKernel, HostGpu  # noqa: E402

LINE, = builds.parse_contenders(["scalar_vec8"])
needs_no_gpu = pytest.mark.skipif(engine.find_gpu() is not None, reason="there is a GPU")


def run_all(*words):
    done = subprocess.run([os.path.join(ROOT, "run_all.sh"), *words], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


# ---- options ----

USAGE = """usage: it WORD... [OPTION...]
  --plain           a flag
  --shape S         as for ab; repeatable
  --mask off|br     one of these (default off)
  --from LINE       text that goes on
                    in a second line (default here)
  --jobs N          at once, from 2 to 9 (default 4)
exit: 0"""


def test_options_are_read_from_the_usage():
    found = vars(cli.parse_options(USAGE, 1, "word --shape a --plain --shape b".split()))
    assert found == dict(words=["word"], help=False, plain=True, shape=["a", "b"], mask="off", from_="here", jobs=4)
    found = cli.parse_options(USAGE, 0, "--jobs 9 --mask br --from x".split())
    assert (found.jobs, found.mask, found.from_, found.shape, found.plain) == (9, "br", "x", None, False)


@pytest.mark.parametrize("words,sentence", [
    ("--jobs 1", "--jobs 1: want a whole number from 2 to 9"), ("--jobs x", "--jobs x: want a whole number from 2 to"),
    ("--mask tl", "--mask: invalid choice: 'tl'"), ("--shape", "--shape: its value is missing"),
    ("a b", "b: no such option"), ("--plai", "--plai: no such option")])
def test_options_are_refused_in_a_sentence(words, sentence):
    with pytest.raises(cli.Refused) as refused:
        cli.parse_options(USAGE, 1, words.split())
    assert str(refused.value).startswith(sentence) and refused.value.code == 2


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


def verdict(family):
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows(zip(*[("ID", "", "0"), ("Host Name", "", "127.0.0.1"), *REPORT]))
    row = dict(zip("config,family,shape,B,Hq,Hkv,Sq,Sk,D,sm,device,causal".split(","),
                   f"line,{family},mission,1,2,1,512,512,64,90,GPU,br".split(",")))
    return ncu.verdict(row, ncu.counters_of("==PROF== words\n" + out.getvalue()))


@pytest.mark.parametrize("sentence", [
    "line at mission causal br on GPU: 1500.00 us under ncu, SM at 1800 MHz",
    "tensor pipe     60.0%  93% of what mma.sync can reach", "25.0% of its wavefronts are bank conflicts",
    # Q and O 2*512*64, K and V 1*512*64 elements of 2 bytes each, LSE 2*512 floats
    "4.0 MB, 10.1 times the tensors", "1.0 MB, 2.52 of the 0.4 MB", "wait 75%", "tensor pipe >= 50%: yes; DRAM < 50%: yes",
    "bound by               tensor pipe, at 93% of its limit"])
def test_a_profile_says(sentence):
    lines = verdict("mma")
    assert len(lines) == 11 and sentence in "\n".join(lines)


def test_wgmma_is_not_held_against_the_limit_of_mma_sync():
    assert "bound by               latency: the busiest unit is the tensor pipe at 60%" in verdict("wgmma")[-1]


def test_no_profile_without_counters():
    with pytest.raises(ValueError):
        ncu.counters_of("==ERROR== nothing")


# ---- stress ----

class Changing(FakeKernel):
    """Has other bits, or writes nothing, in its Nth run."""

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


def test_stress_of_a_wrong_first_run():
    wrong = FakeKernel(lambda O, LSE: O.fill(0), line=LINE)
    (case, sentence), = stress.stress(FakeGpu(), wrong, {}, None, engine.parse_problem("1,2,1,40,50,64,fp16"), 2)
    assert case == "alone" and sentence.startswith("O(")


def test_stress_of_a_line_on_the_cpu_backend():
    line, = builds.parse_contenders(["wmma_persistent"])
    kernel = engine.LoadedLine(line, builds.host_library(*line.words, program="tests/host_library.cu"))
    problem = engine.parse_problem("2,4,2,100,177,64,fp16,br")
    found = dict(stress.stress(HostGpu(kernel.library), kernel, {}, None, problem, 2))
    assert found == dict.fromkeys(("alone", "max_ctas_1", "max_ctas_3", "max_ctas_7"), "")
    plain = engine.LoadedLine(LINE, builds.host_library(*LINE.words, program="tests/host_library.cu"))
    bench = engine.Bench(HostGpu(plain.library), {}, {"": problem})
    with pytest.raises(engine.CudaError, match="max_ctas is for builds with USE_PERSISTENT_CTA=1"):
        stress.repeat(bench, plain, problem, None, 1, 2)  # so the number does arrive


def test_rows_and_exit_codes_of_stress(monkeypatch, capsys):
    line, = builds.parse_contenders(["wgmma_plain"])
    assert list(stress.variants(line)) == ["stages_2", "stages_4"] and line.knob("STAGES") == "3"
    good, bad = stress.variants(line).values()
    built = {one: builds.Built(one) for one in (line, good)} | {bad: builds.Built(bad, trouble="error: not enough memory")}
    monkeypatch.setattr(engine, "load", lambda line, gpu, built: line)
    monkeypatch.setattr(stress, "stress", lambda gpu, kernel, others, hog, problem, repeats: [
        ("alone", ""), *((case, "words" * (problem.Sq == 1000)) for case in others)])
    assert stress.stress_line(None, line, built, None, 9) == 3
    out, err = capsys.readouterr()
    assert out.splitlines() == [f"wgmma_plain,{case},{name},9,{check}" for name, wrong in (
        ("1x8x8x512x512", "PASS"), ("2x8x2x1000x1777_br", "FAIL"), ("1x8x8x4096x4096_br", "PASS"))
        for case, check in (("alone", "PASS"), ("stages_2", wrong))]
    assert err == ("stress: wgmma_plain STAGES=4: not built: error: not enough memory\n"
                   "stress: wgmma_plain, stages_2, 2x8x2x1000x1777_br: words\n")
    built[bad] = builds.Built(bad)
    assert stress.stress_line(None, line, built, None, 9) == 1


def test_a_refused_variant_is_no_error(monkeypatch):
    line, = builds.parse_contenders(["hopper_d128"])
    built = {one: builds.Built(one, trouble="static assertion failed") for one in stress.variants(line).values()
             if one.tree.refusal(one.words)}
    assert built
    built.update({one: builds.Built(one) for one in (line, *stress.variants(line).values()) if one not in built})
    monkeypatch.setattr(engine, "load", lambda line, gpu, built: line)
    monkeypatch.setattr(stress, "stress", lambda *_: [("alone", "")])
    assert stress.stress_line(None, line, built, None, 9) == 0
    built[line] = builds.Built(line, trouble="static assertion failed")
    assert stress.stress_line(None, line, built, None, 9) == 3


# ---- sweep ----

def test_the_tally_of_a_sweep(tmp_path):
    header = "config,status,check,D,dtype,device,sm,cuda,driver,git_sha\n"
    tail = ",64,fp16,GPU,90,13.0,1,abc\n"
    (tmp_path / "line.csv").write_text(header + "".join(
        f"line,{kind}{tail}" for kind in ("ok,PASS", "ok,PASS", "ok,FAIL", "error,", "skipped,")))
    row = sweep.tally("line", 7, str(tmp_path / "line"))
    assert ",".join(str(row[name]) for name in sweep.COLUMNS) == "line,7,5,2,1,1,1,64,fp16,GPU,90,13.0,1,abc"
    (tmp_path / "none.csv").write_text("")
    assert sweep.tally("none", 8, str(tmp_path / "none"))["problems"] == 0


@pytest.mark.long
@needs_no_gpu
def test_a_sweep_on_the_cpu_backend():
    code, out, err = run_all("sweep", "3", "--only", "^scalar_(vec2|racy)$", "--series", "5", "--cpu")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and [(row["config"], row["series"], row["passed"]) for row in rows] == [("scalar_vec2", "7", "3")], err


# ---- what is refused ----

@pytest.mark.parametrize("words,sentence", [
    ("ablate nobody", "ablate: nobody: no line of configs.txt has that name"),
    ("ablate", "ablate: which line?"),
    ("ablate wmma_all --rounds 0", "ablate: --rounds: no such option"),
    ("profile nobody", "profile: nobody: no line of configs.txt has that name"),
    ("profile", "profile: which line?"),
    ("profile wmma_all mma_lazy", "profile: one line at a time"),
    ("profile wmma_all --frob", "profile: --frob: no such option"),
    ("profile wmma_all --shape huge", "profile: --shape huge: want small, mission"),
    ("stress nobody", "stress: nobody: no line of configs.txt has that name"),
    ("stress --repeats 0", "stress: --repeats 0: want a whole number from 1 to 999999"),
    ("stress --frob", "stress: --frob: no such option"),
    ("sweep 0", "sweep: N 0: want a whole number from 1 to 999999"),
    ("sweep --jobs 100", "sweep: --jobs 100: want a whole number from 1 to 99"),
    ("sweep --series x", "sweep: --series x: want a whole number from 0"),
    ("sweep --only nosuch", "sweep: --only nosuch: no line of configs.txt has such a name"),
    ("sweep --only [", "sweep: --only [: not a regular expression"),
    pytest.param("stress", "stress: it runs kernels side by side and there is no GPU here", marks=needs_no_gpu),
    pytest.param("profile wmma_all", "profile: it times kernels and there is no GPU here", marks=needs_no_gpu),
    pytest.param("gates --time", "gates: it times kernels and there is no GPU here; without --time", marks=needs_no_gpu),
    pytest.param("ablate wmma_all", "ablate: it times kernels and there is no GPU here", marks=needs_no_gpu)])
def test_refusals(words, sentence):
    code, out, err = tool.run(*words.split())
    assert code == 2 and err.startswith(sentence) and err.count("\n") == 1 and not out


@needs_no_gpu
def test_peers_without_a_gpu():
    done = builds.run([os.path.join(ROOT, "tools", "peers.py"), "mma_lazy"])
    assert done.returncode == 2 and done.stderr.startswith("peers.py: it times kernels and there is no GPU here")
