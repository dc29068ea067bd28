"""Demand for nodes: a node that waiting or running requests will resume from is evicted last."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Final, Generic

from sglang_hybrid.core.queue.waiting import Name
from sglang_hybrid.core.records.nodes import Node

WAITS: Final = 1
RUNS: Final = 2


class DemandForNodes(Generic[Name]):
    """CaR's score of a cached prefix (CaR III B 3): a request adds 1 to the node that it would
    resume from when it enters the window, 1 more when it runs, and takes both away when it ends.

    The paper evicts the lowest score; all nodes without waiting requests have the same one. So the
    score is a rank above a policy's: `Pool` evicts nodes without demand first, by its policy.
    Demand is no lock. Where nothing else is left to evict, the node with the lowest demand is
    evicted, and a running request never fails because of the demand of another one.

    move: adds to the demand of a node; NodeTree.move_demand.
    """

    def __init__(self, move: Callable[[Node, int], None]) -> None:
        self._move = move
        self._held: dict[Name, tuple[Node, int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def on_wait(self, name: Name, node: Node | None) -> None:
        """`name` is in the window and would resume from `node` now; None: from nothing."""
        self._hold(name, node, WAITS)

    def on_start(self, name: Name) -> None:
        """`name` runs."""
        node, _ = self._held.get(name, (None, 0))
        self._hold(name, node, RUNS)

    def on_request_end(self, name: Name) -> None:
        """Called when `name` has ended, was aborted, or is in the window no more."""
        self._hold(name, None, 0)

    def keep_waiting(self, names: Container[Name]) -> None:
        """Take away the demand of waiting requests that are not among `names`."""
        waiting = [name for name, (_, points) in self._held.items() if points == WAITS]
        for name in waiting:
            if name not in names:
                self.on_request_end(name)

    def forget_all(self) -> None:
        """Forget the nodes, after the tree was emptied."""
        self._held.clear()

    def _hold(self, name: Name, node: Node | None, points: int) -> None:
        before, had = self._held.get(name, (None, 0))
        if before is node and had == points:
            return
        if before is not None:
            self._move(before, -had)
            del self._held[name]
        if node is not None:
            self._move(node, points)
            self._held[name] = (node, points)
