"""Requests that ask for exact copies only, on a server that keeps smaller ones.

Such requests are stored in a part of the tree of their own, as a tenant's are. Nothing in that part
is ever coded or copied below the device, so nothing in it comes from a copy that is not exact. A
tenant's exact requests find each other's prefixes.
"""

from __future__ import annotations

from sglang_hybrid.serving.requests.cache_fields import CacheFields
from sglang_hybrid.serving.stored_keys import exact_key
from sglang_hybrid.storage.codecs.in_use import keeps_exact


def storage_key(extra_key: str | None, fields: CacheFields) -> str | None:
    """The extra key under which a request is stored (hooks/scheduling.py)."""
    return exact_key(extra_key) if fields.hints.exact and not keeps_exact() else extra_key
