"""Counts of the waiting queue, and their metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_hybrid.core.queue.waiting import Bound, ReuseKind, Waiting
from sglang_hybrid.serving.telemetry.metric import Metric

if TYPE_CHECKING:
    from sglang_hybrid.core.queue.loads import LoadCounts

PREFIX = "sglang_hybrid:schedule_"


@dataclass
class ScheduleStats:
    """Counts of requests that waited at the front of the queue, all tenants together.

    started: by what they could reuse. overtaken: how often requests were overtaken, added up.
    most_overtaken, longest_wait: of one request; seconds. waited: seconds, added up. bound_reached:
    requests that were overtaken no more, by which bound was reached. aborted: while they waited.
    front: requests that are there now, as far as the last round has seen them. loads: those that
    began before their requests' turns, None where there is no host; expected: loads for sessions
    that were expected back.
    """

    started: Counter[str] = field(default_factory=Counter)
    overtaken: int = 0
    most_overtaken: int = 0
    waited: float = 0.0
    longest_wait: float = 0.0
    bound_reached: Counter[str] = field(default_factory=Counter)
    aborted: int = 0
    front: int = 0
    loads: LoadCounts | None = None

    def on_start(self, waiting: Waiting[Any], bound: Bound, now: float) -> None:
        """A request was taken from the front."""
        reuse = ReuseKind.NOTHING if waiting.prospect is None else waiting.prospect.reuse
        self.started[reuse.name.lower()] += 1
        self.overtaken += waiting.overtaken
        self.most_overtaken = max(self.most_overtaken, waiting.overtaken)
        seconds = max(0.0, now - waiting.arrived)
        self.waited += seconds
        self.longest_wait = max(self.longest_wait, seconds)
        if waiting.overtaken >= bound.times:
            self.bound_reached["overtaken"] += 1
        elif seconds >= bound.seconds:
            self.bound_reached["seconds"] += 1

    def as_dict(self) -> dict[str, Any]:
        """The values for /server_info."""
        return {
            "front": self.front,
            "started": dict(self.started),
            "overtaken": self.overtaken,
            "most_overtaken": self.most_overtaken,
            "waited_seconds": round(self.waited, 3),
            "longest_wait_seconds": round(self.longest_wait, 3),
            "bound_reached": dict(self.bound_reached),
            "aborted": self.aborted,
            "loads": None if self.loads is None else asdict(self.loads),
        }


LOADS = {
    "started": "Loads from the host that began before their requests' turns.",
    "used": "Of these, those that were complete at the turn.",
    "late": "Of these, those that were not.",
    "cancelled": "Of these, those whose requests went, or that were evicted again.",
    "expected": "Loads for sessions that were expected back.",
    "on_turn": "Loads that began on their requests' turns only.",
    "no_time": "Of these, those whose requests waited less than the load takes.",
    "no_room": "Of these, those for which the device had no room before.",
    "loaded_bytes": "Bytes of loads that began before their requests' turns.",
    "wasted_bytes": "Bytes of those that no request used.",
}


def schedule_metrics(stats: ScheduleStats) -> Iterator[Metric]:
    """Metrics of waiting requests."""
    yield Metric(
        PREFIX + "started",
        "Requests taken from the front of the queue, by what they could reuse.",
        lambda: stats.started,
        ("reuse",),
    )
    yield Metric(
        PREFIX + "bound_reached",
        "Requests that were overtaken no more, by which bound was reached.",
        lambda: stats.bound_reached,
        ("bound",),
    )
    about = "How often waiting requests were overtaken by later ones."
    yield Metric(PREFIX + "overtaken", about, lambda: stats.overtaken)
    about = "Seconds that requests waited in the queue."
    yield Metric(PREFIX + "waited_seconds", about, lambda: stats.waited)
    for name, about in {
        "front": "Requests at the front of the queue.",
        "most_overtaken": "How often the request that was overtaken most was.",
    }.items():
        yield Metric(PREFIX + name, about, partial(getattr, stats, name), is_gauge=True)
    about = "Seconds of the longest wait in the queue."
    yield Metric(PREFIX + "longest_wait_seconds", about, lambda: stats.longest_wait, is_gauge=True)
    if stats.loads is not None:
        for name, about in LOADS.items():
            read = partial(lambda name: getattr(stats.loads, name), name)
            yield Metric(f"{PREFIX}loads_{name}", about, read)
