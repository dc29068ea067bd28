"""Values as error sentences show them, and lines as programs print them."""

from __future__ import annotations

import reprlib
import sys
from typing import Final, TextIO

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


def plain(text: object) -> str:
    """`text` on one line: line ends, control characters, and whatever else does not print, are
    written as Python writes them (`\\n`, `\\x1b`), so that they do nothing to a terminal or a log.
    """
    said = str(text)
    if said.isprintable():
        return said
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in said)


def say(line: object, file: TextIO | None = None) -> None:
    """Print one line for a person, on stdout by default: `plain`, whatever files, servers and
    clients put into it.
    """
    print(plain(line), file=sys.stdout if file is None else file, flush=True)
