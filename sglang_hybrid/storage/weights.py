"""KV and states on disk belong to the weights that the server was started with.

SGLang empties its cache after an update of the weights and leaves the third tier as it is; the next
request would be answered from KV of the old weights (hooks/models.py).
"""

from __future__ import annotations

from weakref import WeakSet

from sglang_hybrid.storage.store import Store

WHY_OFF = "the weights were updated; a restart with them uses the disk again"

_stores: WeakSet[Store] = WeakSet()
_changed = False


def watch(store: Store) -> None:
    """Turn this store off as soon as weights change, or now if they have since the start."""
    _stores.add(store)
    if _changed:
        store.turn_off(WHY_OFF)


def on_change() -> None:
    """Turn all watched stores off: weights are about to be updated in place. Called from hooks on
    SGLang's weight updater.
    """
    global _changed
    _changed = True
    for store in list(_stores):
        store.turn_off(WHY_OFF)
