"""Changes by hooks on SGLang's models."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context

from sglang_hybrid.hooks import models
from sglang_hybrid.storage import weights


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

    models.use_serving_dtype(make, "layer", 2, 3, 4, torch.float32, parallel_group="tp")
    models.use_serving_dtype(make, "layer", 2, 3, 4, dtype=torch.float32)
    wanted = ("layer", (2, 3, 4, torch.bfloat16))
    assert made == [(*wanted, {"parallel_group": "tp"}), (*wanted, {})]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("outer", [{}, {"start_layer": 4, "end_layer": 8}])
def test_a_stage_has_the_layers_that_its_inner_model_names(
    stages: int, outer: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(pp_size=stages))
    model = SimpleNamespace(model=SimpleNamespace(start_layer=2, end_layer=4), **outer)
    changed = models.use_own_layers(model=model, model_num_layers=8)
    if stages == 1 or outer:
        assert changed is None
    else:
        assert changed == ((), {"model": model.model, "model_num_layers": 8})
    assert models.use_own_layers(model=SimpleNamespace(), model_num_layers=8) is None


@pytest.mark.parametrize(
    ("tags", "saves", "kept", "changes"),
    [
        (None, True, False, 1),
        (["weights"], True, False, 1),
        (["kv_cache"], True, False, 0),
        (None, True, True, 0),
        (None, False, False, 0),
    ],
)
def test_weights_that_nothing_keeps_are_others_when_they_come_back(
    monkeypatch: pytest.MonkeyPatch,
    tags: list[str] | None,
    saves: bool,
    kept: bool,
    changes: int,
) -> None:
    told: list[None] = []
    monkeypatch.setattr(weights, "on_change", lambda: told.append(None))
    arguments = SimpleNamespace(enable_weights_cpu_backup=kept)
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: arguments)
    manager = SimpleNamespace(memory_saver_adapter=SimpleNamespace(enabled=saves))
    models.forget_released_weights(manager, SimpleNamespace(tags=tags))
    assert len(told) == changes
