"""What the length of a context costs on the CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Annotated, Any

from scripts.bench.commands import Count
from scripts.bench.report import Table
from scripts.bench.servers import LAUNCHERS, SCRATCH, Client
from sglang_hybrid.extensions.cpu.models import build_tiny_model
from sglang_hybrid.serving.server_process import ServerProcess

FEW, MANY = 10, 1000
"""New tokens behind a cached context."""

FEW_TOGETHER, TOGETHER = 8, 16
"""Sequences of a decode batch."""

STATES = 80
"""State slots of the servers that `cold` compares."""

NEIGHBOUR_CONTEXT = 2000
WAITING = {
    "asleep": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
    "a little in a loop, then asleep (our default)": {},
    "in a loop": {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "30000000000"},
}
"""How OpenMP's threads wait, and the environment for it."""


def round_of_prefills(client: Client, contexts: Sequence[int]) -> dict[tuple[int, int], float]:
    """Seconds to the first token, by cached tokens and new ones."""
    found = {(0, MANY): client.first_token(client.tokens(MANY), 0)}
    for length in contexts:
        context = client.tokens(length)
        found[0, length] = client.first_token(context, 0)
        for new, times in ((FEW, 2), (MANY, 1)):
            seconds = [
                client.first_token(context + client.tokens(new), length - 1) for _ in range(times)
            ]
            found[length, new] = median(seconds)
    return found


def decode_steps(client: Client, context: int, together: int) -> float:
    """Seconds of a decode step behind cached contexts."""
    prompts = [client.tokens(context) for _ in range(together)]
    for prompt in prompts:
        client.first_token(prompt, 0)
    return median(client.step(prompts) for _ in range(3))


def lengths(contexts: Sequence[int], rounds: int, flags: Sequence[str]) -> None:
    """Print the tables of contexts."""
    with ServerProcess(flags) as server:
        client = Client(server.url)
        round_of_prefills(client, contexts)
        seen = [round_of_prefills(client, contexts) for _ in range(rounds)]
        batches = {
            (count, context): decode_steps(client, context, count)
            for context in (100, 1000, 6000)
            for count in (1, TOGETHER)
        }
    found = {key: median(one[key] for one in seen) for key in seen[0]}
    first, cold = contexts[0], found[0, MANY]
    table = Table(
        *("context", "cold, ms", "cold, tokens/s", f"hit + {FEW}, ms", f"against {first}"),
        *(f"hit + {MANY:,}, ms", f"against {MANY:,} cold"),
        text=0,
    )
    for n in contexts:
        few, many = found[n, FEW], found[n, MANY]
        table.row(
            *(f"{n:,}", f"{1e3 * found[0, n]:,.0f}", f"{n / found[0, n]:,.0f}"),
            *(f"{1e3 * few:.1f}", f"{few / found[first, FEW]:.2f}"),
            *(f"{1e3 * many:.0f}", f"{many / cold:.2f}"),
        )
    print(f"\n{MANY:,} tokens cold: {1e3 * cold:.0f} ms.\n")
    table = Table("sequences", "context", "decode step, ms", "against 100", text=0)
    for (count, context), step in sorted(batches.items()):
        against = f"{step / batches[count, 100]:.2f}"
        table.row(count, f"{context:,}", f"{1e3 * step:.1f}", against)


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """Another program that wants one core all the time."""
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        program.kill()
        program.wait()


def hits_and_steps(
    client: Client, context: list[int], rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of hits of a cached context, and of decode steps behind it."""
    hits = [
        client.first_token(context + client.tokens(FEW), len(context) - 1)
        for _ in range(8 * rounds)
    ]
    return hits, [client.step([context]) for _ in range(rounds)]


def crowded(rounds: int, flags: Sequence[str]) -> None:
    """Print the table of a busy neighbour."""
    compared = ("with a neighbour", "ratio", "worst")
    table = Table(
        *("threads wait", f"hit of {NEIGHBOUR_CONTEXT:,} + {FEW}, ms", *compared),
        *("decode step, ms", *compared),
    )
    for name, environment in WAITING.items():
        with ServerProcess(flags, environment=environment) as server:
            client = Client(server.url)
            context = client.tokens(NEIGHBOUR_CONTEXT)
            client.first_token(context, 0)
            hits_and_steps(client, context, rounds)
            alone = hits_and_steps(client, context, rounds)
            with busy_neighbour():
                crowd = hits_and_steps(client, context, rounds)
        cells = []
        for quiet, busy in zip(alone, crowd, strict=True):
            usual, slow = median(quiet), median(busy)
            cells += [f"{1e3 * usual:.1f}", f"{1e3 * slow:.1f}", f"{slow / usual:.1f}"]
            cells.append(f"{1e3 * max(busy):.0f}")
        table.row(name, *cells)


def contexts(
    *server_flags: Annotated[str, "flags for the server, after --"],
    contexts: tuple[int, ...] = (100, 1000, 4000, 8000, 16000),
    rounds: int = 5,
    neighbour: Annotated[bool, "measure beside a busy program"] = False,
) -> None:
    """What the length of a context costs on the CPU: hits, cold prefills and decode steps.

    Sends requests of random tokens to one server. In each round every context is prefilled cold,
    then asked twice with 10 new tokens behind it and once with 1,000; 1,000 tokens are prefilled
    cold, too. Then 16 sequences are decoded at once. Times are a client's, over HTTP.

    ``--neighbour`` measures something else: hits and decode steps while another program keeps one
    core busy, with OpenMP's threads waiting asleep (what the platform sets) and in a loop.
    """
    if neighbour:
        crowded(rounds, server_flags)
    else:
        lengths(contexts, rounds, server_flags)


def cold(
    lengths: tuple[int, ...] = (200, 500, 1000, 2000, 4000),
    rounds: Annotated[Count, "prompts of each length"] = 40,
    architecture: str = "nemotron-h",
    scale: Annotated[str, "of the model: tiny, or 100m"] = "tiny",
) -> None:
    """What a cold prompt and a decode step cost beside SGLang's own cache, on the same platform.

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
        *("--model-path", str(model), "--max-running-requests", str(FEW_TOGETHER)),
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
        for together in (1, FEW_TOGETHER):
            batches = [[clients[0].tokens(100) for _ in range(together)] for _ in prompts]
            compare(f"decode step of {together}", batches, Client.step)
