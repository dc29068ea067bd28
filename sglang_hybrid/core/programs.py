"""Programs that people start: what their options accept, and how they end after a mistake, with one
sentence on stderr and an exit status.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, Never, TypeVar
from urllib.parse import urlsplit

from sglang_hybrid import __version__
from sglang_hybrid.core.sentences import meant, say, shown

T = TypeVar("T")
N = TypeVar("N", int, float)

FAILED: Final = 1
USAGE_ERROR: Final = 2
INTERRUPTED: Final = 130

LAST_PORT: Final = 65_535
MOST: Final = 2**31 - 1
"""The largest whole number that an option takes, unless it says another."""

MOST_SECONDS: Final = 1e9
MOST_PROCESSES: Final = 1_000


class UsageError(ValueError):
    """A wrong command line; the message is one sentence."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError, and says which choice one that is none may mean."""

    def error(self, message: str) -> Never:
        raise UsageError(f"{message.removeprefix('argument ')}; --help lists all options")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = meant(str(value), map(str, action.choices or ()))
            error.message = f"invalid choice: {shown(value)}{near}" if near else error.message
            raise


def program(main: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Decorates a program's `main`, which then may be called without arguments, for `sys.argv`.
    What it raises for a mistake of the user becomes a sentence on stderr; it returns the exit
    status.
    """

    @wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        status = FAILED
        try:
            return main([*(sys.argv[1:] if arguments is None else arguments)])
        except UsageError as error:
            status, why = USAGE_ERROR, str(error)
        except BrokenPipeError:  # who reads the output, as `head` does, has enough
            with suppress(OSError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())  # for the flush at the exit
            return FAILED
        except OSError as error:
            why = error.strerror or str(error)
            why = f"{error.filename}: {why}" if error.filename else why
        except ValueError as error:
            why = str(error)
        except RecursionError:
            why = "what it was given is nested too deep"
        except MemoryError:
            why = "there is not enough memory for what it was given"
        except KeyboardInterrupt:
            status, why = INTERRUPTED, ""
        say(f"error: {why}" if why else "interrupted", sys.stderr)
        return status

    return run


def versions() -> str:
    """This package's version, and that of the SGLang beside it: what `--version` prints."""
    try:
        sglang = f"sglang {version('sglang')}"
    except PackageNotFoundError:  # where only a router runs
        sglang = "without sglang"
    return f"sglang_hybrid {__version__}, {sglang}"


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """The reader of an option that is a whole number from `least` to `most`. As all readers here,
    it raises ArgumentTypeError.
    """
    return _within(int, least, most, f"a whole number from {least:,} to {most:,}")


def number(least: float, most: float) -> Callable[[str], float]:
    """The reader of an option that is a number from `least` to `most`."""
    return _within(float, least, most, f"a number from {least:g} to {most:g}")


def _within(make: Callable[[str], N], least: N, most: N, what: str) -> Callable[[str], N]:
    def read(text: str) -> N:
        with suppress(ValueError):  # more than 4,300 digits, too
            value = make(text)
            if least <= value <= most:  # nor NaN
                return value
        raise argparse.ArgumentTypeError(f"{shown(text)} is not {what}")

    return read


def read_by(read: Callable[[str], T]) -> Callable[[str], T]:
    """The reader of an option that `read` understands; its ValueErrors are sentences."""

    def option(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return option


port = whole(0, LAST_PORT)


def server_url(text: str, schemes: Sequence[str] = ("http", "https")) -> str:
    """The address of a server, without a slash at its end."""
    try:
        parts = urlsplit(text)
        known = parts.scheme in schemes and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known or not (text.isascii() and text.isprintable()):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is no server's address; write http://HOST:PORT"
        )
    return text.rstrip("/")


def host(text: str) -> str:
    """A name or an address to listen on."""
    if not re.fullmatch(r"[\w.:%-]+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{shown(text)} is no name or address of a machine")
    return text
