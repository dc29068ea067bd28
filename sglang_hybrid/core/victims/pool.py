"""A pool that runs short, its candidates in arrays, and the choice of a victim.

A changed node is only marked dirty. When a victim is wanted, a bounded number of dirty nodes is
described anew, and one pass of the policy over dense arrays finds the lowest score: no
Python object is scanned, nothing is sorted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.nodes import Clock, Node, absorbs
from sglang_hybrid.core.victims.eviction import Policy
from sglang_hybrid.core.victims.table import Table

if TYPE_CHECKING:
    from sglang_hybrid.core.victims.coding import Codable


class Scarce(Enum):
    """The kind of memory that is short, and so the bytes that a victim is charged for."""

    SHARED = "shared"  # one budget for KV and states
    STATES = "states"  # slots of a split pool
    KV = "kv"  # KV tokens of a split pool


def freed_bytes(node: Node, scarce: Scarce, cost: CostModel) -> int:
    """Bytes of what is scarce that evicting `node` gives back; 0 if it gives back nothing or is
    held.

    Evicting a leaf frees its KV, its state, and the KV of every ancestor that has neither a state
    nor another child. Evicting a node with children frees its state only; its KV stays for them
    (the paper: it is absorbed by the child).
    """
    if node.parent is None or node.state_locked:
        return 0
    freed = 0
    if scarce is not Scarce.STATES and not node.children and not node.kv_locked:
        freed = cost.kv_bytes_of(node.tokens, node.coded_kv) + absorbed_bytes(node, cost)
    if scarce is not Scarce.KV and node.has_state:
        freed += cost.state_bytes_of(node.coded_state)
    return freed


def absorbed_bytes(node: Node, cost: CostModel) -> int:
    """Bytes of KV of the ancestors that are `absorbed` by `node`."""
    return sum(cost.kv_bytes_of(above.tokens, above.coded_kv) for above in absorbed(node))


def absorbed(node: Node) -> Iterator[Node]:
    """The ancestors right above that hold no state and lead to nothing but `node`."""
    above = node.parent
    while above is not None and absorbs(above):
        yield above
        above = above.parent


DESCRIBED_AT_ONCE = 1_024
"""Dirty nodes that one choice describes anew; the others keep their old description until the next
choice."""

DESCRIBED_PER_ARRIVAL = 128
"""Dirty nodes that the arrival of a request describes anew, if there are more than that."""


@dataclass(frozen=True, slots=True)
class VictimComparison:
    """Two scores of one policy: that of a new state, and that of the cheapest victim."""

    new: float
    cheapest: float

    @property
    def beats_victim(self) -> bool:
        return self.new > self.cheapest


class Pool:
    """Candidates of one pool under one policy. Listens to a NodeTree; `victim` chooses, the cache
    evicts.

    Five tables, asked in this order: leaves without a state, oldest first; candidates, lowest score
    first, where entries may be coded only those of which something can be; what is coded already
    (of both, what costs least: `_code_or_evict`); only when asked for, the states with several
    children that a policy spares; and nodes with demand, the lowest demand first.

    further_columns: numbers of a row beside the policy's.
    """

    further_columns: ClassVar[int] = 0

    def __init__(self, scarce: Scarce, cost: CostModel, policy: Policy, clock: Clock) -> None:
        self.scarce = scarce
        self.cost = cost
        self.policy = policy
        self.clock = clock
        columns, further = policy.columns, self.further_columns
        self._stateless = Table(further)
        self._candidates, self._coded, self._forks, self._wanted = (
            Table(columns + further) for _ in range(4)
        )
        self._home: dict[Node, Table] = {}  # the table a node is in
        self._dirty: dict[Node, None] = {}
        self.last_score = -math.inf  # of the last victim
        self.settle: Callable[[], None] = _nothing_to_settle

    def mark_dirty(self, node: Node) -> None:
        """Called when something about `node` has changed."""
        self._dirty[node] = None

    def on_arrival(self) -> None:
        """A request arrives: if many nodes are dirty, as in a cache that fills, describe some, so
        that the first choice of a victim does not find them all.
        """
        if len(self._dirty) > DESCRIBED_PER_ARRIVAL:
            self._describe(DESCRIBED_PER_ARRIVAL)

    def forget(self, node: Node) -> None:
        """Called when `node` has left the tree."""
        self._dirty.pop(node, None)
        self._leave(node)
        self.policy.forget(node)

    def victim(self, *, last_resort: bool = False) -> Node | None:
        """Choose the node to evict now; None if nothing may go. The caller must code what
        `codable` says, or else evict it: a leaf altogether; if it has children, or its KV is held,
        its state only.
        """
        choice = self.cheapest(last_resort=last_resort)
        if choice is None:
            return None
        node, score = choice
        self.last_score = score
        if self._has_demand(node) and self.codable(node) is None:
            self._tell_policy(node, score)
        return node

    def _has_demand(self, node: Node) -> bool:
        """True if requests may return to `node`, even if it is evicted before all nodes with a
        score.
        """
        return node.has_state or self._home.get(node) is not self._stateless

    def _tell_policy(self, node: Node, score: float) -> None:
        """Tell the policy that `node` was chosen at `score`."""
        self.policy.on_eviction(node, score)

    def cheapest(self, *, last_resort: bool = False) -> tuple[Node, float] | None:
        """The next victim and its score, without choosing it: lowest score, then oldest use, then
        lowest id. A leaf without a state is worth less than any score.
        """
        self._describe()
        while True:
            choice = self._lowest(last_resort)
            if choice is not None and choice[0] not in self._dirty:
                return choice
            if choice is not None:
                self._describe_one(choice[0])
            elif self._dirty:
                self._describe()
            else:
                return None

    def _lowest(self, last_resort: bool) -> tuple[Node, float] | None:
        """The next victim and its score, by what the tables hold."""
        if len(self._stateless):
            return self._stateless.lowest(self._stateless.last_used())[0], -math.inf
        if len(self._candidates) and len(self._coded) and self.policy.knows_returns:
            return self._code_or_evict()
        tables = (self._candidates, self._coded, self._forks)
        for table in tables if last_resort else tables[:2]:
            if len(table):
                return table.lowest(self.policy.scores(table, self.clock))
        return self._lowest_demand()

    def _code_or_evict(self) -> tuple[Node, float]:
        """The cheaper of two: coding the cheapest entry that can be, or evicting one that is coded
        already. Their scores compare where they say how likely a position comes back.
        """
        from sglang_hybrid.core.victims.coding import INEXACT

        first, other = (
            table.lowest(self.policy.scores(table, self.clock))
            for table in (self._candidates, self._coded)
        )
        loses, worth = INEXACT * max(first[1], 0.0), max(other[1], 0.0)
        return first if loses < worth else other

    def _lowest_demand(self) -> tuple[Node, float] | None:
        """The node with the lowest demand above 0; of several, that with the lowest score."""
        table = self._wanted
        if not len(table):
            return None
        scores = self.policy.scores(table, self.clock).copy()
        demand = np.array([node.demand for node in table.nodes])
        scores[demand > demand.min()] = np.inf
        return table.lowest(scores)

    @property
    def evictable(self) -> bool:
        """True if anything may go before a last resort."""
        self._describe()
        tables = self._stateless, self._candidates, self._coded
        while self._dirty and not any(map(len, tables)):
            self._describe()
        return any(map(len, tables))

    def compare_with_victim(self, node: Node) -> VictimComparison | None:
        """The score that `node`, which no tree holds yet, would have if it gave back one state,
        beside the cheapest victim's; None if the victim has no score. Scores compare within one
        table only, so it joins theirs for the moment. Where entries may be coded, it will be, too,
        and what is lost for it in the end is coded already.
        """
        self._describe()
        table = self._coded if self.cost.coded else self._candidates
        size = self.cost.state_bytes_of(coded=True)
        if self._stateless_free(size) or not len(table):
            return None
        saved = self.cost.savings(node.depth, node.anchor_depth)
        table.put(node, self.policy.describe(node, saved, max(1, size)))
        scores = self.policy.scores(table, self.clock)
        comparison = VictimComparison(float(scores[-1]), float(scores[:-1].min()))
        table.discard(node)
        self.policy.forget(node)
        return comparison

    def _stateless_free(self, needed: int) -> bool:
        """True if leaves without a state give back so many bytes of what is scarce."""
        if self.scarce is not Scarce.SHARED:
            return len(self._stateless) > 0
        for node in self._stateless.nodes:
            needed -= self._weigh(node)[0]
            if needed <= 0:
                return True
        return False

    def candidates(self) -> Sequence[Node]:
        """The nodes that may go before a last resort, in no particular order."""
        self._describe(len(self._dirty))
        return self._stateless.nodes + self._candidates.nodes + self._coded.nodes

    def codable(self, node: Node) -> Codable | None:
        """The part of `node` to be coded where it would be evicted; None if it is to be evicted. A
        leaf without a state is not worth coding.
        """
        if not self.cost.coded or not (node.has_state or node.children):
            return None
        from sglang_hybrid.core.victims.coding import codable

        kv, state = self.scarce is not Scarce.STATES, self.scarce is not Scarce.KV
        return codable(node, self.cost, kv=kv, state=state)

    def check(self, nodes: Iterable[Node]) -> list[str]:
        """Errors in the tables, given all `nodes` there are; none, if all is well."""
        known = list(nodes)
        wrong = [
            node
            for node in known
            if node not in self._dirty and self._home.get(node) is not self._table_of(node)[0]
        ]
        gone = (self._home.keys() | self._dirty.keys()) - set(known)
        return [f"{self.scarce.value}: {node!r} is in the wrong table" for node in wrong] + [
            f"{self.scarce.value}: {node!r} is gone" for node in gone
        ]

    def _describe(self, most: int = DESCRIBED_AT_ONCE) -> None:
        """Describe `most` dirty nodes anew, in the order in which they became dirty."""
        self.settle()
        for node in list(islice(self._dirty, most)):
            self._describe_one(node)

    def _describe_one(self, node: Node) -> None:
        self._dirty.pop(node, None)
        table, freed, saved = self._table_of(node)
        if table is not self._home.get(node):
            self._leave(node)
        if table is None:
            return
        self._home[node] = table
        scored = table is not self._stateless
        values = self.policy.describe(node, saved, freed) if scored else ()
        table.put(node, values + self._further_values(node))

    def _further_values(self, node: Node) -> tuple[float, ...]:
        """`further_columns` numbers of a row."""
        return ()

    def _leave(self, node: Node) -> None:
        table = self._home.pop(node, None)
        if table is not None:
            table.discard(node)

    def _weigh(self, node: Node) -> tuple[int, int]:
        """Bytes of what is scarce that evicting `node` gives back, 0 if nothing may go; and the
        FLOPs that it saves, 0 if nothing is resumed from it.
        """
        coded = self.codable(node) if node.parent is not None else None
        freed = freed_bytes(node, self.scarce, self.cost) if coded is None else coded.freed
        if not freed:
            return 0, 0
        saved = self.cost.savings(node.depth, node.anchor_depth) if node.has_state else 0
        if self.scarce is Scarce.KV and self.policy.bounded_by_prefix:
            saved = self._share_of_prefix(node, freed, saved)
        return freed, saved

    def _share_of_prefix(self, node: Node, freed: int, saved: int) -> int:
        """`saved`, at most as many FLOPs per byte as the whole prefix of `node` saves, which must
        stay as long as `node` does.
        """
        prefix = self._bytes_of(node.depth, int(self.scarce is Scarce.SHARED))
        return min(saved, self.cost.flops(node.depth) * freed // prefix)

    def _bytes_of(self, kv_tokens: int, states: int) -> int:
        """Bytes that so many tokens of KV and states take in this pool."""
        return kv_tokens * self.cost.kv_bytes_per_token + states * self.cost.state_bytes

    def _table_of(self, node: Node) -> tuple[Table | None, int, int]:
        freed, saved = self._weigh(node)
        if not freed:
            return None, 0, 0
        if node.demand:
            return self._wanted, freed, saved
        if self._is_worthless(node, saved) and self.policy.stateless_first:
            return self._stateless, freed, saved
        if self.cost.coded and self.codable(node) is not None:
            return self._candidates, freed, saved
        if self.policy.spares_forks and self._is_fork(node):
            return self._forks, freed, saved
        return self._coded if self.cost.coded else self._candidates, freed, saved

    def _is_fork(self, node: Node) -> bool:
        """True if several nodes continue `node`."""
        return len(node.children) > 1

    def _is_worthless(self, node: Node, saved: int) -> bool:
        """True if `node` is evicted before all nodes with a score."""
        return not node.has_state


def _nothing_to_settle() -> None:
    """Do nothing: the callback of a pool that listens to no tree yet."""
