"""Values of a tokenized request fit the model that will read them.

Checked on what is about to be sent to a scheduler, so for every route alike. A tensor of another
size, or with values that are not finite, ends the forward pass of all requests that are computed
with it. Each function raises ValueError with a sentence.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.embed_types import PositionalEmbeds

from sglang_hybrid.core.sentences import shown
from sglang_hybrid.serving.requests import fields

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

LARGEST_EMBEDDING = 1 << 15
"""The largest value of an embedding; it is finite in every type that a model may have."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the served model. width: values of a token's embedding. context: tokens."""

    width: int
    context: int

    @classmethod
    def of(cls, manager: TokenizerManager) -> ModelSizes:
        return cls(manager.model_config.hidden_size, manager.context_len)


def check_sizes(sent: Any, sizes: ModelSizes) -> None:
    """A tokenized request as SGLang sends it (TokenizedGenerateReqInput or
    TokenizedEmbeddingReqInput), to a model of these sizes.
    """
    embeddings = getattr(sent, "input_embeds", None)
    if embeddings is not None:
        if len(embeddings) > sizes.context:
            raise ValueError(
                f"input_embeds has {len(embeddings):,} rows; the model's context is "
                f"{sizes.context:,} tokens."
            )
        check_embeddings("input_embeds", embeddings, sizes.width)
    length = len(sent.input_ids or ()) if embeddings is None else len(embeddings)
    overrides = sent.positional_embed_overrides
    if overrides is not None:
        if isinstance(overrides.embeds, torch.Tensor):  # else it is on a GPU, from an engine
            check_embeddings("embeddings in place of tokens", overrides.embeds, sizes.width)
        for position in overrides.positions:
            if not 0 <= position < length:
                raise ValueError(
                    f"an embedding has the position {position}; the prompt has {length:,} tokens."
                )
    types = sent.token_type_ids
    if types is not None and len(types) != length:
        raise ValueError(
            f"token_type_ids has {len(types):,} values; the prompt has {length:,} tokens."
        )


def by_position(sent: Any) -> None:
    """Embeddings in place of a whole prompt become embeddings in place of each of its tokens.

    SGLang computes these in the model's own type, and beside prompts of token ids. `input_embeds`
    ends the forward pass of a model that is not in bfloat16, and of a batch that has both.
    """
    rows = getattr(sent, "input_embeds", None)
    if rows is not None and sent.positional_embed_overrides is None:
        sent.positional_embed_overrides = PositionalEmbeds(torch.tensor(rows), [*range(len(rows))])
        sent.input_ids, sent.input_embeds = array("q", [1]) * len(rows), None


def check_embeddings(field: str, rows: Sequence[Any] | torch.Tensor, width: int) -> None:
    """`rows` [n > 0, width] are embeddings: finite numbers of an ordinary size. A row may be a list
    or a tensor [width] or [1, width].
    """
    if not len(rows):
        raise ValueError(f"{field} is empty; leave it out, or give embeddings.")
    for at, row in enumerate(rows):
        try:
            values = torch.as_tensor(row).float()
        except (TypeError, ValueError, OverflowError, RuntimeError):
            values = None
        if values is None or values.shape not in ((width,), (1, width)):
            what = (
                f"has {row.numel():,} values"
                if isinstance(row, torch.Tensor)
                else f"is {shown(row)}"
            )
            raise ValueError(
                f"{field}[{at}] {what}; an embedding of this model is a list of {width:,} numbers."
            )
        odd = ~(values.reshape(-1).abs() <= LARGEST_EMBEDDING)
        if odd.any():
            column = int(odd.int().argmax())
            fields.within(
                f"{field}[{at}][{column}]",
                float(values.reshape(-1)[column]),
                -LARGEST_EMBEDDING,
                LARGEST_EMBEDDING,
            )
