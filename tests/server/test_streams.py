"""The reports of a stream: one shape, and at its end what an answer in one piece says."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
import requests

from tests.server.client import flush, hybrid_cache, random_prompt

CHAT = {
    "model": "default",
    "messages": [{"role": "user", "content": "Who keeps the archive of the house?"}],
    "max_tokens": 4,
}
COMPLETION = {"model": "default", "prompt": "Who keeps the archive of the house?", "max_tokens": 4}
USAGE: Any = {"stream_options": {"include_usage": True}}


def events(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON events of a stream."""
    answer = requests.post(url + path, json=body | {"stream": True}, stream=True, timeout=60)
    answer.raise_for_status()
    lines = (line.removeprefix(b"data: ") for line in answer.iter_lines() if line[:5] == b"data:")
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def whole(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = requests.post(url + path, json=body, timeout=60)
    answer.raise_for_status()
    return dict(answer.json())


def test_every_event_has_one_report_and_the_last_one_is_complete(url: str) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 50, "ignore_eos": True}
    body = {"input_ids": random_prompt(100, seed=7_001), "sampling_params": sampling}
    stream = [event["meta_info"] for event in events(url, "/generate", body)]
    reports = [meta["hybrid_cache"] for meta in stream]
    tokens = [meta["completion_tokens"] for meta in stream]
    assert tokens == sorted(set(tokens)) and tokens[-1] == 50
    assert len(reports) > 1  # a client that reads slowly gets several tokens in one event
    assert all(isinstance(report, dict) for report in reports)
    kinds = [[one["kind"] for one in report["checkpoints"]] for report in reports]
    assert "prompt_end" in kinds[0] and "tail" not in kinds[0]
    assert "tail" in kinds[-1]
    flush(url)
    again = whole(url, "/generate", body)["meta_info"]["hybrid_cache"]
    places = [
        [one["position"] for one in report.pop("checkpoints")] for report in (reports[-1], again)
    ]
    assert places[0] == places[1]
    assert again == reports[-1]


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
)
def test_the_usage_of_an_openai_stream(url: str, path: str, body: dict[str, Any]) -> None:
    whole(url, path, body)
    usage = whole(url, path, body)["usage"]
    last = events(url, path, body | USAGE)[-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    known = last.keys() & usage.keys()
    assert {"prompt_tokens", "completion_tokens", "prompt_tokens_details"} <= known
    assert {name: last[name] for name in known} == {name: usage[name] for name in known}


def test_the_usage_of_an_anthropic_stream(url: str) -> None:
    whole(url, "/v1/messages", CHAT)
    usage = whole(url, "/v1/messages", CHAT)["usage"]
    assert usage["cache_read_input_tokens"] > 0
    seen = events(url, "/v1/messages", CHAT)
    first = next(event["message"]["usage"] for event in seen if event["type"] == "message_start")
    last = next(event["usage"] for event in seen if event["type"] == "message_delta")
    assert last == usage
    assert first == usage | {"output_tokens": 0}


def test_the_official_client_gets_a_whole_chat_and_the_same_in_pieces(url: str) -> None:
    """Each says by its id why it was not hit further, and in its `meta_info` if asked."""
    client = openai.OpenAI(base_url=url + "/v1", api_key="none")
    chat: Any = CHAT | {"max_tokens": 8, "temperature": 0}
    told: Any = {"extra_body": {"return_meta_info": True}}
    first, again = (client.chat.completions.create(**chat, **told) for _ in range(2))
    reports = [answer.choices[0].meta_info["hybrid_cache"] for answer in (first, again)]
    assert [report["missed"] for report in reports] == ["not_stored", "nothing"]
    for answer, report in zip((first, again), reports, strict=True):
        assert report["hit_tokens"] == answer.usage.prompt_tokens_details.cached_tokens
        found = whole(url, "/hybrid_cache/explain", {"request_id": answer.id})
        assert found["hit"] == report["hit_tokens"]
    chunks = list(client.chat.completions.create(**chat, **USAGE, stream=True))
    texts = [choice.delta.content for chunk in chunks for choice in chunk.choices]
    assert len(list(filter(None, texts))) > 1
    assert "".join(filter(None, texts)) == again.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens_details == again.usage.prompt_tokens_details


def test_responses_take_the_name_that_chat_takes(url: str) -> None:
    body = {"model": "default", "input": "Who?", "max_output_tokens": 2}
    assert whole(url, "/v1/responses", body)["status"] in ("completed", "incomplete")
    unknown = requests.post(url + "/v1/responses", json=body | {"model": "other"}, timeout=60)
    assert unknown.status_code == 404


def test_health_probes_are_not_counted(url: str) -> None:
    before = hybrid_cache(url)["requests"]
    for path in ("/health", "/health_generate"):
        requests.get(url + path, timeout=60).raise_for_status()
    assert hybrid_cache(url)["requests"] == before
