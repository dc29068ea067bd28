"""KV and states on disk belong to the weights that the server was started with.

SGLang empties its cache after an update of the weights and leaves the third tier as it is; the next
request would be answered from KV of the old weights (patch 0056).
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet


class Store(Protocol):
    def turn_off(self, why: str) -> None: ...


_stores: WeakSet[Store] = WeakSet()


def watch(store: Store) -> None:
    """Turn this store off as soon as weights change."""
    _stores.add(store)


def changed() -> None:
    """Weights are about to be updated in place. Called by SGLang's weight updater."""
    for store in list(_stores):
        store.turn_off("the weights were updated; a restart with them uses the disk again")
