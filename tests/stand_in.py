"""Stand-ins for tests of the bindings without a GPU: kernels that run on the CPU, and integer tensors in various layouts.

`kernels()` makes bindings/pytorch.cpp call a stand-in for a line's C functions. It records the SdpaParams of each call and
computes O and LSE in double from what pointers, strides and numbers say, as bindings/sdpa.h defines them."""
import contextlib
import ctypes
import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "bindings"), os.path.join(ROOT, "tools")]
import builds  # noqa: E402
import pytorch as sdpa  # noqa: E402

real_build_of_glue = sdpa.build_of_glue
sdpa.build_of_glue = lambda: tuple("-O0" if word == "-O2" else word for word in real_build_of_glue())  # in three quarters of the time
E4M3 = torch.float8_e4m3fn
STRUCTS = builds.structs_of(builds.Tree().read(builds.HEADER))
Params, BackwardParams = STRUCTS["SdpaParams"], STRUCTS["SdpaBackwardParams"]
Forward = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Params), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
Bytes = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.POINTER(Params))


# ---- memory ----

def bits(x):
    """The bytes of a tensor, row by row."""
    x = x.detach().contiguous()
    return ctypes.string_at(x.data_ptr(), x.nbytes)


def view(address, shape, strides, dtype):
    """A tensor with this shape and these strides (in elements) at an address."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    count = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides))
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, strides)


def tensors_of(p, dtype, features):
    """{member: tensor or None} for the pointers of an SdpaParams."""
    of_q = list(sdpa.DTYPES)[dtype]
    of_k = E4M3 if features >> sdpa.FEATURES.index("KV_DTYPE=FP8_E4M3") & 1 else of_q
    of_o = torch.bfloat16 if features >> sdpa.FEATURES.index("OUT_DTYPE=BF16") & 1 else torch.half if of_q == E4M3 else of_q
    Dv, q_batch = p.Dv or p.D, 1 if p.q_starts else p.B
    k_batch, keys = (p.pages, p.page_size) if p.page_table else (1 if p.k_starts else p.B, p.Sk)
    found = {}
    for name, strides, shape, kind in (("Q", p.q, (q_batch, p.Hq, p.Sq, p.D), of_q), ("K", p.k, (k_batch, p.Hkv, keys, p.D), of_k),
                                       ("V", p.v, (k_batch, p.Hkv, keys, Dv), of_k), ("O", p.o, (q_batch, p.Hq, p.Sq, Dv), of_o)):
        strides, size = (strides.batch, strides.head, strides.row), kind.itemsize
        assert getattr(p, name) or 0 in shape, f"{name} is a null pointer"
        assert (getattr(p, name) or 0) % 16 == 0, f"{name} is not aligned to 16 bytes"
        assert all(n <= 1 or stride * size % 16 == 0 for stride, n in zip(strides, shape)), f"a stride of {name} is not a multiple of 16 bytes"
        found[name] = view(getattr(p, name), shape, (*strides, 1), kind)
    found["LSE"] = p.LSE and view(p.LSE, (q_batch, p.Hq, p.Sq), (p.Hq * p.Sq, p.Sq, 1), torch.float32)
    for name, length in (("k_lengths", p.B), ("q_lengths", p.B), ("q_starts", p.B + 1), ("k_starts", p.B + 1),
                         ("k_firsts", p.B)):
        found[name] = getattr(p, name) and view(getattr(p, name), (length,), (1,), torch.int32)
    found["page_table"] = p.page_table and view(p.page_table, (p.B, p.Sk // p.page_size), (p.page_stride, 1), torch.int32)
    found["sinks"] = p.sinks and view(p.sinks, (p.Hq,), (1,), torch.float32)
    for name, heads, batch in (("q_descale", p.Hq, p.B), ("k_descale", p.Hkv, p.B), ("v_descale", p.Hkv, p.B)):
        one = getattr(p, name)
        found[name] = one.factor and view(one.factor, (batch, heads), (one.batch, one.head), torch.float32)
    found["key_mask"] = p.key_mask and view(p.key_mask, (p.B, p.Sk), (p.key_mask_stride, 1), torch.bool)
    if p.bias:
        rows = p.Sq if not p.q_starts else int(found["q_starts"].diff().max())
        most = min(p.most_keys or p.Sk, p.Sk)
        has = lambda knob: features >> sdpa.FEATURES.index(knob) & 1  # noqa: E731
        kind = torch.bool if has("USE_BIAS=2") else torch.float if has("USE_BIAS=3") or has("USE_BIAS=5") else of_q
        strides = p.bias_strides.batch, p.bias_strides.head, p.bias_strides.row, 1
        found["bias"] = view(p.bias, (p.B, p.Hq, rows, p.bias_keys or most), strides, kind)
    return found


# ---- expressions ----

EXPRESSIONS = r"""
extern "C" double exp(double), exp2(double), log(double), log2(double), sqrt(double), tanh(double), sin(double), cos(double),
                  floor(double), pow(double, double);  // <cmath> takes three times as long to compile as the rest
static double abs(double x) { return __builtin_fabs(x); }
static int abs(int x) { return __builtin_abs(x); }
using real = double;
static double tanh_approx(double x) { return tanh(x); }
template <class X, class Y> static auto min(X x, Y y) { return y < x ? y : x; }
template <class X, class Y> static auto max(X x, Y y) { return x < y ? y : x; }
#define ARGUMENTS int b, int h, int q, int k, int Sq, int Sk, const float* x0, const float* x1, const float* x2, const float* x3
extern "C" double score(double s, ARGUMENTS) { return SCORE_MOD; }
extern "C" int sees(ARGUMENTS, const int* i0, const int* i1) { return bool(MASK_MOD); }
"""


@functools.cache
def expressions(score_mod, mask_mod):
    """A library with score_mod and mask_mod as functions, compiled as C++ in double."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "expressions.so")
        subprocess.run([builds.CXX, "-std=c++17", "-shared", "-fPIC", "-w", f"-DSCORE_MOD={score_mod or 's'}", f"-DMASK_MOD={mask_mod or '1'}",
                        "-x", "c++", "-", "-o", path], input=EXPRESSIONS, text=True, check=True)
        library = ctypes.CDLL(path)
    ints, pointers = [ctypes.c_int] * 6, [ctypes.c_void_p] * 4
    library.score.restype, library.score.argtypes = ctypes.c_double, [ctypes.c_double, *ints, *pointers]
    library.sees.argtypes = [*ints, *pointers, ctypes.c_void_p, ctypes.c_void_p]
    return library


def modified(S, p, b, mods):
    """Applies SCORE_MOD and MASK_MOD to the scores [Hq,Sq,Sk] of sequence b."""
    library, arrays = expressions(*mods), [getattr(p, name) for name in sdpa.ARRAYS]
    out = S.clone()
    for h, q, k in itertools.product(*map(range, S.shape)):
        at = b, h, q, k, *S.shape[1:]
        seen = library.sees(*at, *arrays)
        out[h, q, k] = library.score(float(S[h, q, k]), *at, *arrays[:4]) if seen else -torch.inf
    return out


# ---- the kernel ----

def visible(Sq, Sk, causal, window, device="cuda"):
    """[Sq,Sk]: True if a query sees a key. causal and the window's third member: None, "br" or "tl"."""
    q, k = torch.arange(Sq, device=device)[:, None], torch.arange(Sk, device=device)
    own = lambda by: q + (Sk - Sq if by == "br" else 0)  # noqa: E731
    left, right = (1 << 30 if keys is None else keys for keys in window[:2])
    by = window[2] if len(window) > 2 else causal
    return (k >= own(by) - left) & (k <= own(by) + right) & (k <= own(causal) if causal else k >= 0)


def reference(q, k, v, mask=None, scale=None, softcap=None, sinks=None, bias=None, modify=None):
    """O and LSE in double. mask: True for visible keys; bias: added after a softcap, or a bool mask. modify: a function of the
    scaled logits."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    S = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        S = softcap * torch.tanh(S / softcap)
    if modify:
        S = modify(S)
    if bias is not None:
        S = S.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else S + bias.double()
    if mask is not None:
        S = S.masked_fill(~mask, -torch.inf)
    if sinks is not None:  # an additional key with V = 0
        S = torch.cat([S, sinks.double()[:, None, None].expand(*S.shape[:3], 1)], -1)
        v = torch.cat([v, v.new_zeros(*v.shape[:2], 1, v.shape[3])], 2)
    sees_any = (S > -torch.inf).any(-1, keepdim=True)
    return torch.softmax(S.where(sees_any, 0), -1) * sees_any @ v, torch.logsumexp(S, -1)


def rows_of(starts, lengths, b, count):
    """The rows of sequence b, clamped to the `count` rows of the tensor."""
    first, end = 0, count
    if starts is not None:
        first = min(max(int(starts[b]), 0), count)
        end = max(min(int(starts[b + 1]), count), first)
    return first, end if lengths is None else min(first + max(int(lengths[b]), 0), end)


def ranges_of(p, t, b):
    """The rows of Q and of K of sequence b."""
    first, last = rows_of(t["k_starts"], t["k_lengths"], b, p.Sk)
    last = min(last, first + p.most_keys) if p.most_keys else last
    first = first if t["k_firsts"] is None else min(first + max(int(t["k_firsts"][b]), 0), last)
    return rows_of(t["q_starts"], t["q_lengths"], b, p.Sq), (first, last)


def compute(p, t, mods):
    """Writes O and LSE. Unused rows may have any contents; writes NaN."""
    t["O"].fill_(torch.nan)
    if t["LSE"] is not None:
        t["LSE"].fill_(torch.nan)
    for b in range(p.B):
        (begin, end), (first, last) = ranges_of(p, t, b)
        q_batch, k_batch = (0 if t[starts] is not None else b for starts in ("q_starts", "k_starts"))
        q = t["Q"][q_batch, :, begin:end].double()
        k, v = (t[name] if t["page_table"] is not None else t[name][k_batch] for name in "KV")
        if t["page_table"] is not None:
            pages = t["page_table"][b].clamp(0, p.pages - 1).long()
            k, v = (x[pages].transpose(0, 1).flatten(1, 2) for x in (k.double(), v.double()))
        k, v = (x[:, first:last].double() for x in (k, v))
        q, k, v = (x if t[name] is None else x * t[name][b].double()[:, None, None]
                   for x, name in ((q, "q_descale"), (k, "k_descale"), (v, "v_descale")))
        if q.shape[1] == 0:
            continue
        causal, by = ([None, "br", "tl"][number] for number in (p.causal, p.window_alignment))
        window = [None if keys < 0 else keys for keys in (p.window_left, p.window_right)]
        bias, keys = t.get("bias"), last - first
        if bias is not None:
            most = min(p.most_keys or p.Sk, p.Sk)
            own = torch.zeros(p.Hq, q.shape[1], most, dtype=torch.double)
            of_last = bias[b, :, :q.shape[1]]
            own[:, :, most - of_last.shape[2]:] = of_last.double() if of_last.dtype != torch.bool else \
                torch.zeros(of_last.shape).double().masked_fill(~of_last, -torch.inf)
            bias = own[:, :, :keys][None]
        seen = visible(q.shape[1], keys, causal, (*window, by or causal), "cpu")
        if t["key_mask"] is not None:
            seen = seen & t["key_mask"][b]
        out, lse = reference(q[None], k[None], v[None], seen,
                             p.scale or None, p.softcap, t["sinks"], bias,
                             (lambda S: modified(S[0], p, b, mods)[None]) if any(mods) else None)  # noqa: B023
        t["O"][q_batch, :, begin:end] = out[0].to(t["O"].dtype)
        if t["LSE"] is not None:
            t["LSE"][q_batch, :, begin:end] = lse[0].float()


# A build without an option refuses its members.
MEMBERS_OF = {"USE_SOFTCAP": "softcap", "USE_SINKS": "sinks", "USE_LENGTHS": "k_lengths q_lengths q_starts k_starts page_table k_firsts",
              "USE_KEY_MASK": "key_mask"}
CALLS, MAPS, LOADED = [], [], []
SCRATCH = []  # address and size of the scratch memory of each call
STREAMS = []  # of the launches of loader_of(), to which OWN_STREAM is given
OWN_STREAM = 77


def recorded(p, dtype, features, mods):
    """The numbers of a call's SdpaParams, the contents of its pointers, and the expressions of its build."""
    for name, members in MEMBERS_OF.items():
        if name == "USE_KEY_MASK" and p.Sk == 0:
            continue  # a mask without elements has no address
        given = any(getattr(p, member) for member in members.split())
        assert given == bool(features >> sdpa.FEATURES.index(name) & 1), f"the build's {name} is not the call's"
    of_pages = [bool(features >> sdpa.FEATURES.index(name) & 1) for name in ("USE_PAGES", "USE_PAGES=2")]
    has_any = bool(p.page_table and (p.page_size % 16 or p.k_firsts))
    if p.bias:
        of_keys = not (p.bias_strides.head or p.bias_strides.row or p.bias_keys or features >> sdpa.FEATURES.index("USE_LENGTHS") & 1)
        has_key_bias = any(features >> sdpa.FEATURES.index(f"USE_BIAS={n}") & 1 for n in (4, 5))
        assert has_key_bias == of_keys, "the build's USE_BIAS is not the call's"
    assert of_pages == [bool(p.page_table) and not has_any, has_any], "the build's USE_PAGES is not the call's"
    for name in sdpa.ARRAYS:
        assert bool(getattr(p, name)) == bool(re.search(rf"\b{name}\b", " ".join(mods))), f"{name} is not the expressions'"
    t = tensors_of(p, dtype, features)
    call = dict(zip(("score_mod", "mask_mod"), mods)) | {name: getattr(p, name) for name in sdpa.ARRAYS} | {
        "bias_map": p.bias_map and bits(view(p.bias_map, (p.bias_map_bytes,), (1,), torch.uint8))}
    call |= {name: getattr(p, name) for name, kind in p._fields_ if kind in (ctypes.c_int, ctypes.c_float)}
    call |= {name: None if x is None else bits(x) if name in ("Q", "K", "V", "bias") else x.tolist()
             for name, x in t.items() if name not in ("O", "LSE")}
    call |= {name + "_dtype": t[name].dtype for name in ("Q", "K", "O")}
    call |= dict(bias_dtype=t["bias"].dtype) if p.bias else dict(bias=None, bias_dtype=None)
    return t, SimpleNamespace(**call)


def told(run, kind=Forward):
    """A C function as in sdpa.h that calls run(p). Returns the text of an exception, since exceptions cannot cross into C++."""
    def function(params, stream, text, text_bytes):
        try:
            run(params[0])
            return 0
        except Exception as trouble:
            words = f"the stand-in says {type(trouble).__name__}: {trouble}".encode()[:text_bytes - 1] + b"\0"
            ctypes.memmove(text, words, len(words))
            return 1
    return kind(function)


@sdpa.LOAD
def load_line(device, dtype, D, Dv, features, score_mod, mask_mod, line):
    """pytorch.h's Load. Its objects are kept alive for the life of the process, since pytorch.cpp keeps them."""
    mods = score_mod.decode(), mask_mod.decode()
    hides = bool(mods[1]) or features & sum(1 << sdpa.FEATURES.index(f"USE_BIAS={n}") for n in (1, 2, 3)) != 0

    def forward(p):
        assert (p.D, p.Dv) == (D, Dv)
        assert p.bias_map_bytes == (map_bytes(p) if p.bias_map else 0)
        SCRATCH.append((p.scratch, scratch_bytes(p)))
        ctypes.memset(p.scratch, 0xff, scratch_bytes(p))
        t, call = recorded(p, dtype, features, mods)
        CALLS.append(call)
        compute(p, t, mods)

    def scratch_bytes(p):
        return 2000 * p.B + 2 * p.Sk + 1  # an odd number, as no tensor has

    def map_bytes(p):
        return p.B * p.Hq * p.Sq if hides else 0

    def map_bias(p):
        """Fills the map with the number of the call."""
        assert p.bias_map_bytes == map_bytes(p) and p.O
        MAPS.append(recorded(p, dtype, features, mods)[1])
        view(p.bias_map, (p.bias_map_bytes,), (1,), torch.uint8).fill_(len(MAPS))
    functions = (Bytes(lambda params: 0), Bytes(lambda params: scratch_bytes(params[0])), told(forward),
                 Bytes(lambda params: map_bytes(params[0])), told(map_bias))
    LOADED.append(functions)
    for name, function in zip(sdpa.LINE_FUNCTIONS, functions, strict=True):
        setattr(line[0], name, ctypes.cast(function, ctypes.c_void_p).value)


class Copies:
    """Copies of the tensors of a call in the device memory of the CPU backend."""

    def __init__(self, library):
        self.library, self.made = library, []

    def put(self, params, member, address, nbytes):
        """Sets a member of the params to a copy of these bytes."""
        copied = self.library.host_allocate(ctypes.c_size_t(nbytes))
        ctypes.memmove(copied, address, nbytes)
        setattr(params, member, copied)
        self.made.append((address, copied, nbytes))

    def put_tensors(self, params, tensors):
        for member, x in tensors.items():
            if x is not None:
                self.put(params, member, x.data_ptr(), (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))) * x.itemsize)

    def call(self, function, params, trouble, trouble_bytes):
        """Calls a C function as in sdpa.h, and copies the tensors back."""
        code = function(ctypes.byref(params), ctypes.c_void_p(OWN_STREAM), ctypes.c_void_p(trouble), ctypes.c_size_t(trouble_bytes))
        STREAMS.append(self.library.host_last_stream())
        self.library.host_synchronize()
        for address, copied, nbytes in self.made:
            ctypes.memmove(address, copied, nbytes)
            self.library.host_free(ctypes.c_void_p(copied))
        return code


def loader_of(text, arrays):
    """A Load that compiles a line with changes, as in "wgmma BLOCK_N=64", for the CPU backend. Its kernels run on copies in the
    backend's device memory. arrays: the tensors that calls pass as args, since SdpaParams does not have their sizes."""
    arrays = {x.data_ptr(): x for x in arrays}

    def load(device, dtype, D, Dv, features, score_mod, mask_mod, line):
        name, *changes = text.split()
        words = builds.Line(builds.Tree(), name, tuple(changes)).words
        mods = sdpa.knobs_of_mods(score_mod.decode(), mask_mod.decode())
        library = ctypes.CDLL(builds.host_library(*words, *mods, program="tests/host_library.cu"))
        library.host_allocate.restype = library.host_last_stream.restype = ctypes.c_void_p
        for size in ("workspace_bytes", "scratch_bytes", "bias_map_bytes"):
            getattr(library, "sdpa_library_" + size).restype = ctypes.c_size_t

        def on_copies(function):
            def run(params, stream, trouble, trouble_bytes):
                """Copies the tensors of p to the backend, calls the function and copies them back."""
                p, copies = Params.from_buffer_copy(params[0]), Copies(library)
                copies.put_tensors(p, tensors_of(p, dtype, features))
                for member in sdpa.ARRAYS:
                    if address := getattr(p, member):
                        copies.put(p, member, address, arrays[address].nbytes)
                if p.bias_map:
                    copies.put(p, "bias_map", p.bias_map, p.bias_map_bytes)
                if p.scratch:
                    copies.put(p, "scratch", p.scratch, library.sdpa_library_scratch_bytes(ctypes.byref(p)))
                zeros = bytes(max(library.sdpa_library_workspace_bytes(ctypes.byref(p)), 1))
                p.workspace = library.host_allocate(ctypes.c_size_t(len(zeros)))
                ctypes.memmove(p.workspace, zeros, len(zeros))
                code = copies.call(function, p, trouble, trouble_bytes)
                library.host_free(ctypes.c_void_p(p.workspace))
                return code
            return Forward(run)
        functions = (Bytes(lambda params: 0), Bytes(lambda params: library.sdpa_library_scratch_bytes(params)),
                     on_copies(library.sdpa_library_forward),
                     Bytes(lambda params: library.sdpa_library_bias_map_bytes(params)), on_copies(library.sdpa_library_map_bias))
        LOADED.append((functions, library))
        for function_name, function in zip(sdpa.LINE_FUNCTIONS, functions, strict=True):
            setattr(line[0], function_name, ctypes.cast(function, ctypes.c_void_p).value)
    LOADED.append(sdpa.LOAD(load))
    return LOADED[-1]


Backward = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(BackwardParams), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
GRADIENTS = []  # per call of a backward_line(): its arguments, and the addresses and strides of its tensors


def gradient_tensors(p, t):
    """{member: tensor or None} for the pointers of BackwardParams whose forward has the tensors t."""
    of = dict(dO=("O", p.d_o), dQ=("Q", p.d_q), dK=("K", p.d_k), dV=("V", p.d_v))
    found = {name: view(getattr(p, name), t[like].shape, (strides.batch, strides.head, strides.row, 1), t["Q"].dtype)
             for name, (like, strides) in of.items()}
    found["dLSE"] = p.dLSE and view(p.dLSE, t["LSE"].shape, t["LSE"].stride(), torch.float32)
    found["dSinks"] = p.dSinks and view(p.dSinks, (p.forward.Hq,), (1,), torch.float32)
    if p.dBias:
        strides = p.d_bias.batch, p.d_bias.head, p.d_bias.row, 1 - p.dBias_sums_keys
        sizes = [size if stride else 1 for size, stride in zip(t["bias"].shape, strides)]
        spans = sorted((stride, size) for size, stride in zip(sizes, strides) if size > 1)
        assert all(wide > stride * (size - 1) for (stride, size), (wide, _) in itertools.pairwise(spans)), "elements of dBias overlap"
        found["dBias"] = view(p.dBias, sizes, strides, t["bias"].dtype)
    return found


def gradients(p, dtype, features):
    """Writes dQ, dK, dV, dSinks and dBias, from O and LSE. Rows that are no query or key get zeros."""
    f = p.forward
    t = tensors_of(f, dtype, features)
    has_lengths = any(t[name] is not None for name in ("k_lengths", "q_lengths", "q_starts", "k_starts", "k_firsts"))
    assert (bool(f.softcap), bool(f.sinks), has_lengths) == (bool(features & 1), bool(features & 2), bool(features & 4))
    assert bool(f.bias) == any(knob.startswith("USE_BIAS") for bit, knob in enumerate(sdpa.FEATURES) if features >> bit & 1)
    t |= gradient_tensors(p, t)
    for name in ("dQ", "dK", "dV", *["dSinks"] * bool(p.dSinks), *["dBias"] * bool(p.dBias)):
        t[name].zero_()
    d_bias = torch.zeros(t["bias"].shape, dtype=torch.double) if p.dBias else None
    causal, by = ([None, "br", "tl"][number] for number in (f.causal, f.window_alignment))
    window = [None if keys < 0 else keys for keys in (f.window_left, f.window_right)]
    group = f.Hq // f.Hkv
    for b in range(f.B):
        (begin, end), (first, last) = ranges_of(f, t, b)
        of_q, of_k = ((0 if t[starts] is not None else b, slice(None), slice(*rows)) for starts, rows in
                      (("q_starts", (begin, end)), ("k_starts", (first, last))))
        q, o, grad, lse = (t[name][of_q].double() for name in ("Q", "O", "dO", "LSE"))
        k, v = (t[name][of_k].double().repeat_interleave(group, 0) for name in "KV")
        S = q @ k.mT * f.scale
        slope = 1.0
        if f.softcap:
            S, slope = f.softcap * torch.tanh(S / f.softcap), 1 - torch.tanh(S / f.softcap).square()
        at_bias = b, slice(None), slice(0, end - begin), slice(max(f.bias_keys - (last - first), 0), f.bias_keys or last - first)
        if f.bias:
            bias = t["bias"][at_bias]
            unbiased = S.new_zeros(*bias.shape[:2], last - first - bias.shape[2])
            S = S + torch.cat((unbiased, bias.double() if bias.dtype != torch.bool else torch.where(bias, 0.0, -torch.inf)), -1)
        P = torch.exp(S - lse[..., None]) * visible(end - begin, last - first, causal, (*window, by or causal), "cpu")
        P = P.where(lse[..., None] > -torch.inf, 0)
        rows = (grad * o).sum(-1) - (0 if t["dLSE"] is None else t["dLSE"][of_q])
        dS = P * (grad @ v.mT - rows[..., None])
        if p.dBias:
            d_bias[at_bias] = dS[..., last - first - bias.shape[2]:]
        dS = dS * slope * f.scale
        t["dQ"][of_q] = (dS @ k).to(t["dQ"].dtype)
        for name, x in (("dK", dS.mT @ q), ("dV", P.mT @ grad)):
            t[name][of_k] = x.unflatten(0, (f.Hkv, group)).sum(1).to(t[name].dtype)
        if p.dSinks:
            t["dSinks"] += (-torch.exp(t["sinks"].double()[:, None] - lse) * rows).sum(1).float()
    if p.dBias:
        t["dBias"].copy_(d_bias.sum_to_size(t["dBias"].shape))


def backward_line(sizes=(), faster=(), pads=True):
    """A LoadBackward of lines with these HEAD_DIMs; some are faster than PyTorch's backward. pads: D must be HEAD_DIM."""
    def load(device, dtype, D, features, asked, score_mod, mask_mod, line):
        size = next((size for size in sizes if size >= D), 0)
        if not size or not asked & sdpa.NEEDED and size not in faster:
            line[0].trouble = b"there is no stand-in"
            return

        def workspace_bytes(params):
            return 8 * params[0].B * params[0].Hq * params[0].Sq

        def backward(p):
            assert not pads or p.forward.D == p.forward.Dv == size
            ctypes.memset(p.workspace, 0xff, workspace_bytes([p.forward]))
            assert bool(asked & sdpa.SHORT) == (max(p.forward.Sq, p.forward.Sk) <= 64)
            GRADIENTS.append(SimpleNamespace(asked=asked & ~sdpa.SHORT, dO=p.dO, d_o=(p.d_o.batch, p.d_o.head, p.d_o.row), dLSE=bool(p.dLSE)))
            gradients(p, dtype, features)
        functions = Bytes(workspace_bytes), told(backward, Backward)
        LOADED.append(functions)
        line[0].head_dim, line[0].is_final = size * pads, 0  # not cached: the next test has other lines
        for name, function in zip(("workspace_bytes", "backward"), functions):
            setattr(line[0], name, ctypes.cast(function, ctypes.c_void_p).value)
    LOADED.append(sdpa.LOAD_BACKWARD(load))
    return LOADED[-1]


def backward_loader_of(text, arrays=()):
    """A LoadBackward that compiles a line with changes, as in "backward_mma BLOCK_N=32", for the CPU backend. arrays: as for
    loader_of()."""
    name, *changes = text.split()
    arrays = {x.data_ptr(): x for x in arrays}
    knobs = builds.changed(builds.Tree().read_configs()[0][name].knobs, changes)

    def load(device, dtype, D, features, asked, score_mod, mask_mod, line):
        words = [knob if "=" in knob else f"{knob}=1" for bit, knob in enumerate(sdpa.FEATURES) if features >> bit & 1]
        words += ["DTYPE=BF16"] * (dtype == 1)
        words += sdpa.knobs_of_mods(score_mod.decode(), mask_mod.decode())
        library = ctypes.CDLL(builds.host_library(*builds.changed(knobs, words), program="tests/host_library.cu"))
        library.host_allocate.restype = library.host_last_stream.restype = ctypes.c_void_p
        library.sdpa_library_backward_workspace_bytes.restype = ctypes.c_size_t

        def backward(params, stream, trouble, trouble_bytes):
            p, copies = BackwardParams.from_buffer_copy(params[0]), Copies(library)
            t = tensors_of(p.forward, dtype, features)
            copies.put(p, "workspace", p.workspace, library.sdpa_library_backward_workspace_bytes(ctypes.byref(p.forward)))
            copies.put_tensors(p, gradient_tensors(p, t))
            copies.put_tensors(p.forward, t)
            for member in sdpa.ARRAYS:
                if address := getattr(p.forward, member):
                    copies.put(p.forward, member, address, arrays[address].nbytes)
            return copies.call(library.sdpa_library_backward, p, trouble, trouble_bytes)
        functions = Bytes(lambda params: library.sdpa_library_backward_workspace_bytes(params)), Backward(backward)
        LOADED.append((functions, library))
        line[0].head_dim, line[0].is_final = int(dict(word.split("=") for word in knobs).get("HEAD_DIM", 64)), 0
        for function_name, function in zip(("workspace_bytes", "backward"), functions):
            setattr(line[0], function_name, ctypes.cast(function, ctypes.c_void_p).value)
    LOADED.append(sdpa.LOAD_BACKWARD(load))
    return LOADED[-1]


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.POINTER(sdpa.Appender))
def load_appender(device, appender):
    library = ctypes.CDLL(builds.host_library(program="tests/host_append.cu"))
    appender[0].append = ctypes.cast(library.sdpa_append, ctypes.c_void_p).value


@contextlib.contextmanager
def kernels(glue, load=load_line, load_backward=None):
    """Redirects PyTorch's and sdpa's operators to the stand-ins. Returns the list of calls."""
    CALLS.clear(), MAPS.clear(), SCRATCH.clear(), STREAMS.clear(), GRADIENTS.clear()
    glue.sdpa_torch_load_lines_by(load), glue.sdpa_torch_load_appender_by(load_appender)
    glue.sdpa_torch_load_backward_by(load_backward or backward_line())
    glue.sdpa_torch_activate_on_cpu(True)
    yield CALLS
    glue.sdpa_torch_activate_on_cpu(False)
    glue.sdpa_torch_load_lines_by(sdpa.load_line), glue.sdpa_torch_load_appender_by(sdpa.load_appender)
    glue.sdpa_torch_load_backward_by(sdpa.load_backward)


class OnGpu(torch.Tensor):
    """A CPU tensor that attention() accepts like one on a GPU."""
    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


@functools.wraps(sdpa.attention)
def attention(q, *others, **options):
    return attention.__wrapped__(q.as_subclass(OnGpu), *others, **options)


# ---- integer tensors ----

def integer_layouts(x):
    """Yields (name, tensor) with the values of x, int32 [n] or [n,m], in various layouts and types. The memory between and around
    the elements of x has other values of its range."""
    last = x.dim() - 1
    pads = {"plain": {}, "from an offset": {0: (3, 1)}, "every second": {last: (1, 2)}}
    if last:
        pads |= {"columns of a wider one": {1: (2, 1)}, "every second row": {0: (0, 2)}, "rows and columns": {0: (1, 3), 1: (1, 1)}}
    else:
        pads |= {"a column": None}
    for dtype in torch.int32, torch.int64:
        for name, steps in pads.items():
            shape = [*x.shape, 3] if steps is None else list(x.shape)
            for dim, (first, step) in (steps or {}).items():
                shape[dim] = first + x.shape[dim] * step + 2
            low, high = (int(x.min()), int(x.max())) if x.numel() else (0, 0)
            around = torch.randint(low, high + 2, shape, dtype=dtype)
            if steps is None:
                of = around[:, 1]
            else:
                of = around[tuple(slice(first, first + n * step, step) for n, (first, step) in
                                  ((n, steps.get(dim, (0, 1))) for dim, n in enumerate(x.shape)))]
            of.copy_(x)
            yield f"{name}, {dtype}", of
        if last:
            yield f"transposed, {dtype}", x.to(dtype).T.contiguous().T
