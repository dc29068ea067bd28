"""Files that a user names: only those that end are opened, and no more is read than a bound.

A pipe without a writer is waited for without end, a device has no end, and a small archive may hold
more than there is memory for. JSON may be nested deeper than Python can follow.
"""

from __future__ import annotations

import gzip
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, TypeVar

import msgspec

T = TypeVar("T")

MOST_BYTES: Final = 1 << 30
"""Bytes of a file that is held as a whole, and of a line of a longer one."""

MOST_TEXT: Final = 1 << 26
"""Bytes of a prompt, a chat, a config or a table."""

MOST_VALUES: Final = 1 << 25
"""Values in one piece of JSON. Python's objects take up to a hundred bytes for each."""

MOST_EXPANSION: Final = 100
"""Bytes that an archive may unpack to, for each of its own. Token ids as text take 4 to 10."""

BUFFER: Final = 1 << 20
SMALL: Final = 1 << 28
"""Bytes that every archive may unpack to."""

_KINDS: Final = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class FileError(ValueError):
    """A file that cannot be read; the sentence names it and says why."""


def open_named(path: Path) -> BinaryIO:
    """Open a regular file, or a pipe that the shell made for the program (`/dev/stdin` behind `|`,
    `<(...)`). Raises FileError for anything else, without waiting.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise unreadable(path, error) from error
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    from_shell = kind == stat.S_IFIFO and not os.path.exists(os.path.realpath(path))
    if kind != stat.S_IFREG and not from_shell:
        os.close(descriptor)
        raise FileError(f"{path} is {_KINDS.get(kind, 'something else')}, not a regular file")
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "rb", BUFFER)


def read_bytes(path: Path, most: int = MOST_TEXT) -> bytes:
    """The content of a file of `most` bytes at most. Raises FileError."""
    with open_named(path) as file:
        try:
            too_large = os.fstat(file.fileno()).st_size > most
            content = b"" if too_large else file.read(most + 1)
        except OSError as error:
            raise unreadable(path, error) from error
    if too_large or len(content) > most:
        raise FileError(f"{path} has more than {most:,} bytes and is too large to be read")
    return content


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """A file's text in UTF-8. Raises FileError."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is no text in UTF-8 (byte {error.start:,})") from error


def read_json(path: Path, schema: type[T], what: str, most: int = MOST_TEXT) -> T:
    """A file's JSON as `schema`. Raises FileError, which says that it is no `what`."""
    text = read_text(path, most)
    try:
        return msgspec.convert(decode_json(text), schema)
    except ValueError as error:
        raise FileError(f"{path} is no {what} ({error})") from error


def decode_json(text: str) -> Any:
    """JSON as Python reads it, with NaN and Infinity. Raises ValueError, also for too many values
    or too deep a nesting.
    """
    if len(text) > MOST_VALUES and text.count(",") > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES:,} values")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def decode_as(content: bytes, schema: type[T]) -> T:
    """JSON as `schema`. Raises what `decode_json` raises, and msgspec.DecodeError."""
    if len(content) > MOST_VALUES and content.count(b",") > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES:,} values")
    try:
        return msgspec.json.decode(content, type=schema)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def named_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, unpacked if its name ends in `.gz`. Raises FileError, and for a damaged
    archive what gzip raises (EOFError, zlib.error, gzip.BadGzipFile).
    """
    with open_named(path) as packed:
        if path.suffix != ".gz":
            yield from _bounded_lines(packed, path)
            return
        most = max(SMALL, MOST_EXPANSION * os.fstat(packed.fileno()).st_size)
        with gzip.GzipFile(fileobj=packed) as unpacked:
            yield from _bounded_lines(unpacked, path, most)


def _bounded_lines(
    file: IO[bytes] | gzip.GzipFile, path: Path, left: int | None = None
) -> Iterator[bytes]:
    """left: bytes that all lines together may have, None without a bound."""
    while line := file.readline(MOST_BYTES + 1 if left is None else min(MOST_BYTES, left) + 1):
        if len(line) > MOST_BYTES:
            raise FileError(f"{path} has a line of more than {MOST_BYTES:,} bytes")
        if left is not None:
            left -= len(line)
            if left < 0:
                raise FileError(
                    f"{path} unpacks to more than {MOST_EXPANSION} times its size; if that is "
                    "meant, unpack it first"
                )
        yield line


def unreadable(path: Path, error: Exception) -> FileError:
    """The error of a file that the system does not give."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return FileError(f"{path} cannot be read ({reason})")
