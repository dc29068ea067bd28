"""Finds a better division between two pools: recent requests, replayed on other splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Final, NamedTuple

from sglang_hybrid.core.costs.cost import CostModel, IntArray
from sglang_hybrid.core.server_settings import Budget, Split
from sglang_hybrid.core.specs import Spec
from sglang_hybrid.core.traffic.recorder import RequestWindow
from sglang_hybrid.extensions.lab.simulation.tuner.candidates import hits_within
from sglang_hybrid.extensions.lab.simulation.tuner.regret import Regrets
from sglang_hybrid.extensions.lab.simulation.tuner.tuner import Rules
from sglang_hybrid.extensions.lab.simulation.workers import Limits, run_jobs

SHARES: Final = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.85)
"""Shares of the memory for states."""

SMALLEST: Final = 0.05
"""The smallest share, where states without a slot may lie in the place of KV."""

SURE: Final = 1.0
"""Standard errors that the gain of another split must exceed. The tuner asks for more: what it is
wrong about costs hits at once, and comes back. A split is looked at again until the next start."""

SETTLED: Final = 1.15
"""Times that prompts of the latter half of a window may be as long as those of the former half for
all splits to be compared."""

Replay = Callable[[RequestWindow, Spec, Sequence[Budget]], list[IntArray]]
"""Hit tokens of the requests that count [n], under a policy, with each of several memories."""


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


def replay_apart(window: RequestWindow, spec: Spec, budgets: Sequence[Budget]) -> list[IntArray]:
    """`Replay` in a worker process of lowest priority. Raises what a worker raised, and
    ChildProcessError if one died.
    """
    done = run_jobs(hits_within, window, [(spec, budget) for budget in budgets], Limits())
    for failure in done.failures:
        raise failure
    return [done.results[number] for number in range(len(budgets))]


def compare_splits(
    window: RequestWindow, spec: Spec, least: Split, replay: Replay = replay_apart
) -> SplitsFound:
    """The split of `SHARES` under which the window's requests hit most with the policy `spec`, of
    equals the nearest one; that of the window if none gains enough to be sure.

    Where prompts grew within the window, as those of chats do that began with the server, only
    splits with more KV are compared: the prompts to come want more KV for each state than these.

    window: of a server with two pools. least: KV tokens and slots that must be there. Raises what
    `replay` does.
    """
    now = window.budget
    assert isinstance(now, Split), "one memory has no split"
    growth = growth_of(window)
    others = [
        split
        for split in splits_of(now, window.cost)
        if split.kv_tokens >= least.kv_tokens
        and split.slots >= least.slots
        and split != now
        and (split.kv_tokens > now.kv_tokens or growth <= SETTLED)
    ]
    splits = [now, *sorted(others, key=lambda split: abs(split.slots - now.slots))]
    found = replay(window, spec, [*splits, now.bytes(window.cost)])
    regrets: Regrets[Split] = Regrets()
    regrets.learn(dict(zip(splits, found[:-1], strict=True)))
    best = regrets.choose(now, Rules.margin, SURE)
    hits, hits_now, hits_one = (
        int(each.sum()) for each in (found[splits.index(best)], found[0], found[-1])
    )
    return SplitsFound(best, hits, hits_now, hits_one, window.counted_tokens)


def growth_of(window: RequestWindow) -> float:
    """Mean prompt tokens of the latter half of the window's requests, in those of the former."""
    lengths = [request.input_len for request in window.requests]
    half = len(lengths) // 2
    return fmean(lengths[half:]) / fmean(lengths[:half]) if half else 1.0


def splits_of(now: Split, cost: CostModel) -> list[Split]:
    """The memory of `now` in other shares."""
    memory, spills = now.bytes(cost), now.spilled > 0
    shares = (SMALLEST, *SHARES) if spills else SHARES
    return [Split.of(memory, cost, share / (1 - share), spills=spills) for share in shares]
