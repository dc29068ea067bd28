#!/usr/bin/env python3
"""One memory against static splits on a real server: long documents, short sessions, documents.

    python scripts/bench_one_memory.py [--megabytes 25] [--documents 150] [--sessions 70]

The same traffic for every server, one after another, with forced answers as in bench_ab.py: first
questions behind long documents (the KV is what is short), then chats of short turns (states are),
then questions behind other documents. A hit rate per phase, and what moved. Then how fast memory
goes back to the system and comes again, without a server. Prints Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import requests
import torch

from scripts.bench_ab import drive, vocabulary_of
from scripts.bench_phases import hit_rate
from scripts.bench_server import machine
from sglang_hybrid.memory.pages import PAGE, Reserved
from sglang_hybrid.models import ensure_default_model
from sglang_hybrid.models.tokenizer import FIRST_TEXT_ID
from sglang_hybrid.platforms.sizing import model_sizes
from sglang_hybrid.replay.arrivals import Draw
from sglang_hybrid.replay.generators import generate, traffic
from sglang_hybrid.replay.slices import to_vocabulary
from sglang_hybrid.replay.traces import Request
from sglang_hybrid.server_process import ServerProcess

CONCURRENCY = 2
STATES_SHARES = (0.15, 0.4, 0.7)
"""Of the memory, in the static splits."""


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


def gigabytes_per_second(size: int = 256 << 20, run: int = 16 * PAGE) -> tuple[float, float]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=25.0, help="of KV and states")
    parser.add_argument("--documents", type=int, default=150, help="questions of a phase")
    parser.add_argument("--sessions", type=int, default=70, help="chats")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = ensure_default_model()
    sizes = model_sizes(str(model), "float32")
    assert sizes is not None
    high = vocabulary_of(model)
    made = phases(options.documents, options.sessions, options.seed)
    traces = [to_vocabulary(trace, FIRST_TEXT_ID, high)[0] for trace in made]
    print(f"Machine: {machine()}. Date: {date.today()}. ", end="")
    print(f"Command: `python scripts/bench_one_memory.py {' '.join(sys.argv[1:])}`.\n")
    print("| memory | KV tokens | slots | documents | sessions | documents again | all |")
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    prompts = [sum(request.input_len for request in trace) for trace in traces]
    for share in (None, *STATES_SHARES):
        slots = int(options.megabytes * 1e6 * (share or STATES_SHARES[1]) / sizes.state)
        tokens = int((options.megabytes * 1e6 - slots * sizes.state) / sizes.kv_token)
        flags = [
            *("--model-path", str(model), "--max-total-tokens", str(tokens)),
            *("--max-mamba-cache-size", str(slots), "--enable-custom-logit-processor"),
            *("--max-running-requests", str(CONCURRENCY + 1)),
            *("--hybrid-memory", "split" if share else "one"),
        ]
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
    for name, account in zip(("documents", "sessions", "again"), kept, strict=True):
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
    back, again = gigabytes_per_second()
    print(f"\nMemory goes back to the system at {back:.1f} GB/s in runs of 16 pages; ", end="")
    print(f"written again, page faults included, at {again:.1f} GB/s.")


if __name__ == "__main__":
    main()
