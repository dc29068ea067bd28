"""Recent requests: what each one asked and what it found, for whoever asks why."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from sglang_hybrid.core.records.nodes import Kind
from sglang_hybrid.core.records.shares import Shares
from sglang_hybrid.explain.decisions import Moment
from sglang_hybrid.serving.telemetry.stats import RequestReport
from sglang_hybrid.serving.tenants import Tenant

REQUESTS = 256
BYTES = 32 << 20
"""Requests that are kept, the latest ones, and bytes of their prompts and names (8 per token)."""


@dataclass(frozen=True, slots=True)
class ResumedFrom:
    """The checkpoint that a request resumed from, as it was then; what is None is not recorded.

    return_expected: the probability of a return by the last answer there, None if that told
    nothing. pinned_until: seconds of the cache's clock, None if it was not pinned.
    """

    position: int
    kind: Kind | None = None
    hits: int | None = None
    taken: Moment | None = None
    last_used: Moment | None = None
    return_expected: float | None = None
    pinned_until: float | None = None


@dataclass(slots=True)
class RecentRequest:
    """A request when it was looked up last before its prefill.

    tokens: of its prompt. kv: how far KV was stored. known: how far its tenant sent it before, None
    if nothing remembers that. order: decisions before it. report: grows with what it leaves.
    """

    tokens: array[int]
    tenant: Tenant
    report: RequestReport
    kv: int
    used: ResumedFrom | None
    order: int
    at: Moment | None
    known: int | None = None


class RecentRequests:
    """The last requests of each tenant by id, within `requests` and `max_bytes` in all: when there
    are too many, the tenant with most of them, or of their bytes, loses its oldest one.
    """

    def __init__(self, requests: int = REQUESTS, max_bytes: int = BYTES) -> None:
        self.requests = requests
        self.max_bytes = max_bytes
        self._counts = Shares()
        self._bytes = Shares()
        self._seen: dict[Hashable, OrderedDict[str, RecentRequest]] = {}

    def __len__(self) -> int:
        return self._counts.total

    def put(self, tenant: Hashable, request_id: str, seen: RecentRequest) -> None:
        """Remember a request, or what it found at a later look-up."""
        self._drop(tenant, request_id)
        if tenant not in self._seen:
            self._seen[tenant] = OrderedDict()
        self._seen[tenant][request_id] = seen
        self._counts.change(tenant, 1)
        self._bytes.change(tenant, _bytes(request_id, seen))
        while self._counts.total > self.requests:
            self._drop_oldest(self._counts.largest())
        while self._bytes.total > self.max_bytes:
            self._drop_oldest(self._bytes.largest())

    def get(self, tenant: Hashable, request_id: str) -> RecentRequest | None:
        seen = self._seen.get(tenant)
        return None if seen is None else seen.get(request_id)

    def of(self, tenant: Hashable) -> int:
        """How many requests of `tenant` are remembered."""
        return self._counts.of(tenant)

    def newest(self, tenant: Hashable) -> Moment | None:
        """When the newest request of `tenant` that is remembered came."""
        times = (
            seen.at
            for seen in self._seen.get(tenant, OrderedDict()).values()
            if seen.at is not None
        )
        return max(times, default=None)

    def _drop_oldest(self, tenant: Hashable) -> None:
        self._drop(tenant, next(iter(self._seen[tenant])))

    def _drop(self, tenant: Hashable, request_id: str) -> None:
        seen = self.get(tenant, request_id)
        if seen is not None:
            del self._seen[tenant][request_id]
            self._counts.change(tenant, -1)
            self._bytes.change(tenant, -_bytes(request_id, seen))
            if not self._seen[tenant]:
                del self._seen[tenant]


def _bytes(request_id: str, seen: RecentRequest) -> int:
    return len(seen.tokens) * seen.tokens.itemsize + len(request_id)
