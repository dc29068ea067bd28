"""All trace formats by name: how each is recognised, read and, where tokens allow it, written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.simulation.traces.arrivals import Azure
from sglang_hybrid.simulation.traces.blocks import BlockReader
from sglang_hybrid.simulation.traces.conversations import (
    ChatTokenizer,
    ConversationReader,
    OpenAi,
    ShareGpt,
)
from sglang_hybrid.simulation.traces.requests import (
    CompactLine,
    Fresh,
    Request,
    Seconds,
    Skipped,
    TokenArray,
    Tokens,
    TraceError,
    make_request,
    numbered_lines,
    read_compact,
    read_lines,
    read_mooncake,
    whole_file,
    write_line,
)
from sglang_hybrid.simulation.traces.stitch import stitched

SAME_START = 32  # tokens; requests that share them may share more


@dataclass
class Reading:
    """How to read. limit: requests. max_input: Mooncake's longer prompts are left out. stitch: its
    unknown tokens are taken from the prompts that go on from them.

    session_rate: sessions a second, and seed of their arrivals, where a format has no clock.
    """

    limit: int | None = None
    max_input: int | None = None
    tokenizer: str | None = None
    session_rate: float = 1.0
    seed: int = 0
    skipped: Skipped = field(default_factory=Skipped)
    stitch: bool = False


@dataclass(frozen=True)
class Format:
    """A trace format. starts_with: keys (or text) by which its first line is recognised."""

    name: str
    about: str
    starts_with: tuple[str, ...]
    read: Callable[[Path, Reading], list[Request]]
    write: Callable[[Path, Iterable[Request]], None] | None = None


class MarconiLine(msgspec.Struct):
    session_id: int
    turn_id: int
    ts: Seconds
    input_tokens: Tokens
    output_tokens: Tokens


class RecordedLine(msgspec.Struct, omit_defaults=True):
    """What our own recorder writes, one line per request, in the order in which they ended.

    t, first, end: seconds since the recording began: arrival, first token, last token.
    message_starts: positions in the prompt at which messages begin. tenant: a name without meaning
    for the cache salt, extra key and adapter together; prompts of different ones share nothing.
    hint: what its client said of the session (`Hint.parse`). Other keys are ignored.
    """

    t: Seconds
    input_ids: Tokens
    output_ids: Tokens
    session: int | None = None
    turn: int = 0
    message_starts: list[Annotated[int, Meta(ge=0)]] = []
    first: Seconds | None = None
    end: Seconds | None = None
    tenant: str = ""
    hint: str | None = None


def read_marconi(path: Path, reading: Reading) -> list[Request]:
    """The Marconi artifact's JSON Lines."""

    def convert(number: int, line: MarconiLine) -> Request:
        return make_request(
            line.session_id, line.turn_id, line.ts, line.input_tokens, line.output_tokens
        )

    what = "a Marconi trace"
    return read_lines(path, MarconiLine, convert, what, reading.limit, reading.skipped)


def write_marconi(path: Path, requests: Iterable[Request]) -> None:
    with whole_file(path) as file:
        for r in of_one_tenant(requests, "marconi"):
            prompt, answer = _parts(r)
            write_line(file, MarconiLine(r.session, r.turn, r.arrival, prompt, answer))


def read_recorded(path: Path, reading: Reading) -> list[Request]:
    """Our recorder's JSON Lines, in order of arrival. A request without a session is one of its
    own. The last line may be torn: the server was stopped while it wrote.
    """

    def convert(number: int, line: RecordedLine) -> Request:
        if not line.t <= (line.t if line.first is None else line.first):
            raise ValueError("its first token is older than its arrival")
        starts = tuple(line.message_starts)
        if list(starts) != sorted(starts) or (starts and starts[-1] >= len(line.input_ids)):
            raise ValueError("its message_starts do not rise within the prompt")
        session = number - 1 if line.session is None else line.session
        parts = line.input_ids, line.output_ids
        hint = None if line.hint is None else Hint.parse(line.hint)
        return make_request(session, line.turn, line.t, *parts, starts, line.tenant, hint)

    what = "a recorded trace"
    ended = read_lines(
        path, RecordedLine, convert, what, reading.limit, reading.skipped, ordered=False, torn=True
    )
    return sorted(ended, key=lambda request: request.arrival)


def write_recorded(path: Path, requests: Iterable[Request]) -> None:
    with whole_file(path) as file:
        for r in requests:
            starts = list(r.message_starts)
            line = RecordedLine(r.arrival, *_parts(r), r.session, r.turn, starts)
            line.tenant, line.hint = r.tenant, None if r.hint is None else str(r.hint)
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


def read_azure(path: Path, reading: Reading) -> list[Request]:
    """Azure's arrivals and lengths; every token is a new one, so nothing can be reused."""
    azure, fresh = Azure.read(path, reading.limit, reading.skipped), Fresh()
    rows = zip(azure.arrivals, azure.prompts, azure.answers, strict=True)
    return [
        make_request(number, 0, arrival, fresh.take(prompt), fresh.take(answer))
        for number, (arrival, prompt, answer) in enumerate(rows)
    ]


def read_blocks(path: Path, reading: Reading) -> list[Request]:
    reader = BlockReader(reading.skipped, reading.session_rate, reading.seed)
    return reader.read(path, reading.limit)


def _read_text(schema: type[ShareGpt] | type[OpenAi], path: Path, how: Reading) -> list[Request]:
    tokenizer = ChatTokenizer(how.tokenizer)
    reader = ConversationReader(tokenizer, how.skipped, how.session_rate, how.seed)
    return reader.read(path, schema, how.limit)


def _compact(path: Path, reading: Reading) -> list[Request]:
    return read_compact(path, reading.limit, reading.skipped)


def _mooncake(path: Path, reading: Reading) -> list[Request]:
    requests = read_mooncake(path, reading.limit, reading.max_input, reading.skipped)
    return stitched(requests) if reading.stitch else requests


FORMATS = {
    known.name: known
    for known in (
        Format("recorded", "our recorder's", ("input_ids",), read_recorded, write_recorded),
        Format("compact", "prompts as differences", ("base", "new"), _compact, write_compact),
        Format("marconi", "the artifact's", ("session_id", "ts"), read_marconi, write_marconi),
        Format("mooncake", "blocks of 512 tokens", ("timestamp", "hash_ids"), _mooncake),
        Format("blocks", "kv-cache-tester's conversations", ("requests",), read_blocks),
        Format("sharegpt", "text", ("conversations",), partial(_read_text, ShareGpt)),
        Format("openai", "text", ("messages",), partial(_read_text, OpenAi)),
        Format("azure", "arrivals and lengths only", ("TIMESTAMP,",), read_azure),
    )
}


def find_format(name: str) -> Format:
    """Raises ValueError, listing the formats there are."""
    if name not in FORMATS:
        raise ValueError(f"unknown trace format {name!r}; known are {', '.join(FORMATS)}")
    return FORMATS[name]


def recognise(path: Path) -> Format:
    """The format that the first line of `path` looks like. Raises TraceError if it is none."""
    if path.is_dir():
        return FORMATS["blocks"]
    head = next((line for _, line in numbered_lines(path) if line.strip(b"[ \r\n")), b"")
    for known in FORMATS.values():
        marks = [
            key.encode() if key[-1] == "," else f'"{key}"'.encode() for key in known.starts_with
        ]
        if all(mark in head for mark in marks):
            return known
    if not head:
        raise TraceError(f"{path} holds no request")
    raise TraceError(
        f"{path}:1: like none of the formats {', '.join(FORMATS)}; name it by --format"
    )


def read_trace(path: Path, reading: Reading, name: str | None = None) -> list[Request]:
    """The requests of `path`, in order of arrival. Raises TraceError, also if there are none."""
    how = recognise(path) if name is None else find_format(name)
    requests = how.read(path, reading)
    if not requests:
        bad = f"; {reading.skipped.count} bad lines were skipped" if reading.skipped.count else ""
        raise TraceError(f"{path} holds no request{bad}")
    return requests


def write_trace(path: Path, requests: Iterable[Request], name: str) -> None:
    """Write `requests` as format `name`, whole or not at all. Raises ValueError, OSError."""
    how = find_format(name)
    if how.write is None:
        writable = ", ".join(known.name for known in FORMATS.values() if known.write)
        raise ValueError(f"format {name!r} cannot be written; {writable} can")
    how.write(path, requests)


def common_prefix(one: TokenArray, other: TokenArray) -> int:
    """How many tokens two sequences share from the start."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    first = int(np.argmax(differ)) if length else 0
    return first if length and differ[first] else length


def of_one_tenant(requests: Iterable[Request], name: str) -> Iterator[Request]:
    """The requests; raises ValueError at the first of another tenant, which format `name` cannot
    tell apart.
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


def _parts(request: Request) -> tuple[list[int], list[int]]:
    return (
        request.tokens[: request.input_len].tolist(),
        request.tokens[request.input_len :].tolist(),
    )
