"""One memory against static splits on a real server: long documents, short sessions, documents.

    python scripts/bench.py one-memory [--megabytes 25] [--documents 150] [--sessions 70]

The same traffic for every server, one after another, with forced answers as `ab` does it: first
questions behind long documents (the KV is what is short), then chats of short turns (states are),
then questions behind other documents. A hit rate per phase, and what moved. Then how fast memory
goes back to the system and comes again, without a server.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import Any

import torch

from scripts.bench.report import ROOT, Table
from scripts.bench.servers import flags_of, hybrid_cache, vocabulary_of
from scripts.bench.traces import chats, documents, in_phases, in_vocabulary
from scripts.bench.traffic import drive, hit_rate
from sglang_hybrid.memory.pages import PAGE, Reserved
from sglang_hybrid.models import ensure_default_model
from sglang_hybrid.platforms.sizing import model_sizes
from sglang_hybrid.replay.arrivals import Draw
from sglang_hybrid.replay.traces import Request
from sglang_hybrid.server_process import ServerProcess

CONCURRENCY = 2
STATES_SHARES = (0.15, 0.4, 0.7)
"""Of the memory, in the static splits."""


def phases(questions: int, sessions: int, seed: int) -> list[list[Request]]:
    """Questions behind a dozen documents of about 1,500 tokens; chats; other documents."""
    question = Draw("lognormal", 20, 0.5)
    behind = documents(questions, 12, Draw("lognormal", 1_500, 0.2), question)
    turns = chats(
        sessions,
        shared=Draw("const", 16),
        turns=Draw("lognormal", 5, 0.4),
        question=Draw("lognormal", 30, 0.7),
        think=Draw("lognormal", 30, 0.5),
        answer=Draw("lognormal", 12, 0.5),
    )
    return in_phases([behind, turns, behind], seed)


def serve(flags: Sequence[str], traces: Sequence[Sequence[Request]]) -> tuple[list[float], Any]:
    """Hit rates of all phases, and the account after each."""
    rates, accounts = [], []
    with ServerProcess(flags, directory=ROOT) as server:
        for trace in traces:
            rates.append(hit_rate(asyncio.run(drive(server.url, trace, CONCURRENCY, None))))
            accounts.append(hybrid_cache(server.url)["memory"])
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


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=float, default=25.0, help="of KV and states")
    parser.add_argument("--documents", type=int, default=150, help="questions of a phase")
    parser.add_argument("--sessions", type=int, default=70, help="chats")
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> None:
    model = ensure_default_model()
    sizes = model_sizes(str(model), "float32")
    assert sizes is not None
    made = phases(options.documents, options.sessions, options.seed)
    traces = in_vocabulary(made, vocabulary_of(model))
    table = Table("memory", "KV tokens", "slots", "documents", "sessions", "documents again", "all")
    prompts = [sum(request.input_len for request in trace) for trace in traces]
    for share in (None, *STATES_SHARES):
        slots = int(options.megabytes * 1e6 * (share or STATES_SHARES[1]) / sizes.state)
        tokens = int((options.megabytes * 1e6 - slots * sizes.state) / sizes.kv_token)
        flags = [
            *flags_of(model, tokens, slots, CONCURRENCY + 1),
            *("--hybrid-memory", "split" if share else "one"),
        ]
        rates, accounts = serve(flags, traces)
        total = sum(rate * n for rate, n in zip(rates, prompts, strict=True)) / sum(prompts)
        name = f"split, {share:.0%} for states" if share else "one"
        sized = (f"{tokens:,}", slots) if share else ("", "")
        table.row(name, *sized, *(f"{rate:.1%}" for rate in (*rates, total)))
        if share is None:
            kept = accounts
    print("\nOne memory after each phase, in MB:\n")
    table = Table(
        *("phase", "KV used", "states used", "waste", "moved to KV", "to states"),
        *("moves", "ms a move"),
    )
    for phase, account in zip(("documents", "sessions", "again"), kept, strict=True):
        sizes_ = [
            account["used"]["kv"],
            account["used"]["states"],
            sum(account["waste"].values()),
            account["moved_to"]["kv"],
            account["moved_to"]["states"],
        ]
        moves = account["moves"] + account["failed_moves"]
        each = 1e3 * account["move_seconds"] / moves if moves else 0.0
        table.row(phase, *(f"{size / 1e6:.2f}" for size in sizes_), moves, f"{each:.3f}")
    back, again = gigabytes_per_second()
    print(f"\nMemory goes back to the system at {back:.1f} GB/s in runs of 16 pages; ", end="")
    print(f"written again, page faults included, at {again:.1f} GB/s.")
