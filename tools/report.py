#!/usr/bin/env python3
"""Writes results/report.html: one file that loads nothing, drawn from the CSVs of results/ alone.

usage: ./run_all.sh report [--results FOLDER] [--output FILE]

Shown is the newest CSV of each kind by its name, results/[KIND/]DATE-DEVICE[-WHAT][-N].csv, of the device of
the newest results/DATE-DEVICE[-N].csv. Times of two runs are not compared: a table names the run of each. What
a ladder's line is compared with is named by configs.txt. Needs matplotlib.
  --results FOLDER  of CSVs (default: results)
  --output FILE     the page (default: report.html in that folder)
exit: 0, 2 bad usage, or a file that is missing or cannot be read
"""
import collections
import html
import statistics
import sys
from pathlib import Path

import builds
import engine
from report_charts import groups, intervals, roofline, samples, steps, waterfall
from report_page import charts, digits, figure, fold, measured, page_of, provenance, rate, span, table
from report_rows import (PEERS, Refusal, ablated, bases, controls, difference, every_file, fastest, ladders, newest,
                         number, peer, problem, rungs_at, timed)

# Limits of a GPU: dense tensor-core TFLOP/s by type and memory rate in TB/s, with their source.
HOPPER_TFLOPS = {"fp16, bf16": 989.5, "e4m3": 1979.0}
DATASHEET = ("NVIDIA {} Tensor Core GPU datasheet (SXM): 1,979 TFLOPS fp16 and 3,958 TFLOPS fp8 with sparsity, so half "
             "of each for dense matrices, and {} TB/s")
LIMITS = {"NVIDIA H200": (HOPPER_TFLOPS, 4.8, DATASHEET.format("H200", 4.8)),
          "NVIDIA H100 80GB HBM3": (HOPPER_TFLOPS, 3.35, DATASHEET.format("H100", 3.35))}
FIRST = ("mission", "mission2", "long")  # of the problems; small is last, since its time is the launch


# ---- sections: each returns its HTML, or "" where results/ has nothing for it ----

def ranked_section(sources):
    """Every timed row, ranked inside its problem and file, with filters."""
    rows = []
    for source in sources:
        at = collections.defaultdict(list)
        for row, us in timed(source):
            at[problem(row)].append((us, row))
        for entries in sorted(at.values(), key=lambda entries: place(entries[0][1]["shape"])):
            entries.sort(key=lambda entry: entry[0])
            for rank, (us, row) in enumerate(entries, 1):
                rows.append((rank, PEERS.get(row["config"], row["config"]), us, span(source, row), rate(source, row),
                             f"{us / entries[0][0]:.2f}", sizes(row), row["D"], row["dtype"], row["causal"],
                             "peer" if peer(row) else row["family"], row["check"] or "–", source.kind))
    headers = ["#rank", "line", "#µs", "#95% interval, µs", "#TFLOP/s", "#× best", "B,Hq,Hkv,Sq,Sk", "#D", "type",
               "causal", "family", "check", "run"]
    selects = []
    for title, column in (("shape", 6), ("D", 7), ("type", 8), ("causal", 9), ("family", 10), ("run", 12)):
        values = sorted(dict.fromkeys(row[column] for row in rows), key=lambda text: int(text) if text.isdigit() else 0)
        selects.append(f'<label>{title}<select data-column="{column}"><option value="">all</option>'
                       + "".join(f"<option>{html.escape(value)}</option>" for value in values) + "</select></label>")
    return f"""<p>Ranked inside each problem and run; <em>× best</em> is the time as a multiple of the fastest.
<em>µs</em> is <code>graph_us</code>, one launch's share of a replayed CUDA graph. The run <em>lines</em> has every
line of configs.txt; <em>peers</em> has some lines and the peers in turns, in one process.</p>
<form class="filters" id="filters">{"".join(selects)}
<label>line contains<input type="search" data-column="1" size="14"></label>
<label>&nbsp;<input type="reset" value="show all"></label></form>
<p><output id="shown">{len(rows)} rows</output></p>
""" + table(headers, rows, *sources, attributes='id="lines" class="grouped"', first=lambda row: row[0] == 1)


def place(shape):
    """A key that sorts problems as the page has them."""
    return FIRST.index(shape) if shape in FIRST else len(FIRST) + (shape == "small")


def sizes(row):
    """B,Hq,Hkv,Sq,Sk with the shape's name, if it has one."""
    words = ",".join(row[c] for c in ("B", "Hq", "Hkv", "Sq", "Sk"))
    return f"{words} {row['shape']}" if row["shape"].isalnum() and row["shape"][0].isalpha() else words


def with_peers(source):
    """({problem: what fastest() has of it} where a line and a peer have a time, the peers' names)."""
    best = {what: at for what, at in fastest([source]).items() if "line" in at and len(at) > 2}
    return best, list(dict.fromkeys(name for at in best.values() for name in at if name not in ("shape", "line")))


def peers_section(source):
    """The fastest line of each problem beside every peer, in one run."""
    best, names = with_peers(source)
    rows, bars = [], collections.defaultdict(list)
    for what, at in best.items():
        us, row, _ = at["line"]
        tflops = {name: number(source, at[name][1], "tflops") or 0.0 for name in ("line", *names) if name in at}
        bars[row["D"]].append((f"{what}: {row['config']}", [
            ("fastest line", tflops.pop("line"), rate(source, row)),
            *((name, of, f"{digits(of, 3)} ({at[name][0] / us:.2f}x)") for name, of in tflops.items())]))
        cells = [(at[name][0], f"{at[name][0] / us:.2f}") if name in at else (None, None) for name in names]
        rows.append([what, row["config"], us, rate(source, row), *(cell for pair in cells for cell in pair)])
    if not rows:
        return ""
    headers = ["problem (B,Hq,Hkv,Sq,Sk,D)", "fastest line", "#µs", "#TFLOP/s"]
    headers += [text for name in names for text in (f"#{name}, µs", "#its time / ours")]
    words = "TFLOP/s of the fastest line and of peers at D="
    return ("<p>One run: lines and each peer through PyTorch, in turns in one process on the same tensors; of the "
            "lines the fastest on each problem. Behind a peer's bar: its time as a multiple of ours.</p>\n"
            + charts(figure(f"D = {D}, TFLOP/s", groups(part, ["fastest line", *names], words + D, "TFLOP/s"), source)
                     for D, part in bars.items()) + table(headers, rows, source))


def ladder_section(source, configs):
    """Time of each line, as a step from the line that it builds on, at mission and long."""
    base, parts, shapes = bases(source, configs), [], ("mission", "long")
    row_of = {row["config"]: row for row in source.rows}
    found = ladders(source)
    us = {name: at for lines in found.values() for name, at in lines.items()}
    for family, lines in found.items():
        lines = {name: at for name, at in lines.items() if at}
        if len(lines) < 2:
            continue
        cells, rows = [], []
        for shape in shapes:
            rungs = rungs_at(lines, base, shape, us)
            if rungs:
                example = next(row for row in source.rows if row["shape"] == shape and row["B"])
                drawing = steps(rungs, f"Steps of the {family} lines at {shape}")
                cells.append(figure(f"{family} at {sizes(example)}", drawing, source))
        for name, at in lines.items():
            before = us.get(base[name], {})
            change = " ".join(difference(row_of[base[name]], row_of[name])) if base[name] else ""
            rows.append([name, base[name] or "", change, *(cell for shape in shapes for cell in (
                at.get(shape), f"{before[shape] / at[shape]:.2f}" if shape in at and shape in before else None))])
        headers = ["line", "its base", "what it changes"]
        headers += [text for shape in shapes for text in (f"#{shape}, µs", "#base / line")]
        cells.append(f"<div>{table(headers, rows, source)}</div>")
        parts.append(f"<h3>{html.escape(family)}</h3>\n" + charts(cells))
    return parts and (
        "<p>In the order of <code>configs.txt</code>. A bar runs from the time of a line's base (upright stroke) "
        "to its own time (dot): plain where the line is faster, hatched where it is slower; the factor is base "
        "over line. The base is the line that configs.txt names; else the earlier line of the family and head "
        "size that differs in the fewest knobs.</p>\n" + "\n".join(parts))


def ablation_section(sources):
    """What each knob of a line is worth: its time without, as a multiple of its time."""
    drawn = []
    for source in sources:
        full, whole, changes, refused = ablated(source)
        drawing = waterfall(full, whole, changes)
        note = f"{full} takes " + ", ".join(f"{digits(t, 3)} µs at {shape}" for shape, t in whole.items()) + "."
        note += f" Not legal alone: {', '.join(refused)}." if refused else ""
        if drawing:
            drawn.append(figure(f"{full}, one change taken back each", drawing, source, note=note))
    return drawn and (
        "<p>A line with all of its knobs, then with each taken back (with what cannot stay without it). Bars to "
        "the right: what the knob gains; to the left: it does not pay here.</p>\n" + charts(drawn))


def roofline_section(sources):
    """TFLOP/s against FLOP per byte, under the limits of the GPU."""
    gpu = (sources[0].values("device") or [""])[0]
    at = {}
    for source in sources:
        for row, us in timed(source):
            tflops, who = number(source, row, "tflops"), "peer" if peer(row) else row["family"]
            if row["shape"] != "small" and tflops and tflops > at.get((problem(row), who), (0,))[0]:
                at[problem(row), who] = tflops, us, row, source.kind
    limits, bandwidth, origin = LIMITS.get(gpu, ({}, 0.0, ""))
    types = {row["dtype"] for _, _, row, _ in at.values()}
    limits = {name: limit for name, limit in limits.items() if types & set(name.split(", "))}
    points, rows = [], []
    for (what, who), (tflops, us, row, run) in at.items():
        B, Hq, Hkv, Sq, Sk, D = (float(row[c]) for c in ("B", "Hq", "Hkv", "Sq", "Sk", "D"))
        size = 1 if row["dtype"] in ("e4m3", "u8") else 2
        intensity = tflops * us * 1e6 / (B * D * (Hq * Sq * (size + 2) + 2 * Hkv * Sk * size))
        points.append((who, intensity, tflops))
        limit = next((limit for name, limit in limits.items() if row["dtype"] in name.split(", ")), None)
        share = f"{100 * tflops / min(limit, intensity * bandwidth):.0f}" if limit else None
        rows.append((what, who, PEERS.get(row["config"], row["config"]), digits(intensity), digits(tflops, 3), share,
                     run))
    text = (f"Limits: {origin}. The tensor limit is at the boost clock; a launch that runs into the power limit has a "
            "lower clock. " if limits else f"The limits of {gpu} are not known to this page, so none are drawn. ")
    headers = ["problem (B,Hq,Hkv,Sq,Sk,D)", "family", "fastest", "#FLOP/byte", "#TFLOP/s", "#% of the roof", "run"]
    drawing = roofline(points, limits, bandwidth, f"Roofline on {gpu}")
    return ("<p>A point is the fastest line of a family on one problem in any of the runs, or the fastest peer. "
            f"{html.escape(text)}FLOP are 4·D·(visible query-key pairs)·B·Hq; bytes are Q, K, V and O once, so that "
            "what caches save or repeated reads cost is left out. The problem <em>small</em> is left out: its time is "
            "the launch.</p>\n"
            + charts([figure("Fastest of each family on each problem", drawing, *sources),
                      f'<div class="rest">{table(headers, rows, *sources)}</div>']))


def comparison(source, rows, verdicts, what):
    """The chart of one comparison on one problem: every time, and the ratio of each pair of turns with the verdict."""
    turns = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows:
        turns[row["contender"]][row["turn"]].append(number(source, row, "us"))
    title = f"{' against '.join(turns)} at {what}"
    times = {name: [us for turn in of.values() for us in turn] for name, of in turns.items()}
    middle = {name: [statistics.median(us) for us in of.values()] for name, of in turns.items()}
    verdicts = [row for row in verdicts if row["b"] in turns and row["a"] in turns]
    ratios = {row["b"]: [b / a for b, a in zip(middle[row["b"]], middle[row["a"]])] for row in verdicts}
    note = "; ".join(f"{row['b']}: {row['verdict']}, {row['pairs']} pairs, {row['thrown_out']} thrown out as disturbed"
                     for row in verdicts)
    estimate = {row["b"]: judged(source, row) for row in verdicts}
    return figure(title, samples(times, ratios, estimate, title), source, note=note)


def judged(source, row):
    return tuple(number(source, row, column) for column in ("ratio", "low", "high"))


def grouped(rows, key):
    found = collections.defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def ab_section(found):
    """The distributions behind the verdicts, and the verdicts of trials with their intervals."""
    parts, case = [], lambda row: (row["comparison"], row["problem"])
    verdicts = grouped((row for source in found["verdicts"] for row in source.rows), case)
    for source in found["samples"]:
        drawn = [comparison(source, rows, verdicts[key], key[1]) for key, rows in grouped(source.rows, case).items()]
        parts.append("<h3>Samples</h3>\n<p>Each contender's times, a tick per replay of its graph; and the ratio of "
                     "each turn's median to that of the first contender in the same half of a block, with the "
                     "verdict's trimmed mean (diamond) and its 99% interval. Grey: within 0.5%.</p>\n" + charts(drawn))
    for source in found["verdicts"]:
        trials = grouped((row for row in source.rows if not row["comparison"]), lambda row: (
            f"{row['a']}, {row['problem']}" + (f" vs {row['b_problem']}" if row["b_problem"] != row["problem"] else "")
            + (": neighbour" if row.get("kind") == "neighbour" else "")))
        if trials:  # the samples of the others are above
            bars = [(title, [(*judged(source, row), row["verdict"]) for row in rows]) for title, rows in trials.items()]
            drawing = intervals(bars, "Ratios of trial comparisons with their intervals", "ratio B/A, 99% interval")
            parts.append("<h3>Can a verdict be trusted?</h3>\n<p>Lines against themselves, against 1% and 0.5% more "
                         "keys, and while another process copies memory: an interval per comparison. Grey: within "
                         "0.5%, which counts as the same.</p>\n"
                         + charts([figure("Trial comparisons", drawing, source)]))
    parts += [fold(f"{len(source.rows)} claims of speed in configs.txt, timed in turns", table(
        ["line", "over", "shape", "#times as fast", "#99% interval"],
        [(r["line"], r["over"], r["shape"], r["speed_up"], f"{r['low']} to {r['high']}") for r in source.rows], source))
        for source in found["steps"]]
    for source in found["fit"]:
        rows = [(r["D"], r["shape"], r["causal"], r["tile"], number(source, r, "us")) for r in source.rows]
        parts.append(fold(f"The tiles of TUNED_TILES on {len({row[:3] for row in rows})} problems",
                          table(["#D", "shape", "causal", "tile", "#µs"], rows, source, wide=["tile"])))
    return "\n".join(parts + [variants(source) for source in found["variants"]])


def variants(source):
    """A table of measured variants; each beside the line as committed in the same run, where that was timed."""
    def case(row):
        return tuple(row[c] for c in ("run", "config", "shape", "D", "causal"))
    committed = {case(row): number(source, row, "graph_us") for row in source.rows if row["source"] == "as committed"}
    rows = []
    for row in source.rows:
        us, whole = number(source, row, "graph_us"), committed.get(case(row))
        run, config, *where = case(row)
        rows.append((run, config, row["source"], *where, us, span(source, row),
                     f"{us / whole:.3f}" if us and whole and row["source"] != "as committed" else None))
    headers = ["#run", "line", "source", "shape", "#D", "causal", "#µs", "#95% interval, µs", "#µs / committed"]
    return fold(f"{source.path.stem}: {len(rows)} variants of lines, medians with intervals",
                table(headers, rows, source, wide=["source"]))


def checks_section(found):
    """Random problems and stress runs, counted."""
    parts, columns = [], ["problems", "passed", "wrong", "errors", "skipped"]
    for source in found["sweep"]:
        rows = [(row["config"], *(int(number(source, row, c) or 0) for c in columns)) for row in source.rows]
        words = ", ".join(f"{sum(row[i] for row in rows)} {column}" for i, column in enumerate(columns, 1))
        parts.append(fold(f"{len(rows)} lines on random problems: {words}",
                          table(["line", *("#" + c for c in columns)], rows, source)))
    for source in found["stress"]:
        rows = [(r["config"], r["case"], r["problem"], r["repeats"], r["check"]) for r in source.rows]
        good = sum(row[4] == "PASS" for row in rows)
        parts.append(fold(f"The same bits whatever runs beside it: {good} of {len(rows)} cases pass",
                          table(["line", "case", "problem", "#repeats", "check"], rows, source)))
    return "\n".join(parts)


def rested_section(sources):
    """The first milliseconds after a rest, before a limit of power is reached."""
    parts = []
    for source in sources:
        best, names = with_peers(source)
        rows = [(what, at["line"][1]["config"],
                 *(rate(source, at[name][1]) if name in at else None for name in ("line", *names)))
                for what, at in best.items()]
        headers = ["problem (B,Hq,Hkv,Sq,Sk,D)", "fastest line", "#TFLOP/s", *(f"#{n}, TFLOP/s" for n in names)]
        parts.append(table(headers, rows, source))
    return parts and (
        "<p>The first 10 ms after 0.3 s of rest, as an application finds the GPU that does other things in "
        "between; the tables above have what lasts.</p>\n" + "\n".join(parts))


def files_section(results, found):
    """Every CSV of results/, and whether this page shows it."""
    shown = {source.path: source.kind for sources in found.values() for source in sources}
    rows = [(str(source.path.relative_to(results.parent)), shown.get(source.path, source.kind), len(source.rows),
             *source.measured_on(), "shown" if source.path in shown else "") for source in every_file(results)]
    headers = ["file", "kind", "#rows", "GPU", "driver", "CUDA", "commit", "date", "here"]
    return (f"<p>Shown are the newest of each kind by their names: {len(shown)} of {len(rows)} files.</p>\n"
            + table(headers, rows, first=lambda row: row[-1] == "shown"))


def facts(main, peers):
    """The figures to take away, as a list of terms."""
    racy, lines = controls(main), {row["config"] for row in main.rows}
    skipped = {row["config"] for row in main.rows if row["status"] == "skipped"}
    passed = lines - racy - {row["config"] for row in main.rows if row["check"] != "PASS"}
    more = [f"{len(names)} {what}" for names, what in ((racy, "must fail"), (skipped, "cannot run here")) if names]
    items = [("lines that pass their checks", f"{len(passed)} of {len(lines)} <small>{', '.join(more)}</small>")]
    for what, at in fastest([main]).items():
        if at["shape"] in ("mission", "long") and "line" in at and what.endswith(",64 fp16"):
            us, row, _ = at["line"]
            items.append((f"fastest at {at['shape']}, D = 64",
                          f"{digits(us, 3)} µs <small>{html.escape(row['config'])}</small>"))
    best, names = with_peers(peers)
    ratios = [min(at[name][0] for name in names if name in at) / at["line"][0] for at in best.values()]
    if ratios:
        items.append((f"times as fast as the best peer, {len(ratios)} problems",
                      f"{statistics.geometric_mean(ratios):.2f}x <small>geometric mean, {min(ratios):.2f} to "
                      f"{max(ratios):.2f}</small>"))
    return '<dl class="facts">' + "".join(f"<div><dt>{dt}</dt><dd>{dd}</dd></div>" for dt, dd in items) + "</dl>"


# ---- the page ----

def page(results):
    """The whole page as text."""
    found = collections.defaultdict(list, newest(results))
    main = found["lines"][0]
    peers = next((source for source in found["peers"][::-1] if source.values("device") == main.values("device")), main)
    runs = list({source.kind: source for source in (main, peers)}.values())
    if not any(True for _ in timed(main)):
        raise Refusal(f"{main.path} has no row with a time; measure on a GPU with ./run_all.sh")
    sections = [
        ("peers", "Beside the peers", peers_section(peers)),
        ("ranked", "All lines, ranked by problem", ranked_section(runs)),
        ("ladder", "The ladder: what each step gives", ladder_section(main, results.parent / "configs.txt")),
        ("ablation", "Ablations", ablation_section(found["ablation"])),
        ("roofline", "Roofline", roofline_section(runs)),
        ("ab", "A/B comparisons", ab_section(found)),
        ("rested", "After a rest", rested_section(found["rested"])),
        ("checks", "Checks", checks_section(found)),
        ("files", "All files of results/", files_section(results, found)),
    ]
    sections = [section for section in sections if section[2]]
    gpu, date = main.measured_on()[0], main.measured_on()[-1]
    contents = "".join(f'<li><a href="#{key}">{title}</a></li>' for key, title, _ in sections)
    body = (f"<header><h1>sdpa: attention forward on {html.escape(gpu)}</h1>\n<p>{measured(main)}. "
            "Made by <code>./run_all.sh report</code> from results/ alone; this file loads nothing.</p>\n"
            f"{facts(main, peers)}\n</header>\n<nav aria-label=\"Contents\"><ol>{contents}</ol></nav>\n<main>\n"
            + "\n".join(f'<section id="{key}">\n<h2>{title}</h2>\n{text}\n</section>' for key, title, text in sections)
            + "\n</main>")
    return page_of(f"sdpa on {gpu}, {date}", body)


def main():
    parser = engine.new_parser()
    parser.add_argument("--results", type=Path, default=Path(builds.ROOT, "results"))
    parser.add_argument("--output", type=Path)
    options = engine.parse_options(parser, sys.argv[1:], __doc__)
    output = options.output or options.results / "report.html"
    if not options.results.is_dir():
        raise Refusal(f"{options.results}: no such folder; measure first with ./run_all.sh")
    text = page(options.results.resolve())
    builds.replace_file(str(output), text)
    print(f"{output}: {len(text.encode()) / 1024:.0f} KB", file=sys.stderr)
    return 0


if __name__ == "__main__":
    engine.command("report.py", main)
