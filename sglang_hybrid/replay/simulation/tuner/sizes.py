"""What recent requests hit with another size of memory.

It is apart from who asks (explain/page/what_if.py): a worker imports what its work is in, and to
import SGLang takes many times as long as the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from sglang_hybrid.core.server_settings import Budget, Split
from sglang_hybrid.core.systems import Spec
from sglang_hybrid.replay.simulation.tuner.candidates import counted_hits
from sglang_hybrid.replay.simulation.tuner.recorder import RequestWindow


def hit_share(
    window: RequestWindow, job: tuple[Spec, float], count_step: Callable[[], None]
) -> float:
    """Share of the prompt tokens of the requests that count, which are hit under a policy with so
    many times the memory.
    """
    spec, times = job
    hits = counted_hits(replace(window, budget=scaled(window.budget, times)), spec)
    return int(hits.sum()) / max(1, window.counted_tokens)


def scaled(budget: Budget, times: float) -> Budget:
    """`budget`, `times` as large; None without a bound."""
    if budget is None or math.isinf(times):
        return None
    if isinstance(budget, Split):
        return Split(int(budget.kv_tokens * times), int(budget.slots * times))
    return int(budget * times)
