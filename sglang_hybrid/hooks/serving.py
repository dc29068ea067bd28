"""Hooks on the HTTP server, the tokenizer manager and the engine."""

from __future__ import annotations

from typing import Any


def send_arrival(state: dict[str, Any], stats: Any) -> None:
    """A request's arrival travels with it, so that all ranks see the same time."""
    state.setdefault("created_time", stats.created_time)
