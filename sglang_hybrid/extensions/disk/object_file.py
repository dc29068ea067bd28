"""One file on disk: objects of one kind and size, each with its name and checksum.

The format is safetensors: one tensor `objects`, uint8 [count, size], and names and checksums in the
metadata. A file is read with `os.preadv`, not through a memory map: a mapped file that another
process truncates ends the reader with SIGBUS.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors.numpy import save

from sglang_hybrid.core.own_files import finished_name, open_regular, write_file

Bytes = NDArray[np.uint8]

FORMAT = "sglang_hybrid.tiers/2"
SUFFIX = ".safetensors"
NAME_BYTES = 16
MOST_OBJECTS = 1_024
"""Objects that one file may have."""

MOST_SINGLE_BYTES = 1 << 30
"""Bytes of a file with one object, as far as it is read."""

_LONGEST_HEADER = 1 << 20
_OBJECT_NAME = re.compile(r"[0-9a-f]{32}-[0-9]{1,4}" + re.escape(SUFFIX))
_TENSOR = "objects"


class BadFile(ValueError):
    """A file that is no whole file of ours; the sentence says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Header:
    """The content of a file.

    kind: "kv", "mamba" and so on. names: of the objects, `NAME_BYTES` bytes each. sums: their
    checksums. size: bytes of each object. start: bytes before the first one. written: when, in
    seconds since the epoch.
    """

    kind: str
    names: tuple[bytes, ...]
    sums: tuple[bytes, ...]
    size: int
    start: int
    written: float

    @property
    def file_bytes(self) -> int:
        return self.start + len(self.names) * self.size


def object_path(rank: Path, names: Sequence[bytes]) -> Path:
    """The path of the file of these objects in a rank's folder."""
    first = names[0].hex()
    return rank / first[:2] / f"{first}-{len(names)}{SUFFIX}"


def is_object_path(folder: str, name: str) -> bool:
    """True if `object_path` may give a file of this name in a folder of this name; also of one that
    is not finished.
    """
    finished = finished_name(name)
    return finished[:2] == folder and _OBJECT_NAME.fullmatch(finished) is not None


def checksum(identity: str, kind: str, name: bytes, content: Bytes) -> bytes:
    """A checksum (XXH3, 16 bytes) of an object and of what it belongs to, so that a right object
    under a wrong name, kind or model is found as well.
    """
    total = xxhash.xxh3_128()
    total.update(f"{FORMAT}\0{identity}\0{kind}\0".encode() + name)
    total.update(memoryview(np.ascontiguousarray(content)))  # type: ignore[arg-type]
    return total.digest()


def encode(
    identity: str, kind: str, names: Sequence[bytes], contents: Sequence[Bytes], written: float
) -> bytes:
    """The bytes of a file with these objects; all have the same size."""
    if not 0 < len(names) <= MOST_OBJECTS or len({content.nbytes for content in contents}) != 1:
        raise ValueError(f"A file has 1 to {MOST_OBJECTS} objects, all of one size.")
    sums = [checksum(identity, kind, *each) for each in zip(names, contents, strict=True)]
    metadata = {
        "format": FORMAT,
        "identity": identity,
        "kind": kind,
        "names": b"".join(names).hex(),
        "sums": b"".join(sums).hex(),
        "written": repr(written),
    }
    return save({_TENSOR: np.stack(list(contents))}, metadata)


def read_header(path: Path, identity: str) -> Header:
    """The header of the file, of which nothing is believed that can be checked.

    Raises BadFile for a file of another format, model or length; OSError.
    """
    header, total = _read_header(path, identity)
    if header.file_bytes != total:
        raise BadFile(f"it has {total:,} bytes instead of {header.file_bytes:,}")
    return header


def has_identity(path: Path | str, identity: str, folder: int | None = None) -> bool:
    """True if a file is one of this identity by its header, be it whole or not; `folder` is one
    that the path begins in.
    """
    try:
        _read_header(path, identity, folder)
    except (BadFile, OSError):
        return False
    return True


def _read_header(path: Path | str, identity: str, folder: int | None = None) -> tuple[Header, int]:
    """The header, and the bytes of the file."""
    descriptor = open_regular(path, folder=folder)
    try:
        total = os.fstat(descriptor).st_size
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if not 0 < length <= min(_LONGEST_HEADER, total - 8):
            raise BadFile("it has no header")
        return _parse(os.pread(descriptor, length, 8), 8 + length, identity), total
    finally:
        os.close(descriptor)


def _parse(text: bytes, start: int, identity: str) -> Header:
    try:
        content: Any = json.loads(text)
        metadata, tensor = content["__metadata__"], content[_TENSOR]
        if metadata["format"] != FORMAT or metadata["identity"] != identity:
            raise BadFile("it belongs to another model, setting or version")
        count, size = tensor["shape"]
        names = _split(metadata["names"], count)
        sums = _split(metadata["sums"], count)
        kind, written = metadata["kind"], float(metadata["written"])
        sound = tensor["dtype"] == "U8" and tensor["data_offsets"] == [0, count * size]
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, BadFile):
            raise
        raise BadFile("its header cannot be read") from error
    if not (sound and isinstance(kind, str) and 0 < count <= MOST_OBJECTS and size > 0):
        raise BadFile("its header contradicts itself")
    return Header(kind, names, sums, size, start, written)


def _split(text: str, count: int) -> tuple[bytes, ...]:
    content = bytes.fromhex(text)
    if len(content) != count * NAME_BYTES:
        raise BadFile("its header contradicts itself")
    return cut_names(content)


def cut_names(joined: bytes) -> tuple[bytes, ...]:
    """The names of `NAME_BYTES` bytes each that `joined` consists of."""
    return tuple(joined[i : i + NAME_BYTES] for i in range(0, len(joined), NAME_BYTES))


def read_objects(
    path: Path, header: Header, identity: str, wanted: Sequence[tuple[int, Bytes]]
) -> list[bool]:
    """Read objects into the buffers given.

    Args:
        wanted: number of the object in the file, and a buffer of `header.size` bytes.

    Returns whether each was read and has its checksum; a buffer whose object has not is undefined.
    Raises OSError.
    """
    found = []
    descriptor = open_regular(path)
    try:
        for number, buffer in wanted:
            at = header.start + number * header.size
            whole = _read(descriptor, buffer, at)
            right = whole and header.sums[number] == checksum(
                identity, header.kind, header.names[number], buffer
            )
            found.append(right)
    finally:
        os.close(descriptor)
    return found


def _read(descriptor: int, buffer: Bytes, at: int) -> bool:
    view, done = memoryview(buffer).cast("B"), 0  # type: ignore[arg-type]
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], at + done)
        if count == 0:
            return False
        done += count
    return True


def write_single(path: Path, identity: str, kind: str, content: bytes, written: float) -> int:
    """Write a file of one object that has no name; returns the file's bytes. Raises OSError."""
    data = np.frombuffer(content, dtype=np.uint8)
    file = encode(identity, kind, [bytes(NAME_BYTES)], [data], written)
    write_file(path, file)
    return len(file)


def read_single(path: Path, identity: str, kind: str) -> bytes | None:
    """The content that `write_single` wrote; None if there is no such file. Raises BadFile for one
    that is not whole, has more than MOST_SINGLE_BYTES, or belongs to something else; OSError.
    """
    try:
        header = read_header(path, identity)
    except FileNotFoundError:
        return None
    if header.kind != kind or len(header.names) != 1 or header.size > MOST_SINGLE_BYTES:
        raise BadFile("it holds something else")
    buffer = np.empty(header.size, dtype=np.uint8)
    if not all(read_objects(path, header, identity, [(0, buffer)])):
        raise BadFile("it does not have its checksum")
    return buffer.tobytes()
