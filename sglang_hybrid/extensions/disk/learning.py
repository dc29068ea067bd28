"""Saves and restores what the cache has learnt of its traffic, where there is a disk tier.

The rank that receives requests reads the file when it starts and sends its content to all ranks
with the requests of a step, so that all begin with the same. It alone writes the file: while
requests end once a minute, and some seconds after the last one. Its content is collected a few
tenants at a step, and written in the background.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING

from sglang_hybrid.core.returns.history import LearntHistory, SavedHistory
from sglang_hybrid.extensions.disk.learnt_file import NO_CLASSES, load, save, unpack
from sglang_hybrid.extensions.disk.object_file import BadFile
from sglang_hybrid.serving.tenants import TenantNames

if TYPE_CHECKING:
    from sglang_hybrid.core.returns.answers import LearntAnswers
    from sglang_hybrid.core.returns.history import History
    from sglang_hybrid.extensions.disk.folder import RankFolder
    from sglang_hybrid.storage.store import Store

logger = logging.getLogger(__name__)

SAVE_SECONDS = 60.0
IDLE_SECONDS = 5.0
TENANTS_AT_ONCE = 16
"""Tenants whose models are collected at one step, which takes half a millisecond."""


@dataclass
class LearningCounts:
    """restored: tenants whose models were in the file. ignored: files that were damaged or
    foreign. unreadable: parts of a file, a tenant's or the classes, that were left out. saved,
    failed: attempts to write.
    """

    restored: int = 0
    ignored: int = 0
    unreadable: int = 0
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
        self._collected = LearntHistory(NO_CLASSES)
        self._uncollected: Iterator[tuple[str, LearntAnswers]] | None = None

    def on_request_end(self) -> None:
        """Count a request that ended."""
        self.ended += 1

    def poll(self) -> list[SavedHistory]:
        """The message with what was learnt before, once, for all ranks; later saves are begun."""
        if not self._read:
            self._read = True
            return self._restored()
        if self._uncollected is not None:
            self._collect()
        else:
            self._save_if_due()
        return []

    def handlers(self) -> list[tuple[type, Callable[[SavedHistory], None]]]:
        """The handlers that the scheduler's dispatcher must know."""
        return [(SavedHistory, self.restore)]

    def restore(self, before: SavedHistory) -> None:
        """Restore what an earlier server learnt; called on every rank, at the same step."""
        learnt, self.counts.unreadable = unpack(before.content)
        if self._history.restore(learnt, TenantNames(before.key).name):
            self.counts.restored = len(learnt.answers)

    def as_dict(self) -> dict[str, int]:
        """The values for /server_info."""
        return asdict(self.counts)

    def _folder(self) -> RankFolder | None:
        store = self._store()
        return store.folder if store is not None and store.in_use else None

    def _restored(self) -> list[SavedHistory]:
        folder = self._folder()
        if folder is None:
            return []
        try:
            content = load(folder.learnt, folder.identity)
            unreadable = 0 if content is None else unpack(content)[1]
        except (BadFile, OSError) as error:
            self.counts.ignored += 1
            why = error if isinstance(error, BadFile) else error.strerror
            logger.warning(
                "sglang_hybrid: what was learnt before is not used: of %s, %s.", folder.learnt, why
            )
            return []
        if unreadable:
            logger.warning(
                "sglang_hybrid: %d part%s of %s cannot be read; the others are used.",
                unreadable,
                "s" * (unreadable > 1),
                folder.learnt,
            )
        return [] if content is None else [SavedHistory(content, folder.key_for("tenants"))]

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
        """Begin to write what is learnt now, unless the last writing is still under way."""
        folder = self._folder()
        if folder is None or (self._writer is not None and self._writer.is_alive()):
            return
        self._last_save, self._saved_ended = self._now(), self.ended
        names = TenantNames(folder.key_for("tenants"))
        self._collected = LearntHistory(self._history.index.export())
        self._uncollected = self._history.answers.export(names.name)
        self._collect()

    def _collect(self) -> None:
        """Take what was learnt of some more tenants; after the last one, all is written."""
        assert self._uncollected is not None
        some = list(islice(self._uncollected, TENANTS_AT_ONCE))
        self._collected.answers.update(some)
        if len(some) == TENANTS_AT_ONCE:  # more may follow
            return
        self._uncollected = None
        folder = self._folder()
        if folder is not None:
            self._writer = threading.Thread(
                target=self._write,
                args=(folder, self._collected),
                name="hybrid-learnt",
                daemon=True,
            )
            self._writer.start()

    def _write(self, folder: RankFolder, learnt: LearntHistory) -> None:
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
