"""Copies between device and host pools: every layout brings back what was backed up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang_hybrid.core.tiers.rates import Link
from sglang_hybrid.extensions.cpu.ops import host_copies, transfer_streams

LAYERS, SLOTS, HEADS, DIM = 3, 12, 2, 4
ON_DEVICE = torch.tensor([4, 5, 6, 7, 0, 1, 2, 3])
ON_HOST = torch.tensor([8, 9, 10, 11, 4, 5, 6, 7])


def device(seed: int) -> list[torch.Tensor]:
    """One random tensor [SLOTS, HEADS, DIM] per layer."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SLOTS, HEADS, DIM, generator=generator) for _ in range(LAYERS)]


def addresses(layers: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)


def came_back(layers: list[torch.Tensor], loaded: list[torch.Tensor]) -> None:
    """Rows of ON_DEVICE, and no others, are those that were backed up."""
    for layer, copy in zip(layers, loaded, strict=True):
        assert torch.equal(copy[ON_DEVICE], layer[ON_DEVICE])
        others = [slot for slot in range(SLOTS) if slot not in ON_DEVICE.tolist()]
        assert not copy[others].any()


ITEM = HEADS * DIM * 4
INDICES = {"src_indices": ON_DEVICE, "dst_indices": ON_HOST}
BACK = {"src_indices": ON_HOST, "dst_indices": ON_DEVICE}


def test_page_first() -> None:
    k, v = device(1), device(2)
    host_k, host_v = (torch.zeros(SLOTS, LAYERS, HEADS, DIM) for _ in "kv")
    host_copies.all_layer_lf_pf(
        src_k_layers=addresses(k),
        dst_k=host_k,
        src_v_layers=addresses(v),
        dst_v=host_v,
        item_size=ITEM,
        dst_layout_dim=ITEM * LAYERS,
        num_layers=LAYERS,
        **INDICES,
    )
    new_k, new_v = ([torch.zeros_like(layer) for layer in k] for _ in "kv")
    for layer in range(LAYERS):
        host_copies.per_layer_pf_lf(
            src_k=host_k,
            dst_k=new_k[layer],
            src_v=host_v,
            dst_v=new_v[layer],
            layer_id=layer,
            item_size=ITEM,
            src_layout_dim=ITEM * LAYERS,
            **BACK,
        )
    came_back(k, new_k)
    came_back(v, new_v)


@pytest.mark.parametrize("page", [1, 4])
def test_page_first_direct(page: int) -> None:
    k, v = device(1), device(2)
    host = [torch.zeros(SLOTS // page, LAYERS, page, HEADS, DIM) for _ in "kv"]
    host_copies.all_layer_direct_lf_pf(src_ptrs=k + v, dst_ptrs=host, page_size=page, **INDICES)
    new_k, new_v = ([torch.zeros_like(layer) for layer in k] for _ in "kv")
    for layer in range(LAYERS):
        host_copies.per_layer_direct_pf_lf(
            src_ptrs=host,
            dst_ptrs=[new_k[layer], new_v[layer]],
            layer_id=layer,
            page_size=page,
            **BACK,
        )
    came_back(k, new_k)
    came_back(v, new_v)


def test_layer_first() -> None:
    k, v = device(1), device(2)
    host_k, host_v, new_k, new_v = ([torch.zeros_like(layer) for layer in k] for _ in range(4))
    host_copies.all_layer(
        src_k_layers=addresses(k),
        dst_k_layers=addresses(host_k),
        src_v_layers=addresses(v),
        dst_v_layers=addresses(host_v),
        item_size=ITEM,
        num_layers=LAYERS,
        **INDICES,
    )
    for layer in range(LAYERS):
        host_copies.per_layer(
            src_k=host_k[layer],
            dst_k=new_k[layer],
            src_v=host_v[layer],
            dst_v=new_v[layer],
            item_size=ITEM,
            **BACK,
        )
    came_back(k, new_k)
    host_copies.direct(src_layers=host_v, dst_layers=new_v, page_size=1, **BACK)
    came_back(v, new_v)


@pytest.mark.parametrize("shape", [(HEADS, DIM), (1, HEADS * DIM)], ids=["states", "latents"])
def test_one_tensor_page_first(shape: tuple[int, int]) -> None:
    """States have an axis more on the host than on the device, latents (MLA) have not."""
    layers = [layer.view(SLOTS, *shape) for layer in device(3)]
    table = {"states": "src_ptrs", "latents": "src_layers"}
    kind = "latents" if shape[0] == 1 else "states"
    host = torch.zeros(SLOTS, LAYERS, *((1,) if kind == "states" else ()), *shape)
    backup: Any = host_copies.mamba_lf_pf if kind == "states" else host_copies.rows_lf_pf
    backup(
        **{table[kind]: addresses(layers)},
        dst=host,
        item_size=ITEM,
        dst_layout_dim=ITEM * LAYERS,
        num_layers=LAYERS,
        **INDICES,
    )
    loaded = [torch.zeros_like(layer) for layer in layers]
    for layer in range(LAYERS):
        host_copies.rows_pf_lf(
            src=host,
            dst=loaded[layer],
            layer_id=layer,
            item_size=ITEM,
            src_layout_dim=ITEM * LAYERS,
            **BACK,
        )
    came_back(layers, loaded)


def test_one_tensor_layer_first() -> None:
    layers = device(3)
    host, loaded = ([torch.zeros_like(layer) for layer in layers] for _ in range(2))
    host_copies.rows_all_layer(
        src_layers=addresses(layers),
        dst_layers=addresses(host),
        item_size=ITEM,
        num_layers=LAYERS,
        **INDICES,
    )
    for layer in range(LAYERS):
        host_copies.rows_per_layer(src=host[layer], dst=loaded[layer], item_size=ITEM, **BACK)
    came_back(layers, loaded)


@pytest.fixture
def slow_link() -> Iterator[None]:
    """An hour for a byte."""
    transfer_streams.simulate(Link(1 / 3600))
    yield
    transfer_streams.simulate(None)


def test_a_copy_is_there_when_it_returns() -> None:
    stream, event = transfer_streams.Stream(), transfer_streams.Event()
    with transfer_streams.stream(stream):
        stream.carry(10**12)
        event.record()
    assert event.query()


@pytest.mark.usefixtures("slow_link")
def test_a_simulated_link_carries_one_byte_after_the_other() -> None:
    down, up = transfer_streams.Stream(), transfer_streams.Stream()
    before, first, second, other = (transfer_streams.Event(enable_timing=True) for _ in range(4))
    with transfer_streams.stream(down):
        before.record()
        down.carry(1)
        first.record()
        down.carry(2)
        second.record()
    with transfer_streams.stream(up):
        up.carry(1)
        other.record()
    assert not first.query() and not second.query()
    assert first.elapsed_time(second) == pytest.approx(2 * 3600e3)
    assert first.elapsed_time(other) == pytest.approx(0, abs=60e3)
    assert before.query()
    up.wait_event(before)


@pytest.mark.parametrize("layout", ["layer first", "page first"])
def test_rows_that_lie_apart(layout: str) -> None:
    """All layers' keys and values of a token follow one another in SGLang's unified pool."""
    held = torch.randn(SLOTS, LAYERS, 2, HEADS, DIM)
    k, v = ([held[:, layer, part] for layer in range(LAYERS)] for part in (0, 1))
    shape = (LAYERS, SLOTS) if layout == "layer first" else (SLOTS, LAYERS)
    hosts = [torch.zeros(*shape, HEADS, DIM) for _ in "kv"]
    rows = [host if layout == "layer first" else host.transpose(0, 1) for host in hosts]
    host_copies.strided_all_layers(
        k_ptr_dst=addresses(list(rows[0])),
        v_ptr_dst=addresses(list(rows[1])),
        k_ptr_src=addresses(k),
        v_ptr_src=addresses(v),
        indices_dst=ON_HOST,
        indices_src=ON_DEVICE,
        kv_cache_dst_stride_bytes=ITEM if layout == "layer first" else ITEM * LAYERS,
        kv_cache_src_stride_bytes=2 * LAYERS * ITEM,
        element_size=ITEM,
        page_size=1,
    )
    loaded = torch.zeros_like(held)
    new_k, new_v = ([loaded[:, layer, part] for layer in range(LAYERS)] for part in (0, 1))
    for layer in range(LAYERS):
        host_copies.strided_one_layer(
            k_cache_dst=new_k[layer],
            v_cache_dst=new_v[layer],
            k_cache_src=rows[0][layer],
            v_cache_src=rows[1][layer],
            indices_dst=ON_DEVICE,
            indices_src=ON_HOST,
            page_size=1,
            element_dim=HEADS * DIM,
        )
    came_back(k, new_k)
    came_back(v, new_v)
