"""Keeps the index in step with one server, by the events that it publishes."""

from __future__ import annotations

import math
import threading
import time
from typing import Final

import httpx
import zmq

from sglang_hybrid.core.tiers.published import MEDIA, PAGE_TOKENS
from sglang_hybrid.extensions.router.asking import MOST_ANSWER, Asking
from sglang_hybrid.extensions.router.attempts import keep_trying
from sglang_hybrid.extensions.router.index import MOST_TOKENS, ReplicaIndex
from sglang_hybrid.extensions.router.load import ReplicaLoad
from sglang_hybrid.extensions.router.reader import OutOfStep, ReplicaReader
from sglang_hybrid.extensions.router.wire import Malformed, Page, decode_page

ROUTE: Final = "/hybrid_cache/resumable"
TICK: Final = 100  # milliseconds for which a thread waits before it looks whether it should end
QUEUE: Final = 100_000  # batches that may wait to be applied
MOST_PAGES: Final = MOST_TOKENS // PAGE_TOKENS
SILENCE: Final = 3  # times `patience`: how long a server may be too busy to answer


class Follower:
    """A thread that keeps the index in step with one server, or one data-parallel rank of it.

    It reads a snapshot, then applies batches of events. Where a batch is missing, or the server
    started anew, it clears what the index has of the server and begins again. Where the server
    sends what it should not, it does so later and later, and the server is not reachable meanwhile.
    What it publishes while nothing is read is not received. The thread ends by `close` only.

    applied, malformed, snapshots: batches applied, messages that were malformed, and snapshots
    read, since the start. error: why it was last out of step. load: how busy the server is.
    """

    def __init__(
        self,
        url: str,
        endpoint: str,
        index: ReplicaIndex,
        name: str,
        admin_key: str | None = None,
        topic: str = "",
        *,
        rank: int = 0,
        pause: float = 1.0,
        patience: float = 5.0,
    ) -> None:
        """url: of the server. endpoint: of its publisher, as tcp://host:port. name: of the replica
        in the index. pause: seconds between two questions for the server's state, and at least
        between two snapshots. patience: seconds to wait for an answer, or for a batch that the
        server has published. Raises zmq.ZMQError for what is no endpoint.
        """
        self.url = url.rstrip("/")
        self.name = name
        self._in_step = self._reachable = False
        self._answered = -math.inf  # when
        self.malformed = self.snapshots = 0
        self.error = ""
        self.load = ReplicaLoad()
        self._index = index
        self._reader = ReplicaReader(index, name)
        self._reader.clear()  # the replica is known from now on
        self._rank = rank
        self._pause = pause
        self._patience = patience
        self._silence = pause + SILENCE * patience
        self._owed: tuple[int, float] | None = None  # batches published, and when they must be here
        self._closed = threading.Event()
        self._doubt: Exception | None = None
        self._http = Asking(self.url, admin_key, patience)
        self._endpoint, self._topic = endpoint, topic
        try:
            self._socket = self._subscribed()
        except zmq.ZMQError:
            self._http.close()
            self._index.forget(name)
            raise
        self._thread = threading.Thread(target=self._run, name=f"follow {name}", daemon=True)
        self._thread.start()

    @property
    def is_reachable(self) -> bool:
        """True if the latest answer by HTTP came, not too long ago, and was as it should be."""
        return self._reachable and time.monotonic() < self._answered + self._silence

    @property
    def is_in_step(self) -> bool:
        """True if the index has what the server holds."""
        return self._in_step and self.is_reachable

    @property
    def has_known_rate(self) -> bool:
        """True if it is known how fast the server computes prefills."""
        return self.is_in_step and self.load.prefill_tokens_per_second is not None

    @property
    def applied(self) -> int:
        return self._reader.applied

    @property
    def seq(self) -> int:
        """The number of batches, of those that the server has published, that the index knows."""
        return self._reader.next

    def resync(self) -> None:
        """Have the snapshot read anew, soon."""
        self._doubt = OutOfStep("its answers were not as predicted")

    def put_aside(self, error: Malformed) -> None:
        """The server has sent to somebody else what it should not."""
        self._doubt = error
        self._reachable = False

    def stop(self) -> None:
        """Have the thread end, soon."""
        self._closed.set()

    def close(self) -> None:
        """Stop, and have the index forget the server."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        keep_trying(self._attempt, self._on_error, self._closed, self._pause)
        self._give_back()

    def _give_back(self) -> None:
        self._socket.close()
        self._http.close()
        self._index.forget(self.name)

    def _subscribed(self) -> zmq.Socket[bytes]:
        """A socket that receives what the server publishes. Raises zmq.ZMQError."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, MOST_ANSWER)
        socket.setsockopt(zmq.SUBSCRIBE, self._topic.encode())
        try:
            socket.connect(self._endpoint)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def _attempt(self) -> None:
        """Follow the server until it is out of step, which raises an error, or `close`."""
        if self._socket.closed:
            self._socket = self._subscribed()
        try:
            self._read_snapshot()
            self._follow()
        finally:
            self._in_step = False
            if not self._reader.epoch:  # no page came, and maybe none will for long
                self._socket.close()
            self._reader.clear()

    def _on_error(self, said: str, is_away: bool, is_aside: bool) -> None:
        if is_aside:
            self._socket.close()
        self.error = said
        self.malformed += is_aside
        self._reachable &= not (is_away or is_aside)

    def _read_snapshot(self) -> None:
        self._doubt = self._owed = None
        page = self._ask()
        self._reader.begin(page)
        pages = 1
        while page.cursor is not None and not self._closed.is_set():
            if pages == MOST_PAGES:
                raise Malformed(f"a snapshot has more than {MOST_PAGES:,} pages")
            pages += 1
            page = self._ask(cursor=page.cursor)
            deadline = time.monotonic() + self._patience
            while not self._reader.is_ready_for(page):
                if self._closed.is_set() or time.monotonic() > deadline:
                    raise OutOfStep(f"batches before number {page.seq} did not come")
                self._receive()
            self._reader.apply_page(page)
        self.snapshots += 1
        self._in_step = True

    def _follow(self) -> None:
        due = time.monotonic() + self._pause
        while not self._closed.is_set():
            if self._doubt is not None:
                raise self._doubt
            self._receive()
            if time.monotonic() >= due:
                self._check_status()
                due = time.monotonic() + self._pause

    def _receive(self) -> None:
        """Apply the next batch, if one comes soon."""
        if not self._socket.poll(TICK):
            return
        frames = self._socket.recv_multipart()
        if len(frames) != 3 or len(frames[1]) != 8:
            raise Malformed(f"a message has frames of {[len(each) for each in frames]} bytes")
        self._reader.on_batch(int.from_bytes(frames[1], "big"), frames[2])

    def _check_status(self) -> None:
        """Refresh the load of the server. Raises OutOfStep if it started anew, or if batches that
        it has published do not come.
        """
        try:
            status = self._ask(status="1")
        except httpx.ReadTimeout:
            if self.is_reachable:  # it is busy
                return
            raise
        if status.epoch != self._reader.epoch:
            raise OutOfStep("the server started anew")
        if self._owed is None or self._reader.next >= self._owed[0]:
            behind = status.seq > self._reader.next
            self._owed = (status.seq, time.monotonic() + self._patience) if behind else None
        elif time.monotonic() > self._owed[1]:
            raise OutOfStep(f"batches before number {self._owed[0]} did not come")

    def _ask(self, **query: str) -> Page:
        """A page of the snapshot, or with status="1" one without events."""
        page = decode_page(self._http.get(ROUTE, **query), self._rank)
        if page.error:
            raise OutOfStep(f"the server has no snapshot: {page.error}")
        self._reachable = True
        self._answered = time.monotonic()
        loads = {MEDIA[medium]: of for medium, of in page.loads.items() if medium in MEDIA}
        self.load.on_status(page.waiting, page.prefill_tokens_per_second, page.room, loads)
        return page
