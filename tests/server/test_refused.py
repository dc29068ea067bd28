"""Refusals of a server: one sentence, status 400, and nothing of it reaches a scheduler."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import TOLERANCE, ask, hybrid_cache, random_prompt, until, width_of

VOCABULARY = 32_768
LARGEST = f"from 0 to {VOCABULARY - 1}"
IDS = [5, 6, 7]
SAMPLING = {"max_new_tokens": 2, "temperature": 0}
CHAT = {"model": "default", "max_tokens": 2, "messages": [{"role": "user", "content": "Who?"}]}


def refused(url: str, path: str, body: Any, method: str = "post") -> str:
    """The server's message, with status 400."""
    response = requests.request(method, url + path, json=body, timeout=60)
    assert response.status_code == 400, (path, body, response.status_code, response.text[:300])
    said = response.json()
    error = said.get("error", said)
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


@pytest.fixture(scope="module", autouse=True)
def goes_on(default_server: str) -> Iterator[None]:
    """The server answers at the end what it answered at first."""
    prompt = random_prompt(40, seed=1)
    first = ask(default_server, prompt)["output_ids"]
    yield
    assert ask(default_server, prompt)["output_ids"] == first


GENERATE: dict[str, tuple[dict[str, Any], str]] = {
    "below the vocabulary": ({"input_ids": [5, -1]}, f"input_ids[1] is -1; a token id.*{LARGEST}"),
    "one of a batch": ({"input_ids": [IDS, [VOCABULARY]]}, f"is {VOCABULARY};.*{LARGEST}"),
    "no text": ({"text": ""}, "text is ''; a prompt must have one token at least"),
    "no text in a batch": ({"text": ["a", ""]}, "text is ''; a prompt must have one token"),
    "logprobs from before": (
        {"input_ids": IDS, "return_logprob": True, "logprob_start_len": -5},
        "logprob_start_len is -5; it must be from -1 to 3",
    ),
    "logprobs from behind": (
        {"input_ids": [IDS, IDS], "return_logprob": True, "logprob_start_len": [0, 9]},
        "logprob_start_len is 9; it must be from -1 to 3",
    ),
    "too many without asking for them": (
        {"input_ids": IDS, "top_logprobs_num": 1_000_000},
        "top_logprobs_num is 1000000; it must be from 0 to 1,000",
    ),
    "too short a list": (
        {"input_ids": [IDS, IDS], "sampling_params": [SAMPLING]},
        "do not fit together",
    ),
    "top_k of 41 bits": (
        {"input_ids": IDS, "sampling_params": {"top_k": 10**12}},
        "sampling_params.top_k is 1000000000000; it must be from -1 to 2,147,483,647",
    ),
    "the name of a health check": (
        {"input_ids": IDS, "rid": "HEALTH_CHECK_mine"},
        "rid is 'HEALTH_CHECK_mine'; names that begin with HEALTH_CHECK are the server's own",
    ),
    "a list of names for one prompt": (
        {"input_ids": IDS, "rid": ["a"]},
        "rid is ..a..; a request of one prompt has one",
    ),
    "a clock of its own": (
        {"input_ids": IDS, "received_time": 1e300},
        "received_time is 1e.300; the server sets it itself",
    ),
    "a session that has no such field": (
        {"input_ids": IDS, "session_params": {"id": "a", "offset": "b"}},
        "session_params.offset is 'b'; it must be int or null",
    ),
}


@pytest.mark.parametrize("case", GENERATE)
def test_generate_alone_and_streaming(default_server: str, case: str) -> None:
    fields, said = GENERATE[case]
    before = hybrid_cache(default_server)["requests"]
    for stream in (False, True):
        body = {"sampling_params": SAMPLING, **fields, "stream": stream}
        assert_says(refused(default_server, "/generate", body), said)
    seen = hybrid_cache(default_server)["requests"]
    assert seen - before <= 2 * ("a" in fields.get("text", ())), "the other one of the batch"


SCORE = {
    "query": [400, VOCABULARY - 1],
    "items": [[403, VOCABULARY - 1]],
    "label_token_ids": [500, 501],
    "embed_override_token_id": VOCABULARY - 1,
}
"""A request whose prompts each have one token that an embedding can take the place of."""

OTHERS = [
    ("/v1/completions", {"prompt": [5, -1]}, f"input_ids[1] is -1;.*{LARGEST}"),
    ("/v1/completions", {"prompt": [IDS, [VOCABULARY]]}, f"is {VOCABULARY};.*{LARGEST}"),
    ("/v1/completions", {"prompt": ["a", ""]}, "text is ''; a prompt must have one token"),
    ("/v1/completions", {"prompt": ""}, "Prompt cannot be empty"),
    ("/v1/completions", {"prompt": "a", "logprobs": 10**6}, "is 1000000;.*from 0 to 1,000"),
    ("/v1/completions", {"prompt": "a", "n": 10**9}, "n is 1000000000;.*from 1 to 1,024"),
    ("/v1/completions", {"prompt": "a", "stop_regex": "("}, "is no regular expression"),
    ("/v1/chat/completions", CHAT | {"input_ids": [-1]}, f"input_ids[0] is -1;.*{LARGEST}"),
    (
        "/v1/chat/completions",
        CHAT | {"logprobs": True, "top_logprobs": 10**6},
        "top_logprobs_num is 1000000; it must be from 0 to 1,000",
    ),
    ("/v1/chat/completions", CHAT | {"top_k": 10**12}, "top_k is 1000000000000;.*from -1 to"),
    ("/v1/chat/completions", CHAT | {"n": 0}, "n is 0; it must be from 1 to 1,024"),
    ("/v1/messages", CHAT | {"top_k": 10**12}, "top_k is 1000000000000;.*from -1 to"),
    ("/api/chat", CHAT | {"options": {"top_k": 10**12}}, "top_k is 1000000000000;.*from -1 to"),
    (
        "/api/generate",
        {"model": "default", "prompt": "a", "options": {"top_k": 10**12}},
        "top_k is 1000000000000;.*from -1 to",
    ),
]


@pytest.mark.parametrize(("path", "fields", "said"), OTHERS)
def test_other_endpoints_alone_and_streaming(
    default_server: str, path: str, fields: dict[str, Any], said: str
) -> None:
    for stream in (False, True):
        body = {"model": "default", "max_tokens": 2, **fields, "stream": stream}
        assert_says(refused(default_server, path, body), said)


TEXT = {"text": "Who?", "sampling_params": SAMPLING}

TYPES = [
    ("/generate", TEXT | {"extra_key": 5}, "extra_key is 5; it should be a valid "),
    ("/generate", TEXT | {"kv_hints": "x"}, "kv_hints is 'x'; it should be a valid "),
    ("/v1/chat/completions", CHAT | {"extra_key": 5}, "extra_key is 5; it should be a valid "),
    (
        "/v1/completions",
        {"prompt": "a", "cache_salt": {}},
        "cache_salt is {}; it should be a valid",
    ),
    ("/v1/responses", {"input": "a", "extra_key": 5}, "extra_key is 5; it should be a valid "),
]


@pytest.mark.parametrize(("path", "body", "said"), TYPES)
def test_a_field_of_another_type(default_server: str, path: str, body: Any, said: str) -> None:
    sentence = refused(default_server, path, {"model": "default", **body})
    assert said in sentence
    assert "\n" not in sentence and "{'type'" not in sentence and "http_server" not in sentence


@pytest.mark.parametrize(
    "path",
    ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"],
)
def test_json_that_ends_early(default_server: str, path: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = requests.post(
        default_server + path, data='{"text": "a", ', headers=headers, timeout=60
    )
    assert answer.status_code == 400, answer.text
    assert ".py" not in answer.text and "File" not in answer.text
    assert "JSON" in answer.text and "validation error" not in answer.text


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/encode", {"input_ids": [-1]}, f"input_ids[0] is -1;.*{LARGEST}"),
        ("/encode", {"input_ids": []}, "do not fit together"),
        ("/encode", {"text": ""}, "text is ''; a prompt must have one token"),
        ("/classify", {"input_ids": [10**12]}, f"input_ids[0] is 1000000000000;.*{LARGEST}"),
        ("/v1/embeddings", {"model": "default", "input": [VOCABULARY]}, f"{LARGEST}"),
        (
            "/v1/score",
            {"query": [-1], "items": [IDS], "label_token_ids": [1]},
            f"input_ids[0] is -1;.*{LARGEST}",
        ),
        (
            "/v1/score",
            {"query": IDS, "items": [[VOCABULARY]], "label_token_ids": [1]},
            f"is {VOCABULARY};.*{LARGEST}",
        ),
        (
            "/v1/score",
            SCORE | {"query_embed_overrides": [[0.1] * 7]},
            "embed_overrides of query[0] has 7 values; an embedding of this model is a list of",
        ),
        (
            "/v1/score",
            SCORE | {"item_embed_overrides": [[[0.1] * 7]]},
            "embed_overrides of items[0][0] has 7 values",
        ),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "--is-embedding"),
        ("/v1/detokenize", {"tokens": [-1]}, f"tokens[0] is -1;.*{LARGEST}"),
        ("/detokenize", {"tokens": [[1], [10**12]]}, f"tokens[1][0] is 1000000000000;.*{LARGEST}"),
        ("/vertex_generate", {"instances": [{"input_ids": [-1]}]}, f"is -1;.*{LARGEST}"),
        (
            "/vertex_generate",
            {"instances": [{"input_ids": IDS}], "parameters": {"priority": "b"}},
            "priority is 'b': Input should be a valid integer",
        ),
        ("/vertex_generate", {"instances": [{"text": "a"}], "parameters": {"foo": 1}}, "'foo'"),
        ("/separate_reasoning", {"text": "a", "reasoning_parser": "mine"}, "mine"),
        ("/parse_function_call", {"text": "", "tools": [], "tool_call_parser": "mine"}, "mine"),
        ("/slow_down", {"forward_sleep_time": 1e9}, "from 0 to 10"),
        ("/resume_memory_occupation", {}, "was not released"),
        ("/start_expert_distribution_record", {}, "--expert-distribution-recorder-mode"),
        ("/stop_expert_distribution_record", {}, "--expert-distribution-recorder-mode"),
        ("/dump_expert_distribution_record", {}, "--expert-distribution-recorder-mode"),
        ("/stop_profile", {}, "nothing is profiled"),
        ("/start_profile", {"activities": ["MEM"]}, "needs another device"),
        ("/start_profile", {"num_steps": 0}, "num_steps is 0; it must be from 1"),
    ],
)
def test_what_has_no_stream(default_server: str, path: str, body: Any, said: str) -> None:
    assert_says(refused(default_server, path, body), said)


@pytest.mark.parametrize("parameters", [True, 5, "a", [1]])
def test_parameters_of_a_tool_that_are_no_object(url: str, parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "a", "parameters": parameters}}
    body = CHAT | {"tools": [tool], "tool_choice": "required"}
    refused(url, "/v1/chat/completions", body)


def test_a_score_with_embeddings_of_the_model_s_size(url: str) -> None:
    embedding = [0.1] * width_of(url)
    body = SCORE | {"query_embed_overrides": [embedding], "item_embed_overrides": [[embedding]]}
    answer = requests.post(url + "/v1/score", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["scores"][0]) == 2


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/configure_logging", "dump_requests_folder"),
        ("/configure_logging", "crash_dump_folder"),
        ("/start_profile", "output_dir"),
    ],
)
def test_a_request_does_not_say_where_to_write(default_server: str, path: str, field: str) -> None:
    """Only a request with the admin key may, which this server has none of."""
    body = {field: "/proc/nowhere"}
    response = requests.post(default_server + path, json=body, timeout=60)
    assert response.status_code == 403
    assert_says(response.json()["error"]["message"], f"{field} is '/proc/nowhere'")


def assert_says(sentence: str, pattern: str) -> None:
    assert re.search(pattern.replace("[", r"\["), sentence), sentence


def test_a_profile_is_written(default_server: str, tmp_path: Path) -> None:
    body = {"output_dir": str(tmp_path), "with_stack": False}
    for path in ("/start_profile", "/stop_profile"):
        requests.post(default_server + path, json=body, timeout=60).raise_for_status()
        if path == "/start_profile":
            assert "already" in refused(default_server, path, body)
            ask(default_server, random_prompt(20, seed=2))
    (trace,) = tmp_path.glob("*.trace.json.gz")
    names = {
        event.get("name")
        for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    }
    assert {"aten::linear", "aten::mm"} & names


def test_under_load_memory_stays_and_requests_end(default_server: str) -> None:
    prompt = random_prompt(30, seed=3)
    answers: list[dict[str, Any]] = []
    running = threading.Thread(target=lambda: answers.append(ask(default_server, prompt, 200)))
    running.start()
    loads = default_server + "/v1/loads"
    until(lambda: requests.get(loads, timeout=30).json()["loads"][0]["num_running_reqs"])
    body: dict[str, Any] = {}
    response = requests.post(default_server + "/release_memory_occupation", json=body, timeout=30)
    assert running.is_alive()
    assert response.status_code == 409 and "while requests run" in response.text
    running.join()
    assert len(answers[0]["output_ids"]) == 200


EXPLAIN = "/hybrid_cache/explain"


def test_explain_refuses_in_one_sentence_before_a_scheduler(default_server: str) -> None:
    longest = requests.get(default_server + "/v1/models", timeout=30).json()["data"][0][
        "max_model_len"
    ]
    for ids, said in (
        ([5] * (longest + 1), f"the prompt has {longest + 1:,} tokens; .* has {longest:,}"),
        ([-1] * 1_000, f"input_ids[0] is -1; .*{LARGEST}"),
        (["a"] * 1_000, "Expected `int`, got `str`"),
    ):
        sentence = refused(default_server, EXPLAIN, {"input_ids": ids})
        assert_says(sentence, said)
        assert len(sentence) < 200
    for count, status in ((10**6, 400), (2 * 10**7, 413)):
        response = requests.post(
            default_server + EXPLAIN,
            data='{"input_ids":[' + "5," * count + "5]}",
            timeout=60,
        )
        assert response.status_code == status and len(response.text) < 300
        assert "bytes" in response.text
    for body in ({}, {"input_ids": [1], "request_id": "a"}):
        assert "either" in refused(default_server, EXPLAIN, body)


@pytest.mark.slow
def test_an_embedding_server_refuses_the_same() -> None:
    flags = ["--hybrid-default-model", "transformer", "--is-embedding"]
    with ServerProcess(flags) as server:
        body = {"model": "default", "input": IDS}
        right = requests.post(server.url + "/v1/embeddings", json=body, timeout=60)
        right.raise_for_status()
        for path, wrong, said in (
            ("/v1/embeddings", {"model": "default", "input": [VOCABULARY]}, LARGEST),
            ("/v1/embeddings", {"model": "default", "input": [IDS, [10**12]]}, LARGEST),
            ("/v1/embeddings", {"model": "default", "input": ["a", ""]}, "empty"),
            ("/encode", {"input_ids": [-1]}, f"input_ids[0] is -1;.*{LARGEST}"),
            ("/encode", {"text": ""}, "one token at least"),
            ("/encode", {"input_ids": IDS, "decision_layout": [1]}, "decision_layout"),
            ("/v1/rerank", {"query": "", "documents": ["b"]}, "empty"),
        ):
            assert_says(refused(server.url, path, wrong), said)
        again = requests.post(server.url + "/v1/embeddings", json=body, timeout=60)
        (now,), (then,) = again.json()["data"], right.json()["data"]
        assert now["embedding"] == pytest.approx(then["embedding"], abs=TOLERANCE)
