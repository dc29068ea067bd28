"""KV and states on disk belong to the weights that the server was started with.

SGLang empties its cache after an update of the weights and leaves the third tier as it is; the next
request would be answered from KV of the old weights (hooks/models.py). It does not empty the cache
while anything is copied between tiers, so that is waited for.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

from sglang_hybrid.storage.store import Store

WHY_OFF = "the weights were updated; a restart with them uses the disk again"


class Tiered(Protocol):
    """A cache that copies between tiers."""

    def end_transfers(self) -> None:
        """Let all copies that are under way end."""
        ...


_stores: WeakSet[Store] = WeakSet()
_caches: WeakSet[Tiered] = WeakSet()
_changed = False


def watch(store: Store) -> None:
    """Turn this store off as soon as weights change, or now if they have since the start."""
    _stores.add(store)
    if _changed:
        store.turn_off(WHY_OFF)


def watch_transfers(cache: Tiered) -> None:
    """Have copies in `cache` end before weights change or memory is released."""
    _caches.add(cache)


def on_change() -> None:
    """Turn all watched stores off, and wait for copies: weights are about to be updated in place.
    Called from hooks on SGLang's weight updater, on all ranks alike.
    """
    global _changed
    _changed = True
    for store in list(_stores):
        store.turn_off(WHY_OFF)
    end_transfers()


def end_transfers() -> None:
    """Let all copies that are under way in watched caches end; called on all ranks alike."""
    for cache in list(_caches):
        cache.end_transfers()
