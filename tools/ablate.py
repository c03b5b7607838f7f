"""usage: ./run_all.sh ablate NAME [--shape S]... [--causal C] [--svg]
Takes back each knob that the line NAME of configs.txt sets, once, to its default (with another one where they
only go together; HEAD_DIM and DTYPE stay), checks these builds, times them in turns against the line, and
prints what each knob is worth. The rows go to results/ablation/DATE-DEVICE-NAME.csv.
  --shape S           the problem, as for ab (the page of ablations knows it by its sizes); repeatable; default mission
                      and long
  --causal off|br|tl  (default off)
  --svg               draw results/ablation/NAME.svg as well
exit: 0 all builds pass their checks, 1 one does not, 2 bad usage, 3 one could not be run
"""
import itertools
import re

import builds
import cli
import engine
from cli import Refused, say
from search import PROBLEMS_OWN


def removals(line):
    """(KNOB=DEFAULT, the changes that take it back or None, the sentence that forbids it alone) for each knob that the
    line sets. What may go along with it is what the sentence says to type, or one or two others."""
    defaults = line.tree.knobs()
    back = [f"{knob}={defaults[knob]}" for knob, value in (word.split("=", 1) for word in line.words)
            if knob in defaults and knob not in PROBLEMS_OWN and defaults[knob] != value]
    for knob in back:
        def refusal(along=()):
            return line.tree.refusal(builds.changed(line.words, [knob, *along]))
        sentence, others = refusal(), [other for other in back if other != knob]
        advice = [word for word in re.findall(r"[A-Z][A-Z0-9_]*=[A-Z0-9_]+", sentence.partition("type ")[2])
                  if word.split("=")[0] != knob.split("=")[0]]
        tries = [(), advice, *itertools.combinations(others, 1), *itertools.combinations(others, 2)]
        yield knob, next(([knob, *along] for along in tries if not refusal(along)), None), sentence


def removed(text, name):
    return text[len(name) + 1:].replace(" ", ", ")


def run_problem(gpu, kernels, problem, facts, table):
    """Checks and times the line and what is left of it; prints it, the dearest knob first. Whether all passed."""
    bench = engine.Bench(gpu, kernels, dict.fromkeys(kernels, problem))
    name, *_ = kernels
    bad = bench.trouble()
    if name in bad:
        raise Refused(f"{name} gets no time at {problem}: {bad[name]}", 1)
    graphs = bench.fit_to_time()
    series, ratios = engine.compare(gpu, graphs)
    bad.update({key: "its last replay left other bits" for key in graphs if bench.changed_bits(key)})
    for key in kernels:
        table.add(**engine.result_row(bench, key, facts[key], None if key in bad else series))
    print(f"\n{problem} on {gpu.name}: {name}, {series.us(name):.3f} us")
    for key in sorted(ratios.keys() - bad.keys(), key=lambda key: -ratios[key].ratio):
        v = ratios[key]
        bar = "#" * min(40, round(25 * (v.ratio - 1)))
        print(f"  {removed(key, name):<44} {series.us(key):10.3f} us {100 * v.ratio - 100:+6.1f}% "
              f"[{100 * v.low - 100:+.1f}, {100 * v.high - 100:+.1f}] {v.verdict:<7} {bar}")
    for key, sentence in bad.items():
        print(f"  {removed(key, name):<44} gets no time: {sentence}")
    bench.close()
    return not bad


def main():
    options = cli.parse_options(__doc__, cli.MOST)
    if options.svg:
        import page  # before anything is measured, since it needs matplotlib
    found = builds.parse_contenders(options.words)
    if len(found) != 1 or type(found[0]) is not builds.Line:
        raise Refused("one line at a time" if found else "which line?")
    line, = found
    problems = [engine.parse_problem(text, options.causal).typed(line.D, line.dtype, line.Dv)
                for text in options.shape or ["mission", "long"]]
    gpu = engine.need_gpu(" (check without times: ./run_all.sh --cpu)")
    why_not = {builds.Line(line.tree, line.name, tuple(builds.changed(line.changes, changes or [knob]))):
               "" if changes else sentence for knob, changes, sentence in removals(line)}
    built = builds.build([line, *(one for one in why_not if not why_not[one])], gpu.arch)
    why_not.update({one: built[one].trouble for one in why_not if one in built})
    lines = [line, *(one for one in why_not if not why_not[one])]
    kernels = {one.text: engine.load(one, gpu, built) for one in lines}
    facts = {one.text: builds.facts(built[one]) for one in lines}
    table = engine.Table(engine.results_path("ablation", gpu.name, line.name, new=True), engine.row_columns())
    passed = [run_problem(gpu, kernels, problem, facts, table) for problem in problems]
    for one in filter(why_not.get, why_not):
        print(f"cannot be taken back: {removed(one.text, line.text)}: {why_not[one]}")
        table.add(config=one.target, status="error", note=why_not[one])
    say(f"rows: {table.name}")
    if options.svg:
        page.draw_ablation(table.name)
    return 0 if all(passed) else 1
