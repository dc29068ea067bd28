"""The paper's four workloads: lengths and arrivals from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request that holds memory from tick `arrival` until `end`. prompt, answer: tokens."""

    number: int
    prompt: int
    answer: int
    arrival: int

    @property
    def end(self) -> int:
        return self.arrival + self.prompt + self.answer

    @property
    def pages(self) -> int:
        """KV pages of one layer when it arrives."""
        return pages_of(self.prompt)

    @property
    def pages_at_its_end(self) -> int:
        """KV pages of one layer when it ends."""
        return pages_of(self.prompt + self.answer)

    def page_ticks(self) -> Iterator[int]:
        """Ticks at which the request needs a further page in every layer."""
        counts = (pages_of(self.prompt + step) for step in range(self.answer + 1))
        for step, (before, after) in enumerate(pairwise(counts), start=1):
            if after > before:
                yield self.arrival + self.prompt + step


def pages_of(tokens: int) -> int:
    """Pages that hold so many tokens, one at least."""
    return max(1, -(-tokens // PAGE_TOKENS))


Draw = Callable[[np.random.Generator, int], tuple[Lengths, Lengths, Lengths]]
"""Prompt lengths, answer lengths and arrivals [n] from a generator and n."""


def _uniform_short(rng: np.random.Generator, n: int) -> tuple[Lengths, Lengths, Lengths]:
    prompts = rng.integers(128, 1_025, n)
    return prompts, rng.integers(64, 257, n), np.arange(n)


def _mixed_long(rng: np.random.Generator, n: int) -> tuple[Lengths, Lengths, Lengths]:
    """Lengths of which one prompt in five is of a long document."""
    long = rng.random(n) < 0.2
    short_prompts, long_prompts = rng.integers(512, 4_097, n), rng.integers(16_384, 65_537, n)
    prompts = np.where(long, long_prompts, short_prompts)
    return prompts, rng.integers(128, 513, n), np.arange(n)


def _agentic_burst(rng: np.random.Generator, n: int) -> tuple[Lengths, Lengths, Lengths]:
    """Ten requests a tick, of very different lengths."""
    arrivals = np.ceil(np.cumsum(rng.exponential(0.1, n))).astype(np.int64)
    prompts = np.clip(rng.lognormal(8.5, 1.0, n).astype(np.int64), 64, 65_536)
    return prompts, rng.integers(64, 257, n), arrivals


SHAREGPT_PROMPTS = (
    *((0, 1), (35, 16), (40, 18), (45, 21), (50, 25), (55, 29), (60, 35), (65, 44), (70, 60)),
    *((75, 79), (80, 113), (85, 177), (90, 344), (92, 448), (94, 633), (95, 793), (96, 945)),
    *((97, 1_156), (98, 1_461), (99, 2_124), (99.5, 2_674), (99.9, 3_753), (100, 6_708)),
)
"""Percentiles of the tokens of 5,000 ShareGPT prompts, which the authors take as 1.3 times their
words."""


def _sharegpt_replay(rng: np.random.Generator, n: int) -> tuple[Lengths, Lengths, Lengths]:
    """The authors draw from the 5,000 lengths; here they come from their percentiles."""
    at, tokens = zip(*SHAREGPT_PROMPTS, strict=True)
    prompts = np.interp(100 * rng.random(n), at, tokens).astype(np.int64)
    answers = np.clip(rng.lognormal(4.5, 1.0, n).astype(np.int64), 32, 2_048)
    return np.clip(prompts, 16, 4_096), answers, np.arange(n)


@dataclass(frozen=True)
class Workload:
    """The number of requests, the way they are drawn, and the first of the seeds."""

    count: int
    draw: Draw
    seed: int

    def requests(self, replicate: int) -> list[LiveRequest]:
        """The requests in order of arrival; the same for the same `replicate` (0, 1, ..)."""
        rng = np.random.default_rng(self.seed + replicate)
        columns = (column.tolist() for column in self.draw(rng, self.count))
        return [LiveRequest(number, *row) for number, row in enumerate(zip(*columns, strict=True))]


WORKLOADS = {
    "uniform_short": Workload(512, _uniform_short, seed=1),
    "mixed_long": Workload(256, _mixed_long, seed=2),
    "agentic_burst": Workload(256, _agentic_burst, seed=3),
    "sharegpt_replay": Workload(512, _sharegpt_replay, seed=4),
}

IN_TOTALS = ("uniform_short", "mixed_long", "agentic_burst")
"""The workloads that the paper's totals sum."""
