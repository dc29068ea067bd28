"""Files of traces: JSON Lines, gzip or not, read line by line and written whole or not at all."""

from __future__ import annotations

import gzip
import os
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import msgspec

from sglang_hybrid.core.named_files import (
    MOST_BYTES,
    FileError,
    decode_as,
    named_lines,
    unreadable,
)
from sglang_hybrid.core.traffic.requests import Request

Schema = TypeVar("Schema")


MOST_OF_TRACE: Final = 4 << 30
"""Bytes of all requests of a trace."""

BYTES_OF_REQUEST: Final = 512
"""Bytes of a request beside its tokens."""


class TraceError(FileError):
    """A trace that cannot be read; the sentence names the file, the line and what is wrong."""


@dataclass
class Room:
    """Bytes that a trace may still take."""

    left: int = MOST_OF_TRACE

    def take(self, request: Request) -> None:
        """Count a request. Raises TraceError if it is one too many."""
        self.take_bytes(request.kept_bytes + BYTES_OF_REQUEST)

    def give_back(self, request: Request) -> None:
        """A request that was counted is not kept."""
        self.left += request.kept_bytes + BYTES_OF_REQUEST

    def take_bytes(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise TraceError(
                f"the requests take more than {MOST_OF_TRACE >> 30} GiB of memory; "
                "take fewer of them"
            )


@dataclass
class Skipped:
    """Bad lines are an error, unless `allow` is set: then they are counted. advice: what a user may
    do about them, for the error.
    """

    allow: bool = False
    count: int = 0
    advice: str = "; --skip-bad leaves such lines out"

    def bad(self, sentence: str, cause: Exception | None = None) -> None:
        if not self.allow:
            raise TraceError(sentence + self.advice) from cause
        self.count += 1


@dataclass
class Reading:
    """Options of reading. limit: requests, those that arrive first. max_input: Mooncake's longer
    prompts are left out. stitch: its unknown tokens are taken from the prompts that go on from
    them.

    session_rate: sessions a second, and seed of their arrivals, where a format has no clock.
    """

    limit: int | None = None
    max_input: int | None = None
    tokenizer: str | None = None
    session_rate: float = 1.0
    seed: int = 0
    skipped: Skipped = field(default_factory=Skipped)
    stitch: bool = False
    room: Room = field(default_factory=Room)


def read_lines(
    path: Path,
    schema: type[Schema],
    convert: Callable[[int, Schema], Request | None],
    what: str,
    reading: Reading,
    ordered: bool = True,
    torn: bool = False,
) -> list[Request]:
    """Decode every line of `path` as `schema` and convert it, given its number from 1.

    `convert` raises ValueError for what cannot be, and returns None for what is left out. ordered:
    arrivals must not go back; otherwise the
    requests are sorted by them, and all lines are read for the first `reading.limit` of them. torn:
    a last line without its end is counted as skipped. Raises TraceError.
    """
    skipped = reading.skipped
    requests: list[Request] = []
    latest = 0.0
    for number, text in numbered_lines(path, skipped):
        if reading.limit is not None and len(requests) >= reading.limit:
            if ordered:
                break
            if len(requests) >= 2 * reading.limit:
                requests = _first_of(requests, reading)
        if not text.strip():
            continue
        here = f"{path}:{number}"
        try:
            request = convert(number, decode_as(text, schema))
            if request is not None and ordered and request.arrival < latest:
                raise ValueError(
                    f"it arrived at {request.arrival:g} s, before the line above ({latest:g} s)"
                )
        except (msgspec.ValidationError, ValueError, OverflowError) as error:
            kind = f"not a line of {what}"
            if isinstance(error, msgspec.DecodeError | UnicodeDecodeError):
                kind = kind if isinstance(error, msgspec.ValidationError) else "not JSON"
            if torn and kind == "not JSON" and not text.endswith(b"\n"):
                skipped.count += 1
                continue
            skipped.bad(f"{here}: {kind} ({error})", error)
            continue
        if request is not None:
            reading.room.take(request)
            latest = request.arrival
            requests.append(request)
    return requests if ordered else _first_of(requests, reading)


def _first_of(requests: list[Request], reading: Reading) -> list[Request]:
    """The first `reading.limit` of `requests`, in order of arrival."""
    requests.sort(key=lambda request: request.arrival)
    kept = requests[: reading.limit]
    for request in requests[len(kept) :]:
        reading.room.give_back(request)
    return kept


def numbered_lines(path: Path, skipped: Skipped | None = None) -> Iterator[tuple[int, bytes]]:
    """Line numbers from 1 and lines of a file, gzip or not. Raises TraceError if it cannot be read;
    what comes after damage in an archive is one bad line.
    """
    number = 0
    try:
        for number, line in enumerate(named_lines(path), start=1):
            yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        sentence = f"{path}:{number + 1}: the gzip file is damaged ({error})"
        (skipped or Skipped()).bad(sentence, error)
    except OSError as error:
        raise unreadable(path, error) from error


def joined(lines: Iterable[tuple[int, bytes]], path: Path) -> bytes:
    """All numbered lines of a file that is decoded as a whole. Raises TraceError if it is too
    large.
    """
    size = 0
    kept: list[bytes] = []
    for _, line in lines:
        size += len(line)
        if size > MOST_BYTES:
            raise TraceError(f"{path} is read at once and has more than {MOST_BYTES:,} bytes")
        kept.append(line)
    return b"".join(kept)


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that is there when everything was written, and not at all otherwise. Raises ValueError
    where something else than a file is there.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file; give the name of a file")
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as raw:  # it follows no link
            if path.suffix == ".gz":
                with gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed:
                    yield packed  # type: ignore[misc]
            else:
                yield raw
        os.replace(part, path)
    finally:
        with suppress(FileNotFoundError):
            part.unlink()


def write_line(file: IO[bytes], record: Any) -> None:
    file.write(msgspec.json.encode(record) + b"\n")
