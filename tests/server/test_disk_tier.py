"""--hicache-storage-backend file: what a server computed, the next one finds; and a disk that fails
costs hits, never an answer.
"""

from __future__ import annotations

import random
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import requests

from sglang_hybrid.models import build_tiny_model
from sglang_hybrid.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.serving.server_process import ServerProcess
from sglang_hybrid.storage.disk.folder import RankFolder
from sglang_hybrid.storage.disk.object_store import ObjectStore
from tests.releases import needs_disk, smaller_copies
from tests.server.client import TOLERANCE, ask, hybrid_cache, logprobs, random_prompt
from tests.storage.foreign import checksum, home, outside, put

FLAGS = (
    *("--max-total-tokens", "4000", "--max-mamba-cache-size", "16", "--enable-cache-report"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "3", "--hicache-storage-backend", "file"),
)
PROMPTS = [random_prompt(700, seed=seed) for seed in range(5)]
KILLS = 10

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_disk]


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
def model(model_directory: Callable[[str], Path]) -> Path:
    return model_directory(DEFAULT_ARCHITECTURE)


@pytest.fixture(scope="module")
def cold(model: Path) -> Iterator[Cold]:
    with ServerProcess(["--model-path", str(model), "--disable-radix-cache"]) as server:
        yield Cold(server.url)


def serve(model: Path, disk: Path, *flags: str, without: str = "") -> ServerProcess:
    """`without`: capabilities that the server does not have, even as root."""
    command = ["--model-path", str(model), *FLAGS, "--hybrid-disk-folder", str(disk), *flags]
    if not without:
        return ServerProcess(command)
    python = [sys.executable, "-m", "sglang_hybrid.launch_server"]
    return ServerProcess(command, program=["setpriv", f"--bounding-set={without}", *python])


def right(answer: dict, expected: dict) -> bool:
    assert answer["output_ids"] == expected["output_ids"]
    assert logprobs(answer) == pytest.approx(logprobs(expected), abs=TOLERANCE)
    return True


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
    """What the log says of the disk tier, but for what is there at the start."""
    said = [line for line in server.log.read_text().splitlines() if "sglang_hybrid: " in line]
    return [line for line in said if "disk" in line and "are on disk in" not in line]


def test_what_was_learnt_outlives_a_server_that_is_killed(model: Path, tmp_path: Path) -> None:
    """Also with two ranks, which begin with the same; a damaged file is one line."""
    disk = tmp_path / "disk"

    def learnt(server: ServerProcess) -> dict[str, int]:
        return hybrid_cache(server.url)["tiers"]["learnt"]

    for attempt in range(2):
        with serve(model, disk, "--tp-size", "2") as server:
            assert (learnt(server)["restored"] > 0) == attempt
            for seed in range(4):
                requests.post(
                    server.url + "/generate",
                    json={"input_ids": random_prompt(100, seed=seed), "cache_salt": "a"},
                    headers={"X-Hybrid-Session": "end"},
                    timeout=60,
                ).raise_for_status()
            while not learnt(server)["saved"]:
                time.sleep(0.5)
            for process in psutil.Process(server.process.pid).children(recursive=True):
                process.kill()
    (path,) = disk.glob("*/*/rank-0-0-0-0.learnt")
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(path.read_bytes()[:-1])
    with serve(model, disk, "--tp-size", "2") as server:
        assert learnt(server) == {"restored": 0, "ignored": 1, "saved": 0, "failed": 0}
        said = [line for line in server.log.read_text().splitlines() if "learnt before" in line]
        assert len(said) == 1


@pytest.mark.parametrize("page", ["1", "16"])
@pytest.mark.parametrize(
    "architecture", ["nemotron-h", "falcon-h1", "granite-hybrid", "qwen3-next"]
)
def test_a_restart_finds_kv_and_states(
    model_directory: Callable[[str], Path], tmp_path: Path, architecture: str, page: str
) -> None:
    flags = (model_directory(architecture), tmp_path / "disk", "--page-size", page)
    with serve(*flags) as server:
        first = [ask(server.url, prompt, 4) for prompt in PROMPTS]
        written(tmp_path / "disk")
    with serve(*flags) as server:
        for prompt, expected in zip(PROMPTS, first, strict=True):
            answer = ask(server.url, prompt, 4)
            assert right(answer, expected) and stored(answer) >= 640
        disk = hybrid_cache(server.url)["tiers"]["disk"]
        assert disk["read"] and disk["found_at_start"] and not disk["off"]
        assert not lines(server)


@smaller_copies
def test_smaller_copies_are_found_again_under_their_codec_only(
    model: Path, tmp_path: Path, cold: Cold
) -> None:
    """They are marked, and a server whose copies are exact does not find them."""
    smaller = (model, tmp_path / "disk", "--hybrid-tier-codec", "int8")
    with serve(*smaller) as server:
        for prompt in PROMPTS:
            ask(server.url, prompt, 4)
        written(tmp_path / "disk")
    with serve(*smaller) as server:
        for prompt in PROMPTS:
            answer = ask(server.url, prompt, 4)
            assert stored(answer) >= 640
            assert answer["meta_info"]["hybrid_cache"]["exact"] is False
            error = logprobs(answer)[0] - logprobs(cold(prompt))[0]
            assert 0 < abs(error) < 0.5
    with serve(model, tmp_path / "disk") as server:
        for prompt in PROMPTS:
            answer = ask(server.url, prompt, 4)
            assert stored(answer) == 0 and right(answer, cold(prompt))


def test_ranks_find_their_own(model: Path, tmp_path: Path, cold: Cold) -> None:
    for first in (True, False):
        with serve(model, tmp_path / "disk", "--tp-size", "2") as server:
            answers = [ask(server.url, prompt, 4) for prompt in PROMPTS]
            assert all(map(right, answers, map(cold, PROMPTS)))
            assert all((stored(answer) >= 640) is not first for answer in answers)
            written(tmp_path / "disk")
    assert len(list((tmp_path / "disk").glob("*/*/rank-*"))) == 2


class Conversations:
    """Twenty conversations, together more than device and host hold, that go on in turns."""

    def __init__(self) -> None:
        self._texts = [random_prompt(400, seed=number) for number in range(20)]
        self._random = random.Random(3)

    def hit_rate(self, url: str, requests: int) -> float:
        """Share of the prompts' tokens that were hit in the next requests."""
        hits = total = 0
        for _ in range(requests):
            text = self._random.choice(self._texts)
            text += random_prompt(20, seed=self._random.randrange(10**6))
            answer = ask(url, text, 4)
            text += answer["output_ids"]
            hits += answer["meta_info"]["cached_tokens"]
            total += answer["meta_info"]["prompt_tokens"]
        return hits / total


@pytest.mark.timeout(900)
def test_hits_go_on_after_a_restart(model: Path, tmp_path: Path) -> None:
    traffic = Conversations()
    with serve(model, tmp_path / "disk") as server:
        traffic.hit_rate(server.url, 100)
        before = traffic.hit_rate(server.url, 100)
        written(tmp_path / "disk")
    with serve(model, tmp_path / "disk") as server:
        after = traffic.hit_rate(server.url, 100)
    print(f"hit rate before {before:.3f}, after {after:.3f}")
    assert before > 0.5 and after >= 0.95 * before


def test_other_weights_find_nothing(
    model: Path, tmp_path: Path, cold: Cold, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A server with other weights of the same shape, and one whose weights are updated."""
    other = build_tiny_model(DEFAULT_ARCHITECTURE, tmp_path_factory.mktemp("other") / "m", seed=7)
    with serve(model, tmp_path / "disk") as server:
        assert all(right(ask(server.url, prompt, 4), cold(prompt)) for prompt in PROMPTS)
        written(tmp_path / "disk")
        body = {"model_path": str(other)}
        requests.post(f"{server.url}/update_weights_from_disk", json=body).raise_for_status()
        updated = [ask(server.url, prompt, 4) for prompt in PROMPTS]
        assert [stored(answer) for answer in updated] == [0] * 5
        (line,) = lines(server)
        assert "weights were updated" in line
    with serve(other, tmp_path / "disk") as server:
        for prompt, expected in zip(PROMPTS, updated, strict=True):
            answer = ask(server.url, prompt, 4)
            assert stored(answer) == 0 and right(answer, expected)
            assert answer["output_ids"] != cold(prompt)["output_ids"]


@pytest.mark.timeout(1_800)
def test_killed_while_it_writes(model: Path, tmp_path: Path, cold: Cold) -> None:
    """SIGKILL at a random moment of writing; the next server starts and answers rightly."""
    disk, source, found = tmp_path / "disk", random.Random(1), 0
    seen: list[list[int]] = []
    for kill in range(KILLS):
        with serve(model, disk) as server:
            if seen:
                prompts = source.sample(seen, 3)
                answers = [ask(server.url, prompt, 4) for prompt in prompts]
                assert all(map(right, answers, map(cold, prompts)))
                found += sum(map(stored, answers))
            seen = [random_prompt(700, seed=1_000 * kill + number) for number in range(6)]
            for prompt in seen:
                assert right(ask(server.url, prompt, 4), cold(prompt))
            time.sleep(source.uniform(0, 0.05))
            for process in server.processes():
                process.kill()
    assert found, "what was written before the kills is used"


def scheduler(server: ServerProcess) -> psutil.Process:
    (found,) = (one for one in server.processes() if "sglang::scheduler" in one.cmdline()[0])
    return found


def test_a_full_disk(model: Path, tmp_path: Path, cold: Cold) -> None:
    """Files may not grow beyond 100,000 bytes, which ends every write in the middle."""
    disk = tmp_path / "disk"
    with serve(model, disk) as server:
        assert server.log.stat().st_size < 50_000, "the log itself must not be too large"
        written(disk)
        before = set(files(disk))  # of the server's own first request
        _, most = scheduler(server).rlimit(resource.RLIMIT_FSIZE)
        scheduler(server).rlimit(resource.RLIMIT_FSIZE, (100_000, most))
        for _ in range(2):
            assert all(right(ask(server.url, prompt, 4), cold(prompt)) for prompt in PROMPTS)
        time.sleep(1)
        scheduler(server).rlimit(resource.RLIMIT_FSIZE, (most, most))
        new = set(files(disk)) - before
        assert all(path.stat().st_size < 100_000 for path in new) and not list(disk.rglob("*.tmp"))
    (line,) = lines(server)
    assert "nothing is written to the disk tier (File too large)" in line


def test_a_folder_in_use_stays_as_it_is(model: Path, tmp_path: Path, cold: Cold) -> None:
    """Somebody's home is the folder, and another model has left as much as the budget is."""
    elsewhere = outside(tmp_path / "elsewhere")
    disk = home(tmp_path / "home", elsewhere)
    left = ObjectStore(RankFolder(disk, {"weights": "old"}, "rank-0-0-0-0"))
    for number in range(8):
        assert put(left, number, size=1 << 20)
    left.close()
    tier = left.folder.tier
    before = checksum(disk, but=[tier]), checksum(elsewhere)
    for first in (True, False):
        with serve(model, disk, "--hybrid-disk-mb", "8") as server:
            for prompt in PROMPTS[:2]:
                answer = ask(server.url, prompt, 4)
                assert right(answer, cold(prompt)) and (stored(answer) >= 640) is not first
            written(disk)
            kept = hybrid_cache(server.url)["tiers"]["disk"]
            assert 0 < kept["bytes"] <= kept["budget"] == 8 << 20
        said = [line for line in lines(server) if "removed from" in line]
        assert len(said) == first and all(str(left.folder.path.parent) in one for one in said)
        assert not left.folder.path.parent.exists()
    assert (checksum(disk, but=[tier]), checksum(elsewhere)) == before


def test_a_folder_that_is_removed(model: Path, tmp_path: Path, cold: Cold) -> None:
    disk = tmp_path / "disk"
    with serve(model, disk) as server:
        assert right(ask(server.url, PROMPTS[0], 4), cold(PROMPTS[0]))
        written(disk)
        shutil.rmtree(disk)
        for _ in range(2):
            assert all(right(ask(server.url, prompt, 4), cold(prompt)) for prompt in PROMPTS)
        time.sleep(1)
    (line,) = lines(server)
    assert "the disk tier is off" in line and "was removed" in line
    assert not disk.exists()


@pytest.mark.skipif(not shutil.which("setpriv"), reason="root may read everything")
def test_permissions_that_are_taken(model: Path, tmp_path: Path, cold: Cold) -> None:
    disk = tmp_path / "disk"
    with serve(model, disk, without="-dac_override,-dac_read_search") as server:
        assert right(ask(server.url, PROMPTS[0], 4), cold(PROMPTS[0]))
        written(disk)
        disk.chmod(0)
        for _ in range(2):
            assert all(right(ask(server.url, prompt, 4), cold(prompt)) for prompt in PROMPTS)
        time.sleep(1)
        disk.chmod(0o700)
    (line,) = lines(server)
    assert "disk tier" in line


def test_a_server_starts_without_its_disk(model: Path, tmp_path: Path, cold: Cold) -> None:
    (tmp_path / "disk").write_text("no folder")
    with serve(model, tmp_path / "disk") as server:
        assert all(right(ask(server.url, prompt, 4), cold(prompt)) for prompt in PROMPTS)
    (line,) = lines(server)
    assert "the disk tier is off" in line
