"""Products through oneDNN are those of torch, packed or not, and follow an updated weight."""

from types import SimpleNamespace

import pytest
import torch
from kernel_cases import BF16, FP32, Draw, assert_close
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

from sglang_hybrid.extensions.cpu import sizing
from sglang_hybrid.extensions.cpu.ops import linear


@pytest.fixture
def packs_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SMALLEST", 0)
    monkeypatch.setattr(linear, "SMALLEST_PACKED", 0)


def layer(weight: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(weight=torch.nn.Parameter(weight, requires_grad=False))


@pytest.mark.usefixtures("packs_everything")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, FP32), (torch.bfloat16, BF16)])
@pytest.mark.parametrize("shape", [(1, 40), (33, 40), (2, 5, 40), (0, 40)])
def test_products(shape, dtype, tolerance, biased, packed):
    d = Draw(1)
    linear_layer = layer(d.normal(24, 40).to(dtype))
    if packed:
        linear.pack(linear_layer)
    x, bias = d.normal(*shape).to(dtype), d.normal(24).to(dtype) if biased else None
    y = linear.apply(linear_layer, x, bias)
    expected = x.double() @ linear_layer.weight.double().T + (0 if bias is None else bias.double())
    assert y.dtype == dtype
    assert_close(y, expected, tolerance)


@pytest.mark.usefixtures("packs_everything")
def test_inputs_may_be_a_part_of_something_wider():
    d = Draw(2)
    linear_layer = layer(d.normal(24, 40))
    linear.pack(linear_layer)
    x = d.normal(7, 100)[:, 30:70]
    assert_close(linear.apply(linear_layer, x), x.double() @ linear_layer.weight.double().T, FP32)


@pytest.mark.usefixtures("packs_everything")
def test_an_updated_weight_is_packed_again():
    d = Draw(3)
    linear_layer, x = layer(d.normal(24, 40)), d.normal(5, 40)
    linear.pack(linear_layer)
    linear.unpack(linear_layer)
    linear_layer.weight.data.copy_(d.normal(24, 40))
    expected = x.double() @ linear_layer.weight.double().T
    assert_close(linear.apply(linear_layer, x), expected, FP32, "between")
    linear.pack(linear_layer)
    assert_close(linear.apply(linear_layer, x), expected, FP32, "after")


class Layer(torch.nn.Module):
    """A layer of a model whose loader copies in place, as SGLang's do."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.quant_method = UnquantizedLinearMethod()

    def load_weights(self, named: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            self.get_parameter(name).data.copy_(tensor)


@pytest.mark.usefixtures("packs_everything")
def test_updates_from_tensors_reach_the_packed_copy():
    d = Draw(7)
    model, x, new = Layer(d.normal(24, 40)), d.normal(5, 40), d.normal(24, 40)
    linear.pack(model)
    updater = SimpleNamespace(
        _assert_weight_cache_inactive=lambda operation: None, get_model=lambda: model
    )
    found = WeightUpdater.load_weights_from_distributed(updater, [("weight", new)])
    assert found[0]
    assert_close(model.quant_method.apply(model, x), x.double() @ new.double().T, FP32)
    assert model.__dict__[linear._ATTRIBUTE] is not None


@pytest.mark.usefixtures("packs_everything")
def test_a_tied_embedding_is_packed_as_a_head():
    d = Draw(4)
    head, x = layer(d.normal(50, 16)), d.normal(3, 16)
    assert_close(linear.lm_head_product(head, x), x.double() @ head.weight.double().T, FP32)
    assert head.__dict__[linear._ATTRIBUTE] is not None


@pytest.mark.usefixtures("packs_everything")
def test_copies_stay_within_their_share_of_the_memory(monkeypatch):
    d = Draw(5)
    layers = [layer(d.normal(8, 16)) for _ in range(4)]
    size = layers[0].weight.numel() * 4
    monkeypatch.setattr(linear, "_packed_bytes", 0)
    monkeypatch.setattr(linear, "packed_limit", lambda: 2 * size)
    for one in layers:
        linear.pack(one)
    kept = [one.__dict__[linear._ATTRIBUTE] is not None for one in layers]
    assert kept == [True, True, False, False]
    linear.unpack(layers[0])
    linear.pack(layers[3])
    assert layers[3].__dict__[linear._ATTRIBUTE] is not None


def test_weights_that_are_no_matrices_stay_as_they_are(packs_everything):
    convolution = layer(Draw(6).normal(24, 1, 4))
    linear.pack(convolution)
    assert convolution.__dict__[linear._ATTRIBUTE] is None


def test_the_limit_is_a_share_of_the_memory(monkeypatch):
    monkeypatch.setattr(sizing, "memory_limit", lambda: 1000)
    assert sizing.packed_limit() == int(1000 * sizing.PACKED_SHARE)
