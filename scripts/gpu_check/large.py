"""A server with a model of a published size and random weights: one token, cold and behind a hit.

    python -m scripts.gpu_check.large
    python -m scripts.gpu_check.large --stand-ins    # without SGLang's CUDA packages
    python -m scripts.gpu_check.large --cpu          # a small one, on a machine without a GPU

The model has the sizes of Nemotron-H-8B; its weights, 16 GB in bfloat16, are made on the GPU.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from scripts.bench.servers import flush, greedy, post, random_tokens
from scripts.gpu_check import stand_ins
from scripts.gpu_check.findings import tell
from sglang_hybrid.extensions.cpu.models import build_tiny_model
from sglang_hybrid.serving.server_process import ServerFailed, ServerProcess

POOLS = ("--max-mamba-cache-size", "80", "--max-total-tokens", "300000")
"""5 GB of KV and 8 GB of states."""
LENGTHS, SHORT = (1_024, 8_192, 32_768), (256, 512)
MORE, TIMES = 32, 5
"""Tokens behind a hit; measurements, of which the median counts."""


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
        scale = "tiny" if options.cpu else "8b"
        model = build_tiny_model("nemotron-h", Path(scratch) / scale, scale=scale)
        flags = ["--model-path", str(model), "--cuda-graph-max-bs-decode", "4"]
        flags += ("--device", "cpu") if options.cpu else ("--load-format", "dummy", *POOLS)
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
