"""KV that lies in slots without a state is read again as it was, and the accounts hold."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_hybrid.cache.state_slots import parked_kv
from sglang_hybrid.cache.state_slots.parked_rows import ParkedRows
from tests.cache.backends import options
from tests.cache.coded.test_content import Valued, conversation
from tests.cache.test_spilled_states import KV, PAGES, SIZES
from tests.examples import seeds

MANY_SLOTS = replace(SIZES, states=24, kv=150)
MANY_SLOTS_AND_PAGES = replace(PAGES, states=24, kv=200)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("name", KV)
def test_kv_is_the_same_to_a_bit(name: str, page: int) -> None:
    """KV is in any places of any slots, and other slots are as they were."""
    kv = [torch.randint(0, 100, tensor.shape).to(tensor.dtype) for tensor in KV[name]]
    states = torch.randn(3, 7, 2, 90)
    rows = ParkedRows(kv, states, page)
    of_token = sum(tensor[0].nbytes for tensor in kv)
    assert rows.tokens % page == 0
    assert 3 * (states[0, 0].nbytes // of_token) - page < rows.tokens
    before, was = states.clone(), [tensor.clone() for tensor in kv]
    places = torch.randperm(rows.tokens)[:9]
    slots = torch.tensor([2, 5, 5, 2, 2, 5, 2, 5, 5])
    tokens, others = torch.randperm(40)[:18].split(9)
    rows.write(slots, places, rows.read_kv(tokens))
    kept = [0, 1, 3, 4, 6]
    assert torch.equal(states[:, kept], before[:, kept])
    rows.write_kv(others, rows.read(slots, places))
    for now, then in zip(kv, was, strict=True):
        assert torch.equal(now[others], then[tokens])
        assert torch.equal(now[tokens], then[tokens])


def test_states_that_have_no_room_are_refused() -> None:
    kv = [torch.zeros(40, 2, 8)]
    for states in (torch.randn(3, 7, 8), torch.randn(7, 3, 64).transpose(0, 1)):
        with pytest.raises(ValueError, match=r"no room for a token|do not lie word by word"):
            ParkedRows(kv, states, 1)


@pytest.mark.parametrize("sizes", [MANY_SLOTS, MANY_SLOTS_AND_PAGES], ids=["tokens", "pages of 4"])
@pytest.mark.parametrize("seed", seeds(4))
def test_what_is_hit_is_what_was_stored(
    seed: int, sizes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests resume behind parked KV, also where little is copied at once; nothing is
    approximate.
    """
    if seed % 2:
        monkeypatch.setattr(parked_kv, "MOST_BYTES", 9 * sizes.token_bytes)
    server = Valued.on(sizes, options("reuse"), 16)
    hit, inexact = conversation(random.Random(seed), server)
    assert hit > 0
    assert not inexact
    parked = server.cache.parked
    assert parked.parked > parked.brought_back > 0
    assert parked.tokens > 0
    server.flush()
    assert parked.tokens == parked.slots == 0
    assert server.free() == (sizes.kv, sizes.states)


@pytest.mark.parametrize("name", ["read", "write", "read_kv", "write_kv"])
def test_a_wrong_copy_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails, whichever of the four goes wrong."""
    copy = getattr(ParkedRows, name)

    def flipped(self: ParkedRows, first: torch.Tensor, *more: torch.Tensor) -> Any:
        *others, last = first, *more
        return copy(self, *others, last.flip(0))

    monkeypatch.setattr(ParkedRows, name, flipped)
    server = Valued.on(MANY_SLOTS, options("reuse"), 16)
    with pytest.raises(AssertionError):
        for seed in range(5):
            conversation(random.Random(seed), server)


def filled(server: Valued) -> list[list[int]]:
    """Prompts that take more KV than its pool has, and fit with what slots have room for."""
    prompts = [[number] * 29 for number in range(6)]
    for prompt in prompts:
        server.serve(prompt, [49])
    return prompts


def test_kv_moves_where_there_is_room() -> None:
    """Into slots without a state, when KV runs out; back, when a request reads it, in exchange for
    other KV; and out of a slot that a state needs, where KV is free. Nothing is evicted for that.
    """
    server = Valued.on(MANY_SLOTS, options("reuse"), 16)
    cache, parked = server.cache, server.cache.parked
    prompts = filled(server)
    server.check()
    assert parked.tokens > 0
    assert not sum(cache.stats.evicted.values())
    brought = parked.brought_back
    for prompt in prompts:
        req = server.arrive([*prompt, 48])
        server.look_up(req)
        assert req.prefix_len == len(prompt)
        server.check_state(req)
        server.send_back(req)
        server.check()
    assert parked.brought_back > brought
    assert not sum(cache.stats.evicted.values())
    cache.evict(EvictParams(num_tokens=40))
    evicted, slots = sum(cache.stats.evicted.values()), server.pool.mamba_allocator
    held = slots.alloc(slots.available_size())
    assert cache.slots.free() == parked.room > 0
    assert cache.slots.make_room()
    assert sum(cache.stats.evicted.values()) == evicted
    slots.free(held)
    server.check()


def test_slots_of_parked_kv_can_be_had() -> None:
    """They count as evictable, and states get all of them."""
    server = Valued.on(MANY_SLOTS, options("reuse"), 16)
    cache = server.cache
    filled(server)
    assert cache.parked.slots > 0
    all_slots = server.free()[1] + cache.mamba_evictable_size()
    assert all_slots == server.sizes.states
    cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=all_slots))
    assert server.free()[1] == all_slots
    assert cache.parked.slots == 0
    server.check()


def test_what_is_held_stays_in_the_pool() -> None:
    """A request that runs reads its KV there. Where all of it is held, nothing is brought back, and
    nothing is evicted in vain.
    """
    server = Valued.on(MANY_SLOTS, options("reuse"), 16)
    cache, parked = server.cache, server.cache.parked
    prompts = filled(server)
    running = []
    for prompt in prompts[-3:]:
        req = server.arrive([*prompt, 48])
        assert server.admit(req)
        running.append(req)
    before = server.free()
    cache.evict(EvictParams(num_tokens=server.sizes.kv, mamba_num=0))
    for req in running:
        assert parked.tokens == 0 or req.last_node not in parked._of
        server.check_state(req)
    assert server.free()[0] > before[0]
    server.check()
    rest = cache.token_to_kv_pool_allocator.alloc(server.free()[0])
    evicted = sum(cache.stats.evicted.values())
    cache.evict(EvictParams(num_tokens=1))
    assert sum(cache.stats.evicted.values()) == evicted
    cache.token_to_kv_pool_allocator.free(rest)
    for req in running:
        server.complete(req, [7])
    server.check()
