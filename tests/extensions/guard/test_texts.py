"""Bytes of a text that can fit into a context: never fewer than really do."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang_hybrid.extensions.cpu.models.tokenizer import SPECIAL_TOKENS, build_tokenizer
from sglang_hybrid.extensions.guard.texts import (
    UNKNOWN_BYTES,
    check_text,
    most_text_bytes,
    token_bytes,
)

LONGEST = 32
"""Bytes of the longest token of the embedded models."""

EMBEDDED = build_tokenizer().to_str()


def of(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def byte_level(normalizer: Any = None) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(EMBEDDED)
    if normalizer is not None:
        backend.normalizer = normalizer
    return of(backend)


BYTE_LEVEL = {
    "plain": byte_level(),
    "NFC": byte_level(normalizers.NFC()),
    "NFKC, lower": byte_level(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
}
PIECES = st.sampled_from(
    (*SPECIAL_TOKENS, " the", "  ", "\n", "\u1112\u1161\u11ab", "\u212a", "\U0001d400")
)


@pytest.mark.parametrize("name", BYTE_LEVEL)
@settings(deadline=None, max_examples=15)
@given(st.lists(PIECES | st.text(max_size=8), max_size=12).map("".join))
def test_no_text_has_more_bytes_than_its_tokens_may_have(name: str, text: str) -> None:
    tokenizer = BYTE_LEVEL[name]
    tokens = len(tokenizer(text)["input_ids"])
    assert len(text.encode()) <= tokens * most_text_bytes(tokenizer, 1)  # which is remembered


def test_a_longest_token() -> None:
    assert token_bytes(BYTE_LEVEL["plain"]) == LONGEST
    assert token_bytes(BYTE_LEVEL["NFC"]) == 4 * LONGEST
    longer = byte_level()
    longer.add_tokens("x" * 100)
    assert token_bytes(longer) == 100


def words(splits: Any) -> Tokenizer:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = splits
    return backend


def with_blanks() -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def without_a_byte() -> Tokenizer:
    backend = Tokenizer(models.BPE({"a": 0}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    return backend


@pytest.mark.parametrize(
    "tokenizer",
    [
        None,
        object(),
        of(words(pre_tokenizers.Whitespace())),
        of(without_a_byte()),
        with_blanks(),
        byte_level(normalizers.Strip()),
        byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.Replace("x", "")])),
    ],
)
def test_a_tokenizer_that_may_drop_or_join_characters(tokenizer: Any) -> None:
    assert token_bytes(tokenizer) == UNKNOWN_BYTES


def manager(*, truncates: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        tokenizer=BYTE_LEVEL["plain"], context_len=10, allow_auto_truncate=truncates
    )


@pytest.mark.parametrize("text", ["x" * 320, "é" * 160, ["x" * 320] * 9, [["x", "y"]], None, [1]])
def test_a_text_that_may_fit_is_not_refused(text: Any) -> None:
    check_text(manager(), text)


@pytest.mark.parametrize("text", ["x" * 321, "é" * 161, ["x", "x" * 321], [["x", "x" * 321]]])
def test_a_text_that_cannot_fit_is_refused(text: Any) -> None:
    with pytest.raises(ValueError) as caught:
        check_text(manager(), text)
    assert "more than 10 tokens, the model's context length; no text of more than 320" in str(
        caught.value
    )
    check_text(manager(truncates=True), text)


def test_what_cannot_fit_is_not_tokenized() -> None:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    class Counts(TokenizerManager):
        def __init__(self) -> None:
            self.context_len, self.allow_auto_truncate = 10, False
            self.async_dynamic_batch_tokenizer = None
            self.model_config = SimpleNamespace(is_embedding_gemma=False)
            self.tokenizer: Any = BYTE_LEVEL["plain"]

    tokenizes = Counts()
    ids, _ = asyncio.run(tokenizes._tokenize_texts("x" * 320))
    assert len(ids) > 10
    tokenizes.tokenizer = object()  # which cannot encode
    with pytest.raises(ValueError, match="no text of more than"):
        asyncio.run(tokenizes._tokenize_texts("x" * 10 * (UNKNOWN_BYTES + 1)))
