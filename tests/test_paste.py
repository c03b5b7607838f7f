"""Tests of the pasting and gradient examples in docs/USING.md, compiled verbatim: the first with its own knobs and with those of a line
of each family, some of which need a workspace, together with a second build of the marked region. They run on the CPU backend;
the first also compiles with nvcc and runs on a GPU if there is one.  usage: python3 -m pytest tests/test_paste.py"""
import os
import re
import subprocess

import pytest

import builds

ROOT = builds.ROOT
TREE = builds.Tree()
HEAD, BODY = re.search(r"^## Paste it.*?```cpp\n(.*?#include \"sdpa.cu\"\n)(.*?)```", TREE.read("docs/USING.md"),
                       re.DOTALL | re.MULTILINE).groups()
CPU = [os.environ.get("CXX", "g++"), "-march=native", "-ffp-contract=off", "-pthread", "-I" + os.path.join(ROOT, "cpu_backend")]
FAMILIES = "USING wgmma_swap32 wmma_persistent scalar_async2 mma_lazy wgmma_192x128 hopper".split()
QUICK = 2  # of them: the page's own, and a workspace with TMA
PROGRAM = """%s
#include <vector>

int run_second_build();  // paste_second.cu; 0 if its result is right

int main() {
  // Q = 0 gives equal weights: every row of O is the mean of V, here the mean of 0..99 in each head.
  const int B = 1, H = 2, S = 100;
  const cudaStream_t stream = 0;
  const size_t n = size_t(B) * H * S * 64;
  std::vector<__half> zeros(n, __half(0.0f)), host(n);
  for (size_t i = 0; i < n; i++) host[i] = __half(float(i / 64 %% S));
  __half *Q = nullptr, *K = nullptr, *V = nullptr, *O = nullptr;
  for (__half** tensor : {&Q, &K, &V, &O}) {
    if (cudaMalloc(tensor, n * sizeof(__half)) != cudaSuccess) return 77;
    cudaMemcpy(*tensor, tensor == &V ? host.data() : zeros.data(), n * sizeof(__half), cudaMemcpyHostToDevice);
  }
%s
  if (cudaMemcpy(host.data(), O, n * sizeof(__half), cudaMemcpyDeviceToHost) != cudaSuccess) return 1;
  for (__half x : host) {
    if (!(std::fabs(float(x) - 49.5f) <= 0.05f)) return printf("O has %%g, want 49.5\\n", double(float(x))), 1;
  }
  return run_second_build();
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the example programs and the second build's source."""
    path = tmp_path_factory.mktemp("paste")
    text = TREE.read("sdpa.cu")
    (path / "pasted_region.cuh").write_text(text[text.index("// ==== COPY FROM HERE"):text.index("// ==== COPY TO HERE")])
    for name in FAMILIES:
        knobs = [] if name == "USING" else [word.replace("=", " ") for word in TREE.config_lines()[name].knobs]
        head = "\n".join(["#define SDPA_NO_MAIN", *("#define " + knob for knob in knobs), '#include "sdpa.cu"']) if knobs else HEAD
        (path / f"{name}.cu").write_text(PROGRAM % (head, BODY))
    return path


def ran(folder, name, compiler, *libraries):
    """Compiles the named example, links it to the second build and runs it. The second build is compiled once per compiler."""
    def run(*words):
        done = subprocess.run([*compiler, *words], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    def compile_to(output, source):
        kind = ["-x", "c++", "-w"] if compiler[0] != builds.nvcc() else ["-x", "cu", "-Xcompiler=-Wall,-Wextra,-Werror"]
        run("-std=c++17", *kind, "-I" + ROOT, "-I.", "-c", source, "-o", output)
    second = f"second_{builds.digest(*compiler)}.o"
    if not (folder / second).exists():
        compile_to(second, os.path.join(ROOT, "tests", "paste_second.cu"))
    compile_to(f"{name}.o", f"{name}.cu")
    run(f"{name}.o", second, *libraries, "-o", name)
    return subprocess.run([folder / name], capture_output=True, text=True)


@pytest.mark.parametrize("name", [*FAMILIES[:QUICK], *(pytest.param(name, marks=pytest.mark.long) for name in FAMILIES[QUICK:])])
def test_on_the_cpu_backend(folder, name):
    done = ran(folder, name, CPU, builds.host_engine())
    assert done.returncode == 0, done.stdout + done.stderr


def test_gradients(folder):
    """The gradients of sum(O), with Q = 0 and a causal mask: row k of dV is the sum of 1 / (q + 1) over the queries q from k on, dQ and dK are 0."""
    head, body = re.search(r"^## Gradients.*?```cpp\n(.*?#include \"sdpa_backward.cu\"\n)(.*?)```", TREE.read("docs/USING.md"),
                           re.DOTALL | re.MULTILINE).groups()
    text = PROGRAM.partition("  __half *Q")[0] % head + """
  float* LSE = nullptr;
  __half *Q, *K, *V, *O, *dO, *dQ, *dK, *dV;
  for (__half** tensor : {&Q, &K, &V, &O, &dO, &dQ, &dK, &dV}) {
    cudaMalloc(tensor, n * sizeof(__half));
    if (tensor == &dO) zeros.assign(n, __half(1.0f));
    cudaMemcpy(*tensor, zeros.data(), n * sizeof(__half), cudaMemcpyHostToDevice);
  }
  cudaMalloc(&LSE, size_t(B) * H * S * sizeof(float));
""" + body + """
  if (!status.ok()) return 1;
  for (__half* tensor : {dQ, dK, dV}) {
    cudaMemcpy(host.data(), tensor, n * sizeof(__half), cudaMemcpyDeviceToHost);
    for (size_t i = 0; i < n; i++) {
      double want = 0;
      for (int q = i / 64 % S; q < S && tensor == dV; q++) want += 1.0 / (q + 1);
      if (!(std::fabs(float(host[i]) - want) <= 2e-3 * (1 + want))) return printf("%zu: %g, want %g\\n", i, double(float(host[i])), want), 1;
    }
  }
}
"""
    (folder / "of_gradients.cu").write_text(text)
    subprocess.run([*CPU, "-w", "-std=c++17", "-I" + ROOT, "-x", "c++", "of_gradients.cu", "-x", "none", builds.host_engine(),
                    "-o", "of_gradients"], cwd=folder, check=True)
    done = subprocess.run([folder / "of_gradients"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_builds_of_one_namespace(folder):
    """Each build must refuse a D that is not its own, or a factor that its type does not have."""
    knobs = ["DTYPE BF16", "HEAD_DIM 128"]
    text = """#define SDPA_NO_MAIN
%s
#include "sdpa.cu"
const char* ask%d() {
  static sdpa::SdpaStatus status;
  sdpa::SdpaParams p{};
  p.D = 64, p.q_descale.factor = reinterpret_cast<float*>(&status);
  return (status = sdpa::sdpa_forward(p, 0)).text;
}
"""
    names = [f"ask{n}" for n in range(len(knobs))]
    for n, knob in enumerate(knobs):
        (folder / f"ask{n}.cu").write_text(text % ("#define " + knob, n))
    (folder / "ask.cpp").write_text("#include <cstdio>\n" + "".join(f"const char* {name}();\n" for name in names) +
                                    "int main() { " + "".join(f"puts({name}()); " for name in names) + "}\n")
    sources = [*(name + ".cu" for name in names), "ask.cpp", "-x", "none", builds.host_engine()]
    subprocess.run([*CPU, "-w", "-std=c++17", "-I" + ROOT, "-x", "c++", *sources, "-o", "ask"], cwd=folder, check=True)
    answers = subprocess.check_output([folder / "ask"], text=True).split("\n")
    assert "is for builds with an 8-bit DTYPE" in answers[0] and "HEAD_DIM=128" in answers[1]


@pytest.mark.skipif(not builds.nvcc(), reason="nvcc is missing")
@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_by_nvcc(folder, name):
    arch = "90a" if "wgmma" in name or name == "hopper" else "80"
    done = ran(folder, name, [builds.nvcc(), f"-gencode=arch=compute_{arch},code=sm_{arch}"])
    assert done.returncode in (0, 77), done.stdout + done.stderr
