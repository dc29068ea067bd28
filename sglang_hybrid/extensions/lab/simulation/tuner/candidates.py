"""Candidates of the tuner, and their results on a window of requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sglang_hybrid.core.costs.cost import UNBOUNDED, IntArray
from sglang_hybrid.core.server_settings import Budget, Serving, Split
from sglang_hybrid.core.specs import Spec, make_policies
from sglang_hybrid.core.traffic.recorder import RequestWindow
from sglang_hybrid.extensions.lab.simulation.baselines import (
    SGLANG_RUNNING_STATES,
    SglangPlus,
    SglangSimulator,
)
from sglang_hybrid.extensions.lab.simulation.server_simulator import ServerSimulator
from sglang_hybrid.extensions.lab.simulation.simulator import Cache, Outcome, Simulator
from sglang_hybrid.extensions.lab.simulation.system_names import HINDSIGHT, best_of
from sglang_hybrid.extensions.lab.simulation.tiers.tiered_server import TieredServerSimulator
from sglang_hybrid.extensions.lab.simulation.workers import Limits, Work, run_jobs

MARCONI_ALONE = tuple(best_of(Spec(HINDSIGHT)))
"""The candidates of the paper; it starts with the first one, whose alpha is 0: LRU."""

CANDIDATES = (
    *(Spec("reuse"), Spec("lru")),
    *MARCONI_ALONE[1:],
    Spec("reuse", (("answers", 0.0),)),
)
"""The paper's, and the reuse index, with and without what answers and hints tell. Of equals the
first one is chosen.
"""

SGLANG = Spec("sglang")
"""SGLang's own cache, to compare with: its rules, and its division of the memory. It has no tiers
here.
"""


@dataclass
class TokensFound:
    """Tokens found in each request that counts [n], by candidate, of `counted_tokens` prompt tokens
    in all; and what went wrong.
    """

    counted_tokens: int
    hits: dict[Spec, IntArray] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


def replay(window: RequestWindow, spec: Spec) -> list[Outcome]:
    """The hit of each request of `window` [n] under `spec`, from an empty cache on. A server
    without a bound is simulated as one with a bound, with room for everything.
    """
    kv_policy, state_policy = make_policies(spec)
    cost, least = window.cost, window.min_branch_tokens
    cache: Cache
    how, room = window.serving, window.budget
    if how is not None and cost.state_bytes:
        room = Split(UNBOUNDED, UNBOUNDED) if room is None else room
        if window.tiers is not None:
            below = window.tiers
            cache = TieredServerSimulator(cost, room, kv_policy, state_policy, below, least, how)
        else:
            cache = ServerSimulator(cost, room, kv_policy, state_policy, least, how)
    else:
        cache = Simulator(cost, room, kv_policy, least, state_policy)
    return [cache.serve(request) for request in window.requests]


def counted_hits(
    window: RequestWindow, spec: Spec, count_step: Callable[[], None] = lambda: None
) -> IntArray:
    """Tokens that `spec` finds in each request of `window` that counts [n]."""
    outcomes = replay(window, spec)[window.counted_from :]
    return np.array([outcome.hit_len for outcome in outcomes], dtype=np.int64)


def hits_within(
    window: RequestWindow, job: tuple[Spec, Budget], count_step: Callable[[], None]
) -> IntArray:
    """Tokens that each request of `window` that counts hits [n] under a policy, or in SGLang's own
    cache, with another memory than the window's: two pools, or bytes that KV and states share.
    It is here, and not beside who asks: a worker imports the module of its work, and
    extensions/page/what_if.py imports SGLang.
    """
    spec, budget = job
    if spec != SGLANG:
        serving = window.serving and replace(window.serving, one_memory=isinstance(budget, int))
        return counted_hits(replace(window, budget=budget, serving=serving), spec)
    cache: Cache
    if window.cost.state_bytes:
        if isinstance(budget, Split) and budget.spilled:  # it would divide its bytes otherwise
            budget = budget.bytes(window.cost)
        running = None if window.serving is None else SGLANG_RUNNING_STATES
        served = window.serving or Serving()
        cache = SglangSimulator(
            window.cost, budget, served.grid, served.chunk, running_states=running
        )
    else:  # a plain radix cache
        cache = SglangPlus(window.cost, budget, window.min_branch_tokens)
    outcomes = [cache.serve(request) for request in window.requests][window.counted_from :]
    return np.array([outcome.hit_len for outcome in outcomes], dtype=np.int64)


def search(
    window: RequestWindow,
    candidates: Sequence[Spec],
    limits: Limits,
    work: Work[RequestWindow, Spec, IntArray] = counted_hits,
) -> TokensFound:
    """Try all candidates in worker processes."""
    begin = time.monotonic()
    done = run_jobs(work, window, candidates, limits)
    hits = {candidates[number]: done.results[number] for number in sorted(done.results)}
    failures = [describe_failure(failure) for failure in done.failures]
    return TokensFound(window.counted_tokens, hits, failures, time.monotonic() - begin)


def describe_failure(failure: Exception) -> str:
    """One line for the log and /server_info."""
    known = isinstance(failure, ChildProcessError)
    return str(failure) if known else f"{type(failure).__name__}: {failure}"
