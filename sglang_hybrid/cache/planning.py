"""Plans the states that the prefills of a cache's requests leave: from the first try to admit a
request to the states that its prefill has left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.session.streaming_session import is_virtual_node

from sglang_hybrid.checkpoints.message_boundaries import MessageBoundaries
from sglang_hybrid.checkpoints.prefix_wait import PrefixWait
from sglang_hybrid.serving.per_request import PerRequest
from sglang_hybrid.serving.requests.cache_fields import fields_of
from sglang_hybrid.serving.tenants import tenant_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_hybrid.cache.parts import Parts
    from sglang_hybrid.checkpoints.planner import PendingCheckpoint
    from sglang_hybrid.core.returns.history import HistoryMatch


class PrefillPlans:
    """Plans for the prefills of one cache. Without a planner nothing is planned.

    message_boundaries: finds where messages begin; none are found without it.
    """

    def __init__(self, parts: Parts, message_boundaries: MessageBoundaries | None = None) -> None:
        self.planner = parts.planner
        self.full_hits = parts.full_hits
        least = parts.options.hybrid_min_branch_tokens
        self.prefix_wait = PrefixWait(self.planner, parts.stats, least)
        if message_boundaries is None:
            message_boundaries = MessageBoundaries()
        self.message_boundaries = message_boundaries
        self._lookups = parts.lookups
        self._shadow_tree = parts.shadow_tree
        self._decision_log = parts.decision_log
        self._messages: PerRequest[tuple[list[int], int]] = PerRequest()
        self._history_matches: PerRequest[HistoryMatch] = PerRequest()

    def messages(self, req: Req) -> tuple[list[int], int]:
        """The starts of the messages of a prompt, in tokens, and that of the reply to it
        (`MessageBoundaries.reply_start`); looked for once per request.
        """
        found = self._messages.get(req)
        if found is None:
            prompt, boundaries = req.origin_input_ids, self.message_boundaries
            found = boundaries.message_starts(prompt), boundaries.reply_start(prompt)
            self._messages[req] = found
        return found

    def history_match(self, req: Req) -> HistoryMatch | None:
        """The match of the prompt of ``req`` with the history when it was planned last."""
        return self._history_matches.get(req)

    def plan(self, req: Req) -> None:
        """Say which states the prefill of ``req`` should leave: it may join the next batch. A turn
        of a streaming session leaves none: what it computes stays with the session. Neither does a
        full hit.
        """
        if req.skip_radix_cache_insert or is_virtual_node(req.last_node):
            return
        if self.full_hits is not None and self.full_hits.is_full_hit(req):
            self._lookups.on_full_hit(req)
            return
        prompt = req.full_untruncated_fill_ids
        history_match = None
        if self._shadow_tree is not None:
            last = self._history_matches.get(req)
            history_match = self._shadow_tree.match_history(prompt, tenant_of(req), last)
        if history_match is not None:
            self._history_matches[req] = history_match
            self._decision_log.on_history_match(req, history_match.known_len)
        if self.planner is None:
            known = None if history_match is None else history_match.known_len
            self._lookups.on_history_match(req, known)
            return
        message_starts, reply_start = self.messages(req)
        was_retracted = len(prompt) > len(req.origin_input_ids)
        self.planner.plan_request(
            req,
            len(prompt),
            self._lookups.hit_len(req),
            self._lookups.kv_len(req),
            history_match=history_match,
            shared=self.prefix_wait.shared(req),
            message_starts=message_starts,
            reply_start=0 if was_retracted else reply_start,
            declared=fields_of(req).hints.positions,
            is_repeated=self.full_hits is not None
            and self.full_hits.wants_state(req, self._lookups.hit_len(req)),
        )

    def on_next_chunk(self, req: Req) -> None:
        """The prefill of ``req`` goes on. Requests may have come since its last chunk."""
        if self.planner is not None and self.prefix_wait.has_waiting:
            self.planner.want_branches(req, self.prefix_wait.shared(req))

    def on_admitted(self, req: Req) -> None:
        """``req`` joined the batch."""
        self.prefix_wait.on_admission(req)
        if self.planner is not None:
            self.planner.on_admission(req)

    def drop(self, req: Req) -> None:
        """Forget the plan for ``req``, which did not join the batch, or ended."""
        if self.planner is not None:
            self.planner.drop(req)

    @property
    def splits_prefills(self) -> bool:
        """True if a prefill must stop where a state is wanted."""
        return self.planner is not None and not self.planner.one_pass

    def next_cut(self, req: Req, start: int, end: int) -> int | None:
        """The position where a prefill of tokens [start, end) must stop so that a state can be
        copied; None if it need not.
        """
        return None if self.planner is None else self.planner.next_cut(req, start, end)

    def assign_slots(self, batch: ScheduleBatch) -> None:
        """Give the states of a batch's prefill, which is about to start, their slots."""
        if self.planner is not None:
            self.planner.assign_slots(batch)
            if self.full_hits is not None:
                self.full_hits.plan_forward(batch)

    def plan_decode(self, batch: ScheduleBatch) -> None:
        """Say which states a decode step of ``batch``, which is about to start, leaves."""
        if self.planner is not None:
            self.planner.plan_decode(batch)

    def answer_state(self, req: Req) -> int:
        """Position of the state that ``req``, which ended, left in its answer; 0 without one."""
        return 0 if self.planner is None else self.planner.answer_state(req)

    def take_ready(self, req: Req, up_to: int) -> list[PendingCheckpoint]:
        """The states in the first ``up_to`` tokens that the prefill of ``req`` has left, the
        deepest first. The caller owns their slots.
        """
        return [] if self.planner is None else self.planner.take_ready(req, up_to)

    def forget_all(self) -> None:
        """Forget all plans and full hits, after the tree was emptied."""
        if self.full_hits is not None:
            self.full_hits.forget_all()
        if self.planner is not None:
            self.planner.forget_all()
