"""The cost model's FLOPs of a token are those that hooks count in transformers' layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.costs.model_config import read_layers
from sglang_hybrid.extensions.cpu.models import ARCHITECTURES
from sglang_hybrid.extensions.cpu.models.tokenizer import FIRST_TEXT_ID
from tests.reference import load_reference

SCAN = {
    **dict.fromkeys(("qwen3-next", "qwen3.5", "qwen3.5-vl", "qwen4-exp"), 7),
    **dict.fromkeys(("kimi-linear", "ling-3", "glm-5-next"), 7),
    **dict.fromkeys(("gigachat-3.5", "jet-nemotron"), 7),
    "falcon-mamba": 8,
    "transformer": 0,
}
"""FLOPs of each value of a state for a token; of Mamba2 it is 5."""
TOKENS = 37


def first_product(module: Any) -> Any:
    """The weights of experts that are applied first: of gate and up projection, or of up."""
    return getattr(module, "gate_up_proj", getattr(module, "up_proj", None))


def counted(model: nn.Module, ids: Tensor) -> int:
    """FLOPs of products with weights, but the head's, and of convolutions."""
    total = 0

    def product(module: Any, given: tuple[Tensor, ...], _: Any) -> None:
        nonlocal total
        total += 2 * module.weight.numel() * (given[0].numel() // given[0].shape[-1])

    def experts(module: Any, given: tuple[Tensor, ...], _: Any) -> None:
        """Given are hidden states, the experts of each token [T, k], and their weights."""
        nonlocal total
        chosen = next(t for t in given if not t.is_floating_point()).numel()
        weights = first_product(module).numel() + module.down_proj.numel()
        total += 2 * weights // module.down_proj.shape[0] * chosen

    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d):
            total += 2 * module.weight.numel() * ids.numel()
        elif type(module).__name__.endswith("HyperConnection") and hasattr(module, "fn"):
            total += 2 * module.fn.numel() * ids.numel()
        elif isinstance(first_product(module), nn.Parameter):
            hooks.append(module.register_forward_hook(experts))
        elif name != "lm_head" and (
            isinstance(module, nn.Linear) or type(module).__name__.lower().endswith("topkrouter")
        ):
            hooks.append(module.register_forward_hook(product))
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return total


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_flops_of_a_token(name: str, model_dirs: dict[str, Path]) -> None:
    model = load_reference(model_dirs[name]).model
    ids = torch.arange(FIRST_TEXT_ID, FIRST_TEXT_ID + TOKENS)[None]
    found = counted(model, ids)
    config = json.loads((model_dirs[name] / "config.json").read_text())
    states = sum(layer.ssm_values for layer in read_layers(config).layers)
    cost = CostModel.from_config(config)
    assert not cost.assumed
    per_token = found / TOKENS + SCAN.get(name, 5) * states
    assert cost.linear - cost.quadratic == pytest.approx(per_token, rel=0.02)
