"""The text that a chat template makes of a request, without the cost of tokenizing it.

SGLang renders and encodes a chat in one method (patch 0040). `rendered` runs that method and stops
it between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

_only_render: ContextVar[bool] = ContextVar("only_render", default=False)


@dataclass(frozen=True)
class Rendering:
    """A chat as text. encode_kwargs: what SGLang passes to the tokenizer with it."""

    text: str
    encode_kwargs: Mapping[str, Any]


class _Stopped(BaseException):
    """Not an `Exception`: SGLang tries another form of the tools after any of those."""

    def __init__(self, rendering: Rendering) -> None:
        self.rendering = rendering


def encoded(
    encode: Callable[[Any, str, Mapping[str, Any]], list[int]],
    tokenizer: Any,
    text: str,
    encode_kwargs: Mapping[str, Any],
) -> list[int]:
    """`encode(tokenizer, text, encode_kwargs)`; what SGLang calls instead of `encode`."""
    if _only_render.get():
        raise _Stopped(Rendering(text, encode_kwargs))
    return encode(tokenizer, text, encode_kwargs)


def rendered(process: Callable[[], Any]) -> Rendering | None:
    """What `process`, which renders and encodes a chat, has rendered; None if it did so without a
    Jinja template.
    """
    token = _only_render.set(True)
    try:
        process()
    except _Stopped as stopped:
        return stopped.rendering
    finally:
        _only_render.reset(token)
    return None
