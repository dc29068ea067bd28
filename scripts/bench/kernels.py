"""The benchmark `kernels`: the cost of exact states inside a prefill on a GPU."""

from __future__ import annotations

from typing import Annotated

import torch

from scripts.bench.report import BenchFailed, Table
from scripts.gpu_check.timings import GPU, Prefill, milliseconds

# Without a GPU the module above has Triton interpret its kernels, before they are imported.
from scripts.gpu_check.kernels import TOLERANCE, check_mamba2  # isort: skip
from scripts.gpu_check.layers import LAYERS, Shape, spread, state_launches  # isort: skip

FALCON_H1 = Shape("Falcon-H1-7B", 3072, 24, 128, 1, 256, 256, 3072 + 24)
TOKENS = (8_192, 65_536)
COUNTS = (1, 2, 8)
"""States that a prefill leaves."""


def check(dtype: torch.dtype) -> None:
    """Our states of a small batch against the recurrence in float64. Raises BenchFailed."""
    for width, size in ((64, 128), (128, 256)):
        worst = check_mamba2(width, size, dtype, resumed=True)
        print(f"{dtype}, states [{width}, {size}]: largest relative error {worst:.1e}")
        if worst > TOLERANCE[dtype]:
            raise BenchFailed(f"the error is above {TOLERANCE[dtype]}")


def bench(layer: Shape, tokens: int, table: Table) -> None:
    """A row for each number of states; medians, with the L2 cache flushed before each run."""
    none = milliseconds(Prefill(layer, tokens, with_sglang=True))
    for count in COUNTS:
        states = milliseconds(state_launches(layer, tokens, spread(tokens, count), "cuda"))
        part = milliseconds(Prefill(layer, tokens // (count + 1), with_sglang=True))
        added = (states, (count + 1) * part - none)
        cells = (f"{each:.3f} ({100 * each / none:+.1f} %)" for each in added)
        table.row(layer.name, f"{tokens:,}", f"{none:.3f}", count, *cells)


def kernels(quick: Annotated[bool, "one model, without 64K tokens"] = False) -> None:
    """The cost of exact states inside a prefill on a GPU: one layer, with and without them.

    The layer is the projections, SGLang's convolution and SGLang's scan, in bfloat16, with a
    float32 state pool; milliseconds of one prefill of it without states, and what is added by
    * states in the pass: our kernels, a launch for the windows and one for the states;
    * a prefill that is split: at each state a new forward begins, of as many tokens each.

    What the kernels compute is checked first; without a GPU that is all, in Triton's interpreter.
    """
    check(torch.float32)
    if not GPU:
        print("No GPU: the kernels ran in Triton's interpreter, and there are no timings.")
        return
    check(torch.bfloat16)
    from sglang_hybrid.hooks import patching

    patching.install()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    table = Table("model", "tokens", "none, ms", "states", "in the pass", "split", text=2)
    for layer in LAYERS[:1] if quick else (*LAYERS, FALCON_H1):
        for tokens in TOKENS[:1] if quick else TOKENS:
            bench(layer, tokens, table)
