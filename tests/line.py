#!/usr/bin/env python3
"""Runs one line of configs.txt on the CPU backend: problems that cover every edge of the contract, with several thread
schedules. EXE is a sweep_NAME.  usage: line.py EXE PASS|FAIL none|address|thread"""
import subprocess
import sys

EXE, EXPECT, SANITIZER = sys.argv[1:]
failed = False


def run(words):
    """Runs the executable; returns its exit code and output."""
    done = subprocess.run([EXE, "--check-only", *words.split()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=300)
    return done.returncode, done.stdout


def fail(*words):
    global failed
    failed = True
    print(*words, sep="\n")


def expect_pass(words, has_chains=False):
    """Chains of kernels cost three more launches of each problem, and depend only on the build: one run per line has them."""
    words += "" if has_chains else " --alone"
    code, out = run(words)
    if code:
        fail(f"exit {code}: {EXE} --check-only {words}", *out.splitlines()[:60])
    return out


def negative_control():
    """Every checker must detect it. wmma's under --schedule reverse is visible to ThreadSanitizer only: the lanes of a warp wait
    for each other long enough for the copies to complete."""
    for schedule in ("forward", "reverse", "random:1"):
        code, out = run(f"--shape small --schedule {schedule}")
        if SANITIZER == "thread":
            if "ThreadSanitizer: data race" not in out:
                fail(f"{schedule}: no data race reported")
        elif code != 1 and not ("sweep_wmma" in EXE and schedule == "reverse"):
            fail(f"{schedule}: exit {code}, want 1", out)


def order_of_accesses():
    """Runs for ThreadSanitizer: they cover the orders of accesses, not the numbers."""
    expect_pass("--shape 1,1,1,70,33 --causal br --schedule reverse")
    out = expect_pass("--shape 1,1,1,20,150 --schedule random:1")
    same_bits(out, [2], "1,4,2,40,70")
    window(out, "1,1,1,20,300")


def same_bits(out, counts, shape):
    """The CPU backend has three SMs. The results have the same bits whether or not --max-ctas limits the resident CTAs."""
    for ctas in counts if " USE_PERSISTENT_CTA=1 " in out else ():
        expect_pass(f"--shape {shape} --causal br --max-ctas {ctas}")


def window(out, shape):
    """Runs a window, with sums of at most 64 keys if the line splits keys into ranges: the other lines would refuse."""
    keys = 65536 if " SPLIT_CTAS=1 " in out and " USE_TUNED=0 " in out else 64
    expect_pass(f"--shape {shape} --window 90,-1 --causal br --machine 3,120,2,{keys}")


def layout_backwards(out):
    """A layout with negative strides; "bshd" for lines with TMA, which does not support them."""
    return "bshd" if " USE_WGMMA=1 " in out else "reversed"


def numbers():
    # More keys than queries and the other way round; one query; no key.
    ragged, short = "--shape 1,2,1,33,70 --shape 1,1,1,70,33", "--shape 1,1,1,1,100 --shape 2,2,2,5,0"
    expect_pass(f"--shape small {ragged} --causal br --schedule forward", has_chains=True)
    expect_pass(f"{ragged} --causal br --schedule reverse")
    expect_pass(f"{ragged} {short} --causal br --dist stairs --layout packed --schedule random:1")
    out = run("--shape small")[1]
    # SCORE_MOD adds in fp32, which is inexact for huge logits.
    dist = "huge" if " SCORE_MOD=NONE " in out else "large"
    huge = f"{ragged} --causal tl --dist {dist} --layout padded --schedule random:2"
    fp16_sums = " FP16_ACC=NONE " not in out
    if not fp16_sums:
        expect_pass(huge)
    elif run(huge)[0] != 1:
        fail("sums beyond 65504 are not reported")
    expect_pass("--shape 1,2,1,33,70 --layout bshd --dist nonfinite")
    out = expect_pass("--shape 1,1,1,33,300 --dist uniform")
    if " DTYPE=FP8_E4M3 " in out:  # a factor of 0 and a factor that would make the scale infinite
        expect_pass("--shape 1,8,2,20,50 --descale zeros --scale 2e38")
    expect_pass(f"--shape 1,6,2,40,50 --layout {layout_backwards(out)} --dist outliers --scale 0.3")
    expect_pass(f"--shape 2,3,1,9,30 --layout zero --dist stairs --seeds 1 --causal tl")
    same_bits(out, [1, 2, 7], "1,4,2,200,100")
    if SANITIZER == "address":
        window(out, "1,2,1,70,300")
    else:
        expect_pass(f"--shape 1,2,1,70,200 --causal br --dist {'normal' if fp16_sums else 'large'} --schedule random:3")
        expect_pass("--shape 2,2,2,3,5 --layout far_rows")
        expect_pass("--edges")
        # The barriers of a K/V tile, as executed, are those that the code declares.
        expect_pass("--tile")


def gradients():
    """Problems for a line with a backward pass: partial tiles, rows without a key, keys that no row sees, and no key; logits and LSE far
    from 0; a constant V, and a dO of ones; a dO whose rows are shared, or in other layouts; offsets beyond 2^31."""
    ragged = "--shape 2,4,2,33,70 --shape 1,3,1,70,33 --shape 1,4,1,65,127 --shape 1,1,1,200,270"
    tiles = "--shape 2,4,2,33,70 --shape 1,1,1,130,190"  # fewer, of one and of several tiles
    backwards = layout_backwards(run("--shape small")[1])
    expect_pass(f"{ragged} --causal br --schedule forward", has_chains=True)
    expect_pass(f"{ragged} --shape 1,1,1,1,100 --shape 2,2,2,5,0 --window 9,3,br --causal tl --schedule random:1")
    expect_pass("--shape 1,1,1,300,20 --window 5,-1 --shape 1,1,1,20,300")
    for mask in ("off", "br"):
        expect_pass(f"--shape 1,2,1,64,65 --shape 1,2,1,127,64 --shape 1,1,1,65,257 --dist negative --causal {mask}")
    expect_pass(f"{tiles} --dist large --scale 0.3 --causal tl --schedule reverse")
    expect_pass(f"{tiles} --dist constant --layout zero")
    expect_pass(f"{tiles} --dist uniform --seeds 1 --layout {backwards}")
    expect_pass(f"{tiles} --dist stairs --layout packed")
    expect_pass("--shape 1,2,1,20,40 --layout padded --dist outliers --scale 3")
    for layout in ("far", "far_heads", "far_rows"):  # also a second tile of rows, and of keys that no query sees
        expect_pass(f"--shape 2,2,2,3,5 --shape 1,1,1,140,135 --shape 1,1,1,3,140 --causal tl --layout {layout}")
    expect_pass("--last-head")


if EXPECT == "FAIL":
    negative_control()
elif SANITIZER == "thread":
    order_of_accesses()
elif "BACKWARD=1" in run("--shape small")[1]:
    gradients()
else:
    numbers()
sys.exit(failed)
