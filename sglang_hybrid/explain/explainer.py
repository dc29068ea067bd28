"""Why was this prompt not hit further? The answer is computed when somebody asks.

Nothing is locked, no access is counted, and the tree stays as it is.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.core.admission import Prefill
from sglang_hybrid.core.checkpoint_plan import CheckpointPlan, plan_checkpoints
from sglang_hybrid.core.history import HistoryMatch
from sglang_hybrid.core.nodes import Kind
from sglang_hybrid.explain.cache_view import ExplainedCache
from sglang_hybrid.explain.decision_log import DecisionLog
from sglang_hybrid.explain.decisions import (
    EMPTY_PREFIX_HASH,
    NAME_LENGTH,
    Decision,
    KvLost,
    Moment,
    NotTaken,
    StateLost,
    extend_prefix_hash,
)
from sglang_hybrid.explain.messages import ExplainReq, ExplainReqOutput, ResidencyReq
from sglang_hybrid.explain.miss_report import (
    BelowDevice,
    CacheSnapshot,
    ExplainedRequest,
    MissedCheckpoint,
    MissReport,
    Reason,
    ResumedCheckpoint,
    SlotRecipient,
    Unstored,
    UnstoredReason,
)
from sglang_hybrid.explain.recent import RecentRequest, ResumedFrom
from sglang_hybrid.explain.residency import Residency
from sglang_hybrid.telemetry.stats import Evicted, Missed
from sglang_hybrid.tenants import Tenant, tenant

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

logger = logging.getLogger(__name__)

Events: TypeAlias = Sequence[tuple[int, list[Decision]]]
"""Decisions by position, as `Decisions.along` finds them."""

MOST_MISSED = 64
"""Positions that a report names, the deepest ones."""


class Explainer:
    """Gives accounts of prompts and of recent requests of one cache."""

    def __init__(self, cache: ExplainedCache, decision_log: DecisionLog) -> None:
        self._cache = cache
        self._decision_log = decision_log

    def handlers(self) -> list[tuple[type, Callable[[Any], Any]]]:
        """What the scheduler's dispatcher must know."""
        return [(ExplainReq, self.answer), (ResidencyReq, Residency(self._cache).answer)]

    def answer(self, asked: ExplainReq) -> ExplainReqOutput:
        """The report that is asked for, or one sentence that says why there is none."""
        try:
            return self._answer(asked)
        except Exception:  # whatever was asked, the scheduler goes on
            logger.exception("sglang_hybrid: a miss could not be explained.")
            return ExplainReqOutput(error="the explanation failed; the server's log says why.")

    def _answer(self, asked: ExplainReq) -> ExplainReqOutput:
        if self._cache.disable:
            return ExplainReqOutput(error="the server runs without a prefix cache.")
        whose = tenant(asked.extra_key, asked.cache_salt)
        explanation = Explanation(self._cache, self._decision_log, whose)
        if asked.request_id is None:
            if not asked.input_ids:
                return ExplainReqOutput(error="the prompt has no tokens.")
            report = explanation.of_prompt(array("q", asked.input_ids))
        else:
            seen = self._decision_log.recent.get(whose, asked.request_id)
            if seen is None:
                return ExplainReqOutput(error=explanation.unknown(asked.request_id))
            report = explanation.of_request(asked.request_id, seen)
        return ExplainReqOutput(report=msgspec.to_builtins(report))


class Explanation:
    """What one tenant is told. Nothing in it depends on what other tenants sent, but that room was
    taken.
    """

    def __init__(self, cache: ExplainedCache, decision_log: DecisionLog, whose: Tenant) -> None:
        self._cache = cache
        self._decision_log = decision_log
        self._tenant = whose
        self._log = decision_log.decisions.of(whose)
        self._now = decision_log.recent.newest(whose)

    def of_prompt(self, prompt: array[int]) -> MissReport:
        """What a request with this prompt would find now."""
        usable = self._usable(len(prompt))
        path, kv = self._walk(prompt, usable)
        below, used = self._below(path, len(prompt)), self._deepest(path)
        if below is not None:  # what is loaded, or what is faster to compute from
            used = self._deepest([step for step in path if step[0] <= below.resumes_at])
        hit = self._hit(used, kv)
        if below is not None and not self._cache.is_mamba_enabled:
            hit = below.resumes_at
        records = self._cache.shadow_tree
        history_match = None if records is None else records.match_history(prompt, self._tenant)
        known = None if history_match is None else history_match.known_len
        events = list(self._log.along(prompt))
        missed = self._missed_checkpoints(events, hit, usable)
        if self._cache.is_mamba_enabled:
            ends = [depth for depth, _ in path if depth > hit] + [kv] * (kv > hit)
            for end in dict.fromkeys(ends):
                missed.setdefault(end, self._nothing_noted(end, hit, branch=end == kv))
        return MissReport(
            prompt=len(prompt),
            usable=usable,
            kv=kv,
            hit=hit,
            checkpoint=self._checkpoint(used),
            deeper=_deepest_first(missed),
            unstored=self._unstored(prompt, events, kv, known),
            leaves=self._would_leave(prompt, hit, kv, history_match),
            cache=self._snapshot(),
            below=below,
        )

    def of_request(self, request_id: str, seen: RecentRequest) -> MissReport:
        """What this request found when it came, and what it left."""
        usable = self._usable(len(seen.tokens))
        hit = seen.report.hit_tokens
        everything = list(self._log.along(seen.tokens))
        before = [
            (at, kept)
            for at, events in everything
            if (kept := [event for event in events if event.order < seen.order])
        ]
        missed: dict[int, MissedCheckpoint] = {}
        if seen.report.missed is not Missed.NO_SLOT:  # there a state was not missing
            missed = self._missed_checkpoints(before, hit, usable)
            if self._cache.is_mamba_enabled and seen.kv > hit:
                missed.setdefault(seen.kv, self._nothing_noted(seen.kv, hit, branch=True))
        left = sorted(seen.report.checkpoints)
        taken = {position for position, _ in left}
        refused = {
            event.request.position: self._missed_checkpoint(event.request.position, hit, event)
            for _, events in everything
            for event in events
            if isinstance(event, NotTaken)
            and event.request.position not in taken
            and event.order >= seen.order
            and event.request.request_id == request_id[:NAME_LENGTH]
        }
        path, kv = self._walk(seen.tokens, usable)
        return MissReport(
            prompt=len(seen.tokens),
            usable=usable,
            kv=seen.kv,
            hit=hit,
            checkpoint=self._checkpoint(seen.used),
            deeper=_deepest_first(missed),
            unstored=self._unstored(seen.tokens, before, seen.kv, seen.known),
            leaves=[],
            cache=self._snapshot(),
            request=ExplainedRequest(
                request_id,
                self._ago(seen.at),
                seen.report.missed.value,
                seen.report.started,
                [(position, kind.value) for position, kind in left],
                _deepest_first(refused),
                self._hit(self._deepest(path), kv),
            ),
        )

    # The tree as it is.

    def _usable(self, length: int) -> int:
        """Tokens of a prompt that can be hit."""
        page = int(self._cache.page_size)
        return max(0, length - 1) // page * page

    def _walk(
        self, prompt: array[int], usable: int
    ) -> tuple[list[tuple[int, UnifiedTreeNode]], int]:
        """Nodes that the prompt covers to their end, with their depths, and how far KV is stored,
        part of an edge included. As SGLang's own walk (unified_tree_core.py:906-955), which cuts
        that edge.
        """
        tree, page = self._cache.tree_core, self._cache.page_size
        extra_key, cache_salt = self._tenant or (None, None)
        key = RadixKey(
            prompt, extra_key, is_bigram=tree.is_eagle, limit=usable, cache_salt=cache_salt
        )
        node, depth = tree.root_node, 0
        path: list[tuple[int, UnifiedTreeNode]] = []
        while depth + page <= len(key):
            child = node.children.get(key.child_key_at(depth, page))
            if child is None or (child.evicted and not child.backuped):
                break
            same = child.key.match_at(key, depth, page_size=page)
            depth += same
            if same < len(child.key):
                break
            path.append((depth, child))
            node = child
        return path, depth

    def _deepest(self, path: Sequence[tuple[int, UnifiedTreeNode]]) -> ResumedFrom | None:
        """The deepest state on a path."""
        if not self._cache.is_mamba_enabled:
            return None
        for depth, node in reversed(path):
            state = node.component_data[ComponentType.MAMBA]
            if state.value is not None or state.host_value is not None:
                return self._decision_log.used(node, depth)
        return None

    def _below(
        self, path: Sequence[tuple[int, UnifiedTreeNode]], prompt_len: int
    ) -> BelowDevice | None:
        """The deepest point on a path that a request can resume from, if it must load for that."""
        ways = self._cache.ways
        if ways is None or not path:
            return None
        chosen, deepest, resident = ways.of_node(path[-1][1], prompt_len)
        if not any(deepest.load_bytes) or deepest.state_tier is None:
            return None
        host = sum(len(n.key) for depth, n in path if n.evicted and depth <= deepest.depth)
        return BelowDevice(
            deepest.depth,
            deepest.state_tier.name.lower(),
            host,
            deepest.load_seconds,
            resident.compute_seconds - deepest.compute_seconds,
            chosen.depth,
        )

    def _hit(self, used: ResumedFrom | None, kv: int) -> int:
        """Tokens that a hit on this state skips, or on so much KV where nothing else is needed."""
        if not self._cache.is_mamba_enabled:
            return kv
        return used.position if used else 0

    def _would_leave(
        self, prompt: array[int], hit: int, kv: int, history_match: HistoryMatch | None
    ) -> list[tuple[int, str]]:
        """Where the prefill of this prompt would want to leave a state; whether there is room is
        not asked.
        """
        cache = self._cache
        if not cache.plans_checkpoints:
            return []
        prefill = Prefill(
            len(prompt),
            hit,
            kv,
            known_branch=0 if history_match is None else history_match.branch,
            message_starts=cache.message_boundaries.message_starts(prompt),
            page_size=cache.page_size,
        )
        plan: CheckpointPlan[None]
        plan, _ = plan_checkpoints(prefill, history_match, cache.options.hybrid_min_branch_tokens)
        return [(position, kind.value) for position, kind in sorted(plan.wanted.items())]

    # What was decided.

    def _missed_checkpoints(
        self, events: Events, hit: int, usable: int
    ) -> dict[int, MissedCheckpoint]:
        """The latest reason for each position behind the hit that something was decided about."""
        missed: dict[int, MissedCheckpoint] = {}
        for position, there in events:
            for event in there:
                if hit < position <= usable and not isinstance(event, KvLost):
                    missed[position] = self._missed_checkpoint(position, hit, event)
        return missed

    def _missed_checkpoint(self, position: int, hit: int, event: Decision) -> MissedCheckpoint:
        when = self._ago(event.at)
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
            unused=_between(event.last_used, event.at),
            return_expected=event.return_expected,
            with_kv=event.what is Evicted.LEAF,
            pinned=event.pinned,
        )

    def _nothing_noted(self, position: int, hit: int, *, branch: bool) -> MissedCheckpoint:
        """Why a position holds no state that no decision tells of."""
        cache = self._cache
        gain = position - hit
        kind = Kind.BRANCH.value if branch else None
        if not cache.plans_checkpoints and position % self._grid():
            return MissedCheckpoint(position, gain, Reason.GRID, kind)
        if cache.options.judicious and gain < cache.options.hybrid_min_branch_tokens:
            return MissedCheckpoint(position, gain, Reason.MICRO_BRANCH, kind)
        forgotten = cache.shadow_tree is None or self._log.full
        return MissedCheckpoint(
            position, gain, Reason.UNKNOWN if forgotten else Reason.NOT_WANTED, kind
        )

    def _unstored(
        self, tokens: array[int], events: Events, kv: int, known: int | None
    ) -> Unstored | None:
        """What lies behind the stored KV. An evicted edge tells of it if the prompt goes on along
        that edge: to its end, or as far as the history knows the prompt.
        """
        usable = self._usable(len(tokens))
        if kv >= usable:
            return None
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
            when = self._ago(lost.at)
            return Unstored(kv, usable, UnstoredReason.EVICTED, known, when, short, lost.policy)
        if known is None:
            return Unstored(kv, usable, UnstoredReason.UNKNOWN)
        return Unstored(
            kv, usable, UnstoredReason.GONE if known > kv else UnstoredReason.NEW, known
        )

    # Parts of the report.

    def _checkpoint(self, used: ResumedFrom | None) -> ResumedCheckpoint | None:
        if used is None:
            return None
        return ResumedCheckpoint(
            used.position,
            None if used.kind is None else used.kind.value,
            self._ago(used.taken),
            self._ago(used.last_used),
            used.hits,
            used.return_expected,
            self._pinned_for(used),
        )

    def _pinned_for(self, used: ResumedFrom) -> float | None:
        if used.pinned_until is None or self._now is None:
            return None
        return max(0.0, used.pinned_until - self._now[1])

    def _ago(self, at: Moment | None) -> float | None:
        return None if at is None or self._now is None else _between(at, self._now)

    def _grid(self) -> int:
        """Tokens between the states that SGLang tracks."""
        return int(self._cache.components[ComponentType.MAMBA].mamba_checkpoint_grid)

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
            grid=self._grid() if cache.is_mamba_enabled and not cache.plans_checkpoints else None,
            state_slots=slots,
            kv_room=kv_room,
            shared_bytes=shared,
            full=self._log.full,
            emptied=self._ago(self._decision_log.decisions.emptied),
        )

    def unknown(self, request_id: str) -> str:
        """That no request of this tenant has this id, in one sentence."""
        recent = self._decision_log.recent
        return (
            f"no request {request_id!r} with this extra key, salt and adapter is among the last "
            f"{recent.of(self._tenant)} that came; at most {recent.requests} are kept, and fewer "
            "if their prompts are long."
        )


def _between(then: Moment, now: Moment) -> float:
    """Seconds."""
    return max(0.0, now[1] - then[1])


def _deepest_first(missed: dict[int, MissedCheckpoint]) -> list[MissedCheckpoint]:
    return [missed[position] for position in sorted(missed, reverse=True)][:MOST_MISSED]
