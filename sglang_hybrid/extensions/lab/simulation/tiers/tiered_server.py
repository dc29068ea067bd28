"""A served cache in tiers, replayed: the pools and checkpoints of `ServerSimulator`, and below the
device what `HybridRadixCache` keeps with HiCache.

An entry is copied to the host before the device evicts it, if it is worth that, or as soon as the
request that left it has ended; copies on the host are written to the disk (`served_copies.py`). A
request loads from the host; objects that only the disk has come to the host first. Transfers are
done before the next request comes.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_hybrid.core.costs.cost import MIN_BRANCH_TOKENS, CostModel
from sglang_hybrid.core.records.nodes import Kind, Node
from sglang_hybrid.core.server_settings import ServedTiers, Serving, Split
from sglang_hybrid.core.tiers.places import cheapest, copies_of, is_exact, way_without_loads, ways
from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.core.victims.eviction import Policy
from sglang_hybrid.extensions.lab.simulation.server_simulator import Running, ServerSimulator
from sglang_hybrid.extensions.lab.simulation.simulator import Ticket
from sglang_hybrid.extensions.lab.simulation.tiers.served_copies import (
    above_disk,
    lacks_copy,
    path_to,
    served_memory,
)
from sglang_hybrid.extensions.lab.simulation.tiers.tiered_memory import TieredMemory


class TieredServerSimulator(ServerSimulator):
    """A `ServerSimulator` above the tiers of `below`."""

    memory: TieredMemory

    def __init__(
        self,
        cost: CostModel,
        budget: Split | int,
        policy: Policy,
        state_policy: Policy,
        below: ServedTiers,
        min_branch_tokens: int = MIN_BRANCH_TOKENS,
        serving: Serving | None = None,
    ) -> None:
        self.below = below
        self._due: dict[Node, None] = {}  # to be copied when a request has ended
        self._read_by_loads: list[tuple[Node, Tier]] = []
        memory, self.copies = served_memory(cost, budget, below, policy, state_policy)
        super().__init__(
            cost, budget, policy, state_policy, min_branch_tokens, serving, memory=memory
        )

    # Look-ups and loads of requests.

    def _match(self, request: Request) -> tuple[Node, int]:
        path, _ = self._find(request)
        self.copies.read_ahead(path)
        path = above_disk(path)
        stored = path[-1].depth if path else 0
        known = [
            way
            for way in ways(path, request.input_len, self.cost, self.below.speeds)
            if way.state_tier is not Tier.DISK
        ]
        way = cheapest(known)
        self.memory.counts.count_way(way, known, self.memory.room)
        hit = next((node for node in path if node.depth == way.depth), self.tree.root)
        if way.depth and not any(way.load_bytes) and not self._room_beside(hit):
            hit = self.tree.root
        return hit, stored

    def _load(self, request: Request, hit: Node) -> Node:
        node = self._resume_at(request, hit)
        self.memory.counts.count_resumed(node.depth, exact=is_exact(path_to(node)))
        return node

    def _resume_at(self, request: Request, hit: Node) -> Node:
        """Load what `hit` lacks on the device; where that cannot be, the next best node."""
        path = path_to(hit)
        missing = [node for node in path if not copies_of(node).has_kv(Tier.DEVICE)]
        state = hit is not self.tree.root and not copies_of(hit).has_state(Tier.DEVICE)
        if not missing and not state:
            return hit
        kv = sum(node.tokens for node in missing)
        if self._make_room_to_load(path, kv, 1 + state):  # a slot of its own besides
            placement = self.memory.placement
            for node in missing:
                placement.add_kv(node, Tier.DEVICE)
            placement.add_state(hit, Tier.DEVICE)
            for node in [*missing, hit]:
                copies_of(node).inexact |= not self.below.exact
            if self.below.write_back:  # SGLang holds what is read until it has arrived
                self._read_by_loads += self.memory.pin([*missing, hit], Tier.HOST)
            return hit
        way = way_without_loads(path, request.input_len, self.cost, self.below.speeds)
        resident = next((node for node in path if node.depth == way.depth), None)
        if resident is None or not self._room_beside(resident):
            return self.tree.root
        return resident

    def _make_room_to_load(self, path: Sequence[Node], kv: int, states: int) -> bool:
        """Make room to load the end of `path`. Host copies of states above what is loaded may be
        evicted meanwhile.
        """
        memory = self.memory
        if not memory.could_fit_in(Tier.DEVICE, kv, states, path):
            return False
        loaded = [node for node in path[:-1] if not copies_of(node).has_kv(Tier.DEVICE)]
        pinned = [
            *memory.pin(path, Tier.DEVICE),
            *memory.pin([*loaded, path[-1]], Tier.HOST),
        ]
        had = memory.make_room_in(Tier.DEVICE, kv, states, [])
        memory.unpin(pinned)
        return had

    def _grow(self, running: Running, length: int) -> bool:
        if running.allocated > running.outcome.hit_len:  # its first forward waited for its load
            self._end_loads()
        return super()._grow(running, length)

    def _end_loads(self) -> None:
        self.memory.unpin(self._read_by_loads)
        self._read_by_loads = []

    # Storing and copying at the end of requests.

    def _take_kv(self, running: Running, deepest: Node, new: int) -> None:
        for node in path_to(deepest):
            self.memory.placement.add_kv(node, Tier.DEVICE)
            if node.depth > running.inserted:
                copies_of(node).uses += 1
                if not copies_of(node).has_kv(Tier.HOST):
                    self._is_due(node)

    def _take_state(self, node: Node, kind: Kind) -> None:
        self.tree.give_state(node, kind)
        self.memory.placement.add_state(node, Tier.DEVICE)
        if copies_of(node).has_kv(Tier.HOST) and lacks_copy(node):
            self._is_due(node)

    def _is_due(self, node: Node) -> None:
        """`node` may be copied once the request has ended."""
        if self.below.at_once and not self.below.write_back:
            self._due[node] = None

    def finish(self, ticket: Ticket) -> None:
        self._end_loads()
        super().finish(ticket)
        due, self._due = self._due, {}
        self.copies.copy_together(due)
        self.copies.copy_together(self.copies.next_victims())
