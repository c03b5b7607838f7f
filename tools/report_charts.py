"""Draws the charts of results/report.html, README.md and docs/ as SVG with matplotlib.

Charts are 380 units wide, which fits a phone, except README's first one. Colour is never the only distinction: bars have
patterns, points have markers, and each has its value next to it.
"""
import html
import io
import itertools
import re
from textwrap import shorten

import matplotlib
from matplotlib import ticker
from matplotlib.figure import Figure

from report_rows import short

INK, DIM, GRID = "#1f2328", "#57606a", "#e3e7eb"
matplotlib.use("svg")
matplotlib.rcParams.update({
    "svg.fonttype": "none", "svg.hashsalt": "sdpa", "font.size": 9.5, "hatch.linewidth": 0.6, "text.color": INK,
    "axes.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False, "axes.labelcolor": INK,
    "axes.edgecolor": "#8c959f", "axes.axisbelow": True, "axes.grid": True, "axes.grid.axis": "x", "grid.color": GRID,
    "grid.linewidth": 0.6, "xtick.color": DIM, "xtick.major.size": 3, "xtick.major.width": 0.6, "ytick.color": DIM,
    "ytick.labelcolor": INK, "ytick.major.size": 0, "legend.frameon": False, "legend.loc": "upper left",
    "legend.borderpad": 0.1, "legend.handletextpad": 0.2, "legend.columnspacing": 1.2})

WIDTH = 380
ROW = 15
# Fill colour and pattern of the series of a chart.
SERIES = [("#1f5fa8", ""), ("#f3d9a4", "////"), ("#ffffff", "||||"), ("#c7e3d4", "xxxx"), ("#e6d3ea", "----")]
OURS, PEER = "#1f5fa8", "#b3401f"


def svg(figure, label):
    """The figure as a small SVG with system fonts and a white background, for dark pages too."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue().partition("<svg")[2]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style[^>]*>.*?</style>", "", text, flags=re.S)
    text = re.sub(r'^[^>]*viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>', lambda m: (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{m[1]}" height="{m[2]}" font-family="system-ui,Arial,sans-serif" '
        f'viewBox="0 0 {m[1]} {m[2]}" role="img" aria-label="{html.escape(label)}">'), text)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    short = {name: f"i{n}" for n, name in enumerate(sorted(used))}
    text = re.sub(r' id="([^"]*)"', lambda m: f' id="{short[m[1]]}"' if m[1] in used else "", text)
    text = re.sub(r'(href="#|url\(#)([^")]+)', lambda m: m[1] + short[m[2]], text)
    # Use the font of the page, and round coordinates to 0.1 units, which is invisible.
    text = re.sub(r"font: (bold |700 )?([\d.]+)px [^;\"]*", lambda m: "font-size: " + m[2] + "px"
                  + ("; font-weight: bold" if m[1] else ""), text)
    # matplotlib 3.11 writes the font family separately.
    text = re.sub(r''' font-family: [^;"]*;?| transform="rotate\(-0 [^"]*\)"''', "", text)
    text = re.sub(r"<(?:path|use|text) [^>]*>", lambda tag: re.sub(
        r"\d+\.\d{2,}", lambda m: f"{float(m[0]):.1f}", tag[0]), text)
    text = re.sub(r">\s+<", "><", re.sub(r"\s*\n\s*", " ", text)).replace("<g/>", "")
    text = text.replace("; stroke-linecap: square", "")
    bare = 1
    while bare:  # groups without attributes
        text, bare = re.subn(r"<g>((?:<(?:use|path) [^>]*/>|<text [^>]*>[^<]*</text>)*)</g>", r"\1", text)
    # Move the common style of neighbouring markers to a group.
    return re.sub(r'(?:<use [^>]*? style="([^"]*)"/>)(?:<use [^>]*? style="\1"/>)+', lambda m: (
        f'<g style="{m[1]}">' + m[0].replace(f' style="{m[1]}"', "") + "</g>"), text) + "\n"


# ---- parts ----

def canvas(left, height, top=6, right=8, bottom=34, width=WIDTH):
    """A figure and its axes, HEIGHT units high, with LEFT units for row labels."""
    total = top + height + bottom
    figure = Figure(figsize=(width / 72, total / 72))
    return figure, figure.add_axes([left / width, bottom / total, (width - left - right) / width, height / total])


def name_rows(axes, names):
    """Labels rows 0, 1, ... from the top. Without names, the rows are labelled inside the axes."""
    if names:
        axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), names)
    axes.spines["left"].set_visible(bool(names))


def write(axes, text, at, right=0, **more):
    """Writes TEXT to the right of a point, by RIGHT units; if x is None, at the left end."""
    if at[0] is None:
        at, more["xycoords"] = (0, at[1]), axes.get_yaxis_transform()
    axes.annotate(text, at, (right, 0), textcoords="offset points", va="center" if right else "baseline", **more)


def log_axis(axes, low, high, room, name=lambda x: f"{x:g}", most=6):
    """A log axis from LOW to HIGH, with a fraction ROOM of its length free at the right, and at MOST ticks with plain
    numbers. Chooses the ticks itself, since versions of matplotlib differ for axes with a single power of ten."""
    end = high * (high / low) ** room
    choices = [[step * 10 ** power for power in range(-3, 8) for step in steps if low <= step * 10 ** power <= end]
               for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3), (1,))]
    axes.set_xscale("log")
    axes.set_xlim(low, end)
    apart = (end / low) ** (0.9 / most)  # smallest ratio of two ticks whose labels do not overlap
    fit = (ticks for ticks in choices if len(ticks) <= most and all(b >= a * apart for a, b in itertools.pairwise(ticks)))
    axes.xaxis.set_major_locator(ticker.FixedLocator(next(fit, choices[-1])))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: name(x)))
    axes.xaxis.set_minor_locator(ticker.NullLocator())


# ---- charts ----

def rungs(names, panels, label):
    """A ladder: each rung's time, and peers as lines. PANELS: (title, [µs or None of each of NAMES], {peer: µs})."""
    left, right, gap, width = 8 + 6.4 * max(map(len, names)), 16, 8, 430
    height, room = ROW * len(names) + 6, (width - left - right - gap * (len(panels) - 1)) / len(panels)
    total = height + 66
    figure = Figure(figsize=(width / 72, total / 72))
    every_peer = dict.fromkeys(name for _, _, peers in panels for name in peers)
    styles = dict(zip(every_peer, itertools.cycle(("-", "--", ":"))))
    for number, (title, values, peers) in enumerate(panels):
        axes = figure.add_axes([(left + number * (room + gap)) / width, 22 / total, room / width, height / total])
        at = [(us, y) for y, us in enumerate(values) if us]
        every = [us for us, _ in at] + [*peers.values()]
        low, high = (min(every), max(every)) if every else (1, 10)
        log_axis(axes, low / 1.15, high * 1.05, 0.4, lambda x: f"{x / 1000:g}k" if x > 3e3 else f"{x:g}", most=4)
        for name, us in peers.items():
            axes.axvline(us, color=PEER, linestyle=styles[name], linewidth=1.2)
        axes.plot([us for us, _ in at], [y for _, y in at], "o-", color=OURS, markersize=4, linewidth=0.8)
        for us, y in at:
            write(axes, short(us) if us < 1e4 else f"{us / 1000:.1f}k", (us, y), 5,
                  bbox=dict(facecolor="white", edgecolor="none", pad=0.2))
        name_rows(axes, names if not number else [""] * len(names))
        axes.set_title(title, fontsize=9.5, pad=5, loc="left")
    figure.legend(bbox_to_anchor=(0, 1), ncol=3, handles=[
        matplotlib.lines.Line2D([], [], color=PEER, linestyle=style, label=name) for name, style in styles.items()])
    figure.text(1 - right / width, 1 - 3 / total, "µs, log axes", ha="right", va="top")
    return svg(figure, label)


def waterfall(full, whole, changes):
    """The cost of each change of an ablation, largest first: a bar per shape of WHOLE, starting at 1; "" without times."""
    groups = [(change, {shape: t / whole[shape] for shape, t in us.items() if shape in whole})
              for change, us in changes.items()]
    groups = sorted((group for group in groups if group[1]), key=lambda group: -max(group[1].values()))
    if not groups:
        return ""
    height = sum(ROW + 13 * len(bars) + 5 for _, bars in groups)
    figure, axes = canvas(8, height, top=24)
    ratios = [1, *(ratio for _, bars in groups for ratio in bars.values())]
    log_axis(axes, min(ratios) / 1.02, max(ratios), 84 / (WIDTH - 100), lambda x: f"{x:g}x")
    name_rows(axes, [])
    axes.set_ylim(height, 0)
    axes.set_xlabel(f"time as a multiple of {shorten(full, 36)}, log axis")
    styles = {shape: dict(facecolor=fill, hatch=hatch, edgecolor=INK, linewidth=0.5)
              for shape, (fill, hatch) in zip(whole, itertools.cycle(SERIES))}
    y = 0.0
    for change, bars in groups:
        write(axes, shorten(change, 56), (None, y + ROW - 3), fontweight="bold")
        y += ROW
        axes.plot([1, 1], [y - 1, y + 13 * len(bars) + 1], color=INK, linewidth=0.8)
        for shape, ratio in bars.items():
            axes.barh(y + 6.5, ratio - 1, left=1, height=10.5, **styles[shape])
            words = f"{100 * (ratio - 1):+.0f}% ({short(changes[change][shape])} µs)"
            write(axes, words, (max(ratio, 1), y + 6.5), 4)
            y += 13
        y += 5
    figure.legend(bbox_to_anchor=(0, 1), ncol=len(styles), handlelength=1.6, handletextpad=0.8, handles=[
        matplotlib.patches.Patch(label=shape, **style) for shape, style in styles.items()])
    return svg(figure, f"Ablation of {full}")


def against(rows, series, width):
    """TFLOP/s, a row per problem and a marker per contender. ROWS: (title, {contender: TFLOP/s}, text at the end). The
    marker of the first of SERIES is filled, and a line connects it to the best of the others."""
    left = 10 + 5.1 * max(len(title) for title, _, _ in rows)
    figure, axes = canvas(left, 19 * len(rows) + 4, top=12 * -(-len(series) // 3) + 12, right=40, width=width)
    most = 1.04 * max(value for _, values, _ in rows for value in values.values())
    axes.set_xlim(0, most)
    for y, (_, values, text) in enumerate(rows):
        axes.axhline(y, color=GRID, linewidth=0.6)
        ours, others = values.get(series[0]), [values[name] for name in series[1:] if name in values]
        if ours and others:
            axes.plot([max(others), ours], [y, y], color=INK, linewidth=1.6)
        write(axes, text, (most, y), 6, fontweight="bold")
    for name, marker, fill in zip(series, "oD^s*", [SERIES[0][0]] + ["white"] * 4):
        at = [(values[name], y) for y, (_, values, _) in enumerate(rows) if name in values]
        axes.plot(*zip(*at), marker, color=INK, markerfacecolor=fill, markersize=6, markeredgewidth=0.9, label=name)
    name_rows(axes, [title for title, _, _ in rows])
    axes.set_xlabel("TFLOP/s; right: times as fast as the best peer")
    figure.legend(bbox_to_anchor=(0, 1), ncol=3)
    return svg(figure, "TFLOP/s of sdpa and of peers on each problem")


def over_lengths(panels, series, limits, columns=2):
    """TFLOP/s by sequence length, as in FlashAttention's papers: a panel for each (title, {contender: {length: TFLOP/s}}),
    with a common scale. A line for each of SERIES, the first one bold, and a horizontal line for each of LIMITS {name:
    TFLOP/s}."""
    lengths = sorted({length for _, values in panels for at in values.values() for length in at})
    left, top, gap, height, width = 34, 52, 12, 100, 400
    lines = -(-len(panels) // columns)
    total, each = top + lines * (height + 34), (width - left - 8 - gap * (columns - 1)) / columns
    most = 1.08 * max(*limits.values(), *(rate for _, values in panels for at in values.values() for rate in at.values()))
    figure = Figure(figsize=(width / 72, total / 72))
    styles = {name: dict(marker=marker, color=OURS if not n else INK, linewidth=1.8 if not n else 0.8, markersize=4,
                         markerfacecolor=OURS if not n else "white")
              for n, (name, marker) in enumerate(zip(series, "oD^s*"))}
    for number, (title, values) in enumerate(panels):
        line, column = divmod(number, columns)
        bottom = total - top - (line + 1) * (height + 34) + 34
        axes = figure.add_axes([(left + column * (each + gap)) / width, bottom / total, each / width, height / total])
        for name, at in values.items():
            axes.plot([lengths.index(length) for length in at], [*at.values()], label=name, **styles[name])
        for limit in limits.values():
            axes.axhline(limit, color=PEER, linestyle="--", linewidth=1.2)
        axes.set_title(title, fontsize=9.5, pad=4, loc="left")
        axes.set_title("TFLOP/s over keys" * (number == 0), fontsize=9.5, pad=4, loc="right")
        axes.set_xticks(range(len(lengths)), [f"{n // 1024}k" if n >= 1024 else f"{n}" for n in lengths])
        axes.set_ylim(0, most)
        axes.yaxis.set_major_locator(ticker.MultipleLocator(200))
        axes.grid(axis="y")
        if column:
            axes.set_yticklabels([])
    figure.legend(bbox_to_anchor=(0, 1), ncol=3, handles=[
        *(matplotlib.lines.Line2D([], [], label=name, **style) for name, style in styles.items()),
        *(matplotlib.lines.Line2D([], [], color=PEER, linestyle="--", label=name) for name in limits)])
    return svg(figure, "TFLOP/s of sdpa and of peers over the length of sequences")


def pairs(ratios, base, label):
    """The ratio of each pair of turns, and the verdict. RATIOS: {name: ([ratios to BASE], ratio, low, high)}."""
    figure, axes = canvas(8, 38 * len(ratios))
    axes.axvspan(0.995, 1.005, color="#eef1f4", linewidth=0)
    axes.axvline(1, color=INK, linewidth=0.8)
    for y, (name, (of_turns, ratio, low, high)) in enumerate(ratios.items()):
        write(axes, f"{shorten(name, 36)}: {ratio:.4f} [{low:.4f}, {high:.4f}]", (None, y - 0.22))
        axes.plot(of_turns, [y + 0.34] * len(of_turns), "|", color=DIM, markersize=7, markeredgewidth=0.6)
        axes.plot([low, high], [y + 0.06] * 2, color=INK, linewidth=1.6)
        axes.plot(ratio, y + 0.06, "D", color=INK, markersize=5)
    name_rows(axes, [])
    axes.set_ylim(len(ratios) - 0.45, -0.55)
    axes.set_xlabel(f"time as a multiple of {shorten(base, 36)}, a tick per pair of turns")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
    axes.ticklabel_format(axis="x", useOffset=False)
    return svg(figure, label)
