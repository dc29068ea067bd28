"""The pins of one tree of records, within each payer's share of the memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.changing_queue import ChangingQueue
from sglang_hybrid.core.records.nodes import Clock, Node
from sglang_hybrid.core.records.pin import MOST_OF_ALL, Pin, PinRequest
from sglang_hybrid.core.records.shares import Shares, payer_of

PIN_EVENTS = ("pinned", "refused", "gave_way", "expired", "evicted")
"""The names of the counts of pins."""


@dataclass(frozen=True, slots=True)
class PinRoom:
    """Bytes of the memory that pins may take a share of. states: None if `kv` holds both kinds."""

    kv: int
    states: int | None = None


class Pins:
    """The pins of one tree, within each payer's share (`shares.py`).

    A pin is charged for the state of its node and for the KV of the path to it that no other pin
    keeps. A node has one pin at most. When a payer's share is full, that of its pins that has the
    lowest priority, and ends first, gives way to a new one of the same priority or a higher one.
    When all pins take MOST_OF_ALL, one of the payer with most gives way.

    All times are those of the tree's clock, and ties go by the order of the calls, so that all
    ranks decide alike.

    Args:
        cost: bytes of a KV token and of a state.
        room: the memory; None: nothing can be pinned.
        share: of it, for one payer.
    """

    def __init__(
        self, cost: CostModel | None = None, room: PinRoom | None = None, share: float = 0.0
    ) -> None:
        self.share = min(share, MOST_OF_ALL)
        self.counts: Counter[str] = Counter()
        self._cost = cost
        self._room = room
        self._clock = Clock()
        self._mark_dirty: Callable[[Node], None] = lambda node: None
        self._forget()

    def follow(self, clock: Clock, mark_dirty: Callable[[Node], None]) -> None:
        """Become the pins of a tree that has none yet, with its clock and its function for a node
        that changed.
        """
        self._clock, self._mark_dirty = clock, mark_dirty
        self._forget()

    def _forget(self) -> None:
        self._expiry = ChangingQueue[Pin](lambda pin: (pin.until,))
        self._of_payer: dict[Hashable, ChangingQueue[Pin]] = {}
        self._nodes: dict[Pin, Node] = {}
        self._below: dict[Node, int] = {}  # pins at a node or below it; absent: 0
        self._kv = Shares()
        self._states = self._kv if self._room is None or self._room.states is None else Shares()

    def __len__(self) -> int:
        return len(self._expiry)

    @property
    def _bytes(self) -> int:
        """Bytes of the memory: 0 where nothing can be pinned."""
        return 0 if self._room is None else self._room.kv + (self._room.states or 0)

    @property
    def held_bytes(self) -> int:
        """Bytes that are charged for all pins."""
        return self._kv.total + (0 if self._states is self._kv else self._states.total)

    def of(self, tenant: Hashable) -> int:
        """Bytes that are charged for the pins of `tenant` and of others with its payer."""
        payer = payer_of(tenant)
        return self._kv.of(payer) + (0 if self._states is self._kv else self._states.of(payer))

    @property
    def next_expiry(self) -> float:
        """Seconds at which the first pin ends; without end if there is none."""
        first = self._expiry.least()
        return math.inf if first is None else first.until

    def pin(
        self, node: Node, request: PinRequest, tenant: Hashable = None, *, last: bool = True
    ) -> bool:
        """Pin `node`, which holds `request.position`, for `tenant`; False if its payer's share
        has no room. last: it is not asked again for the same request; a refusal counts only then.

        A position that is pinned already gets the priority and the lifetime of this call, but is
        pinned no shorter than it was. Of two positions on one node, the deeper one is pinned, with
        the higher priority and the longer lifetime of both.
        """
        until = self._now + request.ttl
        position = min(request.position, node.depth)
        pin = node.pin
        if pin is not None:
            if position == pin.position:
                pin.ttl, pin.priority = request.ttl, request.priority
            else:
                pin.position = max(pin.position, position)
                pin.ttl = max(pin.ttl, request.ttl)
                pin.priority = max(pin.priority, request.priority, key=lambda one: one.weight)
            pin.until = max(pin.until, until)
            self._note(pin)
            return True
        pin = Pin(payer_of(tenant), position, request.ttl, request.priority, until)
        if not self._make_room(node, pin):
            self.counts["refused"] += last
            return False
        self.counts["pinned"] += 1
        node.pin = pin
        self._nodes[pin] = node
        self._charge(pin)
        self._note(pin)
        return True

    def on_hit(self, node: Node) -> None:
        """A request resumed from `node`: the lifetimes of pins on its path begin anew."""
        at: Node | None = node if self._below else None
        while at is not None:
            if at.pin is not None:
                at.pin.until = max(at.pin.until, self._now + at.pin.ttl)
                self._note(at.pin)
            at = at.parent

    def expire(self) -> None:
        """Release the pins whose lifetimes are over."""
        while (first := self._expiry.least()) is not None and first.until <= self._now:
            self._release(first, "expired")

    def on_loss(self, node: Node) -> None:
        """Called when `node` is about to lose its state, or to be removed from the tree."""
        if node.pin is not None:
            self._release(node.pin, "evicted")

    def on_split(self, head: Node, tail: Node) -> None:
        """The edge of `tail` was cut; `head` is the new node above it. A pin whose position is on
        `head` moves there.
        """
        below = self._below.get(tail, 0)
        if not below:
            return
        self._below[head] = below
        pin = tail.pin
        if pin is None or pin.position > head.depth:
            return
        tail.pin, head.pin = None, pin
        self._nodes[pin] = head
        self._keep(tail, pin.payer, -1)
        self._mark_dirty(tail)
        self._mark_dirty(head)

    def as_dict(self) -> dict[str, Any]:
        """Sums over all tenants, for /server_info. bytes_of_a_tenant: limit for the pins of one
        payer, whatever others have pinned. pinned, refused, gave_way, expired, evicted: how often
        that happened.
        """
        return {
            "pins": len(self),
            "bytes": self.held_bytes,
            "share_of_a_tenant": self.share,
            "bytes_of_a_tenant": int(self.share * self._bytes),
            **{name: self.counts[name] for name in PIN_EVENTS},
        }

    @property
    def _now(self) -> float:
        return self._clock.stamp

    def _note(self, pin: Pin) -> None:
        """Order `pin` anew, because it is new or its lifetime or its priority changed."""
        self._expiry.put(pin)
        own = self._of_payer.get(pin.payer)
        if own is None:
            own = self._of_payer[pin.payer] = ChangingQueue(lambda pin: (pin.weight, pin.until))
        own.put(pin)
        self._mark_dirty(self._nodes[pin])

    def _release(self, pin: Pin, why: str) -> None:
        self.counts[why] += 1
        node = self._nodes[pin]
        node.pin = None
        own = self._of_payer[pin.payer]
        own.drop(pin)
        if not len(own):
            del self._of_payer[pin.payer]
        self._expiry.drop(pin)
        self._charge(pin, -1)
        del self._nodes[pin]
        self._mark_dirty(node)

    # Room.

    def _charge(self, pin: Pin, sign: int = 1) -> None:
        """Charge the payer of `pin` for it, or with `sign` -1 no more."""
        assert self._cost is not None
        self._states.change(pin.payer, sign * self._cost.state_bytes)
        at = self._nodes[pin]
        while at.parent is not None:
            self._keep(at, pin.payer, sign)
            at = at.parent

    def _keep(self, node: Node, payer: Hashable, sign: int) -> None:
        """One more pin needs the KV of `node`, or one less; the first one is charged for it."""
        assert self._cost is not None
        before = self._below.get(node, 0)
        after = before + sign
        if after:
            self._below[node] = after
        else:
            del self._below[node]
        if not (before and after):
            self._kv.change(payer, sign * node.tokens * self._cost.kv_bytes_per_token)

    def _make_room(self, node: Node, pin: Pin) -> bool:
        """True if `pin` fits on `node`, once others gave way."""
        if self._cost is None or self._room is None:
            return False
        if self._full(node.depth, self.share, lambda held: 0) is not None:
            return False
        payer = pin.payer

        def full(share: float, held: Callable[[Shares], int]) -> Shares | None:
            return self._full(self._new_tokens(node), share, held)

        while full(self.share, lambda held: held.of(payer)) is not None:
            if not self._release_least(payer, pin.weight):
                return False
        while (kind := full(MOST_OF_ALL, lambda held: held.total)) is not None:
            if not kind.total or not self._release_least(kind.largest(), math.inf):
                return False
        return True

    def _release_least(self, payer: Hashable, most: float) -> bool:
        """Release the least pin of `payer` if its weight is `most` or less."""
        least = self._of_payer[payer].least() if payer in self._of_payer else None
        if least is None or least.weight > most:
            return False
        self._release(least, "gave_way")
        return True

    def _new_tokens(self, node: Node) -> int:
        """Tokens on the path to `node` whose KV no pin keeps."""
        tokens = 0
        at = node
        while at.parent is not None and at not in self._below:
            tokens += at.tokens
            at = at.parent
        return tokens

    def _full(self, tokens: int, share: float, held: Callable[[Shares], int]) -> Shares | None:
        """The kind that has no room in a share for so many tokens, or a state, beside what is held;
        None if both fit.
        """
        assert self._cost is not None and self._room is not None
        kv, state = tokens * self._cost.kv_bytes_per_token, self._cost.state_bytes
        if self._room.states is None:
            return self._kv if held(self._kv) + kv + state > share * self._room.kv else None
        if held(self._kv) + kv > share * self._room.kv:
            return self._kv
        return self._states if held(self._states) + state > share * self._room.states else None
