"""Values as error sentences show them, and lines as programs print them."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final, TextIO

LONGEST_NUMBER: Final = 200
"""Bits of a number that a sentence shows."""

MOST_SUGGESTED: Final = 3
"""Names that a sentence offers in the place of one that is unknown."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxlist = _short.maxdict = 4


def quote(value: object) -> str:
    """`value` as Python writes it, shortened."""
    if isinstance(value, int) and value.bit_length() > LONGEST_NUMBER:
        return f"a number of {value.bit_length():,} bits"
    return _short.repr(value)


def suggest(name: str, names: Iterable[str], like: float = 0.6) -> str:
    """The end of a sentence about a name that is none of `names`, as " (did you mean lru?)": what
    it is short for, or else the one that is most like it; "" if none is.

    like: of 1, how much two names must be alike (`difflib.SequenceMatcher.ratio`).
    """
    known = list(names)
    longer = [each for each in known if each.startswith(name)]
    near = longer if 0 < len(longer) <= MOST_SUGGESTED else get_close_matches(name, known, 1, like)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def escape(text: object) -> str:
    """`text` on one line: line ends, control characters, and whatever else does not print, are
    written as Python writes them (`\\n`, `\\x1b`), so that they do nothing to a terminal or a log.
    """
    line = str(text)
    if line.isprintable():
        return line
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)


def print_line(line: object, file: TextIO | None = None) -> None:
    """Print one line for a person, on stdout by default: `escape`, whatever files, servers and
    clients put into it.
    """
    print(escape(line), file=sys.stdout if file is None else file, flush=True)
