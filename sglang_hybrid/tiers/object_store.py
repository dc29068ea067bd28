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

from sglang_hybrid.tiers.folder import RankFolder, bytes_below
from sglang_hybrid.tiers.object_file import (
    SUFFIX,
    UNFINISHED,
    BadFile,
    Bytes,
    Header,
    encode,
    read_header,
    read_objects,
    write_file,
)

logger = logging.getLogger(__name__)

RETRY_SECONDS = 60.0
"""Between two attempts to write to a disk that is full or refuses."""

_ROOM_AT_ONCE = 0.02
"""Share of the budget that is freed at once, so that a full folder is sorted rarely."""

_TOUCH_SECONDS = 60.0
"""A file's time of last use is written to disk at most this often."""


@dataclass(slots=True)
class StoreCounts:
    """What became of objects since the start."""

    written: int = 0
    read: int = 0
    found_at_start: int = 0
    files_ignored: int = 0
    objects_damaged: int = 0
    files_evicted: int = 0
    not_written: int = 0


@dataclass(slots=True, eq=False)
class _File:
    path: Path
    header: Header
    last_use: float
    touched: float


class ObjectStore:
    """The objects of one rank. Every method may be called by any thread and raises nothing for
    what a disk does.

    Args:
        folder: whose objects these are; the store closes it.
        budget: bytes that all files may take; 0 is no bound but the disk's own.
        least_free: bytes of the file system that are left free.
        now: seconds, as files' times are.
    """

    def __init__(
        self,
        folder: RankFolder,
        budget: int = 0,
        least_free: int = 0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.folder, self.budget, self.least_free = folder, budget, least_free
        self.counts = StoreCounts()
        self.bytes = 0
        self.off = ""  # why the store is not used any more
        self.refused = ""  # why nothing is written now
        self.ready = threading.Event()  # all files that were there at the start are known
        self._now = now
        self._retry_at = 0.0
        self._warned = False
        self._objects: dict[bytes, tuple[_File, int]] = {}
        self._files: dict[Path, _File] = {}
        self._lock = threading.RLock()
        self._closed = False
        self._scanner = threading.Thread(target=self._scan, name="hybrid-disk-scan", daemon=True)
        self._scanner.start()

    def put(self, kind: str, keys: Sequence[str], contents: Sequence[Bytes]) -> bool:
        """Keep objects of one size. Returns whether all are on disk now."""
        names = [self.folder.name(kind, key) for key in keys]
        with self._lock:
            self._use([self._objects[name][0] for name in names if name in self._objects])
            new = [
                each for each in zip(names, contents, strict=True) if each[0] not in self._objects
            ]
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
        wanted: list[tuple[int, _File, int]] = []
        with self._lock:
            for place, key in enumerate(keys):
                entry = self._objects.get(self.folder.name(kind, key))
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
        """Which objects are on disk; they count as used."""
        with self._lock:
            entries = [self._objects.get(self.folder.name(kind, key)) for key in keys]
            self._use([entry[0] for entry in entries if entry is not None])
        return [entry is not None for entry in entries]

    def clear(self) -> None:
        """Forget and remove all objects."""
        self.ready.wait()
        with self._lock:
            for file in list(self._files.values()):
                self._forget(file)

    def turn_off(self, why: str) -> None:
        """Use the folder no more, and let the log say why. What is in it stays."""
        with self._lock:
            if self.off or self._closed:
                return
            self.off = why
            self._objects.clear()
            self._files.clear()
            self.bytes = 0
        logger.warning("sglang_hybrid: the disk tier is off: %s.", why)

    def close(self) -> None:
        self._closed = True
        self._scanner.join()
        self.folder.close()

    def info(self) -> dict[str, Any]:
        """For /server_info; counts over all tenants."""
        with self._lock:
            return {
                "bytes": self.bytes,
                "budget": self.budget,
                "objects": len(self._objects),
                "files": len(self._files),
                **asdict(self.counts),
                "off": self.off,
                "refused": self.refused,
            }

    def _use(self, files: Sequence[_File]) -> None:
        """Files of one call are used at the same time. What lies deeper in a prompt was written
        later and is forgotten first: without the beginning it is of no use.
        """
        now = self._now()
        for file in dict.fromkeys(files):
            file.last_use = now
            if now - file.touched > _TOUCH_SECONDS:
                file.touched = now
                with contextlib.suppress(OSError):
                    os.utime(file.path, (now, now))

    def _read(self, file: _File, wanted: Sequence[tuple[int, Bytes]]) -> list[bool]:
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

    def _lose(self, file: _File) -> None:
        self.counts.objects_damaged += len(file.header.names)
        if not self.folder.held:
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
        if self.off or self._closed or self._now() < self._retry_at:
            return False
        if not self.folder.held:
            self.turn_off(f"{self.folder.path} was removed; a restart makes it again")
            return False
        return True

    def _write(self, kind: str, names: list[bytes], contents: list[Bytes]) -> bool:
        content = encode(self.folder.identity, kind, names, contents, self._now())
        path = self.folder.path / names[0].hex()[:2] / f"{names[0].hex()}-{len(names)}{SUFFIX}"
        try:
            if not self._make_room(len(content)):
                raise OSError(errno.ENOSPC, "there is no room for it")
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_file(path, content)
            header = read_header(path, self.folder.identity)
        except (OSError, BadFile) as error:
            self._refuse(str(getattr(error, "strerror", None) or error))
            self.counts.not_written += len(names)
            return False
        if self.refused:
            logger.warning("sglang_hybrid: the disk tier is written to again.")
            self.refused = ""
        with self._lock:
            if not self.off:
                self._add(path, header, self._now())
        self.counts.written += len(names)
        return True

    def _refuse(self, why: str) -> None:
        self._retry_at = self._now() + RETRY_SECONDS
        if not self.folder.held:
            self.turn_off(f"{self.folder.path} was removed; a restart makes it again")
        elif not self.refused:
            logger.warning(
                "sglang_hybrid: nothing is written to the disk tier (%s); tried again every %d s.",
                why,
                RETRY_SECONDS,
            )
            self.refused = why

    def _add(self, path: Path, header: Header, last_use: float) -> None:
        if path in self._files:
            self._drop(self._files[path])
        file = _File(path, header, last_use, last_use)
        self._files[path] = file
        self.bytes += header.file_bytes
        for number, name in enumerate(header.names):
            self._objects.setdefault(name, (file, number))

    def _drop(self, file: _File) -> None:
        if self._files.get(file.path) is file:
            del self._files[file.path]
            self.bytes -= file.header.file_bytes
        for name in file.header.names:
            if name in self._objects and self._objects[name][0] is file:
                del self._objects[name]

    def _forget(self, file: _File) -> None:
        self._drop(file)
        self._remove(file.path)

    @staticmethod
    def _remove(path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def _make_room(self, more: int) -> bool:
        """Whether a file of this size fits, after what others left, and then what was used longest
        ago, was removed.
        """
        missing = self._missing(more)
        if missing <= 0:
            return True
        for other in self.folder.others():
            missing -= bytes_below(other)
            self.folder.remove_other(other)
            if missing <= 0:
                return True
        with self._lock:
            if missing > self.bytes:
                return False  # not even without all others
            missing = min(missing + int(_ROOM_AT_ONCE * self.bytes), self.bytes)
            for file in sorted(self._files.values(), key=lambda f: (f.last_use, -f.header.written)):
                if missing <= 0:
                    break
                missing -= file.header.file_bytes
                self._forget(file)
                self.counts.files_evicted += 1
        return True

    def _missing(self, more: int) -> int:
        over = self.bytes + more - self.budget if self.budget else 0
        if self.least_free:
            disk = os.statvfs(self.folder.path)
            over = max(over, more + self.least_free - disk.f_bavail * disk.f_frsize)
        return over

    def _scan(self) -> None:
        """Learn what earlier servers left, the most recently used first."""
        try:
            self._scan_files()
        except Exception:
            logger.exception("sglang_hybrid: the disk tier's files could not be listed.")
        finally:
            self.ready.set()

    def _scan_files(self) -> None:
        ignored: list[str] = []
        files = []
        for entry in self.folder.files():
            with contextlib.suppress(OSError):
                files.append((entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)))
        for last_use, path in sorted(files, reverse=True):
            if self._closed or self.off:
                return
            why = self._learn(path, last_use)
            if why:
                ignored.append(why)
        self.counts.files_ignored = len(ignored)
        if ignored:
            logger.warning(
                "sglang_hybrid: %d files in %s are no whole files of this model and are ignored "
                "(the first: %s).",
                len(ignored),
                self.folder.path,
                ignored[0],
            )
        logger.info(
            "sglang_hybrid: %s objects (%s bytes) are on disk in %s.",
            f"{self.counts.found_at_start:,}",
            f"{self.bytes:,}",
            self.folder.path,
        )

    def _learn(self, path: Path, last_use: float) -> str:
        """Add a file. Returns why it is ignored, or "". Bad files of ours are removed."""
        if path.name.endswith(UNFINISHED):
            return ""
        if path.suffix == ".tmp":
            self._remove(path)
            return "it is half written"
        if path.suffix != SUFFIX:
            return "it is somebody else's"
        try:
            header = read_header(path, self.folder.identity)
        except BadFile as error:
            self._remove(path)
            return str(error)
        except OSError as error:
            return error.strerror or "it cannot be read"
        with self._lock:
            if path not in self._files and not self.off:
                self._add(path, header, last_use)
                self.counts.found_at_start += len(header.names)
        return ""
