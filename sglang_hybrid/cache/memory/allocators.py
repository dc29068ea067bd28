"""SGLang's allocators on the ids of one memory: what they can give depends on the other kind.

Line references are to sglang 0.5.23, mem_cache/allocator/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.utils import get_num_new_pages, rank_consensus_checker

from sglang_hybrid.core.memory.account import Account, MemoryKind

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache

    from sglang_hybrid.cache.memory.granules import GranulePool, Ids


def _take(pool: GranulePool, count: int) -> Ids | None:
    """`pool.take`. Where SGLang's checker of ranks is switched on, it ends a server whose ranks get
    different ids, or the same ids after different moves.
    """
    ids = pool.take(count)
    if rank_consensus_checker.enabled():
        moved = [pool.account.moved[kind] for kind in MemoryKind]
        taken = None if ids is None else ids.tolist()
        rank_consensus_checker.assert_same(
            "%s takes %s, after %s bytes have moved", pool.kind.value, taken, moved
        )
    return ids


class OneMemoryBudget(PrefillBudget):  # type: ignore[misc]
    """Room for the requests of one prefill batch, in tokens: what is free, and what may be evicted
    of either kind.
    """

    allocator: OneMemoryKV

    def _available_and_evictable(self) -> int:
        """A granule may stay partly used, so one is left out."""
        allocator = self.allocator
        tokens = (allocator.free_bytes + self._evictable_states()) // allocator.token_bytes
        return int(tokens + self.tree_cache.full_evictable_size()) - allocator.granule_tokens + 1

    def slots_as_tokens(self, slots: int) -> int:
        """Tokens whose bytes hold so many states."""
        return -(-slots * self.allocator.states.granule_bytes // self.allocator.token_bytes)

    def slots_fit(self, slots: int, prefix_len: int) -> bool:
        """Whether there would be room for so many states beside what has been admitted, if all were
        evicted that may be, but for a prefix of `prefix_len` tokens. A state needs whole granules:
        one that a running request uses a row of counts as all in use.
        """
        allocator, account = self.allocator, self.allocator.account
        granule = allocator.granule_tokens
        held = allocator.pool.in_use * self.page_size - self.tree_cache.full_evictable_size()
        held = min(allocator.pool.used_granules, int(held) + -(-prefix_len // granule))
        states = account.used[MemoryKind.STATES] + account.waste[MemoryKind.STATES]
        states -= self._evictable_states()
        room = account.budget - held * allocator.pool.granule_bytes - states
        return bool(
            self.slots_as_tokens(slots) <= room // allocator.token_bytes - self.total_offset
        )

    def _evictable_states(self) -> int:
        """Bytes of states that nobody holds."""
        return int(self.tree_cache.mamba_evictable_size()) * self.allocator.states.granule_bytes


class OneMemoryKV(BaseTokenToKVPoolAllocator):  # type: ignore[misc]
    """What both allocators of KV share.

    pool: ids of pages. states: the pool of the other kind.
    """

    pool: GranulePool
    states: GranulePool

    @property
    def account(self) -> Account:
        """The shared account."""
        return self.pool.account

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV."""
        return self.pool.id_bytes // int(self.page_size)

    @property
    def granule_tokens(self) -> int:
        """Tokens of one granule."""
        return self.pool.per_granule * int(self.page_size)

    @property
    def free_bytes(self) -> int:
        """Free bytes, and those of free rows in granules that are partly used."""
        return self.account.free + self.pool.loose * self.pool.id_bytes

    @property
    def size(self) -> int:
        """Tokens in use and available: it changes with what the states take."""
        return (self.pool.in_use + self.pool.available) * int(self.page_size)

    @size.setter
    def size(self, size: int) -> None:
        """SGLang's constructor sets the number of ids, which is the pool's."""

    def available_size(self) -> int:
        return self.pool.available * int(self.page_size)

    def get_all_free_pages(self) -> torch.Tensor:
        """Every page that is not in use, whether there are bytes for it or not. With these, SGLang
        looks for pages that are free twice, or free and in use (invariant_checker.py).
        """
        return torch.from_numpy(self.pool.free_ids())

    def create_prefill_budget(
        self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0
    ) -> PrefillBudget:
        if not tree_cache.supports_mamba():
            return super().create_prefill_budget(
                tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens
            )
        return OneMemoryBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def verify_byte_accounting(self) -> list[str]:
        """What is wrong with the account; nothing, if all is well (base.py)."""
        try:
            self.account.check()
            self.pool.check()
            self.states.check()
        except AssertionError as error:
            return [str(error)]
        return []


class OneMemoryTokens(OneMemoryKV, TokenToKVPoolAllocator):  # type: ignore[misc]
    """KV ids where a page is one token."""

    def __init__(
        self, pool: GranulePool, states: GranulePool, dtype: torch.dtype, kvcache: KVCache
    ) -> None:
        self.pool, self.states = pool, states
        TokenToKVPoolAllocator.__init__(self, pool.ids, dtype, "cpu", kvcache, need_sort=False)

    def clear(self) -> None:
        self.pool.clear()
        self.free_pages = torch.empty(0, dtype=torch.int64)
        self.free_group = None

    def alloc(self, need_size: int) -> torch.Tensor | None:
        ids = _take(self.pool, need_size)
        return None if ids is None else torch.from_numpy(ids)

    def free(self, free_index: torch.Tensor) -> None:
        if self.free_group is not None:
            super().free(free_index)
        else:
            self.pool.put(free_index.to(torch.int64).numpy())


class OneMemoryPages(OneMemoryKV, PagedTokenToKVPoolAllocator):  # type: ignore[misc]
    """KV ids with pages of several tokens. SGLang's methods place a request's tokens on
    `free_pages`; here these are the pages that were taken for that call.
    """

    def __init__(
        self,
        pool: GranulePool,
        states: GranulePool,
        page_size: int,
        dtype: torch.dtype,
        kvcache: KVCache,
    ) -> None:
        self.pool, self.states = pool, states
        PagedTokenToKVPoolAllocator.__init__(
            self, pool.ids * page_size, page_size, dtype, "cpu", kvcache, need_sort=False
        )

    def clear(self) -> None:
        self.pool.clear()
        super().clear()
        self.free_pages = torch.empty(0, dtype=torch.int64)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if not self._take(need_size // self.page_size):
            return None
        ids: torch.Tensor | None = super().alloc(need_size)
        return ids

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        if not self._take(num_new_pages):
            return None
        ids: torch.Tensor | None = super().alloc_extend(
            prefix_lens,
            prefix_lens_cpu,
            seq_lens,
            seq_lens_cpu,
            last_loc,
            extend_num_tokens,
            num_new_pages,
        )
        return ids

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)
        if not self._take(pages):
            return None
        ids: torch.Tensor | None = super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)
        return ids

    def _take(self, pages: int) -> bool:
        ids = _take(self.pool, int(pages))
        if ids is None:
            return False
        self.free_pages = torch.from_numpy(ids)
        return True

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        self.pool.put(torch.cat(page_ids).to(torch.int64).numpy())


class OneMemorySlots(MambaSlotAllocator):  # type: ignore[misc]
    """Slots of states. `available_size` counts ids, which SGLang's checks add up to the pool's
    size; `schedulable_available_size` is what can be had (mamba.py).
    """

    def __init__(self, pool: GranulePool) -> None:
        self.pool = pool
        super().__init__(pool.ids, "cpu")

    def clear(self) -> None:
        self.pool.clear()

    @property
    def free_slots(self) -> torch.Tensor:
        """Every slot that is not in use, whether there are bytes for it or not."""
        return torch.from_numpy(self.pool.free_ids())

    def available_size(self) -> int:
        return self.pool.ids - self.pool.in_use

    def schedulable_available_size(self) -> int:
        return self.pool.available

    def alloc_group_begin(self, num_reqs: int) -> None:
        """Nothing is set aside for requests that wait: it would take bytes from the KV."""

    def _do_alloc(self, need_size: int) -> torch.Tensor | None:
        ids = _take(self.pool, need_size)
        return None if ids is None else torch.from_numpy(ids)

    def free(self, free_index: torch.Tensor) -> None:
        self.pool.put(free_index.to(torch.int64).numpy())
