"""What hooks on SGLang's models change."""

from typing import Any

import pytest
import torch

from sglang_hybrid.hooks import models


@pytest.fixture
def served_in_bfloat16() -> Any:
    """SGLang makes a model's layers under this default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


def test_the_gates_of_kda_have_the_type_that_is_served(served_in_bfloat16: None) -> None:
    made: list[Any] = []

    def make(layer: Any, *given: Any, **named: Any) -> None:
        made.append((layer, given, named))

    models.take_the_served_type(make, "layer", 2, 3, 4, torch.float32, parallel_group="tp")
    models.take_the_served_type(make, "layer", 2, 3, 4, dtype=torch.float32)
    wanted = ("layer", (2, 3, 4, torch.bfloat16))
    assert made == [(*wanted, {"parallel_group": "tp"}), (*wanted, {})]
