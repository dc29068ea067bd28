"""What answers and clients' hints tell the reuse index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Annotated

import numpy as np
import numpy.typing as npt

from scripts.bench.commands import Count, one_of
from scripts.bench.report import Table, seconds_of
from scripts.bench.traces import (
    COST,
    GENERATED,
    RULES,
    SIZES,
    TRACES,
    Folder,
    Row,
    Seeds,
    percent,
    read_named,
    read_or_generate,
    rows_of,
)
from sglang_hybrid.core.records.nodes import Clock
from sglang_hybrid.core.returns import answers as model
from sglang_hybrid.core.returns.feature_weights import WEIGHT_BITS, Features
from sglang_hybrid.core.returns.history import History, TimeUnit
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.runner import Job, Runner
from sglang_hybrid.extensions.lab.simulation.traces.declared_hints import KINDS, with_hints
from sglang_hybrid.extensions.lab.simulation.traces.generators import generate, traffic
from sglang_hybrid.extensions.lab.systems import Spec

WITHOUT = Spec("reuse", (("answers", 0.0),))
WITH = Spec("reuse")


def answers(
    hints: Annotated[tuple[str, ...], one_of(KINDS)] = tuple(KINDS),
    rules: Annotated[tuple[str, ...], one_of(RULES)] = ("paper", "one"),
    traces: Folder = TRACES,
    generated: Seeds = None,
    closing: Annotated[
        Count | None,
        {"metavar": "TOKENS"},
        "generated agents and chats whose last answer ends with so many tokens of its own",
    ] = None,
    workers: Annotated[Count, "processes"] = 1,
    cost: Annotated[bool, "of a request, instead"] = False,
    features: Annotated[bool, "further ones, instead"] = False,
) -> None:
    """What answers and clients' hints add to the hit rate of the reuse index.

    A row per trace and size of the cache, request after request, starting cold, by the paper's
    rules and as served with one memory. Token hit rates in percent without either, and the points
    that are added: by answers; by answers and hints of a kind (the option `--hints` of the replay).
    With --cost it is the time that the history takes for a request when it ends, with and without
    answers. With --features it is what further features of an answer add to those that count:
    whether it calls a tool (tau-bench: its message has the token of `tool`), its length by powers
    of two, and, as a placebo, one that is the same for all.
    """
    if cost:
        show_cost()
        return
    if features:
        show_features(traces, rules)
        return
    runner, rows = read_or_generate(traces, generated)
    if closing:
        runner, rows = closing_answers(closing, generated or 1)
    hinted = dict(runner.traces)
    for kind in hints:
        hinted |= {f"{name}, {kind}": with_hints(it, kind) for name, it in runner.traces.items()}
    variants = [(WITHOUT, ""), (WITH, ""), *((WITH, f", {kind}") for kind in hints)]
    jobs = [
        Job(spec, name + suffix, COST, int(size * 1e9), serving=RULES[one])
        for name, size in rows
        for one in rules
        for spec, suffix in variants
    ]
    results = iter(Runner(hinted).run_all(jobs, workers))
    heads = ["without", "answers", *(f"hints: {kind}" for kind in hints)]
    show_gains(rows, rules, heads, (100 * result.hit_rate for result in results), digits=1)


def show_gains(
    rows: Sequence[Row],
    rules: Sequence[str],
    heads: Sequence[str],
    rates: Iterator[float],
    digits: int,
) -> None:
    """Print a row for each of `rows` and the means: for each of the rules the first rate, and what
    the others add to it. rates: by row, rules and head.
    """
    table = Table("trace", "GB", *(f"{one}: {head}" for one in rules for head in heads))

    def cells(found: Sequence[float]) -> list[str]:
        signs = ("", *["+"] * (len(heads) - 1)) * len(rules)
        return [f"{x:{sign}.{digits}f}" for sign, x in zip(signs, found, strict=True)]

    gains = []
    for name, size in rows:
        gained: list[float] = []
        for _ in rules:
            first, *others = (next(rates) for _ in heads)
            gained += [first, *(rate - first for rate in others)]
        gains.append(gained)
        table.row(name, f"{size:g}", *cells(gained))
    means = [mean(column) for column in zip(*gains, strict=True)]
    table.row("**mean**", "", *(f"**{cell}**" for cell in cells(means)))


def closing_answers(tokens: int, seeds: int) -> tuple[Runner, list[Row]]:
    """Agents and chats whose last answer ends with so many tokens of its own, and their rows."""
    sizes: dict[str, Sequence[float]] = {}
    traces: dict[str, Sequence[Request]] = {}
    for kind in ("agent", "chat"):
        how = traffic(kind, sessions=60 if kind == "agent" else None, closing=tokens)
        for seed in range(seeds):
            name = f"{kind} {seed}, closing"
            traces[name], sizes[name] = generate(kind, how, seed), GENERATED[kind]
    return Runner(traces), rows_of(sizes)


def show_cost(requests: int = 300, answer: int = 200) -> None:
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
                times.append(seconds_of(lambda: history.observe(sequence, length, clock)))  # noqa: B023
            medians.append(f"{1e3 * median(times):.3f}")
        table.row(f"{length:,}", *medians)


def show_features(folder: Path, every_rules: Sequence[str]) -> None:
    """Hit rates with one more feature of each answer, where answers tell something."""
    names = ("taubench_airline", "sharegpt_55")
    runner = Runner({name: read_named(folder, name) for name in names})
    rows = [(name, size) for name in names for size in SIZES[name]]

    def rates() -> Iterator[float]:
        for name, size in rows:
            for one in every_rules:
                how = (runner, WITH, name, int(size * 1e9))
                yield percent(*how, serving=RULES[one])
                for feature in FURTHER.values():
                    with one_more(feature):
                        yield percent(*how, serving=RULES[one])

    show_gains(rows, every_rules, ["answers", *FURTHER], rates(), digits=2)


TOOL = 10_154
"""The token of `tool` in tau-bench, which messages have that call one."""

FURTHER: dict[str, Callable[[npt.NDArray[np.int64]], int]] = {
    "tool call": lambda answer: int((answer == TOOL).any()),
    "length": lambda answer: len(answer).bit_length(),
    "placebo": lambda answer: 0,
}


@contextmanager
def one_more(feature: Callable[[npt.NDArray[np.int64]], int]) -> Iterator[None]:
    """Answers have this feature, too."""
    usual = model.features_of

    def features_of(answer: npt.ArrayLike) -> Features:
        ids = np.asarray(answer)
        own = (0x9E3779B1 * (feature(ids) + 1) >> 7) % (1 << WEIGHT_BITS)
        return np.unique(np.append(usual(ids), np.uint16(own)))

    model.features_of = features_of
    try:
        yield
    finally:
        model.features_of = usual
