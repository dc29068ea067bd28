"""The latest values of each tenant, within bounds on their number and size over all tenants."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from sglang_hybrid.core.records.shares import Shares, payer_of

Value = TypeVar("Value")


class Latest(Generic[Value]):
    """Values by tenant and name. When there are too many, the payer that holds most values, or most
    bytes, loses its oldest value.

    most_bytes, most_values: of all tenants together; None: their number has no bound.
    """

    def __init__(self, most_bytes: int, most_values: int | None = None) -> None:
        self.most_bytes = most_bytes
        self.most_values = most_values
        self._counts = Shares()
        self._bytes = Shares()
        self._kept: dict[Hashable, OrderedDict[tuple[Hashable, str], tuple[Value, int]]] = {}

    def __len__(self) -> int:
        return self._counts.total

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return self._bytes.total

    def put(self, tenant: Hashable, name: str, value: Value, size: int) -> None:
        """Keep a value of `size` bytes in place of an earlier one of its name. A value that is
        larger than the bound is not kept.
        """
        payer = payer_of(tenant)
        self._drop(payer, (tenant, name))
        if size > self.most_bytes:
            return
        self._kept.setdefault(payer, OrderedDict())[tenant, name] = value, size
        self._counts.change(payer, 1)
        self._bytes.change(payer, size)
        while self.most_values is not None and len(self) > self.most_values:
            self._drop_oldest(self._counts.largest())
        while self._bytes.total > self.most_bytes:
            self._drop_oldest(self._bytes.largest())

    def drop(self, tenant: Hashable, name: str) -> None:
        """Forget the value of this name, if it is kept."""
        self._drop(payer_of(tenant), (tenant, name))

    def get(self, tenant: Hashable, name: str) -> Value | None:
        """The value of this name, None if it is not kept."""
        found = self._kept.get(payer_of(tenant), OrderedDict()).get((tenant, name))
        return None if found is None else found[0]

    def of(self, tenant: Hashable) -> list[Value]:
        """All values of a tenant, the oldest first."""
        kept = self._kept.get(payer_of(tenant), OrderedDict())
        return [value for (owner, _), (value, _) in kept.items() if owner == tenant]

    def newest(self, tenant: Hashable) -> Iterator[Value]:
        """The values of a tenant, the newest first, as far as they are asked for."""
        kept = self._kept.get(payer_of(tenant), OrderedDict())
        return (value for (owner, _), (value, _) in reversed(kept.items()) if owner == tenant)

    def all(self) -> Iterator[tuple[Hashable, str, Value]]:
        """Every value with its tenant and name, a payer's oldest first."""
        for values in self._kept.values():
            for (tenant, name), (value, _) in values.items():
                yield tenant, name, value

    def _drop_oldest(self, payer: Hashable) -> None:
        self._drop(payer, next(iter(self._kept[payer])))

    def _drop(self, payer: Hashable, key: tuple[Hashable, str]) -> None:
        found = self._kept.get(payer, OrderedDict()).pop(key, None)
        if found is not None:
            self._counts.change(payer, -1)
            self._bytes.change(payer, -found[1])
            if not self._kept[payer]:
                del self._kept[payer]
