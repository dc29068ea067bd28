"""The content of a server's one memory, by its own account."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import hybrid_cache

TWO_POOLS = ("--hybrid-memory", "split")
ONE_MEMORY = ("--hybrid-memory", "one")
SPILLS = ("--mamba-full-memory-ratio", "0.5")
"""Two pools on a CPU, whose states spill into KV."""


def memory(server: ServerProcess) -> dict[str, Any]:
    """The account of its one memory."""
    return hybrid_cache(server.url)["memory"]


def conserved(info: dict[str, Any]) -> bool:
    return sum(info["used"].values()) + info["free"] == info["budget"]


def all_is_free(seen: dict[str, Any], slots: int) -> bool:
    """True if an emptied cache holds nothing: of one memory, or of `slots` state slots."""
    account = seen["memory"]
    if account is None:
        return seen["state_slots_free"] == slots
    return account["free"] == account["budget"] and not any(account["used"].values())
