"""The way to a prompt's end that a look-up reports: load all, load up to a shallower point and
compute the rest, or compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.core.tiers.places import Way, copies_of, way_without_loads, ways
from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.serving.per_request import PerRequest
from sglang_hybrid.serving.telemetry.stats import Found

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.records.tiered_shadow_tree import TieredShadowTree
    from sglang_hybrid.core.records.nodes import Node


class WayChooser:
    """Chooses for one cache; SGLang's look-up has found the deepest point over all tiers.

    backlog: seconds until the loads that are under way have arrived.
    """

    def __init__(self, shadow_tree: TieredShadowTree) -> None:
        self._shadow_tree = shadow_tree
        self.backlog = 0.0
        self._without_loads: PerRequest[bool] = PerRequest()
        self._found: PerRequest[Found] = PerRequest()

    def choose(self, core: Any, params: MatchPrefixParams, result: MatchResult) -> MatchResult:
        """`result` of SGLang's look-up in `core`, with the point to resume from that is reached
        first.
        """
        best = core.node_by_id(result.best_match_node)
        device = core.node_by_id(result.last_device_node)
        way = self.way(best, len(params.key) + 1, params.req)
        if params.req is not None:
            self._found[params.req] = self._describe(best, way)
        if best is device:
            return result
        if way.depth <= result.device_prefix_len:
            return result._replace(
                best_match_node=device.id, host_hit_length=0, mamba_host_hit_length=0
            )
        record = self._shadow_tree.record(best)
        while record.depth > way.depth and record.parent is not None:
            record = record.parent
        chosen: UnifiedTreeNode = record.payload
        if chosen is best:
            return result
        return result._replace(
            best_match_node=chosen.id,
            host_hit_length=_host_tokens(chosen, device),
            mamba_host_hit_length=int(_state_on_host_only(chosen)),
        )

    def on_failed_load(self, req: Req) -> None:
        """Let `req` resume from what is on the device from now on."""
        self._without_loads[req] = True

    def has_failed(self, req: Req) -> bool:
        """True if a load for `req` could not be, so that it loads nothing."""
        return req in self._without_loads

    def on_resources_freed(self, req: Req) -> None:
        """`req` gave back all that it held. If it waits again, it may load again."""
        self._without_loads.pop(req)

    def last_lookup(self, req: Req) -> Found | None:
        """The result of the last look-up of `req`, by tier."""
        return self._found.get(req)

    def _describe(self, best: UnifiedTreeNode, way: Way) -> Found:
        tokens = dict.fromkeys(Tier, 0)
        record = deepest = self._shadow_tree.record(best)
        while record.parent is not None:
            tier = copies_of(record).kv_tier
            if record.depth <= way.depth and tier is not None:
                tokens[tier] += record.tokens
            record = record.parent
        state = None if way.state_tier is None else way.state_tier.name.lower()
        return Found(
            tokens[Tier.DEVICE],
            tokens[Tier.HOST],
            state,
            deepest.depth,
            way.load_seconds,
            way.compute_seconds,
        )

    def of_node(self, node: UnifiedTreeNode, prompt_len: int) -> tuple[Way, Way, Way]:
        """Ways to the end of a prompt that is stored down to `node`: the one to be chosen, that
        which resumes deepest, and the fastest that loads nothing.
        """
        tree, path = self._shadow_tree, self._path(node)
        found = list(ways(path, prompt_len, tree.cost, tree.speeds.speeds))
        resident = way_without_loads(path, prompt_len, tree.cost, tree.speeds.speeds)
        return self.way(node, prompt_len, None), found[-1], resident

    def _path(self, node: UnifiedTreeNode) -> list[Node]:
        path: list[Node] = []
        record: Node | None = self._shadow_tree.record(node)
        while record is not None and record.parent is not None:
            path.append(record)
            record = record.parent
        return path[::-1]

    def way(self, best: UnifiedTreeNode, prompt_len: int, req: Req | None) -> Way:
        """The fastest way to the end of a prompt of `prompt_len` tokens, the nodes down to `best`
        being what is stored of it.
        """
        tree = self._shadow_tree
        path = self._path(best)
        if req is not None and req in self._without_loads:
            return way_without_loads(path, prompt_len, tree.cost, tree.speeds.speeds)

        def seconds(way: Way) -> float:
            return way.seconds + (self.backlog if any(way.load_bytes) else 0.0)

        found = ways(path, prompt_len, tree.cost, tree.speeds.speeds)
        return min(found, key=lambda way: (seconds(way), -way.depth))


def _host_tokens(node: UnifiedTreeNode, device: UnifiedTreeNode) -> int:
    """Tokens on the host from `device` down to `node`, as SGLang counts them (full.py)."""
    tokens = 0
    while node is not device and node.parent is not None:
        on_host = node.component_data[ComponentType.FULL].host_value
        tokens += 0 if on_host is None else len(on_host)
        node = node.parent
    return tokens


def _state_on_host_only(node: UnifiedTreeNode) -> bool:
    state = node.component_data[ComponentType.MAMBA]
    return state.value is None and state.host_value is not None
