"""Room for another file of a store: what other models left is removed first, then what is expected
to be used least often. Nothing is removed where the file would not fit even then.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from sglang_hybrid.extensions.disk.other_models import OtherModel

if TYPE_CHECKING:
    from sglang_hybrid.extensions.disk.object_store import ObjectStore

logger = logging.getLogger(__name__)


def make_room(store: ObjectStore, more: int) -> bool:
    """True if a file of so many bytes fits, once what is worth less is removed."""
    if max(_over_budget(store, more), _too_full(store, more)) <= 0:
        return True
    if 0 < store.budget < more:
        return False
    others = measure_others(store)
    full = _too_full(store, more)
    if full > store.used_bytes + store.other_bytes:
        return False
    for other in others:
        over = _over_budget(store, more)
        if max(over, full) <= 0:
            break
        full -= _remove(store, other, "the budget is used" if over > 0 else "the disk is full")
    missing = max(_over_budget(store, more), full)
    return missing <= 0 or store.evict(missing)


def measure_others(store: ObjectStore) -> list[OtherModel]:
    """Find other models whose objects no server uses, and count their bytes in the budget."""
    others = store.folder.others()
    store.other_bytes = sum(other.bytes for other in others)
    return others


def _over_budget(store: ObjectStore, more: int) -> int:
    """Bytes above the budget with another file of this size."""
    if not store.budget:
        return 0
    return store.used_bytes + store.other_bytes // store.ranks + more - store.budget


def _too_full(store: ObjectStore, more: int) -> int:
    """Bytes that the disk lacks for another file of this size."""
    if not store.least_free:
        return 0
    disk = os.statvfs(store.folder.path)
    return more + store.least_free - disk.f_bavail * disk.f_frsize


def _remove(store: ObjectStore, other: OtherModel, why: str) -> int:
    """Remove what another model left. Returns the bytes that this freed."""
    files, size = store.folder.remove_other(other)
    store.other_bytes -= other.bytes
    if files:
        logger.warning(
            "sglang_hybrid: %d files (%s bytes) of another model that no server uses were removed "
            "from the disk tier (%s), because %s.",
            files,
            f"{size:,}",
            store.folder.tier / other.identity,
            why,
        )
    return size
