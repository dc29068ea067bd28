"""Prompts that wait, in sorted order: which prefixes does one share with the others?

Sorted neighbours share the longest prefixes, so a prompt need only be compared with those next to
it, outwards, as long as they share enough.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, KeysView

import numpy as np
import numpy.typing as npt

TOKEN_BYTES = 4
NEIGHBOURS = 64  # that one prompt is compared with on either side


class PrefixOverlap:
    """Prompts by name. Only prompts of one `tenant` can share a prefix."""

    def __init__(self) -> None:
        self._prompts: dict[Hashable, tuple[Hashable, bytes]] = {}
        self._sorted: dict[Hashable, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._prompts

    def names(self) -> KeysView[Hashable]:
        """Those that wait."""
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
        insort(self._sorted.setdefault(tenant, []), key)

    def remove(self, name: Hashable) -> None:
        """It does not wait any more. Raises KeyError if it never did."""
        tenant, key = self._prompts.pop(name)
        keys = self._sorted[tenant]
        del keys[bisect_left(keys, key)]
        if not keys:
            del self._sorted[tenant]

    def shared(self, name: Hashable, at_least: int) -> list[int]:
        """Distinct lengths >= `at_least` of what `name` shares with others, ascending.

        Both have a token left behind a shared prefix, for the last one is always computed.
        """
        tenant, key = self._prompts[name]
        keys = self._sorted[tenant]
        own = bisect_left(keys, key)
        usable = len(key) // TOKEN_BYTES - 1
        after = range(own + 1, min(own + 1 + NEIGHBOURS, len(keys)))
        before = range(own - 1, max(own - 1 - NEIGHBOURS, -1), -1)
        lengths: set[int] = set()
        for neighbours in (after, before):
            same = usable
            prefix = key[: same * TOKEN_BYTES]  # neighbours share less and less of it
            for index in neighbours:
                other = keys[index]
                if not other.startswith(prefix):
                    same = common_prefix(prefix, other)
                same = min(same, len(other) // TOKEN_BYTES - 1)
                if len(prefix) > same * TOKEN_BYTES:
                    prefix = key[: same * TOKEN_BYTES]
                if same < at_least:
                    break
                lengths.add(same)
        return sorted(lengths)


def as_key(prompt: npt.ArrayLike) -> bytes:
    """Token ids [n] as bytes whose order keeps equal prefixes together."""
    return np.asarray(prompt).astype(np.uint32, copy=False).tobytes()


def common_prefix(one: bytes, other: bytes) -> int:
    """Tokens at which two keys begin alike."""
    count = min(len(one), len(other)) // TOKEN_BYTES
    if not count:
        return 0
    differs = np.frombuffer(one, np.uint32, count) != np.frombuffer(other, np.uint32, count)
    first = int(differs.argmax())
    return first if differs[first] else count
