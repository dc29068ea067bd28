"""Tiny models of the architectures that the product serves, made on the spot."""

from __future__ import annotations

from sglang_hybrid.models.architectures import ARCHITECTURES
from sglang_hybrid.models.tiny import (
    build_tiny_model,
    ensure_tiny_model,
    tiny_model_directory,
)
from sglang_hybrid.models.trained import TRAINED

__all__ = [
    "ARCHITECTURES",
    "TRAINED",
    "build_tiny_model",
    "ensure_tiny_model",
    "tiny_model_directory",
]
