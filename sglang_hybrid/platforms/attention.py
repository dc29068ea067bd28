"""The CPU platform's attention backend: SGLang's `--attention-backend hybrid_cpu`.

It serves what SGLang's `torch_native` serves, and sliding-window pools, capped scores and attention
sinks as well. Only new tokens have queries, so a prefix that is cached costs its keys and values
once, not an attention of its own. Native kernels compute it where they can (`native/attention.py`),
plain torch elsewhere (`kernels/attention.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

from sglang_hybrid.kernels.attention import Rule, decode, extend
from sglang_hybrid.kernels.kv_slots import BatchReads, SlotArray, Slots, batch_reads, prefix_slots
from sglang_hybrid.platforms.native import attention as native
from sglang_hybrid.platforms.native.library import library
from sglang_hybrid.serving.config import CPU_ATTENTION

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

Pool = tuple[Tensor, Tensor]
"""One layer's keys [slots, Hkv, D] and values [slots, Hkv, Dv]."""

SPAN_BYTES = 1 << 17
"""Keys and values of one layer in consecutive slots that are read through a view of the pool. Below
this, gathering them with others costs less than another call of the attention kernel."""


def register() -> None:
    """Make the backend known to SGLang's registry, and to the choices of its flags."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if CPU_ATTENTION not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([CPU_ATTENTION])
    register_attention_backend(CPU_ATTENTION)(HybridCpuAttnBackend)


class HybridCpuAttnBackend(AttentionBackend):
    """Softmax attention over SGLang's KV pools on a CPU."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
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
        self._batch = _Batch(forward_batch, table, to_window_pool)

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
        self._store(layer, forward_batch, k, v, save_kv_cache)
        pool = self._pool(layer)
        rule = rule_of(layer, sinks)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if self._native is not None and native.serves(q, *pool, 1):
            return self._in_one_call(self._native, q, pool, layer, rule)
        reads = self._batch.reads(
            encoder=layer.is_cross_attention,
            window=rule.window,
            window_pool=layer.layer_id in self._window_pool_layers,
            shortest=_shortest_span(pool),
            whole=rule.cap > 0,
        )
        if reads is None:
            return q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        return decode(q, pool, reads, rule)[..., : layer.v_head_dim].flatten(1)

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
        self._store(layer, forward_batch, k, v, save_kv_cache)
        pool = self._pool(layer)
        rule = rule_of(layer, sinks)
        window_pool = layer.layer_id in self._window_pool_layers
        in_order = rule.cap > 0 or rule.window is not None
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        most = max((new.stop - new.start for new in self._batch.new), default=0)
        if self._native is not None and native.serves(q, *pool, most):
            return self._in_one_call(self._native, q, pool, layer, rule)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        fresh: Pool | None = None
        if save_kv_cache and k is not None and v is not None and pool[0] is not pool[1]:
            fresh = (k, v) if k.dtype == pool[0].dtype else None
        for i, new in enumerate(self._batch.new):
            before = self._batch.slots(i, encoder=layer.is_cross_attention, window_pool=window_pool)
            own: Pool | None = None
            if not layer.is_cross_attention:
                at = len(before) - (new.stop - new.start)
                before, written = before[:at], Slots.of(before[at:])
                own = (written.rows(pool[0]), written.rows(pool[1]))
                if fresh is not None:
                    own = (fresh[0][new], fresh[1][new])
            if rule.window is not None:
                before = before[max(0, len(before) - rule.window) :]
            prefix = prefix_slots(before, _shortest_span(pool), in_order=in_order)
            out[new] = extend(q[new], own, pool, prefix, rule)[..., : layer.v_head_dim]
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
        """Where the KV of each sequence lies, in a batch that only decodes."""
        return self._batch.sequences(encoder=False, window_pool=False)

    def _in_one_call(
        self, kernels: ctypes.CDLL, q: Tensor, pool: Pool, layer: RadixAttention, rule: Rule
    ) -> Tensor:
        """Native kernel: [n, Hq * Dv] for queries [n, Hq, D], whose keys have been stored."""
        sequences = self._batch.sequences(
            encoder=layer.is_cross_attention,
            window_pool=layer.layer_id in self._window_pool_layers,
        )
        width = layer.v_head_dim
        return native.attention(kernels, q, *pool, sequences, rule, width).flatten(1)

    def _pool(self, layer: RadixAttention) -> Pool:
        """Latent attention keeps a token's value in the front of its key: there keys stand for
        values, too, and what they yield is cut to the values' width.
        """
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        return keys, keys if values.data_ptr() == keys.data_ptr() else values

    def _store(
        self,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        k: Tensor | None,
        v: Tensor | None,
        save_kv_cache: bool,
    ) -> None:
        if save_kv_cache and k is not None and v is not None:
            where = KVWriteLoc.for_layer(
                forward_batch, layer, swa_loc=self._batch.window_pool_slots
            )
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)


class _Batch:
    """Where the tokens of one forward pass lie; layers of the same kind share what is found."""

    def __init__(
        self,
        forward_batch: ForwardBatch,
        table: Tensor,
        to_window_pool: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self._table = table
        self._to_window_pool = to_window_pool
        self._rows: list[int] = forward_batch.req_pool_indices.tolist()
        self._lengths: list[int] = forward_batch.seq_lens.tolist()
        encoder = forward_batch.encoder_lens
        self._encoder = [0] * len(self._rows) if encoder is None else encoder.tolist()
        self._reads: dict[tuple[object, ...], BatchReads | None] = {}
        self._sequences: dict[tuple[bool, bool], native.Sequences] = {}
        self.new: list[slice] = []
        self.window_pool_slots: Tensor | None = None
        if to_window_pool is not None and forward_batch.out_cache_loc is not None:
            self.window_pool_slots = to_window_pool(forward_batch.out_cache_loc)
        if forward_batch.extend_seq_lens is not None:
            ends = np.cumsum(forward_batch.extend_seq_lens.tolist()).tolist()
            self.new = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]

    def slots(self, i: int, *, encoder: bool, window_pool: bool) -> SlotArray:
        """Slots of sequence i's tokens, or of what its encoder left, in their order."""
        slots: SlotArray = self._slots(i, encoder=encoder, window_pool=window_pool).numpy()
        return slots

    def sequences(self, *, encoder: bool, window_pool: bool) -> native.Sequences:
        """`slots` of all sequences, as the native kernel wants them."""
        key = (encoder, window_pool)
        in_place = self._table.dtype == torch.int32 and not (window_pool or any(self._encoder))
        if key not in self._sequences and in_place and not (encoder or self.new):
            self._sequences[key] = native.Sequences.of_rows(self._table, self._rows, self._lengths)
        if key not in self._sequences:
            rows = range(len(self._rows))
            slots = [self._slots(i, encoder=encoder, window_pool=window_pool) for i in rows]
            counts = [new.stop - new.start for new in self.new] or [1] * len(slots)
            self._sequences[key] = native.Sequences.of(slots, counts)
        return self._sequences[key]

    def _slots(self, i: int, *, encoder: bool, window_pool: bool) -> Tensor:
        begin = 0 if encoder else self._encoder[i]
        end = self._encoder[i] if encoder else begin + self._lengths[i]
        found = self._table[self._rows[i], begin:end]
        if window_pool and self._to_window_pool is not None:
            found = self._to_window_pool(found)
        return found

    def reads(
        self, *, encoder: bool, window: int | None, window_pool: bool, shortest: int, whole: bool
    ) -> BatchReads | None:
        """What the newest token of every sequence reads; None where there is nothing at all."""
        key = (encoder, window, window_pool, shortest, whole)
        if key not in self._reads:
            every = [
                self.slots(i, encoder=encoder, window_pool=window_pool)
                for i in range(len(self._rows))
            ]
            if window is not None:
                every = [slots[max(0, len(slots) - 1 - window) :] for slots in every]
            some = any(len(slots) for slots in every)
            self._reads[key] = batch_reads(every, shortest, whole=whole) if some else None
        return self._reads[key]


def rule_of(layer: RadixAttention, sinks: Tensor | None = None) -> Rule:
    """What SGLang's layer says about its scores."""
    causal = not layer.is_cross_attention and layer.attn_type != AttentionType.ENCODER_ONLY
    windowed = causal and layer.sliding_window_size is not None and layer.sliding_window_size > -1
    return Rule(
        scale=layer.scaling,
        causal=causal,
        window=layer.sliding_window_size if windowed else None,
        cap=layer.logit_cap or 0.0,
        sinks=sinks,
    )


def _shortest_span(pool: Pool) -> int:
    """Slots that hold `SPAN_BYTES`."""
    bytes_of_a_slot = sum(t[0].numel() * t.element_size() for t in pool)
    return max(1, SPAN_BYTES // bytes_of_a_slot)
