"""Differences from an earlier request, and who may ask for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest

from sglang_hybrid.chats import anthropic, diagnostics
from sglang_hybrid.chats.diagnostics import (
    PartKind,
    RequestPart,
    SentPrompt,
    compare,
)
from sglang_hybrid.core.records.latest import Latest

MARKED = {"type": "ephemeral"}


def prompt(*texts: str, ids: list[int] | None = None) -> SentPrompt:
    """Texts of a system prompt, by their index."""
    parts = [RequestPart(PartKind.SYSTEM, f"system.{at}", text) for at, text in enumerate(texts)]
    return SentPrompt(None, parts, np.array(ids or [], np.int32))


def chat(*texts: str) -> SentPrompt:
    parts = [
        RequestPart(PartKind.MESSAGES, f"messages.{at}.content.0", text)
        for at, text in enumerate(texts)
    ]
    return SentPrompt(None, parts, np.array([], np.int32))


def test_the_first_text_that_differs_is_shown_with_what_is_around_it() -> None:
    before = prompt("Rules.", "x" * 50 + "Monday" + "y" * 50, ids=[1, 2, 3, 4, 5])
    now = prompt("Rules.", "x" * 50 + "Tuesday" + "y" * 50, ids=[1, 2, 9, 4])
    found = compare(before, now)
    assert found is not None
    assert (found.kind, found.path) == (PartKind.SYSTEM, "system.1")
    assert found.before == "x" * 20 + "Monday" + "y" * 14
    assert found.now == "x" * 20 + "Tuesday" + "y" * 13
    assert (found.shared_tokens, found.missed_tokens, found.same_tokens) == (2, 3, 0)


def test_tokens_that_are_equal_again_behind_a_short_text_are_counted() -> None:
    rules = [*range(100, 200)]
    found = compare(prompt("At 9:00", ids=[1, 9, *rules]), prompt("At 9:05", ids=[1, 7, 8, *rules]))
    assert found is not None and found.as_dict()["same_tokens"] == 100


def test_a_conversation_that_goes_on_or_stops_earlier_does_not_differ() -> None:
    assert compare(chat("a", "b"), chat("a", "b", "c")) is None
    assert compare(chat("a", "b"), chat("a")) is None
    assert compare(chat("a", "b"), chat("a", "c")) is not None


@pytest.mark.parametrize(
    ("before", "now", "shown"), [(("a",), ("a", "b"), ("", "b")), (("a", "b"), ("a",), ("b", ""))]
)
def test_a_part_too_many_differs(
    before: tuple[str, ...], now: tuple[str, ...], shown: tuple[str, str]
) -> None:
    found = compare(prompt(*before), prompt(*now))
    assert found is not None and (found.before, found.now) == shown
    assert found.path == "system.1"


def test_what_prompts_depend_on_first_is_named_first() -> None:
    def asked(model: str, tools: str, system: str) -> SentPrompt:
        parts = zip(
            (PartKind.MODEL, PartKind.TOOLS, PartKind.SYSTEM), (model, tools, system), strict=True
        )
        return SentPrompt(
            None, [RequestPart(kind, kind.value, text) for kind, text in parts], np.array([])
        )

    before = asked("m", "t", "s")
    for now, kind in (
        (asked("n", "u", "v"), PartKind.MODEL),
        (asked("m", "u", "v"), PartKind.TOOLS),
        (asked("m", "t", "v"), PartKind.SYSTEM),
    ):
        found = compare(before, now)
        assert found is not None and found.kind is kind


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: Latest[SentPrompt] = Latest(1_000_000)
    monkeypatch.setattr(anthropic, "sent_prompts", lambda: kept)


def diagnosed(message_id: str, previous: str | None, salt: str | None = None, **fields: Any) -> Any:
    request = AnthropicMessagesRequest(
        **{
            "model": "m",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": "Hello"}],
            "diagnostics": {"previous_message_id": previous},
            **fields,
        }
    )
    adapted = SimpleNamespace(input_ids=[1, 2, 3], lora_path=None, extra_key=None, cache_salt=salt)
    return anthropic.diagnose(request, anthropic.sent_prompt(request, adapted), message_id)


@pytest.mark.usefixtures("apart")
def test_answers_are_those_of_anthropics_api() -> None:
    assert diagnosed("first", None) is None
    assert diagnosed("second", "first") is None
    unknown = {"cache_miss_reason": {"type": "previous_message_not_found"}}
    assert diagnosed("third", "nobody's") == unknown
    assert diagnosed("third", "first", salt="another tenant's") == unknown
    changed = diagnosed("fourth", "first", system="You keep an archive.")
    assert changed["cache_miss_reason"] == {
        "type": "system_changed",
        "cache_missed_input_tokens": 0,
    }
    assert changed["hybrid"]["now"] == "You keep an archive."[:20]


@pytest.mark.usefixtures("apart")
def test_a_mark_is_no_change() -> None:
    system = {"type": "text", "text": "Rules"}
    assert diagnosed("first", None, system=[system]) is None
    assert diagnosed("second", "first", system=[{**system, "cache_control": MARKED}]) is None
    assert diagnosed("third", "first", system="Rules") is None
    tool = {"name": "look", "input_schema": {"type": "object"}}
    diagnosed("fourth", None, tools=[tool])
    assert diagnosed("fifth", "fourth", tools=[{**tool, "cache_control": MARKED}]) is None
    other = diagnosed("sixth", "fourth", tools=[{**tool, "name": "find"}])
    assert other["cache_miss_reason"]["type"] == "tools_changed"


def test_nothing_is_kept_of_who_does_not_ask() -> None:
    request = SimpleNamespace(diagnostics=None, _notes=[])
    assert anthropic.sent_prompt(request, None) is None
    assert anthropic.diagnose(request, None, "one") is None
    assert diagnostics.sent_prompts().get(None, "one") is None
