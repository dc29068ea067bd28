"""Messages of a server: batches of events (ZMQ, msgpack) and pages of a snapshot (HTTP, JSON).

Everything that a server says is decoded here, once, into types with bounds; what does not fit is
`Malformed`. Unknown keys and unknown types of events are ignored, so that newer servers can be
followed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from sglang_hybrid.core.tiers.published import KV, LEAST_RATE, MEDIA, MOST_RATE, STATE
from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.extensions.router.index import LostMessages, ReplicaIndex

T = TypeVar("T")

MOST_RANKS: Final = 64  # data-parallel ranks of a server

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
Name: TypeAlias = Annotated[str, Meta(max_length=1_024)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e6)]
Rate: TypeAlias = Annotated[float, Meta(ge=LEAST_RATE, le=MOST_RATE)]
TokenId: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""The low 32 bits count; larger ids stand for images."""
BlockSize: TypeAlias = Annotated[int, Meta(ge=1, le=2**20)]
Port: TypeAlias = Annotated[int, Meta(ge=1, le=65_535)]
HOST: Final = re.compile(r"\*|[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}|\[[0-9A-Fa-f:.]{2,45}\]")


class Malformed(Exception):
    """A message that is not as the wire says; the sentence says why."""


class BlockStored(msgspec.Struct):
    """The arguments of `ReplicaIndex.store`."""

    block_hashes: list[int]
    token_ids: list[TokenId]
    block_size: BlockSize
    parent_block_hash: int | None = None
    medium: Name | None = None
    component_types: Annotated[list[Name], Meta(max_length=16)] | None = None
    tenant: Name | None = None


class BlockRemoved(msgspec.Struct):
    """The arguments of `ReplicaIndex.remove`."""

    block_hashes: list[int]


class AllBlocksCleared(msgspec.Struct):
    """The replica holds nothing any more."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
EVENTS: Final[tuple[type[Event], ...]] = (BlockStored, BlockRemoved, AllBlocksCleared)


class _Kind(msgspec.Struct):
    type: Name


class Page(msgspec.Struct):
    """One page of a rank's snapshot.

    epoch: changes when the server starts anew. seq: batches that had been published when the page
    was made; all of them, and no others, must have been applied before the page. cursor: asks for
    the next page; None on the last one. error: why there is no page. waiting: requests that wait
    for their prefill. room: tokens of a prompt that can be computed and kept before anything is
    evicted; None if that is not said. loads: for a medium, seconds to load a state and seconds for
    each token of KV.
    """

    epoch: Name
    seq: Count
    block_size: BlockSize = 1
    cursor: Name | None = None
    error: Name = ""
    events: list[msgspec.Raw] = []
    prefill_tokens_per_second: Rate | None = None
    waiting: Annotated[int, Meta(ge=0, le=2**31)] = 0
    room: Count | None = None
    loads: Annotated[dict[Name, tuple[Seconds, Seconds]], Meta(max_length=16)] = {}

    def __post_init__(self) -> None:
        if self.cursor is not None and not self.events:
            raise ValueError("a page that is not the last one has no events")


class PageAnswer(msgspec.Struct):
    """The answer of GET /hybrid_cache/resumable: a page for each data-parallel rank."""

    ranks: Annotated[list[Page], Meta(min_length=1, max_length=MOST_RANKS)]


class Prompt(msgspec.Struct):
    """The answer of POST /hybrid_cache/prompt/ROUTE: the tokens of a prompt, its tenant, and how
    many of the tokens can be hit; None for all but the last one.
    """

    input_ids: list[TokenId]
    tenant: Name
    reusable: Count | None = None


class KvEvents(msgspec.Struct):
    """The address at which a server publishes: the block `kv_events` of its GET /server_info
    (`describe_kv_events_publisher` in SGLang's runtime_context.py). A data-parallel rank has the
    port endpoint_port_base + rank.
    """

    endpoint_host: str
    endpoint_port_base: Port
    topic: Name = ""
    dp_size: Annotated[int, Meta(ge=1, le=MOST_RANKS)] = 1

    def __post_init__(self) -> None:
        if HOST.fullmatch(self.endpoint_host) is None:
            raise ValueError("endpoint_host is no host")
        if self.endpoint_port_base + self.dp_size > 65_536:
            raise ValueError(f"{self.dp_size} ranks have no ports")


class ServerInfo(msgspec.Struct):
    """The part of GET /server_info that matters here; kv_events is None if the server publishes
    nothing.
    """

    kv_events: KvEvents | None = None


class _Batch(msgspec.Struct, array_like=True):
    """`[seconds, events, rank]`, as the publisher sends it."""

    seconds: float
    events: list[msgspec.Raw]


def decoded(decode: Callable[[bytes], T], content: bytes, what: str) -> T:
    """`decode(content)`. Raises Malformed; the sentence says `what` it should be.

    Beside msgspec's own errors there are those of Python: text that is no UTF-8, and JSON that is
    nested too deep.
    """
    try:
        return decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Malformed(f"a message is no {what}: {error}") from error


_pages = msgspec.json.Decoder(PageAnswer).decode
_infos = msgspec.json.Decoder(ServerInfo).decode
_prompts = msgspec.json.Decoder(Prompt).decode
_batches = msgspec.msgpack.Decoder(_Batch).decode


def decode_page(content: bytes, rank: int) -> Page:
    """The page of a data-parallel rank; an answer with a single page is for the rank that asked.
    Raises Malformed.
    """
    ranks = decoded(_pages, content, "page of a snapshot").ranks
    if len(ranks) == 1:
        return ranks[0]
    if rank >= len(ranks):
        raise Malformed(f"an answer has {len(ranks)} ranks, and none of number {rank}")
    return ranks[rank]


def decode_server_info(content: bytes) -> ServerInfo:
    """Raises Malformed."""
    return decoded(_infos, content, "server_info")


def decode_prompt(content: bytes) -> Prompt:
    """Raises Malformed."""
    return decoded(_prompts, content, "prompt")


def decode_page_events(page: Page) -> list[Event]:
    """The events of a page that are known here. Raises Malformed."""
    return _known(page.events, _JSON)


def decode_batch(payload: bytes) -> list[Event]:
    """The events of a batch that are known here. Raises Malformed."""
    return _known(decoded(_batches, payload, "batch [seconds, events, rank]").events, _MSGPACK)


Decoders: TypeAlias = tuple[Callable[[Any], _Kind], dict[str, Callable[[Any], Event]]]


def _decoders(decoder: Callable[[Any], Any]) -> Decoders:
    return decoder(_Kind).decode, {kind.__name__: decoder(kind).decode for kind in EVENTS}


_JSON: Final = _decoders(msgspec.json.Decoder)
_MSGPACK: Final = _decoders(msgspec.msgpack.Decoder)


def _known(events: Sequence[msgspec.Raw], decoders: Decoders) -> list[Event]:
    kind_of, decode = decoders
    found: list[Event] = []
    for event in events:
        kind = decoded(kind_of, event, "event").type
        if kind in decode:
            found.append(decoded(decode[kind], event, kind))
    return found


def apply_events(
    index: ReplicaIndex, replica: str, events: Sequence[Event], *, is_joining: bool = False
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
        except ValueError as error:
            raise Malformed(f"an event is wrong: {error}") from error


def _apply(index: ReplicaIndex, replica: str, event: Event) -> None:
    if isinstance(event, BlockStored):
        parts = event.component_types
        index.store(
            replica,
            parent=event.parent_block_hash,
            hashes=event.block_hashes,
            tokens=event.token_ids,
            block_size=event.block_size,
            tier=Tier.DEVICE if event.medium is None else MEDIA.get(event.medium, Tier.DISK),
            components=(KV, STATE) if parts is None else parts,
            tenant=event.tenant or "",
        )
    elif isinstance(event, BlockRemoved):
        index.remove(replica, event.block_hashes)
    else:
        index.clear(replica)
