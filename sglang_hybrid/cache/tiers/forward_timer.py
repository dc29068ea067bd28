"""Times the forwards of a device, whatever the scheduler does meanwhile.

Under the overlap scheduler a forward is launched while the one before it is computed, and its
result is looked at one step later, so a clock on the scheduler's thread says little of it. Here two
events go into the stream of the forwards: one that is reached when all earlier work is done, and
one that is reached when the forward is. Nobody waits for them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

UNDER_WAY: Final = 16
"""Forwards that may be under way at most; of more, the earliest is not timed."""


class Moment:
    """Stands in for an event where a forward is computed before its launch returns, as on a CPU."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def record(self, stream: object) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Moment) -> float:
        """Milliseconds from here to `end`, as torch counts them."""
        return (end._seconds - self._seconds) * 1e3


@dataclass(frozen=True, slots=True)
class TimedForward:
    """A forward of `flops` FLOPs in `stream`, between two events of torch's kind."""

    flops: float
    stream: Any
    begins: Any
    ends: Any


class ForwardTimer:
    """Times the forwards of one scheduler.

    observe: told the FLOPs and the seconds of each.
    """

    def __init__(self, observe: Callable[[float, float], None]) -> None:
        self._observe = observe
        self._under_way: deque[TimedForward] = deque(maxlen=UNDER_WAY)
        self._has_events = True

    def begin(self, flops: float, scheduler: Scheduler) -> TimedForward | None:
        """The next forward of `scheduler` is about to be launched. None where the device's events
        do not know the time.
        """
        self.collect()
        if not self._has_events:
            return None
        try:
            begins, ends = _event(scheduler), _event(scheduler)
        except (TypeError, NotImplementedError):
            logger.info("sglang_hybrid: the device's events know no time; prefills are not timed.")
            self._has_events = False
            return None
        forward = TimedForward(flops, _stream(scheduler), begins, ends)
        begins.record(forward.stream)
        return forward

    def on_launch(self, forward: TimedForward) -> None:
        """Called when all of `forward` is in its stream."""
        forward.ends.record(forward.stream)
        self._under_way.append(forward)

    def collect(self) -> None:
        """Look at the forwards that have been computed."""
        while self._under_way and self._under_way[0].ends.query():
            forward = self._under_way.popleft()
            self._observe(forward.flops, forward.begins.elapsed_time(forward.ends) / 1e3)


def _event(scheduler: Scheduler) -> Any:
    if str(scheduler.device) == "cpu":
        return Moment()
    return scheduler.device_module.Event(enable_timing=True)


def _stream(scheduler: Scheduler) -> Any:
    """The stream on which forwards are launched (scheduler.py, run_batch)."""
    if str(scheduler.device) == "cpu":
        return None
    if scheduler.enable_overlap:
        return scheduler.forward_stream
    return scheduler.device_module.current_stream()
