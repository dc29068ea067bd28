"""docs/models.md says of published configurations what the cost model does, and of embedded models
what they are compared with.
"""

from __future__ import annotations

import json
from pathlib import Path

from sglang_hybrid.cache.tiers.measured_speeds import DISK, HOST_ON_ACCELERATOR, ON_ACCELERATOR
from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.costs.model_config import read_layers
from sglang_hybrid.core.tiers.rates import Link
from sglang_hybrid.extensions.cpu.models import ARCHITECTURES, ensure_tiny_model
from tests.reference import TWINS
from tests.rehearsal.models import FLASH_NEXT, MODELS
from tests.tables import table

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
COLUMNS = (
    "model",
    "layers with a state",
    "a state, MB",
    "KV of a token, KB",
    "a state is as large as the KV of",
    "a copy on the host pays from",
    "a copy on disk pays from",
    "embedded model of its kind",
    "which is compared with",
)
KINDS = {
    "nemotron_h": ("Mamba-2", "nemotron-h"),
    "qwen3_next": ("gated delta net", "qwen3-next"),
    "qwen3_5_text": ("gated delta net", "qwen3.5"),
    "qwen3_5_moe_text": ("gated delta net", "qwen3.5"),
    "qwen4_exp_text": ("gated delta net or short convolution", "qwen4-exp"),
    "falcon_h1": ("Mamba-2", "falcon-h1"),
    "granitemoehybrid": ("Mamba-2", "granite-hybrid"),
    "kimi_linear": ("Kimi delta attention", "kimi-linear"),
    "glm5_next_text": ("Kimi delta attention", "glm-5-next"),
    "bailing_hybrid": ("Kimi delta attention", "ling-3"),
    "gigachat3_5": ("gated delta net", "gigachat-3.5"),
    "jet_nemotron": ("gated delta net", "jet-nemotron"),
    "minicpm_sala": ("lightning attention", "minicpm-sala"),
    "lfm2": ("short convolution", "lfm2"),
    "zaya": ("compressed convolution", "zaya"),
    "mamba2": ("Mamba-2", "mamba2"),
    "falcon_mamba": ("Mamba-1", "falcon-mamba"),
}
"""The kind of a model type's recurrent layers, and the embedded model that has them."""

SIZED = {"Qwen3.8-Flash-Next" if name == "Qwen4-Exp" else name: MODELS[name] for name in MODELS}
SIZED["Qwen3.8-Flash-Next"] = FLASH_NEXT
"""The models of MODELS, with the published one of a class of which a smaller one is rehearsed."""


def behind(link: Link, cost: CostModel) -> str:
    """The least tokens whose state and KV are loaded sooner than computed, at the speeds that a GPU
    server assumes until it has measured.
    """
    tokens = 1
    while link.seconds(cost.state_bytes + tokens * cost.kv_bytes_per_token) > (
        cost.flops(tokens) / ON_ACCELERATOR
    ):
        tokens += 1
    return f"{tokens:,} tokens" if tokens > 1 else "1 token"


def compared_with(embedded: str) -> str:
    """The reference for the answers of the embedded model (`tests.reference`)."""
    kind = json.loads((ensure_tiny_model(embedded) / "config.json").read_text())["model_type"]
    if kind not in TWINS:
        return "transformers"
    if kind in TWINS[kind].__bases__[0].__module__:
        return "transformers, without an index"
    return "a twin in plain torch"


def row(name: str) -> list[str]:
    config = SIZED[name].get("text_config", SIZED[name])
    kind, embedded = KINDS[config["model_type"]]
    if config["model_type"] == "bailing_hybrid" and "short_conv_kernel_size" not in config:
        kind, embedded = "lightning attention", "ling-2.5"
    if "E" in config.get("hybrid_override_pattern", ""):
        embedded = "nemotron-3"
    assert embedded in ARCHITECTURES
    cost = CostModel.from_config(config)
    assert not cost.assumed
    with_state = sum(
        bool(layer.ssm_values or layer.conv_values) for layer in read_layers(config).layers
    )
    kv = cost.kv_bytes_per_token
    return [
        name,
        f"{with_state} {kind}",
        f"{cost.state_bytes / 1e6:.1f}",
        f"{kv / 1e3:.1f}" if kv else "none",
        f"{cost.state_bytes / kv:,.0f} tokens" if kv else "",
        behind(HOST_ON_ACCELERATOR, cost),
        behind(DISK, cost),
        f"`{embedded}`",
        compared_with(embedded),
    ]


def test_sizes_of_states() -> None:
    """The page has the sizes; if they differ the test writes the table anew, and fails once."""
    before = PAGE.read_text()
    with table(PAGE, "sizes", COLUMNS, list(SIZED)) as rows:
        rows.update({name: row(name) for name in SIZED})
    assert PAGE.read_text() == before
