"""The architectures a tiny model can have: one file and one line in the table each."""

from __future__ import annotations

from sglang_hybrid.extensions.cpu.models.architectures.base import Architecture, Model, Scale
from sglang_hybrid.extensions.cpu.models.architectures.falcon_h1 import falcon_h1
from sglang_hybrid.extensions.cpu.models.architectures.falcon_mamba import falcon_mamba
from sglang_hybrid.extensions.cpu.models.architectures.gigachat import gigachat_3_5
from sglang_hybrid.extensions.cpu.models.architectures.glm5_next import glm_5_next
from sglang_hybrid.extensions.cpu.models.architectures.granite_hybrid import granite_hybrid
from sglang_hybrid.extensions.cpu.models.architectures.jet_nemotron import jet_nemotron
from sglang_hybrid.extensions.cpu.models.architectures.kimi_linear import kimi_linear
from sglang_hybrid.extensions.cpu.models.architectures.lfm2 import lfm2, lfm2_moe
from sglang_hybrid.extensions.cpu.models.architectures.ling import ling_2_5, ling_3
from sglang_hybrid.extensions.cpu.models.architectures.mamba2 import mamba2
from sglang_hybrid.extensions.cpu.models.architectures.minicpm import minicpm_sala
from sglang_hybrid.extensions.cpu.models.architectures.nemotron_h import nemotron_3, nemotron_h
from sglang_hybrid.extensions.cpu.models.architectures.qwen3_5 import qwen3_5, qwen3_5_vl
from sglang_hybrid.extensions.cpu.models.architectures.qwen3_next import qwen3_next
from sglang_hybrid.extensions.cpu.models.architectures.qwen4_exp import qwen4_exp
from sglang_hybrid.extensions.cpu.models.architectures.transformer import transformer
from sglang_hybrid.extensions.cpu.models.architectures.zaya import zaya

ARCHITECTURES: dict[str, Architecture] = {
    "nemotron-h": nemotron_h,
    "nemotron-3": nemotron_3,
    "falcon-h1": falcon_h1,
    "granite-hybrid": granite_hybrid,
    "mamba2": mamba2,
    "falcon-mamba": falcon_mamba,
    "qwen3-next": qwen3_next,
    "qwen3.5": qwen3_5,
    "qwen3.5-vl": qwen3_5_vl,
    "qwen4-exp": qwen4_exp,
    "kimi-linear": kimi_linear,
    "glm-5-next": glm_5_next,
    "ling-2.5": ling_2_5,
    "ling-3": ling_3,
    "gigachat-3.5": gigachat_3_5,
    "jet-nemotron": jet_nemotron,
    "minicpm-sala": minicpm_sala,
    "lfm2": lfm2,
    "lfm2-moe": lfm2_moe,
    "zaya": zaya,
    "transformer": transformer,
}

__all__ = ["ARCHITECTURES", "Architecture", "Model", "Scale"]
