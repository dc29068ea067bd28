"""SGLang's host pools with smaller copies, on device pools without a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import device_pool_info
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost, get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from sglang_hybrid.extensions.cpu.binder import bind_on_import
from sglang_hybrid.hooks.pools import smaller_kv, smaller_latents
from sglang_hybrid.storage.codecs import in_use
from sglang_hybrid.storage.codecs.codecs import Codec
from sglang_hybrid.storage.codecs.coded_pools import CodecRefused, coded_state_pool
from sglang_hybrid.storage.codecs.coded_rows import CodecPlan, CodedRows

LAYERS, SLOTS, HEADS, DIM, PAGE = 3, 64, 2, 16, 4
VALUE_DIM, LATENT, SHARED_KEY = 8, 32, 16
DTYPE = torch.float32
BOUNDS = {Codec.EXACT: 0.0, Codec.BF16: 2**-8, Codec.INT8: 1 / 253}
"""Errors as shares of the largest number of a row."""

bind_on_import()


@pytest.fixture(autouse=True)
def exact_again() -> Iterator[None]:
    yield
    in_use.set_codecs(CodecPlan())


def per_head(value_dim: int = DIM, **changes: Any) -> Any:
    """Keys [SLOTS, HEADS, DIM] and values of `value_dim` numbers."""
    keys, values = (
        tuple(torch.randn(SLOTS, HEADS, width) for _ in range(LAYERS)) for width in (DIM, value_dim)
    )
    pointers = torch.zeros(LAYERS, dtype=torch.uint64)
    layout = changes.pop("layout", device_pool_info.KVBufferLayout.NHD)
    return device_pool_info.MHABufferInfo(
        buffers=device_pool_info.KVBuffers(
            k=keys, v=values, k_data_ptrs=pointers, v_data_ptrs=pointers, layout=layout
        ),
        page_size=PAGE,
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=value_dim,
        dtype=DTYPE,
        device=torch.device("cpu"),
        **changes,
    )


def latent(**changes: Any) -> Any:
    """Rows [SLOTS, 1, LATENT + SHARED_KEY], whose second part is a hundred times smaller."""
    rows = tuple(torch.randn(SLOTS, 1, LATENT + SHARED_KEY) for _ in range(LAYERS))
    for row in rows:
        row[..., LATENT:] /= 100
    values: dict[str, Any] = dict(
        buffers=rows,
        data_ptrs=torch.zeros(LAYERS, dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=SHARED_KEY,
        kv_cache_dim=LATENT + SHARED_KEY,
        dtype=DTYPE,
        device=torch.device("cpu"),
    )
    return device_pool_info.MLABufferInfo(**values | changes)


def kv_pool(info: Any = None, **named: Any) -> Any:
    """A host pool of KV, built as SGLang builds it for either kind of KV."""
    info = per_head() if info is None else info
    if isinstance(info, device_pool_info.MLABufferInfo):
        build: Any = smaller_latents(MLATokenToKVPoolHost)
        named |= dict(override_kv_cache_dim=LATENT + SHARED_KEY, target_layer_num=LAYERS)
        named = dict(layer_shard_enabled=False, draft_buffer_infos=()) | named
    else:
        build = smaller_kv(get_mha_host_pool_cls(info))
        named = dict(write_back_staging=None) | named
    return build(
        info,
        2.0,
        0,
        PAGE,
        "page_first",
        allocator_type="default",
        pool_label="kv",
        pin_memory=False,
        device_capacity_tokens=SLOTS,
        start_layer=0,
        end_layer=LAYERS,
        **named,
    )


def state_pool(**changes: Any) -> Any:
    tensors = dict(
        temporal=torch.randn(LAYERS, 8, 4, 8, 32),
        conv=(torch.randn(LAYERS, 8, 64, 3),),
    )
    return coded_state_pool(MambaPoolHost)(
        device_pool_info.MambaStateBufferInfo(**tensors | changes),
        3.0,
        0,
        device_capacity=8,
        layout="page_first",
        pin_memory=False,
    )


def close(one: torch.Tensor, two: torch.Tensor, codec: Codec) -> bool:
    most = two.abs().amax(-1, keepdim=True)
    return bool(((one - two).abs() <= BOUNDS[codec] * most).all())


@pytest.mark.parametrize("codec", list(Codec)[1:])
@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
@pytest.mark.parametrize(
    "describe", [per_head, lambda: per_head(VALUE_DIM), latent], ids=["MHA", "two widths", "MLA"]
)
def test_kv_comes_back_within_the_bound(describe: Any, codec: Codec, io_backend: str) -> None:
    """A latent and the part of the key beside it have a scale each."""
    in_use.set_codecs(CodecPlan.uniform(codec))
    pool = kv_pool(describe())
    device = [tensor for layer in pool.tensors for tensor in layer]
    before = [tensor.clone() for tensor in device]
    host, slots = pool.alloc(8), torch.tensor([9, 3, 4, 5, 20, 21, 22, 23])
    pool.backup_from_device_all_layer(None, host, slots, io_backend)
    to = slots + 32
    for layer in range(LAYERS):
        pool.load_to_device_per_layer(None, host, to, layer, io_backend)
    for tensor, old in zip(device, before, strict=True):
        assert close(tensor[to], old[slots], codec) and not torch.equal(tensor[to], old[slots])
        untouched = [slot for slot in range(SLOTS) if slot not in to.tolist()]
        assert torch.equal(tensor[untouched], old[untouched])


@pytest.mark.parametrize("codec", list(Codec)[1:])
def test_states_come_back_within_the_bound(codec: Codec) -> None:
    in_use.set_codecs(CodecPlan.uniform(codec))
    pool = state_pool()
    info = pool.buffer_info
    host, slots, to = pool.alloc(2), torch.tensor([1, 5]), torch.tensor([7, 2])
    before = [tensor.clone() for tensor in (info.temporal, *info.conv)]
    pool.backup_from_device_all_layer(None, host, slots)
    for layer in range(LAYERS):
        pool.load_to_device_per_layer(None, host, to, layer)
    assert close(info.temporal[:, to], before[0][:, slots], codec)
    assert close(info.conv[0][:, to], before[1][:, slots], Codec.BF16), "rows of 3 are bf16"
    assert torch.equal(info.temporal[:, [0, 1, 3, 4, 5, 6]], before[0][:, [0, 1, 3, 4, 5, 6]])


@pytest.mark.parametrize("make", [kv_pool, lambda: kv_pool(latent()), state_pool])
def test_pages_for_the_disk_are_the_hosts_bytes(make: Any) -> None:
    in_use.set_codecs(CodecPlan.uniform(Codec.INT8))
    pool = make()
    pool.kv_buffer.random_(0, 256)
    page = pool.get_data_page(pool.page_size, flat=True)
    assert page.shape == pool.get_dummy_flat_data_page().shape and page.dtype is torch.uint8
    target = 3 * pool.page_size
    pool.set_from_flat_data_page(target, page.clone())
    assert torch.equal(pool.get_data_page(target), pool.get_data_page(pool.page_size))
    assert pool.storage_format_tag == "sglang_hybrid-int8"
    with pytest.raises(NotImplementedError, match="hicache-storage-backend file only"):
        pool.get_page_buffer_meta(torch.arange(4))


def test_int8_more_than_halves_the_bytes() -> None:
    sizes = {}
    for codec in Codec:
        in_use.set_codecs(CodecPlan.uniform(codec))
        pools = (kv_pool(), kv_pool(latent()), state_pool())
        sizes[codec] = [pool.size_per_token for pool in pools]
    for kind in range(3):
        assert sizes[Codec.BF16][kind] == sizes[Codec.EXACT][kind] / 2
        assert sizes[Codec.INT8][kind] < sizes[Codec.BF16][kind]


def test_exact_pools_are_sglangs() -> None:
    assert smaller_kv(MHATokenToKVPoolHost) is MHATokenToKVPoolHost
    assert smaller_kv(MLATokenToKVPoolHost) is MLATokenToKVPoolHost
    assert coded_state_pool(MambaPoolHost) is MambaPoolHost


@pytest.mark.parametrize(
    "info",
    [
        lambda: per_head(layout=device_pool_info.KVBufferLayout.HND),
        lambda: per_head(
            scales=device_pool_info.KVScaleBuffers(
                k=(), v=(), layout=device_pool_info.KVScaleLayout.TOKEN
            )
        ),
        lambda: latent(packed_fp8=True),
        lambda: latent(scales=()),
    ],
)
def test_kv_that_is_no_row_of_numbers_is_refused(info: Any) -> None:
    in_use.set_codecs(CodecPlan.uniform(Codec.INT8))
    with pytest.raises(CodecRefused, match="packed, or not kept token by token; leave the flag"):
        kv_pool(info())


def test_pools_that_cannot_be_coded_are_refused() -> None:
    in_use.set_codecs(CodecPlan.uniform(Codec.INT8))
    with pytest.raises(CodecRefused, match="draft"):
        kv_pool(draft_buffer_infos=("any",))
    with pytest.raises(CodecRefused, match="several ranks divide"):
        kv_pool(latent(), dcp_size=2, dcp_rank=0)
    with pytest.raises(CodecRefused, match="side states"):
        state_pool(extra_checkpoint_buffers=(torch.zeros(8, 2),))


def test_each_layer_may_have_its_codec() -> None:
    tensors = [((4, 32), DTYPE), ((64, 3), DTYPE)]
    rows = CodedRows([tensors] * 4, (Codec.EXACT, Codec.BF16, Codec.INT8))
    sizes = [rows.span(layer).stop - rows.span(layer).start for layer in range(4)]
    exact, half, eighth = 4 * 32 * 4 + 64 * 3 * 4, 4 * 32 * 2 + 64 * 3 * 2, 4 * 34 + 64 * 3 * 2
    assert sizes == [exact, half, eighth, eighth] and rows.bytes == sum(sizes)
    values = [torch.randn(5, *shape) for shape, _ in tensors]
    for layer, codec in enumerate((Codec.EXACT, Codec.BF16, Codec.INT8, Codec.INT8)):
        content = rows.encode(layer, values)
        assert content.shape == (5, sizes[layer])
        back = rows.decode(layer, content)
        assert close(back[0], values[0], codec)


def test_a_plan_has_a_name() -> None:
    assert str(CodecPlan.uniform(Codec.INT8)) == "int8" and CodecPlan().exact
    plan = CodecPlan((Codec.INT8,), (Codec.EXACT, Codec.BF16))
    assert str(plan) == "kv=int8;states=exact,bf16" and not plan.exact
