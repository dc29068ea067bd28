"""Which requests may share what was computed, learnt or noted: those of one tenant.

A tenant is an `extra_key`, a `cache_salt` and an adapter. SGLang keeps its tree apart for each of
them; everything that this package adds does the same, by the name that `tenant_of` gives.
"""

from __future__ import annotations

import os
import re
import secrets
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

Tenant: TypeAlias = tuple[str | None, str | None] | None
"""Extra key, with an adapter's id at its end, and cache salt; None where there is neither."""

LIKE_AN_ADAPTER = re.compile(r"[0-9a-f]{32}\.*\Z")
KEY_VARIABLE = "SGLANG_HYBRID_RECORD_KEY"
NAME_BYTES = 8


def tenant_of(req: Req) -> Tenant:
    """The tenant of a request."""
    return tenant(req.extra_key, req.cache_salt)


def tenant(extra_key: str | None, cache_salt: str | None) -> Tenant:
    """The tenant of requests with this extra key and salt; an empty salt is none."""
    if extra_key is None and not cache_salt:
        return None
    return (extra_key, cache_salt or None)


def apart_from_adapters(extra_key: str) -> str:
    """The extra key under which a request without an adapter is stored (patch 0030).

    SGLang appends an adapter's id, 32 hexadecimal digits, to the extra key. A request without an
    adapter whose extra key ends like an id would share the adapter's part of the tree; it gets a
    dot at its end instead, and so does one that ends in an id and dots, so that no two become one.
    """
    return f"{extra_key}." if LIKE_AN_ADAPTER.search(extra_key) else extra_key


def stored_under(extra_key: str | None, adapter: str | None) -> str | None:
    """The extra key under which SGLang stores a request with `extra_key` and the id of a LoRA
    `adapter`, or none.
    """
    if adapter is not None:
        return (extra_key or "") + adapter
    return None if extra_key is None else apart_from_adapters(extra_key)


class TenantNames:
    """Names of tenants for files: a hash with a secret key, from which no salt can be guessed.

    The key is that given, else the variable SGLANG_HYBRID_RECORD_KEY, or random: then a tenant has
    another name after the next start.
    """

    def __init__(self, key: bytes | None = None) -> None:
        if key is None:
            key = (os.environ.get(KEY_VARIABLE) or secrets.token_hex(16)).encode()
        self._key = blake2b(key).digest()

    def name(self, tenant: Tenant) -> str:
        """16 hex digits; "" where there is neither key nor salt."""
        if tenant is None:
            return ""
        extra_key, salt = (b"-" if part is None else b"+" + part.encode() for part in tenant)
        content = len(extra_key).to_bytes(8, "little") + extra_key + salt
        return blake2b(content, key=self._key, digest_size=NAME_BYTES).hexdigest()
