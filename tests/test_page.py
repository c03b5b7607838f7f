"""Tests of README.md and docs/: numbers match results/, links have targets. test_commands.py has their commands."""
import csv
import itertools
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as xml
from html import unescape
from pathlib import Path

import pytest

import builds
import page
import tool
from test_report import CHROMIUM, HARNESS

ROOT = Path(builds.ROOT)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def copy(folder, *what):
    """Copies the repository's files under WHAT to FOLDER; without git all files."""
    listed = subprocess.run(["git", "ls-files", "--", *what], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    files = listed.split("\n") if listed else [p.relative_to(ROOT) for w in what for p in [ROOT / w, *(ROOT / w).rglob("*")]]
    for name in filter(lambda name: name and (ROOT / name).is_file(), files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(name="draw")
def make_draw(monkeypatch):
    """Runs `./run_all.sh results` in a copy; returns exit code, stdout and stderr."""
    def draw(folder, *arguments):
        monkeypatch.setattr(page, "ROOT", folder)
        monkeypatch.setattr(builds, "ROOT", str(folder))
        monkeypatch.chdir(folder)
        return tool.run("page", *arguments)
    return draw


def texts(svg):
    """Parses a picture; returns its texts."""
    return [element.text for element in xml.parse(svg).iter("{http://www.w3.org/2000/svg}text")]


# ---- the pages equal results/ ----

@pytest.mark.parametrize("names,newest", [
    (["2026-01-09-X", "2026-01-10-X"], 1), (["2026-01-09-X-2", "2026-01-09-X"], 0), (["2026-01-09-X-10", "2026-01-09-X-9"], 0),
    (["2026-01-09-X", "2026-01-10-X-more", "2026-01-10-Y"], 0), ([], None)])
def test_the_newest_file(tmp_path, monkeypatch, names, newest):
    """The newest file is that of the last day and, among those of one day, the one with the largest number. Files of other
    names are ignored."""
    monkeypatch.setattr(page, "ROOT", tmp_path)
    folder = tmp_path / "results/peers"
    folder.mkdir(parents=True)
    for name in names:
        (folder / f"{name}.csv").write_text("")
    assert page.latest("peers", "X") == (None if newest is None else folder / f"{names[newest]}.csv")


def test_pages_are_those_of_results(tmp_path, draw):
    """Compares committed files only: an uncommitted measurement needs no page yet."""
    own = copy(tmp_path, "README.md", "docs", "results", "configs.txt", "configs.cmake", "sdpa.cu", "sdpa_backward.cu", "harness")
    for path in (own / one.relative_to(ROOT) for one in PAGES):  # what comes back has been made anew
        text = page.NUMBER.sub("0", path.read_text(encoding="utf-8"))
        path.write_text(re.sub(r"(<!-- chains:begin.*?-->).*?(?=<!-- chains:end)", r"\1\n", text, flags=re.S), encoding="utf-8")
    code, _, err = draw(own)
    assert code == 0, err
    for path in PAGES:
        assert path.read_text(encoding="utf-8") == (own / path.relative_to(ROOT)).read_text(encoding="utf-8"), \
            f"{path.name} is not what results/ gives: ./run_all.sh results, and git add a new CSV"
    drawn, committed = ({picture.relative_to(folder): texts(picture) for picture in folder.rglob("*.svg")}
                        for folder in (own / "results", ROOT / "results"))
    assert drawn == committed
    for name in drawn:
        assert (ROOT / "results" / name).stat().st_size < 40_000


def test_marked_numbers():
    """Each number computed from results/ is marked on a page, and each marked number is one of these."""
    text, known = "".join(path.read_text(encoding="utf-8") for path in PAGES), page.numbers()
    marked = re.findall(r"<!--=([\w.]+)-->", text)
    assert len(marked) == len(page.NUMBER.findall(text)) and {*marked} <= known.keys()
    assert {name.partition(".")[0] for name in marked} == {name.partition(".")[0] for name in known}


def anchors(text):
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links():
    for path in PAGES:
        for link, image in re.findall(r'\]\(([^):]+)\)|src="([^"]+)"', path.read_text(encoding="utf-8")):
            name, _, anchor = (link or image).partition("#")
            target = path.parent / name if name else path
            assert target.exists(), f"{path.name}: {link or image}"
            assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), f"{path.name}: {link}"


# ---- docs/READING.md ----

def test_reading_follows_the_file():
    """READING lists the sections in sdpa.cu's order, and the names it gives are defined there."""
    text = (ROOT / "sdpa.cu").read_text(encoding="utf-8")
    titles = re.compile(r"^// (?:====|----) (?!5 )(\d\w?) ", re.M)
    starts = {found[1]: found.start() for found in reversed([*titles.finditer(text)])}  # 5c has several parts: the first
    rows = re.findall(r"^\| (\d\w?) .*\|([^|]*)\|$", (ROOT / "docs/READING.md").read_text(encoding="utf-8"), re.M)
    assert [section for section, _ in rows] == sorted(starts, key=starts.get) and len(rows) >= 12
    ends = [*(starts[section] for section, _ in rows[1:]), len(text)]
    for (section, names), end in zip(rows, ends):
        for name in re.findall(r"`(\w+)", names):
            assert re.search(rf"\b{name}\b", text[starts[section]:end]), f"{name} is not in section {section} of sdpa.cu"


def test_no_call_is_invented():
    chains = pytest.importorskip("chains", reason="tree-sitter is missing; python3 -m pip install tree-sitter tree-sitter-cpp")
    calls = chains.calls_of((ROOT / "sdpa.cu").read_text(encoding="utf-8"))
    for way in ("WgmmaConsumer::run_items > WgmmaConsumer::issue_pv",  # overlapped_loop() is in between
                "Wgmma16Consumer::softmax_then_wait > WgmmaConsumer::overlapped_loop",  # the call has the opposite direction
                "ItemTiles::copy_kv > VectorCopy::copy",  # TileCopy::copy() is in between
                "sdpa_wgmma > Wgmma16Consumer::load_items", "Wgmma16Producer::run > E4m3Producer::load_items",  # of another struct
                "scalar_qk > wgmma_ss", "gone > fmaf", "scalar_qk > gone"):
        caller, called = way.split(" > ")
        assert called not in calls.callees(caller), way


@pytest.mark.skipif(not CHROMIUM, reason="chromium is missing; install it with: sudo apt-get install chromium")
def test_pictures_in_a_browser(tmp_path):
    """At a width of 400 pixels, no text of a picture overlaps another or is too small."""
    pictures = sorted((ROOT / "results").rglob("*.svg"))
    overlaps = HARNESS[HARNESS.index("function overlaps"):HARNESS.index("function examine")]
    shown = tmp_path / "page.html"
    shown.write_text("<meta charset='utf-8'><body style='width:400px'><style>svg{width:400px;height:auto;display:block}</style>"
                     + "".join(picture.read_text(encoding="utf-8") for picture in pictures)
                     + f"""<pre></pre><script>{overlaps}
const svgs = [...document.querySelectorAll("svg")], texts = [...document.querySelectorAll("svg text")];
document.querySelector("pre").textContent = JSON.stringify({{svgs: svgs.length, overlaps: svgs.flatMap(overlaps),
  least: Math.min(...texts.map(t => t.getBoundingClientRect().height))}});
</script>""", encoding="utf-8")
    done = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                           f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=5000", "--dump-dom", shown.as_uri()],
                          capture_output=True, text=True, check=False, timeout=600)
    found = json.loads(unescape(re.search("<pre>(.*?)</pre>", done.stdout, re.S)[1]))
    assert found["svgs"] == len(pictures) and found["overlaps"] == [] and round(found["least"], 2) >= 9


# ---- a sample: which files are shown, and how ----

SAMPLE = "2026-01-02-Sample-GPU"
SECTIONS = {"README.md": ["results", "story"], "docs/NUMBERS.md": ["peers", "ladder", "ablation", "field", "published"],
            "docs/LADDER.md": ["scalar_rungs", "wgmma_rungs", "decode_rungs", "backward_rungs"], "docs/READING.md": ["chains"], "docs/USING.md": ["ranked"],
            "docs/HOPPER.md": ["wgmma", "rested", "decode", "e4m3", "accuracy"]}
BY_HAND = ("mma_split4               PASS\n| mma_split4 |  |  |  | by hand |\n| Named | 1,8,8,512,512,64 fp16 |\n| Unmeasured | 9,9,9,9,9,64 fp16 |\n"
           "| nowhere |  |  |  | by hand too |\n| 2,64,8,9,9,64 bf16 causal window 3:-1 | 349, by hand | 1 |\n")


@pytest.fixture(name="sample")
def make_sample(tmp_path):
    copy(tmp_path, "tools", "configs.cmake", "sdpa.cu", "harness")
    shutil.copytree(ROOT / "tests/data/results", tmp_path / "results")
    (tmp_path / "results/ladder").mkdir()
    shutil.copy(tmp_path / f"results/peers/{SAMPLE}.csv", tmp_path / f"results/ladder/{SAMPLE}-wgmma.csv")
    (tmp_path / "configs.txt").write_text("scalar_minimal\nwmma_all\nmma_split2\nmma_split4 : mma_split2 SPLIT_KV=4\n",
                                          encoding="utf-8")
    (tmp_path / "docs").mkdir()
    for name, parts in SECTIONS.items():
        (tmp_path / name).write_text("".join(f"before {p}\n<!-- {p}:begin -->\nold\n{BY_HAND}"
                                             f"<!-- {p}:end -->\nafter {p}\n" for p in parts), encoding="utf-8")
    return tmp_path


def spoil(old, new, pattern, replacement):
    """A copy of a CSV with a replaced text."""
    new.write_text(re.sub(pattern, replacement, old.read_text(encoding="utf-8"), flags=re.M), encoding="utf-8")


def test_sample(sample, draw):
    results, read = sample / "results", lambda name: (sample / name).read_text(encoding="utf-8")
    # The newest by its name is shown: these are older, whatever their mtime, of another device, or of no kind.
    lines = results / "lines"
    (lines / f"{SAMPLE}.csv").rename(lines / f"{SAMPLE}-10.csv")
    for other in (f"{SAMPLE}-2", "2026-01-01-Sample-GPU-11"):
        spoil(lines / f"{SAMPLE}-10.csv", lines / f"{other}.csv", "scalar_minimal,", "not_the_newest,")
    with open(lines / f"{SAMPLE}-10.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with open(lines / f"{SAMPLE}-10.csv", "w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, [*rows[0], "peak_share", "bound", "pass"])
        out.writeheader()
        for row in rows:  # of a peak of 400 TFLOP/s, in e4m3 of 800
            out.writerow({**row, "bound": "matrix", "peak_share": f"{float(row['tflops']) / 400:.3f}" if row["tflops"] else ""})
        out.writerow({**rows[0], "config": "e4m3", "dtype": "e4m3", "tflops": "640", "peak_share": "0.8", "bound": "matrix"})
        out.writerow({**rows[0], "config": "not_the_newest", "graph_us": "0.01", "pass": "backward"})  # the pages have the forward pass
    for name, old, new in (("Other-GPU", "Sample GPU", "Other GPU"), ("Sample-GPU-more", "mma_split4,", "not_the_newest,")):
        spoil(results / f"peers/{SAMPLE}.csv", results / f"peers/2026-01-03-{name}.csv", old, new)
    (results / "ablation/gone.svg").touch()
    assert draw(sample)[0] == 0
    wanted = {
        "README.md": ("before results", "| Named | 1,8,8,512,512,64 fp16 | 6.36 | 84 | 21% | 9.07 | 9.91 | 1.42x |",
                      "| Unmeasured | 9,9,9,9,9,64 fp16 |  |  |  |  |  |  |", "The peak is 400 TFLOP/s. ", "after results",
                      "| mma_split4 | 6.34 | 1.0x | 85 | by hand |", "| nowhere |  |  |  | by hand too |",
                      "Sample GPU, driver 1.2.3, CUDA 13.0, commit "),
        "docs/NUMBERS.md": ("| mission: 1,8,8,512,512,64 fp16 | mma_split4 | 6.36 | 84 | 21% | 9.07 | 9.91 | 1.42x |",
                            "| scalar_minimal |  | 88.0 | 799 |  |", "| mma_split4 | mma_split2: ", "| 37.7 (0.80x) | by hand |",
                            "| USE_WARP_SPECIALIZATION=0 SYNC_POLICY=2 | 31.4 | +113% | 144 | +62% |",
                            "`SYNC_POLICY=5` cannot be reset alone: SYNC_POLICY=5 needs the producer warps gone",
                            "None on this GPU yet: `tools/peers.py LINE... --field` measures it."),
        "docs/HOPPER.md": ("| 1,8,8,512,512,64 fp16 | 84 |",), "docs/READING.md": ("| frames | copy of K |", "  copy of K: sdpa_scalar > "),
        "docs/LADDER.md": ("None on this GPU yet: `./run_all.sh rungs` measures it.",),
        "docs/USING.md": ("mission, D=64 fp16, base scalar_minimal", "mma_split4               PASS         6.34")}
    for name, parts in wanted.items():
        for part in parts:
            assert part in read(name), part
        assert not re.search("not_the_newest|Other GPU|old", read(name))
    assert not (results / "ablation/gone.svg").exists() and re.search(r"^\| scalar_racy \|[^|]*\|  \|  \|", read("docs/NUMBERS.md"), re.M)
    assert {"Named", "sdpa"} <= set(texts(results / "peers/peers.svg")) and "Named" not in texts(results / "peers/all.svg")
    # Drawn once more all is the same, also each picture; and so is what `ablate --svg` draws.
    before = {path: path.read_bytes() for path in (*sample.rglob("*.md"), *results.rglob("*.svg"))}
    picture = results / "ablation/wmma_all.svg"
    picture.unlink()
    page.draw_ablation(f"results/ablation/{SAMPLE}-wmma_all.csv")
    assert texts(picture) and draw(sample)[0] == 0
    assert results / "peers/peers.svg" in before and before == {path: path.read_bytes() for path in before}
    # A run without a problem that README names leaves its rows. A file that is named is taken.
    spoil(results / f"peers/{SAMPLE}.csv", results / "peers/2026-01-04-Sample-GPU.csv", "^.*,mission,.*\n", "")
    assert draw(sample, str(lines / "2026-01-01-Sample-GPU-11.csv"))[0] == 0
    assert "| Named | 1,8,8,512,512,64 fp16 |\n" in read("README.md") and "not_the_newest" in read("docs/NUMBERS.md")


def of_peers(sizes, **more):
    """A row of the peers' CSV at a problem."""
    columns = dict(zip("B Hq Hkv Sq Sk D".split(), map(int, sizes.split())))
    return dict(columns, status="ok", device="Sample GPU", causal="off", shape=sizes.replace(" ", "x"), family="wgmma", check="PASS") | more


def field_rows():
    for D, causal, S in itertools.product((64, 128), ("off", "br"), (512, 16384)):
        for config, check, us, tflops, note in (("hopper", "PASS", 10, S // 32, ""), ("slower", "PASS", 11, 9, ""),
                                                ("torch_cudnn", "", 12.5, 300, "PyTorch 2 with cuDNN 92700; 700 W"),
                                                ("torch_flash", "", 20, 200, "PyTorch 2; 700 W"), ("torch_fa3", "", 13, 310, "fa3-fwd 1")):
            yield of_peers(f"{16384 // S} {2048 // D} {2048 // D} {S} {S} {D}", causal=causal, dtype="bf16", config=config, check=check,
                           graph_us=us, tflops=tflops, note=note)
    yield dict(config="torch_matmul", shape="8x9x10", dtype="bf16", status="ok", graph_us=5, tflops=700)


PUBLISHED, DECODE = "2 64 8 9 9 64", "1 32 8 1 4096 128"


DECODE_ROWS = [of_peers(DECODE, dtype="bf16", graph_us=us, **more) for us, more in (
    (9.5, dict(config="slower")), (8, dict(config="wgmma_decode")), (9, dict(config="mma_decode", family="mma")),
    (1, dict(config="racy", note="expected failure")),  # a line without a barrier that is fast and passed by luck
    (12, dict(config="torch_cudnn", family="", check="")))]
PUBLISHED_ROWS = [of_peers(PUBLISHED, causal="br", dtype="bf16", **more) for more in (
    dict(window="3:-1", config="hopper", graph_us=10, tflops=400), dict(config="hopper", graph_us=20, tflops=500),
    dict(window="3:-1", config="torch_cudnn", check="", graph_us=15, tflops=266))]


def test_tables(sample, draw):
    columns = (sample / f"results/peers/{SAMPLE}.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
    for kind, rows in (("field", [*field_rows()]), ("published", PUBLISHED_ROWS), ("decode", DECODE_ROWS)):
        with open(sample / f"results/peers/{SAMPLE}-{kind}.csv", "w", newline="", encoding="utf-8") as file:
            out = csv.DictWriter(file, [*dict.fromkeys([*columns, *itertools.chain(*rows)])], restval="")
            out.writeheader()
            out.writerows(rows)
    assert draw(sample)[0] == 0
    for place, wanted in {
            "docs/NUMBERS.md": ("| TFLOP/s (times the best competitor's) | 512 | 16,384 |", "| D=64 | 16 (1.25x) | 512 (1.25x) |",
                                "| D=128, causal | 16 (1.25x) | 512 (1.25x) |",
                                "Competitors: PyTorch 2 with cuDNN 92700, fa3-fwd 1. Sample GPU",
                                "| problem | published | fastest line | cuDNN | times as fast |",
                                # what stands by hand in the second column stays
                                "| 2,64,8,9,9,64 bf16 causal window 3:-1 | 349, by hand | 400 | 266 | 1.50x |",
                                "| 2,64,8,9,9,64 bf16 causal |  | 500 |  |  |"),
            "docs/HOPPER.md": ("| problem | wgmma, µs | mma.sync, µs | cuDNN, µs | K and V, TB/s | times as fast |",
                               # 2 * 8 * 4096 * 128 * 2 bytes in 8 us
                               "| 1,32,8,1,4096,128 bf16 | 8.00 | 9.00 | 12.0 | 2.10 | 1.50x |")}.items():
        text = (sample / place).read_text(encoding="utf-8")
        assert not [line for line in wanted if line not in text]
    # a panel for each D and mask, a line for each contender
    assert {"sdpa", "cuDNN", "FlashAttention-2", "FlashAttention-3", "D=64", "D=64, causal", "D=128", "512", "16k",
            "cuBLAS, 8x9x10"} <= set(texts(sample / "results/peers/field.svg"))


def test_refusals(sample, draw):
    """Refusals are one sentence with exit code 2, and write nothing."""
    before = {path: path.read_bytes() for path in sample.rglob("*.md")}

    def refuses(words, *arguments):
        code, _, err = draw(sample, *arguments)
        assert code == 2 and err.count("\n") == 1 and words in err, err
        assert before == {path: path.read_bytes() for path in before}

    main = sample / f"results/lines/{SAMPLE}.csv"
    rows = main.read_text(encoding="utf-8")
    refuses("no such file", "none.csv")
    shutil.copy(main, sample / "mine.csv")  # a page would link to where it is not
    refuses("mine.csv: pages link to the CSVs, so move it to the folder of results/", "mine.csv")
    at = rows.splitlines()[0].split(",").index("graph_us")
    of_number = re.compile(rf"^((?:[^,\n]*,){{{at}}})[0-9.]+,", re.M)
    for text, words in ((of_number.sub(r"\g<1>-1,", rows), "has '-1' in its column graph_us, which is not a valid number"),
                        (of_number.sub(r"\g<1>nan,", rows), "has 'nan' in its column graph_us"),
                        ("a,b\n", "lacks the columns config, family"), (rows.splitlines()[0] + "\n", "no rows"),
                        (re.sub("^.*,(mission|long),.*\n", "", rows, flags=re.M), "no row with a time")):
        main.write_text(text, encoding="utf-8")
        refuses(words)
    main.write_text(rows, encoding="utf-8")
    hopper = sample / "docs/HOPPER.md"
    hopper.write_text("no markers\n", encoding="utf-8")
    before[hopper] = hopper.read_bytes()
    refuses("no page has the markers of accuracy, decode, e4m3, rested, wgmma")


# ---- the backward pass ----

def test_the_tables_of_the_backward_pass(monkeypatch, tmp_path):
    """Cells have TFLOP/s without a mask and with a causal one. A ratio is taken from its own file, in which we have another
    time. What a contender does not support is a dash."""
    folder = tmp_path / "results/backward"
    folder.mkdir(parents=True)
    packed = "16 of 256 to 4,096, packed"
    rows = [("backward", "1,2,2,64,128", "sdpa", 10, 1, 600), ("backward", "1,2,2,64,128", "cuDNN 9.19.0", 11, 1.1, 545),
            ("backward", "1,2,2,64,128", "FlashAttention-4 4.0.0b36", 12, 1.2, 500),
            ("backward, deterministic", "1,2,2,64,128", "sdpa", 14, 1, 430),
            ("backward, deterministic", "1,2,2,64,128", "FlashAttention-4 4.0.0b36", 21, 1.5, 286),
            ("backward", "1,2,2,64,128 causal", "sdpa", 8, 1, 400), ("backward", "1,2,2,64,128 causal", "cuDNN 9.19.0", 6, 0.75, 533),
            ("backward", packed, "sdpa", 5, 1, 300), ("backward", packed + " causal", "sdpa", 4, 1, 280),
            ("backward", packed + " causal", "FlashAttention-4 4.0.0b36", 8, 2, 140)]
    newer = [("backward", "1,2,2,64,128", "sdpa", 20, 1, 300), ("backward", "1,2,2,64,128", "cuDNN 9.27.0", 21, 1.05, 286)]
    for name, of_file in (("2026-01-02-NVIDIA-H200", rows), ("2026-01-01-NVIDIA-H200", newer), ("2026-01-02-NVIDIA-H200-newer-cudnn", newer)):
        with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("what", "problem", "contender", "us", "ratio", "tflops"), *of_file])
    monkeypatch.setattr(page, "ROOT", tmp_path)
    text, drawings = page.backward_sections()
    assert text["backward_short"] == (
        "| TFLOP/s | sdpa | FlashAttention-4 | cuDNN 9.19 | cuDNN 9.27 | times as fast |\n|---|--:|--:|--:|--:|--:|\n"
        "| 1,2,2,64,128 | 600, 400 | 500, – | 545, 533 | 286, – | 1.05, 0.75 |\n"
        f"| {packed} | 300, 280 | –, 140 |  |  | –, 2.00 |\n")
    assert "| 1,2,2,64,128 | 430, – | 286, – | 1.50, – |" in text["deterministic"] and "cuDNN" not in text["deterministic"]
    assert text["backward"].endswith("(../results/backward/2026-01-02-NVIDIA-H200-newer-cudnn.csv)\n")
    assert {"1,2,2,64,128 causal", "0.75x", "cuDNN 9.27"} <= set(re.findall(r">([^<]+)</text>", drawings["backward/backward.svg"]))
    found = page.backward_rows()
    assert [*page.backward_gains(found, False, lambda problem: problem.endswith("128"))] == [1.05, 0.75]
    assert [*page.backward_gains(found, True)] == [1.5]
