"""The KV on the edges of a tree in one tier, as arrays: what evicting many nodes gives back."""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.costs.cost import CostModel, IntArray
from sglang_hybrid.core.records.nodes import Node
from sglang_hybrid.core.returns.intervals import as_ints
from sglang_hybrid.core.tiers.places import Copies, was_refused
from sglang_hybrid.core.tiers.rates import TIERS, Tier
from sglang_hybrid.core.victims.pool import Scarce

FIRST_SLOTS: Final = 64


class KvEdges:
    """Bytes that each node of a tree gives back in one tier, and the holders of its KV there.

    A node has a slot from `put` until `drop`. The root has one, too; its KV is always kept.

    Args:
        tier: whose pool chooses victims.
        scarce: what that pool is short of.
        cost: bytes of KV and states in the tier.
    """

    HAS_KV: Final = 1
    GIVES_KV: Final = 2  # evicting it frees its KV
    LEADS: Final = 4  # nobody needs its KV but the nodes below it
    LACKS_COPY: Final = 8  # the next slower tier lacks something, and has not refused it

    def __init__(self, tier: Tier, scarce: Scarce, cost: CostModel) -> None:
        self._tier, self._scarce = tier, scarce
        self._token_bytes, self._state_bytes = cost.bytes_in(tier, 1, 0), cost.bytes_in(tier, 0, 1)
        self._slots: dict[Node, int] = {}
        self._free: list[int] = []
        # By slot. Items are written one by one, which takes three times as long in numpy arrays.
        self._above = array("q")  # the slot of the parent
        self._children = array("q")  # how many of its children have KV in the tier
        self._tokens = array("q")  # of its edge
        self._freed = array("q")  # bytes that evicting it alone frees
        self._flags = array("q")
        self._grow()

    def put(self, node: Node, freed: int) -> None:
        """`node` is new, or something about it has changed. freed: bytes of what is scarce that
        evicting it alone gives back.
        """
        copies: Copies | None = node.copies
        if copies is None:
            return
        slot = self._slot(node)
        self._above[slot] = slot if node.parent is None else self._slot(node.parent)
        self._children[slot], self._tokens[slot] = copies.kv_children[self._tier], node.tokens
        self._freed[slot], self._flags[slot] = freed, self._flags_of(node, copies, freed)

    def _flags_of(self, node: Node, copies: Copies, freed: int) -> int:
        tier, flags = self._tier, 0
        has_kv, has_state = copies.has_kv(tier), copies.has_state(tier)
        if has_kv:
            flags |= self.HAS_KV
        if self._scarce is not Scarce.STATES:
            with_state = has_state and self._scarce is Scarce.SHARED
            if freed > with_state * self._state_bytes:
                flags |= self.GIVES_KV
            held = node.has_state or node.kv_locked or copies.is_pinned(tier)
            if not held and node.parent is not None:
                flags |= self.LEADS
        if tier is not TIERS[-1] and not was_refused(node):
            below = Tier(tier + 1)
            if not copies.has_kv(below) or (has_state and not copies.has_state(below)):
                flags |= self.LACKS_COPY
        return flags

    def drop(self, node: Node) -> None:
        """`node`, which has no children, left the tree."""
        slot = self._slots.pop(node, None)
        if slot is not None:
            self._flags[slot] = 0
            self._free.append(slot)

    def slot(self, node: Node) -> int:
        """The slot of a node that was put."""
        return self._slots[node]

    def take_flag(self, node: Node, flag: int) -> None:
        """Remove this flag of `node`."""
        self._flags[self._slots[node]] &= ~flag

    def have(self, slots: IntArray, flag: int) -> npt.NDArray[np.bool_]:
        """A mask of the nodes at slots [n] that have this flag."""
        found: npt.NDArray[np.bool_] = as_ints(self._flags)[slots] & flag != 0
        return found

    def freed_by(self, slots: IntArray) -> int:
        """Bytes that evicting the nodes at slots [n] frees. The KV above them that nothing else
        keeps in the tier is freed after them, and counts with them.
        """
        above, flags, tokens = (as_ints(of) for of in (self._above, self._flags, self._tokens))
        freed = int(as_ints(self._freed)[slots].sum())
        gone = slots[flags[slots] & self.GIVES_KV != 0]
        left: IntArray | None = None  # children that keep KV
        while len(gone):
            parents = above[gone]
            lead = flags[parents] & self.LEADS != 0
            if not lead.any():
                break
            if left is None:
                left = as_ints(self._children).copy()
            np.subtract.at(left, parents, flags[gone] & self.HAS_KV)
            gone = np.unique(parents[lead & (left[parents] == 0)])
            freed += self._token_bytes * int(tokens[gone].sum())
        return freed

    def _slot(self, node: Node) -> int:
        slot = self._slots.get(node)
        if slot is None:
            if not self._free:
                self._grow()
            slot = self._slots[node] = self._free.pop()
        return slot

    def _grow(self) -> None:
        """Double the slots; the new ones are free."""
        had = len(self._flags)
        count = max(had, FIRST_SLOTS)
        for values in (self._above, self._children, self._tokens, self._freed, self._flags):
            values.frombytes(bytes(8 * count))
        self._free.extend(range(had + count - 1, had - 1, -1))
