"""Long bodies: bounded, and read one step of the event loop at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from sglang_hybrid.extensions.guard import body_bounds, body_turns
from sglang_hybrid.extensions.guard.body_bounds import BodyBounds
from sglang_hybrid.extensions.guard.body_turns import BodyTurns
from sglang_hybrid.serving.requests import long_requests
from sglang_hybrid.serving.requests.long_requests import LONG


def test_others_run_between_two_long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_turns, "MADE_UP", 0.0)
    seen: list[str] = []

    async def long(turns: BodyTurns, name: str) -> None:
        await turns.take()
        seen.append(name)
        time.sleep(0.01)  # as if a body was parsed
        seen.append(name)

    async def others() -> None:
        while seen.count("a") + seen.count("b") + seen.count("c") < 6:
            seen.append("other")
            await asyncio.sleep(0)

    async def run() -> None:
        turns = BodyTurns()
        await asyncio.gather(*(long(turns, name) for name in "abc"), others())

    asyncio.run(run())
    steps = " ".join(seen).split("a a")[1].split("b b")
    assert "other" in steps[0]
    assert "other" in steps[1].split("c c")[0]


def test_a_turn_that_nobody_waits_for_any_more_is_given_on() -> None:
    async def run() -> None:
        turns = BodyTurns()
        await turns.take()
        gone = asyncio.create_task(turns.take())
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait_for(turns.take(), timeout=10)

    asyncio.run(run())


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time is `now`; where nothing is ready, its next timer is."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__()
        select = self._selector.select  # type: ignore[attr-defined]

        def skip(timeout: float | None) -> Any:
            self.now += timeout or 0.0
            return select(0)

        self._selector.select = skip  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


def test_a_busy_loop_reads_long_bodies_as_an_idle_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 streams with 1 ms of work each in every 20 ms: the loop comes back after 100."""
    monkeypatch.setattr(body_bounds, "most_body_bytes", lambda: MOST)
    read: list[float] = []
    streams: list[asyncio.Future[None]] = []
    loop = Clock()
    monkeypatch.setattr(time, "monotonic", loop.time)

    async def application(_: Any, receive: Any, __: Any) -> None:
        await receive()
        loop.now += 0.002  # as if a body was parsed
        read.append(loop.now)
        await asyncio.sleep(0)

    async def stream() -> None:
        while True:
            streams.append(loop.create_future())
            await streams[-1]
            loop.now += 0.001

    async def outputs() -> None:
        while True:
            await asyncio.sleep(0.02)
            woken, streams[:] = streams[:], []
            for future in woken:
                future.set_result(None)

    async def client(bounds: BodyBounds) -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": bytes(LONG)}

        scope = {"type": "http", "path": "/generate", "headers": []}
        while True:
            await bounds(scope, receive, None)  # type: ignore[arg-type]
            await asyncio.sleep(0.001)

    async def run(busy: bool) -> float:
        bounds, begin = BodyBounds(application), loop.now
        read.clear()
        work = [outputs(), *(stream() for _ in range(100))] if busy else []
        tasks = [asyncio.create_task(one) for one in [*work, *(client(bounds) for _ in range(32))]]
        await asyncio.sleep(10)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return len(read) / (loop.now - begin)

    try:
        idle, busy = (loop.run_until_complete(run(is_busy)) for is_busy in (False, True))
    finally:
        loop.close()
    assert 115 < idle <= 130, "a quarter of the time, in steps of 2 ms"
    assert busy > 50


def test_others_work_is_no_part_of_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_bounds, "most_body_bytes", lambda: MOST)
    monkeypatch.setattr(body_turns, "MADE_UP", 0.0)
    loop = Clock()
    monkeypatch.setattr(time, "monotonic", loop.time)

    async def application(_: Any, receive: Any, __: Any) -> None:
        await receive()
        loop.now += 1  # as if a body was parsed
        with pytest.raises(ZeroDivisionError):
            await fails()
        loop.now += 10

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    async def stream() -> None:
        loop.now += 100

    async def receive() -> Any:
        return {"type": "http.request", "body": bytes(LONG)}

    async def run() -> None:
        bounds = BodyBounds(application)
        scope = {"type": "http", "path": "/generate", "headers": []}
        await asyncio.gather(bounds(scope, receive, None), stream())  # type: ignore[arg-type]
        assert loop.now >= 111
        assert bounds._turns._free_at == 1 + body_turns.FREE

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


def test_what_a_request_awaits_may_be_cancelled() -> None:
    async def run() -> None:
        ended: list[str] = []

        async def application() -> str:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                await asyncio.sleep(0)
                ended.append("tidied up")
                raise
            return "not cancelled"

        task = asyncio.create_task(awaiting(application()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["tidied up"]

    async def awaiting(work: Any) -> Any:
        return await body_turns.stepwise(work, lambda: None)

    asyncio.run(run())


MOST = 3 * LONG


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """An application that says how many bytes a body had, and whether its request is long."""
    monkeypatch.setattr(body_bounds, "most_body_bytes", lambda: MOST)
    monkeypatch.setattr(body_bounds, "PAUSE", 0)
    app = FastAPI()
    app.add_middleware(BodyBounds)

    @app.post("/size")
    async def size(request: Request) -> dict[str, Any]:
        body = await request.body()
        return {"bytes": len(body), "long": long_requests.threads() is not None}

    @app.post("/update_weights_from_tensor")
    async def weights(request: Request) -> dict[str, Any]:
        return {"bytes": len(await request.body())}

    with TestClient(app) as client:
        yield client


@pytest.mark.parametrize(
    ("reads_images", "takes_embeddings", "most"),
    [(False, False, 16 << 20), (True, False, 272 << 20), (False, True, 272 << 20)],
)
def test_what_is_no_text_has_room_where_a_server_takes_it(
    reads_images: bool, takes_embeddings: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(is_multimodal=reads_images)
    manager: Any = Mock(tokenizer=None, context_len=10, model_config=config)
    memory = SimpleNamespace(disable_radix_cache=takes_embeddings)
    monkeypatch.setattr("sglang.srt.runtime_context.get_memory", lambda: memory)
    assert body_bounds._most_body_bytes(manager) == most + 6 * 10 * 1_024


@pytest.mark.parametrize("size", [0, 1, LONG - 1, LONG, MOST])
def test_a_body_within_the_bounds_reaches_the_application(client: TestClient, size: int) -> None:
    answer = client.post("/size", content=b"x" * size).json()
    assert answer == {"bytes": size, "long": size >= LONG}


def test_a_body_in_parts_is_bounded(client: TestClient) -> None:
    parts = (b"x" * LONG for _ in range(3))
    assert client.post("/size", content=parts).json() == {"bytes": MOST, "long": True}
    answer = client.post("/size", content=(b"x" * LONG for _ in range(4)))
    assert answer.status_code == 413
    assert f"this server takes {MOST:,} at most" in answer.json()["detail"]


def test_a_body_is_refused_by_what_it_announces(client: TestClient) -> None:
    head = {"content-length": str(MOST + 1)}
    assert client.post("/size", content=b"", headers=head).status_code == 413
    assert client.post("/size", content=b"x" * (MOST + 1)).status_code == 413


def test_weights_are_not_bounded(client: TestClient) -> None:
    for root in ("", "/api"):  # of --fastapi-root-path
        path = f"{root}/update_weights_from_tensor"
        with TestClient(client.app, root_path=root) as below:
            answer = below.post(path, content=b"x" * (MOST + 1))
        assert answer.json() == {"bytes": MOST + 1}


@pytest.mark.parametrize("size", [0, LONG])
def test_a_body_that_is_nested_too_deep_is_refused(client: TestClient, size: int) -> None:
    body = b"[" * 900 + b" " * size + b"]" * 900
    answer = client.post("/size", content=body)
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith("the body is nested 900 deep; it may be")
    form = {"content-type": "multipart/form-data; boundary=x"}
    for headers in (form, {"content-type": "application/json; x=multipart/"}):
        assert client.post("/size", content=body, headers=headers).status_code == 400
    parts = b"--x\r\n\r\n" + body + b"\r\n--x--"  # a picture is no JSON
    assert client.post("/size", content=parts, headers=form).json()["bytes"] == len(parts)
