"""Arrivals and lengths of requests, drawn from distributions or from Azure's traces."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.sentences import quote
from sglang_hybrid.core.traffic.requests import MOST_TOKENS
from sglang_hybrid.extensions.lab.simulation.traces.lines import Skipped, TraceError, numbered_lines

Floats = npt.NDArray[np.float64]
WORDS_PER_SECOND = 1.5  # a person who types 90 words a minute
MOST_TURNS: Final = 100_000
"""Turns of a session, at most."""


@dataclass(frozen=True)
class Draw:
    """A distribution of lengths (tokens) or times (seconds) that can be written on a command line.

    `const:A`, `uniform:A:B`, `exp:MEAN`, `poisson:MEAN`, `lognormal:MEDIAN:SIGMA`.
    """

    kind: str
    a: float
    b: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Draw:
        """Raises ValueError, in one sentence, for what is none of the above."""
        kind, *numbers = text.split(":")
        wanted = {"const": 1, "uniform": 2, "exp": 1, "poisson": 1, "lognormal": 2}
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        if wanted.get(kind) != len(values) or not all(0 <= v < 1e9 for v in values):
            raise ValueError(
                f"{quote(text)} is no distribution; write const:A, uniform:A:B, exp:MEAN, "
                "poisson:MEAN or lognormal:MEDIAN:SIGMA, with numbers of 0 or more"
            )
        if kind == "uniform" and values[0] > values[1]:
            raise ValueError(f"{quote(text)} begins above its end")
        return cls(kind, *values)

    def __str__(self) -> str:
        numbers = (self.a, self.b) if self.kind in ("uniform", "lognormal") else (self.a,)
        return ":".join([self.kind, *(f"{value:g}" for value in numbers)])

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        """`count` values [n], 0 or more. Raises ValueError for one that is no number."""
        if self.kind == "uniform":
            values = rng.uniform(self.a, self.b, count)
        elif self.kind == "exp":
            values = rng.exponential(self.a, count)
        elif self.kind == "poisson":
            values = rng.poisson(self.a, count).astype(np.float64)
        elif self.kind == "lognormal":
            with np.errstate(over="ignore"):
                values = self.a * rng.lognormal(0.0, self.b, count)
        else:
            values = np.full(count, self.a)
        if not np.isfinite(values).all():
            raise ValueError(f"{self} drew a number that is too large")
        return values

    def lengths(self, rng: np.random.Generator, count: int, most: int = MOST_TOKENS) -> list[int]:
        """`count` whole numbers, at least 1. Raises ValueError for one of more than `most`."""
        drawn = np.maximum(1, np.rint(self.draw(rng, count)))
        if count and not drawn.max() <= most:
            raise ValueError(f"{self} drew {drawn.max():,.0f}; {most:,} is the most")
        lengths: list[int] = drawn.astype(int).tolist()
        return lengths


@dataclass(frozen=True)
class Azure:
    """Azure's LLM inference trace: seconds from its first request, lengths of prompts and answers,
    each [n].
    """

    arrivals: Sequence[float]
    prompts: Sequence[int]
    answers: Sequence[int]

    @classmethod
    def read(cls, path: Path, limit: int | None = None, skipped: Skipped | None = None) -> Azure:
        """Read the CSV `TIMESTAMP,ContextTokens,GeneratedTokens`, gzip or not. Raises
        TraceError.
        """
        skipped = skipped or Skipped()
        rows: list[tuple[float, int, int]] = []
        first: datetime | None = None
        for number, line in numbered_lines(path, skipped):
            if number == 1 and line.startswith(b"TIMESTAMP"):
                continue
            if limit is not None and len(rows) >= limit:
                break
            try:
                (row,) = csv.reader(io.StringIO(line.decode()))
                stamp, prompt, answer = row
                when = datetime.fromisoformat(stamp[:26])
                first = first or when
                record = ((when - first).total_seconds(), int(prompt), int(answer))
                if record[1] < 1 or record[2] < 0:
                    raise ValueError("it has no prompt, or an answer of negative length")
                if record[1] + record[2] > MOST_TOKENS:
                    raise ValueError(f"it has more than {MOST_TOKENS:,} tokens")
                if record[0] < (rows[-1][0] if rows else 0.0):
                    raise ValueError("it arrived before the line above")
            except (ValueError, TypeError, csv.Error) as error:  # TypeError: one time zone of two
                skipped.bad(f"{path}:{number}: not a line of Azure's trace ({error})", error)
                continue
            rows.append(record)
        if not rows:
            raise TraceError(f"{path} holds no request")
        arrivals, prompts, answers = zip(*rows, strict=True)
        return cls(arrivals, prompts, answers)


def session_starts(rng: np.random.Generator, count: int, rate: float) -> list[float]:
    """Poisson arrivals of `count` sessions, `rate` a second, the first at 0. Raises ValueError for
    a rate that is not positive.
    """
    if not rate > 0:
        raise ValueError(f"sessions a second must be more than 0, not {rate:g}")
    starts: list[float] = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    return [start - starts[0] for start in starts]
