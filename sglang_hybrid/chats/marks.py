"""Turns the blocks that a chat request marks into declared positions, for every endpoint.

An endpoint's module finds its marked blocks and makes the variants of a request; this one renders
them and writes the positions into the request for the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sglang_hybrid.chats.breakpoints import BlockEnd, token_positions, with_images
from sglang_hybrid.chats.rendering import Rendering, render_chat
from sglang_hybrid.core.records.pin import PinRequest
from sglang_hybrid.core.returns.hints import MOST_POSITIONS, PromptHints
from sglang_hybrid.serving.requests.cache_fields import server_part

logger = logging.getLogger(__name__)

SECONDS: Final = {"5m": 300, "30m": 1_800, "1h": 3_600, "12h": 43_200}
"""The lifetimes that Anthropic's and OpenAI's clients may give."""


@dataclass(frozen=True)
class MarkedBlock:
    """A block that a client marked.

    ttl: the lifetime that the client gives it, a key of `SECONDS`. variants: copies of the request
    that differ behind the block only. open_ended: whether other text may follow the block within
    its message.
    """

    ttl: str
    variants: Sequence[Any]
    open_ended: bool


@dataclass(frozen=True)
class Breakpoint:
    """A declared position (tokens from the start of the prompt) and its lifetime."""

    position: int
    ttl: str


def declare(
    adapted: Any,
    tokenizer: Any,
    request: Any,
    blocks: Sequence[MarkedBlock],
    process: Callable[[Any], Any],
) -> list[Breakpoint]:
    """Ask for checkpoints where `blocks` end, pinned for their lifetimes; returns those positions
    that are known, ascending. Of a prompt with images they are known when it has its tokens
    (`serving/requests/checks.py`), and appear in the list then.

    adapted: SGLang's GenerateReqInput of `request`; its `server_part` is set. process: renders and
    encodes a request, as SGLang does it.
    """
    ids = adapted.input_ids
    has_images = ids is None and isinstance(adapted.text, str)
    if not blocks or not (has_images or (ids and isinstance(ids[0], int))):
        return []
    schema = getattr(adapted, "expanded", None)
    if schema is not None and schema.modular is not None:
        return []
    start, imported = (0, []) if schema is None else (schema.start, schema.positions)
    try:
        whole = _rendered(process, request)
        if has_images:
            same = whole is not None and whole.text == adapted.text
            ids = _encoded(tokenizer, whole) if whole is not None and same else []
        positions = _positions(ids[start:], tokenizer, whole, blocks, process)
    except Exception as error:  # anybody's tokenizer; the request is served without marks
        logger.warning("sglang_hybrid: marked blocks are ignored: %r", error)
        return []
    found = {
        start + position: Breakpoint(start + position, block.ttl)
        for position, block in zip(positions, blocks, strict=True)
        if position is not None
    }
    marks = [found[position] for position in sorted(found)]
    if marks and has_images:

        def place(expanded: Sequence[int]) -> PromptHints:
            places = with_images(ids, expanded, sorted(found))
            marks[:] = [Breakpoint(at, found[position].ttl) for position, at in places.items()]
            return _hints({mark.position: mark for mark in marks}, [])

        server_part(adapted).place = place
    elif marks:
        server_part(adapted).hints = _hints(found, imported)
    return marks


def _hints(marks: Mapping[int, Breakpoint], imported: Sequence[int]) -> PromptHints:
    """The hints that declare marks, by their positions, and the positions of a schema."""
    wanted = sorted({*imported, *marks})[-MOST_POSITIONS:]
    pins = tuple(PinRequest(at, SECONDS[marks[at].ttl]) for at in wanted if at in marks)
    return PromptHints(tuple(at for at in wanted if at not in marks), pins)


def _encoded(tokenizer: Any, chat: Rendering) -> list[int]:
    return list(tokenizer(chat.text, **chat.encode_kwargs)["input_ids"])


def _positions(
    ids: Sequence[int],
    tokenizer: Any,
    whole: Rendering | None,
    blocks: Sequence[MarkedBlock],
    process: Callable[[Any], Any],
) -> list[int | None]:
    if whole is None:
        logger.info("sglang_hybrid: marked blocks are ignored: the chat has no Jinja template.")
        return [None] * len(blocks)
    places = []
    for block in blocks:
        renderings = (_rendered(process, variant) for variant in block.variants)
        texts = [rendering.text for rendering in renderings if rendering is not None]
        places.append(BlockEnd(texts, block.open_ended))
    return token_positions(tokenizer, whole.encode_kwargs, whole.text, ids, places)


def _rendered(process: Callable[[Any], Any], request: Any) -> Rendering | None:
    try:
        return render_chat(lambda: process(request))
    except Exception as error:  # a template may refuse a variant with anything
        logger.debug("sglang_hybrid: a chat with other blocks is refused: %s", error)
        return None
