"""Requests of the server tests, and their answers."""

import json
import random
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from sglang_hybrid.extensions.router import Replicas
from sglang_hybrid.serving.server_process import ServerProcess

TOLERANCE = 1e-3
"""Largest difference of a logprob that counts as equal, in float32."""

PARTIAL = 206
"""The answer of a router where only some servers could do it."""

STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}
"""The environment of a server that ends if memory is lost."""

CHECKED: dict[str, Any] = {"module": "tests.server.checked", "environment": STRICT}
"""Flags of such a server that also looks at each state slot, at every step."""

RECORD_KEY = "the key of these tests"
"""Names of tenants are made with it (SGLANG_HYBRID_RECORD_KEY)."""


Serve = Callable[..., ServerProcess]
"""The fixture `serve`: a server, not started yet, of `of`, the name of an architecture, with these
flags and the keyword arguments of `ServerProcess`.
"""


def alive(process: psutil.Process) -> bool:
    """True if a process runs, and is more than an entry that its parent has not read yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def random_prompt(length: int, seed: int) -> list[int]:
    """`length` token ids of ordinary text tokens."""
    source = random.Random(seed)
    return [source.randrange(300, 32_000) for _ in range(length)]


def greedy(
    prompt: list[int] | list[list[int]],
    new_tokens: int = 16,
    sampling: dict[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """A body for /generate, of one prompt or a batch: answers of exactly `new_tokens` tokens with
    their log probabilities, which do not stop a hit. sampling, fields: more of it.
    """
    length = {"max_new_tokens": new_tokens, "ignore_eos": True}
    return {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, **length, **(sampling or {})},
        "return_logprob": True,
        "logprob_start_len": -1,
        **fields,
    }


def send(
    url: str,
    prompt: list[int] | list[list[int]],
    new_tokens: int = 16,
    headers: dict[str, str] | None = None,
    **more: Any,
) -> requests.Response:
    """The response to a `greedy` request, or to a batch."""
    body = greedy(prompt, new_tokens, **more)
    return requests.post(url + "/generate", json=body, headers=headers, timeout=300)


def ask(url: str, prompt: list[int] | list[list[int]], *args: Any, **more: Any) -> Any:
    """The record of a `greedy` request, or those of a batch. args, more: as of `send`."""
    response = send(url, prompt, *args, **more)
    response.raise_for_status()
    return response.json()


def cold(url: str, prompt: list[int], new_tokens: int = 16) -> dict[str, Any]:
    """The record of a request that finds the cache empty."""
    flush(url)
    record: dict[str, Any] = ask(url, prompt, new_tokens)
    assert cached(record) == 0
    return record


def cached(record: dict[str, Any]) -> int:
    """Tokens of the prompt that came from the cache."""
    return int(record["meta_info"]["cached_tokens"])


def logprobs(record: dict[str, Any]) -> list[float]:
    """Log probabilities of the answer."""
    return [entry[0] for entry in record["meta_info"]["output_token_logprobs"]]


def prompt_logprobs(record: dict[str, Any]) -> list[float]:
    """Log probabilities of the prompt after `logprob_start_len`: the token there has none."""
    return [entry[0] for entry in record["meta_info"]["input_token_logprobs"][1:]]


def same(record: dict[str, Any], right: dict[str, Any]) -> bool:
    """Asserts that two requests were answered alike: the tokens, and their log probabilities."""
    assert record["output_ids"] == right["output_ids"]
    assert logprobs(record) == pytest.approx(logprobs(right), abs=TOLERANCE)
    return True


def completed(records: Iterable[dict[str, Any]]) -> list[int]:
    """The number of tokens of each answer."""
    return [record["meta_info"]["completion_tokens"] for record in records]


def hybrid_cache(url: str) -> dict[str, Any]:
    """The block of /server_info; with --dp-size, that of the first replica."""
    return hybrid_caches(url)[0]


def hybrid_caches(url: str) -> list[dict[str, Any]]:
    """The block of /server_info of each replica within the server."""
    states = requests.get(url + "/server_info", timeout=30).json()["internal_states"]
    return [state["hybrid_cache"] for state in states]


def metric(url: str, name: str) -> float:
    """The one sample of /metrics that `sglang_hybrid:` and `name`, a regular expression, name."""
    text = requests.get(url + "/metrics", timeout=30).text
    (value,) = re.findall(rf"^sglang_hybrid:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return float(value)


def answer(response: requests.Response) -> dict[str, Any] | None:
    """The record of a request; None if it ended with an error."""
    record: dict[str, Any] | None = response.json() if response.status_code == 200 else None
    return None if record is None or "error" in record else record


def answered_at_last(
    asked: Callable[[], dict[str, Any] | None], seconds: float = 120
) -> dict[str, Any]:
    """The first record that `asked` returns, asked again while it returns None; it fails if that
    takes longer.
    """
    deadline = time.monotonic() + seconds
    while (record := asked()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return record


def flush(url: str, seconds: int = 30) -> None:
    """Empty the server's prefix cache, or those behind a router, once nothing runs and copies to
    other tiers that are under way have ended; they have so many seconds.
    """
    deadline = time.monotonic() + seconds
    while True:
        timeout = {"timeout": seconds}
        empty = requests.post(url + "/flush_cache", params=timeout, timeout=seconds + 30)
        empty.raise_for_status()
        if empty.status_code != PARTIAL:
            return
        assert time.monotonic() < deadline, empty.text
        time.sleep(0.1)


def said(server: ServerProcess) -> str:
    """The server's log so far, in which no error has left a trace."""
    log = server.log.read_text(errors="replace")
    assert "Traceback" not in log
    return log


def until(happened: Callable[[], Any], seconds: float = 300) -> None:
    """Wait until something has happened; it fails if that takes longer."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"it did not happen within {seconds} seconds"
        time.sleep(0.05)


def settle(replicas: Replicas, url: str) -> None:
    """Wait until what the server at `url` has published is known."""
    follower = replicas.followers[url]
    until(lambda: follower.is_in_step)
    ranks = requests.get(url + "/hybrid_cache/resumable?status=1", timeout=30).json()["ranks"]
    until(lambda: follower.is_in_step and follower.seq >= ranks[0]["seq"])


def width_of(url: str) -> int:
    """Values of an embedding of the served model."""
    told = requests.get(url + "/model_info", timeout=60).json()
    config = json.loads((Path(told["model_path"]) / "config.json").read_text())
    return int(config.get("text_config", config)["hidden_size"])
