"""`cache_control` and `diagnostics` of Anthropic's Messages API: which blocks are marked, the
answer's usage, and what differs from an earlier request.

Source of the rules: Anthropic's documentation of prompt caching and of cache diagnostics, as of
November 2026. SGLang's models of the requests have no such fields; patch 0040 adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal

from pydantic import BaseModel

from sglang_hybrid.chats.breakpoints import MARK
from sglang_hybrid.chats.client_lines import (
    LEFT_OUT,
    are_left_out,
    without_changing_blocks,
)
from sglang_hybrid.chats.diagnostics import (
    PartKind,
    RequestPart,
    SentPrompt,
    compare,
    parts_of,
    sent_prompts,
)
from sglang_hybrid.chats.marks import Breakpoint, MarkedBlock

MOST_BREAKPOINTS = 4

_converting: ContextVar[list[str] | None] = ContextVar("converting", default=None)
"""Notes on the request that is being converted; None outside of that."""

Path = tuple[Any, ...]
"""Names and indices from a request to a block: ("messages", 1, "content", 0)."""


class CacheControl(BaseModel):
    """`cache_control` of a block or a request."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Cacheable(BaseModel):
    """A block that may be marked."""

    cache_control: CacheControl | None = None


class CacheCreation(BaseModel):
    """Tokens that were written, by lifetime."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class Diagnostics(BaseModel):
    """Asks what differs from the request that an earlier message answered; None: from none yet."""

    previous_message_id: str | None = None


def convert(to_chat: Callable[[Any], Any], request: Any) -> Any:
    """SGLang's chat request of a request of this API. Lines of its system prompt that change with
    every request are taken out of `request`, too; notes on what differs from what was asked are
    kept in it for `diagnose`.
    """
    notes: list[str] = []
    if are_left_out():
        system = without_changing_blocks(request.system)
        if system is not request.system:
            request.system = system
            notes.append(LEFT_OUT)
    token = _converting.set(notes)
    try:
        return to_chat(request)
    finally:
        _converting.reset(token)
        request._notes = list(dict.fromkeys([*request._notes, *notes]))


def apply_thinking(apply: Callable[[], None]) -> None:
    """Turn a model's thinking on or off as a request asks. Where the model or the server cannot,
    the request is answered all the same, with a note: Claude Code asks for thinking by itself.
    """
    notes = _converting.get()
    try:
        apply()
    except ValueError as error:
        if notes is None:
            raise
        notes.append(f"thinking is as the server has it: {error}.")


def check(request: Any) -> None:
    """The marks of a request are as documented; raises ValueError with the documented sentence."""
    marked = _marked(request)
    if len(marked) > MOST_BREAKPOINTS:
        raise ValueError(
            f"A maximum of {MOST_BREAKPOINTS} blocks with cache_control may be provided. "
            f"Found {len(marked)}."
        )
    shorter: Path | None = None
    for path, control in marked:
        block = _at(request, path)
        if getattr(block, "type", None) == "text" and not block.text:
            raise ValueError(f"{_dotted(path)}: cache_control cannot be set for empty text blocks.")
        if getattr(block, "type", None) in ("thinking", "redacted_thinking"):
            raise ValueError(f"{_dotted(path)}: cache_control cannot be set for thinking blocks.")
        if control.ttl == "5m":
            shorter = path
        elif shorter is not None:
            raise ValueError(
                f"{_dotted(path)}.cache_control.ttl: a ttl='1h' cache_control block must not come "
                "after a ttl='5m' cache_control block; they are read in the order tools, system, "
                "messages."
            )


def marked_blocks(request: Any) -> list[MarkedBlock]:
    """The marked blocks of a checked request, in the order of the prompt."""
    return [_marked_block(request, path, control.ttl) for path, control in _marked(request)]


def usage_of_input(
    computed: int, read: int, written: int | None, breakpoints: Sequence[Breakpoint]
) -> dict[str, Any]:
    """The input fields of an answer's usage; the three counts add up to the prompt.

    computed, read: tokens of the prompt that were computed, and that came from the cache. written:
    those computed up to the last declared position that was kept; None if the server's cache does
    not tell. breakpoints: positions and lifetimes, ascending.
    """
    if not breakpoints or written is None:
        fields = {"input_tokens": computed}
        return {**fields, "cache_read_input_tokens": read} if read else fields
    kept_to = read + written
    longer = [mark.position for mark in breakpoints if mark.ttl == "1h"]
    hour = max(0, min(max(longer, default=0), kept_to) - read)
    return {
        "input_tokens": computed - written,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": written,
        "cache_creation": CacheCreation(
            ephemeral_5m_input_tokens=written - hour, ephemeral_1h_input_tokens=hour
        ),
    }


def sent_prompt(request: Any, adapted: Any) -> SentPrompt | None:
    """The parts by which a request that asks for diagnostics is compared, now and later.

    adapted: SGLang's GenerateReqInput of it.
    """
    return None if request.diagnostics is None else SentPrompt.of(adapted, _parts(request))


def diagnose(request: Any, prompt: SentPrompt | None, message_id: str) -> dict[str, Any] | None:
    """`diagnostics` of the answer `message_id`: None if nothing was asked or nothing differs, and
    the request was answered as it was asked. The prompt is kept for later questions.
    """
    found = _difference(request, prompt, message_id)
    if not request._notes:
        return found
    ours = (found or {}).get("hybrid", {})
    return {**(found or {}), "hybrid": {**ours, "notes": request._notes}}


def _difference(request: Any, prompt: SentPrompt | None, message_id: str) -> dict[str, Any] | None:
    if prompt is None:
        return None
    previous = request.diagnostics.previous_message_id
    sent_prompts().put(prompt.sender, message_id, prompt, prompt.size)
    if previous is None:
        return None
    before = sent_prompts().get(prompt.sender, previous)
    if before is None:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    found = compare(before, prompt)
    if found is None:
        return None
    reason = {
        "type": f"{found.kind.value}_changed",
        "cache_missed_input_tokens": found.missed_tokens,
    }
    return {"cache_miss_reason": reason, "hybrid": found.as_dict()}


def _parts(request: Any) -> Iterator[RequestPart]:
    yield RequestPart(PartKind.MODEL, "model", request.model)
    yield from parts_of(PartKind.TOOLS, "tools", request.tools)
    yield from parts_of(PartKind.SYSTEM, "system", request.system)
    for index, message in enumerate(request.messages):
        yield RequestPart(PartKind.MESSAGES, f"messages.{index}.role", message.role)
        yield from parts_of(PartKind.MESSAGES, f"messages.{index}.content", message.content)


def _marked(request: Any) -> list[tuple[Path, CacheControl]]:
    """Marked blocks in the order of the prompt; a mark of the request is one of its last block."""
    found = [
        (path, block.cache_control)
        for path, block in _blocks(request)
        if getattr(block, "cache_control", None) is not None
    ]
    last = None if request.cache_control is None else _last(request)
    if last is not None:
        marked = dict(found).get(last)
        if marked is not None and marked.ttl != request.cache_control.ttl:
            raise ValueError(
                f"cache_control of the request has ttl {request.cache_control.ttl!r} and that of "
                f"its last block, {_dotted(last)}, has {marked.ttl!r}; give one of them."
            )
        if marked is None:
            found.append((last, request.cache_control))
    return found


def _blocks(request: Any) -> Iterator[tuple[Path, Any]]:
    for index, tool in enumerate(request.tools or ()):
        yield ("tools", index), tool
    if isinstance(request.system, list):
        yield from _of_list(("system",), request.system)
    for index, message in enumerate(request.messages):
        if isinstance(message.content, list):
            yield from _of_list(("messages", index, "content"), message.content)


def _of_list(path: Path, blocks: Sequence[Any]) -> Iterator[tuple[Path, Any]]:
    for index, block in enumerate(blocks):
        inner = getattr(block, "content", None)
        if block.type == "tool_result" and isinstance(inner, list):
            yield from _of_list((*path, index, "content"), inner)
        yield (*path, index), block


def _last(request: Any) -> Path | None:
    """The last block, or the string that is a message's whole content; None if the last message has
    neither.
    """
    last = len(request.messages) - 1
    content = request.messages[last].content if request.messages else ()
    path = ("messages", last, "content")
    if isinstance(content, str):
        return path
    return (*path, len(content) - 1) if content else None


def _marked_block(request: Any, path: Path, ttl: str) -> MarkedBlock:
    """The block at `path`. A tool or a call of one has no text that could be continued: its end is
    found by the request without the blocks behind it, and by that with one more like it.
    """
    *around, name = path
    if path[0] == "tools" or getattr(_at(request, path), "type", None) == "tool_use":
        cut, longer = (request.model_copy(deep=True) for _ in range(2))
        del _at(cut, around)[name + 1 :]
        another = _at(longer, path).model_copy(deep=True, update={"name": MARK})
        _at(longer, around).insert(name + 1, another)
        return MarkedBlock(ttl, [cut, longer], open_ended=False)
    followed = isinstance(name, int) and name + 1 < len(_at(request, around))
    return MarkedBlock(ttl, [_continued(request, path)], open_ended=followed)


def _continued(request: Any, path: Path) -> Any:
    """The request with the text of the block at `path` continued."""
    copy = request.model_copy(deep=True)
    parent, name = _at(copy, path[:-1]), path[-1]
    block = parent[name] if isinstance(name, int) else getattr(parent, name)
    if isinstance(block, str):
        setattr(parent, name, block + MARK)
    else:
        _continue(block)
    return copy


def _continue(block: Any) -> None:
    """Append to the last text of a block; one without text, as an image, stays as it is."""
    content = getattr(block, "content", None)
    if isinstance(getattr(block, "text", None), str):
        block.text += MARK
    elif isinstance(content, str):
        block.content = content + MARK
    elif isinstance(content, list) and content:
        if not isinstance(content[-1], dict):
            _continue(content[-1])
        elif isinstance(text := content[-1].get("text", ""), str):
            content[-1]["text"] = text + MARK


def _at(request: Any, path: Sequence[Any]) -> Any:
    """The part of a request that `path` leads to."""
    found = request
    for name in path:
        found = found[name] if isinstance(name, int) else getattr(found, name)
    return found


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))
