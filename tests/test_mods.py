"""Tests of SCORE_MOD, MASK_MOD and the other features of the score hook: each changes the result on every path, alone and
combined, and the result is correct; sdpa.cu mentions them in few places; errors of expressions are reported; docs/USING.md's
expressions compile.
usage: python3 -m pytest tests/test_mods.py"""
import ctypes
import os
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import tree_sitter
import tree_sitter_cpp

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import builds  # noqa: E402

TREE = builds.Tree()
STRUCTS = builds.structs_of(TREE.read("bindings/sdpa.h"))
TYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn}
# A line of each path, with knobs that lead to more of them.
PATHS = ["scalar_vec8", "wmma_async2", "mma_tile128", "mma_lazy", "mma_split4", "mma_decode", "mma_kv8", "wgmma_plain",
         "wgmma_ws", "wgmma_lazy", "wgmma", "wgmma_causal", "wgmma_split2", "wgmma_swap32", "wgmma_decode", "wgmma_chunk",
         "wgmma_kv8", "wgmma_e4m3", "wgmma_lazy USE_LENGTHS=1", "mma_lazy USE_LENGTHS=1 USE_PAGES=1"]
# Without --all these, with the first features; the sweep mods_wgmma runs wgmma_lazy's path.
QUICK = ("scalar_vec8", "mma_lazy", "wgmma_decode")
# The knobs of two features of one program. The arguments in calls_of() turn each on.
MODS = ["SCORE_MOD=s - x0[h] * real(q + Sk - Sq - k)", "MASK_MOD=i0[q] == i0[k]"]
KNOBS = ["USE_SOFTCAP=2", "USE_BIAS=1"]
KEYS = ["USE_KEY_MASK=1", "SCORE_MOD=s - x0[h] * real(q + Sk - Sq - k)"]
B, HQ, HKV, SQ, SK = 1, 4, 2, 40, 330


class Program:
    """A build on the CPU backend."""

    def __init__(self, path, features):
        name, *more = path.split()
        self.line = builds.Line(TREE, name, tuple(more))
        self.library = ctypes.CDLL(builds.host_library(*self.line.words, *features, program="tests/host_library.cu"))
        self.library.sdpa_library_workspace_bytes.restype = ctypes.c_size_t
        self.library.host_allocate.restype = ctypes.c_void_p
        rng = np.random.default_rng(0)
        D, types = self.line.D, self.line.dtype.split("/")
        self.q = self.placed(rng.normal(size=(B, HQ, SQ, D)).astype(TYPES[types[0]]))
        self.k, self.v = (self.placed(rng.normal(size=(B, HKV, SK, D)).astype(TYPES[types[-1]])) for _ in range(2))

    def placed(self, x):
        """Copies the array to the backend's device memory; it is freed at exit."""
        address = self.library.host_allocate(ctypes.c_size_t(x.nbytes))
        out = np.frombuffer((ctypes.c_uint8 * x.nbytes).from_address(address), np.uint8).view(x.dtype).reshape(x.shape)
        out[...] = x
        return out

    def attention(self, **arguments):
        """O of a call with these members of SdpaParams."""
        p = STRUCTS["SdpaParams"]()
        self.library.sdpa_library_defaults(ctypes.byref(p))
        o = self.placed(np.zeros(self.q.shape, TYPES[self.line.out_dtype]))
        p.Q, p.K, p.V, p.O = (x.ctypes.data for x in (self.q, self.k, self.v, o))
        p.B, p.Hq, p.Hkv, p.Sq, p.Sk, p.D = B, HQ, HKV, SQ, SK, self.line.D
        for strides, x in ((p.q, self.q), (p.k, self.k), (p.v, self.v), (p.o, o)):
            strides.batch, strides.head, strides.row = (n // x.itemsize for n in x.strides[:3])
        if self.line.knob("USE_PAGES") == "1":
            pages, size = -(-SK // 16), 16
            for name in ("k", "v"):  # [pages,Hkv,16,D]
                x = np.zeros((HKV, pages * size, self.line.D), self.k.dtype)
                x[:, :SK] = getattr(self, name)[0]
                paged = self.placed(np.ascontiguousarray(x.reshape(HKV, pages, size, -1).swapaxes(0, 1)))
                setattr(p, name.upper(), paged.ctypes.data)
                strides = getattr(p, name)
                strides.batch, strides.head, strides.row = (n // paged.itemsize for n in paged.strides[:3])
            table = self.placed(np.arange(pages, dtype=np.int32))
            p.page_table, p.page_stride, p.page_size, p.pages = table.ctypes.data, pages, size, pages
        for name, value in arguments.items():
            setattr(p, name, self.placed(value).ctypes.data if isinstance(value, np.ndarray) else value)
        if "bias" in arguments:
            p.bias_strides.row = arguments["bias"].strides[0] // arguments["bias"].itemsize
        workspace = self.placed(np.zeros(max(self.library.sdpa_library_workspace_bytes(ctypes.byref(p)), 1), np.uint8))
        p.workspace = workspace.ctypes.data
        text = ctypes.create_string_buffer(500)
        assert self.library.sdpa_library_forward(ctypes.byref(p), None, text, 500) == 0, text.value
        self.library.host_synchronize()
        return o.astype(np.float64)

    def reference(self, x0=None, i0=None, softcap=0, bias=None, key_mask=None):
        q, k, v = (x.astype(np.float64) for x in (self.q, self.k, self.v))
        k, v = (np.repeat(x, HQ // HKV, axis=1) for x in (k, v))
        s = q @ k.swapaxes(-1, -2) / np.sqrt(self.line.D)
        if softcap:
            s = softcap * np.tanh(s / softcap)
        if x0 is not None:
            s = s - x0.astype(np.float64)[:, None, None] * (np.arange(SQ)[:, None] + SK - SQ - np.arange(SK))
        if bias is not None:
            s = s + bias.astype(np.float64)
        if i0 is not None:
            s = np.where(i0[:SQ, None] == i0[None, :SK], s, -np.inf)
        if key_mask is not None:
            s = np.where(key_mask > 0, s, -np.inf)
        w = np.exp(s - s.max(-1, keepdims=True))
        return (w / w.sum(-1, keepdims=True)) @ v

    def error(self, got, want):
        return np.sqrt(((got - want) ** 2).mean() / (want ** 2).mean())


def calls_of(program, features):
    """Arguments of a call: without a feature, with each alone, and with both."""
    rng = np.random.default_rng(1)
    slopes = np.float32([1 / 2, 1 / 32, -1 / 16, 1 / 128])
    if features is KEYS:
        nothing, k = dict(x0=np.zeros(HQ, np.float32)), np.arange(SK)
        changes = [dict(key_mask=((k % 7 > 1) & (k // 130 != 1)).astype(np.uint8)), dict(x0=slopes)]
    elif features is MODS:
        nothing = dict(x0=np.zeros(HQ, np.float32), i0=np.zeros(SK, np.int32))
        # Three documents, each with keys in every tile.
        changes = [dict(x0=slopes), dict(i0=(np.arange(SK) % 7 % 3).astype(np.int32))]
    else:
        nothing = {}
        changes = [dict(softcap=0.5), dict(bias=(2 * rng.normal(size=(SQ, SK + 6))).astype(program.q.dtype))]
    return nothing, [changes[0], changes[1], changes[0] | changes[1]]


def takes(path, features):
    name, *more = path.split()
    return not TREE.refusal(builds.Line(TREE, name, tuple(more)).words + features)


@pytest.mark.parametrize("path, features", [
    pytest.param(path, features, id=f"{path}-{name}", marks=[pytest.mark.long] * (name != "mods" or path not in QUICK))
    for name, features in (("mods", MODS), ("softcap_and_bias", KNOBS), ("key_mask", KEYS)) for path in PATHS])
def test_effect(path, features):
    if not takes(path, features):
        assert features is not MODS, "every path takes SCORE_MOD and MASK_MOD"
        assert features is KNOBS or "USE_LENGTHS" in path, "every path without lengths takes USE_KEY_MASK"
        pytest.skip("refused")
    program = Program(path, features)
    nothing, changes = calls_of(program, features)
    limit = 6e-2 if "e4m3" in program.line.dtype else 2e-2 if program.line.out_dtype == "bf16" else 4e-3
    clean = lambda call: {name: x[:, :SK] if name == "bias" else x for name, x in call.items()}  # noqa: E731
    plain = program.attention(**nothing)
    assert program.error(plain, program.reference(**clean(nothing))) < limit
    for change in changes:
        got = program.attention(**nothing | change)
        assert program.error(got, program.reference(**clean(nothing | change))) < limit, change.keys()
        assert program.error(got, plain) > 5 * limit, f"{[*change]} without an effect"


@pytest.mark.long
def test_names_in_brackets():
    """Names in parentheses: the expression has the type of s, q or k, but another text."""
    program = Program("wgmma_lazy", ["SCORE_MOD=(s)", "MASK_MOD=i0[(q)] == i0[(k)]"])
    arguments = dict(i0=(np.arange(SK) % 7 % 3).astype(np.int32))
    assert program.error(program.attention(**arguments), program.reference(**arguments)) < 4e-3


# ---- where sdpa.cu knows of a feature ----

FEATURES = {"use_softcap", "use_bias", "score_mod", "mask_mod", "USE_SOFTCAP", "USE_BIAS", "SCORE_MOD", "MASK_MOD", "ScoreMod",
            "SCORE_MOD_changed", "MASK_MOD_changed", "SCORE_MOD_text", "MASK_MOD_text"}
ALLOWED = re.compile(r"knobs|hook|bias|softcap|expressions|visible rounds|lists in global memory|map of visible rounds|the checks|refusals")
# Mentions elsewhere: the element type of a bias; the number of CTAs per SM.
KNOWN = {("2 PROBLEM", "use_bias"), ("5c producers and consumers", "use_bias")}


def mentions(source):
    """(section, function or struct, name) of each mention of a feature outside of the sections that may have it."""
    banners = [(0, "")] + [(m.start(), m[1]) for m in re.finditer(r"^// (?:----|====) (.*?) (?:----|====).*$", source, re.MULTILINE)]
    tree = tree_sitter.Parser(tree_sitter.Language(tree_sitter_cpp.language())).parse(source.encode())
    found, todo = set(), [(tree.root_node, "")]
    while todo:
        node, owner = todo.pop()
        if node.type in ("function_definition", "struct_specifier", "alias_declaration"):
            owner = node.text.decode().split("{")[0].strip().replace("\n", " ")
        if node.type in ("identifier", "field_identifier", "type_identifier", "template_type") and node.text.decode() in FEATURES:
            section = [text for start, text in banners if len(source[:start].encode()) <= node.start_byte][-1]
            if not ALLOWED.search(section):
                found.add((section, owner[-60:], node.text.decode()))
        todo += [(child, owner) for child in node.children]
    return sorted(found)


def test_features_are_in_few_places():
    source = TREE.read("sdpa.cu").split("// ==== COPY TO HERE")[0]
    assert {(section.split(":")[0], name) for section, _, name in mentions(source)} <= KNOWN
    # A kernel that asks for a feature is found.
    worse = source.replace("    const int stage = pipeline.acquire(k0);", "    if (B::use_softcap) return;\n    const int stage = pipeline.acquire(k0);")
    assert worse != source and len(mentions(worse)) > len(mentions(source))


# ---- expressions that do not compile ----

@pytest.mark.parametrize("word, reason", [("SCORE_MOD='s - x9[h]'", "x9"), ("MASK_MOD='q =='", "expected"),
                                          ("SCORE_MOD='s - x0[h'", "expected"), ("MASK_MOD='i0[q] == y'", "y")])
def test_bad_expression_names_its_line(tmp_path, word, reason):
    (tmp_path / "lines.txt").write_text(f"# a comment\nfirst\nsecond : first VEC_WIDTH=8 {word}\n")
    done = subprocess.run(["cmake", f"-DCONFIGS={tmp_path}/lines.txt", "-P", f"{ROOT}/configs.cmake"], capture_output=True, text=True)
    sentences = done.stderr.strip().splitlines()
    assert len(sentences) == 1 and sentences[0].startswith(f"lines.txt:3: {word} does not compile: ") and reason in sentences[0]
    assert done.stdout.startswith("first\t")
    with pytest.raises(builds.Refused, match="does not compile"):
        builds.parse_contenders(["scalar_vec8", word.replace("'", "")])


# ---- docs/USING.md ----

USING = [(knob, text.replace("\\|", "|"))  # in a table
         for knob, text in re.findall(r"^\|.*`((?:SCORE|MASK)_MOD)='([^`]*)'` \|$", TREE.read("docs/USING.md"), re.MULTILINE)]


def test_expressions_of_using():
    assert len(USING) >= 6 and not list(filter(None, (TREE.expression_trouble(f"{knob}={text}") for knob, text in USING)))


@pytest.mark.long
@pytest.mark.parametrize("knob, expression", USING)
def test_expression_of_using(knob, expression, tmp_path):
    """Compiled for the CPU backend, and equal to the reference."""
    command = [builds.CXX, "-std=c++17", "-Og", "-ffp-contract=off", "-w", "-pthread", "-Icpu_backend", f"-D{knob}={expression}",
               "-DVEC_WIDTH=8", builds.host_engine(), "-x", "c++", "sdpa.cu", "-o", f"{tmp_path}/program"]
    subprocess.run(command, cwd=ROOT, check=True)
    done = subprocess.run([f"{tmp_path}/program", "--shape", "1,4,2,70,150", "--shape", "1,4,2,33,33", "--check-only"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [row.split(",")[4] for row in done.stdout.splitlines()] == ["PASS", "PASS"]
