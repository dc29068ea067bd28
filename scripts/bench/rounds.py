"""The benchmark `rounds`: scheduler time for waiting requests, with tiny tensors and no model."""

from __future__ import annotations

import gc
import time
from array import array
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Annotated, Any

import torch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

from scripts.bench.report import Table, seconds_of, versions
from sglang_hybrid.serving.config import HybridConfig
from tests.cache.backends import options
from tests.cache.driver import Server, Sizes, build_cache
from tests.cache.shipped import shipped

CACHES: dict[str, tuple[HybridConfig | None, str]] = {
    "SGLang, Python core": (None, "python"),
    "SGLang, Rust core": (None, "rust"),
    "ours, reuse": (options("reuse"), ""),
}

ALLOCATORS = {
    "SGLang's": shipped("sglang.srt.mem_cache.allocator.token", "TokenToKVPoolAllocator"),
    "patched": TokenToKVPoolAllocator,
}

RUNS = [
    (name, kind)
    for name, (how, _) in CACHES.items()
    for kind in ALLOCATORS
    if how is None or kind == "patched"
]
"""Caches and allocators; they are measured by turns."""

GROUP = 16

ANSWER = 8


class Waiting:
    """A cache, and `count` requests of `tokens` tokens that wait for it. Of each prompt the first
    half is cached and shared by GROUP requests. admitted: how many the pools have room for.
    """

    def __init__(
        self,
        how: HybridConfig | None,
        core: str,
        tokens: int,
        count: int,
        *,
        admitted: int,
        allocator: type,
    ) -> None:
        groups, half, own = -(-count // GROUP), tokens // 2, 1 << 24
        sizes = Sizes(
            kv=(groups + admitted + 1) * (tokens + 2 * ANSWER),
            states=8 * count,
            rows=16,
            context=tokens + 4 * ANSWER,
        )
        cache = build_cache(sizes, how, tree_core=core, token_allocator=allocator)
        self.server = Server(cache, sizes)
        self.policy = SchedulePolicy("lpm", cache, False, False, False)
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        for group in range(groups):
            self.server.serve(range(group * half, (group + 1) * half), [1] * ANSWER)
        self.queue = []
        for number in range(count):
            start, mine = number % groups * half, own + number * half
            prompt = array("q", [*range(start, start + half), *range(mine, mine + half)])
            self.queue.append(self.server.arrive(prompt))

    def rank(self) -> None:
        self.policy.calc_priority(self.queue)

    def serve_all(self, running: int) -> dict[str, float]:
        """Microseconds by what was done."""
        count = len(self.queue)
        self.server.allocator.free_group_begin()
        for req in self.queue[: count // 2]:
            for name in ("first", "again"):
                self._timed(name, partial(self.policy._compute_prefix_matches, [req], None))
        at_once: list[Any] = []
        while self.queue or at_once:
            if self.queue and len(at_once) < running:
                self._timed("rank", self.rank)
                at_once.append(self.queue.pop(0))
                self._timed("admit", lambda: self._admit(at_once[-1]))
            else:
                self._timed("publish", lambda: self._serve(at_once.pop(0)))
                self._timed("free", self.server.allocator.free_group_end)
                self.server.allocator.free_group_begin()
        self.server.allocator.free_group_end()
        shown = {name: 1e6 * median(times) for name, times in self.times.items()}
        life = sum(sum(self.times[name]) for name in ("rank", "admit", "publish"))
        return shown | {"life": 1e6 * life / count}

    def _admit(self, req: Any) -> None:
        self.server.look_up(req)
        admitted = self.server.try_to_add(req, [req, *self.queue])
        assert admitted, "the pools are large enough for all"

    def _serve(self, req: Any) -> None:
        while not self.server.prefill_step(req):
            pass
        self.server.decode(req, [1] * ANSWER)
        self.server.finish(req)

    def _timed(self, name: str, work: Callable[[], object]) -> None:
        self.times[name].append(seconds_of(work, time.thread_time))


def one_repetition(name: str, kind: str, tokens: int, count: int, running: int) -> dict[str, float]:
    """Microseconds by what was done."""
    gc.collect()
    waiting = Waiting(*(*CACHES[name], tokens, count), admitted=count, allocator=ALLOCATORS[kind])
    gc.freeze()
    try:
        return waiting.serve_all(running)
    finally:
        gc.unfreeze()


def rounds(
    waiting: int = 128,
    running: int = 8,
    tokens: tuple[int, ...] = (1_024, 16_384, 131_072),
    repeat: Annotated[int, "the least of so many repetitions is shown"] = 5,
) -> None:
    """Scheduler time for waiting requests: SGLang's two tree cores and ours, on the same requests.

    SGLang's `lpm` ranking and prefill adders on its pools with tiny tensors, no model,
    one process, one thread. Of each prompt the first half is cached and shared by 16 requests, the
    rest is its own. In a round all that wait are ranked and one is admitted, prefilled, answered
    and published. So a request is looked up as often as it waits for rounds.

    Microseconds of processor time: `first` and `again`, the first two look-ups of a request
    (medians); `rank`, ranking all that wait (median); `admit`, look-up and admission (median);
    `publish`, prompt and answer into the tree (median); `life`, all of these over all rounds, per
    request. `free`, freed KV goes back to the pool, as in a server once per batch (median); `life`
    leaves it out. SGLang's own allocator copies its list of free slots there (18 MB at 16,384
    tokens), through the processor's caches. So SGLang's cores are measured with it, and with what
    `cache/memory/freed_slots.py` makes of it, which ours has. The least of five repetitions
    (`--repeat`): what else runs on the machine makes all of it slower.
    """
    torch.set_num_threads(1)
    print(f"{versions()}; {waiting} waiting, {running} running; microseconds of processor time.\n")
    columns = ("first", "again", "rank", "admit", "publish", "life", "free")
    table = Table("cache", "allocator", "tokens", *columns, text=2)
    for length in tokens:
        found: dict[tuple[str, str], dict[str, float]] = {}
        for _ in range(repeat):
            for run in RUNS:
                times = one_repetition(*run, length, waiting, running)
                least = found.setdefault(run, times)
                least.update({part: min(us, least[part]) for part, us in times.items()})
        for run, least in found.items():
            table.row(*run, f"{length:,}", *(f"{least[column]:,.0f}" for column in columns))
