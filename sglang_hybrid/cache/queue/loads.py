"""Loads from the host that end when their request's turn comes, on a server.

SGLang begins a load when its request joins a batch, whose prefill then waits. Here a load begins
when it would otherwise end late, as `core.queue.loads` decides: when the next places become free
follows from the lengths of answers, and what lies before a request from the order of the queue.
Loads that are not due before the next step can still be given up. While loads are under way no
others begin.

All ranks have the same queue, clock, speeds and acknowledged transfers, and so begin the same loads
at the same steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sglang_hybrid.cache.queue.clock import SECONDS_BETWEEN_TICKS
from sglang_hybrid.core.queue.lengths import Average
from sglang_hybrid.core.queue.loads import LoadsAhead
from sglang_hybrid.core.queue.waiting import Waiting
from sglang_hybrid.core.returns.history_tree import fingerprint_tokens
from sglang_hybrid.core.returns.sessions import ExpectedReturns
from sglang_hybrid.core.tiers.rates import Link, Speeds, Tier
from sglang_hybrid.serving.tenants import tenant_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_hybrid.cache.tiers.ahead_loads import AheadLoads

MARGIN: Final = 2 * SECONDS_BETWEEN_TICKS
"""Seconds by which a load begins before it must, besides those of a step: the clock is as exact as
that.
"""

FADE: Final = 0.9
"""Factor per step by which the longest step so far counts less."""

FIRST_TOKENS: Final = 64
"""The first tokens of a prompt: requests that begin alike (a schema, a system prompt) are answered
alike.
"""

SAMPLE_TOKENS: Final = 8
"""Decoded tokens over which the time of one is measured."""

FIRST_PACE: Final = 0.02
"""Seconds per decoded token until that is measured."""


@dataclass
class Pace:
    """Seconds of a decode step, measured on one running request after the other."""

    seconds: Average
    of: Any = None
    since: float = 0.0
    tokens: int = 0

    @property
    def per_token(self) -> float:
        return self.seconds.mean if self.seconds.weight else FIRST_PACE

    def measure(self, running: Mapping[Req, Any], now: float) -> None:
        """The requests `running` have decoded their tokens by `now`, in seconds."""
        if self.of in running:
            decoded = len(self.of.output_ids) - self.tokens
            if decoded < SAMPLE_TOKENS:
                return
            if now > self.since:
                self.seconds.add((now - self.since) / decoded)
        self.of = next((req for req in running if req.output_ids), None)
        if self.of is not None:
            self.since, self.tokens = now, len(self.of.output_ids)


class TimedLoads:
    """Begins loads for one scheduler's waiting requests, and for sessions that are expected back.

    Args:
        cache: loads them.
        speeds: in force on all ranks (`.speeds`).
    """

    def __init__(self, cache: AheadLoads, speeds: Any) -> None:
        self.ahead: LoadsAhead[Req] = LoadsAhead(
            self, margin=MARGIN, per_token=FIRST_PACE, places=1
        )
        self.returns = ExpectedReturns()
        self._cache, self._measured = cache, speeds
        self._front: Mapping[Req, Waiting[Req]] = {}
        self._pace = Pace(Average())
        self._looked = -1.0, False  # when, and whether a load was under way
        self._waited = False  # whether requests waited at the last step
        self._longest_step = 0.0  # seconds; fades

    @property
    def _speeds(self) -> Speeds:
        speeds: Speeds = self._measured.speeds
        return speeds

    @property
    def _link(self) -> Link:
        return self._speeds.loads[Tier.HOST]

    def load_flops(self, req: Req) -> int:
        """FLOPs of a prefill that takes as long as the load of `req` would, begun now."""
        size = self._cache.load_bytes(req)
        return int(self._link.seconds(size) * self._speeds.prefill) if size else 0

    # Called by the queue

    def on_start(self, req: Req, waited: float = 0.0) -> None:
        """Called when `req`, which waited for so many seconds, has joined a batch. Its load may be
        under way still: the device waits for that (`HostTierCache.ready_to_load_host_cache`).
        """
        self.returns.forget(req.last_node)
        missing = self._cache.load_bytes(req)
        had_time = waited > self._link.seconds(missing) + MARGIN
        self.ahead.on_turn(req, missing, had_time=had_time)
        allowed = int(req.sampling_params.max_new_tokens or 0)
        self.ahead.on_decode(req, _keys(req), allowed, since=self._looked[0])

    def on_request_end(self, req: Req) -> None:
        """`req` gave back what it held: it ended, was aborted, or was retracted."""
        if req.finished():
            self.ahead.on_request_end(req, _keys(req), len(req.output_ids))
        else:
            self.ahead.running.pop(req, None)

    def step(self, front: Mapping[Req, Waiting[Req]], now: float) -> None:
        """The scheduler begins another step; `front` of the queue is in order."""
        loading = self._cache.is_loading()
        if (now, loading) == self._looked:
            return
        if self._waited:
            self._longest_step = max(now - self._looked[0], FADE * self._longest_step)
        self._waited = bool(front)
        self._looked = now, loading
        self._pace.measure(self.ahead.running, now)
        if loading:
            return
        self.ahead.on_all_arrived()
        self.ahead.per_token = pace = self._pace.per_token
        self.ahead.margin = MARGIN + self._longest_step  # until the next step nothing begins
        for req, decoding in self.ahead.running.items():
            decoding.since = now - pace * len(req.output_ids)
        self._front = front
        queue = list(front)
        self.ahead.cancel_evicted(queue)
        due, _ = self.ahead.begin_due(queue, now, self._link.bandwidth)
        if not due:
            self._begin_expected(now)

    def _begin_expected(self, now: float) -> None:
        """Begin the load for a session that is expected back soon, if what it pushes out is worth
        no more.
        """
        if not len(self.returns):
            return
        cache, seconds = self._cache, self._link.seconds
        longest = seconds(cache.most_bytes)
        node_id = self.returns.due(now + MARGIN, seconds, cache.missing_bytes, longest)
        if node_id is not None and cache.begin_load(node_id):
            self.ahead.counts.expected += 1

    # Called by `LoadsAhead`

    def load_bytes(self, name: Req) -> int:
        return self._cache.load_bytes(name)

    def prefill_seconds(self, name: Req) -> float:
        prospect = self._front[name].prospect
        return 0.0 if prospect is None else self._speeds.compute(prospect.cost)

    def begin_load(self, name: Req, before: Sequence[Req]) -> tuple[int, bool]:
        nodes = [other.best_match_node for other in before]
        size = self._cache.begin_load(name.best_match_node, nodes)
        return size, size > 0


def _keys(req: Req) -> list[Hashable]:
    """Groups of requests by whose answers the length of the next one is predicted: those of the
    tenant whose prompts begin alike, then all of the tenant.
    """
    tenant = tenant_of(req)
    return [(tenant, fingerprint_tokens(req.origin_input_ids[:FIRST_TOKENS])), (tenant,)]
