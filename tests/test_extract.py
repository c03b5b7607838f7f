"""./run_all.sh extract: files that compile alone, know no knob, and give the machine code of their lines; two of them in
one program; and what it refuses.  usage: python3 -m pytest tests/test_extract.py"""
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import builds  # noqa: E402

ARCHS = re.findall(r"\d+a?", os.environ.get("SDPA_ARCHS", "")) or ["80", "89", "90a"]
LINES = "scalar_minimal wmma_all mma_lazy wgmma_plain wgmma_192x128 hopper".split()
KNOBS = "|".join(builds.Tree().knobs())
needs_nvcc = pytest.mark.skipif(not builds.nvcc(), reason="nvcc is missing")


def extract(*words, **environment):
    done = subprocess.run([os.path.join(ROOT, "run_all.sh"), "extract", *words], capture_output=True, text=True,
                          env={**os.environ, **environment})
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def texts():
    return {name: extract(name)[1] for name in LINES}


@pytest.mark.parametrize("name", LINES)
def test_no_knob_is_left(texts, name):
    text = texts[name]
    # Below the first #include only comments and sentences may name a knob.
    code = re.sub(r'//.*|"[^"\n]*"', "", text[text.index("#include"):])
    assert not re.findall(rf"\b(?:{KNOBS}|SDPA_(?:KNOB|REFUSE|SIMT|NAMESPACE)[A-Z_]*|[A-Z_]*_(?:text|changed))\b", code)
    assert "\n\n\n" not in text and "Permission is hereby granted" in text


@needs_nvcc
def test_machine_code_is_the_lines(texts, tmp_path):
    lines = builds.build(builds.parse_contenders(LINES), *ARCHS)

    def code(name, one):
        (tmp_path / f"{name}.cu").write_text(texts[name])
        done = builds.run([builds.nvcc(), *builds.NVCC_OPTIONS, *(f"-gencode=arch=compute_{arch},code=sm_{arch}"
                                                                for arch in one.line.archs(ARCHS)),
                           "-c", f"{name}.cu", "-o", f"{name}.o"], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return builds.machine_code((tmp_path / f"{name}.o").read_bytes())
    with ThreadPoolExecutor(builds.JOBS) as pool:
        found = pool.map(lambda one: (one, code(one.line.name, one)), lines.values())
        for one, extracted in found:
            with open(one.path, "rb") as file:
                assert sorted(builds.machine_code(file.read())) == sorted(extracted) != [], one.line.name


@needs_nvcc
def test_two_in_one_program(texts, tmp_path):
    """The first one compiled by the command that stands on top of it."""
    (tmp_path / "my_kernel.cu").write_text(texts["scalar_minimal"])
    command = shlex.split(re.search("^// Compile: (nvcc .*)$", texts["scalar_minimal"], re.MULTILINE).group(1))
    subprocess.run([builds.nvcc(), *command[1:]], cwd=tmp_path, check=True)
    (tmp_path / "other.cu").write_text(extract("scalar_vec8", "--namespace", "other")[1])
    (tmp_path / "program.cu").write_text("""#include "other.cu"
namespace scalar_minimal { struct SdpaParams; struct SdpaStatus; SdpaStatus sdpa_forward(const SdpaParams&, cudaStream_t); }
int main() { return other::sdpa_forward({}, 0).ok() ? 0 : 1; }
""")
    subprocess.run([builds.nvcc(), "-std=c++17", "-arch=sm_80", "-w", "program.cu", "my_kernel.cu", "-o", "program"],
                   cwd=tmp_path, check=True)


@pytest.mark.parametrize("words,sentence", [
    ("", "extract: which line?"),
    ("mma_lasy3", "mma_lasy3: no line of configs.txt has that name; it has: "),
    ("mma_lazy mma_split2", "extract takes one line, and mma_lazy and mma_split2 are two"),
    ("mma_lazy --frob", "extract: --frob: no such option"),
    ("mma_lazy --namespace", "extract: --namespace: its value is missing"),
    ("mma_lazy --namespace 1x", "extract: --namespace 1x: want a name of C++")])
def test_refusals(words, sentence):
    code, out, err = extract(*words.split())
    assert code == 2 and sentence in err and not out


@pytest.mark.parametrize("name,sentence", [
    ("typo", "bad.txt:1: no knob is called BLOK_N"),
    ("illegal", "HEAD_DIM: not a legal value; it takes one of: 64 128 256"),
    ("words", "bad.txt:3: BLOCK_N has no value: write BLOCK_N=VALUE")])
def test_bad_lines(tmp_path, name, sentence):
    (tmp_path / "bad.txt").write_text("typo BLOK_N=64\nillegal HEAD_DIM=96\nwords BLOCK_N\n")
    code, out, err = extract(name, SDPA_CONFIGS=str(tmp_path / "bad.txt"))
    assert code == 2 and sentence in err and not out


def test_words_on_stderr(tmp_path):
    assert "missing.txt: there is no such file" in extract("mma_lazy", SDPA_CONFIGS=str(tmp_path / "missing.txt"))[2]
    assert "scalar_racy is marked expect=FAIL" in extract("scalar_racy")[2]
