"""SGLang's host pools with smaller copies (`--hybrid-tier-codec`): a slot is its encoded bytes.

Copies are encoded and decoded on the device, so that only encoded bytes move, layer by layer when
they are loaded. The device reads and writes them in the host's memory itself
(`kernels/host_rows.py`), in the stream of the copies: the host thread neither gathers nor waits.
The disk keeps the host's bytes. Built by hooks/pools.py in place of SGLang's pools, which copy rows
as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache import device_pool_info
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from torch import Tensor

from sglang_hybrid.kernels.host_rows import read_rows, write_rows
from sglang_hybrid.serving.device_streams import to_device
from sglang_hybrid.storage.codecs.codecs import Codec
from sglang_hybrid.storage.codecs.coded_rows import CodecPlan, CodedRows
from sglang_hybrid.storage.codecs.in_use import host_codecs


class CodecRefused(ValueError):
    """A pool that cannot have smaller copies; the sentence says which, and what to do."""


def kv_tensors(buffer_info: Any, asked: str = "") -> list[list[Tensor]]:
    """The tensors of a token's KV in each attention layer: [slots, ..., width], whose last axis is
    a row. They are keys and values of all heads; for latent attention (MLA) the latent, and the
    part of the key beside it, which are views of one tensor.

    buffer_info: SGLang's `MHABufferInfo` or `MLABufferInfo` of the device's pool. asked: the flag
    that they are coded for, by default that of tiers. Raises `CodecRefused` for KV that is packed,
    has scales beside it, or is in another order than slots.
    """
    buffers = buffer_info.buffers
    if isinstance(buffers, device_pool_info.KVBuffers):
        plain = buffers.layout is device_pool_info.KVBufferLayout.NHD
        layers = [list(pair) for pair in zip(buffers.k, buffers.v, strict=True)]
    else:
        plain = isinstance(buffers, tuple) and not buffer_info.packed_fp8
        widths = [buffer_info.kv_lora_rank, buffer_info.qk_rope_head_dim]
        layers = [list(rows.split(widths, -1)) for rows in buffers] if plain else []
    if not plain or buffer_info.scales is not None:
        raise CodecRefused(
            f"{asked or f'--hybrid-tier-codec {_plan()}'} knows no KV of this model and "
            "--kv-cache-dtype: it is packed, or not kept token by token; leave the flag out."
        )
    return [[tensor for tensor in tensors if tensor.numel()] for tensors in layers]


def _plan() -> CodecPlan:
    return host_codecs() or CodecPlan()


def coded_kv_pool(sglangs: type) -> type:
    """The class of KV's host pool, instead of SGLang's where copies are to be smaller."""
    return sglangs if host_codecs() is None else CodedKVPool


def coded_state_pool(sglangs: type) -> type:
    """The class of states' host pool, instead of SGLang's where copies are to be smaller."""
    return sglangs if host_codecs() is None else CodedStatePool


class _Coded:
    """The common part of both pools: `kv_buffer` is uint8 [slots, bytes], and `rows` says where
    what is.

    tensors: of the device's pool, [slots, ...] in each layer. _device: where they are.
    """

    tensors: list[list[Tensor]]
    rows: CodedRows
    kv_buffer: Tensor
    size: int
    page_size: int
    _device: torch.device

    def _describe(
        self, tensors: list[list[Tensor]], codecs: Sequence[Codec], device: torch.device
    ) -> None:
        """Called before SGLang's class asks for the size of a slot."""
        self.tensors, self._device = tensors, device
        self.rows = CodedRows.of(tensors, codecs)

    @property
    def storage_format_tag(self) -> str:
        return f"sglang_hybrid-{_plan()}"

    def get_size_per_token(self) -> int:
        return self.rows.bytes

    def get_ksize_per_token(self) -> int:
        return self.rows.bytes

    def get_hybrid_pool_buffer(self) -> list[Tensor]:
        return [self.kv_buffer]

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        return False

    def init_kv_buffer(self) -> Tensor:
        pool: Any = self
        buffer: Tensor = ALLOC_MEMORY_FUNCS[self._device.type](
            (self.size, self.rows.bytes),
            dtype=torch.uint8,
            device=pool.device,
            pin_memory=pool.pin_memory,
            allocator=pool.allocator,
            registration_granularity_bytes=self.page_size * self.rows.bytes,
        )
        self._compile(buffer)
        return buffer

    def _compile(self, buffer: Tensor) -> None:
        """Copy one row to and fro, so that no kernel is compiled while requests are served."""
        first = torch.zeros(1, dtype=torch.int64, device=self._device)
        for layer in range(len(self.rows.layers)):
            span = self.rows.span(layer)
            write_rows(buffer, first, span, read_rows(buffer, first, span))

    def prepare_transfer_indices(
        self, host_indices: Tensor, device_indices: Tensor, io_backend: str
    ) -> tuple[Tensor, Tensor]:
        """Both on the device, once for all layers of a transfer: SGLang's backend `direct` has them
        on the host.
        """
        return to_device(host_indices, self._device), to_device(device_indices, self._device)

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: Tensor,
        device_indices: Tensor,
        layer_id: int,
        io_backend: str = "kernel",
        *,
        is_draft: bool = False,
    ) -> None:
        if not 0 <= layer_id < len(self.tensors):
            return
        content = read_rows(self.kv_buffer, host_indices, self.rows.span(layer_id))
        _carry(content.numel())
        decoded = self.rows.decode(layer_id, content)
        for target, values in zip(self.tensors[layer_id], decoded, strict=True):
            target[device_indices] = values

    def backup_from_device_all_layer(
        self,
        device_pool: Any,
        host_indices: Tensor,
        device_indices: Tensor,
        io_backend: str = "kernel",
    ) -> None:
        for layer, tensors in enumerate(self.tensors):
            content = self.rows.encode(layer, [source[device_indices] for source in tensors])
            _carry(content.numel())
            write_rows(self.kv_buffer, host_indices, self.rows.span(layer), content)

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:
        page = self.kv_buffer[index : index + self.page_size]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> Tensor:
        return torch.zeros(self.page_size * self.rows.bytes, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: Tensor) -> None:
        page = data_page.view(self.page_size, self.rows.bytes)
        self.kv_buffer[index : index + self.page_size] = page

    def get_page_buffer_meta(self, indices: Tensor) -> Any:
        raise NotImplementedError(
            "Smaller copies (--hybrid-tier-codec) are kept on disk by "
            "--hicache-storage-backend file only."
        )


class CodedKVPool(_Coded, HostKVCache):  # type: ignore[misc]
    """KV of a token, by `kv_tensors`: heads as rows, or latents."""

    def __init__(
        self,
        buffer_info: Any,
        host_to_device_ratio: float,
        host_size: float,
        page_size: int,
        layout: str,
        *,
        pin_memory: bool = True,
        draft_buffer_infos: Sequence[Any] = (),
        layer_shard_enabled: bool = False,
        dcp_size: int = 1,
        **more: Any,
    ) -> None:
        """SGLang's arguments of its classes for either kind of KV; host_size is in GB, and 0 lets
        the ratio decide. Raises `CodecRefused` for KV that cannot have smaller copies.
        """
        if draft_buffer_infos:
            raise CodecRefused(f"--hybrid-tier-codec {_plan()} knows no KV of draft models.")
        if layer_shard_enabled or dcp_size > 1:
            raise CodecRefused(
                f"--hybrid-tier-codec {_plan()} knows no KV whose layers or tokens several ranks "
                "divide (--dcp-size); leave one of the two out."
            )
        self._describe(kv_tensors(buffer_info), _plan().kv, buffer_info.device)
        self.layer_num = self.target_layer_num = len(self.tensors)
        wanted = inspect.signature(HostKVCache.__init__).parameters
        super().__init__(
            dtype=buffer_info.dtype,
            size_per_token=self.rows.bytes,
            host_to_device_ratio=host_to_device_ratio,
            host_size=host_size,
            page_size=page_size,
            layout=layout,
            pin_memory=pin_memory,
            device="cpu",
            **{name: value for name, value in more.items() if name in wanted},
        )


class CodedStatePool(_Coded, MambaPoolHost):  # type: ignore[misc]
    """States: an SSM state [heads, head_dim, d_state] has rows of `d_state`, a convolution window
    [channels, width - 1] rows of `width - 1`.
    """

    def __init__(self, buffer_info: Any, *arguments: Any, **named: Any) -> None:
        if buffer_info.extra_checkpoint_buffers or named.get("mtp_draft_buffer_infos"):
            raise CodecRefused(
                f"--hybrid-tier-codec {_plan()} knows no side states or draft models."
            )
        kept = [t for t in (buffer_info.temporal, *buffer_info.conv) if t.numel()]
        layers = [[t[layer] for t in kept] for layer in range(len(buffer_info.temporal))]
        self._describe(layers, _plan().states, buffer_info.temporal.device)
        super().__init__(buffer_info, *arguments, **named)

    def _init_write_back_staging_buffers(self) -> None:
        self.can_use_write_back_jit = False


def _carry(size: int) -> None:
    """Let a simulated link of the CPU platform know of bytes that move."""
    from sglang.srt.mem_cache import l2_transfer

    carry = getattr(l2_transfer.device_module.current_stream(), "carry", None)
    if carry is not None:
        carry(size)
