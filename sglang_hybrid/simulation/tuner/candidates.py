"""What the tuner chooses from, and how a candidate is tried."""

from __future__ import annotations

from sglang_hybrid.core.systems import HINDSIGHT, Spec, make_policies
from sglang_hybrid.simulation.server_simulator import ServerSimulator
from sglang_hybrid.simulation.simulator import Cache, Outcome, Simulator
from sglang_hybrid.simulation.tiers.tiered_server import TieredServerSimulator
from sglang_hybrid.simulation.tuner.window import RequestWindow

MARCONI_ALONE = tuple(Spec(HINDSIGHT).candidates())
"""What the paper chooses from; it starts with the first one, whose alpha is 0: LRU."""

CANDIDATES = (
    *(Spec("reuse"), Spec("lru")),
    *MARCONI_ALONE[1:],
    Spec("reuse", (("answers", 0.0),)),
)
"""Beside the paper's, the reuse index, with and without what answers and hints tell. Of equals the
first one is chosen.
"""


def as_text(spec: Spec) -> str:
    """What `Spec.parse` reads."""
    return f"{spec.name}:{','.join(f'{name}={value!r}' for name, value in spec.options)}"


def replay(window: RequestWindow, spec: Spec) -> list[Outcome]:
    """What each request of `window` [n] would have found under `spec`, from an empty cache on."""
    kv_policy, state_policy = make_policies(spec)
    cost, least = window.cost, window.min_branch_tokens
    cache: Cache
    how, room = window.serving, window.budget
    if how is not None and cost.state_bytes and room is not None:
        if window.tiers is not None:
            below = window.tiers
            cache = TieredServerSimulator(cost, room, kv_policy, state_policy, below, least, how)
        else:
            cache = ServerSimulator(cost, room, kv_policy, state_policy, least, how)
    else:
        cache = Simulator(cost, room, kv_policy, least, state_policy)
    return [cache.serve(request) for request in window.requests]
