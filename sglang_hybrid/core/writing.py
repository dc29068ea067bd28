"""What a copy in a lower tier is worth before it is written, and what writing it costs."""

from __future__ import annotations

from sglang_hybrid.core.cost import CostModel
from sglang_hybrid.core.nodes import Node
from sglang_hybrid.core.places import copies_of, without_up_to
from sglang_hybrid.core.rates import Speeds, Tier

WRITE_PRICE = 0.1
"""Seconds that others lose for each second of writing to a lower tier. Writing goes on beside the
prefill, so it costs only what it takes from loads and kernels that want the same link or memory.
Replayed, a tenth halves the bytes that are written where most requests are cold, and costs no hits;
the whole second costs up to 5 percent of the hits (docs/benchmarks.md)."""


def was_forgotten(node: Node) -> bool:
    """Whether a tier below the device forgot the state of `node`, which has not been resumed from
    since: what it was worth less than then, it is worth less than now.
    """
    return copies_of(node).forgotten == node.last_used


def copy_saves(node: Node, tier: Tier, cost: CostModel, speeds: Speeds) -> float:
    """Seconds that copies of `node` in `tier`, of its state and of the KV that leads to it, save a
    request that returns to it when faster tiers have forgotten both: over resuming from the next
    state above that `tier` or a slower one has. Below 0 where computing takes less than loading.
    """
    anchor = 0
    above = node.parent
    while above is not None and above.parent is not None:
        if without_up_to(copies_of(above).state, Tier(tier - 1)):
            anchor = above.depth
            break
        above = above.parent
    computed = speeds.compute(cost.savings(node.depth, anchor))
    loaded = (node.depth - anchor) * cost.kv_bytes_per_token + cost.state_bytes
    return computed - speeds.loads[tier].seconds(loaded)


def write_pays(size: int, saves: float, returns: float, tier: Tier, speeds: Speeds) -> bool:
    """Whether a copy of `size` bytes is worth its writing to `tier`: it saves `saves` seconds for
    each of `returns` expected returns, and costs WRITE_PRICE of the seconds of its transfer.
    """
    return returns * saves > WRITE_PRICE * speeds.writes[tier].seconds(size)
