"""The shape of JSON, and bodies that are refused before they are read."""

import asyncio
import json
from typing import Any

import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.explain.route import Question
from sglang_hybrid.serving.requests.bodies import (
    MOST_CONTAINERS,
    MOST_DEPTH,
    BodyKind,
    JsonShape,
    json_shape,
    may_be_deep,
    read_json,
)

TEXTS = st.text(alphabet='a"\\[]{}é\n')
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)


def shape_of(value: Any) -> JsonShape:
    """The plain twin of `json_shape`, for a value."""
    if not isinstance(value, list | dict):
        return JsonShape(0, 0)
    inner = [shape_of(one) for one in (value.values() if isinstance(value, dict) else value)]
    deepest = max((one.depth for one in inner), default=0)
    return JsonShape(1 + sum(one.containers for one in inner), 1 + deepest)


@given(VALUES, st.booleans())
def test_the_shape_of_json(value: Any, ascii_only: bool) -> None:
    assert json_shape(json.dumps(value, ensure_ascii=ascii_only).encode()) == shape_of(value)


@given(st.binary())
def test_what_is_no_json_has_some_shape(body: bytes) -> None:
    shape = json_shape(body)
    assert shape.depth <= shape.containers


def test_a_shape_of_any_depth_is_found() -> None:
    body = b"[" * 1_000_000
    assert json_shape(body) == JsonShape(1_000_000, 1_000_000)
    assert may_be_deep(body)
    assert not may_be_deep(json.dumps({"input_ids": [1] * 1_000}).encode())


def test_what_is_nested_too_deep_or_has_too_many_parts_is_refused() -> None:
    json_shape(b"[" * MOST_DEPTH).check()
    with pytest.raises(ValueError, match=f"nested {MOST_DEPTH + 1} deep; it may be {MOST_DEPTH}"):
        json_shape(b"[" * (MOST_DEPTH + 1)).check()
    json_shape(b"[]" * MOST_CONTAINERS).check()
    with pytest.raises(ValueError, match="it may have 100,000 at most"):
        json_shape(b"[]" * (MOST_CONTAINERS + 1)).check()


def request_of(body: bytes) -> Request:
    """A request whose body comes in two parts."""
    middle = len(body) // 2
    parts = [(body[:middle], True), (body[middle:], False)]

    async def receive() -> dict[str, Any]:
        part, more = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": more}

    return Request({"type": "http", "headers": []}, receive)


KIND = BodyKind("question", '{"input_ids": [1]}')


def read(body: bytes, most: int = 1_000) -> Question:
    return asyncio.run(read_json(request_of(body), Question, most, "a test takes", KIND))


def test_a_body_is_read() -> None:
    assert read(b'{"input_ids": [1, 2], "x": [[]]}') == Question(input_ids=[1, 2])
    assert read(b"") == read(b"{}") == Question()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"x" * 1_001, "the body has 1,001 bytes; a test takes 1,000 at most."),
        (b'{"input_ids": [1], "x": ' + b"[" * 400, "the body is nested 401 deep; it may be"),
        (b'{"input_ids": "1"}', "the body is no question: Expected `array | null`, got `str`"),
        (b'{"input_ids": "1"}', '- at `$.input_ids`. A whole one: {"input_ids": [1]}.'),
        (b'{"input_ids": [1', "the body is no question: Input data was truncated. A whole one"),
        (b'"\xff"', "the body is no question: "),
    ],
)
def test_a_body_that_is_no_question(body: bytes, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(body)
    assert sentence in str(caught.value)


def test_a_depth_that_ends_in_pythons_limit_is_a_value_error() -> None:
    body = b'{"input_ids": [1], "x": ' + b"[" * 100_000
    with pytest.raises(ValueError, match="nested 100,001 deep"):
        read(body, len(body))
