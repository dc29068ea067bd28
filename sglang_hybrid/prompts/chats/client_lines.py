"""Lines that clients put at the top of a system prompt and that differ in every request.

Such a line is meant for the client's vendor, not for the model. As it comes first, no request finds
more of the one before in the cache than what the template writes before it. So the known ones are
left out of the prompt, unless SGLANG_HYBRID_CLIENT_LINES is `keep`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import ClientLines

# `name=value` pairs with semicolons between them, and nothing else that may be on the line.
_PAIRS: Final = r"(?:[ \t]*[\w.-]+=[^;\s]*;?)*[ \t]*"

CHANGING_LINES: Final = (
    # Claude Code: its version and a checksum of each request (anthropics/claude-code issue 68900).
    # vLLM's /v1/messages leaves the same block out.
    re.compile(rf"\s*x-anthropic-billing-header:{_PAIRS}(?:\r?\n|$)?", re.IGNORECASE),
)
"""Each is looked for where a text begins."""


@cache
def are_left_out() -> bool:
    """Whether such lines are left out, by this process's settings."""
    return HybridConfig.from_environment().hybrid_client_lines is ClientLines.DROP


def without_changing_lines(text: str) -> str:
    """`text` without the changing lines that it begins with."""
    at = 0
    while (found := _first(text, at)) is not None:
        at = found.end()
    return text[at:]


def without_changing_blocks(content: Any) -> Any:
    """A system prompt, as text or as a list of blocks, without changing lines; blocks of nothing
    else are left out. None: nothing is left.

    content: blocks have `text`, if they are text. They are changed in place.
    """
    if isinstance(content, str):
        return without_changing_lines(content) or (None if content else content)
    if not isinstance(content, list):
        return content
    kept = [block for block in content if not _becomes_empty(block)]
    return kept or (None if content else content)


def strip_messages(messages: list[Any]) -> None:
    """Take changing lines from the system message that a chat begins with, in place. A message of
    nothing else is removed, if there are others.
    """
    if not messages or getattr(messages[0], "role", None) not in ("system", "developer"):
        return
    content = without_changing_blocks(messages[0].content)
    if content is not None:
        messages[0].content = content
    elif len(messages) > 1:
        del messages[0]


def left_out(before: Any, after: Any) -> Sequence[str]:
    """Notes for the client whose system prompt was `before` and is `after`."""
    if _texts(before) == _texts(after):
        return ()
    return ("x-anthropic-billing-header changes with every request and is left out of the prompt.",)


def _first(text: str, at: int) -> re.Match[str] | None:
    matches = (pattern.match(text, at) for pattern in CHANGING_LINES)
    return next((found for found in matches if found is not None), None)


def _becomes_empty(block: Any) -> bool:
    """Whether a block has nothing but changing lines, which are taken from it."""
    text = getattr(block, "text", None)
    if not isinstance(text, str) or not text:
        return False
    block.text = without_changing_lines(text)
    return not block.text


def _texts(content: Any) -> list[str]:
    if isinstance(content, list):
        return [getattr(block, "text", "") for block in content]
    return [] if content is None else [content]
