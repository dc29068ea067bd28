"""SGLang's pools on reserved pages get allocators of one memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

from sglang_hybrid.core.memory.account import MemoryKind
from sglang_hybrid.extensions.cpu.one_memory.pages import PAGE, Reserved
from sglang_hybrid.extensions.cpu.one_memory.pools import OneMemory

TOKEN_BYTES = 2 * 16 * 4
"""Keys and values of one layer, 16 values of float32 each."""


class Pools(msgspec.Struct):
    """The pools that SGLang has built."""

    token_to_kv_pool: Any
    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any


@pytest.mark.parametrize("latent", [False, True], ids=["MHA", "MLA"])
def test_a_state_is_charged_for_the_pages_that_it_lies_on(latent: bool) -> None:
    """Its two tensors have 1,280 and 256 bytes, and a page each. A token's KV is in two tensors, or
    in one (MLA).
    """
    memory = object.__new__(OneMemory)
    memory.page, memory.token_bytes, memory.budget = 1, TOKEN_BYTES, 20 * PAGE
    memory.granule, memory.granules = PAGE // 64, 20 * PAGE // (PAGE // 64 * TOKEN_BYTES)
    memory.slots = memory.budget // (1_280 + 256)
    memory.reserved = Reserved(states=(1, memory.slots + 1))
    with memory.reserved:
        rows = (memory.granules + 1) * memory.granule
        wide, keys, values = (torch.zeros((rows, width)) for width in (32, 16, 16))
        conv = torch.zeros((1, memory.slots + 1, 64))
        temporal = torch.zeros((1, memory.slots + 1, 320))
    kv: Any = object.__new__(HybridLinearKVPool)
    kv.use_mla = latent
    buffers: dict[str, Any] = {"k_buffer": [keys], "v_buffer": [values]}
    kv.full_kv_pool = SimpleNamespace(**{"kv_buffer": [wide]} if latent else buffers)
    cache = SimpleNamespace(conv=[conv], temporal=temporal)
    requests = SimpleNamespace(mamba_pool=SimpleNamespace(mamba_cache=cache))
    shared = memory.share(Pools(kv, requests, SimpleNamespace(dtype=torch.float32)))
    allocator, slots = shared.token_to_kv_pool_allocator, requests.mamba_allocator
    assert allocator.token_bytes == TOKEN_BYTES
    assert slots.schedulable_available_size() == 10
    assert slots.alloc(10) is not None and slots.alloc(1) is None
    account = allocator.account
    assert account.used[MemoryKind.STATES] == 10 * (1_280 + 256)
    assert account.used[MemoryKind.STATES] + account.waste[MemoryKind.STATES] == 20 * PAGE
    assert allocator.available_size() == account.free == 0
    assert allocator.verify_byte_accounting() == []
