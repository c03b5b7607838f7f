"""Tests of ./run_all.sh report: a single file without links, the numbers of results/, and a page that works in a browser."""
import csv
import json
import random
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

import builds
import engine
import report_rows
import tool

ROOT = Path(builds.ROOT)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ELSEWHERE = "http://127.0.0.1:9/x.png"
# What the browser does with the page in a frame of 400 and of 1200 pixels; the findings go to <pre id=found>.
HARNESS = r"""<!DOCTYPE html><pre id="found"></pre><script>
const found = {}, pre = document.getElementById("found");
function overlaps(svg) {  // texts of a chart that lie on another one, and those that leave the chart
  const bad = [], box = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
  texts.forEach(([a, r], i) => {
    if (r.left < box.left - 1 || r.right > box.right + 1 || r.top < box.top - 1 || r.bottom > box.bottom + 1)
      bad.push(a + " leaves its chart");
    for (const [b, s] of texts.slice(i + 1)) {
      const w = Math.min(r.right, s.right) - Math.max(r.left, s.left);
      const h = Math.min(r.bottom, s.bottom) - Math.max(r.top, s.top);
      if (w > 1 && h > 2) bad.push(a + " lies on " + b);
    }
  });
  return bad;
}
function examine(frame) {
  const doc = frame.contentDocument, win = frame.contentWindow, rows = [...doc.querySelectorAll("#lines tbody tr")];
  const visible = () => rows.filter(row => row.offsetParent !== null);
  const set = (column, value) => {
    const field = doc.querySelector(`#filters [data-column="${column}"]`);
    field.value = value;
    field.dispatchEvent(new Event("input", {bubbles: true}));
  };
  const result = {width: win.innerWidth, scroll: doc.documentElement.scrollWidth, rows: rows.length,
                  all: visible().length, resources: win.performance.getEntriesByType("resource").map(e => e.name),
                  overlaps: [...doc.querySelectorAll("svg")].flatMap(overlaps),
                  charts: doc.querySelectorAll("svg").length,
                  least: Math.min(...[...doc.querySelectorAll("svg text")].map(t => t.getBoundingClientRect().height))};
  const column = [...doc.querySelectorAll("#lines thead th")].findIndex(th => th.textContent === "D");
  set(column, "128");
  result.D = [...new Set(visible().map(row => row.cells[column].textContent))];
  result.filtered = visible().length;
  result.says = doc.getElementById("shown").textContent;
  set(1, "hopper");
  result.names = [...new Set(visible().map(row => row.cells[1].textContent))];
  set(column, ""); set(1, "");
  result.again = visible().length;
  doc.querySelectorAll("#lines thead button")[2].click();
  result.times = [...doc.querySelectorAll("#lines tbody tr")].map(row => parseFloat(row.cells[2].textContent));
  return result;
}
for (const width of [400, 1200]) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `border:0;width:${width}px;height:900px`;
  frame.onload = () => {
    try { found[width] = examine(frame); } catch (error) { found[width] = {error: String(error)}; }
    pre.textContent = JSON.stringify(found);
  };
  frame.src = "PAGE";
  document.body.append(frame);
}
const control = document.createElement("iframe");  // asks for a picture from elsewhere: the console must tell
control.src = "control.html";
document.body.append(control);
</script>"""


def write_samples(folder):
    """Writes samples and verdicts of two comparisons in ab's format."""
    rng = random.Random(1)
    with open(folder / "2099-01-01-NVIDIA-H200-samples.csv", "w", newline="", encoding="utf-8") as samples, \
            open(folder / "2099-01-01-NVIDIA-H200-verdicts.csv", "w", newline="", encoding="utf-8") as verdicts:
        out, judged = csv.writer(samples), csv.DictWriter(verdicts, engine.VERDICT_COLUMNS)
        out.writerow(engine.SAMPLE_COLUMNS)
        judged.writeheader()
        for number, b, problem, us, ratio in ((1, "mma_lazy STAGES=3", "mission", 10.9, 1.002), (2, "mma_split4", "long", 29.1, 1.3)):
            for turn in range(28):
                name, factor = ((b, ratio) if turn % 2 else ("mma_lazy", 1))
                out.writerows([number, name, problem, turn, replay, f"{us * factor * rng.gauss(1, 0.003):.3f}", 1980, 0]
                              for replay in range(10))
            judged.writerow(dict(comparison=number, a="mma_lazy", b=b, problem=problem, b_problem=problem, ratio=ratio,
                                 low=ratio - 0.001, high=ratio + 0.002, verdict="SLOWER", pairs=14, thrown_out=3))


@pytest.fixture(scope="module", name="page")
def built_page(tmp_path_factory):
    """The report of this checkout's results plus samples."""
    folder = tmp_path_factory.mktemp("report")
    shutil.copytree(ROOT / "results", folder / "results", ignore=shutil.ignore_patterns("*.html"))
    shutil.copy(ROOT / "configs.txt", folder)
    write_samples(folder / "results/ab")
    output = folder / "report.html"
    code, _, err = tool.run("report", "--results", str(folder / "results"), "--output", str(output))
    assert code == 0, err
    return output


def newest_rows():
    """The rows of the newest results/lines/DATE-DEVICE[-N].csv."""
    path = max((ROOT / "results/lines").glob("*.csv"), key=lambda path: [
        int(word) if word.isdigit() else word for word in re.split(r"(\d+)", path.stem)])
    with open(path, newline="", encoding="utf-8") as file:
        return path.stem, list(csv.DictReader(file))


@pytest.mark.parametrize("name, slug", [
    ("2026-11-21-NVIDIA-H200", "NVIDIA-H200"), ("2026-11-21-NVIDIA-H200-12", "NVIDIA-H200"),
    ("2026-11-21-NVIDIA-GeForce-RTX-4090", "NVIDIA-GeForce-RTX-4090"), ("2026-11-21-NVIDIA-GeForce-RTX-4090-2", "NVIDIA-GeForce-RTX-4090"),
    ("2026-11-21-NVIDIA-H200-e4m3", "NVIDIA-H200-e4m3"), ("NVIDIA-H200", "NVIDIA-H200")])
def test_the_device_of_a_file(name, slug):
    """A number of up to two digits after the device counts the files of a day; a model's number has more."""
    assert report_rows.device_slug(Path(name + ".csv")) == slug


def test_one_file(page):
    text = page.read_text(encoding="utf-8")
    assert page.stat().st_size <= 1_500_000
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    assert not re.search(r"""\b(?:src|href)\s*=\s*["']?(?!["']?#)""", text)
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= set(ids)


def test_figures_of_the_newest_rows(page):
    text = page.read_text(encoding="utf-8")
    name, rows = newest_rows()
    racy = {r["config"] for r in rows if r["note"].startswith("expected failure")}
    timed = [r for r in rows if r["check"] == "PASS" and r["graph_us"] and r["config"] not in racy]
    for row in (timed[0], timed[len(timed) // 2], timed[-1]):
        cells = re.search(rf"<tr[^>]*><td[^>]*>\d+</td><td>{row['config']}</td>(?:(?!<tr).)*<td>"
                          rf"{row['B']},{row['Hq']},{row['Hkv']},{row['Sq']},{row['Sk']}\b.*", text)
        assert cells, row["config"]
        shown = float(re.findall(r"<td[^>]*>([^<]*)</td>", cells[0])[2])
        assert shown == pytest.approx(float(row["graph_us"]), rel=6e-4)
    source = re.search(rf"<code>results/lines/{name}\.csv</code> \(<code>\./run_all\.sh</code>\).*", text)[0]
    for column in ("device", "driver", "cuda", "git_sha"):
        assert rows[0][column] in source
    for path in (ROOT / "results").rglob("*.csv"):
        assert str(path.relative_to(ROOT)) in text


def test_times_of_two_runs_are_not_compared(page):
    """The table of peers is from a single file; the page opens at mission."""
    text = page.read_text(encoding="utf-8")
    peers, ranked = (re.search(rf'<section id="{name}">.*?</section>', text, re.S)[0] for name in ("peers", "ranked"))
    (name,) = set(re.findall(r"<code>(results/[^<]*\.csv)</code>", peers))
    assert name.startswith("results/peers/")
    with open(ROOT / name, newline="", encoding="utf-8") as file:
        own = [row for row in csv.DictReader(file) if row["graph_us"] and row["check"] == "PASS" and row["shape"] == "mission"]
    us = min((float(row["graph_us"]), row["config"]) for row in own)
    first = re.search(r"<tbody>\s*<tr><td>([^<]*)</td><td>([^<]*)</td><td[^>]*>([^<]*)</td>", peers)
    assert first[1] == "mission: 1,8,8,512,512,64 fp16" and (pytest.approx(float(first[3]), rel=2e-3), first[2]) == us
    assert re.search(r"<tr[^>]*><td[^>]*>\d+</td>(?:<td[^>]*>[^<]*</td>){5}<td>([^<]*)</td>", ranked)[1].endswith(" mission")


def test_samples(page):
    text = page.read_text(encoding="utf-8")
    assert "mma_split4: 1.3000 [1.2990, 1.3020]" in text and "mma_lazy against mma_split4 at long" in text
    assert "mma_split4: SLOWER, 14 pairs, 3 discarded as disturbed" in text


@pytest.mark.skipif(not CHROMIUM, reason="chromium is missing; install it with: sudo apt-get install chromium")
def test_in_a_browser(page):
    text = page.read_text(encoding="utf-8")
    policy = re.search(r"<meta http-equiv[^>]*>", text)[0]
    page.with_name("control.html").write_text(policy + f'<img src="{ELSEWHERE}">', encoding="utf-8")
    host = page.with_name("host.html")
    host.write_text(HARNESS.replace("PAGE", page.name), encoding="utf-8")
    done = subprocess.run([
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--allow-file-access-from-files", "--window-size=1300,1000",
        f"--user-data-dir={page.parent}/profile", "--virtual-time-budget=5000", "--dump-dom", host.as_uri()],
        capture_output=True, text=True, check=False, timeout=600)
    # The policy that forbids the page to load anything works, and the page itself tries nothing.
    console = re.findall(r":CONSOLE.*", done.stderr)
    assert console and all(ELSEWHERE in line for line in console)
    found = json.loads(unescape(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)[1]))
    for width in ("400", "1200"):
        at = found[width]
        assert "error" not in at, at
        assert at["width"] == int(width) and at["scroll"] <= at["width"] and at["resources"] == []
        assert at["charts"] == text.count("<svg ") >= 6 and at["overlaps"] == []
        assert at["least"] >= 9, "the charts' text is too small to read"
        assert at["all"] == at["rows"] == at["again"] > at["filtered"] > 0
        assert at["D"] == ["128"] and at["says"] == f"{at['filtered']} of {at['rows']} rows"
        assert at["names"] and all("hopper" in name for name in at["names"]) and at["times"] == sorted(at["times"])
