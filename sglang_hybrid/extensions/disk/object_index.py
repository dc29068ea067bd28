"""An index of the objects in files, and of the worth of files.

How soon a file is used again is learnt by class (core/returns/reuse.py): a class is what a file
holds (states or KV), how often it was used, and the interval before its last use. All files of a
kind have the same worth per byte when they are used, so the order of their worth is that of their
expected uses per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.costs.cost import FloatArray
from sglang_hybrid.core.returns.hazards import reuse_class_of
from sglang_hybrid.core.returns.reuse import ReuseIndex
from sglang_hybrid.extensions.disk.object_file import Header
from sglang_hybrid.extensions.disk.uses_file import Uses

ONE_USE = 60.0
"""Seconds: uses of a file within them count as one, as the look-ups and reads of one request do."""


@dataclass(slots=True, eq=False)
class StoredFile:
    """A whole file. last_use: in seconds since the epoch. touched: the last use that the file
    system knows. uses: how often the file was used again. interval_bucket: of the interval before
    the last of these uses. interval_id: of the open interval in the reuse index.
    """

    path: Path
    header: Header
    last_use: float
    touched: float
    uses: int = 0
    interval_bucket: int = 0
    interval_id: int = -1

    @property
    def reuse_class(self) -> int:
        return reuse_class_of(int(self.header.kind != "kv"), 1, self.uses, self.interval_bucket)


class ObjectIndex:
    """Files by path, and their objects by name. The caller locks. Times are in seconds."""

    def __init__(self) -> None:
        self.bytes = 0
        self._objects: dict[bytes, tuple[StoredFile, int]] = {}
        self._files: dict[Path, StoredFile] = {}
        self._intervals = ReuseIndex(unit=1.0)
        self._knows_uses = False  # some file is known to have been used again
        self._before: dict[bytes, tuple[int, int]] = {}  # uses and bucket, of files not yet found

    @property
    def objects(self) -> int:
        """The number of objects."""
        return len(self._objects)

    def __len__(self) -> int:
        """The number of files."""
        return len(self._files)

    def __contains__(self, path: Path) -> bool:
        return path in self._files

    def find(self, name: bytes) -> tuple[StoredFile, int] | None:
        """The file of an object, and the object's number in it."""
        return self._objects.get(name)

    def files(self) -> list[StoredFile]:
        return list(self._files.values())

    def files_by_value(self, now: float) -> list[StoredFile]:
        """All files, the one that is expected to be used least often first. Of equals the longest
        unused is first; of files that were used at the same time, the one that was written last.
        """
        files = self.files()
        last_use = np.array([file.last_use for file in files])
        written = np.array([file.header.written for file in files])
        return _ordered(files, self._rates(files, last_use, now), last_use, -written)

    def warmest(self, now: float) -> list[StoredFile]:
        """All files, the one that is expected to be used most often first. Of equals, and where no
        use is known, the one that was used last is first; within the same minute states come
        before KV.
        """
        files = self.files()
        last_use = np.array([file.last_use for file in files])
        rates = self._rates(files, last_use, now if self._knows_uses else None)
        is_kv = np.array([file.header.kind == "kv" for file in files])
        return _ordered(files, -rates, -(last_use // 60), is_kv, -last_use)

    def _rates(
        self, files: Sequence[StoredFile], last_use: FloatArray, now: float | None
    ) -> FloatArray:
        """Expected uses per second [n] of `files`, last used at `last_use` [n]; 0 if `now` is
        None.
        """
        if not files or now is None:
            return np.zeros(len(files))
        self._intervals.on_request(now)
        classes = np.array([file.reuse_class for file in files], dtype=np.int64)
        return self._intervals.weights(classes, np.maximum(now - last_use, 0.0))[0]

    def uses(self) -> Uses:
        """Counts of uses of files, and what they tell of others. Changes nothing."""
        again = [file for file in self.files() if file.uses]
        return Uses(
            self._intervals.export(),
            b"".join(file.header.names[0] for file in again),
            np.array([file.uses for file in again], dtype=np.int64),
            np.array([file.interval_bucket for file in again], dtype=np.int64),
        )

    def restore(self, uses: Uses) -> None:
        """Begin with what was known before a restart: of files that are added from now on, and of
        classes unless some interval was observed already.
        """
        self._before = uses.of_file()
        if not self._intervals.has_observed:
            self._intervals.restore(uses.classes)
            self._knows_uses = True

    def on_use(self, file: StoredFile, now: float) -> None:
        """Note that an object of a file was looked up, read or written again."""
        current = self._files.get(file.path) is file
        if current and now - self._intervals.since(file.interval_id) > ONE_USE:
            interval = self._intervals.on_return(file.interval_id, now)
            file.uses += 1
            file.interval_bucket = self._intervals.interval_bucket(interval)
            self._intervals.reclass(file.interval_id, file.reuse_class)
            self._intervals.on_request(now)
            self._knows_uses = True
        file.last_use = now

    def add(self, path: Path, header: Header, last_use: float) -> None:
        """A file is there now, instead of an earlier one of this path."""
        if path in self._files:
            self.drop(self._files[path])
        before = self._before.pop(header.names[0], (0, 0))
        file = self._files[path] = StoredFile(path, header, last_use, last_use, *before)
        file.interval_id = self._intervals.open(file.reuse_class, last_use)
        self.bytes += header.file_bytes
        for number, name in enumerate(header.names):
            self._objects.setdefault(name, (file, number))

    def drop(self, file: StoredFile) -> bool:
        """A file is there no more. Returns whether it was the one of its path until now."""
        current = self._files.get(file.path) is file
        if current:
            del self._files[file.path]
            self._intervals.close(file.interval_id)
            self.bytes -= file.header.file_bytes
        for name in file.header.names:
            found = self._objects.get(name)
            if found is not None and found[0] is file:
                del self._objects[name]
        return current


def _ordered(files: Sequence[StoredFile], *keys: npt.NDArray[Any]) -> list[StoredFile]:
    """`files`, ordered by the first of the keys [n] each, of equals by the next one. numpy sorts:
    while Python's own does, no other thread of the scheduler goes on.
    """
    return [files[at] for at in np.lexsort(keys[::-1]).tolist()]
