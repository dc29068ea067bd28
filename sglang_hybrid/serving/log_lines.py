"""Records of a log keep to their own lines, whatever a client has put into them.

SGLang writes ids of requests and sessions, names and paths into its log as clients sent them. A
line break in one would begin a line that looks like a record of the server, and other control
characters change what a terminal shows.
"""

from __future__ import annotations

import logging
import traceback
from typing import Any

from sglang_hybrid.core.sentences import escape

NAMES = "sglang"
"""The beginnings of the names of SGLang's loggers, and of ours."""

INDENT = " " * 4

_factory = logging.getLogRecordFactory()


def install() -> None:
    """Make records of SGLang and of this package so from now on, in this process."""
    global _factory
    if logging.getLogRecordFactory() is not _record:
        _factory = logging.getLogRecordFactory()
        logging.setLogRecordFactory(_record)


def on_own_lines(text: str) -> str:
    r"""`text` with escapes in place of characters that are not printed, as `\x1b`, but for tabs and
    line breaks; each line but the first is indented.
    """
    if text.isprintable():
        return text
    return f"\n{INDENT}".join("\t".join(map(escape, row.split("\t"))) for row in text.split("\n"))


def _record(name: str, *args: Any, **kwargs: Any) -> logging.LogRecord:
    record = _factory(name, *args, **kwargs)
    if not name.startswith(NAMES):
        return record
    try:
        said = record.getMessage()
    except (TypeError, ValueError, KeyError):  # the handler says which line is wrong
        return record
    kept = on_own_lines(said)
    if kept != said:
        record.msg, record.args = kept, ()
    if isinstance(record.exc_info, tuple) and record.exc_info[0] is not None:
        record.exc_text = on_own_lines(
            "".join(traceback.format_exception(*record.exc_info)).rstrip()
        )
    return record
