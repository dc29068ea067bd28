"""What is learnt of requests that ended: by the tuner, by the history of prompts, and by the queue,
which may expect the session to come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.serving.requests import kv_hints
from sglang_hybrid.serving.tenants import tenant_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_hybrid.cache.parts import Parts
    from sglang_hybrid.cache.planning import PrefillPlans
    from sglang_hybrid.cache.queue.served_queue import ServedQueue
    from sglang_hybrid.cache.request.segments import ModularPrompts
    from sglang_hybrid.cache.tuning import Tuning


class EndingCache(Protocol):
    """What is asked of the cache whose requests end."""

    tree_core: Any
    tuning: Tuning
    schedule: ServedQueue | None
    modular: ModularPrompts
    plans: PrefillPlans


class Endings:
    """Tells of the requests of one cache that ended. ``parts``: ours of the cache."""

    def __init__(self, cache: EndingCache, parts: Parts) -> None:
        self._cache = cache
        self._shadow_tree = parts.shadow_tree
        self._learning = parts.learning

    def on_end(self, req: Req, up_to: int) -> None:
        """``req`` ended with ``up_to`` tokens in the tree. Nothing is learnt of a prompt that was
        put together from segments.
        """
        cache = self._cache
        if cache.modular.composed(req) is not None:
            return
        starts = cache.plans.message_starts(req)
        if cache.tuning.listens:
            cache.tuning.finished(req, up_to, starts)
        if self._shadow_tree is None:
            return
        self._shadow_tree.on_finish(
            np.asarray(req.full_untruncated_fill_ids)[:up_to],  # no copy
            len(req.origin_input_ids),
            cache.tree_core.node_by_id(req.last_node),
            cache.tree_core.root_node,
            starts,
            tenant_of(req),
            cache.plans.history_match(req),
            kv_hints.read(req.kv_hints).session,
        )
        if self._learning is not None:
            self._learning.finished()
        self._expect_return(req)

    def _expect_return(self, req: Req) -> None:
        """Tell the queue when the session of ``req`` may come back, if that is known."""
        schedule, tree = self._cache.schedule, self._cache.tree_core
        node = tree.node_by_id(req.last_node)
        if schedule is None or self._shadow_tree is None or node is tree.root_node:
            return
        place = self._shadow_tree.record(node).history_node
        seconds = None if place is None else place.return_after
        if seconds is not None:
            schedule.expect_return(node.id, seconds)

    def on_session_closed(self, last: Sequence[Req]) -> None:
        """A client closed its session, whose ``last`` requests nobody continued."""
        history = None if self._shadow_tree is None else self._shadow_tree.history
        if history is None:
            return
        for req in last:
            history.hint(req.full_untruncated_fill_ids, Hint.ENDS, tenant_of(req))
