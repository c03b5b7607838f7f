"""Tests of ./run_all.sh micro without a GPU: tiles, arithmetic on a fake GPU's times, a search that begins with its tiles, and
parts of the backward loop on the CPU backend.
usage: python3 -m pytest tests/test_micro.py"""
import csv
import os
import re
import shlex
import types
from pathlib import Path

import pytest

import backward_parts
import builds
import engine
import micro
import report_rows
import search
import tool
import tune
from test_engine import FakeGpu, FakeKernel, HostGpu

ROOT = builds.ROOT
TREE = builds.Tree()


def line_of(*words):
    return search.parse_line(TREE, " ".join(words))


# ---- which tiles ----

H200 = {39: 2048, 81: 233472, 82: 65536, 106: 32, 111: 1024}


def test_ctas_per_sm_are_those_that_cuda_counts():
    """Compares with cudaOccupancyMaxActiveBlocksPerMultiprocessor, which the rows of timed lines recorded."""
    source, = report_rows.newest(Path(ROOT, "results"))["lines"]
    rows = {row["config"]: row for row in source.rows
            if row["ctas_per_sm"] and row["sm"] == "90" and "USE_TUNED=1" not in row["knobs"]}
    gpu, counts = types.SimpleNamespace(attribute=H200.get), set()
    for name, row in rows.items():
        knobs = dict(word.split("=", 1) for word in shlex.split(row["knobs"]))
        producers = 128 if row["family"] == "wgmma" else 32 * int(knobs["NUM_PRODUCER_WARPS"])
        threads = 32 * int(knobs["NUM_WARPS"]) + producers * int(knobs["USE_WARP_SPECIALIZATION"])
        facts = builds.Facts(int(row["regs"]), threads=threads, shared_bytes=int(row["smem_bytes"]))
        counts.add(int(row["ctas_per_sm"]))
        assert micro.ctas_per_sm(gpu, facts) == int(row["ctas_per_sm"]), name
    assert len(rows) > 50 and len(counts) > 4
    # 33 registers are 40, of which a partition has 12 warps; 136 leave it room for 3 warps, not for 3.76.
    for registers, threads, ctas in ((33, 128, 12), (136, 96, 4)):
        assert micro.ctas_per_sm(gpu, builds.Facts(registers, threads=threads)) == ctas
    assert micro.ctas_per_sm(gpu, builds.Facts(255, threads=1024)) == 1  # none fits; the launch says why


# ---- what is timed, on a fake GPU ----

class Loop(FakeKernel):
    """A kernel with a constant time plus `us` per iteration of `keys` keys."""

    def __init__(self, keys, us, **more):
        super().__init__(**more)
        self.keys, self.of_iteration = keys, us

    def prepare(self, gpu, tensors, p):
        assert p.Sk % self.keys == 0 and p.Hkv == p.B == 1, p
        self.us, self.problem = 7 + self.of_iteration * p.Sk / self.keys, p
        gpu.problems.append(p)
        return super().prepare(gpu, tensors, p)

    def capture(self, gpu, launch, launches):
        us, (enqueue, close) = self.us, super().capture(gpu, launch, launches)
        return lambda: (enqueue(), us)[1], close


class Gpu(FakeGpu):
    """A fake GPU with two SMs."""

    def __init__(self):
        super().__init__(noise=1e-5)
        self.problems, self.attribute = [], {**H200, engine.SM_COUNT: 2}.get


KEYS = (480, 1440)  # fewer than micro's, which take NumPy seconds
# {line: (keys per iteration, us per iteration)}. A CTA has 64 rows, and an SM holds two CTAs.
TIMES = {"mma_split2": (128, 1.0), "mma_split2 BLOCK_N=48": (96, 0.6), "mma_split2 BLOCK_N=80": (160, 0.9),
         "mma_split2 STAGES=3": (128, 0.7), "mma_split2 STAGES=1": (128, 2.0)}


@pytest.fixture
def timed(monkeypatch, tmp_path, quick_refusals):
    """Runs micro on TIMES; returns its output, its CSV and the GPU."""
    def run(*words, broken=(), wrong=()):
        gpu, path, load = Gpu(), str(tmp_path / "micro.csv"), engine.load
        tool.on_a_gpu(monkeypatch, gpu, None)
        monkeypatch.setattr(engine, "load", lambda line, gpu, built: load(line, gpu, built) if built[line].trouble else Loop(
            *TIMES[line.text], harm=lambda O, LSE: O.__imul__(line.text not in wrong), line=line))
        monkeypatch.setattr(engine, "RANDOM_BLOCK", 1 << 18)
        monkeypatch.setattr(micro, "KEYS", KEYS)
        monkeypatch.setattr(micro, "tiles", lambda line, count: [search.parse_line(line.tree, text) for text in TIMES])
        monkeypatch.setattr(builds, "build", lambda lines, arch, progress: {
            line: builds.Built(line, trouble="error: no" * (line.text in broken)) for line in lines})
        monkeypatch.setattr(builds, "facts", lambda built: builds.Facts(128, threads=128, shared_bytes=100000))
        code, out, err = tool.run("micro", "--from", "mma_split2", "--output", path, *words)
        with open(path, newline="") as file:
            return code, out, err, list(csv.DictReader(file)), path, gpu
    return run


def test_an_iteration_and_the_rank(timed):
    """The 7 us of overhead are subtracted. Tiles rank by time per (row, key) pair of all CTAs of an SM, so size alone does not count."""
    code, out, err, rows, path, gpu = timed("--top", "4")
    assert code == 0 and f"--family mma --head-dim 64 --dtype fp16 --seed-from {os.path.relpath(path, ROOT)}\n" in err
    for row in rows:
        keys, us = TIMES[row["line"]]
        assert float(row["ns_iteration"]) == pytest.approx(1e3 * us, rel=0.005)
        assert float(row["ns_per_1000_pairs"]) == pytest.approx(1e6 * us / (2 * 64 * keys), rel=0.005)
        assert [row[name] for name in (*micro.KIND, "ctas_per_sm")] == ["mma", "64", "fp16", "90a", "2"]
        assert {row[knob] for knob in ("BLOCK_M", "VEC_WIDTH")} == {"64", "8"} and row["NUM_WARPS"] == "4"
        assert str(keys // 2) == row["BLOCK_N"]
    assert [row["line"] for row in rows] == list(TIMES)  # each as it is timed
    # As many CTAs as both SMs hold at once, each with one item, at two numbers of keys that are whole iterations.
    assert {(p.Hq, p.Sq, p.Sk) for p in gpu.problems} == {
        (4, 64, n // keys * keys) for keys, _ in TIMES.values() for n in KEYS}
    shown = [tuple(row.split()) for row in out.splitlines() if re.match(" +[0-9]", row)]
    assert [row[3:5] for row in shown] == [("64", "3"), ("80", "2"), ("48", "2"), ("64", "2")]
    assert len(out.splitlines()) == 7
    assert out.splitlines()[2].split()[3:] == ["BLOCK_M", "BLOCK_N", "STAGES", "VEC_WIDTH", "NUM_WARPS"]


def test_what_is_wrong_or_does_not_compile_has_no_row(timed):
    *good, wrong, broken = TIMES
    code, out, err, rows, *_ = timed(broken=[broken], wrong=[wrong])
    assert code == 0 and [row["line"] for row in rows] == good
    assert re.search(f"^{wrong}: O\\(.*\\) is 0 but should be ", err, re.MULTILINE)
    assert f"{broken} does not compile: error: no\n" in err


# ---- parts of the backward loop ----

class PartsGpu(HostGpu):
    """The CPU backend with five SMs and fake times, which depend on the part and the number of tiles."""

    def __init__(self, library):
        super().__init__(library)
        self.attribute, self.noise = {engine.SM_COUNT: 5}.get, 1e-5

    def capture(self, launch, launches):
        asked = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backward_parts.Parts, "launch", lambda self, *words: asked.append(words))
            launch()
        (name, tiles), = asked
        return lambda: tiles * len(name) / 100, lambda: None


@pytest.mark.long
def test_parts_of_the_backward_loop(monkeypatch, tmp_path):
    """All parts have the right results, wrong ones are seen, and each row has the time of a tile."""
    line, path = line_of(backward_parts.LINE), str(tmp_path / "parts.csv")
    library = builds.host_library(*line.words, program="tests/host_parts.cu")
    gpu = PartsGpu(engine.ctypes.CDLL(library))
    monkeypatch.setattr(engine, "find_gpu", lambda: gpu)
    monkeypatch.setattr(builds, "build", lambda lines, arch, program: {one: builds.Built(one, library) for one in lines})
    monkeypatch.setattr(backward_parts, "CHECKED_TILES", 5)
    code, out, err = tool.run("micro", "--backward", "--output", path)
    assert code == 0 and err.endswith("parts.csv\n") and len(out.splitlines()) == 11, err
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        name, us = row["part"], len(row["part"]) / 100
        added = 0 if "red" not in name else 16384 if "half" in name else 32768
        assert float(row["ns_tile"]) == pytest.approx(1e3 * us, rel=0.005)
        assert float(row["added_tb_per_s"] or 0) == pytest.approx(4e-6 * added / us, abs=0.006)
        assert float(row["tflops"] or 0) == pytest.approx(4 * 10.486 / us * ("products" in name), rel=0.01)
    assert len(rows) == 10
    parts, name, download = backward_parts.Parts(gpu, library, 4), "products, dS staged, red.v4", gpu.download
    for harmed, sentence in ((parts.sums, f"{name}: dQ has an error of "), (parts.results, f"{name}: dV and dK have the sum ")):
        for factor in 1.01, float("nan"):
            monkeypatch.setattr(gpu, "download", lambda at, *more: download(at, *more) * (factor if at == harmed else 1))  # noqa: B023
            assert parts.trouble(name).startswith(sentence)


# ---- a search that begins with it ----

def write(path, lines, **changes):
    """A CSV of micro with these lines in this order; the last one ranks first."""
    common = dict(family="mma", D=64, dtype="fp16", sm="90a")
    with open(path, "w", newline="") as file:
        out = csv.DictWriter(file, micro.COLUMNS)
        out.writeheader()
        for n, text in enumerate(lines):
            out.writerow({**common, "line": text, "ns_per_1000_pairs": 20 - n, **changes})
    return str(path)


def dry(*words):
    return tool.run("tune", "--dry-run", "--family", "mma", "--budget", "0.2", *words)


def searched(log):
    """The lines of a log by their effective knobs, in order."""
    return [one.user_attrs["knobs"] for one in tune.read_log(str(log)).trials]


@pytest.mark.usefixtures("quick_refusals")
def test_a_search_begins_with_the_tiles(tmp_path):
    """After the starting line, whose time is the unit, come the --top best tiles, best first, then the family's
    lines."""
    tiles = [f"mma_lazy BLOCK_N={n}" for n in (16, 48, 80, 96, 112)]
    path, log = write(tmp_path / "micro.csv", tiles), tmp_path / "log.jsonl"
    assert dry("--seed-from", path, "--top", "4", "--log", str(log))[0] == 0
    knobs, start = searched(log), search.identity(line_of("mma_tile64"))
    assert knobs[:5] == [start, *(search.identity(line_of(text)) for text in tiles[:0:-1])]
    assert search.identity(line_of("mma_lazy")) in knobs[5:] and len(knobs) > 9
    # All parameters of such a trial are the tile's, so that it has children.
    first = tune.read_log(str(log)).trials[1].params
    assert (first["BLOCK_N"], first["USE_LAZY_MAX"], first["BLOCK_M"]) == ("112", "1", "128")
    # The same search without them, or with fewer, is another one.
    for words in ([], ["--seed-from", path, "--top", "3"]):
        code, _, err = dry(*words, "--log", str(log))
        assert code == 2 and "is the log of another search" in err


@pytest.mark.usefixtures("quick_refusals")
@pytest.mark.parametrize("changes,words,sentence", [
    (dict(family="wgmma"), [], "has tiles for wgmma 64 fp16 90a, but the search is for mma 64 fp16 90a"),
    (dict(ns_per_1000_pairs="soon"), [], "want a CSV of ./run_all.sh micro"),
    (dict(line="gone BLOCK_N=32"), [], "want a CSV of ./run_all.sh micro, for a line of configs.txt"),
    ({}, ["--table"], "--seed-from requires a search or --replay; omit it")])
def test_a_csv_of_something_else(tmp_path, changes, words, sentence):
    path = write(tmp_path / "micro.csv", ["mma_lazy"], **changes)
    code, out, err = dry("--seed-from", path, *words)
    assert code == 2 and sentence in err and err.count("\n") == 1 and not out, err
    assert path in err or "omit it" in err
