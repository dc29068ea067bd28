"""Bodies arrive in time and within bounds, before anybody has read them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import Mock

import pytest
from fastapi import HTTPException

from sglang_hybrid.extensions.guard import body_bounds
from sglang_hybrid.extensions.guard.body_bounds import UNBOUNDED, BodyBounds
from sglang_hybrid.serving.requests.long_requests import LONG

Message = dict[str, Any]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_bounds, "PAUSE", 0.0)
    monkeypatch.setattr(body_bounds, "SLOW", 0.0)
    monkeypatch.setattr(body_bounds, "IN_MEMORY", 10 * LONG)
    monkeypatch.setattr(body_bounds, "most_body_bytes", lambda: 20 * LONG)


class Client:
    """Sends the body of a request in parts. got: status, and what the application read or the
    error's sentence.
    """

    def __init__(self, bounds: BodyBounds, path: str = "/generate", announced: int = 0) -> None:
        self._parts: asyncio.Queue[Message] = asyncio.Queue()
        headers = [(b"content-length", str(announced).encode())] if announced else []
        self._scope = {"type": "http", "path": path, "headers": headers, "client": self}
        self.task = asyncio.create_task(self._ask(bounds))
        self.got: tuple[int, Any] = (0, None)

    async def send(self, part: bytes, more: bool = True) -> None:
        self._parts.put_nowait({"type": "http.request", "body": part, "more_body": more})
        for _ in range(5):
            await asyncio.sleep(0)

    def leave(self) -> None:
        self._parts.put_nowait({"type": "http.disconnect"})

    async def _ask(self, bounds: BodyBounds) -> None:
        try:
            await bounds(self._scope, self._parts.get, self._answer)  # type: ignore[arg-type]
        except HTTPException as error:
            self.got = error.status_code, error.detail

    async def _answer(self, message: Any) -> None:
        self.got = 200, message


async def application(scope: Any, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
    """Answers with the length of the body."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return
        body, more = body + message["body"], message["more_body"]
    await send(len(body))


def run(story: Callable[[BodyBounds], Awaitable[None]]) -> None:
    async def told() -> None:
        await story(BodyBounds(application))  # type: ignore[arg-type]

    asyncio.run(told())


def test_a_body_that_gives_way_as_its_next_part_comes_is_not_read_without_the_others() -> None:
    async def story(bounds: BodyBounds) -> None:
        slow, other = Client(bounds), Client(bounds)
        await slow.send(b"x" * 6 * LONG)
        for client, part in ((other, b"x" * 5 * LONG), (slow, b"x")):
            said = {"type": "http.request", "body": part, "more_body": client is other}
            client._parts.put_nowait(said)
        await slow.task
        assert slow.got[0] == 408 and "other bodies needed its memory" in slow.got[1]
        await other.send(b"", more=False)
        await other.task
        assert other.got == (200, 5 * LONG)

    run(story)


def test_a_body_that_comes_in_parts_is_read_as_one() -> None:
    async def story(bounds: BodyBounds) -> None:
        client = Client(bounds)
        for size in (LONG, 3, 0):
            await client.send(bytes(size))
        await client.send(b"ab", more=False)
        await client.task
        assert client.got == (200, LONG + 5)
        assert bounds._waiting._total == 0

    run(story)


def test_a_body_that_stalls_is_status_408_and_takes_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_bounds, "STALLED", 0.02)

    async def story(bounds: BodyBounds) -> None:
        stalled, silent = Client(bounds), Client(bounds)
        await stalled.send(bytes(LONG))
        assert bounds._waiting._total == LONG
        await asyncio.gather(stalled.task, silent.task)
        said = "the body did not arrive: nothing came for 0 seconds."
        assert stalled.got == silent.got == (408, said)
        assert bounds._waiting._total == 0

    run(story)


@pytest.mark.parametrize("path", ["/generate", sorted(UNBOUNDED)[0]])
def test_a_body_that_drips_is_status_408(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights may take as long as they need."""
    monkeypatch.setattr(body_bounds, "WHOLE", 0.05)

    async def story(bounds: BodyBounds) -> None:
        client = Client(bounds, path)
        for _ in range(10):
            await client.send(b"a")
            await asyncio.sleep(0.01)
        await client.send(b"a", more=False)
        await client.task
        if path in UNBOUNDED:
            assert client.got == (200, 11)
        else:
            assert client.got == (
                408,
                "the body did not arrive: it was not whole within 0 seconds.",
            )

    run(story)


def test_a_long_body_has_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example is a video over a line of ten megabits a second."""
    monkeypatch.setattr(body_bounds, "WHOLE", 0.05)
    monkeypatch.setattr(body_bounds, "RATE", 20)

    async def story(bounds: BodyBounds) -> None:
        for announced, status in ((11, 200), (0, 408)):
            client = Client(bounds, announced=announced)
            for _ in range(10):
                await client.send(b"a")
                await asyncio.sleep(0.01)
            await client.send(b"a", more=False)
            await client.task
            assert client.got[0] == status

    run(story)


def test_a_client_that_stalls_gives_way_to_those_that_send() -> None:
    async def story(bounds: BodyBounds) -> None:
        stalled, other, sender = Client(bounds), Client(bounds), Client(bounds)
        for client in (stalled, other):
            await client.send(bytes(4 * LONG))
        for _ in range(3):
            await sender.send(bytes(LONG))
        await stalled.task
        assert stalled.got[0] == 408 and "others" not in stalled.got[1]
        assert "other bodies needed its memory" in stalled.got[1]
        await sender.send(b"", more=False)
        await other.send(b"", more=False)
        await asyncio.gather(sender.task, other.task)
        assert sender.got == (200, 3 * LONG) and other.got == (200, 4 * LONG)

    run(story)


def test_none_of_many_that_send_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of many clients at once are an example: each waits for room and is read."""
    monkeypatch.setattr(body_bounds, "SLOW", 10.0)
    monkeypatch.setattr(body_bounds, "WHOLE", 0.2)

    async def story(bounds: BodyBounds) -> None:
        clients = [Client(bounds) for _ in range(8)]
        for part in range(5):
            for client in clients:
                await client.send(bytes(LONG), more=part < 4)
                assert bounds._waiting._total <= (10 + 5 + len(clients)) * LONG
        await asyncio.gather(*(client.task for client in clients))
        assert [client.got for client in clients] == [(200, 5 * LONG)] * len(clients)
        assert bounds._waiting._total == 0 and not bounds._waiting._arriving

    run(story)


def test_a_body_that_drips_gives_way_to_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_bounds, "SLOW", 0.05)

    async def story(bounds: BodyBounds) -> None:
        dripping, sender = Client(bounds), Client(bounds)
        await dripping.send(bytes(9 * LONG))
        await sender.send(bytes(2 * LONG))
        await sender.send(b"", more=False)
        for _ in range(10):
            await dripping.send(b"a")
            await asyncio.sleep(0.02)
        await asyncio.gather(dripping.task, sender.task)
        assert dripping.got[0] == 408 and "it came slowest" in dripping.got[1]
        assert sender.got == (200, 2 * LONG)

    run(story)


def test_one_body_alone_may_have_more_than_all_together() -> None:
    async def story(bounds: BodyBounds) -> None:
        client = Client(bounds)
        for last in [*[False] * 14, True]:
            await client.send(bytes(LONG), more=not last)
        await client.task
        assert client.got == (200, 15 * LONG)

    run(story)


def test_whole_bodies_that_wait_for_their_turn_keep_others_waiting() -> None:
    async def story(bounds: BodyBounds) -> None:
        bounds._turns._free_at = time.monotonic() + 1_000
        first, second = Client(bounds), Client(bounds)
        await first.send(bytes(9 * LONG), more=False)
        await second.send(bytes(2 * LONG))
        await second.send(b"", more=False)
        assert second._parts.qsize() == 1, "what has no room is not read"
        bounds._turns._free_at = 0.0
        bounds._turns._wake()
        await asyncio.gather(first.task, second.task)
        assert first.got == (200, 9 * LONG) and second.got == (200, 2 * LONG)

    run(story)


def test_nothing_is_kept_of_a_client_that_has_left() -> None:
    """An error may keep the request alive."""

    async def story(bounds: BodyBounds) -> None:
        client = Client(bounds)
        await client.send(bytes(LONG))
        (reader,) = bounds._waiting._bytes
        client.leave()
        await client.task
        assert bounds._waiting._total == 0 and not bounds._waiting._bytes
        assert reader._parts == []

    run(story)


def test_the_memory_of_many_bodies_goes_back_once_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_back = Mock()
    monkeypatch.setattr(body_bounds, "MUCH", 3 * LONG)
    monkeypatch.setattr(body_bounds, "_give_back_freed_memory", given_back)

    async def story(bounds: BodyBounds) -> None:
        for size, times in ((2 * LONG, 0), (4 * LONG, 1), (LONG, 1)):
            first, second = Client(bounds), Client(bounds)
            await first.send(bytes(size))
            await second.send(bytes(LONG))
            first.leave()
            await first.task
            second.leave()
            await second.task
            assert given_back.call_count == times

    run(story)


def test_nothing_is_kept_of_a_request_that_is_cancelled() -> None:
    async def story(bounds: BodyBounds) -> None:
        client = Client(bounds)
        await client.send(bytes(LONG))
        client.task.cancel()
        await asyncio.wait([client.task])
        assert bounds._waiting._total == 0

    run(story)


def test_too_long_a_body_is_status_413_and_takes_no_memory() -> None:
    async def story(bounds: BodyBounds) -> None:
        client = Client(bounds)
        for _ in range(21):
            await client.send(bytes(LONG))
        await client.task
        assert client.got[0] == 413
        assert bounds._waiting._total == 0

    run(story)
