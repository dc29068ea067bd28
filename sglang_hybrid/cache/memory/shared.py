"""KV and states in one memory, as our cache sees them: whose memory it is matters here only.

Line references are to sglang 0.5.23, mem_cache/.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from sglang_hybrid.core.memory.account import MemoryKind

if TYPE_CHECKING:
    from sglang_hybrid.core.memory.account import SharedBytes


class SharedMemory(ABC):
    """What is asked of a memory that KV and states share. Ours is SGLang's allocator at the same
    time (`allocators.OneMemoryKV`), SGLang's unified pool has one beside its allocator.
    """

    @property
    @abstractmethod
    def account(self) -> SharedBytes:
        """Who has which bytes."""

    @property
    @abstractmethod
    def token_bytes(self) -> int:
        """Bytes of one token's KV."""

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes of one state."""

    @property
    @abstractmethod
    def granule_tokens(self) -> int:
        """Tokens of one granule: KV of so many tokens changes hands together."""

    @property
    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes that KV can have without an eviction."""

    @abstractmethod
    def held_granules(self, evictable: int, prefix_len: int) -> int:
        """Granules of KV that would stay in use if `evictable` tokens were evicted but for a prefix
        of `prefix_len`.
        """


def shared_memory(allocator: Any) -> SharedMemory | None:
    """The memory behind SGLang's allocator of KV; None if KV has a pool of its own."""
    from sglang.srt.mem_cache.allocator import unified_mamba

    from sglang_hybrid.cache.memory.unified import UnifiedMemory

    if isinstance(allocator, SharedMemory):
        return allocator
    if isinstance(allocator, unified_mamba.UnifiedMambaTokenToKVPoolAllocator):
        return UnifiedMemory(allocator)
    return None


class SharedBudget(PrefillBudget):
    """Room for the requests of one prefill batch, in tokens: what is free, and what may be evicted
    of either kind.

    Args:
        sglangs: the budget that SGLang's adder has made, of KV alone; its offsets go on.
    """

    def __init__(self, memory: SharedMemory, sglangs: PrefillBudget) -> None:
        super().__init__(sglangs.allocator, sglangs.tree_cache)
        self.memory = memory
        self.total_offset = sglangs.total_offset
        self.current_offset = sglangs.current_offset

    def _available_and_evictable(self) -> int:
        """A granule may stay partly used, so one is left out."""
        memory = self.memory
        tokens = (memory.free_bytes + self._evictable_states()) // memory.token_bytes
        return int(tokens + self.tree_cache.full_evictable_size()) - memory.granule_tokens + 1

    def slots_as_tokens(self, slots: int) -> int:
        """Tokens whose bytes hold so many states."""
        return -(-slots * self.memory.state_bytes // self.memory.token_bytes)

    def slots_fit(self, slots: int, prefix_len: int) -> bool:
        """Whether there would be room for so many states beside what has been admitted, if all were
        evicted that may be, but for a prefix of `prefix_len` tokens. A state needs whole granules.
        """
        memory, account = self.memory, self.memory.account
        held = memory.held_granules(int(self.tree_cache.full_evictable_size()), prefix_len)
        states = account.used[MemoryKind.STATES] + account.waste[MemoryKind.STATES]
        states -= self._evictable_states()
        room = account.budget - held * memory.granule_tokens * memory.token_bytes - states
        return bool(self.slots_as_tokens(slots) <= room // memory.token_bytes - self.total_offset)

    def _evictable_states(self) -> int:
        """Bytes of states that nobody holds."""
        return int(self.tree_cache.mamba_evictable_size()) * self.memory.state_bytes
