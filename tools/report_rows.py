"""Reads the CSVs of results/, selects those that the pages show, and interprets their rows."""
import collections
import csv
import itertools
import math
import re
from pathlib import Path

from builds import Tree
from cli import Refused

RUN = "config family shape status check graph_us tflops B Hq Hkv Sq Sk D dtype causal device git_sha knobs note".split()
ANY = "(-.*)?"
# results/FOLDER/DATE-DEVICE + NAME (a regular expression), the required columns, the command that writes such rows.
Kind = collections.namedtuple("Kind", "folder name columns command")
KINDS = {
    "lines": Kind("lines", "", RUN, "./run_all.sh"),
    "e4m3": Kind("peers", "-e4m3", (*RUN, "rel_rms"), "tools/peers.py LINE... --e4m3"),
    "decode": Kind("peers", "-decode", RUN, "tools/peers.py LINE... --shape S..."),
    "field": Kind("peers", "-field", RUN, "tools/peers.py LINE... --field"),
    "published": Kind("peers", "-published", RUN, "tools/peers.py LINE... --published"),
    "rested": Kind("peers", "-rested", RUN, "tools/peers.py --rested LINE... --shape S..."),
    "peers": Kind("peers", "", RUN, "tools/peers.py LINE... --shape S..."),
    "wgmma": Kind("ladder", "-wgmma", RUN, "tools/peers.py LINE... --shape S..."),
    "rungs": Kind("ladder", "-rungs", (*RUN, "peak_share", "unit", "unit_share", "waits_for"), "./run_all.sh rungs"),
    "claims": Kind("ladder", "-claims", "line over shape low high".split(), "./run_all.sh gates --time"),
    "ablation": Kind("ablation", ANY, RUN, "./run_all.sh ablate LINE"),
    "accuracy": Kind("accuracy", "", "contender input D dtype Sk rel_rms mean".split(), "tools/accuracy.py LINE..."),
    "samples": Kind("ab", ANY, "comparison contender problem turn replay us".split(), "./run_all.sh ab LINE KNOB=VALUE..."),
    "verdicts": Kind("ab", ANY, "comparison a b problem ratio low high verdict".split(), "./run_all.sh ab or tests/ab_trial.py"),
    "sweep": Kind("sweep", ANY, (), "./run_all.sh sweep"),
    "stress": Kind("stress", ANY, (), "./run_all.sh stress"),
}
PEERS = {"torch_cudnn": "cuDNN", "torch_flash": "FlashAttention-2", "torch_efficient": "memory-efficient",
         "torch_math": "PyTorch math", "torch_fa3": "FlashAttention-3",
         "torch_fa3_tokenspeed": "FlashAttention-3 (tokenspeed)", "torch_fa4": "FlashAttention-4",
         "flashinfer": "FlashInfer"}
OURS = "fastest line"
FULL = 80  # a unit with at least this utilization (%) limits a kernel; below it, the stall reason matters
NUMBERS = ("graph_us", "tflops", "us", "ratio", "low", "high")


# ---- reading ----

class Source(collections.namedtuple("Source", "path kind rows")):
    """A CSV of results/: its rows (the columns NUMBERS as float or None), and its name on the pages."""

    @property
    def name(self):
        """The path relative to the parent folder of results/."""
        return str(Path("results", KINDS[self.kind].folder, self.path.name))

    def values(self, column):
        """The distinct nonempty values of a column, in order."""
        return list(dict.fromkeys(filter(None, (row.get(column) for row in self.rows))))

    @property
    def measured_on(self):
        """GPU, driver, CUDA, commits and date, as far as they are known, as text."""
        known = [(word, ", ".join(self.values(column))) for word, column in
                 (("", "device"), ("driver ", "driver"), ("CUDA ", "cuda"), ("commit ", "git_sha"))]
        return ", ".join([word + values for word, values in known if values] + [self.path.name[:10]])


def device_slug(path):
    """The file name without date and number: the device, and possibly what was measured."""
    return re.sub(r"^\d{4}-\d\d-\d\d-|-\d{1,2}$", "", path.stem)


def by_name(path):
    """A sort key that compares numbers in names numerically, like sort -V: 2 before 10, name before name-2."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.stem)]


def read(path, kinds):
    """Reads PATH as the first of KINDS whose columns it has."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows, columns = [*reader], reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Refused(f"{path} cannot be read: {error}") from error
    kind = next((kind for kind in kinds if set(KINDS[kind].columns) <= set(columns)), kinds[0])
    if kind != "rungs":  # the other pages show only the forward pass
        rows = [row for row in rows if row.get("pass") != "backward"]
    missing = [column for column in KINDS[kind].columns if column not in columns]
    uneven = any(None in row or None in row.values() for row in rows)
    trouble = (f"lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}" if missing else
               "has no rows" if not rows else "has a row of another length than its header" if uneven else "")
    if trouble:
        raise Refused(f"{path} {trouble}; measure it again with {KINDS[kind].command}, or delete it")
    for row, column in itertools.product(rows, [name for name in NUMBERS if name in columns]):
        if not row[column]:
            row[column] = None
            continue
        try:
            value = float(row[column])
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf or (value == 0 and column != "tflops"):
            raise Refused(f"{path} has {row[column]!r} in its column {column}, which is not a valid number")
        row[column] = value
    return Source(path, kind, rows)


def kinds_of(path, device):
    """The kinds that fit a file's folder and name; DEVICE is a regular expression. Rungs may come from any device, since
    they are compared only within their file."""
    return [kind for kind, about in KINDS.items() if about.folder == path.parent.name and
            re.fullmatch((".*" if kind == "rungs" else device) + about.name, device_slug(path))]


def newest(results, named=()):
    """{kind: [newest Source of each name]}; a NAMED file replaces the newest of its kind."""
    folders = {about.folder for about in KINDS.values()} - {"lines"}  # named files from other folders contain lines
    mains = sorted(results.glob("lines/*.csv"), key=by_name) + [p for p in named if p.parent.name not in folders]
    if not mains:
        raise Refused(f"{results} has no CSV of lines (lines/DATE-DEVICE.csv); measure first with ./run_all.sh")
    last, device = {}, re.escape(device_slug(mains[-1]))
    for path in sorted(results.glob("*/*.csv"), key=by_name) + list(named):
        kinds = kinds_of(path, ".*" if path in named else device)
        if kinds and path.parent.name in folders:
            last[path.parent.name, device_slug(path)] = path, kinds
    found = collections.defaultdict(list, lines=[read(mains[-1], ["lines"])])
    for _, (path, kinds) in sorted(last.items()):
        source = read(path, kinds)
        found[source.kind].append(source)
    return found


# ---- what rows mean ----

def peer(row):
    """True for a competitor's row, which has a time but no check."""
    return not row["check"] and bool(row["graph_us"])


def name_of(row):
    """The name of a row's line or competitor on the pages."""
    return PEERS.get(row["config"], row["config"])


def problem(row):
    """The problem as text: B,Hq,Hkv,Sq,Sk,D, type and mask."""
    words = ",".join(row[c] for c in ("B", "Hq", "Hkv", "Sq", "Sk", "D")) + " " + row["dtype"]
    words += {"off": "", "br": " causal"}.get(row["causal"], " causal " + row["causal"])
    return words + (f" window {row['window']}" if row.get("window") else "")


def timed(source):
    """Yields (row, µs) of valid timed rows: competitors, and lines that passed, except negative controls."""
    # A negative control may pass by luck.
    racy = {row["config"] for row in source.rows if row["note"].startswith("expected failure")}
    for row in source.rows:
        if row["graph_us"] and (row["check"] == "PASS" or peer(row)) and row["config"] not in racy:
            yield row, row["graph_us"]


def short(t):
    """A time with three significant digits."""
    return f"{t:.2f}" if t < 9.995 else f"{t:.1f}" if t < 99.95 else f"{t:.0f}"


def fastest(source, group=lambda row: OURS):
    """{problem: {group of a line or name of a competitor: (µs, row) of its fastest}}, for the problems that lines have."""
    best, ours = collections.defaultdict(dict), {problem(row) for row, _ in timed(source) if not peer(row)}
    for row, us in timed(source):
        what, name = problem(row), name_of(row) if peer(row) else group(row)
        if us < best[what].get(name, (math.inf,))[0]:
            best[what][name] = us, row
    return {what: at for what, at in best.items() if what in ours}


def bases(source):
    """{line: its base} for lines of SOURCE: from `NAME : BASE` in configs.txt, else from gate:step-over=BASE."""
    lines, found = source.values("config"), {}
    for name, line in Tree().config_lines().items():
        step = re.search(r"gate:step-over=(\w+):", " ".join(line.gates))
        base = line.base or (step and step[1])
        if base in lines:
            found[name] = base
    return found
