"""Streams whose first item decides between an error and an answer (patch 0015)."""

from collections.abc import AsyncIterator
from typing import TypeVar

Item = TypeVar("Item")


async def with_first_item(stream: AsyncIterator[Item]) -> AsyncIterator[Item]:
    """`stream`, once its first item is there. Raises what `stream` raises before that.

    An HTTP response has its status before its first item, so what is wrong with the request must be
    known by then.
    """
    try:
        first = [await anext(stream)]
    except StopAsyncIteration:
        first = []

    async def all_items() -> AsyncIterator[Item]:
        for item in first:
            yield item
        async for item in stream:
            yield item

    return all_items()
