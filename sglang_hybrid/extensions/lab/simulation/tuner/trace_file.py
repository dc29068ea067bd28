"""The file that finished requests are recorded in (`--hybrid-record`), for the replay to read.

A server that is started again goes on in the same file. A disk that is full costs the requests that
end meanwhile, and nothing else: the file ends with a whole line at any time, unless the machine or
the process was stopped in the middle of one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import stat
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from sglang_hybrid.core.named_files import MOST_BYTES, decode_as, open_named
from sglang_hybrid.core.traffic.recorder import FinishedRequest
from sglang_hybrid.extensions.lab.simulation.traces.line_formats import (
    RecordedLine,
    packed,
)

logger = logging.getLogger(__name__)

LONGEST_QUEUE = 1_024
"""Records that may wait for a slow disk; further ones are left out of the file."""

RETRY_SECONDS = 5.0
"""Time between two attempts to write while the disk is full."""

LAST_BYTES = 1 << 20
"""Bytes at a file's end in which its latest arrivals are looked for; more if a line is longer."""


class RecordingError(ValueError):
    """A file that cannot be recorded in; the sentence says why and what to do."""


class _Time(msgspec.Struct):
    t: float


class TraceFile:
    """Appends finished requests to a file in the recorded format, in a thread of its own.

    Arrivals go on from those that the file has already. Nobody but the owner can read the file.
    Raises `RecordingError` if the file cannot be written, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written = 0
        self.left_out = 0
        self.failure = ""
        self._file, self._start, self._size = _open(path)
        self._retry_at = 0.0
        self._queue: queue.Queue[FinishedRequest | None] = queue.Queue(LONGEST_QUEUE)
        self._thread = threading.Thread(target=self._write_all, name="hybrid-record", daemon=True)
        self._thread.start()

    def add(self, record: FinishedRequest) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.left_out += 1

    def close(self) -> None:
        """Write what waits and end."""
        self._queue.put(None)
        self._thread.join()

    def info(self) -> dict[str, Any]:
        """Counts for /server_info: requests written and left out, and the present error, if any."""
        return {
            "file": str(self.path),
            "written": self.written,
            "left_out": self.left_out,
            "failure": self.failure,
        }

    def _write_all(self) -> None:
        origin: float | None = None
        while (record := self._queue.get()) is not None:
            origin = record.arrival if origin is None else origin
            line = as_line(record, self._start + max(0.0, record.arrival - origin))
            self._write(msgspec.json.encode(line) + b"\n")
        os.close(self._file)

    def _write(self, line: bytes) -> None:
        """All of `line` or nothing of it."""
        if self.failure and time.monotonic() < self._retry_at:
            self.left_out += 1
            return
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            self._failed(error)
            return
        self._size += len(line)
        self.written += 1
        if self.failure:
            self.failure = ""
            logger.warning(
                "sglang_hybrid: %s is written again; %d requests are not in it.",
                *(self.path, self.left_out),
            )

    def _failed(self, error: OSError) -> None:
        self.left_out += 1
        self._retry_at = time.monotonic() + RETRY_SECONDS
        if stat.S_ISREG(os.fstat(self._file).st_mode):
            os.ftruncate(self._file, self._size)  # without the beginning of this line
        if not self.failure:
            logger.error(
                "sglang_hybrid: %s cannot be written (%s); requests are left out of it until it "
                "can.",
                *(self.path, error.strerror),
            )
        self.failure = error.strerror or str(error)


def check(path: Path) -> None:
    """Raise `RecordingError` if requests cannot be recorded in `path`; makes no file."""
    if path.is_dir():
        raise RecordingError(f"{path} is a directory; give the name of a file.")
    if path.is_fifo() or path.is_socket():
        raise RecordingError(f"{path} is a pipe or a socket; give the name of a file.")
    if path.suffix == ".gz":
        raise RecordingError(f"{path}: recordings are not compressed; give a name without .gz.")
    if not path.parent.is_dir():
        raise RecordingError(f"there is no directory {path.parent}; make it, or give another file.")
    there = path.exists()
    if not os.access(path if there else path.parent, os.R_OK | os.W_OK):
        raise RecordingError(f"{path} cannot be written; give another file.")
    if path.is_file() and path.stat().st_size and not _is_recording(path):
        raise RecordingError(f"{path} exists and is no recording; give another file, or remove it.")


def as_line(record: FinishedRequest, t: float) -> RecordedLine:
    """t: its arrival in seconds since the recording began."""
    tokens = record.tokens
    return RecordedLine(
        t,
        packed(tokens[: record.input_len]),
        packed(tokens[record.input_len :]),
        message_starts=list(record.message_starts),
        reply_start=record.reply_start,
        tenant=record.tenant,
        hint=None if record.hint is None else str(record.hint),
        hit=record.hit_len,
    )


def _open(path: Path) -> tuple[int, float, int]:
    """A descriptor, the seconds at which what is appended begins, and the file's size in bytes."""
    check(path)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return descriptor, 0.0, 0
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RecordingError(f"another server records in {path}; give another file.") from error
    except OSError as error:
        raise RecordingError(f"{path} cannot be written: {error.strerror}.") from error
    os.fchmod(descriptor, 0o600)  # it may have been there
    last = _last_lines(descriptor, found.st_size)
    whole = last.rfind(b"\n") + 1
    size = found.st_size - (len(last) - whole)
    if size < found.st_size:
        os.ftruncate(descriptor, size)
        logger.warning("sglang_hybrid: the last line of %s was torn and is removed.", path)
    if not size:
        return descriptor, 0.0, 0
    return descriptor, _latest(last[:whole]) + max(0.0, time.time() - found.st_mtime), size


def _last_lines(descriptor: int, size: int) -> bytes:
    """The end of a file, with a whole line at least if the file has one."""
    length = LAST_BYTES
    while True:
        text = os.pread(descriptor, length, max(0, size - length))
        if length >= size or text.count(b"\n") > 1:
            return text
        if length > MOST_BYTES:
            raise RecordingError("it ends with no line of a recording; give another file.")
        length *= 2


def _latest(lines: bytes) -> float:
    """The latest arrival in the end of a recording, in seconds."""
    latest = 0.0
    decoder = msgspec.json.Decoder(_Time)
    for line in lines.split(b"\n"):
        try:
            latest = max(latest, decoder.decode(line).t)
        except (msgspec.DecodeError, RecursionError):  # the first one has begun before
            continue
    return latest


def _is_recording(path: Path) -> bool:
    with open_named(path) as file:
        line = file.readline(MOST_BYTES)
    if not line.endswith(b"\n"):
        return len(line) < MOST_BYTES and line.startswith(b'{"t":')  # torn
    try:
        decode_as(line, RecordedLine)
    except ValueError:
        return False
    return True
