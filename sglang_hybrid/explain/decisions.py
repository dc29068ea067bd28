"""Records why checkpoints are not there: a bounded log of states that were not taken and of what
was evicted.

An entry is filed under its tenant, a position and the hash of all tokens before that position. So
it is found from a prompt's tokens alone, even if the tree has changed since. A prefix hash is
computed from the one of a shorter prefix, so a tree that keeps them on its nodes hashes each token
once. Each tenant has a log of its own; when all logs together are full, the payer with most entries
loses its oldest one.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.checkpoints.admission import Skip
from sglang_hybrid.core.checkpoints.checkpoint_plan import CheckpointRequest
from sglang_hybrid.core.records.nodes import Kind
from sglang_hybrid.core.records.shares import Shares, payer_of
from sglang_hybrid.core.victims.pool import Scarce
from sglang_hybrid.serving.telemetry.stats import Evicted

ENTRIES = 4_096
"""Entries that are kept, the latest ones: at up to 1,000 bytes each, 4 MB."""

NAME_LENGTH = 64
"""Characters that are kept of a request's name, which a client may choose."""

EMPTY_PREFIX_HASH = 0
"""The prefix hash of position 0."""


def extend_prefix_hash(prefix_hash: int, tokens: npt.ArrayLike, start: int, end: int) -> int:
    """The prefix hash of position `end` of `tokens` [n], from that of position `start`. Cost: about
    a nanosecond per token between them. It has 32 bits: two different prefixes have the same hash
    once in 4 billion pairs.
    """
    return zlib.crc32(_words(np.asarray(tokens)[start:end]), prefix_hash)


@dataclass(frozen=True, slots=True)
class Decision:
    """Something that the cache decided about a position. order: number of decisions before this
    one. at: when, in seconds of the cache's clock.
    """

    order: int
    at: float


@dataclass(frozen=True, slots=True)
class NotTaken(Decision):
    """A prefill wanted a state and did not get it."""

    request: CheckpointRequest
    skip: Skip


@dataclass(frozen=True, slots=True)
class EvictedEntry(Decision):
    """short: the pool that ran short, None if no pool of ours was asked. policy: the eviction
    policy's name.
    """

    short: Scarce | None
    policy: str


@dataclass(frozen=True, slots=True)
class StateLost(EvictedEntry):
    """A state was evicted.

    what: whether its KV was evicted too. score: what `policy` gave the state; None for leaves,
    which are evicted first. recipient: the state that got its slot; None if a running request did.
    hits, last_used: of the state. return_expected: the probability of a return by the last answer
    there, None if that told nothing. pinned: a client had pinned it.
    """

    kind: Kind
    what: Evicted
    score: float | None
    recipient: CheckpointRequest | None
    hits: int
    last_used: float
    return_expected: float | None = None
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class KvLost(EvictedEntry):
    """The KV of an edge was evicted. The entry is filed under the end of the edge's first page.
    end: position of the edge's end. end_hash: prefix hash of `end`.
    """

    end: int
    end_hash: int


class TenantLog:
    """The latest decisions about one tenant's prompts. full: whether older ones were forgotten."""

    def __init__(self) -> None:
        self.full = False
        self._queue: deque[tuple[int, int]] = deque()
        self._at: dict[tuple[int, int], list[Decision]] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, position: int, prefix_hash: int, decision: Decision) -> None:
        """File `decision`."""
        key = (position, prefix_hash)
        self._queue.append(key)
        self._at.setdefault(key, []).append(decision)

    def forget_oldest(self) -> None:
        """Drop the oldest entry; there must be one."""
        self.full = True
        oldest = self._queue.popleft()
        there = self._at[oldest]
        del there[0]
        if not there:
            del self._at[oldest]

    def along(self, tokens: npt.ArrayLike) -> Iterator[tuple[int, list[Decision]]]:
        """Positions of `tokens` [n] at which something was decided, ascending, each with the
        decisions, oldest first.
        """
        ids = _words(tokens)
        here, prefix_hash = 0, EMPTY_PREFIX_HASH
        for position in sorted({position for position, _ in self._at if position <= len(ids)}):
            prefix_hash = zlib.crc32(ids[here:position], prefix_hash)
            here = position
            decisions = self._at.get((position, prefix_hash))
            if decisions is not None:
                yield position, decisions


class Decisions:
    """The logs of all tenants, `entries` in all.

    count: of all decisions there ever were. emptied: when the cache was emptied, in seconds of its
    clock; None if it never was. heard: called with the tenant, the position and each new decision,
    while somebody wants to hear of them.
    """

    def __init__(self, entries: int = ENTRIES) -> None:
        self.entries = entries
        self.count = 0
        self.emptied: float | None = None
        self.heard: Callable[[Hashable, int, Decision], None] | None = None
        self._logs: dict[Hashable, TenantLog] = {}
        self._tenants: dict[Hashable, deque[Hashable]] = {}  # by payer, of each entry, oldest first
        self._shares = Shares()
        self._nothing = TenantLog()

    def __len__(self) -> int:
        return self._shares.total

    def of(self, tenant: Hashable) -> TenantLog:
        """The log of `tenant`, to be read only."""
        return self._logs.get(tenant, self._nothing)

    def add(self, tenant: Hashable, position: int, prefix_hash: int, decision: Decision) -> None:
        """File `decision`, which has the next order; forget another one if there are too many."""
        self.count += 1
        if self.heard is not None:
            self.heard(tenant, position, decision)
        log = self._logs.get(tenant)
        if log is None:
            log = self._logs[tenant] = TenantLog()
        log.add(position, prefix_hash, decision)
        payer = payer_of(tenant)
        self._tenants.setdefault(payer, deque()).append(tenant)
        self._shares.change(payer, 1)
        if self._shares.total > self.entries:
            self._forget_oldest(self._shares.largest())

    def _forget_oldest(self, payer: Hashable) -> None:
        tenants = self._tenants[payer]
        oldest = tenants.popleft()
        if not tenants:
            del self._tenants[payer]
        self._logs[oldest].forget_oldest()
        if not len(self._logs[oldest]):
            del self._logs[oldest]
        self._shares.change(payer, -1)

    def clear(self, now: float | None) -> None:
        """The cache was emptied: nothing that happened before says why something is missing."""
        self._logs.clear()
        self._tenants.clear()
        self._shares = Shares()
        self.emptied = now


def _words(tokens: npt.ArrayLike) -> memoryview:
    """Tokens [n] as 32-bit words; slices cost nothing."""
    return np.asarray(tokens).astype(np.uint32).data
