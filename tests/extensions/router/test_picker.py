"""Requests through Envoy, which asks the picker: which server gets them, and as what."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import requests
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from sglang_hybrid.extensions.router import Replicas
from sglang_hybrid.extensions.router.choosing import divided
from sglang_hybrid.extensions.router.envoy import configuration
from sglang_hybrid.extensions.router.exchange import CHUNK, DESTINATION, MOST_BODY
from sglang_hybrid.extensions.router.fleet import envoy_command
from sglang_hybrid.extensions.router.metrics import COUNTERS, GAUGES, shown
from sglang_hybrid.extensions.router.picker import ENDING, PROMPT_ROUTE, Picker, serve
from sglang_hybrid.serving.server_process import free_port
from tests.extensions.router.absurd import RAW
from tests.extensions.router.server import Server, all_of, stored, wait_until

LONG = list(range(100, 400))
JSON = "application/json"


class Gateway:
    """Envoy in front of servers, and the picker that it asks."""

    def __init__(self, replicas: Replicas, urls: list[str], folder: Path) -> None:
        self.replicas = replicas
        self.url = f"http://127.0.0.1:{free_port()}"
        self._at = f"127.0.0.1:{free_port()}"
        self._loop = asyncio.new_event_loop()
        self.picker: Picker
        self._serves, self._ended = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._answer(),)
        )
        self._thread.start()
        self.listen = self.url.removeprefix("http://")
        command = envoy_command(configuration(urls, self.listen, self._at))
        self._log = (folder / "log").open("wb")
        self.process = subprocess.Popen([*command, "--concurrency", "1"], stderr=self._log)
        assert self._serves.wait(20)
        wait_until(self._is_up)

    def _is_up(self) -> bool:
        try:
            return requests.get(self.url + "/health", timeout=1).ok
        except requests.RequestException:
            return False

    async def _answer(self) -> None:
        self.picker = Picker(self.replicas)
        server = await serve(self.picker, self._at)
        self._serves.set()
        await self._ended.wait()
        await server.stop(0)

    def end_picker(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self._log.close()
        self.end_picker()
        self._loop.close()

    def post(self, path: str, body: Any, **headers: str) -> requests.Response:
        return requests.post(self.url + path, body, headers=headers, timeout=60)

    def begin(self, request: bytes) -> socket.socket:
        """A connection on which this was sent."""
        host, port = divided(self.listen)
        connection = socket.create_connection((host, port), timeout=60)
        connection.sendall(request)
        return connection


def status(connection: socket.socket) -> int:
    """The status of the answer on a connection, which is closed then; 0 without an answer."""
    with connection, connection.makefile("rb") as answer:
        line = answer.readline()
    return int(line.split()[1]) if line else 0


@pytest.fixture
def gateway(server: Server, other: Server, tmp_path: Path) -> Iterator[Gateway]:
    """A gateway in front of two servers that say that each prompt is LONG and [0]."""
    for one in (server, other):
        prompt = {"input_ids": [*LONG, 0], "tenant": ""}
        one.answers[PROMPT_ROUTE + "/generate"] = JSON, json.dumps(prompt).encode()
        one.answers["/generate"] = JSON, b'{"meta_info": {"cached_tokens": 300}}'
    # A server that answers late, on a busy machine, has not gone.
    with all_of(server, other, patience=20) as replicas:
        gateway = Gateway(replicas, [server.url, other.url], tmp_path)
        yield gateway
        gateway.close()


def hold(gateway: Gateway, server: Server) -> None:
    """The server has the prompt from now on, and the gateway knows it."""
    follower = gateway.replicas.followers[server.url]
    server.publish(stored(LONG))
    wait_until(lambda: follower.is_in_step and follower.seq == server.published)
    server.posted.clear()


def sent(server: Server) -> list[tuple[str, dict[str, str], bytes]]:
    """The requests that were posted to a server, but for questions."""
    return [each for each in server.posted if not each[0].startswith(PROMPT_ROUTE)]


@pytest.mark.parametrize("size", [0, 2, CHUNK, CHUNK + 1, MOST_BODY])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_request_goes_whole_to_the_server_that_can_resume_it(
    gateway: Gateway, server: Server, other: Server, size: int, is_first: bool
) -> None:
    holder, idle = (server, other) if is_first else (other, server)
    hold(gateway, holder)
    body = bytes(size)
    answer = gateway.post("/generate", body)
    assert answer.json() == {"meta_info": {"cached_tokens": 300}}
    assert [each[2] for each in sent(holder)] == [body]
    assert sent(idle) == []


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_longer_request_goes_whole_to_a_server_by_load(
    gateway: Gateway, server: Server, other: Server, is_announced: bool
) -> None:
    hold(gateway, server)
    body = bytes(MOST_BODY + 5_000_000)
    parts = body if is_announced else iter([body[:CHUNK], body[CHUNK:]])
    assert gateway.post("/generate", parts).ok
    assert [each[2] for each in (*sent(server), *sent(other))] == [body]
    assert (gateway.picker.looked_up, gateway.picker.unknown) == (0, 1)
    assert not any(path.startswith(PROMPT_ROUTE) for path, _, _ in server.posted + other.posted)


NOT_NORMAL = (
    *("/../flush_cache", "/v1/../../flush_cache", "/v1/%2e%2e/flush_cache", "//a/x", "/a//b"),
    *("/./x", "/x/..", "/a%2Fb", "/a%5cb", "/a\\b", "/%67enerate", "/a%00", "/a#b"),
)


def test_a_path_that_is_not_in_its_normal_form_reaches_nobody(
    gateway: Gateway, server: Server, other: Server
) -> None:
    head = "Host: a\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
    for path in NOT_NORMAL:
        assert status(gateway.begin(f"POST {path} HTTP/1.1\r\n{head}".encode())) == 400, path
    gateway.end_picker()  # by itself, too
    for path in NOT_NORMAL:
        assert status(gateway.begin(f"POST {path} HTTP/1.1\r\n{head}".encode())) == 400, path
    assert server.posted == other.posted == []


def test_a_client_does_not_say_how_often_a_server_is_asked(
    gateway: Gateway, server: Server, other: Server
) -> None:
    said = {
        "x-forwarded-for": "10.0.0.1",
        "x-envoy-internal": "true",
        "x-envoy-retry-on": "retriable-status-codes",
        "x-envoy-retriable-status-codes": "404",
        "x-envoy-max-retries": "50",
        "x-envoy-upstream-rq-timeout-ms": "1",
        "x-request-id": "5",
    }
    assert gateway.post("/nowhere", b"{}", **said).status_code == 404
    ((_, headers, _),) = [*sent(server), *sent(other)]
    assert headers["x-request-id"] == "5"  # which is no instruction
    assert headers["x-forwarded-for"].startswith("10.0.0.1,")


def test_what_no_client_should_send_costs_nobody_anything(
    gateway: Gateway, server: Server, other: Server
) -> None:
    hold(gateway, server)
    heads = (
        *(b"", b"Content-Type: \xff\xfe\r\n", b"X-Hybrid-Tenant: \xe2\x82\xac\r\n"),
        *(b"Authorization: " + b"x" * 20_000 + b"\r\n", b"X-Hybrid-\xff: a\r\n", b"A: b\0\r\n"),
        *(b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Expect: 100-continue\r\n"),
        *(b"Transfer-Encoding: gzip\r\n", b"Content-Encoding: gzip\r\n", b"Upgrade: h2c\r\n"),
    )
    begun = []
    for head in heads:
        for body in (b"{}", *RAW[:12]) if head == b"" else (b"{}",):
            length = b"Content-Length: %d\r\nConnection: close\r\n" % len(body)
            request = b"POST /generate HTTP/1.1\r\nHost: a\r\n" + head + length + b"\r\n" + body
            begun.append(gateway.begin(request))
    statuses = {status(connection) for connection in begun}
    assert statuses <= {0, 100, 200, 400, 501}  # 0: the connection is closed
    for line in (
        b"",
        b"\0" * 100,
        b"GET\r\n\r\n",
        b"POST  / HTTP/9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n",
    ):
        with gateway.begin(line):
            pass
    server.posted.clear()
    gateway.post("/generate", b"{}")
    assert len(sent(server)) == 1 and gateway.process.poll() is None


@pytest.mark.slow
def test_many_who_begin_and_do_not_go_on_take_nobodys_place(
    gateway: Gateway, server: Server
) -> None:
    """More than Envoy would have as requests at a time to one cluster."""
    hold(gateway, server)
    begun = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"
    connections = [gateway.begin(begun) for _ in range(1_500)]
    assert gateway.post("/generate", b"{}").ok
    assert (len(sent(server)), gateway.picker.looked_up) == (1, 1)
    for connection in connections:
        connection.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("announced", [50 << 20, MOST_BODY])
def test_bodies_that_stall_take_bounded_memory_and_end(gateway: Gateway, announced: int) -> None:
    envoy = psutil.Process(gateway.process.pid)
    before = envoy.memory_info().rss
    head = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % announced
    connections = [gateway.begin(head) for _ in range(20)]
    for connection in connections:
        connection.setblocking(False)
        with suppress(BlockingIOError):
            for _ in range(announced // CHUNK - 1):
                connection.sendall(bytes(CHUNK))
    assert envoy.memory_info().rss - before < 20 * 2 * MOST_BODY
    for connection in connections:
        connection.settimeout(200)
        assert connection.recv(100).startswith(b"HTTP/1.1 408")
        connection.close()


def test_a_client_does_not_choose(gateway: Gateway, server: Server, other: Server) -> None:
    hold(gateway, other)
    addresses = [one.url.removeprefix("http://") for one in (other, server)]
    gateway.post("/generate", b"{}", **{DESTINATION: addresses[1]})
    ((_, headers, _),) = sent(other)
    assert headers[DESTINATION].split(",") == addresses


def test_what_names_a_tenant_is_told_and_no_more(
    gateway: Gateway, server: Server, other: Server
) -> None:
    said = {
        "authorization": "Bearer k",
        "content-type": JSON,
        "x-hybrid-tenant": "t",
        "x-request-id-hybrid-session": "end",
    }
    gateway.post("/generate", b"{}", **said, cookie="a secret", **{"x-request-id": "5"})
    posted = [*server.posted, *other.posted]
    ((headers, body),) = [each[1:] for each in posted if each[0].startswith(PROMPT_ROUTE)]
    assert body == b"{}"
    names = {*said, "cookie", "x-request-id"}
    assert {name: value for name, value in headers.items() if name in names} == said


def test_what_was_hit_is_compared_with_what_was_foreseen(gateway: Gateway, server: Server) -> None:
    hold(gateway, server)
    load = gateway.replicas.followers[server.url].load
    gateway.post("/generate", b"{}")
    wait_until(lambda: (load.right, load.wrong) == (1, 0))
    server.answers["/generate"] = (
        JSON,
        b'{"usage": {"prompt_tokens_details": {"cached_tokens": 9}}}',
    )
    gateway.post("/generate", b"{}")
    wait_until(lambda: (load.right, load.wrong) == (1, 1))
    for kind, body in ((JSON, b"{"), (JSON, b"[]"), (JSON, b'{"usage": null}'), ("x/y", b"{}")):
        server.answers["/generate"] = kind, body
        assert gateway.post("/generate", b"{}").content == body
    wait_until(lambda: load.seconds(0) == 0)  # all were answered
    assert (load.right, load.wrong) == (1, 1)


def test_a_request_goes_on_where_its_server_has_gone(
    gateway: Gateway, server: Server, other: Server
) -> None:
    hold(gateway, other)
    gateway.replicas.close()  # nobody notices that it goes
    other.stop_http()
    assert gateway.post("/generate", b"12").ok
    assert [each[2] for each in sent(server)] == [b"12"]
    other.start_http()


def test_a_server_that_ends_hands_a_request_on(
    gateway: Gateway, server: Server, other: Server
) -> None:
    hold(gateway, other)
    other.refuses = {"Retry-After": "1"}
    answer = gateway.post("/generate", b"12")
    assert (answer.status_code, answer.json()) == (200, {"meta_info": {"cached_tokens": 300}})
    assert [each[2] for each in sent(other)] == [each[2] for each in sent(server)] == [b"12"]
    server.refuses = other.refuses
    answer = gateway.post("/generate", b"12")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), "all of them end"


def test_another_error_is_handed_to_the_client(
    gateway: Gateway, server: Server, other: Server
) -> None:
    hold(gateway, other)
    other.refuses = {}
    assert gateway.post("/generate", b"12").status_code == 503
    assert sent(server) == []


def test_a_router_that_ends_refuses_requests_and_knows_when_the_others_have_ended(
    gateway: Gateway, server: Server, other: Server
) -> None:
    stream = requests.post(gateway.url + "/stream", b"{}", stream=True, timeout=60)
    parts = stream.iter_content(1)
    assert (stream.status_code, next(parts)) == (200, b"a")
    wait_until(lambda: gateway.picker.open == 1)  # and no health check of ours
    gateway.picker.is_ending = True
    for answer in (
        gateway.post("/generate", b"{}"),
        requests.get(gateway.url + "/health", timeout=60),
    ):
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["message"] == ENDING
    assert gateway.picker.open == 1
    assert [path for path, _, _ in sent(server) + sent(other)] == ["/stream"]
    for one in (server, other):
        one.streams.set()
    assert b"".join(parts) == b"b"
    wait_until(lambda: gateway.picker.open == 0)


def test_what_is_no_prompt_is_sent_by_load(gateway: Gateway, server: Server, other: Server) -> None:
    for one in (server, other):
        one.answers["/flush_cache"] = JSON, b"{}"
    assert gateway.post("/flush_cache", b"").ok
    assert (gateway.picker.looked_up, gateway.picker.unknown) == (0, 1)
    assert requests.get(gateway.url + "/health", timeout=5).ok
    assert gateway.picker.unknown == 1


def test_where_no_server_can_be_reached_the_gateway_goes_by_turns(
    gateway: Gateway, server: Server, other: Server
) -> None:
    gateway.replicas.close()
    gateway.replicas.followers.clear()
    for _ in range(4):
        assert gateway.post("/generate", b"{}").ok
    assert len(sent(server)) == len(sent(other)) == 2
    assert gateway.picker.failed == 4


def test_without_its_picker_a_gateway_goes_by_turns(
    gateway: Gateway, server: Server, other: Server
) -> None:
    hold(gateway, server)
    gateway.end_picker()
    said = {DESTINATION: server.url.removeprefix("http://")}  # by a client
    for _ in range(4):
        assert gateway.post("/generate", b"{}", **said).ok
    assert len(sent(server)) == len(sent(other)) == 2


def test_envoy_looks_up_names_as_the_picker_does() -> None:
    clusters = configuration(["dns://servers:30000"], "0.0.0.0:1", "127.0.0.1:2")
    servers = clusters["static_resources"]["clusters"][0]
    ((endpoint,),) = (each["lb_endpoints"] for each in servers["load_assignment"]["endpoints"])
    address = endpoint["endpoint"]["address"]["socket_address"]
    assert (servers["type"], address) == (
        "STRICT_DNS",
        {"address": "servers", "port_value": 30000},
    )


async def exchange(replicas: Replicas, *sent: ProcessingRequest) -> list[Any]:
    """The picker's replies to these messages of a gateway."""

    async def stream() -> AsyncIterator[ProcessingRequest]:
        for message in sent:
            yield message

    return [reply async for reply in Picker(replicas).Process(stream(), None)]


def headers(**more: Any) -> ProcessingRequest:
    pairs = [{"key": ":method", "raw_value": b"POST"}, {"key": ":path", "value": "/generate"}]
    return ProcessingRequest(request_headers={"headers": {"headers": pairs}}, **more)


def test_a_gateway_that_sends_no_bodies_is_answered_by_load(server: Server) -> None:
    modes = {"request_body_mode": ProcessingMode.NONE}
    with all_of(server) as replicas:
        (reply,) = asyncio.run(exchange(replicas, headers(protocol_config=modes)))
        (said,) = reply.request_headers.response.header_mutation.set_headers
        assert said.header.raw_value.decode() == server.url.removeprefix("http://")
        assert replicas.followers[server.url].load.seconds(0) == 0  # the gateway went away


DUPLEX = {"request_body_mode": ProcessingMode.FULL_DUPLEX_STREAMED}


def parts_of(body: list[bytes], *, ends: bool = True) -> list[ProcessingRequest]:
    """A body as a gateway streams it."""
    return [
        ProcessingRequest(request_body={"body": part, "end_of_stream": ends and part is body[-1]})
        for part in body
    ]


def streamed(replies: list[Any]) -> list[Any]:
    """The parts of a body that a gateway gets back."""
    return [reply.request_body.response.body_mutation.streamed_response for reply in replies]


def test_a_long_body_is_sent_back_in_parts(server: Server) -> None:
    """Kubernetes' gateways want it in parts."""
    parts = [bytes(CHUNK + 1), bytes(5), bytes(CHUNK)]
    with all_of(server) as replicas:
        first, *rest = asyncio.run(
            exchange(replicas, headers(protocol_config=DUPLEX), *parts_of(parts))
        )
    assert first.WhichOneof("response") == "request_headers"
    sent = streamed(rest)
    assert b"".join(part.body for part in sent) == b"".join(parts)
    assert max(len(part.body) for part in sent) <= CHUNK
    assert [part.end_of_stream for part in sent] == [*[False] * (len(sent) - 1), True]


def test_a_body_that_does_not_end_goes_on_by_load(server: Server) -> None:
    """The picker keeps no more of it than of the longest one that is looked up."""
    parts = [bytes([number]) * (1 << 20) for number in range(12)]
    with all_of(server) as replicas:
        first, *rest = asyncio.run(
            exchange(replicas, headers(protocol_config=DUPLEX), *parts_of(parts))
        )
    assert first.request_headers.response.header_mutation.set_headers
    sent = streamed(rest)
    assert b"".join(part.body for part in sent) == b"".join(parts)
    assert [len(part.body) for part in sent[-3:]] == [1 << 20] * 3, "they are sent as they come"
    assert sent[-1].end_of_stream and server.posted == []


def test_a_body_that_does_not_arrive_is_status_408(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_hybrid.extensions.router.picker.BODY_SECONDS", 0.02)

    async def story() -> list[Any]:
        async def stream() -> AsyncIterator[ProcessingRequest]:
            yield headers(protocol_config=DUPLEX)
            yield parts_of([b"{"], ends=False)[0]
            await asyncio.sleep(60)

        return [reply async for reply in Picker(replicas).Process(stream(), None)]

    with all_of(server) as replicas:
        (reply,) = asyncio.run(story())
    assert reply.immediate_response.status.code == 408


def test_what_is_held_of_long_bodies_is_bounded(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond that they go on by load; short ones are looked up in any case."""
    monkeypatch.setattr("sglang_hybrid.extensions.router.picker.MOST_HELD", 5 << 20)
    partial = {"request_body_mode": ProcessingMode.BUFFERED_PARTIAL}

    async def first_reply(picker: Picker, length: int) -> tuple[Any, Any]:
        message = headers(protocol_config=partial)
        length_said = {"key": "content-length", "raw_value": str(length).encode()}
        message.request_headers.headers.headers.add(**length_said)

        async def stream() -> AsyncIterator[ProcessingRequest]:
            yield message
            await asyncio.Event().wait()

        process = picker.Process(stream(), None)
        return process, await anext(process)

    async def story() -> None:
        picker = Picker(replicas)
        first, waits = await first_reply(picker, 3 << 20)
        assert not waits.request_headers.HasField("response")
        _, goes = await first_reply(picker, 3 << 20)
        assert goes.request_headers.response.header_mutation.set_headers
        assert goes.mode_override.request_body_mode == ProcessingMode.NONE
        _, waits = await first_reply(picker, 1 << 10)
        assert not waits.request_headers.HasField("response")
        await first.aclose()
        _, waits = await first_reply(picker, 3 << 20)
        assert not waits.request_headers.HasField("response")

    with all_of(server) as replicas:
        asyncio.run(story())


def test_a_body_of_which_a_gateway_sends_the_first_part_goes_by_load(server: Server) -> None:
    partial = {"request_body_mode": ProcessingMode.BUFFERED_PARTIAL}
    with all_of(server) as replicas:
        _, reply = asyncio.run(
            exchange(
                replicas,
                headers(protocol_config=partial),
                *parts_of([bytes(MOST_BODY)], ends=False),
            )
        )
    assert reply.request_body.response.header_mutation.set_headers
    assert server.posted == []


@pytest.mark.parametrize("path", [*NOT_NORMAL, "", "*", "http://a/b"])
def test_any_gateway_is_told_to_refuse_such_a_path(server: Server, path: str) -> None:
    message = ProcessingRequest(request_headers={"end_of_stream": True})
    for name, said in ((":method", "POST"), (":path", path)):
        message.request_headers.headers.headers.add(key=name, raw_value=said.encode())
    with all_of(server) as replicas:
        (reply,) = asyncio.run(exchange(replicas, message))
    assert reply.immediate_response.status.code == 400
    assert b"normal form" in reply.immediate_response.body
    assert server.posted == []


@pytest.mark.parametrize(
    "path", ["/", "/v1/chat/completions", "/v1/models/org/name", "/a%20b/..c/?x=../..", "/a;b=@/"]
)
def test_a_path_in_its_normal_form_goes_on(server: Server, path: str) -> None:
    message = ProcessingRequest(request_headers={"end_of_stream": True})
    for name, said in ((":method", "POST"), (":path", path), ("x-hybrid-\u20ac", "\u20ac")):
        message.request_headers.headers.headers.add(key=name, value=said)
    with all_of(server) as replicas:
        (reply,) = asyncio.run(exchange(replicas, message))
    assert reply.request_headers.response.header_mutation.set_headers


def test_a_long_answer_is_not_kept(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_hybrid.extensions.router.exchange.MOST_READ", 10)
    kind = {"key": "content-type", "value": JSON}
    answer = {"body": b'{"meta_info": {"cached_tokens": 0}}', "end_of_stream": True}
    with all_of(server) as replicas:
        server.answers[PROMPT_ROUTE + "/generate"] = JSON, b'{"input_ids": [1, 2], "tenant": ""}'
        messages = (
            headers(protocol_config={**DUPLEX, "response_body_mode": DUPLEX["request_body_mode"]}),
            *parts_of([b"{}"]),
            ProcessingRequest(response_headers={"headers": {"headers": [kind]}}),
            ProcessingRequest(response_body=answer),
        )
        replies = asyncio.run(exchange(replicas, *messages))
        load = replicas.followers[server.url].load
        assert (load.sent, load.right, load.wrong) == (1, 0, 0)
        assert load.seconds(0) == 0
    assert replies[-1].response_body.response.body_mutation.streamed_response.end_of_stream


def test_trailers_end_a_request_and_parts_of_an_answer_are_sent_on(server: Server) -> None:
    server.answers[PROMPT_ROUTE + "/generate"] = JSON, b'{"input_ids": [1, 2], "tenant": ""}'
    duplex = ProcessingMode.FULL_DUPLEX_STREAMED
    modes = {"request_body_mode": duplex, "response_body_mode": duplex}
    kind = {"key": "content-type", "value": JSON}
    messages = (
        headers(protocol_config=modes),
        ProcessingRequest(request_body={"body": b"{"}),
        ProcessingRequest(request_body={"body": b"}"}),
        ProcessingRequest(request_trailers={}),
        ProcessingRequest(response_headers={"headers": {"headers": [kind]}}),
        ProcessingRequest(response_body={"body": b'{"meta_info": {"cached_'}),
        ProcessingRequest(response_body={"body": b'tokens": 0}}', "end_of_stream": True}),
    )
    with all_of(server) as replicas:
        replies = asyncio.run(exchange(replicas, *messages))
        assert server.posted[0][2] == b"{}"
        load = replicas.followers[server.url].load
        assert (load.right, load.wrong) == (1, 0)
    assert [reply.WhichOneof("response") for reply in replies] == [
        "request_headers",
        "request_body",
        "request_trailers",
        "response_headers",
        "response_body",
        "response_body",
    ]
    parts = [reply.response_body.response.body_mutation.streamed_response for reply in replies[4:]]
    assert b"".join(part.body for part in parts) == b'{"meta_info": {"cached_tokens": 0}}'
    assert [part.end_of_stream for part in parts] == [False, True]


def test_a_second_picker_does_not_share_the_port_of_the_first() -> None:
    async def two() -> None:
        at = f"127.0.0.1:{free_port()}"
        first = await serve(Picker(Mock()), at)
        with pytest.raises(RuntimeError, match="bind"):
            await serve(Picker(Mock()), at)
        await first.stop(0)

    asyncio.run(two())


def test_metrics_tell_what_became_of_requests(
    gateway: Gateway, server: Server, other: Server
) -> None:
    hold(gateway, server)
    port = free_port()
    with shown(gateway.picker, "127.0.0.1:0", port):
        gateway.post("/generate", b"{}")
        server.answers["/generate"] = JSON, b'{"meta_info": {"cached_tokens": 200}}'
        gateway.post("/generate", b"{}")
        text = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=20).text
        found = dict(re.findall(r"^sglang_hybrid_router:(\S+) (\S+)$", text, re.MULTILINE))
        assert found['requests_total{outcome="looked_up"}'] == "2.0"
        of = {
            name: tuple(float(found[f'{name}{{server="{one.url}"}}']) for one in (server, other))
            for name in (*(f"{counter}_total" for counter in COUNTERS), *GAUGES)
        }
        assert of == {
            "sent_total": (2, 0),
            "right_predictions_total": (1, 0),
            "wrong_predictions_total": (1, 0),
            "snapshots_total": (1, 1),
            "malformed_total": (0, 0),
            "in_step": (1, 1),
            "reachable": (1, 1),
            "waiting": (0, 0),
        }
        assert found["lost_servers"] == "0.0"
        in_use = pytest.raises(OSError, match=f"cannot be at 127.0.0.1:{port}: Address already")
        with in_use, shown(gateway.picker, "127.0.0.1:0", port):
            pass
    with pytest.raises(requests.ConnectionError):
        requests.get(f"http://127.0.0.1:{port}/metrics", timeout=20)
