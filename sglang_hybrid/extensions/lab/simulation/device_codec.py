"""A device that keeps entries coded before it evicts them, as a replay knows it."""

from __future__ import annotations

from dataclasses import replace

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.server_settings import Budget, Serving, Split
from sglang_hybrid.extensions.lab.simulation.system_names import Setting
from sglang_hybrid.extensions.lab.simulation.tiers.tier_budgets import KV_VALUE_BYTES, CopyCodec

BESIDE_KV = 0.016
"""Share of KV's memory for scales, which lie beside it: 2 bytes for 128 numbers, twice."""

BESIDE_STATES = 0.05
"""Share of states' memory for scales, and for windows of convolutions, which take 2 to 5 percent.
One memory has room for all of it as KV and all of it as states."""

NUMBER_BYTES = {CopyCodec.BF16: 2, CopyCodec.INT8: 1}


def coded_in(cost: CostModel, codec: CopyCodec) -> CostModel:
    """`cost` with the bytes of coded KV and coded states."""
    if codec is CopyCodec.EXACT:
        return cost
    kv, state = (
        max(1, value // NUMBER_BYTES[codec]) for value in (KV_VALUE_BYTES, cost.state_value_bytes)
    )
    return replace(cost, coded=(-(-cost.kv_bytes_per_token // kv), -(-cost.state_bytes // state)))


def left_of(budget: Budget, codec: CopyCodec, cost: CostModel, serving: Serving | None) -> Budget:
    """The part of `budget` that is left for the pools. cost: with coded sizes (`coded_in`)."""
    if codec is CopyCodec.EXACT or budget is None:
        return budget
    memory = Setting(cost, budget, (), serving=serving).memory
    if not isinstance(memory, Split):
        return int(memory * (1 - BESIDE_KV - BESIDE_STATES))
    tokens, slots = memory.kv_tokens * (1 - BESIDE_KV), memory.slots * (1 - BESIDE_STATES)
    return Split(int(tokens), int(slots))
