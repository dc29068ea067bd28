"""Copies to the host, writes to the disk and reads from there in a replayed server: as
`HybridRadixCache` does it with HiCache, by the same judgement of `core.tiers.writes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.nodes import Clock, Kind, Node
from sglang_hybrid.core.server_settings import ServedTiers, Split
from sglang_hybrid.core.tiers.places import ALL_TIERS, Placement, Unit, copies_of
from sglang_hybrid.core.tiers.rates import Rates, Tier
from sglang_hybrid.core.tiers.tier_pool import TierPool
from sglang_hybrid.core.tiers.writes import AverageReturns, CopyJudge
from sglang_hybrid.core.victims.eviction import Policy
from sglang_hybrid.core.victims.pool import Scarce
from sglang_hybrid.extensions.lab.simulation.device_memory import pools_of
from sglang_hybrid.extensions.lab.simulation.server_simulator import way_to
from sglang_hybrid.extensions.lab.simulation.tiers.tiered_memory import TieredMemory
from sglang_hybrid.extensions.lab.simulation.token_tree import TokenTree

ABOVE_DISK = 1 << Tier.DEVICE | 1 << Tier.HOST
"""Tiers that the server's tree knows of."""


class ServedCopies:
    """Copies between the tiers of `below`, in `memory`; `judge` says which are worth it.

    demoted: states that the device evicted and the host kept.
    """

    has_states = True

    def __init__(self, memory: TieredMemory, below: ServedTiers) -> None:
        self.memory = memory
        self.below = below
        self.demoted = 0
        self.cost: CostModel = memory.cost
        self.speeds = Rates(below.speeds)
        self.judge = CopyJudge(
            self,
            self._free_on_host,
            AverageReturns(lambda: (memory.counts.loads[Tier.HOST], self.demoted)).now,
        )

    # Attributes that `core.tiers.writes` reads.

    @property
    def clock(self) -> Clock:
        return self.memory.tree.clock

    @property
    def placement(self) -> Placement:
        return self.memory.placement

    @property
    def host_kv_pool(self) -> TierPool:
        return self.memory.pools[Tier.HOST][0]

    @property
    def host_state_pool(self) -> TierPool:
        return self.memory.pools[Tier.HOST][1]

    def _free_on_host(self, kind: Scarce) -> int:
        host, placement = self.below.host, self.memory.placement
        if kind is Scarce.STATES:
            return host.slots - placement.states[Tier.HOST]
        return host.kv_tokens - placement.kv_tokens[Tier.HOST]

    # To the host, and from there to the disk.

    def before_eviction(self, pool: TierPool, node: Node, unit: Unit) -> None:
        """Copy an entry to the host before it is evicted, with write_back or if its KV is there."""
        if pool.tier is not Tier.DEVICE:
            return
        if copies_of(node).has_kv(Tier.HOST) or self.below.write_back:
            pinned = self.memory.pin([node])
            self._copy_to_host(node)
            self.memory.unpin(pinned)
        self.demoted += unit.state and copies_of(node).has_state(Tier.HOST)

    def copy_together(self, nodes: Iterable[Node]) -> None:
        """Copy those of `nodes` that are worth it to the host. Copies that begin together stay
        until all of them are done.
        """
        under_way: list[tuple[Node, Tier]] = []
        for node in nodes:
            under_way += self.memory.pin(self._copy_to_host(node))
        self.memory.unpin(under_way)

    def next_victims(self) -> list[Node]:
        """The nodes that the device would evict next until no more than the watermark of it is
        used.
        """
        pools = dict.fromkeys(self.memory.pools[Tier.DEVICE])
        found = [node for pool in pools for node in pool.next_victims(self._above_watermark(pool))]
        return list(dict.fromkeys(found))

    def _above_watermark(self, pool: TierPool) -> int:
        """Bytes of the device in use above the watermark, of what is scarce in `pool`."""
        memory, budget = self.memory, self.memory.budget
        if isinstance(budget, Split):
            if pool.scarce is Scarce.STATES:
                used = memory.bytes_of(0, memory.states_used + memory.slots_in_use)
                whole = memory.bytes_of(0, budget.slots)
            else:
                used = memory.bytes_of(memory.kv_used + memory.kv_in_use, 0)
                whole = memory.bytes_of(budget.kv_tokens, 0)
        else:
            assert budget is not None
            used, whole = memory.used, budget
        return used - int(self.below.watermark * whole)

    def _copy_to_host(self, node: Node) -> list[Node]:
        """Copy `node` and the KV that it needs above it, if that is worth it. Returns the nodes
        that were copied.
        """
        copies = copies_of(node)
        missing = not copies.has_kv(Tier.HOST) or lacks_copy(node)
        if not missing or not copies.has_kv(Tier.DEVICE):
            return []
        if not self.judge.can_judge(node, copies.uses, self.below.least_uses):
            return []
        return self._copy_down(node) if self.judge.accepts(node) else []

    def _copy_down(self, node: Node) -> list[Node]:
        """Copy the path to `node` from the first KV that the host lacks, as far as there is room.
        The node before it stays on the host meanwhile. Returns the nodes that were copied.
        """
        memory, path = self.memory, path_to(node)
        first = next((i for i, n in enumerate(path) if not copies_of(n).has_kv(Tier.HOST)), -1)
        missing = path[first:]
        pinned = [*memory.pin(path[first - 1 : first] if first > 0 else [], Tier.HOST)]
        copied = 0
        for each in missing:
            kv = not copies_of(each).has_kv(Tier.HOST)
            state = lacks_copy(each) and self.judge.is_resume_worth(each)
            if not memory.make_room_in(Tier.HOST, kv * each.tokens, int(state), [each]):
                break
            memory.add_copy(each, Tier.HOST, kv=kv, state=state)
            self._write_to_disk(each)
            pinned += memory.pin([each], Tier.HOST)
            copied += 1
        memory.unpin(pinned)
        return missing[:copied]

    def _write_to_disk(self, node: Node) -> None:
        copies = copies_of(node)
        kv = copies.has_kv(Tier.HOST) and not copies.has_kv(Tier.DISK)
        state = copies.has_state(Tier.HOST) and not copies.has_state(Tier.DISK)
        if self.below.disk and (kv or state):
            self.memory.copy(node, Tier.DISK, kv=kv, state=state, at_any_cost=True)

    # From the disk to the host.

    def read_ahead(self, path: Sequence[Node]) -> None:
        """Bring to the host what the disk has of the way to the deepest state on `path`, if that
        saves enough tokens and the host has room. KV behind the deepest state above the disk is
        read anew, as SGLang does it.
        """
        deepest = next((node for node in reversed(path) if copies_of(node).state), None)
        if deepest is None or not self.below.disk:
            return
        passed = [node for node in path if node.depth <= deepest.depth]
        at_hand = max(
            (node.depth for node in above_disk(passed) if copies_of(node).state & ABOVE_DISK),
            default=0,
        )
        tokens = deepest.depth - at_hand
        if tokens < self.below.least_read:
            return
        memory = self.memory
        if memory.make_room_in(Tier.HOST, tokens, 1, passed):
            for node in passed:
                if not copies_of(node).kv & ABOVE_DISK:
                    memory.placement.add_kv(node, Tier.HOST)
            memory.tree.give_state(deepest, Kind.UNKNOWN)
            memory.placement.add_state(deepest, Tier.HOST)


def served_memory(
    cost: CostModel,
    budget: Split | int,
    below: ServedTiers,
    policy: Policy,
    state_policy: Policy,
) -> tuple[TieredMemory, ServedCopies]:
    """The tiers of a server, and its copies between them. Device and host have one policy for KV
    and one for states, as in the server.
    """
    tree, rates = TokenTree(), Rates(below.speeds)
    room: dict[Tier, int | Split] = {Tier.DEVICE: budget, Tier.HOST: below.host}
    if below.disk:
        room[Tier.DISK] = below.disk
    pools: dict[Tier, tuple[TierPool, TierPool]] = {}
    for tier, size in room.items():
        counted = ALL_TIERS if tier is Tier.DISK else ABOVE_DISK

        def make(
            scarce: Scarce, its_policy: Policy, tier: Tier = tier, counted: int = counted
        ) -> TierPool:
            return TierPool(tier, scarce, cost, its_policy, tree.clock, rates, None, counted)

        pools[tier] = pools_of(size, make, policy, state_policy)
    memory = TieredMemory(tree, cost, room, pools, ABOVE_DISK)
    copies = ServedCopies(memory, below)
    memory.copy_rule = copies
    return memory, copies


def lacks_copy(node: Node) -> bool:
    """True if the device has a state of `node`, and the host has not."""
    copies = copies_of(node)
    return copies.has_state(Tier.DEVICE) and not copies.has_state(Tier.HOST)


def above_disk(path: Iterable[Node]) -> list[Node]:
    """The nodes of `path` before the first whose KV neither the device nor the host has."""
    found: list[Node] = []
    for node in path:
        if not copies_of(node).kv & ABOVE_DISK:
            break
        found.append(node)
    return found


def path_to(node: Node) -> list[Node]:
    """`node` and all above it but the root, parents first."""
    return list(way_to(node))[::-1]
