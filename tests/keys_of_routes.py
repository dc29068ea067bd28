"""Run by test_keys.py: which routes there are, and what lets a request in. Prints JSON.

python -m tests.keys_of_routes released    paths and methods of SGLang's own routes
python -m tests.keys_of_routes patched     [path, method, level, {setup: {key: let in}}] of each
                                           route with our patches
"""

import asyncio
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

from sglang_hybrid.hooks import patching

NEEDED_TO_IMPORT = "0001-"
"""Patches without which SGLang's HTTP server cannot be imported beside a CPU build of torch."""

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
}


def import_server(*, patched: bool) -> Any:
    """SGLang's HTTP server, with our patches or without."""
    if patched:
        patching.install()
    else:
        needed = {
            path: patch
            for path, patch in patching.load_patches().items()
            if all(name.startswith(NEEDED_TO_IMPORT) for name, _ in patch.diffs)
        }
        sys.meta_path.insert(0, patching.PatchFinder(needed))  # where it is, no other is put
    from sglang.srt.entrypoints.http_server import app

    return app


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

    def lets_in(self, path: str, method: str, headers: list[tuple[bytes, bytes]]) -> bool:
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "server": ("127.0.0.1", 80),
            "scheme": "http",
        }
        self._let_in = False
        asyncio.run(self._check(scope, _nothing, _nothing))
        return self._let_in


async def _nothing(*_: Any) -> None:
    return None


def routes(app: Any) -> Iterator[tuple[str, str, str | None]]:
    from sglang_hybrid.serving.routes import all_routes

    for route in all_routes(app.router.routes):
        if not hasattr(route, "path"):
            continue
        for method in sorted(getattr(route, "methods", None) or ("WEBSOCKET",)):
            level = getattr(getattr(route, "endpoint", None), "_auth_level", None)
            yield route.path, method, None if level is None else level.value


def main() -> None:
    patched = sys.argv[1] == "patched"
    app = import_server(patched=patched)
    if not patched:
        print(json.dumps([(path, method) for path, method, _ in routes(app)]))
        return
    gates = {name: Gate(app, *keys) for name, keys in SETUPS.items()}
    rows = []
    for path, method, level in routes(app):
        lets_in: dict[str, dict[str, bool]] = {name: {} for name in SETUPS}
        for setup, (name, headers) in itertools.product(SETUPS, SENT.items()):
            lets_in[setup][name] = gates[setup].lets_in(path, method, headers)
        rows.append((path, method, level, lets_in))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
