"""Writes results/report.html: a self-contained page, generated from the CSVs of results/.

usage: ./run_all.sh report [--results FOLDER] [--output FILE]

Uses the newest CSV of each kind (by name), results/FOLDER/DATE-DEVICE[-NAME][-N].csv, for the device of the newest
results/lines/DATE-DEVICE[-N].csv. Tables never mix times of different runs. The bases of lines come from configs.txt.
Needs matplotlib.
  --results FOLDER  the folder of the CSVs; default results
  --output FILE     the page; default report.html in that folder
exit: 0, 2 bad usage, or a file that is missing or cannot be read
"""
import collections
import html
import re
import statistics
import string
from operator import itemgetter
from pathlib import Path

import builds
import cli
import ladders
import page
from cli import Refused, say
from report_charts import pairs
from report_rows import KINDS, name_of, newest, peer, problem, timed

UNDRAWN = ("verdicts", "claims", "sweep", "stress")  # kinds that are shown as tables
SIZES = ("B", "Hq", "Hkv", "Sq", "Sk")
FILTERS = ("shape", "D", "type", "causal", "family", "run")


# ---- Markdown as HTML ----

def to_html(text, pictures):
    """Converts a section to HTML, with inline pictures, and file names instead of links."""
    parts = []
    for block in re.split("\n{2,}", re.sub(r"\[([^]]*)\]\([^)]*\)", r"`\1`", text.strip())):
        if block.startswith("|"):
            parts.append(table_to_html(block))
        elif block.startswith("<img"):
            figures = (f"<figure><b>{words}</b>{pictures[name]}</figure>" for name, words in
                       re.findall(r'<img src="../results/([^"]*)"[^>]*alt="([^"]*)">', block))
            parts.append('<div class="charts">\n' + "\n".join(figures) + "\n</div>")
        elif block.startswith("<"):
            parts.append(block)
        elif block.startswith("### "):
            parts.append(f"<h3>{html.escape(block[4:])}</h3>")
        else:
            parts.append("<p>" + re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(block)) + "</p>")
    return "\n".join(parts)


def table_to_html(block):
    """Converts a table to HTML, in a box that scrolls. The table of ranks gets an id for the filters and marks the first row
    of each problem."""
    lines = html.escape(block.replace("`", "")).splitlines()
    headers, rules, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    marks = [' class="n"' * rule.endswith(":") for rule in rules]
    head = "".join(f'<th scope="col"{mark}><button type="button">{header}</button></th>'
                   for header, mark in zip(headers, marks))
    is_ranked = headers[0] == "rank"
    body = "\n".join(f"<tr{' class=first' * (is_ranked and row[0] == '1')}>" + "".join(
        f"<td{mark}>{cell}</td>" for cell, mark in zip(row, marks)) + "</tr>" for row in rows)
    attributes = ' id="lines" class="grouped"' * is_ranked
    return (f'<div class="box" tabindex="0"><table{attributes}>\n<thead><tr>{head}</tr></thead>\n'
            f"<tbody>\n{body}\n</tbody></table></div>")


# ---- sections: each returns Markdown, or "" if results/ has no data for it ----

def provenance(source):
    """The file of a section, the command that measures it, and the machine."""
    return f"\nFrom `{source.name}` (`{KINDS[source.kind].command}`): {source.measured_on}.\n\n"


def grouped(rows, key):
    """{key: [rows with this key]}."""
    found = collections.defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def ranked_section(sources):
    """All timed rows, ranked by problem and file, with filters."""
    rows = []
    for source in sources:
        at = grouped(timed(source), lambda entry: problem(entry[0]))
        # small comes last, since it measures only the launch
        for entries in sorted(at.values(), key=lambda entries: entries[0][0]["shape"] == "small"):
            entries.sort(key=lambda entry: entry[1])
            for rank, (row, us) in enumerate(entries, 1):
                sizes = ",".join(row[column] for column in SIZES) + f" {row['shape']}" * row["shape"][0].isalpha()
                low, high = row.get("graph_lo_us"), row.get("graph_hi_us")  # missing in older files
                rows.append((rank, name_of(row), f"{us:.3f}", f"{low}–{high}" if low else "",
                             f"{row['tflops'] or 0:.2f}", f"{us / entries[0][1]:.2f}", sizes, row["D"], row["dtype"],
                             row["causal"], "peer" if peer(row) else row["family"], row["check"] or "–", source.kind))
    headers = ["#rank", "line", "#µs", "#95% interval, µs", "#TFLOP/s", "#× best", "shape", "#D", "type", "causal",
               "family", "check", "run"]
    selects = "".join(f'<label>{header.lstrip("#")}<select data-column="{column}"><option value="">all</select></label>'
                      for column, header in enumerate(headers) if header.lstrip("#") in FILTERS)
    return f"""Ranked by problem and run; `× best` is the time divided by that of the fastest. `µs` is
`graph_us`, the time of a launch in a replayed CUDA graph. The run `lines` has all lines of configs.txt; `peers` has
some lines and the competitors, timed in turns in one process.

<form class="filters" id="filters">{selects}
<label>line contains<input type="search" data-column="1" size="14"></label>
<label>&nbsp;<input type="reset" value="show all"></label></form>
<p><output id="shown">{len(rows)} rows</output></p>

""" + page.table(headers, rows) + "".join(map(provenance, sources))


def ab_section(found):
    """The ratios from which the verdicts were computed, and {picture: drawing}."""
    case, text, pictures = itemgetter("comparison", "problem"), "", {}
    verdicts = grouped((row for source in found["verdicts"] for row in source.rows), case)
    for source in found["samples"]:
        text += ("The median of each turn divided by that of the first contender in the same half of a block, with the "
                 "verdict's trimmed mean (diamond) and its 99% interval. Grey: within 0.5%.\n\n")
        words = "\n"
        for key, rows in grouped(source.rows, case).items():
            medians = collections.defaultdict(list)
            for (name, _), turn in grouped(rows, itemgetter("contender", "turn")).items():
                medians[name].append(statistics.median(row["us"] for row in turn))
            ratios, title = {}, f"{' against '.join(medians)} at {key[1]}"
            for row in verdicts[key]:
                b, of_turns = row["b"], [of_b / of_a for of_b, of_a in zip(medians[row["b"]], medians[row["a"]])]
                ratios[b] = of_turns, row["ratio"], row["low"], row["high"]
                words += (f"{title}: {b}: {row['verdict']}, {row['pairs']} pairs, {row['thrown_out']} discarded as "
                          "disturbed.\n\n")
            if ratios:
                name = f"ab{len(pictures)}"
                pictures[name] = pairs(ratios, next(iter(medians)), title)
                text += page.picture(name, title)
        text += words + provenance(source)
    return text, pictures


def tables_section(found):
    """All other measurements: a table for each file, with the columns in which its rows differ."""
    text = ""
    for source in (source for kind in UNDRAWN for source in found[kind]):
        columns = [name for name in source.rows[0] if name not in SIZES and len({row[name] for row in source.rows}) > 1]
        text += (f"<details><summary>{source.name}: {len(source.rows)} rows</summary>\n\n"
                 + page.table(columns, [map(row.get, columns) for row in source.rows])
                 + provenance(source) + "</details>\n\n")
    return text


# ---- the page ----

def whole(results):
    """The page as text."""
    found = newest(results)
    main = found["lines"][0]
    drawn, pictures = page.drawn(results)
    comparisons, more = ab_section(found)
    shown = {source.path for sources in found.values() for source in sources}
    files = [(path.relative_to(results.parent), "shown" * (path in shown)) for path in sorted(results.rglob("*.csv"))]
    sections = [section for section in [
        ("peers", "Beside the peers", drawn["peers"]),
        ("ranked", "All lines, ranked by problem", ranked_section([main, *found["peers"][-1:]])),
        ("rungs", "The ladders' rungs and the peers", "\n".join(drawn[name + "_rungs"] for name in ladders.LADDERS)),
        ("ladder", "All lines, each beside its base", drawn["ladder"]),
        ("ablation", "Ablations: what each knob costs if it is taken back", drawn["ablation"]),
        ("wgmma", "Lines on the problems of the peers", drawn["wgmma"]),
        ("rested", "After a rest", drawn["rested"]),
        ("e4m3", "8 bits", drawn["e4m3"]),
        ("decode", "Few query rows", drawn["decode"]),
        ("accuracy", "Errors by the number of keys", drawn["accuracy"]),
        ("ab", "A/B comparisons", comparisons),
        ("tables", "Claims and checks", tables_section(found)),
        ("files", "All files of results/", page.table(["file", "here"], files)),
    ] if section[2]]
    # Inline pictures need unique ids and no fixed width.
    for count, (name, drawing) in enumerate({**pictures, **more}.items()):
        drawing = re.sub("^<svg .*? viewBox", "<svg viewBox", drawing)
        pictures[name] = re.sub(r'( id="|href="#|url\(#)', rf"\1picture{count}-", drawing)
    template = string.Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    return template.substitute(
        gpu=html.escape(main.rows[0]["device"]), date=main.path.name[:10], measured_on=html.escape(main.measured_on),
        contents="".join(f'<li><a href="#{key}">{title}</a></li>' for key, title, _ in sections),
        sections="\n".join(f'<section id="{key}">\n<h2>{title}</h2>\n{to_html(text, pictures)}\n</section>'
                           for key, title, text in sections))


def main():
    options = cli.parse_options(__doc__)
    results = Path(options.results or Path(builds.ROOT, "results"))
    output = options.output or results / "report.html"
    if not results.is_dir():
        raise Refused(f"{results}: no such folder; measure first with ./run_all.sh")
    builds.replace_file(output, whole(results.resolve()))
    say(f"{output}: {Path(output).stat().st_size / 1024:.0f} KB")
