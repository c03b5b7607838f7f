"""Runs the examples in docs/USING.md verbatim: C++ and ctypes on the CPU backend, PyTorch's on fake tensors and, with a GPU, on
real ones. test_transformers.py has the one for transformers.  usage: python3 -m pytest tests/test_using.py"""
import ctypes
import os
import re
import shutil
import subprocess
import sys

import pytest

import builds
import tool

ROOT = builds.ROOT
TEXT = builds.Tree().read("docs/USING.md")


def blocks(heading, language):
    section = re.search(rf"^## {heading}.*?(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE).group()
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def knobs(name):
    return builds.Tree().config_lines()[name].knobs


def test_the_blocks_are_found():
    assert [len(blocks(*where)) for where in (("C and C\\+\\+", "cpp"), ("Python without", "python"), ("PyTorch", "python"),
                                              ("pip", "sh"), ("FlashAttention-3's", "python"), ("transformers", "python"))] == [1, 1, 2, 1, 2, 1]
    names = ("sdpa.h", "pytorch.py", "context_parallel.py", "transformers_attention.py", "flash_attn_3")
    assert set(re.findall(r"bindings/[\w.]+", TEXT)) == {"bindings/" + name for name in names}


@pytest.mark.parametrize("name", ["scalar_async2", *(pytest.param(name, marks=pytest.mark.long) for name in ("hopper", "mma_decode"))])
def test_the_cpp_example(name, tmp_path):
    """Builds it as a target of another project, then with the two commands, with the CPU backend's headers instead of CUDA's."""
    (tmp_path / "example.cpp").write_text(blocks("C and C\\+\\+", "cpp")[0])
    (tmp_path / "CMakeLists.txt").write_text(blocks("C and C\\+\\+", "cmake")[0].replace("sdpa_hopper_lib", f"sdpa_{name}_lib"))
    (tmp_path / "sdpa").symlink_to(ROOT)
    (tmp_path / "bindings").symlink_to(os.path.join(ROOT, "bindings"))

    def run(command, **options):
        return subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, **options)
    compiler = {**os.environ, "CXX": tool.unoptimized(tmp_path)}
    for command in ("cmake -B outer -DSDPA_CPU=ON", "cmake --build outer"):
        assert run(command.split(), env=compiler).returncode == 0
    made = {path.name for path in (tmp_path / "outer").rglob("*") if path.is_file() and os.access(path, os.X_OK)}
    assert {file for file in made if "sdpa" in file} == {f"libsdpa_{name}_lib.so"}
    (tmp_path / "build").symlink_to("outer/sdpa")
    compiling = blocks("C and C\\+\\+", "sh")[0].replace("\\\n", "").splitlines()[1]
    for old, new in (("hopper", name), ("-I/usr/local/cuda/include", f"-I{ROOT}/cpu_backend"), ("-L/usr/local/cuda/lib64 -lcudart", "-pthread -w")):
        compiling = compiling.replace(old, new)
    assert run(compiling, shell=True).returncode == 0
    for program in ("outer/example", "./a.out"):
        done = run([program])
        assert (done.returncode, done.stdout) == (0, "O is right\n"), done.stdout + done.stderr


EXTENSION = """
import torch
import torch.nn.functional as F
from torch.utils.cpp_extension import load
own = load("my_attention", ["my_attention.cu"], build_directory=".")
q, k = (torch.randn(2, 99, heads, 64, dtype=torch.bfloat16, device="cuda" if torch.cuda.is_available() else "cpu").transpose(1, 2)
        for heads in (8, 2))
try:
    o = own.attention(q, k, k, True)
    assert (o - F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)).abs().max() < 0.02
except RuntimeError as error:
    assert not q.is_cuda and "want bf16 [B,H,S,D] on the GPU" in str(error), error
"""


@pytest.mark.long
@pytest.mark.skipif(not builds.nvcc() or not shutil.which("ninja"), reason="nvcc or ninja is missing")
def test_the_extension_of_an_extract(tmp_path):
    pytest.importorskip("torch")
    name, word = re.search(r"extract (mma_lazy) (DTYPE=BF16) > mma_lazy.cu", TEXT).groups()
    code, own, trouble = tool.run("extract", name, word)
    assert code == 0, trouble
    (tmp_path / "mma_lazy.cu").write_text(own)
    (tmp_path / "my_attention.cu").write_text(next(one for one in blocks("Paste it", "cpp") if "PYBIND11_MODULE" in one))
    done = subprocess.run([sys.executable, "-c", EXTENSION], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "TORCH_CUDA_ARCH_LIST": "8.0+PTX", "MAX_JOBS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.long
@pytest.mark.skipif(not builds.nvcc() or not shutil.which("cmake"), reason="nvcc is missing")
def test_in_a_cuda_project(tmp_path):
    """The project's own architectures are nvcc's default, which includes one that is too old."""
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(outer LANGUAGES CXX CUDA)\ninclude(FetchContent)\n"
        f"FetchContent_Declare(sdpa SOURCE_DIR {ROOT})\nFetchContent_MakeAvailable(sdpa)\n")
    for command in ("cmake -B build -DCMAKE_CUDA_ARCHITECTURES=75;80", "cmake --build build --target sdpa_scalar_minimal_lib"):
        done = subprocess.run(command.split(), cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              env={**os.environ, "CUDACXX": builds.nvcc()})
        assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in tmp_path.rglob("*.so")] == ["libsdpa_scalar_minimal_lib.so"]


class HostArray:
    """An array in the CPU backend's device memory, as CuPy and PyTorch show theirs."""

    def __init__(self, library, values):
        library.host_allocate.restype = ctypes.c_void_p
        self.pointer, self.shape, self.dtype = library.host_allocate(ctypes.c_size_t(values.nbytes)), values.shape, values.dtype
        ctypes.memmove(self.pointer, values.ctypes.data, values.nbytes)
        self.strides = values.strides

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.pointer, False), "version": 3, "strides": self.strides}

    def numpy(self):
        import numpy as np
        out = np.empty(self.shape, self.dtype)
        ctypes.memmove(out.ctypes.data, self.pointer, out.nbytes)
        return out


def test_the_ctypes_example():
    """A call and a refusal. A library reports the launch dimensions of its calls; with several tiles, the maximum of shared memory."""
    np = pytest.importorskip("numpy")
    space, header = {}, builds.structs_of(builds.Tree().read(builds.HEADER))["SdpaParams"]
    exec(blocks("Python without", "python")[0], space)
    for name, _ in space["Params"]._fields_:
        assert getattr(space["Params"], name).offset == getattr(header, name.replace("descales", "q_descale")).offset
    path = builds.host_library(*knobs("ampere"), "STAGES=2", program="tests/host_library.cu")
    library, random, launches = ctypes.CDLL(path), np.random.default_rng(0), set()
    assert library.sdpa_library_params_bytes() == ctypes.sizeof(header) >= ctypes.sizeof(space["Params"])
    for group, Sq in (2, 30), (2, 300):
        q, k, v = (random.standard_normal((1, heads, rows, 64)).astype(np.float16)
                   for heads, rows in ((2 * group, Sq), (2, Sq + 20), (2, Sq + 20)))
        arrays = [HostArray(library, x) for x in (q, k, v, np.zeros_like(q))]
        space["attention"](library, *arrays, causal=1, window_left=20)
        library.host_synchronize()
        launches.add((library.host_last_threads(), library.host_last_shared_bytes()))
        K, V = (x.astype(float).repeat(group, 1) for x in (k, v))
        own = np.arange(Sq)[:, None] + 20
        S = np.where((np.arange(Sq + 20) <= own) & (np.arange(Sq + 20) >= own - 20), q.astype(float) @ K.swapaxes(2, 3) / 8, -np.inf)
        P = np.exp(S - S.max(-1, keepdims=True))
        assert np.abs(arrays[3].numpy() - P / P.sum(-1, keepdims=True) @ V).max() < 2e-3
    assert len(launches) == 2, "a tile was not taken"
    with open(path, "rb") as file:
        threads, shared_bytes, _ = builds.launch_of(file.read())
    assert threads in {x for x, _ in launches} and shared_bytes == max(x for _, x in launches)
    with pytest.raises(RuntimeError, match="Q is a null pointer"):
        space["attention"](library, *arrays, Q=None)


@pytest.mark.long
def test_pytorch_on_fake_tensors():
    """The examples' calls, shapes and names with tensors without memory."""
    torch = pytest.importorskip("torch", minversion="2.11")
    if not builds.nvcc():
        pytest.skip("nvcc is missing")
    program = "\n".join(blocks("PyTorch", "python"))
    if not torch.cuda.is_available():
        program = program.replace("import pytorch as sdpa\n", "import pytorch as sdpa\n" + """
sdpa.why_not = lambda q, k, v, **options: ""
F.scaled_dot_product_attention = lambda q, k, v, **options: torch.empty_like(q)
torch.compile = lambda function, fullgraph: function
torch._subclasses.FakeTensorMode().__enter__()
""")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "SDPA_CACHE": os.path.join(builds.BUILD, "pytorch")})
    assert (done.returncode, done.stdout) == (0, "sdpa's kernel ran\n"), done.stderr
