"""Finds the token of a prompt at which a block of a chat ends.

A block's end is found by changing what comes after it: the prompt is rendered again with the block
continued, and the text that both renderings share ends where the block does. That holds for any
chat template. The token position is the last one at that place or before it which stays a boundary
between tokens however the text goes on.
"""

from __future__ import annotations

import string
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_hybrid.serving.requests.encoded_pieces import cut_places

MARK = "\ue000"
"""The continuation of a block: a character for private use, which no template writes."""

BLANKS = (" a", "   a", "\n", "\n\n\na", " \n")
CONTINUATIONS = (MARK, "a", "é", "1", "'s", *BLANKS, *string.punctuation)
"""Continuations of text after a block: each may merge with other tokens before it."""

AHEAD = 64
"""Characters behind the deepest place that are tokenized, so that its last tokens are the
prompt's."""

WINDOW = 32
"""Tokens before a place that are tokenized again with another continuation."""

AGREED = 8
"""Tokens before a position that must come out the same."""

MOST_BLANKS = 256
"""Blanks at the end of a block, which are tokenized again with each continuation."""


@dataclass(frozen=True)
class BlockEnd:
    """The end of a block.

    variants: the prompt as rendered with other things behind that end. open_ended: another block's
    text may follow directly, and not what the template puts behind a message.
    """

    variants: Sequence[str]
    open_ended: bool


def common_start(one: str, other: str) -> int:
    """The number of characters that two texts share at their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def token_positions(
    tokenizer: Any,
    encode_kwargs: Mapping[str, Any],
    text: str,
    ids: Sequence[int],
    places: Sequence[BlockEnd],
) -> list[int | None]:
    """The position of each place in `ids` [n], the tokens of `text`: tokens before it; None where
    that is not known.

    tokenizer: a fast one of transformers; any other tells no offsets, so nothing is known.
    encode_kwargs: with which `text` was tokenized.
    """
    if not getattr(tokenizer, "is_fast", False):
        return [None] * len(places)
    ends = [_end(text, place) for place in places]
    cuts = cut_places(tokenizer, text, encode_kwargs, ids)
    found: list[int | None] = []
    for place, end in zip(places, ends, strict=True):
        position = None
        if end is not None:
            tokens = _Tokens.before(end, tokenizer, encode_kwargs, text, cuts)
            following = CONTINUATIONS if place.open_ended else ()
            others = [variant[end : end + AHEAD] for variant in place.variants]
            # Blanks at the end may become a part of those that follow, however many these are.
            most = len(text[:end].rstrip()) if place.open_ended else end
            if end - most <= MOST_BLANKS:
                position = tokens.last_boundary(end, most, [*others, *following])
        if position is not None and not (0 < position < len(ids) and tokens.equals(ids, position)):
            position = None
        found.append(position)
    return found


def with_images(
    ids: Sequence[int], expanded: Sequence[int], positions: Sequence[int]
) -> dict[int, int]:
    """The places in `expanded` [m] of `positions` in `ids` [n]. In `ids` one token stands for an
    image; in `expanded` the same token stands there as often as the image has tokens. Those behind
    a place where the two differ otherwise are left out.
    """
    found: dict[int, int] = {}
    at, last = 0, max(positions, default=0)
    pairs = zip(ids[:last], [*ids[1 : last + 1], None], strict=False)
    for index, (token, following) in enumerate(pairs):
        if at >= len(expanded) or expanded[at] != token:
            break
        at += 1
        while following != token and at < len(expanded) and expanded[at] == token:
            at += 1
        found[index + 1] = at
    return {position: found[position] for position in positions if position in found}


def _end(text: str, place: BlockEnd) -> int | None:
    """Characters of `text` before the end of a block; None if no variant differs from `text`."""
    shared = min((common_start(text, variant) for variant in place.variants), default=len(text))
    return shared if shared < len(text) else None


class _Tokens:
    """Tokens of a text, and the characters that each covers: from `start` on, characters and tokens
    before an added token at which the text may be cut, or all.
    """

    def __init__(
        self,
        tokenizer: Any,
        encode_kwargs: Mapping[str, Any],
        text: str,
        start: tuple[int, int] = (0, 0),
    ) -> None:
        self._tokenizer = tokenizer
        self._character, self._token = start
        self._text = text[self._character :]
        kwargs = encode_kwargs if start == (0, 0) else {"add_special_tokens": False}
        self.ids, self._offsets = self._encode(self._text, kwargs)
        self._ends = np.array([end for _, end in self._offsets], np.int64)

    @classmethod
    def before(
        cls,
        place: int,
        tokenizer: Any,
        encode_kwargs: Mapping[str, Any],
        text: str,
        cuts: Sequence[tuple[int, int]],
    ) -> _Tokens:
        """The tokens around character `place` of `text`, from an added token so far before it that
        what is before that does not matter.
        """
        behind = bisect_right(cuts, place, key=lambda cut: cut[0])
        near = cuts[behind - 1][1] if behind else 0
        first = bisect_right(cuts, near - WINDOW, key=lambda cut: cut[1])
        start = cuts[first - 1] if first else (0, 0)
        return cls(tokenizer, encode_kwargs, text[: place + AHEAD], start)

    def equals(self, ids: Sequence[int], position: int) -> bool:
        """True if the tokens before `position` are those of `ids`."""
        return self.ids[: position - self._token] == list(ids[self._token : position])

    def last_boundary(self, place: int, most: int, continuations: Sequence[str]) -> int | None:
        """The most tokens that end at character `most` or before it whatever follows at character
        `place`.
        """
        beyond = np.flatnonzero(self._ends > most - self._character)
        last = int(beyond[0]) if beyond.size else len(self.ids)
        for position in range(last, max(0, last - AGREED), -1):
            if all(self._agrees(position, place - self._character, text) for text in continuations):
                return self._token + position
        return None

    def _agrees(self, position: int, place: int, continuation: str) -> bool:
        """True if the tokens before `position` are the same where `continuation` follows."""
        first = max(0, position - WINDOW)
        start = self._offsets[first][0]
        ids, offsets = self._encode(
            self._text[start:place] + continuation, {"add_special_tokens": False}
        )
        here = self._offsets[position - 1][1] - start
        at = max((at + 1 for at, (_, end) in enumerate(offsets) if end <= here), default=0)
        if not at or offsets[at - 1][1] != here:
            return False
        count = min(AGREED, at, position)
        return ids[at - count : at] == self.ids[position - count : position]

    def _encode(
        self, text: str, kwargs: Mapping[str, Any]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        found = self._tokenizer(text, return_offsets_mapping=True, **kwargs)
        return list(found["input_ids"]), list(found["offset_mapping"])
