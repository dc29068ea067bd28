"""Middleware of the HTTP server: a request's key is put where the check of keys looks for it,
below /hybrid_cache/ nothing is told to web pages of other origins, and the route is remembered.
"""

import base64
import ipaddress
import re
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import fastapi.routing
from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_hybrid.core.extensions import guard
from sglang_hybrid.serving.config import HybridConfig


def all_routes(routes: Iterable[Any]) -> Iterable[Any]:
    """Every route that requests are matched with: it has `endpoint`, `path` and `matches`.

    Newer releases of FastAPI keep an included router as one entry, which has none of these; older
    ones add its routes to the application's.
    """
    contexts = getattr(fastapi.routing, "iter_route_contexts", None)
    return routes if contexts is None else contexts(routes)


def add_middleware(app: Any) -> None:
    """Ours around all others of SGLang's application that there are by now: what a server that ends
    refuses, and what is refused below /hybrid_cache/.
    """
    app.add_middleware(SameOrigin)
    if (shutdown := guard("shutdown")) is not None:
        app.add_middleware(shutdown.GracefulEnd)


_scope: ContextVar[Scope | None] = ContextVar("scope", default=None)


def current_route() -> str:
    """The route of the HTTP request that is being answered, as the application registered it; ""
    where there is none.
    """
    scope = _scope.get()
    return "" if scope is None else str(getattr(scope.get("route"), "path", ""))


class KeyHeader:
    """ASGI middleware in front of the check of keys: where a request has no header Authorization, a
    key in `x-api-key`, where Anthropic's clients put it, becomes one. On the routes of the page so
    does the password that a browser sends, for which it is told to ask.

    is_page: true for a request for a route of the page; None without a page. A browser sends a
    password that it knows with every request to this server, whichever page makes it, so no other
    route takes one.
    """

    def __init__(self, app: ASGIApp, is_page: Callable[[Scope], bool] | None) -> None:
        self._app = app
        self._is_page = is_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            key = headers.get("x-api-key")
            if key is not None and "authorization" not in headers:
                bearer = (b"authorization", f"Bearer {key}".encode("latin-1"))
                scope["headers"] = [*scope["headers"], bearer]
            if self._is_page is not None and self._is_page(scope):
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


OURS = "/hybrid_cache"
"""The path of our routes. They tell what the cache holds and what prompts are."""

SCHEMAS_PATH = "/v1/prompt_schemas"
"""The path of the routes that store prompts and tell which there are. Clients know the server there
by any name.
"""

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]*)?")


class SameOrigin:
    """ASGI middleware: a route at or below /hybrid_cache, whoever added it, answers only requests
    that name this server in `Host` and were not made by a web page of another origin. A route at or
    below /v1/prompt_schemas answers requests under any name of the server, but none that a page of
    another origin made. Remembers what `current_route` tells of any request.

    SGLang allows pages of all origins to read every answer (CORS), which this middleware is put in
    front of. A page whose own name was made to resolve to this server's address (DNS rebinding) is
    of the same origin for a browser, but its requests have that name in `Host`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _scope.set(scope)
        why = _why_refused(scope)
        if why is None:
            await self._app(scope, receive, send)
            return
        await JSONResponse({"error": why}, HTTPStatus.FORBIDDEN)(scope, receive, send)


def _why_refused(scope: Scope) -> str | None:
    """The sentence for a request that gets no answer; None for any other."""
    if scope["type"] not in ("http", "websocket"):
        return None
    is_ours = _is_within(scope, OURS)
    if not is_ours and not _is_within(scope, SCHEMAS_PATH):
        return None
    headers = Headers(scope=scope)
    hosts = headers.getlist("host")
    if is_ours and not (hosts and all(map(_is_own, hosts))):
        named = ", ".join(hosts) or "no host"
        return (
            f"the request names {named[:80]!r} as its host, by which this server is not known; "
            "start it with --hybrid-hosts NAME, or use its address."
        )
    same_site = headers.get("sec-fetch-site", "none") in ("none", "same-origin")
    origins = headers.getlist("origin")
    if not same_site or any(_host_of(origin) not in hosts[:1] for origin in origins):
        return "pages of other hosts get nothing from this one."
    return None


def _is_within(scope: Scope, path: str) -> bool:
    """True for a request at `path` or below it."""
    asked = get_route_path(scope)
    return asked == path or asked.startswith(path + "/")


def _host_of(origin: str) -> str | None:
    """Name and port in a header `Origin`."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _is_own(host: str) -> bool:
    """True for a header `Host` that names this server: a loopback name or address, the address that
    it is bound to, the name of this machine, or one of `--hybrid-hosts`. A server that is bound to
    all addresses has any: a page that was loaded from an address needs no name to be resolved.
    """
    found = _HOST.fullmatch(host.lower())
    if found is None:
        return False
    name, bound = found[1].strip("[]"), _bound_to().lower().strip("[]")
    if name in ("localhost", bound, socket.gethostname().lower(), *_more_hosts()):
        return True
    address, own = _address(name), _address(bound)
    if address is None:
        return False
    return address.is_loopback or (own is not None and (own.is_unspecified or own == address))


def _bound_to() -> str:
    """SGLang's --host."""
    from sglang.srt.runtime_context import get_serving

    return str(get_serving().host)


def _more_hosts() -> list[str]:
    """The names of `--hybrid-hosts`."""
    return HybridConfig.from_environment().hybrid_hosts.split(",")


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
