"""Which objects are in which files, and which files are worth most."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_hybrid.tiers.file_values import FileValues
from sglang_hybrid.tiers.object_file import Header


@dataclass(slots=True, eq=False)
class StoredFile:
    """A whole file. last_use: in seconds; touched: what of it the file system knows. uses: since
    the start; interval_bucket: of the interval before the last of them; interval_id: what the
    values of files know it by.
    """

    path: Path
    header: Header
    last_use: float
    touched: float
    uses: int = 0
    interval_bucket: int = 0
    interval_id: int = -1


class ObjectIndex:
    """Files by path, and their objects by name. The caller locks."""

    def __init__(self) -> None:
        self.bytes = 0
        self._objects: dict[bytes, tuple[StoredFile, int]] = {}
        self._files: dict[Path, StoredFile] = {}
        self._values = FileValues()

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

    def used(self, file: StoredFile, now: float) -> None:
        """Something of a file was looked up, read or written again."""
        if self._files.get(file.path) is file:
            self._values.used(file, now)
        file.last_use = now

    def add(self, path: Path, header: Header, last_use: float) -> None:
        """A file is there now, instead of an earlier one of this path."""
        if path in self._files:
            self.drop(self._files[path])
        file = self._files[path] = StoredFile(path, header, last_use, last_use)
        self._values.added(file)
        self.bytes += header.file_bytes
        for number, name in enumerate(header.names):
            self._objects.setdefault(name, (file, number))

    def drop(self, file: StoredFile) -> None:
        """A file is there no more."""
        if self._files.get(file.path) is file:
            del self._files[file.path]
            self._values.dropped(file)
            self.bytes -= file.header.file_bytes
        for name in file.header.names:
            found = self._objects.get(name)
            if found is not None and found[0] is file:
                del self._objects[name]
