"""One memory for KV and states on a real server, and what moves between them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

from scripts.bench import traces
from scripts.bench.commands import Count
from scripts.bench.report import ROOT, Table, seconds_of
from scripts.bench.servers import (
    arrivals,
    at_once,
    flags_of,
    flush,
    greedy,
    hybrid_cache,
    post,
    sampled,
    vocabulary_of,
)
from scripts.bench.traffic import drive, hit_rate
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.cpu.models import ensure_tiny_model
from sglang_hybrid.extensions.cpu.models.tokenizer import FIRST_TEXT_ID
from sglang_hybrid.extensions.cpu.one_memory.pages import PAGE, Reserved
from sglang_hybrid.extensions.cpu.sizing import model_sizes
from sglang_hybrid.extensions.lab.reports.plots import STYLE, WIDTH
from sglang_hybrid.extensions.lab.simulation.traces.arrivals import Draw
from sglang_hybrid.serving.server_process import ServerProcess

CONCURRENCY = 2
STATES_SHARES = (0.15, 0.4, 0.7)
"""Of the memory, in the static splits."""

SPLIT = ("--hybrid-memory", "split")
ONE = {"one": ("--hybrid-memory", "one"), "SGLang's pool": ("--enable-unified-memory",)}
"""One memory: ours, and SGLang's unified pool under our cache."""

SAMPLE_SECONDS = 0.25
"""Between looks at the account of one memory."""

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


def figure_of(flags: Sequence[str], phases: Sequence[Sequence[Request]], file: Path) -> None:
    """Serve all phases in one memory and draw it."""
    start, ends = time.monotonic(), []

    def look() -> tuple[float, Any]:
        return time.monotonic() - start, hybrid_cache(server.url)["memory"]

    with ServerProcess(flags, directory=ROOT) as server, sampled(look, SAMPLE_SECONDS) as samples:
        start = time.monotonic()
        for trace in phases:
            asyncio.run(drive(server.url, trace, CONCURRENCY))
            ends.append(time.monotonic() - start)
    draw(samples, ends, file)
    last = samples[-1][1]
    print(f"{file}: {len(samples)} samples in {ends[-1]:.0f} s, {last['moves']} moves.")


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
    figure: Annotated[Path | None, {"metavar": "FILE"}, "an SVG or PNG to draw"] = None,
) -> None:
    """One memory against static splits on a real server: long documents, short sessions, documents.

    The same traffic for every server, one after another, with forced answers as `ab` does it: first
    questions behind long documents (the KV is what is short), then chats of short turns (states
    are), then questions behind other documents. A hit rate per phase, and what moved. --figure
    serves it in one memory only and draws what each kind holds and gets over time.
    """
    model = ensure_tiny_model()
    made = three_phases(documents, sessions, seed)
    served = traces.in_vocabulary(made, vocabulary_of(model))
    if figure is not None:
        flags, _, _ = flags_of_memory(model, megabytes, ONE["one"])
        figure_of(flags, served, figure)
        return
    table = Table("memory", "KV tokens", "slots", "documents", "sessions", "documents again", "all")
    prompts = [sum(request.input_len for request in trace) for trace in served]
    kept = {}
    for name, memory in ONE.items():
        flags, _, _ = flags_of_memory(model, megabytes, memory)
        rates, kept[name] = serve(flags, served)
        table.row(name, "", "", *rows_of(rates, prompts))
    for share in STATES_SHARES:
        flags, tokens, slots = flags_of_memory(model, megabytes, SPLIT, share)
        rates, _ = serve(flags, served)
        name = f"split, {share:.0%} for states"
        table.row(name, f"{tokens:,}", slots, *rows_of(rates, prompts))
    print("\nOne memory after each phase, in MB:\n")
    table = Table(
        *("memory", "phase", "KV used", "states used", "waste", "moved to KV", "to states"),
        "moves",
    )
    for name, accounts in kept.items():
        for phase, account in zip(PHASES, accounts, strict=True):
            used, moved = account["used"], account["moved_to"]
            waste = sum(account["waste"].values())
            sizes = (used["kv"], used["states"], waste, moved["kv"], moved["states"])
            table.row(name, phase, *(f"{size / 1e6:.2f}" for size in sizes), account["moves"])


def rows_of(rates: Sequence[float], prompts: Sequence[int]) -> list[str]:
    """Hit rates of the phases, and of all together. prompts: tokens of each phase."""
    total = sum(rate * n for rate, n in zip(rates, prompts, strict=True)) / sum(prompts)
    return [f"{rate:.1%}" for rate in (*rates, total)]


def gaps_of(url: str, prompts: Sequence[list[int]], tokens: int) -> list[float]:
    """Seconds between the tokens of answers that are decoded side by side, after the first three of
    each.
    """
    seen = at_once(lambda prompt: arrivals(url, greedy(prompt, tokens)), prompts)
    return [now - before for one in seen for (before, _), (now, _) in pairwise(one[3:])]


def decoding_steps(table: Table, name: str, flags: Sequence[str], high: int, tokens: int) -> None:
    """Long answers to short prompts, while the memory is full of states, so that granules of KV
    take the bytes of evicted ones; then in an emptied cache, where KV keeps as many bytes.
    """
    random_ = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [random_.randrange(FIRST_TEXT_ID, high) for _ in range(length)]

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
            middle, last = 1e3 * np.percentile(gaps, [50, 99])
            table.row(
                *(name, "bytes move" if full else "none move", f"{len(gaps):,}"),
                *(f"{middle:.2f}", f"{last:.2f}", moves, f"{moved:.1f}"),
            )


def gigabytes_per_second(size: int, run: int) -> tuple[float, float]:
    """Memory given back in runs of `run` bytes, and memory that is written again after it."""
    with Reserved() as reserved:
        rows = torch.zeros(size // run, run, dtype=torch.uint8)
    plane = reserved.plane(rows, 0)
    rows.fill_(1)

    def give_back() -> None:
        for row in range(size // run):
            plane.give_back(row, row + 1)

    given, written = seconds_of(give_back), seconds_of(lambda: rows.fill_(1))
    return size / given / 1e9, size / written / 1e9


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


def moves(
    megabytes: Annotated[float, "of KV and states"] = 25.0,
    tokens: Annotated[Count, "of each timed answer"] = 3_000,
) -> None:
    """What moving bytes between KV and states costs in one memory.

    The time of a decoding step in which bytes move beside one in which none do; and bytes per
    second that go back to the system and are written again, without a server.
    """
    model = ensure_tiny_model()
    columns = ("memory", "while", "steps", "P50, ms", "P99, ms", "moves", "MB moved to KV")
    table = Table(*columns)
    for name, memory in ONE.items():
        flags, _, _ = flags_of_memory(model, megabytes, memory)
        decoding_steps(table, name, flags, vocabulary_of(model), tokens)
    speeds()
