"""The place of each tensor of a slot in the slot's encoded bytes, and the codec of each layer.

A slot is one token of KV (keys and values of all layers) or one state (all layers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_hybrid.storage.codecs.codecs import Codec


@dataclass(frozen=True)
class CodecPlan:
    """A codec for the KV of each attention layer, and for the state of each recurrent layer. The
    last one of a tuple is that of all further layers.
    """

    kv: tuple[Codec, ...] = (Codec.EXACT,)
    states: tuple[Codec, ...] = (Codec.EXACT,)

    @classmethod
    def uniform(cls, codec: Codec) -> CodecPlan:
        return cls((codec,), (codec,))

    @property
    def exact(self) -> bool:
        """True if every copy is what was on the device."""
        return {*self.kv, *self.states} == {Codec.EXACT}

    def __str__(self) -> str:
        """A short text for names: "int8", or "kv=int8,bf16;states=int8"."""
        if len({*self.kv, *self.states}) == 1:
            return self.kv[0].value
        kv, states = (",".join(codec.value for codec in each) for each in (self.kv, self.states))
        return f"kv={kv};states={states}"


@dataclass(frozen=True)
class Part:
    """One tensor of a slot: [*shape] numbers of `dtype`, `size` bytes from byte `start` on."""

    codec: Codec
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    size: int


class CodedRows:
    """Encodes the tensors of slots, and says where each layer's bytes are in a slot's.

    Args:
        layers: shape and type of each tensor of a slot in each layer, without the slot's dimension.
        codecs: of the layers; the last one is that of all further layers. A tensor whose rows a
            codec would not make smaller gets the next larger one.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[tuple[tuple[int, ...], torch.dtype]]],
        codecs: Sequence[Codec],
    ) -> None:
        self.layers: list[list[Part]] = []
        self.bytes = 0
        for number, tensors in enumerate(layers):
            parts = []
            for shape, dtype in tensors:
                codec = codecs[min(number, len(codecs) - 1)].fit(shape[-1], dtype)
                size = codec.row_bytes(shape[-1], dtype)
                for length in shape[:-1]:
                    size *= length
                parts.append(Part(codec, shape, dtype, self.bytes, size))
                self.bytes += size
            self.layers.append(parts)

    @classmethod
    def of(cls, layers: Sequence[Sequence[Tensor]], codecs: Sequence[Codec]) -> CodedRows:
        """The rows of slots that lie in these tensors [slots, ...] of each layer."""
        return cls([[(tuple(t.shape[1:]), t.dtype) for t in layer] for layer in layers], codecs)

    def encode(self, layer: int, tensors: Sequence[Tensor]) -> Tensor:
        """uint8 [slots, bytes of the layer] of the layer's tensors, each [slots, *shape]."""
        parts = self.layers[layer]
        return torch.cat(
            [
                part.codec.encode(tensor).reshape(len(tensor), part.size)
                for part, tensor in zip(parts, tensors, strict=True)
            ],
            dim=1,
        )

    def decode(self, layer: int, content: Tensor) -> list[Tensor]:
        """The layer's tensors, each [slots, *shape], of uint8 [slots, bytes of the layer]."""
        tensors, parts = [], self.layers[layer]
        for part in parts:
            start = part.start - parts[0].start
            coded = content[:, start : start + part.size]
            width = part.codec.row_bytes(part.shape[-1], part.dtype)
            rows = coded.reshape(len(content), *part.shape[:-1], width)
            tensors.append(part.codec.decode(rows, part.dtype).reshape(-1, *part.shape))
        return tensors

    def span(self, layer: int) -> slice:
        """The place of the layer's bytes in a slot's."""
        parts = self.layers[layer]
        return slice(parts[0].start, parts[-1].start + parts[-1].size)
