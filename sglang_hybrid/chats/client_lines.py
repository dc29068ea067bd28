"""Lines that clients put at the top of a system prompt and that differ in every request.

Such a line is meant for the client's vendor, not for the model. As it comes first, no request finds
more of the one before in the cache than what the template writes before it. So the known ones are
left out of the prompt, unless SGLANG_HYBRID_CLIENT_LINES is `keep`.
"""

from __future__ import annotations

import re
from operator import is_
from typing import Any, Final

from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import ClientLines

LEFT_OUT: Final = (
    "x-anthropic-billing-header changes with every request and is left out of the prompt."
)
"""Tells a client what was done to its system prompt."""

# Claude Code: `name=value` pairs with semicolons between them, its version and a checksum of each
# request among them (anthropics/claude-code issue 68900). Nothing else that may be on the line is
# left out. vLLM's /v1/messages leaves the same block out.
_PAIRS: Final = r"(?:[ \t]*[\w.-]+=[^;\s]*;?)*[ \t]*"
CHANGING_LINES: Final = re.compile(
    rf"(?:\s*x-anthropic-billing-header:{_PAIRS}(?:\r?\n)?)*", re.IGNORECASE
)
"""All such lines that a text begins with; empty where it begins with another."""


def are_left_out() -> bool:
    """True if such lines are left out, by this process's settings."""
    return HybridConfig.from_environment().hybrid_client_lines is ClientLines.DROP


def without_changing_lines(text: str) -> str:
    """`text` without the changing lines that it begins with."""
    found = CHANGING_LINES.match(text)
    return text[found.end() :] if found else text


def without_changing_blocks(content: Any) -> Any:
    """A system prompt without the changing lines that it begins with, or that its blocks begin
    with; blocks of nothing else are left out. `content` itself if it has none, None if it has
    nothing else.

    content: a text, or a list of blocks, which have `text` if they are text. It is not changed.
    """
    if isinstance(content, str):
        left = without_changing_lines(content)
        return content if left == content else left or None
    if not isinstance(content, list):
        return content
    blocks = [_without_line(block) for block in content]
    if all(map(is_, blocks, content)):
        return content
    return [block for block in blocks if block is not None] or None


def strip_messages(messages: list[Any]) -> None:
    """Take changing lines from the system message that a chat begins with, in place. A message of
    nothing else is removed, if there are others.
    """
    if not messages or getattr(messages[0], "role", None) not in ("system", "developer"):
        return
    content = without_changing_blocks(messages[0].content)
    if content is not None:
        messages[0].content = content
    elif len(messages) > 1 and messages[0].content is not None:
        del messages[0]


def _without_line(block: Any) -> Any:
    """A block without changing lines; None if it has nothing else."""
    text = getattr(block, "text", None)
    left = without_changing_blocks(text)
    if left is text:
        return block
    return None if left is None else block.model_copy(update={"text": left})
