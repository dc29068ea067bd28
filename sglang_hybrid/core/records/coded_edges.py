"""Places of the coded KV of nodes: slots of the pool, each of which holds several coded tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, Self, TypeVar


class SlotsLike(Protocol):
    """Slots in an order: a tensor of their numbers, or a range where the numbers mean nothing."""

    def __len__(self) -> int: ...

    def __getitem__(self, some: Any, /) -> Any: ...


Slots = TypeVar("Slots", bound=SlotsLike)


@dataclass(frozen=True)
class CodedEdge(Generic[Slots]):
    """The coded KV of one edge, token after token, in whole pages of slots.

    slots: all that hold some of it. skip: tokens of the first page that belong to the node above.
    owns_first: whether the first page is this edge's, or is freed with the edge above. tokens: of
    the edge. parts: coded tokens that fit into a slot. page: slots of a page.
    """

    slots: Slots
    skip: int
    owns_first: bool
    tokens: int
    parts: int
    page: int

    @property
    def owned(self) -> Slots:
        """The slots that are freed with this edge."""
        owned: Slots = self.slots if self.owns_first else self.slots[self.page :]
        return owned

    def cut(self, tokens: int) -> tuple[Self, Self]:
        """The edge of the first `tokens`, and that of the rest, which may share a page: it is freed
        with the first.
        """
        page_tokens = self.parts * self.page
        at = self.skip + tokens
        head = replace(self, slots=self.slots[: -(-at // page_tokens) * self.page], tokens=tokens)
        first, skip = divmod(at, page_tokens)
        tail = replace(
            self,
            slots=self.slots[first * self.page :],
            skip=skip,
            owns_first=not skip,
            tokens=self.tokens - tokens,
        )
        return head, tail


@dataclass
class CodedEdges(Generic[Slots]):
    """The coded edges of one tree, by the ids of their nodes.

    parts, page: as of each edge. tokens, slots: of all edges.
    """

    parts: int
    page: int = 1
    tokens: int = 0
    slots: int = 0
    _edges: dict[int, CodedEdge[Slots]] = field(default_factory=dict)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._edges

    def __getitem__(self, node_id: int) -> CodedEdge[Slots]:
        return self._edges[node_id]

    def code(self, node_id: int, slots: Slots) -> CodedEdge[Slots]:
        """The KV of a node, a token in each of its `slots`, is coded in the first of them."""
        tokens = len(slots)
        pages = -(-tokens // (self.parts * self.page))
        edge = CodedEdge(slots[: pages * self.page], 0, True, tokens, self.parts, self.page)
        self._edges[node_id] = edge
        self.tokens += tokens
        self.slots += len(edge.slots)
        return edge

    def drop(self, node_id: int, children: Iterable[int] = ()) -> tuple[Slots, int | None]:
        """A node is coded no more. Returns its slots but for a page that it shares with a child's
        edge, and that child: it owns the page from now on.
        """
        edge = self._edges.pop(node_id)
        self.tokens -= edge.tokens
        freed, heir = edge.owned, None
        for child in children:
            below = self._edges.get(child)
            if below is not None and not below.owns_first:
                self._edges[child], heir = replace(below, owns_first=True), child
                freed = freed[: len(freed) - self.page]
        self.slots -= len(freed)
        return freed, heir

    def split(self, head: int, tail: int, tokens: int) -> None:
        """The edge of `tail` was cut behind `tokens`; `head` is the new node above it."""
        self._edges[head], self._edges[tail] = self._edges[tail].cut(tokens)

    def clear(self) -> None:
        """Forget all coded edges, after the tree was emptied."""
        self._edges.clear()
        self.tokens = self.slots = 0
