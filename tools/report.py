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
import statistics
import sys
from pathlib import Path

from report_page import alt, charts, digits, figure, fold, measured, provenance, rate, span, table, whole, write
from report_rows import (PEERS, Refusal, ablated, bases, controls, difference, every_file, fastest, ladders, newest,
                         number, peer, problem, rungs_at, timed)

try:
    from report_charts import groups, intervals, roofline, samples, steps, waterfall
except ImportError as missing:
    print(f"report.py: {missing.name} is missing; install it with: sudo apt-get install python3-matplotlib "
          "(or: python3 -m pip install matplotlib)", file=sys.stderr)
    sys.exit(2)

ROOT = Path(__file__).resolve().parent.parent
# Limits of a GPU: dense tensor-core TFLOP/s by type and memory rate in TB/s, with their source.
LIMITS = {
    "NVIDIA H200": ({"fp16, bf16": 989.5, "e4m3": 1979.0}, 4.8,
                    "NVIDIA H200 Tensor Core GPU datasheet (SXM): 1,979 TFLOPS fp16 and 3,958 TFLOPS fp8 with "
                    "sparsity, so half of each for dense matrices, and 4.8 TB/s"),
    "NVIDIA H100 80GB HBM3": ({"fp16, bf16": 989.5, "e4m3": 1979.0}, 3.35,
                              "NVIDIA H100 Tensor Core GPU datasheet (SXM): 1,979 TFLOPS fp16 and 3,958 TFLOPS fp8 "
                              "with sparsity, so half of each for dense matrices, and 3.35 TB/s"),
}


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
        options = "".join(f"<option>{html.escape(v)}</option>" for v in sorted(values, key=by_number))
        selects.append(f'<label>{title}<select data-column="{column}"><option value="">all</option>{options}'
                       "</select></label>")
    return f"""<p>Ranked inside each problem and run; <em>× best</em> is the time as a multiple of the fastest.
<em>µs</em> is <code>graph_us</code>, one launch's share of a replayed CUDA graph. The run <em>lines</em> has every
line of configs.txt; <em>peers</em> has some lines and the peers in turns, in one process.</p>
<form class="filters" id="filters">{"".join(selects)}
<label>line contains<input type="search" data-column="1" size="14"></label>
<label>&nbsp;<input type="reset" value="show all"></label></form>
<p><output id="shown">{len(rows)} rows</output></p>
""" + table(headers, rows, 'id="lines" class="grouped"', lambda row: row[0] == 1) + provenance(*sources)


def by_number(text):
    """A key that sorts numbers by their value and leaves other texts in their order."""
    return int(text) if text.isdigit() else 0


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
        ours = number(source, row, "tflops") or 0.0
        group = [("fastest line", ours, digits(ours, 3))]
        cells = [what, row["config"], us, rate(source, row)]
        for name in names:
            if name in at:
                theirs = number(at[name][2], at[name][1], "tflops") or 0.0
                group.append((name, theirs, f"{digits(theirs, 3)} ({at[name][0] / us:.2f}x)"))
            cells += [at[name][0], f"{at[name][0] / us:.2f}"] if name in at else [None, None]
        rows.append(cells)
        bars.append((row["D"], f"{what}: {row['config']}", group))
    headers = ["problem (B,Hq,Hkv,Sq,Sk,D)", "fastest line", "#µs", "#TFLOP/s"]
    headers += [text for name in names for text in (f"#{name}, µs", "#its time / ours")]
    drawings = []
    for D in dict.fromkeys(bar[0] for bar in bars):
        part = [bar[1:] for bar in bars if bar[0] == D]
        drawing = groups(part, ["fastest line"] + names, f"TFLOP/s of the fastest line and of peers at D={D}",
                         "TFLOP/s")
        drawings.append(figure(f"D = {D}, TFLOP/s", drawing, peers, main))
    return ("<p>The fastest of our lines on each problem, and each peer through PyTorch on the same tensors, timed "
            "alike. Behind a peer's bar: its time as a multiple of ours.</p>\n" + charts(drawings)
            + table(headers, rows) + provenance(peers, main))


def ladder_section(source, configs):
    """Time of each line, as a step from the line that it builds on, at mission and long."""
    base, parts = bases(source, configs), []
    row_of = {row["config"]: row for row in source.rows}
    found = ladders(source)
    us = {name: at for lines in found.values() for name, at in lines.items()}
    for family, lines in found.items():
        lines = {name: at for name, at in lines.items() if at}
        if len(lines) < 2:
            continue
        cells, rows = [], []
        for shape in ("mission", "long"):
            rungs = rungs_at(lines, base, shape, us)
            if rungs:
                drawing = steps(rungs, f"Steps of the {alt(family)} lines at {shape}")
                example = next(row for row in source.rows if row["shape"] == shape and row["B"])
                cells.append(figure(f"{family} at {sizes(example)}", drawing, source))
        for name, at in lines.items():
            row = [name, base[name] or "", " ".join(difference(row_of[base[name]], row_of[name]) if base[name] else [])]
            before = us.get(base[name], {})
            for shape in ("mission", "long"):
                row += [at.get(shape), f"{before[shape] / at[shape]:.2f}" if shape in at and shape in before else None]
            rows.append(row)
        headers = ["line", "its base", "what it changes"]
        headers += [t for shape in ("mission", "long") for t in (f"#{shape}, µs", "#base / line")]
        cells.append("<div>" + table(headers, rows) + provenance(source) + "</div>")
        parts.append(f"<h3>{html.escape(family)}</h3>\n" + charts(cells))
    if not parts:
        return ""
    return ("<p>In the order of <code>configs.txt</code>. A bar runs from the time of a line's base (upright stroke) "
            "to its own time (dot): plain where the line is faster, hatched where it is slower; the factor is base "
            "over line. The base is the line that configs.txt names; else the earlier line of the family and head size "
            "that differs in the fewest knobs.</p>\n" + "\n".join(parts))


def ablation_section(sources):
    """What each knob of a line is worth: its time without, as a multiple of its time."""
    return ("<p>A line with all of its knobs, then with each taken back (with what cannot stay without it). Bars to "
            "the right: what the knob gains; to the left: it does not pay here.</p>\n"
            + charts([chart for chart in map(ablation, sources) if chart]))


def ablation(source):
    """The chart of one line's ablation, or "" where the whole line has no time."""
    full, whole, changes, refused = ablated(source)
    drawing = waterfall(full, whole, changes)
    if not drawing:
        return ""
    note = f"{full} takes " + ", ".join(f"{digits(t, 3)} µs at {shape}" for shape, t in whole.items()) + "."
    if refused:
        note += f" Not legal alone: {', '.join(refused)}."
    return figure(f"{full}, one change taken back each", drawing, source, note=note)


def roofline_section(sources):
    """TFLOP/s against FLOP per byte, under the limits of the GPU."""
    gpu = (sources[-1].values("device") or [""])[0]
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
    text = (f"Limits: {origin}. The tensor limit is at the boost clock; a launch that runs into the power limit has a "
            "lower clock. " if limits else f"The limits of {gpu} are not known to this page, so none are drawn. ")
    headers = ["problem (B,Hq,Hkv,Sq,Sk,D)", "family", "fastest", "#FLOP/byte", "#TFLOP/s", "#% of the roof"]
    drawing = roofline(points, limits, bandwidth, f"Roofline on {alt(gpu)}")
    return (f"<p>A point is the fastest line of a family on one problem, or the fastest peer. {html.escape(text)}"
            "FLOP are 4·D·(visible query-key pairs)·B·Hq; bytes are Q, K, V and O once, so that what caches save or "
            "repeated reads cost is left out. The problem <em>small</em> is left out: its time is the launch.</p>\n"
            + charts([figure("Fastest of each family on each problem", drawing, *sources),
                      f'<div class="rest">{table(headers, rows)}{provenance(*sources)}</div>']))


def comparison(source, rows, verdicts, title):
    """The chart of one comparison on one problem: every time, and the ratio of each pair of turns with the verdict."""
    turns = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows:
        turns[row["contender"]][row["turn"]].append(number(source, row, "us"))
    times = {name: [us for turn in of.values() for us in turn] for name, of in turns.items()}
    middle = {name: [statistics.median(us) for us in of.values()] for name, of in turns.items()}
    judged = {row["b"]: tuple(number(source, row, c) for c in ("ratio", "low", "high")) for row in verdicts
              if row["b"] in turns and row["a"] in turns}
    ratios = {row["b"]: [b / a for b, a in zip(middle[row["b"]], middle[row["a"]])] for row in verdicts
              if row["b"] in judged}
    note = "; ".join(f"{row['b']}: {row['verdict']}, {row['pairs']} pairs, {row['thrown_out']} thrown out as disturbed"
                     for row in verdicts)
    return figure(title, samples(times, ratios, judged, alt(title)), source, note=note)


def ab_section(found):
    """The distributions behind the verdicts, and the verdicts of trials with their intervals."""
    parts, of_comparison = [], collections.defaultdict(list)
    for source in found.get("verdicts", []):
        for row in source.rows:
            of_comparison[row["comparison"], row["problem"]].append(row)
    for source in found.get("samples", []):
        cases = collections.defaultdict(list)
        for row in source.rows:
            cases[row["comparison"], row["problem"]].append(row)
        drawings = [comparison(source, rows, of_comparison[case], title_of(rows, case[1]))
                    for case, rows in cases.items()]
        parts.append("<h3>Samples</h3>\n<p>Each contender's times, a tick per replay of its graph; and the ratio of each "
                     "turn's median to that of the first contender in the same half of a block, with the verdict's "
                     "trimmed mean (diamond) and its 99% interval. Grey: within 0.5%.</p>\n" + charts(drawings))
    for source in found.get("verdicts", []):
        cases = collections.defaultdict(list)
        for row in source.rows:
            if row["comparison"]:
                continue  # its samples are above
            title = f"{row['a']}, {row['problem']}" + (
                f" vs {row['b_problem']}" if row["b_problem"] != row["problem"] else "") + (
                f": {row['kind']}" if row.get("kind") == "neighbour" else "")
            cases[title].append(tuple(number(source, row, c) for c in ("ratio", "low", "high")) + (row["verdict"],))
        if cases:
            drawing = intervals(list(cases.items()), "Ratios of trial comparisons with their intervals",
                                "ratio B/A, 99% interval")
            parts.append("<h3>Can a verdict be trusted?</h3>\n<p>Lines against themselves, against 1% and 0.5% more keys, "
                         "and while another process copies memory: an interval per comparison. Grey: within 0.5%, which "
                         "counts as the same.</p>\n" + charts([figure("Trial comparisons", drawing, source)]))
    for source in found.get("steps", []):
        rows = [(r["line"], r["over"], r["shape"], r["speed_up"], f"{r['low']} to {r['high']}") for r in source.rows]
        parts.append(fold(f"{len(rows)} claims of speed in configs.txt, timed in turns", table(
            ["line", "over", "shape", "#times as fast", "#99% interval"], rows) + provenance(source)))
    for source in found.get("fit", []):
        rows = [(r["D"], r["shape"], r["causal"], r["tile"], number(source, r, "us")) for r in source.rows]
        parts.append(fold(f"The tiles of TUNED_TILES on {len({row[:3] for row in rows})} problems", table(
            ["#D", "shape", "causal", "tile", "#µs"], rows, wide=["tile"]) + provenance(source)))
    for source in found.get("variants", []):
        parts.append(variants(source))
    return "\n".join(parts)


def title_of(rows, problem_name):
    """The contenders of a comparison and their problem."""
    return " against ".join(dict.fromkeys(row["contender"] for row in rows)) + " at " + problem_name


def variants(source):
    """A table of measured variants; each beside the line as committed in the same run, where that was timed."""
    def case(row):
        return tuple(row[c] for c in ("run", "config", "shape", "D", "causal"))
    committed = {case(row): number(source, row, "graph_us") for row in source.rows if row["source"] == "as committed"}
    rows = []
    for row in source.rows:
        us = number(source, row, "graph_us")
        ratio = None
        if us and row["source"] != "as committed" and committed.get(case(row)):
            ratio = f"{us / committed[case(row)]:.3f}"
        rows.append((row["run"], row["config"], row["source"], row["shape"], row["D"], row["causal"], us,
                     span(source, row), ratio))
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
        words = ", ".join(f"{n} {column}" for n, column in zip(total, columns))
        parts.append(fold(f"{len(rows)} lines on random problems: {words}",
                          table(["line"] + ["#" + c for c in columns], rows) + provenance(source)))
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
    racy, lines = controls(main), {row["config"] for row in main.rows}
    skipped = {row["config"] for row in main.rows if row["status"] == "skipped"}
    passed = lines - racy - {row["config"] for row in main.rows if row["check"] != "PASS"}
    more = [f"{len(names)} {what}" for names, what in ((racy, "must fail"), (skipped, "cannot run here")) if names]
    items = [("lines that pass their checks", f"{len(passed)} of {len(lines)} <small>{', '.join(more)}</small>")]
    for what, at in best.items():
        if at["shape"] in ("mission", "long") and "line" in at and what.endswith(",64 fp16"):
            us, row, _ = at["line"]
            items.append((f"fastest at {at['shape']}, D = 64",
                          f"{digits(us, 3)} µs <small>{html.escape(row['config'])}</small>"))
    ratios = [min(v[0] for n, v in at.items() if n not in ("shape", "line")) / at["line"][0]
              for at in best.values() if "line" in at and len(at) > 2]
    if ratios:
        items.append((f"times as fast as the best peer, {len(ratios)} problems",
                      f"{statistics.geometric_mean(ratios):.2f}x "
                      f"<small>geometric mean, {min(ratios):.2f} to {max(ratios):.2f}</small>"))
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
    return whole(f"sdpa on {gpu}, {date}", body)


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
