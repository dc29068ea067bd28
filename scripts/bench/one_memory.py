"""One memory against static splits on a real server: long documents, short sessions, documents.

    python scripts/bench.py one-memory [--megabytes 25] [--documents 150] [--sessions 70]
    python scripts/bench.py one-memory --figure docs/one-memory.svg

The same traffic for every server, one after another, with forced answers as `ab` does it: first
questions behind long documents (the KV is what is short), then chats of short turns (states are),
then questions behind other documents. A hit rate per phase, and what moved. --figure serves it in
one memory only and draws what each kind holds and gets over time.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from scripts.bench.report import ROOT, Table
from scripts.bench.servers import flags_of, hybrid_cache, vocabulary_of
from scripts.bench.traces import chats, documents, in_phases, in_vocabulary
from scripts.bench.traffic import drive, hit_rate
from sglang_hybrid.models import ensure_default_model
from sglang_hybrid.platforms.sizing import Sizes, model_sizes
from sglang_hybrid.replay.reports.plots import STYLE, WIDTH
from sglang_hybrid.serving.server_process import ServerProcess
from sglang_hybrid.simulation.traces.arrivals import Draw
from sglang_hybrid.simulation.traces.requests import Request

CONCURRENCY = 2
STATES_SHARES = (0.15, 0.4, 0.7)
"""Of the memory, in the static splits."""

PHASES = ("documents", "chats", "documents again")


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


@contextmanager
def watched(server: ServerProcess, seconds: float = 0.25) -> Iterator[list[tuple[float, Any]]]:
    """The account of one memory, again and again: seconds since the start, and what it says."""
    samples: list[tuple[float, Any]] = []
    done, start = threading.Event(), time.monotonic()

    def watch() -> None:
        while not done.wait(seconds):
            account = hybrid_cache(server.url)["memory"]
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
    with ServerProcess(flags, directory=ROOT) as server, watched(server) as samples:
        start, ends = time.monotonic(), []
        for trace in traces:
            asyncio.run(drive(server.url, trace, CONCURRENCY, None))
            ends.append(time.monotonic() - start)
    draw(samples, ends, file)
    last = samples[-1][1]
    print(f"{file}: {len(samples)} samples in {ends[-1]:.0f} s, {last['moves']} moves.")


def flags_of_split(
    model: Path, sizes: Sizes, megabytes: float, share: float | None
) -> tuple[list[str], int, int]:
    """Flags of a server that gives states this share of the memory, None: of one memory; and the KV
    tokens and slots of its pools.
    """
    slots = int(megabytes * 1e6 * (share or STATES_SHARES[1]) / sizes.state)
    tokens = int((megabytes * 1e6 - slots * sizes.state) / sizes.kv_token)
    flags = flags_of(model, tokens, slots, CONCURRENCY + 1)
    return [*flags, "--hybrid-memory", "split" if share else "one"], tokens, slots


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=float, default=25.0, help="of KV and states")
    parser.add_argument("--documents", type=int, default=150, help="questions of a phase")
    parser.add_argument("--sessions", type=int, default=70, help="chats")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, metavar="FILE", help="an SVG or PNG to draw")


def run(options: argparse.Namespace) -> None:
    model = ensure_default_model()
    sizes = model_sizes(str(model), "float32")
    assert sizes is not None
    made = phases(options.documents, options.sessions, options.seed)
    traces = in_vocabulary(made, vocabulary_of(model))
    if options.figure is not None:
        flags, _, _ = flags_of_split(model, sizes, options.megabytes, None)
        figure_of(flags, traces, options.figure)
        return
    table = Table("memory", "KV tokens", "slots", "documents", "sessions", "documents again", "all")
    prompts = [sum(request.input_len for request in trace) for trace in traces]
    for share in (None, *STATES_SHARES):
        flags, tokens, slots = flags_of_split(model, sizes, options.megabytes, share)
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
    for phase, account in zip(PHASES, kept, strict=True):
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
