"""usage: ./run_all.sh sanitize [REGEX] [--tool T] [--strict] [--jobs J]
Runs NVIDIA's compute-sanitizer (memcheck, racecheck, synccheck) on a line of each kind of configs.txt, with three
small problems. Prints CSV, a row per run: the number of reports, the number of unexpected ones, and PASS, FAIL or
SKIPPED (the line is for another GPU). EXPECTED in tools/sanitize.py lists the expected reports with reasons; see
docs/TESTING.md. Unexpected reports are printed to stderr; the full output is in BUILD/sanitize/NAME-TOOL.log.
  REGEX     the lines whose names match, instead of one of each kind
  --tool memcheck|racecheck|synccheck  run only this tool
  --strict  treat all reports as unexpected
  --jobs N  parallel runs, from 1 to 99 (default 2)
exit: 0 as expected, 1 something unexpected, 2 bad usage or a missing tool
"""
import csv
import os
import re
import subprocess
import sys
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import builds
import cli
import engine
from cli import Refused, say

# Per family: a plain line, asynchronous copies, a queue, producers and consumers, splits; 8 bits; negative controls.
KINDS = """scalar_vec8 scalar_async2 scalar_u8 wmma_persistent wmma_all wmma_u8 mma_lazy mma_split4 mma_decode
wgmma_plain wgmma wgmma_causal wgmma_split2 wgmma_swap32 wgmma_decode_d128 wgmma_e4m3_d128 hopper_d128_bf16 hopper_e4m3
backward_minimal backward_mma backward_mma5 backward_wgmma_plain backward_hopper scalar_racy wmma_racy"""
# More tiles than stages, and partial tiles; a mask; few rows, and several K tiles for each split.
PROBLEMS = ("--shape 1,6,2,130,300", "--shape 2,2,1,33,70 --causal br", "--shape 1,8,2,4,1100")
QUEUE = "--max-ctas 2"  # fewer CTAs than items
# The tools need the number of mbarriers of a CTA; by default they count mbarriers in the code, which may be too few.
TOOLS = {"memcheck": [], "racecheck": ["--num-cuda-barriers", "128"], "synccheck": ["--num-cuda-barriers", "128"]}
SOURCES = {name: builds.Tree().read(name).splitlines() for name in ("sdpa.cu", "sdpa_backward.cu")}
SECONDS = 300  # a run takes a few seconds
LISTED = 8     # maximum number of unexpected kinds that are listed per run
# Expected reports of a tool on lines. `lines` and `report` are regular expressions; `report` is searched in Group.text.
Expected = namedtuple("Expected", "tool lines report why")
EXPECTED = (
    Expected("racecheck", "_racy$", "Race reported", "a negative control: it has no barrier"),
    Expected("racecheck", "^(wgmma|hopper)", "Race reported.*`s.item.stage. = item;`",
             "all lanes of a warp read the item and one lane arrives for them; racecheck does not model this"),
    Expected("racecheck", "^(wgmma_swap|wgmma_decode|hopper)", "Race reported.* in : (Read|Write) (ld|st)_shared",
             "racecheck before 2026 loses count of a barrier at which some warps only arrive"),
)


# ---- parsing the output ----

class Group(namedtuple("Group", "sentence kernel places")):
    """Reports that differ only in threads, addresses and machine code. places: source locations."""

    @property
    def text(self):
        return f"{self.sentence} in {self.kernel}: {', '.join(self.places)}"


Report = namedtuple("Report", "group offsets hazards")  # offsets in the machine code (racecheck)


def parse(text):
    """The Reports, and the count in the summary, or -1 without a summary. A report starts with one space after the bars; the
    following lines with more spaces belong to it."""
    blocks, promised = [], -1
    for line in text.splitlines():
        words = re.match(r"=========( *)(.*)", line)
        if not words or not words[2].strip():
            continue
        if summary := re.match(r"(?:ERROR|RACECHECK) SUMMARY: ([\d,]+)", words[2]):
            promised = max(promised, int(summary[1].replace(",", "")))
        elif len(words[1]) > 1 and blocks:
            blocks[-1].append(words[2])
        elif not re.match("COMPUTE-SANITIZER|LEAK SUMMARY", words[2]):
            blocks.append([words[2]])
    return [read_report(block) for block in blocks], promised


def read_report(lines):
    """Parses the text of a report, without the bars."""
    text = "\n".join(lines)
    sentence = re.sub(r" at (?!__).*", "", lines[0]) if "Race reported" in lines[0] else lines[0]
    sentence = re.sub(r"0x[0-9a-f]+|\(\d+,\s*\d+,\s*\d+\)", "#", sentence).rstrip(" :")
    kernels = re.findall(r"\b(sdpa_\w+)(?:<[^\n]*BuildOf<\(int\)(\d+)>)?", text)
    kernel, tile = kernels[-1] if kernels else ("", "")  # the outermost function is last
    places, offsets = [], []
    for line in lines:
        if at := re.search(r"(?:\bat |Device Frame: *)(.*?)\+(0x[0-9a-f]+)(?: in (\S+?:\d+))?", line):
            access = re.findall("Read|Write|Atomic", line[:at.start()])
            places.append(" ".join([*access, place_name(at[1], at[3] or "")]))
            offsets.append(at[2])
    hazards = sum(int(n.replace(",", "")) for n in re.findall(r"\[([\d,]+) hazards?\]", text))
    return Report(Group(sentence, kernel + (f" tile {tile}" if tile else ""), tuple(places)), tuple(offsets), hazards)


def place_name(function, where):
    """The last component of a function's name, with file and line and, for a file of SOURCES, the source text."""
    name = re.sub(r"[<(].*", "", re.sub(r"<unnamed>|\(anonymous namespace\)", "", function))
    file, _, number = os.path.basename(where).partition(":")
    text = "".join(SOURCES[file][int(number) - 1:int(number)]) if file in SOURCES else ""
    return " ".join(filter(None, [re.split(r"::| ", name)[-1], where, text and f"`{text.strip()[:70]}`"]))


# ---- evaluating runs ----

@dataclass
class Run:
    """A run of a tool on a line and a problem, with its result."""
    line: builds.Line
    problem: str
    tool: str
    reports: int = 0
    unexpected: int = 0
    verdict: str = "PASS"
    words: tuple = ()  # for stderr
    met: tuple = ()    # the rows of EXPECTED that matched


def judge(run, text, code, expected=EXPECTED):
    """Evaluates the output and the exit code of a run."""
    if code == 77:
        run.verdict = "SKIPPED"
        return
    reports, promised = parse(text)
    groups = Counter(one.group for one in reports)
    own = [row for row in expected if row.tool == run.tool and re.search(row.lines, run.line.name)]
    rows = {group: next((row for row in own if re.search(row.report, group.text)), None) for group in groups}
    unexpected = {group: count for group, count in groups.most_common() if not rows[group]}
    run.reports, run.unexpected = len(reports), sum(unexpected.values())
    run.met = tuple(row for row in rows.values() if row)
    racy = run.line.knob("expect") == "FAIL"
    troubles = [describe([one for one in reports if one.group == group]) for group in list(unexpected)[:LISTED]]
    troubles += [f"and {len(unexpected) - LISTED} more kinds of reports"] * (len(unexpected) > LISTED)
    if promised < 0:
        troubles.append("there is no summary: " + (text.strip().splitlines() or ["it printed nothing"])[-1][:200])
    elif promised > len(reports):
        troubles.append(f"the summary counts {promised} reports, but {len(reports)} were parsed")
    ends_early = run.tool != "racecheck" and reports  # the other tools stop the process at an error
    if code not in ((0, 1) if racy else (0,)) and not ends_early:
        troubles.append(f"it ended with exit code {code}")
    if racy and run.tool == "racecheck" and not reports:
        troubles.append("racecheck finds nothing in a line without barriers")
    run.verdict, run.words = "FAIL" if troubles else "PASS", tuple(troubles)


def describe(reports):
    """The text that describes a group of reports."""
    (group, offsets, _), hazards = reports[0], sum(one.hazards for one in reports)
    what = f"{len(reports)} times: " + f"{hazards} hazards: " * bool(hazards) + group.sentence
    where = f", in {group.kernel or 'no kernel'}" + f" at {'/'.join(offsets)}" * bool(offsets)
    return "\n    ".join([what + where, *group.places])


# ---- running ----

def run_line(sanitizer, expected, line, tool):
    """Runs the tools on a line, with the output in BUILD/sanitize/NAME-TOOL.log. Returns the Runs."""
    build, executable = builds.BUILD, os.path.join(builds.BUILD, "sdpa_" + line.name)
    failed = [name for name in (line.name, "harness") if os.path.exists(f"{build}/log/{name}.log.failed")]
    queue = QUEUE.split() if line.knob("USE_PERSISTENT_CTA") == "1" else []
    with open(os.path.join(build, "sanitize", f"{line.name}-{tool}.log"), "w") as log:
        for problem in PROBLEMS:
            run = Run(line, problem.replace("--", ""), tool)
            if failed or not os.path.exists(executable):
                run.verdict, run.words = "FAIL", (f"it was not built: see {build}/log",)
            else:
                command = [
                    sanitizer, "--tool", tool, "--print-limit", "0", "--check-exit-code", "no", "--show-backtrace",
                    "device", *TOOLS[tool], executable, "--check-only", *problem.split(), *queue]
                done = subprocess.run(["timeout", str(SECONDS), *command], stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, text=True, errors="replace")
                print("$", *command, f"\n{done.stdout}\nexit code {done.returncode}\n", file=log, flush=True)
                judge(run, done.stdout, done.returncode, expected)
            yield run


def unmet(expected, runs):
    """The rows of EXPECTED for these runs that did not match any report."""
    return [row for row in expected if any(row.tool == run.tool and re.search(row.lines, run.line.name) for run in runs)
            and not any(row in run.met for run in runs)]


def main():
    options = cli.parse_options(__doc__, 1)
    regex, = options.words or [f"^({'|'.join(KINDS.split())})$"]
    lines, expected = builds.lines_named(regex, "REGEX"), () if options.strict else EXPECTED
    has_bad_lines = builds.has_bad_lines()
    engine.need_gpu("; run it on a machine with one", "runs kernels")
    sanitizer = builds.nvcc("compute-sanitizer")
    if not sanitizer:
        raise Refused("compute-sanitizer is missing; it is part of the CUDA Toolkit, or install it with: "
                      "python3 -m pip install nvidia-cuda-sanitizer-api, and add its folder to PATH")
    builds.cmake_build(builds.BUILD, keep_going=True, progress=builds.show_progress(), SDPA_CPU="OFF",
                       SDPA_ONLY=f"^({'|'.join(line.name for line in lines)})$")
    os.makedirs(os.path.join(builds.BUILD, "sanitize"), exist_ok=True)
    say(builds.run([sanitizer, "--version"]).stdout.strip().rpartition("\n")[2])

    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow("line problem tool reports unexpected verdict".split())
    jobs = [(line, tool) for line in lines for tool in ([options.tool] if options.tool else TOOLS)]
    runs = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for of_job in pool.map(lambda job: list(run_line(sanitizer, expected, *job)), jobs):
            for run in of_job:
                out.writerow([run.line.name, run.problem, run.tool, run.reports, run.unexpected, run.verdict])
                for words in run.words:
                    say(f"{run.tool} of {run.line.name}, {run.problem}: {words}")
            sys.stdout.flush()
            runs += of_job
    for row in unmet(expected, runs):
        say(f"expected but not reported: {row.tool} of {row.lines}: {row.report}")
    is_clean = any(run.verdict == "PASS" for run in runs) and all(run.verdict != "FAIL" for run in runs)
    return 0 if is_clean and not has_bad_lines else 1
