"""./run_all.sh extract: files that compile alone and without warnings, also as PyTorch's extensions are compiled, that
know no knob and give the machine code of their lines; and what it refuses.
usage: python3 -m pytest tests/test_extract.py"""
import collections
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("tree_sitter_cpp")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import builds  # noqa: E402
import minimal  # noqa: E402

LINES = """scalar_minimal scalar_e4m3 wmma_all wmma_u8 mma_lazy mma_decode_d128_bf16 mma_e4m3_d128 wgmma_plain wgmma_causal
           wgmma_d128_bf16 wgmma_decode_d128 wgmma_e4m3_split2 ampere hopper_d128 hopper_e4m3_d128""".split()
if os.environ.get("SDPA_TEST_QUICK"):
    LINES = ["scalar_minimal", "mma_lazy", "hopper_d128"]
MOST = dict(scalar_minimal=1050, mma_lazy=1500, wgmma_plain=1300, wgmma_causal=2000, wgmma_decode_d128=2000,
            hopper_d128=3000, hopper_e4m3_d128=3800)
ARCHS = re.findall(r"\d+a?", os.environ.get("SDPA_ARCHS", "")) or ["80", "89", "90a"]
PYTORCH = """-D__CUDA_NO_HALF_OPERATORS__ -D__CUDA_NO_HALF_CONVERSIONS__ -D__CUDA_NO_BFLOAT16_CONVERSIONS__
             -D__CUDA_NO_HALF2_OPERATORS__ --expt-relaxed-constexpr""".split()
KNOBS = "|".join(builds.Tree().knobs())
needs_nvcc = pytest.mark.skipif(not builds.nvcc(), reason="nvcc is missing")


def extract(*words, **environment):
    done = subprocess.run([os.path.join(ROOT, "run_all.sh"), "extract", *words], capture_output=True, text=True,
                          env={**os.environ, **environment})
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def texts():
    with ThreadPoolExecutor(builds.JOBS) as pool:
        return dict(zip(LINES, pool.map(lambda name: extract(name)[1], LINES)))


@pytest.mark.parametrize("name", LINES)
def test_no_knob_is_left(texts, name):
    text = texts[name]
    # Below the first #include only comments and sentences may name a knob.
    code = re.sub(r'//.*|"[^"\n]*"', "", text[text.index("#include"):])
    assert not re.findall(rf"\b(?:{KNOBS}|SDPA_(?:KNOB|REFUSE|SIMT|NAMESPACE)[A-Z_]*|[A-Z_]*_(?:text|changed))\b", code)
    assert "\n\n\n" not in text and not re.search(r"^// (----.*\n\n// ----|====.*\n\n// ====)", text, re.MULTILINE)
    assert "Permission is hereby granted" in text


@pytest.mark.parametrize("name", [name for name in LINES if name in MOST])
def test_is_short(texts, name):
    assert len(texts[name].splitlines()) <= MOST[name]


@needs_nvcc
def test_machine_code_is_the_lines(texts, tmp_path):
    """By the command that stands on top of the file, with the flags of PyTorch's extensions and all warnings."""
    lines = {line.name: line for line in builds.parse_contenders(LINES)}

    def code(name):
        line, text = lines[name], texts[name]
        archs = line.archs(ARCHS)
        command = re.search(r"^// Compile: nvcc (.*) -c my_kernel.cu$", text, re.MULTILINE).group(1)
        assert command.endswith("arch=compute_{0},code=sm_{0}".format(line.knob("arch", "80")))
        command = re.sub(r"(?<=_)\d+a?", archs[0], command)
        caller = f"const void* kept() {{ return (const void*){name}::sdpa_forward; }}\n"
        (tmp_path / f"{name}.cu").write_text(text + caller)
        done = builds.run([builds.nvcc(), *shlex.split(command), *PYTORCH, "-Xcompiler=-Wall,-Wextra", "--no-compress",
                           "-c", f"{name}.cu", "-o", f"{name}.o"], cwd=tmp_path)
        built = builds.build([line], *ARCHS, kind="-fatbin")[line]  # as the gates have it
        own = collections.Counter(builds.machine_code(open(built.path, "rb").read()))
        extracted = collections.Counter(builds.machine_code((tmp_path / f"{name}.o").read_bytes()))
        return done.stderr, len(archs), extracted, own
    with ThreadPoolExecutor(builds.JOBS) as pool:
        for name, (words, archs, extracted, own) in zip(LINES, pool.map(code, LINES)):
            assert not words, name
            assert not extracted - own and extracted.total() * archs == own.total() > 0, name


@pytest.mark.long
@needs_nvcc
def test_two_in_one_program(texts, tmp_path):
    """In one file even; each answers for itself."""
    (tmp_path / "other.cu").write_text(extract("scalar_vec8", "--namespace", "other")[1])
    (tmp_path / "program.cu").write_text(texts["mma_decode_d128_bf16"] + """
#include "other.cu"
int main() { printf("%s\\n%s", mma_decode_d128_bf16::sdpa_forward({}, 0).text, other::sdpa_forward({}, 0).text); }
""")
    command = "-std=c++17 -arch=sm_80 program.cu -o program".split()
    subprocess.run([builds.nvcc(), *command], cwd=tmp_path, check=True)
    assert re.findall(r"HEAD_DIM=(\d+)", subprocess.check_output([tmp_path / "program"], text=True)) == ["128", "64"]


def test_minimal():
    """What constants decide, and which comments go with what they describe."""
    before, after = open(os.path.join(ROOT, "tests", "data", "minimal.cu")).read().split("// ======== becomes\n")
    assert minimal.minimal(before, {"block_m"}) == after


@pytest.mark.parametrize("words,sentence", [
    ("", "extract: which line?"),
    ("mma_lasy3", "extract: mma_lasy3: no line of configs.txt has that name; did you mean mma_lazy"),
    ("mma_lazy mma_split2", "extract: one line, not mma_lazy and mma_split2"),
    ("mma_lazy --frob", "extract: --frob: no such option"),
    ("mma_lazy --namespace", "extract: --namespace: its value is missing"),
    ("mma_lazy --namespace 1x", "extract: --namespace 1x: want a name of C++")])
def test_refusals(words, sentence):
    code, out, err = extract(*words.split())
    assert code == 2 and sentence in err and not out


@pytest.mark.parametrize("name,sentence", [
    ("typo", "bad.txt:1: no knob is called BLOK_N"),
    ("illegal", "HEAD_DIM: not a legal value; it takes one of: 32..256"),
    ("words", "bad.txt:3: BLOCK_N has no value: write BLOCK_N=VALUE")])
def test_bad_lines(tmp_path, name, sentence):
    (tmp_path / "bad.txt").write_text("typo BLOK_N=64\nillegal HEAD_DIM=24\nwords BLOCK_N\n")
    code, out, err = extract(name, SDPA_CONFIGS=str(tmp_path / "bad.txt"))
    assert code == 2 and sentence in err and not out


def test_words_on_stderr(tmp_path):
    missing = str(tmp_path / "missing.txt")
    assert "missing.txt: there is no such file" in extract("mma_lazy", SDPA_CONFIGS=missing)[2]
    assert "scalar_racy is marked expect=FAIL" in extract("scalar_racy")[2]
