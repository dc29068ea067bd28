"""What the tiers of a replay hold and give up: the pools of each tier, room for what comes, and
where a victim goes.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_hybrid.core.checkpoints.admission import MIN_BRANCH_TOKENS
from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.nodes import Node
from sglang_hybrid.core.server_settings import Split
from sglang_hybrid.core.tiers.places import ALL_TIERS, Placement, Unit, copies_of, without_up_to
from sglang_hybrid.core.tiers.rates import Rates, Speeds, Tier
from sglang_hybrid.core.tiers.tier_pool import TierPool
from sglang_hybrid.core.tiers.writes import copy_saves, write_pays
from sglang_hybrid.core.victims.eviction import Policy
from sglang_hybrid.core.victims.pool import Pool, Scarce
from sglang_hybrid.simulation.simulator import Simulator
from sglang_hybrid.simulation.tiers.losses import Losses
from sglang_hybrid.simulation.tiers.tier_budgets import TierBudgets, TierCounts


class TieredMemory(Simulator):
    """The memory of a cache in `tiers`; what leaves one is written to the next as it leaves.

    policies: one for each tier that there is, the fastest first. room: what each of them holds, one
    number of bytes for KV and states unless something else is given; a tier in two pools needs a
    policy in state_policies too. losses: where hits are lost; None unless it is set before the
    first request, since it takes a hash of every prefix.
    """

    losses: Losses | None = None
    counted = ALL_TIERS
    """Tiers whose copies tell what a position is worth."""

    def __init__(
        self,
        cost: CostModel,
        tiers: TierBudgets,
        speeds: Speeds,
        policies: Sequence[Policy],
        min_branch_tokens: int = MIN_BRANCH_TOKENS,
        room: Sequence[int | Split] | None = None,
        state_policies: Sequence[Policy] | None = None,
    ) -> None:
        if not cost.state_bytes:
            raise ValueError("tiers are replayed for models with states only")
        cost = tiers.with_copies(cost)
        self.tiers = tiers
        self._inexact_in = tiers.inexact_in(cost)
        self.rates = Rates(speeds)
        self.counts = TierCounts()
        present = tiers.present
        self.room: dict[Tier, int | Split] = dict(
            zip(present, room or [tiers.sizes[tier] for tier in present], strict=True)
        )
        super().__init__(
            cost,
            self.room[Tier.DEVICE],
            policies[0],
            min_branch_tokens,
            state_policies[0] if state_policies else None,
        )
        self.placement = Placement(self.tree, self.counted)
        self.pools: dict[Tier, tuple[TierPool, TierPool]] = {}
        for index, tier in enumerate(present):
            states = state_policies[index] if state_policies else None
            self.pools[tier] = self._pools_of(tier, policies[index], states)

    def _new_pool(self, scarce: Scarce, policy: Policy) -> TierPool:
        return self._tier_pool(Tier.DEVICE, scarce, policy)

    def _pools_of(
        self, tier: Tier, policy: Policy, state_policy: Policy | None
    ) -> tuple[TierPool, TierPool]:
        """The pools of KV and of states, the same one where they share their bytes."""
        if tier is Tier.DEVICE:
            assert isinstance(self.pool, TierPool)
            assert isinstance(self.state_pool, TierPool)
            return self.pool, self.state_pool
        if not isinstance(self.room[tier], Split):
            pool = self._tier_pool(tier, Scarce.SHARED, policy)
            return pool, pool
        assert state_policy is not None
        kv = self._tier_pool(tier, Scarce.KV, policy)
        return kv, self._tier_pool(tier, Scarce.STATES, state_policy)

    def _tier_pool(self, tier: Tier, scarce: Scarce, policy: Policy) -> TierPool:
        clock, below = self.tree.clock, self.tiers.below(tier)
        pool = TierPool(tier, scarce, self.cost, policy, clock, self.rates, below)
        self.tree.listen(pool)
        return pool

    @property
    def used(self) -> int:
        """Bytes on the device."""
        return self.placement.used(Tier.DEVICE, self.cost)

    # Room in a tier.

    def _make_room(self, kv: int, states: int, path: list[Node]) -> bool:
        return self._make_room_in(Tier.DEVICE, kv, states, path)

    def _make_room_in(self, tier: Tier, kv: int, states: int, path: list[Node]) -> bool:
        """Evict until so many tokens and states fit into `tier`; False if they cannot. `path`
        stays in all tiers.
        """
        if self._short_of(tier, kv, states) is None:
            return True
        if not self._could_fit_in(tier, kv, states, path):
            return False
        held = self._hold(path)
        while pool := self._short_of(tier, kv, states):
            victim = pool.victim() or pool.victim(last_resort=True)
            if victim is None:
                break
            self._evict_from(pool, victim)
        self._let_go(held)
        return self._short_of(tier, kv, states) is None

    def _hold(self, path: Sequence[Node]) -> list[tuple[Node, Tier]]:
        """Pin all copies of `path`; returns those that were not."""
        held = [
            (node, tier)
            for node in path
            for tier in self.room
            if not copies_of(node).is_pinned(tier)
        ]
        for node, tier in held:
            self.placement.pin(node, tier, True)
        return held

    def _let_go(self, held: Sequence[tuple[Node, Tier]]) -> None:
        for node, tier in held:
            self.placement.pin(node, tier, False)

    def _short_of(self, tier: Tier, kv: int, states: int) -> TierPool | None:
        """The pool of `tier` that must evict before so many tokens and states fit, None if they
        do.
        """
        room, placement = self.room[tier], self.placement
        pool, state_pool = self.pools[tier]
        if isinstance(room, Split):
            if placement.states[tier] + states > room.slots:
                return state_pool
            return pool if placement.kv_tokens[tier] + kv > room.kv_tokens else None
        needed = placement.used(tier, self.cost) + self.cost.bytes_in(tier, kv, states)
        return pool if needed > room else None

    def _could_fit_in(self, tier: Tier, kv: int, states: int, path: Sequence[Node]) -> bool:
        """Whether it would fit beside nothing but what `path` has there."""
        for node in path:
            kv += node.tokens * copies_of(node).has_kv(tier)
            states += copies_of(node).has_state(tier)
        room = self.room[tier]
        if isinstance(room, Split):
            return kv <= room.kv_tokens and states <= room.slots
        return self.cost.bytes_in(tier, kv, states) <= room

    def _bytes(self, kv: int, states: int) -> int:
        return kv * self.cost.kv_bytes_per_token + states * self.cost.state_bytes

    # Victims.

    def _evict_from(self, pool: Pool, node: Node) -> None:
        """Take the unit of `node` from the tier of `pool`, into the next one if it is worth it."""
        assert isinstance(pool, TierPool)
        tier, unit = pool.tier, pool.unit(node)
        assert unit is not None
        below = pool.demotes_to
        if below is not None:
            self._write_down(node, unit, tier, below)
        copies = copies_of(node)
        last_state = unit.state and copies.state == 1 << tier
        pool.leaves(node, lost=last_state)
        self._drop(node, unit, tier)

    def _drop(self, node: Node, unit: Unit, tier: Tier) -> None:
        """Take `unit` of `node` from `tier`, and from the tree what no tier has any more."""
        self.counts.evicted[tier] += unit.freed
        if unit.kv and copies_of(node).kv == 1 << tier:
            self._remove(node, tier)
            return
        if unit.state:
            self.placement.drop_state(node, tier)
            if not copies_of(node).state:
                self._lost(node, tier)
        if unit.kv:
            self.placement.drop_kv(node, tier)

    def _write_down(self, node: Node, unit: Unit, tier: Tier, below: Tier) -> None:
        """Copy what of `unit` no slower tier has to `below`, if there is room or it is worth more
        than what is there. KV that nodes below need is worth any room.
        """
        copies = copies_of(node)
        kv = unit.kv and not without_up_to(copies.kv, tier)
        state = unit.state and not without_up_to(copies.state, tier)
        needed = kv and bool(node.children)
        if not (state or needed or (kv and node.has_state)):
            return  # it has copies, or nothing is resumed there
        pays = self._write_pays(below, node, kv=kv, state=state)
        if pays and self._take(below, node, kv=kv, state=state, needed=needed):
            self._add(below, node, kv=kv, state=state)
        elif needed and self._take(below, node, kv=True, state=False, needed=True):
            self._add(below, node, kv=True, state=False)

    def _write_pays(self, tier: Tier, node: Node, *, kv: bool, state: bool) -> bool:
        """Whether copies of `node` are expected to save more seconds than writing them
        costs (`core.tiers.writes`); True where the policy knows nothing of returns.
        """
        policy, speeds = self.pools[tier][1].policy, self.rates.speeds
        returns = policy.return_probability(node, self.tree.clock)
        size = self.cost.bytes_in(tier, kv * node.tokens, int(state))
        saves = copy_saves(node, tier, self.cost, speeds)
        return returns is None or write_pays(size, saves, returns, tier, speeds)

    def _add(self, tier: Tier, node: Node, *, kv: bool, state: bool) -> None:
        if kv:
            self.placement.add_kv(node, tier)
        if state:
            self.placement.add_state(node, tier)
        self.counts.written[tier] += self.cost.bytes_in(tier, kv * node.tokens, int(state))

    def _take(self, tier: Tier, node: Node, *, kv: bool, state: bool, needed: bool) -> bool:
        """Make room in `tier` for copies of `node`; False if they are worth less than what would
        have to go.
        """
        tokens, states = kv * node.tokens, int(state)
        if self._short_of(tier, tokens, states) is None:
            return True
        if not self._could_fit_in(tier, tokens, states, []):
            return False
        held = self._hold([node])
        while pool := self._short_of(tier, tokens, states):
            if not needed and not self._beats_victim(pool, node):
                break
            victim = pool.victim() or pool.victim(last_resort=True)
            if victim is None:
                break
            self._evict_from(pool, victim)
        self._let_go(held)
        return self._short_of(tier, tokens, states) is None

    def _beats_victim(self, pool: TierPool, node: Node) -> bool:
        """Whether a copy of `node` is worth more in the tier of `pool` than the next victim."""
        comparison = pool.compare_copy(node)
        return comparison is None or comparison.beats_victim

    def _remove(self, node: Node, last: Tier) -> None:
        """`node` has no KV left above what is below it, which `last` had: all of that goes with
        it.
        """
        for child in list(node.children.values()):
            self._remove(child, last)
        copies = copies_of(node)
        self._lost(node, last)
        for tier in self.room:
            self.placement.drop_state(node, tier)
        for tier in self.room:
            self.placement.drop_kv(node, tier)
        assert not copies.kv
        self.tree.remove(node)

    def _lost(self, node: Node, last: Tier) -> None:
        """No tier has the state of `node` any more; `last` had it."""
        if self.losses is not None:
            self.losses.lost(node, last, self.tiers.below(last))
