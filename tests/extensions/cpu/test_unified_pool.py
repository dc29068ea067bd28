"""SGLang's unified pool on the CPU platform: its two kernels, and who is let in."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from sglang_hybrid.extensions.cpu.ops import unified_pool


def places(page: int, given: list[int], pages: list[int]) -> list[int]:
    """The slots of tokens that follow one another on these pages."""
    return [page * pages[at // page] + at % page for at in given]


@pytest.mark.parametrize("page", [4, 16])
def test_tokens_are_placed_behind_those_that_are_there(page: int) -> None:
    """Pages of one token need neither kernel."""
    rng = random.Random(page)
    before = [0, 1, page, 7 * page - 1, 3]
    after = [length + rng.randrange(1, 3 * page + 2) for length in before]
    own = [rng.sample(range(100 * k, 100 * k + 90), 40) for k in range(1, len(before) + 1)]
    held = [-(-length // page) for length in before]
    wanted = [-(-length // page) for length in after]
    free = [page_ for k, pages in enumerate(own) for page_ in pages[held[k] : wanted[k]]]
    last = [
        places(page, [n - 1], pages)[0] if n else -1 for n, pages in zip(before, own, strict=True)
    ]
    out = torch.empty(sum(after) - sum(before), dtype=torch.int64)
    unified_pool.place_extended[(len(before),)](
        torch.tensor(before),
        torch.tensor(after),
        torch.tensor(last),
        torch.tensor(free),
        out,
        8,
        page,
    )
    expected = [
        place
        for first, end, pages in zip(before, after, own, strict=True)
        for place in places(page, list(range(first, end)), pages)
    ]
    assert out.tolist() == expected
    decoded = torch.empty(len(before), dtype=torch.int64)
    free = [pages[n // page] for n, pages in zip(after, own, strict=True) if n % page == 0]
    last = [places(page, [n - 1], pages)[0] for n, pages in zip(after, own, strict=True)]
    unified_pool.place_decoded[(len(before),)](
        torch.tensor(after) + 1, torch.tensor(last), torch.tensor(free), decoded, 8, page
    )
    assert decoded.tolist() == [
        places(page, [n], pages)[0] for n, pages in zip(after, own, strict=True)
    ]


def test_only_the_unified_pool_is_let_in() -> None:
    refused: list[str] = []

    def refuse(platform: Any, *, subsystem: str) -> None:
        refused.append(subsystem)

    reject = unified_pool.rejected(refuse)
    reject(None, subsystem="the unified memory pool (--enable-unified-memory)")
    reject(None, subsystem="another pool")
    assert refused == ["another pool"]


def test_backends_of_sglang_stay() -> None:
    assert unified_pool.with_ours(frozenset({"triton"})) == {"triton", "hybrid_cpu"}
