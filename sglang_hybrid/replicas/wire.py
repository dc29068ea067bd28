"""What a server sends: batches of events (ZMQ, msgpack) and pages of a snapshot (HTTP, JSON).

Unknown keys and unknown types of events are ignored, so that newer servers can be followed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.replicas.index import KV, STATE, LostMessages, ReplicaIndex

MEDIA: Final = {"GPU": Tier.DEVICE, "CPU_PINNED": Tier.HOST, "DISK": Tier.DISK}
"""Tiers of SGLang's storage media; any other medium is as slow as the disk."""

Event = dict[str, Any]


class Malformed(Exception):
    """A message that is not as the wire says; the sentence says why."""


class Page(msgspec.Struct):
    """One page of a rank's snapshot.

    epoch: changes when the server starts anew. seq: batches that had been published when the page
    was made; all of them, and no others, must have been applied before the page. cursor: asks for
    the next page; None on the last one. waiting: requests that wait for their prefill. room: tokens
    of a prompt that can be computed and kept before anything is evicted; None if that is not said.
    loads: for a medium, seconds to load a state and seconds for each token of KV.
    """

    epoch: str
    seq: int
    block_size: int = 0
    cursor: str | None = None
    error: str = ""
    events: list[Event] = []
    prefill_tokens_per_second: float | None = None
    waiting: int = 0
    room: int | None = None
    loads: dict[str, tuple[float, float]] = {}


class Answer(msgspec.Struct):
    """The answer of GET /hybrid_cache/resumable: a page for each data-parallel rank."""

    ranks: list[Page]


class KvEvents(msgspec.Struct):
    """Where a server publishes: the block `kv_events` of its GET /server_info
    (`describe_kv_events_publisher` in SGLang's runtime_context.py).
    """

    endpoint_host: str
    endpoint_port_base: int
    topic: str = ""
    dp_size: int = 1


class ServerInfo(msgspec.Struct):
    """What matters here of GET /server_info; kv_events is None if the server publishes nothing."""

    kv_events: KvEvents | None = None


_pages = msgspec.json.Decoder(Answer)
_infos = msgspec.json.Decoder(ServerInfo)


def decode_page(content: bytes, rank: int) -> Page:
    """The page of a data-parallel rank; an answer with a single page is for the rank that asked.
    Raises Malformed.
    """
    try:
        pages = _pages.decode(content)
    except msgspec.MsgspecError as error:
        raise Malformed(f"an answer is no page of a snapshot: {error}") from error
    if len(pages.ranks) == 1:
        return pages.ranks[0]
    if rank >= len(pages.ranks):
        raise Malformed(f"an answer has {len(pages.ranks)} ranks, and none of number {rank}")
    return pages.ranks[rank]


def decode_server_info(content: bytes) -> ServerInfo:
    """Raises Malformed."""
    try:
        return _infos.decode(content)
    except msgspec.MsgspecError as error:
        raise Malformed(f"an answer is no server_info: {error}") from error


def decode_batch(payload: bytes) -> list[Event]:
    """The events of a batch, `[seconds, events, rank]`. Raises Malformed."""
    try:
        batch = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Malformed(f"a batch is no msgpack: {error}") from error
    if not (isinstance(batch, list) and len(batch) > 1 and isinstance(batch[1], list)):
        raise Malformed(f"a batch is {str(batch)[:80]}, not [seconds, events, rank]")
    if not all(isinstance(event, dict) for event in batch[1]):
        raise Malformed("a batch has events that are no maps")
    return batch[1]


def apply_events(
    index: ReplicaIndex,
    replica: str,
    events: Iterable[Mapping[str, Any]],
    *,
    is_joining: bool = False,
) -> None:
    """Tell the index what a replica said, in its order. Raises Malformed, and LostMessages for
    blocks after an unknown one, which are left out with `is_joining`; the events before it have
    been applied.
    """
    for event in events:
        try:
            _apply(index, replica, event)
        except LostMessages:
            if not is_joining:
                raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise Malformed(f"an event of type {event.get('type')} is wrong: {error!r}") from error


def _apply(index: ReplicaIndex, replica: str, event: Mapping[str, Any]) -> None:
    kind = event.get("type")
    if kind == "BlockStored":
        medium, components = event.get("medium"), event.get("component_types")
        index.store(
            replica,
            parent=event.get("parent_block_hash"),
            hashes=event["block_hashes"],
            tokens=event["token_ids"],
            block_size=event["block_size"],
            tier=Tier.DEVICE if medium is None else MEDIA.get(medium, Tier.DISK),
            components=(KV, STATE) if components is None else components,
            tenant=event.get("tenant") or "",
        )
    elif kind == "BlockRemoved":
        index.remove(replica, event["block_hashes"])
    elif kind == "AllBlocksCleared":
        index.clear(replica)
