"""Programs that people start, and how they end after a mistake: with one sentence on stderr and an
exit status.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, Never

from sglang_hybrid import __version__
from sglang_hybrid.core.sentences import print_line, quote, suggest

FAILED: Final = 1
USAGE_ERROR: Final = 2
INTERRUPTED: Final = 130


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
            near = suggest(str(value), map(str, action.choices or ()))
            error.message = f"invalid choice: {quote(value)}{near}" if near else error.message
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
        print_line(f"error: {why}" if why else "interrupted", sys.stderr)
        return status

    return run


def versions() -> str:
    """The versions of this package and of SGLang, as `--version` prints them."""
    try:
        sglang = f"sglang {version('sglang')}"
    except PackageNotFoundError:  # where only a router runs
        sglang = "without sglang"
    return f"sglang_hybrid {__version__}, {sglang}"
