"""Tests of ./run_all.sh micro without a GPU: refusals, tiles, arithmetic on a fake GPU's times, and a search that begins with
its tiles.  usage: python3 -m pytest tests/test_micro.py"""
import csv
import os
import re
import shlex
import sys
import types
from pathlib import Path

import optuna
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import builds  # noqa: E402
import engine  # noqa: E402
import micro  # noqa: E402
import report_rows  # noqa: E402
import search  # noqa: E402
import tool  # noqa: E402
import tune  # noqa: E402
from test_engine import FakeGpu, FakeKernel  # noqa: E402


TREE = builds.Tree()


def line_of(*words):
    return search.parse_line(TREE, " ".join(words))


def asked(**options):
    return types.SimpleNamespace(**dict(dict(family=None, from_=None, head_dim=None), **options))


# ---- what is refused ----

@pytest.mark.parametrize("words,sentence", [
    (["--family", "frob"], "--family frob: want scalar, wmma, mma or wgmma"),
    (["--from", "nobody"], "nobody: no line of configs.txt has that name"),
    (["--head-dim", "100"], "--head-dim 100: want a multiple of 16"),
    (["--from", "mma_lazy", "--family", "wgmma"], "--from mma_lazy has the family mma; omit --family wgmma"),
    (["--from", "hopper"], "hopper: its CTAs split the keys, pack heads or choose the tile; append USE_TUNED=0"),
    (["--from", "wgmma_chunk"], "wgmma_chunk: its CTAs split the keys, pack heads or choose the tile; append PACK_GQA=0"),
    (["--from", "mma_lazy BLOCK_N=40"], "mma_lazy BLOCK_N=40: BLOCK_N: the scalar kernel takes multiples of 8"),
    (["--from", "mma_lazy", "--output", __file__], f"--output {__file__}: this file already exists")])
def test_refusals(words, sentence):
    code, out, err = tool.run("micro", *words)
    assert code == 2 and err.startswith(f"micro: {sentence}") and err.count("\n") == 1 and not out


def test_without_a_gpu():
    if engine.find_gpu() is None:
        assert tool.run("micro", "--from", "mma_lazy") == (2, "", "micro: it times kernels and there is no GPU here\n")


def test_a_line_of_another_gpu():
    with pytest.raises(builds.Refused, match="^wgmma_lazy: it is a line for sm_90a, and the GPU is sm_80$"):
        micro.loop_line(asked(from_="wgmma_lazy"), "80")


# ---- which tiles ----

@pytest.mark.usefixtures("quick_refusals")
def test_the_default_line_is_the_quickest_of_its_kind(monkeypatch):
    """It is the fastest line of the family with tune's initial D and type whose CTAs walk over all keys."""
    source, = report_rows.newest(Path(ROOT, "results"))["lines"]
    us = {row["config"]: us for row, us in report_rows.timed(source) if row["shape"] == "long"}
    for family, D in (("mma", 64), ("wgmma", 128)):
        line = micro.loop_line(asked(family=family, head_dim=str(D)), "90a")
        own = [one for one in search.family_lines(line.tree, family) if (one.D, one.dtype) == (D, "fp16") and
               (one.knob("USE_TUNED"), one.knob("PACK_GQA"), one.knob("SPLIT_CTAS")) in (("", "", ""), ("0", "0", "1"))]
        assert line.name == min(own, key=lambda one: us[one.name]).name and len(own) > 3
    monkeypatch.setattr(report_rows, "timed", lambda source: [(dict(config=name, shape="long"), us) for name, us in (
        ("wgmma_d128_bf16", 1), ("wgmma", 2), ("hopper_d128", 3), ("wgmma_d128_ws", 4), ("wgmma_d128_lazy", 5))])
    assert micro.loop_line(asked(family="wgmma", head_dim="128"), "90a").name == "wgmma_d128_ws"


@pytest.mark.usefixtures("quick_refusals")
def test_tiles_are_the_nearest_legal_ones_of_tunes_space():
    line = line_of("mma_lazy")
    space, found = search.Space(line, {}), micro.tiles(line, 9)
    own = search.knobs_of(line)
    assert found[0].text == "mma_lazy" and len({search.identity(one) for one in found}) == 9
    steps = []
    for one in found:
        knobs = search.knobs_of(one)
        assert not search.refusal(one) and all(knobs[knob] in values for knob, values in space.values.items())
        assert {knob for knob in knobs if knobs[knob] != own[knob]} <= set(micro.SIZES)
        steps.append(sum(abs(values.index(knobs[knob]) - values.index(own[knob]))
                         for knob, values in space.values.items() if knob in micro.SIZES))
    assert steps == sorted(steps) and steps[0] == 0 and 1 in steps
    near = {f"mma_lazy {knob}={space.values[knob][at]}" for knob in micro.SIZES for step in (-1, 1)
            if 0 <= (at := space.values[knob].index(own[knob]) + step) < len(space.values[knob])}
    legal = {text for text in near if not search.refusal(line_of(text))}
    assert len(legal) > 3 and legal == {one.text for one, count in zip(found, steps) if count == 1}


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
# A line, the keys of its iteration, what one takes (us); of each a CTA has 64 rows, and 2 fit an SM.
TIMES = {"mma_split2": (128, 1.0), "mma_split2 BLOCK_N=48": (96, 0.6), "mma_split2 BLOCK_N=80": (160, 0.9),
         "mma_split2 STAGES=3": (128, 0.7), "mma_split2 STAGES=1": (128, 2.0)}


def right(O, LSE):
    """Leaves O and LSE unchanged."""


def zeros(O, LSE):
    O.fill(0)


@pytest.fixture
def timed(monkeypatch, tmp_path, quick_refusals):
    """Runs micro on TIMES; returns its output, its CSV and the GPU."""
    def run(*words, broken=(), harm=lambda line: right):
        gpu, path, load = Gpu(), str(tmp_path / "micro.csv"), engine.load

        def loaded(line, gpu, built):
            if built[line].trouble:
                return load(line, gpu, built)  # which refuses it
            return Loop(*TIMES[line.text], harm=harm(line), line=line)
        monkeypatch.setattr(engine, "find_gpu", lambda: gpu)
        monkeypatch.setattr(engine, "RANDOM_BLOCK", 1 << 18)
        monkeypatch.setattr(micro, "KEYS", KEYS)
        monkeypatch.setattr(engine, "load", loaded)
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
    code, out, err, rows, *_ = timed(broken=[broken], harm=lambda line: zeros if line.text == wrong else right)
    assert code == 0 and [row["line"] for row in rows] == good
    assert re.search(f"^{wrong}: O\\(.*\\) is 0 but should be ", err, re.MULTILINE)
    assert f"{broken} does not compile: error: no\n" in err


@pytest.mark.long
def test_nothing_timed_and_more_keys_in_no_time(timed, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TIMES", {text: (keys, -0.05) for text, (keys, _) in TIMES.items()})
    code, out, err, rows, *_ = timed()
    assert code == 3 and not out and not rows and err.endswith("micro: no tile could be timed\n")
    assert err.count("more keys did not take longer, so the GPU is shared\n") == len(TIMES)


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
def test_tiles_that_the_space_does_not_have(tmp_path):
    path = write(tmp_path / "micro.csv", ["mma_lazy BLOCK_N=48", "mma_lazy BLOCK_N=48 STAGES=3"])
    log = tmp_path / "log.jsonl"
    assert dry("--seed-from", path, "--fix", "STAGES=2", "--log", str(log))[0] == 0
    assert searched(log)[1] == search.identity(line_of("mma_lazy BLOCK_N=48"))
    assert not [one for one in searched(log) if "STAGES=3" in one]
    assert dry("--seed-from", path, "--fix", "STAGES=4") == (
        2, "", f"tune: {path}: none of its tiles is in this search space\n")


@pytest.mark.usefixtures("quick_refusals")
@pytest.mark.parametrize("changes,words,sentence", [
    (dict(family="wgmma"), [], "has tiles for wgmma 64 fp16 90a, but the search is for mma 64 fp16 90a"),
    (dict(sm="80"), [], "has tiles for mma 64 fp16 80, but the search is for mma 64 fp16 90a"),
    ({}, ["--dtype", "bf16"], "has tiles for mma 64 fp16 90a, but the search is for mma 64 bf16 90a"),
    (dict(ns_per_1000_pairs="soon"), [], "want a CSV of ./run_all.sh micro"),
    (dict(line="gone BLOCK_N=32"), [], "want a CSV of ./run_all.sh micro, for a line of configs.txt"),
    ({}, ["--table"], "--seed-from requires a search or --replay; omit it")])
def test_a_csv_of_something_else(tmp_path, changes, words, sentence):
    path = write(tmp_path / "micro.csv", ["mma_lazy"], **changes)
    code, out, err = dry("--seed-from", path, *words)
    assert code == 2 and sentence in err and err.count("\n") == 1 and not out, err
    assert path in err or "omit it" in err


@pytest.mark.usefixtures("quick_refusals")
def test_a_broken_csv(tmp_path):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "bytes.csv").write_bytes(b"\0\xff\n")
    for path in (tmp_path / "other.csv", tmp_path / "bytes.csv", tmp_path / "none.csv", tmp_path):
        code, out, err = dry("--seed-from", str(path))
        assert code == 2 and err.startswith(f"tune: {path}: ") and err.count("\n") == 1 and not out, err


@pytest.mark.long
@pytest.mark.usefixtures("quick_refusals")
def test_a_replay_beside_the_tiles(tmp_path, monkeypatch):
    """The CSV ranks the best of four candidates first, so the replay judges it right after the base."""
    monkeypatch.setattr(tune, "KNOWN", 20)  # proposals: of four candidates most are known
    lines = [line_of("mma_lazy", f"BLOCK_N={n}") for n in (64, 32, 48, 80)]
    space = search.Space(lines[0], {"BLOCK_N": ["64", "32", "48", "80"]}, True)
    log = tune.Log(str(tmp_path / "all.jsonl"), dict(all=True, gpu="Fake", base="mma_lazy", space=space.values,
                                                     problems=[["long", 64, "fp16"]]))
    for line, score in zip(lines, (1.0, 1.1, 1.05, 0.8)):
        record = dict(knobs=search.identity(line), line=line.text, fate="timed")
        log.add(optuna.trial.create_trial(value=score, user_attrs=record))
    path = write(tmp_path / "micro.csv", ["mma_lazy BLOCK_N=32", "mma_lazy BLOCK_N=80"], sm="80")
    code, out, err = tool.run("tune", "--replay", log.path, "--seed-from", path)
    assert code == 0 and re.search(r"^from mma_lazy and micro's +2 +2 +50.0%", out, re.MULTILINE), out + err
