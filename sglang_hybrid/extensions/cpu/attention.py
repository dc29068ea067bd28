"""The CPU platform's attention backend: SGLang's `--attention-backend hybrid_cpu`.

It serves what SGLang's `torch_native` serves, and sliding-window pools, capped scores and attention
sinks as well. Only new tokens have queries, so a prefix that is cached costs its keys and values
once, not an attention of its own. Native kernels compute it where they can (`native/attention.py`),
plain torch sequence by sequence elsewhere (`kernels/attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

from sglang_hybrid.extensions.cpu.native import attention as native
from sglang_hybrid.extensions.cpu.native.library import library
from sglang_hybrid.kernels.attention import Rule, attention

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

Pool = tuple[Tensor, Tensor]
"""One layer's keys [slots, Hkv, D] and values [slots, Hkv, Dv]."""


class HybridCpuAttnBackend(AttentionBackend):
    """Softmax attention over SGLang's KV pools on a CPU.

    ahead: tokens that a draft model has made of each sequence, and SGLang has not counted. With the
    unified pool the table of requests has names of slots, and `_to_rows` says where they lie.
    """

    def __init__(self, model_runner: Any, ahead: int = 0) -> None:
        super().__init__()
        self._ahead = ahead
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self._to_rows: Callable[[Tensor], Tensor] | None = None
        translator = getattr(model_runner, "kv_index_translator", None)
        if translator is not None and translator.is_translating:
            self._to_rows = model_runner.token_to_kv_pool_allocator.translate_kv_loc
        self._window_pool_layers: frozenset[int] = frozenset()
        if isinstance(self.token_to_kv_pool, SWAKVPool):
            layers = self.token_to_kv_pool.layers_mapping.items()
            self._window_pool_layers = frozenset(layer for layer, (_, swa) in layers if swa)
        self._native = library()
        self._batch: _Batch

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        to_window_pool = None
        if self._window_pool_layers:
            to_window_pool = self.token_to_kv_pool.translate_loc_from_full_to_swa
        table = self.req_to_token_pool.req_to_token
        self._batch = _Batch(forward_batch, table, self._to_rows, to_window_pool, self._ahead)

    def support_triton(self) -> bool:
        return False

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """The newest token of every sequence: [b, Hq * Dv] for queries [b, Hq * D]."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, sinks=sinks)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """The new tokens of every sequence, packed: [n, Hq * Dv] for queries [n, Hq * D]."""
        if save_kv_cache and k is not None and v is not None:
            slots = self._batch.window_pool_slots
            where = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=slots)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        pool, rule, width = self._pool(layer), rule_of(layer, sinks), layer.v_head_dim
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        sequences = self._batch.sequences(
            encoder=layer.is_cross_attention,
            window_pool=layer.layer_id in self._window_pool_layers,
        )
        paths = self._batch.paths
        if (
            self._native is not None
            and paths is None
            and native.can_compute(q, *pool, sequences.most)
        ):
            return native.attention(self._native, q, *pool, sequences, rule, width).flatten(1)
        out, counts = q.new_empty(*q.shape[:2], width), sequences.counts.tolist()
        read = zip(
            *(torch.split(t, counts) for t in (out, q)),
            sequences.slots(),
            [None] * len(counts) if paths is None else paths,
            strict=True,
        )
        for place, new, slots, path in read:
            keys, values = (t.index_select(0, slots) for t in pool)
            place.copy_(attention(new, keys, values, rule, path)[..., :width])
        return out.flatten(1)

    def plain_pool(self, layer: RadixAttention) -> Pool | None:
        """A layer's pool, if all that is done to its rows is to write and read them."""
        pool = getattr(self.token_to_kv_pool, "full_kv_pool", self.token_to_kv_pool)
        plain = type(pool).set_kv_buffer is MHATokenToKVPool.set_kv_buffer
        windows = layer.layer_id in self._window_pool_layers
        if windows or layer.is_cross_attention or not plain or pool.is_quantized_kv_cache:
            return None
        return self._pool(layer)

    def newest(self) -> native.Sequences:
        """The slots of each sequence's KV, in a batch that only decodes."""
        return self._batch.sequences(encoder=False, window_pool=False)

    def _pool(self, layer: RadixAttention) -> Pool:
        """Keys and values of a layer. Latent attention keeps a token's value in the front of its
        key: keys stand for values there, and the output is cut to the values' width.
        """
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        return keys, keys if values.data_ptr() == keys.data_ptr() else values


class DraftSteps:
    """Attention of a draft model that makes tokens one behind the other: a backend per step but the
    last, whose token is not read.
    """

    kv_index_translator: Any = None  # SGLang sets it

    def __init__(self, model_runner: Any, steps: int) -> None:
        self.attn_backends = [
            HybridCpuAttnBackend(model_runner, ahead=step + 1) for step in range(steps - 1)
        ]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


class _Batch:
    """The slots of one forward pass's tokens; layers of the same kind share what is found."""

    def __init__(
        self,
        forward_batch: ForwardBatch,
        table: Tensor,
        to_rows: Callable[[Tensor], Tensor] | None,
        to_window_pool: Callable[[Tensor], Tensor] | None,
        ahead: int,
    ) -> None:
        self._table = table
        self._to_rows = to_rows
        self._to_window_pool = to_window_pool
        self._rows: list[int] = forward_batch.req_pool_indices.tolist()
        self._lengths: list[int] = (forward_batch.seq_lens + ahead).tolist()
        encoder = forward_batch.encoder_lens
        self._encoder = [0] * len(self._rows) if encoder is None else encoder.tolist()
        self._sequences: dict[tuple[bool, bool], native.Sequences] = {}
        lengths = forward_batch.extend_seq_lens
        self._new: list[int] | None = None if lengths is None else lengths.tolist()
        self.paths: list[Tensor] | None = None  # of drafts that are trees
        if forward_batch.forward_mode.is_target_verify():
            self._verify(forward_batch.spec_info)
        self.window_pool_slots: Tensor | None = None
        if to_window_pool is not None and forward_batch.out_cache_loc is not None:
            self.window_pool_slots = to_window_pool(forward_batch.out_cache_loc)

    def _verify(self, drafts: Any) -> None:
        """The new tokens are drafts: as many for each sequence, behind those that are counted."""
        count = drafts.draft_token_num
        rows = [length + count for length in self._lengths]
        self._new, self._lengths = [count] * len(rows), rows
        mask = drafts.custom_mask
        if mask is not None and drafts.tree_topk != 1:
            whole = torch.split(mask[: count * sum(rows)], [count * length for length in rows])
            self.paths = [
                one.view(count, length)[:, -count:].bool()
                for one, length in zip(whole, rows, strict=True)
            ]

    def sequences(self, *, encoder: bool, window_pool: bool) -> native.Sequences:
        """Slots of all sequences' tokens, or of what their encoders left, in their order."""
        key = (encoder, window_pool)
        if key not in self._sequences:
            in_place = self._table.dtype == torch.int32 and self._to_rows is None
            in_place = in_place and not (window_pool or any(self._encoder))
            if in_place and not encoder and self._new is None:
                found = native.Sequences.of_rows(self._table, self._rows, self._lengths)
            else:
                slots = self._slots(encoder=encoder, window_pool=window_pool)
                found = native.Sequences.of(slots, self._new or [1] * len(slots))
            self._sequences[key] = found
        return self._sequences[key]

    def _slots(self, *, encoder: bool, window_pool: bool) -> Sequence[Tensor]:
        """The slots of each sequence. If ids stand for slots, they are looked up all at once."""
        found = []
        for row, before, length in zip(self._rows, self._encoder, self._lengths, strict=True):
            begin, end = (0, before) if encoder else (before, before + length)
            found.append(self._table[row, begin:end])
        place = self._to_window_pool if window_pool else self._to_rows
        if place is None or not found:
            return found
        rows = place(torch.cat(found)).to(torch.int32)
        return torch.split(rows, [len(one) for one in found])


def rule_of(layer: RadixAttention, sinks: Tensor | None = None) -> Rule:
    """The options of SGLang's layer about its scores."""
    causal = not layer.is_cross_attention and layer.attn_type != AttentionType.ENCODER_ONLY
    windowed = causal and layer.sliding_window_size is not None and layer.sliding_window_size > -1
    return Rule(
        scale=layer.scaling,
        causal=causal,
        window=layer.sliding_window_size if windowed else None,
        cap=layer.logit_cap or 0.0,
        sinks=sinks,
    )
