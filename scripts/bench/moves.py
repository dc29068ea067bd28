"""What moving bytes between KV and states costs in one memory.

The time of a decoding step in which bytes move beside one in which none do; and bytes per second
that go back to the system and are written again, without a server.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from scripts.bench.one_memory import CONCURRENCY, flags_of_split
from scripts.bench.report import ROOT, Table, positive
from scripts.bench.servers import (
    arrivals,
    at_once,
    flush,
    greedy,
    hybrid_cache,
    post,
    vocabulary_of,
)
from sglang_hybrid.cache.memory.pages import PAGE, Reserved
from sglang_hybrid.models import ensure_default_model
from sglang_hybrid.models.tokenizer import FIRST_TEXT_ID
from sglang_hybrid.platforms.sizing import model_sizes
from sglang_hybrid.serving.server_process import ServerProcess


def gaps_of(url: str, prompts: Sequence[list[int]], tokens: int) -> list[float]:
    """Seconds between the tokens of answers that are decoded side by side, after the first three of
    each.
    """
    seen = at_once(lambda prompt: arrivals(url, greedy(prompt, tokens)), prompts)
    return [now - before for one in seen for (before, _), (now, _) in pairwise(one[3:])]


def decoding_steps(flags: Sequence[str], high: int, tokens: int) -> None:
    """Long answers to short prompts, while the memory is full of states, so that granules of KV
    take the bytes of evicted ones; then in an emptied cache, where KV keeps as many bytes.
    """
    random_ = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [random_.randrange(FIRST_TEXT_ID, high) for _ in range(length)]

    table = Table("while", "steps", "P50, ms", "P99, ms", "moves", "MB moved to KV", "ms a move")
    with ServerProcess(flags, directory=ROOT) as server:
        for turn in range(4):
            full = turn % 2 == 0
            if full:
                for _ in range(120):
                    post(server.url, "/generate", greedy(prompt(40), 2))
            else:
                flush(server.url)
            before = hybrid_cache(server.url)["memory"]
            gaps = np.array(gaps_of(server.url, [prompt(8) for _ in range(CONCURRENCY)], tokens))
            after = hybrid_cache(server.url)["memory"]
            moves = after["moves"] - before["moves"]
            moved = (after["moved_to"]["kv"] - before["moved_to"]["kv"]) / 1e6
            each = 1e3 * (after["move_seconds"] - before["move_seconds"]) / max(1, moves)
            middle, last = 1e3 * np.percentile(gaps, [50, 99])
            table.row(
                *("bytes move" if full else "none move", f"{len(gaps):,}"),
                *(f"{middle:.2f}", f"{last:.2f}", moves, f"{moved:.1f}", f"{each:.3f}"),
            )


def gigabytes_per_second(size: int, run: int) -> tuple[float, float]:
    """Memory given back in runs of `run` bytes, and memory that is written again after it."""
    with Reserved() as reserved:
        rows = torch.zeros(size // run, run, dtype=torch.uint8)
    plane = reserved.plane(rows, 0)
    rows.fill_(1)
    begin = time.perf_counter()
    for row in range(0, size // run):
        plane.give_back(row, row + 1)
    given = time.perf_counter()
    rows.fill_(1)
    written = time.perf_counter()
    return size / (given - begin) / 1e9, size / (written - given) / 1e9


def speeds(size: int = 256 << 20) -> None:
    """Bytes given back and taken again, by how much each call gives back."""
    print()
    table = Table(
        *("pages of a call", "given back, GB/s", "microseconds a call", "written again, GB/s"),
        text=0,
    )
    for pages in (1, 16, 256):
        back, again = gigabytes_per_second(size, pages * PAGE)
        table.row(pages, f"{back:.1f}", f"{pages * PAGE / back / 1e3:.2f}", f"{again:.1f}")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=float, default=25.0, help="of KV and states")
    parser.add_argument("--tokens", type=positive, default=3_000, help="of each timed answer")


def run(options: argparse.Namespace) -> None:
    model = ensure_default_model()
    sizes = model_sizes(str(model), "float32")
    assert sizes is not None
    flags, _, _ = flags_of_split(model, sizes, options.megabytes, None)
    decoding_steps(flags, vocabulary_of(model), options.tokens)
    speeds()
