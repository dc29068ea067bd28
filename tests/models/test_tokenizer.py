"""The tokenizer keeps any text, reads well and knows its role tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from sglang_hybrid.models import ARCHITECTURES
from sglang_hybrid.models.tokenizer import (
    EOS,
    FIRST_BYTE_ID,
    FIRST_TEXT_ID,
    PAD,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    build_tokenizer,
)

SENTENCE = (
    "When a request arrives, the server looks for the longest prefix that it has seen before, "
    "and only the rest of the prompt has to be computed again."
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


@pytest.fixture(params=ARCHITECTURES)
def loaded(request: pytest.FixtureRequest, model_dirs: dict[str, Path]) -> Any:
    return AutoTokenizer.from_pretrained(model_dirs[request.param])


def test_the_vocabulary_is_full_and_starts_with_the_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert [tokenizer.id_to_token(index) for index in range(FIRST_BYTE_ID)] == list(SPECIAL_TOKENS)


def test_two_builds_are_the_same(tokenizer: Tokenizer) -> None:
    assert build_tokenizer().to_str() == tokenizer.to_str()


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_id_but_the_bytes_decodes_to_valid_text(tokenizer: Tokenizer) -> None:
    texts = tokenizer.decode_batch([[index] for index in range(FIRST_TEXT_ID, VOCAB_SIZE)])
    assert all(text and "\N{REPLACEMENT CHARACTER}" not in text for text in texts)
    assert len(set(texts)) == len(texts)


def test_english_takes_about_one_token_a_word(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(SENTENCE).ids) <= 1.5 * len(SENTENCE.split())


def test_transformers_loads_the_same_tokenizer(loaded: Any, tokenizer: Tokenizer) -> None:
    text = f"{SENTENCE}\n\n  x = {{'naïve': 1987}}  # 日本語 🙂\n"
    assert loaded.encode(text) == tokenizer.encode(text).ids
    assert loaded.decode(loaded.encode(text)) == text
    assert (loaded.pad_token, loaded.eos_token) == (PAD, EOS)


def test_the_chat_template_marks_every_turn(loaded: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    start, end = (SPECIAL_TOKENS.index(token) for token in ("<|im_start|>", "<|im_end|>"))
    ids = loaded.encode(text)
    assert (ids.count(start), ids.count(end)) == (3, 2)


def test_the_chat_template_extends_a_conversation(loaded: Any) -> None:
    """The next turn's prompt starts with this turn's prompt and answer: prefixes are reusable."""
    turns = [{"role": "user", "content": "Hi"}]
    prompt = loaded.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    turns += [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]
    longer = loaded.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert longer.startswith(prompt + "Hello<|im_end|>\n")
