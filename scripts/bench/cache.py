"""What one cache operation costs: SGLang's two cores and ours, on the same keys.

    python scripts/bench.py cache [--checkpoints 100 1000 10000 100000] [--repeats 200]

SGLang's pools with tiny tensors, no model, one process, one thread. Every tree
holds the same checkpoints: prompts of 96 tokens that share prefixes of 64 in groups of 16, each
with a state at its end. `match` is the look-up of a new request with the copy of its state
prepared, `insert` publishes a new prompt below a shared prefix, `evict KV` and `evict state` take
one victim each.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from array import array
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey

from scripts.bench.report import Table, versions
from tests.cache.backends import options
from tests.cache.driver import Server, Sizes, build_cache

BACKENDS: dict[str, tuple[str | None, str]] = {
    "SGLang, Python core": (None, "python"),
    "SGLang, Rust core": (None, "rust"),
    "ours, sglang-lru": ("sglang-lru", ""),
    "ours, marconi": ("marconi", ""),
    "ours, reuse": ("reuse", ""),
}
OPERATIONS = ("match", "insert", "evict KV", "evict state")
SHARED, OWN, GROUP = 64, 32, 16
LONGEST = 10.0  # seconds per operation; then fewer repeats must do


def prompt(number: int) -> array[int]:
    shared, own = number // GROUP * SHARED, 2**40 + number * OWN
    return array("q", [*range(shared, shared + SHARED), *range(own, own + OWN)])


class Bench:
    """One backend with `checkpoints` states in its tree."""

    def __init__(self, policy: str | None, core: str, checkpoints: int, repeats: int) -> None:
        room = 4 * repeats
        self.checkpoints = checkpoints
        self.sizes = Sizes(
            kv=(checkpoints + room) * (SHARED // GROUP + OWN + 1) + SHARED,
            states=checkpoints + room,
            rows=4,
            context=256,
        )
        how = None if policy is None else options(policy, "all")
        self.server = Server(build_cache(self.sizes, how, tree_core=core), self.sizes)
        self.cache: Any = self.server.cache
        self.shadow_tree: Any = getattr(self.cache, "shadow_tree", None)  # SGLang's own has none
        self.random = random.Random(1)
        self.next = 0
        shadow_tree = self.shadow_tree
        while self.next < checkpoints:
            if shadow_tree is not None:
                shadow_tree.arrived(None)
            self.insert(self.next)
            self.next += 1
        if shadow_tree is not None:  # a server does this bit by bit, whenever something goes
            for pool in shadow_tree.pools:
                pool.candidates()
        if shadow_tree is not None and policy == "reuse":  # what requests would have taught it
            for number in range(0, checkpoints, max(1, checkpoints // 500)):
                shadow_tree.arrived(None)
                shadow_tree.history.observe(prompt(number), SHARED + OWN, shadow_tree.clock)

    def insert(self, number: int, timed: list[float] | None = None) -> None:
        """What a request does that hit the shared prefix, the first of its group excepted."""
        tokens = prompt(number)
        hit = SHARED if number % GROUP else 0
        own = self.server.allocator.alloc(len(tokens) - hit)
        params = InsertParams(
            key=RadixKey(tokens),
            value=torch.cat([torch.zeros(hit, dtype=torch.int64), own]),  # the tree keeps its own
            prev_prefix_len=hit,
            mamba_value=self.server.pool.mamba_allocator.alloc(1),
        )
        begin = time.perf_counter()
        self.cache.insert(params)
        if timed is not None:
            timed.append(time.perf_counter() - begin)

    def run(self, operation: str, repeats: int) -> list[float]:
        times: list[float] = []
        deadline = time.perf_counter() + LONGEST
        for _ in range(repeats):
            if time.perf_counter() > deadline:
                break
            if operation == "match":
                self._match(times)
            elif operation == "insert":
                self.insert(self.next, times)
                self.next += 1
            else:
                # Something changes between two victims, as it does in a server.
                self._match([])
                kv = operation == "evict KV"
                params = EvictParams(num_tokens=int(kv), mamba_num=int(not kv))
                begin = time.perf_counter()
                self.cache.evict(params)
                times.append(time.perf_counter() - begin)
        return times

    def _match(self, times: list[float]) -> None:
        req = self.server.arrive([*prompt(self.random.randrange(self.checkpoints)), 7])
        req.full_untruncated_fill_ids = req.origin_input_ids
        key = RadixKey(req.origin_input_ids, limit=len(req.origin_input_ids) - 1)
        params = MatchPrefixParams(key=key, req=req, cow_mamba=True)
        begin = time.perf_counter()
        self.cache.match_prefix(params)
        times.append(time.perf_counter() - begin)
        self.server.send_back(req)


def victim_times(bench: Bench, repeats: int) -> dict[str, list[float]]:
    """Only the choice of a victim, without what SGLang does to evict it."""
    times: dict[str, list[float]] = {"KV": [], "state": []}
    shadow_tree = bench.shadow_tree
    choose: list[tuple[str, Callable[[], Any]]] = [
        ("KV", shadow_tree.kv_victim),
        ("state", shadow_tree.state_victim),
    ]
    for _ in range(repeats):
        bench._match([])
        for name, victim in choose:
            begin = time.perf_counter()
            victim()
            times[name].append(time.perf_counter() - begin)
    return times


def show(times: list[float]) -> str:
    values = torch.tensor(times, dtype=torch.float64) * 1e6
    return f"{values.median():.0f} / {values.quantile(0.99):.0f}"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoints", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=200)


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    print(f"{versions()}. Microseconds, median / P99 of {args.repeats} or what fits in 10 s.\n")
    table = Table("cache", "checkpoints", *OPERATIONS, "choose KV", "choose state")
    for checkpoints in args.checkpoints:
        for name, (policy, core) in BACKENDS.items():
            gc.unfreeze()
            gc.collect()
            repeats = min(args.repeats, checkpoints // 4)
            bench = Bench(policy, core, checkpoints, args.repeats)
            gc.freeze()
            cells = ["", ""]
            if bench.shadow_tree is not None:
                chosen = victim_times(bench, repeats)
                cells = [show(chosen["KV"]), show(chosen["state"])]
            cells = [show(bench.run(operation, repeats)) for operation in OPERATIONS] + cells
            table.row(name, f"{checkpoints:,}", *cells)
            del bench
