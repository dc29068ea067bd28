"""Recent requests: what each one asked and what it found."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TypeAlias

from sglang_hybrid.core.records.latest import Latest
from sglang_hybrid.core.records.nodes import Kind
from sglang_hybrid.serving.telemetry.stats import RequestReport
from sglang_hybrid.serving.tenants import Tenant

REQUESTS = 256
BYTES = 32 << 20
"""Requests that are kept, the latest ones, and bytes of their prompts and names (8 per token)."""


@dataclass(frozen=True, slots=True)
class ResumedFrom:
    """The checkpoint that a request resumed from, as it was then; what is None is not recorded.

    taken, last_used: when its state was taken and last used, seconds of the cache's clock.
    return_expected: the probability of a return by the last answer there, None if that told
    nothing. pinned_until: seconds of the cache's clock, None if it was not pinned.
    """

    position: int
    kind: Kind | None = None
    hits: int | None = None
    taken: float | None = None
    last_used: float | None = None
    return_expected: float | None = None
    pinned_until: float | None = None


@dataclass(slots=True)
class RecentRequest:
    """A request as of its last look-up before its prefill.

    tokens: of its prompt. report: is completed with the states that the request leaves. usable:
    tokens that it could hit, fewer where it asked for log probabilities or hidden states of its
    prompt. kv: tokens of these whose KV was stored. order: number of decisions before it. at: when,
    seconds of the cache's clock, None where nothing counts them. known: tokens that its tenant had
    sent before, None if nothing remembers that. route: of HTTP by which it came, "" if none.
    """

    tokens: array[int]
    report: RequestReport
    usable: int
    kv: int
    used: ResumedFrom | None
    order: int
    at: float | None
    known: int | None = None
    route: str = ""

    def size(self, request_id: str) -> int:
        """Bytes of its prompt and its name."""
        return len(self.tokens) * self.tokens.itemsize + len(request_id)


RecentRequests: TypeAlias = Latest[RecentRequest]
"""Recent requests by request id."""


def newest(recent: RecentRequests, tenant: Tenant) -> float | None:
    """The time at which the newest remembered request of `tenant` came, seconds of the cache's
    clock.
    """
    return max((seen.at for seen in recent.of(tenant) if seen.at is not None), default=None)
