"""How near a model of 100 M parameters comes to what the CPU can do.

    python scripts/bench.py roofline [--scratch DIR] [--rounds 5] [-- server flags]

Prefill: the FLOPs of a prompt's products with weights per second until the first token, as a share
of what the same products do in torch alone. Decode: the time of a step, against the time that
reading all weights once takes. Both over HTTP, one request at a time; in turn with the bare
products and reads, which run while the server idles.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file
from torch import Tensor

from scripts.bench.report import Table
from scripts.bench.server import PROMPT
from scripts.bench.servers import SCRATCH, Client, large_model
from sglang_hybrid.serving.server_process import ServerProcess

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def seconds(run: Callable[[], object], times: int = 3) -> float:
    """The median of some runs, after one that does not count."""
    run()
    seen = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        seen.append(time.perf_counter() - begin)
    return median(seen)


def torch_products(weights: list[Tensor]) -> float:
    """Seconds of the layers' products with `PROMPT` rows, as torch computes them by default."""
    inputs = {w.shape[1]: torch.randn(PROMPT, w.shape[1], dtype=w.dtype) for w in weights}
    return seconds(lambda: [torch.nn.functional.linear(inputs[w.shape[1]], w) for w in weights])


def onednn_products(weights: list[Tensor]) -> float:
    """The same in oneDNN, with weights in its own layout."""
    inputs = {w.shape[1]: torch.randn(PROMPT, w.shape[1], dtype=w.dtype) for w in weights}
    packed = [torch.ops.mkldnn._reorder_linear_weight(w) for w in weights]
    product = torch.ops.mkldnn._linear_pointwise.default
    return seconds(
        lambda: [
            product(inputs[w.shape[1]], p, None, "none", [], "")
            for w, p in zip(weights, packed, strict=True)
        ]
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scratch", type=Path, default=SCRATCH)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("server_flags", nargs="*", help="flags for the server, after --")


def run(options: argparse.Namespace) -> None:
    model = large_model(options.scratch)
    tensors = {
        name: tensor.to(DTYPES[options.dtype])
        for name, tensor in load_file(str(next(model.glob("*.safetensors")))).items()
        if tensor.dim() == 2 and "embeddings" not in name
    }
    layers = [tensor for name, tensor in tensors.items() if "lm_head" not in name]
    operations = 2 * PROMPT * sum(w.numel() for w in layers)
    everything = torch.cat([tensor.flatten() for tensor in tensors.values()])
    words = everything.view(torch.int64)  # sums of integers are as fast as the memory

    seen: dict[str, list[float]] = {}
    flags = ["--model-path", str(model), "--dtype", options.dtype, *options.server_flags]
    with ServerProcess(flags) as server:
        client = Client(server.url)
        client.first_token(client.tokens(PROMPT), 0)
        for _ in range(options.rounds):
            for name, value in (
                ("prefill", client.first_token(client.tokens(PROMPT), 0)),
                ("decode", client.step([client.tokens(16)])),
                ("torch's products", torch_products(layers)),
                ("oneDNN's products", onednn_products(layers)),
                ("read", seconds(words.sum)),
            ):
                seen.setdefault(name, []).append(value)
    found = {name: median(values) for name, values in seen.items()}
    table = Table(options.dtype, "ms", "GFLOP/s", "prefill's share")
    for what, name in (
        (f"prefill of {PROMPT:,} ({PROMPT / found['prefill']:,.0f} tokens/s)", "prefill"),
        ("torch's products", "torch's products"),
        ("oneDNN's products", "oneDNN's products"),
    ):
        share = "" if name == "prefill" else f"{100 * found[name] / found['prefill']:.0f} %"
        speed = f"{operations / found[name] / 1e9:,.0f}"
        table.row(what, f"{1e3 * found[name]:,.0f}", speed, share)
    size = everything.numel() * everything.element_size()
    print(
        f"\nA decode step takes {1e3 * found['decode']:.1f} ms, reading {size / 1e6:,.0f} MB of "
        f"weights {1e3 * found['read']:.1f} ms: {found['decode'] / found['read']:.2f} times."
    )
