"""A server whose second rank has another clock, measures other speeds, and draws other numbers."""

import random
import time
from typing import Any

from sglang_hybrid import launch_server  # first: its hook must see every import of SGLang

# isort: split
from sglang.srt.runtime_context import get_parallel

from sglang_hybrid.cache.queue.clock import StepClock
from sglang_hybrid.cache.radix_cache import HybridRadixCache
from sglang_hybrid.core.tiers.rates import Rates

usual_start = HybridRadixCache.__init__
usual_clock = StepClock.__init__
usual_prefill, usual_load, usual_write = (
    Rates.observe_prefill,
    Rates.observe_load,
    Rates.observe_write,
)


def second() -> int:
    """1 on the second rank, 0 on the first."""
    return int(get_parallel().tp_rank)


def start(self: HybridRadixCache, *args: Any, **named: Any) -> None:
    random.seed(second())
    usual_start(self, *args, **named)


def clock(self: StepClock, *_: Any, **__: Any) -> None:
    """The clock of a host that started a month before, and goes twice as fast."""
    ahead = second()
    usual_clock(self, lambda: (1 + ahead) * time.perf_counter() + ahead * 30 * 86_400)


def prefill(self: Rates, flops: float, seconds: float) -> None:
    usual_prefill(self, flops, seconds * 50 ** second())


def load(self: Rates, tier: Any, nbytes: int, seconds: float) -> None:
    usual_load(self, tier, nbytes, seconds * 50 ** second())


def write(self: Rates, tier: Any, nbytes: int, seconds: float) -> None:
    usual_write(self, tier, nbytes, seconds * 50 ** second())


HybridRadixCache.__init__ = start  # type: ignore[method-assign]
StepClock.__init__ = clock  # type: ignore[method-assign]
Rates.observe_prefill, Rates.observe_load, Rates.observe_write = prefill, load, write  # type: ignore[method-assign]

if __name__ == "__main__":
    launch_server.command()
