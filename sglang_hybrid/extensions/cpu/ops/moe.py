"""Mixture-of-experts blocks where SGLang's own torch forms are missing or fall short."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, relu, silu

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "relu2": lambda t: relu(t).square(),
}


def moe_forward_native(layer: Any, x: Tensor, topk_output: Any, moe_runner_config: Any) -> Tensor:
    """Sum over each token's experts of ``weight * w2 (act(w1 x) [* w3 x])``, times the scale.

    Shapes: x [T, D], layer.w13_weight [E, 2 F or F, D] (gate above up, or up alone where the
    config is not gated), layer.w2_weight [E, D, F], topk_output weights and expert ids [T, k] (a
    negative id is no expert). SGLang's function of this name knows gated experts only and leaves
    out ``routed_scaling_factor``, which its Triton runner applies
    (moe_runner/triton_utils/fused_moe.py).
    """
    config = moe_runner_config
    plain = (config.gemm1_alpha, config.gemm1_clamp_limit) == (None,) * 2
    if config.activation not in _ACTIVATIONS or not plain or config.apply_router_weight_on_input:
        raise ValueError(
            "The CPU platform runs experts with a plain silu, gelu or relu2 activation, not "
            f"{config.activation!r} with clamps or with router weights on the input."
        )
    act, weights, experts = _ACTIVATIONS[config.activation], topk_output[0], topk_output[1]
    biases = (getattr(layer, "w13_weight_bias", None), getattr(layer, "w2_weight_bias", None))
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in experts.unique().tolist():
        if expert < 0:
            continue
        rows, place = (experts == expert).nonzero(as_tuple=True)
        up_bias, down_bias = (None if b is None else b[expert].to(x.dtype) for b in biases)
        hidden = linear(x[rows], layer.w13_weight[expert], up_bias)
        if config.is_gated:
            gate, up = limited(hidden, config.swiglu_limit)
            hidden = act(gate) * up
        else:
            hidden = act(hidden)
        result = linear(hidden, layer.w2_weight[expert], down_bias)
        out.index_add_(0, rows, result.float() * weights[rows, place, None].float())
    if config.routed_scaling_factor and not layer.should_fuse_routed_scaling_factor_in_topk:
        out *= config.routed_scaling_factor
    return out.to(x.dtype)


def limited(gate_up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """The halves gate and up [.., F] of gate_up [.., 2 F]: gate at most ``limit``, up within
    ``-limit`` and ``limit``; as they are without a limit.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))


def silu_and_mul_clamp(gate_up: Tensor, output: Tensor, limit: float) -> None:
    """Write ``silu(gate) * up`` of the limited halves of gate_up [T, 2 F] into output [T, F]."""
    gate, up = limited(gate_up, limit)
    torch.mul(silu(gate), up, out=output)


def scaled_once(init: Callable[..., None]) -> Callable[..., None]:
    """Makes DeepSeek's experts: without the scale of their sum, which that layer multiplies with
    itself where the device is not CUDA (models/deepseek_v2.py:1239, 1422).
    """

    @wraps(init)
    def made(layer: Any, *given: Any, **named: Any) -> None:
        init(layer, *given, **named)
        layer.experts.moe_runner_config.routed_scaling_factor = None

    return made


def fused_gate_sigmoid_mul_add(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor
) -> None:
    """Adds ``sigmoid(hidden_states @ gate_weight) * shared_output`` to final_hidden_states.

    Shapes: gate_weight [D], the rest [T, D].
    """
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid()
    final_hidden_states.add_((gate[:, None] * shared_output).to(final_hidden_states.dtype))


def mm_with_dtype(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``torch.mm(a, b, out_dtype=...)``, which Nemotron-H's router uses and torch has on CUDA."""
    return torch.mm(a.to(out_dtype), b.to(out_dtype))


@cache
def teach_torch_mm_with_dtype() -> torch.library.Library:
    """Registers ``mm_with_dtype`` as the CPU kernel of ``aten::mm.dtype``, once per process."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("mm.dtype", mm_with_dtype, "CPU")  # type: ignore[no-untyped-call]
    return library
