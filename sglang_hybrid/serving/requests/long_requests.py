"""Requests with long bodies do not keep short ones waiting (patch 0066).

The event loop of the HTTP server reads bodies, and would tokenize texts, one after another, and all
requests wait meanwhile. So a body beyond what a prompt of this server can take is refused before it
is read; of the long ones that remain one at a time is read, with time for others between them; and
what takes long for a long body is done in threads, of which there are few.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import cache, partial, wraps
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from fastapi import HTTPException

from sglang_hybrid.serving.requests.bodies import json_shape, may_be_deep
from sglang_hybrid.serving.requests.texts import most_text_bytes

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

P = ParamSpec("P")
T = TypeVar("T")

LONG = 64 << 10
"""Bytes of a body from which a request is long."""

ESCAPED = 6
"""Bytes that JSON may write for one byte of a text, as in \\u0000."""

BESIDE_TEXT = 16 << 20
"""Bytes of a body that are there for all but the text of the longest prompt: other prompts of a
batch, tools, schemas of answers, biases.
"""

MEDIA = 256 << 20
"""Bytes more for a model that reads images, sound or video."""

FREE = 3.0
"""How much longer than a step that takes long the event loop then does something else."""

PAUSE = 1.0
"""Seconds before a body is refused, in which its client can send neither the rest nor another."""

UNBOUNDED = frozenset(
    (
        "/add_external_corpus",
        "/load_lora_adapter_from_tensors",
        "/update_weights_from_tensor",
        "/v1/audio/transcriptions",
    )
)
"""Routes whose bodies are weights, documents or sound."""

_long: ContextVar[bool] = ContextVar("long", default=False)


class BodyBounds:
    """ASGI middleware, for all routes: bodies are read as described above.

    A body with too many bytes is an HTTPException with status 413 where the application reads it,
    one that is nested too deep (`bodies.py`) with status 400.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in UNBOUNDED:
            receive = _Reader(scope, receive, self._turns).receive
        await self._app(scope, receive, send)


class _Reader:
    """Reads the body of one request in parts; the application gets it in one message."""

    def __init__(self, scope: Scope, receive: Receive, turns: Turns) -> None:
        headers = dict(scope["headers"])
        announced = headers.get(b"content-length", b"")
        self._size = int(announced[:18]) if announced.isdigit() else 0
        self._form = b"multipart/" in headers.get(b"content-type", b"")
        self._receive = receive
        self._turns = turns
        self._read = bytearray()
        self._done = False

    async def receive(self) -> Message:
        if self._done:
            return await self._receive()
        await self._check_size()
        more = True
        while more:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._read += message.get("body", b"")
            await self._check_size()
            more = message.get("more_body", False)
        self._done = True
        return {"type": "http.request", "body": await self._checked(), "more_body": False}

    async def _check_size(self) -> None:
        """Refuses what was announced, or read so far."""
        most, size = most_body_bytes(), max(self._size, len(self._read))
        if size > most:
            self._read.clear()
            await _refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body has {size:,} bytes or more; this server takes {most:,} at most, which "
                "is more than its longest prompt needs.",
            )

    async def _checked(self) -> bytes:
        """The body, when it is its turn to be read by the application."""
        body = bytes(self._read)
        self._read.clear()
        _long.set(len(body) >= LONG)
        if not self._form and may_be_deep(body):
            shape = await in_thread_if_long(json_shape, body)
            try:
                shape.check()
            except ValueError as error:
                await _refuse(HTTPStatus.BAD_REQUEST, str(error))
        if _long.get():
            await self._turns.take()
        return body


async def _refuse(status: HTTPStatus, why: str) -> NoReturn:
    await asyncio.sleep(PAUSE)
    raise HTTPException(status, why)


class Turns:
    """Steps of the event loop that take long, one at a time; after each the loop is free for `FREE`
    times as long as it took.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self) -> None:
        """Return when the caller may begin a step. The step ends where the caller awaits next."""
        await self._lock.acquire()
        loop = asyncio.get_running_loop()
        begin = loop.time()
        # The loop calls this once the caller's step has ended.
        loop.call_soon(lambda: loop.call_later(FREE * (loop.time() - begin), self._lock.release))


def most_body_bytes() -> int:
    """Bytes of a body that this server takes."""
    from sglang.srt.entrypoints.http_server import get_global_state

    return _most_body_bytes(get_global_state().tokenizer_manager)


@cache
def _most_body_bytes(manager: Any) -> int:
    text = most_text_bytes(manager.tokenizer, manager.context_len)
    media = MEDIA if manager.model_config.is_multimodal else 0
    return ESCAPED * text + BESIDE_TEXT + media


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args, **kwargs)` in one of the threads for what takes long."""
    call = partial(contextvars.copy_context().run, function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads(), call)


async def in_thread_if_long(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `in_thread` for a request with a long body; for any other, a plain call."""
    if not _long.get():
        return function(*args, **kwargs)
    return await in_thread(function, *args, **kwargs)


def whole_in_thread_if_long(
    function: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorates a coroutine function, so that for a request with a long body it runs in a thread as
    a whole. The function must await nothing of its event loop.
    """

    @wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        coroutine = function(*args, **kwargs)
        return await (in_thread(asyncio.run, coroutine) if _long.get() else coroutine)

    return run


def threads() -> ThreadPoolExecutor | None:
    """The executor in which SGLang converts the current request: ours if its body is long, or None,
    which is the event loop's own.
    """
    return _threads() if _long.get() else None


@cache
def _threads() -> ThreadPoolExecutor:
    """A quarter of the cores: their work is native code, which would take all of them."""
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4), "long-requests")
