"""Requests that share a prefix which is not cached yet: the first one leaves a checkpoint at its
end, and the others wait for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sglang_hybrid.checkpoints.planner import Planner
from sglang_hybrid.core.queue.prefix_overlap import TOKEN_BYTES, PrefixOverlap, as_key
from sglang_hybrid.serving.per_request import PerRequest
from sglang_hybrid.serving.tenants import tenant_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_hybrid.serving.telemetry.stats import CacheStats

WORTH_A_STEP = 64
"""Tokens that waiting must save. A step more costs about what prefilling as many tokens costs."""

LONGEST_WAIT = 64
"""Steps after which a request waits no more, whatever it would save."""


class PrefixWait:
    """Decides which requests wait for a checkpoint of another request's prefill. Every decision
    follows from the queue and the plans, which are the same on all ranks.
    """

    def __init__(self, planner: Planner | None, stats: CacheStats, min_branch_tokens: int) -> None:
        self._planner = planner
        self._stats = stats
        self._min_branch_tokens = max(1, min_branch_tokens)
        self._overlap = PrefixOverlap()
        self._waited: PerRequest[int] = PerRequest()
        self._keys: PerRequest[bytes] = PerRequest()

    def update_waiting(self, queue: Iterable[Req]) -> None:
        """The queue as it is before a batch is filled."""
        if self._planner is None:
            return
        waiting = dict.fromkeys(queue)
        known = self._overlap.names()
        if known == waiting.keys():
            return
        for req in [req for req in known if req not in waiting]:
            self._overlap.remove(req)
        for req in [req for req in waiting if req not in known]:
            self._overlap.add_key(req, self._key(req), tenant_of(req))

    @property
    def has_waiting(self) -> bool:
        """True if requests of the queue have not joined a batch."""
        return bool(self._overlap.names())

    def shared(self, req: Req) -> list[int]:
        """Lengths of the prefixes that other requests of its tenant in the queue share with `req`,
        which may be in the queue itself; ascending.
        """
        waits = req in self._overlap
        if not waits:
            self._overlap.add_key(req, self._key(req), tenant_of(req))
        lengths = self._overlap.shared(req, self._min_branch_tokens)
        if not waits:
            self._overlap.remove(req)
        return lengths

    def on_admission(self, req: Req) -> None:
        """`req` joined a batch."""
        if req in self._overlap:
            self._overlap.remove(req)
        self._waited.pop(req)

    def waits_for_prefix(self, req: Req) -> bool:
        """True if a prefill under way will leave a state that is worth waiting for. Counts as one
        step of waiting.
        """
        if self._planner is None:
            return False
        waited = self._waited.get(req) or 0
        if waited >= LONGEST_WAIT or not self._has_planned_state(req):
            return False
        self._stats.waited += not waited
        self._waited[req] = waited + 1
        return True

    def _has_planned_state(self, req: Req) -> bool:
        assert self._planner is not None
        best = req.prefix_len + req.host_hit_length + WORTH_A_STEP
        usable = len(req.origin_input_ids) - 1
        if usable < best:
            return False
        tenant, prompt = tenant_of(req), req.origin_input_ids
        for other, plan in self._planner.in_flight():
            if other is req or plan.tenant != tenant:
                continue
            nearest = plan.first_open(best)
            if nearest is None or nearest > min(usable, len(other.origin_input_ids)):
                continue  # a retracted request prefills tokens that it has decoded, too
            if prompt[nearest - 1] != other.origin_input_ids[nearest - 1]:
                continue  # one token tells most prompts apart
            shared = memoryview(self._key(other))[: nearest * TOKEN_BYTES]
            if self._key(req).startswith(shared):
                return True
        return False

    def _key(self, req: Req) -> bytes:
        key = self._keys.get(req)
        if key is None:
            key = self._keys[req] = as_key(req.origin_input_ids)
        return key
