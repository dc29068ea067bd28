"""Look-ups of requests, and their reports; an access is counted here only."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.mem_cache.base_prefix_cache import MatchResult

from sglang_hybrid.serving.per_request import PerRequest
from sglang_hybrid.serving.requests.cache_fields import fields_of
from sglang_hybrid.serving.telemetry.stats import CacheStats, Missed, RequestReport
from sglang_hybrid.serving.tenants import tenant_of
from sglang_hybrid.storage.codecs.in_use import keeps_exact

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    from sglang_hybrid.cache.radix_cache import HybridRadixCache
    from sglang_hybrid.cache.records.shadow_tree import ShadowTree
    from sglang_hybrid.cache.tiers.request_loads import WayChooser
    from sglang_hybrid.core.costs.cost import CostModel
    from sglang_hybrid.core.records.nodes import Kind
    from sglang_hybrid.explain.decision_log import DecisionLog
    from sglang_hybrid.serving.telemetry.tiers import TierStats


class NoSlotForHit(MatchResult):
    """A miss: a state was found, but there was no slot to copy it into."""

    __slots__ = ()


class LookUps:
    """The look-ups of one cache's requests.

    SGLang matches a waiting request many times, to rank it and to try to admit it. The first time
    counts as its access; the last one before its prefill is what it is reported to have found. With
    states, only an attempt to admit counts, which asks for a copy of the state (`cow_mamba`).
    """

    def __init__(
        self,
        cache: HybridRadixCache,
        cost: CostModel,
        stats: CacheStats,
        shadow_tree: ShadowTree | None,
        decision_log: DecisionLog,
        tier_stats: TierStats,
    ) -> None:
        self._cache = cache
        self._tier_stats = tier_stats
        self._cost = cost
        self._stats = stats
        self._shadow_tree = shadow_tree
        self._decision_log = decision_log
        self._reports: PerRequest[RequestReport] = PerRequest()
        self._lens: PerRequest[tuple[int, int]] = PerRequest()  # of KV, of hit

    @property
    def _ways(self) -> WayChooser | None:
        return self._cache.ways

    def __contains__(self, req: Req) -> bool:
        """True if a look-up of `req` was counted."""
        return req in self._reports

    def report(self, req: Req) -> RequestReport | None:
        """The report of `req` by now."""
        return self._reports.get(req)

    def hit_tokens(self, req: Req) -> int:
        """Prompt tokens of `req` whose prefill was skipped."""
        report = self._reports.get(req)
        return 0 if report is None else report.hit_tokens

    def kv_len(self, req: Req) -> int:
        """Prompt tokens of `req` whose KV is stored, whether or not a state is."""
        lens = self._lens.get(req)
        return int(req.prefix_len) if lens is None else lens[0]

    def hit_len(self, req: Req) -> int:
        """The start of the prefill of `req`, if what it is to load can be loaded."""
        lens = self._lens.get(req)
        return int(req.prefix_len) if lens is None else lens[1]

    def on_lookup(self, params: MatchPrefixParams, result: MatchResult) -> None:
        """SGLang matched a prompt. A health probe is no traffic: it is not counted, noted or
        recorded and leaves nothing in the tree.
        """
        req = params.req
        if req is None or self._cache.disable:
            return
        if self._cache.is_mamba_enabled and not params.cow_mamba:
            return
        if req.rid.startswith(HEALTH_CHECK_RID_PREFIX):
            req.skip_radix_cache_insert = True
            return
        self._lens[req] = result.full_kv_hit_length, self._depth(result)
        known = self._reports.get(req)
        if known is not None and known.started:
            return
        node = self._cache.tree_core.node_by_id(result.best_match_node)
        report = self._reports[req] = self._report_of(req, params.key, result)
        if known is None and self._shadow_tree is not None:
            self._shadow_tree.on_arrival(self._cache.step_clock.arrival(req))
        usable, kv = self._usable(params.key), result.full_kv_hit_length
        again = known is not None
        self._decision_log.on_lookup(req, report, usable, kv, node, again=again)
        if known is None and self._shadow_tree is not None:
            self._shadow_tree.on_hit(node)
        if report.composed == 0:  # it will not enter the tree, which is where others are reported
            _send(req, report)

    def on_session_turn(self, params: MatchPrefixParams, result: MatchResult) -> None:
        """A streaming session goes on with its own KV and state, outside of the tree: its turn is
        counted and reported now, once. It is exact if the tree's part of the session is, behind
        which all else was computed.
        """
        req = params.req
        if req is None or req in self._reports:
            return
        slot = self._cache.session.borrowed_slot(req)
        lock = None if slot is None else slot.lock
        report = self._reports[req] = RequestReport(
            len(req.origin_input_ids),
            int(result.device_prefix_len),
            0,
            Missed.NOTHING,
            has_states=self._cache.is_mamba_enabled,
            exact=None if lock is None or keeps_exact() else self._is_exact(lock.node),
        )
        report.started = True
        self._count(report)
        _send(req, report)

    def on_full_hit(self, req: Req) -> None:
        """Called when `req` is about to join a batch that needs no forward."""
        report = self._reports.get(req)
        if report is not None:
            report.full_hit = True

    def _report_of(self, req: Req, key: Any, result: MatchResult) -> RequestReport:
        hit = self._depth(result)
        kv_only = max(0, result.full_kv_hit_length - hit) if self._cache.is_mamba_enabled else 0
        ways = self._ways
        found = None if ways is None else ways.last_lookup(req)
        if isinstance(result, NoSlotForHit):
            missed = Missed.NO_SLOT
            found = found and replace(found, device_tokens=0, host_tokens=0, state=None)
        elif found is not None and found.stored_tokens > hit:
            failed = ways is not None and ways.has_failed(req)
            missed = Missed.NOT_LOADED if failed else Missed.COMPUTED
        elif kv_only:
            missed = Missed.NO_STATE
        else:
            missed = Missed.NOTHING if hit >= self._usable(key) else Missed.NOT_STORED
        return RequestReport(
            len(req.origin_input_ids),
            hit,
            kv_only,
            missed,
            declared=fields_of(req).hints.positions,
            has_states=self._cache.is_mamba_enabled,
            found=found,
            composed=self._composed(req),
            not_composed=self._not_composed(req),
        )

    def _usable(self, key: Any) -> int:
        """Tokens of a look-up's key that can be hit."""
        return len(key) - len(key) % int(self._cache.page_size)

    def _composed(self, req: Req) -> int | None:
        """Tokens of segments that were put together for it; None if it has none."""
        asked = fields_of(req).imported
        if asked is None or not asked.segments:
            return None
        return 0 if req.skip_radix_cache_insert else asked.length

    def _not_composed(self, req: Req) -> Mapping[str, Any]:
        """The reasons why segments were not composed, for the HTTP server of their client."""
        known = self._cache.composition(req)
        if known is None:
            return {}
        told = {"missing_segments": known.missing, "composes_nothing": known.why_never}
        return {name: value for name, value in told.items() if value}

    def _depth(self, result: MatchResult) -> int:
        """Tokens down to the node that is resumed from. SGLang's `host_hit_length` leaves out what
        the device has and the host has not.
        """
        if self._shadow_tree is None or not result.host_hit_length:
            return int(result.device_prefix_len + result.host_hit_length)
        node = self._cache.tree_core.node_by_id(result.best_match_node)
        depth: int = self._shadow_tree.record(node).depth
        return depth

    def on_history_match(self, req: Req, known_len: int | None) -> None:
        """The first `known_len` tokens of the prompt of `req`, for which no checkpoint is planned,
        were sent before; None if that is not remembered.
        """
        report = self._reports.get(req)
        if report is None or report.started or report.missed is not Missed.NOT_STORED:
            return
        usable = len(req.origin_input_ids) - 1
        usable -= usable % self._cache.page_size
        log, hit = self._decision_log, report.hit_tokens
        if log.ends_at_grid(hit, usable, known_len) and not log.has_lost_kv(req, hit):
            report.missed = Missed.GRID

    def on_start(self, req: Req) -> None:
        """A part of a request's prefill has run: count what it found, once. `on_publish` reports
        it. It is not exact any more if it was retracted and resumes from what is not.
        """
        report = self._reports.get(req)
        if report is None:
            return
        if report.exact is not False and not keeps_exact() and req.last_node is not None:
            report.exact = self._is_exact(req.last_node)
        if report.started:
            return
        report.started = True
        self._explain_miss(req, report)
        self._count(report)
        if report.found is not None:
            self._tier_stats.hit_tokens["device"] += report.found.device_tokens
            self._tier_stats.hit_tokens["host"] += report.found.host_tokens

    def _is_exact(self, node_id: int) -> bool:
        core = self._cache.tree_core
        return bool(core.is_exact(core.node_by_id(node_id)))

    def _count(self, report: RequestReport) -> None:
        flops = self._cost.flops(report.hit_tokens)
        seconds = self._cache.speeds.speeds.compute(flops)
        self._stats.on_prefill(report, flops, seconds)

    def _explain_miss(self, req: Req, report: RequestReport) -> None:
        """Say where a text that changes with each request is the reason."""
        if report.missed not in (Missed.NOT_STORED, Missed.NO_STATE, Missed.GRID):
            return
        start = max(self.kv_len(req), self._decision_log.known_len(req))
        report.changing_text = self._decision_log.changing_text(
            req.origin_input_ids, tenant_of(req), start, report.hit_tokens
        )
        if report.changing_text is not None:
            report.missed = Missed.CHANGING_TEXT

    def on_publish(
        self, req: Req, checkpoints: Sequence[tuple[int, Kind]], pinned: Sequence[int]
    ) -> None:
        """`req` left states at these positions, of these kinds, in the tree, and what it declared
        at the positions `pinned` is pinned now.
        """
        report = self._reports.get(req)
        if report is None:
            return
        report.checkpoints += checkpoints
        if pinned:
            report.pinned = list(pinned)
        _send(req, report)


def _send(req: Req, report: RequestReport) -> None:
    """Put `report` into the response of `req`."""
    req.customized_info = {**(req.customized_info or {}), "hybrid_cache": [report.as_dict()]}
