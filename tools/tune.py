#!/usr/bin/env python3
"""usage: ./run_all.sh tune [--family F|--from LINE] [--shape S]... [--causal M] [--dtype T] [--head-dim D] [OPTION...]
       ./run_all.sh tune --all --from LINE --fix KNOB=V,V... [--shape S] [OPTION...]
       ./run_all.sh tune --table [--head-dim D] [--budget MIN]
       ./run_all.sh tune --replay LOG [--runs N]
       ./run_all.sh tune --export t4|svg LOG
Searches the best line for a problem on this GPU. It starts from LINE and the lines of configs.txt of its family, keeps
three elites, changes one to three of their knobs or crosses two of them. A candidate must be legal, compile without more
spills than LINE, be correct on a small, a ragged and the target problem with seeds 0, 1 and 2, and is timed in turns with
the best so far. At the end `ab` compares the best with LINE, or with the best line of configs.txt, on fresh samples.
  --family F      scalar, wmma, mma or wgmma; default the one of --from, or wgmma where the GPU has it, else mma
  --shape S       the problem, as for ab; several: the geometric mean of their times counts; default long
  --causal M      off, br or tl
  --dtype T       fp16, bf16, e4m3 or u8; default LINE's
  --head-dim D    64, 128 or 256; default LINE's
  --budget MIN    minutes in all, also those of earlier runs of the same command; default 8
  --fix KNOB=V    the knob keeps this value; V,V...: takes one of these; repeatable
  --seed N        of the search; default 0
  --micro JSON    starts from the best tiles of this file of ./run_all.sh micro as well, --top K of them (default 8);
                  default the newest of results/micro for this GPU, family and D
  --log FILE      default results/tune/DATE-DEVICE-NAME.jsonl. The same command again goes on from there
  --dry-run       walks the search without a GPU, by a cost model fitted to the newest rows of results/
  --all           every combination of the fixed knobs' values instead of a search; the others stay as LINE has them
  --table         a wgmma tile for each problem of `fit`, MIN minutes for all; tiles that are 2% quicker than those of
                  TUNED_TILES go to `fit`, which prints the table with them
  --replay LOG    the search over the candidates of an --all log, N times (default 20), beside random search
  --export WHAT   t4: a log in the T4 results format of the autotuning community; svg: its picture beside it
exit: 0, 1 the best is wrong at last, 2 bad usage, 3 the GPU or the disk failed, 130 Ctrl-C
"""
import csv
import datetime
import math
import os
import re
import shutil
import sys
import threading
import time
from pathlib import Path

import numpy as np

import ab
import builds
import engine
import fit
import micro
import report_rows
import tune_report
from builds import Refused
from search import AHEAD, CHOOSERS, FATES, Log, Space, State, base_line, family_lines, identity, parse_line, read_log, refusal, search

SEEDS = (0, 1, 2)
SMALL, RAGGED = "small", "2,4,2,197,131"
DROPS = ((1, 0.05), (3, 0.01), (6, math.inf))  # after so many blocks: slower by this than the best is not timed further
ENDLESS_S = 60  # a candidate that takes longer never ends
CANDIDATE_S = 6  # one takes about so long to compile and time
VERDICT_SHARE = 0.15  # of the budget
WORTH = 0.02  # by so much a tile must be quicker than those of TUNED_TILES to be a row of it
MOST = 20000  # combinations of --all


# ---- what was asked ----

def parse():
    parser = engine.new_parser()
    parser.add_argument("logs", nargs="*")
    for name in ("family", "head-dim", "micro", "log", "replay"):
        parser.add_argument("--" + name)
    parser.add_argument("--from", dest="base")
    parser.add_argument("--shape", action="append")
    parser.add_argument("--causal", default="off", choices=engine.CAUSAL)
    parser.add_argument("--dtype", choices=list(engine.LIMITS))
    parser.add_argument("--fix", action="append", default=[])
    parser.add_argument("--budget", default="8")
    for name, default in (("seed", "0"), ("top", "8"), ("runs", "20")):
        parser.add_argument("--" + name, default=default)
    parser.add_argument("--export", choices=("t4", "svg"))
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = engine.parse_options(parser, sys.argv[1:], __doc__)
    for name, least in (("seed", 0), ("top", 1), ("runs", 1)):
        setattr(options, name, engine.number("--" + name, getattr(options, name), least))
    if len(options.logs) != bool(options.export):
        raise Refused("--export takes one log" if options.export else f"{options.logs[0]}: only --export takes a file by itself")
    if not re.fullmatch(r"\d{1,4}(\.\d+)?", options.budget):
        raise Refused(f"--budget {options.budget}: want minutes, as in 8 or 1.5")
    options.budget_s = 60 * float(options.budget)
    if options.budget_s < CANDIDATE_S:
        raise Refused(f"--budget {options.budget}: {options.budget_s:g} s are less than the {CANDIDATE_S} s that a candidate "
                      "takes to compile and time")
    return options


def parse_fixed(options, line):
    """{knob: values} of --fix."""
    fixed = {}
    for word in options.fix:
        knob, _, values = word.partition("=")
        for value in values.split(","):
            builds.change_line(line, f"{knob}={value}")
        if knob in fixed and fixed[knob] != values.split(","):
            raise Refused(f"--fix {word} contradicts --fix {knob}={','.join(fixed[knob])}; to allow several values type "
                          f"{knob}=V,V")
        of_family = builds.FAMILIES.get(line.family)
        if knob in builds.FAMILIES.values() and values != ("1" if knob == of_family else "0"):
            raise Refused(f"--fix {word} contradicts the family, {line.family}; choose it with --family")
        fixed[knob] = values.split(",")
    for knob, values in fixed.items():
        bad = [value for value in values if line.tree.refusal([f"{knob}={value}"]).startswith(f"{knob}: not a legal value")]
        if bad:
            raise Refused(f"--fix {knob}={bad[0]}: {line.tree.refusal([f'{knob}={bad[0]}'])}")
    return fixed


def parse_problems(options, line):
    """The problems with their D and type, which are the line's unless another one is asked for."""
    problems = [engine.parse_problem(text, options.causal) for text in options.shape or ["long"]]
    kinds = {(int(options.head_dim or p.D or line.D), options.dtype or p.dtype or line.dtype) for p in problems}
    if len(kinds) > 1:
        raise Refused("the problems have different D or types; tune them one by one")
    D, dtype = kinds.pop()
    if dtype not in engine.LIMITS:
        raise Refused(f"{dtype}: the engine has tensors of {' and '.join(engine.LIMITS)}")
    for p in problems:
        if p.D not in (0, D) or p.dtype not in ("", dtype):
            raise Refused(f"--shape {p.shape} has D={p.D} {p.dtype}, and {D} {dtype} is asked for")
    return [p.typed(D, dtype) for p in problems]


def now():
    return datetime.datetime.now().isoformat(timespec="seconds")


# ---- who judges: a GPU ----

class GpuJudge:
    """Compiles, checks and times candidates. prepare() runs in other threads, ahead of judge(). What breaks the GPU's
    context, or never ends, is wrong, and restart(record) ends this process."""

    def __init__(self, gpu, problems, restart):
        self.gpu, self.restart, self.champion, self.spills = gpu, restart, None, None
        self.began = time.monotonic()
        self.stamp = dict(gpu=gpu.name, driver=gpu.nvml.driver, commit=engine.git_sha())
        self.benches = {p: engine.Bench(gpu, {}, {"": p}) for p in problems}
        D, dtype = problems[0].D, problems[0].dtype
        shapes = [engine.parse_problem(SMALL), *(engine.parse_problem(RAGGED, causal) for causal in engine.CAUSAL)]
        gates = [*((p.typed(D, dtype), SEEDS) for p in shapes), *((p, SEEDS[1:]) for p in problems)]
        self.gates = [(p, engine.Bench(gpu, {}, {"": p}, seed)) for p, seeds in gates for seed in seeds]

    def resume(self, state, records):
        """Goes on where a log ends: the best of it is loaded again."""
        if records:
            self.began -= records[-1]["spent_s"]
            self.spills = records[0].get("spilled")
        if state.best is not None:
            line = state.lines[state.best]
            kernel = engine.load(line, self.gpu, builds.build([line], self.gpu.arch))
            for problem, bench in self.benches.items():
                self.admit(bench, state.best, kernel, problem)
            self.champion = state.best

    def seconds(self):
        return time.monotonic() - self.began

    refusal = staticmethod(refusal)

    def prepare(self, line):
        """The first gates: a record with what stops the candidate, and its library if nothing does."""
        sentence = self.refusal(line)
        if sentence:
            return dict(fate="refused", sentence=sentence), None
        began = time.monotonic()
        built = builds.build_one(line, [self.gpu.arch], builds.LIBRARY, "-shared")
        build_s = round(time.monotonic() - began, 2)
        if built.trouble:
            return dict(fate="compile", sentence=built.trouble, build_s=build_s), None
        facts = builds.facts(built)
        return dict(registers=facts.registers, spilled=facts.spilled, shared_bytes=facts.shared_bytes,
                    build_s=build_s), built

    def judge(self, line, prepared, state):
        """The whole record: the candidate's fate, what is wrong with it, or its times."""
        record, built = prepared
        if built:
            self.spills = record["spilled"] if self.spills is None else self.spills
            most = self.gpu.attribute(97)  # MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
            if record["spilled"] > self.spills:
                record.update(fate="gate", sentence=f"spills {record['spilled']} bytes, the starting line {self.spills}")
            elif record["shared_bytes"] > most:
                record.update(fate="gate", sentence=f"needs {record['shared_bytes']} bytes of shared memory of {most}")
            else:
                self.run(line, built, record, state)
        return self.stamped(record)

    def stamped(self, record):
        return dict(record, spent_s=round(self.seconds(), 2), at=now(), **self.stamp)

    def run(self, line, built, record, state):
        """The gates that need the GPU."""
        def lost(words):
            self.restart(dict(knobs=identity(line), line=line.text,
                              **self.stamped(dict(record, fate="wrong", sentence=words))))
        watch = threading.Timer(ENDLESS_S, lost, [f"no end after {ENDLESS_S} s"])
        watch.start()
        try:
            kernel = engine.load(line, self.gpu, {line: built})
            began = time.monotonic()
            sentence = self.check(kernel)
            record["check_s"] = round(time.monotonic() - began, 2)
            if sentence:
                record.update(fate="wrong", sentence=sentence)
            else:
                self.time(line, kernel, record, state)
                record["time_s"] = round(time.monotonic() - began - record["check_s"], 2)
        except Refused as error:
            record.update(fate="gate", sentence=str(error))
        except engine.CudaError as error:
            record.update(fate="wrong", sentence=str(error))
            for bench in self.benches.values():
                bench.drop(identity(line))
            try:
                self.gpu.synchronize()
            except engine.CudaError:
                lost(str(error))
        finally:
            watch.cancel()

    def check(self, kernel):
        """What is wrong with its results on the gates' problems; "" if nothing is."""
        for problem, bench in self.gates:
            check, *_ = bench.run(kernel, problem)
            if not check.passed:
                return f"{problem}: {check.sentence}"
        return ""

    def admit(self, bench, key, kernel, problem):
        bench.kernels[key], bench.problems[key] = kernel, problem
        bench.add(key, kernel, problem)
        return bench.checks[key]

    def time(self, line, kernel, record, state):
        """Its time beside the best so far, on every problem, and so its fate."""
        key, logs, times = identity(line), [], {}
        for problem, bench in self.benches.items():
            check = self.admit(bench, key, kernel, problem)
            if not check.passed:
                record.update(fate="wrong", sentence=f"{problem}: {check.sentence}")
                break
            log, times[str(problem)] = self.beside_champion(bench, key)
            logs.append(log)
        else:
            score = math.exp(np.mean(logs)) * (1 if self.champion is None else state.records[self.champion]["score"])
            record.update(fate=state.judged(score, line), score=round(score, 5), us=times)
            if record["fate"] == "elite" and any(bench.changed_bits(key) for bench in self.benches.values()):
                record.update(fate="wrong", sentence="its last replay left other bits than the run that was checked")
        leaves = key
        if record["fate"] == "elite" and (self.champion is None or score < state.records[self.champion]["score"]):
            leaves, self.champion = self.champion, key
        for bench in self.benches.values():
            bench.drop(leaves)

    def beside_champion(self, bench, key):
        """The logarithm of its time over the champion's, and its time in us."""
        names = [key] if self.champion is None else [self.champion, key]
        series = engine.Series(self.gpu, {name: bench.graphs[name] for name in names}, engine.PACE)
        for blocks, slower in DROPS:
            while len(series.blocks) < blocks:
                series.block()
            ratios, _ = series.ratios(key, names[0])
            log = float(np.median(ratios)) if ratios else math.log(series.us(key) / series.us(names[0]))
            if log > slower:
                break
        return log, round(series.us(key), 4)


# ---- who judges without a GPU: a cost model ----

class ModelJudge:
    """In place of times: waves of CTAs times rounds of tiles, times what a score costs by the knobs, fitted to committed
    rows of the family. A candidate takes a second of a clock of its own."""

    def __init__(self, problems, family, device=""):
        path = max(Path(builds.ROOT, "results").glob("*.csv"), key=report_rows.by_name, default=None)
        if not path:
            raise Refused("results/ has no rows to fit a cost model to; measure them with: ./run_all.sh")
        with open(path, newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["family"] == family and row["graph_us"] and row["check"] == "PASS"]
        self.problems, self.spent_s = problems, 0
        pairs = [(knobs, engine.parse_problem(",".join(row[name] for name in "B Hq Hkv Sq Sk".split())).typed(int(row["D"]), ""),
                  float(row["graph_us"])) for row in rows for knobs in [dict(word.split("=") for word in row["knobs"].split())]
                 if not any(knobs.get(knob, "0") != "0" for knob in CHOOSERS)]
        if len(pairs) < 8:
            raise Refused(f"{path}: too few rows of {family} to fit a cost model to")
        self.names = sorted(pairs[0][0])
        x = np.array([self.features(knobs) for knobs, _, _ in pairs])
        y = np.array([math.log(us / self.scores(knobs, p)) for knobs, p, us in pairs])
        self.weights = np.linalg.solve(x.T @ x + 0.3 * np.eye(x.shape[1]), x.T @ y)

    def features(self, knobs):
        """Logarithms of the numbers, and their squares."""
        logs = [math.log2(int(knobs[name]) + 1) if knobs.get(name, "").isdigit() else 0 for name in self.names]
        return np.array([1, *logs, *(x * x / 8 for x in logs)])

    @staticmethod
    def scores(knobs, p):
        """Those that an SM computes, of whole tiles, with two rounds for the start and the end of an item."""
        rows, keys = int(knobs["BLOCK_M"]), int(knobs["BLOCK_N"]) * int(knobs["SPLIT_KV"])
        waves = math.ceil(p.B * p.Hq * math.ceil(p.Sq / rows) / 132)
        seen = p.visible().mean() if p.causal != "off" else p.Sk
        return waves * rows * keys * (math.ceil(seen / keys) + 2) * p.D

    def us(self, line):
        knobs = dict(word.split("=") for word in line.effective_knobs())
        return {str(p): math.exp(self.features(knobs) @ self.weights) * self.scores(knobs, p) for p in self.problems}

    def resume(self, state, records):
        self.spent_s = records[-1]["spent_s"] if records else 0

    def seconds(self):
        return self.spent_s

    refusal = staticmethod(refusal)

    def prepare(self, line):
        sentence = self.refusal(line)
        if sentence:
            return dict(fate="refused", sentence=sentence)
        if any(line.knob(knob, "0") != "0" for knob in CHOOSERS):
            return dict(fate="gate", sentence="the cost model knows no line that chooses its tile")
        return dict(us=self.us(line))

    def judge(self, line, record, state):
        if "us" in record:
            self.spent_s += 1
            first = next((one["us"] for one in state.records.values() if "us" in one), record["us"])
            score = math.exp(np.mean([math.log(us / first[p]) for p, us in record["us"].items()]))
            record.update(fate=state.judged(score, line), score=round(score, 5))
        return dict(record, spent_s=self.spent_s, gpu="none: a cost model")


# ---- a search from its beginning to its result ----

def log_path(options, header, space, problems):
    """The newest log of the same search, else a new one."""
    if options.log:
        return options.log
    name = "-".join([space.base.family, f"D{problems[0].D}", problems[0].dtype,
                     *(str(p).replace(" ", "-") for p in problems), *(["all"] if options.all else [])])
    folder = os.path.join(builds.BUILD, "tune") if options.dry_run else "tune"
    new = Path(engine.results_path(folder, header["gpu"], name, new=True, ending=".jsonl"))
    same = [one for one in new.parent.glob(f"*-{name}*.jsonl") if read_log(one)[0][:1] == [header]]
    return str(max(same, key=report_rows.by_name, default=new))


class Screen:
    """Time left, the best so far and counts by fate: on a terminal in one line, else a line for each new best."""

    def __init__(self, judge, end_s):
        self.judge, self.end_s, self.best = judge, end_s, None

    def show(self, state):
        left = max(0, self.end_s - self.judge.seconds())
        counts = state.counts()
        best = state.records.get(state.best, {})
        us = ", ".join(f"{us:.2f} us" for us in best.get("us", {}).values())
        text = (f"{left // 60:.0f}:{left % 60:02.0f} left, " + ", ".join(f"{counts[fate]} {fate}" for fate in FATES if counts[fate]) +
                (f"; best {us}: {best['line']}" if best else ""))
        if sys.stderr.isatty():
            print("\r\033[K" + text[:shutil.get_terminal_size().columns - 1], end="", file=sys.stderr, flush=True)
        elif self.best != state.best:
            print(text, file=sys.stderr, flush=True)
        self.best = state.best


def paste(line):
    """The candidate as a line of configs.txt, on the one from which it differs least."""
    tree, own = line.tree, dict(word.split("=") for word in line.effective_knobs())
    best = None
    for base in family_lines(tree, line.family):
        has = dict(word.split("=") for word in base.effective_knobs())
        words = [f"{knob}={value}" for knob, value in own.items() if has[knob] != value]
        if base.knob("arch") == line.knob("arch") and (not best or len(words) < len(best[1])):
            best = base, words
    return " ".join([f"{line.family}_tuned : {best[0].name}", *best[1]]) if best[1] else f"{best[0].name} is a line already"


def find_gpu(options):
    gpu = None if options.dry_run else engine.find_gpu()
    if not gpu and not options.dry_run:
        raise Refused("it times kernels and there is no GPU here; --dry-run, --replay and --export need none")
    return gpu


def run_search(options, gpu, more=()):
    """From what was asked to the end of the search: its log and state, the lines that it started from, and the problems."""
    line = base_line(options, gpu.arch if gpu else "90a")
    problems = parse_problems(options, line)
    fixed = parse_fixed(options, line)
    if options.all and not (options.base and fixed):
        raise Refused("--all wants --from LINE and the values of each knob, as in --fix BLOCK_N=32,64")
    space = Space(line, fixed, options.all)
    starts = space.starts(problems[0])
    space.base = next(filter(space.breeds, starts), starts[0])
    if options.all and space.count() > MOST:
        raise Refused(f"--all: {space.count()} combinations are more than {MOST}; give fewer values")
    device = gpu.name if gpu else "none"
    tiles = options.micro or micro.newest(device, line.family, problems[0].D)
    seeds = [*more, *(micro.seeds(tiles, space, problems[0], options.top) if tiles else [])]
    header = dict(tune=1, problems=[[str(p), p.D, p.dtype] for p in problems], base=space.base.text, space=space.values,
                  all=options.all, starts=[line.text for line in starts + seeds], seed=options.seed, gpu=device,
                  driver=gpu.nvml.driver if gpu else "", program=builds.digest(space.tree.program()))
    log = Log(log_path(options, header, space, problems), header)

    def restart(record):
        log.add(record)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    judge = GpuJudge(gpu, problems, restart) if gpu else ModelJudge(problems, line.family)
    records = [record for record in log.records if "fate" in record]
    state = State(space)
    for record in records:
        state.add(parse_line(space.tree, record["line"]), record)
    judge.resume(state, records)
    end_s = options.budget_s * (1 - VERDICT_SHARE if gpu and not options.all else 1)
    screen = Screen(judge, end_s)
    try:
        search(state, judge, log, [*starts[:1], *space.all()] if options.all else starts + seeds,
               np.random.default_rng([options.seed, len(records)]), lambda: judge.seconds() < end_s, screen.show,
               ahead=2 * builds.JOBS if options.all else AHEAD, breed=not options.all)
    except KeyboardInterrupt:
        raise Refused(f"stopped; the same command goes on from {log.path}", 130)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return log, state, starts[:1] if options.base else starts, problems


def result(gpu, log, state, starts, problems):
    """Prints what was found, and how it compares with the best of the lines that it started from."""
    if state.best is None:
        raise Refused(f"no candidate passed; why stands in {log.path}", 1)
    timed = [line for line in starts if "score" in state.records.get(identity(line), {})]
    best = state.lines[state.best]
    start = min(timed, key=lambda line: state.records[identity(line)]["score"], default=best)
    counts = state.counts()
    print(f"{len(state.records)} candidates: " + ", ".join(f"{counts[fate]} {fate}" for fate in FATES if counts[fate]))
    for key in dict.fromkeys([state.best, *state.elites, identity(start)]):
        record = state.records[key]
        print(f"  {100 * record['score']:6.1f}%  " + "  ".join(f"{us:.2f} us" for us in record["us"].values()) + f"  {record['line']}")
    if identity(start) == state.best:
        print(f"no candidate beats the starting line, {start.text}")
    elif gpu:
        verdict(gpu, log, start, best, problems)
    print(f"to paste into configs.txt:\n{paste(best)}")
    print(f"log: {os.path.relpath(log.path)}; a picture of it: ./run_all.sh tune --export svg {os.path.relpath(log.path)}",
          file=sys.stderr)
    return 0


def verdict(gpu, log, start, best, problems):
    """`ab` of the best against the starting line, on fresh samples, unless the log has it."""
    known = [record for record in log.records if record.get("verdict") and record["line"] == best.text]
    if known:
        for record in known:
            print(f"verdict of {record['at']}: {record['words']}")
        return
    found = ab.with_gpu(gpu, [start, best], [(p, p) for p in problems], engine.PACE, None)
    for problem, verdicts in found.items():
        log.add(dict(verdict=verdicts["B"].verdict, line=best.text, over=start.text, problem=str(problem),
                     words=f"{problem}: {ab.sentence_of('B', verdicts['B'])}", at=now()))


# ---- the table of tiles ----

def table(options):
    """Searches a tile for each problem of `fit`, beside TUNED_TILES, and lets `fit` judge those that are worth a row."""
    gpu, model, tree = find_gpu(options), fit.Model(), builds.loadable(builds.Tree())
    D = int(options.head_dim or 64)
    own = [tile for tile in model.tiles if tile.head_dim == D]
    options.family, options.head_dim, options.budget_s = "wgmma", str(D), options.budget_s / (2 * len(fit.SHAPES))
    options.base, options.fix = None, [*options.fix, "USE_FAST_EXP=0", "PACK_GQA=0", "SPLIT_CTAS=1"]
    lines = [tile.line(tree) for tile in own]
    new = {}
    for causal in ("off", "br"):
        for shape in fit.SHAPES:
            options.shape, options.causal = [shape], causal
            _, state, _, _ = run_search(options, gpu, lines)
            scores = {key: record["score"] for key, record in state.records.items() if "score" in record and record["fate"] != "wrong"}
            in_table = min((scores[key] for key in map(identity, lines) if key in scores), default=math.inf)
            best = next((key for key in sorted(scores, key=scores.get) if fit.Tile.of(state.lines[key])), None)
            gain = in_table / scores[best] - 1 if best is not None else 0
            tile = fit.Tile.of(state.lines[best]) if gain > WORTH else None
            print(f"{shape:<24} {causal:<3}  " + (f"{100 * gain:+.1f}%  {tile.knobs}" if tile else "TUNED_TILES has the best"))
            if tile:
                new[tile.knobs] = tile
    if gpu and new:
        tiles = [*own, *new.values()]
        rows = engine.Table(engine.results_path("fit", gpu.name, new=True), fit.COLUMNS)
        fit.print_fit(model, tiles, fit.measure(gpu, model, tiles, fit.listed([D], model.dtype), rows))
    return 0


def main():
    options = parse()
    if options.export:
        return tune_report.export(options.logs[0], options.export)
    if options.replay:
        return tune_report.replay(options)
    if options.table:
        return table(options)
    gpu = find_gpu(options)
    return result(gpu, *run_search(options, gpu))


if __name__ == "__main__":
    engine.command("tune", main)
