"""Sliding windows beside states: one tree holds KV, windows and states.

Inkling, the one model of SGLang that has them, is not served on a CPU. Here a Nemotron-H has them:
SGLang gives a model whose config says so (`is_hybrid_swa`) a pool for the layers that the config
names, and its second attention reads 64 tokens. SGLang's own checks of its memory run at each step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hybrid.extensions.cpu.models import build_tiny_model
from sglang_hybrid.extensions.cpu.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import CHECKED, ask, cached, cold, random_prompt, said, same
from tests.server.test_checkpoints import (
    NEW_TOKENS,
    plays_exactly,
    reply_is_cached,
    samples_share,
    siblings,
)

pytestmark = pytest.mark.slow

WINDOW = 64


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Nemotron-H whose first attention reads all tokens, and whose second one a window."""
    directory = build_tiny_model(
        DEFAULT_ARCHITECTURE, tmp_path_factory.mktemp("windowed") / "model"
    )
    file = directory / "config.json"
    config = json.loads(file.read_text())
    kinds = config["hybrid_override_pattern"]
    whole, sliding = (layer for layer, kind in enumerate(kinds) if kind == "*")
    in_window = {whole: 0, sliding: 1}
    config |= {
        "is_hybrid_swa": True,
        "sliding_window": WINDOW,
        "hybrid_layer_pattern": [in_window.get(layer, 2) for layer in range(len(kinds))],
    }
    file.write_text(json.dumps(config))
    return directory


Start = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def start(windowed: Path) -> Start:
    return lambda *flags, **more: ServerProcess(["--model-path", str(windowed), *flags], **more)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--mamba-radix-cache-strategy", "extra_buffer"),
        ("--chunked-prefill-size", "128"),
    ],
    ids=["default", "extra buffers", "chunks of 128"],
)
def test_hits_are_exact(start: Start, flags: tuple[str, ...]) -> None:
    with start(*flags, **CHECKED) as server:
        plays_exactly(server.url, server.url, chunk=128 if "128" in flags else 0)
        for end in ("length", "stop token", "abort"):
            reply_is_cached(server.url, server.url, end)
        samples_share(server.url, 699)
        log = said(server)
        assert "hybrid_swa=True hybrid_ssm=True" in log and "impl=HybridRadixCache" in log


def test_what_lost_its_window_is_no_hit(start: Start) -> None:
    """The KV of all prompts fits, but the windows of few only."""
    flags = ("--max-total-tokens", "12000", "--swa-full-tokens-ratio", "0.1")
    flags += ("--chunked-prefill-size", "256")
    groups = [siblings(700, 2, seed=seed, own=60) for seed in range(100, 1_000, 100)]
    with start(*flags, **CHECKED) as server:
        found = []
        for prompts in (*groups, *groups):
            for prompt in prompts:
                ask(server.url, prompt, NEW_TOKENS)
        for first, _ in groups[::-1]:
            longer = first + random_prompt(20, seed=first[0])
            record = ask(server.url, longer, NEW_TOKENS)
            found.append((record, longer))
        assert {cached(record) > 0 for record, _ in found} == {True, False}
        for record, prompt in found:
            assert same(record, cold(server.url, prompt, NEW_TOKENS))
        said(server)
