"""sdpa.cu's kernels in PyTorch 2.11 or newer, with examples in docs/USING.md. No package to install:

    import sys; sys.path.insert(0, ".../bindings")
    import pytorch as sdpa
    sdpa.activate()                                # F.scaled_dot_product_attention runs them where they fit
    sdpa.attention(q, k, v, causal="br", window=(1024, 0))  # what that function cannot say

Kernels are lines of configs.txt, built by nvcc when first needed (20 to 60 s each) and kept in $SDPA_CACHE (or ~/.cache/sdpa)."""
import ctypes
import fcntl
import functools
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time

import torch
from torch.nn.attention import SDPBackend

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DTYPES = {torch.float16: "", torch.bfloat16: "_bf16", torch.float8_e4m3fn: "_e4m3"}  # and the names of their lines
FEATURES = ("USE_SOFTCAP", "USE_SINKS", "USE_LENGTHS", "USE_PAGES")  # by the bits of pytorch.cpp's Feature
MASKS = {None: 0, False: 0, "off": 0, True: 1, "br": 1, "tl": 2}


# ---- building ----

class Unavailable(RuntimeError):
    """Why a kernel cannot be had, in one sentence."""

def line_of(capability, dtype, D, Dv=0):
    """The line of configs.txt for a GPU, by compute capability, and a problem; its D is the next one that has a line."""
    family = "hopper" if capability[0] == 9 and {D, Dv or D} <= {64, 96, 128, 192, 256} and Dv <= D else "ampere"
    if capability < (8, 0):
        raise Unavailable(f"this GPU is of sm_{capability[0]}{capability[1]}; sdpa's kernels need sm_80 or newer")
    if dtype == torch.float8_e4m3fn and family != "hopper":
        raise Unavailable("e4m3 has a tuned line for sm_90 alone")
    size = "" if D <= 64 else "_d128" if D <= 128 else "_d256"
    return family + (DTYPES[dtype] + size if "e4m3" in DTYPES[dtype] else size + DTYPES[dtype])


def knobs_of(name):
    """{knob: value} of a line of configs.txt."""
    lines = dict(re.findall(r"^(\w+)[ \t]*(.*?)[ \t]*(?:#.*)?$", pathlib.Path(ROOT, "configs.txt").read_text(), re.MULTILINE))
    base, words = re.match(r"(?::\s*(\w+))?(.*)", lines[name]).groups()
    return {**(knobs_of(base) if base else {}), **dict(re.findall(r"\b([A-Z]\w*)=(\S+)", words))}


def nvcc():
    found = shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"))
    if not found:
        raise Unavailable("nvcc is missing; install the CUDA Toolkit 12.4 or newer, or put its bin folder on PATH")
    return found


def built(what, sources, *options):
    """The path of a shared library that nvcc makes of the first source, which includes the others; from the cache if there."""
    folder = os.environ.get("SDPA_CACHE") or os.path.expanduser("~/.cache/sdpa")
    texts = [pathlib.Path(ROOT, path).read_bytes() for path in sources]
    version = subprocess.run([nvcc(), "--version"], capture_output=True).stdout
    digest = hashlib.sha256(b"\0".join([*texts, version, *map(os.fsencode, options)])).hexdigest()[:16]
    path = os.path.join(folder, f"{what}-{digest}.so")
    if os.path.exists(path):
        return path
    try:
        os.makedirs(folder, exist_ok=True)
        lock = open(path + ".lock", "w")
    except OSError as error:
        raise Unavailable(f"{folder} cannot be written to ({error.strerror}); set SDPA_CACHE to a folder that can") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits for the first one's
        if not os.path.exists(path):
            print(f"sdpa: building {what} by nvcc, once ...", end="", file=sys.stderr, flush=True)
            since = time.monotonic()
            new = f"{path}.{os.getpid()}"
            done = subprocess.run([nvcc(), "-std=c++17", "-shared", *options, sources[0], "-o", new], cwd=ROOT, capture_output=True,
                                  text=True)
            print(f" {time.monotonic() - since:.0f} s", file=sys.stderr)
            if done.returncode:
                said = re.search(r"error.*", done.stderr)
                raise Unavailable(f"nvcc could not build {what}: {said.group() if said else done.stderr.strip()[-300:]}")
            os.rename(new, path)
    return path


@functools.cache
def library_of(name, capability, *features):
    """A line with these knobs besides, 1 if they have no value, as a library of C functions, loaded."""
    arch = f"{capability[0]}{capability[1]}{'a' if capability[0] == 9 else ''}"
    knobs = [f"-D{knob}={value}" for knob, value in {**knobs_of(name), **dict((f + "=1").split("=")[:2] for f in features)}.items()]
    return ctypes.CDLL(built("-".join((name, *features, f"sm_{arch}")), ("tools/library.cu", "sdpa.cu", "bindings/sdpa.h"),
                             "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Xcompiler=-fPIC,-fno-gnu-unique", *knobs))


class Line(ctypes.Structure):
    """pytorch.cpp's Line."""
    _fields_ = [("workspace_bytes", ctypes.c_void_p), ("forward", ctypes.c_void_p), ("trouble", ctypes.c_char * 512)]


BUILDING = threading.Lock()


@ctypes.CFUNCTYPE(None, *[ctypes.c_int] * 5, ctypes.POINTER(Line))
def load_line(device, dtype, D, Dv, features, line):
    try:
        capability = torch.cuda.get_device_capability(device)
        knobs = [f"HEAD_DIM={D}"] * (D not in (64, 128, 256)) + [f"HEAD_DIM_V={Dv}"] * (Dv != D)
        knobs += [knob for bit, knob in enumerate(FEATURES) if features >> bit & 1]
        with BUILDING:
            library = library_of(line_of(capability, list(DTYPES)[dtype], D, Dv), capability, *knobs)
        for name in ("workspace_bytes", "forward"):
            setattr(line[0], name, ctypes.cast(getattr(library, "sdpa_library_" + name), ctypes.c_void_p).value)
    except Exception as trouble:  # an exception would be lost between here and C++
        print(f"sdpa: {trouble}; PyTorch's own kernel runs instead", file=sys.stderr)
        line[0].trouble = str(trouble).encode()[:511]


@functools.cache
def glue():
    """pytorch.cpp, compiled and loaded."""
    with BUILDING:
        if not torch.version.cuda:
            raise Unavailable("this PyTorch is built without CUDA")
        of_torch = os.path.dirname(torch.__file__)
        path = built(f"pytorch-{torch.__version__}", ("bindings/pytorch.cpp", "bindings/sdpa.h"), "-O2", "-x=c++", "-Xcompiler=-fPIC",
                     "-DAT_PER_OPERATOR_HEADERS", f"-I{of_torch}/include", f"-I{of_torch}/include/torch/csrc/api/include",
                     f"-L{of_torch}/lib", "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda", "-ltorch")
        first_call.library = None  # its place is taken by what is loaded now
        library = ctypes.CDLL(path)
    library.sdpa_torch_load_lines_by(load_line)
    return library


# ---- attention() as an operator ----

LIBRARY = torch.library.Library("sdpa", "DEF")
LIBRARY.define("attention(Tensor q, Tensor k, Tensor v, int causal, int left, int right, int window_alignment, float scale, "
               "float softcap, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, Tensor? sinks, Tensor? k_lengths, "
               "Tensor? q_starts, Tensor? k_starts, Tensor? page_table, int most_keys) -> (Tensor, Tensor)")
LIBRARY.define("why_not(Tensor q, Tensor k, Tensor v, bool takes_e4m3) -> str")


@torch.library.register_fake("sdpa::attention")
def fake(q, k, v, *_):
    dtype = torch.float16 if q.dtype == torch.float8_e4m3fn else q.dtype
    out = torch.empty_like(q, dtype=dtype) if v.shape[3] == q.shape[3] else q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def first_call(*arguments):
    """attention() on CUDA tensors until pytorch.cpp is there, which a compiled graph may be the first to need."""
    glue()
    return torch.ops.sdpa.attention(*arguments)


first_call.library = torch.library.Library("sdpa", "IMPL")
first_call.library.impl("attention", first_call, "CUDA")


def keep(ctx, inputs, output):
    q, k, v, ctx.causal, ctx.left, ctx.right, ctx.window_alignment, ctx.scale, softcap = inputs[:9]
    ctx.has_none = softcap or q.dtype == torch.float8_e4m3fn or v.shape != k.shape or any(x is not None for x in inputs[12:17])
    ctx.save_for_backward(q, k, v, *output)


def backward(ctx, grad, _):
    """By FlashAttention-2's, which needs O and LSE alone. Its masks and windows are bottom-right ones, and -1 limits neither side."""
    q, k, v, o, lse = ctx.saved_tensors
    Sq, Sk = q.shape[2], k.shape[2]
    limited, by = ctx.left >= 0 or ctx.right >= 0, ctx.window_alignment or ctx.causal
    if ctx.has_none or (Sq != Sk and (ctx.causal == MASKS["tl"] or (limited and by != MASKS["br"]))):
        raise NotImplementedError("no backward for e4m3, softcap, sinks, lengths, v's own D, nor for top-left masks and windows with Sq != Sk")
    philox = torch.empty(2, dtype=torch.uint64, device=q.device)
    left, right = (Sk if limited and keys < 0 else keys for keys in (ctx.left, ctx.right))
    grads = torch.ops.aten._flash_attention_backward(
        *(x.transpose(1, 2) for x in (grad, q, k, v, o)), lse, None, None, Sq, Sk, 0.0, bool(ctx.causal), philox, philox[0],
        scale=ctx.scale or None, window_size_left=left, window_size_right=right)
    return *(x.transpose(1, 2) for x in grads), *[None] * 15


torch.library.register_autograd("sdpa::attention", backward, setup_context=keep)


def attention(q, k, v, causal=None, window=(None, None), scale=None, q_descale=None, k_descale=None, v_descale=None,
              return_lse=False, softcap=None, sinks=None, k_lengths=None, q_starts=None, k_starts=None, most_keys=0, page_table=None):
    """O = softmax(scale * q @ k.T) @ v, and its LSE [B,Hq,Sq] if asked for.
    q [B,Hq,Sq,D], k and v [B,Hkv,Sk,D]: CUDA tensors of one dtype (float16, bfloat16, float8_e4m3fn), D 64, 128 or 256 (of 16 bits 32
    to 256 by 16, of v and O another if you like), Hq a multiple of Hkv; any strides in multiples of 16 bytes, rows contiguous. causal:
    None, "br" or True (the last query sees the last key), "tl" (the first sees the first alone). window: how many keys a query sees
    before and after its own position, None for all; a third member "br" or "tl" says whose position that is (default: causal's).
    scale: 1/sqrt(D) by default. descales: float32, [B,H] or what expands to it; e4m3 only, whose O is float16. softcap: logits x
    become softcap * tanh(x / softcap), by tanh.approx. sinks [Hq]: exp(sink) joins a row's sum and its LSE. Read by the kernels,
    int32: k_lengths [B], of its keys a sequence has the first so many, also for the mask; q_starts, k_starts [B+1], sequence b has the
    rows from starts[b] to starts[b+1] of q, or of k and v, whose batch is 1; page_table [B,N], with k and v [pages,Hkv,keys of a
    page,D], the pages of a sequence in order. most_keys: that a sequence has; 0: Sk. Raises for what no line takes.
    """
    left, right, by = *(-1 if keys is None else keys for keys in window[:2]), *(window[2:] or (None,))
    for mask in (causal, by):
        if mask not in MASKS:
            raise ValueError(f"sdpa.attention: a mask of {mask!r} is none of None, 'br', 'tl'")
    if not q.is_cuda:
        raise ValueError(f"sdpa.attention: q is on {q.device}; sdpa's kernels run on CUDA devices")
    out, lse = torch.ops.sdpa.attention(q, k, v, MASKS[causal], left, right, MASKS[by], scale or 0.0, softcap or 0.0, q_descale,
                                        k_descale, v_descale, None if sinks is None else sinks.float().contiguous(), k_lengths,
                                        q_starts, k_starts, page_table, most_keys)
    return (out, lse) if return_lse else out


# ---- behind F.scaled_dot_product_attention ----

class Active:
    """What torch.nn.attention holds while ours is the FlashAttention; restore_flash_attention_impl() calls remove()."""

    def __init__(self):
        glue().sdpa_torch_activate(True)
        if torch.cuda.is_available():  # PyTorch sets its order, cuDNN first on Hopper, when it first chooses
            torch._fused_sdp_choice(*[torch.empty(1, 1, 1, 64, dtype=torch.half, device="cuda")] * 3)
        self.order = torch._C._get_sdp_priority_order()
        first = [int(SDPBackend.FLASH_ATTENTION), int(SDPBackend.CUDNN_ATTENTION)]
        torch._C._set_sdp_priority_order(first + [backend for backend in self.order if backend not in first])

    def remove(self):
        glue().sdpa_torch_activate(False)
        torch._C._set_sdp_priority_order(self.order)


def activate():
    """Puts the kernels behind PyTorch's FlashAttention backend, until torch.nn.attention.restore_flash_attention_impl()."""
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise Unavailable(f"PyTorch {torch.__version__} takes no other FlashAttention; 2.11 is the first that does")
    torch.nn.attention.register_flash_attention_impl("sdpa", register_fn=Active)
    torch.nn.attention.activate_flash_attention_impl("sdpa")


def why_not(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Why F.scaled_dot_product_attention(...) runs PyTorch's own kernel with these arguments after activate(); empty if ours."""
    if attn_mask is not None:
        return "there is an attn_mask; PyTorch's FlashAttention takes none"
    if dropout_p or (scale is not None and not scale > 0):
        return "there is dropout" if dropout_p else f"scale={scale} is not positive"
    glue()
    why = torch.ops.sdpa.why_not(q, k, v, False)
    if not why and is_causal and q.shape[2] != k.shape[2]:
        return "PyTorch's FlashAttention takes is_causal with Sq = Sk alone; sdpa.attention has causal='br' and 'tl'"
    return why
