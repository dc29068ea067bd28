"""Finished requests: the latest in memory, bounded in bytes; all of them in a file, if wanted."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from sglang_hybrid.replay.formats import RecordedLine
from sglang_hybrid.replay.traces import TokenArray

logger = logging.getLogger(__name__)

RECORD_BYTES = 400
"""Of a record beside its tokens."""

LONGEST_QUEUE = 1_024
"""Records that may wait for a slow disk; further ones are left out of the file."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that ended. tokens: int32, its prompt of `input_len` tokens and its answer.

    arrival: seconds on any clock. kv_room, slot_room: KV tokens and state slots that running
    requests left to the cache when it ended. tenant: a name for who sent it, "" for a request
    without cache salt, extra key and adapter.
    """

    tokens: TokenArray
    input_len: int
    arrival: float
    hit_len: int
    kv_room: int
    slot_room: int
    message_starts: tuple[int, ...] = ()
    tenant: str = ""

    @property
    def held_bytes(self) -> int:
        return RECORD_BYTES + self.tokens.nbytes + 8 * len(self.message_starts)


def compact(prompt: Sequence[int], answer: Sequence[int]) -> TokenArray:
    """Token ids as int32."""
    tokens = np.empty(len(prompt) + len(answer), dtype=np.int32)
    tokens[: len(prompt)] = prompt
    tokens[len(prompt) :] = answer
    return tokens


class Recorder:
    """The latest finished requests in at most `max_bytes`; the oldest are dropped."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._records: deque[Finished] = deque()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Finished) -> None:
        self._records.append(record)
        self.held_bytes += record.held_bytes
        while self.held_bytes > self.max_bytes:
            self.held_bytes -= self._records.popleft().held_bytes

    def latest(self, count: int) -> list[Finished]:
        """The last `count` records, or as many as there are, in order of arrival."""
        skipped = max(0, len(self._records) - count)
        records = list(self._records)[skipped:]
        return sorted(records, key=lambda record: record.arrival)


class TraceFile:
    """Appends finished requests to a file in the recorded format, in a thread of its own.

    Raises OSError if the file cannot be opened. If it cannot be written later, that is logged once
    and recording ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written = 0
        self.left_out = 0
        self._file = open_private(path)
        self._queue: queue.Queue[Finished | None] = queue.Queue(LONGEST_QUEUE)
        self._thread = threading.Thread(target=self._write_all, name="hybrid-record", daemon=True)
        self._thread.start()

    def add(self, record: Finished) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.left_out += 1

    def close(self) -> None:
        """Write what waits and end."""
        self._queue.put(None)
        self._thread.join()

    def _write_all(self) -> None:
        origin: float | None = None
        with self._file as file:
            while (record := self._queue.get()) is not None:
                origin = record.arrival if origin is None else origin
                line = as_line(record, max(0.0, record.arrival - origin))
                try:
                    file.write(msgspec.json.encode(line) + b"\n")
                    if self._queue.empty():
                        file.flush()
                except OSError as error:
                    logger.error(
                        "sglang_hybrid: %s cannot be written (%s); recording has ended after %d "
                        "requests.",
                        *(self.path, error.strerror, self.written),
                    )
                    return
                self.written += 1


def open_private(path: Path) -> BinaryIO:
    """An empty file for writing that nobody but its owner can read. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.fchmod(descriptor, 0o600)  # it may have been there
    return os.fdopen(descriptor, "wb")


def as_line(record: Finished, t: float) -> RecordedLine:
    tokens = record.tokens
    return RecordedLine(
        t,
        tokens[: record.input_len].tolist(),
        tokens[record.input_len :].tolist(),
        message_starts=list(record.message_starts),
        tenant=record.tenant,
    )
