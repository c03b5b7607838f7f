#!/usr/bin/env python3
"""usage: ./run_all.sh results [CSV]...
       tests/bugs.py | tools/page.py --bugs
Redraws what stands between <!-- NAME:begin --> and <!-- NAME:end --> in README.md and docs/, and results/*.svg, from
the CSVs of results/: those that are named, else the newest of each kind by its name. The last column of the ladder's
tables is written by hand and stays.
  --bugs  redraws instead the table of injected bugs in docs/TESTING.md, from stdin
exit: 0, 2 bad usage or a file that cannot be read
"""
import collections
import math
import re
import sys
from pathlib import Path

import cli
from builds import replace_file as write
from cli import Refused
from report_charts import against, short, standalone, steps, waterfall
from report_rows import (KINDS, PEERS, ablated, bases, difference, fastest, ladders, newest, number, peer,
                         problem, read, timed)

ROOT = Path(__file__).resolve().parent.parent
OURS = "fastest line"


# ---- Markdown ----

def table(headers, rows):
    """A table; a header that begins with # is of numbers. None is an empty cell."""
    def line(cells):
        return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"
    rule = "|" + "|".join("--:" if header[:1] == "#" else "---" for header in headers) + "|"
    return "\n".join([line(header.lstrip("#") for header in headers), rule, *map(line, rows)]) + "\n"


def picture(name, words, up="", width=380):
    """An image of results/ in a page that is UP from the top folder."""
    return f'<img src="{up}results/{name}" width="{width}" alt="{words}">\n'


def provenance(source, up=""):
    """What a file's rows were measured on, and a link to it."""
    return f"{source.measured_on}: [{source.name}]({up}{source.name})\n"


def short_rate(source, row):
    """A row's TFLOP/s without a fraction."""
    return f"{number(source, row, 'tflops') or 0:.0f}"


# ---- the sections: the first three return their Markdown and {picture: drawing}, the others a table ----

def results_section(source):
    """README's table and picture: the fastest line of each problem beside the peers."""
    best = {what: at for what, at in fastest([source]).items() if "line" in at and at["shape"] != "small"}
    names = list(dict.fromkeys(n for at in best.values() for n in at if n not in ("shape", "line")))
    rows, drawn = [], []
    for what, at in best.items():
        us, row, _ = at["line"]
        others = [at[name][0] if name in at else None for name in names]
        least = min(filter(None, others), default=None)
        name = f"{at['shape']}: " if at["shape"].isalnum() and at["shape"][0].isalpha() else ""
        rows.append([name + what, row["config"], short(us), short_rate(source, row), *(t and short(t) for t in others),
                     least and f"{least / us:.2f}x"])
        values = {OURS: number(source, row, "tflops") or 0}
        values.update((n, number(source, at[n][1], "tflops") or 0) for n in names if n in at)
        drawn.append((what.replace(" fp16", ""), values, f"{least / us:.2f}x" if least else ""))
    headers = ["problem (B,Hq,Hkv,Sq,Sk,D)", "fastest line", "#µs", "#TFLOP/s", *(f"#{n}, µs" for n in names),
               "#times as fast"]
    torch = next((row["note"] for row in source.rows if peer(row) and row["note"]), "")
    words = (f"The peers through {torch}. " if torch else "") + provenance(source)
    chart = against(drawn, [OURS, *names], "TFLOP/s of the fastest line and of peers on each problem",
                    "TFLOP/s; right: times the best peer")
    return table(headers, rows) + "\n" + words, {"peers.svg": chart}


def ladder_section(source, configs, sentences):
    """Every line of configs.txt beside its base, in tables with SENTENCES, and pictures of the steps."""
    base, row_of = bases(source, configs), {row["config"]: row for row in source.rows}
    text, drawings, (found, us) = [], {}, ladders(source)
    for family, lines in found.items():
        pictures = []
        for shape in ("mission", "long"):
            rungs = [(name, us.get(base[name], {}).get(shape), us[name][shape]) for name in lines if shape in us[name]]
            if len(rungs) > 1:
                name = f"ladder-{re.sub('[^a-zA-Z0-9]+', '-', family)}-{shape}.svg"
                words = f"Steps of the {family} lines at {shape}"
                drawings[name] = steps(rungs, words)
                pictures.append(picture(name, words, "../"))
        text += [f"### {family}\n"] + (["".join(pictures)] if pictures else [])
        rows = []
        for name in lines:
            at, before = us[name], us.get(base[name], {})
            step = f"{base[name]}: {' '.join(difference(row_of[base[name]], row_of[name]))}" if base[name] else None
            times = [short(at[s]) + (f" ({before[s] / at[s]:.2f}x)" if s in before else "") if s in at else None
                     for s in ("mission", "long")]
            rows.append([name, step, *times, sentences.get(name)])
        text.append(table(["line", "step from: what it changes", "#mission µs (gain)", "#long µs (gain)", "what it shows"],
                          rows))
    return "\n".join(text) + "\n" + provenance(source, "../"), drawings


def ablation_section(sources):
    """A picture and a table of each line's ablation."""
    text, drawings = [], {}
    for source in sources:
        full, whole, changes, refused = ablated(source)
        drawing = waterfall(full, whole, changes)
        if not drawing:
            raise Refused(f"{source.path} has no row with a time for {full}, or none without one of its knobs")
        drawings[f"ablation-{full}.svg"] = drawing
        rows = [[full] + [cell for t in whole.values() for cell in (short(t), None)]]
        for change, us in changes.items():
            cells = [(short(us[s]), f"{100 * (us[s] / t - 1):+.0f}%") if s in us else (None, None) for s, t in whole.items()]
            rows.append([change, *(cell for pair in cells for cell in pair)])
        headers = ["taken back", *(h for shape in whole for h in (f"#{shape} µs", "#costs"))]
        text += [f"### {full}\n", picture(f"ablation-{full}.svg", f"What each knob of {full} is worth", "../", 480),
                 table(headers, rows)]
        text += [f"`{change}` is not legal alone: {why}\n" for change, why in refused.items()]
        text.append(provenance(source, "../"))
    return "\n".join(text), drawings


def draw_ablation(name):
    """The picture of one CSV of results/ablation/, for `ablate --svg`."""
    _, drawings = ablation_section([read(ROOT / name, ["ablation"])])
    for picture_name, drawing in drawings.items():
        write(ROOT / "results" / picture_name, standalone(drawing))


def rungs_section(source):
    """TFLOP/s of every wgmma line at the peers' problems: a row a problem, a table per head size."""
    tables = collections.defaultdict(lambda: collections.defaultdict(dict))
    for row, _ in timed(source):
        if not peer(row):
            tables[row["D"]][problem(row)][row["config"]] = short_rate(source, row)
    text = []
    for rates in tables.values():
        lines = list(dict.fromkeys(name for at in rates.values() for name in at))
        if len(lines) > 1:
            text.append(table(["TFLOP/s", *("#" + name for name in lines)],
                              [[what, *(at.get(name) for name in lines)] for what, at in rates.items()]))
    return "\n".join(text)


def rested_section(source):
    """TFLOP/s of the fastest line and the peers in the first milliseconds after a rest."""
    best = {what: at for what, at in fastest([source]).items() if "line" in at}
    names = [n for n in PEERS.values() if any(n in at for at in best.values())]
    rows = [[what, at["line"][1]["config"], short_rate(source, at["line"][1]),
             *(short_rate(source, at[n][1]) if n in at else None for n in names)] for what, at in best.items()]
    return table(["problem", "fastest line", "#TFLOP/s", *(f"#{n}" for n in names)], rows)


def e4m3_section(source):
    """TFLOP/s of every e4m3 line and of cuDNN, with the error of the fastest line and of cuDNN."""
    rates, errors = collections.defaultdict(dict), collections.defaultdict(dict)
    for row, us in timed(source):
        name = PEERS.get(row["config"], row["config"])
        rates[problem(row)][name], errors[problem(row)][name] = (us, short_rate(source, row)), row["rel_rms"]
    ours = {what: min((n for n in at if n not in PEERS.values()), key=lambda n: at[n][0]) for what, at in rates.items()}
    rows = [[what, ours[what], at[ours[what]][1], at.get("cuDNN", ("", None))[1], errors[what][ours[what]], errors[what].get("cuDNN")]
            for what, at in rates.items()]
    return table(["problem", "fastest line", "#TFLOP/s", "#cuDNN", "#rel_rms", "#cuDNN's, O in e4m3"], rows)


def decode_section(source):
    """Few query rows: the fastest line of each family and cuDNN, and the rate at which the fastest reads K and V."""
    times = collections.defaultdict(dict)
    for row, us in timed(source):
        at, family = times[problem(row)], PEERS.get(row["config"], row["family"])
        if family not in at or us < at[family][0]:
            at[family] = us, row
    rows = []
    for what, at in times.items():
        cells = [at.get(family, (None, None)) for family in ("wgmma", "mma", "cuDNN")]
        us, row = min((cell for cell in cells[:2] if cell[0]), key=lambda cell: cell[0])
        bytes_ = math.prod(int(row[name]) for name in ("B", "Hkv", "Sk", "D")) * 2 * (1 if row["dtype"] in ("u8", "e4m3") else 2)
        rows.append([what, *(short(t) if t else None for t, _ in cells), f"{bytes_ / us / 1e6:.2f}",
                     f"{cells[2][0] / us:.2f}x" if cells[2][0] else None])
    return table(["problem", "#wgmma, µs", "#mma.sync, µs", "#cuDNN, µs", "#K and V, TB/s", "#times as fast"], rows)


def accuracy_section(source):
    """Errors by the number of keys: a row for each contender and measure."""
    keys = source.values("Sk")
    cells = collections.defaultdict(dict)
    for row in source.rows:
        name = f"`{row['contender']}` D={row['D']} {row['dtype']}"
        what, value = ("rel_rms", row["rel_rms"]) if row["input"] == "N(0,1)" else ("mean of O", row["mean"])
        cells[name, what][row["Sk"]] = value
    rows = [[name, what, *(at.get(key) for key in keys)] for (name, what), at in sorted(cells.items(), key=lambda item: item[0][1])]
    return table(["contender", "what", *(f"#{int(key):,} keys" for key in keys)], rows)


def none_yet(kind):
    return f"None on this GPU yet: `{KINDS[kind][2]}` measures it.\n"


def bugs_section(words):
    """The outcome of tests/bugs.py: how many bugs of which kind each net catches."""
    kinds, missed, kind = collections.defaultdict(collections.Counter), [], ""
    for line in words:
        name, verdict, net, *_ = [*line.split(), "", "", ""]
        if name == "#":
            kind = line[2:].strip()
        elif verdict == "caught":
            kinds[kind][net.partition(":")[0]] += 1
        elif verdict == "MISSED":
            missed.append(name)
    if not kinds:
        raise Refused("stdin has no line of tests/bugs.py")
    nets = ("check", "backend", "thread", "address")
    rows = [[kind, *(count[net] or None for net in nets)] for kind, count in kinds.items()]
    rows.append([f"all: {sum(sum(count.values()) for count in kinds.values())}",
                 *(sum(count[net] for count in kinds.values()) for net in nets)])
    return table(["bugs", *("#" + net for net in nets)], rows) + (f"\nMissed: {', '.join(missed)}\n" if missed else "")


# ---- the pages ----

def replaced(text, name, body):
    """TEXT with BODY between the markers of NAME."""
    return re.sub(rf"(<!-- {name}:begin[^\n]*-->\n).*?(<!-- {name}:end -->)", lambda m: m[1] + body + m[2], text,
                  flags=re.S)


def put(root, sections):
    """Writes the SECTIONS into the pages that have their markers."""
    pages = {}
    missing = set(sections)
    for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        pages[path] = path.read_text(encoding="utf-8")
        for name, body in sections.items():
            if f"<!-- {name}:begin" in pages[path]:
                missing.discard(name)
                pages[path] = replaced(pages[path], name, body)
    if missing:
        raise Refused(f"no page has the markers of {', '.join(sorted(missing))}")
    for path, text in pages.items():
        if text != path.read_text(encoding="utf-8"):
            write(path, text)


def kept_sentences(root):
    """{line: the last cell of its row} of the ladder's tables."""
    path = root / "docs/LADDER.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    section = re.search("<!-- ladder:begin.*?<!-- ladder:end -->", text, re.S)
    return dict(re.findall(r"^\| (\w+) \|(?:[^|\n]*\|){3} ([^|\n]*) \|$", section[0], re.M)) if section else {}


def drawn(results, named=()):
    """All sections and pictures of the CSVs of results/."""
    root, found = results.parent, newest(results, named)
    main = found["lines"][-1]
    if not any(row["shape"] in ("mission", "long") for row, _ in timed(main)):
        raise Refused(f"{main.path} has no row with a time for mission or long; measure on a GPU with ./run_all.sh")
    results, chart = results_section(found.get("peers", [main])[-1])
    ladder, rungs = ladder_section(main, root / "configs.txt", kept_sentences(root))
    ablation, waterfalls = ablation_section(found.get("ablation", []))
    sections = {"results": results, "ladder": ladder, "ablation": ablation or none_yet("ablation")}
    for name, section in (("rungs", rungs_section), ("rested", rested_section), ("e4m3", e4m3_section),
                          ("decode", decode_section), ("accuracy", accuracy_section)):
        kind = "peers" if name == "rungs" else name
        source = found.get(kind, [None])[-1]
        sections[name] = section(source) + "\n" + provenance(source, "../") if source else none_yet(kind)
    return sections, {**chart, **rungs, **waterfalls}


def main():
    options = cli.parse_options(__doc__, cli.MOST)
    if options.bugs:
        put(ROOT, {"bugs": bugs_section(sys.stdin)})
        return 0
    for word in options.words:
        if not Path(word).is_file():
            raise Refused(f"{word}: no such file")
    sections, pictures = drawn(ROOT / "results", [Path(word).resolve() for word in options.words])
    put(ROOT, sections)
    for name, drawing in pictures.items():
        write(ROOT / "results" / name, standalone(drawing))
    for path in (ROOT / "results").glob("*.svg"):  # of a line without ablation any more, for one
        if path.name not in pictures:
            path.unlink()
    cli.say(f"drawn: {', '.join(sections)}; {', '.join(pictures)}")
    return 0


if __name__ == "__main__":
    cli.command("results", main)
