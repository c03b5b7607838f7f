"""Tests of pip install ./bindings: the wheel in a virtual environment, with tensors without memory; `python -m sdpa build` with
a fake nvcc, and its cache without nvcc.  usage: python3 -m pytest tests/test_pip.py

Importing PyTorch takes seconds, so few processes do: one has the installed package, and this one runs a clone's commands."""
import base64
import contextlib
import email
import hashlib
import io
import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "bindings"), os.path.join(ROOT, "tools")]
MAIN = open(os.path.join(ROOT, "bindings", "__main__.py")).read()
import builds  # noqa: E402

try:
    import torch
    import pytorch as sdpa
except ImportError:  # the wheel itself needs no PyTorch
    torch = None
NVCC = """#!/bin/sh
[ "$1" = --version ] && echo 13.0 && exit
[ "$1" = --list-gpu-code ] && echo sm_75 sm_90 sm_120 && exit
echo begin >>"$CALLS"
sleep 0.3
for word; do [ "$last" = -o ] && echo "$*" >"$word"; last=$word; done
echo end >>"$CALLS"
"""


def run(*command, folder=None, **environment):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True,
                          env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def need_torch():
    if torch is None:
        pytest.skip("PyTorch 2.11 or newer is missing")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that pip builds from bindings/ without network and without setuptools."""
    folder = tmp_path_factory.mktemp("wheel")
    source = os.path.join(ROOT, "bindings")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "-w", str(folder), source)
    made, = folder.iterdir()
    return made


def test_the_wheel(wheel):
    """One small wheel for all platforms contains nvcc's inputs, nothing compiled and a correct RECORD; sdpa is the only top-level name."""
    assert wheel.name.endswith("-py3-none-any.whl") and wheel.stat().st_size < 1_000_000
    with zipfile.ZipFile(wheel) as file:
        found = {name: file.read(name) for name in file.namelist()}
    info, = {name.split("/")[0] for name in found} - {"sdpa"}
    assert re.fullmatch(r"sdpa-[\d.]+\.dist-info", info)
    needed = {path for name in ("library.cu", "append.cu", "pytorch.cpp")
              for path in builds.Tree().sources("bindings/" + name) if not path.startswith("cpu_backend/")}
    needed = {path for path in needed if not builds.is_of_harness(path)} | {"configs.txt"}
    for name in needed:
        with open(os.path.join(ROOT, name), "rb") as file:
            assert found["sdpa/" + name] == file.read()
    kinds = {os.path.splitext(name)[1] for name in found if name.startswith("sdpa/")}
    assert kinds <= {".py", ".cu", ".cpp", ".h", ".txt", ""}
    metadata = email.message_from_bytes(found[info + "/METADATA"])
    assert metadata["Name"] == "sdpa" and metadata.get_all("Provides-Extra") == ["nvcc13"]
    assert sorted(metadata.get_all("Requires-Dist")) == sorted(["torch>=2.11", *(
        f'nvidia-{name}==13.*; extra == "nvcc13"' for name in ("cuda-nvcc", "cuda-crt", "cuda-cccl", "cuda-runtime", "nvvm"))])
    rows = [row.rsplit(",", 2) for row in found.pop(info + "/RECORD").decode().splitlines()]
    assert rows.pop() == [info + "/RECORD", "", ""] and [name for name, *_ in rows] == list(found)
    for name, digest, size in rows:
        assert digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(found[name]).digest()).decode().rstrip("=")
        assert int(size) == len(found[name])


INSTALLED = """
import contextlib, io, json, os, runpy, sys, torch, importlib.metadata, importlib.util
from torch._subclasses import FakeTensorMode
import sdpa
from sdpa import flash_attn_interface as fa

def command(*words, **environment):
    os.environ.update(environment)
    sys.argv, out = ["sdpa", *words], io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_module("sdpa", run_name="__main__")
        except SystemExit as end:
            assert not end.code, end.code
    return out.getvalue()

assert sdpa.attention.__module__ == "sdpa.pytorch" and fa.sdpa is sys.modules["sdpa.pytorch"]
sdpa.pytorch.first_call.library = None  # fake tensors do without pytorch.cpp
assert "pytorch" not in sys.modules and sdpa.pytorch.knobs_of("hopper")["USE_WGMMA"] == "1"
with FakeTensorMode():
    q, k = (torch.empty(2, H, 100, 128, device="cuda", dtype=torch.bfloat16) for H in (8, 2))
    out, lse = sdpa.attention(q, k, k, causal="br", return_lse=True)
    rows = fa.flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2), causal=True)
assert [tuple(x.shape) for x in (out, lse, rows)] == [(2, 8, 100, 128), (2, 8, 100), (2, 100, 8, 128)]
assert importlib.util.find_spec("flash_attn_interface") is None
words, *environments = json.loads(sys.argv[1])
builds = [command("build", *words, **environment) for environment in environments]
sys.path[:0] = command("path").strip().split(":")
assert importlib.util.find_spec("pytorch") is None  # torchvision would import it
import flash_attn_interface
assert flash_attn_interface.sdpa is sys.modules["sdpa.pytorch"]
for name in ("flash_attn_interface", "flash_attn_3"):
    assert importlib.metadata.packages_distributions()[name] == ["flash-attn-3"]
assert importlib.metadata.version("flash_attn_3")[:2] == "3."
if importlib.util.find_spec("transformers"):
    from sdpa import transformers_attention as ours
    assert ours.NAME == "attention_cu"
print(json.dumps(builds))
"""


def test_installed(wheel, nvcc, tmp_path):
    """In an environment with the wheel, outside the clone: imports sdpa and runs it on fake tensors. Builds every library that the
    arguments name, several concurrently, then again without nvcc; calls use the same file names. flash_attn_interface is importable
    only from the folder that `python -m sdpa path` prints."""
    need_torch()
    folder = tmp_path / "environment"
    (tmp_path / "nvcc").write_text(NVCC.replace("sm_75", "sm_80"))
    run(sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(folder))
    run(sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--no-deps", "--no-index", str(wheel))
    words = ("sm_90a", "sm_80", "bf16", "e4m3", "128", "192x128", "plain", "sinks+pages", "backward", "--jobs", "3")
    without = {**nvcc, "PATH": "/usr/bin:/bin", "CUDA_HOME": str(tmp_path / "no")}
    out = run(str(folder / "bin/python"), "-c", INSTALLED, json.dumps([words, nvcc, without]), folder=folder,
              PYTHONPATH=os.path.dirname(os.path.dirname(torch.__file__)))
    said, again = json.loads(out.splitlines()[-1])
    calls = (tmp_path / "calls").read_text().split()
    names = {re.sub(r"-[0-9a-f]{16}-[0-9a-f]{16}\.so$", "", path.name) for path in (tmp_path / "cache").glob("*.so")}
    want = {f"pytorch-{torch.__version__}", "append-sm_90a", "append-sm_80"}
    kinds = ((9, 0), torch.bfloat16), ((9, 0), torch.float8_e4m3fn), ((8, 0), torch.bfloat16)  # e4m3 is sm_90's
    for kind, D, features in itertools.product(kinds, (128, 192), (0, 2 + 4 + 8)):
        want.add(sdpa.build_of(*sdpa.line_with(*kind, D, 128, features))[0])
        if kind[1] == torch.bfloat16 and features == 0:
            want |= {sdpa.build_of(*sdpa.backward_line_with(*kind, D, 0, asked)[0])[0] for asked in (sdpa.NEEDED, sdpa.NEEDED | sdpa.DETERMINISTIC)}
    assert names == want and len(calls) == 2 * len(want)
    assert max(itertools.accumulate(1 if call == "begin" else -1 for call in calls)) == 3  # at a time
    numbers, paths = zip(*re.findall(r"^(\d+ of \d+): (.*\.so)$", said, re.M))
    assert numbers == tuple(f"{i} of {len(want)}" for i in range(1, len(want) + 1))
    assert sorted(re.findall(r": (.*\.so)$", again, re.M)) == sorted(paths)


# The CUDA releases of the nvcc of CUDA_HOME, PATH and pip's packages; which of them a PyTorch of CUDA 13 takes.
SEARCHES = [("13.1", "13.0", "13.5", "home"), ("12.4", "13.0", "", "path"), ("12.4", "12.9", "13.5", "pip"),
            ("", "12.9", "", "path/nvcc is of CUDA 12, "),
            ("", "", "", "nvcc is missing; install the CUDA Toolkit 12.4 or newer, or put its bin folder on PATH")]


@pytest.mark.parametrize("home, path, pip, found", SEARCHES)
def test_which_nvcc(home, path, pip, found, tmp_path, monkeypatch):
    need_torch()
    folders = dict(home=tmp_path / "home/bin", path=tmp_path / "path", pip=tmp_path / "site-packages/nvidia/cu13/bin")
    for folder, release in zip(folders.values(), (home, path, pip)):
        folder.mkdir(parents=True)
        if release:
            (folder / "nvcc").write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n".replace("release ?", ""))
            (folder / "nvcc").chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path}/path:/bin")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    if found in folders:
        assert sdpa.nvcc() == str(folders[found] / "nvcc")
        return
    with pytest.raises(sdpa.Unavailable) as refused:
        sdpa.nvcc()
    assert found in str(refused.value) and str(refused.value).endswith('or in a clone type: pip install "./bindings[nvcc13]"')
    assert "is missing" in found or "this PyTorch is built for CUDA 13; set CUDA_HOME to a CUDA Toolkit 13" in str(refused.value)
    monkeypatch.setattr(torch.version, "cuda", "12.6")  # whose nvcc pip does not have
    with pytest.raises(sdpa.Unavailable, match="put its bin folder on PATH$|is of CUDA 14, .* a CUDA Toolkit 12$") if path != "12.9" else (
            contextlib.nullcontext()):
        assert sdpa.nvcc() == str(folders["path"] / "nvcc")


@pytest.mark.long
def test_nvcc_by_pip(wheel, tmp_path):
    """The packages of bindings[nvcc13] compile a line and the interface where there is no other nvcc. pip downloads 372 MB."""
    need_torch()
    if (torch.version.cuda or "").partition(".")[0] != "13":
        pytest.skip("PyTorch is not of CUDA 13")
    python = str(tmp_path / "environment/bin/python")
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "environment"))
    install = sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"
    run(*install, "--no-index", str(wheel))
    required = run(python, "-c", "import importlib.metadata as m; print(*(x.split(';')[0] for x in m.requires('sdpa') if 'extra' in x))").split()
    done = subprocess.run([*install, *required], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip: {done.stderr.strip().splitlines()[-1]}")
    program = """
import sdpa
assert "/environment/" in sdpa.pytorch.nvcc()
for build in (sdpa.pytorch.build_of_appender((9, 0)), sdpa.pytorch.build_of("hopper_d128", (9, 0)), sdpa.pytorch.build_of_glue()):
    print(sdpa.pytorch.built(*build))
"""
    without = dict(PATH="/usr/bin:/bin", CUDA_HOME=str(tmp_path / "none"), SDPA_CACHE=str(tmp_path / "cache"),
                   PYTHONPATH=os.path.dirname(os.path.dirname(torch.__file__)))
    assert shutil.which("nvcc", path=without["PATH"]) is None
    assert run(python, "-c", program, folder=tmp_path, **without).count(".so\n") == 3


@pytest.fixture
def nvcc(tmp_path):
    (tmp_path / "nvcc").write_text(NVCC)
    (tmp_path / "nvcc").chmod(0o755)
    return dict(PATH=f"{tmp_path}:{os.environ['PATH']}", CALLS=str(tmp_path / "calls"), CUDA_HOME="", CUDA_PATH="",
                SDPA_CACHE=str(tmp_path / "cache"))


def program(*words, folder=ROOT, **environment):
    """Runs the folder bindings/ as a program in a clone."""
    need_torch()
    out, error = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["bindings", *words])
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as end:
            runpy.run_path(os.path.join(ROOT, "bindings"), run_name="__main__")
        if isinstance(end.value.code, str):  # which Python prints
            print(end.value.code, file=sys.stderr)
    return SimpleNamespace(returncode=1 if isinstance(end.value.code, str) else int(end.value.code), stdout=out.getvalue(),
                           stderr=error.getvalue())


@pytest.mark.parametrize("words, sentence", [
    *((f"sm_90 sm_120 {gpu} bf16 128", f"nvcc does not compile for {gpu}, only for sm_90, sm_120") for gpu in ("sm_91", "sm_900", "sm_80")),
    ("sm_90a bf16 128 fast", "sdpa: fast is no GPU, type, D or option; python -m sdpa --help lists them"),
    *((f"sm_90a {word} 128", f"sdpa: {word} is no GPU, type, D or option; did you mean {meant}?")
      for word, meant in (("bf61", "bf16"), ("--job", "--jobs"))),
    ("sm_90a 128", "sdpa: build needs a type, as in bf16"),
    ("sm_90a bf16 128 score_mod=s;1", "sdpa.attention: score_mod: ';' at character 2 is not allowed there; docs/USING.md"),
    ("sm_90a bf16 128 score_mod=s score_mod=-s", "sdpa: score_mod is given twice; all builds have the same expressions"),
    ("bf16 128", "sdpa: build needs a GPU, as in sm_90a"),
    ("sm_90a bf16 128 --jobs 0", "sdpa: --jobs 0: want a whole number from 1")])
def test_words_that_are_none(nvcc, words, sentence):
    done = program("build", *words.split(), **nvcc)
    where = nvcc["PATH"].partition(":")[0]
    assert done.returncode == 1 and done.stderr.replace(f"sdpa: {where}/", "").startswith(sentence) and done.stderr.count("\n") == 1
    assert not os.path.exists(nvcc["CALLS"])


@pytest.mark.parametrize("size", ["64x128", "128x64", "128"])
def test_gradients_have_the_builds_of_the_larger_size(nvcc, monkeypatch, size):
    """As a call asks for them: D and D of V are padded to the larger one."""
    need_torch()
    monkeypatch.setenv("PATH", nvcc["PATH"])
    main = runpy.run_path(os.path.join(ROOT, "bindings", "__main__.py"), run_name="words")
    sdpa, found = main["sdpa"], main["builds_of"](["sm_90a", "bf16", size, "backward"])
    for asked in sdpa.NEEDED, sdpa.NEEDED | sdpa.DETERMINISTIC:
        assert sdpa.build_of(*sdpa.backward_line_with((9, 0), sdpa.torch.bfloat16, 128, 0, asked)[0]) in found


def test_words_that_no_build_has_together(nvcc):
    done = program("build", "sm_90a", "bf16", "e4m3", "128", "300", "kv8", "kv8+bias", "mask", **nvcc)
    q_is_e4m3 = "sdpa: left out: kv8 is for e4m3 k and v with a 16-bit q, but q is e4m3"
    no_bias = "sdpa: left out: a bias needs 16-bit k and v"
    size = "sdpa: left out: there is no line for D=300, Dv=300: both must be multiples of 8 from 8 to 256"
    left_out = [line for line in done.stderr.splitlines() if "left out" in line]
    assert done.returncode == 0 and {no_bias, q_is_e4m3, size} <= set(left_out)
    assert done.stdout.count(" of 4: ") == 4  # glue, append, and of bf16 kv8 and mask


def test_expressions(nvcc, monkeypatch):
    """Builds the libraries of calls with these expressions, up to whitespace."""
    words = "score_mod=s-x0[h]*real(q-k)", "mask_mod=i0[q]==i0[k]"
    done = program("build", "sm_90a", "bf16", "128", "plain", "sinks", "softcap", "mask", *words, **nvcc)
    assert done.stdout.count(" of 4: ") == 4  # glue, append, plain and sinks
    assert [line for line in done.stderr.splitlines() if "left out" in line] == [
        "sdpa: left out: softcap and bias cannot be combined with score_mod or mask_mod; write them into the expression"] * 2
    for name, value in nvcc.items():
        monkeypatch.setenv(name, value)
    for features in 0, 2:
        calls = sdpa.build_of(*sdpa.line_with((9, 0), torch.bfloat16, 128, 128, features, "s - x0[h] * real(q - k)", "i0[q] == i0[k]"))
        assert sdpa.built(*calls) in done.stdout.split()


@pytest.mark.parametrize("word", ("pages", "any_pages", "sinks+any_pages"))
def test_pages_have_lengths(nvcc, monkeypatch, word):
    """The library of a call with pages, which has lengths, too."""
    done = program("build", "sm_90a", "bf16", "128", word, **nvcc)
    for name, value in nvcc.items():
        monkeypatch.setenv(name, value)
    options = re.findall(r"\w+", re.search(r"OPTIONS = \[(.*?)\]", MAIN, re.DOTALL)[1])
    features = sum(1 << options.index(name) for name in ["lengths", *word.split("+")])
    assert sdpa.built(*sdpa.build_of(*sdpa.line_with((9, 0), torch.bfloat16, 128, 128, features, "", ""))) in done.stdout.split()


def test_a_relative_cache(nvcc, tmp_path):
    """nvcc runs in the clone; a relative cache path refers to the caller's folder."""
    done = program("build", "sm_90a", "bf16", "128", folder=tmp_path, **nvcc | {"SDPA_CACHE": "of_mine"})
    assert done.returncode == 0 and len([*(tmp_path / "of_mine").glob("*.so")]) == 3, done.stderr


def test_a_build_that_fails(nvcc, tmp_path):
    (tmp_path / "nvcc").write_text("#!/bin/sh\necho 'error: no room' >&2; exit 1\n")
    done = program("build", "sm_90a", "bf16", "128", **nvcc)
    assert done.returncode == 1 and done.stderr.count("nvcc could not build") == 3 and "error: no room" in done.stderr


def test_help_in_a_clone():
    said = program("--help")
    options = re.findall(r"\w+", re.search(r"OPTIONS = \[(.*?)\]", MAIN, re.DOTALL)[1])
    assert said.returncode == 0 and len(options) == len(sdpa.FEATURES) and all(option in said.stdout for option in options)
    assert program("path").stdout.split(os.pathsep)[0] == os.path.join(ROOT, "bindings")
    for words, sentence in ((["paths"], "sdpa: paths: did you mean path?"), (["path", "x"], "sdpa: path x: python -m sdpa --help has the commands"),
                            ([], "sdpa: a command is missing: python -m sdpa --help has the commands")):
        done = program(*words)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence + "\n")
