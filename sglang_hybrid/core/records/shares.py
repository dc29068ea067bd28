"""The amounts that payers hold of something bounded, and the payer that holds most.

A tenant and its payer need not be the same. A tenant shares what was computed for it with nobody
else; its payer is charged for it. Several tenants may have one payer, since a client that is
known by one name may name a `cache_salt` of its own with each request. When a bound is reached, the
payer with the largest part gives way first, so one that sends a flood replaces its own entries.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from sglang_hybrid.core.records.changing_queue import ChangingQueue

NOBODY: Final = object()
"""Stands for no payer; None may be a payer."""


def payer_of(tenant: Hashable) -> Hashable:
    """The payer of what a tenant holds: its attribute `payer`, or else the tenant itself."""
    return getattr(tenant, "payer", tenant)


class Shares:
    """Amounts by payer; amounts are whole numbers of 0 or more in a unit of the caller's choice.

    The answer depends only on the order of the calls, so that all ranks give the same one: of equal
    amounts the payer that came first counts as larger.
    """

    def __init__(self) -> None:
        self.total = 0
        self._amounts: dict[Hashable, int] = {}
        self._order: dict[Hashable, int] = {}
        self._came = 0
        self._largest_first: ChangingQueue[Hashable] = ChangingQueue(
            lambda payer: (-self._amounts[payer], self._order[payer])
        )
        self._changed: dict[Hashable, None] = {}  # payers whose place in the queue is out of date

    def __len__(self) -> int:
        return len(self._amounts)

    def of(self, payer: Hashable) -> int:
        """The amount that `payer` holds."""
        return self._amounts.get(payer, 0)

    def change(self, payer: Hashable, by: int) -> None:
        """`payer` holds `by` more, or less if `by` is negative; at 0 it is forgotten."""
        amount = self._amounts.get(payer, 0) + by
        self.total += by
        if amount:
            if payer not in self._order:
                self._order[payer] = self._came
                self._came += 1
            self._amounts[payer] = amount
            self._changed[payer] = None
        elif payer in self._amounts:
            del self._amounts[payer], self._order[payer]
            self._changed.pop(payer, None)
            if payer in self._largest_first:
                self._largest_first.drop(payer)

    def largest(self, besides: Hashable = NOBODY) -> Hashable:
        """The payer that holds most, `besides` left out. Raises KeyError if there is none."""
        queue = self._largest_first
        for payer in self._changed:
            queue.put(payer)
        self._changed.clear()
        left_out = besides in self._amounts
        if left_out:
            queue.drop(besides)
        found = queue.least() if len(queue) else NOBODY
        if left_out:
            queue.put(besides)
        if found is NOBODY:
            raise KeyError("nobody holds anything")
        return found
