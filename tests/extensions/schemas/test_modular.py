"""Positions of modules that are computed apart, and the tokens that are computed together."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_hybrid.extensions.schemas.declared import tokens
from sglang_hybrid.extensions.schemas.declared.modular import Layout, modular, prepared_segments
from sglang_hybrid.extensions.schemas.declared.resolve import read_prompt, resolve
from sglang_hybrid.extensions.schemas.declared.schema import read_schema
from sglang_hybrid.extensions.schemas.declared.tokens import PromptTokenizer

SCHEMA = """<schema name="s">ab<module name="one">cde<parameter name="p" length="4"/>fg</module>
<union><module name="two">hi</module>
<module name="three">jklm<module name="four">n</module>o</module></union>
<module name="five">pq</module></schema>"""


class Letters:
    """A tokenizer of one token per letter, which begins with token 0."""

    eos_token_id = 99

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, Any]:
        return {"input_ids": ([0] if add_special_tokens else []) + [ord(c) for c in text]}


@pytest.fixture
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer(Letters())


def test_tokens_of_the_latest_texts_are_kept_within_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokens, "MOST_BYTES", 10_000)
    encoded: list[str] = []

    class Counting(Letters):
        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, Any]:
            encoded.append(text)
            return super().__call__(text, add_special_tokens)

    tokenizer = PromptTokenizer(Counting())
    assert tokenizer.stored_ids("ab") == tokenizer.stored_ids("ab") == (97, 98)
    assert encoded == ["ab"]
    for value in range(1_000):
        assert tokenizer.length(f"{value:03}" * 100) == 300
    assert tokenizer._kept.bytes <= 10_000
    assert tokenizer.length("999" * 100) == 300 and len(encoded) == 1_001
    assert tokenizer.length("ab") == 2 and encoded[-1] == "ab"


def put_together(
    tokenizer: PromptTokenizer, imports: str
) -> tuple[list[tuple[str, int]], str, int]:
    """Texts and places of the segments, the new text, and its place."""
    schema = read_schema(SCHEMA.replace("\n", ""))
    prompt = read_prompt(f'<prompt schema="s" mode="modular">{imports}</prompt>')
    assert prompt.modular
    found = modular(Layout(schema, tokenizer), resolve(schema, prompt))

    def text(ids: tuple[int, ...]) -> str:
        return "".join(map(chr, ids)).replace("\0", "^")

    places = [(text(segment.ids), segment.start) for segment in found.segments]
    return places, text(found.new), found.position


def test_modules_that_exclude_each_other_share_a_place(tokenizer: PromptTokenizer) -> None:
    end = 1 + 2 + 9 + 6 + 2
    assert put_together(tokenizer, "<two/><five/>new") == (
        [("^", 0), ("ab", 1), ("hi", 12), ("pq", 18)],
        "new",
        end,
    )
    assert put_together(tokenizer, "<three/><five/>new")[0][2:] == [
        ("jklm", 12),
        ("o", 17),
        ("pq", 18),
    ]
    assert put_together(tokenizer, "<three><four/></three>new")[0][2:] == [
        ("jklm", 12),
        ("n", 16),
        ("o", 17),
    ]


def test_a_value_is_computed_with_its_module(tokenizer: PromptTokenizer) -> None:
    """The place behind the module stays free for the longest value."""
    assert put_together(tokenizer, '<one p="XY"/>!')[0][2:] == [("cdeXYfg", 3)]
    with pytest.raises(ValueError, match="it may have 4"):
        put_together(tokenizer, '<one p="VWXYZ"/>!')


def test_the_last_token_is_new_where_nothing_else_is(tokenizer: PromptTokenizer) -> None:
    assert put_together(tokenizer, "<two/>") == ([("^", 0), ("ab", 1), ("h", 12)], "i", 13)


def test_modules_without_values_can_be_computed_beforehand(tokenizer: PromptTokenizer) -> None:
    schema = read_schema(SCHEMA.replace("\n", ""))
    found = {
        ("".join(map(chr, one.ids)), one.start)
        for one in prepared_segments(Layout(schema, tokenizer))
    }
    assert found == {("ab", 1), ("hi", 12), ("jklm", 12), ("n", 16), ("o", 17), ("pq", 18)}
    assert Layout(schema, tokenizer).end == 20


def test_equal_tokens_at_other_places_have_other_keys(tokenizer: PromptTokenizer) -> None:
    schema = read_schema(SCHEMA.replace("\n", ""))
    digests = set()
    for imports in ("<two/>x", "<two/><five/>x", "<five/>x"):
        prompt = read_prompt(f'<prompt schema="s" mode="modular">{imports}</prompt>')
        digests.add(modular(Layout(schema, tokenizer), resolve(schema, prompt)).digest)
    assert len(digests) == 3


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="exact or modular"):
        read_prompt('<prompt schema="s" mode="fast"/>')
