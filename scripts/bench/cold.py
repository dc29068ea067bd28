"""The benchmark `cold`: the cost of a cold prompt beside SGLang's own cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Annotated, Any

from scripts.bench.commands import Count
from scripts.bench.report import Table
from scripts.bench.servers import LAUNCHERS, SCRATCH, Client
from sglang_hybrid.extensions.cpu.models import build_tiny_model
from sglang_hybrid.serving.server_process import ServerProcess

TOGETHER = 8
"""Sequences of the larger decode batch."""

STATES = 80
"""State slots of each server."""


def cold(
    lengths: tuple[int, ...] = (200, 500, 1000, 2000, 4000),
    rounds: Annotated[Count, "prompts of each length"] = 40,
    architecture: str = "nemotron-h",
    scale: Annotated[str, "of the model: tiny, or 100m"] = "tiny",
) -> None:
    """The cost of a cold prompt and a decode step beside SGLang's own cache, on the same platform.

    Two servers of one model are up: SGLang's cache and ours. Each prompt of random tokens is
    asked of both, and each batch decoded by both, by turns one or the other first. The ratio is the
    median over prompts or batches; times are a client's, over HTTP, to the first token, or of a
    step. Both caches are filled before: memory that is written for the first time takes longer, and
    a cache that is in use evicts.
    """
    model = SCRATCH / f"cold-{architecture}-{scale}"
    if not model.exists():
        build_tiny_model(architecture, model, scale=scale)
    flags = [
        *("--model-path", str(model), "--max-running-requests", str(TOGETHER)),
        *("--max-total-tokens", "60000", "--max-mamba-cache-size", str(STATES)),
    ]
    with ServerProcess(flags, module=LAUNCHERS["SGLang"]) as own, ServerProcess(flags) as ours:
        clients = [Client(server.url) for server in (own, ours)]
        for client in clients:
            for _ in range(STATES):
                client.first_token(client.tokens(lengths[0]), 0)

        def compare(
            what: str, asked: Sequence[Any], measure: Callable[[Client, Any], float]
        ) -> None:
            """A row of the table, from measures of all that is asked."""
            times = []
            for number, each in enumerate(asked):
                seconds = [0.0, 0.0]
                for place in (0, 1) if number % 2 else (1, 0):
                    seconds[place] = measure(clients[place], each)
                times.append(seconds)
            # The first ones meet kernels that are not compiled for this length yet.
            medians = [1e3 * median(column) for column in zip(*times[3:], strict=True)]
            ratio = median(second / first for first, second in times[3:])
            table.row(what, *(f"{each:.1f}" for each in medians), f"{ratio:.3f}")

        table = Table("what", "SGLang, ms", "ours, ms", "ratio")
        for length in lengths:
            prompts = [clients[0].tokens(length) for _ in range(rounds + 3)]
            compare(f"cold prompt of {length:,}", prompts, lambda to, it: to.first_token(it, 0))
        for together in (1, TOGETHER):
            batches = [[clients[0].tokens(100) for _ in range(together)] for _ in prompts]
            compare(f"decode step of {together}", batches, Client.step)
