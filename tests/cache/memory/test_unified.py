"""One memory for KV and states: what it says it has can be had, rows keep what was written to them
wherever they move, a move that fails changes nothing, and none is made under a forward pass or a
copy.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang_hybrid.cache.memory.shared import shared_memory  # noqa: E402
from sglang_hybrid.core.memory.account import MemoryKind  # noqa: E402
from tests.cache.backends import options  # noqa: E402
from tests.cache.driver import ONE_MEMORY, Sizes, build_cache  # noqa: E402

KV, STATES = MemoryKind


class Pool:
    """SGLang's pool with KV of 32 bytes a token and states of 9,600, and what was written to it."""

    def __init__(self, page: int = 1) -> None:
        sizes = Sizes(1_200, 6, page=page, extra_buffer=page > 1, **ONE_MEMORY)
        cache = build_cache(sizes, options("reuse"))
        self.kv: Any = cache.token_to_kv_pool_allocator
        self.slots: Any = cache.req_to_token_pool.mamba_allocator
        memory = shared_memory(self.kv)
        assert memory is not None
        self.memory = memory
        self.page = page
        self.tokens: dict[int, int] = {}  # ids, and what their rows hold
        self.states: dict[int, int] = {}
        keys = self.kv.get_kvcache().full_kv_pool.k_buffer[0]
        self._rows = {KV: keys, STATES: cache.req_to_token_pool.mamba_pool.mamba_cache.temporal[0]}
        self._written = 0

    def _where(self, kind: MemoryKind, ids: list[int]) -> Any:
        names = torch.tensor(ids, dtype=torch.int64)
        return self.kv.translate_kv_loc(names) if kind is KV else self.slots.translate(names)

    def _write(self, kind: MemoryKind, ids: Any) -> None:
        held = self.tokens if kind is KV else self.states
        for one in ids.tolist():
            self._written = self._written % 200 + 1  # whole numbers of bfloat16
            self._rows[kind][self._where(kind, [one])] = self._written
            held[one] = self._written

    def take(self, kind: MemoryKind, count: int) -> bool:
        """Rows of tokens, or states, that are written to; False if there are not so many."""
        ids = (self.kv if kind is KV else self.slots).alloc(count)
        if ids is None:
            return False
        assert len(ids) == count
        self._write(kind, ids)
        return True

    def put(self, kind: MemoryKind, count: int, rng: random.Random) -> None:
        """Free some of what is held: whole pages of tokens, or states."""
        if kind is STATES:
            gone = rng.sample(sorted(self.states), min(count, len(self.states)))
        else:
            pages = sorted({token // self.page for token in self.tokens})
            gone_pages = set(rng.sample(pages, min(count // self.page, len(pages))))
            gone = [token for token in self.tokens if token // self.page in gone_pages]
        held = self.tokens if kind is KV else self.states
        for one in gone:
            del held[one]
        if gone:
            (self.kv if kind is KV else self.slots).free(torch.tensor(gone))

    def check(self) -> None:
        """Everything is where it was written, and all accounts are true."""
        for kind, held in ((KV, self.tokens), (STATES, self.states)):
            found = self._rows[kind][self._where(kind, list(held))].float()
            flat = found.flatten(1)
            expected = torch.tensor(list(held.values())).float()[:, None].expand_as(flat)
            assert torch.equal(flat, expected), kind
        assert self.kv.verify_byte_accounting() == []
        account = self.memory.account
        account.check()
        assert account.used[KV] == len(self.tokens) * self.memory.token_bytes
        assert account.used[STATES] == len(self.states) * self.memory.state_bytes
        assert account.free == account.budget - sum(account.used.values())


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_rows_keep_what_they_hold_and_all_that_is_free_can_be_had(page: int, seed: int) -> None:
    rng, pool = random.Random(seed), Pool(page)
    for _ in range(120):
        kind = rng.choice([KV, STATES])
        count = rng.randrange(1, 400) // page * page if kind is KV else rng.randrange(1, 4)
        if rng.random() < 0.45:
            pool.put(kind, count, rng)
        else:
            memory = pool.memory
            if kind is KV:
                fits = count * memory.token_bytes <= memory.free_bytes
            else:
                fits = count <= pool.slots.schedulable_available_size()
                free = memory.account.free
                assert pool.slots.schedulable_available_size() == free // memory.state_bytes
            assert pool.take(kind, count) == fits
        pool.check()
    account = pool.memory.account
    assert account.moves > 3 and min(account.moved.values()) > 0


@pytest.mark.parametrize("page", [1, 4])
def test_either_kind_can_have_nearly_everything(page: int) -> None:
    """The kinds take turns, and bytes that go back to the gap are counted for the other kind."""
    pool, rng = Pool(page), random.Random(0)
    account = pool.memory.account
    size = account.budget // pool.memory.state_bytes * pool.memory.state_bytes  # whole states
    for turn in range(3):
        assert pool.kv.available_size() * pool.memory.token_bytes == account.budget
        assert pool.take(KV, pool.kv.available_size())
        assert dict(account.moved) == {KV: turn * size, STATES: turn * account.budget}
        assert min(pool.tokens) >= page, "the first page is for padding"
        assert pool.slots.schedulable_available_size() == account.free == 0
        pool.check()
        pool.put(KV, len(pool.tokens), rng)
        assert pool.take(STATES, pool.slots.schedulable_available_size())
        assert len(pool.states) == account.budget // pool.memory.state_bytes
        assert min(pool.states) >= 1
        pool.put(STATES, len(pool.states), rng)
        pool.check()
    assert account.free == account.budget


def test_no_row_moves_before_it_is_needed() -> None:
    """Both kinds fit side by side, and what one frees it takes again."""
    pool, rng = Pool(), random.Random(0)
    assert pool.take(KV, 1_000) and pool.take(STATES, 3)
    for _ in range(10):
        pool.put(KV, 600, rng)
        pool.put(STATES, 1, rng)
        assert pool.take(KV, 600) and pool.take(STATES, 1)
        pool.check()
    assert not pool.memory.account.moves


def test_what_is_not_there_is_not_given() -> None:
    pool = Pool(page=4)
    assert pool.take(KV, pool.kv.available_size())
    assert not pool.take(KV, 4) and not pool.take(STATES, 1)
    empty, many, none = torch.tensor([0]), torch.tensor([9]), torch.tensor([-1])
    assert pool.kv.alloc_extend(empty, empty, many, many, none, 9) is None
    one = torch.tensor([1])
    assert pool.kv.alloc_decode(one, one, none) is None
    pool.check()


@pytest.mark.parametrize("page", [1, 4])
def test_frees_of_a_group_come_at_its_end(page: int) -> None:
    pool = Pool(page)
    ids = pool.kv.alloc(16)
    used = pool.memory.account.used[KV]
    pool.kv.free_group_begin()
    pool.kv.free(ids[:8])
    pool.kv.free(ids[8:])
    assert pool.memory.account.used[KV] == used > 0
    pool.kv.free_group_end()
    assert pool.memory.account.used[KV] == 0
    pool.check()


def test_an_account_that_is_wrong_is_noticed() -> None:
    account = Pool().memory.account
    account.check()
    account.budget = -1
    with pytest.raises(AssertionError, match="the memory's account is wrong"):
        account.check()


def with_holes() -> Pool:
    """A pool without a gap: states that must move for KV, and every third token freed."""
    pool = Pool()
    assert pool.take(STATES, 3)
    while pool.take(KV, 1):
        pass
    gone = [token for number, token in enumerate(pool.tokens) if number % 3 == 0]
    for token in gone:
        del pool.tokens[token]
    pool.kv.free(torch.tensor(gone))
    pool.check()
    return pool


def test_nothing_moves_while_a_copy_is_under_way() -> None:
    """Then holes of KV are no room for a state; a refused move changes nothing."""
    pool = with_holes()
    assert pool.slots.schedulable_available_size() == 2
    copying = True
    pool.kv.set_host_transfer_move_gate(lambda: not copying)
    assert pool.slots.schedulable_available_size() == 0
    assert not pool.take(STATES, 1)
    pool.check()
    copying = False
    assert pool.take(STATES, 1)
    pool.check()


@pytest.mark.parametrize("launch", range(3))
def test_a_move_of_kv_that_fails_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, launch: int
) -> None:
    """The move may also stop halfway."""
    pool = with_holes()
    pool.kv.full_attn_allocator._move_max_pages = 50
    fails(monkeypatch, pool, pool.kv.full_attn_allocator, (STATES, 1), launch)


def test_a_move_of_states_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = without_gap()
    fails(monkeypatch, pool, pool.kv.mamba_allocator, (KV, 250), 0)


def fails(
    monkeypatch: pytest.MonkeyPatch,
    pool: Pool,
    end: Any,
    wanted: tuple[MemoryKind, int],
    launch: int,
) -> None:
    """The copy number `launch` of rows of `end` fails; then it does not, and what was wanted can be
    had.
    """
    move, moves = end._kvcache.move_physical_pages, iter(range(100))

    def fail(*given: Any) -> None:
        if next(moves) == launch:
            raise RuntimeError("no more")
        move(*given)

    monkeypatch.setattr(end._kvcache, "move_physical_pages", fail)
    used = dict(pool.memory.account.used)
    with pytest.raises(RuntimeError, match="no more"):
        pool.take(*wanted)
    assert pool.memory.account.used == used
    pool.check()
    assert pool.take(*wanted)
    pool.check()


def without_gap() -> Pool:
    """A pool in which only a hole of states has room for KV."""
    pool = with_holes()
    gone = next(iter(pool.states))
    del pool.states[gone]
    pool.slots.free(torch.tensor([gone]))
    while len(pool.kv.full_attn_allocator._free_phys_pages):
        assert pool.take(KV, 1)
    return pool


class Stream:
    """Notes what it is told to wait for."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def wait_event(self, event: Any) -> None:
        self.notes.append(f"waits for {event.name}")


class Event:
    """The end of a forward pass that still runs."""

    name = "the forward pass"

    def query(self) -> bool:
        return False


@pytest.mark.parametrize("kind", [KV, STATES])
def test_a_move_waits_for_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch, kind: MemoryKind
) -> None:
    """Rows of KV, and states, that a running forward pass reads and writes are copied behind it
    (`_settle_inflight_forward`, unified_sub_pool.py); without that wait this fails.
    """
    notes: list[str] = []
    pool = with_holes() if kind is KV else without_gap()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream(notes))
    ends = pool.kv.full_attn_allocator, pool.kv.mamba_allocator
    for end in ends:
        noted(monkeypatch, end, notes)
    pool.kv.set_latest_forward_done_event(Event())
    pool.kv.set_inflight_forward(Event(), torch.tensor(list(pool.tokens)[:3]))
    wanted = (STATES, 1) if kind is KV else (KV, 250)
    assert pool.take(*wanted)
    assert notes[:1] == ["waits for the forward pass"] and "moves" in notes
    pool.check()


def noted(monkeypatch: pytest.MonkeyPatch, end: Any, notes: list[str]) -> None:
    move: Callable[..., None] = end._kvcache.move_physical_pages

    def and_note(*given: Any) -> None:
        notes.append("moves")
        move(*given)

    monkeypatch.setattr(end._kvcache, "move_physical_pages", and_note)
