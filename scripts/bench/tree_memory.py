"""What a tree of many nodes takes of the machine's memory."""

from __future__ import annotations

import gc
import subprocess
import sys
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from scripts.bench.report import ROOT, Table, versions
from sglang_hybrid.serving.config import HybridConfig
from tests.cache.backends import options
from tests.cache.driver import Sizes, build_cache

SHORT, LONG, FEWER = 8, 520, 25_000
"""Tokens of a node; nodes of LONG tokens in a tree from which the bytes per token follow."""

CACHES: dict[str, tuple[HybridConfig | None, str]] = {
    "SGLang, Python core": (None, "python"),
    "SGLang, Rust core": (None, "rust"),
    "ours, reuse": (options("reuse"), ""),
}


def leaf(start: int, tokens: int, number: int) -> InsertParams:
    """A prompt of new tokens with a state at its end."""
    return InsertParams(
        key=RadixKey(array("q", range(start, start + tokens))),
        value=torch.arange(start, start + tokens),
        mamba_value=torch.tensor([number]),
    )


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
    how, core = CACHES[name]
    how = how and options("reuse", "all")
    kept, grown = [], []
    for count, tokens in ((FEWER, SHORT), (FEWER, LONG), (nodes, SHORT)):
        sizes = Sizes(kv=64, states=64, rows=4, context=256)
        cache: Any = build_cache(sizes, how, tree_core=core)
        kept.append(cache)
        grown.append(growth(lambda c=cache, n=count, t=tokens: fill(c, n, t)))  # type: ignore[misc]
    per_token = (grown[1] - grown[0]) / (FEWER * (LONG - SHORT))
    cells = f"{grown[2] / nodes - SHORT * per_token:,.0f}", f"{per_token:.1f}"
    print(*cells, f"{growth(lambda: remember(cache)):,}" if how else "-")


def growth(work: Callable[[], object]) -> int:
    """Bytes that the process grows by."""
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    work()
    gc.collect()
    return int(process.memory_info().rss - before)


def fill(cache: Any, nodes: int, tokens: int) -> None:
    """Leaves of `tokens` tokens, each with a state."""
    shadow_tree = getattr(cache, "shadow_tree", None)
    for number in range(nodes):
        if shadow_tree is not None:
            shadow_tree.on_arrival(None)
        cache.insert(leaf(number * tokens, tokens, number))
        if shadow_tree is not None and number % 500 == 0:  # as evictions do
            for pool in shadow_tree.pools:
                pool.cheapest()


def remember(cache: Any) -> None:
    """Prompts of SHORT tokens with answers as long in the history."""
    shadow_tree = cache.shadow_tree
    for number in range(PROMPTS):
        shadow_tree.on_arrival(None)
        tokens = np.arange(2 * number * SHORT, 2 * (number + 1) * SHORT)
        shadow_tree.history.observe(tokens, SHORT, shadow_tree.clock)
