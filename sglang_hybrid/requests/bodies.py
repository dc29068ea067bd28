"""Bodies of HTTP requests, read up to a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import Request


async def read_body(request: Request, most: int, why: str) -> bytes:
    """The body of `request`. Raises ValueError if it has more than `most` bytes; the sentence ends
    with `why`.
    """
    body, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= most:
            body += part  # the rest is read too: a client that still sends takes no answer
    if size > most:
        raise ValueError(f"the body has {size:,} bytes; {why} {most:,} at most.")
    return bytes(body)
