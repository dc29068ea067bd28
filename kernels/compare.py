"""Our Mamba2 states beside those of mamba-ssm, on a GPU: values and times.

    sglang-hybrid kernels    # needs a GPU and the extra `mamba`

mamba-ssm's scan leaves one state, at its end: who wants others cuts the prefill in parts. Our
kernel leaves any of them in the pass of the whole prefill. Both are compared with the recurrence in
float64, token by token, and timed for one layer of each size, in bfloat16 with states in float32.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.kernels import naive


@dataclass(frozen=True)
class Layer:
    """Sizes of one Mamba2 layer: heads H of states [P, N], and groups G of B and C."""

    name: str
    heads: int
    width: int
    size: int
    groups: int
    chunk: int = 128


LAYERS = (
    Layer("Nemotron-H-8B", heads=128, width=64, size=128, groups=8),
    Layer("Falcon-H1-7B", heads=24, width=128, size=256, groups=1),
)
CHECKED, TIMED = 1_000, 8_192
"""Tokens of a prefill."""
COUNT = 2
"""States that a prefill leaves inside, in the middle of chunks."""


class Prefill:
    """One prefill of one sequence, of random values, and the states that it shall leave."""

    def __init__(self, layer: Layer, tokens: int, device: str) -> None:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).bfloat16()

        self.layer = layer
        self.x = normal(tokens, layer.heads, layer.width)
        self.B, self.C = (normal(tokens, layer.groups, layer.size) for _ in range(2))
        self.dt = torch.nn.functional.softplus(torch.randn(tokens, layer.heads, device=device) - 3)
        self.A = -torch.rand(layer.heads, device=device) * 15 - 1
        self.ends = [tokens * (i + 1) // (COUNT + 1) - tokens // 100 for i in range(COUNT)]
        self.pool = torch.full(
            (COUNT, layer.heads, layer.width, layer.size), torch.nan, device=device
        )
        self._targets = [
            torch.tensor(v, device=device) for v in ([0] * COUNT, self.ends, range(COUNT))
        ]
        self._bounds = torch.tensor([0, tokens], device=device)

    def scan(self, begin: int = 0, end: int | None = None, state: Tensor | None = None) -> Any:
        """mamba-ssm's scan of a part: dt and states of its chunks, and the state at its end."""
        from mamba_ssm.ops.triton.ssd_combined import _mamba_chunk_scan_combined_fwd

        part = slice(begin, end)
        x, dt, B, C = (t[None, part] for t in (self.x, self.dt, self.B, self.C))
        found = _mamba_chunk_scan_combined_fwd(
            x, dt, self.A, B, C, self.layer.chunk, initial_states=state
        )
        return found[2][0], found[4][0], found[5]

    def ours(self) -> Tensor:
        """One scan, whose states inside our kernel writes [COUNT, H, P, N]."""
        steps, chunk_states, _ = self.scan()
        self.save(steps, chunk_states)
        return self.pool

    def save(self, steps: Tensor, chunk_states: Tensor) -> None:
        from sglang_hybrid.kernels.checkpoint_states import Targets, save_ssd_states

        save_ssd_states(
            self.pool,
            Targets(*self._targets),
            x=self.x,
            dt=steps,
            A=self.A,
            B=self.B,
            chunk_states=chunk_states.contiguous(),
            cu_seqlens=self._bounds,
        )

    def theirs(self) -> Tensor:
        """A scan from each wanted position to the next one [COUNT, H, P, N]."""
        found, state = [], None
        for begin, end in pairwise([0, *self.ends, len(self.x)]):
            state = self.scan(begin, end, state)[2]
            found.append(state[0])
        return torch.stack(found[:-1])

    def definition(self) -> Tensor:
        """The states in float64 [COUNT, H, P, N], head after head, for all of them take memory."""
        share = self.layer.heads // self.layer.groups
        found = []
        for head in range(self.layer.heads):
            one, group = slice(head, head + 1), slice(head // share, head // share + 1)
            rows = (
                self.x[:, one],
                self.dt[:, one],
                self.A[one],
                self.B[:, group],
                self.C[:, group],
            )
            found.append(naive.ssd(*rows)[1][self.ends, 0])
        return torch.stack(found, dim=1)


def largest_error(found: Tensor, expected: Tensor) -> float:
    """Relative to the largest element of each state; NaN where one was not written."""
    error = (found.double() - expected).abs().flatten(1).amax(1)
    return float((error / expected.abs().flatten(1).amax(1)).max())


def milliseconds(run: Callable[[], object]) -> float:
    """The median on the device, with an empty L2 cache."""
    import triton

    return float(triton.testing.do_bench(run, warmup=100, rep=400, return_mode="median"))


def report(layer: Layer, checked: int, timed: int | None, device: str) -> str:
    """A row of the table; without times for None."""
    small = Prefill(layer, checked, device)
    expected = small.definition()
    errors = (largest_error(each, expected) for each in (small.ours(), small.theirs()))
    cells = [f"{layer.name:14}", *(f"{each:13.1e}" for each in errors)]
    if timed is not None:
        large = Prefill(layer, timed, device)
        cells += [f"{milliseconds(run):13.3f}" for run in (large.scan, large.ours, large.theirs)]
    return "".join(cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Returns the exit status: 1 where there is no GPU, or no mamba-ssm."""
    about, _, more = (__doc__ or "").partition("\n\n")
    argparse.ArgumentParser(
        prog="sglang-hybrid kernels",
        description=about,
        epilog=more.split("\n\n")[-1],
    ).parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            "error: mamba-ssm's kernels need an NVIDIA GPU, and torch finds none", file=sys.stderr
        )
        return 1
    try:
        import mamba_ssm
    except ImportError as error:
        print(
            f"error: {error}; install 'sglang-hybrid[mamba]', which compiles mamba-ssm",
            file=sys.stderr,
        )
        return 1
    versions = f"torch {torch.__version__}, mamba-ssm {mamba_ssm.__version__}"
    print(f"{torch.cuda.get_device_name()}, {versions}; {COUNT} states inside a prefill")
    print(f"largest relative error at {CHECKED:,} tokens, and milliseconds at {TIMED:,}\n")
    names = ("error, ours", "mamba-ssm's", "no state, ms", "ours, ms", "in parts, ms")
    print(f"{'model':14}" + "".join(f"{name:>13}" for name in names))
    torch.manual_seed(0)
    for layer in LAYERS:
        print(report(layer, CHECKED, TIMED, "cuda"), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
