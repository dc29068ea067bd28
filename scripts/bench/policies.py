"""The benchmark `policies`: hit rates of policies between LRU and those that know the future."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from scripts.bench.commands import Count, one_of
from scripts.bench.report import Table
from scripts.bench.traces import (
    AGENTS,
    COST,
    RULES,
    TRACES,
    WORKFLOWS,
    Folder,
    Row,
    Seeds,
    generate_workflows,
    read_agents,
    read_and_generate,
    read_or_generate,
)
from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.extensions.lab.runner import Job, Result, Runner
from sglang_hybrid.extensions.lab.simulation.device_codec import NUMBER_BYTES
from sglang_hybrid.extensions.lab.simulation.system_names import ORACLES, parse_spec
from sglang_hybrid.extensions.lab.simulation.tiers.tier_budgets import CopyCodec, TierBudgets
from sglang_hybrid.extensions.lab.systems import Spec
from tests.rehearsal.models import MODELS

AGENTS_MODEL = "Qwen3.5-35B"
HALVED = "Nemotron-H-8B"
HYBRIDS = (HALVED, AGENTS_MODEL, "Kimi-Linear-48B")
RECURRENT_LAYERS = {HALVED: 6}
"""Recurrent layers for each attention layer; 3 in other models. vLLM has one page size for both."""

AGENTS_POLICIES = {
    "one": ("lru", "reuse", *ORACLES, "density", "cachescout", "pbkv", "cachewise"),
    "served": ("sglang-lru", "reuse", "sglang", "vllm", "tensorrt-llm"),
}
BELOW_POLICIES = ("hicache", "lmcache", "reuse", "unbounded")
"""Policies that agents' conversations are replayed with: by rules, and with tiers below."""

CODECS = tuple(codec.value for codec in NUMBER_BYTES)
TITLES = {"paper": "paper", "served": "two pools", "one": "one memory"}
CODED_RULES = ("one", "served")
"""Rules by which traces are replayed with coded entries."""

CLAIRVOYANT = Spec("clairvoyant")
UNBOUNDED = Spec("unbounded")


def best(rates: Iterable[tuple[float, str]]) -> tuple[float, str]:
    """The highest rate and whose it is, the first of equals."""
    return max(rates, key=lambda rate: rate[0])


def lru(rules: str) -> Spec:
    """The LRU that a server of these rules can run, SGLang's own if possible."""
    return Spec("sglang-lru" if rules == "served" else "lru")


@dataclass
class Bench:
    """Hit rates in percent, each measured once. flops: of the FLOPs of prompts, not of tokens.
    codec: of what `run` keeps coded where that is asked for.
    """

    runner: Runner
    rows: list[Row]
    cost: CostModel = COST
    flops: bool = False
    codec: CopyCodec = CopyCodec.EXACT
    _known: dict[tuple[object, ...], Result] = field(default_factory=dict)

    def hit_rate(self, spec: Spec, row: Row, rules: str) -> float:
        found = self.run(spec, row, rules)
        return 100 * (found.flops_saved if self.flops else found.hit_rate)

    def run(self, spec: Spec, row: Row, rules: str, *, coded: bool = False) -> Result:
        """The result of `spec` on a row; coded: entries are kept coded before they are evicted."""
        key = (spec, row, rules, coded)
        if key not in self._known:
            trace, size = row
            codec = self.codec if coded else CopyCodec.EXACT
            serving, budget = RULES[rules], int(size * 1e9)
            job = Job(spec, trace, self.cost, budget, serving=serving, device_codec=codec)
            self._known[key] = self.runner.run(job)
        return self._known[key]

    def low(self, row: Row, rules: str) -> float:
        """LRU's hit rate, SGLang's own where two pools are served."""
        return self.hit_rate(lru(rules), row, rules)

    def upper(self, row: Row, rules: str) -> tuple[float, str]:
        """The best hit rate of those that know the future, and whose it is."""
        return best((self.hit_rate(Spec(name), row, rules), name) for name in ORACLES)

    def closed(self, spec: Spec, row: Row, rules: str, gap: str | None = None) -> float | None:
        """Percent of the distance that `spec` closes; None where it is below a point. gap: the
        rules that the distance is measured by, the same by default.
        """
        low, (high, _) = self.low(row, gap or rules), self.upper(row, gap or rules)
        if high - low < 1:
            return None
        return 100 * (self.hit_rate(spec, row, rules) - low) / (high - low)

    def mean(self, spec: Spec, rules: str, gap: str | None = None) -> float:
        """The mean of `closed` over the rows in which there is something to close."""
        closed = [self.closed(spec, row, rules, gap) for row in self.rows]
        counted = [share for share in closed if share is not None]
        return sum(counted) / max(len(counted), 1)


def show(bench: Bench, specs: Sequence[Spec], rules: Sequence[str]) -> None:
    """Print a row per trace and size, with columns for each of the rules; then the means."""
    heads = []
    for name in rules:
        of_specs = [title for spec in specs for title in (str(spec), "closed")]
        heads += [f"{TITLES[name]}: {lru(name)}", *of_specs, "upper"]
    table = Table("trace", "GB", *heads)
    for row in bench.rows:
        cells = [cell for name in rules for cell in rates(bench, specs, row, name)]
        table.row(row[0], f"{row[1]:g}", *cells)
    means = []
    for name in rules:
        shares = (f"**{bench.mean(spec, name):.1f}**" for spec in specs)
        means += ["", *(cell for share in shares for cell in ("", share)), ""]
    table.row("**mean where the gap is a point or more**", "", *means)
    print()
    for name in rules:
        for spec in specs:
            conclude(bench, spec, name)


def rates(bench: Bench, specs: Sequence[Spec], row: Row, rules: str) -> list[str]:
    """LRU's hit rate, that of each policy and what it closes, and the best that knows the future,
    with its name.
    """
    (high, name), cells = bench.upper(row, rules), [f"{bench.low(row, rules):.1f}"]
    for spec in specs:
        share = bench.closed(spec, row, rules)
        cells.append(f"{bench.hit_rate(spec, row, rules):.1f}")
        cells.append("" if share is None else f"{share:.0f}")
    return [*cells, f"{high:.1f} {name}"]


def conclude(bench: Bench, spec: Spec, rules: str) -> None:
    """Print the worst row against LRU, and what one memory closes of the gap of two pools."""
    losses = [bench.hit_rate(spec, row, rules) - bench.low(row, rules) for row in bench.rows]
    print(f"{spec}, {TITLES[rules]}: at worst {min(losses):+.2f} points against {lru(rules)}.")
    if rules == "one":
        mean = bench.mean(spec, rules, gap="served")
        print(f"It closes {mean:.1f} % of the distance that there is with two pools.")


def show_coded(bench: Bench, spec: Spec) -> dict[str, Counter[str]]:
    """Print a row per trace and size: `spec` exact, coded, and what knows the future, in one memory
    and in two pools. Returns, by the rules, how many rows there are where `spec` finds 90 percent
    of what there is or less, in how many of them coded entries find more than what knows the future
    and keeps them exact, and in how many not even `spec` does that in twice the memory.
    """
    heads = [
        f"{TITLES[name]}: {head}"
        for name in CODED_RULES
        for head in (str(spec), bench.codec.value, "not exact", str(CLAIRVOYANT))
    ]
    table = Table("trace", "GB", *heads, "unbounded")
    columns: list[list[float]] = []
    rows: dict[str, Counter[str]] = {name: Counter() for name in CODED_RULES}
    for row in bench.rows:
        unbounded = bench.hit_rate(UNBOUNDED, row, "one")
        rates = []
        for name in CODED_RULES:
            exact, known = (bench.hit_rate(each, row, name) for each in (spec, CLAIRVOYANT))
            coded = bench.run(spec, row, name, coded=True)
            found = 100 * coded.hit_rate
            inexact = 100 * (1 - coded.exact_tokens / max(1, coded.hit_tokens))
            rates += [exact, found, inexact, known]
            if exact <= 0.9 * unbounded:
                twice = found > known or bench.hit_rate(spec, (row[0], 2 * row[1]), name) > known
                rows[name].update(all=1, beaten=found > known, beyond=not twice)
        table.row(row[0], f"{row[1]:g}", *(f"{rate:.1f}" for rate in (*rates, unbounded)))
        columns.append(rates)
    means = [sum(column) / len(columns) for column in zip(*columns, strict=True)]
    table.row("**mean**", "", *(f"**{mean:.1f}**" for mean in means), "")
    print()
    return rows


def coded_models() -> dict[str, CostModel]:
    """The sizes to replay entries that are kept coded with."""
    found = {"the paper's 7B": COST}
    for name in HYBRIDS:
        found[name] = cost_of(name)
    halved = CostModel.from_config(MODELS[HALVED] | {"torch_dtype": "bfloat16"})
    if halved.state_value_bytes == 4:
        halved = replace(halved, state_bytes=halved.state_bytes // 2, state_value_bytes=2)
    return found | {f"{HALVED}, states in bfloat16": halved}


def cost_of(model: str) -> CostModel:
    config = MODELS[model]
    return CostModel.from_config(config.get("text_config", config))


def show_agents(runner: Runner, rows: Sequence[Row], models: Sequence[str], workers: int) -> None:
    """Print a row per model, trace and size of the device: what each policy finds, of tokens, and
    of FLOPs in one memory; what those that know the future find at best, and how much of the
    distance from LRU to that the index closes in one memory.
    """
    jobs: dict[tuple[str, Row, str, str], Job] = {}
    for model in models:
        for row in rows:
            for rules, names in AGENTS_POLICIES.items():
                for name in names:
                    options = f":groups={RECURRENT_LAYERS.get(model, 3)}" if name == "vllm" else ""
                    spec, budget = parse_spec(name + options), int(row[1] * 1e9)
                    job = Job(spec, row[0], cost_of(model), budget, serving=RULES[rules])
                    jobs[model, row, rules, name] = job
    found = dict(zip(jobs, runner.run_all(list(jobs.values()), workers), strict=True))
    every = [(rules, name) for rules, names in AGENTS_POLICIES.items() for name in names]
    every = [key for key in every if key[1] not in ORACLES]
    of_one = [(rules, name) for rules, name in every if rules == "one"]
    shown: tuple[tuple[str, list[tuple[str, str]], Callable[[Result], float]], ...] = (
        ("Of the prompts' tokens", every, lambda result: result.hit_rate),
        (
            "Of the FLOPs to prefill them, in one memory",
            of_one,
            lambda result: result.flops_saved,
        ),
    )
    for about, columns, rate in shown:
        print(f"\n{about}:\n")
        heads = [f"{TITLES[rules]}: {name}" for rules, name in columns]
        table = Table("model", "GB", *heads, "one memory: upper", "closed", text=1)
        for model in models:
            for row in rows:
                rates = {key: 100 * rate(found[model, row, *key]) for key in columns}
                high, who = best(
                    (100 * rate(found[model, row, "one", name]), name) for name in ORACLES
                )
                low, mine = rates["one", "lru"], rates["one", "reuse"]
                closed = "" if high - low < 1 else f"{100 * (mine - low) / (high - low):.0f}"
                cells = (f"{value:.1f}" for value in rates.values())
                table.row(model, f"{row[1]:g}", *cells, f"{high:.1f} {who}", closed)


def show_below(runner: Runner, sizes: Sequence[float], workers: int) -> None:
    """Print a row per size of the device, with a host of four times that and a disk below it: what
    each policy finds.
    """
    cost = cost_of(AGENTS_MODEL)
    jobs = []
    for size in sizes:
        below = f"host={4 * size:g}GB@25GB/s,disk=1TB@3GB/s"
        tiers = TierBudgets.parse(f"device={size:g}GB,{below}")
        jobs += [Job(Spec(name), AGENTS, cost, None, tiers=tiers) for name in BELOW_POLICIES]
    rates = [f"{100 * result.hit_rate:.1f}" for result in runner.run_all(jobs, workers)]
    print(
        f"\n{AGENTS_MODEL} with a host of four times the device and a disk of 1 TB below it, by "
        "the paper's rules, of the prompts' tokens:\n"
    )
    table = Table("GB", *BELOW_POLICIES)
    each = len(BELOW_POLICIES)
    for number, size in enumerate(sizes):
        table.row(f"{size:g}", *rates[number * each : (number + 1) * each])


def policies(
    policy: Annotated[str, "as NAME or NAME:OPTION=VALUE, by comma"] = "reuse",
    rules: Annotated[tuple[str, ...], one_of(RULES)] = tuple(RULES),
    traces: Folder = TRACES,
    generated: Seeds = None,
    agents: Annotated[
        tuple[str, ...], "agents' conversations, by these models' sizes", one_of(HYBRIDS)
    ] = (),
    workers: Annotated[Count, "--agents: processes"] = 2,
    device_codec: Annotated[
        str, "exact beside coded entries, by several models' sizes", one_of(CODECS)
    ] = "",
) -> None:
    """The share that a policy closes of the distance from LRU to policies that know the future.

    A row per trace and size of the cache, request after request, starting cold, by the paper's
    rules, as served with two pools, and as served with one memory for KV and states. Token hit
    rates in percent. The upper end of the distance is, row by row, the best of three that know the
    rest of the trace: `clairvoyant` (what is asked for last goes first), `whether` (reuse that
    knows which positions return) and `when` (reuse that knows when). Rows whose distance is below a
    point do not count in the mean. With agents also in FLOPs: the last tokens of a long prompt cost
    a multiple of its first ones; and generated workflows of agents, whose tools have names. With a
    device codec, what the first policy finds as it is, and where entries are coded before they are
    evicted, on the traces and on generated traffic.
    """
    specs = [parse_spec(text) for text in policy.split(",")]
    if device_codec:
        runner, rows = read_and_generate(traces, generated or 1)
        counts: dict[str, Counter[str]] = {name: Counter() for name in CODED_RULES}
        for name, cost in coded_models().items():
            print(f"Sizes of {name}:\n")
            found = show_coded(Bench(runner, rows, cost, codec=CopyCodec(device_codec)), specs[0])
            for pools, more_rows in found.items():
                counts[pools].update(more_rows)
        for pools, of in counts.items():
            print(
                f"{TITLES[pools].capitalize()}: where {specs[0]} finds 90 % of what there is or "
                "less, coded entries find more than an exact cache that knows the future in "
                f"{of['beaten']} of {of['all']} rows; in {of['beyond']} of the others not even "
                f"{specs[0]} does in twice the memory."
            )
        return
    if not agents:
        show(Bench(*read_or_generate(traces, generated)), specs, rules)
        return
    runner, rows = read_agents(traces)
    show_agents(runner, rows, agents, workers)
    if AGENTS_MODEL in agents:
        show_below(runner, [size for _, size in rows], workers)
    print(f"\n## {WORKFLOWS} generated workflows of a planner, coders, a tester and a reviewer")
    show_agents(*generate_workflows(), agents, workers)
