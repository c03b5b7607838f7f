"""The three ladders of docs/LADDER.md: their rungs, what changes from one to the next, and what `rungs` measured."""
import difflib
import functools
import re
from collections import namedtuple

import builds
from report_rows import FULL, PEERS, problem, short, timed

# A build, and the rung that its time and its code are compared with. wide: the build for D=128 where that is not the
# line with HEAD_DIM=128; "-" if there is none. shows: a regular expression for the changed lines of the diff that are
# shown with those around them; "" where no new code comes with the knobs, "-" where there is nothing to say.
Rung = namedtuple("Rung", "name line base wide shows")
Ladder = namedtuple("Ladder", "problems rungs")  # problems: {what they are called: as report_rows.problem() has them}
SQUARE = {"mission": "1,8,8,512,512,64 fp16", "long": "1,8,8,2048,2048,64 fp16",
          "4,16,16,4096,4096": "4,16,16,4096,4096,128 fp16"}
DECODE = {"32 caches of 8,192": "32,32,8,1,8192,128 fp16", "one of 32,768": "1,32,8,1,32768,128 fp16",
          "4 rows, 8 of 8,192": "8,32,8,4,8192,128 fp16"}
LONG, AROUND = 8, 5  # lines of a passage that is parted; those beside a line that is shown
COMMAND = "./run_all.sh rungs"


def ladder(problems, text):
    """A rung a line of text, whose fields are parted by |. A name may stand before the line, as in `name: line`."""
    rungs = []
    for row in text.strip().splitlines():
        line, base, wide, shows = ([field.strip() for field in row.split("|", 3)] + [""] * 3)[:4]
        name, _, line = line.rpartition(": ")
        rungs.append(Rung(name or line, line, base or (rungs[-1].name if rungs else ""), wide, shows))
    return Ladder(problems, rungs)


LADDERS = {
    "scalar": ladder(SQUARE, r"""
        scalar_minimal
        scalar_vec8      | | | PER_ROW = |VEC_WIDTH \* sizeof
        scalar_swizzle   | | | tile_offset\(int
        scalar_tile32x64
        scalar_async2    | | | \.copy_kv|cp_async<BYTES>
        wmma_async2      | | wmma_async2 HEAD_DIM=128 BLOCK_N=32 | mma_sync\(S
        wmma_ws1         | | wmma_ws1 HEAD_DIM=128 BLOCK_N=32 | mbarrier_spin\(&|mbarrier_arrive_noinc\(&s
        mma_tile64       | wmma_async2 | | multiply_columns<MmaHalves>\(S|k = Q @|P\[step\]\[m\]\[i\] =
        mma_lazy         | | | = __all_sync|stale_max_will_do && plain|if \(!__all_sync
        mma_fast_exp     | | | fmaf\(fmaf\(fmaf
        mma_split2       | mma_lazy | | s\.partial|barrier_sync\(1
        mma_split4"""),
    "wgmma": ladder(SQUARE, r"""
        wgmma_plain      | | wgmma_d128_plain
        wgmma_ws         | | wgmma_d128_ws | mbarrier_wait\(empty|setmaxnreg_(dec|inc)<R|rds\(\);  // hazard: K
        wgmma_overlap    | | wgmma_d128_ws OVERLAP=1 | begin_qk\(S, next
        wgmma_lazy       | | wgmma_d128_lazy | if \(rows\.may_take_stale|keep_max\(softmax
        wgmma            | | wgmma_d128_tile128 | barrier_(sync|arrive)\(turn \+|return atomicInc
        wgmma_split2     | wgmma_lazy | - | fmaf\(others
        wgmma_split2_64  | | - |
        wgmma_swap32     | | - | wgmma_ss<Input, BLOCK_M, 0>
        hopper           | | hopper_d128 | tuned_clocks\(t, p"""),
    "decode": ladder(DECODE, r"""
        wgmma_d128_lazy
        transposed: wgmma_decode_d128 PACK_GQA=0 SPLIT_CTAS=1 | | | -
        packed: wgmma_decode_d128 SPLIT_CTAS=1 | | | one\.h \+=|while \(group
        wgmma_decode_d128 | | | a\.ranges\.remainder\(blockIdx|is_last_s =
        hopper_d128      | | | -"""),
}


@functools.cache
def tree():
    """The sources as they stand here; they are read once, for all rungs."""
    return builds.Tree()


@functools.cache
def line_of(text):
    name, *changes = text.split()
    builds.config_line(tree(), name, f"docs/LADDER.md has {name}")
    return builds.Line(tree(), name, tuple(changes))


def contender(rung, what):
    """The line of a rung for a problem, by its D; None if it has none."""
    D, own = int(what.split()[0].split(",")[-1]), line_of(rung.line)
    if own.D == D:
        return own
    return None if rung.wide == "-" else line_of(rung.wide or f"{rung.line} HEAD_DIM={D}")


# ---- what changes ----

@functools.cache
def code(line):
    """The lines of an extract without the words above its includes."""
    import extract  # whose packages nothing else here needs
    text = extract.extract(line.name, "k", line.changes)
    return text[text.index("#include"):].splitlines()


def passages(old, new):
    """What goes and what comes, parted at empty lines, behind functions, where two lines or more stay, and between what
    goes and what comes if either is long."""
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
    """A rung's own knobs beside those of its base."""
    before, own = {*line_of(base.line).effective_knobs()}, line_of(rung.line).effective_knobs()
    tuned = "USE_TUNED=1"  # a tuned line's other numbers are those of a row
    return tuned if tuned in own else " ".join(word for word in own if word not in before)


def excerpts(passage, pattern):
    """The parts of a passage that have the lines which match, and those around them."""
    near = {at + shift for at, text in enumerate(passage) if re.search(pattern, text)
            for shift in range(-AROUND, AROUND + 1)}
    parts = [[]]
    for at, text in enumerate(passage):
        parts[-1].append(text) if at in near else parts.append([])
    return list(filter(None, parts))


def diff_section(rung, base):
    """The knobs that a rung changes, and the parts of its diff that matter."""
    if not rung.shows:
        return f"`{base.name}` with `{step(rung, base)}`: no new code.\n"
    found = passages(code(line_of(base.line)), code(line_of(rung.line)))
    shown = [part for passage in found for part in excerpts(passage, rung.shows)]
    if not shown:
        raise builds.Refused(f"{rung.name}: no line of its diff to {base.name} has {rung.shows}")
    text = "\n...\n".join("\n".join(part) for part in shown)
    return f"```diff\n@@ {base.name} with {step(rung, base)} @@\n{text}\n```\n"


def diff_sections(only=""):
    """{the name of a rung's markers: what stands there}, of the rungs whose name matches."""
    found = {}
    for one in LADDERS.values():
        rungs = {rung.name: rung for rung in one.rungs}
        found |= {"rung_" + rung.name: diff_section(rung, rungs[rung.base]) for rung in one.rungs
                  if rung.base and rung.shows != "-" and re.search(only, rung.name)}
    return found


# ---- what was measured ----

def measured(source):
    """{problem: {a line's or peer's name in rows: its row}}. A peer that takes bf16 alone stands with the others."""
    found = {}
    for row, _ in timed(source):
        what = problem(row)
        found.setdefault(what.replace("bf16", "fp16") if row["config"] in PEERS else what, {})[row["config"]] = row
    return found


def bound_by(row):
    """What binds a row's kernel: the busiest unit, and if it is not full what the warps wait for."""
    if not row["unit"]:
        return "–"
    share = float(row["unit_share"])
    return f"{row['unit']} {share:.0f}%" + f", {row['waits_for']}" * (share < FULL)


def cells_of(title, rows, before):
    """A table's row: times, their gain over those before; TFLOP/s, share of the peak and what binds."""
    def time_of(what, row):
        gain = f" ({before[what] / row['graph_us']:.2f}x)" if what in before else ""
        return short(row["graph_us"]) + gain
    forms = (lambda row: f"{row['tflops'] or 0:.0f}",
             lambda row: f"{100 * float(row['peak_share']):.1f}%" if row["peak_share"] else "–", bound_by)
    facts = [[form(row) if row else "–" for row in rows.values()] for form in forms]
    return [title, *(time_of(what, row) if row else "–" for what, row in rows.items()),
            *(" / ".join(of_all) if {*of_all} != {"–"} else "–" for of_all in facts)]


def ladder_table(one, source):
    """The cells of a ladder's table, the names of rungs that lack a row, and the panels of its picture."""
    at, us, cells, missing = measured(source), {}, [], []
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


def sections(source, table, picture, provenance):
    """{the name of a ladder's markers: what stands there}, {picture: drawing}."""
    import report_charts  # and matplotlib, without which `rungs` does
    text, drawings = {name + "_rungs": f"None on this GPU yet: `{COMMAND}` measures it.\n" for name in LADDERS}, {}
    for name, one in LADDERS.items() if source else ():
        cells, missing, panels = ladder_table(one, source)
        if not panels:
            continue
        path, words = f"ladder/{name}.svg", f"µs of the {name} ladder's rungs, beside peers"
        drawings[path] = report_charts.rungs([rung.name for rung in one.rungs], panels, words)
        peers = dict.fromkeys(row["note"].partition("; ")[0] for row, _ in timed(source) if row["config"] in PEERS)
        headers = ["rung", *(f"#{title}, µs" for title in one.problems), "#TFLOP/s", "#of peak", "what binds"]
        text[name + "_rungs"] = "\n".join([
            picture(path, words, 640), table(headers, cells),
            f"Without a row for each of their problems, which `{COMMAND}` measures: {', '.join(f'`{x}`' for x in missing)}.\n\n"
            * bool(missing),
            f"Competitors: {', '.join(peers)}. " * bool(peers) + provenance(source, "../")])
    return text, drawings
