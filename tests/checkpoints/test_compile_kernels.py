"""The kernels of checkpoint states are compiled at the start of a server with a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
from sglang.srt.layers.attention.linear.lightning_backend import LightningAttentionBackend
from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvAttnBackend
from sglang.srt.layers.attention.mamba.mamba import MambaMixer2
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang.srt.models.bailing_moe_linear import BailingMoELinearAttention
from sglang.srt.models.lfm2 import Lfm2ShortConv
from sglang.srt.models.minicpm import MiniCPMLightningMixer
from torch import nn

pytest.importorskip("triton")

from sglang_hybrid.cache import factory
from sglang_hybrid.checkpoints import compile_kernels
from sglang_hybrid.storage.codecs import in_use
from tests.checkpoints.layers import made
from tests.kernels.launches import noted
from tests.kernels.model_layers import LAYERS, Layer


def model_runner(layer: Layer, device: str) -> Any:
    """A model runner as far as `compile_kernels` looks at it, with pools on the CPU."""
    windows, states = layer.pools()
    kind: type
    kernel: type = TritonGDNKernel
    module: type[nn.Module] = RadixLinearAttention
    if layer.save is None:
        kind, module = ShortConvAttnBackend, Lfm2ShortConv
    elif layer.constant:
        kind, module = LightningAttentionBackend, MiniCPMLightningMixer
    elif layer.per_channel:
        kind, kernel, windows = KDAAttnBackend, TritonKDAKernel, windows.transpose(1, 2)
    elif layer.chunk is None:
        kind = GDNAttnBackend
    else:
        kind, module = Mamba2AttnBackend, MambaMixer2
    backend = object.__new__(kind)
    backend._mamba_chunk_size, backend.enable_mis = layer.chunk or 64, False
    backend.kernel_dispatcher = SimpleNamespace(extend_kernel=object.__new__(kernel))
    cache = MambaPool.State(conv=[windows[None]], temporal=states[None])
    pool = SimpleNamespace(mamba_cache=cache, _slot_siblings=[])
    return SimpleNamespace(
        device=device,
        dtype=layer.dtype,
        attn_backend=SimpleNamespace(linear_attn_backend=backend),
        model=made(module),
        req_to_token_pool=SimpleNamespace(mamba_pool=pool),
    )


@pytest.mark.parametrize("name", ["Nemotron-H-8B", "Qwen3-Next-80B", "Kimi-Linear-48B"])
def test_every_kernel_is_launched_once_and_the_log_says_how_far_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runner, layer = model_runner(LAYERS[name], "cuda"), LAYERS[name]
    with caplog.at_level("INFO"):
        launches = noted(lambda: compile_kernels.compile_kernels(runner, tell=True))
    scan = "delta_state" if layer.chunk is None else "ssd_state"
    assert [launch.name for launch in launches] == ["conv_window", scan]
    assert launches[0].arguments["channels"] == layer.channels
    assert launches[1].arguments["CHUNK"] == (layer.chunk or 64)
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "sglang_hybrid: compiling kernel 1 of 2: windows of the convolution."
    assert told[2] == "sglang_hybrid: compiling kernel 2 of 2: states inside the scan."
    assert all(line.startswith("sglang_hybrid: compiled in ") for line in told[1::2])


def test_a_short_convolution_launches_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runner = model_runner(LAYERS["LFM2-2.6B"], "cuda")
    with caplog.at_level("INFO"):
        launches = noted(lambda: compile_kernels.compile_kernels(runner, tell=True))
    assert [launch.name for launch in launches] == ["conv_window"]
    told = caplog.records[0].getMessage()
    assert told == "sglang_hybrid: compiling kernel 1 of 1: windows of the convolution."


@pytest.mark.parametrize(
    ("module", "dtype"),
    [(BailingMoELinearAttention, torch.float32), (MiniCPMLightningMixer, torch.bfloat16)],
)
def test_lightning_attention_is_compiled_for_keys_of_their_type(
    module: type[nn.Module], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runner = model_runner(LAYERS["MiniCPM-SALA"], "cuda")
    runner.model = made(module)
    (launch,) = noted(lambda: compile_kernels.compile_kernels(runner, tell=False))
    assert launch.name == "lightning_state"
    assert launch.arguments["keys"].dtype == launch.arguments["values"].dtype == dtype


def test_a_layer_with_two_windows_launches_one_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runner = model_runner(LAYERS["ZAYA1-base"], "cuda")
    cache = runner.req_to_token_pool.mamba_pool.mamba_cache
    cache.conv.append(LAYERS["ZAYA1-base, the last hidden state"].pools()[0][None])
    launches = noted(lambda: compile_kernels.compile_kernels(runner, tell=False))
    assert [launch.name for launch in launches] == ["conv_window"] * 2
    assert [launch.arguments["PAST"] for launch in launches] == [2, 1]
    assert [launch.arguments["channels"] for launch in launches] == [1280, 2048]


def test_so_do_windows_beside_the_recurrent_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runner = model_runner(LAYERS["Qwen3-Next-80B"], "cuda")
    windows = LAYERS["Qwen4-Exp, beside its delta nets"].pools()[0]
    beside = runner.req_to_token_pool.mamba_pool._slot_siblings
    beside += [SimpleNamespace(conv_state=windows[None]), SimpleNamespace()]
    launches = noted(lambda: compile_kernels.compile_kernels(runner, tell=False))
    assert [launch.name for launch in launches] == ["conv_window", "delta_state", "conv_window"]
    assert launches[-1].arguments["PAST"] == 9


def test_the_pools_of_the_server_are_not_written() -> None:
    layer = LAYERS["Nemotron-H-8B"]
    windows, states = layer.pools()
    for run in compile_kernels.warm_up(
        windows, states, layer.dtype, layer.save, layer.chunk or 0
    ).values():
        (launch,) = noted(run)
        written = launch.arguments["pool"]
        assert written.dtype in (windows.dtype, states.dtype)
        assert written.untyped_storage().data_ptr() not in (
            windows.untyped_storage().data_ptr(),
            states.untyped_storage().data_ptr(),
        )


def test_a_rank_that_does_not_log_compiles_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runner = model_runner(LAYERS["Falcon-H1-7B"], "cuda")
    with caplog.at_level("INFO"):
        assert len(noted(lambda: compile_kernels.compile_kernels(runner, tell=False))) == 2
    assert not caplog.records


@pytest.mark.parametrize(
    ("split", "unplanned", "device", "compiled"),
    [
        (None, None, "cuda", True),
        (None, None, "cpu", False),
        ("a reason", None, "cuda", False),
        (None, "a reason", "cuda", False),
    ],
)
def test_the_start_of_a_server_compiles_where_prefills_leave_states(
    split: str | None,
    unplanned: str | None,
    device: str,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The calls of `--radix-cache-backend hybrid`, with the rest of it left out."""
    answers = {
        "_codecs": (None, None),
        "why_split": split,
        "why_unplanned": unplanned,
        "learn_message_boundaries": None,
        "_rank": 0,
        "compile_hashes": None,
        "advise": [],
        "_server_setup": None,
        "create_unified_radix_cache": SimpleNamespace(
            slots=SimpleNamespace(),
            report=SimpleNamespace(advice=[]),
            page=None,
            is_mamba_enabled=False,
        ),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(factory, name, lambda *given, a=answer, **named: a)
    monkeypatch.setattr(in_use, "set_codecs", lambda *_: None)
    schedule = SimpleNamespace(disable_overlap_schedule=True)
    monkeypatch.setattr("sglang.srt.runtime_context.get_schedule", lambda: schedule)
    monkeypatch.setattr("sglang_hybrid.cache.sizes.cost_of_model", lambda config: None)
    found: list[Any] = []
    monkeypatch.setattr(
        compile_kernels, "compile_kernels", lambda runner, tell: found.append(runner)
    )
    runner = SimpleNamespace(device=device)
    factory.build_cache(
        SimpleNamespace(
            model_config=SimpleNamespace(hf_config=None),
            server_args=SimpleNamespace(),
            params=SimpleNamespace(pp_size=1),
            tp_worker=SimpleNamespace(model_runner=runner),
            is_hybrid_ssm=True,
            disable_radix_cache=False,
        )
    )
    assert found == [runner] * compiled
