"""Where requests leave what the history knows: at one of its nodes, or on the way to one."""

from __future__ import annotations

from typing import Final

FADE: Final = 1 - 1 / 512
"""The share of its weight that a request keeps when the next one of its kind comes."""
PRIOR: Final = 10.0
"""Requests that left at a node, before any did: a few requests say little."""


class Departures:
    """Counts of requests, over all tenants. Nodes that nothing has continued yet are counted apart
    from others. Old requests fade.
    """

    def __init__(self) -> None:
        self._at = [0.0, 0.0]
        self._between = [0.0, 0.0]

    def add(self, branches: int, *, between: bool) -> None:
        """A request left the history at a node that has had `branches` children, or (`between`) on
        the way to it.
        """
        kind = min(branches, 1)
        self._at[kind] *= FADE
        self._between[kind] *= FADE
        counts = self._between if between else self._at
        counts[kind] += 1.0

    def shares(self) -> tuple[float, float]:
        """Requests that left on the way to a node for each one that left at it: where nothing has
        continued the node, and elsewhere. 0 before any came.
        """
        of_leaf, of_other = (
            between / (at + PRIOR) for between, at in zip(self._between, self._at, strict=True)
        )
        return of_leaf, of_other
