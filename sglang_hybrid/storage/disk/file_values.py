"""How soon files on disk are expected to be used again, learnt from when they were used.

A class of files is what they hold (states or KV), how often they were used, and the interval before
their last use; the reuse index (core/returns/reuse.py) learns for each how long files wait. All
files of a kind have the same worth per byte when they are used, so that their order of value is
that of their rates of use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglang_hybrid.core.costs.cost import FloatArray
from sglang_hybrid.core.returns.hazards import reuse_class_of
from sglang_hybrid.core.returns.reuse import LearntClasses, ReuseIndex
from sglang_hybrid.storage.disk.object_file import Header

ONE_USE = 60.0
"""Seconds: uses within them belong together, as the look-ups and reads of one request do."""


@dataclass(slots=True, eq=False)
class StoredFile:
    """A whole file. last_use: in seconds; touched: what of it the file system knows. uses: how
    often it was used again; interval_bucket: of the interval before the last of them; interval_id:
    what the values of files know it by.
    """

    path: Path
    header: Header
    last_use: float
    touched: float
    uses: int = 0
    interval_bucket: int = 0
    interval_id: int = -1


class FileValues:
    """The caller tells what happens to each file, and locks. Times are in seconds."""

    def __init__(self) -> None:
        self._index = ReuseIndex(unit=1.0)
        self._used = self._restored = False

    def added(self, file: StoredFile) -> None:
        file.interval_id = self._index.open(_class_of(file), file.last_use)

    def used(self, file: StoredFile, now: float) -> None:
        if now - self._index.since(file.interval_id) > ONE_USE:
            interval = self._index.on_return(file.interval_id, now)
            file.uses += 1
            file.interval_bucket = self._index.interval_bucket(interval)
            self._index.reclass(file.interval_id, _class_of(file))
            self._index.on_request(now)
            self._used = True

    @property
    def knows(self) -> bool:
        """Whether any file is known to have been used again."""
        return self._used or self._restored

    def learnt(self) -> LearntClasses:
        """What is known of how long files wait. Changes nothing."""
        return self._index.learnt()

    def restore(self, learnt: LearntClasses) -> None:
        """Begin with what was known before a restart, unless something is known already."""
        if not self._index.has_observed:
            self._index.restore(learnt)
            self._restored = True

    def dropped(self, file: StoredFile) -> None:
        self._index.close(file.interval_id)

    def rates(self, files: Sequence[StoredFile], now: float) -> FloatArray:
        """Expected uses per second [n] of files [n]."""
        self._index.on_request(now)
        classes = np.array([_class_of(file) for file in files], dtype=np.int64)
        ages = np.array([max(0.0, now - file.last_use) for file in files])
        return self._index.weights(classes, ages)[0]


def _class_of(file: StoredFile) -> int:
    states = int(file.header.kind != "kv")
    return reuse_class_of(states, 1, file.uses, file.interval_bucket)
