"""Tests of ./run_all.sh sanitize with a fake program: parsing of compute-sanitizer's output, and the verdicts.
usage: python3 -m pytest tests/test_sanitize.py"""
import os

import pytest

import builds
import engine
import sanitize
import tool

TILE = "<sdpa::<unnamed>::BuildOf<(int)%d>>(sdpa::<unnamed>::KernelArgs)"
KERNEL_5D = "void sdpa::<unnamed>::sdpa_wgmma" + TILE % 10
PLAIN = "void sdpa::<unnamed>::sdpa_scalar<sdpa::<unnamed>::BuildOf<(int)-1>>(sdpa::<unnamed>::KernelArgs)"
START = "========= COMPUTE-SANITIZER\nconfig,status,check\nwgmma_swap32,ok,PASS\n"
STORE, LOAD = "void sdpa::<unnamed>::st_shared<float>(void *, T1)", "T1 sdpa::<unnamed>::ld_shared<float>(const void *)"
RACE = START + f"""========= Error: Race reported between Write access at {STORE}+0x5e10 in sdpa.cu:1
=========     and Read access at {LOAD}+0x5e60 in sdpa.cu:2 [1,024 hazards]
=========     and Write access at {STORE}+0x5e10 in sdpa.cu:1 [96 hazards]
=========
========= Warning: Race reported between Read access at {PLAIN}+0x40
=========     and Write access at {PLAIN}+0x90 [4 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
ITEM_LINE, = [str(number) for number, line in enumerate(builds.Tree().read("sdpa.cu").splitlines(), 1)
              if line.strip() == "s.item[stage] = item;"]
ITEM = START + f"""========= Error: Race reported between Read access at sdpa::<unnamed>::WgmmaProducer<T>::follow_item()+0x64c0 in sdpa.cu:2
=========     and Write access at sdpa::<unnamed>::WgmmaProducer<T>::start_item(const T &)+0x6670 in sdpa.cu:{ITEM_LINE} [16 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
HAZARDS = START + f"""========= Error: Potential RAW hazard detected at __shared__ 0x410 in block (0,0,0) :
=========     Write Thread (31,0,0) at {PLAIN}+0xf0 in sdpa.cu:1
=========     Read Thread (127,0,0) at {PLAIN}+0x280 in sdpa.cu:2
=========     Current Value : 35
=========
========= Error: Potential RAW hazard detected at __shared__ 0x411 in block (11,0,0) :
=========     Write Thread (1,0,0) at {PLAIN}+0xf0 in sdpa.cu:1
=========     Read Thread (33,0,0) at {PLAIN}+0x280 in sdpa.cu:2
=========
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
MEMORY = START + "".join(f"""========= Invalid __global__ write of size 4 bytes
=========     at sdpa::<unnamed>::st_global<float>(void *, T1)+0x50 in sdpa.cu:1
=========     by thread ({thread},0,0) in block (0,0,0)
=========     Address 0x7f10fdca00{thread}1 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f10fdca0000 of size 4 bytes
=========         Device Frame: {PLAIN}+0x30 in sdpa.cu:2
=========
""" for thread in range(3)) + """========= Program hit cudaErrorLaunchFailure (error 719) due to "launch failure" on CUDA API call to cudaFree.
=========
========= ERROR SUMMARY: 4 errors
"""
SYNC = START + f"""========= Barrier error detected. Missing wait.
=========     at sdpa::<unnamed>::mbarrier_arrive(unsigned long *)+0xbb10 in sdpa.cu:1
=========     by thread (256,0,0) in block (0,0,0)
=========     Barrier is located at shared address 0x30408
=========         Device Frame: {KERNEL_5D}+0x4320 in sdpa.cu:2
=========
========= ERROR SUMMARY: 1 error
"""
OVERFLOW = START + ("========= Warning: Detected overflow of tracked cuda::barrier structures. Results might be incorrect. Try using "
                    "--num-cuda-barriers to fix the issue\n========= ERROR SUMMARY: 0 errors\n")
CLEAN = {"memcheck": START + "========= LEAK SUMMARY: 0 bytes leaked in 0 allocations\n========= ERROR SUMMARY: 0 errors\n",
         "racecheck": START + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
         "synccheck": START + "========= ERROR SUMMARY: 0 errors\n"}
FIRST = "sdpa.cu:1 `" + builds.Tree().read("sdpa.cu").splitlines()[0].strip()[:70] + "`"


def test_reports_are_read():
    (race, warning), promised = sanitize.parse(RACE)
    assert promised == 2 and race.hazards == 1120 and race.offsets == ("0x5e10", "0x5e60", "0x5e10")
    assert race.group.sentence == "Error: Race reported between Write access" and race.group.kernel == ""
    assert race.group.places[0] == "Write st_shared " + FIRST and race.group.places[1].startswith("Read ld_shared sdpa.cu:2")
    assert warning.group.kernel == "sdpa_scalar" and warning.group.places == ("Read sdpa_scalar", "Write sdpa_scalar")
    (one, other), promised = sanitize.parse(HAZARDS)  # of other threads and bytes
    assert promised == 2 and one.group == other.group and one.group.places[0].startswith("Write sdpa_scalar sdpa.cu:1")
    reports, promised = sanitize.parse(MEMORY)
    assert promised == 4 == len(reports) and reports[0].group == reports[2].group and reports[0].group.kernel == "sdpa_scalar"
    assert reports[0].group.places[0] == "st_global " + FIRST and "cudaErrorLaunchFailure" in reports[3].group.sentence
    second = builds.Tree().read("sdpa_backward.cu").splitlines()[1].strip()[:70]
    (other, *_), _ = sanitize.parse(MEMORY.replace("sdpa.cu:1", "/tmp/sdpa_backward.cu:2"))
    assert other.group.places[0] == f"st_global /tmp/sdpa_backward.cu:2 `{second}`"


LONE = RACE[:RACE.index("========= Warning")] + "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"


@pytest.mark.parametrize("name,checker,text,code,verdict,words", [
    ("scalar_vec8", "memcheck", CLEAN["memcheck"], 0, "PASS", ""),
    ("wgmma", "synccheck", CLEAN["synccheck"], 77, "SKIPPED", ""),
    ("scalar_vec8", "memcheck", MEMORY, 3, "FAIL", "3 times: Invalid __global__ write of size 4 bytes, in sdpa_scalar at 0x50"),
    ("wgmma_swap32", "racecheck", RACE, 0, "FAIL", "1 times: 4 hazards: Warning: Race reported between Read access, in sdpa_scalar at"),
    ("wgmma_swap32", "racecheck", HAZARDS, 0, "FAIL", "2 times: Error: Potential RAW hazard detected at __shared__ # in block #, in"),
    ("wgmma_causal", "racecheck", ITEM, 0, "PASS", ""),
    ("wgmma_causal", "racecheck", ITEM.replace(ITEM_LINE, "1"), 0, "FAIL", "16 hazards: Error: Race reported between Read access"),
    ("wgmma", "synccheck", SYNC, 3, "FAIL", "1 times: Barrier error detected. Missing wait., in sdpa_wgmma tile 10 at 0xbb10/0x4320"),
    ("wgmma", "synccheck", OVERFLOW, 0, "FAIL", "Detected overflow of tracked cuda::barrier structures"),
    # runs without an unexpected report, some of which fail
    ("scalar_vec8", "memcheck", START, 0, "FAIL", "there is no summary: wgmma_swap32,ok,PASS"),
    ("scalar_vec8", "memcheck", "", 0, "FAIL", "there is no summary: it printed nothing"),
    ("wgmma", "synccheck", SYNC.replace("1 error", "2 errors"), 3, "FAIL", "the summary counts 2 reports, but 1 were parsed"),
    ("scalar_vec8", "racecheck", CLEAN["racecheck"], 124, "FAIL", "it ended with exit code 124"),
    ("wgmma_swap32", "racecheck", LONE, 0, "PASS", ""),
    ("wgmma_swap32", "racecheck", LONE, 1, "FAIL", "it ended with exit code 1"),
    ("scalar_racy", "memcheck", CLEAN["memcheck"], 1, "PASS", ""),
    ("scalar_racy", "racecheck", CLEAN["racecheck"], 1, "FAIL", "racecheck finds nothing in a line without barriers"),
    ("scalar_racy", "racecheck", RACE, 1, "PASS", ""),
], ids=lambda value: str(value)[-20:])
def test_a_verdict(name, checker, text, code, verdict, words):
    line, = builds.parse_contenders([name])
    run = sanitize.Run(line, "shape 1,6,2,130,300", checker)
    sanitize.judge(run, text, code)
    assert run.verdict == verdict and words in "\n".join(run.words) and bool(run.words) == (verdict == "FAIL")
    assert run.reports == len(sanitize.parse(text)[0]) * (verdict != "SKIPPED") and (verdict != "PASS" or run.unexpected == 0)


def test_what_is_expected_has_a_reason_and_lines():
    names = builds.Tree().read_configs()[0]
    assert set(sanitize.KINDS.split()) <= set(names)
    for row in sanitize.EXPECTED:
        assert row.tool in sanitize.TOOLS and row.why and any(sanitize.re.search(row.lines, name) for name in names)
    line, = builds.parse_contenders(["wgmma_swap32"])
    run = sanitize.Run(line, "p", "racecheck")
    assert [row.lines for row in sanitize.unmet(sanitize.EXPECTED, [run])] == ["^(wgmma|hopper)", "^(wgmma_swap|wgmma_decode|hopper)"]
    sanitize.judge(run, RACE, 0)
    assert [row.lines for row in sanitize.unmet(sanitize.EXPECTED, [run])] == ["^(wgmma|hopper)"]


@pytest.fixture
def sanitized(tmp_path, monkeypatch):
    """Runs the command with a fake compute-sanitizer with this output and exit code; returns exit code, stdout and stderr."""
    def run(text, code, *words, built=("scalar_vec8", "wmma_persistent", "scalar_racy")):
        (tmp_path / "text").write_text(text)
        program = tmp_path / "compute-sanitizer"
        program.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo Version 7 && exit\necho "$@" >>{tmp_path}/args\n'
                           f"cat {tmp_path}/text\nexit {code}\n")
        program.chmod(0o755)
        for name in built:
            (tmp_path / f"sdpa_{name}").touch()
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr(builds, "BUILD", str(tmp_path))
        monkeypatch.setattr(builds, "cmake_build", lambda *args, **options: None)
        monkeypatch.setattr(engine, "find_gpu", lambda: True)
        return tool.run("sanitize", *words)
    return run


def test_the_command(sanitized, tmp_path):
    code, out, err = sanitized(CLEAN["memcheck"], 0, "^(scalar_vec8|wmma_persistent)$", "--tool", "memcheck")
    assert code == 0 and err == "Version 7\n"
    assert out.splitlines()[:2] == ["line,problem,tool,reports,unexpected,verdict",
                                    'scalar_vec8,"shape 1,6,2,130,300",memcheck,0,0,PASS'] and out.count("PASS") == 6
    args = (tmp_path / "args").read_text()
    assert args.count("--max-ctas 2") == 3 and "--print-limit 0" in args and "--shape 2,2,1,33,70 --causal br" in args
    log = (tmp_path / "sanitize" / "scalar_vec8-memcheck.log").read_text()
    assert log.count("exit code 0") == 3 and CLEAN["memcheck"] in log


@pytest.mark.parametrize("text,ended,words,code,count,verdict,said", [
    (MEMORY, 3, "^scalar_vec8$", 1, 9, "4,4,FAIL", "memcheck of scalar_vec8, shape 1,6,2,130,300: 3 times: Invalid __global__ write"),
    (RACE, 1, "^scalar_racy$ --tool racecheck", 0, 3, "2,0,PASS", ""),
    (RACE, 1, "^scalar_racy$ --tool racecheck --strict", 1, 3, "2,2,FAIL", ""),
    (CLEAN["memcheck"], 77, "^scalar_vec8$ --tool memcheck", 1, 3, "0,0,SKIPPED", ""),  # nothing ran
    (CLEAN["memcheck"], 0, "^scalar_vec2$ --tool memcheck", 1, 3, "FAIL", "it was not built")])
def test_what_fails_and_what_could_not_run(sanitized, text, ended, words, code, count, verdict, said):
    found, out, err = sanitized(text, ended, *words.split())
    assert (found, out.count(verdict)) == (code, count) and said in err
