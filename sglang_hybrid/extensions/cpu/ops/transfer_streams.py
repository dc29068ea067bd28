"""Streams and events for copies between SGLang's device pools and its host pools, without a device.

`torch.cpu` has both in name only. Here a copy is done when its function returns, and an event
knows when. With a simulated link (SGLANG_HYBRID_SIMULATE_BANDWIDTH) its bytes arrive later, at the
link's speed, and what asks for them waits as it would on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sglang_hybrid.core.tiers.rates import Link

host_link: Link | None = None
"""The simulated link to host memory; None: copies take as long as they take."""


class Stream:
    """A queue of copies that arrive one after the other. `arrived`: when the copies begun so far
    will all have arrived, in seconds of the monotonic clock; in the past without a simulated link.
    is_host: the host is the device, so a wait is over when its call returns.
    """

    is_host: Final = True

    def __init__(self, priority: int = -1) -> None:
        self.arrived = 0.0

    def begin(self) -> None:
        """A submission of copies begins; the link's latency passes before the first byte."""
        if host_link is not None:
            self.arrived = max(self.arrived, time.monotonic()) + host_link.latency

    def carry(self, size: int) -> None:
        """`size` bytes follow those already under way."""
        if host_link is not None:
            self.arrived = max(self.arrived, time.monotonic()) + size / host_link.bandwidth

    def wait_stream(self, stream: object) -> None:
        """Do nothing: other streams' work has been computed when they were given it."""

    def wait_event(self, event: Event) -> None:
        """Wait until the event's copies have arrived."""
        event.synchronize()

    def synchronize(self) -> None:
        """Wait until all copies have arrived."""
        _sleep_until(self.arrived)


class Event:
    """A point in a stream: reached when the copies recorded before it have arrived."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._reached = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._reached = max(time.monotonic(), (stream or current_stream()).arrived)

    def query(self) -> bool:
        """True if the point is reached, or none was recorded."""
        return time.monotonic() >= self._reached

    def synchronize(self) -> None:
        _sleep_until(self._reached)

    def wait(self, stream: Stream | None = None) -> None:
        """Do nothing: work is computed before a copy begins."""

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this point to `end`, as torch counts them."""
        return (end._reached - self._reached) * 1e3


_compute: Final = Stream()
_current: list[Stream] = [_compute]


def current_stream(device: object = None) -> Stream:
    """The innermost stream of `stream`, or that of the model's computation."""
    return _current[-1]


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    """One submission: copies inside go through `chosen`."""
    _current.append(chosen)
    chosen.begin()
    try:
        yield
    finally:
        _current.pop()


def simulate(link: Link | None) -> None:
    """Let copies in this process take the time of `link` from now on, or their own."""
    global host_link
    host_link = link


def _sleep_until(moment: float) -> None:
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)
