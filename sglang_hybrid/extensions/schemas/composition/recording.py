"""Transitions of segments, from the forwards that compute these alone.

`SegmentTracks` stand in a batch where `StateTracks` do, and hand all calls of the layers on to
them (patch 0007). On the way they see the inputs of each recurrent layer's scan, of which the
layer's transition follows (`kernels/composition.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import softplus

from sglang_hybrid.checkpoints.scans import find_scan
from sglang_hybrid.checkpoints.tracks import PrefillTracks, StateTracks
from sglang_hybrid.kernels.composition import decay_transition, delta_rule_transitions


@dataclass(frozen=True)
class Kind:
    """A kind of recurrent layer. is_matrix: whether its transition is a matrix for each head, and
    not a number. window_axis: of a window in the pool, the axis of the convolution's past inputs.
    """

    is_matrix: bool
    window_axis: int = -1


_ATTENTION: Final = "sglang.srt.layers.attention"
KINDS: Final = {
    f"{_ATTENTION}.hybrid_linear_attn_backend:Mamba2AttnBackend": Kind(is_matrix=False),
    f"{_ATTENTION}.linear.gdn_backend:GDNAttnBackend": Kind(is_matrix=True),
    f"{_ATTENTION}.linear.kda_backend:KDAAttnBackend": Kind(is_matrix=True, window_axis=-2),
}
"""Kinds by SGLang's backend: those whose loss was measured (docs/results/modular.md)."""


def kind_of(backend: Any) -> Kind | None:
    """The kind of layer of an SGLang linear-attention backend; None if its layers do not tell their
    inputs, or if it is not known what composing their states would lose.
    """
    scan = find_scan(backend)
    return None if scan is None or scan.every > 1 else KINDS.get(scan.backend)


class Recording:
    """The transitions of the first `tokens` tokens of a segment, one of each recurrent layer, in
    the order of the layers; in host memory. A segment may take several forwards. If they do not
    follow one another from the first token on, it does not get whole. kind: None before a forward.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.kind: Kind | None = None
        self._layers: list[Tensor] = []
        self._passed = 0

    def begin(self, start: int, end: int) -> None:
        """The next forward computes tokens [start, end) of the segment."""
        if start == 0:  # again, if it was retracted
            self._layers, self.tokens, self._passed = [], 0, 0
        follows = start == self.tokens and self._passed == len(self._layers)
        self.tokens = end if follows else -1
        self._passed = 0

    def add(self, transition: Tensor) -> None:
        """The next layer's transition, float32, of the tokens of this forward."""
        at, self._passed = self._passed, self._passed + 1
        if at == len(self._layers):
            self._layers.append(_on_the_host(transition))
            return
        earlier = self._layers[at].to(transition.device, non_blocking=True)
        is_matrix = self.kind is not None and self.kind.is_matrix
        both = earlier @ transition if is_matrix else earlier * transition
        self._layers[at] = _on_the_host(both)

    def whole(self, tokens: int, layers: int) -> list[Tensor] | None:
        """The transitions of so many `layers` for a segment of so many `tokens`; None if some are
        not there.
        """
        is_whole = self.tokens == tokens and self._passed == len(self._layers) == layers
        return self._layers if is_whole else None


@dataclass(frozen=True)
class SegmentTracks:
    """The states that a batch shall leave, if any, and the recordings of its segments, each with
    its row in the batch.
    """

    tracks: StateTracks | None
    recordings: Sequence[tuple[int, Recording]]

    def for_layers(
        self, backend: Any, forward_batch: Any, cache_indices: Tensor, cu_seqlens: Tensor
    ) -> LayerTracks | PrefillTracks | None:
        """The same as `StateTracks.for_layers`; None if the layers leave nothing."""
        inner = None
        if self.tracks is not None:
            inner = self.tracks.for_layers(backend, forward_batch, cache_indices, cu_seqlens)
        kind = kind_of(backend)
        if kind is None:
            return inner
        starts = list(accumulate(forward_batch.extend_seq_lens_cpu, initial=0))
        spans = []
        for row, recording in self.recordings:
            recording.kind = kind
            spans.append((recording, slice(starts[row], starts[row + 1])))
        return LayerTracks(inner, spans)


class LayerTracks:
    """`PrefillTracks`, if there are any, and the recordings of segments, each with its tokens in
    the packed batch.
    """

    def __init__(
        self, inner: PrefillTracks | None, spans: Sequence[tuple[Recording, slice]]
    ) -> None:
        self._inner = inner
        self._spans = spans

    @property
    def arguments(self) -> dict[str, Any]:
        """The same as `PrefillTracks.arguments`."""
        return {} if self._inner is None else self._inner.arguments

    def save_windows(self, conv_states: Tensor, inputs: Tensor) -> None:
        """Calls `PrefillTracks.save_windows`."""
        if self._inner is not None:
            self._inner.save_windows(conv_states, inputs)

    def begin(
        self, ssm_states: Tensor, *, layer: Any = None, dt: Tensor | None = None, **_: Any
    ) -> None:
        """Calls `PrefillTracks.begin`. dt [T, H]: of Mamba2, input of the layer's time steps."""
        if dt is not None:
            for recording, tokens in self._spans:
                steps = softplus(dt[tokens].float() + layer.dt_bias.float())
                recording.add(decay_transition((steps * layer.A.float())[..., None, None]))
        if self._inner is not None:
            self._inner.begin(ssm_states)

    def finish(
        self,
        ssm_states: Tensor,
        left: Tensor | None,
        kernel: Any,
        *,
        layer: Any = None,
        k: Tensor | None = None,
        g: Tensor | None = None,
        beta: Tensor | None = None,
        **more: Any,
    ) -> None:
        """Calls `PrefillTracks.finish`. k [1, T, Hk, Dk], g and beta [1, T, ...]: of a delta rule.
        If a `layer` is given, which is KDA's, g and beta are the inputs of its gates.
        """
        if k is not None and g is not None and beta is not None:
            decays, strengths = (g, beta) if layer is None else _kda_gates(layer, g, beta)
            for recording, tokens in self._spans:
                keys, bounds = k[0, tokens], [0, tokens.stop - tokens.start]
                inputs = (keys, decays[0, tokens], strengths[0, tokens], bounds)
                recording.add(delta_rule_transitions(*inputs, l2norm=True)[0])
            more |= {"k": k, "g": g, "beta": beta}
        if self._inner is not None:
            self._inner.finish(ssm_states, left, kernel, **more)


def _kda_gates(layer: Any, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Log decays [1, T, H, Dk] and write strengths [1, T, H] of a layer of KDA."""
    heads, keys = g.shape[2:]
    g = g.float()
    if layer.dt_bias is not None:
        g = g + layer.dt_bias.float().view(heads, keys)
    rate = layer.A_log.float().exp().view(heads, 1)
    if layer.lower_bound is not None:
        return layer.lower_bound * torch.sigmoid(rate * g), beta.float().sigmoid()
    return -rate * softplus(g), beta.float().sigmoid()


def _on_the_host(values: Tensor) -> Tensor:
    """`values` in host memory, where the current stream finds them; the host does not wait."""
    if values.device.type == "cpu":
        return values
    host = torch.empty_like(values, device="cpu", pin_memory=True)
    return host.copy_(values, non_blocking=True)
