"""Requests that ask for exact copies only, on a server whose copies below the device are smaller.

Such requests are stored in a part of the tree of their own, as a tenant's are. Nothing in that part
is ever copied below the device, so nothing in it comes from a copy that is not exact. A tenant's
exact requests find each other's prefixes.
"""

from __future__ import annotations

from sglang_hybrid.serving.requests.cache_fields import CacheFields
from sglang_hybrid.storage.codecs.coded_rows import chosen

_MARK = "\0exact\0"
_ESCAPE = "\0"


def apart_if_exact(extra_key: str | None, fields: CacheFields) -> str | None:
    """The extra key under which a request is stored (hooks/scheduling.py).

    No key that a client sends becomes the key of requests that ask for exactness: one that begins
    with the character 0 gets a second one.
    """
    if chosen().exact:
        return extra_key
    if fields.hints.exact:
        return _MARK if extra_key is None else f"{_MARK}+{extra_key}"
    if extra_key is not None and extra_key.startswith(_ESCAPE):
        return _ESCAPE + extra_key
    return extra_key


def is_exact_part(extra_key: str | None) -> bool:
    """Whether what is stored under this key must stay exact."""
    return extra_key is not None and extra_key.startswith(_MARK)
