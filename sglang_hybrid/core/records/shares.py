"""How much each tenant holds of something bounded, and which tenant holds most.

When a bound is reached, the tenant with the largest part gives way first. A tenant that sends a
flood therefore replaces its own entries and not those of the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Final

STALE: Final = 64
"""Outdated heap entries that are kept before the heap is built anew."""

NOBODY: Final = object()
"""A tenant that there is not."""


class Shares:
    """Amounts by tenant; amounts are whole numbers of 0 or more in a unit of the caller's choice.

    The answer depends only on the order of the calls, so that all ranks give the same one: of equal
    amounts the tenant that came first counts as larger.
    """

    def __init__(self) -> None:
        self.total = 0
        self._amounts: dict[Hashable, int] = {}
        self._order: dict[Hashable, int] = {}
        self._came = 0
        self._heap: list[tuple[int, int, Hashable]] = []

    def __len__(self) -> int:
        return len(self._amounts)

    def of(self, tenant: Hashable) -> int:
        """What `tenant` holds."""
        return self._amounts.get(tenant, 0)

    def change(self, tenant: Hashable, by: int) -> None:
        """`tenant` holds `by` more, or less if `by` is negative; at 0 it is forgotten."""
        amount = self._amounts.get(tenant, 0) + by
        self.total += by
        if amount == 0:
            self._amounts.pop(tenant, None)
            self._order.pop(tenant, None)
            return
        if tenant not in self._order:
            self._order[tenant] = self._came
            self._came += 1
        self._amounts[tenant] = amount
        heapq.heappush(self._heap, (-amount, self._order[tenant], tenant))
        if len(self._heap) > 2 * len(self._amounts) + STALE:
            self._heap = [(-held, self._order[name], name) for name, held in self._amounts.items()]
            heapq.heapify(self._heap)

    def largest(self, besides: Hashable = NOBODY) -> Hashable:
        """The tenant that holds most, `besides` left out. Raises KeyError if there is none."""
        skipped = None
        self._drop_outdated()
        while self._heap and self._heap[0][2] == besides:
            skipped = heapq.heappop(self._heap)
            self._drop_outdated()
        found = self._heap[0][2] if self._heap else NOBODY
        if skipped is not None:
            heapq.heappush(self._heap, skipped)
        if found is NOBODY:
            raise KeyError("no tenant holds anything")
        return found

    def _drop_outdated(self) -> None:
        while self._heap:
            held, order, tenant = self._heap[0]
            if self._order.get(tenant) == order and self._amounts[tenant] == -held:
                return
            heapq.heappop(self._heap)
