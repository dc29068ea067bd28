"""What the check of keys must know: all routes of an application, and a request's key."""

from collections.abc import Iterable
from typing import Any

import fastapi.routing
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send


def all_routes(routes: Iterable[Any]) -> Iterable[Any]:
    """Every route that requests are matched with: it has `endpoint`, `path` and `matches`.

    Newer releases of FastAPI keep an included router as one entry, which has none of these; older
    ones add its routes to the application's.
    """
    contexts = getattr(fastapi.routing, "iter_route_contexts", None)
    return routes if contexts is None else contexts(routes)


class KeyHeader:
    """ASGI middleware in front of the check of keys: where a request has no header Authorization, a
    key in `x-api-key`, where Anthropic's clients put it, becomes one.
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
        await self._app(scope, receive, send)
