"""Finds why a position holds no state, and why KV is not stored, from the recorded decisions."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from sglang_hybrid.core.records.nodes import Kind
from sglang_hybrid.explain.decision_log import DecisionLog, grid
from sglang_hybrid.explain.decisions import (
    EMPTY_PREFIX_HASH,
    Decision,
    KvLost,
    NotTaken,
    StateLost,
    extend_prefix_hash,
)
from sglang_hybrid.explain.miss_report import (
    MissedCheckpoint,
    Reason,
    SlotRecipient,
    Unstored,
    UnstoredReason,
)
from sglang_hybrid.explain.recent import ResumedFrom, newest
from sglang_hybrid.serving.telemetry.stats import ChangingText, Evicted
from sglang_hybrid.serving.tenants import Tenant

if TYPE_CHECKING:
    from sglang_hybrid.cache.radix_cache import HybridRadixCache

Events: TypeAlias = Sequence[tuple[int, list[Decision]]]
"""Decisions by position, as `Decisions.along` finds them."""


class Reasons:
    """The decisions about one tenant's positions."""

    def __init__(self, cache: HybridRadixCache, decision_log: DecisionLog, whose: Tenant) -> None:
        self._cache = cache
        self._decision_log = decision_log
        self.log = decision_log.decisions.of(whose)
        self._now = newest(decision_log.recent, whose)

    def missed_checkpoints(
        self, events: Events, hit: int, usable: int
    ) -> dict[int, MissedCheckpoint]:
        """The latest reason for each position behind the hit that something was decided about."""
        missed: dict[int, MissedCheckpoint] = {}
        for position, there in events:
            for event in there:
                if hit < position <= usable and not isinstance(event, KvLost):
                    missed[position] = self.missed_checkpoint(position, hit, event)
        return missed

    def missed_checkpoint(self, position: int, hit: int, event: Decision) -> MissedCheckpoint:
        when = self.ago(event.at)
        if isinstance(event, NotTaken):
            request = event.request
            comparison = request.comparison if self._decision_log.one_tenant else None
            return MissedCheckpoint(
                position,
                position - hit,
                Reason(event.skip.value),
                request.kind.value,
                when,
                request=request.request_id,
                policy=None if comparison is None else self._cache.policy_name,
                score=None if comparison is None else comparison.new,
                victim_score=None if comparison is None else comparison.cheapest,
            )
        assert isinstance(event, StateLost)
        recipient = event.recipient
        scores = self._decision_log.one_tenant
        comparison = recipient.comparison if recipient is not None and scores else None
        return MissedCheckpoint(
            position,
            position - hit,
            Reason.EVICTED,
            event.kind.value,
            when,
            policy=event.policy,
            short=None if event.short is None else event.short.value,
            score=event.score if scores else None,
            recipient=None
            if recipient is None
            else SlotRecipient(
                recipient.position,
                recipient.kind.value,
                recipient.request_id,
                None if comparison is None else comparison.new,
            ),
            hits=event.hits,
            unused=max(0.0, event.at - event.last_used),
            return_expected=event.return_expected,
            with_kv=event.what is Evicted.LEAF,
            pinned=event.pinned,
        )

    def unlogged_miss(self, position: int, hit: int, *, branch: bool) -> MissedCheckpoint:
        """The reason why a position holds no state that no decision tells of."""
        cache = self._cache
        gain = position - hit
        kind = Kind.BRANCH.value if branch else None
        if not cache.plans_checkpoints and position % grid(self._cache):
            return MissedCheckpoint(position, gain, Reason.GRID, kind)
        if cache.options.is_judicious and gain < cache.options.hybrid_min_branch_tokens:
            return MissedCheckpoint(position, gain, Reason.MICRO_BRANCH, kind)
        forgotten = cache.shadow_tree is None or self.log.full
        return MissedCheckpoint(
            position, gain, Reason.UNKNOWN if forgotten else Reason.NOT_WANTED, kind
        )

    def unstored(
        self,
        tokens: array[int],
        usable: int,
        events: Events,
        kv: int,
        known: int | None,
        changing_text: ChangingText | None,
    ) -> Unstored | None:
        """The reason why nothing is stored behind the stored KV. An evicted edge tells of it if the
        prompt goes on along that edge: to its end, or as far as the history knows the prompt.
        changing_text: the reason of the miss, if it is one.
        """
        if kv >= usable:
            return None
        if changing_text is not None:
            why = UnstoredReason.CHANGING_TEXT
            return Unstored(kv, usable, why, known, changing_text=changing_text)
        lost: KvLost | None = None
        for event in (event for _, there in events for event in there):
            if not isinstance(event, KvLost) or event.end <= kv:
                continue
            reached = event.end <= len(tokens) and (
                extend_prefix_hash(EMPTY_PREFIX_HASH, tokens, 0, event.end) == event.end_hash
            )
            if (reached or (known or 0) > kv) and (lost is None or event.order > lost.order):
                lost = event
        if lost is not None:
            short = None if lost.short is None else lost.short.value
            when = self.ago(lost.at)
            return Unstored(kv, usable, UnstoredReason.EVICTED, known, when, short, lost.policy)
        if self._decision_log.ends_at_grid(kv, usable, known):
            return Unstored(kv, usable, UnstoredReason.GRID, known)
        if known is None:
            return Unstored(kv, usable, UnstoredReason.UNKNOWN)
        return Unstored(
            kv, usable, UnstoredReason.GONE if known > kv else UnstoredReason.NEW, known
        )

    def pinned_for(self, used: ResumedFrom) -> float | None:
        if used.pinned_until is None or self._now is None:
            return None
        return max(0.0, used.pinned_until - self._now)

    def ago(self, at: float | None) -> float | None:
        return None if at is None or self._now is None else max(0.0, self._now - at)
