"""Penalties count each token of an answer once, whatever shares its batches or retracts it.

SGLang counts the newest token that it knows before each step. Which one that is depends on the
batches in between, and a retracted request begins again with none (sampling/penaltylib). Here the
position of the step says which token is counted. An answer that nothing disturbs is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_hybrid.serving.device_streams import to_device


def count_newest(batch: Any) -> None:
    """Count one token for each request of a batch that is about to decode."""
    newest = []
    for req in batch.reqs:
        known = len(req.origin_input_ids) + len(req.output_ids)
        at = min(req.kv.kv_committed_len - _lag(batch), known - 1)
        newest += _tokens(req, at, 1)
    on_device = _on_device(newest, batch)
    batch.sampling_info.penalizer_orchestrator.cumulate_output_tokens(on_device)


def count_earlier(orchestrator: Any) -> None:
    """Count what the requests of a prefill have answered before, if they were retracted."""
    batch = orchestrator.batch
    for row, req in enumerate(batch.reqs):
        behind_prompt = req.kv.kv_committed_len - len(req.origin_input_ids)
        if behind_prompt > 0:
            first = len(req.origin_input_ids) - _lag(batch)
            tokens = _on_device(_tokens(req, first, behind_prompt), batch)
            for penalizer in orchestrator.penalizers.values():
                if penalizer.is_prepared():
                    _COUNT[type(penalizer).__name__](penalizer, row, tokens)


def _lag(batch: Any) -> int:
    """Tokens that penalties lag behind: with the overlap scheduler a step is prepared before the
    one before it has said its token. So the last token of the prompt counts, and the newest not.
    """
    return int(batch.enable_overlap)


def _tokens(req: Any, first: int, count: int) -> list[int]:
    """`count` tokens of prompt and answer, from position `first` on."""
    prompt = len(req.origin_input_ids)
    behind = max(first - prompt, 0), max(first + count - prompt, 0)
    return [*req.origin_input_ids[first : first + count], *req.output_ids[slice(*behind)]]


def _on_device(tokens: list[int], batch: Any) -> torch.Tensor:
    return to_device(torch.tensor(tokens, dtype=torch.int64), batch.device)


def _count_frequency(penalizer: Any, row: int, tokens: torch.Tensor) -> None:
    penalty = penalizer.frequency_penalties[row].expand(len(tokens))
    penalizer.cumulated_frequency_penalties[row].index_add_(0, tokens, penalty)


def _count_presence(penalizer: Any, row: int, tokens: torch.Tensor) -> None:
    penalizer.cumulated_presence_penalties[row, tokens] = penalizer.presence_penalties[row]


def _count_repetition(penalizer: Any, row: int, tokens: torch.Tensor) -> None:
    penalizer.cumulated_repetition_penalties[row, tokens] = penalizer.repetition_penalties[row]


def _count_length(penalizer: Any, row: int, tokens: torch.Tensor) -> None:
    penalizer.len_output_tokens[row] += len(tokens)


_COUNT: dict[str, Callable[[Any, int, torch.Tensor], None]] = {
    "BatchedFrequencyPenalizer": _count_frequency,
    "BatchedPresencePenalizer": _count_presence,
    "BatchedRepetitionPenalizer": _count_repetition,
    "BatchedMinNewTokensPenalizer": _count_length,
}
"""Counts of tokens of one row, for SGLang's penalizers. Their own method counts one for every row.
"""
