"""The hidden state of a prompt's last token: what SGLang's `LogitsProcessor` reads to say what
comes next. A forward leaves it for prompts that are asked again, and a batch of such prompts is
answered from it: no layer runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput


@dataclass(frozen=True)
class LastHidden:
    """hidden [d], on the device, in the model's type. processor, lm_head: what reads it."""

    hidden: Tensor
    processor: Any
    lm_head: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the hidden state."""
        return self.hidden.nbytes


@dataclass
class HiddenCapture:
    """The last hidden states that a prefill shall leave: of the sequences `rows` of its batch.

    left: these, in the order of `rows`, once the forward has been launched; empty where its
    processor reads something else.
    """

    rows: list[int]
    left: list[LastHidden] = field(default_factory=list)

    def take(self, processor: Any, lm_head: Any, hidden: Tensor, lengths: list[int]) -> None:
        """The processor is about to read `hidden` [T, d], the packed states of sequences with
        `lengths` new tokens each, and of padding behind them where a graph computed them.
        """
        ends = list(accumulate(lengths))
        if hidden.shape[0] >= ends[-1]:
            # Each row is a copy of its own: a view would keep the rows of the whole batch.
            last = [hidden[ends[row] - 1].clone() for row in self.rows]
            self.left = [LastHidden(state, processor, lm_head) for state in last]


_under_way: HiddenCapture | None = None


@contextmanager
def capturing(wanted: HiddenCapture) -> Iterator[None]:
    """The forward that is launched within leaves what is `wanted`."""
    global _under_way
    _under_way = wanted
    try:
        yield
    finally:
        _under_way = None


def current_capture() -> HiddenCapture | None:
    """The hidden states that the forward that is being launched shall leave. SGLang gives its
    layers a copy of the batch, without what we add to it.
    """
    return _under_way


@dataclass(frozen=True)
class Answers:
    """The last hidden states of all sequences of a batch, which has nothing else to compute."""

    states: list[LastHidden]

    def logits(self, input_ids: Tensor, forward_batch: Any) -> LogitsProcessorOutput:
        """Called with the results of a forward. input_ids [S]: of each sequence its last token."""
        first = self.states[0]
        hidden = torch.stack([state.hidden for state in self.states])
        found: LogitsProcessorOutput = first.processor(
            input_ids, hidden, first.lm_head, forward_batch
        )
        return found
