#!/usr/bin/env python3
"""Puts bugs into copies of the sources and expects the tests to fail.

The bugs of tests/bugs.txt are named, and each must be caught by the check that it names. Drawn bugs come from the
mutation operators of tests/mutations.py; survivors are reported and fail nothing, since some are equivalent.
tests/equivalent.txt lists mutations that are known to be equivalent.

All bugs of one build are compiled into one program, in which the environment variable MUTANT selects one.
usage: tests/bugs.py [REGEX] [--sample N | --list]
       tests/bugs.py --drawn N [--few] [--seed S] [--touched] [--only REGEX] [FILE...]
  REGEX       bugs whose names match (default: all)
  --sample N  at least N of them: all of randomly drawn builds (seed: the commit), first one for each changed file
  --list      print their names and checks, and stop
  --drawn N   N drawn bugs, of FILEs (default: those in C++ that SWITCHED names)
  --few       build random programs only until they reach N drawn bugs; default: all programs
  --seed S    of the draw (default: the commit)
  --touched   in functions that the last commit or the working tree changes, if they have any
  --only R    in functions whose names match
  --engine FILE, --doctest FILE  the CPU backend and doctest's main(), as libraries; without them they are compiled
  --harness FILE...  objects of the harness and tests/sweep.cu, for bugs that are not in the harness"""
import argparse
import contextlib
import functools
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
try:
    import mutations
except ImportError as missing:
    print(f"skipped: {missing}; python3 -m pip install 'tree-sitter==0.*' 'tree-sitter-cpp==0.*'")
    sys.exit(77)
from builds import CXX, HEADER, Tree, auto_var_init, structs_of  # noqa: E402

# A bug of a line takes longer to compile than to run, so lines are not optimised; tests in C++ and the harness are.
FLAGS = ["-std=c++17", "-O0", "-march=native", "-ffp-contract=off", *auto_var_init(), "-w", "-pthread", "-I.", "-I" + ROOT,
         "-I" + os.path.join(ROOT, "cpu_backend")]
SANITIZE = {"plain": [], "thread": ["-fsanitize=thread", "-g1"],
            "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1"]}
ENGINE = {"plain": [], "thread": ["-DSIMT_TSAN"], "address": ["-DSIMT_ASAN"]}
# Compiled into the programs in C++.
SWITCHED = ["sdpa.cu", "sdpa_backward.cu", "reference.cpp", *("harness/" + name for name in sorted(os.listdir(f"{ROOT}/harness")))]
OF_LINES = ["sdpa.cu", "sdpa_backward.cu"]  # with the kernels of a line
PYTORCH = [path for path in Tree().sources("bindings/pytorch.cpp") if "pytorch" in path]  # compiled into the PyTorch binding


class Broken(Exception):
    """The reason why there is no executable."""


@dataclass(frozen=True)
class Program:
    """A build of the sources: a line with the harness, or cases of one of the tests in C++."""
    kind: str = "plain"  # or the sanitizer
    knobs: str = ""
    tests: str = ""  # "": tests/sweep.cu; else contract, plan, batch or unit
    cases: frozenset = frozenset()  # to compile of tests/TESTS.cu; empty: all

    @property
    def source(self):
        """The file that the line is compiled from."""
        return "sdpa_backward.cu" if "BACKWARD=1" in self.knobs.split() else "sdpa.cu"


# ---- processes ----

def run(words, limit=None, is_last=None, **options):
    """(exit code, output) of a process. The code is None if it ran past the limit in seconds. At the first line of output
    that `is_last` matches, the process is killed, and the code is 1."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                               start_new_session=True, **options)
    ended = []

    def kill(why):
        ended.append(why)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    timer = threading.Timer(limit or 1e6, kill, ["late"])
    timer.start()
    lines = []
    for line in process.stdout:
        lines.append(line)
        if is_last and re.search(is_last, line):
            kill("seen")
            break
    process.stdout.close()
    process.wait()
    timer.cancel()
    return None if "late" in ended else 1 if ended else process.returncode, "".join(lines)


def once(function):
    """Like functools.cache, but concurrent calls with the same arguments compute the value once."""
    locks = defaultdict(threading.Lock)
    cached = functools.lru_cache(None)(function)

    def call(*arguments):
        with locks[arguments]:
            return cached(*arguments)
    return call


# ---- programs with many bugs ----

class Builder:
    """Builds executables in a folder. switches: {file: [mutations.Switch]} of all bugs, numbered below count. built: paths of
    "engine", "doctest" and "harness" (a list) without sanitizers, if they exist already."""

    def __init__(self, folder, switches=(), count=1, built=None):
        self.built = built or {}
        self.folder, self.switches = folder, defaultdict(list, switches)
        self.servers = PytestServers()
        self.of_line_alone = set()  # numbers of bugs for which the harness is not compiled, since they are in functions of the line too
        self.rejected = set()  # numbers of bugs that do not compile in some program
        self.texts = {name: read(name) for name in SWITCHED}
        names = [name for name, _ in structs_of(Tree().read(HEADER))["SdpaParams"]._fields_]
        self.write("sdpa_members.h", f"#define SDPA_MEMBERS {', '.join(names)}\n")  # as CMakeLists.txt has it
        self.write("mutant.h", mutations.HEADER.replace("COUNT", str(count)))
        self.numbers = itertools.count()
        for name in ("engine", "headers", "harness", "doctest", "clean", "switched_copy"):
            setattr(self, name, once(getattr(self, name)))

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, text):
        with open(self.path(name), "w") as file:
            file.write(text)

    def compile(self, kind, *words):
        code, out = run([CXX, *FLAGS, *SANITIZE[kind], *words], cwd=self.folder)
        if code:
            raise Broken("does not compile: " + "\n".join(re.findall(".*error.*", out) or [out]))
        return self.path(words[-1])

    def engine(self, kind):
        """The CPU backend."""
        if kind == "plain" and "engine" in self.built:
            return self.built["engine"]
        return self.compile("plain", "-O2", *ENGINE[kind], "-c", os.path.join(ROOT, "cpu_backend", "engine.cpp"), "-o",
                            f"engine_{kind}.o")

    def headers(self, kind, *words):
        """The headers that every program includes, precompiled with these options."""
        name = f"headers{next(self.numbers)}.h"
        found = re.findall(r"^#include <[\w.]+>", "".join(self.texts.values()), re.MULTILINE)
        self.write(name, "\n".join(dict.fromkeys(found)) + "\n")
        self.compile(kind, *words, "-x", "c++-header", name, "-o", name + ".gch")
        return name

    def doctest(self, kind):
        """main() of the tests in C++."""
        if kind == "plain" and "doctest" in self.built:
            return self.built["doctest"]
        return self.compile(kind, "-c", os.path.join(ROOT, "tests", "doctest_main.cpp"), "-o", f"doctest_{kind}.o")

    def harness(self, kind):
        """The objects of the harness with tests/sweep.cu; independent of knobs."""
        is_clean = not any(self.is_in_harness(file, one.start) and one.number not in self.of_line_alone
                           for file, of_file in self.switches.items() for one in of_file)
        if kind == "plain" and "harness" in self.built and is_clean:
            return self.built["harness"]
        return [self.object(Program(kind), self.switches, "tests/sweep.cu", *["-Og"] * (kind != "address"))]

    def is_in_harness(self, file, position):
        """True for the harness's own files, and for the sections of sdpa.cu that it calls: those about the knobs and the
        problem, and the tables."""
        if file not in OF_LINES:
            return file in SWITCHED
        text = self.texts["sdpa.cu"]
        return file == "sdpa.cu" and not text.index("// ==== 3 PTX") < position < text.index("// ==== 7 TABLES")

    def tree(self, texts):
        """A folder like ROOT with these texts; other included files are links."""
        folder = self.path(f"tree{next(self.numbers)}")
        for inner in ("", "tests", "harness"):
            os.mkdir(os.path.join(folder, inner))
            for name in os.listdir(os.path.join(ROOT, inner)):
                if os.path.join(inner, name) not in texts and (inner or name in (*SWITCHED, "cpu_backend", "bindings")):
                    os.symlink(os.path.join(ROOT, inner, name), os.path.join(folder, inner, name))
        for name, text in texts.items():
            self.write(os.path.join(folder, name), text)
        return folder

    def object(self, program, switches, source, *words, texts=()):
        """Compiles a source with these bugs to an object. Bugs that do not compile are omitted and added to self.rejected."""
        knobs = ["-D" + knob for knob in program.knobs.split()]
        while True:
            kept = {name: [one for one in switches.get(name, ()) if one.number not in self.rejected] for name in SWITCHED}
            made = {name: mutations.schemata(self.texts[name], of_file) for name, of_file in kept.items() if of_file}
            folder = self.tree({**{name: text for name, (text, _) in made.items()}, **dict(texts)})
            try:
                return self.compile(program.kind, *knobs, "-include", self.headers(program.kind), "-include", "mutant.h",
                                    *words, "-x", "c++", "-c", os.path.join(folder, source), "-o", f"{folder}.o")
            except Broken as error:
                bad = {made[name][1].get(int(line)) for name, line in re.findall(
                    r"(?:^|/)((?:harness/)?[\w.]+):(\d+):\d+: (?:fatal )?error", str(error), re.MULTILINE) if name in made} - {None}
                if not bad:
                    raise
                self.rejected |= bad

    def copy(self, texts):
        """A copy of ROOT with these texts, for tests in Python."""
        folder = self.path(f"copy{next(self.numbers)}")
        shutil.copytree(ROOT, folder, ignore=lambda inside, names: [
            name for name in names if name == "__pycache__" or inside == ROOT and name != ".clang-format" and (
                name == "results" or name.startswith(("build", ".")))])
        os.symlink(os.path.join(ROOT, "results"), os.path.join(folder, "results"))
        for name, text in texts.items():
            self.write(os.path.join(folder, name), text)
        return folder

    def switched_texts(self):
        """{file: text} of the PyTorch binding with all its bugs. It is compiled once, for the other bugs in Python too."""
        if not any(self.switches[name] for name in PYTORCH):
            return {}
        texts = {name: mutations.schemata(read(name), self.switches[name])[0] for name in PYTORCH}
        texts[PYTORCH[0]] = f'#include "{self.path("mutant.h")}"\n{texts[PYTORCH[0]]}'
        return texts

    def switched_copy(self):
        """A copy with all bugs of the PyTorch binding."""
        return self.copy(self.switched_texts())

    def cases(self, program):
        """{file: text} of a test in C++ with only some of its test cases, which halves the time to compile it."""
        path = f"tests/{program.tests}.cu"
        if not program.cases:
            return {}
        return {path: re.sub(r'^TEST_CASE\("(\w+)"(?:[^\n]*}|.*?^})$',
                             lambda case: case.group() if case[1] in program.cases else "", read(path),
                             flags=re.MULTILINE | re.DOTALL)}

    def build(self, program, switches, texts=()):
        """The executable of a program with these bugs in its line or its tests; texts: {file: text} instead."""
        texts = dict(texts)
        if program.tests:
            parts = [self.object(program, switches, f"tests/{program.tests}.cu", *["-Og"] * (program.kind != "address"),
                                 texts={**self.cases(program), **texts}),
                     self.doctest(program.kind)]
        elif texts and not set(texts) & set(OF_LINES):
            parts = [self.object(program, {}, program.source, "-DSDPA_LINE_ONLY"),
                     self.object(Program(program.kind), {}, "tests/sweep.cu", texts=texts)]
        else:
            line = {name: of_file for name, of_file in switches.items() if name in OF_LINES}
            parts = [self.object(program, line, program.source, "-DSDPA_LINE_ONLY", texts=texts), *self.harness(program.kind)]
        return self.compile(program.kind, *parts, self.engine(program.kind), "-o", f"program{next(self.numbers)}")

    def clean(self, executable, words):
        """(outcome, seconds, numbers of bugs whose code it reaches) of a run without a bug."""
        reached, start = f"{executable}.{next(self.numbers)}", time.monotonic()
        found = outcome([executable, *words], 300, {"MUTANTS_REACHED": reached})
        numbers = set(map(int, open(reached).read().split())) if os.path.exists(reached) else set()
        return found, time.monotonic() - start, numbers


@functools.lru_cache(None)
def read(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as file:
        return file.read()


EVIDENCE = re.compile(r": FAIL [^:]*: (.*)|^\d+ problems have (.*)|(CHECK\w*\(.*\)) is NOT correct", re.MULTILINE)


def outcome(words, limit, environment=(), is_last=None):
    """"CHECK: evidence", or "nothing"."""
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", **dict(environment)}
    code, out = run(words, limit, is_last, env=environment)
    if code is None:
        return f"no end after {limit:.0f} s"
    address = re.search("AddressSanitizer: [a-z-]*|runtime error: .*", out)
    evidence, backend = EVIDENCE.search(out), re.search("^simt: (.*)", out, re.MULTILINE)
    if "ThreadSanitizer: data race" in out:
        return "thread: data race"
    if address:
        return "address: " + address.group()
    if code == 1 and evidence and evidence[3]:
        return "check: " + evidence[3]
    if backend:
        return "backend: " + backend[1]
    if code == 1:
        return "check: " + next(filter(None, evidence.groups()), "") if evidence else "check: "
    return "nothing" if code == 0 else f"exit {code}: {out.splitlines()[-1:]}"


# ---- the bugs of bugs.txt ----

@dataclass(frozen=True)
class Bug:
    number: int
    name: str
    net: str
    knobs: str
    options: str
    script: str
    file: str  # with the bug: sdpa.cu, or the one before the script and a colon
    section: str  # of tests/bugs.txt

    def program(self, cases=frozenset()):
        """The program that shows the bug. cases: those of all bugs in this program."""
        kind = self.net if self.net in SANITIZE else "plain"
        tests = "unit" if self.net == "unit" else "".join(re.findall(r"^@(\w+)", self.options))
        return Program(kind, self.knobs, tests, cases)

    @property
    def cases(self):
        return frozenset(word for word in self.options.split() if word[0] != "@") if self.program().tests else frozenset()

    def words(self):
        """The arguments of the program."""
        if self.cases:
            return ["--abort-after=1", "--test-case=" + ",".join(sorted(self.cases))]
        return ["--check-only", *self.options.split()]

    def edited(self):
        """The text of the file with the bug."""
        edits = re.findall("s~[^~]*~[^~]*~[a-z0-9]*", self.script)
        if re.sub(r"[;\s]", "", self.script) != re.sub(r"[;\s]", "", "".join(edits)):
            raise Broken(f"{self.name}: not only edits: {self.script}")
        text = read(self.file)
        for edit in edits:
            done = subprocess.run(["sed", "-E", edit], input=text, capture_output=True, text=True, check=False)
            if done.stdout == text or done.returncode:
                raise Broken(f"{self.name}: no line of {self.file} matches {edit}{done.stderr}")
            text = done.stdout
        return text


def read_bugs(path):
    sets, section, number = {}, "", itertools.count()
    with open(path, encoding="utf-8") as file:
        for line in file:
            section = line.strip("#- \n") if line.startswith("# ----") else section
            words = shlex.split(line) if not line.startswith("#") else []
            if len(words) == 1:
                name, _, knobs = words[0].partition("=")
                sets[name] = string.Template(knobs).substitute(sets)
            elif words:
                name, net, knobs, options, script = words
                file_name, edits = re.fullmatch(r"(?:([\w./]+): *)?(.*)", script, re.DOTALL).groups()
                yield Bug(next(number), name, net, string.Template(knobs).substitute(sets), options, edits,
                          file_name or "sdpa.cu", section)


class PytestServers:
    """Processes of tests/pytest_server.py; one runs one request at a time."""
    IMPORTED = ("numpy", "torch", "torch._dynamo", "torch.export", "torch.fx.experimental.symbolic_shapes", "torch.utils.flop_counter")

    def __init__(self):
        self.idle = defaultdict(list)  # {packages: [process]}

    def outcome(self, folder, words, limit, environment):
        """"pytest: failed test", "nothing", or "skipped" if a package of all of these tests is missing."""
        tests = read(f"tests/{words[0]}")
        packages = [name for name in self.IMPORTED if re.search(rf"^\s*(?:import|from) {name.split('.')[0]}\b", tests, re.MULTILINE)]
        idle = self.idle[tuple(packages)]
        try:
            server = idle.pop()
        except IndexError:
            server = subprocess.Popen([sys.executable, f"{ROOT}/tests/pytest_server.py", *packages], stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        words = ["-q", "-x", "-p", "no:cacheprovider", "--assert=plain", "--rootdir=" + folder, *words]
        with tempfile.NamedTemporaryFile("r", errors="replace") as output:
            print(json.dumps([os.path.join(folder, "tests"), environment, words, output.name, limit]), file=server.stdin, flush=True)
            code, out = int(server.stdout.readline()), output.read()
        idle.append(server)
        if re.search(r"^\d+ skipped(, \d+ deselected)? in ", out, re.MULTILINE):
            return "skipped"
        failed = re.findall("^(?:FAILED|ERROR) (.*::.*)", out, re.MULTILINE)
        return "nothing" if code == 0 else f"pytest: {failed[0]}" if code == 1 and failed else f"exit {code}: {out[-200:]}"

    def close(self):
        for server in itertools.chain.from_iterable(self.idle.values()):
            server.communicate()


def try_pytest(builder, bug, text):
    """Runs a bug's tests in Python in a copy of all files."""
    if bug.file in PYTORCH and any(bug.number == one.number for one in builder.switches[bug.file]):
        folder, mutant = builder.switched_copy(), {"MUTANT": str(bug.number)}
    else:
        folder, mutant = builder.copy({**builder.switched_texts(), bug.file: text}), {}
    # A common build folder, so that the same sources are built once.
    return builder.servers.outcome(folder, shlex.split(bug.options), 300, {**mutant, "SDPA_BUILD_DIR": builder.path("pytest")})


def try_program(builder, program, bugs, edited):
    """Returns [(bug, outcome)] of all bugs of a program, and failures of its clean runs."""
    numbers = {bug.number for bug in bugs}
    switches = {name: [one for one in of_file if one.number in numbers] for name, of_file in builder.switches.items()}
    try:
        executable = builder.build(program, switches)
    except Broken as error:
        return [(bug, str(error)) for bug in bugs], {}
    results, wrong = [], {}
    for bug in bugs:
        found, seconds, reached = builder.clean(executable, tuple(bug.words()))
        wrong.update({(program, tuple(bug.words())): found} if found != "nothing" else {})
        try:
            if bug.number in reached and bug.number not in builder.rejected:
                found = outcome([executable, *bug.words()], 10 + 10 * seconds, {"MUTANT": str(bug.number)})
            else:  # it cannot be switched
                alone = builder.build(program, {}, ((bug.file, edited[bug.number]),))
                found = outcome([alone, *bug.words()], 10 + 10 * seconds)
        except Broken as error:
            found = str(error)
        results.append((bug, found))
    return results, wrong


def try_edit(bug):
    try:
        return bug.edited()
    except Broken as error:
        return error


def try_bugs(bugs, edited, builder, pool):
    """Tries bugs of bugs.txt and prints the outcomes; returns True if all were caught."""
    programs = defaultdict(list)
    for bug in bugs:
        programs[bug.program() if bug.net != "pytest" else bug].append(bug)
    tried = []
    for program, of_program in programs.items():
        if isinstance(program, Bug):
            tried.append(pool.submit(lambda bug: ([(bug, try_pytest(builder, bug, edited[bug.number]))], {}), program))
        else:
            cases = frozenset().union(*(bug.cases for bug in of_program))
            tried.append(pool.submit(try_program, builder, of_program[0].program(cases), of_program, edited))
    results, wrong = {}, {}
    for future in tried:
        of_program, wrong_runs = future.result()
        results.update(of_program)
        wrong.update(wrong_runs)
    caught = skipped = 0
    for section, of_section in itertools.groupby(bugs, lambda bug: bug.section):
        print("# " + section)
        for bug in of_section:
            net = {"unit": "check"}.get(bug.net, bug.net)
            # With threads of the host, the backend sometimes sees the effect before ThreadSanitizer sees the race.
            is_caught = results[bug].startswith((net + ": ", *["backend: "] * (net == "thread")))
            is_skipped = results[bug] == "skipped"
            caught += is_caught
            skipped += is_skipped
            words = results[bug].replace("check", bug.net, 1) if bug.net == "unit" else results[bug]
            print(f"{bug.name:<26} {'caught' if is_caught else '' if is_skipped else 'MISSED':<7} {words[:110]}")
    for (program, words), found in wrong.items():
        print(f"without a bug ({program.kind}; {program.knobs}; {program.tests} {' '.join(words)}): {found}")
    print(f"{caught} of {len(bugs)} bugs caught" + f", {skipped} skipped" * (skipped > 0))
    return caught + skipped == len(bugs) and not wrong


def git(*words):
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def takes_long(bug):
    """True if something other than a line is compiled for this bug: the harness, the CPU backend, tests/unit.cu or the PyTorch binding."""
    if bug.net == "pytest":
        return bug.file in PYTORCH or "torch" in read("tests/" + bug.options.split()[0])
    return bug.net in ("thread", "address", "unit") or bug.file not in OF_LINES


def sample(bugs, count, seed):
    """Draws whole programs until they have `count` bugs, preferably quick ones; first one with a bug in each file that the last
    commit changes."""
    programs = defaultdict(list)
    for bug in bugs:
        programs[bug.program() if bug.net != "pytest" else bug].append(bug)
    order = list(programs.values())
    random.Random(seed).shuffle(order)
    order.sort(key=lambda of_program: any(takes_long(bug) for bug in of_program))
    changed, of_changed, chosen = set(git("diff", "--name-only", "HEAD~1").split()), [], set()
    for of_program in order:
        files = changed & {bug.file for bug in of_program}
        of_changed += [of_program] if files else []
        changed -= files
    for of_program in of_changed + order:
        if len(chosen) < count:
            chosen |= {bug.number for bug in of_program}
    return [bug for bug in bugs if bug.number in chosen]


# ---- drawn bugs ----

# Builds that together compile most of sdpa.cu, and what each runs; some only for certain mutations.
SWEEP = ["--sweep 4 --alone --check-only"]
ROLES = "USE_WGMMA=1 USE_WARP_SPECIALIZATION=1 OVERLAP=1 USE_LAZY_MAX=1 STAGES=2"
DRAWN_PROGRAMS = {
    "scalar": (Program(knobs="VEC_WIDTH=8 SYNC_POLICY=1 SWIZZLE_XOR=1 USE_CP_ASYNC=1 STAGES=2 USE_LENGTHS=1 USE_SINKS=1 "
                       "USE_BIAS=1"), SWEEP),
    "wmma": (Program(knobs="USE_WMMA=1 USE_WMMA_PV=1 BLOCK_M=32 NUM_WARPS=2 VEC_WIDTH=8 SYNC_POLICY=1 SWIZZLE_XOR=1 "
                     "USE_CP_ASYNC=1 STAGES=2 USE_WARP_SPECIALIZATION=1 USE_PERSISTENT_CTA=1"), SWEEP),
    "mma": (Program(knobs="USE_MMA_SYNC=1 VEC_WIDTH=8 SWIZZLE_XOR=1 USE_CP_ASYNC=1 STAGES=2 BLOCK_M=16 BLOCK_N=16 NUM_WARPS=2 "
                    "SPLIT_KV=2 PACK_GQA=1 SPLIT_CTAS=3 USE_LAZY_MAX=1 USE_LENGTHS=1 USE_PAGES=1 USE_SOFTCAP=2"),
            ["--seeds 3 " + SWEEP[0]]),
    "plain": (Program(knobs="USE_WGMMA=1 VEC_WIDTH=8 BLOCK_M=64 BLOCK_N=32 STAGES=2 USE_LENGTHS=1"), SWEEP),
    "roles": (Program(knobs=f"{ROLES} VEC_WIDTH=8 BLOCK_M=128 NUM_WARPS=8 BLOCK_N=32 USE_PERSISTENT_CTA=1 USE_BIAS=1"), SWEEP),
    "softcap": (Program(knobs=f"{ROLES} VEC_WIDTH=8 BLOCK_M=64 NUM_WARPS=4 BLOCK_N=64 PACK_GQA=1 SPLIT_CTAS=0 USE_SOFTCAP=1 "
                        "USE_LENGTHS=1 USE_PAGES=1 USE_SINKS=1"), SWEEP),
    "e4m3": (Program(knobs=f"{ROLES} DTYPE=FP8_E4M3 VEC_WIDTH=16 BLOCK_M=64 NUM_WARPS=8 BLOCK_N=64 SPLIT_KV=2 FP8_FLUSH=2"),
             ["--seeds 2 " + SWEEP[0]]),
    "kv8": (Program(knobs=f"{ROLES} DTYPE=BF16 KV_DTYPE=FP8_E4M3 VEC_WIDTH=16 HEAD_DIM=128 BLOCK_M=64 NUM_WARPS=4 "
                    "BLOCK_N=64"), SWEEP),
    "decode": (Program(knobs="USE_WGMMA=1 VEC_WIDTH=8 SWAP_AB=1 BLOCK_M=16 NUM_WARPS=4 BLOCK_N=64 PACK_GQA=1 SPLIT_CTAS=0 "
                       "STAGES=2 USE_LENGTHS=1 USE_LAZY_MAX=1 USE_BIAS=2"), SWEEP),
    "backward": (Program(knobs="BACKWARD=1 USE_MMA_SYNC=1 VEC_WIDTH=8 SWIZZLE_XOR=1 USE_CP_ASYNC=1 STAGES=2 BLOCK_M=64 "
                         "USE_SOFTCAP=2 USE_SINKS=1"),
                 [*SWEEP, *(f"--check-only --shape 1,1,1,2,70 --shape 2,2,2,2,3 --layout {layout}" for layout in
                            ("far", "far_heads", "far_rows"))]),
    "contract": (Program(knobs=f"{ROLES} VEC_WIDTH=8 BLOCK_M=64 NUM_WARPS=4 BLOCK_N=16 USE_BIAS=2", tests="contract"),
                 ["--test-case-exclude=changed_*,failed_launches,many_keys,workspace",
                  "--test-case=changed_*,failed_launches,many_keys,workspace"]),
    "unit": (Program(tests="unit"), ["--test-case-exclude=exp2,reference_kernel_of_all,every_row*,given,seeds,spoiled,inputs",
                                     "--test-case=every_row,given,seeds,spoiled,inputs"],
             lambda one: one.file not in OF_LINES),
    "plan": (Program(tests="plan"), ["--test-case=sequences,scalar,roles,chunk,decode,paged"],
             lambda one: re.search("plan|^for_each_tile|^invariant|^rounds_at_once|^items_of|^grid_of|^memory_of|"
                                   "^(workspace|scratch)_bytes|^Sequence", one.function)),
}


def touched_lines(file):
    """Line numbers of the functions that the last commit or the working tree changes."""
    hunks = re.findall(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", git("diff", "-W", "HEAD~1", "--", file), re.MULTILINE)
    return {int(first) + i for first, count in hunks for i in range(int(count or 1))}


def read_equivalent():
    """{(function, operator, "original -> mutated")} of tests/equivalent.txt."""
    return {tuple(field.strip() for field in line.split(" | ")[:3]) for line in read("tests/equivalent.txt").splitlines()
            if " | " in line}


def in_drawn_order(found, seed):
    """Mutations in random order, with equal shares of all operators, since some generate many times as many as others."""
    by_operator, generator = defaultdict(list), random.Random(seed)
    for mutation in found:
        by_operator[mutation.operator].append(mutation)
    for of_operator in by_operator.values():
        generator.shuffle(of_operator)
    turns = itertools.zip_longest(*(by_operator[name] for name in sorted(by_operator)))
    return [mutation for turn in turns for mutation in turn if mutation]


def candidates(files, only, is_touched):
    """The mutations of files from which bugs are drawn."""
    declaring = {*SWITCHED, "bindings/sdpa.h", "bindings/append.h", *(name for name in files if not name.endswith(".py"))}
    declared = mutations.Declared(*map(read, sorted(declaring)))
    found, equivalent = [], read_equivalent()
    for file in files:
        text = read(file)
        is_python = file.endswith(".py")
        of_file = mutations.python_mutations(file, text) if is_python else mutations.mutations(file, text, declared)
        found += [one for one in of_file if re.search(only, one.function) and
                  (one.function, one.operator, f"{one.original} -> {mutations.one_line(one.mutated)}") not in equivalent]
    touched = [one for one in found if is_touched and one.line in touched_lines_of(one.file)]
    return touched or found


touched_lines_of = functools.lru_cache(None)(touched_lines)


def drawn_in_programs(builder, pool, drawn, count, few_by):
    """Runs drawn bugs, {number: mutation}, in the programs that reach them until `count` have run. few_by: the seed of the order
    in which programs are built until they reach as many bugs; None: build all. Returns [(mutation, outcome, names of programs)]
    and the mutations that no program reaches."""
    def prepare(name):
        program, runs, *_ = DRAWN_PROGRAMS[name]
        switches = {name: [one for one in of_file if one.number in drawn] for name, of_file in builder.switches.items()}
        executable = builder.build(program, switches)
        for words in map(str.split, runs):
            words += ["--abort-after=1"] * bool(program.tests)
            yield name, [executable, *words], *builder.clean(executable, tuple(words))
    needed = [name for name, (program, _, *only) in DRAWN_PROGRAMS.items()
              if any((one.file != "sdpa_backward.cu" or one.file == program.source) and all(is_for(one) for is_for in only)
                     for one in drawn.values())]
    at_once = len(needed)
    if few_by is not None:
        builder.of_line_alone = {number for number, one in drawn.items() if one.file in OF_LINES}
        random.Random(few_by).shuffle(needed)
        at_once = os.cpu_count()
    runs, reached = [], set()
    while needed and len(reached - builder.rejected) < count:
        runs += itertools.chain.from_iterable(pool.map(lambda name: list(prepare(name)), needed[:at_once]))
        reached = set().union(*(one[4] for one in runs))
        del needed[:at_once]
    prepared = sorted(runs, key=lambda one: one[3])  # cheapest first
    for name, words, found, *_ in prepared:
        if found != "nothing":
            raise Broken(f"{name} {' '.join(words[1:])} without a bug: {found}")

    def attempt(number):
        ran = []
        for name, words, _, seconds, reached in prepared:
            if number in reached:
                ran.append(name)
                found = outcome(words, 3 + 5 * seconds, {"MUTANT": str(number)}, ": FAIL |^simt: ")
                if found != "nothing":
                    return drawn[number], found, ran
        return drawn[number], "nothing", ran
    compiled = [number for number in drawn if number not in builder.rejected]
    chosen = [number for number in compiled if number in reached][:count]
    unreached = [drawn[number] for number in compiled
                 if few_by is None and number not in reached and number < max(chosen, default=0)]
    return list(pool.map(attempt, chosen)), unreached


# tests/test_NAME.py of a file that has another name.
TESTS_OF = {"inlining": "extract", "minimal": "extract", "concrete": "extract", "builds": "engine", "cli": "tools",
            "steps": "rungs", "peers": "tools", "ncu": "tools", "search": "tune", "ladders": "rungs",
            "report_charts": "page", "report_rows": "page", "append": "flash_attn_interface",
            "transformers_attention": "transformers", "context_parallel": "frameworks", "wheel_backend": "pip",
            "__main__": "pip", "accuracy": "page", "stress": "tools", "sweep": "tools"}


def drawn_in_pytest(builder, pool, drawn):
    """Runs drawn bugs, one at a time in a copy of all files, by the tests of their file."""
    def attempt(number):
        one = drawn[number]
        stem = os.path.splitext(os.path.basename(one.file))[0]
        tests = f"test_{TESTS_OF.get(stem, stem)}.py"
        bug = Bug(number, "", "pytest", "", tests, "", one.file, "")
        text, mutated = read(one.file), one.mutated if one.file.endswith(".py") else f"({one.mutated})"
        return one, try_pytest(builder, bug, text[:one.start] + mutated + text[one.end:]), [tests]
    return list(pool.map(attempt, drawn))


def try_drawn(drawn, count, seed, is_few, builder, pool):
    """Tries drawn bugs, {number: mutation}, and prints the survivors."""
    in_programs = {number: one for number, one in drawn.items() if one.file in SWITCHED}
    in_python = {number: one for number, one in drawn.items() if one.file not in SWITCHED}
    tried, unreached = [], []
    if in_programs:
        tried, unreached = drawn_in_programs(builder, pool, in_programs, count, seed if is_few else None)
    tried += drawn_in_pytest(builder, pool, dict(itertools.islice(in_python.items(), count - len(tried))))
    survivors = [one for one in tried if one[1] == "nothing"]
    for mutation, _, programs in survivors:
        print(f"SURVIVED {mutation}\n    run by {' '.join(dict.fromkeys(programs))}")
    for mutation in unreached:
        print(f"not reached: {mutation}")
    print(f"{len(tried) - len(survivors)} of {len(tried)} drawn bugs caught, seed {seed}")


def main():
    os.environ.pop("SDPA_TEST_QUICK", None)  # the test that must catch a bug may be marked long
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--drawn", type=int)
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--seed", default=git("rev-parse", "HEAD").strip() or "no clone")
    parser.add_argument("--touched", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--engine", type=os.path.abspath)
    parser.add_argument("--doctest", type=os.path.abspath)
    parser.add_argument("--harness", type=os.path.abspath, nargs="+")
    options = parser.parse_args()
    built = {name: path for name, path in (("engine", options.engine), ("doctest", options.doctest), ("harness", options.harness)) if path}
    bugs, drawn = [], {}
    if options.sample or not options.drawn:
        pattern = "" if options.drawn else "|".join(options.words)
        bugs = [bug for bug in read_bugs(os.path.join(ROOT, "tests", "bugs.txt")) if re.search(pattern, bug.name)]
        if not bugs:
            print(f"bugs.py: no bug has a name like {pattern}")
            return 2
        bugs = sample(bugs, options.sample, options.seed) if options.sample else bugs
    if options.list:
        for section, of_section in itertools.groupby(bugs, lambda bug: bug.section):
            print("# " + section)
            print(*(f"{bug.name:<26} listed  {bug.net}" for bug in of_section), sep="\n")
        return 0
    if options.drawn:
        order = in_drawn_order(candidates(options.words or SWITCHED, options.only, options.touched), options.seed)
        # More than asked for: some do not compile, and some are reached by no program.
        drawn = dict(enumerate(order[:2 * options.drawn + 20], max((bug.number for bug in bugs), default=0) + 1))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        edited = dict(zip((bug.number for bug in bugs), pool.map(try_edit, bugs)))
        stale = [str(text) for text in edited.values() if isinstance(text, Broken)]
        if stale:
            print(*stale, sep="\n")
            return 1
        switches = defaultdict(list)
        for bug in bugs:
            if bug.file in (*SWITCHED, *PYTORCH):
                switches[bug.file] += mutations.switches_of(read(bug.file), edited[bug.number], bug.number) or []
        for number, one in drawn.items():
            if one.file in SWITCHED:
                switches[one.file].append(mutations.Switch(one.start, one.end, number, one.mutated))
        builder = Builder(folder, switches, 1 + max(itertools.chain((bug.number for bug in bugs), drawn)), built)
        is_well = not bugs or try_bugs(bugs, edited, builder, pool)
        if drawn:
            try_drawn(drawn, options.drawn, options.seed, options.few, builder, pool)
        builder.servers.close()
    print(f"{sum(os.times()[:4]):.0f} CPU-seconds")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
