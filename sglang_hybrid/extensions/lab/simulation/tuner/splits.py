"""Finds a better division between two pools: recent requests, replayed on other splits."""

from __future__ import annotations

from typing import Final, NamedTuple

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.server_settings import Budget, Split
from sglang_hybrid.core.systems import Spec
from sglang_hybrid.core.traffic.recorder import RequestWindow
from sglang_hybrid.extensions.lab.simulation.tuner.candidates import hits_within
from sglang_hybrid.extensions.lab.simulation.tuner.regret import Regrets
from sglang_hybrid.extensions.lab.simulation.tuner.tuner import Rules
from sglang_hybrid.extensions.lab.simulation.workers import Limits, run_jobs

SHARES: Final = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.85)
"""Of the memory, for states."""


class SplitsFound(NamedTuple):
    """split: two pools in the memory of the window's, which may be those that there are. hits,
    hits_now, hits_one: tokens of the requests that count, which were hit in a replay with it, with
    the split that there is, and with the same bytes as one memory. tokens: of their prompts.
    """

    split: Split
    hits: int
    hits_now: int
    hits_one: int
    tokens: int


def compare_splits(window: RequestWindow, spec: Spec, least: Split) -> SplitsFound:
    """The split of `SHARES` under which the window's requests hit most with the policy `spec`, of
    equals the nearest one; that of the window if none gains what the tuner asks for.

    window: of a server with two pools. least: KV tokens and slots that must be there. Raises what a
    worker raised, and ChildProcessError if one died.
    """
    now = window.budget
    assert isinstance(now, Split), "one memory has no split"
    others = [
        split
        for split in splits_of(now, window.cost)
        if split.kv_tokens >= least.kv_tokens and split.slots >= least.slots and split != now
    ]
    splits = [now, *sorted(others, key=lambda split: abs(split.slots - now.slots))]
    budgets: list[Budget] = [*splits, bytes_of(now, window.cost)]
    done = run_jobs(hits_within, window, [(spec, budget) for budget in budgets], Limits())
    for failure in done.failures:
        raise failure
    regrets: Regrets[Split] = Regrets()
    regrets.learn({split: done.results[number] for number, split in enumerate(splits)})
    best = regrets.choose(now, Rules.margin, Rules.sure)
    numbers = (splits.index(best), 0, len(splits))
    hits, hits_now, hits_one = (int(done.results[number].sum()) for number in numbers)
    return SplitsFound(best, hits, hits_now, hits_one, window.counted_tokens)


def bytes_of(split: Split, cost: CostModel) -> int:
    """Of both pools."""
    return split.kv_tokens * cost.kv_bytes_per_token + split.slots * cost.state_bytes


def splits_of(now: Split, cost: CostModel) -> list[Split]:
    """The memory of `now` in other shares."""
    return [Split.of(bytes_of(now, cost), cost, share / (1 - share)) for share in SHARES]
