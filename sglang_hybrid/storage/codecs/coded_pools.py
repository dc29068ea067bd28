"""SGLang's host pools with smaller copies (`--hybrid-tier-codec`): a slot is its encoded bytes.

Copies are encoded and decoded on the device, so that only encoded bytes move, layer by layer when
they are loaded. The device reads and writes them in the host's memory itself
(`kernels/host_rows.py`), in the stream of the copies: the host thread neither gathers nor waits.
What the disk keeps is the host's bytes. Built by patch 0057 in place of SGLang's pools, which copy
rows as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache import device_pool_info
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from torch import Tensor

from sglang_hybrid.kernels.host_rows import read_rows, write_rows
from sglang_hybrid.serving.device_streams import to_device
from sglang_hybrid.storage.codecs.coded_rows import CodedRows, chosen


class CodecRefused(ValueError):
    """A pool that cannot have smaller copies; the sentence says which, and what to do."""


def coded_kv_pool(sglangs: type) -> type:
    """The class of KV's host pool, instead of SGLang's where copies are to be smaller."""
    if chosen().exact:
        return sglangs
    if not hasattr(device_pool_info, "MHABufferInfo"):
        raise CodecRefused(f"--hybrid-tier-codec {chosen()} needs SGLang 0.5.23.")
    if sglangs is not MHATokenToKVPoolHost:
        raise CodecRefused(
            f"--hybrid-tier-codec {chosen()} knows no KV of {sglangs.__name__}; leave the flag out."
        )
    return CodedKVPool


def coded_state_pool(sglangs: type) -> type:
    """The class of states' host pool, instead of SGLang's where copies are to be smaller."""
    return sglangs if chosen().exact else CodedStatePool


class _Coded:
    """What both pools share: `rows` says where what is, and `kv_buffer` is uint8 [slots, bytes].
    _device: that of the device pool.
    """

    rows: CodedRows
    kv_buffer: Tensor
    size: int
    page_size: int
    _device: torch.device

    @property
    def storage_format_tag(self) -> str:
        return f"sglang_hybrid-{chosen()}"

    def get_size_per_token(self) -> int:
        return self.rows.bytes

    def get_ksize_per_token(self) -> int:
        return self.rows.bytes

    def _allocate(self, device: torch.device) -> Tensor:
        pool: Any = self
        buffer: Tensor = ALLOC_MEMORY_FUNCS[device.type](
            (self.size, self.rows.bytes),
            dtype=torch.uint8,
            device=pool.device,
            pin_memory=pool.pin_memory,
            allocator=pool.allocator,
            registration_granularity_bytes=self.page_size * self.rows.bytes,
        )
        self._device = device
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

    def _load(
        self, layer: int, targets: list[Tensor], host_indices: Tensor, device_indices: Tensor
    ) -> None:
        content = read_rows(self.kv_buffer, host_indices, self.rows.span(layer))
        _carry(content.numel())
        for target, values in zip(targets, self.rows.decode(layer, content), strict=True):
            target[device_indices] = values

    def _backup(
        self, layer: int, sources: list[Tensor], host_indices: Tensor, device_indices: Tensor
    ) -> None:
        content = self.rows.encode(layer, [source[device_indices] for source in sources])
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


class CodedKVPool(_Coded, MHATokenToKVPoolHost):  # type: ignore[misc]
    """Keys and values of a token: heads as rows."""

    def __init__(self, buffer_info: Any, *arguments: Any, **named: Any) -> None:
        if named.get("draft_buffer_infos"):
            raise CodecRefused(f"--hybrid-tier-codec {chosen()} knows no KV of draft models.")
        heads, dtype = buffer_info.head_num, buffer_info.dtype
        keys, values = (heads, buffer_info.head_dim), (heads, buffer_info.v_head_dim)
        layers = [[(keys, dtype), (values, dtype)] for _ in buffer_info.buffers.k]
        self.rows = CodedRows(layers, chosen().kv)
        super().__init__(buffer_info, *arguments, **named)

    def init_kv_buffer(self) -> Tensor:
        self.token_stride_size = self.head_num * self.head_dim * self.dtype.itemsize
        self.layout_dim = self.token_stride_size * self.layer_num
        return self._allocate(self._transfer_device)

    def _initialize_transfer_views(self, buffer_info: Any, write_back_staging: Any) -> None:
        """No views: SGLang's kernels, which would use them, are not called."""
        self.element_dim = self.head_num * self.head_dim
        self.can_use_jit = self.can_use_write_back_jit = False

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: Tensor,
        device_indices: Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        if 0 <= layer_id < self.layer_num:
            buffers = [self.device_k_buffers[layer_id], self.device_v_buffers[layer_id]]
            self._load(layer_id, buffers, host_indices, device_indices)

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: Tensor, device_indices: Tensor, io_backend: str
    ) -> None:
        for layer in range(self.layer_num):
            buffers = [self.device_k_buffers[layer], self.device_v_buffers[layer]]
            self._backup(layer, buffers, host_indices, device_indices)


class CodedStatePool(_Coded, MambaPoolHost):  # type: ignore[misc]
    """States: an SSM state [heads, head_dim, d_state] has rows of `d_state`, a convolution window
    [channels, width - 1] rows of `width - 1`.
    """

    def __init__(self, buffer_info: Any, *arguments: Any, **named: Any) -> None:
        if buffer_info.extra_checkpoint_buffers or named.get("mtp_draft_buffer_infos"):
            raise CodecRefused(
                f"--hybrid-tier-codec {chosen()} knows no side states or draft models."
            )
        self._tensors = [buffer_info.temporal, *buffer_info.conv]
        self._tensors = [tensor for tensor in self._tensors if tensor.numel()]
        shapes = [(tuple(tensor.shape[2:]), tensor.dtype) for tensor in self._tensors]
        self.rows = CodedRows([shapes] * buffer_info.temporal.shape[0], chosen().states)
        super().__init__(buffer_info, *arguments, **named)

    def init_kv_buffer(self) -> Tensor:
        return self._allocate(self._buffer_device)

    def _init_write_back_staging_buffers(self) -> None:
        self.can_use_write_back_jit = False

    def get_hybrid_pool_buffer(self) -> list[Tensor]:
        return [self.kv_buffer]

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
        layers = [tensor[layer_id] for tensor in self._tensors]
        self._load(layer_id, layers, host_indices, device_indices)

    def backup_from_device_all_layer(
        self,
        device_pool: Any,
        host_indices: Tensor,
        device_indices: Tensor,
        io_backend: str = "kernel",
    ) -> None:
        for layer in range(len(self.rows.layers)):
            layers = [tensor[layer] for tensor in self._tensors]
            self._backup(layer, layers, host_indices, device_indices)

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        return False


def _carry(size: int) -> None:
    """Let a simulated link of the CPU platform know of bytes that move."""
    from sglang.srt.mem_cache import l2_transfer

    carry = getattr(l2_transfer.device_module.current_stream(), "carry", None)
    if carry is not None:
        carry(size)
