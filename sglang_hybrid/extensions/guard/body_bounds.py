"""Long bodies do not keep short ones waiting, and take a bounded part of the memory (patch 0066).

The event loop of the HTTP server reads bodies, and would tokenize texts, one after another, and all
requests wait meanwhile. So a body beyond what a prompt of this server can take is refused before it
is read; of the long ones that remain one at a time is read, with time for others between them; and
what takes long for a long body is done in threads (serving/requests/long_requests.py).

Anybody can begin a body where no key is wanted (with keys, SGLang checks them first). So a body has
to arrive in time, and the bodies that are in memory before their turn are bounded as a whole.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
from collections.abc import Awaitable
from contextlib import suppress
from functools import cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from fastapi import HTTPException
from starlette._utils import get_route_path

from sglang_hybrid.extensions.guard.body_turns import BodyTurns, stepwise
from sglang_hybrid.extensions.guard.texts import most_text_bytes
from sglang_hybrid.serving.requests.bodies import json_shape, may_be_deep
from sglang_hybrid.serving.requests.long_requests import LONG, in_thread_if_long, set_long

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

T = TypeVar("T")

ESCAPED = 6
"""Bytes that JSON may write for one byte of a text, as in \\u0000."""

BESIDE_TEXT = 16 << 20
"""Bytes of a body that are there for all but the text of the longest prompt: other prompts of a
batch, tools, schemas of answers, biases.
"""

MEDIA = 256 << 20
"""Bytes more for a model that reads images, sound or video, and for a server that takes embeddings
in the place of prompts.
"""

PAUSE = 1.0
"""Seconds before a body is refused, in which its client can send neither the rest nor another."""

STALLED = 10.0
"""Seconds after which a body of which nothing more has come is refused."""

WHOLE = 60.0
"""Seconds in which a whole body must have come, beside those of `RATE`."""

RATE = 1 << 20
"""Bytes that a client announces for which its body has a second more."""

IN_MEMORY = 256 << 20
"""Bytes of all bodies that are in memory before their turn, beside those of one body."""

SLOW = 1.0
"""Seconds in which the next `LONG` bytes of a body must come where others wait for its memory."""

MUCH = 64 << 20
"""Bytes of bodies after which their memory goes back to the kernel once there are none."""

FORM = b"--"
"""The beginning of a form in parts, with pictures or sound, and of no JSON. The type that a client
names does not count: some routes read JSON whatever it is.
"""

UNBOUNDED = frozenset(
    (
        "/add_external_corpus",
        "/load_lora_adapter_from_tensors",
        "/update_weights_from_tensor",
    )
)
"""Routes whose bodies are weights or documents; they want the admin key where there is one. Only
`STALLED` bounds them.
"""


class BodyBounds:
    """ASGI middleware, for all routes: bodies are read as described above.

    Where the application reads its body, a request gets an HTTPException with a status: 413 for too
    many bytes, 408 for a body that does not arrive in time, and 400 for one that is nested too deep
    (`bodies.py`).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turns = BodyTurns()
        self._waiting = WaitingBodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reader = _Reader(scope, receive, self._turns, self._waiting)
        is_bounded = get_route_path(scope) not in UNBOUNDED
        try:
            receive = reader.receive if is_bounded else reader.receive_part
            await stepwise(self._app(scope, receive, send), self._turns.end)
        finally:
            reader.forget()


class WaitingBodies:
    """The bodies that are in memory before their turn, as far as they have come.

    Beyond `IN_MEMORY` bytes the body that began first is read on, and readers of the next part of
    any other one wait until there is room. A body that comes slowly meanwhile is refused: a client
    that stalls gives way to those that send.
    """

    def __init__(self) -> None:
        self._total = self._most = 0
        self._bytes: dict[_Reader, int] = {}  # the one that began first is the first
        self._arriving: dict[_Reader, tuple[float, int]] = {}
        """Time at which `LONG` bytes had come last, and all bytes by then; the oldest is first."""
        self._removed = asyncio.Event()

    async def add(self, reader: _Reader, size: int) -> None:
        """Count the next `size` bytes of a body. Returns when the next ones may be read."""
        self._bytes[reader] = self._bytes.get(reader, 0) + size
        self._total += size
        self._most = max(self._most, self._total)
        now = asyncio.get_running_loop().time()
        since = self._arriving.get(reader)
        if since is None or self._bytes[reader] - since[1] >= LONG:
            self._arriving.pop(reader, None)
            self._arriving[reader] = now, self._bytes[reader]
        while self._total > IN_MEMORY and next(iter(self._bytes)) is not reader:
            self._arriving.pop(reader, None)  # nobody asks its client for more
            await self._room()
            self._arriving[reader] = asyncio.get_running_loop().time(), self._bytes[reader]

    async def _room(self) -> None:
        """Refuses the slowest body, or waits for a while."""
        slowest, (since, _) = next(iter(self._arriving.items()), (None, (0.0, 0)))
        if slowest is not None and asyncio.get_running_loop().time() - since >= SLOW:
            slowest.give_way()
            return
        self._removed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(SLOW):
                await self._removed.wait()

    def set_whole(self, reader: _Reader) -> None:
        """The last part of a body has come."""
        self._arriving.pop(reader, None)

    def remove(self, reader: _Reader) -> None:
        """A body has its turn, or its request has ended."""
        self._arriving.pop(reader, None)
        self._total -= self._bytes.pop(reader, 0)
        self._removed.set()
        if not self._total and self._most > MUCH:
            _give_back_freed_memory()
            self._most = 0


class _Reader:
    """Reads the body of one request in parts; the application gets it in one message."""

    def __init__(
        self, scope: Scope, receive: Receive, turns: BodyTurns, waiting: WaitingBodies
    ) -> None:
        announced = dict(scope["headers"]).get(b"content-length", b"")
        self._size = int(announced[:18]) if announced.isdigit() else 0
        self._receive = receive
        self._turns = turns
        self._waiting = waiting
        self._loop = asyncio.get_running_loop()
        self._whole = WHOLE + self._size / RATE
        self._latest = self._loop.time() + self._whole
        self._timeout = asyncio.timeout(None)
        self._late = ""
        self._gave_way = False
        self._parts: list[bytes] = []
        self._received = 0
        self._done = False

    async def receive(self) -> Message:
        """The whole body, and then what the server says of the connection."""
        if self._done:
            return await self._receive()
        await self._check_size()
        more = True
        while more:
            message = await self._next_part(self._latest)
            if message["type"] != "http.request":
                self.forget()
                return message
            part = message.get("body", b"")
            self._parts.append(part)
            self._received += len(part)
            await self._check_size()
            more = message.get("more_body", False)
            if more or self._received >= LONG:
                begin = self._loop.time()
                said = f"there was no room for it within {WHOLE:.0f} seconds"
                await self._until(begin + WHOLE, self._waiting.add(self, len(part)), said)
                self._latest += self._loop.time() - begin
        self._done = True
        self._waiting.set_whole(self)
        return {"type": "http.request", "body": await self._checked(), "more_body": False}

    async def receive_part(self) -> Message:
        """The next part of a body whose size is not bounded."""
        if self._done:
            return await self._receive()
        message = await self._next_part(math.inf)
        self._done = not message.get("more_body", False)
        return message

    async def _next_part(self, latest: float) -> Message:
        stalled = self._loop.time() + STALLED
        said = f"nothing came for {STALLED:.0f} seconds"
        if latest < stalled:
            said = f"it was not whole within {self._whole:.0f} seconds"
        return await self._until(min(latest, stalled), self._receive(), said)

    async def _until(self, when: float, step: Awaitable[T], late: str) -> T:
        """`step`, or status 408 at the time `when`, with a sentence that says what is `late`."""
        self._late = late
        try:
            async with asyncio.timeout_at(when) as self._timeout:
                done = await step
            if not self._gave_way:  # in the moment in which its next part came
                return done
        except TimeoutError:
            self.forget()
        await _refuse(HTTPStatus.REQUEST_TIMEOUT, f"the body did not arrive: {self._late}.")

    def give_way(self) -> None:
        """Refuse the body, whose next part is awaited, for the sake of others."""
        self.forget()
        self._late = "other bodies needed its memory, and it came slowest"
        self._gave_way = True
        if not self._timeout.expired():
            self._timeout.reschedule(self._loop.time())

    def forget(self) -> None:
        """Free the memory of what was read."""
        self._parts.clear()
        self._waiting.remove(self)

    async def _check_size(self) -> None:
        """Refuses what was announced, or read so far."""
        most, size = most_body_bytes(), max(self._size, self._received)
        if size > most:
            self.forget()
            await _refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body has {size:,} bytes or more; this server takes {most:,} at most, which "
                "is more than its longest prompt needs.",
            )

    async def _checked(self) -> bytes:
        """The body, when it is its turn to be read by the application."""
        body = b"".join(self._parts)
        self._parts.clear()
        set_long(len(body) >= LONG)
        if not body.startswith(FORM) and may_be_deep(body):
            shape = await in_thread_if_long(json_shape, body)
            try:
                shape.check()
            except ValueError as error:
                await _refuse(HTTPStatus.BAD_REQUEST, str(error))
        if len(body) >= LONG:
            await self._turns.take()
        self._waiting.remove(self)
        return body


def _give_back_freed_memory() -> None:
    """The C library would keep it (serving/host_memory.py); one without `malloc_trim` does."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


async def _refuse(status: HTTPStatus, why: str) -> NoReturn:
    await asyncio.sleep(PAUSE)
    raise HTTPException(status, why)


def most_body_bytes() -> int:
    """Bytes of a body that this server takes."""
    from sglang.srt.entrypoints.http_server import get_global_state

    return _most_body_bytes(get_global_state().tokenizer_manager)


@cache
def _most_body_bytes(manager: Any) -> int:
    from sglang.srt.runtime_context import get_memory

    text = most_text_bytes(manager.tokenizer, manager.context_len)
    takes_embeddings = get_memory().disable_radix_cache
    more = MEDIA if manager.model_config.is_multimodal or takes_embeddings else 0
    return ESCAPED * text + BESIDE_TEXT + more
