"""The bytes of a state are those of all that its slot holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang.srt.mem_cache.ple_state_pool import NGramPool, ShortConvPool

from sglang_hybrid.cache.sizes import measured_cost

SLOTS = 4


def state_pool() -> MambaPool:
    """Two layers with a window of 2 x 3 and a matrix of 5 x 7 in float32 each: 328 bytes a slot."""
    pool: MambaPool = object.__new__(MambaPool)
    pool.mamba_cache = MambaPool.State(
        conv=[torch.zeros(2, SLOTS + 1, 2, 3)], temporal=torch.zeros(2, SLOTS + 1, 5, 7)
    )
    return pool


def state_bytes(pool: MambaPool, stages: int = 1) -> int:
    params: Any = SimpleNamespace(
        token_to_kv_pool_allocator=None,
        req_to_token_pool=SimpleNamespace(mamba_pool=pool),
        pp_size=stages,
        pp_cache_group="the stages",
    )
    return measured_cost(None, params).state_bytes


def test_a_state_is_what_its_slot_holds() -> None:
    pool = state_pool()
    assert state_bytes(pool) == 2 * (2 * 3 + 5 * 7) * 4
    pool.register_slot_state(
        ShortConvPool(
            size=SLOTS,
            state_shape=(8, 9),
            layer_ids=[1, 3, 6],
            dtype=torch.bfloat16,
            device="cpu",
        )
    )
    pool.register_slot_state(NGramPool(size=SLOTS, context_len=2, eos_token_id=0, device="cpu"))
    assert state_bytes(pool) == 328 + 3 * 8 * 9 * 2 + 2 * 8


def test_the_stages_of_a_pipeline_count_all_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They divide one model, and choose the same victims."""

    def gather(values: list[Any], value: tuple[int, int], group: object) -> None:
        assert group == "the stages"
        values[:] = [value, (8, 1000), (4, 0)]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert state_bytes(state_pool(), stages=3) == 328 + 1000
