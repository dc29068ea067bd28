"""The segments of one cache whose model has recurrent layers: the transitions that they have, and
states that are composed of them.

A segment computed alone leaves the state at its end, which is a checkpoint like others, and its
transition, which is kept here, in host memory, as float32. Behind segments 1 to n the state is

    S = S_n + (... S_2 + (S_1) T_2 ...) T_n

and the window of the convolution has the last inputs of the last segment, and of those in front of
it where that one is shorter.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from torch import Tensor

from sglang_hybrid.core.records.latest import Latest
from sglang_hybrid.extensions.schemas.composition.recording import Kind, Recording, SegmentTracks
from sglang_hybrid.kernels.composition import Segment
from sglang_hybrid.serving.per_request import PerRequest
from sglang_hybrid.serving.requests.cache_fields import fields_of
from sglang_hybrid.serving.stored_keys import payer

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_hybrid.cache.radix_cache import HybridRadixCache

SHARE: Final = 4
"""Transitions take up to a quarter of the bytes that the pool's states take. In a full share the
payer whose transitions take most loses the one that it used longest ago."""


@dataclass(frozen=True)
class Transition:
    """The transitions of all recurrent layers, in their order, in host memory."""

    kind: Kind
    layers: list[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


class SegmentStates:
    """The transitions of segments whose state is in the tree of `cache`, each charged to the payer
    of the request that computed it.
    """

    def __init__(self, cache: HybridRadixCache) -> None:
        self._cache = cache
        self._pool = cache.req_to_token_pool
        self._recordings: PerRequest[Recording] = PerRequest()
        limit = int(cache.cost.state_bytes * self._pool.mamba_pool.size) // SHARE
        self._kept: Latest[Transition] = Latest(limit)  # by payer, and node at a segment's end
        self._largest = 0  # bytes of a transition
        self._untold = False

    @property
    def limit(self) -> int:
        """Bytes of all transitions together."""
        return self._kept.most_bytes

    @property
    def why_not(self) -> str:
        """The reason why this cache composes no states, a sentence; empty if it does."""
        why = self._why_not()
        if not why:
            return ""
        return f"This server composes no modules: {why}, so the prompt was computed as a whole."

    def _why_not(self) -> str:
        planner = self._cache.plans.planner
        if not self._cache.is_mamba_enabled or planner is None or not planner.one_pass:
            return "prefills leave no states at any position"
        if self._cache.is_swa_enabled:
            return "attention to windows keeps no KV of whole segments"
        if self._cache.parts.coded is not None:
            return "states are kept coded on the device"
        if self._pool.mamba_pool._slot_siblings:
            return "a state has parts that are no sum"
        if self._untold:
            return "the kernels in use do not tell what their layers read"
        return ""

    def record(self, batch: ScheduleBatch) -> None:
        """The prefill of `batch` is about to start, and its states have their slots."""
        recordings = []
        for row, req in enumerate(batch.reqs):
            asked = fields_of(req).imported
            if asked is None or asked.segments:
                continue
            recording = self._recordings.get(req)
            if recording is None:
                recording = self._recordings[req] = Recording()
            recording.begin(req.prefix_len, req.extend_end)
            recordings.append((row, recording))
        if recordings:
            batch.state_tracks = SegmentTracks(batch.state_tracks, recordings)

    def keep(self, req: Req, node_id: int, tokens: int) -> None:
        """The segment that `req` computed has `tokens` tokens, and its state is at this node."""
        recording = self._recordings.pop(req)
        if recording is None or recording.tokens != tokens or not self._has_state(node_id):
            return
        layers = recording.whole(tokens, len(self._pool.mamba_pool.mamba_layer_ids))
        if layers is None or recording.kind is None:
            self._untold = True
            return
        for whose, name, _ in list(self._kept.all()):
            if not self._has_state(int(name)):
                self._kept.drop(whose, name)
        transition = Transition(recording.kind, layers)
        self._largest = max(self._largest, transition.nbytes)
        self._put(payer(req.extra_key), node_id, transition)

    def could_hold(self, segments: int) -> bool:
        """True if so many segments can have their transitions at once, as far as is known."""
        return segments * self._largest <= self.limit

    def has(self, req: Req, node_id: int) -> bool:
        """True if the segment of `req` that ends at this node has its state and its transition."""
        return self._get(payer(req.extra_key), node_id) is not None and self._has_state(node_id)

    def slots(self, nodes: Sequence[int]) -> list[Tensor]:
        """The slots [1] of the states of segments that end at these nodes (`has`)."""
        return [slot for slot in map(self._state, nodes) if slot is not None]

    def transitions(self, req: Req, nodes: Sequence[int]) -> list[Transition]:
        """The transitions of segments of `req` that end at these nodes (`has`), noted as used."""
        whose = payer(req.extra_key)
        found = [(node, self._get(whose, node)) for node in nodes]
        used = [(node, transition) for node, transition in found if transition is not None]
        for node, transition in used:
            self._put(whose, node, transition)
        return [transition for _, transition in used]

    def compose(
        self,
        transitions: Sequence[Transition],
        tokens: Sequence[int],
        slots: Sequence[Tensor],
        slot: Tensor,
    ) -> None:
        """Write the state behind segments of so many `tokens`, which have these `transitions` and
        their states in `slots`, into `slot` [1]; nothing waits for the device.
        """
        states = self._pool.mamba_pool.mamba_cache
        *sources, target = [self._row(each) for each in (*slots, slot)]
        pool = states.temporal
        kind = transitions[0].kind
        for layer in range(len(pool)):
            composed = pool[layer, sources[0]].float()
            for source, transition in zip(sources[1:], transitions[1:], strict=True):
                moved = transition.layers[layer].to(pool.device, non_blocking=True)
                added = pool[layer, source].float()
                composed = Segment(added, moved, kind.is_matrix).after(composed)
            pool[layer, target] = composed.to(pool.dtype)
        for windows in states.conv:
            found = [windows[:, source] for source in sources]
            windows[:, target] = joined_windows(found, tokens, kind.window_axis)

    def forget_all(self) -> None:
        """Forget all transitions, after the tree was emptied."""
        self._kept = Latest(self.limit)

    def as_dict(self) -> dict[str, int]:
        """The values for /server_info."""
        return {"kept": len(self._kept), "bytes": self._kept.nbytes, "limit": self.limit}

    def _state(self, node_id: int) -> Tensor | None:
        node = self._cache.tree_core.node_by_id(node_id)
        value: Tensor | None = node.component_data[ComponentType.MAMBA].value
        return value

    def _has_state(self, node_id: int) -> bool:
        arena: Any = self._cache.tree_core._node_arena
        return node_id in arena and self._state(node_id) is not None

    def _row(self, slot: Tensor) -> Tensor:
        row: Tensor = self._pool.translate_mamba_indices(slot)
        return row.long()

    def _get(self, whose: Hashable, node_id: int) -> Transition | None:
        return self._kept.get(whose, str(node_id))

    def _put(self, whose: Hashable, node_id: int, transition: Transition) -> None:
        self._kept.put(whose, str(node_id), transition, transition.nbytes)


def joined_windows(windows: Sequence[Tensor], tokens: Sequence[int], axis: int) -> Tensor:
    """The last inputs of a convolution behind segments of so many `tokens`, each of whose `windows`
    begins with zeros where the segment is shorter.
    """
    past = windows[0].shape[axis]
    known = [
        window.narrow(axis, past - count, count)
        for window, count in zip(windows, (min(each, past) for each in tokens), strict=True)
    ]
    joined = torch.cat([torch.zeros_like(windows[0]), *known], axis)
    return joined.narrow(axis, joined.shape[axis] - past, past)
