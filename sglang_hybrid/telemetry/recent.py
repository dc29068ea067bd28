"""Recent requests: what each one asked and what it found, for whoever asks why."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass

from sglang_hybrid.core.nodes import Kind
from sglang_hybrid.telemetry.decisions import Moment
from sglang_hybrid.telemetry.stats import RequestReport

REQUESTS = 256
BYTES = 32 << 20
"""Requests that are kept, the latest ones, and bytes of their prompts and names (8 per token)."""


@dataclass(frozen=True, slots=True)
class Used:
    """The checkpoint that a request resumed from, as it was then; what is None is not recorded."""

    position: int
    kind: Kind | None = None
    hits: int | None = None
    taken: Moment | None = None
    last_used: Moment | None = None


@dataclass(slots=True)
class Seen:
    """A request when it was looked up last before its prefill.

    tokens: of its prompt. kv: how far KV was stored. known: how far it was sent before, None if
    nothing remembers that. order: decisions before it. report: grows with what it leaves.
    """

    tokens: array[int]
    extra_key: str | None
    cache_salt: str | None
    report: RequestReport
    kv: int
    used: Used | None
    order: int
    at: Moment | None
    known: int | None = None

    def bytes(self) -> int:
        return len(self.tokens) * self.tokens.itemsize


class Recent:
    """The last requests by id, within `requests` and `max_bytes`."""

    def __init__(self, requests: int = REQUESTS, max_bytes: int = BYTES) -> None:
        self.requests = requests
        self.max_bytes = max_bytes
        self._bytes = 0
        self._seen: OrderedDict[str, Seen] = OrderedDict()

    def put(self, request_id: str, seen: Seen) -> None:
        """Remember a request, or what it found at a later look-up."""
        self._drop(request_id)
        self._seen[request_id] = seen
        self._bytes += seen.bytes() + len(request_id)
        while len(self._seen) > self.requests or self._bytes > self.max_bytes:
            self._drop(next(iter(self._seen)))

    def get(self, request_id: str) -> Seen | None:
        return self._seen.get(request_id)

    def __len__(self) -> int:
        return len(self._seen)

    def _drop(self, request_id: str) -> None:
        seen = self._seen.pop(request_id, None)
        if seen is not None:
            self._bytes -= seen.bytes() + len(request_id)
