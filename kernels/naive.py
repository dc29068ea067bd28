"""Token-by-token definitions in float64. Slow, obvious, and the oracle for everything else here.

Each function treats one sequence and returns ``(y, states)``: the output for every token and the
state after 0, 1, ..., T tokens, so ``states[p]`` is the state at position ``p`` and ``states[0]``
the initial one.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

Scan = tuple[Tensor, Tensor]


def time_step(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool) -> Tensor:
    """Step size in float64: ``softplus(dt + bias)``, both parts optional."""
    step = dt.double()
    if dt_bias is not None:
        step = step + dt_bias.double()
    return softplus(step, threshold=50.0) if dt_softplus else step


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_window: Tensor | None = None,
    activation: str | None = "silu",
) -> Scan:
    """Depthwise causal convolution: ``y_t = act(b + sum_k w[:, k] * x_{t-K+1+k})``.

    Shapes: x [T, D], weight [D, K], bias [D], initial_window [D, K-1]; returns y [T, D] and windows
    [T+1, D, K-1], the last K-1 inputs at every position.
    """
    x, weight = x.double(), weight.double()
    tokens, width = x.shape[0], weight.shape[1]
    start = initial_window
    window = x.new_zeros(x.shape[1], width - 1) if start is None else start.double()
    windows, outputs = [window], []
    for t in range(tokens):
        seen = torch.cat([window, x[t][:, None]], dim=1)
        y = (seen * weight).sum(1)
        if bias is not None:
            y = y + bias.double()
        outputs.append(silu(y) if activation in ("silu", "swish") else y)
        window = seen[:, 1:]
        windows.append(window)
    return torch.stack(outputs) if outputs else x.new_empty(0, x.shape[1]), torch.stack(windows)


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: Tensor | None = None,
) -> Scan:
    """Mamba2: ``h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T`` and ``y_t = h_t C_t + D x_t``.

    Dao & Gu 2024, "Transformers are SSMs", section 2 (A a scalar per head).
    Shapes: x [T, H, P], dt [T, H], A [H], B and C [T, G, N] with G dividing H, D [H] or [H, P],
    initial_state [H, P, N]; returns y [T, H, P] and states [T+1, H, P, N].
    """
    x, A = x.double(), A.double()
    tokens, heads, width = x.shape
    step = time_step(dt, dt_bias, dt_softplus)
    B, C = (t.double().repeat_interleave(heads // t.shape[1], dim=1) for t in (B, C))
    start = initial_state
    h = x.new_zeros(heads, width, B.shape[-1]) if start is None else start.double()
    states, outputs = [h], []
    for t in range(tokens):
        decay = torch.exp(step[t] * A)[:, None, None]
        h = decay * h + (step[t][:, None] * x[t])[:, :, None] * B[t][:, None, :]
        y = (h * C[t][:, None, :]).sum(-1)
        if D is not None:
            y = y + (D.double() if D.dim() == 2 else D.double()[:, None]) * x[t]
        outputs.append(y)
        states.append(h)
    return torch.stack(outputs) if outputs else torch.empty_like(x), torch.stack(states)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None = None,
) -> Scan:
    """Mamba1: ``h_t = exp(dt_t A) * h_{t-1} + (dt_t x_t) B_t^T`` and ``y_t = h_t C_t``.

    Gu & Dao 2023, "Mamba", algorithm 2 (A a full matrix, every channel its own step size).
    Shapes: x and dt [T, D], A [D, N], B and C [T, N], initial_state [D, N]; returns y [T, D] and
    states [T+1, D, N]. dt is the final step size.
    """
    x, dt, A, B, C = (t.double() for t in (x, dt, A, B, C))
    start = initial_state
    h = torch.zeros_like(A) if start is None else start.double()
    states, outputs = [h], []
    for t in range(x.shape[0]):
        h = torch.exp(dt[t][:, None] * A) * h + (dt[t] * x[t])[:, None] * B[t][None, :]
        outputs.append(h @ C[t])
        states.append(h)
    return torch.stack(outputs) if outputs else torch.empty_like(x), torch.stack(states)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    l2norm: bool = False,
    initial_state: Tensor | None = None,
) -> Scan:
    """Gated delta net: ``S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T``, ``S_t q_t``.

    Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks", equation 10, with ``a_t = exp(g_t)``.
    With one decay per channel of the key, g [T, Hv, Dk], it is KDA: the decay stands on the key's
    side, ``S_t = S_{t-1} diag(a_t) (I - b_t k_t k_t^T) + b_t v_t k_t^T`` (Kimi Team 2025, "Kimi
    Linear", section 3).
    Shapes: q and k [T, Hk, Dk], v [T, Hv, Dv], g and beta [T, Hv] with Hk dividing Hv,
    initial_state [Hv, Dv, Dk]; returns o [T, Hv, Dv] and states [T+1, Hv, Dv, Dk]. ``l2norm`` makes
    q and k unit vectors first; scale defaults to ``Dk ** -0.5``.
    """
    q, k, v, g, beta = (t.double() for t in (q, k, v, g, beta))
    if l2norm:
        q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    heads = v.shape[1]
    q, k = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    start = initial_state
    s = v.new_zeros(heads, v.shape[-1], k.shape[-1]) if start is None else start.double()
    states, outputs = [s], []
    for t in range(q.shape[0]):
        s = torch.exp(g[t]).view(heads, 1, -1) * s
        error = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", s, k[t]))
        s = s + error[:, :, None] * k[t][:, None, :]
        outputs.append(torch.einsum("hvk,hk->hv", s, q[t]))
        states.append(s)
    return torch.stack(outputs) if outputs else torch.empty_like(v), torch.stack(states)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = True,
    window: int | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention of the last n of T tokens: ``y_i = sum_j softmax_j(scale q_i . k_j) v_j``.

    Query i is token T - n + i; if it is ``causal`` it sees the tokens up to itself, with a
    ``window`` only that many before itself. With a ``cap`` scores s become ``cap tanh(s / cap)``
    (Gemma Team 2024, "Gemma 2", section 2). ``sinks`` [Hq] are scores of a further key per head
    whose value is zero (Xiao et al. 2023, "Efficient streaming language models with attention
    sinks", section 3.3).
    Shapes: q [n, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] with Hkv dividing Hq; returns y [n, Hq, Dv].
    """
    n, heads = q.shape[:2]
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("nhd,thd->hnt", q, k) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if causal:
        distance = torch.arange(k.shape[0] - n, k.shape[0])[:, None] - torch.arange(k.shape[0])
        unseen = (distance < 0) | (distance > (k.shape[0] if window is None else window))
        scores = scores.masked_fill(unseen, -torch.inf)
    if sinks is not None:
        extra = sinks.double()[:, None, None].expand(heads, n, 1)
        scores = torch.cat([scores, extra], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hnt,thd->nhd", weights, v)
