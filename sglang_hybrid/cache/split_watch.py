"""Two pools that would fit the traffic better: recent requests are replayed on other splits of the
same memory, and in one memory, while the server runs. The split that would hit more becomes advice,
with its flags, and the next server divides its memory so (learnt_split.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_hybrid.core.extensions import extension
from sglang_hybrid.core.server_settings import Split
from sglang_hybrid.core.specs import Spec
from sglang_hybrid.core.traffic.recorder import RequestWindow
from sglang_hybrid.serving.advice import ServerSetup

if TYPE_CHECKING:
    from sglang_hybrid.cache.learnt_split import LearntSplit
    from sglang_hybrid.extensions.lab.simulation.tuner.splits import SplitsFound

    Compare = Callable[[RequestWindow, Spec, Split], SplitsFound]

logger = logging.getLogger(__name__)

FIRST, NEXT = 128, 1.5
"""Requests before the first search, and how many times as many there are at the next one."""

ONE_MEMORY_POINTS = 1.0
"""Percentage points by which one memory must hit more than the best split to be named."""


class SplitWatch:
    """Compares splits now and then, in a worker process of lowest priority.

    Args:
        setup: of a server with two pools.
        recent: makes a window of the requests that ended last; None where they are too few. It is
            called in the thread that calls `on_request_end`, the window is made in another one.
        in_force: the policy that the server runs.
        path: returns where the next server finds the split; None where it does not look.
        compare: finds the better split of a window (`compare_splits` of the lab, by default in a
            worker process).

    Attributes:
        advice: what the last search found, one sentence; "" if no split hits more.
    """

    def __init__(
        self,
        setup: ServerSetup,
        recent: Callable[[], Callable[[], RequestWindow] | None],
        in_force: Callable[[], Spec],
        path: Callable[[], Path | None] = lambda: None,
        compare: Compare | None = None,
    ) -> None:
        self.advice = ""
        self._setup, self._recent, self._in_force, self._path = setup, recent, in_force, path
        self._compare = compare
        self._has_written = False
        self._ended = 0
        self._next = FIRST
        self._most_held = 0  # slots, by running requests, since the last search
        self._has_failed = False
        self._thread: threading.Thread | None = None

    def on_request_end(self, room: Split | int, *, evicted: bool) -> None:
        """A request ended. room: what running requests leave to the cache. evicted: whether the
        cache ever had to evict.
        """
        assert isinstance(room, Split), "one memory has no split"
        self._ended += 1
        self._most_held = max(self._most_held, self._setup.slots - room.slots)
        if self._ended >= self._next and evicted and not self.is_searching:
            window = self._recent()
            if window is not None:
                self._next = int(NEXT * self._ended)
                self._thread = threading.Thread(
                    target=self._search,
                    args=(window, self._in_force(), self._most_held),
                    name="hybrid-split-watch",
                    daemon=True,
                )
                self._most_held = 0
                self._thread.start()

    @property
    def is_searching(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Block until the running search ends, if there is one."""
        if self._thread is not None:
            self._thread.join()

    def _search(self, make: Callable[[], RequestWindow], spec: Spec, most_held: int) -> None:
        """Compare splits; a failure changes nothing for the server. most_held: slots that running
        requests have held at once.
        """
        try:
            window = make()
            room = window.budget
            assert isinstance(room, Split)
            compare = self._compare or extension("lab.simulation.tuner.splits").compare_splits
            result: SplitsFound = compare(window, spec, self._smallest(room, most_held))
            self._write(result, room, window.counted)
        except Exception as error:
            logger.debug("the search failed", exc_info=True)
            why = extension("lab.simulation.tuner.candidates").describe_failure(error)
            if not self._has_failed:
                logger.warning("sglang_hybrid: splits are not compared: %s", why)
            self._has_failed = True
            return
        before, self.advice = self.advice, self._describe(result, room, window.counted)
        if self.advice != before:
            logger.info("sglang_hybrid: %s", self.advice or "no other split hits more now.")

    def _write(self, result: SplitsFound, room: Split, counted: int) -> None:
        """Write the split for the next server; that of this one where an earlier search found
        another and this search does not.
        """
        if result.split == room and not self._has_written:
            return
        if (path := self._path()) is not None:
            from sglang_hybrid.cache.learnt_split import write_split

            write_split(path, self._learnt_split(result, room, counted))
            self._has_written = True

    def _smallest(self, room: Split, most_held: int) -> Split:
        """The room that must be left beside running requests: KV for the longest request, and slots
        with which as many requests may run as have.
        """
        it = self._setup
        running = -(-most_held // it.held)
        return Split(
            min(it.context, it.kv_tokens) - (it.kv_tokens - room.kv_tokens),
            ceil(it.counted * running) - (it.slots - room.slots),
        )

    def _learnt_split(self, result: SplitsFound, room: Split, counted: int) -> LearntSplit:
        from sglang_hybrid.cache.learnt_split import LearntSplit

        it = self._setup
        for_states = (self._slots(result, room) + 0.5) * it.state_bytes  # a start rounds down
        hits, hits_now = (each / result.tokens for each in (result.hits, result.hits_now))
        ratio = for_states / (it.bytes - for_states)
        return LearntSplit(ratio, hits, hits_now, counted)

    def _slots(self, result: SplitsFound, room: Split) -> int:
        """The slots of the whole pool."""
        return self._setup.slots + result.split.slots - room.slots

    def _describe(self, result: SplitsFound, room: Split, counted: int) -> str:
        """Another split, and one memory where that would hit more than it by a point; "" if neither
        is worth a line.
        """
        it, slots = self._setup, self._slots(result, room)
        hit, now, one = (
            100 * hits / result.tokens for hits in (result.hits, result.hits_now, result.hits_one)
        )
        instead = f"would be hit instead of {now:.1f} % with"
        ways = []
        if result.split != room:
            tokens = it.tokens_beside(slots)
            flags = (
                f"--max-mamba-cache-size {slots * it.shards:,} and --max-total-tokens {tokens:,}"
            )
            ways.append(f"{hit:.1f} % {instead} {flags}")
            instead = "with"
        if one >= hit + ONE_MEMORY_POINTS:
            ways.append(f"{one:.1f} % {instead} --hybrid-memory one, where that can be had")
        if not ways:
            return ""
        of_the_prompts = f"of the prompts of the last {counted:,} requests "
        return f"{of_the_prompts}{', and '.join(ways)}, in the same memory."
