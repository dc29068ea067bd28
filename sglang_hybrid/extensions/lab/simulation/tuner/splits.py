"""How two pools would better divide their memory: recent requests, replayed on other splits."""

from __future__ import annotations

from typing import Final, NamedTuple

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.server_settings import Split
from sglang_hybrid.core.systems import Spec
from sglang_hybrid.core.traffic.recorder import RequestWindow
from sglang_hybrid.extensions.lab.simulation.tuner.candidates import hits_within
from sglang_hybrid.extensions.lab.simulation.tuner.regret import Regrets
from sglang_hybrid.extensions.lab.simulation.tuner.tuner import Rules
from sglang_hybrid.extensions.lab.simulation.workers import Limits, run_jobs

SHARES: Final = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.85)
"""Of the memory, for states."""


class BetterSplit(NamedTuple):
    """split: two pools in the memory of the window's. hits, hits_now: tokens of the requests that
    count, which were hit in a replay with it and with the split that there is. tokens: of their
    prompts.
    """

    split: Split
    hits: int
    hits_now: int
    tokens: int


def find_better_split(window: RequestWindow, spec: Spec, least: Split) -> BetterSplit | None:
    """The split of `SHARES` under which the window's requests hit most with the policy `spec`, of
    equals the nearest one; None if none gains what the tuner asks for.

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
    done = run_jobs(hits_within, window, [(spec, split) for split in splits], Limits())
    for failure in done.failures:
        raise failure
    regrets: Regrets[Split] = Regrets()
    regrets.learn({split: done.results[number] for number, split in enumerate(splits)})
    best = regrets.choose(now, Rules.margin, Rules.sure)
    if best == now:
        return None
    hits, hits_now = (int(done.results[splits.index(each)].sum()) for each in (best, now))
    return BetterSplit(best, hits, hits_now, window.counted_tokens)


def splits_of(now: Split, cost: CostModel) -> list[Split]:
    """The memory of `now` in other shares."""
    memory = now.kv_tokens * cost.kv_bytes_per_token + now.slots * cost.state_bytes
    return [Split.of(memory, cost, share / (1 - share)) for share in SHARES]
