"""The parts of results/report.html: numbers, tables, figures with their provenance, and the file itself."""
import collections
import html
import math
import re
import string
from pathlib import Path

from builds import replace_file as write  # noqa: F401, for page.py
from report_rows import KINDS, number

TEMPLATE = Path(__file__).with_name("report.html")


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


def table(headers, rows, *sources, attributes="", first=lambda row: False, wide=()):
    """A table in a box of its own scrolling, and its provenance. A header with a # is of numbers; WIDE columns wrap."""
    marks = [' class="n"' if header[0] == "#" else ' class="wide"' if header in wide else "" for header in headers]
    head = "".join(f'<th scope="col"{mark}>{html.escape(text.lstrip("#"))}</th>' for text, mark in zip(headers, marks))
    body = "\n".join(f"<tr{' class=first' if first(row) else ''}>" + "".join(
        f"<td{mark}>{cell(value)}</td>" for value, mark in zip(row, marks)) + "</tr>" for row in rows)
    return (f'<div class="box" tabindex="0"><table {attributes}>\n<thead><tr>{head}</tr></thead>\n'
            f"<tbody>\n{body}\n</tbody></table></div>" + (provenance(*sources) if sources else ""))


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


def page_of(title, body):
    """The template with TITLE and BODY, and a class for each different style of the charts' elements."""
    classes = {}
    body = re.sub(r'style="([^"]*)"', lambda m: f'class="{classes.setdefault(m[1], f"s{len(classes)}")}"', body)
    styles = "\n".join(f".{name} {{ {style} }}" for style, name in classes.items())
    template = string.Template(TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(title=html.escape(title), styles=styles, body=body)
