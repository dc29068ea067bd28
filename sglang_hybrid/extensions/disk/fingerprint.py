"""Fingerprints of what KV and states depend on beside the tokens: weights and configuration.

A checkpoint of many gigabytes is not read whole at each start. Of each tensor some blocks are, so
that weights which were trained further, merged or quantised differ in almost every block.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

WHOLE_BYTES = 256 << 20
"""Weights up to this size are read whole."""

_BLOCK = 4_096
_BLOCKS_PER_TENSOR = 4
_BLOCKS_PER_FILE = 256
_LONGEST_HEADER = 100 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SETTINGS = ("config.json", "hf_quant_config.json", "quantize_config.json", "adapter_config.json")


def fingerprint(folder: Path) -> str:
    """A hash of the weights in a folder, of their configuration, and of the code that is there; 32
    hex digits.

    Raises OSError, and FileNotFoundError if there are no weights.
    """
    weights = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS)
    if not weights:
        raise FileNotFoundError(f"{folder} holds no weights")
    total = blake2b(digest_size=16)
    whole = sum(path.stat().st_size for path in weights) <= WHOLE_BYTES
    for name in (*_SETTINGS, *sorted(path.name for path in folder.glob("*.py"))):
        path = folder / name
        if path.is_file():
            total.update(name.encode() + blake2b(path.read_bytes()).digest())
    for path in weights:
        size = path.stat().st_size
        total.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb", buffering=0) as file:
            for start, length in [(0, size)] if whole else _blocks(path, size):
                _add(total, file.fileno(), start, length)
    return total.hexdigest()


def _add(total: blake2b, descriptor: int, start: int, length: int) -> None:
    while length > 0:
        content = os.pread(descriptor, min(length, 1 << 20), start)
        if not content:
            return
        total.update(content)
        start, length = start + len(content), length - len(content)


def _blocks(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """The first byte of each block that is read, and its length."""
    spans = _tensors(path, size) if path.suffix == ".safetensors" else []
    many = _BLOCKS_PER_TENSOR if spans else _BLOCKS_PER_FILE
    for start, end in [(0, min(size, _BLOCK)), *spans] if spans else [(0, size)]:
        step = max(_BLOCK, (end - start) // many)
        for at in range(start, end, step):
            yield at, min(_BLOCK, end - at)


def _tensors(path: Path, size: int) -> list[tuple[int, int]]:
    """First and last byte of each tensor of a safetensors file; none if it cannot be read."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(_LONGEST_HEADER, size - 8):
            return []
        try:
            header = json.loads(file.read(length))
            offsets = [value["data_offsets"] for name, value in header.items() if name[0] != "_"]
            return sorted((8 + length + start, 8 + length + end) for start, end in offsets)
        except (ValueError, KeyError, TypeError, IndexError):
            return []
