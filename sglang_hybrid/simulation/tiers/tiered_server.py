"""A served cache in tiers: the pools and checkpoints of `ServerSimulator`, and below the device
what `HybridRadixCache` keeps with HiCache, by the same judgements of `core`.

What the device is about to give up is copied to the host if it is worth it, or at once what an
ended request left, and what the host gets is written to the disk. A request loads from the host;
what only the disk has comes to the host first.
Transfers are done before the next request comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from sglang_hybrid.core.checkpoints.admission import MIN_BRANCH_TOKENS
from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.nodes import Clock, Kind, Node
from sglang_hybrid.core.server_settings import ServedTiers, Serving, Split
from sglang_hybrid.core.tiers.places import ALL_TIERS, Way, copies_of, way_without_loads, ways
from sglang_hybrid.core.tiers.rates import Rates, Tier
from sglang_hybrid.core.tiers.served_pool import ServedTierPool
from sglang_hybrid.core.tiers.tier_pool import TierPool
from sglang_hybrid.core.tiers.writes import CopyJudge, average_returns
from sglang_hybrid.core.victims.eviction import Policy
from sglang_hybrid.core.victims.pool import Pool, Scarce
from sglang_hybrid.simulation.server_simulator import Running, ServerSimulator
from sglang_hybrid.simulation.simulator import Ticket
from sglang_hybrid.simulation.tiers.served_copies import (
    ServedCopies,
    held_above_disk,
    lacks_copy,
    path_to,
)
from sglang_hybrid.simulation.tiers.tier_budgets import TierBudgets
from sglang_hybrid.simulation.tiers.tier_simulator import TieredSimulator, is_exact
from sglang_hybrid.simulation.traces.requests import Request


class TieredServerSimulator(ServerSimulator, ServedCopies):
    """A `ServerSimulator` above the tiers of `below`. The device and the host have one policy for
    KV and one for states, as in the server.
    """

    has_states = True
    counted = 1 << Tier.DEVICE | 1 << Tier.HOST  # the server's tree does not know what is on disk

    def __init__(
        self,
        cost: CostModel,
        memory: Split | int,
        policy: Policy,
        state_policy: Policy,
        below: ServedTiers,
        min_branch_tokens: int = MIN_BRANCH_TOKENS,
        serving: Serving | None = None,
    ) -> None:
        self.below = below
        self.speeds = Rates(below.speeds)
        self.demoted = 0
        self.uses = Counter()
        self._due: dict[Node, None] = {}  # to be copied when a request has ended
        self._under_way: list[tuple[Node, Tier]] = []  # what loads read
        device, host = (_bytes_of(room, cost) for room in (memory, below.host))
        tiers = TierBudgets.of(max(1, device), max(1, host), below.disk)
        rooms: list[int | Split] = [memory, below.host, below.disk][: len(tiers.present)]
        TieredSimulator.__init__(
            self,
            cost,
            tiers,
            below.speeds,
            [policy] * len(rooms),
            min_branch_tokens,
            rooms,
            [state_policy] * len(rooms),
        )
        self._serve_in(memory, serving)
        self.judge = CopyJudge(
            self,
            self._free_on_host,
            lambda: average_returns(self.counts.loads[Tier.HOST], self.demoted),
        )

    def _tier_pool(self, tier: Tier, scarce: Scarce, policy: Policy) -> TierPool:
        clock = self.tree.clock
        counted = ALL_TIERS if tier is Tier.DISK else self.counted
        pool = ServedTierPool(tier, scarce, self.cost, policy, clock, self.speeds, None, counted)
        self.tree.listen(pool)
        return pool

    # What `core.tiers.writes` judges by.

    @property
    def clock(self) -> Clock:
        return self.tree.clock

    @property
    def host_kv_pool(self) -> ServedTierPool:
        return self._host_pool(Scarce.KV)

    @property
    def host_state_pool(self) -> ServedTierPool:
        return self._host_pool(Scarce.STATES)

    def _host_pool(self, kind: Scarce) -> ServedTierPool:
        pool = self.pools[Tier.HOST][kind is Scarce.STATES]
        assert isinstance(pool, ServedTierPool)
        return pool

    def _free_on_host(self, kind: Scarce) -> int:
        host, placement = self.below.host, self.placement
        if kind is Scarce.STATES:
            return host.slots - placement.states[Tier.HOST]
        return host.kv_tokens - placement.kv_tokens[Tier.HOST]

    # A request: what it finds, what it loads, what it leaves.

    def _match(self, request: Request) -> tuple[Node, int]:
        path, _ = self._find(request)
        if self.below.disk:
            self._read_ahead(path)
        path = _at_hand(path)
        stored = path[-1].depth if path else 0
        known = list(ways(path, request.input_len, self.cost, self.speeds.speeds))
        way = self._choose([way for way in known if way.state_tier is not Tier.DISK])
        self._count_hit(way, known)
        hit = next((node for node in path if node.depth == way.depth), self.tree.root)
        if way.depth and not any(way.load_bytes) and not self._room_beside(hit):
            hit = self.tree.root
        return hit, stored

    def _count_hit(self, way: Way, known: Sequence[Way]) -> None:
        super()._count_hit(way, [one for one in known if one.state_tier is not Tier.DISK])

    def _load(self, request: Request, hit: Node) -> Node:
        node = self._resume_at(request, hit)
        self.counts.resumed(node.depth, exact=is_exact(path_to(node)))
        return node

    def _resume_at(self, request: Request, hit: Node) -> Node:
        """Load what `hit` lacks on the device; where that cannot be, the next best node."""
        path = path_to(hit)
        missing = [node for node in path if not copies_of(node).has_kv(Tier.DEVICE)]
        state = hit is not self.tree.root and not copies_of(hit).has_state(Tier.DEVICE)
        if not missing and not state:
            return hit
        kv = sum(node.tokens for node in missing)
        if self._room_to_load(path, kv, 1 + state):  # a slot of its own besides
            for node in missing:
                self.placement.add_kv(node, Tier.DEVICE)
            self.placement.add_state(hit, Tier.DEVICE)
            for node in [*missing, hit]:
                copies_of(node).inexact |= not self.below.exact
            if self.below.write_back:  # SGLang holds what is read until it has arrived
                self._under_way += self._hold_on(Tier.HOST, [*missing, hit])
            return hit
        way = way_without_loads(path, request.input_len, self.cost, self.speeds.speeds)
        resident = next((node for node in path if node.depth == way.depth), None)
        if resident is None or not self._room_beside(resident):
            return self.tree.root
        return resident

    def _grow(self, running: Running, length: int) -> bool:
        if running.allocated > running.outcome.hit_len:  # its first forward waited for its load
            self._loads_arrived()
        return super()._grow(running, length)

    def _loads_arrived(self) -> None:
        self._let_go(self._under_way)
        self._under_way = []

    def _room_to_load(self, path: Sequence[Node], kv: int, states: int) -> bool:
        """Make room to load the end of `path`. Host copies of states above what is loaded may go
        meanwhile.
        """
        if not self._could_fit_in(Tier.DEVICE, kv, states, path):
            return False
        loaded = [node for node in path[:-1] if not copies_of(node).has_kv(Tier.DEVICE)]
        held = [
            *self._hold_on(Tier.DEVICE, path),
            *self._hold_on(Tier.HOST, [*loaded, path[-1]]),
        ]
        had = self._make_room_in(Tier.DEVICE, kv, states, [])
        self._let_go(held)
        return had

    def finished(self, ticket: Ticket) -> None:
        self._loads_arrived()
        super().finished(ticket)
        due, self._due = self._due, {}
        self._copy_together(due)
        self._copy_together(self._next_victims())

    def _copy_together(self, nodes: Iterable[Node]) -> None:
        """Copies that begin together stay until all of them are done."""
        under_way: list[tuple[Node, Tier]] = []
        for node in nodes:
            under_way += self._hold(self._copy_to_host(node))
        self._let_go(under_way)

    def _next_victims(self) -> list[Node]:
        """What the device would give up until no more than the watermark of it is used."""
        pools = dict.fromkeys(self.pools[Tier.DEVICE])
        found = [node for pool in pools for node in pool.next_victims(self._above_watermark(pool))]
        return list(dict.fromkeys(found))

    def _take_kv(self, running: Running, deepest: Node, new: int) -> None:
        for node in path_to(deepest):
            self.placement.add_kv(node, Tier.DEVICE)
            if node.depth > running.inserted:
                self.uses[node] += 1
                if not copies_of(node).has_kv(Tier.HOST):
                    self._is_due(node)

    def _take_state(self, node: Node, kind: Kind) -> None:
        self.tree.give_state(node, kind)
        self.placement.add_state(node, Tier.DEVICE)
        if copies_of(node).has_kv(Tier.HOST) and lacks_copy(node):
            self._is_due(node)

    def _is_due(self, node: Node) -> None:
        """`node` may be copied once the request has ended."""
        if self.below.at_once and not self.below.write_back:
            self._due[node] = None

    def _cut(self, node: Node, depth: int) -> Node:
        head = super()._cut(node, depth)
        self.uses[head] = self.uses[node]
        return head

    def _remove(self, node: Node, last: Tier) -> None:
        super()._remove(node, last)
        self.uses.pop(node, None)
        self._due.pop(node, None)

    def _pin_below(self, node: Node, pinned: bool) -> None:
        """A running request has all that it holds on the device."""

    # Room.

    @property
    def used(self) -> int:
        """Bytes on the device, those of running requests among them."""
        cached = self.placement.used(Tier.DEVICE, self.cost)
        return cached + self._bytes(self.kv_in_use, self.slots_in_use)

    @property
    def free_states(self) -> int:
        if isinstance(self.memory, Split):
            return self.memory.slots - self.placement.states[Tier.DEVICE] - self.slots_in_use
        return (self.memory - self.used) // self.cost.state_bytes

    def _short(self, kv: int, states: int) -> Pool | None:
        return self._short_of(Tier.DEVICE, kv, states)

    def _short_of(self, tier: Tier, kv: int, states: int) -> TierPool | None:
        if tier is Tier.DEVICE:
            kv, states = kv + self.kv_in_use, states + self.slots_in_use
        return super()._short_of(tier, kv, states)

    def _could_fit_in(self, tier: Tier, kv: int, states: int, path: Sequence[Node]) -> bool:
        if tier is Tier.DEVICE:
            kv, states = kv + self.kv_in_use, states + self.slots_in_use
        return super()._could_fit_in(tier, kv, states, path)

    def _above_watermark(self, pool: TierPool) -> int:
        """Bytes in use of what is scarce in `pool` of the device, above the watermark."""
        used, whole = self.used, self.memory
        if isinstance(whole, Split):
            kv, states = self.placement.kv_tokens[Tier.DEVICE], self.placement.states[Tier.DEVICE]
            if pool.scarce is Scarce.STATES:
                used, whole = (
                    self._bytes(0, states + self.slots_in_use),
                    self._bytes(0, whole.slots),
                )
            else:
                used, whole = self._bytes(kv + self.kv_in_use, 0), self._bytes(whole.kv_tokens, 0)
        return used - int(self.below.watermark * whole)

    # Victims.

    def _evict_from(self, pool: Pool, node: Node) -> None:
        """Of what leaves the device, the host may take a copy first."""
        assert isinstance(pool, TierPool)
        unit = pool.unit(node)
        assert unit is not None
        if pool.tier is Tier.DEVICE:
            self._demote(node, unit)
            self.demoted += unit.state and copies_of(node).has_state(Tier.HOST)
        self._drop(node, unit, pool.tier)


def _at_hand(path: Iterable[Node]) -> list[Node]:
    """The nodes of `path` before the first whose KV neither the device nor the host has."""
    found: list[Node] = []
    for node in path:
        if not held_above_disk(node, copies_of(node).kv):
            break
        found.append(node)
    return found


def _bytes_of(room: Split | int, cost: CostModel) -> int:
    if isinstance(room, int):
        return room
    return room.kv_tokens * cost.kv_bytes_per_token + room.slots * cost.state_bytes
