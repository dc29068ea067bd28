"""Chooses the codec of each layer's copies, if logprobs may move by so much (codec `auto:LOGPROB`).

Layer by layer: the smallest codec whose error, alone, is within the bound. Errors of several layers
add up to some extent, so the whole plan is measured once more, for the log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sglang_hybrid.storage.codecs.codecs import Codec
from sglang_hybrid.storage.codecs.coded_rows import CodecPlan

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
    layers = {"kv": kv_layers, "states": state_layers}
    exact = CodecPlan(*((Codec.EXACT,) * max(1, count) for count in layers.values()))
    plan, largest = exact, 0.0
    for kind, count in layers.items():
        for layer in range(count):
            for codec in (Codec.INT8, Codec.BF16):
                error = measure(_with_codec(exact, kind, layer, codec))
                if error <= bound:
                    plan = _with_codec(plan, kind, layer, codec)
                    largest = max(largest, error)
                    break
    return Calibrated(plan, largest, measure(plan))


def _with_codec(plan: CodecPlan, kind: str, layer: int, codec: Codec) -> CodecPlan:
    """The plan with another codec for one layer's "kv" or "states"."""
    codecs = list(getattr(plan, kind))
    codecs[layer] = codec
    return replace(plan, **{kind: tuple(codecs)})
