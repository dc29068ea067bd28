"""Answers of a model behind segments computed apart, by transformers, without transitions.

The input of a recurrent layer for a segment that is computed alone does not depend on the layer's
own state, but on the layers before it. So with a state in this layer only, and zeros in all others,
the state that a segment leaves there is what it makes of that state.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.extensions.schemas.declared.modular import ModularPrompt, Segment
from tests.reference import load_model


def composed_logprobs(model: Path, prompt: ModularPrompt, output: list[int]) -> list[float]:
    """Log probabilities of the output's tokens, which must be the likeliest ones."""
    reference = load_model(model)
    with torch.no_grad():
        cache = _composed(reference, prompt.segments)
        ids = [*prompt.new, *output]
        logits = _read(reference, ids, prompt.position, cache)
    of = logits.float().log_softmax(-1)[len(prompt.new) - 1 : -1]
    assert of.argmax(-1).tolist() == output
    return [float(row[token]) for row, token in zip(of, output, strict=True)]


def _composed(model: Any, segments: tuple[Segment, ...]) -> Any:
    """The cache behind segments."""
    first, *others = segments
    cache = _alone(model, first, None, None)
    for segment in others:
        alone = _alone(model, segment, None, None)
        for number, layer in _recurrent(cache):
            apart = _alone(model, segment, number, layer.recurrent_states[0])
            layer.recurrent_states[0] = apart.layers[number].recurrent_states[0]
            window, size = alone.layers[number].conv_states[0], layer.conv_states[0].shape[-1]
            new = window[..., size - min(size, len(segment.ids)) :]
            layer.conv_states[0] = torch.cat([layer.conv_states[0], new], -1)[..., -size:]
        for layer, other in zip(cache.layers, alone.layers, strict=True):
            if _has_keys(layer):
                layer.keys = torch.cat([layer.keys, other.keys], -2)
                layer.values = torch.cat([layer.values, other.values], -2)
    return cache


def _alone(model: Any, segment: Segment, number: int | None, state: Tensor | None) -> Any:
    """The cache behind one segment, where the layer of this number begins with `state`, and all
    others with zeros.
    """
    cache = model(torch.zeros(1, 1, dtype=torch.int64), use_cache=True).past_key_values
    for at, layer in _recurrent(cache):
        layer.conv_states[0].zero_()
        zeros = torch.zeros_like(layer.recurrent_states[0])
        layer.recurrent_states[0] = state.clone() if at == number and state is not None else zeros
    for layer in cache.layers:
        if _has_keys(layer):
            layer.keys, layer.values = layer.keys[..., :0, :], layer.values[..., :0, :]
    _read(model, list(segment.ids), segment.start, cache)
    return cache


def _read(model: Any, ids: list[int], position: int, cache: Any) -> Tensor:
    """Logits [tokens, words] of tokens behind a cache, which is changed in place."""
    places = torch.arange(position, position + len(ids))[None]
    options = {"past_key_values": cache, "position_ids": places, "use_cache": True}
    logits: Tensor = model(torch.tensor([ids]), **options).logits[0]
    return logits


def _recurrent(cache: Any) -> Iterator[tuple[int, Any]]:
    for number, layer in enumerate(cache.layers):
        if getattr(layer, "recurrent_states", {}).get(0) is not None:
            yield number, layer


def _has_keys(layer: Any) -> bool:
    return getattr(layer, "keys", None) is not None
