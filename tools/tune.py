"""usage: ./run_all.sh tune [--family F|--from LINE] [--shape S]... [OPTION...]
       ./run_all.sh tune --all --from LINE --fix KNOB=V,V... [--shape S] [OPTION...]
       ./run_all.sh tune --table [--head-dim D] [--budget MIN]
       ./run_all.sh tune --replay LOG
       ./run_all.sh tune --export t4|svg LOG
Searches the fastest line for a problem on this GPU with Optuna, starting from LINE and the lines of its family. A
candidate must be legal, compile without additional spills and be correct; it is then timed in turns with the best one so
far. At the end, `ab` compares the best candidate with LINE or the best line of configs.txt. docs/TUNING.md has details.
  --family F      scalar, wmma, mma or wgmma; default that of --from, or wgmma if the GPU has it, else mma
  --from LINE     a line of configs.txt, optionally followed by knobs
  --shape S       the problem, as for ab; repeatable: minimizes the geometric mean of their times; default long
  --causal off|br|tl  (default off)
  --dtype fp16|bf16|e4m3|u8  default LINE's
  --head-dim D    a multiple of 16; default LINE's
  --budget MIN    total minutes, including earlier runs of the same command (default 8)
  --fix KNOB=V    fix the knob to this value, or with V,V... to one of these values; repeatable
  --seed N        the seed of the search, from 0 (default 0)
  --seed-from CSV  from ./run_all.sh micro: after the starting line, try the best tiles of this CSV
  --top N         number of these tiles (default 8)
  --log FILE      Optuna's log; default results/tuning/DATE-DEVICE-NAME.jsonl. Repeating the command continues it
  --dry-run       search without a GPU, with a cost model fitted to the newest rows of results/
  --all           try all combinations of the values of fixed knobs instead of searching; other knobs are LINE's
  --table         search a wgmma tile for each problem of `fit`, in MIN minutes in total; tiles that are 2% faster than
                  TUNED_TILES are passed to `fit`, which prints the table with them
  --replay LOG    simulate the search on the candidates of an --all log, 20 times, and compare with random search
  --export t4|svg  t4: the log in the T4 results format of the autotuning community; svg: Optuna's plots
exit: 0, 1 the best line fails the final check, 2 bad usage, 3 the GPU or the disk failed, 130 Ctrl-C
"""
import collections
import itertools
import json
import math
import os
import re
import shlex
import shutil
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from scipy.interpolate import RBFInterpolator

import ab
import builds
import cli
import engine
import fit
import micro
import report_rows
from cli import Refused, say
from search import Space, base_line, chooses, family_lines, identity, knobs_of, parse_line, refusal

optuna.logging.set_verbosity(optuna.logging.WARNING)
warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)

RAGGED = "2,4,2,197,131"
DROPS = ((1, 0.05), (3, 0.01), (6, math.inf))  # {blocks: candidates slower than the best by this factor are abandoned}
ENDLESS_S = 60  # a candidate that takes longer is considered a hang
CANDIDATE_S = 6  # typical time to compile and measure a candidate
VERDICT_SHARE = 0.15  # of the budget
WORTH = 0.02  # minimum gain over TUNED_TILES of a new row
MOST = 20000  # maximum number of combinations of --all
BREEDERS = 3  # of the best so far
CHILDREN = 16  # the most promising of which is measured
NOISE = 0.05  # noise of the logarithm of a time, for the interpolation
AHEAD = 8  # candidates that are compiled ahead
KNOWN = 1000  # the search ends after this number of known proposals in a row
# {outcome of a candidate: its name in the T4 format}.
T4_INVALIDITY = {"refused": "constraints", "compile": "compile", "gate": "constraints", "wrong": "correctness",
                 "timed": "correct"}
WITHIN, SHARE = 0.98, 0.15  # success of a replayed search: within this factor of the best after this share of the candidates
RUNS, MOST_RUNS = 20, 18


# ---- arguments ----

def parse_fixed(options, line):
    """{knob: values} of --fix."""
    fixed = {}
    for word in options.fix or []:
        knob, _, text = word.partition("=")
        values = text.split(",")
        for value in values:
            builds.change_line(line, f"{knob}={value}")
            sentence = line.tree.refusal([f"{knob}={value}", *["BACKWARD=1"] * line.is_backward])
            if sentence.startswith(f"{knob}: not a legal value"):
                raise Refused(f"--fix {knob}={value}: {sentence}")
        if fixed.setdefault(knob, values) != values:
            raise Refused(f"--fix {word} contradicts --fix {knob}={','.join(fixed[knob])}; "
                          f"to allow several values type {knob}=V,V")
        if knob in builds.FAMILIES.values() and values != [knobs_of(line)[knob]]:
            raise Refused(f"--fix {word} contradicts the family, {line.family}; choose it with --family")
    return fixed


def parse_problems(options, line):
    """The problems with D and type, by default those of the line."""
    problems = [engine.parse_problem(text, options.causal) for text in options.shape or ["long"]]
    if any(p.left >= 0 for p in problems):
        raise Refused("the search does not support windows; omit the last number of --shape")
    kinds = {(int(options.head_dim or p.D or line.D), options.dtype or p.dtype or line.dtype) for p in problems}
    if len(kinds) > 1:
        raise Refused("the problems have different D or types; tune them one by one")
    D, dtype = kinds.pop()
    for p in problems:
        if p.D not in (0, D) or p.dtype not in ("", dtype):
            raise Refused(f"--shape {p.shape} has D={p.D} {p.dtype}, but {D} {dtype} was requested")
    return [p.typed(D, dtype) for p in problems]


# ---- measuring candidates on a GPU ----

class Wrong(engine.CudaError):
    """A candidate with wrong results."""


class GpuJudge:
    """Compiles, checks and times candidates. prepare() runs in other threads, ahead of judge(). A candidate that breaks the
    CUDA context or hangs is wrong; restart(record) then replaces this process."""

    def __init__(self, gpu, problems, restart):
        self.gpu, self.restart, self.champion, self.score, self.spills = gpu, restart, None, 1, None
        self.began = time.monotonic()
        self.benches = {p: engine.Bench(gpu, {}, {"": p}) for p in problems}
        D, dtype = problems[0].D, problems[0].dtype
        shapes = [engine.parse_problem("small"), *(engine.parse_problem(RAGGED, causal) for causal in engine.CAUSAL)]
        gates = [(p.typed(D, dtype), seed) for p in shapes for seed in (0, 1, 2)]
        gates += [(p, seed) for p in problems for seed in (1, 2)]  # seed 0 is used for timing
        self.gates = [(p, engine.Bench(gpu, {}, {"": p}, seed)) for p, seed in gates]

    def resume(self, study, space):
        """Continues a log: loads its best candidate."""
        if study.trials:
            self.began -= study.trials[-1].user_attrs["spent_s"]
            self.spills = study.trials[0].user_attrs.get("spilled")
        if timed(study):
            best = study.best_trial
            line = parse_line(space.tree, best.user_attrs["line"])
            kernel = engine.load(line, self.gpu, builds.build([line], self.gpu.arch))
            self.champion, self.score = identity(line), best.value
            for problem, bench in self.benches.items():
                bench.add(self.champion, kernel, problem)

    def seconds(self):
        return time.monotonic() - self.began

    def prepare(self, line):
        """A record with the reason to reject the candidate, or with its library."""
        began = time.monotonic()
        built = builds.build_one(line, [self.gpu.arch], builds.LIBRARY, "-shared")
        record = dict(build_s=round(time.monotonic() - began, 2))
        if built.trouble:
            return dict(record, fate="compile", sentence=built.trouble)
        facts = builds.facts(built)
        return dict(record, built=built, registers=facts.registers, spilled=facts.spilled,
                    shared_bytes=facts.shared_bytes)

    def judge(self, line, record):
        """Completes the record with the candidate's outcome and the error, or the times and the score relative to the first."""
        def lost(sentence):
            self.restart(dict(record, knobs=identity(line), line=line.text, fate="wrong", sentence=sentence,
                              spent_s=round(self.seconds(), 2)))
        watch = threading.Timer(ENDLESS_S, lost, [f"no end after {ENDLESS_S} s"])
        watch.start()
        try:
            if "built" in record:
                self.run(line, record.pop("built"), record)
        except Refused as error:
            record.update(fate="wrong" if isinstance(error, engine.CudaError) else "gate", sentence=str(error))
            for bench in self.benches.values():
                bench.drop(identity(line))
            try:
                self.gpu.synchronize()
            except engine.CudaError:
                lost(str(error))
        finally:
            watch.cancel()
        return dict(record, spent_s=round(self.seconds(), 2))

    def run(self, line, built, record):
        """Checks a candidate and times it in turns with the best one so far, on all problems."""
        self.spills = record["spilled"] if self.spills is None else self.spills
        most = self.gpu.attribute(97)  # MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        if record["spilled"] > self.spills:
            raise Refused(f"spills {record['spilled']} bytes, but the starting line {self.spills}")
        if record["shared_bytes"] > most:
            raise Refused(f"needs {record['shared_bytes']} bytes of shared memory of {most}")
        kernel, key, began = engine.load(line, self.gpu, {line: built}), identity(line), time.monotonic()
        for problem, bench in self.gates:
            check, *_ = bench.run(kernel, problem)
            if not check.passed:
                raise Wrong(f"{problem}: {check.sentence}")
        record["check_s"] = round(time.monotonic() - began, 2)
        logs, us = [], {}
        for problem, bench in self.benches.items():
            check = bench.add(key, kernel, problem)
            if not check.passed:
                raise Wrong(f"{problem}: {check.sentence}")
            log, us[str(problem)] = self.beside_champion(bench, key)
            logs.append(log)
        if any(bench.changed_bits(key) for bench in self.benches.values()):
            raise Wrong("the result of its last replay differs from the checked one")
        score = round(math.exp(np.mean(logs)) * self.score, 5)
        record.update(fate="timed", score=score, us=us, time_s=round(time.monotonic() - began - record["check_s"], 2))
        leaves = key
        if self.champion is None or score < self.score:
            leaves, self.champion, self.score = self.champion, key, score
        for bench in self.benches.values():
            bench.drop(leaves)

    def beside_champion(self, bench, key):
        """The logarithm of its time divided by the champion's, and its time in us."""
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


# ---- a cost model instead of a GPU ----

class ModelJudge:
    """Estimates times: waves of CTAs times K tiles times the cost of a K tile, which depends on the knobs and is fitted to
    the newest rows of the family in results/. Each candidate takes a second of simulated time."""

    def __init__(self, problems, family):
        source, = report_rows.newest(Path(builds.ROOT, "results"))["lines"]
        rows = [(dict(word.split("=", 1) for word in shlex.split(row["knobs"])), fit.problem_of(row), us)
                for row, us in report_rows.timed(source)
                if row["family"] == family and "USE_TUNED=1" not in row["knobs"]]
        if not rows:
            raise Refused(f"{source.name} has no rows of {family} to fit a cost model to")
        self.problems, self.study = problems, None
        self.names = sorted(rows[0][0])
        x = np.array([self.features(knobs) for knobs, _, _ in rows])
        y = np.log([us / self.rounds(knobs, p) for knobs, p, us in rows])
        self.weights = np.linalg.solve(x.T @ x + 0.3 * np.eye(x.shape[1]), x.T @ y)

    def features(self, knobs):
        """The features: logarithms of the numbers, and their squares."""
        logs = [math.log2(int(knobs[name]) + 1) if knobs.get(name, "").isdigit() else 0 for name in self.names]
        return np.array([1, *logs, *(x * x / 8 for x in logs)])

    @staticmethod
    def rounds(knobs, p):
        """Number of K tiles of an SM, plus two for prologue and epilogue of each item."""
        rows, keys = int(knobs.get("BLOCK_M", 32)), int(knobs.get("BLOCK_N", 32)) * int(knobs.get("SPLIT_KV", 1))
        waves = math.ceil(p.B * p.Hq * math.ceil(p.Sq / rows) / 132)
        return waves * (2 + (math.ceil(p.Sk / keys) if p.causal == "off" else p.visible().mean() / keys + 0.5))

    def resume(self, study, space):
        self.study = study

    def seconds(self):
        return len(timed(self.study))

    def prepare(self, line):
        if chooses(line):
            return dict(fate="gate", sentence="the cost model does not support lines that choose their tile")
        knobs = knobs_of(line)
        return dict(fate="timed", us={str(p): math.exp(self.features(knobs) @ self.weights) * self.rounds(knobs, p)
                                      for p in self.problems})

    def judge(self, line, record):
        if "us" in record:
            first = next((one.user_attrs["us"] for one in timed(self.study)), record["us"])
            record["score"] = round(math.exp(np.mean([math.log(us / first[p]) for p, us in record["us"].items()])), 5)
        return record


# ---- the search ----

class Mutations(optuna.samplers.RandomSampler):
    """Draws CHILDREN mutations of the BREEDERS best candidates and proposes the one with the smallest predicted time, by
    interpolation of measured times. Optuna's own samplers draw from the whole space, most of which is illegal."""

    def __init__(self, space, seed):
        super().__init__()
        self.space, self.rng = space, np.random.default_rng(seed)

    def infer_relative_search_space(self, study, trial):
        return {knob: optuna.distributions.CategoricalDistribution(self.space.values[knob]) for knob in self.space.free}

    def sample_relative(self, study, trial, space):
        done = sorted((one for one in timed(study) if one.params), key=lambda one: one.value)
        parents = [one.params for one in done[:BREEDERS]] or [self.space.knobs(self.space.base)]
        tried = {tuple(map(one.params.get, space)) for one in study.get_trials(deepcopy=False)}
        children = [self.space.mutated(self.rng, parents[self.rng.integers(len(parents))]) for _ in range(CHILDREN)]
        children = [one for one in children if tuple(map(one.get, space)) not in tried] or children

        def places(many):
            return [[float(self.space.values[knob].index(one[knob])) for knob in space] for one in many]
        if len(done) < 2:
            return children[0]
        times = RBFInterpolator(places(one.params for one in done), [math.log(one.value) for one in done],
                                kernel="linear", smoothing=NOISE)
        return children[times(places(children)).argmin()]


def timed(study):
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def ended(study):
    """All candidates with an outcome; duplicates have none."""
    return [one for one in study.get_trials(deepcopy=False) if "fate" in one.user_attrs]


def search(study, space, judge, lines, goes_on, log=lambda trial: None, ahead=AHEAD, breed=True, refusal=refusal):
    """Measures the lines, then proposals of the sampler while goes_on(). The next `ahead` candidates are compiled in
    parallel. Illegal candidates are rejected before they are queued."""
    seen = {one.user_attrs["knobs"] for one in ended(study)}
    queue = collections.deque({identity(line): line for line in lines if identity(line) not in seen}.values())
    waiting = collections.deque()

    def end(trial, line, record):
        record = dict(knobs=identity(line), line=line.text, **judge.judge(line, record))
        for name, value in record.items():
            trial.set_user_attr(name, value)
        passed = record["fate"] == "timed"
        log(study.tell(trial, record["score"] if passed else None, TrialState.COMPLETE if passed else TrialState.FAIL))

    def candidates():
        """Yields new legal candidates."""
        for _ in range(KNOWN):
            if not goes_on() or not (queue or breed):
                return
            line = queue.popleft() if queue else None
            if line:
                study.enqueue_trial({} if chooses(line) else space.knobs(line))
            trial = study.ask()
            if not line or not chooses(line):
                knobs = {knob: trial.suggest_categorical(knob, space.values[knob]) for knob in space.free}
                line = line or space.line(knobs)
            if identity(line) in seen:
                study.tell(trial, state=TrialState.FAIL)
                continue
            seen.add(identity(line))
            if sentence := refusal(line):
                end(trial, line, dict(fate="refused", sentence=sentence))
            else:
                yield trial, line
    with ThreadPoolExecutor(builds.JOBS) as pool:
        try:
            while goes_on():
                for trial, line in itertools.islice(candidates(), ahead - len(waiting)):
                    waiting.append((trial, line, pool.submit(judge.prepare, line)))
                if not waiting:
                    return
                trial, line, prepared = waiting.popleft()
                end(trial, line, prepared.result())
        finally:
            pool.shutdown(cancel_futures=True)


# ---- the log ----

def read_log(path):
    """Loads the study of a log."""
    if not os.path.exists(path):
        raise Refused(f"{path}: no such file")
    try:
        return optuna.load_study(study_name=None, storage=optuna.storages.JournalStorage(JournalFileBackend(path)))
    except (LookupError, TypeError, ValueError):
        raise Refused(f"{path}: want a log of ./run_all.sh tune") from None


class Log:
    """A journal of Optuna with the arguments and each completed candidate. Truncates an incomplete last record."""

    def __init__(self, path, asked):
        self.path = os.path.abspath(path)
        try:
            if os.path.exists(path) and os.path.getsize(path):
                self.study = read_log(path)
                if self.study.user_attrs.get("search") != asked:
                    raise Refused(f"{path} is the log of another search; name another file or remove it")
                with open(path, "rb+") as file:
                    file.truncate(file.read().rindex(b"\n") + 1)
                Path(self.path + ".lock").unlink(missing_ok=True)  # left by a killed process
            else:
                os.makedirs(os.path.dirname(self.path), exist_ok=True)
                self.study = optuna.create_study(storage=optuna.storages.JournalStorage(JournalFileBackend(self.path)))
                self.study.set_user_attr("commit", engine.git_sha())
                self.study.set_user_attr("search", asked)
        except OSError as error:
            raise Refused(f"{path} cannot be written: {error.strerror}", 3)

    def add(self, trial):
        """Stores only the attributes of candidates without a time, since the records of parameters are long."""
        if trial.value is None:
            trial = optuna.trial.create_trial(state=TrialState.FAIL, user_attrs=trial.user_attrs)
        try:
            self.study.add_trial(trial)
        except OSError as error:
            raise Refused(f"{self.path} cannot be written: {error.strerror}; what it has is valid, "
                          "and the same command continues it", 3)


# ---- running a search ----

def log_path(options, asked, space, problems):
    """The newest log of the same search, or a new one."""
    name = "-".join([space.base.family, f"D{problems[0].D}", problems[0].dtype,
                     *(str(p).replace(" ", "-") for p in problems), *(["all"] if options.all else []),
                     builds.digest(json.dumps(asked))[:6]])
    folder = os.path.join(builds.BUILD, "tune") if options.dry_run else "tuning"
    new = Path(engine.results_path(folder, asked["gpu"], name, ending=".jsonl"))
    return str(max(new.parent.glob(f"*-{name}.jsonl"), key=report_rows.by_name, default=new))


def show(study, trial, left):
    """Prints remaining time, counts by outcome and the best candidate: in one line on a terminal, else for each new best."""
    best = study.best_trial if timed(study) else None
    text = f"{left // 60:.0f}:{left % 60:02.0f} left, {counts(study)}"
    if best:
        text += f"; best {times(best)}: {best.user_attrs['line']}"
    if sys.stderr.isatty():
        print("\r\033[K" + text[:shutil.get_terminal_size().columns - 1], end="", file=sys.stderr, flush=True)
    elif best and best.number == trial.number:
        say(text)


def counts(study):
    found = collections.Counter(one.user_attrs["fate"] for one in ended(study))
    return ", ".join(f"{found[fate]} {fate}" for fate in T4_INVALIDITY if found[fate])


def times(trial):
    return ", ".join(f"{us:.2f} us" for us in trial.user_attrs["us"].values())


def paste(line):
    """The candidate as a line of configs.txt, based on the most similar line."""
    own, changes = knobs_of(line), {}
    for base in family_lines(line.tree, line.family, line.is_backward):
        if base.knob("arch") == line.knob("arch"):
            changes[base.name] = [f"{knob}={own[knob]}" for knob, value in knobs_of(base).items() if own[knob] != value]
    name = min(changes, key=lambda name: len(changes[name]))
    return " ".join([f"{line.family}_tuned : {name}", *changes[name]]) if changes[name] else f"{name} is a line already"


def find_gpu(options):
    return None if options.dry_run else engine.need_gpu("; --dry-run, --replay and --export need none")


def run_search(options, gpu, more=()):
    """Runs the search. Returns the log, the study, the starting lines and the problems."""
    line = base_line(options, gpu.arch if gpu else "90a")
    if not gpu and line.is_backward:
        raise Refused(f"{line.name}: --dry-run has no cost model of the backward pass")
    problems, fixed = parse_problems(options, line), parse_fixed(options, line)
    if options.all and not (options.from_ and fixed):
        raise Refused("--all needs --from LINE and the values of each knob, as in --fix BLOCK_N=32,64")
    space = Space(line, fixed, options.all)
    starts = space.starts(problems[0])
    space.base = next(itertools.filterfalse(chooses, starts), starts[0])
    seeds = micro.seeds(options.seed_from, space, gpu.arch if gpu else "90a", options.top) if options.seed_from else []
    lines = [starts[0], *seeds, *starts[1:], *more]
    count = math.prod(map(len, space.values.values()))
    if options.all and count > MOST:
        raise Refused(f"--all: {count} combinations are more than {MOST}; give fewer values")
    device = gpu.name if gpu else "none"
    asked = dict(problems=[[str(p), p.D, p.dtype] for p in problems], base=space.base.text, space=space.values,
                 all=options.all, starts=[line.text for line in lines], seed=options.seed, gpu=device,
                 driver=gpu.nvml.driver if gpu else "", program=builds.digest(space.tree.program()))
    log = Log(options.log or log_path(options, asked, space, problems), asked)

    def restart(record):
        log.add(optuna.trial.create_trial(state=TrialState.FAIL, user_attrs=record))
        os.execv(sys.executable, [sys.executable, os.path.dirname(__file__), *sys.argv])
    judge = GpuJudge(gpu, problems, restart) if gpu else ModelJudge(problems, line.family)
    judge.resume(log.study, space)
    study = optuna.create_study(sampler=Mutations(space, [options.seed, len(log.study.trials)]))
    study.add_trials(log.study.trials)  # completed ones; the log has no others
    end_s = options.budget_s * (1 - VERDICT_SHARE if gpu and not options.all else 1)

    def write(trial):
        log.add(trial)
        show(study, trial, max(0, end_s - judge.seconds()))
    lines = [*starts[:1], *space.all()] if options.all else lines
    try:
        search(study, space, judge, lines, lambda: judge.seconds() < end_s, write,
               ahead=2 * builds.JOBS if options.all else AHEAD, breed=not options.all)
    except KeyboardInterrupt:
        raise Refused(f"stopped; the same command continues {log.path}", 130)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return log, study, starts[:1] if options.from_ else starts, problems


def result(gpu, log, study, starts, problems):
    """Prints the result and its comparison with the best starting line."""
    found = sorted(timed(study), key=lambda one: one.value)
    if not found:
        raise Refused(f"no candidate passed; the reasons are in {log.path}", 1)
    names = {identity(line) for line in starts}
    start = next((one for one in found if one.user_attrs["knobs"] in names), found[0])
    print(f"{len(ended(study))} candidates: {counts(study)}")
    for one in found[:BREEDERS] + [start] * (start not in found[:BREEDERS]):
        print(f"  {100 * one.value:6.1f}%  {times(one)}  {one.user_attrs['line']}")
    best = parse_line(starts[0].tree, found[0].user_attrs["line"])
    if start is found[0]:
        print(f"no candidate beats the starting line, {best.text}")
    elif gpu:
        verdict(gpu, log, parse_line(best.tree, start.user_attrs["line"]), best, problems)
    print(f"to paste into configs.txt:\n{paste(best)}")
    path = os.path.relpath(log.path)
    say(f"log: {path}; to plot it: ./run_all.sh tune --export svg {path}")


def verdict(gpu, log, start, best, problems):
    """Compares the best candidate with the starting line by `ab`, with new samples, unless the log has the result."""
    known = log.study.user_attrs.get("verdict", {})
    if known.get("line") == best.text:
        print(*(f"verdict: {words}" for words in known["words"]), sep="\n")
    else:
        found = ab.with_gpu(gpu, [start, best], [(p, p) for p in problems], engine.PACE, None)
        words = [f"{problem}: {ab.sentence_of('B', verdicts['B'])}" for problem, verdicts in found.items()]
        log.study.set_user_attr("verdict", dict(line=best.text, words=words))


# ---- exporting a log ----

def t4(study):
    """The log in the T4 results schema 1.0.0 (github.com/odgaard/TuningSchema), with times in ms."""
    results = []
    for one in study.trials:
        record, us = one.user_attrs, one.user_attrs.get("us", {})
        invalidity = T4_INVALIDITY[record["fate"]]
        build_ms, check_ms, time_ms = (1e3 * record.get(name, 0) for name in ("build_s", "check_s", "time_s"))
        results.append(dict(
            timestamp=one.datetime_complete.isoformat(), objectives=["time"],
            configuration=dict(word.split("=", 1) for word in shlex.split(record["knobs"])),
            times=dict(compilation_time=build_ms, validation=check_ms, framework=time_ms, search_algorithm=0,
                       runtimes=[each / 1e3 for each in us.values()]),
            invalidity=invalidity, correctness=int(invalidity == "correct"),
            measurements=[dict(name=f"time of {problem}", value=us[problem], unit="us") for problem in us]))
    return {"schema_version": "1.0.0", "results": results}


def export(path, what):
    study = read_log(path)
    if what == "t4":
        print(json.dumps(t4(study), indent=1))
        return
    own = optuna.create_study()
    own.add_trials([one for one in timed(study) if one.params])  # tuned lines have none
    if len(own.trials) < 2:
        raise Refused(f"{path}: fewer than two candidates have a time")
    plots, stem = optuna.visualization.matplotlib, os.path.splitext(path)[0]
    shown = plots.plot_optimization_history(own, target_name="time over the first line's")
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.2)
    worth = plots.plot_param_importances(own, evaluator=evaluator)
    for axes, out in ((shown, f"{stem}.svg"), (worth, f"{stem}-knobs.svg")):
        axes.figure.savefig(out, bbox_inches="tight")
        print(out)


# ---- evaluating the search ----

def evaluations_needed(space, known, lines, breed, goal, seed):
    """The number of candidates that a search from these lines measures until it reaches the score `goal`. `known` has the
    records of all candidates, by their knobs."""
    study = optuna.create_study(sampler=Mutations(space, seed))
    judge = SimpleNamespace(prepare=lambda line: known[identity(line)], judge=lambda line, record: record)

    def goes_on():
        return not any(one.value <= goal for one in timed(study))
    search(study, space, judge, lines, goes_on, breed=breed,
           refusal=lambda line: "" if identity(line) in known else "not in the list")
    return math.inf if goes_on() else sum(one.user_attrs["fate"] != "refused" for one in ended(study))


def replay(options):
    """Prints how many candidates of a list the search measures, for each kind of start, compared with random search."""
    study = read_log(options.replay)
    asked, count = study.user_attrs.get("search", {}), len(timed(study))
    if not asked.get("all") or not count:
        raise Refused(f"{options.replay}: want the log of tune --all")
    known = {one.user_attrs["knobs"]: dict(fate=one.user_attrs["fate"], score=one.value) for one in study.trials}
    name, D, dtype = asked["problems"][0]
    shape, _, causal = name.partition(" ")
    problem = engine.parse_problem(shape.replace("x", ","), causal or "off").typed(D, dtype)
    tree = builds.Tree()
    space = Space(parse_line(tree, asked["base"]), asked["space"], True)
    all_lines = [parse_line(tree, one.user_attrs["line"]) for one in study.trials]
    lines, base, family = space.starts(problem), space.base.name, space.base.family
    kinds = {"random search": [], f"from {base}": lines[:1], "from the family's lines": lines}
    if options.seed_from:
        kinds[f"from {base} and micro's"] = lines[:1] + micro.seeds(options.seed_from, space, "", options.top)
    print(f"{name}, {family}, D={D} {dtype}: {len(known)} candidates, {count} of them fit to time; "
          f"measured until one is within {100 - 100 * WITHIN:.0f}% of the best")
    print(f"{'search':<36} {'median':>6} {'18 of 20':>8} {'of the list':>11}  within {100 * SHARE:.0f}%")
    for kind, queue in kinds.items():
        needed = sorted(evaluations_needed(space, known, queue or np.random.default_rng(seed).permutation(all_lines),
                                           bool(queue), study.best_value / WITHIN, seed) for seed in range(RUNS))
        most = needed[MOST_RUNS - 1]
        print(f"{kind:<36} {np.median(needed):6.0f} {most:8.0f} {100 * most / count:10.1f}%  "
              f"{sum(n <= SHARE * count for n in needed)} of {RUNS}", flush=True)


# ---- the table of tiles ----

def table(options):
    """Searches a tile for each problem of `fit` and compares it with TUNED_TILES; passes better tiles to `fit`."""
    gpu, model, tree = find_gpu(options), fit.Model(), builds.Tree()
    D = int(options.head_dim or 64)
    tiles = [tile for tile in model.tiles if tile.head_dim == D]
    options.family, options.head_dim, options.budget_s = "wgmma", str(D), options.budget_s / (2 * len(fit.SHAPES))
    options.from_, options.fix = None, [*(options.fix or []), "USE_FAST_EXP=0", "PACK_GQA=0", "SPLIT_CTAS=1"]
    lines = [tile.line(tree) for tile in tiles]
    in_table, new = {identity(line) for line in lines}, {}
    for options.causal, shape in itertools.product(("off", "br"), fit.SHAPES):
        options.shape = [shape]
        _, study, _, _ = run_search(options, gpu, lines)
        scores = {parse_line(tree, one.user_attrs["line"]): one.value for one in timed(study)}
        of_table = min((score for line, score in scores.items() if identity(line) in in_table), default=math.inf)
        best = next(filter(fit.Tile.of, sorted(scores, key=scores.get)), None)
        gain, words = of_table / scores[best] - 1 if best else 0, "TUNED_TILES has the best"
        if gain > WORTH:
            tile = fit.Tile.of(best)
            new[tile.knobs], words = tile, f"{100 * gain:+.1f}%  {tile.knobs}"
        print(f"{shape:<24} {options.causal:<3}  {words}")
    if gpu and new:
        tiles += new.values()
        rows = engine.Table(engine.results_path("tuning", gpu.name, "hopper", new=True), fit.COLUMNS)
        fit.print_fit(model, tiles, fit.measure(gpu, model, tiles, fit.listed([D], model.dtype, fit.SHAPES), rows))
    return 0


def main():
    options = cli.parse_options(__doc__, cli.MOST)
    if len(options.words) != bool(options.export):
        raise Refused("--export takes one log" if options.export else
                      f"{options.words[0]}: only --export accepts a file argument")
    if options.export:
        return export(options.words[0], options.export)
    if options.seed_from and (options.all or options.table):
        raise Refused("--seed-from requires a search or --replay; omit it")
    if options.replay:
        return replay(options)
    if not re.fullmatch(r"\d{1,4}(\.\d+)?", options.budget):
        raise Refused(f"--budget {options.budget}: want minutes, as in 8 or 1.5")
    options.budget_s = 60 * float(options.budget)
    if options.budget_s < CANDIDATE_S:
        raise Refused(f"--budget {options.budget}: {options.budget_s:g} s is less than the {CANDIDATE_S} s "
                      "that a candidate takes to compile and time")
    if options.table:
        return table(options)
    gpu = find_gpu(options)
    return result(gpu, *run_search(options, gpu))
