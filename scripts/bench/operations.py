"""The cache in one process, without a model: its operations, and its choice of victims."""

from __future__ import annotations

import gc
import random
import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey

from scripts.bench.report import Table, seconds_of, versions
from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.node_tree import NodeTree
from sglang_hybrid.core.records.nodes import Kind
from sglang_hybrid.core.victims.eviction import make_policy
from sglang_hybrid.core.victims.pool import Pool, Scarce
from tests.cache.backends import options
from tests.cache.driver import Server, Sizes, build_cache

BACKENDS: dict[str, tuple[str | None, str]] = {
    "SGLang, Python core": (None, "python"),
    "SGLang, Rust core": (None, "rust"),
    "ours, sglang-lru": ("sglang-lru", ""),
    "ours, marconi": ("marconi", ""),
    "ours, reuse": ("reuse", ""),
}
SHARED, OWN, GROUP = 64, 32, 16
LONGEST = 10.0
"""Seconds per operation; then fewer repeats must do."""


def prompt(number: int) -> array[int]:
    shared, own = number // GROUP * SHARED, 2**40 + number * OWN
    return array("q", [*range(shared, shared + SHARED), *range(own, own + OWN)])


class Bench:
    """One backend with `checkpoints` states in its tree."""

    def __init__(self, policy: str | None, core: str, checkpoints: int, repeats: int) -> None:
        room = 4 * repeats
        self.checkpoints = self.next = checkpoints
        sizes = Sizes(
            kv=(checkpoints + room) * (SHARED // GROUP + OWN + 1) + SHARED,
            states=checkpoints + room,
            rows=4,
            context=256,
        )
        how = None if policy is None else options(policy, "all")
        self.server = Server(build_cache(sizes, how, tree_core=core), sizes)
        self.cache: Any = self.server.cache
        self.random = random.Random(1)
        self.shadow_tree: Any = getattr(self.cache, "shadow_tree", None)  # SGLang's own has none
        for number in range(checkpoints):
            if self.shadow_tree is not None:
                self.shadow_tree.on_arrival(None)
            self.insert(number)()
        if self.shadow_tree is not None:
            self._learn(policy == "reuse")

    def _learn(self, returns: bool) -> None:
        """What a server does bit by bit: candidates are described, and returns observed."""
        for pool in self.shadow_tree.pools:
            pool.candidates()
        step = max(1, self.checkpoints // 500)
        for number in range(0, self.checkpoints if returns else 0, step):
            self.shadow_tree.on_arrival(None)
            self.shadow_tree.history.observe(prompt(number), SHARED + OWN, self.shadow_tree.clock)

    def insert(self, number: int | None = None) -> Callable[[], object]:
        """What a request does that hit the shared prefix, the first of its group excepted."""
        if number is None:
            number, self.next = self.next, self.next + 1
        tokens = prompt(number)
        hit = SHARED if number % GROUP else 0
        own = self.server.allocator.alloc(len(tokens) - hit)
        params = InsertParams(
            key=RadixKey(tokens),
            value=torch.cat([torch.zeros(hit, dtype=torch.int64), own]),  # the tree keeps its own
            prev_prefix_len=hit,
            mamba_value=self.server.pool.mamba_allocator.alloc(1),
        )
        return lambda: self.cache.insert(params)

    def match(self) -> float:
        """Seconds of the look-up of a new request, with the copy of its state prepared."""
        req = self.server.arrive([*prompt(self.random.randrange(self.checkpoints)), 7])
        req.full_untruncated_fill_ids = req.origin_input_ids
        key = RadixKey(req.origin_input_ids, limit=len(req.origin_input_ids) - 1)
        params = MatchPrefixParams(key=key, req=req, cow_mamba=True)
        seconds = seconds_of(lambda: self.cache.match_prefix(params))
        self.server.send_back(req)
        return seconds

    def after_a_match(self, work: Callable[[], object]) -> float:
        """Seconds of `work` where something has changed, as it does between two victims."""
        self.match()
        return seconds_of(work)

    def evict(self, kv: int, states: int) -> float:
        params = EvictParams(num_tokens=kv, mamba_num=states)
        return self.after_a_match(lambda: self.cache.evict(params))

    def choose(self, kind: str) -> float | None:
        """Seconds of the choice of a victim, without what SGLang does to evict it."""
        if self.shadow_tree is None:
            return None
        return self.after_a_match(getattr(self.shadow_tree, f"{kind}_victim"))


OPERATIONS: dict[str, Callable[[Bench], float | None]] = {
    "match": Bench.match,
    "insert": lambda bench: seconds_of(bench.insert()),
    "evict KV": lambda bench: bench.evict(1, 0),
    "evict state": lambda bench: bench.evict(0, 1),
    "choose KV": lambda bench: bench.choose("kv"),
    "choose state": lambda bench: bench.choose("state"),
}
MEASURED_FIRST = ("choose KV", "choose state", "match", "insert", "evict KV", "evict state")
"""Victims are chosen from the full tree, before others of them are evicted."""


def microseconds(work: Callable[[], float | None], repeats: int) -> str:
    """Median and P99 of `repeats` times, or of those that `LONGEST` allows; nothing without any."""
    times: list[float] = []
    deadline = time.perf_counter() + LONGEST
    while len(times) < repeats and time.perf_counter() <= deadline:
        seconds = work()
        if seconds is None:
            return ""
        times.append(1e6 * seconds)
    middle, high = np.percentile(times, (50, 99))
    return f"{middle:.0f} / {high:.0f}"


def cache(checkpoints: tuple[int, ...] = (100, 1_000, 10_000, 100_000), repeats: int = 200) -> None:
    """What one cache operation costs: SGLang's two cores and ours, on the same keys.

    SGLang's pools with tiny tensors, no model, one process, one thread. Every tree
    holds the same checkpoints: prompts of 96 tokens that share prefixes of 64 in groups of 16, each
    with a state at its end. `match` is the look-up of a new request with the copy of its state
    prepared, `insert` publishes a new prompt below a shared prefix, `evict KV` and `evict state`
    take one victim each.
    """
    torch.set_num_threads(1)
    print(f"{versions()}. Microseconds, median / P99 of {repeats} or what fits in 10 s.\n")
    table = Table("cache", "checkpoints", *OPERATIONS)
    for count in checkpoints:
        for name, (policy, core) in BACKENDS.items():
            gc.unfreeze()
            gc.collect()
            bench = Bench(policy, core, count, repeats)
            gc.freeze()
            found = {
                operation: microseconds(
                    lambda bench=bench, run=OPERATIONS[operation]: run(bench),  # type: ignore[misc]
                    min(repeats, count // 4),
                )
                for operation in MEASURED_FIRST
            }
            table.row(name, f"{count:,}", *(found[operation] for operation in OPERATIONS))
            del bench


CASES: tuple[tuple[str, dict[str, float]], ...] = (
    ("lru", {}),
    ("marconi", {"alpha": 0.0}),
    ("marconi", {"alpha": 1.0}),
    ("seglen", {}),
    ("gdsf", {}),
    ("reuse", {}),
)


def victim_and_update(
    name: str, how: dict[str, float], count: int, rounds: int
) -> tuple[float, float, float]:
    """Victim P50, victim P99 and update P50 in microseconds; an update is an add and a hit."""
    rng = random.Random(1)
    tree = NodeTree()
    policy = make_policy(name, **how)
    if policy.history is not None:  # something to tell positions apart by
        index = policy.history.index
        for _ in range(400):
            index.on_return(index.open(rng.randrange(252), 0.0), rng.expovariate(1 / 60))
        index.rebuild()
    pool = Pool(Scarce.SHARED, CostModel.paper_7b(), policy, tree.clock)
    tree.listen(pool)
    leaves = []

    def add(key: int) -> None:
        tree.clock.advance(tree.clock.stamp + rng.expovariate(2))
        node = tree.add(tree.root, key, rng.randrange(16, 30_000))
        tree.give_state(node, Kind.TAIL)
        leaves.append(node)

    def update(key: int) -> None:
        add(key)
        node = rng.choice(leaves)
        if node.parent is not None:
            tree.hit(node)

    for key in range(count):
        add(key)
    pool.cheapest()
    victims, updates = [], []
    for key in range(count, count + rounds):
        victims.append(seconds_of(pool.victim))
        chosen = pool.victim()
        assert chosen is not None
        tree.remove(chosen)
        leaves[leaves.index(chosen) if count < 2000 else 0] = leaves[-1]
        updates.append(seconds_of(lambda key=key: update(key)))  # type: ignore[misc]
    p50, p99 = 1e6 * np.percentile(victims, [50, 99])
    return p50, p99, 1e6 * float(np.median(updates))


def victim(sizes: tuple[int, ...] = (100, 1_000, 10_000, 100_000), rounds: int = 1_000) -> None:
    """Time of one update and of one victim choice, per policy and number of candidates.

    Every round evicts a victim, puts a new leaf in its place and hits one other node, as a full
    cache does. A choice includes describing what changed since the last one.
    """
    print("Microseconds.\n")
    table = Table("policy", "candidates", "victim P50", "victim P99", "update P50")
    for name, how in CASES:
        label = name + "".join(f" {value:g}" for value in how.values())
        for size in sizes:
            times = victim_and_update(name, how, size, rounds)
            table.row(label, f"{size:,}", *(f"{microseconds:.1f}" for microseconds in times))
