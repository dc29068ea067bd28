"""What the order of the host lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np

from scripts.bench.commands import one_of
from scripts.bench.memory import ENOUGH
from scripts.bench.policies import changed
from scripts.bench.report import Table
from scripts.bench.traces import COST, TRACES, Folder, percent, read_named
from sglang_hybrid.core.costs.cost import CostModel, FloatArray
from sglang_hybrid.core.records.nodes import NEVER, Clock, Node
from sglang_hybrid.core.returns.history import History
from sglang_hybrid.core.returns.reuse import ReuseIndex
from sglang_hybrid.core.victims.eviction import Policy, Reuse
from sglang_hybrid.core.victims.table import Table as Candidates
from sglang_hybrid.replay.runner import Runner
from sglang_hybrid.replay.simulation.future import Oracle
from sglang_hybrid.replay.simulation.tiers.tier_budgets import TierBudgets
from sglang_hybrid.replay.simulation.tiers.tier_simulator import TieredClairvoyant, TieredSimulator
from sglang_hybrid.replay.simulation.traces.requests import Request
from sglang_hybrid.replay.systems import Spec

MISSED = {  # GB of the device, with a tenfold host
    "sharegpt_55": 0.4,
    "bbh_fewshot": 0.2,
    "claude_code_64k": 5.0,
    "mooncake_conversation_trace": 8.0,
}
RATIO = 10


@dataclass
class Future:
    """What is known of nodes: by id, the tick at which a prompt passes each of them next (NEVER if
    none does), and those whose session is over.
    """

    next_use: dict[int, float] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)

    def ends(self, node: Node) -> bool:
        return self.next_use.get(node.id, 0.0) >= NEVER

    def is_over(self, node: Node) -> bool:
        return node.id in self.over


class Ends(Reuse):
    """`Reuse`, but what `ended` says of goes before all else."""

    columns = Reuse.columns + 1

    def __init__(self, history: History, ended: Callable[[Node], bool]) -> None:
        super().__init__(history)
        self._ended = ended

    def describe(self, node: Node, saved: float, freed: int) -> tuple[float, ...]:
        return (*super().describe(node, saved, freed), float(self._ended(node)))

    def scores(self, table: Candidates, clock: Clock) -> FloatArray:
        scores = super().scores(table, clock)
        ended = table.column(Reuse.columns) > 0
        return np.where(ended, table.last_used() - NEVER, scores)


class Times(Reuse):
    """FLOPs saved per byte, over the requests until the next one that passes a node."""

    columns = 2
    bounded_by_prefix = False

    def __init__(self, history: History, future: Future) -> None:
        super().__init__(history)
        self.future = future

    def describe(self, node: Node, saved: float, freed: int) -> tuple[float, ...]:
        return saved / freed, self.future.next_use.get(node.id, NEVER)

    def scores(self, table: Candidates, clock: Clock) -> FloatArray:
        scores: FloatArray = table.column(0) / np.maximum(table.column(1) - clock.tick, 1.0)
        return scores


class Writes(Times):
    """`Times` that says, too, what is worth a copy."""

    def return_probability(self, node: Node, clock: Clock) -> float:
        return float(not self.future.ends(node))


RUNGS: dict[str, Callable[[History, Future], list[Policy]]] = {
    "reuse": lambda history, _: [Reuse(history), Reuse(history)],
    "sessions": lambda history, future: [Reuse(history), Ends(history, future.is_over)],
    "ends": lambda history, future: [Reuse(history), Ends(history, future.ends)],
    "times": lambda history, future: [Reuse(history), Times(history, future)],
    "device": lambda history, future: [Times(history, future), Times(history, future)],
    "writes": lambda history, future: [Times(history, future), Writes(history, future)],
}
"""By name, the policies of device and host."""


class Told(TieredSimulator):
    """A cache whose policies may know `future`."""

    def __init__(
        self, cost: CostModel, tiers: TierBudgets, rung: str, requests: Sequence[Request]
    ) -> None:
        self._future = Future()
        self._oracle = Oracle(requests)
        self._last = {request.session: request for request in requests}
        self._now = 0
        policies = RUNGS[rung](History(), self._future)
        super().__init__(cost, tiers, tiers.speeds(cost, None), policies)

    def _on_path(self, request: Request, path: list[Node]) -> None:
        self._now = max(self._now, self._oracle.tick(request))
        future, is_last = self._future, self._last[request.session] is request
        for node in path:
            future.next_use[node.id] = self._oracle.next_use(request, node.depth, self._now)
            (future.over.add if is_last and future.ends(node) else future.over.discard)(node.id)
            self.tree.mark_dirty(node)


def hit_rate(cache: TieredSimulator, requests: Sequence[Request]) -> float:
    """Share of all prompt tokens that are skipped."""
    hits = sum(cache.serve(request).hit_len for request in requests)
    return hits / sum(request.input_len for request in requests)


def tiers_of(device: float) -> TierBudgets:
    """A device of so many GB, and its host."""
    return TierBudgets.of(int(device * 1e9), int(device * RATIO * 1e9))


def unbounded(trace: str, requests: Sequence[Request], tiers: TierBudgets) -> float:
    """The hit rate where nothing is ever evicted."""
    return percent(Runner({trace: requests}), Spec("unbounded"), trace, None, tiers=tiers) / 100


def shares(trace: str, requests: Sequence[Request], device: float) -> list[float]:
    """Of one trace: the hit rate of each rung and of the clairvoyant cache, in percent of the
    unbounded one.
    """
    tiers = tiers_of(device)
    bound = unbounded(trace, requests, tiers)
    found = [hit_rate(Told(COST, tiers, rung, requests), requests) for rung in RUNGS]
    oracle = Oracle(requests)
    best = TieredClairvoyant(COST, tiers, tiers.speeds(COST, None), oracle)
    return [100 * rate / bound for rate in (*found, hit_rate(best, requests))]


class Bits:
    """Bits in which an index would have told the bins of the intervals that end, each foretold by
    the hazards in force then.
    """

    def __init__(self, index: ReuseIndex) -> None:
        self.sum, self.intervals = 0.0, 0
        self._index, self._ends = index, index.on_return
        index.on_return = self._on_return  # type: ignore[method-assign]

    def _on_return(self, interval_id: int, time: float) -> float:
        index = self._index
        number = index._number[interval_id]
        estimate = index._estimate
        hazard = estimate._hazard[estimate._row.item(index._seen._classes[number])]
        end = index._bin(time - index.since(interval_id))
        if index.version:
            chance = float(hazard[end] * np.prod(1 - hazard[:end]))
            self.sum -= math.log2(max(chance, 1e-12))
            self.intervals += 1
        return self._ends(interval_id, time)


def weigh(trace: str, requests: Sequence[Request], device: float, weight: float) -> list[str]:
    """Hit rate of `reuse` in percent of the unbounded one, and bits per interval."""
    tiers = tiers_of(device)
    with changed((("PRIOR_WEIGHT", weight),)):
        cache = Told(COST, tiers, "reuse", requests)
        history = cache.policy.history
        assert history is not None
        bits = Bits(history.index)
        share = 100 * hit_rate(cache, requests) / unbounded(trace, requests, tiers)
    return [f"{share:.1f}", f"{bits.sum / max(1, bits.intervals):.2f}"]


def tiers_ladder(
    only: Annotated[tuple[str, ...], one_of(MISSED)] = tuple(MISSED),
    weights: Annotated[tuple[float, ...], "of a coarser class, intervals"] = (),
    traces: Folder = TRACES,
) -> None:
    """What the order of the host lacks where `tiers-replay` misses its aim: `reuse` is told more
    and more of the rest of the trace. Percent of the hit rate of an unbounded cache.

    reuse: told nothing. sessions: the host's order knows which positions the last prompt of a
    session has passed, and no other prompt will. ends: which positions no prompt passes any more.
    times: when each position is passed next. device: the device's order knows that, too. writes: so
    does the choice of what is written at all. clairvoyant: nothing is learnt any more.

    --weights asks instead what another weight of a coarser class is worth
    (`core/returns/hazards.py`), and how well each foretells when positions return: bits per
    interval that ended, fewer being better.
    """
    if weights:
        show_weights(traces, only, weights)
        return
    names = [*RUNGS, "clairvoyant"]
    table = Table("trace", "device GB", *names, f"{ENOUGH:g} % from")
    for trace in only:
        found = shares(trace, read_named(traces, trace), MISSED[trace])
        enough = (name for name, share in zip(names, found, strict=True) if share >= ENOUGH)
        cells = (f"{share:.1f}" for share in found)
        table.row(trace, f"{MISSED[trace]:g}", *cells, next(enough, "none"))


def show_weights(folder: Path, only: Sequence[str], weights: Sequence[float]) -> None:
    heads = [(f"{weight:g}: % of unbounded", "bits") for weight in weights]
    table = Table("trace", "device GB", *(name for pair in heads for name in pair))
    for trace in only:
        requests, device = read_named(folder, trace), MISSED[trace]
        cells = [weigh(trace, requests, device, weight) for weight in weights]
        table.row(trace, f"{device:g}", *(cell for pair in cells for cell in pair))
