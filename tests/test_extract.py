"""./run_all.sh extract: files that compile alone and without warnings, also as PyTorch's extensions are compiled, that
know no knob and give the machine code of their lines; and what it refuses.
usage: python3 -m pytest tests/test_extract.py"""
import collections
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("tree_sitter_cpp")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import builds  # noqa: E402
import comments  # noqa: E402
import concrete  # noqa: E402
import extract as extract_module  # noqa: E402
import minimal  # noqa: E402
import tool  # noqa: E402

LINES = """scalar_minimal scalar_e4m3 wmma_async2 wmma_all wmma_u8 mma_lazy mma_decode_d128_bf16 mma_decode_kv8_d128_bf16
           scalar_alibi hopper_documents_d128_bf16 mma_e4m3_d128 wgmma_plain wgmma_ws wgmma_overlap wgmma_causal wgmma_d128_bf16 wgmma_decode_d128 wgmma_e4m3_split2 ampere hopper_d128 hopper_e4m3_d128""".split()
if IS_QUICK := bool(os.environ.get("SDPA_TEST_QUICK")):
    LINES = tool.QUICK_LINES
# Share of a kernel's instructions that may differ from the line's: nvcc orders reads of arguments, addresses and moves anew when
# unused arguments, or unused reads of the thread index, are left out. With lengths, the loops of sdpa_backward_padding()
# contain little else.
MOST = {"mma_decode_kv8_d128_bf16": 0.05, "backward_hopper USE_LENGTHS=1 USE_SINKS=1": 0.07}
# Builds that no line has: with features, which need parts of other chapters, and programs. Without --all one of the last five.
CHANGED = ["wgmma_d128_lazy USE_BIAS=2", "scalar_vec8 USE_LENGTHS=1 USE_PAGES=1", "wgmma_decode_d128 USE_LENGTHS=1 USE_PAGES=2",
           "mma_lazy USE_LENGTHS=1", "wgmma_d128_lazy USE_LENGTHS=1 USE_PAGES=1", "wgmma_d128_lazy USE_SOFTCAP=1 DTYPE=BF16",
           "wgmma_kv8 USE_LENGTHS=1 USE_PAGES=1 USE_SINKS=1", "wgmma_chunk USE_LENGTHS=1", "wgmma_e4m3_split2 USE_SOFTCAP=1",
           "scalar_minimal USE_BIAS=1", "hopper_d128 USE_BIAS=1 BLOCK_M=128 BLOCK_N=128", "mma_lazy USE_SOFTCAP=1 USE_SINKS=1",
           "scalar_async2 STAGES=3 --main", "scalar_u8 --main", "wgmma_causal --main", "backward_mma --main"]
ARCHS = re.findall(r"\d+a?", os.environ.get("SDPA_ARCHS", "")) or ["80", "89", "90a"]
PYTORCH = """-D__CUDA_NO_HALF_OPERATORS__ -D__CUDA_NO_HALF_CONVERSIONS__ -D__CUDA_NO_BFLOAT16_CONVERSIONS__
             -D__CUDA_NO_HALF2_OPERATORS__ --expt-relaxed-constexpr""".split()
KNOBS = "|".join(builds.Tree().knobs())
needs_nvcc = pytest.mark.skipif(not builds.nvcc(), reason="nvcc is missing")


def extract(*words):
    """The exit code, stdout and stderr of the command."""
    return tool.run("extract", *words)


@functools.lru_cache(None)
def text_of(name):
    """The extract of a line. In one process, what two lines have in common is evaluated once."""
    return extract_module.extract(name)


@pytest.fixture(scope="module")
def texts():
    return {name: text_of(name) for name in LINES}


@pytest.mark.parametrize("name", LINES)
def test_no_knob_is_left(texts, name):
    text = texts[name]
    # A knob may be a constant of the file. Below the first #include only comments and sentences may name another one.
    code = re.sub(r'//.*|"[^"\n]*"', "", text[text.index("#include"):])
    constants = re.findall(r"\b([A-Z_0-9]+) = ", " ".join(re.findall(r"^constexpr int [^;]*;", code, re.MULTILINE)))
    left = re.findall(rf"\b(?:{KNOBS}|SDPA_(?:KNOB|REFUSE|SIMT|NAMESPACE)[A-Z_]*|[A-Z_]*_(?:text|changed))\b", code)
    assert not {*left} - {*constants}
    assert "\n\n\n" not in text and not re.search(r"^// (----.*\n\n// ----|====.*\n\n// ====)", text, re.MULTILINE)
    assert text.startswith("// Compile: nvcc ") and "SPDX-License-Identifier: MIT. Copyright" in text


@pytest.mark.parametrize("name,sizes", [("mma_lazy", "HEAD_DIM=96 BLOCK_M=64 BLOCK_N=32 VEC_WIDTH=4"), pytest.param(
    "scalar_minimal", "HEAD_DIM=128 BLOCK_M=64 BLOCK_N=64 VEC_WIDTH=8", marks=pytest.mark.long)])
def test_sizes_that_may_be_changed(name, sizes):
    """An extract says which of its sizes may be changed: these are then all that differs between two extracts."""
    def constants(text):
        assert "// HEAD_DIM, BLOCK_M, BLOCK_N, VEC_WIDTH may be changed" in text
        return re.sub(r"^// From sdpa, line .*\n(//   .*\n)*", "", text, flags=re.MULTILINE)
    text = constants(text_of(name))
    for size in sizes.split():
        knob, _, value = size.partition("=")
        text = re.sub(rf"(?m)^(constexpr int .*\b{knob} =) \d+", rf"\1 {value}", text)
    assert text == constants(extract_module.extract(name, given=sizes.split()))


# Declarations with which a host compiler can check an extract: CUDA's functions, and a function for asm operands.
CHECKED_BY = """#include <cstdint>
#define __shared__
#define __ldg(x) (*(x))
#define __ldcg(x) (*(x))
#define __cvta_generic_to_shared(x) size_t(x)
inline unsigned __float_as_uint(float x) { return unsigned(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) { return a + b + selector; }
template <class... T> void operands(T&&...) {}
"""
# The last two are about names that branches on sizes or default members need.
UNUSED = """-Wall -Wextra -Wunused-template -Wunused-member-function -Wunused-macros -Wunused-const-variable -Wunused-local-typedef
            -Wno-unknown-pragmas -Wno-undefined-internal -Wno-unneeded-internal-declaration -Wno-unneeded-member-function""".split()


def closing(text, at):
    """The end of a parenthesis that opens before `at`."""
    depth = 1
    for match in re.compile(r'"(?:[^"\\]|\\.)*"|[()]').finditer(text, at):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    raise ValueError(text[at:at + 80])


def for_the_host(text):
    """An extract with calls of operands() in the place of asm statements and launch bounds."""
    text = re.sub(r"__launch_bounds__\(((?:[^()]|\([^()]*\))*)\)(\s*\w+\([^()]*\) \{)", r"\2 operands(\1);", text)
    out, at = [], 0
    for match in re.finditer(r"\basm(?: volatile)?\(", text):
        end = closing(text, match.end())
        inner = text[match.end():end]
        given = [inner[one.end():closing(inner, one.end()) - 1].replace("\\\n", " ") for one in
                 re.finditer(r'"[=+]?[a-z]"\s*\(', inner)]
        out += [text[at:match.start()], f"operands({', '.join(given)})"]
        at = end
    return re.sub(r"__align__\(\d+\)", "", "".join([*out, text[at:]]))


@functools.lru_cache(None)
def names_of_the_source():
    source = "\n".join(map(builds.Tree().read, ("sdpa.cu", "sdpa_backward.cu")))
    return {*re.findall(r"\w+", comments.code_of(source)), *KNOBS.split("|")}


# Words of comments that are names: name(), a_name, A_NAME, NAME, aName, and types as e4m3.
NAME = re.compile(r"\b(?:\w+(?=\(\))|\w*[a-z0-9]_\w+|[A-Z][A-Z0-9_]+|[A-Z]\w*[a-z]\w*[A-Z]\w*|[be]\d\w+|fp16)")
TYPES = {"fp16": "__half", "FP16": "__half", "bf16": "__nv_bfloat16", "BF16": "__nv_bfloat16", "U8": "uint8_t", "u8": "uint8_t", "e4m3": "__nv_fp8_e4m3"}


def leftovers(text, folder):
    """What can be deleted from an extract: clang's warnings about unused names, and the words of comments that name what the
    file does not contain. The functions for SCORE_MOD and MASK_MOD are complete, so that an expression can be changed.
    Templates on the tile may have a parameter, and a view a constant, that only other tiles read."""
    has_expression = "namespace expression {" in text
    has_other_reads = "TUNED_TILES" in text or "SDPA_WGMMA_SHAPES" in text  # of parameters, by other tiles or in macros
    unused = ["-w"] if has_expression else UNUSED + ["-Wno-unused-parameter"] * has_other_reads
    (folder / "host.h").write_text(CHECKED_BY)
    backend = ["-isystem", os.path.join(ROOT, "cpu_backend")]
    found = []
    for path, source, more in (("host.cu", for_the_host(text), ["-fsyntax-only", "-Wno-unused-macros"]),
                               ("own.cu", text, ["-E", "-o", "/dev/null"])):
        (folder / path).write_text(source)
        done = builds.run(["clang++", "-std=c++17", *backend, "-include", "host.h", *unused, *more, "-x", "c++", path], cwd=folder)
        found += re.findall(r"^own.cu.*macro is not used.*\n.*" if path == "own.cu" else r"^.* (?:warning|error): .*\n.*", done.stderr, re.MULTILINE)
    if has_other_reads:
        found = [one for one in found if not re.search("unused variable .*\n.*static constexpr", one)]
    code = {*re.findall(r"\w+", comments.code_of(text))}
    head = text[:text.index("#include")].count("\n")
    return found + [f"{number}: {word}: {line.strip()}" for number, line in enumerate(text.splitlines(), 1) if "//" in line and number > head
                    for word in NAME.findall(line.split("//", 1)[1])
                    if word in names_of_the_source() and word not in code and TYPES.get(word) not in code]


@pytest.mark.skipif(not shutil.which("clang++"), reason="clang++ is missing")
@pytest.mark.parametrize("name", LINES if IS_QUICK else
                         [line for line, of in builds.Tree().read_configs()[0].items() if "expect=FAIL" not in of.words])
def test_nothing_can_be_deleted(tmp_path, name):
    """No function, variable, parameter or macro is unused, and comments name only what the file contains."""
    text = text_of(name)
    assert text.count("nv_diag_suppress") == ("namespace expression {" in text or "TUNED_TILES" in text)
    assert not leftovers(text, tmp_path)


@pytest.mark.parametrize("name", [name for name in LINES if not name.startswith(("hopper", "ampere"))])
def test_one_build_has_no_templates_on_it(texts, name):
    assert not re.search(r"\bclass B\b|<B\b|\bB::|KernelOf|with_build|\bBuild\b", texts[name])
    # Definitions come before their uses, so only functions with default arguments are declared first.
    assert texts[name].index("__global__") > texts[name].index("// ==== the kernel")


def test_options_of_other_builds_are_gone(texts):
    """SdpaParams has no member of an option that the build lacks. A map of visible rounds is an option of MASK_MOD, too."""
    options = "softcap sinks bias bias_strides bias_keys bias_map bias_map_bytes k_lengths q_lengths k_firsts q_starts k_starts most_keys page_table page_size pages".split()
    for name, text in texts.items():
        members = re.search(r"^struct SdpaParams \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL)[1]
        if "documents" in name:
            assert "sdpa_map_bias(const" in text and "sdpa_bias_map_bytes(SdpaParams" in text
            members, text = (re.sub(r"\bbias_map\w*", "", part) for part in (members, text))
        assert not {*options} & {*re.findall(r"\w+", re.sub("//.*", "", members))}, name
        assert not re.search(rf"\b(?:p|params)\.(?:{'|'.join(options)})\b", re.sub("//.*", "", text)), name
        assert re.search("e4m3|u8|kv8", name) or "descale" not in members, name


def compiled(line, text, folder):
    """The warnings about an extract, its machine code, the line's, and the number of architectures of the latter. Compiles with
    the command in the file's first comment, plus the flags of PyTorch's extensions and all warnings."""
    archs = line.archs(ARCHS)
    command = re.search(r"^// Compile: nvcc (.*) -c my_kernel.cu$", text, re.MULTILINE).group(1)
    assert command.endswith("arch=compute_{0},code=sm_{0}".format(line.knob("arch", "80")))
    command = re.sub(r"(?<=_)\d+a?", archs[0], command)
    passes = ["forward"] + ["backward"] * line.is_backward
    caller = "".join(f"const void* kept_{one}() {{ return (const void*){line.name}::sdpa_{one}; }}\n" for one in passes)
    (folder / f"{line.name}.cu").write_text(f"{text}\n{caller}")
    done = builds.run([builds.nvcc(), *shlex.split(command), *PYTORCH, "-Xcompiler=-Wall,-Wextra", "--no-compress",
                       "-c", f"{line.name}.cu", "-o", f"{line.name}.o"], cwd=folder)
    built = builds.build([line], *ARCHS, kind="-fatbin")[line]  # as the gates have it
    own = builds.machine_code(open(built.path, "rb").read())
    return done.stderr, builds.machine_code((folder / f"{line.name}.o").read_bytes()), own, len(archs)


def check_machine_code(name, words, extracted, own, archs):
    """There are no warnings, and a share of at most MOST of the instructions of each kernel differs from the line's."""
    assert not words, name
    assert len(extracted) * archs == len(own) > 0, name
    for instructions in map(opcodes, extracted):
        others = min((instructions - other).total() + (other - instructions).total() for other in map(opcodes, own))
        assert others <= MOST.get(name, 0.03) * instructions.total(), (name, others)


@needs_nvcc
def test_machine_code_is_the_lines(texts, tmp_path):
    """Arguments lie elsewhere, since some are left out: nvcc may put loads of them in another order."""
    lines = builds.parse_contenders(LINES)
    with ThreadPoolExecutor(builds.JOBS) as pool:
        for line, found in zip(lines, pool.map(lambda line: compiled(line, texts[line.name], tmp_path), lines)):
            check_machine_code(line.name, *found)


@needs_nvcc
@pytest.mark.parametrize("words", [tool.drawn(CHANGED[-5:])] if IS_QUICK else CHANGED)
def test_builds_that_no_line_has(tmp_path, words):
    """They compile without warnings by the command in their first line, have the members of their features and the size that was
    asked for, and a program is short."""
    status, text, trouble = extract(*words.split())
    assert status == 0, trouble
    members = {"BIAS": "bias", "SOFTCAP": "softcap", "LENGTHS": "k_lengths", "PAGES": "page_table", "SINKS": "sinks"}
    params = re.search(r"^struct SdpaParams \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL)[1]
    for knob in re.findall(r"USE_(\w+)", words):
        assert re.search(rf"^  [^/\n]*\b{members[knob]}\b", params, re.MULTILINE), words
    assert "STAGES=3" not in words or re.search(r"\bSTAGES = 3\b", text)
    if "--main" in words:
        program = text[text.index("// ==== a program"):]
        assert len(program.splitlines()) <= (130 if words.startswith("backward") else 70)
    command = re.search(r"^// Compile: nvcc (.*) my_kernel.cu$", text, re.MULTILINE)[1]
    assert command.endswith("-o my_kernel" if "--main" in words else "-c")
    (tmp_path / "my_kernel.cu").write_text(text)
    done = builds.run([builds.nvcc(), *shlex.split(command), "-Xcompiler=-Wall,-Wextra", "my_kernel.cu"], cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, (words, done.stderr[:2000])


def opcodes(code):
    """Counts each instruction in a kernel by opcode, the low 12 bits of its 16 bytes."""
    return collections.Counter(int.from_bytes(code[at:at + 2], "little") & 0xfff for at in range(0, len(code), 16))


CPU_PROGRAM = """
#define SDPA_NO_MAIN
#include <random>
#include <vector>
#include "sdpa.cu"
{undefined}
#include "{name}.cu"

struct Memory {{
  unsigned char* first = nullptr;
  size_t bytes;
  explicit Memory(size_t n) : bytes(n) {{ cudaMalloc((void**)&first, n), memset(first, 0, n); }}
  ~Memory() {{ cudaFree(first); }}
}};

template <class Params, class Status, class Causal, class Prepare>
std::vector<unsigned char> run(Status (*forward)(const Params&, cudaStream_t), Causal causal, const Prepare& prepare) {{
  constexpr int D = {d}, Dv = {dv}, B = 2, Hq = 4, Hkv = 2, Sq = 75, Sk = 203, of_q = {q_bytes}, in = {in_bytes}, out = {out_bytes};
  std::mt19937 random(7);
  Memory Q(B * Hq * Sq * D * of_q), K(B * Hkv * Sk * D * in), V(B * Hkv * Sk * Dv * in), O(B * Hq * Sq * Dv * out), LSE(B * Hq * Sq * 4);
  for (Memory* tensor : {{&Q, &K, &V}}) {{  // of either sign and similar magnitude
    for (size_t i = 0; i < tensor->bytes; i++) tensor->first[i] = i % in == in - 1 ? (random() & 0x87) | 0x30 : random() & 255;
  }}
  Params p{{}};
  p.Q = decltype(p.Q)(Q.first), p.K = decltype(p.K)(K.first), p.V = decltype(p.V)(V.first), p.O = decltype(p.O)(O.first);
  p.LSE = (float*)LSE.first, p.B = B, p.Hq = Hq, p.Hkv = Hkv, p.Sq = Sq, p.Sk = Sk, p.D = D, p.Dv = Dv, p.causal = causal;
  p.q = {{int64_t(Hq) * Sq * D, int64_t(Sq) * D, D}}, p.k = {{int64_t(Hkv) * Sk * D, int64_t(Sk) * D, D}};
  p.v = {{int64_t(Hkv) * Sk * Dv, int64_t(Sk) * Dv, Dv}}, p.o = {{int64_t(Hq) * Sq * Dv, int64_t(Sq) * Dv, Dv}};
  Memory room(1 << 20);
  prepare(p, room.first);
  const Status status = forward(p, nullptr);
  if (!status.ok()) printf("%s\\n", status.text), exit(1);
  cudaDeviceSynchronize();
  std::vector<unsigned char> bits(O.first, O.first + O.bytes);
  bits.insert(bits.end(), LSE.first, LSE.first + LSE.bytes);
  return bits;
}}
int main() {{
  const auto all = [](auto own) {{
    int different = 0, nonzero = 0;
    for (int causal = 0; causal < 3; causal++) {{
      const auto line = run(sdpa::sdpa_forward, sdpa::Causal(causal), [](auto& p, void* room) {{ p.workspace = room; }});
      const auto extracted = run({name}::sdpa_forward, {name}::Causal(causal), [](auto& p, void* room) {{ {prepare}; }});
      for (size_t i = 0; i < line.size(); i++) different += line[i] != extracted[i], nonzero += line[i] != 0;
    }}
    printf("%d different, %s\\n", different, nonzero > own ? "of many" : "of few");
  }};
  all(10000);
}}
"""


@pytest.mark.parametrize("name", [name for name in LINES if not re.search("^hopper|^ampere|alibi", name)])
def test_bits_on_the_cpu_backend(texts, tmp_path, name):
    """O and LSE of three masks are those of the line to the bit, with the CPU backend's versions of the instructions."""
    tree = builds.Tree()
    line = tree.config_lines()[name]
    row = extract_module.rows_of(tree, name, tree.knob_rows(), line.words)[-1]
    text = without_instructions(texts[name], extract_module.instructions(tree.read("sdpa.cu")))
    (tmp_path / f"{name}.cu").write_text(text)
    sizes = [2, 2, 1, 1]
    (tmp_path / "program.cu").write_text(CPU_PROGRAM.format(
        undefined="\n".join(f"#undef {knob}" for knob in tree.knobs()), name=name,
        prepare="p.workspace = room" * ("sdpa_workspace_bytes" in text), d=row["HEAD_DIM"], dv=row["HEAD_DIM_V"] or row["HEAD_DIM"], q_bytes=sizes[row["DTYPE"]], in_bytes=1 if row["KV_DTYPE"] else sizes[row["DTYPE"]],
        out_bytes=2 if row["OUT_DTYPE"] == 0 or row["OUT_DTYPE"] < 3 else 1))
    backend = os.path.join(ROOT, "cpu_backend")
    command = [builds.CXX, "-std=c++17", "-O0", "-march=native", "-ffp-contract=off", "-w", "-pthread", "-I" + ROOT, "-I" + backend,
               "-I" + str(tmp_path), *builds.definitions(line.words), builds.host_engine(), "-x", "c++", str(tmp_path / "program.cu"),
               "-o", str(tmp_path / "program")]
    done = builds.run(command)
    assert done.returncode == 0, done.stderr[:2000]
    done = builds.run([str(tmp_path / "program")])
    assert done.stdout == "0 different, of many\n", (done.stdout + done.stderr)[:2000]


def without_instructions(text, names):
    """The text with the CPU backend's versions in the place of the functions of these names. A wgmma with a
    single shape is no template: its calls get the CPU backend's template arguments, derived from the instruction."""
    for kind, accumulators, asm in re.findall(r"void wgmma_(ss|rs)\(float \(&d\)\[(\d+)\](.*?)\n}\n", text, re.DOTALL):
        transposed = re.search(r"p, 1, 1((?:, \d)*);", re.sub(r'"\s*"', "", asm))[1].split(", ")[:0:-1]
        text = re.sub(rf"(?<!void )\bwgmma_{kind}\(", f"wgmma_{kind}<{', '.join(['KeyValue', str(2 * int(accumulators)), *(transposed or '0')])}>(", text)
    lines = text.split("\n")
    units = [unit for unit in minimal.units_of(minimal.parse(text), lines) if unit.names & names and unit.kind != "struct_specifier"]
    gone = {n for unit in units for n in range(unit.first, unit.last + 1)}
    kept = [line for n, line in enumerate(lines) if n not in gone]
    text = re.sub(r"^#if defined\(__CUDA_ARCH__.*\n#error.*\n#endif\n", "", "\n".join(kept), flags=re.MULTILINE)
    return text.replace("// ==== the steps", '#include "cpu_backend/ptx.h"\n// ==== the steps', 1)


# Builds of the backward pass: all kernels, two widths, sequences, and expressions with their derivatives.
GRADIENTS = ["backward_minimal", "backward_mma5", "backward_wgmma_plain", "backward_hopper", "backward_mma_d256_bf16",
             "backward_wgmma_plain_d192_v128_bf16", "backward_hopper USE_LENGTHS=1 USE_SINKS=1", "backward_ordered_d128_bf16",
             "backward_mma 'SCORE_MOD=s - x0[h] * abs(real(q - k))' 'MASK_MOD=i0[q] == i0[k]'"]


@pytest.mark.long
@needs_nvcc
@pytest.mark.parametrize("text", GRADIENTS)
def test_gradients(tmp_path, text):
    """An extract of the backward pass has no warnings and the machine code of its line."""
    line, = builds.parse_contenders(shlex.split(text))
    extracted = extract_module.extract(line.name, given=line.changes)
    assert not re.search(r"\b(ONE_PASS_text|ORDERED_ADDS_text|SDPA_BACKWARD_KNOBS)\b", extracted)
    assert ("OfQK" in extracted) == ("_v128" in text)
    check_machine_code(text, *compiled(line, extracted, tmp_path))


@pytest.mark.long
@needs_nvcc
def test_two_in_one_program(texts, tmp_path):
    """Two extracts work in one program, even in one file, and report their own errors."""
    (tmp_path / "other.cu").write_text(extract("scalar_e4m3", "HEAD_DIM=128", "--namespace", "other")[1])
    (tmp_path / "program.cu").write_text(texts["scalar_minimal"] + """
#include "other.cu"
int main() { printf("%s\\n%s", scalar_minimal::sdpa_forward({}, 0).text, other::sdpa_forward({}, 0).text); }
""")
    command = "-std=c++17 -arch=sm_80 program.cu -o program".split()
    subprocess.run([builds.nvcc(), *command], cwd=tmp_path, check=True)
    assert re.findall(r"takes D=(\d+)", subprocess.check_output([tmp_path / "program"], text=True)) == ["64", "128"]


# What the program of --main finds on the host: CUDA's functions, and a kernel in double, with right results except for
# element AT, which has an error of WRONG times the largest one. Between two events each launch takes 0.2 us.
HOST = """#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#define __managed__
#define __global__
struct Index { int x; } blockIdx, threadIdx;
using cudaError_t = int;
using cudaEvent_t = int;
struct cudaFuncAttributes {};
int cudaFuncGetAttributes(void*, void (*)()) { return 0; }
const char* cudaGetErrorString(int) { return "no error"; }
template <class T> int cudaMalloc(T** place, size_t bytes) { return *place = (T*)malloc(bytes), 0; }
int cudaMemset(void* place, int byte, size_t bytes) { return memset(place, byte, bytes), 0; }
int cudaDeviceSynchronize() { return 0; }
float rsqrtf(float x) { return 1 / sqrtf(x); }
int launches = 0;
int cudaEventCreate(int*) { return 0; }
int cudaEventRecord(int& event) { return event = launches, 0; }
int cudaEventElapsedTime(float* ms, int start, int end) { return *ms = 2e-4f * float(end - start), 0; }
namespace space {
using KeyValue = INPUT;
using Output = float;
struct Strides { int64_t batch, head, row; };
struct SdpaParams { const void *Q, *K, *V; float* O; int B, Hq, Hkv, Sq, Sk, D; Strides q, k, v, o; void* workspace; };
struct SdpaStatus { const char* text; bool ok() const { return true; } };
size_t sdpa_workspace_bytes(const SdpaParams&) { return 8; }
SdpaStatus sdpa_forward(const SdpaParams& p, void*);
}
"""
KERNEL = """
void run_naive() {
  for (blockIdx.x = 0; blockIdx.x < ROWS / 64; blockIdx.x++) {
    for (threadIdx.x = 0; threadIdx.x < 64; threadIdx.x++) naive();
  }
}
double number(uint8_t x) { return (x - 128) * 448.0 / 127; }
double number(_Float16 x) { return double(x); }
space::SdpaStatus space::sdpa_forward(const SdpaParams& p, void*) {
  const auto *Q = (const KeyValue*)p.Q, *K = (const KeyValue*)p.K, *V = (const KeyValue*)p.V;
  float largest = 0;
  for (int row = 0; row < p.Hq * p.Sq && launches == 0; row++) {
    const int h = row / p.Sq, q = row % p.Sq;
    double scores[S] = {}, m = -INFINITY, l = 0, sums[DV] = {};
    for (int k = 0; k < p.Sk; k++) {
      for (int d = 0; d < p.D; d++) scores[k] += number(Q[h * p.q.head + q * p.q.row + d]) * number(K[h * p.k.head + k * p.k.row + d]);
      m = fmax(m, scores[k] /= sqrt(p.D));
    }
    for (int k = 0; k < p.Sk; k++) {
      const double weight = exp(scores[k] - m);
      l += weight;
      for (int d = 0; d < DV; d++) sums[d] += weight * number(V[h * p.v.head + k * p.v.row + d]);
    }
    for (int d = 0; d < DV; d++) p.O[h * p.o.head + q * p.o.row + d] = float(sums[d] / l);
  }
  for (int i = 0; i < ROWS * DV && launches == 0; i++) largest = fmaxf(largest, fabsf(p.O[i]));
  if (launches++ == 0) p.O[atoi(getenv("AT"))] += float(atof(getenv("WRONG"))) * largest;
  return {};
}
"""


@pytest.mark.parametrize("kind,dtype,Dv,tolerance,tflops", [("_Float16", 0, 32, 0.01, 7.9), ("uint8_t", 3, 64, 0.1, 10.5)])
def test_a_program_finds_one_wrong_element(tmp_path, kind, dtype, Dv, tolerance, tflops):
    """It finds an error of over 1% of the largest element (10% with 8 bits) in the first and the last one, and prints the time."""
    text = extract_module.program("space", dict(BACKWARD=0, DTYPE=dtype, KV_DTYPE=0, HEAD_DIM=64, HEAD_DIM_V=Dv % 64))
    text, changes = re.subn(r"B = 2, H = 16, S = 2048", "B = 1, H = 2, S = 64", text)
    text, launches = re.subn(r"naive<<<ROWS / 64, 64>>>\(\)", "run_naive()", text)
    assert changes == launches == 1
    text = text.replace("int main(", KERNEL + "int main(")
    done = builds.run([builds.CXX, "-std=c++17", "-O1", "-w", "-DINPUT=" + kind, f"-DDV={Dv}", "-x", "c++", "-", "-o", str(tmp_path / "program")],
                      input=HOST + text)
    assert done.returncode == 0, done.stderr[:2000]
    done = builds.run([str(tmp_path / "program"), "--help"], env={})  # before it needs a GPU: the stand-in's kernel would crash without AT
    assert (done.stdout, done.returncode) == ("this program takes no arguments: it checks and times B=1, H=2, Sq=Sk=64\n", 2)
    for at in (0, Dv * 128 - 1):
        for wrong, count in ((0, 0), (0.9 * tolerance, 0), (-0.9 * tolerance, 0), (1.1 * tolerance, 1), (-1.1 * tolerance, 1), ("nan", 1)):
            done = builds.run([str(tmp_path / "program")], env=dict(AT=str(at), WRONG=str(wrong)))
            # 20 launches of 2 * 2 * 64 * 64 * (64 + Dv) FLOP in 4 us
            assert (done.stdout, done.returncode) == (f"0.2 us, {tflops} TFLOP/s, {count} wrong\n", count), (at, wrong)


@pytest.mark.parametrize("backward,dtype,kv_dtype,tolerance", [
    (0, 0, 0, 0.01), (0, 1, 0, 0.01), (0, 2, 0, 0.1), (0, 3, 0, 0.1), (0, 0, 1, 0.01), (0, 1, 1, 0.01), (1, 0, 0, 0.01), (1, 1, 0, 0.02)])
def test_tolerances_of_programs(backward, dtype, kv_dtype, tolerance):
    """fp16 and bf16 have the tolerance of fp16, but gradients in bf16 twice as much, and 8-bit types 10%. NaN is wrong."""
    row = dict(BACKWARD=backward, DTYPE=dtype, KV_DTYPE=kv_dtype, HEAD_DIM=64, HEAD_DIM_V=0)
    compared = re.findall(r"wrong \+= (.*);", extract_module.program("space", row))
    assert compared and all(re.fullmatch(rf"!\(fabsf\(.*\) <= {tolerance}f \* largest\)", one) for one in compared), compared


SETTINGS = {"USE_THIS": comments.Setting("this_", "1", True), "USE_OTHER": comments.Setting("other_", "0", False),
            "SIZE": comments.Setting("size", "4", False)}


@pytest.mark.parametrize("name,change", [
    ("minimal", lambda text: minimal.minimal(text, {"block_m"})),
    ("shortest", lambda text: concrete.shortest(text, {"of_ptx"})),
    ("comments", lambda text: comments.Comments(text, "int gone_function(), gone_name, GONE_WORD;", SETTINGS, ["sinks"]).cleaned(text))])
def test_changes(name, change):
    """minimal: conditions on constants, and the comments that go with removed code. shortest: inlined calls, and unused
    functions, parameters and members. comments: sentences about absent code."""
    pytest.importorskip("clang_format")
    before, after = open(os.path.join(ROOT, "tests", "data", f"{name}.cu")).read().split("// ======== becomes\n")
    assert extract_module.formatted(change(before)) + "\n" == after


@pytest.mark.parametrize("words,sentence", [
    ("", "extract: which line?"),
    ("mma_lasy3", "extract: mma_lasy3: no line of configs.txt has that name; did you mean mma_lazy"),
    ("typo", "bad.txt:1: no knob is called BLOK_N"), ("illegal", "HEAD_DIM: not a legal value; it takes one of: 32..256"),
    ("mma_lazy BLOK_N=32", "extract: no knob is called BLOK_N; did you mean BLOCK_N?"),
    ("mma_lazy SCORE_MOD=s+x9[k]", "extract: SCORE_MOD='s+x9[k]' does not compile: "),
    *((f"mma_lazy --namespace {word}", f"extract: --namespace {word}: want a name that is not reserved in C++")
      for word in ("1x", "class", "linux", "std", "_x", "a__b"))])
def test_refusals(words, sentence, tmp_path, monkeypatch):
    if words in ("typo", "illegal"):
        (tmp_path / "bad.txt").write_text("typo BLOK_N=64\nillegal HEAD_DIM=24\n")
        monkeypatch.setenv("SDPA_CONFIGS", str(tmp_path / "bad.txt"))
    code, out, err = extract(*words.split())
    assert code == 2 and sentence in err and not out
