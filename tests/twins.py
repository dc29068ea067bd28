"""Models that SGLang serves and transformers does not have, in plain torch: made of transformers'
DeepSeek-V3, Qwen2 or Granite, whose attention, experts, MLPs and norms they share, and of the
recurrent layers' definitions.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RMSNorm,
    apply_rotary_pos_emb,
)
from transformers.models.glm5_next import modeling_glm5_next
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextConfig
from transformers.models.glm5_next.modeling_glm5_next import (
    Glm5NextTextLinearAttention,
    Glm5NextTextRMSNormGated,
)
from transformers.models.granite.modeling_granite import GraniteAttention, GraniteRMSNorm
from transformers.models.granite.modeling_granite import apply_rotary_pos_emb as turn
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet
from transformers.models.qwen4_exp import modeling_qwen4_exp
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig


def read_fading_state(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, past_key_values: Any, layer_idx: int
) -> Tensor:
    """``S_t = e^-s S_(t-1) + k_t v_t^T`` and ``S_t^T q_t`` [H, T, D], in float64.

    Shapes: q, k and v [H, T, D], slopes s [H]. A cache has the state before the first token, and
    gets the one behind the last. The sums are written out: token t reads each earlier token i with
    weight ``e^(-s (t - i))``.
    """
    tokens = q.shape[1]
    ages = torch.arange(tokens)[:, None] - torch.arange(tokens)[None]
    weights = (-slopes[:, None, None] * ages).exp().masked_fill(ages < 0, 0.0)
    read = (weights * (q @ k.transpose(1, 2))) @ v
    if past_key_values is None:
        return read
    state = (k * weights[:, -1, :, None]).transpose(1, 2) @ v
    before = past_key_values.layers[layer_idx].recurrent_states[0]
    if before is not None:
        since = (-slopes[:, None] * torch.arange(1, tokens + 1)).exp()
        read = read + since[..., None] * (q @ before[0])
        state = state + since[:, -1, None, None] * before[0]
    past_key_values.update_recurrent_state(state[None], layer_idx)
    return read


def slopes_of(heads: int) -> Tensor:
    """Slopes [H] of lightning attention's heads, a power of two: ``2^(-8 h / H)`` from h = 1 on."""
    return 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)


class LightningAttention(nn.Module):
    """Linear attention with a constant decay of each head, as Ling 2.5 has it, in float64."""

    def __init__(self, config: DeepseekV3Config, layer_idx: int) -> None:
        super().__init__()
        settings: dict[str, Any] = config.lightning
        hidden, heads, width = config.hidden_size, config.num_attention_heads, settings["head_dim"]
        self.layer_idx, self.heads, self.width = layer_idx, heads, width
        self.turned = int(width * settings["partial_rotary_factor"])
        self.theta, self.eps = settings["rope_theta"], config.rms_norm_eps
        self.slopes = slopes_of(heads) * (1 - layer_idx / (config.num_hidden_layers - 1) + 1e-5)
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
        read = read_fading_state(q, k, v, self.slopes, past_key_values, self.layer_idx)

        groups = (read / self.width**0.5).float().transpose(0, 1).reshape(tokens, self.groups, -1)
        groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        normed = groups.reshape(tokens, -1) * self.g_norm.weight
        gated = normed * self.g_proj(hidden_states)[0].sigmoid()
        return self.dense(gated.to(hidden_states.dtype))[None], None


class BoundedDeltaAttention(Glm5NextTextLinearAttention):
    """KDA as Ling 3 has it: that of GLM-5 Next, whose decays are bounded, too, with gates that one
    matrix makes.
    """

    def __init__(self, config: DeepseekV3Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        hidden, inner = config.hidden_size, self.qkv_dim
        self.forget_gate.f_a_proj = self.g_a_proj = nn.Identity()
        self.forget_gate.f_b_proj = nn.Linear(hidden, inner, bias=False)
        self.g_b_proj = nn.Linear(hidden, inner, bias=False)

    def forward(
        self, hidden_states: Tensor, past_key_values: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        return super().forward(hidden_states, cache_params=past_key_values), None


class GatedOutput(nn.Linear):
    """The output projection of what heads have read [.., H * D], times a gate for each head, or for
    each value of it."""

    gates: Tensor

    def forward(self, read: Tensor) -> Tensor:
        by_gate = read.unflatten(-1, (self.gates.shape[-1], -1))
        return super().forward((by_gate * self.gates[..., None]).flatten(-2))


class GatedLatentAttention(DeepseekV3Attention):
    """Latent attention with so many sigmoid ``gates``, which are made of the hidden state."""

    def __init__(self, config: DeepseekV3Config, layer_idx: int, gates: int) -> None:
        super().__init__(config, layer_idx)
        values = config.num_attention_heads * config.v_head_dim
        self.g_proj = nn.Linear(config.hidden_size, gates, bias=False)
        self.o_proj = GatedOutput(values, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, **more: Any) -> Any:
        self.o_proj.gates = self.g_proj(hidden_states).sigmoid()
        return super().forward(hidden_states=hidden_states, **more)


class Ling(DeepseekV3ForCausalLM):
    """Ling 2.5 and 3 (SGLang's `BailingMoeV2_5ForCausalLM` and `BailingMoeV3ForCausalLM`)."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(config)
        for index, kind in enumerate(config.layer_types):
            layer = self.model.layers[index]
            if kind == "linear_attention":
                mixer = LightningAttention if config.lightning else BoundedDeltaAttention
                layer.self_attn = mixer(config, index)
            elif not config.lightning:
                layer.self_attn = GatedLatentAttention(config, index, config.num_attention_heads)
        self.tie_weights()

    @classmethod
    def load(cls, model_dir: Path) -> Ling:
        """The model in a directory. Raises RuntimeError unless it has exactly these tensors."""
        config = json.loads((model_dir / "config.json").read_text())
        every, taps = config["layer_group_size"], config.get("short_conv_kernel_size")
        own = ("head_dim", "partial_rotary_factor", "group_norm_size")
        model = cls(
            DeepseekV3Config(  # type: ignore[call-arg]
                **{name: value for name, value in config.items() if name not in (*RENAMED, *own)},
                **{new: config[old] for old, new in RENAMED.items()},
                lightning={name: config[name] for name in (*own, "rope_theta")} if not taps else {},
                layer_types=[
                    "linear_attention" if (i + 1) % every else "full_attention"
                    for i in range(config["num_hidden_layers"])
                ],
                linear_num_heads=config["num_attention_heads"],
                linear_head_dim=config["head_dim"],
                linear_conv_kernel_dim=taps,
                linear_lower_bound=config.get("kda_lower_bound"),
                attn_implementation="eager",
            )
        )
        model.load_state_dict(_renamed(load_file(model_dir / "model.safetensors"), model))
        return model.eval()


RENAMED = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
NAMES = {
    "word_embeddings": "embed_tokens",
    "attention": "self_attn",
    "expert_bias": "e_score_correction_bias",
}
OF_KDA = {
    "f_proj": "forget_gate.f_b_proj",
    "g_proj": "g_b_proj",
    "A_log": "forget_gate.A_log",
    "dt_bias": "forget_gate.dt_bias",
}


def _renamed(tensors: dict[str, Tensor], model: Ling) -> dict[str, Tensor]:
    """Tensors by the names that transformers' parts have for them; experts and the convolutions of
    a layer are stacked.
    """
    config, found = model.config, {}
    for name, tensor in tensors.items():
        parts = [NAMES.get(part, part) for part in name.split(".")]
        if "self_attn" in parts:
            linear = config.layer_types[int(parts[2])] == "linear_attention"
            own = OF_KDA if not config.lightning else {}
            parts = [(own if linear else {"dense": "o_proj"}).get(part, part) for part in parts]
        found[".".join(parts)] = tensor
    if config.tie_word_embeddings:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]

    def stack(into: str, pieces: list[str]) -> None:
        if pieces[0] in found:
            found[into] = torch.cat([found.pop(piece) for piece in pieces])

    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        convolutions = [f"{layer}.self_attn.{part}_conv1d.weight" for part in "qkv"]
        stack(f"{layer}.self_attn.conv1d.weight", convolutions)
    stack_experts(found, config, "mlp.experts")
    return found


class GatedNorm(nn.Module):
    """An RMS norm times ``scale`` and twice a sigmoid gate, which two small matrices make of what
    is normed. Weights are stored as their difference from one.
    """

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.scale = DeepseekV3RMSNorm(width), scale
        self.gate_up_projection = nn.Linear(width, 16, bias=False)
        self.gate_down_projection = nn.Linear(16, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        gate = self.gate_down_projection(silu(self.gate_up_projection(y))).sigmoid()
        return self.scale * 2 * y * gate


class GigaChatDeltaNet(Qwen3NextGatedDeltaNet):
    """The delta net of Qwen3-Next, whose output gate is a sigmoid, times two."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.norm = Glm5NextTextRMSNormGated(self.head_v_dim, eps=config.rms_norm_eps)

    def forward(
        self, hidden_states: Tensor, past_key_values: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        return super().forward(hidden_states, cache_params=past_key_values), None


class Normed(nn.Module):
    """A layer, and the norm of what comes out of it."""

    def __init__(self, layer: nn.Module, behind: nn.Module) -> None:
        super().__init__()
        self.layer, self.behind = layer, behind

    def forward(self, *given: Any, **named: Any) -> Any:
        found = self.layer(*given, **named)
        if isinstance(found, tuple):
            return self.behind(found[0]), *found[1:]
        return self.behind(found)


class GigaChat(DeepseekV3ForCausalLM):
    """GigaChat 3.5 (SGLang's `GigaChat35ForCausalLM`)."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(config)
        hidden, values = config.hidden_size, config.num_attention_heads * config.v_head_dim
        for index, kind in enumerate(config.layer_types):
            layer = self.model.layers[index]
            if kind == "linear_attention":
                mixer: Any = GigaChatDeltaNet(config, index)
            else:
                mixer = GatedLatentAttention(config, index, values)
                for norm, width in (
                    ("q_a_layernorm", config.q_lora_rank),
                    ("kv_a_layernorm", config.kv_lora_rank),
                ):
                    setattr(mixer, norm, GatedNorm(width, (hidden / width) ** 0.5))
            layer.self_attn = Normed(mixer, GatedNorm(hidden))
            layer.mlp = Normed(layer.mlp, GatedNorm(hidden))
            layer.input_layernorm, layer.post_attention_layernorm = (
                GatedNorm(hidden) for _ in range(2)
            )
        self.model.norm = GatedNorm(hidden)

    @classmethod
    def load(cls, model_dir: Path) -> GigaChat:
        """The model in a directory. Raises RuntimeError unless it has exactly these tensors."""
        config = json.loads((model_dir / "config.json").read_text())
        with_attention = config["full_attention_layers"]
        model = cls(
            DeepseekV3Config(  # type: ignore[call-arg]
                **config,
                layer_types=[
                    "full_attention" if i in with_attention else "linear_attention"
                    for i in range(config["num_hidden_layers"])
                ],
                attn_implementation="eager",
            )
        )
        found = {}
        for name, tensor in load_file(model_dir / "model.safetensors").items():
            for before, after in AROUND.items():
                name = re.sub(before, after, name)
            if name.endswith("layer.norm.weight"):  # a delta net's
                tensor = 2 * tensor
            elif name.endswith("norm.weight"):
                tensor = 1 + tensor
            found[name] = tensor
        stack_experts(found, model.config, "mlp.layer.experts")
        model.load_state_dict(found)
        return model.eval()


AROUND = {
    r"\.self_attn\.": ".self_attn.layer.",
    r"\.mlp\.": ".mlp.layer.",
    r"\.post_self_attn_layernorm\.": ".self_attn.behind.",
    r"\.post_feedforward_layernorm\.": ".mlp.behind.",
    r"\.self_attn\.layer\.gate_proj\.": ".self_attn.layer.g_proj.",
    r"(norm|behind)\.weight$": r"\1.norm.weight",
    r"layer\.norm\.norm\.weight$": "layer.norm.weight",
}
"""Names of GigaChat's tensors, and what they are here, one after the other."""


class MiniCPMLightning(nn.Module):
    """Lightning attention as MiniCPM-SALA has it: decays are the same in every layer, a norm goes
    over all heads, and a gate is behind it.
    """

    def __init__(self, config: GraniteConfig, layer_idx: int) -> None:
        super().__init__()
        hidden, heads, width = config.hidden_size, config.lightning_nh, config.lightning_head_dim
        self.layer_idx, self.width, self.slopes = layer_idx, width, slopes_of(heads)
        self.q_proj, self.k_proj, self.v_proj, self.z_proj = (
            nn.Linear(hidden, heads * width, bias=False) for _ in range(4)
        )
        self.q_norm, self.k_norm = (GraniteRMSNorm(width, config.rms_norm_eps) for _ in range(2))
        self.o_norm = GraniteRMSNorm(heads * width, config.rms_norm_eps)
        self.o_proj = nn.Linear(heads * width, hidden, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_values: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Shapes: hidden_states [1, T, D], position_embeddings of two [1, T, width]."""
        q, k, v = (
            project(hidden_states).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        turned = turn(self.q_norm(q).float(), self.k_norm(k).float(), *position_embeddings)
        q, k, v = (t[0].to(v.dtype).double() for t in (*turned, v))
        read = read_fading_state(q, k, v, self.slopes, past_key_values, self.layer_idx)
        read = (read / self.width**0.5).transpose(0, 1).flatten(1)[None]
        normed = self.o_norm(read.to(hidden_states.dtype))
        return self.o_proj(normed * self.z_proj(hidden_states).sigmoid()), None


class MiniCPMAttention(GraniteAttention):
    """MiniCPM-SALA's dense attention: without positions, and with a gate for each value."""

    def __init__(self, config: GraniteConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        values = config.num_attention_heads * config.head_dim
        self.o_gate = nn.Linear(config.hidden_size, values, bias=False)
        self.o_proj = GatedOutput(values, config.hidden_size, bias=False)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **more: Any
    ) -> Any:
        self.o_proj.gates = self.o_gate(hidden_states).sigmoid()
        cos, sin = map(torch.zeros_like, position_embeddings)
        return super().forward(hidden_states, position_embeddings=(cos + 1, sin), **more)


class MiniCPM(GraniteForCausalLM):
    """MiniCPM-SALA (SGLang's `MiniCPMSALAForCausalLM`) with dense attention, in the blocks of
    Granite, which has the same factors at embeddings, residuals and logits.
    """

    def __init__(self, config: GraniteConfig) -> None:
        super().__init__(config)
        for index, kind in enumerate(config.layer_types):
            mixer = MiniCPMLightning if kind == "linear_attention" else MiniCPMAttention
            self.model.layers[index].self_attn = mixer(config, index)

    @classmethod
    def load(cls, model_dir: Path) -> MiniCPM:
        """The model in a directory. Raises RuntimeError unless it has exactly these tensors."""
        config = json.loads((model_dir / "config.json").read_text())
        kinds = {"minicpm4": "full_attention", "lightning-attn": "linear_attention"}
        model = cls(
            GraniteConfig(  # type: ignore[call-arg]
                **config,
                layer_types=[kinds[kind] for kind in config["mixer_types"]],
                embedding_multiplier=config["scale_emb"],
                residual_multiplier=config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
                attention_multiplier=config["head_dim"] ** -0.5,
                logits_scaling=config["hidden_size"] / config["dim_model_base"],
                attn_implementation="eager",
            )
        )
        model.load_state_dict(load_file(model_dir / "model.safetensors"))
        return model.eval()


class NoIndex(nn.Module):
    """Chooses all tokens, in the place of those that Qwen4-Exp's attention reads."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def forward(self, _: Tensor, __: Any, attention_mask: Tensor, ___: Any) -> Tensor:
        dense = torch.zeros_like(attention_mask)
        return dense if dense.is_floating_point() else ~dense


class Qwen4Exp(modeling_qwen4_exp.Qwen4ExpForCausalLM):
    """Qwen4-Exp without an index, which transformers cannot do without."""

    def __init__(self, config: Any) -> None:
        with mock.patch.object(modeling_qwen4_exp, "Qwen4ExpTextQSAIndexer", NoIndex):
            super().__init__(config)

    @classmethod
    def load(cls, model_dir: Path) -> Any:
        """The model in a directory. Raises RuntimeError unless it has exactly these tensors, but
        for the numbers of the n-grams' hash, which follow from the config.
        """
        config = json.loads((model_dir / "config.json").read_text())
        settings = Qwen4ExpTextConfig(**config["text_config"])
        model, report = cls.from_pretrained(
            model_dir, config=settings, attn_implementation="eager", output_loading_info=True
        )
        buffers = {name for name, _ in model.named_buffers()}
        if any(set(report[kind]) - buffers for kind in ("missing_keys", "unexpected_keys")):
            raise RuntimeError(f"These are not the tensors of the model: {report}")
        return model


class AllTokens(nn.Module):
    """Chooses all tokens so far, in the place of those that GLM-5-Next's attention reads."""

    def __init__(self, _: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, hidden_states: Tensor, past_key_values: Any, **_: Any) -> Tensor:
        """Numbers [1, T, length] of the tokens that each of the last T reads; -1 is none."""
        new = hidden_states.shape[1]
        length = past_key_values.get_seq_length(self.layer_idx) if past_key_values else new
        tokens = torch.arange(length)
        later = tokens > torch.arange(length - new, length)[:, None]
        return tokens.expand(new, -1).masked_fill(later, -1)[None]


class Glm5Next(modeling_glm5_next.Glm5NextForConditionalGeneration):
    """GLM-5-Next without an index and without a tower, which transformers cannot do without."""

    def __init__(self, config: Any) -> None:
        with mock.patch.object(modeling_glm5_next, "Glm5NextTextIndexer", AllTokens):
            super().__init__(config)
        del self.model.visual

    @classmethod
    def load(cls, model_dir: Path) -> Any:
        """The model in a directory. Raises RuntimeError unless it has exactly these tensors."""
        config = json.loads((model_dir / "config.json").read_text())
        model, report = cls.from_pretrained(
            model_dir,
            config=Glm5NextConfig(**config),
            attn_implementation="eager",
            output_loading_info=True,
        )
        if any(report[kind] for kind in ("missing_keys", "unexpected_keys")):
            raise RuntimeError(f"These are not the tensors of the model: {report}")
        return model


class JetBlock(nn.Module):
    """The recurrent layer of Jet-Nemotron (Gu et al. 2025, arXiv 2508.15884, section 2.3): a gated
    delta net whose values pass a short convolution. A channel's taps are made of each token by two
    matrices: ``v_t = silu(sum_i w_(t,i) x_(t-K+1+i))``. In float64, token by token:
    ``S_t = e^g_t S_(t-1)``, then ``S_t += beta_t (v_t - S_t k_t) k_t^T``, and ``o_t = S_t q_t``.
    """

    def __init__(self, config: Qwen2Config, layer_idx: int) -> None:
        super().__init__()
        settings: dict[str, Any] = config.jet
        hidden, self.heads, self.taps = (
            config.hidden_size,
            settings["num_heads"],
            settings["conv_size"],
        )
        self.layer_idx, self.key = layer_idx, settings["head_dim"]
        self.value = int(self.key * settings["expand_v"])
        keys, values = self.heads * self.key, self.heads * self.value
        widths = {"q": keys, "k": keys, "v": values, "a": self.heads, "b": self.heads, "g": values}
        for part, width in widths.items():
            setattr(self, f"{part}_proj", nn.Linear(hidden, width, bias=False))
        inner = values // settings["dconv_generator_reduction"]
        generator = {
            "w1": nn.Linear(hidden, inner, bias=False),
            "w2": nn.Linear(inner, values * self.taps),
        }
        self.dynamic_conv1d = nn.ModuleDict({"kernel_generator": nn.ModuleDict(generator)})
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(self.heads)) for _ in range(2))
        self.o_norm = Qwen2RMSNorm(self.value, eps=float(settings["norm_eps"]))
        self.o_proj = nn.Linear(values, hidden, bias=False)

    def forward(
        self, hidden_states: Tensor, past_key_values: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Shapes: hidden_states [1, T, D]."""
        x, past = hidden_states[0], self.taps - 1
        tokens = len(x)
        read = self.v_proj(x).T[None]
        if past_key_values is not None:
            read = past_key_values.update_conv_state(read, self.layer_idx, conv_kernel_size=past)
        windows = pad(read[0], (tokens + past - read.shape[2], 0)).unfold(1, self.taps, 1)
        generator: Any = self.dynamic_conv1d["kernel_generator"]
        taps = generator["w2"](silu(generator["w1"](x))).view(tokens, -1, self.taps)
        v = silu((windows.transpose(0, 1) * taps).sum(-1))

        q, k = (
            silu(project(x)).double().view(tokens, self.heads, -1)
            for project in (self.q_proj, self.k_proj)
        )
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        v = v.double().view(tokens, self.heads, -1)
        beta = self.b_proj(x).double().sigmoid()
        rate = self.A_log.double().exp() * softplus(self.a_proj(x).double() + self.dt_bias)
        state = torch.zeros(self.heads, self.value, self.key, dtype=torch.float64)
        if past_key_values is not None:
            before = past_key_values.layers[self.layer_idx].recurrent_states[0]
            state = state if before is None else before[0].clone()
        outputs = []
        for t in range(tokens):
            state = state * (-rate[t]).exp()[:, None, None]
            missing = v[t] - (state @ k[t, :, :, None])[..., 0]
            state = state + (beta[t, :, None] * missing)[..., None] * k[t, :, None]
            outputs.append((state @ q[t, :, :, None])[..., 0] / self.key**0.5)
        if past_key_values is not None:
            past_key_values.update_recurrent_state(state[None], self.layer_idx)

        gate = silu(self.g_proj(x)).view(tokens, self.heads, -1)
        read_out = self.o_norm(torch.stack(outputs).to(x.dtype)) * gate
        return self.o_proj(read_out.flatten(1))[None], None


class JetNemotron(Qwen2ForCausalLM):
    """Jet-Nemotron (SGLang's `JetNemotronForCausalLM`). As SGLang has it, sliding attention reads
    so many tokens before its own as the window has; NVIDIA's own code counts its own among them.
    """

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config)
        for index, kind in enumerate(config.layer_types):
            if kind == "linear_attention":
                self.model.layers[index].self_attn = JetBlock(config, index)

    def forward(
        self, input_ids: Tensor, use_cache: bool = False, past_key_values: Any = None
    ) -> Any:
        """Qwen2, with a mask for each kind of layer; it has none for layers without attention."""
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        first = 0 if past_key_values is None else past_key_values.get_seq_length()
        positions = first + torch.arange(input_ids.shape[1])[None]
        given = {
            "config": self.config,
            "inputs_embeds": self.model.embed_tokens(input_ids),
            "attention_mask": None,
            "past_key_values": past_key_values,
            "position_ids": positions,
        }
        masks = {
            "linear_attention": None,
            "full_attention": create_causal_mask(**given),
            "sliding_attention": create_sliding_window_causal_mask(**given),
        }
        return super().forward(
            input_ids=input_ids,
            attention_mask=masks,
            position_ids=positions,
            past_key_values=past_key_values,
            use_cache=use_cache,
        )

    @classmethod
    def load(cls, model_dir: Path) -> JetNemotron:
        """The model in a directory. Raises RuntimeError unless it has exactly these tensors."""
        config = json.loads((model_dir / "config.json").read_text())
        efficient = config["efficient_attention_config"]
        model = cls(
            Qwen2Config(  # type: ignore[call-arg]
                **config | {"layer_types": [KINDS_OF_JET[kind] for kind in config["layer_types"]]},
                use_sliding_window=True,
                sliding_window=efficient["swa"]["window_size"] + 1,
                jet=efficient["jet"],
                attn_implementation="eager",
            )
        )
        tensors = load_file(model_dir / "model.safetensors")
        model.load_state_dict(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
        return model.eval()


KINDS_OF_JET = {"jet": "linear_attention", "attn": "full_attention", "swa": "sliding_attention"}


def stack_experts(found: dict[str, Tensor], config: Any, place: str) -> None:
    """Put the matrices of a layer's experts into one tensor each, as transformers has them."""
    for index in range(config.num_hidden_layers):
        experts = f"model.layers.{index}.{place}"
        if f"{experts}.0.up_proj.weight" not in found:
            continue
        gate, up, down = (
            torch.stack(
                [
                    found.pop(f"{experts}.{one}.{part}_proj.weight")
                    for one in range(config.n_routed_experts)
                ]
            )
            for part in ("gate", "up", "down")
        )
        found[f"{experts}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        found[f"{experts}.down_proj"] = down
