"""Policies: the index picks what the definitions pick, whatever happened to the tree before."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.checkpoints.checkpoint_plan import hypothetical_node
from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.node_tree import NodeTree
from sglang_hybrid.core.records.nodes import NEVER, Clock, Kind, Node
from sglang_hybrid.core.records.pin import Pin, Priority
from sglang_hybrid.core.returns.hazards import BEFORE_END, CLASSES, reuse_class_of
from sglang_hybrid.core.returns.history import History, TimeUnit
from sglang_hybrid.core.returns.history_tree import HistoryPath, fingerprint_tokens
from sglang_hybrid.core.victims.eviction import (
    Gdsf,
    Lru,
    Marconi,
    Policy,
    Reuse,
    SegLen,
    make_policy,
)
from sglang_hybrid.core.victims.pool import Pool, Scarce
from tests.core.plain import (
    PaperLru,
    PlainGdsf,
    ancestors,
    facts_of,
    plain_victim,
    textbook_marconi,
)
from tests.examples import examples

PAPER = CostModel.paper_7b()
KINDS = list(Kind)


def trained_history(unit: TimeUnit = TimeUnit.SECONDS) -> History:
    """A history whose index has seen random intervals of every class."""
    rng = random.Random(7)
    history = History(unit)
    for _ in range(300):
        slot = history.index.open(rng.randrange(CLASSES), 0.0)
        if rng.random() < 0.5:
            history.index.on_return(slot, rng.expovariate(0.05))
    history.index.rebuild()
    return history


POLICIES: dict[str, Callable[[], Policy]] = {
    "lru": Lru,
    "lru blind": lambda: Lru(stateless_first=False),
    "marconi 0": lambda: Marconi(0.0),
    "marconi 0.3": lambda: Marconi(0.3),
    "marconi 2": lambda: Marconi(2.0),
    "seglen": SegLen,
    "reuse, seconds": lambda: Reuse(trained_history()),
    "reuse, requests": lambda: Reuse(trained_history(TimeUnit.REQUESTS)),
    "reuse, untaught": Reuse,
}


class RandomTree:
    """Applies random operations to a NodeTree, as a cache would."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.tree = NodeTree()
        self._key = 0

    def nodes(self) -> list[Node]:
        return sorted(self.tree.walk(), key=lambda node: node.id)

    def step(self) -> None:
        rng, tree, nodes = self.rng, self.tree, self.nodes()
        if rng.random() < 0.6:
            tree.clock.advance(tree.clock.stamp + rng.choice([0.0, 0.25, 3.0, 40.0]))
        self._key += 1
        operation = rng.choice(["add", "add", "add", "split", "state", "drop", "hit", "hold", "go"])
        node = rng.choice(nodes) if nodes else None
        if operation == "add" or node is None:
            leaf = tree.add(rng.choice([tree.root, *nodes]), self._key, rng.randrange(1, 3000))
            if rng.random() < 0.8:
                tree.give_state(leaf, rng.choice(KINDS))
        elif operation == "split" and node.tokens > 1:
            head = tree.split(node, rng.randrange(1, node.tokens), node.key, self._key)
            if rng.random() < 0.5:
                tree.give_state(head, Kind.BRANCH)
        elif operation == "state":
            tree.give_state(node, rng.choice(KINDS))
        elif operation == "drop":
            tree.drop_state(node)
        elif operation == "hit":
            tree.hit(node)
        elif operation == "hold":
            tree.lock(node, kv=rng.random() < 0.3, state=rng.random() < 0.3)
        elif operation == "go" and not node.children:
            tree.remove(node)

    def meet_history(self, history: History) -> None:
        """A request ends at some node, or a little below: all on its path are found anew."""
        nodes = self.nodes()
        if nodes and self.rng.random() < 0.5:
            node = self.rng.choice(nodes)
            depth = node.depth + self.rng.choice([0, 0, 5, 100])
            tokens = np.arange(depth) + 10_000 * node.id
            history_path = history.observe(tokens, depth, self.tree.clock)
            for passed in (node, *ancestors(node)):
                self.tree.link_history(passed, history_path.at(passed.depth))

    def evict(self, node: Node) -> None:
        if node.children or node.kv_locked:
            self.tree.drop_state(node)
        else:
            self.tree.remove(node)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("scarce", list(Scarce))
@examples(10)
@given(seed=st.integers(0, 10**9), last_resort=st.booleans())
def test_the_index_picks_the_plain_victim(
    name: str, scarce: Scarce, seed: int, last_resort: bool
) -> None:
    rng = random.Random(seed)
    world = RandomTree(rng)
    policy = POLICIES[name]()
    pool = Pool(scarce, PAPER, policy, world.tree.clock)
    world.tree.listen(pool)
    for _ in range(60):
        world.step()
        if isinstance(policy, Reuse):
            world.meet_history(policy.history)
            if rng.random() < 0.1:
                policy.history.index.rebuild()
        if rng.random() < 0.4:
            expected = plain_victim(world.tree, scarce, PAPER, policy, last_resort=last_resort)
            assert pool.victim(last_resort=last_resort) is expected
            if expected is not None:
                world.evict(expected)


@examples(30)
@given(seed=st.integers(0, 10**9))
def test_gdsf_picks_by_its_definition(seed: int) -> None:
    rng = random.Random(seed)
    world = RandomTree(rng)
    pool = Pool(Scarce.SHARED, PAPER, Gdsf(), world.tree.clock)
    world.tree.listen(pool)
    plain = PlainGdsf()
    for _ in range(80):
        world.step()
        if rng.random() < 0.6:
            continue
        facts = {n.id: facts_of(n, Scarce.SHARED, PAPER) for n in world.nodes()}
        standing = [f for f in facts.values() if f.freed and f.node.has_state]
        scores = {f.node: plain.score(f) for f in standing}
        victim = pool.victim()
        if victim is None:
            assert not scores
        elif victim.has_state:
            key = (scores[victim], victim.last_used, victim.id)
            assert key == min((s, n.last_used, n.id) for n, s in scores.items())
            plain.inflation = max(plain.inflation, scores[victim])
        if victim is not None:
            world.evict(victim)


@examples(30)
@given(seed=st.integers(0, 10**9))
def test_depths_and_anchors_stay_true(seed: int) -> None:
    world = RandomTree(random.Random(seed))
    for _ in range(120):
        world.step()
    for node in world.nodes():
        above = ancestors(node)
        assert node.depth == node.tokens + sum(a.tokens for a in above)
        assert node.anchor_depth == next((a.depth for a in above if a.has_state), 0)
        assert node.parent is not None
        assert node.parent.children[node.key] is node


@examples(30)
@given(seed=st.integers(0, 10**9), alpha=st.sampled_from([0.1, 1.0, 3.0]))
def test_marconi_is_the_papers_score(seed: int, alpha: float) -> None:
    """The index leaves the minima out; the textbook score of its victim is still the lowest."""
    world = RandomTree(random.Random(seed))
    pool = Pool(Scarce.SHARED, PAPER, Marconi(alpha), world.tree.clock)
    world.tree.listen(pool)
    for _ in range(60):
        world.step()
    candidates = [facts_of(n, Scarce.SHARED, PAPER) for n in pool.candidates() if n.has_state]
    victim = pool.victim()
    if candidates and victim is not None and victim.has_state:
        scores = textbook_marconi(candidates, alpha)
        assert scores[victim.id] <= min(scores.values()) + 1e-9


@examples(15)
@given(seed=st.integers(0, 10**9), scarce=st.sampled_from(list(Scarce)))
def test_alpha_zero_is_lru_by_the_papers_rule(seed: int, scarce: Scarce) -> None:
    world = RandomTree(random.Random(seed))
    pools = [Pool(scarce, PAPER, p, world.tree.clock) for p in (PaperLru(), Marconi(0.0))]
    for pool in pools:
        world.tree.listen(pool)
    for _ in range(60):
        world.step()
        assert pools[0].victim() is pools[1].victim()


def test_gdsf_lets_what_was_used_once_sink() -> None:
    tree = NodeTree()
    pool = Pool(Scarce.STATES, PAPER, Gdsf(), tree.clock)
    tree.listen(pool)

    def leaf(tokens: int) -> Node:
        node = tree.add(tree.root, object(), tokens)
        tree.give_state(node, Kind.TAIL)
        return node

    used, large = leaf(100), leaf(300)
    for _ in range(3):
        tree.hit(used)
    assert pool.victim() is large  # 300 tokens used once, against 100 used four times
    tree.remove(large)
    assert pool.victim() is used
    tree.remove(used)
    fresh, small = leaf(120), leaf(50)
    assert pool.victim() is small
    assert fresh.last_used == small.last_used


def test_reuse_prefers_what_is_known_to_come_back() -> None:
    """Two equal leaves; positions of the second's class return, those of the first's never do."""
    tree = NodeTree()
    policy = Reuse(History(TimeUnit.REQUESTS))
    pool = Pool(Scarce.SHARED, PAPER, policy, tree.clock)
    tree.listen(pool)
    second, first = (tree.add(tree.root, key, 1000) for key in "ab")
    tree.give_state(second, Kind.TAIL)
    tree.give_state(first, Kind.BRANCH)
    index = policy.history.index
    for _ in range(20):
        index.on_return(index.open(reuse_class_of(0, 1000, second.turn), 0.0), 5.0)
        index.open(reuse_class_of(0, 1000, first.turn), 0.0)
    index.on_request(200.0)
    assert pool.victim() is first


def session_of_states(
    depths: dict[str, int], input_len: int
) -> tuple[NodeTree, Reuse, Pool, dict[str, Node], HistoryPath]:
    """One sequence with a state at each of `depths`, by name, and what the history knows of it."""
    tree = NodeTree()
    policy = Reuse(History(TimeUnit.REQUESTS))
    pool = Pool(Scarce.STATES, PAPER, policy, tree.clock)
    tree.listen(pool)
    tree.clock.advance()
    nodes: dict[str, Node] = {}
    above = tree.root
    for name, depth in depths.items():
        above = nodes[name] = tree.add(above, name, depth - above.depth)
        tree.give_state(above, Kind.TAIL)
    history_path = policy.history.observe(np.arange(above.depth), input_len, tree.clock)
    for node in nodes.values():
        tree.link_history(node, history_path.at(node.depth))
    policy.history.index.rebuild()
    return tree, policy, pool, nodes, history_path


def test_who_comes_back_for_an_evicted_state_resumes_above_it() -> None:
    """A session of two states, beside another leaf: as its tail goes, the state above it inherits
    the return that is due, until it is used itself.
    """
    depths = {"above": 1000, "tail": 1020}
    tree, policy, pool, nodes, history_path = session_of_states(depths, 1000)
    above, tail = nodes.values()
    assert pool.cheapest() == (above, above.last_used - NEVER)  # between two places
    alone = policy.return_probability(above, tree.clock)
    policy.on_eviction(tail, 0.0)
    assert policy.return_probability(above, tree.clock) > alone, "it inherited the return"
    assert Lru().return_probability(above, tree.clock) is None
    tree.remove(tail)
    history_node = history_path.nodes[-1]
    saved = PAPER.savings(1000, 0) / PAPER.state_bytes
    weight = policy.history.index.weight(history_node.reuse_class, 0.0)
    assert pool.cheapest() == (above, weight * saved)
    tree.clock.advance()
    tree.hit(above)
    assert pool.cheapest() == (above, above.last_used - NEVER)


def test_a_state_on_the_way_is_worth_what_leaves_there() -> None:
    """A state 100 tokens above the end of its sequence: nothing, until prompts of its kind leave
    their sequences on the way.
    """
    depths = {"above": 900, "tail": 1000}
    _, policy, pool, nodes, history_path = session_of_states(depths, 990)
    above, tail = nodes.values()
    index, reuse_class = policy.history.index, history_path.nodes[-1].reuse_class
    assert pool.cheapest() == (above, above.last_used - NEVER)
    for _ in range(40):
        index.on_departure(before=True)
    index.rebuild()
    of_above = index.weight(BEFORE_END + reuse_class, 0.0) * PAPER.savings(900, 0)
    of_tail = index.weight(reuse_class, 0.0) * PAPER.savings(1000, 900)
    assert of_above > of_tail
    assert pool.cheapest() == (tail, pytest.approx(of_tail / PAPER.state_bytes))


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_demands_the_latest_counts(first: int) -> None:
    """Two sessions that share a state; the second one was here later. Whichever loses its own state
    first, the shared one inherits the demand of the second.
    """
    tree = NodeTree()
    policy = Reuse(History(TimeUnit.REQUESTS))
    above = tree.add(tree.root, "shared", 1_000)
    tree.give_state(above, Kind.BRANCH)
    tails, ends = [], []
    for session in (1, 2):
        tree.clock.advance()
        tokens = np.concatenate([np.arange(1_000), 10_000 * session + np.arange(500)])
        tail = tree.add(above, session, 500)
        tree.give_state(tail, Kind.TAIL)
        ends.append(policy.history.observe(tokens, 1_200, tree.clock).at(1_500))
        tree.link_history(tail, ends[-1])
        tails.append(tail)
    for tail in (tails[first], tails[1 - first]):
        policy.on_eviction(tail, 0.0)
        tree.remove(tail)
    assert above.inherited_demand is not None
    assert above.inherited_demand[1] is ends[1]


def test_a_state_between_two_places_leaves_nothing_to_the_one_above() -> None:
    """Later requests resume from the tail, which is there; not from the state above the middle."""
    depths = {"above": 1000, "middle": 1500, "tail": 2000}
    tree, policy, _, nodes, _ = session_of_states(depths, 1900)
    above, middle, tail = nodes.values()
    policy.on_eviction(middle, 0.0)
    tree.drop_state(middle)
    assert above.inherited_demand is None
    policy.on_eviction(tail, 0.0)
    tree.remove(tail)
    assert above.inherited_demand is not None


def test_making_a_policy() -> None:
    policy = make_policy("marconi", alpha=0.7)
    assert isinstance(policy, Marconi)
    assert policy.alpha == 0.7
    with pytest.raises(ValueError, match="unknown eviction policy 'lfu'; known are lru, marconi, "):
        make_policy("lfu")
    for alpha in (-1, float("nan")):
        with pytest.raises(ValueError, match="alpha must be 0 or more"):
            make_policy("marconi", alpha=alpha)
    with pytest.raises(ValueError, match="'lru' has no option 'alpha'"):
        make_policy("lru", alpha=1)


def test_a_short_leaf_does_not_keep_a_long_prefix() -> None:
    """Two sessions of the same class and length. The older one ends in a short leaf far below its
    last state, beside another branch: alone it saves much for few bytes of KV, but all KV above it
    has to stay as well.
    """
    tree = NodeTree()
    policy = Reuse(trained_history(TimeUnit.REQUESTS))
    pool = Pool(Scarce.KV, PAPER, policy, tree.clock)
    tree.listen(pool)
    fork = tree.add(tree.root, "older", 1_900)
    held = tree.add(fork, "other branch", 3_000)
    tree.lock(held, kv=True, state=True)
    short = tree.add(fork, "end", 100)
    tree.give_state(short, Kind.TAIL)
    tree.clock.advance()
    long = tree.add(tree.root, "newer", 2_000)
    tree.give_state(long, Kind.TAIL)
    assert PAPER.savings(2_000, 0) / (100 * PAPER.kv_bytes_per_token) > 10 * (
        PAPER.savings(2_000, 0) / (2_000 * PAPER.kv_bytes_per_token)
    )
    assert pool.victim() is short


def test_where_a_session_goes_on_a_state_counts_as_what_it_will_be() -> None:
    """The end of its last turn waited for this request, and the next one will not come back to it;
    a place that other prompts left already counts as it is.
    """
    history, clock = History(TimeUnit.REQUESTS), Clock()
    turn, other = np.arange(100), np.arange(1_000, 1_100)
    for ends in (turn, np.concatenate([other, [1, 2]]), np.concatenate([other, [3, 4]])):
        clock.advance()
        history.observe(ends, 90, clock, boundaries=[100] if len(ends) > 100 else ())
    goes_on = history.match(np.arange(150))
    assert goes_on.only_continues and goes_on.branch == 100
    new = hypothetical_node(100, Kind.BRANCH, 0, goes_on, clock)
    end = history.tree().walk(fingerprint_tokens(turn), [])[0][-1]
    assert new.history_node is not None and len(new.children) == 1
    assert (new.history_node.branches, end.branches) == (1, 0)
    assert new.history_node.reuse_class != end.reuse_class
    assert not history.match(np.concatenate([other, np.arange(50)])).only_continues


def test_a_new_state_competes_with_the_old_ones_at_their_scale() -> None:
    """Marconi's recency is relative to the candidates: the new one must be among them."""
    for alpha, depth, beats_victim in ((0.0, 200, True), (0.1, 200, True), (100.0, 20, False)):
        tree = NodeTree()
        pool = Pool(Scarce.STATES, PAPER, Marconi(alpha), tree.clock)
        tree.listen(pool)
        for _ in range(100):
            tree.clock.advance()
        for number in range(6):
            tree.clock.advance()
            tree.give_state(tree.add(tree.root, number, 200 + number), Kind.TAIL)
        tree.clock.advance()
        new = hypothetical_node(depth, Kind.BRANCH, 0, None, tree.clock)
        comparison = pool.compare_with_victim(new)
        assert comparison is not None and comparison.beats_victim is beats_victim
        assert len(pool.candidates()) == 6


def test_the_return_of_what_is_pinned_is_certain() -> None:
    """A position that the history has no class for, without a pin and with one."""
    tree = NodeTree()
    policy = Reuse(History(TimeUnit.REQUESTS))
    node = tree.add(tree.root, "a", 1_000)
    tree.give_state(node, Kind.TAIL)
    for tick in range(100):
        policy.history.index.on_request(float(tick))
        policy.history.index.open(reuse_class_of(0, 1_000, node.turn), float(tick))
    tree.clock.advance()
    assert policy.return_probability(node, tree.clock) < 0.5
    node.pin = Pin(None, 1_000, 60.0, Priority.NORMAL, 60.0)
    assert policy.return_probability(node, tree.clock) == 1.0
