"""Why was this prompt not hit further? The cache's account of it, worked out when somebody asks.

Nothing is locked, no access is counted, and the tree stays as it is.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.cache.explain_messages import ExplainReq, ExplainReqOutput
from sglang_hybrid.cache.notes import Notes
from sglang_hybrid.core.admission import Prefill
from sglang_hybrid.core.history import Meeting
from sglang_hybrid.core.intent import Intent, intend
from sglang_hybrid.core.nodes import Kind
from sglang_hybrid.telemetry.account import (
    Account,
    Checkpoint,
    Gap,
    House,
    Reason,
    Request,
    Rest,
    Taker,
    Unstored,
)
from sglang_hybrid.telemetry.decisions import (
    FIRST_MARK,
    NAME_LENGTH,
    Decision,
    KvLost,
    Moment,
    NotTaken,
    StateLost,
    next_mark,
)
from sglang_hybrid.telemetry.recent import Seen, Used
from sglang_hybrid.telemetry.stats import Evicted, Missed
from sglang_hybrid.tenants import Tenant, tenant

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.radix_cache import HybridRadixCache

logger = logging.getLogger(__name__)

Events: TypeAlias = Sequence[tuple[int, list[Decision]]]
"""Decisions by position, as `Decisions.along` finds them."""

MOST_GAPS = 64
"""Positions that an account names, the deepest ones."""


class Explainer:
    """Gives accounts of prompts and of recent requests of one cache."""

    def __init__(self, cache: HybridRadixCache, notes: Notes) -> None:
        self._cache = cache
        self._notes = notes

    def handlers(self) -> list[tuple[type, Callable[[ExplainReq], ExplainReqOutput]]]:
        """What the scheduler's dispatcher must know."""
        return [(ExplainReq, self.answer)]

    def answer(self, asked: ExplainReq) -> ExplainReqOutput:
        """The account that is asked for, or one sentence that says why there is none."""
        try:
            return self._answer(asked)
        except Exception:  # whatever was asked, the scheduler goes on
            logger.exception("sglang_hybrid: no account could be given.")
            return ExplainReqOutput(error="the account failed; the server's log says why.")

    def _answer(self, asked: ExplainReq) -> ExplainReqOutput:
        if self._cache.disable:
            return ExplainReqOutput(error="the server runs without a prefix cache.")
        whose = tenant(asked.extra_key, asked.cache_salt)
        explanation = Explanation(self._cache, self._notes, whose)
        if asked.request_id is None:
            if not asked.input_ids:
                return ExplainReqOutput(error="the prompt has no tokens.")
            account = explanation.of_prompt(array("q", asked.input_ids))
        else:
            seen = self._notes.recent.get(whose, asked.request_id)
            if seen is None:
                return ExplainReqOutput(error=explanation.unknown(asked.request_id))
            account = explanation.of_request(asked.request_id, seen)
        return ExplainReqOutput(account=msgspec.to_builtins(account))


class Explanation:
    """What one tenant is told. Nothing in it depends on what other tenants sent, but that room was
    taken.
    """

    def __init__(self, cache: HybridRadixCache, notes: Notes, whose: Tenant) -> None:
        self._cache = cache
        self._notes = notes
        self._tenant = whose
        self._log = notes.decisions.of(whose)
        self._now = notes.recent.newest(whose)

    def of_prompt(self, prompt: array[int]) -> Account:
        """What a request with this prompt would find now."""
        usable = self._usable(len(prompt))
        path, kv = self._walk(prompt, usable)
        used = self._deepest(path)
        hit = self._hit(used, kv)
        mirrored = self._cache.mirrored
        meeting = self._cache.mirror.meet(prompt, self._tenant) if mirrored else None
        known = None if meeting is None else meeting.known_len
        events = list(self._log.along(prompt))
        gaps = self._gaps(events, hit, usable)
        if self._cache.is_mamba_enabled:
            ends = [depth for depth, _ in path if depth > hit] + [kv] * (kv > hit)
            for end in dict.fromkeys(ends):
                gaps.setdefault(end, self._nothing_noted(end, hit, branch=end == kv))
        return Account(
            prompt=len(prompt),
            usable=usable,
            kv=kv,
            hit=hit,
            checkpoint=self._checkpoint(used),
            deeper=_deepest_first(gaps),
            unstored=self._unstored(prompt, events, kv, known),
            leaves=self._would_leave(prompt, hit, kv, meeting),
            house=self._house(),
        )

    def of_request(self, request_id: str, seen: Seen) -> Account:
        """What this request found when it came, and what it left."""
        usable = self._usable(len(seen.tokens))
        hit = seen.report.hit_tokens
        everything = list(self._log.along(seen.tokens))
        before = [
            (at, kept)
            for at, events in everything
            if (kept := [event for event in events if event.order < seen.order])
        ]
        gaps: dict[int, Gap] = {}
        if seen.report.missed is not Missed.NO_SLOT:  # there a state was not missing
            gaps = self._gaps(before, hit, usable)
            if self._cache.is_mamba_enabled and seen.kv > hit:
                gaps.setdefault(seen.kv, self._nothing_noted(seen.kv, hit, branch=True))
        left = sorted(seen.report.checkpoints)
        taken = {position for position, _ in left}
        refused = {
            event.wish.position: self._gap(event.wish.position, hit, event)
            for _, events in everything
            for event in events
            if isinstance(event, NotTaken)
            and event.wish.position not in taken
            and event.order >= seen.order
            and event.wish.owner == request_id[:NAME_LENGTH]
        }
        path, kv = self._walk(seen.tokens, usable)
        return Account(
            prompt=len(seen.tokens),
            usable=usable,
            kv=seen.kv,
            hit=hit,
            checkpoint=self._checkpoint(seen.used),
            deeper=_deepest_first(gaps),
            unstored=self._unstored(seen.tokens, before, seen.kv, seen.known),
            leaves=[],
            house=self._house(),
            request=Request(
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
            if child is None or child.evicted:
                break
            same = child.key.match_at(key, depth, page_size=page)
            depth += same
            if same < len(child.key):
                break
            path.append((depth, child))
            node = child
        return path, depth

    def _deepest(self, path: Sequence[tuple[int, UnifiedTreeNode]]) -> Used | None:
        """The deepest state on a path."""
        if not self._cache.is_mamba_enabled:
            return None
        for depth, node in reversed(path):
            if node.component_data[ComponentType.MAMBA].value is not None:
                return self._notes.used(node, depth)
        return None

    def _hit(self, used: Used | None, kv: int) -> int:
        """Tokens that a hit on this state skips, or on so much KV where nothing else is needed."""
        if not self._cache.is_mamba_enabled:
            return kv
        return used.position if used else 0

    def _would_leave(
        self, prompt: array[int], hit: int, kv: int, meeting: Meeting | None
    ) -> list[tuple[int, str]]:
        """Where the prefill of this prompt would want to leave a state; whether there is room is
        not asked.
        """
        cache = self._cache
        if cache.planner is None:
            return []
        prefill = Prefill(
            len(prompt),
            hit,
            kv,
            known_branch=0 if meeting is None else meeting.branch,
            message_starts=cache.roles.message_starts(prompt),
            page_size=cache.page_size,
        )
        plan: Intent[None]
        plan, _ = intend(prefill, meeting, cache.options.hybrid_min_branch_tokens)
        return [(position, kind.value) for position, kind in sorted(plan.wanted.items())]

    # What was decided.

    def _gaps(self, events: Events, hit: int, usable: int) -> dict[int, Gap]:
        """The latest reason for each position behind the hit that something was decided about."""
        gaps: dict[int, Gap] = {}
        for position, there in events:
            for event in there:
                if hit < position <= usable and not isinstance(event, KvLost):
                    gaps[position] = self._gap(position, hit, event)
        return gaps

    def _gap(self, position: int, hit: int, event: Decision) -> Gap:
        when = self._ago(event.at)
        if isinstance(event, NotTaken):
            wish = event.wish
            contest = wish.contest if self._notes.one_tenant else None
            return Gap(
                position,
                position - hit,
                Reason(event.skip.value),
                wish.kind.value,
                when,
                request=wish.owner,
                policy=None if contest is None else self._cache.policy_name,
                score=None if contest is None else contest.new,
                against=None if contest is None else contest.cheapest,
            )
        assert isinstance(event, StateLost)
        taker = event.taker
        scores = self._notes.one_tenant
        contest = taker.contest if taker is not None and scores else None
        return Gap(
            position,
            position - hit,
            Reason.EVICTED,
            event.kind.value,
            when,
            policy=event.policy,
            short=None if event.short is None else event.short.value,
            score=event.score if scores else None,
            taker=None
            if taker is None
            else Taker(
                taker.position,
                taker.kind.value,
                taker.owner,
                None if contest is None else contest.new,
            ),
            hits=event.hits,
            unused=_between(event.last_used, event.at),
            with_kv=event.what is Evicted.LEAF,
        )

    def _nothing_noted(self, position: int, hit: int, *, branch: bool) -> Gap:
        """Why a position holds no state that no decision tells of."""
        cache = self._cache
        gain = position - hit
        kind = Kind.BRANCH.value if branch else None
        if cache.planner is None and position % self._grid():
            return Gap(position, gain, Reason.GRID, kind)
        if cache.judicious and gain < cache.options.hybrid_min_branch_tokens:
            return Gap(position, gain, Reason.MICRO_BRANCH, kind)
        forgotten = not cache.mirrored or self._log.full
        return Gap(position, gain, Reason.UNKNOWN if forgotten else Reason.NOT_WANTED, kind)

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
                next_mark(FIRST_MARK, tokens, 0, event.end) == event.end_mark
            )
            if (reached or (known or 0) > kv) and (lost is None or event.order > lost.order):
                lost = event
        if lost is not None:
            short = None if lost.short is None else lost.short.value
            when = self._ago(lost.at)
            return Unstored(kv, usable, Rest.EVICTED, known, when, short, lost.policy)
        if known is None:
            return Unstored(kv, usable, Rest.UNKNOWN)
        return Unstored(kv, usable, Rest.GONE if known > kv else Rest.NEW, known)

    # Words for the account.

    def _checkpoint(self, used: Used | None) -> Checkpoint | None:
        if used is None:
            return None
        return Checkpoint(
            used.position,
            None if used.kind is None else used.kind.value,
            self._ago(used.taken),
            self._ago(used.last_used),
            used.hits,
        )

    def _ago(self, at: Moment | None) -> float | None:
        return None if at is None or self._now is None else _between(at, self._now)

    def _grid(self) -> int:
        """Tokens between the states that SGLang tracks."""
        return int(self._cache.components[ComponentType.MAMBA].mamba_checkpoint_grid)

    def _house(self) -> House:
        cache = self._cache
        slots = None
        if cache.is_mamba_enabled:
            slots = int(cache.req_to_token_pool.mamba_allocator.size)
        return House(
            policy=cache.policy_name,
            admission=cache.options.hybrid_admission.value,
            states=cache.is_mamba_enabled,
            recorded=cache.mirrored,
            page_size=cache.page_size,
            min_branch_tokens=cache.options.hybrid_min_branch_tokens,
            grid=self._grid() if cache.is_mamba_enabled and cache.planner is None else None,
            state_slots=slots,
            kv_room=int(cache.token_to_kv_pool_allocator.size),
            full=self._log.full,
            emptied=self._ago(self._notes.decisions.emptied),
        )

    def unknown(self, request_id: str) -> str:
        """That no request of this tenant has this id, in one sentence."""
        recent = self._notes.recent
        return (
            f"no request {request_id!r} with this extra key, salt and adapter is among the last "
            f"{recent.of(self._tenant)} that came; at most {recent.requests} are kept, and fewer "
            "if their prompts are long."
        )


def _between(then: Moment, now: Moment) -> float:
    """Seconds."""
    return max(0.0, now[1] - then[1])


def _deepest_first(gaps: dict[int, Gap]) -> list[Gap]:
    return [gaps[position] for position in sorted(gaps, reverse=True)][:MOST_GAPS]
