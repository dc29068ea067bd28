"""Hooks on recurrent states: how many slots a request has, and which states a forward leaves."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_hybrid.checkpoints.tracks import PrefillTracks

HELD_AND_KEPT = 2
"""State slots: the one that a running request holds, and one that the cache keeps for it."""


def count_slots(mamba_ratio: Callable[[Any], int], configurator: Any) -> int | Fraction:
    """State slots that a running request counts for: as SGLANG_HYBRID_SLOTS_PER_REQUEST says, or
    where it holds one, that and another one for the cache, or less of one where kept states spill
    into KV. SGLang says 3: it takes two for what is kept of a prefill.
    """
    from sglang.srt.mem_cache.allocation_sizing import get_mamba_tracking_slots
    from sglang.srt.runtime_context import get_exec, get_memory, get_schedule, get_spec

    memory = get_memory()
    if memory.disable_radix_cache or memory.radix_cache_backend != "hybrid":
        return mamba_ratio(configurator)
    from sglang_hybrid.cache.state_slots import spill_choice
    from sglang_hybrid.cache.state_slots.slots import slots_per_request
    from sglang_hybrid.checkpoints.support import plans_checkpoints, receives_states

    needed: int = 1 + get_mamba_tracking_slots(
        extra_buffer=get_exec().mamba.enable_mamba_extra_buffer,
        overlap=not get_schedule().disable_overlap_schedule,
        lazy=get_exec().mamba.enable_mamba_extra_buffer_lazy,
    )
    if receives_states(configurator.server_args):
        return needed  # the cache takes none
    slots = slots_per_request(needed)
    if slots is not None:
        return slots
    if spill_choice.states_spill(configurator.server_args):
        return spill_choice.slots_per_request(get_schedule().max_mamba_cache_size, needed)
    drafts = get_spec().speculative_algorithm is not None  # each request has states of drafts, too
    if needed == 1 and not drafts and plans_checkpoints(configurator.server_args):
        return HELD_AND_KEPT
    return mamba_ratio(configurator)


class _WithoutOverlap:
    """Server arguments as they are, but without the overlap scheduler."""

    disable_overlap_schedule = True

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


def accept_one_slot(view: Any, model_arch: str) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """One slot for a request goes with the overlap scheduler where no later step changes a state
    that the cache keeps.
    """
    from sglang_hybrid.checkpoints.support import kept_states_never_change

    return ((_WithoutOverlap(view), model_arch), {}) if kept_states_never_change(view) else None


def plan_forward(_: None, batch: Any, *__: Any, **___: Any) -> None:
    """States that the prefill of `batch` will leave get their slots."""
    if getattr(batch.tree_cache, "plans_checkpoints", False):
        batch.tree_cache.plan_forward(batch)


def plan_decode(_: None, batch: Any, *__: Any, **___: Any) -> None:
    """States that the decode step of `batch` will leave get their slots. With speculative decoding
    nobody knows how many tokens the live state has read.
    """
    planned = getattr(batch.tree_cache, "plans_checkpoints", False)
    if planned and batch.spec_algorithm.is_none():
        batch.tree_cache.plan_decode(batch)


def carry_copies(_: None, batch: Any, decoding: Any, *__: Any, **___: Any) -> None:
    """A prefill that takes a decode step along makes its copies, too."""
    batch.state_copies = getattr(decoding, "state_copies", None)


def disable_tracking(track: Callable[[Any, Any], Any], batch: Any, req: Any) -> Any:
    """SGLang tracks no state of its own in a prefill whose checkpoints are planned."""
    if not getattr(batch.tree_cache, "plans_checkpoints", False):
        return track(batch, req)
    from sglang.srt.managers.schedule_batch import _MambaRadixCacheV2TrackEntry as Entry

    return Entry(track_mask=False, track_position=req.kv.mamba_next_track_idx, track_seqlen=-1)


def track_at_our_grid(track_grid: Callable[[int], int], tree_page: int) -> int:
    """Decode tracks states at the cache's grid."""
    from sglang_hybrid.checkpoints.decode import track_grid as ours

    grid = ours()
    return track_grid(tree_page) if grid is None else grid


def carry_tracks(forward: Any, _: type, batch: Any, *__: Any, **___: Any) -> None:
    """A forward knows the states that it is to leave, and a prefill's what it is answered from."""
    forward.state_copies = getattr(batch, "state_copies", None)
    if batch.forward_mode.is_extend_without_speculative():
        forward.state_tracks = getattr(batch, "state_tracks", None)
        forward.last_hidden = getattr(batch, "last_hidden", None)


def leave_last_hidden(
    processor: Any,
    input_ids: Any,
    hidden_states: Any,
    lm_head: Any,
    metadata: Any,
    *more: Any,
    **named: Any,
) -> None:
    """A prefill of prompts that were asked before leaves the hidden states of their last tokens."""
    from sglang_hybrid.checkpoints import last_hidden

    wanted = last_hidden.current_capture()
    if wanted is not None and all(other is None for other in (*more, *named.values())):
        wanted.take(processor, lm_head, hidden_states, metadata.extend_seq_lens_cpu)


def answer_from_last_hidden(
    run: Callable[..., Any], runner: Any, forward: Any, *more: Any, **named: Any
) -> Any:
    """A batch of full hits runs no layer: its states are copied, and its logits are those of the
    hidden states that were kept. A decode step leaves copies of live states before it runs.
    """
    kept = getattr(forward, "last_hidden", None)
    if kept is None:
        _copy_states(runner.req_to_token_pool, getattr(forward, "state_copies", None))
        return run(runner, forward, *more, **named)
    from sglang.srt.model_executor.model_runner import ModelRunnerOutput

    from sglang_hybrid.checkpoints.last_hidden import Answers, capturing

    if not isinstance(kept, Answers):
        with capturing(kept):
            return run(runner, forward, *more, **named)
    runner._maybe_execute_deferred_mamba_cow_and_clear(forward)
    logits = kept.logits(forward.input_ids, forward)
    return ModelRunnerOutput(logits_output=logits, can_run_graph=False)


def _copy_states(pool: Any, copies: tuple[Any, Any] | None) -> None:
    """Copy states of `pool` between slots, from and to, both int64 [n]; None copies nothing."""
    if copies is not None:
        pool.copy_mamba_state(*(pool.translate_mamba_indices(slots) for slots in copies))


def shift_positions(forward: Any, _: type, batch: Any, *__: Any, **___: Any) -> None:
    """A request may begin behind a gap: modules computed apart keep their places, in each of the
    three parts of positions that models with images have.
    """
    from sglang_hybrid.cache.request.positions import shifted

    before, in_parts = forward.positions, getattr(forward, "mrope_positions", None)
    forward.positions = shifted(forward, batch)
    if in_parts is not None and forward.positions is not before:
        forward.mrope_positions = in_parts + (forward.positions - before)


def leave_ple_windows(layer: Any, x: Any, *_: Any) -> None:
    """A short convolution of Qwen4-Exp leaves its windows [channels, past], too: of its inputs
    x [T, channels], before it runs.
    """
    tracks = _prefill_tracks()
    if tracks is not None:
        from sglang.srt.model_executor.forward_context import get_req_to_token_pool

        tracks.save_windows(get_req_to_token_pool().short_conv_layer_cache(layer.layer_id), x)


def leave_ngram_contexts(batch: Any, forward_batch: Any) -> None:
    """A prefill of Qwen4-Exp leaves the last tokens before each state, for n-grams behind it."""
    tracks = None if batch is None else _prefill_tracks()
    if tracks is not None:
        from sglang.srt.model_executor.forward_context import get_req_to_token_pool

        tracks.save_tokens(get_req_to_token_pool().ngram_pool.context, batch.ngram_context)


def give_sconv_tracks(_: None, backend: Any, forward: Any, *__: Any, **___: Any) -> None:
    """The backend of Inkling's short convolutions knows which states a prefill leaves. It builds
    its metadata by itself, without that of SGLang's other recurrent layers.
    """
    if getattr(forward, "state_tracks", None) is not None:
        meta = backend.sconv_metadata
        backend.forward_metadata.state_tracks = forward.state_tracks.for_layers(
            backend, forward, meta.cache_indices, meta.query_start_loc
        )


def leave_sconv_windows(layer: Any, _: Any, windows: Any, inputs: Any, *__: Any) -> None:
    """A short convolution of Inkling leaves its windows, before it runs: of its inputs [T, D], in
    its pool [slots, K-1, D].
    """
    tracks = _prefill_tracks()
    if tracks is not None:
        tracks.save_windows(windows.transpose(1, 2), inputs)


def leave_kv_windows(attention: Any, _: Any, k: Any, v: Any, *__: Any, **___: Any) -> None:
    """The same for those of keys and values [T, D], where one kernel convolves both."""
    tracks = _prefill_tracks()
    if tracks is not None:
        tracks.save_windows(attention.k_sconv._sconv_cache().transpose(1, 2), k)
        tracks.save_windows(attention.v_sconv._sconv_cache().transpose(1, 2), v)


def _prefill_tracks() -> PrefillTracks | None:
    """The states that the recurrent layers of this forward leave, for what is beside them.

    Their backend has them; the batch that a prefill's graph hands to its breaks has not
    (prefill_cuda_graph_runner.py:1977).
    """
    from sglang.srt.model_executor.forward_context import get_attn_backend

    backend = get_attn_backend()
    linear = getattr(backend, "linear_attn_backend", backend)
    tracks: PrefillTracks | None = getattr(linear.forward_metadata, "state_tracks", None)
    return tracks
