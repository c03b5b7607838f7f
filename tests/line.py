#!/usr/bin/env python3
"""One line of configs.txt on the CPU backend: problems that touch every edge of the contract, under several orders of the
threads. EXE is a sweep_NAME.  usage: line.py EXE PASS|FAIL none|address|thread"""
import subprocess
import sys

EXE, EXPECT, SANITIZER = sys.argv[1:]
failed = False


def run(words):
    """Exit code, and the words and rows, of one launch of the executable."""
    done = subprocess.run([EXE, "--check-only", *words.split()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=300)
    return done.returncode, done.stdout


def fail(*words):
    global failed
    failed = True
    print(*words, sep="\n")


def expect_pass(words):
    code, out = run(words)
    if code:
        fail(f"exit {code}: {EXE} --check-only {words}", *out.splitlines()[:60])
    return out


def negative_control():
    """Every net that looks at it must see it. Only ThreadSanitizer sees wmma's in reverse order: there the lanes of a warp wait
    for each other long enough for the copies to land."""
    for schedule in ("forward", "reverse", "random:1"):
        code, out = run(f"--shape small --schedule {schedule}")
        if SANITIZER == "thread":
            if "ThreadSanitizer: data race" not in out:
                fail(f"{schedule}: no data race reported")
        elif code != 1 and not ("sweep_wmma" in EXE and schedule == "reverse"):
            fail(f"{schedule}: exit {code}, want 1", out)


def order_of_accesses():
    """For ThreadSanitizer, which does not look at numbers."""
    expect_pass("--shape small --shape 1,1,1,70,33 --causal br --schedule reverse")
    out = expect_pass("--shape 1,2,1,33,150 --schedule random:1")
    same_bits(out, [2])
    window(out)


def same_bits(out, counts):
    """The CPU backend has three SMs: fewer CTAs than are resident, and no fewer, give the same bits."""
    for ctas in counts if " USE_PERSISTENT_CTA=1 " in out else ():
        expect_pass(f"--shape 1,4,2,200,100 --causal br --max-ctas {ctas}")


def window(out):
    """Of short ranges, if the line has ranges: the others refuse longer sums."""
    keys = 65536 if " SPLIT_CTAS=1 " in out and " USE_TUNED=0 " in out else 64
    expect_pass(f"--shape 1,2,1,70,300 --window 90,-1 --causal br --machine 3,120,2,{keys}")


def numbers():
    # More keys than queries and the other way round; one query; no key.
    ragged, short = "--shape 1,2,1,33,70 --shape 1,1,1,70,33", "--shape 1,1,1,1,100 --shape 2,2,2,5,0"
    for schedule in ("forward", "reverse"):
        expect_pass(f"--shape small {ragged} --causal br --schedule {schedule}")
    expect_pass(f"{ragged} {short} --causal br --dist stairs --layout packed --schedule random:1")
    huge = f"{ragged} --causal tl --dist huge --layout padded --schedule random:2"
    fp16_sums = " FP16_ACC=NONE " not in run("--shape small")[1]
    if not fp16_sums:
        expect_pass(huge)
    elif run(huge)[0] != 1:
        fail("sums beyond 65504 are not reported")
    expect_pass("--shape 1,2,1,33,70 --layout bshd --dist nonfinite")
    out = expect_pass("--shape 1,1,1,33,300 --dist uniform")
    if " DTYPE=FP8_E4M3 " in out:  # a factor of 0 and a factor that would make the scale infinite
        expect_pass("--shape 1,8,2,20,50 --descale zeros --scale 2e38")
    backwards = "bshd" if " USE_WGMMA=1 " in out else "reversed"  # TMA takes no strides below 0
    expect_pass(f"--shape 1,6,2,40,50 --layout {backwards} --dist outliers --scale 0.3")
    expect_pass(f"--shape 2,3,1,9,30 --layout zero --dist stairs --seeds 1 --causal tl")
    same_bits(out, [1, 2, 7])
    if SANITIZER == "address":
        window(out)
    else:
        expect_pass(f"--shape 1,2,1,70,200 --causal br --dist {'normal' if fp16_sums else 'large'} --schedule random:3")
        expect_pass("--shape 2,2,2,3,5 --layout far_rows")
        expect_pass("--edges")
        # The barriers of a K/V tile, as executed, are those that the code declares.
        expect_pass("--tile")


if EXPECT == "FAIL":
    negative_control()
elif SANITIZER == "thread":
    order_of_accesses()
else:
    numbers()
sys.exit(failed)
