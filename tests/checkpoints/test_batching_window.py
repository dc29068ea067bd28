"""An idle server reads on for the rest of a burst; a busy one does not."""

from __future__ import annotations

import gc
import itertools
from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from sglang.srt.managers.io_struct import (
    BatchTokenizedGenerateReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_hybrid.checkpoints import batching_window
from sglang_hybrid.checkpoints.company import Company
from sglang_hybrid.explain.messages import ExplainReq
from tests.messages import generation

LONG_PROMPT = batching_window.LONG_PROMPT


def embedding(tokens: int) -> TokenizedEmbeddingReqInput:
    return TokenizedEmbeddingReqInput(
        input_text=None,
        input_ids=array("q", [1] * tokens),
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(),
    )


LONG = generation(LONG_PROMPT)


class CacheOf:
    """A cache that has so many tokens of every prompt, and computes `rate` tokens a second."""

    def __init__(self, tokens: int, rate: float = LONG_PROMPT / 1.6) -> None:
        self.tokens = tokens
        self.rate = rate
        self.asked: list[Any] = []

    def cached_tokens(self, request: Any) -> int:
        self.asked.append(request)
        return self.tokens

    def prefill_seconds(self, begin: int, end: int) -> float:
        return (end - begin) / self.rate


@pytest.fixture(autouse=True)
def cache(sockets: object) -> CacheOf:
    """An empty one, which is asked."""
    empty = CacheOf(0)
    batching_window.ask(empty)
    return empty


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[zmq.Socket, zmq.Socket]]:
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    push.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
    monkeypatch.setattr(batching_window, "sock_recv", lambda socket, flags: socket.recv(flags))
    monkeypatch.setattr(batching_window, "_quiet_ms", lambda: 200.0)
    monkeypatch.setattr(batching_window, "_newest", [])
    company = Company(0.2)
    monkeypatch.setattr(batching_window, "_company", lambda: company)
    yield pull, push
    context.destroy(linger=0)


def send(push: zmq.Socket, pull: zmq.Socket) -> None:
    """Send a message, and wait until it can be read."""
    push.send(b"another")
    assert pull.poll(10_000)


def receiver(socket: zmq.Socket, last_batch: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        recv_from_tokenizer=socket,
        get_last_batch=lambda: last_batch,
        recv_limit_reached=lambda count: count >= 4,
    )


def test_what_follows_shortly_is_read_too(sockets: tuple[zmq.Socket, zmq.Socket]) -> None:
    pull, push = sockets
    push.send(b"0")
    push.send(b"1")
    assert batching_window.requests_in_window(receiver(pull), [LONG]) == [b"0", b"1"]


def test_an_embedding_request_is_long_too(sockets: tuple[zmq.Socket, zmq.Socket]) -> None:
    pull, push = sockets
    send(push, pull)
    received = [embedding(LONG_PROMPT)]
    assert batching_window.requests_in_window(receiver(pull), received) == [b"another"]


def test_a_question_about_a_long_prompt_is_not_looked_up(
    sockets: tuple[zmq.Socket, zmq.Socket], cache: CacheOf
) -> None:
    """It carries a prompt, and it is no request: it has no adapter, say."""
    pull, push = sockets
    send(push, pull)
    question = ExplainReq(input_ids=[1] * LONG_PROMPT)
    assert batching_window.requests_in_window(receiver(pull), [question, LONG]) == [b"another"]
    assert cache.asked == [LONG]


def test_no_more_than_the_receiver_takes(sockets: tuple[zmq.Socket, zmq.Socket]) -> None:
    pull, push = sockets
    for _ in range(5):
        send(push, pull)
    assert len(batching_window.requests_in_window(receiver(pull), [LONG])) == 3


@pytest.mark.parametrize(("rate", "read"), [(LONG_PROMPT / 1.6, 5), (LONG_PROMPT / 0.8, 2)])
def test_the_window_lasts_half_as_long_as_the_prefill(
    sockets: tuple[zmq.Socket, zmq.Socket],
    cache: CacheOf,
    monkeypatch: pytest.MonkeyPatch,
    rate: float,
    read: int,
) -> None:
    """Of 1.6 and 0.8 s, by a clock on which each message takes 0.15 s."""
    cache.rate = rate
    pull, push = sockets
    for _ in range(10):
        send(push, pull)
    now = itertools.count(0.0, 0.15)
    clock = SimpleNamespace(monotonic=lambda: next(now), perf_counter=lambda: 0.0)
    monkeypatch.setattr(batching_window, "time", clock)
    endless = receiver(pull)
    endless.recv_limit_reached = lambda count: False
    assert len(batching_window.requests_in_window(endless, [LONG])) == read


def told(others: int, *, at: float = 1.0, worker: str = "a") -> TokenizedGenerateReqInput:
    """A long prompt that came at `at` seconds and says how many its process had still to send."""
    prompt = generation(LONG_PROMPT)
    prompt.time_stats = SimpleNamespace(created_time=at, on_the_way=others)
    prompt.http_worker_ipc = worker
    return prompt


@pytest.fixture
def comes_alone(sockets: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The long prompts of the tenant have come a minute apart."""
    company = Company(0.2)
    for number in range(9):
        company.on_arrival(None, -60.0 * (number + 1), 0.8)
    monkeypatch.setattr(batching_window, "_company", lambda: company)


def arrive(sockets: tuple[zmq.Socket, zmq.Socket], messages: list[Any]) -> Callable[..., Any]:
    """A `sock_recv` that gives these messages, one for each that is read from the socket."""
    pull, push = sockets
    for _ in messages:
        send(push, pull)
    coming = iter(messages)

    def read(socket: zmq.Socket, flags: int) -> Any:
        socket.recv(flags)
        return next(coming)

    return read


@pytest.mark.usefixtures("comes_alone")
def test_a_tenant_whose_prompts_come_alone_is_not_kept_waiting(
    sockets: tuple[zmq.Socket, zmq.Socket],
) -> None:
    pull, push = sockets
    send(push, pull)
    assert batching_window.requests_in_window(receiver(pull), [told(0)]) == []


@pytest.mark.usefixtures("comes_alone")
def test_prompts_on_the_way_are_waited_for_whatever_was_learnt(
    sockets: tuple[zmq.Socket, zmq.Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of each process for itself; what else is there is not read once the last has come."""
    pull, _ = sockets
    monkeypatch.setattr(batching_window, "_quiet_ms", lambda: 10_000.0)
    coming = [told(0, at=50.0, worker="b"), told(1), told(0)]
    short = generation(8)
    monkeypatch.setattr(batching_window, "sock_recv", arrive(sockets, [short, *coming]))
    waiting = receiver(pull)
    waiting.recv_limit_reached = lambda count: count >= 5
    received = [told(2), told(1, worker="b")]
    assert batching_window.requests_in_window(waiting, received) == [short, *coming[:2]]


@pytest.mark.usefixtures("comes_alone")
def test_a_batch_says_what_its_last_prompt_says(
    sockets: tuple[zmq.Socket, zmq.Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    pull, _ = sockets
    monkeypatch.setattr(batching_window, "sock_recv", arrive(sockets, [told(0)]))
    batch = BatchTokenizedGenerateReqInput(batch=[told(1), told(1)])
    assert len(batching_window.requests_in_window(receiver(pull), [batch])) == 1


@pytest.mark.parametrize(
    ("received", "last_batch"),
    [
        ([], None),
        ([generation(LONG_PROMPT - 1)], None),
        ([generation(None)], None),
        ([LONG], "a batch"),
        (["rpc"], None),
        ([ExplainReq(input_ids=[1] * LONG_PROMPT)], None),
    ],
)
def test_nobody_waits_for_nothing(
    sockets: tuple[zmq.Socket, zmq.Socket], received: list[Any], last_batch: Any
) -> None:
    pull, push = sockets
    send(push, pull)
    assert batching_window.requests_in_window(receiver(pull, last_batch), received) == []


def test_a_prompt_that_is_cached_is_not_waited_for(
    sockets: tuple[zmq.Socket, zmq.Socket], cache: CacheOf
) -> None:
    pull, push = sockets
    send(push, pull)
    request = generation(LONG_PROMPT + 300)
    cache.tokens = 301
    assert batching_window.requests_in_window(receiver(pull), [request]) == []
    cache.tokens = 300
    assert batching_window.requests_in_window(receiver(pull), [request]) == [b"another"]


def test_where_no_cache_is_left_nobody_waits(sockets: tuple[zmq.Socket, zmq.Socket]) -> None:
    pull, push = sockets
    batching_window.ask(CacheOf(0))
    gc.collect()
    send(push, pull)
    assert batching_window.requests_in_window(receiver(pull), [LONG]) == []


def test_a_body_of_several_prompts_is_one_arrival(
    sockets: tuple[zmq.Socket, zmq.Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tenant is not taken for one whose prompts come in company."""
    pull, _ = sockets
    alone = Company(0.2)
    monkeypatch.setattr(batching_window, "_company", lambda: alone)
    for number in range(5):
        batch = BatchTokenizedGenerateReqInput(batch=[told(0, at=60.0 * number)] * 3)
        batching_window.requests_in_window(receiver(pull, "a batch"), [batch])
    assert alone.patience(None, 1.0) == 0.0


def test_zero_turns_it_off(
    sockets: tuple[zmq.Socket, zmq.Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    pull, push = sockets
    monkeypatch.setattr(batching_window, "_quiet_ms", lambda: 0.0)
    send(push, pull)
    assert batching_window.requests_in_window(receiver(pull), [LONG]) == []
