"""ZAYA1's tensors as transformers names them, from the names that SGLang reads.

SGLang counts attention and experts as two layers, transformers as one block; a block of
transformers also has the scales that SGLang has in front of the next layer.
"""

from __future__ import annotations

import re

from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter, WeightRenaming

ATTENTION = {
    "input_norm.": "input_layernorm.",
    "self_attn.qkv.linear_q.": "self_attn.qkv_proj.q_proj.",
    "self_attn.qkv.linear_k.": "self_attn.qkv_proj.k_proj.",
    "self_attn.qkv.val_proj1.": "self_attn.qkv_proj.v_proj_current.",
    "self_attn.qkv.val_proj2.": "self_attn.qkv_proj.v_proj_delayed.",
    "self_attn.qkv.conv_qk.0.": "self_attn.qkv_proj.conv_qk_depthwise.",
    "self_attn.qkv.conv_qk.1.": "self_attn.qkv_proj.conv_qk_grouped.",
    "self_attn.qkv.temp": "self_attn.qk_norm.temp",
    "self_attn.o_proj.": "self_attn.o_proj.",
}
ROUTER = {
    "down_proj.": "down_proj.",
    "router_states_scale": "router_states_scale",
    "rmsnorm_eda.": "router_mlp.norm.",
    "router_mlp.0.": "router_mlp.fc1.",
    "router_mlp.2.": "router_mlp.fc2.",
    "router_mlp.4.": "router_mlp.out_proj.",
    "balancing_biases": "balancing_biases",
}
EXPERTS = {
    "input_norm.": "post_attention_layernorm.",
    "res_scale.": "post_attention_residual_scale.",
    "zaya_block.experts.": "mlp.experts.",
    **{f"zaya_block.router.{ours}": f"mlp.gate.{theirs}" for ours, theirs in ROUTER.items()},
}


def name_tensors(blocks: int) -> None:
    """Let transformers load a ZAYA1 model of so many blocks that has SGLang's names."""
    names = {"layers.0.res_scale.": "input_", "final_norm.": "norm."}
    for block in range(blocks):
        for layer, parts in ((2 * block, ATTENTION), (2 * block + 1, EXPERTS)):
            for ours, theirs in parts.items():
                names[f"layers.{layer}.{ours}"] = f"layers.{block}.{theirs}"
        behind = "res_scale." if block + 1 == blocks else f"layers.{2 * block + 2}.res_scale."
        names[behind] = f"layers.{block}.post_mlp_residual_scale."
    merged = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
    register_checkpoint_conversion_mapping(
        "zaya",
        [
            *(WeightRenaming(f"^model.{re.escape(a)}", f"model.{b}") for a, b in names.items()),
            *(
                WeightConverter(
                    f".experts.local_experts.*.{a}.weight", f".experts.{b}", [MergeModulelist()]
                )
                for a, b in merged.items()
            ),
        ],
        overwrite=True,
    )
