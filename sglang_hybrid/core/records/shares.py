"""How much each tenant holds of something bounded, and which tenant holds most.

When a bound is reached, the tenant with the largest part gives way first. A tenant that sends a
flood therefore replaces its own entries and not those of the others.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from sglang_hybrid.core.records.changing_queue import ChangingQueue

NOBODY: Final = object()
"""No tenant; None may be one."""


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
        self._largest_first: ChangingQueue[Hashable] = ChangingQueue(
            lambda tenant: (-self._amounts[tenant], self._order[tenant])
        )

    def __len__(self) -> int:
        return len(self._amounts)

    def of(self, tenant: Hashable) -> int:
        """What `tenant` holds."""
        return self._amounts.get(tenant, 0)

    def change(self, tenant: Hashable, by: int) -> None:
        """`tenant` holds `by` more, or less if `by` is negative; at 0 it is forgotten."""
        amount = self.of(tenant) + by
        self.total += by
        if amount:
            if tenant not in self._order:
                self._order[tenant] = self._came
                self._came += 1
            self._amounts[tenant] = amount
            self._largest_first.put(tenant)
        elif tenant in self._amounts:
            self._largest_first.drop(tenant)
            del self._amounts[tenant], self._order[tenant]

    def largest(self, besides: Hashable = NOBODY) -> Hashable:
        """The tenant that holds most, `besides` left out. Raises KeyError if there is none."""
        queue = self._largest_first
        left_out = besides in self._amounts
        if left_out:
            queue.drop(besides)
        found = queue.least() if len(queue) else NOBODY
        if left_out:
            queue.put(besides)
        if found is NOBODY:
            raise KeyError("no tenant holds anything")
        return found
