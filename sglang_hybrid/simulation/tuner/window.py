"""A window of recorded requests, as it travels to the worker processes: one file in memory."""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING

import numpy as np

from sglang_hybrid.core.costs.cost import MIN_BRANCH_TOKENS, UNBOUNDED, CostModel
from sglang_hybrid.core.server_settings import Budget, ServedTiers, Serving, Split
from sglang_hybrid.simulation.traces.requests import Request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_hybrid.simulation.tuner.recorder import Finished


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
    records: Sequence[Finished],
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
            *(r.message_starts, r.tenant, r.hint),
        )
        for number, r in enumerate(records)
    ]
    room = _usual_room([r.room for r in records], has_states=has_states)
    return RequestWindow(requests, cost, room, counted, min_branch_tokens, serving, tiers)


def _usual_room(rooms: Sequence[Split | int], *, has_states: bool) -> Split | int:
    """The median of `rooms` [n > 0], which are all of one kind."""
    pools = [room for room in rooms if isinstance(room, Split)]
    if not pools:
        return median_low(room for room in rooms if isinstance(room, int))
    slots = median_low(room.slots for room in pools) if has_states else UNBOUNDED
    return Split(median_low(room.kv_tokens for room in pools), slots)


@contextmanager
def packed(window: RequestWindow) -> Iterator[int]:
    """`window` as a file descriptor that lives in memory and leaves nothing behind.

    Written piece by piece, so that other threads of this process are not held up.
    """
    rows = [
        (
            *(r.session, r.turn, r.arrival, len(r.tokens), r.input_len),
            *(r.message_starts, r.tenant, r.hint),
        )
        for r in window.requests
    ]
    cache = (
        *(window.cost, window.budget, window.counted),
        *(window.min_branch_tokens, window.serving, window.tiers),
    )
    head = pickle.dumps((cache, rows))
    descriptor = os.memfd_create("hybrid-window")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(len(head).to_bytes(8, "little"))
            file.write(head)
            for request in window.requests:
                file.write(request.tokens.data)
        yield descriptor
    finally:
        os.close(descriptor)


def unpack(descriptor: int) -> RequestWindow:
    """The window that `packed` wrote; its tokens are not copied."""
    content = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(content[:8], "little")
    cache, rows = pickle.loads(content[8:start])
    requests = []
    for session, turn, arrival, length, *rest in rows:
        tokens = np.frombuffer(content, np.int32, length, start)
        start += tokens.nbytes
        requests.append(Request(session, turn, arrival, tokens, *rest))
    return RequestWindow(requests, *cache)
