"""Pins of clients: the nodes of their positions are pinned once they are in the tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang_hybrid.cache.memory.shared import shared_memory
from sglang_hybrid.core.records.pins import PinRoom, Pins
from sglang_hybrid.serving.requests.cache_fields import fields_of
from sglang_hybrid.serving.tenants import tenant_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from sglang_hybrid.cache.radix_cache import HybridRadixCache
    from sglang_hybrid.cache.records.shadow_tree import ShadowTree
    from sglang_hybrid.core.costs.cost import CostModel
    from sglang_hybrid.core.records.nodes import Node
    from sglang_hybrid.core.records.pin import PinRequest


def make_pins(cost: CostModel, params: CacheInitParams, share: float, *, spills: bool) -> Pins:
    """The pins of a cache, which may take `share` of the device's memory on this rank. spills:
    states may lie in the place of KV.
    """
    allocator = params.token_to_kv_pool_allocator
    memory = shared_memory(allocator)
    if memory is not None:
        return Pins(cost, PinRoom(memory.account.budget), share)
    kv = int(allocator.size) * cost.kv_bytes_per_token
    states = getattr(params.req_to_token_pool, "mamba_pool", None)
    if states is None:
        return Pins(replace(cost, state_bytes=0), PinRoom(kv), share)
    of_states = int(states.size) * cost.state_bytes
    return Pins(cost, PinRoom(kv + of_states) if spills else PinRoom(kv, of_states), share)


def pin_published(cache: HybridRadixCache, shadow_tree: ShadowTree, req: Req) -> list[int]:
    """Pin what `req` declared as far as it is in the tree now; returns the positions that are
    pinned, ascending. Those that another call will reach are left for it.
    """
    wanted = fields_of(req).hints.pins
    if not wanted or req.last_node is None:
        return []
    tenant, pins, last = tenant_of(req), shadow_tree.tree.pins, req.finished()
    record = shadow_tree.record(cache.tree_core.node_by_id(req.last_node))
    found = list(_holders(record, wanted, cache.page_size, exact=shadow_tree.has_states))
    for node, asked in found:
        pins.pin(node, asked, tenant, last=last)
    return sorted(asked.position for node, asked in found if node.pin is not None)


def _holders(
    node: Node, wanted: tuple[PinRequest, ...], page_size: int, *, exact: bool
) -> Iterator[tuple[Node, PinRequest]]:
    """The nodes on the path to `node` that hold the wanted positions, deepest first. exact: a node
    must end at the position, with a state; otherwise the position may lie on its edge.
    """
    for asked in reversed(wanted):
        position = asked.position - asked.position % page_size
        while node.parent is not None and node.parent.depth >= position:
            node = node.parent
        ends_there = node.depth == position and node.has_state
        if node.parent is not None and node.depth >= position and (ends_there or not exact):
            yield node, asked
