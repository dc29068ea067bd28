"""Extra keys under which a scheduler stores requests, made of those that clients send.

SGLang keeps requests with different extra keys apart. The server makes keys of its own for what
must be apart within a tenant, in this order:

    api-key/HASH/KEY      of a client with an API key, where keys make tenants
    modular/DIGEST/KEY    prompts that are composed of segments
    module/START/KEY      single segments of such prompts
    KEY + adapter's id    requests with a LoRA adapter; SGLang appends it
    EXACT + KEY           requests that ask for exact copies only, where others may be smaller

No two requests of different clients, or of different kinds, have the same key, because a client's
key begins like none of these (`check_key`) and ends like none of them (`apart_from_adapters`).
"""

from __future__ import annotations

import re
from typing import Final

from sglang_hybrid.core.sentences import quote

OF_KEY: Final = "api-key/"
COMPOSED: Final = "modular/"
MODULE: Final = "module/"
EXACT: Final = "\0exact\0"

_LIKE_AN_ADAPTER: Final = re.compile(r"[0-9a-f]{32}(?P<dots>\.*)\Z")


def check_key(extra_key: object) -> None:
    """Raise ValueError for a client's extra key that looks like one that the server makes."""
    if isinstance(extra_key, str) and extra_key.startswith((COMPOSED, MODULE, "\0")):
        raise ValueError(
            f"extra_key is {quote(extra_key)}; names that begin with {COMPOSED}, {MODULE} or the "
            "character 0 are the server's own."
        )


def composed_key(extra_key: str | None, digest: str) -> str:
    """The key of prompts that are composed of segments. digest: of where the segments stand; it has
    no slash.
    """
    return f"{COMPOSED}{digest}/{_optional(extra_key)}"


def segment_key(extra_key: str | None, start: int) -> str:
    """The key of a segment that begins at position `start`."""
    return f"{MODULE}{start}/{_optional(extra_key)}"


def apart_from_adapters(extra_key: str) -> str:
    """The key of a request without an adapter. One that ends like an adapter's id, 32 hexadecimal
    digits, gets a dot at its end, and so does one that ends in an id and dots, so that no two
    become one.
    """
    return f"{extra_key}." if _LIKE_AN_ADAPTER.search(extra_key) else extra_key


def stored_under(extra_key: str | None, adapter: str | None) -> str | None:
    """The key of a request with the id of a LoRA `adapter`, or none."""
    if adapter is not None:
        return (extra_key or "") + adapter
    return None if extra_key is None else apart_from_adapters(extra_key)


def exact_key(extra_key: str | None) -> str:
    """The key of a request that asks for exact copies only."""
    return EXACT + _optional(extra_key)


def is_exact_part(extra_key: str | None) -> bool:
    """True if what is stored under this key must stay exact."""
    return extra_key is not None and extra_key.startswith(EXACT)


def payer(stored: str | None) -> str | None:
    """The payer of what is stored under a key: the client with an API key, or else the extra key as
    it was sent; None without either.

    A `cache_salt`, an adapter, and the parts of the tree that the server keeps apart make no other
    payer, and neither does the extra key of a client with an API key.
    """
    key = stored
    if key is not None and key.startswith(EXACT):
        key = _sent(key.removeprefix(EXACT))
    if key is not None and (found := _LIKE_AN_ADAPTER.search(key)):
        key = key[:-1] if found["dots"] else key[:-32]
    if key is not None and key.startswith((COMPOSED, MODULE)):
        key = _sent(key.split("/", 2)[2])
    if key is not None and key.startswith(OF_KEY):
        return "/".join(key.split("/", 2)[:2]) + "/"
    return key or None


def _optional(extra_key: str | None) -> str:
    return "-" if extra_key is None else f"+{extra_key}"


def _sent(optional: str) -> str | None:
    """The key of which `_optional` made this."""
    return None if optional == "-" else optional[1:]
