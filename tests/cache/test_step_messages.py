"""Messages of one rank arrive on all ranks at the same step, however seldom SGLang receives
(`--scheduler-recv-interval`). Receiver, skipper and loop body are SGLang's own.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import zmq
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components import recv_skipper, request_receiver
from sglang.srt.managers.scheduler_components.recv_skipper import SchedulerRecvSkipper
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.utils import TypeBasedDispatcher

from sglang_hybrid.cache.step_messages import StepMessages
from sglang_hybrid.cache.tuning import Tuning
from sglang_hybrid.core.returns.history import History, SavedHistory
from sglang_hybrid.core.specs import PolicySwitch
from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.extensions.disk.learnt_file import pack
from sglang_hybrid.extensions.lab.simulation.tuner.tuner import Tuner
from sglang_hybrid.extensions.lab.systems import Spec
from tests.cache.backends import options
from tests.cache.driver import Sizes
from tests.cache.tiers import build_tiered_cache

ROOM = Sizes(states=8, kv=256, rows=6, context=256)
KEY = b"k" * 32


class Rank:
    """A scheduler with a cache, and what its cache was told: step by step."""

    def __init__(self, number: int, current: list[int]) -> None:
        self.number, self._current = number, current
        self.cache = build_tiered_cache(ROOM, options("reuse"))
        self.learning = MagicMock()
        self.learning.poll.return_value = []
        self.learning.restore.side_effect = self._restored
        self.learning.handlers.return_value = [(SavedHistory, self.learning.restore)]
        cache = self.cache
        cache.tuning = Tuning(cache, cache.parts)
        sources = (cache.speeds, self.learning, cache.tuning, cache.step_clock)
        cache.step_messages = StepMessages(*sources)
        self.restored: list[bytes] = []
        self.scheduler = self._scheduler()
        self._dispatcher = TypeBasedDispatcher(self.cache.step_messages.handlers())
        self.told: list[tuple[int, str]] = []
        self.steps = 0
        self.scheduler._request_dispatcher = self._dispatch

    def _restored(self, before: SavedHistory) -> None:
        self.restored.append(before.content)

    def _dispatch(self, message: Any) -> None:
        self.told.append((self.steps, type(message).__name__))
        self._dispatcher(message)

    def _scheduler(self) -> Any:
        scheduler: Any = object.__new__(Scheduler)
        names = ("session_controller", "flush_wrapper", "metrics_reporter", "ipc_channels")
        scheduler.__dict__ |= {name: MagicMock() for name in names}
        scheduler.__dict__ |= {
            "tree_cache": self.cache,
            "_deferred_input_requests": [],
            "scheduler_stage_metrics": None,
            "external_corpus_manager": None,
            "request_receiver": SchedulerRequestReceiver(
                recv_from_tokenizer=None,
                recv_from_rpc=None,
                recv_skipper=SchedulerRecvSkipper.maybe_create(),
                input_blocker=None,
                mm_receiver=None,
                server_args=SimpleNamespace(radix_cache_backend="another"),
                model_config=SimpleNamespace(is_multimodal=False),
                max_recv_per_poll=-1,
                stream_output=lambda *_: None,
                get_last_batch=lambda: SimpleNamespace(forward_mode=ForwardMode.DECODE),
            ),
        }
        return scheduler

    def step(self) -> None:
        self._current[0] = self.number
        self.scheduler.ingest_requests()
        self.steps += 1


@pytest.fixture
def make_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Rank]]:
    """Two ranks of one server; the first one receives, and its broadcasts reach the second."""
    current = [0]
    mail: list[bytes] = []

    def parallel() -> Any:
        group = SimpleNamespace(rank=current[0], ranks=[0, 1], cpu_group=None)
        return SimpleNamespace(
            attn_dp_enabled=False,
            tp_size=2,
            tp_group=group,
            pp_rank=0,
            attn_tp_rank=current[0],
            attn_cp_rank=0,
        )

    def broadcast(data: Any, rank: int, *_: Any, src: int) -> Any:
        if rank == src:
            assert not mail, "a rank did not receive in the step before"
            mail.append(pickle.dumps(data))
            return data
        return pickle.loads(mail.pop())

    def nothing(*_: Any) -> None:
        raise zmq.ZMQError

    for module in (scheduler_module, request_receiver, recv_skipper):
        monkeypatch.setattr(module, "get_parallel", parallel)
    monkeypatch.setattr(request_receiver, "broadcast_pyobj", broadcast)
    monkeypatch.setattr(request_receiver, "sock_recv", nothing)
    off = SimpleNamespace(language_only=False, enable_pd_role_switch=False)
    for module in (scheduler_module, request_receiver):
        monkeypatch.setattr(module, "get_disagg", lambda: off)
    monkeypatch.setattr(
        scheduler_module, "get_mm", lambda: SimpleNamespace(mm_feature_transport="x")
    )

    def make(interval: int) -> list[Rank]:
        monkeypatch.setattr(
            recv_skipper,
            "get_schedule",
            lambda: SimpleNamespace(scheduler_recv_interval=interval),
        )
        return [Rank(number, current) for number in range(2)]

    return make


def run(ranks: list[Rank], steps: int) -> None:
    for _ in range(steps):
        for rank in ranks:
            rank.step()


@pytest.mark.parametrize("interval", [1, 4, 50])
def test_every_message_arrives_on_all_ranks_at_the_same_step(
    make_ranks: Callable[[int], list[Rank]], interval: int
) -> None:
    ranks = make_ranks(interval)
    first = ranks[0]
    content = pack(History().export(lambda tenant: "a"))
    run(ranks, interval // 2)
    first.learning.poll.side_effect = [[SavedHistory(content, KEY)], *([] for _ in range(1000))]
    for _ in range(8):  # eight measurements: another speed than was assumed
        first.cache.speeds.rates.observe_load(Tier.HOST, 10**9, 0.5)
    switch = PolicySwitch(1, Spec("lru"), "a test")
    tuner = first.cache.tuning.tuner = MagicMock(spec=Tuner)
    tuner.poll.return_value = switch
    tuner.on_adoption.side_effect = lambda _: setattr(tuner.poll, "return_value", None)
    run(ranks, 2 * interval)
    assert [name for _, name in first.told].count("SpeedsMeasured") == 1
    assert [name for _, name in first.told].count("SavedHistory") == 1
    assert [name for _, name in first.told].count("PolicySwitch") == 1
    assert first.told == ranks[1].told
    for rank in ranks:
        assert rank.restored == [content]
        assert rank.cache.speeds.speeds == first.cache.speeds.rates.speeds
        assert rank.cache.speeds.speeds.loads[Tier.HOST].bandwidth == pytest.approx(2e9)
        assert rank.cache.policy_name == "lru"


@pytest.mark.parametrize("interval", [4, 50])
def test_the_newest_of_several_messages_of_a_kind_arrives(
    make_ranks: Callable[[int], list[Rank]], interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = make_ranks(interval)
    now = 0.0
    clock = ranks[0].cache.step_clock
    monkeypatch.setattr(clock, "read", lambda: now)
    clock.join(lambda seconds: True)
    times = []
    for _ in range(4 * interval):
        now += 0.06
        run(ranks, 1)
        times.append(clock.now)
        assert ranks[1].cache.step_clock.now == clock.now
    ticks = [step for step, name in ranks[1].told if name == "ClockTick"]
    assert ticks == [interval * number - 1 for number in range(1, 5)]
    assert clock.now - times[interval - 1] == pytest.approx(0.06 * 3 * interval)


def test_a_message_that_fails_is_not_sent_again() -> None:
    def fails(message: str) -> None:
        raise KeyError(message)

    messages = StepMessages(
        SimpleNamespace(poll=iter([["once"], []]).__next__, handlers=lambda: [(str, fails)])
    )
    assert messages.poll() == ["once"]
    ((_, handle),) = messages.handlers()
    with pytest.raises(KeyError):
        handle("once")
    assert messages.poll() == []
