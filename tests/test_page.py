"""README.md and docs/: their figures are those of results/, their links lead somewhere, their commands work word for word."""
import csv
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as xml
from html import unescape
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import builds  # noqa: E402
from report_rows import OURS, fastest, newest  # noqa: E402
from test_report import CHROMIUM, HARNESS  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README, USING, NUMBERS = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/USING.md", "docs/NUMBERS.md"))
NAMES = re.findall(r"^(\w+)", (ROOT / "configs.txt").read_text(encoding="utf-8"), re.M)
KNOBS = re.findall(r"^  X\((\w+),", (ROOT / "sdpa.cu").read_text(encoding="utf-8"), re.M)


def sh(command, folder, **environment):
    """A command as somebody types it."""
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False,
                          env={**os.environ, **environment})


def copy(folder, *what):
    """FOLDER with those of the repository's own files that are under WHAT; without git all that is there."""
    listed = subprocess.run(["git", "ls-files", "--", *what], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    files = listed.split("\n") if listed else [p.relative_to(ROOT) for w in what for p in [ROOT / w, *(ROOT / w).rglob("*")]]
    for name in filter(lambda name: name and (ROOT / name).is_file(), files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def draw(folder, *arguments):
    """`./run_all.sh results` of a copy."""
    return subprocess.run([sys.executable, folder / "tools/page.py", *arguments], cwd=folder, capture_output=True, text=True,
                          check=False)


def texts(svg):
    """What a picture says; that it can be parsed."""
    return [element.text for element in xml.parse(svg).iter("{http://www.w3.org/2000/svg}text")]


# ---- the pages equal results/ ----

def test_pages_are_those_of_results(tmp_path):
    """As committed: a measurement made here needs no page yet."""
    own = copy(tmp_path, "README.md", "docs", "results", "tools", "configs.txt", "configs.cmake", "sdpa.cu", "harness.cu")
    done = draw(own)
    assert done.returncode == 0, done.stderr
    for page in PAGES:
        assert page.read_text(encoding="utf-8") == (own / page.relative_to(ROOT)).read_text(encoding="utf-8"), \
            f"{page.name} is not what results/ gives: ./run_all.sh results, and git add a new CSV"
    drawn, committed = ({picture.relative_to(folder): texts(picture) for picture in folder.rglob("*.svg")}
                        for folder in (own / "results", ROOT / "results"))
    assert drawn == committed
    for name in drawn:
        assert (ROOT / "results" / name).stat().st_size < 40_000


def test_figures_written_by_hand():
    """README's first sentence and verdicts and USING's output have their rows."""
    found = newest(ROOT / "results")
    problems = [at for at in fastest(found["peers"][-1]).values() if at[OURS][1]["shape"] != "small"]
    gains = [min(us for name, (us, _) in at.items() if name != OURS) / at[OURS][0] for at in problems]
    said = re.search(r"is\s([\d.]+)\sto\s([\d.]+)\stimes\sas\sfast\sas\sthe\sbest.*\[(\d+)\sproblems\].*?\s([\d.]+)\stimes\sin\sthe\sgeometric",
                     README.partition("<img")[0], re.S)
    assert said.groups() == (f"{min(gains):.2f}", f"{max(gains):.2f}", f"{len(gains)}", f"{math.prod(gains) ** (1 / len(gains)):.2f}")
    gains = [min(us for name, (us, _) in at.items() if name != OURS) / at[OURS][0] for at in fastest(found["field"][-1]).values()]
    said = re.search(r"\[([\d.]+)\sto\s([\d.]+)\stimes\sthe\sbest\].*\s([\d.]+)\sin\sthe\smean", README.partition("<img")[0], re.S)
    assert said.groups() == (f"{min(gains):.2f}", f"{max(gains):.2f}", f"{math.prod(gains) ** (1 / len(gains)):.2f}")
    shape = re.search(r"\n(\w+), D=64 fp16, base ", USING)[1]
    rows = {row["config"]: row for row in found["lines"][0].rows if row["shape"] == shape}
    base, = (float(row["graph_us"]) for name, row in rows.items() if name == NAMES[0])
    shown = re.findall(r"^(\w+) +PASS +([\d.]+) +([\d.]+) +[\d.]+% +([\d.]+)x", USING, re.M)
    assert len(shown) >= 5
    for name, us, tflops, gain in shown:
        row = rows[name]
        assert (row["dtype"], row["D"], row["check"]) == ("fp16", "64", "PASS")
        assert (f"{float(row['graph_us']):.2f}", f"{float(row['tflops']):.2f}") == (us, tflops)
        assert f"{base / float(row['graph_us']):.2f}" == gain
    verdicts = [row for source in found["verdicts"] for row in source.rows]
    of_first = [row for row in verdicts if row["b"] == "mma_lazy STAGES=3" and row["problem"] == "long"]
    assert all(f"{row['verdict']}, {100 * float(row['ratio']) - 100:.1f}% at long" in README for row in of_first[-1:])
    for kinds, verdict in ((("same",), "SAME"), (("1%", "0.5%"), "SLOWER")):
        trial = [row["verdict"] for row in verdicts if row.get("kind") in kinds]
        right = trial.count(verdict)
        assert re.search(rf"[Oo]f {len(trial)} (lines\s)?[^,:]*\b{right} (came out )?{verdict}", README), (kinds, right)


def test_every_line_is_explained():
    before, table = re.search(r"^(.*)<!-- peers:begin(.*?)<!-- peers:end -->", NUMBERS, re.S).groups()
    winners = re.findall(r"^\| [^|]*\d [bf]+p?16[^|]* \| (\w+) \|", table, re.M)
    assert len(winners) >= 26
    for name in winners:
        assert f"`{name}`" in before, f"{name} wins a problem, and NUMBERS does not say what it is"


def test_every_problem_has_a_name():
    """README's table of eight, of which each was measured, and its picture."""
    rows = re.findall(r"^\| (\w[^|]*) \| (\d[^|]*) \| [\d.]+ \| \d+ \| \d+% \|", README, re.M)
    assert len(rows) == 8
    named = [name for name, _ in rows]
    assert [text for text in texts(ROOT / "results/peers/peers.svg") if text in named] == named
    for name, what in rows:
        assert ("causal" in name) == ("causal" in what) and re.search(r"D=(\d+)", name)[1] == what.split()[0].split(",")[-1]


def test_every_step_has_a_sentence():
    table = re.search(r"<!-- ladder:begin.*?<!-- ladder:end -->", NUMBERS, re.S)[0]
    for name in NAMES:
        row = re.search(rf"^\| {name} \|(?:[^|\n]*\|){{3}} ([^|\n]*) \|$", table, re.M)
        assert row is None or row[1].endswith("."), f"docs/NUMBERS.md has no sentence on {name}"
    assert table.count("\n| ") > len(NAMES) - 5


def test_links_and_lengths():
    most = {"README.md": 150, "HOPPER.md": 250, "LADDER.md": 480, "READING.md": 34}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.count("\n") <= most.get(page.name, 1000), page.name
        for link in re.findall(r'\]\(([^)#:]+)\)|src="([^"]+)"', text):
            assert (page.parent / (link[0] or link[1])).exists(), f"{page.name}: {link}"
        if page.name not in ("README.md",):
            assert "After this page you " in text.split("\n\n")[1], f"{page.name} does not say what one knows after it"


def test_reading_follows_the_file():
    """READING has the sections in the order of sdpa.cu, and what it names stands in them."""
    text = (ROOT / "sdpa.cu").read_text(encoding="utf-8")
    titles = re.compile(r"^// (?:====|----) (?!5 )(\d\w?) ", re.M)
    starts = {found[1]: found.start() for found in reversed([*titles.finditer(text)])}  # 5d has several parts: the first
    rows = re.findall(r"^\| (\d\w?) .*\|([^|]*)\|$", (ROOT / "docs/READING.md").read_text(encoding="utf-8"), re.M)
    assert [section for section, _ in rows] == sorted(starts, key=starts.get) and len(rows) >= 12
    ends = [*(starts[section] for section, _ in rows[1:]), len(text)]
    for (section, names), end in zip(rows, ends):
        for name in re.findall(r"`(\w+)", names):
            assert re.search(rf"\b{name}\b", text[starts[section]:end]), f"{name} is not in section {section} of sdpa.cu"


def test_ways_from_a_kernel_to_its_instructions():
    """Each function of READING's picture calls the next one, and a way has no more of them than it may have."""
    text = (ROOT / "sdpa.cu").read_text(encoding="utf-8")

    def body(name):
        """Of the functions of that name, in the struct that it names or in none."""
        owner, _, function = name.rpartition("::")
        parts = [text]
        if owner:
            parts = re.findall(rf"^template .*\bstruct {owner}\b[^;]*?\{{\n.*?^}};", text, re.M | re.S)
        indent = "  " * bool(owner)
        found = [body for part in parts for body in
                 re.findall(rf"^{indent}(?:\S.*\s)?{function}\([^;]*?\{{(?:.*\}}$|\n.*?^{indent}\}}$)", part, re.M | re.S)]
        assert found, f"sdpa.cu has no {name}()"
        return "\n".join(found)
    ways = [line.split(" > ") for line in (ROOT / "docs/READING.md").read_text(encoding="utf-8").splitlines() if " > " in line]
    most = dict(sdpa_scalar=[4, 3], sdpa_mma=[4, 5], sdpa_wgmma_plain=[4, 5], sdpa_wgmma=[5, 6])
    assert [way[0] for way in ways] == [kernel for kernel in most for _ in range(2)]
    for way in ways:
        assert len(way) - 2 <= most[way[0]].pop(0), way
        for caller, callee in itertools.pairwise(way):
            if caller == "sdpa_wgmma":  # by the names that KernelOf gives to a kernel's parts
                assert re.search(rf"using (Producer|Consumer) = {callee.partition('::')[0]}<B>;", text)
                callee = re.search(rf"using (\w+) = {callee.partition('::')[0]}<B>", text)[1] + "(s, a"
            name = callee.rpartition("::")[2]
            assert re.search(rf"\b{re.escape(name)}\b", body(caller)), f"{caller}() does not call {callee}()"


@pytest.mark.skipif(not CHROMIUM, reason="chromium is missing; install it with: sudo apt-get install chromium")
def test_pictures_in_a_browser(tmp_path):
    """At 400 pixels no text of a picture lies on another one or is too small."""
    pictures = sorted((ROOT / "results").rglob("*.svg"))
    overlaps = HARNESS[HARNESS.index("function overlaps"):HARNESS.index("function examine")]
    page = tmp_path / "page.html"
    page.write_text("<meta charset='utf-8'><body style='width:400px'><style>svg{width:400px;height:auto;display:block}</style>"
                    + "".join(picture.read_text(encoding="utf-8") for picture in pictures)
                    + f"""<pre></pre><script>{overlaps}
const svgs = [...document.querySelectorAll("svg")], texts = [...document.querySelectorAll("svg text")];
document.querySelector("pre").textContent = JSON.stringify({{svgs: svgs.length, overlaps: svgs.flatMap(overlaps),
  least: Math.min(...texts.map(t => t.getBoundingClientRect().height))}});
</script>""", encoding="utf-8")
    done = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                           f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=5000", "--dump-dom", page.as_uri()],
                          capture_output=True, text=True, check=False, timeout=100)
    found = json.loads(unescape(re.search("<pre>(.*?)</pre>", done.stdout, re.S)[1]))
    assert found["svgs"] == len(pictures) and found["overlaps"] == [] and found["least"] >= 9


# ---- a sample: which files are shown, and how ----

@pytest.fixture(name="sample")
def make_sample(tmp_path):
    copy(tmp_path, "tools", "configs.cmake", "sdpa.cu", "harness.cu")
    shutil.copytree(ROOT / "tests/data/results", tmp_path / "results")
    (tmp_path / "results/ladder").mkdir()
    shutil.copy(tmp_path / "results/peers/2026-01-02-Sample-GPU.csv", tmp_path / "results/ladder/2026-01-02-Sample-GPU-wgmma.csv")
    (tmp_path / "configs.txt").write_text("scalar_minimal\nwmma_all\nmma_split2\nmma_split4 : mma_split2 SPLIT_KV=4\n",
                                          encoding="utf-8")
    (tmp_path / "docs").mkdir()
    old = "| mma_split4 |  |  |  | by hand |\n| Named | 1,8,8,512,512,64 fp16 |\n| Unmeasured | 9,9,9,9,9,64 fp16 |\n| nowhere |  |  |  | by hand too |\n"
    sections = {"README.md": ["results", "story"], "docs/NUMBERS.md": ["peers", "ladder", "ablation", "field", "published"], "docs/LADDER.md": ["scalar_rungs", "wgmma_rungs", "decode_rungs"],
                "docs/HOPPER.md": ["wgmma", "rested", "decode", "e4m3", "accuracy"]}
    for name, parts in sections.items():
        (tmp_path / name).write_text("".join(f"before {p}\n<!-- {p}:begin -->\nold\n{old}"
                                             f"<!-- {p}:end -->\nafter {p}\n" for p in parts), encoding="utf-8")
    return tmp_path


def spoil(old, new, pattern, replacement):
    """A copy of a CSV with something else in it."""
    new.write_text(re.sub(pattern, replacement, old.read_text(encoding="utf-8"), flags=re.M), encoding="utf-8")


def test_sample(sample):
    results, name = sample / "results", "2026-01-02-Sample-GPU"
    # The newest by its name is shown: these are older, whatever their mtime, of another device, or of no kind.
    lines = results / "lines"
    (lines / f"{name}.csv").rename(lines / f"{name}-10.csv")
    for other in (f"{name}-2", name, "2026-01-01-Sample-GPU-11"):
        spoil(lines / f"{name}-10.csv", lines / f"{other}.csv", "scalar_minimal,", "not_the_newest,")
    with open(lines / f"{name}-10.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with open(lines / f"{name}-10.csv", "w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, [*rows[0], "peak_share", "bound"])
        out.writeheader()
        for row in rows:  # of a peak of 400 TFLOP/s, in e4m3 of 800
            out.writerow({**row, "bound": "matrix", "peak_share": f"{float(row['tflops']) / 400:.3f}" if row["tflops"] else ""})
        out.writerow({**rows[0], "config": "e4m3", "dtype": "e4m3", "tflops": "640", "peak_share": "0.8", "bound": "matrix"})
    spoil(results / f"peers/{name}.csv", results / "peers/2026-01-03-Other-GPU.csv", "Sample GPU", "Other GPU")
    spoil(results / f"peers/{name}.csv", results / "peers/2026-01-03-Sample-GPU-more.csv", "mma_split4,", "not_the_newest,")
    spoil(results / f"ablation/{name}-wmma_all.csv", results / "ablation/2026-01-01-Sample-GPU-wmma_all.csv", "__STAGES", "__OLDER")
    (results / "ablation/gone.svg").touch()
    done = draw(sample)
    assert done.returncode == 0, done.stderr
    readme = (sample / "README.md").read_text(encoding="utf-8")
    ladder = (sample / "docs/LADDER.md").read_text(encoding="utf-8")
    numbers = (sample / "docs/NUMBERS.md").read_text(encoding="utf-8")
    for line in ("before results", "| Named | 1,8,8,512,512,64 fp16 | 6.36 | 84 | 21% | 9.07 | 9.91 | 1.42x |",
                 "| Unmeasured | 9,9,9,9,9,64 fp16 |  |  |  |  |  |  |", "The peak is 400 TFLOP/s. ", "after results",
                 "| mma_split4 | 6.34 | 1.0x | 85 | by hand |", "| nowhere |  |  |  | by hand too |",
                 "Sample GPU, driver 1.2.3, CUDA 13.0, commit "):
        assert line in readme, line
    for line in ("| mission: 1,8,8,512,512,64 fp16 | mma_split4 | 6.36 | 84 | 21% | 9.07 | 9.91 | 1.42x |", "before peers",
                 "| mission2: 2,8,8,512,512,64 fp16 | mma_split2_8warps | 8.18 | 131 | 33% | 9.30 | 12.7 | 1.14x |", "after peers"):
        assert line in numbers, line
    # A run without a problem that README names leaves its rows, and the picture has all problems.
    spoil(results / f"peers/{name}.csv", results / "peers/2026-01-04-Sample-GPU.csv", "^.*,mission,.*\n", "")
    copied = draw(sample)
    assert copied.returncode == 0, copied.stderr
    assert "| Named | 1,8,8,512,512,64 fp16 |\n" in (sample / "README.md").read_text(encoding="utf-8")
    assert "2,8,8,512,512,64" in texts(results / "peers/peers.svg")
    (results / "peers/2026-01-04-Sample-GPU.csv").unlink()
    assert draw(sample).returncode == 0
    assert {"Named", "sdpa"} <= set(texts(results / "peers/peers.svg")) and "Named" not in texts(results / "peers/all.svg")
    for line in ("| scalar_minimal |  | 88.0 | 799 |  |", "| mma_split4 | mma_split2: ", "| 37.7 (0.80x) | by hand |",
                 "| wmma_all | 14.8 |  | 88.9 |  |",
                 "| USE_WARP_SPECIALIZATION=0 SYNC_POLICY=2 | 31.4 | +113% | 144 | +62% |",
                 "`SYNC_POLICY=5` is not legal alone: SYNC_POLICY=5 needs the producer warps gone"):
        assert line in numbers, line
    assert ladder.count("None on this GPU yet: `./run_all.sh rungs` measures it.") == 3
    hopper = (sample / "docs/HOPPER.md").read_text(encoding="utf-8")
    assert "| 1,8,8,512,512,64 fp16 | 84 |" in hopper and "None on this GPU yet: `tools/peers.py --rested " in hopper
    assert not re.search("not_the_newest|Other GPU|OLDER|old", readme + numbers + ladder)
    assert not (results / "ablation/gone.svg").exists()
    assert re.search(r"^\| scalar_racy \|[^|]*\|  \|  \|", numbers, re.M)
    before = {path: path.read_bytes() for path in (*sample.rglob("*.md"), *results.rglob("*.svg"))}
    assert results / "peers/peers.svg" in before
    assert draw(sample).returncode == 0 and before == {path: path.read_bytes() for path in before}  # also each picture
    picture = results / "ablation/wmma_all.svg"
    drawn = texts(picture)
    picture.unlink()
    draw_one = f"import page; page.draw_ablation('results/ablation/{name}-wmma_all.csv')"  # what `ablate --svg` does
    subprocess.run([sys.executable, "-c", draw_one], cwd=sample, env={**os.environ, "PYTHONPATH": "tools"}, check=True)
    assert texts(picture) == drawn
    draw(sample, str(lines / "2026-01-01-Sample-GPU-11.csv"))  # a file that is named is taken
    assert "not_the_newest" in (sample / "docs/NUMBERS.md").read_text(encoding="utf-8")


def test_the_fields_picture(sample):
    """A panel for each D and mask, a line for each contender, and the versions of peers."""
    numbers, path = sample / "docs/NUMBERS.md", sample / "results/peers/2026-01-02-Sample-GPU-field.csv"
    names = (sample / "results/peers/2026-01-02-Sample-GPU.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
    assert draw(sample).returncode == 0
    assert "None on this GPU yet: `tools/peers.py LINE... --field` measures it." in numbers.read_text(encoding="utf-8")
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, names, restval="")
        out.writeheader()
        for D, causal, S in itertools.product((64, 128), ("off", "br"), (512, 16384)):
            sizes = dict(B=16384 // S, Hq=2048 // D, Hkv=2048 // D, Sq=S, Sk=S, D=D, causal=causal, dtype="bf16", device="Sample GPU")
            for config, check, us, tflops, note in (("hopper", "PASS", 10, S // 32, ""), ("slower", "PASS", 11, 9, ""),
                                                    ("torch_cudnn", "", 12.5, 300, "PyTorch 2 with cuDNN 92700; 700 W"),
                                                    ("torch_flash", "", 20, 200, "PyTorch 2; 700 W"), ("torch_fa3", "", 13, 310, "fa3-fwd 1")):
                out.writerow({**sizes, "config": config, "check": check, "status": "ok", "graph_us": us, "tflops": tflops, "note": note})
        out.writerow({"config": "torch_matmul", "shape": "8x9x10", "dtype": "bf16", "status": "ok", "graph_us": 5, "tflops": 700})
    assert draw(sample).returncode == 0
    text = numbers.read_text(encoding="utf-8")
    for line in ("| TFLOP/s (times the best peer's) | 512 | 16,384 |", "| D=64 | 16 (1.25x) | 512 (1.25x) |", "| D=128, causal | 16 (1.25x) | 512 (1.25x) |",
                 "The peers through PyTorch 2 with cuDNN 92700, fa3-fwd 1. Sample GPU"):
        assert line in text, line
    drawn = texts(sample / "results/peers/field.svg")
    assert {"sdpa", "cuDNN", "FlashAttention-2", "FlashAttention-3", "D=64", "D=64, causal", "D=128", "512", "16k",
            "cuBLAS, 8x9x10"} <= set(drawn)


def test_what_others_publish(sample):
    """What stands by hand in the second column stays beside what is measured."""
    numbers, path = sample / "docs/NUMBERS.md", sample / "results/peers/2026-01-02-Sample-GPU-published.csv"
    names = (sample / "results/peers/2026-01-02-Sample-GPU.csv").read_text(encoding="utf-8").splitlines()[0].split(",") + ["window"]
    text = numbers.read_text(encoding="utf-8")
    begin, end = (text.index(f"<!-- published:{word}") for word in ("begin", "end"))
    marker = text[begin:text.index("\n", begin) + 1]
    kept = "| problem | published | x |\n|---|---|--:|\n| 2,64,8,9,9,64 bf16 causal window 3:-1 | 349, by hand | 1 |\n"
    numbers.write_text(text[:begin] + marker + kept + text[end:], encoding="utf-8")
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, names, restval="")
        out.writeheader()
        for window, config, check, us, tflops in (("3:-1", "hopper", "PASS", 10, 400), ("3:-1", "torch_cudnn", "", 15, 266),
                                                  ("", "hopper", "PASS", 20, 500)):
            out.writerow(dict(B=2, Hq=64, Hkv=8, Sq=9, Sk=9, D=64, causal="br", dtype="bf16", device="Sample GPU", window=window,
                              config=config, check=check, status="ok", graph_us=us, tflops=tflops))
    assert draw(sample).returncode == 0
    text = numbers.read_text(encoding="utf-8")
    for line in ("| problem | published | fastest line | cuDNN | times as fast |",
                 "| 2,64,8,9,9,64 bf16 causal window 3:-1 | 349, by hand | 400 | 266 | 1.50x |",
                 "| 2,64,8,9,9,64 bf16 causal |  | 500 |  |  |"):
        assert line in text, line


def test_e4m3_tables(sample):
    (sample / "results/accuracy").mkdir()
    peers = (sample / "results/peers/2026-01-02-Sample-GPU.csv").read_text(encoding="utf-8").splitlines()
    names = peers[0].split(",") + ["rel_rms"]
    row = dict.fromkeys(names, "") | dict(zip("B Hq Hkv Sq Sk D".split(), "1 8 8 2048 2048 64".split())) | dict(
        shape="long", dtype="e4m3", causal="off", status="ok", device="Sample GPU")
    rows = [dict(row, config="wgmma_e4m3", check="PASS", graph_us="25", tflops="343.6", rel_rms="0.026"),
            dict(row, config="slower", check="PASS", graph_us="30", tflops="286.3", rel_rms="0.025"),
            dict(row, config="torch_cudnn", graph_us="24.6", tflops="349.2", rel_rms="0.038")]
    (sample / "results/peers/2026-01-02-Sample-GPU-e4m3.csv").write_text(
        "\n".join([",".join(names), *(",".join(one[name] for name in names) for one in rows)]) + "\n", encoding="utf-8")
    (sample / "results/accuracy/2026-01-02-Sample-GPU.csv").write_text(
        "contender,input,D,dtype,Sk,rel_rms,mean\nwgmma_e4m3,\"N(0,1)\",64,e4m3,1024,0.0261,\n"
        "wgmma_e4m3,equal logits,64,e4m3,1024,0.0301,0.99999\n"
        "torch:cudnn,equal logits,64,e4m3,16384,0.3,0.705\n", encoding="utf-8")
    done = draw(sample)
    assert done.returncode == 0, done.stderr
    page = (sample / "docs/HOPPER.md").read_text(encoding="utf-8")
    for line in ("| problem | fastest line | TFLOP/s | cuDNN | rel_rms | cuDNN's, O in e4m3 |",
                 "| 1,8,8,2048,2048,64 e4m3 | wgmma_e4m3 | 344 | 349 | 0.026 | 0.038 |",
                 "| contender | what | 1,024 keys | 16,384 keys |", "| `wgmma_e4m3` D=64 e4m3 | rel_rms | 0.0261 |  |",
                 "| `torch:cudnn` D=64 e4m3 | mean of O |  | 0.705 |"):
        assert line in page, page


def test_decode_table(sample):
    names = (sample / "results/peers/2026-01-02-Sample-GPU.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
    row = dict.fromkeys(names, "") | dict(zip("B Hq Hkv Sq Sk D".split(), "1 32 8 1 4096 128".split())) | dict(
        shape="1x32x8x1x4096", dtype="bf16", causal="off", status="ok", device="Sample GPU", family="wgmma", check="PASS")
    rows = [dict(row, config="slower", graph_us="9.5"), dict(row, config="wgmma_decode", graph_us="8"),
            dict(row, config="mma_decode", family="mma", graph_us="9"),
            dict(row, config="torch_cudnn", family="", check="", graph_us="12")]
    (sample / "results/peers/2026-01-02-Sample-GPU-decode.csv").write_text(
        "\n".join([",".join(names), *(",".join(one[name] for name in names) for one in rows)]) + "\n", encoding="utf-8")
    assert draw(sample).returncode == 0
    page = (sample / "docs/HOPPER.md").read_text(encoding="utf-8")
    for line in ("| problem | wgmma, µs | mma.sync, µs | cuDNN, µs | K and V, TB/s | times as fast |",
                 "| 1,32,8,1,4096,128 bf16 | 8.00 | 9.00 | 12.0 | 2.10 | 1.50x |"):  # 2 * 8 * 4096 * 128 * 2 bytes in 8 us
        assert line in page, page


def test_bugs_table(sample):
    page = sample / "docs/TESTING.md"
    page.write_text("<!-- bugs:begin -->\n<!-- bugs:end -->\n", encoding="utf-8")
    words = ("# rounding\no_truncated  caught check: 3 rows\n# waits\nlost_wait  caught thread: x\nfar_row  caught check: y\n"
             "kept MISSED check\n")
    done = subprocess.run([sys.executable, sample / "tools/page.py", "--bugs"], input=words, text=True, check=False)
    assert done.returncode == 0
    text = page.read_text(encoding="utf-8")
    for line in ("| rounding | 1 |  |  |  |  |  |", "| waits | 1 |  | 1 |  |  |  |", "| all: 3 | 2 | 0 | 1 | 0 | 0 | 0 |", "Missed: kept"):
        assert line + "\n" in text


def test_refusals(sample):
    """One sentence, exit code 2, and nothing written."""
    before = {path: path.read_bytes() for path in sample.rglob("*.md")}

    def refuses(words, *arguments):
        done = draw(sample, *arguments)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and words in done.stderr, done.stderr
        assert before == {path: path.read_bytes() for path in before}

    main = sample / "results/lines/2026-01-02-Sample-GPU.csv"
    rows = main.read_text(encoding="utf-8")
    refuses("no such file", "none.csv")
    shutil.copy(main, sample / "mine.csv")  # a page would link to where it is not
    refuses("mine.csv: pages link to their rows; put it into the folder of results/", "mine.csv")
    for regex, words in (("(", "--diffs (: not a regular expression"), ("nobody", "--diffs nobody: no rung of docs/LADDER.md has such a name")):
        refuses(words, "--diffs", regex)
    at = rows.splitlines()[0].split(",").index("graph_us")
    for number in "nan", "-1", "inf", "0", "many":
        main.write_text(re.sub(rf"^((?:[^,\n]*,){{{at}}})[0-9.]+,", rf"\g<1>{number},", rows, flags=re.M), encoding="utf-8")
        refuses(f"has '{number}' in its column graph_us, which is no such number")
    refuses("stdin has no line", "--bugs")
    main.write_text("a,b\n", encoding="utf-8")
    refuses("lacks the columns config, family")
    main.write_text(rows.splitlines()[0] + "\n", encoding="utf-8")
    refuses("no rows")
    main.write_text(re.sub("^.*,(mission|long),.*\n", "", rows, flags=re.M), encoding="utf-8")
    refuses("no row with a time")
    main.write_text(rows, encoding="utf-8")
    page = sample / "docs/HOPPER.md"
    page.write_text("no markers\n", encoding="utf-8")
    before[page] = page.read_bytes()
    refuses("no page has the markers of accuracy, decode, e4m3, rested, wgmma")


# ---- commands, word for word ----

ONE = "scalar_vec8"  # the line that these commands check


def commands():
    """Every command line of the sh blocks of README and of how to run and to paste in USING."""
    blocks = re.findall(r"^```sh\n(.*?)^```", README + re.search(r"^## Run it.*?^## C and", USING, re.M | re.S)[0], re.M | re.S)
    return [re.sub(r"\s+# .*", "", line) for block in blocks for line in block.splitlines()]


def needs_time_or_gpu(command):
    """Commands that time something, or take minutes on the CPU: their words are checked instead."""
    words = shlex.split(command)
    slow = words[0] == "./run_all.sh" and ("--shape" in words or words[1:2] in (["ab"], ["ablate"], ["profile"], ["test"]))
    return slow or words[0].startswith("build/") or "--only" in words and not re.search(words[words.index("--only") + 1], ONE)


@pytest.fixture(name="clone", scope="module")
def make_clone(tmp_path_factory):
    """A copy in which commands leave what they leave; of configs.txt the one line that README checks by itself."""
    folder = copy(tmp_path_factory.mktemp("clone"), ".")
    (folder / "one.txt").write_text(f"{ONE} VEC_WIDTH=8 SYNC_POLICY=1\n", encoding="utf-8")
    done = sh("./run_all.sh --cpu", folder, SDPA_CONFIGS=str(folder / "one.txt"))
    assert done.returncode == 0, done.stderr
    return folder


def test_commands_that_need_no_gpu(clone):
    run = [c for c in commands() if not needs_time_or_gpu(c) and not c.startswith(("nvcc", "cmake"))]
    assert len(run) >= 4
    for command in run:
        with_lines = {} if "extract" in command else {"SDPA_CONFIGS": str(clone / "one.txt")}
        done = sh(command, clone, **with_lines)
        assert done.returncode == 0, command + ":\n" + done.stdout + done.stderr
    assert "namespace wgmma_causal" in (clone / "my_kernel.cu").read_text(encoding="utf-8")


def test_the_output_that_readme_shows(clone):
    """Of its first command, with the lines of configs.txt, but for the last digits of errors and what "..." stands for."""
    command, shown = re.search(r"^```sh\n(.*?)\n```\n+```\n(.*?)```", README, re.M | re.S).groups()
    done = sh(command, clone)
    said = re.sub(r"(0\.000\d)\d*", r"\1", done.stdout + done.stderr).splitlines()
    assert done.returncode == 0, done.stderr
    for line in re.sub(r"(0\.000\d)\d*", r"\1", shown).splitlines():
        assert line == "  ..." or line in said, (line, said)


@pytest.mark.long
def test_compile_commands(clone):
    path = os.environ["PATH"] + ":/usr/local/cuda/bin"
    if not shutil.which("nvcc", path=path):
        pytest.skip("nvcc is missing")
    run = [c for c in commands() if c.startswith("nvcc")]
    # Of the whole build the first half: that every line compiles is tested by compiling every line.
    run += [c.split(" && ")[0] for c in commands() if c.startswith("cmake")]
    assert len(run) >= 3 and (clone / "my_kernel.cu").is_file()
    for command in run:
        strict = {"NVCC_APPEND_FLAGS": "-Xcompiler=-Wall,-Wextra,-Werror"} if command.startswith("nvcc") else {}
        done = sh(command, clone, PATH=path, **strict)
        assert done.returncode == 0, command + ":\n" + done.stdout + done.stderr


def judge_words(words, clone):
    """The sub-command, options, lines and knobs of a command exist."""
    def help_of(*command):
        done = subprocess.run([*command, "--help"], cwd=clone, capture_output=True, text=True, check=False)
        assert done.returncode == 0, command
        return done.stdout + done.stderr

    executable = ["build-cpu/sdpa_scalar_vec8"]
    built = re.fullmatch(r"build(?:-cpu)?/sdpa_(\w+)", words[0])
    if built:
        assert built[1] in NAMES + ["NAME"]
        command, words = executable, words[1:]
    elif words[0] == "./run_all.sh":
        sub = words[1:2] if words[1:] and words[1][0] not in "-<>" else []
        assert not sub or re.search(rf"^  +\S+/?run_all.sh {sub[0]}\b|^usage: ./run_all.sh {sub[0]}\b|^  {sub[0]}\s",
                                    help_of("./run_all.sh"), re.M), sub
        command = ["./run_all.sh", *(sub if sub not in (["report"], ["list"]) else [])]
        words = words[1 + len(sub):]
    else:
        command, words = words[:1], words[1:]
    for word in words:
        if word == "--":
            command = executable
        elif word.startswith("-"):
            assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", help_of(*command)), (command, word)
        elif re.fullmatch(r"[A-Z_]{3,}=\w+", word):
            assert word.split("=")[0] in KNOBS + ["KNOB"], word
        elif re.fullmatch(r"(?:[\w~.]+:)?\^?(?:scalar|wmma|mma|wgmma|hopper|ampere)\w*\$?", word):
            assert word.split(":")[-1].strip("^$") in NAMES, word
        elif word.startswith("torch:"):
            assert word in builds.PACKAGES or word.split(":")[1] in builds.TORCH_BACKENDS


def test_words_of_all_other_commands(clone):
    found = [("README.md or USING.md", command) for command in commands() if needs_time_or_gpu(command)]
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        spans = re.findall(r"`((?:\./run_all\.sh|tools/peers\.py|build(?:-cpu)?/sdpa_)[^`]*)`", text)
        lines = re.findall(r"^    (\./run_all\.sh.*|build.*)", text, re.M)
        found += [(page.name, re.sub(r"\s+#.*", "", command)) for command in spans + lines]
    assert len(found) >= 25
    for page, command in found:
        try:
            judge_words(shlex.split(command), clone)
        except AssertionError as error:
            raise AssertionError(f"{page}: {command}: {error}") from error
