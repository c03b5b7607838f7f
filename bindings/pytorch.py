"""sdpa.cu's kernels in PyTorch 2.11 to 2.15. docs/USING.md has examples. Without installing a package:

    import sys; sys.path.insert(0, ".../bindings")
    import pytorch as sdpa
    sdpa.activate()                                # F.scaled_dot_product_attention and varlen_attn use them if possible
    sdpa.attention(q, k, v, causal="br", window=(1024, 0))  # more options
    sdpa.attention(q, k, v, score_mod="s - x0[h] * real(q + Sk - Sq - k)", args=[slopes])  # any modification of the scores

The kernels are lines of configs.txt. nvcc builds each when it is first needed (20 to 60 s) into $SDPA_CACHE (or
~/.cache/sdpa)."""
import collections
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
import types

import torch
from torch.utils.flop_counter import register_flop_formula

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DTYPES = {torch.float16: "", torch.bfloat16: "_bf16", torch.float8_e4m3fn: "_e4m3"}  # and the suffixes of their lines
FEATURES = ("USE_SOFTCAP", "USE_SINKS", "USE_LENGTHS", "USE_PAGES", "USE_BIAS=1", "USE_BIAS=2",
            "OUT_DTYPE=BF16", "KV_DTYPE=FP8_E4M3", "USE_BIAS=3", "USE_PAGES=2", "USE_KEY_MASK", "USE_BIAS=4",
            "USE_BIAS=5")  # in the order of the bits of Feature in pytorch.h
MASKS = {None: 0, False: 0, "off": 0, True: 1, "br": 1, "tl": 2}
BACKWARDS = None, "sdpa", "deterministic", "torch"  # values of attention()'s argument
PREFERENCES = {None: 0, "sdpa": 1, "torch": 2}  # pytorch_backward.h's Preference


# ---- expressions of scores ----

# The arguments of attention() that nvcc compiles into the kernels: the knob, and the numbers and arrays that an expression may
# use.
NUMBERS_AND_ARRAYS = {"score_mod": ("SCORE_MOD", "s b h q k Sq Sk".split(), "x0 x1 x2 x3".split()),
                      "mask_mod": ("MASK_MOD", "b h q k Sq Sk".split(), "x0 x1 x2 x3 i0 i1".split())}
EXPRESSIONS = tuple(knob for knob, _, _ in NUMBERS_AND_ARRAYS.values())
ARRAYS = NUMBERS_AND_ARRAYS["mask_mod"][2]
# Functions with their numbers of arguments.
FUNCTIONS = dict.fromkeys("real int exp exp2 log log2 sqrt tanh tanh_approx sin cos abs floor".split(), 1) | \
    dict.fromkeys("min max pow".split(), 2)
UNARY, BINARY = "+ - ! ~".split(), "+ - * / % < > <= >= == != && || & | ^ << >>".split()
# A C++ token: a name, a number, or an operator (longest match).
TOKEN = re.compile(r"(?P<name>[A-Za-z_]\w*)|(?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)|"
                   r"\+\+|--|->|::|<<=|>>=|[-+*/%&|^=!<>]=|<<|>>|&&|\|\||.", re.ASCII | re.DOTALL)
NUMBER = re.compile(r"0|[1-9]\d*|(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?f?|\d+[eE][+-]?\d+f?", re.ASCII)
MOST_CHARACTERS = 1000


@functools.lru_cache(1024)
def parsed(argument, text):
    """Returns the expression for nvcc and the names of its arrays. Raises for tokens that are not in the lists above and for
    sequences of tokens that are not an expression, so the text cannot contain statements, directives, strings or options of
    nvcc."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"sdpa.attention: {argument} has {len(text)} characters, more than {MOST_CHARACTERS}")
    _, numbers, arrays = NUMBERS_AND_ARRAYS[argument]
    tokens, named = [], set()
    opened = []  # for each open bracket or "?": the token that closes it, and the number of arguments that are missing
    expected = "operand"  # or "operator", or the bracket after the name of an array or function
    for match in TOKEN.finditer(text):
        token, top = match[0], opened[-1] if opened else ("", 0)
        if token == " ":
            continue
        tokens.append(token)
        if expected == "operand" and (token in numbers or match["number"] and NUMBER.fullmatch(token)):
            expected = "operator"
        elif expected == "operand" and token in arrays:
            expected, count = "[", 1
            named.add(token)
        elif expected == "operand" and token in FUNCTIONS:
            expected, count = "(", FUNCTIONS[token]
        elif expected == "operand" and token == "(":
            opened.append((")", 1))
        elif expected == "operand" and token in UNARY:
            pass
        elif expected == "operator" and token in BINARY:
            expected = "operand"
        elif expected == "operator" and token == "?":
            expected = "operand"
            opened.append((":", 1))
        elif expected == "operator" and token == top[0] and top[1] == 1:
            expected = "operand" if token == ":" else "operator"
            opened.pop()
        elif expected == "operator" and token == "," and top[1] > 1:
            expected = "operand"
            opened[-1] = (top[0], top[1] - 1)
        elif token == expected and token in "([":
            expected = "operand"
            opened.append((")" if token == "(" else "]", count))
        else:
            raise ValueError(f"sdpa.attention: {argument}: {token!r} at character {match.start() + 1} is not allowed there; "
                             "docs/USING.md lists the names, functions and operators of expressions")
    if expected != "operator" or opened:
        missing = repr(opened[-1][0]) if expected == "operator" else f"an {expected}" if expected == "operand" else repr(expected)
        raise ValueError(f"sdpa.attention: {argument} ends where {missing} is missing")
    return " ".join(tokens), frozenset(named)


@functools.lru_cache(1024)
def check_expressions(score_mod, mask_mod, given):
    """Raises if an expression is not allowed, or if the arrays that they use are not exactly the given names."""
    named = set()
    for argument, text in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if text:
            named |= parsed(argument, text)[1]
    for name in sorted(named - set(given)):
        raise ValueError(f"sdpa.attention: args has no {name}; its float32 tensors are x0, x1, ... and its int32 tensors i0, i1, "
                         "in their order")
    for name in sorted(set(given) - named):
        raise ValueError(f"sdpa.attention: args has {name}, which neither score_mod nor mask_mod names")


# ---- building ----

class Unavailable(RuntimeError):
    """The reason why a kernel is not available, in one sentence."""


class FullDisk(Unavailable):
    """A full disk; a later attempt may succeed."""


class FailedBefore(Unavailable):
    """The error of the last attempt to build."""


def widths(capability, D, Dv=0):
    """HEAD_DIM and HEAD_DIM_V of the build for a problem with D and Dv: on sm_90 the next larger ones with tuned tiles."""
    Dv = Dv or D
    if min(D, Dv) < 8 or max(D, Dv) > 256 or D % 8 or Dv % 8:
        raise Unavailable(f"there is no line for D={D}, Dv={Dv}: both must be multiples of 8 from 8 to 256")
    if capability[0] != 9:
        if D % 16 or Dv % 16 or min(D, Dv) < 32:
            raise Unavailable(f"there is no line for D={D}, Dv={Dv} except on sm_90; here both must be multiples of 16 from 32 on")
        return D, Dv
    return tuple(next(size for size in (64, 96, 128, 192, 256) if size >= most) for most in (max(D, Dv), Dv))


def line_of(capability, dtype, D, Dv=0):
    """The line of configs.txt for a compute capability and a problem, with the next larger D that has a line."""
    family = "hopper" if capability[0] == 9 else "ampere"
    if capability < (8, 0):
        raise Unavailable(f"this GPU is of sm_{capability[0]}{capability[1]}; sdpa's kernels need sm_80 or newer")
    if dtype == torch.float8_e4m3fn and family != "hopper":
        raise Unavailable("e4m3 has a tuned line for sm_90 only")
    D, _ = widths(capability, D, Dv)
    size = "" if D <= 64 else "_d128" if D <= 128 else "_d256"
    return family + (DTYPES[dtype] + size if "e4m3" in DTYPES[dtype] else size + DTYPES[dtype])


def knobs_of(name):
    """{knob: value} of a line of configs.txt."""
    lines = dict(re.findall(r"^(\w+)[ \t]*(.*?)[ \t]*(?:#.*)?$", pathlib.Path(ROOT, "configs.txt").read_text(), re.MULTILINE))
    base, words = re.match(r"(?::\s*(\w+))?(.*)", lines[name]).groups()
    return {**(knobs_of(base) if base else {}), **dict(re.findall(r"\b([A-Z]\w*)=(\S+)", words))}


def version_of(nvcc):
    return subprocess.run([nvcc, "--version"], capture_output=True).stdout


def nvcc():
    """Finds nvcc of the CUDA version of PyTorch: in CUDA_HOME (like PyTorch's extensions), on PATH, or in the packages that pip
    installs with bindings[nvcc13]."""
    wanted = (torch.version.cuda or "").partition(".")[0]
    home, path = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"), os.environ.get("PATH", "")
    folders = [os.path.join(home, "bin"), path] if home else [path, "/usr/local/cuda/bin"]
    packages = importlib.util.find_spec("nvidia")
    folders += [os.path.join(folder, f"cu{wanted}", "bin") for folder in (packages and packages.submodule_search_locations or ())]
    other = ""
    for folder in folders:
        if found := shutil.which("nvcc", path=folder):
            release = re.search(r"release (\d+)", version_of(found).decode())
            if not release or release[1] == wanted or not wanted:
                return found
            other = other or f"{found} is of CUDA {release[1]}, and this PyTorch is built for CUDA {wanted}"
    hint = ', or in a clone type: pip install "./bindings[nvcc13]"' if wanted == "13" else ""
    if other:
        raise Unavailable(f"{other}; set CUDA_HOME to a CUDA Toolkit {wanted}{hint}")
    raise Unavailable(f"nvcc is missing; install the CUDA Toolkit 12.4 or newer, or put its bin folder on PATH{hint}")


def digest(*parts):
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def built(what, sources, *options):
    """The path of a shared library that nvcc compiles from the first source, which includes the others, or from the cache. The
    name contains a hash of all inputs and one of nvcc's version. Without nvcc, the newest file with the first hash is used."""
    folder = pathlib.Path(os.environ.get("SDPA_CACHE") or "~/.cache/sdpa").expanduser().absolute()  # absolute, since nvcc runs in another folder
    texts = [pathlib.Path(ROOT, path).read_bytes() for path in sources]
    own = [os.fsencode(x) for x in options if x[:2] not in ("-I", "-L")]  # independent of the location of PyTorch
    name = f"{what}-{digest(*texts, *own)}"
    try:
        compiler = nvcc()
        path = os.path.join(folder, f"{name}-{digest(version_of(compiler))}.so")
        if os.path.exists(path):
            return path
        os.makedirs(folder, exist_ok=True)
        lock = open(path + ".lock", "w")
    except (Unavailable, OSError) as error:
        others = sorted(folder.glob(f"{name}-*.so"), key=os.path.getmtime)  # the same library, built by another nvcc
        if others:
            return str(others[-1])
        if isinstance(error, Unavailable):
            raise
        raise Unavailable(f"{folder} cannot be written to ({error.strerror}); set SDPA_CACHE to a folder that can") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second thread or process waits for the first one
        if not os.path.exists(path):
            print(f"sdpa: building {what} by nvcc, 20 to 60 s, once ...", file=sys.stderr, flush=True)
            since = time.monotonic()
            new = f"{path}.{os.getpid()}"
            done = subprocess.run([compiler, "-shared", *options, sources[0], "-o", new], cwd=ROOT, capture_output=True,
                                  text=True)
            if done.returncode:
                if full := re.search(".*(?:No space left on device|Disk quota exceeded).*", done.stderr):
                    raise FullDisk(f"no space is left for building {what}: {full[0].strip()}; free some, or set SDPA_CACHE (now {folder}) "
                                   "or TMPDIR to a folder with more")
                said = re.search(r"error.*", done.stderr)
                raise Unavailable(f"nvcc could not build {what}: {said.group() if said else done.stderr.strip()[-300:]}")
            os.rename(new, path)
            print(f"sdpa: building {what} took {time.monotonic() - since:.0f} s", file=sys.stderr, flush=True)
    return path


LINE_SOURCES = "bindings/library.cu", "sdpa.cu", "sdpa_backward.cu", "bindings/sdpa.h"
GLUE_PARTS = "append attention autograd backward operators own_backward".split()
GLUE_SOURCES = ("bindings/pytorch.cpp", "bindings/pytorch.h", *(f"bindings/pytorch_{part}.h" for part in GLUE_PARTS),
                "bindings/append.h", "bindings/sdpa.h")
APPENDER_SOURCES = "bindings/append.cu", "bindings/append.h"
FAILED = {}  # {what was built: (its sources and environment, the error)}


def tried(key, sources, build):
    """build(). Repeats the error of an earlier attempt unless a source or an environment variable has changed since."""
    files = [os.stat(os.path.join(ROOT, path)) for path in ("configs.txt", *sources)]
    made_of = [*((file.st_mtime_ns, file.st_size) for file in files),
               *map(os.environ.get, ("PATH", "CUDA_HOME", "CUDA_PATH", "SDPA_CACHE"))]
    before, sentence = FAILED.get(key, (None, ""))
    if before == made_of:
        raise FailedBefore(sentence)
    try:
        return build()
    except Exception as trouble:
        if not isinstance(trouble, FullDisk):
            FAILED[key] = made_of, str(trouble) or type(trouble).__name__
        raise


def arch_of(capability):
    return f"{capability[0]}{capability[1]}{'a' if capability[0] == 9 else ''}"


def build_of(name, capability, *features):
    """The arguments of built() for a line with additional knobs; a knob without a value is 1."""
    arch = arch_of(capability)
    own = {knob: value or "1" for knob, _, value in (feature.partition("=") for feature in features)}
    knobs = [f"-D{knob}={value}".replace(",", "\\,") for knob, value in {**knobs_of(name), **own}.items()]  # nvcc splits at commas
    words = [feature.partition("=")[0] if feature.startswith(EXPRESSIONS) else feature for feature in features]
    return ("-".join((name, *words, f"sm_{arch}")), LINE_SOURCES,
            "-std=c++17", "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Xcompiler=-fPIC,-fno-gnu-unique",
            *knobs)


@functools.cache
def library_of(name, capability, *features):
    """Loads a line as a library of C functions."""
    return ctypes.CDLL(built(*build_of(name, capability, *features)))


def line_with(capability, dtype, D, Dv, features, score_mod="", mask_mod=""):
    """The arguments of library_of() for a problem: its line, and the knobs of its sizes, features and expressions. Expressions
    reach nvcc only through knobs_of_mods()."""
    if features >> FEATURES.index("OUT_DTYPE=BF16") & 1 and dtype != torch.float8_e4m3fn:
        raise Unavailable("bf16_out is for e4m3 only; otherwise O has the dtype of q")
    if features >> FEATURES.index("KV_DTYPE=FP8_E4M3") & 1:
        if dtype == torch.float8_e4m3fn:
            raise Unavailable("kv8 is for e4m3 k and v with a 16-bit q, but q is e4m3")
        if capability < (8, 9):
            raise Unavailable("e4m3 k and v with a 16-bit q need sm_89 or newer")
        multiple = 16 if capability[0] == 9 else 32
        if D % multiple or Dv % multiple:
            raise Unavailable(f"e4m3 k and v with a 16-bit q need D in multiples of {multiple}, not D={D}, Dv={Dv}")
        line = "hopper_kv8_d128_bf16" if capability[0] == 9 else "mma_decode_kv8_d128_bf16"
        D, Dv = widths(capability, D, Dv)
        knobs = [f"HEAD_DIM={D}"] * (D != 128) + ["DTYPE=FP16"] * (dtype == torch.float16)
    else:
        line, (D, Dv) = line_of(capability, dtype, D, Dv), widths(capability, D, Dv)
        knobs = [f"HEAD_DIM={D}"] * (D not in (64, 128, 256))
    knobs += [f"HEAD_DIM_V={Dv}"] * (Dv != D)
    knobs += [knob for bit, knob in enumerate(FEATURES) if features >> bit & 1]
    return line, capability, *knobs, *knobs_of_mods(score_mod, mask_mod)


def knobs_of_mods(score_mod, mask_mod):
    """The knobs of expressions, checked by parsed(). "": none."""
    return [f"{NUMBERS_AND_ARRAYS[argument][0]}={parsed(argument, text)[0]}"
            for argument, text in (("score_mod", score_mod), ("mask_mod", mask_mod)) if text]


# The lines of the backward pass, by preference.
# sizes: the HEAD_DIMs that are built, with their knobs; a problem takes the next larger one.
# pads: D must be HEAD_DIM, so smaller ones are padded.
# repeats: two runs give the same bits.
# faster: the D for which the line was measured to be at least as fast as PyTorch's backward (results/backward). For another D,
#   which takes as long as the next HEAD_DIM, and with expressions or a feature of NOT_MEASURED, it runs only if it is needed:
#   PyTorch has no backward, or one that may return NaN or is not deterministic.
# is_short: only for at most 64 queries and keys, for which tiles of 128 are mostly empty.
BackwardRow = collections.namedtuple("BackwardRow", "name capabilities sizes pads repeats faster is_short", defaults=(False,))
BACKWARD_LINES = (
    BackwardRow("backward_mma5", (9,), {32: (), 64: ()}, True, False, (), True),
    BackwardRow("backward_mma", (9,), {32: (), 64: ()}, True, True, (), True),
    BackwardRow("backward_hopper", (9,), {64: (), 128: ("BLOCK_N=64",), 256: ("BLOCK_N=64", "STAGES=1")}, False, False,
                (64, 128, 256)),
    BackwardRow("backward_ordered", (9,), {64: (), 128: ("BLOCK_N=64",), 256: ("BLOCK_N=64", "STAGES=1")}, False, True, ()),
    BackwardRow("backward_mma", range(8, 100), {64: (), 96: (), 128: ("BLOCK_N=32",), 256: ("BLOCK_N=32", "STAGES=1")}, True, True, ()))
NOT_MEASURED = "USE_LENGTHS", "USE_BIAS=1", "USE_BIAS=2", "USE_BIAS=3"
NEEDED, DETERMINISTIC, SHORT = 1, 2, 4  # of pytorch_own_backward.h's BackwardKey


def backward_line_with(capability, dtype, D, features, requirements, score_mod="", mask_mod=""):
    """The arguments of library_of() for the gradients of a problem, and the D to which it is padded, or 0. None without NEEDED
    if the line is not known to be faster than PyTorch's backward."""
    for row in BACKWARD_LINES:
        size = next((size for size in row.sizes if size >= D), None)
        if size is None or capability[0] not in row.capabilities or requirements & DETERMINISTIC and not row.repeats:
            continue
        if row.is_short and not (requirements & NEEDED and requirements & SHORT):
            continue
        is_measured = not (score_mod or mask_mod or any(features >> FEATURES.index(feature) & 1 for feature in NOT_MEASURED))
        if not requirements & NEEDED and not (is_measured and D in row.faster):
            return None
        knobs = [f"HEAD_DIM={size}", *row.sizes[size], *["DTYPE=BF16"] * (dtype == torch.bfloat16)]
        knobs += [knob for bit, knob in enumerate(FEATURES) if features >> bit & 1]
        return (row.name, capability, *knobs, *knobs_of_mods(score_mod, mask_mod)), size * row.pads
    raise Unavailable(f"there is no line of the backward pass for D={D} on sm_{capability[0]}{capability[1]}")


LINE_FUNCTIONS = ("workspace_bytes", "scratch_bytes", "forward", "bias_map_bytes", "map_bias")


class Line(ctypes.Structure):
    """pytorch.h's Line."""
    _fields_ = [*((name, ctypes.c_void_p) for name in LINE_FUNCTIONS), ("trouble", ctypes.c_char * 512)]


class BackwardLine(ctypes.Structure):
    """pytorch_own_backward.h's BackwardLine."""
    _fields_ = [("workspace_bytes", ctypes.c_void_p), ("backward", ctypes.c_void_p), ("head_dim", ctypes.c_int64),
                ("is_final", ctypes.c_int64), ("trouble", ctypes.c_char * 512)]


class Appender(ctypes.Structure):
    """pytorch_append.h's Appender."""
    _fields_ = [("append", ctypes.c_void_p), ("trouble", ctypes.c_char * 512)]


BUILDING = threading.Lock()


LOAD = ctypes.CFUNCTYPE(None, *[ctypes.c_int] * 5, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(Line))  # pytorch.h's Load


@LOAD
def load_line(device, dtype, D, Dv, features, score_mod, mask_mod, line):
    try:
        capability = torch.cuda.get_device_capability(device)
        asked = capability, list(DTYPES)[dtype], D, Dv, features, score_mod.decode(), mask_mod.decode()
        with BUILDING:
            library = tried(asked, LINE_SOURCES, lambda: library_of(*line_with(*asked)))
        for name in LINE_FUNCTIONS:
            setattr(line[0], name, ctypes.cast(getattr(library, "sdpa_library_" + name), ctypes.c_void_p).value)
    except Exception as trouble:  # exceptions cannot cross into C++, which recognizes an interrupt by the empty Line
        line[0].trouble = (str(trouble) or type(trouble).__name__).encode()[:511]
        if not isinstance(trouble, FailedBefore):
            print(f"sdpa: {trouble}; where PyTorch has a kernel of its own, that runs instead", file=sys.stderr)


# pytorch_own_backward.h's LoadBackward
LOAD_BACKWARD = ctypes.CFUNCTYPE(None, *[ctypes.c_int] * 5, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(BackwardLine))


@LOAD_BACKWARD
def load_backward(device, dtype, D, features, requirements, score_mod, mask_mod, line):
    try:
        problem = torch.cuda.get_device_capability(device), list(DTYPES)[dtype], D, features
        found = backward_line_with(*problem, requirements, score_mod.decode(), mask_mod.decode())
        if found is None:
            line[0].trouble, line[0].is_final = b"our backward is not known to be faster than PyTorch's", 1
            return
        words, line[0].head_dim = found
        with BUILDING:
            library = tried(("backward", *words), LINE_SOURCES, lambda: library_of(*words))
        line[0].workspace_bytes = ctypes.cast(library.sdpa_library_backward_workspace_bytes, ctypes.c_void_p).value
        line[0].backward, line[0].is_final = ctypes.cast(library.sdpa_library_backward, ctypes.c_void_p).value, 1
    except Exception as trouble:
        line[0].trouble = (str(trouble) or type(trouble).__name__).encode()[:511]
        if not isinstance(trouble, FailedBefore):
            print(f"sdpa: {trouble}; where PyTorch has a backward of its own, that runs instead", file=sys.stderr)


def build_of_appender(capability):
    """The arguments of built() for append.cu."""
    arch = arch_of(capability)
    return (f"append-sm_{arch}", APPENDER_SOURCES, "-std=c++17", "-O3",
            f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Xcompiler=-fPIC")


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.POINTER(Appender))
def load_appender(device, appender):
    try:
        build = build_of_appender(torch.cuda.get_device_capability(device))
        with BUILDING:
            library = tried("append", APPENDER_SOURCES, lambda: ctypes.CDLL(built(*build)))
        appender[0].append = ctypes.cast(library.sdpa_append, ctypes.c_void_p).value
    except Exception as trouble:
        appender[0].trouble = (str(trouble) or type(trouble).__name__).encode()[:511]


def build_of_glue():
    """The arguments of built() for pytorch.cpp."""
    if not torch.version.cuda:
        raise Unavailable("this PyTorch is built without CUDA")
    of_torch = os.path.dirname(torch.__file__)
    return (f"pytorch-{torch.__version__}", GLUE_SOURCES,
            "-std=c++20", "-O2", "-x=c++", "-Xcompiler=-fPIC", "-DAT_PER_OPERATOR_HEADERS", f"-I{of_torch}/include",
            f"-I{of_torch}/include/torch/csrc/api/include", f"-L{of_torch}/lib", "-lc10", "-lc10_cuda", "-ltorch_cpu",
            "-ltorch_cuda", "-ltorch")


@functools.cache
def glue():
    """Compiles and loads pytorch.cpp."""
    with BUILDING:
        path = tried("glue", GLUE_SOURCES, lambda: built(*build_of_glue()))
        first_call.library = None  # replaced by the operators that are loaded now
        library = ctypes.CDLL(path)
    library.sdpa_torch_load_lines_by(load_line)
    library.sdpa_torch_load_appender_by(load_appender)
    library.sdpa_torch_load_backward_by(load_backward)
    return library


# ---- attention() as an operator ----

LIBRARY = torch.library.Library("sdpa", "DEF")
TENSORS, MASK = "(Tensor q, Tensor k, Tensor v, ", "int causal, SymInt left, SymInt right, int window_alignment, float? scale"
CALL = (f"{TENSORS}{MASK}, float softcap, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, Tensor? sinks, "
        "Tensor? k_lengths, Tensor? q_starts, Tensor? k_starts, Tensor? page_table, SymInt most_keys, Tensor? bias=None, "
        "SymInt bias_keys=0, Tensor? q_lengths=None, bool batch_invariant=False, bool bf16_out=False, str score_mod='', "
        f"str mask_mod='', {', '.join(f'Tensor? {name}=None' for name in ARRAYS)}, Tensor? block_mask=None, str made_for='', Tensor? k_firsts=None, "
        "str backward='')")
LIBRARY.define(f"attention{CALL} -> (Tensor, Tensor)")
LIBRARY.define(f"block_mask{CALL} -> (Tensor, str)")
LIBRARY.define(f"attention_backward(Tensor? grad, {TENSORS[1:]}Tensor o, Tensor lse, {MASK}, Tensor? bias=None, str without='', "
               "float softcap=0., Tensor? sinks=None, Tensor? grad_lse=None, str backward='', Tensor? k_lengths=None, Tensor? q_starts=None, "
               "Tensor? k_starts=None, SymInt most_keys=0, Tensor? q_lengths=None, Tensor? k_firsts=None, str score_mod='', str mask_mod='', "
               "Tensor? x0=None, Tensor? x1=None, Tensor? x2=None, Tensor? x3=None, Tensor? i0=None, Tensor? i1=None, "
               "SymInt bias_keys=0, bool to_bias=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
LIBRARY.define("append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor lengths, Tensor? page_table, "
               "Tensor? starts) -> Tensor")  # of flash_attn_interface.py
LIBRARY.define(f"why_not{TENSORS}Tensor? attn_mask, float dropout_p, bool is_causal, float? scale, bool enable_gqa) -> str")
LIBRARY.define("bias_of(Tensor bias, Tensor q, int keys, bool for_cudnn) -> Tensor")  # what the kernels, or cuDNN's, are given
OPERATOR, BLOCK_MASK = torch.ops.sdpa.attention.default, torch.ops.sdpa.block_mask.default
BACKWARD = torch.ops.sdpa.attention_backward.default


# ---- fake tensors ----

# Fake and meta tensors have sizes, strides and types. troubles(), refuse_backward() and troubles_of_append() refuse what
# the C++ functions refuse, in the same order and with the same sentences. tests/test_pytorch.py compares them.

BAD_ROWS = "the rows of q, k or v are not contiguous or do not all start at a multiple of 16 bytes"
LENGTHS = "k_lengths", "q_lengths", "q_starts", "k_starts", "page_table", "k_firsts"


def holds(condition):
    """True if a condition on sizes, which may be symbols of a graph, holds; False if only data can tell."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # takes long to import
    return guard_or_false(condition)


def differ(sizes, others):
    """Conditions, one of which holds if two lists of sizes differ."""
    return [len(sizes) != len(others), *(one != other for one, other in zip(sizes, others))]


def expands(sizes, to):
    """True if a tensor of these sizes expands to others."""
    return len(sizes) <= len(to) and all(holds(one == 1) or not holds(one != other) for one, other in zip(sizes[::-1], to[::-1]))


def raise_first(function, troubles):
    """Raises the sentence of the first trouble whose condition, or one of whose conditions, holds."""
    for conditions, sentence in troubles:
        if any(map(holds, conditions if isinstance(conditions, list) else [conditions])):
            raise RuntimeError(f"{function}: {sentence}")


def call_of(operator, arguments):
    """The arguments of an operator by their names."""
    return types.SimpleNamespace(**{argument.name: argument.default_value for argument in operator._schema.arguments}
                                 | dict(zip((argument.name for argument in operator._schema.arguments), arguments)))


def is_int_row(x, q, length):
    return x.dtype == torch.int32 and x.device == q.device and x.dim() == 1 and x.is_contiguous() and not holds(x.shape[0] != length)


def is_shared(x, n):
    """True if the n-th dimension from the end is missing, or has size 1 or stride 0."""
    return x.dim() < n or holds(x.shape[-n] == 1) or holds(x.stride(-n) == 0)


def is_of_keys(mask):
    """True if all heads and queries share the mask, like the function of this name in pytorch.h."""
    return is_shared(mask, 2) and is_shared(mask, 3)


def features_of(given):
    """The bits of Feature in pytorch.h for the arguments of a call that are not None."""
    lengths = any(name in given for name in LENGTHS)
    any_pages = "page_table" in given and (holds(given["k"].shape[2] % 16 != 0) or "k_firsts" in given)
    bias, own = (given["bias"].dtype, given["q"].dtype) if "bias" in given else (None, None)
    of_keys = bias is not None and not lengths and not given.get("bias_keys") and is_of_keys(given["bias"])
    kinds = bias is not None and bias == own, bias == torch.bool, bias not in (None, torch.bool, own)  # of a bias
    is_own, is_mask, is_fp32 = (kind and not of_keys for kind in kinds)
    is_own_of_keys, is_mask_of_keys, is_fp32_of_keys = (kind and of_keys for kind in kinds)
    features = (given["softcap"] != 0, "sinks" in given, lengths, "page_table" in given and not any_pages,
                is_own, is_mask, given.get("bf16_out", False), given["v"].dtype != given["q"].dtype, is_fp32, any_pages,
                is_mask_of_keys, is_own_of_keys, is_fp32_of_keys)  # as in FEATURES
    return sum(bit << i for i, bit in enumerate(features))


def dependencies_of(call, B, Sk):
    """(name, value) of what the function of this name in pytorch.h lists. Sizes may be symbols."""
    q, k, v, bias = call.q, call.k, call.v, call.bias

    def is_null(name, x):  # a null pointer in the launch; a page table of no columns has q's pointer
        return x is None or name in ("sinks", *LENGTHS) and holds(x.numel() == 0) and (name != "page_table" or holds(q.numel() == 0))
    features = features_of({name: x for name, x in vars(call).items() if not is_null(name, x)})
    has_one_head = all(is_shared(x, 3) and not (holds(x.shape[2] > 1) and is_shared(x, 2)) for x in (k, v)) and all(
        x is None or is_shared(x, 1) for x in (call.k_descale, call.v_descale))
    has_rows = bias is not None and not features >> FEATURES.index("USE_KEY_MASK") & 1
    yield from (("score_mod", f"'{call.score_mod}'"), ("mask_mod", f"'{call.mask_mod}'"), ("device", -1 if q.device.index is None else q.device.index),
                ("dtype", str(q.dtype)[6:]), ("options", features), ("B", B), ("Hq", q.shape[1]), ("Hkv", 1 if has_one_head else k.shape[1]),
                ("Sq", q.shape[2]), ("Sk", Sk), ("D", q.shape[3]), ("Dv", v.shape[3]), ("causal", call.causal), ("window_left", call.left),
                ("window_right", call.right), ("window_alignment", call.window_alignment), ("batch_invariant", int(call.batch_invariant)),
                ("bias_keys", call.bias_keys), ("bias of each batch", int(has_rows and not is_shared(bias, 4))),
                ("bias of each head", int(has_rows and not is_shared(bias, 3))))


def troubles(call):
    """(conditions, sentence) of what attend() in pytorch_attention.h refuses."""
    q, k, v, bias, table = call.q, call.k, call.v, call.bias, call.page_table
    has_lengths = any(getattr(call, name) is not None for name in LENGTHS)
    for name, x in (("q", q), ("k", k), ("v", v)):
        yield x.dim() != 4, f"a tensor has {x.dim()} dimensions, not [B,H,S,D]"
        yield x.device != q.device, f"tensors are on {q.device} and {x.device}"
        yield x.dtype != (q if name == "q" else v).dtype, "q, k and v have different dtypes"
        yield [name != "v" and x.shape[3] != q.shape[3], not has_lengths and x.shape[0] != q.shape[0]], "q, k and v differ in B or D"
    e4m3 = torch.float8_e4m3fn
    yield q.dtype not in DTYPES, f"there is no line for {q.dtype}"
    yield v.dtype not in (q.dtype, e4m3), "q, k and v have different dtypes"
    for D in (q.shape[3], v.shape[3]):
        yield [D <= 0, D > 256, D % (16 // v.element_size()) != 0], f"there is no line for D={D}"
    yield differ(k.shape[:3], v.shape[:3]), "k and v have different shapes"
    yield [k.shape[1] == 0], "the heads of q are no multiple of those of k"
    yield [q.shape[1] % k.shape[1] != 0], "the heads of q are no multiple of those of k"
    yield [size > 10**9 for size in (*q.shape[:3], k.shape[2])], "a dimension is over 10^9"
    if call.scale is not None:
        yield not 0 <= call.scale < 1e38, f"scale={call.scale:g} is not from 0 to 10^38"
    for x in (q, k, v):
        yield [x.stride(3) != 1, x.storage_offset() * x.element_size() % 16 != 0], BAD_ROWS
        for i in range(3):
            yield not holds(x.shape[i] <= 1) and x.stride(i) * x.element_size() % 16 != 0, BAD_ROWS
    for name, keys, least in (("window_left", call.left, -1), ("window_right", call.right, -1), ("most_keys", call.most_keys, 0),
                              ("bias_keys", call.bias_keys, 0)):
        yield [keys < least, keys > 10**9], f"{name}={keys} is outside [{least}, 1000000000]"
    yield not has_lengths and call.most_keys != 0, "most_keys is for sequences of k_lengths, starts or pages"
    softcap = ctypes.c_float(call.softcap).value
    yield call.softcap != 0 and softcap == 0, f"softcap={call.softcap:g} is not from 1e-18 to 1e18"
    yield call.bf16_out and q.dtype != e4m3, "bf16_out is for e4m3 only; otherwise O has the dtype of q"
    is_mask_of_keys = bias is not None and bias.dtype == torch.bool and is_of_keys(bias) and not has_lengths
    yield v.dtype == e4m3 and bias is not None and not (is_mask_of_keys and call.bias_keys == 0), \
        "e4m3 supports no bias except a bool mask that all heads and queries share, without lengths and bias_keys"
    yield bias is None and call.bias_keys != 0, "bias_keys is for a bias"
    yield bool(call.score_mod or call.mask_mod) and (call.softcap != 0 or bias is not None), \
        "softcap and bias cannot be combined with score_mod or mask_mod; write them into the expression, as in score_mod='30 * tanh(s / 30) + x0[k]'"
    tiles, sinks = call.block_mask, call.sinks
    yield tiles is not None and not (tiles.device == q.device and tiles.dtype == torch.uint8 and tiles.is_contiguous()), \
        f"block_mask is not on {q.device}"
    if sinks is not None:
        yield [sinks.device != q.device, *differ(sinks.shape, q.shape[1:2])], "sinks is not a tensor [Hq] on q's device"
    for name in ARRAYS:
        x, dtype = getattr(call, name), torch.float32 if name[0] == "x" else torch.int32
        if x is not None:
            yield [x.device != q.device, x.dtype != dtype, not x.is_contiguous(), x.numel() == 0], \
                f"{name} of args is not a contiguous {str(dtype)[6:]} tensor with elements on {q.device}"

    B = q.shape[0]
    for name, starts in (("q_starts", call.q_starts), ("k_starts", call.k_starts)):
        if starts is not None:
            B = starts.numel() - 1
            yield [B < 0, holds(B <= 0) and q.numel() != 0], \
                f"{name} has {starts.numel()} elements; want one more than the number of sequences, which is 0 only if q is empty"
    if table is not None:
        sentence = f"page_table is not an int32 tensor [{B},pages of a sequence] with contiguous rows on q's device"
        yield [table.dtype != torch.int32, table.device != q.device, table.dim() != 2], sentence
        yield [table.shape[0] != B, holds(table.stride(1) != 1) and table.shape[1] != 1], sentence
        yield [call.k_starts is not None], "page_table and k_starts exclude each other"
        yield [k.shape[2] == 0], "the pages of k and v have 0 keys"
        yield [table.shape[1] * k.shape[2] > 10**9], "a row of page_table has pages for over 10^9 keys"
    packs_q = call.q_starts is not None
    keys, packs_k = (k, call.k_starts is not None) if table is None else (q, packs_q)
    for name, length, rows, packs in (("q_starts", B + 1, q, packs_q), ("k_starts", B + 1, keys, packs_k), ("k_lengths", B, keys, packs_k),
                                      ("q_lengths", B, q, packs_q), ("k_firsts", B, keys, packs_k)):
        x, batches = getattr(call, name), 1 if packs else B
        yield rows.shape[0] != batches, f"q or k has a batch of {rows.shape[0]}, not {batches}"
        if x is not None:
            yield not is_int_row(x, q, length), f"{name} is not a contiguous int32 tensor [{length}] on q's device"
    Sk = k.shape[2] if table is None else table.shape[1] * k.shape[2]
    if bias is not None:
        queries = q.shape[2] if not packs_q else bias.shape[-2] if bias.dim() > 1 else 1
        covered = call.bias_keys or (torch.sym_min(call.most_keys, Sk) if call.most_keys else Sk)
        sizes = B, q.shape[1], queries, covered
        yield bias.device != q.device, f"bias is on {bias.device}, not on q's device"
        yield bias.dtype not in (torch.bool, torch.float32, torch.float16, torch.bfloat16), \
            f"bias is of {bias.dtype}, not bool, float32, float16 or bfloat16"
        yield not expands(bias.shape, sizes), f"bias is of shape {list(bias.shape)}, which does not expand to {list(sizes)}"
    key_batches = k.shape[0] if table is None and call.k_starts is None else B
    for name, x, batches in (("q_descale", q, B if packs_q else q.shape[0]), ("k_descale", k, key_batches), ("v_descale", v, key_batches)):
        factor, heads, key_heads = getattr(call, name), x.shape[1], k.shape[1]
        if factor is None:
            continue
        yield x.dtype != e4m3, f"{name} is for e4m3"
        yield factor.dtype != torch.float32 or factor.device != q.device, f"{name} is not a float32 tensor on {q.device}"
        by_key_head = name == "q_descale" and key_heads > 1 and key_heads != heads and factor.dim() > 0 and factor.shape[-1] == key_heads
        yield not expands([*factor.shape[:-1], heads] if by_key_head else factor.shape, (batches, heads)), \
            f"{name} is of shape {list(factor.shape)}, which does not expand to [{batches},{heads}]"
    if tiles is not None and call.made_for:
        made_for = iter(call.made_for.split("\n"))
        for name, value in dependencies_of(call, B, Sk):
            its = next(made_for, "")
            is_known = isinstance(value, (int, str)) and not (name == "device" and q.is_meta)  # else the launch compares them
            yield is_known and its != f"{name}={value}", f"block_mask was made for {its}, and this call has {name}={value}"
    # sdpa.cu refuses these.
    yield not has_lengths and call.bias_keys > Sk, f"bias_keys={call.bias_keys} is outside [0, {Sk}]"
    yield softcap != 0 and not 1e-18 <= softcap <= 1e18, f"softcap={softcap:g}: must be 0, or 1e-18 to 1e18"


def check_call(arguments):
    """Raises if attention() refuses a call. Returns its arguments by their names."""
    call = call_of(OPERATOR, arguments)
    check_expressions(call.score_mod, call.mask_mod, tuple(name for name in ARRAYS if getattr(call, name) is not None))
    raise_first("sdpa.attention", troubles(call))
    return call


@torch.library.register_fake("sdpa::attention")
def fake(*arguments):
    call = check_call(arguments)
    q, v = call.q, call.v
    dtype = torch.bfloat16 if call.bf16_out else torch.float16 if q.dtype == torch.float8_e4m3fn else q.dtype
    out = torch.empty_like(q, dtype=dtype) if v.shape[3] == q.shape[3] else q.new_empty((*q.shape[:3], v.shape[3]), dtype=dtype)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("sdpa::block_mask")
def fake_block_mask(*arguments):
    return check_call(arguments).q.new_empty(0, dtype=torch.uint8), ""  # the build knows its size


@torch.library.register_fake("sdpa::attention_backward")
def fake_backward(*arguments):
    call = call_of(BACKWARD, arguments)
    if call.q.device.type == "meta":  # a graph that is compiled may contain a backward that never runs
        refuse_backward(call)
    d_bias = call.bias.new_empty(call.bias.shape) if call.to_bias else call.lse.new_empty(0)
    of_sinks = call.lse.new_empty(0 if call.sinks is None else call.sinks.shape)
    return *map(torch.empty_like, (call.q, call.k, call.v)), of_sinks, d_bias


def refuse_backward(call):
    """Raises if no GPU has a backward for a call, as attention_backward() in pytorch_backward.h does."""
    def refuse(sentence):
        raise NotImplementedError(f"sdpa.attention: {sentence}")
    if call.without:
        refuse(call.without)
    q, k, v = call.q, call.k, call.v
    count = next((x.numel() - 1 for x in (call.q_starts, call.k_starts) if x is not None), q.shape[0])
    if q.numel() == 0 or k.numel() == 0 or count == 0:
        return
    has_lengths = any(getattr(call, name, None) is not None for name in LENGTHS)
    limited, masked, same = call.left >= 0 or call.right >= 0, call.causal != MASKS[None], q.shape[2] == k.shape[2]
    by = call.window_alignment or call.causal
    why_not_theirs = ""
    if call.softcap != 0 or call.sinks is not None:
        why_not_theirs = "PyTorch has no backward with softcap or sinks"
    elif call.score_mod or call.mask_mod:
        why_not_theirs = "PyTorch has no backward with score_mod or mask_mod"
    elif has_lengths:
        why_not_theirs = "attention() does not call PyTorch's backward with lengths or starts"
    elif call.to_bias:
        why_not_theirs = "attention() does not call PyTorch's backward for the gradient of a bias"
    elif call.bias is not None and (masked or limited or call.bias_keys):
        why_not_theirs = "attention() does not call PyTorch's backward for a bias with a causal mask, a window or bias_keys"
    else:
        bottom_right = call.causal != MASKS["tl"] and (not limited or by == MASKS["br"])
        by_flash = call.bias is None and q.shape[3] == v.shape[3] and (same or bottom_right)
        if not by_flash and (limited or call.causal == MASKS["br"] and not same):
            why_not_theirs = "PyTorch has a backward for a window and Sq != Sk only if the window and the mask are bottom-right"
            if q.shape[3] != v.shape[3]:
                case = "a window" if limited else "a bottom-right mask and Sq != Sk"
                why_not_theirs = f"PyTorch has no backward with {case} if v has another D than q"
    why_not_ours = ""
    if call.backward == "torch":
        why_not_ours = "backward='torch' was asked for"
    elif call.to_bias and (call.q_starts is not None or call.k_starts is not None):
        why_not_ours = "a bias of packed sequences has no gradient"
    elif call.to_bias and call.bias_keys and has_lengths:
        why_not_ours = "a bias of bias_keys has no gradient with lengths"
    is_forced = call.backward in ("sdpa", "deterministic")
    if why_not_ours and (is_forced or why_not_theirs):
        refuse(f"no backward, since {why_not_ours}" + ("" if is_forced else f"; {why_not_theirs}"))


def troubles_of_append(call):
    """(conditions, sentence) of what append() in pytorch_append.h refuses."""
    starts, lengths, table = call.starts, call.lengths, call.page_table
    B = lengths.numel()
    for cache, x in ((call.k_cache, call.k), (call.v_cache, call.v)):
        yield cache.dim() != 4 or x.dim() != (4 if starts is None else 3), \
            f"the caches have {cache.dim()} dimensions, and k or v {x.dim()}"
        yield [x.device != cache.device, x.dtype != cache.dtype, x.shape[-1] != cache.shape[3], x.shape[-2] != cache.shape[2],
               starts is None and x.shape[0] != B], f"k and v are not of the caches' device, type, heads and D, or not of {B} sequences"
        yield cache.stride(3) != 1, "rows of the caches are not contiguous"
        yield table is None and cache.shape[0] != B, f"there are {cache.shape[0]} caches for {B} sequences"
    yield differ(call.k.shape[:-1], call.v.shape[:-1]) + differ(call.k_cache.shape[:3], call.v_cache.shape[:3]), \
        "k and v, or their caches, differ in shape"
    for name, x, dims, length in (("cache_seqlens", lengths, 1, B), ("cu_seqlens_k_new", starts, 1, B + 1), ("page_table", table, 2, B)):
        if x is not None:
            yield name == "page_table" and call.k_cache.shape[1] == 0, "a page of page_table has 0 keys"
            is_integer = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
            sentence = f"{name} is not an integer tensor [{length}{',pages of a sequence' if dims == 2 else ''}] on the caches' device"
            yield x.device != call.k_cache.device or not is_integer or x.dim() != dims, sentence
            yield x.shape[0] != length, sentence


@torch.library.register_fake("sdpa::append")
def fake_append(*arguments):
    call = call_of(torch.ops.sdpa.append.default, arguments)
    raise_first("flash_attn_with_kvcache", troubles_of_append(call))
    return call.lengths.new_empty(call.lengths.shape, dtype=torch.int32)


# FLOP formulas for torch.utils.flop_counter. Like PyTorch's own, they depend only on shapes and ignore masks. Packed
# sequences count as equally long, caches and pages as full.
@register_flop_formula(torch.ops.sdpa.attention)
def flops(q, k, v, *rest, out_shape=None, **given):
    given.update(zip((argument.name for argument in OPERATOR._schema.arguments[3:]), rest))
    return 2 * pairs_of(q, k, **given) * (q[3] + v[3])


@register_flop_formula(torch.ops.sdpa.attention_backward)
def flops_backward(grad, q, k, v, *rest, out_shape=None, **given):
    given.update(zip((argument.name for argument in BACKWARD._schema.arguments[4:]), rest))
    return 2 * pairs_of(q, k, **given) * (3 * q[3] + 2 * v[3])


def pairs_of(q, k, page_table=None, k_starts=None, q_starts=None, **_):
    """The number of pairs of a query and a key of its sequence, from shapes."""
    starts = k_starts or q_starts
    keys = page_table[1] * k[2] if page_table else k[0] * k[2] // max(starts[0] - 1 if starts else q[0], 1)  # of a sequence
    return q[0] * q[1] * q[2] * keys


def build_ahead(operator, arguments):
    """Builds the line that attention() with these arguments will load. Ignores errors, which that call reports."""
    given = {argument.name: x for argument, x in zip(operator._schema.arguments, arguments) if x is not None}
    with contextlib.suppress(Exception):
        q, v = given["q"], given["v"]
        built(*build_of(*line_with(torch.cuda.get_device_capability(q.device), q.dtype, q.shape[3], v.shape[3],
                                   features_of(given), given.get("score_mod", ""), given.get("mask_mod", ""))))


def first_call(operator):
    """The implementation of an operator until pytorch.cpp is loaded: loads it, builds the line in parallel, and calls the operator
    again. A trace or a compiled graph may make the first call."""
    def load(*arguments):
        if operator in (OPERATOR, BLOCK_MASK):
            threading.Thread(target=build_ahead, args=(operator, arguments), daemon=True).start()
        glue()
        return operator(*arguments)
    return load


first_call.library = torch.library.Library("sdpa", "IMPL")
for key in ("CUDA", "Autograd"):
    first_call.library.impl("attention", first_call(OPERATOR), key)
for operator in (BACKWARD, torch.ops.sdpa.append.default, BLOCK_MASK):
    first_call.library.impl(operator.name(), first_call(operator), "CUDA")


KINDS = {"float": "a number", "int": "an integer", "bool": "True or False", "Tensor": "a tensor"}  # by the names of a schema
OF_WINDOW = {"left": "window[0]", "right": "window[1]"}  # names of the operator and of attention()


def check_tensors(function, **tensors):
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{function}: {name} is a {type(x).__name__}, not a tensor")
        if x.is_nested or x.layout is not torch.strided:
            raise TypeError(f"{function}: {name} is a {'nested' if x.is_nested else 'sparse'} tensor, not a dense one")


def is_one_of(x, values):
    try:
        return x in values
    except TypeError:  # it has no hash
        return False


def called(function, operator, *arguments, **named):
    """operator(...). An argument of a wrong type raises a sentence instead of PyTorch's error with the whole schema or list of
    dispatch keys."""
    if torch.compiler.is_compiling():
        return operator(*arguments, **named)
    try:
        return operator(*arguments, **named)
    except RuntimeError as error:
        wrong = re.match(r"\S+ Expected a value of type '(?:Optional\[)?(\w+)\]?' for argument '(\w+)' but instead found type '(\w+)'"
                         r"\.\nPosition: \d+\nValue: (.*)", str(error))
        if not wrong:
            given = zip((argument.name for argument in operator._schema.arguments), arguments)
            check_tensors(function, **{name: x for name, x in (*given, *named.items()) if isinstance(x, torch.Tensor)})
            raise
        wanted, name, kind, value = wrong.groups()
        why = f"a {kind}, not {KINDS[wanted]}" if kind not in ("int", wanted) or wanted == "Tensor" else "out of range"
    raise TypeError(f"{function}: {OF_WINDOW.get(name, name)}={value[:40]} is {why}")


BlockMask = collections.namedtuple("BlockMask", "tiles made_for")
NEW_BLOCK_MASK = object()


def modification(q, score_mod, mask_mod, args, block_mask):
    """Converts the arguments of attention() to those of OPERATOR."""
    for name, text in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if not isinstance(text, (str, type(None))):
            raise TypeError(f"sdpa.attention: {name} is a {type(text).__name__}, not the text of an expression")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"sdpa.attention: args is a {type(args).__name__}, not a list of tensors")
    reals, ints = [], []
    for n, x in enumerate(args):
        if not isinstance(x, torch.Tensor) or x.dtype not in (torch.float32, torch.int32):
            raise TypeError(f"sdpa.attention: args[{n}] is {f'of {x.dtype}' if isinstance(x, torch.Tensor) else f'a {type(x).__name__}'}; "
                            "want a tensor of float32 (x0 to x3) or of int32 (i0, i1)")
        if x.device != q.device:
            raise ValueError(f"sdpa.attention: args[{n}] is on {x.device}, not on {q.device}")
        (reals if x.dtype == torch.float32 else ints).append(x)
    if len(reals) > 4 or len(ints) > 2:
        raise ValueError("sdpa.attention: args has more than 4 tensors of float32 or more than 2 of int32")
    if not torch.compiler.is_compiling():  # else the fake kernel checks them
        check_expressions(score_mod, mask_mod, (*ARRAYS[:len(reals)], *ARRAYS[4:4 + len(ints)]))
    if block_mask is None or block_mask is NEW_BLOCK_MASK:
        kept = None, ""
    elif isinstance(block_mask, BlockMask):
        kept = block_mask
    else:
        raise TypeError(f"sdpa.attention: block_mask is a {type(block_mask).__name__}, not what block_mask() returns")
    return score_mod or "", mask_mod or "", *reals, *[None] * (4 - len(reals)), *ints, *[None] * (2 - len(ints)), *kept


def attention(q, k, v, causal=None, window=None, scale=None, q_descale=None, k_descale=None, v_descale=None,
              return_lse=False, softcap=None, sinks=None, k_lengths=None, q_starts=None, k_starts=None, most_keys=0, page_table=None,
              bias=None, bias_keys=0, q_lengths=None, batch_invariant=False, out_dtype=None, score_mod=None, mask_mod=None, args=(),
              block_mask=None, k_firsts=None, backward=None):
    """O = softmax(scale * q @ k.T) @ v, and the LSE [B,Hq,Sq] if requested. Raises if no line supports the arguments.

    q [B,Hq,Sq,D], k and v [B,Hkv,Sk,D]: CUDA tensors of one dtype (float16, bfloat16, float8_e4m3fn). D is a multiple of 8
        from 8 to 256 (of 16 for e4m3, and of 16 from 32 on GPUs other than sm_90); v and O may have another D. Hq is a
        multiple of Hkv. Rows are contiguous, and strides are multiples of 16 bytes; k and v may be expanded. A 16-bit q may
        have e4m3 k and v (sm_90: D is a multiple of 16; sm_89 and other newer GPUs: of 32, in a kernel for few queries).
        Under autocast, q, k and v are converted to its type.
    causal: None; "br" or True (the last query sees the last key); "tl" (the first query sees only the first key).
    window: (keys before, keys after) the position of a query that the query sees; None: all. A third element "br" or "tl" sets
        the alignment of the positions (default: that of causal).
    scale: default 1/sqrt(D). With 0, all visible keys have the same weight.
    q_descale, k_descale, v_descale: nonnegative float32 factors of e4m3 tensors, [B,H] or expandable to it; q's also
        [B,Hkv].
    out_dtype: type of O for e4m3 inputs, float16 (default) or bfloat16.
    softcap: replaces each logit x by softcap * tanh(x / softcap), by tanh.approx or, in 16-bit wgmma kernels with D <= 128, a
        polynomial.
    sinks [Hq]: exp(sink) is added to the row sums, and so to the LSE.
    k_lengths, q_lengths [B], int32: numbers of keys and of queries of each sequence. Masks and windows are aligned to them.
    k_firsts [B], int32: number of first keys of each sequence that are hidden; positions count from the next one.
    q_starts, k_starts [B+1], int32: packed sequences. The batch of q, or of k and v, is 1, and sequence b has the rows from
        starts[b] to starts[b+1]. Rows of O and LSE that belong to no query are not written and may contain NaN.
    page_table [B,N], int32: paged k and v [pages,Hkv,page size,D]; row b lists the pages of sequence b in order.
    most_keys: maximum number of keys per sequence; later keys are ignored; 0: Sk.
    bias: expandable to [B,Hq,Sq,keys], not copied if its keys are contiguous. A bool bias hides keys where it is False. Other
        types are added to the logits after the softcap, in q's type or float32 (another 16-bit type is converted to
        float32). causal and window apply too. The bias covers all keys of a sequence, or with bias_keys only that many last
        keys. A bool bias that all heads and queries share, such as [B,1,1,Sk], is the fastest, and also works with e4m3.
        With q_starts, its rows are the queries of each sequence, and every query needs one. Its gradient has its shape;
        dimensions of size 1 are summed in float32.
    batch_invariant: O and LSE of a sequence are bitwise independent of the other sequences in the batch (docs/USING.md).
        Gradients are not.
    score_mod: an expression that replaces the logit s, the scaled q @ k.T, such as "s - x0[h] * real(q + Sk - Sq - k)".
    mask_mod: an expression that is true if query q sees key k, such as "i0[q] == i0[k]". docs/USING.md lists the names and
        functions of expressions. Expressions are compiled and run: never use one from untrusted input.
    args: the contiguous arrays of the expressions; float32 tensors are x0, x1, ... and int32 tensors i0, i1. Indices are
        not checked.
    block_mask: the result of block_mask().
    backward: the kernels that compute the gradients. None: sdpa's where PyTorch has none or slower ones, or where
        torch.use_deterministic_algorithms() is on, and PyTorch's elsewhere. "sdpa": sdpa's. "deterministic": sdpa's that are
        bitwise repeatable. "torch": PyTorch's. The backward raises if the chosen kernels cannot compute the gradients.
    """
    if type(q).__name__ == "DTensor" and not torch.compiler.is_compiling():
        importlib.import_module(f"{__package__}.dtensor_sharding" if __package__ else "dtensor_sharding")
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        check_tensors("sdpa.attention", q=q, k=k, v=v)
    left = right = -1
    by = None
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) not in (2, 3):
            raise ValueError(f"sdpa.attention: window={window!r} is not (keys before, keys after) or (before, after, 'br' or 'tl')")
        left, right, by = *(-1 if keys is None else keys for keys in window[:2]), window[2] if len(window) > 2 else None
    for mask in (causal, by):
        if not is_one_of(mask, MASKS):
            raise ValueError(f"sdpa.attention: a mask of {mask!r} is none of None, 'br', 'tl'")
    if backward not in BACKWARDS:
        raise ValueError(f"sdpa.attention: backward={backward!r} is none of None, 'sdpa', 'deterministic', 'torch'")
    if out_dtype not in (None, torch.float16, torch.bfloat16) or out_dtype and q.dtype != torch.float8_e4m3fn:
        raise ValueError(f"sdpa.attention: out_dtype={out_dtype} is not for a q of {q.dtype}; e4m3's O is torch.float16 "
                         "or torch.bfloat16")
    if not (q.is_cuda or q.is_meta):
        raise ValueError(f"sdpa.attention: q is on {q.device}; sdpa's kernels run on CUDA devices")
    if not q.device == k.device == v.device:
        raise ValueError(f"sdpa.attention: q, k and v are on {q.device}, {k.device} and {v.device}, not on one device")
    if not (k_lengths is q_lengths is q_starts is k_starts is k_firsts is page_table is sinks is bias is q_descale is k_descale is
            v_descale is None):
        for name, x in (("k_lengths", k_lengths), ("q_lengths", q_lengths), ("q_starts", q_starts), ("k_starts", k_starts),
                        ("k_firsts", k_firsts), ("page_table", page_table), ("sinks", sinks), ("bias", bias), ("q_descale", q_descale),
                        ("k_descale", k_descale), ("v_descale", v_descale)):
            if x is None:
                continue
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"sdpa.attention: {name} is a {type(x).__name__}, not a tensor")
            if x.device != q.device:
                raise ValueError(f"sdpa.attention: {name} is on {x.device}, not on {q.device}")
    modifies = score_mod is not None or mask_mod is not None or args not in ((), []) or block_mask is not None
    more = modification(q, score_mod, mask_mod, args, block_mask) if modifies else ()
    named = {name: x for name, x in (("k_firsts", k_firsts), ("backward", backward)) if x is not None}
    arguments = (q, k, v, MASKS[causal], left, right, MASKS[by], scale, 0.0 if softcap is None else softcap, q_descale, k_descale, v_descale, sinks,
                 k_lengths, q_starts, k_starts, page_table, most_keys, bias, bias_keys, q_lengths,
                 batch_invariant, out_dtype == torch.bfloat16, *more)
    if block_mask is NEW_BLOCK_MASK:
        return BlockMask(*called("sdpa.block_mask", BLOCK_MASK, *arguments, **named))
    out, lse = called("sdpa.attention", OPERATOR, *arguments, **named)
    return (out, lse) if return_lse else out


def block_mask(q, k, v, **options):
    """A map of the tiles that mask_mod or a bias hides, for attention(q, k, v, **options, block_mask=...) with the same
    options. Without it, each call makes its own map, or computes hidden tiles if the mask differs between heads or there are
    fewer than 16 tiles of keys. The map
    depends on the current contents of args and bias, but not on q, k, v, scale and the values of sinks. attention() refuses a
    map that was made for other expressions, shapes, options or GPUs. Call block_mask() outside of compiled functions."""
    if torch.compiler.is_compiling():
        raise RuntimeError("sdpa.block_mask: it cannot be compiled; call it before the compiled function and pass its result")
    return attention(q, k, v, **options, block_mask=NEW_BLOCK_MASK)


# ---- activation for F.scaled_dot_product_attention ----

class Active:
    """The handle that torch.nn.attention keeps while sdpa is the FlashAttention; restore_flash_attention_impl() calls
    remove()."""

    def __init__(self, backward=None):
        glue().sdpa_torch_activate(True)
        glue().sdpa_torch_prefer_backward(PREFERENCES[backward])

    def remove(self):
        glue().sdpa_torch_activate(False)


def activate(backward=None):
    """Replaces the kernels of PyTorch's cuDNN, FlashAttention and memory-efficient backends, of varlen_attn and of 8-bit
    attention, until torch.nn.attention.restore_flash_attention_impl(). Does not initialize CUDA, so the process may still
    fork, and does not change PyTorch's order of backends. backward: None, "sdpa" or "torch", as in attention(); PyTorch's
    kernels compute the gradients that sdpa's cannot compute."""
    if not is_one_of(backward, PREFERENCES):
        raise ValueError(f"sdpa.activate: backward={backward!r} is none of None, 'sdpa', 'torch'")
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise Unavailable(f"PyTorch {torch.__version__} takes no other FlashAttention; 2.11 is the first that does")
    torch.nn.attention.register_flash_attention_impl("sdpa", register_fn=functools.partial(Active, backward))
    torch.nn.attention.activate_flash_attention_impl("sdpa")


def why_not(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """The reason why F.scaled_dot_product_attention(...) would run PyTorch's own kernel after activate(); empty if sdpa's
    kernel would run."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            check_tensors("sdpa.why_not", **{name: x})
    for name, x in (("q", q), ("k", k), ("v", v), ("attn_mask", attn_mask)):
        if isinstance(x, torch.Tensor) and (x.is_nested or x.layout is not torch.strided):
            return f"{name} is a {'nested' if x.is_nested else 'sparse'} tensor, which PyTorch takes apart before a kernel is chosen"
    if q.device.type == "cpu" and first_call.library:  # checked without pytorch.cpp
        return "a tensor is on cpu; sdpa's kernels run on CUDA devices"
    try:
        glue()
    except Unavailable as why:
        return str(why)
    try:
        why = called("sdpa.why_not", torch.ops.sdpa.why_not.default, q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except NotImplementedError as error:  # for tensor subclasses
        return f"PyTorch says: {str(error).splitlines()[0]}"
    if why.startswith("a tensor is on meta;") and q.device.type != "meta":  # C++ sees fake tensors as meta tensors
        return f"q is a fake tensor on {q.device}, whose kernel is only chosen for a real one"
    return why
