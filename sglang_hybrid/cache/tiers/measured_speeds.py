"""The speeds that decisions about tiers are made with: measured on the rank that receives requests,
in force on all ranks at the same step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_hybrid.cache.tiers.forward_timer import ForwardTimer, TimedForward
from sglang_hybrid.core.tiers.rates import Link, Rates, Speeds, Tier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_hybrid.core.costs.cost import CostModel

ON_CPU = 3e10
ON_ACCELERATOR = 1e14
"""FLOPs per second of a prefill, and below bytes per second, until they are measured."""
HOST_ON_CPU = Link(4e9)
HOST_ON_ACCELERATOR = Link(20e9, 2e-5)
DISK = Link(2e9, 1e-4)

TIMED_TOKENS = 256
"""Forwards of fewer new tokens tell little of the prefill rate: what every forward takes besides is
most of their time. A server's first forwards are probes of its health, of a few tokens each.
"""


@dataclass(frozen=True)
class SpeedsMeasured:
    """A message with the speeds with which every rank decides from the step at which it arrives."""

    speeds: Speeds


class MeasuredSpeeds:
    """Speeds in force on this rank, and what this rank measures.

    Args:
        cost: FLOPs of the served model.
        on_cpu: which assumptions hold until something was measured.
    """

    def __init__(self, cost: CostModel, *, on_cpu: bool) -> None:
        host = HOST_ON_CPU if on_cpu else HOST_ON_ACCELERATOR
        self.speeds = Speeds.of(ON_CPU if on_cpu else ON_ACCELERATOR, host, DISK)
        self.rates = Rates(self.speeds)
        self._cost = cost
        self._sent = self.speeds
        self._forwards = ForwardTimer(self.rates.observe_prefill)

    def begin_forward(self, scheduler: Scheduler, batch: ScheduleBatch) -> TimedForward | None:
        """`scheduler` is about to compute `batch`, which takes time from now on. None if that tells
        nothing of the prefill rate: where no prompt is in the batch, or few tokens of prompts, or
        where the forward waits for what it loads from the host, layer by layer.
        """
        mode = batch.forward_mode
        if not mode.is_extend_without_speculative() or mode.is_split_prefill():
            return None
        only_decodes = len(batch.decoding_reqs or ()) == len(batch.reqs)
        few = sum(batch.extend_lens) < TIMED_TOKENS
        if only_decodes or few or batch.hicache_consumer_index >= 0:
            return None
        of = self._cost.flops
        rows = zip(batch.prefix_lens, batch.extend_lens, strict=True)
        flops = sum(of(start + length) - of(start) for start, length in rows)
        return self._forwards.begin(float(flops), scheduler)

    def on_launch(self, forward: TimedForward) -> None:
        """Called when all of `forward` has been given to the device."""
        self._forwards.on_launch(forward)

    def on_load(self, ack: Any) -> None:
        """Called when SGLang acknowledges a load from the host (`HiCacheAck`)."""
        _observe(self.rates.observe_load, ack)

    def on_write(self, ack: Any) -> None:
        """The same for a backup."""
        _observe(self.rates.observe_write, ack)

    def poll(self) -> list[SpeedsMeasured]:
        """The message of the rank that receives requests to all ranks, with the requests of this
        step.
        """
        self._forwards.collect()
        if self.rates.speeds is self._sent:
            return []
        self._sent = self.rates.speeds
        return [SpeedsMeasured(self._sent)]

    def handlers(self) -> list[tuple[type, Callable[[SpeedsMeasured], None]]]:
        """The handlers that the scheduler's dispatcher must know."""
        return [(SpeedsMeasured, self.adopt)]

    def adopt(self, measured: SpeedsMeasured) -> None:
        """Use these speeds from now on; called on every rank at the same step."""
        self.speeds = measured.speeds

    def as_dict(self) -> dict[str, float]:
        """Speeds for /server_info: FLOPs and bytes per second."""
        loads, writes = self.speeds.loads[Tier.HOST], self.speeds.writes[Tier.HOST]
        return {
            "prefill_flops_per_second": float(self.speeds.prefill),
            "host_load_bytes_per_second": float(loads.bandwidth),
            "host_load_latency_seconds": float(loads.latency),
            "host_write_bytes_per_second": float(writes.bandwidth),
            "host_write_latency_seconds": float(writes.latency),
        }


def _observe(observe: Callable[[Tier, int, float], None], ack: Any) -> None:
    if ack.timing_enabled and ack.num_bytes:
        seconds = ack.start_event.elapsed_time(ack.finish_event) / 1e3
        observe(Tier.HOST, ack.num_bytes, seconds)
