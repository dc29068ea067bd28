"""The time of a prefill as a formula of its tokens: the paper's fit, or one of our own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.named_files import read_json
from sglang_hybrid.core.sentences import escape
from sglang_hybrid.extensions.lab.simulation.traces.lines import whole_file, write_line

Seconds = Annotated[float, Meta(ge=0, le=1e6)]


@dataclass(frozen=True)
class PrefillTime:
    """Seconds of a prefill of n new tokens after a hit of h: base + per_token * n + per_pair *
    (pairs of new tokens and those they attend to) + per_hit * h, for what must be read of the hit;
    and seconds per decoded token.

    about: where the numbers come from. error: relative error of the fit, 0 if there was none.
    """

    base: Seconds
    per_token: Seconds
    per_pair: Seconds
    decode: Seconds
    about: str
    error: float = 0.0
    per_hit: Seconds = 0.0

    def seconds(self, hit: int, new: int) -> float:
        work = self.per_token * new + self.per_pair * pairs(hit, new)
        return self.base + work + self.per_hit * hit

    @classmethod
    def fit(
        cls, measured: Sequence[tuple[int, int, float]], decode: float, about: str
    ) -> PrefillTime:
        """Fit to (hit, new, seconds); relative errors count, and no coefficient is negative. Raises
        ValueError for fewer than four measurements.
        """
        from scipy.optimize import nnls  # half a second that no replay needs

        if len(measured) < 4:
            raise ValueError(f"a fit needs four measurements or more, not {len(measured)}")
        rows = np.array([[1.0, new, pairs(hit, new), hit] for hit, new, _ in measured])
        seconds = np.array([s for _, _, s in measured])
        scale = np.maximum(rows.max(axis=0), 1.0)
        weights, _ = nnls(rows / scale / seconds[:, None], np.ones(len(seconds)))
        base, per_token, per_pair, per_hit = (weights / scale).tolist()
        wrong = rows @ (weights / scale) / seconds - 1
        error = float(np.sqrt(np.mean(wrong**2)))
        return cls(base, per_token, per_pair, decode, about, error, per_hit)

    @classmethod
    def read(cls, path: Path) -> PrefillTime:
        """The formula that `write` wrote. Raises FileError."""
        read = read_json(path, cls, "prefill time of fit_prefill.py")
        return replace(read, about=escape(read.about))

    def write(self, path: Path) -> None:
        with whole_file(path) as file:
            write_line(file, asdict(self))


PAPER = PrefillTime(  # the artifact's fit to Jamba-1.5-Mini on four A100 (marconi-notes.md 1.6)
    0.01781,
    5.2964e-5,
    0.0,
    decode=0.02,
    about="the paper's fit (Jamba-1.5-Mini, 4 A100); 20 ms per decoded token is assumed",
)

PAPER_FLOPS = 2 * 12e9
"""FLOPs of a token in the model of that fit: 12 billion active parameters (its model card)."""


def at_papers_rate(cost: CostModel) -> PrefillTime:
    """The time of another model on the paper's machine, if it computes as many FLOPs a second."""
    short, long = 1_000, 10_000
    first, second = cost.flops(short) / short, cost.flops(long) / long
    of_pair = max(0.0, second - first) / ((long - short) / 2)
    of_token = first - of_pair * (short + 1) / 2
    seconds = PAPER.per_token / PAPER_FLOPS
    return replace(
        PAPER,
        per_token=seconds * of_token,
        per_pair=seconds * of_pair,
        about="this model's FLOPs at the rate of the paper's fit (4 A100), not measured; 20 ms per "
        "decoded token is assumed",
    )


def pairs(hit: int, new: int) -> int:
    """Pairs of `new` tokens and those they attend to: all `hit` before, and each other causally."""
    return new * hit + new * (new + 1) // 2
