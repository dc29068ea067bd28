"""Worked examples: given a tree, when something happens, then this may go and costs that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.node_tree import NodeTree
from sglang_hybrid.core.records.nodes import Clock, Kind, Node
from sglang_hybrid.core.victims.eviction import Lru, Marconi, SegLen
from sglang_hybrid.core.victims.pool import Pool, Scarce, freed_bytes

PAPER = CostModel.paper_7b()
KV, STATE = PAPER.kv_bytes_per_token, PAPER.state_bytes


def checkpoint(tree: NodeTree, parent: Node, tokens: int, kind: Kind = Kind.TAIL) -> Node:
    """A new leaf with a state, one tick later than everything before."""
    tree.clock.advance()
    node = tree.add(parent, len(parent.children), tokens)
    tree.give_state(node, kind)
    return node


def watch(tree: NodeTree, scarce: Scarce = Scarce.SHARED, policy: object = None) -> Pool:
    pool = Pool(scarce, PAPER, policy or Lru(), tree.clock)  # type: ignore[arg-type]
    tree.listen(pool)
    return pool


def test_a_leaf_frees_its_kv_and_its_state() -> None:
    tree = NodeTree()
    leaf = checkpoint(tree, tree.root, 100)
    assert freed_bytes(leaf, Scarce.SHARED, PAPER) == 100 * KV + STATE
    assert freed_bytes(leaf, Scarce.STATES, PAPER) == STATE
    assert freed_bytes(leaf, Scarce.KV, PAPER) == 100 * KV


def test_a_node_with_one_child_frees_only_its_state() -> None:
    tree = NodeTree()
    upper = checkpoint(tree, tree.root, 100)
    checkpoint(tree, upper, 50)
    assert freed_bytes(upper, Scarce.SHARED, PAPER) == STATE
    assert freed_bytes(upper, Scarce.KV, PAPER) == 0


def test_kv_without_a_state_is_absorbed_by_the_only_child() -> None:
    tree = NodeTree()
    upper = checkpoint(tree, tree.root, 100)
    lower = checkpoint(tree, upper, 50)
    tree.drop_state(upper)
    assert freed_bytes(upper, Scarce.SHARED, PAPER) == 0
    assert freed_bytes(lower, Scarce.SHARED, PAPER) == 150 * KV + STATE
    checkpoint(tree, upper, 10)  # a second child keeps the upper KV alive
    assert freed_bytes(lower, Scarce.SHARED, PAPER) == 50 * KV + STATE


def test_marconi_spares_a_fork_until_the_last_resort() -> None:
    tree = NodeTree()
    fork = checkpoint(tree, tree.root, 100, Kind.BRANCH)
    children = [checkpoint(tree, fork, 10) for _ in range(2)]
    assert watch(tree, Scarce.STATES).victim() is fork  # under any other policy it competes
    pool = watch(tree, Scarce.STATES, Marconi())
    assert fork not in pool.candidates()
    for child in children:
        tree.lock(child, kv=True, state=True)
    assert pool.victim() is None
    assert pool.victim(last_resort=True) is fork


def test_a_fork_that_is_the_oldest_is_evicted_first() -> None:
    tree = NodeTree()
    fork = checkpoint(tree, tree.root, 100, Kind.BRANCH)
    for _ in range(2):
        checkpoint(tree, fork, 10)
    for policy in (Lru(), Lru(stateless_first=False)):
        assert watch(tree, Scarce.STATES, policy).victim() is fork


def test_what_a_request_holds_is_no_candidate() -> None:
    tree = NodeTree()
    old, new = checkpoint(tree, tree.root, 100), checkpoint(tree, tree.root, 100)
    pool = watch(tree)
    tree.lock(old, kv=True, state=True)
    assert pool.victim() is new
    tree.lock(old, kv=False, state=False)
    assert pool.victim() is old


def test_held_kv_does_not_hold_the_state() -> None:
    """A running request holds the KV of its whole path, but the state of one node only."""
    tree = NodeTree()
    upper = checkpoint(tree, tree.root, 100)
    lower = checkpoint(tree, upper, 50)
    tree.lock(upper, kv=True, state=False)
    tree.lock(lower, kv=True, state=True)
    assert watch(tree, Scarce.STATES).victim() is upper
    assert watch(tree, Scarce.KV).victim() is None


def test_savings_grow_when_the_anchor_goes() -> None:
    tree = NodeTree()
    upper = checkpoint(tree, tree.root, 100)
    middle = tree.add(upper, "m", 20)
    lower = checkpoint(tree, middle, 50)
    below = checkpoint(tree, lower, 30)
    assert (middle.anchor_depth, lower.anchor_depth, below.anchor_depth) == (100, 100, 170)
    tree.drop_state(upper)
    assert (middle.anchor_depth, lower.anchor_depth, below.anchor_depth) == (0, 0, 170)
    tree.give_state(middle, Kind.BRANCH)
    assert (lower.anchor_depth, below.anchor_depth) == (120, 170)


def test_the_index_follows_the_anchor() -> None:
    tree = NodeTree()
    upper = checkpoint(tree, tree.root, 1000)
    lower = checkpoint(tree, upper, 100)
    other = checkpoint(tree, tree.root, 500)
    pool = watch(tree, Scarce.STATES, SegLen())
    assert pool.cheapest() == (lower, 100.0)
    tree.drop_state(upper)
    assert pool.cheapest() == (other, 500.0)


def test_only_the_hit_node_gets_younger() -> None:
    tree = NodeTree()
    upper = checkpoint(tree, tree.root, 100)
    lower = checkpoint(tree, upper, 50)
    tree.clock.advance(12.5)
    tree.hit(lower)
    assert (upper.last_used, lower.last_used, lower.hits, lower.stamp) == (1, 3, 1, 12.5)


def test_a_split_leaves_state_and_time_below() -> None:
    tree = NodeTree()
    leaf = checkpoint(tree, tree.root, 100)
    tree.clock.advance()
    head = tree.split(leaf, 30, 0, "tail")
    assert (head.depth, leaf.depth, leaf.tokens) == (30, 100, 70)
    assert (head.has_state, leaf.has_state) == (False, True)
    assert head.last_used == leaf.last_used == 1
    assert tree.root.children == {0: head}
    assert head.children == {"tail": leaf}
    with pytest.raises(ValueError, match="cannot split"):
        tree.split(leaf, 70, "a", "b")


def test_dead_kv_goes_first_and_oldest_first() -> None:
    tree = NodeTree()
    for tokens in (100, 200):
        tree.clock.advance()
        tree.add(tree.root, tokens, tokens)
    pool = watch(tree, Scarce.KV, Marconi(alpha=2.0))
    checkpoint(tree, tree.root, 5)
    first = pool.victim()
    assert first is tree.root.children[100]
    tree.remove(first)
    assert pool.victim() is tree.root.children[200]


def test_another_policy_can_take_over() -> None:
    tree = NodeTree()
    shallow, deep = checkpoint(tree, tree.root, 100), checkpoint(tree, tree.root, 50)
    first = watch(tree, Scarce.STATES)
    assert first.victim() is shallow
    tree.unlisten(first)
    assert watch(tree, Scarce.STATES, SegLen()).cheapest() == (deep, 50.0)


def test_turns_count_sequence_ends() -> None:
    tree = NodeTree()
    first = checkpoint(tree, tree.root, 100)
    second = checkpoint(tree, first, 50)
    fork = tree.split(second, 20, 0, "rest")
    tree.give_state(fork, Kind.BRANCH)
    assert (first.turn, fork.turn, second.turn) == (1, 1, 2)
    tree.drop_state(first)
    for kind in (Kind.BRANCH, Kind.TAIL):
        tree.give_state(first, kind)
    assert first.turn == 1


def test_only_a_leaf_can_be_removed() -> None:
    tree = NodeTree()
    upper = checkpoint(tree, tree.root, 100)
    lower = checkpoint(tree, upper, 50)
    with pytest.raises(ValueError, match="only a leaf"):
        tree.remove(upper)
    tree.remove(lower)
    tree.remove(upper)
    assert not list(tree.walk())


def test_the_clock_never_runs_backwards() -> None:
    clock = Clock()
    for stamp in (5.0, 3.0, None, 9.0):
        clock.advance(stamp)
    assert (clock.tick, clock.stamp) == (4, 9.0)


@pytest.mark.parametrize("tell", [Clock.advance, Clock.advance_to])
def test_requests_count_as_seconds_only_where_no_time_is_told(
    tell: Callable[[Clock, float], None],
) -> None:
    """The time is told by stamps of other requests, or without one."""
    clock = Clock()
    for _ in range(3):
        clock.advance()
    assert clock.stamp == 3.0
    tell(clock, 2.0)
    for _ in range(100):
        clock.advance()
    assert clock.stamp == 3.0
    tell(clock, 10.0)
    clock.advance()
    assert clock.stamp == 10.0
