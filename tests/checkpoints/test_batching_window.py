"""An idle server reads on for the rest of a burst; a busy one does not."""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_hybrid.checkpoints import batching_window
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


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[zmq.Socket, zmq.Socket]]:
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    push.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
    monkeypatch.setattr(batching_window, "sock_recv", lambda socket, flags: socket.recv(flags))
    monkeypatch.setattr(batching_window, "_quiet_ms", lambda: 200.0)
    monkeypatch.setattr(batching_window, "_look_ups", [])
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


def send_later(push: zmq.Socket, count: int) -> threading.Thread:
    def send() -> None:
        for number in range(count):
            time.sleep(0.02)
            push.send(b"%d" % number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_what_follows_shortly_is_read_too(sockets: tuple[zmq.Socket, zmq.Socket]) -> None:
    pull, push = sockets
    thread = send_later(push, 2)
    assert batching_window.requests_in_window(receiver(pull), [LONG]) == [b"0", b"1"]
    thread.join()


def test_an_embedding_request_is_long_too(sockets: tuple[zmq.Socket, zmq.Socket]) -> None:
    pull, push = sockets
    send(push, pull)
    received = [embedding(LONG_PROMPT)]
    assert batching_window.requests_in_window(receiver(pull), received) == [b"another"]


def test_a_question_about_a_long_prompt_is_not_looked_up(
    sockets: tuple[zmq.Socket, zmq.Socket],
) -> None:
    """It carries a prompt, and it is no request: it has no adapter, say."""
    pull, push = sockets
    cache = CacheOf(0)
    batching_window.look_up_with(cache.cached_tokens)
    send(push, pull)
    question = ExplainReq(input_ids=[1] * LONG_PROMPT)
    assert batching_window.requests_in_window(receiver(pull), [question, LONG]) == [b"another"]
    assert cache.asked == [LONG]


def test_no_more_than_the_receiver_takes(sockets: tuple[zmq.Socket, zmq.Socket]) -> None:
    pull, push = sockets
    thread = send_later(push, 5)
    assert len(batching_window.requests_in_window(receiver(pull), [LONG])) == 3
    thread.join()


def test_the_window_is_at_most_so_many_quiet_periods_long(
    sockets: tuple[zmq.Socket, zmq.Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four periods of 0.2 s, by a clock on which each message takes 0.15 s."""
    pull, push = sockets
    for _ in range(10):
        send(push, pull)
    now = itertools.count(0.0, 0.15)
    clock = SimpleNamespace(monotonic=lambda: next(now))
    monkeypatch.setattr(batching_window, "time", clock)
    endless = receiver(pull)
    endless.recv_limit_reached = lambda count: False
    assert len(batching_window.requests_in_window(endless, [LONG])) == 5


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


class CacheOf:
    """A cache that has so many tokens of every prompt."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.asked: list[Any] = []

    def cached_tokens(self, request: Any) -> int:
        self.asked.append(request)
        return self.tokens


def test_a_prompt_that_is_cached_is_not_waited_for(sockets: tuple[zmq.Socket, zmq.Socket]) -> None:
    pull, push = sockets
    send(push, pull)
    request = generation(LONG_PROMPT + 300)
    cache = CacheOf(301)
    batching_window.look_up_with(cache.cached_tokens)
    assert batching_window.requests_in_window(receiver(pull), [request]) == []
    cache.tokens = 300
    assert batching_window.requests_in_window(receiver(pull), [request]) == [b"another"]


def test_a_cache_that_is_gone_is_not_asked(sockets: tuple[zmq.Socket, zmq.Socket]) -> None:
    pull, push = sockets
    batching_window.look_up_with(CacheOf(10_000).cached_tokens)
    send(push, pull)
    assert batching_window.requests_in_window(receiver(pull), [LONG]) == [b"another"]


def test_zero_turns_it_off(
    sockets: tuple[zmq.Socket, zmq.Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    pull, push = sockets
    monkeypatch.setattr(batching_window, "_quiet_ms", lambda: 0.0)
    send(push, pull)
    assert batching_window.requests_in_window(receiver(pull), [LONG]) == []
