"""The four ladders of docs/LADDER.md: their rungs, the code changes between rungs, and tables of the measured times.

Apart from steps.py, which measures the rungs, since `results` runs without the packages of the timing engine."""
import difflib
import functools
import re
from collections import namedtuple

import builds
from report_rows import FULL, PEERS, problem, short, timed

# A build, and the rung with whose time and code it is compared. wide: the build for D=128, if it is not the line with
# HEAD_DIM=128; "-" if there is none. shows: a regular expression that selects the changed lines to show, with context; ""
# if the knobs add no code, "-" to show no diff.
Rung = namedtuple("Rung", "name line base wide shows")
Ladder = namedtuple("Ladder", "problems rungs")  # problems: {title: problem as in report_rows.problem()}
SQUARE = {"mission": "1,8,8,512,512,64 fp16", "long": "1,8,8,2048,2048,64 fp16",
          "4,16,16,4096,4096": "4,16,16,4096,4096,128 fp16"}
DECODE = {"32 caches of 8,192": "32,32,8,1,8192,128 fp16", "one of 32,768": "1,32,8,1,32768,128 fp16",
          "4 rows, 8 of 8,192": "8,32,8,4,8192,128 fp16"}
LONG, AROUND = 8, 5  # passages longer than LONG are split; AROUND lines of context
COMMAND = "./run_all.sh rungs"


def ladder(problems, text):
    """Parses one rung per line of text, with fields separated by |. `name: line` gives a rung another name than its line."""
    rungs = []
    for row in text.strip().splitlines():
        line, base, wide, shows = ([field.strip() for field in row.split("|", 3)] + [""] * 3)[:4]
        name, _, line = line.rpartition(": ")
        rungs.append(Rung(name or line, line, base or (rungs[-1].name if rungs else ""), wide, shows))
    return Ladder(problems, rungs)


LADDERS = {
    "scalar": ladder(SQUARE, r"""
        scalar_minimal
        scalar_vec8
        scalar_swizzle   | | | SWIZZLE_GROUP =|tile_offset\(int
        scalar_tile32x64
        scalar_async2    | | | \.copy_kv|cp_async<BYTES>|wait_group<STAGES
        wmma_async2      | | wmma_async2 HEAD_DIM=128 BLOCK_N=32 | mma_sync\(S
        wmma_ws1         | | wmma_ws1 HEAD_DIM=128 BLOCK_N=32 | mbarrier_spin\(&|mbarrier_arrive_noinc\(&s
        mma_tile64       | wmma_async2 | | multiply_columns<MmaHalves>\(S|P\[step\]\[m\]\[i\] =
        mma_lazy         | | | = __all_sync|keeps_max && unmasked|if \(!__all_sync
        mma_fast_exp     | | | fmaf\(fmaf\(fmaf
        mma_split2       | mma_lazy | | s\.partial|barrier_sync\(1
        mma_split4"""),
    "wgmma": ladder(SQUARE, r"""
        wgmma_plain      | | wgmma_d128_plain
        wgmma_ws         | | wgmma_d128_ws | mbarrier_wait\(empty|setmaxnreg_(dec|inc)<Wgmma|ads\(\);  // hazard: K
        wgmma_overlap    | | wgmma_d128_ws OVERLAP=1 | issue_qk\(S, next
        wgmma_lazy       | | wgmma_d128_lazy | if \(rows\.may_use_stale|keep_max\(softmax
        wgmma            | | wgmma_d128_tile128 | barrier_(sync|arrive)\(turn_barrier \+|atomicInc
        wgmma_split2     | wgmma_lazy | - | fmaf\(others
        wgmma_split2_64  | | - |
        wgmma_swap32     | | - | wgmma_ss<KeyValue, BLOCK_M, 0>
        hopper           | | hopper_d128 | tuned_clocks\(t, p"""),
    "decode": ladder(DECODE, r"""
        wgmma_d128_lazy
        transposed: wgmma_decode_d128 PACK_GQA=0 SPLIT_CTAS=1 | | | -
        packed: wgmma_decode_d128 SPLIT_CTAS=1 | | | one\.h \+=|while \(group
        wgmma_decode_d128 | | | a\.ranges\.remainder\(blockIdx|is_last =
        hopper_d128      | | | -"""),
    "backward": ladder(SQUARE, r"""
        backward_minimal
        backward_mma     | | backward_mma HEAD_DIM=128 BLOCK_N=32 | multiply_columns<Halves>\(T|Halves::pv\(sum
        backward_mma5    | | backward_mma5 HEAD_DIM=128 BLOCK_N=32 | ldmatrix_x4<true>\(rows\[0\]|red_global_add_v2\(row|add_dq\(a
        backward_wgmma_plain | backward_mma | | wgmma_ss\(T\.x|wgmma_pv\(sum|VProducts::begin\(dP
        backward_hopper  | | backward_hopper_d128 | barrier_sync\(backward_turn|dS_of\(ds_before|if \(!first\) add_to_dq_sums|barrier_arrive\(backward_turn \+ 1"""),
}


@functools.cache
def tree():
    """The sources of the working tree, read once for all rungs."""
    return builds.Tree()


@functools.cache
def line_of(text):
    name, *changes = text.split()
    builds.config_line(tree(), name, f"docs/LADDER.md has {name}")
    return builds.Line(tree(), name, tuple(changes))


def is_backward(one):
    """True for a ladder of the backward pass."""
    return line_of(one.rungs[0].line).is_backward


def contender(rung, what):
    """The line of a rung for a problem with its D; None if there is none."""
    D, own = int(what.split()[0].split(",")[-1]), line_of(rung.line)
    if own.D == D:
        return own
    return None if rung.wide == "-" else line_of(rung.wide or f"{rung.line} HEAD_DIM={D}")


# ---- what changes ----

@functools.cache
def code(line):
    """The lines of an extract, without the header comment."""
    import extract  # imported here, since only this function needs its packages
    text = extract.extract(line.name, "k", line.changes)
    return text[text.index("#include"):].splitlines()


def passages(old, new):
    """The removed and added lines, split into passages at empty lines, after functions, where two or more lines are
    unchanged, and between removed and added lines if either are long."""
    found = [[]]
    for kind, i, i_end, j, j_end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            parts = [(" ", old[i:i_end] if i_end == i + 1 and found[-1] else [""])]
        else:
            parts = [("-", old[i:i_end]), ("+", new[j:j_end])]
        is_long = any(len(lines) > LONG for _, lines in parts)
        for sign, lines in parts:
            for text in lines + [""] * is_long:
                if text.strip():
                    found[-1].append(sign + text)
                if not text.strip() or re.match(" {0,2}}", text):
                    found.append([])
    return [passage[:len(passage) - (passage[-1][0] == " ")] for passage in found if passage]


def step(rung, base):
    """The knobs in which a rung differs from its base."""
    before, own = {*line_of(base.line).effective_knobs()}, line_of(rung.line).effective_knobs()
    tuned = "USE_TUNED=1"  # the other knobs of a tuned line come from the table
    return tuned if tuned in own else " ".join(word for word in own if word not in before)


def excerpts(passage, pattern):
    """The lines of a passage that match, with context, as separate parts."""
    near = {at + shift for at, text in enumerate(passage) if re.search(pattern, text)
            for shift in range(-AROUND, AROUND + 1)}
    parts = [[]]
    for at, text in enumerate(passage):
        parts[-1].append(text) if at in near else parts.append([])
    return list(filter(None, parts))


def patterns(rung):
    """The alternatives that a rung shows lines of: its parts between | outside of parentheses."""
    return re.split(r"\|(?![^(]*\))", rung.shows) if rung.shows else []


def diff_section(rung, base):
    """The knobs that a rung changes, and the selected parts of its diff."""
    if not rung.shows:
        return f"`{base.name}` with `{step(rung, base)}`: no new code.\n"
    found = passages(code(line_of(base.line)), code(line_of(rung.line)))
    for pattern in patterns(rung):
        if not any(re.search(pattern, line) for passage in found for line in passage):
            raise builds.Refused(f"{rung.name}: no line of its diff to {base.name} has {pattern}")
    shown = [part for passage in found for part in excerpts(passage, rung.shows)]
    text = "\n...\n".join("\n".join(part) for part in shown)
    return f"```diff\n@@ {base.name} with {step(rung, base)} @@\n{text}\n```\n"


def diff_sections(only=""):
    """{name of the markers: section} of the rungs whose names match."""
    found = {}
    for one in LADDERS.values():
        rungs = {rung.name: rung for rung in one.rungs}
        found |= {"rung_" + rung.name: diff_section(rung, rungs[rung.base]) for rung in one.rungs
                  if rung.base and rung.shows != "-" and re.search(only, rung.name)}
    return found


# ---- what was measured ----

def measured(source, of_gradients=False):
    """{problem: {name of a line or competitor: its row}} of one pass. bf16 rows of competitors count for fp16 problems too."""
    found = {}
    for row, _ in timed(source):
        if (row.get("pass") == "backward") != of_gradients:
            continue
        what = problem(row)
        found.setdefault(what.replace("bf16", "fp16") if row["config"] in PEERS else what, {})[row["config"]] = row
    return found


def bound_by(row):
    """Returns the limit of a kernel: the busiest unit, and the main stall reason if that unit is not saturated."""
    if not row["unit"]:
        return "–"
    share = float(row["unit_share"])
    return f"{row['unit']} {share:.0f}%" + f", {row['waits_for']}" * (share < FULL)


def cells_of(title, rows, before):
    """A row of a table: times with the speed-up over the base, TFLOP/s, share of the peak, and the limit."""
    def time_of(what, row):
        gain = f" ({before[what] / row['graph_us']:.2f}x)" if what in before else ""
        return short(row["graph_us"]) + gain
    forms = (lambda row: f"{row['tflops'] or 0:.0f}",
             lambda row: f"{100 * float(row['peak_share']):.1f}%" if row["peak_share"] else "–", bound_by)
    facts = [[form(row) if row else "–" for row in rows.values()] for form in forms]
    return [title, *(time_of(what, row) if row else "–" for what, row in rows.items()),
            *(" / ".join(of_all) if {*of_all} != {"–"} else "–" for of_all in facts)]


def ladder_table(one, source):
    """The cells of a ladder's table, the names of rungs without measurements, and the panels of its picture."""
    at, us, cells, missing = measured(source, is_backward(one)), {}, [], []
    for rung in one.rungs:
        lines = {what: contender(rung, what) for what in one.problems.values()}
        rows = {what: line and at.get(what, {}).get(line.label) for what, line in lines.items()}
        missing += [rung.name] * any(line and not rows[what] for what, line in lines.items())
        us[rung.name] = {what: row["graph_us"] for what, row in rows.items() if row}
        cells.append(cells_of(rung.name, rows, us.get(rung.base, {})))
    peers = {name: {what: at.get(what, {}).get(config) for what in one.problems.values()}
             for config, name in PEERS.items()}
    for name, rows in peers.items():
        kinds = {row["dtype"] for row in rows.values() if row}
        cells += [[*cells_of(name + " (bf16)" * ("bf16" in kinds), rows, {})[:-1], ""]] if kinds else []
    return cells, missing, [(title, [us[rung.name].get(what) for rung in one.rungs],
                             {name: rows[what]["graph_us"] for name, rows in peers.items() if rows[what]})
                            for title, what in one.problems.items() if any(what in of_rung for of_rung in us.values())]


def sections(sources, table, picture, provenance):
    """({name of the markers: section}, {picture: drawing}), each from the last source that has rows for its ladder."""
    import report_charts  # imported here, since steps.py does not need matplotlib
    text, drawings = {name + "_rungs": f"None on this GPU yet: `{COMMAND}` measures it.\n" for name in LADDERS}, {}
    for name, one in LADDERS.items():
        tables = [(source, *ladder_table(one, source)) for source in sources]
        source, cells, missing, panels = next((found for found in reversed(tables) if found[-1]), (None, [], [], []))
        if not source:
            continue
        path, words = f"ladder/{name}.svg", f"µs of the {name} ladder's rungs, beside peers"
        drawings[path] = report_charts.rungs([rung.name for rung in one.rungs], panels, words)
        peers = dict.fromkeys(row["note"].partition("; ")[0] for of_problem in measured(source, is_backward(one)).values()
                              for row in of_problem.values() if row["config"] in PEERS)
        headers = ["rung", *(f"#{title}, µs" for title in one.problems), "#TFLOP/s", "#of peak", "what binds"]
        text[name + "_rungs"] = "\n".join([
            picture(path, words, 640), table(headers, cells),
            f"Without a row for each of their problems, which `{COMMAND}` measures: {', '.join(f'`{x}`' for x in missing)}.\n\n"
            * bool(missing),
            f"Competitors: {', '.join(peers)}. " * bool(peers) + provenance(source, "../")])
    return text, drawings
