"""`driver.Server` with host memory below the device, and KV and states that can be recognised.

Every KV row holds a number made of the tokens up to it, every state one of all tokens that it has
read. A request that resumes from something else is found out at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.tiers.rates import Link, Speeds
from sglang_hybrid.serving.config import HybridConfig
from tests.cache.backends import COST
from tests.cache.driver import Server, Sizes, build_cache


def build_tiered_cache(
    sizes: Sizes,
    options: HybridConfig | None,
    *,
    ratio: float = 3.0,
    policy: str = "write_through",
    layout: str = "page_first",
    cost: CostModel = COST,
    flags: dict[str, Any] | None = None,
    **more: Any,
) -> Any:
    """A cache whose host is `ratio` times the device; SGLang's own without options. flags: more of
    SGLang's.
    """
    tiers = {} if options is None else {"tiers": True}
    if not sizes.states:
        cost = cost.with_sizes(kv_bytes_per_token=cost.kv_bytes_per_token, state_bytes=0)
    cache = build_cache(sizes, options, cost, **tiers, **more)
    arguments = ServerArgs(
        model_path="dummy",
        page_size=sizes.page,
        hicache_io_backend="direct" if layout == "page_first_direct" else "kernel",
        hicache_mem_layout=layout,
        hicache_write_policy=policy,
        hicache_ratio=ratio,
        **(flags or {}),
    )
    arguments._mamba_cache_chunk_size = max(sizes.grid, sizes.page)
    set_global_server_args_for_scheduler(arguments)
    # SGLang leaves 10 GiB of the machine's memory free, which other tests may have; a few KB do.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    cache.init_hicache(arguments, cache.cache_init_params)
    cache.load_back_threshold = 0
    return cache


def mark(tokens: Sequence[int]) -> int:
    """A number of 1 to 250 for a sequence, which bfloat16 holds."""
    return zlib.crc32(repr(list(tokens)).encode()) % 250 + 1


def keep_what_is_copied(cache: Any) -> None:
    """Fail when the host, to make room for copies, forgets KV that one of them is about to
    continue: that of the path above, or of a node whose state is copied.
    """
    tree, shadow_tree = cache.tree_core, cache.shadow_tree
    copy_down, host_victim = cache._copy_down, shadow_tree.host_victim
    needed: set[int] = set()

    def copy_and_note(node_ids: list[int], write_back: bool = False) -> None:
        node = tree.node_by_id(node_ids[-1])
        while node is not tree.root_node:
            needed.add(node.id)
            node = node.parent
        copy_down(node_ids, write_back)
        needed.clear()

    def checked_victim(component: Any) -> Any:
        node = host_victim(component)
        if node is not None and node.id in needed:
            below = [child for child in node.children.values() if child.backuped]
            forgets_kv = component is ComponentType.FULL or not below
            assert not forgets_kv, f"the host forgets KV that a copy below {node.id} needs"
        return node

    cache._copy_down, shadow_tree.host_victim = copy_and_note, checked_victim


SLOW = Speeds.of(1e3, Link(1e12), Link(1e12))
"""Computing takes for ever: all is worth a copy and a load."""

FAST = Speeds.of(1e30, Link(1e12), Link(1e12))
"""Nothing is worth a load."""


def set_speeds(cache: Any, speeds: Speeds) -> None:
    """Judge ways by these speeds from now on, whatever is measured."""
    cache.speeds.speeds, cache.speeds.poll = speeds, lambda: []


class TieredServer(Server):
    """Fills what requests compute with marks, and looks at the marks of what they resume from."""

    builds = staticmethod(build_tiered_cache)

    def __init__(self, cache: Any, sizes: Sizes, chunk: int = 0) -> None:
        super().__init__(cache, sizes, chunk)
        kv = self.allocator.get_kvcache()
        kv = getattr(kv, "full_kv_pool", kv)
        self._rows = [*kv.k_buffer, *kv.v_buffer]
        self._states = self.pool.mamba_pool.mamba_cache if sizes.states else None
        self.loads = 0
        self.waits_for = -1  # the loads that the last batch waits for, as SGLang counts them
        if cache.ways is not None:
            keep_what_is_copied(cache)
        if self._plans:
            planned = cache.plan_forward

            def plan_and_compute(batch: Any) -> None:
                planned(batch)
                for req in batch.reqs:
                    self._compute(req)

            cache.plan_forward = plan_and_compute

    def poll(self) -> None:
        """The scheduler's work at every step."""
        self.cache.check_hicache_events()

    def probe_node(self, tokens: Sequence[int]) -> int:
        """The id of the deepest node that a prompt resumes from."""
        req = self.arrive(tokens)
        self.look_up(req)
        self.send_back(req)
        return int(req.best_match_node)

    def check(self) -> None:
        """SGLang's check does not hold while a load is under way: it counts what is loaded as if
        it had been acknowledged.
        """
        if not self.cache.ongoing_load_back:
            super().check()

    def admit(self, req: Req) -> bool:
        joined = super().admit(req)
        if joined:
            under_way = len(self.cache.cache_controller.ack_load_queue)
            self.waits_for = self.cache.ready_to_load_host_cache()
            self.loads += len(self.cache.cache_controller.ack_load_queue) > under_way
            self._check_resumed(req)
        return joined

    def _grow(self, req: Req, length: int) -> None:
        start = req.kv.kv_allocated_len
        super()._grow(req, length)
        if not self._plans:
            self._fill(req, start, length)

    def decode(self, req: Req, answer: Sequence[int]) -> None:
        start = req.kv.kv_committed_len
        super().decode(req, answer)
        self._fill(req, start, req.kv.kv_committed_len)

    def _compute(self, req: Req) -> None:
        start, end = req.prefix_len, req.extend_end
        self._fill(req, start, end)
        for other, plan in self.cache.plans.planner.in_flight():
            if other is req:
                for checkpoint in plan.pending_checkpoints:
                    if start < checkpoint.position <= end:
                        self._set_state(checkpoint.slot, self._tokens(req)[: checkpoint.position])

    def _fill(self, req: Req, start: int, end: int) -> None:
        tokens, row = self._tokens(req), req.kv.req_pool_idx
        places = self.pool.req_to_token[row, start:end].long()
        marks = torch.tensor([mark(tokens[: at + 1]) for at in range(start, end)])
        for rows in self._rows:
            where = self._rows_of(places)
            rows[where] = marks[:, None, None].to(rows.dtype).expand(-1, *rows.shape[1:])
        if self._states is not None:
            self._set_state(req.kv.mamba_pool_idx.reshape(1), tokens[:end])

    def _set_state(self, slot: torch.Tensor, tokens: list[int]) -> None:
        for tensor in (*self._states.conv, self._states.temporal):
            tensor[:, self._row_of(int(slot))] = mark(tokens)

    def _rows_of(self, places: torch.Tensor) -> torch.Tensor:
        """The rows of these ids of tokens now: ids are rows, or name them in one memory."""
        return self.allocator.translate_kv_loc(places) if self.sizes.one_memory else places

    def _row_of(self, slot: int) -> int:
        """The row of a state; 0, the row for padding, if the state has none."""
        return max(0, int(self.pool.translate_mamba_indices(torch.tensor([slot]))[0]))

    def _check_resumed(self, req: Req) -> None:
        assert req.prefix_len < len(self._tokens(req)), "the last token was to be computed"
        if not req.prefix_len:
            return
        places, slot = self._resumed(req)
        self._look(places, slot, self._tokens(req)[: req.prefix_len])
        self._copy_state(req)

    def _resumed(self, req: Req) -> tuple[torch.Tensor, int | None]:
        """The ids of the KV that a request resumes from, and the slot of its state."""
        places = self.cache.prefix_device_indices(req)[: req.prefix_len].long()
        source = req.kv.mamba_cow_src_index
        slot = req.kv.mamba_pool_idx if source is None else source
        return places, None if slot is None else int(slot.reshape(-1)[0])

    def _look(self, places: torch.Tensor, slot: int | None, prefix: list[int]) -> None:
        """KV and state are those of `prefix`."""
        marks = [mark(prefix[: at + 1]) for at in range(len(prefix))]
        for rows in self._rows:
            found = rows[self._rows_of(places)][:, 0, 0].tolist()
            assert found == marks, "KV of other tokens"
        if self._states is None:
            return
        assert slot is not None, "KV is resumed without a state"
        for tensor in (*self._states.conv, self._states.temporal):
            values = tensor[:, self._row_of(slot)].unique().tolist()
            assert values == marks[-1:], "the state of another prefix"

    def _copy_state(self, req: Req) -> None:
        """A state that is resumed from is copied before the forward."""
        if self._states is not None and req.kv.mamba_cow_src_index is not None:
            self._set_state(req.kv.mamba_pool_idx.reshape(1), self._tokens(req)[: req.prefix_len])

    def _tokens(self, req: Req) -> list[int]:
        return [*req.origin_input_ids, *req.output_ids]


class PollingServer(TieredServer):
    """A `TieredServer` that polls between the forwards of a request, as a scheduler does."""

    def prefill_step(self, req: Req) -> bool:
        done = super().prefill_step(req)
        self.poll()
        return done
