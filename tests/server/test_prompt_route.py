"""`POST /hybrid_cache/prompt/ROUTE`: what a request would send, which is not sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import requests

from sglang_hybrid.explain.prompt_route import PREFIX, ROUTES
from sglang_hybrid.extensions.cpu.models.tokenizer import build_tokenizer
from sglang_hybrid.extensions.router import Replicas
from tests.server.client import greedy, random_prompt, settle, until
from tests.tenant_routes import PROMPTS

TEXT = "A sentence that is longer than a few tokens, so that it can be resumed. " * 8


@pytest.fixture(scope="module")
def replicas(default_server: str) -> Iterator[Replicas]:
    with closing(Replicas([default_server])) as it:
        until(lambda: default_server in it.followers)
        yield it


def post(url: str, path: str, body: Any, **headers: str) -> requests.Response:
    return requests.post(url + path, json=body, headers=headers, timeout=60)


def held(replicas: Replicas, url: str, asked: dict[str, Any]) -> int:
    """The number of tokens of a prompt that the server holds."""
    settle(replicas, url)
    (found,) = replicas.resume([*asked["input_ids"], 1], asked["tenant"])
    return found.position


@pytest.mark.parametrize("route", sorted(ROUTES))
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_told_is_what_is_sent(
    replicas: Replicas, url: str, route: str, stream: bool
) -> None:
    """The server holds nothing of the prompt after it was asked for, and all after it was sent,
    under the tenant's name.
    """
    body = PROMPTS[route](TEXT) | {"extra_key": route, "cache_salt": "salt", "stream": stream}
    asked = post(url, PREFIX + route, body)
    assert asked.status_code == 200, asked.text
    assert len(asked.json()["input_ids"]) > 100
    assert held(replicas, url, asked.json()) == 0
    sent = post(url, route, body)
    assert sent.status_code == 200, sent.text
    assert held(replicas, url, asked.json()) >= len(asked.json()["input_ids"]) - 1
    assert held(replicas, url, asked.json() | {"tenant": ""}) == 0


@pytest.mark.parametrize("tenant", [{}, {"extra_key": "one"}])
def test_a_long_chat_that_goes_on_has_the_tokens_of_its_text(
    url: str, tenant: dict[str, str]
) -> None:
    """They are put together from those of its messages (serving/requests/encoded_pieces.py)."""
    tokenizer = build_tokenizer()
    messages, text = [], ""
    for turn in range(4):
        said = f"{turn}: {TEXT * 4}"
        messages.append({"role": "user", "content": said})
        text += f"<|im_start|>user\n{said}<|im_end|>\n"
        prompt = text + "<|im_start|>assistant\n"
        ids = tokenizer.encode(prompt).ids
        chat = {"model": "default", "messages": messages, **tenant}
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/generate", {"text": prompt, **tenant}),
        ):
            assert post(url, PREFIX + path, body).json()["input_ids"] == ids


def test_of_a_batch_and_of_samples_the_first_prompt_is_told(url: str) -> None:
    first, second = random_prompt(30, 1), random_prompt(20, 2)
    few = {"temperature": 0.5, "max_new_tokens": 2}
    bodies = (
        {"input_ids": [first, second], "sampling_params": few},
        {"input_ids": first, "sampling_params": few | {"n": 3}},
    )
    for body in bodies:
        told = post(url, PREFIX + "/generate", body).json()
        assert told == {"input_ids": first, "tenant": ""}


def test_a_tenant_in_a_header_has_the_name_that_it_has_in_a_body(url: str) -> None:
    body = {"input_ids": [5, 6, 7]}
    path = PREFIX + "/generate"
    header = post(url, path, body, **{"X-Hybrid-Tenant": "one"}).json()["tenant"]
    assert header == post(url, path, body | {"extra_key": "one"}).json()["tenant"] != ""


def test_log_probabilities_of_a_prompt_are_not_hit(replicas: Replicas, url: str) -> None:
    """Nor does a router expect it: else it would think that it knows the server wrongly."""
    ids = random_prompt(100, 9)
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
    assert post(url, "/generate", body).ok
    settle(replicas, url)
    for start, most, hit in ((-1, None, 99), (0, 0, 0), (40, 40, 0), (100, 100, 99)):
        wanted = body | {"return_logprob": True, "logprob_start_len": start}
        asked = post(url, PREFIX + "/generate", wanted).json()
        assert asked.get("reusable") == most
        choice = replicas.choose(asked["input_ids"], asked["tenant"], asked.get("reusable"))
        replicas.on_answer(choice)
        answer = post(url, "/generate", wanted).json()
        assert answer["meta_info"]["cached_tokens"] == choice.position == hit


def test_an_id_may_be_asked_for_and_then_be_sent(url: str) -> None:
    body = {"input_ids": [5, 6, 7], "rid": "the same", "sampling_params": {"max_new_tokens": 1}}
    for path in (PREFIX + "/generate", PREFIX + "/generate", "/generate"):
        assert post(url, path, body).status_code == 200


def test_a_prewarm_is_told_while_others_run(url: str) -> None:
    """It would be sent when they have ended."""
    action = {"action_id": "a", "action_version": "1", "action_type": "hybrid.prewarm"}
    hints = {"protocol_version": "1", "message_id": "m", "actions": [action]}
    running = greedy(random_prompt(10, 3), 4_000, stream=True)
    with requests.post(url + "/generate", json=running, stream=True, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        asked = {"input_ids": random_prompt(100, 4), "kv_hints": hints}
        answer = requests.post(url + PREFIX + "/generate", json=asked, timeout=10)
        assert answer.json()["input_ids"] == asked["input_ids"]
        assert b"[DONE]" not in next(line for line in lines if line)


def test_modules_that_are_asked_for_are_not_counted(url: str) -> None:
    """And the value of a parameter is new when it is sent."""
    module = '<module name="m">In <parameter name="days" length="5"/> days.</module>'
    pml = f'<schema name="asked"><system>Plan.{module}</system></schema>'
    assert post(url, "/v1/prompt_schemas", {"pml": pml}).ok
    imports = '<prompt schema="asked"><m days="3"/></prompt>'
    chat = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 1}
    generate = {"pml": imports, "text": " Go.", "sampling_params": {"max_new_tokens": 1}}
    sent: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"model": "default", "prompt_schema": imports, **chat}),
        ("/generate", generate),
    ]
    for route, body in sent:
        assert post(url, PREFIX + route, body).ok
    (told,) = requests.get(url + "/v1/prompt_schemas", timeout=60).json()
    assert (told["name"], told["requests"]) == ("asked", 0)
    for route, body in sent:
        assert post(url, route, body).ok
    told = requests.get(url + "/v1/prompt_schemas/asked", timeout=60).json()
    assert told["requests"] == told["parts"][0]["parts"][1]["imports"] == 2
    requests.delete(url + "/v1/prompt_schemas/asked", timeout=60)


@pytest.mark.parametrize(
    "body", [{"input_ids": []}, {"input_ids": [-1]}, {"text": 5}, {}, {"kv_hints": 3, "text": "a"}]
)
def test_what_the_route_refuses_is_refused_in_its_words(url: str, body: dict[str, Any]) -> None:
    asked, sent = (post(url, path, body) for path in (PREFIX + "/generate", "/generate"))
    assert (asked.status_code, asked.json()) == (sent.status_code, sent.json())
    assert asked.status_code in (400, 422)


@pytest.mark.parametrize("route", ["/flush_cache", "/unknown", "/hybrid_cache/prompt/generate"])
def test_routes_without_a_prompt_to_be_answered_are_not_called(url: str, route: str) -> None:
    answer = post(url, PREFIX + route, {})
    assert answer.status_code == 404
    assert "/v1/chat/completions" in answer.json()["error"]["message"]
