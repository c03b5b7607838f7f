"""usage: python -m sdpa build WORD ... [--jobs N]    or in a clone: python3 bindings build ...
       python -m sdpa path

build compiles all combinations of these words into $SDPA_CACHE (or ~/.cache/sdpa), without a GPU, N in parallel (default:
one per core):
  sm_80 sm_90a ...     GPUs
  fp16 bf16 e4m3       types
  64 128 192x128 ...   D, or D of Q and K and D of V
  plain softcap sinks lengths pages any_pages bias mask fp32_bias key_bias key_mask fp32_key_bias bf16_out kv8, or several as in
                       sinks+lengths: options of attention() (default: plain). pages: page sizes that are multiples of 16;
                       any_pages: other page sizes, or k_firsts; bias: of q's type; fp32_bias: of another type; mask: a bias
                       of bools; key_bias, key_mask, fp32_key_bias: the same, if all heads and queries share it; bf16_out:
                       bf16 O of e4m3; kv8: e4m3 k and v with a 16-bit q
  backward             also sdpa's backward kernels for these builds, except for those with masks or biases of keys, e4m3 or
                       expressions, and for problems with at most 64 queries and keys
  score_mod=TEXT mask_mod=TEXT    these arguments of attention(), for all builds
It also builds the interface to PyTorch and the kernel that appends to caches. A program that finds all of its builds in the
cache does not need nvcc.

path prints the folder for PYTHONPATH, with which `import flash_attn_interface` finds sdpa's module, and transformers finds a
FlashAttention-3."""
import difflib
import itertools
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytorch as sdpa

TYPES = {"fp16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn"}
# The names of sdpa.FEATURES.
OPTIONS = ["softcap", "sinks", "lengths", "pages", "bias", "mask", "bf16_out", "kv8", "fp32_bias", "any_pages", "key_mask", "key_bias",
           "fp32_key_bias"]
BIASES = {"bias", "mask", "fp32_bias", "key_bias", "fp32_key_bias"}


def check_gpus(gpus):
    """Refuses GPUs for which nvcc does not compile. Without nvcc, all builds may be in the cache."""
    try:
        compiler = sdpa.nvcc()
    except sdpa.Unavailable:
        return
    codes = re.findall(r"sm_(\d+)", subprocess.run([compiler, "--list-gpu-code"], capture_output=True, text=True).stdout)
    for major, minor in gpus:
        if codes and f"{major}{minor}" not in codes:
            newer = ", ".join(f"sm_{code}" for code in codes if int(code) >= 80)
            raise SystemExit(f"sdpa: {compiler} does not compile for sm_{major}{minor}, only for {newer}")


def builds_of(words):
    """Yields the arguments of built() for all combinations of the words. Skips and reports combinations without a line."""
    kinds = {"a GPU, as in sm_90a": [], "a type, as in bf16": [], "a D, as in 128": [], "options": []}
    gpus, types, sizes, options = kinds.values()
    expressions, with_backward = {}, False
    for word in words:
        name, equals, text = word.partition("=")
        if equals and name in expressions:
            raise SystemExit(f"sdpa: {name} is given twice; all builds have the same expressions")
        elif equals and name in sdpa.NUMBERS_AND_ARRAYS:
            try:
                expressions[name] = sdpa.parsed(name, text)[0]
            except ValueError as why:
                raise SystemExit(str(why)) from None
        elif gpu := re.fullmatch(r"sm_(\d+)(\d)a?", word):
            gpus.append((int(gpu[1]), int(gpu[2])))
        elif word == "backward":
            with_backward = True
        elif word in TYPES:
            types.append(getattr(sdpa.torch, TYPES[word]))
        elif size := re.fullmatch(r"(\d+)(?:x(\d+))?", word):
            sizes.append((int(size[1]), int(size[2] or size[1])))
        elif word == "plain" or set(word.split("+")) <= set(OPTIONS):
            has = word.split("+") + ["lengths"] * ("pages" in word)
            options.append(sum((name in has) << i for i, name in enumerate(OPTIONS)))
        else:
            known = [*TYPES, "plain", *OPTIONS, "backward", "--jobs", *sdpa.NUMBERS_AND_ARRAYS]
            near = difflib.get_close_matches(name, known, 1, 0.7)
            hint = f"did you mean {near[0]}?" if near else "python -m sdpa --help lists them"
            raise SystemExit(f"sdpa: {word} is no GPU, type, D or option; {hint}")
    options[:] = options or [0]
    for kind, found in kinds.items():
        if not found:
            raise SystemExit(f"sdpa: build needs {kind}; python -m sdpa --help has the words")
    check_gpus(gpus)
    builds = [sdpa.build_of_appender(gpu) for gpu in gpus]
    for gpu, dtype, (D, Dv), features in itertools.product(*kinds.values()):
        try:
            named = {name for i, name in enumerate(OPTIONS) if features >> i & 1}
            if len(named & {*BIASES, "key_mask"}) > 1:
                raise sdpa.Unavailable("a build has only one bias or mask")
            if named >= {"pages", "any_pages"}:
                raise sdpa.Unavailable("pages and any_pages exclude each other")
            if named & BIASES and ("kv8" in named or dtype == sdpa.torch.float8_e4m3fn):
                raise sdpa.Unavailable("a bias needs 16-bit k and v")
            if expressions and named & ({"softcap"} | BIASES):
                raise sdpa.Unavailable("softcap and bias cannot be combined with score_mod or mask_mod; write them into the expression")
            builds.append(sdpa.build_of(*sdpa.line_with(gpu, dtype, D, Dv, features, **expressions)))
            if with_backward and not expressions and named <= {"softcap", "sinks", "lengths", "bias", "mask", "fp32_bias"} and dtype != sdpa.torch.float8_e4m3fn:
                for asked in sdpa.NEEDED, sdpa.NEEDED | sdpa.DETERMINISTIC:
                    builds.append(sdpa.build_of(*sdpa.backward_line_with(gpu, dtype, max(D, Dv), features, asked)[0]))
        except sdpa.Unavailable as why:
            print(f"sdpa: left out: {why}", file=sys.stderr)
    if len(builds) == len(gpus):
        raise SystemExit("sdpa: no build of these words is left")
    return builds


def build(words):
    jobs = os.cpu_count()
    if "--jobs" in words:
        at = words.index("--jobs")
        value = "".join(words[at + 1:at + 2])
        if not re.fullmatch("[1-9][0-9]*", value):
            raise SystemExit(f"sdpa: --jobs {value}".rstrip() + ": want a whole number from 1")
        jobs = int(value)
        del words[at:at + 2]
    builds = dict.fromkeys([sdpa.build_of_glue(), *builds_of(words)])
    failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        for done, future in enumerate(as_completed([pool.submit(sdpa.built, *one) for one in builds]), 1):
            try:
                print(f"{done} of {len(builds)}: {future.result()}", flush=True)
            except sdpa.Unavailable as why:
                failed += 1
                print(f"{done} of {len(builds)}: {why}", file=sys.stderr)
    return failed > 0


def main(words):
    if words == ["path"]:
        here = os.path.dirname(os.path.abspath(__file__))
        # Of a wheel, only flash_attn_interface may be on the path: torchvision imports any `pytorch` that it finds.
        folders = [here] if sdpa.__name__ == "pytorch" else []
        print(os.pathsep.join([*folders, os.path.join(here, "flash_attn_3")]))
    elif words[:1] == ["build"] and words[1:] not in (["--help"], ["-h"]):
        return build(words[1:])
    elif words[-1:] in (["--help"], ["-h"]):
        print(__doc__)
    else:
        near = difflib.get_close_matches("".join(words[:1]), ["build", "path", "--help"], 1, 0.6)
        hint = f"did you mean {near[0]}?" if near and near != words[:1] else "python -m sdpa --help has the commands"
        print(f"sdpa: {' '.join(words) or 'a command is missing'}: {hint}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
        print(end="", flush=True)
    except OSError as error:
        print(f"sdpa: stdout cannot be written to ({error.strerror})", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout again at exit
        code = 3
    sys.exit(code)
