"""What ./run_all.sh profile, stress and sweep make of their programs, which are fakes here, and what they refuse.
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
import engine  # noqa: E402
import ncu  # noqa: E402
import stress  # noqa: E402
import sweep  # noqa: E402

needs_no_gpu = pytest.mark.skipif(engine.find_gpu() is not None, reason="there is a GPU")


def run_all(*words):
    done = subprocess.run([os.path.join(ROOT, "run_all.sh"), *words], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


# ---- profile ----

REPORT = [("gpu__time_duration.sum", "us", "1,500.00"), ("sm__cycles_elapsed.avg.per_second", "Ghz", "1.80"),
          ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", "%", "60.00"),
          ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed", "%", "40.00"),
          ("smsp__issue_active.avg.pct_of_peak_sustained_active", "%", "39.00"),
          ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", "", "1,000"),
          ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "", "250"), ("lts__t_bytes.sum", "Mbyte", "4.00"),
          ("dram__bytes_read.sum", "Kbyte", "900.00"), ("dram__bytes_write.sum", "byte", "100,000"),
          ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", "%", "3.00"),
          ("smsp__average_warps_issue_stalled_wait_per_issue_active.ratio", "", "3"),
          ("smsp__average_warps_issue_stalled_selected_per_issue_active.ratio", "", "1")]


def verdict(family):
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows(zip(*[("ID", "", "0"), ("Host Name", "", "127.0.0.1"), *REPORT]))
    row = dict(zip("config,family,shape,B,Hq,Hkv,Sq,Sk,D,sm,device,causal".split(","),
                   f"line,{family},mission,1,2,1,512,512,64,90,GPU,br".split(",")))
    return ncu.verdict(row, ncu.Counters("==PROF== words\n" + out.getvalue()))


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
        ncu.Counters("==ERROR== nothing")


# ---- stress ----

@pytest.fixture
def program(tmp_path):
    """Makes a program that prints its arguments and these rows, and ends so."""
    def make(name, rows, code):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho \"$@\" >{path}.args\nprintf '{rows}'\nexit {code}\n")
        path.chmod(0o755)
        return str(path)
    return make


def test_rows_and_exit_codes_of_stress(program, capsys):
    line, = builds.parse_contenders(["wgmma_plain"])
    assert list(stress.variants(line)) == ["stages_2", "stages_4"] and line.knob("STAGES") == "3"
    good, bad = stress.variants(line).values()
    built = {line: builds.Built(line, program("own", "wgmma_plain,alone,p,9,PASS\\nwgmma_plain,beside,p,9,PASS\\n", 0)),
             good: builds.Built(good, program("good", "wgmma_plain__STAGES_2,alone,p,9,FAIL\\n", 1)),
             bad: builds.Built(bad, trouble="error: not enough memory")}
    assert list(stress.stress(line, built, 9)) == [0, 1, 3]
    out, err = capsys.readouterr()
    assert out == "wgmma_plain,alone,p,9,PASS\nwgmma_plain,beside,p,9,PASS\nwgmma_plain,stages_2,p,9,FAIL\n"
    assert err == "stress: wgmma_plain STAGES=4: not built: error: not enough memory\n"
    own, other = (open(built[one].path + ".args").read().split() for one in (line, good))
    assert own == ["--repeats", "9", "--save", built[line].path + ".bits"] and other[2:] == ["--like", own[3]]


def test_a_program_that_crashes_is_an_error_and_a_refused_variant_is_none(program, capsys):
    line, = builds.parse_contenders(["wgmma_swap32"])
    built = {one: builds.Built(one, trouble="static assertion failed") for one in stress.variants(line).values()}
    refused = [one for one in built if one.tree.refusal(one.words)]
    built[line] = builds.Built(line, program("own", "", 7))
    codes = list(stress.stress(line, built, 9))
    assert codes[0] == 3 and codes.count(0) == len(refused) and "ended with exit code 7" in capsys.readouterr().err


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
    code, out, err = run_all(*words.split())
    assert code == 2 and err.startswith(sentence) and err.count("\n") == 1 and not out


@needs_no_gpu
def test_peers_without_a_gpu():
    done = builds.run([os.path.join(ROOT, "tools", "peers.py"), "mma_lazy"])
    assert done.returncode == 2 and done.stderr.startswith("peers.py: it times kernels and there is no GPU here")
