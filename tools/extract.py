#!/usr/bin/env python3
"""usage: ./run_all.sh extract NAME [--namespace N] > my_kernel.cu
The kernel of one line of configs.txt as a file that compiles alone, knows no knob and has the machine code of the line.
  NAME           a line of configs.txt
  --namespace N  the namespace of its functions (default: the line's name)
Sections of sdpa.cu for other families and knobs stay behind. Conditions that the line's knobs decide are decided. What
sdpa_forward() and sdpa_workspace_bytes() do not reach goes, with its comments. HEAD_DIM, BLOCK_M, BLOCK_N, NUM_WARPS,
STAGES and VEC_WIDTH decide nothing: they are constants of one struct and can be changed there.
environment: SDPA_CONFIGS, CXX
"""
import argparse
import itertools
import os
import re
import sys
import tempfile
import textwrap

import builds
import minimal
from builds import Refused

SIZES = {"HEAD_DIM", "BLOCK_M", "BLOCK_N", "NUM_WARPS", "STAGES", "VEC_WIDTH"}


# ---- sections and numbers ----

class Knob:
    """A row of SDPA_KNOBS."""

    def __init__(self, name, member, values):
        self.name, self.member, self.values = name, member, values.split()
        self.type = "bool" if values == "0 1" else "int"

    def number(self, value):
        """A value's number: its own, or a word's place."""
        return int(value) if value.isdigit() else self.values.index(value)

    def text(self, number):
        """A number as C++ has it, with the word that it stands for."""
        if self.type == "bool":
            return ("false;", "true;")[number]
        word = f"  // {self.values[number]} of {' '.join(self.values)}" if self.values[0].isalpha() else ""
        return f"{number};{word}"


PRINT_ROWS = r"""
#define SDPA_PRINT(name, fallback, member, values, families, meaning) printf(" %d", int(B::member));
template <int N> void print() { using B = BuildOf<N>; printf("%d", N); SDPA_KNOBS(SDPA_PRINT) puts(""); }
template <int N> void print_from() {
  if constexpr (N >= 0 && N < TUNED_TILES.count) print<N>(), print_from<next_tile(N + 1)>();
}
int main() { print<-1>(), print_from<Build::use_tuned ? next_tile(0) : -1>(); }
"""


def rows_of(tree, knobs, words):
    """{row: {knob: number}} of the builds of a line, as the host's compiler says; -1 is the typed one."""
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "rows")
        command = [os.environ.get("CXX", "g++"), "-std=c++17", "-w", *builds.definitions(words), "-x", "c++", "-"]
        done = builds.run([*command, "-o", program], input="#include <cstdio>\n" + tree.refusals() + PRINT_ROWS)
        if done.returncode:
            raise Refused(builds.assertion_words(done.stderr) or builds.compiler_words(done.stderr))
        printed = builds.run([program]).stdout.splitlines()
    return {row: dict(zip(knobs, numbers)) for row, *numbers in (map(int, line.split()) for line in printed)}


def holds(condition, knobs, rows):
    """Whether a section's condition holds for a build: parts joined by " and ", each a list of which one has to be.
    SPLIT_KV > 1 does always: kernels ask for it where they name the section's functions."""
    def one_of(word, row):
        name, _, rest = word.partition(" ")
        if name not in knobs:
            return name == next((family for family, knob in builds.FAMILIES.items() if row.get(knob)), "scalar")
        return rest.startswith(">") or row[name] == knobs[name].number(rest[2:] or "1")
    parts = [part.split(", ") for part in condition.split(" and ")]
    return any(all(any(one_of(word, row) for word in part) for part in parts) for row in rows)


def numbers(text, knobs, rows):
    """The line's numbers as constants. Of those that the rows of a table have, some are a row's."""
    typed, tiles = rows[-1], [rows[row] for row in rows if row >= 0]
    found = {knob: {tile[knob.name] for tile in tiles} or {typed[knob.name]} for knob in knobs.values()}
    of_row = [knob for knob in found if len(found[knob]) > 1 or
              found[knob] != {typed[knob.name]} and f"Build::{knob.member}" in text]
    out = []
    if tiles:
        fields = [knob for knob in found if knob in of_row or re.search(rf"\.{knob.member}\b", text)]
        out += ["struct Config {",
                *(f"  {knob.type} {knob.member} = {knob.text(typed[knob.name])}" for knob in fields), "};",
                "// -1: the line's numbers alone; else a row of the table of tiles.",
                "template <int ROW> constexpr Config config_of();",
                "template <> constexpr Config config_of<-1>() { return {}; }"]
    out += ["// The line's numbers. Sizes may be changed, within what sdpa.cu says; the others decided what is here.",
            "template <int ROW> struct Knobs {", *["  static constexpr Config config = config_of<ROW>();"][:len(tiles)]]
    for knob in sorted(found, key=lambda knob: knob.name not in SIZES):
        value = f"config.{knob.member};" if knob in of_row else knob.text(*found[knob])
        out.append(f"  static constexpr {knob.type} {knob.member} = {value}")
    return [*out, "};", ""]


def sections(source, knobs, rows, namespace):
    """The marked region without the sections that the line has no use for, and with its numbers."""
    chosen = [rows[row] for row in rows if row >= 0] or [rows[-1]]
    text = source.split("// ==== COPY FROM HERE")[1].split("// ==== COPY TO HERE")[0].split("\n", 1)[1]
    text = re.sub(r"#ifdef SDPA_SIMT\n.*?#else\n(.*?)#endif  // SDPA_SIMT\n", r"\1", text, flags=re.DOTALL)
    text = re.sub(r"#ifndef SDPA_NAMESPACE.*?#endif\n|#pragma GCC .*?\n", "", text, flags=re.DOTALL)
    text = re.sub(r"#if (USE_\w+)\n(.*?)#endif  // \1\n", lambda m: m[2] * rows[-1][m[1]], text, flags=re.DOTALL)
    text = re.sub(r"^ *// clang-format o.*\n", "", text.replace("SDPA_NAMESPACE", namespace), flags=re.MULTILINE)
    out, keep, at = [], True, 0
    for line in text.split("\n"):
        if line.startswith(minimal.BANNERS):
            banner = re.fullmatch(r"(// ---- .*) \(((?:typed|scalar|wmma|mma|wgmma|[A-Z_0-9]+)\b[^()]*)\) ----", line)
            keep = not banner or holds(banner[2], knobs, chosen)
            line = banner[1] + " ----" if banner else line
            if "what follows from the knobs" in line:
                at = len(out)
            if "tiles that the typed knobs leave" in line and rows[-1]["USE_TUNED"]:
                out += ["constexpr bool tile_fits(const TunedTile&) { return true; }  // the others are left out", ""]
        if keep or line.startswith("}  // namespace"):
            out.append(line)
    return "\n".join(out[:at] + numbers("\n".join(out), knobs, rows) + out[at:])


def without_rows(text, rows):
    """The text without the rows of the table of tiles that do not fit."""
    number = itertools.count()
    return re.sub(r"^    tile\(.*\n", lambda m: m[0] * (next(number) in rows), text, flags=re.MULTILINE)


def extract(name, namespace=""):
    """The file."""
    tree = builds.Tree()
    lines, trouble = tree.read_configs()
    if name not in lines and trouble:
        raise Refused(trouble.replace("configs.txt", os.path.basename(os.environ.get("SDPA_CONFIGS") or "configs.txt")))
    if name not in lines:
        hint = builds.nearest(name, lines) or "./run_all.sh list has them all"
        raise Refused(f"{name}: no line of configs.txt has that name; {hint}")
    line, source = lines[name], tree.read("sdpa.cu")
    if line.expect == "FAIL":
        print(f"extract: {name} is marked expect=FAIL: it is there to be found wrong", file=sys.stderr)
    knobs = {knob: Knob(knob, member, values) for knob, member, values in re.findall(
        r'^  X\(([A-Z][A-Z_0-9]+), \w*, (\w+), "([^"\n]*)"', source, re.MULTILINE)}
    try:
        rows = rows_of(tree, knobs, line.words)
    except Refused as error:
        raise Refused(f"{name}: {error}") from None
    sizes = {knobs[knob].member for knob in SIZES}
    text = minimal.minimal(sections(source, knobs, rows, namespace or name), sizes)
    if rows[-1]["USE_TUNED"]:
        text = minimal.minimal(without_rows(text, rows), sizes)
    arch = line.arch or "80"
    return "\n".join([
        textwrap.fill(f"// sdpa, line {name}: {' '.join(line.knobs) or 'all knobs as they are by default'}", 120,
                      subsequent_indent="//   "),
        f"// Made by: ./run_all.sh extract {name}{' --namespace ' * bool(namespace) + namespace}",
        f"// Compile: nvcc -O3 -std=c++17 -gencode arch=compute_{arch},code=sm_{arch} -c my_kernel.cu",
        f"// Call:    {namespace or name}::sdpa_forward(params, stream), below it or in a file that includes it", "",
        text.strip(), *("//\n" + textwrap.fill(part, 120, initial_indent="// ", subsequent_indent="// ")
                        for part in tree.read("LICENSE").strip().replace("\n\n", ". ", 1).split("\n\n"))])


def main():
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--namespace", default="")
    parser.add_argument("names", nargs="*")
    try:
        options, rest = parser.parse_known_args()
    except argparse.ArgumentError:
        raise Refused("--namespace: its value is missing") from None
    if options.help:
        print(__doc__.strip())
        return
    if rest:
        raise Refused(f"{rest[0]}: no such option")
    if len(options.names) != 1:
        raise Refused(f"one line, not {' and '.join(options.names)}" if options.names else "which line?")
    if options.namespace and not re.fullmatch(r"[A-Za-z_]\w*", options.namespace):
        raise Refused(f"--namespace {options.namespace}: want a name of C++")
    print(extract(options.names[0], options.namespace))


if __name__ == "__main__":
    try:
        main()
    except Refused as error:
        print(f"extract: {error}", file=sys.stderr)
        sys.exit(error.code)
