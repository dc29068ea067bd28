"""A small request beside clients that send large ones."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Annotated, Any

import requests

from scripts.bench.commands import Count
from scripts.bench.report import BenchFailed, Table, times_of
from scripts.bench.servers import at_once, percentile, random_tokens
from sglang_hybrid.extensions.cpu.models import ensure_tiny_model
from sglang_hybrid.serving.server_process import ServerProcess

WORDS = ("the", "cache", "keeps", "a", "state", "of", "what", "was", "read", "before")
ANSWER = 4
"""Tokens of a small request's answer."""

CONTEXT = 32_768
"""Tokens that the embedded model takes."""

TEXT_MEGABYTES = 30
DEPTH = 900


@dataclass(frozen=True)
class Large:
    """A kind of large request. bodies: sent in turn by every client; None to read `path`. once:
    whether it was sent before others do, so that they find its prompt in the cache.
    """

    name: str
    path: str
    bodies: list[bytes] | None
    once: bool = False


def beside(
    clients: Count = 8,
    requests_: Annotated[Count, "small ones of a row"] = 200,
    seconds: Annotated[Count, "of a row at most"] = 60,
    only: Annotated[tuple[str, ...], {"metavar": "NAME"}, "of these rows"] = (),
    interval: Annotated[str | None, "--prefill-decode-interval of the server"] = None,
) -> None:
    """A small request beside clients that send large ones: what is accepted, and what is refused.

    One client sends small requests one after another, a text and a chat in turn, while --clients
    others send one kind of large request as fast as they are answered. The first row has no others.
    What fits was sent once before, so that it is found in the cache; `new texts that fit` are
    computed. Times are milliseconds of the small requests; `answered` counts the large ones by
    their status. The clients run on the same machine as the server, in one more process.
    """
    table = Table("beside", "P50", "P99", "of idle", "answered")
    flags = ["--model-path", str(ensure_tiny_model())]
    if interval is not None:
        flags += ["--prefill-decode-interval", interval]
    with ServerProcess(flags) as server:
        small = Small(server.url)
        small.times(20, seconds)
        idle = small.times(requests_, seconds)
        usual = percentile(idle, 0.99)
        table.row("nothing", *told(idle, usual), "")
        for large in kinds(server.url):
            if only and large.name not in only:
                continue
            if large.once:
                _send(server.port, large, 0, iter((False, True)).__next__, Counter())
            with Others(server.port, large, clients) as others:
                time.sleep(2)
                beside = small.times(requests_, seconds)
            answers = ", ".join(f"{n} x {status}" for status, n in sorted(others.counts.items()))
            table.row(large.name, *told(beside, usual), answers)


def told(times: list[float], usual: float) -> tuple[str, str, str]:
    p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
    return f"{1e3 * p50:.0f}", f"{1e3 * p99:.0f}", times_of(p99, usual)


def kinds(url: str) -> list[Large]:
    """The largest requests that this server accepts, then those that it refuses."""
    source = random.Random(0)
    context = CONTEXT - 64

    def text(size: int) -> str:
        words = [source.choice(WORDS) for _ in range(size // 3)]
        return " ".join(words)[:size]

    def fitting() -> str:
        ids = random_tokens(source, context)
        found = requests.post(url + "/detokenize", json={"tokens": ids}, timeout=60).json()["text"]
        while True:
            asked = {"prompt": found, "model": "default"}
            count = requests.post(url + "/tokenize", json=asked, timeout=60).json()["count"]
            if count <= context:
                return str(found)
            found = found[: int(len(found) * context / count)]

    def generate(prompt: str) -> bytes:
        sampling = {"temperature": 0, "max_new_tokens": 1}
        return json.dumps({"text": prompt, "sampling_params": sampling}).encode()

    def chat(content: str) -> bytes:
        messages = [{"role": "user", "content": content}]
        return json.dumps({"model": "default", "messages": messages, "max_tokens": 1}).encode()

    same, huge = fitting(), text(TEXT_MEGABYTES << 20)
    ids = {"input_ids": random_tokens(source, context), "sampling_params": {"max_new_tokens": 1}}
    union = "".join(f'<module name="m{n}">{text(500)}</module>' for n in range(1_900))
    pml = f'<schema name="large"><union>{union}</union></schema>'
    registered = requests.post(url + "/v1/prompt_schemas", json={"pml": pml}, timeout=600)
    schema = "accepted" if registered.ok else "refused"
    deep = b'{"input_ids": [1], "x": ' + b"[" * DEPTH + b"]" * DEPTH + b"}"
    return [
        Large("text that fits", "/generate", [generate(same)], once=True),
        Large("new texts that fit", "/generate", [generate(fitting()) for _ in range(16)]),
        Large("ids that fit", "/generate", [json.dumps(ids).encode()], once=True),
        Large("chat that fits", "/v1/chat/completions", [chat(same[:-200])], once=True),
        Large("tokenize", "/tokenize", [json.dumps({"prompt": same, "model": "x"}).encode()]),
        Large(f"schema ({schema})", "/v1/prompt_schemas/large", None, once=True),
        Large("1 MB", "/generate", [generate(text(1_000_000))]),
        Large("chat of 1 MB", "/v1/chat/completions", [chat(text(1_000_000))]),
        Large("5 MB", "/generate", [generate(text(5 << 20))]),
        Large("30 MB", "/generate", [generate(huge)]),
        Large("chat of 30 MB", "/v1/chat/completions", [chat(huge)]),
        Large("tokenize 30 MB", "/tokenize", [json.dumps({"prompt": huge, "model": "x"}).encode()]),
        Large("depth", "/generate", [deep]),
    ]


class Small:
    """Sends small requests, one after another."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session = requests.Session()
        self._random = random.Random(1)

    def times(self, count: int, seconds: float) -> list[float]:
        """Seconds of each of `count` requests, ascending; fewer, once so many seconds are over."""
        found: list[float] = []
        end = time.monotonic() + seconds
        while len(found) < count and (time.monotonic() < end or not found):
            prompt = " ".join(self._random.choice(WORDS) for _ in range(12))
            begin = time.perf_counter()
            (self._chat if len(found) % 2 else self._generate)(prompt)
            found.append(time.perf_counter() - begin)
        return sorted(found)

    def _generate(self, prompt: str) -> None:
        sampling = {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True}
        self._post("/generate", {"text": prompt, "sampling_params": sampling})

    def _chat(self, prompt: str) -> None:
        messages = [{"role": "user", "content": prompt}]
        body = {"model": "default", "messages": messages, "max_tokens": ANSWER, "ignore_eos": True}
        self._post("/v1/chat/completions", {**body, "temperature": 0})

    def _post(self, path: str, body: dict[str, Any]) -> None:
        answer = self._session.post(self._url + path, json=body, timeout=600)
        if not answer.ok:
            raise BenchFailed(f"a small request got status {answer.status_code}: {answer.text}")


class Others:
    """Clients in a process of their own, which send until the context ends."""

    def __init__(self, port: int, large: Large, clients: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._end = context.Event()
        self._told: Any = context.SimpleQueue()
        self._process = context.Process(
            target=_send_all, args=(port, large, clients, self._end, self._told)
        )
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Others:
        self._process.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self.counts = self._told.get()
        self._process.join()


def _send_all(port: int, large: Large, clients: int, end: Event, told: Any) -> None:
    counts: Counter[str] = Counter()
    at_once(lambda number: _send(port, large, number, end.is_set, counts), range(clients))
    told.put(counts)


def _send(
    port: int, large: Large, number: int, ended: Callable[[], bool], counts: Counter[str]
) -> None:
    sent = 0
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    while not ended():
        try:
            if large.bodies is None:
                connection.request("GET", large.path)
            else:
                body = large.bodies[(number + sent) % len(large.bodies)]
                head = {"Content-Type": "application/json"}
                connection.request("POST", large.path, body, head)
            answer = connection.getresponse()
            answer.read()
            counts[str(answer.status)] += 1
        except (OSError, http.client.HTTPException) as error:
            counts[type(error).__name__] += 1
            connection.close()
        sent += 1
