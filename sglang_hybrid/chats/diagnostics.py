"""Diagnoses why a prompt was not read from the cache: what differs from an earlier request of its
client.

Clients of Anthropic and OpenAI name the answer to an earlier request. The two requests are compared
part by part, in the order in which prompts depend on them. Requests are kept for that in the memory
of the HTTP server, within a bound, and each tenant finds its own only.

Source of the fields: the vendors' pages on cache diagnostics, as of November 2026.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_hybrid.chats.breakpoints import common_start
from sglang_hybrid.core.queue.prefix_overlap import as_key, common_prefix
from sglang_hybrid.core.records.latest import Latest
from sglang_hybrid.explain.changing_text import common_suffix_len
from sglang_hybrid.serving.tenants import Tenant, tenant_of_prompt

MOST_BYTES = 64 << 20
"""Bytes of all requests that are kept; the tenant that holds most loses its oldest one first."""

MARKS: Final = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Fields that a prompt does not depend on."""

AROUND = 40
"""Characters that are shown where two texts begin to differ, half of them before that place."""


class PartKind(Enum):
    """The kinds of parts of a request, in the order in which prompts depend on them."""

    MODEL = "model"
    TOOLS = "tools"
    SYSTEM = "system"
    MESSAGES = "messages"


@dataclass(frozen=True)
class RequestPart:
    """A piece of a request. path: where it is, as "system.0". text: what the prompt depends on."""

    kind: PartKind
    path: str
    text: str


@dataclass(frozen=True)
class SentPrompt:
    """A request as it was sent. ids: token ids [n] of its prompt."""

    sender: Tenant
    parts: Sequence[RequestPart]
    ids: npt.NDArray[np.int32]

    @classmethod
    def of(cls, adapted: Any, parts: Iterator[RequestPart]) -> SentPrompt | None:
        """adapted: SGLang's GenerateReqInput of the request; None if it has no token ids."""
        ids = adapted.input_ids
        if not ids or not isinstance(ids[0], int):
            return None
        return cls(tenant_of_prompt(adapted), tuple(parts), np.asarray(ids, np.int32))

    @property
    def size(self) -> int:
        """Bytes that it takes, about."""
        return self.ids.nbytes + sum(len(part.text) + 100 for part in self.parts)


@dataclass(frozen=True)
class Divergence:
    """The place where a request first differs from an earlier one.

    path: of the part. before, now: text of the earlier request and of this one around that place;
    empty where the part is missing. shared_tokens: at the beginning of both prompts. missed_tokens:
    of the earlier prompt behind those. same_tokens: behind the text that differs, which are equal
    again, if that text is short: it would better stand behind them.
    """

    kind: PartKind
    path: str
    before: str
    now: str
    shared_tokens: int
    missed_tokens: int
    same_tokens: int

    def as_dict(self) -> dict[str, object]:
        """Our own report, beside the vendor's."""
        return {
            "path": self.path,
            "before": self.before,
            "now": self.now,
            "shared_tokens": self.shared_tokens,
            "same_tokens": self.same_tokens,
        }


def compare(before: SentPrompt, now: SentPrompt) -> Divergence | None:
    """The first part of `now` that differs from `before`; None if one only goes on where the other
    ends.
    """
    for kind in PartKind:
        earlier, later = (
            [part for part in prompt.parts if part.kind is kind] for prompt in (before, now)
        )
        found = _first_difference(earlier, later, whole=kind is not PartKind.MESSAGES)
        if found is not None:
            path, one, other = found
            at = common_start(one, other)
            shared = common_prefix(as_key(before.ids), as_key(now.ids))
            return Divergence(
                kind,
                path,
                _around(one, at),
                _around(other, at),
                shared_tokens=shared,
                missed_tokens=len(before.ids) - shared,
                same_tokens=common_suffix_len(now.ids, before.ids),
            )
    return None


SentPrompts: TypeAlias = Latest[SentPrompt]
"""Recent requests of each tenant by the id of their answer."""


@lru_cache(maxsize=1)
def sent_prompts() -> SentPrompts:
    """The comparisons of this process."""
    return Latest(MOST_BYTES)


def text_of(value: Any) -> str:
    """A block, a tool or a string of a request as text: what the prompt depends on, without the
    marks that only the cache reads. value: a string, a pydantic model, or plain JSON.
    """
    if hasattr(value, "model_dump"):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and value.get("type") in ("text", "input_text", "output_text"):
        return str(value.get("text", ""))
    return msgspec.json.encode(_unmarked(value)).decode()


def _unmarked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _unmarked(inner) for key, inner in value.items() if key not in MARKS}
    return [_unmarked(inner) for inner in value] if isinstance(value, list) else value


def parts_of(kind: PartKind, path: str, content: Any) -> Iterator[RequestPart]:
    """A part for each block of a list, one for a string, none for None."""
    blocks = content if isinstance(content, list) else [] if content is None else [content]
    for index, block in enumerate(blocks):
        yield RequestPart(kind, f"{path}.{index}", text_of(block))


def _first_difference(
    before: Sequence[RequestPart], now: Sequence[RequestPart], *, whole: bool
) -> tuple[str, str, str] | None:
    """Path and both texts; whole: a part that only one of them has is a difference."""
    for earlier, later in zip(before, now, strict=False):
        if earlier != later:
            return later.path, earlier.text, later.text
    if not whole or len(before) == len(now):
        return None
    if len(before) > len(now):
        return before[len(now)].path, before[len(now)].text, ""
    return now[len(before)].path, "", now[len(before)].text


def _around(text: str, at: int) -> str:
    return text[max(0, at - AROUND // 2) : at + AROUND // 2]
