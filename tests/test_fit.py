"""Tests of run_all.sh fit: it chooses as sdpa.cu does, finds costs that choose better, and judges a table.
usage: python3 -m pytest tests/test_fit.py"""
import csv
import os
import re

import numpy as np
import pytest

import builds
import engine
import fit
import tool
from test_engine import FakeGpu, FakeKernel

ROOT = builds.ROOT
MHZ, SMS = 1800.0, 132


@pytest.fixture(scope="module")
def model():
    return fit.Model()


def problems(D=64):
    return [engine.parse_problem(shape, causal).typed(D, "fp16") for causal in ("off", "br") for shape in fit.SHAPES]


def write_rows(path, model, tiles, noise=0.0, seed=0):
    """Writes rows with the cost model's times of these tiles plus noise."""
    rng = np.random.default_rng(seed)
    with open(path, "w", newline="") as file:
        out = csv.DictWriter(file, fit.COLUMNS)
        out.writeheader()
        for p in [p for D in sorted({tile.head_dim for tile in tiles}) for p in problems(D)]:
            for tile in (tile for tile in tiles if tile.suits(p)):
                us = model.clocks([tile], model.params([p]), SMS)[0, 0] / MHZ * (1 + noise * rng.standard_normal())
                out.writerow(dict(D=p.D, dtype=p.dtype, shape=p.shape, B=p.B, Hq=p.Hq, Hkv=p.Hkv, Sq=p.Sq, Sk=p.Sk,
                                  causal=p.causal, tile=tile.knobs, us=f"{us:.3f}", clock_mhz=MHZ, check="PASS",
                                  device="Fake", sms=SMS))
    return str(path)


def at_other_costs(tiles, seed=9, spread=0.35):
    rng = np.random.default_rng(seed)
    return [fit.with_costs(tile, tile.costs * np.exp(spread * rng.uniform(-1, 1, 2))) for tile in tiles]


def run(*words):
    return tool.run("fit", *words)


@pytest.mark.long
def test_rows_are_printed_as_they_stand_in_sdpa_cu():
    text = builds.Tree().read("sdpa.cu")
    for array, line in (("HOPPER", "hopper"), ("AMPERE", "ampere"), ("E4M3", "hopper_e4m3"), ("KV", "hopper_kv8_d128_bf16")):
        table = re.search(rf"constexpr std::array {array}_TILES = \{{\n(.*?)\n\}};", text, re.DOTALL).group(1)
        rows = [row for row in table.splitlines() if "USE_BIAS" not in row]  # builds with a bias are not timed here
        assert [tile.row(line) for tile in fit.Model(line).tiles] == rows


def test_costs_are_found_that_choose_well(model, tmp_path):
    """The GPU has other costs than the table: it chooses badly, and what is fitted to noisy times does not, nor on problems
    that the fit has not seen."""
    table = [tile for tile in model.tiles if tile.head_dim == 64]
    truth = at_other_costs(table)
    times, *_ = fit.measured(fit.read_rows(write_rows(tmp_path / "rows.csv", model, truth, noise=0.01)))
    before = [loss for _, loss in fit.losses(model, table, times, SMS).values()]
    fitted = fit.fit_costs(model, table, times, SMS, MHZ)
    after = [loss for _, loss in fit.losses(model, fitted, times, SMS).values()]
    unseen = fit.left_out(model, table, times, SMS, MHZ)
    assert np.mean(before) > 0.05 and max(before) > 0.2
    assert np.mean(after) < 0.002 and max(after) < 0.03, (before, after)
    assert set(unseen) == set(times) and np.mean([loss for _, loss in unseen.values()]) < 0.003


def test_times_of_tiles(model, monkeypatch, tmp_path):
    """Each suitable tile has a row for every problem. A wrong tile has no time; one that cannot run ends the command."""
    few, (one, other, *_) = [[tile for tile in model.tiles if tile.head_dim == 64 and bool(tile.pack_gqa and tile.block_m < 64) == packs]
                             for packs in (True, False)]
    tiles, asked = [few[0], one, other], []

    def load(line, gpu, built):
        asked.append(line)
        return FakeKernel(lambda O, LSE: O.fill(0) if line == asked[1] and O.shape[2] == 9 else None, 20.0 + len(asked), line)
    monkeypatch.setattr(builds, "build", lambda lines, arch: {line: arch for line in lines})
    monkeypatch.setattr(engine, "load", load)
    gpu = FakeGpu(noise=1e-4)
    gpu.attribute = {engine.SM_COUNT: 78}.get
    problems = [engine.parse_problem(text).typed(64, "fp16") for text in ("1,1,1,9,8", "1,2,2,1025,8", "1,2,1,512,8", "1,2,1,513,8")]
    rows = fit.measure(gpu, model, tiles, problems, engine.Table(str(tmp_path / "rows.csv"), fit.COLUMNS))
    names, suiting = [tile.knobs for tile in tiles], [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (3, 1), (3, 2)]
    assert [line.words for line in asked] == [tile.line(builds.Tree(), table="hopper").words for tile in tiles]
    assert [(row["shape"], row["tile"]) for row in rows] == [(problems[p].shape, names[tile]) for p, tile in suiting]
    assert [row["check"] for row in rows] == ["FAIL" if row == (0, 1) else "PASS" for row in suiting] and "us" not in rows[1]
    for (_, tile), row in zip(suiting, rows):
        assert row["check"] == "FAIL" or 20.9 + tile < float(row["lo_us"]) <= float(row["us"]) <= float(row["hi_us"]) < 21.1 + tile
        assert (row["sms"], row["D"], row["dtype"], row["causal"], row["device"]) == (78, 64, "fp16", "off", "Fake")
    times, sms, mhz = fit.measured(fit.read_rows(str(tmp_path / "rows.csv")))
    assert (list(times), sms, mhz) == (problems, 78, 1980) and [len(us) for us in times.values()] == [2, 2, 3, 2]
    monkeypatch.setattr(FakeKernel, "prepare", lambda *_: (_ for _ in ()).throw(engine.CudaError("no memory")))
    with pytest.raises(builds.Refused, match=f"^{re.escape(names[1])}: cannot run 1x2x2x1025x8: no memory$") as refused:
        fit.measure(gpu, model, tiles[1:], problems[1:2], None)
    assert refused.value.code == 3


def test_check_tells_a_good_table_from_a_bad_one(model, tmp_path):
    tiles = [tile for tile in model.tiles if tile.head_dim == 64]
    assert run("--check", write_rows(tmp_path / "good.csv", model, tiles))[0] == 0
    code, out, _ = run("--check", write_rows(tmp_path / "bad.csv", model, at_other_costs(tiles)))
    assert code == 1 and re.search(r"loses [0-9.]+%, more than 8%", out)
    code, out, _ = run("--check", write_rows(tmp_path / "few.csv", model, tiles[1:]))
    assert code == 1 and "never timed: HEAD_DIM=64 BLOCK_M=64" in out


@pytest.mark.parametrize("shape,loss", [
    ("8,32,8,1,2048,128,bf16", 0.08), ("8,32,8,1,2048,128,bf16/e4m3", 0.35), ("8,32,8,2,2048,128,bf16/e4m3", 0.08),
    ("4,32,8,1,2048,128,bf16", 0.35), ("4,32,8,1,2048,128,bf16/e4m3", 0.08), ("8,32,8,1,2048,128,e4m3", 0.35)])
def test_the_acceptable_loss(shape, loss):
    """More where one query row reads K and V of about the size of L2, which depends on their element type alone."""
    assert fit.worst_loss(engine.parse_problem(shape)) == loss


def test_from_rows_prints_a_table_to_paste(model, tmp_path):
    code, out, _ = run("--from", write_rows(tmp_path / "rows.csv", model, model.tiles), "--head-dim", "256")
    pasted = re.findall(r"^    tile\(256, .*\),$", out, re.MULTILINE)
    assert code == 0 and len(pasted) == sum(tile.head_dim == 256 for tile in model.tiles)
    assert "fitted: the fastest tile on" in out and " 64 " not in out.split("\n")[1]


@pytest.mark.parametrize("table", ["hopper", *(pytest.param(name, marks=pytest.mark.long) for name in ("ampere", "hopper_e4m3"))])
def test_the_table_in_sdpa_cu_by_committed_rows(table):
    if not os.path.isdir(os.path.join(ROOT, "results", "tuning")):
        pytest.skip("results/tuning has no rows")
    code, out, err = run("--table", table, "--check")
    assert code == 0, out + err


@pytest.mark.parametrize("us", ["abc", "nan", "0"])
def test_a_broken_number_is_refused(tmp_path, us):
    rows = fit.read_rows(str(fit.newest("hopper")))
    with open(tmp_path / "rows.csv", "w", newline="") as file:
        out = csv.DictWriter(file, fit.COLUMNS)
        out.writeheader()
        out.writerows([rows[0], dict(rows[1], us=us)])
    code, out, err = run("--check", str(tmp_path / "rows.csv"))
    assert code == 2 and f"{tmp_path}/rows.csv: row 3 lacks a number or has one that is not positive" in err and not out
