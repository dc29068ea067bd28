"""A server with two pools says which split of their memory its traffic asks for, and is right."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

from sglang_hybrid.cache.learnt_split import read_split, split_path
from tests.server.client import Serve, ask, cached, hybrid_cache, random_prompt, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SPLIT = ("--hybrid-memory", "split", "--enable-cache-report", "--context-length", "2048")
FEW_SLOTS = ("--max-mamba-cache-size", "24", "--max-total-tokens", "40000")
DOCUMENTS = [random_prompt(60, seed=seed) for seed in range(60)]
REQUESTS = 270


def hit_share(url: str) -> float:
    """The share of hit tokens in the latter half of questions about documents."""
    source = random.Random(1)
    hits = []
    for number in range(REQUESTS):
        prompt = source.choice(DOCUMENTS) + random_prompt(12, seed=1_000 + number)
        hits.append(cached(ask(url, prompt, 2)) / len(prompt))
    return sum(hits[REQUESTS // 2 :]) / (REQUESTS // 2)


def advised(url: str) -> str:
    """The advice about the split; "" if there is none."""
    lines = [line for line in hybrid_cache(url)["advice"] if "would be hit" in line]
    return lines[0] if lines else ""


def test_what_is_advised_hits_what_was_said(serve: Serve) -> None:
    with serve(*SPLIT, *FEW_SLOTS) as server:
        before = hit_share(server.url)
        until(lambda: advised(server.url))
        said = advised(server.url)
    match = re.search(r"([\d.]+) % would.* ([\d,]+) and --max-total-tokens ([\d,]+)", said)
    assert match
    share, slots, tokens = (float(each.replace(",", "")) for each in match.groups())
    flags = ("--max-mamba-cache-size", f"{slots:.0f}", "--max-total-tokens", f"{tokens:.0f}")
    with serve(*SPLIT, *flags) as server:
        after = hit_share(server.url)
    assert after > before + 0.05
    assert after > share / 100 - 0.05  # a replay begins with an empty cache


DISK = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "1.1"),
    *("--hicache-storage-backend", "file", "--hybrid-disk-mb", "1"),
)


@pytest.mark.parametrize("flags", [DISK, ()])
def test_the_next_server_finds_it(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """The split is in the disk tier's folder, or among the user's cached files."""
    monkeypatch.setenv("SGLANG_HYBRID_DISK_FOLDER", str(tmp_path) if flags else "")
    if flags:
        flags = (*flags, "--hybrid-disk-folder", str(tmp_path))
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with serve(*SPLIT, *FEW_SLOTS, *flags) as server:
        hit_share(server.url)
        until(lambda: advised(server.url))
        arguments = requests.get(server.url + "/server_info", timeout=60).json()
    path = split_path(SimpleNamespace(**arguments))
    assert path is not None
    found = read_split(path)
    assert found is not None
    assert found.hits > found.hits_now
