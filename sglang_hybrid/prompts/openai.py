"""`prompt_cache_breakpoint` and `prompt_cache_options` of OpenAI's API, and the answer's usage.

Source of the rules: OpenAI's reference of prompt caching, as of November 2026. SGLang's models of
the requests have no such fields; patch 0040 adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from sglang_hybrid.prompts.breakpoints import MARK
from sglang_hybrid.prompts.marks import MarkedBlock

MOST_BREAKPOINTS = 4
"""Of the marked parts of a request, the last ones count."""

Lifetime = Literal["30m", "12h"]
DEFAULT_LIFETIME: Lifetime = "30m"


class PromptCacheBreakpoint(BaseModel):
    """Marks the end of a reusable prefix at a content part."""

    mode: Literal["explicit"] = "explicit"
    ttl: Lifetime | None = None


class PromptCacheOptions(BaseModel):
    """Of a whole request. ttl: for breakpoints without one of their own."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Lifetime = DEFAULT_LIFETIME


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


def _marks(content: Any) -> list[PromptCacheBreakpoint | None]:
    if not isinstance(content, list):
        return []
    return [getattr(part, "prompt_cache_breakpoint", None) for part in content]


def _continued(request: Any, message: int, part: int) -> Any:
    copy = request.model_copy(deep=True)
    copy.messages[message].content[part].text += MARK
    return copy
