"""Evictions where KV and states share bytes: all of them, or where two pools lend them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_hybrid.core.costs.cost import UNBOUNDED

if TYPE_CHECKING:
    from sglang_hybrid.cache.records.shadow_tree import ShadowTree
    from sglang_hybrid.cache.state_slots.parked_kv import ParkedKv
    from sglang_hybrid.cache.state_slots.spilled_states import SpilledStates
    from sglang_hybrid.core.memory.account import MemoryAccount


class OneMemoryCache(UnifiedRadixCache):
    """SGLang's cache on one memory, or on its two pools if there is no `account`.

    spilled: states in the place of KV; parked: KV in slots without a state; None where pools lend
    each other nothing. shadow_tree: None where SGLang's own order decides, and its walks stay.
    """

    account: MemoryAccount | None
    spilled: SpilledStates | None
    parked: ParkedKv | None
    shadow_tree: ShadowTree | None

    def full_evictable_size(self) -> int:
        spilled = 0 if self.spilled is None else self.spilled.evictable
        return int(super().full_evictable_size()) + spilled

    def full_protected_size(self) -> int:
        spilled = 0 if self.spilled is None else self.spilled.held
        return int(super().full_protected_size()) + spilled

    def mamba_evictable_size(self) -> int:
        parked = 0 if self.parked is None else self.parked.slots
        return int(super().mamba_evictable_size()) + parked

    def _evict_components(
        self,
        request_by_type: dict[ComponentType, int],
        tracker: dict[ComponentType, int],
        available_size_targets: dict[ComponentType, tuple[ComponentType, int]] | None = None,
        *,
        allocation_reclaim_satisfied: Callable[[], bool] | None = None,
    ) -> None:
        """Evict in one memory, where a victim of either kind makes room for either: so there is one
        walk: that over states, which ends leaves, too (unified_radix_cache.py:952-1060). Where
        pools lend, a move may be enough.
        """
        if self.shadow_tree is None or (self.account is None and self.spilled is None):
            super()._evict_components(
                request_by_type,
                tracker,
                available_size_targets,
                allocation_reclaim_satisfied=allocation_reclaim_satisfied,
            )
            return

        before = Counter() if self.spilled is None else Counter(self.spilled.freed)

        def surplus(what: ComponentType) -> int:
            """The size available beyond the requested one; below 0 if that is not there yet."""
            targets = available_size_targets
            if targets is None and request_by_type[what]:
                moved = 0 if self.spilled is None else self.spilled.freed[what] - before[what]
                return tracker[what] + moved - request_by_type[what]
            there, least = (what, 0) if targets is None else targets.get(what, (what, 0))
            return int(self._component_available_size(there)) - least

        def enough() -> bool:
            if allocation_reclaim_satisfied is not None:
                return allocation_reclaim_satisfied()
            return all(surplus(what) >= 0 for what in tracker)

        self.tree_core.evict_device_start(ComponentType.MAMBA, UNBOUNDED)
        try:
            while not enough():
                if allocation_reclaim_satisfied is None and self.spilled is not None:
                    kv, slots = surplus(ComponentType.FULL), surplus(ComponentType.MAMBA)
                    if self._move(self.spilled, self.parked, kv, slots):
                        continue
                    if self._is_held(self.spilled, self.parked, kv, slots):
                        break
                node_id, made_progress = self._evict_device_next_node(ComponentType.MAMBA, tracker)
                if node_id is not None:
                    self._give_up_leaf(node_id, tracker)
                elif not made_progress:
                    break
        finally:
            self.tree_core.evict_device_end(ComponentType.MAMBA)

    @staticmethod
    def _move(spilled: SpilledStates, parked: ParkedKv | None, kv: int, slots: int) -> bool:
        """Move a state or KV from where room is lacking, if there is more than what is asked for of
        the other kind; returns whether anything was moved. kv, slots: what is there beyond that,
        below 0 where it is lacking.
        """
        if slots < 0:
            if parked is not None and parked.slots:
                return parked.give_back_slot(kv)
            return kv >= spilled.tokens and spilled.spill()
        if slots > 0 and spilled.unspill():
            return True
        return parked is not None and parked.park(-kv, slots)

    def _is_held(
        self, spilled: SpilledStates, parked: ParkedKv | None, kv: int, slots: int
    ) -> bool:
        """True if requests hold all of what is lacking, so that no victim frees it. kv, slots: as
        above.
        """
        of_kv = kv >= 0 or (parked is not None and not self.full_evictable_size())
        movable = spilled.movable or (0 if parked is None else parked.slots)
        return of_kv and (slots >= 0 or not movable)

    def _give_up_leaf(self, node_id: int, tracker: dict[ComponentType, int]) -> None:
        """Evict a leaf; where SGLang writes back, after its copy to the host (1028-1052)."""
        backup = self._evict_device_leaf(node_id, tracker)
        if backup is None:
            return
        if self._execute_and_commit_kv_backup(backup, write_back=True):
            self.writing_check(write_back=True)
            self._demote(node_id, tracker)
        else:
            self._drop_subtree_no_host(node_id, tracker)
