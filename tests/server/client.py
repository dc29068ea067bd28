"""What the server tests send and read back."""

import random
import re
from dataclasses import dataclass

import psutil
import requests

TOLERANCE = 1e-3
"""Largest difference of a logprob that counts as equal, in float32."""


@dataclass(frozen=True)
class Answer:
    """One finished request."""

    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: list[float]
    logprobs: list[float]


def alive(process: psutil.Process) -> bool:
    """Whether a process runs, and is more than an entry that its parent has not read yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def random_prompt(length: int, seed: int) -> list[int]:
    """`length` token ids of ordinary text tokens."""
    source = random.Random(seed)
    return [source.randrange(300, 32_000) for _ in range(length)]


def generate(
    url: str, prompts: list[list[int]], max_new_tokens: int = 32, *, logprobs: bool = False
) -> list[Answer]:
    """Send prompts as one batch to /generate, greedily; answers in the same order."""
    body = {
        "input_ids": prompts,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": max_new_tokens,
            "ignore_eos": True,
        },
        "return_logprob": logprobs,
        "logprob_start_len": 0 if logprobs else -1,
    }
    response = requests.post(url + "/generate", json=body, timeout=300)
    response.raise_for_status()
    return [_answer(item) for item in response.json()]


def _answer(item: dict) -> Answer:
    meta = item["meta_info"]
    return Answer(
        tokens=item["output_ids"],
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        prompt_logprobs=[entry[0] for entry in meta.get("input_token_logprobs", [])[1:]],
        logprobs=[entry[0] for entry in meta.get("output_token_logprobs", [])],
    )


def ask(url: str, prompt: list[int], new_tokens: int = 16) -> dict:
    """One greedy request; its record with output logprobs, which do not stop a hit."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": -1,
    }
    response = requests.post(url + "/generate", json=body, timeout=300)
    response.raise_for_status()
    return response.json()


def logprobs(record: dict) -> list[float]:
    """Log probabilities of the answer of `ask`."""
    return [entry[0] for entry in record["meta_info"]["output_token_logprobs"]]


def hybrid_cache(url: str) -> dict:
    """The block of /server_info."""
    return requests.get(url + "/server_info", timeout=30).json()["internal_states"][0][
        "hybrid_cache"
    ]


def metric(url: str, name: str) -> float:
    """The one sample of /metrics that `sglang_hybrid:` and `name`, a regular expression, name."""
    text = requests.get(url + "/metrics", timeout=30).text
    (value,) = re.findall(rf"^sglang_hybrid:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return float(value)


def flush(url: str) -> None:
    """Empty the server's prefix cache, once copies to other tiers that are under way have ended."""
    empty = requests.post(url + "/flush_cache", params={"timeout": 30}, timeout=60)
    empty.raise_for_status()
