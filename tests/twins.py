"""Models that SGLang serves and transformers does not have, in plain torch: made of transformers'
DeepSeek-V3, whose latent attention, experts and norms they share, and of the recurrent layers'
definitions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3RMSNorm,
    apply_rotary_pos_emb,
)


class LightningAttention(nn.Module):
    """Linear attention with a constant decay e^-s of each head, as Ling 2.5 has it:
    ``S_t = e^-s S_(t-1) + k_t v_t^T`` and ``o_t = S_t^T q_t / sqrt(D)``, in float64.

    The sums are written out: token t reads each earlier token i with weight ``e^(-s (t - i))``.
    """

    def __init__(self, config: DeepseekV3Config, layer_idx: int) -> None:
        super().__init__()
        settings: dict[str, Any] = config.lightning
        hidden, heads, width = config.hidden_size, config.num_attention_heads, settings["head_dim"]
        self.layer_idx, self.heads, self.width = layer_idx, heads, width
        self.turned = int(width * settings["partial_rotary_factor"])
        self.theta, self.eps = settings["rope_theta"], config.rms_norm_eps
        slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
        self.slopes = slopes * (1 - layer_idx / (config.num_hidden_layers - 1) + 1e-5)
        self.groups = settings["group_norm_size"]
        self.query_key_value = nn.Linear(hidden, 3 * heads * width, bias=False)
        self.query_layernorm = DeepseekV3RMSNorm(width, eps=self.eps)
        self.key_layernorm = DeepseekV3RMSNorm(width, eps=self.eps)
        self.g_proj = nn.Linear(hidden, heads * width, bias=False)
        self.g_norm = DeepseekV3RMSNorm(heads * width)
        self.dense = nn.Linear(heads * width, hidden, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_ids: Tensor,
        past_key_values: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Shapes: hidden_states [1, T, D], position_ids [1, T]."""
        tokens = hidden_states.shape[1]
        mixed = self.query_key_value(hidden_states).view(tokens, 3, self.heads, self.width)
        q, k = self.query_layernorm(mixed[:, 0]), self.key_layernorm(mixed[:, 1])
        powers = torch.arange(0, self.turned, 2) / self.turned
        angles = position_ids[0, :, None] * (self.theta**-powers)[None]
        angles = torch.cat([angles, angles], dim=-1)
        parts = (q[..., : self.turned], k[..., : self.turned], angles.cos(), angles.sin())
        turned = apply_rotary_pos_emb(*parts)
        q, k = (
            torch.cat([new, old[..., self.turned :]], dim=-1).double().transpose(0, 1)
            for new, old in zip(turned, (q, k), strict=True)
        )
        v = mixed[:, 2].double().transpose(0, 1)

        ages = torch.arange(tokens)[:, None] - torch.arange(tokens)[None]
        weights = (-self.slopes[:, None, None] * ages).exp().masked_fill(ages < 0, 0.0)
        read = (weights * (q @ k.transpose(1, 2))) @ v
        until_end = weights[:, -1, :, None]
        state = (k * until_end).transpose(1, 2) @ v
        if past_key_values is not None:
            before = past_key_values.layers[self.layer_idx].recurrent_states[0]
            if before is not None:
                since = (-self.slopes[:, None] * torch.arange(1, tokens + 1)).exp()
                read = read + since[..., None] * (q @ before[0])
                state = state + since[:, -1, None, None] * before[0]
            past_key_values.update_recurrent_state(state[None], self.layer_idx)

        groups = (read / self.width**0.5).float().transpose(0, 1).reshape(tokens, self.groups, -1)
        groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        normed = groups.reshape(tokens, -1) * self.g_norm.weight
        gated = normed * self.g_proj(hidden_states)[0].sigmoid()
        return self.dense(gated)[None], None


class Ling(DeepseekV3ForCausalLM):
    """Ling 2.5 (SGLang's `BailingMoeV2_5ForCausalLM`)."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(config)
        for index, kind in enumerate(config.layer_types):
            if kind == "linear_attention":
                self.model.layers[index].self_attn = LightningAttention(config, index)

    @classmethod
    def load(cls, model_dir: Path) -> Ling:
        """The model in a directory. Raises RuntimeError unless it has exactly these tensors."""
        config = json.loads((model_dir / "config.json").read_text())
        every = config["layer_group_size"]
        names = ("head_dim", "partial_rotary_factor", "rope_theta", "group_norm_size")
        model = cls(
            DeepseekV3Config(
                **{name: value for name, value in config.items() if name not in (*RENAMED, *names)},
                rope_theta=config["rope_theta"],
                **{new: config[old] for old, new in RENAMED.items()},
                lightning={name: config[name] for name in names},
                layer_types=[
                    "linear_attention" if (i + 1) % every else "full_attention"
                    for i in range(config["num_hidden_layers"])
                ],
                attn_implementation="eager",
            )
        )
        model.load_state_dict(_renamed(load_file(model_dir / "model.safetensors"), model))
        return model.eval()


RENAMED = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}


def _renamed(tensors: dict[str, Tensor], model: Ling) -> dict[str, Tensor]:
    """Tensors by the names that DeepSeek-V3 has for them; experts are stacked."""
    names = {"word_embeddings": "embed_tokens", "attention": "self_attn"}
    names["expert_bias"] = "e_score_correction_bias"
    found, experts = {}, {}
    for name, tensor in tensors.items():
        parts = [names.get(part, part) for part in name.split(".")]
        if "experts" in parts:
            experts[".".join(parts)] = tensor
            continue
        latent = "self_attn" in parts and model.config.layer_types[int(parts[2])] != (
            "linear_attention"
        )
        found[".".join("o_proj" if latent and it == "dense" else it for it in parts)] = tensor
    for index in range(model.config.first_k_dense_replace, model.config.num_hidden_layers):
        prefix = f"model.layers.{index}.mlp.experts"
        of_each = range(model.config.n_routed_experts)
        gate, up, down = (
            torch.stack([experts.pop(f"{prefix}.{one}.{part}_proj.weight") for one in of_each])
            for part in ("gate", "up", "down")
        )
        found[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        found[f"{prefix}.down_proj"] = down
    return found | experts
