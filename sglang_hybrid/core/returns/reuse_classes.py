"""The classes of positions in the reuse index: positions of one class are taken to return alike."""

from __future__ import annotations

from typing import Final

from sglang_hybrid.core.returns.answers import BUCKETS as ANSWERS

# Features of a class: children none/one/many; depth to 64 tokens, 128, .. more than 64 Ki; what the
# answer says (core/returns/answers.py); bucket of the interval that ended before: none, or in steps of
# four; turn 0 .. 6 and more.
SHAPE: Final = (3, 12, ANSWERS, 9, 7)
CHILDREN, DEPTHS, _, INTERVAL_BUCKETS, TURNS = SHAPE
CLASSES: Final = CHILDREN * DEPTHS * ANSWERS * INTERVAL_BUCKETS * TURNS
PER_ANSWER: Final = INTERVAL_BUCKETS * TURNS
NEVER_REUSED: Final = CLASSES  # the class of what is never resumed


def reuse_class_of(
    children: int, depth: int, turn: int, interval_bucket: int = 0, answer: int = 0
) -> int:
    """Class of a position.

    children: of its node. depth: tokens from the root. turn: sequence ends on its path.
    interval_bucket: `ReuseIndex.interval_bucket` of the interval that ended before, 0 if none did.
    answer: `Answer.bucket` of the answer at the position, 0 if nothing is expected.
    """
    shape = (min(children, 2) * DEPTHS + depth_bucket(depth)) * ANSWERS + answer
    return (shape * INTERVAL_BUCKETS + interval_bucket) * TURNS + min(turn, TURNS - 1)


def depth_bucket(depth: int) -> int:
    """0 for up to 64 tokens from the root, 1 for up to 128, and so on to DEPTHS - 1."""
    return min(max((depth - 1).bit_length() - 6, 0), DEPTHS - 1)
