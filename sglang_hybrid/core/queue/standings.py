"""What waiting and running requests will resume from is evicted after everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Final, Generic

from sglang_hybrid.core.queue.waiting import Name
from sglang_hybrid.core.records.nodes import Node

WAITS: Final = 1
RUNS: Final = 2


class Standings(Generic[Name]):
    """CaR's score of a cached prefix (CaR III B 3): a request adds 1 to the node that it would
    resume from when it enters the window, 1 more when it runs, and takes both away when it ends.

    The paper evicts the lowest score; all that nobody waits for has the same one. So the score is a
    rank above a policy's: `Pool` evicts what has no standing first, by its policy. A standing is no
    lock. Where nothing else is left to evict, the lowest standing goes, and a request that runs
    never fails for another one's standing.

    Args:
        move: changes the standing of a node; NodeTree.move_standing.
        held: what requests hold, a node and how much of its standing each.
    """

    def __init__(
        self,
        move: Callable[[Node, int], None],
        held: MutableMapping[Name, tuple[Node, int]] | None = None,
    ) -> None:
        self._move = move
        self._held: MutableMapping[Name, tuple[Node, int]] = {} if held is None else held

    def __len__(self) -> int:
        return len(self._held)

    def waits(self, name: Name, node: Node | None) -> None:
        """`name` is in the window and would resume from `node` now; None: from nothing."""
        self._hold(name, node, WAITS)

    def runs(self, name: Name) -> None:
        """`name` was taken from the window."""
        node, _ = self._held.get(name, (None, 0))
        self._hold(name, node, RUNS)

    def ends(self, name: Name) -> None:
        """`name` has ended, was aborted, or is in the window no more."""
        self._hold(name, None, 0)

    def only(self, names: Iterable[Name]) -> None:
        """Nobody waits but `names`: of all others that wait, the standing is taken away."""
        stay = set(names)
        gone = [name for name, (_, points) in self._held.items() if points == WAITS]
        for name in gone:
            if name not in stay:
                self.ends(name)

    def forget_all(self) -> None:
        """The tree was emptied."""
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
