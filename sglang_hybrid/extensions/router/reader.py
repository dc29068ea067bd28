"""Puts the pages of a replica's snapshot and its batches of events into order. No I/O."""

from __future__ import annotations

from sglang_hybrid.extensions.router.index import ReplicaIndex
from sglang_hybrid.extensions.router.wire import (
    Page,
    apply_events,
    decode_batch,
    decode_page_events,
)


class OutOfStep(Exception):
    """Raised where what was read of a replica has a gap, or is of an earlier start; its snapshot
    must be read anew.
    """


class ReplicaReader:
    """Applies what one replica says to the index, in the order of its numbers.

    A snapshot has several pages, and batches are published while it is read:

        the first page, of `seq` n    the index holds nothing; batches before n are in the page
        a batch                       has the number `next`, which is then one more
        a later page, of `seq` m      once `next` is m; until then, the batches up to m are missing

    Until the last page has come, batches may speak of blocks below one that no page has told of
    yet. They are left out: a later page has the block, and all that is below it by then.

    next: number of the batch that is applied next. applied: batches that were applied. epoch: of
    the snapshot; "" before the first page.
    """

    def __init__(self, index: ReplicaIndex, name: str) -> None:
        self._index = index
        self._name = name
        self._latest = -1  # number of the batch that came last
        self._is_joining = False  # whether pages of the snapshot are missing
        self.epoch = ""
        self.next = 0
        self.applied = 0

    def clear(self) -> None:
        """Forget what the replica holds, and the snapshot that is being read."""
        self._index.clear(self._name)
        self.epoch = ""

    def begin(self, page: Page) -> None:
        """Apply the first page of a snapshot."""
        self._index.clear(self._name)
        self.epoch, self.next = page.epoch, page.seq
        self.apply_page(page)

    def is_ready_for(self, page: Page) -> bool:
        """True if all batches that were published before a later page have been applied. Raises
        OutOfStep if the page does not belong to this snapshot.
        """
        if page.epoch != self.epoch:
            raise OutOfStep("the server started anew while its snapshot was read")
        if page.seq < self.next:
            raise OutOfStep(f"a page was made after {page.seq} batches, but {self.next} have come")
        return page.seq == self.next

    def apply_page(self, page: Page) -> None:
        """Apply a later page of a snapshot, for which the reader is ready."""
        apply_events(self._index, self._name, decode_page_events(page))
        self._is_joining = page.cursor is not None

    def on_batch(self, number: int, payload: bytes) -> None:
        """Apply a batch; one that is contained in the snapshot changes nothing.

        Raises OutOfStep if batches before it are missing or the numbers have started anew,
        wire.Malformed, and index.LostMessages.
        """
        before, self._latest = self._latest, number
        if number <= before:
            raise OutOfStep(f"batch {number} came after batch {before}: numbers started anew")
        if number < self.next:
            return
        if number > self.next:
            raise OutOfStep(f"batch {number} came where batch {self.next} was due")
        events = decode_batch(payload)
        apply_events(self._index, self._name, events, is_joining=self._is_joining)
        self.next += 1
        self.applied += 1
