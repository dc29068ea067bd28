"""Grammars that were compiled for requests, within a bound on their memory."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Final

MOST: Final = 1_024
MOST_BYTES: Final = 512 << 20
"""What is kept for later requests: grammars, and bytes of them."""


def keep_within(cache: MutableMapping[Any, Any]) -> None:
    """Drop the oldest grammars of `cache` beyond the bounds, but for the newest one."""
    sizes = [_bytes(grammar) for grammar in cache.values()]
    held = sum(sizes)
    for key, size in zip(list(cache)[:-1], sizes, strict=False):
        if len(cache) <= MOST and held <= MOST_BYTES:
            return
        del cache[key]
        held -= size


def _bytes(grammar: Any) -> int:
    """Of a grammar of xgrammar, which says so; 0 of others."""
    return int(getattr(getattr(grammar, "ctx", None), "memory_size_bytes", 0))
