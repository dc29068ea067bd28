"""Sizes and bandwidths as they are written on a command line."""

from sglang_hybrid.core.sentences import quote

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

MOST = 2**60
"""Bytes: more than any machine has, and less than 64 bits hold."""


def parse_bytes(text: str) -> int:
    """`5GB`, `1.5GiB`, `500MB` or a number of bytes. Raises ValueError."""
    number = text.strip().rstrip("bBkKmMgGtTiI")
    unit = text.strip()[len(number) :].upper()
    try:
        size = int(float(number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = -1
    if not 0 <= size <= MOST:
        raise ValueError(f"{quote(text)} is no size; write 5GB, 1.5GiB or a number of bytes")
    return size


def parse_rate(text: str) -> float:
    """`25GB/s`, in bytes per second. Raises ValueError."""
    size, slash, per = text.strip().rpartition("/")
    if not slash or per != "s" or not (rate := parse_bytes(size)) > 0:
        raise ValueError(f"{quote(text)} is no bandwidth; write 25GB/s")
    return float(rate)
