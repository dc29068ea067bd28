"""Requests join a prefill batch in the order of the schedule, if there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_hybrid.cache.queue.served_queue import ServedQueue
    from sglang_hybrid.cache.radix_cache import HybridRadixCache


class ScheduledPrefillAdder(PrefillAdder):
    """SGLang's adder. It is made before each round, and then gets the waiting requests from the
    front on: so it has the queue arranged first. A request that would overtake one that may be
    overtaken no more ends the batch.
    """

    tree_cache: HybridRadixCache

    def __init__(self, *args: Any, waiting_queue: list[Req], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.schedule: ServedQueue | None = self.tree_cache.schedule
        if self.schedule is not None:
            self.schedule.arrange(waiting_queue)
            if self.schedule.loads is not None:
                self.schedule.loads.ahead.places = kwargs.get("max_running_requests") or 1

    def can_run(self, req: Req) -> bool:
        """True if it is the turn of `req`."""
        return self.schedule is None or self.schedule.can_run(req)

    def add_one_req(self, req: Req, *args: Any, **kwargs: Any) -> AddReqResult:
        if not self.can_run(req):
            return AddReqResult.OTHER
        admitted = len(self.can_run_list)
        result = super().add_one_req(req, *args, **kwargs)
        if self.schedule is not None and len(self.can_run_list) > admitted:
            self.schedule.on_start(req)
        return result
