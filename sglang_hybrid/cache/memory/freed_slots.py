"""SGLang's allocator of single tokens, without a copy of all free slots at every free.

SGLang appends freed slots to the tensor of all free ones, which copies 8 bytes for each slot of the
pool. Here they wait in a list until an allocation runs short; slots are handed out in the same
order.
"""

from __future__ import annotations

from typing import Any

import torch

MAX_STAGED_TENSORS = 1024
"""Freed tensors that wait at most; then they are joined."""


def with_freed_slots(sglangs: Any) -> type:
    """A class derived from SGLang's `TokenToKVPoolAllocator`, which takes its name."""

    class FreedSlots(sglangs):
        staged_pages: list[torch.Tensor]
        num_staged_pages: int

        def clear(self) -> None:
            super().clear()
            self.staged_pages = []
            self.num_staged_pages = 0

        def available_size(self) -> int:
            return self.free_pages.numel() + self.num_staged_pages

        def get_all_free_pages(self) -> torch.Tensor:
            return torch.cat((self.free_pages, *self.staged_pages))

        def merge_and_sort_free(self) -> None:
            if not self.staged_pages:
                return
            self.free_pages = self.get_all_free_pages()
            if self.need_sort:
                self.free_pages, _ = torch.sort(self.free_pages)
            self.staged_pages = []
            self.num_staged_pages = 0

        def alloc(self, need_size: int) -> torch.Tensor | None:
            if need_size > self.free_pages.numel():
                self.merge_and_sort_free()
            taken: torch.Tensor | None = super().alloc(need_size)
            return taken

        def free(self, free_index: torch.Tensor) -> None:
            if self.free_group is not None or free_index.numel() == 0:
                super().free(free_index)
                return
            # A copy, which the caller cannot change any more.
            self.staged_pages.append(self._copy_for_free_group(free_index))
            self.num_staged_pages += free_index.numel()
            if len(self.staged_pages) > MAX_STAGED_TENSORS:
                self.staged_pages = [torch.cat(self.staged_pages)]

    FreedSlots.__name__ = sglangs.__name__
    FreedSlots.__qualname__ = sglangs.__qualname__
    return FreedSlots
