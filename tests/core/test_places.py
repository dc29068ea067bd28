"""Ways and values of copies are what plain enumeration finds; a placement counts what is there."""

from __future__ import annotations

import itertools
import random

import pytest

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.node_tree import NodeTree
from sglang_hybrid.core.records.nodes import Kind, Node
from sglang_hybrid.core.tiers.places import (
    Copies,
    Placement,
    Way,
    cheapest,
    copies_of,
    seconds_saved,
    unit_of,
    way_without_loads,
    ways,
)
from sglang_hybrid.core.tiers.rates import TIERS, Link, Speeds, Tier
from sglang_hybrid.core.tiers.writes import (
    COPIES_REMEMBERED,
    LEAST_RETURNS,
    AverageReturns,
    write_pays,
)
from tests.examples import seeds

COST = CostModel.paper_7b()
SPEEDS = Speeds.of(2.6e14, host=Link(25e9, 2e-5), disk=Link(3e9, 1e-4))
NO_LATENCY = Speeds.of(2.6e14, host=Link(25e9), disk=Link(3e9))
DEVICE, HOST, DISK = TIERS
MASKS = range(1 << len(TIERS))


def tiers_of(mask: int) -> list[Tier]:
    return [tier for tier in TIERS if mask >> tier & 1]


class Sequence:
    """A chain of nodes below the root, with copies as they are asked for."""

    def __init__(self) -> None:
        self.tree = NodeTree()
        self.placement = Placement(self.tree)
        self.path: list[Node] = []

    def then(self, tokens: int, kv: int, state: int = 0) -> Node:
        """A node of `tokens` tokens below the last one; kv, state: masks of tiers."""
        above = self.path[-1] if self.path else self.tree.root
        node = self.tree.add(above, len(self.path), tokens)
        self.path.append(node)
        node.copies = Copies()
        for tier in tiers_of(kv):
            self.placement.add_kv(node, tier)
        if state:
            self.tree.give_state(node, Kind.TAIL)
        for tier in tiers_of(state):
            self.placement.add_state(node, tier)
        return node


def mask(*tiers: Tier) -> int:
    return sum(1 << tier for tier in tiers)


def plain_ways(path: list[Node], prompt_len: int, speeds: Speeds) -> list[tuple[float, int]]:
    """Seconds and depth of every way there is: any copy of each piece that is needed."""
    compute = COST.flops(prompt_len) / speeds.prefill
    found = [(compute, 0)]
    for end, node in enumerate(path):
        if node.depth >= prompt_len:
            break
        needed = path[: end + 1]
        kv_choices = [tiers_of(copies_of(n).kv) for n in needed]
        for choice in itertools.product(*kv_choices, tiers_of(copies_of(node).state)):
            size = dict.fromkeys(TIERS, 0)
            for n, tier in zip(needed, choice[:-1], strict=True):
                size[tier] += n.tokens * COST.kv_bytes_per_token
            size[choice[-1]] += COST.state_bytes
            seconds = sum(speeds.loads[t].seconds(size[t]) for t in TIERS)
            rest = (COST.flops(prompt_len) - COST.flops(node.depth)) / speeds.prefill
            found.append((seconds + rest, node.depth))
    return found


def cheapest_way(path: list[Node], prompt_len: int, cost: CostModel, speeds: Speeds) -> Way:
    return cheapest(ways(path, prompt_len, cost, speeds))


def test_what_copies_served_fades() -> None:
    """However many there were: as many again tell what the latest ones are worth."""
    totals = [0, 0]
    returns = AverageReturns(lambda: (totals[0], totals[1]))
    assert returns.now() == 1.0
    totals[:] = [100, 399]
    assert returns.now() == 101 / 400
    for share in (0.0, 1.0, 0.5):
        for _ in range(100):
            totals[1] += 1_000
            totals[0] += int(1_000 * share)
            returns.now()
        for _ in range(10 * COPIES_REMEMBERED // 1_000):
            totals[1] += 1_000
            totals[0] += int(1_000 * share)
            returns.now()
        assert returns.now() == pytest.approx(max(share, LEAST_RETURNS), abs=0.01)


@pytest.mark.parametrize("seed", seeds(20))
def test_the_cheapest_way_is_the_cheapest_of_all(seed: int) -> None:
    rng = random.Random(seed)
    sequence = Sequence()
    for _ in range(rng.randint(1, 4)):
        kv = rng.choice([m for m in MASKS if m] * 4 + [0])
        state = rng.choice([*MASKS]) if kv else 0
        sequence.then(int(10 ** rng.uniform(0.5, 4)), kv, state)
    prompt_len = max(1, sequence.path[-1].depth + rng.choice([-5, 0, 1, 500]))
    way = cheapest_way(sequence.path, prompt_len, COST, NO_LATENCY)
    assert way.seconds == pytest.approx(min(plain_ways(sequence.path, prompt_len, NO_LATENCY))[0])
    assert way.depth < prompt_len
    resident = way_without_loads(sequence.path, prompt_len, COST, NO_LATENCY)
    assert resident.load_seconds == 0
    assert way.seconds <= resident.seconds


def test_a_state_on_the_host_is_found_under_kv_on_the_device_and_the_other_way_round() -> None:
    one, other = Sequence(), Sequence()
    one.then(5_000, kv=mask(DEVICE), state=mask(HOST))
    other.then(5_000, kv=mask(HOST, DISK), state=mask(DEVICE))
    state_loaded = cheapest_way(one.path, 6_000, COST, SPEEDS)
    kv_loaded = cheapest_way(other.path, 6_000, COST, SPEEDS)
    assert state_loaded.load_bytes == (0, COST.state_bytes, 0)
    assert kv_loaded.load_bytes == (0, 5_000 * COST.kv_bytes_per_token, 0)
    assert state_loaded.state_tier is HOST
    assert kv_loaded.state_tier is DEVICE
    assert state_loaded.depth == kv_loaded.depth == 5_000


def test_a_short_prefix_with_a_large_state_is_computed_and_a_long_one_loaded() -> None:
    for tokens, depth in ((15, 0), (5_000, 5_000)):
        sequence = Sequence()
        sequence.then(tokens, kv=mask(HOST), state=mask(HOST))
        assert cheapest_way(sequence.path, tokens + 100, COST, SPEEDS).depth == depth


def test_a_way_may_load_to_a_shallower_point_and_compute_the_rest() -> None:
    sequence = Sequence()
    sequence.then(5_000, kv=mask(HOST), state=mask(HOST))
    sequence.then(100, kv=mask(DISK), state=mask(DISK))  # its state takes 9 ms, its tokens 6
    way = cheapest_way(sequence.path, 6_000, COST, SPEEDS)
    assert [w.depth for w in ways(sequence.path, 6_000, COST, SPEEDS)] == [0, 5_000, 5_100]
    assert way.depth == 5_000


def test_nothing_below_kv_without_a_copy_can_be_reached() -> None:
    sequence = Sequence()
    sequence.then(100, kv=mask(DEVICE), state=mask(DEVICE))
    sequence.then(100, kv=0)
    sequence.then(100, kv=mask(DEVICE), state=mask(DEVICE))
    assert cheapest_way(sequence.path, 1_000, COST, SPEEDS).depth == 100


def test_the_last_token_is_always_computed() -> None:
    sequence = Sequence()
    sequence.then(100, kv=mask(DEVICE), state=mask(DEVICE))
    assert cheapest_way(sequence.path, 100, COST, SPEEDS).depth == 0
    assert cheapest_way(sequence.path, 101, COST, SPEEDS).depth == 100


def test_a_request_can_fall_back_to_what_is_on_the_device() -> None:
    sequence = Sequence()
    sequence.then(1_000, kv=mask(DEVICE), state=mask(DEVICE))
    sequence.then(5_000, kv=mask(HOST), state=mask(HOST))
    way = cheapest_way(sequence.path, 7_000, COST, SPEEDS)
    fallback = way_without_loads(sequence.path, 7_000, COST, SPEEDS)
    assert (way.depth, fallback.depth) == (6_000, 1_000)


def test_attention_without_state_resumes_wherever_its_kv_reaches() -> None:
    attention = COST.with_sizes(kv_bytes_per_token=COST.kv_bytes_per_token, state_bytes=0)
    sequence = Sequence()
    sequence.then(1_000, kv=mask(DEVICE))
    sequence.then(1_000, kv=mask(HOST))
    way = cheapest_way(sequence.path, 3_000, attention, SPEEDS)
    assert (way.depth, way.load_bytes) == (2_000, (0, 1_000 * COST.kv_bytes_per_token, 0))


def plain_seconds(node: Node, gap: int, kv: int, place: int, state: int) -> float:
    """Fewest seconds to resume at `node` with these copies of the KV of its edge and of its state,
    while the KV of the other tokens since its anchor is in the tiers `place`; or to compute.
    """
    computed = COST.savings(node.depth, node.anchor_depth) / NO_LATENCY.prefill
    edge = node.tokens * COST.kv_bytes_per_token
    rest = gap * COST.kv_bytes_per_token - edge
    loaded = [
        NO_LATENCY.loads[a].seconds(rest)
        + NO_LATENCY.loads[b].seconds(edge)
        + NO_LATENCY.loads[c].seconds(COST.state_bytes)
        for a, b, c in itertools.product(tiers_of(place), tiers_of(kv), tiers_of(state))
    ]
    return min([computed, *loaded])


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("tokens", [5, 200, 5_000])
def test_a_copy_is_worth_what_it_saves_over_the_next_best_way(tier: Tier, tokens: int) -> None:
    slower = [t for t in TIERS if t >= tier]
    for kv, state in itertools.product(range(1, 8), range(1, 8)):
        sequence = Sequence()
        sequence.then(300, kv, 1)
        sequence.then(100, kv)
        node = sequence.then(tokens, kv, state)
        counted_kv = kv & mask(*slower) or kv
        counted_state = state & mask(*slower) or state
        gap = tokens + 100
        for takes_kv, takes_state in ((True, True), (True, False), (False, True)):
            if (takes_kv and not kv & mask(tier)) or (takes_state and not state & mask(tier)):
                continue
            left_kv = counted_kv & ~mask(tier) if takes_kv else counted_kv
            left_state = counted_state & ~mask(tier) if takes_state else counted_state
            now = plain_seconds(node, gap, counted_kv, counted_kv, counted_state)
            after = plain_seconds(node, gap, left_kv, counted_kv, left_state)
            saved = seconds_saved(node, tier, COST, NO_LATENCY, kv=takes_kv, state=takes_state)
            assert saved == pytest.approx(after - now, abs=1e-12), (kv, state, takes_kv)
            assert saved >= 0


def test_a_device_copy_with_another_one_below_is_worth_the_load_only() -> None:
    alone, backed = Sequence(), Sequence()
    node = alone.then(5_000, kv=mask(DEVICE), state=mask(DEVICE))
    copied = backed.then(5_000, kv=mask(DEVICE, HOST), state=mask(DEVICE, HOST))
    lost, kept = (unit_of(n, DEVICE, COST, SPEEDS) for n in (node, copied))
    assert lost is not None
    assert kept is not None
    assert lost.freed == kept.freed
    assert lost.saves == pytest.approx(SPEEDS.compute(COST.flops(5_000)))
    assert kept.saves == pytest.approx(SPEEDS.loads[HOST].seconds(kept.freed))


def test_kv_that_only_nodes_in_a_slower_tier_need_is_worth_its_own_load() -> None:
    sequence = Sequence()
    above = sequence.then(1_000, kv=mask(DEVICE, HOST))
    sequence.then(1_000, kv=mask(HOST), state=mask(HOST))
    unit = unit_of(above, DEVICE, COST, SPEEDS)
    assert unit is not None
    assert (unit.kv, unit.state) == (True, False)
    size = 1_000 * COST.kv_bytes_per_token
    assert (unit.freed, unit.saves) == (size, pytest.approx(SPEEDS.loads[HOST].seconds(size)))


def test_what_can_go_from_a_tier() -> None:
    sequence = Sequence()
    root, tree = sequence.tree.root, sequence.tree
    inner = sequence.then(100, kv=mask(DEVICE, HOST), state=mask(DEVICE, HOST))
    only = sequence.then(100, kv=mask(DEVICE), state=mask(HOST))
    leaf = sequence.then(100, kv=mask(HOST), state=mask(HOST))

    def goes(node: Node, tier: Tier) -> tuple[bool, bool] | None:
        unit = unit_of(node, tier, COST, SPEEDS)
        return None if unit is None else (unit.kv, unit.state)

    assert goes(root, DEVICE) is None
    assert goes(inner, DEVICE) == (False, True)  # its child on the device needs its KV
    assert goes(inner, HOST) == (True, True)  # no child has KV on the host; the device has it too
    assert goes(only, DEVICE) is None  # its KV is the last, and what is below needs it
    assert goes(only, HOST) == (False, True)
    assert goes(leaf, HOST) == (True, True)
    assert goes(leaf, DISK) is None
    tree.lock(inner, kv=True, state=True)
    assert goes(inner, DEVICE) is None
    assert goes(inner, HOST) == (True, True)
    sequence.placement.pin(inner, HOST, True)
    assert goes(inner, HOST) is None


def test_the_last_kv_of_a_node_with_children_stays() -> None:
    sequence = Sequence()
    above = sequence.then(100, kv=mask(HOST))
    sequence.then(100, kv=mask(DISK))
    with pytest.raises(ValueError, match="children need it"):
        sequence.placement.drop_kv(above, HOST)


def test_a_copy_is_not_written_for_returns_that_do_not_pay_its_transfer() -> None:
    size, saves = COST.state_bytes, 0.053
    assert write_pays(size, saves, returns=0.01, tier=HOST, speeds=SPEEDS)
    assert not write_pays(size, saves, returns=0.001, tier=HOST, speeds=SPEEDS)
    assert not write_pays(size, saves, returns=0.01, tier=DISK, speeds=SPEEDS)


class Dirty:
    """A listener that notes which nodes changed."""

    settle = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.nodes: set[Node] = set()

    def mark_dirty(self, node: Node) -> None:
        self.nodes.add(node)

    def forget(self, node: Node) -> None:
        self.nodes.discard(node)


@pytest.mark.parametrize("seed", seeds(6))
def test_a_placement_counts_what_is_there_and_marks_what_changed(seed: int) -> None:
    rng = random.Random(seed)
    tree = NodeTree()
    placement, dirty = Placement(tree), Dirty()
    tree.listen(dirty)

    def units() -> dict[tuple[Node, Tier], object]:
        nodes = list(tree.walk())
        return {(n, t): unit_of(n, t, COST, SPEEDS) for n in nodes for t in TIERS}

    for step in range(150):
        nodes = list(tree.walk())
        before = units()
        dirty.nodes.clear()
        node, tier = rng.choice(nodes) if nodes else tree.root, rng.choice(TIERS)
        action = rng.random()
        if action < 0.25 or node is tree.root:
            placement.add_kv(tree.add(node, step, rng.randint(2, 400)), tier)
        elif action < 0.35 and node.tokens > 1:
            tree.split(node, rng.randint(1, node.tokens - 1), node.key, step)
        elif action < 0.55:
            tree.give_state(node, Kind.TAIL)
            placement.add_state(node, tier)
        elif action < 0.7:
            placement.add_kv(node, tier)
        elif action < 0.8:
            placement.drop_state(node, tier)
        elif action < 0.85:
            placement.pin(node, tier, rng.random() < 0.5)
        elif node.children:
            if copies_of(node).kv != mask(tier):
                placement.drop_kv(node, tier)
        else:
            for t in TIERS:
                placement.drop_kv(node, t)
                placement.drop_state(node, t)
            tree.remove(node)
        changed = {n for (n, t), unit in units().items() if before.get((n, t), unit) != unit}
        assert changed <= dirty.nodes
        check(tree, placement)


def check(tree: NodeTree, placement: Placement) -> None:
    """Totals and counts are those of a walk."""
    nodes = list(tree.walk())
    for tier in TIERS:
        kv = sum(n.tokens for n in nodes if copies_of(n).has_kv(tier))
        states = sum(copies_of(n).has_state(tier) for n in nodes)
        assert (placement.kv_tokens[tier], placement.states[tier]) == (kv, states)
        expected = kv * COST.kv_bytes_per_token + states * COST.state_bytes
        assert placement.used(tier, COST) == expected
        for node in [tree.root, *nodes]:
            children = sum(copies_of(c).has_kv(tier) for c in node.children.values())
            assert copies_of(node).kv_children[tier] == children
    for node in nodes:
        assert node.has_state == bool(copies_of(node).state)
