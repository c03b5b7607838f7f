"""usage: ./run_all.sh extract NAME [KNOB=VALUE ...] [--namespace WORD] [--main] > my_kernel.cu
Prints the kernel of a line of configs.txt as a self-contained file without knobs.
  NAME              a line of configs.txt
  KNOB=VALUE        overrides a knob of the line, as in BLOCK_N=32 or SCORE_MOD='s - x0[h] * real(q - k)'
  --namespace WORD  the namespace of its functions (default: the line's name)
  --main            adds a program that checks a problem with a naive kernel and times it
Evaluates all conditions on knobs and removes the code that sdpa_forward() and the other public functions do not reach.
Comments lose what they say about absent code. A line without USE_TUNED has one build: its template parameter is removed,
definitions are moved before their uses, and small functions with one call are inlined. clang-format formats the result
if it is installed.
environment: SDPA_CONFIGS, CXX
"""
import itertools
import os
import re
import tempfile
import textwrap

import builds
import cli
import concrete
import minimal
from cli import Refused, say
from comments import Comments, Setting

# Words of comments about an option. They are removed if the option is off.
OPTIONS = {"USE_SINKS": "sinks?", "USE_PAGES": "[Pp]ages?", "USE_BIAS": "(?<!exponent )bias",
           "USE_SOFTCAP": "[Ss]oftcap|hook_scale|Caps"}
OF_8_BITS = "8-bit|descale"
# The sizes that may be changed in an extract without wgmma and without a table of tiles.
OPEN_SIZES = ["HEAD_DIM", "BLOCK_M", "BLOCK_N", "VEC_WIDTH"]
SIZES = {"HEAD_DIM", "BLOCK_M", "BLOCK_N", "NUM_WARPS", "STAGES", "VEC_WIDTH"}


# ---- sections and numbers ----

def type_of(knob):
    return "bool" if knob.values == "0 1" else "int"


def as_code(knob, number):
    """The value of a knob as C++ code, followed by a comment with the word that it stands for."""
    if type_of(knob) == "bool":
        return ("false;", "true;")[number]
    words = knob.values.split()
    return f"{number};  // {words[number]} of {knob.values}" if words[0].isalpha() else f"{number};"


PRINT_ROWS = r"""
#define SDPA_PRINT(name, fallback, member, values, families, meaning) printf(" %d", int(B::member));
template <int N> void print() { using B = BuildOf<N>; printf("%d", N); SDPA_KNOBS(SDPA_PRINT) PRINT_DERIVED puts(""); }
template <int N> void print_from() {
  if constexpr (N >= 0 && N < tile_count) print<N>(), print_from<next_tile(N + 1)>();
}
int main() { print<-1>(), print_from<Defines::use_tuned ? next_tile(0) : -1>(); }
"""


def derived(source):
    """{member: type} of the constants that a build derives from its knobs."""
    own = re.search(r"^template <int ROW> struct BuildOf .*?^\};", source, re.MULTILINE | re.DOTALL)[0]
    lists = re.findall(r"static constexpr (bool|int|DType|KernelKind) ([^;]*);", re.sub("//.*", "", own))
    return {name: kind for kind, members in lists for name in re.findall(r"(\w+)\s+=\s", members)}


def rows_of(tree, name, knobs, words):
    """{row: {knob or derived member: number}} of the builds of a line, computed by the host compiler. Row -1 is the build
    with the knobs as typed; the others are rows of the table of tiles."""
    more = derived(tree.read("sdpa.cu"))
    knobs = [*knobs, *more]
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/rows"
        printed = PRINT_ROWS.replace("PRINT_DERIVED", "".join(f'printf(" %d", int(B::{member})); ' for member in more))
        done = builds.run([builds.CXX, "-std=c++17", "-w", *builds.definitions(words), "-x", "c++", "-", "-o", program],
                          input="#include <cstdio>\n" + tree.refusals() + printed)
        if done.returncode:
            raise Refused(f"{name}: {builds.compiler_words(done.stderr)}")
        printed = builds.run([program]).stdout.splitlines()
    return {row: dict(zip(knobs, numbers)) for row, *numbers in (map(int, line.split()) for line in printed)}


def holds(condition, knobs, rows):
    """Evaluates the condition of a section: alternatives separated by commas, joined by " and ". "1..3" is a range.
    SPLIT_KV > 1 is always true; the section's functions are removed later if no kernel calls them."""
    def one_of(word, row):
        name, _, rest = word.partition(" ")
        if name not in knobs:
            families = [next((family for family, knob in builds.FAMILIES.items() if row.get(knob)), "scalar")]
            return name in families + ["mma"] * row.get("BACKWARD", 0)  # all backward kernels copy tiles like mma
        low, dots, high = (rest[2:] or "1").partition("..")  # numbers, or a word
        if rest.startswith(">"):
            return True
        if dots:
            return int(low) <= row[name] <= int(high)
        return row[name] == (int(low) if low.isdigit() else knobs[name].values.split().index(low))
    parts = [part.split(", ") for part in condition.split(" and ")]
    return any(all(any(one_of(word, row) for word in part) for part in parts) for row in rows)


def numbers(text, knobs, rows):
    """Declarations of the line's knobs as constants. With a table of tiles, some are functions of its row."""
    typed, tiles = rows[-1], [rows[row] for row in rows if row >= 0]
    found = {name: {tile[name] for tile in tiles} or {typed[name]} for name in knobs}
    of_row = [name for name in found if len(found[name]) > 1 or
              found[name] != {typed[name]} and f"Defines::{knobs[name].member}" in text]
    out = []
    if tiles:
        out += ["struct Config {",
                *(f"  {type_of(knob)} {knob.member} = {as_code(knob, typed[name])}" for name, knob in knobs.items()
                  if name in of_row or re.search(rf"\.{knob.member}\b", text)), "};",
                "// -1: the line's numbers alone; else a row of the table of tiles.",
                "template <int ROW> constexpr Config config_of();",
                "template <> constexpr Config config_of<-1>() { return {}; }"]
    out += ["// The line's numbers. Sizes may be changed, within what sdpa.cu says; the others decided what is here.",
            "template <int ROW> struct Knobs {", *["  static constexpr Config config = config_of<ROW>();"][:len(tiles)]]
    for name in sorted(found, key=lambda name: name not in SIZES):
        value = f"config.{knobs[name].member};" if name in of_row else as_code(knobs[name], *found[name])
        out.append(f"  static constexpr {type_of(knobs[name])} {knobs[name].member} = {value}")
    return [*out, "};", ""]


def instructions(source):
    """The names of the functions and types that the CPU backend replaces."""
    return {name for part in re.findall(r"^#(?:if|else)[^\n]*\n((?:(?!^#if).)*?)^#endif  // SDPA_SIMT$", source,
                                        re.MULTILINE | re.DOTALL)
            for name in re.findall(r"\w+(?=(?:<\w+>)?\()|(?<=using )\w+(?= =)|(?<=constexpr int )\w+",
                                   re.sub(r"//.*", "", part))}


NAMED_BY_EXPRESSIONS = {"tanh_exact", "tanh_approx", "ld_global_nc", "is_read_by_head"}
EXPRESSIONS = re.compile(r"^namespace expression \{.*?^\}  // namespace expression\n", re.MULTILINE | re.DOTALL)


def with_mods(source, mods):
    """Expands the macros SCORE_MOD and MASK_MOD and the lists of their knobs."""
    knobs = {}
    for macro in ("SDPA_LOGIT_KNOBS", "SDPA_MASK_KNOBS"):
        rows = re.search(rf"^#define {macro}\(X\) \\\n((?:  X\(.*\n)+)", source, re.MULTILINE)[1]
        members = dict(re.findall(r"X\((\w+), \w+, (\w+)", rows))
        source = source.replace(f"{macro}(SDPA_IS_ON) false", " || ".join(f"K::{member} != 0" for member in members.values()))
        source = source.replace(f"{macro}(SDPA_COUNT_ON) 0", " + ".join(f"(K::{member} != 0)" for member in members.values()))
        knobs[macro] = ", ".join(members)
    # Sections for SCORE_MOD or MASK_MOD serve all features of the list.
    both = ", ".join(knobs.values())
    source = re.sub(r"^(// ---- .*)\bSCORE_MOD, MASK_MOD\) ----$", rf"\g<1>{both}) ----", source, flags=re.MULTILINE)
    source = re.sub(r"^(// ---- .*, )MASK_MOD\) ----$", rf"\g<1>{knobs['SDPA_MASK_KNOBS']}) ----", source, flags=re.MULTILINE)
    for knob, expression in mods.items():
        source = source.replace(f"  return {knob};", f"  return {expression};")
        source = re.sub(rf"\b{knob}_text\b(?=[,)])", lambda _: f'"{expression}"', source)
    return source


def without_expressions(text):
    """Replaces the namespace of the expressions by a function that uses the same names, so that they stay reachable. Returns
    the text and the namespace, which is inserted unchanged at the end."""
    first, *more = EXPRESSIONS.findall(text) or [""]
    if not first:
        return text, ""
    members = "".join(f", p.{name}" for name in sorted({*re.findall(r"p\.(\w+)", first)}))
    constants = {*re.findall(r"\b(?:ln2|log2e)\b", "".join([first, *more]))}
    calls = ", ".join([*(f"{name}(0)" for name in sorted(NAMED_BY_EXPRESSIONS)), *sorted(constants)])
    for block in more:
        text = text.replace(block, "")
    return text.replace(first, f"__device__ void expression(const SdpaParams& p) {{ use({calls}{members}); }}\n"), "\n".join([first, *more])


KNOBS, TYPED_TILES = "// ---- what follows from the knobs", "// ---- tiles that agree with the knobs as set with -D"


def with_constants(line, own, rows, members):
    """A line of a section with the members that are equal in its builds `own`, but not in all rows, as constants. Sizes
    keep their names; their comparisons with numbers are evaluated. members: {member: (name in the rows, enumerators)}."""
    def compared(match):
        values = {minimal.OPERATORS[match[2]](row[match[1]], int(match[3])) for row in own} if match[1] in rows[0] else ()
        return str(values.pop()).lower() if len(values) == 1 else match[0]
    line = re.sub(r"(?<![-*+/%] )\bB::(\w+) ([<>]=?|[!=]=) (\d+)\b(?! [-*+/%])", compared, line)
    if len(own) == len(rows):
        return line

    def constant(match):
        name, enumerators = members.get(match[1], (None, None))
        values = {row[name] for row in own} if name else ()
        if len(values) != 1 or len({row[name] for row in rows}) == 1:
            return match[0]
        value = values.pop()
        return enumerators[value] if enumerators else str(value)
    return re.sub(r"\bB::(\w+)\b", constant, line)


def members_of_rows(source, knobs):
    """The argument `members` of with_constants()."""
    enums = {kind: [f"{kind}::{word}" for word in re.findall(r"\w+", words)] for kind, words in re.findall(
        r"^enum class (DType|KernelKind) \{([^}]*)\}", re.sub("//.*", "", source), re.MULTILINE)} | {"bool": ("false", "true")}
    found = {member: (member, enums[kind]) for member, kind in derived(source).items() if kind != "int"}
    return found | {knob.member: (name, enums["bool"] if type_of(knob) == "bool" else None)
                    for name, knob in knobs.items() if name not in SIZES}


def sections(source, knobs, rows, namespace):
    """The marked region of sdpa.cu without the sections of other lines, with the knobs as constants."""
    chosen = [rows[row] for row in rows if row >= 0] or [rows[-1]]
    if rows[-1]["BACKWARD"] and rows[-1]["USE_WGMMA"]:
        chosen = [{**rows[-1], "USE_CP_ASYNC": 1}]  # its tiles are copied by cp.async, unless it has producer warps
    text = source.split("// ==== COPY FROM HERE")[1].split("// ==== COPY TO HERE")[0].split("\n", 1)[1]
    assert KNOBS in text and TYPED_TILES in text, "extract.py looks for the titles of these sections"
    text = re.sub(r"#if(?:def SDPA_SIMT\n.*?#else|ndef SDPA_SIMT)\n(.*?)#endif  // SDPA_SIMT\n", r"\1", text,
                  flags=re.DOTALL)
    text = re.sub(r"#ifndef SDPA_NAMESPACE.*?#endif\n|#pragma GCC .*?\n", "", text, flags=re.DOTALL)
    text = re.sub(r"#if (USE_\w+)\n(.*?)#endif  // \1\n", lambda m: m[2] * rows[-1][m[1]], text, flags=re.DOTALL)
    text = re.sub(r"^ *// clang-format o.*\n", "", text.replace("SDPA_NAMESPACE", namespace), flags=re.MULTILINE)
    out, keep, at, has_condition, members = [], True, 0, False, members_of_rows(source, knobs)
    for line in text.split("\n"):
        if line.startswith(minimal.BANNERS):
            banner = re.fullmatch(r"(// ---- .*) \(((?:typed|scalar|wmma|mma|wgmma|[A-Z_0-9]+)\b[^()]*)\) ----", line)
            own = [row for row in chosen if not banner or holds(banner[2], knobs, [row])]
            keep, has_condition = bool(own), bool(banner)
            line = banner[1] + " ----" if banner else line
            if line.startswith(KNOBS):
                at = len(out)
            if banner and banner[1] == TYPED_TILES and rows[-1]["USE_TUNED"]:
                out += ["constexpr bool tile_fits(const TunedTile&) { return true; }  // the others are left out", ""]
        if keep or line == "}  // namespace":
            out.append(with_constants(line, own, chosen, members) if len(chosen) > 1 and has_condition else line)
    return "\n".join(out[:at] + numbers("\n".join(out), knobs, rows) + out[at:])


def without_typed_config(text):
    """Removes the Config of row -1 if no constant that depends on it is used."""
    structs = re.findall(r"^template <int ROW> struct (?:Knobs|BuildOf)\b.*?^\};", text, re.MULTILINE | re.DOTALL)
    inits = re.findall(r"(\w+) =\s+([^;,]*)", re.sub("//.*", "", "\n".join(structs)))
    of_config, more = set(), {"config"}
    while more:
        of_config |= more
        more = {name for name, init in inits if of_config & {*re.findall(r"\w+", init)}} - of_config
    if {*re.findall(r"\b(?:Defines|BuildOf<-1>)::(\w+)", text)} & of_config:
        return text
    text = re.sub(r"^template <> constexpr Config config_of<-1>\(\) .*\n", "", text, flags=re.MULTILINE)
    return text.replace("// -1: the line's numbers alone; else a row of the table of tiles.", "// A row of the table of tiles.")


def setting(knob, values):
    """The member of a knob, its value as text if all builds have the same, and whether that is not the default."""
    words = knob.values.split()
    value = str(*values) if len(values) == 1 else None
    if value and words[0][0].isalpha():
        value = words[int(value)]
    return Setting(knob.member, value, value != knob.default)


def has_stages(row):
    """True if a build may have several stages: its copies are asynchronous."""
    return any(row[knob] for knob in ("USE_CP_ASYNC", "USE_WGMMA", "USE_WARP_SPECIALIZATION"))


def parted(text):
    """The includes, and the rest."""
    return re.split(r"(?=^// Unrolls the following loop)", text, maxsplit=1, flags=re.MULTILINE)


def without(pattern, text):
    """text without what matches the pattern, which must occur."""
    text, found = re.subn(pattern, "", text, flags=re.MULTILINE)
    assert found, f"nothing matches {pattern}"
    return text


def width_of_v(row):
    return row["HEAD_DIM_V"] or row["HEAD_DIM"]


# Parts of sdpa_backward.cu for builds with a bias, apart from its sections.
BIAS_OF_GRADIENTS = (
    r"^  (?:void\* dBias|Strides d_bias|int dBias_sums_keys)\b.*\n(?: +//.*\n)*", r'^ +\{"dBias", .*\n',
    r"^  status = check_bias_gradient\(d\);\n.*\n", r"^// USE_BIAS: dBias has (?:.*\n)*?.* is ignored\.\n",
    r"^// USE_BIAS: adds the bias from global memory.*\nstruct BiasFromMemory \{\n(?:.*\n)*?\};\n", r" It adds the bias by `reader`\.",
    r"^  template <class Reader = BiasFromMemory>\n|^  const Reader& reader;\n|^      reader\.add\(S, tile\);\n",
    r", class Reader\b|, Reader(?=>)|, reader(?=\})|, const Reader& reader = \{\}", r"^.* status = launch_bias<B>.*\n",
    r"^(?:  // .*\n)*  const auto bias_of_next = \[&\] \{\n(?:    .*\n)*  \};\n")


def with_backward(source, backward, row, words):
    """sdpa.cu continued by sdpa_backward.cu, without the knobs and refusals of the latter. If all tensors have one head size,
    its types are those of the build."""
    own = backward.split("namespace SDPA_NAMESPACE {\n", 1)[1].split("}  // namespace SDPA_NAMESPACE\n")[0]
    own = own[own.index("// ==== 2 PROBLEM"):]
    own = without(r"(?s)^// ==== 6 REFUSALS.*?(?=^}  // namespace\n)", own)
    own = re.sub(r"\bvalue_of\((\w+)_text\) == 1", lambda m: str(f"{m[1]}=1" in words).lower(), own)
    for part in BIAS_OF_GRADIENTS:  # there is none
        own = without(part, own)
    # A kernel that is not launched must not be named, and sizes are constants of which nothing is known.
    registers = row["BLOCK_M"] // row["NUM_WARPS"] * ((row["HEAD_DIM"] + width_of_v(row)) // 2 + row["BLOCK_N"]) // 16
    own = without(r"^template <class B> constexpr bool has_room_for_both = .*\n", own)
    own = own.replace("has_room_for_both<B>", str(registers <= 192).lower())
    if row["HEAD_DIM"] == width_of_v(row):
        own = without(r"(?s)^// The build B with head dimension D.*?(?=^// The rows of one head)", own)
        own = re.sub(r"\b(?:OfQK|OfV)<B>", "B", own).replace("// B is OfQK or OfV. In", "// In")
    own = re.sub(r"^(// ==== )\d (\w+)", lambda m: f"{m[1]}9 {m[2]}", own, flags=re.MULTILINE)
    return source.replace("}  // namespace SDPA_NAMESPACE\n", own + "\n}  // namespace SDPA_NAMESPACE\n", 1)


def extract(name, namespace="", given=(), is_program=False):
    """The text of an extract. given: knobs that override those of the line. is_program: adds main()."""
    tree = builds.Tree()
    line, source, knobs = builds.config_line(tree, name, name), tree.read("sdpa.cu"), tree.knob_rows()
    own_knobs = builds.Line(tree, name).knob_rows()
    if "expect=FAIL" in line.words:
        say(f"extract: {name} is marked expect=FAIL: its results are wrong on purpose")
    for knob in [word.split("=")[0] for word in given]:
        if knob not in own_knobs:
            raise Refused(builds.no_knob(knob, own_knobs))
    for word in given:
        trouble = word.split("=")[0] in builds.EXPRESSIONS and tree.expression_trouble(word)
        if trouble:
            raise Refused(trouble)
    typed = [word for word in line.words if word.split("=")[0] not in [one.split("=")[0] for one in given]] + [*given]
    mods = {knob: next((word[len(knob) + 1:] for word in reversed(typed) if word.startswith(f"{knob}=")), "NONE")
            for knob in builds.EXPRESSIONS}
    rows, space = rows_of(tree, name, knobs, typed), namespace or name
    has_two_widths = builds.is_backward(line) and rows[-1]["HEAD_DIM"] != width_of_v(rows[-1])
    if builds.is_backward(line):
        if trouble := tree.refusal(typed):
            raise Refused(f"{name}: {trouble}")
        if rows[-1]["USE_BIAS"]:
            raise Refused(f"{name}: it cannot extract the gradient of a bias; include sdpa_backward.cu")
        source = with_backward(source, tree.read("sdpa_backward.cu"), rows[-1], typed)
    for row in rows.values():
        row["BACKWARD"] = int(builds.is_backward(line))
    sizes = {knobs[knob].member for knob in SIZES - set(() if has_stages(rows[-1]) else ["STAGES"])}
    builds_of = [rows[row] for row in rows if row >= 0] or [rows[-1]]
    own = sections(with_mods(source, mods), knobs, rows, space)
    own, expressions = without_expressions(own)
    own = re.sub(r"; type SPLIT_CTAS=0 or pass most_keys| or drop USE_WGMMA", "", own)  # parts of error messages that mention knobs
    if not rows[-1]["USE_LENGTHS"]:  # batch_invariant affects only the choice of tiles
        own = re.sub(r"^.*\bbatch_invariant = 0;.*\n", "", own, flags=re.MULTILINE)
        own = re.sub(r",\s*(?:\{\"batch_invariant\".*?\}|p\.batch_invariant)(?=\};)", "", own)
        own = re.sub(r"\b(?:a\.)?p\.batch_invariant", "false", own)
    text = concrete.without_options(minimal.minimal(own, sizes))
    has_table = rows[-1]["USE_TUNED"] or has_two_widths
    open_sizes = [] if has_table or rows[-1]["USE_WGMMA"] or rows[-1]["BACKWARD"] else OPEN_SIZES
    if has_table:  # removes rows of the table of tiles that do not fit
        number = itertools.count()
        text = re.sub(r"^    tile\(.*\n", lambda m: m[0] * (next(number) in rows), text, flags=re.MULTILINE)
        text = concrete.shortest(text, instructions(source) | NAMED_BY_EXPRESSIONS, sizes)
        text = re.sub(r"(?:template <[^\n]*>\s*)?__global__ void __launch_bounds__\((?:[^()]|\([^()]*\))*\)", bounds_of_defines, text)
        if "SDPA_WGMMA_SHAPES" in text:
            text = concrete.wgmma_shapes(text, builds_of)
        head, tail = parted(text)
        body = without_typed_config("\n".join(concrete.chapters(tail)))
    else:
        if "wgmma_ss" in text:  # with a table of tiles, the code for all shapes is shorter
            text = concrete.wgmma(text, builds_of)
        head, tail = parted(text)
        body = concrete.without_uncalled_shapes(concrete.concrete(
            tail, instructions(source) | NAMED_BY_EXPRESSIONS, open_sizes))
    text = f"namespace {space} {{\n\n{body}\n}}  // namespace {space}\n"
    if expressions:
        text = re.sub(r"^.*\bvoid expression\((?:.*\n)*?.*}\n", lambda _: expressions, text, flags=re.MULTILINE)
    unused = ["a tile uses only some constants of its row"] * rows[-1]["USE_TUNED"] + [
        "an expression uses only some of these functions"] * ("namespace expression {" in text)
    if unused:
        text = f"#pragma nv_diag_suppress 177  // {'; '.join(unused)}\n\n{text}\n#pragma nv_diag_default 177\n"
    text = f"{head}\n{text}"
    settings = {name: setting(knob, {row[name] for row in builds_of}) for name, knob in knobs.items()}
    for knob in own_knobs.keys() - knobs.keys():  # those of sdpa_backward.cu
        value = next((word.partition("=")[2] for word in reversed(typed) if word.startswith(f"{knob}=")), own_knobs[knob].default)
        settings[knob] = Setting(own_knobs[knob].member, value, value != own_knobs[knob].default)
    text = Comments(text, source, settings,
                    [words for name, words in OPTIONS.items() if not any(row[name] for row in builds_of)] +
                    [OF_8_BITS] * (not any(row["DTYPE"] > 1 or row["KV_DTYPE"] for row in builds_of))).cleaned(text)
    arch = builds.Line(tree, name).knob("arch", "80")
    code = "compute" if is_program and arch.isdigit() else "sm"
    return formatted("\n".join([
        f"// Compile: nvcc -O3 -std=c++17 -gencode arch=compute_{arch},code={code}_{arch} "
        f"{'-o my_kernel' if is_program else '-c'} my_kernel.cu",
        f"// Call:    {space}::sdpa_forward(params, stream)" + f", then {space}::sdpa_backward(params, stream)" * rows[-1]["BACKWARD"] +
        ", below it or in a file that includes it",
        textwrap.fill(f"// From sdpa, line {name}: " + (
            " ".join(re.sub(r"^(SCORE_MOD|MASK_MOD)=(.*)$", r"\1='\2'", word) for word in typed if "=" in word) or
            "all knobs as they are by default"), minimal.WIDTH, subsequent_indent="//   "),
        *[f"// {', '.join(open_sizes)} may be changed to other values that sdpa.cu takes with these knobs."] * bool(open_sizes),
        "// SPDX-License-Identifier: MIT. " + tree.read("LICENSE").strip().split("\n\n")[1].replace("\n", " "), "",
        text.strip(), program(space, builds_of[0], "sdpa_workspace_bytes" in text) * is_program]))


def bounds_of_defines(match):
    """The launch bounds of a kernel, which concrete.py does not parse. A kernel that is no template on B has those of Defines."""
    return match[0] if "class B" in match[0] else match[0].replace("B::", "Defines::")


def program(space, row, has_workspace=True):
    """The program that --main adds: extract_main.cu or extract_backward_main.cu with the types and sizes of a build."""
    is_8bit, is_u8, mixes_types = row["DTYPE"] >= 2, row["DTYPE"] == 3, row["KV_DTYPE"] > 0  # one row of Q has as many bytes as two of K
    D, Dv = row["HEAD_DIM"], width_of_v(row)
    words = {"SPACE": space, "D_QK": D, "DV": Dv, "MOST": max(D, Dv) * (1 + mixes_types),
             "QUERIES": ("((__half*)qkv[0])", "((__nv_bfloat16*)qkv[0])")[row["DTYPE"]] if mixes_types else "qkv[0]",
             "LAST": "true" if is_8bit or mixes_types else "i % 2",
             "TOLERANCE": "0.1f" if is_8bit else "0.02f" if row["BACKWARD"] and row["DTYPE"] else "0.01f"}
    text = re.sub(r"NUMBER\((\w+(?:\[\d\])?\[.*?\])\)", r"(\1 - 128) * 3.5275591f" if is_u8 else r"float(\1)",
                  builds.Tree().read(f"tools/extract_{'backward_' * row['BACKWARD']}main.cu"))
    if not has_workspace:
        text = re.sub(r"^  if \(.* = sdpa_workspace_bytes\(\w\)\) \{\n(?:    .*\n)*  \}\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\b(?:" + "|".join(words) + r")\b", lambda m: str(words[m[0]]), text)


STYLE = """AllowShortRecordOnASingleLine: Always
AllowShortBlocksOnASingleLine: Always
BreakBeforeInlineASMColon: Never
PackConstructorInitializers: BinPack
"""


def in_a_line(match):
    """Joins the members of a struct in one line if they fit. The comment moves to the end."""
    line = " ".join([match[1], *map(str.strip, match[3].split("\n")[:-1]), match[4] + (match[2] or "")])
    return line if len(line) <= minimal.WIDTH else match[0]


def formatted(text):
    """The text formatted by clang-format, more compact than sdpa.cu. Without clang-format, the text is not formatted."""
    try:
        import clang_format
    except ModuleNotFoundError:
        say("extract: the output is not formatted; to format it: python3 -m pip install 'clang-format==23.*'")
        return re.sub(r" *// clang-format o.*\n", "", text).rstrip()
    own = open(os.path.join(builds.ROOT, ".clang-format")).read()
    style = re.sub("^ColumnLimit: .*", f"ColumnLimit: {minimal.WIDTH}", own, flags=re.MULTILINE) + STYLE
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/style", "w") as file:
            file.write(style)
        done = builds.run([clang_format.get_executable("clang-format"), f"--style=file:{folder}/style",
                           "--assume-filename=x.cu"],
                          input=text)
    if done.returncode:
        raise Refused(f"clang-format: {done.stderr.strip()}")
    lines, text = [], re.sub(r" *// clang-format o.*\n", "", re.sub(r"\n{3,}", "\n\n", done.stdout)).rstrip()
    for comment in r"(  //.*)?", "()":  # a short struct in a line
        text = re.sub(rf"^( *(?:const )?struct(?: \w+)? \{{){comment}\n((?: +[^/{{}}\n]+;\n){{1,4}}) *(\}}.*;)$",
                      in_a_line, text, flags=re.MULTILINE)
    for line in text.split("\n"):
        joined = f"{lines[-1]} {line.strip()}" if lines else ""
        is_member = lines and re.search(r"\{.*,$", lines[-1]) and re.fullmatch(r'\s+(\{".*}|[\w.]+(\(.*\))?)[,;}]+', line)
        if is_member and len(joined) <= minimal.WIDTH:
            lines[-1] = joined  # joins members of a list, which clang-format puts on separate lines
        else:
            lines.append(line)
    return "\n".join(lines)


def is_free_name(word):
    """True if a namespace may have this name: not a keyword, a predefined macro or a name of the standard library."""
    return (re.fullmatch(r"[A-Za-z]\w*", word, re.ASCII) and "__" not in word and word != "std" and
            not builds.run([builds.CXX, "-fsyntax-only", "-x", "c++", "-"], input=f"namespace {word} {{}}\n").returncode)


def main():
    options = cli.parse_options(__doc__, cli.MOST)
    given = [word for word in options.words if "=" in word]
    names = [word for word in options.words if "=" not in word]
    for knob in {*names} & {*builds.Tree().knobs()}:
        raise Refused(f"{knob} has no value: write {knob}=VALUE")
    if len(names) != 1:
        raise Refused(f"one line, not {' and '.join(names)}" if names else "which line?")
    if options.namespace and not is_free_name(options.namespace):
        raise Refused(f"--namespace {options.namespace}: want a name that is not reserved in C++, such as my_attention")
    print(extract(names[0], options.namespace or "", given, options.main))
