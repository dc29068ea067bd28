"""All trace formats by name: how each is recognised, read and, where tokens allow it, written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sglang_hybrid.core.traffic.requests import (
    FreshTokens,
    Request,
    make_request,
)
from sglang_hybrid.extensions.lab.simulation.traces.arrivals import Azure
from sglang_hybrid.extensions.lab.simulation.traces.blocks import BlockReader
from sglang_hybrid.extensions.lab.simulation.traces.conversations import (
    ChatTokenizer,
    ConversationReader,
    OpenAi,
    ShareGpt,
)
from sglang_hybrid.extensions.lab.simulation.traces.line_formats import (
    CompactLine,
    MarconiLine,
    MooncakeLine,
    RecordedLine,
    compact_lines,
    json_lines,
    marconi_lines,
    mooncake_lines,
    recorded_lines,
    write_compact,
    write_marconi,
    write_recorded,
)
from sglang_hybrid.extensions.lab.simulation.traces.lines import (
    Reading,
    TraceError,
    numbered_lines,
)
from sglang_hybrid.extensions.lab.simulation.traces.stitch import stitched

OF_FORMATS = ("max_input", "stitch", "tokenizer", "session_rate", "seed")
"""Options of reading (`Reading`) that only some formats have a use for."""

CLOCK = ("session_rate", "seed")
"""Of formats without one."""


@dataclass(frozen=True)
class Format:
    """A trace format. starts_with: keys (or text) by which its first line is recognised. options:
    of `OF_FORMATS`, those that change how it is read.
    """

    name: str
    about: str
    starts_with: tuple[str, ...]
    read: Callable[[Path, Reading], list[Request]]
    write: Callable[[Path, Iterable[Request]], None] | None = None
    options: tuple[str, ...] = ()


def read_azure(path: Path, reading: Reading) -> list[Request]:
    """Azure's arrivals and lengths; every token is a new one, so nothing can be reused."""
    azure, fresh = Azure.read(path, reading.limit, reading.skipped), FreshTokens()
    requests: list[Request] = []
    for arrival, prompt, answer in zip(azure.arrivals, azure.prompts, azure.answers, strict=True):
        tokens = fresh.take(prompt), fresh.take(answer)
        request = make_request(len(requests), 0, arrival, *tokens)
        reading.room.take(request)
        requests.append(request)
    return requests


def read_blocks(path: Path, reading: Reading) -> list[Request]:
    reader = BlockReader(reading.skipped, reading.session_rate, reading.seed, reading.room)
    return reader.read(path, reading.limit)


def _read_text(schema: type[ShareGpt] | type[OpenAi], path: Path, how: Reading) -> list[Request]:
    tokenizer = ChatTokenizer(how.tokenizer)
    reader = ConversationReader(tokenizer, how.skipped, how.session_rate, how.seed, how.room)
    return reader.read(path, schema, how.limit)


def read_mooncake(path: Path, reading: Reading) -> list[Request]:
    requests = json_lines(MooncakeLine, "a Mooncake trace", mooncake_lines)(path, reading)
    return stitched(requests) if reading.stitch else requests


FORMATS = {
    known.name: known
    for known in (
        Format(
            "recorded",
            "our recorder's",
            ("input_ids",),
            # The last line may be torn: the server was stopped while it wrote.
            json_lines(RecordedLine, "a recorded trace", recorded_lines, ordered=False, torn=True),
            write_recorded,
        ),
        Format(
            "compact",
            "prompts as differences",
            ("base", "new"),
            json_lines(CompactLine, "a compact trace", compact_lines),
            write_compact,
        ),
        Format(
            "marconi",
            "the artifact's",
            ("session_id", "ts"),
            json_lines(MarconiLine, "a Marconi trace", marconi_lines),
            write_marconi,
        ),
        Format(
            "mooncake",
            "blocks of 512 tokens",
            ("timestamp", "hash_ids"),
            read_mooncake,
            options=("max_input", "stitch"),
        ),
        Format(
            "blocks",
            "kv-cache-tester's conversations",
            ("requests",),
            read_blocks,
            options=CLOCK,
        ),
        Format(
            "sharegpt",
            "text",
            ("conversations",),
            partial(_read_text, ShareGpt),
            options=("tokenizer", *CLOCK),
        ),
        Format(
            "openai",
            "text",
            ("messages",),
            partial(_read_text, OpenAi),
            options=("tokenizer", *CLOCK),
        ),
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
    if path.is_fifo():
        raise TraceError(
            f"{path} is a pipe, which is read once; name its format by --format, or write it to a "
            "file"
        )
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


def read_trace(
    path: Path, reading: Reading | None = None, name: str | None = None
) -> list[Request]:
    """The requests of `path`, in order of arrival. Raises TraceError, also if there are none."""
    reading = reading or Reading()
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
