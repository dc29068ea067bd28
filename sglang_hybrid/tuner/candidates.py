"""What the tuner chooses from, and how a candidate is tried."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.core.eviction import Policy, Reuse, make_policy
from sglang_hybrid.core.history import History
from sglang_hybrid.replay.server_simulator import ServerSimulator
from sglang_hybrid.replay.simulator import Cache, Outcome, Simulator, Split
from sglang_hybrid.replay.systems import HINDSIGHT, Spec
from sglang_hybrid.tuner.window import Window

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


def make_policies(spec: Spec, history: History | None = None) -> tuple[Policy, Policy]:
    """One policy object for KV and one for states; those that learn share `history`."""
    options: dict[str, Any] = dict(spec.options)
    if spec.name == Reuse.name:
        options["history"] = history or History()
    return make_policy(spec.name, **options), make_policy(spec.name, **options)


def as_text(spec: Spec) -> str:
    """What `Spec.parse` reads."""
    return f"{spec.name}:{','.join(f'{name}={value!r}' for name, value in spec.options)}"


def replay(window: Window, spec: Spec) -> list[Outcome]:
    """What each request of `window` [n] would have found under `spec`, from an empty cache on."""
    kv_policy, state_policy = make_policies(spec)
    cost, least = window.cost, window.min_branch_tokens
    cache: Cache
    how, pools = window.serving, window.budget
    if how is not None and cost.state_bytes and isinstance(pools, Split):
        cache = ServerSimulator(cost, pools, kv_policy, state_policy, least, how)
    else:
        cache = Simulator(cost, window.budget, kv_policy, least, state_policy)
    return [cache.serve(request) for request in window.requests]
