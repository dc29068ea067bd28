"""One memory for KV and states: SGLang's unified pool (`--enable-unified-memory`).

States grow from one end of its bytes, KV from the other. A row that is freed leaves a hole: its own
kind takes it again, and for the other kind rows are moved together (compaction), so that the gap
between both grows. Ids name rows wherever they are. Line references are to sglang 0.5.23,
mem_cache/allocator/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_hybrid.core.memory.account import MemoryAccount, MemoryKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang.srt.mem_cache.allocator.unified_mamba import UnifiedMambaTokenToKVPoolAllocator

    from sglang_hybrid.storage.codecs.in_place import Names


class UnifiedAccount(MemoryAccount):
    """The bytes of SGLang's pool, read from its two allocators whenever one asks.

    Holes are kept bytes. `moved` are bytes that were given back to the gap, and `moves` counts
    compactions that copied rows.
    """

    def __init__(self, allocator: UnifiedMambaTokenToKVPoolAllocator) -> None:
        kv, states = allocator.full_attn_allocator, allocator.mamba_allocator
        self._ends: dict[MemoryKind, Any] = {MemoryKind.KV: kv, MemoryKind.STATES: states}
        self.budget = kv.num_pages * kv.entry_bytes_per_page
        self.budget -= states.min_page_index * states.entry_bytes_per_page  # padding's rows

    @property
    def used(self) -> Mapping[MemoryKind, int]:
        return {kind: _live(end) * _bytes(end) for kind, end in self._ends.items()}

    @property
    def kept(self) -> Mapping[MemoryKind, int]:
        return {
            kind: (end._allocated_pages() - _live(end)) * _bytes(end)
            for kind, end in self._ends.items()
        }

    @property
    def moved(self) -> Mapping[MemoryKind, int]:
        return {
            kind.other: end._stats_n_pages_absorbed * _bytes(end)
            for kind, end in self._ends.items()
        }

    @property
    def moves(self) -> int:
        return sum(int(end._stats_n_flush_did_work) for end in self._ends.values())


class UnifiedMemory:
    """SGLang's pool behind its allocator of KV and states.

    account: which kind has which bytes.
    """

    def __init__(self, allocator: UnifiedMambaTokenToKVPoolAllocator) -> None:
        self._kv, self._states = allocator.full_attn_allocator, allocator.mamba_allocator
        self.account = UnifiedAccount(allocator)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV."""
        return int(self._kv.entry_bytes)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state."""
        return _bytes(self._states)

    @property
    def page_tokens(self) -> int:
        """Tokens of one page: KV of so many tokens changes hands together."""
        return int(self._kv.page_size)

    @property
    def kv_names(self) -> Names:
        """Slots of KV, a token each."""
        from sglang_hybrid.storage.codecs.in_place import Names

        count = (self._kv.num_virtual_ids + 1) * self.page_tokens
        return Names(count, self._kv.translate_kv_loc)

    @property
    def state_names(self) -> Names:
        """Slots of states."""
        from sglang_hybrid.storage.codecs.in_place import Names

        table = self._states.virtual_to_physical
        return Names(len(table), lambda slots: table[slots])

    @property
    def free_bytes(self) -> int:
        """Bytes that KV can have without an eviction. While nothing may move, holes of states are
        none of them (unified_sub_pool.py:774).
        """
        return int(self._kv.schedulable_available_size()) * self.token_bytes

    def held_pages(self, evictable: int, prefix_len: int) -> int:
        """Pages of KV that would stay in use if `evictable` tokens were evicted but for a prefix of
        `prefix_len`. Holes are no obstacle: what is left moves together.
        """
        page = self.page_tokens
        return _live(self._kv) - evictable // page + -(-prefix_len // page)


def _live(end: Any) -> int:
    """Pages in use."""
    return int(end.allocated_count()) // int(end.page_size)


def _bytes(end: Any) -> int:
    """Bytes of a page of KV, or of a state."""
    return int(end.entry_bytes_per_page)
