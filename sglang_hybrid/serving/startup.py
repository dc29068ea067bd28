"""A start that fails: the first process prints the error of the process that failed.

SGLang's processes print a traceback and have the first process killed. Here the first that fails
writes its error into a file of the first process, which prints it (patch 0018).
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang_hybrid.core.sentences import print_line

logger = logging.getLogger("sglang_hybrid")

STARTUP_ERROR = 1
"""Exit status of a server that could not start."""

REPORT = "SGLANG_HYBRID_FAILURE"
"""The environment variable that names the file with the error."""

LONGEST = 500
"""Characters of an error that are printed."""

_private: Path | None = None


class StartupError(RuntimeError):
    """The server cannot start; the message is one sentence for the person who started it."""


@contextmanager
def private_files() -> Iterator[None]:
    """A directory for this process's temporary files, among them the sockets of all its processes,
    and for the report of a failure. It is removed at the end.
    """
    global _private
    _private = directory = Path(tempfile.mkdtemp(prefix="sglang-hybrid-"))
    before, tempfile.tempdir = tempfile.tempdir, str(directory)
    os.environ[REPORT] = str(directory / "failure")
    try:
        yield
    finally:
        tempfile.tempdir = before
        remove_private_files()


def remove_private_files() -> None:
    """Remove the directory of `private_files`, also where the process ends without leaving that
    context. A directory that only the environment names was not made here and stays.
    """
    global _private
    if _private is not None:
        os.environ.pop(REPORT, None)
        shutil.rmtree(_private, ignore_errors=True)
        _private = None


def tell_failure(error: BaseException) -> bool:
    """Called in a process that fails at its start: note `error` for the first process. False if
    nobody reads it, as in an `sglang.Engine`.
    """
    path = os.environ.get(REPORT)
    if path is None:
        return False
    logger.debug("start-up failed", exc_info=error)
    try:
        with open(path, "x") as file:  # the first failure is the cause of the others
            file.write(one_line(error))
    except FileExistsError:
        return True
    except OSError:
        return False
    return True


def failure() -> str | None:
    """The error that was noted for the first process, None if there is none."""
    path = os.environ.get(REPORT)
    try:
        return None if path is None else Path(path).read_text()
    except OSError:
        return None


def one_line(error: BaseException) -> str:
    """An error as one sentence, without the lines that some libraries add."""
    text = " ".join(str(error).split())
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]} ..."
    name = type(error).__name__
    if not text:
        return name + _place(error)
    plain = isinstance(error, ValueError | AssertionError | OSError | RuntimeError)
    return text if plain else f"{name}: {text}"


def _place(error: BaseException) -> str:
    """The place where an error without a message was raised, and that line of source."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    last = frames[-1]
    return f" in {last.name} ({Path(last.filename).name}, line {last.lineno}): {last.line}"


def fail(message: str) -> int:
    """Print the one sentence of a start that failed; returns the exit status."""
    print_line(f"sglang_hybrid: {message}", sys.stderr)
    return STARTUP_ERROR


def cannot_start(error: BaseException | str) -> str:
    """The sentence for an error that nobody foresaw."""
    text = error if isinstance(error, str) else one_line(error)
    return f"the server cannot start: {text}"
