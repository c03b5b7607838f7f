"""Tests of bindings/pytorch.py without a GPU: lines and knobs, builds, refusals, the PyTorch internals it uses, autograd on stand-ins.
With a GPU also PyTorch's samples of scaled_dot_product_attention against its math backend, opcheck, torch.compile, CUDA graphs,
streams, workspaces and training.
usage: python3 -m pytest tests/test_pytorch.py   (SDPA_TEST_GPU=1: no GPU is a failure; SDPA_TORCH_LATEST: a newer PyTorch's folder)"""
import contextlib
import ctypes
import functools
import inspect
import itertools
import math
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", minversion="2.11", reason="PyTorch 2.11 or newer is missing")
import torch.nn.functional as F  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, name) for name in ("bindings", "bindings/flash_attn_3", "tools", "tests")]
import builds  # noqa: E402
import flash_attn_interface  # noqa: E402
import pytorch as sdpa  # noqa: E402
import stand_in  # noqa: E402
import test_knobs  # noqa: E402
from stand_in import reference, visible  # noqa: E402

GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU and not os.environ.get("SDPA_TEST_GPU"), reason="no GPU")
HALVES, SIZES, E4M3 = (torch.float16, torch.bfloat16), (64, 128, 256), torch.float8_e4m3fn
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float8_e4m3fn: 6e-2}  # of rel_rms, twice a line's
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
FAKE_NVCC = """#!/bin/sh
[ "$1" = --version ] && exit
echo run >>"$CALLS"
sleep 0.3
for word; do [ "$last" = -o ] && echo library >"$word"; last=$word; done
%s
"""


# ---- without a GPU ----

@pytest.mark.parametrize("capability, family", [((9, 0), "hopper"), ((8, 6), "ampere"), ((12, 0), "ampere")])
def test_lines_have_the_knobs_that_cmake_reads(capability, family):
    lines = builds.Tree().config_lines()
    for dtype in sdpa.DTYPES:
        for D in SIZES:
            if dtype == torch.float8_e4m3fn and family == "ampere":
                with pytest.raises(sdpa.Unavailable, match="sm_90 only"):
                    sdpa.line_of(capability, dtype, D)
                continue
            name = sdpa.line_of(capability, dtype, D)
            knobs = dict(word.split("=") for word in lines[name].knobs)
            assert name.startswith(family) and sdpa.knobs_of(name) == knobs
            assert int(knobs.get("HEAD_DIM", 64)) == D and knobs["USE_TUNED"] == "1"
    with pytest.raises(sdpa.Unavailable, match="sm_75; sdpa's kernels need sm_80 or newer"):
        sdpa.line_of((7, 5), torch.float16, 64)
    assert sdpa.line_of((8, 0), torch.float16, 64) == "ampere"


LINES_OF_SIZES = [
    (64, 64, "hopper", ()), (96, 0, "hopper_d128", (96,)), (128, 64, "hopper_d128", (128, 64)), (192, 128, "hopper_d256", (192, 128)),
    (8, 0, "hopper", ()), (72, 0, "hopper_d128", (96,)), (112, 0, "hopper_d128", ()), (160, 0, "hopper_d256", (192,)),
    (80, 64, "hopper_d128", (96, 64)), (128, 80, "hopper_d128", (128, 96)),
    (64, 80, "hopper_d128", (96,)), (64, 128, "hopper_d128", ()), (192, 256, "hopper_d256", ())]  # a V wider than Q and K


def check_line_of_size(turn, D, Dv, line, widths, monkeypatch):
    """Returns the knobs of the builds for a size, which must be legal. The sizes alternate between biases and types."""
    legal = []
    asked, library, tree = [], ctypes.CDLL(None), builds.Tree()
    functions = dict(workspace_bytes=library.malloc, scratch_bytes=library.memcpy, forward=library.free, bias_map_bytes=library.calloc,
                     map_bias=library.realloc)
    for function, x in functions.items():
        setattr(library, "sdpa_library_" + function, x)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {3: (9, 0), 4: (12, 0)}[device])
    monkeypatch.setattr(sdpa, "library_of", lambda *x: asked.append(x) or library)
    for device, family, own in ((3, "hopper", widths), (4, "ampere", (D, Dv or D))):
        filled = sdpa.Line()
        sdpa.load_line(device, 1, D, Dv or D, 0b1000, b"", b"", filled)
        if device == 4 and D % 16:
            assert filled.trouble.decode() == f"there is no line for D={D}, Dv={D} except on sm_90; here both must be multiples of 16 from 32 on"
            continue
        name, capability, *knobs = asked.pop()
        size = own[0] if own else {"hopper": 64, "hopper_d128": 128, "hopper_d256": 256}[line]
        of_size = family + ("" if size <= 64 else "_d128" if size <= 128 else "_d256") + "_bf16"
        assert (name, capability, filled.trouble) == (of_size, {3: (9, 0), 4: (12, 0)}[device], b"")
        assert device == 4 or name == line + "_bf16"
        assert knobs == [f"HEAD_DIM={n}" for n in own[:1] if n not in SIZES] + [f"HEAD_DIM_V={n}" for n in own[1:] if n != own[0]] + \
            ["USE_PAGES"]
        for function, x in functions.items():
            assert getattr(filled, function) == ctypes.cast(x, ctypes.c_void_p).value
        words = builds.changed(tree.config_lines()[name].knobs, knobs[:-1])
        if device == 3:  # of e4m3 likewise
            of_e4m3, _, *more = sdpa.line_with(capability, torch.float8_e4m3fn, D, Dv or D, 0b1101)
            assert of_e4m3 == line.replace("hopper", "hopper_e4m3") and more == knobs[:-1] + ["USE_SOFTCAP", "USE_LENGTHS", "USE_PAGES"]
            more = [word if "=" in word else word + "=1" for word in more]
            legal.append(builds.changed(tree.config_lines()[of_e4m3].knobs, more))
        legal.append(builds.changed(words, [[], ["USE_BIAS=1"], ["USE_BIAS=2"], ["USE_BIAS=3"]][turn % 4]))
    if Dv in (0, D) and D in SIZES:  # e4m3's O in bf16, by a build of its own
        name, _, *knobs = sdpa.line_with((9, 0), E4M3, D, D, 64 + 4)
        assert knobs == ["USE_LENGTHS", "OUT_DTYPE=BF16"]
        changes = ["USE_LENGTHS=1", "OUT_DTYPE=BF16"]
        legal.append(builds.changed(tree.config_lines()[name].knobs, changes))
        with pytest.raises(sdpa.Unavailable, match="^bf16_out is for e4m3 only; otherwise O has the dtype of q$"):
            sdpa.line_with((9, 0), torch.bfloat16, D, D, 64)
    for capability, multiple in ((8, 9), 32), ((9, 0), 16):  # 8-bit k and v with a 16-bit q
        if D % multiple or (Dv or D) % multiple:
            with pytest.raises(sdpa.Unavailable, match=f"need D in multiples of {multiple}, not "):
                sdpa.line_with(capability, torch.bfloat16, D, Dv or D, 128)
            continue
        for dtype, type_ in ((torch.bfloat16, "BF16"), (torch.float16, "FP16")):
            name, _, *knobs = sdpa.line_with(capability, dtype, D, Dv or D, 128 + 8 + 4 + 1)
            sizes = sdpa.widths(capability, D, Dv or D)
            own = {"HEAD_DIM": str(sizes[0]), "HEAD_DIM_V": str(sizes[1]), "DTYPE": type_}
            of_line = {**dict(word.split("=") for word in tree.config_lines()[name].knobs), **dict(word.split("=") for word in knobs if "=" in word)}
            assert {**{"HEAD_DIM_V": own["HEAD_DIM"]}, **of_line}.items() >= {**own, "KV_DTYPE": "FP8_E4M3"}.items()
            changes = [word if "=" in word else word + "=1" for word in knobs]
            if dtype == HALVES[turn % 2]:
                legal.append(builds.changed(tree.config_lines()[name].knobs, changes))
        assert name == ("hopper" if capability[0] == 9 else "mma_decode") + "_kv8_d128_bf16"
    for capability, dtype, sentence in (
            ((8, 6), torch.bfloat16, "e4m3 k and v with a 16-bit q need sm_89 or newer"),
            ((9, 0), E4M3, "kv8 is for e4m3 k and v with a 16-bit q, but q is e4m3")):
        with pytest.raises(sdpa.Unavailable, match=f"^{sentence}$"):
            sdpa.line_with(capability, dtype, D, D, 128)
    return legal


@pytest.mark.parametrize("capability,D,Dv,sizes", [
    ((8, 0), 32, 256, (32, 256)), ((8, 0), 256, 32, (256, 32)), ((8, 9), 48, 0, (48, 48)), ((8, 0), 64, 16, None), ((8, 0), 16, 64, None),
    ((12, 0), 72, 64, None), ((8, 0), 64, 72, None), ((9, 0), 8, 8, (64, 64)), ((9, 0), 64, 136, (192, 192)), ((9, 0), 192, 128, (192, 128)),
    ((9, 0), 256, 96, (256, 96)), ((9, 0), 264, 8, None), ((9, 0), 8, 264, None), ((9, 0), 12, 16, None), ((9, 0), 16, 12, None)])
def test_sizes_of_builds(capability, D, Dv, sizes):
    """None: there is no line. Both sizes are checked."""
    if sizes:
        assert sdpa.widths(capability, D, Dv) == sizes
    else:
        with pytest.raises(sdpa.Unavailable, match=f"^there is no line for D={D}, Dv={Dv}"):
            sdpa.widths(capability, D, Dv)


def test_lines_of_all_sizes(monkeypatch):
    """On sm_90 the sizes share the next larger build, elsewhere they have their own. A compiler checks that all builds are legal."""
    legal = [words for turn, size in enumerate(LINES_OF_SIZES) for words in check_line_of_size(turn, *size, monkeypatch)]
    sections = {is_tuned: builds.Tree().refusals(is_tuned) for is_tuned in (True, False)}
    cases = {" ".join(definition[2:] for definition in builds.definitions(words)): sections["USE_TUNED=1" in words] for words in legal}
    refused = dict(zip(cases, test_knobs.refusals([*cases.items()])))
    assert len(cases) >= 50 and not {words: found for words, found in refused.items() if found}


def test_numbers_that_python_and_cpp_share(monkeypatch):
    """Both have the same feature bits, type and mask numbers, struct Line and operator arguments."""
    cpp = re.sub("//.*", "", "".join(builds.Tree().sources("bindings/pytorch.cpp").values()))
    header = builds.Tree().read("bindings/sdpa.h")
    bits = re.findall(r"(\w+) = (\d+)", re.search(r"enum Feature {(.*?)}", cpp, re.DOTALL)[1])
    knobs = {**{name: name.upper() for name, _ in bits}, "use_bias": "USE_BIAS=1", "use_mask": "USE_BIAS=2",
             "use_bf16_out": "OUT_DTYPE=BF16", "use_8_bit_kv": "KV_DTYPE=FP8_E4M3", "use_fp32_bias": "USE_BIAS=3", "use_any_pages": "USE_PAGES=2",
             "use_key_bias": "USE_BIAS=4", "use_fp32_key_bias": "USE_BIAS=5"}
    assert [(knobs[name], int(bit)) for name, bit in bits] == [(knob, 1 << i) for i, knob in enumerate(sdpa.FEATURES)]
    assert {knob.partition("=")[0] for knob in sdpa.FEATURES} <= set(builds.Tree().knobs())
    types = re.findall(r"scalar_type\(\) == at::k(\w+) \? (\d)", cpp)
    assert types == [("Half", "0"), ("BFloat16", "1")] and list(sdpa.DTYPES) == [torch.float16, torch.bfloat16, torch.float8_e4m3fn]
    causal = re.search(r"enum { SDPA_CAUSAL_(\w+), SDPA_CAUSAL_(\w+), SDPA_CAUSAL_(\w+) };", header).groups()
    numbers = {word: causal.index(name) for word, name in (("off", "OFF"), ("br", "BOTTOM_RIGHT"), ("tl", "TOP_LEFT"))}
    assert sdpa.MASKS == {None: 0, False: 0, True: numbers["br"], **numbers}
    for struct in (sdpa.Line, sdpa.Appender, sdpa.BackwardLine):
        body = re.search(rf"struct {struct.__name__} {{(.*?)}}", cpp, re.DOTALL)[1]
        members = [(name, int(size or 8)) for name, size in re.findall(r"(\w+)(?:\[(\d+)\])?;", body)]
        assert members == [(name, ctypes.sizeof(kind)) for name, kind in struct._fields_]
    places = re.search(r"constexpr int at_causal.*?;", cpp, re.DOTALL)[0]
    places = dict(re.findall(r"\b(?:at_)?(\w+) = (\d+)[,;]", places))
    names = [argument.name for argument in sdpa.OPERATOR._schema.arguments]
    assert names == [argument.name for argument in sdpa.BLOCK_MASK._schema.arguments]
    assert {name: int(place) for name, place in places.items()} == {
        **{name: names.index(name) for name in ("causal", "softcap", "sinks", "k_lengths", "q_starts", "k_starts", "page_table", "most_keys",
                                               "bias", "bias_keys", "q_lengths", "score_mod", "mask_mod", "x0", "i1", "k_firsts", "backward")}, "arguments": len(names)}
    assert names[:5] + names[12:] == ("q k v causal left sinks k_lengths q_starts k_starts page_table most_keys bias bias_keys "
                                      "q_lengths batch_invariant bf16_out score_mod mask_mod x0 x1 x2 x3 i0 i1 block_mask made_for "
                                      "k_firsts backward").split()
    # Each argument of the callback is what C++ hands over under that name.
    order = re.search(r"using Load = void \(\*\)\((.*?),\s*Line\* line\);", cpp)[1]
    order = order.replace("int ", "").replace("const char* ", "").split(", ")
    of = dict(device=5, dtype=2, D=64, Dv=64, features=0b1100110, score_mod=b"-s", mask_mod=b"q<k")
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device))
    monkeypatch.setattr(sdpa, "library_of", lambda *x: asked.append(x))
    sdpa.load_line(*map(of.get, order), sdpa.Line())
    assert asked == [("hopper_e4m3", (9, 5), "USE_SINKS", "USE_LENGTHS", "USE_BIAS=2", "OUT_DTYPE=BF16", "SCORE_MOD=- s",
                      "MASK_MOD=q < k")]


def test_what_a_library_is_built_of(monkeypatch):
    """The build uses the line's knobs, overridden by the problem's, for this GPU. A change of any source file causes a rebuild."""
    built = []
    monkeypatch.setattr(sdpa, "FAILED", {})
    monkeypatch.setattr(sdpa, "built", lambda *x: built.append(x) or "path")
    monkeypatch.setattr(ctypes, "CDLL", lambda path: path)
    assert sdpa.library_of.__wrapped__("hopper_d256_bf16", (9, 0), "HEAD_DIM=192", "HEAD_DIM_V=128", "USE_SINKS") == "path"
    assert sdpa.library_of.__wrapped__("ampere", (8, 6), "USE_LENGTHS", "USE_BIAS=2") == "path"
    sdpa.library_of.__wrapped__("ampere", (8, 6), "USE_SINKS", "SCORE_MOD=min ( s , q )", "MASK_MOD=i0 [ q ] == i0 [ k ]")
    (what, sources, *options), (other, _, *others), (third, _, *of_mods) = built
    assert third == "ampere-USE_SINKS-SCORE_MOD-MASK_MOD-sm_86"
    assert {r"-DSCORE_MOD=min ( s \, q )", "-DMASK_MOD=i0 [ q ] == i0 [ k ]"} <= set(of_mods)
    assert what == "hopper_d256_bf16-HEAD_DIM=192-HEAD_DIM_V=128-USE_SINKS-sm_90a" and other == "ampere-USE_LENGTHS-USE_BIAS=2-sm_86"
    assert "-gencode=arch=compute_90a,code=sm_90a" in options and "-gencode=arch=compute_86,code=sm_86" in others
    assert sorted(option for option in options if option.startswith("-D")) == sorted(
        "-DUSE_WGMMA=1 -DVEC_WIDTH=8 -DUSE_TUNED=1 -DHEAD_DIM=192 -DDTYPE=BF16 -DHEAD_DIM_V=128 -DUSE_SINKS=1".split())
    assert {"-DUSE_LENGTHS=1", "-DUSE_BIAS=2"} <= set(others) and "-DHEAD_DIM=64" not in others
    included = {path for path in builds.Tree().sources("bindings/library.cu") if not path.startswith("cpu_backend/")}
    assert sources[0] == "bindings/library.cu" and set(sources) == {path for path in included if not builds.is_of_harness(path)}
    built.clear()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(sdpa, "first_call", SimpleNamespace(library=None))
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(sdpa_torch_load_lines_by=built.append,
                                                                     sdpa_torch_load_appender_by=built.append,
                                                                     sdpa_torch_load_backward_by=built.append))
    sdpa.glue.__wrapped__()
    (what, sources, *_), *callbacks = built
    assert what == "pytorch-" + torch.__version__ and callbacks == [sdpa.load_line, sdpa.load_appender, sdpa.load_backward]
    assert sources[0] == "bindings/pytorch.cpp" and set(sources) == set(builds.Tree().sources("bindings/pytorch.cpp"))
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(sdpa.Unavailable, match="^this PyTorch is built without CUDA$"):
        sdpa.glue.__wrapped__()


def test_a_library_has_the_name_of_all_that_it_is_built_of(monkeypatch, tmp_path):
    in_cache(monkeypatch, tmp_path, FAKE_NVCC.replace("--version ]", f"--version ] && cat {tmp_path}/version").replace("sleep 0.3",
                                                                                                                       "") % "")
    monkeypatch.setattr(sdpa, "ROOT", str(tmp_path))
    paths = []
    for change in (dict(version="13.0", a="one", b="two"), dict(version="13.1"), dict(a="other"), dict(b="other"), dict(b="otherb", a="")):
        for name, text in change.items():
            (tmp_path / name).write_text(text)
        paths += [sdpa.built("x", ("a", "b"), "-DA=1"), sdpa.built("x", ("a", "b"), "-DA=2")]
    assert len(set(paths)) == 10 and paths[0].startswith(str(tmp_path / "cache" / "x-"))


def on_meta(*shape, dtype=torch.half):
    """A tensor [B,H,S,D] without memory, transposed from [B,S,H,D] as in a model."""
    B, H, S, D = shape
    return torch.empty(B, S, H, D, device="meta", dtype=dtype).transpose(1, 2)


@pytest.mark.parametrize("D,Dv", [(64, 64), (64, 128), (192, 128), (80, 48)])
@pytest.mark.parametrize("dtype", sdpa.DTYPES)
def test_shapes_of_the_fake_kernel(dtype, D, Dv):
    """O has V's own D, LSE none. q then has another size than O, so O is contiguous instead of laid out like q."""
    q, k, v = on_meta(2, 8, 100, D, dtype=dtype), on_meta(2, 4, 300, D, dtype=dtype), on_meta(2, 4, 300, Dv, dtype=dtype)
    plain = 0, -1, -1, 0, None, 0.0, *[None] * 8, 0
    out, lse = sdpa.fake(q, k, v, *plain)
    assert out.shape == (2, 8, 100, Dv) and out.dtype == (torch.half if dtype == torch.float8_e4m3fn else dtype)
    assert out.stride() == (q.stride() if D == Dv else (8 * 100 * Dv, 100 * Dv, Dv, 1))
    assert (lse.shape, lse.dtype, lse.stride()) == ((2, 8, 100), torch.float32, (800, 100, 1))
    if dtype == torch.float8_e4m3fn:
        out, _ = sdpa.fake(q, k, v, *plain, None, 0, None, False, True)
        assert out.dtype == torch.bfloat16
    for x, dx in zip((q, k, v), sdpa.fake_backward(out, q, k, v, out, lse, *plain[:5])):
        assert (dx.shape, dx.stride(), dx.dtype) == (x.shape, x.stride(), x.dtype)


def test_each_argument_gets_to_its_place(monkeypatch):
    names = [argument.name for argument in sdpa.OPERATOR._schema.arguments]
    asked = []
    monkeypatch.setattr(sdpa, "OPERATOR", lambda *x, **more: asked.append(dict(zip(names, x), **more)) or ("O", "LSE"))
    monkeypatch.setattr(sdpa, "BLOCK_MASK", lambda *x: asked.append(dict(zip(names, x))) or ("tiles", "made for"))
    q, k, v = (torch.empty(1, dtype=E4M3).as_subclass(stand_in.OnGpu) for _ in "qkv")
    tensors = {name: torch.empty(0) for name in (
        "q_descale", "k_descale", "v_descale", "sinks", "k_lengths", "q_lengths", "q_starts", "k_starts", "page_table", "bias")}
    nothing = dict.fromkeys(tensors) | dict(q=q, k=k, v=v, causal=0, left=-1, right=-1, window_alignment=0, scale=None, softcap=0.0,
                                            most_keys=0, bias_keys=0, batch_invariant=False,
                                            bf16_out=False)

    def handed_over(**options):
        assert sdpa.attention(q, k, v, **options) == "O"
        return asked.pop()
    assert handed_over() == handed_over(causal=False, window=(None, None), softcap=None) == nothing
    numbers = dict(scale=0.0, softcap=5.0, most_keys=9, bias_keys=3, batch_invariant=True)
    found = handed_over(**tensors, **numbers)
    assert {name: found[name] for name in numbers} == numbers
    assert all(found[name] is x for name, x in tensors.items())
    assert handed_over(k_firsts=tensors["sinks"]) == nothing | dict(k_firsts=tensors["sinks"])
    for options, changes in ((dict(causal=True), dict(causal=1)), (dict(causal="tl"), dict(causal=2)),
                             (dict(window=(3, None)), dict(left=3)),
                             (dict(causal="br", window=[None, 0]), dict(causal=1, right=0)),
                             (dict(window=(0, 7, "tl")), dict(left=0, right=7, window_alignment=2)),
                             (dict(out_dtype=torch.bfloat16), dict(bf16_out=True)), (dict(out_dtype=torch.half), {}),
                             (dict(causal="tl", window=(1, 2, "br")), dict(causal=2, left=1, right=2, window_alignment=1))):
        assert handed_over(**options) == nothing | changes, options
    reals, ints = [torch.empty(0) for _ in range(4)], [torch.empty(0, dtype=torch.int32) for _ in range(2)]
    made = sdpa.BlockMask("tiles", "made for")
    none = dict(score_mod="", mask_mod="", **dict.fromkeys("x0 x1 x2 x3 i0 i1 block_mask".split()), made_for="")
    for options, changes in (
            (dict(score_mod="s * 2"), dict(score_mod="s * 2")), (dict(mask_mod="q < k", args=()), dict(mask_mod="q < k")),
            (dict(score_mod="s - x0[h] + x1[k]", mask_mod="i0[q] == i0[k]", args=[ints[0], *reals[:2]]),
             dict(score_mod="s - x0[h] + x1[k]", mask_mod="i0[q] == i0[k]", i0=ints[0], x0=reals[0], x1=reals[1])),
            (dict(mask_mod="x0[q] + x1[q] + x2[q] < x3[k] + i0[q] + i1[k]", args=[*ints, *reals]),
             dict(mask_mod="x0[q] + x1[q] + x2[q] < x3[k] + i0[q] + i1[k]", **dict(zip("x0 x1 x2 x3 i0 i1".split(), reals + ints)))),
            (dict(mask_mod="q < k", block_mask=made), dict(mask_mod="q < k", block_mask="tiles", made_for="made for"))):
        assert handed_over(**options) == nothing | none | changes, options
        options.pop("block_mask", None)
        assert sdpa.block_mask(q, k, v, causal=True, **options) == made
        assert asked.pop() == nothing | none | changes | dict(causal=1, block_mask=None, made_for="")
    assert sdpa.attention(q, k, v, return_lse=True) == ("O", "LSE")
    monkeypatch.setattr(sdpa, "glue", lambda: asked.append("glue"))
    monkeypatch.setattr(torch.ops.sdpa, "why_not", SimpleNamespace(default=lambda *x: asked.append(x) or "a sentence"), raising=False)
    q, k, v = (torch.empty(1, device="meta") for _ in "qkv")
    asked.clear()
    given = dict(q=q, k=k, v=v, attn_mask=4, dropout_p=5, is_causal=6, scale=7, enable_gqa=8)
    assert sdpa.why_not(**given) == sdpa.why_not(q, k, v) == "a sentence"
    assert [*map(id, asked[1])] == [*map(id, given.values())] and asked[3][:3] == (q, k, v) and asked[3][3:] == (None, 0.0, False, None, False)
    assert asked[0] == asked[2] == "glue"


# ---- expressions, without a GPU ----

ALLOWED = {  # with the arrays that they name
    "score_mod": {
        "s": "", "s - x0[h] * real(q + Sk - Sq - k)": "x0", "s+x1[h*32+min(abs(q+Sk-Sq-k)/16,31)]": "x1", "30. * tanh(s / 3e1f)": "",
        "(q - k) % 4 == 0 ? s : s - .5 * pow(2, b)": "", "q < k ? k < 5 ? s : -s : exp(log(sqrt(exp2(log2(abs(s) + 1)))))": "",
        "-+s * sin(cos(floor(max(s, x3[x2[0] > 0 ? q : k]))))": "x2 x3", "s + int(1.5f) * real(1) - tanh_approx(1e-3)": ""},
    "mask_mod": {
        "i0[q] == i0[k]": "i0", "k < 64 || k <= q + Sk - Sq": "", "q + Sk - Sq - k < 256 && (q + Sk - Sq - k) % 4 == 0": "",
        "!(~i1[b] & 1 << h ^ 3 | k >> 1) != (x0[q] >= x1[k])": "i1 x0 x1"}}
BAD_TOKENS = "= += -= *= /= %= &= |= ^= <<= >>= ++ -- -> :: . .. ; { } # ## \" ' \\ \n \t \r \0 $ @ ` // /* */ %: <% ??/ <=> , é ²".split(" ")
BAD_NAMES = ("x4 i2 x S SQ NONE SCORE_MOD __LINE__ asm sizeof return new this true float double unsigned auto and not operand operator "
             "p printf threadIdx system __trap std real2 _s s_").split() + ["0x1", "08", "00", "1u", "1l", "1.0l", "1'0", "1e", "1e+", "0b1", "1.2.3", "1f",
                                                                           "1_s", "1e5k", '"a"', "'a'", "u8", "*s", "&s", "(int)", "int()", "[1]", "x0[]"]
ATTACKS = [
    "s; asm volatile(\"trap;\")", "s); system(\"rm -rf /\"); (s", "s }", "s\n#include \"/etc/passwd\"", "s # 1", "[]{ return s; }()",
    "s -DX", "$(id)", "`id`", "s, 1", "(s, 1)", "min(s)", "min(s, 1, 2)", "exp(s, 1)", "exp()", "x0[1, 2]", "x0(h)", "exp[1]", "x0", "exp",
    "x0[1][2]", "s(1)", "s[1]", "1(2)", "(s", "s)", "x0[h", "x0[h)", "(h]", "s ? 1", "s : 1", "s ? (1 : 2)", "s ? min(1, 2 : 3)", "s ? x0[1 : 2]", "s +",
    "* s", "s s", "s 1", "1 s", "", " ", "s = 1", "s == 1 = 2", "q <: 0 :>", "s ? : 1", "*&s", "s - -- q", "x0[h] = 1", "x0[h]++", "(int) s", "- ! ~"]


def test_expressions_that_are_allowed():
    """A C++ compiler gives the same values for the user's text and the text passed to nvcc, and sdpa.cu compiles with the latter."""
    numbers, integers = (torch.arange(100) % 7).float() / 4, torch.arange(100, dtype=torch.int32) % 3
    at = [x.data_ptr() for x in [numbers] * 4 + [integers] * 2]
    results, whole = [], {argument: [] for argument in ALLOWED}
    for texts in itertools.zip_longest(*ALLOWED.values(), fillvalue="q < k"):
        given = []
        for argument, text in zip(ALLOWED, texts):
            tokens, named = sdpa.parsed(argument, text)
            assert named == set(ALLOWED[argument].get(text, "").split()) and tokens.replace(" ", "") == text.replace(" ", "")
            given.append(tokens)
        values = [[(library.score(0.75, *point, *at[:4]), library.sees(*point, *at))
                   for point in itertools.product((0, 1), (0, 3), (0, 5), (1, 70), (9,), (80,))]
                  for library in (stand_in.expressions(*texts), stand_in.expressions(*given))]
        assert values[0] == values[1] and all(score == score for score, _ in values[0])
        results += values[0]
        for tokens, argument in zip(given, ALLOWED):
            whole[argument].append(f"({tokens})")
    assert {seen for _, seen in results} == {0, 1} and len({score for score, _ in results}) > 10
    for knob, texts in zip(("SCORE_MOD", "MASK_MOD"), whole.values()):
        assert not builds.Tree().expression_trouble(f"{knob}={' + '.join(texts)}")


@pytest.mark.parametrize("argument", ALLOWED)
def test_expressions_that_are_refused(argument):
    """Inserts each bad token at each place of each allowed expression, replaces each operand by each bad name, and tries known attacks.
    The error names the token."""
    count = 0
    for text in ALLOWED[argument]:
        tokens = sdpa.parsed(argument, text)[0].split()
        for place in range(len(tokens) + 1):
            for bad in BAD_TOKENS:
                with pytest.raises(ValueError, match=f"^sdpa.attention: {argument}"):
                    sdpa.parsed(argument, " ".join(tokens[:place] + [bad] + tokens[place:]))
                count += 1
            if place < len(tokens) and re.fullmatch(r"[.\d]\S*|[sbhqk]|S[qk]", tokens[place]):
                others = BAD_NAMES + (["s", "s + i0[0]"] if argument == "mask_mod" else ["i0[0]", "i1[0]"])
                for bad in others:
                    with pytest.raises(ValueError, match=f"^sdpa.attention: {argument}"):
                        sdpa.parsed(argument, " ".join(tokens[:place] + [bad] + tokens[place + 1:]))
                    count += 1
    assert count > 2000
    for text in ATTACKS:
        text = text if argument == "score_mod" else re.sub(r"\bs\b", "q", text)
        with pytest.raises(ValueError, match=f"^sdpa.attention: {argument}( ends where |: .* at character [0-9]+ is not allowed there; docs/USING.md)"):
            sdpa.parsed(argument, text)
    with pytest.raises(ValueError, match=rf"^sdpa.attention: {argument}: '\+\+' at character 6 is not"):
        sdpa.parsed(argument, "q + k++ + 1 ;")
    assert sdpa.parsed(argument, "1+" * 499 + "11")
    with pytest.raises(ValueError, match="has 1001 characters, more than 1000$"):
        sdpa.parsed(argument, "1+" * 500 + "1")


def test_no_expression_gets_to_nvcc_unseen(monkeypatch, capfd):
    """Without attention(), neither loading a line nor building it ahead passes a refused expression to nvcc."""
    built = []
    monkeypatch.setattr(sdpa, "built", lambda *x: built.append(x) or "path")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(ctypes, "CDLL", lambda path: None)
    for place, name in enumerate(("score_mod", "mask_mod")):
        line, texts = sdpa.Line(), [b"", b""]
        texts[place] = b'q; asm("trap;")'
        sdpa.load_line(0, 1, 128, 128, 0, *texts, line)
        assert line.trouble.decode().startswith(f"sdpa.attention: {name}: ';' at character 2 is not allowed there")
        q = on_meta(1, 1, 1, 64)
        sdpa.build_ahead(sdpa.OPERATOR, [q, q, q, 0, -1, -1, 0, None, 0.0, *[None] * 8, 0, None, 0, None, False, False, *map(bytes.decode, texts)])
    assert not built


def test_activate_and_restore(monkeypatch):
    """Our kernels are registered for PyTorch's operators after the ones they replace are known, and can be removed."""
    told, attention = [], torch.nn.attention
    preferences = []
    monkeypatch.setattr(sdpa, "glue", lambda: SimpleNamespace(sdpa_torch_activate=told.append, sdpa_torch_prefer_backward=preferences.append))
    sdpa.activate()
    assert told == [True] and attention.current_flash_attention_impl() == "sdpa"
    attention.restore_flash_attention_impl()
    assert told == [True, False] and attention.current_flash_attention_impl() is None
    removed = []
    for name in "ab":
        handle = SimpleNamespace(remove=lambda name=name: removed.append(name))
        attention.register_flash_attention_impl(name, register_fn=lambda handle=handle: handle)
    for name in ("a", "sdpa", "b", "sdpa", "sdpa"):  # each takes the place of the one before
        attention.activate_flash_attention_impl(name)
        assert attention.current_flash_attention_impl() == name
    assert {"sdpa", "a", "b"} <= set(attention.list_flash_attention_impls())
    assert told == [True, False, *[True, False] * 2, True] and removed == ["a", "b"]
    attention.restore_flash_attention_impl()
    assert told[-1] is False
    for backward in "torch", "sdpa", None:
        sdpa.activate(backward)
    assert preferences == [0] * 4 + [sdpa.PREFERENCES["torch"], sdpa.PREFERENCES["sdpa"], 0] and sorted(sdpa.PREFERENCES.values()) == [0, 1, 2]
    attention.restore_flash_attention_impl()
    assert sdpa.first_call(lambda *x: x)(1, 2) == (1, 2)
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(sdpa.Unavailable, match=f"^PyTorch {re.escape(torch.__version__)} takes no other FlashAttention; 2.11 is the first"):
        sdpa.activate()


def in_cache(monkeypatch, folder, nvcc=None):
    """Sets an empty cache, and this script as nvcc."""
    monkeypatch.setenv("SDPA_CACHE", str(folder / "cache"))
    monkeypatch.setenv("CALLS", str(folder / "calls"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    if nvcc is not None:
        (folder / "nvcc").write_text(nvcc)
        (folder / "nvcc").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_two_processes_build_a_line_once(monkeypatch, tmp_path, capfd):
    in_cache(monkeypatch, tmp_path, FAKE_NVCC % "")

    def build(name):
        (tmp_path / name).write_text(sdpa.built("a", ["bindings/library.cu"], "-DKNOB=1"))
    processes = [multiprocessing.get_context("fork").Process(target=build, args=(name,)) for name in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    path, same = ((tmp_path / name).read_text() for name in "ab")
    assert path == same and open(path).read() == "library\n"
    assert (tmp_path / "calls").read_text() == "run\n"
    assert capfd.readouterr().err == "sdpa: building a by nvcc, 20 to 60 s, once ...\nsdpa: building a took 0 s\n"
    other = sdpa.built("a", ["bindings/library.cu"], "-DKNOB=2")
    assert other != path and (tmp_path / "calls").read_text() == "run\n" * 2


def test_what_cannot_be_built(monkeypatch, tmp_path, capsys):
    in_cache(monkeypatch, tmp_path, FAKE_NVCC % 'rm -f "$word"; echo "x.cu(3): error: no such knob" >&2; exit 1')
    with pytest.raises(sdpa.Unavailable, match="^nvcc could not build a: error: no such knob$"):
        sdpa.built("a", ["bindings/library.cu"])
    assert not [name for name in os.listdir(tmp_path / "cache") if name.endswith(".so")]
    monkeypatch.setenv("SDPA_CACHE", "/dev/null/cache")
    with pytest.raises(sdpa.Unavailable, match="^/dev/null/cache cannot be written to .*; set SDPA_CACHE to a folder that can$"):
        sdpa.built("a", ["bindings/library.cu"])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))  # before PATH, as in PyTorch, if it has one
    assert sdpa.nvcc() == str(tmp_path / "nvcc")
    (tmp_path / "toolkit/bin").mkdir(parents=True)
    os.symlink(tmp_path / "nvcc", tmp_path / "toolkit/bin/nvcc")
    assert sdpa.nvcc() == str(tmp_path / "toolkit/bin/nvcc")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "toolkit"))
    monkeypatch.delenv("CUDA_HOME")
    assert sdpa.nvcc() == str(tmp_path / "toolkit/bin/nvcc")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "empty"))
    with pytest.raises(sdpa.Unavailable, match="^nvcc is missing; install the CUDA Toolkit"):
        sdpa.built("a", ["bindings/library.cu"])
    # A line that cannot be had: the reason reaches C++, and stderr.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    line = sdpa.Line()
    sdpa.load_line(0, 1, 128, 128, 0, b"", b"", line)
    assert line.trouble.startswith(b"nvcc is missing") and not line.forward
    assert "where PyTorch has a kernel of its own, that runs instead" in capsys.readouterr().err


def test_a_failed_build_is_tried_again_after_a_change(monkeypatch, tmp_path, capsys):
    """Of a source or of an environment variable, for every library: lines, the append kernel, pytorch.cpp. A full disk may have
    room at the next call."""
    in_cache(monkeypatch, tmp_path, FAKE_NVCC.replace('sleep 0.3', '') % 'rm -f "$word"; cat "$0.says" >&2; exit 1')
    (tmp_path / "nvcc.says").write_text("x.cu(3): error: no such knob")
    clone = tmp_path / "clone"
    (clone / "bindings").mkdir(parents=True)
    for path in ("configs.txt", *sdpa.LINE_SOURCES, *sdpa.GLUE_SOURCES, *sdpa.APPENDER_SOURCES):
        shutil.copyfile(os.path.join(ROOT, path), clone / path)
    monkeypatch.setattr(sdpa, "ROOT", str(clone))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    line, appender, seconds = sdpa.Line(), sdpa.Appender(), itertools.count()
    variables = "PATH", "CUDA_HOME", "CUDA_PATH", "SDPA_CACHE"

    def touch(path):
        os.utime(clone / path, (next(seconds),) * 2)

    def load_glue():
        with pytest.raises(sdpa.Unavailable) as trouble:
            sdpa.glue.__wrapped__()
        return str(trouble.value)
    loads = [(lambda: sdpa.load_line(0, 1, 128, 128, 0, b"", b"", line) or line.trouble.decode(), sdpa.LINE_SOURCES),
             (lambda: sdpa.load_appender(0, appender) or appender.trouble.decode(), sdpa.APPENDER_SOURCES),
             (load_glue, sdpa.GLUE_SOURCES)]
    for load, sources in loads:
        def runs():
            before = len((tmp_path / "calls").read_text()) if (tmp_path / "calls").exists() else 0
            sentence = load()
            return sentence, (len((tmp_path / "calls").read_text()) - before) // len("run\n")
        sentence, count = runs()
        assert sentence.endswith("error: no such knob") and count == 1
        assert runs() == (sentence, 0)
        for path in sources:
            touch(path)
            assert runs() == (sentence, 1) and runs() == (sentence, 0), path
        for name in variables:
            with monkeypatch.context() as other:  # a value that leads to the same nvcc
                other.setenv(name, dict(PATH=os.environ["PATH"] + ":/none", SDPA_CACHE=str(tmp_path / "another")).get(name, str(tmp_path / "none")))
                assert runs() == (sentence, 1) and runs() == (sentence, 0), name
            assert runs() == (sentence, 1), name
        (tmp_path / "nvcc.says").write_text("fatal error: error writing to /tmp/x: No space left on device")
        touch(sources[0])
        for _ in range(2):
            sentence, count = runs()
            assert sentence.startswith("no space is left for building ") and "/tmp/x: No space left on device; free some" in sentence
            assert count == 1 and str(tmp_path / "cache") in sentence
        (tmp_path / "nvcc.says").write_text("x.cu(3): error: no such knob")
    assert capsys.readouterr().err.count("where PyTorch has a kernel of its own, that runs instead") == 2 + len(sdpa.LINE_SOURCES) + 2 * len(variables) + 1


def test_a_cache_without_nvcc(monkeypatch, tmp_path):
    """Without nvcc, or if the cache is read-only, the newest library that another nvcc built from the same sources is loaded."""
    in_cache(monkeypatch, tmp_path, FAKE_NVCC.replace("--version ]", f"--version ] && cat {tmp_path}/version") % "")
    monkeypatch.setattr(sdpa, "ROOT", str(tmp_path))
    (tmp_path / "a").write_text("one")
    paths = []
    for version in ("13.0", "12.4"):
        (tmp_path / "version").write_text(version)
        paths.append(sdpa.built("x", ("a",), "-DA=1", "-I/torch"))
    os.utime(paths[1], (1, 1))
    path = os.environ["PATH"]

    def refused(*_, **__):
        raise OSError(30, "Read-only file system")
    for changes in (dict(PATH=str(tmp_path / "empty"), CUDA_HOME=str(tmp_path)), dict(PATH=path)):
        for name, value in changes.items():
            monkeypatch.setenv(name, value)
        if changes["PATH"] == path:  # with an nvcc that has made nothing yet, in a folder that takes nothing
            monkeypatch.delenv("CUDA_HOME")
            (tmp_path / "version").write_text("13.1")
            monkeypatch.setattr(sdpa, "open", refused, raising=False)
        assert sdpa.built("x", ("a",), "-DA=1", "-I/elsewhere/torch") == paths[0]
        with pytest.raises(sdpa.Unavailable, match="nvcc is missing|cannot be written to"):
            sdpa.built("x", ("a",), "-DA=2")
    assert (tmp_path / "calls").read_text() == "run\n" * 2


def test_a_first_call_builds_its_line_beside_pytorch_cpp(monkeypatch):
    """Both build concurrently, with the knobs that the call will need."""
    both, asked = threading.Barrier(2), []
    operator = type("Operator", (), {"_schema": sdpa.OPERATOR._schema, "__call__": lambda self, *x: len(x)})()
    monkeypatch.setattr(sdpa, "OPERATOR", operator)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(sdpa, "glue", lambda: both.wait(10))
    monkeypatch.setattr(sdpa, "built", lambda *x: asked.append(x) or both.wait(10))
    q, v, ints = on_meta(2, 8, 100, 192, dtype=torch.bfloat16), on_meta(2, 4, 300, 128, dtype=torch.bfloat16), torch.zeros(2)
    needed = dict(q=q, k=q, v=v, softcap=0.0)
    for given, features in (({}, 0), ({"softcap": 2.0}, 1), ({"sinks": ints}, 2), ({"k_lengths": ints}, 4),
                            ({"q_lengths": ints}, 4), ({"q_starts": ints}, 4), ({"sinks": ints, "page_table": ints}, 512 + 6),
                            ({"k": q[:, :, :96], "page_table": ints}, 12), ({"k_firsts": ints}, 4),
                            ({"k": q[:, :, :96], "page_table": ints, "k_firsts": ints}, 512 + 4),
                            ({"k_starts": ints, "q_descale": ints}, 4), ({"bias": ints}, 4096), ({"bias": ints > 0}, 1024),
                            ({"bias": torch.zeros(2, 2) > 0}, 32), ({"bias": ints > 0, "k_lengths": ints}, 32 + 4),
                            ({"bias": ints.bfloat16()}, 2048), ({"bias": ints.half()}, 4096),
                            ({"bias": ints.bfloat16(), "bias_keys": 2}, 16), ({"bias": torch.zeros(2, 2)}, 256),
                            ({"q": q.to(E4M3), "v": v.to(E4M3), "k_lengths": ints, "bf16_out": True}, 64 + 4),
                            ({"k": q.to(E4M3), "v": v.to(E4M3), "k_lengths": ints}, 128 + 4),
                            ({"score_mod": "-s", "sinks": ints}, 2)):
        dtype = (needed | given)["q"].dtype
        arguments = [(needed | given).get(argument.name) for argument in operator._schema.arguments]
        assert sdpa.first_call(operator)(*arguments) == len(arguments)
        assert asked.pop() == sdpa.build_of(*sdpa.line_with((9, 0), dtype, 192, 128, features, given.get("score_mod"))) and not asked


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_build_is_tried_again(monkeypatch):
    """The callback leaves the line empty, and C++ does not store empty lines."""
    def interrupted(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(torch.cuda, "get_device_capability", interrupted)
    line = sdpa.Line()
    sdpa.load_line(0, 1, 128, 128, 0, b"", b"", line)
    assert not line.trouble and not line.forward
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (_ for _ in ()).throw(MemoryError()))
    sdpa.load_line(0, 1, 128, 128, 0, b"", b"", line)
    assert line.trouble == b"MemoryError"


# What the binding uses of PyTorch's internals: operators with the beginning of their schemas, since some have gained arguments at the end,
# and names in Python. The functions of C++ are those that pytorch.cpp compiles against.
HEAD, SEQUENCES = "(Tensor query, Tensor key, Tensor value, ", "cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
RESULTS = ("(Tensor output, Tensor logsumexp, Tensor " + SEQUENCES + "Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)")
OPERATORS = {
    "_scaled_dot_product_cudnn_attention": HEAD + "Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, "
                                           "bool return_debug_mask=False, *, float? scale=None) -> " + RESULTS,
    "_cudnn_attention_forward": HEAD + "Tensor? attn_bias, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, "
                                "bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, "
                                "float? scale=None",
    **dict.fromkeys(("_scaled_dot_product_cudnn_attention_backward", "_cudnn_attention_backward"),
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, "
        "Tensor attn_bias, Tensor " + SEQUENCES + "float dropout_p, bool is_causal, *, float? scale=None) -> (Tensor, Tensor, Tensor)"),
    "_scaled_dot_product_flash_attention": HEAD + "float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, float? "
                                           "scale=None) -> " + RESULTS.replace("philox_seed", "rng_state").replace("philox_offset", "unused"),
    "_flash_attention_forward": HEAD + "Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, "
                                "bool return_debug_mask, *, float? scale=None",
    "_flash_attention_forward.quantized":
        HEAD + "Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, "
        "bool return_debug_mask, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, *, float? scale=None, SymInt? "
        "window_size_left=None, SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None) -> ",
    "_scaled_dot_product_flash_attention.quantized":
        HEAD + "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float dropout_p=0., bool is_causal=False, "
        "bool return_debug_mask=False, *, float? scale=None) -> ",
    "_flash_attention_backward": "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor " +
                                 SEQUENCES + "float dropout_p, bool is_causal, Tensor rng_state, Tensor unused, *, float? scale=None, SymInt? "
                                 "window_size_left=None, SymInt? window_size_right=None) -> (Tensor, Tensor, Tensor)",
    "_scaled_dot_product_flash_attention_backward":
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor " + SEQUENCES +
        "float dropout_p, bool is_causal, Tensor philox_seed, Tensor philox_offset, *, float? scale=None) -> (Tensor grad_query, ",
    "_scaled_dot_product_efficient_attention_backward":
        "(Tensor grad_out_, Tensor query, Tensor key, Tensor value, Tensor attn_bias, Tensor out, Tensor logsumexp, Tensor philox_seed, "
        "Tensor philox_offset, float dropout_p, bool[4] grad_input_mask, bool is_causal=False, *, float? scale=None) -> (Tensor, ",
    "_scaled_dot_product_efficient_attention": HEAD + "Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., bool "
                                               "is_causal=False, *, float? scale=None) -> (Tensor output, Tensor log_sumexp, Tensor "
                                               "philox_seed, Tensor philox_offset)",
    **dict.fromkeys(("scaled_dot_product_attention", "_fused_sdp_choice"), HEAD + "Tensor? attn_mask=None, float dropout_p=0., bool is_causal=False, *, float? scale=None, bool "
                    "enable_gqa=False) -> ")}
NAMES = ("nn.attention.register_flash_attention_impl", "nn.attention.activate_flash_attention_impl",
         "nn.attention.restore_flash_attention_impl", "library.register_fake", "library.Library", "version.cuda")


def test_what_is_used_of_pytorchs_inside():
    missing = [name for name in NAMES if not hasattr(eval("torch." + name.rpartition(".")[0]), name.rpartition(".")[2])]
    changed = {}
    for name, schema in OPERATORS.items():
        operator, _, overload = name.partition(".")
        operator = getattr(torch.ops.aten, operator, None)
        there = str(getattr(operator, overload or "default")._schema) if operator else "gone"
        if not there.startswith(f"aten::{name}{schema}"):
            changed[name] = there
    assert not missing and not changed
    choices = {name: int(getattr(SDPBackend, name)) for name in ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")}
    assert list(choices.values()) == [0, 1, 2, 3]


def test_the_newest_pytorch():
    """Runs this file's tests without a GPU with the newer PyTorch first on the path."""
    newest = os.environ.get("SDPA_TORCH_LATEST")
    if not newest or newest in os.environ.get("PYTHONPATH", "").split(":"):
        pytest.skip("SDPA_TORCH_LATEST names no folder with a newer PyTorch")
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not newest", __file__], cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": newest, "CUDA_VISIBLE_DEVICES": "", "SDPA_TEST_GPU": ""},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout


@pytest.fixture
def glue():
    """pytorch.cpp, compiled by the real nvcc."""
    if not builds.nvcc():
        pytest.skip("nvcc is missing")
    return sdpa.glue()


def half(*shape, dtype=torch.half, device="cpu"):
    return torch.randn(shape, device=device).to(dtype)


def test_refusals():
    q = half(1, 1, 1, 64)
    with pytest.raises(ValueError, match="q is on cpu; sdpa's kernels run on CUDA devices"):
        sdpa.attention(q, q, q)
    for options in {"causal": "middle"}, {"window": (1, 2, "middle")}:
        with pytest.raises(ValueError, match="a mask of 'middle' is none of None, 'br', 'tl'"):
            sdpa.attention(q, q, q, **options)
    for window in 10, (1,), "br":
        with pytest.raises(ValueError, match=r"^sdpa.attention: window=.* is not \(keys before, keys after\) or \(before, after, 'br'"):
            sdpa.attention(q, q, q, window=window)
    for q, dtype in ((q, torch.half), (q, torch.bfloat16), (q.to(E4M3), torch.float), (q.to(E4M3), E4M3)):
        with pytest.raises(ValueError, match=f"^sdpa.attention: out_dtype={dtype} is not for a q of {q.dtype}; e4m3's O is"):
            sdpa.attention(q, q, q, out_dtype=dtype)
    with FakeTensorMode():
        q, on_cpu = torch.empty(1, 1, 1, 64, device="cuda", dtype=torch.half), torch.empty(1, 1, 1, 64, dtype=torch.half)
        for k, v, words in ((on_cpu, q, "cuda:0, cpu and cuda:0"), (q, on_cpu, "cuda:0, cuda:0 and cpu")):
            with pytest.raises(ValueError, match=f"^sdpa.attention: q, k and v are on {words}, not on one device$"):
                sdpa.attention(q, k, v)
        for name in ("k_lengths", "q_lengths", "q_starts", "k_starts", "k_firsts", "page_table", "sinks", "bias", "q_descale", "k_descale", "v_descale"):
            with pytest.raises(TypeError, match=f"^sdpa.attention: {name} is a list, not a tensor$"):
                sdpa.attention(q, q, q, **{name: [1]})
            with pytest.raises(ValueError, match=f"^sdpa.attention: {name} is on cpu, not on cuda:0$"):
                sdpa.attention(q, q, q, **{name: on_cpu})
        with pytest.raises(RuntimeError, match="^sdpa.attention: a tensor has 3 dimensions, not"):
            sdpa.attention(q[0], q[0], q[0])
        x, n = torch.empty(9, device="cuda"), torch.empty(9, device="cuda", dtype=torch.int32)
        for options, error, words in (
                (dict(score_mod="s - x1[h]", args=[x]), ValueError, "args has no x1; its float32 tensors are x0"),
                (dict(score_mod="s - x0[h]", args=[n]), ValueError, "args has no x0; "),
                (dict(mask_mod="i0[q] == 0"), ValueError, "args has no i0; "),
                (dict(mask_mod="i0[q] == 0", args=[n, n]), ValueError, "args has i1, which neither score_mod nor mask_mod names$"),
                (dict(args=[x]), ValueError, "args has x0, which neither"),
                (dict(score_mod="s - x0[h]", args=[x] * 5), ValueError, "args has more than 4 tensors of float32 or more than 2 of int32"),
                (dict(mask_mod="i0[h] < 1", args=[n] * 3), ValueError, "args has more than 4 tensors of float32 or more than 2 of int32"),
                (dict(score_mod="s - x0[h]", args=[x.half()]), TypeError, r"args\[0\] is of torch.float16; want a tensor of float32"),
                (dict(mask_mod="i0[h] < 1", args=[n.long()]), TypeError, r"args\[0\] is of torch.int64; want a tensor of float32"),
                (dict(score_mod="s - x0[h]", args=[x, 1.0]), TypeError, r"args\[1\] is a float; want a tensor"),
                (dict(score_mod="s - x0[h]", args=[torch.empty(9)]), ValueError, r"args\[0\] is on cpu, not on cuda:0$"),
                (dict(score_mod="s - x0[h]", args=x), TypeError, "args is a FakeTensor, not a list of tensors"),
                (dict(score_mod=lambda s: s), TypeError, "score_mod is a function, not the text of an expression"),
                (dict(mask_mod="q < k", block_mask=x), TypeError, r"block_mask is a FakeTensor, not what block_mask\(\) returns"),
                (dict(mask_mod="s < k"), ValueError, "mask_mod: 's' at character 1 is not allowed there; docs/USING.md lists")):
            with pytest.raises(error, match="^sdpa.attention: " + words):
                sdpa.attention(q, q, q, **options)


BAD_ROWS = "the rows of q, k or v are not contiguous or do not all start at a multiple of 16 bytes"
ON_CPU = "a tensor is on cpu; sdpa's kernels run on CUDA devices"
WHY_NOT = [({"attn_mask": half(4, 5)}, "attn_mask is of shape [1, 1, 4, 5], which does not expand to [1, 2, 4, 4]"),
           ({"attn_mask": half(1, 1, 1, 4, 4)}, "attn_mask is of shape [1, 1, 1, 4, 4], which does not expand to [1, 2, 4, 4]"),
           *(({"attn_mask": torch.ones(4, 4, dtype=dtype)}, f"attn_mask is of {name}, not bool, float32, float16 or bfloat16")
             for dtype, name in ((torch.int, "Int"), (torch.double, "Double"))),
           ({"attn_mask": torch.ones(4, 4, dtype=torch.bfloat16)}, "attn_mask is of BFloat16, and PyTorch takes bool, float32 or q's type"),
           ({"attn_mask": torch.ones(4, 4, dtype=torch.bool, device="meta")}, "attn_mask is on meta, not on q's device"),
           ({"attn_mask": half(4, 4).requires_grad_()}, "attn_mask needs a gradient, and " + ON_CPU),
           ({"attn_mask": half(4, 4).requires_grad_(), "is_causal": True}, "attn_mask needs a gradient, and there is a causal mask"),
           *(({"attn_mask": mask}, ON_CPU) for mask in (half(4, 4), half(4), half(4, 1), half(2, 4, 4).mT, half(1, 1, 4, 4).float(),
                                                        half(1, 2, 1, 4).expand(1, 2, 4, 4), torch.ones(1, 1, 4, 1, dtype=torch.bool))),
           ({"all": half(2, 4, 64)}, ON_CPU), ({"q": half(2, 4, 64), "attn_mask": half(2, 4, 4)}, ON_CPU),
           ({"q": half(3, 2, 4, 64)}, ON_CPU), ({"all": half(4, 64)}, "a tensor has 2 dimensions, not [B,H,S,D]"),
           ({"dropout_p": 0.1}, "there is dropout"), ({"scale": -1.0}, "scale=-1 is not from 0 to 10^38"),
           ({"scale": float("nan")}, "scale=nan is not from 0 to 10^38"), ({"scale": float("inf")}, "scale=inf is not from 0 to 10^38"),
           ({"q": half(2, 2, 4, 64), "k": half(3, 2, 4, 64)}, "q, k and v differ in B or D"),
           ({"k": half(1, 2, 4, 64).bfloat16()}, "q, k and v have different dtypes"),
           ({"k": half(1, 2, 4, 64).to(E4M3), "v": half(1, 2, 4, 64).to(E4M3)}, "q, k and v have different dtypes"),
           ({"q": half(1, 2, 4, 128)}, "q, k and v differ in B or D"), ({"v": half(1, 2, 4, 128)}, "q, k and v differ in B or D"),
           ({"all": half(1, 2, 4, 64).float()}, "there is no line for Float"), ({"all": half(1, 2, 4, 76)}, "there is no line for D=76"),
           ({"all": half(1, 2, 4, 264)}, "there is no line for D=264"), ({"all": half(1, 2, 4, 8)}, ON_CPU),
           ({"v": half(1, 2, 5, 64)}, "k and v have different shapes"),
           ({"q": half(1, 3, 4, 64)}, "the heads of q are no multiple of those of k"),
           ({"q": half(1, 1, 1, 64).expand(1, 2, 10**9 + 1, 64)}, "a dimension is over 10^9"),
           ({"k": half(1, 2, 64, 4).mT, "grad": True}, ON_CPU),
           ({"k": half(1, 2, 4, 65)[..., 1:], "grad": True}, "gradients are needed, and " + BAD_ROWS),
           ({"grad": True}, ON_CPU), ({}, ON_CPU),
           ({"k": half(1, 2, 4, 65)[..., 1:]}, ON_CPU), ({"k": half(1, 1, 4, 64).expand(1, 2, 4, 64)}, ON_CPU)]


@pytest.mark.parametrize("options, why", WHY_NOT, ids=[f"{i}:{why[:40]}" for i, (_, why) in enumerate(WHY_NOT)])
def test_why_not(glue, options, why):
    """Every reason except PyTorch's choice and a failed build, which need a GPU. The device is checked last, so the others appear."""
    options = dict(options)
    plain = options.pop("all", half(1, 2, 4, 64))
    q, k, v = (options.pop(name, plain) for name in "qkv")
    if options.pop("grad", False):
        q = q.clone().requires_grad_()
    assert sdpa.why_not(q, k, v, **options) == why
    with torch.no_grad():
        assert "gradients" not in sdpa.why_not(q, k, v, **options)


@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors)")
def test_why_not_of_other_layouts(glue):
    x, mask = half(1, 2, 4, 64), torch.ones(4, 4)
    sparse = [mask.to_sparse(), mask.to_sparse_csr(), half(4, 64).to_sparse()]
    nested = [torch.nested.nested_tensor([half(3, 2, 64)], layout=layout) for layout in (torch.strided, torch.jagged)]
    for kind, others in ("sparse", sparse), ("nested", nested):
        for other in others:
            why = f"is a {kind} tensor, which PyTorch takes apart before a kernel is chosen"
            assert sdpa.why_not(x, x, x, attn_mask=other) == f"attn_mask {why}" and sdpa.why_not(x, other, x) == f"k {why}"


def test_why_not_of_a_subclass(monkeypatch):
    """The operator does not support tensor subclasses such as DTensor."""
    def unknown(*_):
        raise NotImplementedError("no rule for sdpa::why_not\nmore")
    unknown._schema = SimpleNamespace(arguments=[])
    monkeypatch.setattr(sdpa, "glue", lambda: None)
    monkeypatch.setattr(sdpa.first_call, "library", None)  # as pytorch.cpp leaves it
    monkeypatch.setattr(torch.ops.sdpa, "why_not", SimpleNamespace(default=unknown), raising=False)
    assert sdpa.why_not(*[half(1, 2, 4, 64)] * 3) == "PyTorch says: no rule for sdpa::why_not"


@pytest.mark.parametrize("D", (64, 80, 72, 272))
def test_sizes_of_k_and_v_of_8_bits(glue, D):
    """With a 16-bit q, attention() accepts each D that is a multiple of 16; the next check needs a GPU."""
    q, k = half(1, 2, 4, D), half(1, 2, 4, D).to(E4M3)
    with pytest.raises(RuntimeError, match="CUDA" if D <= 256 and D % 16 == 0 else f"^sdpa.attention: there is no line for D={D}"):
        sdpa.OPERATOR.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), q, k, k, 0, -1, -1, 0, None, 0.0, *[None] * 8, 0)


def layouts(B, H, S, D, make):
    """Views of this shape into contiguous tensors: [B,S,H,D], packed QKV, expanded, with gaps, misaligned, odd strides."""
    yield make(B, H, S, D)
    yield make(B, S, H, D).transpose(1, 2)
    yield make(S, B, H, D).permute(1, 2, 0, 3)
    yield make(B, S, 3, H, D).permute(2, 0, 3, 1, 4)[1]
    yield make(H, B, S, D).transpose(0, 1)
    yield make(B, 1, S, D).expand(B, H, S, D)
    yield make(1, H, S, D).expand(B, H, S, D)
    yield make(1, S, 1, D).transpose(1, 2).expand(B, H, S, D)
    yield make(B, H, 1, D).expand(B, H, S, D)
    yield make(B, S, H, D + 8).transpose(1, 2)[..., :D]
    yield make(B, S, H, D + 1).transpose(1, 2)[..., 1:]
    yield make(B, H, S, D + 1)[..., :D]
    yield make(B * H * S * D + 1)[1:].view(B, S, H, D).transpose(1, 2)
    yield make(B, H, 2 * S, D)[:, :, ::2]


SHAPES = ((2, 4, 10, 64), (1, 4, 10, 64), (2, 1, 10, 64), (2, 4, 1, 64), (1, 1, 1, 64))


def entry_points():
    """Yields (name, function, arguments of a call on meta tensors)."""
    q, k = on_meta(2, 8, 100, 64), on_meta(2, 4, 100, 64)
    rows, starts = q[0].transpose(0, 1), torch.empty(3, dtype=torch.int32, device="meta")
    caches = dict(q=rows[None], k_cache=rows[None], v_cache=rows[None], k=rows[None, :1], v=rows[None, :1], cache_seqlens=starts[:1])
    partials = torch.empty(3, 2, 100, 8, 64, device="meta")
    for name, own in {"attention": {}, "block_mask": dict(mask_mod="q < k"), "why_not": {}}.items():
        yield name, getattr(sdpa, name), dict(q=q, k=k, v=k) | own
    for name, own in {"flash_attn_func": dict(q=rows[None], k=rows[None], v=rows[None]), "flash_attn_qkvpacked_func": dict(
            qkv=rows[None].repeat(1, 1, 2, 1), num_heads_q=8),
                      "flash_attn_varlen_func": dict(q=rows, k=rows, v=rows, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=9, max_seqlen_k=9),
                      "flash_attn_with_kvcache": caches, "flash_attn_combine": dict(out_partial=partials, lse_partial=partials[..., 0])}.items():
        yield name, getattr(flash_attn_interface, name), own


@pytest.mark.parametrize("entry", entry_points(), ids=lambda entry: entry[0])
def test_arguments_of_other_types(glue, entry):
    """Whatever an argument is, a call succeeds or says in one line which argument is wrong. No argument of the signature is left out."""
    name, function, plain = entry
    function(**plain)
    names = [x.name for x in inspect.signature(function).parameters.values() if x.kind != x.VAR_KEYWORD]
    names += [x for x in inspect.signature(sdpa.attention).parameters if name == "block_mask" and x not in (*names, "block_mask")]
    jagged = torch.nested.nested_tensor([torch.empty(4, S, 64, device="meta") for S in (3, 5)], layout=torch.jagged)
    sparse = torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.long, device="meta"), torch.zeros(1, device="meta"), (8, 8), device="meta")
    refused, flags = Counter(), {"return_lse", "return_attn_probs", "return_softmax_lse", "deterministic", "rotary_interleaved"}
    for argument in names:
        for bad in (object(), "x", b"x", 3.5, 1j, [1], (1,), {}, {1}, torch.half, lambda: 0, 10**30, torch.empty(2, dtype=torch.half, device="meta"),
                    (None, "x"), (1.5, 1), (1, 2, 3), (1, 2, []), SimpleNamespace(shape=(1, 1, 1, 64)), jagged, sparse):
            if isinstance(bad, torch.Tensor) and argument in flags:
                continue  # Python's own error for the truth of a tensor
            try:
                function(**plain | {argument: bad})
            except (TypeError, ValueError, RuntimeError) as error:
                words = str(error)
                assert re.match(rf"(sdpa\.\w+|flash_attn_\w+): ", words) and ("\n" not in words or bad is sparse), (argument, bad, words)
                refused[argument] += 1
    assert {*names} - refused.keys() <= {*flags, "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "max_seqlen_q"}


def test_strides_that_pytorch_promises():
    """O has the strides of empty_like(q), and so do both operators' meta functions and the fake kernel of attention()'s operator."""
    for shape in SHAPES:
        for q in layouts(*shape, lambda *sizes: torch.empty(sizes, dtype=torch.half)):
            want = torch.empty_like(q).stride()
            with FakeTensorMode():
                fake = torch.empty_strided(q.shape, q.stride(), device="cuda", dtype=torch.half)
                outs = (torch.ops.aten._scaled_dot_product_cudnn_attention(fake, fake, fake, None, True)[0],
                        torch.ops.aten._scaled_dot_product_flash_attention(fake, fake, fake)[0])
                if all(step % 8 == 0 for step in q.stride()[:3]):  # else attention() refuses it
                    outs += sdpa.OPERATOR(fake, fake, fake, 0, -1, -1, 0, None, 0.0, *[None] * 8, 0)[:1]
            large = [i for i, size in enumerate(shape) if size > 1]
            for out in outs:
                assert [out.stride()[i] for i in large] == [want[i] for i in large], (q.shape, q.stride())


def test_the_fake_kernel(glue):
    with FakeTensorMode():
        q = torch.empty(2, 100, 8, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        k = torch.empty(2, 4, 300, 128, device="cuda", dtype=torch.bfloat16)
        out, lse = sdpa.attention(q, k, k, causal="br", return_lse=True)
        assert (out.shape, out.stride(), out.dtype) == (q.shape, q.stride(), q.dtype)
        assert lse.shape == (2, 8, 100) and lse.dtype == torch.float32
        assert sdpa.attention(q, k, k, bias=torch.empty(100, 300, device="cuda", dtype=torch.bool)).stride() == q.stride()
        out, lse = sdpa.attention(*(x.to("meta") for x in (q, k, k)), return_lse=True)
        assert out.is_meta and (out.shape, out.stride(), lse.shape) == (q.shape, q.stride(), q.shape[:3])
        e4m3 = q.to(torch.float8_e4m3fn)
        assert sdpa.attention(e4m3, e4m3, e4m3).dtype == torch.float16
        for dtype in HALVES:  # autocast's type, of float32 and of 16 bits, and of nothing else; torch.autocast() wants a GPU
            torch.set_autocast_enabled("cuda", True), torch.set_autocast_dtype("cuda", dtype)
            got = [sdpa.attention(*x).dtype for x in ((q.float(), k.float(), k), (q, k, k), (e4m3, e4m3, e4m3))]
            torch.set_autocast_enabled("cuda", False), torch.clear_autocast_cache()
            assert got == [dtype, dtype, torch.float16]


def test_flops():
    """Counts each pair of a query and a key of its sequence, as torch.utils.flop_counter does for PyTorch's own operators."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        q, pages = (torch.empty(*shape, device="cuda", dtype=torch.half) for shape in ((2, 8, 100, 128), (50, 4, 16, 128)))
        k, v = (torch.empty(2, 4, 300, D, device="cuda", dtype=torch.half) for D in (128, 64))
        starts, table = (torch.empty(*shape, device="cuda", dtype=torch.int32) for shape in ((6,), (2, 7)))
        o = q[..., :64]
        for call, count in ((lambda: sdpa.attention(q, k, v, causal="br"), 2 * 8 * 100 * 300 * 2 * (128 + 64)),
                            (lambda: sdpa.attention(q[:1], q[:1], q[:1], q_starts=starts, k_starts=starts), 5 * 8 * 20 * 20 * 2 * 256),
                            (lambda: sdpa.attention(q, pages, pages, k_lengths=starts[:2], page_table=table), 2 * 8 * 100 * 112 * 2 * 256),
                            (lambda: sdpa.attention(q[:0], k[:0], v[:0]), 0),
                            (lambda: torch.ops.sdpa.attention_backward(o, q, k, v, o, o[..., 0].float(), 0, -1, -1, 0, None),
                             2 * 8 * 100 * 300 * 2 * (3 * 128 + 2 * 64)),
                            (lambda: torch.ops.sdpa.attention_backward(q[:1], q[:1], q[:1], q[:1], q[:1], q[:1, ..., 0].float(), 0, -1, -1, 0, None,
                                                                       q_starts=starts, k_starts=starts), 5 * 8 * 20 * 20 * 2 * 5 * 128)):
            before = counter.get_total_flops()
            call()
            assert counter.get_total_flops() - before == count
    x = torch.empty(2, 4, 100, 64, dtype=torch.half, device="meta")
    for run, ours in ((lambda: torch.ops.aten._scaled_dot_product_flash_attention(x, x, x), sdpa.flops(*[x.shape] * 3)),
                      (lambda: torch.ops.aten._scaled_dot_product_flash_attention_backward(
                          x, x, x, x, x, x[..., 0].float(), None, None, 100, 100, 0.0, False, torch.empty(2), torch.empty(0)),
                       sdpa.flops_backward(*[x.shape] * 4))):
        with FlopCounterMode(display=False) as counter:
            run()
        assert counter.get_total_flops() == ours


def test_refusals_of_a_page_table():
    """test_fake_tensors_refuse_what_kernels_refuse compares these sentences with those of C++."""
    with FakeTensorMode():
        q, pages, none = (torch.empty(*shape, 64, device="cuda", dtype=torch.half) for shape in ((2, 4, 6), (5, 2, 16), (5, 2, 0)))
        table, wide, large, starts = (torch.empty(*shape, device="cuda", dtype=torch.int32) for shape in ((2, 3), (2, 6), (2, 10**8), (3,)))
        shape = r"page_table is not an int32 tensor \[2,pages of a sequence\] with contiguous rows on q's device"
        for words, k, table, more in (("page_table and k_starts exclude each other", pages, table, dict(k_starts=starts)),
                                      ("the pages of k and v have 0 keys", none, table, {}),
                                      (shape, pages, table.long(), {}), (shape, pages, table[:1], {}), (shape, pages, wide[:, ::2], {}),
                                      ("a row of page_table has pages for over 10\\^9 keys", pages, large, {})):
            with pytest.raises(RuntimeError, match=f"^sdpa.attention: {words}$"):
                sdpa.attention(q, k, k, page_table=table, **more)


BIASES = [(5, 7), (7,), (1, 1), (5, 1), (3, 5, 7), (3, 1, 7), (2, 1, 1, 7), (1, 3, 5, 1), (2, 3, 5, 7)]  # of [2,3,5,7]


@pytest.mark.parametrize("dtype", (torch.bool, torch.half, torch.float, torch.double, torch.bfloat16), ids=str)
def test_what_kernels_read_of_a_bias(glue, dtype):
    """Kernels get all values in q's type, in float32 or as bytes, with contiguous keys: as a view if possible, and never more memory than
    the bias has."""
    q, kept = half(2, 3, 5, 64), dtype if dtype in (torch.bool, torch.half) else torch.float
    for shape in BIASES:
        x = (torch.randn(shape) * 3).to(dtype)
        transposed = x.mT.contiguous().mT if len(shape) > 1 else x
        for given in (x, x.expand(2, 3, 5, x.shape[-1]), transposed, torch.stack([x, x], -1)[..., 0]):
            got = torch.ops.sdpa.bias_of(given, q, 7, False)
            assert got.dtype == kept and got.stride(3) == 1 and got.shape[3] == 7
            assert torch.equal(got.expand(2, 3, 5, 7), given.to(kept).expand(2, 3, 5, 7)), shape
            assert got.numel() <= x.numel() * (7 if shape[-1] == 1 else 1)
            as_it_is = kept == dtype and shape[-1] == 7 and given.stride(-1) == 1
            assert (got.data_ptr() == given.data_ptr()) == as_it_is, (shape, given.stride())
            cudnns = torch.ops.sdpa.bias_of(given, q, 7, True)
            want = torch.where(got, 0.0, -65504.0) if dtype == torch.bool else got.half()
            assert cudnns.dtype == q.dtype and torch.equal(cudnns.float(), want.float())


class Seen(TorchDispatchMode):
    """The shapes of q and k, how far apart the elements of their rows are, and the mask, of PyTorch's math kernel."""
    rows = ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        of = {"mul": "q", "transpose": "k"}.get(name)
        if of and of not in self.__dict__:
            self.__dict__[of], self.rows = tuple(args[0].shape), (*self.rows, args[0].stride(-1))
        if name in ("add", "add_", "where"):
            self.__dict__.setdefault("mask", args[0] if name == "where" else args[1])
        return func(*args, **(kwargs or {}))


def test_what_pytorch_is_given(glue):
    """After activate(), F.scaled_dot_product_attention passes GPU tensors with three dimensions, and any mask, to PyTorch in the form its
    kernels accept; O keeps its shape. CPU tensors are passed unchanged."""
    cases = [((2, 3, 5, 64), (2, 3, 7, 64), None), ((3, 5, 64), (3, 7, 64), None), ((3, 5, 64), (2, 3, 7, 64), (5, 7)),
             ((2, 3, 5, 64), (1, 3, 7, 64), (7,)), ((3, 5, 64), (3, 7, 64), (3, 5, 1)),
             *(((2, 3, 5, 64), (2, 3, 7, 64), shape) for shape in BIASES)]
    x = torch.zeros(3, 5, 64)
    with Seen() as without, sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(x, x, x)
    glue.sdpa_torch_activate(True)
    try:
        with Seen() as seen, sdpa_kernel(SDPBackend.MATH):
            assert F.scaled_dot_product_attention(x, x, x).shape == x.shape and seen.q == without.q
        for q_shape, k_shape, mask_shape in cases:
            for dtype, transposed in itertools.product((torch.half, torch.bool), (False, True)):
                with FakeTensorMode(), sdpa_kernel(SDPBackend.MATH):
                    q, k = (torch.empty(x, device="cuda", dtype=torch.half) for x in (q_shape, k_shape))
                    mask = mask_shape and torch.empty(mask_shape, device="cuda", dtype=dtype)
                    if transposed:
                        q, k = (x.mT.contiguous().mT for x in (q, k))
                        mask = mask.mT.contiguous().mT if mask_shape and len(mask_shape) > 1 else mask
                    with Seen() as seen:
                        out = F.scaled_dot_product_attention(q, k, k, mask)
                B = max((1, *q_shape)[-4], (1, *k_shape)[-4])
                assert out.shape == (B, *q_shape[-3:])[len(q_shape) == len(k_shape) == 3:]
                assert seen.q == (B, *q_shape[-3:]) and seen.k == (B, *k_shape[-3:]) and seen.rows == (1, 1)
                if mask_shape:
                    assert seen.mask.shape == (*(1,) * (4 - len(mask_shape)), *mask_shape[:-1], 7) and seen.mask.stride(3) == 1
                    assert seen.mask.dtype == dtype
    finally:
        glue.sdpa_torch_activate(False)


def test_no_graph_break():
    """attention() is one node of a graph; its options are constants."""
    nodes = []
    with FakeTensorMode():
        q = torch.empty(2, 8, 100, 128, device="cuda", dtype=torch.bfloat16)
        lengths = torch.empty(2, device="cuda", dtype=torch.int32)
        mods = dict(score_mod="s - x0[h]", mask_mod="i0[q] == i0[k]", args=[torch.empty(8, device="cuda"), lengths])
        made_for = "\n".join(("score_mod='s - x0[h]'", "mask_mod='i0[q] == i0[k]'", "device=0", "dtype=bfloat16", "options=0", "B=2", "Hq=8", "Hkv=8",
                              "Sq=100", "Sk=100", "D=128", "Dv=128", "causal=0", "window_left=-1", "window_right=-1", "window_alignment=0",
                              "batch_invariant=0", "bias_keys=0", "bias of each batch=0", "bias of each head=0"))
        for options, want in (({}, (0, -1, -1, 0, None)), ({"causal": "tl", "window": (10, None, "br"), "scale": 0.0}, (2, 10, -1, 1, 0.0)),
                              ({"causal": "br", "k_lengths": lengths}, (1, -1, -1, 0, None)),
                              ({"bias": torch.empty(100, 9, device="cuda"), "bias_keys": 9}, (0, -1, -1, 0, None)),
                              (mods | {"block_mask": sdpa.BlockMask(torch.empty(9, device="cuda", dtype=torch.uint8), made_for)},
                               (0, -1, -1, 0, None))):
            torch.compiler.reset()
            torch.compile(lambda q: sdpa.attention(q, q, q, **options), fullgraph=True,
                          backend=lambda graph, _: nodes.append([x for x in graph.graph.nodes if x.op == "call_function"]) or graph)(q)
            assert nodes[-1][0].target == sdpa.OPERATOR and nodes[-1][0].args[3:8] == want and len(nodes[-1]) == 2
        assert nodes[-1][0].args[23:25] == (mods["score_mod"], mods["mask_mod"]) and nodes[-1][0].args[-1] == made_for
        other_map = sdpa.BlockMask(torch.empty(9, device="cuda", dtype=torch.uint8), made_for.replace("causal=0", "causal=1"))
        torch.compiler.reset()
        with pytest.raises(RuntimeError, match="block_mask was made for causal=1, and this call has causal=0"):
            torch.compile(lambda q: sdpa.attention(q, q, q, **mods, block_mask=other_map), fullgraph=True, backend="eager")(q)
        assert [x is None for x in nodes[-1][0].args[25:32]] == [False, True, True, True, False, True, False]
        torch.compiler.reset()
        with pytest.raises(RuntimeError, match="sdpa.block_mask: it cannot be compiled; call it before the compiled"):
            torch.compile(lambda q: sdpa.block_mask(q, q, q, mask_mod="q < k").tiles, fullgraph=True, backend="eager")(q)
        for bad in dict(mods, score_mod="s + system(1)"), dict(mods, args=mods["args"][:1]), dict(mods, mask_mod="i0[q] == i1[k]"):
            torch.compiler.reset()
            with pytest.raises(RuntimeError, match="sdpa.attention: (score_mod: 'system' at|args has no i[01]; )"):
                torch.compile(lambda q: sdpa.attention(q, q, q, **bad), fullgraph=True, backend="eager")(q)  # noqa: B023
        # Numbers that change from call to call: two graphs, one for the first and one for all.
        for call in (lambda q, n: sdpa.attention(q, q, q, "br", k_lengths=lengths, most_keys=n), lambda q, n: sdpa.attention(q, q, q, "br", (n, 0)),
                     lambda q, n: sdpa.attention(q, q, q, "br", (q.shape[2] // n, None)),
                     lambda q, n: sdpa.attention(q, q, q, bias=torch.empty(100, n, device="cuda"), bias_keys=n)):
            torch.compiler.reset(), nodes.clear()
            compiled = torch.compile(call, fullgraph=True, backend=lambda graph, _: nodes.append(graph) or graph)
            for n in range(9, 19):
                compiled(q, n)
            assert len(nodes) <= 2


def by_operator(q, k, v, mask=0, scale=None, **options):
    """attention() without its check that q is on a GPU."""
    names = "q_descale", "k_descale", "v_descale", "sinks", "k_lengths", "q_starts", "k_starts", "page_table"
    bias = options.get("bias"), options.get("bias_keys", 0)
    return sdpa.OPERATOR(q, k, v, mask, -1, -1, 0, scale, 0.0, *map(options.get, names), 0, *bias, options.get("q_lengths"),
                         options.get("batch_invariant", False), False, options.get("score_mod", ""), options.get("mask_mod", ""),
                         *map(options.get, sdpa.ARRAYS), k_firsts=options.get("k_firsts"))


@contextlib.contextmanager
def operators_on_cpu(calls=None):
    """Stand-ins for the operators' kernels."""
    library = torch.library.Library("sdpa", "IMPL")

    def weights(q, k, mask, scale, bias):
        S = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale) + (0 if bias is None else bias)
        return S if not mask else S.masked_fill(~visible(q.shape[2], k.shape[2], mask, (None, None), "cpu"), -torch.inf)

    def forward(q, k, v, mask, left, right, by, scale, cap, *rest):
        if calls is not None:
            calls.append((q, k, v, *rest))
        k, v = (x[:q.shape[0]].repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))  # of pages, any
        S = weights(q, k, [None, "br", "tl"][mask], scale, rest[9] if len(rest) > 9 else None)
        return S.softmax(-1) @ v, S.logsumexp(-1).float()

    def backward(grad, q, k, v, o, lse, mask, left, right, by, scale, bias=None, without="", cap=0.0, sinks=None, grad_lse=None, choice="", *more):
        if without:
            raise NotImplementedError("sdpa.attention: " + without)
        Hkv, grad = k.shape[1], torch.zeros_like(o) if grad is None else grad
        k, v = (x.repeat_interleave(q.shape[1] // Hkv, 1) for x in (k, v))
        P, dP = weights(q, k, [None, "br", "tl"][mask], scale, bias).softmax(-1), grad @ v.mT
        rows = (grad * o).sum(-1, keepdim=True) - (0 if grad_lse is None else grad_lse[..., None])
        dS = P * (dP - rows)
        to_bias = bool(more) and more[-1] is True
        of_bias = dS.sum_to_size(bias.shape) if to_bias else torch.zeros(0)
        dS = dS * (q.shape[3] ** -0.5 if scale is None else scale)
        of_sinks = torch.zeros(0) if sinks is None else (rows * -torch.exp(sinks[:, None] - lse)[..., None]).sum((0, 2, 3)).float()
        return dS @ k, *(x.unflatten(1, (Hkv, -1)).sum(2) for x in (dS.mT @ q, P.mT @ grad)), of_sinks, of_bias
    library.impl("attention", forward, "CPU")
    library.impl("attention_backward", backward, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa, "troubles", lambda call: [])  # the stand-ins take float64
        yield
    library._destroy()


@pytest.fixture
def on_cpu(glue):
    with operators_on_cpu():
        yield


OF_TWO_DEVICES = """
import contextlib, os, sys
sys.path[:0] = ["tests", "bindings"]
import torch
import torch.distributed as dist
import pytorch as sdpa, test_pytorch as here
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from dtensor_sharding import DIMENSIONS
sdpa.glue()
other = os.fork()
rank = int(other == 0)
dist.init_process_group("gloo", init_method="file://" + os.environ["MEETING"], rank=rank, world_size=2)
mesh, calls = init_device_mesh("cpu", (2,)), []
names = [argument.name for argument in sdpa.OPERATOR._schema.arguments]
del names[3:9]  # numbers, which calls do not have
place = lambda x, *how: distribute_tensor(x, mesh, how)
torch.manual_seed(0)
whole, batch, heads = Replicate(), Shard(0), Shard(1)
with here.operators_on_cpu(calls):
    one = torch.randn(2, 4, 5, 64, dtype=torch.double)
    with contextlib.suppress(ValueError):  # it is on no GPU
        sdpa.attention(*[place(one, whole)] * 3)
    for Hkv, split in ((4, whole), (4, batch), (4, heads), (2, heads), (2, batch), (1, heads), (4, Shard(2)), (3, heads)):
        Hq = 6 if Hkv == 3 else 4
        shapes = (2, Hq, 5, 64), (2, Hkv, 7, 64), (2, Hkv, 7, 64)
        plain = [torch.randn(S, dtype=torch.double, requires_grad=True) for S in shapes]
        of_k = whole if Hkv == 1 and split == heads else split
        tensors = [place(x.detach(), how).requires_grad_() for x, how in zip(plain, (split, of_k, of_k))]
        # Every optional tensor with a dimension of batches or heads; these dimensions are marked by letters.
        sizes = dict(B=2, H=Hq, K=Hkv)
        dims = dict(sinks="H", k_lengths="B", q_lengths="B", k_firsts="B", q_descale="BH", k_descale="1K", v_descale="BK", bias="BH57",
                    page_table="B3")
        assert dims.keys() == DIMENSIONS.keys()
        by_heads, by_batch = split == heads and Hkv != 3, split == batch
        for left_out in ["page_table"], ["k_lengths", "q_lengths"]:
            extra = {name: 9 * torch.randn([sizes.get(dim) or int(dim) for dim in of_x]) for name, of_x in dims.items() if name not in left_out}
            extra |= {name: x.int() for name, x in extra.items() if not {"H", "K"} & set(dims[name])}  # lengths and pages
            calls.clear()
            with torch.no_grad():
                here.by_operator(*tensors, 1, **{name: place(x, whole) for name, x in extra.items()})
            given = dict(zip(names, calls[0]))
            q, k = given["q"], given["k"]
            assert q.shape[:2] == (1 if by_batch else 2, 2 if by_heads else Hq), (Hkv, split, q.shape)
            assert k.shape[:2] == (1 if by_batch and "page_table" in left_out else 2, max(Hkv // 2, 1) if by_heads else Hkv)
            for name, x in extra.items():
                for at, dim in enumerate(dims[name]):
                    if dim == "B" and by_batch or dim in "HK" and by_heads and x.shape[at] > 1:
                        x = x.chunk(2, at)[rank]
                assert torch.equal(given[name], x), (Hkv, split, name)
        with CommDebugMode() as traffic:
            out, lse = here.by_operator(*tensors, 1)
        assert traffic.get_total_counts() == 0 or split == Shard(2) or Hkv == 3, (Hkv, split)
        want, want_lse = here.by_operator(*plain, 1)
        assert torch.allclose(out.full_tensor(), want) and torch.allclose(lse.full_tensor(), want_lse)
        grad = torch.randn(want.shape, dtype=torch.double)
        got = torch.autograd.grad(out, tensors, place(grad, split))
        for a, b in zip(got, torch.autograd.grad(want, plain, grad)):
            assert torch.allclose(a.full_tensor(), b), (Hkv, split)
    q = place(one, heads)
    for text, is_split in (("s - x0[h]", False), ("s - x0[k]", True)):
        calls.clear()
        with torch.no_grad():
            here.by_operator(q, q, q, score_mod=text, x0=place(torch.ones(9), whole))
        assert calls[0][0].shape[1] == (2 if is_split else 4), text
dist.barrier()
dist.destroy_process_group()
# Skips destructors: a thread of PyTorch that still runs in one of them aborts the process.
os._exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) if other else 0)
"""


def test_dtensors(glue, tmp_path):
    """With two devices each computes its batches or heads without communication, and with their options. Sizes that are not divisible are
    gathered first, as are heads if an expression uses them."""
    done = subprocess.run([sys.executable, "-c", OF_TWO_DEVICES], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=300, env=os.environ | dict(MEETING=str(tmp_path / "meeting")))
    assert done.returncode == 0, done.stdout


def test_what_dtensors_are_sharded_over():
    """Not over the batch with packed sequences or an expression of b, and not over the heads with an expression of h."""
    from dtensor_sharding import Replicate, Shard, shardings
    tensor = lambda *shape: SimpleNamespace(shape=shape, ndim=len(shape), mesh=SimpleNamespace(shape=(2,)), placements=[Replicate()])  # noqa: E731
    own = dict(q=tensor(2, 4, 5, 64), k=tensor(2, 4, 7, 64), v=tensor(2, 4, 7, 64), lse=tensor(2, 4, 5))
    starts = tensor(3)
    for more, ways in (({}, "none batch heads"), ({"q_starts": starts}, "none heads"), ({"k_starts": starts}, "none heads"),
                       ({"k_lengths": tensor(2)}, "none batch heads"), ({"score_mod": "s + b"}, "none heads"),
                       ({"mask_mod": "i0[h] < k"}, "none batch"), ({"score_mod": "s * h", "mask_mod": "b < k"}, "none")):
        places = [outputs[0] for outputs, _ in shardings(None, ("q", "lse"), own | more)]
        assert places == [dict(none=Replicate(), batch=Shard(0), heads=Shard(1))[way] for way in ways.split()], more


def test_autograd_on_stand_ins(on_cpu):
    make = lambda *S: [torch.randn(2, 4, s, 64, dtype=torch.double, requires_grad=True) for s in S]  # noqa: E731
    q, k, v = make(5, 7, 7)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda *x: by_operator(*x, mask=1, scale=0.3)[0].sin(), backend="aot_eager", fullgraph=True, dynamic=True)
    again = lambda *x: torch.utils.checkpoint.checkpoint(lambda *x: by_operator(*x, 1, 0.3)[0].sin(), *x, use_reentrant=False)  # noqa: E731
    for run in (lambda *x: by_operator(*x, 1, 0.3)[0].sin(), again, compiled, compiled):
        out = run(q, k, v)
        want = F.scaled_dot_product_attention(q, k, v, visible(q.shape[2], k.shape[2], "br", (None, None), "cpu"), scale=0.3).sin()
        grad = torch.randn_like(out)
        for a, b in zip(torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(want, (q, k, v), grad)):
            assert torch.allclose(a, b)
        if run is compiled:
            q, k, v = make(6, 9, 9)  # the same graph takes other sizes
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    bias = torch.randn(4, 1, 9, dtype=torch.double, requires_grad=True)
    own = [x.detach() for x in (q, k, v)]
    for tensors, b in (((q, k, v), bias.detach()), ((q, k, v), bias), (own, bias)):  # also of a bias alone
        inputs = [x for x in (*tensors, b) if x.requires_grad]
        want = torch.autograd.grad(F.scaled_dot_product_attention(*tensors, b).square().sum(), inputs)
        call = lambda *x: by_operator(*x[:3], bias=x[3])[0].square().sum()  # noqa: E731
        for run in call, torch.compile(call, backend="aot_eager", fullgraph=True):
            for x, y in zip(torch.autograd.grad(run(*tensors, b), inputs), want, strict=True):
                assert x.shape == y.shape and torch.allclose(x, y)
    for mask, scale in ((None, None), ("br", 0.3), ("tl", 0.0)):  # of LSE too, alone and beside O's, also compiled
        seen = torch.ones(6, 9, dtype=torch.bool) if not mask else visible(6, 9, mask, (None, None), "cpu")
        S = (q @ k.mT * (1 / 8 if scale is None else scale)).masked_fill(~seen, -torch.inf)
        want = S.softmax(-1) @ v, S.logsumexp(-1)
        call = lambda *x: by_operator(*x, sdpa.MASKS[mask], scale)  # noqa: E731, B023
        for run in call, torch.compile(call, backend="aot_eager", fullgraph=True):
            for weigh in (lambda out, lse: lse.sin().sum(), lambda out, lse: (out.sin().sum() + lse.square().sum()), lambda out, lse: out.sum()):
                got = torch.autograd.grad(weigh(*run(q, k, v)), (q, k, v), allow_unused=True)
                for a, b in zip(got, torch.autograd.grad(weigh(*want), (q, k, v), retain_graph=True, allow_unused=True)):
                    assert torch.allclose(*(q.new_zeros(()) if x is None else x for x in (a, b)), atol=1e-5), (mask, scale)
    out, lse = by_operator(q, k, v)
    with pytest.raises(RuntimeError, match="derivative for sdpa::attention_backward is not implemented"):
        torch.autograd.grad(out.sum(), q, create_graph=True)[0].sum().backward()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        by_operator(torch.autograd.forward_ad.make_dual(q.detach(), q.detach()), k, v)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        a, = torch.autograd.grad(by_operator(q, k, v)[0].sum(), q)
    assert torch.allclose(a, torch.autograd.grad(by_operator(q, k, v)[0].sum(), q)[0])
    with torch.no_grad():
        assert not by_operator(q, k, v)[0].requires_grad
    assert not by_operator(*(x.detach() for x in (q, k, v)))[0].requires_grad
    none, table = "^sdpa.attention: no backward for e4m3, pages$", torch.zeros(2, 1, dtype=torch.int32)
    for output in range(2):
        with pytest.raises(NotImplementedError, match=none):
            by_operator(q, k, v, page_table=table)[output].sum().backward()
    torch.compiler.reset()  # a graph that is compiled ahead runs without its backward
    out, _ = torch.compile(lambda *x: by_operator(*x[:3], page_table=x[3]), backend="aot_eager", fullgraph=True)(q, k, v, table)
    with pytest.raises(NotImplementedError, match=none):
        out.sum().backward()
    with pytest.raises(NotImplementedError, match=none):  # of another tensor alone
        by_operator(*(x.detach() for x in (q, k, v)), k_descale=torch.zeros(2, 4, requires_grad=True))[0].sum().backward()
    learned = dict(score_mod="s + x3[k]", x3=torch.zeros(9, requires_grad=True))
    for run in by_operator, torch.compile(by_operator, backend="aot_eager", fullgraph=True):
        with pytest.raises(RuntimeError, match="sdpa.attention: no gradient of args; detach them"):
            run(*(x.detach() for x in (q, k, v)), **learned)
    with torch.no_grad():
        by_operator(q, k, v, **learned)


# ---- packed sequences and 8 bits: PyTorch's operators, with stand-ins for ours ----

FLASH, CUDNN = torch.ops.aten._flash_attention_forward, torch.ops.aten._cudnn_attention_forward
NEWER_OPERATORS = [name for name in ("_flash_attention_forward_no_dropout_inplace",
                                     "_cudnn_attention_forward_no_dropout_inplace") if hasattr(torch.ops.aten, name)]
HAS_TABLES, CUDNN_HAS_TABLES = ("block_table" in str(operator.default._schema) for operator in (FLASH, CUDNN))
OF_GROUPS = dict(enable_gqa=True) if HAS_TABLES else {}
NEWER_OPERATORS += ["_cudnn_attention_forward"] * CUDNN_HAS_TABLES


def of_sequences(q, k, v, q_starts, k_starts, used=None, scale=None, causal=None, window=(None, None), factors=None):
    """O [rows,H,D] and LSE [H,rows] in double of packed q, k and v, a sequence at a time."""
    outs, lses = [], []
    for b in range(len(q_starts) - 1):
        own = [x[int(starts[b]):int(starts[b + 1])] for x, starts in ((q, q_starts), (k, k_starts), (v, k_starts))]
        own = own if used is None else [own[0], *(x[:int(used[b])] for x in own[1:])]
        own = [x.double().transpose(0, 1)[None] for x in own]
        if factors is not None:  # one a key head
            own = [x * f[b].double()[:, None, None].repeat_interleave(x.shape[1] // f.shape[1], 0)
                   for x, f in zip(own, factors)]
        mask = visible(own[0].shape[2], own[1].shape[2], causal, window, q.device)
        out, lse = reference(*own, mask, scale)
        outs.append(out[0].transpose(0, 1)), lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def flash_backward_on_cpu(grad, q, k, v, out, lse, q_starts, k_starts, max_q, max_k, dropout, causal, *_, scale=None,
                          window_size_left=None, window_size_right=None):
    """FlashAttention-2's backward, from O and an LSE of [H,rows]."""
    assert lse.shape == (q.shape[1], len(q)) and lse.dtype == torch.float32 and lse.is_contiguous()
    assert out.shape == grad.shape == q.shape
    scale, grads = q.shape[2] ** -0.5 if scale is None else scale, [torch.zeros_like(x) for x in (q, k, v)]
    window = [None if n is None or n < 0 else n for n in (window_size_left, window_size_right)]
    for (a, b), (c, d) in zip(itertools.pairwise(q_starts.tolist()), itertools.pairwise(k_starts.tolist())):
        Q, dO, O, K, V = (x.double().transpose(0, 1) for x in (q[a:b], grad[a:b], out[a:b], k[c:d], v[c:d]))
        K, V = (x.repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (K, V))
        mask = visible(b - a, d - c, "br" if causal else None, (*window, "br"), "cpu")
        P = ((Q @ K.mT * scale).masked_fill(~mask, -torch.inf) - lse[:, a:b, None].clamp(min=-1e9)).exp()
        dS = P * (dO @ V.mT - (dO * O).sum(-1, keepdim=True)) * scale
        for x, (first, end), dx in zip(grads, ((a, b), (c, d), (c, d)), (dS @ K, dS.mT @ Q, P.mT @ dO)):
            x[first:end] = dx.unflatten(0, (x.shape[1], -1)).sum(1).transpose(0, 1)
    return tuple(grads)


@pytest.fixture
def doors(glue):
    """Redirects PyTorch's operators to stand-ins on the CPU; records the kernel calls."""
    pytorchs = torch.library.Library("aten", "IMPL")
    pytorchs.impl("_flash_attention_backward", flash_backward_on_cpu, "XLA")  # pytorch_backward.h's flash_backward() leads there
    with stand_in.kernels(glue) as calls:
        yield calls
    pytorchs._destroy()


def test_a_line_that_failed_is_asked_for_again(glue):
    """pytorch.cpp caches successful lines only; pytorch.py decides whether to rebuild a failed one."""
    asked = []

    @sdpa.LOAD
    def load(*arguments):
        asked.append(arguments)
        arguments[-1][0].trouble = b"no such knob" if len(asked) < 3 else b""
        if len(asked) == 3:
            stand_in.load_line(*arguments)
    q = half(1, 1, 4, 64)
    with stand_in.kernels(glue, load) as calls:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no such knob"):
                stand_in.attention(q, q, q, score_mod="s * 1.375")
        for _ in range(2):
            stand_in.attention(q, q, q, score_mod="s * 1.375")
    assert len(asked) == 3 and len(calls) == 2


def starts_of(lengths, device="cpu"):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def near(got, want, limit=2e-3):
    return got.shape == want.shape and rel_rms(got, want) <= limit


def near_lse(got, want):
    finite = want > -torch.inf
    return (got.dtype == torch.float32 and torch.equal(got > -torch.inf, finite) and
            near(got.where(finite, 0), want.where(finite, 0)))


ROWS, KEYS = (5, 0, 9, 1), (7, 3, 4, 0)
WINDOWS = {(-1, -1): {}, (-1, 0): dict(causal="br"), (3, 0): dict(window=(3, 0, "br")),
           (2, 2): dict(window=(2, 2, "br")), (-1, 4): dict(window=(None, 4, "br")),
           (5, -1): dict(window=(5, None, "br"))}


@pytest.mark.parametrize("dtype, window", [*((torch.half, window) for window in WINDOWS), (torch.bfloat16, (3, 0))], ids=str)
def test_varlen_attn(doors, glue, dtype, window):
    """O has q's layout, LSE is [H,rows]; PyTorch's backward and ours compute the gradients; a graph gives the same."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn
    options = dict(return_aux=AuxRequest(lse=True), window_size=window, **OF_GROUPS)
    shapes = (4, ROWS, ROWS, None), (4, ROWS, KEYS, 0.3), (2, ROWS, KEYS, None)
    Hkv, lengths, keys, scale = shapes[(list(WINDOWS).index(window) + (dtype == torch.bfloat16)) % 3]
    tensors = [half(sum(n), H, 64, dtype=dtype) for n, H in ((lengths, 4), (keys, Hkv), (keys, Hkv))]
    if lengths == keys:
        tensors = half(sum(keys), 3, 4, 64, dtype=dtype).unbind(1)
    tensors = [x.detach().requires_grad_() for x in tensors]
    starts = starts_of(lengths), starts_of(keys)

    def call(*tensors):
        return varlen_attn(*tensors, *starts, max(lengths), max(keys), scale=scale, **options)
    out, lse = call(*tensors)
    mask = dict(scale=scale, **WINDOWS[window])
    want, want_lse = of_sequences(*tensors, *starts, **mask)
    assert near(out, want, LIMITS[dtype]) and near_lse(lse, want_lse)
    assert out.stride() == torch.empty_like(tensors[0]).stride()
    assert doors[-1].most_keys == max(keys) and doors[-1].causal == (window == (-1, 0))
    grad = half(*out.shape, dtype=dtype)
    got, doubles = torch.autograd.grad(out, tensors, grad), wide(tensors)
    for a, b in zip(got, torch.autograd.grad(of_sequences(*doubles, *starts, **mask)[0], doubles, grad.double())):
        assert near(a, b, 2 * LIMITS[dtype])
    torch.compiler.reset()
    compiled, its_lse = torch.compile(call, backend="aot_eager", fullgraph=True)(*tensors)
    assert torch.equal(compiled, out) and compiled.stride() == out.stride() and torch.equal(its_lse, lse)
    for a, b in zip(torch.autograd.grad(compiled, tensors, grad), got):
        assert torch.equal(a, b)
    assert not stand_in.GRADIENTS
    glue.sdpa_torch_load_backward_by(stand_in.backward_line((64,), faster=(64,)))
    try:
        for preference, deterministic, asked in (("sdpa", False, sdpa.NEEDED), (None, True, sdpa.NEEDED | sdpa.DETERMINISTIC)):
            glue.sdpa_torch_prefer_backward(sdpa.PREFERENCES[preference])
            torch.use_deterministic_algorithms(deterministic)
            for a, b in zip(torch.autograd.grad(call(*tensors)[0], tensors, grad), got):
                assert a.stride() == b.stride() and near(a, b, 2 * LIMITS[dtype])
            assert [one.asked for one in stand_in.GRADIENTS] == [asked]
            stand_in.GRADIENTS.clear()
    finally:
        glue.sdpa_torch_prefer_backward(0), torch.use_deterministic_algorithms(False)
        glue.sdpa_torch_load_backward_by(stand_in.backward_line())


def test_flash_attention_forward(doors):
    """Calls the operator itself, also with a batch [B,S,H,D], with lengths, and with a causal mask and a window."""
    q, k, v = half(3, 5, 4, 64), half(3, 9, 2, 64), half(3, 9, 2, 64)
    rows, keys = starts_of((5,) * 3), starts_of((9,) * 3)
    for used, (causal, left, right) in itertools.product(
            (None, torch.tensor([9, 0, 4], dtype=torch.int32)),
            ((False, None, None), (True, None, None), (True, 3, None), (True, 2, 5), (False, -1, 0),
             (False, 10**12, 1))):
        window = (None if left in (None, -1) else left, right, "br")
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        want, want_lse = of_sequences(*flat, rows, keys, used, causal="br" if causal else None, window=window)
        options = dict(window_size_left=left, window_size_right=right, seqused_k=used)
        out, lse, state, unused, mask = FLASH(q, k, v, None, None, 5, 9, 0.0, causal, False, **options)
        assert near(out.flatten(0, 1), want) and near_lse(lse.transpose(0, 1).flatten(1), want_lse)
        assert lse.shape == (3, 4, 5) and doors[-1].most_keys == (0 if used is None else 9)
        assert doors[-1].causal == (causal or window[:2] == (None, 0))
        assert (state.shape, unused.shape, mask.shape, state.dtype) == ((2,), (), (0,), torch.uint64)
        out, lse, *_ = FLASH(*flat, rows, keys, 5, 9, 0.0, causal, False, **options)
        assert near(out, want) and near_lse(lse, want_lse)
    assert (doors[-1].window_left, doors[-1].window_right, doors[-1].window_alignment) == (10**9, 1, 1)
    expanded = half(1, 9, 1, 65)[..., 1:].expand(3, 9, 2, 64)  # copied: its rows do not start at multiples of 16 bytes
    out = FLASH(q, expanded, expanded, None, None, 5, 9, 0.0, False, False)[0]
    assert near(out, reference(*(x.transpose(1, 2) for x in (q, expanded, expanded)))[0].transpose(1, 2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_8_bits(doors, monkeypatch):
    """_scaled_dot_product_attention_quantized: O in bf16 lies as q does, in a graph too, and there is no backward, as a
    warning says."""
    from torch.nn.attention.experimental import _scaled_dot_product_attention_quantized as module
    function = module._scaled_dot_product_attention_quantized
    monkeypatch.setattr(module, "_validate_descale", lambda *_: None)  # which wants a GPU

    def quantized(*shape):
        return half(*shape).to(E4M3)
    for order, (Hkv, causal) in zip(itertools.permutations(range(3)), itertools.cycle(((4, False), (2, True), (1, True)))):
        q = quantized(*((2, 4, 5, 64)[i] for i in (*order, 3))).permute(*(order.index(i) for i in range(3)), 3)
        k, v, factors = quantized(2, Hkv, 9, 64), quantized(2, Hkv, 9, 64), [torch.rand(2, Hkv) + 0.5 for _ in "qkv"]

        def call(q, k, v, factors):
            return function(q, k, v, causal, 0.2, *factors)
        out = call(q, k, v, factors)
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        mask = dict(scale=0.2, causal="br" if causal else None)
        want, _ = of_sequences(*flat, starts_of((5, 5)), starts_of((9, 9)), factors=factors, **mask)
        assert out.dtype == torch.bfloat16 and near(out.transpose(1, 2).flatten(0, 1), want, 1e-2)
        assert out.stride() == q.stride() and out.permute(*order, 3).is_contiguous()
        torch.compiler.reset()
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v, factors)
        assert torch.equal(compiled, out) and (compiled.stride(), compiled.dtype) == (out.stride(), out.dtype)
    assert torch.equal(function(q, k, v), function(q, k, v, q_descale=torch.ones(2, 1)))
    with pytest.warns(UserWarning, match="does not support backward pass"):
        out = function(q.detach().requires_grad_(), k, v)
    with pytest.raises(RuntimeError, match="derivative|does not require grad"):
        out.sum().backward()
    starts = starts_of(ROWS), starts_of(KEYS)
    tensors = quantized(sum(ROWS), 4, 64), quantized(sum(KEYS), 2, 64), quantized(sum(KEYS), 2, 64)
    used, factors = torch.tensor([2, 3, 1, 0], dtype=torch.int32), [torch.rand(4, 2) + 0.5 for _ in "qkv"]
    out, lse, *_ = FLASH.quantized(*tensors, *starts, 9, 7, 0.0, True, False, *factors, seqused_k=used)
    want, want_lse = of_sequences(*tensors, *starts, used, causal="br", factors=factors)
    assert out.dtype == torch.bfloat16 and near(out, want, 1e-2) and near_lse(lse, want_lse)


TABLE, OF_TWO = torch.zeros(2, 1, dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)
DECLINED = {"there is dropout": dict(dropout=0.1), "a debug mask is asked for": dict(debug=True),
            "there is no line for D=76": dict(D=76), "there is no line for Float": dict(dtype=torch.float),
            "scale=-1 is not from 0 to 10^38": dict(more=dict(scale=-1.0)), "a tensor is empty": dict(keys=0),
            "there are alibi_slopes": dict(more=dict(alibi_slopes=torch.zeros(4))), "q and v differ in D": dict(Dv=96),
            "cum_seq_q or cum_seq_k is missing": dict(k_starts=None), "q has 4 dimensions": dict(q_dim=4),
            "k and v have 4 and 3 dimensions": dict(k_dim=4),
            "the heads of q are no multiple of those of k": dict(Hkv=3)}
if HAS_TABLES:
    paged = dict(k_dim=4, v_dim=4, more=dict(block_table=TABLE, seqused_k=OF_TWO))
    DECLINED |= {"there is a block_table without seqused_k": dict(k_dim=4, v_dim=4, more=dict(block_table=TABLE)),
                 BAD_ROWS: paged | dict(keys=16, gap=1),
                 "k and v have 3 and 3 dimensions": dict(more=paged["more"])}


def warned_by(run, capfd):
    """Returns the warnings (older PyTorch versions write them to stderr) of a call that then fails in PyTorch's GPU kernel."""
    torch.set_warn_always(True)  # not once
    try:
        with warnings.catch_warnings(record=True) as seen, pytest.raises(RuntimeError):
            warnings.simplefilter("always")
            run()
    finally:
        torch.set_warn_always(False)
    return "\n".join([capfd.readouterr().err, *(str(one.message) for one in seen)])


needs_no_gpu = pytest.mark.skipif(GPU, reason="PyTorch's own kernels might take a CPU's tensors for a GPU's")


@needs_no_gpu
@pytest.mark.parametrize("why", DECLINED)
def test_what_goes_to_pytorchs_own(doors, why, capfd):
    """The fallback warns with the reason. 8-bit inputs, for which PyTorch has no kernel, are an error."""
    c = SimpleNamespace(**dict(D=64, Dv=0, dtype=torch.half, dropout=0.0, debug=False, k_starts=starts_of((4, 6)),
                               q_dim=3, k_dim=3, v_dim=3, keys=10, Hkv=4, gap=0, more={}) | DECLINED[why])

    def make(dims, n, H, size):
        return torch.randn(*(1,) * (dims - 3), n, H, size + c.gap).to(c.dtype)[..., c.gap:]
    q, k, v = make(c.q_dim, 10, 4, c.D), make(c.k_dim, c.keys, c.Hkv, c.D), make(c.v_dim, c.keys, c.Hkv, c.Dv or c.D)
    arguments = starts_of((4, 6)), c.k_starts, 10, 10, c.dropout, False, c.debug
    said = warned_by(lambda: FLASH(q, k, v, *arguments, **c.more), capfd)
    assert f"sdpa: {why}; PyTorch's own kernel runs instead" in said
    if c.D == 76:
        q, k, v = (x.to(E4M3) for x in (q, k, v))
        heads_first = [x[None].transpose(1, 2) for x in (q, k, v)]
        for run in (lambda: FLASH.quantized(q, k, v, *arguments, None, None, None),
                    lambda: torch.ops.aten._scaled_dot_product_flash_attention.quantized(*heads_first, *[None] * 3)):
            with pytest.raises(RuntimeError, match=f"^sdpa: {why}; PyTorch has no kernel of its own for 8 bits"):
                run()
    assert not doors


@pytest.mark.skipif(not HAS_TABLES, reason="a PyTorch before 2.12")
def test_varlen_attn_of_caches(doors, capfd):
    """seqused_k, pages, num_splits, and a given output of any layout."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out
    q, rows, used = half(6, 4, 64), starts_of((2, 0, 4)), torch.tensor([20, 3, 30], dtype=torch.int32)
    pages, table = [half(9, 16, 2, 64) for _ in "kv"], torch.tensor([[5, 0], [7, 7], [2, 8]], dtype=torch.int32)
    packed, keys = [x[table.long()].flatten(0, 2) for x in pages], starts_of((32,) * 3)
    want, want_lse = of_sequences(q, *packed, rows, keys, used, causal="br")
    options = dict(return_aux=AuxRequest(lse=True), window_size=(-1, 0), enable_gqa=True, seqused_k=used)
    for kind, tensors, more in (("packed", (*packed, rows, keys), {}),
                                ("pages", (*pages, rows, None), dict(block_table=table)),
                                ("both", (*pages, rows, keys), dict(block_table=table, num_splits=4)),
                                ("alone", (*packed, rows, keys), dict(num_splits=1))):
        out, lse = varlen_attn(q, *tensors, 4, 32, **options, **more)
        assert near(out, want) and near_lse(lse, want_lse), kind
        assert (doors[-1].page_table is None) == (doors[-1].k_starts is not None) == (kind in ("packed", "alone"))
        assert bool(doors[-1].batch_invariant) == (kind == "alone")
        of_layouts = half(4, 6, 64).transpose(0, 1), half(6, 4, 72)[..., :64], half(6, 4, 65)[..., 1:]
        for given in (half(6, 4, 64), *of_layouts):
            its_lse = varlen_attn_out(given, q, *tensors, 4, 32, **options, **more)[1]
            assert torch.equal(given, out) and torch.equal(its_lse, lse), kind
    if GPU:
        return
    into = torch.ops.aten._flash_attention_forward_no_dropout_inplace
    said = warned_by(lambda: into(half(6, 4, 72), q, *packed, rows, keys, 4, 32, 0.0, True, False, seqused_k=used), capfd)
    assert "sdpa: out is of another shape or type than q; PyTorch's own kernel runs instead" in said


@pytest.mark.skipif(not CUDNN_HAS_TABLES, reason="varlen_attn calls cuDNN from PyTorch 2.14 on")
def test_varlen_attn_by_cudnns_operators(doors):
    """Causal masks are top-left, or bottom-right with seqused_k; LSE is [H,rows]."""
    starts = rows, keys = starts_of(ROWS), starts_of(KEYS)
    used = torch.tensor([5, 2, 4, 0], dtype=torch.int32)
    q, k, v = half(sum(ROWS), 4, 64), half(sum(KEYS), 2, 64), half(sum(KEYS), 2, 64)
    into = getattr(torch.ops.aten, "_cudnn_attention_forward_no_dropout_inplace", None)
    for lengths, causal, mask in ((None, False, None), (None, True, "tl"), (used, False, None), (used, True, "br")):
        want, want_lse = of_sequences(q, k, v, *starts, lengths, 0.3, mask)
        more = dict(scale=0.3, seqused_k=lengths)
        out, lse, *rest = CUDNN(q, k, v, None, *starts, 9, 7, True, 0.0, causal, False, **more)
        assert near(out, want) and near_lse(lse, want_lse) and lse.is_contiguous()
        assert torch.equal(rest[0], rows) and torch.equal(rest[1], keys) and rest[2:4] == [9, 7]
        if into:
            given = torch.empty_like(q)
            assert torch.equal(into(given, q, k, v, *starts, 9, 7, causal, **more), lse) and torch.equal(given, out)
    if GPU:
        return
    count = len(doors)
    with pytest.raises(RuntimeError):  # without starts it is F.scaled_dot_product_attention's, and runs on GPUs
        CUDNN(*(x[None].transpose(1, 2) for x in (q, q, q)), None, None, None, 5, 5, True)
    assert len(doors) == count


# ---- new rows of caches ----

@pytest.fixture
def append(glue):
    with contextlib.nullcontext() if GPU else stand_in.kernels(glue):
        yield torch.ops.sdpa.append


# Ways to lie in memory: contiguous, by heads or of a packed QKV, of wider rows or by columns, and misaligned.
OF_CACHES = [lambda *S: torch.randn(S), lambda *S: torch.randn(S[0], S[2], S[1], S[3]).transpose(1, 2),
             lambda *S: torch.randn(*S[:3], S[3] + 8)[..., :S[3]], lambda *S: torch.randn(*S[:3], S[3] + 1)[..., 1:]]
OF_ROWS = [lambda *S: torch.randn(S), lambda *S: torch.randn(*S[:-2], 3, *S[-2:])[..., 1, :, :],
           lambda *S: torch.randn(*S[:-2], S[-1], S[-2]).mT, lambda *S: torch.randn(*S[:-1], S[-1] + 1)[..., 1:]]


@pytest.mark.parametrize("dtype", (torch.half, E4M3, torch.float), ids=str)
def test_append(append, dtype):
    """Appends batches and packed rows to all caches, to some, or to pages, with integer tensors in all layouts and types. Rows
    beyond the capacity are dropped. Lengths may be negative; starts may be negative or decrease."""
    device = "cuda" if GPU else "cpu"

    def placed(x):
        return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device).copy_(x)
    tables = dict(caches=int32(4, 0, 3, 9, -1, 1)[:, None], pages=int32(5, 0, 7, 3, 2, -1, 8, 99, 4, 1, 6, 6).view(6, 2),
                  keys=(torch.arange(66, dtype=torch.int32) * 5 % 67 - 1).view(6, 11))
    starts = int32(-2, 3, 3, 7, 5, 8, 40)  # of 9 rows
    for kind, packs in itertools.product(("plain", *tables), (False, True)):
        count, size = {"plain": (6, 12), "caches": (5, 12), "pages": (9, 16), "keys": (64, 1)}[kind]
        lengths, table = int32(0, 30 if kind == "pages" else 10, 15, 2, -2, -9), tables.get(kind, torch.arange(6, dtype=torch.int32)[:, None])
        layouts = [itertools.cycle(stand_in.integer_layouts(x)) for x in (lengths, starts)]
        for n, ((of_table, its_table), *others) in enumerate(zip(stand_in.integer_layouts(table), *layouts)):
            used = {of for of, _ in others} | {of_table}
            its_lengths, its_starts = (x.to(device) for _, x in others)
            caches = [placed(OF_CACHES[n % 4](count, size, 2, D)) for D in (32, 48)]
            new = [placed(OF_ROWS[n % 4](*((9,) if packs else (6, 4)), 2, D)) for D in (32, 48)]
            want = [x.clone() for x in caches]
            ranges = [(max(first, 0), min(end, 9)) for first, end in itertools.pairwise(starts.tolist())] if packs else [(0, 4)] * 6
            for cache, x in zip(want, new):
                for b, own in enumerate(ranges):
                    for place, i in enumerate(range(*own), int(lengths[b])):
                        owner, at = int(table[b, place // size]) if 0 <= place < size * table.shape[1] else -1, place % size
                        if 0 <= owner < count and 0 <= at < size:
                            cache[owner, at] = x[i] if packs else x[b, i]
            now = append(*caches, *new, its_lengths, its_table.to(device) if kind in tables else None, its_starts if packs else None)
            added = [max(end - first, 0) for first, end in ranges]
            assert now.dtype == torch.int32 and now.tolist() == [n + m for n, m in zip(lengths.tolist(), added)], (kind, packs)
            for cache, expected in zip(caches, want):
                assert torch.equal(cache.float(), expected.float()), (n % 4, kind, packs, used)


def test_append_of_many_rows(append):
    """More rows than CTAs per sequence. append() has no gradient and marks the caches as modified for autograd."""
    k, v, new = (torch.zeros(2, 5000, 1, 8), torch.zeros(2, 5000, 1, 8), torch.ones(2, 4999, 1, 8))
    k, v, new, lengths = (x.to("cuda" if GPU else "cpu") for x in (k, v, new, torch.tensor([1, 0])))
    versions = [x._version for x in (k.requires_grad_(), v)]
    append(k, v, new, new, lengths, None, None)
    assert k[0, 1:].all() and v[1, :-1].all() and not k[0, 0].any() and not v[1, -1].any()
    assert [x._version for x in (k, v)] == [n + 1 for n in versions] and k.grad_fn is None


# ---- fake tensors refuse what kernels refuse ----

def int32_of(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def calls_of_attention():
    """Arguments of sdpa::attention by the names of its schema: a call for each group of options. No other test has these D, since
    pytorch.cpp keeps the lines."""
    q, k, v = (torch.zeros(2, H, S, D, dtype=torch.half) for H, S, D in ((4, 6, 176), (2, 8, 176), (2, 8, 208)))
    row, pages, mask = int32_of(3), torch.zeros(5, 2, 16, 176, dtype=torch.half), torch.ones(2, 1, 1, 8, dtype=torch.bool)
    q8, k8 = q.to(E4M3), k.to(E4M3)
    plain = dict(q=q, k=k, v=k, causal=0, left=-1, right=-1, window_alignment=0, scale=None, softcap=0.0, most_keys=0, bias_keys=0)
    of_mods = dict(score_mod="s - x0[h]", mask_mod="i0[q] == i0[k]", x0=torch.ones(4), i0=int32_of(8), block_mask=torch.zeros(9, dtype=torch.uint8))
    options = {"plain": {}, "own Dv": dict(v=v, sinks=torch.zeros(4), softcap=3.0), "e4m3": dict(
        q=q8, k=k8, v=k8, q_descale=torch.ones(2, 4), k_descale=torch.ones(2), v_descale=torch.ones(1, 1), bf16_out=True), "mask of keys": dict(
        q=q8, k=k8, v=k8, q_descale=torch.ones(2), bias=mask), "kv8": dict(k=k8, v=k8, k_descale=torch.ones(2, 2)), "packed": dict(
        q=q[:1], k=k[:1], v=k[:1], q_starts=row, k_starts=row, most_keys=7, bias=torch.zeros(6, 7)), "queries packed": dict(
        q=q[:1], q_starts=row, k_lengths=row[:2], q_lengths=row[:2], v=v), "pages": dict(
        k=pages, v=pages, page_table=int32_of(2, 3), k_lengths=row[:2], k_firsts=row[:2]), "packed, pages": dict(
        q=q[:1], k=pages, v=pages, page_table=int32_of(2, 3), q_starts=row, bias=torch.zeros(1, 3), bias_keys=3), "bias": dict(
        bias=torch.zeros(4, 6, 8), sinks=torch.zeros(4)), "bias of last keys": dict(bias=torch.zeros(2, 1, 6, 1).half(), bias_keys=5), "no key heads": dict(
        k=k[:, :0], v=k[:, :0]), "mods": of_mods}
    return {name: plain | given for name, given in options.items()}


def changes_of_tensor(x):
    """Yields tensors that differ from x in type, in the number of dimensions, in one size, or in how they lie."""
    yield from (x.to(dtype) for dtype in (torch.half, torch.bfloat16, torch.float32, torch.double, E4M3, torch.int32, torch.int64, torch.bool,
                                          torch.uint8))
    yield from (x[None], x.reshape(-1), x.new_zeros(x.numel() + 1)[1:].view(x.shape), x.new_zeros(()))
    if x.dim() == 4:
        yield x[:, :, :1].expand(-1, -1, 10**9 + 1, -1)
    for dim, size in enumerate(x.shape):
        yield from (x.new_zeros(*x.shape[:dim], other, *x.shape[dim + 1:]) for other in {0, 1, abs(size - 1), size + 1, 2 * size, 24, 264})
        yield from (x.new_zeros(*x.shape[:dim], size + 1, *x.shape[dim + 1:]).narrow(dim, first, size) for first in (0, 1))
        yield x.new_zeros(*x.shape[:dim], 2 * size, *x.shape[dim + 1:]).narrow(dim, 0, 2 * size)[(slice(None),) * dim + (slice(None, None, 2),)]
        yield x.new_zeros(*x.shape[:dim], 1, *x.shape[dim + 1:]).expand(x.shape)
        yield x.transpose(dim, 0).contiguous().transpose(dim, 0)
        yield x.transpose(dim, -1)


NUMBERS = {"left": (-2, 0, 10**9, 10**9 + 1), "right": (-2, 0, 10**9 + 1), "most_keys": (-1, 1, 7, 9, 10**9 + 1), "bias_keys": (-1, 1, 5, 8, 9, 10**9 + 1),
           "scale": (0.0, -1.0, 1e38, math.inf, math.nan), "softcap": (1.0, 1e-50, 1e-30), "bf16_out": (True, False),
           "batch_invariant": (True,), "score_mod": ("", "s - x0[h]"), "mask_mod": ("", "i0[q] == i0[k]"), "causal": (0, 1, 2), "window_alignment": (1, 2)}


def changed_calls(calls, count, numbers):
    """Yields (name, changes, call): each call with each change of each argument and with each argument of the others, and `count` random
    pairs of changes."""
    singles, required = {}, set.intersection(*({key for key, x in call.items() if isinstance(x, torch.Tensor)} for call in calls.values()))
    others = {(key, id(x)): (key, x) for call in calls.values() for key, x in call.items() if isinstance(x, torch.Tensor)}
    for name, call in calls.items():
        singles[name] = [*others.values()] + [(key, None) for key in call if key not in required] + [
            (key, x) for key, given in call.items() if isinstance(given, torch.Tensor) for x in changes_of_tensor(given)] + [
            (key, x) for key, values in numbers.items() for x in values]
        singles[name] = [(key, x) for key, x in singles[name] if x is not None or isinstance(call[key], torch.Tensor)]
        yield name, [], call
        yield from ((name, [change], call | dict([change])) for change in singles[name])
    draw = random.Random(0)
    for _ in range(count):
        name = draw.choice(list(calls))
        changes = draw.sample(singles[name], 2)
        yield name, changes, calls[name] | dict(changes)


def as_meta(x):
    """A meta tensor that lies as x does."""
    if not isinstance(x, torch.Tensor):
        return x
    whole = torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype, device="meta")
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


NAMES_OF_DTYPES = {"Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64", "Float8_e4m3fn": "float8_e4m3fn", "Int": "int32",
                   "Long": "int64", "Bool": "bool", "Byte": "uint8"}


def outcome(function, *arguments):
    """The results as (shape, strides, dtype), or the first line of the error without the names of devices and of types."""
    try:
        out = function(*arguments)
    except Exception as trouble:
        words = str(trouble).splitlines()[0].replace("torch.", "")
        words = re.sub(r"\b(of|for) (\w+)\b", lambda match: f"{match[1]} {NAMES_OF_DTYPES.get(match[2], match[2])}", words)
        return re.sub(r"\b(cpu|meta)\b", "DEVICE", words)
    out = out if isinstance(out, tuple) else (out,)
    return [(x.shape, [step for size, step in zip(x.shape, x.stride()) if size > 1], x.dtype) for x in out]


def idle(names, kind):
    """A loader of a line whose functions do nothing."""
    def load(*arguments):
        functions = [stand_in.told(lambda p: None, kind) if name in ("forward", "backward", "map_bias") else stand_in.Bytes(lambda p: 0) for name in names]
        stand_in.LOADED.append(functions)
        for name, function in zip(names, functions):
            setattr(arguments[-1][0], name, ctypes.cast(function, ctypes.c_void_p).value)
    return load


@needs_no_gpu
def test_fake_tensors_refuse_what_kernels_refuse(glue):
    """attention() of meta tensors has the shapes and strides of a real call, or its error."""
    defaults = {argument.name: argument.default_value for argument in sdpa.OPERATOR._schema.arguments}
    source = builds.Tree().read("sdpa.cu")
    of_library = [re.sub("%[sdg]", ".*", re.escape(words)) for words in (
        "softcap=%g: must be 0, or 1e-18 to 1e18", "%s=%d is outside [%d, %d]") if f'"{words}"' in source]
    errors, count = Counter(), 0
    with stand_in.kernels(glue, sdpa.LOAD(idle(sdpa.LINE_FUNCTIONS, stand_in.Forward))), torch.no_grad():
        calls = calls_of_attention()
        for name in "own Dv", "mask of keys", "kv8", "packed", "pages", "bias", "bias of last keys", "mods":
            made_for = sdpa.BLOCK_MASK(*(defaults | calls[name] | dict(block_mask=None)).values())[1]
            kept = dict(block_mask=torch.zeros(9, dtype=torch.uint8), made_for=made_for)
            calls[name + " with a kept map"] = calls[name] | kept
        calls["mods"]["block_mask"] = None
        for name, changes, call in changed_calls(calls, 1000, NUMBERS):
            call = defaults | call
            if not call["made_for"]:
                call["block_mask"] = None  # else made by a fake call, which a launch refuses
            mods = call["score_mod"] + call["mask_mod"]
            if {*re.findall(r"\b[xi]\d", mods)} != {x for x in sdpa.ARRAYS if call[x] is not None}:
                continue  # attention() refuses these itself
            want, got = outcome(sdpa.OPERATOR, *call.values()), outcome(sdpa.fake, *map(as_meta, call.values()))
            if not isinstance(want, str) and isinstance(got, str):
                assert any(re.fullmatch("sdpa.attention: " + words, got) for words in of_library), (name, changes, got)
            else:
                assert got == want, (name, changes)
            errors[re.sub(r"[-\d.]+|\[.*?\]", "N", got) if isinstance(got, str) else "none"] += 1
            count += 1
        for name, call in calls_of_attention().items():
            metas = {key: as_meta(x) for key, x in (defaults | call).items()}
            for key, x in call.items():
                other = metas | {key: x} if key != "q" else defaults | call | dict(q=metas["q"])
                assert not isinstance(x, torch.Tensor) or isinstance(outcome(sdpa.fake, *other.values()), str), (name, key)
    assert count > 6000 and errors["none"] > 1500 and len(errors) > 40, (count, len(errors), errors)


@needs_no_gpu
def test_fake_caches_refuse_what_append_refuses(glue):
    cache, rows, lengths = torch.zeros(2, 8, 2, 32), torch.zeros(2, 3, 2, 32), int32_of(2)
    plain = dict(k_cache=cache, v_cache=cache, k=rows, v=rows, lengths=lengths, page_table=None, starts=None)
    calls = {"plain": plain, "pages": plain | dict(page_table=int32_of(2, 4)), "packed": plain | dict(k=rows[0], v=rows[0], starts=int32_of(3))}
    operator, errors = torch.ops.sdpa.append.default, Counter()
    with stand_in.kernels(glue), torch.no_grad():
        for name, changes, call in changed_calls(calls, 500, {}):
            want, got = outcome(operator, *call.values()), outcome(sdpa.fake_append, *map(as_meta, call.values()))
            assert got == want, (name, changes)
            errors[re.sub(r"\d+", "N", got) if isinstance(got, str) else "none"] += 1
    assert errors["none"] > 100 and len(errors) > 8, errors


@needs_no_gpu
def test_meta_tensors_refuse_gradients_that_kernels_refuse(glue):
    """Refusals that do not depend on the GPU: lines for all sizes stand in."""
    q, k, row = torch.zeros(2, 4, 6, 64).half(), torch.zeros(2, 2, 8, 64).half(), int32_of(2)
    starts, bias = int32_of(3), torch.zeros(4, 6, 8)
    choices = dict(
        k=[k, k[:, :, :6]], v=[None, k.new_zeros(2, 2, 8, 128)], causal=[0, 1, 2], left=[-1, 3], right=[-1, 0], window_alignment=[0, 1, 2],
        bias=[None, bias], to_bias=[False, True], softcap=[0.0, 2.0], sinks=[None, torch.zeros(4)], k_lengths=[None, row], q_starts=[None, starts],
        bias_keys=[0, 8], score_mod=["", "2 * s"], without=["", "no backward for e4m3, pages"], backward=["", "sdpa", "deterministic", "torch"])
    defaults = {argument.name: argument.default_value for argument in sdpa.BACKWARD._schema.arguments}
    draw, kinds = random.Random(0), Counter()
    with stand_in.kernels(glue, load_backward=sdpa.LOAD_BACKWARD(idle(("workspace_bytes", "backward"), stand_in.Backward))):
        for _ in range(1200):
            call = defaults | dict(scale=None) | {name: draw.choice([values[0], draw.choice(values)]) for name, values in choices.items()}
            packs = call["q_starts"] is not None
            call["q"] = call["grad"] = q[:1] if packs else q
            call["v"] = call["k"] if call["v"] is None else call["v"][:, :, :call["k"].shape[2]]
            if call["bias"] is not None:
                call["bias"] = call["bias"][..., :min(call["bias_keys"] or 8, call["k"].shape[2])]
                call["bias_keys"] = min(call["bias_keys"], call["k"].shape[2])
            call |= dict(o=call["q"].new_zeros(*call["q"].shape[:3], call["v"].shape[3]), lse=torch.zeros(call["q"].shape[:3]),
                         to_bias=call["to_bias"] and call["bias"] is not None, bias_keys=call["bias_keys"] if call["bias"] is not None else 0)
            call["grad"] = call["o"]
            want, got = outcome(sdpa.BACKWARD, *call.values()), outcome(sdpa.fake_backward, *map(as_meta, call.values()))
            if isinstance(want, str) and not want.startswith("sdpa.attention: "):
                want = got if not isinstance(got, str) else want  # PyTorch's kernels, which do not run on the CPU
            assert got == want, {name: x if not isinstance(x, torch.Tensor) else list(x.shape) for name, x in call.items() if x is not defaults[name]}
            kinds[got if isinstance(got, str) else "none"] += 1
    assert kinds["none"] > 400 and len(kinds) > 10, kinds


def test_what_append_refuses(append):
    k, lengths = torch.zeros(2, 8, 2, 32), torch.tensor([1, 2])
    k, lengths = (x.to("cuda" if GPU else "cpu") for x in (k, lengths))
    for bad, words in ((dict(k=k[:, :, :1]), "k and v are not of the caches' device, type, heads and D, or not of 2"),
                       (dict(k=k.half()), "k and v are not of"), (dict(k=k[:1], v=k[:1]), "k and v are not of"),
                       (dict(v=k[:, :1]), "k and v, or their caches, differ in shape"),
                       (dict(k_cache=k[:1]), "there are 1 caches for 2 sequences"),
                       (dict(k_cache=k.mT.contiguous().mT), "rows of the caches are not contiguous"),
                       (dict(k=k[0]), "the caches have 4 dimensions, and k or v 3"),
                       (dict(lengths=lengths.float()), r"cache_seqlens is not an integer tensor \[2\]"),
                       (dict(starts=lengths, k=k[0], v=k[0]), r"cu_seqlens_k_new is not an integer tensor \[3\]"),
                       (dict(page_table=lengths), r"page_table is not an integer tensor \[2,pages of a sequence\]"),
                       (dict(page_table=lengths[:, None], k_cache=k[:, :0], v_cache=k[:, :0]), "a page of page_table has 0 keys")):
        given = dict(k_cache=k, v_cache=k, k=k, v=k, lengths=lengths, page_table=None, starts=None) | bad
        with pytest.raises(RuntimeError, match=f"^flash_attn_with_kvcache: {words}"):
            append(**given)


# ---- each argument of each entry point, down to the kernel's parameters ----

def drawn(*shape, dtype=torch.half, seed=0):
    """Random values that depend only on shape and seed."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def turned(x):
    """x with other strides: its dimensions lie in memory in the reverse order."""
    reverse = range(x.dim())[::-1]
    return x.permute(*reverse).contiguous().permute(*reverse)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


class Entry:
    """A function, the arguments of a plain call, and rows: (other arguments, the members of SdpaParams that they change).
    unused: arguments without a row. integers: "all" layouts and types of integer tensors are taken, or "some", and the others
    refused by attention(), to which `names` translates arguments."""

    def __init__(self, call, plain, rows, unused="", integers="all", names=None):
        self.call, self.plain, self.rows, self.integers = call, plain, rows, integers
        self.unused, self.names = set(unused.split()), names or {}

    def run(self, calls, **changes):
        """Returns the parameters of the single launch, O and LSE."""
        calls.clear()
        result = self.call(**self.plain | changes)
        call, = calls
        out = result[:2] if isinstance(result, tuple) else (result,)
        return vars(call), [x.nan_to_num() for x in out if x is not None and x.numel()]


def bits_of(x, *shape):
    return stand_in.bits(x.expand(shape) if shape else x)


def packed_rows(x):
    return x.transpose(0, 1)[None]


STARTS_Q, STARTS_K, USED = int32(0, 2, 5), int32(0, 4, 9), int32(3, 2)
TABLE_OF_6 = int32(4, 1, 0, 3, 5, 2).view(2, 3)[:, :2]  # [[4,1],[3,5]] of rows of 3


def masks_of_keys(name, hidden):
    """Masks with one row for all queries and heads: expanded, views of a larger tensor, shared by all batches, of one query."""
    row, of_all = hidden[:, :1, :1], hidden[0, 0, 0]
    B, _, Sq, Sk = hidden.shape
    return [({name: mask}, dict(key_mask=of_batch.expand(B, Sk).tolist())) for mask, of_batch in (
        (row, row[:, 0, 0]), (row.expand(B, 1, Sq, Sk), row[:, 0, 0]), (of_all, of_all), (of_all.expand(B, 4, Sq, Sk), of_all),
        (row.contiguous(), row[:, 0, 0]), (row[..., :1], row[:, 0, 0, :1]))]


def with_pages(K, V, size=16):
    """The members that change with 6 pages of this number of keys, in TABLE_OF_6."""
    return dict(K=bits_of(K), V=bits_of(V), page_table=TABLE_OF_6.tolist(), page_size=size, pages=6, Sk=2 * size)


def attention_entries():
    q, k, v = drawn(2, 4, 5, 64), drawn(2, 2, 9, 64), drawn(2, 2, 9, 64, seed=1)
    K, V = drawn(6, 2, 16, 64), drawn(6, 2, 16, 64, seed=1)
    sinks, bias, hidden = drawn(4, dtype=torch.float), drawn(4, 5, 9), drawn(2, 1, 5, 9) > 0
    last, of_keys = drawn(4, 1, 3), drawn(2, 1, 1, 9)
    rows = [(dict(causal=value), dict(causal=number)) for value, number in ((True, 1), ("br", 1), ("tl", 2))]
    rows += [
        (dict(causal=False), {}), (dict(window=(3, None)), dict(window_left=3)), (dict(window=(None, 2)), dict(window_right=2)),
        (dict(window=(3, 2, "tl")), dict(window_left=3, window_right=2, window_alignment=2)),
        (dict(window=(0, 4, "br")), dict(window_left=0, window_right=4, window_alignment=1)),
        (dict(scale=0.25), dict(scale=0.25)), (dict(scale=0.0), dict(scale=torch.finfo(torch.float).tiny)),
        (dict(softcap=2.0), dict(softcap=2.0)), (dict(sinks=sinks), dict(sinks=sinks.tolist())),
        (dict(sinks=sinks.half()), dict(sinks=sinks.half().tolist())),
        (dict(sinks=drawn(4, 2, dtype=torch.float)[:, 1]), dict(sinks=drawn(4, 2, dtype=torch.float)[:, 1].tolist())),
        (dict(k_lengths=USED), dict(k_lengths=[3, 2])),
        (dict(q_lengths=USED), dict(q_lengths=[3, 2])), (dict(k_firsts=USED), dict(k_firsts=[3, 2])),
        (dict(q_starts=STARTS_Q, q=q[:1]), dict(q_starts=[0, 2, 5], Q=bits_of(q[:1]))),
        (dict(k_starts=STARTS_K, k=k[:1], v=v[:1]), dict(k_starts=[0, 4, 9], K=bits_of(k[:1]), V=bits_of(v[:1]))),
        (dict(most_keys=7, k_lengths=USED), dict(most_keys=7, k_lengths=[3, 2])),
        (dict(page_table=TABLE_OF_6, k=K, v=V), with_pages(K, V) | dict(page_stride=3)),
        (dict(page_table=TABLE_OF_6, k=K[:, :, :9], v=V[:, :, :9]), with_pages(K[:, :, :9], V[:, :, :9], 9) | dict(page_stride=3)),
        (dict(bias=bias), dict(bias=bits_of(bias, 2, 4, 5, 9), bias_dtype=torch.half)),
        (dict(bias=hidden), dict(bias=bits_of(hidden, 2, 4, 5, 9), bias_dtype=torch.bool)),
        (dict(most_keys=7, k_lengths=USED, bias=bias[..., :7]),
         dict(most_keys=7, k_lengths=[3, 2], bias=bits_of(bias[..., :7], 2, 4, 5, 7), bias_dtype=torch.half)),
        (dict(bias_keys=3, bias=last), dict(bias_keys=3, bias=bits_of(last, 2, 4, 5, 3), bias_dtype=torch.half)),
        *masks_of_keys("bias", hidden),
        (dict(bias=of_keys), dict(bias=bits_of(of_keys, 2, 4, 5, 9), bias_dtype=torch.half)),
        (dict(bias=of_keys[0, 0, 0].float()), dict(bias=bits_of(of_keys[:1].float(), 2, 4, 5, 9), bias_dtype=torch.float)),
        (dict(bias=of_keys, k_lengths=USED), dict(bias=bits_of(of_keys, 2, 4, 5, 9), bias_dtype=torch.half, k_lengths=[3, 2])),
        (dict(bias=hidden[:, :, :1], k_lengths=USED),
         dict(bias=bits_of(hidden[:, :, :1], 2, 4, 5, 9), bias_dtype=torch.bool, k_lengths=[3, 2])),
        (dict(bias=hidden[:, :, :1, :3], bias_keys=3),
         dict(bias=bits_of(hidden[:, :, :1, :3], 2, 4, 5, 3), bias_dtype=torch.bool, bias_keys=3)),
        (dict(batch_invariant=True), dict(batch_invariant=1)), (dict(out_dtype=None), {}), (dict(backward="torch"), {})]
    x, i = [drawn(9, dtype=torch.float, seed=n) for n in range(4)], [int32(*range(n, n + 9)) for n in range(2)]
    addresses = {name: one.data_ptr() for name, one in zip(sdpa.ARRAYS, x + i)}
    of = lambda *names: {name: addresses[name] for name in names}  # noqa: E731
    alibi, documents = dict(score_mod="s - x0[h] * real(q + Sk - Sq - k)", args=x[:1]), dict(mask_mod="i0[q] == i0[k]", args=i[:1])
    every = dict(score_mod="s+x0[k]*x1[k]", mask_mod="x2[q]>x3[k]||i0[q]>i1[k]", args=[x[0], i[0], *x[1:3], i[1], x[3]])
    for mods, arrays in (alibi, of("x0")), (documents, of("i0")), (every, addresses):
        texts = {name: text for name, text in mods.items() if name != "args"}
        rows.append((mods, texts | arrays))
        rows.append((mods | dict(causal="br", k_lengths=USED, sinks=sinks), texts | arrays | dict(causal=1, k_lengths=[3, 2], sinks=sinks.tolist())))
        kept = sdpa.block_mask(q, k, v, **mods)
        rows.append((mods | dict(block_mask=kept), texts | arrays | dict(bias_map=bits_of(kept.tiles) or None)))
    yield "attention", Entry(stand_in.attention, dict(q=q, k=k, v=v, return_lse=True), rows, "return_lse", "some")
    of_q, by_key_head, of_k, of_v = (drawn(*shape, dtype=torch.float, seed=i).abs() for i, shape in enumerate(((2, 4), (2, 2), (2, 2), (2, 2))))
    of_keys = [(dict(k_descale=of_k), dict(k_descale=of_k.tolist())), (dict(v_descale=of_v), dict(v_descale=of_v.tolist())),
               (dict(v_descale=of_v[0]), dict(v_descale=of_v[:1].expand(2, 2).tolist())), (dict(k_descale=of_k.T), dict(k_descale=of_k.T.tolist()))]
    rows = [(dict(q_descale=of_q), dict(q_descale=of_q.tolist())),
            (dict(q_descale=by_key_head), dict(q_descale=by_key_head.repeat_interleave(2, 1).tolist())), *of_keys,
            (dict(out_dtype=torch.half), {}), (dict(out_dtype=torch.bfloat16), dict(O_dtype=torch.bfloat16)),
            *masks_of_keys("bias", hidden)]
    # With pages or packed tensors, factors are those of sequences.
    packed, pages = as_e4m3(dict(q=q[:1], k=k[:1], v=v[:1])), as_e4m3(dict(k=K, v=V))
    of_packed = {name.upper(): bits_of(x) for name, x in packed.items()} | dict(q_starts=[0, 2, 5], k_starts=[0, 4, 9])
    of_pages = with_pages(pages["k"], pages["v"]) | dict(page_stride=3, k_lengths=[3, 2])
    rows += [(layout | changes, members | want) for changes, want in (rows[0], *of_keys) for layout, members in (
        (packed | dict(q_starts=STARTS_Q, k_starts=STARTS_K), of_packed),
        (pages | dict(page_table=TABLE_OF_6, k_lengths=USED), of_pages))]
    yield "attention of e4m3", Entry(stand_in.attention, as_e4m3(dict(q=q, k=k, v=v)), rows, integers="some")
    # The number of query heads per key head differs from the number of key heads.
    six = as_e4m3(dict(q=drawn(2, 6, 5, 64), k=drawn(2, 3, 9, 64), v=drawn(2, 3, 9, 64, seed=1)))
    by_key_head = drawn(2, 3, dtype=torch.float).abs()
    yield "attention of e4m3 with six heads", Entry(
        stand_in.attention, six, [(dict(q_descale=by_key_head), dict(q_descale=by_key_head.repeat_interleave(2, 1).tolist()))])
    yield "attention of kv8", Entry(stand_in.attention, dict(q=q, k=k.to(E4M3), v=v.to(E4M3)),
                                       [*of_keys, *masks_of_keys("bias", hidden)])
    # Heads of K and V that are expanded count as one, unless a tensor differs between them.
    own = as_e4m3(dict(q=q, k=k, v=v))
    shared = {name: x if name == "q" else x[:, :1].expand_as(x) for name, x in own.items()}
    two = dict(Hkv=2) | {name.upper(): bits_of(shared[name]) for name in "kv"}
    rows = [({name: own[name]}, two | {name.upper(): bits_of(own[name])}) for name in "kv"]
    for name, x in (("k_descale", of_k), ("v_descale", of_v)):
        of_batch = x[:, :1]
        rows += [({name: x}, two | {name: x.tolist()}), ({name: of_batch.expand(2, 2)}, {name: of_batch.tolist()})]
    yield "attention of expanded heads", Entry(stand_in.attention, shared, rows)


def as_e4m3(arguments):
    return {name: x.to(E4M3) if getattr(x, "dtype", None) == torch.half else x for name, x in arguments.items()}


def flash_attn_entries():
    import flash_attn_interface as fa

    def of_keys(names, sink):
        return [(dict(softmax_scale=0.25), dict(scale=0.25)), (dict(causal=True), dict(causal=1)),
                (dict(window_size=(3, 2)), dict(window_left=3, window_right=2, window_alignment=1)),
                (dict(window_size=(-1, 4)), dict(window_right=4, window_alignment=1)),
                (dict(window_size=(3, 2), causal=True), dict(causal=1, window_left=3, window_right=0, window_alignment=1)),
                (dict(softcap=2.0), dict(softcap=2.0)), (dict(learnable_sink=sink), dict(sinks=sink.tolist())),
                (dict(alibi_slopes=slopes[0]), dict(score_mod="s - x0[h] * real(abs(q + Sk - Sq - k))", x0=slopes.data_ptr())),
                (dict(alibi_slopes=slopes, causal=True), dict(score_mod="s - x0[b * 4 + h] * real(q + Sk - Sq - k)", causal=1, x0=slopes.data_ptr())),
                (dict(alibi_slopes=slopes[0], softcap=2.0),
                 dict(score_mod="2 * tanh_approx(s / 2) - x0[h] * real(abs(q + Sk - Sq - k))", x0=slopes.data_ptr())),
                *((dict([hint]), {}) for hint in dict(num_splits=3, pack_gqa=True, deterministic=True, sm_margin=2).items() if hint[0] in names)]
    q, k, v = drawn(2, 5, 4, 64), drawn(2, 9, 2, 64), drawn(2, 9, 2, 64, seed=1)
    q3, k3, v3 = q.flatten(0, 1)[:5], k.flatten(0, 1)[:9], v.flatten(0, 1)[:9]
    K, V = drawn(6, 16, 2, 64), drawn(6, 16, 2, 64, seed=1)
    heads = lambda x: x.transpose(1, 2)  # noqa: E731
    of_pages = with_pages(heads(K), heads(V))
    sink, slopes, factors = drawn(4, dtype=torch.float), drawn(2, 4, dtype=torch.float).abs(), [drawn(2, 2, dtype=torch.float, seed=i).abs() for i in range(3)]
    q_factors = factors[0].repeat_interleave(2, 1)
    names = {name: set(inspect.signature(getattr(fa, name)).parameters) for name in dir(fa) if name.startswith("flash_attn_")}
    refused = " ".join(fa.UNKNOWN) + " others return_attn_probs return_softmax_lse"
    hints = " num_splits pack_gqa deterministic sm_margin"

    def entry(name, plain, rows, unused=""):
        """The entry of the function, and one with e4m3 tensors for its descales."""
        descales = [(dict(q_descale=factors[0]), dict(q_descale=q_factors.tolist())), (dict(k_descale=factors[1]), dict(k_descale=factors[1].tolist())),
                    (dict(v_descale=factors[2]), dict(v_descale=factors[2].tolist()))]
        with_lse = {"return_softmax_lse" if "return_softmax_lse" in names[name] else "return_attn_probs": True}
        yield name, Entry(getattr(fa, name), plain | with_lse, of_keys(names[name], sink) + rows, refused + unused + " q_descale k_descale v_descale")
        yield name + " of e4m3", Entry(getattr(fa, name), as_e4m3(plain), descales)
    yield from entry("flash_attn_func", dict(q=q, k=k, v=v), [])
    qkv, in_one = drawn(2, 5, 8, 64), drawn(2, 5, 3, 4, 64)
    parts = [heads(x) for x in in_one.unbind(2)]
    own = [(dict(qkv=qkv, num_heads_q=4), dict(Hkv=2) | {name: bits_of(heads(x)) for name, x in zip("QKV", qkv.split((4, 2, 2), 2))})]
    for name, one in entry("flash_attn_qkvpacked_func", dict(qkv=in_one), own):
        if "e4m3" in name:  # a key head for each head: factors are of all four
            four = [drawn(2, 4, dtype=torch.float, seed=i).abs() for i in range(3)]
            one.rows = [({name: x}, {name: x.tolist()}) for name, x in zip(("q_descale", "k_descale", "v_descale"), four)]
        yield name, one
    plain = dict(q=q3, k=k3, v=v3, cu_seqlens_q=STARTS_Q, cu_seqlens_k=STARTS_K, max_seqlen_q=3, max_seqlen_k=9)
    yield from entry("flash_attn_varlen_func", plain, [
        (dict(cu_seqlens_q=int32(0, 1, 5)), dict(q_starts=[0, 1, 5])), (dict(cu_seqlens_k=int32(0, 3, 9)), dict(k_starts=[0, 3, 9])),
        (dict(max_seqlen_q=5), {}), (dict(max_seqlen_k=6), dict(most_keys=6)), (dict(max_seqlen_k=None), dict(most_keys=0)),
        (dict(seqused_q=int32(1, 2)), dict(q_lengths=[1, 2])), (dict(seqused_k=USED), dict(k_lengths=[3, 2])),
        (dict(page_table=TABLE_OF_6, k=K, v=V, cu_seqlens_k=None, seqused_k=USED),
         of_pages | dict(k_starts=None, k_lengths=[3, 2], page_stride=2)),
        (dict(cu_seqlens_q=None, q=q), dict(q_starts=None, Q=bits_of(heads(q)))),
        (dict(cu_seqlens_k=None, k=k, v=v), dict(k_starts=None, K=bits_of(heads(k)), V=bits_of(heads(v))))])
    caches = dict(k_cache=drawn(5, 16, 2, 64), v_cache=drawn(5, 16, 2, 64, seed=1))
    odd = {name: x[:, :15] for name, x in caches.items()}
    two = {name: x[:2] for name, x in caches.items()}
    index = int32(4, 0)
    as_pages = dict(zip("KV", (bits_of(heads(x)) for x in caches.values())))
    chosen = dict(zip("KV", (bits_of(heads(x)) for x in odd.values()))) | dict(page_table=[[4], [0]], page_size=15, pages=5, page_stride=1)
    new = drawn(2, 1, 2, 64), drawn(2, 1, 2, 64, seed=1)

    def appended(cache, rows, at):
        """The two caches with these rows appended to each sequence."""
        cache = cache.clone()
        for b, own in enumerate(rows):
            cache[b, at[b]:at[b] + len(own)] = own
        return bits_of(heads(cache))

    def turned(x):
        """Rotates each pair of elements by 90 degrees."""
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    quarter = dict(rotary_cos=torch.zeros(9, 32).half(), rotary_sin=torch.ones(9, 32).half())

    def function(**given):
        """Passes copies of the caches, since the call writes to them."""
        return fa.flash_attn_with_kvcache(**given | {name: given[name].clone() for name in caches})
    for name, one in entry("flash_attn_with_kvcache", dict(q=q, **two), [
            (dict(cache_seqlens=USED), dict(k_lengths=[3, 2])), (dict(cache_seqlens=7), dict(k_lengths=[7, 7])),
            (dict(cache_batch_idx=index, **caches), as_pages | dict(page_table=[[4], [0]], page_size=16, pages=5, page_stride=1)),
            (dict(cache_batch_idx=index, **odd), chosen | dict(Sk=15)), (dict(cache_leftpad=USED), dict(k_firsts=[3, 2])),
            (dict(page_table=TABLE_OF_6, k_cache=K, v_cache=V, cache_seqlens=USED), of_pages | dict(k_lengths=[3, 2], page_stride=2)),
            (dict(cu_seqlens_q=STARTS_Q, q=q3, max_seqlen_q=3), dict(q_starts=[0, 2, 5], Q=bits_of(packed_rows(q3)))),
            (dict(k=new[0], v=new[1], cache_seqlens=USED),
             {name: appended(x, rows, (3, 2)) for name, x, rows in zip("KV", two.values(), new)} | dict(k_lengths=[4, 3])),
            (dict(cu_seqlens_k_new=int32(0, 2, 3), k=k3[:3], v=v3[:3], cache_seqlens=USED),
             {name: appended(x, rows, (3, 2)) for name, x, rows in zip("KV", two.values(), (k3[:3].split((2, 1)), v3[:3].split((2, 1))))} |
             dict(k_lengths=[5, 3])),
            (dict(k=new[0], v=new[1], cache_seqlens=USED, **quarter), {
                "Q": bits_of(heads(turned(q))), "K": appended(two["k_cache"], turned(new[0]), (3, 2)),
                "V": appended(two["v_cache"], new[1], (3, 2)), "k_lengths": [4, 3]}),
            (dict(rotary_interleaved=False, rotary_seqlens=USED, scheduler_metadata=USED), {})]):
        one.call = function
        yield name, one


def operator_entries():
    """PyTorch's operators, which F.scaled_dot_product_attention, varlen_attn and its attention of 8 bits call."""
    aten = torch.ops.aten
    q, k, v = drawn(2, 4, 5, 64), drawn(2, 4, 9, 64), drawn(2, 4, 9, 64, seed=1)
    bias, hidden = drawn(4, 5, 9), drawn(2, 4, 5, 9) > 0
    plain, unused = dict(query=q, key=k, value=v), "dropout_p return_debug_mask"
    scale = dict(scale=0.25), dict(scale=0.25)
    masked = [scale, (dict(is_causal=True), dict(causal=2)),
              (dict(attn_bias=bias), dict(bias=bits_of(bias, 2, 4, 5, 9), bias_dtype=torch.half)),
              (dict(attn_bias=hidden), dict(bias=bits_of(hidden), bias_dtype=torch.bool)), (dict(compute_log_sumexp=False), {}),
              *masks_of_keys("attn_bias", hidden)]
    whole = plain | dict(attn_bias=None, compute_log_sumexp=True)
    yield "flash", Entry(aten._scaled_dot_product_flash_attention.default, plain, [scale, (dict(is_causal=True), dict(causal=1))], unused)
    yield "cudnn", Entry(aten._scaled_dot_product_cudnn_attention.default, whole, masked, unused)
    yield "efficient", Entry(aten._scaled_dot_product_efficient_attention.default, whole, masked, unused)
    factors = [drawn(2, 4, dtype=torch.float, seed=i).abs() for i in range(3)]
    descales = [({name: x}, {name: x.tolist()}) for name, x in zip(("q_descale", "k_descale", "v_descale"), factors)]
    of_8_bits = as_e4m3(plain)
    none = dict.fromkeys(("q_descale", "k_descale", "v_descale"))
    yield "flash of 8 bits", Entry(aten._scaled_dot_product_flash_attention.quantized, of_8_bits | none,
                                   [scale, (dict(is_causal=True), dict(causal=1)), *descales], unused)
    rows = dict(query=q[0].transpose(0, 1), key=k[0].transpose(0, 1), value=v[0].transpose(0, 1), cum_seq_q=STARTS_Q, cum_seq_k=STARTS_K,
                max_q=3, max_k=9, dropout_p=0.0, is_causal=False, return_debug_mask=False)
    own = [scale, (dict(is_causal=True), dict(causal=1)), (dict(max_q=5), {}), (dict(max_k=7), dict(most_keys=7)),
           (dict(window_size_left=3), dict(window_left=3, window_alignment=1)), (dict(window_size_right=2), dict(window_right=2, window_alignment=1)),
           (dict(window_size_left=3, window_size_right=2), dict(window_left=3, window_right=2, window_alignment=1)),
           (dict(cum_seq_q=int32(0, 1, 5)), dict(q_starts=[0, 1, 5])), (dict(cum_seq_k=int32(0, 3, 9)), dict(k_starts=[0, 3, 9])),
           (dict(seqused_k=USED), dict(k_lengths=[3, 2]))]
    names = dict(cum_seq_q="q_starts", cum_seq_k="k_starts", seqused_k="k_lengths", block_table="page_table")
    # These options of newer PyTorches are test_varlen_attn_of_caches's.
    yield "varlen", Entry(FLASH.default, rows, own, unused + " alibi_slopes block_table num_splits", "some", names)
    of_8_bits = as_e4m3(rows) | none
    yield "varlen of 8 bits", Entry(FLASH.quantized, of_8_bits, own + descales, unused + " alibi_slopes", "some", names)


def transformers_entries():
    ours = pytest.importorskip("transformers_attention", reason="transformers 5.24 is missing")
    q, k, v = drawn(2, 4, 8, 64), drawn(2, 2, 8, 64), drawn(2, 2, 8, 64, seed=1)
    plain = dict(module=torch.nn.Module(), query=q, key=k, value=v, attention_mask=None, is_causal=False)
    sinks, bias = drawn(4, dtype=torch.float), drawn(1, 4, 8, 8)
    in_one_row = {name: bits_of(x.transpose(0, 1).flatten(1, 2)) for name, x in (("Q", q), ("K", k), ("V", v))}
    lengths = ours.described("lengths", dict(causal=True), int32(5, 3)[:, None, None].expand(-1, 1, 2))
    yield "transformers", Entry(ours.attention, plain, [
        (dict(scaling=0.25), dict(scale=0.25)), (dict(softcap=2.0), dict(softcap=2.0)), (dict(s_aux=sinks), dict(sinks=sinks.tolist())),
        (dict(is_causal=True), dict(causal=1)), (dict(is_causal=True, sliding_window=4), dict(causal=1, window_left=3, window_right=0)),
        (dict(position_bias=bias), dict(bias=bits_of(bias, 2, 4, 8, 8), bias_dtype=torch.half)),
        (dict(attention_mask=bias > 0), dict(bias=bits_of(bias > 0, 2, 4, 8, 8), bias_dtype=torch.bool)),
        (dict(attention_mask=lengths), dict(causal=1, k_lengths=[5, 3])),
        (dict(cu_seq_lens_q=int32(0, 3, 8)), in_one_row | dict(B=3, Sq=16, Sk=16, q_starts=[0, 3, 8, 16], k_starts=[0, 3, 8, 16])),
        (dict(cu_seq_lens_q=int32(0, 3, 8), cu_seq_lens_k=int32(0, 2, 8)),
         in_one_row | dict(B=3, Sq=16, Sk=16, q_starts=[0, 3, 8, 16], k_starts=[0, 2, 8, 16]))], "dropout others")


ENTRIES = dict(attention=attention_entries, flash_attn=flash_attn_entries, operators=operator_entries, transformers=transformers_entries)


@pytest.fixture
def launches(doors, monkeypatch):
    """Records the kernel calls, including attention()'s."""
    monkeypatch.setattr(sdpa, "attention", stand_in.attention)
    return doors


def arguments_of(function):
    if schema := getattr(function, "_schema", None):
        return {argument.name for argument in schema.arguments}
    return set(inspect.signature(function).parameters)


@needs_no_gpu
@pytest.mark.parametrize("kind", ENTRIES)
def test_each_argument_reaches_the_kernel(launches, kind):
    """Each argument changes exactly its members of SdpaParams, to the given values. Every argument is tested."""
    defaults, covered = {}, {}
    for name, entry in ENTRIES[kind]():
        plain, _ = entry.run(launches)
        numbers = {member: x for member, x in plain.items() if member not in "B Hq Hkv Sq Sk Q K V q_starts k_starts most_keys".split()
                   and not member.endswith("dtype")}
        assert defaults.setdefault(kind, numbers) == numbers, name  # the same defaults in all of them
        for changes, want in entry.rows:
            got, _ = entry.run(launches, **changes)
            different = {member: got[member] for member in got if got[member] != plain[member]}
            assert different == {member: x for member, x in want.items() if x != plain[member]}, (name, list(changes))
        seen = set(entry.plain).union(entry.unused, *(changes for changes, _ in entry.rows))
        covered.setdefault(name.partition(" of ")[0], [set(), None])[0].update(seen)
        if " of " not in name:
            covered[name][1] = arguments_of(entry.call if kind != "flash_attn" else getattr(sys.modules["flash_attn_interface"], name))
    for name, (seen, arguments) in covered.items():
        assert arguments <= seen, (name, arguments - seen)


@needs_no_gpu
def test_pairs_of_arguments_reach_the_kernel(launches):
    """Each pair of arguments changes the members of both, and the build has the features of both: stand_in.recorded() compares
    them."""
    ran, refused = 0, Counter()
    for name, entry in itertools.islice(attention_entries(), 2):
        plain, _ = entry.run(launches)
        kinds = {(*changes, want.get("page_size"), "key_mask" in want): (changes, want) for changes, want in entry.rows
                 if "block_mask" not in changes}  # it was made for a call without other arguments
        for (a, of_a), (b, of_b) in itertools.combinations(kinds.values(), 2):
            if a.keys() & b.keys():
                continue
            try:
                got, _ = entry.run(launches, **a, **b)
            except RuntimeError as error:
                why = re.match("sdpa.attention: (softcap and bias cannot be combined|bias is of shape|e4m3 supports no bias except)", str(error))
                assert why, (name, list(a), list(b), error)
                refused[why[1]] += 1
                continue
            want = plain | of_a | of_b
            has_lengths = any(want[member] for member in stand_in.MEMBERS_OF["USE_LENGTHS"].split())
            if want["bias"] or want["key_mask"]:  # with lengths, a mask of keys is a bias, which has rows for the longest sequence
                want |= {member: got[member] for member in ("bias", "bias_dtype", "key_mask")} if has_lengths else {}
                assert bool(got["bias"]) == (not got["key_mask"]), (name, list(a), list(b))
            assert got == want, (name, list(a), list(b))
            ran += 1
    assert ran > 280 and len(refused) == 3 and refused.total() < 60, (ran, refused)


@needs_no_gpu
@pytest.mark.parametrize("kind", ENTRIES)
def test_scratch_memory(launches, kind):
    """Each launch gets the line's number of bytes from PyTorch's allocator, and frees them when the call returns."""
    def events(nodes):
        for node in nodes:
            yield node
            yield from events(node.children)
    stand_in.SCRATCH.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True) as run:
        for _, entry in ENTRIES[kind]():
            entry.run(launches)
    happened = [event.typed for event in events(run.profiler.kineto_results.experimental_event_tree())]
    sizes = Counter((of.ptr, of.alloc_size) for event, of in happened if event == torch._C._profiler._EventType.Allocation)
    assert stand_in.SCRATCH
    for (place, size), count in Counter(stand_in.SCRATCH).items():
        assert sizes[place, size] >= count and sizes[place, -size] >= count


@needs_no_gpu
def test_lse_of_pytorchs_operators(launches):
    """The efficient operator's LSE has the row count of PyTorch's meta function; rows after the last query are infinite. LSE of a row
    that a mask hides from all keys is inf, with which PyTorch's backward gets weights of 0."""
    efficient, cudnn = (getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention") for name in ("efficient", "cudnn"))
    k = drawn(2, 4, 9, 64)
    for Sq in 1, 31, 32, 33, 64:
        q = drawn(2, 4, Sq, 64)
        lse = efficient(q, k, k, None, True)[1]
        assert lse.shape == efficient(*(x.to("meta") for x in (q, k, k)), None, True)[1].shape
        assert lse[..., Sq:].isposinf().all() and not lse[..., :Sq].isinf().any()
    q, seen = drawn(2, 4, 5, 64), (torch.arange(5) != 3)[:, None].expand(5, 9)
    for mask, operator in itertools.product((seen, torch.zeros(5, 9).half().masked_fill(~seen, -torch.inf)), (efficient, cudnn)):
        lse = operator(q, k, k, mask, True)[1][:, :, :5]
        assert lse[:, :, 3].isposinf().all() and lse.isfinite().sum() == lse.numel() - lse[:, :, 3].numel()


def is_integer(x):
    return isinstance(x, torch.Tensor) and x.dtype == torch.int32


@needs_no_gpu
def test_what_modifications_refuse(launches):
    """The errors of eager calls."""
    q, x, n = drawn(1, 2, 4, 64), torch.ones(9), torch.ones(9, dtype=torch.int32)
    for options, words in (
            (dict(args=[torch.ones(9, 2)[:, 0]]), "x0 of args is not a contiguous float32 tensor with elements on cpu"),
            (dict(args=[torch.ones(0)]), "x0 of args is not a contiguous float32 tensor with elements on cpu"),
            (dict(mask_mod="i0[q] < i1[k]", args=[x, n, n[::2]]), "i1 of args is not a contiguous int32 tensor with elements on cpu"),
            (dict(args=[]), "args has no x0; its float32 tensors are x0"), (dict(args=[x, x]), "args has x1, which neither score_mod nor"),
            (dict(score_mod="s - x0[r]"), "score_mod: 'r' at character 8 is not allowed there"),
            (dict(softcap=2.0), "softcap and bias cannot be combined with score_mod or mask_mod; write them into the expression, as in "),
            (dict(bias=torch.ones(4, 4)), "softcap and bias cannot be combined with score_mod or mask_mod; write them into the expression, as in "),
            (dict(score_mod=None, mask_mod="i0[q] < 2", args=[n], softcap=2.0), "softcap and bias cannot be combined")):
        with pytest.raises((RuntimeError, ValueError), match=f"^sdpa.attention: {words}"):
            sdpa.attention(q, q, q, **dict(score_mod="s - x0[h]", args=[x]) | options)
    assert not launches


@needs_no_gpu
def test_modifications_are_compiled(launches):
    """A compiled graph reads the current contents of the arrays and of a kept map. The operator passes opcheck."""
    tensors = drawn(1, 2, 5, 64), drawn(1, 1, 9, 64), drawn(1, 1, 9, 64, seed=1)
    documents, tiles = int32(*[0] * 4, *[1] * 5), torch.ones(1 * 2 * 5, dtype=torch.uint8)
    mods, rest = ["s - x0[h] * real(q + Sk - Sq - k)", "i0[q] == i0[k]"], (0, -1, -1, 0, None, 0.0, *[None] * 8, 0, None, 0, None, False, False)
    made_for = sdpa.block_mask(*tensors, score_mod=mods[0], mask_mod=mods[1], args=[torch.ones(2), documents]).made_for

    def run(q, k, v, slopes, documents, tiles):
        return sdpa.OPERATOR(q, k, v, *rest, *mods, slopes, None, None, None, documents, None, tiles, made_for)
    compiled, outs = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=False), []
    for slopes in torch.tensor([0.5, 0.25]), torch.tensor([0.0, 1.0]):
        launches.clear()
        outs += [compiled(*tensors, slopes, documents, tiles)[0], run(*tensors, slopes, documents, tiles)[0]]
        assert [call.bias_map for call in launches] == [stand_in.bits(tiles)] * 2
        bias = -slopes[:, None, None] * (torch.arange(5)[:, None] + 4 - torch.arange(9))
        assert rel_rms(outs[-1], reference(*tensors, documents[:5, None] == documents, bias=bias)[0]) <= LIMITS[torch.half]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[2], outs[3]) and not torch.equal(outs[0], outs[2])
    tensors[0].requires_grad_()
    torch.library.opcheck(sdpa.OPERATOR, (*(x.detach() for x in tensors), *rest, *mods, slopes, None, None, None, documents, None, tiles, made_for), test_utils=OPCHECKS)
    with pytest.raises(NotImplementedError, match="^sdpa.attention: no backward, since there is no stand-in; PyTorch has no backward with score_mod or"):
        compiled(*tensors, slopes, documents, tiles)[0].sum().backward()


@needs_no_gpu
def test_block_mask(launches):
    """The map is made with the parameters of the launch. The same call takes it, also with other contents, strides and scales. A call
    that differs in anything else is refused with the first difference."""
    q, k, v = drawn(2, 4, 5, 64), drawn(2, 2, 9, 64), drawn(2, 2, 9, 64, seed=1)
    bias, hidden, docs = drawn(4, 5, 9), drawn(2, 1, 5, 9) > 0, int32(*range(9))
    for options in (dict(mask_mod="i0[q] == i0[k]", args=[docs]), dict(bias=bias, causal="br"), dict(bias=hidden, bias_keys=9, batch_invariant=True),
                    dict(mask_mod="q > k", window=(7, 3, "tl"), score_mod="-s"), dict(mask_mod="h < k", sinks=drawn(4), k_lengths=int32(9, 8))):
        launches.clear()
        kept = sdpa.block_mask(q, k, v, **options)
        assert not launches and kept.tiles.shape == (2 * 4 * 5,) and kept.tiles.unique().tolist() == [len(stand_in.MAPS)]
        want = sdpa.attention(q, k, v, **options)
        assert torch.equal(sdpa.attention(q, k, v, **options, block_mask=kept), want)
        with_it, plain = launches.pop(), launches.pop()
        made = stand_in.MAPS[-1]
        assert with_it.bias_map == stand_in.bits(kept.tiles) and plain.bias_map is None
        assert vars(with_it) == vars(plain) | dict(bias_map=with_it.bias_map) == vars(made) | dict(bias_map=with_it.bias_map)
    options = dict(mask_mod="i0[q] == i0[k]", args=[docs], causal="br", window=(7, None, "tl"))
    kept, other = sdpa.block_mask(q, k, v, **options), dict(k=drawn(2, 2, 9, 64, seed=3), v=v)
    as_views = dict(q=q.transpose(1, 2).contiguous().transpose(1, 2), args=[docs + 1])
    for changes in other, as_views, dict(scale=0.5), dict(return_lse=True):
        sdpa.attention(**dict(q=q, k=k, v=v) | options | changes, block_mask=kept)
    more = dict(k=drawn(2, 2, 8, 64), v=drawn(2, 2, 8, 64))
    for changes, words in (
            (dict(mask_mod="i0[q] == i0[k] && q < 9"), r"mask_mod='i0\[q\] == i0\[k\]', and this call has mask_mod='i0\[q\] == i0\[k\] && q < 9'"),
            (dict(score_mod="-s"), "score_mod='', and this call has score_mod='-s'"), (dict(causal="tl"), "causal=1, and this call has causal=2"),
            (dict(causal=None), "causal=1, and this call has causal=0"), (dict(window=(6, None, "tl")), "window_left=7, and this call has window_left=6"),
            (dict(window=(7, 0, "tl")), "window_right=-1, and this call has window_right=0"),
            (dict(window=(7, None, "br")), "window_alignment=2, and this call has window_alignment=1"),
            (dict(batch_invariant=True), "batch_invariant=0, and this call has batch_invariant=1"), (dict(sinks=drawn(4)), "options=0, and this call has options=2"),
            (dict(q=q[:, :, :4]), "Sq=5, and this call has Sq=4"), (more, "Sk=9, and this call has Sk=8"), (dict(q=q[:, :2]), "Hq=4, and this call has Hq=2"),
            (dict(k=k[:, :1], v=v[:, :1]), "Hkv=2, and this call has Hkv=1"), (dict(q=q[:1], k=k[:1], v=v[:1]), "B=2, and this call has B=1"),
            (dict(q=q[..., :32], k=k[..., :32]), "D=64, and this call has D=32"), (dict(v=v[..., :32]), "Dv=64, and this call has Dv=32"),
            (dict(q=q.bfloat16(), k=k.bfloat16(), v=v.bfloat16()), "dtype=float16, and this call has dtype=bfloat16")):
        with pytest.raises(RuntimeError, match=f"^sdpa.attention: block_mask was made for {words}$"):
            sdpa.attention(**dict(q=q, k=k, v=v) | options | changes, block_mask=kept)
    of_bias = sdpa.block_mask(q, k, v, bias=bias)
    for one, words in ((bias[:1], "bias of each head=1, and this call has bias of each head=0"), (hidden, "options=16, and this call has options=32"),
                       (bias.expand(2, 4, 5, 9).contiguous(), "bias of each batch=0, and this call has bias of each batch=1")):
        with pytest.raises(RuntimeError, match=f"^sdpa.attention: block_mask was made for {words}$"):
            sdpa.attention(q, k, v, bias=one, block_mask=of_bias)
    with pytest.raises(RuntimeError, match="^sdpa.attention: block_mask was made for bias_keys=0, and this call has bias_keys=3$"):
        sdpa.attention(q, k, v, bias=bias[..., :3], bias_keys=3, block_mask=of_bias)
    nothing = sdpa.block_mask(q[:0], k[:0], v[:0], mask_mod="q < k")
    assert nothing.tiles.numel() == 0 and sdpa.attention(q[:0], k[:0], v[:0], mask_mod="q < k", block_mask=nothing).shape == (0, 4, 5, 64)
    needs_grad = sdpa.block_mask(q.clone().requires_grad_(), k, v, **options)
    assert needs_grad.made_for == kept.made_for


@needs_no_gpu
def test_a_kept_map_of_a_line(glue, monkeypatch):
    """sdpa.cu on the CPU backend, with documents. The kernel skips the tiles of the kept map even after the documents have changed."""
    monkeypatch.setattr(sdpa, "attention", stand_in.attention)
    q, k, v = drawn(1, 4, 256, 64), drawn(1, 2, 256, 64), drawn(1, 2, 256, 64, seed=1)
    documents = (torch.arange(4 * 256).view(4, 256) // torch.tensor([128, 256, 128, 128])[:, None]).int() % 4
    slopes = torch.tensor([0.5, 0.0, 0.125, 0.25])
    options = dict(mask_mod="i0[h * Sq + q] == i0[h * Sk + k]", score_mod="s - x0[h] * abs(real(q - k))", args=[documents, slopes])

    def want():
        distance = (torch.arange(256)[:, None] - torch.arange(256)).abs()
        return reference(q, k, v, documents[:, :, None] == documents[:, None], bias=-slopes[:, None, None] * distance)[0]
    with stand_in.kernels(glue, stand_in.loader_of("wgmma_lazy BLOCK_M=128 NUM_WARPS=8 BLOCK_N=64", [documents, slopes])):
        kept = sdpa.block_mask(q, k, v, **options)
        first = want()
        for block_mask in None, kept:
            assert rel_rms(sdpa.attention(q, k, v, **options, block_mask=block_mask), first) <= LIMITS[torch.half]
        documents.zero_()
        second = want()
        assert rel_rms(sdpa.attention(q, k, v, **options), second) <= LIMITS[torch.half] < 0.1 < rel_rms(first, second)
        # The map still hides the tiles of the former documents.
        assert rel_rms(sdpa.attention(q, k, v, **options, block_mask=kept), first) <= LIMITS[torch.half]
        with pytest.raises(RuntimeError, match="^sdpa.attention: x0 is a null pointer, but .*SCORE_MOD or MASK_MOD"):
            by_operator(q, k, v, score_mod=options["score_mod"], mask_mod=options["mask_mod"], i0=documents)
        tiles = kept.tiles[4:]
        with pytest.raises(RuntimeError, match="^sdpa.attention: bias_map has [0-9]+ bytes, but the map of this problem has [0-9]+; "):
            sdpa.attention(q, k, v, **options, block_mask=kept._replace(tiles=tiles))
    assert {*stand_in.STREAMS} == {stand_in.OWN_STREAM}  # of the map and of the kernels


def alibi(H, Sk, device="cpu"):
    """ALiBi by the key's position, [1,H,1,Sk]: the last keys of the first head have a bias of about Sk / 2."""
    slopes = 2.0 ** -(8 * (torch.arange(H, device=device) + 1) / (H + 3))
    return slopes[:, None, None] * torch.arange(Sk, device=device)


@needs_no_gpu
@pytest.mark.parametrize("line", ("mma_lazy", *(pytest.param(line, marks=pytest.mark.long) for line in ("scalar_async2", "wgmma_lazy"))))
def test_a_float32_bias_is_read_as_it_is(glue, line):
    """sdpa.cu on the CPU backend, in bf16, which would round the bias of the last keys to steps of Sk / 256."""
    with stand_in.kernels(glue, stand_in.loader_of(f"{line} DTYPE=BF16 USE_BIAS=3", [])):
        for Sk in (256, 2048):
            q, k, v = drawn(1, 8, 64, 64), drawn(1, 4, Sk, 64), drawn(1, 4, Sk, 64, seed=1)
            bias = alibi(8, Sk)
            q, k, v = (x.bfloat16() for x in (q, k, v))
            want = reference(q, k, v, bias=bias)[0]
            got = stand_in.attention(q, k, v, bias=bias)
            assert rel_rms(got, want) <= 4e-3 < 2e-2 < rel_rms(reference(q, k, v, bias=bias.bfloat16())[0], want), Sk


@needs_no_gpu
@pytest.mark.parametrize("causal", (False, True))
def test_alibi_slopes(launches, causal):
    """FlashAttention's formula, with a slope for each head or for each sequence and head, for padded and packed sequences."""
    import flash_attn_interface as fa
    q, k, v = drawn(2, 5, 4, 64), drawn(2, 9, 2, 64), drawn(2, 9, 2, 64, seed=1)
    for slopes, softcap in itertools.product((drawn(4, dtype=torch.float).abs(), drawn(2, 4, dtype=torch.float).abs()), (0.0, 2.0)):
        options = dict(alibi_slopes=slopes, causal=causal, softcap=softcap)
        rows = [x.flatten(0, 1)[:n] for x, n in ((q, 8), (k, 14), (v, 14))]
        packed, lse = fa.flash_attn_varlen_func(*rows, int32(0, 5, 8), int32(0, 9, 14), 5, 9, return_attn_probs=True, **options)
        out = fa.flash_attn_func(q, k, v, **options)
        for got, lengths in ((out, [(5, 9), (5, 9)]), ([packed[:5], packed[5:8]], [(5, 9), (3, 5)])):
            for b, (Sq, Sk) in enumerate(lengths):
                i, j = torch.arange(Sq)[:, None], torch.arange(Sk)
                bias = -slopes.expand(2, 4)[b, :, None, None] * (i + Sk - Sq - j).abs()
                tensors = [x[b, :n].transpose(0, 1)[None] for x, n in ((q, Sq), (k, Sk), (v, Sk))]
                want, _ = reference(*tensors, visible(Sq, Sk, "br" if causal else None, (None, None), "cpu"), softcap=softcap, bias=bias)
                assert rel_rms(got[b].transpose(0, 1), want[0]) <= LIMITS[torch.half]


@needs_no_gpu
@pytest.mark.parametrize("kind", ENTRIES)
def test_integer_tensors_of_users(launches, kind):
    """Any layout and type gives the same results as a plain tensor, or an error that names the argument."""
    right, refused = 0, 0
    for name, entry in ENTRIES[kind]():
        given = [changes for changes, _ in entry.rows if any(map(is_integer, changes.values()))]
        if any(map(is_integer, entry.plain.values())):
            given.append({argument: x for argument, x in entry.plain.items() if is_integer(x)})
        for changes in given:
            want, results = entry.run(launches, **changes)
            for argument, x in changes.items():
                if not is_integer(x) or argument in ("scheduler_metadata", "rotary_seqlens", "attention_mask"):
                    continue
                for layout, other in stand_in.integer_layouts(x):
                    try:
                        got, out = entry.run(launches, **changes | {argument: other})
                    except RuntimeError as error:
                        its_name = entry.names.get(argument, argument)
                        assert entry.integers == "some" and layout != "plain, torch.int32", (name, argument, layout, error)
                        assert re.search(rf"^sdpa.attention: {its_name} is not an? ", str(error)), (name, argument, layout, error)
                        refused += 1
                        continue
                    right += 1
                    same = {member for member in got if got[member] != want[member]} - {"page_stride"}
                    assert not same and all(torch.equal(a, b) for a, b in zip(out, results, strict=True)), (name, argument, layout, same)
    assert right and (refused > 0) == (kind in ("attention", "operators"))


def efficient_backward_on_cpu(given):
    """The memory-efficient backward, from O and LSE, with the layouts that PyTorch's kernel reads or checks."""
    grad, q, k, v, o, bias = (given[name] for name in ("grad_out_", "query", "key", "value", "out", "attn_bias"))
    (B, H, Sq, D), Sk = q.shape, k.shape[2]
    assert k.shape[1] == v.shape[1] == H and {x.dtype for x in (grad, q, k, v, o)} == {q.dtype}
    assert o.transpose(1, 2).is_contiguous() and given["dropout_p"] == 0 and list(given["grad_input_mask"]) == [True] * 3 + [False]
    lse = given["logsumexp"]
    assert lse.shape == (B, H, -(-Sq // 32) * 32) and lse.is_contiguous() and (lse[..., Sq:] == torch.inf).all()
    scale = D ** -0.5 if given.get("scale") is None else given["scale"]
    S = q.double() @ k.double().transpose(2, 3) * scale
    if bias is not None:
        assert bias.shape == (B, H, Sq, Sk) and bias.dtype == q.dtype and bias.stride(3) == 1
        assert all(stride % 8 == 0 for stride in bias.stride()[:3]) and bias.data_ptr() % 16 == 0
        S = S + bias.double()
    if given.get("is_causal"):
        S = S.masked_fill(~visible(Sq, Sk, "tl", (None, None), "cpu"), -torch.inf)
    P = torch.exp(S - lse[..., :Sq, None].double())
    dS = P * (grad.double() @ v.double().transpose(2, 3) - (grad.double() * o.double()).sum(-1, keepdim=True))
    dq, dk, dv = dS @ k.double() * scale, dS.transpose(2, 3) @ q.double() * scale, P.transpose(2, 3) @ grad.double()
    return *(dx.to(q.dtype) for dx in (dq, dk, dv)), torch.empty(0)


@pytest.fixture
def backwards(glue):
    """The backend that PyTorch would choose, and the arguments of its backwards. The memory-efficient one computes gradients, the
    others return zeros."""
    library, asked = torch.library.Library("aten", "IMPL"), SimpleNamespace(choice=SDPBackend.FLASH_ATTENTION, calls=[])

    def recorder(name, result=lambda given: tuple(torch.zeros_like(given[one]) for one in ("query", "key", "value"))):
        names = [argument.name for argument in getattr(torch.ops.aten, name).default._schema.arguments]

        def backward(*x, **more):
            given = dict(zip(names, x)) | more
            asked.calls.append((name, given))
            return result(given)
        library.impl(name, backward, "XLA" if name == "_flash_attention_backward" else "CPU")  # as in doors()
    recorder("_flash_attention_backward"), recorder("_cudnn_attention_backward")
    recorder("_scaled_dot_product_efficient_attention_backward", efficient_backward_on_cpu)
    with warnings.catch_warnings(action="ignore"):  # PyTorch's own choice is known
        library.impl("_fused_sdp_choice", lambda *_, **__: int(asked.choice), "CPU")
    with stand_in.kernels(glue):
        yield asked
    library._destroy()


@needs_no_gpu
def test_each_argument_reaches_a_backward(backwards):
    """Arguments of attention() reach FlashAttention's and cuDNN's backward. If only one side of a window is limited, FlashAttention's
    gets the number of keys for the other."""
    q, k, v = (x.requires_grad_() for x in (drawn(2, 4, 5, 128), drawn(2, 2, 9, 128), drawn(2, 2, 9, 128, seed=1)))
    bias, hidden = drawn(1, 4, 5, 9), drawn(2, 1, 5, 9) > 0
    plain = dict(max_q=5, max_k=9, dropout_p=0.0, is_causal=False, scale=None)
    cases = [(SDPBackend.FLASH_ATTENTION, options, dict(window_size_left=-1, window_size_right=-1) | want) for options, want in (
        ({}, {}), (dict(causal="br"), dict(is_causal=True)), (dict(scale=0.25), dict(scale=0.25)),
        (dict(window=(3, None, "br")), dict(window_size_left=3, window_size_right=9)),
        (dict(window=(None, 2, "br")), dict(window_size_left=9, window_size_right=2)),
        (dict(window=(3, 2, "br"), causal="br"), dict(is_causal=True, window_size_left=3, window_size_right=2)))]
    cases += [(SDPBackend.CUDNN_ATTENTION, options, want) for options, want in (
        ({}, {}), (dict(causal="tl"), dict(is_causal=True)), (dict(scale=0.25), dict(scale=0.25)), (dict(bias=bias), dict(attn_bias=bias)),
        (dict(bias=hidden), dict(attn_bias=torch.where(hidden, 0.0, -65504.0).half())))]
    for choice, options, want in cases:
        is_flashs = choice == SDPBackend.FLASH_ATTENTION
        backwards.choice = choice
        stand_in.CALLS.clear(), backwards.calls.clear()
        out, lse = stand_in.attention(q, k, v, return_lse=True, **options)
        grad = drawn(2, 4, 5, 128, seed=2)
        torch.autograd.grad(out, (q, k, v), grad)
        (name, given), = backwards.calls
        assert name == ("_flash_attention_backward" if is_flashs else "_cudnn_attention_backward")
        tensors = dict(query=q, key=k, value=v, out=out, grad_out=grad)
        for argument, x in tensors.items():
            assert torch.equal(given[argument], x.transpose(1, 2) if is_flashs else x), (options, argument)
        its_bias, got_bias = want.pop("attn_bias", None), given.get("attn_bias")
        assert got_bias is its_bias is None or torch.equal(got_bias, its_bias)
        rows = lse if its_bias is None else lse.where(lse > -torch.inf, torch.inf)  # those that see no key have P = 0
        assert torch.equal(given["logsumexp"].squeeze(-1), rows)
        assert {name: given.get(name) for name in plain | want} == plain | want, options
        first, = stand_in.CALLS
        out, lse = stand_in.attention(q, k, v, return_lse=True, **options)
        torch.autograd.grad(lse.sum(), (q, k))  # by P @ K, with the same mask
        *_, product = stand_in.CALLS
        assert product.V == product.K == first.K and {name: x for name, x in vars(product).items() if name != "V"} == {
            name: x for name, x in vars(first).items() if name != "V"}, options


@needs_no_gpu
@pytest.mark.parametrize("choice", (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION), ids=str)
def test_the_backward_of_a_shape(backwards, choice):
    """attention() and F.sdpa's operator do not call cuDNN's backward where it gives NaN for rows with an LSE below -88 (a single query; a
    bias with Sq % 128 in 1 ... 64 at D=64), nor for a float32 bias, which it would round. The memory-efficient backward gives correct
    gradients there, and where FlashAttention's does not support the problem: a bias, a top-left mask with Sq != Sk, v's own D."""
    backwards.choice = choice
    cudnns = torch.ops.aten._scaled_dot_product_cudnn_attention
    shapes = [*itertools.product((1, 2, 64, 65, 128, 129, 192, 193), ((64, 64), (128, 128), (128, 64)))]
    others = itertools.cycle(((None, None), ("float32", None), ("mask", None), (None, "tl")))
    for (Sq, (D, Dv)), (kind, causal) in [*((shape, ("bias", None)) for shape in shapes), *zip(shapes, others)]:
        q, k, v = (x.requires_grad_() for x in (drawn(1, 4, Sq, D), drawn(1, 2, 70, D, seed=1), drawn(1, 2, 70, Dv, seed=2)))
        bias = {None: None, "bias": 8 * drawn(4, 1, 70), "float32": 300 + drawn(4, 1, 70, dtype=torch.float), "mask": (drawn(1, 1, Sq, 70) > 0).index_fill(2, torch.tensor(0), False)}[kind]
        grad, wide = drawn(1, 4, Sq, Dv, seed=3), [x.detach().double().requires_grad_() for x in (q, k, v)]
        want = torch.autograd.grad(reference(*wide, visible(Sq, 70, causal, (None, None), "cpu"), bias=bias)[0], wide, grad.double())
        runs = [lambda: stand_in.attention(q, k, v, causal=causal, bias=bias)]  # noqa: B023
        if choice == SDPBackend.CUDNN_ATTENTION and D == Dv:
            heads = [x.repeat_interleave(2, 1) for x in (k, v)]
            runs.append(lambda: cudnns(q, *heads, bias, True, 0.0, causal is not None)[0])  # noqa: B023
        for run in runs:
            backwards.calls.clear()
            got = torch.autograd.grad(run(), (q, k, v), grad)
            (name, _), = backwards.calls
            if choice == SDPBackend.CUDNN_ATTENTION:
                efficient = Sq == 1 or kind == "float32" or (kind is not None and D == 64 and 1 <= Sq % 128 <= 64)
            else:
                efficient = kind is not None or D != Dv or causal is not None
            others = "_cudnn_attention_backward" if choice == SDPBackend.CUDNN_ATTENTION else "_flash_attention_backward"
            assert name == ("_scaled_dot_product_efficient_attention_backward" if efficient else others), (Sq, D, Dv, kind, causal)
            for a, b in zip(got, want):
                assert not efficient or rel_rms(a, b) <= 4e-3, (Sq, D, Dv, kind, causal)
        if efficient and Sq in (1, 65):  # with LSE's gradient, by a second product
            out, lse = stand_in.attention(q, k, v, causal=causal, bias=bias, scale=0.2, return_lse=True, backward="torch")
            of_lse = drawn(*lse.shape, dtype=torch.float)
            wide_out, wide_lse = reference(*wide, visible(Sq, 70, causal, (None, None), "cpu"), 0.2, bias=bias)
            want = torch.autograd.grad((wide_out, wide_lse), wide, (grad.double(), of_lse.double()))
            check_near(torch.autograd.grad((out, lse), (q, k, v), (grad, of_lse)), want, 4e-3, Sq, D, Dv, kind, causal)


@needs_no_gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_our_gradients(backwards, glue, dtype):
    """Compares attention()'s gradients, computed by a stand-in for a backward line, with double: every mask with every feature, padded
    shapes, grouped heads, expanded keys and any strides of dO."""
    pads = dtype == torch.half
    torch.manual_seed(0)
    glue.sdpa_torch_load_backward_by(stand_in.backward_line((64, 128), pads=pads))
    shapes = itertools.cycle(((2, 4, 2, 5, 9, 64, 64), (1, 4, 4, 33, 20, 40, 40), (1, 4, 1, 7, 30, 80, 48), (1, 2, 2, 1, 9, 128, 128),
                              (1, 2, 1, 20, 3, 8, 16)))
    makers = itertools.cycle(GRADS.items())
    for (causal, window), feature in itertools.product(
            ((None, None), ("br", None), ("tl", None), (None, (3, 2, "tl")), ("br", (4, None)), ("tl", (1, 5, "br"))),
            ("", "softcap", "sinks", "scale", "lse", "only lse", "softcap sinks scale lse")):
        B, Hq, Hkv, Sq, Sk, D, Dv = next(shapes)
        name, make = next(makers)
        q, k, v = (drawn(B, S, H, size, dtype=dtype, seed=seed).transpose(1, 2).requires_grad_()
                   for seed, (S, H, size) in enumerate(((Sq, Hq, D), (Sk, Hkv, D), (Sk, Hkv, Dv))))
        sinks = drawn(Hq, dtype=torch.bfloat16).requires_grad_() if "sinks" in feature else None
        scale, cap = 0.3 if "scale" in feature else None, 2.0 if "softcap" in feature else None
        inputs = [x for x in (q, k, v, sinks) if x is not None]
        out, lse = stand_in.attention(q, k, v, causal, window, scale, softcap=cap, sinks=sinks, return_lse=True, backward="sdpa")
        grad, of_lse = make(out.detach()), drawn(*lse.shape, dtype=torch.float) * (lse.detach() > -torch.inf)
        given = slice("only" in feature, 1 + ("lse" in feature))
        stand_in.GRADIENTS.clear()
        got = torch.autograd.grad((out, lse)[given], inputs, (grad, of_lse)[given])
        copies = wide(inputs)
        wide_out, wide_lse = reference(*copies[:3], visible(Sq, Sk, causal, window or (None, None), "cpu"), scale, cap, *copies[3:])
        want = torch.autograd.grad((wide_out, wide_lse.where(lse > -torch.inf, 0))[given], copies, (grad.double(), of_lse.double())[given],
                                   allow_unused=True)
        call, = stand_in.GRADIENTS
        assert call.asked == sdpa.NEEDED and call.dLSE == ("lse" in feature) and not backwards.calls
        if name == "of a row" and D == Dv in (64, 128) and "only" not in feature:
            assert (call.dO, call.d_o) == (grad.data_ptr(), grad.stride()[:3]), "an expanded dO is read as it lies"
        for x, a, b in zip(inputs, got, want):
            assert a.shape == x.shape and a.stride() == x.stride() and a.dtype == x.dtype
            assert rel_rms(a, torch.zeros_like(a) if b is None else b) <= LIMITS[a.dtype], (causal, window, feature, name)
    # Keys with expanded heads have a gradient for each head, and of a batch of 0 there is none.
    k = drawn(1, 1, 9, 64, dtype=dtype).expand(1, 4, 9, 64).requires_grad_()
    q = drawn(1, 4, 5, 64, dtype=dtype, seed=1)
    grad = drawn(1, 4, 5, 64, dtype=dtype, seed=2)
    got, = torch.autograd.grad(stand_in.attention(q, k, k, backward="sdpa"), k, grad)
    wide_k, = wide([k])
    want, = torch.autograd.grad(reference(q.double(), wide_k, wide_k)[0], wide_k, grad.double())
    assert rel_rms(got, want) <= LIMITS[dtype]
    sinks = torch.zeros(4, requires_grad=True)
    got = torch.autograd.grad(stand_in.attention(q[:0], k[:0], k[:0], sinks=sinks).sum(), (k, sinks))
    assert [int(x.count_nonzero()) for x in got] == [0, 0]


def sequences_of(case, device="cpu"):
    """q, k and v, the options of attention() for their lengths, and the rows of each sequence: (batch of q, rows, batch of k, rows)."""
    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=device)  # noqa: E731
    if case == "packed":
        starts, own = ((0, 40, 40, 70, 101), (3, 53, 60, 60, 99)), dict(sizes=((1, 4, 101), (1, 2, 110)))
        options = dict(q_starts=ints(*starts[0]), k_starts=ints(*starts[1]))
        rows = [(0, (a, b), 0, (c, d)) for (a, b), (c, d) in zip(*map(itertools.pairwise, starts))]
    elif case == "padded":
        own, options = dict(sizes=((3, 4, 33), (3, 2, 50))), dict(q_lengths=ints(33, 0, 20), k_lengths=ints(50, 9, 31), k_firsts=ints(0, 2, 7), most_keys=45)
        rows = [(0, (0, 33), 0, (0, 45)), (1, (0, 0), 1, (2, 9)), (2, (0, 20), 2, (7, 31))]
    else:  # packed queries of padded keys
        own, options = dict(sizes=((1, 4, 60), (2, 2, 40))), dict(q_starts=ints(0, 17, 60), k_lengths=ints(40, 23))
        rows = [(0, (0, 17), 0, (0, 40)), (0, (17, 60), 1, (0, 23))]
    return own["sizes"], options, rows


def check_gradients_of_sequences(case, attend, dtype, device="cpu", D=64, count=3):
    """The gradients of every sequence against double, with the first `count` kinds of options. Other rows have zeros, though their dO
    and their rows of q, k and v are NaN."""
    kinds = (None, None, None, True, False), ("tl", (20, 3, "br"), None, True, True), ("br", None, 2.0, False, True)
    for causal, window, cap, has_sinks, of_lse in kinds[:count]:
        (q_size, k_size), options, rows = sequences_of(case, device)
        q, k, v = (drawn(*size, D, dtype=dtype, seed=seed).to(device) for seed, size in enumerate((q_size, k_size, k_size)))
        used = [torch.zeros(x.shape[0], x.shape[2], dtype=torch.bool, device=device) for x in (q, k)]
        for q_batch, own_q, k_batch, own_k in rows:
            used[0][q_batch, slice(*own_q)] = used[1][k_batch, slice(*own_k)] = True
        hide = lambda x, is_used: x.masked_fill_(~is_used[:, None, :, None], torch.nan)  # noqa: E731
        q, k, v = (hide(x, used[i > 0]).requires_grad_() for i, x in enumerate((q, k, v)))
        sinks = drawn(q.shape[1]).float().to(device).requires_grad_() if has_sinks else None
        inputs = [x for x in (q, k, v, sinks) if x is not None]
        out, lse = attend(q, k, v, causal, window, softcap=cap, sinks=sinks, return_lse=True, **options)
        grad = hide(drawn(*out.shape, dtype=dtype, seed=5).to(device), used[0])
        lse_grad = turned(drawn(*lse.shape, dtype=torch.float, seed=6).to(device) * (lse.detach() > -torch.inf))
        given = slice(0, 1 + of_lse)
        got = torch.autograd.grad((out, lse)[given], inputs, (grad, lse_grad)[given])
        want = [torch.zeros_like(x, dtype=torch.double) for x in inputs]
        for q_batch, own_q, k_batch, own_k in rows:
            places = [(q_batch, slice(None), slice(*own_q)), *[(k_batch, slice(None), slice(*own_k))] * 2]
            copies = [x.detach()[place][None].double().requires_grad_() for x, place in zip((q, k, v), places)]
            copies += wide([sinks] if has_sinks else [])
            seen = visible(own_q[1] - own_q[0], own_k[1] - own_k[0], causal, window or (None, None), device)
            wide_out, wide_lse = reference(*copies[:3], seen, None, cap, *copies[3:])
            results = wide_out, wide_lse.where(wide_lse > -torch.inf, 0)
            grads = [x[places[0]][None].double() for x in (grad, lse_grad)]
            for i, dx in enumerate(torch.autograd.grad(results[given], copies, grads[given], allow_unused=True)):
                if dx is not None:
                    want[i][places[i] if i < 3 else ...] += dx[0] if i < 3 else dx
        for i, (a, b) in enumerate(zip(got, want)):
            assert rel_rms(a, b) <= 2 * LIMITS[dtype], (case, causal, window, "qkvs"[i])
            if i < 3:
                assert not a.masked_fill(used[i > 0][:, None, :, None], 0).count_nonzero(), (case, causal, "qkv"[i])


@needs_no_gpu
@pytest.mark.parametrize("case", ("packed", "padded", "packed q"))
def test_our_gradients_of_sequences(backwards, glue, case):
    """Uses a stand-in for a line, then a compiled line on the CPU backend."""
    glue.sdpa_torch_load_backward_by(stand_in.backward_line((64,)))
    check_gradients_of_sequences(case, stand_in.attention, torch.half)
    assert {call.asked for call in stand_in.GRADIENTS} == {sdpa.NEEDED} and not backwards.calls
    glue.sdpa_torch_load_backward_by(stand_in.backward_loader_of("backward_mma BLOCK_N=32"))
    check_gradients_of_sequences(case, stand_in.attention, torch.bfloat16, count=2)  # by one build
    (q_size, k_size), options, _ = sequences_of(case)
    q, k = drawn(*q_size, 64).requires_grad_(), drawn(*k_size, 64)
    with pytest.raises(NotImplementedError, match=r"^sdpa.attention: no backward, since backward='torch' was asked for; attention\(\) does not call PyTorch's"):
        stand_in.attention(q, k, k, backward="torch", **options).sum().backward()


def check_gradients_of_expressions(run, device, arrays, **options):
    """Against double, for expressions with a slope that is not constant, arrays and hidden keys."""
    slopes, documents = arrays
    q, k, v = (drawn(2, H, S, 64, seed=seed).to(device).requires_grad_() for seed, (H, S) in enumerate(((4, 30), (2, 50), (2, 50))))
    grad = drawn(2, 4, 30, 64, seed=5).to(device)
    out = run(q, k, v, "br", score_mod="s + s * abs(s) / 8 - x0[h] * real(q + Sk - Sq - k)", mask_mod="i0[q] == i0[k]", args=arrays, **options)
    got = torch.autograd.grad(out, (q, k, v), grad)
    copies = wide((q, k, v))
    s = copies[0] @ copies[1].repeat_interleave(2, 1).mT / 8
    at_q, at_k = torch.arange(30, device=device)[:, None], torch.arange(50, device=device)
    s = s + s * s.abs() / 8 - slopes.double()[:, None, None] * (at_q + 20 - at_k)
    seen = (at_k <= at_q + 20) & (documents[:30, None] == documents[:50])
    P = s.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0)
    for name, a, b in zip("qkv", got, torch.autograd.grad(P @ copies[2].repeat_interleave(2, 1), copies, grad.double())):
        assert rel_rms(a, b) <= 2 * LIMITS[torch.half], name


@needs_no_gpu
def test_our_gradients_of_expressions(backwards, glue):
    """With a compiled line on the CPU backend. PyTorch's backward cannot be asked for."""
    arrays = torch.tensor([0.5, 0.25, 0.1, 0.0]), int32(*(n // 13 for n in range(50)))
    glue.sdpa_torch_load_backward_by(stand_in.backward_loader_of("backward_mma BLOCK_N=32", arrays))
    check_gradients_of_expressions(stand_in.attention, "cpu", arrays)
    assert not backwards.calls
    with pytest.raises(NotImplementedError, match="backward='torch' was asked for; PyTorch has no backward with score_mod or mask_mod$"):
        check_gradients_of_expressions(stand_in.attention, "cpu", arrays, backward="torch")


@needs_gpu
@pytest.mark.parametrize("backward", (None, "deterministic"))
def test_our_gradients_of_expressions_on_a_gpu(glue, backward):
    arrays = torch.tensor([0.5, 0.25, 0.1, 0.0], device="cuda"), torch.arange(50, dtype=torch.int32, device="cuda") // 13
    check_gradients_of_expressions(sdpa.attention, "cuda", arrays, backward=backward)


def biases(Sq, Sk):
    """Shapes of a bias beside q [2,4,Sq,D] and k [2,2,Sk,D], and options. A negative size is an expanded dimension."""
    return [((1, 4, Sq, Sk), {}), ((2, 1, Sq, Sk), {"causal": "br"}), ((1, 1, 1, Sk), {}), ((2, 4, Sq, Sk), {"softcap": 2.0}),
            ((4, Sq, 1), {}), ((Sq, Sk), {"causal": "tl", "window": (9, 5, "br")}), ((Sk,), {"sinks": True}), ((2, 1, 1, 1), {"of_lse": True}),
            ((-2, 4, Sq, Sk), {}), ((1, 4, Sq, 7), {"bias_keys": 7}), ((1, 4, 1, Sk), {"lengths": True}), ((), {"of_lse": True}),
            ((2, 1, 1, Sk), {"hides": True})]


def check_gradients_of_biases(run, device, chosen=slice(None), D=64, Sq=20, Sk=50):
    """The gradients against double. A bias may be the only input that needs one; a bool bias has none."""
    cases = zip(biases(Sq, Sk), itertools.cycle((torch.half, torch.float, torch.bfloat16)))
    for n, ((shape, options), bias_dtype) in [*enumerate(cases)][chosen]:
        options = dict(options)
        has_sinks, of_lse, has_lengths, hides = (options.pop(name, False) for name in ("sinks", "of_lse", "lengths", "hides"))
        q, k, v = (drawn(2, H, S, D, seed=seed).to(device).requires_grad_(n % 4 > 0) for seed, (H, S) in enumerate(((4, Sq), (2, Sk), (2, Sk))))
        whole = drawn(*map(abs, shape), dtype=bias_dtype, seed=7).to(device)
        if hides:
            whole = whole.masked_fill(whole < 0, -torch.inf).index_fill(0, torch.tensor([1], device=device), -torch.inf)
        bias = whole.requires_grad_().narrow(0, 0, 1).expand(*map(abs, shape)) if shape and shape[0] < 0 else whole.requires_grad_()
        sinks = drawn(4).float().to(device).requires_grad_() if has_sinks else None
        lengths = dict(k_lengths=int32(Sk, 9).to(device), q_lengths=int32(Sq, 6).to(device)) if has_lengths else {}
        out, lse = run(q, k, v, bias=bias, sinks=sinks, return_lse=True, **options, **lengths)
        inputs = [x for x in (q, k, v, sinks, whole) if x is not None and x.requires_grad]
        grad, lse_grad = drawn(*out.shape, seed=5).to(device), turned(drawn(*lse.shape, dtype=torch.float, seed=6).to(device))
        keys, queries = torch.arange(Sk, device=device), torch.arange(Sq, device=device)[:, None]
        exists = torch.ones(2, 1, Sq, Sk, dtype=torch.bool, device=device)
        if has_lengths:
            exists[1] = (keys < 9) & (queries < 6)
            out, lse, grad, lse_grad = ((x.masked_fill(~exists[..., :1], 0) if x.dim() == 4 else x) for x in (out, lse, grad, lse_grad))
        given = slice(0, 1 + of_lse)
        got = torch.autograd.grad((out, lse)[given], inputs, (grad, lse_grad)[given])
        copies = dict(zip(map(id, inputs), wide(inputs)))
        wide_q, wide_k, wide_v, wide_bias, wide_sinks = (None if x is None else copies.get(id(x), x.detach().double()) for x in (q, k, v, whole, sinks))
        if options.get("bias_keys"):
            wide_bias = F.pad(wide_bias, (Sk - 7, 0))
        seen = visible(Sq, Sk, options.get("causal"), options.get("window", (None, None)), device) & exists
        own_bias = wide_bias.narrow(0, 0, 1) if shape and shape[0] < 0 else wide_bias
        wide_out, wide_lse = reference(wide_q, wide_k, wide_v, seen, None, options.get("softcap"), wide_sinks, own_bias)
        results = (wide_out, wide_lse)[given]
        want = torch.autograd.grad(results, list(copies.values()), [x.double() for x in (grad, lse_grad)[given]])
        for x, a, b in zip(inputs, got, want):
            assert a.shape == x.shape and a.dtype == x.dtype
            scale = b.square().mean().sqrt() if b.count_nonzero() else 1
            # The gradient of a bias that all keys share is 0, unless LSE has a gradient.
            error = (a.double() - b).square().mean().sqrt() / (scale if scale > 1e-6 else 1)
            assert error <= 2 * LIMITS[torch.half if a.dtype == torch.float else a.dtype], (shape, options, bias_dtype, tuple(x.shape))
        if hides:
            assert not got[-1][1].count_nonzero() and not got[-1][whole == -torch.inf].count_nonzero()


@needs_no_gpu
def test_our_gradients_of_biases(backwards, glue):
    """Uses a stand-in for a line, then a compiled line on the CPU backend."""
    glue.sdpa_torch_load_backward_by(stand_in.backward_line((64,)))
    check_gradients_of_biases(stand_in.attention, "cpu")
    assert not backwards.calls
    glue.sdpa_torch_load_backward_by(stand_in.backward_loader_of("backward_mma BLOCK_N=32"))
    check_gradients_of_biases(stand_in.attention, "cpu", slice(1, 2))


@needs_gpu
@pytest.mark.parametrize("backward, D", (("sdpa", 64), ("deterministic", 64), ("sdpa", 128), (None, 256)))
def test_our_gradients_of_biases_on_a_gpu(glue, backward, D):
    chosen = slice(None if (backward, D) == ("sdpa", 64) else 3)  # nvcc builds a line for each set of options
    run = functools.partial(sdpa.attention, backward=backward)
    check_gradients_of_biases(run, "cuda", chosen, D, Sq=150, Sk=200)
    if D == 64:
        check_gradients_of_biases(run, "cuda", slice(3), D)  # by the lines for few rows
    q, bias = drawn(8, 12, 300, D).cuda().requires_grad_(), drawn(1, 12, 300, 300, dtype=torch.float).cuda().requires_grad_()
    runs = [torch.autograd.grad(sdpa.attention(q, q, q, bias=bias, backward=backward).square().sum(), (q, bias)) for _ in range(2)]
    assert torch.equal(runs[0][1], runs[1][1]) and (backward == "sdpa" or torch.equal(runs[0][0], runs[1][0]))


@needs_gpu
def test_the_gradient_of_a_mask(glue):
    """F.scaled_dot_product_attention with an attn_mask that needs a gradient runs our kernels, or PyTorch's in a compiled function."""
    sdpa.activate()
    try:
        for shape, dtype, D, requires_grad in (((1, 4, 32, 48), torch.half, 64, True), ((4, 32, 48), torch.float, 128, True), ((2, 1, 1, 48), torch.half, 64, False)):
            tensors = [drawn(2, 4, S, D, seed=seed).cuda().requires_grad_(requires_grad) for seed, S in enumerate((32, 48, 48))]
            mask = drawn(*shape, dtype=dtype).cuda().requires_grad_()
            inputs = [x for x in (*tensors, mask) if x.requires_grad]
            run = lambda *x: F.scaled_dot_product_attention(*x[:3], attn_mask=x[3])  # noqa: E731
            assert sdpa.why_not(*tensors, attn_mask=mask) == ""
            out = run(*tensors, mask)
            grad = torch.randn_like(out)
            got, names = kernels(lambda: torch.autograd.grad(out, inputs, grad))  # noqa: B023
            assert any("sdpa_backward_bias" in name for name in names), names
            results = [got]
            if dtype == torch.half:
                results.append(torch.autograd.grad(torch.compile(run, fullgraph=True)(*tensors, mask), inputs, grad))
            copies = wide((*tensors, mask))
            want = torch.autograd.grad(reference(*copies[:3], bias=copies[3])[0], [x for x, y in zip(copies, (*tensors, mask)) if y.requires_grad], grad.double())
            for found in results:
                for x, a, b in zip(inputs, found, want):
                    assert a.shape == x.shape and rel_rms(a, b) <= 2 * LIMITS[torch.half], (shape, tuple(x.shape))
    finally:
        torch.nn.attention.restore_flash_attention_impl()


@needs_no_gpu
def test_the_gradients_of_a_line(backwards, glue):
    """Runs the kernels on the CPU backend through bindings/sdpa.h: D is padded, dO is expanded, and a refusal is an exception."""
    glue.sdpa_torch_load_backward_by(stand_in.backward_loader_of("backward_mma BLOCK_N=32"))
    q, k, v = (drawn(1, H, S, 40, dtype=torch.bfloat16, seed=seed).requires_grad_() for seed, (H, S) in enumerate(((4, 20), (2, 50), (2, 50))))
    sinks = drawn(4).requires_grad_()
    out, lse = stand_in.attention(q, k, v, "br", (30, None), softcap=3.0, sinks=sinks, return_lse=True, backward="sdpa")
    grads = drawn(1, 1, 1, 40, dtype=torch.bfloat16).expand(out.shape), drawn(*lse.shape, dtype=torch.float)
    got = torch.autograd.grad((out, lse), (q, k, v, sinks), grads)
    copies = wide((q, k, v, sinks))
    wide_results = reference(*copies[:3], visible(20, 50, "br", (30, None), "cpu"), None, 3.0, copies[3])
    for x, a, b in zip("qkvs", got, torch.autograd.grad(wide_results, copies, [x.double() for x in grads])):
        assert rel_rms(a, b) <= LIMITS[torch.bfloat16], x
    with pytest.raises(NotImplementedError, match="^sdpa.attention: no backward, since softcap=1e-20: "):
        sdpa.BACKWARD(grads[0], q, k, v, out, lse, 0, -1, -1, 0, None, softcap=1e-20, backward="sdpa")


@needs_no_gpu
def test_which_backward_runs(backwards, glue):
    """The choice of our backward or PyTorch's depends on PyTorch's kernels, the table of lines, determinism and the caller. Tested through
    attention() and the operators of F.scaled_dot_product_attention."""
    def load(sizes=(64, 128), faster=()):
        glue.sdpa_torch_load_backward_by(stand_in.backward_line(sizes, faster))

    def ran(run, x=None):
        """Returns what computed the gradients: "torch", or the request to our lines."""
        stand_in.GRADIENTS.clear(), backwards.calls.clear()
        torch.autograd.grad(run(), q if x is None else x)
        assert bool(stand_in.GRADIENTS) != bool(backwards.calls)
        return [call.asked for call in stand_in.GRADIENTS] or "torch"
    tensors = q, k, v = [drawn(1, 4, 5, 128, seed=seed).requires_grad_() for seed in range(3)]
    long, bias = drawn(1, 4, 9, 128, seed=4), drawn(4, 5, 5)
    attend = lambda **options: lambda: stand_in.attention(*tensors, **options).sum()  # noqa: E731
    of_lse = lambda **options: lambda: stand_in.attention(*tensors, return_lse=True, **options)[1].sum()  # noqa: E731
    needed, repeats = [sdpa.NEEDED], [sdpa.NEEDED + sdpa.DETERMINISTIC]
    for choice in SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION:
        backwards.choice = choice
        load()
        for run, want in (
                (attend(), "torch"), (attend(causal="tl"), "torch"), (attend(bias=bias), "torch"), (attend(backward="torch"), "torch"),
                (of_lse(backward="torch"), "torch"), (of_lse(bias=bias), needed), (of_lse(), needed), (attend(softcap=2.0), needed),
                (attend(bias=bias.float()), needed), (attend(bias=bias, causal="tl"), needed), (attend(bias=bias[..., :3], bias_keys=3), needed),
                (attend(bias=bias.detach().requires_grad_()), needed), (attend(bias=bias.float(), backward="torch"), "torch"),
                (attend(sinks=torch.zeros(4)), needed), (attend(backward="sdpa"), needed), (attend(backward="deterministic"), repeats),
                (lambda: stand_in.attention(q[:, :, :1], k, v).sum(), needed),  # cuDNN's may give NaN
                (lambda: stand_in.attention(q, long, long, window=(2, 2, "tl")).sum(), needed)):
            assert ran(run) == want
        load(faster=(128,))
        assert ran(attend()) == ran(attend(causal="br")) == ran(attend(bias=bias)) == [0] and ran(attend(backward="torch")) == "torch"
        load(faster=(64,))
        assert ran(attend()) == "torch"
        load(sizes=(64,))  # no line for D=128
        assert ran(of_lse()) == "torch"
        for options, words in ((dict(softcap=2.0), "there is no stand-in; PyTorch has no backward with softcap or sinks"),
                               (dict(backward="sdpa"), "there is no stand-in")):
            with pytest.raises(NotImplementedError, match=f"^sdpa.attention: no backward, since {words}$"):
                attend(**options)().backward()
    load()
    of_bias = bias.detach().requires_grad_()
    for options, words in ((dict(backward="torch", softcap=2.0), "backward='torch' was asked for; PyTorch has no backward with softcap or sinks"),
                           (dict(backward="torch", bias=of_bias), r"backward='torch' was asked for; attention\(\) does not call PyTorch's backward "
                                                                  "for the gradient of a bias"),
                           (dict(bias=of_bias[..., :3], bias_keys=3, k_lengths=int32(5)), "a bias of bias_keys has no gradient with lengths; "
                            r"attention\(\) does not call PyTorch's backward with lengths or starts"),
                           (dict(bias=of_bias, q_starts=int32(0, 5)), "a bias of packed sequences has no gradient; "
                            r"attention\(\) does not call PyTorch's backward with lengths or starts")):
        with pytest.raises(NotImplementedError, match=f"^sdpa.attention: no backward, since {words}$"):
            attend(**options)().backward()
    with pytest.raises(ValueError, match="^sdpa.attention: backward='ours' is none of None, 'sdpa', 'deterministic', 'torch'$"):
        attend(backward="ours")()
    with pytest.raises(ValueError, match="^sdpa.activate: backward='deterministic' is none of None, 'sdpa', 'torch'$"):
        sdpa.activate("deterministic")
    # PyTorch's operators.
    cudnns, flashs = (getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention") for name in ("cudnn", "flash"))
    single = q.detach()[:, :, :1].requires_grad_()
    by_cudnn = lambda q=q, mask=None: lambda: cudnns(q, k, v, mask, True, 0.0, mask is None)[0].sum()  # noqa: E731
    by_flash = lambda: flashs(*tensors, 0.0, True)[0].sum()  # noqa: E731
    try:
        for preference, faster, deterministic, want in (
                (None, (), False, "torch"), (None, (128,), False, [0]), (None, (), True, repeats), ("sdpa", (), False, needed),
                ("torch", (128,), False, "torch"), ("torch", (), True, "torch")):
            load(faster=faster)
            glue.sdpa_torch_prefer_backward(sdpa.PREFERENCES[preference])
            torch.use_deterministic_algorithms(deterministic)
            assert ran(by_cudnn()) == ran(by_cudnn(mask=bias[None])) == ran(by_flash) == want, (preference, faster, deterministic)
            assert ran(attend()) == (repeats if deterministic else [0] if faster else "torch")  # attention() has its own argument
            assert (ran(by_cudnn(single), single) == "torch") == (preference == "torch")
    finally:
        torch.use_deterministic_algorithms(False)
        glue.sdpa_torch_prefer_backward(0)
    grad = drawn(1, 4, 5, 128, seed=9)
    load(faster=(128,))
    for causal, run in (("tl", lambda *x: cudnns(*x, None, True, 0.0, True, scale=0.2)[0]), ("br", lambda *x: flashs(*x, 0.0, True, scale=0.2)[0])):
        x = [y.detach().requires_grad_() for y in (q, long, long)]
        copies = wide(x)
        want = torch.autograd.grad(reference(*copies, visible(5, 9, causal, (None, None), "cpu"), 0.2)[0], copies, grad.double())
        check_near(torch.autograd.grad(run(*x), x, grad), want, LIMITS[torch.half], causal)


@needs_no_gpu
def test_our_gradients_in_graphs(backwards, glue):
    """A compiled function, one with dynamic sizes, and a checkpoint give the eager call's gradients, including those of sinks."""
    glue.sdpa_torch_load_backward_by(stand_in.backward_line((64,)))

    def run(q, k, v, sinks):
        out, lse = sdpa.OPERATOR(q, k, v, 1, -1, -1, 0, None, 3.0, None, None, None, sinks, None, None, None, None, 0, backward="sdpa")
        return out.float().square().sum() + lse.sin().sum()
    torch.compiler.reset()
    for S in 9, 12:
        x = [drawn(1, H, S, 40, seed=seed).requires_grad_() for seed, H in enumerate((4, 2, 2))] + [drawn(4).requires_grad_()]
        want = torch.autograd.grad(run(*x), x)
        for other in (torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=S == 12),
                      lambda *x: torch.utils.checkpoint.checkpoint(run, *x, use_reentrant=False)):
            for a, b in zip(torch.autograd.grad(other(*x), x), want):
                assert torch.equal(a, b) and a.stride() == b.stride()


def test_the_lines_of_the_backward(monkeypatch, capsys):
    """Each row of the table is a legal build for all of its sizes, types and features; the first matching row is used."""
    tree = builds.Tree()
    knobs, legal = {name: line.knobs for name, line in tree.read_configs()[0].items()}, []
    for row in sdpa.BACKWARD_LINES:
        assert "BACKWARD=1" in knobs[row.name] and set(row.faster) <= set(row.sizes) and list(row.sizes) == sorted(row.sizes)
        monkeypatch.setattr(sdpa, "BACKWARD_LINES", [row])
        gpu = (row.capabilities[0], 0)
        for size, own in row.sizes.items():
            for dtype, features in itertools.product(HALVES, range(8)):
                asked = sdpa.NEEDED | sdpa.SHORT * row.is_short
                (name, capability, *changes), of_size = sdpa.backward_line_with(gpu, dtype, size - 8, features, asked)
                assert (name, of_size, capability) == (row.name, size * row.pads, gpu)
                assert {*own, f"HEAD_DIM={size}"} <= set(changes) and ("DTYPE=BF16" in changes) == (dtype == torch.bfloat16)
                assert [knob in changes for knob in ("USE_SOFTCAP", "USE_SINKS", "USE_LENGTHS")] == [bool(features >> bit & 1) for bit in range(3)]
            words = builds.changed(knobs[row.name], [word if "=" in word else word + "=1" for word in changes])
            legal.append(" ".join(definition[2:] for definition in builds.definitions(words)))
    assert len(legal) > 10 and not any(test_knobs.refusals([(words, tree.backward_refusals()) for words in legal])), legal
    rows = [sdpa.BackwardRow("atomic", (9,), {128: ()}, False, False, (128,)),
            sdpa.BackwardRow("any", range(8, 100), {64: (), 128: ()}, True, True, ())]
    rows.insert(0, sdpa.BackwardRow("short", (9,), {128: ()}, True, False, (), True))
    monkeypatch.setattr(sdpa, "BACKWARD_LINES", rows)
    found = lambda *x: (sdpa.backward_line_with(*x) or [[None]])[0][0]  # noqa: E731
    assert found((9, 0), torch.half, 128, 0, 0) == found((9, 0), torch.half, 100, 0, sdpa.NEEDED) == "atomic"
    assert found((9, 0), torch.half, 120, 0, 0) is found((9, 0), torch.half, 40, 0, 0) is None
    assert found((9, 0), torch.half, 100, 0, sdpa.NEEDED | sdpa.DETERMINISTIC) == found((8, 0), torch.half, 100, 0, sdpa.NEEDED) == "any"
    assert found((8, 0), torch.half, 100, 0, 0) is None
    shorts = [found((9, 0), torch.half, 128, 0, sdpa.SHORT | more) for more in (0, sdpa.NEEDED, sdpa.NEEDED | sdpa.DETERMINISTIC)]
    assert shorts == ["atomic", "short", "any"]
    assert found((9, 0), torch.half, 128, 0, 0, "-s") is None and found((9, 0), torch.half, 128, 0, 0, "", "q < k") is None
    with pytest.raises(ValueError, match="mask_mod"):
        found((9, 0), torch.half, 100, 0, sdpa.NEEDED, "", "q; k")
    assert found((9, 0), torch.half, 128, 4, 0) is None and found((9, 0), torch.half, 100, 4, sdpa.NEEDED) == "atomic"  # lengths: not measured
    with pytest.raises(sdpa.Unavailable, match="^there is no line of the backward pass for D=136 on sm_90$"):
        sdpa.backward_line_with((9, 0), torch.half, 136, 0, 0)
    # C++ receives the functions, or a refusal that is final or temporary.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 - device, 0))
    library, asked = ctypes.CDLL(None), []
    library.sdpa_library_backward_workspace_bytes, library.sdpa_library_backward = library.malloc, library.free
    monkeypatch.setattr(sdpa, "library_of", lambda *x: asked.append(x) or library)
    monkeypatch.setattr(sdpa, "FAILED", {})
    for arguments, want in (((0, 1, 128, 3, 0), (0, 1, b"")), ((1, 0, 100, 0, sdpa.NEEDED), (128, 1, b"")), ((1, 0, 100, 0, 0), (0, 1, b"our backward is not known to be faster than PyTorch's")),
                            ((1, 0, 136, 0, 0), (0, 0, b"there is no line of the backward pass for D=136 on sm_80"))):
        line = sdpa.BackwardLine()
        sdpa.load_backward(*arguments, b"", b"", line)
        assert (line.head_dim, line.is_final, line.trouble) == want and bool(line.backward) == bool(line.workspace_bytes) == (not want[2])
    assert asked == [("atomic", (9, 0), "HEAD_DIM=128", "DTYPE=BF16", "USE_SOFTCAP", "USE_SINKS"), ("any", (8, 0), "HEAD_DIM=128")]
    assert capsys.readouterr().err.count("where PyTorch has a backward of its own, that runs instead") == 1


@needs_no_gpu
def test_no_sequences(launches):
    """Empty integer tensors compute nothing or raise an error."""
    import flash_attn_interface as fa
    q, k, packed, none, zero = drawn(2, 4, 5, 64), drawn(2, 2, 16, 64), drawn(1, 4, 5, 64), int32(), int32(0)
    table, rows, caches = int32().view(0, 2), drawn(0, 5, 4, 64), drawn(6, 16, 2, 64)
    new = drawn(0, 1, 2, 64)
    for run, shape in (
            (lambda: sdpa.attention(q[:0], k[:0], k[:0], k_lengths=none, q_lengths=none), (0, 4, 5, 64)),
            (lambda: sdpa.attention(packed[:, :, :0], k[:1, :, :0], k[:1, :, :0], q_starts=zero, k_starts=zero), (1, 4, 0, 64)),
            (lambda: sdpa.attention(q[:0], k, k, page_table=table), (0, 4, 5, 64)),
            (lambda: fa.flash_attn_varlen_func(rows.flatten(0, 1), rows.flatten(0, 1), rows.flatten(0, 1), zero, zero, 0, 0), (0, 4, 64)),
            (lambda: fa.flash_attn_with_kvcache(rows, caches, caches, new, new, cache_seqlens=none, page_table=table), (0, 5, 4, 64)),
            (lambda: fa.flash_attn_with_kvcache(rows, caches, caches, cache_seqlens=none, cache_batch_idx=none), (0, 5, 4, 64))):
        assert run().shape == shape

    def refuses(words, run, *arguments, **options):
        with pytest.raises((RuntimeError, ValueError), match=f"{words}; want one more than the number of sequences, which is 0 only if q is empty$"):
            run(*arguments, **options)
    for name, starts in itertools.product(("q_starts", "k_starts"), (none, zero)):
        for others in dict(), dict(k_lengths=int32(5)), dict(q_starts=int32(0, 5)) if name == "k_starts" else dict(page_table=int32(0)[:, None]):
            refuses(f"^sdpa.attention: {name} has {len(starts)} elements", sdpa.attention, packed, k[:1], k[:1], **{name: starts}, **others)
        refuses(f"^sdpa.attention: {name} has 0 elements", sdpa.attention, packed[:, :, :0], k[:1, :, :0], k[:1, :, :0], **{name: none})
    rows, starts = drawn(5, 4, 64), int32(0, 5)
    for cu in none, zero:
        words = f"^flash_attn_varlen_func: cu_seqlens_q has {len(cu)} elements"
        refuses(words, fa.flash_attn_varlen_func, rows, rows, rows, cu, starts, 5, 5)
        refuses(words.replace("_q ", "_k "), fa.flash_attn_varlen_func, rows[None], rows, rows, None, cu, 5, 5)
        refuses(words.replace("varlen_func", "with_kvcache"), fa.flash_attn_with_kvcache, rows, caches, caches, cu_seqlens_q=cu, cache_seqlens=3,
                page_table=int32(0)[:, None])
    given = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=5, max_seqlen_k=5)
    cached = dict(k_cache=caches[:2], v_cache=caches[:2], cache_seqlens=int32(3, 3))
    for count in 0, 1, 3, 4:
        x, table = torch.zeros(count, dtype=torch.int32), torch.zeros(count, 2, dtype=torch.int32)
        calls = [(fa.flash_attn_varlen_func, dict(q=rows, k=rows, v=rows) | given | {name: x}, name, "elements for 1 sequences")
                 for name in ("cu_seqlens_k", "seqused_q", "seqused_k") if count != 1]
        calls += [(fa.flash_attn_with_kvcache, dict(q=q.transpose(1, 2)) | cached | {name: x}, name, "elements for 2 sequences")
                  for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "rotary_seqlens")]
        calls += [(fa.flash_attn_with_kvcache, dict(q=q.transpose(1, 2)) | cached | dict(page_table=table), "page_table", "rows for 2 sequences"),
                  (fa.flash_attn_varlen_func, dict(q=q.transpose(1, 2), k=caches, v=caches) | dict.fromkeys(given) | dict(page_table=table),
                   "page_table", "rows for 2 sequences")]
        for function, arguments, name, words in calls:
            with pytest.raises(ValueError, match=f"^{function.__name__}: {name} has {count} {words}$"):
                function(**arguments)


def test_pytorch_cpp_compiles_and_takes_its_place(tmp_path):
    """In a new process with the real nvcc: build, load, activate without a warning, deactivate. CUDA stays uninitialized, so that
    the process can fork."""
    if not builds.nvcc():
        pytest.skip("nvcc is missing")
    program = ("import sys; sys.path[:0] = ['bindings', 'tests']; import os, torch, pytorch as sdpa, stand_in\n"
               "order = torch._C._get_sdp_priority_order()\n"
               "sdpa.activate(); assert torch.nn.attention.current_flash_attention_impl() == 'sdpa'\n"
               "assert not torch.cuda.is_initialized() and torch._C._get_sdp_priority_order() == order\n"
               "q = torch.zeros(1, 1, 1, 64).half(); print(sdpa.why_not(q, q, q), flush=True)\n"
               "names = [f'_scaled_dot_product_{name}_attention' for name in ('cudnn', 'flash', 'efficient')]\n"
               "names += ['scaled_dot_product_attention', '_scaled_dot_product_flash_attention.quantized']\n"
               f"names += ['_flash_attention_forward', '_flash_attention_forward.quantized', *{NEWER_OPERATORS}]\n"
               "tables = lambda: [torch._C._dispatch_dump('aten::' + name) for name in names]\n"
               "assert all('bindings/pytorch.cpp' in table for table in tables())\n"
               "other = type('Other', (), {'remove': lambda self: None})\n"
               "torch.nn.attention.register_flash_attention_impl('other', register_fn=other)\n"
               "torch.nn.attention.activate_flash_attention_impl('other')\n"
               "assert not any('bindings/pytorch.cpp' in table for table in tables())\n"
               "torch.nn.attention.activate_flash_attention_impl('sdpa')\n"
               "assert all('bindings/pytorch.cpp' in table for table in tables())\n"
               f"if {GPU}:\n"
               "    child = os.fork()\n"
               "    if not child: torch.zeros(1, device='cuda').cpu(); os._exit(0)\n"
               "    assert os.waitpid(child, 0)[1] == 0\n"
               "torch.nn.attention.restore_flash_attention_impl()\n"
               "assert not any('bindings/pytorch.cpp' in table for table in tables())\n")
    done = subprocess.run([sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", "-c", program], cwd=ROOT, capture_output=True, text=True,
                          env={"SDPA_CACHE": str(tmp_path)} | os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "a tensor is on cpu; sdpa's kernels run on CUDA devices\n"
    assert not [line for line in done.stderr.splitlines() if not line.startswith("sdpa: building pytorch-")], done.stderr


# ---- on a GPU ----

@pytest.fixture
def active():
    sdpa.activate()
    yield
    torch.nn.attention.restore_flash_attention_impl()


def kernels(run):
    """Returns run()'s result and the names of the kernels that it launched."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        result = run()
        torch.cuda.synchronize()
    return result, [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def rel_rms(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def check_near(got, want, limit, *where):
    """Compares tensors with those in double."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert rel_rms(a, b) <= limit, (i, *where)


def samples(dtype, D, requires_grad):
    """PyTorch's own samples of scaled_dot_product_attention, with rows of D instead of 8 elements unless D is 8, and some more."""
    from torch.testing._internal.common_methods_invocations import op_db
    op, = [op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention"]
    make = lambda *shape: torch.randn(shape, device="cuda", dtype=dtype)  # noqa: E731
    for sample in op.sample_inputs("cuda", dtype, requires_grad=requires_grad):
        # PyTorch's values of up to 9 make logits of 200 at D=8. Then rounding O changes gradients in fp16 by up to 20%, since each
        # backward of FlashAttention's form uses the sum of dO * O.
        if D != 8 or requires_grad:
            sample.input, *sample.args = (make(*x.shape[:-1], D) for x in (sample.input, *sample.args))
        yield sample.input, *sample.args, sample.kwargs
    if D != 8:
        yield make(2, 8, 77, D), make(2, 2, 300, D), make(2, 2, 300, D), {"enable_gqa": True}
        yield make(2, 8, 200, D), make(2, 8, 200, D), make(2, 8, 200, D), {"is_causal": True, "scale": 0.3}
        qkv = make(2, 130, 3, 4, D).permute(2, 0, 3, 1, 4)
        yield *qkv, {"is_causal": True}
        yield make(1, 4, 1, D), make(1, 4, 5000, D), make(1, 4, 5000, D), {}
        yield make(1, 4, 9, D + 8)[..., :D], make(1, 4, 9, D), make(1, 4, 9, D), {}
        if not requires_grad:  # odd: copied; FlashAttention-2's backward fails on such a tensor
            yield make(1, 4, 9, D + 1)[..., 1:], make(1, 4, 9, D), make(1, 4, 9, D), {}


@needs_gpu
@pytest.mark.parametrize("requires_grad", (False, True))
@pytest.mark.parametrize("D", (8, *SIZES))
def test_samples_of_pytorch(active, D, requires_grad):
    ours, declined, dtype = 0, 0, HALVES[(D in (8, 128)) ^ requires_grad]
    for q, k, v, options in samples(dtype, D, requires_grad):
        tensors = [x.detach().requires_grad_(requires_grad) for x in (q, k, v)]
        why = sdpa.why_not(*tensors, **options)
        got, names = kernels(lambda: F.scaled_dot_product_attention(*tensors, **options))
        assert any("sdpa::" in name for name in names) == (not why), (why, names, q.shape, options)
        ours, declined = ours + (not why), declined + bool(why)
        if options.get("dropout_p"):
            continue  # another kernel has other random numbers
        wide = [x.detach().double().requires_grad_(requires_grad) for x in (q, k, v)]
        want = F.scaled_dot_product_attention(*wide, **{**options, **({"attn_mask": options["attn_mask"].double()}
                                                                     if "attn_mask" in options else {})})
        assert got.shape == want.shape and rel_rms(got, want) <= LIMITS[dtype], (q.shape, options)
        if requires_grad:
            grad = torch.randn_like(got)
            check_near(torch.autograd.grad(got, tensors, grad), torch.autograd.grad(want, wide, grad.double()), 2 * LIMITS[dtype], q.shape, options)
    print(f"{dtype} D={D} requires_grad={requires_grad}: {ours} by sdpa, {declined} declined")
    assert declined <= 12 + requires_grad and ours  # with dropout, and of one mask a gradient


def masks(B, H, Sq, Sk, dtype):
    """Yields (name, mask) for [B,H,Sq,Sk]: bool and additive, shared by batches, heads or queries, some with unusual strides."""
    make = lambda *shape: torch.randn(shape, device="cuda")  # noqa: E731
    for shape in ((Sq, Sk), (1, Sk), (B, 1, 1, Sk), (1, H, Sq, Sk), (B, H, Sq, Sk), (H, Sq, Sk), (B, 1, Sq, 1)):
        yield f"bool {shape}", make(*shape) > -1
        yield f"added {shape}", make(*shape).to(dtype)
        yield f"-inf {shape}", make(*shape).to(dtype).masked_fill(make(*shape) < -1, -torch.inf)
    yield "expanded", (make(B, 1, 1, Sk) > 0).expand(B, H, Sq, Sk)
    yield "transposed", (make(Sk, Sq) > 0).mT
    yield "odd rows", (make(Sq, Sk + 1) > 0)[:, 1:]
    yield "float32", make(Sq, Sk)
    empty = make(Sq, Sk) > 0
    empty[3:7] = False
    yield "empty rows", empty
    yield "empty rows of -inf", torch.zeros(Sq, Sk, device="cuda", dtype=dtype).masked_fill(~empty, -torch.inf)


@needs_gpu
@pytest.mark.parametrize("backend", (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION), ids=str)
@pytest.mark.parametrize("dtype, Sq, Sk, D", [(torch.half, 200, 333, 64), (torch.bfloat16, 256, 256, 128),
                                              (torch.half, 1, 1000, 128)], ids=str)
def test_masks(active, backend, dtype, Sq, Sk, D):
    """attn_mask of each kind against double, behind both of PyTorch's operators that take one, also in a graph; gradients by their
    backwards. Rows that see no key are 0, but in training and in graphs behind cuDNN, for which PyTorch makes -65504 of False."""
    for n, (what, mask) in enumerate(masks(2, 8, Sq, Sk, dtype), Sq % 3):  # 200, 256 and 1
        for requires_grad, compiled in ((False, False), (True, False), (False, True)):
            if compiled and n % 3:
                continue  # each mask is compiled in one of the shapes, which takes seconds
            if backend == SDPBackend.EFFICIENT_ATTENTION and mask.dtype == torch.float and requires_grad:
                continue  # PyTorch's backward refuses it
            tensors = [half(2, 8, S, D, dtype=dtype, device="cuda").requires_grad_(requires_grad) for S in (Sq, Sk, Sk)]
            run = lambda *x: F.scaled_dot_product_attention(*x, attn_mask=mask)  # noqa: E731
            torch.compiler.reset()
            with sdpa_kernel(backend):
                try:
                    torch._fused_sdp_choice(*tensors, None)
                except RuntimeError:
                    pytest.skip(f"this GPU has no {backend}")
                got, names = kernels(lambda: (torch.compile(run, fullgraph=True) if compiled else run)(*tensors))
                assert any("sdpa::" in name for name in names), (what, names)
            seen = reference(*tensors, bias=mask)[1] > -torch.inf  # of rows
            rows = seen if (requires_grad or compiled) and mask.dtype == torch.bool else torch.ones_like(seen)
            want = wide(tensors)
            out = reference(*want, bias=mask)[0]
            assert rel_rms(got[rows], out[rows]) <= LIMITS[dtype], what
            if requires_grad:
                grad = torch.randn_like(got) * seen[..., None]
                check_near(torch.autograd.grad(got, tensors, grad), torch.autograd.grad(out, want, grad.double()), 2 * LIMITS[dtype], what)


@needs_gpu
@pytest.mark.parametrize("dtype, D, softcap", [(torch.half, 64, None), (torch.bfloat16, 128, None), (torch.bfloat16, 128, 5.0)], ids=str)
def test_bias(dtype, D, softcap):
    """attention(bias=) with all kinds and layouts, with causal masks and windows, for the last keys only, with lengths,
    starts and pages."""
    for Sq, Sk, causal, window in ((200, 333, None, (None, None)), (200, 333, "br", (64, 0)), (5, 3000, "br", (None, None))):
        q, k, v, _ = case_tensors(dtype, 2, 8, 2, Sq, Sk, D, causal, window)
        options, seen = {"causal": causal, "window": window, "softcap": softcap}, visible(Sq, Sk, causal, window)
        for what, bias in masks(2, 8, Sq, Sk, dtype):
            out, lse = sdpa.attention(q, k, v, **options, bias=bias, return_lse=True)
            want, want_lse = reference(q, k, v, seen, softcap=softcap, bias=bias)
            finite = torch.isfinite(want_lse)
            assert rel_rms(out, want) <= LIMITS[dtype] and torch.equal(torch.isfinite(lse), finite), what
            assert (lse - want_lse)[finite].abs().max() <= 1e-2, what
        for what, bias in masks(2, 8, Sq, 50, dtype):  # of the last 50 keys
            of_keys = bias.expand(*bias.shape[:-1], 50)
            want = reference(q, k, v, seen, softcap=softcap, bias=F.pad(of_keys, (Sk - 50, 0), value=bias.dtype == torch.bool))[0]
            assert rel_rms(sdpa.attention(q, k, v, **options, bias=bias, bias_keys=50), want) <= LIMITS[dtype], what
        lengths = torch.tensor([Sk, Sk - 101], dtype=torch.int32, device="cuda")
        tree = torch.randn(2, 1, Sq, 50, device="cuda") > 0
        paged, table = in_pages((k, v), 16)
        starts = torch.tensor([0, Sq, 2 * Sq], dtype=torch.int32, device="cuda")
        rows = q.transpose(0, 1).flatten(1, 2)[None]
        for more, x in (({"k_lengths": lengths}, (q, k, v)), ({"k_lengths": lengths, "page_table": table}, (q, *paged)),
                        ({"k_lengths": lengths, "q_starts": starts, "page_table": table}, (rows, *paged))):
            out = sdpa.attention(*x, **options, bias=tree, bias_keys=50, **more)
            out = out[0].unflatten(1, (2, Sq)).transpose(0, 1) if "q_starts" in more else out
            for b, n in enumerate(lengths.tolist()):
                one = F.pad(tree[b:b + 1], (n - 50, 0), value=True)
                tensors = [y[b:b + 1, :, :rows] for y, rows in ((q, Sq), (k, n), (v, n))]
                want = reference(*tensors, visible(Sq, n, causal, window), softcap=softcap, bias=one)[0]
                assert rel_rms(out[b:b + 1], want) <= LIMITS[dtype], list(more)
    bias = torch.randn(8, 1, Sk, device="cuda")
    assert torch.equal(torch.compile(lambda *x: sdpa.attention(*x, **options, bias=bias), fullgraph=True)(q, k, v),
                       sdpa.attention(q, k, v, **options, bias=bias))
    with torch.autocast("cuda", dtype):
        assert torch.equal(sdpa.attention(q.float(), k, v, **options, bias=bias), sdpa.attention(q, k, v, **options, bias=bias))
    for more, why in (({"bias": bias[..., 1:]}, r"bias is of shape \[8, 1, 2999\], which does not expand to \[2, 8, 5, 3000\]"),
                      ({"bias": bias, "bias_keys": 50}, "which does not expand to"), ({"bias": bias.cpu()}, "bias is on cpu, not on cuda"),
                      ({"bias": bias.int()}, "bias is of Int, not bool, float32, float16 or bfloat16"),
                      ({"bias": bias.double()}, "bias is of Double, not bool, float32, float16 or bfloat16"), ({"bias_keys": 5}, "bias_keys is for a bias"),
                      ({"bias": torch.ones(3001, device="cuda"), "bias_keys": 3001}, r"bias_keys=3001 is outside \[0, 3000\]"),
                      ({"bias": bias, "bias_keys": -1}, "bias_keys=-1 is outside")):
        with pytest.raises((RuntimeError, ValueError), match=why):
            sdpa.attention(q, k, v, **options, **more)
    with pytest.raises(RuntimeError, match="e4m3 supports no bias"):
        sdpa.attention(*(x.to(torch.float8_e4m3fn) for x in (q, k, v)), bias=bias)


ALIBI, DOCUMENTS = "s - x0[h] * real(q + Sk - Sq - k)", "i0[q] == i0[k]"


@needs_gpu
@pytest.mark.parametrize("dtype, D", [(torch.half, 64), (torch.bfloat16, 128), (E4M3, 128)], ids=str)
def test_modifications(dtype, D):
    """ALiBi, documents and both against a reference in double: GQA, causal masks and windows, one query, lengths, packed rows, pages."""
    slopes = 2.0 ** -torch.arange(1, 9, device="cuda")

    def bias(Sq, Sk):
        return -slopes[:, None, None] * (torch.arange(Sq, device="cuda")[:, None] + Sk - Sq - torch.arange(Sk, device="cuda"))
    for Sq, Sk, causal, window in ((200, 333, None, (None, None)), (333, 333, "br", (None, None)), (200, 333, "br", (64, 0)), (1, 5000, None, (None, None))):
        q, k, v, factors = case_tensors(dtype, 2, 8, 2, Sq, Sk, D, causal, window)
        wide = [x.double() * factors[name].expand(2, x.shape[1])[..., None, None] if factors else x
                for x, name in ((q, "q_descale"), (k, "k_descale"), (v, "v_descale"))]
        documents = (torch.arange(max(Sq, Sk), device="cuda") // 70 % 3).int()
        seen = visible(Sq, Sk, causal, window)
        of_documents = documents[:Sq, None] == documents[:Sk]
        options = dict(causal=causal, window=window, **factors)
        for mods, own_bias, own_seen in ((dict(score_mod=ALIBI, args=[slopes]), bias(Sq, Sk), seen),
                                         (dict(mask_mod=DOCUMENTS, args=[documents]), None, seen & of_documents),
                                         (dict(score_mod=ALIBI, mask_mod=DOCUMENTS, args=[slopes, documents]), bias(Sq, Sk), seen & of_documents)):
            want, want_lse = reference(*wide, own_seen, bias=own_bias)
            kept = sdpa.block_mask(q, k, v, **options, **mods) if "mask_mod" in mods else None
            for block_mask in (None, kept)[:1 + (kept is not None)]:
                out, lse = sdpa.attention(q, k, v, **options, **mods, block_mask=block_mask, return_lse=True)
                finite = torch.isfinite(want_lse)
                assert rel_rms(out, want) <= LIMITS[dtype] and torch.equal(torch.isfinite(lse), finite), (Sq, Sk, mods.keys(), block_mask is None)
                assert (lse - want_lse)[finite].abs().max() <= (1e-2 if dtype != E4M3 else 0.1)
    if dtype == E4M3:
        return
    q, k, v, _ = case_tensors(dtype, 2, 8, 2, 100, 300, D, None, None)
    lengths, starts = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([300, 177], [0, 100, 200]))
    paged, table = in_pages((k, v), 16)
    rows = q.transpose(0, 1).flatten(1, 2)[None]
    for more, tensors in (({}, (q, k, v)), ({"page_table": table}, (q, *paged)), ({"q_starts": starts, "page_table": table}, (rows, *paged))):
        out = sdpa.attention(*tensors, causal="br", k_lengths=lengths, score_mod=ALIBI, args=[slopes], **more)
        out = out[0].unflatten(1, (2, 100)).transpose(0, 1) if "q_starts" in more else out
        for b, n in enumerate(lengths.tolist()):
            want = reference(q[b:b + 1], k[b:b + 1, :, :n], v[b:b + 1, :, :n], visible(100, n, "br", (None, None)), bias=bias(100, n))[0]
            assert rel_rms(out[b:b + 1], want) <= LIMITS[dtype], list(more)


@needs_gpu
def test_modifications_in_graphs():
    """CUDA graphs and compiled graphs read the current contents of the arrays, with and without a kept map."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, H, 4096, 128, device="cuda", dtype=torch.bfloat16) for H in (8, 2, 2))
    slopes, documents = torch.zeros(8, device="cuda"), (torch.arange(4096, device="cuda") // 512).int()
    mods = dict(score_mod=ALIBI, mask_mod=DOCUMENTS, args=[slopes, documents], causal="br")

    def want():
        distance = torch.arange(4096, device="cuda")[:, None] - torch.arange(4096, device="cuda")
        return reference(q, k, v, (distance >= 0) & (documents[:, None] == documents), bias=-slopes[:, None, None] * distance)[0]
    kept = sdpa.block_mask(q, k, v, **mods)
    assert kept.tiles.numel() > 0 or torch.cuda.get_device_capability() != (9, 0)
    run = lambda q, k, v, block_mask=None: sdpa.attention(q, k, v, **mods, block_mask=block_mask)  # noqa: E731
    assert rel_rms(run(q, k, v), want()) <= LIMITS[q.dtype]  # builds
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        in_graph = [run(q, k, v, block_mask) for block_mask in (None, kept)]
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = [torch.compile(run, fullgraph=True), torch.compile(lambda *x: run(*x) * 1, mode="reduce-overhead")]
    for value in 0.5, 0.01:
        slopes.fill_(value)
        graph.replay()
        outs = [*in_graph, run(q, k, v, kept)]
        for one in compiled:
            outs += [one(q, k, v, block_mask).clone() for block_mask in (None, kept) for _ in range(3)]
        for n, out in enumerate(outs):
            assert rel_rms(out, want()) <= LIMITS[q.dtype], n
    with pytest.raises(RuntimeError, match="block_mask was made for Sq=4096, and this call has Sq=100$"):
        run(q[:, :, :100], k, v, kept)
    with pytest.raises(RuntimeError, match="^sdpa.attention: block_mask is not on cuda:0$"):
        run(q, k, v, kept._replace(tiles=kept.tiles.cpu()))
    with pytest.raises(RuntimeError, match="nvcc could not build .*-SCORE_MOD-sm_.*: error"):
        sdpa.attention(q, k, v, score_mod="s % 2")


@needs_gpu
@pytest.mark.parametrize("kind", ("plain", "lengths", "packed", "pages", "packed_pages"))
@pytest.mark.parametrize("dtype, queries", [(torch.bfloat16, 1), (E4M3, 1), (torch.bfloat16, 256), (E4M3, 1500)], ids=str)
def test_batch_invariant(dtype, kind, queries):
    """Each sequence alone has the bits that it has in 20 drawn batches. Some rows of q are so large that a stale maximum does not last;
    what lies between sequences is NaN."""
    rng, D, size = random.Random(queries), 128, 16
    sizes = [(queries if kind in ("plain", "lengths", "pages") else rng.choice((1, 7, queries)),
              4000 if kind == "plain" else rng.randrange(1600, 9000)) for _ in range(5)]

    def drawn(H, S):
        return torch.randn(H, S, D, device="cuda") * torch.tensor([1, 1, 0.25, 12], device="cuda")[torch.randint(4, (S, 1), device="cuda")]
    own = [[drawn(H, S).to(dtype) for H, S in ((32, rows), (8, keys), (8, keys))] for rows, keys in sizes]

    def side_by_side(tensors, spare):
        out = torch.full((len(tensors), tensors[0].shape[0], max(x.shape[1] for x in tensors) + spare, D), torch.nan, device="cuda").to(dtype)
        for row, x in zip(out, tensors):
            row[:, :x.shape[1]].copy_(x)
        return out

    def attend(batch, spare):
        q, k, v = ([own[b][i] for b in batch] for i in range(3))
        options = {} if kind in ("plain", "packed") else {"k_lengths": ints([x.shape[1] for x in k])}
        if kind.startswith("packed"):
            options["q_starts"] = ints([sum(x.shape[1] for x in q[:b]) for b in range(len(q) + 1)])
        if kind == "packed":
            options["k_starts"] = ints([sum(x.shape[1] for x in k[:b]) for b in range(len(k) + 1)])
            options["most_keys"] = max(x.shape[1] for x in k) + spare
        packs_q, packs_k = "q_starts" in options, "k_starts" in options
        bits = torch.uint8 if dtype.itemsize == 1 else dtype  # which torch.cat takes
        pack = lambda x: torch.cat([one.view(bits) for one in x], 1).view(dtype)[None]  # noqa: E731
        beside = 0 if kind == "plain" else -max(x.shape[1] for x in k) % size + spare * size
        k, v = (pack(x) if packs_k else side_by_side(x, beside) for x in (k, v))
        if "pages" in kind:
            order = torch.randperm(len(batch) * k.shape[2] // size, device="cuda")
            options["page_table"] = torch.argsort(order).int().view(len(batch), -1)
            k, v = (x.view(bits).unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)[order].view(dtype) for x in (k, v))
        out, lse = sdpa.attention(pack(q) if packs_q else side_by_side(q, 0), k, v, "br", return_lse=True, batch_invariant=True, **options)
        starts = options["q_starts"].tolist() if packs_q else None
        return [(out[0][:, starts[b]:starts[b + 1]], lse[0][:, starts[b]:starts[b + 1]]) if packs_q else (out[b], lse[b])
                for b in range(len(batch))]
    ints = lambda x: torch.tensor(x, dtype=torch.int32, device="cuda")  # noqa: E731
    alone = [attend([b], 0)[0] for b in range(len(own))]
    for _ in range(20):
        batch = [rng.randrange(len(own)) for _ in range(rng.randrange(1, 40 if queries == 1 else 9))]
        for b, found in zip(batch, attend(batch, rng.randrange(9))):
            for x, y in zip(found, alone[b]):
                assert x.isfinite().all() and torch.equal(x, y), (b, batch)


@needs_gpu
def test_backward_with_a_bias(glue):
    """cuDNN computes it where PyTorch would choose cuDNN, else the memory-efficient backward. Rows that see no key have no gradient."""
    for what, bias in masks(2, 4, 150, 170, torch.bfloat16):
        shapes = (4, 150), (2, 170), (2, 170)
        tensors = [torch.randn(2, H, S, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for H, S in shapes]
        grad = torch.randn_like(tensors[0])
        got = gradients(lambda *x: sdpa.attention(*x, bias=bias), tensors, grad)
        check_near(got, gradients(lambda *x: reference(*x, bias=bias)[0], wide(tensors), grad.double()), 3e-2, what)


@needs_gpu
@pytest.mark.parametrize("entry", ("F.sdpa", "odd rows of F.sdpa", "attention"))
def test_a_float32_bias(active, entry):
    """ALiBi by the key's position in bf16: O, and gradients by PyTorch's memory-efficient kernel in float32. With odd rows that kernel
    computes O as well, since ours decline them in training."""
    for Sk, requires_grad in ((256, False), (2048, False), (16384, False), (256, True), (2048, True)):
        q, k, v = tensors = [half(1, H, S, 128 + 4 * entry.startswith("odd"), dtype=torch.bfloat16, device="cuda")[..., :128]
                             .requires_grad_(requires_grad) for H, S in ((8, 200), (8, Sk), (8, Sk))]
        bias = alibi(8, Sk, "cuda").expand(1, 8, 200, Sk)
        run = lambda *x: sdpa.attention(*x, bias=bias) if entry == "attention" else F.scaled_dot_product_attention(*x, attn_mask=bias)  # noqa: E731
        cudnns = torch._fused_sdp_choice(*tensors, bias) == int(SDPBackend.CUDNN_ATTENTION)
        if not cudnns and (entry.startswith("odd") or (entry == "F.sdpa" and requires_grad)):
            continue  # PyTorch's memory-efficient backward refuses it, and its math kernel takes odd rows
        out, names = kernels(lambda: run(*tensors))
        assert any("sdpa::" in name for name in names) != (entry.startswith("odd") and requires_grad), names
        want = reference(*wide(tensors), bias=bias)[0]
        assert rel_rms(out, want) <= 4e-3, Sk
        if requires_grad:
            grad = torch.randn_like(out)
            doubles = wide(tensors)
            expected = torch.autograd.grad(reference(*doubles, bias=bias)[0], doubles, grad.double())
            check_near(torch.autograd.grad(out, tensors, grad), expected, 1e-2, Sk)


@needs_gpu
@pytest.mark.parametrize("entry", ("F.sdpa", "attention"))
@pytest.mark.parametrize("Sq, D, masked", ((704, 64, True), (1, 64, False), (1, 128, True)), ids=str)
def test_gradients_of_rows_with_a_low_lse(active, entry, Sq, D, masked):
    """Finite and right where LSE is about -122, which gives NaN in cuDNN's backward for these shapes."""
    # Rounding O and dS to bf16 leaves an error of up to 0.13 in dQ, since the keys differ by a 40th of their size. An eager
    # backward in bf16 has 0.2.
    dtype, Sk = torch.bfloat16, 800
    level = (128 / D ** 0.5) ** 0.5  # logits of about -128
    q, k = (level * sign + 0.1 * torch.randn(2, 4, S, D, device="cuda") for sign, S in ((1, Sq), (-1, Sk)))
    tensors = [x.to(dtype).requires_grad_() for x in (q, k, torch.randn(2, 4, Sk, D, device="cuda"))]
    mask = torch.rand(2, 1, Sq, Sk, device="cuda") > 0.3 if masked else None
    want_lse = reference(*tensors, bias=mask)[1]
    assert -130 < want_lse.min() and want_lse.max() < -115
    run = lambda *x: sdpa.attention(*x, bias=mask) if entry == "attention" else F.scaled_dot_product_attention(*x, attn_mask=mask)  # noqa: E731
    grad = torch.randn_like(tensors[0])
    want = gradients(lambda *x: reference(*x, bias=mask)[0], wide(tensors), grad.double())
    for a, b in zip(gradients(run, tensors, grad), want):
        assert a.isfinite().all() and rel_rms(a, b) <= 0.15


CASES = [(torch.float16, 2, 8, 2, 100, 300, 64, "br", (None, None)), (torch.bfloat16, 1, 4, 4, 300, 100, 128, "br", (None, None)),
         (torch.bfloat16, 2, 4, 1, 130, 513, 256, "tl", (None, None)), (torch.float16, 1, 8, 8, 333, 333, 128, "br", (64, 0)),
         (torch.bfloat16, 1, 2, 2, 200, 220, 64, None, (10, 7)), (torch.float16, 1, 2, 1, 90, 220, 128, None, (30, 7, "br")), (torch.float8_e4m3fn, 2, 8, 2, 200, 333, 128, "br", (None, None)),
         (torch.float8_e4m3fn, 1, 2, 2, 64, 1000, 64, None, (None, None)), (torch.bfloat16, 4, 32, 8, 1, 3000, 128, None, (None, None))]


def case_tensors(dtype, B, Hq, Hkv, Sq, Sk, D, causal, window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, S, H, D, device="cuda").to(dtype).transpose(1, 2) for S, H in ((Sq, Hq), (Sk, Hkv), (Sk, Hkv)))
    factors = {}
    if dtype == torch.float8_e4m3fn:
        factors = {"q_descale": torch.rand(B, Hq, device="cuda") + 0.5, "k_descale": torch.rand(B, Hkv, device="cuda") + 0.5,
                   "v_descale": torch.tensor(0.7, device="cuda")}
    return q, k, v, factors


def in_pages(tensors, size):
    """Copies tensors [B,H,S,D] to shuffled pages [pages,H,size,D]; returns these and their table."""
    B, H, S, _ = tensors[0].shape
    count = -(-S // size)
    table = torch.randperm(B * count, device="cuda")
    paged = []
    for x in tensors:
        rows = x.contiguous().view(torch.uint8)
        whole = torch.zeros(B, H, count * size, rows.shape[3], dtype=torch.uint8, device="cuda")
        whole[:, :, :S] = rows
        pages = torch.empty(B * count, H, size, rows.shape[3], dtype=torch.uint8, device="cuda")
        pages[table] = whole.view(B, H, count, size, -1).transpose(1, 2).flatten(0, 1)
        paged.append(pages.view(x.dtype))
    return paged, table.view(B, count).int()


@needs_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case):
    dtype, Sq, Sk, causal, window = case[0], case[4], case[5], case[7], case[8]
    q, k, v, factors = case_tensors(*case)
    out, lse = sdpa.attention(q, k, v, causal=causal, window=window, return_lse=True, **factors)
    wide = [x.double() * factors[name].double().expand(x.shape[:2])[..., None, None] if factors else x
            for x, name in zip((q, k, v), ("q_descale", "k_descale", "v_descale"))]
    want, want_lse = reference(*wide, visible(Sq, Sk, causal, window))
    seen = torch.isfinite(want_lse)
    assert rel_rms(out, want) <= LIMITS[dtype] and out.stride() == torch.empty_like(q).stride()
    assert torch.equal(torch.isfinite(lse), seen) and (lse - want_lse)[seen].abs().max() <= 1e-2
    options = {"causal": causal, "window": window, **factors}
    torch.compiler.reset()  # or the cases before count as recompilations of this one, and those have a limit
    compiled = torch.compile(lambda *x: sdpa.attention(*x, **options), fullgraph=True)
    assert torch.equal(compiled(q, k, v), out)


@needs_gpu
@pytest.mark.parametrize("dtype, D, softcap", [(torch.float16, 64, None), (torch.bfloat16, 128, 5.0), (torch.bfloat16, 256, 50.0),
                                               (torch.float8_e4m3fn, 128, None), (torch.float8_e4m3fn, 128, 5.0), (torch.float16, 128, 5.0)], ids=str)
def test_softcap_sinks_and_lengths(dtype, D, softcap):
    """Short and long queries, with the tiles of both, with and without sinks; sequences of different lengths."""
    for Sq, Sk, mask in (1, 3000, None), (200, 333, "br"):
        q, k, v, _ = case_tensors(dtype, 2, 8, 2, Sq, Sk, D, mask, (None, None))
        q = (q.float() * 3).to(dtype)
        for sinks in (None, torch.randn(8, device="cuda") + 3):
            out, lse = sdpa.attention(q, k, v, mask, softcap=softcap, sinks=sinks, return_lse=True)
            want, want_lse = reference(q, k, v, visible(Sq, Sk, mask, (None, None)), None, softcap, sinks)
            assert rel_rms(out, want) <= LIMITS[dtype] and (lse - want_lse).abs().max() <= 1e-2
        lengths = torch.tensor([Sk, Sk - 101], dtype=torch.int32, device="cuda")
        out = sdpa.attention(q, k, v, mask, softcap=softcap, k_lengths=lengths)
        for b, n in enumerate(lengths.tolist()):
            one = [x[b:b + 1, :, :rows] for x, rows in ((q, Sq), (k, n), (v, n))]
            want, _ = reference(*one, visible(Sq, n, mask, (None, None)), None, softcap)
            assert rel_rms(out[b:b + 1], want) <= LIMITS[dtype]
        paged, table = in_pages((k, v), 16 if Sq > 1 else 64)
        if softcap != 5:  # each is a build of its own
            assert rel_rms(sdpa.attention(q, *paged, mask, softcap=softcap, k_lengths=lengths, page_table=table), out) <= LIMITS[dtype]
        starts = torch.tensor([0, 0, Sq // 3, Sq], dtype=torch.int32, device="cuda")
        k_starts = torch.tensor([0, 11, Sk // 2, Sk], dtype=torch.int32, device="cuda")
        out, lse = sdpa.attention(*(x[:1] for x in (q, k, v)), mask, softcap=softcap, q_starts=starts, k_starts=k_starts, return_lse=True)
        for (q0, q1), (k0, k1) in zip(zip(starts, starts[1:]), zip(k_starts, k_starts[1:])):
            one = q[:1, :, q0:q1], k[:1, :, k0:k1], v[:1, :, k0:k1]
            want, want_lse = reference(*one, visible(int(q1 - q0), int(k1 - k0), mask, (None, None)), None, softcap)
            if q1 > q0:
                assert rel_rms(out[:, :, q0:q1], want) <= LIMITS[dtype] and (lse[:, :, q0:q1] - want_lse).abs().max() <= 1e-2
    with pytest.raises(RuntimeError, match=r"k_lengths is not a contiguous int32 tensor \[\d+\] on q's device"):
        sdpa.attention(q, k, v, k_lengths=torch.zeros(7, dtype=torch.int32, device="cuda"))
    with pytest.raises(RuntimeError, match=r"page_table is not an int32 tensor \[2,pages of a sequence\] with contiguous rows on q's device"):
        sdpa.attention(q, *paged, page_table=table[:1])
    with pytest.raises(RuntimeError, match=r"sinks is not a tensor \[Hq\] on q's device"):
        sdpa.attention(q, k, v, sinks=torch.zeros(7, device="cuda"))
    with pytest.raises(NotImplementedError, match="^sdpa.attention: no backward for e4m3, pages"):
        sdpa.attention(q.half().requires_grad_(), *(x.half() for x in paged), k_lengths=lengths, page_table=table).sum().backward()


@needs_gpu
@pytest.mark.parametrize("dtype, D, Dv", [(torch.bfloat16, 128, 128), (torch.float16, 64, 64), (torch.bfloat16, 80, 48), (torch.bfloat16, 256, 256)], ids=str)
def test_k_and_v_of_8_bits(dtype, D, Dv):
    """8-bit K and V with a 16-bit q and factors: decode, prompts, chunks, caches with lengths, and pages."""
    for Sq, Sk, mask in (1, 3000, None), (300, 300, "br"), (70, 900, "br"):
        q, k, v, _ = case_tensors(dtype, 2, 8, 2, Sq, Sk, D, mask, (None, None))
        k, v = (x[..., :size].to(E4M3) for x, size in ((k, D), (v, Dv)))
        factors = [torch.rand(2, 2, device="cuda") + 0.5 for _ in range(2)]
        exact = [x.float() * factor[..., None, None] for x, factor in zip((k, v), factors)]
        given = dict(zip(("k_descale", "v_descale"), factors))
        out, lse = sdpa.attention(q, k, v, mask, return_lse=True, **given)
        want, want_lse = reference(q, *exact, visible(Sq, Sk, mask, (None, None)))
        assert out.dtype == dtype and rel_rms(out, want) <= LIMITS[dtype] and (lse - want_lse).abs().max() <= 1e-2
        lengths = torch.tensor([Sk, Sk - 101 if Sq < Sk else Sk], dtype=torch.int32, device="cuda")
        out = sdpa.attention(q, k, v, mask, k_lengths=lengths, **given)
        for b, n in enumerate(lengths.tolist()):
            want, _ = reference(q[b:b + 1], *(x[b:b + 1, :, :n] for x in exact), visible(Sq, n, mask, (None, None)))
            assert rel_rms(out[b:b + 1], want) <= LIMITS[dtype]
        paged, table = in_pages((k, v), 64)
        assert rel_rms(sdpa.attention(q, *paged, mask, k_lengths=lengths, page_table=table, **given), out) <= LIMITS[dtype]


@needs_gpu
@pytest.mark.parametrize("dtype, D, Dv", [(torch.float16, 96, 96), (torch.bfloat16, 192, 128), (torch.bfloat16, 80, 48),
                                          (torch.float16, 8, 8), (torch.bfloat16, 72, 72), (torch.float16, 64, 128), (torch.bfloat16, 160, 160),
                                          (torch.float8_e4m3fn, 96, 96), (torch.float8_e4m3fn, 192, 128)], ids=str)
def test_head_sizes(dtype, D, Dv):
    """Sizes without a line of their own, and a size of v."""
    for Sq, Sk, mask in (1, 3000, None), (200, 333, "br"):
        q, k, v, _ = case_tensors(dtype, 2, 8, 2, Sq, Sk, max(D, Dv), mask, (None, None))
        q, k, v = (x[..., :size] for x, size in ((q, D), (k, D), (v, Dv)))
        out, lse = sdpa.attention(q, k, v, mask, return_lse=True)
        want, want_lse = reference(q, k, v, visible(Sq, Sk, mask, (None, None)))
        assert out.shape == want.shape and rel_rms(out, want) <= LIMITS[dtype] and (lse - want_lse).abs().max() <= 1e-2
    compiled = torch.compile(lambda *x: sdpa.attention(*x, mask), fullgraph=True)
    assert torch.equal(compiled(q, k, v), out)
    with pytest.raises(RuntimeError, match="there is no line for D=4"):
        sdpa.attention(*(x[..., :4] for x in (q, k, v)))


@needs_gpu
def test_opcheck():
    for case in CASES:
        q, k, v, factors = case_tensors(*case)
        left, right = (-1 if keys is None else keys for keys in case[8][:2])
        by = case[8][2] if len(case[8]) > 2 else None
        square = case[0] in HALVES and (case[7] != "tl" and left + right == -2 or case[4] == case[5])
        arguments = [x.requires_grad_() if square else x for x in (q, k, v)]
        # PyTorch cannot compare tensors of e4m3, by which test_schema finds out whether an input was written to.
        tests = [name for name in OPCHECKS if case[0] in HALVES or name != "test_schema"]
        torch.library.opcheck(torch.ops.sdpa.attention.default, (*arguments, sdpa.MASKS[case[7]], left, right, sdpa.MASKS[by], None,
                              0.0, *(factors.get(name) for name in ("q_descale", "k_descale", "v_descale")), *[None] * 5, 0), test_utils=tests)
    q, k, v, _ = case_tensors(torch.half, 2, 8, 8, 100, 300, 64, None, None)
    bias = torch.randn(8, 1, 300, device="cuda") > 0
    torch.library.opcheck(torch.ops.sdpa.attention.default, (q.requires_grad_(), k, v, 0, -1, -1, 0, None, 0.0, *[None] * 8, 0, bias, 0),
                          test_utils=OPCHECKS)


def gradients(run, tensors, grad):
    """O and its gradients with respect to the tensors."""
    out = run(*tensors)
    return [out, *torch.autograd.grad(out, tensors, grad)]


def wide(tensors):
    return [x.detach().double().requires_grad_() for x in tensors]


GRADS = {"as q": torch.randn_like, "contiguous": lambda o: torch.randn_like(o, memory_format=torch.contiguous_format), "expanded": lambda o: torch.ones((), dtype=o.dtype, device=o.device).expand(o.shape),
         "transposed": lambda o: torch.randn_like(o.transpose(2, 3).contiguous()).transpose(2, 3),
         "of a row": lambda o: torch.randn_like(o[:1, :1, :1]).expand(o.shape),
         "with gaps": lambda o: torch.randn(*o.shape[:3], o.shape[3] + 1, device=o.device, dtype=o.dtype)[..., 1:]}


@needs_gpu
@pytest.mark.parametrize("entry", ("F.sdpa", "attention"))
def test_training(active, glue, entry):
    """Compares gradients with double; cuDNN's backward computes them if PyTorch has it."""
    for dtype, B, Hq, Hkv, Sq, Sk, D, mask in ((torch.bfloat16, 2, 8, 2, 300, 300, 128, "br"), (torch.half, 1, 4, 4, 100, 333, 64, None),
                                               (torch.bfloat16, 1, 8, 4, 200, 130, 128, "tl"), (torch.bfloat16, 2, 2, 2, 128, 256, 128, "tl")):
        tensors = [half(B, S, H, D, dtype=dtype, device="cuda").transpose(1, 2).requires_grad_() for S, H in ((Sq, Hq), (Sk, Hkv), (Sk, Hkv))]
        run = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=mask is not None, enable_gqa=True)  # noqa: E731
        if entry == "attention":
            run = lambda q, k, v: sdpa.attention(q, k, v, mask)  # noqa: E731
        cudnns = torch._fused_sdp_choice(*tensors, None, 0.0, mask is not None, enable_gqa=True) == int(SDPBackend.CUDNN_ATTENTION)
        for name, make in GRADS.items():
            grad = make(tensors[0].detach())
            got, names = kernels(lambda: gradients(run, tensors, grad))
            want = gradients(lambda *x: reference(*x, visible(Sq, Sk, mask, (None, None)))[0], wide(tensors), grad.double())
            check_near(got, want, 2 * LIMITS[dtype], mask, name)
            if cudnns:
                assert any("sdpa::" in x for x in names) and not any("pytorch_flash" in x for x in names), names
            grad = torch.randn_like(tensors[0])
        want = gradients(run, tensors, grad)
        torch.compiler.reset()
        for other in (torch.compile(run, fullgraph=True), torch.compile(run, fullgraph=True, dynamic=True),
                      lambda *x: torch.utils.checkpoint.checkpoint(run, *x, use_reentrant=False)):
            for a, b in zip(gradients(other, tensors, grad), want):
                assert rel_rms(a, b) <= LIMITS[dtype] and a.stride() == b.stride()


@needs_gpu
def test_backward_of_attention(glue):
    """Masks and windows that F.scaled_dot_product_attention cannot express, and v's own D."""
    for causal, window, Sq, Sk in (("br", (None, None), 100, 300), ("br", (None, None), 300, 100), ("br", (30, None), 200, 200),
                                   (None, (20, 9), 150, 150), ("tl", (None, None), 99, 99), (None, (None, None), 60, 170), (None, (20, 9, "br"), 60, 170)):
        tensors = [torch.randn(2, H, S, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for H, S in ((4, Sq), (2, Sk), (2, Sk))]
        grad = torch.randn_like(tensors[0])
        got = gradients(lambda *x: sdpa.attention(*x, causal=causal, window=window), tensors, grad)
        want = gradients(lambda *x: reference(*x, visible(Sq, Sk, causal, window))[0], wide(tensors), grad.double())
        check_near(got, want, 3e-2, causal, window, Sq, Sk)
    q, k = (torch.randn(1, 2, S, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for S in (60, 170))
    with pytest.raises(NotImplementedError, match="PyTorch has a backward for a window and Sq != Sk only if the window and the mask are bottom-right"):
        sdpa.attention(q, k, k, window=(20, 9, "tl"), backward="torch").sum().backward()
    q, k, v = tensors = [torch.randn(1, 2, 256, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for D in (192, 192, 128)]
    grad = torch.randn_like(v)
    want = gradients(lambda *x: reference(*x)[0], wide(tensors), grad.double())
    check_near(gradients(sdpa.attention, tensors, grad), want, 3e-2)


# dtype, B, Hq, Hkv, Sq, Sk, D, Dv, causal, window, and the features of the call. Few builds: they take a minute each.
BACKWARDS = [
    (torch.half, 2, 8, 2, 100, 300, 64, 64, "br", None, ""), (torch.half, 1, 4, 4, 300, 100, 40, 56, "br", (50, 0), "lse"),
    (torch.half, 1, 4, 1, 333, 333, 64, 64, "tl", None, "scale"), (torch.half, 4, 8, 8, 1, 500, 64, 64, None, None, "lse"),
    (torch.bfloat16, 2, 4, 2, 130, 513, 128, 128, "tl", (64, 20, "tl"), ""), (torch.bfloat16, 1, 4, 2, 200, 333, 128, 112, None, (20, 9, "br"), "lse"),
    (torch.bfloat16, 2, 8, 2, 150, 150, 64, 64, "br", None, "softcap"), (torch.half, 1, 8, 4, 90, 200, 128, 128, "br", (64, 0), "sinks"),
    (torch.bfloat16, 2, 4, 2, 128, 256, 128, 128, "br", None, "softcap sinks lse"), (torch.bfloat16, 1, 2, 1, 70, 100, 256, 256, "br", None, "softcap")]


@needs_gpu
@pytest.mark.parametrize("backward", ("sdpa", "deterministic"))
@pytest.mark.parametrize("D", (64, 128, 256))
@pytest.mark.parametrize("case", ("packed", "padded", "packed q"))
def test_our_gradients_of_sequences_on_a_gpu(glue, case, D, backward):
    """The same sequences by our kernels, twice: deterministic gradients have the same bits. nvcc builds two lines for each D and
    backward, so these have one type each."""
    dtype = HALVES[(D == 128) ^ (backward == "sdpa")]
    attend = functools.partial(sdpa.attention, backward=backward)
    check_gradients_of_sequences(case, attend, dtype, "cuda", D)
    (q_size, k_size), options, _ = sequences_of(case, "cuda")
    q, k = (drawn(*size, D, dtype=dtype, seed=seed).cuda().requires_grad_() for seed, size in enumerate((q_size, k_size)))
    runs = [torch.autograd.grad(attend(q, k, k, "br", **options).nan_to_num().float().square().sum(), (q, k)) for _ in range(2)]
    assert backward == "sdpa" or all(torch.equal(a, b) for a, b in zip(*runs))


@needs_gpu
@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("dtype", HALVES)
def test_sequences_of_pytorch_by_our_backward(glue, dtype):
    """varlen_attn and a jagged nested tensor have the gradients of PyTorch's backward, by its kernels and by ours."""
    from torch.nn.attention.varlen import varlen_attn
    torch.manual_seed(0)
    lengths = (300, 1, 129, 70)
    starts = starts_of(lengths, "cuda")
    tensors = [torch.randn(sum(lengths), heads, 128, device="cuda", dtype=dtype).requires_grad_() for heads in (4, 4, 4)]
    grad = torch.randn_like(tensors[0])

    def jagged(*rows):
        q, k, v = (torch.nested.nested_tensor_from_jagged(x, starts).transpose(1, 2) for x in rows)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).values()
    doubles = wide(tensors)
    want = torch.autograd.grad(of_sequences(*doubles, starts, starts, causal="br")[0], doubles, grad.double())
    try:
        for call in (lambda *x: varlen_attn(*x, starts, starts, 300, 300, window_size=(-1, 0)), jagged):
            for preference, own in (("torch", False), ("sdpa", True)):
                sdpa.activate(preference)
                got, names = kernels(lambda: torch.autograd.grad(call(*tensors), tensors, grad))  # noqa: B023
                assert any("sdpa_backward" in name for name in names) == own, (preference, names)
                check_near(got, want, 2 * LIMITS[dtype])
    finally:
        torch.nn.attention.restore_flash_attention_impl()


@needs_gpu
@pytest.mark.parametrize("backward", ("sdpa", "deterministic"))
@pytest.mark.parametrize("case", BACKWARDS, ids=str)
def test_our_gradients_on_a_gpu(glue, case, backward):
    """Compares gradients with double for any strides of dO, with poisoned memory and in a graph. Deterministic ones have
    the same bits in each run."""
    dtype, B, Hq, Hkv, Sq, Sk, D, Dv, causal, window, features = case
    q, k, v = tensors = [half(B, S, H, size, dtype=dtype, device="cuda").transpose(1, 2).requires_grad_()
                         for S, H, size in ((Sq, Hq, D), (Sk, Hkv, D), (Sk, Hkv, Dv))]
    sinks = torch.randn(Hq, device="cuda", dtype=dtype, requires_grad=True) if "sinks" in features else None
    cap, scale = 8.0 if "softcap" in features else None, 0.2 if "scale" in features else None
    inputs = [*tensors, *[sinks] * (sinks is not None)]
    of_lse = torch.randn(B, Hq, Sq, device="cuda") * visible(Sq, Sk, causal, window or (None, None)).any(-1)

    def run(grad):
        out, lse = sdpa.attention(q, k, v, causal, window, scale, softcap=cap, sinks=sinks, return_lse=True, backward=backward)
        outputs = ((out, grad), (lse, of_lse))[:1 + ("lse" in features)]
        torch.empty(1 << 28, dtype=torch.uint8, device="cuda").fill_(0xff)  # what the workspace and the gradients are made of
        return torch.autograd.grad([x for x, _ in outputs], inputs, [x for _, x in outputs])
    shape = torch.empty(B, Sq, Hq, Dv, dtype=dtype, device="cuda").transpose(1, 2)
    for name, make in GRADS.items():
        grad = make(shape)
        got, again = run(grad), run(grad)
        copies = wide(inputs)
        out, lse = reference(*copies[:3], visible(Sq, Sk, causal, window or (None, None)), scale, cap, *copies[3:])
        weighed = (out * grad.double()).sum() + (lse.where(lse > -torch.inf, 0) * of_lse.double()).sum() * ("lse" in features)
        for x, a, b, c in zip("qkvs", got, again, torch.autograd.grad(weighed, copies)):
            assert rel_rms(a, c) <= 2 * LIMITS[dtype] and (backward == "sdpa" or torch.equal(a, b)), (name, x)
    graph, grad = torch.cuda.CUDAGraph(), torch.randn_like(shape)
    want, names = kernels(lambda: run(grad))
    assert any("sdpa_backward" in x for x in names) and not any("cudnn" in x or "flash" in x for x in names), names
    with torch.cuda.graph(graph):
        captured = run(grad)
    for x in captured:
        x.fill_(torch.nan)
    graph.replay()
    assert all(rel_rms(a, b) <= LIMITS[dtype] and (backward == "sdpa" or torch.equal(a, b)) for a, b in zip(captured, want))


class Block(torch.nn.Module):
    """A layer of a GPT, with a head size of 64."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = torch.nn.LayerNorm(width), torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))

    def forward(self, x, attend):
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def by_math(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@functools.cache
def losses_of(attend, steps=200, batch=16, length=128, width=128, letters=32):
    """The losses of a tiny GPT that learns a Markov chain."""
    torch.manual_seed(0)
    chain = torch.softmax(3 * torch.randn(letters, letters), 1)
    text = torch.zeros(steps, batch, length + 1, dtype=torch.long)
    for i in range(length):
        text[..., i + 1] = torch.multinomial(chain[text[..., i].flatten()], 1).view(steps, batch)
    model = torch.nn.ModuleList([torch.nn.Embedding(letters, width), torch.nn.Embedding(length, width), Block(width), Block(width),
                                 torch.nn.Linear(width, letters)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses, text, place = torch.zeros(steps, device="cuda"), text.cuda(), torch.arange(length, device="cuda")
    for step in range(steps):
        with torch.autocast("cuda", torch.bfloat16):
            x = model[0](text[step, :, :-1]) + model[1](place)
            for block in model[2:4]:
                x = block(x, attend)
            loss = F.cross_entropy(model[4](x).flatten(0, 1).float(), text[step, :, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    return losses.view(-1, 20).mean(1)


@needs_gpu
@pytest.mark.parametrize("entry", ("F.sdpa", "attention", "checkpoint", "torch.compile"))
def test_a_tiny_gpt(glue, entry):
    """200 steps with our backward have the losses of PyTorch's math backend."""
    want = losses_of(by_math)
    sdpa.activate("sdpa")
    try:
        run = lambda *x: F.scaled_dot_product_attention(*x, is_causal=True)  # noqa: E731
        if entry == "attention":
            run = lambda *x: sdpa.attention(*x, "br", backward="sdpa")  # noqa: E731
        _, names = kernels(lambda: losses_of(run, steps=20))
        assert any("sdpa_backward" in x for x in names) and not any("cudnn" in x or "flash" in x for x in names)
        torch.compiler.reset()
        again = lambda *x: torch.utils.checkpoint.checkpoint(run, *x, use_reentrant=False)  # noqa: E731
        got = losses_of({"torch.compile": torch.compile(run, fullgraph=True), "checkpoint": again}.get(entry, run))
    finally:
        sdpa.activate()
        torch.nn.attention.restore_flash_attention_impl()
    assert want[-1] < 0.75 * want[0] and ((got - want).abs() <= 0.02 * want).all(), (got, want)


@needs_gpu
def test_deterministic_training(active):
    """torch.use_deterministic_algorithms(True) selects our kernels, behind F.scaled_dot_product_attention as well; so does activate("sdpa")
    behind each of PyTorch's operators. vmap of grad gives the gradients of each sample."""
    tensors = [half(3, 4, 200, 64, device="cuda").requires_grad_() for _ in "qkv"]
    run = lambda *x: F.scaled_dot_product_attention(*x, is_causal=True)  # noqa: E731
    grad = torch.randn_like(tensors[0])
    want = gradients(lambda *x: reference(*x, visible(200, 200, "br", (None, None)))[0], wide(tensors), grad.double())
    torch.use_deterministic_algorithms(True)
    try:
        got, names = kernels(lambda: gradients(run, tensors, grad))
        same = gradients(run, tensors, grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert any("sdpa_backward" in x for x in names) and all(torch.equal(a, b) for a, b in zip(got, same))
    check_near(got, want, 2 * LIMITS[torch.half])
    sdpa.activate("sdpa")
    for choice, Sk in (SDPBackend.EFFICIENT_ATTENTION, 300), (SDPBackend.FLASH_ATTENTION, 200), (SDPBackend.CUDNN_ATTENTION, 200):
        k, v = (half(3, 4, Sk, 64, device="cuda").requires_grad_() for _ in "kv")
        with sdpa_kernel(choice):
            got, names = kernels(lambda: gradients(run, [tensors[0], k, v], grad))  # noqa: B023
        assert any("sdpa_backward" in x for x in names), choice
        copies = wide([tensors[0], k, v])
        for a, b in zip(got, gradients(lambda *x: reference(*x, visible(200, Sk, "tl", (None, None)))[0], copies, grad.double())):  # noqa: B023
            assert rel_rms(a, b) <= 2 * LIMITS[torch.half], choice
    x = [y.detach() for y in (*tensors, grad)]
    try:
        each = torch.vmap(torch.func.grad(lambda q, k, v, g: (run(q[None], k[None], v[None])[0] * g).sum(), (0, 1, 2)))(*x)
    finally:
        sdpa.activate()
    check_near(each, want[1:], 2 * LIMITS[torch.half])


@needs_gpu
@pytest.mark.parametrize("expanded_first", (True, False))
def test_plans_of_another_layout(expanded_first):
    """PyTorch caches cuDNN's plans by the strides of q, k and v, so O and dO must have the same strides whenever these do."""
    S = 192 + 64 * expanded_first  # plans of its own
    k, v = (half(2, 4, S, 128, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    expanded = half(1, S, 4, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2).expand(2, 4, S, 128)
    for q in (expanded, expanded.contiguous())[::1 if expanded_first else -1]:
        tensors = [x.detach().requires_grad_() for x in (q, k, v)]
        grad = torch.randn_like(k)
        want = gradients(lambda *x: reference(*x)[0], wide(tensors), grad.double())
        check_near(gradients(sdpa.attention, tensors, grad), want, 3e-2)


@needs_gpu
def test_threads_on_one_stream():
    """Calls from several threads run in one stream: they share its workspace, and each has its own scratch memory."""
    problems = []
    for B, Sk in ((2, 700), (8, 3000), (4, 9000)):
        q, k, v = (half(B, H, S, 128, dtype=torch.bfloat16, device="cuda") for H, S in ((8, 1), (2, Sk), (2, Sk)))
        lengths = torch.randint(1, Sk + 1, (B,), dtype=torch.int32, device="cuda")
        paged, table = in_pages((k, v), 16)
        for options in ({}, {"k_lengths": lengths}):
            want = sdpa.attention(q, k, v, **options)
            problems += [(want, q, k, v, options), (want, q, *paged, {**options, "page_table": table, **({} if options else {"most_keys": Sk})})]
    wrong = []

    def work(seed):
        for i in range(100):
            want, *tensors, options = problems[(i * seed + i) % len(problems)]
            if rel_rms(sdpa.attention(*tensors, **options), want) > LIMITS[torch.bfloat16]:
                wrong.append((tensors[0].shape, list(options)))
    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 4, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_gpu
@pytest.mark.parametrize("scale", (0.0, 1e-46, 1e-40, 0.5))
def test_scale(active, glue, scale):
    """The scale may be 0 or too small for a float. Checks O, LSE and gradients."""
    tensors = [torch.randn(1, 4, 256, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
    grad = torch.randn_like(tensors[0])
    want = gradients(lambda *x: reference(*x, visible(256, 256, "br", (None, None)), scale)[0], wide(tensors), grad.double())
    for run in (lambda *x: F.scaled_dot_product_attention(*x, is_causal=True, scale=scale), lambda *x: sdpa.attention(*x, "br", scale=scale)):
        got, names = kernels(lambda: gradients(run, tensors, grad))
        assert any("sdpa::" in name for name in names)
        for a, b in zip(got, want):
            assert rel_rms(a, b) <= 3e-2 or (scale < 1e-30 and a.norm() <= 1e-3 and b.norm() <= 1e-3)
    lse = sdpa.attention(*tensors, scale=scale, return_lse=True)[1]
    assert (lse - reference(*tensors, None, scale)[1]).abs().max() <= 1e-2
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(RuntimeError, match=f"^sdpa.attention: scale={bad:g} is not from 0 to 10"):
            sdpa.attention(*tensors, scale=bad)


@needs_gpu
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_varlen_attn_on_a_gpu(active, window):
    """Our kernels run, and PyTorch's backward, FlashAttention's or cuDNN's, accepts their O and LSE."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn
    shapes = [(torch.bfloat16, 8, (100, 0, 333, 1), None), (torch.half, 8, (200, 30), (333, 500))]
    shapes += [(torch.bfloat16, 2, (5, 300), (700, 300))] * HAS_TABLES
    dtype, Hkv, rows, keys = shapes[list(WINDOWS).index(window) % len(shapes)]
    starts = starts_of(rows, "cuda")
    k_starts = starts if keys is None else starts_of(keys, "cuda")
    sizes = (sum(rows), 8), (sum(keys or rows), Hkv), (sum(keys or rows), Hkv)
    tensors = [half(*size, 128, dtype=dtype, device="cuda").requires_grad_() for size in sizes]
    options = dict(return_aux=AuxRequest(lse=True), window_size=window, **OF_GROUPS)

    def call(*tensors):
        return varlen_attn(*tensors, starts, k_starts, max(rows), max(keys or rows), **options)
    (out, lse), names = kernels(lambda: call(*tensors))
    assert any("sdpa::" in name for name in names) and not any("pytorch_flash" in name for name in names), names
    want, want_lse = of_sequences(*tensors, starts, k_starts, **WINDOWS[window])
    seen = want_lse > -torch.inf
    assert near(out, want, LIMITS[dtype]) and torch.equal(lse > -torch.inf, seen)
    assert lse.shape == want_lse.shape and (lse - want_lse)[seen].abs().max() <= 1e-2
    grad, doubles = torch.randn_like(out), wide(tensors)
    got = torch.autograd.grad(out, tensors, grad)
    expected = of_sequences(*doubles, starts, k_starts, **WINDOWS[window])[0]
    for a, b in zip(got, torch.autograd.grad(expected, doubles, grad.double())):
        assert near(a, b, 2 * LIMITS[dtype])
    torch.compiler.reset()
    compiled, _ = torch.compile(call, fullgraph=True)(*tensors)
    assert compiled.stride() == out.stride() and near(compiled, want, LIMITS[dtype])
    for a, b in zip(torch.autograd.grad(compiled, tensors, grad), got):
        assert near(a, b, LIMITS[dtype])
    torch.nn.attention.restore_flash_attention_impl()
    assert not any("sdpa::" in name for name in kernels(lambda: call(*tensors))[1])
    sdpa.activate()


@needs_gpu
@pytest.mark.skipif(not HAS_TABLES, reason="a PyTorch before 2.12")
def test_varlen_attn_of_pages_on_a_gpu(active):
    from torch.nn.attention.varlen import varlen_attn, varlen_attn_out
    q, rows = half(5, 8, 128, dtype=torch.bfloat16, device="cuda"), starts_of((1, 4), "cuda")
    pages = [half(64, 16, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
    table, used = torch.randperm(64, device="cuda").view(2, 32).int(), starts_of((7, 493), "cuda")[1:]
    packed = (x[table.long()].flatten(0, 2) for x in pages)
    want, _ = of_sequences(q, *packed, rows, starts_of((512, 512)), used, causal="br")
    options = dict(window_size=(-1, 0), enable_gqa=True, seqused_k=used, block_table=table)
    out, names = kernels(lambda: varlen_attn(q, *pages, rows, None, 4, 512, **options))
    assert near(out, want, LIMITS[torch.bfloat16]) and any("sdpa::" in name for name in names)
    given = torch.empty_like(q)
    names = kernels(lambda: varlen_attn_out(given, q, *pages, rows, None, 4, 512, **options))[1]
    assert torch.equal(given, out) and not any("copy" in name.lower() for name in names), names


@needs_gpu
def test_8_bits_on_a_gpu(active):
    from torch.nn.attention.experimental._scaled_dot_product_attention_quantized import \
        _scaled_dot_product_attention_quantized as function
    for order, causal in zip(itertools.permutations(range(3)), itertools.cycle((False, True))):
        shapes = (2, 8, 200, 128), (2, 2, 333, 128), (2, 2, 333, 128)
        q, k, v = (half(*(shape[i] for i in (*order, 3)), device="cuda").to(E4M3)
                   .permute(*(order.index(i) for i in range(3)), 3) for shape in shapes)
        factors = [torch.rand(2, 2, device="cuda") + 0.5 for _ in "qkv"]
        out, names = kernels(lambda: function(q, k, v, causal, None, *factors))
        heads = [x.double() * f.double().repeat_interleave(x.shape[1] // 2, 1)[..., None, None]
                 for x, f in zip((q, k, v), factors)]
        want, _ = reference(*heads, visible(200, 333, "br" if causal else None, (None, None)))
        assert near(out, want, LIMITS[E4M3]) and out.dtype == torch.bfloat16 and out.stride() == q.stride()
        copies = [name for name in names if "copy" in name.lower()]  # one of q's factors, which PyTorch has per head of K
        assert any("sdpa::" in name for name in names) and len(copies) <= 1, names
        torch.compiler.reset()
        compiled = torch.compile(lambda *x: function(*x[:3], causal, None, *x[3:]), fullgraph=True)(q, k, v, *factors)
        assert torch.equal(compiled, out) and compiled.stride() == out.stride()
    halves = sdpa.attention(q, k, v, "br", q_descale=factors[0], out_dtype=torch.float16)
    assert rel_rms(sdpa.attention(q, k, v, "br", q_descale=factors[0], out_dtype=torch.bfloat16), halves) <= 1e-2


@needs_gpu
@pytest.mark.parametrize("Sq, shape", [(1, (2, 4, 3000, 128)), (200, (2, 4, 256, 128)), (77, (1, 8, 300, 64))], ids=str)
def test_layouts(active, Sq, shape):
    """For any strides of q, k and v, O is correct and has the strides of the fake kernel; expanded K and V are not copied."""
    B, H, Sk, D = shape
    make = lambda *sizes: torch.randn(sizes, device="cuda", dtype=torch.half if D == 64 else torch.bfloat16)  # noqa: E731
    for q in layouts(B, H, Sq, D, make):
        k = v = make(B, H, Sk, D)
        check_layout(q, k, v)
    q = make(B, H, Sq, D)
    for k, v in zip(layouts(B, H, Sk, D, make), layouts(B, H, Sk, D, make)):
        check_layout(q, k, v)
        check_layout(q, k, make(B, H, Sk, D))
        check_layout(q, make(B, H, Sk, D), v)


def check_layout(q, k, v):
    where = (q.stride(), k.stride(), v.stride(), q.shape, k.shape)
    want, _ = reference(q, k, v)
    fits = all(x.data_ptr() % 16 == 0 and all(s % 8 == 0 for s, n in zip(x.stride(), x.shape[:3]) if n > 1) for x in (q, k, v))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    with FakeTensorMode():
        fakes = [torch.empty_strided(x.shape, x.stride(), device="cuda", dtype=x.dtype) for x in (q, k, v)]
        promised = [flash(*fakes)[0].stride()] * 2
        promised += [sdpa.OPERATOR(*fakes, 0, -1, -1, 0, None, 0.0, *[None] * 8, 0)[0].stride()] if fits else []
    entries = [lambda: F.scaled_dot_product_attention(q, k, v), lambda: flash(q, k, v)[0], lambda: sdpa.attention(q, k, v)]
    why = sdpa.why_not(q, k, v)
    for run, strides in zip(entries, promised):
        out, names = kernels(run)
        assert rel_rms(out, want) <= LIMITS[q.dtype], where
        assert [s for s, n in zip(out.stride(), out.shape) if n > 1] == [s for s, n in zip(strides, out.shape) if n > 1], where
        assert any("sdpa::" in name for name in names) == (not why), (why, where)
        if fits and 0 not in (*q.stride(), k.stride(2), v.stride(2)):  # nothing is copied
            assert not any("copy" in name for name in names), (where, names)


@needs_gpu
def test_other_rows(active):
    """Rows with unsupported strides are copied, also for gradients; a negative view has its negated values."""
    q = torch.randn(1, 4, 128, 200, device="cuda", dtype=torch.half).mT.requires_grad_()
    k = torch.randn(1, 4, 200, 128, device="cuda", dtype=torch.half)
    for run, wanted in ((lambda x: F.scaled_dot_product_attention(x, k, k), None), (lambda x: F.scaled_dot_product_attention(x, k, k, mask), "mask")):
        mask = torch.rand(200, 200, device="cuda") > 0.3
        (out, names), want = kernels(lambda: run(q)), reference(q.detach(), k, k, mask if wanted else None)[0]
        assert rel_rms(out, want) <= 2e-3 and any("sdpa::" in name for name in names)
        out.sum().backward()
        assert q.grad.abs().sum() > 0
        with torch.no_grad():
            assert rel_rms(run(torch._neg_view(q.contiguous())), run(-q.contiguous())) <= 1e-3
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert sdpa.why_not(k.float(), k.float(), k.float()) == "there is no line for Float"


@needs_gpu
def test_a_page_table_of_no_columns():
    q, pages = (torch.randn(*shape, device="cuda", dtype=torch.half) for shape in ((4, 2, 1, 64), (1, 2, 16, 64)))
    out, lse = sdpa.attention(q, pages, pages, page_table=torch.empty(4, 0, device="cuda", dtype=torch.int32), return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()


@needs_gpu
def test_misaligned_under_compile(active):
    torch.compiler.reset()
    q = torch.randn(2, 100, 8, 129, device="cuda", dtype=torch.bfloat16)[..., 1:].transpose(1, 2)
    k = torch.randn(2, 8, 100, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.compile(lambda q, k: F.scaled_dot_product_attention(q, k, k).transpose(1, 2).reshape(2, 100, 1024) + 1)(q, k)
    assert rel_rms(out, F.scaled_dot_product_attention(q, k, k).transpose(1, 2).reshape(2, 100, 1024) + 1) <= 1e-3


@needs_gpu
@pytest.mark.parametrize("entry", ("F.sdpa", "attention"))
def test_reduce_overhead(active, entry):
    """CUDA graph trees own all memory of their pools, so workspaces are allocated elsewhere and scratch memory is freed after the call."""
    run = F.scaled_dot_product_attention if entry == "F.sdpa" else sdpa.attention
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda q, k, v: run(q * 1, k, v) * 2, mode="reduce-overhead", dynamic=False)
    with torch.no_grad():
        for Sq, Sk in ((1, 9000), (1, 20000), (500, 3000), (1000, 1000), (1, 5000)):
            for _ in range(5):
                q, k, v = (torch.randn(1, 8, S, 128, device="cuda", dtype=torch.bfloat16) for S in (Sq, Sk, Sk))
                torch.compiler.cudagraph_mark_step_begin()
                assert rel_rms(compiled(q, k, v) / 2, reference(q, k, v)[0]) <= LIMITS[q.dtype], (Sq, Sk)
        assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


def outside_of_pytorch():
    """Used bytes of GPU memory outside PyTorch's allocator."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


@needs_gpu
@pytest.mark.parametrize("dtype", (torch.half, E4M3))
@pytest.mark.parametrize("kind", ("pages", "few keys", "many keys"))
def test_memory_outside_of_pytorch(dtype, kind):
    """35 graphs use 64 KB each in addition to CUDA's own memory per graph, 64 streams 1 MB each; all results have the same bits."""
    B, Sk = 16, 500 if kind == "few keys" else 8000
    q, k, v = (half(B, H, S, 128, device="cuda").to(dtype) for H, S in ((32, 1), (8, Sk), (8, Sk)))
    options = {}
    if kind == "pages":
        (k, v), table = in_pages((k, v), 16)
        options = dict(page_table=table, k_lengths=torch.randint(1, Sk + 1, (B,), dtype=torch.int32, device="cuda"))
    want, pool, x = sdpa.attention(q, k, v, **options), torch.cuda.graph_pool_handle(), torch.zeros(9, device="cuda")

    def bytes_of_graphs(run):
        before, graphs = outside_of_pytorch(), [torch.cuda.CUDAGraph() for _ in range(35)]
        for graph in graphs:
            with torch.cuda.graph(graph, pool=pool):
                graph.out = run()
        for graph in graphs:
            graph.replay()
        return outside_of_pytorch() - before, graphs
    of_any, kept = bytes_of_graphs(lambda: x + 1 - x)
    of_ours, graphs = bytes_of_graphs(lambda: sdpa.attention(q, k, v, **options))
    for graph in graphs:
        graph.out.fill_(1)
        graph.replay()
        assert torch.equal(graph.out, want)
    assert of_ours <= of_any + 35 * 65536 + (4 << 20), (of_ours, of_any)  # CUDA takes memory by 2 MB
    streams = [torch.cuda.Stream(priority=-(i % 2)) for i in range(64)]
    before = outside_of_pytorch()
    for stream in streams:
        with torch.cuda.stream(stream):
            assert torch.equal(sdpa.attention(q, k, v, **options), want)
    assert len({stream.cuda_stream for stream in streams}) == 64 and outside_of_pytorch() <= before + (64 << 20)


@needs_gpu
def test_workspaces_are_outside_of_pools():
    q, k, v = (torch.randn(1, 8, S, 128, device="cuda", dtype=torch.half) for S in (1, 20000, 20000))
    want = sdpa.attention(q, k, v)
    pool, before = torch.cuda.MemPool(), torch.cuda.memory_allocated()
    with torch.cuda.use_mem_pool(pool), torch.cuda.stream(torch.cuda.Stream()):
        same = torch.equal(sdpa.attention(q, k, v), want)
        assert torch.cuda.memory_allocated() == before and same
    q, k, v = (torch.randn(32, 8, S, 128, device="cuda", dtype=torch.half) for S in (1, 5000, 5000))
    want = sdpa.attention(q, k, v)
    with torch.cuda.stream(torch.cuda.Stream()):  # all memory is in PyTorch's cache, which gives it back to the workspace
        held = [torch.empty(torch.cuda.mem_get_info()[0] - (256 << 20), dtype=torch.uint8, device="cuda")]
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                held.append(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
        del held
        assert torch.cuda.mem_get_info()[0] < 8 << 20
        assert torch.equal(sdpa.attention(q, k, v), want)
    torch.cuda.empty_cache()


@needs_gpu
def test_autocast_and_descales():
    q, k, v = (torch.randn(2, H, 200, 128, device="cuda", requires_grad=True) for H in (8, 2, 2))
    with torch.autocast("cuda", torch.bfloat16):
        out = sdpa.attention(q, k, v, "br")
        assert out.dtype == torch.bfloat16 and torch.equal(out, sdpa.attention(*(x.bfloat16() for x in (q, k, v)), "br"))
    out.sum().backward()
    assert q.grad.dtype == k.grad.dtype == torch.float32
    q, k, v = (x.detach().to(torch.float8_e4m3fn) for x in (q, k, v))
    factors = torch.rand(2, 2, device="cuda") + 0.5  # one for each key head, as FlashAttention-3 has them
    with torch.autocast("cuda", torch.bfloat16):
        out = sdpa.attention(q, k, v, q_descale=factors, k_descale=factors)
    assert torch.equal(out, sdpa.attention(q, k, v, q_descale=factors.repeat_interleave(4, 1), k_descale=factors))


@needs_gpu
def test_why_not_is_never_silent(active):
    """Reasons that need a GPU; test_why_not has those of tensors."""
    q = torch.randn(1, 4, 100, 128, device="cuda", dtype=torch.bfloat16)
    backends = SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    for context, options in (*((sdpa_kernel(backend), {}) for backend in backends), (contextlib.nullcontext(), {}),
                             (contextlib.nullcontext(), {"attn_mask": torch.zeros(100, 100, device="cuda", dtype=torch.bfloat16)})):
        with context:
            why = sdpa.why_not(q, q, q, **options)
            names = kernels(lambda: F.scaled_dot_product_attention(q, q, q, **options))[1]
        assert any("sdpa::" in name for name in names) == (not why), (why, names)
    with torch.autocast("cuda", torch.bfloat16):
        x = q.float()
        assert sdpa.why_not(x, x, x) == "" and any("sdpa::" in name for name in kernels(lambda: F.scaled_dot_product_attention(x, x, x))[1])
    with sdpa_kernel(SDPBackend.MATH):
        assert sdpa.why_not(q, q, q) == "PyTorch chooses its math kernel: the others are disabled or do not support this problem"


@needs_gpu
def test_graphs_and_streams(active):
    """Problems with split keys need a workspace per stream, per graph, and per stream within a graph."""
    make = lambda Sk: [torch.randn(1, 8, S, 128, device="cuda", dtype=torch.half) for S in (1, Sk, Sk)]  # noqa: E731
    problems = [make(Sk) for Sk in (9000, 20000, 5000)]
    want = [reference(*x)[0] for x in problems]
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(20):
        torch.cuda.synchronize()
        got = []
        for stream, x in zip(streams, problems):
            with torch.cuda.stream(stream):
                got += [F.scaled_dot_product_attention(*x) for _ in range(4)]
        torch.cuda.synchronize()
        assert all(rel_rms(o, want[i // 4]) <= 2e-3 for i, o in enumerate(got))
    free = []
    for round in range(4):
        graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        for graph in graphs:
            with torch.cuda.graph(graph):
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    graph.a = F.scaled_dot_product_attention(*problems[0])
                graph.b = F.scaled_dot_product_attention(*problems[1])
                graph.c = F.scaled_dot_product_attention(*problems[2])
                torch.cuda.current_stream().wait_stream(side)
        for _ in range(20):
            for stream, graph in zip(streams, graphs):
                with torch.cuda.stream(stream):
                    graph.replay()
            torch.cuda.synchronize()
            assert all(rel_rms(o, w) <= 2e-3 for graph in graphs for o, w in zip((graph.a, graph.b, graph.c), want))
        _, names = kernels(graphs[0].replay)
        assert not [name for name in names if "emset" in name], names
        del graph, graphs
        torch.cuda.synchronize()
        F.scaled_dot_product_attention(*problems[0])
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] >= free[1], free  # a graph's workspace goes with it


@needs_gpu
def test_bad_input(active):
    """attention() refuses these inputs; F.scaled_dot_product_attention falls back to PyTorch's own kernels."""
    q = torch.randn(1, 2, 30, 64, device="cuda", dtype=torch.half)
    rows = "the rows of q, k or v are not contiguous or do not all start at a multiple of 16 bytes"
    for bad, why in ((q.float(), "no line for Float"), (torch.randn(1, 2, 30, 76, device="cuda").half(), "no line for D=76"),
                     (torch.randn(1, 2, 64, 30, device="cuda").half().mT, rows),
                     (torch.randn(1, 2, 30, 65, device="cuda").half()[..., 1:], rows)):
        with pytest.raises(RuntimeError, match=why):
            sdpa.attention(bad, bad, bad)
        assert why == rows or why in sdpa.why_not(bad, bad, bad)
        out, want = (F.scaled_dot_product_attention(x, x, x) for x in (bad, bad.double()))
        assert rel_rms(out, want) <= 2e-3
    with pytest.raises(ValueError, match="q, k and v are on cuda:0, cpu and cuda:0, not on one device"):
        sdpa.attention(q, q.cpu(), q)
    with pytest.raises(RuntimeError, match="different dtypes"):
        sdpa.attention(q, q.bfloat16(), q.bfloat16())
    with pytest.raises(RuntimeError, match="heads of q are no multiple"):
        sdpa.attention(q, torch.cat([q, q[:, :1]], 1), torch.cat([q, q[:, :1]], 1))
    for options, why in (({"window": (-7, 0)}, "window_left=-7 is outside"), ({"window": (0, 2**32)}, "window_right=4294967296 is outside"),
                         ({"most_keys": -3}, "most_keys=-3 is outside"), ({"most_keys": 3}, "most_keys is for sequences of"),
                         ({"softcap": 1e-50}, "softcap=1e-50 is not from 1e-18"), ({"softcap": 1e-40}, "must be 0, or 1e-18 to 1e18")):
        with pytest.raises(RuntimeError, match=why):
            sdpa.attention(q, q, q, **options)
    with pytest.raises(RuntimeError, match="q_descale is for e4m3"):
        sdpa.attention(q, q, q, q_descale=torch.ones(1, device="cuda"))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert not any("sdpa::" in name for name in kernels(lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5))[1])
