"""Servers beside an SGLang that is not quite the released one: other pieces, other metadata."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from sglang_hybrid import SGLANG_VERSION
from sglang_hybrid.hooks.needs import Need
from sglang_hybrid.hooks.patching import load_patches
from tests.hooks.changed import copy_changed, everything_changed, read, with_another_hunk
from tests.server.client import Serve, cached
from tests.server.engine_hits import HITS, REQUESTS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("spawned")]
HERE = {Need.CACHE, Need.NO_TORCHVISION, Need.MAMBA2}
"""Pieces that a server of Nemotron-H cannot be without in this environment."""
LINE = "sglang_hybrid: not available beside this SGLang: "


def hits(url: str) -> list[int]:
    return [cached(requests.post(url + "/generate", json=body).json()) for body in REQUESTS]


def test_the_cache_serves_alone(serve: Serve, tmp_path: Path) -> None:
    """A piece of everything but the cache is another one."""
    changed = copy_changed(tmp_path, everything_changed(HERE))
    with serve(environment={"PYTHONPATH": str(changed)}) as server:
        assert hits(server.url) == HITS
        log = server.log.read_text()
    (line,) = (line for line in log.splitlines() if LINE in line)
    assert all(f"{need.what} (" in line for need in set(Need) - HERE)
    assert "Traceback" not in log


def test_one_model_is_refused_and_others_serve(
    model_directory: Callable[[str], Path], serve: Serve, tmp_path: Path
) -> None:
    path = "sglang/srt/models/zaya.py"
    text = with_another_hunk(load_patches()[path], Need.ZAYA, str(read(path)))
    environment = {"PYTHONPATH": str(copy_changed(tmp_path, {path: text}))}
    flags = ("--model-path", str(model_directory("zaya")), "--port", "1")
    command = [sys.executable, "-m", "sglang_hybrid.launch_server", *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, **environment}
    )
    said = f"cannot start: the model of type 'zaya' cannot be served here: {path} of the installed"
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert said in done.stderr, done.stderr[-2000:]
    with serve(environment=environment) as server:
        assert hits(server.url) == HITS


def test_a_post_release_serves_with_our_cache(serve: Serve, tmp_path: Path) -> None:
    """SGLang's own program, with metadata of a post-release."""
    metadata = tmp_path / f"sglang-{SGLANG_VERSION}.post1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {SGLANG_VERSION}.post1\n")
    flags = ("--radix-cache-backend", "hybrid", "--device", "cpu")
    program = (sys.executable, "-m", "sglang.launch_server")
    with serve(*flags, program=program, environment={"PYTHONPATH": str(tmp_path)}) as server:
        assert hits(server.url) == HITS
