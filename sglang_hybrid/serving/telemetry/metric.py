"""Prometheus metrics that follow numbers of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Labels = str | tuple[str, ...]
"""The value of a metric's one label, or the values of its labels."""


@dataclass(frozen=True)
class Metric:
    """One metric and the numbers that it follows.

    Args:
        name: with its prefix; Prometheus adds `_total` to a counter's.
        about: the sentence in /metrics.
        read: the number now, or numbers by labels; None as long as there is none.
        labels: names of the labels.
        is_gauge: the number may fall; a counter's only grows.
    """

    name: str
    about: str
    read: Callable[[], float | Mapping[Any, float] | None]
    labels: tuple[str, ...] = ()
    is_gauge: bool = False


class Metrics:
    """Metrics in Prometheus's registry, each from the first time that it has a number.

    labels: names and values of the labels that all of them have.
    """

    def __init__(
        self, metrics: Iterable[Metric], labels: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._metrics = list(metrics)
        self._labels = labels
        self._registered: dict[str, Any] = {}
        self._exported: dict[tuple[str, Labels], float] = {}
        self.update()

    def update(self) -> None:
        """Bring all of them up to their numbers."""
        for metric in self._metrics:
            found = metric.read()
            if found is None:
                continue
            if metric.name not in self._registered:
                self._registered[metric.name] = _register(metric, self._labels)
            values = found if isinstance(found, Mapping) else {(): found}
            for labels, value in values.items():
                self._set(metric, labels, value)

    def _set(self, metric: Metric, labels: Labels, value: float) -> None:
        before = self._exported.get((metric.name, labels))
        if value == before:
            return
        self._exported[metric.name, labels] = value
        one = self._registered[metric.name]
        values = (*self._labels.values(), *((labels,) if isinstance(labels, str) else labels))
        if values:
            one = one.labels(*values)
        if metric.is_gauge:
            one.set(value)
        else:
            one.inc(value - (before or 0))


def _register(metric: Metric, common: Iterable[str]) -> Any:
    # Imported here: prometheus_client chooses its multiprocess mode at import, and SGLang sets the
    # directory for it only when metrics are enabled.
    from prometheus_client import Counter, Gauge

    labels = (*common, *metric.labels)
    if metric.is_gauge:
        return Gauge(metric.name, metric.about, labels, multiprocess_mode="mostrecent")
    return Counter(metric.name, metric.about, labels)
