"""Common parts of benchmarks of running servers: flags, models, requests of random tokens."""

from __future__ import annotations

import json
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import requests

from scripts.bench.report import BenchFailed
from sglang_hybrid.extensions.cpu.models import build_tiny_model

Item = TypeVar("Item")
Result = TypeVar("Result")
SCRATCH = Path(tempfile.gettempdir())
"""The default folder of models that are made once."""

LAUNCHERS = {"SGLang": "sglang.launch_server", "ours": "sglang_hybrid.launch_server"}
"""The modules that start a server with SGLang's own cache, and with ours."""

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


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The JSON that a request is answered with. Raises `requests.HTTPError` for an error."""
    response = requests.post(url + path, json=body, timeout=600)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def flush(url: str) -> None:
    """Empty the cache, once nothing runs any more."""
    requests.post(url + "/flush_cache", params={"timeout": 30}, timeout=60).raise_for_status()


def at_once(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`work` for all items at the same time, in threads; results in their order."""
    with ThreadPoolExecutor(len(items)) as threads:
        return list(threads.map(work, items))


@contextmanager
def sampled(look: Callable[[], Result], seconds: float) -> Iterator[list[Result]]:
    """The results of `look`, called every so many `seconds` during the block and once after it."""
    found: list[Result] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(seconds):
            found.append(look())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
    found.append(look())


def percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def random_tokens(source: random.Random, count: int) -> list[int]:
    """Random tokens of text, which every embedded model's vocabulary has."""
    return [source.randrange(300, 32_000) for _ in range(count)]


def exactly(answer: int) -> dict[str, Any]:
    """The part of a body of /generate that asks for an answer of exactly so many tokens."""
    return {"sampling_params": {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True}}


def greedy(prompt: list[int], answer: int) -> dict[str, Any]:
    """The body of /generate for an answer of exactly so many tokens."""
    return {"input_ids": prompt, **exactly(answer)}


def events(lines: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    """The events of a streamed answer."""
    return (json.loads(line[6:]) for line in lines if line.startswith(b"data: {"))


def arrivals(url: str, body: dict[str, Any]) -> list[tuple[float, int]]:
    """The times of the events of a streamed answer, in seconds, and its tokens by then."""
    asked = {**body, "stream": True}
    with requests.post(url + "/generate", json=asked, stream=True, timeout=600) as response:
        lines = [(time.perf_counter(), line) for line in response.iter_lines()]
    return [
        (at, event["meta_info"]["completion_tokens"])
        for at, line in lines
        for event in events([line])
    ]


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
        found = post(self._url, "/generate", greedy(prompt, 1))["meta_info"]["cached_tokens"]
        seconds = time.perf_counter() - begin
        if found < cached:
            raise BenchFailed(f"{found} of {len(prompt)} tokens were cached, not {cached}")
        return seconds

    def step(self, prompts: Sequence[list[int]]) -> float:
        """Seconds of a decode step of a batch: the mean while all of its sequences are running.

        Raises BenchFailed where they never were.
        """
        every = at_once(lambda prompt: arrivals(self._url, greedy(prompt, STEPS)), prompts)
        begin, end = max(seen[0][0] for seen in every), min(seen[-1][0] for seen in every)
        together = [[at for at in seen if begin <= at[0] <= end] for seen in every]
        if min(len(seen) for seen in together) < 2:
            raise BenchFailed(f"{len(prompts)} sequences were never decoded at once")
        return median((last[0] - first[0]) / (last[1] - first[1]) for first, *_, last in together)
