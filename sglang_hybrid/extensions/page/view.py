"""The page's view of one cache, in its scheduler. Nothing is recorded until somebody looks.

All ranks of a group answer alike and the first one's answer is sent. Answers only read, so they may
differ without harm: how many nodes one tells is bounded by time.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_hybrid.core.records.nodes import Node
from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.core.victims.pool import absorbed
from sglang_hybrid.explain.decision_log import DecisionLog
from sglang_hybrid.explain.decisions import Decision, KvLost, NotTaken, StateLost
from sglang_hybrid.explain.explanation import Explanation
from sglang_hybrid.explain.stored import prefix_key, stored_path
from sglang_hybrid.extensions.page.follower import NodeRows, TreeFollower, row_tiers
from sglang_hybrid.extensions.page.messages import (
    AskReq,
    AskReqOutput,
    NodeReq,
    NodeReqOutput,
    WatchReq,
    WatchReqOutput,
    WhatIfReq,
    WhatIfReqOutput,
)
from sglang_hybrid.extensions.page.what_if import WhatIf
from sglang_hybrid.serving.requests.ids import shown_id
from sglang_hybrid.serving.telemetry.stats import Evicted
from sglang_hybrid.serving.tenants import tenant, tenant_names

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_hybrid.cache.radix_cache import HybridRadixCache

BUSY_SECONDS = 0.0004
"""Seconds that an answer may take while requests run: 1 % of the time between two (watch.py)."""

IDLE_SECONDS = 0.02
EVENTS = 1_024
READERS = 8
"""HTTP processes that watch at once; one more takes the place of the one that asked longest ago."""

MOST_WAITING = 200_000
"""Changes that wait for a reader who does not ask; beyond, it has to start anew."""

SHOWN_TOKENS = 4_096
"""Tokens of a node's edge or of a prompt that are shown as text, at most."""


@dataclass
class _Reader:
    """One HTTP process. asked: when it asked last, seconds of a monotonic clock. heard: number of
    the last event that it was told. began: requests that it was told, by tenant and id, when
    `requests` had begun.
    """

    follower: TreeFollower
    asked: float
    heard: int = 0
    requests: int = -1
    began: set[tuple[Hashable, str]] = field(default_factory=set)


class PageView:
    """Answers a page about one cache.

    scheduler: whose requests use the cache; a hook sets it (hooks/scheduling.py).
    """

    def __init__(self, cache: HybridRadixCache, decision_log: DecisionLog, what_if: WhatIf) -> None:
        self.scheduler: Scheduler | None = None
        self._cache = cache
        self._log = decision_log
        self._what_if = what_if
        self._names = tenant_names()
        self._readers: dict[str, _Reader] = {}
        self._events: deque[tuple[int, dict[str, Any]]] = deque(maxlen=EVENTS)
        self._happened = 0
        self._rows = NodeRows(
            cache.cost,
            lambda: self._records().kv_pool.policy,
            self._names,
        )

    def handlers(self) -> list[tuple[type, Callable[[Any], Any]]]:
        """The handlers that the scheduler's dispatcher must know."""
        return [
            (WatchReq, self.watch),
            (NodeReq, self.node),
            (AskReq, self.ask),
            (WhatIfReq, self.try_others),
        ]

    # Changes

    def watch(self, asked: WatchReq) -> WatchReqOutput:
        """The changes that `asked.reader` does not know yet."""
        if self._cache.shadow_tree is None:
            return WatchReqOutput(
                error="nothing is recorded under --hybrid-eviction sglang-lru or without a cache."
            )
        if asked.leave:
            self._drop(asked.reader)
            return WatchReqOutput()
        reader, start = self._reader(asked.reader)
        busy = self._is_busy()
        seconds = BUSY_SECONDS if busy else IDLE_SECONDS
        changes = reader.follower.changes(seconds, valued=not busy)
        events = [event for number, event in self._events if number > reader.heard]
        reader.heard = self._happened
        return WatchReqOutput(
            start=start,
            nodes=[list(row) for row in changes.nodes],
            gone=changes.gone,
            more=changes.more,
            counts=self._counts(),
            events=events + list(self._begun(reader)),
            running=list(self._running()),
        )

    def _reader(self, name: str) -> tuple[_Reader, bool]:
        """The reader of this name, and whether it has to start anew."""
        now = time.monotonic()
        tree = self._records().tree
        known = self._readers.get(name)
        follows = known is not None and known.follower.tree is tree
        if known is not None and follows and known.follower.waiting <= MOST_WAITING:
            known.asked = now
            return known, False
        self._drop(name)
        if len(self._readers) >= READERS:
            self._drop(min(self._readers, key=lambda each: self._readers[each].asked))
        self._log.decisions.heard = self._on_decision
        follower = TreeFollower(tree, self._rows)
        reader = self._readers[name] = _Reader(follower, now)
        return reader, True

    def _drop(self, name: str) -> None:
        reader = self._readers.pop(name, None)
        if reader is not None:
            reader.follower.leave()
        if not self._readers:
            self._log.decisions.heard = None
            self._events.clear()

    def drop_idle(self) -> None:
        """A reader that never asks again costs nothing for long: its changes are not kept."""
        for name, reader in list(self._readers.items()):
            if reader.follower.waiting > MOST_WAITING:
                self._drop(name)

    def _on_decision(self, whose: Hashable, position: int, decision: Decision) -> None:
        self._happened += 1
        if not self._happened % 1_024:
            self.drop_idle()
        event = {"tenant": self._names.name(whose), "at": decision.at, "position": position}  # type: ignore[arg-type]
        if isinstance(decision, StateLost):
            to = decision.recipient
            last = self._events[-1][1] if self._events else {}
            if decision.what is Evicted.LEAF and last.get("end") == position:
                self._events.pop()  # its KV, which is logged apart
            event |= {
                "event": "evicted",
                "what": decision.what.value,
                "kind": decision.kind.value,
                "policy": decision.policy,
                "short": None if decision.short is None else decision.short.value,
                "worth": decision.score,
                "hits": decision.hits,
                "unused": decision.at - decision.last_used,
                "for": None if to is None else [to.request_id, to.kind.value, to.position],
            }
        elif isinstance(decision, KvLost):
            event |= {"event": "evicted", "what": "kv", "end": decision.end}
        elif isinstance(decision, NotTaken):
            event |= {
                "event": "not taken",
                "kind": decision.request.kind.value,
                "request": decision.request.request_id,
                "why": decision.skip.value,
            }
        self._events.append((self._happened, event))

    def _begun(self, reader: _Reader) -> Iterator[dict[str, Any]]:
        """Requests whose prefill has begun, of those that are remembered."""
        if reader.requests == (begun := self._cache.report.stats.requests):
            return
        reader.requests, there = begun, set()
        for whose, name, seen in self._log.recent.all():
            if not seen.report.started:
                continue
            there.add((whose, name))
            if (whose, name) not in reader.began:
                report = seen.report
                yield {
                    "event": "request",
                    "tenant": self._names.name(whose),  # type: ignore[arg-type]
                    "at": seen.at,
                    "request": name,
                    "route": seen.route,
                    "prompt": report.prompt_tokens,
                    "hit": report.hit_tokens,
                    "kv_only": report.kv_only_tokens,
                    "missed": report.missed.value,
                    "path": self._path(seen.tokens[: report.hit_tokens], whose)[-1:],
                }
        reader.began = there

    def _counts(self) -> dict[str, Any]:
        cache, records = self._cache, self._records()
        tree, cost = cache.tree_core, cache.cost
        kv = int(tree.full_evictable_size() + tree.full_protected_size())
        states = slots = 0
        if cache.is_mamba_enabled:
            states = int(tree.mamba_evictable_size() + tree.mamba_protected_size())
            slots = int(cache.req_to_token_pool.mamba_allocator.size)
        kv_room = int(cache.token_to_kv_pool_allocator.size) * cost.kv_bytes_per_token
        state_room = slots * cost.state_bytes
        if cache.account is not None:  # either kind may take all of it
            kv_room = state_room = cache.account.budget
        stats, scheduler = cache.report.stats, self.scheduler
        used = {}
        if records.follows_copies:
            used = {
                t.name.lower(): records.placement.used(t, cost) for t in (Tier.DEVICE, Tier.HOST)
            }
        return {
            "clock": records.clock.stamp,
            "requests": stats.requests,
            "prompt_tokens": stats.prompt_tokens,
            "hit_tokens": stats.hit_tokens,
            "kv_only_tokens": stats.kv_only_tokens,
            "evicted": sum(stats.evicted.values()),
            "kv_bytes": kv * cost.kv_bytes_per_token,
            "kv_room": kv_room,
            "state_bytes": states * cost.state_bytes,
            "state_room": state_room,
            "one_memory": cache.account is not None,
            "policy": cache.policy_name,
            "running": 0 if scheduler is None else len(scheduler.running_batch.reqs),
            "waiting": 0 if scheduler is None else len(scheduler.waiting_queue),
            "tiers": used,
        }

    def _running(self) -> Iterator[tuple[str, int, int, int]]:
        """Requests that run, with the node that each holds. Those of a streaming session, which
        holds it for them, are left out.
        """
        if self.scheduler is None:
            return
        for req in self.scheduler.running_batch.reqs:
            if isinstance(req.last_node, int):
                lengths = len(req.origin_input_ids), len(req.output_ids)
                yield shown_id(req.rid), req.last_node, *lengths

    def _is_busy(self) -> bool:
        scheduler = self.scheduler
        return scheduler is not None and bool(
            scheduler.running_batch.reqs or scheduler.waiting_queue
        )

    # Questions.

    def node(self, asked: NodeReq) -> NodeReqOutput:
        """All that is known of a node."""
        if self._cache.shadow_tree is None:
            return NodeReqOutput()
        record = self._records().by_id(asked.node)
        if record is None or record.parent is None:
            return NodeReqOutput()
        text = record.payload.key.token_ids[:SHOWN_TOKENS] if asked.text else []
        return NodeReqOutput(node=self._about(record), tokens=[int(token) for token in text])

    def _about(self, node: Node) -> dict[str, Any]:
        records, cost = self._records(), self._cache.cost
        kv_tier, state_tier = row_tiers(node)
        key = node.payload.key
        likely = records.kv_pool.policy.return_probability(node, records.clock)
        return {
            "id": node.payload.id,
            "tenant": self._names.name(tenant(key.extra_key, key.cache_salt)),
            "hash": f"{self._log.prefix_hash(node):08x}",
            "begins": node.depth - node.tokens,
            "ends": node.depth,
            "children": len(node.children),
            "kind": node.kind.value if node.has_state else None,
            "hits": node.hits,
            "age": records.clock.stamp - node.taken[1] if node.has_state else None,
            "unused": records.clock.stamp - node.stamp,
            "kv_bytes": node.tokens * cost.kv_bytes_per_token,
            "state_bytes": cost.state_bytes if node.has_state else 0,
            "kv_tier": kv_tier,
            "state_tier": state_tier,
            "anchor": node.anchor_depth,
            "saves_flops": float(
                cost.savings(node.depth, node.anchor_depth) if node.has_state else 0
            ),
            "returns": likely if node.has_state else None,
            "value": self._rows.value(node, records.tree),
            "frees_tokens": 0
            if node.children
            else node.tokens + sum(above.tokens for above in absorbed(node)),
            "pinned": node.pin is not None,
            "held": node.kv_locked or node.state_locked,
            "wanted": node.demand,
            "policy": self._cache.policy_name,
        }

    def ask(self, asked: AskReq) -> AskReqOutput:
        """The report on a prompt or a request, and its path in the tree."""
        whose = tenant(asked.extra_key, asked.cache_salt)
        tokens = array("q", asked.input_ids or [])
        if self._cache.disable or self._cache.shadow_tree is None:
            return AskReqOutput(error="this server records nothing that could be asked about.")
        if asked.request_id is not None:
            found = [
                (tenant_, seen)
                for tenant_, name, seen in self._log.recent.all()
                if name == asked.request_id and self._names.name(tenant_) == asked.tenant  # type: ignore[arg-type]
            ]
            if not found:
                return AskReqOutput(error=f"no request {asked.request_id[:64]!r} is remembered.")
            whose, seen = found[0]  # type: ignore[assignment]
            tokens = seen.tokens
        elif not tokens:
            return AskReqOutput(error="the prompt has no tokens.")
        explanation = Explanation(self._cache, self._log, whose)
        if asked.request_id is None:
            report = explanation.of_prompt(tokens)
        else:
            report = explanation.of_request(asked.request_id, seen)
        return AskReqOutput(
            report=msgspec.to_builtins(report),
            path=self._path(tokens, whose),
            tokens=list(tokens) if asked.text else [],
        )

    def try_others(self, asked: WhatIfReq) -> WhatIfReqOutput:
        """The progress of the replay of recent requests."""
        if asked.begin:
            self._what_if.begin()
        return self._what_if.answer()

    def _path(self, tokens: array[int], whose: Any) -> list[int]:
        """Ids of the nodes on the path of a prompt, the last one maybe in part."""
        key = prefix_key(self._cache, tokens, whose, len(tokens))
        found = stored_path(self._cache, key)
        nodes = [node for _, node in found.nodes] + [found.part] * (found.part is not None)
        return [int(node.id) for node in nodes]

    def _records(self) -> Any:
        return self._cache.shadow_tree
