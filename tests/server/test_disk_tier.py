"""--hicache-storage-backend file: what a server computed, the next one finds; and a disk that fails
costs hits, never an answer.
"""

from __future__ import annotations

import random
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import requests

from sglang_hybrid.extensions.cpu.models import build_tiny_model
from sglang_hybrid.extensions.cpu.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.extensions.disk.folder import RankFolder
from sglang_hybrid.extensions.disk.store_start import open_store
from sglang_hybrid.serving.server_process import ServerProcess
from tests.extensions.disk.foreign import checksum, home, outside
from tests.extensions.disk.objects import put
from tests.server.client import (
    Serve,
    ask,
    hybrid_cache,
    logprobs,
    random_prompt,
    same,
    until,
)
from tests.server.one_memory import TWO_POOLS

FLAGS = (
    *("--max-total-tokens", "4000", "--max-mamba-cache-size", "16", "--enable-cache-report"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "3", "--hicache-storage-backend", "file"),
)
PROMPTS = [random_prompt(700, seed=seed) for seed in range(5)]
KILLS = 6

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Cold:
    """Answers of a server that has no cache; each is asked for once."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._known: dict[tuple[int, ...], dict] = {}

    def __call__(self, prompt: list[int]) -> dict:
        key = tuple(prompt)
        if key not in self._known:
            self._known[key] = ask(self._url, prompt, 4)
        return self._known[key]


@pytest.fixture(scope="module")
def cold(serve: Serve) -> Iterator[Cold]:
    with serve("--disable-radix-cache") as server:
        yield Cold(server.url)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """The folder of a test's servers."""
    return tmp_path / "disk"


@pytest.fixture
def tiered(serve: Serve, disk: Path) -> Serve:
    """Servers on `disk`."""
    return partial(serve, *FLAGS, "--hybrid-disk-folder", str(disk))


def answers_as_cold(server: ServerProcess, cold: Cold) -> bool:
    return all(same(ask(server.url, prompt, 4), cold(prompt)) for prompt in PROMPTS)


def stored(answer: dict) -> int:
    """Tokens that came from disk."""
    return (answer["meta_info"].get("cached_tokens_details") or {}).get("storage", 0)


def files(disk: Path) -> list[Path]:
    return list(disk.glob("*/*/rank-*/*/*.safetensors"))


def written(disk: Path) -> None:
    """Wait until no file has been added for a second."""
    before = -1
    while before != (before := len(files(disk))):
        time.sleep(1)


def lines(server: ServerProcess) -> list[str]:
    """The lines of the log about the disk tier, but for those at the start."""
    said = [line for line in server.log.read_text().splitlines() if "sglang_hybrid: " in line]
    return [line for line in said if "disk" in line and "are on disk in" not in line]


def test_what_was_learnt_outlives_a_server_that_is_killed(tiered: Serve, disk: Path) -> None:
    """Two ranks begin with the same; a damaged file is one line of the log."""

    def learnt(server: ServerProcess) -> dict[str, int]:
        return hybrid_cache(server.url)["tiers"]["learnt"]

    for attempt in range(2):
        with tiered("--tp-size", "2") as server:
            assert (learnt(server)["restored"] > 0) == attempt
            prompt = random_prompt(100, seed=attempt)
            for headers in ({}, {"X-Hybrid-Session": "end"}):  # a return, which is learnt, and none
                reply = ask(server.url, prompt, 16, headers, cache_salt="a")["output_ids"]
                prompt = prompt + reply + random_prompt(20, seed=7)
            until(lambda: learnt(server)["saved"])
            for process in server.processes()[1:]:
                process.kill()
    (path,) = disk.glob("*/*/rank-0-0-0-0.learnt")
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(path.read_bytes()[:-1])
    with tiered("--tp-size", "2") as server:
        nothing = {"restored": 0, "unreadable": 0, "saved": 0, "failed": 0}
        assert learnt(server) == {**nothing, "ignored": 1}
        said = [line for line in server.log.read_text().splitlines() if "learnt before" in line]
        assert len(said) == 1


STORED = (
    *("nemotron-h", "falcon-h1", "granite-hybrid", "qwen3-next", "qwen4-exp", "kimi-linear"),
    *("glm-5-next", "ling-2.5"),
)
RESTARTS = [
    *((architecture, page, (), ()) for architecture in STORED for page in ("1", "16")),
    *(("nemotron-h", "16", TWO_POOLS, TWO_POOLS), ("nemotron-h", "1", TWO_POOLS, ())),
    ("kimi-linear", "1", (), TWO_POOLS),
]
"""A model, tokens of a page, and flags of the server that writes and of the one that reads."""


def words(value: str | tuple[str, ...]) -> str:
    """A part of a test's name."""
    return value if isinstance(value, str) else " ".join(value) or "default"


@pytest.mark.parametrize(("architecture", "page", "before", "after"), RESTARTS, ids=words)
def test_a_restart_finds_kv_and_states(
    tiered: Serve,
    disk: Path,
    architecture: str,
    page: str,
    before: tuple[str, ...],
    after: tuple[str, ...],
) -> None:
    started = partial(tiered, "--page-size", page, of=architecture)
    with started(*before) as server:
        first = [ask(server.url, prompt, 4) for prompt in PROMPTS]
        written(disk)
    with started(*after) as server:
        for prompt, expected in zip(PROMPTS, first, strict=True):
            answer = ask(server.url, prompt, 4)
            assert same(answer, expected) and stored(answer) >= 640
        info = hybrid_cache(server.url)["tiers"]["disk"]
        assert info["read"] and info["found_at_start"] and not info["off"]
        assert not lines(server)


def test_smaller_copies_are_found_again_under_their_codec_only(
    tiered: Serve, disk: Path, cold: Cold
) -> None:
    """They are marked, and a server whose copies are exact does not find them."""
    smaller = partial(tiered, "--hybrid-tier-codec", "int8")
    with smaller() as server:
        for prompt in PROMPTS:
            ask(server.url, prompt, 4)
        written(disk)
    with smaller() as server:
        for prompt in PROMPTS:
            answer = ask(server.url, prompt, 4)
            assert stored(answer) >= 640
            assert answer["meta_info"]["hybrid_cache"]["exact"] is False
            error = logprobs(answer)[0] - logprobs(cold(prompt))[0]
            assert 0 < abs(error) < 0.5
    with tiered() as server:
        for prompt in PROMPTS:
            answer = ask(server.url, prompt, 4)
            assert stored(answer) == 0 and same(answer, cold(prompt))


@pytest.mark.parametrize("architecture", ["nemotron-h", "kimi-linear"])
def test_ranks_find_their_own(tiered: Serve, disk: Path, architecture: str) -> None:
    """All ranks may have the same KV (Kimi Linear)."""
    expected: list[dict] = []
    for first in (True, False):
        with tiered("--tp-size", "2", of=architecture) as server:
            answers = [ask(server.url, prompt, 4) for prompt in PROMPTS]
            expected = expected or answers
            assert all(map(same, answers, expected))
            assert all((stored(answer) >= 640) is not first for answer in answers)
            written(disk)
    assert len(list(disk.glob("*/*/rank-*"))) == 2


def test_other_weights_find_nothing(
    tiered: Serve, disk: Path, cold: Cold, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A server with other weights of the same shape, and one whose weights are updated."""
    other = build_tiny_model(DEFAULT_ARCHITECTURE, tmp_path_factory.mktemp("other") / "m", seed=7)
    with tiered() as server:
        assert answers_as_cold(server, cold)
        written(disk)
        for number in range(3):  # the last one's copies are under way
            ask(server.url, random_prompt(700, seed=900 + number), 1)
        body = {"model_path": str(other)}
        requests.post(f"{server.url}/update_weights_from_disk", json=body).raise_for_status()
        updated = [ask(server.url, prompt, 4) for prompt in PROMPTS]
        assert [stored(answer) for answer in updated] == [0] * 5
        (line,) = lines(server)
        assert "weights were updated" in line
    flags = ("--model-path", str(other), *FLAGS, "--hybrid-disk-folder", str(disk))
    with ServerProcess(flags) as server:
        for prompt, expected in zip(PROMPTS, updated, strict=True):
            answer = ask(server.url, prompt, 4)
            assert stored(answer) == 0 and same(answer, expected)
            assert answer["output_ids"] != cold(prompt)["output_ids"]


@pytest.mark.timeout(1_800)
def test_killed_while_it_writes(tiered: Serve, cold: Cold) -> None:
    """SIGKILL at a random moment of writing; the next server starts and answers rightly."""
    source, found = random.Random(1), 0
    seen: list[list[int]] = []
    for kill in range(KILLS):
        with tiered() as server:
            if seen:
                prompts = source.sample(seen, 3)
                answers = [ask(server.url, prompt, 4) for prompt in prompts]
                assert all(map(same, answers, map(cold, prompts)))
                found += sum(map(stored, answers))
            seen = [random_prompt(700, seed=1_000 * kill + number) for number in range(6)]
            for prompt in seen:
                assert same(ask(server.url, prompt, 4), cold(prompt))
            time.sleep(source.uniform(0, 0.05))
            for process in server.processes():
                process.kill()
    assert found, "what was written before the kills is used"


def scheduler(server: ServerProcess) -> psutil.Process:
    (found,) = (one for one in server.processes() if "sglang::scheduler" in one.cmdline()[0])
    return found


def test_a_full_disk(tiered: Serve, disk: Path, cold: Cold) -> None:
    """Files may not grow beyond 100,000 bytes, which ends every write in the middle."""
    with tiered() as server:
        assert server.log.stat().st_size < 50_000, "the log itself must not be too large"
        written(disk)
        before = set(files(disk))  # of the server's own first request
        _, most = scheduler(server).rlimit(resource.RLIMIT_FSIZE)
        scheduler(server).rlimit(resource.RLIMIT_FSIZE, (100_000, most))
        for _ in range(2):
            assert answers_as_cold(server, cold)
        until(lambda: lines(server))
        written(disk)
        scheduler(server).rlimit(resource.RLIMIT_FSIZE, (most, most))
        new = set(files(disk)) - before
        assert all(path.stat().st_size < 100_000 for path in new) and not list(disk.rglob("*.tmp"))
    (line,) = lines(server)
    assert "nothing is written to the disk tier (File too large)" in line


def test_a_folder_in_use_stays_as_it_is(
    tiered: Serve, disk: Path, tmp_path: Path, cold: Cold
) -> None:
    """Somebody's home is the folder, and another model has left as much as the budget is."""
    elsewhere = outside(tmp_path / "elsewhere")
    home(disk, elsewhere)
    left = open_store(RankFolder(disk, {"weights": "old"}, "rank-0-0-0-0"))
    for number in range(8):
        assert put(left, number, size=1 << 20)
    left.close()
    tier = left.folder.tier
    before = checksum(disk, but=[tier]), checksum(elsewhere)
    for first in (True, False):
        with tiered("--hybrid-disk-mb", "8") as server:
            for prompt in PROMPTS[:2]:
                answer = ask(server.url, prompt, 4)
                assert same(answer, cold(prompt)) and (stored(answer) >= 640) is not first
            written(disk)
            kept = hybrid_cache(server.url)["tiers"]["disk"]
            assert 0 < kept["bytes"] <= kept["budget"] == 8 << 20
        said = [line for line in lines(server) if "removed from" in line]
        assert len(said) == first and all(str(left.folder.path.parent) in one for one in said)
        assert not left.folder.path.parent.exists()
    assert (checksum(disk, but=[tier]), checksum(elsewhere)) == before


def test_a_folder_that_is_removed(tiered: Serve, disk: Path, cold: Cold) -> None:
    with tiered() as server:
        assert same(ask(server.url, PROMPTS[0], 4), cold(PROMPTS[0]))
        written(disk)
        shutil.rmtree(disk)
        for _ in range(2):
            assert answers_as_cold(server, cold)
        until(lambda: lines(server))
    (line,) = lines(server)
    assert "the disk tier is off" in line and "was removed" in line
    assert not disk.exists()


@pytest.mark.skipif(not shutil.which("setpriv"), reason="root may read everything")
def test_permissions_that_are_taken(tiered: Serve, disk: Path, cold: Cold) -> None:
    """The server may not read everything, even as root."""
    python = (sys.executable, "-m", "sglang_hybrid.launch_server")
    program = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", *python)
    with tiered(program=program) as server:
        assert same(ask(server.url, PROMPTS[0], 4), cold(PROMPTS[0]))
        written(disk)
        disk.chmod(0)
        for _ in range(2):
            assert answers_as_cold(server, cold)
        until(lambda: lines(server))
        disk.chmod(0o700)
    (line,) = lines(server)
    assert "disk tier" in line


def test_a_server_starts_without_its_disk(tiered: Serve, disk: Path, cold: Cold) -> None:
    disk.write_text("no folder")
    with tiered() as server:
        assert answers_as_cold(server, cold)
    (line,) = lines(server)
    assert "the disk tier is off" in line
