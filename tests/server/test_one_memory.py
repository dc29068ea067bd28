"""KV and states in one memory: bytes go where the traffic needs them, and nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_hybrid.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.serving.server_process import ServerFailed, ServerProcess
from tests.server.client import TOLERANCE, ask, flush, logprobs, metric, random_prompt
from tests.server.one_memory import PAGES_OF_OTHERS, conserved, memory, pool_memory

TOKENS, SLOTS = 6_000, 20
FLAGS = (
    *("--hybrid-memory", "one", "--max-total-tokens", str(TOKENS)),
    *("--max-mamba-cache-size", str(SLOTS), "--enable-metrics"),
)
CHECKED = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
"""SGLang's checks end a server in which something is lost, free twice, or free and in use."""


@pytest.fixture(scope="module")
def server(model_directory: Callable[[str], Path]) -> Iterator[ServerProcess]:
    model = model_directory(DEFAULT_ARCHITECTURE)
    command = ["--model-path", str(model), *FLAGS]
    with ServerProcess(command, environment=CHECKED) as running:
        yield running


def documents(seed: int) -> list[list[int]]:
    """Questions behind three long documents: little but KV."""
    texts = [random_prompt(2_300, seed=seed + i) for i in range(3)]
    return [texts[i % 3] + random_prompt(20, seed=seed + 10 + i) for i in range(9)]


def sessions(seed: int) -> list[list[int]]:
    """Short prompts that share nothing, each asked twice: little but states."""
    prompts = [random_prompt(40, seed=seed + i) for i in range(24)]
    return [prompt for prompt in prompts for _ in range(2)]


def test_bytes_follow_the_traffic_and_answers_stay(server: ServerProcess) -> None:
    """Long documents, many short sessions, and back: what one kind had goes to the other."""
    moved = []
    phases = [documents(0), sessions(1_000), documents(2_000)]
    answers = []
    for phase in phases:
        answers.append([ask(server.url, prompt, 4) for prompt in phase])
        info = memory(server)
        assert conserved(info)
        assert pool_memory(server) <= info["resident"] + PAGES_OF_OTHERS
        assert info["resident"] <= info["budget"]
        moved.append(dict(info["moved_to"]))
    assert moved[1]["states"] > moved[0]["states"]
    assert moved[2]["kv"] > moved[1]["kv"]
    assert info["failed_moves"] == 0
    states = [transition["after"] for transition in info["transitions"]]
    assert {"rebalancing", "balanced"} <= set(states)
    hits = [sum(a["meta_info"]["cached_tokens"] > 0 for a in phase) for phase in answers]
    assert min(hits) >= 3
    for phase, records in zip(phases, answers, strict=True):
        for prompt, warm in list(zip(phase, records, strict=True))[-3:]:
            flush(server.url)
            cold = ask(server.url, prompt, 4)
            assert cold["meta_info"]["cached_tokens"] == 0
            assert logprobs(warm) == pytest.approx(logprobs(cold), abs=TOLERANCE)
            assert warm["output_ids"] == cold["output_ids"]


def test_metrics_say_the_same(server: ServerProcess) -> None:
    ask(server.url, random_prompt(50, seed=77), 2)
    info = memory(server)
    for kind in ("kv", "states"):
        moved = metric(server.url, f'memory_moved_bytes_total\\{{.*kind="{kind}".*\\}}')
        assert moved == info["moved_to"][kind] > 0
        used = metric(server.url, f'memory_bytes\\{{.*kind="{kind}".*part="used".*\\}}')
        assert used == info["used"][kind]
    assert metric(server.url, "memory_moves_total") == info["moves"] > 0
    assert metric(server.url, "memory_failed_moves_total") == 0
    assert metric(server.url, 'memory_state\\{.*state="balanced".*\\}') == (
        info["state"] == "balanced"
    )


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("page", [1, 16])
def test_nothing_leaks_in_a_soak(model_directory: Callable[[str], Path], page: int) -> None:
    """800 requests, eight at once, of every length: at the end all bytes come back, and resident
    memory never passed the budget.
    """
    model = model_directory(DEFAULT_ARCHITECTURE)
    rng = random.Random(5)
    texts = [random_prompt(rng.randrange(20, 2_000), seed=i) for i in range(40)]

    def one(number: int) -> int:
        text = texts[(number * 7 + number // 90) % len(texts)]
        prompt = text[: 1 + number * 37 % len(text)] + random_prompt(3, seed=10_000 + number)
        return ask(server.url, prompt, 1 + number % 40)["meta_info"]["completion_tokens"]

    flags = ["--model-path", str(model), *FLAGS, "--page-size", str(page)]
    with ServerProcess(flags) as server:
        for start in range(0, 800, 100):
            with ThreadPoolExecutor(8) as pool:
                made = list(pool.map(one, range(start, start + 100)))
            assert made == [1 + number % 40 for number in range(start, start + 100)]
            info = memory(server)
            assert conserved(info)
            assert pool_memory(server) <= info["budget"] + PAGES_OF_OTHERS
        assert min(info["moved_to"].values()) > 0
        flush(server.url)
        info = memory(server)
        assert info["free"] == info["budget"]
        assert not any(info["used"].values())
        log = server.log.read_text(errors="replace")
        assert "leak detected" not in log
        assert "Retract requests" not in log


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_evict_and_move_alike(model_directory: Callable[[str], Path]) -> None:
    """SGLang's checker ends the server at the first eviction in which the ranks differ."""
    model = model_directory(DEFAULT_ARCHITECTURE)
    prompts = [*documents(0), *sessions(1_000), *documents(2_000)]
    flags = ["--model-path", str(model), *FLAGS, "--tp-size", "2"]
    checked = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
    with ServerProcess(flags, environment=checked) as server:
        with ThreadPoolExecutor(3) as pool:
            records = list(pool.map(lambda prompt: ask(server.url, prompt, 4), prompts))
        assert [r["meta_info"]["completion_tokens"] for r in records] == [4] * len(prompts)
        info = memory(server)
        assert conserved(info)
        assert min(info["moved_to"].values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--max-total-tokens", "100", "--max-mamba-cache-size", "1"),
            "does not hold one request",
        ),
        (("--hybrid-eviction", "sglang-lru"), "SGLang's own order"),
        (("--hybrid-admission", "all"), "checkpoints are not planned"),
        (("--mamba-full-memory-ratio", "0.5"), "may be left out, divides the memory"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    model_directory: Callable[[str], Path], flags: tuple[str, ...], words: str
) -> None:
    model = model_directory(DEFAULT_ARCHITECTURE)
    asked = ["--model-path", str(model), "--hybrid-memory", "one", *flags]
    one_slot = {"SGLANG_HYBRID_SLOTS_PER_REQUEST": "1"}
    with pytest.raises(ServerFailed, match=words), ServerProcess(asked, environment=one_slot):
        pass
