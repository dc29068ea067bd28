"""Prompts that wait, in sorted order: which prefixes does one share with the others?

Sorted neighbours share the longest prefixes. So a prompt is compared with the two next to it, once,
and what it shares with those behind them is the least of what neighbours on the way share.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, KeysView

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.records.edges import common_bytes

TOKEN_BYTES = 4
NEIGHBOURS = 64  # that one prompt is compared with on either side


class PrefixOverlap:
    """Prompts by name. Only prompts of one `tenant` can share a prefix."""

    def __init__(self) -> None:
        self._prompts: dict[Hashable, tuple[Hashable, bytes]] = {}
        self._sorted: dict[Hashable, SortedKeys] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._prompts

    def names(self) -> KeysView[Hashable]:
        """Names of the prompts that were added and not removed."""
        return self._prompts.keys()

    def add(self, name: Hashable, prompt: npt.ArrayLike, tenant: Hashable = None) -> None:
        """`prompt` [n] token ids waits from now on. Raises ValueError for a name that waits
        already.
        """
        self.add_key(name, as_key(prompt), tenant)

    def add_key(self, name: Hashable, key: bytes, tenant: Hashable = None) -> None:
        """The same for a prompt of which `as_key` is known."""
        if name in self._prompts:
            raise ValueError(f"{name!r} waits already")
        self._prompts[name] = (tenant, key)
        self._sorted.setdefault(tenant, SortedKeys()).add(name, key)

    def remove(self, name: Hashable) -> None:
        """Remove a prompt that does not wait any more. Raises KeyError if it never did."""
        tenant, _ = self._prompts.pop(name)
        self._sorted[tenant].remove(name)
        if not self._sorted[tenant].keys:
            del self._sorted[tenant]

    def shared(self, name: Hashable, at_least: int) -> list[int]:
        """Distinct lengths >= `at_least` of what `name` shares with others, ascending.

        Both have a token left behind a shared prefix, for the last one is always computed.
        """
        tenant, key = self._prompts[name]
        keys, common = self._sorted[tenant].keys, self._sorted[tenant].common
        own = self._sorted[tenant].names.index(name)
        usable = len(key) // TOKEN_BYTES - 1
        lengths: set[int] = set()
        same = usable
        for index in range(own + 1, min(own + 1 + NEIGHBOURS, len(keys))):
            same = min(same, common[index - 1], len(keys[index]) // TOKEN_BYTES - 1)
            if same < at_least:
                break
            lengths.add(same)
        same = usable
        for index in range(own - 1, max(own - 1 - NEIGHBOURS, -1), -1):
            same = min(same, common[index], len(keys[index]) // TOKEN_BYTES - 1)
            if same < at_least:
                break
            lengths.add(same)
        return sorted(lengths)


class SortedKeys:
    """Keys in order, and whose they are. common: tokens at which each key and the next one begin
    alike [n - 1].

    A key is found by its name where that is known: to search for it would compare long prefixes.
    """

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.names: list[Hashable] = []
        self.common: list[int] = []

    def add(self, name: Hashable, key: bytes) -> None:
        """Add a key; equal ones may be there."""
        at = bisect_left(self.keys, key)
        before, after = self.keys[max(at - 1, 0) : at], self.keys[at : at + 1]
        self.keys.insert(at, key)
        self.names.insert(at, name)
        beside = [common_prefix(key, other) for other in (*before, *after)]
        self.common[max(at - 1, 0) : at] = beside

    def longest(self, key: bytes) -> int:
        """Tokens of the longest prefix that `key` has in common with any of these."""
        at = bisect_left(self.keys, key)
        beside = self.keys[max(at - 1, 0) : at + 1]
        return max((common_prefix(key, other) for other in beside), default=0)

    def remove(self, name: Hashable) -> None:
        """Remove the key of `name`, which must be there."""
        at = self.names.index(name)
        del self.keys[at], self.names[at]
        beside = self.common[max(at - 1, 0) : at + 1]
        self.common[max(at - 1, 0) : at + 1] = [min(beside)] if len(beside) == 2 else []


def as_key(prompt: npt.ArrayLike) -> bytes:
    """Token ids [n] as bytes whose order keeps equal prefixes together."""
    return np.asarray(prompt).astype(np.uint32, copy=False).tobytes()


def common_prefix(one: bytes, other: bytes) -> int:
    """The number of tokens that two keys begin with alike."""
    return common_bytes(one, other, 0) // TOKEN_BYTES
