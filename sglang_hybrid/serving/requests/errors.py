"""The error of a request that is not done, and mistakes in a body that are no errors of ours."""

from collections.abc import Callable
from functools import wraps
from http import HTTPStatus
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Refused(ValueError):
    """The server refuses a request. status_code: the HTTP status of the answer."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status_code = status


def mistakes_are_value_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates what reads a body before its types are known: an error of types is a ValueError."""

    @wraps(function)
    def read(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (AttributeError, TypeError, LookupError) as error:
            raise ValueError(f"a field has another type than it should ({error}).") from None

    return read
