"""Sections 1 and 7 of sdpa.cu are plain C++: alone they compile with legal knobs and print the refusal of illegal ones.
A line of each kind compiles with clang++ as well as g++.  usage: python3 -m pytest tests/test_knobs.py"""
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

import builds

ROOT = builds.ROOT
SECTION, UNTUNED = map(builds.Tree().refusals, (True, False))
WGMMA = "USE_WGMMA=1 VEC_WIDTH=8"
TUNED = WGMMA + " USE_TUNED=1"
SETS = {"@wmma": "USE_WMMA=1 BLOCK_M=64", "@wgmma": WGMMA + " USE_WARP_SPECIALIZATION=1", "@plain": WGMMA, "@tuned": TUNED,
        "@swap": WGMMA + " SWAP_AB=1 BLOCK_N=64"}


def refusals(cases):
    """The refusals of each (knobs, section), from one compilation with a namespace and a file name per case. Other errors appear
    with the compiler's message."""
    program = "#include <array>\n#include <string_view>\n#include <type_traits>\n"
    for n, (knobs, section) in enumerate(cases):
        for name, words in SETS.items():
            knobs = knobs.replace(name, words)
        for word in knobs.split():
            name, equals, value = word.partition("=")
            program += f"#define {name} {value if equals else 1}\n"
        section = re.sub("^#include .*\n", "", section, flags=re.MULTILINE)
        program += f'namespace case_{n} {{\n#line 1 "case_{n}"\n{section}\n}}\n' + "".join(
            f"#undef {name}\n" for name in (*builds.Tree().knobs(), *builds.Tree().knob_rows("sdpa_backward.cu")))
    done = subprocess.run([builds.CXX, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"], input=program, capture_output=True, text=True)
    found = [[] for _ in cases]
    for number, words in re.findall(r"^case_(\d+):[\d:]+ error: (.*)", done.stderr, re.MULTILINE):
        found[int(number)].append(builds.assertion_words("error: " + words) or words)
    return found


ACCEPTED = [  # beside the lines of configs.txt, which other tests compile
    "",
    "HEAD_DIM=128 DTYPE=BF16 BLOCK_M=64 BLOCK_N=48 NUM_WARPS=8",
    "@wmma USE_WARP_SPECIALIZATION=1 NUM_PRODUCER_WARPS=2 SYNC_POLICY=1 STAGES=3",
    "USE_MMA_SYNC=1 BLOCK_M=64 NUM_WARPS=8 SPLIT_KV=2 USE_LAZY_MAX=1",
    "@wgmma BLOCK_M=192 NUM_WARPS=12 BLOCK_N=96 STAGES=3 OVERLAP=1 USE_PING_PONG=1 USE_LAZY_MAX=1",
    "@tuned HEAD_DIM=128 USE_PING_PONG=1",
    "@swap BLOCK_M=16 NUM_WARPS=4 STAGES=2 HEAD_DIM=128 USE_FAST_EXP=1 USE_LAZY_MAX=1",
    "DTYPE=FP8_E4M3 OUT_DTYPE=BF16 USE_CP_ASYNC=1 VEC_WIDTH=4",
    "USE_MMA_SYNC=1 BLOCK_M=64 BLOCK_N=96 DTYPE=FP8_E4M3 USE_LAZY_MAX=1",
]
REFUSED = [
    ("HEAD_DIM=24", "HEAD_DIM: not a legal value; it takes one of: 32..256 (default 64)"),
    ("HEAD_DIM=128 HEAD_DIM_V=128", "V and O have that D by default; drop HEAD_DIM_V"),
    ("HEAD_DIM=40", "kernels take multiples of 16 from 32 to 256, mma.sync with e4m3 multiples of 32; type HEAD_DIM=64"),
    ("USE_MMA_SYNC=1 BLOCK_M=64 DTYPE=FP8_E4M3 HEAD_DIM=80", "mma.sync with e4m3 multiples of 32"),
    ("@wmma HEAD_DIM=96", "nvcuda::wmma takes 64, 128 and 256"),
    ("@wgmma BLOCK_M=64 HEAD_DIM=80", "wgmma takes 64, 96, 128, 192, 256, and HEAD_DIM_V up to HEAD_DIM"),
    ("@wgmma BLOCK_M=64 HEAD_DIM_V=128", "wgmma takes 64, 96, 128, 192, 256, and HEAD_DIM_V up to HEAD_DIM"),
    ("@swap BLOCK_M=32 HEAD_DIM=96", "HEAD_DIM_V: SWAP_AB=1 takes multiples of 64"),
    ("@swap KV_DTYPE=FP8_E4M3 VEC_WIDTH=16", "KV_DTYPE: the transposed kernel does not support it; drop SWAP_AB"),
    ("@wgmma BLOCK_M=64 KV_DTYPE=FP8_E4M3", "16 with an 8-bit DTYPE or KV_DTYPE"),
    ("USE_SOFTCAP=2 SCORE_MOD=s", "SCORE_MOD and MASK_MOD: the soft cap or the bias can be a part of the expression"),
    ("USE_PAGES=1", "the page table is indexed by sequence; add USE_LENGTHS=1"),
    ("@wgmma BLOCK_M=64 HEAD_DIM=256 BLOCK_N=256 USE_LENGTHS=1 USE_PAGES=1", "this tile may have more than 32; type a smaller BLOCK_N"),
    ("HEAD_DIM", "HEAD_DIM: not a legal value"),
    ("DTYPE=FP32", "DTYPE: not a legal value; it takes one of: FP16 BF16 FP8_E4M3 U8 (default FP16)"),
    ("OUT_DTYPE=FP16", "O has that type by default; drop OUT_DTYPE"),
    ("@wmma DTYPE=BF16 FP16_ACC=QK", "FP16_ACC: only the wmma kernel with DTYPE=FP16"),
    ("USE_WMMA=1 BLOCK_M=64 FP16_ACC=PV", "FP16_ACC=PV: P @ V runs on the FMA pipes; add USE_WMMA_PV=1"),
    ("BLOCK_M=64.9", "BLOCK_M: not a legal value; it takes one of: 4..256"),
    ("BLOCK_M=24", "a multiple of 4*NUM_WARPS; type BLOCK_M=64 NUM_WARPS=4"),
    ("BLOCK_N=20", "BLOCK_N: the scalar kernel takes multiples of 8, the others of 16, e4m3 of 32; type BLOCK_N=64"),
    ("BLOCK_M=256 BLOCK_N=64", "over 176 registers and spill; type a smaller BLOCK_M or more NUM_WARPS"),
    ("STAGES=2", "STAGES does nothing without cp.async or producer warps; add USE_CP_ASYNC=1 or drop"),
    ("USE_KEY_MASK=1 USE_BIAS=2", "a bias or a MASK_MOD can hide the keys as well; drop USE_KEY_MASK, or USE_BIAS and MASK_MOD"),
    ("USE_KEY_MASK=1 USE_LENGTHS=1", "USE_LENGTHS counts keys from the start of their sequence; drop USE_KEY_MASK or USE_LENGTHS"),
    ("USE_BIAS=4 USE_LENGTHS=1", "USE_LENGTHS counts keys from the start of their sequence; type USE_BIAS=1 or 3, or drop USE_LENGTHS"),
    ("VEC_WIDTH=16", "an access has at most 16 bytes, but 16 elements have 32; type VEC_WIDTH=8"),
    ("USE_CP_ASYNC=1", "but this VEC_WIDTH has fewer; type VEC_WIDTH=8"),
    ("@wmma DTYPE=FP8_E4M3", "nvcuda::wmma does not support e4m3; drop USE_WMMA or type DTYPE=U8"),
    ("@wmma DTYPE=U8 VEC_WIDTH=4", "8 elements are converted to fp16 at a time; type VEC_WIDTH=16"),
    ("@wmma DTYPE=U8 VEC_WIDTH=16 SYNC_POLICY=1 USE_WARP_SPECIALIZATION=1 USE_CP_ASYNC=1",
     "U8 is converted to fp16 in registers; drop USE_CP_ASYNC"),
    ("USE_MMA_SYNC=1 BLOCK_M=64 BLOCK_N=48 DTYPE=FP8_E4M3", "the others of 16, e4m3 of 32"),
    ("@wmma USE_MMA_SYNC=1", "a build has one kernel family; keep one of them"),
    ("@wmma NUM_WARPS=2", "BLOCK_M must be 16*NUM_WARPS; type BLOCK_M=64 NUM_WARPS=4"),
    ("@wmma USE_WARP_SPECIALIZATION=1 SYNC_POLICY=5", "so each warp must keep its rows; type SYNC_POLICY=1"),
    ("@wmma NUM_PRODUCER_WARPS=2", "only builds with USE_WARP_SPECIALIZATION=1 have producer warps"),
    ("USE_MMA_SYNC=1 BLOCK_M=32", "16 or 32 times NUM_WARPS/SPLIT_KV; type BLOCK_M=128 NUM_WARPS=4"),
    ("USE_MMA_SYNC=1 BLOCK_M=96 NUM_WARPS=3 SPLIT_KV=2", "NUM_WARPS must be a multiple of SPLIT_KV; type SPLIT_KV=2 NUM_WARPS=8"),
    ("@plain BLOCK_M=64 NUM_WARPS=16 SPLIT_KV=4",
     "the plain wgmma kernel supports neither; add USE_WARP_SPECIALIZATION=1 or drop them"),
    ("@wgmma BLOCK_M=64 NUM_WARPS=8", "a warpgroup has 4 warps and 64 query rows"),
    ("USE_WGMMA=1 DTYPE=U8 VEC_WIDTH=16 BLOCK_M=64", "only the scalar and wmma kernels support it"),
    ("USE_MMA_SYNC=1 USE_CP_ASYNC=1 SWIZZLE_XOR=1 DTYPE=FP8_E4M3 VEC_WIDTH=16 USE_TUNED=1", "no tiles for an 8-bit DTYPE with mma.sync"),
    ("USE_WGMMA=1 USE_WARP_SPECIALIZATION=1 BLOCK_M=64", "type VEC_WIDTH=8"),
    ("@plain BLOCK_M=64 OVERLAP=1", "only the wgmma kernel with producer warps supports them; add USE_WARP_SPECIALIZATION=1"),
    ("@wgmma BLOCK_M=64 NUM_WARPS=8 SPLIT_KV=2 USE_PERSISTENT_CTA=1", "the wgmma kernel does not support it with SPLIT_KV"),
    ("@tuned DTYPE=FP8_E4M3 VEC_WIDTH=16 FP8_FLUSH=4", "no tile of the table has all the knobs"),
    ("@wgmma BLOCK_M=64 DTYPE=FP8_E4M3", "add USE_WARP_SPECIALIZATION=1 OVERLAP=1"),
    ("@wgmma BLOCK_M=64 NUM_WARPS=16 SPLIT_KV=4", "has at most two splits; type SPLIT_KV=2 or SWAP_AB=1"),
    ("@wgmma BLOCK_M=64 FP8_FLUSH=4", "only the wgmma kernel with DTYPE=FP8_E4M3 accumulates in 14 bits"),
    ("@wgmma BLOCK_M=128 NUM_WARPS=8 SKIP_MASKED=1 USE_PING_PONG=1", "BLOCK_M over 64 and no USE_PING_PONG"),
    ("@wgmma BLOCK_M=64 USE_PING_PONG=1", "a single warpgroup has no other to alternate with"),
    ("@swap BLOCK_M=32 NUM_WARPS=16 SPLIT_KV=2", "each warpgroup is a split"),
    ("@swap BLOCK_M=128 NUM_WARPS=16 SPLIT_KV=4", "a CTA has 8, 16 or 32 query rows"),
    ("@swap BLOCK_M=32 HEAD_DIM=256 NUM_WARPS=16 SPLIT_KV=4", "would take too many registers of a thread"),
    ("@swap BLOCK_M=32 USE_WARP_SPECIALIZATION=1", "the compute warps of the transposed kernel also load"),
    ("@swap BLOCK_M=32 SKIP_MASKED=1", "which requires USE_WARP_SPECIALIZATION=1"),
    ("@plain BLOCK_M=64 PACK_GQA=1", "PACK_GQA: the plain wgmma kernel does not support it"),
    ("@wgmma BLOCK_M=64 PACK_GQA=1", "PACK_GQA: with producer warps its rows can only be stored as partials of ranges; type SPLIT_CTAS=0"),
    ("@wgmma BLOCK_M=64 SPLIT_CTAS=4 USE_PERSISTENT_CTA=1", "SPLIT_CTAS: a CTA computes one range; drop USE_PERSISTENT_CTA"),
    ("USE_MMA_SYNC=1 BLOCK_M=64 DTYPE=FP8_E4M3 KV_DTYPE=FP8_E4M3", "KV_DTYPE=FP8_E4M3: 8-bit K and V require a 16-bit Q"),
    ("USE_BIAS=1 DTYPE=FP8_E4M3", "USE_BIAS: a bias would be added before the descale factors of 8-bit types"),
]
TABLE = "constexpr std::array HOPPER_TILES = {\n"
ROW = TABLE + '    tile(64, 192, 64, 8, 2, 1, "OVERLAP", 1, 1, 1),\n'
OF_ROWS = [("@tuned", SECTION.replace(TABLE, ROW), "a warpgroup has 4 warps and 64 query rows, so BLOCK_M must be"),
           ("@plain BLOCK_M=64", SECTION.replace(TABLE, ROW), None)]  # which takes no row
for row, old, new in (('"OVERLAP USE_PERSISTENT_CTA SKIP_MASKED", 1, 2320', '", ', 'D", '), ('"SWAP_AB", 1, 4710', '"', '"OVERLAPS '),
                      ('"PACK_GQA USE_MMA_SYNC", 3, 15000, 0.612),\n    tile(96', '"', '"  ')):
    OF_ROWS.append(("@tuned", SECTION.replace(row, row.replace(old, new, 1)), "a_row_of_tiles_names_an_unknown_knob"))


@pytest.fixture(scope="module")
def judged():
    """The refusals of all cases in ACCEPTED, REFUSED and OF_ROWS."""
    knobs = [*ACCEPTED, *(words for words, _ in REFUSED)]
    cases = [(words, SECTION if "tuned" in words.lower() else UNTUNED) for words in knobs] + [case[:2] for case in OF_ROWS]
    found = iter(refusals(cases))
    return [[next(found) for _ in group] for group in (ACCEPTED, REFUSED, OF_ROWS)]


def test_accepted(judged):
    assert dict(zip(ACCEPTED, judged[0])) == dict.fromkeys(ACCEPTED, [])
    assert builds.Tree().refusal([*TUNED.split(), "STAGES=4"]) == ""  # it compiles all rows of the tables


def test_refused(judged):
    """The expected sentence comes first, since tools show the first."""
    wrong = {knobs: (sentence, found) for (knobs, sentence), found in zip(REFUSED, judged[1]) if not found or sentence not in found[0]}
    assert not wrong


def test_rows_of_the_table_are_judged_like_typed_knobs(judged):
    """A row with a wrong knob name is refused: the error names a function that its constant cannot call."""
    for (knobs, section, sentence), found in zip(OF_ROWS, judged[2]):
        assert section != SECTION and (any(sentence in words for words in found) if sentence else not found), (knobs, found)


def test_every_refusal_is_met(judged):
    """Every SDPA_REFUSE rule after SDPA_KNOBS is met by a case; a new rule needs one above."""
    rules = re.findall(r"^ *SDPA_REFUSE\((?:[^\"]|\n)*?((?:\s*\"[^\"]*\")+)\);", SECTION, re.MULTILINE)
    sentences = {"".join(re.findall('"([^"]*)"', rule)) for rule in rules}
    said = {words for found in judged[1] for words in found}
    missing = "\n".join(sentences - said)
    assert len(sentences) > 40 and not missing, missing


def test_knobs_of_the_backward_pass():
    """The listed knobs accept other values than the default; every other knob is refused by name."""
    text = builds.Tree().backward_refusals()
    own = " ".join(re.findall('"([^"]*)"', re.search(r"backward_knobs =([^;]*);", text)[1])).split()
    assert set(own) < set(builds.Tree().knobs())
    wgmma = "1 VEC_WIDTH=8 BLOCK_M=128 BLOCK_N=128 NUM_WARPS=8 STAGES=2"
    values = dict(HEAD_DIM="128", HEAD_DIM_V="128 USE_MMA_SYNC=1 BLOCK_M=64", USE_WGMMA=wgmma,
                  USE_WARP_SPECIALIZATION=wgmma + " USE_WGMMA=1", BLOCK_M="64", BLOCK_N="64", NUM_WARPS="2", VEC_WIDTH="8", USE_CP_ASYNC="1 VEC_WIDTH=8",
                  STAGES="2 USE_CP_ASYNC=1 VEC_WIDTH=8", USE_MMA_SYNC="1 BLOCK_M=64", DTYPE="BF16", SCORE_MOD="s*2", MASK_MOD="k<9")
    illegal = {"BACKWARD=2": "BACKWARD: not a legal value", "USE_WMMA=1 BLOCK_M=64": "BACKWARD: only kernels of these families have it: scalar mma",
               "DTYPE=U8 VEC_WIDTH=16": "DTYPE: the backward kernels take 16 bits", "BLOCK_M=64 HEAD_DIM=256 NUM_WARPS=1": "BLOCK_M, BLOCK_N: S, dP and dQ or dK",
               "USE_MMA_SYNC=1 BLOCK_M=64 HEAD_DIM=256 BLOCK_N=128": "BLOCK_M, BLOCK_N: S, dP and dQ or dK", "HEAD_DIM_V=32": "HEAD_DIM_V: only the",
               "USE_MMA_SYNC=1 BLOCK_M=128 HEAD_DIM=256": "BLOCK_M, BLOCK_N:", f"USE_WGMMA={wgmma} HEAD_DIM=96": "HEAD_DIM: the",
               "USE_WGMMA=1 USE_WARP_SPECIALIZATION=1 VEC_WIDTH=8 BLOCK_M=64 BLOCK_N=128": "BLOCK_M, NUM_WARPS: the backward kernel",
               f"USE_WGMMA={wgmma} USE_WARP_SPECIALIZATION=1 HEAD_DIM=128": "BLOCK_N, HEAD_DIM: each of two warpgroups",
               "USE_BIAS=4": "USE_BIAS=4, 5: the backward kernels lack a bias per key",
               "ONE_PASS=1": "ONE_PASS: only kernels of these families have it: mma",
               "ORDERED_ADDS=1": "ORDERED_ADDS: only kernels of these families have it: wgmma",
               f"USE_WGMMA={wgmma} ORDERED_ADDS=1": "ORDERED_ADDS: only the kernel of USE_WARP_SPECIALIZATION=1 adds",
               "USE_MMA_SYNC=1 BLOCK_M=64 ONE_PASS=1 HEAD_DIM=80": "ONE_PASS, HEAD_DIM: a warp computes 32 or 64",
               "USE_MMA_SYNC=1 BLOCK_M=64 ONE_PASS=1 HEAD_DIM=128 BLOCK_N=64": "ONE_PASS, BLOCK_M, BLOCK_N: S, dP, dQ, dK and dV"}
    others = {name: re.split(r"[ .]+", knob.values)[-1] for name, knob in builds.Tree().knob_rows().items() if name not in own}
    others.update(SPLIT_KV="2", SPLIT_CTAS="2", FP8_FLUSH="4", SYNC_POLICY="2")
    cases = ["BACKWARD=1 " + " ".join(f"{name}={value}" for name, value in others.items()),
             *(f"BACKWARD=1 {name}={values.get(name, '1')}" for name in own),
             *(words if words.startswith("BACKWARD") else "BACKWARD=1 " + words for words in illegal)]
    of_others, *said = refusals([(words, text) for words in cases])
    assert {f"{name}: the backward kernels lack it; drop it or BACKWARD=1" for name in others} <= {*of_others}
    for words, found in zip(cases[1:], said[:len(own)]):
        assert not found, (words, found)
    for sentence, found in zip(illegal.values(), said[len(own):]):
        assert any(one.startswith(sentence) for one in found), (sentence, found)


@pytest.mark.parametrize("compiler,words", [
    ("g++", "-fsyntax-only -w -Icpu_backend -x c++"),
    pytest.param("clang++", "-fsyntax-only -w -Icpu_backend -x c++", marks=pytest.mark.long),
    pytest.param(builds.nvcc(), "-arch=sm_80 -cubin -o /dev/null", marks=pytest.mark.long)])
def test_a_knob_by_hand_is_refused_in_one_sentence(compiler, words):
    """Compiles the whole file as a user does: the compiler adds the location of the sentence, not all of SDPA_KNOBS."""
    if not compiler or not shutil.which(compiler):
        pytest.skip("it is missing")
    sentence = "OVERLAP: only kernels of these families have it: wgmma; drop it or select one of them (scalar: without USE_WMMA=1"
    done = builds.run([compiler, "-std=c++17", "-DOVERLAP=1", *words.split(), "sdpa.cu"], cwd=ROOT)
    said = done.stdout + done.stderr
    assert done.returncode and said.count(sentence) == 1 and len(said) < 1200, said


KINDS = """scalar_minimal scalar_sync2 scalar_bf16 scalar_u8 scalar_e4m3 wmma_qk wmma_pv
wmma_ws2 wmma_u8 wmma_all mma_lazy mma_split4 mma_fast_exp mma_e4m3_d128 mma_d256 mma_decode_e4m3_d128 ampere wgmma_plain wgmma_ws
wgmma_overlap wgmma_d128_tile128 wgmma_d128_causal wgmma_split2 wgmma_swap32 wgmma_d256
hopper"""


# Lines of device code of which g++ may warn (members left to their defaults). Initializing the members reorders nvcc's code.
ON_DEVICE = (": Base{s_, a_} {}", ": Base{s, a} {}")


def parsed(compiler, words):
    """The compiler's result for a part of the sources: options and @lines."""
    lines, part = builds.Tree().read_configs()[0], []
    for word in words.split():
        part += ["-DSDPA_LINE_ONLY"] * ("SDPA" not in words) + builds.definitions(lines[word[1:]].knobs) if word[0] == "@" else [word]
    file = "sdpa_backward.cu" if "@backward" in words else "sdpa.cu"
    return builds.run([*compiler.split(), "-std=c++17", "-fsyntax-only", "-Icpu_backend", *part, "-x", "c++", file], cwd=ROOT)


@pytest.mark.parametrize("words", [
    "@backward_hopper_d128_bf16", "@hopper -DUSE_LENGTHS=1 -DUSE_SINKS=1 -DUSE_PAGES=1 -DUSE_SOFTCAP=1",
    *(pytest.param(words, marks=pytest.mark.long) for words in (
        "-DSDPA_HARNESS_ONLY -DSDPA_NAMESPACE=harness", "-DSDPA_NO_MAIN @scalar_async2", "@wmma_persistent", "@backward_mma",
        "@mma_split4", "@wgmma_swap32", "@hopper_e4m3"))])
def test_no_warning(words):
    """g++ -Wall -Wextra reports nothing with the CPU backend. test_extract.py checks the warnings of nvcc and its host compiler."""
    done = parsed(os.environ.get("CXX", "g++") + " -Wall -Wextra -Wno-unknown-pragmas", words)
    source = builds.Tree().read("sdpa.cu").splitlines()
    found = [(path, number, words) for path, number, words in re.findall(r"^(\S+?):(\d+):\d+: warning: (.*)", done.stderr, re.MULTILINE)
             if path != "sdpa.cu" or "missing-field" not in words or not any(one in source[int(number) - 1] for one in ON_DEVICE)]
    assert done.returncode == 0 and not found, done.stderr[:2000]


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("clang++"), reason="clang++ is missing")
def test_clang():
    with ThreadPoolExecutor(builds.JOBS) as pool:
        for done in pool.map(lambda words: parsed("clang++ -w", words), ["-DSDPA_HARNESS_ONLY", *("@" + name for name in KINDS.split())]):
            assert done.returncode == 0, done.stderr


def test_a_line_changes_the_knobs_of_another(tmp_path):
    """The changed knobs alone: not those whose names begin with theirs."""
    (tmp_path / "lines.txt").write_text("base HEAD_DIM_V=128 HEAD_DIM=192 STAGES=2\nother : base HEAD_DIM=128 USE_CP_ASYNC=1\n")
    done = subprocess.run(["cmake", f"-DCONFIGS={tmp_path}/lines.txt", "-P", f"{ROOT}/configs.cmake"], capture_output=True, text=True)
    words = [set(line.split()) for line in done.stdout.splitlines()]
    assert not done.stderr and words == [{"base", "PASS", "HEAD_DIM_V=128", "HEAD_DIM=192", "STAGES=2"},
                                         {"other", "base", "PASS", "HEAD_DIM_V=128", "HEAD_DIM=128", "STAGES=2", "USE_CP_ASYNC=1"}]
