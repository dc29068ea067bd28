"""Causes of lost hits in tiers: what became of each state that a request could have resumed from.

A position is identified by a hash of all tokens up to it, so that one that was evicted takes only a
few bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum

from sglang_hybrid.core.records.nodes import Node
from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.extensions.lab.simulation.token_tree import Hashes


class Loss(Enum):
    """The reason why a request computed tokens up to a position at which there had been a state, or
    at which one found no room.
    """

    NO_ROOM = "no room"  # it did not fit beside running requests when it was computed
    NOT_WRITTEN = "not written"  # it left a tier, and was not worth its copy in the next
    HOST = "dropped from the host"
    DISK = "dropped from the disk"
    COMPUTED = "computing was faster"  # it is stored, and loading it would have taken longer


class Losses:
    """Follows the states of one cache in tiers.

    tokens: lost in all requests, by what became of the deepest state that each could have resumed
    from. reachable: of each request, how far it would have resumed if no state had been lost.
    """

    def __init__(self) -> None:
        self.tokens: Counter[Loss] = Counter()
        self.reachable: list[int] = []
        self._why: dict[int, Loss | None] = {}  # of a position; None while it is stored
        self._depths: Counter[int] = Counter()  # of positions
        self._of_node: dict[Node, int] = {}

    def stored(self, hashes: Hashes, nodes: Iterable[Node]) -> None:
        """Note states at these nodes of a sequence whose prefixes have these hashes [n]."""
        for node in nodes:
            position = self._of_node[node] = int(hashes[node.depth - 1])
            self._note(position, node.depth, None)

    def refused(self, hashes: Hashes, depths: Iterable[int]) -> None:
        """Note that states at these depths of a sequence found no room."""
        for depth in depths:
            position = int(hashes[depth - 1])
            if self._why.get(position, Loss.NO_ROOM) is not None:
                self._note(position, depth, Loss.NO_ROOM)

    def lost(self, node: Node, from_tier: Tier, below: Tier | None) -> None:
        """Note that no tier has the state of `node`; `from_tier` had it last, with `below` next."""
        position = self._of_node.pop(node, None)
        if position is not None:
            in_lowest = Loss.HOST if from_tier is Tier.HOST else Loss.DISK
            self._why[position] = in_lowest if below is None else Loss.NOT_WRITTEN

    def request(self, hashes: Hashes, hit: int) -> None:
        """A prompt whose usable prefixes have these hashes [n] hit `hit` tokens."""
        deepest = next(
            (
                depth
                for depth in sorted(self._depths, reverse=True)
                if hit < depth <= len(hashes) and int(hashes[depth - 1]) in self._why
            ),
            hit,
        )
        self.reachable.append(deepest)
        if deepest > hit:
            why = self._why[int(hashes[deepest - 1])]
            self.tokens[why or Loss.COMPUTED] += deepest - hit

    def _note(self, position: int, depth: int, why: Loss | None) -> None:
        if position not in self._why:
            self._depths[depth] += 1
        self._why[position] = why
