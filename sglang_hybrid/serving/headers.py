"""Our headers of HTTP requests: `X-Hybrid-NAME`, or `X-Request-Id-Hybrid-NAME`, which is the same.

A gateway may set either. SGLang's router (sglang-router) forwards few headers, those that begin
with `X-Request-Id-` among them.
"""

from __future__ import annotations

from typing import Protocol

PREFIXES = ("X-Hybrid-", "X-Request-Id-Hybrid-")


class Headers(Protocol):
    """Headers of a request. Those that came over HTTP have all values of a name (`getlist`), those
    over gRPC have one.
    """

    def get(self, name: str, /) -> str | None: ...


def values(headers: Headers, name: str) -> list[str]:
    """All that a request says under a name, in each place where it does."""
    found: list[str] = []
    for header in (prefix + name for prefix in PREFIXES):
        if hasattr(headers, "getlist"):
            found += headers.getlist(header)
        elif (said := headers.get(header)) is not None:
            found.append(said)
    return found


def value(headers: Headers, name: str) -> str | None:
    """The value that a request gives under a name; None if there is none. Raises ValueError where
    it says two things.
    """
    said = set(values(headers, name))
    if len(said) > 1:
        raise ValueError(f"the request has two values of {PREFIXES[0]}{name}; give one.")
    return said.pop() if said else None
