"""SGLang's waiting queue in an order of ours.

The scheduler keeps the queue and tries its requests from the front on. Before each round the
prefill adder has the queue arranged here. The adder tells what was admitted, the cache what was
aborted and what ended. All ranks have the same queue, tree and clock, so they arrange it alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.mem_cache.common import match_kv_cache

from sglang_hybrid.cache.queue.clock import StepClock
from sglang_hybrid.cache.queue.loads import LoadingCache, TimedLoads
from sglang_hybrid.core.queue.orders import Car, Order, Window
from sglang_hybrid.core.queue.queue_order import QueueOrder
from sglang_hybrid.core.queue.standings import Standings
from sglang_hybrid.core.queue.waiting import Bound, Prospect, ReuseKind
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import Schedule
from sglang_hybrid.serving.per_request import PerRequest
from sglang_hybrid.serving.telemetry.schedule import ScheduleStats

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

    from sglang_hybrid.cache.records.shadow_tree import ShadowTree
    from sglang_hybrid.core.costs.cost import CostModel
    from sglang_hybrid.core.records.nodes import Node


class ScheduledCache(Protocol):
    """What the queue asks of its cache."""

    tree_core: Any
    cost: CostModel
    shadow_tree: ShadowTree | None
    step_clock: StepClock


class QueueSchedule:
    """The order in which the requests of one scheduler wait.

    Args:
        cache: where they look for what they can reuse.
        order: window or car.
        bound: after which a request is overtaken no more.
        priority_sign: times a request's priority gives a number that is smaller for those that run
            first; None where SGLang's priorities are off.
    """

    def __init__(
        self, cache: ScheduledCache, order: Order, bound: Bound, priority_sign: int | None = None
    ) -> None:
        self.clock = cache.step_clock
        self.clock.join(self._needs_time)
        self.stats = ScheduleStats()
        self.bound = bound
        self.name = order.name
        self._cache = cache
        self._order: QueueOrder[Req] = QueueOrder(order, bound, WeakKeyDictionary())
        self._standings: Standings[Req] = Standings(self._move)
        self._arranged: tuple[Any, ...] = ()  # the queue that was arranged last
        self._prospects: PerRequest[tuple[int, Prospect]] = PerRequest()
        self.loads: TimedLoads | None = None
        self._priority: Callable[[Req], int] | None = None
        if priority_sign is not None:
            self._priority = lambda req: int(req.priority) * priority_sign

    def load_ahead(self, cache: LoadingCache, speeds: Any) -> None:
        """There is a host below the device: loads begin before their requests' turns."""
        self.loads = TimedLoads(cache, speeds)
        self.stats.loads = self.loads.prefetcher.counts

    # What the prefill adder calls.

    def arrange(self, queue: list[Req]) -> None:
        """The scheduler is about to try the requests of `queue`, from the front on."""
        for req in queue[: self._order.order.front(len(queue))]:
            self.clock.arrival(req)
        self._order.arrange(queue, self.clock.now, self._prospect, self._arrived, self._priority)
        front = self._order.front
        self._standings.only(front)
        self.stats.front = len(front)
        self._arranged = self._as_it_is(queue)

    def may_run(self, req: Req) -> bool:
        """Whether `req` overtakes nobody that may be overtaken no more."""
        return self._order.may_run(req)

    def admitted(self, req: Req) -> None:
        """It is in a batch now."""
        waiting = self._order.left(req, runs=True)
        self._standings.runs(req)
        if self.loads is not None:
            self.loads.admitted(req, self.clock.now - self._arrived(req))
        if waiting is not None and not req.rid.startswith(HEALTH_CHECK_RID_PREFIX):
            self.stats.on_start(waiting, self.bound, self.clock.now)

    # What the cache calls.

    def aborted(self, handle: CacheRequestHandle) -> None:
        """A request was aborted; if it waits, it does so no more."""
        waiting = next((r for r in self._order.front if r.cache_request_handle == handle), None)
        if waiting is not None:
            self._order.left(waiting, runs=False)
            self._standings.ends(waiting)
            if self.loads is not None:
                self.loads.left(waiting)
            self.stats.aborted += 1

    def ended(self, req: Req) -> None:
        """`req` gave back what it held: it ended, was aborted, or was retracted."""
        self._standings.ends(req)
        if self.loads is not None:
            self.loads.ended(req)

    def expected(self, node_id: int, seconds: float) -> None:
        """Somebody is expected to come back to a node, so many seconds from now."""
        if self.loads is not None:
            self.loads.returns.expect(node_id, self.clock.now + seconds)

    def emptied(self) -> None:
        """The tree was emptied."""
        self._standings.forget_all()

    # What the scheduler's patches call.

    def step(self, queue: list[Req]) -> None:
        """The scheduler begins another step, in which it may not look at `queue` at all."""
        if self.loads is None:
            return
        if queue and self._as_it_is(queue) != self._arranged:
            self.arrange(queue)
        self.loads.step(self._order.front, self.clock.now)

    def _needs_time(self, seconds: float) -> bool:
        """Whether ticks are to be sent."""
        expects = self.loads is not None and len(self.loads.returns) > 0
        return expects or bool(self._order.front)

    @property
    def holds(self) -> int:
        """Requests that hold a node."""
        return len(self._standings)

    def info(self) -> dict[str, Any]:
        """For /server_info."""
        return {
            "order": self.name,
            "window": self._order.order.front(1 << 30),
            "overtaken_at_most": self.bound.times,
            "overtaken_for_seconds": self.bound.seconds,
            "holds": self.holds,
            **self.stats.as_dict(),
        }

    def _as_it_is(self, queue: list[Req]) -> tuple[Any, ...]:
        """What tells that nobody came or left, and no time passed, since the queue was arranged."""
        return (self.clock.now, len(queue), *(req.rid for req in queue[-1:]))

    # What it asks of requests.

    def _arrived(self, req: Req) -> float:
        arrival = self.clock.arrival(req)
        return self.clock.now if arrival is None else arrival

    def _prospect(self, req: Req) -> Prospect:
        """What `req` could reuse now; FLOPs of the prefill that remains, with those for which there
        would be time during its load.
        """
        tokens = req.origin_input_ids
        if req.output_ids:  # it was retracted
            tokens = tokens + req.output_ids
        most = req._compute_max_prefix_len(len(tokens))
        match_kv_cache(req, self._cache, tokens, max_prefix_len=most)
        self._standings.waits(req, self._node(req))
        return self._cost(req, len(tokens))

    def _cost(self, req: Req, length: int) -> Prospect:
        hit = req.num_matched_prefix_tokens
        load = 0 if self.loads is None else self.loads.load_flops(req)
        known = self._prospects.get(req)
        loads = req.host_hit_length > 0 or getattr(req, "mamba_host_hit_length", 0) > 0
        loads = loads or (self.loads is not None and self.loads.waits_for_load(req))
        reuse = ReuseKind.TO_LOAD if loads else ReuseKind.ON_DEVICE if hit else ReuseKind.NOTHING
        if known is not None and known[0] == length:
            before = known[1]
            if (before.hit_len, before.reuse) == (hit, reuse) and not load:
                return before
        whole = self._cache.cost.flops(length)
        prospect = Prospect(hit, load + whole - self._cache.cost.flops(hit), whole, reuse)
        self._prospects[req] = length, prospect
        return prospect

    def _node(self, req: Req) -> Node | None:
        """The record of the node that `req` would resume from."""
        shadow_tree = self._cache.shadow_tree
        if shadow_tree is None or not req.num_matched_prefix_tokens:
            return None
        return shadow_tree.record(self._cache.tree_core.node_by_id(req.best_match_node))

    def _move(self, node: Node, by: int) -> None:
        if self._cache.shadow_tree is not None:
            self._cache.shadow_tree.tree.move_standing(node, by)


def make_schedule(
    cache: ScheduledCache, options: HybridConfig, priority_sign: int | None = None
) -> QueueSchedule | None:
    """As the flags say; None where SGLang orders the queue."""
    if not options.hybrid_schedule.is_ours:
        return None
    size = options.hybrid_schedule_window
    order = Window(size) if options.hybrid_schedule is Schedule.WINDOW else Car(size)
    bound = Bound(options.hybrid_schedule_overtaken, options.hybrid_schedule_seconds)
    return QueueSchedule(cache, order, bound, priority_sign)
