"""Freed KV slots wait until an allocation runs short, and nobody can tell."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator, token  # noqa: E402

from sglang_hybrid.cache.memory import freed_slots  # noqa: E402
from tests.cache.shipped import shipped  # noqa: E402

Shipped = shipped(token.__name__, "TokenToKVPoolAllocator")
SLOTS = 100


def build(kind: Any, need_sort: bool = False, slots: int = SLOTS) -> Any:
    return kind(slots, torch.bfloat16, "cpu", None, need_sort)


class Both:
    """Our allocator and SGLang's, under the same calls. Slots that are freed are a view of
    a tensor that is overwritten afterwards, as rows of requests are.
    """

    def __init__(self, need_sort: bool, seed: int) -> None:
        self.ours, self.theirs = build(TokenToKVPoolAllocator, need_sort), build(Shipped, need_sort)
        self.random = random.Random(seed)
        self.held: list[Any] = []

    def alloc(self) -> None:
        count = self.random.randint(0, SLOTS // 2)
        ours, theirs = self.ours.alloc(count), self.theirs.alloc(count)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.tolist() == theirs.tolist()
            self.held.append(ours.clone())

    def free(self) -> None:
        for name in ("free", "free_page_ids"):
            if self.held:
                slots = self.held.pop(self.random.randrange(len(self.held)))
                kept = self.random.randint(0, len(slots))
                if kept:
                    self.held.append(slots[:kept].clone())
                for allocator in (self.ours, self.theirs):
                    getattr(allocator, name)(slots[kept:])
                slots.zero_()

    def group(self) -> None:
        """Frees of one batch."""
        for allocator in (self.ours, self.theirs):
            allocator.free_group_begin()
        for _ in range(self.random.randint(0, 3)):
            self.free()
            self.alloc()
        for allocator in (self.ours, self.theirs):
            allocator.free_group_end()

    def clear(self) -> None:
        self.held = []
        for allocator in (self.ours, self.theirs):
            allocator.clear()

    def check(self) -> None:
        assert self.ours.available_size() == self.theirs.available_size()
        free = self.ours.get_all_free_pages().tolist()
        assert free == self.theirs.get_all_free_pages().tolist()
        assert len(free) == self.ours.available_size()
        taken = sorted(slot for held in self.held for slot in held.tolist())
        assert sorted(free + taken) == list(range(1, SLOTS + 1))


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("at_most", [1, 3, 1_000])
def test_slots_are_handed_out_as_sglang_does(
    need_sort: bool, at_most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freed_slots, "MAX_STAGED_TENSORS", at_most)
    for seed in range(8):
        both = Both(need_sort, seed)
        calls = [both.alloc] * 6 + [both.free] * 5 + [both.group] * 3
        for _ in range(200):
            both.random.choice(calls if both.random.random() < 0.99 else [both.clear])()
            both.check()
            assert len(both.ours.staged_pages) <= at_most


def test_a_free_leaves_the_list_of_free_slots_alone() -> None:
    """Each kind fails this as SGLang ships it: it copies the list."""
    allocator = build(TokenToKVPoolAllocator, slots=1_000)
    taken = allocator.alloc(600)
    free = allocator.free_pages
    for start in range(0, 600, 100):
        allocator.free(taken[start : start + 100])
    assert allocator.free_pages is free
    assert allocator.available_size() == 1_000
    assert allocator.alloc(401).tolist() == [*range(601, 1_001), 1]  # it runs short
    assert not allocator.staged_pages
