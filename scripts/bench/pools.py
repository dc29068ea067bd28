"""Two pools that lend, and fit the traffic: the split that one half of a trace chooses, on the
other half.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import numpy as np

from scripts.bench.commands import one_of
from scripts.bench.policies import HYBRIDS, cost_of
from scripts.bench.report import Table
from scripts.bench.traces import COST, TRACES, Folder, Row, read_and_generate
from sglang_hybrid.cache.learnt_split import read_split
from sglang_hybrid.cache.split_watch import SplitWatch
from sglang_hybrid.core.costs.cost import MIN_BRANCH_TOKENS, CostModel, IntArray
from sglang_hybrid.core.own_files import OWN_FOLDER
from sglang_hybrid.core.server_settings import Budget, Serving, Split
from sglang_hybrid.core.specs import Spec, make_policies
from sglang_hybrid.core.traffic.recorder import (
    MOST_RECORD_BYTES,
    MOST_REQUESTS,
    FinishedRequest,
    Recorder,
    RequestWindow,
    make_window,
)
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab import systems  # noqa: F401, it registers them
from sglang_hybrid.extensions.lab.simulation.server_simulator import ServerSimulator
from sglang_hybrid.extensions.lab.simulation.tuner.candidates import hits_within
from sglang_hybrid.extensions.lab.simulation.tuner.splits import compare_splits
from sglang_hybrid.serving.advice import ServerSetup

REUSE = Spec("reuse")
PAPER = "the paper's 7B"
SIZES = (PAPER, *HYBRIDS)
STATICS = (0.15, 0.3, 0.5, 0.75)
"""Shares of the memory for states that are tried beside the default split, for `best of a few`."""
HEADS = ("apart", "default", "at the start", "best of a few", "one memory")
LOST = 1.0
"""Points below pools that lend nothing that count as a loss."""


class Played(NamedTuple):
    """Tokens that each request hit [n], and how many had ended when something was evicted first;
    as many as there are if nothing was.
    """

    hits: IntArray
    first_eviction: int


@dataclass
class Half:
    """One half of a trace, served from an empty cache. What was played is not played again: a
    server's window begins with its first request, so its hits are the first ones of the half.
    """

    requests: Sequence[Request]
    cost: CostModel
    _known: dict[Budget, Played] = field(default_factory=dict)

    def play(self, budget: Split | int) -> Played:
        """The half with two pools, or with so many bytes of one memory."""
        if budget not in self._known:
            serving = Serving(one_memory=isinstance(budget, int))
            cache = ServerSimulator(self.cost, budget, *make_policies(REUSE), serving=serving)
            hits, first = [], len(self.requests)
            for number, request in enumerate(self.requests):
                hits.append(cache.serve(request).hit_len)
                if cache.memory.has_evicted:
                    first = min(first, number)
            self._known[budget] = Played(np.array(hits), first)
        return self._known[budget]

    def hit_rate(self, budget: Split | int) -> float:
        """Percent of the prompt tokens."""
        return 100 * float(self.play(budget).hits.sum()) / sum(it.input_len for it in self.requests)

    def replay(
        self, window: RequestWindow, spec: Spec, budgets: Iterable[Budget]
    ) -> list[IntArray]:
        """The result of `splits.replay_apart`, computed in this process. It is taken from `play` if
        the window begins with this half, that is unless the recorder has dropped requests.
        """
        if window.requests[0].tokens is not self.requests[0].tokens:
            return [hits_within(window, (spec, budget), lambda: None) for budget in budgets]
        counted = slice(window.counted_from, len(window.requests))
        return [self.play(budget).hits[counted] for budget in budgets if budget is not None]


def learnt_split(half: Half, now: Split, context: int, folder: Path) -> Split:
    """The split that the next server has, after this one has served `half` with the split `now`.
    context: tokens of the longest request. folder: an empty one.
    """
    path, recorder = folder / OWN_FOLDER / "learnt", Recorder(MOST_RECORD_BYTES)
    window = partial(_window, recorder, half.cost)
    watch = SplitWatch(
        _setup(half.cost, now, context),
        lambda: window,
        lambda: REUSE,
        lambda: path,
        partial(compare_splits, replay=half.replay),
    )
    played = half.play(now)
    for number, (request, hit) in enumerate(zip(half.requests, played.hits, strict=True)):
        recorder.add(
            FinishedRequest(
                *(request.tokens, request.input_len, request.arrival, int(hit), now),
                *(request.message_starts, request.reply_start, request.tenant, request.hint),
            )
        )
        watch.on_request_end(now, evicted=number >= played.first_eviction)
        watch.wait()
    learnt = read_split(path)
    if learnt is None:
        return now
    memory, ratio = now.bytes(half.cost), round(learnt.states_to_kv, 3)
    return Split.of(memory, half.cost, ratio, spills=now.spilled > 0)


def _window(recorder: Recorder, cost: CostModel) -> RequestWindow:
    """The window of recent requests, as `Tuning.recent` makes it."""
    records = recorder.latest(MOST_REQUESTS)
    counted = (len(records) + 1) // 2
    return make_window(records, counted, cost, MIN_BRANCH_TOKENS, Serving(), has_states=True)


def _setup(cost: CostModel, split: Split, context: int) -> ServerSetup:
    return ServerSetup(
        slots=split.slots,
        held=1,
        counted=1,
        running=1,
        asked=None,
        kv_tokens=split.kv_tokens,
        state_bytes=cost.state_bytes,
        kv_bytes=cost.kv_bytes_per_token,
        kv_costs=True,
        one_memory=False,
        context=context,
        page_size=1,
        pages_needed=False,
        planned=True,
        all_admitted=False,
        no_buffer=True,
        no_buffer_asked=False,
        spills=split.spilled > 0,
    )


class Rates(NamedTuple):
    """Hit rates of the second half of a row in percent: two pools that lend nothing, with the split
    that they have by default; pools whose states spill, at the default split, at the one that the
    first half chose, at the best of a few; and one memory. share: of the bytes, for slots, as the
    first half chose.
    """

    apart: float
    default: float
    learnt: float
    best: float
    one: float
    share: float


def measure(requests: Sequence[Request], cost: CostModel, memory: int) -> Rates:
    """Hit rates of a trace in `memory` bytes."""
    middle = len(requests) // 2
    start = requests[0].arrival  # a window's clock begins with its first request
    shifted = [replace(it, arrival=it.arrival - start) for it in requests[:middle]]
    first, second = Half(shifted, cost), Half(requests[middle:], cost)
    now = Split.of(memory, cost, spills=True)
    context = max(len(request.tokens) for request in requests)
    with TemporaryDirectory() as folder:
        learnt = learnt_split(first, now, context, Path(folder))
    few = [Split.of(memory, cost, share / (1 - share), spills=True) for share in STATICS]
    best = max(second.hit_rate(split) for split in (now, learnt, *few))
    share = 100 * learnt.slots * cost.state_bytes / memory
    budgets = (Split.of(memory, cost), now, learnt, memory)
    apart, default, chosen, one = (second.hit_rate(budget) for budget in budgets)
    return Rates(apart, default, chosen, best, one, share)


def conclude(found: dict[Row, Rates]) -> list[str]:
    """Cells of the summary: mean hit rates; percent of the mean distance from pools that lend
    nothing to one memory that spilling closes, at the default split and at the learnt one; and how
    many rows lose, and the worst one, by default and with the learnt split.
    """
    means = [fmean(column) for column in zip(*found.values(), strict=True)][:5]
    distance = means[4] - means[0]
    cells = [f"{mean:.1f}" for mean in means]
    cells += [f"{100 * (mean - means[0]) / distance:.0f}" for mean in means[1:3]]
    for served in ("default", "learnt"):
        gains = {row: getattr(it, served) - it.apart for row, it in found.items()}
        worst = min(gains, key=lambda row: gains[row])
        losses = sum(each < -LOST for each in gains.values())
        cells.append(f"{losses} of {len(gains)}, {gains[worst]:+.1f} ({worst[0]}, {worst[1]:g} GB)")
    return cells


def pools(
    sizes: Annotated[tuple[str, ...], "of these models", one_of(SIZES)] = SIZES,
    traces: Folder = TRACES,
    seeds: Annotated[tuple[int, ...], "of generated traffic, beside the traces"] = (0,),
) -> None:
    """The share that lending closes of the distance from two pools to one memory.

    Two pools that lend each other room: the second half of a trace, from an empty cache, with the
    default split, with what a comparison of splits in the first half chooses (at the start), with
    the best of a few splits; with two pools that lend each other nothing, at the split that they
    have by default (apart); and in one memory. Nothing of the second half took part in the choice.
    Under `reuse`, request after request, in percent of the prompt tokens; the longest request has
    to fit into the KV. `closes`: of the mean distance from `apart` to one memory. What loses is
    counted against `apart`.
    """
    runner, rows = read_and_generate(traces, max(seeds) + 1)
    left_out = {str(seed) for seed in range(max(seeds)) if seed not in seeds}
    rows = [row for row in rows if row[0].rpartition(" ")[2] not in left_out]
    summary: dict[str, list[str]] = {}
    table = Table("sizes", "trace", "GB", *HEADS, "slots' share", text=2)
    for name in sizes:
        cost = COST if name == PAPER else cost_of(name)
        found = {row: measure(runner.traces[row[0]], cost, int(row[1] * 1e9)) for row in rows}
        for (trace, size), rates in found.items():
            cells = (f"{rate:.1f}" for rate in rates[:5])
            table.row(name, trace, f"{size:g}", *cells, f"{rates.share:.0f} %")
        summary[name] = conclude(found)
    print()
    lose = f"lose over {LOST:g} point, worst:"
    closed = ("default closes, %", "at the start closes, %", f"{lose} default", f"{lose} start")
    table = Table("means of", *HEADS, *closed)
    for name, concluded in summary.items():
        table.row(name, *concluded)
