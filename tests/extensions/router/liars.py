"""Replicas that say what they should not: many of them behind one address, each under a path."""

from __future__ import annotations

import itertools
import json
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import zmq

from tests.extensions.router import absurd

PLACES = ("info", "page", "later page", "status", "prompt", "batch")
"""The answers of a replica: where it publishes, the pages of a snapshot, how busy it is, what a
prompt is, and what has changed.
"""


class Lie(NamedTuple):
    """what: was done to the right answer. content: is said instead, at this place; `is_raw`: as
    the whole answer with its status and headers.
    """

    place: str
    what: str
    content: bytes
    is_raw: bool = False


def http(content: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = (f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", *headers, "", "")
    return "\r\n".join(lines).encode() + content


FOREVER = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n"
"""Its last part is sent again and again."""

SILENCE = b"HTTP/1.1"
"""Nothing follows, and the connection stays open."""

ANSWERS = {
    "nothing": b"",
    "no HTTP": b"hello\r\n\r\n",
    "an error": http(b"", status="500 No"),
    "a redirection": http(b"", "Location: http://127.0.0.1:9/", status="302 No"),
    "a short body": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}",
    "no length": b"HTTP/1.1 200 OK\r\n\r\n{}",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}",
    "no compression": http(b"{}", "Content-Encoding: gzip"),
    "long headers": http(b"{}", *(f"X-{number}: {'x' * 900}" for number in range(200))),
    "no chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "no end": FOREVER,
    "no end of headers": b"HTTP/1.1 200 OK\r\nX: ",
    "silence": SILENCE,
}


def lies() -> Iterator[Lie]:
    for place in PLACES:
        if place == "batch":
            continue
        whole: Any = {"info": absurd.INFO, "prompt": absurd.PROMPT}.get(place, absurd.ANSWER)
        for what, content in absurd.as_json(whole):
            yield Lie(place, what, content)
        for what, content in ANSWERS.items():
            yield Lie(place, what, content, is_raw=True)
    for raw in absurd.RAW:
        yield Lie("batch", f"bytes {raw[:12]!r}", raw)


class Liars:
    """A replica for each of `told`, at `urls`, which says that one thing and else the truth.

    asked: how often each place of each replica was asked.
    """

    def __init__(self, told: list[Lie]) -> None:
        self.told = told
        self.asked: Counter[tuple[int, str]] = Counter()
        self._publisher: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self._publisher.setsockopt(zmq.LINGER, 0)
        self._port = self._publisher.bind_to_random_port("tcp://127.0.0.1")
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.closed = threading.Event()
        for run in (lambda: self._server.serve_forever(0.01), self._publish):
            threading.Thread(target=run, daemon=True).start()
        address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.urls = [f"{address}/{number}" for number in range(len(told))]

    def close(self) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()

    def _publish(self) -> None:
        for number in itertools.count():
            for liar, told in enumerate(self.told):
                if told.place == "batch":
                    parts = (f"{liar}|".encode(), number.to_bytes(8, "big"), told.content)
                    self._publisher.send_multipart(parts)
                    self.asked[liar, "batch"] += 1
            if self.closed.wait(0.05):
                self._publisher.close()
                return

    def answer(self, path: str) -> tuple[Lie | None, bytes]:
        """The answer there, and whether it is a lie."""
        _, liar, rest = path.split("/", 2)
        place = "info"
        whole: Any = json.loads(json.dumps(absurd.INFO))
        whole["kv_events"] |= {"endpoint_port_base": self._port, "topic": f"{liar}|"}
        if rest.startswith("hybrid_cache/prompt"):
            place, whole = "prompt", absurd.PROMPT
        elif rest.startswith("hybrid_cache/resumable"):
            place = "status" if "status=" in rest else "later page" if "cursor=" in rest else "page"
            told = self.told[int(liar)].place
            more = {"cursor": "next" if place == "page" and told == "later page" else None}
            page = absurd.PAGE | more | {"events": [] if place == "status" else [absurd.EVENT]}
            whole = {"ranks": [page]}
        self.asked[int(liar), place] += 1
        lie = self.told[int(liar)]
        return (lie if lie.place == place else None), json.dumps(whole).encode()


def _handler(liars: Liars) -> type[socketserver.StreamRequestHandler]:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            path = self.rfile.readline().split(b" ")[1].decode()
            length = 0
            while line := self.rfile.readline().strip():
                if line.lower().startswith(b"content-length:"):
                    length = int(line[15:])
            self.rfile.read(length)
            lie, truth = liars.answer(path)
            if lie is None or not lie.is_raw:
                self.wfile.write(http(truth if lie is None else lie.content))
                return
            try:
                self.wfile.write(lie.content)
                if lie.content == SILENCE:
                    liars.closed.wait()
                while lie.content == FOREVER:
                    time.sleep(0.05)
                    self.wfile.write(b"1\r\n \r\n")
                if lie.content.endswith(b"X: "):
                    while True:
                        time.sleep(0.05)
                        self.wfile.write(b"x")
            except OSError:  # nobody listens any more
                return

    return Handler
