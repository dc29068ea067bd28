"""A server that publishes, without a model; what routers see of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import zmq

from sglang_hybrid.extensions.router import Replicas

KEY = "an admin key"
PAUSE = 0.05
PATIENCE = 0.5
Event = dict[str, Any]


def stored(tokens: list[int], parent: int | None = None, **given: Any) -> Event:
    """One block of these tokens, with the last one as its hash."""
    fields: Event = {"type": "BlockStored", "block_hashes": tokens[-1:], "token_ids": tokens}
    fields |= {"parent_block_hash": parent, "block_size": len(tokens), "medium": "GPU"}
    return fields | {"component_types": ["full", "mamba"], "of_a_newer_server": 1} | given


def removed(*hashes: int) -> Event:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


def wait_until(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not is_true():
        assert time.monotonic() < deadline, "it did not become true within 120 seconds"
        threading.Event().wait(0.005)


class Server:
    """A server that publishes, and answers with pages of a snapshot.

    snapshot: events of each page. on_page: called with the number of a page before it is made.
    published: batches so far. asked: pages that were asked for, without those of the status.
    answers: of POST, by path: the content type and the body of the answer; a path that is not there
    is an error 404. posted: path, headers and body of each. refuses: headers with which each POST
    is refused with status 503, if any. streams: what the rest of each answer to /stream waits for.
    goes_on: clear it, and no GET is answered any more.
    """

    def __init__(self) -> None:
        self.snapshot: list[list[Event]] = [[]]
        self.on_page: Callable[[int], None] = lambda page: None
        self.published = 0
        self.epoch = "first"
        self.error = ""
        self.waiting = 0
        self.rate: float | None = None
        self.room: int | None = None
        self.loads: dict[str, tuple[float, float]] = {}
        self.asked: list[int] = []
        self.answers: dict[str, tuple[str, bytes]] = {}
        self.posted: list[tuple[str, dict[str, str], bytes]] = []
        self.refuses: dict[str, str] | None = None
        self.streams = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.port = 0
        self.open_publisher()
        self.http_port = 0
        self.start_http()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def open_publisher(self) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.XPUB_VERBOSER, 1)  # each subscription is told, and its end
        wait_until(self.bind)
        self.port = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def bind(self) -> bool:
        """Binds the socket. False while ZeroMQ's own thread still closes the port's last socket."""
        try:
            self.socket.bind(f"tcp://127.0.0.1:{self.port or '*'}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
            return False
        return True

    def wait_for_subscriber(self) -> None:
        assert self.socket.poll(20_000), "nobody subscribed"
        assert self.socket.recv() == b"\x01"

    def wait_for_another_subscriber(self) -> None:
        """A subscription ends and another one begins, whichever is told first."""
        told = []
        while len(told) < 2:
            assert self.socket.poll(20_000), f"of a subscription only {told} came"
            told.append(self.socket.recv())
        assert sorted(told) == [b"\x00", b"\x01"]

    def start_http(self) -> None:
        self.http = ThreadingHTTPServer(("127.0.0.1", self.http_port), handler(self))
        self.http.daemon_threads = True
        self.http_port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def stop_http(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def publish(self, *events: Event) -> None:
        self.send(self.published, msgspec.msgpack.encode([0.5, list(events), 0]))
        self.published += 1

    def send(self, number: int, payload: bytes) -> None:
        self.socket.send_multipart([b"", number.to_bytes(8, "big"), payload])

    def start_anew(self) -> None:
        """Be like a new process: empty, with numbers from 0."""
        self.socket.close()
        self.published, self.epoch, self.snapshot = 0, self.epoch + "+", [[]]
        self.open_publisher()

    def close(self) -> None:
        self.goes_on.set()
        self.streams.set()
        self.stop_http()
        self.socket.close()

    def rank(self, cursor: str, is_status: bool) -> Event:
        page = int(cursor or 0)
        if not is_status:
            self.asked.append(page)
            self.on_page(page)
        more = str(page + 1) if page + 1 < len(self.snapshot) and not is_status else None
        return {
            "epoch": self.epoch,
            "seq": self.published,
            "block_size": 2,
            "cursor": more,
            "error": self.error,
            "events": [] if is_status else self.snapshot[page],
            "prefill_tokens_per_second": self.rate,
            "waiting": self.waiting,
            "room": self.room,
            "loads": self.loads,
        }


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            server.goes_on.wait()
            if self.path == "/health":
                self._send(200, "text/plain", b"")
                return
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            if self.headers["Authorization"] != f"Bearer {KEY}":
                self.send_error(401)
                return
            if parts.path == "/server_info":
                answer: Event = {"kv_events": {"endpoint_host": "*", "topic": "", "dp_size": 1}}
                answer["kv_events"]["endpoint_port_base"] = server.port
            else:
                answer = {"ranks": [server.rank(query.get("cursor", ""), "status" in query)]}
            self._send(200, "application/json", json.dumps(answer).encode())

        def do_POST(self) -> None:
            body = self._body()
            headers = {name.lower(): value for name, value in self.headers.items()}
            server.posted.append((self.path, headers, body))
            if server.refuses is not None:
                self._send(503, "application/json", b"{}", server.refuses)
            elif self.path == "/stream":
                self._stream()
            elif self.path in server.answers:
                self._send(200, *server.answers[self.path])
            else:
                self._send(404, "text/plain", b"")

        def _body(self) -> bytes:
            if "Content-Length" in self.headers:
                return self.rfile.read(int(self.headers["Content-Length"]))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _stream(self) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in (b"1\r\na\r\n", b"1\r\nb\r\n0\r\n\r\n"):
                self.wfile.write(part)
                self.wfile.flush()
                server.streams.wait(60)

        def _send(
            self, status: int, kind: str, content: bytes, more: dict[str, str] | None = None
        ) -> None:
            self.send_response(status)
            for name, value in (more or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None: ...

    return Handler


@contextmanager
def all_of(
    *servers: Server, urls: tuple[str, ...] = (), patience: float = PATIENCE
) -> Iterator[Replicas]:
    urls = urls or tuple(server.url for server in servers)
    replicas = Replicas(urls, KEY, pause=PAUSE, patience=patience)
    try:
        wait_until(lambda: len(replicas.followers) == len(servers))
        wait_until(lambda: all(each.is_in_step for each in replicas.followers.values()))
        yield replicas
    finally:
        replicas.close()
