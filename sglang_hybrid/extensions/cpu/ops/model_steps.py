"""Models of SGLang whose decode steps the native kernels compute in one call for all layers.

Each model is described once, after its weights were loaded. A model with parts that a description
lacks (adapters, quantized weights, ranks, hooks, experts) is left to SGLang's own forward.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.extensions.cpu.native.library import library
from sglang_hybrid.extensions.cpu.native.model_step import (
    MOST_ROWS,
    Activation,
    LayerWiring,
    NativeModel,
    Unserved,
)
from sglang_hybrid.extensions.cpu.ops import linear
from sglang_hybrid.extensions.cpu.ops.tracking import track_mamba_states_if_needed

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_native_model"

LAST_NORMS = ("norm", "norm_f", "final_layernorm")
"""Names that SGLang's models have for the norm behind their last layer."""


class Description:
    """A model of SGLang as the native kernels know it: its layers are given to them one by one, in
    their order, after which `step` computes all of them. Raises `Unserved` for a layer that they do
    not know.
    """

    def __init__(self, kernels: ctypes.CDLL, model: Any, backend: Any) -> None:
        for module in model.modules():
            if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
                raise Unserved(f"a {type(module).__name__} with a hook")
        norm: Any = next(filter(None, (getattr(model, name, None) for name in LAST_NORMS)), None)
        self.native = NativeModel(kernels, norm, norm.weight.dtype)
        self.recurrent: list[tuple[int, Any]] = []  # layers, and their states
        self.attending: list[int] = []
        self._full = getattr(backend, "full_attn_backend", backend)
        self._linear = getattr(backend, "linear_attn_backend", backend)

    def mamba2(
        self, place: LayerWiring, mixer: Any, layer: int, scale: Tensor | None = None
    ) -> None:
        self.native.mamba2(place, mixer, self._states(layer), scale)

    def mamba1(self, place: LayerWiring, mixer: Any, layer: int) -> None:
        self.native.mamba1(place, mixer, self._states(layer))

    def _states(self, layer: int) -> Any:
        cache = self._linear.req_to_token_pool.mamba2_layer_cache(layer)
        self.recurrent.append((layer, cache))
        return cache

    def attention(
        self, place: LayerWiring, block: Any, rotary: Any = None, key_scale: float = 1.0
    ) -> None:
        """Add the attention of a ``block`` with `qkv_proj`, `attn` and `o_proj`."""
        from sglang_hybrid.extensions.cpu.attention import HybridCpuAttnBackend, rule_of

        if not isinstance(self._full, HybridCpuAttnBackend):
            raise Unserved("another attention backend")
        layer = block.attn
        pool = self._full.plain_pool(layer)
        if pool is None:
            raise Unserved("keys and values in a pool of another kind")
        heads = layer.tp_q_head_num, layer.tp_k_head_num
        self.native.attention(
            place, block.qkv_proj, block.o_proj, heads, *pool, rule_of(layer), rotary, key_scale
        )
        self.attending.append(layer.layer_id)

    def gated_mlp(
        self, place: LayerWiring, up: Any, activation: Any, down: Any, gate_scale: float = 1.0
    ) -> None:
        if type(activation).__name__ != "SiluAndMul":
            raise Unserved(f"an MLP with {type(activation).__name__}")
        self.native.mlp(place, up, down, Activation.GATED_SILU, gate_scale)

    def wait(self) -> None:
        """Wait until copies into the pools that the layers read have arrived."""
        layers = [layer for layer, _ in self.recurrent]
        for backend, wanted in ((self._linear, layers), (self._full, self.attending)):
            for name in ("req_to_token_pool", "token_to_kv_pool"):
                pool: Any = getattr(backend, name, None)
                counter = getattr(pool, "layer_transfer_counter", None)
                if counter is not None:
                    for layer in wanted:
                        counter.wait_until(layer - pool.start_layer)

    def step(self, x: Tensor, positions: Tensor, forward_batch: Any) -> Tensor:
        """One token of every sequence through all layers: [b, D] for embeddings x [b, D]."""
        self.wait()
        states = self._linear.forward_metadata if self.recurrent else None
        y = self.native.step(
            x,
            None if states is None else states.mamba_cache_indices,
            forward_batch.out_cache_loc,
            positions,
            self._full.newest() if self.attending else None,
        )
        mask = forward_batch.mamba_track_mask
        if states is not None and mask is not None and bool(mask.any()):
            rows = x.shape[0]
            for _, cache in self.recurrent:
                track_mamba_states_if_needed(
                    cache.conv[0],
                    cache.temporal,
                    states.mamba_cache_indices,
                    mask,
                    states.mamba_track_indices,
                    rows,
                )
        return y


Describe = Callable[[Description, Any], None]
"""Gives the layers of SGLang's module of a model to its description."""


def describe_nemotron_h(found: Description, model: Any) -> None:
    for index, layer in enumerate(model.layers):
        kind, place, block = type(layer).__name__, LayerWiring(layer.norm), layer.mixer
        if kind == "NemotronHMambaDecoderLayer":
            found.mamba2(place, block, index)
        elif kind == "NemotronHAttentionDecoderLayer":
            found.attention(place, block)
        elif kind == "NemotronHMLPDecoderLayer":
            found.native.mlp(place, block.up_proj, block.down_proj, Activation.SQUARED_RELU)
        else:
            raise Unserved(f"a {kind}")


def describe_mamba2(found: Description, model: Any) -> None:
    for index, layer in enumerate(model.layers):
        found.mamba2(LayerWiring(layer.norm), layer.mixer, index)


def describe_mamba1(found: Description, model: Any) -> None:
    for index, layer in enumerate(model.layers):
        found.mamba1(LayerWiring(layer.norm), layer.mixer, index)


def describe_llama(found: Description, model: Any) -> None:
    if type(model).__name__ != "LlamaModel":
        raise Unserved("another model with Llama's layers")
    for layer in model.layers:
        if type(layer).__name__ != "LlamaDecoderLayer":
            raise Unserved(f"a {type(layer).__name__}")
        attend, block = layer.self_attn, layer.mlp
        found.attention(LayerWiring(layer.input_layernorm), attend, attend.rotary_emb)
        place = LayerWiring(layer.post_attention_layernorm)
        found.gated_mlp(place, block.gate_up_proj, block.act_fn, block.down_proj)


def describe_granite_hybrid(found: Description, model: Any) -> None:
    for index, layer in enumerate(model.layers):
        place = LayerWiring(layer.input_layernorm, out_scale=layer.residual_multiplier)
        if hasattr(layer, "mamba"):
            found.mamba2(place, layer.mamba, index)
        else:
            found.attention(place, layer.self_attn, layer.self_attn.rotary_emb)
        block = layer.shared_mlp
        if layer.block_sparse_moe is not None or block is None:
            raise Unserved("experts")
        place = replace(place, norm=layer.post_attention_layernorm)
        found.gated_mlp(place, block.input_linear, block.act_fn, block.output_linear)


def describe_falcon_h1(found: Description, model: Any) -> None:
    for index, layer in enumerate(model.layers):
        norm, block = layer.input_layernorm, layer.feed_forward
        place = LayerWiring(norm, layer.attention_in_multiplier, layer.attn_out_multiplier)
        found.attention(place, layer, layer.rotary_emb, layer.key_multiplier)
        place = LayerWiring(norm, layer.ssm_in_multiplier, layer.ssm_out_multiplier, beside=True)
        found.mamba2(place, layer.mamba, index, layer.mup_vector)
        found.gated_mlp(
            LayerWiring(layer.pre_ff_layernorm, out_scale=block.down_multiplier),
            block.gate_up_proj,
            block.act_fn,
            block.down_proj,
            block.gate_multiplier,
        )


def forward_of(
    describe: Describe, *, scale: str | None = None, positions: bool = True
) -> Callable[..., Any]:
    """The substitute for the forward function of a model of SGLang. ``scale`` names the model's
    attribute that multiplies its embeddings. ``positions``: whether the function is given them, as
    it is not where all layers are recurrent.
    """

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def forward(self: Any, input_ids: Tensor, *given: Any, **named: Any) -> Any:
            batch, *more = given[1:] if positions else given
            plain = not any(one is not None for one in (*more, *named.values()))
            known = find_description(describe, self, batch) if plain else None
            if known is None:
                return original(self, input_ids, *given, **named)
            x = self.embed_tokens(input_ids)
            x = x if scale is None else x * getattr(self, scale)
            return known.step(x, given[0] if positions else batch.positions, batch)

        return forward

    return wrapper


nemotron_h_forward = forward_of(describe_nemotron_h)
mamba2_forward = forward_of(describe_mamba2, positions=False)
mamba1_forward = forward_of(describe_mamba1, positions=False)
llama_forward = forward_of(describe_llama)
granite_hybrid_forward = forward_of(describe_granite_hybrid, scale="embedding_multiplier")
falcon_h1_forward = forward_of(describe_falcon_h1, scale="embedding_multiplier")


@dataclass(frozen=True)
class _Known:
    """The description that was found of a model, and what it was made for."""

    backend: Any
    changes: int
    description: Description | None


def find_description(describe: Describe, model: Any, forward_batch: Any) -> Description | None:
    """The description of a model for this batch; None where SGLang's own forward must serve it."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    kernels = library()
    if kernels is None or not _is_plain_decode(model, forward_batch):
        return None
    backend = get_attn_backend()
    known: _Known | None = model.__dict__.get(_ATTRIBUTE)
    if known is None or not _is_current(known, backend):
        found = _describe(describe, kernels, model, backend)
        known = _Known(backend, linear.changes(), found)
        model.__dict__[_ATTRIBUTE] = known
    return known.description


def _is_plain_decode(model: Any, forward_batch: Any) -> bool:
    """One new token of each of a few sequences, on a model that one rank has whole."""
    group = getattr(model, "pp_group", None)
    return (
        forward_batch.forward_mode.is_decode()
        and 0 < forward_batch.batch_size <= MOST_ROWS
        and forward_batch.spec_info is None
        and forward_batch.encoder_lens is None
        and forward_batch.input_ids.shape[0] == forward_batch.batch_size
        and forward_batch.positions.dim() == 1
        and not getattr(model, "layers_to_capture", None)
        and (group is None or group.world_size == 1)
    )


def _is_current(known: _Known, backend: Any) -> bool:
    return (
        known.backend is backend
        and known.changes == linear.changes()
        and (known.description is None or known.description.native.is_current())
    )


def _describe(
    describe: Describe, kernels: ctypes.CDLL, model: Any, backend: Any
) -> Description | None:
    try:
        with torch.no_grad():
            found = Description(kernels, model, backend)
            describe(found, model)
            return found
    except (Unserved, AttributeError) as error:  # or a layer that lacks what its kind has
        logger.info("sglang_hybrid: decode steps are computed layer by layer: %s.", error)
        return None
