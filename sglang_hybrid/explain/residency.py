"""In which tier prefixes are stored: their KV, and the state at their end. It changes nothing."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sglang_hybrid.explain.cache_view import ExplainedCache
from sglang_hybrid.explain.messages import ResidencyReq, ResidencyReqOutput

logger = logging.getLogger(__name__)

Place = tuple[str, str | None]
"""Where the KV of a prefix is, and the state at its end; None for a model without states."""


class Tier(IntEnum):
    """The fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    NOWHERE = 3


class Residency:
    """Answers for the prefixes of one tenant at a time, from the tenant's part of the tree."""

    def __init__(self, cache: ExplainedCache) -> None:
        self._cache = cache

    def answer(self, asked: ResidencyReq) -> ResidencyReqOutput:
        """A place for each prefix; none where there is no cache."""
        try:
            return ResidencyReqOutput(places=[] if self._cache.disable else self._places(asked))
        except Exception:  # whatever was asked, the scheduler goes on
            logger.exception("sglang_hybrid: where prefixes are stored could not be told.")
            return ResidencyReqOutput(places=[])

    def _places(self, asked: ResidencyReq) -> list[Place]:
        prefixes: list[array[int]] = []
        for parent, edge in asked.prefixes:
            head = prefixes[parent] if parent >= 0 else array("q")
            prefixes.append(head + array("q", edge))
        return [self._place(ids, asked.extra_key, asked.cache_salt) for ids in prefixes]

    def _place(self, ids: array[int], extra_key: str | None, cache_salt: str | None) -> Place:
        tree, page = self._cache.tree_core, self._cache.page_size
        end = len(ids) // page * page
        key = RadixKey(ids, extra_key, is_bigram=tree.is_eagle, limit=end, cache_salt=cache_salt)
        kv, state, depth, node = Tier.DEVICE, Tier.NOWHERE, 0, tree.root_node
        while depth + page <= len(key):
            child = node.children.get(key.child_key_at(depth, page))
            tier = Tier.NOWHERE if child is None else _tier(child, ComponentType.FULL)
            same = 0 if child is None else child.key.match_at(key, depth, page_size=page)
            if tier is Tier.NOWHERE or not same:
                break
            kv, depth, node = max(kv, tier), depth + same, child
            if same < len(child.key):
                break
            if depth == len(key) and self._cache.is_mamba_enabled:
                state = _tier(child, ComponentType.MAMBA)
        stored = 0 < depth == len(key)
        if not stored or (self._cache.is_mamba_enabled and state is Tier.NOWHERE):
            kv_on_disk, state_on_disk = self._on_disk(key)
            kv = kv if stored else Tier.DISK if kv_on_disk else Tier.NOWHERE
            state = Tier.DISK if state_on_disk and kv is not Tier.NOWHERE else state
        has_states = self._cache.is_mamba_enabled
        return kv.name.lower(), state.name.lower() if has_states else None

    def _on_disk(self, key: RadixKey) -> tuple[bool, bool]:
        """Whether the third tier has all KV of `key`, and the state at its end."""
        controller = getattr(self._cache, "cache_controller", None)
        backend: Any = getattr(controller, "storage_backend", None)
        if backend is None or not len(key):
            return False, False
        pages = get_storage_hash_str(key, page_size=self._cache.page_size)
        if backend.batch_exists(pages) < len(pages):
            return False, False
        holds = getattr(backend, "holds", None)  # SGLang's own backends tell of KV only
        return True, holds is not None and bool(holds(PoolName.MAMBA, pages[-1:])[0])


def _tier(node: Any, component: ComponentType) -> Tier:
    """The fastest tier of SGLang's tree that holds this component of `node`."""
    data = node.component_data[component]
    if data.value is not None:
        return Tier.DEVICE
    return Tier.NOWHERE if data.host_value is None else Tier.HOST


def fastest(answers: Sequence[Sequence[Sequence[str | None]]]) -> list[Place]:
    """Of the answers of several data-parallel ranks, the fastest tier for each prefix. answers
    [ranks, prefixes]; ranks without a cache have none.
    """
    order = [tier.name.lower() for tier in Tier]
    told = [answer for answer in answers if answer]
    found: list[Place] = []
    for places in zip(*told, strict=True):
        kv = min((place[0] for place in places), key=order.index)
        states = [place[1] for place in places if place[1] is not None]
        found.append((str(kv), min(states, key=order.index) if states else None))
    return found
