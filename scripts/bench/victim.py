"""Time of one update and of one victim choice, per policy and number of candidates.

Every round evicts a victim, puts a new leaf in its place and hits one other node, as a full cache
does. A choice includes describing what changed since the last one.
"""

from __future__ import annotations

import argparse
import random
import time

import numpy as np

from scripts.bench.report import Table
from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.node_tree import NodeTree
from sglang_hybrid.core.records.nodes import Kind
from sglang_hybrid.core.victims.eviction import make_policy
from sglang_hybrid.core.victims.pool import Pool, Scarce

CASES = [
    ("lru", {}),
    ("marconi", {"alpha": 0.0}),
    ("marconi", {"alpha": 1.0}),
    ("seglen", {}),
    ("gdsf", {}),
    ("reuse", {}),
]


def measure(name: str, options: dict[str, float], count: int, rounds: int) -> list[float]:
    """Victim P50, victim P99 and update P50 in microseconds; an update is an add and a hit."""
    rng = random.Random(1)
    tree = NodeTree()
    policy = make_policy(name, **options)
    if policy.history is not None:  # something to tell positions apart by
        index = policy.history.index
        for _ in range(400):
            slot = index.open(rng.randrange(252), 0.0)
            index.on_return(slot, rng.expovariate(1 / 60))
        index.rebuild()
    pool = Pool(Scarce.SHARED, CostModel.paper_7b(), policy, tree.clock)
    tree.listen(pool)
    leaves = []

    def add(key: int) -> None:
        tree.clock.advance(tree.clock.stamp + rng.expovariate(2))
        node = tree.add(tree.root, key, rng.randrange(16, 30_000))
        tree.give_state(node, Kind.TAIL)
        leaves.append(node)

    for key in range(count):
        add(key)
    pool.cheapest()
    victims, updates = [], []
    for key in range(count, count + rounds):
        begin = time.perf_counter()
        victim = pool.victim()
        middle = time.perf_counter()
        assert victim is not None
        tree.remove(victim)
        leaves[leaves.index(victim) if count < 2000 else 0] = leaves[-1]
        start = time.perf_counter()
        add(key)
        node = rng.choice(leaves)
        if node.parent is not None:
            tree.hit(node)
        updates.append(time.perf_counter() - start)
        victims.append(middle - begin)
    p50, p99 = np.percentile(victims, [50, 99]) * 1e6
    return [p50, p99, float(np.median(updates)) * 1e6]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=1_000)


def run(args: argparse.Namespace) -> None:
    print("Microseconds.\n")
    table = Table("policy", "candidates", "victim P50", "victim P99", "update P50")
    for name, options in CASES:
        label = name + "".join(f" {value:g}" for value in options.values())
        for size in args.sizes:
            p50, p99, update = measure(name, options, size, args.rounds)
            table.row(label, f"{size:,}", f"{p50:.1f}", f"{p99:.1f}", f"{update:.1f}")
