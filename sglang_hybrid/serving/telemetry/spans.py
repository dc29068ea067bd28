"""The report of a request, as attributes of its OpenTelemetry span (`--enable-trace`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

NAME: Final = "hybrid_cache"
QUEUE: Final = "gen_ai.latency.time_in_queue"
"""The attribute for the time in the queue: SGLang names it, but its own spans do not set it."""


def span_attributes(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report of a response (docs/reports.md) with its keys as names, `hybrid_cache.tiers.way`
    for example; checkpoints are two lists of one length, `.position` and `.kind`. None is left out.
    """
    found: dict[str, Any] = {}
    _add(found, NAME, report)
    return found


def _add(found: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for key, part in value.items():
            _add(found, f"{name}.{key}", part)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for key in value[0]:
            found[f"{name}.{key}"] = [each[key] for each in value]
    elif value is not None:
        found[name] = value
