"""Tiny models of the architectures that the product serves, made on the spot.

The modules that make the models are loaded when one is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_hybrid.extensions.cpu.models.tiny import (
        ARCHITECTURES,
        build_tiny_model,
        ensure_tiny_model,
        tiny_model_directory,
    )

__all__ = [
    "ARCHITECTURES",
    "build_tiny_model",
    "ensure_tiny_model",
    "tiny_model_directory",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sglang_hybrid.extensions.cpu.models import tiny

    return getattr(tiny, name)
