"""Prometheus metrics of what was expected of answers, against what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_hybrid.core.returns.answers import Calibration

PREFIX = "sglang_hybrid:answers"
EXPECTED = ("nothing", "unlikely", "possible", "likely")
"""Names of the buckets of `Answer.bucket`."""


class AnswerMetrics:
    """Gauges that follow a `Calibration`; `update` copies it. Gauges, since an answer that was
    given up may be returned to after all.
    """

    def __init__(self, calibration: Calibration) -> None:
        # Imported here as in metrics.py: prometheus_client chooses its mode at import.
        from prometheus_client import Gauge

        self._calibration = calibration
        self._answers = Gauge(
            PREFIX,
            "Answers that somebody came back to, or did not in the usual time, by what was "
            "expected of them (a return is unlikely, possible, likely; nothing was expected).",
            ["expected", "returned"],
            multiprocess_mode="mostrecent",
        )
        self._expected = Gauge(
            PREFIX + "_expected_returns",
            "The sum of the probabilities of a return of the same answers: calibrated where it is "
            "near the number of those that were returned to.",
            ["expected"],
            multiprocess_mode="mostrecent",
        )
        self.update()

    def update(self) -> None:
        """Bring them up to the calibration."""
        seen = self._calibration
        for bucket, name in enumerate(EXPECTED):
            self._answers.labels(name, "yes").set(seen.returned[bucket])
            self._answers.labels(name, "no").set(seen.gone[bucket])
            if bucket:
                self._expected.labels(name).set(seen.expected[bucket])
