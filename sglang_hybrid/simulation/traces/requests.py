"""Request traces: what arrived, when, and what was answered; the two formats that need nothing
else.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from sglang_hybrid.core.records.pins import PinRequest
from sglang_hybrid.core.returns.hints import Hint

TokenArray = npt.NDArray[np.int32]
Schema = TypeVar("Schema")
Seconds = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]
Tokens = list[Annotated[int, Meta(ge=-(2**31), lt=2**31)]]


@dataclass(frozen=True, slots=True)
class Request:
    """One request: `tokens` [input_len + output_len] are its prompt and its answer; `arrival` is in
    seconds. message_starts: positions in the prompt at which the client's messages begin. tenant:
    requests of different ones share nothing. hint: what its client said of the session. pins: what
    it wanted kept; a checkpoint is declared at each of these positions.
    """

    session: int
    turn: int
    arrival: float
    tokens: TokenArray
    input_len: int
    message_starts: tuple[int, ...] = ()
    tenant: str = ""
    hint: Hint | None = None
    pins: tuple[PinRequest, ...] = ()


class TraceError(ValueError):
    """A trace that cannot be read; the sentence names the file, the line and what is wrong."""


@dataclass
class Skipped:
    """Bad lines are an error, unless `allow` is set (--skip-bad): then they are counted."""

    allow: bool = False
    count: int = 0

    def bad(self, sentence: str, cause: Exception | None = None) -> None:
        if not self.allow:
            raise TraceError(f"{sentence}; --skip-bad leaves such lines out") from cause
        self.count += 1


class CompactLine(msgspec.Struct):
    session: int
    turn: int
    t: Seconds
    new: Tokens
    out: Tokens
    base: tuple[Count, Count] | None


class MooncakeLine(msgspec.Struct):
    timestamp: Seconds  # milliseconds
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Count
    hash_ids: list[Annotated[int, Meta(ge=0, lt=2**31 // 512)]]


def read_compact(
    path: Path, limit: int | None = None, skipped: Skipped | None = None
) -> list[Request]:
    """Read the compact format (JSON Lines, gzip or not).

    A line is {"session", "turn", "t", "base": [line, n] | null, "new", "out"}: the prompt is the
    first n tokens of (prompt + answer) of line `base`, followed by `new`; `out` is the answer.
    """
    known: dict[int, Request] = {}  # by line, from 0

    def convert(number: int, line: CompactLine) -> Request:
        prompt = np.asarray(line.new, dtype=np.int32)
        if line.base is not None:
            base = known.get(line.base[0])
            if base is None:
                raise ValueError(f"its base, line {line.base[0] + 1}, is not an earlier good line")
            if line.base[1] > len(base.tokens):
                raise ValueError(f"its base has {len(base.tokens)} tokens, not {line.base[1]}")
            prompt = np.concatenate([base.tokens[: line.base[1]], prompt])
        request = make_request(line.session, line.turn, line.t, prompt, line.out)
        known[number - 1] = request
        return request

    return read_lines(path, CompactLine, convert, "a compact trace", limit, skipped)


def read_mooncake(
    path: Path,
    limit: int | None = None,
    max_input: int | None = 32_768,
    skipped: Skipped | None = None,
) -> list[Request]:
    """Read Mooncake's format: `hash_ids` name blocks of 512 prompt tokens; answers get tokens of
    their own.

    Prompts longer than `max_input` are left out before `limit` counts.
    """
    fresh = Fresh()

    def convert(number: int, line: MooncakeLine) -> Request | None:
        if max_input is not None and line.input_length > max_input:
            return None
        if len(line.hash_ids) * 512 < line.input_length:
            raise ValueError(
                f"{len(line.hash_ids)} blocks of 512 do not hold {line.input_length} tokens"
            )
        prompt = block_tokens(line.hash_ids, 512)[: line.input_length]
        answer = fresh.take(line.output_length)
        return make_request(number, 0, line.timestamp / 1000, prompt, answer)

    return read_lines(path, MooncakeLine, convert, "a Mooncake trace", limit, skipped)


class Fresh:
    """Negative ids for tokens of which nothing is known: no two are alike."""

    def __init__(self) -> None:
        self._next = -1

    def take(self, count: int) -> TokenArray:
        tokens = np.arange(self._next, self._next - count, -1, dtype=np.int64)
        self._next -= count
        return tokens.astype(np.int32)


def block_tokens(blocks: list[int], size: int) -> TokenArray:
    """Tokens [n * size] that stand for n blocks: the same block, the same tokens."""
    ids = np.asarray(blocks, dtype=np.int64)[:, None] * size + np.arange(size)
    if ids.size and ids.max() >= 2**31:
        raise ValueError(f"block {max(blocks)} is too large a number for blocks of {size}")
    return ids.ravel().astype(np.int32)


def make_request(
    session: int,
    turn: int,
    arrival: float,
    prompt: npt.ArrayLike,
    answer: npt.ArrayLike,
    message_starts: tuple[int, ...] = (),
    tenant: str = "",
    hint: Hint | None = None,
) -> Request:
    """A request from its parts. Raises ValueError for an empty prompt."""
    first = np.asarray(prompt, dtype=np.int32)
    if not len(first):
        raise ValueError("its prompt is empty")
    tokens = np.concatenate([first, np.asarray(answer, dtype=np.int32)])
    return Request(session, turn, arrival, tokens, len(first), message_starts, tenant, hint)


def read_lines(
    path: Path,
    schema: type[Schema],
    convert: Callable[[int, Schema], Request | None],
    what: str,
    limit: int | None = None,
    skipped: Skipped | None = None,
    ordered: bool = True,
    torn: bool = False,
) -> list[Request]:
    """Decode every line of `path` as `schema` and convert it, given its number from 1.

    `convert` raises ValueError for what cannot be, and returns None for what is left out. ordered:
    arrivals must not go back. torn: a last line without its end is counted as skipped. Stops after
    `limit` requests. Raises TraceError.
    """
    skipped = skipped or Skipped()
    decoder = msgspec.json.Decoder(schema)
    requests: list[Request] = []
    latest = 0.0
    for number, text in numbered_lines(path, skipped):
        if limit is not None and len(requests) >= limit:
            break
        if not text.strip():
            continue
        here = f"{path}:{number}"
        try:
            request = convert(number, decoder.decode(text))
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
            latest = request.arrival
            requests.append(request)
    return requests


def numbered_lines(path: Path, skipped: Skipped | None = None) -> Iterator[tuple[int, bytes]]:
    """Line numbers from 1 and lines of a file, gzip or not. Raises TraceError if it cannot be read;
    what comes after damage in an archive is one bad line.
    """
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, line
    except FileNotFoundError as error:
        raise TraceError(f"there is no trace {path}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        sentence = f"{path}:{number + 1}: the gzip file is damaged ({error})"
        (skipped or Skipped()).bad(sentence, error)
    except OSError as error:
        raise TraceError(f"{path} cannot be read ({error.strerror})") from error


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that is there when everything was written, and not at all otherwise."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as raw:
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
