"""Below /hybrid_cache/ a server answers by its own names only, and no page of another origin."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from sglang_hybrid.serving import routes
from sglang_hybrid.serving.routes import SameOrigin, current_route

EXPLAIN = "/hybrid_cache/explain"
OWN = "127.0.0.1:30000"


def status(
    path: str = EXPLAIN, *headers: tuple[str, str], method: str = "POST", **more: Any
) -> int | str:
    """The body of the answer to a request, "let in" where it gets to the application."""
    told: list[int | str] = []

    async def app(*_: Any) -> None:
        told.append("let in")

    async def send(message: Any) -> None:
        told.extend([message["status"]] if "status" in message else [])

    sent = [(name.encode(), value.encode()) for name, value in headers]
    scope = {"type": "http", "method": method, "path": path, "headers": sent, **more}
    asyncio.run(SameOrigin(app)(scope, None, send))  # type: ignore[arg-type]
    return told[0]


@pytest.fixture(autouse=True)
def more_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_bound_to", lambda: "127.0.0.1")
    monkeypatch.setattr(routes, "_more_hosts", lambda: frozenset({"cache.example.org"}))


@pytest.mark.parametrize(
    ("bound", "own", "foreign"),
    [
        ("127.0.0.1", ["127.0.0.1", "127.0.0.2:1", "localhost:30000", "LOCALHOST", "[::1]:5"], []),
        ("127.0.0.1", [socket.gethostname(), "cache.example.org:443"], ["10.0.0.5", "[fd00::5]"]),
        ("10.0.0.5", ["10.0.0.5:80", "localhost"], ["10.0.0.6", "10.0.0.5.evil.example"]),
        ("fd00::5", ["[fd00::5]:80", "[fd00:0::5]"], ["[fd00::6]", "fd00::5"]),
        ("gpu1", ["gpu1:30000"], ["gpu2"]),
        ("0.0.0.0", ["10.0.0.6:80", "[fd00::6]"], ["gpu1.example"]),
        ("::", ["10.0.0.6:80", "[fd00::6]"], ["gpu1.example"]),
    ],
)
def test_a_host_is_a_name_of_this_server(
    bound: str, own: list[str], foreign: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_bound_to", lambda: bound)
    assert [status(EXPLAIN, ("host", host)) for host in own] == ["let in"] * len(own)
    never = ["evil.example", "evil.example:30000", "", "localhost.evil.example", "a@localhost"]
    assert {status(EXPLAIN, ("host", host)) for host in [*foreign, *never]} == {403}


def test_a_request_has_one_host_at_least_and_no_foreign_one_beside_it() -> None:
    assert status(EXPLAIN) == 403
    assert status(EXPLAIN, ("host", OWN), ("host", "evil.example")) == 403


@pytest.mark.parametrize("path", ["/hybrid_cache", "/hybrid_cache/", "/hybrid_cache/later/route"])
def test_whatever_is_below_is_guarded(path: str) -> None:
    assert status(path, ("host", "evil.example")) == 403
    assert status(path, ("host", "evil.example"), type="websocket") == 403
    assert status("/v1" + path, ("host", "evil.example"), root_path="/v1") == 403
    assert status(path, ("host", "evil.example"), root_path="/hybrid") == 403
    assert status(path, ("host", OWN)) == "let in"


@pytest.mark.parametrize("path", ["/generate", "/hybrid_cached", "/v1/prompt_schemas_of"])
def test_other_routes_are_as_sglang_has_them(path: str) -> None:
    foreign = [("host", "a.example"), ("origin", "http://b.example")]
    assert status(path, *foreign) == "let in"
    assert status(EXPLAIN, *foreign, type="lifespan") == "let in"


@pytest.mark.parametrize(
    ("name", "value", "is_own"),
    [
        ("origin", "http://127.0.0.1:30000", True),
        ("origin", "https://127.0.0.1:30000", True),
        ("origin", "http://127.0.0.1:8080", False),
        ("origin", "http://localhost:30000", False),
        ("origin", "http://evil.example", False),
        ("origin", "null", False),
        ("origin", "http://[", False),
        ("sec-fetch-site", "same-origin", True),
        ("sec-fetch-site", "none", True),
        ("sec-fetch-site", "same-site", False),
        ("sec-fetch-site", "cross-site", False),
    ],
)
def test_pages_of_other_origins_get_nothing(name: str, value: str, is_own: bool) -> None:
    """Nor does what a browser asks before (OPTIONS)."""
    for method in ("GET", "POST", "OPTIONS"):
        for path in (EXPLAIN, "/v1/prompt_schemas", "/v1/prompt_schemas/name"):
            answer = status(path, ("host", OWN), (name, value), method=method)
            assert answer == ("let in" if is_own else 403)


def test_schemas_are_asked_for_by_any_name_of_the_server() -> None:
    """Clients that are no browsers send no origin, and pages of the server itself send its own."""
    assert status("/v1/prompt_schemas", ("host", "gpu.example")) == "let in"
    assert status("/v1/prompt_schemas") == "let in"
    own = ("origin", "https://gpu.example")
    assert status("/v1/prompt_schemas", ("host", "gpu.example"), own) == "let in"
    assert status("/v1/prompt_schemas", own) == 403


def test_the_route_that_was_asked_is_what_the_application_calls_it() -> None:
    """The path that the client wrote does not count; outside of the application there is none."""
    app = FastAPI()
    app.add_middleware(SameOrigin)

    @app.get("/of/{name}")
    async def of(name: str) -> str:
        return await asyncio.create_task(asyncio.to_thread(current_route))

    assert TestClient(app).get("/of/secret?route=forged").json() == "/of/{name}"
    assert current_route() == ""
