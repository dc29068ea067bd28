"""The prefill rate that is found while SGLang's own event loops serve, on a device and a clock of
the test: what is launched is computed later, one forward after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_hybrid.cache.tiers import forward_timer
from sglang_hybrid.cache.tiers.measured_speeds import (
    ON_ACCELERATOR,
    ON_CPU,
    TIMED_TOKENS,
    MeasuredSpeeds,
)
from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.tiers.rates import FEWEST

COST = CostModel(
    linear=16_000_000_000, quadratic=40_000, windows=(), kv_bytes_per_token=1, state_bytes=1
)
RATE = 4e14
"""FLOPs per second of the device."""

LAUNCH, DECODE, RESULT = 0.012, 0.012, 0.001
"""Seconds of the scheduler for a launch and a result, and of the device for a decode step."""

FORWARDS = MagicMock()
"""The stream in which forwards are launched."""

SIZES = [2000, 3000, 4000, 5000, 6000, 7000, 8000, 2500, 3500, 4500] * 4


class Device:
    """now: seconds of the scheduler. free: when what was launched so far will be computed."""

    def __init__(self) -> None:
        self.now = self.free = 0.0

    def launch(self, seconds: float) -> float:
        """A forward of so many seconds is launched; returns when its result is there."""
        self.now += LAUNCH
        self.free = max(self.now, self.free) + seconds
        return self.free


class Event:
    """An event in the stream of a device, as torch's are."""

    def __init__(self, device: Device) -> None:
        self._device, self._at = device, 0.0

    def record(self, stream: object) -> None:
        assert stream is FORWARDS
        self._at = max(self._device.now, self._device.free)

    def query(self) -> bool:
        return self._device.now >= self._at

    def elapsed_time(self, end: Event) -> float:
        return (end._at - self._at) * 1e3


@dataclass
class Step:
    """One turn of the loop. prefill: spans [start, end) of prompts; none: a step of decoding.
    decodes: contexts that are decoded in the same batch. result: seconds that the scheduler spends
    on the result. loads: the forward waits so many seconds for copies from the host.
    """

    prefill: Sequence[tuple[int, int]] = ()
    decodes: Sequence[int] = ()
    result: float = RESULT
    loads: float = 0.0
    idle: float = 0.0

    @property
    def flops(self) -> float:
        rows = [*self.prefill, *((length - 1, length) for length in self.decodes)]
        return float(sum(COST.flops(end) - COST.flops(start) for start, end in rows))

    def batch(self) -> Any:
        decodes: list[Any] = [object() for _ in self.decodes]
        spans = [*self.prefill, *((length - 1, length) for length in self.decodes)]
        mixed = ForwardMode.MIXED if decodes else ForwardMode.EXTEND
        batch = SimpleNamespace(
            step=self,
            forward_mode=mixed if self.prefill else ForwardMode.DECODE,
            reqs=[*(object() for _ in self.prefill), *decodes],
            decoding_reqs=decodes or None,
            prefix_lens=[start for start, _ in spans],
            extend_lens=[end - start for start, end in spans],
            extend_num_tokens=0,
            hicache_consumer_index=0 if self.loads else -1,
            is_extend_in_batch=bool(self.prefill),
            spec_algorithm=SpeculativeAlgorithm.NONE,
            req_pool_indices=None,
            seq_lens=0,
            return_logprob=False,
            return_hidden_states=False,
            grammar_needs_sync=lambda: False,
        )
        batch.copy = lambda: batch
        return batch


Serve = Callable[..., tuple[MeasuredSpeeds, list[tuple[float, float]]]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Serves steps in SGLang's loop. Returns the speeds, and FLOPs and seconds of each prefill that
    was timed.
    """
    monkeypatch.setattr(scheduler_module, "resolve_forward_inputs", lambda *_: None)

    def run(steps: Sequence[Step], *, overlap: bool, on_cpu: bool = False) -> Any:
        device = Device()
        speeds = MeasuredSpeeds(COST, on_cpu=on_cpu)
        seen: list[tuple[float, float]] = []
        observe = speeds._forwards._observe

        def note(flops: float, seconds: float) -> None:
            seen.append((flops, seconds))
            observe(flops, seconds)

        monkeypatch.setattr(speeds._forwards, "_observe", note)
        monkeypatch.setattr(forward_timer, "time", SimpleNamespace(perf_counter=lambda: device.now))
        scheduler = _scheduler(device, speeds, deque(steps), overlap=overlap, on_cpu=on_cpu)
        if overlap:
            scheduler.event_loop_overlap()
        else:
            scheduler.event_loop_normal()
        return speeds, seen

    return run


def _scheduler(
    device: Device, speeds: MeasuredSpeeds, todo: deque[Step], *, overlap: bool, on_cpu: bool
) -> Any:
    """SGLang's, with its loops and `run_batch`; the model computes on `device`."""
    scheduler: Any = object.__new__(Scheduler)

    def next_batch(running_batch: Any, last_batch: Any) -> Any:
        if not todo and last_batch is None:
            scheduler.gracefully_exit = True
        if not todo or todo[0].idle:
            if todo:
                device.now, todo[0].idle = device.now + todo[0].idle, 0.0
            return SimpleNamespace(running_batch=None, batch_to_run=None)
        return SimpleNamespace(running_batch=None, batch_to_run=todo.popleft().batch())

    def forward(batch: Any, **_: Any) -> Any:
        step = batch.step
        seconds = step.loads + (step.flops / RATE if step.prefill else DECODE)
        done = device.launch(seconds)
        if on_cpu:
            device.now = done
        return MagicMock(done=done, delay_sample_func=None, extra_keep_alive_refs=None)

    def process(batch: Any, result: Any) -> None:
        device.now = max(device.now, result.done) + batch.step.result

    scheduler.__dict__ |= dict.fromkeys(
        ("last_batch", "running_batch", "draft_worker", "scripted_scheduler_hook"), None
    )
    scheduler.__dict__ |= dict.fromkeys(
        (
            "gracefully_exit",
            "_engine_paused",
            "enable_unified_memory",
            "enable_unified_cache_external_linker",
            "require_mlp_sync",
            "enable_pdmux",
            "attn_dp_enabled",
        ),
        False,
    )
    scheduler.__dict__ |= {
        "device": "cpu" if on_cpu else "cuda",
        "device_module": SimpleNamespace(
            Event=lambda enable_timing=False: Event(device), current_stream=lambda: FORWARDS
        ),
        "enable_overlap": overlap,
        "forward_stream": FORWARDS,
        "forward_stream_ctx": nullcontext(),
        "schedule_stream": None,
        "scheduler_stage_metrics": None,
        "forward_sleep_time": None,
        "disaggregation_mode": None,
        "is_generation": True,
        "forward_ct": 0,
        "_sched_idled": False,
        "processed_tokens_counter": 0,
        "_confidence_budget_prepare": None,
        "spec_algorithm": SpeculativeAlgorithm.NONE,
        "chunked_req": None,
        "metrics_reporter": MagicMock(),
        "profiler_manager": MagicMock(),
        "future_map": MagicMock(),
        "model_worker": SimpleNamespace(forward_batch_generation=forward),
        "tp_worker": SimpleNamespace(forward_batch_generation=forward),
        "tree_cache": SimpleNamespace(speeds=speeds),
        "ingest_requests": lambda: speeds.poll(),
        "get_next_batch_to_run": next_batch,
        "process_batch_result": process,
        "on_idle": lambda: None,
        "_apply_war_barrier": lambda: None,
        "_forward_isolation": lambda batch, overlap: nullcontext(),
        "_relay_forward_payload": lambda *_: None,
        "_copy_result_to_cpu": lambda *_: None,
        "_copy_auxiliary_output_to_cpu": lambda *_: None,
        "update_cache_from_scheduler": lambda *_: None,
        "launch_batch_sample_if_needed": lambda *_: None,
    }
    return scheduler


def prompts_between_decodes(result: float = RESULT) -> list[Step]:
    """Each prefill is launched while a decode step is in flight, whose result takes so long."""
    return [step for n in SIZES for step in (Step(result=result), Step([(0, n)]), Step())]


def chunks() -> list[Step]:
    """Prompts of 32,768 tokens in chunks of 8,192."""
    one = [Step([(start, start + 8192)]) for start in range(0, 32768, 8192)]
    return [*one, Step()] * 12


def split_prompts() -> list[Step]:
    """Prompts whose prefill is cut once at a checkpoint."""
    return [step for n in SIZES for step in (Step([(0, n // 2)]), Step([(n // 2, n)]), Step())]


def mixed_batches() -> list[Step]:
    """Several prompts at once, a part of them behind what is cached, with requests that decode."""
    more = [(2048, 2048 + 512)]
    return [Step([(0, n), *more], decodes=[900, 30_000, 7]) for n in SIZES]


def idle_between() -> list[Step]:
    """Nothing runs for ten seconds behind each prompt."""
    return [step for n in SIZES for step in (Step([(0, n)]), Step(idle=10.0))]


SEQUENCES = {
    "one ends in the decode step before": lambda: prompts_between_decodes(result=0.004),
    "nothing ends in it": prompts_between_decodes,
    "the decode step before has a long result": lambda: prompts_between_decodes(result=0.2),
    "chunks": chunks,
    "split at a checkpoint": split_prompts,
    "mixed batches": mixed_batches,
    "idle between": idle_between,
}


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_the_prefill_rate_is_that_of_the_device(serve: Serve, name: str, overlap: bool) -> None:
    steps = SEQUENCES[name]()
    speeds, seen = serve(steps, overlap=overlap)
    assert speeds.rates.speeds.prefill == pytest.approx(RATE, rel=0.1)
    assert [flops for flops, _ in seen] == [step.flops for step in steps if step.prefill]
    for flops, seconds in seen:
        assert -1e-9 <= seconds - flops / RATE <= LAUNCH + 1e-9


def test_on_a_cpu_a_forward_is_done_when_its_launch_returns(serve: Serve) -> None:
    speeds, seen = serve(split_prompts(), overlap=True, on_cpu=True)
    assert speeds.rates.speeds.prefill == pytest.approx(RATE, rel=0.1)
    assert speeds.rates.speeds.prefill != pytest.approx(ON_CPU)
    assert len(seen) == 2 * len(SIZES)


def test_what_waits_for_loads_is_not_timed(serve: Serve) -> None:
    """Its layers wait for their copies from the host, so its time is not that of computing."""
    steps = [
        step for n in SIZES for step in (Step([(0, n)]), Step([(n, 2 * n)], loads=2.0), Step())
    ]
    speeds, seen = serve(steps, overlap=True)
    assert len(seen) == len(SIZES)
    assert speeds.rates.speeds.prefill == pytest.approx(RATE, rel=0.1)


def test_decodes_that_a_peer_has_run_as_a_prefill_are_not_timed(serve: Serve) -> None:
    """`ScheduleBatch.convert_decode_to_extend`: rows of one token each, and no prompt."""
    speeds, seen = serve([Step([(0, 5000)]), Step()], overlap=True)
    assert len(seen) == 1
    batch = Step(decodes=[300, 400]).batch()
    batch.forward_mode = ForwardMode.EXTEND
    assert speeds.begin_forward(MagicMock(device="cpu"), batch) is None


def test_forwards_of_few_tokens_are_not_timed(serve: Serve) -> None:
    """Probes of health, before the first request, say nothing of the rate."""
    few = [(0, TIMED_TOKENS // 2), (0, TIMED_TOKENS // 2 - 1)]
    speeds, seen = serve([*([Step(few)] * FEWEST), Step()], overlap=True)
    assert seen == []
    assert speeds.rates.speeds.prefill == ON_ACCELERATOR
    more = [(start, length + 1) for start, length in few]
    assert len(serve([Step(more), Step()], overlap=True)[1]) == 1


def test_a_device_without_timed_events_is_served_by_the_assumption(serve: Serve) -> None:
    speeds = MeasuredSpeeds(COST, on_cpu=False)
    scheduler = MagicMock(device="npu")
    scheduler.device_module.Event.side_effect = TypeError("enable_timing")
    for _ in range(3):
        assert speeds.begin_forward(scheduler, Step([(0, 5000)]).batch()) is None
    assert scheduler.device_module.Event.call_count == 1
    assert speeds.rates.speeds.prefill == ON_ACCELERATOR


def test_forwards_that_never_end_are_forgotten() -> None:
    speeds = MeasuredSpeeds(COST, on_cpu=False)
    stuck = MagicMock()
    stuck.query.return_value = False
    scheduler = MagicMock(device="cuda")
    scheduler.device_module.Event.return_value = stuck
    for _ in range(100):
        forward = speeds.begin_forward(scheduler, Step([(0, 5000)]).batch())
        assert forward is not None
        speeds.on_launch(forward)
    assert len(speeds._forwards._under_way) == forward_timer.UNDER_WAY
