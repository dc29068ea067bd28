"""A server's answers forced to be those of a trace.

Servers import this module by its name, so they run in the repository's folder.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class ForcedAnswer(CustomLogitProcessor):  # type: ignore[misc]
    """Makes `custom_params["answer"]` the greedy answer.

    Which of its tokens is due follows from the tokens that the request has committed, this step's
    included: with the overlap scheduler its list of output tokens is a step behind, and a chunk of
    a prompt that is not its last samples a token that nobody reads.
    """

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or ()):
            req, answer = params["__req__"], params["answer"]
            due = req.kv.kv_committed_len - len(req.origin_input_ids)
            if 0 <= due < len(answer):
                logits[row] = -1e9
                logits[row, answer[due]] = 0.0
        return logits
