"""What answers and clients' hints add to the hit rate of the reuse index.

A row per trace and size of the cache, request after request, starting cold, by the paper's rules
and as served with one memory. Token hit rates in percent without either, and the points that are
added: by answers; by answers and hints of a kind (the option `--hints` of the replay).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

from scripts.bench.policies import COST, RULES
from scripts.bench.report import Table, positive
from scripts.bench.traces import TRACES, read_or_generate
from sglang_hybrid.replay.hints import KINDS, with_hints
from sglang_hybrid.replay.runner import Job, Runner, run_all
from sglang_hybrid.replay.systems import Spec

WITHOUT = Spec("reuse", (("answers", 0.0),))
WITH = Spec("reuse")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hints", choices=[*KINDS], nargs="+", default=[*KINDS])
    parser.add_argument("--rules", choices=[*RULES], nargs="+", default=["paper", "one"])
    parser.add_argument("--traces", type=Path, default=TRACES, help="the folder they are in")
    parser.add_argument("--generated", type=int, metavar="SEEDS", help="generated traffic instead")
    parser.add_argument("--workers", type=positive, default=1, help="processes")


def run(options: argparse.Namespace) -> None:
    runner, rows = read_or_generate(options.traces, options.generated)
    traces = dict(runner.traces)
    for kind in options.hints:
        traces |= {f"{name}, {kind}": with_hints(it, kind) for name, it in runner.traces.items()}
    variants = [(WITHOUT, ""), (WITH, ""), *((WITH, f", {kind}") for kind in options.hints)]
    jobs = [
        Job(spec, name + hinted, COST, int(size * 1e9), serving=RULES[rules])
        for name, size in rows
        for rules in options.rules
        for spec, hinted in variants
    ]
    results = iter(run_all(Runner(traces), jobs, options.workers))
    heads = ["without", "answers", *(f"hints: {kind}" for kind in options.hints)]
    table = Table("trace", "GB", *(f"{rules}: {head}" for rules in options.rules for head in heads))
    gains: list[list[float]] = []
    for name, size in rows:
        cells, gained = [], []
        for _ in options.rules:
            found = [100 * next(results).hit_rate for _ in variants]
            added = [rate - found[0] for rate in found[1:]]
            cells += [f"{found[0]:.1f}", *(f"{points:+.1f}" for points in added)]
            gained += [found[0], *added]
        gains.append(gained)
        table.row(name, f"{size:g}", *cells)
    means = [mean(column) for column in zip(*gains, strict=True)]
    shown = [
        f"**{value:.1f}**" if nth % len(variants) == 0 else f"**{value:+.1f}**"
        for nth, value in enumerate(means)
    ]
    table.row("**mean**", "", *shown)
