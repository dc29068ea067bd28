"""Records of the cache's decisions, so that it can say later why something was not hit.

Only `explanation.py` and its parts read it, and no decision depends on it. A state that is evicted
or not taken costs a prefix hash: the tokens of its own edge, or those that the prefill computes,
are hashed once. Without a shadow tree (`--hybrid-eviction sglang-lru`) only requests are recorded.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang_hybrid.core.checkpoints.admission import Skip
from sglang_hybrid.core.checkpoints.checkpoint_plan import CheckpointRequest
from sglang_hybrid.core.records.latest import Latest
from sglang_hybrid.core.records.nodes import Node
from sglang_hybrid.core.victims.pool import Scarce
from sglang_hybrid.explain.decisions import (
    EMPTY_PREFIX_HASH,
    NAME_LENGTH,
    Decisions,
    KvLost,
    NotTaken,
    StateLost,
    extend_prefix_hash,
)
from sglang_hybrid.explain.recent import (
    BYTES,
    REQUESTS,
    RecentRequest,
    RecentRequests,
    ResumedFrom,
)
from sglang_hybrid.serving.requests.cache_fields import fields_of
from sglang_hybrid.serving.requests.ids import shown_id
from sglang_hybrid.serving.telemetry.stats import ChangingText, Evicted, RequestReport
from sglang_hybrid.serving.tenants import Tenant, tenant, tenant_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.radix_cache import HybridRadixCache
    from sglang_hybrid.cache.records.shadow_tree import ShadowTree


class DecisionLog:
    """The decisions and the recent requests of one cache, apart for each tenant.

    one_tenant: no second tenant has come yet. Scores are compared with those of other tenants'
    states, so they are told only while this is true.
    """

    def __init__(self, cache: HybridRadixCache) -> None:
        self.decisions = Decisions()
        self.recent: RecentRequests = Latest(BYTES, REQUESTS)
        self._cache = cache
        self.one_tenant = True
        self._someone_came = False
        self._first: Tenant = None
        self._recipient: CheckpointRequest | None = None
        self._hashed: tuple[object, int, int] = None, 0, EMPTY_PREFIX_HASH  # tokens, end, hash

    def now(self) -> float | None:
        """Seconds of the cache's clock; None where nothing counts them."""
        shadow_tree = self._cache.shadow_tree
        return None if shadow_tree is None else shadow_tree.clock.stamp

    # Decisions about states and KV

    @contextmanager
    def making_room_for(self, request: CheckpointRequest | None) -> Iterator[None]:
        """Evictions within this context give their slot to the state that `request` asks for."""
        self._recipient = request and _short(request)
        try:
            yield
        finally:
            self._recipient = None

    def on_skip(self, req: Req, request: CheckpointRequest, skip: Skip) -> None:
        """The prefill of `req` wanted a state and did not get it."""
        shadow_tree = self._cache.shadow_tree
        if shadow_tree is None or request.position <= 0:
            return
        prefix_hash = self._prefix_hash_in(shadow_tree, req, request.position)
        order, now = self.decisions.count, shadow_tree.clock.stamp
        decision = NotTaken(order, now, _short(request), skip)
        self.decisions.add(tenant_of(req), request.position, prefix_hash, decision)

    def on_state_eviction(self, node: UnifiedTreeNode, what: Evicted) -> None:
        """The state of `node` is evicted; the node is still in the tree."""
        shadow_tree = self._records()
        record = shadow_tree.record(node)
        pool = shadow_tree.victim_pool
        score = None if pool is None or math.isinf(pool.last_score) else pool.last_score
        whose = _tenant_of_node(node)
        recipient = self._recipient
        lost = StateLost(
            *self._eviction(shadow_tree),
            record.kind,
            what,
            score,
            recipient if recipient is not None and recipient.tenant == whose else None,
            record.hits,
            record.stamp,
            _return_expected(record),
            record.pin is not None,
        )
        self.decisions.add(whose, record.depth, self.prefix_hash(record), lost)

    def on_kv_eviction(self, node: UnifiedTreeNode) -> None:
        """The KV of the leaf `node` is evicted; the node is still in the tree."""
        shadow_tree = self._records()
        record = shadow_tree.record(node)
        assert record.parent is not None
        first = min(self._cache.page_size, record.tokens)
        above = self.prefix_hash(record.parent)
        prefix_hash = extend_prefix_hash(above, node.key.token_ids, 0, first)
        position = record.depth - record.tokens + first
        eviction = self._eviction(shadow_tree)
        lost = KvLost(*eviction, record.depth, self.prefix_hash(record))
        self.decisions.add(_tenant_of_node(node), position, prefix_hash, lost)

    def _eviction(self, records: ShadowTree) -> tuple[int, float, Scarce | None, str]:
        """Order, time, short pool and policy of an eviction that happens now."""
        pool = records.victim_pool
        policy = pool.policy.name if pool else self._cache.policy_name
        short = None if pool is None else pool.scarce
        return self.decisions.count, records.clock.stamp, short, policy

    def on_flush(self) -> None:
        """The cache was flushed."""
        if len(self.recent):  # not the first time, when the cache is built
            self.decisions.clear(self.now())

    # Look-ups of requests

    def on_lookup(
        self,
        req: Req,
        report: RequestReport,
        usable: int,
        kv: int,
        node: UnifiedTreeNode,
        *,
        again: bool,
    ) -> None:
        """A look-up of `req` ended at `node`, from which `req` would resume. The node's counts do
        not contain this use yet. usable: tokens of the prompt that `req` may hit. kv: those whose
        KV is stored. again: `req` was looked up before; what is known by its id is otherwise of an
        earlier request.
        """
        whose = tenant_of(req)
        if not self._someone_came:
            self._someone_came, self._first = True, whose
        self.one_tenant = self.one_tenant and whose == self._first
        name = shown_id(req.rid)
        known = self.recent.get(whose, name) if again else None
        used = self.checkpoint_of(node, report.hit_tokens)
        if known is not None and known.used is not None and used is not None:
            same = known.used.position == used.position
            used = known.used if same else used  # its own use is counted by now
        tokens = req.origin_input_ids
        seen = RecentRequest(
            tokens if req.session is None else tokens[:],  # the next turn is appended in place
            report,
            usable,
            kv,
            used,
            self.decisions.count,
            self.now(),
            None if known is None else known.known,
            fields_of(req).route,
        )
        self.recent.put(whose, name, seen, seen.size(name))

    def on_history_match(self, req: Req, known_len: int) -> None:
        """The first `known_len` tokens of the prompt of `req` were sent before by its tenant."""
        seen = self.recent.get(tenant_of(req), shown_id(req.rid))
        if seen is not None:
            seen.known = known_len

    def known_len(self, req: Req) -> int:
        """Tokens of the prompt of `req` that its tenant sent before, as far as that is known."""
        seen = self.recent.get(tenant_of(req), shown_id(req.rid))
        return 0 if seen is None else seen.known or 0

    def ends_at_grid(self, kv: int, usable: int, known: int | None) -> bool:
        """True if a prompt's KV ends after `kv` of `usable` tokens because SGLang tracks the states
        and keeps KV up to the last one only, if no eviction is the reason. known: tokens that were
        sent before; where that is not remembered, the last state on the grid ends it.
        """
        cache = self._cache
        if cache.plans_checkpoints or not cache.is_mamba_enabled:
            return False
        if known is None:
            return kv > 0 and usable - kv < grid(cache)
        return known > kv

    def has_lost_kv(self, req: Req, kv: int) -> bool:
        """True if an eviction of KV behind the first `kv` tokens of a prompt is remembered."""
        lost = self.decisions.of(tenant_of(req)).along(req.origin_input_ids)
        return any(
            isinstance(event, KvLost) and event.end > kv for _, there in lost for event in there
        )

    def changing_text(
        self, prompt: array[int], whose: Tenant, start: int, hit: int
    ) -> ChangingText | None:
        """The short text because of which a prompt of this tenant was not hit behind `hit`, though
        most of what follows was sent before; None if that has another reason. start: tokens of the
        prompt that were sent before as they are. Prompts whose prefill has not begun left nothing
        that it could have hit.
        """
        from sglang_hybrid.explain.changing_text import find_changing_text

        earlier = (seen.tokens for seen in self.recent.newest(whose) if seen.report.started)
        missed = len(prompt) - 1 - hit
        found = find_changing_text(prompt, start, missed, earlier)
        if found is None:
            return None
        starts = self._cache.message_boundaries.message_starts(prompt[: found.position + 1])
        return replace(found, message=len(starts))

    def checkpoint_of(self, node: UnifiedTreeNode, position: int) -> ResumedFrom | None:
        """The checkpoint of `node`, at `position`; None for the root and where there are none."""
        if position == 0 or not self._cache.is_mamba_enabled:
            return None
        if self._cache.shadow_tree is None:
            return ResumedFrom(position)
        record = self._cache.shadow_tree.record(node)
        return ResumedFrom(
            position,
            record.kind,
            record.hits,
            record.taken[1],
            record.stamp,
            _return_expected(record),
            None if record.pin is None else record.pin.until,
        )

    # Prefix hashes.

    def prefix_hash(self, record: Node) -> int:
        """The prefix hash of a node's end. The record keeps it, so each token is hashed once."""
        way: list[Node] = []
        at = record
        while at.prefix_hash is None and at.parent is not None:
            way.append(at)
            at = at.parent
        prefix_hash = EMPTY_PREFIX_HASH if at.prefix_hash is None else at.prefix_hash
        for node in reversed(way):
            key = node.payload.key
            prefix_hash = node.prefix_hash = extend_prefix_hash(
                prefix_hash, key.token_ids, 0, len(key)
            )
        return prefix_hash

    def _prefix_hash_in(self, records: ShadowTree, req: Req, position: int) -> int:
        """The prefix hash of a position in what `req` prefills, from that of its last node."""
        tokens = req.full_untruncated_fill_ids
        last, start, prefix_hash = self._hashed
        if last is not tokens or start > position:  # a request's decisions come one after another
            start, prefix_hash = 0, EMPTY_PREFIX_HASH
            record = records.by_id(req.last_node)  # None of a streaming session, which holds it
            if record is not None and 0 < record.depth <= position:
                start, prefix_hash = record.depth, self.prefix_hash(record)
        prefix_hash = extend_prefix_hash(prefix_hash, tokens, start, position)
        self._hashed = tokens, position, prefix_hash
        return prefix_hash

    def _records(self) -> ShadowTree:
        records: ShadowTree | None = self._cache.shadow_tree
        assert records is not None, "only what our policies evict is recorded"
        return records


def _return_expected(record: Node) -> float | None:
    history_node = record.history_node
    return None if history_node is None else history_node.return_expected


def _tenant_of_node(node: UnifiedTreeNode) -> Tenant:
    return tenant(node.key.extra_key, node.key.cache_salt)


def _short(request: CheckpointRequest) -> CheckpointRequest:
    if len(request.request_id) <= NAME_LENGTH:
        return request
    return replace(request, request_id=request.request_id[:NAME_LENGTH])


def grid(cache: Any) -> int:
    """Tokens between the states that SGLang tracks in a cache with states."""
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    return int(cache.components[ComponentType.MAMBA].mamba_checkpoint_grid)
