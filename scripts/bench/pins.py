"""What lifetimes of marked blocks are worth, and what they cost, under the reuse index.

Recorded conversations, request after request, as served with two pools. Every request marks what
coding agents mark: the end of the first message for an hour, and the ends of the last two messages
and of the prompt for five minutes. Token hit rates in percent: nothing marked; marked positions,
which get checkpoints and no lifetime; and pins of each priority.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from scripts.bench.report import Table
from scripts.bench.traces import SIZES, add_traces, read_named
from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.pin import PinRequest, Priority
from sglang_hybrid.core.server_settings import Serving, Split
from sglang_hybrid.replay.systems import Setting, Spec
from sglang_hybrid.simulation.simulator import hit_rate
from sglang_hybrid.simulation.traces.requests import Request

COST = CostModel.paper_7b()
CONVERSATIONS = ("taubench_airline", "sharegpt_55", "claude_code_64k")
FIVE_MINUTES, HOUR, NO_TIME = 300.0, 3_600.0, 1e-6


def arguments(parser: argparse.ArgumentParser) -> None:
    add_traces(parser)
    parser.add_argument("--requests", type=int, default=600, help="of each trace, from its start")


def run(options: argparse.Namespace) -> None:
    heads = ("not marked", "marked", *(f"pinned, {each.value}" for each in Priority))
    table = Table("trace", "GB", *heads, text=1)
    for name in CONVERSATIONS:
        requests = read_named(options.traces, name)[: options.requests]
        for size in SIZES[name]:
            shown = [_hits(requests, size)]
            shown.append(
                _hits([_marked(one, Priority.NORMAL, kept=False) for one in requests], size)
            )
            for priority in Priority:
                shown.append(_hits([_marked(one, priority) for one in requests], size))
            table.row(name, f"{size:g}", *(f"{100 * share:.1f}" for share in shown))


def _hits(requests: Sequence[Request], size: float) -> float:
    budget = Split.of(int(size * 1e9), COST)
    return hit_rate(
        Spec("reuse").build(Setting(COST, budget, requests, serving=Serving())).run(requests)
    )


def _marked(request: Request, priority: Priority, *, kept: bool = True) -> Request:
    """The request with four marks; not `kept`: without lifetimes."""
    starts = [at for at in request.message_starts if 0 < at < request.input_len]
    marks = sorted({*starts[:1], *starts[-2:], request.input_len - 1} - {0})
    pins = [
        PinRequest(at, (FIVE_MINUTES if number else HOUR) if kept else NO_TIME, priority)
        for number, at in enumerate(marks)
    ]
    return replace(request, pins=tuple(pins))
