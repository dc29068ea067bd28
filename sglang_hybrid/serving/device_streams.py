"""Work for the device in an order, without a wait on the host.

A GPU runs what the host gives it later, in streams: each does one thing after the other, different
ones at the same time. The scheduler's thread has four: its own *current* stream, for indices; that
of the forwards (the current one too without overlap scheduling); and one for copies in each
direction, SGLang's `L2TransferEngine`. Forwards and loads begin behind what the current stream was
given before, loads and backups behind the forwards too (scheduler.py, run_batch;
cache_controller.py, start_writing and start_loading). So what must come before all that uses some
memory next is waited for by the forwards' stream.

The current stream itself never waits for a copy: where SGLang moves indices from memory that is not
pinned, the host thread would wait with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch


def order_behind(event: Any, stream: Any = None) -> None:
    """Let what `stream` is given from now on begin after `event`, one of SGLang's transfers.
    stream: that of the forwards; None: the current one.
    """
    (stream or _transfers().current_stream()).wait_event(event)


@contextmanager
def on_stream(stream: Any, *reads: torch.Tensor) -> Iterator[None]:
    """A context in which `stream` is the current stream; what it is given there begins after what
    the stream that was current before has been given. stream: None if it is the current one
    already. reads: tensors of the stream before that `stream` reads.
    """
    if stream is None:
        yield
        return
    stream.wait_stream(_transfers().current_stream())
    with _transfers().stream(stream):
        yield
    for tensor in reads:
        tensor.record_stream(stream)  # their memory is not used again before


def to_device(values: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`values` of the host on `device`, where the current stream finds them. The host does not wait
    for what that stream does before, as it would to copy from memory that is not pinned.
    """
    if torch.device(device).type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def put_integers(device: torch.device, *values: Sequence[int]) -> list[torch.Tensor]:
    """Lists of integers as int64 on the device, all in one copy."""
    moved = to_device(torch.tensor(list(chain(*values)), dtype=torch.int64), device)
    return list(torch.split(moved, [len(value) for value in values]))


def host_is_device() -> bool:
    """True if the device is the host, as on the CPU platform: what a stream there waits for has
    happened when the call returns.
    """
    return bool(getattr(_transfers().current_stream(), "is_host", False))


def _transfers() -> Any:
    """Streams and events as SGLang's transfers use them; those of the CPU platform are its own."""
    from sglang.srt.mem_cache import l2_transfer

    return l2_transfer.device_module
