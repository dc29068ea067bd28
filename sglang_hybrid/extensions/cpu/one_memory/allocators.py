"""SGLang's allocators on the ids of one memory: what they can give depends on the other kind.

Line references are to sglang 0.5.23, mem_cache/allocator/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.utils import get_num_new_pages, rank_consensus_checker

from sglang_hybrid.core.memory.account import Account, MemoryKind
from sglang_hybrid.core.memory.shared import SharedMemory

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache

    from sglang_hybrid.extensions.cpu.one_memory.granules import GranulePool, Ids


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


class OneMemoryKV(SharedMemory, BaseTokenToKVPoolAllocator):
    """The common part of both allocators of KV.

    pool: ids of pages. states: the pool of the other kind.
    """

    pool: GranulePool
    states: GranulePool

    @property
    def account(self) -> Account:
        return self.pool.account

    @property
    def token_bytes(self) -> int:
        return self.pool.id_bytes // int(self.page_size)

    @property
    def state_bytes(self) -> int:
        return self.states.granule_bytes

    @property
    def granule_tokens(self) -> int:
        return self.pool.per_granule * int(self.page_size)

    @property
    def free_bytes(self) -> int:
        """Free bytes, and those of free rows in granules that are partly used."""
        return self.account.free + self.pool.loose * self.pool.id_bytes

    def held_granules(self, evictable: int, prefix_len: int) -> int:
        """A granule that a running request uses a row of counts as all in use."""
        held = self.pool.in_use * int(self.page_size) - evictable
        return min(self.pool.used_granules, held + -(-prefix_len // self.granule_tokens))

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

    def verify_byte_accounting(self) -> list[str]:
        """Errors in the account; none, if all is well (base.py)."""
        try:
            self.account.check()
            self.pool.check()
            self.states.check()
        except AssertionError as error:
            return [str(error)]
        return []


class OneMemoryTokens(OneMemoryKV, TokenToKVPoolAllocator):
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


class OneMemoryPages(OneMemoryKV, PagedTokenToKVPoolAllocator):
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


class OneMemorySlots(MambaSlotAllocator):
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
