"""What the cache has learnt of its traffic outlives the server, where there is a disk tier.

The rank that receives requests reads the file when it starts and sends its content to all ranks
with the requests of a step, so that all begin with the same. It alone writes the file, in the
background: while requests end once a minute, and some seconds after the last one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sglang_hybrid.serving.tenants import TenantNames
from sglang_hybrid.storage.disk.learnt_file import load, save, unpack
from sglang_hybrid.storage.disk.object_file import BadFile

if TYPE_CHECKING:
    from sglang_hybrid.core.returns.history import History
    from sglang_hybrid.storage.disk.folder import RankFolder
    from sglang_hybrid.storage.store import Store

logger = logging.getLogger(__name__)

SAVE_SECONDS = 60.0
IDLE_SECONDS = 5.0


@dataclass(frozen=True)
class LearntBefore:
    """content: of the file, as `learnt_file.pack` made it. key: of tenants' names in it."""

    content: bytes
    key: bytes


@dataclass
class LearningCounts:
    """restored: tenants whose models were in the file. ignored: files that were damaged or
    foreign. saved, failed: attempts to write.
    """

    restored: int = 0
    ignored: int = 0
    saved: int = 0
    failed: int = 0


class Learning:
    """Restores and saves what `history` learns.

    Args:
        history: of this rank's cache.
        store: finds the store of the disk tier; None while there is none.
        now: seconds.

    Attributes:
        ended: requests that have ended so far.
    """

    def __init__(
        self,
        history: History,
        store: Callable[[], Store | None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = LearningCounts()
        self.ended = 0
        self._history, self._store, self._now = history, store, now
        self._read = False
        self._saved_ended = 0
        self._last_ended = (0, now())  # how many, and when there were not so many yet
        self._last_save = now()
        self._writer: threading.Thread | None = None

    def finished(self) -> None:
        """A request ended."""
        self.ended += 1

    def poll(self) -> list[LearntBefore]:
        """On the rank that receives requests, at every step: what all ranks begin with, once."""
        if not self._read:
            self._read = True
            return self._restored()
        self._save_if_due()
        return []

    def restore(self, before: LearntBefore) -> None:
        """On every rank, at the same step."""
        learnt = unpack(before.content)
        if self._history.restore(learnt, TenantNames(before.key).name):
            self.counts.restored = len(learnt.answers)

    def as_dict(self) -> dict[str, int]:
        """For /server_info."""
        return asdict(self.counts)

    def _folder(self) -> RankFolder | None:
        store = self._store()
        return store.folder if store is not None and store.in_use else None

    def _restored(self) -> list[LearntBefore]:
        folder = self._folder()
        if folder is None:
            return []
        try:
            content = load(folder.learnt, folder.identity)
        except (BadFile, OSError) as error:
            self.counts.ignored += 1
            why = error if isinstance(error, BadFile) else error.strerror
            logger.warning(
                "sglang_hybrid: what was learnt before is not used: of %s, %s.", folder.learnt, why
            )
            return []
        return [] if content is None else [LearntBefore(content, folder.key_for("tenants"))]

    def _save_if_due(self) -> None:
        if self.ended == self._saved_ended:
            return
        now = self._now()
        if self.ended != self._last_ended[0]:
            self._last_ended = self.ended, now
        idle = now - self._last_ended[1] >= IDLE_SECONDS
        if idle or now - self._last_save >= SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write what is learnt now, unless the last writing is still under way."""
        folder = self._folder()
        if folder is None or (self._writer is not None and self._writer.is_alive()):
            return
        self._last_save, self._saved_ended = self._now(), self.ended
        names = TenantNames(folder.key_for("tenants"))
        learnt: Any = self._history.export(names.name)
        self._writer = threading.Thread(
            target=self._write, args=(folder, learnt), name="hybrid-learnt", daemon=True
        )
        self._writer.start()

    def _write(self, folder: RankFolder, learnt: Any) -> None:
        try:
            if not folder.is_held:
                return
            save(folder.learnt, folder.identity, learnt, time.time())
        except OSError as error:
            if not self.counts.failed:
                logger.warning(
                    "sglang_hybrid: %s cannot be written (%s).", folder.learnt, error.strerror
                )
            self.counts.failed += 1
        else:
            self.counts.saved += 1
