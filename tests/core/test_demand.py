"""Nodes that the window needs are evicted last, and not held when their request has gone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.queue.demand import DemandForNodes
from sglang_hybrid.core.records.node_tree import NodeTree
from sglang_hybrid.core.records.nodes import Kind, Node
from sglang_hybrid.core.victims.eviction import Lru, Marconi
from sglang_hybrid.core.victims.pool import Pool, Scarce

PAPER = CostModel.paper_7b()


def tree_of(count: int, policy: Lru | Marconi | None = None) -> tuple[NodeTree, list[Node], Pool]:
    """Leaves with states, the oldest first."""
    tree = NodeTree()
    pool = Pool(Scarce.SHARED, PAPER, policy or Lru(), tree.clock)
    tree.listen(pool)
    nodes = []
    for name in range(count):
        tree.clock.advance()
        nodes.append(tree.add(tree.root, name, 100))
        tree.give_state(nodes[-1], Kind.TAIL)
    return tree, nodes, pool


def evict_all(tree: NodeTree, pool: Pool) -> list[Node]:
    victims = []
    while (victim := pool.victim()) is not None:
        victims.append(victim)
        tree.remove(victim)
    return victims


def test_the_papers_score() -> None:
    """+1 when a request enters the window, +1 when it runs, -2 when it ends."""
    tree, (a, b), _ = tree_of(2)
    demand: DemandForNodes[str] = DemandForNodes(tree.move_demand)
    seen = [a.demand]
    for step in (
        lambda: demand.on_wait("x", a),
        lambda: demand.on_start("x"),
        lambda: demand.on_request_end("x"),
    ):
        step()
        seen.append(a.demand)
    assert seen == [0, 1, 2, 0]
    demand.on_wait("x", a)
    demand.on_wait("y", a)
    demand.on_start("x")
    assert a.demand == 3
    demand.on_wait("y", b)  # its prompt is stored further now
    assert (a.demand, b.demand, len(demand)) == (2, 1, 2)


def test_a_node_with_demand_goes_last_and_goes_in_its_order() -> None:
    tree, nodes, pool = tree_of(5)
    demand: DemandForNodes[int] = DemandForNodes(tree.move_demand)
    demand.on_wait(0, nodes[0])
    demand.on_start(0)
    demand.on_wait(1, nodes[1])
    demand.on_wait(2, nodes[2])
    assert evict_all(tree, pool) == [nodes[i] for i in (3, 4, 1, 2, 0)]


@pytest.mark.parametrize("policy", [Lru(), Marconi(1.0)])
def test_demand_is_no_lock(policy: Lru | Marconi) -> None:
    """An entry is evicted for a running request even if waiting requests want all of them."""
    tree, nodes, pool = tree_of(3, policy)
    demand: DemandForNodes[int] = DemandForNodes(tree.move_demand)
    for number, node in enumerate(nodes):
        demand.on_wait(number, node)
    assert pool.victim() is not None
    assert not pool.evictable, "a new checkpoint pushes none of it out"


def test_a_fork_that_a_policy_spares_goes_before_what_is_wanted() -> None:
    tree, (wanted, above), pool = tree_of(2, Marconi(0.0))
    for name in range(2):
        tree.lock(tree.add(above, name, 10), kv=True, state=True)
    tree.move_demand(wanted, 1)
    assert pool.victim(last_resort=True) is above


def test_a_node_may_go_before_who_holds_it() -> None:
    tree, (a, b), pool = tree_of(2)
    demand: DemandForNodes[str] = DemandForNodes(tree.move_demand)
    demand.on_wait("x", a)
    tree.remove(a)
    demand.on_wait("x", b)
    demand.keep_waiting([])
    assert (b.demand, len(demand)) == (0, 0)
    assert pool.check(tree.walk()) == []


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["waits", "runs", "ends", "only", "evict"]), *[st.integers(0, 7)] * 2
        ),
        max_size=80,
    )
)
def test_no_demand_is_left_behind(steps: list[tuple[str, int, int]]) -> None:
    """A twin adds up what each request holds; victims come in the order that it says."""
    tree, nodes, pool = tree_of(8)
    demand: DemandForNodes[int] = DemandForNodes(tree.move_demand)
    held: dict[int, tuple[Node, int]] = {}
    for what, name, which in steps:
        if what == "waits":
            demand.on_wait(name, nodes[which])
            held[name] = (nodes[which], 1)
        elif what == "runs":
            demand.on_start(name)
            if name in held:
                held[name] = (held[name][0], 2)
        elif what == "ends":
            demand.on_request_end(name)
            held.pop(name, None)
        elif what == "only":
            demand.keep_waiting({name, which})
            held = {n: h for n, h in held.items() if h[1] == 2 or n in (name, which)}
        else:
            free = [node for node in tree.walk()]
            victim = pool.cheapest()
            assert victim is not None
            least = min(points(held, node) for node in free)
            assert victim[0] is min(
                (node for node in free if points(held, node) == least), key=lambda n: n.id
            )
        for node in nodes:
            assert node.demand == points(held, node)
        assert pool.check(tree.walk()) == []
    for name in random.Random(0).sample(range(8), 8):
        demand.on_request_end(name)
    assert not any(node.demand for node in nodes)
    assert len(demand) == 0


def points(held: dict[int, tuple[Node, int]], node: Node) -> int:
    return sum(count for one, count in held.values() if one is node)
