"""Objects on disk that are found by name: written once, read often, forgotten by recency.

Nothing that goes wrong with the disk reaches a caller: an object that cannot be read is not there,
and one that cannot be written is not kept. One line in the log says so, and the report counts it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from sglang_hybrid.core.own_files import ForeignFile, remove, write_file
from sglang_hybrid.extensions.disk.folder import RankFolder
from sglang_hybrid.extensions.disk.object_file import (
    BadFile,
    Bytes,
    Header,
    encode,
    object_path,
    read_header,
    read_objects,
)
from sglang_hybrid.extensions.disk.object_index import ObjectIndex, StoredFile
from sglang_hybrid.extensions.disk.room import make_room
from sglang_hybrid.extensions.disk.uses_file import Uses, save_uses

logger = logging.getLogger(__name__)

RETRY_SECONDS = 60.0
"""Time between two attempts to write to a disk that is full or refuses."""

_ROOM_AT_ONCE = 0.02
"""Share of the budget that is freed at once, so that a full folder is sorted rarely."""

_SAVE_SECONDS = 60.0
"""Seconds between two writings of how often files were used, at least; it is written at the end,
too.
"""

_TOUCH_SECONDS = 60.0
"""A file's time of last use is written to disk at most this often."""


@dataclass(slots=True)
class StoreCounts:
    """Counts of objects since the start, by what became of them."""

    written: int = 0
    read: int = 0
    found_at_start: int = 0
    bytes_read_ahead: int = 0
    files_ignored: int = 0
    objects_damaged: int = 0
    files_evicted: int = 0
    not_written: int = 0


class ObjectStore:
    """The objects of one rank. Every method may be called by any thread and raises nothing for
    what a disk does.

    Args:
        folder: whose objects these are; the store closes it.
        start: called with the store, in a thread of its own, to learn what is in the folder; it
            sets `ready` (`store_start.open_store`).
        budget: bytes that the rank's files may take, with its part of what other models left
            that no server uses; 0 is no bound but the disk's own. Until the store is `ready`, files
            of earlier servers that it has not read yet are not counted.
        least_free: bytes of the file system that are left free.
        ranks: among which what other models left is divided.
        now: seconds, as files' times are.
    """

    def __init__(
        self,
        folder: RankFolder,
        start: Callable[[ObjectStore], None],
        budget: int = 0,
        least_free: int = 0,
        ranks: int = 1,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.folder, self.budget, self.least_free = folder, budget, least_free
        self.counts = StoreCounts()
        self.off = ""  # why the store is not used any more
        self.refused = ""  # why nothing is written now
        self.ready = threading.Event()  # all files that were there at the start are known
        self.ranks = ranks
        self.other_bytes = 0  # of other models that no server uses, as far as they are counted
        self._now = now
        self._retry_at = 0.0
        self._uses_saved = now()
        self._saver: threading.Thread | None = None
        self._cleared = False
        self._removers: list[threading.Thread] = []
        self._warned = False
        self._index = ObjectIndex()
        self._lock = threading.RLock()
        self._write_lock = threading.Lock()  # from the check for room to the entry in the index
        self._closed = False
        self._starter = threading.Thread(
            target=start, args=(self,), name="hybrid-disk-start", daemon=True
        )
        self._starter.start()

    @property
    def used_bytes(self) -> int:
        """Bytes of all files of this rank."""
        return self._index.bytes

    def put(self, kind: str, keys: Sequence[str], contents: Sequence[Bytes]) -> bool:
        """Keep objects of one size. Returns whether all are on disk now."""
        names = [self.folder.name(kind, key) for key in keys]
        with self._lock:
            found = [self._index.find(name) for name in names]
            self._use([entry[0] for entry in found if entry is not None])
            pairs = zip(names, contents, strict=True)
            new = [pair for pair, entry in zip(pairs, found, strict=True) if entry is None]
        if not new:
            return True
        if not self._may_write():
            self.counts.not_written += len(new)
            return False
        return self._write(kind, [name for name, _ in new], [content for _, content in new])

    def get(self, kind: str, keys: Sequence[str], buffers: Sequence[Bytes]) -> list[bool]:
        """Read objects into buffers of their size. Returns which were there and whole; the other
        buffers are undefined.
        """
        found = [False] * len(keys)
        wanted: list[tuple[int, StoredFile, int]] = []
        with self._lock:
            for place, key in enumerate(keys):
                entry = self._index.find(self.folder.name(kind, key))
                if entry is not None and entry[0].header.size == buffers[place].nbytes:
                    wanted.append((place, *entry))
            self._use([file for _, file, _ in wanted])
        for file, group in groupby(wanted, key=lambda each: each[1]):
            places = list(group)
            which = [(number, buffers[place]) for place, _, number in places]
            for (place, _, _), right in zip(places, self._read(file, which), strict=True):
                found[place] = right
        self.counts.read += sum(found)
        return found

    def contains(self, kind: str, keys: Sequence[str]) -> list[bool]:
        """A mask of the objects that are on disk; they count as used."""
        with self._lock:
            entries = [self._index.find(self.folder.name(kind, key)) for key in keys]
            self._use([entry[0] for entry in entries if entry is not None])
        return [entry is not None for entry in entries]

    def knows(self, kind: str, keys: Sequence[str]) -> list[bool]:
        """A mask of the objects that are on disk; asking for them is no use of them."""
        with self._lock:
            return [self._index.find(self.folder.name(kind, key)) is not None for key in keys]

    def clear(self) -> None:
        """Forget all objects, and what was learnt. Their files are removed in the background, also
        those that the start has not found yet: the scheduler asks, and waits for nobody.
        """
        with self._lock:
            self._cleared = True
            cleared, self._index = self._index, ObjectIndex()
        remove(self.folder.learnt)
        remove(self.folder.uses)
        remover = threading.Thread(
            target=self._remove, args=(cleared,), name="hybrid-disk-clear", daemon=True
        )
        remover.start()
        self._removers = [each for each in self._removers if each.is_alive()] + [remover]

    def _remove(self, cleared: ObjectIndex) -> None:
        for file in cleared.files():
            with self._write_lock:
                if file.path not in self._index:  # else it was written since
                    remove(file.path, file.header.file_bytes)

    @property
    def in_use(self) -> bool:
        """True if the store is neither off nor closed."""
        return not (self.off or self._closed)

    def add_found(self, path: Path, header: Header, last_use: float) -> None:
        """Add a file that was there at the start, unless it was written and evicted since the start
        listed it. It is removed if the store was cleared since.
        """
        with self._write_lock, self._lock:
            if path in self._index or not self.in_use or not os.path.lexists(path):
                return
            if self._cleared:
                remove(path, header.file_bytes)
                return
            self._index.add(path, header, last_use)
            self.counts.found_at_start += len(header.names)

    def warmest(self) -> list[tuple[Path, int]]:
        """All files and their bytes, in the order in which they are worth reading ahead
        (`ObjectIndex.warmest`).
        """
        with self._lock:
            files = self._index.warmest(self._now())
        return [(file.path, file.header.file_bytes) for file in files]

    def remember(self, uses: Uses) -> None:
        """Begin with how often files were used before the start."""
        with self._lock:
            if not self._cleared:
                self._index.restore(uses)

    def evict(self, least: int) -> bool:
        """Remove what is expected to be used least often, so many bytes or some more. Returns False
        if there is not as much; then nothing is removed. The caller lets nobody write meanwhile.
        """
        with self._lock:
            if least > self.used_bytes:
                return False
            missing = min(least + int(_ROOM_AT_ONCE * self.used_bytes), self.used_bytes)
            files = self._index.files_by_value(self._now())
        for file in files:
            if missing <= 0:
                break
            with self._lock:
                current = self._index.drop(file)
            if current:  # others may ask meanwhile
                remove(file.path, file.header.file_bytes)
                missing -= file.header.file_bytes
                self.counts.files_evicted += 1
        return True

    def keep_budget(self) -> None:
        """Remove files above the budget. What is put while the store starts and what earlier
        servers left may be more than it together.
        """
        with self._write_lock:
            if 0 < self.budget < self.used_bytes:
                self.evict(self.used_bytes - self.budget)

    def turn_off(self, why: str) -> None:
        """Use the folder no more, and let the log say why. The files in it stay."""
        with self._lock:
            if self.off or self._closed:
                return
            self.off = why
            self._index = ObjectIndex()
        logger.warning("sglang_hybrid: the disk tier is off: %s.", why)

    def close(self) -> None:
        if self._saver is not None:
            self._saver.join()
        self._save_uses()
        self._closed = True
        for thread in (*self._removers, self._starter):
            thread.join()
        self.folder.close()

    def info(self) -> dict[str, Any]:
        """Counts over all tenants, for /server_info. The scheduler calls it; it never waits."""
        return {
            "bytes": self.used_bytes,
            "budget": self.budget,
            "objects": self._index.objects,
            "files": len(self._index),
            **asdict(self.counts),
            "off": self.off,
            "refused": self.refused,
        }

    def _use(self, files: Sequence[StoredFile]) -> None:
        """Files of one call are used at the same time. What lies deeper in a prompt was written
        later and is forgotten first: without the beginning it is of no use.
        """
        now = self._now()
        for file in dict.fromkeys(files):
            self._index.on_use(file, now)
            if abs(now - file.touched) > _TOUCH_SECONDS:
                file.touched = now
                with contextlib.suppress(OSError):
                    os.utime(file.path, (now, now), follow_symlinks=False)
        saves = self._saver is not None and self._saver.is_alive()  # one that began before
        if files and abs(now - self._uses_saved) > _SAVE_SECONDS and not saves:
            self._uses_saved = now
            self._saver = threading.Thread(target=self._save_uses, name="hybrid-uses", daemon=True)
            self._saver.start()

    def _save_uses(self) -> None:
        """Write how often files were used; nothing is lost but that if it fails."""
        if not (self.in_use and self.ready.is_set() and self.folder.is_held):
            return
        with self._lock:
            uses = self._index.uses()
        try:
            save_uses(self.folder.uses, self.folder.identity, uses, self._now())
        except (OSError, ValueError) as error:
            logger.debug("the uses of files were not saved: %s", error)

    def _read(self, file: StoredFile, wanted: Sequence[tuple[int, Bytes]]) -> list[bool]:
        try:
            found = read_objects(file.path, file.header, self.folder.identity, wanted)
        except FileNotFoundError:
            found = [False] * len(wanted)
            self._lose(file)
        except OSError as error:
            self._lose(file)
            self._warn_if_first("a file cannot be read (%s)", error.strerror)
            return [False] * len(wanted)
        else:
            if not all(found):
                self._lose(file)
                self._warn_if_first("an object does not have its checksum%s", "")
        return found

    def _lose(self, file: StoredFile) -> None:
        self.counts.objects_damaged += len(file.header.names)
        if not self.folder.is_held:
            self.turn_off(f"{self.folder.path} was removed; a restart makes it again")
            return
        with self._lock:
            self._forget(file)

    def _warn_if_first(self, what: str, argument: object) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                f"sglang_hybrid: on disk {what}; it is not used, and later ones are only counted.",
                argument,
            )

    def _may_write(self) -> bool:
        waits = self._retry_at - self._now()
        if not self.in_use or 0 < waits <= RETRY_SECONDS:  # more where the clock went back
            return False
        if not self.folder.is_held:
            self.turn_off(f"{self.folder.path} was removed; a restart makes it again")
            return False
        return True

    def _write(self, kind: str, names: list[bytes], contents: list[Bytes]) -> bool:
        content = encode(self.folder.identity, kind, names, contents, self._now())
        path = object_path(self.folder.path, names)
        try:
            with self._write_lock:
                self._write_file(path, content)
        except ForeignFile as error:
            self._warn_if_first("something else has the name of an object (%s)", error.filename)
            self.counts.not_written += len(names)
            return False
        except (OSError, BadFile) as error:
            self._refuse(str(getattr(error, "strerror", None) or error))
            self.counts.not_written += len(names)
            return False
        if self.refused:
            logger.warning("sglang_hybrid: the disk tier is written to again.")
            self.refused = ""
        self.counts.written += len(names)
        return True

    def _write_file(self, path: Path, content: bytes) -> None:
        """Make room, write and enter into the index. Raises OSError, BadFile."""
        if not make_room(self, len(content)):
            raise OSError(errno.ENOSPC, "there is no room for it")
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(mode=0o700)
        write_file(path, content)
        header = read_header(path, self.folder.identity)
        with self._lock:
            if not self.off:
                self._index.add(path, header, self._now())

    def _refuse(self, why: str) -> None:
        self._retry_at = self._now() + RETRY_SECONDS
        if not self.folder.is_held:
            self.turn_off(f"{self.folder.path} was removed; a restart makes it again")
        elif not self.refused:
            logger.warning(
                "sglang_hybrid: nothing is written to the disk tier (%s); tried again every %d s.",
                why,
                RETRY_SECONDS,
            )
            self.refused = why

    def _forget(self, file: StoredFile) -> None:
        if self._index.drop(file):  # else its path may be that of a file written since
            remove(file.path, file.header.file_bytes)
