"""The dashboard of docker/grafana, as tests look at it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import promql_parser

DOCKER = Path(__file__).parents[1] / "docker"
DASHBOARD: dict[str, Any] = json.loads(
    (DOCKER / "grafana" / "dashboards" / "prefix-cache.json").read_text()
)


def queries() -> dict[str, list[str]]:
    """PromQL of every panel by its title, as Grafana sends it for all servers."""
    return {panel["title"]: [filled(t["expr"]) for t in panel["targets"]] for panel in panels()}


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DASHBOARD["panels"]
    return found


def filled(expression: str) -> str:
    """A query with Grafana's variables replaced by values."""
    return expression.replace("$__rate_interval", "1m").replace("$instance", ".*")


def metrics() -> set[str]:
    """Names of all time series that the dashboard's queries ask for."""
    return {
        name
        for expressions in queries().values()
        for expression in expressions
        for name in selected(promql_parser.parse(expression))
    }


def selected(node: Any) -> set[str]:
    """Names of the time series that a parsed query asks for."""
    if isinstance(node, promql_parser.VectorSelector):
        return {node.name}
    if isinstance(node, promql_parser.MatrixSelector):
        return selected(node.vector_selector)
    below = [getattr(node, part, None) for part in ("expr", "lhs", "rhs")]
    below += getattr(node, "args", None) or []
    return set().union(*(selected(part) for part in below if part is not None))
