"""Requests through Envoy, which asks the picker: which server gets them, and as what."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from sglang_hybrid.replicas import Replicas
from sglang_hybrid.replicas.envoy import configuration
from sglang_hybrid.replicas.metrics import COUNTERS, GAUGES, shown
from sglang_hybrid.replicas.picker import CHUNK, DESTINATION, PROMPT_ROUTE, Picker, serve
from sglang_hybrid.serving.server_process import free_port
from tests.replicas.server import Server, all_of, stored, wait_until

ENVOY = shutil.which("envoy", path=str(Path(sys.executable).parent))
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
        config = folder / "envoy.json"
        listen = self.url.removeprefix("http://")
        config.write_text(json.dumps(configuration(urls, listen, self._at)))
        assert ENVOY is not None
        command = [ENVOY, "--config-path", str(config), "--use-dynamic-base-id"]
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [*command, "--concurrency", "1", "--log-level", "error"], stderr=self._log
        )
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
        self._process.terminate()
        self._process.wait()
        self._log.close()
        self.end_picker()
        self._loop.close()

    def post(self, path: str, body: bytes, **headers: str) -> requests.Response:
        return requests.post(self.url + path, body, headers=headers, timeout=60)


@pytest.fixture
def gateway(server: Server, other: Server, tmp_path: Path) -> Iterator[Gateway]:
    """In front of two servers that say that each prompt is LONG and [0]."""
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
    """What was posted to a server, but for questions."""
    return [each for each in server.posted if not each[0].startswith(PROMPT_ROUTE)]


@pytest.mark.parametrize("size", [0, 2, CHUNK, CHUNK + 1, 3_000_000])
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
    """What the picker replies to these messages of a gateway."""

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


def test_a_long_body_is_sent_back_in_parts(server: Server) -> None:
    """As Kubernetes' gateways want it."""
    parts = (bytes(CHUNK + 1), bytes(5), bytes(CHUNK))
    modes = {"request_body_mode": ProcessingMode.FULL_DUPLEX_STREAMED}
    messages = [
        ProcessingRequest(request_body={"body": part, "end_of_stream": part is parts[-1]})
        for part in parts
    ]
    with all_of(server) as replicas:
        first, *rest = asyncio.run(exchange(replicas, headers(protocol_config=modes), *messages))
    assert first.WhichOneof("response") == "request_headers"
    sent = [reply.request_body.response.body_mutation.streamed_response for reply in rest]
    assert b"".join(part.body for part in sent) == b"".join(parts)
    assert max(len(part.body) for part in sent) <= CHUNK
    assert [part.end_of_stream for part in sent] == [*[False] * (len(sent) - 1), True]


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
