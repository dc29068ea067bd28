"""Bounds of a tokenized request, given the sizes of the model that will read it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from sglang_hybrid.extensions.guard.sizes import (
    LARGEST_EMBEDDING,
    ModelSizes,
    by_position,
    check_embeddings,
    check_sizes,
)

WIDTH, CONTEXT = 4, 16
SIZES = ModelSizes(WIDTH, CONTEXT)
ROW = [0.5] * WIDTH


def sent(**fields: Any) -> Any:
    """A tokenized request of five tokens."""
    empty = dict.fromkeys(("input_embeds", "positional_embed_overrides", "token_type_ids"))
    return SimpleNamespace(**{"input_ids": [1] * 5, **empty, **fields})


def overrides(embeds: Any, positions: list[int]) -> dict[str, Any]:
    return {"positional_embed_overrides": SimpleNamespace(embeds=embeds, positions=positions)}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"input_embeds": [ROW] * CONTEXT},
        {"token_type_ids": [0] * 5},
        overrides(torch.ones(2, WIDTH), [0, 4]),
        overrides(torch.ones(1, WIDTH, dtype=torch.bfloat16), [2]),
        overrides(object(), [4]),  # on a GPU, of an engine
    ],
)
def test_what_fits(fields: dict[str, Any]) -> None:
    check_sizes(sent(**fields), SIZES)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"input_embeds": [ROW] * 17}, "input_embeds has 17 rows; the model's context is 16"),
        ({"input_embeds": []}, "input_embeds is empty;"),
        ({"token_type_ids": [0] * 4}, "token_type_ids has 4 values; the prompt has 5 tokens."),
        (overrides(torch.ones(1, 7), [0]), "has 7 values; an embedding of this model is a list of"),
        (overrides(torch.ones(1, 1), [0]), "has 1 values; an embedding of this model"),
        (
            overrides(torch.full((1, WIDTH), math.nan), [0]),
            "[0][0] is nan; it must be from -32,768",
        ),
        (overrides(torch.ones(1, WIDTH), [5]), "the position 5; the prompt has 5 tokens."),
        (overrides(torch.ones(1, WIDTH), [-1]), "the position -1;"),
    ],
)
def test_what_does_not_fit(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        check_sizes(sent(**fields), SIZES)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([ROW, [0.5]], "rows[1] is [0.5]; an embedding of this model is a list of 4 numbers."),
        ([[]], "rows[0] is []; an embedding"),
        ([["a"] * WIDTH], "rows[0] is ['a', 'a', 'a', 'a']; an embedding"),
        ([5], "rows[0] is 5; an embedding"),
        ([[10**400] * WIDTH], "rows[0] is ["),
        ([[0.5, 0.5, LARGEST_EMBEDDING + 1, 0.5]], "rows[0][2] is 32769.0; it must be from"),
        ([[0.5, -math.inf, 0.5, 0.5]], "rows[0][1] is -inf; it must be from"),
        ([torch.ones(1, 3)], "rows[0] has 3 values; an embedding"),
    ],
)
def test_rows_that_are_no_embeddings(rows: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        check_embeddings("rows", rows, WIDTH)
    assert sentence in str(error.value)


def test_rows_that_are_embeddings() -> None:
    edge = [LARGEST_EMBEDDING] * WIDTH
    one = [1.0] * WIDTH
    mixed = check_embeddings("rows", [ROW, edge, torch.ones(WIDTH), torch.ones(1, WIDTH)], WIDTH)
    assert mixed.tolist() == [ROW, edge, one, one] and mixed.dtype is torch.float32
    assert check_embeddings("rows", [ROW, [1, 2, 3, 4]], WIDTH).tolist() == [ROW, [1, 2, 3, 4]]
    assert check_embeddings("rows", torch.ones(2, WIDTH).bfloat16(), WIDTH).tolist() == [one] * 2


def test_rows_of_a_prompt_are_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each conversion of a long prompt's takes a second, in which nothing else is served."""
    converted = Mock(wraps=np.array)
    monkeypatch.setattr(np, "array", converted)
    monkeypatch.setattr(torch, "as_tensor", None)
    monkeypatch.setattr(torch, "tensor", None)
    request = sent(input_ids=None, input_embeds=[ROW] * CONTEXT)
    by_position(request, check_sizes(request, SIZES))
    assert converted.call_count == 1
    assert request.positional_embed_overrides.embeds.tolist() == [ROW] * CONTEXT


def test_embeddings_of_a_prompt_are_those_of_its_tokens() -> None:
    rows = [ROW, [0.25] * WIDTH]
    request = sent(input_ids=None, input_embeds=rows)
    by_position(request, check_sizes(request, SIZES))
    assert request.input_embeds is None and [*request.input_ids] == [1, 1]
    assert request.positional_embed_overrides.positions == [0, 1]
    assert request.positional_embed_overrides.embeds.tolist() == rows
    check_sizes(request, SIZES)
    of_ids = sent()
    by_position(of_ids, check_sizes(of_ids, SIZES))
    assert of_ids == sent()
