"""Steps of a request that take long run in few threads, so that they do not keep other requests
waiting, which one event loop serves.

A request is long by its body, which the guard says (extensions/guard/body_bounds.py); without it
none is.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import cache, partial, wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LONG = 64 << 10
"""Bytes of a body from which a request is long."""

_long: ContextVar[bool] = ContextVar("long", default=False)


def set_long(is_long: bool) -> None:
    """Say whether the request that is served now is long."""
    _long.set(is_long)


def in_context(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Callable[[], T]:
    """`function(*args, **kwargs)` for a thread, which then serves the request that is served here
    (serving/http_tenants.py).
    """
    return partial(contextvars.copy_context().run, function, *args, **kwargs)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args, **kwargs)` in one of the threads for what takes long."""
    call = in_context(function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads(), call)


async def in_side_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `in_thread`, in one thread for what a client asks about what it has stored, which may take
    many seconds: no prompt waits for it.
    """
    call = in_context(function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_side_thread(), call)


async def in_thread_if_long(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `in_thread` for a request with a long body; for any other, the function itself."""
    if not _long.get():
        return function(*args, **kwargs)
    return await in_thread(function, *args, **kwargs)


def whole_in_thread_if_long(
    function: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorates a coroutine function, so that for a request with a long body it runs in a thread as
    a whole. The function must await nothing of its event loop.
    """

    @wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        coroutine = function(*args, **kwargs)
        return await (in_thread(asyncio.run, coroutine) if _long.get() else coroutine)

    return run


def threads() -> ThreadPoolExecutor | None:
    """The executor in which SGLang converts the current request: ours if its body is long, or None,
    which is the event loop's own.
    """
    return _threads() if _long.get() else None


@cache
def _side_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "side")


@cache
def _threads() -> ThreadPoolExecutor:
    """A quarter of the cores: their work is native code, which would take all of them."""
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4), "long-requests")
