"""Replicas and clients that say what they should not: it is their own loss."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any

import pytest
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from sglang_hybrid.extensions.router import Replicas
from sglang_hybrid.extensions.router import picker as picker_module
from sglang_hybrid.extensions.router.follower import Follower
from sglang_hybrid.extensions.router.picker import PROMPT_ROUTE, Picker
from sglang_hybrid.extensions.router.wire import Malformed, decode_prompt
from tests.extensions.router.liars import Liars, Lie, lies
from tests.extensions.router.server import KEY, PATIENCE, PAUSE, Server, stored, wait_until

HELD = list(range(50, 90))  # tokens of a prompt that the honest replica holds
AT_ONCE = 30


@pytest.fixture
def honest(server: Server) -> Server:
    server.snapshot = [[stored(HELD)]]
    server.rate, server.room = 1_000.0, 1_000_000
    return server


@pytest.fixture(autouse=True)
def no_thread_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ended: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    yield
    assert ended == []


def has_heard(replicas: Replicas, liars: Liars, number: int) -> bool:
    """True if what this liar says was taken for what it is."""
    lie, url = liars.told[number], liars.urls[number]
    if not liars.asked[number, lie.place]:
        return False
    if lie.place == "info":
        return url in replicas.followers or "not asked" not in replicas.errors[url]
    follower = replicas.followers[url]
    is_heard = lie.place not in ("status", "batch") or liars.asked[number, lie.place] > 1
    return bool(follower.error) or (follower.is_in_step and is_heard)


def check(honest: Server, told: list[Lie]) -> None:
    """The honest replica gets each prompt that it holds, whatever the others say."""
    with closing(Liars(told)) as liars:
        urls = [*liars.urls, honest.url]  # it is asked last
        with closing(Replicas(urls, KEY, pause=4 * PAUSE, patience=PATIENCE)) as replicas:
            wait_until(lambda: honest.url in replicas.followers)
            follower = replicas.followers[honest.url]
            wait_until(lambda: follower.is_in_step)
            for number, lie in enumerate(told):
                if lie.place != "prompt":
                    wait_until(lambda number=number: has_heard(replicas, liars, number))
            for more in range(20):
                choice = replicas.choose([*HELD, more])
                assert (choice.replica, choice.position) == (honest.url, len(HELD))
                replicas.on_answer(choice, len(HELD))
                replicas.on_answer(replicas.choose([more]))
            assert all(thread_lives(one) for one in replicas.followers.values())
            assert follower.snapshots == 1
            replicas.index.check_integrity()


def thread_lives(follower: Follower) -> bool:
    return any(each.name == f"follow {follower.name}" for each in threading.enumerate())


ALL = [lie for lie in lies() if lie.place != "prompt"]
RAW = [lie for lie in ALL if lie.is_raw]
INFOS = [lie for lie in ALL if lie.place == "info" and not lie.is_raw]
PAGES = [lie for lie in ALL if lie.place not in ("info", "batch") and not lie.is_raw]
BATCHES = [lie for lie in ALL if lie.place == "batch"]
MANY = [*RAW, *INFOS, *PAGES[::7], *BATCHES]
"""All of what is no HTTP, and of what is decoded once; test_wire.py decodes all of the rest."""


def test_a_replica_that_lies_moves_no_prompt_of_others(honest: Server) -> None:
    """Few of the lies; the slow suite tells many."""
    check(honest, [*RAW[:13], *INFOS[::50], *PAGES[::500], *BATCHES[::6]])


def is_refused(lie: Lie) -> bool:
    """True if nobody could take this for a prompt."""
    try:
        decode_prompt(lie.content)
    except Malformed:
        return True
    return lie.is_raw


SLOW = ("silence", "no end", "no end of headers")
PROMPTS = [lie for lie in lies() if lie.place == "prompt" and is_refused(lie)]
AT_ONCE_REFUSED = [lie for lie in PROMPTS if lie.what not in SLOW]


def check_prompts(honest: Server, told: list[Lie]) -> Liars:
    """The honest replica tells what a prompt is, where the others say nothing that can be."""
    route = PROMPT_ROUTE + "/generate"
    prompt = {"input_ids": [*HELD, 0], "tenant": ""}
    honest.answers[route] = "application/json", json.dumps(prompt).encode()
    address = honest.url.removeprefix("http://")
    with closing(Liars(told)) as liars:
        urls = [*liars.urls, honest.url]
        with closing(Replicas(urls, KEY, pause=4 * PAUSE, patience=8 * PATIENCE)) as replicas:
            wait_until(lambda: len(replicas.followers) == len(urls))
            wait_until(lambda: all(one.is_in_step for one in replicas.followers.values()))
            picker = Picker(replicas)

            async def destinations() -> list[bytes]:
                found = []
                for _ in range(5):
                    replies = [reply async for reply in picker.Process(stream(), None)]
                    mutation = replies[-1].request_body.response.header_mutation
                    found.append(mutation.set_headers[0].header.raw_value)
                return found

            for found in asyncio.run(destinations()):
                assert found.decode().split(",")[0] == address
            assert (picker.looked_up, picker.unknown, picker.failed) == (5, 0, 0)
            for number, url in enumerate(liars.urls):
                if liars.asked[number, "prompt"] and not told[number].is_raw:
                    wait_until(lambda url=url: replicas.followers[url].malformed)
            assert all(thread_lives(one) for one in replicas.followers.values())
    return liars


async def stream() -> AsyncIterator[ProcessingRequest]:
    """A request of a gateway that keeps its body meanwhile."""
    first = ProcessingRequest(protocol_config={"request_body_mode": ProcessingMode.BUFFERED})
    for name, said in ((":method", "POST"), (":path", "/generate")):
        first.request_headers.headers.headers.add(key=name, value=said)
    yield first
    yield ProcessingRequest(request_body={"body": b"{}", "end_of_stream": True})


def test_a_replica_that_lies_of_a_prompt_moves_none(honest: Server) -> None:
    raw = [lie for lie in AT_ONCE_REFUSED if lie.is_raw]
    check_prompts(honest, [*raw, *AT_ONCE_REFUSED[::40]])


def test_one_that_does_not_say_what_a_prompt_is_is_not_asked_again(
    honest: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picker_module, "SECONDS", 1.0)
    liars = check_prompts(honest, [lie for lie in PROMPTS if lie.what == "silence"])
    assert liars.asked[0, "prompt"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(0, len(AT_ONCE_REFUSED), AT_ONCE))
def test_no_lie_of_a_prompt_moves_one(honest: Server, begin: int) -> None:
    check_prompts(honest, AT_ONCE_REFUSED[begin : begin + AT_ONCE])


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(0, len(MANY), AT_ONCE))
def test_no_lie_moves_a_prompt_of_others(honest: Server, begin: int) -> None:
    check(honest, MANY[begin : begin + AT_ONCE])
