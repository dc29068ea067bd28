"""What a round of the scheduler costs while many requests wait: SGLang's `lpm` and our window.

    python scripts/bench.py schedule-round [--tokens 16384] [--waiting 128 1000]

SGLang's pools with tiny tensors, no model, one process, one thread. Of each prompt the first half
is cached and shared by 16 requests. A round is what comes before the first request is tried:
SGLang's `calc_priority`, and the prefill adder, in which ours has the queue arranged. SGLang's
`lpm` is first-come with more than 128 waiting; then it does not look at them.

Milliseconds of processor time, medians of 20 rounds: `again`, with requests that were looked at
before; `tree changed`, after another prompt was stored; `first`, the first round of all, once.
"""

from __future__ import annotations

import argparse
import gc
import time
from array import array
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from scripts.bench.report import Table, versions
from scripts.bench.rounds import ANSWER, GROUP, waiting_requests
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import Schedule
from tests.cache.driver import Server, Sizes, build_cache

ROUNDS = 20
WINDOW = HybridConfig(hybrid_schedule=Schedule.WINDOW)
CACHES: dict[str, tuple[HybridConfig | None, str, str]] = {
    "SGLang, Python core, lpm": (None, "python", "lpm"),
    "SGLang, Rust core, lpm": (None, "rust", "lpm"),
    "ours, lpm": (HybridConfig(), "", "lpm"),
    "ours, window": (WINDOW, "", "fcfs"),
}


class Waiting:
    """A cache, and requests of `tokens` tokens that wait for it."""

    def __init__(
        self, options: HybridConfig | None, core: str, policy: str, tokens: int, waiting: int
    ) -> None:
        groups, half = -(-waiting // GROUP), tokens // 2
        sizes = Sizes(
            kv=(groups + 4) * (half + 2 * ANSWER) + 64 * ROUNDS,
            states=8 * groups + 64,
            rows=16,
            context=tokens + 4 * ANSWER,
        )
        self.server = Server(build_cache(sizes, options, tree_core=core), sizes)
        self.policy = SchedulePolicy(policy, self.server.cache, False, False, False)
        self.queue = waiting_requests(self.server, tokens, waiting)

    def round(self) -> float:
        """Milliseconds of processor time."""
        begin = time.thread_time()
        self.policy.calc_priority(self.queue)
        self.server._adder(self.queue)
        return 1e3 * (time.thread_time() - begin)

    def change(self, number: int) -> None:
        """The tree gets another leaf with a state."""
        start = (1 << 28) + ANSWER * number
        self.server.cache.insert(
            InsertParams(
                key=RadixKey(array("q", range(start, start + ANSWER))),
                value=torch.arange(ANSWER),
                mamba_value=torch.tensor([number]),
            )
        )


def rounds(waiting: Waiting, between: Callable[[int], Any] | None = None) -> float:
    """The median of ROUNDS rounds."""
    times = []
    for number in range(ROUNDS):
        if between is not None:
            between(number)
        times.append(waiting.round())
    return median(times)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=16_384, help="of each prompt")
    parser.add_argument("--waiting", type=int, nargs="+", default=[128, 1_000])


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    print(f"{versions()}; prompts of {options.tokens:,} tokens; milliseconds of processor time.\n")
    table = Table("order", "waiting", "first", "again", "tree changed")
    for name, (how, core, policy) in CACHES.items():
        for count in options.waiting:
            gc.collect()
            waiting = Waiting(how, core, policy, options.tokens, count)
            gc.freeze()
            first = waiting.round()
            again, changed = rounds(waiting), rounds(waiting, waiting.change)
            gc.unfreeze()
            table.row(name, f"{count:,}", *(f"{ms:.2f}" for ms in (first, again, changed)))
