#!/usr/bin/env python3
"""The paths through the kernels, and which of the paths of a build its problems never took. gcov reports both for the object
of a line that was compiled with --coverage."""
import json
import os
import re
import subprocess
from dataclasses import dataclass

import bugs


@dataclass(frozen=True)
class Path:
    name: str
    line: str  # regular expression; all matching lines of sdpa.cu must have run. gcov does not count inlined calls
    whole: bool = False  # the line contains a condition and its statement, both of which must have run
    builds: str = ""  # regular expression for the knobs of builds that must take the path; "": all builds with the line


PATHS = [
    # ---- the softmax ----
    Path("a stale maximum, mma", r"done = rows\.compute_p_by_stale_max"),
    Path("a stale maximum that is kept", r"SDPA_UNROLL for \(int i = 0; i < ROWS; i\+\+\) l\[i\] \+= sum\[i\];"),
    Path("a stale maximum that is too small", r"if \(!__all_sync\(0xffffffffu, all <= limit\)\) return false;", whole=True),
    Path("scores recovered by their logarithm", r"P\.x\.d\[i\] = fmaf\(lg2_approx_ftz", builds="USE_BIAS=[13]|^(?!.*USE_SOFTCAP)"),
    Path("scores multiplied again", r"const int lane = int\(mov_tid_x\(\) % 32\), k = k0 \+ lane / 4",
         builds="^(?!.*(^| )DTYPE=FP8_E4M3)"),
    Path("a maximum too large to be subtracted in the exponent", r"m_log2\[i\] = 0 - p_log2<B>;",
         builds="^(?!.*FP8_E4M3)"),
    Path("a maximum too large to be subtracted in the exponent, swapped", r"S\.x\[i\]\[j\] -= row_m;"),
    Path("a softcap", r"x = B::use_softcap == 2 \|\| replaces_scores<B>\(a\) \?"),
    Path("a softcap by a polynomial", r"S\.x\[i\]\[j\] = softmax_exp2<B>\(fmaf\(s \* fmaf\(y, y, fit\.rest\)"),
    Path("a softcap without its polynomial", r"cap_scores<B>\(S, a, a\.hook_scale, first, last\);"),
    Path("a cap beyond the polynomial", r"if \(h < 1e-7 \|\| h > 1e7\) return;", whole=True),
    # ---- the bias ----
    Path("a bias by chunks", r"cp_async<16>\(tile->at\(r, chunk\), from"),
    Path("a bias by elements", r"chunks\[n\]\[i\] = exists \?"),
    Path("a bias by pairs from memory", r"add_pair\(S\.x\[i\]\[j\], S\.x\[i\]\[j \+ 1\], ld_global_nc<BiasPair>", builds="^(?!.*SWAP_AB)"),
    Path("a bias by elements from memory", r"const bool exists = uint32_t\(col \+ at\) < uint32_t\(cols\);"),
    Path("tiles without a bias in a launch with one", r"S\.x\[i\]\[j\] \*= a\.logit_scale;$", builds="USE_BIAS=[13]"),
    Path("a map of the bias", r"item\.entries = list \+ 1;"),
    Path("a map of the bias by the launch", r"return set_bias_map<B>\(a, items, a\.p\.scratch, true"),
    Path("a map by chunks", r"state \|= state_of_bias\(x\[n\]\.y\)", whole=True),
    Path("a map by elements", r"x\[n\]\.x = ld_global_nc<VectorType<sizeof\(Bias\)>>", whole=True),
    # ---- the mask of keys ----
    Path("keys that are hidden in a tile", r"word\[w\] = __ballot_sync\(0xffffffffu, visible\);"),
    # ---- items and their rounds ----
    Path("items by their length", r"const uint32_t from_end = a\.work_items - 1 - i;"),
    Path("items that move up", r"if \(skips_empty_warpgroups<B> && !B::use_lengths\) item\.q0 -="),
    Path("tiles that a warpgroup skips", r"^      mbarrier_wait\(&k_full\[ring\.stage\], ring\.parity\);", builds="SKIP_MASKED=1"),
    Path("a range without keys", r"if \(s\.item\[0\]\.rounds == 0\) rows\.set_empty\(\);", whole=True),
    Path("a page", r"return min\(max\(ld_global<int>\(a\.p\.page_table"),
    Path("rows of V behind the last key", r"^ +clear_rows_of_v<B>\(", builds="^(?!.*USE_PAGES=2)"),
    Path("queries of another sequence", r"return query_of<B>\(a, item\.q0, first_row \+ row\) >= item\.query_count\(a\.p\);",
         builds="^(?!.*PACK_GQA)"),
    Path("rows of a sequence that ends in a tile", r"if \(q < item\.query_count\(a\.p\) && col < a\.p\.Dv\) st_global_v4"),
    # ---- sums and their merge ----
    Path("e4m3 sums that are flushed, and flushed again", r"if \(!first\) add_weighted\(sum, ld_shared<float4>\(sum_s\), 1\);", whole=True),
    Path("e4m3 sums that are rescaled", r"st_shared\(sum_s, float4\{x\.x \* alpha\[0\]"),
    Path("an e4m3 maximum that is raised", r"rows\.m\[i\] \+= float\(exponent\)"),
    Path("rows that see no key", r"^      SDPA_UNROLL for \(int j = 0; j < O\.COLS; j\+\+\) O\.x\[i\]\[j\] = 0;"),
    Path("ranges that are merged", r"add_weighted\(O\.x\[0\] \+ 4 \* c, x\[n\]\[c\], weight\[1 \+ n\]\)"),
    Path("ranges that the last CTA merges", r"const RangePartial<B>\* const first = partials \+ item\.first_partial_index\(a\);"),
    Path("an item in one range", r"^      store_output<B>\(O, m, l, a, row_item<B>\(a, item, row\)\);$"),
    Path("splits that are merged", r"d = l == 0 \? 0 : fmaf\(others\[i\], weight\[1\] \* total\.factor"),
    Path("a group's heads in one tile", r"const Item<B> from = row_item<B>\(a, t\.item, row\);"),
]


def lines_of(folder, name):
    """{line number: (count, True if a part never ran)} of the source lines in an object."""
    gcov = subprocess.run([bugs.CXX, "-print-prog-name=gcov"], capture_output=True, text=True, check=True).stdout.strip()
    done = subprocess.run([gcov, "--json-format", "--stdout", name + ".gcda"], cwd=folder, capture_output=True, text=True, check=True)
    lines = {}
    for file in json.loads(done.stdout)["files"]:
        for line in file["lines"] if os.path.basename(file["file"]) == "sdpa.cu" else ():
            count, part = lines.get(line["line_number"], (0, False))
            lines[line["line_number"]] = count + line["count"], part or line["unexecuted_block"]
    return lines


def places(source):
    """Yields (path, line number, sentence) for each source line of a path."""
    lines = source.split("\n")
    return [(path, number, f"{path.name} (sdpa.cu:{number})")
            for path in PATHS for number, text in enumerate(lines, 1) if re.search(path.line, text)]


def without_line(source):
    """Sentences about paths without a source line."""
    found = {path for path, _, _ in places(source)}
    return [f"{path.name}: no line of sdpa.cu is like {path.line}" for path in PATHS if path not in found]


def missing(source, of_builds):
    """Sentences about paths without a source line, and about paths that no build has."""
    return without_line(source) + [f"no build has this path: {sentence}" for _, _, sentence in places(source)
                                   if sentence not in of_builds]


def taken(folder, name, knobs, source):
    """{path: True if a problem took it} of the paths in an object. A path is a sentence with its line."""
    lines, found = lines_of(folder, name), {}
    for path, number, sentence in places(source):
        if number in lines and re.search(path.builds, knobs):
            count, part = lines[number]
            found[sentence] = count > 0 and not (path.whole and part)
    return found
