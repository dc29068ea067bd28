"""What processes of a server load of this package: no more than what they were asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts.loaded import by_room, loaded

IMPORTS = """
import sys

def tell():
    print(*(name for name in sys.modules if name.startswith("sglang_hybrid")))

from sglang_hybrid import plugin
plugin.activate()
plugin.register()
tell()
import sglang.srt.managers.scheduler, sglang_hybrid.cache.factory
tell()
"""

ASKED_FOR = (
    *("sglang_hybrid.explain.page", "sglang_hybrid.models", "sglang_hybrid.prompts"),
    *("sglang_hybrid.replay", "sglang_hybrid.replicas", "sglang_hybrid.launch_server"),
    *("sglang_hybrid.storage.file_backend", "sglang_hybrid.storage.shared_store"),
)
"""What a default server's scheduler does without."""

LIGHT = {
    *("sglang_hybrid.models", "sglang_hybrid.prompts", "sglang_hybrid.prompts.chats"),
    "sglang_hybrid.prompts.chats.fields",
    *("sglang_hybrid.replay", "sglang_hybrid.replay.simulation"),
    *("sglang_hybrid.replay.simulation.traces", "sglang_hybrid.replay.simulation.tuner"),
    "sglang_hybrid.replay.simulation.traces.requests",
    "sglang_hybrid.replay.simulation.tuner.recorder",
}
"""But for names, and the requests that are remembered for a comparison of splits."""


def test_what_is_not_asked_for_is_not_loaded() -> None:
    """In a new process as SGLang begins each one, with the plugin, and in a scheduler."""
    command = [sys.executable, "-W", "ignore", "-c", IMPORTS]
    told = subprocess.run(command, check=True, text=True, capture_output=True).stdout
    plugin, scheduler = (set(line.split()) for line in told.splitlines())
    without_cache = (
        "sglang_hybrid.cache.factory",
        "sglang_hybrid.storage",
        "sglang_hybrid.explain",
    )
    assert not plugin & {*without_cache}
    assert "sglang_hybrid.cache.factory" in scheduler
    assert {name for name in scheduler if name.startswith(ASKED_FOR)} <= LIGHT


@pytest.mark.slow
def test_a_default_server_has_loaded_no_more() -> None:
    (files,) = (files for title, (files, _) in loaded().items() if title == "sglang::scheduler")
    lines = by_room(files)
    assert lines["replicas"] == 0
    assert max(lines[room] for room in ("replay", "prompts", "models")) < 1_000
