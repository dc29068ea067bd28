"""Values that single fields may hold, and the errors about others."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_hybrid.serving.requests import fields
from tests.serving.requests.refusals import refused

VOCABULARY = 100


def test_token_ids_of_the_vocabulary() -> None:
    fields.token_ids("input_ids", [], VOCABULARY)
    fields.token_ids("input_ids", [0, 99, 5], VOCABULARY)


@pytest.mark.parametrize(
    ("ids", "at", "shown"),
    [
        ([-1], 0, "-1"),
        ([3, 100], 1, "100"),
        ([3, 4, 10**12], 2, "1000000000000"),
        ([10**30], 0, str(10**30)),
        ([10**300], 0, "a number of 997 bits"),
        ([1, 1.5], 1, "1.5"),
        (["a"], 0, "'a'"),
        ([1, None], 1, "None"),
        ([5] * 1000 + [-2] * 1000, 1000, "-2"),
    ],
)
def test_a_token_id_outside_the_vocabulary(ids: list[Any], at: int, shown: str) -> None:
    said = refused(fields.token_ids, "input_ids", ids, VOCABULARY)
    assert said.startswith(f"input_ids[{at}] is {shown}; ") and "from 0 to 99" in said
