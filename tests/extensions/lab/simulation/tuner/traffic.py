"""Traffic in phases: few-shot templates, where knowing what returns is best; documents that are
asked about in turn for a while and then never again, where recency is; conversations in turn, of
which the longer ones are worth more; documents that are asked about at once or never again, where
length misleads.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.server_settings import Serving, Split
from sglang_hybrid.core.traffic.recorder import FinishedRequest, RequestWindow
from sglang_hybrid.core.traffic.requests import Request, make_request

COST = CostModel(linear=1_000, quadratic=3, windows=(), kv_bytes_per_token=8, state_bytes=4_096)
POOLS = Split(kv_tokens=3_200, slots=6)


def run(name: int, length: int) -> list[int]:
    """Tokens that no other name has."""
    return [name * 1_000 + k for k in range(length)]


def templates(count: int, seed: int = 0) -> list[list[int]]:
    """Every third prompt is of one of two templates, in turn; the others never come back."""
    source = random.Random(seed)
    names = [i // 3 % 2 if i % 3 == 0 else 10 + source.randrange(5_000) for i in range(count)]
    return [run(name, 100) + run(10_000 + 1_000 * seed + i, 20) for i, name in enumerate(names)]


def fashions(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts about three documents in turn, five about each, then about three others."""
    names = [100 + i // 15 * 3 + i % 3 for i in range(count)]
    return [run(name, 200) + run(20_000 + 1_000 * seed + i, 12) for i, name in enumerate(names)]


def conversations(count: int, seed: int = 0) -> list[list[int]]:
    """Five conversations in turn; one in ten turns is the last, and another one begins."""
    source = random.Random(seed)
    said = [run(100 + k, 40) for k in range(5)]
    prompts = []
    for i in range(count):
        at = i % 5
        said[at] = said[at] + run(20_000 + 1_000 * seed + i, 60)
        prompts.append(said[at])
        if len(said[at]) > 500 or source.random() < 0.1:
            said[at] = run(40_000 + 1_000 * seed + i, 40)
    return prompts


def bursts(count: int, seed: int = 0) -> list[list[int]]:
    """Documents that are asked about once, or five times on end, and never again."""
    source = random.Random(seed)
    names = [name for name in range(count) for _ in range(source.choice((1, 1, 5)))]
    return [
        run(1_000 + name, 150) + run(20_000 + 1_000 * seed + i, 12)
        for i, name in enumerate(names[:count])
    ]


def requests(prompts: Sequence[list[int]]) -> list[Request]:
    return [
        make_request(i, 0, i + 1.0, prompt, run(30_000 + i, 5)) for i, prompt in enumerate(prompts)
    ]


def window(prompts: Sequence[list[int]]) -> RequestWindow:
    return RequestWindow(requests(prompts), COST, POOLS, len(prompts) // 2, 16, Serving())


def records(prompts: Sequence[list[int]], hit_rate: float = 0.0) -> list[FinishedRequest]:
    return [
        FinishedRequest(
            r.tokens,
            r.input_len,
            r.arrival,
            int(hit_rate * r.input_len),
            POOLS,
        )
        for r in requests(prompts)
    ]
