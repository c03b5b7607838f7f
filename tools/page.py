#!/usr/bin/env python3
"""usage: ./run_all.sh results [CSV]...
       ./run_all.sh results --diffs [REGEX]...
Updates the generated parts of README.md and docs/ and the pictures of results/ from the CSVs in results/: the given CSVs,
else the newest of each kind (by name). Generated are the text between <!-- NAME:begin --> and <!-- NAME:end -->, each
number before <!--=NAME-->, and the call chains of docs/READING.md, which come from sdpa.cu. The last column of
the tables `story` and `ladder`, and the names of problems in README, are written by hand and preserved.
  --diffs  update only the diffs of docs/LADDER.md, all or those of matching rungs; takes about 4 minutes
exit: 0, 2 bad usage or a file that cannot be read
"""
import collections
import csv
import math
import re
import shlex
from pathlib import Path

import cli
import ladders
from builds import replace_file as write
from cli import Refused
from report_charts import against, over_lengths, waterfall
from report_rows import (KINDS, OURS, PEERS, bases, by_name, device_slug, fastest, newest, peer, problem, read, short,
                         timed)

ROOT = Path(__file__).resolve().parent.parent


# ---- Markdown ----

def table(headers, rows):
    """A table. Headers that begin with # are numeric columns. None is an empty cell."""
    def line(cells):
        return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"
    rule = "|" + "|".join("--:" if header[:1] == "#" else "---" for header in headers) + "|"
    return "\n".join([line(header.lstrip("#") for header in headers), rule, *map(line, rows)]) + "\n"


def pivot(titles, cells):
    """A table of {(title, ...): {column: number as text}}; TITLES are the headers of the title columns."""
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    return table([*titles, *("#" + column for column in columns)],
                 [[*title, *map(row.get, columns)] for title, row in cells.items()])


def picture(name, words, width=380):
    """An image of results/ in a page of docs/."""
    return f'<img src="../results/{name}" width="{width}" alt="{words}">\n'


def provenance(source, up=""):
    """The machine on which a file was measured, and a link to the file."""
    return f"{source.measured_on}: [{source.name}]({up}{source.name})\n"


def rate(row):
    """TFLOP/s of a row, rounded to an integer."""
    return f"{row['tflops'] or 0:.0f}"


def times(at, names):
    """{"NAME, µs": time or None} at a problem of fastest()."""
    return {f"{name}, µs": short(at[name][0]) if name in at else None for name in names}


# ---- sections: those with pictures return (Markdown, {picture: drawing}), the others Markdown ----

def generated(path, section):
    """The text between the markers of a section in a page."""
    text = (ROOT / path).read_text(encoding="utf-8").partition(f"<!-- {section}:begin")[2]
    return text.partition("-->\n")[2].partition(f"<!-- {section}:end")[0]


def by_hand(path, section, row=r"^\| (\w+) \|(?:[^|\n]*\|){3} ([^|\n]*) \|$"):
    """The hand-written cells of a section's rows: by default the name and the last of five cells."""
    return re.findall(row, generated(path, section), re.M)


def peers_sections(source, main):
    """The fastest line and the competitors at each problem: a full table, and one of the problems that README's table names."""
    best = {what: at for what, at in fastest(source).items() if at[OURS][1]["shape"] != "small"}
    names = [name for name in PEERS.values() if any(name in at for at in best.values())]
    shares = [(float(row["peak_share"]), row["tflops"]) for row, _ in timed(main)
              if row.get("bound") == "matrix" and row["dtype"] != "e4m3"]
    peak = round(max(shares)[1] / max(shares)[0], -1) if shares else None  # the largest share has the smallest rounding error
    titles, cells, bars = {}, {}, {}
    for what, at in best.items():
        (us, row), others = at[OURS], [at[name][0] for name in names if name in at]
        gain = f"{min(others) / us:.2f}x" if others else ""
        titles[what] = (row["shape"] + ": ") * row["shape"][:1].isalpha() + what, row["config"]
        share = {"of peak": f"{100 * row['tflops'] / peak:.0f}%"} if peak and row["tflops"] else {}
        cells[what] = {"µs": short(us), "TFLOP/s": rate(row), **share, **times(at, names), "times as fast": gain}
        bars[what] = {name.replace(OURS, "sdpa"): row["tflops"] or 0 for name, (_, row) in at.items()}, gain
    words = (f"The peak is {peak:,.0f} TFLOP/s. " if peak else "") + versions(source)
    named = by_hand("README.md", "results", r"^\| (\w[^|]*) \| (\d[^|]*) \|")
    few = pivot(["problem", "B,Hq,Hkv,Sq,Sk,D"], {(name, what): cells.get(what, {}) for name, what in named})
    whole = picture("peers/all.svg", "TFLOP/s of sdpa and competitors") + "\n" + pivot(
        ["problem (B,Hq,Hkv,Sq,Sk,D)", OURS], {titles[what]: cells[what] for what in best})
    every = [(what.replace(" fp16", ""), *bars[what]) for what in best]
    drawings = {f"peers/{name}.svg": against(rows, ["sdpa", *names], width) for name, rows, width in (
        ("peers", [(name, *bars[what]) for name, what in named if what in bars] or every, 500), ("all", every, 380))}
    return {"results": f"{few}\n{words}{provenance(source)}",
            "peers": f"{whole}\n{words}{provenance(source, '../')}"}, drawings


def versions(source):
    """A sentence with the competitors and their versions; "" if no row has them."""
    every = dict.fromkeys(row["note"].partition(";")[0] for row in source.rows if peer(row) and row["note"])
    named = [one for one in every if not any(other != one and other.startswith(one) for other in every)]
    return f"Competitors: {', '.join(named)}. " * bool(named)


def field_section(source):
    """TFLOP/s by sequence length, of the fastest line and the competitors, for each D and mask."""
    panels, cells = collections.defaultdict(lambda: collections.defaultdict(dict)), collections.defaultdict(dict)
    for at in fastest(source).values():
        row = at[OURS][1]
        title, length = f"D={row['D']}" + ", causal" * (row["causal"] != "off"), int(row["Sk"])
        for name, (_, one) in at.items():
            panels[title][name.replace(OURS, "sdpa")][length] = one["tflops"] or 0
        others = [us for name, (us, _) in at.items() if name != OURS]
        cells[title,][f"{length:,}"] = rate(row) + (f" ({min(others) / at[OURS][0]:.2f}x)" if others else "")
    series = ["sdpa", *(name for name in PEERS.values() if any(name in values for values in panels.values()))]
    limits = {f"cuBLAS, {row['shape']}": row["tflops"] for row in source.rows if row["config"] == "torch_matmul"}
    drawn_as = picture("peers/field.svg", "TFLOP/s over the length of sequences", 600)
    rates = pivot(["TFLOP/s (times the best competitor's)"], cells)
    return f"{drawn_as}\n{rates}\n{versions(source)}{provenance(source, '../')}", {
        "peers/field.svg": over_lengths([*panels.items()], series, limits)}


def published_section(source):
    """TFLOP/s at problems with published numbers. The published numbers, in the second column, are written by hand."""
    by_others, cells = dict(by_hand("docs/NUMBERS.md", "published", r"^\| (\d[^|]*) \| ([^|\n]*) \|")), {}
    for what, at in fastest(source).items():
        others = [us for name, (us, _) in at.items() if name != OURS]
        gain = {"times as fast": f"{min(others) / at[OURS][0]:.2f}x"} if others else {}
        rates = {name: rate(at[name][1]) if name in at else None for name in (OURS, *PEERS.values())}
        cells[what, by_others.get(what, "")] = {**rates, **gain}
    columns = [name for name in (OURS, *PEERS.values(), "times as fast") if any(row.get(name) for row in cells.values())]
    cells = {title: {name: row.get(name) for name in columns} for title, row in cells.items()}
    return pivot(["problem", "published"], cells) + "\n" + versions(source).strip()


def story_section(source):
    """README's table of some lines at mission. The choice of lines and their sentences are written by hand."""
    at = {row["config"]: (us, rate(row)) for row, us in timed(source) if row["shape"] == "mission"}
    rows, first = [], None
    for name, words in by_hand("README.md", "story"):
        us, tflops = at.get(name, (None, None))
        first = first or us
        rows.append([name, *((short(us), f"{first / us:.1f}x") if us else (None, None)), tflops, words])
    return table(["line, by time", "#µs", "#speed-up", "#TFLOP/s", "what is new"], rows) + "\n" + provenance(source)


def ladder_section(source):
    """All lines of configs.txt with their bases, in tables with hand-written sentences."""
    row_of, families = {}, collections.defaultdict(list)
    for row in source.rows:
        if row["family"] and row["config"] not in row_of:
            row_of[row["config"]] = row
            sizes = "" if row["family"] != "wgmma" else " D=64" if row["D"] == "64" else " D=128, 256"
            families[row["family"] + sizes].append(row["config"])
    us = collections.defaultdict(dict)
    for row, t in timed(source):
        us[row["config"]][row["shape"]] = t
    sentences = dict(by_hand("docs/NUMBERS.md", "ladder"))
    text, base = [], bases(source)
    for family, lines in families.items():
        rows = []
        for name in lines:
            at, before, step = us[name], us[base.get(name)], None
            if name in base:
                old, new = (shlex.split(row_of[line]["knobs"]) for line in (base[name], name))
                step = f"{base[name]}: {' '.join(knob for knob in new if knob not in old)}"
            gains = [short(at[shape]) + (f" ({before[shape] / at[shape]:.2f}x)" if shape in before else "")
                     if shape in at else None for shape in ("mission", "long")]
            rows.append([name, step, *gains, sentences.get(name)])
        headers = ["line", "base: change", "#mission µs (gain)", "#long µs (gain)", "result"]
        text += [f"### {family}\n", table(headers, rows)]
    return "\n".join(text) + "\n" + provenance(source, "../")


def taken_back(row, full):
    """The "KNOB=VALUE KNOB=VALUE" of a config named FULL__KNOB_VALUE__KNOB_VALUE; "" for FULL itself."""
    return " ".join(re.sub(r"_([^_]*)$", r"=\1", part) for part in row["config"][len(full):].strip("_").split("__"))


def ablation_section(sources):
    """A picture and a table of each ablation."""
    text, drawings = [], {}
    for source in sources:
        full = source.rows[0]["config"]
        changes = collections.defaultdict(dict)
        for row, us in timed(source):
            changes[taken_back(row, full)][row["shape"]] = us
        whole = changes.pop("", {})
        drawing = waterfall(full, whole, changes)
        if not drawing:
            raise Refused(f"{source.path} has no row with a time for {full}, or none without one of its knobs")
        drawings[f"ablation/{full}.svg"] = drawing
        rows = [[full, *(cell for t in whole.values() for cell in (short(t), None))]]
        for change, us in changes.items():
            rows.append([change, *(cell for shape, t in whole.items() for cell in (
                (short(us[shape]), f"{100 * (us[shape] / t - 1):+.0f}%") if shape in us else (None, None)))])
        headers = ["knob reset", *(h for shape in whole for h in (f"#{shape} µs", "#costs"))]
        drawn_as = picture(f"ablation/{full}.svg", f"What each knob of {full} is worth", 480)
        refused = {taken_back(row, full): row["note"] or f"{row['status']} {row['check']}" for row in source.rows}
        text += [f"### {full}\n", drawn_as, table(headers, rows),
                 *(f"`{change}` cannot be reset alone: {why.strip()}\n" for change, why in refused.items()
                   if change and change not in changes), provenance(source, "../")]
    return "\n".join(text), drawings


def draw_ablation(name):
    """The picture of one CSV of results/ablation/, for `ablate --svg`."""
    for picture_name, drawing in ablation_section([read(ROOT / name, ["ablation"])])[1].items():
        write(ROOT / "results" / picture_name, drawing)


def wgmma_section(source):
    """TFLOP/s of all wgmma lines at the problems of the competitors, a table per head size."""
    tables = collections.defaultdict(lambda: collections.defaultdict(dict))
    for row in (row for row, _ in timed(source) if not peer(row)):
        tables[row["D"]][problem(row),][row["config"]] = rate(row)
    return "\n".join(pivot(["TFLOP/s"], cells) for cells in tables.values())


def rates_section(source):
    """TFLOP/s of the fastest line and the competitors; for e4m3 also the errors of the line and of cuDNN."""
    cells = {}
    for what, at in fastest(source).items():
        _, ours = at.pop(OURS)
        cells[what, ours["config"]] = {"TFLOP/s": rate(ours), **{name: rate(row) for name, (_, row) in at.items()}}
        if source.kind == "e4m3":
            peer_error = at["cuDNN"][1]["rel_rms"] if "cuDNN" in at else None
            cells[what, ours["config"]] |= {"rel_rms": ours["rel_rms"], "cuDNN's, O in e4m3": peer_error}
    return pivot(["problem", OURS], cells)


def decode_section(source):
    """Few query rows: the fastest line of each family, cuDNN, and the bandwidth with which the fastest reads K and V."""
    cells = {}
    for what, at in fastest(source, lambda row: {"mma": "mma.sync"}.get(row["family"], row["family"])).items():
        us, row = min((at[family] for family in ("wgmma", "mma.sync") if family in at), key=lambda cell: cell[0])
        element = 1 if row["dtype"] in ("u8", "e4m3") else 2  # bytes
        read_bytes = 2 * math.prod(int(row[name]) for name in ("B", "Hkv", "Sk", "D")) * element
        cells[what,] = {**times(at, ("wgmma", "mma.sync", "cuDNN")), "K and V, TB/s": f"{read_bytes / us / 1e6:.2f}",
                        "times as fast": f"{at['cuDNN'][0] / us:.2f}x" if "cuDNN" in at else None}
    return pivot(["problem"], cells)


def accuracy_section(source):
    """Errors by the number of keys, a row per contender and measure."""
    cells = collections.defaultdict(dict)
    for row in source.rows:
        is_normal = row["input"] == "N(0,1)"
        what, value = ("rel_rms", row["rel_rms"]) if is_normal else (f"mean of O, {row['input']}", row["mean"])
        cells[f"`{row['contender']}` D={row['D']} {row['dtype']}", what][f"{int(row['Sk']):,} keys"] = value
    return pivot(["contender", "what"], dict(sorted(cells.items(), key=lambda item: item[0][1])))


def ranked_section(source):
    """Some lines of the table that ./run_all.sh prints for mission. The choice of lines is written by hand."""
    old = generated("docs/USING.md", "ranked")
    rows = {row["config"]: row for row, _ in timed(source) if row["shape"] == "mission"}
    if not rows:
        return old
    base, slowest = next(iter(rows.values())), max(row["graph_us"] for row in rows.values())
    names = re.findall(r"^(\w+) +PASS", old, re.M)
    shown = sorted((rows[name] for name in names if name in rows), key=lambda row: row["graph_us"])
    lines = [f"mission, D={base['D']} {base['dtype']}, base {base['config']}",
             f"{'line':24} {'check':8} graph_us  TFLOP/s   peak   of base", "  ..."]
    for row in shown:
        us, share = row["graph_us"], f"{100 * float(row.get('peak_share') or 0):.1f}%"
        lines.append(f"{row['config']:24} {row['check']:4} {us:12.2f} {row['tflops'] or 0:8.2f} {share:>6} "
                     f"{base['graph_us'] / us:8.2f}x {'#' * math.ceil(28 * us / slowest)}")
    return "```\n" + "\n".join(lines) + f"\n```\n\n{provenance(source, '../')}"


def chains_section():
    """The call chains from each kernel to its instructions, and their lengths."""
    import chains  # imported here, since only this section needs tree-sitter
    found = chains.chains((ROOT / "sdpa.cu").read_text(encoding="utf-8"))
    targets = chains.K_COPY, chains.PRODUCT, chains.EXPONENTIAL
    frames = table(["frames", *("#" + target for target in targets)],
                   [[name, *(len(found[name, target]) for target in targets)] for name in chains.COLUMNS])
    text = "\n".join(f"{name}\n" + "".join(f"  {target + ':':10} {' > '.join(found[name, target])}\n" for target in targets)
                     for name in chains.COLUMNS)
    return f"{frames}\n```\n{text}```\n"


# ---- numbers in sentences ----

def latest(folder, name):
    """The newest results/FOLDER/DATE-NAME.csv; None if there is none."""
    files = [path for path in (ROOT / "results" / folder).glob("*.csv") if device_slug(path) == name]
    return max(files, key=by_name, default=None)


NUMBER = re.compile(r"([\d.]+)(?=<!--=([\w.]+)-->)")
# Speed-ups over the best competitor: the file in results/peers, and a filter of its problems.
GAINS = {
    "suite": ("NVIDIA-H200", lambda row: row["shape"] != "small"),
    "lengths": ("NVIDIA-H200-field", lambda row: True),
    "h100": ("NVIDIA-H100", lambda row: row["shape"] != "small"),
    "e4m3": ("NVIDIA-H200-e4m3", lambda row: True),
    "e4m3_h100": ("NVIDIA-H100-e4m3", lambda row: True),
    "behind": ("NVIDIA-H200-behind", lambda row: True),
    "decode": ("NVIDIA-H200-decode", lambda row: row["Sq"] == "1"),
    "drawn": ("NVIDIA-H200-drawn", lambda row: True),
    "drawn_decode": ("NVIDIA-H200-drawn", lambda row: row["Sq"] == "1"),
    "chunks": ("NVIDIA-H200-chunks", lambda row: row["dtype"] == "bf16"),
}
# The same for rows of tools/frameworks.py: the file in results/frameworks, and the competitor. "OTHER, pages of 16" is
# compared with "sdpa, pages of 16".
FRAMEWORKS = {
    "mixed": ("NVIDIA-H100-lengths", "FlashAttention-3"),
    "pages": ("NVIDIA-H100-lengths", "FlashInfer"),
    "training": ("NVIDIA-H200-training", "PyTorch"),
}


def peer_gains(path, counts):
    """The time of the best competitor divided by the time of the fastest line, for each selected problem."""
    for at in fastest(read(path, ["peers"])).values():
        others = [us for name, (us, _) in at.items() if name != OURS]
        if others and counts(at[OURS][1]):
            yield min(others) / at[OURS][0]


def framework_times(path):
    """{(what, problem): {contender: µs}}."""
    found = collections.defaultdict(dict)
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found[row["what"], row["problem"]][row["contender"]] = float(row["us"])
    return found


def framework_gains(path, other):
    for times_of in framework_times(path).values():
        yield from (us / times_of[name.replace(other, "sdpa", 1)] for name, us in times_of.items() if name.startswith(other))


def summary(name, gains):
    """Range, geometric mean and number of speed-ups."""
    mean = math.prod(gains) ** (1 / len(gains))
    return {f"{name}.least": f"{min(gains):.2f}", f"{name}.most": f"{max(gains):.2f}", f"{name}.mean": f"{mean:.2f}",
            f"{name}.count": str(len(gains))}


def numbers():
    """{NAME: the number before <!--=NAME-->}, if their files exist."""
    found = {}
    for name, (file, counts) in GAINS.items():
        if path := latest("peers", file):
            found |= summary(name, [*peer_gains(path, counts)])
    for name, (file, other) in FRAMEWORKS.items():
        if path := latest("frameworks", file):
            found |= summary(name, [*framework_gains(path, other)])
    if rows := backward_rows():
        for name, is_deterministic, counts in (("backward", False, lambda problem_text: not problem_text.endswith(",256")),
                                               ("backward_d256", False, lambda problem_text: problem_text.endswith(",256")),
                                               ("deterministic", True, lambda problem_text: True)):
            found |= summary(name, [*backward_gains(rows, is_deterministic, counts)])
        found |= summary("deterministic_costs", [
            float(at["sdpa"]["us"]) / float(rows[problem_text, mask, False]["sdpa"]["us"])
            for (problem_text, mask, is_deterministic), at in rows.items() if is_deterministic])
    if path := latest("frameworks", "NVIDIA-H200-mods"):
        alibi = framework_times(path)["ALiBi", "4,16,16,4096,4096,128"]
        for name, contender in (("alibi", "sdpa"), ("alibi_flex", "FlexAttention, TRITON")):
            found[name] = f"{alibi[contender] / alibi['sdpa, without the expression']:.2f}"
    for path in sorted((ROOT / "results/ab").glob("*-NVIDIA-H200-verdicts.csv"), key=by_name):
        for row in read(path, ["verdicts"]).rows:
            if (row["b"], row["problem"]) == ("mma_lazy STAGES=3", "long"):
                found["ab.first"] = f"{100 * row['ratio'] - 100:.1f}"
    if path := latest("ab", "NVIDIA-H200-trial"):
        trial = read(path, ["verdicts"]).rows
        for name, kinds, verdict in (("same", ("same",), "SAME"), ("more", ("1%", "0.5%"), "SLOWER")):
            verdicts = [row["verdict"] for row in trial if row["kind"] in kinds]
            found |= {f"ab.{name}": str(len(verdicts)), f"ab.{name}_right": str(verdicts.count(verdict))}
    return found


# ---- tables of tools/frameworks.py, and of problems on which a competitor is close ----

def digits(us):
    """A time with at least four digits."""
    return f"{us:,.0f}" if us >= 1000 else f"{us:.4g}"


def behind_section(path):
    cells = {}
    for what, at in fastest(read(path, ["peers"])).items():
        us, row = at[OURS]
        fa3 = at["FlashAttention-3"][0]
        v_size = ", V of 128" * ("V of 128" in row["note"])
        cells[what.replace(" bf16", "") + v_size,] = {"sdpa": digits(us), "FlashAttention-3": digits(fa3), "times as fast": f"{fa3 / us:.2f}x"}
    return pivot(["problem (B,Hq,Hkv,Sq,Sk,D)"], cells)


def training_section(path):
    cells = {}
    for (_, problem_text), us in framework_times(path).items():
        cells[problem_text,] = {"PyTorch, µs": digits(us["PyTorch"]), "sdpa, µs": digits(us["sdpa"]),
                                "times as fast": f"{us['PyTorch'] / us['sdpa']:.2f}x"}
    return pivot(["B,Hq,Hkv,S,D"], cells)


def lengths_section(path):
    sizes, cells = (16, 64, 256), {}
    for (_, sequences), us in framework_times(path).items():
        cells[sequences,] = {"sdpa": digits(us["sdpa"]), "FlashAttention-3": digits(us["FlashAttention-3"])}
        for name in ("sdpa", "FlashInfer"):
            paged = [digits(us[f"{name}, pages of {size}"]) for size in sizes if f"{name}, pages of {size}" in us]
            cells[sequences,][f"{name}, pages of 16; 64; 256"] = "; ".join(paged)
    return pivot(["queries to caches of keys"], cells)


def mods_section(path):
    """Time with an expression divided by the time without it, a row per expression and a column per head size."""
    expressions = {"identity": "`s + 0.f`", "ALiBi": "`s - x0[h] * real(q + Sk - Sq - k)` (ALiBi)",
                   "softcap": "`30 * tanh_approx(s / 30)`, against `softcap=30`",
                   "causal": '`k <= q + Sk - Sq` with a kept map, against `causal="br"`'}
    cells = collections.defaultdict(dict)
    for (what, problem_text), us in framework_times(path).items():
        if what in expressions and problem_text.startswith("4,"):
            for name, contender in (("sdpa", "sdpa"), ("FlexAttention", "FlexAttention, TRITON")):
                cells[expressions[what],][f"{name}, D={problem_text.rpartition(',')[2]}"] = f"{us[contender] / us['sdpa, without the expression']:.2f}"
    return pivot(["expression"], cells)


# ---- the backward pass: rows of tools/frameworks.py --gradients ----

# In results/backward: PyTorch's kernels, a newer cuDNN, and FlashAttention-4. A ratio is to our time in the same file.
BACKWARD_FILES = ("NVIDIA-H200", "NVIDIA-H200-newer-cudnn", "NVIDIA-H200-fa4")


def backward_rows():
    """{(problem, "causal" or "", is it deterministic?): {contender: its row}} of the newest files. Our row is that of the first file
    with the problem."""
    found = collections.defaultdict(dict)
    for path in filter(None, (latest("backward", name) for name in BACKWARD_FILES)):
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                problem_text, _, mask = row["problem"].partition(" causal")
                mask = "causal" if row["problem"].endswith(" causal") else ""
                name = re.sub(r"^(cuDNN \d+\.\d+|FlashAttention-\d).*", r"\1", row["contender"])
                found[problem_text, mask, "deterministic" in row["what"]].setdefault(name, row)
    return found


def backward_gains(rows, is_deterministic, counts=lambda problem_text: True):
    """The time of the best competitor divided by ours, for each selected problem."""
    for (problem_text, _, mode), at in rows.items():
        others = [float(row["ratio"]) for name, row in at.items() if name != "sdpa"]
        if mode == is_deterministic and counts(problem_text) and others:
            yield min(others)


def backward_table(rows, is_deterministic):
    """TFLOP/s of the contenders, a row per problem. Each cell: without a mask, causal."""
    names = [name for name in dict.fromkeys(name for at in rows.values() for name in at) if name != "sdpa"]
    cells = collections.defaultdict(dict)

    def pair(problem_text, value):
        found = [value(rows.get((problem_text, mask, is_deterministic), {})) for mask in ("", "causal")]
        return ", ".join(one or "–" for one in found) if any(found) else None
    for problem_text in dict.fromkeys(problem_text for problem_text, *_ in rows):
        for name in ("sdpa", *sorted(names)):
            cells[problem_text,][name] = pair(problem_text, lambda at, name=name: at and name in at and f"{float(at[name]['tflops']):.0f}")
        cells[problem_text,]["times as fast"] = pair(problem_text, lambda at: len(at) > 1 and (
            f"{min(float(row['ratio']) for name, row in at.items() if name != 'sdpa'):.2f}"))
    columns = [name for name in next(iter(cells.values())) if any(row[name] for row in cells.values())]
    return pivot(["TFLOP/s"], {title: {name: row[name] for name in columns} for title, row in cells.items()})


def backward_sections():
    """The tables of the backward pass in README.md and docs/NUMBERS.md, and their picture."""
    rows = backward_rows()
    if not rows:
        return {}, {}
    bars = [(problem_text + (mask and " " + mask), {name: float(row["tflops"]) for name, row in at.items()},
             f"{min((float(row['ratio']) for name, row in at.items() if name != 'sdpa'), default=1):.2f}x")
            for (problem_text, mask, is_deterministic), at in rows.items() if not is_deterministic]
    series = ["sdpa", *sorted({name for _, values, _ in bars for name in values} - {"sdpa"})]
    files = [latest("backward", name) for name in BACKWARD_FILES]
    links = ", ".join(f"[{path.name}](../results/backward/{path.name})" for path in files if path)
    default = backward_table(rows, False)
    return ({"backward_short": default, "backward": f"{default}\n{links}\n", "deterministic": backward_table(rows, True)},
            {"backward/backward.svg": against(bars, series, 500)})


OF_ONE_FILE = {  # sections from a single file: its folder and name
    "behind": ("peers", "NVIDIA-H200-behind", behind_section), "training": ("frameworks", "NVIDIA-H200-training", training_section),
    "lengths": ("frameworks", "NVIDIA-H100-lengths", lengths_section), "mods": ("frameworks", "NVIDIA-H200-mods", mods_section)}


# ---- the pages ----

def put(sections, figures=None):
    """Writes SECTIONS {name: text} and FIGURES {name: number} to their markers in README.md and docs/."""
    pages = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
    missing = sections.keys() - re.findall(r"<!-- (\w+):begin", "".join(pages.values()))
    if missing:
        raise Refused(f"no page has the markers of {', '.join(sorted(missing))}")
    for path, text in pages.items():
        new = re.sub(r"(<!-- (\w+):begin[^\n]*-->\n)(.*?)(<!-- \2:end -->)",
                     lambda found: found[1] + sections.get(found[2], found[3]) + found[4], text, flags=re.S)
        new = NUMBER.sub(lambda found: (figures or {}).get(found[2], found[1]), new)
        if new != text:
            write(path, new)


def drawn(results, named=()):
    """All sections and pictures of the CSVs of results/."""
    found = newest(results, named)
    main = found["lines"][-1]
    if not any(row["shape"] in ("mission", "long") for row, _ in timed(main)):
        raise Refused(f"{main.path} has no row with a time for mission or long; measure on a GPU with ./run_all.sh")
    sections, charts = peers_sections(found.get("peers", [main])[-1], main)
    rungs, drawings = ladders.sections(found["rungs"], table, picture, provenance)
    ablation, waterfalls = ablation_section(found["ablation"])
    sections["field"], field = field_section(found["field"][-1]) if found["field"] else ("", {})
    sections.update(rungs, story=story_section(main), ladder=ladder_section(main), ablation=ablation,
                    ranked=ranked_section(main), chains=chains_section())
    for name, section in (("wgmma", wgmma_section), ("rested", rates_section), ("published", published_section), ("e4m3", rates_section),
                          ("decode", decode_section), ("accuracy", accuracy_section)):
        sections[name] = "".join(section(source) + "\n" + provenance(source, "../") for source in found[name][-1:])
    sections.update({name: section(path) for name, (folder, file, section) in OF_ONE_FILE.items() if (path := latest(folder, file))})
    of_gradients, gradients = backward_sections()
    sections.update(of_gradients)
    for name in [name for name, text in sections.items() if not text]:
        sections[name] = f"None on this GPU yet: `{KINDS[name].command}` measures it.\n"
    return sections, {**charts, **drawings, **waterfalls, **field, **gradients}


def main():
    options = cli.parse_options(__doc__, cli.MOST)
    if options.diffs:
        try:
            sections = ladders.diff_sections("|".join(options.words))
        except re.error:
            raise Refused(f"--diffs {' '.join(options.words)}: not a regular expression") from None
        if not sections:
            raise Refused(f"--diffs {' '.join(options.words)}: no rung of docs/LADDER.md has such a name")
        return put(sections)
    for word in options.words:
        if not Path(word).is_file():
            raise Refused(f"{word}: no such file")
        if Path(word).resolve().parent.parent != ROOT / "results":
            raise Refused(f"{word}: pages link to the CSVs, so move it to the folder of results/ for its kind (docs/NUMBERS.md)")
    sections, pictures = drawn(ROOT / "results", [Path(word).resolve() for word in options.words])
    put(sections, numbers())
    for name, drawing in pictures.items():
        write(ROOT / "results" / name, drawing)
    for folder in {(ROOT / "results" / name).parent for name in pictures}:
        for path in set(folder.glob("*.svg")) - {ROOT / "results" / name for name in pictures}:
            path.unlink()  # such as an ablation that was removed
    cli.say(f"drawn: {', '.join(sections)}; {', '.join(pictures)}")


if __name__ == "__main__":
    cli.command("results", main)
