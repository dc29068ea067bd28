"""Requests that are retracted every few steps, and others of their batches, are answered as if
nothing had happened.
"""

from __future__ import annotations

import pytest

from tests.server.client import (
    STRICT,
    TOLERANCE,
    Serve,
    ask,
    prompt_logprobs,
    random_prompt,
    said,
    same,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OFTEN = {**STRICT, "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"}
PROMPTS = [random_prompt(170 - 7 * number, seed=number) for number in range(16)]
"""The longest one is retracted first. It stands in front of the others of its prefill."""
ROUNDS = 3
TOKENS = 24
CONFIGURATIONS = {
    "overlap": (),
    "no overlap": ("--disable-overlap-schedule",),
    "chunks of 128": ("--chunked-prefill-size", "128"),
}
PENALTIES = {
    **{"frequency_penalty": 1.0, "presence_penalty": 1.0},
    **{"repetition_penalty": 1.5, "min_new_tokens": 12},
}


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_answers_are_those_of_a_request_alone(configuration: str, serve: Serve) -> None:
    """Tokens, log probabilities of prompt and answer, and what penalties make of them."""
    with serve(*CONFIGURATIONS[configuration], environment=OFTEN) as server:
        for sampling in ({}, PENALTIES):
            more = {"logprob_start_len": 0, "sampling": sampling}
            right = [ask(server.url, prompt, TOKENS, **more) for prompt in PROMPTS]
            retracted = 0
            for _ in range(ROUNDS):
                for record, alone in zip(
                    ask(server.url, PROMPTS, TOKENS, **more), right, strict=True
                ):
                    assert same(record, alone)
                    wanted = pytest.approx(prompt_logprobs(alone), abs=TOLERANCE)
                    assert prompt_logprobs(record) == wanted
                    retracted += record["meta_info"]["num_retractions"]
            assert retracted > ROUNDS
        assert said(server)
