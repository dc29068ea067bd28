"""Lines that a client puts before its system prompt and that change with every request."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from sglang_hybrid.chats import anthropic
from sglang_hybrid.chats.client_lines import strip_messages, without_changing_lines

LINE = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=0a1b2;"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (LINE, ""),
        (LINE + "\nRules.", "Rules."),
        (LINE + "\r\nRules.", "Rules."),
        (f"{LINE}\n{LINE}\nRules.", "Rules."),
        ("\n " + LINE.upper() + " \nRules.", "Rules."),
        (LINE + " Rules are kept.", "Rules are kept."),
        ("x-anthropic-billing-header:\nRules.", "Rules."),
        ("Rules.\n" + LINE, "Rules.\n" + LINE),
        ("x-anthropic-billing-header is a header.", "x-anthropic-billing-header is a header."),
    ],
)
def test_only_lines_at_the_top_are_left_out(text: str, left: str) -> None:
    assert without_changing_lines(text) == left


@given(st.text("x=;: \n-", max_size=30), st.text("0123456789abcdef", min_size=1, max_size=9))
def test_what_follows_the_line_is_the_same_for_each_checksum(rules: str, checksum: str) -> None:
    line = "x-anthropic-billing-header: cc_version=2; cch={};\n"
    one, other = (without_changing_lines(line.format(c) + rules) for c in ("0", checksum))
    assert one == other == without_changing_lines(rules)


def chat(*messages: tuple[str, Any]) -> list[Any]:
    sent = [{"role": role, "content": content} for role, content in messages]
    request = ChatCompletionRequest(model="m", messages=sent)
    strip_messages(request.messages)
    return [(message.role, message.content) for message in request.messages]


def test_a_chat_is_rendered_as_without_the_line() -> None:
    user = ("user", "Hello")
    assert chat(("system", LINE + "\nRules."), user) == [("system", "Rules."), user]
    assert chat(("developer", LINE), user) == [user]
    assert chat(("system", LINE)) == [("system", LINE)]  # nothing else is there to be answered
    ((_, content),) = chat(("system", [{"type": "text", "text": LINE}]))
    assert [part.text for part in content] == [LINE]
    assert chat(("user", LINE), user) == [("user", LINE), user]
    blocks = [{"type": "text", "text": LINE}, {"type": "text", "text": "Rules."}]
    ((_, content), _) = chat(("system", blocks), user)
    assert [part.text for part in content] == ["Rules."]


def converted(system: Any, **fields: Any) -> AnthropicMessagesRequest:
    request = AnthropicMessagesRequest(
        model="m",
        max_tokens=1,
        messages=[{"role": "user", "content": "Hello"}],
        system=system,
        **fields,
    )
    anthropic.convert(lambda asked: asked, request)
    return request


def test_messages_say_what_was_left_out() -> None:
    marked = {"type": "ephemeral"}
    header = {"type": "text", "text": LINE, "cache_control": marked}
    request = converted([header, {"type": "text", "text": "Rules.", "cache_control": marked}])
    assert [block.text for block in request.system] == ["Rules."]
    assert [block.variants[0].system[0].text[:6] for block in anthropic.marked_blocks(request)] == [
        "Rules."
    ]
    told = anthropic.diagnose(request, None, "id")
    assert told is not None and "left out" in told["hybrid"]["notes"][0]
    assert converted(LINE).system is None
    for untouched in (None, "", "Rules.", [{"type": "text", "text": "Rules."}]):
        assert anthropic.diagnose(converted(untouched), None, "id") is None


def test_the_line_stays_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_CLIENT_LINES", "keep")
    assert converted(LINE).system == LINE


def test_a_model_that_cannot_think_answers_with_a_note() -> None:
    def apply() -> None:
        raise ValueError("thinking is not supported")

    def to_chat(_: Any) -> None:
        anthropic.apply_thinking(apply)

    request = converted("Rules.")
    anthropic.convert(to_chat, request)
    anthropic.convert(to_chat, request)  # as for a marked block
    told = anthropic.diagnose(request, None, "id")
    assert told is not None and len(told["hybrid"]["notes"]) == 1
    assert "thinking is not supported" in told["hybrid"]["notes"][0]
    with pytest.raises(ValueError, match="not supported"):  # no request of this API
        anthropic.apply_thinking(apply)
