"""Traffic in two phases: few-shot templates, where knowing what returns is best, and documents that
are asked about in turn for a while and then never again, where recency is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from sglang_hybrid.core.cost import CostModel
from sglang_hybrid.replay.served import Serving
from sglang_hybrid.replay.simulator import Split
from sglang_hybrid.replay.traces import Request, make_request
from sglang_hybrid.tuner.recorder import Finished
from sglang_hybrid.tuner.window import Window

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


def requests(prompts: Sequence[list[int]]) -> list[Request]:
    return [
        make_request(i, 0, i + 1.0, prompt, run(30_000 + i, 5)) for i, prompt in enumerate(prompts)
    ]


def window(prompts: Sequence[list[int]]) -> Window:
    return Window(requests(prompts), COST, POOLS, len(prompts) // 2, 16, Serving())


def records(prompts: Sequence[list[int]], hit_rate: float = 0.0) -> list[Finished]:
    return [
        Finished(
            r.tokens,
            r.input_len,
            r.arrival,
            int(hit_rate * r.input_len),
            POOLS.kv_tokens,
            POOLS.slots,
        )
        for r in requests(prompts)
    ]
