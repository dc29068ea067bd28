"""Run in the process of entered.py: which routes there are, and what lets a request in."""

import base64
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_hybrid.hooks import patching

API, ADMIN = "sk", "adm"
SETUPS = {
    "no keys": (None, None),
    "api key": (API, None),
    "admin key": (None, ADMIN),
    "both keys": (API, ADMIN),
}
SENT = {
    "none": [],
    "api": [(b"authorization", f"Bearer {API}".encode())],
    "admin": [(b"authorization", f"Bearer {ADMIN}".encode())],
    "wrong": [(b"authorization", b"Bearer x")],
    "x-api": [(b"x-api-key", API.encode())],  # as Anthropic's clients send it
    "x-admin": [(b"x-api-key", ADMIN.encode())],
    "x-wrong": [(b"x-api-key", b"x")],
    "basic api": [(b"authorization", b"Basic " + base64.b64encode(f"me:{API}".encode()))],
    "basic admin": [(b"authorization", b"Basic " + base64.b64encode(f"me:{ADMIN}".encode()))],
}
FOREIGN = {
    "host": [(b"host", b"evil.example")],
    "origin": [(b"host", b"localhost"), (b"origin", b"http://evil.example")],
    "frame": [(b"host", b"localhost"), (b"sec-fetch-site", b"cross-site")],
}
"""The headers of a browser for a page of another origin: one whose name was made to resolve to this
server, and two of the others.
"""


class Gate:
    """SGLang's check of keys in front of an application that notes who came through."""

    def __init__(self, app: Any, api_key: str | None, admin_api_key: str | None) -> None:
        from sglang.srt.utils.auth import add_api_key_middleware

        self._app = app
        self._let_in = False
        self._check: Any = self._inside
        add_api_key_middleware(self, api_key=api_key, admin_api_key=admin_api_key)

    def add_middleware(self, kind: Any, **options: Any) -> None:
        known = {"fastapi_app": self._app} if "fastapi_app" in options else {}
        self._check = kind(self._check, **{**options, **known})

    async def _inside(self, scope: Any, receive: Any, send: Any) -> None:
        self._let_in = True

    async def lets_in(self, path: str, method: str, headers: list[tuple[bytes, bytes]]) -> bool:
        self._let_in = False
        await self._check(_scope(path, method, headers), _nothing, _nothing)
        return self._let_in


async def _nothing(*_: Any) -> None:
    return None


def _scope(path: str, method: str, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    return {
        "type": "http",
        "method": method,
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "server": ("127.0.0.1", 80),
        "scheme": "http",
    }


async def foreign(app: Any) -> list[tuple[str, str, str, str, int, list[str]]]:
    """(method, path, key, what is foreign, status, names of CORS headers) of the answers of the
    whole application, with an admin key, at and below /hybrid_cache, and at a path there that no
    route has.
    """
    from sglang.srt.utils.auth import add_api_key_middleware

    from sglang_hybrid.serving import routes as guard

    guard._bound_to = lambda: "127.0.0.1"
    add_api_key_middleware(app, api_key=None, admin_api_key=ADMIN)
    below = {(method, path) for path, method, *_ in routes(app) if path.startswith(guard.OURS)}
    below |= {("GET", guard.OURS), ("GET", guard.OURS + "/of/a/later/router")}
    below |= {("OPTIONS", path) for _, path in below}
    found = []
    for (method, path), key, what in itertools.product(sorted(below), SENT, FOREIGN):
        asks = [(b"access-control-request-method", b"GET")] if method == "OPTIONS" else []
        asked = _scope(re.sub(r"{.*?}", "1", path), method, [*SENT[key], *FOREIGN[what], *asks])
        told: list[Any] = []

        async def send(message: Any, told: list[Any] = told) -> None:
            told.append(message)

        await app(asked, _nothing, send)
        names = [name.decode() for name, _ in told[0]["headers"]]
        cors = [name for name in names if name.startswith("access-control")]
        found.append((method, path, key, what, told[0]["status"], cors))
    return found


def is_sglangs(path: str, endpoint: Any) -> bool:
    """True if the released file of a route's function names its path."""
    file = Path(inspect.unwrap(endpoint).__code__.co_filename.removesuffix(patching.NOTE))
    return "sglang_hybrid" not in endpoint.__module__ and f'"{path}"' in file.read_text()


def routes(app: Any) -> Iterator[tuple[str, str, str | None, bool]]:
    from sglang_hybrid.serving.routes import all_routes

    for route in all_routes(app.router.routes):
        if not hasattr(route, "path"):
            continue
        for method in sorted(getattr(route, "methods", None) or ("WEBSOCKET",)):
            level = getattr(getattr(route, "endpoint", None), "_auth_level", None)
            known = not hasattr(route, "endpoint") or is_sglangs(route.path, route.endpoint)
            yield route.path, method, None if level is None else level.value, known


async def rows() -> list[tuple[Any, ...]]:
    """(path, method, level, whether SGLang by itself has it, {setup: {key: let in}}) of each."""
    from sglang.srt.entrypoints.http_server import app

    gates = {name: Gate(app, *keys) for name, keys in SETUPS.items()}
    found = []
    for path, method, level, known in routes(app):
        lets_in: dict[str, dict[str, bool]] = {name: {} for name in SETUPS}
        for setup, (name, headers) in itertools.product(SETUPS, SENT.items()):
            lets_in[setup][name] = await gates[setup].lets_in(path, method, headers)
        found.append((path, method, level, known, lets_in))
    return found
