"""A server in which it shows that something is broken when its cache is flushed: on all ranks or,
with other ranks than the first, on those only.
"""

from typing import Any

from sglang_hybrid import launch_server  # first: its hook must see every import of SGLang

# isort: split
from sglang.srt.managers.io_struct import FlushCacheReqInput
from sglang.srt.runtime_context import get_parallel

from sglang_hybrid.extensions.guard import control
from sglang_hybrid.extensions.guard.refusals import REFUSALS


def flush(scheduler: Any, request: FlushCacheReqInput) -> None:
    if get_parallel().tp_size == 1:
        raise AssertionError("a slot has two owners")
    if get_parallel().tp_rank > 0:
        raise KeyError("no such slot")


control.REFUSALS = (*REFUSALS, (FlushCacheReqInput, flush))  # type: ignore[attr-defined]

if __name__ == "__main__":
    launch_server.command()
