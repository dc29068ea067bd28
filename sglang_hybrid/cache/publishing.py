"""Publishes what a step of a request has computed: its KV, and the states it has left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.cache.request.growth import PathGrowth
from sglang_hybrid.cache.request.pinning import pin_published
from sglang_hybrid.cache.request.publication import Publication

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_hybrid.cache.parts import Parts
    from sglang_hybrid.cache.planning import PrefillPlans
    from sglang_hybrid.cache.radix_cache import HybridRadixCache
    from sglang_hybrid.core.records.nodes import Kind


class Publisher:
    """Publishes what the requests of one cache leave."""

    def __init__(self, cache: HybridRadixCache, parts: Parts, plans: PrefillPlans) -> None:
        self._cache = cache
        self._shadow_tree = parts.shadow_tree
        self._slots = parts.slots
        self._plans = plans
        self.growth = PathGrowth(cache, parts.shadow_tree)

    def publish(self, req: Req, up_to: int, insert: Callable[[], None]) -> list[tuple[int, Kind]]:
        """Put the first ``up_to`` tokens of ``req``, and the states in them, into the tree.

        insert: SGLang's insertion, for requests that `PathGrowth` does not serve. Returns position
        and kind of each state that is in the tree now.
        """
        publication = Publication(req, self._slots, self._plans.take_ready(req, up_to))
        self._set_publication(publication)
        try:
            if self.growth.can_grow(req) and not self._cache.disable:
                self.growth.grow(req, up_to)
            else:
                insert()
            publication.publish_rest(self.growth)
            if self._plans.full_hits is not None:
                self._plans.full_hits.on_publish(req)
        finally:
            self._set_publication(None)
        return publication.published

    @contextmanager
    def inserting(self, req: Req, position: int, kind: Kind) -> Iterator[None]:
        """A state of this kind at this position, which was not planned, is inserted for ``req``."""
        self._set_publication(Publication(req, self._slots, [], inserting=(position, kind)))
        try:
            yield
        finally:
            self._set_publication(None)

    def _set_publication(self, publication: Publication | None) -> None:
        """Count states that are inserted from now on to ``publication``; None: to no request."""
        states = self._cache.components.get(ComponentType.MAMBA)
        if states is not None:
            states.publish(publication)

    def pin(self, req: Req) -> list[int]:
        """Pin what ``req`` declared as far as it is in the tree now; returns the positions."""
        if self._shadow_tree is None:
            return []
        return pin_published(self._cache, self._shadow_tree, req)
