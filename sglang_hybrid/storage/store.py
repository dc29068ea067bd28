"""The interface of a place that keeps objects for SGLang's third tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sglang_hybrid.extensions.disk.folder import RankFolder
    from sglang_hybrid.extensions.disk.object_file import Bytes


class Store(Protocol):
    """Objects that are found by a kind and a key. Every method may be called by any thread and
    raises nothing for what the place does: what cannot be read is not there.

    in_use: neither off nor closed. budget: bytes that objects may take; 0 is no bound.
    """

    budget: int

    @property
    def in_use(self) -> bool: ...

    @property
    def folder(self) -> RankFolder | None:
        """The folder where this rank keeps more than objects; None where it cannot."""
        ...

    def put(self, kind: str, keys: Sequence[str], contents: Sequence[Bytes]) -> bool:
        """Keep objects of one size. Returns whether all are there now."""
        ...

    def get(self, kind: str, keys: Sequence[str], buffers: Sequence[Bytes]) -> list[bool]:
        """Read objects into buffers of their size. Returns which were there and whole; the other
        buffers are undefined.
        """
        ...

    def contains(self, kind: str, keys: Sequence[str]) -> list[bool]:
        """A mask of the objects that are there; they count as used."""
        ...

    def knows(self, kind: str, keys: Sequence[str]) -> list[bool]:
        """A mask of the objects that are there; asking for them is no use of them."""
        ...

    def clear(self) -> None:
        """Forget what this store may forget."""
        ...

    def turn_off(self, why: str) -> None:
        """Use it no more, and let the log say why."""
        ...

    def close(self) -> None: ...

    def info(self) -> dict[str, Any]:
        """Counts over all tenants, for /server_info."""
        ...
