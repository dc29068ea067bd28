"""The file of what the cache has learnt of its traffic, in the disk tier's folder.

The file is one object as `object_file.py` writes them: mode 0600, whole or not there, with a
checksum over the content and the identity of model and settings. The content is msgpack of the
dataclasses of core/returns (`history.LearntHistory`), with arrays as their bytes. It has parts: the
classes, and the answers of each tenant. A part that cannot be read costs no other part.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np

from sglang_hybrid.core.returns.answers import INTERVALS, AnswerModel, LearntAnswers
from sglang_hybrid.core.returns.feature_weights import FIRST_SQUARES
from sglang_hybrid.core.returns.hazards import BINS, CLASSES, SHAPE
from sglang_hybrid.core.returns.hint_record import HintRecord
from sglang_hybrid.core.returns.history import LearntHistory
from sglang_hybrid.core.returns.intervals import LearntCounts
from sglang_hybrid.core.returns.reuse import LearntClasses
from sglang_hybrid.extensions.disk.object_file import BadFile, read_single, write_single

KIND = "learnt"
CLASS_SHAPE = [*SHAPE, BINS]
"""Sizes of a reuse class's parts, and bins of age. Counts of other sizes mean something else."""

Content = TypeVar("Content")


@dataclass(frozen=True)
class _LearntContent:
    shape: list[int]
    learnt: LearntHistory


@dataclass(frozen=True)
class _Parts:
    """A `LearntHistory` whose parts may be anything."""

    classes: Any = None
    answers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _ContentInParts:
    shape: list[int]
    learnt: _Parts


def encode_arrays(content: object) -> bytes:
    """A dataclass of numbers, texts and arrays as msgpack; an array is its bytes."""
    return msgspec.msgpack.encode(content, enc_hook=np.ndarray.tobytes)


def decode_arrays(packed: bytes, kind: type[Content]) -> Content:
    """The object that `encode_arrays` was given, with flat arrays of the types that `kind` has.
    Raises BadFile for what is no such dataclass.
    """
    try:
        return msgspec.msgpack.decode(packed, type=kind, dec_hook=_array)
    except msgspec.DecodeError as error:
        raise BadFile("its content cannot be read") from error


def _decode_part(part: Any, kind: type[Content]) -> Content:
    """`decode_arrays` for what has been decoded without types."""
    try:
        return msgspec.convert(part, kind, dec_hook=_array)
    except msgspec.ValidationError as error:
        raise BadFile("a part of its content cannot be read") from error


def _array(kind: Any, content: bytes) -> np.ndarray[Any, Any]:
    """An array of type `kind`, `numpy.ndarray[shape, numpy.dtype[number]]`."""
    (number,) = get_args(get_args(kind)[1])
    return np.frombuffer(content, dtype=number)


def pack(learnt: LearntHistory) -> bytes:
    """`learnt` as bytes."""
    return encode_arrays(_LearntContent(CLASS_SHAPE, learnt))


def unpack(content: bytes) -> tuple[LearntHistory, int]:
    """The content that `pack` was given, as far as it can be read, and the number of parts that
    cannot. Nothing is believed that can be checked. Raises BadFile where nothing can be read.
    """
    whole = decode_arrays(content, _ContentInParts)
    classes, answers, unreadable = NO_CLASSES, {}, list[BadFile]()
    try:
        if whole.shape != CLASS_SHAPE:
            raise BadFile("it counts other classes")
        classes = checked_classes(_decode_part(whole.learnt.classes, LearntClasses))
    except BadFile as error:
        unreadable.append(error)
    for tenant, part in whole.learnt.answers.items():
        try:
            answers[tenant] = _checked_answers(_decode_part(part, LearntAnswers))
        except BadFile as error:
            unreadable.append(error)
    if len(unreadable) == 1 + len(whole.learnt.answers):
        raise unreadable[0]
    return LearntHistory(classes, answers), len(unreadable)


def checked_classes(flat: LearntClasses) -> LearntClasses:
    """Classes as `decode_arrays` has them, with their counts by bin. Raises BadFile for classes
    that are unknown or out of order, and for counts that are no counts of them.
    """
    classes = flat.classes
    try:
        sound = len(classes) == 0 or (classes[0] >= 0 and classes[-1] < CLASSES)
        _demand(sound and bool((np.diff(classes) > 0).all()))
        return LearntClasses(
            classes, _counts(flat.long, len(classes)), _counts(flat.short, len(classes))
        )
    except (ValueError, OverflowError) as error:
        raise BadFile("its content contradicts itself") from error


def _no_counts() -> LearntCounts:
    none = np.zeros((0, BINS))
    return LearntCounts(np.zeros(0, dtype=np.int64), none, none)


NO_CLASSES = LearntClasses(np.zeros(0, dtype=np.int64), _no_counts(), _no_counts())


def _demand(true: bool) -> None:
    if not true:
        raise ValueError


def _demand_numbers(values: Any, count: int, least: float) -> None:
    """`values` are so many finite numbers, none below `least`."""
    found = np.asarray(values, dtype=np.float64)
    _demand(found.size == count and bool(np.isfinite(found).all() and (found >= least).all()))


def _counts(flat: LearntCounts, classes: int) -> LearntCounts:
    _demand_numbers(flat.begun, classes, 0)
    for one in (flat.ended, flat.unended):
        _demand_numbers(one, classes * BINS, 0)
    shape = (classes, BINS)
    return replace(flat, ended=flat.ended.reshape(shape), unended=flat.unended.reshape(shape))


def _checked_answers(answers: LearntAnswers) -> LearntAnswers:
    """`answers`, if they are what a model can have learnt. Raises BadFile."""
    try:
        _check_answers(answers)
    except (ValueError, OverflowError) as error:
        raise BadFile("its content contradicts itself") from error
    return answers


def _check_answers(answers: LearntAnswers) -> None:
    count = len(answers.features)
    _demand(bool((answers.features[1:] > answers.features[:-1]).all()))
    _demand(len(answers.intervals) <= INTERVALS)
    _demand_numbers(answers.weights, count, -np.inf)
    _demand_numbers(answers.squares, count, 0.99 * FIRST_SQUARES)
    _demand_numbers(answers.intervals, len(answers.intervals), 0)
    _demand(len(answers.numbers) == len(AnswerModel.NUMBERS) + 2)
    numbers = dict(zip(AnswerModel.NUMBERS, answers.numbers, strict=False))
    _demand(numbers.pop("_patience") >= 0)  # it may be infinite
    _demand_numbers(list(numbers.values()), len(numbers), -np.inf)
    _demand(numbers["_bias_squares"] >= 0.99 * FIRST_SQUARES and numbers["_weight"] >= 0)
    _demand(0 <= numbers["_share"] <= 1)
    _demand_numbers(answers.numbers[-2:], 2, 0)
    HintRecord().restore(answers.hints)


def save(path: Path, identity: str, learnt: LearntHistory, written: float) -> int:
    """Write `learnt`; returns the bytes of the file. Raises OSError."""
    return write_single(path, identity, KIND, pack(learnt), written)


def load(path: Path, identity: str) -> bytes | None:
    """The packed content of the file, None if there is no file. Raises BadFile for a file that is
    not whole or belongs to something else; OSError.
    """
    return read_single(path, identity, KIND)
