"""The mixture-of-experts functions that SGLang calls agree with their definitions."""

from types import SimpleNamespace

import pytest
import torch
from kernel_cases import FP32, Draw, assert_close
from torch.nn.functional import silu

from sglang_hybrid.extensions.cpu.ops import moe


def case(d, activation, is_gated, scale, limit=None):
    config = SimpleNamespace(
        activation=activation,
        is_gated=is_gated,
        routed_scaling_factor=scale,
        gemm1_alpha=None,
        gemm1_clamp_limit=None,
        swiglu_limit=limit,
        apply_router_weight_on_input=False,
    )
    layer = SimpleNamespace(
        w13_weight=d.normal(4, 12 if is_gated else 6, 8),
        w2_weight=d.normal(4, 8, 6),
        should_fuse_routed_scaling_factor_in_topk=False,
    )
    experts = torch.stack([d.order(4)[:2] for _ in range(7)])
    return layer, d.normal(7, 8), (d.uniform(0, 1, 7, 2), experts, None), config


def swiglu(h, limit):
    """SwiGLU of gate and up h [2 F] that are limited: the gate above, up on both sides."""
    gate, up = h.chunk(2)
    return silu(gate.minimum(torch.tensor(limit))) * up.clip(-limit, limit)


def test_a_shared_expert_is_limited_likewise():
    gate_up, out = Draw(3).normal(5, 12), torch.empty(5, 6)
    moe.silu_and_mul_clamp(gate_up, out, 0.7)
    assert_close(out, torch.stack([swiglu(h, 0.7) for h in gate_up.double()]), FP32)


@pytest.mark.parametrize(
    ("activation", "is_gated", "scale", "limit"),
    [("silu", True, None, None), ("silu", True, None, 0.7), ("relu2", False, 2.5, None)],
)
def test_experts_are_summed_by_weight(activation, is_gated, scale, limit):
    layer, x, (weights, experts, logits), config = case(Draw(1), activation, is_gated, scale, limit)
    experts[0, 1] = -1
    y = moe.moe_forward_native(layer, x, (weights, experts, logits), config)
    for t in range(7):
        expected = torch.zeros(8, dtype=torch.float64)
        for weight, e in zip(weights[t], experts[t].tolist(), strict=True):
            if e < 0:
                continue
            h = layer.w13_weight[e].double() @ x[t].double()
            h = swiglu(h, limit or torch.inf) if is_gated else h.relu().square()
            expected += weight * (layer.w2_weight[e].double() @ h)
        assert_close(y[t], expected * (scale or 1), FP32, f"token {t}")


def test_an_activation_it_does_not_know_is_named():
    layer, x, routing, config = case(Draw(2), "situ", True, None)
    with pytest.raises(ValueError, match="'situ'"):
        moe.moe_forward_native(layer, x, routing, config)


def test_shared_expert_is_gated_and_added():
    d = Draw(4)
    hidden, weight, shared, routed = d.normal(5, 8), d.normal(8), d.normal(5, 8), d.normal(5, 8)
    expected = routed.double() + (hidden.double() @ weight.double()).sigmoid()[:, None] * shared
    moe.fused_gate_sigmoid_mul_add(hidden, weight, shared, routed)
    assert_close(routed, expected, FP32)


def test_torch_multiplies_into_a_wider_type():
    moe.teach_torch_mm_with_dtype()
    d = Draw(5)
    a, b = d.normal(5, 8).bfloat16(), d.normal(8, 3).bfloat16()
    product = torch.mm(a, b, out_dtype=torch.float32)
    assert product.dtype == torch.float32
    assert_close(product, a.double() @ b.double(), FP32)


def test_deepseeks_layer_scales_its_experts_itself():
    """It multiplies their sum once more where the device is not CUDA."""

    class Layer:
        def __init__(self, scale):
            config = SimpleNamespace(routed_scaling_factor=scale)
            self.experts, self.scale = SimpleNamespace(moe_runner_config=config), scale

    Layer.__init__ = moe.scaled_once(Layer.__init__)
    layer = Layer(2.5)
    assert layer.experts.moe_runner_config.routed_scaling_factor is None
    assert layer.scale == 2.5
