"""Traces of real traffic, if this machine has them: beside the repository, in ../shared/traces. And
the same traffic of a model that thinks.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sglang_hybrid.core.traffic.requests import Request

TRACES = Path(__file__).parents[2] / "shared" / "traces"
REPLY_OPENER = (2**31 - 4, 2**31 - 3, 2**31 - 2)
THOUGHT = [2**31 - 1] * 2
"""The beginning of a reply, and what a prompt for one has behind that, in tokens of no trace."""


def leave_out_thoughts(requests: Sequence[Request]) -> list[Request]:
    """The same requests of a model that thinks. A prompt ends with the reply's opener, in the place
    of its last tokens, and with the start of a thought; the answer goes on with that. Later prompts
    have the opener, and no thought.
    """
    size = len(REPLY_OPENER)
    told = [request.tokens.copy() for request in requests]
    for at, request in enumerate(requests):
        end = request.input_len
        for later, tokens in zip(requests[at:], told[at:], strict=True):
            ends_alike = later.input_len >= end and later.tokens[end - 1] == request.tokens[end - 1]
            if ends_alike and np.array_equal(later.tokens[:end], request.tokens[:end]):
                tokens[end - size : end] = REPLY_OPENER
    thinking = []
    for request, tokens in zip(requests, told, strict=True):
        end = request.input_len
        whole = np.concatenate([tokens[:end], np.array(THOUGHT, np.int32), tokens[end:]])
        reply = {"input_len": end + len(THOUGHT), "reply_start": end - size}
        thinking.append(replace(request, kept=whole, **reply))
    return thinking
