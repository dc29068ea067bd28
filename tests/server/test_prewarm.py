"""Prompts that are computed before they are asked for: nothing is generated, all is kept."""

from __future__ import annotations

from typing import Any

import pytest
import requests

from tests.server.client import flush

RULES = " ".join(f"Rule {n} is kept by keeper {n * 7 % 31}." for n in range(20))
CHAT = {"model": "default", "messages": [{"role": "user", "content": RULES}]}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", CHAT, "max_tokens"),
        ("/v1/chat/completions", CHAT, "max_completion_tokens"),
        ("/v1/messages", CHAT, "max_tokens"),
        ("/v1/completions", {"model": "default", "prompt": RULES}, "max_tokens"),
    ],
)
def test_no_tokens_are_generated_and_the_prompt_is_kept(
    url: str, path: str, body: dict[str, Any], field: str
) -> None:
    flush(url)
    first = requests.post(url + path, json={**body, field: 0}, timeout=60)
    assert first.status_code == 200, first.text
    usage = first.json()["usage"]
    assert usage.get("output_tokens", usage.get("completion_tokens")) == 0
    second = requests.post(url + path, json={**body, field: 1}, timeout=60).json()["usage"]
    if path == "/v1/messages":
        assert second["input_tokens"] == 1
    else:
        details = second["prompt_tokens_details"]
        assert details["cached_tokens"] == second["prompt_tokens"] - 1
