"""The text that a chat template makes of a request, and what is done instead of tokenizing it.

SGLang renders and encodes a chat in one method (patch 0040). `render_chat` runs that method and
stops it between the two; `encoding` puts other tokens there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_hybrid.core.extensions import guard
from sglang_hybrid.serving.requests.encoded_pieces import Encode, encode_text

_instead: ContextVar[Encode | None] = ContextVar("instead", default=None)


@dataclass(frozen=True)
class Rendering:
    """A chat as text. encode_kwargs: what SGLang passes to the tokenizer with it."""

    text: str
    encode_kwargs: Mapping[str, Any]


class _Stopped(BaseException):
    """Carries a rendering. After an `Exception` SGLang would try other forms of the tools."""

    def __init__(self, rendering: Rendering) -> None:
        self.rendering = rendering


def encode_chat(
    encode: Callable[[Any, str, Mapping[str, Any]], list[int]],
    tokenizer: Any,
    text: str,
    encode_kwargs: Mapping[str, Any],
) -> list[int]:
    """The token ids of a rendered chat: what SGLang calls instead of its own `encode`. Inside
    `encoding` or `render_chat` something else is done with the text.
    """
    if (texts := guard("texts")) is not None:
        texts.check_rendered(text)
    instead = _instead.get()
    if instead is not None:
        return instead(text, encode_kwargs)
    return encode_text(tokenizer, text, encode_kwargs, partial(encode, tokenizer))


def is_encoded_otherwise() -> bool:
    """True if something else is done with a rendered chat now than to tokenize it."""
    return _instead.get() is not None


@contextmanager
def encoding(make: Callable[[Encode | None], Encode]) -> Iterator[None]:
    """Chats that are rendered within are encoded by `make(outer)`.

    outer: what another `encoding` or `render_chat` around this one does instead of tokenizing.
    """
    token = _instead.set(make(_instead.get()))
    try:
        yield
    finally:
        _instead.reset(token)


def render_chat(process: Callable[[], Any]) -> Rendering | None:
    """The text that `process`, which renders and encodes a chat, has rendered; None if it did so
    without a Jinja template.
    """
    try:
        with encoding(lambda outer: _stop):
            process()
    except _Stopped as stopped:
        return stopped.rendering
    return None


def _stop(text: str, encode_kwargs: Mapping[str, Any]) -> list[int]:
    raise _Stopped(Rendering(text, encode_kwargs))
