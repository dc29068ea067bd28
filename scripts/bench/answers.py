"""What answers and clients' hints add to the hit rate of the reuse index.

A row per trace and size of the cache, request after request, starting cold, by the paper's rules
and as served with one memory. Token hit rates in percent without either, and the points that are
added: by answers; by answers and hints of a kind (the option `--hints` of the replay). With --cost
it is the time that the history takes for a request when it ends, with and without answers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean, median
from time import perf_counter

import numpy as np

from scripts.bench.policies import COST, RULES
from scripts.bench.report import Table, positive
from scripts.bench.traces import TRACES, read_or_generate
from sglang_hybrid.core.history import History, TimeUnit
from sglang_hybrid.core.nodes import Clock
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
    parser.add_argument("--cost", action="store_true", help="of a request, instead")


def run(options: argparse.Namespace) -> None:
    if options.cost:
        cost()
        return
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


def cost(requests: int = 300, answer: int = 200) -> None:
    """Milliseconds of `History.observe` for prompts that share all but their last 50 tokens."""
    table = Table("prompt tokens", "without answers, ms", "with answers, ms", text=0)
    for length in (4_096, 65_536):
        rng = np.random.default_rng(0)
        shared = rng.integers(300, 32_000, length - 50)
        sequences = [
            np.concatenate([shared, rng.integers(300, 32_000, 50 + answer)])
            for _ in range(requests)
        ]
        medians = []
        for answer_bytes in (0, 64 << 20):
            history = History(TimeUnit.REQUESTS, max_bytes=1 << 30, answer_bytes=answer_bytes)
            clock, times = Clock(), []
            for sequence in sequences:
                clock.advance()
                begin = perf_counter()
                history.observe(sequence, length, clock)
                times.append(perf_counter() - begin)
            medians.append(f"{1e3 * median(times):.3f}")
        table.row(f"{length:,}", *medians)
