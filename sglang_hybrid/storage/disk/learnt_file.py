"""What the cache has learnt of its traffic, as a file in the disk tier's folder.

The file is one object as `object_file.py` writes them: mode 0600, whole or not there, with a
checksum over the content and the identity of model and settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sglang_hybrid.core.returns.answers import (
    FIRST_SQUARES,
    INTERVALS,
    WEIGHT_BITS,
    AnswerModel,
    LearntAnswers,
)
from sglang_hybrid.core.returns.hazards import BINS, CLASSES, SHAPE
from sglang_hybrid.core.returns.hint_record import HintRecord
from sglang_hybrid.core.returns.history import Learnt
from sglang_hybrid.core.returns.intervals import LearntCounts
from sglang_hybrid.core.returns.reuse import LearntClasses
from sglang_hybrid.storage.disk.object_file import BadFile, read_single, write_single

KIND = "learnt"


class _Counts(msgspec.Struct, array_like=True):
    begun: bytes
    ended: bytes
    unended: bytes


class _Answers(msgspec.Struct, array_like=True):
    features: bytes
    weights: bytes
    squares: bytes
    numbers: list[float]
    intervals: list[float]
    hints: list[float]


class _LearntContent(msgspec.Struct):
    """shape: of the classes, and bins of age; other ones mean something else."""

    shape: list[int]
    classes: bytes
    long: _Counts
    short: _Counts
    answers: dict[str, _Answers]


def pack(learnt: Learnt) -> bytes:
    """`learnt` as bytes."""
    classes = learnt.classes
    answers = {
        name: _Answers(
            *(one.features.tobytes(), one.weights.tobytes(), one.squares.tobytes()),
            *(one.numbers, one.intervals, one.hints),
        )
        for name, one in learnt.answers.items()
    }
    long, short = (
        _Counts(one.begun.tobytes(), one.ended.tobytes(), one.unended.tobytes())
        for one in (classes.long, classes.short)
    )
    content = _LearntContent([*SHAPE, BINS], classes.classes.tobytes(), long, short, answers)
    return msgspec.msgpack.encode(content)


def unpack(content: bytes) -> Learnt:
    """What `pack` was given. Nothing of it is believed that can be checked. Raises BadFile."""
    try:
        it = msgspec.msgpack.decode(content, type=_LearntContent)
    except msgspec.DecodeError as error:
        raise BadFile("its content cannot be read") from error
    if it.shape != [*SHAPE, BINS]:
        raise BadFile("it counts other classes")
    try:
        classes = np.frombuffer(it.classes, dtype=np.int64)
        sound = len(classes) == 0 or (classes[0] >= 0 and classes[-1] < CLASSES)
        _demand(sound and bool((np.diff(classes) > 0).all()))
        long, short = (_counts(one, len(classes)) for one in (it.long, it.short))
        answers = {name: _answers(one) for name, one in it.answers.items()}
    except (ValueError, OverflowError) as error:
        raise BadFile("its content contradicts itself") from error
    return Learnt(LearntClasses(classes, long, short), answers)


def _demand(true: bool) -> None:
    if not true:
        raise ValueError


def _numbers(values: Any, count: int, least: float) -> None:
    """`values` are so many finite numbers, none below `least`."""
    found = np.asarray(values, dtype=np.float64)
    _demand(found.size == count and bool(np.isfinite(found).all() and (found >= least).all()))


def _counts(packed: _Counts, classes: int) -> LearntCounts:
    begun = np.frombuffer(packed.begun, dtype=np.int64)
    _numbers(begun, classes, 0)
    ended, unended = (
        np.frombuffer(one, dtype=np.float64) for one in (packed.ended, packed.unended)
    )
    for one in (ended, unended):
        _numbers(one, classes * BINS, 0)
    return LearntCounts(begun, ended.reshape(classes, BINS), unended.reshape(classes, BINS))


def _answers(packed: _Answers) -> LearntAnswers:
    features = np.frombuffer(packed.features, dtype=np.uint16)
    weights, squares = (
        np.frombuffer(one, dtype=np.float32) for one in (packed.weights, packed.squares)
    )
    _demand(len(features) <= 1 << WEIGHT_BITS and len(packed.intervals) <= INTERVALS)
    _numbers(weights, len(features), -np.inf)
    _numbers(squares, len(features), 0.99 * FIRST_SQUARES)
    _numbers(packed.intervals, len(packed.intervals), 0)
    numbers, patience = list(packed.numbers), AnswerModel.NUMBERS.index("_patience")
    known = len(AnswerModel.NUMBERS) + 2
    _demand(len(numbers) == known and numbers[patience] > 0)  # it may be infinite
    _numbers([n for at, n in enumerate(numbers) if at != patience], known - 1, -np.inf)
    _demand(numbers[1] >= 0.99 * FIRST_SQUARES and min(numbers[-2:]) >= 0)
    _demand(0 <= numbers[AnswerModel.NUMBERS.index("_share")] <= 1)
    _numbers(packed.hints, len(HintRecord().as_list()), -np.inf)
    HintRecord().restore(packed.hints)
    return LearntAnswers(features, weights, squares, numbers, packed.intervals, packed.hints)


def save(path: Path, identity: str, learnt: Learnt, written: float) -> int:
    """Write `learnt`; returns its bytes. Raises OSError."""
    return write_single(path, identity, KIND, pack(learnt), written)


def load(path: Path, identity: str) -> bytes | None:
    """The packed content of the file, None if there is none. Raises BadFile for one that is not
    whole or belongs to something else; OSError.
    """
    content = read_single(path, identity, KIND)
    if content is not None:
        unpack(content)
    return content
