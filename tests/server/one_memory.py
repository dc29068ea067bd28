"""The content of a server's one memory, by its own account and by the system's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import hybrid_cache

SGLANGS_POOL = ("--enable-unified-memory",)
"""KV and states in SGLang's unified memory pool."""

PAGES_OF_OTHERS = 64 << 10
"""Bytes on the pages that rows for padding are written to."""


def memory(server: ServerProcess) -> dict[str, Any]:
    """The account of its one memory."""
    return hybrid_cache(server.url)["memory"]


def conserved(info: dict[str, Any]) -> bool:
    taken = sum(info["used"].values()) + sum(info["waste"].values())
    return taken + info["free"] == info["budget"]


def all_is_free(seen: dict[str, Any], slots: int) -> bool:
    """True if an emptied cache holds nothing: of one memory, or of `slots` state slots."""
    account = seen["memory"]
    if account is None:
        return seen["state_slots_free"] == slots
    return account["free"] == account["budget"] and not any(account["used"].values())


def pool_memory(server: ServerProcess) -> int:
    """Physical bytes behind the pools: of mappings without reserve and without huge pages."""
    total = 0
    for process in server.processes():
        text = Path(f"/proc/{process.pid}/smaps").read_text()
        for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
            flags = re.search(r"^VmFlags: (.*)$", mapping, re.MULTILINE)
            if flags and {"nr", "nh"} <= set(flags.group(1).split()):
                total += 1024 * int(re.search(r"^Rss:\s+(\d+)", mapping, re.MULTILINE).group(1))
    return total
