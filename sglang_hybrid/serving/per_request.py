"""Values that are kept on a request itself, and are freed with it."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

Value = TypeVar("Value")
_numbers = count()


class PerRequest(Generic[Value]):
    """One value for each request that has one.

    The scheduler asks for some of these for every waiting request in every round, and a
    WeakKeyDictionary takes two to three times as long.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the values of all requests."""
        self._name = f"_sglang_hybrid_{next(_numbers)}"

    def get(self, req: Req) -> Value | None:
        """The value of `req`; None if it has none."""
        value: Value | None = req.__dict__.get(self._name)
        return value

    def pop(self, req: Req) -> Value | None:
        """The value of `req`, which has none from now on; None if it had none."""
        value: Value | None = req.__dict__.pop(self._name, None)
        return value

    def __setitem__(self, req: Req, value: Value) -> None:
        req.__dict__[self._name] = value

    def __contains__(self, req: Req) -> bool:
        return self._name in req.__dict__
