"""The memory that this process may use: the machine's, or its container's if that is less."""

import ctypes
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # of glibc's malloc.h

KEPT = 1 << 30
"""Bytes of freed memory that stay with the process."""


def keep_freed_memory() -> None:
    """Let freed tensors' memory be used again instead of going back to the kernel.

    glibc maps every large block anew, and a forward pass then spends up to half of its time in page
    faults. Up to `KEPT` bytes of what was freed stay with the process. Another C library is left as
    it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, KEPT)
        mallopt(_M_TRIM_THRESHOLD, KEPT)


def memory_limit() -> int:
    """Bytes of memory in the machine or, if smaller, in this container (cgroup v2)."""
    total = int(psutil.virtual_memory().total)
    limit = _read_bytes(_CGROUP / "memory.max")
    return total if limit is None else min(total, limit)


def memory_used() -> int:
    """Bytes of `memory_limit()` that are taken, by whichever process."""
    memory = psutil.virtual_memory()
    used = int(memory.total - memory.available)
    limit, current = _read_bytes(_CGROUP / "memory.max"), _read_bytes(_CGROUP / "memory.current")
    if limit is None or current is None or limit >= memory.total:
        return used
    free = min(int(memory.available), limit - current)
    return memory_limit() - max(0, free)


def memory_available() -> int:
    """Bytes that can still be taken."""
    return memory_limit() - memory_used()


def _read_bytes(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
