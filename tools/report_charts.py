"""The charts of results/report.html, README.md and docs/, drawn by matplotlib as SVG.

Every chart is 380 units wide, a phone's width, and as high as its rows need. Colour is never alone: bars
differ in their pattern, points in their marker, and each has its value beside it.
"""
import io
import itertools
import math
import re

import matplotlib
from matplotlib import ticker
from matplotlib.figure import Figure

matplotlib.use("svg")
matplotlib.rcParams.update({
    "svg.fonttype": "none", "svg.hashsalt": "sdpa", "font.size": 10, "hatch.linewidth": 0.6,
    "axes.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False, "text.color": "#1f2328",
    "axes.labelcolor": "#1f2328", "xtick.color": "#57606a", "ytick.color": "#57606a", "axes.edgecolor": "#8c959f",
    "xtick.labelsize": 9.5, "ytick.labelsize": 9.5, "axes.labelsize": 9.5})

WIDTH = 380
ROW = 15
INK, DIM, GRID = "#1f2328", "#57606a", "#e3e7eb"
# Fill and pattern of the first, second, ... series of a chart.
SERIES = [("#1f5fa8", ""), ("#f3d9a4", "////"), ("#ffffff", "||||"), ("#c7e3d4", "xxxx"), ("#e6d3ea", "----")]
FASTER, SLOWER = ("#1f5fa8", ""), ("#f6c6b8", "////")
MARKERS = {"scalar": ("s", "#8c959f"), "wmma": ("^", "#b36b00"), "mma": ("D", "#1f5fa8"),
           "wgmma": ("o", "#00724f"), "cublas": ("P", "#8a4a86"), "peer": ("x", "#b3261e")}
VERDICTS = {"SAME": "o", "FASTER": "<", "SLOWER": ">", "UNCLEAR": "D"}
_ids = itertools.count(1)


def svg(figure, label):
    """The figure as an <svg> element that can stand beside others in one page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    text = text.getvalue()
    text = text[text.index("<svg"):]
    prefix = f"c{next(_ids)}-"
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style[^>]*>.*?</style>", "", text, flags=re.S)
    text = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>',
                  rf'<svg viewBox="\1" role="img" aria-label="{label}">', text)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda m: f' id="{prefix}{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}", text)
    # The page's font, and a tenth of a unit of precision: smaller, and nobody sees it.
    text = re.sub(r"font: (bold |700 )?([\d.]+)px [^;\"]*", lambda m: "font-size: " + m[2] + "px"
                  + ("; font-weight: bold" if m[1] else ""), text)
    text = re.sub(r" font-family: [^;\"]*;?", "", text)  # matplotlib 3.11 writes it apart
    text = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", text)
    text = re.sub(r"<(?:path|use|text) [^>]*>", lambda tag: re.sub(
        r"\d+\.\d{2,}", lambda m: f"{float(m[0]):.1f}", tag[0]), text)
    return re.sub(r">\s+<", "><", re.sub(r"\s*\n\s*", " ", text))


def standalone(drawing):
    """A chart of svg() as a file of its own; its white ground makes it the same picture on a dark page."""
    drawing = re.sub(r'(id="|#)c\d+-', r"\1", drawing)
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawing).groups()
    return drawing.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
                           f'width="{width}" height="{height}" font-family="system-ui,Arial,sans-serif" ', 1) + "\n"


def canvas(left, heights, bottoms=34, top=6, right=8):
    """A figure of axes one above the other, each as high as told, with LEFT units for the labels of rows."""
    total = top + sum(height + bottoms for height in heights)
    figure = Figure(figsize=(WIDTH / 72, total / 72))
    axes, y = [], total - top
    for height in heights:
        y -= height
        axes.append(figure.add_axes([left / WIDTH, y / total, (WIDTH - left - right) / WIDTH, height / total]))
        y -= bottoms
    for a in axes:
        a.set_axisbelow(True)
        a.grid(axis="x", color=GRID, linewidth=0.6)
        a.tick_params(length=3, width=0.6)
    return figure, axes


def log_ticks(axis, low, high, unit=""):
    """Plain numbers at 1, 2 and 5 times the powers of ten; more of them where the range is short."""
    subs = (1, 2, 5) if high / low > 4 else (1, 1.5, 2, 3, 4, 5, 6, 8)
    if high / low > 60:
        subs = (1, 3)
    if high / low > 1000:
        subs = (1,)
    axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=20))
    axis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}{unit}"))
    axis.set_minor_locator(ticker.NullLocator())


def fit(text, most=62):
    """TEXT, shortened at its end to what a chart is wide."""
    return text if len(text) <= most else text[:most - 1] + "…"


def short(t):
    """A time with three digits."""
    return f"{t:.2f}" if t < 9.995 else f"{t:.1f}" if t < 99.95 else f"{t:.0f}"


def steps(rungs, label):
    """A ladder: each line's time, with a bar from the time of its base. RUNGS: (name, base µs or None, µs)."""
    left = 8 + 6.3 * max(len(name) for name, _, _ in rungs)
    figure, (axes,) = canvas(left, [ROW * len(rungs) + 6])
    times = [t for _, base, us in rungs for t in (base, us) if t]
    low, high = min(times) / 1.12, max(times)
    axes.set_xscale("log")
    # The values stand right of the bars: room for 14 characters.
    axes.set_xlim(low, high * (high / low) ** (80 / (WIDTH - left - 88)))
    axes.set_ylim(len(rungs) - 0.4, -0.6)
    for y, (_, base, us) in enumerate(rungs):
        if base:
            fill, hatch = FASTER if us <= base else SLOWER
            axes.barh(y, us - base, left=base, height=0.62, color=fill, hatch=hatch, edgecolor=INK, linewidth=0.5)
            axes.plot([base, base], [y - 0.42, y + 0.42], color=INK, linewidth=1)
        axes.plot(us, y, "o", color=INK, markersize=3.6)
        words = short(us) + (f" ({base / us:.2f}x)" if base else "")
        axes.annotate(words, (max(us, base or 0), y), (5, 0), textcoords="offset points", va="center", fontsize=9.5)
    axes.set_yticks(range(len(rungs)), [name for name, _, _ in rungs])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    log_ticks(axes.xaxis, low, high)
    axes.set_xlabel("µs, log axis")
    return svg(figure, label)


def groups(titles_and_bars, series, label, xlabel, origin=0.0, log=False):
    """Horizontal bars in groups, each under its title. A group: (title, [(series, value, text)]).

    Bars begin at ORIGIN; a legend of the series stands on top.
    """
    height = sum(ROW + 13 * len(bars) + 5 for _, bars in titles_and_bars)
    figure, (axes,) = canvas(8, [height], top=24)
    values = [value for _, bars in titles_and_bars for _, value, _ in bars]
    room = (WIDTH - 16) / (WIDTH - 16 - 84)
    if log:
        low, high = min(values + [origin]) / 1.02, max(values + [origin])
        axes.set_xscale("log")
        axes.set_xlim(low, high * (high / low) ** (room - 1))
        log_ticks(axes.xaxis, low, high, "x")
    else:
        axes.set_xlim(0, max(values) * room)
    axes.set_ylim(height, 0)
    y = 0.0
    for title, bars in titles_and_bars:
        axes.text(0, y + ROW - 3, fit(title, 56), transform=axes.get_yaxis_transform(), fontsize=9.5, fontweight="bold")
        y += ROW
        for name, value, text in bars:
            fill, hatch = SERIES[series.index(name) % len(SERIES)]
            axes.barh(y + 6.5, value - origin, left=origin, height=10.5, color=fill, hatch=hatch, edgecolor=INK,
                      linewidth=0.5)
            axes.annotate(text, (max(value, origin), y + 6.5), (4, 0), textcoords="offset points", va="center",
                          fontsize=9.5)
            y += 13
        if origin:
            axes.plot([origin, origin], [y - 13 * len(bars) - 1, y + 1], color=INK, linewidth=0.8)
        y += 5
    axes.set_yticks([])
    axes.spines["left"].set_visible(not origin)
    axes.set_xlabel(xlabel)
    handles = [matplotlib.patches.Patch(facecolor=SERIES[i % len(SERIES)][0], hatch=SERIES[i % len(SERIES)][1],
                                        edgecolor=INK, linewidth=0.5, label=name) for i, name in enumerate(series)]
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, 1), ncol=len(series), frameon=False,
                  fontsize=9.5, handlelength=1.6, columnspacing=1.2, borderpad=0.1)
    return svg(figure, label)


def waterfall(full, whole, changes):
    """What each change of an ablation costs, the dearest first; "" where no time can be compared."""
    bars = []
    for change, us in changes.items():
        ratios = [(shape, t / whole[shape], f"{100 * (t / whole[shape] - 1):+.0f}% ({short(t)} µs)")
                  for shape, t in us.items() if shape in whole]
        if ratios:
            bars.append((change, ratios))
    bars.sort(key=lambda bar: -max(ratio for _, ratio, _ in bar[1]))
    return bars and groups(bars, list(whole), f"Ablation of {full}", f"time as a multiple of {fit(full, 36)}, log axis",
                           origin=1, log=True)


def against(rows, series, label, xlabel):
    """A row per problem, a marker per contender. ROWS: (title, {contender: value}, text at the end of the row).

    The first of SERIES is filled, and a line joins it to the best of the others.
    """
    left = 10 + 5.1 * max(len(title) for title, _, _ in rows)
    figure, (axes,) = canvas(left, [19 * len(rows) + 4], top=24, right=40)
    axes.set_xlim(0, 1.04 * max(value for _, values, _ in rows for value in values.values()))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    for y, (_, values, text) in enumerate(rows):
        axes.axhline(y, color=GRID, linewidth=0.6)
        ours, others = values.get(series[0]), [values[name] for name in series[1:] if name in values]
        if ours and others:
            axes.plot([max(others), ours], [y, y], color=INK, linewidth=1.6)
        axes.annotate(text, (1, y), (6, 0), xycoords=axes.get_yaxis_transform(), textcoords="offset points", va="center",
                      fontsize=9.5, fontweight="bold")
    for name, marker, fill in zip(series, "oD^s*", [SERIES[0][0]] + ["white"] * 4):
        at = [(values[name], y) for y, (_, values, _) in enumerate(rows) if name in values]
        axes.plot(*zip(*at), marker, color=INK, markerfacecolor=fill, markersize=6, markeredgewidth=0.9, label=name)
    axes.set_yticks(range(len(rows)), [title for title, _, _ in rows])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlabel(xlabel)
    figure.legend(loc="upper left", bbox_to_anchor=(0, 1), ncol=len(series), frameon=False, fontsize=9.5,
                  handletextpad=0.2, columnspacing=1.2, borderpad=0.1)
    return svg(figure, label)


def roofline(points, limits, bandwidth, label):
    """TFLOP/s against FLOP per byte. POINTS: (family, intensity, TFLOP/s, number or "").

    LIMITS: {name: TFLOP/s}; BANDWIDTH in TB/s. Both may be missing on a GPU whose limits are not known.
    """
    figure, (axes,) = canvas(46, [330])
    xs, ys = [p[1] for p in points], [p[2] for p in points]
    x_low, x_high = min(xs) / 2, max(xs) * 2.2
    if bandwidth:
        x_low = min(x_low, max(limits.values()) / bandwidth / 8)
    y_high = max(ys + list(limits.values())) * 1.6
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(x_low, x_high)
    axes.set_ylim(min(ys) / 1.6, y_high)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    for (name, limit), style in zip(limits.items(), ("-", "-.", ":")):
        ridge = limit / bandwidth
        axes.plot([x_low, ridge, x_high], [x_low * bandwidth, limit, limit], style, color=INK, linewidth=1.2)
        axes.annotate(f"{name}: {limit:.0f} TFLOP/s", (x_high, limit), (-2, 4), textcoords="offset points", ha="right",
                      fontsize=9.5)
    if bandwidth:
        x = max(limits.values()) / bandwidth / 5
        axes.annotate(f"memory: {bandwidth:g} TB/s", (x, x * bandwidth), (6, -8), textcoords="offset points",
                      fontsize=9.5)
    for family in dict.fromkeys(p[0] for p in points):
        marker, colour = MARKERS.get(family, ("*", INK))
        mine = [p for p in points if p[0] == family]
        axes.plot([p[1] for p in mine], [p[2] for p in mine], marker, color=colour, markersize=4.5, linestyle="none",
                  markerfacecolor="none" if marker != "x" else colour, markeredgewidth=1.1, label=family)
    axes.legend(loc="lower right", fontsize=9.5, frameon=False, handletextpad=0.2, borderaxespad=0.2)
    log_ticks(axes.xaxis, x_low, x_high)
    log_ticks(axes.yaxis, *axes.get_ylim())
    axes.set_xlabel("FLOP per byte of Q, K, V and O, log axis")
    axes.set_ylabel("TFLOP/s, log axis", labelpad=1)
    return svg(figure, label)


def intervals(rows_by_title, label, xlabel, same=0.005):
    """Ratios with their intervals, in groups: (title, [(ratio, low, high, verdict)])."""
    height = sum(ROW + 9 * len(rows) + 4 for _, rows in rows_by_title)
    figure, (axes,) = canvas(8, [height], top=24)
    axes.set_ylim(height, 0)
    axes.axvspan(1 - same, 1 + same, color="#eef1f4", linewidth=0)
    y, seen = 0.0, {}
    for title, rows in rows_by_title:
        axes.text(0, y + ROW - 3, fit(title), transform=axes.get_yaxis_transform(), fontsize=9.5)
        y += ROW
        axes.plot([1, 1], [y, y + 9 * len(rows)], color=INK, linewidth=0.8)
        for ratio, low, high, verdict in rows:
            y += 4.5
            axes.plot([low, high], [y, y], color=INK, linewidth=1)
            seen[verdict], = axes.plot(ratio, y, VERDICTS.get(verdict, "s"), color=INK, markersize=4,
                                       markerfacecolor="white" if verdict == "SAME" else INK, linestyle="none")
            y += 4.5
        y += 4
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6))
    axes.set_xlabel(xlabel)
    figure.legend(seen.values(), seen.keys(), loc="upper left", bbox_to_anchor=(0, 1), ncol=len(seen), frameon=False,
                  fontsize=9.5, handletextpad=0.2, columnspacing=1.2, borderpad=0.1)
    return svg(figure, label)


def samples(contenders, ratios, estimate, label, most=300):
    """Times of each contender as a box over ticks, and below them the ratio of every turn.

    CONTENDERS: {name: [µs]}; RATIOS: {name: [ratio to the first]}; ESTIMATE: {name: (ratio, low, high)}.
    Of more than MOST samples every k-th has a tick; the box is of all.
    """
    names, others = list(contenders), list(ratios)
    figure, axes = canvas(8, [38 * len(names), 38 * len(others)] if others else [38 * len(names)], bottoms=36)
    for y, name in enumerate(names):
        times = sorted(contenders[name])
        shown = times[::math.ceil(len(times) / most)]
        axes[0].text(0, y - 0.22, f"{fit(name, 46)}, {len(times)} samples", fontsize=9.5,
                     transform=axes[0].get_yaxis_transform())
        axes[0].boxplot(times, positions=[y + 0.08], vert=False, widths=0.34, whis=(5, 95), showfliers=False,
                        manage_ticks=False, medianprops={"color": INK, "linewidth": 1.6},
                        boxprops={"linewidth": 0.8}, whiskerprops={"linewidth": 0.8}, capprops={"linewidth": 0.8})
        # One path for all ticks: x x gap, x x gap, ...
        axes[0].plot([x for t in shown for x in (t, t, math.nan)],
                     [v for _ in shown for v in (y + 0.3, y + 0.46, math.nan)], color=DIM, linewidth=0.5)
    axes[0].set_ylim(len(names) - 0.45, -0.55)
    axes[0].set_xlabel("µs; box: quartiles and median, whiskers: 5 to 95%")
    for y, name in enumerate(others):
        ratio, low, high = estimate[name]
        axes[1].text(0, y - 0.22, f"{fit(name, 36)}: {ratio:.4f} [{low:.4f}, {high:.4f}]", fontsize=9.5,
                     transform=axes[1].get_yaxis_transform())
        axes[1].plot([1, 1], [y - 0.1, y + 0.5], color=INK, linewidth=0.8)
        axes[1].plot(ratios[name], [y + 0.34] * len(ratios[name]), "|", color=DIM, markersize=7, markeredgewidth=0.6)
        axes[1].plot([low, high], [y + 0.06] * 2, color=INK, linewidth=1.6)
        axes[1].plot(ratio, y + 0.06, "D", color=INK, markersize=5)
    if others:
        axes[1].axvspan(0.995, 1.005, color="#eef1f4", linewidth=0)
        axes[1].set_ylim(len(others) - 0.45, -0.55)
        axes[1].set_xlabel(f"time as a multiple of {fit(names[0], 36)}, a tick per turn")
    for a in axes:
        a.set_yticks([])
        a.spines["left"].set_visible(False)
        a.xaxis.set_major_locator(ticker.MaxNLocator(6))
        a.ticklabel_format(axis="x", useOffset=False)
    return svg(figure, label)
