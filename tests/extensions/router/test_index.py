"""The index of several replicas' prefixes: its answers against a dictionary of prefixes."""

from __future__ import annotations

import threading
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_hybrid.core.tiers.rates import TIERS, Tier
from sglang_hybrid.extensions.router.index import Holdings, LostMessages, ReplicaIndex
from sglang_hybrid.extensions.router.resumable import Resumable
from sglang_hybrid.extensions.router.tokens import Tokens

Prefix = tuple[int, ...]
Key = tuple[str, Prefix]

BLOCK_SIZES = {"a": 1, "b": 1, "c": 2}
replicas = st.sampled_from(sorted(BLOCK_SIZES))
tenants = st.sampled_from(["", "00ff00ff00ff00ff"])
tiers = st.sampled_from(TIERS)
stretches = st.lists(st.integers(0, 1), min_size=1, max_size=6)


class NaiveReplica:
    """A replica with the tier of the KV of the last block of every prefix that it holds, and that
    of the state at its end.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.kv: dict[Key, Tier] = {}
        self.states: dict[Key, Tier] = {}
        self.announced: set[Key] = set()

    def chain(self, tenant: str, top: Prefix, tokens: list[int]) -> list[Key]:
        """The prefixes that end with each block of `tokens`."""
        steps = range(self.block_size, len(tokens) + 1, self.block_size)
        return [(tenant, (*top, *tokens[:step])) for step in steps]

    def remove(self, chain: list[Key]) -> None:
        for key in chain:
            self.kv.pop(key, None)
            self.states.pop(key, None)
            self.announced.discard(key)

    def deepest(self, tenant: str, prompt: list[int], slowest: Tier) -> tuple[int, Tier]:
        """The deepest position that comes from `slowest` or faster, and the tier it comes from."""
        found, whole = (0, Tier.DEVICE), Tier.DEVICE
        for key in self.chain(tenant, (), prompt[:-1]):
            if self.kv.get(key, 9) > slowest:
                break
            whole = max(whole, self.kv[key])
            if self.states.get(key, 9) <= slowest:
                found = (len(key[1]), max(whole, self.states[key]))
        return found


class Replicas(RuleBasedStateMachine):
    """Servers store, cut, move and remove at random; both must always know the same."""

    def __init__(self) -> None:
        super().__init__()
        self.index = ReplicaIndex()
        self.naive = {name: NaiveReplica(size) for name, size in BLOCK_SIZES.items()}
        for name in BLOCK_SIZES:
            self.index.clear(name)

    @rule(
        name=replicas,
        tenant=tenants,
        tokens=stretches,
        tier=tiers,
        components=st.sampled_from([("full",), ("full", "mamba"), ("mamba",), ("swa",)]),
        data=st.data(),
    )
    def store(
        self,
        name: str,
        tenant: str,
        tokens: list[int],
        tier: Tier,
        components: tuple[str, ...],
        data: st.DataObject,
    ) -> None:
        one = self.naive[name]
        known = sorted(key for key in one.announced if key[0] == tenant)
        parent = data.draw(st.sampled_from([None, *known]))
        tokens = tokens * one.block_size
        chain = one.chain(tenant, () if parent is None else parent[1], tokens)
        self.index.store(
            name,
            parent=None if parent is None else hash(parent),
            hashes=[hash(key) for key in chain],
            tokens=tokens,
            block_size=one.block_size,
            tier=tier,
            components=components,
            tenant=tenant,
        )
        for key in chain:
            if "full" in components:
                one.kv[key] = tier
                one.states.pop(key, None)
            if "mamba" in components:
                one.states[key] = tier
        if components != ("swa",):
            one.announced.add(chain[-1])

    @rule(name=replicas, blocks=st.integers(1, 6), data=st.data())
    def remove(self, name: str, blocks: int, data: st.DataObject) -> None:
        one = self.naive[name]
        if not one.announced:
            return
        tenant, prefix = data.draw(st.sampled_from(sorted(one.announced)))
        chain = one.chain(tenant, (), list(prefix))[-blocks:]
        self.index.remove(name, [hash(key) for key in chain])
        one.remove(chain)

    @rule(name=replicas)
    def clear(self, name: str) -> None:
        self.naive[name] = NaiveReplica(BLOCK_SIZES[name])
        self.index.clear(name)

    @rule(tenant=tenants, prompt=st.lists(st.integers(0, 1), max_size=16))
    def resume(self, tenant: str, prompt: list[int]) -> None:
        expected = []
        for name, one in self.naive.items():
            position, tier = one.deepest(tenant, prompt, Tier.DISK)
            device, _ = one.deepest(tenant, prompt, Tier.DEVICE)
            expected.append(Resumable(name, position, tier, device))
        assert self.index.resume(prompt, tenant) == expected

    @invariant()
    def is_whole(self) -> None:
        self.index.check_integrity()
        for name, one in self.naive.items():
            holdings = self.index.holdings(name)
            assert holdings.tokens == len(one.kv) * one.block_size
            assert holdings.positions == tuple(
                sum(tier == each for each in one.states.values()) for tier in TIERS
            )

    def teardown(self) -> None:
        for name, one in self.naive.items():
            while one.announced:
                tenant, prefix = max(one.announced, key=lambda key: len(key[1]))
                chain = one.chain(tenant, (), list(prefix))
                self.index.remove(name, [hash(key) for key in chain])
                one.remove(chain)
            if one.kv or one.states:  # what is above a removed chain and was never announced
                self.index.clear(name)
        assert_is_empty(self.index)


TestReplicas = Replicas.TestCase
TestReplicas.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def assert_is_empty(index: ReplicaIndex) -> None:
    index.check_integrity()
    assert not index._roots
    for one in index._replicas.values():
        assert not one.ends and not one.nodes


def store(index: ReplicaIndex, name: str, tokens: Tokens, **given: object) -> None:
    """Tokens from the start of a prompt, in blocks of one token; block number n has the hash n."""
    fields: dict[str, object] = {"parent": None, "hashes": list(range(len(tokens)))}
    index.store(name, tokens=tokens, block_size=1, **(fields | given))  # type: ignore[arg-type]


def test_a_replica_that_has_no_state_resumes_from_the_start() -> None:
    index = ReplicaIndex()
    store(index, "a", [1, 2, 3], components=("full",))
    assert index.resume([1, 2, 3, 4]) == [Resumable("a", 0, Tier.DEVICE, 0)]
    assert index.holdings("a") == Holdings(1, 3, (0, 0, 0))
    assert index.holdings("b") == Holdings(0, 0, (0, 0, 0))


def test_the_last_token_is_always_computed() -> None:
    index = ReplicaIndex()
    store(index, "a", [1, 2, 3])
    assert [index.resume([1, 2, 3, 4][:n])[0].position for n in (0, 1, 2, 3, 4)] == [0, 0, 1, 2, 3]


def test_a_position_comes_from_the_slowest_of_its_kv_and_its_state() -> None:
    index = ReplicaIndex()
    store(index, "a", [1, 2], hashes=[1, 2])
    store(index, "a", [3], parent=2, hashes=[3], components=("full",), tier=Tier.HOST)
    store(index, "a", [3], parent=2, hashes=[3], components=("mamba",), tier=Tier.DISK)
    assert index.resume([1, 2, 3, 4]) == [Resumable("a", 3, Tier.DISK, 2)]
    store(index, "a", [3], parent=2, hashes=[3], components=("mamba",))
    assert index.resume([1, 2, 3, 4]) == [Resumable("a", 3, Tier.HOST, 2)]


def test_blocks_after_an_unknown_block_say_that_messages_were_lost() -> None:
    index = ReplicaIndex()
    store(index, "a", [1, 2])
    with pytest.raises(LostMessages, match="unknown block 7"):
        store(index, "a", [3], parent=7, hashes=[8])
    with pytest.raises(LostMessages, match="unknown block 1"):
        store(index, "b", [3], parent=1, hashes=[8])  # what another replica said does not count
    index.check_integrity()


def test_sizes_that_contradict_each_other_are_refused() -> None:
    index = ReplicaIndex()
    store(index, "a", [1, 2])
    with pytest.raises(ValueError, match="2 blocks of 2 tokens do not have 3 tokens"):
        index.store("b", parent=None, hashes=[1, 2], tokens=[1, 2, 3], block_size=2)
    with pytest.raises(ValueError, match="cannot have blocks of 2"):
        index.store("a", parent=None, hashes=[1], tokens=[1, 2], block_size=2)
    with pytest.raises(ValueError, match="blocks of 0"):
        index.store("b", parent=None, hashes=[], tokens=[], block_size=0)


def test_tenants_share_nothing() -> None:
    index = ReplicaIndex()
    store(index, "a", [1, 2], tenant="0123456789abcdef")
    assert index.resume([1, 2, 3])[0].position == 0
    assert index.resume([1, 2, 3], "0123456789abcdef")[0].position == 2


def test_all_forms_of_tokens_are_the_same() -> None:
    index = ReplicaIndex()
    store(index, "a", np.array([1, 2, 3], np.int64))
    plain = [1, 2, 3, 4]
    forms: list[Tokens] = [plain, np.array(plain), np.array(plain, np.int32)]
    for tokens in [*forms, np.array(plain, np.int32).tobytes()]:
        assert index.resume(tokens)[0].position == 3


def test_ids_of_images_are_told_apart_by_their_low_bits() -> None:
    index = ReplicaIndex()
    store(index, "a", [1, (5 << 32) + 7, 3])
    assert index.resume([1, (5 << 32) + 7, 3, 4])[0].position == 3
    assert index.resume(np.array([1, (5 << 32) + 8, 3, 4]))[0].position == 1


def test_several_chains_are_removed_at_once() -> None:
    index = ReplicaIndex()
    store(index, "a", [1, 2], hashes=[1, 2])
    store(index, "a", [3, 4], parent=2, hashes=[3, 4])
    store(index, "a", [5, 6], parent=2, hashes=[5, 6])
    index.remove("a", [3, 4, 99, 5, 6])
    assert index.resume([1, 2, 3, 4, 0])[0].position == 2
    assert index.holdings("a").tokens == 2
    index.remove("a", [98, 99])
    index.remove("unknown", [1])
    index.remove("a", [1, 2])
    assert_is_empty(index)


def test_a_prompt_does_not_wait_for_all_that_a_replica_gives_up() -> None:
    lock = MagicMock(wraps=threading.Lock())
    for give_up in (ReplicaIndex.clear, lambda index, one: index.remove(one, range(50))):
        index = ReplicaIndex()
        for token in range(50):
            index.store("a", parent=None, hashes=[token], tokens=[token], block_size=1)
        index._lock = lock
        lock.reset_mock()
        give_up(index, "a")
        assert lock.__exit__.call_count >= 50
        assert index.holdings("a").nodes == 0


def test_a_chain_is_removed_across_blocks_that_were_removed_before() -> None:
    index = ReplicaIndex()
    store(index, "a", [1, 2], hashes=[1, 2])
    store(index, "a", [3], parent=2, hashes=[3])
    index.remove("a", [2])
    assert index.resume([1, 2, 3, 4])[0].position == 1  # nothing is loaded across a hole
    index.remove("a", [1, 2, 3])
    assert_is_empty(index)


def test_a_forgotten_replica_is_not_answered_for_and_its_place_is_free() -> None:
    index = ReplicaIndex()
    for name in ("a", "b"):
        store(index, name, [1, 2])
    index.forget("a")
    assert [each.replica for each in index.resume([1, 2, 3])] == ["b"]
    index.clear("c")
    found = {each.replica: each.position for each in index.resume([1, 2, 3])}
    assert found == {"b": 2, "c": 0}
    index.forget("b")
    assert_is_empty(index)


@given(st.integers(1, 40), st.integers(1, 40))
def test_an_edge_has_one_node_however_many_blocks_it_has(first: int, second: int) -> None:
    index = ReplicaIndex()
    store(index, "a", list(range(first)))
    store(index, "b", list(range(second)))
    nodes = sum(index.holdings(name).nodes for name in ("a", "b"))
    assert nodes == (2 if first == second else 3)
