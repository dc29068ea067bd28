"""Grammars that were compiled for requests, within a bound on their memory."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, Final

MOST: Final = 1_024
MOST_BYTES: Final = 512 << 20
"""Bounds on what is kept for later requests: grammars, and bytes of them."""


class Grammars(MutableMapping[Any, Any]):
    """Compiled grammars by the kind and the text of what they were compiled from. Beyond the bounds
    the oldest ones go, but for the newest one. Each is measured once, with its text: that takes a
    large one half a millisecond.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[Any, int]] = {}
        self._bytes = 0

    def __getitem__(self, key: Any) -> Any:
        return self._kept[key][0]

    def __setitem__(self, key: Any, grammar: Any) -> None:
        self.pop(key, None)
        size = _bytes(grammar) + sum(map(len, key))
        self._kept[key] = grammar, size
        self._bytes += size
        while len(self) > MOST or (self._bytes > MOST_BYTES and len(self) > 1):
            del self[next(iter(self))]

    def __delitem__(self, key: Any) -> None:
        self._bytes -= self._kept.pop(key)[1]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


def _bytes(grammar: Any) -> int:
    """Bytes of a grammar of xgrammar, which says so; 0 of others."""
    return int(getattr(getattr(grammar, "ctx", None), "memory_size_bytes", 0))
