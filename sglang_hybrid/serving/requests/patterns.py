"""Patterns that end an answer (`stop_regex`), matched in time that grows with the text only.

SGLang matches them with Python's `re` at each step, in the scheduler: one that goes back and forth,
as `(a+)+b`, holds up all requests, for hours with 250 characters. RE2 has no such patterns
(https://github.com/google/re2/wiki/WhyRE2); it has no look-around and no references to groups.
SGLang reads the pattern as Python's, to know how long a match may be, so it has to be one of both.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final

import re2

from sglang_hybrid.core.sentences import shown

MOST_BYTES: Final = 8 << 20
KEPT: Final = 32
"""Memory of one compiled pattern at most, and how many are kept for the next step."""


@lru_cache(maxsize=KEPT)
def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.max_mem = MOST_BYTES
    options.log_errors = False
    return re2.compile(pattern, options)


def check_pattern(field: str, pattern: str) -> None:
    """Raise ValueError for a pattern that Python or RE2 does not have."""
    try:
        re.compile(pattern)
        _compiled(pattern)
    except (re.error, re2.error, OverflowError, RecursionError, UnicodeEncodeError) as error:
        why = error.args[0] if error.args else error
        told = why.decode(errors="replace") if isinstance(why, bytes) else error
        raise ValueError(
            f"{field} is {shown(pattern)}, which is no regular expression of both Python and RE2: "
            f"{told}."
        ) from None


def is_found(pattern: str, text: str) -> bool:
    """Whether `pattern`, which was checked, is anywhere in `text`."""
    return _compiled(pattern).search(text.encode(errors="replace").decode()) is not None
