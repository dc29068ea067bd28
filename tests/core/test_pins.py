"""Pins: what is pinned goes after what is worth as much, and never takes more than a share."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.node_tree import NodeTree
from sglang_hybrid.core.records.nodes import Kind, Node
from sglang_hybrid.core.records.pin import MOST_OF_ALL, PinRequest, Priority
from sglang_hybrid.core.records.pins import PinRoom, Pins
from sglang_hybrid.core.returns.hazards import reuse_class_of
from sglang_hybrid.core.returns.history import History, TimeUnit
from sglang_hybrid.core.victims.eviction import Gdsf, Lru, Marconi, Policy, Reuse, SegLen
from sglang_hybrid.core.victims.pool import Pool, Scarce

COST = CostModel(linear=1_000, quadratic=3, windows=(), kv_bytes_per_token=8, state_bytes=4_096)
LEAF = 100 * COST.kv_bytes_per_token + COST.state_bytes
"""Bytes of a leaf of 100 tokens under the root."""

LOW, NORMAL, HIGH = Priority.LOW, Priority.NORMAL, Priority.HIGH


def reuse() -> Reuse:
    """A policy that has seen requests, so that it expects some to return."""
    policy = Reuse(History(TimeUnit.REQUESTS))
    policy.history.index.on_request(1.0)
    return policy


POLICIES = [Lru, Marconi, lambda: Marconi(1.0), SegLen, Gdsf, reuse]


def tree_of(
    sizes: list[int], policy: Policy, share: float = 0.5, room: int = 1_000 * LEAF
) -> tuple[NodeTree, list[Node], Pool]:
    """Leaves with states under the root, the oldest first, in one memory."""
    tree = NodeTree(pins=Pins(COST, PinRoom(room), share))
    pool = Pool(Scarce.SHARED, COST, policy, tree.clock)
    tree.listen(pool)
    nodes = []
    for name, tokens in enumerate(sizes):
        tree.clock.advance()
        nodes.append(tree.add(tree.root, name, tokens))
        tree.give_state(nodes[-1], Kind.DECLARED)
    return tree, nodes, pool


def evict_all(tree: NodeTree, pool: Pool) -> list[Node]:
    victims = []
    while (victim := pool.victim(last_resort=True)) is not None:
        victims.append(victim)
        tree.remove(victim)
    return victims


@pytest.mark.parametrize("make_policy", POLICIES)
def test_what_is_pinned_survives_what_is_worth_as_much(make_policy: type[Policy]) -> None:
    tree, nodes, pool = tree_of([100] * 6, make_policy())
    assert tree.pins.pin(nodes[0], PinRequest(100, 60))
    assert tree.pins.pin(nodes[1], PinRequest(100, 60, HIGH))
    victims = evict_all(tree, pool)
    assert set(victims[:4]) == set(nodes[2:])
    assert tree.pins.held_bytes == 0 and tree.pins.counts["evicted"] == 2


@pytest.mark.parametrize("make_policy", POLICIES)
def test_a_pin_ends_with_its_lifetime(make_policy: type[Policy]) -> None:
    """The oldest node, which was pinned for a while, is the first to go once that is over."""
    tree, nodes, pool = tree_of([100] * 4, make_policy())
    tree.pins.pin(nodes[0], PinRequest(100, 60))
    assert pool.cheapest() is not None and pool.cheapest()[0] is not nodes[0]  # type: ignore[index]
    assert tree.pins.next_expiry == tree.clock.stamp + 60
    tree.clock.advance_to(tree.clock.stamp + 59)
    tree.pins.expire()
    assert len(tree.pins) == 1
    tree.clock.advance_to(tree.clock.stamp + 1)
    tree.pins.expire()
    assert len(tree.pins) == 0 and tree.pins.held_bytes == 0
    assert tree.pins.counts["expired"] == 1
    assert pool.victim() is nodes[0]


@pytest.mark.parametrize("make_policy", [SegLen, Gdsf, reuse, lambda: Marconi(100.0)])
def test_a_pin_yields_where_all_else_is_worth_more(make_policy: type[Policy]) -> None:
    """A short prefix, pinned, beside long ones that save a hundred times as much per byte."""
    tree, nodes, pool = tree_of([10, *[20_000] * 4], make_policy())
    for node in nodes[1:]:
        tree.hit(node)
    assert tree.pins.pin(nodes[0], PinRequest(10, 60))
    assert pool.victim() is nodes[0]


def test_priorities_rank_pins() -> None:
    tree, nodes, pool = tree_of([100] * 4, reuse())
    for _ in range(200):  # all of them are about as old
        tree.clock.advance()
    for node, priority in zip(nodes, (HIGH, NORMAL, LOW), strict=False):
        tree.pins.pin(node, PinRequest(100, 400, priority))
    assert evict_all(tree, pool) == [nodes[3], nodes[2], nodes[1], nodes[0]]


def test_a_normal_pin_is_a_return_that_is_certain_within_its_lifetime() -> None:
    """Its score is that of a position which returns after half of it, and half for a low one; a
    high one counts as the likeliest position.
    """
    policy = reuse()
    tree, nodes, pool = tree_of([100] * 4, policy)
    for node, priority in zip(nodes, (LOW, NORMAL, HIGH), strict=False):
        tree.pins.pin(node, PinRequest(100, 400, priority))
    pool.cheapest()
    index, table = policy.history.index, pool._home[nodes[0]]
    scores = dict(zip(table.nodes, policy.scores(table, tree.clock), strict=True))
    for node, rate in zip(nodes, (1 / 400, 2 / 400, index.peak, 0.0), strict=True):
        age = tree.clock.tick - node.last_used
        known = index.weight(reuse_class_of(0, 100, 0), age)
        saved = COST.flops(100) / LEAF
        assert scores[node] == pytest.approx((known + rate) * saved)
    assert index.peak > 2 / 400


def test_what_is_pinned_is_worth_writing_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A return within the lifetime is certain, or half so, beside what is known."""
    policy = reuse()
    tree, nodes, _ = tree_of([100] * 4, policy)
    monkeypatch.setattr(policy.history.index, "return_probability", lambda kind, age: 0.2)
    for node, priority in zip(nodes, (LOW, NORMAL, HIGH), strict=False):
        tree.pins.pin(node, PinRequest(100, 400, priority))
    returns = [policy.return_probability(node, tree.clock) for node in nodes]
    assert returns == pytest.approx([1 - 0.8 * 0.8 * 0.5, 1.0, 1.0, 1 - 0.8 * 0.8])


def test_a_tenant_cannot_pin_more_than_its_share() -> None:
    """Its pin that ends first gives way to a new one, never another tenant's."""
    tree, nodes, _ = tree_of([100] * 5, Lru(), share=0.2, room=10 * LEAF)
    assert tree.pins.pin(nodes[4], PinRequest(100, 1), "other")
    assert tree.pins.pin(nodes[0], PinRequest(100, 50), "a")
    assert tree.pins.pin(nodes[1], PinRequest(100, 40), "a")
    assert tree.pins.of("a") == 2 * LEAF
    assert tree.pins.pin(nodes[2], PinRequest(100, 30), "a")
    assert [node.pin is not None for node in nodes] == [True, False, True, False, True]
    assert tree.pins.of("a") == 2 * LEAF
    assert tree.pins.pin(nodes[1], PinRequest(100, 60, HIGH), "a")
    assert tree.pins.pin(nodes[3], PinRequest(100, 60, HIGH), "a")
    assert not tree.pins.pin(nodes[0], PinRequest(100, 60), "a"), "both have a higher priority"
    assert tree.pins.as_dict() == {
        "pins": 3,
        "bytes": 3 * LEAF,
        "share_of_a_tenant": 0.2,
        "bytes_of_a_tenant": 2 * LEAF,
        "pinned": 6,
        "refused": 1,
        "gave_way": 3,
        "expired": 0,
        "evicted": 0,
    }


def test_what_exceeds_a_share_alone_pushes_nothing_out() -> None:
    tree, nodes, _ = tree_of([100, 100, 5_000], Lru(), share=0.2, room=10 * LEAF)
    tree.pins.pin(nodes[0], PinRequest(100, 50))
    assert not tree.pins.pin(nodes[2], PinRequest(5_000, 50, HIGH))
    assert nodes[0].pin is not None
    nothing = NodeTree()
    assert not nothing.pins.pin(nothing.add(nothing.root, 0, 10), PinRequest(10, 60))


def test_states_of_two_pools_are_bounded_apart() -> None:
    """KV for many more pins is there, but a share of the state slots has room for two."""
    tree, nodes, _ = tree_of([10] * 4, Lru())
    tree.pins = Pins(COST, PinRoom(kv=1 << 30, states=8 * COST.state_bytes), share=0.25)
    tree.pins.follow(tree.clock, tree.mark_dirty)
    for node in nodes:
        assert tree.pins.pin(node, PinRequest(10, 60))
    assert [node.pin is not None for node in nodes] == [False, False, True, True]
    assert tree.pins.held_bytes == 2 * (10 * COST.kv_bytes_per_token + COST.state_bytes)


def test_all_tenants_together_pin_half_of_the_memory() -> None:
    """The pin that ends first gives way, of the tenant with most."""
    tree, nodes, _ = tree_of([100] * 7, Lru(), share=0.4, room=10 * LEAF)
    for number in range(4):
        tree.pins.pin(nodes[number], PinRequest(100, 60 - number), "a")
    tree.pins.pin(nodes[4], PinRequest(100, 60), "b")
    assert tree.pins.held_bytes == MOST_OF_ALL * 10 * LEAF
    tree.pins.pin(nodes[5], PinRequest(100, 60), "c")
    assert nodes[3].pin is None and nodes[5].pin is not None
    assert [tree.pins.of(name) // LEAF for name in "abc"] == [3, 1, 1]


@pytest.mark.parametrize(
    ("room", "most_kv", "most_states", "loses"),
    [
        (PinRoom(1 << 30, 6 * COST.state_bytes), [50_000], [10, 10], "most states"),
        (PinRoom(16_000, 40 * COST.state_bytes), [600], [10] * 10, "most KV"),
    ],
)
def test_of_what_is_full_the_tenant_with_most_gives_way(
    room: PinRoom, most_kv: list[int], most_states: list[int], loses: str
) -> None:
    """The tenant that has most of the other kind, of which there is enough, loses nothing."""
    tree, nodes, _ = tree_of([*most_kv, *most_states, 400], Lru())
    tree.pins = Pins(COST, room, share=0.5)
    tree.pins.follow(tree.clock, tree.mark_dirty)
    *others, new = nodes
    tenants = ["most KV"] * len(most_kv) + ["most states"] * len(most_states)
    for node, tenant in zip(others, tenants, strict=True):
        assert tree.pins.pin(node, PinRequest(node.depth, 60), tenant)
    assert tree.pins.pin(new, PinRequest(400, 60), "new")
    lost = [tenant for node, tenant in zip(others, tenants, strict=True) if node.pin is None]
    assert lost == [loses]


def test_use_begins_the_lifetime_anew() -> None:
    """All pins on the path of the position that is resumed begin anew."""
    tree, (above,), _ = tree_of([100], Lru())
    below = tree.add(above, "below", 50)
    tree.give_state(below, Kind.TAIL)
    tree.pins.pin(above, PinRequest(100, 60))
    tree.clock.advance_to(tree.clock.stamp + 50)
    tree.hit(below)
    assert above.pin is not None and above.pin.until == tree.clock.stamp + 60
    assert tree.pins.next_expiry == above.pin.until


def test_a_pin_can_be_made_longer_and_more_important() -> None:
    tree, (node,), _ = tree_of([100], Lru())
    tree.pins.pin(node, PinRequest(100, 60))
    tree.pins.pin(node, PinRequest(100, 10, HIGH))
    assert node.pin is not None
    assert (node.pin.until, node.pin.priority) == (tree.clock.stamp + 60, HIGH)
    assert len(tree.pins) == 1 and tree.pins.held_bytes == LEAF


def test_a_pin_stays_with_its_position_when_an_edge_is_cut() -> None:
    """The position may be within an edge if KV alone is enough."""
    cost = CostModel(linear=1, quadratic=0, windows=(), kv_bytes_per_token=8, state_bytes=0)
    tree = NodeTree(pins=Pins(cost, PinRoom(10_000), 0.5))
    node = tree.add(tree.root, "a", 100)
    tree.pins.pin(node, PinRequest(40, 60))
    assert tree.pins.held_bytes == 800
    head = tree.split(node, 70, "a", "b")
    assert head.pin is not None and node.pin is None and tree.pins.held_bytes == 560
    above = tree.split(head, 30, "a", "c")
    assert above.pin is None and head.pin is not None and tree.pins.held_bytes == 560
    tree.remove(node)
    tree.remove(head)
    assert tree.pins.held_bytes == 0 and len(tree.pins) == 0


@pytest.mark.parametrize("deeper_first", [False, True])
def test_the_deeper_of_two_pins_on_an_edge_outlives_a_cut_between_them(deeper_first: bool) -> None:
    """It has the higher priority and the longer lifetime of both, in whichever order they came."""
    cost = CostModel(linear=1, quadratic=0, windows=(), kv_bytes_per_token=8, state_bytes=0)
    tree = NodeTree(pins=Pins(cost, PinRoom(10_000), 0.5))
    node = tree.add(tree.root, "a", 100)
    asked = [PinRequest(20, 60, HIGH), PinRequest(90, 600, LOW)]
    for one in reversed(asked) if deeper_first else asked:
        assert tree.pins.pin(node, one)
    head = tree.split(node, 50, "a", "b")
    assert head.pin is None and node.pin is not None
    assert (node.pin.position, node.pin.ttl, node.pin.priority) == (90, 600, HIGH)
    assert tree.pins.held_bytes == 800 and len(tree.pins) == 1


STEPS = st.tuples(
    st.sampled_from(["grow", "pin", "cut", "drop", "remove", "pass", "hit"]),
    st.integers(0, 40),
    st.integers(1, 60),
    st.sampled_from(list(Priority)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=60), st.booleans())
def test_the_charge_is_that_of_the_pinned_paths(
    steps: list[tuple[str, int, int, Priority]], one_memory: bool
) -> None:
    """After every step, each tenant is charged for the states of its pinned nodes and for the union
    of the paths to them, and within its share; no pin outlives its time.
    """
    room = PinRoom(20_000, None if one_memory else 10 * COST.state_bytes)
    tree = NodeTree(pins=Pins(COST, room, 0.4))
    names = [tree.add(tree.root, name, 50) for name in ("a", "b")]
    tenant_of = {names[0]: "a", names[1]: "b"}
    key = 0
    for what, which, number, priority in steps:
        nodes = list(tree.walk())
        if not nodes:
            break
        node, key = nodes[which % len(nodes)], key + 1
        tenant = tenant_of.get(node, "a")
        if what == "grow":
            child = tree.add(node, key, number)
            tenant_of[child] = tenant
        elif what == "pin":
            if not node.has_state:
                tree.give_state(node, Kind.DECLARED)
            tree.pins.pin(node, PinRequest(node.depth, number, priority), tenant)
        elif what == "cut" and node.tokens > 1:
            head = tree.split(node, min(number, node.tokens - 1), node.key, key)
            tenant_of[head] = tenant
        elif what == "drop":
            tree.drop_state(node)
        elif what == "remove" and not node.children:
            tree.remove(node)
        elif what == "pass":
            tree.clock.advance_to(tree.clock.stamp + number)
            tree.pins.expire()
        elif what == "hit":
            tree.hit(node)
        kv, states, paths = Counter[str](), Counter[str](), set[Node]()
        for at in tree.walk():
            if at.pin is None:
                continue
            assert at.has_state and at.pin.until > tree.clock.stamp
            states[tenant_of[at]] += COST.state_bytes
            while at.parent is not None and at not in paths:
                paths.add(at)
                kv[tenant_of[at]] += at.tokens * COST.kv_bytes_per_token
                at = at.parent
        for name in ("a", "b"):
            assert tree.pins.of(name) == kv[name] + states[name]
            if one_memory:
                assert tree.pins.of(name) <= 0.4 * 20_000
            else:
                assert kv[name] <= 0.4 * 20_000
                assert states[name] <= 4 * COST.state_bytes
        assert len(tree.pins) == sum(states.values()) // COST.state_bytes
