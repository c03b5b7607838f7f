#!/usr/bin/env python3
"""The checker checked: each bug of tests/bugs.txt is put into a copy of sdpa.cu, or of the file that it names, and must be caught
by the net named beside it, on the CPU backend. Each set of knobs and options of a line is also run without a bug, and must pass.
usage: tests/bugs.py [REGEX] [--sample N]
  --sample N  so many of them, drawn by the commit, and all those in functions that the last commit or the working tree changes"""
import argparse
import functools
import itertools
import os
import random
import re
import shlex
import shutil
import string
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
from builds import CXX, HEADER, Tree, auto_var_init, structs_of  # noqa: E402

# Not optimised: a bug takes longer to compile than to run.
FLAGS = ["-std=c++17", "-O0", "-march=native", "-ffp-contract=off", *auto_var_init(), "-w", "-pthread", "-I.", "-I" + ROOT,
         "-I" + os.path.join(ROOT, "cpu_backend")]
SANITIZE = {"plain": [], "thread": ["-fsanitize=thread", "-g1"],
            "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1"]}
ENGINE = {"plain": [], "thread": ["-DSIMT_TSAN"], "address": ["-DSIMT_ASAN"]}


class Broken(Exception):
    """Why there is no executable."""


@dataclass(frozen=True)
class Bug:
    name: str
    net: str
    knobs: str
    options: str
    script: str
    file: str  # that has the bug: sdpa.cu, or that before the script, with a colon
    section: str  # of tests/bugs.txt

    @property
    def kind(self):
        return self.net if self.net in SANITIZE else "plain"

    @property
    def tests(self):
        """The file in C++ that the options name, as contract in "@contract errors"; or ""."""
        return "".join(re.findall(r"^@(\w+)", self.options))


def edits_of(script):
    """The edits of a script, s~OLD~NEW~FLAGS between semicolons."""
    edits = re.findall("s~[^~]*~[^~]*~[a-z0-9]*", script)
    if re.sub(r"[;\s]", "", script) != re.sub(r"[;\s]", "", "".join(edits)):
        raise Broken(f"not edits alone: {script}")
    return edits


def read_bugs(path):
    sets, section = {}, ""
    with open(path) as file:
        for line in file:
            section = line.strip("#- \n") if line.startswith("# ----") else section
            words = shlex.split(line) if not line.startswith("#") else []
            if len(words) == 1:
                name, _, knobs = words[0].partition("=")
                sets[name] = string.Template(knobs).substitute(sets)
            elif words:
                name, net, knobs, options, script = words
                file, edits = re.fullmatch(r"(?:([\w./]+): *)?(.*)", script, re.DOTALL).groups()
                yield Bug(name, net, string.Template(knobs).substitute(sets), options, edits, file or "sdpa.cu", section)


def once(function):
    """As functools.cache, but threads that want the same wait for the first of them."""
    locks = defaultdict(threading.Lock)
    cached = functools.lru_cache(None)(function)

    def call(*arguments):
        with locks[arguments]:
            return cached(*arguments)
    return call


class Builder:
    """Executables in a folder."""

    def __init__(self, folder):
        self.folder = folder
        with open(os.path.join(ROOT, "sdpa.cu")) as file:
            self.source = file.read()
        names = [name for name, _ in structs_of(Tree().read(HEADER))["SdpaParams"]._fields_]
        self.write("sdpa_members.h", f"#define SDPA_MEMBERS {', '.join(names)}\n")  # as CMakeLists.txt has it
        self.engine, self.headers, self.harness = once(self.engine), once(self.headers), once(self.harness)
        self.doctest = once(self.doctest)

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, text):
        with open(self.path(name), "w") as file:
            file.write(text)

    def compile(self, kind, *words):
        done = subprocess.run([CXX, *FLAGS, *SANITIZE[kind], *words], cwd=self.folder,
                              capture_output=True, text=True)
        if done.returncode:
            raise Broken("does not compile: " + (re.findall(".*error.*", done.stderr) or [done.stderr])[0])
        return words[-1]

    def engine(self, kind):
        return self.compile("plain", "-O2", *ENGINE[kind], "-c", os.path.join(ROOT, "cpu_backend", "engine.cpp"), "-o", f"engine_{kind}.o")

    def headers(self, kind):
        """The headers of others, which every bug includes, compiled."""
        os.mkdir(self.path(kind))
        with open(os.path.join(ROOT, "harness.cu")) as file:
            found = re.findall(r"^#include <[\w.]+>", self.source + file.read(), re.MULTILINE)
        self.write(f"{kind}/headers.h", "\n".join(found) + "\n")
        self.compile(kind, "-x", "c++-header", f"{kind}/headers.h", "-o", f"{kind}/headers.h.gch")
        return f"{kind}/headers.h"

    def object(self, kind, knobs, program, name, *words):
        return self.compile(kind, *("-D" + knob for knob in knobs.split()), "-include", self.headers(kind), *words, "-x", "c++",
                            "-c", program, "-o", name)

    def harness(self, kind):
        """The self-check of the clean sdpa.cu with what tests/sweep.cu adds, which knows nothing of a line's knobs."""
        return self.object(kind, "", os.path.join(ROOT, "tests", "sweep.cu"), f"harness_{kind}.o", "-O1")

    def doctest(self, kind):
        """main() of tests/contract.cu and tests/plan.cu."""
        return self.compile(kind, "-c", os.path.join(ROOT, "tests", "doctest_main.cpp"), "-o", f"doctest_{kind}.o")

    def edited(self, bug):
        """The file with the bug."""
        with open(os.path.join(ROOT, bug.file)) as file:
            source = file.read()
        for edit in edits_of(bug.script):
            done = subprocess.run(["sed", "-E", edit], input=source, capture_output=True, text=True)
            if done.stdout == source or done.returncode:
                raise Broken(f"{bug.name}: no line of {bug.file} matches {edit}{done.stderr}")
            source = done.stdout
        return source

    def tree(self, bug):
        """A folder with all that the tests read, one file of it with the bug."""
        shutil.copytree(ROOT, self.path(bug.name), ignore=lambda folder, names: [
            name for name in names if name == "__pycache__" or folder == ROOT and name != ".clang-format" and (
                name == "results" or name.startswith(("build", ".")))])
        os.symlink(os.path.join(ROOT, "results"), self.path(f"{bug.name}/results"))
        self.write(f"{bug.name}/{bug.file}", self.edited(bug))
        return self.path(bug.name)

    def cases(self, path, options, name):
        """A copy of a program in C++ with those of its test cases alone that the options name: half the time to compile."""
        with open(path) as file:
            program = re.sub(r'^TEST_CASE\("(\w+)"(?:[^\n]*}|.*?^})$', lambda case: case.group() if case[1] in options else "", file.read(),
                             flags=re.MULTILINE | re.DOTALL)
        self.write(name, program)
        return [self.path(name), "-I" + os.path.dirname(path)]

    def line(self, source, kind, knobs, tests, options, name):
        """The harness with the line of this source, or such cases of tests/contract.cu or tests/plan.cu with it."""
        if tests:
            program = [*self.cases(os.path.join(ROOT, "tests", tests + ".cu"), options, f"{name}-{tests}.cu"),
                       f'-DSDPA_SOURCE="{self.path(source)}"']
        else:
            program = [source, "-DSDPA_LINE_ONLY"]
        line = self.object(kind, knobs, program[0], name + ".o", *program[1:])
        return self.executable(kind, line, self.doctest(kind) if tests else self.harness(kind), name)

    def executable(self, kind, *parts):
        """Of two objects, and a name."""
        *objects, name = parts
        return self.path(self.compile(kind, *objects, self.engine(kind), "-o", name))

    def bugged(self, bug):
        """The command that shows the bug, without its options."""
        if bug.net == "pytest":
            return [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--rootdir=" + self.tree(bug)]
        if bug.net == "unit":
            program = self.cases(f"{self.tree(bug)}/tests/unit.cu", bug.options.split(), bug.name + "-unit.cu")
            unit = self.object("plain", "", program[0], bug.name + ".o", program[1])
            return [self.executable("plain", unit, self.doctest("plain"), bug.name + ".exe")]
        if bug.file != "sdpa.cu":
            harness = self.object(bug.kind, "", f"{self.tree(bug)}/tests/sweep.cu", bug.name + ".o")
            line = self.object(bug.kind, bug.knobs, os.path.join(ROOT, "sdpa.cu"), bug.name + "-line.o", "-DSDPA_LINE_ONLY")
            return [self.executable(bug.kind, line, harness, bug.name + ".exe")]
        self.write(bug.name + ".cu", self.edited(bug))
        return [self.line(bug.name + ".cu", bug.kind, bug.knobs, bug.tests, bug.options.split(), bug.name)]


def outcome(command, net, options):
    """"NET: evidence", or "nothing"."""
    is_cases = net == "unit" or options.startswith("@")
    words = options.split()
    if is_cases:
        words = ["--abort-after=1", "--test-case=" + ",".join(word for word in words if word[0] != "@")]
    elif net != "pytest":
        words = ["--check-only", *words]
    folder = command[-1].partition("--rootdir=")[2] if net == "pytest" else None
    try:
        done = subprocess.run([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                              timeout=120, cwd=folder and os.path.join(folder, "tests"))
    except subprocess.TimeoutExpired:
        return "no end after 120 s"
    code, out = done.returncode, done.stdout
    if net == "pytest":
        failed = re.findall("^(?:FAILED|ERROR) (.*::.*)", out, re.MULTILINE)
        return "nothing" if code == 0 else f"pytest: {failed[0]}" if code == 1 and failed else f"exit {code}: {out[-200:]}"
    address = re.search("AddressSanitizer: [a-z-]*|runtime error: .*", out)
    if "ThreadSanitizer: data race" in out:
        return "thread: data race"
    if address:
        return "address: " + address.group()
    if code == 1 and is_cases:
        return ("unit: " if net == "unit" else "check: ") + "".join(re.findall(r"CHECK\w*\(.*\) is NOT correct", out)[:1])
    backend = re.search("^simt: (.*)", out, re.MULTILINE)
    if backend:
        return "backend: " + backend.group(1)
    if code == 1:
        return "check: " + "".join(re.findall(r"(?:: FAIL [^:]*: |^\d+ problems have )(.*)", out, re.MULTILINE)[:1])
    return "nothing" if code == 0 else f"exit {code}: {out.splitlines()[:1]}"


def try_bug(builder, bug):
    """Whether it is caught, and a line that says by what."""
    try:
        found = outcome(builder.bugged(bug), bug.net, bug.options)
    except Broken as error:
        found = str(error)
    caught = found.startswith(bug.net + ": ")
    return caught, f"{bug.name:<26} {'caught' if caught else 'MISSED':<7} {found[:110]}"


def try_clean(builder, number, build, options):
    """Runs a build without a bug with each of the options; a line for each that does not pass."""
    kind, knobs, tests = build
    try:
        executable = builder.line(os.path.join(ROOT, "sdpa.cu"), kind, knobs, tests, " ".join(options).split(), f"clean{number}")
        found = {one: outcome([executable], kind, one) for one in ([" ".join(sorted(options))] if tests else sorted(options))}
    except Broken as error:
        found = {"": str(error)}
    return [f"without a bug ({kind}; {knobs}; {one}): {words}" for one, words in found.items() if words != "nothing"]


# ---- a sample ----

def git(*words):
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else ""


def touched_lines(file):
    """The numbers of the lines of functions in which the last commit or the working tree has changed something."""
    hunks = re.findall(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", git("diff", "-W", "HEAD~1", "--", file), re.MULTILINE)
    return {int(first) + i for first, count in hunks for i in range(int(count or 1))}


def sample(builder, bugs, count):
    """So many of them, drawn by the commit, and all those on touched lines."""
    of_file = {file: touched_lines(file) for file in {bug.file for bug in bugs}}

    def is_touched(bug):
        with open(os.path.join(ROOT, bug.file)) as file:
            pairs = zip(file.read().splitlines(), builder.edited(bug).splitlines())
        return any(n in of_file[bug.file] for n, (old, new) in enumerate(pairs, 1) if old != new)
    chosen = set(random.Random(git("rev-parse", "HEAD") or "no clone").sample(range(len(bugs)), min(count, len(bugs))))
    return [bug for n, bug in enumerate(bugs) if n in chosen or is_touched(bug)]


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("only", nargs="?", default="")
    parser.add_argument("--sample", type=int)
    options = parser.parse_args()
    bugs = [bug for bug in read_bugs(os.path.join(ROOT, "tests", "bugs.txt")) if re.search(options.only, bug.name)]
    if not bugs:
        print(f"bugs.py: no bug has a name like {options.only}")
        return 2
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        builder = Builder(folder)
        stale = []
        for bug in bugs:  # before anything is compiled: an edit of sdpa.cu is known to have outrun one here in a second
            try:
                builder.edited(bug)
            except Broken as error:
                stale.append(error)
        if stale:
            print(*stale, sep="\n")
            return 1
        all_bugs = len(bugs)
        if options.sample:
            bugs = sample(builder, bugs, options.sample)
        clean = defaultdict(set)
        for bug in bugs:
            if bug.net not in ("unit", "pytest"):  # whose clean runs are tests of their own
                clean[bug.kind, bug.knobs, bug.tests].add(bug.options)
        tried = [pool.submit(try_bug, builder, bug) for bug in bugs]
        passed = [pool.submit(try_clean, builder, number, *one) for number, one in enumerate(clean.items())]
        results = [future.result() for future in tried]
        failed = sum((future.result() for future in passed), [])
    for section, of_section in itertools.groupby(zip(bugs, results), lambda one: one[0].section):
        print("# " + section, *(text for _, (_, text) in of_section), sep="\n")
    print(*failed, sep="\n")
    caught = sum(was_caught for was_caught, _ in results)
    print(f"{caught} of {len(bugs)} bugs caught" + (f", a sample of {all_bugs}" if len(bugs) < all_bugs else ""))
    return 0 if caught == len(bugs) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
