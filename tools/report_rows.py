"""The CSVs of results/: which of them the page shows, and what their rows mean."""
import csv
import re
from dataclasses import dataclass
from pathlib import Path

from builds import Tree
from cli import Refused

RUN = "config family shape status check graph_us tflops B Hq Hkv Sq Sk D dtype causal device git_sha knobs note".split()
# Kind: folder, columns that it needs, and the command that makes such rows. A file of results/ab/ is of the first kind
# whose columns it has.
KINDS = {
    "lines": ("", RUN, "./run_all.sh"),
    "peers": ("peers", RUN, "tools/peers.py LINE... --shape S..."),
    "e4m3": ("e4m3", (*RUN, "rel_rms"), "tools/peers.py LINE... --e4m3"),
    "decode": ("decode", RUN, "tools/peers.py LINE... --shape S..."),
    "accuracy": ("accuracy", "contender input D dtype Sk rel_rms mean".split(), "tools/accuracy.py LINE..."),
    "ablation": ("ablation", RUN, "./run_all.sh ablate LINE"),
    "rested": ("rested", RUN, "tools/peers.py --rested LINE... --shape S..."),
    "samples": ("ab", "comparison contender problem turn replay us".split(), "./run_all.sh ab LINE KNOB=VALUE..."),
    "verdicts": ("ab", "comparison a b problem ratio low high verdict".split(), "./run_all.sh ab, or tools/ab_trial.py"),
    "steps": ("steps", (), "./run_all.sh gates --time"),
    "fit": ("fit", (), "./run_all.sh fit"),
    "variants": ("ab", (), "tools/peers.py LINE..."),
    "sweep": ("sweep", (), "./run_all.sh sweep"),
    "stress": ("stress", (), "./run_all.sh stress"),
}
PEERS = {"torch_cudnn": "cuDNN", "torch_flash": "FlashAttention-2", "torch_efficient": "memory-efficient",
         "torch_math": "PyTorch math", "torch_fa3": "FlashAttention-3", "torch_fa4": "FlashAttention-4",
         "flashinfer": "FlashInfer"}


# ---- reading ----

@dataclass
class Source:
    """A CSV of results/: its rows, and how the page names it."""
    path: Path
    kind: str
    rows: list

    @property
    def name(self):
        """The file's path from the folder above results/."""
        folder = KINDS[self.kind][0]
        return "/".join(filter(None, ("results", folder, self.path.name)))

    def values(self, column):
        """The different values of a column, in order, without the empty ones."""
        return list(dict.fromkeys(filter(None, (row.get(column) for row in self.rows))))

    @property
    def gpu(self):
        return ", ".join(self.values("device")) or device_slug(self.path).replace("-", " ")

    @property
    def measured_on(self):
        """GPU, driver, CUDA, commits and date, as a sentence's part; the file's name has the GPU and date too."""
        columns = ("driver", "cuda", "git_sha")
        driver, cuda, commit = (", ".join(self.values(column)) or "not recorded" for column in columns)
        return f"{self.gpu}, driver {driver}, CUDA {cuda}, commit {commit}, {self.path.name[:10]}"


def device_slug(path):
    """What a file's name says besides its date and number: the device, and perhaps what was measured."""
    return re.sub(r"^\d{4}-\d\d-\d\d-|-\d{1,2}$", "", path.stem)


def by_name(path):
    """A key that sorts a name's numbers as numbers, as sort -V does: 2 before 10, a name before name-2."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.stem)]


def read(path, kinds):
    """The Source at PATH, of the first of KINDS whose columns it has."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows, columns = list(reader), reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Refused(f"{path} cannot be read: {error}") from error
    kind = next((kind for kind in kinds if set(KINDS[kind][1]) <= set(columns)), None)
    if not kind:
        missing = [c for c in KINDS[kinds[0]][1] if c not in columns]
        raise Refused(f"{path} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
                      f"measure it again with {KINDS[kinds[0]][2]}, or delete it")
    if not rows or any(None in row or None in row.values() for row in rows):
        raise Refused(f"{path} has {'a row of another length than its header' if rows else 'no rows'}; measure it "
                      f"again with {KINDS[kind][2]}, or delete it")
    return Source(path, kind, rows)


def number(source, row, column):
    """A cell as a float; None where it is empty."""
    text = row.get(column, "")
    try:
        return float(text) if text else None
    except ValueError:
        raise Refused(f"{source.path} has {text!r} in its column {column}, which is no number") from None


def newest(results, named=()):
    """{kind: [the newest Source of each name]}; a NAMED file is taken for the newest of its kind."""
    folders = {about[0] for about in KINDS.values() if about[0]}
    mains = sorted(results.glob("[0-9]*.csv"), key=by_name) + [p for p in named if p.parent.name not in folders]
    if not mains:
        raise Refused(f"{results} has no CSV of lines (DATE-DEVICE.csv); measure first with ./run_all.sh")
    found = {"lines": [read(mains[-1], ["lines"])]}
    last = {}
    for path in sorted(results.glob("*/*.csv"), key=by_name) + [p for p in named if p.parent.name in folders]:
        if path in named or device_slug(path).startswith(device_slug(mains[-1])):
            last[path.parent.name, device_slug(path)] = path
    for (folder, _), path in sorted(last.items()):
        if folder in folders:
            source = read(path, [kind for kind, about in KINDS.items() if about[0] == folder])
            found.setdefault(source.kind, []).append(source)
    return found


# ---- what rows mean ----

def peer(row):
    """True for a peer's row: it has a time and no check, since it is none of our executables."""
    return not row["check"] and bool(row["graph_us"])


def problem(row):
    """B,Hq,Hkv,Sq,Sk,D with type and mask."""
    words = ",".join(row[c] for c in ("B", "Hq", "Hkv", "Sq", "Sk", "D")) + " " + row["dtype"]
    return words + {"off": "", "br": " causal"}.get(row["causal"], " causal " + row["causal"])


def controls(source):
    """The lines whose check must fail: they may be fast, and pass by luck."""
    return {row["config"] for row in source.rows if row["note"].startswith("expected failure")}


def timed(source):
    """(row, µs) of the rows with a time that count: peers, and lines that passed and should."""
    racy = controls(source)
    for row in source.rows:
        us = number(source, row, "graph_us")
        if us and (row["check"] == "PASS" or peer(row)) and row["config"] not in racy:
            yield row, us


def fastest(sources):
    """{problem: {"shape", "line": (µs, row, source) or absent, peer name: (µs, row, source)}}, in order."""
    best = {}
    for source in sources:
        for row, us in timed(source):
            name = PEERS.get(row["config"], row["config"]) if peer(row) else "line"
            at = best.setdefault(problem(row), {"shape": row["shape"]})
            if name not in at or us < at[name][0]:
                at[name] = us, row, source
    return best


def bases(source, configs):
    """{line: line that it is a step from, or None}.

    configs.txt names it (`NAME : BASE`, else gate:step-over=BASE); else it is the earlier line of the same family
    and head size that differs in the fewest knobs, the latest of these. A line that takes its tile by the problem
    has no knobs to compare.
    """
    named = {}
    for name, line in (Tree().config_lines() if configs.is_file() else {}).items():
        step = re.search(r"gate:step-over=(\w+):", " ".join(line.gates))
        if line.base or step:
            named[name] = line.base or step[1]
    first, base = {row["config"]: row for row in reversed(source.rows)}, {}
    for name in source.values("config"):
        row, near = first[name], []
        if "USE_TUNED=1" not in row["knobs"].split():
            near = [other for other in reversed(base) if named.get(other) != name
                    and all(first[other][column] == row[column] for column in ("family", "D"))]
        nearest = min(near, key=lambda other: len(difference(first[other], row)), default=None)
        base[name] = named[name] if named.get(name) in first else nearest
    return base


def difference(old, new):
    """The knobs of row NEW whose values are not those of row OLD, as NAME=VALUE."""
    before = set(old["knobs"].split())
    return [knob for knob in new["knobs"].split() if knob not in before]


def ladders(source):
    """{ladder: its lines} in the order of the rows, of wgmma two; {line: {shape: µs}} of mission and long."""
    found, us = {}, {}
    for row in source.rows:
        if row["family"] and row["config"] not in us:
            D = (" D=64" if row["D"] == "64" else " D=128, 256") if row["family"] == "wgmma" else ""
            found.setdefault(row["family"] + D, []).append(row["config"])
            us[row["config"]] = {}
    for row, t in timed(source):
        if row["shape"] in ("mission", "long") and row["config"] in us:
            us[row["config"]][row["shape"]] = t
    return found, us


def ablated(source):
    """(line, {shape: its µs}, {change: {shape: µs}}, {change that is not legal or wrong: why})."""
    full = source.rows[0]["config"]
    whole, changes, refused = {}, {}, {}
    for row, us in timed(source):
        into = whole if row["config"] == full else changes.setdefault(taken_away(row["config"], full), {})
        into[row["shape"]] = us
    for row in source.rows:
        change = taken_away(row["config"], full)
        if row["config"] != full and change not in changes:
            refused[change] = row["note"] or f"{row['status']} {row['check']}".strip()
    return full, whole, changes, refused


def taken_away(config, full):
    """FULL__KNOB_VALUE__KNOB_VALUE as KNOB=VALUE KNOB=VALUE."""
    return " ".join(re.sub(r"_([^_]*)$", r"=\1", part) for part in config[len(full):].strip("_").split("__"))
