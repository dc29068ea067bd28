"""States that lie in the place of KV are read again as they were, and the accounts hold."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_hybrid.cache.state_slots.state_rows import StateRows
from tests.cache.backends import options
from tests.cache.coded.test_content import Valued, conversation
from tests.cache.driver import MAMBA, Sizes
from tests.examples import seeds

SIZES = Sizes(states=5, kv=300, rows=6, context=512, row=32, spills=True, state_tokens=10)
PAGES = replace(SIZES, states=12, kv=320, page=4, extra_buffer=True, grid=4)
"""Each request holds three slots."""

KV = {
    "keys and values": [torch.zeros(40, 2, 8, dtype=torch.bfloat16) for _ in range(4)],
    "latents": [torch.zeros(40, 1, 24, dtype=torch.bfloat16)],
    "bytes": [torch.zeros(40, 1, 32, dtype=torch.uint8) for _ in range(2)],
}


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("name", KV)
def test_a_state_is_the_same_to_a_bit(name: str, page: int) -> None:
    """Windows and states have other types, and their bytes are no multiple of anything."""
    kv = [tensor.clone() for tensor in KV[name]]
    states = [torch.randn(3, 6, 5, 3).bfloat16(), torch.randn(2, 6, 7), torch.randn(2, 6, 0)]
    rows = StateRows(kv, states, page)
    size = sum(tensor[:, 0].nbytes for tensor in states)
    of_token = sum(tensor[0].nbytes for tensor in kv)
    assert rows.tokens % page == 0
    assert size <= rows.tokens * of_token <= size + 2 * 16 + page * of_token
    before = [tensor.clone() for tensor in states]
    first, second = torch.randperm(40)[: 2 * rows.tokens].split(rows.tokens)
    rows.spill(torch.tensor([4]), first)
    rows.spill(torch.tensor([1]), second)
    untouched = torch.ones(40, dtype=torch.bool)
    untouched[torch.cat([first, second])] = False
    assert not any(tensor[untouched].any() for tensor in kv)
    rows.fetch(first, torch.tensor([2]))
    for now, was in zip(states, before, strict=True):
        assert torch.equal(now[:, 2], was[:, 4])
        others = [0, 1, 3, 4, 5]
        assert torch.equal(now[:, others], was[:, others])


def test_kv_that_is_not_kept_token_by_token_is_refused() -> None:
    states = [torch.randn(1, 4, 8)]
    for kv in (torch.zeros(2, 40, 16).transpose(0, 1), torch.zeros(40, 3, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="does not lie token by token"):
            StateRows([kv], states, 1)


@pytest.mark.parametrize("sizes", [SIZES, PAGES], ids=["tokens", "pages of 4"])
@pytest.mark.parametrize("seed", seeds(3))
def test_what_is_hit_is_what_was_stored(seed: int, sizes: Sizes) -> None:
    """Requests resume from spilled states; none is approximate."""
    server = Valued.on(sizes, options("reuse"), 16)
    hit, inexact = conversation(random.Random(seed), server)
    assert hit > 0
    assert not inexact
    spilled = server.cache.spilled.as_dict()
    assert spilled["spilled"] > 0
    assert spilled["fetched"] > 0
    server.cache.reset()
    assert server.cache.spilled.evictable == server.cache.spilled.held == 0


def test_a_wrong_copy_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails with it."""
    fetch = StateRows.fetch
    monkeypatch.setattr(
        StateRows, "fetch", lambda self, tokens, slot: fetch(self, tokens.flip(0), slot)
    )
    server = Valued.on(SIZES, options("reuse"), 16)
    with pytest.raises(AssertionError):
        for seed in range(5):
            conversation(random.Random(seed), server)


def spilled(server: Valued) -> list[Any]:
    """Nodes whose states lie in the place of KV."""
    nodes = [record.payload for record in server.cache.shadow_tree.tree.walk()]
    values = [(node, node.component_data[MAMBA].value) for node in nodes]
    return [node for node, value in values if value is not None and not len(value)]


def test_states_move_where_there_is_room() -> None:
    """Into KV that is free, when slots run out; into slots that are free, when KV runs out. Nothing
    is evicted for that.
    """
    server = Valued.on(replace(SIZES, states=8), options("reuse"), 16)
    cache, slots = server.cache, server.pool.mamba_allocator
    held = slots.alloc(4)
    for number in range(4):
        server.serve([number] * 30, [9])
    there = len(spilled(server))
    assert there == len(cache.spilled) > 0
    assert cache.spilled.evictable == there * cache.spilled.tokens
    slots.free(held)
    cache.evict_for_alloc(EvictParams(num_tokens=cache.spilled.tokens + 1))
    assert len(spilled(server)) == there - 2
    assert not sum(cache.stats.evicted.values())
    server.check()


def test_a_held_state_stays_where_it_is() -> None:
    """A request that runs holds the state that it came from: in its slot, it does not move; in KV,
    it is not evicted, and its tokens count as held.
    """
    server = Valued.on(SIZES, options("reuse"), 16)
    cache = server.cache
    for number in range(4):
        server.serve([number] * 30, [9])
    node = spilled(server)[0]
    prompt = [*_tokens(node), 49]
    req = server.arrive(prompt)
    assert server.admit(req)
    server.check_state(req)
    assert cache.spilled.held == cache.spilled.tokens
    cache.evict(EvictParams(num_tokens=server.sizes.kv, mamba_num=server.sizes.states))
    assert spilled(server) == [node]
    server.check()
    server.complete(req, [7])
    assert cache.spilled.held == 0
    server.check()


def _tokens(node: Any) -> list[int]:
    found: list[int] = []
    while node.parent is not None:
        found = [*node.key.token_ids, *found]
        node = node.parent
    return found
