"""Finished requests: the latest in memory, and a window of them that candidates are tried on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Final

import numpy as np

from sglang_hybrid.core.costs.cost import MIN_BRANCH_TOKENS, UNBOUNDED, CostModel
from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.core.server_settings import Budget, ServedTiers, Serving, Split
from sglang_hybrid.core.traffic.requests import Request, TokenArray

_MOST = (1 << 31) - 1  # of int32
RECORD_BYTES = 400
"""Bytes of a record beside its tokens."""

MOST_RECORD_BYTES: Final = 64 << 20
MOST_REQUESTS: Final = 4_096
"""Bounds on the requests that a server remembers, and on those that it replays."""

FEWEST_REQUESTS: Final = 16
"""The least requests that are replayed."""


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that ended. tokens: int32, its prompt of `input_len` tokens and its answer.

    arrival: seconds on any clock. room: what running requests left to the cache when it ended, KV
    tokens and state slots of two pools, or bytes of one memory. tenant: a name for who sent it, ""
    for a request without cache salt, extra key and adapter. hint: what its client said of the
    session.
    """

    tokens: TokenArray
    input_len: int
    arrival: float
    hit_len: int
    room: Split | int
    message_starts: tuple[int, ...] = ()
    reply_start: int = 0
    tenant: str = ""
    hint: Hint | None = None

    @property
    def held_bytes(self) -> int:
        return RECORD_BYTES + self.tokens.nbytes + 8 * len(self.message_starts)


def compact(prompt: Sequence[int], answer: Sequence[int]) -> TokenArray:
    """Token ids as int32; of larger ones, which stand for images, the low 31 bits."""
    tokens = np.empty(len(prompt) + len(answer), dtype=np.int32)
    tokens[: len(prompt)] = np.asarray(prompt, np.int64) & _MOST
    tokens[len(prompt) :] = answer
    return tokens


class Recorder:
    """The latest finished requests in at most `max_bytes`; the oldest are dropped."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._records: deque[FinishedRequest] = deque()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: FinishedRequest) -> None:
        self._records.append(record)
        self.held_bytes += record.held_bytes
        while self.held_bytes > self.max_bytes:
            self.held_bytes -= self._records.popleft().held_bytes

    def latest(self, count: int) -> list[FinishedRequest]:
        """The last `count` records, or as many as there are, in order of arrival."""
        skipped = max(0, len(self._records) - count)
        records = list(self._records)[skipped:]
        return sorted(records, key=lambda record: record.arrival)


@dataclass(frozen=True)
class RequestWindow:
    """Requests in order of arrival, and the cache that they are replayed on.

    counted: how many of them count, the last ones; those before fill the cache and what policies
    learn from. serving: how the server runs, where it plans its checkpoints; otherwise the paper's
    are assumed. tiers: what it has below the device; None without tiers, or where it does not
    plan.
    """

    requests: Sequence[Request]
    cost: CostModel
    budget: Budget
    counted: int
    min_branch_tokens: int = MIN_BRANCH_TOKENS
    serving: Serving | None = None
    tiers: ServedTiers | None = None

    @property
    def counted_from(self) -> int:
        """The first request that counts."""
        return max(0, len(self.requests) - self.counted)

    @property
    def counted_tokens(self) -> int:
        """Prompt tokens of the requests that count."""
        return sum(request.input_len for request in self.requests[self.counted_from :])


def make_window(
    records: Sequence[FinishedRequest],
    counted: int,
    cost: CostModel,
    min_branch_tokens: int,
    serving: Serving | None,
    *,
    has_states: bool,
    tiers: ServedTiers | None = None,
) -> RequestWindow:
    """`records` [n > 0] in as much memory as running requests usually leave of the server's, and in
    its `tiers` below.
    """
    start = records[0].arrival
    requests = [
        Request(
            *(number, 0, r.arrival - start, r.tokens, r.input_len),
            *(r.message_starts, r.reply_start, r.tenant, r.hint),
        )
        for number, r in enumerate(records)
    ]
    room = _median_room([r.room for r in records], has_states=has_states)
    return RequestWindow(requests, cost, room, counted, min_branch_tokens, serving, tiers)


def _median_room(rooms: Sequence[Split | int], *, has_states: bool) -> Split | int:
    """The median of `rooms` [n > 0], which are all of one kind."""
    pools = [room for room in rooms if isinstance(room, Split)]
    if not pools:
        return median_low(room for room in rooms if isinstance(room, int))
    slots = median_low(room.slots for room in pools) if has_states else UNBOUNDED
    kv_tokens = median_low(room.kv_tokens for room in pools)
    return replace(pools[0], kv_tokens=kv_tokens, slots=slots)
