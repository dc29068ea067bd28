"""One memory for KV and states on a real server, and what moves between them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from scripts.bench import traces
from scripts.bench.report import ROOT, Table
from scripts.bench.servers import flags_of, hybrid_cache, vocabulary_of
from scripts.bench.traffic import drive, hit_rate
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.cpu.models import ensure_tiny_model
from sglang_hybrid.extensions.cpu.sizing import model_sizes
from sglang_hybrid.extensions.lab.simulation.traces.arrivals import Draw
from sglang_hybrid.serving.server_process import ServerProcess

CONCURRENCY = 2
STATES_SHARES = (0.15, 0.4, 0.7)
"""Shares of the memory that static splits give to states."""

SPLIT = ("--hybrid-memory", "split")
ONE = ("--hybrid-memory", "one")

PHASES = ("documents", "chats", "documents again")


def three_phases(questions: int, sessions: int, seed: int) -> list[list[Request]]:
    """Questions behind a dozen documents of about 1,500 tokens; chats; other documents."""
    question = Draw("lognormal", 20, 0.5)
    behind = traces.documents(questions, 12, Draw("lognormal", 1_500, 0.2), question)
    turns = traces.chats(
        sessions,
        shared=Draw("const", 16),
        turns=Draw("lognormal", 5, 0.4),
        question=Draw("lognormal", 30, 0.7),
        think=Draw("lognormal", 30, 0.5),
        answer=Draw("lognormal", 12, 0.5),
    )
    return traces.in_phases([behind, turns, behind], seed)


def serve(flags: Sequence[str], phases: Sequence[Sequence[Request]]) -> tuple[list[float], Any]:
    """Hit rates of all phases, and the account after each."""
    rates, accounts = [], []
    with ServerProcess(flags, directory=ROOT) as server:
        for trace in phases:
            rates.append(hit_rate(asyncio.run(drive(server.url, trace, CONCURRENCY))))
            accounts.append(hybrid_cache(server.url)["memory"])
    return rates, accounts


def flags_of_memory(
    model: Path, megabytes: float, memory: Sequence[str], share: float | None = None
) -> tuple[list[str], int, int]:
    """Flags of a server with this memory, of whose two pools the states' has a share; and the KV
    tokens and slots of such pools.
    """
    sizes = model_sizes(str(model), "float32")
    assert sizes is not None
    slots = int(megabytes * 1e6 * (share or STATES_SHARES[1]) / sizes.state)
    tokens = int((megabytes * 1e6 - slots * sizes.state) / sizes.kv_token)
    return [*flags_of(model, tokens, slots, CONCURRENCY + 1), *memory], tokens, slots


def one_memory(
    megabytes: Annotated[float, "of KV and states"] = 25.0,
    documents: Annotated[int, "questions of a phase"] = 150,
    sessions: Annotated[int, "chats"] = 70,
    seed: int = 0,
) -> None:
    """One memory against static splits on a real server: long documents, short sessions, documents.

    The same traffic for every server, one after another, with forced answers as `ab` does it: first
    questions behind long documents (the KV is what is short), then chats of short turns (states
    are), then questions behind other documents. A hit rate per phase, and what moved.
    """
    model = ensure_tiny_model()
    made = three_phases(documents, sessions, seed)
    served = traces.in_vocabulary(made, vocabulary_of(model))
    table = Table("memory", "KV tokens", "slots", "documents", "sessions", "documents again", "all")
    prompts = [sum(request.input_len for request in trace) for trace in served]
    flags, _, _ = flags_of_memory(model, megabytes, ONE)
    rates, accounts = serve(flags, served)
    table.row("one", "", "", *rows_of(rates, prompts))
    for share in STATES_SHARES:
        flags, tokens, slots = flags_of_memory(model, megabytes, SPLIT, share)
        rates, _ = serve(flags, served)
        name = f"split, {share:.0%} for states"
        table.row(name, f"{tokens:,}", slots, *rows_of(rates, prompts))
    print("\nOne memory after each phase, in MB:\n")
    table = Table("phase", "KV used", "states used", "moved to KV", "to states", "moves")
    for phase, account in zip(PHASES, accounts, strict=True):
        used, moved = account["used"], account["moved_to"]
        sizes = (used["kv"], used["states"], moved["kv"], moved["states"])
        table.row(phase, *(f"{size / 1e6:.2f}" for size in sizes), account["moves"])


def rows_of(rates: Sequence[float], prompts: Sequence[int]) -> list[str]:
    """Hit rates of the phases, and of all together. prompts: tokens of each phase."""
    total = sum(rate * n for rate, n in zip(rates, prompts, strict=True)) / sum(prompts)
    return [f"{rate:.1%}" for rate in (*rates, total)]
