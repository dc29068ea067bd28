"""Follows the caches of several servers, for routers: which one can resume a prompt, and how far?

    python -m sglang_hybrid.replicas http://a:30000 http://b:30000 --admin-key KEY

prints once a second what each server holds. In a router:

    replicas = Replicas(["http://a:30000", "http://b:30000"], admin_key=KEY)
    choice = replicas.choose(token_ids, tenant_name(extra_key, cache_salt, record_key))
    ...                                      # send the request to choice.replica
    replicas.on_answer(choice, cached_tokens)  # at its first token, or when it has failed

Servers need `--kv-events-config`. This file imports neither torch nor sglang.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import requests
import zmq
from rich.live import Live
from rich.table import Table

from sglang_hybrid.core.replicas.index import LostMessages, ReplicaIndex
from sglang_hybrid.core.replicas.load import ReplicaLoad
from sglang_hybrid.core.replicas.names import tenant_name
from sglang_hybrid.core.replicas.reader import OutOfStep, ReplicaReader
from sglang_hybrid.core.replicas.resumable import Resumable
from sglang_hybrid.core.replicas.tokens import TOKEN_BYTES, Tokens, as_bytes
from sglang_hybrid.core.replicas.wire import (
    KvEvents,
    Malformed,
    Page,
    decode_page,
    decode_server_info,
)

__all__ = ["Choice", "Follower", "ReplicaIndex", "Replicas", "Resumable", "tenant_name"]

ROUTE: Final = "/hybrid_cache/resumable"
TICK: Final = 100  # milliseconds for which a thread waits before it looks whether it should end
QUEUE: Final = 100_000  # batches that may wait to be applied
DISPLACED: Final = 1.0
"""What a token that is computed costs beside its own prefill, in prefills of a token: it takes the
place of others in the cache, which are computed again, and delays those who wait behind it.
"""


class Follower:
    """A thread that keeps the index in step with one server, or one data-parallel rank of it.

    It reads a snapshot, then applies batches of events. Where a batch is missing or malformed, or
    the server started anew, it clears what the index has of the server and begins again.

    is_in_step: whether the index has what the server holds. is_reachable: whether its latest answer
    by HTTP came. applied, malformed, snapshots: batches applied, messages that were malformed, and
    snapshots read, since the start. error: why it was last out of step. load: how busy the server
    is.
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
        server has published.
        """
        self.url = url.rstrip("/")
        self.name = name
        self.is_in_step = self.is_reachable = False
        self.malformed = self.snapshots = 0
        self.error = ""
        self.load = ReplicaLoad()
        self._index = index
        self._reader = ReplicaReader(index, name)
        self._reader.clear()  # the replica is known from now on
        self._rank = rank
        self._pause = pause
        self._patience = patience
        self._owed: tuple[int, float] | None = None  # batches published, and when they must be here
        self._closed = threading.Event()
        self._doubted = threading.Event()
        self._http = requests.Session()
        if admin_key:
            self._http.headers["Authorization"] = f"Bearer {admin_key}"
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._socket.connect(endpoint)
        self._thread = threading.Thread(target=self._run, name=f"follow {name}", daemon=True)
        self._thread.start()

    @property
    def applied(self) -> int:
        return self._reader.applied

    @property
    def seq(self) -> int:
        """How many batches, of those that the server has published, the index knows."""
        return self._reader.next

    def resync(self) -> None:
        """Have the snapshot read anew, soon."""
        self._doubted.set()

    def close(self) -> None:
        """Stop, and have the index forget the server."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                self._read_snapshot()
                self._follow()
            except (Malformed, LostMessages, OutOfStep, requests.RequestException) as error:
                self.is_in_step = False
                self.error = str(error)
                self.malformed += isinstance(error, Malformed)
                self.is_reachable &= not isinstance(error, requests.RequestException)
                self._reader.clear()
                self._closed.wait(began + self._pause - time.monotonic())
        self.is_in_step = False
        self._socket.close()
        self._http.close()
        self._index.forget(self.name)

    def _read_snapshot(self) -> None:
        self._doubted.clear()
        self._owed = None
        page = self._ask()
        self._reader.begin(page)
        while page.cursor is not None:
            page = self._ask(cursor=page.cursor)
            deadline = time.monotonic() + self._patience
            while not self._reader.is_ready_for(page):
                if self._closed.is_set() or time.monotonic() > deadline:
                    raise OutOfStep(f"batches before number {page.seq} did not come")
                self._receive()
            self._reader.apply_page(page)
        self.snapshots += 1
        self.is_in_step = True

    def _follow(self) -> None:
        due = time.monotonic() + self._pause
        while not self._closed.is_set():
            if self._doubted.is_set():
                raise OutOfStep("its answers were not as predicted")
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
        except requests.ReadTimeout:  # it is busy
            return
        if status.epoch != self._reader.epoch:
            raise OutOfStep("the server started anew")
        if self._owed is None or self._reader.next >= self._owed[0]:
            behind = status.seq > self._reader.next
            self._owed = (status.seq, time.monotonic() + self._patience) if behind else None
        elif time.monotonic() > self._owed[1]:
            raise OutOfStep(f"batches before number {self._owed[0]} did not come")

    def _ask(self, **query: str) -> Page:
        """A page of the snapshot, or with status="1" one without events."""
        answer = self._http.get(self.url + ROUTE, params=query, timeout=self._patience)
        answer.raise_for_status()
        page = decode_page(answer.content, self._rank)
        if page.error:
            raise OutOfStep(f"the server has no snapshot: {page.error}")
        self.is_reachable = True
        self.load.on_status(page.waiting, page.prefill_tokens_per_second)
        return page


class Choice(NamedTuple):
    """Where a prompt should be sent. position: tokens that its cache holds for it. seconds:
    expected until its first token. number: of this choice.
    """

    replica: str
    position: int
    seconds: float
    number: int


class Replicas:
    """Servers that are followed, and what they could do for a prompt.

    Servers that do not answer yet are asked again each second. A data-parallel rank of a server has
    the name URL#RANK, any other server that of its URL. followers: by name. errors: for each server
    that is not followed, why.
    """

    def __init__(
        self,
        urls: Iterable[str],
        admin_key: str | None = None,
        *,
        endpoints: Mapping[str, str] | None = None,
        pause: float = 1.0,
        patience: float = 5.0,
    ) -> None:
        """endpoints: the publisher of each server, instead of what its /server_info says."""
        self.index = ReplicaIndex()
        self.followers: dict[str, Follower] = {}
        self.errors = {url.rstrip("/"): "was not asked yet" for url in urls}
        self._admin_key = admin_key
        self._pause = pause
        self._patience = patience
        self._choosing = threading.Lock()
        self._choices = 0
        self._closed = threading.Event()
        for url, endpoint in (endpoints or {}).items():
            self._add(url.rstrip("/"), url.rstrip("/"), endpoint)
        self._finder = threading.Thread(target=self._find, name="find replicas", daemon=True)
        self._finder.start()

    def close(self) -> None:
        self._closed.set()
        self._finder.join()
        for follower in self.followers.values():
            follower.close()

    def resume(self, tokens: Tokens, tenant: str = "") -> list[Resumable]:
        """Where each replica can resume a prompt; tenant: its `tenant_name`."""
        return self.index.resume(tokens, tenant)

    def choose(self, tokens: Tokens, tenant: str = "") -> Choice:
        """The replica with the least expected seconds to the first token: of the prefills that were
        sent there and are not answered, and of what is left of this prompt. Tokens that this prompt
        shares with one of those are prefilled once. Tell `on_answer` what became of it. Raises
        LookupError if no replica is reachable.
        """
        prompt = as_bytes(tokens)
        last = len(prompt) // TOKEN_BYTES - 1
        with self._choosing:
            choices = []
            for name, position, tier, _ in self.index.resume(prompt, tenant):
                follower = self.followers.get(name)
                if follower is not None and follower.is_reachable:
                    load = follower.load
                    found = max(position, min(last, load.on_its_way(tenant, prompt)))
                    left = last + 1 - found
                    seconds = load.seconds(left)
                    price = seconds + DISPLACED * load.prefill_seconds(left)
                    choices.append((price, seconds, -found, tier, name, position))
            if not choices:
                raise LookupError(f"no server can be reached: {self._reasons()}")
            _, seconds, found, _, name, position = min(choices)
            self._choices += 1
            load = self.followers[name].load
            load.on_choice(self._choices, tenant, prompt, last + 1 + found)
            return Choice(name, position, seconds, self._choices)

    def on_answer(self, choice: Choice, cached_tokens: int | None = None) -> None:
        """The first token of what was sent after `choice` has come, or none will come. Where too
        many of the latest predictions of a replica were wrong, its snapshot is read anew.

        cached_tokens: of the answer's usage; None where they are not known.
        """
        follower = self.followers[choice.replica]
        with self._choosing:
            follower.load.on_answer(choice.number)
            if cached_tokens is None:
                return
            doubtful = follower.load.is_doubtful_after(choice.position, cached_tokens)
        if doubtful:
            follower.resync()

    def _reasons(self) -> str:
        reasons = self.errors | {one.name: one.error for one in self.followers.values()}
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())

    def _find(self) -> None:
        """Follow each server as soon as it says where it publishes."""
        while self.errors and not self._closed.is_set():
            for url in list(self.errors):
                try:
                    self._follow(url)
                except (OutOfStep, Malformed, requests.RequestException, zmq.ZMQError) as error:
                    self.errors = self.errors | {url: str(error)}
            self._closed.wait(self._pause if self.errors else 0)

    def _follow(self, url: str) -> None:
        headers = {"Authorization": f"Bearer {self._admin_key}"} if self._admin_key else {}
        answer = requests.get(f"{url}/server_info", headers=headers, timeout=self._patience)
        answer.raise_for_status()
        events = decode_server_info(answer.content).kv_events
        if events is None:
            raise OutOfStep("publishes no events; start it with --kv-events-config")
        for rank in range(events.dp_size):
            name = url if events.dp_size == 1 else f"{url}#{rank}"
            self._add(url, name, endpoint_of(url, events, rank), events.topic, rank)

    def _add(self, url: str, name: str, endpoint: str, topic: str = "", rank: int = 0) -> None:
        follower = Follower(
            url,
            endpoint,
            self.index,
            name,
            self._admin_key,
            topic,
            rank=rank,
            pause=self._pause,
            patience=self._patience,
        )
        self.followers = self.followers | {name: follower}
        self.errors = {each: why for each, why in self.errors.items() if each != url}


def endpoint_of(url: str, events: KvEvents, rank: int) -> str:
    """Where a data-parallel rank publishes. A host that is a wildcard is that of the URL."""
    host = events.endpoint_host
    if host in ("*", "0.0.0.0", "::", "[::]"):
        host = urlsplit(url).hostname or "localhost"
        host = f"[{host}]" if ":" in host else host
    return f"tcp://{host}:{events.endpoint_port_base + rank}"


def table(replicas: Replicas) -> Table:
    """What each replica holds; for a server that is not followed, why."""
    columns = ["replica", "in step", "nodes", "tokens", "on device", "on host", "on disk"]
    found = Table(*columns, "waiting", "predicted right")
    for name, follower in sorted(replicas.followers.items()):
        held, load = replicas.index.holdings(name), follower.load
        step = "yes" if follower.is_in_step else follower.error or "reads"
        numbers = [held.nodes, held.tokens, *held.positions, load.waiting]
        share = f"{load.right:,} of {load.right + load.wrong:,}"
        found.add_row(name, step, *(f"{number:,}" for number in numbers), share)
    for name, error in sorted(replicas.errors.items()):
        found.add_row(name, error)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What the caches of several servers hold.")
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--admin-key", help="the servers' --admin-api-key")
    given = parser.parse_args()
    replicas = Replicas(given.urls, given.admin_key)
    try:
        with Live(table(replicas), auto_refresh=False) as live:
            while True:
                time.sleep(1)
                live.update(table(replicas), refresh=True)
    except KeyboardInterrupt:
        replicas.close()


if __name__ == "__main__":
    main()
