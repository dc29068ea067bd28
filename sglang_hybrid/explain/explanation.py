"""The explanation why a prompt was not hit further: the report that one tenant gets."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from sglang_hybrid.core.checkpoints.admission import Prefill
from sglang_hybrid.core.checkpoints.checkpoint_plan import CheckpointPlan, plan_checkpoints
from sglang_hybrid.core.returns.history import HistoryMatch
from sglang_hybrid.explain.decision_log import DecisionLog, grid
from sglang_hybrid.explain.decisions import NAME_LENGTH, NotTaken
from sglang_hybrid.explain.miss_report import (
    CacheSnapshot,
    ExplainedRequest,
    MissedCheckpoint,
    MissReport,
    ResumedCheckpoint,
)
from sglang_hybrid.explain.reasons import Reasons
from sglang_hybrid.explain.recent import RecentRequest, ResumedFrom
from sglang_hybrid.explain.stored import StoredPrefixes
from sglang_hybrid.serving.telemetry.stats import Missed
from sglang_hybrid.serving.tenants import Tenant

if TYPE_CHECKING:
    from sglang_hybrid.cache.radix_cache import HybridRadixCache

MOST_MISSED = 64
"""Positions that a report names, the deepest ones."""


class Explanation:
    """Reports on the prompts of one tenant. Requests of other tenants change nothing in them, but
    that they took room.
    """

    def __init__(self, cache: HybridRadixCache, decision_log: DecisionLog, whose: Tenant) -> None:
        self._cache = cache
        self._decision_log = decision_log
        self._tenant = whose
        self._stored = StoredPrefixes(cache, decision_log, whose)
        self._reasons = Reasons(cache, decision_log, whose)

    def of_prompt(self, prompt: array[int]) -> MissReport:
        """The explanation of what a request with this prompt would find now."""
        usable = self._stored.usable(len(prompt))
        path, kv = self._stored.walk(prompt, usable)
        below, used, hit = self._stored.resume(path, kv, len(prompt))
        records = self._cache.shadow_tree
        history_match = None if records is None else records.match_history(prompt, self._tenant)
        known = None if history_match is None else history_match.known_len
        events = list(self._reasons.log.along(prompt))
        missed = self._reasons.missed_checkpoints(events, hit, usable)
        if self._cache.is_mamba_enabled:
            ends = [depth for depth, _ in path if depth > hit] + [kv] * (kv > hit)
            for end in dict.fromkeys(ends):
                missed.setdefault(end, self._reasons.unlogged_miss(end, hit, branch=end == kv))
        start = max(kv, known or 0)
        changing_text = self._decision_log.changing_text(prompt, self._tenant, start, hit)
        return MissReport(
            prompt=len(prompt),
            usable=usable,
            kv=kv,
            hit=hit,
            checkpoint=self._checkpoint(used),
            deeper=_deepest_first(missed),
            unstored=self._reasons.unstored(prompt, usable, events, kv, known, changing_text),
            leaves=self._would_leave(prompt, hit, kv, history_match),
            cache=self._snapshot(),
            below=below,
        )

    def of_request(self, request_id: str, seen: RecentRequest) -> MissReport:
        """The explanation of what this request found when it came, and what it left."""
        usable = seen.usable
        hit = seen.report.hit_tokens
        everything = list(self._reasons.log.along(seen.tokens))
        before = [
            (at, kept)
            for at, events in everything
            if (kept := [event for event in events if event.order < seen.order])
        ]
        missed: dict[int, MissedCheckpoint] = {}
        if seen.report.missed is not Missed.NO_SLOT:  # there a state was not missing
            missed = self._reasons.missed_checkpoints(before, hit, usable)
            if self._cache.is_mamba_enabled and seen.kv > hit:
                missed.setdefault(seen.kv, self._reasons.unlogged_miss(seen.kv, hit, branch=True))
        left = sorted(seen.report.checkpoints)
        taken = {position for position, _ in left}
        refused = {
            event.request.position: self._reasons.missed_checkpoint(
                event.request.position, hit, event
            )
            for _, events in everything
            for event in events
            if isinstance(event, NotTaken)
            and event.request.position not in taken
            and event.order >= seen.order
            and event.request.request_id == request_id[:NAME_LENGTH]
        }
        path, kv = self._stored.walk(seen.tokens, usable)
        return MissReport(
            prompt=len(seen.tokens),
            usable=usable,
            kv=seen.kv,
            hit=hit,
            checkpoint=self._checkpoint(seen.used),
            deeper=_deepest_first(missed),
            unstored=self._reasons.unstored(
                seen.tokens, usable, before, seen.kv, seen.known, seen.report.changing_text
            ),
            leaves=[],
            cache=self._snapshot(),
            request=ExplainedRequest(
                request_id,
                self._reasons.ago(seen.at),
                seen.report.missed.value,
                seen.report.started,
                [(position, kind.value) for position, kind in left],
                _deepest_first(refused),
                self._stored.resume(path, kv, len(seen.tokens))[2],
            ),
        )

    def _would_leave(
        self, prompt: array[int], hit: int, kv: int, history_match: HistoryMatch | None
    ) -> list[tuple[int, str]]:
        """Positions and kinds of the states that a prefill of this prompt would ask for, whether
        there is room for them or not.
        """
        cache = self._cache
        if not cache.plans_checkpoints:
            return []
        message_starts = cache.message_boundaries.message_starts(prompt)
        prefill = Prefill(
            len(prompt),
            hit,
            kv,
            known_branch=0 if history_match is None else history_match.branch,
            next_branch=0 if history_match is None else history_match.next_branch(message_starts),
            message_starts=message_starts,
            reply_start=cache.message_boundaries.reply_start(prompt),
            page_size=cache.page_size,
        )
        plan: CheckpointPlan[None]
        plan, _ = plan_checkpoints(prefill, history_match, cache.options.hybrid_min_branch_tokens)
        return [(position, kind.value) for position, kind in sorted(plan.wanted.items())]

    def _checkpoint(self, used: ResumedFrom | None) -> ResumedCheckpoint | None:
        if used is None:
            return None
        return ResumedCheckpoint(
            used.position,
            None if used.kind is None else used.kind.value,
            self._reasons.ago(used.taken),
            self._reasons.ago(used.last_used),
            used.hits,
            used.return_expected,
            self._reasons.pinned_for(used),
        )

    def _snapshot(self) -> CacheSnapshot:
        cache = self._cache
        kv_room, slots, shared = int(cache.token_to_kv_pool_allocator.size), None, None
        if cache.is_mamba_enabled:
            slots = int(cache.req_to_token_pool.mamba_allocator.size)
        if cache.account is not None:  # where the size changes with what all tenants store
            shared = cache.account.budget
            kv_room = shared // cache.cost.kv_bytes_per_token
        return CacheSnapshot(
            policy=cache.policy_name,
            admission=cache.options.hybrid_admission.value,
            states=cache.is_mamba_enabled,
            recorded=cache.shadow_tree is not None,
            page_size=cache.page_size,
            min_branch_tokens=cache.options.hybrid_min_branch_tokens,
            grid=grid(cache) if cache.is_mamba_enabled and not cache.plans_checkpoints else None,
            unplanned=cache.unplanned,
            state_slots=slots,
            kv_room=kv_room,
            shared_bytes=shared,
            full=self._reasons.log.full,
            emptied=self._reasons.ago(self._decision_log.decisions.emptied),
        )

    def unknown(self, request_id: str) -> str:
        """The sentence that no request of this tenant has this id."""
        recent = self._decision_log.recent
        count = len(recent.of(self._tenant))
        return (
            f"no request {request_id!r} with this extra key, salt and adapter is among the last "
            f"{count} that came; at most {recent.most_values} are kept, and fewer "
            "if their prompts are long."
        )


def _deepest_first(missed: dict[int, MissedCheckpoint]) -> list[MissedCheckpoint]:
    return [missed[position] for position in sorted(missed, reverse=True)][:MOST_MISSED]
