"""Tiers in which prefixes are stored: their KV, and the state at the end. Nothing is changed."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sglang_hybrid.explain.messages import ResidencyReq, ResidencyReqOutput
from sglang_hybrid.explain.stored import prefix_key, stored_path
from sglang_hybrid.serving.tenants import tenant

if TYPE_CHECKING:
    from sglang_hybrid.cache.radix_cache import HybridRadixCache

logger = logging.getLogger(__name__)

Place = tuple[str, str | None]
"""The tiers of the KV of a prefix, and of the state at its end; None for a model without states."""


class StoredIn(IntEnum):
    """The tier in which a prefix is stored, the fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    NOWHERE = 3


class PrefixTiers:
    """Tells the tiers of prefixes of one tenant, from the tenant's part of the tree."""

    def __init__(self, cache: HybridRadixCache) -> None:
        self._cache = cache

    def answer(self, request: ResidencyReq) -> ResidencyReqOutput:
        """A place for each prefix; none where there is no cache."""
        try:
            return ResidencyReqOutput(places=[] if self._cache.disable else self._places(request))
        except Exception:  # whatever was asked, the scheduler goes on
            logger.exception("sglang_hybrid: where prefixes are stored could not be told.")
            return ResidencyReqOutput(places=[])

    def _places(self, request: ResidencyReq) -> list[Place]:
        on_disk = DiskPrefixes(self._cache)
        prefixes: list[RadixKey] = []
        page, whose = self._cache.page_size, tenant(request.extra_key, request.cache_salt)
        for parent, edge in request.prefixes:
            ids = (prefixes[parent].token_ids if parent >= 0 else array("q")) + array("q", edge)
            key = prefix_key(self._cache, ids, whose, len(ids) // page * page)
            prefixes.append(key)
            on_disk.add(parent, key)
        return [self._place(number, key, on_disk) for number, key in enumerate(prefixes)]

    def _place(self, number: int, key: RadixKey, on_disk: DiskPrefixes) -> Place:
        has_states = self._cache.is_mamba_enabled
        path = stored_path(self._cache, key)
        kv = state = StoredIn.NOWHERE
        stored = 0 < path.kv == len(key)
        if stored:
            nodes = [node for _, node in path.nodes] + [path.part] * (path.part is not None)
            kv = max(_tier(node, ComponentType.FULL) for node in nodes)
            if has_states and path.part is None:
                state = _tier(nodes[-1], ComponentType.MAMBA)
        if not stored or (has_states and state is StoredIn.NOWHERE):
            kv_on_disk, state_on_disk = on_disk.holds(number)
            kv = kv if stored else StoredIn.DISK if kv_on_disk else StoredIn.NOWHERE
            state = StoredIn.DISK if state_on_disk and kv is not StoredIn.NOWHERE else state
        return kv.name.lower(), state.name.lower() if has_states else None


class DiskPrefixes:
    """A mask of prefixes that are on disk. The hash of a prefix continues that of the prefix above
    it, and a prefix below one that is not on disk is not hashed at all, because the scheduler waits
    for the answer.
    """

    def __init__(self, cache: HybridRadixCache) -> None:
        self._page_size = cache.page_size
        controller = getattr(cache, "cache_controller", None)
        self._backend: Any = getattr(controller, "storage_backend", None)
        self._keys: list[tuple[int, RadixKey]] = []
        self._last_pages: dict[int, str | None] = {}

    def add(self, parent: int, key: RadixKey) -> None:
        """The next prefix. parent: the number of the one above it, -1 for none."""
        self._keys.append((parent, key))

    def holds(self, number: int) -> tuple[bool, bool]:
        """True if all KV of a prefix is there, and the state at its end."""
        last_page = self._last_page(number) if self._backend is not None else None
        if last_page is None:
            return False, False
        return True, self._knows(PoolName.MAMBA, [last_page])

    def _last_page(self, wanted: int) -> str | None:
        """The key under which the last page of a prefix is stored; None if not all its pages are
        there.
        """
        above = []  # itself and those above it that were not looked up yet, the deepest first
        number = wanted
        while number >= 0 and number not in self._last_pages:
            above.append(number)
            number = self._keys[number][0]
        for each in reversed(above):
            parent, key = self._keys[each]
            start = len(self._keys[parent][1]) if parent >= 0 else 0
            last = self._last_pages.get(parent)
            there = not start or last is not None
            self._last_pages[each] = self._last_stored_page(last, start, key) if there else None
        return self._last_pages[wanted]

    def _last_stored_page(self, last: str | None, start: int, key: RadixKey) -> str | None:
        """The last page of `key`, of which `start` tokens are known to be there and to end in the
        page `last`; None if another is not there.
        """
        if start == len(key):
            return last
        pages = get_storage_hash_str(key[start:], last, page_size=self._page_size)
        return pages[-1] if self._knows(PoolName.KV, pages) else None

    def _knows(self, kind: PoolName, pages: Sequence[str]) -> bool:
        knows = getattr(self._backend, "knows", None)
        if knows is not None:
            return all(knows(kind, pages))
        # SGLang's own backends tell of KV only
        return kind is PoolName.KV and self._backend.batch_exists(pages) == len(pages)


def _tier(node: Any, component: ComponentType) -> StoredIn:
    """The fastest tier of SGLang's tree that holds this component of `node`."""
    data = node.component_data[component]
    if data.value is not None:
        return StoredIn.DEVICE
    return StoredIn.NOWHERE if data.host_value is None else StoredIn.HOST


def fastest(answers: Sequence[Sequence[Sequence[str | None]]]) -> list[Place]:
    """The fastest tier for each prefix among the answers of several data-parallel ranks. answers
    [ranks, prefixes]; ranks without a cache have none.
    """
    order = [tier.name.lower() for tier in StoredIn]
    told = [answer for answer in answers if answer]
    found: list[Place] = []
    for places in zip(*told, strict=True):
        kv = min((place[0] for place in places), key=order.index)
        states = [place[1] for place in places if place[1] is not None]
        found.append((str(kv), min(states, key=order.index) if states else None))
    return found
