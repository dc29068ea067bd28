"""What benchmarks of running servers share: flags, models, requests of random tokens."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import requests

from scripts.bench.report import BenchFailed
from sglang_hybrid.models import build_tiny_model

Item = TypeVar("Item")
Result = TypeVar("Result")
SCRATCH = Path(tempfile.gettempdir())
"""Where models that are made once are kept by default."""

STEPS = 128
"""Tokens of an answer when decoding is measured."""


def large_model(scratch: Path = SCRATCH) -> Path:
    """A Nemotron-H of 100 M parameters, made where it is missing."""
    directory = scratch / "nemotron-h-100m"
    if not directory.exists():
        build_tiny_model("nemotron-h", directory, scale="100m")
    return directory


def vocabulary_of(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def flags_of(model: Path, kv_tokens: int, state_slots: int, running: int) -> list[str]:
    """A server's flags for answers that are forced, in pools of a given size."""
    return [
        *("--model-path", str(model), "--max-total-tokens", str(kv_tokens)),
        *("--max-mamba-cache-size", str(state_slots), "--max-running-requests", str(running)),
        "--enable-custom-logit-processor",
    ]


def hybrid_cache(url: str) -> dict[str, Any]:
    """The cache's block of /server_info."""
    info = requests.get(url + "/server_info", timeout=30).json()
    block: dict[str, Any] = info["internal_states"][0]["hybrid_cache"]
    return block


def at_once(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`work` for all items at the same time, in threads; results in their order."""
    with ThreadPoolExecutor(len(items)) as threads:
        return list(threads.map(work, items))


def percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def random_tokens(source: random.Random, count: int) -> list[int]:
    """Of text, in every embedded model's vocabulary."""
    return [source.randrange(300, 32_000) for _ in range(count)]


def greedy(prompt: list[int], answer: int) -> dict[str, Any]:
    """The body of /generate for an answer of exactly so many tokens."""
    sampling = {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling}


def events(lines: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    """The events of a streamed answer."""
    return (json.loads(line[6:]) for line in lines if line.startswith(b"data: {"))


class Client:
    """Requests of random tokens; no two have the same unless one continues the other."""

    def __init__(self, url: str, seed: int = 0) -> None:
        self._url = url
        self._random = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        return random_tokens(self._random, count)

    def first_token(self, prompt: list[int], cached: int) -> float:
        """Seconds until the first token; raises BenchFailed if fewer than ``cached`` were hit."""
        begin = time.perf_counter()
        response = requests.post(self._url + "/generate", json=greedy(prompt, 1), timeout=600)
        seconds = time.perf_counter() - begin
        response.raise_for_status()
        found = response.json()["meta_info"]["cached_tokens"]
        if found < cached:
            raise BenchFailed(f"{found} of {len(prompt)} tokens were cached, not {cached}")
        return seconds

    def step(self, prompts: Sequence[list[int]]) -> float:
        """Seconds of a decode step of a batch: the mean while all of its sequences are running.

        Raises BenchFailed where they never were.
        """
        arrivals = at_once(self._arrivals, prompts)
        begin, end = max(seen[0][0] for seen in arrivals), min(seen[-1][0] for seen in arrivals)
        together = [[at for at in seen if begin <= at[0] <= end] for seen in arrivals]
        if min(len(seen) for seen in together) < 2:
            raise BenchFailed(f"{len(prompts)} sequences were never decoded at once")
        return median((last[0] - first[0]) / (last[1] - first[1]) for first, *_, last in together)

    def _arrivals(self, prompt: list[int]) -> list[tuple[float, int]]:
        """When events of an answer came, and how many tokens it had then."""
        body = {**greedy(prompt, STEPS), "stream": True}
        url = self._url + "/generate"
        with requests.post(url, json=body, stream=True, timeout=600) as response:
            return [
                (time.perf_counter(), event["meta_info"]["completion_tokens"])
                for event in events(response.iter_lines())
            ]
