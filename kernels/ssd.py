"""Mamba2 in chunks: a packed batch, and the decode step that Mamba1 shares.

Definition: ``naive.ssd``. Chunked form: Dao & Gu 2024, "Transformers are SSMs", section 6 (SSD):
inside a chunk the recurrence is a masked matrix product, between chunks it is a recurrence over
chunk states.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from sglang_hybrid.kernels.chunks import Positions, Scanned, States, blocks, find_inside

CHUNK = 64
SCORES_PER_BLOCK = 1 << 18
"""Elements of the [chunks, H, L, L] matrix held at once: about what stays in a CPU's cache."""


def ssd_prefill(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    cu_seqlens: list[int],
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: Tensor | None = None,
    positions: Positions = (),
    out: Tensor | None = None,
    chunk: int = CHUNK,
) -> Scanned:
    """Mamba2 over a packed batch.

    Shapes: x [T, H, P], dt [T, H], A [H] (negative), B and C [T, G, N], D [H] or [H, P], z
    [T, H, P] (output gated by silu(z)), dt_bias [H], initial_states [S, H, P, N] (None: zeros).
    Returns y [T, H, P] in x's dtype (written to ``out`` if given), and in float32 the final states
    [S, H, P, N] and the states at ``positions`` [n, H, P, N].
    """
    _, heads, width = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = softplus(step) if dt_softplus else step
    step = step if dt_limit == (0.0, math.inf) else step.clamp(*dt_limit)
    rate = A.double()
    skip = None if D is None else (D.float() if D.dim() == 2 else D.float()[:, None])
    states = States(initial_states, positions, cu_seqlens, (heads, width, B.shape[-1]), x.device)
    per_block = max(1, SCORES_PER_BLOCK // (heads * chunk * chunk))
    for block in blocks(cu_seqlens, chunk, per_block, positions, x.device):
        raw, b, c = block.rows(x), block.rows(B), block.rows(C)
        dt_ = block.without_padding(block.rows(step))
        log_decay = (dt_.double() * rate).cumsum(1)
        to_end = dt_ * (log_decay[:, -1:] - log_decay).float().exp()
        addend = _written(raw * to_end[..., None], b)
        factor = log_decay[:, -1].float().exp()[..., None, None]
        entering = states.pass_through(block, factor, addend)
        result = _read(c, entering).mul_(log_decay.float().exp()[..., None])
        _add_within(result, raw, dt_, b, c, log_decay)
        place = block.view(y)
        if skip is not None and z is None and place is not None and y.dtype == torch.float32:
            torch.addcmul(result, raw, skip, out=place)
        else:
            if skip is not None:
                result.addcmul_(raw, skip)
            if z is not None:
                result.mul_(silu(block.rows(z)))
            block.store(result, y)
        for request, at, count in find_inside(block):
            seen = slice(0, count)
            total = log_decay[at, count - 1]
            until = dt_[at, seen] * (total - log_decay[at, seen]).float().exp()
            added = _written((raw[at, seen] * until[..., None])[None], b[at : at + 1, seen])
            kept = total.float().exp()[:, None, None]
            states.found[request] = torch.addcmul(added[0], entering[at], kept)
    return Scanned(y, states.final(), states.found)


def _written(inputs: Tensor, B: Tensor) -> Tensor:
    """The sum that tokens add to a state, [m, H, P, N]: over the tokens, inputs [m, L, H, P] times
    B [m, L, G, N].
    """
    m, length, heads, width = inputs.shape
    groups, size = B.shape[2:]
    by_group = inputs.view(m, length, groups, -1)
    found = inputs.new_empty(m, groups, heads * width // groups, size)
    for g in range(groups):
        torch.bmm(by_group[:, :, g].transpose(1, 2), B[:, :, g], out=found[:, g])
    return found.view(m, heads, width, size)


def _read(C: Tensor, states: Tensor) -> Tensor:
    """The outputs [m, L, H, P] of a state: C [m, L, G, N] times states [m, H, P, N]."""
    m, length, groups, size = C.shape
    heads, width = states.shape[1:3]
    by_group = states.reshape(m, groups, -1, size)
    found = states.new_empty(m, length, groups, heads * width // groups)
    for g in range(groups):
        torch.bmm(C[:, :, g], by_group[:, g].transpose(1, 2), out=found[:, :, g])
    return found.view(m, length, heads, width)


def _add_within(
    result: Tensor, x: Tensor, step: Tensor, B: Tensor, C: Tensor, log_decay: Tensor
) -> None:
    """Add to result [m, L, H, P] what the tokens of a chunk read from each other.

    log_decay [m, L, H] is the running sum of step * A in float64: it grows along the chunk, the
    differences that are needed do not. It is taken apart into two float32 numbers; the difference
    of the high ones is exact enough, and the low ones become factors.
    """
    m, length, heads, width = x.shape
    groups = B.shape[2]
    high = log_decay.float()
    low = (log_decay - high).float().exp_()
    running = high.transpose(1, 2).contiguous()
    scores = running[..., :, None] - running[..., None, :]
    future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu_(1)
    scores.masked_fill_(future, -math.inf).exp_()
    pairs = scores.new_empty(m, groups, length, length)
    for g in range(groups):
        torch.bmm(C[:, :, g], B[:, :, g].transpose(1, 2), out=pairs[:, g])
    scores.view(m, groups, -1, length, length).mul_(pairs[:, :, None])
    inputs = x.new_empty(m, heads, length, width)
    torch.mul(x.transpose(1, 2), (step / low).transpose(1, 2)[..., None], out=inputs)
    within = torch.bmm(scores.view(-1, length, length), inputs.view(-1, length, width))
    result.addcmul_(within.view(m, heads, length, width).transpose(1, 2), low[..., None])


class StepInputs(NamedTuple):
    """The change of states [b, H, P, N] by one decode step, in float32.

    Each is multiplied by ``decay`` [b, H, P or 1, N or 1]; then ``added`` [b, H, P] times ``B``
    [b, G, N] is added. ``C`` [b, G, N] reads the output, to which ``skipped`` [b, H, P] is added
    (None: nothing).
    """

    decay: Tensor
    added: Tensor
    B: Tensor
    C: Tensor
    skipped: Tensor | None

    def of(self, rows: slice) -> "StepInputs":
        """The inputs of some of the states."""
        if rows == slice(None):
            return self
        return StepInputs(
            self.decay[rows],
            self.added[rows],
            self.B[rows],
            self.C[rows],
            None if self.skipped is None else self.skipped[rows],
        )


def step_inputs(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> StepInputs:
    """The inputs of one decode step of Mamba2 or Mamba1.

    Shapes: x [b, H, P], dt [b, H, P or 1], A [H, P or 1, N or 1], B and C [b, G, N], D and dt_bias
    [H, P or 1]. Mamba1 (``naive.selective_scan``) is H = channels, P = 1; Mamba2 (``naive.ssd``)
    has one step size and one decay per head, so its dt and A need no P and N.
    """
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = softplus(step) if dt_softplus else step
    inputs = x.float()
    return StepInputs(
        decay=(step[..., None] * A.float()).exp_(),
        added=step * inputs,
        B=B.float(),
        C=C.float(),
        skipped=None if D is None else D.float() * inputs,
    )


def selective_state_step(states: Tensor, inputs: StepInputs) -> Tensor:
    """One decode step: changes states [b, H, P, N] (float32) in place, returns y [b, H, P]."""
    b, heads, width, size = states.shape
    groups = inputs.B.shape[1]
    states.mul_(inputs.decay)
    by_group = (b, groups, heads // groups, width)
    states.view(*by_group, size).addcmul_(
        inputs.added.view(*by_group, 1), inputs.B.view(b, groups, 1, 1, size)
    )
    read = torch.bmm(states.view(b * groups, -1, size), inputs.C.reshape(b * groups, size, 1)).view(
        b, heads, width
    )
    return read if inputs.skipped is None else read.add_(inputs.skipped)
