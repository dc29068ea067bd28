"""Rules for the values of single fields: numbers in a range, token ids. Knows nothing of SGLang.

Each function raises ValueError with a sentence that names the field, its value and its range.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sglang_hybrid.core.sentences import quote

INT64 = 1 << 63
INT32 = 1 << 31


def within(field: str, value: float, least: float, most: float) -> None:
    """Check that `value` is a number from `least` to `most`."""
    if not least <= value <= most:
        raise ValueError(
            f"{field} is {quote(value)}; it must be from {_number(least)} to {_number(most)}."
        )


def token_ids(field: str, ids: Sequence[int], vocabulary: int) -> None:
    """Check that `ids` [n] are tokens of a vocabulary of so many."""
    if not len(ids):  # as most lists of a request are
        return
    try:
        held = array("q", ids)
    except (TypeError, OverflowError):
        at = next(i for i, token in enumerate(ids) if not is_int64(token))
    else:
        numbers = np.frombuffer(held, np.int64)
        bad = (numbers < 0) | (numbers >= vocabulary)
        if not bad.any():
            return
        at = int(bad.argmax())
    raise ValueError(
        f"{field}[{at}] is {quote(ids[at])}; a token id of this model is a whole number from 0 to "
        f"{vocabulary - 1}."
    )


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def is_int64(value: object) -> bool:
    """True for a whole number of 64 bits."""
    return isinstance(value, int) and -INT64 <= value < INT64


def check_single(request: Any, names: Iterable[str], by: str) -> None:
    """Raise ValueError if one of these fields is a list, as a batch has it. by: what the request
    has that is for one prompt.
    """
    for name in names:
        if isinstance(getattr(request, name), list):
            raise ValueError(f"{name} is a list; a request with {by} has one prompt.")
