"""What the check of keys must know: all routes of an application, and a request's key."""

import base64
from collections.abc import Iterable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import fastapi.routing
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send


def all_routes(routes: Iterable[Any]) -> Iterable[Any]:
    """Every route that requests are matched with: it has `endpoint`, `path` and `matches`.

    Newer releases of FastAPI keep an included router as one entry, which has none of these; older
    ones add its routes to the application's.
    """
    contexts = getattr(fastapi.routing, "iter_route_contexts", None)
    return routes if contexts is None else contexts(routes)


PAGE = "/hybrid_cache/"
"""Where a browser asks for keys: as a password, by HTTP's basic authentication."""


class KeyHeader:
    """ASGI middleware in front of the check of keys: where a request has no header Authorization, a
    key in `x-api-key`, where Anthropic's clients put it, becomes one. On the routes of the page so
    does the password that a browser sends, for which it is told to ask.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            key = headers.get("x-api-key")
            if key is not None and "authorization" not in headers:
                bearer = (b"authorization", f"Bearer {key}".encode("latin-1"))
                scope["headers"] = [*scope["headers"], bearer]
            if scope.get("path", "").startswith(PAGE):
                scope["headers"] = _with_password(scope["headers"])
                send = _asking(send)
        await self._app(scope, receive, send)


def _with_password(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """`headers` with the password of basic authentication, if there is one, as a bearer's key."""
    kept = []
    for name, value in headers:
        kind, _, said = value.partition(b" ")
        if name == b"authorization" and kind.lower() == b"basic":
            with suppress(ValueError):
                password = base64.b64decode(said, validate=True).partition(b":")[2]
                value = b"Bearer " + password
        kept.append((name, value))
    return kept


def _asking(send: Send) -> Send:
    """An answer that wants a key tells a browser to ask for one."""

    async def sent(message: Message) -> None:
        if (
            message["type"] == "http.response.start"
            and message["status"] == HTTPStatus.UNAUTHORIZED
        ):
            challenge = (b"www-authenticate", b'Basic realm="sglang_hybrid"')
            message["headers"] = [*message.get("headers", ()), challenge]
        await send(message)

    return sent
