"""How much of the distance from LRU to a clairvoyant eviction a policy closes: a row per trace and
size of the cache, request after request, starting cold, by the paper's rules, as served with two
pools, and as it would be served with one memory for KV and states.

Token hit rates in percent. Rows whose distance is below a point do not count in the mean. With
--leave-one-out the constants of `core.reuse` that --vary names are chosen by the mean over all
other traces, and what that choice reaches on the trace left out is reported. With --changes N the
traffic is N requests of one generated kind and then another kind: what is hit of that, beside a
server that starts with it.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from sglang_hybrid.core import reuse
from sglang_hybrid.core.cost import CostModel
from sglang_hybrid.core.serving import Serving
from sglang_hybrid.replay.arrivals import Draw
from sglang_hybrid.replay.formats import Reading, read_trace
from sglang_hybrid.replay.generators import generate, traffic
from sglang_hybrid.replay.runner import Job, Runner
from sglang_hybrid.replay.simulator import Split
from sglang_hybrid.replay.systems import Setting, Spec
from sglang_hybrid.replay.traces import Request

TRACES = Path(__file__).parents[1].parent / "shared" / "traces"
COST = CostModel.paper_7b()
SIZES: dict[str, tuple[float, ...]] = {  # GB, by trace
    "taubench_airline": (5, 10),
    "sharegpt_55": (2, 4),
    "bbh_fewshot": (1, 2, 4),
    "claude_code_64k": (20, 40, 80),
    "mooncake_conversation_trace": (40, 80),
}
GENERATED: dict[str, tuple[float, ...]] = {
    "chat": (0.5, 1, 2),
    "agent": (5, 10),
    "few-shot": (1, 2, 4),
    "fan-out": (2, 5),
    "transcript": (1, 2, 3, 5),
}
CHANGES = (
    ("agent", "few-shot"),
    ("few-shot", "chat"),
    ("chat", "few-shot"),
    ("few-shot", "transcript"),
)
CHANGES_GB = 0.7
AFTER = (100, 200, 400, 800, 1_500)
CLAIRVOYANT = Spec("clairvoyant")
RULES = {"paper": None, "served": Serving(), "one": Serving(one_memory=True)}
Row = tuple[str, float]  # trace, GB
Constants = tuple[tuple[str, float], ...]


def lru(rules: str) -> Spec:
    """The LRU that a server of these rules can run, SGLang's own if possible."""
    return Spec("sglang-lru" if rules == "served" else "lru")


@dataclass
class Bench:
    """Hit rates in percent, each measured once."""

    runner: Runner
    rows: list[Row]
    _known: dict[tuple[object, ...], float] = field(default_factory=dict)

    def hit_rate(self, spec: Spec, row: Row, rules: str, constants: Constants = ()) -> float:
        key = (spec, row, rules, constants)
        if key not in self._known:
            trace, size = row
            job = Job(spec, trace, COST, int(size * 1e9), serving=RULES[rules])
            with changed(constants):
                self._known[key] = 100 * self.runner.run(job).hit_rate
        return self._known[key]

    def limits(self, row: Row, rules: str) -> tuple[float, float]:
        """LRU's hit rate, SGLang's own where two pools are served, and the clairvoyant one."""
        return self.hit_rate(lru(rules), row, rules), self.hit_rate(CLAIRVOYANT, row, rules)

    def closed(
        self, spec: Spec, row: Row, rules: str, constants: Constants = (), gap: str | None = None
    ) -> float | None:
        """Percent of the distance that `spec` closes; None where it is below a point. gap: the
        rules that the distance is measured by, the same by default.
        """
        low, high = self.limits(row, gap or rules)
        if high - low < 1:
            return None
        return 100 * (self.hit_rate(spec, row, rules, constants) - low) / (high - low)

    def mean(
        self,
        spec: Spec,
        rows: Sequence[Row],
        rules: str,
        constants: Constants = (),
        gap: str | None = None,
    ) -> float:
        closed = [self.closed(spec, row, rules, constants, gap) for row in rows]
        counted = [share for share in closed if share is not None]
        return sum(counted) / max(len(counted), 1)


@contextmanager
def changed(constants: Constants) -> Iterator[None]:
    """Constants of `core.reuse` at other values."""
    before = {name: getattr(reuse, name) for name, _ in constants}
    for name, value in constants:
        setattr(reuse, name, type(before[name])(value))
    yield
    for name, value in before.items():
        setattr(reuse, name, value)


def table(bench: Bench, specs: Sequence[Spec], rules: str) -> None:
    titles = [f"{spec} | closed %" for spec in specs]
    print(f"\nRules: {rules}\n\n| trace | GB | {lru(rules)} | {' | '.join(titles)} | clairvoyant |")
    print("|---|---:|---:|" + "---:|---:|" * len(specs) + "---:|")
    for row in bench.rows:
        low, high = bench.limits(row, rules)
        cells = []
        for spec in specs:
            share = bench.closed(spec, row, rules)
            cells.append(f"{bench.hit_rate(spec, row, rules):.1f}")
            cells.append("" if share is None else f"{share:.0f}")
        print(f"| {row[0]} | {row[1]:g} | {low:.1f} | {' | '.join(cells)} | {high:.1f} |")
    print()
    for spec in specs:
        losses = [
            bench.hit_rate(spec, row, rules) - bench.limits(row, rules)[0] for row in bench.rows
        ]
        mean = bench.mean(spec, bench.rows, rules)
        print(
            f"{spec}: closes {mean:.1f} % on average, "
            f"at worst {min(losses):+.2f} points against {lru(rules)}"
        )
        if rules == "one":
            mean = bench.mean(spec, bench.rows, rules, gap="served")
            print(f"{spec}: closes {mean:.1f} % of the distance that there is with two pools")


def leave_one_out(bench: Bench, grid: Sequence[Constants], rules: str) -> None:
    spec = Spec("reuse")
    print(f"\nRules: {rules}; chosen from {len(grid)} settings\n")
    print("| trace left out | chosen on the others | closed % with it | as it is |")
    print("|---|---|---:|---:|")
    chosen_means = []
    for out in dict.fromkeys(trace for trace, _ in bench.rows):
        others = [row for row in bench.rows if row[0] != out]
        rows = [row for row in bench.rows if row[0] == out]
        best = max(grid, key=lambda constants: bench.mean(spec, others, rules, constants))
        reached = bench.mean(spec, rows, rules, best)
        counted = sum(bench.closed(spec, row, rules) is not None for row in rows)
        chosen_means += [reached] * counted
        name = ", ".join(f"{name} {value:g}" for name, value in best)
        print(f"| {out} | {name} | {reached:.1f} | {bench.mean(spec, rows, rules):.1f} |")
    print(f"\nover all rows: {sum(chosen_means) / max(len(chosen_means), 1):.1f} %")


def read_named(folder: Path, name: str) -> list[Request]:
    """One of SIZES; Mooncake's are the first 2,000 of at most 32 Ki tokens."""
    limit = 2_000 if name.startswith("mooncake") else None
    return read_trace(folder / f"{name}.jsonl.gz", Reading(limit, max_input=32_768))


def read_traces(folder: Path) -> tuple[Runner, list[Row]]:
    return Runner({name: read_named(folder, name) for name in SIZES}), rows_of(SIZES)


def generate_traces(seeds: int) -> tuple[Runner, list[Row]]:
    sizes: dict[str, Sequence[float]] = {}
    traces: dict[str, Sequence[Request]] = {}
    for kind, gigabytes in GENERATED.items():
        how = traffic(kind, sessions=60) if kind == "agent" else traffic(kind)
        for seed in range(seeds):
            traces[f"{kind} {seed}"] = generate(kind, how, seed)
            sizes[f"{kind} {seed}"] = gigabytes
    return Runner(traces), rows_of(sizes)


def rows_of(sizes: Mapping[str, Sequence[float]]) -> list[Row]:
    return [(trace, size) for trace, gigabytes in sizes.items() for size in gigabytes]


def small(kind: str, requests: int, seed: int) -> list[Request]:
    """Generated traffic of short prompts, so that many requests are soon replayed."""
    per_session = {"chat": 5, "agent": 18, "few-shot": 1, "transcript": 5}[kind]
    how = traffic(
        kind,
        sessions=max(4, requests // per_session),
        session_rate=5.0 if kind == "few-shot" else None,
        shared={"agent": Draw("const", 1_500), "transcript": None}.get(
            kind, Draw("lognormal", 400, 0.5)
        ),
    )
    return generate(kind, how, seed)


def changes(requests: int) -> None:
    """Hit rates of the first requests of a new kind of traffic, after another one and fresh."""
    titles = " | ".join(f"first {count:,}" for count in AFTER)
    print(f"\nReuse, as served, {CHANGES_GB} GB; after the change / fresh\n\n| change | {titles} |")
    print("|---|" + "---:|" * len(AFTER))
    pools = Split.of(int(CHANGES_GB * 1e9), COST)
    for first, then in CHANGES:
        before, after = small(first, requests, 1), small(then, 2 * AFTER[-1], 2)
        start = before[-1].arrival + 60
        after = [replace(r, arrival=r.arrival + start) for r in after][: AFTER[-1]]
        found = []
        for served in (before + after, after):
            cache = Spec("reuse").build(Setting(COST, pools, served, serving=Serving()))
            found.append([cache.serve(request).hit_len for request in served][-len(after) :])
        cells = []
        for count in AFTER:
            tokens = sum(request.input_len for request in after[:count])
            rates = [100 * sum(hits[:count]) / tokens for hits in found]
            cells.append(f"{rates[0]:.1f} / {rates[1]:.1f}")
        print(f"| {len(before):,} of {first}, then {then} | {' | '.join(cells)} |", flush=True)


def parse_grid(varied: Sequence[str]) -> list[Constants]:
    """NAME=V,V,.. to all combinations."""
    axes = []
    for text in varied:
        name, _, values = text.partition("=")
        if not isinstance(getattr(reuse, name, None), int | float):
            raise SystemExit(f"core.reuse has no number {name!r}")
        axes.append([(name, float(value)) for value in values.split(",")])
    return list(itertools.product(*axes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="reuse", help="as NAME or NAME:OPTION=VALUE, by comma")
    parser.add_argument("--rules", choices=[*RULES], nargs="+", default=[*RULES])
    parser.add_argument("--traces", type=Path, default=TRACES, help="the folder they are in")
    parser.add_argument("--generated", type=int, metavar="SEEDS", help="generated traffic instead")
    parser.add_argument(
        "--vary",
        nargs="+",
        metavar="NAME=V,V",
        default=["PRIOR_WEIGHT=2,4,8,16,32", "FIRST_GUESS=0.02,0.05,0.1,0.2"],
        help="constants of core.reuse, for --leave-one-out",
    )
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--changes", type=int, metavar="N", help="requests before a change of kind")
    options = parser.parse_args()
    if options.changes is not None:
        changes(options.changes)
        return
    generated = options.generated
    bench = Bench(*(generate_traces(generated) if generated else read_traces(options.traces)))
    for rules in options.rules:
        if options.leave_one_out:
            leave_one_out(bench, parse_grid(options.vary), rules)
        else:
            table(bench, [Spec.parse(text) for text in options.policy.split(",")], rules)


if __name__ == "__main__":
    main()
