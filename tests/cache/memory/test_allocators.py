"""SGLang's allocators in one memory: what each kind can have depends on the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang.srt.utils import rank_consensus_checker  # noqa: E402

from sglang_hybrid.cache.memory.shared import SharedBudget  # noqa: E402
from sglang_hybrid.core.memory.account import Account, MemoryKind  # noqa: E402
from sglang_hybrid.extensions.cpu.one_memory.allocators import (  # noqa: E402
    OneMemoryPages,
    OneMemorySlots,
    OneMemoryTokens,
)
from sglang_hybrid.extensions.cpu.one_memory.granules import GranulePool  # noqa: E402
from tests.cache.backends import options  # noqa: E402
from tests.cache.driver import Server, Sizes, build_cache  # noqa: E402

BUDGET, TOKEN, STATE = 16_000, 8, 400


def build(page: int = 1, per_granule: int = 4) -> tuple[Any, OneMemorySlots]:
    """KV of 8 bytes a token, states of 400 bytes, 16,000 bytes in all."""
    account = Account(BUDGET)
    granule = page * per_granule * TOKEN
    pages = GranulePool(
        account,
        MemoryKind.KV,
        granules=BUDGET // granule,
        per_granule=per_granule,
        id_bytes=page * TOKEN,
    )
    states = GranulePool(
        account, MemoryKind.STATES, granules=BUDGET // STATE, per_granule=1, id_bytes=STATE
    )
    slots = OneMemorySlots(states)
    kv: Any = SimpleNamespace()
    if page == 1:
        return OneMemoryTokens(pages, states, torch.float32, kv), slots
    return OneMemoryPages(pages, states, page, torch.float32, kv), slots


def tree(kv: int = 0, states: int = 0) -> Any:
    """A tree from which so many tokens and states can be evicted."""
    return SimpleNamespace(
        full_evictable_size=lambda: kv,
        mamba_evictable_size=lambda: states,
        supports_mamba=lambda: True,
    )


def budget_of(kv: Any, held: Any, **more: int) -> SharedBudget:
    """Room for a prefill batch, in the place of what SGLang's adder makes."""
    return SharedBudget(kv, kv.create_prefill_budget(held, **more))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Filled with what ranks are compared by."""
    said: list[str] = []
    checker = rank_consensus_checker
    monkeypatch.setattr(checker, "enabled", lambda: True)
    monkeypatch.setattr(checker, "assert_same", lambda text, *values: said.append(text % values))
    return said


@pytest.mark.parametrize("page", [1, 4])
def test_one_kind_takes_from_what_the_other_can_have(page: int) -> None:
    kv, slots = build(page)
    assert kv.available_size() == kv.size == BUDGET // TOKEN
    assert slots.schedulable_available_size() == slots.available_size() == BUDGET // STATE
    taken = slots.alloc(10)
    assert kv.available_size() == kv.size == (BUDGET - 10 * STATE) // TOKEN // (4 * page) * 4 * page
    assert slots.available_size() == slots.schedulable_available_size() == 30
    ids = kv.alloc(kv.available_size())
    assert len(torch.unique(ids)) == len(ids)
    assert int(ids.min()) >= 4 * page  # the first granule is for padding
    assert slots.schedulable_available_size() == 0
    assert slots.available_size() == 30
    assert slots.alloc(1) is None
    kv.free(ids)
    slots.free(taken)
    assert kv.verify_byte_accounting() == []
    assert kv.account.free == BUDGET
    assert sorted(slots.free_slots.tolist()) == list(range(1, 41))


def test_tokens_that_decode_in_a_mixed_batch_are_no_room_for_a_prefill() -> None:
    kv, _ = build()
    alone, mixed = (budget_of(kv, tree(), num_mixed_decode_tokens=n) for n in (0, 7))
    assert alone.remaining_total - mixed.remaining_total == 7


def test_requests_that_wait_set_nothing_aside() -> None:
    kv, slots = build()
    slots.alloc_group_begin(20)
    assert kv.account.free == BUDGET
    slots.alloc_group_end()


def test_pages_are_continued_and_added() -> None:
    """Two requests with 5 and 8 tokens get 6 and 3 more, then one each."""
    kv, _ = build(page=4)
    first, second = kv.alloc(8), kv.alloc(8)
    before, after = torch.tensor([5, 8]), torch.tensor([11, 11])
    last = torch.stack([first[4], second[7]])
    new = kv.alloc_extend(before, before, after, after, last, 9)
    assert new[:3].tolist() == first[5:8].tolist()
    rows = torch.cat([first[:5], new[:6]]), torch.cat([second[:8], new[6:]])
    for row in rows:
        assert (row % 4).tolist() == [place % 4 for place in range(11)]
        assert all(len(set((row[at : at + 4] // 4).tolist())) == 1 for at in (0, 4, 8))
    assert len(torch.unique(torch.cat(rows))) == 22
    lens = torch.tensor([13, 12])
    last = torch.stack([rows[0][10] + 1, rows[1][10]])
    decoded = kv.alloc_decode(lens, lens, last)
    assert decoded[1] == rows[1][10] + 1
    assert decoded[0] % 4 == 0
    assert kv.pool.in_use == 3 + 3 + 1
    assert kv.verify_byte_accounting() == []
    kv.free(torch.cat([*rows, decoded]))
    assert kv.account.free == BUDGET


def test_pages_that_are_not_there_are_not_given() -> None:
    kv, slots = build(page=4)
    slots.alloc(40)
    empty, many, none = torch.tensor([0]), torch.tensor([9]), torch.tensor([-1])
    assert kv.alloc_extend(empty, empty, many, many, none, 9) is None
    one = torch.tensor([1])
    assert kv.alloc_decode(one, one, none) is None
    assert kv.alloc(4) is None
    assert kv.verify_byte_accounting() == []


def test_frees_of_a_group_come_at_its_end() -> None:
    for page in (1, 4):
        kv, _ = build(page)
        ids = kv.alloc(16)
        kv.free_group_begin()
        kv.free(ids[:8])
        kv.free(ids[8:])
        assert kv.pool.in_use == 16 // page
        kv.free_group_end()
        assert kv.pool.in_use == 0


def test_room_for_requests_counts_both_kinds() -> None:
    kv, slots = build(per_granule=1)
    kv.alloc(500)
    slots.alloc(20)  # 4,000 + 8,000 bytes are taken, 4,000 are free
    budget = budget_of(kv, tree(kv=300, states=5))
    assert budget.remaining_total == (4_000 + 300 * TOKEN + 5 * STATE) // TOKEN
    assert budget.slots_as_tokens(2) == 100
    most = (4_000 + 300 * TOKEN + 5 * STATE) // STATE
    assert budget.slots_fit(most, 0)
    assert not budget.slots_fit(most + 1, 0)
    budget.total_offset += 100
    assert budget.remaining_total == (4_000 + 300 * TOKEN + 5 * STATE) // TOKEN - 100
    assert not budget.slots_fit(most, 0)


@pytest.mark.parametrize("per_granule", [1, 4, 16])
def test_no_more_room_is_promised_than_whole_granules_have(per_granule: int) -> None:
    """A state has left part of a granule beside it."""
    kv, slots = build(per_granule=per_granule)
    slots.alloc(1)
    promised = budget_of(kv, tree()).remaining_total
    assert kv.available_size() - per_granule < promised <= kv.available_size()


def test_a_row_in_use_keeps_its_granule_from_states() -> None:
    """All KV but one row in each granule can go: no byte of these granules makes room for one."""
    kv, _ = build(per_granule=16)
    ids = kv.alloc(kv.available_size()).numpy()
    kv.free(torch.from_numpy(ids[ids % 16 != 0]))
    budget = budget_of(kv, tree())
    assert budget.remaining_total > 1_800
    assert not budget.slots_fit(1, 0)
    assert np.array_equal(kv.pool.in_use, len(ids) // 16)


def test_checkpoints_leave_room_for_the_next_steps() -> None:
    """With steps in preparation, a state is not taken if running requests could not decode."""
    sizes = Sizes(kv=100, states=3, rows=4, one_memory=True, state_bytes=80)
    cache: Any = build_cache(sizes, options("reuse"))
    server = Server(cache, sizes)
    taken = server.allocator.alloc(115)  # 120 bytes are left, one state and five tokens
    assert cache.slots._leaves_enough()
    cache.slots.steps_ahead = 1
    cache.slots.reserve(5)
    assert cache.slots._leaves_enough()
    cache.slots.reserve(6)
    assert not cache.slots._leaves_enough()
    assert cache.slots.take() is None
    server.allocator.free(taken)
    assert cache.slots.take() is not None


@pytest.mark.parametrize("rest", [5, 6])
def test_checkpoints_leave_room_for_the_rest_of_a_prefill(rest: int) -> None:
    """An unfinished prefill holds its states until it ends, which it must be able to."""
    sizes = Sizes(kv=100, states=3, rows=4, one_memory=True, state_bytes=80)
    cache: Any = build_cache(sizes, options("reuse"))
    server = Server(cache, sizes)
    server.allocator.alloc(115)  # 120 bytes are left, one state and five tokens
    cache.slots.reserve(0, rest)
    assert (cache.slots.take() is None) == (rest > 5)


@pytest.mark.parametrize("page", [1, 4])
def test_sglangs_checks_see_which_pages_are_free(page: int) -> None:
    kv, _ = build(page)
    everything = kv.get_all_free_pages().tolist()
    assert len(set(everything)) == len(everything) == BUDGET // TOKEN // page
    taken = kv.alloc(10 * page) // page
    assert sorted({*kv.get_all_free_pages().tolist(), *taken.tolist()}) == everything
    assert not {*kv.get_all_free_pages().tolist()} & {*taken.tolist()}


@pytest.mark.parametrize("page", [1, 4])
def test_ranks_are_compared_by_the_ids_that_they_get(page: int, told: list[str]) -> None:
    """Alike after the same steps; a rank that differs says something else at its next step."""

    def steps(differs: bool) -> list[str]:
        told.clear()
        kv, slots = build(page)
        first = kv.alloc(kv.available_size())
        kv.free(first[len(first) // 2 :])
        slots.free(slots.alloc(3))
        if differs:
            kv.free(first[: 4 * page])
        kv.alloc(8 * page)
        slots.alloc(1)
        return list(told)

    alike, other = steps(differs=False), steps(differs=True)
    assert steps(differs=False) == alike
    assert len(alike) == len(other) == 4
    assert alike[:2] == other[:2] and alike[2:] != other[2:]


def test_a_rank_whose_bytes_moved_otherwise_is_seen(told: list[str]) -> None:
    for moves in (False, True):
        kv, slots = build()
        if moves:
            slots.free(slots.alloc(40))  # the KV that follows takes the bytes from the states
        kv.alloc(100)
    assert told[0] != told[2]


@pytest.mark.parametrize(("states", "settles"), [(100, True), (12, False)])
def test_traffic_to_and_fro_within_the_budget_moves_nothing(states: int, settles: bool) -> None:
    """Three long documents and twelve short sessions in turn, always the same: where the budget
    holds what both have, nothing moves after the first time; in a smaller one, bytes go to and fro.
    """
    server = Server.on(
        Sizes(kv=1_200, states=states, rows=4, one_memory=True, state_bytes=STATE), options("lru")
    )
    documents = [[1_000 * n + k for k in range(300)] for n in range(1, 4)]
    sessions = [[100_000 + 100 * n + k for k in range(20)] for n in range(12)]
    moved = []
    for _ in range(4):
        for prompt in (*documents, *sessions):
            server.serve(prompt, [7])
        moved.append(sum(server.cache.account.moved.values()))
        server.check()
    assert (moved[-1] == moved[0]) == settles
