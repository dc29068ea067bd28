"""The tables that `python -m sglang_hybrid.replay` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from sglang_hybrid.core.server_settings import Budget, Split
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.reports.study import lost_tokens
from sglang_hybrid.extensions.lab.runner import Result


def show_results(results: Sequence[Result], requests: Sequence[Request], console: Console) -> None:
    tokens = sum(request.input_len for request in requests)
    title = f"{results[0].job.trace}: {len(requests):,} requests, {tokens:,} prompt tokens"
    if results[0].job.serving is not None:
        title += ", as served"
    if results[0].job.replicas > 1:
        title += f", {results[0].job.replicas} replicas"
    table = Table(title=title, box=SIMPLE, padding=(0, 1), collapse_padding=True)
    table.add_column("cache", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    titles = ["hit\n%", "FLOPs\nsaved %", "TTFT\nP5", "\nP50", "\nP95", "paper\nP50", "\nP95"]
    time = results[0].job.time
    if time is None:
        del titles[2:5]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for index, result in enumerate(results):
        new_size = index > 0 and results[index - 1].job.budget != result.job.budget
        if new_size:
            table.add_section()
        label = result.job.name
        if result.chosen is not None:
            label += f" ({result.chosen_words})"
        cells = [f"{100 * result.hit_rate:.1f}", f"{100 * result.flops_saved:.1f}"]
        if time is not None:
            cells += [f"{1000 * result.ttft_percentile(p):,.0f}" for p in (5, 50, 95)]
        summary = result.as_dict()
        cells += [f"{1000 * summary[f'paper_ttft_p{p}_s']:,.0f}" for p in (50, 95)]
        tiers = result.job.tiers
        cache = size_name(result.job.budget) if tiers is None else str(tiers)
        table.add_row(cache, label, *cells)
    console.print(table)
    if results[0].job.tiers is not None:
        _show_tiers(results, console)
    about = "paper: time to first token (ms) by its linear model, without a queue."
    if time is not None:
        about = f"TTFT: ms, queue included, by {time.about}; {about}"
    console.print(about, highlight=False, soft_wrap=True)


def _show_tiers(results: Sequence[Result], console: Console) -> None:
    """Print the tiers that hits came from, and the bytes that were moved."""
    table = Table(title="tiers", box=SIMPLE, padding=(0, 1), collapse_padding=True)
    table.add_column("policy", no_wrap=True)
    assert results[0].job.tiers is not None
    present = results[0].job.tiers.present
    below = present[1:]
    where = " + ".join(tier.name.lower() for tier in below)
    inexact = any(result.job.tiers and not result.job.tiers.exact for result in results)
    titles = [f"hit %: device + {where}", "loads", "GB written", "bytes per\nhit token"]
    for title in titles + ["not exact,\nhit %"] * inexact:
        table.add_column(title, justify="right", no_wrap=True)
    for result in results:
        counts, tokens = result.tiers, int(result.input_len.sum())
        if counts is None:
            continue
        table.add_row(
            result.job.policy,
            " + ".join(f"{100 * counts.hit_tokens[tier] / tokens:.1f}" for tier in present),
            " + ".join(f"{counts.loads[tier]:,}" for tier in below),
            " + ".join(f"{counts.written[tier] / 1e9:.1f}" for tier in below),
            f"{counts.written_per_hit_token:,.0f}",
            *[f"{100 * counts.inexact_tokens / tokens:.1f}"] * inexact,
        )
    console.print(table)
    about = f"loads, GB written: {where}; bytes written per hit token."
    if inexact:
        about += " not exact: resumed from smaller copies, or computed behind them."
    _show_lost({result.job.policy: result for result in results}, console)
    console.print(about, highlight=False, soft_wrap=True)


def _show_lost(results: dict[str, Result], console: Console) -> None:
    """Prompt tokens that were computed though they had a state once, by what became of it."""
    lost = lost_tokens(results)
    if not any(lost.values()):
        return
    table = Table(title="lost, % of prompt tokens", box=SIMPLE, padding=(0, 1))
    table.add_column("policy", no_wrap=True)
    for why in next(iter(lost.values())):
        table.add_column(why, justify="right")
    for name, shares in lost.items():
        table.add_row(name, *(f"{share:.1f}" for share in shares.values()))
    console.print(table)


def size_name(budget: Budget) -> str:
    if budget is None:
        return "unbounded"
    if isinstance(budget, Split):
        return f"{budget.kv_tokens:,} + {budget.slots:,} states"
    return f"{budget / 1e9:g} GB" if budget >= 10**8 else f"{budget / 1e6:g} MB"
