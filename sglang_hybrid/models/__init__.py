"""Tiny models of the architectures that the product serves, made on the spot from a seed."""

from __future__ import annotations

from sglang_hybrid.models.architectures import ARCHITECTURES
from sglang_hybrid.models.tiny import (
    build_tiny_model,
    default_model_directory,
    ensure_default_model,
)

__all__ = [
    "ARCHITECTURES",
    "build_tiny_model",
    "default_model_directory",
    "ensure_default_model",
]
