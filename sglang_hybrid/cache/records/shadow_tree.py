"""`core`'s records of SGLang's tree: every change of that tree is repeated in them, and the victims
are chosen among them.

SGLang's TreeCore and components own KV, states, locks and the tree itself. The shadow tree holds
one `core.Node` per tree node, two pools (what is short: KV tokens or state slots), or one where KV
and states share all bytes, and the history.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy.typing as npt
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.node_tree import NodeTree
from sglang_hybrid.core.records.nodes import Clock, Kind, Node
from sglang_hybrid.core.records.pins import Pins
from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.core.returns.history import HistoryMatch
from sglang_hybrid.core.victims.eviction import Policy
from sglang_hybrid.core.victims.pool import Pool, Scarce
from sglang_hybrid.serving.stored_keys import is_exact_part

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.core.victims.coding import Codable


class ShadowTree:
    """The records of one `HybridRadixCache`.

    Args:
        cost: FLOPs from the model's config, bytes from the pools that were allocated.
        kv_policy: of the pool of KV.
        state_policy: of the pool of states, another object. Both may learn from one history, which
            is fed on while others are in force.
        has_states: False for a model without recurrent state. There every node can be resumed
            from, so every node counts as holding a state of no bytes.
        one_memory: KV and states share all bytes, so there is one pool, under `kv_policy`: a victim
            of either kind makes room for either.
        pins: what clients pin; nothing can be pinned without them.
    """

    follows_copies = False  # whether `sync` does anything

    def __init__(
        self,
        cost: CostModel,
        kv_policy: Policy,
        state_policy: Policy,
        *,
        has_states: bool,
        one_memory: bool = False,
        pins: Pins | None = None,
    ) -> None:
        self.cost = cost
        self._pins = pins
        self.has_states = has_states
        self.one_memory = one_memory
        self.history = kv_policy.history
        self.clock = Clock()
        self._kv_policy = kv_policy
        self._state_policy = kv_policy if one_memory else state_policy
        self._records: dict[int, Node] = {}
        self.victim_pool: Pool | None  # the pool that chose the last victim
        self._build()

    def _build(self) -> None:
        for record in self._records.values():  # their ids will be given anew
            self._kv_policy.forget(record)
            self._state_policy.forget(record)
        self.tree = NodeTree(self.clock, self._pins)
        self.tree.codes = bool(self.cost.coded)
        self._fill_pools()
        self._records = {}

    def _fill_pools(self) -> None:
        self.victim_pool = None
        scarce = Scarce.SHARED if self.one_memory else Scarce.KV
        self.kv_pool = self.state_pool = Pool(scarce, self.cost, self._kv_policy, self.clock)
        if not self.one_memory:
            self.state_pool = Pool(Scarce.STATES, self.cost, self._state_policy, self.clock)
        for pool in self.pools:
            self.tree.listen(pool)

    @property
    def pools(self) -> list[Pool]:
        """The pools that have candidates."""
        two = self.has_states and not self.one_memory
        return [self.kv_pool, self.state_pool] if two else [self.kv_pool]

    def use(self, kv_policy: Policy, state_policy: Policy) -> None:
        """Choose victims by these policies from now on. Records, locks and the history stay."""
        for pool in self.pools:
            self.tree.unlisten(pool)
        self._kv_policy = kv_policy
        self._state_policy = kv_policy if self.one_memory else state_policy
        self._fill_pools()

    # Changes of SGLang's tree

    def reset(self, root: UnifiedTreeNode) -> None:
        """The cache was emptied. The history is kept: what it has learnt is still true."""
        self._build()
        self._records[root.id] = self.tree.root
        self.tree.root.payload = root

    def on_add(self, node: UnifiedTreeNode) -> None:
        parent = self._records[node.parent.id]
        record = self.tree.add(parent, node.id, len(node.key))
        record.stays_exact = self.tree.codes and is_exact_part(node.key.extra_key)
        self._adopt(node, record)

    def on_split(self, head: UnifiedTreeNode, tail: UnifiedTreeNode) -> None:
        """The edge of `tail` was cut; `head` is the new node above it."""
        record = self.tree.split(self._records[tail.id], len(head.key), head.id, tail.id)
        self._adopt(head, record)

    def on_remove(self, node: UnifiedTreeNode) -> None:
        self.tree.remove(self._records.pop(node.id))

    def on_state_gain(self, node: UnifiedTreeNode, kind: Kind) -> None:
        self.tree.give_state(self._records[node.id], kind)

    def on_state_loss(self, node: UnifiedTreeNode) -> None:
        self.tree.drop_state(self._records[node.id])

    def on_kv_lock(self, node: UnifiedTreeNode, root: UnifiedTreeNode) -> None:
        """A request locks the KV of the path to `node`. The path above a locked node is locked
        already.
        """
        while node is not root:
            record = self._records[node.id]
            if record.kv_locked:
                return
            self.tree.lock(record, kv=True, state=record.state_locked)
            node = node.parent

    def on_kv_release(self, node: UnifiedTreeNode, root: UnifiedTreeNode) -> None:
        """A request no longer locks the KV of the path to `node`. The path above a node that stays
        locked stays locked, too.
        """
        while node is not root and not node.component_data[ComponentType.FULL].lock_ref:
            record = self._records[node.id]
            self.tree.lock(record, kv=False, state=record.state_locked)
            node = node.parent

    def on_state_lock(self, node: UnifiedTreeNode, held: bool) -> None:
        record = self._records.get(node.id)
        if record is not None and record is not self.tree.root:
            self.tree.lock(record, kv=record.kv_locked, state=held)

    def sync(self, node: UnifiedTreeNode) -> None:
        """Copies of `node` may have been added or dropped. Does nothing where there is one tier."""

    # Events of requests

    def on_arrival(self, stamp: float | None) -> None:
        """A request is looked up for the first time; `stamp`: seconds that it carries, or None."""
        self.clock.advance(stamp)
        self.tree.pins.expire()
        for pool in self.pools:
            pool.on_arrival()

    def is_pin_over(self, seconds: float) -> bool:
        """True if the time of a pin is over at `seconds`."""
        return seconds >= self.tree.pins.next_expiry

    def on_time(self, seconds: float) -> None:
        """Set the time, `seconds` on all ranks, and end pins that have expired."""
        self.clock.advance_to(seconds)
        self.tree.pins.expire()

    def on_hit(self, node: UnifiedTreeNode) -> None:
        record = self._records[node.id]
        if record is not self.tree.root:
            self.tree.hit(record)

    def on_request_end(
        self,
        tokens: npt.ArrayLike,
        input_len: int,
        node: UnifiedTreeNode,
        root: UnifiedTreeNode,
        boundaries: Sequence[int] = (),
        tenant: Hashable = None,
        history_match: HistoryMatch | None = None,
        hint: Hint | None = None,
        message_starts: Sequence[int] = (),
    ) -> None:
        """A request of `tenant` ended, and the history learns its sequence. node: the deepest one
        on its path in the tree. boundaries, message_starts: see `History.observe`. history_match:
        what its prompt had in common with the history, if that was looked up. hint: what the client
        said of its session.
        """
        if self.history is None:
            return
        history_path = self.history.observe(
            tokens, input_len, self.clock, boundaries, history_match, tenant, hint, message_starts
        )
        while node is not root:
            record = self._records[node.id]
            self.tree.link_history(record, history_path.at(record.depth))
            node = node.parent

    # Eviction

    def kv_victim(self) -> UnifiedTreeNode | None:
        """The leaf whose KV is evicted next, or None."""
        self.victim_pool = self.kv_pool
        return _payload(self.kv_pool.victim())

    def state_victim(self) -> UnifiedTreeNode | None:
        """The node whose state is evicted next; one with several children only if there is no
        other.
        """
        self.victim_pool = self.state_pool
        return _payload(self.state_pool.victim(last_resort=True))

    def codable(self, node: UnifiedTreeNode) -> Codable | None:
        """The part of `node`, the last victim, that is to be coded; None if it is to be evicted."""
        return self.victim_pool.codable(self._records[node.id]) if self.victim_pool else None

    # Admission

    def match_history(
        self, prompt: array[int], tenant: Hashable = None, last: HistoryMatch | None = None
    ) -> HistoryMatch | None:
        """The common part of a prompt and its tenant's history, before its prefill; None for a
        policy without a history. last: what an earlier look-up of the prompt found.
        """
        history = self._state_policy.history
        return None if history is None else history.match(prompt, tenant, last)

    # Checks

    def check(self, root: UnifiedTreeNode, *, kv_tokens: int, states: int) -> None:
        """Compare every record with SGLang's tree under `root`, and the pools with the records.

        kv_tokens, states: what SGLang accounts for, held and evictable together. Raises
        AssertionError that lists what differs.
        """
        self.tree.settle(len(self._records))
        problems = [f"root: {self.tree.root!r}"] if self._records[root.id].parent else []
        seen = 0
        tokens = held_states = 0
        stack = [(root, 0, 0)]
        while stack:
            node, depth, anchor_depth = stack.pop()
            record = self._records.get(node.id)
            seen += 1
            if record is None:
                problems.append(f"node {node.id} has no record")
                continue
            if node is not root:
                problems += self._differences(node, record, depth, anchor_depth)
                kv_held, state_held = self._device_holds(record)
                kv = node.component_data[ComponentType.FULL].value
                state = node.component_data[ComponentType.MAMBA].value
                tokens += len(kv) if record.coded_kv else record.tokens * kv_held
                held_states += len(state) if record.coded_state else state_held
                anchor_depth = depth if record.has_state else anchor_depth
            children = {child.id: self._records.get(child.id) for child in node.children.values()}
            if record.children != children:
                problems.append(f"node {node.id} has children {list(children)}, not {record!r}'s")
            stack += [
                (child, depth + len(child.key), anchor_depth) for child in node.children.values()
            ]
        if seen != len(self._records):
            problems.append(f"{len(self._records)} records of {seen} nodes")
        if tokens != kv_tokens:
            problems.append(f"{tokens} tokens in records, {kv_tokens} in SGLang's account")
        if self.has_states and held_states != states:
            problems.append(f"{held_states} states in records, {states} in SGLang's account")
        for pool in self.pools:
            problems += pool.check(self.tree.walk())
        if problems:
            raise AssertionError("the shadow tree differs from the tree: " + "; ".join(problems))

    def record(self, node: UnifiedTreeNode) -> Node:
        """The record of a node of SGLang's tree."""
        return self._records[node.id]

    def by_id(self, node_id: int) -> Node | None:
        """The record of the node of SGLang's tree with this id; None if that is gone."""
        return self._records.get(node_id)

    def __contains__(self, node: UnifiedTreeNode) -> bool:
        """True if `node` is in SGLang's tree still."""
        record = self._records.get(node.id)
        return record is not None and record.payload is node

    def __len__(self) -> int:
        return len(self._records)

    def _adopt(self, node: UnifiedTreeNode, record: Node) -> None:
        record.payload = node
        self._records[node.id] = record
        if not self.has_states:
            times = record.last_used, record.stamp
            self.tree.give_state(record, Kind.UNKNOWN)
            record.last_used, record.stamp = times

    def _device_holds(self, record: Node) -> tuple[bool, bool]:
        """True if the device has the KV of a record, and its state."""
        return True, record.has_state

    def _has_a_state(self, node: UnifiedTreeNode) -> bool:
        """True if a request can resume from the state of `node`, by SGLang's tree."""
        return node.component_data[ComponentType.MAMBA].value is not None

    def _differences(
        self, node: UnifiedTreeNode, record: Node, depth: int, anchor_depth: int
    ) -> list[str]:
        kv = node.component_data[ComponentType.FULL]
        state = node.component_data[ComponentType.MAMBA] if self.has_states else None
        is_ = {
            "payload": record.payload,
            "key": record.key,
            "tokens": record.tokens,
            "depth": record.depth,
            "anchor depth": record.anchor_depth,
            "state": record.has_state,
            "KV held": record.kv_locked,
            "state held": record.state_locked,
        }
        should_be = {
            "payload": node,
            "key": node.id,
            "tokens": len(node.key),
            "depth": depth,
            "anchor depth": anchor_depth,
            "state": state is None or self._has_a_state(node),
            "KV held": kv.lock_ref > 0,
            "state held": state is not None and state.lock_ref > 0,
        }
        return [
            f"node {node.id}: {name} is {is_[name]}, not {value}"
            for name, value in should_be.items()
            if is_[name] != value
        ]


def _payload(record: Node | None) -> UnifiedTreeNode | None:
    return None if record is None else record.payload
