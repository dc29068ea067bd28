"""Values as error sentences show them."""

from __future__ import annotations

import reprlib
from typing import Final

LONGEST_NUMBER: Final = 200
"""Bits of a number that a sentence shows."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxlist = _short.maxdict = 4


def shown(value: object) -> str:
    """`value` as Python writes it, shortened."""
    if isinstance(value, int) and value.bit_length() > LONGEST_NUMBER:
        return f"a number of {value.bit_length():,} bits"
    return _short.repr(value)
