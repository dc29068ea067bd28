"""The part of a model directory that an architecture contributes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from sglang_hybrid.extensions.cpu.models.tokenizer import BOS, EOS, PAD, SPECIAL_TOKENS, VOCAB_SIZE
from sglang_hybrid.extensions.cpu.models.weights import Weights

Scale = Literal["tiny", "25m", "100m", "8b"]

MAX_LENGTH = 32768
"""Positions that every tiny model claims to support."""

BASE_CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_LENGTH,
    "pad_token_id": SPECIAL_TOKENS.index(PAD),
    "bos_token_id": SPECIAL_TOKENS.index(BOS),
    "eos_token_id": SPECIAL_TOKENS.index(EOS),
    "use_cache": True,
}
"""Keys that mean the same in every ``config.json``."""


@dataclass(frozen=True)
class Model:
    """The content of ``config.json`` and ``model.safetensors``; no weights for a scale that is
    served with ``--load-format dummy``. ``files`` are other JSON files, by name.
    """

    config: dict[str, Any]
    weights: Weights | None
    files: dict[str, dict[str, Any]] = field(default_factory=dict)


Architecture = Callable[[int, Scale], Model]
"""Makes a model from a seed and a scale; raises ``ValueError`` for a scale it does not have."""


def tiny_only(name: str, scale: Scale) -> None:
    """Raises ``ValueError`` for a scale other than "tiny"."""
    if scale != "tiny":
        raise ValueError(f"The architecture {name!r} has no scale {scale!r}; use 'tiny'.")
