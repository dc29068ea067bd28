"""Metrics of a router for Prometheus: its requests, and what it knows of its servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from sglang_hybrid.extensions.router.choosing import divided
from sglang_hybrid.extensions.router.follower import Follower
from sglang_hybrid.extensions.router.picker import Picker

PREFIX: Final = "sglang_hybrid_router:"

Numbers = Mapping[str, tuple[str, Callable[[Follower], float]]]
"""Metrics by name: the help text of /metrics, and the number for one server."""

COUNTERS: Final[Numbers] = {
    "sent": ("Requests that were sent there.", lambda of: of.load.sent),
    "right_predictions": ("Answers that hit what was expected.", lambda of: of.load.right),
    "wrong_predictions": ("Answers that hit less than was expected.", lambda of: of.load.wrong),
    "snapshots": ("How often all that the server holds was read.", lambda of: of.snapshots),
    "malformed": ("Messages of the server that could not be read.", lambda of: of.malformed),
}
GAUGES: Final[Numbers] = {
    "in_step": ("1 while it is known what the server holds.", lambda of: of.is_in_step),
    "reachable": ("1 while the server answers; others get nothing.", lambda of: of.is_reachable),
    "waiting": ("Requests that wait there, as the server says.", lambda of: of.load.waiting),
}


class RouterMetrics(Collector):
    """Reads the parts of a router whenever Prometheus asks. The label `server` is a server's URL;
    nothing tells of prompts or tenants.
    """

    def __init__(self, picker: Picker) -> None:
        self._picker = picker

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        about = (
            "Requests by outcome. looked_up: the prompt was looked up. unknown: no server could "
            "tell the prompt, so load alone decided. failed: no server could be reached."
        )
        picked = CounterMetricFamily(PREFIX + "requests", about, labels=["outcome"])
        for outcome in ("looked_up", "unknown", "failed"):
            picked.add_metric([outcome], getattr(self._picker, outcome))
        yield picked
        about = "Servers, and names of servers, of which nothing is known."
        yield GaugeMetricFamily(PREFIX + "lost_servers", about, len(self._picker.replicas.errors))
        followers = sorted(self._picker.replicas.followers.items())
        for kind, numbers in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for name, (about, read) in numbers.items():
                family = kind(PREFIX + name, about, labels=["server"])
                for server, follower in followers:
                    family.add_metric([server], read(follower))
                yield family


@contextmanager
def shown(picker: Picker, listen: str, port: int | None) -> Iterator[None]:
    """/metrics on the host of `listen` (host:port) and at `port` meanwhile; nothing without a port.
    Raises OSError if that is in use.
    """
    if port is None:
        yield
        return
    registry = CollectorRegistry()
    registry.register(RouterMetrics(picker))
    host, _ = divided(listen)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise OSError(f"/metrics cannot be at {host}:{port}: {error.strerror}") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
