"""The loss of prompts that are composed of segments with recurrent layers, as it was measured, and
which kinds of layers are refused for it.

docs/results/modular.md has the measurements, and `tests/scripts/test_segments.py` compares these
numbers with that page. This file needs nothing but Python, for the HTTP process reads it, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MOST_POINTS: Final = 3.3
"""Points, of 100 questions, that a composed prompt may answer less of than the whole one."""


@dataclass(frozen=True)
class Loss:
    """Loss of one kind of recurrent layer. points: questions of 100 that were no longer answered
    behind composed prompts without a seam window, in the worst row of a task that was learnt.
    seam: tokens of the smallest seam window that loses at most `MOST_POINTS`; None if none does.
    """

    layers: str
    points: float
    seam: int | None = 0


MAMBA2: Final = Loss("Mamba-2", 0.8)
GATED_DELTA_NET: Final = Loss("gated delta nets", 1.2)
KDA: Final = Loss("KDA", 3.1)

LOSSES: Final = {
    "nemotron_h": MAMBA2,
    "falcon_h1": MAMBA2,
    "granitemoehybrid": MAMBA2,
    "qwen3_next": GATED_DELTA_NET,
    "qwen3_5": GATED_DELTA_NET,
    "qwen3_5_moe": GATED_DELTA_NET,
    "kimi_linear": KDA,
}
"""Losses by type of model. Other types were not measured."""


def why_refused(model_type: str) -> str:
    """The reason why states of models of this type, which has recurrent layers, are not composed,
    as a clause; empty if they are. The server computes no seam windows, so a kind that needs one is
    refused.
    """
    kind = model_type.removesuffix("_text")
    loss = LOSSES.get(kind)
    if loss is None:
        return (
            f"what prompts of {model_type}, a model with recurrent layers, lose that are composed "
            "of modules is not known"
        )
    if loss.seam == 0:
        return ""
    return (
        f"prompts that are composed of modules lose up to {loss.points:g} points with "
        f"{loss.layers}, and {MOST_POINTS:g} is the most that this server accepts"
    )
