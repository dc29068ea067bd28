"""KV and states in one memory, as the cache sees them, whoever gives the rows out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_hybrid.core.memory.account import MemoryAccount


class SharedMemory(ABC):
    """A memory that KV and states share. Ours is SGLang's allocator at the same time
    (`allocators.OneMemoryKV`), SGLang's unified pool has one beside its allocator.
    """

    @property
    @abstractmethod
    def account(self) -> MemoryAccount:
        """The account of which kind has which bytes."""

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
