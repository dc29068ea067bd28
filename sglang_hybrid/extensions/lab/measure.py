"""Measures how long a running server prefills and decodes, for the replay's model of time."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import requests

from sglang_hybrid.core.sentences import quote
from sglang_hybrid.extensions.lab.simulation.prefill_time import PrefillTime
from sglang_hybrid.serving.answers import read_answer

T = TypeVar("T")

FEW, MANY = 1, 33  # tokens of the answers that decoding is measured with


@dataclass(frozen=True)
class TimedAnswer:
    """One answered prompt: tokens that were hit, the answer, and seconds until it was complete."""

    cached: int
    tokens: list[int]
    seconds: float


Ask = Callable[[list[int], int], TimedAnswer]
Measured = list[tuple[int, int, float]]  # hit, new tokens, seconds


def measure(
    ask: Ask,
    lengths: Sequence[int],
    hits: Sequence[int],
    *,
    repeats: int = 3,
    seed: int = 0,
    tokens: tuple[int, int] = (300, 4_000),
    done: Callable[[], None] = lambda: None,
) -> Measured:
    """Medians over `repeats` of prefills of each length after each hit, one request at a time.

    Prompts are random ids from `tokens`; a hit is made by going on from an answered prompt, and
    what counts is what the server says it hit. seconds include one decoded token and the way there.
    """
    rng = random.Random(seed)

    def text(length: int) -> list[int]:
        return [rng.randrange(*tokens) for _ in range(length)]

    ask(text(lengths[0]), FEW)  # the first request of a shape may compile
    measured: Measured = []
    for hit in hits:
        for length in lengths:
            times: dict[int, list[float]] = {}
            for _ in range(repeats):
                prompt: list[int] = []
                if hit:
                    prompt = text(hit)
                    prompt += ask(prompt, FEW).tokens
                prompt = prompt + text(length)
                answer = ask(prompt, FEW)
                times.setdefault(answer.cached, []).append(answer.seconds)
                total = len(prompt)
            cached, seconds = max(times.items(), key=lambda item: len(item[1]))
            measured.append((cached, total - cached, statistics.median(seconds)))
            done()
    return measured


def decode_seconds(ask: Ask, prompt: list[int], repeats: int = 3) -> float:
    """Seconds per decoded token, alone on the server: the prompt's prefill is hit both times."""
    ask(prompt, FEW)
    short = statistics.median(ask(prompt, FEW).seconds for _ in range(repeats))
    long = statistics.median(ask(prompt, MANY).seconds for _ in range(repeats))
    return max(long - short, 0.0) / (MANY - FEW)


def fit(ask: Ask, measured: Measured, about: str, seed: int = 0) -> PrefillTime:
    """The model of time of what was measured. Decoded tokens are taken out of the prefills."""
    rng = random.Random(seed)
    decode = decode_seconds(ask, [rng.randrange(300, 4_000) for _ in range(64)])
    prefills = [(hit, new, max(s - decode, s / 10)) for hit, new, s in measured]
    return PrefillTime.fit(prefills, decode, about)


class _Info(msgspec.Struct):
    model_path: str = "a model"


class _Meta(msgspec.Struct):
    cached_tokens: int


class _Generated(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int]


class Server:
    """A running server's /generate."""

    def __init__(self, url: str, timeout: float = 600.0) -> None:
        """Raises ValueError, in one sentence, if nobody answers there."""
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._session = requests.Session()
        self.model = self._call(_Info, "get", "/get_model_info").model_path

    def ask(self, prompt: list[int], new_tokens: int) -> TimedAnswer:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        begin = time.perf_counter()
        answer = self._call(_Generated, "post", "/generate", json=body)
        seconds = time.perf_counter() - begin
        return TimedAnswer(answer.meta_info.cached_tokens, answer.output_ids, seconds)

    def _call(self, schema: type[T], how: str, path: str, **more: Any) -> T:
        call: dict[str, Any] = {"timeout": self.timeout, "stream": True, **more}
        try:
            response = self._session.request(how, self.url + path, **call)
            answer = read_answer(response)
        except requests.RequestException as error:
            raise ValueError(f"no server answers at {self.url}") from error
        try:
            if response.ok:
                return msgspec.convert(answer, schema)
        except msgspec.ValidationError as error:
            raise ValueError(f"{self.url}{path} is no server of SGLang's ({error})") from error
        why = "" if answer is None else f": {quote(answer)}"
        raise ValueError(f"{self.url}{path} answered {response.status_code}{why}")
