"""Runs ONNX's node tests of the Attention operator with lines of configs.txt on the CPU backend.

A line gets a case's inputs rounded to its type. The expected output is what ONNX's reference computes of the same rounded
inputs in float32. ONNX's stored outputs are those of inputs that were not rounded, and in fp16 and bf16 they were
rounded after each step, so they are less accurate than a line's. O must be as near as ONNX wants: within the case's
rtol (1e-3) and atol (1e-7), in bf16 within the rtol of 2^-6 that ONNX's runner takes there. The stored outputs have to agree
with the reference as nearly.
D is padded with zeros to HEAD_DIM. Past keys and values are put in front of the new ones here; present_key and
present_value, which are no more than that, are not compared, nor is qk_matmul_output, which no kernel writes. Batches with
lengths of their own are a launch each. A case with attn_mask runs by the line with USE_BIAS=1, or with USE_BIAS=2 if it is
bool; what a mask hides is told by the mask alone, and a mask that broadcasts has strides of 0.
Of each case ONNX has a variant `_expanded` as well, with the same inputs and outputs, in which other operators stand for
Attention.

usage: python3 -m pytest tests/test_onnx.py
       python3 tests/test_onnx.py              writes its table into docs/TESTING.md"""
import ctypes
import functools
import math
import os
import sys
from collections import Counter

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import builds  # noqa: E402
import engine  # noqa: E402
import page  # noqa: E402

onnx = pytest.importorskip("onnx", "1.23", reason="its cases come with PyPI's onnx: python3 -m pip install 'onnx==1.23.*'")
import ml_dtypes  # noqa: E402
import onnx.backend.test.case.node.attention  # noqa: E402,F401: makes the cases
from onnx.backend.test.case import node as onnx_nodes  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

LINES = ("scalar_minimal USE_SOFTCAP=2", "wmma_all", "mma_lazy USE_SOFTCAP=2", "hopper USE_SOFTCAP=2",
         "ampere_d128_bf16 USE_SOFTCAP=2")
TYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}


# ---- ONNX's cases ----

class Case:
    """One of ONNX's cases: attributes, inputs and outputs by their names in the operator's specification."""

    def __init__(self, case):
        node, = case.model.graph.node
        inputs, outputs = case.data_sets[0]
        self.name, self.model = case.name.removeprefix("test_attention_"), case.model
        self.rtol, self.atol = case.rtol, case.atol
        self.attributes = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
        self.inputs = dict(zip(filter(None, node.input), inputs))
        self.outputs = dict(zip(filter(None, node.output), outputs))

    def left_out(self):
        """The outputs that are not compared, or an empty string."""
        return "Q @ K.T is an output: Y alone is compared" if "qk_matmul_output" in self.outputs else ""

    def knobs(self):
        """Knobs of the case's build in addition to the line's."""
        return f" USE_BIAS={1 + (self.inputs['attn_mask'].dtype == bool)}" if "attn_mask" in self.inputs else ""

    def suits(self, text):
        """True if the line supports the case."""
        return ("softcap" not in self.attributes or "USE_SOFTCAP" in text) and not (self.knobs() and "wmma" in text)

    def launches(self, Sq, Sk, past):
        """(batches, their keys, the key at which query 0 stands) of each launch."""
        if "nonpad_kv_seqlen" not in self.inputs:
            return [(slice(None), Sk, past)]
        lengths = self.inputs["nonpad_kv_seqlen"].tolist()
        # The last query stands at the last key.
        return [(slice(b, b + 1), keys, keys - Sq) for b, keys in enumerate(lengths)]

    def expected(self, dtype):
        """Y by ONNX's reference in float32, of inputs rounded to a type."""
        inputs = {name: x if x.dtype in (np.int64, bool) else x.astype(dtype).astype(np.float32)
                  for name, x in self.inputs.items()}
        return ReferenceEvaluator(self.model).run(None, inputs)[0]

    def compare(self, Y, expected):
        """Raises an AssertionError unless Y is within ONNX's tolerances."""
        rtol = max(self.rtol, 2 ** -6) if Y.dtype == ml_dtypes.bfloat16 else self.rtol
        np.testing.assert_allclose(Y.astype(np.float32), expected.astype(np.float32), rtol, self.atol)


CASES = [Case(case) for case in onnx_nodes._NodeTestCases if case.model.graph.node[0].op_type == "Attention"]


# ---- a line ----

def heads_of(x, heads):
    """[B,H,S,D]; [B,S,H * D] is viewed as that."""
    return x if x.ndim == 4 else x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def visible(Sq, Sk, past, causal=0, left=-1, right=-1):
    """Returns the number of leading keys that no query sees, and SdpaParams's mask for the rest. ONNX's query i has position
    p = past + i: it sees keys p - left to p + right, and none after p if causal."""
    if causal and past in (0, Sk - Sq):
        return 0, dict(causal=engine.CAUSAL.index("br" if past else "tl"), window_left=left, window_right=-1)
    right, unseen = 0 if causal else right, max(past - left, 0) if left >= 0 else 0
    past -= unseen
    return unseen, dict(window_left=left if left < 0 else left - past, window_right=right if right < 0 else right + past)


class Line:
    """A line's library, and arrays in the device memory of its CPU backend."""

    def __init__(self, text):
        self.line, = builds.parse_contenders(text.split())
        path = builds.host_library(*self.line.words, program="tests/host_library.cu")
        self.library = engine.LoadedLine(self.line, path).library
        self.library.host_allocate.restype = ctypes.c_void_p
        self.dtype, self.addresses = TYPES[self.line.dtype], []

    def array(self, shape, dtype):
        """Zeros in that memory."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        self.addresses.append(self.library.host_allocate(ctypes.c_size_t(size)))
        array = np.frombuffer((ctypes.c_uint8 * size).from_address(self.addresses[-1]), np.uint8)
        array.fill(0)
        return array.view(dtype).reshape(shape)

    def free(self):
        while self.addresses:
            self.library.host_free(ctypes.c_void_p(self.addresses.pop()))

    def tensor(self, values, is_3d):
        """The values padded to [B,H,S,HEAD_DIM]; those of a 3D case stand in the order [B,S,H,HEAD_DIM]."""
        B, H, S, D = values.shape
        order = (B, S, H) if is_3d else (B, H, S)
        tensor = self.array((*order, self.line.D), self.dtype)
        tensor = tensor.swapaxes(1, 2) if is_3d else tensor
        tensor[..., :D] = values
        return tensor

    def mask(self, mask, sizes):
        """[B,Hq,Sq,keys], with stride 0 in dimensions that the case's mask broadcasts. Keys beyond it are hidden."""
        mask = np.asarray(mask)[(None,) * (4 - mask.ndim)]
        whole = np.full((*mask.shape[:3], sizes[3]), False if mask.dtype == bool else -np.inf)
        whole[..., :mask.shape[3]] = mask
        array = self.array(whole.shape, np.uint8 if mask.dtype == bool else self.dtype)
        array[...] = whole
        return np.broadcast_to(array, sizes)

    def launch(self, tensors, mask, harm, **more):
        Q, K = tensors["Q"], tensors["K"]
        p = engine.SdpaParams(B=len(Q), Hq=Q.shape[1], Hkv=K.shape[1], Sq=Q.shape[2], Sk=K.shape[2], D=self.line.D, **more)
        if mask is not None:
            p.bias = mask.__array_interface__["data"][0]
            p.bias_strides = engine.Strides(*(stride // mask.itemsize for stride in mask.strides[:3]))
        for name, tensor in tensors.items():
            setattr(p, name, tensor.ctypes.data)
            setattr(p, name.lower(), engine.Strides(*(stride // tensor.itemsize for stride in tensor.strides[:3])))
        harm(p)
        p.workspace = self.array((self.library.sdpa_library_workspace_bytes(ctypes.byref(p)),), np.uint8).ctypes.data
        text = ctypes.create_string_buffer(256)
        if self.library.sdpa_library_forward(ctypes.byref(p), None, text, ctypes.c_size_t(256)):
            raise engine.CudaError(text.value.decode())

    def run(self, case, harm=lambda p: None):
        """Computes Y of a case; harm changes the parameters of each launch."""
        attributes, is_3d = case.attributes, case.inputs["Q"].ndim == 3
        Q = heads_of(case.inputs["Q"], attributes.get("q_num_heads"))
        K, V = (heads_of(case.inputs[name], attributes.get("kv_num_heads")) for name in "KV")
        past = 0
        if "past_key" in case.inputs:
            past = case.inputs["past_key"].shape[2]
            K, V = (np.concatenate((case.inputs[name], x), axis=2) for name, x in (("past_key", K), ("past_value", V)))
        (B, _, Sq, D), Sk = Q.shape, K.shape[2]
        unwritten = np.full((*Q.shape[:3], self.line.D), np.nan)
        tensors = {name: self.tensor(values, is_3d) for name, values in zip("QKVO", (Q, K, V, unwritten))}
        seen = self.mask(case.inputs["attn_mask"], (B, Q.shape[1], Sq, Sk)) if "attn_mask" in case.inputs else None
        for batches, keys, past in case.launches(Sq, Sk, past):
            first, mask = visible(Sq, keys, past, attributes.get("is_causal", 0), attributes.get("left_window_size", -1),
                                  attributes.get("right_window_size", -1))
            part = {name: x[batches, :, first:keys] if name in "KV" else x[batches] for name, x in tensors.items()}
            part_seen = None if seen is None else seen[batches, :, :, first:keys]
            self.launch(part, part_seen, harm, scale=attributes.get("scale", D ** -0.5), softcap=attributes.get("softcap", 0), **mask)
        Y = tensors["O"][..., :V.shape[3]].copy()
        self.free()
        return Y.swapaxes(1, 2).reshape(B, Sq, -1) if is_3d else Y


line_of = functools.cache(Line)


@functools.cache
def failures(text, harm=lambda p: None, every=1):
    """{name: error} of the cases whose Y is wrong on a line; every=n runs each nth case."""
    found = {}
    for case in [case for case in CASES if case.suits(text)][::every]:
        line = line_of(text + case.knobs())
        try:
            case.compare(line.run(case, harm), case.expected(line.dtype))
        except AssertionError as error:
            found[case.name] = str(error)
    return found


# ---- the table ----

def table():
    """The tables in docs/TESTING.md."""
    rows = []
    for text in LINES:
        suited = [case for case in CASES if case.suits(text)]
        masked = sum("attn_mask" in case.inputs for case in suited)
        rows.append([f"`{text}`", len(suited) - len(failures(text)), len(failures(text)), masked])
    reasons = Counter(filter(None, (case.left_out() for case in CASES)))
    return page.table(["line", "#passed", "#failed", "#with a mask tensor"], rows) + "\n" + page.table(
        ["left out", "#cases"], [row for row in sorted(reasons.items()) if row[0]])


# ---- the tests ----

@pytest.mark.parametrize("text", [LINES[0], *(pytest.param(text, marks=pytest.mark.long) for text in LINES[1:])])
def test_the_cases_of_onnx(text):
    assert failures(text) == {}


def test_the_reference_gives_what_onnx_stores():
    for case in CASES:
        stored = case.outputs["Y"]
        case.compare(case.expected(np.float32).astype(stored.dtype), stored)


@pytest.mark.parametrize("change", [
    lambda p: dict(scale=1.25 * p.scale), lambda p: dict(causal=-p.causal % 3), lambda p: dict(window_left=-1, window_right=-1),
    lambda p: dict(Hkv=1), lambda p: dict(bias=None), lambda p: dict(bias_keys=p.Sk - 1 if p.bias else 0),
    lambda p: dict(bias_strides=engine.Strides(0, p.bias_strides.head, p.bias_strides.row)),
    lambda p: dict(bias_strides=engine.Strides(p.bias_strides.batch, 0, p.bias_strides.row))])
def test_a_wrong_launch_fails(change):
    """A changed launch fails some of the cases (every fourth is run), and only cases that it changes."""
    def harm(p):
        before = {name: bytes(memoryview(getattr(p, name))) if name == "bias_strides" else getattr(p, name) for name in change(p)}
        for name, value in change(p).items():
            setattr(p, name, value)
        changed.append(any(bytes(memoryview(getattr(p, name))) != old if name == "bias_strides" else getattr(p, name) != old
                           for name, old in before.items()))
    changed = []
    found = failures(LINES[0], harm, 4)
    assert 0 < len(found) <= sum(changed)


@pytest.mark.long
def test_the_table_is_what_was_found():
    text = (page.ROOT / "docs/TESTING.md").read_text(encoding="utf-8")
    assert f"-->\n{table()}<!-- onnx:end -->" in text, "python3 tests/test_onnx.py writes it"


if __name__ == "__main__":
    page.put({"onnx": table()})
