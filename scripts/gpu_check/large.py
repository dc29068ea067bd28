"""A server with a model of a published size and random weights: one token, cold and behind a hit.

    python -m scripts.gpu_check.large
    python -m scripts.gpu_check.large --stand-ins    # without SGLang's CUDA packages
    python -m scripts.gpu_check.large --cpu          # a small one, on a machine without a GPU

The model is Nemotron-H-8B by its config.json on Hugging Face, 16 GB in bfloat16, made on the GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from scripts.bench.servers import flush, greedy, post, random_tokens
from scripts.gpu_check import stand_ins
from scripts.gpu_check.findings import tell
from sglang_hybrid.models import build_tiny_model
from sglang_hybrid.serving.server_process import ServerFailed, ServerProcess

NAME = "Nemotron-H-8B"
SIZES = {
    "attention_head_dim": 128,
    "head_dim": 128,
    "hidden_size": 4_096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "intermediate_size": 21_504,
    "mamba_head_dim": 64,
    "mamba_num_heads": 128,
    "max_position_embeddings": 65_536,
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 8,
    "ssm_state_size": 128,
    "vocab_size": 131_072,
}
"""What differs from the tiny model's config.json. Its tokenizer serves: prompts are token ids."""

POOLS = ("--max-mamba-cache-size", "80", "--max-total-tokens", "300000")
"""5 GB of KV and 8 GB of states."""
LENGTHS, SHORT = (1_024, 8_192, 32_768), (256, 512)
MORE, TIMES = 32, 5
"""Tokens behind a hit; measurements, of which the median counts."""


def write(folder: Path, *, small: bool) -> Path:
    """A directory with the model's config, the tiny model's tokenizer, and no weights."""
    tiny = build_tiny_model("nemotron-h", folder / "tiny")
    if small:
        return tiny
    target = folder / NAME
    target.mkdir()
    config: dict[str, Any] = json.loads((tiny / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | SIZES))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / file, target / file)
    save_file({"nothing": torch.zeros(1)}, target / "model.safetensors")
    return target


def one_token(url: str, tokens: list[int]) -> tuple[float, int]:
    """Milliseconds until the answer, and how many tokens were hit."""
    begin = time.perf_counter()
    record = post(url, "/generate", greedy(tokens, 1))
    return (time.perf_counter() - begin) * 1e3, record["meta_info"]["cached_tokens"]


def measure(url: str, length: int, source: random.Random) -> None:
    """Report prompts of so many tokens, and each again with some more behind it."""
    one_token(url, random_tokens(source, length))  # compiles what this length needs
    cold, behind, hits = [], [], []
    for _ in range(TIMES):
        flush(url)
        tokens = random_tokens(source, length)
        cold.append(one_token(url, tokens)[0])
        milliseconds, hit = one_token(url, tokens + random_tokens(source, MORE))
        behind.append(milliseconds)
        hits.append(hit)
    found = f"{median(cold):.1f} ms cold, {median(behind):.1f} ms behind a hit of {min(hits):,}"
    tell(f"one token, {length:,} before it", found, min(hits) == length)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stand-ins", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    source = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        model = write(Path(scratch), small=options.cpu)
        flags = ["--model-path", str(model), "--cuda-graph-max-bs-decode", "4"]
        flags += (
            ("--device", "cpu")
            if options.cpu
            else ("--load-format", "dummy", "--dtype", "bfloat16", *POOLS)
        )
        flags += stand_ins.FLAGS if options.stand_ins else ()
        environment = stand_ins.environment_with(stand_ins=options.stand_ins)
        try:
            with ServerProcess(flags, environment=environment) as server:
                for length in SHORT if options.cpu else LENGTHS:
                    measure(server.url, length, source)
        except ServerFailed as error:
            tell("start", " ".join(str(error).split())[-400:], False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
