"""The room of one memory for a prefill batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from sglang_hybrid.core.memory.account import MemoryKind

if TYPE_CHECKING:
    from sglang_hybrid.cache.memory.unified import UnifiedMemory


class SharedBudget(PrefillBudget):
    """Room for the requests of one prefill batch, in tokens: what is free, and what may be evicted
    of either kind.

    Args:
        sglangs: the budget that SGLang's adder has made, of KV alone; its offsets go on.
    """

    def __init__(self, memory: UnifiedMemory, sglangs: PrefillBudget) -> None:
        super().__init__(sglangs.allocator, sglangs.tree_cache)
        self.memory = memory
        self.total_offset = sglangs.total_offset
        self.current_offset = sglangs.current_offset

    def _available_and_evictable(self) -> int:
        """A page may stay partly used, so one is left out."""
        memory = self.memory
        tokens = (memory.free_bytes + self._evictable_states()) // memory.token_bytes
        return int(tokens + self.tree_cache.full_evictable_size()) - memory.page_tokens + 1

    def slots_as_tokens(self, slots: int) -> int:
        """Tokens whose bytes hold so many states."""
        return -(-slots * self.memory.state_bytes // self.memory.token_bytes)

    def slots_fit(self, slots: int, prefix_len: int) -> bool:
        """True if there would be room for so many states beside what has been admitted, if all were
        evicted that may be, but for a prefix of `prefix_len` tokens. A state needs whole pages.
        """
        memory, account = self.memory, self.memory.account
        held = memory.held_pages(int(self.tree_cache.full_evictable_size()), prefix_len)
        states = account.used[MemoryKind.STATES] - self._evictable_states()
        room = account.budget - held * memory.page_tokens * memory.token_bytes - states
        return bool(self.slots_as_tokens(slots) <= room // memory.token_bytes - self.total_offset)

    def _evictable_states(self) -> int:
        """Bytes of states that nobody holds."""
        return int(self.tree_cache.mamba_evictable_size()) * self.memory.state_bytes
