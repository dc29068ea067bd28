"""Names of tenants in files and messages: hashes with a secret key, from which no salt can be
guessed.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

NAME_BYTES: Final = 8
KEY_VARIABLE: Final = "SGLANG_HYBRID_RECORD_KEY"
"""The environment variable with the key. Without it, each start of a server has its own."""


def tenant_name(extra_key: str | None, cache_salt: str | None, key: str | bytes) -> str:
    """The name of the tenant of requests with this extra key and cache salt: 16 hex digits, or ""
    if both are empty.

    key: the servers' SGLANG_HYBRID_RECORD_KEY; without it, each start of a server has its own.
    """
    if not extra_key and not cache_salt:
        return ""
    return hashed(extra_key or None, cache_salt or None, secret_key(key))


def secret_key(key: str | bytes) -> bytes:
    """A secret of any length as the key of `hashed`."""
    return blake2b(key.encode() if isinstance(key, str) else key).digest()


def hashed(extra_key: str | None, salt: str | None, key: bytes) -> str:
    """16 hex digits that depend on both texts, on which of them is None, and on the key."""
    first = b"-" if extra_key is None else b"+" + extra_key.encode()
    second = b"-" if salt is None else b"+" + salt.encode()
    content = len(first).to_bytes(8, "little") + first + second
    return blake2b(content, key=key, digest_size=NAME_BYTES).hexdigest()
