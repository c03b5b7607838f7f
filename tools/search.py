"""The space of a search: the lines that sdpa.cu allows. tools/tune.py searches it, tools/micro.py times all of it.

A candidate is a Line: a line of configs.txt with knobs changed. Two are the same if their effective knobs are.
"""
import functools
import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import builds
from builds import Line
from cli import Refused

PROBLEMS_OWN = ("HEAD_DIM", "DTYPE", "OUT_DTYPE")
CHOOSERS = ("USE_TUNED",)  # lines that choose their tile when they run compete, but have no tile to breed
TRIES = 200  # mutations of a base that is not legal


def family_lines(tree, family):
    """The lines of configs.txt of a family, without the negative controls."""
    lines = [Line(tree, name) for name, line in tree.config_lines().items() if "expect=FAIL" not in line.words]
    return [line for line in lines if line.family == family]


def base_line(options, arch="90a"):
    """The line from which candidates are typed, by --from, or --family and --head-dim."""
    tree = builds.loadable(builds.Tree())
    if options.head_dim and options.head_dim not in tree.knob_rows()["HEAD_DIM"].values.split():
        raise Refused(f"--head-dim {options.head_dim}: want one of {tree.knob_rows()['HEAD_DIM'].values}")
    if options.from_:
        line, *others = builds.parse_contenders(options.from_.split())
        if others or not isinstance(line, Line):
            raise Refused(f"--from {options.from_}: want a line of configs.txt, and knobs behind it")
        if options.family not in (None, line.family):
            raise Refused(f"--from {options.from_} is of the family {line.family}; drop --family {options.family}")
        return line
    family = options.family or ("wgmma" if arch == "90a" else "mma")
    if family not in ("scalar", "wmma", "mma", "wgmma"):
        raise Refused(f"--family {family}: want scalar, wmma, mma or wgmma")
    lines = family_lines(tree, family)
    return next((line for line in lines if line.knob("HEAD_DIM", "64") == (options.head_dim or "64")), lines[0])


def spread(knob, legal, typed):
    """The values to try of what SDPA_KNOBS calls legal. Of BLOCK_N every multiple of 16, of other ranges 2^n and 3 * 2^n;
    and those that lines have typed."""
    if ".." not in legal:
        return legal.split()
    low, high = map(int, legal.split(".."))
    sizes = range(16, high + 1, 16) if knob == "BLOCK_N" else [0, *(factor << n for factor in (1, 3) for n in range(9))]
    return [str(size) for size in sorted({*sizes, *map(int, typed)}) if low <= size <= high]


class Space:
    """{knob: values} that candidates may have. Which knobs a family has is asked of configs.txt, whose lines change them,
    and of sdpa.cu, which refuses the others; what a negative control shows to be wrong is left out."""

    def __init__(self, base, fixed, vary_fixed_alone=False):
        self.tree, self.base, self.fixed = base.tree, base, fixed
        lines, configs = family_lines(base.tree, base.family), base.tree.config_lines()
        wrong = {word for one in configs.values() if "expect=FAIL" in one.words for word in one.knobs
                 if word not in configs[one.base].knobs}
        self.values = {}
        for knob, (default, _, legal) in base.tree.knob_rows().items():
            if knob in fixed:
                self.values[knob] = fixed[knob]
            elif knob not in (*PROBLEMS_OWN, *CHOOSERS, *builds.FAMILIES.values()) and not vary_fixed_alone:
                typed, own = {line.knob(knob, default) for line in lines}, base.knob(knob, default)
                values = [value for value in spread(knob, legal, {*typed, own}) if f"{knob}={value}" not in wrong or value == own]
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
        """One knob changed, or with half the probability each two, three or more; two times of three to a neighbouring value."""
        knobs = dict(knobs)
        for knob in rng.permutation(self.free)[:rng.geometric(0.5)]:
            values, at = self.values[knob], self.values[knob].index(knobs[knob])
            near = [i for i in (at - 1, at + 1) if 0 <= i < len(values)]
            others = near if rng.random() < 2 / 3 else [i for i in range(len(values)) if i != at]
            knobs[knob] = values[rng.choice(others)]
        return knobs

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
