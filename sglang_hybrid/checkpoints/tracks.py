"""Recurrent states that a prefill leaves in slots of the state pool, at any of its positions.

`StateTracks` travels with SGLang's batch and says which states are wanted. `PrefillTracks` is made
from it once per forward; every recurrent layer of the patched SGLang calls it
(patches/sglang-0.5.23/0007). A state is the last K-1 inputs of the layer's convolution (its window)
and the layer's matrix:

* Mamba2: the chunked scan ends a copy of the sequence at each position (SGLang's `track_states`).
* Gated delta net: the scan returns the state in front of every 64th token; the tokens between it
  and the position are run once more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

CHUNK = 64
"""Tokens between the states that the gated delta net's prefill returns (fla's CHUNK_SIZE)."""


@dataclass(frozen=True)
class StateTracks:
    """The states that one batch shall leave: the i-th is that of sequence ``rows[i]`` (its index in
    the batch) after ``positions[i]`` tokens from its very start, and goes to ``slots[i]``.

    There is at least one. A position lies behind the sequence's prefix and not behind its last
    token; a sequence may have several, in any order. ``slots`` [n] int64 is on the pool's device
    and holds the ids that SGLang allocates (virtual ones with unified memory), each once and none
    of a running request.
    """

    rows: list[int]
    positions: list[int]
    slots: Tensor


class PrefillTracks:
    """`StateTracks` as the layers of one forward read them; n states, all tensors on ``device``.

    ``sequence`` [n] is the index in the batch and ``ends`` [n] the packed tokens that are read up
    to the position; ``slots`` [n] is where the state goes and ``owners`` [n] the slot that the
    sequence starts from and ends in, both physical.
    """

    def __init__(
        self,
        tracks: StateTracks,
        prefix_lens: list[int],
        extend_lens: list[int],
        slots: Tensor,
        cache_indices: Tensor,
        width: int,
    ) -> None:
        """Lengths are the batch's, per sequence; ``width`` is K-1, the inputs in a window.

        Nothing waits for the device. Raises ValueError for a position outside its prefill.
        """
        check(tracks, prefix_lens, extend_lens)
        self.device = slots.device
        rows = torch.tensor(tracks.rows)
        lengths = torch.tensor(extend_lens)
        prefix = torch.tensor(prefix_lens)[rows]
        self._starts = (lengths.cumsum(0) - lengths)[rows]
        self._read = torch.tensor(tracks.positions) - prefix
        self._complete = self._read == lengths[rows]
        chunks = (lengths + CHUNK - 1) // CHUNK
        self._first_chunk = (chunks.cumsum(0) - chunks)[rows]

        offsets = self._read[:, None] + torch.arange(-width, 0)
        self._stitched = bool((offsets < 0).any())
        self.sequence, self.ends, resumed, self._inputs, earlier = self._put(
            rows,
            self._starts + self._read,
            prefix > 0,
            self._starts[:, None] + offsets.clamp(min=0),
            offsets + width,
        )
        self.slots = slots.long()
        self.owners = cache_indices[self.sequence].long()
        if self._stitched:
            self._resumed = resumed.bool()[:, None, None]
            self._is_earlier = (earlier < width)[:, None]
            self._earlier = earlier.clamp(max=width - 1)[:, None]

    def save_windows(self, inputs: Tensor, conv_states: Tensor) -> None:
        """Write the window at every position; to be called before the convolution runs.

        inputs [T, D] is what the convolution reads, packed, and conv_states [slots, D, K-1] the
        pool: what a window lacks in front of this prefill is in the sequence's own slot, if it has
        a prefix, and zero otherwise.
        """
        windows = inputs[self._inputs].transpose(1, 2).to(conv_states.dtype)
        if self._stitched:
            before = torch.where(self._resumed, conv_states[self.owners], 0)
            before = before.gather(2, self._earlier.expand_as(before))
            windows = torch.where(self._is_earlier, before, windows)
        conv_states[self.slots] = windows

    def save_states(self, states: Tensor, ssm_states: Tensor) -> None:
        """Write Mamba2's tracked states [1, n, H, P, N] to the pool [slots, H, P, N]."""
        ssm_states[self.slots] = states[0].to(ssm_states.dtype)

    def replay(
        self,
        extend: Callable[..., Any],
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_states: Tensor | None,
        ssm_states: Tensor,
    ) -> None:
        """Write the gated delta net's states to the pool [slots, Hv, Dv, Dk]; after its prefill.

        ``extend`` is the prefill kernel as SGLang's dispatcher calls it and chunk_states
        [1, chunks, Hv, Dv, Dk] what it returned. Shapes: key [1, T, Hk, Dk], value [1, T, Hv, Dv],
        g and beta [1, T, Hv]. Raises RuntimeError if the kernel returned no chunk states.
        """
        if chunk_states is None:
            raise RuntimeError(
                "This gated delta net kernel returns no states inside a prefill; start the server "
                "with --linear-attn-prefill-backend triton."
            )
        plan = self._replay
        ssm_states[self.slots[plan.complete]] = ssm_states[self.owners[plan.complete]]
        if plan.partial.numel() == 0:
            return
        states = chunk_states[0, plan.chunks].float()
        k = key[:, plan.tokens]
        extend(
            q=k,  # only the states are wanted; the keys have the queries' shape
            k=k,
            v=value[:, plan.tokens],
            g=g[:, plan.tokens],
            beta=beta[:, plan.tokens],
            ssm_states=states,
            cache_indices=plan.indices,
            query_start_loc=plan.bounds,
        )
        ssm_states[self.slots[plan.partial]] = states.to(ssm_states.dtype)

    @cached_property
    def _replay(self) -> "_Replay":
        partial = (~self._complete).nonzero()[:, 0]
        chunk, count = (self._read - 1) // CHUNK, (self._read - 1) % CHUNK + 1
        begins, counts = (self._starts + chunk * CHUNK)[partial], count[partial]
        bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        spread = (begins - bounds[:-1]).repeat_interleave(counts)
        complete, partial, chunks, tokens, bounds, indices = self._put(
            self._complete.nonzero()[:, 0],
            partial,
            (self._first_chunk + chunk)[partial],
            spread + torch.arange(len(spread)),
            bounds,
            torch.arange(len(partial)),
        )
        return _Replay(complete, partial, chunks, tokens, bounds.int(), indices.int())

    def _put(self, *values: Tensor) -> list[Tensor]:
        """The values as int64 on the device, all in one copy."""
        packed = torch.cat([value.flatten() for value in values])
        if self.device.type == "cuda":
            packed = packed.pin_memory()
        moved = packed.to(self.device, non_blocking=True)
        parts = torch.split(moved, [value.numel() for value in values])
        return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]


@dataclass(frozen=True)
class _Replay:
    """Which states the prefill left in the sequence's own slot, and which tokens run once more.

    ``complete`` and ``partial`` share out the n tracks. For each partial one: ``chunks`` is the row
    of the state in front of its last chunk, ``tokens[bounds[i] : bounds[i + 1]]`` are the 1 to 64
    tokens from there, ``indices`` counts them.
    """

    complete: Tensor
    partial: Tensor
    chunks: Tensor
    tokens: Tensor
    bounds: Tensor
    indices: Tensor


def check(tracks: StateTracks, prefix_lens: list[int], extend_lens: list[int]) -> None:
    """Raises ValueError if a position is outside its prefill or the lengths do not fit."""
    if not 0 < len(tracks.rows) == len(tracks.positions) == len(tracks.slots):
        raise ValueError(
            f"{len(tracks.rows)} rows, {len(tracks.positions)} positions and {len(tracks.slots)} "
            "slots do not make state tracks; there must be one of each per state, and a state."
        )
    for row, position in zip(tracks.rows, tracks.positions, strict=True):
        if not 0 <= row < len(extend_lens):
            raise ValueError(f"Row {row} is tracked in a batch of {len(extend_lens)} sequences.")
        first, last = prefix_lens[row] + 1, prefix_lens[row] + extend_lens[row]
        if not first <= position <= last:
            raise ValueError(
                f"Position {position} of row {row} is tracked in a prefill that reaches positions "
                f"{first} to {last}."
            )


def prefill_tracks(backend: Any, forward_batch: Any, cache_indices: Tensor) -> PrefillTracks:
    """The tracks of an SGLang ``ForwardBatch`` that has ``state_tracks``, for its layers.

    cache_indices [S] are the physical slots of the batch's sequences. Raises RuntimeError if the
    linear-attention ``backend`` is one that would not write them.
    """
    if not writes_tracks(backend):
        raise RuntimeError(
            f"{type(backend).__name__} cannot write states inside a prefill; ask "
            "supports_state_tracks() first and split the prefill instead."
        )
    tracks: StateTracks = forward_batch.state_tracks
    return PrefillTracks(
        tracks,
        forward_batch.extend_prefix_lens_cpu,
        forward_batch.extend_seq_lens_cpu,
        backend._translate_mamba_indices(tracks.slots),
        cache_indices,
        backend.conv_states_shape[-1],
    )


def writes_tracks(backend: Any) -> bool:
    """Whether this SGLang linear-attention backend writes tracks (its layers permitting).

    Mamba2 does; the gated delta net does on the kernel that returns its chunk states. Their
    subclasses for other devices have prefills of their own.
    """
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

    if type(backend) is GDNAttnBackend:
        kernel = backend.kernel_dispatcher.extend_kernel
        return type(kernel) is TritonGDNKernel and not backend.enable_mis
    return type(backend) is Mamba2AttnBackend


def supports_state_tracks(model_runner: Any) -> bool:
    """Whether a prefill of this SGLang ``ModelRunner`` writes the states that a batch asks for.

    Where it does not, a prefill must be split at the positions instead: other recurrent layers
    (KDA, lightning attention, short convolution, Mamba1), other kernels, two-batch overlap, and
    layers inside a CUDA graph. To be asked when the graphs are captured.
    """
    from sglang.srt.layers.attention.mamba.mamba1 import MambaMixer1

    backend = model_runner.attn_backend
    return (
        writes_tracks(getattr(backend, "linear_attn_backend", backend))
        and not any(isinstance(module, MambaMixer1) for module in model_runner.model.modules())
        and not _in_a_graph(model_runner)
    )


def _in_a_graph(model_runner: Any) -> bool:
    """Whether recurrent layers are part of a prefill's CUDA graph, where they repeat its capture.

    SGLang's breakable graphs, its default, leave out the layers that say so: all gated delta nets,
    and Mamba2 mixers in a layer with ``_forward_mamba`` (Nemotron-H).
    """
    from sglang.srt.layers.attention.mamba.mamba import MambaMixer2
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    graphs = model_runner.prefill_cuda_graph_runner
    if not isinstance(graphs, PrefillCudaGraphRunner):
        return False
    if graphs.prefill_backend_name == Backend.FULL or graphs.enable_cp_bcg_capture:
        return True
    return any(
        isinstance(child, MambaMixer2) and not hasattr(layer, "_forward_mamba")
        for layer in model_runner.model.modules()
        for child in layer.children()
    )
