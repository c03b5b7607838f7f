"""Tests of docs/LADDER.md: its diffs match extracts, its tables match a CSV. Tests of ./run_all.sh rungs, which writes that
CSV, with a fake GPU and a fake ncu.  usage: python3 -m pytest tests/test_rungs.py"""
import csv
import io
import itertools
import re
import subprocess
from pathlib import Path

import pytest

import builds
import engine
import ladders
import ncu
import page
import report_rows
import steps
import tool
from test_engine import FakeGpu, FakeKernel

ROOT = Path(builds.ROOT)
PAGE = (ROOT / "docs/LADDER.md").read_text(encoding="utf-8")
RUNGS = {rung.name: rung for one in ladders.LADDERS.values() for rung in one.rungs}
BLOCKS = dict(re.findall(r"<!-- rung_(\w+):begin[^\n]*\n(.*?)<!-- rung_\1:end -->", PAGE, re.S))


# ---- the page ----

def test_every_rung_has_its_paragraph_and_its_diff():
    """The paragraphs are in the order of the ladders."""
    assert re.findall(r"^\*\*([\w]+)[.:]", PAGE, re.M) == [rung.name for one in ladders.LADDERS.values() for rung in one.rungs]
    assert [*BLOCKS] == [name for name, rung in RUNGS.items() if rung.base and rung.shows != "-"]
    for name, block in BLOCKS.items():
        assert bool(re.findall(r"^[-+ ]", block, re.M)) == bool(RUNGS[name].shows), name
        assert all(re.search(pattern, block) for pattern in ladders.patterns(RUNGS[name])), name


def test_rungs_are_lines_one_step_from_their_base():
    names = builds.Tree().read_configs()[0]
    for one in ladders.LADDERS.values():
        for rung in one.rungs:
            assert ladders.line_of(rung.line).is_backward == ladders.is_backward(one)
            assert rung.base in [before.name for before in one.rungs[:one.rungs.index(rung)]] + [""]
            assert not rung.base or ladders.step(rung, RUNGS[rung.base])
            for what in one.problems.values():
                line = ladders.contender(rung, what)
                assert line is None or f",{line.D} {line.dtype}" in what and line.name in names


@pytest.mark.long
def test_all_diffs_are_todays():
    for name, text in ladders.diff_sections("").items():
        assert BLOCKS[name[len("rung_"):]] == text, f"docs/LADDER.md is behind sdpa.cu: ./run_all.sh results --diffs '^{name[5:]}$'"


# ---- the tables ----

def test_a_table_of_rungs():
    """Every rung in 50, 51, ... us, except for a few."""
    mission, long, big = ladders.SQUARE.values()
    times = {(ladders.contender(rung, what).label, what): 50.0 + n for one in ladders.LADDERS.values() for what in one.problems.values()
             for n, rung in enumerate(one.rungs) if ladders.contender(rung, what)}
    times |= {("scalar_vec8", mission): 25, ("scalar_vec8", long): 90, ("torch_cudnn", mission): 40,
              ("torch_fa3", big.replace("fp16", "bf16")): 10}
    rows, unknown = [], dict.fromkeys((*report_rows.KINDS["rungs"].columns, "driver", "cuda", "unit", "unit_share", "waits_for"), "")
    for (name, what), us in times.items():
        sizes, dtype = what.split()
        row = unknown | dict(zip("B Hq Hkv Sq Sk D".split(), sizes.split(","))) | {"pass": name.partition("_")[0]} | dict(
            config=name, graph_us=us, tflops=1000 / us, dtype=dtype, causal="off", device="GPU", peak_share=f"{1 / us:.4f}",
            note="PyTorch 2.0 with cuDNN 9; 400 W")
        if name not in report_rows.PEERS:
            row.update(check="PASS", unit="shared memory", unit_share=f"{us:.1f}", waits_for="barrier", note="")
        rows.append(row)
    source = report_rows.Source(Path("2026-01-02-GPU-rungs.csv"), "rungs", rows)
    text, drawings = ladders.sections([source], page.table, page.picture, page.provenance)
    assert [*text] == [name + "_rungs" for name in ladders.LADDERS] and [*drawings] == [f"ladder/{name}.svg" for name in ladders.LADDERS]
    for line in ("| rung | mission, µs | long, µs | 4,16,16,4096,4096, µs | TFLOP/s | of peak | what binds |",
                 "| scalar_vec8 | 25.0 (2.00x) | 90.0 (0.56x) | 51.0 (0.98x) | 40 / 11 / 20 | 4.0% / 1.1% / 2.0% | "
                 "shared memory 25%, barrier / shared memory 90% / shared memory 51%, barrier |",
                 # mma_tile64 is compared with wmma_async2, not with the rung before it
                 "| mma_tile64 | 57.0 (0.96x) | 57.0 (0.96x) |", "| cuDNN | 40.0 | – | – | 25 / – / – | 2.5% / – / – |  |",
                 "| FlashAttention-3 (bf16) | – | – | 10.0 | – / – / 100 |",
                 "Competitors: PyTorch 2.0 with cuDNN 9. GPU, 2026-01-02: [results/ladder/2026-01-02-GPU-rungs.csv](../results/"):
        assert line in text["scalar_rungs"], text["scalar_rungs"]
    assert "| backward_mma | 51.0 (0.98x) | 51.0" in text["backward_rungs"] and "cuDNN" not in text["backward_rungs"]
    assert "| wgmma_split2 | 55.0 (0.96x) | 55.0 (0.96x) | – | 18 / 18 / – |" in text["wgmma_rungs"]
    assert "Without a row" not in "".join(text.values())
    assert all(f">{words}<" in drawings["ladder/scalar.svg"] for words in ("scalar_vec8", "90.0", "cuDNN", "mission"))


def claimed_losses(name, titles):
    """The problems of TITLES at which the rung loses according to its paragraph's title."""
    words = re.search(rf"^\*\*{name}[.:]([^*]*)\*\*", PAGE, re.M)[1]
    where = {"Loses everywhere.": {*titles}, "Gains only at mission.": {*titles} - {"mission"}, "Loses at mission.": {"mission"},
             "Loses at long.": {"long"}, "Loses on the large problem.": {*titles} - {"mission", "long"}}
    assert ("Loses" in words or "Gains" in words) == any(claim in words for claim in where), words
    return set().union(*(found for claim, found in where.items() if claim in words))


def test_rungs_that_lose_do():
    """In the newest CSV a rung is slower where its paragraph's title says that it loses; elsewhere it loses at most 15%."""
    sources = report_rows.newest(ROOT / "results")["rungs"]
    for source, one in itertools.product(sources, ladders.LADDERS.values()):
        at = ladders.measured(source, ladders.is_backward(one))
        for rung in filter(lambda rung: rung.base, one.rungs):
            losses = claimed_losses(rung.name, one.problems)
            for title, what in one.problems.items():
                lines = [ladders.contender(each, what) for each in (rung, RUNGS[rung.base])]
                rows = [line and at.get(what, {}).get(line.label) for line in lines]  # the page says what has none
                if all(rows):
                    us, before = (row["graph_us"] for row in rows)
                    assert title not in losses or us > before, f"{rung.name} gains at {title}, and docs/LADDER.md says that it loses"
                    assert title in losses or us < 1.15 * before, f"{rung.name} loses at {title}, and docs/LADDER.md does not say so"
    if not sources:
        pytest.skip("./run_all.sh rungs has not been measured yet")


# ---- rungs, on a fake GPU ----

SMALL = {"mission": "1,2,1,40,50,64 fp16", "4,16,16,4096,4096": "1,2,1,40,50,128 fp16"}


class Gpu(FakeGpu):
    """Records the names of the driver functions called."""
    attribute = {engine.SM_COUNT: 132, 13: 1_980_000, 36: 3_201_000, 37: 6144}.get

    def __init__(self):
        super().__init__(noise=1e-5)
        self.calls = []

    def __call__(self, function, *_):
        self.calls.append(function)


@pytest.fixture(name="ran")
def make_ran(monkeypatch, tmp_path):
    """Runs the command; returns its exit code, the CSV's rows, stderr, the GPU and ncu's arguments."""
    monkeypatch.setattr(ladders, "LADDERS", {"scalar": ladders.ladder(SMALL, "scalar_minimal\nscalar_vec8 | | - | x")})

    def run(*words, harm=lambda O, LSE: None, peers=("torch:cudnn", "torch:fa3"), ncu_said=None, path="/usr/bin/ncu"):
        gpu, output, commands = Gpu(), tmp_path / "rungs.csv", []

        def kernel_of(one):
            is_peer = isinstance(one, builds.Torch)
            if is_peer and one.text not in peers:
                raise builds.Refused(f"{one.text}: it is missing")
            return FakeKernel(harm if one.label == "scalar_vec8" else lambda O, LSE: None, 40.0 if is_peer else 20.0, one, one.text)

        def run_ncu(command, **_):
            if command[0] != "ncu":
                return subprocess.run(command, capture_output=True, text=True, check=False)
            commands.append(command)
            return subprocess.CompletedProcess(command, 0, ncu_said or printed(3), "")
        tool.on_a_gpu(monkeypatch, gpu, kernel_of)
        monkeypatch.setattr(builds, "run", run_ncu)
        monkeypatch.setattr(steps.shutil, "which", lambda name: path)
        monkeypatch.setattr(engine.importlib.metadata, "version", lambda name: "3.1")
        code, _, err = tool.run("rungs", "--output", str(output), *words)
        rows = list(csv.DictReader(io.StringIO(output.read_text()))) if output.exists() else []
        assert not rows or report_rows.read(output, ["rungs"]).rows
        return code, rows, err, gpu, commands
    return run


def printed(launches):
    """ncu's output for `launches` launches: shared memory is busiest (90%) in the first, issue slots in the others."""
    names = ["ID", ncu.UNITS["shared memory"], ncu.UNITS["issue slots"], ncu.STALLED.format("barrier"), ncu.STALLED.format("wait")]
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows([names, [""] * 5, *([n, 90 if n == 0 else 10, 40, 3, 1] for n in range(launches))])
    return "==PROF== words\n" + out.getvalue()


def test_rungs_and_peers_are_rows(ran):
    code, rows, err, _, (command,) = ran()
    assert code == 0 and [(row["config"], row["D"], row["dtype"], row["check"]) for row in rows] == [
        ("scalar_minimal", "64", "fp16", "PASS"), ("scalar_vec8", "64", "fp16", "PASS"), ("torch_cudnn", "64", "fp16", ""),
        ("torch_fa3", "64", "bf16", ""), ("scalar_minimal__HEAD_DIM_128", "128", "fp16", "PASS"), ("torch_cudnn", "128", "fp16", ""),
        ("torch_fa3", "128", "bf16", "")]
    assert all(abs(float(row["graph_us"]) - (40 if row["config"].startswith("torch") else 20)) < 0.1 for row in rows)
    assert [(row["unit"], row["unit_share"], row["waits_for"]) for row in rows if row["check"]] == [
        ("shared memory", "90.0", "barrier"), ("issue slots", "40.0", "barrier"), ("issue slots", "40.0", "barrier")]
    # 4 * 64 * 40 * 50 * 2 FLOP at 4096 * 132 * 1.98e9 are 0.96 ns; 2 * 64 * 2 * (2 * 40 + 50) bytes at 4917 GB/s 6.8 ns
    assert (rows[0]["bound"], rows[0]["peak_share"]) == ("memory", "0.0003") and rows[0]["device"] == "Fake"
    assert rows[2]["note"] == "PyTorch 2.0 with cuDNN 9.27.0" and rows[3]["note"] == "fa3-fwd 3.1"
    assert err.startswith("rungs: without torch:flash: it is missing\n")
    assert command[-3:] == ["rungs", "scalar", "--launch"] and "--profile-from-start" in command
    filtered = command[command.index("--kernel-name") + 1]
    assert all(re.search(filtered[len("regex:"):], f"sdpa_{kernel}") for kernel in ("scalar", "wmma", "mma", "wgmma_columns", "backward_kv",
                                                                                                   "backward_wgmma"))
    assert not re.search(filtered[len("regex:"):], "sdpa_merge sdpa_plan sdpa_backward_rows sdpa_backward_q sdpa_backward_convert_rows")


def test_peak_shares():
    problem = engine.parse_problem("4,16,16,4096,4096,128,fp16")
    flops, bytes_s = steps.peaks(Gpu())
    assert round(flops / 1e12) == 1071 and round(bytes_s / 1e9) == 4917
    assert steps.share(problem, 1000, flops, bytes_s) == dict(peak_share="0.5135", bound="matrix")
    assert steps.share(problem, 1000, flops, bytes_s, True) == dict(peak_share="1.2838", bound="matrix")  # 2.5 times
    decode = engine.parse_problem("32,32,8,1,8192,128,fp16")
    assert steps.share(decode, 239, flops, bytes_s, True)["peak_share"] == "1.8284"  # twice the tensors
    assert steps.share(decode, 239, flops, bytes_s) == dict(peak_share="0.9142", bound="memory")


def test_a_wrong_rung_fails(ran):
    code, rows, *_ = ran(harm=lambda O, LSE: O.fill(0))
    assert code == 1 and [row["check"] for row in rows if row["config"] == "scalar_vec8"] == ["FAIL"]


@pytest.mark.parametrize("more,sentence", [
    (dict(path=None), "ncu is missing; add the folder of Nsight Compute"),
    (dict(ncu_said=printed(2)), "ncu saw 2 of 3 launches: ==PROF== words")])
def test_without_counters_there_are_times(ran, more, sentence):
    code, rows, err, *_ = ran(peers=(), **more)  # which are written before ncu is asked
    assert code == 0 and len(rows) == 3 and not any(row["unit"] for row in rows) and all(row["graph_us"] for row in rows)
    assert f"rungs: no limiting units in the rows: {sentence}" in err


def test_what_ncu_looks_at(ran):
    """ncu profiles the second launch of each kernel at each problem."""
    code, rows, _, gpu, commands = ran("--launch")
    assert not code and not rows and not commands and gpu.calls == ["cuProfilerStart", "cuProfilerStop"] * 3
    assert not gpu.memory
