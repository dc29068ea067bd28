"""Trace formats of one JSON object per line: what a line is, how it is read and written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from sglang_hybrid.core.records.edges import common_prefix
from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.core.traffic.requests import (
    MOST_TOKENS,
    Count,
    FreshTokens,
    Length,
    Number,
    Request,
    Seconds,
    TokenArray,
    Tokens,
    block_tokens,
    make_request,
)
from sglang_hybrid.extensions.lab.simulation.traces.lines import (
    Reading,
    read_lines,
    whole_file,
    write_line,
)

Line = TypeVar("Line")

SAME_START = 32  # tokens; requests that share them may share more

PACKED: Final = np.dtype("<i4")
PackedTokens = Annotated[bytes, Meta(max_length=PACKED.itemsize * MOST_TOKENS)]
"""Token ids as PACKED; in JSON a string in base64, which is read ten times as fast as a list."""


class CompactLine(msgspec.Struct):
    session: int
    turn: int
    t: Seconds
    new: Tokens
    out: Tokens
    base: tuple[Number, Count] | None


class MooncakeLine(msgspec.Struct):
    timestamp: Seconds  # milliseconds
    input_length: Length
    output_length: Count
    hash_ids: list[Annotated[int, Meta(ge=0, lt=2**31)]]


class MarconiLine(msgspec.Struct):
    session_id: int
    turn_id: int
    ts: Seconds
    input_tokens: Tokens
    output_tokens: Tokens


class RecordedLine(msgspec.Struct, omit_defaults=True):
    """The lines that our own recorder writes, one line per request, in the order in which they
    ended.

    input_ids, output_ids: prompt and answer. Ours are packed; a list of numbers is read as well.
    t, first, end: seconds since the recording began: arrival, first token, last token.
    message_starts: positions in the prompt at which messages begin. reply_start: where the next
    turn leaves the prompt, if that is before its end. tenant: a name without meaning for the cache
    salt, extra key and adapter together; prompts of different ones share nothing. hint: what its
    client said of the session (`Hint.parse`). hit: prompt tokens that the server hit. Other keys
    are ignored.
    """

    t: Seconds
    input_ids: PackedTokens | Tokens
    output_ids: PackedTokens | Tokens
    session: int | None = None
    turn: int = 0
    message_starts: list[Annotated[int, Meta(ge=0)]] = []
    reply_start: Annotated[int, Meta(ge=0)] = 0
    first: Seconds | None = None
    end: Seconds | None = None
    tenant: str = ""
    hint: str | None = None
    hit: Count | None = None


def json_lines(
    schema: type[Line],
    what: str,
    converter: Callable[[Reading], Callable[[int, Line], Request | None]],
    **how: bool,
) -> Callable[[Path, Reading], list[Request]]:
    """A reader of a format whose lines are of `schema`. converter: makes the function that turns
    one line, given its number from 1, into a request.
    """

    def read(path: Path, reading: Reading) -> list[Request]:
        convert = converter(reading)
        return read_lines(path, schema, convert, what, reading, **how)

    return read


def compact_lines(reading: Reading) -> Callable[[int, CompactLine], Request]:
    """A line is {"session", "turn", "t", "base": [line, n] | null, "new", "out"}: the prompt is the
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

    return convert


def mooncake_lines(reading: Reading) -> Callable[[int, MooncakeLine], Request | None]:
    """`hash_ids` name blocks of 512 prompt tokens; answers get tokens of their own. Prompts longer
    than `max_input` are left out before `limit` counts.
    """
    fresh = FreshTokens()

    def convert(number: int, line: MooncakeLine) -> Request | None:
        if reading.max_input is not None and line.input_length > reading.max_input:
            return None
        if len(line.hash_ids) * 512 < line.input_length:
            raise ValueError(
                f"{len(line.hash_ids)} blocks of 512 do not hold {line.input_length} tokens"
            )
        blocks = line.hash_ids[: -(-line.input_length // 512)]
        prompt = block_tokens(blocks, 512)[: line.input_length]
        answer = fresh.take(line.output_length)
        return make_request(number, 0, line.timestamp / 1000, prompt, answer)

    return convert


def marconi_lines(_: Reading) -> Callable[[int, MarconiLine], Request]:
    return lambda number, line: make_request(
        line.session_id, line.turn_id, line.ts, line.input_tokens, line.output_tokens
    )


def recorded_lines(_: Reading) -> Callable[[int, RecordedLine], Request]:
    """A request without a session is one of its own."""

    def convert(number: int, line: RecordedLine) -> Request:
        if not line.t <= (line.t if line.first is None else line.first):
            raise ValueError("its first token is older than its arrival")
        parts = unpacked(line.input_ids), unpacked(line.output_ids)
        starts = tuple(line.message_starts)
        if list(starts) != sorted(starts) or (starts and starts[-1] >= len(parts[0])):
            raise ValueError("its message_starts do not rise within the prompt")
        if line.reply_start >= len(parts[0]):
            raise ValueError("its reply_start is not within the prompt")
        session = number - 1 if line.session is None else line.session
        hint = None if line.hint is None else Hint.parse(line.hint)
        return make_request(
            session, line.turn, line.t, *parts, starts, line.reply_start, line.tenant, hint
        )

    return convert


def write_marconi(path: Path, requests: Iterable[Request]) -> None:
    with whole_file(path) as file:
        for r in of_one_tenant(requests, "marconi"):
            prompt, answer = _parts(r)
            write_line(file, MarconiLine(r.session, r.turn, r.arrival, prompt, answer))


def write_recorded(path: Path, requests: Iterable[Request]) -> None:
    with whole_file(path) as file:
        for r in requests:
            starts = list(r.message_starts)
            ids = packed(r.tokens[: r.input_len]), packed(r.tokens[r.input_len :])
            line = RecordedLine(r.arrival, *ids, r.session, r.turn, starts)
            line.reply_start, line.tenant = r.reply_start, r.tenant
            line.hint = None if r.hint is None else str(r.hint)
            write_line(file, line)


def write_compact(path: Path, requests: Iterable[Request]) -> None:
    """Each prompt as what is new after the longest prefix it shares with the session's last
    request, or with the last one that began alike.
    """
    of_session: dict[int, tuple[int, Request]] = {}
    alike: dict[bytes, tuple[int, Request]] = {}
    with whole_file(path) as file:
        for number, r in enumerate(of_one_tenant(requests, "compact")):
            prompt, start = r.tokens[: r.input_len], r.tokens[:SAME_START].tobytes()
            base, shared = None, 0
            for known in (of_session.get(r.session), alike.get(start)):
                if known is not None and (same := common_prefix(known[1].tokens, prompt)) > shared:
                    base, shared = (known[0], same), same
            new, answer = prompt[shared:].tolist(), r.tokens[r.input_len :].tolist()
            write_line(file, CompactLine(r.session, r.turn, r.arrival, new, answer, base))
            of_session[r.session] = alike[start] = (number, r)


def of_one_tenant(requests: Iterable[Request], name: str) -> Iterator[Request]:
    """`requests` one by one. Raises ValueError at the first of a second tenant: format `name` does
    not say whose a request is.
    """
    tenant: str | None = None
    for request in requests:
        if tenant is not None and request.tenant != tenant:
            raise ValueError(
                f"format {name!r} does not say which tenant a request is of, and these are of "
                "several; write them as 'recorded'"
            )
        tenant = request.tenant
        yield request


def packed(tokens: TokenArray) -> bytes:
    return tokens.astype(PACKED, copy=False).tobytes()


def unpacked(ids: bytes | list[int]) -> TokenArray:
    """Raises ValueError for bytes that are no whole number of ids."""
    if not isinstance(ids, bytes):
        return np.asarray(ids, dtype=np.int32)
    if len(ids) % PACKED.itemsize:
        raise ValueError(f"its packed ids have {len(ids):,} bytes, not 4 for each")
    return np.frombuffer(ids, PACKED).astype(np.int32, copy=False)


def _parts(request: Request) -> tuple[list[int], list[int]]:
    return (
        request.tokens[: request.input_len].tolist(),
        request.tokens[request.input_len :].tolist(),
    )
