#!/usr/bin/env python3
"""What the length of a context costs on the CPU: hits, cold prefills and decode steps.

    python scripts/bench_contexts.py [--contexts 100 1000 4000 8000 16000] [--rounds 5]
                                     [--neighbour] [-- server flags]

Sends requests of random tokens to one server. In each round every context is prefilled cold, then
asked twice with 10 new tokens behind it and once with 1,000; 1,000 tokens are prefilled cold, too.
Then 16 sequences are decoded at once. Times are a client's, over HTTP.

``--neighbour`` measures something else: hits and decode steps while another program keeps one core
busy, with OpenMP's threads waiting asleep (what the platform sets) and in a loop.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import requests

from scripts.bench_server import machine
from sglang_hybrid.server_process import ServerFailed, ServerProcess

FEW, MANY = 10, 1000
"""New tokens behind a cached context."""

TOGETHER = 16
"""Sequences of a decode batch."""

STEPS = 128
"""Tokens of an answer when decoding is measured."""

NEIGHBOUR_CONTEXT = 2000
WAITING = {
    "asleep": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
    "a little in a loop, then asleep (our default)": {},
    "in a loop": {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "30000000000"},
}
"""How OpenMP's threads wait, and the environment for it."""


class NoHit(RuntimeError):
    """A request that should have found its context in the cache did not."""


class NotTogether(RuntimeError):
    """Sequences that should have been decoded in one batch were not."""


class Client:
    """Requests of random tokens; no two have the same unless one continues the other."""

    def __init__(self, url: str, seed: int = 0) -> None:
        self._url = url
        self._random = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(300, 32_000) for _ in range(count)]

    def first_token(self, prompt: list[int], cached: int) -> float:
        """Seconds until the first token; raises `NoHit` if fewer than ``cached`` were cached."""
        begin = time.perf_counter()
        response = requests.post(self._url + "/generate", json=_body(prompt, 1), timeout=600)
        seconds = time.perf_counter() - begin
        response.raise_for_status()
        found = response.json()["meta_info"]["cached_tokens"]
        if found < cached:
            raise NoHit(f"{found} of {len(prompt)} tokens were cached, not {cached}")
        return seconds

    def step(self, prompts: Sequence[list[int]]) -> float:
        """Seconds of a decode step of a batch: the mean while all of its sequences are running."""
        arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]

        def ask(prompt: list[int], seen: list[tuple[float, int]]) -> None:
            body = {**_body(prompt, STEPS), "stream": True}
            with requests.post(
                self._url + "/generate", json=body, stream=True, timeout=600
            ) as response:
                for line in response.iter_lines():
                    if line.startswith(b"data: {"):
                        answer = json.loads(line[6:])["meta_info"]["completion_tokens"]
                        seen.append((time.perf_counter(), answer))

        threads = [
            threading.Thread(target=ask, args=pair) for pair in zip(prompts, arrivals, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        begin, end = max(seen[0][0] for seen in arrivals), min(seen[-1][0] for seen in arrivals)
        together = [[at for at in seen if begin <= at[0] <= end] for seen in arrivals]
        if min(len(seen) for seen in together) < 2:
            raise NotTogether(f"{len(prompts)} sequences were never decoded at once")
        return median((last[0] - first[0]) / (last[1] - first[1]) for first, *_, last in together)


def _body(prompt: list[int], answer: int) -> dict[str, object]:
    sampling = {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling}


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


def lengths(contexts: Sequence[int], rounds: int, flags: list[str]) -> str:
    """The tables of contexts, as Markdown."""
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
    lines = [
        f"| context | cold, ms | cold, tokens/s | hit + {FEW}, ms | against {first} | "
        f"hit + {MANY:,}, ms | against {MANY:,} cold |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for n in contexts:
        few, many = found[n, FEW], found[n, MANY]
        lines.append(
            f"| {n:,} | {1e3 * found[0, n]:,.0f} | {n / found[0, n]:,.0f} | {1e3 * few:.1f} "
            f"| {few / found[first, FEW]:.2f} | {1e3 * many:.0f} | {many / cold:.2f} |"
        )
    lines += [
        f"\n{MANY:,} tokens cold: {1e3 * cold:.0f} ms.\n",
        "| sequences | context | decode step, ms | against 100 |",
        "|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {count} | {context:,} | {1e3 * step:.1f} | {step / batches[count, 100]:.2f} |"
        for (count, context), step in sorted(batches.items())
    ]
    return "\n".join(lines)


@contextmanager
def neighbour() -> Iterator[None]:
    """Another program that wants one core all the time."""
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        program.kill()
        program.wait()


def crowded(rounds: int, flags: list[str]) -> str:
    """The table of a busy neighbour, as Markdown."""
    lines = [
        f"| threads wait | hit of {NEIGHBOUR_CONTEXT:,} + {FEW}, ms | with a neighbour | ratio "
        "| worst | decode step, ms | with a neighbour | ratio | worst |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, environment in WAITING.items():
        with ServerProcess(flags, environment=environment) as server:
            client = Client(server.url)
            context = client.tokens(NEIGHBOUR_CONTEXT)
            client.first_token(context, 0)

            def hits(client: Client = client, context: list[int] = context) -> list[float]:
                cached = NEIGHBOUR_CONTEXT - 1
                return [
                    client.first_token(context + client.tokens(FEW), cached)
                    for _ in range(8 * rounds)
                ]

            def steps(client: Client = client, context: list[int] = context) -> list[float]:
                return [client.step([context]) for _ in range(rounds)]

            hits(), steps()
            alone = (hits(), steps())
            with neighbour():
                crowd = (hits(), steps())
        cells = []
        for quiet, busy in zip(alone, crowd, strict=True):
            usual, slow = median(quiet), median(busy)
            cells += [f"{1e3 * usual:.1f}", f"{1e3 * slow:.1f}", f"{slow / usual:.1f}"]
            cells.append(f"{1e3 * max(busy):.0f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 1000, 4000, 8000, 16000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--neighbour", action="store_true", help="measure beside a busy program")
    parser.add_argument("server_flags", nargs="*", help="flags for the server, after --")
    options = parser.parse_args()
    try:
        if options.neighbour:
            table = crowded(options.rounds, options.server_flags)
        else:
            table = lengths(options.contexts, options.rounds, options.server_flags)
    except (ServerFailed, NoHit, NotTogether, requests.RequestException) as error:
        print(f"bench_contexts: {error}", file=sys.stderr)
        return 1
    print(f"Machine: {machine()}. Date: {date.today()}. ", end="")
    print(f"Command: `{shlex.join(['python', *sys.argv])}`.\n")
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
