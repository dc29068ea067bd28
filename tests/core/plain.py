"""Plain twins: the same definitions, recomputed from the bare tree at every step, over lists."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.node_tree import NodeTree
from sglang_hybrid.core.records.nodes import Node
from sglang_hybrid.core.returns.hazards import BEFORE_END, NEVER_REUSED, reuse_class_of
from sglang_hybrid.core.tiers.places import copies_of
from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.core.tiers.tier_pool import TierPool
from sglang_hybrid.core.victims.coding import INEXACT
from sglang_hybrid.core.victims.eviction import Lru, Marconi, Policy, Reuse, SegLen
from sglang_hybrid.core.victims.pool import Scarce


@dataclass
class Facts:
    node: Node
    saved: int
    freed: int


def ancestors(node: Node) -> list[Node]:
    """The ancestors from the parent up, root excluded."""
    found = []
    above = node.parent
    while above is not None and above.parent is not None:
        found.append(above)
        above = above.parent
    return found


def facts_of(node: Node, scarce: Scarce, cost: CostModel) -> Facts:
    depth = node.tokens + sum(above.tokens for above in ancestors(node))
    anchor = next((above for above in ancestors(node) if above.has_state), None)
    anchor_depth = 0
    if anchor is not None:
        anchor_depth = anchor.tokens + sum(above.tokens for above in ancestors(anchor))
    saved = cost.flops(depth) - cost.flops(anchor_depth) if node.has_state else 0
    kv = state = 0
    if not node.children and not node.kv_locked and not node.state_locked:
        kv = cost.kv_bytes_of(node.tokens, node.coded_kv)
        for above in ancestors(node):
            if above.has_state or len(above.children) != 1:
                break
            kv += cost.kv_bytes_of(above.tokens, above.coded_kv)
    if node.has_state and not node.state_locked:
        state = cost.state_bytes_of(node.coded_state)
    freed = {Scarce.SHARED: kv + state, Scarce.STATES: state, Scarce.KV: kv}[scarce]
    return Facts(node, saved, freed)


def plain_victim(
    tree: NodeTree, scarce: Scarce, cost: CostModel, policy: Policy, *, last_resort: bool = False
) -> Node | None:
    """The victim by the definitions; for GDSF see PlainGdsf."""
    everything = [facts_of(node, scarce, cost) for node in tree.walk()]
    can_be_coded = set()
    for facts in everything if cost.coded else ():
        freed = plain_codable(facts.node, scarce, cost)
        if freed:
            facts.freed = freed
            can_be_coded.add(facts.node)
    everything = [facts for facts in everything if facts.freed]
    if policy.bounded_by_prefix and scarce is Scarce.KV:
        for facts in everything:
            depth = facts.node.tokens + sum(above.tokens for above in ancestors(facts.node))
            prefix_bytes = depth * cost.kv_bytes_per_token
            facts.saved = min(facts.saved, cost.flops(depth) * facts.freed // prefix_bytes)
    if policy.stateless_first:
        dead = [facts.node for facts in everything if not facts.node.has_state]
        if dead:
            return min(dead, key=lambda node: (node.last_used, node.id))
    if can_be_coded:
        coded = [facts for facts in everything if facts.node not in can_be_coded]
        everything = [facts for facts in everything if facts.node in can_be_coded]
        if coded and policy.knows_returns:
            first, loss = plain_lowest(everything, policy, tree)
            other, worth = plain_lowest(coded, policy, tree)
            return first if INEXACT * loss < worth else other
    elif policy.spares_forks:
        few = [facts for facts in everything if len(facts.node.children) <= 1]
        if not few and not last_resort:
            return None
        everything = few or everything
    return plain_lowest(everything, policy, tree)[0] if everything else None


def plain_lowest(candidates: list[Facts], policy: Policy, tree: NodeTree) -> tuple[Node, float]:
    """The candidate of the lowest score, and the score."""
    scores = plain_scores(candidates, policy, tree)
    best = min(
        range(len(candidates)),
        key=lambda i: (scores[i], candidates[i].node.last_used, candidates[i].node.id),
    )
    return candidates[best].node, scores[best]


def plain_codable(node: Node, scarce: Scarce, cost: CostModel) -> int:
    """Bytes of what is scarce that coding gives back of `node`: of its state, and of KV that it and
    the ancestors that only lead to it hold.
    """
    if node.stays_exact or not (node.has_state or node.children):
        return 0
    state = kv = 0
    if node.has_state and not node.coded_state and not node.state_locked:
        state = cost.state_bytes - cost.coded[1]
    path = [node, *ancestors(node)]
    below: Node | None = None
    for each in path:
        others = [child for child in each.children.values() if child is not below]
        if each.coded_kv or each.kv_locked or not all(child.coded_kv for child in others):
            break
        if below is not None and each.has_state and not each.coded_state:
            break
        if each is node and node.state_locked:
            break
        kv += each.tokens * (cost.kv_bytes_per_token - cost.coded[0])
        below = each
    return {Scarce.SHARED: kv + state, Scarce.STATES: state, Scarce.KV: kv}[scarce]


def plain_scores(candidates: list[Facts], policy: Policy, tree: NodeTree) -> list[float]:
    if isinstance(policy, Lru):
        return [float(facts.node.last_used) for facts in candidates]
    if isinstance(policy, SegLen):
        return [float(facts.node.depth - facts.node.anchor_depth) for facts in candidates]
    if isinstance(policy, Marconi):
        return marconi_scores(candidates, policy.alpha)
    if isinstance(policy, Reuse):
        return [reuse_score(facts, policy, tree) for facts in candidates]
    raise NotImplementedError(policy.name)


def reuse_score(facts: Facts, policy: Reuse, tree: NodeTree) -> float:
    """Returns to the node's own place, if it has one, and to the one whose state fell to it."""
    history, node, history_node = policy.history, facts.node, facts.node.history_node
    now, unit = history.time_unit.now(tree.clock), history.time_unit
    used, inherited = node.inherited_demand or (0, None)
    inherits = inherited is not None and inherited.interval_id >= 0 and used == node.last_used
    if history_node is None:
        own = reuse_class_of(len(node.children), node.depth, node.turn)
    elif history_node.depth - node.depth < history.max_offset:
        own = history_node.reuse_class
    else:
        alone = not history_node.branches and not inherits
        own = BEFORE_END + history_node.reuse_class if alone else NEVER_REUSED
    weight = history.index.weight(own, now - unit.last_used(node))
    if inherited is not None and inherits:
        weight += history.index.weight(
            inherited.reuse_class, now - history.index.since(inherited.interval_id)
        )
    return weight * (facts.saved / facts.freed)


def marconi_scores(candidates: list[Facts], alpha: float) -> list[float]:
    """Scores as the index orders them: both terms scaled by their range, without the minima."""
    times = [float(facts.node.last_used) for facts in candidates]
    values = [facts.saved / facts.freed for facts in candidates]
    time_range, value_range = max(times) - min(times), max(values) - min(values)
    if not alpha or not value_range:
        return times
    per_tick = 1.0 / time_range if time_range else 0.0
    return [t * per_tick + v * (alpha / value_range) for t, v in zip(times, values, strict=True)]


def textbook_marconi(candidates: list[Facts], alpha: float) -> dict[int, float]:
    """S(n) of the paper's section 4.2, both terms min-max normalised to 0..1, by node id."""

    def normalised(values: list[float]) -> list[float]:
        low, high = min(values), max(values)
        return [(value - low) / (high - low) if high > low else 0.0 for value in values]

    recency = normalised([float(facts.node.last_used) for facts in candidates])
    efficiency = normalised([facts.saved / facts.freed for facts in candidates])
    return {
        facts.node.id: r + alpha * e
        for facts, r, e in zip(candidates, recency, efficiency, strict=True)
    }


def plain_evictions(pool: TierPool) -> list[tuple[Node, bool, int]]:
    """The evictions of a pool, one after the other: each node, if it has a score, and the bytes of
    its own unit and of the KV above it that only led to what is gone.
    """
    pool.candidates()  # everything is described
    table, gone = pool._candidates, set[Node]()
    scores = pool.policy.scores(table, pool.clock).tolist() if len(table) else []
    scored = [table.nodes[row] for row in sorted(range(len(table)), key=lambda row: scores[row])]
    order = [(node, False) for node in pool._stateless.nodes] + [(node, True) for node in scored]
    return [(node, has_score, _gives_back(pool, node, gone)) for node, has_score in order]


def plain_next_victims(evictions: list[tuple[Node, bool, int]], needed: int) -> list[Node]:
    """The nodes with a score among the first that together free so many bytes."""
    found = []
    for node, has_score, freed in evictions:
        if needed <= 0:
            break
        needed -= freed
        if has_score:
            found.append(node)
    return found


def _gives_back(pool: TierPool, node: Node, gone: set[Node]) -> int:
    unit, freed = pool.unit(node), pool._weigh(node)[0]
    if pool.scarce is Scarce.STATES or unit is None or not unit.kv:
        return freed
    gone.add(node)
    above = node.parent
    while above is not None and _only_leads_to(pool.tier, above, gone):
        gone.add(above)
        freed += pool.cost.bytes_in(pool.tier, above.tokens, 0)
        above = above.parent
    return freed


def _only_leads_to(tier: Tier, node: Node, gone: set[Node]) -> bool:
    copies = copies_of(node)
    if node.parent is None or node.has_state or node.kv_locked or copies.is_pinned(tier):
        return False
    return all(child in gone for child in node.children.values() if copies_of(child).has_kv(tier))


class PaperLru(Lru):
    """Least recently used, states with several children spared."""

    spares_forks = True


class PlainGdsf:
    """GDSF by its definition: remembers, per node and use, the inflation when it first stood by."""

    def __init__(self) -> None:
        self.inflation = 0.0
        self.at_use: dict[tuple[int, int], float] = {}

    def score(self, facts: Facts) -> float:
        use = (facts.node.id, facts.node.hits)
        inflation = self.at_use.setdefault(use, self.inflation)
        return inflation + (facts.node.hits + 1) * facts.saved / facts.freed
