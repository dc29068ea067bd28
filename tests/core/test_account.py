"""The account of one memory: bytes are conserved, ids are unique, what fails changes nothing."""

from __future__ import annotations

import copy
import errno
import random
from typing import Any

import numpy as np
import pytest

from sglang_hybrid.core.memory.account import Account, MemoryKind
from sglang_hybrid.core.memory.states import KEPT_TRANSITIONS, MemoryState, Monitor
from sglang_hybrid.extensions.cpu.one_memory.granules import GranulePool, runs
from tests.examples import seeds

KV, STATES = MemoryKind.KV, MemoryKind.STATES


class Memory:
    """KV ids of 8 bytes in granules of `per_granule`, states of 100 bytes padded to 128."""

    def __init__(self, budget: int = 10_000, per_granule: int = 16) -> None:
        self.account = Account(budget)
        self.refuses: set[MemoryKind] = set()
        self.given_back: list[tuple[MemoryKind, int, int]] = []
        self.kv = GranulePool(
            self.account,
            KV,
            granules=budget // (8 * per_granule),
            per_granule=per_granule,
            id_bytes=8,
            give_back=lambda first, last: self._give_back(KV, first, last),
        )
        self.states = GranulePool(
            self.account,
            STATES,
            granules=budget // 128,
            per_granule=1,
            id_bytes=100,
            padding=28,
            give_back=lambda first, last: self._give_back(STATES, first, last),
        )

    def _give_back(self, kind: MemoryKind, first: int, last: int) -> None:
        if kind in self.refuses:
            raise OSError(errno.ENOMEM, "no memory")
        self.given_back.append((kind, first, last))

    def check(self) -> None:
        self.account.check()
        self.kv.check()
        self.states.check()

    def picture(self) -> Any:
        """Everything but what is only counted."""
        pools = [
            {name: copy.deepcopy(value) for name, value in vars(pool).items() if name[0] == "_"}
            for pool in (self.kv, self.states)
        ]
        for pool in pools:
            del pool["_give_back"]
        account = self.account
        return pools, dict(account.used), dict(account.waste), dict(account.kept), account.free


def same(a: Any, b: Any) -> bool:
    return str(a) == str(b)


@pytest.mark.parametrize("per_granule", [1, 16])
@pytest.mark.parametrize("seed", seeds(2))
def test_bytes_are_conserved_after_every_step(seed: int, per_granule: int) -> None:
    rng = random.Random(seed)
    memory = Memory(per_granule=per_granule)
    held: list[tuple[GranulePool, np.ndarray]] = []
    for _ in range(2_000):
        pool = rng.choice((memory.kv, memory.states))
        if held and rng.random() < 0.45:
            pool, ids = held.pop(rng.randrange(len(held)))
            cut = rng.randrange(len(ids) + 1)
            pool.put(ids[:cut])
            if cut < len(ids):
                held.append((pool, ids[cut:]))
        else:
            count = rng.randrange(1, 400 if pool is memory.kv else 20)
            fits = count <= pool.available
            taken = pool.take(count)
            assert (taken is not None) == fits
            if taken is not None:
                assert len(taken) == count
                held.append((pool, taken))
        memory.check()
        for one in (memory.kv, memory.states):
            mine = [ids for pool, ids in held if pool is one]
            all_ids = np.concatenate(mine) if mine else np.empty(0, dtype=np.int64)
            assert len(np.unique(all_ids)) == len(all_ids) == one.in_use
    assert memory.account.moved[KV] > 0
    assert memory.account.moved[STATES] > 0
    for pool, ids in held:
        pool.put(ids)
    memory.check()
    assert memory.account.free == memory.account.budget


def test_either_kind_can_have_nearly_everything() -> None:
    memory = Memory()
    for _ in range(3):
        kv = memory.kv.take(memory.kv.available)
        assert kv is not None
        assert memory.states.available == 0
        assert len(kv) == 10_000 // 128 * 16
        memory.kv.put(kv)
        states = memory.states.take(memory.states.available)
        assert states is not None
        assert len(states) == 10_000 // 128
        memory.states.put(states)
        memory.check()
    assert memory.account.moves == 5
    assert memory.account.moved[STATES] == 3 * 128 * (10_000 // 128)


def test_nothing_moves_before_it_is_needed() -> None:
    memory = Memory()
    kv = memory.kv.take(600)  # about half
    assert kv is not None
    memory.kv.put(kv)
    states = memory.states.take(30)
    assert states is not None
    for _ in range(10):  # both fit side by side: nothing goes to and fro
        kv = memory.kv.take(600)
        assert kv is not None
        memory.kv.put(kv)
    assert not memory.account.moves
    assert not memory.given_back


def test_ids_are_consecutive_where_they_can_be() -> None:
    memory = Memory()
    ids = memory.kv.take(100)
    assert ids is not None
    assert runs(np.sort(ids)) == [(16, 116)]
    assert memory.account.waste[KV] == 12 * 8
    again = memory.kv.take(12)  # from the granule that is partly used
    assert again is not None
    assert memory.account.waste[KV] == 0


@pytest.mark.parametrize("taker", [KV, STATES])
def test_a_refused_move_changes_nothing(taker: MemoryKind) -> None:
    """The system does not take pages back: both sides stay as they were, and serve as before."""
    memory = Memory()
    pools = {KV: memory.kv, STATES: memory.states}
    donor = pools[taker.other]
    ids = donor.take(donor.available)
    assert ids is not None
    donor.put(ids)
    memory.refuses = {taker.other}
    before = memory.picture()
    assert pools[taker].take(3) is None
    assert same(memory.picture(), before)
    assert memory.account.failed_moves == 1
    assert not memory.account.moves
    assert memory.account.monitor.state is taker.short
    memory.check()
    assert donor.take(1) is not None
    memory.refuses = set()
    assert pools[taker].take(3) is not None
    assert memory.account.monitor.state is MemoryState.BALANCED
    memory.check()


def test_a_move_that_stops_halfway_leaves_both_sides_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run of granules is given back and the second is refused."""
    memory = Memory()
    ids = memory.states.take(memory.states.available)
    assert ids is not None
    stays = ids[10:11]
    memory.states.put(np.setdiff1d(ids, stays))
    calls = 0

    def second_fails(first: int, last: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(memory.states, "_give_back", second_fails)
    assert memory.kv.take(memory.kv.available) is None
    assert calls == 2
    memory.check()
    assert memory.states.in_use == 1
    assert memory.account.moved[KV] == 0


def test_what_is_not_there_is_not_given() -> None:
    memory = Memory()
    taken = memory.kv.take(memory.kv.available)
    assert taken is not None
    before = memory.picture()
    assert memory.states.take(1) is None
    assert memory.kv.take(1) is None
    assert same(memory.picture(), before)


@pytest.mark.parametrize("ids", [[0], [15], [16, 16], [17], [10**6], [-1]])
def test_an_id_that_is_not_in_use_is_refused(ids: list[int]) -> None:
    memory = Memory()
    assert memory.kv.take(1) is not None  # id 16
    before = memory.picture()
    with pytest.raises(ValueError, match="not in use"):
        memory.kv.put(np.array(ids))
    assert same(memory.picture(), before)


def test_the_monitor_keeps_the_last_transitions() -> None:
    monitor = Monitor()
    for _ in range(KEPT_TRANSITIONS):
        monitor.enter(MemoryState.KV_SHORT, 5)
        monitor.enter(MemoryState.KV_SHORT, 6)
        monitor.enter(MemoryState.BALANCED)
    info = monitor.as_dict()
    assert len(info["transitions"]) == KEPT_TRANSITIONS
    assert info["entered"]["kv_short"] == info["entered"]["balanced"] == KEPT_TRANSITIONS
    assert {t["bytes"] for t in info["transitions"]} == {0, 5}
