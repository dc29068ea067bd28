"""What requests that wait cost the scheduler: SGLang's two cores and ours, on the same requests.

    python scripts/bench.py rounds [--waiting 128] [--running 8] [--tokens 1024 16384 131072]

SGLang's `lpm` ranking and prefill adders on its pools with tiny tensors, no model,
one process, one thread. Of each prompt the first half is cached and shared by 16 requests, the rest
is its own. In a round all that wait are ranked and one is admitted, prefilled, answered and
published. So a request is looked up as often as it waits for rounds. Microseconds: `first` and
`again`, the first two look-ups of a request (medians); `rank`, ranking all that wait (median);
`admit`, look-up and admission (median); `publish`, prompt and answer into the tree (median);
`life`, all of these over all rounds, per request.
"""

from __future__ import annotations

import argparse
import gc
import platform
import time
from array import array
from collections import defaultdict
from statistics import median
from typing import Any

import torch
from sglang.srt.managers.schedule_policy import SchedulePolicy

from scripts.bench.report import Table
from tests.cache.backends import options
from tests.cache.driver import Server, Sizes, build_cache

CACHES: dict[str, tuple[str | None, str]] = {
    "SGLang, Python core": (None, "python"),
    "SGLang, Rust core": (None, "rust"),
    "ours, reuse": ("reuse", ""),
}
GROUP = 16
ANSWER = 8


class Rounds:
    """One cache, the prompts that wait for it, and how long each part took (seconds)."""

    def __init__(self, policy: str | None, core: str, tokens: int, waiting: int) -> None:
        groups = -(-waiting // GROUP)
        self.sizes = Sizes(
            kv=(groups + waiting + 1) * (tokens + 2 * ANSWER),
            states=8 * waiting,
            rows=16,
            context=tokens + 4 * ANSWER,
        )
        how = None if policy is None else options(policy)
        self.server = Server(build_cache(self.sizes, how, tree_core=core), self.sizes)
        self.rank = SchedulePolicy("lpm", self.server.cache, False, False, False)
        self.times: dict[str, list[float]] = defaultdict(list)
        half = tokens // 2
        for group in range(groups):
            self.server.serve(range(group * half, (group + 1) * half), [1] * ANSWER)
        own = 1 << 24
        self.waiting = []
        for number in range(waiting):
            start = number % groups * half
            mine = own + number * half
            prompt = array("q", [*range(start, start + half), *range(mine, mine + half)])
            self.waiting.append(self.server.arrive(prompt))

    def run(self, running: int) -> dict[str, float]:
        """Microseconds by what was done."""
        count = len(self.waiting)
        for req in self.waiting[: count // 2]:
            for name in ("first", "again"):
                self._timed(name, lambda req=req: self.rank._compute_prefix_matches([req], None))
        at_once: list[Any] = []
        while self.waiting or at_once:
            if self.waiting and len(at_once) < running:
                self._timed("rank", lambda: self.rank.calc_priority(self.waiting))
                req = self.waiting.pop(0)
                admitted = self._timed("admit", lambda req=req: self.server.admit(req))
                assert admitted, "the pools are large enough for all"
                at_once.append(req)
            else:
                self._timed("publish", lambda: self._serve(at_once.pop(0)))
        shown = {name: 1e6 * median(times) for name, times in self.times.items()}
        once = sum(sum(self.times[name]) for name in ("rank", "admit", "publish"))
        return shown | {"life": 1e6 * once / count}

    def _serve(self, req: Any) -> None:
        while not self.server.prefill_step(req):
            pass
        self.server.decode(req, [1] * ANSWER)
        self.server.finish(req)

    def _timed(self, name: str, work: Any) -> Any:
        begin = time.perf_counter()
        result = work()
        self.times[name].append(time.perf_counter() - begin)
        return result


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--waiting", type=int, default=128)
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_024, 16_384, 131_072])
    parser.add_argument(
        "--profile", action="store_true", help="where ours spends its time, instead"
    )


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if args.profile:
        profile(args.tokens[0], args.waiting, args.running)
        return
    print(f"Python {platform.python_version()}, torch {torch.__version__}; ", end="")
    print(f"{args.waiting} waiting, {args.running} running; microseconds.\n")
    names = ("first", "again", "rank", "admit", "publish", "life")
    table = Table("cache", "tokens", *names)
    for tokens in args.tokens:
        for name, (policy, core) in CACHES.items():
            gc.collect()
            rounds = Rounds(policy, core, tokens, args.waiting)
            gc.freeze()
            found = rounds.run(args.running)
            gc.unfreeze()
            table.row(name, f"{tokens:,}", *(f"{found[column]:,.0f}" for column in names))


def profile(tokens: int, waiting: int, running: int) -> None:
    """Print what our layer does in all rounds, by its own time."""
    import cProfile
    import pstats

    rounds = Rounds("reuse", "", tokens, waiting)
    profiler = cProfile.Profile()
    profiler.runcall(rounds.run, running)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
