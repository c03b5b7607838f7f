"""Times contenders in turns, in one process and on the same tensors.

Each contender is captured into a CUDA graph. A turn is a number of replays; the first ones only warm up. A block is a
turn of each contender in random order, followed by another in reverse order, so that drift affects all equally. judge()
gets the logarithms of the ratio of two contenders' times in each half of a block.
"""
import contextlib
import csv
import ctypes
import importlib.metadata
import importlib.util
import itertools
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections import namedtuple
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from scipy import special, stats

from builds import HEADER, PACKAGES, ROOT, TORCH_BACKENDS, Line, Torch, Tree, run, structs_of
from cli import Refused

SHAPES = {"small": (1, 1, 1, 32, 32), "mission": (1, 8, 8, 512, 512), "mission2": (2, 8, 8, 512, 512),
          "long": (1, 8, 8, 2048, 2048), "decode": (32, 32, 8, 1, 8192), "decode1": (1, 32, 8, 1, 32768),
          "chunk": (1, 32, 8, 256, 8192)}
CAUSAL = ("off", "br", "tl")
# Per type, as in reference.cpp: limits of rel_rms, of the largest error / max(1, max|ref|), and of LSE's error /
# max(1, |ref|).
LIMITS = {"fp16": (1e-3, 1e-3, 1e-3), "bf16": (8e-3, 8e-3, 1e-3), "e4m3": (4e-2, 6e-2, 4e-3),
          "u8": (1.5e-3, 2e-3, 1e-3)}
LIMITS |= {f"{dtype}/e4m3": LIMITS[dtype] for dtype in ("fp16", "bf16")}  # type of Q, and type of K and V
FP16_SUMS = (5e-3, 5e-3, 5e-3)  # with FP16_ACC
FACTORS = {"e4m3": 1.0, "u8": 4 / 448}  # factors of 8-bit tensors; a u8 of 127 represents 4
TYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn}
SM_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT


# ---- problems ----

class Problem(namedtuple("Problem", "shape B Hq Hkv Sq Sk D dtype causal left Dv", defaults=(0, "", "off", -1, 0))):
    """Sizes and type of the tensors, the mask, and the left window size (-1: unlimited). D = 0 and no dtype: those of the
    line. Dv = 0: D."""

    def columns(self):
        """The columns of a CSV row. Dv is among the line's knobs."""
        columns = {name: value for name, value in self._asdict().items() if name not in ("left", "Dv")}
        return dict(columns, window="" if self.left < 0 else f"{self.left}:-1")

    @property
    def v_dim(self):
        return self.Dv or self.D

    def __str__(self):
        return self.shape + ("" if self.causal == "off" else " " + self.causal) + (
            "" if self.left < 0 else f" window {self.left}")

    def typed(self, D, dtype, Dv=0, takes_fewer=False):
        """The problem with the D, type and Dv of a line. Refuses if the problem has others; a line that takes_fewer
        (builds.Line) accepts smaller D and Dv."""
        if takes_fewer and 0 < self.D < D and self.D % 8 == 0:
            D, Dv = self.D, Dv and min(Dv, self.D)
        if self.D not in (0, D) or self.dtype not in ("", dtype):
            raise Refused(f"--shape {self.shape}: D={self.D or D} {self.dtype or dtype} is asked for, and the line "
                          f"has D={D} {dtype}")
        return self._replace(D=D, dtype=dtype, Dv=Dv)

    def fits(self, line):
        """True if a contender has this problem's type and exactly its D."""
        return line.D in (None, self.D or line.D) and line.dtype in (None, self.dtype or line.dtype)

    def lines_for(self, lines):
        """The lines that fit. If there are none, the narrowest lines that accept a smaller D."""
        fewer = [line for line in lines if line.takes_fewer and self._replace(D=0).fits(line) and self.D % 8 == 0
                 and self.D < line.D]
        return [line for line in lines if self.fits(line)] or [
            line for line in fewer if line.D == min(one.D for one in fewer)]

    def bounds(self):
        """For each query, the first visible key and the end of the visible keys."""
        own = np.arange(self.Sq) + (self.Sk - self.Sq if self.causal == "br" else 0)
        end = (own + 1 if self.causal != "off" else np.full(self.Sq, self.Sk)).clip(0, self.Sk)
        return (own - self.left if self.left >= 0 else 0 * own).clip(0, end), end

    def visible(self):
        """The number of visible keys of each query."""
        begin, end = self.bounds()
        return end - begin

    @property
    def rows(self):
        """The number of rows of O."""
        return self.B * self.Hq * self.Sq

    def flops(self, is_backward=False):
        """FLOP of the products: two of the forward pass; five of the backward pass, three of width D and two of width Dv."""
        widths = 3 * self.D + 2 * self.v_dim if is_backward else self.D + self.v_dim
        return 2 * widths * self.B * self.Hq * int(self.visible().sum())


def parse_problem(text, causal="off"):
    """Parses a name of SHAPES or B,Hq,Hkv,Sq,Sk, optionally followed by ,D ,DTYPE ,CAUSAL and ,LEFT (window size)."""
    sizes = "|".join(SHAPES) + r"|\d+,\d+,\d+,\d+,\d+"
    found = re.fullmatch(
        rf"({sizes})(?:,(\d+)(?:,({'|'.join(LIMITS)})?(?:,({'|'.join(CAUSAL)})?(?:,(\d{{1,9}}))?)?)?)?", text)
    name, D, dtype, own_causal, left = found.groups() if found else ("0,0,0,0,0", 0, "", "", None)
    B, Hq, Hkv, Sq, Sk = SHAPES.get(name) or map(int, name.split(","))
    if min(B, Hq, Hkv, Sq, Sk) < 1 or Hq % Hkv:
        raise Refused(f"--shape {text}: want {', '.join(SHAPES)} or B,Hq,Hkv,Sq,Sk, each at least 1, with Hq a multiple "
                      f"of Hkv, optionally followed by ,D ,{'|'.join(LIMITS)} ,off|br|tl ,LEFT")
    return Problem(name.replace(",", "x"), B, Hq, Hkv, Sq, Sk, int(D or 0), dtype or "", own_causal or causal,
                   -1 if left is None else int(left))


# ---- the GPU ----

class CudaError(Refused):
    """An error of the driver or a library; exit code 3."""

    def __init__(self, sentence):
        super().__init__(sentence, 3)


@dataclass
class Graph:
    """Launches of a kernel, captured in a CUDA graph."""
    enqueue: object  # enqueues one replay
    launches: int
    replay_us: float  # approximate time
    workspace: tuple = (0, 0)  # address and size of memory that is zeroed before a turn
    close: object = None  # frees the graph


class Turn(namedtuple("Turn", "us clock_mhz throttle power_w", defaults=(0, 0, 0))):
    """Microseconds per launch in each replay, and the state of the GPU during the turn (0: unknown)."""

    @property
    def median(self):
        return float(np.median(self.us))


class Cuda:
    """The first GPU, through the driver API, in the primary context, which all libraries share. Sizes are in bytes."""

    def __init__(self):
        self.api = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        self.device = self.get(ctypes.c_int, "cuDeviceGet", 0)
        self("cuCtxSetCurrent", self.get(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", self.device))
        self.stream, self.events = self.new_stream(), []
        self.name, bus_id = (self.get(ctypes.c_char * 256, function, 256, self.device).value.decode()
                             for function in ("cuDeviceGetName", "cuDeviceGetPCIBusId"))
        self.arch = "".join(str(self.attribute(which)) for which in (75, 76))  # compute capability
        self.arch += "a" if self.arch == "90" else ""
        version = self.get(ctypes.c_int, "cuDriverGetVersion").value
        self.cuda, self.nvml = f"{version // 1000}.{version % 1000 // 10}", Nvml(bus_id)

    def __call__(self, function, *arguments):
        words = (ctypes.c_uint64(one) if isinstance(one, int) else one for one in arguments)
        code = getattr(self.api, function)(*words)
        if code:
            text = ctypes.c_char_p()
            self.api.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(f"{function}: {(text.value or b'error %d' % code).decode()}")

    def get(self, kind, function, *arguments):
        """Calls a function whose first argument is an output of a ctypes type. Returns the output."""
        found = kind()
        self(function, ctypes.byref(found), *arguments)
        return found

    def attribute(self, which):
        return self.get(ctypes.c_int, "cuDeviceGetAttribute", which, self.device).value

    def new_stream(self):
        return self.get(ctypes.c_void_p, "cuStreamCreate", 1)  # CU_STREAM_NON_BLOCKING

    def seconds(self):
        return time.monotonic()

    def allocate(self, size):
        return self.get(ctypes.c_uint64, "cuMemAlloc_v2", max(size, 256)).value

    def free(self, address):
        self("cuMemFree_v2", address)

    def fill(self, address, byte, count):
        if count:
            self("cuMemsetD8Async", address, byte, count, self.stream)

    def upload(self, address, array):
        self("cuMemcpyHtoD_v2", address, array.ctypes.data, array.nbytes)

    def download(self, address, count, dtype):
        array = np.empty(count, dtype)
        self("cuMemcpyDtoH_v2", array.ctypes.data, address, array.nbytes)
        return array

    def synchronize(self):
        self("cuStreamSynchronize", self.stream)

    def capture(self, launch, launches):
        """Captures a graph of several launches. Returns functions that enqueue and free it."""
        graph = ctypes.c_void_p()
        self("cuStreamBeginCapture_v2", self.stream, 1)  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        try:
            for _ in range(launches):
                launch()
        finally:
            self("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        replay = self.get(ctypes.c_void_p, "cuGraphInstantiateWithFlags", graph, 0)
        self("cuGraphDestroy", graph)
        return lambda: self("cuGraphLaunch", replay, self.stream), lambda: self("cuGraphExecDestroy", replay)

    def time(self, enqueue, count, warm=0, behind=0):
        """Microseconds of each of `count` consecutive calls, and (MHz, throttle reasons) after `warm` of them. `behind`
        more calls are enqueued after them, so that the GPU stays busy until the next turn."""
        while len(self.events) <= count:
            self.events.append(self.get(ctypes.c_void_p, "cuEventCreate", 0))
        self("cuEventRecord", self.events[0], self.stream)
        for event in self.events[1:count + 1]:
            enqueue()
            self("cuEventRecord", event, self.stream)
        for _ in range(behind):
            enqueue()
        self("cuEventSynchronize", self.events[warm])
        state = self.nvml.state()
        self("cuEventSynchronize", self.events[count])
        pairs = zip(self.events, self.events[1:count + 1])
        return [1e3 * self.get(ctypes.c_float, "cuEventElapsedTime", *pair).value for pair in pairs], state

    def replay(self, graph, count, warm=0, behind=0):
        """time() of a graph's replays, after zeroing its workspace."""
        self.fill(graph.workspace[0], 0, graph.workspace[1])
        return self.time(graph.enqueue, count, warm, behind)


def find_gpu():
    """The first GPU; None without a GPU or a driver."""
    try:
        return Cuda()
    except (OSError, CudaError):
        return None


def need_gpu(hint="", does="times kernels"):
    gpu = find_gpu()
    if not gpu:
        raise Refused(f"it {does} and there is no GPU here{hint}")
    return gpu


class Nvml:
    """Clock, throttle reasons and power of a GPU; 0 if unknown."""

    def __init__(self, bus_id):
        self.api, self.device, driver = None, ctypes.c_void_p(), ctypes.create_string_buffer(96)
        with contextlib.suppress(OSError):
            api, device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.byref(self.device)
            if not (api.nvmlInit_v2() or api.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), device)):
                self.api = api
                api.nvmlSystemGetDriverVersion(driver, 96)
                self.reasons = getattr(api, "nvmlDeviceGetCurrentClocksEventReasons", None) or \
                    api.nvmlDeviceGetCurrentClocksThrottleReasons  # its name before CUDA 12.2
        self.driver = driver.value.decode()

    def state(self):
        clock, reasons, milliwatts = ctypes.c_uint(), ctypes.c_ulonglong(), ctypes.c_uint()
        if self.api:
            self.api.nvmlDeviceGetClockInfo(self.device, 1, ctypes.byref(clock))  # NVML_CLOCK_SM
            self.reasons(self.device, ctypes.byref(reasons))
            self.api.nvmlDeviceGetPowerUsage(self.device, ctypes.byref(milliwatts))
        return clock.value, reasons.value, milliwatts.value / 1000


# ---- contenders on the GPU ----

# The structs of bindings/sdpa.h. Members are only appended, so SdpaParams of an older commit is a prefix of this one.
Strides, Descale, SdpaParams, SdpaBackwardParams = map(
    structs_of(Tree().read(HEADER)).get, ("SdpaStrides", "SdpaDescale", "SdpaParams", "SdpaBackwardParams"))


def params_of(p):
    """The parameters of a problem, without pointers."""
    sizes = {name: getattr(p, name) for name in ("B", "Hq", "Hkv", "Sq", "Sk", "D", "Dv")}
    return SdpaParams(**sizes, causal=CAUSAL.index(p.causal), window_left=p.left, window_right=-1)


def is_prefix(size):
    """True if a prefix of the members of SdpaParams has this size."""
    ends = [getattr(SdpaParams, name).offset + getattr(SdpaParams, name).size for name, _ in SdpaParams._fields_]
    return size in [(end + 7) // 8 * 8 for end in ends if end >= SdpaParams.workspace.offset]


class Outputs(namedtuple("Outputs", "O LSE dtype limits")):
    """Addresses of a contender's O and LSE (0: none), the type of O, and the limits of the errors."""

    def arrays(self, p):
        """(address, count, type) of each result; None: the contender has none."""
        return ((self.O, p.rows * p.v_dim, TYPES[self.dtype]), (self.LSE, p.rows, np.float32) if self.LSE else None)


class Gradients(namedtuple("Gradients", "dQ dK dV forward repeats")):
    """Addresses of a contender's gradients, the Outputs of its forward pass, and whether dQ has the same bits in every run."""

    def arrays(self, p):
        kind, keys = TYPES[self.forward.dtype], p.B * p.Hkv * p.Sk
        return (self.dQ, p.rows * p.D, kind), (self.dK, keys * p.D, kind), (self.dV, keys * p.v_dim, kind)


class LoadedLine:
    """A library of a line, loaded into this process."""
    max_ctas = 0  # all that fit

    def __init__(self, line, path):
        self.line, self.text = line, line.text
        self.limits = FP16_SUMS if line.knob("FP16_ACC", "NONE") != "NONE" else LIMITS[line.dtype]
        self.library = ctypes.CDLL(path)
        for name in ("sdpa_library_params_bytes", "sdpa_library_workspace_bytes"):
            getattr(self.library, name).restype = ctypes.c_size_t
        size = self.library.sdpa_library_params_bytes()
        if not is_prefix(size):
            raise Refused(f"{self.text}: its SdpaParams has {size} bytes and does not match {HEADER}, "
                          f"with {ctypes.sizeof(SdpaParams)} bytes, so this checkout cannot load it")

    def prepare(self, gpu, tensors, problem):
        """Returns a function that enqueues one launch, its Outputs or Gradients, and its workspace."""
        p, size = self.params(tensors, problem)
        outputs = Outputs(p.O, p.LSE, self.line.out_dtype, self.limits)
        return self.launcher(gpu, self.library.sdpa_library_forward, p), outputs, (p.workspace, size)

    def launcher(self, gpu, function, p):
        """A function that enqueues one launch."""
        text = ctypes.create_string_buffer(256)

        def launch():
            if function(ctypes.byref(p), gpu.stream, text, ctypes.c_size_t(256)):
                raise CudaError(text.value.decode())
        return launch

    def params(self, tensors, problem):
        """The SdpaParams of a problem, and the size of its workspace."""
        p = params_of(problem)
        p.max_ctas = self.max_ctas
        for name in ("Q", "K", "V", "O", "LSE"):
            setattr(p, name, tensors.address[name])
        p.q, p.o = (Strides(p.Hq * p.Sq * D, p.Sq * D, D) for D in (problem.D, problem.v_dim))
        p.k, p.v = (Strides(p.Hkv * p.Sk * D, p.Sk * D, D) for D in (problem.D, problem.v_dim))
        p.q_descale = p.k_descale = p.v_descale = Descale(tensors.address.get("factor"), 0, 0)  # none: null
        size = self.library.sdpa_library_workspace_bytes(ctypes.byref(p))
        p.workspace = tensors.workspace(size)
        return p, size

    def capture(self, gpu, launch, launches):
        return gpu.capture(launch, launches)


class LoadedBackward(LoadedLine):
    """A line of the backward pass. prepare() runs its forward pass; a launch computes the gradients."""

    def __init__(self, line, path):
        super().__init__(line, path)
        self.library.sdpa_library_backward_workspace_bytes.restype = ctypes.c_size_t

    def prepare(self, gpu, tensors, problem):
        forward, _ = self.params(tensors, problem)
        # Other contenders overwrite the shared O and LSE, and their bits differ.
        forward.O, forward.LSE = tensors.allocate(2 * problem.rows * problem.v_dim), tensors.allocate(4 * problem.rows)
        self.launcher(gpu, self.library.sdpa_library_forward, forward)()
        size = self.library.sdpa_library_backward_workspace_bytes(ctypes.byref(forward))
        d = SdpaBackwardParams(forward=forward, workspace=tensors.workspace(size), d_o=forward.o, d_q=forward.q, d_k=forward.k,
                               d_v=forward.v, **{name: tensors.gradient(name) for name in ("dO", "dQ", "dK", "dV")})
        outputs = Outputs(forward.O, forward.LSE, self.line.out_dtype, self.limits)
        return (self.launcher(gpu, self.library.sdpa_library_backward, d),
                Gradients(d.dQ, d.dK, d.dV, outputs, self.line.repeats), (d.workspace, size))


@contextlib.contextmanager
def as_cuda_error():
    """Converts exceptions of PyTorch and its packages, including out of memory, to a CudaError."""
    try:
        yield
    except CudaError:
        raise
    except Exception as error:  # these packages have their own exception classes
        raise CudaError(str(error).strip().split("\n")[0][:100]) from None


class LoadedTorch:
    """A kernel of PyTorch or another package, with the interface of LoadedLine."""
    factor_of_o = None  # the tensor with which cuDNN multiplies O before it rounds it to e4m3

    def __init__(self, contender, gpu):
        self.line, self.text = contender, contender.text
        try:
            import torch
        except ImportError:
            raise Refused(f"{self.text}: PyTorch is missing; install it with: pip install torch") from None
        if not torch.cuda.is_available():
            raise Refused(f"{self.text}: PyTorch sees no GPU")
        if self.text in PACKAGES:
            module, function, package = PACKAGES[self.text]
            try:
                self.function = getattr(importlib.import_module(module), function)
            except ImportError as missing:
                raise Refused(f"{self.text}: {missing.name or package} is missing; install it with: pip install "
                              f"{package}") from None
        self.torch, self.kept = torch, []  # keeps what cuDNN's graphs use alive
        torch.cuda.set_stream(torch.cuda.ExternalStream(gpu.stream.value))

    def tensor(self, address, shape, dtype):
        """A PyTorch tensor that refers to device memory."""
        class Memory:
            __cuda_array_interface__ = {"shape": shape, "typestr": "|i1" if dtype == "e4m3" else "<i2",
                                        "data": (address, False), "version": 3}
        kind = {"fp16": self.torch.float16, "bf16": self.torch.bfloat16, "e4m3": self.torch.float8_e4m3fn}[dtype]
        return self.torch.as_tensor(Memory(), device="cuda").view(kind)

    def prepare(self, gpu, tensors, problem):
        attention, p = self.of_package, problem
        if self.text not in PACKAGES:
            attention = self.of_pytorch
            if p.causal == "br" and p.Sq != p.Sk:
                raise CudaError("PyTorch's is_causal is top-left")
            if p.dtype in FACTORS or p.left >= 0:
                with as_cuda_error():
                    return self.by_front_end(gpu, tensors, p)
        sizes = {"Q": (p.B, p.Hq, p.Sq, p.D), "K": (p.B, p.Hkv, p.Sk, p.D), "V": (p.B, p.Hkv, p.Sk, p.v_dim)}
        q, k, v = (self.tensor(tensors.address[name], sizes[name], type_of(name, p.dtype)) for name in "QKV")

        def launch():
            with as_cuda_error():
                return attention(q, k, v, p)
        self.output = launch().contiguous()
        written = {self.torch.float16: "fp16", self.torch.bfloat16: "bf16"}[self.output.dtype]
        return launch, Outputs(self.output.data_ptr(), 0, written, LIMITS[p.dtype]), (0, 0)

    def version(self):
        """The name and version of the package, for the note of a row."""
        if self.text in PACKAGES:
            package = PACKAGES[self.text][2]
            try:
                return f"{package} {importlib.metadata.version(package)}"
            except importlib.metadata.PackageNotFoundError:  # built from source
                return package
        words = f"PyTorch {self.torch.__version__}"
        if self.text != "torch:cudnn":
            return words
        major, minor, patch = (self.torch.backends.cudnn.version() // n % 100 for n in (10000, 100, 1))
        return f"{words} with cuDNN {major}.{minor}.{patch}"

    def of_pytorch(self, q, k, v, problem):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        with sdpa_kernel(getattr(SDPBackend, TORCH_BACKENDS[self.line.backend])):
            return self.torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=problem.causal != "off",
                                                                         enable_gqa=problem.Hq != problem.Hkv)

    def of_package(self, q, k, v, problem):
        """O [B,Hq,Sq,D] of a package with tensors [B,S,H,D] and a bottom-right causal mask."""
        causal, windowed = problem.causal != "off", problem.left >= 0
        if (problem.causal == "tl" or windowed and not causal) and problem.Sq != problem.Sk:
            raise CudaError("its causal mask is the bottom-right one")
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.text == "flashinfer":  # one sequence
            if problem.B > 1:
                raise CudaError("it is called for one sequence")
            options = {"window_left": problem.left} if windowed else {}
            return self.function(q[0], k[0], v[0], causal=causal, backend="fa3", **options)[None].transpose(1, 2)
        is_fa3 = self.text.startswith("torch:fa3")
        none = -1 if is_fa3 else None
        options = {"num_splits": 0} if is_fa3 else {}  # 0: automatic
        options |= {"window_size": (problem.left, 0 if causal else none)} if windowed else {}
        out = self.function(q, k, v, causal=causal, **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    def by_front_end(self, gpu, tensors, problem):
        """e4m3 and windows, which PyTorch's operator does not support, through cuDNN's own front end. O has the type of Q."""
        p = problem
        if p.dtype not in TYPES or (self.line.backend != "cudnn" and p.dtype in FACTORS):
            raise CudaError(f"it has no attention of {p.dtype}")
        if self.line.backend != "cudnn":
            raise CudaError("it takes no window")
        if not importlib.util.find_spec("cudnn"):
            what = "a window" if p.left >= 0 else p.dtype
            raise CudaError(f"for {what} it needs cuDNN's front end; install it with: pip install nvidia-cudnn-frontend")
        import cudnn
        kind, is_e4m3 = cudnn.data_type, p.dtype == "e4m3"
        element = {"e4m3": kind.FP8_E4M3, "fp16": kind.HALF, "bf16": kind.BFLOAT16}[p.dtype]
        handle = cudnn.create_handle()
        cudnn.set_stream(handle=handle, stream=gpu.stream.value)
        graph = cudnn.pygraph(io_data_type=element, intermediate_data_type=kind.FLOAT, compute_data_type=kind.FLOAT,
                              handle=handle)
        dims = {"q": [p.B, p.Hq, p.Sq, p.D], "k": [p.B, p.Hkv, p.Sk, p.D], "v": [p.B, p.Hkv, p.Sk, p.v_dim]}
        strides = {name: [heads * rows * D, rows * D, D, 1] for name, (_, heads, rows, D) in dims.items()}
        inputs = {name: graph.tensor(name=name.upper(), dim=dims[name], stride=strides[name], data_type=element)
                  for name in dims}
        options = dict(generate_stats=False, attn_scale=1 / math.sqrt(p.D), use_causal_mask=p.causal != "off")
        options |= {"sliding_window_length": p.left + 1} if p.left >= 0 else {}
        # P is at most 1, and 448 the largest e4m3.
        scales = dict(descale_q=1.0, descale_k=1.0, descale_v=1.0, descale_s=1 / 448, scale_s=448.0, scale_o=1.0)
        scales = scales if is_e4m3 else {}
        factors = {name: graph.tensor(name=name, dim=[1] * 4, stride=[1] * 4, data_type=kind.FLOAT) for name in scales}
        O, _, *largest = (graph.sdpa_fp8 if is_e4m3 else graph.sdpa)(**inputs, **factors, **options)
        rows_of_o = [p.Hq * p.Sq * p.v_dim, p.Sq * p.v_dim, p.v_dim, 1]
        O.set_output(True).set_dim([p.B, p.Hq, p.Sq, p.v_dim]).set_stride(rows_of_o).set_data_type(element)
        for one in largest:
            one.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(kind.FLOAT)
        graph.build([cudnn.heur_mode.A])
        size = np.dtype(TYPES[p.dtype]).itemsize
        self.output = self.torch.full((p.rows * p.v_dim * size,), 0x7f, dtype=self.torch.uint8, device="cuda")
        scalars = [self.torch.tensor([value], device="cuda") for value in (*scales.values(), *[0.0] * len(largest))]
        self.factor_of_o = scalars[len(scales) - 1] if is_e4m3 else None
        places = {O: self.output.data_ptr(), **{inputs[name]: tensors.address[name.upper()] for name in inputs}}
        places |= {one: scalar.data_ptr() for one, scalar in zip((*factors.values(), *largest), scalars)}
        workspace = self.torch.zeros(max(graph.get_workspace_size(), 1), dtype=self.torch.uint8, device="cuda")
        self.kept += [graph, handle, scalars, workspace, self.output]

        def launch():
            graph.execute(places, workspace.data_ptr(), handle=handle)
        return launch, Outputs(self.output.data_ptr(), 0, p.dtype, LIMITS[p.dtype]), (0, 0)

    def capture(self, gpu, launch, launches):
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, stream=self.torch.cuda.current_stream()):
            for _ in range(launches):
                launch()
        return graph.replay, graph.reset


def load(contender, gpu, built):
    """Loads a contender. `built` has the libraries of lines."""
    if isinstance(contender, Torch):
        return LoadedTorch(contender, gpu)
    if not contender.runs_on(gpu.arch):
        arch = contender.knob("arch")
        others = "and newer" if arch.isdigit() else "alone"
        raise Refused(f"{contender.text} is a line for sm_{arch} {others}, and {gpu.name} is sm_{gpu.arch}")
    if built[contender].trouble:
        raise Refused(f"{contender.text} does not compile: {built[contender].trouble}")
    return (LoadedBackward if contender.is_backward else LoadedLine)(contender, built[contender].path)


# ---- tensors and the check ----

RANDOM_BLOCK = 4194301  # not a multiple of D, so that all rows differ


def type_of(name, dtype):
    """The type of a tensor, given the dtype of the problem."""
    return dtype.split("/")[-1 if name in "KV" else 0]


def as_bits(values, dtype):
    """Rounds float32 values to a type, ties to even, after dividing 8-bit ones by their factor. Returns the bits."""
    if dtype == "u8":
        return (np.rint(values / FACTORS["u8"] * 127 / 448).clip(-128, 127) + 128).astype(np.uint8)
    # ml_dtypes converts values out of e4m3's range to NaN.
    values = (values.clip(-448, 448) if dtype == "e4m3" else values).astype(TYPES[dtype])
    return values.view(f"u{values.itemsize}")


def as_values(bits, dtype, kind=np.float64):
    """Converts bits of a type to numbers, multiplying 8-bit ones by their factor."""
    if dtype == "u8":
        return ((bits.astype(kind) - 128) / 127 * 448 * FACTORS["u8"]).astype(kind)
    return bits.view(TYPES[dtype]).astype(kind)


def normal(rng, name, count):
    """Draws Q, K or V."""
    return rng.standard_normal(count, np.float32)


class Tensors:
    """Q, K, V, O, LSE and workspace, shared by all contenders, since the time of a small kernel depends on addresses by up to
    1%. Problems of the same type use the first part of each tensor."""

    def __init__(self, gpu, problems, seed=0, draw=normal):
        rng = np.random.default_rng(seed)
        self.gpu, self.dtype = gpu, problems[0].dtype
        q, o = max(p.rows * p.D for p in problems), max(p.rows * p.v_dim for p in problems)
        k, v = (max(p.B * p.Hkv * p.Sk * getattr(p, dim) for p in problems) for dim in ("D", "v_dim"))
        self.host, self.address, self.workspaces = {}, {}, []
        for name, count in (("Q", q), ("K", k), ("V", v)):
            drawn = as_bits(draw(rng, name, min(count, RANDOM_BLOCK)), type_of(name, self.dtype))
            self.host[name] = np.resize(drawn, count)
            self.address[name] = gpu.allocate(self.host[name].nbytes)
            gpu.upload(self.address[name], self.host[name])
        if self.dtype in FACTORS:
            self.address["factor"] = gpu.allocate(4)
            gpu.upload(self.address["factor"], np.array([FACTORS[self.dtype]], np.float32))
        self.sizes = {"dO": o, "dQ": q, "dK": k, "dV": v}  # elements
        self.draw, self.seed, self.others = draw, seed, []
        self.address["O"] = gpu.allocate(2 * o)
        self.address["LSE"] = gpu.allocate(4 * max(p.rows for p in problems))
        self.workspace(1 << 20)

    def gradient(self, name):
        """The address of dO, dQ, dK or dV, which are allocated at their first use. dO is drawn like the inputs."""
        if name not in self.address:
            count = self.sizes[name]
            self.address[name] = self.gpu.allocate(2 * count)
            if name == "dO":
                drawn = as_bits(self.draw(np.random.default_rng(self.seed + 1), name, min(count, RANDOM_BLOCK)), self.dtype)
                self.host[name] = np.resize(drawn, count)
                self.gpu.upload(self.address[name], self.host[name])
        return self.address[name]

    def allocate(self, size):
        """Memory of one contender, until free()."""
        self.others.append(self.gpu.allocate(size))
        return self.others[-1]

    def workspace(self, size):
        """Allocates a workspace of at least this size, shared by all contenders. Returns its address."""
        if not any(bytes_there >= size for _, bytes_there in self.workspaces):
            self.workspaces.append((self.gpu.allocate(size), size))
        return next(address for address, bytes_there in self.workspaces if bytes_there >= size)

    def rows(self, name, problem, b, h):
        """One head of Q, K, V or dO in float64."""
        heads, rows = (problem.Hq, problem.Sq) if name in ("Q", "dO") else (problem.Hkv, problem.Sk)
        D = problem.v_dim if name in ("V", "dO") else problem.D
        at = (b * heads + h) * rows * D
        return as_values(self.host[name][at:at + rows * D], type_of(name, self.dtype)).reshape(rows, D)

    def free(self):
        for address in (*self.address.values(), *dict(self.workspaces), *self.others):
            self.gpu.free(address)


MOST_HEADS, MOST_ROWS = 4, 256  # number of checked heads, and of rows in each


# The result of a check; the sentence describes the failure.
Check = namedtuple("Check", "passed rel_rms max_abs_err lse_err rows sentence",
                   defaults=(False, math.nan, math.nan, math.nan, 0, ""))


class Reference:
    """The float64 reference, for one row in each group of 64 rows of some heads."""

    def __init__(self, problem, tensors, seed=0):
        self.problem, p = problem, problem
        rng, heads = np.random.default_rng(seed), np.arange(p.B * p.Hq)
        if len(heads) > MOST_HEADS:
            heads = np.array([0, *rng.choice(heads[1:-1], MOST_HEADS - 2, replace=False), heads[-1]])
        groups = np.unique(np.linspace(0, (p.Sq - 1) // 64, MOST_ROWS).astype(int)) * 64
        self.rows, parts = [], []  # (b, h, q), O and LSE of each row
        for b, h in np.column_stack(np.divmod(heads, p.Hq)).tolist():
            rows = np.unique([0, p.Sq - 1, *np.minimum(groups + rng.integers(0, 64, len(groups)), p.Sq - 1)])
            self.rows += [(b, h, q) for q in rows.tolist()]
            parts += [self.attend(tensors, b, h, few) for few in np.array_split(rows, 1 + len(rows) * p.Sk // 4000000)]
        self.O, self.LSE = map(np.concatenate, zip(*parts))

    def attend(self, tensors, b, h, rows):
        """O and LSE of rows of a head; 0 and -inf for rows that see no key."""
        p = self.problem
        kv = h * p.Hkv // p.Hq
        s = tensors.rows("Q", p, b, h)[rows] @ tensors.rows("K", p, b, kv).T / math.sqrt(p.D)
        begin, end = (bound[rows][:, None] for bound in p.bounds())
        s[(np.arange(p.Sk) < begin) | (np.arange(p.Sk) >= end)] = -np.inf
        LSE = special.logsumexp(s, 1)
        weights = np.exp(s - np.maximum(LSE, np.finfo(float).min)[:, None])
        return weights @ tensors.rows("V", p, b, kv), LSE

    def check(self, O, LSE, limits):
        """Checks that all of O and LSE (may be None) were written, and compares the rows of the reference."""
        p, (limit, largest, lse_limit) = self.problem, limits
        O = O.reshape(p.B, p.Hq, p.Sq, p.v_dim)
        bad = np.isnan(O)
        if bad.any():
            return Check(sentence=f"O{tuple(map(int, np.argwhere(bad)[0]))} is NaN or was never written")
        if LSE is not None and np.isnan(LSE).any():
            return Check(sentence=f"LSE[{int(np.isnan(LSE).argmax())}] is NaN or was never written")
        rows = tuple(np.array(self.rows).T)
        got = O[rows].astype(np.float64)
        error = np.abs(got - self.O)
        rel_rms = math.sqrt((error ** 2).mean()) / max(math.sqrt((self.O ** 2).mean()), 1e-30)
        lse = self.LSE if LSE is None else LSE.reshape(p.B, p.Hq, p.Sq)[rows].astype(np.float64)
        with np.errstate(invalid="ignore"):
            lse_error = np.where(lse == self.LSE, 0, np.abs(lse - self.LSE) / np.maximum(1, np.abs(self.LSE)))
        lse_err = float(lse_error.max())
        worst, sentence = np.unravel_index(error.argmax(), error.shape), ""
        if not (rel_rms <= limit and error.max() <= largest * max(1.0, np.abs(self.O).max())):
            at = ",".join(map(str, (*self.rows[worst[0]], worst[1])))
            sentence = (f"O({at}) is {got[worst]:.6g} but should be {self.O[worst]:.6g}; rel_rms {rel_rms:.3g}, "
                        f"max_abs_err {error.max():.3g}")
        elif not lse_err <= lse_limit:
            sentence = f"LSE is wrong by {lse_err:.3g}"
        return Check(not sentence, rel_rms, float(error.max()), lse_err, len(self.rows), sentence)


class GradientReference:
    """dQ, dK and dV in float64 for some rows of some heads, given O and LSE of the forward pass."""

    def __init__(self, problem, tensors, O, LSE, seed=0):
        self.problem, self.tensors, p = problem, tensors, problem
        self.O, self.LSE = O.reshape(p.B, p.Hq, p.Sq, p.v_dim).astype(np.float64), LSE.reshape(p.B, p.Hq, p.Sq).astype(np.float64)
        rng = np.random.default_rng(seed)
        heads = rng.choice(p.B * p.Hkv, min(p.B * p.Hkv, MOST_HEADS // 2), replace=False)
        self.heads = np.column_stack(np.divmod(np.sort(heads), p.Hkv)).tolist()  # (b, KV head)
        self.queries, self.keys = (np.unique([0, count - 1, *rng.integers(0, count, MOST_ROWS // 4)]) for count in (p.Sq, p.Sk))

    def pairs(self, b, h, queries, keys):
        """P and dS for these queries of query head h and these keys."""
        p, tensors = self.problem, self.tensors
        kv = h * p.Hkv // p.Hq
        dO = tensors.rows("dO", p, b, h)[queries]
        S = tensors.rows("Q", p, b, h)[queries] @ tensors.rows("K", p, b, kv)[keys].T / math.sqrt(p.D)
        begin, end = (bound[queries][:, None] for bound in p.bounds())
        at = np.arange(p.Sk)[keys]
        P = np.where((at >= begin) & (at < end), np.exp(S - self.LSE[b, h, queries][:, None]), 0)
        delta = (dO * self.O[b, h, queries]).sum(1, keepdims=True)
        return P, P * (dO @ tensors.rows("V", p, b, kv)[keys].T - delta)

    def rows(self):
        """Yields (name, b, head, rows, the gradient of these rows)."""
        p, tensors, everything = self.problem, self.tensors, slice(None)
        group = p.Hq // p.Hkv
        for b, kv in self.heads:
            dK, dV = np.zeros((len(self.keys), p.D)), np.zeros((len(self.keys), p.v_dim))
            for h in range(kv * group, (kv + 1) * group):
                _, dS = self.pairs(b, h, self.queries, everything)
                yield "dQ", b, h, self.queries, dS @ tensors.rows("K", p, b, kv) / math.sqrt(p.D)
                P, dS = self.pairs(b, h, everything, self.keys)
                dV += P.T @ tensors.rows("dO", p, b, h)
                dK += dS.T @ tensors.rows("Q", p, b, h) / math.sqrt(p.D)
            yield "dK", b, kv, self.keys, dK
            yield "dV", b, kv, self.keys, dV

    def check(self, gradients, limits):
        """Checks that all of the gradients were written, and compares some rows. Their errors may be twice those of O."""
        p, (limit, largest, _) = self.problem, limits
        shapes = (p.B, p.Hq, p.Sq, p.D), (p.B, p.Hkv, p.Sk, p.D), (p.B, p.Hkv, p.Sk, p.v_dim)
        got = {name: x.reshape(shape) for name, x, shape in zip(("dQ", "dK", "dV"), gradients, shapes)}
        for name, x in got.items():
            if (bad := np.isnan(x)).any():
                return Check(sentence=f"{name}{tuple(map(int, np.argwhere(bad)[0]))} is NaN or was never written")
        rel_rms = max_abs = rows = 0
        for name, b, h, at, want in self.rows():
            error = np.abs(got[name][b, h, at].astype(np.float64) - want)
            rms = math.sqrt((error ** 2).mean()) / max(math.sqrt((want ** 2).mean()), 1e-30)
            rel_rms, max_abs, rows = max(rel_rms, rms), max(max_abs, float(error.max())), rows + len(at)
            if not (rms <= 2 * limit and error.max() <= 2 * largest * max(1.0, np.abs(want).max())):
                worst = np.unravel_index(error.argmax(), error.shape)
                return Check(False, rms, float(error.max()), math.nan, rows, f"{name}({b},{h},{at[worst[0]]},{worst[1]}) is "
                             f"{float(got[name][b, h, at][worst]):.6g} but should be {want[worst]:.6g}; rel_rms {rms:.3g}, max_abs_err {error.max():.3g}")
        return Check(True, rel_rms, max_abs, math.nan, rows)


# ---- contenders of a problem, checked and captured ----

LAUNCHES = 20  # launches per graph, as in the executables; more for short kernels, so that a replay takes REPLAY_US
REPLAY_US, LONGEST_REPLAY_US = 500, 2.5e3


class Bench:
    """Checks and captures contenders. The caller chooses the keys; problems has one entry for each."""

    def __init__(self, gpu, kernels, problems, seed=0, draw=normal):
        self.gpu, self.kernels, self.problems = gpu, kernels, problems
        self.tensors = Tensors(gpu, list(problems.values()), seed, draw)
        self.references, self.checks, self.graphs, self.skipped, self.results, self.outputs = {}, {}, {}, {}, {}, {}
        for key, kernel in kernels.items():
            try:
                self.add(key, kernel, problems[key])
            except CudaError as error:
                self.skipped[key] = str(error)

    def run(self, kernel, problem):
        """Launches a kernel once. Returns the check, its results, the Outputs or Gradients, the launch function, and the
        workspace."""
        if problem not in self.references:
            self.references[problem] = Reference(problem, self.tensors)
        launch, outputs, workspace = kernel.prepare(self.gpu, self.tensors, problem)
        self.gpu.fill(workspace[0], 0, workspace[1])
        self.poison(problem, outputs)
        launch()
        results = self.read(problem, outputs)
        return self.check(problem, outputs, results), results, outputs, launch, workspace

    def check(self, problem, outputs, results):
        """The check of results. Gradients are compared only if the forward pass is right."""
        reference = self.references[problem]
        if isinstance(outputs, Outputs):
            return reference.check(*results, outputs.limits)
        forward = outputs.forward
        O, LSE = self.read(problem, forward)
        check = reference.check(O, LSE, forward.limits)
        if not check.passed:
            return check._replace(sentence=f"the forward pass: {check.sentence}")
        return GradientReference(problem, self.tensors, O, LSE).check(results, forward.limits)._replace(lse_err=check.lse_err)

    def add(self, key, kernel, problem):
        """Adds a contender. Returns its check."""
        self.kernels[key], self.problems[key] = kernel, problem
        self.checks[key], self.results[key], self.outputs[key], launch, workspace = self.run(kernel, problem)
        times, _ = self.gpu.time(launch, 3)
        launches = max(LAUNCHES, min(math.ceil(REPLAY_US / min(times)), 400))
        while launches > 1 and launches * min(times) > LONGEST_REPLAY_US:
            launches //= 2
        enqueue, close = kernel.capture(self.gpu, launch, launches)
        graph = Graph(enqueue, launches, 1.0, workspace, close)
        graph.replay_us = min(self.gpu.replay(graph, 2)[0])
        self.graphs[key] = graph
        return self.checks[key]

    def drop(self, key):
        """Removes a contender."""
        if key in self.graphs:
            self.graphs.pop(key).close()
        for table in (self.kernels, self.problems, self.checks, self.results, self.outputs):
            table.pop(key, None)

    def trouble(self):
        """{key: sentence} of contenders that could not run or are wrong."""
        return self.skipped | {key: check.sentence for key, check in self.checks.items()
                               if not check.passed and key not in self.skipped}

    def fit_to_time(self):
        """The graphs of contenders that passed, in order."""
        return {key: graph for key, graph in self.graphs.items()
                if self.checks[key].passed or isinstance(self.kernels[key], LoadedTorch)}

    def poison(self, problem, outputs):
        own = [array for array in outputs.arrays(problem) if array]
        shared = (self.tensors.address["O"], problem.rows * problem.v_dim, np.float16), (
            self.tensors.address["LSE"], problem.rows, np.float32)
        for address, count, kind in own if isinstance(outputs, Gradients) else shared:
            self.gpu.fill(address, 0xff, count * np.dtype(kind).itemsize)

    def read(self, problem, outputs):
        """Waits and returns (O, LSE or None), or (dQ, dK, dV)."""
        self.gpu.synchronize()
        return tuple(array and self.gpu.download(*array) for array in outputs.arrays(problem))

    def changed_bits(self, key):
        """True if another replay of a line gives a result that differs from the checked one."""
        if isinstance(self.kernels[key], LoadedTorch):
            return False
        problem, outputs = self.problems[key], self.outputs[key]
        self.poison(problem, outputs)
        self.gpu.replay(self.graphs[key], 1)
        now = self.read(problem, outputs)
        first = 0
        if isinstance(outputs, Gradients) and not outputs.repeats:  # dQ
            first = 1
            if not self.check(problem, outputs, now).passed:
                return True
        return any(a.tobytes() != b.tobytes() for a, b in zip(now[first:], self.results[key][first:]))

    def close(self):
        self.gpu.synchronize()
        for graph in self.graphs.values():
            graph.close()
        self.tensors.free()


# ---- turns ----

# Durations of the warm-up and the timed part of a turn, minimum of timed replays, rest before a turn, and time budget of
# a verdict per contender.
Pace = namedtuple("Pace", "warm_us timed_us fewest rest_s budget_s", defaults=(3, 0, 7.5))
BEHIND_US = 2e3  # untimed replays that keep the GPU busy while the host prepares the next turn
# For verdicts. At the power limit the clock changes by 1% about every 50 ms and dips for 0.2 s each second. With short
# turns, more pairs run at the same clock; but a contender that draws more power then also slows down the others.
PACE = Pace(5e3, 5e3, 2)
STEADY = Pace(100e3, 10e3, 5)  # for contenders with very different power
# Long turns, in which each contender runs at the clock that its power allows: a kernel that needs 4% more cycles may then
# be 3% faster. The clock varies more than in short turns, so a verdict takes a minute.
SUSTAINED = Pace(200e3, 100e3, 5, budget_s=60)
RESTED = Pace(0, 10e3, 1, rest_s=0.3)  # before the power limit is reached
FIRST_WARM_UP_S = 0.3
IDLE, CLOCK_SETTING, POWER_CAP, DISPLAY = 1, 2, 4, 256  # NVML throttle reasons with which times remain comparable
CLOCK_OFF = 0.1  # clock deviation of a disturbed turn from the contender's median; larger at the power limit


class Series:
    """Runs blocks of turns. Calls record(key, turn) after each turn."""

    def __init__(self, gpu, graphs, pace, record=lambda key, turn: None, seed=None):
        self.gpu, self.graphs, self.pace, self.record = gpu, graphs, pace, record
        self.rng = np.random.default_rng(seed)
        self.blocks = []  # each {key: [turn, turn]}

    def turn(self, key):
        graph, pace = self.graphs[key], self.pace
        if pace.rest_s:
            time.sleep(pace.rest_s)
        warm = math.ceil(pace.warm_us / graph.replay_us)
        timed = max(pace.fewest, math.ceil(pace.timed_us / graph.replay_us))
        behind = 0 if pace.rest_s else math.ceil(BEHIND_US / graph.replay_us)
        times, state = self.gpu.replay(graph, warm + timed, warm, behind)
        turn = Turn(tuple(us / graph.launches for us in times[warm:]), *state)
        self.record(key, turn)
        return turn

    def block(self):
        order = [list(self.graphs)[i] for i in self.rng.permutation(len(self.graphs))]
        block = {key: [] for key in order}
        for key in order + order[::-1]:
            block[key].append(self.turn(key))
        self.blocks.append(block)

    def turns(self, key):
        return [turn for block in self.blocks for turn in block[key]]

    def at_power_limit(self):
        """True if the power limit reduced the clock in most turns."""
        return np.mean([turn.throttle & POWER_CAP > 0 for key in self.graphs for turn in self.turns(key)]) > 0.5

    def clock(self, key):
        return float(np.median([turn.clock_mhz for turn in self.turns(key)]))

    def power(self, key):
        return float(np.median([turn.power_w for turn in self.turns(key)]))

    def us(self, key):
        """The median over turns of their medians."""
        return float(np.median([turn.median for turn in self.turns(key)]))

    def interval(self, key):
        """A 95% confidence interval (us) of the median (Hettmansperger and Sheather 1986); for up to five turns, the range."""
        medians = [turn.median for turn in self.turns(key)]
        return stats.mstats.median_cihs(medians, 0.05) if len(medians) > 5 else (min(medians), max(medians))

    def ratios(self, key, base):
        """log(time of key / time of base) of each half of each block, and the number of those discarded as disturbed."""
        clocks = {name: self.clock(name) for name in (key, base)}

        def disturbed(name, turn):
            return (turn.throttle & ~(IDLE | CLOCK_SETTING | POWER_CAP | DISPLAY) or not turn.throttle & POWER_CAP and
                    abs(turn.clock_mhz - clocks[name]) > CLOCK_OFF * clocks[name])
        pairs = [pair for block in self.blocks for pair in zip(block[key], block[base])]
        kept = [math.log(b.median / a.median) for b, a in pairs if not (disturbed(key, b) or disturbed(base, a))]
        return kept, len(pairs) - len(kept)


def warm_up(gpu, graphs):
    """Replays all graphs until the clock has risen; measures their replay_us."""
    begin = gpu.seconds()
    while gpu.seconds() - begin < FIRST_WARM_UP_S:
        for graph in graphs.values():
            times, _ = gpu.replay(graph, max(2, math.ceil(3e4 / graph.replay_us)))
            graph.replay_us = float(np.median(times))


# ---- the verdict ----

SAME_WITHIN = 0.005  # log ratio
MOVED_FROM = 0.003
RESOLUTION_US = 0.03  # a copy of a library differs by this much, since its code has another address
LOOKS = (8, 12, 20, 32, 50, 80, 125, 200, 300)  # numbers of blocks after which the interval is evaluated
ERROR = 0.01  # over all evaluations together
UNEVEN = 0.15  # pairs with a larger spread indicate a shared GPU


class Verdict(namedtuple("Verdict", "verdict ratio low high pairs thrown_out")):
    """The ratio of B's time to A's, with the confidence interval of Tukey and McLaughlin (1963) for the trimmed mean. A fifth
    of the pairs is trimmed at each end, so outliers have no effect. The confidence is 1 - ERROR at any stopping time, since
    each evaluation uses a share of ERROR (Bonferroni). docs/NUMBERS.md has the rules of the verdicts."""


def judge(ratios, thrown_out=0, us=math.inf):
    """The verdict for logarithms of ratios; the base takes `us` microseconds."""
    if len(ratios) < LOOKS[0]:
        return Verdict("UNCLEAR", math.nan, math.nan, math.nan, len(ratios), thrown_out)
    low, high = stats.mstats.trimmed_mean_ci(ratios, limits=(0.2, 0.2), alpha=ERROR / len(LOOKS))
    moved, same = (max(limit, RESOLUTION_US / us) for limit in (MOVED_FROM, SAME_WITHIN))
    is_even = np.ptp(np.quantile(ratios, (0.1, 0.9))) <= UNEVEN
    verdict = ("UNCLEAR" if not is_even else "SLOWER" if low > moved else "FASTER" if high < -moved else
               "SAME" if -same < low and high < same else "UNCLEAR")
    return Verdict(verdict, *np.exp([stats.trim_mean(ratios, 0.2), low, high]).tolist(), len(ratios), thrown_out)


def compare(gpu, graphs, record=lambda key, turn: None, budget_s=None, seed=None, pace=PACE):
    """Times all contenders in turns until each comparison with the first is decided or the time is up. Returns the series
    and {key: Verdict} of all but the first."""
    warm_up(gpu, graphs)
    series, (base, *others) = Series(gpu, graphs, pace, record, seed), graphs
    end = gpu.seconds() + (budget_s or pace.budget_s * len(graphs))
    for look in LOOKS:
        while len(series.blocks) < look and gpu.seconds() < end:
            series.block()
        verdicts = {key: judge(*series.ratios(key, base), series.us(base)) for key in others}
        if len(series.blocks) < look or all(verdict.verdict != "UNCLEAR" for verdict in verdicts.values()):
            break
    return series, verdicts


def measure(gpu, graphs, pace, blocks):
    """Times all contenders for a fixed number of blocks. Returns the series."""
    if not pace.rest_s:
        warm_up(gpu, graphs)
    series = Series(gpu, graphs, pace)
    for _ in range(blocks):
        series.block()
    return series


# ---- output files ----

def results_path(folder, device, suffix="", new=False, ending=".csv"):
    """results/FOLDER/DATE-DEVICE[-SUFFIX].csv; new: with a number if that exists."""
    name = "-".join(filter(None, [time.strftime("%Y-%m-%d"), re.sub("[^A-Za-z0-9]+", "-", device), suffix]))
    os.makedirs(os.path.join(ROOT, "results", folder), exist_ok=True)
    for number in itertools.count(1):
        path = os.path.join(ROOT, "results", folder, name + (f"-{number}" if number > 1 else "") + ending)
        if not new or not os.path.exists(path):
            return path


class Table:
    """A CSV file to which rows are appended immediately, and optionally also printed."""

    def __init__(self, path, columns, printed=False):
        is_new, self.name = not os.path.exists(path), os.path.relpath(path, ROOT)
        self.files = [open(path, "a", newline=""), *[sys.stdout] * printed]
        self.outs = [csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore") for file in self.files]
        for out in self.outs[0 if is_new else 1:]:
            out.writeheader()

    def add(self, **row):
        for file, out in zip(self.files, self.outs):
            out.writerow(row)
            file.flush()


def measured_on(gpu):
    """The columns of a row that describe the machine and the commit."""
    return dict(device=gpu.name, driver=gpu.nvml.driver, cuda=gpu.cuda, git_sha=git_sha())


VERDICT_COLUMNS = ("comparison a b problem b_problem D dtype verdict ratio low high pairs thrown_out a_us b_us a_mhz "
                   "b_mhz device driver git_sha").split()


def verdict_row(bench, series, base, key, verdict):
    """The row of a verdict."""
    gpu, a, b = bench.gpu, bench.problems[base], bench.problems[key]
    return dict(a=bench.kernels[base].text, b=bench.kernels[key].text, problem=a, b_problem=b, D=a.D, dtype=a.dtype,
                verdict=verdict.verdict, ratio=f"{verdict.ratio:.5f}", low=f"{verdict.low:.5f}",
                high=f"{verdict.high:.5f}", pairs=verdict.pairs, thrown_out=verdict.thrown_out,
                a_us=f"{series.us(base):.4f}", b_us=f"{series.us(key):.4f}", a_mhz=f"{series.clock(base):.0f}",
                b_mhz=f"{series.clock(key):.0f}", **measured_on(gpu))


def row_columns():
    """The columns of rows of the executables."""
    listed = re.search(r"vector<Column> columns\(.*?  return \{(.*?)\n\}", Tree().read("harness/row.h"), re.DOTALL)
    return re.findall(r'\{"(\w+)", ', listed[1])


def result_row(bench, key, facts, series):
    """A contender's row for its problem, in the format of the executables; without a time if there is no series."""
    gpu, p, line = bench.gpu, bench.problems[key], bench.kernels[key].line
    is_backward = isinstance(line, Line) and line.is_backward
    row = dict(p.columns(), **{"pass": "backward" if is_backward else "forward"}, config=line.label, family=line.family,
               status="ok", seed=0, sm=gpu.arch.strip("a"),
               **measured_on(gpu))
    if key in bench.skipped:
        return dict(row, status="skipped", note=bench.skipped[key])
    check = bench.checks[key]
    row.update(rel_rms=f"{check.rel_rms:.3g}")
    if facts:
        row.update(knobs=shlex.join(line.words), regs=facts.registers, spill_bytes=facts.spilled,
                   smem_bytes=facts.shared_bytes)
    if not isinstance(line, Torch):
        row.update(check="PASS" if check.passed else "FAIL", max_abs_err=f"{check.max_abs_err:.3g}",
                   lse_err=f"{check.lse_err:.3g}", rows_checked=check.rows, note=check.sentence)
    if series and key in series.graphs:
        us, (low, high) = series.us(key), series.interval(key)
        row.update(graph_us=f"{us:.3f}", graph_lo_us=f"{low:.3f}", graph_hi_us=f"{high:.3f}",
                   tflops=f"{p.flops(is_backward) / us * 1e-6:.2f}", clock_mhz=f"{series.clock(key):.0f}")
    return row


def git_sha():
    if "SDPA_GIT_SHA" in os.environ or not shutil.which("git"):
        return os.environ.get("SDPA_GIT_SHA", "")
    return run(["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"], cwd=ROOT).stdout.strip()


SAMPLE_COLUMNS = "comparison contender problem turn replay us clock_mhz throttle".split()


class Samples(Table):
    """A table of all replays of all turns."""

    def __init__(self, path, comparison):
        super().__init__(path, SAMPLE_COLUMNS)
        self.comparison, self.turns = comparison, 0

    def recorder(self, contenders, problem):
        """Returns a Series' record function for {key: name of a contender}."""
        def record(key, turn):
            self.turns += 1
            for replay, us in enumerate(turn.us):
                self.add(comparison=self.comparison, contender=contenders[key], problem=problem, turn=self.turns,
                         replay=replay, us=f"{us:.4f}", clock_mhz=turn.clock_mhz, throttle=turn.throttle)
        return record
