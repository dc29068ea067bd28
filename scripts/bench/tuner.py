"""What the tuner's choices are worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt

from scripts.bench.commands import one_of
from scripts.bench.report import Table
from scripts.bench.traces import (
    COST,
    GENERATED,
    RULES,
    SIZES,
    TRACES,
    Folder,
    in_phases,
    read_named,
)
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.simulation.traces import generators
from sglang_hybrid.extensions.lab.simulation.tuner.candidates import CANDIDATES
from sglang_hybrid.extensions.lab.simulation.tuner.tuned import (
    DELAY,
    SimulatedTunedCache,
    switching,
)
from sglang_hybrid.extensions.lab.simulation.tuner.tuner import Rules
from sglang_hybrid.extensions.lab.systems import Setting, Spec

Ints = npt.NDArray[np.int64]

PHASES: dict[str, tuple[float, ...]] = {  # kinds of generated traffic, one after the other, and GB
    "few-shot, chat": (2, 4),
    "chat, few-shot": (2, 4),
    "few-shot, agent": (5, 10),
    "agent, few-shot": (5, 10),
    "chat, agent, few-shot, chat": (4, 8),
}
TRAFFIC = ("traces", "transcripts", "phases")


@dataclass(frozen=True)
class Row:
    """Hit tokens [candidates] of each alone, in the whole trace and after the first decision at
    request `at`, and there also [candidates] if it takes over only then.
    """

    prompt_tokens: int
    alone: dict[Spec, int]
    tuned: int
    at: int
    choice: Spec
    searches: int
    switches: int
    taken_back: int
    rest_alone: dict[Spec, int]
    rest_after: dict[Spec, int]

    @property
    def best(self) -> Spec:
        """In hindsight, from the start."""
        return max(self.alone, key=self.alone.__getitem__)

    @property
    def whole(self) -> float:
        return self.tuned / max(1, self.alone[self.best])

    def gain(self, start: Spec) -> float:
        """Share of the prompt tokens."""
        return (self.tuned - self.alone[start]) / self.prompt_tokens

    @property
    def rest(self) -> float:
        """1 where nothing was decided before the end."""
        best = max(*self.rest_alone.values(), *self.rest_after.values())
        return self.rest_after[self.choice] / best if best else 1.0


def measure(setting: Setting, start: Spec, rules: Rules, delay: int) -> Row:
    requests = setting.requests
    alone = {spec: hits(setting, spec) for spec in dict.fromkeys((start, *CANDIDATES))}
    cache = SimulatedTunedCache(setting, CANDIDATES, start, rules, delay)
    tuned = sum(cache.serve(request).hit_len for request in requests)
    at, choice = cache.decided[0] if cache.decided else (len(requests), start)
    return Row(
        sum(request.input_len for request in requests),
        {spec: int(found.sum()) for spec, found in alone.items()},
        tuned,
        at,
        choice,
        cache.tuner.counts.runs,
        cache.tuner.counts.switches,
        cache.tuner.counts.taken_back,
        {spec: int(found[at:].sum()) for spec, found in alone.items()},
        {spec: int(hits(setting, start, at, spec)[at:].sum()) for spec in alone},
    )


def hits(setting: Setting, start: Spec, at: int = 0, then: Spec | None = None) -> Ints:
    """Tokens hit by each request [n] under `start`, from request `at` on under `then`."""
    cache = switching(setting, start)
    found = []
    for number, request in enumerate(setting.requests):
        if number == at and then is not None and then != start:
            cache.switch(then)
        found.append(cache.serve(request).hit_len)
    return np.array(found, dtype=np.int64)


def phases(kinds: Sequence[str], seed: int) -> list[Request]:
    """Traffic of each kind after the one before it has ended, under names of its own."""
    how = [
        (kind, generators.traffic(kind, sessions=400 if kind == "few-shot" else 60))
        for kind in kinds
    ]
    requests: list[Request] = []
    begin = 0.0
    for some in in_phases(how, seed):
        requests += [replace(one, arrival=one.arrival + begin) for one in some]
        begin = requests[-1].arrival + 1
    return requests


def all_rows(
    kinds: Sequence[str], folder: Path, seed: int
) -> Iterator[tuple[str, float, list[Request]]]:
    """Names, GB and requests."""
    if "traces" in kinds:
        for name, sizes in SIZES.items():
            requests = read_named(folder, name)
            yield from ((name, size, requests) for size in sizes)
    if "transcripts" in kinds:
        requests = generators.generate("transcript", generators.traffic("transcript"), seed)
        name = f"transcript, seed {seed}"
        yield from ((name, size, requests) for size in GENERATED["transcript"])
    if "phases" in kinds:
        for name, sizes in PHASES.items():
            requests = phases(name.split(", "), seed)
            yield from ((name, size, requests) for size in sizes)


def tuner(
    traces: Folder = TRACES,
    traffic: Annotated[tuple[str, ...], one_of(TRAFFIC)] = TRAFFIC,
    seed: Annotated[int, "of generated traffic"] = 0,
    rules: Annotated[str, one_of(RULES)] = "served",
    start: Annotated[Spec, Spec.parse, "the starting policy (reuse)"] = CANDIDATES[0],
    delay: Annotated[int, f"requests that a search takes ({DELAY})"] = DELAY,
) -> None:
    """What the tuner's choices are worth, on real traces and on traffic that changes.

    Every trace is replayed, request after request, under each candidate from the start, and with
    the tuner, which starts with `--start` and whose searches take `--delay` requests. Three
    numbers:

    * whole: hit tokens of the tuned cache over those of the best single candidate in hindsight. *
    rest: at the tuner's first decision, request n, the cache is as the starting policy left it.
    From there on each candidate alone chooses the victims. Hit tokens of the tuner's choice in the
    rest of the trace over those of the best of them, or of the best of those that were in force
    from the start, if that hit more in the rest. * start: hit tokens of the starting policy alone
    over those of the best single candidate.

    "gain" is what the tuned cache hit more than the starting policy alone, in points of the hit
    rate.
    """
    table = Table(
        *("traffic", "GB", "requests", "best alone", "hit %", "start", "whole", "gain"),
        *("first decision", "its choice", "rest", "searches", "switches", "taken back"),
    )
    for name, size, requests in all_rows(traffic, traces, seed):
        setting = Setting(COST, int(size * 1e9), requests, serving=RULES[rules])
        row = measure(setting, start, Rules(), delay)
        best = row.alone[row.best]
        never = row.at == len(requests)
        cells = (
            *(name, size, f"{len(requests):,}", row.best, percent(best / row.prompt_tokens)),
            *(percent(row.alone[start] / best), percent(row.whole)),
            f"{100 * row.gain(start):+.2f}",
            *("never" if never else row.at, row.choice, "" if never else percent(row.rest)),
            *(row.searches, row.switches, row.taken_back),
        )
        table.row(*cells)


def percent(share: float) -> str:
    return f"{100 * share:.1f}"
