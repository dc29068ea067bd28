"""Values that a request's parameters may have, and the errors about others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglang_hybrid.extensions.guard import parameters
from tests.serving.requests.refusals import refused

VOCABULARY = 100


class Params(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    max_new_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    stop_token_ids: set[int] | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    stream_interval: int | None = None
    json_schema: str | None = None
    sampling_seed: int | None = None


def test_logprobs() -> None:
    parameters.logprobs(-1, 0, 0, 10, 128, 32_000, 4_096)
    parameters.logprobs(10, 1_000, 50, 10, 128, 32_000, 4_096)
    parameters.logprobs(0, 0, 0, 10**7, 10**7, 32_000, 4_096)  # one for each token is always given
    assert (
        refused(parameters.logprobs, -5, 0, 0, 10, 1, 32_000, 4_096)
        == "logprob_start_len is -5; it must be from -1 to 10."
    )
    assert "logprob_start_len is 11;" in refused(
        parameters.logprobs, 11, 0, 0, 10, 1, 32_000, 4_096
    )
    assert (
        refused(parameters.logprobs, 0, 1_000_000, 0, 10, 1, 32_000, 4_096)
        == "top_logprobs_num is 1000000; it must be from 0 to 1,000."
    )
    assert "from 0 to 100." in refused(parameters.logprobs, 0, 101, 0, 10, 1, VOCABULARY, 4_096)
    many = refused(parameters.logprobs, 0, 1_000, 0, 100_000, 1, 32_000, 4_096)
    assert "top_logprobs_num is 1000" in many and "at most 4,194,304" in many
    assert "names 5000 tokens" in refused(
        parameters.logprobs, -1, 0, 5_000, 10, 1_000, 32_000, 4_096
    )


def test_a_chat_may_ask_for_20_alternatives_of_each_token_whatever_the_context() -> None:
    """An answer may be as long as the context without `max_tokens`."""
    for context in (4_096, 262_144, 1 << 20):
        parameters.logprobs(-1, 20, 0, 10, context - 10, 150_000, context)
    assert "at most 5,505,024" in refused(
        parameters.logprobs, -1, 21, 0, 10, 262_134, 150_000, 262_144
    )


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"n": None, "max_new_tokens": None},
        {"n": 1_024, "temperature": 0, "top_k": -1, "stop": ["a", "b"], "stop_regex": "a+"},
        {"logit_bias": {"5": -100, "7": 100.0}, "sampling_seed": -(2**63)},
        {"stop_token_ids": [0, 99], "min_new_tokens": 2**31 - 1, "json_schema": "[" * 64},
    ],
)
def test_sampling_parameters_that_are_right(params: dict[str, Any]) -> None:
    parameters.sampling_params(params, Params, frozenset({"is_normalized"}), VOCABULARY)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"is_normalized": True}, "sampling_params.is_normalized is set by the server itself;"),
        ({"foo": 1}, "unknown field `foo`"),
        ({"max_new_tokens": 1.5}, "sampling_params.max_new_tokens is 1.5; it must be int or null"),
        ({"stop": ["a", 1]}, "sampling_params.stop[1] is ['a', 1]; it must be str, not int."),
        ({"n": 0}, "sampling_params.n is 0; it must be from 1 to 1,024."),
        ({"n": 10**9}, "it must be from 1 to 1,024."),
        ({"temperature": float("nan")}, "sampling_params.temperature is nan; it must be from 0"),
        ({"temperature": 1e300}, "it must be from 0 to 1,000,000."),
        ({"top_k": 10**12}, "sampling_params.top_k is 1000000000000; it must be from -1 to"),
        ({"sampling_seed": 2**63}, "sampling_params.sampling_seed is 9223372036854775808;"),
        ({"logit_bias": {"5": 1e308}}, "sampling_params.logit_bias['5'] is 1e+308; it must be"),
        ({"logit_bias": {"5": float("nan")}}, "sampling_params.logit_bias['5'] is nan;"),
        ({"logit_bias": {"100": 1}}, "sampling_params.logit_bias has the key '100'; its keys are"),
        ({"logit_bias": {"1_0": 1}}, "has the key '1_0'; its keys are token ids from 0 to 99."),
        ({"stop_token_ids": [100]}, "sampling_params.stop_token_ids[0] is 100; a token id of this"),
        ({"min_new_tokens": 2**31}, "min_new_tokens is 2147483648; it must be from 0 to"),
        ({"repetition_penalty": 1e-30}, "it must be from 0.001 to 2."),
        ({"stream_interval": 0}, "sampling_params.stream_interval is 0; it must be from 1 to"),
        ({"json_schema": "[" * 65}, "sampling_params.json_schema is nested 65 deep; it may be 64"),
        ({"stop": "a" * 1_025}, "stop[0] has 1,025 characters; it may have 1,024 at most."),
        ({"stop": ["a"] * 33}, "sampling_params.stop has 33 items; it may have 32 at most."),
        ({"stop_regex": ["(", "a" * 257]}, "stop_regex[1] has 257 characters; it may have 256"),
        ({"stop_regex": ["("] * 33}, "sampling_params.stop_regex has 33 items; it may have 32"),
        ({"stop_regex": ["a", "("]}, "sampling_params.stop_regex is '(', which is no regular"),
    ],
)
def test_sampling_parameters_that_are_wrong(params: dict[str, Any], said: str) -> None:
    internal = frozenset({"is_normalized"})
    assert said in refused(parameters.sampling_params, params, Params, internal, VOCABULARY)


def test_positions_in_a_prompt() -> None:
    parameters.positions("token_indices_to_pool", [0, 3, 9], 10)
    for given, at in (([10], 0), ([-1], 0), ([3, 3], 1), ([5, 4], 1), ([0, "a"], 1)):
        said = refused(parameters.positions, "token_indices_to_pool", given, 10)
        assert said.startswith(f"token_indices_to_pool[{at}] is ") and "from 0 to 9" in said
    assert "is empty" in refused(parameters.positions, "token_indices_to_pool", [], 10)
