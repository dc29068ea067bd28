"""KV events that tell where a prompt can be resumed (`--kv-events-config`).

SGLang tells of every block of KV. A hybrid model resumes only where a state is, so here a block is
told while a state lies at its end or further down its path, and each event says which blocks end
with one. Readers that know SGLang's events need nothing new: with a block that they are told of,
they are wrong by at most the tokens since the state before it. docs/replicas.md has the format.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from sglang.srt.disaggregation.kv_events import (
    BlockRemoved,
    BlockStored,
    kv_event_namespace_seed,
    namespaced_block_hash,
)
from sglang.srt.mem_cache.events import KVCacheEventRecorder

from sglang_hybrid.core.records.node_tree import NodeTree
from sglang_hybrid.core.records.nodes import Node
from sglang_hybrid.core.tiers import published
from sglang_hybrid.core.tiers.places import tiers_of
from sglang_hybrid.core.tiers.published import KV, STATE
from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.serving.tenants import TenantNames, tenant, tenant_names

MEDIA = {tier: medium for medium, tier in published.MEDIA.items()}
"""SGLang's names of the tiers (its StorageMedium)."""


class PlacedBlocks(BlockStored, tag=BlockStored.__name__):  # type: ignore[call-arg]
    """SGLang's event, with what a medium has of each of its blocks (the field of SGLang's pull
    request 32514), and whose they are: a keyed hash, "" of requests without key and salt.
    """

    component_types: list[str] | None = None
    tenant: str = ""


class _ReaderView:
    """The part of a node's record that readers know.

    tokens: those of its edge; the node has fewer once its edge is cut. states: how many states are
    at its end and below. place: tiers of its KV and of its state, the fastest each, None of no
    state. shown: the place that readers were told last, None where its blocks are not told.
    """

    __slots__ = ("place", "shown", "states", "tokens")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.states = 0
        self.place: tuple[Tier, Tier | None] | None = None
        self.shown: tuple[Tier, Tier | None] | None = None


class StateEvents(KVCacheEventRecorder):
    """Records the events of one cache. It listens to the tree of records (`NodeTree.listen`), and
    works out what to tell when SGLang asks (`take`), once for each step.

    names: of tenants. batches: how many times `take` had something to tell; SGLang's publisher
    gives each of them the next number, from 0 on.
    """

    def __init__(
        self, names: TenantNames, *, page_size: int, dynamo_format: bool, lora_names: Any
    ) -> None:
        super().__init__(
            enabled=True, page_size=page_size, dynamo_format=dynamo_format, lora_names=lora_names
        )
        self.batches = 0
        self.epoch = secrets.token_hex(8)
        self.settle: Callable[[], None] = lambda: None
        self._seed = lru_cache(1_024)(kv_event_namespace_seed)
        self._name = lru_cache(1_024)(lambda extra_key, salt: names.name(tenant(extra_key, salt)))
        self._views: dict[Node, _ReaderView] = {}
        self._changed: dict[Node, None] = {}

    @classmethod
    def in_place_of(cls, recorder: KVCacheEventRecorder) -> StateEvents:
        """A recorder with the arguments of SGLang's `recorder`, and our names of tenants."""
        return cls(
            tenant_names(),
            page_size=recorder.page_size,
            dynamo_format=recorder.dynamo_format,
            lora_names=recorder.lora_names,
        )

    def follow(self, tree: NodeTree) -> None:
        """The tree of an empty cache, from its beginning on."""
        self._views, self._changed = {}, {}
        self._root = tree.root
        tree.listen(self, from_now=True)

    # Called by the tree of records

    def mark_dirty(self, node: Node) -> None:
        self._changed[node] = None

    def forget(self, node: Node) -> None:
        self._changed.pop(node, None)
        view = self._view_of(node)
        del self._views[node]
        if view.place is not None and view.place[1] is not None:
            self._count(node.parent, -1)
        if view.shown is not None:
            self._retract(node, view.shown)

    # Called by SGLang

    def record_store(self, node: Any, medium: Any = None, **_: Any) -> None:
        """Ignored: events are derived from the record tree in `take`."""

    def record_remove(self, node: Any, medium: Any = None) -> None:
        """Ignored, too."""

    def take(self) -> list[Any]:
        """The changes since the last call, parents before children."""
        self._settle()
        events: list[Any] = super().take()
        self.batches += bool(events)
        return events

    @property
    def has_changes(self) -> bool:
        """True if `take` may have something to tell."""
        return bool(self._changed or self._queue)

    # Snapshots for readers that missed something

    def walk(self) -> Iterator[list[PlacedBlocks]]:
        """The events that tell of each node that readers know, parents first. The tree may change
        between two of them: what was added meanwhile is told by `take`.
        """
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            view = self._views.get(node)
            if view is not None and view.shown is not None and node.parent is not None:
                yield self._blocks(node, view.shown)
                stack.extend(node.children.values())

    # Events of changes

    def _settle(self) -> None:
        changed, self._changed = self._changed, {}
        for node in changed:
            view, place = self._view_of(node), place_of(node)
            before = view.place
            view.place = place
            had = before is not None and before[1] is not None
            has = place is not None and place[1] is not None
            if has != had:
                self._count(node, has - had)
        changed |= self._changed  # those above that begin or cease to be told
        self._changed = {}
        for node in sorted(changed, key=lambda node: node.depth):
            self._publish(node, self._views[node])

    def _count(self, node: Node | None, by: int) -> None:
        """Count `by` more states at or below `node` and each node above it."""
        while node is not None and node is not self._root:
            view = self._view_of(node)
            view.states += by
            if (view.states > 0) != (view.shown is not None):
                self._changed[node] = None
            node = node.parent

    def _view_of(self, node: Node) -> _ReaderView:
        """The part of the record of `node` that readers know."""
        view = self._views.get(node)
        if view is None:
            below = self._first_cut(node)
            if below is None:
                view = self._views[node] = _ReaderView(node.tokens)
            else:
                self._add_heads(below, self._views[below])
                view = self._views[node]
        elif view.tokens > node.tokens:
            self._add_heads(node, view)
        return view

    def _first_cut(self, node: Node) -> Node | None:
        """The node that `node`, which readers do not know, was cut off; None if it is new."""
        stack = list(node.children.values())
        while stack:
            child = stack.pop()
            view = self._views.get(child)
            if view is None:
                stack.extend(child.children.values())
            elif view.tokens > child.tokens:
                return child
        return None

    def _add_heads(self, node: Node, view: _ReaderView) -> None:
        """The edge of `node` was cut, once or more: readers are told of the ends of the new nodes
        above it, so that later events may name them.
        """
        heads: list[Node] = []
        while view.tokens > node.tokens + sum(head.tokens for head in heads):
            above = (heads[-1] if heads else node).parent
            assert above is not None
            heads.append(above)
        view.tokens = node.tokens
        for head in reversed(heads):
            known = self._views[head] = _ReaderView(head.tokens)
            known.states = view.states
            known.place = None if view.place is None else (view.place[0], None)
            known.shown = None if view.shown is None else (view.shown[0], None)
            if known.shown is not None:
                self._queue += self._blocks(head, known.shown)
            self._changed[head] = None

    def _publish(self, node: Node, view: _ReaderView) -> None:
        wanted = view.place if view.states > 0 else None
        if wanted == view.shown:
            return
        if view.shown is not None and (wanted is None or wanted[0] != view.shown[0]):
            self._retract(node, view.shown)
            view.shown = None
        if wanted is not None:
            # Of KV that stays where it is only the last block is told anew: its state is another.
            begin = 0 if view.shown is None else node.tokens // self.page_size - 1
            self._queue += self._blocks(node, wanted, begin)
        view.shown = wanted

    def _retract(self, node: Node, shown: tuple[Tier, Tier | None]) -> None:
        kv, state = shown
        hashes = self._hashes(node)
        self._queue.append(BlockRemoved(block_hashes=hashes, medium=MEDIA[kv]))
        if state is not None and state is not kv:
            self._queue.append(BlockRemoved(block_hashes=hashes[-1:], medium=MEDIA[state]))

    def _hashes(self, node: Node, begin: int = 0) -> list[int]:
        """The hashes of the blocks of `node` from its block `begin` on: 64 bits of SGLang's hash of
        all tokens up to the block's end, as SGLang publishes them. A tenant's are its own.
        """
        key = node.payload.key
        texts = self._node_event_hash_values(node.payload)[begin:]
        # As SGLang's hash_str_to_int64, for all of them at once.
        values = np.frombuffer(bytes.fromhex("".join([text[:16] for text in texts])), ">i8")
        seed = self._seed(extra_key=key.extra_key, cache_salt=key.cache_salt)
        if seed is not None and self.dynamo_format:
            return [namespaced_block_hash(int(each), namespace_seed=seed) for each in values]
        if seed is not None:
            values = values ^ np.frombuffer(seed[:8], ">i8")
        numbers: list[int] = values.tolist()
        return numbers

    def _blocks(
        self, node: Node, place: tuple[Tier, Tier | None], begin: int = 0
    ) -> list[PlacedBlocks]:
        """The events that tell of the blocks of `node` from its block `begin` on. The last one, at
        whose end the state is, has an event of its own, so that it can be told again alone.
        """
        kv, state = place
        key, page = node.payload.key, self.page_size
        hashes = self._hashes(node, begin)
        above: int | None = None
        if begin:
            above = self._hashes(node, begin - 1)[0]
        elif node.parent is not self._root:
            assert node.parent is not None
            above = self._hashes(node.parent, -1)[0]

        def event(first: int, end: int, tier: Tier, *parts: str) -> PlacedBlocks:
            return PlacedBlocks(
                block_hashes=hashes[first:end],
                parent_block_hash=hashes[first - 1] if first else above,
                token_ids=list(key.token_ids[(begin + first) * page : (begin + end) * page]),
                block_size=page,
                lora_id=None,
                medium=MEDIA[tier],
                cache_salt=key.cache_salt if self.dynamo_format else None,
                lora_name=self.lora_names.resolve(key.extra_key) if self.dynamo_format else None,
                component_types=list(parts),
                tenant=self._name(key.extra_key, key.cache_salt),
            )

        last = len(hashes) - 1
        events = [event(0, last, kv, KV)] if last else []
        if state is kv:
            return [*events, event(last, last + 1, kv, KV, STATE)]
        events.append(event(last, last + 1, kv, KV))
        return events if state is None else [*events, event(last, last + 1, state, STATE)]


def place_of(node: Node) -> tuple[Tier, Tier | None] | None:
    """The fastest tiers of the KV and of the state of a node; None without KV."""
    kv, state = tiers_of(node)
    return None if kv is None else (kv, state)
