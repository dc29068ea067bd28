"""Random packed batches for kernel tests, and the comparison they share.

Everything is drawn from one seed that hypothesis chooses and prints when a test fails.
"""

import os
from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_hybrid.kernels.chunks import Scanned

FP32, BF16 = 1e-5, 1e-2
RECENT = 8  # tokens

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")
"""The device of Triton kernels; the tests make their tensors and compare them on the CPU."""

torch.set_num_threads(1)  # these tensors are tiny: a second thread would only wait for the first

few = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
seeds = st.integers(0, 2**31 - 1)
chunks = st.sampled_from([4, 16, 64])


@st.composite
def batches(draw: st.DrawFn, longest: int = 140) -> list[int]:
    """Sequence lengths: empty ones, single tokens, and lengths around chunk borders."""
    borders = [0, 1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129]
    length = st.one_of(
        st.sampled_from([n for n in borders if n <= longest]), st.integers(0, longest)
    )
    lengths = draw(st.lists(length, min_size=1, max_size=4))
    return lengths if sum(lengths) else [1]


def placed(tensor: Tensor) -> Tensor:
    """The tensor on `DEVICE`, with the strides that it has."""
    if tensor.device == DEVICE:
        return tensor
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(DEVICE)
    return memory.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def bounds(lengths: list[int]) -> list[int]:
    """cu_seqlens."""
    return list(accumulate(lengths, initial=0))


class Draw:
    """Random tensors from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator) * (high - low) + low

    def integer(self, low: int, high: int) -> int:
        """low <= result <= high."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def order(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator)

    def flags(self, n: int) -> Tensor:
        return torch.rand(n, generator=self.generator) < 0.5

    def positions(self, lengths: list[int], chunk: int) -> list[tuple[int, int]]:
        """Several per sequence: both ends, around a chunk border, anywhere; in no order."""
        found = []
        for s, n in enumerate(lengths):
            border = chunk * self.integer(0, n // chunk)
            wanted = {0, n, border - 1, border, border + 1, self.integer(0, n), self.integer(0, n)}
            found += [(s, p) for p in wanted if 0 <= p <= n]
        return [found[i] for i in self.order(len(found)).tolist()]


def assert_close(
    actual: Tensor,
    expected: Tensor,
    tolerance: float,
    what: str = "",
    *,
    among: Tensor | None = None,
) -> None:
    """Largest error at most ``tolerance`` times the largest value expected, or the largest of
    ``among``; no NaN, same shape."""
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    if expected.numel() == 0:
        return
    error = (actual.double() - expected.double()).abs().max().item()
    scale = (expected if among is None else among).double().abs().max().item()
    assert error <= tolerance * scale + 1e-30, f"{what}: error {error:.3e} at scale {scale:.3e}"


def assert_scanned(
    done: Scanned,
    cu: list[int],
    asked: list[tuple[int, int]],
    define: Callable[[int, slice], tuple[Tensor, Tensor]],
) -> None:
    """A prefill of sequences bounded by `cu` is as defined, at each asked position too.

    define(s, at): output and the state after 0, 1, .. tokens of sequence s, which lies at slice at.
    A state's error is relative to the states of the last tokens: those of one value cross zero.
    """
    for s, (start, end) in enumerate(pairwise(cu)):
        y, states = define(s, slice(start, end))
        assert_close(done.y[start:end], y, FP32, "output")
        found = [(len(states) - 1, done.final_states[s], "final state")]
        found += [
            (p, done.states_at[i], f"state at {p}")
            for i, (owner, p) in enumerate(asked)
            if owner == s
        ]
        for p, state, what in found:
            recent = states[max(0, p - RECENT) : p + 1]
            assert_close(state, states[p], FP32, what, among=recent)
