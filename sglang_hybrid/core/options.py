"""Readers of what options accept: numbers within bounds, ports, addresses. Each raises
ArgumentTypeError with one sentence.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar
from urllib.parse import urlsplit

from sglang_hybrid.core.sentences import quote

T = TypeVar("T")
N = TypeVar("N", int, float)

LAST_PORT: Final = 65_535
MOST: Final = 2**31 - 1
"""The largest whole number that an option takes, unless it says another."""

MOST_SECONDS: Final = 1e9
MOST_PROCESSES: Final = 1_000


def integer(least: int, most: int = MOST) -> Callable[[str], int]:
    """The reader of an option that is a whole number from `least` to `most`."""
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
        raise argparse.ArgumentTypeError(f"{quote(text)} is not {what}")

    return read


def read_by(read: Callable[[str], T]) -> Callable[[str], T]:
    """The reader of an option that `read` understands; its ValueErrors are sentences."""

    def option(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return option


port = integer(0, LAST_PORT)


def server_url(text: str, schemes: Sequence[str] = ("http", "https")) -> str:
    """The address of a server, without a slash at its end."""
    try:
        parts = urlsplit(text)
        known = parts.scheme in schemes and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known or not (text.isascii() and text.isprintable()):
        raise argparse.ArgumentTypeError(
            f"{quote(text)} is no server's address; write http://HOST:PORT"
        )
    return text.rstrip("/")


def host(text: str) -> str:
    """A name or an address to listen on."""
    if not re.fullmatch(r"[\w.:%-]+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{quote(text)} is no name or address of a machine")
    return text
