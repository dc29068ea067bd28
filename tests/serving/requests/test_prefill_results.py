"""Results of a prefill for a request are told to that request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ReqLogprob
from sglang.srt.managers.scheduler_components import batch_result_processor
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.scheduler_components.logprob_result_processor import (
    SchedulerLogprobResultProcessor,
)
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

LENGTHS = (3, 5, 4, 2)
"""Tokens of the prompts of a batch."""


def request(number: int, length: int) -> Any:
    """Prompt `number` of a batch. It wants all that a prefill can tell of its tokens."""
    lists = ("token_logprobs", "top_logprobs", "token_ids_logprobs")
    output: dict[str, Any] = {f"output_{name}_{of}": [] for name in lists for of in ("val", "idx")}
    return SimpleNamespace(
        **dict.fromkeys(("discard_output_reason", "grammar", "beam_group", "customized_info")),
        **dict.fromkeys(("input_token_logprobs", "temp_input_top_logprobs_val")),
        **dict.fromkeys(("temp_input_top_logprobs_idx", "temp_input_token_ids_logprobs_val")),
        **dict.fromkeys(("temp_input_token_ids_logprobs_idx",)),
        **dict.fromkeys(("is_retracted", "is_prefill_only", "return_sampling_mask"), False),
        **dict.fromkeys(("return_flat_raw_top_logprobs", "require_reasoning"), False),
        **dict.fromkeys(("return_logprob", "return_hidden_states"), True),
        rid=f"request {number}",
        inflight_middle_chunks=0,
        finished=lambda: False,
        update_finish_state=lambda: None,
        origin_input_ids=[100 * number + place for place in range(length)],
        output_ids=[],
        logprob_start_len=0,
        logprob=ReqLogprob(top_logprobs_num=1, token_ids_logprob=[7], **output),
        hidden_states=[],
        time_stats=MagicMock(),
    )


def computed() -> Any:
    """The result of a forward of prompts of `LENGTHS` tokens, all read from their first token on.
    Each value says which prompt's it is, and of which token: 100 * prompt + token.
    """
    flat = [100 * number + place for number, n in enumerate(LENGTHS) for place in range(n)]
    rows = [[100 * number + place for place in range(n)] for number, n in enumerate(LENGTHS)]
    last = [row[-1] for row in rows]
    return SimpleNamespace(
        **dict.fromkeys(("copy_done", "auxiliary_host_output", "routed_experts_output")),
        **dict.fromkeys(("indexer_topk_output", "can_run_cuda_graph")),
        logits_output=LogitsProcessorOutput(
            next_token_logits=None,
            hidden_states=torch.tensor(flat, dtype=torch.float)[:, None],
            next_token_logprobs=torch.tensor(last, dtype=torch.float),
            next_token_top_logprobs_val=[torch.tensor([value]) for value in last],
            next_token_top_logprobs_idx=[torch.tensor([value]) for value in last],
            next_token_token_ids_logprobs_val=[torch.tensor([value]) for value in last],
            next_token_token_ids_logprobs_idx=[[7] for _ in last],
            input_token_logprobs=torch.tensor(flat, dtype=torch.float),
            input_top_logprobs_val=[[[value] for value in row] for row in rows],
            input_top_logprobs_idx=[[[value] for value in row] for row in rows],
            input_token_ids_logprobs_val=[[[value] for value in row] for row in rows],
            input_token_ids_logprobs_idx=[[[7] for _ in row] for row in rows],
        ),
        next_token_ids=torch.tensor(last),
        extend_input_len_per_req=list(LENGTHS),
        extend_logprob_start_len_per_req=[0] * len(LENGTHS),
        grammar_advanced=False,
    )


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's function that gives what a prefill has computed to the requests of its batch."""
    monkeypatch.setattr(batch_result_processor, "checkpoint_kv_cache", lambda *_: None)
    memory = SimpleNamespace(enable_hisparse=False)
    monkeypatch.setattr(batch_result_processor, "get_memory", lambda: memory)
    full = CaptureHiddenMode.FULL
    monkeypatch.setattr(
        batch_result_processor, "get_server_return_hidden_states_mode", lambda: full
    )
    model = SimpleNamespace(vocab_size=10_000, self_opened_think_start_ids=None, think_end_ids=None)
    parts: dict[str, Any] = {
        name: MagicMock() for name in SchedulerBatchResultProcessor.__dataclass_fields__
    }
    logprobs = SchedulerLogprobResultProcessor(model_config=model)
    parts |= {"model_config": model, "logprob_result_processor": logprobs, "is_generation": True}
    processor = SchedulerBatchResultProcessor(**parts)

    def run(requests: list[Any]) -> None:
        batch = SimpleNamespace(
            **dict.fromkeys(("decoding_reqs", "prefill_stats", "spec_info")),
            **dict.fromkeys(("return_logprob", "return_hidden_states"), True),
            reqs=requests,
            return_hidden_states_mode=CaptureHiddenMode.FULL,
        )
        processor.process_batch_result_prefill(batch, computed())

    return run


@pytest.mark.parametrize("number", range(len(LENGTHS)))
@pytest.mark.parametrize("gone", ["retracted", "finished"])
def test_others_of_a_batch_get_their_own(gone: str, number: int, process: Any) -> None:
    """A request that has ended, or was retracted, between a prefill's start and its result takes
    its own values with it: those of no other one. The last prompt goes on in the next prefill.
    """
    requests = [request(each, length) for each, length in enumerate(LENGTHS)]
    requests[-1].inflight_middle_chunks = 1
    requests[number].inflight_middle_chunks = 0
    if gone == "finished":
        requests[number].finished = lambda: True
    else:
        requests[number].is_retracted = True
    process(requests)
    for each, (req, length) in enumerate(zip(requests, LENGTHS, strict=True)):
        own = [100 * each + place for place in range(length)]
        if each == number:
            assert not (req.output_ids or req.hidden_states or req.input_token_logprobs)
            assert req.logprob.input_token_logprobs_val is None
        elif each == len(LENGTHS) - 1:
            assert req.input_token_logprobs == own
            assert req.temp_input_top_logprobs_val == [[[value] for value in own]]
            assert req.temp_input_token_ids_logprobs_val == [[[value] for value in own]]
        else:
            rows = [[value] for value in own]
            assert req.logprob.input_token_logprobs_val == [None, *own[:-1]]
            assert req.logprob.input_top_logprobs_val == [None, *rows[:-1]]
            assert req.logprob.input_token_ids_logprobs_val == [None, *rows[:-1]]
            assert req.hidden_states == [rows]
            assert req.output_ids == req.logprob.output_token_logprobs_val == own[-1:]
            assert req.logprob.output_top_logprobs_val == rows[-1:]
            assert req.logprob.output_token_ids_logprobs_val == rows[-1:]
