"""The start of a store while the server already serves: it learns what earlier servers left, and
reads what is worth most ahead into memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sglang_hybrid.core.own_files import UNFINISHED, finished_name, open_regular, remove
from sglang_hybrid.extensions.disk.folder import RankFolder
from sglang_hybrid.extensions.disk.object_file import (
    BadFile,
    has_identity,
    is_object_path,
    read_header,
)
from sglang_hybrid.extensions.disk.object_store import ObjectStore
from sglang_hybrid.extensions.disk.room import measure_others
from sglang_hybrid.extensions.disk.uses_file import load_uses

logger = logging.getLogger(__name__)


def open_store(
    folder: RankFolder,
    budget: int = 0,
    least_free: int = 0,
    warm_bytes: int = 0,
    ranks: int = 1,
    now: Callable[[], float] = time.time,
) -> ObjectStore:
    """A store that learns in the background what earlier servers left in `folder`.

    warm_bytes: most bytes of these files that are read ahead into memory. The other arguments are
    `ObjectStore`'s.
    """
    start = partial(learn_files, warm_bytes=warm_bytes)
    return ObjectStore(folder, start, budget, least_free, ranks, now)


def learn_files(store: ObjectStore, warm_bytes: int) -> None:
    """Learn all files of the store's folder, the most recently used first; then read ahead."""
    try:
        _learn_uses(store)
        _learn_all(store)
        store.keep_budget()
        measure_others(store)
    except Exception:
        logger.exception("sglang_hybrid: the disk tier's files could not be listed.")
    finally:
        store.ready.set()
    if warm_bytes:
        _read_ahead(store, warm_bytes)


def _learn_all(store: ObjectStore) -> None:
    ignored: list[str] = []
    files = []
    for entry in store.folder.files():
        with contextlib.suppress(OSError):
            files.append((entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)))
    for last_use, path in sorted(files, reverse=True):
        if not store.in_use:
            return
        why = _learn(store, path, last_use)
        if why:
            ignored.append(why)
    store.counts.files_ignored = len(ignored)
    if ignored:
        logger.warning(
            "sglang_hybrid: %d files in %s are no whole files of this model and are ignored "
            "(the first: %s).",
            len(ignored),
            store.folder.path,
            ignored[0],
        )
    logger.info(
        "sglang_hybrid: %s objects (%s bytes) are on disk in %s.",
        f"{store.counts.found_at_start:,}",
        f"{store.used_bytes:,}",
        store.folder.path,
    )


def _learn_uses(store: ObjectStore) -> None:
    """Learn how often files were used. Where that cannot be read, recency counts."""
    try:
        uses = load_uses(store.folder.uses, store.folder.identity)
    except (BadFile, OSError) as error:
        why = error if isinstance(error, BadFile) else error.strerror
        logger.warning("sglang_hybrid: how often files were used is not known: %s.", why)
        return
    if uses is not None:
        store.remember(uses)


def _learn(store: ObjectStore, path: Path, last_use: float) -> str:
    """Add a file. Returns why it is ignored, or "". What is ours and not whole is removed."""
    if path.name.endswith(UNFINISHED):
        return ""
    if not is_object_path(path.parent.name, path.name):
        return "it is somebody else's"
    if finished_name(path.name) != path.name:
        remove(path)
        return "it is half written"
    try:
        header = read_header(path, store.folder.identity)
    except BadFile as error:
        if has_identity(path, store.folder.identity):
            remove(path)
        return str(error)
    except OSError as error:
        return error.strerror or "it cannot be read"
    store.add_found(path, header, last_use)
    return ""


def _read_ahead(store: ObjectStore, warm_bytes: int) -> None:
    """Let the system read files into its memory, from which a load is a copy."""
    for path, size in store.warmest():
        if not store.in_use or store.counts.bytes_read_ahead + size > warm_bytes:
            break
        with contextlib.suppress(OSError):
            _advise(path)
            store.counts.bytes_read_ahead += size
    logger.info(
        "sglang_hybrid: %s bytes of the disk tier are read ahead.",
        f"{store.counts.bytes_read_ahead:,}",
    )


def _advise(path: Path) -> None:
    descriptor = open_regular(path)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)
