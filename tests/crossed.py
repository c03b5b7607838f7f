#!/usr/bin/env python3
"""Covering arrays of builds, on the CPU backend. For each kind of kernel, each pair of values of two knobs
occurs in a build, except for pairs that sdpa.cu refuses: those with which a random search finds no legal build.

By default the arrays cover all knobs. Pairs of a knob and a member of the problem, and of two members, are covered too.
Each problem is checked against the reference.

--features covers the knobs in FEATURES. Each build runs a sweep of four random problems (--quick: eight), one of them also in a chain of
kernels. Builds that together have each value of each knob run more, until these are of all kinds that the build takes. Each
path of tests/paths.py must be taken in a build of each kind that has it.

--quick covers less: for each kind of kernel each value of a knob other than its default, and each pair of such values in some
kind. Builds that together have each value in some kernel with mma.sync and in some with wgmma run problems of all kinds. A path
must be taken in one kind of each of these two families.
usage: tests/crossed.py [REGEX] [--features [--quick]] [--show] [--link FILE...]
  REGEX   the builds whose kind and knobs match, as in "mma.* HEAD_DIM_V"
  --show  print the builds, their problems and the pairs that no legal build has, and stop
  --link  objects and libraries of the sweep's harness and of the CPU backend; without it they are compiled"""
import argparse
import ctypes
import functools
import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import bugs
import paths

sys.path.insert(0, os.path.join(bugs.ROOT, "tools"))
try:
    from builds import Tree
except ModuleNotFoundError as error:
    print(f"skipped: a package is missing ({error.name}); python3 -m pip install pyelftools")
    sys.exit(77)

# The values to try of each knob. Knobs that are not here have their defaults, and those of KINDS.
KNOBS = dict(
    HEAD_DIM="64 96 128", HEAD_DIM_V="0 64 128 48", DTYPE="FP16 BF16 FP8_E4M3 U8", OUT_DTYPE="AUTO BF16 FP16",
    BLOCK_M="32 64 128 16", NUM_WARPS="4 8 2 16", SPLIT_KV="1 2 4", BLOCK_N="64 32 128", VEC_WIDTH="8 16 1", USE_LENGTHS="1 0",
    USE_PAGES="1 2 0", USE_SINKS="1 0", USE_BIAS="1 2 3 4 5 0", USE_KEY_MASK="1 0", SPLIT_CTAS="3 0 1", PACK_GQA="1 0", USE_SOFTCAP="2 0 1", STAGES="3 1", USE_CP_ASYNC="1 0",
    USE_LAZY_MAX="1 0", SWIZZLE_XOR="1 0", USE_PERSISTENT_CTA="1 0", USE_FAST_EXP="0 1", OVERLAP="1 0", USE_PING_PONG="0 1",
    SKIP_MASKED="1 0", FP8_FLUSH="8 0 1", SYNC_POLICY="1 5", USE_WMMA_PV="1 0", FP16_ACC="NONE BOTH",
    NUM_PRODUCER_WARPS="1 2", USE_WARP_SPECIALIZATION="1 0")
# The values that replace these in a kind of kernel. TILE stands for the tile of a tuned build, which sets only TYPED.
ROLES = dict(USE_WGMMA="1", SWAP_AB="0", USE_WARP_SPECIALIZATION="1")
TILE = dict(BLOCK_M="64", BLOCK_N="64", NUM_WARPS="4", SPLIT_KV="1", SPLIT_CTAS="1", PACK_GQA="0", STAGES="1", USE_LAZY_MAX="1")
KINDS = dict(
    scalar=dict(HEAD_DIM="64 96", HEAD_DIM_V="0 128 48", BLOCK_M="32 64", BLOCK_N="64 32", NUM_WARPS="4 2"),
    wmma=dict(USE_WMMA="1", HEAD_DIM="64 128", OUT_DTYPE="AUTO BF16", BLOCK_M="32 64", BLOCK_N="32"),
    mma=dict(USE_MMA_SYNC="1", BLOCK_M="32 64 16", NUM_WARPS="4 2 8", BLOCK_N="64 32", KV_DTYPE="AUTO FP8_E4M3"),
    wgmma_plain=dict(ROLES, HEAD_DIM_V="0 64 96", USE_WARP_SPECIALIZATION="0", BLOCK_N="64 32"),
    wgmma_roles=dict(ROLES, HEAD_DIM_V="0 64 96", DTYPE="FP16 BF16", BLOCK_N="64 32"),
    wgmma_converting=dict(ROLES, DTYPE="FP16 BF16", KV_DTYPE="FP8_E4M3", HEAD_DIM_V="0 64 96", VEC_WIDTH="16", SPLIT_KV="1",
                          USE_PERSISTENT_CTA="0", BLOCK_N="64 48 96"),
    wgmma_transposed=dict(USE_WGMMA="1", SWAP_AB="1", BLOCK_M="32 16 8"),
    wgmma_e4m3=dict(ROLES, DTYPE="FP8_E4M3", NUM_WARPS="4 8"),
    tuned_mma=dict(TILE, USE_MMA_SYNC="1", HEAD_DIM_V="0 128 48", DTYPE="FP16 BF16", VEC_WIDTH="8", USE_CP_ASYNC="1", SWIZZLE_XOR="1"),
    tuned_wgmma=dict(TILE, **ROLES, HEAD_DIM_V="0 64 96",
                     OVERLAP="1", USE_PERSISTENT_CTA="0", USE_PING_PONG="0", SKIP_MASKED="0", FP8_FLUSH="8"))
TYPED = ("HEAD_DIM", "HEAD_DIM_V", "DTYPE", "OUT_DTYPE", "VEC_WIDTH", "BLOCK_M", "USE_FAST_EXP", "USE_SOFTCAP", "USE_SINKS", "USE_BIAS",
         "USE_KEY_MASK", "USE_LENGTHS", "USE_PAGES", "USE_MMA_SYNC", "USE_WGMMA")

# --features: the values of knobs whose pairs are covered; FEATURES_OF has those of a kind. Other knobs have any legal
# value. USE_SOFTCAP=2 is USE_SOFTCAP=1 with another tanh, but for a kernel that has a polynomial for the latter. USE_BIAS=3 and 5
# are USE_BIAS=1 and 4 with another type, and USE_PAGES=2 takes the pages of USE_PAGES=1: a kind whose code is the same has one of them.
FEATURES = dict(DTYPE="FP16 BF16", KV_DTYPE="AUTO", HEAD_DIM="64 96", USE_SOFTCAP="1 0", USE_BIAS="1 2 3 4 0", USE_KEY_MASK="1 0", USE_SINKS="1 0", USE_LENGTHS="1 0", USE_PAGES="0 1 2",
                SPLIT_KV="1 2", SPLIT_CTAS="1 0", PACK_GQA="0 1", USE_LAZY_MAX="1 0", OVERLAP="1 0", SKIP_MASKED="0 1")
FEATURES_OF = dict(
    scalar=dict(DTYPE="FP16 FP8_E4M3", USE_SOFTCAP="2 0", SPLIT_CTAS="1", USE_BIAS="3 2 0", USE_PAGES="0 2"),
    wmma=dict(DTYPE="FP16 U8", HEAD_DIM="64", USE_SOFTCAP="0"),
    mma=dict(DTYPE="FP16 BF16 FP8_E4M3", KV_DTYPE="AUTO FP8_E4M3", SPLIT_KV="1 4", USE_BIAS="1 2 4 0", USE_PAGES="0 2"),
    wgmma_plain=dict(USE_SOFTCAP="2 0", USE_BIAS="1 2 0"),
    wgmma_roles=dict(USE_SOFTCAP="1 2 0"),
    wgmma_converting=dict(KV_DTYPE="FP8_E4M3", BLOCK_N="64 48"),
    wgmma_transposed=dict(HEAD_DIM="64 128", USE_SOFTCAP="2 0", USE_BIAS="3 2 5 0"),
    wgmma_e4m3=dict(DTYPE="FP8_E4M3", FP8_FLUSH="8 0 1"))

# --features: all combinations of these values are covered. Other features switch off parts of the softmax by a stale maximum,
# and the map of the bias.
TOGETHER_OF = dict(
    wgmma_roles=[dict(USE_LAZY_MAX="1", USE_SOFTCAP="1", USE_BIAS="0", USE_KEY_MASK="0", SPLIT_CTAS="1", SPLIT_KV="1", DTYPE="BF16"),
                 dict(USE_LAZY_MAX="1", USE_SOFTCAP="1 0", USE_BIAS="0 1", DTYPE="BF16"),
                 dict(USE_KEY_MASK="1", USE_PERSISTENT_CTA="1", BLOCK_M="64"),
                 dict(USE_BIAS="1 2 3", USE_LENGTHS="0", SPLIT_CTAS="1", SPLIT_KV="1", BLOCK_M="128", USE_PING_PONG="0")],
    wgmma_converting=[dict(USE_LAZY_MAX="1", USE_SOFTCAP="1 0", DTYPE="BF16")])

CANDIDATES, PAIRS_AT_ONCE = 20, 12  # that are tried for a build

PROBLEMS = 3  # of a build at least
# The members of a problem, as options.
MEMBERS = dict(
    shape=["--shape 2,4,2,20,150", "--shape 4,8,1,1,170", "--shape 2,2,2,70,33", "--shape 7,2,1,30,90", "--shape 2,24,2,5,100",
           "--shape 2,2,1,5,0"],
    causal=["", "--causal br", "--causal tl"],
    window=["", "--window 20,-1", "--window -1,7", "--window 33,20,br", "--window 9,3,tl"],
    lengths=["", "--lengths"],
    packed=["", "--packed q", "--packed k", "--packed qk"],
    most_keys=["", "--most-keys 21"], batch_invariant=["", "--batch-invariant"],
    pages=["", "--pages 16", "--pages 48", "--pages 64", "--pages 3"],
    sinks=["", "--sinks"],
    bias=["", "--bias add", "--bias add,bhq", "--bias bool", "--bias bool,bq", "--bias tree,hq", "--bias padding"],
    key_mask=["", "--key-mask right", "--key-mask left", "--key-mask scattered,shared"],
    softcap=["", "--softcap 2", "--softcap 50"],
    layout=["", "--layout packed", "--layout padded", "--layout zero", "--layout reversed"],
    descale=["", "--descale gaps", "--descale zeros", "--descale shared", "--descale none"],
    machine=["", "--machine 1,120,2,64", "--machine 132,61440,3,200", "--machine 16,24,1,65536"],
    dist=["", "--dist stairs", "--dist uniform", "--dist negative", "--dist huge", "--dist nonfinite"],
    scale=["", "--scale 0.3"],
    max_ctas=["", "--max-ctas 2"])


def takes(build, problem):
    """True if the build supports the problem."""
    has, is_8bit = {knob for knob, value in build.items() if value != "0"}, "FP8_E4M3" in build.values() or build["DTYPE"] == "U8"
    is_wgmma, dist = build["USE_WGMMA"] == "1", problem["dist"].removeprefix("--dist ")
    return ((not problem["lengths"] + problem["packed"] + problem["most_keys"] or "USE_LENGTHS" in has) and
            bool(problem["pages"]) == ("USE_PAGES" in has) and not (problem["pages"] and "k" in problem["packed"][9:]) and
            (problem["pages"] != "--pages 3" or build["USE_PAGES"] == "2") and
            # A sink may outweigh all such keys.
            (not problem["sinks"] or "USE_SINKS" in has and dist not in ("negative", "stairs")) and
            (not problem["bias"] or build["USE_BIAS"] != "0" and
             ("add" if build["USE_BIAS"] == "2" else "bool") not in problem["bias"] and
             (build["USE_BIAS"] not in ("4", "5") or problem["bias"] in ("--bias add", "--bias padding")) and
             # A float cannot hold such a logit plus a bias.
             (build["USE_BIAS"] == "2" or dist not in ("stairs", "huge"))) and
            (not problem["key_mask"] or "USE_KEY_MASK" in has) and
            (not problem["softcap"] or "USE_SOFTCAP" in has) and (not problem["descale"] or is_8bit) and
            not (is_wgmma and "reversed" in problem["layout"]) and  # TMA takes no strides below 0
            (not problem["max_ctas"] or "USE_PERSISTENT_CTA" in has) and
            # Builds without ranges refuse longer sums.
            (not problem["machine"] or problem["machine"].endswith("65536") or build["SPLIT_CTAS"] != "1") and
            (build["FP16_ACC"] == "NONE" or dist in ("", "nonfinite")) and  # others go past 65504
            not (is_wgmma and build["DTYPE"] == "FP8_E4M3" and dist in ("negative", "huge")) and  # sums of 14 bits
            not (problem["scale"] and dist in ("stairs", "huge")))


# ---- what sdpa.cu refuses ----

JUDGE = """
#include <string_view>
#include <type_traits>
#define SDPA_NEW_LINE
%(knobs)s
#define SDPA_MEMBER(name, fallback, member, values, families, meaning) \\
  std::conditional_t<std::string_view(values) == "0 1", bool, int> member;
struct K { SDPA_KNOBS(SDPA_MEMBER) };
%(enums)s
struct Build : K {
  explicit Build(const K& typed) : K(typed) {}
  %(build)s
};
#define SDPA_CHANGED(name, fallback, member, values, families, meaning) \\
  constexpr int name##_default = value_of(#fallback, values); \\
  const bool name##_changed = b.member != name##_default;
#define SDPA_REFUSE(condition, sentence) if (condition) return false
constexpr bool is_one_of%(judged)s
static bool is_legal(const Build& b) {
  SDPA_KNOBS(SDPA_CHANGED)
  %(derived)s
  %(refusals)s
  return true;
}

struct Domain { const int* values; int count; };
// Finds the first legal one of `tries` random builds with these values of knobs. Returns false if there is none.
extern "C" bool complete(const Domain* domains, long tries, unsigned long long state, int* found) {
  for (long n = 0; n < tries; n++) {
    K typed;
    int at = 0;
    const auto draw = [&](auto& member) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      member = found[at] = domains[at].values[(state >> 20) %% domains[at].count];
      at++;
    };
#define SDPA_DRAW(name, fallback, member, values, families, meaning) draw(typed.member);
    SDPA_KNOBS(SDPA_DRAW)
    if (typed.num_warps < typed.split_kv) continue;  // Build would divide by 0
    const Build b(typed);
    // About half of what a CTA may have. sdpa.cu refuses over 227 KB for all that a kernel keeps; this needs its types.
    const int of_keys = b.split_kv * b.stages * b.block_n * (b.head_dim + (b.use_wgmma && b.kv_type == DType::e4m3 ? 2 : 1) * b.d_v);
    const int bytes = (of_keys + b.block_m * b.head_dim) * b.kv_bytes + (b.split_kv > 1 ? 4 * b.block_m * b.d_v : 0);
    if (bytes < 128 * 1024 && is_legal(b)) return true;
  }
  return false;
}
"""


def judge_source(source):
    """The refusals of typed knobs as a function, since a compiler takes 50 ms for each build: what sdpa.cu has as constants
    of a template are members of a struct, and what it asserts is returned."""
    def between(since, until):
        return source.split(since, 1)[1].split(until, 1)[0]

    def of_struct(text):
        text = re.sub(r"template <class B>\s*", "", text).replace("constexpr ", "")
        text = re.sub(r"\b(?:B|Defines)::", "b.", text).replace("<B>", "")
        return re.sub(r"bool check\w*\(\) {", "{", text)
    refusals = of_struct(between("SDPA_KNOBS(SDPA_LEGAL)", "// ---- tuned tiles (USE_TUNED) ----"))
    refusals = re.sub(r"#define SDPA_REFUSE.*|return true;|return check\w*\(\);", "", refusals)
    build = between("template <int ROW> struct BuildOf : Knobs<ROW> {", "\n};")
    return JUDGE % dict(
        knobs=between("// ---- the list of knobs (typed) ----", "#define SDPA_TEXT_AS_IS"),
        enums=between("// ---- what follows from the knobs ----", "template <int ROW> struct BuildOf"),
        build=re.sub("static constexpr|using K = .*", "", build),
        derived=of_struct(between("using Defines = BuildOf<-1>;", "}  // namespace") +
                          between("// ---- the path to a kernel ----", "template <class B, KernelKind") +
                          between("#define SDPA_REFUSE(condition", "constexpr bool is_one_of").split("\n", 1)[1]),
        judged=between("constexpr bool is_one_of", "#define SDPA_LEGAL"), refusals=refusals)


class Judge:
    """Judges which combinations of some values of each knob are legal."""

    def __init__(self, tree, folder):
        source = tree.read("sdpa.cu")
        rows = re.findall(r'^  X\((\w+), (\w+), \w+, "([^"]*)", "([^"]*)"', source, re.MULTILINE)
        self.rows = {name: (default, values.split(), families.split()) for name, default, values, families in rows}
        path = os.path.join(folder, "judge")
        with open(path + ".cpp", "w") as file:
            file.write(judge_source(source))
        done = subprocess.run([bugs.CXX, "-std=c++17", "-O2", "-w", "-fPIC", "-shared", path + ".cpp", "-o", path + ".so"],
                              capture_output=True, text=True)
        if done.returncode:
            raise bugs.Broken("sdpa.cu's refusals have another form than crossed.py expects: " + done.stderr[:2000])
        self.library = ctypes.CDLL(path + ".so")
        self.seed = 1

    def number(self, knob, value):
        return int(value) if value.isdigit() else self.rows[knob][1].index(value)

    @functools.lru_cache(None)
    def numbers(self, knob, values):
        """The numbers of a knob's values as an array, and {number: value}."""
        numbers = [self.number(knob, value) for value in values]
        return (ctypes.c_int * len(values))(*numbers), dict(zip(numbers[::-1], values[::-1]))

    def complete(self, domains, tries):
        """A legal build {knob: value} of {knob: values}, or None."""
        numbers = [self.numbers(knob, tuple(values)) for knob, values in domains.items()]
        found = (ctypes.c_int * len(numbers))()
        self.seed += 1
        domains_of = (Domain * len(numbers))(*(Domain(array, len(array)) for array, _ in numbers))
        if not self.library.complete(domains_of, ctypes.c_long(tries), ctypes.c_ulonglong(self.seed * 0x9e3779b97f4a7c15), found):
            return None
        return {knob: value[n] for knob, (_, value), n in zip(domains, numbers, found)}


class Domain(ctypes.Structure):
    _fields_ = [("values", ctypes.POINTER(ctypes.c_int)), ("count", ctypes.c_int)]


class Kind:
    """The legal builds of a kind of kernel, and the pairs of these knobs' values that they cover. Together: dicts {knob: values};
    all combinations are covered like pairs."""

    def __init__(self, judge, name, own, crossed, together=()):
        self.judge, self.name, self.random = judge, name, random.Random(name)
        family = "wgmma" if own.get("USE_WGMMA") else "mma" if own.get("USE_MMA_SYNC") else "wmma" if own.get("USE_WMMA") else "scalar"
        domains = KNOBS | crossed
        self.values = {knob: (own[knob] if knob in own else domains[knob] if knob in domains and {"all", family} & {*families}
                              else default).split() for knob, (default, _, families) in judge.rows.items()}
        self.near = [judge.complete(self.values, 10000000)]
        for knob, values in self.values.items():
            self.values[knob] = [value for value in values if self.complete({knob: value})]
        self.free = [knob for knob in crossed if len(self.values[knob]) > 1]
        self.near = [self.complete({}) for _ in range(8)]
        self.sets = [(knob,) for knob in self.free]
        self.sets += itertools.combinations(self.free, 2)
        of_sets = [{knob: self.values[knob] for knob in knobs} for knobs in self.sets]
        of_more = [{knob: values.split() for knob, values in one.items()} for one in together]
        self.together = {tuple(zip(one, values)) for one in of_more for values in itertools.product(*one.values())}
        self.pairs = {pair for build in self.near for pair in self.pairs_of(build)}
        self.impossible = []
        for values_of in of_sets + of_more:
            for values in itertools.product(*values_of.values()):
                pair = tuple(zip(values_of, values))
                found = None if pair in self.pairs else self.complete(dict(pair))
                if found:
                    self.pairs.update(self.pairs_of(found))
                elif pair not in self.pairs:
                    self.impossible.append(pair)

    def complete(self, fixed, tries=1000):
        """A legal build with these knobs, or None. Tries random builds, and neighbours of known legal ones."""
        domains = {knob: [fixed[knob]] if knob in fixed else values for knob, values in self.values.items()}
        found = self.judge.complete(domains, tries)
        for one in self.near:
            if found:
                break
            weighted = {knob: values + [one[knob]] * (6 * (len(values) > 1)) for knob, values in domains.items()}
            found = self.judge.complete(weighted, 2 * tries)
        return found

    def pairs_of(self, build):
        pairs = {tuple((knob, build[knob]) for knob in knobs) for knobs in self.sets}
        return pairs | {one for one in self.together if all(build[knob] == value for knob, value in one)}

    def features_of(self, build=None):
        """The values and pairs of a build, or of all, that have no default; and its combinations."""
        return {one for one in (self.pairs_of(build) if build else self.pairs)
                if one in self.together or all(value != self.judge.rows[knob][0] for knob, value in one)}

    def words(self, build):
        """The knobs of a build that are not defaults."""
        return " ".join(f"{knob}={value}" for knob, value in build.items() if value != self.judge.rows[knob][0])

    def candidate(self, left):
        """A legal build with several of these pairs, or None."""
        fixed, found = {}, None
        for pair in self.random.sample(left, min(len(left), PAIRS_AT_ONCE)):
            more = fixed | dict(pair)
            if all(more[knob] == value for knob, value in (*fixed.items(), *pair)) and (one := self.complete(more, 100)):
                fixed, found = more, one
        return found

    def builds(self):
        """Builds that cover all pairs of the kind. Each has the most new pairs of several candidates."""
        builds, left = [], set(self.pairs)
        while left:
            ordered = sorted(left)
            tried = list(filter(None, (self.candidate(ordered) for _ in range(CANDIDATES))))
            if tried:
                builds.append(max(tried, key=lambda build: len(left & self.pairs_of(build))))
                left -= self.pairs_of(builds[-1])
        return builds


# ---- the problems ----

class Problems:
    """Draws at least a given number of problems for each build of a kind, which cover all pairs of two members
    and of a member and a knob."""

    def __init__(self, kind, builds, least):
        self.random, self.builds, self.free = random.Random(kind.name), builds, kind.free
        # For each build, the values of each member that are possible with the first values of all others.
        self.domains = []
        for build in builds:
            first = {member: values[build["USE_PAGES"] != "0" and member == "pages"] for member, values in MEMBERS.items()}
            self.domains.append({member: [value for value in values if takes(build, first | {member: value})]
                                 for member, values in MEMBERS.items()})
        several = {member for domain in self.domains for member, values in domain.items() if len(values) > 1}
        self.members = [member for member in MEMBERS if member in several]
        self.of_build, self.pairs, self.covered = [[] for _ in builds], {}, set()
        for n, domain in enumerate(self.domains):
            values = [(member, value) for member in self.members for value in domain[member]]
            for one in values:
                self.pairs.update(dict.fromkeys(itertools.product(self.knobs(n), [one]), n))
            for pair in itertools.combinations(values, 2):
                if pair not in self.pairs and pair[0][0] != pair[1][0] and self.draw(n, dict(pair)):
                    self.pairs[pair] = n
        for n in range(len(builds)):
            for _ in range(least):
                self.add(n, {})
        for pair, n in self.pairs.items():
            if pair not in self.covered:
                self.add(n, {name: value for name, value in pair if name in MEMBERS})

    def knobs(self, n):
        return [(knob, self.builds[n][knob]) for knob in self.free]

    def draw(self, n, fixed):
        """A problem with these members, or None."""
        for _ in range(50):
            problem = {member: fixed[member] if member in fixed else self.random.choice(values)
                       for member, values in self.domains[n].items()}
            if takes(self.builds[n], problem):
                return problem
        return None

    def pairs_of(self, n, problem):
        members = [(member, problem[member]) for member in self.members]
        return {*itertools.product(self.knobs(n), members), *itertools.combinations(members, 2)}

    def add(self, n, fixed):
        """Adds the problem with the most new pairs among several with these members."""
        drawn = [problem for problem in (self.draw(n, fixed) for _ in range(40)) if problem]
        best = max(drawn, key=lambda problem: len(self.pairs_of(n, problem) - self.covered))
        self.of_build[n].append(best)
        self.covered |= self.pairs_of(n, best)


# ---- the run ----

@dataclass(frozen=True)
class Crossed:
    """A build, and the options of its problems, or of a sweep."""
    kind: str
    knobs: str
    problems: tuple

    def __str__(self):
        return f"{self.kind}: {self.knobs}"


def family(kind):
    """Kinds of a family share most of their code."""
    return "wgmma" if kind.startswith("wgmma") else "mma"


def covering(left, builds, covered_by):
    """A subset of builds that covers all of left, as far as they can: each has the most that is new."""
    chosen, left = [], left & set().union(*map(covered_by, builds))
    while left:
        chosen.append(max(builds, key=lambda build: len(left & covered_by(build))))
        left -= covered_by(chosen[-1])
    return chosen


ALL_PROBLEMS = "--sweep 8 --all-kinds"
# Logits on both sides of the bound of the softcap's polynomial, in tiles that exceed a stale maximum.
BEYOND_CAP = "--check-only --shape 1,2,2,70,600 --dist outliers --softcap 30"
# Consecutive items of a CTA have lists of equal length of visible K tiles, which begin with different keys.
SLIDING_LISTS = "--check-only --shape 1,2,1,700,700 --causal br --window 100,0 --key-mask scattered --max-ctas 1"
# The last row of a warpgroup sees one key of a round, the first one, for tiles of 32, 64 and 128 keys.
FIRST_KEYS = "--check-only --shape 1,1,1,200,265 --causal br"
# The heads of a tile have different factors of Q, and ranges of keys very different maxima.
RANGES_OF_HEADS = "--check-only --shape 1,8,2,1,3000 --dist outliers --descale heads"
# {problem: whether a build with these knobs runs it}.
OWN_PROBLEMS = {
    BEYOND_CAP: lambda knobs: knobs.get("USE_SOFTCAP") == "1",
    SLIDING_LISTS: lambda knobs: knobs.get("USE_KEY_MASK") == knobs.get("USE_PERSISTENT_CTA") == knobs.get("USE_WGMMA") == "1",
    FIRST_KEYS: lambda knobs: knobs.get("SKIP_MASKED") == "1",
    RANGES_OF_HEADS: lambda knobs: knobs.get("DTYPE") == "FP8_E4M3" and knobs.get("PACK_GQA") == "1" and knobs.get("SPLIT_CTAS", "1") != "1"}


def problems_of(build, runs_all, count, number):
    """The problems of build `number`: those of all kinds, or `count` random ones, and its own."""
    own = [problem for problem, runs in OWN_PROBLEMS.items() if runs(dict(build))]
    return ALL_PROBLEMS if runs_all else f"--sweep {count} --seeds {number}", *own


def cross_features(kind):
    """Builds of a kind that cross FEATURES. Those that together have each value and combination run problems of all kinds."""
    builds = kind.builds()
    of_values = {one for one in kind.pairs if len(one) == 1} | kind.together & kind.pairs
    with_all = covering(of_values, builds, kind.pairs_of)
    return [Crossed(kind.name, kind.words(build), problems_of(build, build in with_all, 4, number)) for number, build in enumerate(builds)]


def merge_two(builds, covered_by, wanted):
    """Replaces two builds (kind, knobs) of a kind by one that covers what only they cover. Returns None if none can."""
    counts = Counter(one for build in builds for one in covered_by(build) & wanted)
    for a, b in itertools.combinations(builds, 2):
        if a[0] is b[0]:
            both = Counter((*covered_by(a), *covered_by(b)))
            pairs = [pair for name, pair in wanted & both.keys() if counts[name, pair] == both[name, pair]]
            knobs = {item for pair in pairs for item in pair}
            if len(dict(knobs)) == len(knobs) and (one := a[0].complete(dict(knobs), 100)):
                return [build for build in builds if build not in (a, b)] + [(a[0], one)]
    return None


def cross_few_features(kinds):
    """The builds of --quick. Each covers the most that is new, of several candidates of each kind."""
    def covers(kind, one):
        return "any" if len(one) == 2 else kind.name, one

    def covered_by(build):
        kind, knobs = build
        return {covers(kind, one) for one in kind.features_of(knobs)}

    def covered_in_family(build):
        kind, knobs = build
        return {(kind.name if len(one) > 2 else family(kind.name), one) for one in kind.features_of(knobs) if len(one) != 2}
    # Pairs of two features; other knobs of a kind meet some of them.
    of_kind = {kind: sorted(one for one in kind.features_of() if len(one) != 2 or dict(one).keys() <= FEATURES.keys())
               for kind in kinds}
    wanted = {covers(kind, one) for kind, features in of_kind.items() for one in features}
    left, builds = set(wanted), []
    while left:
        tried = []
        for kind, features in of_kind.items():
            of_kind[kind] = [one for one in features if covers(kind, one) in left]
            tried += [(kind, build) for build in (kind.candidate(of_kind[kind]) for _ in range(CANDIDATES // 4)) if build]
        if tried:
            builds.append(max(tried, key=lambda build: len(left & covered_by(build))))
            left -= covered_by(builds[-1])
    while merged := merge_two(builds, covered_by, wanted):
        builds = merged
    with_all = covering(set().union(*map(covered_in_family, builds)), builds, covered_in_family)
    return [Crossed(kind.name, kind.words(build), problems_of(build, (kind, build) in with_all, 8, number))
            for number, (kind, build) in enumerate(builds)]


def cross(judge, name, shows_impossible):
    """Returns the builds of a kind, and the number of legal pairs in none of them."""
    kind = Kind(judge, name, KINDS[name], KNOBS)
    builds = kind.builds()
    problems = Problems(kind, builds, PROBLEMS)
    is_tuned = name.startswith("tuned")
    found = []
    for build, of_build in zip(builds, problems.of_build):
        knobs = [f"{knob}={value}" for knob, value in build.items() if value != judge.rows[knob][0] and (knob in TYPED or not is_tuned)]
        options = (" ".join([*filter(None, problem.values()), f"--seeds {seed}"]) for seed, problem in enumerate(of_build))
        found.append(Crossed(name, " ".join(knobs + ["USE_TUNED=1"] * is_tuned), tuple(options)))
    covered = kind.pairs & set().union(*map(kind.pairs_of, builds))
    with_members = problems.covered & problems.pairs.keys()
    print(f"{name:<14} {len(covered):>5} of {len(kind.pairs):<5} {len(kind.impossible):>4} {len(with_members):>8} of "
          f"{len(problems.pairs):<5} {len(builds):>6} {sum(map(len, problems.of_build)):>9}")
    if shows_impossible:
        print(*(f"  no legal build has {a}={x} {b}={y}" for (a, x), (b, y) in kind.impossible), sep="\n")
    return found, len(kind.pairs) - len(covered) + len(problems.pairs) - len(with_members)


def try_build(builder, build):
    """Returns the failures as lines."""
    try:
        executable = builder.build(bugs.Program(knobs=build.knobs), {})
    except bugs.Broken as error:
        return [f"{build}: {error}"]
    found = {options: bugs.outcome([executable, "--check-only", "--alone", *options.split()], 120) for options in build.problems}
    os.remove(executable)
    return [f"{build}; {options}: {words}" for options, words in found.items() if words != "nothing"]


# The functions of sdpa.cu alone are counted, since those of the CPU backend would take four times as long. So would scalar
# kernels, whose products are functions of sdpa.cu. Counters of threads may lose counts, but do not become 0 again.
COVERAGE = ["--coverage", "-fprofile-update=single", r"-fprofile-filter-files=.*\.cu"]
UNCOVERED = ("scalar",)


@bugs.once
def headers_of_lines(builder):
    """The headers of sdpa.cu, precompiled for builds with and without coverage."""
    name = "line.h"
    builder.write(name, "\n".join(re.findall(r"^#include <[\w.]+>", builder.texts["sdpa.cu"], re.MULTILINE)) + "\n")
    builder.compile("plain", "-Og", *COVERAGE, "-x", "c++-header", name, "-o", name + ".gch")
    return name


def sweep_build(builder, build, parts, taken, scope):
    """Returns the failures as lines. Updates taken: {(scope, path): True if a build of the scope took it}. scope: a function of
    the kind."""
    name = f"features{next(builder.numbers)}"
    coverage = [] if build.kind in UNCOVERED else COVERAGE
    try:
        line = builder.compile("plain", "-Og", *coverage, "-include", headers_of_lines(builder),
                               *("-D" + knob for knob in build.knobs.split()), "-DSDPA_LINE_ONLY", "-x", "c++", "-c",
                               os.path.join(bugs.ROOT, "sdpa.cu"), "-o", name + ".o")
        objects = parts or [*builder.harness("plain"), builder.engine("plain")]
        executable = builder.compile("plain", *coverage, line, *objects, "-o", name)
    except bugs.Broken as error:
        return [f"{build}: {error}"]
    failed = []
    for options in build.problems:
        done = subprocess.run([executable, *options.split()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              errors="replace", timeout=600)
        if done.returncode:
            words = [line for line in done.stdout.split("\n")
                     if re.search(r"FAIL \S+:|^repeat|missing:|have none|rror", line) and "," not in line[:20]]
            failed += words or [f"exit {done.returncode}: " + done.stdout[-500:]]
    if not failed and coverage:
        for path, is_taken in paths.taken(builder.folder, name, build.knobs, builder.texts["sdpa.cu"]).items():
            key = scope(build.kind), path
            taken[key] = taken.get(key, False) or is_taken
    os.remove(executable)
    return [f"{build}\n  {line[-600:]}" for line in failed]


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("only", nargs="?", default="")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--features", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--link", nargs="+", default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(int(os.environ.get("JOBS", os.cpu_count()))) as pool:
        judge, builds, uncovered = Judge(Tree(), folder), [], 0
        if options.features:
            kinds = [Kind(judge, name, KINDS[name] | of_kind, FEATURES | of_kind, TOGETHER_OF.get(name, ()))
                     for name, of_kind in FEATURES_OF.items()]
            of_kinds = [cross_few_features(kinds)] if options.quick else map(cross_features, kinds)
            builds = [build for of_kind in of_kinds for build in of_kind]
            if options.show:
                for kind in kinds:
                    print(f"{kind.name}: {len(kind.pairs)} pairs of features; no legal build has",
                          "; ".join(" ".join(map("=".join, pair)) for pair in kind.impossible))
        else:
            print("pairs          of knobs       none  and of members   builds  problems")
            for name in KINDS:
                of_kind, missing = cross(judge, name, options.show)
                builds, uncovered = builds + of_kind, uncovered + missing
        chosen = [build for build in builds if re.search(options.only, str(build))]
        if options.show:
            print(*("\n  ".join([str(build), *build.problems]) for build in chosen), sep="\n")
            return 0
        if not chosen:
            print(f"crossed.py: no build is like {options.only}")
            return 2
        builder = bugs.Builder(folder)
        taken = {}
        try_one = functools.partial(
            sweep_build, parts=[os.path.abspath(part) for part in options.link], taken=taken,
            scope=family if options.quick else str) if options.features else try_build
        tried = [pool.submit(try_one, builder, build) for build in chosen]
        failed = []
        for one in as_completed(tried):
            failed += one.result()
            print(*one.result(), sep="\n", end="\n" * bool(one.result()), flush=True)
        untaken = [f"no problem of a {scope} build took a path: {path}" for (scope, path), is_taken in taken.items() if not is_taken]
        if options.features and chosen == builds:
            untaken += paths.missing(builder.texts["sdpa.cu"], {path for _, path in taken})
        failed += untaken if chosen == builds else []
        print(*untaken, sep="\n", end="\n" * bool(untaken))
    part = f" of {len(builds)}" if len(chosen) < len(builds) else ""
    print(f"{len(chosen)}{part} builds, {sum(len(build.problems) for build in chosen)} problems: {len(failed)} failed; "
          f"{uncovered} legal pairs in none")
    return 1 if failed or uncovered else 0


if __name__ == "__main__":
    sys.exit(main())
