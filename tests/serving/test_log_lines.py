"""Text of a client neither begins a line of the log nor reaches a terminal as a command."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator

import pytest

from sglang_hybrid.serving import log_lines

Write = Callable[..., str]
SENT = "s\n[2026-11-28 00:00:00] fake \x1b[2J\r\x9b1m\u202etab\t."
SHOWN = "s\n    [2026-11-28 00:00:00] fake \\x1b[2J\\r\\x9b1m\\u202etab\t."


@pytest.fixture
def factory() -> Iterator[None]:
    before = logging.getLogRecordFactory()
    log_lines.install()
    log_lines.install()
    yield
    logging.setLogRecordFactory(before)


def written(name: str, message: str, *args: object, error: Exception | None = None) -> str:
    """The output of a logger of this name."""
    log, stream = logging.getLogger(name), io.StringIO()
    handler = logging.StreamHandler(stream)
    log.addHandler(handler)
    try:
        log.warning(message, *args, exc_info=error)
    finally:
        log.removeHandler(handler)
    return stream.getvalue()


@pytest.mark.usefixtures("factory")
@pytest.mark.parametrize("name", ["sglang.srt.session", "sglang_hybrid.serving"])
def test_a_record_keeps_to_its_own_lines(name: str) -> None:
    """Line ends may be in the text of a message or in its arguments."""
    assert written(name, f"session {SENT}") == f"session {SHOWN}\n"
    assert written(name, "session %s of %d", SENT, 3) == f"session {SHOWN} of 3\n"
    assert written(name, "100 % of it") == "100 % of it\n"
    assert written(name, "é, 字, %s", "two words") == "é, 字, two words\n"


@pytest.mark.usefixtures("factory")
def test_an_error_keeps_to_its_own_lines() -> None:
    try:
        raise ValueError(SENT)
    except ValueError as error:
        told = written("sglang.x", "failed", error=error)
    first, second, *more = told.splitlines()
    assert (first, second) == ("failed", "Traceback (most recent call last):")
    assert all(line.startswith("    ") for line in more)
    assert f"ValueError: {SHOWN}\n" in told


@pytest.mark.usefixtures("factory")
def test_other_programs_records_stay_as_they_are() -> None:
    assert written("an.application", "\x1b[32m%s\x1b[0m", "green\n") == "\x1b[32mgreen\n\x1b[0m\n"


@pytest.mark.usefixtures("factory")
def test_a_wrong_record_is_left_to_its_handler() -> None:
    """Python's handler says where it is; an error here would end what logs."""
    record = logging.getLogger("sglang.x").makeRecord("sglang.x", 30, "", 1, "%d", ("one",), None)
    assert (record.msg, record.args) == ("%d", ("one",))
