"""Depthwise causal convolution over a packed batch, its windows, and its decode step.

Definition: ``naive.causal_conv1d``. The *window* at a position is the last K-1 inputs before it
(zeros before the first token of a prompt): all that the convolution remembers.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu

from sglang_hybrid.kernels.chunks import Positions, Scanned, check_positions

ACTIVATIONS = (None, "silu", "swish")

VALUES_PER_BLOCK = 1 << 19
"""Values of y that are computed at once: with their inputs about what stays in a CPU's caches."""


def activate_(y: Tensor, activation: str | None) -> Tensor:
    """Applies ``activation``, one of None, "silu" and its other name "swish", in place."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"Activation {activation!r} is unknown; use one of {ACTIVATIONS}.")
    return y if activation is None else silu(y, inplace=True)


def causal_conv1d_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: list[int],
    *,
    activation: str | None = "silu",
    initial_windows: Tensor | None = None,
    positions: Positions = (),
) -> Scanned:
    """Convolves every sequence of a packed batch.

    Shapes: x [T, D], weight [D, K], bias [D], initial_windows [S, D, K-1] (None: zeros), cu_seqlens
    the S+1 sequence bounds. Returns y [T, D] in x's dtype, and in float32 the final windows
    [S, D, K-1] and the windows at ``positions`` [n, D, K-1]. Rows of x from cu_seqlens[-1] on give
    zeros.

    All tokens are convolved as if they were one sequence; then the first K-1 of every sequence,
    which have seen the end of another, are computed again.
    """
    check_positions(positions, cu_seqlens)
    tokens, channels, past = cu_seqlens[-1], x.shape[1], weight.shape[1] - 1
    lengths = [end - begin for begin, end in pairwise(cu_seqlens)]
    taps = weight.float().T.contiguous()
    start = x.new_zeros(channels, dtype=torch.float32) if bias is None else bias.float()
    y = x.new_empty(x.shape, dtype=torch.float32)
    y[tokens:] = 0
    per_block = max(1, VALUES_PER_BLOCK // channels)
    for begin in range(0, tokens, per_block):
        _convolve(x, taps, start, y, begin, min(tokens, begin + per_block))
        activate_(y[begin : min(tokens, begin + per_block)], activation)

    begins = [
        _window_first(x, cu_seqlens[s], n, past, initial_windows, s) for s, n in enumerate(lengths)
    ]
    for s, line in enumerate(begins):
        first = line.shape[0] - past
        if first > 0:
            fixed = start.repeat(first, 1)
            for k in range(past + 1):
                fixed.addcmul_(line[k : k + first], taps[k])
            y[cu_seqlens[s] : cu_seqlens[s] + first] = activate_(fixed, activation)

    def windows(at: Positions) -> Tensor:
        found = y.new_empty(len(at), channels, past)
        for index, (s, n) in enumerate(at):
            seen = begins[s][n : n + past] if n < past else x[cu_seqlens[s] + n - past :][:past]
            found[index] = seen.T
        return found

    return Scanned(y.to(x.dtype), windows(list(enumerate(lengths))), windows(positions))


def _convolve(x: Tensor, taps: Tensor, start: Tensor, y: Tensor, begin: int, end: int) -> None:
    """``y[t] = start + sum_k taps[k] * x[t - K + 1 + k]`` for the tokens from begin to end; what
    lies in front of token 0 is zero. Shapes: taps [K, D], start [D], x and y [T, D].
    """
    newest = taps.shape[0] - 1
    torch.addcmul(start, x[begin:end], taps[newest], out=y[begin:end])
    for back in range(1, newest + 1):
        first = max(begin, back)
        if first < end:
            y[first:end].addcmul_(x[first - back : end - back], taps[newest - back])


def _window_first(
    x: Tensor, begin: int, length: int, past: int, initial_windows: Tensor | None, s: int
) -> Tensor:
    """The window of sequence s and the first K-1 of its inputs behind it: [K-1 + ..., D]."""
    window = x.new_zeros(past, x.shape[1], dtype=torch.float32)
    if initial_windows is not None:
        window = initial_windows[s].float().T
    return torch.cat([window, x[begin : begin + min(length, past)].float()])


def causal_conv1d_step(
    x: Tensor, windows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """Convolves the next token(s) of every sequence: one decode step when T is 1.

    Shapes: x [b, D, T], windows [b, D, K-1], weight [D, K], bias [D]. Returns y [b, D, T] in x's
    dtype and the new windows [b, D, K-1] in the windows' dtype.
    """
    steps, width = x.shape[-1], weight.shape[1]
    seen = torch.cat([windows.float(), x.float()], dim=-1)
    taps = weight.float()
    if steps == 1:
        y = (seen * taps).sum(-1, keepdim=True)
    else:
        y = (seen.unfold(2, width, 1) * taps[:, None]).sum(-1)
    if bias is not None:
        y += bias.float()[:, None]
    return activate_(y, activation).to(x.dtype), seen[..., steps:].to(windows.dtype)
