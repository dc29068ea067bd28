"""How much of the distance from LRU to a clairvoyant eviction a policy closes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Annotated

from scripts.bench.commands import one_of
from scripts.bench.report import BenchFailed, Table
from scripts.bench.traces import COST, RULES, TRACES, Folder, Row, Seeds, percent, read_or_generate
from sglang_hybrid.core.returns import answers, hazards
from sglang_hybrid.core.server_settings import Serving, Split
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.runner import Runner
from sglang_hybrid.extensions.lab.simulation.traces.arrivals import Draw
from sglang_hybrid.extensions.lab.simulation.traces.generators import generate, traffic
from sglang_hybrid.extensions.lab.systems import Setting, Spec

CHANGES = (
    ("agent", "few-shot"),
    ("few-shot", "chat"),
    ("chat", "few-shot"),
    ("few-shot", "transcript"),
)
CHANGES_GB = 0.7
AFTER = (100, 200, 400, 800, 1_500)
TITLES = {"paper": "paper", "served": "two pools", "one": "one memory"}
CLAIRVOYANT = Spec("clairvoyant")
Constants = tuple[tuple[str, float], ...]
VARIED = ("PRIOR_WEIGHT=2,4,8,16,32", "FIRST_GUESS=0.02,0.05,0.1,0.2")


def lru(rules: str) -> Spec:
    """The LRU that a server of these rules can run, SGLang's own if possible."""
    return Spec("sglang-lru" if rules == "served" else "lru")


@dataclass
class Bench:
    """Hit rates in percent, each measured once."""

    runner: Runner
    rows: list[Row]
    _known: dict[tuple[object, ...], float] = field(default_factory=dict)

    def hit_rate(self, spec: Spec, row: Row, rules: str, constants: Constants = ()) -> float:
        key = (spec, row, rules, constants)
        if key not in self._known:
            trace, size = row
            with changed(constants):
                rate = percent(self.runner, spec, trace, int(size * 1e9), serving=RULES[rules])
            self._known[key] = rate
        return self._known[key]

    def limits(self, row: Row, rules: str) -> tuple[float, float]:
        """LRU's hit rate, SGLang's own where two pools are served, and the clairvoyant one."""
        return self.hit_rate(lru(rules), row, rules), self.hit_rate(CLAIRVOYANT, row, rules)

    def closed(
        self, spec: Spec, row: Row, rules: str, constants: Constants = (), gap: str | None = None
    ) -> float | None:
        """Percent of the distance that `spec` closes; None where it is below a point. gap: the
        rules that the distance is measured by, the same by default.
        """
        low, high = self.limits(row, gap or rules)
        if high - low < 1:
            return None
        return 100 * (self.hit_rate(spec, row, rules, constants) - low) / (high - low)

    def mean(
        self, spec: Spec, rows: Sequence[Row], rules: str, constants: Constants = (), **gap: str
    ) -> float:
        """The mean of `closed` over the rows in which there is something to close."""
        closed = [self.closed(spec, row, rules, constants, **gap) for row in rows]
        counted = [share for share in closed if share is not None]
        return sum(counted) / max(len(counted), 1)


@contextmanager
def changed(constants: Constants) -> Iterator[None]:
    """In the block, constants have other values."""
    before = {name: getattr(*place_of(name)) for name, _ in constants}
    for name, value in constants:
        setattr(*place_of(name), type(before[name])(value))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(*place_of(name), value)


def place_of(constant: str) -> tuple[ModuleType, str]:
    """The module and the name of NAME in `core.returns.hazards`, or of answers.NAME in its
    neighbour `answers`.
    """
    module, _, name = constant.rpartition(".")
    return (answers if module == "answers" else hazards), name


def show(bench: Bench, specs: Sequence[Spec], rules: Sequence[str]) -> None:
    """Print a row per trace and size, with columns for each of the rules; then the means."""
    heads = []
    for name in rules:
        of_specs = [title for spec in specs for title in (str(spec), "closed")]
        heads += [f"{TITLES[name]}: {lru(name)}", *of_specs, "clairvoyant"]
    table = Table("trace", "GB", *heads)
    for row in bench.rows:
        cells = [cell for name in rules for cell in rates(bench, specs, row, name)]
        table.row(row[0], f"{row[1]:g}", *cells)
    means = []
    for name in rules:
        shares = (f"**{bench.mean(spec, bench.rows, name):.1f}**" for spec in specs)
        means += ["", *(cell for share in shares for cell in ("", share)), ""]
    table.row("**mean where the gap is a point or more**", "", *means)
    print()
    for name in rules:
        for spec in specs:
            conclude(bench, spec, name)


def rates(bench: Bench, specs: Sequence[Spec], row: Row, rules: str) -> list[str]:
    """LRU's hit rate, that of each policy and what it closes, and the clairvoyant one."""
    low, high = bench.limits(row, rules)
    cells = [f"{low:.1f}"]
    for spec in specs:
        share = bench.closed(spec, row, rules)
        cells.append(f"{bench.hit_rate(spec, row, rules):.1f}")
        cells.append("" if share is None else f"{share:.0f}")
    return [*cells, f"{high:.1f}"]


def conclude(bench: Bench, spec: Spec, rules: str) -> None:
    """Print the worst row against LRU, and what one memory closes of the gap of two pools."""
    losses = [bench.hit_rate(spec, row, rules) - bench.limits(row, rules)[0] for row in bench.rows]
    print(f"{spec}, {TITLES[rules]}: at worst {min(losses):+.2f} points against {lru(rules)}.")
    if rules == "one":
        mean = bench.mean(spec, bench.rows, rules, gap="served")
        print(f"It closes {mean:.1f} % of the distance that there is with two pools.")


def show_left_out(bench: Bench, grid: Sequence[Constants], rules: str) -> None:
    spec = Spec("reuse")
    print(f"\nRules: {rules}; chosen from {len(grid)} settings\n")
    table = Table("trace left out", "chosen on the others", "closed % with it", "as it is", text=2)
    chosen_means = []
    for out in dict.fromkeys(trace for trace, _ in bench.rows):
        others = [row for row in bench.rows if row[0] != out]
        rows = [row for row in bench.rows if row[0] == out]
        best = max(grid, key=lambda constants: bench.mean(spec, others, rules, constants))
        reached = bench.mean(spec, rows, rules, best)
        counted = sum(bench.closed(spec, row, rules) is not None for row in rows)
        chosen_means += [reached] * counted
        name = ", ".join(f"{name} {value:g}" for name, value in best)
        table.row(out, name, f"{reached:.1f}", f"{bench.mean(spec, rows, rules):.1f}")
    print(f"\nover all rows: {sum(chosen_means) / max(len(chosen_means), 1):.1f} %")


def small(kind: str, requests: int, seed: int) -> list[Request]:
    """Generated traffic of short prompts, so that many requests are soon replayed."""
    per_session = {"chat": 5, "agent": 18, "few-shot": 1, "transcript": 5}[kind]
    how = traffic(
        kind,
        sessions=max(4, requests // per_session),
        session_rate=5.0 if kind == "few-shot" else None,
        shared={"agent": Draw("const", 1_500), "transcript": None}.get(
            kind, Draw("lognormal", 400, 0.5)
        ),
    )
    return generate(kind, how, seed)


def show_changes(requests: int) -> None:
    """Hit rates of the first requests of a new kind of traffic, after another one and fresh."""
    print(f"Reuse, as served, {CHANGES_GB} GB; after the change / fresh\n")
    table = Table("change", *(f"first {count:,}" for count in AFTER))
    pools = Split.of(int(CHANGES_GB * 1e9), COST)
    for first, then in CHANGES:
        before, after = small(first, requests, 1), small(then, 2 * AFTER[-1], 2)
        start = before[-1].arrival + 60
        after = [replace(r, arrival=r.arrival + start) for r in after][: AFTER[-1]]
        found = []
        for served in (before + after, after):
            cache = Spec("reuse").build(Setting(COST, pools, served, serving=Serving()))
            found.append([cache.serve(request).hit_len for request in served][-len(after) :])
        cells = []
        for count in AFTER:
            tokens = sum(request.input_len for request in after[:count])
            rates = [100 * sum(hits[:count]) / tokens for hits in found]
            cells.append(f"{rates[0]:.1f} / {rates[1]:.1f}")
        table.row(f"{len(before):,} of {first}, then {then}", *cells)


def parse_grid(varied: Sequence[str]) -> list[Constants]:
    """NAME=V,V,.. to all combinations."""
    axes = []
    for text in varied:
        name, _, values = text.partition("=")
        if not isinstance(getattr(*place_of(name), None), int | float):
            raise BenchFailed(f"neither hazards nor answers of core.returns has a number {name!r}")
        axes.append([(name, float(value)) for value in values.split(",")])
    return list(itertools.product(*axes))


def policies(
    policy: Annotated[str, "as NAME or NAME:OPTION=VALUE, by comma"] = "reuse",
    rules: Annotated[tuple[str, ...], one_of(RULES)] = tuple(RULES),
    traces: Folder = TRACES,
    generated: Seeds = None,
    vary: Annotated[
        tuple[str, ...],
        {"metavar": "NAME=V,V"},
        "constants of core.returns.hazards, or answers.NAME, for --leave-one-out",
    ] = VARIED,
    leave_one_out: bool = False,
    changes: Annotated[int | None, {"metavar": "N"}, "requests before a change of kind"] = None,
) -> None:
    """How much of the distance from LRU to a clairvoyant eviction a policy closes.

    A row per trace and size of the cache, request after request, starting cold, by the paper's
    rules, as served with two pools, and as served with one memory for KV and states. Token hit
    rates in percent. Rows whose distance is below a point do not count in the mean. With
    --leave-one-out the constants that --vary names are chosen by the mean over all other traces,
    and what that choice reaches on the trace left out is reported. With --changes N the traffic is
    N requests of one generated kind and then another kind: what is hit of that, beside a server
    that starts with it.
    """
    if changes is not None:
        show_changes(changes)
        return
    bench = Bench(*read_or_generate(traces, generated))
    if not leave_one_out:
        show(bench, [Spec.parse(text) for text in policy.split(",")], rules)
        return
    for one in rules:
        show_left_out(bench, parse_grid(vary), one)
