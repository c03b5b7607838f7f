"""Tests of ./run_all.sh gates: its input, its verdicts, and every line of configs.txt against its own gates.
usage: python3 -m pytest tests/test_gates.py"""
import dataclasses
import glob
import json
import os
import re
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import builds  # noqa: E402
import gates  # noqa: E402
import tool  # noqa: E402

IS_QUICK = bool(os.environ.get("SDPA_TEST_QUICK"))

ROWS = [dict(line=line, over=over, shape="mission", low="1.222", high="1.278") for line, over in
        (("faster", "good"), ("not_faster", "good"), ("perhaps", "good"), ("unmeasured", "good"), ("wrong", "spills"))]


def report(arch, registers, stores=0, loads=0):
    return f"""ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN4sdpa8sdpa_mmaIiEEvS_' for '{arch}'
ptxas info    : Function properties for _ZN4sdpa8sdpa_mmaIiEEvS_
    16 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 5 barriers, 16 bytes cumulative stack size
"""


def facts(log, code, threads=128, shared=50000, block_m=64):
    return builds.Facts(*builds.ptxas_report(log), threads, shared, block_m, code=code)


SERIAL = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to...\n"
SPLIT = "ptxas info : (C7519) warpgroup.arrive is injected in around line 7 by compiler to allow use of registers...\n"
KERNELS = {
    "good": ([], facts(report("sm_80", 120) + report("sm_90a", 128), 1)),
    "spills": ([], facts(report("sm_80", 255) + report("sm_90a", 255, 8, 12), 2)),
    "spills_why": (["gate:spill<=20:two_words_of_16_tiles"], facts(report("sm_90a", 255, 8, 12), 3)),
    "registers": ([], facts(report("sm_90a", 136), 4, threads=512)),
    "own_limit": (["gate:regs<=100"], facts(report("sm_90a", 101), 5)),
    "shared": ([], facts(report("sm_89", 64), 6, shared=101377)),
    "shared_90": ([], facts(report("sm_90a", 64), 7, shared=101377)),
    "shared_120": ([], facts(report("sm_120", 64), 16, shared=101377)),
    "shared_own": (["gate:smem<=40000"], facts(report("sm_90a", 64), 8, shared=40001)),
    "serial": ([], facts(report("sm_90a", 64) + SERIAL, 9, shared=4000)),
    "split": ([], facts(report("sm_90a", 64) + SPLIT, 9, shared=4100)),
    "twin": ([], facts(report("sm_80", 120), 1)),
    "not_twin": ([], facts(report("sm_80", 120), 1, block_m=32)),
    "broken": ([], "sdpa.cu(7): error: words"),
    "silent": ([], facts("", 10)),
    "faster": (["gate:step-over=good:1.10"], facts(report("sm_80", 64), 11)),
    "not_faster": (["gate:step-over=good:1.30@mission"], facts(report("sm_80", 64), 12)),
    "perhaps": (["gate:step-over=good:1.25@mission"], facts(report("sm_80", 64), 13)),
    "unmeasured": (["gate:step-over=good:1.10@long"], facts(report("sm_80", 64), 14)),
    "wrong": (["gate:step-over=good:1.10"], facts(report("sm_80", 64), 15)),
}


def judged(names, rows=ROWS):
    return list(gates.judge({name: KERNELS[name] for name in names}, rows))


@pytest.mark.parametrize("line,gate,wanted,found,verdict", [
    ("good", "bytes spilled", "<= 0", "0", "ok"),
    ("good", "registers", "<= 255", "128", "ok"),
    ("good", "shared bytes", "<= 101376", "50000", "ok"),
    ("spills", "bytes spilled", "<= 0", "20", "FAIL"),
    ("spills_why", "bytes spilled", "<= 20", "20 (two_words_of_16_tiles)", "ok"),
    ("registers", "registers", "<= 128", "136", "FAIL"),
    ("own_limit", "registers", "<= 100", "101", "FAIL"),
    ("shared", "shared bytes", "<= 101376", "101377", "FAIL"),
    ("shared_90", "shared bytes", "<= 232448", "101377", "ok"),
    ("shared_120", "shared bytes", "<= 101376", "101377", "FAIL"),
    ("shared_own", "shared bytes", "<= 40000", "40001", "FAIL"),
    ("serial", "wgmma as written", "yes", "no: C7510", "FAIL"),
    ("split", "wgmma as written", "yes", "no: C7519", "FAIL"),
    ("twin", "duplicate", "its own code", "all of good's", "FAIL"),
    ("broken", "compiles", "yes", "no: sdpa.cu(7): error: words", "FAIL"),
    ("silent", "ptxas report", "one", "none", "FAIL"),
    ("faster", "over good", ">= 1.10", "1.222 to 1.278", "ok"),
    ("not_faster", "over good at mission", ">= 1.30", "1.222 to 1.278", "FAIL"),
    ("perhaps", "over good at mission", ">= 1.25", "1.222 to 1.278", "UNCLEAR"),
    ("unmeasured", "over good at long", ">= 1.10", "not timed", "UNCLEAR"),
    ("wrong", "over good", ">= 1.10", "not timed", "UNCLEAR"),
])
def test_a_gate(line, gate, wanted, found, verdict):
    assert gates.Found(line, gate, wanted, found, verdict) in judged(KERNELS)


def test_nothing_else_fails(capsys):
    failed = [one for one in judged(KERNELS) if one.verdict == "FAIL"]
    assert len(failed) == 12 and not {"good", "not_twin"} & {one.line for one in failed}
    assert gates.report(failed) == 1 and "A GATE FAILED" in capsys.readouterr().out
    assert gates.report(judged(["good", "faster", "shared_90"])) == 0
    assert "3 lines, no gate failed" in capsys.readouterr().out
    assert gates.report([dataclasses.replace(one, line=one.line + " sm_120") for one in judged(["good"])] + judged(["good"])) == 0
    assert "\n1 lines, no gate failed" in capsys.readouterr().out
    assert gates.report([]) == 1
    assert judged(["faster"], None)[-1].found == "not timed: gates --time"


# ---- with nvcc ----

needs_nvcc = pytest.mark.skipif(not builds.nvcc(), reason="nvcc is missing")
TREE = builds.Tree()


def built(*changes, kind="-fatbin"):
    line = builds.Line(TREE, "scalar_minimal", changes)
    one, = builds.build([line], "90a", kind=kind).values()
    assert not one.trouble
    return one


@pytest.mark.long
@needs_nvcc
def test_device_code_alone_tells_the_same():
    lines = builds.parse_contenders(["mma_lazy", "hopper"])
    whole, alone = (builds.build(lines, "80", "90a", kind=kind) for kind in ("-shared", "-fatbin"))
    for line in lines:
        a, b = (dataclasses.replace(builds.facts(built[line]), path="") for built in (whole, alone))
        assert a == b and min(a.threads, a.shared_bytes, a.block_m) > 0
    first, = builds.build(builds.parse_contenders(["hopper", "BLOCK_M=64", "BLOCK_N=128"]), "90a", kind="-fatbin").values()
    assert builds.facts(first).shared_bytes < b.shared_bytes  # of all tiles the most


@needs_nvcc
def test_some_lines_are_compiled_for_another_architecture_as_well(monkeypatch, capsys):
    lines = builds.lines_named("")
    assert list(gates.also_for(lines)) == ["120"]
    assert {line.name for line in gates.also_for(lines)["120"]} == {"scalar_async2", "wmma_all"} | {
        line.name for line in lines if line.name.startswith("ampere")}
    line = builds.lines_named("^scalar_async2$")
    kernels = gates.compiled(line, ["80"])
    assert {name: found.archs for name, (_, found) in kernels.items()} == {"scalar_async2": ("80",), "scalar_async2 sm_120": ("120",)}
    assert any("step-over" in gate for gate in kernels["scalar_async2"][0]) and not kernels["scalar_async2 sm_120"][0]
    real = builds.run
    monkeypatch.setattr(builds, "run", lambda command, **options: real(
        ["echo", "compute_80 compute_90"] if "--list-gpu-arch" in command else command, **options))
    assert list(gates.compiled(line, ["80"])) == ["scalar_async2"]
    assert "sm_120 is skipped: this nvcc does not support it" in capsys.readouterr().err


@pytest.mark.long
@needs_nvcc
def test_cmake_builds_for_an_rtx_50(tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 12.0\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.path.dirname(builds.nvcc()), os.environ["PATH"]])
    subprocess.run(["cmake", "-S", ROOT, "-B", tmp_path / "build", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"], check=True,
                   capture_output=True, env={**os.environ, "PATH": path, "SDPA_ARCHS": ""})
    commands = [entry["command"] for entry in json.loads((tmp_path / "build" / "compile_commands.json").read_text())]
    for name, arch in (("ampere", "120"), ("scalar_minimal", "120"), ("mma_e4m3_d128", "120"), ("hopper", "90a")):
        command, = (command for command in commands if f"line_{name}.dir" in command)
        assert re.findall(r"arch=compute_(\w+)", command) == [arch]


@needs_nvcc
def test_a_default_spelt_out_is_a_duplicate_and_a_changed_byte_is_seen():
    a, twin = (builds.facts(built(*knobs)) for knobs in (["VEC_WIDTH=8"], ["VEC_WIDTH=8", "STAGES=1"]))
    assert a.threads == 128 and a.block_m == 32 and a.shared_bytes > 1000 and a.archs == ("90a",)
    assert dataclasses.replace(a, same="", path="") == dataclasses.replace(twin, same="", path="")
    with open(a.path, "rb") as file:
        data = bytearray(file.read())
    code, = builds.machine_code(data)
    data[data.index(code) + 100] ^= 0xff
    assert builds.machine_code(data) != [code]


@pytest.mark.long
@needs_nvcc
def test_each_number_format_compiles_for_the_host_as_well():
    """The other gates compile only device code. Compiles a line of each format, of wgmma if there is one."""
    of_format = {}
    for line in builds.lines_named(""):
        if line.knob("USE_TUNED") != "1":
            wgmma = line.knob("USE_WGMMA") == "1"
            of_format.setdefault((line.knob("DTYPE"), line.knob("KV_DTYPE")), {}).setdefault(wgmma, line)
    lines = [found.get(True) or found[False] for found in of_format.values()]
    assert len(lines) > 4 and "wgmma_e4m3_d128" in {line.name for line in lines}
    assert not [one.trouble for one in builds.build(lines, "90a").values() if one.trouble]


@pytest.mark.long
@needs_nvcc
def test_a_library_has_the_functions_that_a_caller_loads():
    cublas, = builds.build(builds.parse_contenders(["cublas", "DTYPE=BF16", "HEAD_DIM=128"]), "90a").values()
    assert not cublas.trouble
    for path in (built(kind="-shared").path, cublas.path):
        with open(path, "rb") as file:
            elf = builds.ELFFile(file)
            assert all(builds.symbol(elf, ".dynsym", name).st_size for name in builds.LIBRARY_FUNCTIONS)


@needs_nvcc
def test_the_kernel_beside_compiles():
    hog, = builds.build(builds.parse_contenders(["scalar_minimal"]), "90a", program="tools/hog.cu").values()
    assert not hog.trouble
    with open(hog.path, "rb") as file:
        elf = builds.ELFFile(file)
        assert all(builds.symbol(elf, ".dynsym", name) for name in ("hog_bytes", "hog_start"))


@needs_nvcc
def test_every_line_keeps_to_its_gates(monkeypatch, capsys):
    """Without --all the lines whose extracts are compared with them, and a drawn one."""
    few = "|".join([*tool.QUICK_LINES, tool.drawn(list(TREE.config_lines()))])
    monkeypatch.setattr(sys, "argv", ["gates", *["--only", f"^({few})$"] * IS_QUICK])
    code = gates.main()
    assert code == 0, capsys.readouterr().out
    claims = glob.glob(os.path.join(ROOT, "results", "ladder", "*-claims*.csv"))
    assert not claims or re.search("over .* ok$", capsys.readouterr().out, re.MULTILINE)
