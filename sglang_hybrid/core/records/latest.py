"""The latest values of each tenant, within bounds on their number and size over all tenants."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from sglang_hybrid.core.records.shares import Shares

Value = TypeVar("Value")


class Latest(Generic[Value]):
    """Values by tenant and name. When there are too many, the tenant that holds most values, or
    most bytes, loses its oldest value.

    most_bytes, most_values: of all tenants together; None: their number has no bound.
    """

    def __init__(self, most_bytes: int, most_values: int | None = None) -> None:
        self.most_bytes = most_bytes
        self.most_values = most_values
        self._counts = Shares()
        self._bytes = Shares()
        self._kept: dict[Hashable, OrderedDict[str, tuple[Value, int]]] = {}

    def __len__(self) -> int:
        return self._counts.total

    def put(self, tenant: Hashable, name: str, value: Value, size: int) -> None:
        """Keep a value of `size` bytes in place of an earlier one of its name. A value that is
        larger than the bound is not kept.
        """
        self._drop(tenant, name)
        if size > self.most_bytes:
            return
        self._kept.setdefault(tenant, OrderedDict())[name] = value, size
        self._counts.change(tenant, 1)
        self._bytes.change(tenant, size)
        while self.most_values is not None and len(self) > self.most_values:
            self._drop_oldest(self._counts.largest())
        while self._bytes.total > self.most_bytes:
            self._drop_oldest(self._bytes.largest())

    def get(self, tenant: Hashable, name: str) -> Value | None:
        """The value of this name, None if it is not kept."""
        found = self._kept.get(tenant, OrderedDict()).get(name)
        return None if found is None else found[0]

    def of(self, tenant: Hashable) -> list[Value]:
        """All values of a tenant, the oldest first."""
        return [value for value, _ in self._kept.get(tenant, OrderedDict()).values()]

    def all(self) -> Iterator[tuple[Hashable, str, Value]]:
        """Every value with its tenant and name, a tenant's oldest first."""
        for tenant, values in self._kept.items():
            for name, (value, _) in values.items():
                yield tenant, name, value

    def _drop_oldest(self, tenant: Hashable) -> None:
        self._drop(tenant, next(iter(self._kept[tenant])))

    def _drop(self, tenant: Hashable, name: str) -> None:
        found = self._kept.get(tenant, OrderedDict()).pop(name, None)
        if found is not None:
            self._counts.change(tenant, -1)
            self._bytes.change(tenant, -found[1])
            if not self._kept[tenant]:
                del self._kept[tenant]
