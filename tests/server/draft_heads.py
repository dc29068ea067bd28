"""A draft head for the embedded trained model, fitted so that a server accepts many of its tokens.

The head predicts the hidden state behind the next token from the one behind this token and the next
token's embedding (DeepSeek-V3's multi-token prediction). Here that is a linear map: the least
squares solution over what the model says when it is asked about Python's modules. The head's
attention is small noise, so that its KV is read and changes little.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

EPS = 1e-5
SAID = 40
"""Tokens of the longest answer."""
MODULES = sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))[::20]
"""Some of what the model knows sentences about."""


@dataclass(frozen=True)
class Headed:
    """A model with a head in this directory, and the tokens that it answers to questions about
    modules, by their names; they end with the one that stops it.
    """

    directory: Path
    said: dict[str, list[int]]


def normalised(t: Tensor) -> Tensor:
    """RMS norm without a weight."""
    return t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + EPS)


def question(name: str) -> str:
    """The question to the model about a module."""
    return f"<|im_start|>user\nWhat is {name}?<|im_end|>\n<|im_start|>assistant\n"


@torch.no_grad()
def fitted(directory: Path) -> tuple[Tensor, dict[str, list[int]]]:
    """The map [H, 2 H] from the norms of embedding and hidden state to the next hidden state, and
    what the model says.
    """
    answers = {}
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    inputs, wanted, seen = [], [], []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    for name in MODULES:
        asked = tokenizer(question(name), return_tensors="pt", add_special_tokens=False).input_ids
        said = model.generate(asked, max_new_tokens=SAID, do_sample=False, pad_token_id=0)
        model(said)
        answers[name] = said[0, asked.shape[1] :].tolist()
        hidden, embedded = seen[-1][0], model.get_input_embeddings()(said)[0]
        last = asked.shape[1] - 2
        both = torch.cat([normalised(embedded[1:]), normalised(hidden[:-1])], dim=-1)
        inputs.append(both[last:].double())
        wanted.append(hidden[1:][last:].double())
    a, b = torch.cat(inputs), torch.cat(wanted)
    gram = a.T @ a + 1e-2 * torch.eye(a.shape[1], dtype=torch.float64)
    return torch.linalg.solve(gram, a.T @ b).T.float(), answers


def with_draft_head(directory: Path, target: Path) -> Headed:
    """A copy of the trained model in `directory` at `target`, with a head."""
    shutil.copytree(directory, target)
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*"}
    (target / "config.json").write_text(json.dumps(config))
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    size, heads, kv_heads, width = (config[name] for name in names)
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return 0.02 * torch.randn(*shape, generator=generator)

    layer = "mtp.layers.0"
    learnt, answers = fitted(directory)
    weights = load_file(directory / "model.safetensors") | {
        f"{layer}.enorm.weight": torch.ones(size),
        f"{layer}.hnorm.weight": torch.ones(size),
        f"{layer}.eh_proj.weight": learnt,
        f"{layer}.norm.weight": torch.ones(size),
        f"{layer}.mixer.q_proj.weight": noise(heads * width, size),
        f"{layer}.mixer.k_proj.weight": noise(kv_heads * width, size),
        f"{layer}.mixer.v_proj.weight": noise(kv_heads * width, size),
        f"{layer}.mixer.o_proj.weight": noise(size, heads * width),
        f"{layer}.final_layernorm.weight": torch.ones(size),
    }
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return Headed(target, answers)
