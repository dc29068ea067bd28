"""A device that keeps entries coded before it evicts them, as a replay knows it."""

from __future__ import annotations

from dataclasses import replace

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.server_settings import Budget, Split
from sglang_hybrid.extensions.lab.simulation.tiers.tier_budgets import KV_VALUE_BYTES, CopyCodec

BESIDE = 0.05
"""Share of the memory for scales and windows of convolutions, which lie beside the pools. With rows
of 128 numbers scales take 1.6 percent, and windows 2 to 5 percent of what states take; in one
memory there is room for all of it as KV and all of it as states."""

NUMBER_BYTES = {CopyCodec.BF16: 2, CopyCodec.INT8: 1}


def coded_in(cost: CostModel, codec: CopyCodec) -> CostModel:
    """`cost` with the bytes of coded KV and coded states."""
    if codec is CopyCodec.EXACT:
        return cost
    kv, state = (
        max(1, value // NUMBER_BYTES[codec]) for value in (KV_VALUE_BYTES, cost.state_value_bytes)
    )
    return replace(cost, coded=(-(-cost.kv_bytes_per_token // kv), -(-cost.state_bytes // state)))


def left_of(budget: Budget, codec: CopyCodec) -> Budget:
    """The part of `budget` that is left for the pools."""
    if codec is CopyCodec.EXACT or budget is None:
        return budget
    if isinstance(budget, Split):
        return Split(int(budget.kv_tokens * (1 - BESIDE)), int(budget.slots * (1 - BESIDE)))
    return int(budget * (1 - BESIDE))
