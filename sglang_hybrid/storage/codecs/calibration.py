"""Which codec each layer's copies get, if logprobs may move by so much (codec `auto:LOGPROB`).

Layer by layer: the smallest codec whose error, alone, is within the bound. Errors of several layers
add up to some extent, so the whole plan is measured once more, for the log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_hybrid.storage.codecs.codecs import Codec
from sglang_hybrid.storage.codecs.coded_rows import CodecPlan

KV, STATES = "kv", "states"

Measure = Callable[[CodecPlan], float]
"""Largest difference of a log probability when all copies have the codecs of a plan."""


@dataclass(frozen=True)
class Calibrated:
    """A plan, the largest error of one layer in it, and the error of all together."""

    plan: CodecPlan
    layer_error: float
    error: float


def calibrate(kv_layers: int, state_layers: int, measure: Measure, bound: float) -> Calibrated:
    """The smallest codec within the bound for the KV and the state of each layer."""
    codecs = {KV: [Codec.EXACT] * kv_layers, STATES: [Codec.EXACT] * state_layers}
    largest = 0.0
    for kind, chosen in codecs.items():
        for layer in range(len(chosen)):
            for codec in (Codec.INT8, Codec.BF16):
                error = measure(_alone(kind, layer, codec, kv_layers, state_layers))
                if error <= bound:
                    chosen[layer], largest = codec, max(largest, error)
                    break
    plan = CodecPlan(*(tuple(codecs[kind]) or (Codec.EXACT,) for kind in (KV, STATES)))
    return Calibrated(plan, largest, measure(plan))


def _alone(kind: str, layer: int, codec: Codec, kv_layers: int, state_layers: int) -> CodecPlan:
    """A plan in which one layer is not exact."""
    counts = {KV: kv_layers, STATES: state_layers}
    tuples = {
        name: tuple(
            codec if (name, number) == (kind, layer) else Codec.EXACT for number in range(count)
        )
        for name, count in counts.items()
    }
    return CodecPlan(tuples[KV] or (Codec.EXACT,), tuples[STATES] or (Codec.EXACT,))
