"""Prompts that the process which tokenizes has received and not sent to a scheduler yet.

Each prompt that is sent says how many others are on the way (`serving.send_arrival`), so that an
idle scheduler need not guess whether a burst goes on (`checkpoints/batching_window.py`). A body's
prompts are counted under the task that handles the body: what is never sent, because the body is
refused or its client leaves, ends with its task.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

MOST = 64
"""More tasks than this are not added up: a scheduler waits for no larger burst at once."""

TURNS = 4
"""Turns of an event loop from a connection that arrives to the prompts of its body."""

_unsent: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()


def count() -> int:
    """Prompts on the way, of the first `MOST` bodies."""
    first = list(islice(_unsent.items(), MOST))
    return sum(prompts for task, prompts in first if not task.done())


def on_received(body: Any) -> None:
    """`body` (SGLang's GenerateReqInput or EmbeddingReqInput) is about to be tokenized.

    Several samples of one prompt are not counted: SGLang computes the prompt first, under an id of
    its own, and all samples hit it.
    """
    task = asyncio.current_task()
    if task is None or getattr(body, "parallel_sample_num", 1) > 1:
        return
    prompts = 1 if getattr(body, "is_single", True) else len(body.rid)
    _unsent[task] = _unsent.get(task, 0) + prompts


async def read_arrivals() -> None:
    """Let the event loop read what has already reached this process, so that it is counted."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


def on_send(prompts: int) -> None:
    """So many prompts of the body that this task handles are about to be sent."""
    task = asyncio.current_task()
    left = _unsent.pop(task, 0) - prompts if task is not None else 0
    if task is not None and left > 0:
        _unsent[task] = left
