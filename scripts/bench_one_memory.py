#!/usr/bin/env python3
"""One memory against static splits on a real server: long documents, short sessions, documents.

    python scripts/bench_one_memory.py [--megabytes 25] [--documents 150] [--sessions 70]
    python scripts/bench_one_memory.py --figure docs/one-memory.svg
    python scripts/bench_one_memory.py --moves

The same traffic for every server, one after another, with forced answers as in bench_ab.py: first
questions behind long documents (the KV is what is short), then chats of short turns (states are),
then questions behind other documents. A hit rate per phase, and what moved. --figure serves it in
one memory only and draws what each kind holds and gets over time. --moves measures what a move
costs: bytes per second, without a server, and the time of a decoding step in which bytes move
beside one in which none do. Prints Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import requests
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

from scripts.bench_ab import drive, vocabulary_of
from scripts.bench_phases import hit_rate
from scripts.bench_server import machine
from sglang_hybrid.memory.pages import PAGE, Reserved
from sglang_hybrid.models import ensure_default_model
from sglang_hybrid.models.tokenizer import FIRST_TEXT_ID
from sglang_hybrid.platforms.sizing import model_sizes
from sglang_hybrid.replay.arrivals import Draw
from sglang_hybrid.replay.generators import generate, traffic
from sglang_hybrid.replay.plots import STYLE, WIDTH
from sglang_hybrid.replay.slices import to_vocabulary
from sglang_hybrid.replay.traces import Request
from sglang_hybrid.server_process import ServerProcess

CONCURRENCY = 2
STATES_SHARES = (0.15, 0.4, 0.7)
"""Of the memory, in the static splits."""

PHASES = ("documents", "chats", "documents again")
TOKENS = 3_000
"""Of each answer whose steps are timed."""


def phases(documents: int, sessions: int, seed: int) -> list[list[Request]]:
    """Questions behind a dozen documents of about 1,500 tokens; chats; other documents."""
    questions = traffic(
        "few-shot",
        sessions=documents,
        templates=12,
        shared=Draw("lognormal", 1_500, 0.2),
        question=Draw("lognormal", 20, 0.5),
        answer=Draw("const", 4),
    )
    chats = traffic(
        "chat",
        sessions=sessions,
        session_rate=1.0,
        shared=Draw("const", 16),
        turns=Draw("lognormal", 5, 0.4),
        question=Draw("lognormal", 30, 0.7),
        think=Draw("lognormal", 30, 0.5),
        answer=Draw("lognormal", 12, 0.5),
    )
    return [
        generate("few-shot", questions, seed),
        generate("chat", chats, seed + 1),
        generate("few-shot", questions, seed + 2),
    ]


def memory_of(server: ServerProcess) -> dict[str, Any] | None:
    """The account of one memory."""
    info = requests.get(server.url + "/server_info", timeout=30).json()
    memory: dict[str, Any] | None = info["internal_states"][0]["hybrid_cache"]["memory"]
    return memory


def serve(flags: Sequence[str], traces: Sequence[Sequence[Request]]) -> tuple[list[float], Any]:
    """Hit rates of all phases, and the account after each."""
    rates, accounts = [], []
    with ServerProcess(flags) as server:
        for trace in traces:
            rates.append(hit_rate(asyncio.run(drive(server.url, trace, CONCURRENCY, None))))
            accounts.append(memory_of(server))
    return rates, accounts


@contextmanager
def watched(server: ServerProcess, seconds: float = 0.25) -> Iterator[list[tuple[float, Any]]]:
    """The account of one memory, again and again: seconds since the start, and what it says."""
    samples: list[tuple[float, Any]] = []
    done, start = threading.Event(), time.monotonic()

    def watch() -> None:
        while not done.wait(seconds):
            account = memory_of(server)
            samples.append((time.monotonic() - start, account))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def draw(samples: Sequence[tuple[float, Any]], ends: Sequence[float], file: Path) -> None:
    """What both kinds hold, and what each has got from the other, in MB over seconds. ends: of the
    phases.
    """
    seconds = [at for at, _ in samples]

    def series(name: str, kind: str) -> list[float]:
        return [account[name][kind] / 1e6 for _, account in samples]

    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.6))
        held, moved = figure.subplots(2, sharex=True, height_ratios=(3, 2))
        kinds = {"kv": ("KV", "#0072b2"), "states": ("states", "#d55e00")}
        held.stackplot(
            seconds,
            *(series("used", kind) for kind in kinds),
            labels=[f"{name}, used" for name, _ in kinds.values()],
            colors=[colour for _, colour in kinds.values()],
            alpha=0.75,
        )
        held.axhline(samples[0][1]["budget"] / 1e6, color="#333333", linewidth=1, label="budget")
        for kind, (name, colour) in kinds.items():
            moved.plot(seconds, series("moved_to", kind), color=colour, label=f"to {name}")
        for axes, label in ((held, "in use (MB)"), (moved, "moved (MB)")):
            for end in ends[:-1]:
                axes.axvline(end, color="#888888", linewidth=1, linestyle=":")
            axes.set(ylabel=label, ylim=(0, None), xlim=(0, seconds[-1]))
        for start, end, name in zip((0.0, *ends), ends, PHASES, strict=False):
            held.text(
                (start + end) / 2, 1.01, name, ha="center", transform=held.get_xaxis_transform()
            )
        held.legend(loc="lower left")
        moved.legend(loc="upper left")
        moved.set_xlabel("seconds")
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def figure_of(flags: Sequence[str], traces: Sequence[Sequence[Request]], file: Path) -> None:
    """Serve all phases in one memory and draw it."""
    with ServerProcess(flags) as server, watched(server) as samples:
        start, ends = time.monotonic(), []
        for trace in traces:
            asyncio.run(drive(server.url, trace, CONCURRENCY, None))
            ends.append(time.monotonic() - start)
    draw(samples, ends, file)
    last = samples[-1][1]
    print(f"{file}: {len(samples)} samples in {ends[-1]:.0f} s, {last['moves']} moves.")


def gaps_of(url: str, prompts: Sequence[Sequence[int]], tokens: int) -> list[float]:
    """Seconds between the tokens of answers that are decoded side by side, after the first three of
    each.
    """

    def one(prompt: Sequence[int]) -> list[float]:
        body = {
            "input_ids": list(prompt),
            "stream": True,
            "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0},
        }
        times = []
        with requests.post(url + "/generate", json=body, stream=True, timeout=600) as response:
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())
        return [after - before for before, after in pairwise(times[3:])]

    with ThreadPoolExecutor(len(prompts)) as pool:
        return [gap for gaps in pool.map(one, prompts) for gap in gaps]


def decoding_steps(flags: Sequence[str], high: int, tokens: int) -> None:
    """Long answers to short prompts, while the memory is full of states, so that granules of KV
    take the bytes of evicted ones; then in an emptied cache, where KV keeps as many bytes.
    """
    random_ = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [random_.randrange(FIRST_TEXT_ID, high) for _ in range(length)]

    print("| while | steps | P50, ms | P99, ms | moves | MB moved to KV | ms a move |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    with ServerProcess(flags) as server:
        for turn in range(4):
            full = turn % 2 == 0
            if full:
                for _ in range(120):
                    body = {"input_ids": prompt(40), "sampling_params": {"max_new_tokens": 2}}
                    requests.post(server.url + "/generate", json=body, timeout=60)
            else:
                requests.post(server.url + "/flush_cache", timeout=60).raise_for_status()
            before = memory_of(server)
            gaps = np.array(gaps_of(server.url, [prompt(8) for _ in range(CONCURRENCY)], tokens))
            after = memory_of(server)
            assert before is not None and after is not None
            moves = after["moves"] - before["moves"]
            moved = (after["moved_to"]["kv"] - before["moved_to"]["kv"]) / 1e6
            each = 1e3 * (after["move_seconds"] - before["move_seconds"]) / max(1, moves)
            middle, last = 1e3 * np.percentile(gaps, [50, 99])
            print(
                f"| {'bytes move' if full else 'none move'} | {len(gaps):,} | {middle:.2f} | "
                f"{last:.2f} | {moves} | {moved:.1f} | "
                f"{each:.3f} |",
                flush=True,
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
    print("\n| pages of a call | given back, GB/s | microseconds a call | written again, GB/s |")
    print("|---:|---:|---:|---:|")
    for pages in (1, 16, 256):
        back, again = gigabytes_per_second(size, pages * PAGE)
        each = pages * PAGE / back / 1e3
        print(f"| {pages} | {back:.1f} | {each:.2f} | {again:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=25.0, help="of KV and states")
    parser.add_argument("--documents", type=int, default=150, help="questions of a phase")
    parser.add_argument("--sessions", type=int, default=70, help="chats")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, metavar="FILE", help="an SVG or PNG to draw")
    parser.add_argument("--moves", action="store_true", help="what a move costs")
    options = parser.parse_args()
    model = ensure_default_model()
    sizes = model_sizes(str(model), "float32")
    assert sizes is not None
    high = vocabulary_of(model)
    made = phases(options.documents, options.sessions, options.seed)
    traces = [to_vocabulary(trace, FIRST_TEXT_ID, high)[0] for trace in made]
    print(f"Machine: {machine()}. Date: {date.today()}. ", end="")
    print(f"Command: `python scripts/bench_one_memory.py {' '.join(sys.argv[1:])}`.\n")

    def flags_for(share: float | None) -> tuple[list[str], int, int]:
        """Flags of a server, and the KV tokens and slots of its pools."""
        slots = int(options.megabytes * 1e6 * (share or STATES_SHARES[1]) / sizes.state)
        tokens = int((options.megabytes * 1e6 - slots * sizes.state) / sizes.kv_token)
        flags = [
            *("--model-path", str(model), "--max-total-tokens", str(tokens)),
            *("--max-mamba-cache-size", str(slots), "--enable-custom-logit-processor"),
            *("--max-running-requests", str(CONCURRENCY + 1)),
            *("--hybrid-memory", "split" if share else "one"),
        ]
        return flags, tokens, slots

    if options.figure is not None:
        figure_of(flags_for(None)[0], traces, options.figure)
        return
    if options.moves:
        decoding_steps(flags_for(None)[0], high, TOKENS)
        speeds()
        return
    print("| memory | KV tokens | slots | documents | sessions | documents again | all |")
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    prompts = [sum(request.input_len for request in trace) for trace in traces]
    for share in (None, *STATES_SHARES):
        flags, tokens, slots = flags_for(share)
        rates, accounts = serve(flags, traces)
        total = sum(rate * n for rate, n in zip(rates, prompts, strict=True)) / sum(prompts)
        name = f"split, {share:.0%} for states | {tokens:,} | {slots}" if share else "one | |"
        shown = " | ".join(f"{rate:.1%}" for rate in (*rates, total))
        print(f"| {name} | {shown} |", flush=True)
        if share is None:
            kept = accounts
    print("\nOne memory after each phase, in MB:\n")
    print("| phase | KV used | states used | waste | moved to KV | to states | moves | ms a move |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, account in zip(PHASES, kept, strict=True):
        sizes_ = [
            account["used"]["kv"],
            account["used"]["states"],
            sum(account["waste"].values()),
            account["moved_to"]["kv"],
            account["moved_to"]["states"],
        ]
        moves = account["moves"] + account["failed_moves"]
        each = 1e3 * account["move_seconds"] / moves if moves else 0.0
        numbers = " | ".join(f"{size / 1e6:.2f}" for size in sizes_)
        print(f"| {name} | {numbers} | {moves} | {each:.3f} |")


if __name__ == "__main__":
    main()
