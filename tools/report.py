#!/usr/bin/env python3
"""Writes results/report.html: one file that loads nothing, drawn from the CSVs of results/ alone.

usage: tools/report.py [--results FOLDER] [--output FILE]

Shown is the newest CSV of each kind by its name, results/[KIND/]DATE-DEVICE[-WHAT][-N].csv, of the device of
the newest results/DATE-DEVICE[-N].csv. What a ladder's line is compared with is named by configs.txt beside
the folder, if it is there. Needs matplotlib. Exit code 2 and one sentence if something is missing.
"""
import argparse
import collections
import html
import math
import os
import re
import statistics
import string
import sys
import tempfile
from pathlib import Path

from report_rows import (KINDS, PEERS, Refusal, bases, controls, difference, every_file, fastest, newest, number,
                         paired_ratio, peer, problem, taken_away, throttled, timed)

try:
    from report_charts import groups, intervals, roofline, samples, steps
except ImportError as missing:
    print(f"report.py: {missing.name} is missing; install it with: sudo apt-get install python3-matplotlib "
          "(or: python3 -m pip install matplotlib)", file=sys.stderr)
    sys.exit(2)

ROOT = Path(__file__).resolve().parent.parent
# Limits of a GPU: dense tensor-core TFLOP/s by type and memory rate in TB/s, with their source.
LIMITS = {
    "NVIDIA H200": ({"fp16, bf16": 989.5, "e4m3": 1979.0}, 4.8,
                    "NVIDIA H200 Tensor Core GPU datasheet (SXM): 1,979 TFLOPS fp16 and 3,958 TFLOPS fp8 with sparsity, "
                    "so half of each for dense matrices, and 4.8 TB/s"),
    "NVIDIA H100 80GB HBM3": ({"fp16, bf16": 989.5, "e4m3": 1979.0}, 3.35,
                              "NVIDIA H100 Tensor Core GPU datasheet (SXM): 1,979 TFLOPS fp16 and 3,958 TFLOPS fp8 "
                              "with sparsity, so half of each for dense matrices, and 3.35 TB/s"),
}


# ---- parts of the page ----

def digits(x, n=4):
    """A positive number with N significant digits, of which at most N - 1 after the point."""
    return f"{x:.{min(n - 1, max(0, n - 1 - math.floor(math.log10(x))))}f}" if x else "0"


def span(source, row):
    """The 95% interval of a row's time, or nothing in files older than it."""
    low, high = (number(source, row, column) for column in ("graph_lo_us", "graph_hi_us"))
    return f"{digits(low)}–{digits(high)}" if low and high else ""


def rate(source, row):
    """A row's TFLOP/s with three digits."""
    value = number(source, row, "tflops")
    return None if value is None else digits(value, 3)


def cell(value):
    """A table's text for a value: numbers with four digits, nothing for None."""
    return "" if value is None else html.escape(digits(value) if isinstance(value, float) else str(value))


def table(headers, rows, attributes="", first=lambda row: False, wide=()):
    """A table in a box of its own scrolling. A header that begins with # is of numbers; WIDE columns wrap."""
    kinds = ["n" if h[0] == "#" else "wide" if h in wide else "" for h in headers]
    marks = [f' class="{kind}"' if kind else "" for kind in kinds]
    head = "".join(f'<th scope="col"{m}>{html.escape(h.lstrip("#"))}</th>' for h, m in zip(headers, marks))
    body = "\n".join(
        f"<tr{' class=first' if first(row) else ''}>" + "".join(f"<td{m}>{cell(v)}</td>" for v, m in zip(row, marks))
        + "</tr>" for row in rows)
    return (f'<div class="box" tabindex="0"><table {attributes}>\n<thead><tr>{head}</tr></thead>\n'
            f"<tbody>\n{body}\n</tbody></table></div>")


def measured(source):
    """What a file's rows were measured on, as a sentence's part."""
    gpu, driver, cuda, commit, date = (html.escape(word) or "not recorded" for word in source.measured_on())
    return f"{gpu}, driver {driver}, CUDA {cuda}, commit {commit}, <time>{date}</time>"


def provenance(*sources, tag="p"):
    """Which file each figure is from, the command that makes such rows, and what it was measured on."""
    files = collections.defaultdict(list)
    for source in sources:
        files[measured(source)].append(
            f"<code>{html.escape(source.name)}</code> (<code>{html.escape(KINDS[source.kind][2])}</code>)")
    words = [" and ".join(names) + ": " + on for on, names in files.items()]
    return f'<{tag} class="from">From ' + ".<br>".join(words) + f".</{tag}>"


def figure(title, drawing, *sources, note=""):
    """A chart with its title, a sentence if it needs one, and its provenance."""
    note = f"<p>{html.escape(note)}</p>" if note else ""
    return (f"<figure><b>{html.escape(title)}</b>{drawing}<figcaption>{note}{provenance(*sources, tag='div')}"
            "</figcaption></figure>")


def charts(figures):
    """Charts side by side, as many as fit."""
    return '<div class="charts">\n' + "\n".join(figures) + "\n</div>"


def fold(summary, body):
    """A part that opens on request."""
    return f"<details><summary>{html.escape(summary)}</summary>\n{body}\n</details>"


def alt(text):
    """Text for an attribute."""
    return html.escape(text, quote=True)


# ---- sections: each returns its HTML, or "" where results/ has nothing for it ----

def ranked_section(sources):
    """Every timed row, ranked inside its problem and file, with filters."""
    rows = []
    for source in sources:
        at = collections.defaultdict(list)
        for row, us in timed(source):
            at[problem(row)].append((us, row))
        for entries in at.values():
            entries.sort(key=lambda entry: entry[0])
            for rank, (us, row) in enumerate(entries, 1):
                rows.append((rank, PEERS.get(row["config"], row["config"]), us, span(source, row), rate(source, row),
                             f"{us / entries[0][0]:.2f}", sizes(row), row["D"], row["dtype"], row["causal"],
                             "peer" if peer(row) else row["family"], row["check"] or "–", source.kind))
    headers = ["#rank", "line", "#µs", "#95% interval, µs", "#TFLOP/s", "#× best", "B,Hq,Hkv,Sq,Sk", "#D", "type",
               "causal", "family", "check", "run"]
    selects = []
    for title, column in (("shape", 6), ("D", 7), ("type", 8), ("causal", 9), ("family", 10), ("run", 12)):
        values = dict.fromkeys(row[column] for row in rows)
        options = "".join(f"<option>{html.escape(v)}</option>" for v in (sorted(values, key=int) if column == 7 else values))
        selects.append(f'<label>{title}<select data-column="{column}"><option value="">all</option>{options}</select></label>')
    return f"""<p>Ranked inside each problem and run; <em>× best</em> is the time as a multiple of the fastest.
<em>µs</em> is <code>graph_us</code>, one launch's share of a replayed CUDA graph. The run <em>lines</em> has every
line of configs.txt; <em>peers</em> has some lines and the peers in turns, in one process.</p>
<form class="filters" id="filters">{"".join(selects)}
<label>line contains<input type="search" data-column="1" size="14"></label>
<label>&nbsp;<input type="reset" value="show all"></label></form>
<p><output id="shown">{len(rows)} rows</output></p>
""" + table(headers, rows, 'id="lines" class="grouped"', lambda row: row[0] == 1) + provenance(*sources)


def sizes(row):
    """B,Hq,Hkv,Sq,Sk with the shape's name, if it has one."""
    words = ",".join(row[c] for c in ("B", "Hq", "Hkv", "Sq", "Sk"))
    return f"{words} {row['shape']}" if row["shape"].isalnum() and row["shape"][0].isalpha() else words


def peers_section(sources):
    """The fastest line of each problem beside every peer."""
    main, peers = sources[-1], sources[0]
    best = {p: at for p, at in fastest(sources).items() if "line" in at and len(at) > 2}
    if not best:
        return ""
    names = list(dict.fromkeys(n for at in best.values() for n in at if n not in ("shape", "line")))
    rows, bars = [], []
    for what, at in best.items():
        us, row, source = at["line"]
        ours = number(source, row, "tflops")
        group = [("fastest line", ours, digits(ours, 3))]
        cells = [what, row["config"], us, rate(source, row)]
        for name in names:
            if name in at:
                theirs = number(at[name][2], at[name][1], "tflops")
                group.append((name, theirs, f"{digits(theirs, 3)} ({at[name][0] / us:.2f}x)"))
            cells += [at[name][0], f"{at[name][0] / us:.2f}"] if name in at else [None, None]
        rows.append(cells)
        bars.append((row["D"], f"{what}: {row['config']}", group))
    headers = ["problem (B,Hq,Hkv,Sq,Sk,D)", "fastest line", "#µs", "#TFLOP/s"]
    headers += [text for name in names for text in (f"#{name}, µs", "#its time / ours")]
    drawings = []
    for D in dict.fromkeys(bar[0] for bar in bars):
        part = [bar[1:] for bar in bars if bar[0] == D]
        drawing = groups(part, ["fastest line"] + names, f"TFLOP/s of the fastest line and of peers at D={D}", "TFLOP/s")
        drawings.append(figure(f"D = {D}, TFLOP/s", drawing, peers, main))
    return ("<p>The fastest of our lines on each problem, and each peer through PyTorch on the same tensors, timed alike. "
            "Behind a peer's bar: its time as a multiple of ours.</p>\n" + charts(drawings)
            + table(headers, rows) + provenance(peers, main))


def ladder_section(source, configs):
    """Time of each line, as a step from the line that it builds on, at mission and long."""
    base, row_of = bases(source, configs), {}
    us = {"mission": {}, "long": {}}
    families = collections.defaultdict(dict)
    for row, t in timed(source):
        if row["shape"] in us:
            us[row["shape"]][row["config"]] = t
            row_of[row["config"]] = row
            wgmma = row["family"] == "wgmma"
            families[row["family"] + (", D = 64" if row["D"] == "64" else ", D > 64") * wgmma][row["config"]] = row
    parts = []
    for family, names in families.items():
        if len(names) < 2:
            continue
        cells, rows = [], []
        for shape, at in us.items():
            rungs = [(name, at.get(base[name]), at[name]) for name in names if name in at]
            if rungs:
                drawing = steps(rungs, f"Steps of the {alt(family)} lines at {shape}")
                example = next(row for row in source.rows if row["shape"] == shape and row["B"])
                cells.append(figure(f"{family} at {sizes(example)}", drawing, source))
        for name in names:
            row = [name, base[name] or "", " ".join(difference(row_of[base[name]], row_of[name]) if base[name] else [])]
            for at in us.values():
                known = name in at and base[name] in at
                row += [at.get(name), f"{at[base[name]] / at[name]:.2f}" if known else None]
            rows.append(row)
        headers = ["line", "its base", "what it changes"] + [t for s in us for t in (f"#{s}, µs", "#base / line")]
        cells.append("<div>" + table(headers, rows) + provenance(source) + "</div>")
        parts.append(f"<h3>{html.escape(family)}</h3>\n" + charts(cells))
    return ("<p>In the order of <code>configs.txt</code>. A bar runs from the time of a line's base (upright stroke) to "
            "its own time (dot): plain where the line is faster, hatched where it is slower; the factor is base over "
            "line. The base is the line that configs.txt names; else the earlier line of the family and head size that "
            "differs in the fewest knobs.</p>\n" + "\n".join(parts))


def ablation_section(sources):
    """What each knob of a line is worth: its time without, as a multiple of its time."""
    drawings = []
    for source in sources:
        full = source.rows[0]["config"]
        at = collections.defaultdict(dict)
        for row, us in timed(source):
            at[row["config"]][row["shape"]] = us
        refused = [r["config"] for r in source.rows if r["config"] not in at]
        shapes = list(at[full])
        cost = {c: {s: t[s] / at[full][s] for s in shapes if s in t} for c, t in at.items() if c != full}
        order = sorted(cost, key=lambda c: -max(cost[c].values(), default=0))
        bars = [(taken_away(c, full), [(s, r, f"{100 * (r - 1):+.0f}% ({digits(at[c][s], 3)} µs)")
                                       for s, r in cost[c].items()]) for c in order]
        if bars:
            whole = ", ".join(f"{digits(t, 3)} µs at {s}" for s, t in at[full].items())
            note = f"{full} takes {whole}." + (f" Not legal alone: {', '.join(taken_away(c, full) for c in refused)}."
                                               if refused else "")
            drawing = groups(bars, shapes, f"Ablation of {alt(full)}", f"time as a multiple of {full}, log axis", 1, True)
            drawings.append(figure(f"{full}, one change taken back each", drawing, source, note=note))
    return ("<p>A line with all of its knobs, then with each taken back (with what cannot stay without it). Bars to the "
            "right: what the knob gains; to the left: it does not pay here.</p>\n" + charts(drawings))


def roofline_section(sources):
    """TFLOP/s against FLOP per byte, under the limits of the GPU."""
    main, gpu = sources[-1], (sources[-1].values("device") or [""])[0]
    at = {}
    for source in sources:
        for row, us in timed(source):
            tflops, who = number(source, row, "tflops"), "peer" if peer(row) else row["family"]
            if row["shape"] != "small" and tflops and tflops > at.get((problem(row), who), (0,))[0]:
                at[problem(row), who] = tflops, us, row
    points, rows = [], []
    limits, bandwidth, origin = LIMITS.get(gpu, ({}, 0.0, ""))
    types = {row["dtype"] for _, _, row in at.values()}
    limits = {name: limit for name, limit in limits.items() if types & set(name.split(", "))}
    for (what, who), (tflops, us, row) in at.items():
        B, Hq, Hkv, Sq, Sk, D = (float(row[c]) for c in ("B", "Hq", "Hkv", "Sq", "Sk", "D"))
        size = 1 if row["dtype"] in ("e4m3", "u8") else 2
        moved = B * D * (Hq * Sq * (size + 2) + 2 * Hkv * Sk * size)
        intensity = tflops * us * 1e6 / moved
        points.append((who, intensity, tflops))
        limit = next((v for name, v in limits.items() if row["dtype"] in name.split(", ")), None)
        roof = min(limit, intensity * bandwidth) if limit else None
        rows.append((what, who, PEERS.get(row["config"], row["config"]), digits(intensity), digits(tflops, 3),
                     f"{100 * tflops / roof:.0f}" if roof else None))
    text = (f"Limits: {origin}. The tensor limit is at the boost clock; a launch that runs into the power limit has a lower "
            "clock. " if limits else f"The limits of {gpu} are not known to this page, so none are drawn. ")
    headers = ["problem (B,Hq,Hkv,Sq,Sk,D)", "family", "fastest", "#FLOP/byte", "#TFLOP/s", "#% of the roof"]
    drawing = roofline(points, limits, bandwidth, f"Roofline on {alt(gpu)}")
    return (f"<p>A point is the fastest line of a family on one problem, or the fastest peer. {html.escape(text)}"
            "FLOP are 4·D·(visible query-key pairs)·B·Hq; bytes are Q, K, V and O once, so that what caches save or "
            "repeated reads cost is left out. The problem <em>small</em> is left out: its time is the launch.</p>\n"
            + charts([figure("Fastest of each family on each problem", drawing, *sources),
                      f'<div class="rest">{table(headers, rows)}{provenance(*sources)}</div>']))


def comparison(source, rows, title):
    """The chart of one comparison on one problem, from its samples."""
    clean = [row for row in rows if not throttled(row["throttle"])]
    for kept in (clean, rows):
        turns = collections.defaultdict(lambda: collections.defaultdict(list))
        for row in kept:
            turns[row["contender"]][row["turn"]].append(number(source, row, "us"))
        names = list(dict.fromkeys(row["contender"] for row in rows if row["contender"] in turns))
        ratios = {}
        for name in names[1:]:
            both = [turn for turn in turns[names[0]] if turn in turns[name]]
            ratios[name] = [statistics.median(turns[name][t]) / statistics.median(turns[names[0]][t]) for t in both]
        if len(names) > 1 and all(len(r) >= 6 for r in ratios.values()):
            break
    ratios = {name: r for name, r in ratios.items() if r}
    left_out = len(rows) - len(kept)
    note = (f"{left_out} throttled samples are left out." if left_out else
            f"{len(rows) - len(clean)} samples were throttled and count here, since without them there are fewer than 6 turns."
            if len(clean) < len(rows) else "")
    contenders = {name: [us for turn in turns[name].values() for us in turn] for name in names}
    drawing = samples(contenders, ratios, {n: paired_ratio(r) for n, r in ratios.items()}, alt(title))
    return figure(title, drawing, source, note=note)


def ab_section(found):
    """The distributions behind the verdicts, or the verdicts with their intervals where no samples were kept."""
    parts = []
    for source in found.get("samples", []):
        cases = collections.defaultdict(list)
        for row in source.rows:
            cases[row["comparison"], row["problem"]].append(row)
        drawings = [comparison(source, rows, " at ".join(case)) for case, rows in cases.items()]
        parts.append("<h3>Samples</h3>\n<p>Each contender's times, and the paired ratio: a turn's median over that of the first "
                     "contender in the same turn; the diamond is Hodges and Lehmann's estimate with the 95% interval of "
                     "Wilcoxon's signed-rank test. Grey: within 0.5%.</p>\n" + charts(drawings))
    for source in found.get("verdicts", []):
        cases = collections.defaultdict(list)
        for row in source.rows:
            title = f"{row['config']}, {row['shape']}" + (f" vs {row['b_shape']}" if row["b_shape"] else "")
            cases[title].append(tuple(number(source, row, c) for c in ("ratio", "low", "high")) + (row["verdict"],))
        drawing = intervals(list(cases.items()), "Ratios of trial comparisons with their intervals", "ratio B/A, 95% interval")
        parts.append("<h3>Can a verdict be trusted?</h3>\n<p>Lines against themselves, and against 1% more keys: an interval "
                     "per comparison. Grey: within 0.5%, which counts as the same.</p>\n"
                     + charts([figure("Trial comparisons", drawing, source)]))
    for source in found.get("variants", []):
        parts.append(variants(source))
    return "\n".join(parts)


def variants(source):
    """A table of measured variants; each beside the line as committed in the same run, where that was timed."""
    def case(row):
        return tuple(row[c] for c in ("run", "config", "shape", "D", "causal"))
    committed = {case(row): number(source, row, "graph_us") for row in source.rows if row["source"] == "as committed"}
    rows = []
    for row in source.rows:
        us = number(source, row, "graph_us")
        ratio = f"{us / committed[case(row)]:.3f}" if row["source"] != "as committed" and case(row) in committed else None
        rows.append((row["run"], row["config"], row["source"], row["shape"], row["D"], row["causal"], us, span(source, row),
                     ratio))
    headers = ["#run", "line", "source", "shape", "#D", "causal", "#µs", "#95% interval, µs", "#µs / committed"]
    return fold(f"{source.path.stem}: {len(rows)} variants of lines, medians with intervals",
                table(headers, rows, wide=["source"]) + provenance(source))


def checks_section(found):
    """Random problems and stress runs, counted."""
    parts = []
    for source in found.get("sweep", []):
        columns = ["problems", "passed", "wrong", "errors", "skipped"]
        rows = [(row["config"], *(int(number(source, row, c) or 0) for c in columns)) for row in source.rows]
        total = [sum(row[i] for row in rows) for i in range(1, 6)]
        words = f"{len(rows)} lines on random problems: {total[0]} problems, {total[1]} passed, {total[2]} wrong, {total[3]} errors"
        parts.append(fold(words, table(["line"] + ["#" + c for c in columns], rows) + provenance(source)))
    for source in found.get("stress", []):
        rows = [(r["config"], r["case"], r["problem"], r["repeats"], r["check"]) for r in source.rows]
        good = sum(row[4] == "PASS" for row in rows)
        parts.append(fold(f"The same bits whatever runs beside it: {good} of {len(rows)} cases pass",
                          table(["line", "case", "problem", "#repeats", "check"], rows) + provenance(source)))
    return "\n".join(parts)


def rested_section(sources):
    """The first milliseconds after a rest, before a limit of power is reached."""
    parts = []
    for source in sources:
        best = fastest([source])
        names = list(dict.fromkeys(n for at in best.values() for n in at if n not in ("shape", "line")))
        rows = [(what, at["line"][1]["config"], rate(source, at["line"][1]),
                 *(rate(source, at[n][1]) if n in at else None for n in names))
                for what, at in best.items() if "line" in at]
        headers = ["problem (B,Hq,Hkv,Sq,Sk,D)", "fastest line", "#TFLOP/s", *(f"#{n}, TFLOP/s" for n in names)]
        parts.append(table(headers, rows) + provenance(source))
    return ("<p>The first 10 ms after 0.3 s of rest, as an application finds the GPU that does other things in between; "
            "the tables above have what lasts.</p>\n" + "\n".join(parts))


def files_section(results, found):
    """Every CSV of results/, and whether this page shows it."""
    shown = {source.path: source.kind for sources in found.values() for source in sources}
    rows = [(str(source.path.relative_to(results.parent)), shown.get(source.path, source.kind), len(source.rows),
             *source.measured_on(), "shown" if source.path in shown else "") for source in every_file(results)]
    headers = ["file", "kind", "#rows", "GPU", "driver", "CUDA", "commit", "date", "here"]
    return (f"<p>Shown are the newest of each kind by their names: {len(shown)} of {len(rows)} files.</p>\n"
            + table(headers, rows, first=lambda row: row[-1] == "shown"))


def facts(sources):
    """The figures to take away, as a list of terms."""
    main, best = sources[-1], fastest(sources)
    lines = {row["config"] for row in main.rows}
    failed = {row["config"] for row in main.rows if row["check"] != "PASS"} - controls(main)
    items = [("lines that pass their checks", f"{len(lines) - len(failed) - len(controls(main))} of {len(lines)}"
              + f" <small>and {len(controls(main))} that must fail</small>")]
    for what, at in best.items():
        if at["shape"] in ("mission", "long") and "line" in at and what.endswith(",64 fp16"):
            us, row, _ = at["line"]
            items.append((f"fastest at {at['shape']}, D = 64", f"{digits(us, 3)} µs <small>{html.escape(row['config'])}</small>"))
    ratios = [min(v[0] for n, v in at.items() if n not in ("shape", "line")) / at["line"][0]
              for at in best.values() if "line" in at and len(at) > 2]
    if ratios:
        items.append((f"times as fast as the best peer, {len(ratios)} problems",
                      f"{statistics.geometric_mean(ratios):.2f}x <small>geometric mean, {min(ratios):.2f} to {max(ratios):.2f}</small>"))
    return '<dl class="facts">' + "".join(f"<div><dt>{dt}</dt><dd>{dd}</dd></div>" for dt, dd in items) + "</dl>"


# ---- the page ----

def page(results):
    """The whole page as text."""
    found = newest(results)
    main = found["lines"][0]
    sources = [s for s in found.get("peers", []) if s.values("device") == main.values("device")][-1:] + [main]
    if not any(True for _ in timed(main)):
        raise Refusal(f"{main.path} has no row with a time; measure on a GPU with ./run_all.sh")
    sections = [
        ("peers", "Beside the peers", peers_section(sources)),
        ("ranked", "All lines, ranked by problem", ranked_section([main] + sources[:-1])),
        ("ladder", "The ladder: what each step gives", ladder_section(main, results.parent / "configs.txt")),
        ("ablation", "Ablations", ablation_section(found["ablation"]) if "ablation" in found else ""),
        ("roofline", "Roofline", roofline_section(sources)),
        ("ab", "A/B comparisons", ab_section(found)),
        ("rested", "After a rest", rested_section(found["rested"]) if "rested" in found else ""),
        ("checks", "Checks", checks_section(found)),
        ("files", "All files of results/", files_section(results, found)),
    ]
    sections = [s for s in sections if s[2]]
    gpu, date = main.measured_on()[0], main.measured_on()[-1]
    contents = "".join(f'<li><a href="#{key}">{title}</a></li>' for key, title, _ in sections)
    body = (f"<header><h1>sdpa: attention forward on {html.escape(gpu)}</h1>\n<p>{measured(main)}. "
            "Made by <code>./run_all.sh report</code> from results/ alone; this file loads nothing.</p>\n"
            f"{facts(sources)}\n</header>\n<nav aria-label=\"Contents\"><ol>{contents}</ol></nav>\n<main>\n"
            + "\n".join(f'<section id="{key}">\n<h2>{title}</h2>\n{text}\n</section>' for key, title, text in sections)
            + "\n</main>")
    body, styles = shared_styles(body)
    template = (ROOT / "tools" / "report.html").read_text(encoding="utf-8")
    return string.Template(template).substitute(title=f"sdpa on {html.escape(gpu)}, {date}", styles=styles, body=body)


def shared_styles(body):
    """BODY with a class for each different style of the charts' elements, and the rules of these classes."""
    classes = {}
    body = re.sub(r'style="([^"]*)"', lambda m: f'class="{classes.setdefault(m[1], f"s{len(classes)}")}"', body)
    return body, "\n".join(f".{name} {{ {style} }}" for style, name in classes.items())


def write(path, text):
    """Puts TEXT at PATH whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def main():
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="the folder of CSVs (default: results)")
    parser.add_argument("--output", type=Path, help="the page (default: report.html in that folder)")
    arguments = parser.parse_args()
    output = arguments.output or arguments.results / "report.html"
    try:
        if not arguments.results.is_dir():
            raise Refusal(f"{arguments.results}: no such folder; measure first with ./run_all.sh")
        text = page(arguments.results.resolve())
        write(output, text)
    except (Refusal, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    print(f"{output}: {len(text.encode()) / 1024:.0f} KB", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
