"""A search among the lines that sdpa.cu allows: its space, its log, and which candidate comes next. What judges a
candidate is the caller's (tools/tune.py): a GPU, a cost model, or times that were measured before.

A candidate is a Line: a line of configs.txt with knobs changed. Two are the same if their effective knobs are.
"""
import collections
import functools
import itertools
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

import builds
from builds import Line, Refused

PROBLEMS_OWN = ("HEAD_DIM", "DTYPE", "OUT_DTYPE")
CHOOSERS = ("USE_TUNED",)  # lines that choose their tile when they run compete, but have no tile to breed
ELITES = 3
TRIES = 200
CHILDREN = 16  # of which the most promising is judged
FAR, REACH, NOISE = 2, 4, 0.05  # steps of a knob, of all knobs together, and what no knob explains, for expected()
AHEAD = 8  # candidates that wait in line while one is timed
FATES = ("refused", "compile", "gate", "wrong", "slower", "elite")


# ---- the space ----

def family_lines(tree, family):
    """The lines of configs.txt of a family, without the negative controls."""
    lines = [Line(tree, name) for name, line in tree.config_lines().items() if line.expect != "FAIL"]
    return [line for line in lines if line.family == family]


def base_line(options, arch="90a"):
    """The line from which candidates are typed, by --from, or --family and --head-dim."""
    tree = builds.loadable(builds.Tree())
    if options.head_dim and options.head_dim not in tree.knob_rows()["HEAD_DIM"][1].split():
        raise Refused(f"--head-dim {options.head_dim}: want one of {tree.knob_rows()['HEAD_DIM'][1]}")
    if options.base:
        line, *others = builds.parse_contenders(options.base.split())
        if others or not isinstance(line, Line):
            raise Refused(f"--from {options.base}: want a line of configs.txt, and knobs behind it")
        if options.family not in (None, line.family):
            raise Refused(f"--from {options.base} is of the family {line.family}; drop --family {options.family}")
        return line
    family = options.family or ("wgmma" if arch == "90a" else "mma")
    if family not in ("scalar", "wmma", "mma", "wgmma"):
        raise Refused(f"--family {family}: want scalar, wmma, mma or wgmma")
    lines = family_lines(tree, family)
    return next((line for line in lines if line.knob("HEAD_DIM", "64") == (options.head_dim or "64")), lines[0])


def spread(legal, typed):
    """The values to try of what SDPA_KNOBS calls legal: of a range 2^n, 3 * 2^n and those that lines have typed."""
    if ".." not in legal:
        return legal.split()
    low, high = map(int, legal.split(".."))
    sizes = {factor << n for factor in (1, 3) for n in range(9)} | {0, *map(int, typed)}
    return [str(size) for size in sorted(sizes) if low <= size <= high]


class Space:
    """{knob: values} that candidates may have. Which knobs a family has is asked of configs.txt, whose lines change them,
    and of sdpa.cu, which refuses the others; what a negative control shows to be wrong is left out."""

    def __init__(self, base, fixed, vary_fixed_alone=False):
        self.tree, self.base, self.fixed = base.tree, base, fixed
        lines, configs = family_lines(base.tree, base.family), base.tree.config_lines()
        wrong = {word for one in configs.values() if one.expect == "FAIL" for word in one.knobs
                 if word not in configs[one.base].knobs}
        self.values = {}
        for knob, (default, legal) in base.tree.knob_rows().items():
            if knob in fixed:
                self.values[knob] = fixed[knob]
            elif knob not in (*PROBLEMS_OWN, *CHOOSERS, *builds.FAMILIES.values()) and not vary_fixed_alone:
                typed = {line.knob(knob, default) for line in lines}
                values = [value for value in spread(legal, typed) if f"{knob}={value}" not in wrong]
                if len(typed) > 1 or typed != {default} or self.accepts(knob, values):
                    self.values[knob] = values
        self.free = [knob for knob, values in self.values.items() if len(values) > 1]

    def accepts(self, knob, values):
        """Whether the base may have another value of the knob."""
        return any(not refusal(self.line({knob: value})) for value in values if self.knob(self.base, knob) != value)

    def knob(self, line, knob):
        return line.knob(knob, self.tree.knobs()[knob])

    def line(self, knobs, base=None):
        """The base with these knobs; those that it has already are not typed."""
        base = base or self.base
        return Line(self.tree, base.name, tuple(builds.changed(base.changes, [
            f"{knob}={value}" for knob, value in knobs.items() if self.knob(base, knob) != value])))

    def starts(self, problem):
        """The base, and the family's lines with the problem's D and type and the fixed knobs, if they may have them; if
        none may, the base with other knobs changed at random until it is legal."""
        own = {"HEAD_DIM": str(problem.D), "DTYPE": {"e4m3": "FP8_E4M3"}.get(problem.dtype, problem.dtype.upper())}
        found = {}
        for line in [self.base, *family_lines(self.tree, self.base.family)]:
            fixed = {knob: values[0] for knob, values in self.fixed.items() if self.knob(line, knob) not in values}
            line = self.line({**own, **fixed}, line)
            if identity(line) not in found and not refusal(line):
                found[identity(line)] = line
        if not found:
            base, rng = self.line({**own, **{knob: values[0] for knob, values in self.fixed.items()}}), np.random.default_rng(0)
            tries = [self.line(self.mutated(rng, self.knobs(base)), base) for _ in range(TRIES)]
            sentences = [refusal(line) for line in tries]
            if all(sentences):
                raise Refused(f"the space is empty: {refusal(base)}")
            return [tries[sentences.index("")]]
        return list(found.values())

    def breeds(self, line):
        return all(self.knob(line, knob) == self.tree.knobs()[knob] for knob in CHOOSERS if knob in self.tree.knobs())

    def knobs(self, line):
        return {knob: self.knob(line, knob) for knob in self.free}

    def mutated(self, rng, knobs):
        """One to three knobs changed, two times of three to a neighbouring value."""
        knobs = dict(knobs)
        for knob in rng.permutation(self.free)[:rng.choice([1, 2, 3], p=[0.5, 0.3, 0.2])]:
            values = self.values[knob]
            at = values.index(knobs[knob]) if knobs[knob] in values else 0
            near = [i for i in (at - 1, at + 1) if 0 <= i < len(values)]
            others = near if rng.random() < 2 / 3 else [i for i in range(len(values)) if i != at]
            knobs[knob] = values[rng.choice(others)]
        return knobs

    def crossed(self, rng, one, other):
        return {knob: (one, other)[rng.integers(2)][knob] for knob in self.free}

    def random(self, rng):
        return {knob: str(rng.choice(self.values[knob])) for knob in self.free}

    def count(self):
        return math.prod(map(len, self.values.values()))

    def all(self):
        """Every combination that sdpa.cu does not refuse."""
        lines = [self.line(dict(zip(self.free, values)))
                 for values in itertools.product(*(self.values[knob] for knob in self.free))]
        with ThreadPoolExecutor(builds.JOBS) as pool:
            return [line for line, sentence in zip(lines, pool.map(refusal, lines)) if not sentence]


@functools.lru_cache(None)
def refusal(line):
    return line.tree.refusal(line.words)


@functools.lru_cache(None)
def identity(line):
    """The knobs that are not at their defaults."""
    defaults = line.tree.knobs()
    words = (word.split("=") for word in line.effective_knobs())
    return " ".join(f"{knob}={value}" for knob, value in words if defaults[knob] != value)


def parse_line(tree, text):
    """The line whose text this is."""
    name, *changes = text.split()
    return Line(tree, name, tuple(changes))


# ---- the log ----

class Log:
    """A file of JSON lines: what the search is, then each candidate as it ends. Of a search that was killed, the line that
    it was writing is cut off."""

    def __init__(self, path, header):
        self.path, self.records = path, []
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            self.file = open(path, "ab", buffering=0)
        except OSError as error:
            raise Refused(f"{path} cannot be written: {error.strerror}", 3)
        found, size = read_log(path)
        if not found and os.path.getsize(path):
            raise Refused(f"{path}: want a log that ./run_all.sh tune wrote")
        self.file.truncate(size)
        if not found:
            self.add(header)
        elif found[0] != header:
            raise Refused(f"{path} is the log of another search; name another file or remove it")
        self.records = found[1:]

    def add(self, record):
        """Adds a line, whole or not at all."""
        size, line = self.file.seek(0, os.SEEK_END), json.dumps(record).encode() + b"\n"
        try:
            if self.file.write(line) != len(line):
                raise OSError(28, "No space left on device")
        except OSError as error:
            self.file.truncate(size)
            raise Refused(f"{self.path} cannot be written: {error.strerror}; what it has is valid, and the same command "
                          "goes on from there", 3)
        self.records.append(record)


def read_log(path):
    """The records of a log and how many bytes they take; a last line that is torn is left out."""
    if not os.path.exists(path):
        raise Refused(f"{path}: there is no such file")
    records, size = [], 0
    with open(path, "rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n"):
                break
            records.append(record)
            size += len(line)
    if records and "tune" not in records[0]:
        raise Refused(f"{path}: want a log that ./run_all.sh tune wrote")
    return records, size


# ---- the search ----

@dataclass
class State:
    """What a search knows: the records by identity, and which are the best."""
    space: Space
    seen: set = field(default_factory=set)  # proposed
    records: dict = field(default_factory=dict)
    lines: dict = field(default_factory=dict)
    places: dict = field(default_factory=dict)
    elites: list = field(default_factory=list)  # identities of the best that breed
    best: str = None  # ("" is the line without knobs)

    def judged(self, score, line):
        """Whether a line with this time over the first one's is an elite; a chooser is one if it is the best."""
        if self.best is None or score < self.records[self.best]["score"]:
            return "elite"
        worst = self.records[self.elites[-1]]["score"] if len(self.elites) == ELITES else math.inf
        return "elite" if self.space.breeds(line) and score < worst else "slower"

    def add(self, line, record):
        key = identity(line)
        self.seen.add(key)
        self.records[key], self.lines[key], self.places[key] = record, line, self.place(line)
        if record["fate"] == "elite":
            by_score = lambda key: self.records[key]["score"]  # noqa: E731
            if self.space.breeds(line):
                self.elites = sorted([*self.elites, key], key=by_score)[:ELITES]
            self.best = min((one for one in (self.best, key) if one is not None), key=by_score)

    def counts(self):
        return collections.Counter(record["fate"] for record in self.records.values())

    def propose(self, rng):
        """Candidates that nobody proposed before, some children of the elites or any, the one first that is expected to be the
        fastest."""
        children = {}
        for attempt in range(1000):
            if not self.elites or attempt >= 300:
                knobs = self.space.random(rng)
            else:
                parents = [self.space.knobs(self.lines[key]) for key in self.elites]
                one, other = rng.integers(len(parents), size=2)
                knobs = parents[one] if rng.random() < 0.7 else self.space.crossed(rng, parents[one], parents[other])
                if knobs in parents or rng.random() < 0.3:
                    knobs = self.space.mutated(rng, knobs)
            line = self.space.line(knobs)
            if identity(line) not in self.seen:
                children[identity(line)] = line
            if len(children) == (CHILDREN if self.elites else 1) or children and attempt >= 300:
                break
        lines = list(children.values())
        return [lines[i] for i in np.argsort(self.expected(lines), kind="stable")] if len(lines) > 1 else lines

    def expected(self, lines):
        """The logarithms of the lines' scores that a Gaussian process expects from the candidates that were compiled; those
        without a time count as the slowest. Two candidates are the more alike the fewer steps their knobs are apart."""
        compiled = {key: record for key, record in self.records.items() if record["fate"] != "refused"}
        scores = np.array([math.log(record["score"]) if record["fate"] in ("slower", "elite") else math.nan
                           for record in compiled.values()])
        scores[np.isnan(scores)] = np.nanmax(scores)
        known, new = np.array([self.places[key] for key in compiled]), np.array([self.place(line) for line in lines])
        alike = lambda a, b: np.exp(-np.minimum(abs(a[:, None] - b[None]), FAR).sum(2) / REACH)  # noqa: E731
        weights = np.linalg.solve(alike(known, known) + NOISE * np.eye(len(known)), scores - scores.mean())
        return scores.mean() + alike(new, known) @ weights

    def place(self, line):
        """Of each knob the number of its value."""
        found = []
        for knob in self.space.free:
            values, value = self.space.values[knob], self.space.knob(line, knob)
            found.append(values.index(value) if value in values else 0)
        return found


def search(state, judge, log, queue, rng, goes_on, show, ahead=AHEAD, breed=True):
    """Judges the lines of queue, then those that breeding proposes, while goes_on(); the next `ahead` of them are
    compiled meanwhile, in parallel. What sdpa.cu refuses ends before it waits in line."""
    new = {identity(line): line for line in queue if identity(line) not in state.seen}
    queue = collections.deque(new.values())
    state.seen.update(new)
    waiting = collections.deque()

    def end(line, prepared):
        record = {"knobs": identity(line), "line": line.text, **judge.judge(line, prepared, state)}
        log.add(record)
        state.add(line, record)
        show(state)

    def legal_child():
        while breed and goes_on():
            children = state.propose(rng)
            if not children:
                return None
            for line in children:
                state.seen.add(identity(line))
                if not judge.refusal(line):
                    return line
                end(line, judge.prepare(line))
        return None
    with ThreadPoolExecutor(builds.JOBS) as pool:
        try:
            while True:
                while len(waiting) < ahead and goes_on():
                    line = queue.popleft() if queue else legal_child()
                    if not line:
                        break
                    waiting.append((line, pool.submit(judge.prepare, line)))
                if not waiting or not goes_on():
                    return
                line, prepared = waiting.popleft()
                end(line, prepared.result())
        finally:
            pool.shutdown(cancel_futures=True)
