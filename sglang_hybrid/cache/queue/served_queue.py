"""SGLang's waiting queue in an order of ours.

The scheduler keeps the queue and tries its requests from the front on. Before each round the
prefill adder has the queue arranged here. The adder tells what was admitted, the cache what was
aborted and what ended. All ranks have the same queue, tree and clock, so they arrange it alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.mem_cache.common import match_kv_cache

from sglang_hybrid.core.queue.orders import Car, Order, Window
from sglang_hybrid.core.queue.waiting import Bound, Prospect, ReuseKind
from sglang_hybrid.core.queue.waiting_queue import Found, WaitingQueue
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import Schedule
from sglang_hybrid.serving.per_request import PerRequest
from sglang_hybrid.serving.telemetry.schedule import ScheduleStats

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

    from sglang_hybrid.cache.queue.loads import TimedLoads
    from sglang_hybrid.cache.radix_cache import HybridRadixCache
    from sglang_hybrid.cache.records.shadow_tree import ShadowTree
    from sglang_hybrid.cache.tiers.ahead_loads import AheadLoads
    from sglang_hybrid.core.records.nodes import Node


class ServedQueue:
    """The order in which the requests of one scheduler wait.

    Args:
        cache: where they look for what they can reuse.
        order: window or car.
        bound: after which a request is overtaken no more.
        priority_sign: times a request's priority gives a number that is smaller for those that run
            first; None where SGLang's priorities are off.
    """

    def __init__(
        self, cache: HybridRadixCache, order: Order, bound: Bound, priority_sign: int | None = None
    ) -> None:
        self.clock = cache.step_clock
        self.clock.join(self._needs_time)
        self.stats = ScheduleStats()
        self.name = order.name
        self.loads: TimedLoads | None = None
        self._cache = cache
        priority: Callable[[Req], int] | None = None
        if priority_sign is not None:
            priority = lambda req: int(req.priority) * priority_sign  # noqa: E731
        self._waiting: WaitingQueue[Req] = WaitingQueue(
            order,
            bound,
            self._look_up,
            self._arrived,
            move_demand=self._move_demand,
            priority=priority,
            known=WeakKeyDictionary(),
        )
        self._arranged: tuple[Any, ...] = ()  # the queue that was arranged last
        self._prospects: PerRequest[tuple[int, Prospect]] = PerRequest()

    def load_ahead(self, cache: AheadLoads, speeds: Any) -> None:
        """Begin loads from the host before their requests' turns, from now on."""
        from sglang_hybrid.cache.queue.loads import TimedLoads

        self.loads = TimedLoads(cache, speeds)
        self.stats.loads = self.loads.ahead.counts

    # Called by the prefill adder

    def arrange(self, queue: list[Req]) -> None:
        """Put `queue` in order; the scheduler then tries its requests from the front on."""
        for req in queue[: self._waiting.order.front(len(queue))]:
            self.clock.arrival(req)
        self._waiting.arrange(queue, self.clock.now)
        self.stats.front = len(self._waiting.front)
        self._arranged = self._queue_snapshot(queue)

    def can_run(self, req: Req) -> bool:
        """True if `req` overtakes no request that may be overtaken no more."""
        return self._waiting.can_run(req)

    def on_start(self, req: Req) -> None:
        """Called when `req` has joined a batch."""
        waiting = self._waiting.on_start(req)
        self.stats.front = len(self._waiting.front)
        if self.loads is not None:
            self.loads.on_start(req, self.clock.now - self._arrived(req))
        if waiting is not None and not req.rid.startswith(HEALTH_CHECK_RID_PREFIX):
            self.stats.on_start(waiting, self._waiting.bound, self.clock.now)

    # Called by the cache

    def on_abort(self, handle: CacheRequestHandle) -> None:
        """The request with `handle` was aborted; if it waits, it does so no more."""
        known = self._waiting.known
        req = next((req for req in known if req.cache_request_handle == handle), None)
        if req is not None:
            self._waiting.on_abort(req)
            self.stats.front = len(self._waiting.front)
            if self.loads is not None:
                self.loads.ahead.cancel(req)
            self.stats.aborted += 1

    def on_request_end(self, req: Req) -> None:
        """`req` gave back what it held: it ended, was aborted, or was retracted."""
        self._waiting.on_request_end(req)
        if self.loads is not None:
            self.loads.on_request_end(req)

    def expect_return(self, node_id: int, seconds: float) -> None:
        """A session is expected to come back to a node, so many seconds from now."""
        if self.loads is not None:
            self.loads.returns.expect(node_id, self.clock.now + seconds)

    def on_flush(self) -> None:
        """Forget the nodes of waiting requests, after the tree was emptied."""
        self._waiting.on_flush()

    # Called by a hook (hooks/scheduling.py).

    def step(self, queue: list[Req]) -> None:
        """The scheduler begins another step, in which it may not look at `queue` at all."""
        if self.loads is None:
            return
        if queue and self._queue_snapshot(queue) != self._arranged:
            self.arrange(queue)
        self.loads.step(self._waiting.front, self.clock.now)

    def _needs_time(self, seconds: float) -> bool:
        """True if ticks are to be sent often."""
        expects = self.loads is not None and len(self.loads.returns) > 0
        return expects or bool(self._waiting.front)

    @property
    def holds(self) -> int:
        """Requests that hold a node."""
        return self._waiting.holds

    def info(self) -> dict[str, Any]:
        """The values for /server_info."""
        return {
            "order": self.name,
            "window": self._waiting.order.front(1 << 30),
            "overtaken_at_most": self._waiting.bound.times,
            "overtaken_for_seconds": self._waiting.bound.seconds,
            "holds": self.holds,
            **self.stats.as_dict(),
        }

    def _queue_snapshot(self, queue: list[Req]) -> tuple[Any, ...]:
        """A value that is equal while no request comes or leaves and the clock stands still."""
        return (self.clock.now, len(queue), *(req.rid for req in queue[-1:]))

    # Look-ups of requests

    def _arrived(self, req: Req) -> float:
        arrival = self.clock.arrival(req)
        return self.clock.now if arrival is None else arrival

    def _look_up(self, req: Req) -> Found:
        """The prefix that `req` could reuse now."""
        tokens = req.origin_input_ids
        if req.output_ids:  # it was retracted
            tokens = tokens + req.output_ids
        most = req._compute_max_prefix_len(len(tokens))
        match_kv_cache(req, self._cache, tokens, max_prefix_len=most)
        return self._prospect(req, len(tokens)), self._node(req)

    def _prospect(self, req: Req, length: int) -> Prospect:
        """FLOPs of the prefill that remains of a prompt of so many tokens, with those for which
        there would be time during its load.
        """
        hit = req.num_matched_prefix_tokens
        load = 0 if self.loads is None else self.loads.load_flops(req)
        loads = req.host_hit_length > 0 or getattr(req, "mamba_host_hit_length", 0) > 0
        loads = loads or (self.loads is not None and self.loads.ahead.is_under_way(req))
        reuse = ReuseKind.of(hit, loads=loads)
        known = self._prospects.get(req)
        if known is not None and known[0] == length:
            before = known[1]
            if (before.hit_len, before.reuse) == (hit, reuse) and not load:
                return before
        whole = self._cache.cost.flops(length)
        prospect = Prospect(hit, load + whole - self._cache.cost.flops(hit), whole, reuse)
        self._prospects[req] = length, prospect
        return prospect

    def _node(self, req: Req) -> Node | None:
        """The record of the node that `req` would resume from; None for a turn of a streaming
        session, which has its KV and its state to itself.
        """
        shadow_tree: ShadowTree | None = self._cache.shadow_tree
        if shadow_tree is None or not req.num_matched_prefix_tokens:
            return None
        return shadow_tree.by_id(req.best_match_node)

    def _move_demand(self, node: Node, by: int) -> None:
        if self._cache.shadow_tree is not None:
            self._cache.shadow_tree.tree.move_demand(node, by)


def make_served_queue(
    cache: HybridRadixCache, options: HybridConfig, priority_sign: int | None = None
) -> ServedQueue:
    """The queue that the flags ask for; for flags that leave the order to us."""
    size = options.hybrid_schedule_window
    order = Window(size) if options.hybrid_schedule is Schedule.WINDOW else Car(size)
    bound = Bound(options.hybrid_schedule_overtaken, options.hybrid_schedule_seconds)
    return ServedQueue(cache, order, bound, priority_sign)
