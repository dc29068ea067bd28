"""Bodies of HTTP requests, within bounds on bytes and on how deep their JSON is nested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

if TYPE_CHECKING:
    from fastapi import Request

Body = TypeVar("Body")

MOST_DEPTH = 64
"""Arrays and objects around a value. Deeper ones end in Python's limit of recursion, somewhere
between the first reader of a body and a chat template, which is a status of 500.
"""

MOST_CONTAINERS = 100_000
"""Arrays and objects of one body. Each takes microseconds to read, in which nothing else runs."""

QUOTE, OPENING = ord('"'), ord("{")
_BRACES = bytes.maketrans(b"[]", b"{}")
_OTHERS = bytes(set(range(256)) - set(b'"[]{}'))


@dataclass(frozen=True)
class JsonShape:
    """The shape of JSON. containers: its arrays and objects. depth: the most that are nested."""

    containers: int
    depth: int

    def check(self, what: str = "the body") -> None:
        """Raises ValueError beyond `MOST_DEPTH` or `MOST_CONTAINERS`; `what` names the JSON."""
        if self.depth > MOST_DEPTH:
            raise ValueError(
                f"{what} is nested {self.depth:,} deep; it may be {MOST_DEPTH} deep at most."
            )
        if self.containers > MOST_CONTAINERS:
            raise ValueError(
                f"{what} has {self.containers:,} arrays and objects; it may have "
                f"{MOST_CONTAINERS:,} at most. Send several requests."
            )


def may_be_deep(body: bytes) -> bool:
    """True if `json_shape` has to look at `body`; this takes a small part of its time."""
    return body.count(b"[") + body.count(b"{") > MOST_DEPTH


def json_shape(body: bytes) -> JsonShape:
    """The shape of JSON, found without recursion, so that a body of any depth has one. Bytes that
    are no JSON have some shape, too.
    """
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    marks = np.frombuffer(plain.translate(_BRACES, _OTHERS), np.uint8)  # quotes and braces
    outside = marks[~np.bitwise_xor.accumulate(marks == QUOTE)]
    steps = outside[outside != QUOTE] == OPENING
    if not steps.any():
        return JsonShape(0, 0)
    nested = np.cumsum(np.where(steps, 1, -1))
    return JsonShape(int(steps.sum()), max(0, int(nested.max())))


@dataclass(frozen=True)
class BodyKind:
    """The name of a route's bodies in an error, and an example of a whole one, as JSON."""

    name: str
    example: str


async def read_json(
    request: Request, kind: type[Body], most: int, why: str, called: BodyKind
) -> Body:
    """The body of `request` as a `kind`; no body is an empty object.

    `BodyBounds` (long_requests.py) has read it and bounds the bytes that any body may have. Raises
    ValueError with a sentence if this one has more than `most` bytes (the sentence ends with
    `why`), is nested too deep, or is no `kind`; then the sentence ends with an example.
    """
    body = await request.body()
    if len(body) > most:
        raise ValueError(f"the body has {len(body):,} bytes; {why} {most:,} at most.")
    if may_be_deep(body):
        json_shape(body).check()
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"the body is no {called.name}: {error}. A whole one: {called.example}."
        ) from None
