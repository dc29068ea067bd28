"""Messages as SGLang's tokenizer sends them to a scheduler."""

from __future__ import annotations

from array import array

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams


def generation(tokens: int | None, rid: str | None = None) -> TokenizedGenerateReqInput:
    """A request with a prompt of so many tokens; None for one without token ids."""
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=None if tokens is None else array("q", [1] * tokens),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )
