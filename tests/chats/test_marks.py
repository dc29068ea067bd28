"""Marked blocks of requests: which there are, and the usage of their answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, PromptTokensDetails
from transformers import PreTrainedTokenizerFast

from sglang_hybrid.chats import anthropic, fields, openai
from sglang_hybrid.chats.breakpoints import MARK
from sglang_hybrid.chats.marks import SECONDS, Breakpoint, MarkedBlock, declare
from sglang_hybrid.chats.rendering import encode_chat
from sglang_hybrid.core.returns.hints import NO_HINTS
from sglang_hybrid.serving.requests.cache_fields import server_part

MARKED = {"type": "ephemeral"}


def request(**fields: Any) -> AnthropicMessagesRequest:
    message = {"role": "user", "content": "Hello"}
    return AnthropicMessagesRequest(
        **{"model": "m", "max_tokens": 1, "messages": [message], **fields}
    )


def test_blocks_are_found_in_the_order_of_the_prompt() -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "c",
        "content": [{"type": "text", "text": "found", "cache_control": MARKED}],
    }
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}, "cache_control": MARKED}
    asked = request(
        messages=[
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
        system=[{"type": "text", "text": "Rules", "cache_control": {**MARKED, "ttl": "1h"}}],
        tools=[{"name": "look", "input_schema": {}, "cache_control": {**MARKED, "ttl": "1h"}}],
    )
    anthropic.check(asked)
    tool, system, use, found = anthropic.marked_blocks(asked)
    assert [len(variant.tools) for variant in tool.variants] == [1, 2]
    assert system.variants[0].system[0].text == "Rules" + MARK
    assert [len(variant.messages[0].content) for variant in use.variants] == [1, 2]
    assert found.variants[0].messages[1].content[0].content[0].text == "found" + MARK
    assert [block.ttl for block in (tool, system, use, found)] == ["1h", "1h", "5m", "5m"]
    assert asked.system[0].text == "Rules"  # type: ignore[union-attr, index]


def test_a_mark_of_a_request_without_a_last_block_marks_nothing() -> None:
    for messages in ([], [{"role": "user", "content": []}]):
        asked = request(messages=messages, cache_control=MARKED)
        anthropic.check(asked)
        assert anthropic.marked_blocks(asked) == []


@pytest.mark.parametrize("text", [None, 5, ["a"]])
def test_a_found_document_without_a_text_is_not_continued(text: Any) -> None:
    found = {"type": "search_result", "content": [{"text": text}], "cache_control": MARKED}
    (block,) = anthropic.marked_blocks(request(messages=[{"role": "user", "content": [found]}]))
    assert block.variants[0].messages[0].content[0].content == [{"text": text}]


def test_a_mark_of_the_request_is_one_of_its_last_block() -> None:
    (block,) = anthropic.marked_blocks(request(cache_control=MARKED))
    assert block.variants[0].messages[0].content == "Hello" + MARK and not block.open_ended
    text = {"type": "text", "text": "Hello", "cache_control": MARKED}
    both = request(cache_control=MARKED, messages=[{"role": "user", "content": [text]}])
    assert len(anthropic.marked_blocks(both)) == 1
    differ = both.model_copy(update={"cache_control": anthropic.CacheControl(**MARKED, ttl="1h")})
    with pytest.raises(ValueError, match="give one of them"):
        anthropic.check(differ)


def test_a_thinking_block_cannot_be_marked() -> None:
    thought = {"type": "thinking", "thinking": "Hm", "cache_control": MARKED}
    with pytest.raises(ValueError, match="cannot be set for thinking blocks"):
        anthropic.check(request(messages=[{"role": "assistant", "content": [thought]}]))


@pytest.mark.parametrize(
    ("computed", "read", "written", "hour", "fields"),
    [
        (100, 0, 80, 0, (20, 0, 80, 80, 0)),
        (100, 0, 80, 50, (20, 0, 80, 30, 50)),
        (60, 40, 40, 50, (20, 40, 40, 30, 10)),
        (40, 60, 20, 50, (20, 60, 20, 20, 0)),
        (100, 0, 0, 50, (100, 0, 0, 0, 0)),
    ],
)
def test_the_counts_of_an_answer_add_up(
    computed: int, read: int, written: int, hour: int, fields: tuple[int, ...]
) -> None:
    marks = [Breakpoint(80, "5m")]
    if hour:
        marks.insert(0, Breakpoint(hour, "1h"))
    usage = anthropic.usage_of_input(computed, read, written, marks)
    split = usage["cache_creation"]
    assert fields == (
        usage["input_tokens"],
        usage["cache_read_input_tokens"],
        usage["cache_creation_input_tokens"],
        split.ephemeral_5m_input_tokens,
        split.ephemeral_1h_input_tokens,
    )
    assert sum(fields[:3]) == computed + read


def test_without_marks_an_answer_is_sglangs() -> None:
    assert anthropic.usage_of_input(5, 0, None, []) == {"input_tokens": 5}
    unknown = anthropic.usage_of_input(5, 3, None, [Breakpoint(2, "5m")])
    assert unknown == {"input_tokens": 5, "cache_read_input_tokens": 3}


def test_the_last_four_parts_count_and_no_template_sees_a_mark() -> None:
    parts = [
        {"type": "text", "text": f"part {n}", "prompt_cache_breakpoint": {"mode": "explicit"}}
        for n in range(6)
    ]
    asked = ChatCompletionRequest(
        model="m",
        messages=[{"role": "user", "content": parts}],
        prompt_cache_options={"ttl": "12h"},
    )
    blocks = openai.marked_parts(asked)
    assert [block.ttl for block in blocks] == ["12h"] * 4
    assert [block.open_ended for block in blocks] == [True, True, True, False]
    assert blocks[0].variants[0].messages[0].content[2].text == "part 2" + MARK
    assert "prompt_cache_breakpoint" not in asked.messages[0].model_dump()["content"][0]


def test_usage_tells_of_writes_only_if_something_was_declared() -> None:
    def answer(**report: Any) -> dict[str, Any]:
        return {"meta_info": {"cached_tokens": 3, "hybrid_cache": report}}

    details = PromptTokensDetails(cached_tokens=3)
    assert openai.with_writes(details, PromptTokensDetails, [answer()]) is details
    assert openai.with_writes(None, PromptTokensDetails, [{"meta_info": {}}]) is None
    told = openai.with_writes(
        None, PromptTokensDetails, [answer(declared={"kept": [9], "written_tokens": 6})]
    )
    assert told.model_dump() == {"cached_tokens": 3, "cache_write_tokens": 6}
    assert details.model_dump() == {"cached_tokens": 3}


def process(text: str) -> Any:
    return encode_chat(lambda *_: [1, 2], None, text, {})


def test_a_marked_block_is_pinned_for_its_lifetime(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "The keeper of the archive counts lanterns. "
    ids = tokenizer(2 * text + "Why?")["input_ids"]
    blocks = [
        MarkedBlock(ttl, [count * text + MARK], open_ended=False)
        for count, ttl in ((1, "12h"), (2, "5m"))
    ]
    adapted = SimpleNamespace(input_ids=ids)
    found = declare(adapted, tokenizer, 2 * text + "Why?", blocks, process)
    assert [mark.ttl for mark in found] == ["12h", "5m"]
    pins = server_part(adapted).hints.pins
    assert [(pin.position, pin.ttl) for pin in pins] == [
        (found[0].position, 43_200),
        (found[1].position, 300),
    ]
    lifetimes = [*get_args(anthropic.CacheControl.model_fields["ttl"].annotation)]
    assert {*lifetimes, *get_args(fields.Lifetime)} == SECONDS.keys()


def test_a_mark_behind_an_image_is_placed_when_its_tokens_are_known(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    text, image = "The keeper of the archive counts lanterns. ", "<|im_end|>"
    whole = text + image + text
    blocks = [MarkedBlock("1h", [whole + MARK], open_ended=False)]
    adapted = SimpleNamespace(input_ids=None, text=whole + "Why?")
    found = declare(adapted, tokenizer, whole + "Why?", blocks, process)
    ids = tokenizer(whole + "Why?")["input_ids"]
    at, (position,) = ids.index(tokenizer.convert_tokens_to_ids(image)), [m.position for m in found]
    expanded = [*ids[:at], *[ids[at]] * 40, *ids[at + 1 :]]
    place = server_part(adapted).place
    assert place is not None
    (pin,) = place(expanded).pins
    assert (pin.position, pin.ttl) == (position + 39, 3_600)
    assert found == [Breakpoint(position + 39, "1h")]
    assert server_part(adapted).hints == NO_HINTS
    assert not place(ids[1:]).pins and not found
    other = SimpleNamespace(input_ids=None, text="something else")
    assert declare(other, tokenizer, whole, blocks, process) == []


def test_a_tokenizer_that_fails_costs_the_marks_and_not_the_request() -> None:
    class Broken:
        is_fast = True

        def __call__(self, text: str, **kwargs: Any) -> Any:
            raise RuntimeError("no offsets today")

    adapted = SimpleNamespace(input_ids=[1, 2, 3])
    block = MarkedBlock("5m", ["text and more"], open_ended=False)
    assert declare(adapted, Broken(), "text", [block], process) == []
    assert server_part(adapted).hints == NO_HINTS
