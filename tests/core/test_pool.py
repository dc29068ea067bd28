"""The work of one choice is bounded, whatever changed since the last one."""

from __future__ import annotations

import random

import pytest

from sglang_hybrid.core.checkpoints.checkpoint_plan import hypothetical_node
from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.node_tree import SETTLED_AT_ONCE, NodeTree
from sglang_hybrid.core.records.nodes import Kind, Node, anchor
from sglang_hybrid.core.victims.eviction import SegLen
from sglang_hybrid.core.victims.pool import (
    DESCRIBED_AT_ONCE,
    DESCRIBED_PER_ARRIVAL,
    Pool,
    Scarce,
)

PAPER = CostModel.paper_7b()
CHILDREN = 20_000


class Counting(SegLen):
    """Counts what it describes."""

    described = 0

    def describe(self, node: Node, saved: float, freed: int) -> tuple[float, ...]:
        self.described += 1
        return super().describe(node, saved, freed)


def fork() -> tuple[NodeTree, Node, Pool, Counting]:
    """A state with many children, each with a state, all described."""
    tree, policy = NodeTree(), Counting()
    pool = Pool(Scarce.STATES, PAPER, policy, tree.clock)
    tree.listen(pool)
    above = tree.add(tree.root, "above", 100)
    tree.give_state(above, Kind.BRANCH)
    for name in range(CHILDREN):
        tree.give_state(tree.add(above, name, 10 + name % 7), Kind.TAIL)
    assert len(pool.candidates()) == CHILDREN + 1
    policy.described = 0
    return tree, above, pool, policy


@pytest.mark.parametrize("what", ["drop", "give"])
def test_a_state_above_many_children_changes(what: str) -> None:
    tree, above, pool, policy = fork()
    tree.drop_state(above)
    if what == "give":
        pool.candidates()
        tree.settle(CHILDREN)
        pool.candidates()
        tree.give_state(above, Kind.BRANCH)
    choices = 0
    while True:
        policy.described = 0
        assert pool.cheapest() is not None
        if not policy.described:
            break
        assert policy.described <= DESCRIBED_AT_ONCE
        choices += 1
        assert choices < 2 * CHILDREN / SETTLED_AT_ONCE
    for node in tree.walk():
        nearest = anchor(node)
        assert node.anchor_depth == (0 if nearest is None else nearest.depth)
    assert pool.check(tree.walk()) == []


def test_a_cache_that_fills_is_described_as_requests_arrive() -> None:
    """The first choice finds few nodes that wait, however many there are."""
    tree, _, pool, policy = fork()
    for request in range(10 * DESCRIBED_PER_ARRIVAL):
        tree.give_state(tree.add(tree.root, ("new", request), 8), Kind.TAIL)
        pool.on_arrival()
        assert policy.described <= DESCRIBED_PER_ARRIVAL
        policy.described = 0
    assert pool.cheapest() is not None
    assert 0 < policy.described <= 2 * DESCRIBED_PER_ARRIVAL
    assert len(pool.candidates()) == CHILDREN + 1 + 10 * DESCRIBED_PER_ARRIVAL


def test_what_changed_meanwhile_is_never_chosen_by_what_was_known_of_it() -> None:
    """A node that is held, or gone, while thousands wait to be described."""
    tree, above, pool, _ = fork()
    source = random.Random(1)
    children = list(above.children.values())
    for child in source.sample(children, 5_000):  # so many wait
        tree.hit(child)
    chosen = pool.cheapest()
    assert chosen is not None
    for _ in range(200):
        assert chosen is not None
        node, _ = chosen
        if source.random() < 0.5:
            tree.lock(node, kv=True, state=True)
        else:
            tree.drop_state(node)
            tree.remove(node)
        following = pool.cheapest()
        assert following is not None and following[0] is not node
        assert not following[0].state_locked
        chosen = following


@pytest.mark.parametrize("enough", [False, True])
def test_a_new_state_competes_unless_leaves_without_one_give_back_its_bytes(enough: bool) -> None:
    """Two of them, in one memory."""
    tree = NodeTree()
    pool = Pool(Scarce.SHARED, PAPER, SegLen(), tree.clock)
    tree.listen(pool)
    tree.give_state(tree.add(tree.root, "victim", 100), Kind.TAIL)
    needed = PAPER.state_bytes // PAPER.kv_bytes_per_token + 1
    for name, tokens in (("leaf", needed // 2), ("other", needed - needed // 2 - (not enough))):
        tree.add(tree.root, name, tokens)
    comparison = pool.compare_with_victim(hypothetical_node(500, Kind.TAIL, 0, None, tree.clock))
    assert (comparison is None) is enough
    assert comparison is None or comparison.beats_victim
