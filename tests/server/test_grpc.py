"""Requests over gRPC (`--grpc-port`): they hit, answer and are kept apart as those over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import requests

from sglang_hybrid.serving.server_process import free_port
from tests.server.client import Serve, flush, hybrid_cache, random_prompt, said

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SERVICE = "/sglang.runtime.v1.SglangService/"
BODY, HEADERS, KEY, VALUE = 1, 2, 1, 2
"""Numbers of fields: of SGLang's OpenAiRequest and of an entry of its map of headers."""


def field(number: int, content: bytes) -> bytes:
    """A field of a protocol buffers message that is a string of bytes."""
    size, left = b"", len(content)
    while left > 127:
        size, left = size + bytes([left & 127 | 128]), left >> 7
    return bytes([number << 3 | 2]) + size + bytes([left]) + content


def call(channel: grpc.Channel, what: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """The answer to one of OpenAI's requests, as JSON. headers: with _ for -."""
    message = field(BODY, json.dumps({"model": "default", "temperature": 0, **body}).encode())
    for name, value in headers.items():
        entry = field(KEY, name.replace("_", "-").encode()) + field(VALUE, value.encode())
        message += field(HEADERS, entry)
    send: Callable[..., bytes] = channel.unary_unary(SERVICE + what)
    response = send(message, timeout=60).decode(errors="replace")
    answer: dict[str, Any] = json.JSONDecoder().raw_decode(response[response.index("{") :])[0]
    assert answer["object"] != "error", answer
    return answer


def test_hits_answers_and_tenants_are_those_of_http(serve: Serve) -> None:
    port = free_port()
    flags = ("--grpc-port", str(port), "--enable-cache-report")
    with serve(*flags) as server, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        flush(server.url)
        prompt = random_prompt(700, seed=1)
        siblings = [prompt[:500] + random_prompt(20, seed=number) for number in (2, 3)]
        prompts = [prompt, prompt, prompt + random_prompt(5, seed=4), *siblings]
        answers = [call(channel, "Complete", {"prompt": each}) for each in prompts]
        assert [hit(each) for each in answers] == [0, 699, 699, 0, 500]
        for each, answer in zip(prompts, answers, strict=True):
            flush(server.url)
            body = {"model": "default", "temperature": 0, "prompt": each}
            cold = requests.post(server.url + "/v1/completions", json=body, timeout=60).json()
            assert text(cold) == text(answer) and hit(cold) == 0
        said_before = {"role": "user", "content": "say it again " * 40}
        messages = {"messages": [said_before], "max_tokens": 8}
        first, again = (call(channel, "ChatComplete", messages) for _ in range(2))
        assert hit(first) == 0 and hit(again) == again["usage"]["prompt_tokens"] - 1
        theirs = [
            hit(call(channel, "ChatComplete", messages, X_Hybrid_Tenant=name)) for name in "aba"
        ]
        assert theirs[:2] == [0, 0] and theirs[2] == hit(again)
        assert hybrid_cache(server.url)["requests"] and said(server)


def hit(answer: dict[str, Any]) -> int:
    details = answer["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens", 0))


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])
