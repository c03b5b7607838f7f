"""Tests of a broken configs.txt: each error is reported with file and line, and the good lines still run. Also the refusals of
./run_all.sh and the executables: one sentence each, before anything is built. Also the commands of README.md and docs/.
usage: python3 -m pytest tests/test_commands.py"""
import ast
import contextlib
import csv
import fcntl
import functools
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import builds
import cli
import engine
import tool

ROOT = builds.ROOT
RUN_ALL = os.path.join(ROOT, "run_all.sh")
BAD = """# a comment
scalar_vec8 VEC_WIDTH=8 gate:regs<=128 gate:step-over=good1:1.05@mission  # and another; README runs this line and the next
scalar_racy : scalar_vec8 SYNC_POLICY=0 expect=FAIL
typo BLOK_N=64
scalar_vec8 VEC_WIDTH=8
novalue BLOCK_N=
9lives VEC_WIDTH=8
semi;colon VEC_WIDTH=8;rm
maybe expect=PERHAPS
illegal2 arch=hopper
illegal HEAD_DIM=24
gated1 gate:regs=120
gated2 gate:spill<=16
baseless : good1 VEC_WIDTH=4
again : scalar_vec8 VEC_WIDTH=8
good1 : scalar_vec8 BLOCK_N=64 HEAD_DIM=128
selected VEC_WIDTH=8
often BLOCK_N=32 BLOCK_N=32 BLOCK_N=32 BLOCK_N=32
unknown WARP_COLOUR=3
"""
SENTENCES = """4: no knob is called BLOK_N; did you mean BLOCK_M or BLOCK_N?
5: the name scalar_vec8 is taken by an earlier line
6: BLOCK_N has no value: write BLOCK_N=VALUE
7: '9lives' is no name: it starts with a letter and has letters, digits and _ only
8: 'semi?colon' is no name
9: expect=PERHAPS: want expect=PASS or expect=FAIL
10: arch=hopper: want a CUDA architecture, as in arch=90a
12: 'gate:regs=120' is no gate; want gate:regs<=N, gate:smem<=BYTES, gate:spill<=BYTES:WHY
13: 'gate:spill<=16' is no gate
14: 'good1' is no earlier line; want NAME : BASE KNOB=VALUE ...
15: scalar_vec8 has VEC_WIDTH=8 already
17: 'selected' is no name for a line: the build uses it
18: BLOCK_N is given twice
19: no knob is called WARP_COLOUR; the knobs are HEAD_DIM HEAD_DIM_V DTYPE KV_DTYPE OUT_DTYPE BLOCK_M BLOCK_N"""
SENTENCES = ["bad.txt:" + sentence for sentence in SENTENCES.splitlines()]


def on_a_terminal(*command, typed=None, **environment):
    """Runs a command on a terminal; returns its exit code and output. stdin is a terminal if there is input to type."""
    ours, theirs = pty.openpty()
    os.write(ours, (typed or "").encode())
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL if typed is None else theirs, stdout=theirs, stderr=theirs,
                               env={name: value for name, value in {**os.environ, **environment}.items() if value is not None})
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # at the end a terminal that nobody holds gives an error
        while chunk := os.read(ours, 100000):
            said += chunk
    os.close(ours)
    return process.wait(), said.decode().replace("\r\n", "\n")


def run(*command, cwd=ROOT, **environment):
    """Returns the exit code, stdout, and stderr with its line breaks joined."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **environment},
                          stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, " ".join(done.stderr.split())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with bad.txt and the results of ./run_all.sh --cpu on it. few.txt has its good lines."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "bad.txt").write_text(BAD)
    (folder / "few.txt").write_text("good1 VEC_WIDTH=8 BLOCK_N=64 HEAD_DIM=128\nscalar_vec8 VEC_WIDTH=8\n")
    code, out, err = run(RUN_ALL, "--cpu", "--csv", "--shape", "small", "--", "--check-only", SDPA_CONFIGS=str(folder / "bad.txt"),
                         SDPA_BUILD_DIR=str(folder / "build"), CXX=tool.unoptimized(folder))
    return folder, code, out, err


def test_every_bad_line_is_named_and_the_good_ones_are_built(built):
    folder, code, out, err = built
    assert code == 1 and not [sentence for sentence in SENTENCES if sentence not in err]
    assert "lines checked on the CPU backend, " in err
    assert f"{len(SENTENCES)} lines more could not be read" in err
    assert err.count("bad.txt:18") == 1, "a knob given four times is told more than once"
    assert "static_assert" not in err and "static assertion" not in err, "a refusal comes with the compiler's words"
    assert ("bad.txt:11: sdpa_illegal does not compile: HEAD_DIM: not a legal value; it takes one of: 32..256 (default 64)"
            in err)
    header, *rows = list(csv.reader(out.splitlines()))
    assert ",".join(header) + "\n" == run(folder / "build-cpu" / "sdpa_scalar_vec8", "--header")[1]
    assert header == engine.row_columns()
    names = [row[0] for row in rows]
    assert {len(row) for row in rows} == {len(header)} and "no knob is called BLOK_N" in out
    assert names.count("scalar_vec8") == 2, "one of them is the double's"
    assert [names.count(name) for name in ("good1", "scalar_racy", "illegal", "typo")] == [1] * 4


# ---- ./run_all.sh ----

@pytest.mark.parametrize("words,code,sentence", [
    ("--cpu --only (", 2, "--only (: not a regular expression"),
    ("--onyl x", 2, "--onyl: no such option or command; did you mean --only?"),
    ("--cpu --shape mission --shape 1,3,2,8,8", 2, "--shape 1,3,2,8,8: want small, mission"),
    ("--only=a --cpu --only b", 2, "--only is given twice; write --only 'a|b'"),
    ("--cpu --only=scalar_vec(8){1}", 2, "--only scalar_vec(8){1}: CMake reads it: its regular expressions have no {N}"),
    ("--cpu -- --check-only --header", 2, "-- --header: only for a single executable; type: build/sdpa_NAME --header"),
    ("test --no-pytroch", 2, "test --no-pytroch: neither --all or --no-pytorch, which come first, nor an option of ctest; "
                             "did you mean --no-pytorch?"),
    ("list ^scalar_racy", 0, "scalar_racy sm_80, must fail scalar_vec8 SYNC_POLICY=0"),
    ("list ^hopper_bf16$", 0, "hopper_bf16 sm_90a hopper DTYPE=BF16"),
    ("list ^mma_decode_kv8", 0, "mma_decode_kv8_d128_bf16 sm_89 mma_decode_d128_bf16 KV_DTYPE=FP8_E4M3 VEC_WIDTH=16 BLOCK_N=32")])
def test_arguments_are_judged_before_anything_is_built(tmp_path, words, code, sentence):
    found, out, err = run(RUN_ALL, *words.split(), SDPA_BUILD_DIR=str(tmp_path / "none"))
    assert found == code and sentence in " ".join(out.split()) + err
    assert not list(tmp_path.iterdir())


def test_few_lines_without_times_are_shown_each(built, german):
    """Runs in a locale with decimal commas. A shape may end in D, as in README; lines with another D are reported once."""
    def table(*words):
        code, out, err = run(RUN_ALL, "--cpu", *words, SDPA_CONFIGS=str(built[0] / "few.txt"),
                             SDPA_BUILD_DIR=str(built[0] / "build"), **german)
        return code, [row.split() for row in out.splitlines() if row], err
    code, rows, err = table("--shape", "1,2,2,20,20,128", "--causal", "br")
    assert code == 0 and rows[0] == "1x2x2x20x20 causal br, D=128 fp16".split() and len(rows) == 3
    assert rows[1][:3] == ["good1", "PASS", "rel_rms"] and 0 < float(rows[1][3].rstrip(",")) < 1e-3
    assert " ".join(rows[2]) == "scalar_vec8 skipped built with HEAD_DIM=64 and the shape has D=128"
    assert "1 line checked on the CPU backend, 0 failed, 1 skipped" in err and err.count("skipped") == 1
    code, _, err = table("--only", "scalar_vec8", "--shape", "1,2,2,20,20,128")
    assert code == 77 and "nothing was checked, since every line was skipped" in err
    code, _, err = table("--shape=small", "--causal=br", "--only=zzz=1")
    assert code == 2 and "--only zzz=1: no line of " in err


def test_a_negative_control_that_passes_its_check(built, tmp_path):
    """It fails unless racecheck reports a hazard; compute-sanitizer may fail for another reason, such as an unsupported GPU."""
    summary = "========= RACECHECK SUMMARY: {0} hazards displayed ({0} errors, 0 warnings)".format
    (tmp_path / "compute-sanitizer").write_text('#!/bin/sh\necho "$SAID"\nexit $CODE\n')
    (tmp_path / "compute-sanitizer").chmod(0o755)
    function = re.search(r"^racecheck_reports\(\) {\n.*?^}\n", Path(RUN_ALL).read_text(), re.M | re.S)[0]
    environment = dict(PATH=f"{tmp_path}:{os.environ['PATH']}", build=str(tmp_path))
    for said, ended, is_reported in ((summary(2), 9, True), (summary(10), 9, True), (summary(2), 0, False), (summary(0), 1, False), ("", 139, False),
                                     ("========= Error: Device not supported, so no hazard is reported", 1, False)):
        code = run("bash", "-c", function + "racecheck_reports any", CODE=str(ended), SAID=said, **environment)[0]
        assert (code == 0) == is_reported, (said, ended)
    (tmp_path / "two.txt").write_text("good1 VEC_WIDTH=8 BLOCK_N=64 HEAD_DIM=128 expect=FAIL\nscalar_vec8 VEC_WIDTH=8 expect=FAIL\n")
    (tmp_path / "compute-sanitizer").write_text(f'#!/bin/sh\ncase "$*" in *good1*) echo "{summary(1)}"; exit 9 ;; esac\necho "{summary(0)}"; exit 1\n')
    code, out, err = run(RUN_ALL, "--cpu", "--csv", "--shape", "small", "--", "--check-only", SDPA_CONFIGS=str(tmp_path / "two.txt"),
                         SDPA_BUILD_DIR=str(built[0] / "build"), **environment)
    assert code == 1 and "sdpa_scalar_vec8 passed, but must fail its check" in err and err.count("must fail its check") == 1, err
    assert re.findall("^(.*?),.*(?:reported by racecheck)", out, re.M) == ["good1"]


def test_ctrl_c_while_running(built):
    """Ctrl-C keeps the rows of finished lines and the first rows of the unfinished one."""
    names = "good1", "scalar_vec8"
    runs = [built[0] / f"build-cpu/run/{name}.csv" for name in names]
    for path in runs:  # of an earlier test
        path.unlink(missing_ok=True)
    command = [RUN_ALL, "--cpu", "--shape", "small", "--shape", "1,1,1,60000,60000", "--", "--check-only"]
    process = subprocess.Popen(
        command, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env={**os.environ, "SDPA_CONFIGS": str(built[0] / "few.txt"), "SDPA_BUILD_DIR": str(built[0] / "build"), "JOBS": "2"})
    while process.poll() is None and not all(path.exists() and ",small," in path.read_text() for path in runs):
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    said = process.stderr.read()
    assert process.wait() == 130 and "stopped; rows: " in said, said
    with open(built[0] / "build-cpu/rows.csv", newline="") as file:
        rows = sorted((row["config"], row["shape"], row["check"]) for row in csv.DictReader(file))
    assert rows == [(name, "small", "PASS") for name in names]


@pytest.mark.parametrize("name,value,sentence", [
    *(("SDPA_ARCHS", archs, "want native or a list such as 80-real;90a-real") for archs in ("foo", "80-real;")),
    ("JOBS", "abc", "want a number of processes from 1 to 9999"), ("SDPA_BUILD_DIR", "a;b", "CMake splits paths at ';'"),
    ("SDPA_CONFIGS", "nosuch", "there is no such file"), ("SDPA_CONFIGS", "empty.txt", "no configuration in it; a line is NAME")])
def test_environment_that_no_command_takes(name, value, sentence, tmp_path):
    """Names of files are relative to the folder in which the command is typed."""
    (tmp_path / "empty.txt").write_text("# nothing\n")
    code, out, err = run(RUN_ALL, "--cpu", cwd=tmp_path, **{"SDPA_BUILD_DIR": str(tmp_path / "build"), name: value})
    assert code == 2 and not out and sentence in err and value in err
    assert len(list(tmp_path.iterdir())) == 1


def test_a_line_is_built_again_when_it_is_corrected(built):
    folder = built[0]
    (folder / "corrected.txt").write_text("illegal HEAD_DIM=32 VEC_WIDTH=8\n")
    code, out, err = run(RUN_ALL, "--cpu", "--csv", "--shape", "small", "--", "--check-only", SDPA_CONFIGS=str(folder / "corrected.txt"),
                         SDPA_BUILD_DIR=str(folder / "build"), CXX=tool.unoptimized(folder))
    assert (code, "does not compile" in err, "illegal,scalar" in out, ",ok,PASS" in out) == (0, False, True, True), err


@pytest.mark.long
def test_a_line_is_built_again_when_its_knobs_are_right_again(built):
    folder = built[0]
    for knobs, right in (("VEC_WIDTH=2", True), ("VEC_WIDTH=2 HEAD_DIM=24", False), ("VEC_WIDTH=2", True)):
        (folder / "one.txt").write_text(f"good2 {knobs}\n", encoding="utf-8-sig")
        environment = dict(SDPA_CONFIGS=str(folder / "one.txt"), SDPA_BUILD_DIR=str(folder / "build"))
        code, out, err = run(RUN_ALL, "--cpu", "--csv", "--shape", "small", "--", "--check-only", **environment)
        assert (code, "small,ok,PASS" in out, "one.txt:1: sdpa_good2 does not compile: HEAD_DIM: not a legal value" in err) == (
            0 if right else 1, right, not right), err
        if not right:
            code, out, err = run(RUN_ALL, "sweep", "2", "--cpu", **environment)
            assert code == 1 and "good2 does not compile: HEAD_DIM: not a legal value" in err and "good2,1,0,0," in out


def test_one_job_at_a_time_in_a_folder(built):
    build = built[0] / "build-cpu"
    with open(build / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, err = run(RUN_ALL, "--cpu", SDPA_BUILD_DIR=str(built[0] / "build"))
    assert code == 2 and f"{build}: another run_all.sh is running there; wait, or set SDPA_BUILD_DIR" in err


# ---- numbers and words, on a terminal and in other languages ----

@pytest.fixture(scope="module")
def german(tmp_path_factory):
    """The environment of a user with decimal commas; empty if that locale is not available."""
    folder = tmp_path_factory.mktemp("locales")
    if not shutil.which("localedef") or subprocess.run(["localedef", "-i", "de_DE", "-f", "ISO-8859-1", folder / "de_DE"],
                                                       capture_output=True).returncode:
        return {}
    return dict(LC_ALL="de_DE", LOCPATH=str(folder))


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    program = tmp_path_factory.mktemp("table") / "sdpa_table"
    subprocess.run([builds.CXX, "-std=c++17", os.path.join(ROOT, "table.cpp"), "-o", program], check=True)
    return program


DATA = os.path.join(ROOT, "tests", "data")


def test_the_table(table, german):
    """The fastest correct line wins, each problem has its own baseline, the two passes are different problems, and every message
    appears, in any locale."""
    want = builds.Tree().read("tests/data/table.txt")
    for environment in ({}, german, dict(TERM="xterm")):
        shown = subprocess.run([table, os.path.join(DATA, "table.csv")], capture_output=True, text=True, env={**os.environ, **environment})
        assert shown.stdout == want, environment
    assert run(table)[0] == run(table, "nosuch.csv")[0] == 2


def test_the_table_on_a_terminal(table):
    """The terminal's table has colours if enabled, and the same text."""
    want = builds.Tree().read("tests/data/table.txt")
    for environment in (dict(TERM="xterm", NO_COLOR="1"), dict(TERM="dumb", NO_COLOR=None)):
        assert on_a_terminal(table, os.path.join(DATA, "table.csv"), **environment) == (0, want), environment
    code, said = on_a_terminal(table, os.path.join(DATA, "table.csv"), TERM="xterm", NO_COLOR=None)
    assert code == 0 and re.sub(r"\033\[[0-9;]*m", "", said) == want
    assert set(re.findall(r"\033\[1;31m(.*?)\033\[0m", said)) == {"FAIL  ", "skipped", "error  "}
    assert re.findall(r"\033\[1;32m(\w+) *\033\[0m", said) == ["quick", "base2", "back"]


@pytest.mark.parametrize("count,shown", [(19, 20), (20, 1)])
def test_over_20_lines_without_times(table, tmp_path, count, shown):
    """Only the wrong ones are shown."""
    rows = ["wrong,small,off,64,fp16,ok,FAIL,,,0.1,0.2,words", *(f"line{n},small,off,64,fp16,ok,PASS,,,0.1,0.2," for n in range(count))]
    columns = "config,shape,causal,D,dtype,status,check,graph_us,tflops,rel_rms,max_abs_err,note"
    (tmp_path / "rows.csv").write_text("\n".join([columns, *rows, ""]))
    out = run(table, str(tmp_path / "rows.csv"))[1]
    assert len(out.splitlines()) == 2 + shown and f"{'wrong':<24} FAIL    words\n" in out


@pytest.fixture
def no_python(tmp_path):
    """A PATH without Python and without the tools that only a build needs."""
    for name in "bash sh env sed cat grep dirname readlink realpath nproc awk mkdir id tr head cut".split():
        (tmp_path / name).symlink_to(shutil.which(name))
    return str(tmp_path)


def test_help_needs_nothing(no_python):
    """--help of every command that run_all.sh lists prints the usage of its tool and needs no Python."""
    code, out, err = run(RUN_ALL, "--help", PATH=no_python)
    commands = {*re.findall(r"^       \./run_all\.sh ([a-z]+)", out, re.MULTILINE)}
    assert (code, err) == (0, "") and len(commands) == 16
    for command in commands:
        code, out, err = run(RUN_ALL, command, "--help", PATH=no_python)
        assert code == 0 and not err and f"usage: ./run_all.sh {command} " in out and out.count("usage:") == 1, command
        if command not in ("list", "test"):  # of run_all.sh itself
            text = builds.Tree().read(f"tools/{cli.MODULES.get(command, command)}.py")
            assert out == re.sub(r"\n+", "\n", cli.usage_of(command, ast.get_docstring(ast.parse(text))) + "\n")
    assert run(RUN_ALL, "ab", "scalar_vec8", "-h", PATH=no_python)[0] == 0


# ---- tools that are missing ----

@pytest.fixture
def bare(tmp_path):
    """A PATH without cmake, with an apt-get that only records its arguments."""
    for folder in ("/usr/local/bin", "/usr/bin", "/bin"):
        for name in os.listdir(folder):
            if name not in ("cmake", "apt-get", "id") and not os.path.lexists(tmp_path / name):
                (tmp_path / name).symlink_to(os.path.join(folder, name))
    for name, text in (("apt-get", f"echo $* >>{tmp_path}/log; ln -sf /bin/false {tmp_path}/cmake"), ("id", "echo 0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path, dict(PATH=str(tmp_path), SDPA_BUILD_DIR=str(tmp_path / "build"))


@pytest.mark.parametrize("answer,is_installed", [("", False), ("y", True)])
def test_a_missing_tool_is_installed_if_the_user_agrees(bare, answer, is_installed):
    folder, environment = bare
    code, said = on_a_terminal(RUN_ALL, "--cpu", typed=answer + "\n", **environment)
    assert code == 2 and "May I install cmake (apt-get)? [y/N]" in said and (folder / "log").exists() == is_installed
    if is_installed:
        assert (folder / "log").read_text() == "update\ninstall -y --no-install-recommends cmake\n"
    else:
        assert "cmake is missing; install it with: sudo apt-get install cmake" in said


# Before anything is installed or compiled: what each command can know without its packages.
JUDGED = [("extract hoper", "hoper: .* did you mean hopper[?]"), ("ab hopper --shap small", "--shap: .* did you mean --shape[?]"),
          ("gates --time", "gates: it .* and there is no GPU here"),
          # Last, since CMake lists tests in a build folder.
          pytest.param("test -R nosuch", "test -R nosuch: these options select no test", marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def without_packages(tmp_path_factory):
    """An environment whose Pythons lack all packages, with an apt-get that only records that it was called. doctest is missing
    as well."""
    folder = tmp_path_factory.mktemp("bin")
    programs = dict.fromkeys(("apt-get", "pip"), f"echo $0 $* >>{folder}/installs; exit 1")
    programs["id"] = "echo 0"
    programs["python3"] = f'case "$*" in *venv*|*pip*) echo $* >>{folder}/installs; exit 1 ;; esac; exec {sys.executable} -S "$@"'
    programs["c++"] = 'case "$*" in *" -M -"|*"-fsyntax-only -") exit 1 ;; esac; exec g++ "$@"'
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return folder, dict(PATH=f"{folder}:{os.environ['PATH']}", CXX=str(folder / "c++"), SDPA_BUILD_DIR=str(folder / "build"))


@pytest.mark.skipif(engine.find_gpu() is not None, reason="there is a GPU")
@pytest.mark.parametrize("words, sentence", JUDGED)
def test_arguments_are_judged_before_anything_is_installed(without_packages, words, sentence):
    folder, environment = without_packages
    code, out, err = run(RUN_ALL, *words.split(), **environment)
    assert code == 2 and re.search(sentence, err) and not out and not (folder / "installs").exists(), err
    assert words.startswith("test ") or not (folder / "build").exists()


# ---- a disk that is full or cannot be written to ----

FULL = """#!/bin/sh
for word; do [ "$last" = -o ] && out=$word; last=$word; done
case "$*" in
  *SDPA_LINE_ONLY*|*SDPA_HARNESS_ONLY*|*tests/sweep.cu*) exec head -c 9999999 /dev/zero >"$out" ;;
  *) exec g++ "$@" ;;
esac
"""


def in_own_mounts(script, *words, **environment):
    """The output of run() in a mount namespace."""
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode:
        pytest.skip("only root may mount")
    return run("unshare", "-m", "sh", "-c", f"{script} && exec \"$@\"", "sh", *words, **environment)


@pytest.mark.parametrize("size, words", [
    ("1m", "--cpu --only ^scalar_vec8$"), ("60k", "ab scalar_vec8 VEC_WIDTH=4 --shape small"),
    pytest.param("1m", "sweep 1 --cpu --only ^scalar_vec8$", marks=pytest.mark.long)])
def test_a_full_disk(tmp_path, size, words):
    """The disk fills while CMake configures, while a compiler writes an object, or while a tool writes a file."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "c++").write_text(FULL)
    (tmp_path / "c++").chmod(0o755)
    code, out, err = in_own_mounts(f"mount -t tmpfs -o size={size} tmpfs {tmp_path}/disk", RUN_ALL, *words.split(), CXX=str(tmp_path / "c++"),
                                   SDPA_BUILD_DIR=str(tmp_path / "disk/build"), TMPDIR=str(tmp_path / "disk"))
    assert code == 3 and "No space left on device" in err and "not compile" not in err, err
    assert str(tmp_path / "disk") in err or "head: error writing" in err, err


def test_a_checkout_that_cannot_be_written_to():
    script = f"mount --bind {ROOT} {ROOT} && mount -o remount,ro,bind {ROOT} && cd {ROOT}"
    code, _, err = in_own_mounts(script, RUN_ALL, "--cpu", SDPA_BUILD_DIR="")
    assert code == 2 and err.endswith("set SDPA_BUILD_DIR to one"), err


def test_stdout_that_cannot_be_written_to():
    done = subprocess.run(["bash", "-c", f"{RUN_ALL} list >&-"], capture_output=True, text=True)
    assert done.returncode == 3 and re.fullmatch("[^\\n]*stdout is closed\n", done.stderr), done.stderr
    done = subprocess.run(["bash", "-c", f"{RUN_ALL} ab --help >/dev/full"], capture_output=True, text=True)
    assert done.returncode == 3 and "No space left on device" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    done = subprocess.run(["bash", "-c", f"{RUN_ALL} list | true; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True)
    assert done.returncode in (0, 3) and re.fullmatch("(.*(its reader has exited|stdout is closed).*\n)?", done.stderr), done.stderr


# ---- an executable ----

@pytest.mark.parametrize("program,words,code,sentence", [
    ("sdpa_good1", "--shpae=small", 2, "sdpa: --shpae: no such option; did you mean --shape?"),
    *(("sdpa_good1", f"--scale={scale}", 2, f"--scale {scale}: want a number greater than 0, below 10^38")
      for scale in ("0x10", "nan", "1e39", "")),
    ("sdpa_good1", "--scale 1.5e-1 --shape 1,1,1,8,8 --check-only", 0, "PASS"),
    ("sdpa_good1", "--config", 0, "changed: HEAD_DIM=128 BLOCK_N=64 VEC_WIDTH=8"),
    ("sdpa_good1", "--shape", 2, "--shape: its value is missing"),
    ("sdpa_good1", "--check-only=1", 2, "--check-only: it takes no value"), ("sdpa_good1", "--dist=a=b", 2, "--dist a=b: want"),
    ("sdpa_good1", "--causal=br --causal off", 2, "--causal is given twice")])
def test_a_program(built, program, words, code, sentence):
    found, out, err = run(built[0] / "build-cpu" / program, *words.split())
    assert found == code and sentence in " ".join(out.split()) + err


def test_on_a_terminal_it_tells_in_words(built):
    program = built[0] / "build-cpu" / "sdpa_scalar_vec8"
    code, said = on_a_terminal(program, "--shape", "1,1,1,8,8,64", "--window", "5,0")
    lines, words = said.split("\n"), " ".join(said.split())
    assert code == 0 and lines[0] == "sdpa_scalar_vec8 (scalar) on CPU backend" and max(map(len, lines)) <= 120
    assert lines[1].rstrip().endswith("Sq=8 Sk=8 D=64 fp16, window 5,0")
    assert "check PASS: 8 rows" in words and "rel_rms" in words and "(limit 0.001)" in words
    _, said = on_a_terminal(program, "--shape", "1,1,1,8,8,64", "--header")
    assert re.search(r"^scalar_vec8,scalar,1x1x1x8x8,ok,PASS,.*", said, re.MULTILINE)  # who asks for a header wants rows


def test_rows_that_go_nowhere(built):
    for command, words in (
            ([built[0] / "build-cpu" / "sdpa_good1", "--check-only"], " (No space left on device), so rows are lost"),
            ([RUN_ALL, "--cpu", "--only", "^good1$", "--csv"], "; the rows are in")):
        with open("/dev/full", "w") as full:
            done = subprocess.run([*command, "--shape", "small"], stdout=full, stderr=subprocess.PIPE, text=True, env={
                **os.environ, "SDPA_CONFIGS": str(built[0] / "bad.txt"), "SDPA_BUILD_DIR": str(built[0] / "build")})
        assert done.returncode == 3 and "stdout cannot be written to" + words in " ".join(done.stderr.split())


# ---- the commands of README.md and docs/ ----

PAGES = [Path(ROOT, "README.md"), *sorted(Path(ROOT, "docs").glob("*.md"))]
README, USING = (builds.Tree().read(name) for name in ("README.md", "docs/USING.md"))


def commands():
    """The distinct command lines in the sh blocks of README and USING (running and pasting)."""
    blocks = re.findall(r"^```sh\n((?!git clone).*?)^```", README + re.search(r"^## Run it.*?^## C and", USING, re.M | re.S)[0], re.M | re.S)
    return [*dict.fromkeys(re.sub(r"\s+# .*", "", line) for block in blocks for line in block.splitlines())]


def needs_time_or_gpu(command):
    """True for commands that measure time or take minutes on the CPU; only their arguments are checked."""
    words = shlex.split(command)
    slow = words[0] == "./run_all.sh" and ("--shape" in words or words[1:2] in (["ab"], ["ablate"], ["profile"], ["test"]))
    return slow or words[0].startswith("build/") or "--only" in words and not re.search(words[words.index("--only") + 1], "scalar_vec8")


def test_the_output_that_readme_shows(built):
    """README shows the output of its first command, except for the last digits of errors and omissions (...)."""
    command, shown = re.search(r"^```sh\n([^\n#]*?) *#[^\n]*\n```\n+```\n(.*?)```", README, re.M | re.S).groups()
    done = subprocess.run(["bash", "-c", command + " --shape small"], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "SDPA_CONFIGS": "", "SDPA_BUILD_DIR": str(built[0] / "build")})
    said = re.sub(r"(0\.000\d)\d*", r"\1", done.stdout + done.stderr).splitlines()
    assert done.returncode == 0, done.stderr
    for line in re.sub(r"(0\.000\d)\d*", r"\1", shown).splitlines():
        assert line == "  ..." or line in said, (line, said)


@pytest.mark.long
def test_commands_that_need_no_gpu(tmp_path):
    """In a copy, since they write files. Of the whole build only CMake's configuration runs."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(lambda name: name and os.path.isfile(os.path.join(ROOT, name)), files):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.join(ROOT, name), tmp_path / name)
    (tmp_path / "one.txt").write_text("scalar_vec8 VEC_WIDTH=8 SYNC_POLICY=1\n")
    path = os.environ["PATH"] + ":/usr/local/cuda/bin"
    run = [command.split(" && ")[0] if command.startswith("cmake") else command for command in commands() if not needs_time_or_gpu(command)]
    assert sum(command.startswith(("nvcc", "cmake")) for command in run) >= 3 and len(run) >= 7
    for command in run:
        if command.startswith(("nvcc", "cmake")) and not builds.nvcc():
            continue
        more = {"NVCC_APPEND_FLAGS": "-Xcompiler=-Wall,-Wextra,-Werror"} if command.startswith("nvcc") else {}
        more |= {} if "extract" in command else {"SDPA_CONFIGS": str(tmp_path / "one.txt")}
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True,
                              env={**os.environ, "PATH": path, "SDPA_BUILD_DIR": "", **more})
        assert done.returncode == 0, command + ":\n" + done.stdout + done.stderr
    extract = (tmp_path / "my_kernel.cu").read_text(encoding="utf-8")
    assert "namespace wgmma_causal" in extract
    about = int(re.search(r"(\d+)<!--lines of my_kernel.cu-->", README)[1])
    assert abs(extract.count("\n") - about) < 0.1 * about


@functools.cache
def said_by_help(*command):
    code, out, err = run(*command, "--help")
    assert code == 0, command
    return out + err


def wrong_words(words, program, names, knobs):
    """The options, lines and knobs of a command that do not exist."""
    executable, command = re.fullmatch(r"build(?:-cpu)?/sdpa_(\w+)", words[0]), [os.path.join(ROOT, words[0])]
    if executable:
        command = [program]
    elif words[1:] and words[1][0] not in "-<>":
        command.append(words[1])
    said_by_help(*command)
    wrong = [executable[1]] if executable and executable[1] not in [*names, "NAME"] else []
    for word in words[1:]:
        if word == "--":
            command = [program]
        elif word.startswith("-"):
            wrong += [word] * (not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", said_by_help(*command)))
        elif re.fullmatch(r"[A-Z_]{3,}=\w+", word):
            wrong += [word] * (word.split("=")[0] not in (*knobs, "KNOB"))
        elif re.fullmatch(r"(?:[\w~.]+:)?\^?(?:scalar|wmma|mma|wgmma|hopper|ampere)\w*\$?", word):
            wrong += [word] * (word.split(":")[-1].strip("^$") not in names)
        elif word.startswith("torch:"):
            wrong += [word] * (word not in builds.PACKAGES and word.split(":")[1] not in builds.TORCH_BACKENDS)
    return wrong


def test_words_of_all_other_commands(built):
    found = [("README.md or USING.md", command) for command in commands() if needs_time_or_gpu(command)]
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        spans = re.findall(r"`((?:\./run_all\.sh|tools/peers\.py|build(?:-cpu)?/sdpa_)[^`]*)`", text)
        lines = re.findall(r"^    (\./run_all\.sh.*|build.*)", text, re.M)
        found += [(page.name, re.sub(r"\s+#.*", "", command)) for command in spans + lines]
    assert len(found) >= 25
    program, names, knobs = built[0] / "build-cpu/sdpa_good1", builds.Tree().read_configs()[0], builds.Tree().knobs()
    for page, command in found:
        assert not wrong_words(shlex.split(command), program, names, knobs), f"{page}: {command}"
