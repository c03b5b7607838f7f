"""Tests of tools/engine.py and tools/builds.py without a GPU: the error rates of the verdict on simulated GPUs, the faults that
the check detects, and refusals."""
import contextlib
import ctypes
import csv
import itertools
import math
import os
import re
import subprocess
import sys
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats


import ab
import accuracy
import builds
import engine
import steps

ROOT = builds.ROOT


class FakeGpu:
    """A GPU with NumPy memory and a simulated clock: a replay takes the time of its graph plus noise. Options add slow drift,
    hiccups, a power limit (the clock keeps the last contender's value for a while, and may dip for a fifth of each second), and a
    neighbour that takes memory bandwidth in slices or in gusts."""
    name, arch, cuda = "Fake", "90a", "13.0"

    gust = False

    class nvml:
        driver = "1"

    def __init__(self, seed=0, noise=0.001, drift=0.0, hiccups=0.0, power=None, dips=False, hog_at=math.inf, gusts=0.0):
        self.rng = np.random.default_rng(seed)
        self.noise, self.drift, self.hiccups, self.power = noise, drift, hiccups, power or {}
        self.dip_at = self.rng.random() if dips else math.inf
        self.gusts, self.turn_at = gusts, self.rng.exponential(gusts)
        self.hog_at, self.now, self.clock, self.memory = hog_at, 0.0, 1.0, {}

    def seconds(self):
        return self.now

    def replay(self, graph, count, warm=0, behind=0):
        us, key = graph.enqueue() * graph.launches, graph.close
        times = us * (1 + self.noise * self.rng.standard_normal(count)) * (1 + self.noise * self.rng.standard_normal())
        times *= 1 + self.drift * math.sin(self.now * 2)
        times[self.rng.random(count) < self.hiccups] *= 1.5
        if self.rng.random() < self.hiccups:
            times *= 1.2
        if self.now > self.hog_at:  # slices of time, of which a replay gets some
            times *= 1.2 + self.rng.exponential(0.5, count) + 0.5 * self.rng.random()
        while self.gusts and self.turn_at < self.now:
            self.turn_at, self.gust = self.turn_at + self.rng.exponential(self.gusts), not self.gust
        times *= 1.5 if self.gust else 1
        if self.power:
            for i, t in enumerate(times):
                goal = self.power[key] * (1 + 0.002 * self.rng.standard_normal())
                now = self.now + times[:i].sum() * 1e-6
                if now > self.dip_at:
                    goal *= 0.85
                    self.dip_at += (now > self.dip_at + 0.2) * (0.8 + 0.4 * self.rng.random())
                self.clock += (goal - self.clock) * (1 - math.exp(-t * 1e-6 / 0.01))
                times[i] = t / self.clock
        self.now += times.sum() * 1e-6 + 50e-6
        return list(times), (int(1980 * self.clock), 4 * bool(self.power))

    # What a Bench needs.
    def allocate(self, size):
        address = 1 + len(self.memory)
        self.memory[address] = np.zeros(size, np.uint8)
        return address

    def free(self, address):
        del self.memory[address]

    def fill(self, address, byte, count):
        if count:
            self.memory[address][:count] = byte

    def upload(self, address, array):
        self.memory[address][:array.nbytes] = array.view(np.uint8)

    def download(self, address, count, dtype):
        return self.memory[address].view(dtype)[:count].copy()

    def synchronize(self):
        pass

    def time(self, enqueue, count):
        for _ in range(count):
            enqueue()
        return [100.0] * count, (1980, 0)


def graphs(a_us, b_us):
    """Two contenders; FakeGpu reads their time from enqueue and their name from close."""
    launches = max(2, min(math.ceil(500 / a_us), 400))
    return {key: engine.Graph(lambda us=us: us, launches, us * launches, close=key)
            for key, us in (("A", a_us), ("B", b_us))}


def verdicts(count, ratio, us=20.0, budget_s=None, **gpu):
    """The verdicts of `count` comparisons, each on a fake GPU of its own."""
    found = []
    for seed in range(count):
        fake = FakeGpu(seed, **gpu)
        found.append(engine.compare(fake, graphs(us, us * ratio), budget_s=budget_s, seed=seed)[1]["B"].verdict)
        assert fake.now < 20, "too slow"
    return found


# Options of FakeGpu: disturbances of a comparison.
QUIET, DRIFTS = dict(), dict(drift=0.02, noise=0.002)
HICCUPS, DIPS = dict(hiccups=0.05, noise=0.002), dict(us=1000.0, power={"A": 0.8, "B": 0.8}, dips=True)


@pytest.mark.parametrize("ratio,count,wanted,least,gpus", [
    (1.0, 60, "SAME", 59, (QUIET, DRIFTS, HICCUPS, DIPS, dict(noise=0.004))), (1.0095, 40, "SLOWER", 39, (DRIFTS, HICCUPS, DIPS)),
    (1.0047, 30, "SLOWER", 24, (DRIFTS, HICCUPS, DIPS))])
def test_error_rates(ratio, count, wanted, least, gpus):
    """A line is the SAME as itself. With 1% more it is SLOWER, with 0.5% more mostly. It is never FASTER."""
    for gpu in gpus:
        found = verdicts(count, ratio, **gpu)
        assert found.count(wanted) >= least and "FASTER" not in found and (ratio > 1 or "SLOWER" not in found), (gpu, found)


@pytest.mark.parametrize("ratio,us,gpu,allowed", [
    (1.0, 20.0, dict(hog_at=0.6, noise=0.003), "SAME UNCLEAR"), (1.01, 20.0, dict(hog_at=0.6, noise=0.003), "SLOWER UNCLEAR"),
    (1.01, 60.0, dict(gusts=0.005), "UNCLEAR")])
def test_a_neighbour_gives_no_wrong_verdict(ratio, us, gpu, allowed):
    """A neighbour that starts during the comparison, or one that comes in gusts. Without a clear result, the comparison ends when
    its budget is spent."""
    assert set(verdicts(10, ratio, us, budget_s=3, **gpu)) <= set(allowed.split())
    series, _ = engine.compare(FakeGpu(1, gusts=0.005), graphs(60.0, 60.6), budget_s=0.4, seed=1)
    assert 9 <= len(series.blocks) <= 30 < engine.LOOKS[-1]


def test_power_that_a_contender_draws_counts():
    """B draws more power and gets a 2% lower clock. Short turns see a part of it, sustained turns all."""
    for pace, low in ((engine.PACE, 1.005), (engine.SUSTAINED, 1.018)):
        fake = FakeGpu(0, power={"A": 0.80, "B": 0.784})
        series, found = engine.compare(fake, graphs(1000.0, 1000.0), seed=0, pace=pace)
        assert found["B"].verdict == "SLOWER" and low < found["B"].ratio < 1.022, found
        assert series.at_power_limit()


@pytest.mark.parametrize("side,half", [("A", 0), ("B", 1)])
def test_which_pairs_are_thrown_out(side, half):
    """Pairs are discarded if either side was throttled or ran at an unusual clock. The power limit, an idle GPU, a clock set by the
    user and a third contender's state discard nothing."""
    turns = {"A": engine.Turn((100.0, 101.0, 103.0), 1980), "B": engine.Turn((110.0, 111.0, 112.0), 1500, 4), "C": engine.Turn((1.0,), 900)}
    usual = math.log(111 / 101)

    def pairs(at=side, **changes):
        series = engine.Series(None, turns, engine.PACE)
        series.blocks = [{key: [turn, turn] for key, turn in turns.items()} for _ in range(8)]
        series.blocks[5][at][half] = turns[at]._replace(us=(200.0,), **changes)
        return series.ratios("B", "A")
    all_kept, thrown = [usual] * 16, ([usual] * 15, 1)
    all_kept[2 * 5 + half] = math.log(111 / 200 if side == "A" else 200 / 101)
    assert {bit for bit in range(64) if pairs(throttle=1 << bit) == (all_kept, 0)} == {0, 1, 2, 8} and pairs(throttle=4 | 32) == thrown
    own = turns[side].clock_mhz
    for factor, throttle, want in ((0.89, 0, thrown), (1.11, 2, thrown), (0.91, 0, (all_kept, 0)),
                                   (1.09, 1, (all_kept, 0)), (0.5, 4, (all_kept, 0))):
        assert pairs(clock_mhz=own * factor, throttle=throttle) == want, (factor, throttle)
    assert pairs("C", clock_mhz=1, throttle=32) == ([usual] * 16, 0)
    turns = {key: turn._replace(clock_mhz=0, throttle=0) for key, turn in turns.items()}  # without NVML
    assert pairs() == (all_kept, 0)


@pytest.mark.parametrize("pace,asked,us,slept", [
    (engine.Pace(1000, 3500, 2), (12, 3, 5), [n / 10 for n in range(4, 13)], []),
    (engine.Pace(0, 100, 3, rest_s=0.3), (3, 0, 0), [0.1, 0.2, 0.3], [0.3])])
def test_a_turn_times_what_is_warm(monkeypatch, pace, asked, us, slept):
    """A turn warms up and measures for the times in the pace, and appends untimed replays unless the GPU rests before."""
    rests, told = [], []
    monkeypatch.setattr(engine.time, "sleep", rests.append)
    gpu = SimpleNamespace(replay=lambda graph, *counts: (list(range(1, counts[0] + 1)), (1500, 4, 300.0)) if counts == asked else None)
    turn = engine.Series(gpu, {"A": engine.Graph(None, 10, 400.0)}, pace, lambda *x: told.append(x)).turn("A")
    assert turn == (tuple(us), 1500, 4, 300.0) and told == [("A", turn)] and rests == slept


def test_judge_by_hand():
    """Each limit from both sides: 0.3% for a difference, 0.5% for none, and 30 ns for both."""
    for ratio, us, verdict in ((0.0031, 1e9, "SLOWER"), (0.0029, 1e9, "SAME"), (0.0151, 2, "SLOWER"), (0.0149, 2, "SAME")):
        assert engine.judge([ratio] * 8, us=us).verdict == verdict and engine.judge([-ratio] * 8, us=us).verdict == verdict.replace("SLOW", "FAST")
    assert engine.judge([0.0045, 0.0055] * 8).verdict == "SLOWER" and engine.judge([0.001, 0.0045] * 4).verdict == "UNCLEAR"
    assert engine.judge([0.01] * 7).verdict == "UNCLEAR"


@pytest.mark.parametrize("count", [8, 25])
def test_the_interval_of_a_ratio(count):
    """Compares with Tukey and McLaughlin's interval of a trimmed mean, written out: a fifth of the pairs is trimmed at each end, and
    the confidence level is 1 - 1% / 9 for each of nine looks."""
    ratios = sorted(np.random.default_rng(count).normal(0.0055, 0.003, count))
    cut = count // 5
    inner = ratios[cut:count - cut]
    winsorized = [inner[0]] * cut + inner + [inner[-1]] * cut
    mean = sum(inner) / len(inner)
    deviation = math.sqrt(sum((x - sum(winsorized) / count) ** 2 for x in winsorized) / (count - 1))
    half = stats.t.ppf(1 - 0.01 / 9 / 2, count - 2 * cut - 1) * deviation / ((1 - 2 * 0.2) * math.sqrt(count))
    found = engine.judge(list(np.random.default_rng(1).permutation(ratios)), thrown_out=3)
    assert np.log([found.ratio, found.low, found.high]) == pytest.approx([mean, mean - half, mean + half], rel=1e-9)
    assert (found.pairs, found.thrown_out) == (count, 3)


@pytest.mark.parametrize("count, low, high", [(15, (4, 5), (11, 12)), (6, (1, 2), (5, 6)), (5, (1, 1), (5, 5))])
def test_the_interval_of_a_median(count, low, high):
    """Of the medians 1 to count. From the binomial distribution, elements 4 to 12 of 15 contain the median in 96.5% and 5 to 11 in
    88.2%; of 6 elements, 1 to 6 in 96.9% and 2 to 5 in 78%."""
    series = engine.Series(None, {"A": None}, engine.PACE)
    series.blocks = [{"A": [engine.Turn((float(n),), 1980)]} for n in np.random.default_rng(1).permutation(np.arange(1, count + 1))]
    found = series.interval("A")
    assert series.us("A") == (count + 1) / 2 and low[0] <= found[0] <= low[1] and high[0] <= found[1] <= high[1]


# ---- samples ----

def test_a_table_keeps_its_rows_and_prints_them(tmp_path, capsys):
    for run in (1, 2):
        engine.Table(str(tmp_path / "t.csv"), ["input", "run"], printed=True).add(input="N(0,1)", run=run, more="no column")
    rows = list(csv.DictReader(open(tmp_path / "t.csv")))
    assert rows == [dict(input="N(0,1)", run="1"), dict(input="N(0,1)", run="2")]
    assert capsys.readouterr().out == "input,run\n\"N(0,1)\",1\ninput,run\n\"N(0,1)\",2\n"


# ---- problems and the check ----

def test_problems():
    p = engine.parse_problem("2,8,4,100,70,128,bf16,br")
    assert (p.shape, p.Hkv, p.Sk, p.D, p.dtype, p.causal) == ("2x8x4x100x70", 4, 70, 128, "bf16", "br")
    assert [p.visible()[q] for q in (0, 30, 99)] == [0, 1, 70] and p.columns()["window"] == "" and str(p) == "2x8x4x100x70 br"
    p = engine.parse_problem("1,2,2,100,70,64,bf16,br,9")  # a query's own key, and nine before it
    assert [list(bound[[0, 30, 45, 99]]) for bound in p.bounds()] == [[0, 0, 6, 60], [0, 1, 16, 70]]
    p_of_0 = engine.parse_problem("1,1,1,3,8,64,bf16,br,0")
    assert [list(bound) for bound in p_of_0.bounds()] == [[5, 6, 7], [6, 7, 8]] and list(p_of_0.visible()) == [1, 1, 1]
    assert p.columns()["window"] == "9:-1" and str(p) == "1x2x2x100x70 br window 9" and engine.params_of(p).window_left == 9
    assert p.flops() == 4 * 64 * 2 * sum(min(q + 1, 10) for q in range(70))
    assert list(engine.parse_problem("1,1,1,3,8,64,bf16,off,1").visible()) == [8, 8, 7]
    for text in ("huge", "1,2,3,4", "1,3,2,8,8", "1,1,1,0,8", "mission,64,fp8", "mission,64,fp16,up", "mission,64,fp16,br,-1",
                 "mission,64,fp16,br,9999999999"):
        with pytest.raises(builds.Refused, match="want small, mission"):
            engine.parse_problem(text)


def test_rounding():
    values = np.array([1.0, 1 + 2.0 ** -8, 1 + 3 * 2.0 ** -8, -3.14159, 1e-3], np.float32)
    assert list(engine.as_values(engine.as_bits(values, "bf16"), "bf16")[:3]) == [1.0, 1.0, 1 + 2.0 ** -6]
    codes = np.array([code for code in range(256) if code & 127 != 127], np.uint8)
    assert (engine.as_bits(engine.as_values(codes, "e4m3", np.float32), "e4m3") == codes).all()
    values = np.array([1, 1.0625, 1.0626, 1.1875, -1.1875, 2 ** -9, 2 ** -10, 1.5 * 2 ** -9, 447, 1e6, 3.3], np.float32)
    want = [1, 1, 1.125, 1.25, -1.25, 2 ** -9, 0, 2 ** -8, 448, 448, 3.25]
    assert list(engine.as_values(engine.as_bits(values, "e4m3"), "e4m3")) == want
    assert list(engine.as_bits(np.array([0, 4, -4, 9, -9, 4 / 127], np.float32), "u8")) == [128, 255, 1, 255, 0, 129]
    assert list(engine.as_values(np.array([255, 0], np.uint8), "u8")) == pytest.approx([4, -4 * 128 / 127])


class FakeKernel:
    """Attention head by head in float32; `harm` changes O and LSE."""
    torch = SimpleNamespace(__version__="2.0", backends=SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 92700)))
    version = engine.LoadedTorch.version  # by its text and torch

    def __init__(self, harm=lambda O, LSE: None, us=20.0, line=builds.Torch("torch:math"), text="fake"):
        self.harm, self.us, self.line, self.text = harm, us, line, text

    def prepare(self, gpu, tensors, p):
        out = "fp16" if p.dtype in engine.FACTORS else p.dtype

        def launch():
            O = np.zeros((p.B, p.Hq, p.Sq, p.v_dim))
            LSE = np.zeros((p.B, p.Hq, p.Sq), np.float32)
            seen = np.arange(p.Sk) < p.visible()[:, None]
            for b, h in np.ndindex(p.B, p.Hq):
                Q, K, V = (tensors.rows(name, p, b, h if name == "Q" else h * p.Hkv // p.Hq) for name in "QKV")
                w = np.where(seen, np.exp(Q @ K.T * p.D ** -0.5), 0)
                O[b, h] = w @ V / np.maximum(w.sum(1, keepdims=True), 1e-30)
                with np.errstate(divide="ignore"):
                    LSE[b, h] = np.log(w.sum(1))
            bits = engine.as_bits(O.astype(np.float32).ravel(), out).reshape(O.shape)
            self.harm(bits, LSE)
            gpu.upload(tensors.address["O"], bits.ravel())
            gpu.upload(tensors.address["LSE"], LSE.ravel())
        self.O = lambda gpu: gpu.memory[tensors.address["O"]]
        outputs = engine.Outputs(tensors.address["O"], tensors.address["LSE"], out, engine.LIMITS[p.dtype])
        return launch, outputs, (0, 0)

    def capture(self, gpu, launch, launches):
        def enqueue():
            if (self.O(gpu) == 0xff).all():
                launch()
            return self.us
        return enqueue, lambda: None


def shift_heads(O, LSE):
    O[:] = np.roll(O, 1, axis=1)


def lse_of(sees, value):
    """A harm to LSE of the rows that see a key, or of those that see none. The difference of two infinite numbers is no number."""
    return lambda O, LSE: LSE.__setitem__((LSE > -np.inf) == sees, value)


@pytest.mark.parametrize("shape,harm", [
    *((shape, None) for shape in ("1,4,2,70,90,64,fp16,br", "2,2,1,90,40,64,bf16,br", "1,1,1,1,5,128,fp16,tl", "1,2,1,40,50,64,e4m3,br")),
    *(("1,4,2,70,90,64,fp16,br", harm) for harm in (
        lambda O, LSE: O.fill(0), shift_heads, lambda O, LSE: O.__setitem__((0, 1, 33, 5), 0xffff),
        lambda O, LSE: O.__setitem__((0, 0, 0), O[0, 0, 0] + 8), lambda O, LSE: LSE.__iadd__(0.01),
        lambda O, LSE: LSE.__setitem__((0, 2, 7), math.nan), lambda O, LSE: O.__setitem__((0, 1, 0), 0x7c00))),
    *(("2,2,1,90,40,64,bf16,br", harm) for harm in (
        lse_of(False, 0), lse_of(False, -1e30), lse_of(False, np.inf), lse_of(True, np.inf), lse_of(True, -np.inf),
        lambda O, LSE: O.__setitem__((0, 0, 0), 0x3f80)))])  # the first row sees no key
def test_the_check(shape, harm):
    """A right kernel passes, and one with a fault in O or LSE does not."""
    problem = engine.parse_problem(shape)
    check = engine.Bench(FakeGpu(), {"A": FakeKernel(harm or harmless)}, {"A": problem}).checks["A"]
    assert check.passed == (not harm) and bool(check.sentence) == bool(harm) and (harm or check.rel_rms < 8e-3 and check.rows), check


@pytest.mark.parametrize("us,launches", [(1.0, 400), (10.0, 50), (124.0, 20), (126.0, 10), (5000.0, 1)])
def test_launches_of_a_graph(us, launches):
    """A graph holds half a millisecond of launches, between 20 and 400; fewer if a launch is long."""
    captured, gpu, kernel = [], FakeGpu(noise=0), FakeKernel()
    gpu.time = lambda enqueue, count: ([us + 1, us, us + 2], (0, 0))
    kernel.capture = lambda gpu, launch, launches: captured.append(launches) or (lambda: us, lambda: captured.append("closed"))
    bench = engine.Bench(gpu, {"A": kernel}, {"A": engine.parse_problem("1,1,1,3,5,64,fp16")})
    assert captured == [launches] == [bench.graphs["A"].launches] and bench.graphs["A"].replay_us == us * launches
    bench.drop("A")
    assert captured[1:] == ["closed"] and not bench.graphs and not bench.trouble()
    bench.tensors.workspace(5 << 20)
    bench.close()
    assert not gpu.memory, "device memory is left"


def test_each_contender_finds_a_workspace_of_zeros_and_no_results_of_the_other():
    seen = []

    class Uses(FakeKernel):
        def prepare(self, gpu, tensors, p):
            launch, outputs, _ = super().prepare(gpu, tensors, p)
            place = tensors.workspace(100)

            def use():
                seen.append((gpu.memory[place][:100].any(), (gpu.memory[tensors.address["O"]] == 0xff).all(),
                             (gpu.memory[tensors.address["LSE"]] == 0xff).all()))
                launch()
                gpu.memory[place][:] = 7
            return use, outputs, (place, 100)
    bench = engine.Bench(FakeGpu(), {"A": Uses(), "B": Uses()}, dict.fromkeys("AB", engine.parse_problem("1,2,1,5,5,64,fp16")))
    assert bench.fit_to_time().keys() == {"A", "B"} and seen[0] == seen[4] == (False, True, True)


class HostGpu(FakeGpu):
    """The CPU backend behind a line's library, with its emulated device memory."""

    def __init__(self, library):
        super().__init__()
        self.library, self.stream = library, engine.ctypes.c_void_p()
        library.host_allocate.restype = engine.ctypes.c_void_p

    def allocate(self, size):
        address = self.library.host_allocate(engine.ctypes.c_size_t(size))
        self.memory[address] = np.frombuffer((engine.ctypes.c_uint8 * size).from_address(address), np.uint8)
        return address

    def synchronize(self):
        self.library.host_synchronize()

    def capture(self, launch, launches):
        return lambda: 20.0, lambda: None


@pytest.mark.parametrize("name,dtype", [("scalar_e4m3", "e4m3"), pytest.param("scalar_u8", "u8", marks=pytest.mark.long)])
def test_a_real_line_through_its_library(name, dtype):
    line, = builds.parse_contenders([name])
    kernel = engine.LoadedLine(line, builds.host_library(*line.words, program="tests/host_library.cu"))
    gpu = HostGpu(kernel.library)
    problems = [engine.parse_problem(f"{text},64,{dtype},{causal}") for text, causal in (("1,4,2,70,90", "br,20"), ("1,4,2,40,50", "tl"))]
    bench = engine.Bench(gpu, dict.fromkeys("AB", kernel), dict(zip("AB", problems)))
    assert not bench.skipped and all(check.passed for check in bench.checks.values()), (bench.skipped, bench.checks)
    assert bench.checks["A"].rel_rms < {"e4m3": 2e-3, "u8": 1e-3}[dtype]  # P is not rounded to it
    for row in accuracy.rows_of(gpu, [kernel], 64, dtype, 96):
        assert float(row["rel_rms"]) < 2e-3 and abs(float(row.get("mean", 1)) - 1) < 2e-4, row
    wrong = engine.parse_problem(f"1,1,1,32,32,128,{dtype}")
    assert "this build takes D=64" in engine.Bench(gpu, {"A": kernel}, {"A": wrong}).skipped["A"]


@pytest.mark.parametrize("name", ["backward_mma5", pytest.param("backward_minimal", marks=pytest.mark.long)])
def test_a_line_of_the_backward_pass(name):
    """Its gradients are right, and each kind of harm to them or to the forward pass is seen."""
    line, = builds.parse_contenders([name])
    kernel = engine.LoadedBackward(line, builds.host_library(*line.words, program="tests/host_library.cu"))
    gpu, problem = HostGpu(kernel.library), engine.parse_problem("1,4,2,70,90,64,fp16,br,30")
    bench = engine.Bench(gpu, {"A": kernel}, {"A": problem})
    check, outputs, results = bench.checks["A"], bench.outputs["A"], bench.results["A"]
    assert check.passed and check.rel_rms < 1e-3 and check.rows > 300 and check.lse_err < 1e-3, check
    bench.poison = lambda *_: None  # a replay leaves these gradients as they are
    assert not bench.changed_bits("A")
    harms = ((lambda x: x * 1.01, "rel_rms"), (lambda x: np.roll(x, 64), "rel_rms"),
             (lambda x: np.where(np.arange(x.size) == 64 * 65, np.nan, x), "is NaN"))
    for i, (name_of, (address, size, _)) in enumerate(zip(("dQ", "dK", "dV"), outputs.arrays(problem))):
        assert results[i].size == size == 64 * (2 * 90 if i else 4 * 70)
        for harm, words in harms:
            harmed = [harm(x).astype(x.dtype) if n == i else x for n, x in enumerate(results)]
            found = bench.check(problem, outputs, harmed)
            assert not found.passed and found.sentence.startswith(name_of + "(") and words in found.sentence, found
        gpu.memory[address][200] ^= 1
        assert bench.changed_bits("A") == (line.repeats or name_of != "dQ"), name_of
        gpu.memory[address][200] ^= 1
    gpu.memory[outputs.forward.O][:9000] = 0x3c
    assert bench.check(problem, outputs, results).sentence.startswith("the forward pass: O(")
    row = engine.result_row(bench, "A", None, None)
    assert row["pass"] == "backward" and row["check"] == "PASS" and problem.flops(True) == 2.5 * problem.flops()


class RoundsO(FakeKernel):
    """As cuDNN: multiplies O by a factor and rounds it to e4m3. Its sums are 2% too low."""

    def __init__(self):
        super().__init__()
        self.factor_of_o = SimpleNamespace(fill_=lambda factor: setattr(self, "factor", factor))

    def prepare(self, gpu, tensors, p):
        exact, outputs, workspace = super().prepare(gpu, tensors, p)
        exact()
        O = gpu.download(outputs.O, p.rows * p.v_dim, np.float16).astype(np.float32)
        self.factor = 1.0

        def launch():
            gpu.upload(outputs.O, engine.as_bits(O * np.float32(0.98 * self.factor), "e4m3"))
        return launch, outputs._replace(LSE=0, dtype="e4m3"), workspace


def test_the_mean_of_an_o_that_is_rounded_to_e4m3():
    rows = {row["input"]: row for row in accuracy.rows_of(FakeGpu(), [RoundsO()], 64, "e4m3", 512)}
    for kind, least in (("N(0,1)", 0.02), ("V of mean 1", 0.02), ("V of mean 8", 0.01), ("equal logits", 0.005)):
        assert least < float(rows[kind]["rel_rms"]) < 0.06
        assert kind == "N(0,1)" or abs(float(rows[kind]["mean"]) - 0.98) < 5e-4, rows[kind]


@pytest.mark.long
def test_e4m3_sums_of_a_v_with_a_mean(monkeypatch):
    """The CPU backend truncates wgmma's e4m3 products as the hardware does. A flush that left 0 in the
    accumulators, not -O / 2, would lose 1.3% here."""
    line, = builds.parse_contenders(["wgmma_e4m3"])
    kernel = engine.LoadedLine(line, builds.host_library(*line.words, program="tests/host_library.cu"))
    monkeypatch.setattr(accuracy, "HEADS", 1)
    monkeypatch.setattr(accuracy, "QUERIES", 64)
    rows = {row["input"]: row for row in accuracy.rows_of(HostGpu(kernel.library), [kernel], 64, "e4m3", 3072)}
    assert 0.9905 < float(rows["V of mean 8"]["mean"]) < 1 and 0.993 < float(rows["V of mean 1"]["mean"]) < 1
    assert abs(float(rows["equal logits"]["mean"]) - 1) < 2e-4


# ---- contenders ----

@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Two commits and a working tree with different lines; the library moves from tools/ to bindings/."""
    monkeypatch.setattr(builds, "ROOT", str(tmp_path))
    monkeypatch.delenv("SDPA_CONFIGS", raising=False)

    def git(*words):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], cwd=tmp_path, check=True,
                       capture_output=True)

    def write(path, text):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    source = ("// ==== 1 KNOBS ====\n#define SDPA_KNOBS(X)  \\\n  X(STAGES, 1, \"1..4\", \"\") \\\n  X(HEAD_DIM, 64, \"\", \"\")\n"
              "#ifdef STAGES\nstatic_assert(STAGES < 5, \"STAGES: at most 4. Type STAGES=1\");\n#endif\n"
              "// ==== 2 PROBLEM ====\n%s// ==== COPY TO HERE ====\nharness")
    write("sdpa.cu", source % "")
    write("configs.txt", "old\nkept STAGES=2 gate:regs<=9 # words\n")
    git("init", "-q", "-b", "trunk")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    write("tools/library.cu", "".join(name + "();\n" for name in builds.LIBRARY_FUNCTIONS))
    git("add", ".")
    git("commit", "-q", "-m", "two")
    (tmp_path / "bindings").mkdir()
    (tmp_path / "tools/library.cu").rename(tmp_path / "bindings/library.cu")
    write("sdpa.cu", source % "int x;  // the same but for words\n")
    write("configs.txt", "kept STAGES=2\nwide : kept HEAD_DIM=128\n")
    return write


def test_contenders_are_found(repository):
    a, b, c, d, e = builds.parse_contenders("HEAD:old STAGES=3 kept wide STAGES=4 torch:cudnn cublas HEAD_DIM=128".split())
    assert (a.text, a.words, a.tree.sha != "", a.target) == ("HEAD:old STAGES=3", ["STAGES=3"], True, "old__STAGES_3")
    assert (b.text, b.words, b.tree.sha) == ("kept", ["STAGES=2"], "")
    assert (c.text, c.D, c.knob("STAGES")) == ("wide STAGES=4", 128, "4")
    assert d.text == "torch:cudnn"
    assert [(one.text, one.label) for one in builds.parse_contenders(["torch:fa3", "flashinfer"])] == [
        ("torch:fa3", "torch_fa3"), ("flashinfer", "flashinfer")]
    assert (e.text, e.words, e.family, e.D) == ("cublas HEAD_DIM=128", ["HEAD_DIM=128"], "cublas", 128)
    assert a.effective_knobs() == ["HEAD_DIM=64", "STAGES=3"]


def test_a_file_of_ones_own_lines_is_not_that_of_a_commit(repository, tmp_path, monkeypatch):
    """SDPA_CONFIGS replaces the lines of the working tree alone."""
    (tmp_path / "mine.txt").write_text("mine STAGES=3\n")
    monkeypatch.setenv("SDPA_CONFIGS", str(tmp_path / "mine.txt"))
    a, b = builds.parse_contenders("HEAD:old mine".split())
    assert (a.text, b.knob("STAGES")) == ("HEAD:old", "3")
    for word in ("HEAD:mine", "old"):
        with pytest.raises(builds.Refused):
            builds.parse_contenders([word, "mine"])


@pytest.mark.parametrize("words,sentence", [
    ("gone:kept kept", "gone: no such commit in this repository"),
    ("HEAD:wide kept", "HEAD:wide: no line of configs.txt has that name; ./run_all.sh list has them all"),
    ("HEAD~1:old kept", "HEAD~1: its bindings/library.cu has no sdpa_library_params_bytes"),
    ("cublas STAGES=3", "STAGES=3: cublas has only the knobs DTYPE and HEAD_DIM"),
    ("kepd wide", "kepd: no line of configs.txt has that name; did you mean kept?"),
    ("kept FROB=1", "FROB=1: no knob is called FROB in the working tree; the knobs are STAGES HEAD_DIM"),
    ("kept arch=90a", "arch=90a is no knob"),
    ("STAGES=3 kept", "STAGES=3: a knob must follow the line"),
    ("torch:frob kept", "torch:frob: want torch:cudnn, torch:flash, torch:efficient, torch:math, torch:fa3, torch:fa3_tokenspeed, torch:fa4, flashinfer"),
    ("kept STAGES=5", "kept STAGES=5: STAGES: at most 4. Type STAGES=1"),
    ("kept", "give a line and at least one KNOB=VALUE, or two contenders"),
    ("kept wide", "the contenders do not compute the same: kept has D=64 fp16, wide has D=128 fp16"),
    ("kept STAGES=3 --shape mission,128", "--shape mission: D=128 fp16 is asked for, and the line has D=64 fp16"),
    ("kept STAGES=3 --b-shape 1,1,1,8,8", "give as many --b-shape as --shape"),
])
def test_refusals(repository, words, sentence):
    with pytest.raises(builds.Refused) as refused:
        ab.parse(words.split(), ["mission", "long"])
    assert sentence in str(refused.value) and refused.value.code == 2 and "\n" not in str(refused.value)


def test_the_name_of_a_line_that_cannot_be_read(repository):
    repository("configs.txt", "kept STAGES=2\nmine : gone STAGES=3\nbad : kept STAGES\n")
    reasons = "; configs.txt:2: .*'gone' is no earlier line.*; configs.txt:3: .*STAGES has no value"
    for call, words in ((lambda: ab.parse(["kept", "bad"], ["mission"]), "has that name"), (lambda: builds.lines_named("mine"), "such a name")):
        with pytest.raises(builds.Refused, match=words + reasons):
            call()


def test_one_line_and_knobs_are_two_contenders(repository):
    contenders, problems, pace, budget = ab.parse("kept STAGES=3 --shape long --causal br --budget 7".split(), [])
    assert [line.text for line in contenders] == ["kept", "kept STAGES=3"] and budget == 7
    assert pace is engine.PACE and ab.parse("kept STAGES=3 --sustained".split(), ["long"])[2] is engine.SUSTAINED
    assert str(problems[0][0]) == "long br" and problems[0][0].D == 64


def test_d_below_that_of_lines():
    """wgmma lines accept a smaller D, and are compared on the same problem; one of several such lines is enough."""
    contenders, problems, *_ = ab.parse("hopper_d128 hopper_d256 --shape long,80 --shape long".split(), [])
    assert [(a.D, b.D, a.dtype, a.Dv) for a, b in problems] == [(n, n, "fp16", 0) for n in (80, 128)]
    contenders, problems, *_ = ab.parse("hopper_d192_v128 OVERLAP=0 --shape long,160 --shape long,96".split(), [])
    assert [(a.D, a.Dv) for a, _ in problems] == [(160, 128), (96, 96)]
    for words in ("hopper_d128 hopper_d256 --shape long,129", "hopper_d128 ampere_d128 --shape long,80"):
        with pytest.raises(builds.Refused, match="is asked for"):
            ab.parse(words.split(), ["mission"])
    lines = builds.parse_contenders("hopper hopper_d256 hopper_d128 ampere_d128 hopper_d128_bf16".split())
    for shape, names in {"long,80": "hopper_d128 hopper_d128_bf16", "long,80,fp16": "hopper_d128", "long,40": "hopper",
                         "long,128,fp16": "hopper_d128 ampere_d128", "long,100": ""}.items():
        assert [line.text for line in engine.parse_problem(shape).lines_for(lines)] == names.split(), shape


@pytest.mark.parametrize("words,sentence", [
    ("arch=90a", "kept is a line for sm_90a alone, and Fake is sm_80"),
    ("arch=89", "kept is a line for sm_89 and newer, and Fake is sm_80"),
    ("", "torch:fa3: fa3_fwd_interface is missing; install it with: pip install fa3-fwd")])
def test_what_a_gpu_cannot_run_is_refused(repository, monkeypatch, words, sentence):
    repository("configs.txt", f"kept {words}\n")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True)))
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", None)
    monkeypatch.setattr(FakeGpu, "arch", "80")
    line, = builds.parse_contenders(["kept" if words else "torch:fa3"])
    with pytest.raises(builds.Refused, match=sentence):
        engine.load(line, FakeGpu(), {})
    assert words != "arch=89" or line.archs(["80", "89", "90a", "100"]) == ["89", "90a", "100"] and line.archs(["80"]) == ["89"]


# ---- building, by a compiler that writes down its words ----

NVCC = """#!/bin/sh
[ "$1" = --version ] && cat {0}/version && exit
echo "$@" >>{0}/calls
for word; do [ "$last" = -o ] && out=$word; last=$word; done
case "$*" in *STAGES=4*) echo 'error: static assertion failed with "STAGES: no"' >&2; exit 1 ;; esac
echo "of stdout"; echo "ptxas info : Used 40 registers" >&2
echo library >"$out"
"""


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """Builds contenders from their text; returns {text: Built} and the number of compiler calls."""
    (tmp_path / "nvcc").write_text(NVCC.format(tmp_path))
    (tmp_path / "nvcc").chmod(0o755)
    (tmp_path / "version").write_text("13.0")
    (tmp_path / "calls").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(builds, "BUILD", str(tmp_path / "build"))

    def build(words, *archs, **more):
        before = (tmp_path / "calls").read_text()
        built = builds.build(builds.parse_contenders(words.split()), *archs, **more)
        return {line.text: one for line, one in built.items()}, (tmp_path / "calls").read_text()[len(before):].splitlines()
    return build


def test_a_library_is_built_once(nvcc, tmp_path, monkeypatch):
    told, line = [], "scalar_vec8 USE_CP_ASYNC=1 STAGES=3"
    built, calls = nvcc(f"scalar_vec8 {line} scalar_vec8", "80", "90a", progress=lambda *x: told.append(x))
    assert list(built) == ["scalar_vec8", line] and [x[:2] for x in told] == [(1, 2), (2, 2)] and len(calls) == 2
    call, = (call for call in calls if "STAGES=3" in call)
    assert {"-O3", "-shared", "-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90a,code=sm_90a", "-DVEC_WIDTH=8",
            "-DUSE_CP_ASYNC=1", "-DSTAGES=3", "-DSDPA_CONFIG_NAME=scalar_vec8__USE_CP_ASYNC_1__STAGES_3",
            "bindings/library.cu"} <= set(call.split())
    found = built[line]
    folder = os.path.dirname(found.path)
    assert found.trouble == "" and open(found.path).read() == "library\n" and "40 registers" in found.log and "of stdout" in found.log
    for path, text in builds.Tree().sources("bindings/library.cu").items():  # the compiler finds all that is included
        assert open(os.path.join(folder, path)).read() == text
    assert not [name for name in os.listdir(folder) if name.count(".") > 2]
    again, calls = nvcc(line, "80", "90a")
    assert calls == [] and again[line][1:] == found[1:]
    paths = {found.path}
    for version, archs, more in (("13.0", "80", {}), ("13.0", "80 90a", dict(kind="-fatbin")),
                                 ("13.0", "80 90a", dict(program="tools/hog.cu")), ("13.1", "80 90a", {})):
        (tmp_path / "version").write_text(version)
        other, calls = nvcc(line, *archs.split(), **more)
        assert len(calls) == 1 and other[line].path not in paths, (version, archs, more)
        paths.add(other[line].path)
    monkeypatch.setattr(builds, "nvcc", lambda: None)
    with pytest.raises(builds.Refused, match="^nvcc is missing; install the CUDA Toolkit"):
        builds.build([found.line], "80")


def test_what_does_not_compile_is_tried_again(nvcc, monkeypatch):
    monkeypatch.setattr(builds.Tree, "refusal", lambda tree, words: "")
    for _ in range(2):
        built, calls = nvcc("scalar_vec8 STAGES=4 scalar_vec8", "80")
        one = built["scalar_vec8 STAGES=4"]
        assert (one.trouble, one.path) == ("STAGES: no", "") and built["scalar_vec8"].path and "STAGES=4" in calls[0] + calls[-1]
    assert len(calls) == 1
    with pytest.raises(builds.Refused, match="^scalar_vec8 STAGES=4 does not compile: STAGES: no$"):
        engine.load(one.line, FakeGpu(), {one.line: one})


DEVICE_CODE = """asm(".section .text.kernel,\\"ax\\"\\n.long {code}\\n.section .text.other,\\"ax\\"\\n.long 2\\n");
asm(".section .debug_line\\n.long {debug}\\n");
__attribute__((section(".nv.constant3"))) extern const int before[2] = {{7, 7}}, sdpa_library_launch[3] = {{128, 5000, 64}};
"""
HOST_CODE = 'extern "C" { char sdpa_library_threads[96], sdpa_library_smem_bytes[777], sdpa_library_block_m[32]; }'


def compiled(folder, text, *words):
    subprocess.run([builds.CXX, "-x", "c++", "-", *words, "-o", folder / "code"], input=text, text=True, check=True)
    return bytearray((folder / "code").read_bytes())


def test_facts_are_those_of_the_device_code(repository, tmp_path):
    """The facts depend on the code of embedded EM_CUDA ELF files only, not on host code or line numbers."""
    host = compiled(tmp_path, HOST_CODE, "-shared", "-fPIC", "-nostdlib")

    def library(code, debug=1, host=host, machine=190, name="kept", **more):
        cubin = compiled(tmp_path, DEVICE_CODE.format(code=code, debug=debug), "-c")
        cubin[18:20] = machine.to_bytes(2, "little")
        (tmp_path / "library").write_bytes(host + cubin)
        line, = builds.parse_contenders(name.split())
        return builds.facts(builds.Built(line, str(tmp_path / "library"), **more))
    log = "\n".join(f"Compiling entry function 'k' for 'sm_{arch}'\n{spilled} bytes spill stores, {spilled + 4} bytes spill loads\n"
                    f"Used {registers} registers" for arch, spilled, registers in (("90a", 0, 168), ("80", 8, 40)))
    log += "\n(C7519) (C7510) (C7519)"
    facts = library(1, log=log)
    assert (facts.registers, facts.spilled, facts.archs, facts.wgmma) == (168, 20, ("80", "90a"), ("C7510", "C7519"))
    assert (facts.threads, facts.shared_bytes, facts.block_m, facts.code_bytes) == (128, 5000, 64, 8)
    same, other = library(1, debug=2, host=host + b"more"), library(3)
    assert same.code == facts.code != other.code and same.same == facts.same != other.same and facts.code != facts.same
    changed = library(1, name="kept STAGES=3")
    assert changed.code == facts.code and changed.same != facts.same  # another program launches it
    bare = library(1, machine=62)  # the host's alone
    assert (bare.threads, bare.shared_bytes, bare.block_m, bare.code_bytes, bare.registers) == (96, 777, 32, 0, 0)


def test_what_python_shares_with_the_sources():
    """The named problems and the limits are equal."""
    named = re.search(r"named_shapes\[\] = {(.*?)};", builds.Tree().read("harness/options.h"), re.DOTALL)[1]
    assert {name: ",".join(map(str, sizes)) for name, sizes in engine.SHAPES.items()} == dict(re.findall(r'{"(\w+)", +"([\d,]+)"}', named))
    types = re.findall(r"constexpr Type \w+{\"(\w+)\".*?{([-\d.e]+), ([-\d.e]+), ([-\d.e]+)", builds.Tree().read("reference.cpp"))
    limits = {name: tuple(map(float, limits)) for name, *limits in types}
    assert engine.LIMITS == limits | {f"{name}/e4m3": limits[name] for name in ("fp16", "bf16")}  # of Q and of K and V
    sums = re.search(r"constexpr Tolerance fp16_sums{(.*?)}", builds.Tree().read("reference.cpp"))[1]
    assert engine.FP16_SUMS == tuple(map(float, sums.split(", ")))


def test_a_refusal_in_a_short_buffer():
    """The library writes no byte behind the caller's buffer, and ends the text in it."""
    line, = builds.parse_contenders(["scalar_e4m3"])
    library = engine.LoadedLine(line, builds.host_library(*line.words, program="tests/host_library.cu")).library
    p = engine.SdpaParams()
    library.sdpa_library_defaults(ctypes.byref(p))
    p.B = -1
    for size in (0, 1, 8, 13, 64):
        text = ctypes.create_string_buffer(b"x" * 80, 80)
        assert library.sdpa_library_forward(ctypes.byref(p), None, text, ctypes.c_size_t(size)) == 1
        told = b"B=-1 is outside [0, 1000000000]"[:size - 1] + b"\0" if size else b""
        assert text.raw == told.ljust(80, b"x")


def test_the_structs_of_the_header():
    """Each struct has exactly sdpa.cu's members: names, offsets and kinds. So do the ctypes structs parsed from the header."""
    program = '''#define BACKWARD 1
#include "bindings/library.cu"
template <class T> constexpr int kind = (std::is_pointer_v<T> ? 1 : std::is_floating_point_v<T> ? 2 : 3) * 1000 + sizeof(T);
'''
    Backward = builds.structs_of(builds.Tree().read(builds.HEADER))["SdpaBackwardParams"]
    for ours, theirs, base in ((engine.Strides, "Strides", "Strides"), (engine.Descale, "Descale", "Descale"),
                               (engine.SdpaParams, "SdpaParams", "SdpaParams"), (Backward, "SdpaBackwardParams", "SdpaGradients")):
        names = [name for name, _ in ours._fields_ if theirs == base or name != "forward"]
        program += f"void all_of(const sdpa::{base}& x) {{ const auto& [{', '.join(names)}] = x; }}\n"
        for name, of_ctypes in ours._fields_:
            number = {engine.ctypes.c_void_p: 1000, engine.ctypes.c_float: 2000}.get(of_ctypes, 3000) + engine.ctypes.sizeof(of_ctypes)
            for struct in (ours.__name__, "sdpa::" + theirs):
                program += (f"static_assert(offsetof({struct}, {name}) == {getattr(ours, name).offset} && "
                            f"kind<decltype({struct}::{name})> == {number}, \"{struct} has another {name}\");\n")
    done = subprocess.run([builds.CXX, *"-std=c++17 -fsyntax-only -w -I. -Icpu_backend -x c++ -".split()], cwd=builds.ROOT, input=program,
                          capture_output=True, text=True)
    assert done.returncode == 0 and program.count("static_assert") > 70, done.stderr[:1000]


# ---- the course of a comparison ----

@pytest.fixture
def course(tmp_path, monkeypatch):
    """Runs ab on two built contenders, each with an injected fault; B takes b_us."""
    monkeypatch.setattr(engine, "ROOT", str(tmp_path))

    def run(a, b, gpu, pace=engine.PACE, b_us=20.0):
        kernels = [FakeKernel(a), FakeKernel(b, b_us)]
        kernels[1].text = "other"
        left = iter(kernels)
        monkeypatch.setattr(engine, "load", lambda contender, gpu, built: next(left))
        problem = engine.parse_problem("1,2,1,40,50,64,fp16")
        ab.with_gpu(gpu, [builds.Torch("torch:cudnn"), builds.Torch("torch:flash")], [(problem, problem)], pace, None)
    return run


def rows(tmp_path, suffix):
    path, = (tmp_path / "results" / "ab").glob(f"*-Fake-{suffix}.csv")
    return list(csv.DictReader(open(path)))


def harmless(O, LSE):
    pass


def test_a_comparison(course, tmp_path, capsys):
    """B is 2% slower: checks the output and each column of the row."""
    course(harmless, harmless, FakeGpu(noise=1e-4), b_us=20.4)
    out = capsys.readouterr().out
    times = {key: list(map(float, found)) for key, *found in re.findall(
        r"^  ([AB])  \w+ +PASS +([\d.]+) us \[([\d.]+), ([\d.]+)\]  1980 MHz$", out, re.MULTILINE)}
    for key, us in (("A", 20), ("B", 20.4)):
        assert times[key][1] <= times[key][0] <= times[key][2] and times[key] == pytest.approx([us] * 3, rel=1e-3)
    ratio, low, high = map(float, re.search(r"B is SLOWER: \+(\S+)% of A's time \(99% interval \+(\S+)% to \+(\S+)%; 16 pairs, 0 discarded", out).groups())
    assert 1.9 < low <= ratio <= high < 2.1 and "1x2x1x40x50 on Fake" in out and "power limit" not in out
    row, = rows(tmp_path, "verdicts")
    assert list(row) == engine.VERDICT_COLUMNS and [row[name] for name in "a b problem b_problem D dtype verdict pairs thrown_out device".split()] == [
        "fake", "other", "1x2x1x40x50", "1x2x1x40x50", "64", "fp16", "SLOWER", "16", "0", "Fake"]
    assert [float(row[name]) for name in "a_us b_us a_mhz b_mhz".split()] == pytest.approx([20, 20.4, 1980, 1980], rel=1e-3)
    assert [float(row[name]) for name in ("ratio", "low", "high")] == pytest.approx([1 + x / 100 for x in (ratio, low, high)], abs=1e-4)
    samples = rows(tmp_path, "samples")
    of_b = [float(sample["us"]) for sample in samples if sample["contender"] == "other"]
    assert {sample["contender"] for sample in samples} == {"fake", "other"} and of_b == pytest.approx([20.4] * len(of_b), rel=2e-3)


def test_a_sustained_comparison(course, tmp_path, capsys):
    for pace, words, suffix in ((engine.SUSTAINED, "B is the SAME: ", "sustained-verdicts"),
                                (engine.PACE, "With --sustained, each runs at", "verdicts")):
        course(harmless, harmless, FakeGpu(power=defaultdict(lambda: 0.8, any=0.8)), pace)
        assert words in capsys.readouterr().out and len(rows(tmp_path, suffix)) == 1


def late(O, LSE, calls=itertools.count()):
    """Correct in the first launches, like a race that the check does not hit."""
    O[0, 0] += next(calls) > 1


@pytest.mark.parametrize("a,b,sentence", [
    (harmless, lambda O, LSE: O.fill(0), r"B \(other\) gives wrong results at 1x2x1x40x50, so it is not timed: O"),
    (late, harmless, "A .fake.: the result of its last replay at 1x2x1x40x50 differs")])
def test_a_wrong_side_gets_no_time(course, tmp_path, capsys, a, b, sentence):
    with pytest.raises(builds.Refused, match=sentence) as e:
        course(a, b, FakeGpu())
    assert e.value.code == 1 and " us" not in capsys.readouterr().out and not rows(tmp_path, "verdicts")


@pytest.mark.parametrize("error,code,sentence", [
    (KeyboardInterrupt(), 130, "stopped; earlier samples are in results/ab/"),
    (engine.CudaError("an illegal access"), 3, "an illegal access; earlier samples are in results/ab/")])
def test_an_end_in_the_middle_keeps_the_samples(course, tmp_path, error, code, sentence):
    class Ends(FakeGpu):
        def replay(self, graph, count, warm=0, behind=0):
            if self.now > 0.5:
                raise error
            return super().replay(graph, count, warm, behind)
    with pytest.raises(builds.Refused, match=sentence) as e:
        course(harmless, harmless, Ends())
    assert e.value.code == code and len(rows(tmp_path, "samples")) > 20 and not rows(tmp_path, "verdicts")


@pytest.mark.parametrize("code,sentence", [
    (0, ""), (1, "D (hopper STAGES=4) gives wrong results at 1x1x1x9x9 br window 3 on the CPU backend: wrong by 3"),
    (77, "D (hopper STAGES=4) cannot compute 1x1x1x9x9 br window 3 on the CPU backend: exit 77")])
def test_without_a_gpu_what_is_no_line_is_not_checked(monkeypatch, capsys, code, sentence):
    """ab reports for each contender whether it was checked on the CPU backend, and with which result."""
    contenders, commands = builds.parse_contenders("hopper torch:cudnn cublas hopper STAGES=4".split()), []

    def run(command):
        commands.append(command)
        return subprocess.CompletedProcess(command, code * (len(commands) > 1), "", "wrong by 3\nmore" * (code == 1))
    monkeypatch.setattr(builds, "nvcc", lambda: None)
    monkeypatch.setattr(builds, "run", run)
    monkeypatch.setattr(ab, "cpu_executables", lambda lines: {line: line.text for line in lines})
    problems = [(engine.parse_problem("small"), engine.parse_problem("1,1,1,9,9,64,fp16,br,3"))]
    with pytest.raises(builds.Refused) if code else contextlib.nullcontext() as refused:
        ab.without_gpu(contenders, problems)
    out, err = capsys.readouterr()
    passed = ["A  small: PASS on the CPU backend", "D  1x1x1x9x9 br window 3: PASS on the CPU backend"]
    assert out.splitlines() == ["A  hopper", "B  torch:cudnn", "C  cublas", "D  hopper STAGES=4", *passed[:1 if code else 2]]
    assert sorted(err.splitlines()[1:]) == ["B (torch:cudnn) is not checked: it needs a GPU.", "C (cublas) is not checked: it needs a GPU.",
                                            "nvcc is missing: no registers and no instruction counts."]
    assert commands == [["hopper", *"--check-only --shape 1,1,1,32,32 --causal off".split()],
                        ["hopper STAGES=4", *"--check-only --shape 1,1,1,9,9 --causal br --window 3,-1".split()]]
    assert not code or (str(refused.value), refused.value.code) == (sentence, 1 if code == 1 else 3)


def test_files_are_numbered(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "ROOT", str(tmp_path))
    monkeypatch.setattr(engine.time, "strftime", lambda form: "2026-01-02")
    for new, number in ((True, ""), (True, "-2"), (True, "-3"), (False, "")):
        found = engine.results_path("ab", "NVIDIA H100/80GB", "x", new=new)
        assert found == str(tmp_path / f"results/ab/2026-01-02-NVIDIA-H100-80GB-x{number}.csv")
        open(found, "w").close()
    assert engine.results_path("ab", "CPU", ending=".jsonl").endswith("ab/2026-01-02-CPU.jsonl")


# ---- tables ----

@pytest.fixture
def lines(repository):
    repository("configs.txt", "base\nkept STAGES=2 gate:step-over=base:1.10@mission\n")
    return builds.parse_contenders("kept base kept STAGES=1".split())


def test_what_ablate_takes_back(repository):
    repository("sdpa.cu", """// ==== 1 KNOBS ====
#define SDPA_KNOBS(X)  \\
  X(WIDE, 1, "", "") \\
  X(ASYNC, 0, "", "") \\
  X(HEAD_DIM, 64, "", "") \\
  X(WARPS, 1, "", "") \\
  X(ROWS, 1, "", "")
#if ASYNC == 1
static_assert(WIDE == 8, "ASYNC=1: it takes 8; type WIDE=8");
#endif
#ifdef ROWS
static_assert(ROWS == WARPS, "ROWS: as many as WARPS; type ROWS=4 WARPS=4");
#endif
static_assert(WARPS != 1, "WARPS: more");
// ==== 2 PROBLEM
""")
    repository("configs.txt", "l WIDE=8 ASYNC=1 HEAD_DIM=128 WARPS=2 ROWS=2\n")
    found = list(steps.removals(builds.parse_contenders(["l"])[0]))
    assert found[0] == ("WIDE=1", ["WIDE=1", "ASYNC=0"], "ASYNC=1: it takes 8; type WIDE=8")
    assert found[1] == ("ASYNC=0", ["ASYNC=0"], "")
    assert found[2][:2] == ("WARPS=1", None) and found[2][2].startswith("ROWS: as many")
    assert found[3][:2] == ("ROWS=1", None)


COLUMNS = engine.row_columns()


def test_ablate_ranks_what_is_left(lines, tmp_path, capsys):
    kept, base, without = lines
    kernels = {"kept": FakeKernel(line=kept), "kept STAGES=1": FakeKernel(us=30.0, line=without),
               "kept X=1": FakeKernel(lambda O, LSE: O.fill(0), 5.0, base)}
    table = engine.Table(str(tmp_path / "a.csv"), COLUMNS)
    passed = steps.run_problem(FakeGpu(noise=0), kernels, engine.parse_problem("1,2,1,40,50,64,fp16"),
                                dict.fromkeys(kernels), table)
    out, rows = capsys.readouterr().out, list(csv.DictReader(open(tmp_path / "a.csv")))
    assert not passed and "STAGES=1 " in out and "+50.0%" in out and "############" in out
    assert "X=1 " in out and "not timed: O(" in out
    assert [row["check"] for row in rows] == ["PASS", "PASS", "FAIL"] and rows[2]["graph_us"] == ""
    assert rows[1]["config"] == "kept__STAGES_1" and abs(float(rows[1]["graph_us"]) - 30) < 1
