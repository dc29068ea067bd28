"""SGLang's cache with host memory below the device (HiCache), without what ends a scheduler or
answers wrongly there. Line references are to sglang 0.5.23, mem_cache/unified_radix_cache.py.

The host thread never waits for a copy. Memory that the device gives up is free as soon as its copy
was begun: the next use of it is ordered behind the copy (`streams.py`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.cache.radix_cache import HybridRadixCache
from sglang_hybrid.cache.tiers.served_tiers import disk_of
from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.serving.device_streams import host_is_device, order_behind
from sglang_hybrid.storage import weights
from sglang_hybrid.storage.codecs.in_use import host_codecs

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.queue.served_queue import ServedQueue
    from sglang_hybrid.cache.tiers.background_copies import Offload


MOST_POLLS: Final = 10_000
"""Times that copies under way are looked at before they are left alone, as those of a disk that
hangs; a count, since clocks of ranks differ.
"""

POLL_SECONDS: Final = 1e-3


class HostTierCache(HybridRadixCache):
    """Our cache with copies on the host, by value. Without a shadow tree they are SGLang's own.

    offload: copies in the background, None without a shadow tree.
    """

    has_tiers = True
    shadow_tree: Any  # a TieredShadowTree, or None
    offload: Offload | None = None
    _held_on_host: dict[int, DecLockRefParams]  # locks of copies that arrive after an eviction

    def _reset_full(self) -> None:
        super()._reset_full()
        self._held_on_host = {}

    def start_tiers(self, schedule: ServedQueue | None, watermark: float) -> None:
        if self.shadow_tree is None or not self.shadow_tree.follows_copies or self.disable:
            return
        from sglang_hybrid.cache.tiers.ahead_loads import AheadLoads
        from sglang_hybrid.cache.tiers.background_copies import Offload
        from sglang_hybrid.cache.tiers.copy_worth import WriteJudge
        from sglang_hybrid.cache.tiers.request_loads import WayChooser

        self.ways = self.tree_core.ways = WayChooser(self.shadow_tree)
        self.tree_core.writes = WriteJudge(
            self.shadow_tree, self.tier_stats, self.host_room, self._least_uses
        )
        self.offload = Offload(self, watermark)
        if schedule is not None:
            ahead = AheadLoads(self, self.shadow_tree, self.slots, self.cost)
            schedule.load_ahead(ahead, self.speeds)

    def init_hicache(self, *args: Any, **kwargs: Any) -> None:
        if self.is_mamba_enabled:
            from sglang_hybrid.cache.tiers.host_room import share_host_room

            share_host_room(self, self.cost)
        super().init_hicache(*args, **kwargs)
        if host_codecs() is not None:  # copies are smaller
            pools, stats = self.host_pool_group.entry_map, self.tier_stats
            stats.token_bytes = int(pools[PoolName.KV].host_pool.size_per_token)
            if PoolName.MAMBA in pools:
                stats.state_bytes = int(pools[PoolName.MAMBA].host_pool.size_per_token)
        weights.watch_transfers(self)

    @property
    def copies_at_once(self) -> bool:
        """True if what ended requests left is copied then: for a disk, or if nothing is copied
        later in the background.
        """
        late = self.offload is not None and self.offload.is_on
        return not self.is_write_back and bool(self.enable_storage or not late)

    def _least_uses(self) -> int:
        """Requests that must have passed what is copied."""
        return 0 if self.is_write_back else int(self.write_through_threshold)

    def host_room(self, component: ComponentType) -> int:
        """Free tokens or states on the host."""
        name = PoolName.KV if component is ComponentType.FULL else PoolName.MAMBA
        pool = None if self.host_pool_group is None else self.host_pool_group.get_pool(name)
        return 0 if pool is None else int(pool.available_size())

    # Backups.

    def copy_before_eviction(self, node: UnifiedTreeNode) -> None:
        """Begin to copy what the host lacks of `node`, which the device is about to give up, if
        that is worth it and SGLang's write policy says so. Later computations and loads come after
        the copy, since they may use the device memory of `node`.
        """
        if self.ways is None or not self.tree_core.wants_copies_now(node):
            return
        self.writing_check(write_back=True)
        self._copy_down(self.tree_core.build_backup_kv_action(node.id).node_ids, write_back=True)
        self.cache_controller.start_writing()
        acks = self.cache_controller.ack_write_queue
        if acks:
            order_behind(acks[-1].finish_event, self.forward_stream)
            if self.account is not None:  # rows are zeroed in the current stream
                order_behind(acks[-1].finish_event)
        self.writing_check(write_back=True)

    def _track_write_through_node(
        self, node_id: int, lock_params: DecLockRefParams | None, *args: Any, **kwargs: Any
    ) -> None:
        """A copy that is not locked on the device, because its node is a victim, is locked on the
        host until it has arrived. SGLang waits for such copies, so it needs no lock (1681-1718).
        """
        super()._track_write_through_node(node_id, lock_params, *args, **kwargs)
        if lock_params is None and self.ways is not None:
            self._held_on_host[node_id] = self.inc_host_lock_ref(node_id).to_dec_params()

    def _finish_write_through_ack(self, ack_id: int) -> None:
        super()._finish_write_through_ack(ack_id)
        held = self._held_on_host.pop(ack_id, None)
        if held is not None:
            self.dec_host_lock_ref(ack_id, held)

    def _evict_device_leaf(self, node_id: int, tracker: dict[ComponentType, int]) -> Any:
        self.copy_before_eviction(self.tree_core.node_by_id(node_id))
        return super()._evict_device_leaf(node_id, tracker)

    def _execute_and_commit_kv_backup(self, action: BackupKV, write_back: bool = False) -> int:
        """Put off what SGLang writes through as it is inserted: it is copied later
        (`take_due_copies`, `Offload`).
        """
        if self.ways is None:
            return int(super()._execute_and_commit_kv_backup(action, write_back))
        if self.copies_at_once:
            self.tree_core.due_copies[action.node_ids[-1]] = None
        return 0

    def copy_to_host(self, node: UnifiedTreeNode) -> bool:
        """Begin a copy of `node` and of the KV that it needs above it, if the host lacks any and it
        is worth one. Returns whether it is.
        """
        tree = self.tree_core
        if not tree.wants_copies(node):
            return False
        self._copy_down(tree.build_backup_kv_action(node.id).node_ids)
        return True

    def _copy_down(self, node_ids: list[int], write_back: bool = False) -> None:
        """Nodes that are being copied already are left out: SGLang asserts that there are none.
        While room is made, the host keeps what the first of them continues, or its own KV if only
        its state is copied.
        """
        tree = self.tree_core
        node_ids = [
            node_id
            for node_id in node_ids
            if tree.node_by_id(node_id).write_through_pending_id is None
        ]
        if not node_ids:
            return
        before = self._host_copies(node_ids)
        first = tree.node_by_id(node_ids[0])
        kept = first.id if first.backuped else first.parent.id
        lock = self.inc_host_lock_ref(kept).to_dec_params()
        try:
            super()._execute_and_commit_kv_backup(BackupKV(node_ids), write_back)
        finally:
            self.dec_host_lock_ref(kept, lock)
        after = self._host_copies(node_ids)
        self.tier_stats.on_write(after[0] - before[0], after[1] - before[1])

    def _host_copies(self, node_ids: list[int]) -> tuple[int, int]:
        """Tokens and states of these nodes that the host has."""
        tokens = states = 0
        for node_id in node_ids:
            data = self.tree_core.node_by_id(node_id).component_data
            kv = data[ComponentType.FULL].host_value
            tokens += 0 if kv is None else len(kv)
            states += data[ComponentType.MAMBA].host_value is not None
        return tokens, states

    def flush_pending_backups(self) -> None:
        """Copy now what was to be copied at once and is held by no request any more."""
        if self.ways is not None:
            for node in self.tree_core.take_due_copies():
                self.copy_to_host(node)
        super().flush_pending_backups()

    # Loads.

    def init_load_back(self, params: Any) -> Any:
        """None where the load cannot be: the request is looked up again and resumes from what is
        on the device. SGLang would let it run on KV without the state that belongs to it.
        """
        if self.ways is None:
            return super().init_load_back(params)
        req = params.req
        room = self._room_to_load(params, req)
        loaded = super().init_load_back(params) if room else None
        if not loaded or not loaded[0]:
            self.ways.on_failed_load(req)
            self.tier_stats.failed_loads += 1
            return None
        req.kv.mamba_cow_src_index = None  # of an earlier look-up; the load brings the state
        req.kv.mamba_needs_clear = False
        self.tier_stats.loaded_requests += 1
        return loaded

    def ready_to_load_host_cache(self) -> int:
        """The number of the loads that the next batch waits for, on the device and layer by layer;
        -1 for none. They are those that it begins now, or else the newest under way, which arrive
        after all others: what it resumes from may be among them.
        """
        begun = int(super().ready_to_load_host_cache())
        controller = self.cache_controller
        if begun >= 0 or controller is None or not controller.ack_load_queue:
            return begun
        return int(controller.layer_done_counter.producer_index)

    def order_behind_loads(self) -> None:
        """Let what the current stream is given from now on begin after the loads under way."""
        for ack in self._acks("ack_load_queue"):
            order_behind(ack.finish_event)

    def _room_to_load(self, params: Any, req: Req) -> bool:
        """True if the request can have a slot; SGLang asserts it (mamba.py, prepare_load_back)."""
        if not self.is_mamba_enabled or req.kv.holds_mamba:
            return True
        lock = self.inc_lock_ref(params.best_match_node)
        had = self.slots.make_room()
        self.dec_lock_ref(params.best_match_node, lock.to_dec_params())
        return had

    def on_release(self, req: Req, *args: Any, **kwargs: Any) -> None:
        super().on_release(req, *args, **kwargs)
        if self.ways is not None:
            self.ways.on_resources_freed(req)

    # Events of transfers

    def writing_check(self, write_back: bool = False, finish_count: int | None = None) -> None:
        """write_back: SGLang waits for all copies, before others use what it evicted. On a GPU the
        streams are in order without that (`copy_before_eviction`); on the CPU platform the copies
        have arrived already, but for a simulated link, and are acknowledged.
        """
        if write_back and self.ways is not None and not host_is_device():
            return
        acks = self._acks("ack_write_queue")
        super().writing_check(write_back=write_back, finish_count=finish_count)
        for ack in acks[: len(acks) - len(self._acks("ack_write_queue"))]:
            self.speeds.on_write(ack)

    def loading_check(self, finish_count: int | None = None) -> None:
        acks = self._acks("ack_load_queue")
        super().loading_check(finish_count=finish_count)
        if self.ways is None:
            return
        left, link = self._acks("ack_load_queue"), self.speeds.speeds.loads[Tier.HOST]
        for ack in acks[: len(acks) - len(left)]:
            self.speeds.on_load(ack)
            self.tier_stats.on_load(ack, link)
        self.ways.backlog = sum(link.seconds(ack.num_bytes) for ack in left)

    def _acks(self, queue: str) -> list[Any]:
        """The operations that wait in a queue of SGLang's controller, the oldest first."""
        return [] if self.cache_controller is None else list(getattr(self.cache_controller, queue))

    # In the background.

    def check_hicache_events(self) -> None:
        super().check_hicache_events()
        if self.offload is not None:
            self.offload.step()

    def end_transfers(self) -> None:
        """Let all copies between the tiers that are under way end, on all ranks alike; no others
        begin.
        """
        if self.ways is not None:
            self.tree_core.due_copies.clear()
        for _ in range(MOST_POLLS):
            under_way = torch.tensor(
                len(self.ongoing_write_through)
                + len(self.ongoing_load_back)
                + len(self.ongoing_prefetch)
                + len(self.ongoing_backup)
            )
            self._all_reduce(under_way, torch.distributed.ReduceOp.MAX)
            if not under_way.item():
                return
            super().check_hicache_events()
            time.sleep(POLL_SECONDS)

    @property
    def has_waiting_requests(self) -> bool:
        """True if requests waited when a batch was last filled."""
        return self.plans.prefix_wait.has_waiting

    # Reports.

    def tiers_info(self) -> dict[str, Any] | None:
        """The contents of each tier and the transfers between them; None without tiers."""
        if self.ways is None:
            return None
        placement = self.shadow_tree.placement
        held = {
            tier.name.lower(): {
                "kv_tokens": placement.kv_tokens[tier],
                "states": placement.states[tier] if self.is_mamba_enabled else 0,
            }
            for tier in (Tier.DEVICE, Tier.HOST)
        }
        host, stats = held["host"], self.tier_stats
        host["bytes"] = stats.bytes_of(host["kv_tokens"], host["states"])
        held["device"]["bytes"] = placement.used(Tier.DEVICE, self.cost)
        store = disk_of(self)
        disk = {} if store is None else {"disk": store.info()}
        if store is not None and self.learning is not None:
            disk["learnt"] = self.learning.as_dict()
        return {"held": held, **disk, **self.tier_stats.as_dict(), **self.speeds.as_dict()}
