"""Routers that follow servers: against publishers that are made here, with real sockets."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
import zmq
from rich.console import Console

from sglang_hybrid.replicas import Choice, Follower, ReplicaIndex, Replicas, tenant_name
from sglang_hybrid.replicas.__main__ import table
from sglang_hybrid.replicas.choosing import endpoint_of
from sglang_hybrid.replicas.load import TOO_MANY_WRONG
from sglang_hybrid.replicas.wire import KvEvents
from sglang_hybrid.serving.tenants import TenantNames

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
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline, "it did not become true within 20 seconds"
        threading.Event().wait(0.005)


class Server:
    """A server that publishes, and answers with pages of a snapshot.

    snapshot: events of each page. on_page: called with the number of a page before it is made.
    published: batches so far. asked: pages that were asked for, without those of the status.
    """

    def __init__(self) -> None:
        self.snapshot: list[list[Event]] = [[]]
        self.on_page: Callable[[int], None] = lambda page: None
        self.published = 0
        self.epoch = "first"
        self.error = ""
        self.waiting = 0
        self.rate: float | None = None
        self.asked: list[int] = []
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
        """As a new process: empty, with numbers from 0."""
        self.socket.close()
        self.published, self.epoch, self.snapshot = 0, self.epoch + "+", [[]]
        self.open_publisher()

    def close(self) -> None:
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
        }


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
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
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None: ...

    return Handler


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.close()


@contextmanager
def following(server: Server, **given: Any) -> Iterator[tuple[Follower, ReplicaIndex]]:
    """A follower of the server that is in step and has subscribed."""
    index = ReplicaIndex()
    times = {"pause": PAUSE, "patience": PATIENCE} | given
    follower = Follower(server.url, server.endpoint, index, "a", KEY, **times)
    try:
        server.wait_for_subscriber()
        wait_until(lambda: follower.is_in_step)
        yield follower, index
    finally:
        follower.close()
        assert index.resume([1]) == []


def position(index: ReplicaIndex, *tokens: int) -> int:
    """Where the replica can resume these tokens and one more."""
    return index.resume([*tokens, 0])[0].position


def test_batches_are_applied(server: Server) -> None:
    with following(server) as (follower, index):
        server.publish(stored([1, 2]), {"type": "OfANewerServer"})
        server.publish(stored([3, 4], parent=2, tenant=""))
        wait_until(lambda: follower.applied == 2)
        assert position(index, 1, 2, 3, 4) == 4
        server.publish(removed(4))
        wait_until(lambda: position(index, 1, 2, 3, 4) == 2)
        server.publish({"type": "AllBlocksCleared"})
        wait_until(lambda: position(index, 1, 2, 3, 4) == 0)
        assert (follower.snapshots, follower.malformed, server.asked) == (1, 0, [0])


def test_one_who_joins_late_reads_the_snapshot(server: Server) -> None:
    server.published = 7
    server.snapshot = [[stored([1, 2])], [stored([3, 4], parent=2)]]
    with following(server) as (follower, index):
        assert position(index, 1, 2, 3, 4) == 4
        server.publish(stored([5, 6], parent=4))
        wait_until(lambda: follower.applied == 1)
        assert position(index, 1, 2, 3, 4, 5, 6) == 6
        assert server.asked == [0, 1]


def test_a_lost_batch_has_the_snapshot_read_anew(server: Server) -> None:
    with following(server) as (follower, index):
        server.snapshot = [[stored([1, 2]), stored([3, 4])]]
        server.published = 1  # batch 0 was lost
        server.publish(stored([3, 4]))
        wait_until(lambda: follower.is_in_step and follower.snapshots == 2)
        assert "batch 1 came where batch 0 was due" in follower.error
        assert position(index, 1, 2) == position(index, 3, 4) == 2


def test_a_lost_batch_after_which_nothing_comes_is_noticed(server: Server) -> None:
    with following(server) as (follower, index):
        server.snapshot = [[stored([1, 2])]]
        server.published = 1
        wait_until(lambda: follower.is_in_step and follower.snapshots == 2)
        assert "batches before number 1 did not come" in follower.error
        assert position(index, 1, 2) == 2


def test_an_unknown_block_has_the_snapshot_read_anew(server: Server) -> None:
    with following(server) as (follower, index):
        server.snapshot = [[stored([1, 2]), stored([3, 4], parent=2)]]
        server.publish(stored([3, 4], parent=2))
        wait_until(lambda: follower.is_in_step and follower.snapshots == 2)
        assert "unknown block 2" in follower.error
        assert position(index, 1, 2, 3, 4) == 4


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        msgspec.msgpack.encode("text"),
        msgspec.msgpack.encode([0.0, ["text"]]),
        msgspec.msgpack.encode([0.0, [{"type": "BlockStored"}]]),
        msgspec.msgpack.encode([0.0, [stored([1, 2], token_ids=[(1, 2), (2, 3)])]]),
        msgspec.msgpack.encode([0.0, [stored([1, 2], block_size=3)]]),
    ],
)
def test_a_malformed_batch_is_counted(server: Server, payload: bytes) -> None:
    with following(server) as (follower, index):
        server.send(0, payload)
        server.published = 1
        wait_until(lambda: follower.is_in_step and follower.snapshots == 2)
        server.publish(stored([1, 2]))
        wait_until(lambda: position(index, 1, 2) == 2)
        assert follower.malformed == 1


def test_a_message_of_other_frames_is_malformed(server: Server) -> None:
    with following(server) as (follower, _):
        server.socket.send_multipart([b"", b"one"])
        wait_until(lambda: follower.is_in_step and follower.snapshots == 2)
        assert follower.malformed == 1
        assert "frames of [0, 3] bytes" in follower.error


def test_batches_between_the_pages_are_applied_between_them(server: Server) -> None:
    """Block 2 is on the first page, gone before the second one, and stored again after it."""

    def publish_before(page: int) -> None:
        if page == 1:
            server.wait_for_subscriber()
            server.publish(removed(2))
        if page == 2:
            server.publish(stored([7, 8], parent=6))

    server.snapshot = [[stored([1, 2])], [stored([5, 6]), stored([1, 2])], [stored([9, 10])]]
    server.published = 3
    server.on_page = publish_before
    index = ReplicaIndex()
    follower = Follower(
        server.url, server.endpoint, index, "a", KEY, pause=PAUSE, patience=20 * PATIENCE
    )
    wait_until(lambda: follower.is_in_step)
    assert (follower.applied, follower.snapshots) == (2, 1)
    assert position(index, 1, 2) == 2
    assert position(index, 5, 6, 7, 8) == 4
    assert position(index, 9, 10) == 2
    follower.close()


def test_a_page_waits_for_batches_that_were_published_before_it(server: Server) -> None:
    first = msgspec.msgpack.encode([0.0, [stored([3, 4])]])

    def count_before(page: int) -> None:
        server.published = page  # batch 0 is published before page 1, and comes later

    server.on_page = count_before
    server.snapshot = [[stored([1, 2])], [stored([5, 6])]]
    index = ReplicaIndex()
    follower = Follower(server.url, server.endpoint, index, "a", KEY, pause=PAUSE, patience=20)
    server.wait_for_subscriber()
    wait_until(lambda: server.asked == [0, 1])
    assert not follower.is_in_step
    assert position(index, 5, 6) == 0
    server.send(0, first)
    wait_until(lambda: follower.is_in_step)
    assert position(index, 3, 4) == position(index, 5, 6) == 2
    follower.close()


def test_batches_that_do_not_come_before_a_page_have_it_begin_again(server: Server) -> None:
    def count_before(page: int) -> None:
        server.published = 1 if page else server.published

    server.on_page = count_before
    server.snapshot = [[stored([1, 2])], [stored([5, 6])]]
    with following(server) as (follower, index):
        assert server.asked == [0, 1, 0, 1]
        assert "batches before number 1 did not come" in follower.error
        assert position(index, 5, 6) == 2


def test_a_server_that_starts_anew_is_followed_again(server: Server) -> None:
    with following(server, patience=20) as (follower, index):
        server.publish(stored([1, 2]))
        server.publish(stored([5, 6]))
        wait_until(lambda: follower.applied == 2)
        server.start_anew()
        server.wait_for_subscriber()
        server.publish(stored([3, 4]))
        server.snapshot = [[stored([3, 4])]]
        wait_until(lambda: follower.is_in_step and position(index, 3, 4) == 2)
        assert position(index, 1, 2) == 0
        server.publish(stored([7, 8]))
        wait_until(lambda: position(index, 7, 8) == 2)
        assert position(index, 3, 4) == 2


def test_numbers_that_start_anew_are_noticed_by_the_batch_alone(server: Server) -> None:
    with following(server, pause=600) as (follower, _):
        server.publish(stored([1, 2]))
        wait_until(lambda: follower.applied == 1)
        server.published = 0
        server.publish(stored([3, 4]))
        wait_until(lambda: not follower.is_in_step)
        assert "numbers started anew" in follower.error


def test_a_server_that_goes_away_holds_nothing_until_it_is_back(server: Server) -> None:
    with following(server) as (follower, index):
        server.publish(stored([1, 2]))
        wait_until(lambda: follower.applied == 1)
        server.stop_http()
        wait_until(lambda: not follower.is_in_step and not follower.is_reachable)
        assert position(index, 1, 2) == 0
        server.snapshot = [[stored([1, 2])]]
        server.start_http()
        wait_until(lambda: follower.is_in_step)
        assert position(index, 1, 2) == 2


def test_a_server_that_is_not_there_yet_is_waited_for(server: Server) -> None:
    server.stop_http()
    index = ReplicaIndex()
    follower = Follower(server.url, server.endpoint, index, "a", KEY, pause=PAUSE)
    wait_until(lambda: follower.error)
    assert [each.replica for each in index.resume([1])] == ["a"]
    server.start_http()
    wait_until(lambda: follower.is_in_step)
    follower.close()


def test_what_a_server_refuses_is_said(server: Server) -> None:
    server.error = "busy with a flush"
    follower = Follower(server.url, server.endpoint, ReplicaIndex(), "a", KEY, pause=PAUSE)
    wait_until(lambda: "busy with a flush" in follower.error)
    server.error = ""
    wait_until(lambda: follower.is_in_step)
    follower.close()
    other = Follower(server.url, server.endpoint, ReplicaIndex(), "a", "wrong", pause=PAUSE)
    wait_until(lambda: "401" in other.error)
    other.close()


@contextmanager
def all_of(*servers: Server, urls: tuple[str, ...] = ()) -> Iterator[Replicas]:
    urls = urls or tuple(server.url for server in servers)
    replicas = Replicas(urls, KEY, pause=PAUSE, patience=PATIENCE)
    try:
        wait_until(lambda: len(replicas.followers) == len(servers))
        wait_until(lambda: all(each.is_in_step for each in replicas.followers.values()))
        yield replicas
    finally:
        replicas.close()


@pytest.fixture
def other() -> Iterator[Server]:
    one = Server()
    yield one
    one.close()


def test_the_replica_with_the_earliest_first_token_is_chosen(server: Server, other: Server) -> None:
    server.snapshot = [[stored([1, 2])]]
    server.rate = other.rate = 100.0
    with all_of(server, other) as replicas:

        def choose() -> Choice:
            """Nothing is left of the choice: it is answered at once."""
            choice = replicas.choose([1, 2, 3])
            replicas.on_answer(choice)
            return choice

        assert choose()[:3] == (server.url, 2, 0.01)
        server.waiting = 9
        wait_until(lambda: replicas.followers[server.url].load.waiting == 9)
        assert choose()[:3] == (other.url, 0, 0.03)
        other.rate = 10.0
        wait_until(lambda: replicas.followers[other.url].load.prefill_tokens_per_second == 10)
        assert choose().replica == server.url
        server.stop_http()
        wait_until(lambda: not replicas.followers[server.url].is_reachable)
        assert choose().replica == other.url
        server.start_http()


def test_equal_prompts_at_once_are_sent_to_one_replica(server: Server, other: Server) -> None:
    """The second waits for the prefill of the first there; others are sent elsewhere meanwhile."""
    prompt, different = list(range(100)), list(range(100, 200))
    with all_of(server, other) as replicas:
        first = replicas.choose(prompt)
        assert replicas.choose(prompt).replica == first.replica
        assert replicas.choose(prompt, "another tenant").replica != first.replica
        assert replicas.choose(different[:50]).replica != first.replica


def test_none_is_chosen_where_none_is_reachable() -> None:
    with (
        all_of(urls=("http://127.0.0.1:9",)) as replicas,
        pytest.raises(LookupError, match=r"no server can be reached: http://127\.0\.0\.1:9"),
    ):
        replicas.choose([1, 2, 3])


def test_a_replica_that_is_often_wrong_is_read_anew(server: Server) -> None:
    """One that served more than it had said is not wrong."""
    with all_of(server) as replicas:
        follower = replicas.followers[server.url]
        for number in range(TOO_MANY_WRONG + 1):
            assert follower.snapshots == 1
            replicas.on_answer(Choice(server.url, 10, 0.0, number), 10)
            replicas.on_answer(Choice(server.url, 10, 0.0, number), 12)
            replicas.on_answer(Choice(server.url, 10, 0.0, number), 0)
        wait_until(lambda: follower.is_in_step and follower.snapshots == 2)
        load = follower.load
        assert (load.right, load.wrong) == (2 * (TOO_MANY_WRONG + 1), TOO_MANY_WRONG + 1)


def test_the_table_has_a_line_for_each_server(server: Server) -> None:
    server.snapshot = [[stored([1, 2]), stored([3, 4], parent=2, medium="DISK")]]
    with all_of(server, urls=(server.url, "http://127.0.0.1:9")) as replicas:
        wait_until(lambda: "refused" in str(replicas.errors))
        console = Console(width=400, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(table(replicas))
        lines = console.export_text().splitlines()
        (line,) = (line for line in lines if server.url in line)
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        assert cells == [server.url, "yes", "2", "4", "1", "0", "1", "0", "0 of 0"]
        assert any("127.0.0.1:9" in line and "refused" in line for line in lines)


def test_a_publisher_is_found_at_the_host_of_its_server() -> None:
    url = "http://[::1]:30000"
    assert endpoint_of(url, KvEvents("*", 5557), 0) == "tcp://[::1]:5557"
    assert endpoint_of("http://a:1", KvEvents("0.0.0.0", 5557), 2) == "tcp://a:5559"
    assert endpoint_of("http://a:1", KvEvents("10.0.0.1", 5557), 0) == "tcp://10.0.0.1:5557"


def test_a_tenant_has_the_name_that_servers_give_it() -> None:
    names = TenantNames(b"a key")
    assert tenant_name("", None, "a key") == names.name(None) == ""
    assert tenant_name("k", "", "a key") == names.name(("k", None))
    assert tenant_name(None, "s", b"a key") == names.name((None, "s"))
    assert len({tenant_name(*each, "x") for each in [("k", "s"), ("ks", None), (None, "ks")]}) == 3


def test_a_router_needs_neither_torch_nor_sglang() -> None:
    code = "import sys, sglang_hybrid.replicas; print({'torch', 'sglang'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
