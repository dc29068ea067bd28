"""Fields of ours on a request: typed, made by this server after all input was read, and never read
from it.

An HTTP process collects them in `server_part` of SGLang's request object. `checks.check` joins the
client's hints to them, decoded and checked, and `checks.to_wire` puts the result, `CacheFields`, on
the tokenized request (a field of SGLang's struct by patch 0040). The scheduler keeps it on its own
request (hook `scheduling.take_cache_fields`), where `fields_of` finds it. No input reaches these
attributes: they are no fields of the objects that bodies are decoded into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sglang_hybrid.core.returns.hints import NO_HINTS, PromptHints


@dataclass(frozen=True)
class Imported:
    """The segments of a prompt that are stored in the cache each under a key of its own.

    segments: (position of the first token, tokens) of each. position: of the first token behind all
    segments. extra_key: of the client's request.
    """

    segments: tuple[tuple[int, int], ...]
    position: int
    extra_key: str | None = None

    @property
    def length(self) -> int:
        """Tokens of all segments."""
        return sum(length for _, length in self.segments)


@dataclass(frozen=True)
class CacheFields:
    """Fields of one tokenized request. hints: of its client, checked, and of the server. imported:
    None for a prompt that is not composed of segments. route: of HTTP by which it came, "" if none.
    """

    hints: PromptHints = NO_HINTS
    imported: Imported | None = None
    route: str = ""


NOTHING: Final = CacheFields()


@dataclass
class ServerPart:
    """The fields that the server gives a request that it has not tokenized yet.

    place: returns the hints that depend on the prompt's tokens, given those. fields: the finished
    fields, once `checks.check` has made them.
    """

    hints: PromptHints = NO_HINTS
    imported: Imported | None = None
    place: Callable[[Sequence[int]], PromptHints] | None = None
    fields: CacheFields = NOTHING


def server_part(request: Any) -> ServerPart:
    """The part of a request object (SGLang's GenerateReqInput), which is made if there is none."""
    part: ServerPart | None = request.__dict__.get("server_part")
    if part is None:
        part = request.server_part = ServerPart()
    return part


def fields_of(request: Any) -> CacheFields:
    """The fields of a request in a scheduler, or of a tokenized one on its way there."""
    fields: CacheFields | None = getattr(request, "hybrid", None)
    return NOTHING if fields is None else fields
