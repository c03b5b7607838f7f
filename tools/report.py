"""Writes results/report.html: one file that loads nothing, drawn from the CSVs of results/ alone.

usage: ./run_all.sh report [--results FOLDER] [--output FILE]

Shown is the newest CSV of each kind by its name, results/[KIND/]DATE-DEVICE[-WHAT][-N].csv, of the device of
the newest results/DATE-DEVICE[-N].csv. Times of two runs are not compared: a table names the run of each. What
a ladder's line is compared with is named by configs.txt. Needs matplotlib.
  --results FOLDER  of CSVs; default results
  --output FILE     the page; default report.html in that folder
exit: 0, 2 bad usage, or a file that is missing or cannot be read
"""
import collections
import html
import itertools
import re
import statistics
import string
from pathlib import Path

import builds
import cli
import page
from cli import Refused, say
from report_charts import samples
from report_rows import KINDS, name_of, newest, number, peer, problem, timed

INTRODUCTIONS = {
    "ladder": "A bar runs from the time of a line's base (upright stroke), which configs.txt names, to its own time (dot): "
              "plain where the line is faster, hatched where it is slower.",
    "ablation": "A line with all of its knobs, then with each taken back (with what cannot stay without it). Bars to the "
                "right: what the knob gains; to the left: it does not pay here."}
UNDRAWN = ("verdicts", "steps", "fit", "variants", "sweep", "stress")  # kinds that are tables here
SIZES = ("B", "Hq", "Hkv", "Sq", "Sk")
FIRST = ("mission", "mission2", "long")  # of the problems; small is last, since its time is the launch
COUNT = itertools.count(1)
FILTERS = ("shape", "D", "type", "causal", "family", "run")


# ---- parts: tables and figures with their provenance ----

def table(headers, rows, *sources, attributes="", first=lambda row: False):
    """A table in a box of its own scrolling, and its provenance. A header with a # is of numbers; prose wraps."""
    marks = [' class="n"' if header[0] == "#" else ' class="wide"' if header.startswith(("what", "step", "tile", "source"))
             else "" for header in headers]
    head = "".join(f'<th scope="col"{mark}><button type="button">{html.escape(text.lstrip("#"))}</button></th>'
                   for text, mark in zip(headers, marks))
    body = "\n".join(f"<tr{' class=first' if first(row) else ''}>" + "".join(
        f"<td{mark}>{html.escape(str(value))}</td>" for value, mark in zip(row, marks)) + "</tr>" for row in rows)
    return (f'<div class="box" tabindex="0"><table {attributes}>\n<thead><tr>{head}</tr></thead>\n'
            f"<tbody>\n{body}\n</tbody></table></div>{provenance(*sources)}")


def provenance(*sources):
    """Which file each figure is from, the command that makes such rows, and what it was measured on; "" of no file."""
    files = collections.defaultdict(list)
    for source in sources:
        files[html.escape(source.measured_on)].append(
            f"<code>{html.escape(source.name)}</code> (<code>{html.escape(KINDS[source.kind][2])}</code>)")
    words = [" and ".join(names) + ": " + on for on, names in files.items()]
    return '<div class="from">From ' + ".<br>".join(words) + ".</div>" if words else ""


def figure(title, drawing, *sources, note=""):
    """A chart with its title, a sentence if it needs one, its provenance, and ids that no other chart has."""
    drawing = re.sub(r'( id="|href="#|url\(#)', rf"\1chart{next(COUNT)}-", drawing)
    return (f"<figure><b>{html.escape(title)}</b>{drawing}<figcaption>{html.escape(note)}{provenance(*sources)}"
            "</figcaption></figure>")


def charts(figures):
    """Charts side by side, as many as fit."""
    return '<div class="charts">\n' + "\n".join(figures) + "\n</div>"


def from_markdown(text, pictures):
    """A section of README or docs as HTML, with its pictures drawn in, and the names of files instead of links."""
    parts = []
    for block in re.split("\n{2,}", re.sub(r"\[([^]]*)\]\([^)]*\)", r"`\1`", text.strip())):
        if block.startswith("|"):
            lines = block.replace("`", "").splitlines()
            names, rules, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
            parts.append(table([("#" if rule.endswith(":") else "") + name for name, rule in zip(names, rules)], rows))
        elif block.startswith("<img"):
            images = re.findall(r'<img src="[^"]*?([^/"]*)"[^>]*alt="([^"]*)">', block)
            parts.append(charts(figure(words, pictures[name]) for name, words in images))
        elif block.startswith("### "):
            parts.append(f"<h3>{html.escape(block[4:])}</h3>")
        else:
            parts.append("<p>" + re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(block)) + "</p>")
    return "\n".join(parts)


def grouped(rows, key):
    """{key: [the rows that have it]}."""
    found = collections.defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


# ---- sections: each returns its HTML, or "" where results/ has nothing for it ----

def ranked_section(sources):
    """Every timed row, ranked inside its problem and file, with filters."""
    rows = []
    for source in sources:
        at = grouped(timed(source), lambda entry: problem(entry[0]))
        for entries in sorted(at.values(), key=lambda entries: place(entries[0][0]["shape"])):
            entries.sort(key=lambda entry: entry[1])
            for rank, (row, us) in enumerate(entries, 1):
                sizes = ",".join(row[column] for column in SIZES) + f" {row['shape']}" * row["shape"][0].isalpha()
                low, high = row.get("graph_lo_us"), row.get("graph_hi_us")  # not in older files
                rows.append((rank, name_of(row), row["graph_us"], f"{low}–{high}" if low else "", row["tflops"],
                             f"{us / entries[0][1]:.2f}", sizes, row["D"], row["dtype"], row["causal"],
                             "peer" if peer(row) else row["family"], row["check"] or "–", source.kind))
    headers = ["#rank", "line", "#µs", "#95% interval, µs", "#TFLOP/s", "#× best", "shape", "#D", "type", "causal", "family",
               "check", "run"]
    selects = ""
    for column, header in enumerate(headers):
        if header.lstrip("#") in FILTERS:
            options = "".join(f"<option>{html.escape(value)}</option>" for value in dict.fromkeys(row[column] for row in rows))
            selects += (f'<label>{header.lstrip("#")}<select data-column="{column}"><option value="">all</option>{options}'
                        "</select></label>")
    return f"""<p>Ranked inside each problem and run; <em>× best</em> is the time as a multiple of the fastest.
<em>µs</em> is <code>graph_us</code>, one launch's share of a replayed CUDA graph. The run <em>lines</em> has every
line of configs.txt; <em>peers</em> has some lines and the peers in turns, in one process.</p>
<form class="filters" id="filters">{selects}
<label>line contains<input type="search" data-column="1" size="14"></label>
<label>&nbsp;<input type="reset" value="show all"></label></form>
<p><output id="shown">{len(rows)} rows</output></p>
""" + table(headers, rows, *sources, attributes='id="lines" class="grouped"', first=lambda row: row[0] == 1)


def place(shape):
    """A key that sorts problems as the page has them."""
    return FIRST.index(shape) if shape in FIRST else len(FIRST) + (shape == "small")


def comparison(source, rows, verdicts, problem_text):
    """The chart of one comparison on one problem: every time, and the ratio of each pair of turns with the verdict."""
    turns = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows:
        turns[row["contender"]][row["turn"]].append(number(source, row, "us"))
    times = {name: [us for turn in of.values() for us in turn] for name, of in turns.items()}
    middle = {name: [statistics.median(us) for us in of.values()] for name, of in turns.items()}
    ratios, notes = {}, []
    for row in verdicts:
        a, b = row["a"], row["b"]
        if a in turns and b in turns:
            estimate = [number(source, row, column) for column in ("ratio", "low", "high")]
            ratios[b] = [of_b / of_a for of_b, of_a in zip(middle[b], middle[a])], *estimate
            notes.append(f"{b}: {row['verdict']}, {row['pairs']} pairs, {row['thrown_out']} thrown out as disturbed")
    title = f"{' against '.join(turns)} at {problem_text}"
    return figure(title, samples(times, ratios, title), source, note="; ".join(notes))


def ab_section(found):
    """The distributions behind the verdicts."""
    parts, case = [], lambda row: (row["comparison"], row["problem"])
    verdicts = grouped((row for source in found["verdicts"] for row in source.rows), case)
    for source in found["samples"]:
        drawn = [comparison(source, rows, verdicts[key], key[1]) for key, rows in grouped(source.rows, case).items()]
        parts.append("<p>Each contender's times; and the ratio of each turn's median to that of the first contender in the "
                     "same half of a block, with the verdict's trimmed mean (diamond) and its 99% interval. Grey: within "
                     "0.5%.</p>\n" + charts(drawn))
    return "\n".join(parts)


def tables_section(found):
    """What is measured besides, a table for each file, of the columns in which its rows differ."""
    parts = []
    for source in itertools.chain.from_iterable(found[kind] for kind in UNDRAWN):
        columns = [name for name in source.rows[0] if name not in SIZES and len({row[name] for row in source.rows}) > 1]
        numeric = [name for name in columns if re.fullmatch(r"[\d.]*", "".join(row[name] for row in source.rows))]
        body = table(["#" * (name in numeric) + name for name in columns],
                     [[row[name] for name in columns] for row in source.rows], source)
        parts.append(f"<details><summary>{source.name}: {len(source.rows)} rows</summary>\n{body}\n</details>")
    return "\n".join(parts)


def files_section(results, found):
    """Every CSV of results/, and whether this page shows it."""
    shown = {source.path for sources in found.values() for source in sources}
    rows = [(path.relative_to(results.parent), "shown" if path in shown else "") for path in sorted(results.rglob("*.csv"))]
    return (f"<p>Shown are the newest of each kind by their names: {len(shown)} of {len(rows)} files.</p>\n"
            + table(["file", "here"], rows))


# ---- the page ----

def whole(results):
    """The whole page as text."""
    found = newest(results)
    main = found["lines"][0]
    peers = found["peers"][-1:] or [main]
    drawn, pictures = page.drawn(results)
    drawn = {name: from_markdown(f"{INTRODUCTIONS.get(name, '')}\n\n{text}", pictures) for name, text in drawn.items()}
    chart = charts([figure("TFLOP/s of the fastest line and of peers", pictures["peers.svg"], *peers)])
    runs = list({source.kind: source for source in (main, *peers)}.values())
    sections = [
        ("peers", "Beside the peers", chart + drawn["results"]),
        ("ranked", "All lines, ranked by problem", ranked_section(runs)),
        ("ladder", "The ladder: what each step gives", drawn["ladder"]),
        ("ablation", "Ablations", drawn["ablation"]),
        ("rungs", "Lines on the problems of the peers", drawn["rungs"]),
        ("rested", "After a rest", drawn["rested"]),
        ("e4m3", "8 bits", drawn["e4m3"]),
        ("decode", "Few query rows", drawn["decode"]),
        ("accuracy", "Errors by the number of keys", drawn["accuracy"]),
        ("ab", "A/B comparisons", ab_section(found)),
        ("tables", "Claims, tiles, variants and checks", tables_section(found)),
        ("files", "All files of results/", files_section(results, found)),
    ]
    sections = [section for section in sections if section[2]]
    template = string.Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    return template.substitute(
        gpu=html.escape(main.gpu), date=main.path.name[:10], measured_on=html.escape(main.measured_on),
        contents="".join(f'<li><a href="#{key}">{title}</a></li>' for key, title, _ in sections),
        sections="\n".join(f'<section id="{key}">\n<h2>{title}</h2>\n{text}\n</section>' for key, title, text in sections))


def main():
    options = cli.parse_options(__doc__)
    results = Path(options.results or Path(builds.ROOT, "results"))
    output = options.output or results / "report.html"
    if not results.is_dir():
        raise Refused(f"{results}: no such folder; measure first with ./run_all.sh")
    text = whole(results.resolve())
    builds.replace_file(output, text)
    say(f"{output}: {len(text.encode()) / 1024:.0f} KB")
    return 0
