"""Room for prefills and checkpoints in one memory: what each kind can have depends on the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang_hybrid.cache.memory.shared import shared_memory  # noqa: E402
from sglang_hybrid.cache.memory.shared_budget import SharedBudget  # noqa: E402
from tests.cache.backends import options  # noqa: E402
from tests.cache.driver import Server, Sizes, build_cache  # noqa: E402

STATE_TOKENS = 50
KV, STATES = 1_500, 10
TOKENS = KV + STATES * STATE_TOKENS
"""KV of 2,000 tokens, or 40 states."""


def build(page: int = 1) -> tuple[Any, Any]:
    """The allocators of KV and of states."""
    sizes = Sizes(
        KV // page * page,
        STATES,
        page=page,
        extra_buffer=page > 1,
        one_memory=True,
        state_tokens=STATE_TOKENS,
    )
    cache: Any = build_cache(sizes, options("reuse"))
    return cache.token_to_kv_pool_allocator, cache.req_to_token_pool.mamba_allocator


def tree(kv: int = 0, states: int = 0) -> Any:
    """A tree from which so many tokens and states can be evicted."""
    return SimpleNamespace(
        full_evictable_size=lambda: kv,
        mamba_evictable_size=lambda: states,
        supports_mamba=lambda: True,
    )


def budget_of(kv: Any, held: Any, **more: int) -> SharedBudget:
    """Room for a prefill batch, in the place of what SGLang's adder makes."""
    memory = shared_memory(kv)
    assert memory is not None
    return SharedBudget(memory, kv.create_prefill_budget(held, **more))


def test_a_pool_of_kv_alone_is_no_shared_memory() -> None:
    cache: Any = build_cache(Sizes(), options("reuse"))
    assert shared_memory(cache.token_to_kv_pool_allocator) is None


def test_tokens_that_decode_in_a_mixed_batch_are_no_room_for_a_prefill() -> None:
    kv, _ = build()
    alone, mixed = (budget_of(kv, tree(), num_mixed_decode_tokens=n) for n in (0, 7))
    assert alone.remaining_total - mixed.remaining_total == 7


def test_room_for_requests_counts_both_kinds() -> None:
    kv, slots = build()
    kv.alloc(500)
    slots.alloc(20)  # 500 tokens are free
    budget = budget_of(kv, tree(kv=300, states=5))
    assert budget.remaining_total == 500 + 300 + 5 * STATE_TOKENS
    assert budget.slots_as_tokens(2) == 2 * STATE_TOKENS
    most = (500 + 300 + 5 * STATE_TOKENS) // STATE_TOKENS
    assert budget.slots_fit(most, 0)
    assert not budget.slots_fit(most + 1, 0)
    budget.total_offset += 100
    assert budget.remaining_total == 500 + 300 + 5 * STATE_TOKENS - 100
    assert not budget.slots_fit(most, 0)


@pytest.mark.parametrize("page", [1, 4, 16])
def test_no_more_room_is_promised_than_whole_pages_have(page: int) -> None:
    """A state has left part of a page beside it."""
    kv, slots = build(page)
    slots.alloc(1)
    promised = budget_of(kv, tree()).remaining_total
    assert kv.available_size() - page < promised <= kv.available_size()


@pytest.mark.parametrize("page", [1, 4, 16])
def test_of_a_state_that_may_go_no_more_is_promised_than_whole_pages_have(page: int) -> None:
    """All else is full; a state has the bytes of 50 tokens."""
    kv, slots = build(page)
    state = slots.alloc(1)
    assert kv.alloc(kv.available_size()) is not None
    promised = budget_of(kv, tree(states=1)).remaining_total
    slots.free(state)
    assert 0 < promised <= kv.available_size()


def test_pages_in_use_are_no_obstacle_to_states() -> None:
    """One page of every sixteen stays: the others are room for states, which can be had."""
    kv, slots = build(page=4)
    ids = kv.alloc(kv.available_size())
    stay = ids // 4 % 16 == 0
    kv.free(ids[~stay])
    most = (TOKENS - int(stay.sum())) // STATE_TOKENS
    budget = budget_of(kv, tree())
    assert budget.slots_fit(most - 1, 0) and not budget.slots_fit(most + 1, 0)
    assert slots.alloc(most - 1) is not None
    assert kv.verify_byte_accounting() == []


def test_checkpoints_leave_room_for_the_next_steps() -> None:
    """A state is not taken if running requests could not decode their next steps beside it."""
    sizes = Sizes(kv=100, states=3, rows=4, one_memory=True, state_tokens=10)
    cache: Any = build_cache(sizes, options("reuse"))
    server = Server(cache, sizes)
    taken = server.allocator.alloc(115)  # 15 tokens are left: one state and five tokens
    assert cache.slots._leaves_room_to_decode()
    cache.slots.steps_ahead = 1
    cache.slots.reserve(5)
    assert cache.slots._leaves_room_to_decode()
    cache.slots.reserve(6)
    assert not cache.slots._leaves_room_to_decode()
    assert cache.slots.take() is None
    server.allocator.free(taken)
    assert cache.slots.take() is not None


@pytest.mark.parametrize("rest", [5, 6])
def test_checkpoints_leave_room_for_the_rest_of_a_prefill(rest: int) -> None:
    """An unfinished prefill holds its states until it ends, which it must be able to."""
    sizes = Sizes(kv=100, states=3, rows=4, one_memory=True, state_tokens=10)
    cache: Any = build_cache(sizes, options("reuse"))
    server = Server(cache, sizes)
    server.allocator.alloc(115)  # 15 tokens are left: one state and five tokens
    cache.slots.reserve(0, rest)
    assert (cache.slots.take() is None) == (rest > 5)


@pytest.mark.parametrize(("states", "settles"), [(100, True), (12, False)])
def test_traffic_to_and_fro_within_the_budget_moves_nothing(states: int, settles: bool) -> None:
    """Three long documents and twelve short sessions in turn, always the same: where the budget
    holds what both have, no row moves after the first time; in a smaller one, some do.
    """
    server = Server.on(
        Sizes(kv=1_200, states=states, rows=4, one_memory=True, state_tokens=STATE_TOKENS),
        options("lru"),
    )
    documents = [[1_000 * n + k for k in range(300)] for n in range(1, 4)]
    sessions = [[100_000 + 100 * n + k for k in range(20)] for n in range(12)]
    moves = []
    for _ in range(4):
        for prompt in (*documents, *sessions):
            server.serve(prompt, [7])
        moves.append(server.cache.account.moves)
        server.check()
    assert (moves[-1] == moves[0]) == settles
