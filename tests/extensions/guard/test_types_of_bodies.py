"""Mistakes in the types of a body are one sentence, without names of the server's classes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError, model_validator
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_hybrid.extensions.guard.types_of_bodies import is_repeated, mistakes_of_types

CHAT, GENERATE = TypeAdapter(ChatCompletionRequest), TypeAdapter(GenerateReqInput)
USER = {"messages": [{"role": "user", "content": "Who?"}]}


def said(kind: TypeAdapter[Any], body: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        kind.validate_python(body)
    return mistakes_of_types(caught.value.errors())


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"extra_key": 5}, "extra_key is 5; it should be a valid list or a valid string."),
        (
            {"cache_salt": {"a": 1}},
            "cache_salt is {'a': 1}; it should be a valid list or a valid string.",
        ),
        (
            {"extra_key": ["a", 5]},
            "extra_key[1] is 5; it should be a valid string; "
            "extra_key is ['a', 5]; it should be a valid string.",
        ),
        ({"max_tokens": "many"}, "max_tokens is 'many'; it should be a valid integer."),
    ],
)
def test_a_field_of_a_chat(fields: dict[str, Any], sentence: str) -> None:
    assert said(CHAT, {**USER, **fields}) == sentence


def test_a_role_that_is_none() -> None:
    sentence = said(CHAT, {"messages": [{"role": "x"}]})
    assert sentence.startswith(
        "messages[0].role is 'x'; it should be 'role' must be one of 'system'"
    )
    assert sentence.endswith("messages[0].content: Field required.")


def test_hints_that_are_no_object() -> None:
    sentence = said(GENERATE, {"text": "x", "kv_hints": "x"})
    assert sentence == "kv_hints is 'x'; it should be a valid list or a valid dictionary."


def test_a_body_that_is_no_json() -> None:
    error = {"type": "json_invalid", "loc": ("body", 12), "msg": "JSON decode error", "input": {}}
    error["ctx"] = {"error": "Expecting value"}
    assert mistakes_of_types([error]) == "the body is no JSON: Expecting value (character 12)."
    assert mistakes_of_types([{**error, "ctx": {}}]).endswith("it cannot be read (character 12).")


def test_many_fields_are_counted() -> None:
    errors = [
        {"type": "missing", "loc": ("body", name), "msg": "Field required", "input": {}}
        for name in ("a", "b", "c", "d", "e")
    ]
    assert mistakes_of_types(errors) == (
        "a: Field required; b: Field required; c: Field required; and 2 more."
    )


def test_what_was_sent_is_shortened() -> None:
    sentence = said(CHAT, {**USER, "max_tokens": "x" * 100_000})
    assert len(sentence) < 200


class Asked(BaseModel):
    """A request that its answer repeats."""

    repeats = model_validator(mode="after")(is_repeated)

    input: Any = None
    most: int = 1
    metadata: dict[str, Any] = {}


@pytest.mark.parametrize(
    "given", [{"most": "9" * 4_209}, {"metadata": {"a": [10**30]}}, {"metadata": {"a": "\ud83d"}}]
)
def test_what_an_answer_cannot_repeat_is_refused(given: dict[str, Any]) -> None:
    """A stream would end in silence after its status of 200."""
    with pytest.raises(ValidationError, match="the answer cannot repeat the request"):
        Asked.model_validate(given)
    right = {"input": 10**30, "most": "5", "metadata": {"a": -(2**63)}}
    assert Asked.model_validate(right).most == 5
