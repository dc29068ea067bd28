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


def activate(y: Tensor, activation: str | None) -> Tensor:
    """Applies ``activation``, one of None, "silu" and its other name "swish"."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"Activation {activation!r} is unknown; use one of {ACTIVATIONS}.")
    return y if activation is None else silu(y)


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
    """
    width, past = weight.shape[1], weight.shape[1] - 1
    sequences, tokens, channels = len(cu_seqlens) - 1, cu_seqlens[-1], x.shape[1]
    lengths = [end - begin for begin, end in pairwise(cu_seqlens)]
    check_positions(positions, cu_seqlens)

    # Each sequence is laid out behind its own window, so one pass serves the whole batch.
    line = x.new_zeros(tokens + sequences * past, channels, dtype=torch.float32)
    begins = [cu_seqlens[s] + s * past for s in range(sequences)]
    for s, begin in enumerate(begins):
        if initial_windows is not None:
            line[begin : begin + past] = initial_windows[s].float().T
        line[begin + past : begin + past + lengths[s]] = x[cu_seqlens[s] : cu_seqlens[s + 1]]

    span = max(line.shape[0] - past, 0)
    taps = weight.float().T.contiguous()
    y = line.new_zeros(span, channels) if bias is None else bias.float().repeat(span, 1)
    for k in range(width):
        y.addcmul_(line[k : k + span], taps[k])
    y = activate(y, activation)

    out = x.new_zeros(x.shape)
    for s, begin in enumerate(begins):
        out[cu_seqlens[s] : cu_seqlens[s + 1]] = y[begin : begin + lengths[s]]

    def windows(at: Positions) -> Tensor:
        found = line.new_empty(len(at), channels, past)
        for index, (s, n) in enumerate(at):
            found[index] = line[begins[s] + n : begins[s] + n + past].T
        return found

    return Scanned(out, windows(list(enumerate(lengths))), windows(positions))


def causal_conv1d_step(
    x: Tensor, windows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """Convolves the next token(s) of every sequence: one decode step when T is 1.

    Shapes: x [b, D, T], windows [b, D, K-1], weight [D, K], bias [D]. Returns y [b, D, T] in x's
    dtype and the new windows [b, D, K-1] in the windows' dtype.
    """
    steps, taps = x.shape[-1], weight.float()
    seen = torch.cat([windows.float(), x.float()], dim=-1)
    y = seen.new_zeros(x.shape)
    for k in range(weight.shape[1]):
        y.addcmul_(seen[..., k : k + steps], taps[:, k, None])
    if bias is not None:
        y += bias.float()[:, None]
    return activate(y, activation).to(x.dtype), seen[..., steps:].to(windows.dtype)
