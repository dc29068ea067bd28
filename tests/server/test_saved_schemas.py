"""Schemas of a server with a disk tier are there again after a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_hybrid.extensions.cpu.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.serving.server_process import ServerProcess
from tests.extensions.schemas import schemas
from tests.server.test_schemas import pupil, register, send

TIERS = ("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-storage-backend", "file")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_schemas_outlive_the_server(model_directory: Callable[[str], Path], tmp_path: Path) -> None:
    flags = ["--model-path", str(model_directory(DEFAULT_ARCHITECTURE)), *TIERS]
    flags += ["--hybrid-disk-folder", str(tmp_path / "disk"), "--enable-cache-report"]
    mine: dict[str, Any] = {"cache_salt": "mine"}
    with ServerProcess(flags, timeout=600) as server:
        assert register(server.url, schemas.pupil(), **mine).json()["saved"] is True
        first = send(server.url, pml=pupil("high", "novice"), **mine).json()
    with ServerProcess(flags, timeout=600) as server:
        url = server.url + "/v1/prompt_schemas"
        (found,) = requests.get(url, params=mine, timeout=60).json()
        assert (found["name"], found["saved"]) == ("education", True)
        assert requests.get(url, timeout=60).json() == []
        again = send(server.url, pml=pupil("high", "novice"), **mine).json()
        assert again["prompt_token_ids"] == first["prompt_token_ids"]
        assert again["output_ids"] == first["output_ids"]
        assert send(server.url, pml=pupil("high")).status_code == 400
