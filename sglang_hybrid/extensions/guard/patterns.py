"""Regular expressions of clients: those that end an answer, and those that an answer follows.

Patterns that end an answer (`stop_regex`) are matched in time that grows with the text only.
SGLang matches them with Python's `re` at each step, in the scheduler: one that goes back and forth,
as `(a+)+b`, holds up all requests, for hours with 250 characters. RE2 has no such patterns
(https://github.com/google/re2/wiki/WhyRE2); it has no look-around and no references to groups.
SGLang reads the pattern as Python's, to know how long a match may be, so it has to be one of both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

import re2

from sglang_hybrid.core.sentences import quote

MOST_BYTES: Final = 2 << 20
KEPT: Final = 512
"""Memory of one compiled pattern at most, and how many are kept for the next step."""

MOST_INSTRUCTIONS: Final = 2_048
"""Instructions of RE2's programs for all patterns of a request. A step takes up to 8 ns for each
and each character that a match may reach: `(a|b){1000}c` has 3,005, `.{0,100}User:` 909.
"""

VALUES: Final = ("const", "enum", "default", "examples")
"""Keywords of a JSON schema that hold values, and no further schemas."""

LINE_ENDS: Final = {"\n": "\\n", "\r": "\\r"}

_ESCAPED_OR_END: Final = re.compile(r"\\.|[\n\r]", re.DOTALL)


@lru_cache(maxsize=KEPT)
def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.max_mem = MOST_BYTES
    options.log_errors = False
    return re2.compile(pattern, options)


def check_patterns(field: str, patterns: Iterable[str]) -> None:
    """Raise ValueError for a pattern that Python or RE2 does not have, and for such as together
    take long to match.
    """
    size = sum(_instructions(field, pattern) for pattern in patterns)
    if size > MOST_INSTRUCTIONS:
        raise ValueError(
            f"{field} takes too long to match: RE2 has {size:,} instructions for it, and it may "
            f"have {MOST_INSTRUCTIONS:,}. Use fewer counted repetitions, such as {{1000}}."
        )


def _instructions(field: str, pattern: str) -> int:
    """The number of instructions of a pattern's program."""
    try:
        re.compile(pattern)
        return int(_compiled(pattern).programsize)
    except (re.error, re2.error, OverflowError, RecursionError, UnicodeEncodeError) as error:
        why = error.args[0] if error.args else error
        told = why.decode(errors="replace") if isinstance(why, bytes) else error
        raise ValueError(
            f"{field} is {quote(pattern)}, which is no regular expression of both Python and RE2: "
            f"{told}."
        ) from None


def is_found(pattern: str, text: str) -> bool:
    """True if `pattern`, which was checked, is anywhere in `text`."""
    return _compiled(pattern).search(text.encode(errors="replace").decode()) is not None


def with_escaped_ends(pattern: str) -> str:
    r"""The same pattern with `\n` and `\r` in place of these characters themselves, which xgrammar
    does not take between brackets (`[^...]*`).
    """
    return _ESCAPED_OR_END.sub(lambda found: LINE_ENDS.get(found[0][-1], found[0]), pattern)


@lru_cache(maxsize=32)
def schema_with_escaped_ends(schema: str) -> str:
    """A JSON schema, or a structural tag, with such patterns; the text itself where it has them."""
    if "\\" not in schema:  # JSON writes line ends with one
        return schema
    try:
        content = json.loads(schema)
    except (ValueError, RecursionError):
        return schema  # what compiles it says so
    is_changed = False

    def escaped(pattern: str) -> str:
        nonlocal is_changed
        new = with_escaped_ends(pattern)
        is_changed |= new != pattern
        return new

    todo = [content]
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        elif isinstance(part, dict):
            if isinstance(pattern := part.get("pattern"), str):
                part["pattern"] = escaped(pattern)
            if isinstance(schemas := part.get("patternProperties"), dict):
                part["patternProperties"] = {escaped(name): schemas[name] for name in schemas}
            todo += [value for name, value in part.items() if name not in VALUES]
    return json.dumps(content) if is_changed else schema
