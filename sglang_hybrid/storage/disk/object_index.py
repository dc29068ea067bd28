"""Which objects are in which files, and which files are worth most."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sglang_hybrid.storage.disk.file_values import FileValues, StoredFile
from sglang_hybrid.storage.disk.object_file import Header
from sglang_hybrid.storage.disk.uses_file import Uses


class ObjectIndex:
    """Files by path, and their objects by name. The caller locks."""

    def __init__(self) -> None:
        self.bytes = 0
        self._objects: dict[bytes, tuple[StoredFile, int]] = {}
        self._files: dict[Path, StoredFile] = {}
        self._values = FileValues()
        self._before: dict[bytes, tuple[int, int]] = {}  # uses and bucket, of files not yet found

    @property
    def objects(self) -> int:
        """How many there are."""
        return len(self._objects)

    def __contains__(self, path: Path) -> bool:
        return path in self._files

    def find(self, name: bytes) -> tuple[StoredFile, int] | None:
        """The file of an object, and its number there."""
        return self._objects.get(name)

    def files(self) -> list[StoredFile]:
        return list(self._files.values())

    def files_by_value(self, now: float) -> list[StoredFile]:
        """Those that are expected to be used least often first; of equals the longest unused; of
        those used at the same time, what was written last.
        """
        files = self.files()
        rates = self._values.rates(files, now).tolist() if files else []
        order = sorted(
            zip(rates, files, strict=True),
            key=lambda one: (one[0], one[1].last_use, -one[1].header.written),
        )
        return [file for _, file in order]

    def warmest(self, now: float) -> list[StoredFile]:
        """Those that are expected to be used most often first. Of equals, and where nothing is
        known of uses, what was used last; of that in the same minute states before KV.
        """
        files = self.files()
        rates = [0.0] * len(files)
        if files and self._values.knows:
            rates = self._values.rates(files, now).tolist()
        order = sorted(
            zip(rates, files, strict=True),
            key=lambda one: (
                *(-one[0], -int(one[1].last_use / 60)),
                *(one[1].header.kind == "kv", -one[1].last_use),
            ),
        )
        return [file for _, file in order]

    def uses(self) -> Uses:
        """How often files were used again, and what that tells of others."""
        again = [file for file in self.files() if file.uses]
        return Uses(
            self._values.export(),
            b"".join(file.header.names[0] for file in again),
            np.array([file.uses for file in again], dtype=np.int64),
            np.array([file.interval_bucket for file in again], dtype=np.int64),
        )

    def restore(self, uses: Uses) -> None:
        """What was known before a restart; files that are added later were used as often as that
        says.
        """
        self._values.restore(uses.classes)
        self._before = uses.of_file()

    def used(self, file: StoredFile, now: float) -> None:
        """Something of a file was looked up, read or written again."""
        if self._files.get(file.path) is file:
            self._values.used(file, now)
        file.last_use = now

    def add(self, path: Path, header: Header, last_use: float) -> None:
        """A file is there now, instead of an earlier one of this path."""
        if path in self._files:
            self.drop(self._files[path])
        before = self._before.pop(header.names[0], (0, 0))
        file = self._files[path] = StoredFile(path, header, last_use, last_use, *before)
        self._values.added(file)
        self.bytes += header.file_bytes
        for number, name in enumerate(header.names):
            self._objects.setdefault(name, (file, number))

    def drop(self, file: StoredFile) -> bool:
        """A file is there no more. Returns whether it was the one of its path until now."""
        current = self._files.get(file.path) is file
        if current:
            del self._files[file.path]
            self._values.dropped(file)
            self.bytes -= file.header.file_bytes
        for name in file.header.names:
            found = self._objects.get(name)
            if found is not None and found[0] is file:
                del self._objects[name]
        return current
