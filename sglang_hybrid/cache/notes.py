"""What the cache notes so that it can say later why something was not hit.

Nobody reads it but `explain.py`, and no decision depends on it. A state that is evicted or not
taken costs a mark: its own edge's tokens, or those that the prefill computes, are hashed, once.
Without a mirror (`--hybrid-eviction lru`) only requests are noted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

from sglang_hybrid.core.admission import Skip
from sglang_hybrid.core.intent import Wish
from sglang_hybrid.core.nodes import Clock, Node
from sglang_hybrid.telemetry.decisions import (
    FIRST_MARK,
    NAME_LENGTH,
    Decisions,
    KvLost,
    Moment,
    NotTaken,
    StateLost,
    next_mark,
)
from sglang_hybrid.telemetry.recent import Recent, Seen, Used
from sglang_hybrid.telemetry.stats import Evicted, RequestReport
from sglang_hybrid.tenants import Tenant, tenant, tenant_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.radix_cache import HybridRadixCache


class Notes:
    """The decisions and the recent requests of one cache, apart for each tenant.

    one_tenant: no second one has come yet. Scores are compared with those of other tenants' states,
    so they are told only then.
    """

    def __init__(self, cache: HybridRadixCache) -> None:
        self.decisions = Decisions()
        self.recent = Recent()
        self._cache = cache
        self.one_tenant = True
        self._someone_came = False
        self._first: Tenant = None
        self._taker: Wish | None = None

    def now(self) -> Moment | None:
        """The cache's time; None where nothing counts it."""
        return moment(self._cache.mirror.clock) if self._cache.mirrored else None

    # What became of states and KV.

    @contextmanager
    def making_room_for(self, wish: Wish | None) -> Iterator[None]:
        """What is evicted meanwhile gives its slot to `wish`."""
        self._taker = wish and _short(wish)
        try:
            yield
        finally:
            self._taker = None

    def not_taken(self, req: Req, wish: Wish, skip: Skip) -> None:
        """The prefill of `req` wanted a state and did not get it."""
        if not self._cache.mirrored or wish.position <= 0:
            return
        mark = self._mark_in(req, wish.position)
        order, now = self.decisions.count, moment(self._cache.mirror.clock)
        decision = NotTaken(order, now, _short(wish), skip)
        self.decisions.add(tenant_of(req), wish.position, mark, decision)

    def state_lost(self, node: UnifiedTreeNode, what: Evicted) -> None:
        """The state of `node` is evicted; the node is still in the tree."""
        mirror = self._cache.mirror
        record = mirror.record(node)
        pool = mirror.asked
        score = None if pool is None or math.isinf(pool.last_score) else pool.last_score
        whose = _tenant_of_node(node)
        taker = self._taker
        lost = StateLost(
            self.decisions.count,
            moment(mirror.clock),
            record.kind,
            what,
            None if pool is None else pool.scarce,
            pool.policy.name if pool else self._cache.policy_name,
            score,
            taker if taker is not None and taker.tenant == whose else None,
            record.hits,
            record.taken,
            (record.last_used, record.stamp),
        )
        self.decisions.add(whose, record.depth, self.mark(record), lost)

    def kv_lost(self, node: UnifiedTreeNode) -> None:
        """The KV of the leaf `node` is evicted; the node is still in the tree."""
        mirror = self._cache.mirror
        record = mirror.record(node)
        start = record.depth - record.tokens
        end_mark = self.mark(record)
        assert record.parent is not None
        above = record.parent.mark
        if above is None:
            above = FIRST_MARK
        first = min(self._cache.page_size, record.tokens)
        pool = mirror.asked
        lost = KvLost(
            self.decisions.count,
            moment(mirror.clock),
            start,
            record.depth,
            end_mark,
            None if pool is None else pool.scarce,
            pool.policy.name if pool else self._cache.policy_name,
            (record.last_used, record.stamp),
        )
        mark = next_mark(above, node.key.token_ids, 0, first)
        self.decisions.add(_tenant_of_node(node), start + first, mark, lost)

    def emptied(self) -> None:
        """The cache was flushed."""
        if len(self.recent):  # not the first time, when the cache is built
            self.decisions.clear(self.now())

    # What requests found.

    def met(self, req: Req, report: RequestReport, kv: int, node: UnifiedTreeNode) -> None:
        """`req` was looked up, again perhaps, and would resume from `node`, whose use by it is not
        counted yet.
        """
        if req.rid.startswith(HEALTH_CHECK_RID_PREFIX):
            return
        whose = tenant_of(req)
        if not self._someone_came:
            self._someone_came, self._first = True, whose
        self.one_tenant = self.one_tenant and whose == self._first
        known = self.recent.get(whose, req.rid)
        used = self.used(node, report.hit_tokens)
        if known is not None and known.used is not None and used is not None:
            same = known.used.position == used.position
            used = known.used if same else used  # its own use is counted by now
        seen = Seen(
            req.origin_input_ids,
            whose,
            report,
            kv,
            used,
            self.decisions.count,
            self.now(),
            None if known is None else known.known,
        )
        self.recent.put(whose, req.rid, seen)

    def knew(self, req: Req, known_len: int) -> None:
        """So much of the prompt of `req` was sent before by its tenant."""
        seen = self.recent.get(tenant_of(req), req.rid)
        if seen is not None:
            seen.known = known_len

    def used(self, node: UnifiedTreeNode, position: int) -> Used | None:
        """The checkpoint of `node`, at `position`; None for the root and where there are none."""
        if position == 0 or not self._cache.is_mamba_enabled:
            return None
        if not self._cache.mirrored:
            return Used(position)
        record = self._cache.mirror.record(node)
        last_used = (record.last_used, record.stamp)
        return Used(position, record.kind, record.hits, record.taken, last_used)

    # Marks.

    def mark(self, record: Node) -> int:
        """The mark of a node's end. Marks stay on the records: each token is hashed once."""
        way: list[Node] = []
        at = record
        while at.mark is None and at.parent is not None:
            way.append(at)
            at = at.parent
        mark = FIRST_MARK if at.mark is None else at.mark
        for node in reversed(way):
            key = node.owner.key
            mark = node.mark = next_mark(mark, key.token_ids, 0, len(key))
        return mark

    def _mark_in(self, req: Req, position: int) -> int:
        """The mark of a position in what `req` prefills, from the node that it goes on from."""
        start, mark = 0, FIRST_MARK
        if req.last_node is not None:
            record = self._cache.mirror.record(self._cache.tree_core.node_by_id(req.last_node))
            if 0 < record.depth <= position:
                start, mark = record.depth, self.mark(record)
        return next_mark(mark, req.full_untruncated_fill_ids, start, position)


def moment(clock: Clock) -> Moment:
    return clock.tick, clock.stamp


def _tenant_of_node(node: UnifiedTreeNode) -> Tenant:
    return tenant(node.key.extra_key, node.key.cache_salt)


def _short(wish: Wish) -> Wish:
    return replace(wish, owner=wish.owner[:NAME_LENGTH])
