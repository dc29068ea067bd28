"""What smaller copies below the device are worth on traces, replayed with sizes of Nemotron-H-8B.

A row per trace and size of the device; the host holds --ratio times as much. For each codec: hits
in percent of all prompt tokens, those of them that are not exact (resumed from a smaller copy, or
computed behind one), and what each gigabyte of the host adds to the hits of the device alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from scripts.bench.policies import COST
from scripts.bench.report import Table
from scripts.bench.traces import add_traces, read_named
from sglang_hybrid.replay.runner import Job, Runner
from sglang_hybrid.replay.systems import Spec
from sglang_hybrid.simulation.tiers.tier_budgets import CopyCodec, TierBudgets
from sglang_hybrid.simulation.traces.requests import Request

NEMOTRON_H_8B = replace(
    COST.with_sizes(kv_bytes_per_token=16_384, state_bytes=102_137_856), state_value_bytes=4
)
DEVICES = {  # GB
    "taubench_airline": (2.0, 4.0),
    "sharegpt_55": (1.0, 2.0),
    "bbh_fewshot": (1.0, 2.0),
    "claude_code_64k": (8.0, 16.0),
    "mooncake_conversation_trace": (16.0, 32.0),
}


@dataclass(frozen=True)
class Row:
    """Requests of one trace, and bytes of device and host."""

    trace: str
    requests: Sequence[Request]
    device: int
    host: int

    def cells(self) -> Iterator[str]:
        """Of all codecs: hit rates, shares that are not exact, and points per gigabyte of host."""
        runner = Runner({self.trace: self.requests})
        cost = NEMOTRON_H_8B
        alone = runner.run(Job(Spec("reuse"), self.trace, cost, self.device)).hit_rate
        yield f"{100 * alone:.1f}"
        tiers = TierBudgets.of(self.device, self.host)
        rates, inexact = [], []
        for codec in CopyCodec:
            coded = tiers.with_codecs(codec, CopyCodec.EXACT)
            result = runner.run(Job(Spec("reuse"), self.trace, cost, None, tiers=coded))
            assert result.tiers is not None
            rates.append(result.hit_rate)
            inexact.append(result.tiers.inexact_tokens / int(result.input_len.sum()))
        yield from (f"{100 * rate:.1f}" for rate in rates)
        yield from (f"{100 * share:.1f}" for share in inexact[1:])
        yield from (f"{100 * (rate - alone) / (self.host / 1e9):.2f}" for rate in rates)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ratio", type=float, default=1.0, help="bytes of the host to the device")
    parser.add_argument("--only", nargs="+", choices=DEVICES, default=list(DEVICES))
    add_traces(parser)


def run(options: argparse.Namespace) -> None:
    names = [codec.value for codec in CopyCodec]
    table = Table(
        *("trace", "device GB", "host GB", "device alone"),
        *(f"hit %: {name}" for name in names),
        *(f"not exact: {name}" for name in names[1:]),
        *(f"points per host GB: {name}" for name in names),
    )
    for trace in options.only:
        requests = read_named(options.traces, trace)
        for device in DEVICES[trace]:
            host = device * options.ratio
            row = Row(trace, requests, int(device * 1e9), int(host * 1e9))
            table.row(trace, f"{device:g}", f"{host:g}", *row.cells())
