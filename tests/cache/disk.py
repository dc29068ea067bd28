"""`TieredServer` with files below the host, and a plain model of what the three tiers may hold."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_parallel

from sglang_hybrid.core.tiers.rates import Speeds
from sglang_hybrid.extensions.disk import file_backend
from sglang_hybrid.extensions.disk.folder import RankFolder
from sglang_hybrid.extensions.disk.object_store import ObjectStore
from sglang_hybrid.extensions.disk.store_start import open_store
from sglang_hybrid.plugin import bring_storage
from sglang_hybrid.serving.config import HybridConfig
from tests.cache.driver import Sizes
from tests.cache.tiers import TieredServer, build_tiered_cache, mark, set_speeds

FULL, MAMBA = ComponentType.FULL, ComponentType.MAMBA
ALONE = {
    **dict.fromkeys(("tp_rank", "pp_rank", "attn_tp_rank", "attn_cp_rank", "attn_dp_rank"), 0),
    **dict.fromkeys(("tp_size", "pp_size", "attn_tp_size", "attn_cp_size"), 1),
    **{"attn_dcp_size": 1, "dp_rank": None, "dp_size": 1},
}
PATIENCE = 120.0
"""Seconds after which something is taken to hang, on a busy machine, too."""
Prefix = tuple[int, ...]


@contextmanager
def disk_server(
    folder: Path,
    sizes: Sizes,
    options: HybridConfig,
    budget: int = 0,
    speeds: Speeds | None = None,
    **more: Any,
) -> Iterator[DiskServer]:
    """A server whose files are in `folder`; its threads end with the block. budget: bytes, too few
    for the flag.
    """
    bring_storage()
    flags = json.dumps({"prefetch_threshold": 4})

    def opened(folder: RankFolder, _: int, *more: int) -> ObjectStore:
        return open_store(folder, budget, *more)

    with (
        get_parallel().override(**ALONE),
        mock.patch.dict(os.environ, {"SGLANG_HYBRID_DISK_FOLDER": str(folder)}),
        mock.patch.object(file_backend, "open_store", opened),
    ):
        cache = build_tiered_cache(
            sizes,
            options,
            flags={
                "hicache_storage_backend": "file",
                "hicache_storage_backend_extra_config": flags,
                "hicache_storage_prefetch_policy": "wait_complete",
            },
            **more,
        )
        if speeds is not None:
            set_speeds(cache, speeds)
        server = DiskServer(cache, sizes)
        server.store.ready.wait()
        try:
            yield server
        finally:
            cache.shutdown()


class DiskServer(TieredServer):
    """Fetches from the disk what a request may need, as SGLang's scheduler does."""

    @property
    def store(self) -> ObjectStore:
        store: ObjectStore | None = self.cache.cache_controller.storage_backend.store
        assert store is not None, "the disk tier is off"
        return store

    def fetch(self, req: Req) -> None:
        """`req` has just arrived."""
        scheduler: Any = SimpleNamespace(
            enable_hicache_storage=True, enable_lmcache=False, tree_cache=self.cache
        )
        Scheduler._prefetch_kvcache(scheduler, req)

    def fetched(self, req: Req) -> bool:
        """True if `req` may be admitted now."""
        handle = req.cache_request_handle
        if not self.cache.check_prefetch_progress(handle):
            return False
        self.cache.pop_prefetch_loaded_span(handle)
        return True

    def give_up(self, req: Req) -> None:
        """The client of a waiting request went away."""
        self.cache.release_aborted_request(req.cache_request_handle)

    def settle(self) -> None:
        """Wait until nothing is under way between any two tiers."""
        self._wait("still under way", self._under_way)
        self.poll()

    def _wait(self, failure: str, what: Callable[[], Any]) -> None:
        """Poll until there is nothing of `what` any more."""
        ends = time.monotonic() + PATIENCE
        while left := what():
            assert time.monotonic() < ends, f"{failure}: {left}"
            time.sleep(1e-3)
            self.poll()

    def _under_way(self) -> list[str]:
        cache, controller = self.cache, self.cache.cache_controller
        released = [controller.host_mem_release_queue]
        released += controller.extra_host_mem_release_queues.values()
        names = [name for name in vars(cache) if name.startswith("ongoing_")]
        waiting = [name for name in names if getattr(cache, name)]
        waiting += ["slots to release"] * any(queue.qsize() for queue in released)
        return waiting + (["due copies"] if cache.tree_core.due_copies and not self.running else [])

    def read(self, tokens: Sequence[int], stamp: float = 0.0) -> Req:
        """A request with everything that the tiers have of it brought to the host."""
        req = self.arrive(tokens, stamp)
        self.fetch(req)
        self._wait("the disk does not answer", lambda: not self.fetched(req))
        return req

    # Whether what is stored is what it should be.

    def check_contents(self) -> None:
        """Every copy that no transfer writes now has the content of its own prefix; the host's
        pools have no slot that nobody has, and none that two have.
        """
        pools = self.cache.host_pool_group
        kv_pool, state_pool = pools.get_pool(PoolName.KV), pools.get_pool(PoolName.MAMBA)
        held: dict[ComponentType, list[int]] = {FULL: [], MAMBA: []}
        for node, prefix in self.nodes():
            start = len(prefix) - len(node.key)
            kv, state = (node.component_data[kind] for kind in (FULL, MAMBA))
            for kind, data in ((FULL, kv), (MAMBA, state)):
                if data.host_value is not None:
                    held[kind] += data.host_value.tolist()
            if node.write_through_pending_id is not None or node.load_back_pending_id is not None:
                continue
            marks = [mark(prefix[: at + 1]) for at in range(start, len(prefix))]
            if kv.value is not None:
                for rows in self._rows:
                    assert rows[self._rows_of(kv.value.long())][:, 0, 0].tolist() == marks
            if state.value is not None:
                at = self._row_of(int(state.value))
                values = self._states.temporal[:, at].unique().tolist()
                assert values == marks[-1:]
            if kv.host_value is not None:
                pages = [kv_pool.get_data_page(int(at)) for at in kv.host_value]
                assert [page.unique().tolist() for page in pages] == [[one] for one in marks]
            if state.host_value is not None:
                page = state_pool.get_data_page(int(state.host_value[0]))
                assert page.view(self._states.temporal.dtype).unique().tolist() == marks[-1:]
        for slots in held.values():
            assert len(set(slots)) == len(slots), "two nodes have one slot of the host"
        self._check_slots()
        self._check_files()

    def _check_slots(self) -> None:
        """No slot of the host's pools is lost. A read that was given up is not under way any more
        when its thread gives back what it did not fill, a moment later.
        """
        self._wait("lost slots of the host", self._lost)

    def _lost(self) -> dict[PoolName, int]:
        """The number of slots of each of the host's pools that are neither free nor some node's;
        none are while something is under way.
        """
        if self._under_way():
            return {}
        nodes = [node.component_data for node, _ in self.nodes()]
        lost = {}
        for name, kind in ((PoolName.KV, FULL), (PoolName.MAMBA, MAMBA)):
            pool = self.cache.host_pool_group.get_pool(name)
            copies = [data[kind].host_value for data in nodes]
            held = sum(len(copy) for copy in copies if copy is not None)
            if pool.available_size() + held != pool.size:
                lost[name] = pool.size - pool.available_size() - held
        return lost

    def _check_files(self) -> None:
        store = self.store
        with store._lock:
            files = store._index.files()
            assert store.used_bytes == sum(file.header.file_bytes for file in files)
            assert not store.budget or store.used_bytes <= store.budget

    def nodes(self) -> Iterator[tuple[Any, Prefix]]:
        """Every node of SGLang's tree but the root, and the tokens that lead to its end."""
        stack: list[tuple[Any, Prefix]] = [(self.cache.tree_core.root_node, ())]
        while stack:
            node, prefix = stack.pop()
            if prefix:
                yield node, prefix
            stack += [(n, (*prefix, *n.key.token_ids)) for n in node.children.values()]


class PlainTiers:
    """Prefixes whose KV, and those whose states, each tier has or may have: sets, which follow a
    server by looking at all of its nodes.

    Device and host are what the tree says. The disk has what was ever on the host, or less. A
    server that starts again finds what another one left there: `other` is that one's.
    """

    def __init__(self, server: DiskServer, other: PlainTiers | None = None) -> None:
        self._server = server
        self._computed: set[Prefix] = set()
        self.kv: dict[str, set[Prefix]] = {name: set() for name in ("device", "host", "disk")}
        self.states: dict[str, set[Prefix]] = {name: set() for name in ("device", "host", "disk")}
        if other is not None:
            self.kv["disk"], self.states["disk"] = other.kv["disk"], other.states["disk"]
            self._computed = other._computed
        self.look()

    def look(self) -> None:
        """Follow what changed. Everything that is stored was computed by some request."""
        kinds = (self.kv, self.states)
        for held in kinds:
            held["device"], held["host"] = set(), set()
        for node, prefix in self._server.nodes():
            start = len(prefix) - len(node.key)
            edge = {prefix[: at + 1] for at in range(start, len(prefix))}
            for held, component, what in zip(kinds, (FULL, MAMBA), (edge, {prefix}), strict=True):
                data = node.component_data[component]
                held["device"] |= what if data.value is not None else set()
                held["host"] |= what if data.host_value is not None else set()
        for held in kinds:
            stored = held["device"] | held["host"]
            assert stored <= self._computed, "something is stored that nobody computed"
            held["disk"] |= held["host"]

    def computes(self, tokens: Sequence[int]) -> None:
        """Note the tokens that a request has computed, or of which it resumed from a part."""
        self._computed |= {tuple(tokens[:end]) for end in range(1, len(tokens) + 1)}

    def depths(self, tokens: Sequence[int], tiers: Sequence[str]) -> set[int]:
        """The depths at which a prompt can be resumed from what these tiers have."""
        kv = set().union(*(self.kv[tier] for tier in tiers))
        states = set().union(*(self.states[tier] for tier in tiers))
        found = {0}
        for end in range(1, len(tokens)):
            prefix = tuple(tokens[:end])
            if prefix not in kv:
                break
            found |= {end} if prefix in states else set()
        return found
