"""The watchers of an HTTP process, and what it knows of its caches while there are any.

One task asks the schedulers for changes, keeps a copy of what they hold, and sends each change to
all watchers. It ends with the last of them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_hybrid.explain.ranks import ask_ranks
from sglang_hybrid.extensions.page.messages import WatchReq, WatchReqOutput

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

EVERY = 0.5
"""Seconds between two questions; a tenth of it while a scheduler has more to tell."""

MOST_WATCHERS = 32
SAMPLES = 1_200
"""Counts that are kept: of ten minutes."""

EVENTS = 512
AT_ONCE = 5_000
"""Nodes of one message to a new watcher."""

MESSAGES = 256
"""Messages that wait for a slow watcher; then it is told to begin anew."""

IDLE = 0.6
"""Seconds after which a silent stream says that it is alive, or ends with the server."""


class TooManyWatchers(Exception):
    """One more than `MOST_WATCHERS`."""


@dataclass
class RankSnapshot:
    """The cache of one rank: rows of its nodes by id, and the latest counts and events."""

    nodes: dict[int, list[Any]] = field(default_factory=dict)
    counts: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=EVENTS))
    running: list[Any] = field(default_factory=list)
    error: str = ""

    def take(self, told: WatchReqOutput, when: float) -> None:
        """Bring the copy up to what a scheduler tells, and leave what it has told before out of its
        events.
        """
        if told.start:
            self.nodes.clear()
            known = {_identity(event) for event in self.events}
            told.events = [event for event in told.events if _identity(event) not in known]
        for row in told.nodes:
            self.nodes[row[0]] = row
        for node in told.gone:
            self.nodes.pop(node, None)
        if told.counts and not told.more:
            self.counts.append({"time": when, **told.counts})
        self.events.extend(told.events)
        self.running, self.error = told.running, told.error


class Watch:
    """The watchers of one HTTP process."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._name = secrets.token_hex(8)
        self._copies: list[RankSnapshot] = []
        self._watchers: set[asyncio.Queue[bytes | None]] = set()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._watchers)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events for one watcher: all there is, then changes. Raises `TooManyWatchers`
        at once.
        """
        if len(self) >= MOST_WATCHERS:
            raise TooManyWatchers
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(MESSAGES)
        whole = list(self._whole())
        self._watchers.add(queue)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._follow())
        return self._messages(queue, whole)

    async def _messages(
        self, queue: asyncio.Queue[bytes | None], whole: list[dict[str, Any]]
    ) -> AsyncGenerator[bytes, None]:
        try:
            for message in whole:
                yield _event(message)
                await asyncio.sleep(0)
            while not getattr(self._manager, "gracefully_exit", False):
                try:
                    message_ = await asyncio.wait_for(queue.get(), IDLE)
                except TimeoutError:
                    yield b": \n\n"
                    continue
                if message_ is None:
                    return
                yield message_
        finally:
            self._watchers.discard(queue)

    def _whole(self) -> list[dict[str, Any]]:
        """The events that tell a new watcher what is known already."""
        messages: list[dict[str, Any]] = []
        for rank, copy in enumerate(self._copies):
            rows = list(copy.nodes.values())
            messages.append({"rank": rank, "start": True, "nodes": rows[:AT_ONCE]})
            messages += [
                {"rank": rank, "nodes": rows[begin : begin + AT_ONCE]}
                for begin in range(AT_ONCE, len(rows), AT_ONCE)
            ]
            past = {"samples": list(copy.counts), "events": list(copy.events)}
            messages.append({"rank": rank, "running": copy.running, "error": copy.error, **past})
        return messages

    async def _follow(self) -> None:
        """While somebody watches: ask, remember, tell. Who joins while the schedulers are told that
        nobody does is told all of it anew.
        """
        try:
            while self._watchers:
                await self._poll_while_watched()
                leave = WatchReq(reader=self._name, leave=True)
                await ask_ranks(self._manager, leave, WatchReqOutput)
        except Exception:
            logger.exception("sglang_hybrid: the page can show nothing more.")
            for queue in list(self._watchers):
                self._end(queue)
        finally:
            for copy in self._copies:
                copy.nodes.clear()
            self._task = None

    async def _poll_while_watched(self) -> None:
        while self._watchers:
            begin = time.monotonic()
            answers = await ask_ranks(self._manager, WatchReq(reader=self._name), WatchReqOutput)
            self._tell(answers)
            more = any(answer.more for answer in answers)
            rest = EVERY / 10 if more else EVERY
            await asyncio.sleep(max(0.0, begin + rest - time.monotonic()))

    def _tell(self, answers: list[WatchReqOutput]) -> None:
        now = time.time()
        self._copies += [RankSnapshot() for _ in answers[len(self._copies) :]]
        for rank, (copy, told) in enumerate(zip(self._copies, answers, strict=True)):
            copy.take(told, now)
            message: dict[str, Any] = {
                "rank": rank,
                "start": told.start,
                "nodes": told.nodes,
                "gone": told.gone,
                "events": told.events,
                "running": told.running,
                "error": told.error,
                "more": told.more,
                "samples": [{"time": now, **told.counts}] if told.counts else [],
            }
            encoded = _event(message)
            for queue in list(self._watchers):
                try:
                    queue.put_nowait(encoded)
                except asyncio.QueueFull:
                    self._end(queue)

    def _end(self, queue: asyncio.Queue[bytes | None]) -> None:
        """The watcher's stream ends; a browser begins anew."""
        self._watchers.discard(queue)
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)


def _identity(event: dict[str, Any]) -> tuple[Any, ...]:
    """Equal for events of which a scheduler tells twice."""
    return tuple(event.get(name) for name in ("event", "tenant", "at", "request", "position"))


def _event(message: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(message) + b"\n\n"
