"""Tiny models of the architectures that the product serves, made on the spot.

The names are there at once; what makes the models is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sglang_hybrid.models.tiny import (
        ARCHITECTURES,
        build_tiny_model,
        ensure_tiny_model,
        tiny_model_directory,
    )

__all__ = [
    "ARCHITECTURES",
    "NAMES",
    "TRAINED",
    "build_tiny_model",
    "ensure_tiny_model",
    "tiny_model_directory",
]

TRAINED: Final = "trained"
"""The model whose weights are in this package."""

NAMES: Final = (
    *("falcon-h1", "falcon-mamba", "gigachat-3.5", "glm-5-next", "granite-hybrid", "jet-nemotron"),
    *("kimi-linear", "lfm2", "lfm2-moe", "ling-2.5", "ling-3", "mamba2", "minicpm-sala"),
    *("nemotron-3", "nemotron-h", "qwen3-next", "qwen3.5", "qwen3.5-vl", "qwen4-exp"),
    *("transformer", "zaya"),
)
"""The others (`ARCHITECTURES`), in alphabetical order."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sglang_hybrid.models import tiny

    return getattr(tiny, name)
