"""Servers of tests fork their processes: they are what servers are whose processes are spawned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import requests

from tests.server.client import Serve, ask, random_prompt, until
from tests.server.conftest import SPAWNED

pytestmark = pytest.mark.slow

FLAGS = (
    *("--max-total-tokens", "4000", "--max-mamba-cache-size", "24", "--enable-metrics"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-storage-backend", "file"),
    *("--hybrid-disk-mb", "40", "--hybrid-eviction", "marconi:0.7", "--hybrid-memory", "split"),
    *("--hybrid-schedule", "window", "--hybrid-ui", "text", "--random-seed", "1"),
)
VARIES = ("seconds", "speed", "rate", "time", "memory_usage", "load", "port")
"""Parts of names of numbers that no two servers have alike."""


def numbers(said: Any, name: str = "") -> dict[str, Any]:
    """All that a server says, by name, but for what varies."""
    if any(part in name for part in VARIES):
        return {}
    if isinstance(said, dict):
        inside = [numbers(each, f"{name}/{key}") for key, each in said.items()]
        return {key: each for found in inside for key, each in found.items()}
    return {name: said}


def test_a_forked_server_has_the_settings_of_a_spawned_one(serve: Serve, tmp_path: Path) -> None:
    said = []
    for environment in ({}, SPAWNED):
        disk = tmp_path / str(len(said))
        with serve(*FLAGS, "--hybrid-disk-folder", str(disk), environment=environment) as server:
            for seed in (1, 2, 1):
                ask(server.url, random_prompt(300, seed=seed), 4)
            until(lambda disk=disk: list(disk.rglob("*.safetensors")))
            info = requests.get(server.url + "/server_info", timeout=30).json()
        (state,) = info["internal_states"]
        said.append(numbers(state))
    forked, spawned = said
    assert len(forked) > 200
    assert forked == spawned
