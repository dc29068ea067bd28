"""The common parts of two prompts beyond their beginning: blocks of equal tokens, wherever they
stand in each.

Runs of 16 tokens are hashed at every position, and one hash in eight is an anchor; which ones is
decided by the hash itself, so equal text has equal anchors (winnowing: Schleimer, Wilkerson, Aiken,
SIGMOD 2003). An anchor that two prompts share is extended to the block around it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.records.edges import common_prefix
from sglang_hybrid.core.traffic.requests import TokenArray

Hashes = npt.NDArray[np.uint64]

RUN = 16
"""Tokens of an anchor; a shorter block is not found."""

ONE_IN = 8
"""Runs of which one is an anchor."""

GRID = 16
"""Tokens between two known prefixes; a longest one is looked for on this grid, then exactly."""

_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))


@dataclass(frozen=True)
class EqualBlock:
    """Equal tokens: from `here` on in a prompt, from `there` on in an earlier one. anchor: the hash
    of its first anchor, which is the same wherever the block stands.
    """

    here: int
    there: int
    length: int
    anchor: int

    @property
    def end(self) -> int:
        return self.here + self.length


@dataclass(frozen=True)
class Alignment:
    """A prompt beside the earlier one that it has most in common with. shared: tokens of the
    longest beginning that any earlier prompt shares. blocks: beyond it, in the prompt's order.
    """

    shared: int
    blocks: tuple[EqualBlock, ...]


class Aligner:
    """The prompts of one tenant, in order of arrival; each is compared with those before it."""

    def __init__(self) -> None:
        self._sequences: list[TokenArray] = []
        self._prefixes: dict[int, int] = {}
        self._anchors: dict[int, tuple[int, int]] = {}

    def add(self, prompt: TokenArray, answer: TokenArray) -> Alignment:
        """The common parts of a prompt [n] and earlier ones; it is one of those from now on, with
        its answer behind it.
        """
        hashes = _prefix_hashes(prompt)
        shared = self._longest(prompt, hashes)
        at, anchors = _anchors_of(hashes)
        found = self._alignment(prompt, shared, at, anchors)
        whole = np.concatenate([prompt, answer])
        number = len(self._sequences)
        self._sequences.append(whole)
        every = hashes if not len(answer) else _prefix_hashes(whole)
        for position in range(shared - shared % GRID + GRID, len(whole) + 1, GRID):
            self._prefixes[int(every[position])] = number
        self._anchors.update(
            (int(one), (number, int(where))) for where, one in zip(at, anchors, strict=True)
        )
        return found

    def _longest(self, prompt: TokenArray, hashes: Hashes) -> int:
        low, high = 0, len(prompt) // GRID
        while low < high:
            middle = (low + high + 1) // 2
            if int(hashes[middle * GRID]) in self._prefixes:
                low = middle
            else:
                high = middle - 1
        if not low:
            return max((common_prefix(prompt, one) for one in self._sequences[-1:]), default=0)
        return common_prefix(prompt, self._sequences[self._prefixes[int(hashes[low * GRID])]])

    def _alignment(
        self, prompt: TokenArray, shared: int, at: npt.NDArray[np.intp], anchors: Hashes
    ) -> Alignment:
        beyond = at >= shared
        known = [
            (int(here), int(anchor), *self._anchors[int(anchor)])
            for here, anchor in zip(at[beyond], anchors[beyond], strict=True)
            if int(anchor) in self._anchors
        ]
        if not known:
            return Alignment(shared, ())
        ((number, _),) = Counter(number for _, _, number, _ in known).most_common(1)
        earlier = self._sequences[number]
        blocks: list[EqualBlock] = []
        end = shared
        for here, anchor, where, there in known:
            if where != number or here < end:
                continue
            back = min(here - end, there)
            same = common_prefix(
                prompt[here - back : here][::-1], earlier[there - back : there][::-1]
            )
            length = same + common_prefix(prompt[here:], earlier[there:])
            blocks.append(EqualBlock(here - same, there - same, length, anchor))
            end = here - same + length
        return Alignment(shared, tuple(blocks))


def _prefix_hashes(tokens: TokenArray) -> Hashes:
    """[n + 1], of the first 0, 1, ... tokens: a polynomial modulo 2^64 of mixed tokens."""
    mixed = (tokens.astype(np.int64).view(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    powers = np.full(len(tokens), _BASE, np.uint64)
    found = np.zeros(len(tokens) + 1, np.uint64)
    np.cumsum(mixed * np.cumprod(powers, dtype=np.uint64), out=found[1:])
    return found


def _anchors_of(prefixes: Hashes) -> tuple[npt.NDArray[np.intp], Hashes]:
    """Positions and hashes of the anchors of a prompt with these hashes of its prefixes."""
    if len(prefixes) <= RUN:
        return np.zeros(0, np.intp), np.zeros(0, np.uint64)
    runs = prefixes[RUN:] - prefixes[:-RUN]
    runs *= np.cumprod(np.full(len(runs), _INVERSE, np.uint64), dtype=np.uint64)
    runs ^= runs >> np.uint64(32)
    runs *= np.uint64(0x94D049BB133111EB)
    runs ^= runs >> np.uint64(29)
    at = np.flatnonzero(runs % np.uint64(ONE_IN) == 0)
    return at, runs[at]
