"""usage: ./run_all.sh sweep [N] [--only REGEX] [--series S] [--jobs J] [--cpu]
Checks N (default 120) random problems on every line of configs.txt, on the GPU or (--cpu) on the CPU backend,
with all masks, layouts, inputs and head ratios that the line supports. Prints CSV, a row per line: the line and
how many problems passed, were wrong, or ended with an error. With a GPU, the CSV is also written to
results/sweep/DATE-DEVICE.csv. The rows of all problems are in BUILD/sweep/NAME.csv, messages in NAME.err.
  --only REGEX  only lines whose names match
  --series N    the seed, from 0 (default 0); line i of configs.txt uses the seed N + i
  --jobs N      executables that run in parallel, from 1 to 99 (default 2)
  --cpu         run on the CPU backend
exit: 0 all passed, 1 some did not, 2 bad usage
"""
import csv
import os
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import builds
import cli
import engine
from cli import say

FACTS = "D dtype device sm cuda driver git_sha".split()
COLUMNS = ["config", "series", "problems", "passed", "wrong", "errors", "skipped", *FACTS]


def sweep(name, series, count, path, build):
    """Runs the random problems of a line; rows and messages go to path.csv and path.err. Returns the line's row."""
    executable, logs = os.path.join(build, "sweep_" + name), os.path.join(build, "log")
    with open(path + ".csv", "w") as out, open(path + ".err", "w") as err:
        failed = [f"{logs}/{one}.log" for one in (name, "sweep") if os.path.exists(f"{logs}/{one}.log.failed")]
        if failed:
            print(name, "does not compile:", builds.compiler_words(open(failed[0]).read()), file=err)
        elif os.path.exists(executable):
            words = [executable, "--header", "--sweep", str(count), "--seeds", str(series)]
            subprocess.run(words, stdout=out, stderr=err)
        else:
            print(executable, "was not built", file=err)
    say("swept", name)
    return tally(name, series, path)


def tally(name, series, path):
    """The row of a line."""
    with open(path + ".csv", newline="") as file:
        rows = list(csv.DictReader(file))
    kinds = Counter(row["status"] if row["status"] == "skipped" else "errors" if row["status"] != "ok" else
                    "passed" if row["check"] == "PASS" else "wrong" for row in rows)
    return dict(config=name, series=series, problems=len(rows), **{kind: kinds[kind] for kind in COLUMNS[3:7]},
                **{fact: rows[-1][fact] if rows else "" for fact in FACTS})


def main():
    options = cli.parse_options(__doc__, 1)
    count, only = cli.number("N", *options.words or ["120"]), options.only or ""
    lines, trouble = builds.Tree().read_configs()
    names = [name for name in builds.names_matching(only, lines, trouble=trouble) if "expect=FAIL" not in lines[name].words]
    has_bad_lines = builds.has_bad_lines()
    numbers = {name: options.series + i for i, name in enumerate(lines, 1)}
    gpu = None if options.cpu else engine.find_gpu()
    if not gpu and not options.cpu:
        say("There is no GPU here: sweeping on the CPU backend.")
    build = builds.BUILD + ("" if gpu else "-cpu")
    builds.cmake_build(build, target="sdpa_sweeps", keep_going=True, progress=builds.show_progress(),
                       SDPA_CPU="OFF" if gpu else "ON", SDPA_ONLY=only)
    folder = os.path.join(build, "sweep")
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    paths = {name: os.path.join(folder, name) for name in names}
    with ThreadPoolExecutor(options.jobs) as pool:
        # A line without an executable has no rows and therefore fails.
        counts = list(pool.map(lambda name: sweep(name, numbers[name], count, paths[name], build), names))
    path = engine.results_path("sweep", gpu.name, new=True) if gpu else os.path.join(folder, "counts.csv")
    table = engine.Table(path, COLUMNS, printed=True)
    for row in counts:
        table.add(**row)
    say("counts:", os.path.relpath(path))
    words = [line for name in names for line in open(paths[name] + ".err").readlines()[:3]]
    print("".join(words[:20]), end="", file=sys.stderr)
    return 0 if not has_bad_lines and all(row["passed"] + row["skipped"] == count for row in counts) else 1
