"""Servers of tests are forked, and fork their processes: they are as those that users start."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.server.client import Serve, ask, random_prompt, until
from tests.server.conftest import SPAWNED
from tests.server.forked import ForkedProcess

pytestmark = pytest.mark.slow

FLAGS = (
    *("--max-total-tokens", "4000", "--max-mamba-cache-size", "24", "--enable-metrics"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-storage-backend", "file"),
    *("--hybrid-disk-mb", "40", "--hybrid-eviction", "marconi:0.7", "--hybrid-memory", "split"),
    *("--hybrid-schedule", "window", "--random-seed", "1"),
)
VARIES = ("second", "speed", "rate", "time", "memory_usage", "load", "port", "disk/bytes")
"""Parts of names of numbers that no two servers have alike. A file on disk has the time at which it
was written, of more digits or fewer.
"""


def numbers(said: Any, name: str = "") -> dict[str, Any]:
    """All that a server says, by name, but for what varies."""
    if any(part in name for part in VARIES):
        return {}
    if isinstance(said, dict):
        inside = [numbers(each, f"{name}/{key}") for key, each in said.items()]
        return {key: each for found in inside for key, each in found.items()}
    return {name: said}


def state_of(url: str) -> Any:
    """The state of a server's scheduler."""
    (state,) = requests.get(url + "/server_info", timeout=30).json()["internal_states"]
    return state


def all_is_on_disk(url: str) -> bool:
    """True once host and disk have all that the device has, a token's KV or a state an object."""
    tiers = state_of(url)["hybrid_cache"]["tiers"]
    held = [tiers["held"][tier] for tier in ("device", "host")]
    return (
        held[0] == held[1]
        and held[1]["kv_tokens"] + held[1]["states"] == (tiers["disk"]["objects"])
    )


def test_a_forked_server_has_the_settings_of_a_spawned_one(serve: Serve, tmp_path: Path) -> None:
    said = []
    for environment in ({}, SPAWNED):
        disk = tmp_path / str(len(said))
        with serve(*FLAGS, "--hybrid-disk-folder", str(disk), environment=environment) as server:
            for seed in (1, 2, 1):
                ask(server.url, random_prompt(300, seed=seed), 4)
            until(partial(all_is_on_disk, server.url))
            said.append(numbers(state_of(server.url)))
            assert isinstance(server.process, ForkedProcess) is (environment == {})
        assert server.process.poll() == 128 + signal.SIGINT
        assert list(disk.rglob("*.safetensors"))
    forked, spawned = said
    assert len(forked) > 200
    assert forked == spawned
