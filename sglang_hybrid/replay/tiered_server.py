"""A served cache in tiers: the pools and checkpoints of `ServerSimulator`, and below the device
what `HybridRadixCache` keeps with HiCache, by the same judgements of `core`.

What an ended request left is copied to the host if it is worth it, and what the host gets is
written to the disk. A request loads from the host; what only the disk has comes to the host first.
Transfers are done before the next request comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from sglang_hybrid.core.admission import MIN_BRANCH_TOKENS
from sglang_hybrid.core.cost import CostModel
from sglang_hybrid.core.eviction import Policy
from sglang_hybrid.core.nodes import Clock, Kind, Node
from sglang_hybrid.core.places import Unit, Way, copies_of, way_without_loads, ways
from sglang_hybrid.core.pool import Pool, Scarce
from sglang_hybrid.core.rates import Rates, Tier
from sglang_hybrid.core.served_pool import ServedTierPool
from sglang_hybrid.core.serving import ServedTiers, Serving, Split
from sglang_hybrid.core.tier_pool import TierPool
from sglang_hybrid.core.writing import CopyJudge, average_returns, was_forgotten
from sglang_hybrid.replay.server_simulator import Running, ServerSimulator, way_to
from sglang_hybrid.replay.simulator import Ticket
from sglang_hybrid.replay.tier_budgets import TierBudgets
from sglang_hybrid.replay.tier_simulator import TieredSimulator
from sglang_hybrid.replay.traces import Request

OFFLOADED: Final = 16
"""Next victims of each pool that are copied after a request, above the watermark."""


class TieredServerSimulator(ServerSimulator, TieredSimulator):
    """A `ServerSimulator` above the tiers of `below`. The device and the host have one policy for
    KV and one for states, as in the server.
    """

    has_states = True

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
        self._uses: Counter[Node] = Counter()  # requests that left a node or passed it
        self._due: dict[Node, None] = {}  # to be copied when a request has ended
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
        self._judge = CopyJudge(
            self,
            self._free_on_host,
            lambda: average_returns(self.counts.loads[Tier.HOST], self.demoted),
        )

    def _tier_pool(self, tier: Tier, scarce: Scarce, policy: Policy) -> TierPool:
        down = Tier.HOST if tier is Tier.DEVICE and self.below.write_back else None
        clock = self.tree.clock
        pool = ServedTierPool(tier, scarce, self.cost, policy, clock, self.speeds, down)
        self.tree.listen(pool)
        return pool

    # What `core.writing` judges by.

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
        path = _path_to(hit)
        missing = [node for node in path if not copies_of(node).has_kv(Tier.DEVICE)]
        state = hit is not self.tree.root and not copies_of(hit).has_state(Tier.DEVICE)
        if not missing and not state:
            return hit
        kv = sum(node.tokens for node in missing)
        if self._make_room_in(Tier.DEVICE, kv, 1 + state, path):  # a slot of its own besides
            for node in missing:
                self.placement.add_kv(node, Tier.DEVICE)
            self.placement.add_state(hit, Tier.DEVICE)
            return hit
        way = way_without_loads(path, request.input_len, self.cost, self.speeds.speeds)
        resident = next((node for node in path if node.depth == way.depth), None)
        if resident is None or not self._room_beside(resident):
            return self.tree.root
        return resident

    def finished(self, ticket: Ticket) -> None:
        super().finished(ticket)
        due, self._due = self._due, {}
        under_way: list[tuple[Node, Tier]] = []  # they begin together, and stay until they are done
        for node in due:
            under_way += self._hold(self._copy_to_host(node))
        self._let_go(under_way)
        if self._used_share() > self.below.watermark:
            self._offload()

    def _take_kv(self, running: Running, deepest: Node, new: int) -> None:
        for node in _path_to(deepest):
            self.placement.add_kv(node, Tier.DEVICE)
            if node.depth > running.inserted:
                self._uses[node] += 1
                often = self._uses[node] >= self.below.least_uses
                if often and not copies_of(node).has_kv(Tier.HOST):
                    self._is_due(node)

    def _take_state(self, node: Node, kind: Kind) -> None:
        self.tree.give_state(node, kind)
        self.placement.add_state(node, Tier.DEVICE)
        if copies_of(node).has_kv(Tier.HOST) and _lacks_copy(node):
            self._is_due(node)

    def _is_due(self, node: Node) -> None:
        """`node` may be copied once the request has ended."""
        if not self.below.write_back:
            self._due[node] = None

    def _cut(self, node: Node, depth: int) -> Node:
        head = super()._cut(node, depth)
        self._uses[head] = self._uses[node]
        return head

    def _remove(self, node: Node, last: Tier) -> None:
        super()._remove(node, last)
        self._uses.pop(node, None)
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

    def _used_share(self) -> float:
        """The share of the device's memory that is in use, of the fuller pool if there are two."""
        if isinstance(self.memory, Split):
            kv = self.placement.kv_tokens[Tier.DEVICE] + self.kv_in_use
            states = 1 - self.free_states / max(1, self.memory.slots)
            return max(kv / max(1, self.memory.kv_tokens), states)
        return self.used / max(1, self.memory)

    # Copies.

    def _copy_to_host(self, node: Node) -> list[Node]:
        """Copy `node` and the KV that it needs above it, if that is worth it. Returns the nodes
        that were copied.
        """
        copies = copies_of(node)
        missing = not copies.has_kv(Tier.HOST) or _lacks_copy(node)
        if not missing or not copies.has_kv(Tier.DEVICE) or was_forgotten(node):
            return []
        return self._copy_down(node) if self._worth(node) else []

    def _worth(self, node: Node) -> bool:
        if copies_of(node).kv_children[Tier.HOST]:
            return True  # what the host has below it would be lost
        return copies_of(node).has_state(Tier.DEVICE) and self._judge.worth_resuming(node)

    def _copy_down(self, node: Node) -> list[Node]:
        """From the first KV that the host has not, as far as room can be made. What that continues
        stays on the host meanwhile. Returns the nodes that were copied.
        """
        path = _path_to(node)
        first = next((i for i, n in enumerate(path) if not copies_of(n).has_kv(Tier.HOST)), -1)
        missing = path[first:]
        stays = path[first - 1 : first] if first > 0 else []
        for number, each in enumerate(missing):
            kv = not copies_of(each).has_kv(Tier.HOST)
            state = _lacks_copy(each) and self._judge.worth_resuming(each)
            if not self._make_room_in(Tier.HOST, kv * each.tokens, int(state), [*stays, each]):
                return missing[:number]
            self._add(Tier.HOST, each, kv=kv, state=state)
            self._write_to_disk(each)
            stays.append(each)
        return missing

    def _write_to_disk(self, node: Node) -> None:
        copies = copies_of(node)
        kv = copies.has_kv(Tier.HOST) and not copies.has_kv(Tier.DISK)
        state = copies.has_state(Tier.HOST) and not copies.has_state(Tier.DISK)
        if (
            self.below.disk
            and (kv or state)
            and self._take(Tier.DISK, node, kv=kv, state=state, needed=True)
        ):
            self._add(Tier.DISK, node, kv=kv, state=state)

    def _read_ahead(self, path: Sequence[Node]) -> None:
        """Bring to the host what the disk has of the way to the deepest state on `path`, if that
        saves enough tokens and the host has room.
        """
        deepest = next((node for node in reversed(path) if node.has_state), None)
        if deepest is None:
            return
        passed = [node for node in path if node.depth <= deepest.depth]
        missing = [node for node in passed if not _held(node, copies_of(node).kv)]
        state = not _held(deepest, copies_of(deepest).state)
        tokens = sum(node.tokens for node in missing)
        if tokens < self.below.least_read:
            return
        if self._make_room_in(Tier.HOST, tokens, int(state), passed):
            for node in missing:
                self.placement.add_kv(node, Tier.HOST)
            if state:
                self.placement.add_state(deepest, Tier.HOST)

    def _offload(self) -> None:
        """What the device would give up next is copied while nothing waits."""
        pools = dict.fromkeys(self.pools[Tier.DEVICE])
        for pool in pools:
            for node in pool.next_victims(OFFLOADED):
                if not copies_of(node).has_kv(Tier.HOST) or _lacks_copy(node):
                    self._copy_to_host(node)

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

    def _demote(self, node: Node, unit: Unit) -> None:
        backed, write_back = copies_of(node).has_kv(Tier.HOST), self.below.write_back
        if unit.kv and not backed:
            wanted = write_back and self._worth(node)
        else:
            ready = (backed or write_back) and unit.state and _lacks_copy(node)
            wanted = ready and self._judge.worth_resuming(node)
        if wanted:
            held = self._hold([node])
            self._copy_down(node)
            self._let_go(held)


def _lacks_copy(node: Node) -> bool:
    """Whether the device has a state of `node`, and the host has not."""
    copies = copies_of(node)
    return copies.has_state(Tier.DEVICE) and not copies.has_state(Tier.HOST)


def _held(node: Node, tiers: int) -> bool:
    """Whether the device or the host is among `tiers`, a mask."""
    return bool(tiers & (1 << Tier.DEVICE | 1 << Tier.HOST))


def _at_hand(path: Iterable[Node]) -> list[Node]:
    """The nodes of `path` before the first whose KV neither the device nor the host has."""
    found: list[Node] = []
    for node in path:
        if not _held(node, copies_of(node).kv):
            break
        found.append(node)
    return found


def _path_to(node: Node) -> list[Node]:
    """`node` and all above it but the root, parents first."""
    return list(way_to(node))[::-1]


def _bytes_of(room: Split | int, cost: CostModel) -> int:
    if isinstance(room, int):
        return room
    return room.kv_tokens * cost.kv_bytes_per_token + room.slots * cost.state_bytes
