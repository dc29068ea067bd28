"""The shadow tree of a cache with host memory below the device: where each copy of KV and of a
state is, and what each tier should forget first.

SGLang's nodes are the truth. `sync` compares one of them with its record and repeats what changed;
the tree core and the components call it wherever a copy is added or dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.cache.records.shadow_tree import ShadowTree
from sglang_hybrid.core.records.nodes import Kind
from sglang_hybrid.core.records.pins import Pins
from sglang_hybrid.core.tiers.places import Placement, copies_of
from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.core.tiers.tier_pool import SpeedsInForce, TierPool
from sglang_hybrid.core.victims.pool import Pool, Scarce

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.core.costs.cost import CostModel
    from sglang_hybrid.core.records.nodes import Node
    from sglang_hybrid.core.victims.eviction import Policy

FOLLOWED_TIERS = (Tier.DEVICE, Tier.HOST)
"""Tiers whose copies SGLang's nodes tell of."""


class TieredShadowTree(ShadowTree):
    """A `ShadowTree` whose nodes have copies on the device, on the host, or on both.

    A record's state (`has_state`) is one that some tier has. The host has a pool of candidates for
    KV and one for states, as SGLang has two pools there; each under the policy of its kind.
    """

    follows_copies = True
    kv_pool: TierPool
    state_pool: TierPool

    def __init__(
        self,
        cost: CostModel,
        kv_policy: Policy,
        state_policy: Policy,
        speeds: SpeedsInForce,
        *,
        has_states: bool,
        one_memory: bool = False,
        pins: Pins | None = None,
    ) -> None:
        self.speeds = speeds
        self._placement: Placement | None = None
        super().__init__(
            cost,
            kv_policy,
            state_policy,
            has_states=has_states,
            one_memory=one_memory,
            pins=pins,
        )

    def _fill_pools(self) -> None:
        self.victim_pool = None
        if self._placement is None or self._placement.tree is not self.tree:
            self._placement = Placement(self.tree)
        kind = Scarce.SHARED if self.one_memory else Scarce.KV
        self.kv_pool = self.state_pool = self._pool(Tier.DEVICE, kind, self._kv_policy)
        if not self.one_memory:
            self.state_pool = self._pool(Tier.DEVICE, Scarce.STATES, self._state_policy)
        self.host_kv_pool = self._pool(Tier.HOST, Scarce.KV, self._kv_policy)
        self.host_state_pool = self._pool(Tier.HOST, Scarce.STATES, self._state_policy)
        for pool in self.pools:
            self.tree.listen(pool)

    def _pool(self, tier: Tier, scarce: Scarce, policy: Policy) -> TierPool:
        return TierPool(tier, scarce, self.cost, policy, self.clock, self.speeds)

    @property
    def pools(self) -> list[Pool]:
        host = [self.host_kv_pool, self.host_state_pool] if self.has_states else [self.host_kv_pool]
        return [*super().pools, *host]

    @property
    def placement(self) -> Placement:
        """The places of copies, and the content of each tier in numbers."""
        assert self._placement is not None
        return self._placement

    # Changes of SGLang's tree

    def on_add(self, node: UnifiedTreeNode) -> None:
        self.sync(node)

    def on_split(self, head: UnifiedTreeNode, tail: UnifiedTreeNode) -> None:
        super().on_split(head, tail)
        self.sync(head)
        self.sync(tail)

    def on_remove(self, node: UnifiedTreeNode) -> None:
        record = self._records[node.id]
        for tier in FOLLOWED_TIERS:
            self.placement.drop_state(record, tier)
            self.placement.drop_kv(record, tier)
        super().on_remove(node)

    def on_state_gain(self, node: UnifiedTreeNode, kind: Kind) -> None:
        self.tree.give_state(self._records[node.id], kind)
        self.sync(node)

    def on_state_loss(self, node: UnifiedTreeNode) -> None:
        self.sync(node)

    def sync(self, node: UnifiedTreeNode) -> None:
        record = self._records.get(node.id)
        if record is None:
            record = self.tree.add(self._records[node.parent.id], node.id, len(node.key))
            self._adopt(node, record)
        kv = _masks(node, ComponentType.FULL)
        state = _masks(node, ComponentType.MAMBA) if self.has_states else kv
        if state and not record.has_state:
            self.tree.give_state(record, Kind.UNKNOWN)
        placement = self.placement
        for tier in FOLLOWED_TIERS:  # additions first: the last KV of a record cannot be dropped
            if kv >> tier & 1:
                placement.add_kv(record, tier)
        for tier in FOLLOWED_TIERS:
            if not kv >> tier & 1:
                placement.drop_kv(record, tier)
            (placement.add_state if state >> tier & 1 else placement.drop_state)(record, tier)
        self.placement.pin(record, Tier.HOST, _host_in_use(node))

    # Eviction

    def host_victim(self, component: ComponentType) -> UnifiedTreeNode | None:
        """The node whose copy of this kind the host should forget, or None."""
        pool = self.host_kv_pool if component is ComponentType.FULL else self.host_state_pool
        record = pool.victim(last_resort=True)
        return None if record is None else record.payload

    def next_uncopied(self, needed: Callable[[Scarce], int]) -> Iterator[UnifiedTreeNode]:
        """Nodes that the device would give up next, until each of its pools has given back as many
        bytes as are needed of what is scarce there, and of which the host lacks something.
        """
        for pool in super().pools:
            assert isinstance(pool, TierPool)
            for record in pool.next_uncopied(needed(pool.scarce)):
                yield record.payload

    # Checks

    def check(self, root: UnifiedTreeNode, *, kv_tokens: int, states: int) -> None:
        super().check(root, kv_tokens=kv_tokens, states=states)
        tokens, held = [0, 0], [0, 0]
        for record in self.tree.walk():
            for tier in FOLLOWED_TIERS:
                tokens[tier] += record.tokens * copies_of(record).has_kv(tier)
                held[tier] += copies_of(record).has_state(tier)
        counted = self.placement.kv_tokens[:2], self.placement.states[:2]
        if counted != (tokens, held):
            raise AssertionError(f"tiers hold {tokens} tokens and {held} states, not {counted}")

    def _device_holds(self, record: Node) -> tuple[bool, bool]:
        copies = copies_of(record)
        return copies.has_kv(Tier.DEVICE), copies.has_state(Tier.DEVICE)

    def _differences(
        self, node: UnifiedTreeNode, record: Node, depth: int, anchor_depth: int
    ) -> list[str]:
        copies = copies_of(record)
        kv = _masks(node, ComponentType.FULL)
        state = _masks(node, ComponentType.MAMBA) if self.has_states else kv
        below = [_masks(child, ComponentType.FULL) for child in node.children.values()]
        children = [sum(mask >> tier & 1 for mask in below) for tier in FOLLOWED_TIERS]
        pairs: list[tuple[str, Any, Any]] = [
            ("KV", copies.kv, kv),
            ("state", copies.state, state),
            ("children's KV", copies.kv_children[:2], children),
            ("use of the host's copies", copies.is_pinned(Tier.HOST), _host_in_use(node)),
        ]
        return super()._differences(node, record, depth, anchor_depth) + [
            f"node {node.id}: copies of {name} are {is_}, not {should_be}"
            for name, is_, should_be in pairs
            if is_ != should_be
        ]

    def _has_a_state(self, node: UnifiedTreeNode) -> bool:
        return bool(_masks(node, ComponentType.MAMBA))


def _masks(node: UnifiedTreeNode, component: ComponentType) -> int:
    """Tiers that hold this component of `node`, bit `1 << tier` for each."""
    data = node.component_data[component]
    on_device, on_host = data.value is not None, data.host_value is not None
    return on_device << Tier.DEVICE | on_host << Tier.HOST


def _host_in_use(node: UnifiedTreeNode) -> bool:
    """True if a transfer, or a request that is about to load, needs the node's host copies."""
    return (
        node.write_through_pending_id is not None
        or node.load_back_pending_id is not None
        or any(data.host_lock_ref > 0 for data in node.component_data)
    )
