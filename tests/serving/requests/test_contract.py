"""SGLang's contract of a `/generate` body about token ids (hooks/serving.py)."""

from __future__ import annotations

from typing import Any

import pytest
import sglang.srt.platforms  # noqa: F401 (finds our platform, which installs the patches)
from sglang.api.v1 import api_types


@pytest.mark.parametrize("ids", [[], [1, 2, 3], [-1, 2**63], [[1], [2, 3], []]])
def test_lists_of_whole_numbers_are_taken_as_they_are(ids: list[Any]) -> None:
    request = api_types.GenerateRequest.from_json_value({"input_ids": ids})
    assert request.input_ids == ids


@pytest.mark.parametrize("ids", [[1, True], [1, 2.0], [1, "2"], [1, None], [[1], [False]], (1, 2)])
def test_other_values_are_refused(ids: Any) -> None:
    with pytest.raises(api_types.JsonContractError, match="invalid type"):
        api_types.GenerateRequest.from_json_value({"input_ids": ids})


def test_no_function_is_called_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> int:
        raise AssertionError("a token was looked at on its own")

    monkeypatch.setattr(api_types, "_expect_int", never)
    request = api_types.GenerateRequest.from_json_value({"input_ids": [5] * 20_000})
    assert request.input_ids == [5] * 20_000
