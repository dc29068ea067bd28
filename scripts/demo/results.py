"""Results of the traffic on both servers: a table by kind of traffic, and one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from scripts.bench.servers import percentile
from scripts.bench.traffic import Outcome
from scripts.demo.traffic import KINDS

SYSTEMS = ("ours", "SGLang's")


@dataclass(frozen=True)
class Served:
    """The results of a step: outcomes of its samples by system, and whether answers differed."""

    kind: str
    outcomes: tuple[list[Outcome], ...]
    differs: bool


@dataclass(frozen=True)
class Row:
    """A kind of traffic; what follows the prompt tokens is by system, in the order of `SYSTEMS`.

    hit: prompt tokens that were in the cache. median, p90: of the times to first token, ms.
    """

    kind: str
    requests: int
    prompt_tokens: int
    hit: tuple[int, ...]
    median: tuple[float, ...]
    p90: tuple[float, ...]


def row(kind: str, served: Sequence[Served]) -> Row:
    """The costs of the steps of a kind."""
    sides = [[one for step in served for one in step.outcomes[at]] for at in range(len(SYSTEMS))]
    times = [sorted(1000 * one.ttft for one in side) for side in sides]
    return Row(
        kind,
        len(sides[0]),
        sum(one.prompt_tokens for one in sides[0]),
        tuple(sum(one.cached_tokens for one in side) for side in sides),
        *(tuple(round(percentile(side, share), 1) for side in times) for share in (0.5, 0.9)),
    )


def rows(served: Sequence[Served]) -> list[Row]:
    """A row for each kind that was served, and one for all together."""
    groups = {kind: [step for step in served if step.kind == kind] for kind in KINDS}
    return [row(kind, group) for kind, group in (groups | {"all": list(served)}).items() if group]


def table(found: Sequence[Row], seconds: float) -> Table:
    made = Table(title=f"What the same requests cost in {seconds:.0f} seconds")
    made.add_column("traffic")
    heads = [f"{title}\n{name}" for title in ("hit", "median ms", "P90 ms") for name in SYSTEMS]
    for head in ("requests", "prompt\ntokens", *heads):
        made.add_column(head, justify="right")
    for one in found:
        hits = [f"{hit:,} ({hit / one.prompt_tokens:.0%})" for hit in one.hit]
        times = [f"{ms:,.0f}" for ms in (*one.median, *one.p90)]
        made.add_row(one.kind, f"{one.requests:,}", f"{one.prompt_tokens:,}", *hits, *times)
    return made


def summary(total: Row) -> str:
    """One line about all requests."""
    ours, theirs = (total.prompt_tokens - hit for hit in total.hit)
    first = " and ".join(f"{ms:.0f}" for ms in total.median)
    return (
        f"Ours prefilled {ours:,} tokens, SGLang's {theirs:,} ({theirs / max(1, ours):.1f} times "
        f"as many); the median first token came after {first} ms."
    )
