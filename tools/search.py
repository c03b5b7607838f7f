"""The search space of tools/tune.py: the lines that sdpa.cu allows.

A candidate is a Line: a line of configs.txt with changed knobs. Candidates with equal effective knobs are the same.
"""
import functools
import itertools
import shlex
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import builds
from builds import Line
from cli import Refused

PROBLEMS_OWN = ("HEAD_DIM", "HEAD_DIM_V", "DTYPE", "OUT_DTYPE", "USE_SOFTCAP", "USE_SINKS", "USE_LENGTHS", "USE_PAGES", "USE_BIAS",
                "USE_KEY_MASK")
TRIES = 200  # maximum number of mutations of an illegal base


@functools.lru_cache(None)
def knobs_of(line):
    """{knob: value} of all knobs, including defaults."""
    return dict(word.split("=", 1) for word in line.effective_knobs())


@functools.lru_cache(None)
def identity(line):
    """The knobs that differ from their defaults, as text."""
    rows = line.knob_rows()
    return shlex.join(f"{knob}={value}" for knob, value in knobs_of(line).items() if rows[knob].default != value)


def chooses(line):
    """True if the line chooses its tile at run time. Such lines compete but are not mutated."""
    return knobs_of(line)["USE_TUNED"] == "1"


@functools.lru_cache(None)
def refusal(line):
    return line.tree.refusal(line.words)


def parse_line(tree, text):
    """Parses the text of a line."""
    name, *changes = shlex.split(text)
    return Line(tree, name, tuple(changes))


def family_lines(tree, family, is_backward=False):
    """The lines of a family, without negative controls and lines with other features."""
    lines = [Line(tree, name) for name, line in tree.read_configs()[0].items() if builds.is_backward(line) == is_backward
             if "expect=FAIL" not in line.words and not any(word.startswith(builds.EXPRESSIONS) for word in line.knobs)]
    return [line for line in lines if line.family == family]


def base_line(options, arch="90a"):
    """The base of all candidates, from --from, or --family and --head-dim."""
    tree = builds.loadable(builds.Tree())
    dims = tree.knob_rows()["HEAD_DIM"].values
    if options.head_dim and options.head_dim not in spread("HEAD_DIM", dims, ()):
        raise Refused(f"--head-dim {options.head_dim}: want a multiple of 16 in {dims}")
    if options.from_:
        line, *others = builds.parse_contenders(shlex.split(options.from_))
        if others or not isinstance(line, Line):
            raise Refused(f"--from {options.from_}: want a line of configs.txt, optionally followed by knobs")
        if options.family not in (None, line.family):
            raise Refused(f"--from {options.from_} has the family {line.family}; omit --family {options.family}")
        return line
    family = options.family or ("wgmma" if arch == "90a" else "mma")
    lines = family_lines(tree, family)
    if not lines:
        raise Refused(f"--family {family}: want scalar, wmma, mma or wgmma")
    return next((line for line in lines if str(line.D) == (options.head_dim or "64")), lines[0])


def spread(knob, legal, typed):
    """The values to try among the legal ones of SDPA_KNOBS: all multiples of 16 for BLOCK_N and HEAD_DIM, 2^n and 3 * 2^n in
    other ranges, and values that lines use."""
    if ".." not in legal:
        return legal.split()
    low, high = map(int, legal.split(".."))
    powers = [0, *(factor << n for factor in (1, 3) for n in range(9))]
    sizes = range(16, high + 1, 16) if knob in ("BLOCK_N", "HEAD_DIM") else powers
    return [str(size) for size in sorted({*sizes, *map(int, typed)}) if low <= size <= high]


class Space:
    """{knob: values} of candidates: knobs that lines of the family change or that sdpa.cu allows to change in the base,
    except values of negative controls."""

    def __init__(self, base, fixed, vary_fixed_alone=False):
        self.tree, self.base, self.fixed, self.values = base.tree, base, fixed, {}
        lines = family_lines(base.tree, base.family, base.is_backward)
        configs = {name: line for name, line in base.tree.read_configs()[0].items() if builds.is_backward(line) == base.is_backward}
        wrong = {word for one in configs.values() if "expect=FAIL" in one.words for word in one.knobs
                 if word not in configs[one.base].knobs}
        for knob, (default, _, legal) in base.knob_rows().items():
            if knob in fixed:
                self.values[knob] = fixed[knob]
            elif knob not in (*PROBLEMS_OWN, *builds.EXPRESSIONS, "BACKWARD", "USE_TUNED", *builds.FAMILIES.values()) and not vary_fixed_alone:
                typed, own = {knobs_of(line)[knob] for line in lines}, knobs_of(base)[knob]
                values = [value for value in spread(knob, legal, {*typed, own})
                          if value == own or f"{knob}={value}" not in wrong]
                others = (self.line({knob: value}) for value in values if value != own)
                if typed != {default} or not all(map(refusal, others)):
                    self.values[knob] = values
        self.free = [knob for knob, values in self.values.items() if len(values) > 1]

    def line(self, knobs, base=None):
        """The base with these knobs changed, without redundant changes."""
        base = base or self.base
        changes = [f"{knob}={value}" for knob, value in knobs.items() if knobs_of(base)[knob] != value]
        return Line(self.tree, base.name, tuple(builds.changed(base.changes, changes)))

    def starts(self, problem):
        """The base and the lines of the family, with the problem's D and type and the fixed knobs, if they are legal. If none
        is, the base with random changes that make it legal."""
        of_q, _, of_kv = ({"e4m3": "FP8_E4M3"}.get(one, one.upper()) for one in problem.dtype.partition("/"))
        own = {knob: knobs_of(self.base)[knob] for knob in (*PROBLEMS_OWN, *builds.EXPRESSIONS)}
        own |= {"HEAD_DIM": str(problem.D), "DTYPE": of_q, "KV_DTYPE": of_kv or "AUTO"}
        lines, found = [], {}
        for line in [self.base, *family_lines(self.tree, self.base.family, self.base.is_backward)]:
            fixed = {knob: values[0] for knob, values in self.fixed.items() if knobs_of(line)[knob] not in values}
            lines.append(self.line({**own, **fixed}, line))
            if not refusal(lines[-1]):
                found.setdefault(identity(lines[-1]), lines[-1])
        rng, base = np.random.default_rng(0), lines[0]
        for _ in range(0 if found else TRIES):
            line = self.line(self.mutated(rng, self.knobs(base)), base)
            if not refusal(line):
                return [line]
        if not found:
            raise Refused(f"the space is empty: {refusal(base)}")
        return list(found.values())

    def knobs(self, line):
        return {knob: knobs_of(line)[knob] for knob in self.free}

    def mutated(self, rng, knobs):
        """A mutation: changes one knob, or with half the probability each two, three or more; two thirds of the changes are to a
        neighbouring value."""
        knobs = dict(knobs)
        for knob in rng.permutation(self.free)[:rng.geometric(0.5)]:
            values, at = self.values[knob], self.values[knob].index(knobs[knob])
            near = [i for i in (at - 1, at + 1) if 0 <= i < len(values)]
            others = near if rng.random() < 2 / 3 else [i for i in range(len(values)) if i != at]
            knobs[knob] = values[rng.choice(others)]
        return knobs

    def all(self):
        """All legal combinations."""
        lines = [self.line(dict(zip(self.free, values)))
                 for values in itertools.product(*(self.values[knob] for knob in self.free))]
        with ThreadPoolExecutor(builds.JOBS) as pool:
            return [line for line, sentence in zip(lines, pool.map(refusal, lines)) if not sentence]
