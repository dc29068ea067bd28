"""Schemas of clients: apart for each tenant, and within bounds that one tenant cannot use up."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_hybrid.extensions.schemas.declared import registry
from sglang_hybrid.extensions.schemas.declared.registry import NoSchema, Registry
from sglang_hybrid.extensions.schemas.declared.tokens import PromptTokenizer
from sglang_hybrid.serving.requests.encoded_pieces import KeptPieces
from sglang_hybrid.serving.tenants import tenant

A, B = tenant("a", None), tenant("b", None)
NO_TOKENIZER = PromptTokenizer(None)


class Letters:
    """A tokenizer with a token for each letter. encoded: what it was asked for."""

    eos_token_id = None

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        self.encoded.append(text)
        return {"input_ids": [7] * len(text)}


def schema(name: str, size: int = 40) -> str:
    """Markup of at least `size` bytes."""
    return f'<schema name="{name}">{"x" * size}</schema>'


def test_tenants_have_their_own() -> None:
    kept = Registry(NO_TOKENIZER)
    kept.register(A, schema("one"))
    assert [one.schema.name for one in kept.of(A)] == ["one"]
    assert kept.of(B) == []
    with pytest.raises(NoSchema, match="there is no schema 'one'"):
        kept.get(B, "one")
    with pytest.raises(NoSchema):
        kept.delete(B, "one")
    with pytest.raises(NoSchema):
        kept.expand(B, '<prompt schema="one"/>')
    kept.delete(A, "one")
    assert kept.of(A) == []


def test_bytes_of_a_tenant_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MOST_TENANT_BYTES", 250)
    kept = Registry(NO_TOKENIZER)
    kept.register(A, schema("one", 100))
    with pytest.raises(ValueError, match="those of a tenant may have 250"):
        kept.register(A, schema("two", 150))
    kept.register(A, schema("one", 200))  # in place of the earlier one
    kept.register(B, schema("two", 150))
    kept.delete(A, "one")
    kept.register(A, schema("two", 150))


def test_bytes_of_all_are_bounded_and_nothing_is_told_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "MOST_BYTES", 250)
    kept = Registry(NO_TOKENIZER)
    kept.register(A, schema("one", 150))
    with pytest.raises(ValueError, match="of all tenants may have 250 bytes") as error:
        kept.register(B, schema("two", 150))
    assert "one" not in str(error.value).replace("one would be", "")
    kept.register(B, schema("two", 10))


def test_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MOST_SCHEMAS", 1)
    kept = Registry(NO_TOKENIZER)
    kept.register(A, schema("one"))
    with pytest.raises(ValueError, match="there are 1 schemas already; a tenant may have 1"):
        kept.register(A, schema("two"))
    kept.register(A, schema("one"))


def test_the_number_of_all_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MOST_OF_ALL", 2)
    kept = Registry(NO_TOKENIZER)
    kept.register(A, schema("one"))
    kept.register(B, schema("one"))
    with pytest.raises(ValueError, match="all tenants together may have 2 schemas, and they do"):
        kept.register(tenant("c", None), schema("one"))
    kept.register(A, schema("one", 60))
    kept.delete(B, "one")
    kept.register(tenant("c", None), schema("one"))


def test_salts_of_one_client_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MOST_SCHEMAS", 2)
    kept = Registry(NO_TOKENIZER)
    kept.register(tenant("a", "salt 1"), schema("one"))
    kept.register(tenant("a", "salt 2"), schema("one"))
    with pytest.raises(ValueError, match="a tenant may have 2"):
        kept.register(tenant("a", "salt 3"), schema("one"))
    kept.register(tenant("b", "salt 3"), schema("one"))


def test_places_of_modular_mode_are_laid_out_once() -> None:
    kept = Registry(PromptTokenizer(Letters()))
    registered = kept.register(A, schema("one"))
    first = kept.layout(registered)
    assert first.end == 40
    assert kept.layout(registered) is first
    assert kept.layout(kept.register(A, schema("one", 50))).end == 50


def test_schemas_are_listed_without_their_texts_being_tokenized() -> None:
    kept = Registry(NO_TOKENIZER)
    kept.register(A, schema("one"))
    (told,) = (one.summary() for one in kept.of(A))
    assert (told["name"], told["bytes"], told["requests"]) == ("one", len(schema("one")), 0)


def test_a_text_of_a_schema_is_tokenized_once_however_many_others_come() -> None:
    letters = Letters()
    kept = Registry(PromptTokenizer(letters, KeptPieces(most_bytes=0)))
    registered = kept.register(A, '<schema name="one"><module name="m">text</module></schema>')
    assert registered.as_dict() == registered.as_dict()
    assert letters.encoded == ["text"]


def test_the_time_that_a_text_takes_tells_nothing_of_others() -> None:
    letters = Letters()
    kept = Registry(PromptTokenizer(letters))
    for name, own in (("one", A), ("two", A), ("one", B)):
        kept.register(own, f'<schema name="{name}"><module name="m">text</module></schema>')
        kept.get(own, name).as_dict()
    assert letters.encoded == ["text", "text"]
