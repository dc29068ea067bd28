"""`prompt_cache_breakpoint` and `prompt_cache_options` of OpenAI's API, the answer's usage, and
what differs from an earlier request.

Source of the rules: OpenAI's reference of prompt caching and of its diagnostics, as of November
2026. SGLang's models of the requests have no such fields; patch 0040 adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from sglang_hybrid.chats.breakpoints import MARK
from sglang_hybrid.chats.diagnostics import (
    PartKind,
    RequestPart,
    SentPrompt,
    compare,
    parts_of,
    sent_prompts,
    text_of,
)
from sglang_hybrid.chats.fields import PromptCacheBreakpoint, PromptCacheOptions
from sglang_hybrid.chats.marks import MarkedBlock, declare

MOST_BREAKPOINTS = 4
"""The number of marked parts of a request that count: the last ones."""

REASONS: Final = {PartKind.MODEL: "model", PartKind.TOOLS: "tools", PartKind.MESSAGES: "input"}
"""The names of changed parts in `prompt_cache_diagnostics`."""


def marked_parts(request: Any) -> list[MarkedBlock]:
    """The last marked text parts of a chat completion request, in the order of the prompt."""
    options = request.prompt_cache_options or PromptCacheOptions()
    found = [
        (message, part, mark.ttl or options.ttl)
        for message, content in enumerate(item.content for item in request.messages)
        for part, mark in enumerate(_marks(content))
        if mark is not None
    ]
    return [
        MarkedBlock(
            ttl,
            [_continued(request, message, part)],
            open_ended=part + 1 < len(request.messages[message].content),
        )
        for message, part, ttl in found[-MOST_BREAKPOINTS:]
    ]


def with_writes(
    details: Any, kind: Callable[..., Any], answers: Sequence[Mapping[str, Any]]
) -> Any:
    """Usage details with `cache_write_tokens` if a request declared positions, else `details`.

    details: of class `kind`, SGLang's PromptTokensDetails; None without --enable-cache-report.
    answers: to samples of one prompt; the first one wrote what the others read.
    """
    meta = answers[0]["meta_info"]
    declared = (meta.get("hybrid_cache") or {}).get("declared")
    if declared is None:
        return details
    if details is None:
        details = kind()
    details.cached_tokens = meta.get("cached_tokens", 0)
    details.cache_write_tokens = declared["written_tokens"]
    return details


def declare_response(
    request: Any, adapted: Any, tokenizer: Any, process: Callable[[Any], Any]
) -> SentPrompt | None:
    """Ask for checkpoints at the marked parts of a /v1/responses request; returns what it is
    compared by, or None if it is neither stored nor compared.

    request: with `_chat`, the chat that SGLang makes of it. adapted: its GenerateReqInput. process:
    renders and encodes a chat.
    """
    chat = request._chat
    if chat is None:
        return None
    chat.prompt_cache_options = options = request.prompt_cache_options
    declare(adapted, tokenizer, chat, marked_parts(chat), process)
    compared = options is not None and options.comparison_response_id is not None
    return SentPrompt.of(adapted, _parts(chat)) if compared or request.store else None


def note_answer(request: Any, usage: Any, kind: Callable[..., Any]) -> None:
    """Complete the usage of an answer to /v1/responses and work out its diagnostics.

    request: what it was is in its private fields, and `_diagnostics` of them is set. usage:
    SGLang's UsageInfo, changed here. kind: of its details.
    """
    output = getattr(request._context, "last_output", None)
    if isinstance(output, Mapping) and "meta_info" in output:
        usage.prompt_tokens_details = with_writes(usage.prompt_tokens_details, kind, [output])
        cached_tokens = output["meta_info"].get("cached_tokens", 0)
        request._diagnostics = _diagnosis(request, request._sent, cached_tokens)


def _diagnosis(
    request: Any, prompt: SentPrompt | None, cached_tokens: int
) -> dict[str, Any] | None:
    """`prompt_cache_diagnostics`; None if no comparison was asked for. The prompt of a stored
    response is kept for later questions.
    """
    if prompt is None:
        return None
    if request.store:
        sent_prompts().put(prompt.sender, request.request_id, prompt, prompt.size)
    options = request.prompt_cache_options
    if options is None or options.comparison_response_id is None:
        return None
    before = sent_prompts().get(prompt.sender, options.comparison_response_id)
    if before is None:
        return {"type": "comparison_response_not_found"}
    found = compare(before, prompt)
    if found is None:
        return {"type": "cache_hit" if cached_tokens else "unavailable"}
    return {
        "type": "cache_miss",
        "reason": f"{REASONS[found.kind]}_changed",
        "cache_missed_tokens": found.missed_tokens,
        "comparison_reusable_tokens": len(before.ids),
        "hybrid": found.as_dict(),
    }


def _parts(chat: Any) -> Iterator[RequestPart]:
    yield RequestPart(PartKind.MODEL, "model", str(chat.model))
    yield from parts_of(PartKind.TOOLS, "tools", chat.tools)
    for index, message in enumerate(chat.messages):
        path = f"input.{index}"
        yield RequestPart(PartKind.MESSAGES, f"{path}.role", message.role)
        yield from parts_of(PartKind.MESSAGES, f"{path}.content", message.content)
        for call in getattr(message, "tool_calls", None) or ():
            yield RequestPart(PartKind.MESSAGES, f"{path}.tool_calls", text_of(call.function))


def _marks(content: Any) -> list[PromptCacheBreakpoint | None]:
    if not isinstance(content, list):
        return []
    return [getattr(part, "prompt_cache_breakpoint", None) for part in content]


def _continued(request: Any, message: int, part: int) -> Any:
    copy = request.model_copy(deep=True)
    copy.messages[message].content[part].text += MARK
    return copy
