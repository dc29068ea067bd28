"""Loads from the host that end when their request's turn comes (core/queue/prefetch.py), on a server.

SGLang begins a load when its request joins a batch, whose prefill then waits. Here a load begins
when it would otherwise end late: when the next places become free follows from the lengths of
answers, and what lies before a request from the order of the queue. Those that are not due before
the next step can still be given up. While loads are under way no others begin.

All ranks have the same queue, clock, speeds and acknowledged transfers, and so begin the same loads
at the same steps.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from sglang_hybrid.cache.queue.clock import SECONDS_BETWEEN_TICKS
from sglang_hybrid.core.queue.lengths import AnswerLengths, Average, Decoding, free_places
from sglang_hybrid.core.queue.prefetch import Prefetcher, turns
from sglang_hybrid.core.queue.waiting import Prospect, Waiting
from sglang_hybrid.core.returns.history_tree import fingerprint_tokens
from sglang_hybrid.core.returns.sessions import ExpectedReturns
from sglang_hybrid.core.tiers.rates import Speeds, Tier
from sglang_hybrid.serving.tenants import tenant_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

LOOKED_AT: Final = 16
"""Requests at the front of the queue whose loads are thought of."""

MARGIN: Final = 2 * SECONDS_BETWEEN_TICKS
"""Seconds by which a load begins before it must, besides those of a step: the clock is as exact as
that.
"""

FADE: Final = 0.9
"""Per step: what remains of the longest one before it."""

FIRST_TOKENS: Final = 64
"""Of a prompt: requests that begin alike (a schema, a system prompt) are answered alike."""

SAMPLE_TOKENS: Final = 8
"""Decoded tokens over which the time of one is measured."""

FIRST_PACE: Final = 0.02
"""Seconds per decoded token until that is measured."""


class LoadingCache(Protocol):
    """What loads need of the cache."""

    def begin_load(self, node_id: int, keep: Collection[int] | None = None) -> int:
        """Load what of the path to a node only the host has. keep: nodes that stay for it; without
        them all stays that somebody waits for, or that is worth more. Returns its bytes; 0 if there
        is no room, or nothing to load.
        """
        ...

    def is_loading(self) -> bool:
        """Whether a load is under way."""
        ...

    def load_bytes(self, req: Req) -> int:
        """Bytes that `req` must load before it runs, by its last look-up."""
        ...

    def missing_bytes(self, node_id: int) -> int:
        """Bytes that a request which resumes from this node must load; 0 if it is gone."""
        ...


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

    def look(self, running: Mapping[Req, Any], now: float) -> None:
        """Requests `running` have their tokens now."""
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
        speeds: in force on all ranks.
    """

    def __init__(self, cache: LoadingCache, speeds: Any) -> None:
        self.prefetcher: Prefetcher[Req] = Prefetcher(margin=MARGIN)
        self.lengths = AnswerLengths()
        self.returns = ExpectedReturns()
        self.places = 1
        self._cache, self._speeds = cache, speeds
        self._running: dict[Req, float] = {}  # and how long their answers are expected to be
        self._pace = Pace(Average())
        self._under_way: set[Req] = set()
        self._looked = -1.0, False  # when, and whether a load was under way
        self._waited = False  # whether requests waited at the last step
        self._longest_step = 0.0  # seconds; fades

    def waits_for_load(self, req: Req) -> bool:
        """Whether a load for `req` is under way."""
        return req in self._under_way

    def load_flops(self, req: Req) -> int:
        """FLOPs of a prefill that takes as long as the load of `req` would, begun now."""
        size = self._cache.load_bytes(req)
        if not size:
            return 0
        speeds: Speeds = self._speeds.speeds
        return int(speeds.loads[Tier.HOST].seconds(size) * speeds.prefill)

    # What the queue tells.

    def admitted(self, req: Req, waited: float = 0.0) -> None:
        """`req`, which waited for so many seconds, joined a batch. What it resumes from may be
        loading still: the device waits for that (`HostTierCache.ready_to_load_host_cache`).
        """
        self.returns.forget(req.last_node)
        size = self._cache.load_bytes(req)
        if size:
            speeds: Speeds = self._speeds.speeds
            had_time = waited > speeds.loads[Tier.HOST].seconds(size) + MARGIN
            self.prefetcher.loads_on_turn(req, had_time=had_time)
        else:
            self.prefetcher.runs(req)
        self._under_way.discard(req)
        allowed = int(req.sampling_params.max_new_tokens or 0)
        self._running[req] = self.lengths.predicted(_keys(req), allowed)

    def left(self, req: Req) -> None:
        """It waits no more, and does not run."""
        self.prefetcher.cancel(req)
        self._under_way.discard(req)

    def ended(self, req: Req) -> None:
        """It gave back what it held."""
        ran = self._running.pop(req, None) is not None
        if ran and req.finished():
            self.lengths.ended(_keys(req), len(req.output_ids))

    # What begins.

    def step(self, front: Mapping[Req, Waiting[Req]], now: float) -> None:
        """The scheduler begins another step; `front` of the queue is in order."""
        loading = self._cache.is_loading()
        if (now, loading) == self._looked:
            return
        if self._waited:
            self._longest_step = max(now - self._looked[0], FADE * self._longest_step)
        self._waited = bool(front)
        self._looked = now, loading
        self._pace.look(self._running, now)
        if loading:
            return
        for req in self._under_way:
            self.prefetcher.arrived(req, 1 << 62)
        self._under_way.clear()
        if not self._begin_due(front, now):
            self._begin_expected(now)

    def _begin_due(self, front: Mapping[Req, Waiting[Req]], now: float) -> bool:
        """Begin the loads that are due, in order; whether any was."""
        looked_at = list(front.values())[:LOOKED_AT]
        waiting = [(each.name, self._cache.load_bytes(each.name)) for each in looked_at]
        if not any(size for _, size in waiting):
            return False
        for name, size in waiting:
            if size and name in self.prefetcher:
                self.prefetcher.cancel(name)  # it was evicted before its turn
        speeds: Speeds = self._speeds.speeds
        prospects = [each.prospect for each in looked_at]
        free = turns(self._places(now), [_seconds(it, speeds) for it in prospects])
        self.prefetcher.margin = MARGIN + self._longest_step  # until the next step nothing begins
        due, _ = self.prefetcher.due(waiting, speeds.loads[Tier.HOST].bandwidth, free)
        order = [each.name for each in looked_at]
        for req in due:
            before = [other.best_match_node for other in order[: order.index(req)]]
            size = self._cache.begin_load(req.best_match_node, before)
            self.prefetcher.room(req, there_is=size > 0)
            if size:
                self.prefetcher.started(req, size)
                self._under_way.add(req)
        return bool(due)

    def _begin_expected(self, now: float) -> None:
        """Begin the load for a session that is expected back soon, if what it pushes out is worth
        no more.
        """
        link = self._speeds.speeds.loads[Tier.HOST]
        node_id = self.returns.due(now + MARGIN, link.seconds, self._cache.missing_bytes)
        if node_id is not None and self._cache.begin_load(node_id):
            self.prefetcher.counts.expected += 1

    def _places(self, now: float) -> list[float]:
        """Seconds until a waiting request can have the first, second ... place."""
        pace = self._pace.per_token
        running = [
            Decoding(now - pace * len(req.output_ids), predicted)
            for req, predicted in self._running.items()
        ]
        return free_places(running, now, pace, self.places)


def _seconds(prospect: Prospect | None, speeds: Speeds) -> float:
    return 0.0 if prospect is None else speeds.compute(prospect.cost)


def _keys(req: Req) -> list[Hashable]:
    """Whose answers say how long the next one will be: of the tenant's prompts those that begin
    alike, then all.
    """
    tenant = tenant_of(req)
    return [(tenant, fingerprint_tokens(req.origin_input_ids[:FIRST_TOKENS])), (tenant,)]
