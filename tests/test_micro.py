"""./run_all.sh micro without a GPU: what it counts, what it predicts, and whether what a GPU measured ranks whole
kernels. usage: python3 -m pytest tests/test_micro.py"""
import csv
import glob
import json
import os
import re
import signal
import subprocess
import sys
import threading

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import builds  # noqa: E402
import engine  # noqa: E402
import micro  # noqa: E402
import search  # noqa: E402

LINES = sorted(glob.glob(os.path.join(ROOT, "results", "micro", "*-lines*.json")))


def run(*words):
    done = subprocess.run([os.path.join(ROOT, "run_all.sh"), "micro", *words], capture_output=True, text=True,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    return done.returncode, done.stdout, done.stderr


def test_without_a_gpu_it_counts():
    code, out, err = run("--only", "^(scalar_vec8|scalar_swizzle|wgmma_ws|hopper)$")
    assert code == 0 and "built 3 of 3" in err, err
    rows = {row.split()[-1]: row.split()[:3] for row in out.splitlines()[1:]}
    # A tile of 32 x 32 scores reads K and V, 2 * 32 * 64 * 2 bytes; one of 192 x 96 2 * 96 * 64 * 2.
    assert rows == {"scalar_swizzle": ["8.000", "0.000", "2"], "scalar_vec8": ["8.000", rows["scalar_vec8"][1], "6"],
                    "wgmma_ws": ["1.333", "0.000", "0"]}
    assert float(rows["scalar_vec8"][1]) > 1


def test_it_says_at_once_what_it_does():
    """The tiles of a family take minutes, of which the first seconds tell."""
    micro = subprocess.Popen([os.path.join(ROOT, "run_all.sh"), "micro"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                             text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, start_new_session=True)
    threading.Timer(10, os.killpg, (micro.pid, signal.SIGINT)).start()
    said = micro.communicate()[1]
    assert "there is no GPU here: the CPU backend counts barriers, bytes and conflicts instead of clocks" in said
    assert re.search(r"asking the compiler which of \d\d+ combinations of sizes sdpa.cu allows", said) and "micro: stopped" in said


@pytest.mark.parametrize("words,sentence", [
    (["--family", "frob"], "micro: --family frob: want scalar"), (["--only", "^hopper$"], "none of these lines has a tile"),
    (["--only", "("], "--only (: not a regular expression"), (["--top", "0"], "--top 0: want a whole number"),
    (["--head-dim", "96"], "--head-dim 96: want one of 64 128 256"),
    (["--head-dim", "64", "--shape", "mission,128"], "--shape mission: D=128 fp16 is asked for, and the line has D=64 fp16"), (["--shape", "1"], "--shape 1: want small"),
])
def test_refusals(words, sentence):
    code, out, err = run(*words)
    assert code == 2 and sentence in err and err.count("\n") == 1 and not out, err


TILE = dict(family="mma", D=64, registers=99, spilled=0, one_sm=[900, 5000], all_sms=[1000, 6000], sms=132, ctas_per_sm=2)


def test_waves_of_items_of_rounds():
    tile = dict(TILE, knobs="BLOCK_M=128 BLOCK_N=64 SPLIT_KV=2")
    long = engine.parse_problem("long").typed(64, "fp16")  # 8 * 16 items in one wave, of 2048 / 128 rounds
    assert micro.predict(tile, long) == 6000 + 16 * 1000
    assert micro.predict(tile, engine.parse_problem("3,8,8,2048,2048")) == 2 * (6000 + 16 * 1000)
    causal = engine.parse_problem("long", "br")
    assert 6000 + 8 * 1000 < micro.predict(tile, causal) < 6000 + 9 * 1000


def test_the_table_has_what_the_cpu_backend_counted(capsys):
    line = search.parse_line(builds.Tree(), "scalar_vec8")
    counted, = micro.measure([line], None)
    micro.table([dict(TILE, line=line.text, knobs=counted["knobs"], **{name: counted[name] for name in micro.COUNTS})],
                engine.parse_problem("mission"), 7)
    head, names, row = capsys.readouterr().out.splitlines()
    assert head.startswith("mission: the first 1 of 7 tiles") and names.split()[-3:] == ["barriers", "conflicts", "line"]
    assert row.split()[-3:] == ["6", str(counted["conflicts"]), "scalar_vec8"] and counted["conflicts"] > 1000


def test_seeds_are_the_best_in_the_space(tmp_path):
    tree = builds.Tree()
    lines = {"mma_lazy BLOCK_N=32": 900, "mma_lazy STAGES=3": 800, "mma_split2": 700, "mma_d128": 100}
    tiles = [dict(TILE, line=text, knobs=search.identity(line), D=line.D, all_sms=[clocks, 0])
             for text, clocks in lines.items() for line in [search.parse_line(tree, text)]]
    (tmp_path / "tiles.json").write_text(json.dumps(dict(tiles=tiles)))
    space = search.Space(search.parse_line(tree, "mma_lazy"), {"SPLIT_KV": ["1"]})
    found = micro.seeds(str(tmp_path / "tiles.json"), space, engine.parse_problem("long").typed(64, "fp16"), 8)
    assert [line.text for line in found] == ["mma_lazy STAGES=3", "mma_lazy BLOCK_N=32"]


@pytest.mark.skipif(not LINES, reason="results/micro has no lines")
@pytest.mark.parametrize("family", ["scalar", "wmma", "mma", "wgmma"])
def test_it_ranks_whole_kernels(family):
    """Spearman's correlation with the newest times of all lines at long."""
    from scipy import stats
    with open(max(glob.glob(os.path.join(ROOT, "results", "*.csv"))), newline="") as file:
        us = {row["config"]: float(row["graph_us"]) for row in csv.DictReader(file) if row["shape"] == "long" and row["graph_us"]}
    tiles = micro.read(LINES[-1])
    assert sum(tile["line"] in us for tile in tiles) >= 40
    own = [tile for tile in tiles if tile["family"] == family and tile["line"] in us]
    predicted = [micro.predict(tile, engine.parse_problem("long")) for tile in own]
    found = stats.spearmanr(predicted, [us[tile["line"]] for tile in own]).statistic
    with open(os.path.join(ROOT, "docs", "TUNING.md")) as page:
        assert found >= 0.7 and f"{family} {found:.2f}" in page.read()
