"""Bodies that are too long or nested too deep are refused before they are read, on every route."""

import http.client
import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import requests

from sglang_hybrid.extensions.cpu.models.lexicon import common_words
from sglang_hybrid.extensions.guard.body_bounds import IN_MEMORY, UNBOUNDED
from tests.server.client import Serve, ask, greedy, random_prompt, until

DEEP = "[" * 2_000
FORM = "/v1/audio/transcriptions"
"""A route whose body is a form; it does not read any other."""


def routes(url: str) -> list[str]:
    """Routes that take JSON, by the server's own description."""
    paths: dict[str, Any] = requests.get(url + "/openapi.json", timeout=60).json()["paths"]
    return [
        path
        for path, operations in paths.items()
        if "requestBody" in operations.get("post", {}) and path not in {*UNBOUNDED, FORM}
    ]


def post(
    url: str,
    path: str,
    body: str,
    announced: int | None = None,
    kind: str = "application/json",
) -> tuple[int, str]:
    """Status and text. announced: bytes that the request says it has; they are not sent."""
    server = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    head = {"Content-Type": kind}
    if announced is not None:
        head["Content-Length"] = str(announced)
    server.request("POST", path, body, head)
    answer = server.getresponse()
    return answer.status, answer.read().decode()


def everywhere(url: str, body: str, announced: int | None = None) -> list[tuple[str, int, str]]:
    """Path, status and text of every route, which are asked at the same time."""

    def answer(path: str) -> tuple[str, int, str]:
        return path, *post(url, path, body, announced)

    with ThreadPoolExecutor(16) as threads:
        return list(threads.map(answer, routes(url)))


def test_a_body_that_is_nested_too_deep_is_status_400_on_every_route(url: str) -> None:
    found = routes(url)
    assert {"/hybrid_cache/explain", "/generate", "/v1/messages", "/v1/prompt_schemas"} <= {*found}
    for path, status, text in everywhere(url, f'{{"input_ids": [1], "x": {DEEP}}}'):
        assert (status, "nested 2,001 deep" in text) == (400, True), (path, status, text)


def test_a_body_that_is_too_long_is_status_413_on_every_route(url: str) -> None:
    for path, status, text in everywhere(url, "{", announced=1 << 30):
        assert (status, "1,073,741,824 bytes or more" in text) == (413, True), (path, status, text)


def test_a_form_that_is_too_long_is_status_413(url: str) -> None:
    status, text = post(url, FORM, "--a", 1 << 30, "multipart/form-data; boundary=a")
    assert (status, "1,073,741,824 bytes or more" in text) == (413, True), text


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        inner = {"x": inner}
    return {"type": "object", "properties": inner}


def look(**fields: Any) -> dict[str, Any]:
    """A chat of one message."""
    return {"model": "default", "messages": [{"role": "user", "content": "Look."}], **fields}


@pytest.mark.parametrize(("depth", "status"), [(50, 200), (900, 400)])
def test_tools_that_are_nested_deep(url: str, depth: int, status: int) -> None:
    tool = {"name": "look", "input_schema": nested(depth)}
    body = look(max_tokens=1, tools=[tool], diagnostics={"previous_message_id": None})
    answer = requests.post(url + "/v1/messages", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("depth", "status"), [(50, 200), (900, 400)])
def test_arguments_of_a_call_that_are_nested_deep(url: str, depth: int, status: int) -> None:
    body = look(max_tokens=1)
    function = {"name": "look", "arguments": json.dumps(nested(depth))}
    call = {"id": "a", "type": "function", "function": function}
    body["messages"].append({"role": "assistant", "content": "", "tool_calls": [call]})
    body["messages"].append({"role": "tool", "tool_call_id": "a", "content": "Nothing."})
    answer = requests.post(url + "/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": ""}),
        ("/generate", {"text": ["a", ""]}),
        ("/v1/completions", {"model": "default", "prompt": ""}),
        (
            "/v1/chat/completions",
            {"model": "default", "messages": [{"role": "user", "content": ""}]},
        ),
        ("/v1/responses", {"model": "default", "input": ""}),
        (
            "/v1/messages",
            {"model": "default", "max_tokens": 1, "messages": [{"role": "user", "content": ""}]},
        ),
        (
            "/v1/messages/count_tokens",
            {"model": "default", "messages": [{"role": "user", "content": ""}]},
        ),
        ("/tokenize", {"model": "default", "prompt": ""}),
        ("/v1/tokenize", {"model": "default", "messages": [{"role": "user", "content": ""}]}),
        ("/api/generate", {"model": "default", "prompt": "", "stream": False}),
        ("/api/chat", {"model": "default", "messages": [{"role": "user", "content": ""}]}),
    ],
)
def test_a_text_that_cannot_fit_is_not_tokenized(url: str, path: str, body: dict[str, Any]) -> None:
    text = json.dumps(body).replace('""', json.dumps("the cache keeps " * 100_000))
    status, said = post(url, path, text)
    assert status == 400, said
    assert "no text of more than 1,048,576 bytes fits" in said


def test_a_long_text_that_fits_is_answered_like_a_short_one(url: str) -> None:
    words = random.Random(5).choices([*common_words()], k=1_800)
    text = (" " * 33).join(words)  # 32 of the blanks are one token: it is long, but soon computed
    assert len(text) > 64 << 10
    asked = {"model": "default", "prompt": text}
    ids = requests.post(url + "/tokenize", json=asked, timeout=60).json()["tokens"]
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    asked = {"text": text, "sampling_params": sampling}
    answer = requests.post(url + "/generate", json=asked, timeout=300).json()
    assert answer["meta_info"]["prompt_tokens"] == len(ids)
    assert answer["output_ids"] == ask(url, ids, 8)["output_ids"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bodies_that_stall_end_and_take_bounded_memory(serve: Serve) -> None:
    """No body is read of clients without the key. Others are answered meanwhile."""
    size, count = 12 << 20, 40
    with serve("--api-key", "k") as server:
        assert server.process is not None
        process = psutil.Process(server.process.pid)
        before = process.memory_info().rss

        def begin(key: str, part: bytes) -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            head = f"POST /generate HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n"
            connection.sendall(f"{head}Content-Length: {size + 1}\r\n\r\n".encode())
            with suppress(ConnectionError):  # an answer may have closed it
                connection.sendall(part)
            return connection

        with begin("another", b"{") as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 401")
        stalled = [begin("k", bytes(size)) for _ in range(count)]
        assert process.memory_info().rss - before < IN_MEMORY + count * (4 << 20)
        key = {"Authorization": "Bearer k"}
        body = greedy(random_prompt(20, 1), 1)
        answer = requests.post(server.url + "/generate", json=body, headers=key, timeout=60)
        assert answer.ok
        for connection in stalled:
            with connection:
                assert connection.recv(100).startswith(b"HTTP/1.1 408")
        until(lambda: process.memory_info().rss - before < IN_MEMORY // 2)
