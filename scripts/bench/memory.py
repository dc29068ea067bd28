"""What memory is worth, replayed: split or one, pins, tiers below the device, smaller copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Annotated

from scripts.bench.commands import one_of
from scripts.bench.report import Table
from scripts.bench.traces import (
    COST,
    NEMOTRON_H_8B,
    ONE_MEMORY,
    SIZES,
    TRACES,
    TWO_POOLS,
    Folder,
    Row,
    Seeds,
    percent,
    read_named,
    read_or_generate,
)
from sglang_hybrid.core.costs.cost import MOST_STATES_TO_KV, TOKENS_PER_STATE, CostModel
from sglang_hybrid.core.records.pin import PinRequest, Priority
from sglang_hybrid.core.server_settings import Split
from sglang_hybrid.core.traffic.recorder import RequestWindow
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.runner import Job, Result, Runner
from sglang_hybrid.extensions.lab.simulation.prefill_time import PAPER
from sglang_hybrid.extensions.lab.simulation.tiers.tier_budgets import CopyCodec, TierBudgets
from sglang_hybrid.extensions.lab.simulation.tuner.splits import find_better_split, splits_of
from sglang_hybrid.extensions.lab.systems import Spec

REUSE = Spec("reuse")


@dataclass(frozen=True)
class Model:
    """A model, more memory than the rows say, and KV tokens per state slot to try; the first of
    them is SGLang's.
    """

    name: str
    cost: CostModel
    memory: float
    tokens_per_state: tuple[int, ...]

    def hit_rate(self, runner: Runner, row: Row, policy: Spec, tokens: int | None) -> float:
        """Percent, with so many KV tokens per state slot; None: KV and states in one memory."""
        trace, size = row
        budget = int(size * self.memory * 1e9)
        if tokens is None:
            return percent(runner, policy, trace, budget, self.cost, serving=ONE_MEMORY)
        ratio = self.cost.state_bytes / (tokens * self.cost.kv_bytes_per_token)
        pools = Split.of(budget, self.cost, ratio)
        return percent(runner, policy, trace, pools, self.cost, serving=TWO_POOLS)


MODELS = (
    Model("paper 7B", COST, 1.0, (454, 600, 800, 1_000, 1_300, 1_600, 2_300)),
    Model(
        "Nemotron-H-8B", NEMOTRON_H_8B, 2.3, (6_927, 35_000, 17_000, 10_000, 4_156, 2_078, 1_100)
    ),
)


def pools(policy: str = "reuse", traces: Folder = TRACES, generated: Seeds = None) -> None:
    """How memory is best split between KV and states: hit rates by KV tokens per state slot.

    The rows of `policies` as served, for a model whose state is as large as 409 tokens of KV (the
    paper's 7B) and for one where it is 6,234 (sizes of Nemotron-H-8B; 2.3 times the memory).
    Percent of prompt tokens, the mean of each trace's sizes. The first column is SGLang's default
    of --mamba-full-memory-ratio; the last one is one memory, without a split (--hybrid-memory one).
    Then, for each trace, what the others would choose.
    """
    runner, rows = read_or_generate(traces, generated)
    print(
        f"Our default: a state per {TOKENS_PER_STATE:,} tokens, at most {MOST_STATES_TO_KV} bytes "
        "of states per byte of KV."
    )
    for model in MODELS:
        show_splits(runner, rows, model, Spec.parse(policy))


def show_splits(runner: Runner, rows: Sequence[Row], model: Model, policy: Spec) -> None:
    """Print the table of one model, and what the other traces would choose for each."""
    splits = model.tokens_per_state
    print(f"\n{model.name}, {policy}; KV tokens per state slot (states' share of the memory)\n")
    size = model.cost.state_bytes / model.cost.kv_bytes_per_token
    heads = [f"{tokens:,} ({size / (size + tokens):.0%})" for tokens in splits]
    table = Table("trace", f"{heads[0]}, SGLang's", *heads[1:], "one")
    found: dict[str, list[float]] = {}
    for trace in dict.fromkeys(trace for trace, _ in rows):
        mine = [row for row in rows if row[0] == trace]
        found[trace] = [
            mean(model.hit_rate(runner, row, policy, tokens) for row in mine)
            for tokens in (*splits, None)
        ]
        table.row(trace, *(f"{rate:.1f}" for rate in found[trace]))
    columns = list(zip(*found.values(), strict=True))
    table.row("**mean**", *(f"{mean(column):.1f}" for column in columns))
    print("\nChosen by the other traces: ", end="")
    for trace, rates in found.items():
        others = [sum(columns[at]) - rates[at] for at in range(len(splits))]
        best = others.index(max(others))
        print(f"{trace} {splits[best]:,} ({rates[best] - rates[0]:+.1f}); ", end="")
    print()


def better_split(traces: Folder = TRACES, generated: Seeds = None) -> None:
    """What a server with two pools gains where its next start follows the traffic of the last one.

    Each trace is cut into halves. The first half chooses the split as a running server does: it is
    replayed on several, and the hits of its later requests are compared. Then the second half is
    replayed from an empty cache. Percent of prompt tokens of the second half, under the reuse index
    as served: our default split; the chosen one; the best of all in hindsight; and one memory.
    States' share of the memory in parentheses.
    """
    runner, rows = read_or_generate(traces, generated)
    for model in MODELS:
        print(f"\n{model.name}\n")
        table = Table("trace", "GB", "default", "chosen", "best in hindsight", "one memory")
        found = []
        for trace, size in rows:
            cost, budget = model.cost, int(size * model.memory * 1e9)
            default, requests = Split.of(budget, cost), runner.traces[trace]
            half = len(requests) // 2
            seen = RequestWindow(requests[:half], cost, default, half // 2, serving=TWO_POOLS)
            better = find_better_split(seen, REUSE, Split(0, 0))
            chosen = default if better is None else better.split
            later = Runner({trace: requests[half:]})
            splits = dict.fromkeys((default, chosen, *splits_of(default, cost)))
            rates = {
                split: percent(later, REUSE, trace, split, cost, serving=TWO_POOLS)
                for split in splits
            }
            one = percent(later, REUSE, trace, budget, cost, serving=ONE_MEMORY)
            shown = (default, chosen, max(splits, key=lambda split: rates[split]))
            cells = (
                f"{rates[split]:.1f} ({split.slots * cost.state_bytes / budget:.0%})"
                for split in shown
            )
            table.row(trace, f"{size:g}", *cells, f"{one:.1f}")
            found.append((*(rates[split] for split in shown), one))
        default_mean, *means = (mean(column) for column in zip(*found, strict=True))
        table.row("**mean**", "", *(f"{rate:.1f}" for rate in (default_mean, *means)))
        closed = 100 * (means[0] - default_mean) / (means[-1] - default_mean)
        print(f"\nThe chosen split closes {closed:.0f} % of the distance to one memory.")


CONVERSATIONS = ("taubench_airline", "sharegpt_55", "claude_code_64k")
FIVE_MINUTES, HOUR, NO_TIME = 300.0, 3_600.0, 1e-6


def pins(
    traces: Folder = TRACES,
    requests: Annotated[int, "of each trace, from its start"] = 600,
) -> None:
    """What lifetimes of marked blocks are worth, and what they cost, under the reuse index.

    Recorded conversations, request after request, as served with two pools. Every request marks
    what coding agents mark: the end of the first message for an hour, and the ends of the last two
    messages and of the prompt for five minutes. Token hit rates in percent: nothing marked; marked
    positions, which get checkpoints and no lifetime; and pins of each priority.
    """
    heads = ("not marked", "marked", *(f"pinned, {each.value}" for each in Priority))
    table = Table("trace", "GB", *heads)
    for name in CONVERSATIONS:
        plain = read_named(traces, name)[:requests]
        variants: dict[str, Sequence[Request]] = {
            "not marked": plain,
            "marked": [marked(one, Priority.NORMAL, kept=False) for one in plain],
            **{each.value: [marked(one, each) for one in plain] for each in Priority},
        }
        runner = Runner(variants)
        for size in SIZES[name]:
            budget = Split.of(int(size * 1e9), COST)
            rates = (percent(runner, REUSE, how, budget, serving=TWO_POOLS) for how in variants)
            table.row(name, f"{size:g}", *(f"{rate:.1f}" for rate in rates))


def marked(request: Request, priority: Priority, *, kept: bool = True) -> Request:
    """The request with four marks; not `kept`: without lifetimes."""
    starts = [at for at in request.message_starts if 0 < at < request.input_len]
    marks = sorted({*starts[:1], *starts[-2:], request.input_len - 1} - {0})
    pins = [
        PinRequest(at, (FIVE_MINUTES if number else HOUR) if kept else NO_TIME, priority)
        for number, at in enumerate(marks)
    ]
    return replace(request, pins=tuple(pins))


DEVICES: dict[str, tuple[float, ...]] = {  # GB, with a tenfold host: where LRU loses something
    "taubench_airline": (0.8, 1, 2),
    "sharegpt_55": (0.3, 0.4, 1),
    "bbh_fewshot": (0.2, 0.3, 0.4),
    "claude_code_64k": (4.5, 5, 10),
    "mooncake_conversation_trace": (8, 20),
}
IN_TIME = ("hicache", "lru", "reuse", "clairvoyant")
AT_ONCE = (*IN_TIME, "unbounded")
ENOUGH = 97.0
"""Percent of the unbounded hit rate that is asked for where LRU has ROOM or less."""
ROOM = 90.0
FAST = 0.8
"""Of HiCache's 95th percentile of the time to first token."""


def tiers_replay(
    ratio: Annotated[float, "bytes of the host to the device"] = 10.0,
    disk: Annotated[float, "bytes of the disk to the device"] = 0.0,
    policy: Annotated[str, "ours, as NAME or NAME:OPTION=VALUE"] = "reuse",
    traces: Folder = TRACES,
) -> None:
    """Memory below the device, replayed: hit rates, times to first token, bytes written down.

    A row per trace and size of the device; the host holds so many times as much (--ratio), and the
    disk (--disk) as much as is said. Hit rates in percent of those of an unbounded cache, each
    request served at once; times with a queue. `hicache` is SGLang's own cache with HiCache, `lru`
    and `reuse` are one policy in each tier, `clairvoyant` knows the rest of the trace.
    """
    table = Table(
        "trace",
        "device GB",
        "unbounded hit %",
        *(f"{name}, % of it" for name in IN_TIME),
        f"{ENOUGH:g} % where lru has {ROOM:g} or less",
        *(f"P95 TTFT ms: {name}" for name in IN_TIME),
        "reuse / hicache",
        f"at most {FAST:g}",
        "bytes written per hit token: hicache",
        "reuse",
    )
    specs = {name: Spec.parse(policy if name == "reuse" else name) for name in AT_ONCE}
    for trace, devices in DEVICES.items():
        runner = Runner({trace: read_named(traces, trace)})
        for device in devices:
            own, host, below = (int(device * n * 1e9) for n in (1, ratio, disk))
            tiers = TierBudgets.of(own, host, below)
            jobs = {name: Job(specs[name], trace, COST, None, tiers=tiers) for name in AT_ONCE}
            at_once = {name: runner.run(job) for name, job in jobs.items()}
            in_time = {name: runner.run(replace(jobs[name], time=PAPER)) for name in IN_TIME}
            table.row(trace, f"{device:g}", *cells_of_tiers(at_once, in_time))


def cells_of_tiers(at_once: dict[str, Result], in_time: dict[str, Result]) -> list[str]:
    """Hit rates, times and bytes of one row, and what of the aims it meets."""
    bound = at_once["unbounded"].hit_rate
    share = {name: 100 * at_once[name].hit_rate / bound for name in AT_ONCE}
    p95 = {name: 1000 * in_time[name].ttft_percentile(95) for name in IN_TIME}
    written = [at_once[name].tiers for name in ("hicache", "reuse")]
    enough = met(share["reuse"] >= ENOUGH, share["clairvoyant"] >= ENOUGH)
    faster = {name: p95[name] / p95["hicache"] for name in IN_TIME}
    return [
        f"{100 * bound:.1f}",
        *(f"{share[name]:.1f}" for name in IN_TIME),
        "" if share["lru"] > ROOM else enough,
        *(f"{p95[name]:,.0f}" for name in IN_TIME),
        f"{faster['reuse']:.2f}",
        met(faster["reuse"] <= FAST, faster["clairvoyant"] <= FAST),
        *("" if counts is None else f"{counts.written_per_hit_token:,.0f}" for counts in written),
    ]


def met(ours: bool, clairvoyant: bool) -> str:
    """Whether an aim is met, and if not, whether a cache that knows the future meets it."""
    if ours:
        return "yes"
    return "no" if clairvoyant else "no; nor clairvoyant"


CODED_DEVICES = {  # GB
    "taubench_airline": (2.0, 4.0),
    "sharegpt_55": (1.0, 2.0),
    "bbh_fewshot": (1.0, 2.0),
    "claude_code_64k": (8.0, 16.0),
    "mooncake_conversation_trace": (16.0, 32.0),
}


def tier_codecs(
    ratio: Annotated[float, "bytes of the host to the device"] = 1.0,
    only: Annotated[tuple[str, ...], one_of(CODED_DEVICES)] = tuple(CODED_DEVICES),
    traces: Folder = TRACES,
) -> None:
    """What smaller copies below the device are worth on traces, with sizes of Nemotron-H-8B.

    A row per trace and size of the device; the host holds --ratio times as much. For each codec:
    hits in percent of all prompt tokens, those of them that are not exact (resumed from a smaller
    copy, or computed behind one), and what each gigabyte of the host adds to the hits of the device
    alone.
    """
    names = [codec.value for codec in CopyCodec]
    table = Table(
        *("trace", "device GB", "host GB", "device alone"),
        *(f"hit %: {name}" for name in names),
        *(f"not exact: {name}" for name in names[1:]),
        *(f"points per host GB: {name}" for name in names),
    )
    for trace in only:
        runner = Runner({trace: read_named(traces, trace)})
        for device in CODED_DEVICES[trace]:
            cells = cells_of_codecs(runner, trace, int(device * 1e9), int(device * ratio * 1e9))
            table.row(trace, f"{device:g}", f"{device * ratio:g}", *cells)


def cells_of_codecs(runner: Runner, trace: str, device: int, host: int) -> Iterator[str]:
    """Of all codecs: hit rates, shares that are not exact, and points per gigabyte of host."""
    cost = replace(NEMOTRON_H_8B, state_value_bytes=4)
    alone = percent(runner, REUSE, trace, device, cost)
    yield f"{alone:.1f}"
    rates, inexact = [], []
    for codec in CopyCodec:
        tiers = TierBudgets.of(device, host).with_codecs(codec, CopyCodec.EXACT)
        result = runner.run(Job(REUSE, trace, cost, None, tiers=tiers))
        assert result.tiers is not None
        rates.append(100 * result.hit_rate)
        inexact.append(100 * result.tiers.inexact_tokens / int(result.input_len.sum()))
    yield from (f"{rate:.1f}" for rate in rates)
    yield from (f"{share:.1f}" for share in inexact[1:])
    yield from (f"{(rate - alone) / (host / 1e9):.2f}" for rate in rates)
