"""Tests of tests/mutations.py: the mutations of each operator on a few lines, and programs with several mutants; and of the
regular expressions of bugs.txt and paths.py, which a renamed identifier can leave without a match."""
import os
import subprocess

import pytest

pytest.importorskip("tree_sitter_cpp")
import bugs
import mutations
import paths

SOURCE = """
struct Strides { long batch, head; int row; float x; };
int min(int a, int b);
int f(int count, int size, float x);
template <int N> int g(const Strides& s, int n) {
  if constexpr (N < 2) n++;
  constexpr int most = N < 3 ? 1 : 2;
  for (int i = 0; i < n; i++) n = f(i, n, 1.0f);
  if (n > most && s.row) barrier_wait(n);
  return min(n, 8) * s.head;
}
"""


def made(source):
    """{operator: {"original -> mutated"}} of the mutations of a text."""
    found = {}
    for one in mutations.mutations("x.cu", source, mutations.Declared(source)):
        assert one.function == "g" and source[one.start:one.end].split() == one.original.split()
        found.setdefault(one.operator, set()).add(f"{one.original} -> {one.mutated}")
    return found


def test_operators():
    found = made(SOURCE.replace("long batch, head", "int64_t batch, head").replace("s.head;", "s.head + s.batch;"))
    assert found == {
        "dropped call": {"barrier_wait(n) -> void()"},
        "comparison": {"i < n -> i <= n", "n > most -> n >= most"},
        "bound": {"n -> n - 1", "most -> most + 1", "n -> n + 1", "8 -> 8 + 1", "8 -> 8 - 1"},
        "swapped arguments": {"f(i, n, 1.0f) -> f(n, i, 1.0f)"},
        "dropped condition": {"n > most && s.row -> n > most", "n > most && s.row -> s.row", "n > most && s.row -> true",
                              "n > most && s.row -> false"},
        "narrow product": {"min(n, 8) * s.head -> int(min(n, 8) * s.head)"},
        "dropped term": {"min(n, 8) * s.head -> min(n, 8)", "min(n, 8) * s.head -> s.head",
                         "min(n, 8) * s.head + s.batch -> min(n, 8) * s.head", "min(n, 8) * s.head + s.batch -> s.batch"},
        "unwrapped call": {"barrier_wait(n) -> n"},
        "neighbouring member": {"s.head -> s.batch", "s.batch -> s.head"}}


def test_casts_and_constants():
    """A cast to 64 bits is narrowed. What the compiler must know is left alone."""
    source = "int64_t g(int a, int b) { return int64_t(a) * b; }"
    assert made(source)["narrow product"] == {"int64_t(a) -> int(a)"}
    source = "template <int N> int g() { static_assert(N < 1); char x[N < 2]; return h<(N < 3)>(sizeof(N < 4), 1); }"
    assert not made(source)


def test_operators_on_python():
    source = ("def g(a, b):\n    if a < len(b) and b:\n        return h(a, b)\n    return a == b\n"
              "x = 1 < 2\n")
    found = {(one.function, one.operator, one.original, one.mutated) for one in mutations.python_mutations("x.py", source)}
    assert found == {
        ("g", "dropped condition", "a < len(b) and b", "True"), ("g", "dropped condition", "a < len(b) and b", "False"),
        ("g", "dropped condition", "a < len(b) and b", "(a < len(b))"),
        ("g", "dropped condition", "a < len(b) and b", "(b)"),
        ("g", "comparison", "a < len(b)", "a <= len(b)"), ("g", "bound", "len(b)", "(len(b) + 1)"),
        ("g", "swapped arguments", "h(a, b)", "h(b, a)"), ("g", "comparison", "a == b", "a != b")}


PROGRAM = """
#include <cstdio>
constexpr int twice(int x) { return x < 3 ? 2 * x : 0; }
static int sum(int n) {
  int all = 0;
  for (int i = 0; i < n; i++) all += i;
  return all;
}
int main() {
  static_assert(twice(2) == 4);
  int two = 2;
  std::printf("%d %d", sum(3), twice(two));
}
"""


def run(folder, text, count, **environment):
    """The output of a program with switches, and the mutants that it reaches."""
    (folder / "mutant.h").write_text(mutations.HEADER.replace("COUNT", str(count)), encoding="utf-8")
    (folder / "program.cpp").write_text(text, encoding="utf-8")
    subprocess.run([os.environ.get("CXX", "c++"), "-std=c++17", "-include", "mutant.h", "program.cpp", "-o", "program"],
                   cwd=folder, check=True)
    outputs = [subprocess.run(["./program"], cwd=folder, stdout=subprocess.PIPE, text=True, check=True,
                              env={**os.environ, "MUTANT": str(n), "MUTANTS_REACHED": "reached"}).stdout
               for n in range(-1, count)]
    return outputs, (folder / "reached").read_text(encoding="utf-8").split()


def test_mutants_of_one_program(tmp_path):
    found = [one for one in mutations.mutations("x.cu", PROGRAM, mutations.Declared(PROGRAM))
             if one.operator == "comparison"]
    assert [one.mutated for one in found] == ["x <= 3", "i <= n"]
    edited = [PROGRAM.replace("all += i;", "all += i; all++;"), PROGRAM.replace("int all = 0", "int all = 5"),
              PROGRAM.replace("2 * x", "3 * x")]  # more statements, a declaration, a part of a constant expression
    switches = [mutations.Switch(one.start, one.end, n, one.mutated) for n, one in enumerate(found)]
    for text in edited:
        switches += mutations.switches_of(PROGRAM, text, 2 + edited.index(text))
    outputs, reached = run(tmp_path, mutations.schemata(PROGRAM, switches)[0], 5)
    assert outputs == ["3 4", "3 4", "6 4", "4 4", "8 4", "3 6"]
    assert reached == ["0", "1", "2", "3", "4"]


def test_edits_that_cannot_be_switched():
    assert mutations.switches_of(PROGRAM, PROGRAM.replace("<cstdio>", "<stdio.h>"), 0) is None
    struct = "struct S { int x; };\nint g() { return 1; }"
    assert mutations.switches_of(struct, struct.replace("int x", "long x"), 0) is None


def test_named_bugs_and_paths_match_the_sources():
    every = list(bugs.read_bugs(os.path.join(bugs.ROOT, "tests/bugs.txt")))
    stale = [f"{bug.name}: {edit}" for bug, edit in zip(every, map(bugs.try_edit, every)) if isinstance(edit, bugs.Broken)]
    stale += paths.without_line(bugs.read("sdpa.cu"))
    assert len(every) > 300 and not stale, "\n".join(stale)
