"""What is shared is reported: by /generate, by the OpenAI API, to a frontend program."""

import openai
import pytest
import requests
import sglang as sgl

from tests.server.client import generate, random_prompt

DOCUMENT = " ".join(
    f"Entry {n} of the register was kept by keeper {n * 7 % 31}." for n in range(90)
)
QUESTIONS = ("Who kept entry 3?", "Who kept entry 5?")
SHARED = 512
"""Tokens of `DOCUMENT` that at least have to come from the cache; it has more than 600."""


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none")


def chat(client: openai.OpenAI, question: str, **options: object) -> object:
    messages = [{"role": "system", "content": DOCUMENT}, {"role": "user", "content": question}]
    return client.chat.completions.create(
        model="default", messages=messages, max_tokens=8, temperature=0, **options
    )


def cached(usage: openai.types.CompletionUsage) -> int:
    return usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0


def test_a_shared_prefix_is_reported_by_generate(url: str) -> None:
    shared = random_prompt(600, seed=1)
    first, *others = (
        generate(url, [shared + random_prompt(20, seed)], 4)[0].cached_tokens for seed in (2, 3, 4)
    )
    assert first == 0
    assert others[-1] >= SHARED


def test_nothing_is_shared_without_a_common_prefix(url: str) -> None:
    for seed in (1, 2):
        (answer,) = generate(url, [random_prompt(600, seed)], 4)
        assert answer.cached_tokens == 0


def test_a_shared_prefix_is_reported_by_the_openai_api(client: openai.OpenAI) -> None:
    first, second = (chat(client, question).usage for question in QUESTIONS)
    assert cached(first) == 0
    assert cached(second) >= SHARED
    assert second.prompt_tokens > cached(second)


def test_a_streamed_chat_says_the_same(client: openai.OpenAI) -> None:
    whole = chat(client, QUESTIONS[0])
    chunks = list(chat(client, QUESTIONS[0], stream=True, stream_options={"include_usage": True}))
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert len([text for text in texts if text]) > 1
    assert "".join(texts) == whole.choices[0].message.content
    assert cached(chunks[-1].usage) >= SHARED


def test_a_chat_says_why_if_asked(client: openai.OpenAI, url: str) -> None:
    """docs/reports.md: in its `meta_info`, and by its id."""
    asked = {"extra_body": {"return_meta_info": True}}
    first, again = (chat(client, QUESTIONS[0], **asked) for _ in range(2))
    reports = [answer.choices[0].meta_info["hybrid_cache"] for answer in (first, again)]
    assert [report["missed"] for report in reports] == ["not_stored", "nothing"]
    assert reports[1]["hit_tokens"] == cached(again.usage)
    for answer in (first, again):
        found = requests.post(
            url + "/hybrid_cache/explain", json={"request_id": answer.id}, timeout=60
        )
        assert found.status_code == 200 and found.json()["hit"] == cached(answer.usage)


@sgl.function
def two_answers(s: sgl.lang.interpreter.ProgramState) -> None:
    s += DOCUMENT + QUESTIONS[0] + sgl.gen("first", max_tokens=8, temperature=0)
    branches = s.fork(2)
    for branch, question in zip(branches, QUESTIONS, strict=True):
        branch += question
        branch += sgl.gen("answer", max_tokens=8, temperature=0)
    s["answers"] = [branch["answer"] for branch in branches]
    s["cached"] = [branch.get_meta_info("answer")["cached_tokens"] for branch in branches]


def test_a_frontend_program_generates_and_forks(url: str) -> None:
    state = two_answers.run(backend=sgl.RuntimeEndpoint(url))
    assert state.error() is None
    assert state["first"]
    assert len(state["answers"]) == 2 and all(state["answers"])
    assert min(state["cached"]) >= SHARED
