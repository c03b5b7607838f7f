"""usage: ./run_all.sh stress [NAME...] [--repeats N]
Runs lines of configs.txt (default: those with USE_WGMMA=1 or SPLIT_CTAS=0) N times on each of three problems and
compares O and LSE, or dQ, dK and dV, bitwise with a first run. dQ of lines that add it atomically may differ by the limit
of rel_rms instead. Prints CSV, a row per case: config,case,problem,repeats,check, where
check is PASS or FAIL. The cases:
  alone       the same launch again
  max_ctas_N  persistent lines: at most 1, 3 or 7 CTAs
  beside      while another kernel keeps an eighth of the SMs and the memory busy; prints its traffic to stderr
  stages_N    the line with STAGES=2, 3 or 4, which must give the same bits; builds that are illegal are listed on
              stderr. Not for lines with SPLIT_CTAS=0, whose splits depend on the number of CTAs that fit
  --repeats N  runs of each case (default 1000)
exit: 0 all results are bitwise equal, 1 some are not, 2 bad usage, 3 something could not be run
"""
import contextlib
import ctypes
import os
import threading
import time

import numpy as np

import builds
import cli
import engine
from cli import Refused, say

PROBLEMS = {"1,8,8,512,512": "off", "2,8,2,1000,1777": "br", "1,8,8,4096,4096": "br"}
HOG, NOT_READY = "tools/hog.cu", 600  # CUDA_ERROR_NOT_READY


def variants(line):
    """{case: the line with other STAGES}; these must give the same bits."""
    others = "" if line.knob("SPLIT_CTAS") == "0" else "234".replace(line.knob("STAGES", "1"), "")
    return {f"stages_{stages}": builds.change_line(line, f"STAGES={stages}") for stages in others}


def difference(first, now, p, outputs):
    """Describes the first difference of a result from the first run; "" if it repeats."""
    q, k = (p.B, p.Hq, p.Sq), (p.B, p.Hkv, p.Sk)
    shapes = {"O": (*q, p.v_dim), "LSE": q}
    if isinstance(outputs, engine.Gradients):
        shapes = {"dQ": (*q, p.D), "dK": (*k, p.D), "dV": (*k, p.v_dim)}
    for (name, shape), a, b in zip(shapes.items(), first, now):
        other = np.flatnonzero(a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}"))
        if not other.size:
            continue
        if name == "dQ" and not outputs.repeats:
            a, b = a.astype(np.float64), b.astype(np.float64)
            rel_rms = np.linalg.norm(b - a) / max(np.linalg.norm(a), 1e-30)
            if rel_rms <= outputs.forward.limits[0]:
                continue
            return f"differs from the first one by a rel_rms of {rel_rms:.1e} in dQ"
        place = f"{name}({','.join(map(str, np.unravel_index(other[0], shape)))})"
        return f"differs from the first one in {other.size} elements of {name}, the first {place}"
    return ""


def repeat(bench, kernel, problem, first, repeats, max_ctas=0):
    """Runs a kernel repeatedly. Returns a sentence about the first run that differs from the first one, or ""."""
    kernel.max_ctas = max_ctas
    launch, outputs, _ = kernel.prepare(bench.gpu, bench.tensors, problem)
    for number in range(1, repeats + 1):
        bench.poison(problem, outputs)
        launch()
        if sentence := difference(first, bench.read(problem, outputs), problem, outputs):
            return f"run {number} {sentence}"
    return ""


class Hog:
    """A kernel that keeps an eighth of the SMs and the memory busy."""

    def __init__(self, gpu, path):
        self.gpu, self.library, self.sms = gpu, ctypes.CDLL(path), gpu.attribute(engine.SM_COUNT)
        self.library.hog_bytes.restype, self.ctas = ctypes.c_size_t, self.sms // 8
        self.buffer = ctypes.c_void_p(gpu.allocate(self.ctas * self.library.hog_bytes()))
        self.memory = gpu.get(ctypes.c_void_p, "cuMemHostAlloc", 8 * (self.ctas + 1), 2)  # CU_MEMHOSTALLOC_DEVICEMAP
        self.moved = np.frombuffer((ctypes.c_uint64 * (self.ctas + 1)).from_address(self.memory.value), np.uint64)
        self.stream = gpu.new_stream()

    @contextlib.contextmanager
    def beside(self, text, problem, repeats):
        """Runs the kernel during the body and prints its memory traffic."""
        self.moved[:] = 0
        if self.library.hog_start(self.ctas, self.buffer, self.memory, self.stream):
            raise engine.CudaError("the background kernel could not be launched")
        begin = time.monotonic()
        while not self.moved[:-1].all():  # wait until all of its CTAs are running
            if time.monotonic() - begin > 20:
                raise engine.CudaError("the background kernel did not start within 20 seconds")
        begin, moved = time.monotonic(), self.moved.sum()
        yield
        seconds, moved = time.monotonic() - begin, self.moved.sum() - moved
        still_runs = self.gpu.api.cuStreamQuery(self.stream) == NOT_READY
        self.moved[-1] = 1
        self.gpu("cuStreamSynchronize", self.stream)
        if not still_runs or not moved:
            raise engine.CudaError(f"{problem}: the background kernel ended too early; use fewer --repeats")
        say(f"stress: {text}, {problem}: during its {repeats} runs, for {seconds:.3f} s, {self.ctas} CTAs on "
            f"{self.sms} SMs moved {moved * 1e-9:.1f} GB")


def stress(gpu, kernel, others, hog, problem, repeats):
    """Yields (case, a sentence if the results differ) for a line and a problem. others: kernels of its variants."""
    kernel.max_ctas, bench = 0, engine.Bench(gpu, {}, {"": problem})
    check, first, *_ = bench.run(kernel, problem)
    persistent = kernel.line.knob("USE_PERSISTENT_CTA") == "1"
    yield "alone", check.sentence or repeat(bench, kernel, problem, first, repeats)
    for max_ctas in (1, 3, 7) if persistent else ():
        yield f"max_ctas_{max_ctas}", repeat(bench, kernel, problem, first, repeats, max_ctas)
    if hog:
        max_ctas = hog.sms - hog.ctas if persistent else 0
        with hog.beside(kernel.text, problem, repeats):
            sentence = repeat(bench, kernel, problem, first, repeats, max_ctas)
        yield "beside", sentence
    for case, other in others.items():
        yield case, repeat(bench, other, problem, first, repeats)
    bench.close()


def stress_line(gpu, line, built, hog, repeats):
    """Prints the rows of a line. Returns the exit code."""
    def never_ends():
        say(f"stress: {line.text}: did not end within {600 + repeats} seconds")
        os._exit(3)
    code, others = 0, {}
    for case, one in {"": line, **variants(line)}.items():
        if not built[one].trouble:
            others[case] = engine.load(one, gpu, built)
            continue
        say(f"stress: {one.text}: not built: {built[one].trouble}")
        # A variant that sdpa.cu refuses is skipped; other compiler errors are errors.
        code = code if case and one.tree.refusal(one.words) else 3
    kernel = others.pop("", None)
    for sizes, causal in PROBLEMS.items() if kernel else ():
        problem = engine.parse_problem(f"{sizes},{line.D},{line.dtype},{causal}").typed(line.D, line.dtype, line.Dv)
        # Kernels that wait for each other would deadlock.
        watch = threading.Timer(600 + repeats, never_ends)
        watch.daemon = True
        watch.start()
        for case, sentence in stress(gpu, kernel, others, hog, problem, repeats):
            name = str(problem).replace(" ", "_")
            print(f"{line.target},{case},{name},{repeats},{'FAIL' if sentence else 'PASS'}", flush=True)
            if sentence:
                say(f"stress: {line.text}, {case}, {name}: {sentence}")
                code = max(code, 1)
        watch.cancel()
    return code


def main():
    options = cli.parse_options(__doc__, cli.MOST)
    has_bad_lines = not options.words and builds.has_bad_lines()
    lines = builds.parse_contenders(options.words) or [
        line for line in builds.lines_named("")
        if line.knob("USE_WGMMA") == "1" or line.knob("SPLIT_CTAS") == "0"]
    if any(type(line) is not builds.Line for line in lines):
        raise Refused("it runs lines of configs.txt")
    if not lines:
        raise Refused("no line of configs.txt has USE_WGMMA=1 or SPLIT_CTAS=0; name the lines")
    gpu = engine.need_gpu("; run it on a machine with one", "runs kernels side by side")
    everything = [one for line in lines for one in (line, *variants(line).values())]
    built = builds.build(everything, gpu.arch, progress=builds.show_progress())
    beside, = builds.build(builds.lines_named("")[:1], gpu.arch, program=HOG).values()
    if beside.trouble:
        raise Refused(f"{HOG} does not compile: {beside.trouble}", 3)
    hog = Hog(gpu, beside.path)
    print("config,case,problem,repeats,check", flush=True)
    return max([int(has_bad_lines), *(stress_line(gpu, line, built, hog, options.repeats) for line in lines)])
