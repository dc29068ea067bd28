"""A schema is found, checked and deleted for the tenant that a request names, wherever it does."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from transformers import PreTrainedTokenizerFast

from sglang_hybrid.extensions.schemas.declared import registry as registry_module
from sglang_hybrid.extensions.schemas.declared.registry import NoSchema, Registry
from sglang_hybrid.extensions.schemas.declared.tokens import PromptTokenizer
from sglang_hybrid.extensions.schemas.endpoints import route
from sglang_hybrid.serving.requests.long_requests import in_thread

PML = "<schema name='one'><module name='m'>Text.</module></schema>"
SAYS: list[dict[str, Any]] = [
    {"json": {"extra_key": "a"}},
    {"params": {"extra_key": "a"}},
    {"headers": {"X-Hybrid-Tenant": "a"}},
]


@pytest.fixture
def registry(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Registry]:
    kept = Registry(PromptTokenizer(tokenizer))

    async def get_internal_state() -> list[dict[str, Any]]:
        return [{}]

    async def residency(*_: Any) -> list[Any]:
        return []

    monkeypatch.setattr(route, "_registry", lambda: kept)
    monkeypatch.setattr(route, "residency", residency)
    manager = SimpleNamespace(get_internal_state=get_internal_state)
    monkeypatch.setattr(route, "_manager", lambda: manager)
    for own in (("a", None), None):
        kept.register(own, PML)
    yield kept


@pytest.fixture
def client(registry: Registry) -> TestClient:
    app = FastAPI()
    app.include_router(route.router)
    return TestClient(app)


@pytest.mark.parametrize("says", SAYS, ids=["body", "query", "header"])
@pytest.mark.parametrize(
    ("method", "path"), [("DELETE", "/one"), ("POST", "/one/lint"), ("GET", "/one"), ("GET", "")]
)
def test_a_request_reaches_its_own_schema(
    registry: Registry, client: TestClient, method: str, path: str, says: dict[str, Any]
) -> None:
    registry.register(None, PML.replace("Text", "Nobody's"))
    own = registry.get(("a", None), "one")
    told = client.request(method, "/v1/prompt_schemas" + path, **says)
    assert told.status_code == 200, told.text
    assert registry.get(None, "one").schema.name == "one"
    if method == "DELETE":
        with pytest.raises(NoSchema):
            registry.get(("a", None), "one")
        return
    assert registry.get(("a", None), "one") is own
    registry.delete(("a", None), "one")
    foreign = client.request(method, "/v1/prompt_schemas" + path, **says)
    assert foreign.json() == [] if path == "" else foreign.status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "name"), [("POST", "/one/lint", "lint"), ("GET", "/one", "described")]
)
def test_no_prompt_waits_for_what_is_asked_about_schemas(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, method: str, path: str, name: str
) -> None:
    begun, goes_on = threading.Semaphore(0), threading.Event()

    def slow(*args: Any, **more: Any) -> list[Any]:
        begun.release()
        goes_on.wait()
        return []

    monkeypatch.setattr(route if name == "lint" else registry_module, name, slow)
    asked = (method, "/v1/prompt_schemas" + path)
    with ThreadPoolExecutor() as clients:
        answers = [clients.submit(client.request, *asked) for _ in range(os.cpu_count() or 1)]
        begun.acquire()
        try:
            asyncio.run(asyncio.wait_for(in_thread(int), 20))
        finally:
            goes_on.set()
    assert {answer.result().status_code for answer in answers} == {200}


def test_two_tenants_or_a_body_that_names_none_are_refused(client: TestClient) -> None:
    asked = "/v1/prompt_schemas/one"
    two = client.request("DELETE", asked, json={"extra_key": "a"}, params={"extra_key": "b"})
    assert (two.status_code, "two values" in two.text) == (400, True)
    for body in (b"{", b'{"extra_key": 3}', b'"a"'):
        wrong = client.request("DELETE", asked, content=body)
        assert (wrong.status_code, "A whole one" in wrong.text) == (400, True)
    large = client.request("DELETE", asked, json={"extra_key": "a" * route.MOST_OF_WHOSE})
    assert (large.status_code, "bytes" in large.text) == (400, True)
