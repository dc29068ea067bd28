"""How memory is best split between KV and states: hit rates by KV tokens per state slot.

    python scripts/bench.py pools [--policy reuse] [--generated SEEDS]

The rows of `policies` as served, for a model whose state is as large as 409 tokens of KV
(the paper's 7B) and for one where it is 6,234 (sizes of Nemotron-H-8B; 2.3 times the memory).
Percent of prompt tokens, the mean of each trace's sizes. The first column is SGLang's default of
--mamba-full-memory-ratio; the last one is one memory, without a split (--hybrid-memory one). Then,
for each trace, what the others would choose.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from scripts.bench.policies import COST
from scripts.bench.report import Table
from scripts.bench.traces import Row, add_traces, read_or_generate
from sglang_hybrid.core.costs.cost import MOST_STATES_TO_KV, TOKENS_PER_STATE, CostModel
from sglang_hybrid.core.server_settings import Serving, Split
from sglang_hybrid.replay.runner import Job, Runner
from sglang_hybrid.replay.systems import Spec


@dataclass(frozen=True)
class Model:
    """Bytes of a model, more memory than the rows say, and what to try; the first is SGLang's."""

    name: str
    cost: CostModel
    memory: float
    tokens_per_state: tuple[int, ...]


MODELS = (
    Model("paper 7B", COST, 1.0, (454, 600, 800, 1_000, 1_300, 1_600, 2_300)),
    Model(
        "Nemotron-H-8B",
        COST.with_sizes(kv_bytes_per_token=16_384, state_bytes=102_137_856),
        2.3,
        (6_927, 35_000, 17_000, 10_000, 4_156, 2_078, 1_100),
    ),
)


def hit_rate(runner: Runner, model: Model, row: Row, tokens: int, policy: Spec) -> float:
    """Percent, with so many KV tokens per state slot."""
    trace, size = row
    cost = model.cost
    ratio = cost.state_bytes / (tokens * cost.kv_bytes_per_token)
    pools = Split.of(int(size * model.memory * 1e9), cost, ratio)
    return 100 * runner.run(Job(policy, trace, cost, pools, serving=Serving())).hit_rate


def in_one_memory(runner: Runner, model: Model, row: Row, policy: Spec) -> float:
    """Percent, with KV and states in one memory."""
    trace, size = row
    budget = int(size * model.memory * 1e9)
    job = Job(policy, trace, model.cost, budget, serving=Serving(one_memory=True))
    return 100 * runner.run(job).hit_rate


def show(runner: Runner, rows: Sequence[Row], model: Model, policy: Spec) -> None:
    """Print the table of one model."""
    columns = model.tokens_per_state
    print(f"\n{model.name}, {policy}; KV tokens per state slot (states' share of the memory)\n")
    size = model.cost.state_bytes / model.cost.kv_bytes_per_token
    heads = [f"{tokens:,} ({size / (size + tokens):.0%})" for tokens in columns]
    table = Table("trace", f"{heads[0]}, SGLang's", *heads[1:], "one")
    found: dict[str, list[float]] = {}
    one: list[float] = []
    for trace in dict.fromkeys(trace for trace, _ in rows):
        mine = [row for row in rows if row[0] == trace]
        found[trace] = [
            mean(hit_rate(runner, model, row, tokens, policy) for row in mine) for tokens in columns
        ]
        one.append(mean(in_one_memory(runner, model, row, policy) for row in mine))
        table.row(trace, *(f"{rate:.1f}" for rate in (*found[trace], one[-1])))
    means = [*(mean(rates) for rates in zip(*found.values(), strict=True)), mean(one)]
    table.row("**mean**", *(f"{rate:.1f}" for rate in means))
    print("\nChosen by the other traces: ", end="")
    for trace, rates in found.items():
        others = [
            sum(column) - rates[i] for i, column in enumerate(zip(*found.values(), strict=True))
        ]
        best = max(range(len(columns)), key=others.__getitem__)
        print(f"{trace} {columns[best]:,} ({rates[best] - rates[0]:+.1f}); ", end="")
    print()


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", default="reuse")
    add_traces(parser, generated=True)


def run(options: argparse.Namespace) -> None:
    runner, rows = read_or_generate(options.traces, options.generated)
    print(
        f"Our default: a state per {TOKENS_PER_STATE:,} tokens, at most {MOST_STATES_TO_KV} bytes "
        "of states per byte of KV."
    )
    for model in MODELS:
        show(runner, rows, model, Spec.parse(options.policy))
