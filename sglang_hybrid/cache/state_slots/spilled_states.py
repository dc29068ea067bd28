"""States that lie in the place of KV, where the pool of states has no slot for them.

Two pools cannot give each other memory. But a state is bytes, and KV is given out token by token:
so a state that nobody holds can move to tokens of KV, and its slot is free. Victims are then chosen
among KV and states together, as in one memory. A request that resumes from such a state
gets a copy in a slot of its own, as from any other; the state stays where it is.

In SGLang's tree such a state is on the device and its value has no slots. Its tokens are counted
here, and the cache adds them to what may be evicted, or is held (`evictable`, `held`).
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.cache.state_slots.state_rows import StateRows
from sglang_hybrid.serving.device_streams import on_stream

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from torch import Tensor

logger = logging.getLogger(__name__)

KV, STATE = ComponentType.FULL, ComponentType.MAMBA


class SpilledStates:
    """The spilled states of one cache, whose pools are those of `params`.

    tokens: of KV that one takes. freed: tokens of KV and slots of states that moves and ends of
    spilled states ever gave back, less those that they took. spilled, fetched: states that ever
    were. Raises ValueError for pools that states cannot spill into.
    """

    def __init__(self, cache: Any, params: CacheInitParams) -> None:
        self._cache = cache
        self._kv = params.token_to_kv_pool_allocator
        self._slots = params.req_to_token_pool.mamba_allocator
        pool = params.req_to_token_pool.mamba_pool
        if pool._slot_siblings:
            raise ValueError("the model keeps more beside each slot")
        states = pool.mamba_cache
        self._rows = StateRows(
            kv_buffers(self._kv.get_kvcache()),
            [*states.conv, states.temporal],
            int(params.page_size),
        )
        self.tokens = self._rows.tokens
        self.freed = Counter[ComponentType]()
        self.spilled = self.fetched = 0
        self._at: dict[int, Tensor] = {}
        self._movable: dict[int, None] = {}
        self._held: set[int] = set()

    # Counts.

    def __contains__(self, name: int) -> bool:
        """True if the state of the node with this id lies in the place of KV."""
        return name in self._at

    def __len__(self) -> int:
        """States that lie in the place of KV now."""
        return len(self._at)

    @property
    def evictable(self) -> int:
        """Tokens of KV in whose place states lie that nobody holds."""
        return (len(self._at) - len(self._held)) * self.tokens

    @property
    def held(self) -> int:
        """Tokens of KV in whose place states lie that requests hold."""
        return len(self._held) * self.tokens

    @property
    def movable(self) -> int:
        """States in slots that nobody holds."""
        return len(self._movable)

    def room(self, kept: int) -> int:
        """States that could be spilled without an eviction, if `kept` tokens of KV stay free."""
        free = max(0, int(self._kv.available_size()) - kept)
        return min(self.movable, free // self.tokens)

    def describe(self) -> str:
        """The memory that a spilled state takes, for the log."""
        beside = self._rows.bytes_beside / 1e6
        return (
            f"a state without a slot lies in the place of {self.tokens:,} tokens of KV, so KV and "
            f"states share what running requests leave; {beside:,.1f} MB lie beside the pools"
        )

    def as_dict(self) -> dict[str, int]:
        """The values for /server_info."""
        return {
            "now": len(self._at),
            "tokens_of_each": self.tokens,
            "spilled": self.spilled,
            "fetched": self.fetched,
        }

    def reset(self) -> None:
        """Forget all states, after the tree and its pools were emptied."""
        self._at, self._movable, self._held = {}, {}, set()

    # Moves.

    def spill(self) -> bool:
        """Move the state that was used least recently of those that nobody holds to free KV;
        returns whether there was one, and room for it.
        """
        tokens = self._kv.alloc(self.tokens) if self._movable else None
        if tokens is None:
            return False
        name = next(iter(self._movable))
        node = self._cache.tree_core.node_by_id(name)
        slot: Tensor = node.component_data[STATE].value
        with on_stream(self._cache.forward_stream, slot, tokens):
            self._rows.spill(slot.long(), tokens.long())
        del self._movable[name]
        self._at[name] = tokens
        self._set(node, slot[:0])
        self._slots.free(slot)
        self.freed[STATE] += 1
        self.freed[KV] -= self.tokens
        self.spilled += 1
        return True

    def unspill(self, name: int | None = None) -> bool:
        """Move the state of the node with this id, None: the one that was spilled last, into a free
        slot; returns whether there was one, and a slot for it.
        """
        name = next(reversed(self._at), None) if name is None else name
        slot = None if name is None else self._slots.alloc(1)
        if name is None or slot is None:
            return False
        node = self._cache.tree_core.node_by_id(name)
        tokens = self._at.pop(name)
        with on_stream(self._cache.forward_stream, slot, tokens):
            self._rows.fetch(tokens.long(), slot.long())
        self._set(node, slot)
        if name in self._held:
            self._held.discard(name)
        else:
            self._movable[name] = None
        self.freed[STATE] -= 1
        self._free(tokens)
        self.fetched += 1
        return True

    def fetch(self, node: UnifiedTreeNode, req: Req) -> None:
        """Copy the state of `node`, if it is spilled, into the slot of `req`, which is to resume
        from it. SGLang copies the slot into itself then.
        """
        tokens = self._at.get(node.id)
        if tokens is None:
            return
        slot = req.kv.mamba_pool_idx.reshape(1)
        with on_stream(self._cache.forward_stream, slot, tokens):
            self._rows.fetch(tokens.long(), slot.long())
        self.fetched += 1
        req.kv.mamba_cow_src_index = slot

    # Other changes of states.

    def on_state_gain(self, node: UnifiedTreeNode) -> None:
        """Called when `node` has got a state, in a slot."""
        if not node.component_data[STATE].lock_ref:
            self._movable[node.id] = None

    def on_state_lock(self, node: UnifiedTreeNode) -> None:
        """A request holds the state of `node`, or one no longer does."""
        held, name = node.component_data[STATE].lock_ref > 0, node.id
        if name in self._at:
            (self._held.add if held else self._held.discard)(name)
        elif held:
            self._movable.pop(name, None)
        elif node.component_data[STATE].value is not None:
            self._movable.setdefault(name)

    def on_state_eviction(self, node: UnifiedTreeNode) -> None:
        """The state of `node` is about to be freed."""
        self._movable.pop(node.id, None)
        self._held.discard(node.id)
        tokens = self._at.pop(node.id, None)
        if tokens is not None:
            self._free(tokens)

    # SGLang's account.

    def _free(self, tokens: Tensor) -> None:
        self._kv.free_segment(tokens, start_pos=0)
        self.freed[KV] += len(tokens)

    def _set(self, node: UnifiedTreeNode, value: Tensor) -> None:
        """Give the state of `node` another value, and SGLang's account the difference of slots."""
        core, data = self._cache.tree_core, node.component_data[STATE]
        core.adjust_component_size(node.id, STATE, len(value) - len(data.value))
        data.value = value


def make_spilled_states(cache: Any, params: CacheInitParams) -> SpilledStates | None:
    """The spilled states of `cache`; None, and a line of the log, for pools that states cannot
    spill into.
    """
    if params.disable or getattr(params.req_to_token_pool, "mamba_pool", None) is None:
        return None
    try:
        return SpilledStates(cache, params)
    except ValueError as error:
        logger.warning("sglang_hybrid: states stay in their pool: %s.", error)
        return None


def kv_buffers(pool: Any) -> list[Tensor]:
    """The tensors of SGLang's pool of KV, [tokens, ...] each. Raises ValueError for KV that has
    scales beside it, or is kept in another order than tokens.
    """
    from sglang.srt.mem_cache import device_pool_info

    pool = getattr(pool, "full_kv_pool", pool)
    info = pool.get_device_pool_infos()[0].buffer_info
    buffers = info.buffers
    if isinstance(buffers, device_pool_info.KVBuffers):
        plain = buffers.layout is device_pool_info.KVBufferLayout.NHD
        tensors = [*buffers.k, *buffers.v]
    else:
        plain = isinstance(buffers, tuple)
        tensors = list(buffers) if plain else []
    if not plain or info.scales is not None:
        raise ValueError("KV of this model and --kv-cache-dtype is not kept token by token")
    return [tensor for tensor in tensors if tensor.numel()]
