"""The candidates of a tier: ordered by what a copy there saves; and copies to come."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.node_tree import NodeTree
from sglang_hybrid.core.records.nodes import Kind, Node
from sglang_hybrid.core.returns.history import History
from sglang_hybrid.core.tiers import tier_pool
from sglang_hybrid.core.tiers.places import Placement, copies_of, was_refused
from sglang_hybrid.core.tiers.rates import Link, Rates, Speeds, Tier
from sglang_hybrid.core.tiers.tier_pool import MOST_COMPARED, TierPool
from sglang_hybrid.core.tiers.writes import CopyJudge, mark_refused
from sglang_hybrid.core.victims.eviction import Lru, Marconi, Policy, Reuse
from sglang_hybrid.core.victims.pool import Scarce
from tests.core.plain import plain_evictions, plain_next_victims
from tests.examples import examples

COST = CostModel.paper_7b()
SPEEDS = Speeds.of(2.6e14, host=Link(25e9), disk=Link(3e9))
DEVICE, HOST = Tier.DEVICE, Tier.HOST


class Cache:
    """A tree of leaves, and the pools of two tiers."""

    def __init__(self, policy: Policy, demotes: bool = False) -> None:
        self.tree = NodeTree()
        self.placement = Placement(self.tree)
        self.rates = Rates(SPEEDS)
        self.device = self.pool(DEVICE, policy, HOST if demotes else None)
        self.host = self.pool(HOST, policy, None)

    def pool(self, tier: Tier, policy: Policy, below: Tier | None) -> TierPool:
        clock = self.tree.clock
        pool = TierPool(
            tier, Scarce.SHARED, COST, policy, clock, self.rates, below, tells_on_choice=False
        )
        self.tree.listen(pool)
        return pool

    def leaf(self, tokens: int, *tiers: Tier, parent: Node | None = None) -> Node:
        """A checkpoint of `tokens` tokens with copies of KV and state in `tiers`."""
        self.tree.clock.advance()
        node = self.tree.add(parent or self.tree.root, self.tree.clock.tick, tokens)
        for tier in tiers:
            self.placement.add_kv(node, tier)
        self.tree.give_state(node, Kind.TAIL)
        for tier in tiers:
            self.placement.add_state(node, tier)
        return node


EFFICIENCY = 1_000.0
"""An alpha with which recency counts for nothing."""


def test_a_copy_with_another_one_below_goes_before_one_that_would_be_computed_again() -> None:
    cache = Cache(Marconi(EFFICIENCY))
    cache.leaf(2_000, DEVICE)
    backed = cache.leaf(5_000, DEVICE, HOST)
    assert cache.device.victim() is backed


def test_victims_that_are_all_written_down_differ_by_their_loads_only() -> None:
    cache = Cache(Marconi(EFFICIENCY), demotes=True)
    one, other = cache.leaf(2_000, DEVICE), cache.leaf(5_000, DEVICE, HOST)
    units = [cache.device.unit(node) for node in (one, other)]
    assert all(unit is not None for unit in units)
    per_byte = [unit.saves / unit.freed for unit in units if unit is not None]
    assert per_byte[0] == pytest.approx(per_byte[1])


def test_the_next_victims_give_back_what_is_needed_and_no_more() -> None:
    """They are in the order of eviction. A node that saves nothing is evicted first, and counts."""
    cache = Cache(Lru())
    leaves = [cache.leaf(1_000, DEVICE) for _ in range(3)]
    each = 1_000 * COST.kv_bytes_per_token + COST.state_bytes
    assert cache.device.next_victims(0) == []
    assert cache.device.next_victims(each + 1) == leaves[:2]
    assert cache.device.next_victims(100 * each) == leaves
    worthless = cache.tree.add(cache.tree.root, 99, 10_000)
    cache.placement.add_kv(worthless, DEVICE)
    assert cache.device.next_victims(1_000 * COST.kv_bytes_per_token) == []


def test_other_speeds_give_other_victims() -> None:
    cache = Cache(Marconi(EFFICIENCY))
    computed, backed = cache.leaf(300, DEVICE), cache.leaf(5_000, DEVICE, HOST)
    assert cache.device.victim() is backed
    cache.rates.speeds = Speeds.of(2.6e14, host=Link(1.5e9), disk=Link(1e9))
    assert cache.device.victim() is computed


def test_a_copy_to_come_is_compared_and_nothing_changes() -> None:
    cache = Cache(Marconi(EFFICIENCY))
    short, long = cache.leaf(500, HOST), cache.leaf(20_000, HOST)
    rich, poor = cache.leaf(30_000, DEVICE), cache.leaf(100, DEVICE)
    before = [repr(copies_of(node)) for node in (short, long, rich, poor)]
    cache.placement.pin(rich, HOST, True)  # its copy is about to be written
    worth, not_worth = (cache.host.compare_copy(node) for node in (rich, poor))
    assert worth is not None
    assert not_worth is not None
    assert worth.beats_victim
    assert not not_worth.beats_victim
    assert [repr(copies_of(node)) for node in (short, long, rich, poor)] == before
    assert copies_of(rich).is_pinned(HOST)
    assert set(cache.host.candidates()) == {short, long}
    assert not cache.host.check(cache.tree.walk())


def test_a_part_of_a_copy_that_is_there_already_is_compared_with_the_others() -> None:
    cache = Cache(Marconi(EFFICIENCY))
    other = cache.leaf(20_000, HOST)
    node = cache.leaf(500, DEVICE)
    cache.placement.add_state(node, HOST)
    comparison = cache.host.compare_copy(node)
    assert comparison is not None
    assert not comparison.beats_victim
    assert set(cache.host.candidates()) == {other, node}
    assert not cache.host.check(cache.tree.walk())


def test_nothing_to_compare_with_says_so() -> None:
    cache = Cache(Lru())
    assert cache.host.compare_copy(cache.leaf(500, DEVICE)) is None


def test_a_lost_state_leaves_its_demand_to_its_anchor_and_a_demoted_one_to_kv_above() -> None:
    history = History()
    cache = Cache(Reuse(history))
    path = history.observe(list(range(300)), 200, cache.tree.clock)
    above = cache.leaf(100, DEVICE)
    cache.tree.clock.advance()
    between = cache.tree.add(above, "between", 100)
    cache.placement.add_kv(between, DEVICE)
    node = cache.leaf(100, DEVICE, HOST, parent=between)
    cache.tree.link_history(node, path.at(300))
    cache.device.tell_policy(node, lost=False)
    assert between.inherited_demand is not None
    assert above.inherited_demand is None
    cache.device.tell_policy(node, lost=True)
    assert above.inherited_demand is not None


def test_a_state_that_is_computed_as_fast_as_loaded_goes_first_and_leaves_its_demand() -> None:
    history = History()
    cache = Cache(Reuse(history))
    path = history.observe(list(range(5_010)), 5_000, cache.tree.clock)
    above = cache.leaf(5_000, HOST)
    node = cache.leaf(10, HOST, parent=above)  # ten tokens take 0.5 ms, its state 1.1
    cache.tree.link_history(node, path.at(5_010))
    unit = cache.host.unit(node)
    assert unit is not None
    assert unit.saves == 0
    assert cache.host.victim() is node
    cache.host.tell_policy(node, lost=True)
    assert above.inherited_demand is not None


@pytest.mark.parametrize("scarce", [Scarce.SHARED, Scarce.KV])
def test_a_short_leaf_counts_no_more_per_byte_than_the_prefix_that_it_keeps(scarce: Scarce) -> None:
    """A hundred tokens save a prefill of 30,000, where nothing above them has a state; but the KV
    of all of these must stay for it.
    """
    history = History()
    cache = Cache(Reuse(history))
    pool = TierPool(HOST, scarce, COST, Reuse(history), cache.tree.clock, cache.rates)
    cache.tree.listen(pool)
    above = cache.tree.add(cache.tree.root, "above", 29_900)
    cache.placement.add_kv(above, HOST)
    short = cache.leaf(100, HOST, parent=above)
    freed, saved = pool._weigh(short)
    prefix = 30_000 * COST.kv_bytes_per_token + COST.state_bytes * (scarce is Scarce.SHARED)
    assert saved / freed == pytest.approx(COST.flops(30_000) / prefix)
    unit = pool.unit(short)
    assert unit is not None
    assert unit.saves * SPEEDS.prefill > 10 * saved


def test_a_copy_that_is_worth_more_outranks_what_it_pushes_out_on_one_scale() -> None:
    """Marconi's scores are normalised over the candidates; alone, all of these are alike."""
    policy = Marconi(1.0)
    cache = Cache(policy)
    pool = TierPool(HOST, Scarce.SHARED, COST, policy, cache.tree.clock, cache.rates)
    cache.tree.listen(pool)
    for _ in range(100):
        cache.tree.clock.advance()
    equal = [cache.leaf(500, HOST) for _ in range(3)]
    better, worse = cache.leaf(20_000, DEVICE), cache.leaf(100, DEVICE)
    units = [pool.unit(node) for node in equal]
    each = next(unit.freed for unit in units if unit is not None)
    assert pool.outranks_pushed_out(better, each)
    assert pool.outranks_pushed_out(better, 3 * each)
    assert not pool.outranks_pushed_out(better, 4 * each)
    assert not pool.outranks_pushed_out(worse, each)
    assert not pool.check(cache.tree.walk())


@pytest.mark.parametrize(("others", "is_worth_it"), [(3, True), (4, False)])
def test_a_copy_pushes_out_only_what_free_room_does_not_hold(
    others: int, is_worth_it: bool
) -> None:
    """A long prefix, for which the host has room but for the KV of so many short ones. It has three
    of these to push out, and must not count on more.
    """
    cache = Cache(Lru())
    kv = TierPool(HOST, Scarce.KV, COST, Lru(), cache.tree.clock, cache.rates)
    cache.tree.listen(kv)
    for _ in range(3):
        cache.leaf(500, HOST)
    long = cache.leaf(20_000, DEVICE)
    room = {Scarce.KV: 20_000 - others * 500, Scarce.STATES: 1}
    judge = CopyJudge(HostPools(cache, kv), room.__getitem__, lambda: 1.0)
    assert judge.is_resume_worth(long) is is_worth_it


@pytest.mark.parametrize(("longer", "is_worth_it"), [(0, True), (1, False)])
def test_nothing_is_pushed_out_for_a_path_that_is_longer_than_the_host(
    longer: int, is_worth_it: bool
) -> None:
    """Though more short copies are there than are compared with it."""
    cache = Cache(Lru())
    kv = TierPool(HOST, Scarce.KV, COST, Lru(), cache.tree.clock, cache.rates)
    cache.tree.listen(kv)
    for _ in range(MOST_COMPARED + 6):
        cache.leaf(500, HOST)
    cache.tree.clock.advance()
    room = {Scarce.KV: 300, Scarce.STATES: 1}
    long = cache.leaf((MOST_COMPARED + 6) * 500 + 300 + longer, DEVICE)
    judge = CopyJudge(HostPools(cache, kv), room.__getitem__, lambda: 1.0)
    assert judge.is_resume_worth(long) is is_worth_it


class HostPools:
    """The pools on the host of `cache`: KV has one of its own."""

    cost, has_states = COST, True

    def __init__(self, cache: Cache, kv: TierPool) -> None:
        self.speeds, self.clock = cache.rates, cache.tree.clock
        self.placement = cache.placement
        self.host_kv_pool, self.host_state_pool = kv, cache.host


@pytest.mark.parametrize("scarce", [Scarce.SHARED, Scarce.KV])
def test_the_kv_that_only_a_leaf_keeps_counts_among_what_goes_with_it(scarce: Scarce) -> None:
    """A shared prompt with two answers, then another prompt: for half of the memory both answers
    go, and with them the prompt above; for a little more the other prompt, too.
    """
    cache = Cache(Lru())
    pool = TierPool(DEVICE, scarce, COST, Lru(), cache.tree.clock, cache.rates)
    cache.tree.listen(pool)
    shared = cache.tree.add(cache.tree.root, "shared", 1_000)
    cache.placement.add_kv(shared, DEVICE)
    answers = [cache.leaf(100, DEVICE, parent=shared) for _ in range(2)]
    other = cache.leaf(1_200, DEVICE)
    kv, states = 1_200 * COST.kv_bytes_per_token, 2 * COST.state_bytes * (scarce is Scarce.SHARED)
    assert pool.next_victims(1) == answers[:1]
    assert pool.next_victims(kv + states) == answers
    assert pool.next_victims(kv + states + 1) == [*answers, other]
    cache.tree.lock(shared, kv=True, state=False)
    assert pool.next_victims(kv + states) == [*answers, other]


def test_a_large_tree_is_followed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """While nodes come and go."""
    cache = Cache(Lru())
    leaves = [cache.leaf(1_000 + number, DEVICE) for number in range(12)]
    monkeypatch.setattr(tier_pool, "NEW_NODES_PER_CALL", 3)
    assert cache.device.next_victims(1) == []
    gone = leaves.pop(3)
    cache.placement.drop_state(gone, DEVICE)
    cache.placement.drop_kv(gone, DEVICE)
    cache.tree.remove(gone)
    cache.tree.split(leaves[0], 400, "head", "tail")
    cache.leaf(500, DEVICE, parent=leaves[5])
    assert cache.device.next_victims(1) == [] == list(cache.device.next_uncopied(1))
    everything = [cache.device.next_victims(10**15) for _ in range(3)][-1]
    monkeypatch.undo()
    assert everything == cache.pool(DEVICE, Lru(), None).next_victims(10**15)
    assert len(everything) == 12 and not cache.device.check(cache.tree.walk())


def test_a_state_that_goes_alone_frees_no_kv_above_it() -> None:
    """A continuation of its node still needs that."""
    cache = Cache(Lru())
    node = cache.leaf(500, DEVICE)
    cache.tree.split(node, 200, "head", "tail")
    leaf = cache.leaf(300, DEVICE, parent=node)
    assert cache.device.next_victims(COST.state_bytes) == [node]
    assert cache.device.next_victims(COST.state_bytes + 1) == [node, leaf]


ALL = (
    "add",
    "add",
    "grow",
    "split",
    "split",
    "copy",
    "drop",
    "evict",
    "state",
    "lose",
    "hit",
    "lock",
    "pin",
    "refuse",
)
CHANGES = st.tuples(st.sampled_from(ALL), st.integers(0, 60), st.integers(1, 900), st.booleans())


def change(cache: Cache, what: str, node: Node, number: int, flag: bool) -> None:
    """One thing that may happen to a tree in two tiers."""
    tree, placement = cache.tree, cache.placement
    copies = copies_of(node)
    if what == "add":
        cache.leaf(number, DEVICE, parent=node if flag else None)
    elif what == "grow":  # without a state
        tree.clock.advance()
        placement.add_kv(tree.add(node, ("grown", tree.clock.tick), number), DEVICE)
    elif what == "split" and node.tokens > 1:
        head = tree.split(node, 1 + number % (node.tokens - 1), ("head", node.id), "tail")
        assert copies_of(head).kv == copies.kv
    elif what == "copy":
        placement.add_kv(node, HOST)
        if copies.has_state(DEVICE) and flag:
            placement.add_state(node, HOST)
    elif what == "drop" and not copies.is_pinned(HOST):
        placement.drop_state(node, HOST)
        if copies.kv != 1 << HOST and not copies.kv_children[HOST]:
            placement.drop_kv(node, HOST)
    elif what == "evict" and not copies.kv_children[DEVICE]:
        placement.drop_state(node, DEVICE)
        if copies.has_kv(HOST):
            placement.drop_kv(node, DEVICE)
        elif not node.children:
            placement.drop_kv(node, DEVICE)
            tree.remove(node)
    elif what == "state" and copies.has_kv(DEVICE):
        tree.give_state(node, Kind.BRANCH)
        placement.add_state(node, DEVICE)
    elif what == "lose":
        placement.drop_state(node, DEVICE)
    elif what == "hit":
        tree.clock.advance()
        tree.hit(node)
    elif what == "lock":
        tree.lock(node, kv=flag, state=flag and number % 2 == 0)
    elif what == "pin":
        placement.pin(node, (DEVICE, HOST)[number % 2], flag)
    elif what == "refuse":
        mark_refused(node)


@pytest.mark.parametrize("scarce", list(Scarce))
@pytest.mark.parametrize("make_policy", [Lru, lambda: Marconi(1.0), lambda: Marconi(EFFICIENCY)])
@examples(20)
@given(st.lists(CHANGES, max_size=40), st.randoms(use_true_random=False))
def test_the_next_victims_are_those_that_would_go_one_by_one(
    make_policy: Callable[[], Policy],
    scarce: Scarce,
    changes: list[tuple[str, int, int, bool]],
    rng: random.Random,
) -> None:
    """Victims that may be copied are those of which the host lacks something."""
    cache = Cache(Lru())
    pool = TierPool(DEVICE, scarce, COST, make_policy(), cache.tree.clock, cache.rates)
    cache.tree.listen(pool)
    for what, which, number, flag in changes:
        nodes = list(cache.tree.walk()) or [cache.leaf(100, DEVICE)]
        change(cache, what, nodes[which % len(nodes)], number, flag)
        evictions = plain_evictions(pool)
        sums = [0, *accumulate(freed for _, _, freed in evictions)]
        for needed in {rng.choice(sums) + rng.choice((-1, 0, 1)), sums[-1] + 1}:
            expected = plain_next_victims(evictions, needed)
            assert pool.next_victims(needed) == expected
            lacking = [node for node in expected if not was_refused(node) and lacks(node)]
            assert list(pool.next_uncopied(needed)) == lacking
            assert list(pool.next_uncopied(needed)) == lacking, "asking changes nothing"


def lacks(node: Node) -> bool:
    copies = copies_of(node)
    return not copies.has_kv(HOST) or (copies.has_state(DEVICE) and not copies.has_state(HOST))
