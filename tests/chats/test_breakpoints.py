"""A block's end in a prompt's tokens is the same whatever follows the block."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing

from sglang_hybrid.chats import breakpoints
from sglang_hybrid.chats.breakpoints import (
    MARK,
    BlockEnd,
    common_start,
    token_positions,
    with_images,
)
from sglang_hybrid.chats.rendering import Rendering, encode_chat, render_chat
from sglang_hybrid.hooks import serving
from sglang_hybrid.serving.requests import encoded_pieces


def position(tokenizer: Any, before: str, after: str, *, open_ended: bool = True) -> int | None:
    """The position of a block that ends between the two texts."""
    place = BlockEnd([before + MARK + after], open_ended)
    (found,) = token_positions(
        tokenizer, {}, before + after, tokenizer(before + after)["input_ids"], [place]
    )
    return found


@given(st.text("ab \n1<", max_size=40), st.text("ab \n1<", max_size=20))
def test_the_common_start_of_two_texts(one: str, other: str) -> None:
    shared = common_start(one, other)
    assert one[:shared] == other[:shared]
    assert shared in (len(one), len(other)) or one[shared] != other[shared]


def test_a_block_before_a_special_token_ends_with_its_last_token(tokenizer: Any) -> None:
    before, after = "<|im_start|>user\nThe keeper of the archive", "<|im_end|>\nmore"
    assert position(tokenizer, before, after, open_ended=False) == len(tokenizer.encode(before))


def test_a_word_that_may_go_on_is_left_out(tokenizer: Any) -> None:
    """The word `arch` may go on as `archive`: then its tokens would be others."""
    before, after = "<|im_start|>user\nThe keeper of the arch", " of stone<|im_end|>"
    found = position(tokenizer, before, after)
    assert found is not None
    assert tokenizer.decode(tokenizer.encode(before + after)[:found]).startswith(
        "<|im_start|>user\nThe keeper of the"
    )
    assert found < len(tokenizer.encode(before))


def test_a_token_across_the_end_is_left_out(tokenizer: Any) -> None:
    assert position(tokenizer, "a line\n", "\n\nnext") == len(tokenizer.encode("a line"))


def test_a_block_that_no_variant_continues_has_no_position(tokenizer: Any) -> None:
    ids = tokenizer.encode("some text")
    assert token_positions(tokenizer, {}, "some text", ids, [BlockEnd(["some text"], True)]) == [
        None
    ]
    assert token_positions(tokenizer, {}, "some text", ids, [BlockEnd([], True)]) == [None]


def test_tokens_that_are_not_the_prompts_have_no_position(tokenizer: Any) -> None:
    """The prompt differs if a reply's beginning was appended, or by another way of tokenizing."""
    ids = tokenizer.encode("other words here")
    place = BlockEnd(["some text" + MARK], True)
    assert token_positions(tokenizer, {}, "some text follows", ids, [place]) == [None]


def test_positions_behind_images_count_their_tokens() -> None:
    ids, expanded = [5, 5, 9, 6, 9, 7, 7], [5, 5, 9, 9, 9, 6, 9, 7, 7]
    assert with_images(ids, expanded, [1, 2, 3, 4, 5, 6]) == {1: 1, 2: 2, 3: 5, 4: 6, 5: 7, 6: 8}
    assert with_images(ids, [5, 5, 9, 9, 8], [2, 3, 4]) == {2: 2, 3: 4}
    assert with_images(ids, [5], [1, 2]) == {1: 1}
    assert with_images(ids, expanded, []) == {}


def test_a_slow_tokenizer_tells_no_offsets() -> None:
    class Slow:
        is_fast = False

    assert token_positions(Slow(), {}, "text", [1, 2], [BlockEnd(["text a"], True)]) == [None]


PIECES = st.lists(
    st.sampled_from(["arch", "ive", " keeper", "\n", "  ", "12", "é", "€", ".", "'s", "<", "x"]),
    min_size=1,
    max_size=12,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(before=PIECES, after=PIECES, others=st.lists(PIECES, min_size=1, max_size=4))
@example(before="    ", after="arch", others=["    "])
def test_a_position_is_a_boundary_whatever_follows(
    tokenizer: Any, before: str, after: str, others: list[str]
) -> None:
    """The tokens before it begin every prompt that begins with the block."""
    head = "<|im_start|>user\nread this: "
    found = position(tokenizer, head + before, after)
    assert found is not None
    ids = tokenizer.encode(head + before + after)[:found]
    for other in others:
        assert tokenizer.encode(head + before + other)[:found] == ids


class Watched:
    """A tokenizer that counts the characters of which it tells offsets."""

    is_fast = True

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def __call__(self, text: str, **kwargs: Any) -> Any:
        self.characters += len(text)
        return self._tokenizer(text, **kwargs)


@settings(max_examples=20, deadline=None)
@given(
    messages=st.lists(PIECES, min_size=1, max_size=6),
    at=st.integers(0, 10_000),
    open_ended=st.booleans(),
)
def test_long_chats_are_looked_at_around_the_place_only(
    tokenizer: Any, messages: list[str], at: int, open_ended: bool
) -> None:
    """The position is that of a search in the whole chat."""
    long = "some words that go on. " * 40
    text = "".join(f"<|im_start|>user\n{long}{each}<|im_end|>\n" for each in [*messages, *"abcdef"])
    place = BlockEnd([text[: at % len(text)] + MARK], open_ended)
    ids = tokenizer.encode(text)
    (found,) = token_positions(tokenizer, {}, text, ids, [place])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(breakpoints, "cut_places", lambda *_: [])
        assert token_positions(tokenizer, {}, text, ids, [place]) == [found]
    watched = Watched(tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            breakpoints, "cut_places", lambda _, *rest: encoded_pieces.cut_places(tokenizer, *rest)
        )
        assert token_positions(watched, {}, text, ids, [place]) == [found]
    several = 40 * (200 + breakpoints.AHEAD)  # continuations, each behind some tokens
    assert watched.characters < 3 * len(long) + several


def test_a_block_of_blanks_has_no_position(tokenizer: Any) -> None:
    """Each continuation would be tokenized with all of them."""
    text = "<|im_start|>user\nread this" + " " * 5_000
    place = BlockEnd([text + MARK], open_ended=True)
    watched = Watched(tokenizer)
    assert token_positions(watched, {}, text + "b", tokenizer.encode(text + "b"), [place]) == [None]
    assert watched.characters < 2 * len(text)


def test_a_chat_is_rendered_without_being_tokenized() -> None:
    def encode(tokenizer: Any, text: str, kwargs: Any) -> list[int]:
        return [len(text)]

    def process() -> list[int]:
        try:
            return encode_chat(encode, None, "a chat", {"add_special_tokens": False})
        except Exception:  # as SGLang tries another form of the tools
            return []

    assert render_chat(process) == Rendering("a chat", {"add_special_tokens": False})
    assert process() == [6]
    assert render_chat(lambda: None) is None


def test_what_is_only_rendered_is_no_chat_that_was_tokenized_before() -> None:
    """SGLang keeps the tokens of chats of models that see, by their messages."""
    kept: dict[str, bool] = {"use_cache": True, "tools": False}

    def process() -> None:
        _, named = serving.render_anew("chat", [], **kept)
        assert named == {"use_cache": False, "tools": False}
        encode_chat(lambda *_: [1], None, "text", {})

    assert render_chat(process) == Rendering("text", {})
    assert serving.render_anew("chat", [], **kept) == (("chat", []), kept)


def test_a_client_that_marks_too_much_is_told_so_and_the_log_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    block = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    request = AnthropicMessagesRequest.model_validate(
        {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [block] * 5}]}
    )
    endpoint = AnthropicServing(SimpleNamespace(supports_inline_system=True))
    answer = asyncio.run(endpoint.handle_messages(request, None))
    assert answer.status_code == 400
    assert "A maximum of 4 blocks" in json.loads(answer.body)["error"]["message"]
    assert caplog.records == []
