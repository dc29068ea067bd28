"""What differs between the releases of SGLang that this package extends.

A parameter that a release adds to a method which we override is not here: the override takes it as
`**more` and hands it on.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchResult

_HAS_LAST_VISITED = "last_visited_node_id" in MatchResult._fields


def last_visited(node_id: int | None) -> dict[str, int | None]:
    """The field of `MatchResult` that names the deepest node of a look-up, None for the root.

    SGLang 0.5.22 has no such field.
    """
    return {"last_visited_node_id": node_id} if _HAS_LAST_VISITED else {}


def tracking_slots_used(kv: Any) -> list[bool]:
    """Whether each slot that a request has for SGLang's tracked states is there; `ReqKvInfo` says.

    SGLang 0.5.22 marks a missing one with -1 among the slots, later releases in a list beside them.
    """
    if hasattr(kv, "mamba_ping_pong_empty"):
        return [not empty for empty in kv.mamba_ping_pong_empty or ()]
    slots = kv.mamba_ping_pong_track_buffer
    return [] if slots is None else [slot != -1 for slot in slots.tolist()]


def untracked(kv: Any) -> Any:
    """What SGLang's batch notes of a request with these slots (`ReqKvInfo`) in whose prefill it
    tracks no state.

    SGLang 0.5.22 names the slot of a tracked state, later releases its position among the request's
    slots.
    """
    from sglang.srt.managers.schedule_batch import _MambaRadixCacheV2TrackEntry as Entry

    place = kv.mamba_next_track_idx
    if "track_position" in Entry._fields:
        return Entry(track_mask=False, track_position=place, track_seqlen=-1)
    slot = kv.mamba_ping_pong_track_buffer[place].item()
    return Entry(track_mask=False, track_index=slot, track_seqlen=-1)


def copy_behind_forwards(controller: Any, forwards: Any) -> None:
    """Let copies to the host begin after what the stream `forwards` has been given, which may still
    write what is copied; None: they run in the scheduler's stream, behind which copies begin.

    SGLang does so from 0.5.23 on (`write_fence_stream`).
    """
    if forwards is not None and getattr(controller, "write_fence_stream", None) is None:
        controller.l2_transfer_engine.device_to_host_stream.wait_stream(forwards)
