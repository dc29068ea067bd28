"""Penalties are those of the tokens before, whatever has happened to a request meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

VOCABULARY = 32
PROMPT = [3, 1, 4]
ANSWER = [5, 9, 2, 6, 5, 3]
PENALIZERS = {
    penaltylib.BatchedFrequencyPenalizer,
    penaltylib.BatchedMinNewTokensPenalizer,
    penaltylib.BatchedPresencePenalizer,
    penaltylib.BatchedRepetitionPenalizer,
}


class Batch(SimpleNamespace):
    """The part of SGLang's batch that penalties need."""


def request(known: int) -> Any:
    """A request that has said the first `known` tokens of its answer, and is to be prefilled."""
    wanted = SamplingParams(
        frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0, min_new_tokens=4
    )
    return SimpleNamespace(
        origin_input_ids=PROMPT,
        output_ids=ANSWER[:known],
        kv=SimpleNamespace(kv_committed_len=len(PROMPT) + known),
        sampling_params=wanted,
        eos_token_ids={0},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=0),
    )


def prefilled(overlap: bool, *requests: Any) -> Any:
    batch = Batch(
        reqs=list(requests),
        device="cpu",
        enable_overlap=overlap,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(VOCABULARY, batch, PENALIZERS)
    batch.sampling_info = SimpleNamespace(penalizer_orchestrator=orchestrator)
    return batch


def decode(batch: Any) -> None:
    """Prepare a step of each request, as `ScheduleBatch.prepare_for_decode` does."""
    ScheduleBatch.cumulate_penalty_output_tokens(batch)
    for req in batch.reqs:
        req.kv.kv_committed_len += 1


def penalties(batch: Any, row: int = 0) -> list[tuple[float, float]]:
    """The sums added to each logit of a request of the batch, and the factor or divisor."""
    penalizers = batch.sampling_info.penalizer_orchestrator
    added = torch.zeros(len(batch.reqs), VOCABULARY)
    penalizers.accumulate_additive_penalties(added)
    scaling = penalizers.accumulate_scaling_penalties()
    return list(zip(added[row].tolist(), scaling[row].tolist(), strict=True))


def undisturbed(overlap: bool) -> list[list[tuple[float, float]]]:
    """The penalties before each token of `ANSWER`, and behind the last. With the
    overlap scheduler a step is prepared before the token of the one before is known.
    """
    req = request(0)
    batch = prefilled(overlap, req)
    seen = [penalties(batch)]
    for step in range(len(ANSWER)):
        req.output_ids = ANSWER[: step + (not overlap)]
        decode(batch)
        seen.append(penalties(batch))
    return seen


def test_every_token_counts() -> None:
    first, *_, last = undisturbed(False)
    assert first[0] == (float("-inf"), 1) and last[0] == (0, 1)
    assert last[1] == first[1] == (0, 1)
    assert last[9] == (-0.5 - 0.25, 2)
    assert last[5] == (-2 * 0.5 - 0.25, 2)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("known", range(len(ANSWER)))
def test_a_retracted_request_goes_on_where_it_was(known: int, overlap: bool) -> None:
    """It is prefilled with what it has said, in the middle of a batch, and decodes on."""
    right = undisturbed(overlap)
    again = request(known)
    others = request(0), request(1)
    batch = prefilled(overlap, others[0], again, others[1])
    for other in others:
        other.output_ids = ANSWER * 2
    assert penalties(batch, 1) == right[known]
    for step in range(known, len(ANSWER)):
        again.output_ids = ANSWER[: step + (not overlap)]
        decode(batch)
        assert penalties(batch, 1) == right[step + 1]


@pytest.mark.parametrize("known_sooner", range(1, len(ANSWER)))
def test_a_token_that_is_known_sooner_counts_once(known_sooner: int) -> None:
    """The overlap scheduler knows a token when the next step but one is prepared, or, if a prefill
    of others comes in between, the next one.
    """
    req = request(0)
    batch = prefilled(True, req)
    for step in range(len(ANSWER)):
        req.output_ids = ANSWER[: step + (step >= known_sooner)]
        decode(batch)
    assert penalties(batch) == undisturbed(True)[-1]
