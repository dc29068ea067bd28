"""What requests that wait cost the scheduler: SGLang's two cores and ours, on the same requests.

    python scripts/bench.py rounds [--waiting 128] [--running 8] [--tokens 1024 16384 131072]
    python scripts/bench.py rounds --memory 1000000

SGLang's `lpm` ranking and prefill adders on its pools with tiny tensors, no model,
one process, one thread. Of each prompt the first half is cached and shared by 16 requests, the rest
is its own. In a round all that wait are ranked and one is admitted, prefilled, answered and
published. So a request is looked up as often as it waits for rounds. `--memory`: what a tree of so
many nodes takes of the machine's memory, each cache in a process of its own.

Microseconds of processor time: `first` and `again`, the first two look-ups of a request (medians);
`rank`, ranking all that wait (median); `admit`, look-up and admission (median); `publish`, prompt
and answer into the tree (median); `life`, all of these over all rounds, per request. `free`, freed
KV goes back to the pool, as in a server once per batch (median); `life` leaves it out. SGLang's own
allocator copies its list of free slots there (18 MB at 16,384 tokens), through the processor's
caches. So SGLang's cores are measured with it, and with what `cache/memory/freed_slots.py` makes of
it, which ours has. The least of five repetitions (`--repeat`): what else runs on the machine makes
all of it slower.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from array import array
from collections import defaultdict
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from scripts.bench.report import ROOT, Table, versions
from tests.cache.backends import options
from tests.cache.driver import Server, Sizes, build_cache
from tests.cache.shipped import shipped

CACHES: dict[str, tuple[str | None, str]] = {
    "SGLang, Python core": (None, "python"),
    "SGLang, Rust core": (None, "rust"),
    "ours, reuse": ("reuse", ""),
}
ALLOCATORS = {
    "SGLang's": shipped("sglang.srt.mem_cache.allocator.token", "TokenToKVPoolAllocator"),
    "patched": TokenToKVPoolAllocator,
}
RUNS = [
    (name, kind)
    for name, (policy, _) in CACHES.items()
    for kind in ALLOCATORS
    if policy is None or kind == "patched"
]
"""Caches and allocators; they are measured by turns."""
GROUP = 16
ANSWER = 8


def waiting_requests(server: Server, tokens: int, count: int) -> list[Any]:
    """Requests of so many tokens, of which the first half is cached and shared by GROUP of them."""
    groups, half, own = -(-count // GROUP), tokens // 2, 1 << 24
    for group in range(groups):
        server.serve(range(group * half, (group + 1) * half), [1] * ANSWER)
    requests = []
    for number in range(count):
        start, mine = number % groups * half, own + number * half
        prompt = array("q", [*range(start, start + half), *range(mine, mine + half)])
        requests.append(server.arrive(prompt))
    return requests


class Rounds:
    """One cache, the prompts that wait for it, and how long each part took (seconds)."""

    def __init__(
        self,
        policy: str | None,
        core: str,
        tokens: int,
        waiting: int,
        allocator: type = TokenToKVPoolAllocator,
    ) -> None:
        groups = -(-waiting // GROUP)
        self.sizes = Sizes(
            kv=(groups + waiting + 1) * (tokens + 2 * ANSWER),
            states=8 * waiting,
            rows=16,
            context=tokens + 4 * ANSWER,
        )
        how = None if policy is None else options(policy)
        cache = build_cache(self.sizes, how, tree_core=core, token_allocator=allocator)
        self.server = Server(cache, self.sizes)
        self.rank = SchedulePolicy("lpm", self.server.cache, False, False, False)
        self.times: dict[str, list[float]] = defaultdict(list)
        self.waiting = waiting_requests(self.server, tokens, waiting)

    def run(self, running: int) -> dict[str, float]:
        """Microseconds by what was done."""
        count = len(self.waiting)
        self.server.allocator.free_group_begin()
        for req in self.waiting[: count // 2]:
            for name in ("first", "again"):
                self._timed(name, lambda req=req: self.rank._compute_prefix_matches([req], None))
        at_once: list[Any] = []
        while self.waiting or at_once:
            if self.waiting and len(at_once) < running:
                self._timed("rank", lambda: self.rank.calc_priority(self.waiting))
                req = self.waiting.pop(0)
                admitted = self._timed("admit", lambda req=req: self._admit(req))
                assert admitted, "the pools are large enough for all"
                at_once.append(req)
            else:
                self._timed("publish", lambda: self._serve(at_once.pop(0)))
                self._timed("free", self.server.allocator.free_group_end)
                self.server.allocator.free_group_begin()
        self.server.allocator.free_group_end()
        shown = {name: 1e6 * median(times) for name, times in self.times.items()}
        once = sum(sum(self.times[name]) for name in ("rank", "admit", "publish"))
        return shown | {"life": 1e6 * once / count}

    def _admit(self, req: Any) -> bool:
        self.server.look_up(req)
        return self.server.try_to_add(req, [req, *self.waiting])

    def _serve(self, req: Any) -> None:
        while not self.server.prefill_step(req):
            pass
        self.server.decode(req, [1] * ANSWER)
        self.server.finish(req)

    def _timed(self, name: str, work: Any) -> Any:
        begin = time.thread_time()
        result = work()
        self.times[name].append(time.thread_time() - begin)
        return result


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--waiting", type=int, default=128)
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_024, 16_384, 131_072])
    parser.add_argument(
        "--repeat", type=int, default=5, help="the least of so many repetitions is shown"
    )
    parser.add_argument(
        "--profile", action="store_true", help="where ours spends its time, instead"
    )
    parser.add_argument("--memory", type=int, metavar="NODES", help="memory of a tree, instead")
    parser.add_argument("--tree", nargs=2, metavar="PART", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if args.tree is not None:
        measure_trees(args.tree[0], int(args.tree[1]))
        return
    if args.memory is not None:
        memory_table(args.memory)
        return
    if args.profile:
        profile(args.tokens[0], args.waiting, args.running)
        return
    print(f"{versions()}; {args.waiting} waiting, {args.running} running; ", end="")
    print("microseconds of processor time.\n")
    columns = ("first", "again", "rank", "admit", "publish", "life", "free")
    table = Table("cache", "allocator", "tokens", *columns, text=2)
    for tokens in args.tokens:
        found: dict[tuple[str, str], dict[str, float]] = {}
        for _ in range(args.repeat):
            for name, kind in RUNS:
                again = measure(name, kind, tokens, args.waiting, args.running)
                least = found.setdefault((name, kind), again)
                least.update({part: min(us, least[part]) for part, us in again.items()})
        for run, least in found.items():
            table.row(*run, f"{tokens:,}", *(f"{least[column]:,.0f}" for column in columns))


def measure(name: str, kind: str, tokens: int, waiting: int, running: int) -> dict[str, float]:
    """Microseconds by what was done, in one repetition."""
    policy, core = CACHES[name]
    gc.collect()
    rounds = Rounds(policy, core, tokens, waiting, ALLOCATORS[kind])
    gc.freeze()
    try:
        return rounds.run(running)
    finally:
        gc.unfreeze()


def profile(tokens: int, waiting: int, running: int) -> None:
    """Print what our layer does in all rounds, by its own time."""
    import cProfile
    import pstats

    rounds = Rounds("reuse", "", tokens, waiting)
    profiler = cProfile.Profile()
    profiler.runcall(rounds.run, running)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


SHORT, LONG, FEWER = 8, 520, 25_000
"""Tokens of a node; nodes of LONG tokens in a tree from which the bytes per token follow."""

PROMPTS = 150_000
"""In the history that is measured: more than fit."""


def memory_table(nodes: int) -> None:
    """Print bytes per node, per token, and of the history."""
    print(f"{versions()}; {nodes:,} nodes; bytes.\n")
    table = Table("cache", "per node", "per token", "history")
    for name in CACHES:
        program = [sys.executable, str(ROOT / "scripts" / "bench.py"), "rounds"]
        command = [*program, "--tree", name, str(nodes)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        table.row(name, *out.splitlines()[-1].split())


def measure_trees(name: str, nodes: int) -> None:
    """Print the cells of one row. What a tree takes is what the process grows by; no tree is freed
    before the end.
    """
    policy, core = CACHES[name]
    how = None if policy is None else options(policy, "all")
    process, kept, grown = psutil.Process(), [], []
    for count, tokens in ((FEWER, SHORT), (FEWER, LONG), (nodes, SHORT)):
        sizes = Sizes(kv=64, states=64, rows=4, context=256)
        cache: Any = build_cache(sizes, how, tree_core=core)
        kept.append(cache)
        gc.collect()
        before = process.memory_info().rss
        fill(cache, count, tokens)
        gc.collect()
        grown.append(process.memory_info().rss - before)
    per_token = (grown[1] - grown[0]) / (FEWER * (LONG - SHORT))
    cells = f"{grown[2] / nodes - SHORT * per_token:,.0f}", f"{per_token:.1f}"
    before = process.memory_info().rss
    remember(cache)
    gc.collect()
    print(*cells, f"{process.memory_info().rss - before:,}" if policy else "-")


def fill(cache: Any, nodes: int, tokens: int) -> None:
    """Leaves of `tokens` tokens, each with a state."""
    shadow_tree = getattr(cache, "shadow_tree", None)
    for number in range(nodes):
        start = number * tokens
        if shadow_tree is not None:
            shadow_tree.arrived(None)
        cache.insert(
            InsertParams(
                key=RadixKey(array("q", range(start, start + tokens))),
                value=torch.arange(start, start + tokens),
                mamba_value=torch.tensor([number]),
            )
        )
        if shadow_tree is not None and number % 500 == 0:  # as evictions do
            for pool in shadow_tree.pools:
                pool.cheapest()


def remember(cache: Any) -> None:
    """Prompts of SHORT tokens with answers as long in the history, if there is one."""
    shadow_tree = getattr(cache, "shadow_tree", None)
    if shadow_tree is None:
        return
    for number in range(PROMPTS):
        shadow_tree.arrived(None)
        tokens = np.arange(2 * number * SHORT, 2 * (number + 1) * SHORT)
        shadow_tree.history.observe(tokens, SHORT, shadow_tree.clock)
