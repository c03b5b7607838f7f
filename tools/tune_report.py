"""What ./run_all.sh tune makes of its logs: an export in the T4 format, a picture, and how good the search is."""
import json
import math
import os
import sys

import numpy as np

import builds
import engine
import micro
from builds import Refused
from search import Space, State, identity, parse_line, read_log, search

WITHIN, SHARE, RUNS_OF_20 = 0.98, 0.15, 18  # a search is good if so many reach this part of the best in this share of the list
T4_INVALIDITY = {"refused": "constraints", "compile": "compile", "gate": "constraints", "wrong": "correctness",
                 "slower": "correct", "elite": "correct"}


def candidates(records):
    return [record for record in records[1:] if "fate" in record]


# ---- exports ----

def t4(records):
    """The log as the T4 results schema, 1.0.0, has it (github.com/odgaard/TuningSchema); times in ms."""
    results = []
    for record in candidates(records):
        us = record.get("us", {})
        times = {"compilation_time": 1e3 * record.get("build_s", 0), "runtimes": [us / 1e3 for us in us.values()],
                 "framework": 1e3 * record.get("time_s", 0), "search_algorithm": 0, "validation": 1e3 * record.get("check_s", 0)}
        measurements = [dict(name=f"time of {problem}", value=us, unit="us") for problem, us in us.items()]
        measurements += [dict(name=name, value=record[name], unit=unit) for name, unit in
                         (("registers", ""), ("spilled", "byte"), ("shared_bytes", "byte")) if name in record]
        results.append(dict(
            timestamp=record.get("at", ""), configuration=dict(word.split("=") for word in record["knobs"].split()),
            objectives=["time"], times=times, invalidity=T4_INVALIDITY[record["fate"]],
            correctness=int(T4_INVALIDITY[record["fate"]] == "correct"), measurements=measurements))
    return {"schema_version": "1.0.0", "results": results}


def matters(records):
    """{knob: how much longer the best without its value takes than the best}, the dearest first."""
    timed = [record for record in candidates(records) if "score" in record and record["fate"] != "wrong"]
    knobs = [dict(word.split("=") for word in record["knobs"].split()) for record in timed]
    best = min(range(len(timed)), key=lambda i: timed[i]["score"])
    found = {}
    for knob in {knob for one in knobs for knob in one}:
        others = [timed[i]["score"] for i, one in enumerate(knobs) if one.get(knob) != knobs[best].get(knob)]
        if others:
            found[f"{knob}={knobs[best].get(knob, 'default')}"] = min(others) / timed[best]["score"] - 1
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def picture(records):
    """The best so far over the candidates, and which knobs mattered."""
    try:
        import report_charts as charts
    except ImportError as missing:
        raise Refused(f"{missing.name} is missing; install it with: python3 -m pip install matplotlib") from None
    own = candidates(records)
    timed = [(i + 1, record["score"]) for i, record in enumerate(own) if "score" in record and record["fate"] != "wrong"]
    if not timed:
        raise Refused("no candidate of this log has a time")
    at, scores = np.array(timed).T
    least, worth = 100 * np.minimum.accumulate(scores), list(matters(records).items())[:10][::-1]
    figure = charts.Figure(figsize=(5.3, 2.2 + 0.2 * len(worth)))
    above, below = figure.subplots(2, 1, height_ratios=(1.6, 0.5 + 0.2 * len(worth)))
    above.plot(at, 100 * scores, ".", color="#8c959f", markersize=3)
    above.step(at, least, where="post", color=charts.INK)
    above.set(xlabel="candidates", ylabel="% of the starting line's time", ylim=(0.97 * least[-1], 1.3 * least[0]))
    names, costs = [name for name, _ in worth], [100 * cost for _, cost in worth]
    for bar, cost in zip(below.barh(names, costs, color=charts.FASTER[0]), costs):
        below.text(bar.get_width(), bar.get_y() + bar.get_height() / 2, f" +{cost:.1f}%", va="center", fontsize=8)
    below.set(xlabel="the best with another value takes longer by, %", xlim=(0, 1.2 * max(costs, default=1) + 0.1))
    below.tick_params(axis="y", labelsize=7)
    figure.tight_layout()
    return charts.standalone(charts.svg(figure, f"best so far over {len(own)} candidates, and which knobs mattered"))


def export(path, what):
    records, _ = read_log(path)
    if len(records) < 2:
        raise Refused(f"{path}: no candidate in it yet")
    if what == "t4":
        print(json.dumps(t4(records), indent=1))
    else:
        out = os.path.splitext(path)[0] + ".svg"
        builds.replace_file(out, picture(records))
        print(out)
    return 0


# ---- how good is the search? ----

class ListJudge:
    """Knows the times of a list of candidates, and nothing else."""

    def __init__(self, records):
        self.known, self.evaluations = {record["knobs"]: record for record in records}, 0

    def refusal(self, line):
        return identity(line) not in self.known

    def prepare(self, line):
        return self.known.get(identity(line), dict(fate="refused"))

    def judge(self, line, record, state):
        if record["fate"] == "refused":
            return record
        self.evaluations += 1
        return dict(record, fate=state.judged(record["score"], line)) if "score" in record else record


class NoLog:
    def add(self, record):
        pass


def evaluations_needed(space, records, queue, seed):
    """How many candidates a search judges until it has one within 2% of the best of the list; without a queue one that takes
    the list at random."""
    judge, state = ListJudge(records), State(space)
    goal = min(record["score"] for record in records if "score" in record) / WITHIN
    reached = lambda: state.best is not None and state.records[state.best]["score"] <= goal  # noqa: E731
    rng = np.random.default_rng(seed)
    search(state, judge, NoLog(), queue or [parse_line(space.tree, records[i]["line"]) for i in rng.permutation(len(records))],
           rng, lambda: not reached(), lambda state: None, breed=bool(queue))
    return judge.evaluations if reached() else math.inf


def replay(options):
    """Prints how many of a list's candidates the search judges, with each kind of start, beside random search."""
    log, _ = read_log(options.replay)
    records = candidates(log)
    if not any("score" in record for record in records) or not log[0]["all"]:
        raise Refused(f"{options.replay}: want the log of tune --all")
    header = log[0]
    tree = builds.Tree()
    name, D, dtype = header["problems"][0]
    shape, _, causal = name.partition(" ")
    problem = engine.parse_problem(shape.replace("x", ","), causal or "off").typed(D, dtype)
    space = Space(parse_line(tree, header["base"]), header["space"], True)
    lines = space.starts(problem)
    kinds = {"random search": [], f"from {space.base.name}": lines[:1], "from the family's lines": lines}
    tiles = options.micro or micro.newest(header["gpu"], space.base.family, D)
    if tiles:
        best = micro.seeds(tiles, space, problem, options.top)
        kinds[f"from {space.base.name}, micro's {options.top}"] = lines[:1] + best
        kinds[f"from the lines, micro's {options.top}"] = lines + best
    fit = sum("score" in record for record in records)
    print(f"{name}, {space.base.family}, D={D} {dtype}: {len(records)} candidates, {fit} of them fit to time; judged until one "
          f"is within {100 - 100 * WITHIN:.0f}% of the best")
    print(f"{'search':<36} {'median':>6} {'18 of 20':>8} {'of the list':>11}  within {100 * SHARE:.0f}%")
    for kind, queue in kinds.items():
        needed = sorted(evaluations_needed(space, records, queue, seed) for seed in range(options.runs))
        most = needed[math.ceil(RUNS_OF_20 / 20 * len(needed)) - 1]
        print(f"{kind:<36} {np.median(needed):6.0f} {most:8.0f} {100 * most / fit:10.1f}%  "
              f"{sum(n <= SHARE * fit for n in needed)} of {len(needed)}")
        sys.stdout.flush()
    return 0
