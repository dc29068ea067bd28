"""Codes what would be evicted in its own memory, and decodes what a request resumes from.

`core/victims/coding.py` says what is coded. In SGLang's tree a coded entry is on the device, and
its value is the slots that are freed with it: fewer than its tokens, and none for a state whose
slot is freed with another one that shares it. So SGLang's accounts, its frees and its checks hold
as they are. Before a request reads an entry, it is decoded; what a request computed anew takes the
place of a coded entry.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from torch import Tensor

from sglang_hybrid.cache.coded.groups import Group, Groups
from sglang_hybrid.cache.memory.shared import shared_memory
from sglang_hybrid.core.records.coded_edges import CodedEdge, CodedEdges
from sglang_hybrid.serving.startup import StartupError
from sglang_hybrid.storage.codecs.coded_pools import CodecRefused, kv_tensors
from sglang_hybrid.storage.codecs.in_place import InPlace

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_hybrid.cache.records.shadow_tree import ShadowTree
    from sglang_hybrid.core.victims.coding import Codable
    from sglang_hybrid.storage.codecs.coded_rows import CodecPlan

KV, STATE = ComponentType.FULL, ComponentType.MAMBA

LENDS_NOTHING: Final = (
    "; two pools lend each other nothing beside coded entries, which may cost more hits than it "
    "gains: replay your traffic first (--device-codec, --pools)"
)
"""Ends `CodedEntries.describe` where KV and states have a pool each."""


class CodedEntries:
    """The coded entries of one cache, whose pools are those of `params`.

    Raises `StartupError` for pools whose entries cannot be coded. coded, decoded: tokens of KV and
    states that ever were.
    """

    def __init__(self, cache: Any, params: CacheInitParams, codecs: CodecPlan) -> None:
        self._cache = cache
        self.coded, self.decoded = Counter[str](), Counter[str]()
        asked = f"--hybrid-device-codec {codecs}"
        kv_pool = params.token_to_kv_pool_allocator.get_kvcache()
        kv_pool = getattr(kv_pool, "full_kv_pool", kv_pool)
        memory = shared_memory(params.token_to_kv_pool_allocator)
        try:
            layers = kv_tensors(kv_pool.get_device_pool_infos()[0].buffer_info, asked)
        except CodecRefused as refused:
            raise StartupError(str(refused)) from None
        self._kv = InPlace(
            [tensor[None] for layer in layers for tensor in layer],
            [],
            codecs.kv[0],
            None if memory is None else memory.kv_names,
        )
        states = params.req_to_token_pool.mamba_pool.mamba_cache
        windows = [window for window in states.conv if window.numel()]
        self._states = InPlace(
            [states.temporal],
            windows,
            codecs.states[0],
            None if memory is None else memory.state_names,
        )
        if self._kv.parts == self._states.parts == 1:
            raise StartupError(
                f"{asked} makes neither KV nor states of this model smaller; leave it out."
            )
        if params.req_to_token_pool.mamba_pool._slot_siblings:
            raise StartupError(f"{asked} knows no side states, as this model has; leave it out.")
        self._one_memory = memory is not None
        self._page = int(params.page_size)
        self._edges: CodedEdges[Tensor] = CodedEdges(self._kv.parts, self._page)
        self._groups: Groups[Tensor, int] = Groups(self._states.parts)

    # Sizes and counts.

    def sizes(self, kv_bytes: int, state_bytes: int) -> tuple[int, int]:
        """Bytes of a token's KV and of a state that are coded, of these bytes exact."""
        return -(-kv_bytes // self._kv.parts), -(-state_bytes // self._states.parts)

    @property
    def bytes_beside(self) -> int:
        """Bytes that lie beside the pools."""
        return self._kv.bytes_beside + self._states.bytes_beside

    def describe(self) -> str:
        """The sizes of coded entries, for the log."""
        kv, states, beside = self._kv.parts, self._states.parts, self.bytes_beside
        return (
            f"entries are coded before they are evicted: {kv} tokens of KV in the place of one, "
            f"{states} states in the place of one; {beside / 1e6:,.1f} MB of scales and windows "
            f"lie beside the pools{'' if self._one_memory else LENDS_NOTHING}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Counts for /server_info: of what is coded now, and of what ever was; KV in tokens."""
        return {
            "now": {"kv": self._edges.tokens, "states": len(self._groups)},
            "coded": dict(self.coded),
            "decoded": dict(self.decoded),
            "bytes_beside": self.bytes_beside,
        }

    def reset(self) -> None:
        """Forget all coded entries, after the tree was emptied."""
        self._edges.clear()
        self._groups = Groups(self._states.parts)

    # Coding.

    def code(
        self,
        node: UnifiedTreeNode,
        what: Codable,
        tracker: dict[ComponentType, int],
        device_frees: dict[ComponentType, list[Tensor]],
    ) -> None:
        """Code `what` of `node` and of nodes above it, and give back the slots that this frees, as
        the eviction of a component does.
        """
        for record in what.kv:
            freed = self._code_kv(record.payload)
            tracker[KV] += len(freed)
            device_frees[KV].append(freed)
            self._records.code_kv(record, True)
        if what.state:
            freed = self._code_state(node)
            tracker[STATE] += len(freed)
            device_frees[STATE].append(freed)
            self._records.code_state(self._shadow_tree.record(node), True)

    def _code_kv(self, node: UnifiedTreeNode) -> Tensor:
        """Returns the slots that are free now."""
        slots: Tensor = node.component_data[KV].value
        edge = self._edges.code(node.id, slots)
        with self._in_order(slots):
            self._kv.encode(slots, *_places_and_parts(edge))
        self.coded["kv"] += edge.tokens
        self._set(node, KV, edge.slots)
        return slots[len(edge.slots) :]

    def _code_state(self, node: UnifiedTreeNode) -> Tensor:
        """Returns its slot if that is free now, or nothing."""
        slot: Tensor = node.component_data[STATE].value
        group, part, leaves = self._groups.join(node.id, slot)
        with self._in_order(slot, group.slot):
            self._states.encode(slot, group.slot, self._part(part, slot))
        self.coded["states"] += 1
        if leaves:
            self._set(node, STATE, slot[:0])
            return slot
        return slot[:0]

    # Decoding.

    def make_readable(self, node: UnifiedTreeNode) -> bool:
        """Decode the KV that a request reads which resumes from `node`: node after node from above,
        so that each takes the slots that the ones before gave back. False if there is no room for
        one of them; those above stay decoded.
        """
        path = self._path(node)
        if not path:
            return True
        cache = self._cache
        lock = cache.inc_lock_ref(node.id)
        try:
            for each in path:
                slots = self._take_kv(self._edges[each.id].tokens)
                if slots is None:
                    return False
                self._decode_kv(each, slots)
        finally:
            cache.dec_lock_ref(node.id, lock.to_dec_params())
        return True

    def _path(self, node: UnifiedTreeNode) -> list[UnifiedTreeNode]:
        """Nodes down to `node` whose KV is coded, parents first."""
        path = []
        while node.id in self._edges:  # above an exact one none is coded
            path.append(node)
            node = node.parent
        return path[::-1]

    def _take_kv(self, tokens: int) -> Tensor | None:
        allocator, page = self._cache.token_to_kv_pool_allocator, self._page
        short = tokens - allocator.available_size()
        if short > 0:
            self._cache.evict_for_alloc(EvictParams(num_tokens=-(-short // page) * page))
        taken: Tensor | None = allocator.alloc(tokens)
        return taken

    def _decode_kv(self, node: UnifiedTreeNode, slots: Tensor) -> None:
        edge = self._edges[node.id]
        with self._in_order(edge.slots, slots):
            self._kv.decode(*_places_and_parts(edge), slots)
        self.decoded["kv"] += edge.tokens
        self._replace_kv(node, slots)
        self._cache.tree_core.inexact.add(node.id)

    def decode_state(self, node: UnifiedTreeNode, req: Req) -> None:
        """Decode the state of `node`, if it is coded, into the slot of `req`, which is to resume
        from it. The entry stays coded. SGLang copies the slot into itself then.
        """
        if node.id not in self._groups:
            return
        slot = req.kv.mamba_pool_idx.reshape(1)
        group, part = self._groups.of(node.id)
        with self._in_order(group.slot, slot):
            self._states.decode(group.slot, self._part(part, slot), slot)
        self.decoded["states"] += 1
        self._cache.tree_core.inexact.add(node.id)
        req.kv.mamba_cow_src_index = slot

    # Other changes of coded entries.

    def adopt(self, node: UnifiedTreeNode, slots: Tensor) -> bool:
        """A request computed the KV of `node` anew, in `slots` [n]: if it is coded, they take its
        place. Returns whether it was. The node stays marked, since states that were computed behind
        what it held may still be there.
        """
        if node.id not in self._edges:
            return False
        self._replace_kv(node, slots.clone())
        return True

    def _replace_kv(self, node: UnifiedTreeNode, slots: Tensor) -> None:
        freed = self._drop_edge(node)
        self._set(node, KV, slots)
        self._cache.token_to_kv_pool_allocator.free_segment(freed, start_pos=0)
        self._records.code_kv(self._shadow_tree.record(node), False)

    def _drop_edge(self, node: UnifiedTreeNode) -> Tensor:
        """The edge of `node` is coded no more. Returns the slots that are free now."""
        children = {child.id: child for child in node.children.values()}
        freed, heir = self._edges.drop(node.id, children)
        if heir is not None:
            self._set(children[heir], KV, self._edges[heir].owned)
        return freed

    def split(self, head: UnifiedTreeNode, tail: UnifiedTreeNode) -> None:
        """The edge of `tail`, which is coded, was cut; `head` is the new node above it. Neither has
        a value now.
        """
        self._edges.split(head.id, tail.id, len(head.key))
        for node in (head, tail):
            node.component_data[KV].value = self._edges[node.id].owned

    def has_kv(self, node: UnifiedTreeNode) -> bool:
        """True if the KV of `node` is coded."""
        return node.id in self._edges

    def on_kv_eviction(self, node: UnifiedTreeNode) -> None:
        """The KV of `node`, a leaf, is about to be freed."""
        if node.id in self._edges:
            self._edges.drop(node.id)

    def on_state_lock(self, node: UnifiedTreeNode) -> None:
        """The state of `node` was locked, or released."""
        if node.id in self._groups:
            self._set_group_values(self._groups.of(node.id)[0])

    def drop_coded_state(self, node: UnifiedTreeNode) -> None:
        """`node` is about to be given a state that a request computed: if it has a coded one, that
        goes.
        """
        if node.id not in self._groups:
            return
        freed, core = self._leave(node), self._cache.tree_core
        self._set(node, STATE, freed[:0])
        node.component_data[STATE].value = None
        core.lru_lists[STATE].remove_node(node)
        self._cache.req_to_token_pool.mamba_allocator.free(freed)
        self._records.code_state(self._shadow_tree.record(node), False)

    def on_state_eviction(self, node: UnifiedTreeNode) -> None:
        """The state of `node` is about to be freed: its value becomes what that frees."""
        if node.id in self._groups:
            self._leave(node)

    def _leave(self, node: UnifiedTreeNode) -> Tensor:
        """The coded state of `node` goes. Returns the slot that this leaves empty, or nothing,
        which is the value of `node` from now on.
        """
        group, _ = self._groups.of(node.id)
        moved, empty = self._groups.leave(node.id)
        if moved is not None:
            slot = moved.source.slot
            with self._in_order(slot, moved.target.slot):
                self._states.move(
                    slot,
                    self._part(moved.part, slot),
                    moved.target.slot,
                    self._part(moved.to, slot),
                )
            self._set_group_values(moved.source)
        self._set_group_values(group)
        freed = group.slot[:0] if empty is None else empty.slot
        self._set(node, STATE, freed)
        return freed

    def _set_group_values(self, group: Group[Tensor, int]) -> None:
        """One state of a group has its slot for a value, the others have nothing: one that is
        locked, if any is, since the slot cannot be had then.
        """
        nodes = [self._cache.tree_core.node_by_id(name) for name in group.names]
        nodes.sort(key=lambda node: not node.component_data[STATE].lock_ref)
        for number, node in enumerate(nodes):
            self._set(node, STATE, group.slot if number == 0 else group.slot[:0])

    # SGLang's account, and the device.

    def _set(self, node: UnifiedTreeNode, kind: ComponentType, value: Tensor) -> None:
        """Give `node` another value, and SGLang's account the difference of slots."""
        core, data = self._cache.tree_core, node.component_data[kind]
        core.adjust_component_size(node.id, kind, len(value) - len(data.value))
        data.value = value

    def _part(self, part: int, like: Tensor) -> Tensor:
        return torch.full_like(like, part)

    def _in_order(self, *read: Tensor) -> AbstractContextManager[Any]:
        """A context whose work runs after the forwards so far, and before the next forward."""
        stream = self._cache.forward_stream
        if stream is None:
            return nullcontext()
        module = torch.get_device_module(read[0].device)
        stream.wait_stream(module.current_stream())
        for tensor in read:
            tensor.record_stream(stream)
        context: AbstractContextManager[Any] = module.stream(stream)
        return context

    @property
    def _shadow_tree(self) -> ShadowTree:
        tree: ShadowTree = self._cache.shadow_tree
        return tree

    @property
    def _records(self) -> Any:
        return self._shadow_tree.tree


def _places_and_parts(edge: CodedEdge[Tensor]) -> tuple[Tensor, Tensor]:
    """The place and the part of each token of `edge`: int64 [tokens] each."""
    at = torch.arange(edge.skip, edge.skip + edge.tokens, device=edge.slots.device)
    return edge.slots[at // edge.parts], at % edge.parts
