"""python -m sglang_hybrid.replay: what each policy would have been worth on a trace."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sglang_hybrid.core.admission import MIN_BRANCH_TOKENS
from sglang_hybrid.core.cost import CostModel
from sglang_hybrid.core.serving import Budget, Serving, Split
from sglang_hybrid.core.systems import HINDSIGHT, SYSTEMS, Spec
from sglang_hybrid.replay.arrivals import Azure, Draw
from sglang_hybrid.replay.breakdown import lost_tokens
from sglang_hybrid.replay.formats import FORMATS, Reading, find_format, read_trace, write_trace
from sglang_hybrid.replay.generators import KINDS, generate, traffic
from sglang_hybrid.replay.hints import KINDS as HINTS
from sglang_hybrid.replay.hints import with_hints
from sglang_hybrid.replay.runner import Job, Result, Runner, run_all
from sglang_hybrid.replay.sizes import parse_bytes
from sglang_hybrid.replay.systems import smallest_budget
from sglang_hybrid.replay.tier_budgets import EXAMPLE, TierBudgets
from sglang_hybrid.replay.timing import PAPER, PrefillTime
from sglang_hybrid.replay.traces import Request, Skipped, whole_file

AVMP = "avmp"
"""In the place of a trace: the comparison of the AVMP paper."""

ONE_MEMORY = "one"
TIER_POLICIES = "hicache,lru,reuse,clairvoyant,unbounded"
DEFAULT_POLICIES = "none,vllm+,sglang+,sglang,lru,marconi-best,reuse,clairvoyant,unbounded"
PROFILES = {"paper-7b": CostModel.paper_7b}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status; what is wrong is one sentence on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == [AVMP]:
            from sglang_hybrid.replay.avmp import command

            return command.main(arguments[1:])
        return _main(_parser().parse_args(arguments), arguments)
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        print(f"error: {where}{reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_hybrid.replay",
        description="Replays a request trace through the server's cache, without a model. `avmp` "
        "in the place of a trace compares memory of running requests, as the AVMP paper does.",
    )
    add = parser.add_argument_group("traffic").add_argument
    add("trace", nargs="?", type=Path, help="a trace, gzip or not; the format is recognised")
    add("--format", metavar="NAME", help=", ".join(FORMATS))
    add("--limit", type=int, help="the first N requests only")
    add("--max-input", type=int, help="leave out Mooncake's longer prompts")
    add("--stitch", action="store_true", help="fill Mooncake's answers in from later prompts")
    add("--skip-bad", action="store_true", help="count bad lines and go on")
    add("--tokenizer", metavar="DIR", help="a model's directory, for conversations of text")
    add("--generate", metavar="KIND", help=", ".join(KINDS))
    add("--seed", type=int, default=0, help="of generated traffic and of arrivals")
    add("--sessions", type=int)
    add("--session-rate", type=float, help="sessions a second")
    add("--templates", type=int, help="different shared beginnings, 0: each session its own")
    for name in ("shared", "turns", "question", "answer", "think"):
        about = "seconds" if name == "think" else "requests" if name == "turns" else "tokens"
        add(f"--{name}", metavar="DIST", help=f"{about}: const:N, exp:MEAN, lognormal:MEDIAN:SIGMA")
    add("--azure", type=Path, metavar="CSV", help="arrivals and lengths of generated traffic")
    add("--hints", metavar="KIND", help=f"add what clients say: {', '.join(HINTS)}")
    add("--record", type=Path, metavar="FILE", help="write the trace and stop")
    add("--to", default="recorded", metavar="NAME", help="format of --record")
    add = parser.add_argument_group("cache").add_argument
    add("--cache", help="sizes, as 5GB,10GB: one budget for KV and states")
    add(
        "--pools",
        help="pools that do not lend, as TOKENS:SLOTS,TOKENS:SLOTS; one, with --rules served and "
        "--cache: KV and states share all bytes",
    )
    add(
        "--tiers",
        help=f"device, host and disk instead of --cache, as {EXAMPLE}; policies are then those "
        f"that know tiers, by default {TIER_POLICIES}",
    )
    add("--model", type=Path, metavar="PATH", help="a config.json, or the directory it is in")
    add("--profile", choices=PROFILES, help="a cost profile instead of a model's (paper-7b)")
    add("--policy", help=f"{', '.join([*SYSTEMS, HINDSIGHT])}")
    add("--min-branch-tokens", type=int, default=MIN_BRANCH_TOKENS)
    add(
        "--rules",
        choices=["paper", "served"],
        default="paper",
        help="paper: its admission, and the cache holds what is cached; served: what the server "
        "plans and hits, with room for running requests, in two pools, into which --cache is split "
        "as the server splits its memory; `sglang` splits as SGLang does (%(default)s)",
    )
    add("--chunk", type=int, help="served: prompt tokens per forward (8192)")
    add("--grid", type=int, help="served: tokens between SGLang's own states (64)")
    add = parser.add_argument_group("time").add_argument
    add("--instant", action="store_true", help="serve each request at once, as the paper does")
    add("--prefill", type=Path, metavar="JSON", help="times that scripts/fit_prefill.py measured")
    add = parser.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="FILE", help="write the summary; - for stdout")
    add("--report", type=Path, metavar="DIR", help="write a page with plots")
    add("--workers", type=int, default=1, help="processes")
    return parser


def _main(options: argparse.Namespace, arguments: list[str]) -> int:
    console = Console(stderr=options.json is not None and str(options.json) == "-")
    name, requests = _traffic(options, console)
    if options.record is not None:
        find_format(options.to)
        write_trace(options.record, requests, options.to)
        console.print(f"{len(requests):,} requests written to {options.record} ({options.to})")
        return 0
    if options.workers < 1:
        raise ValueError(f"--workers must be 1 or more, not {options.workers}")
    cost = _cost(options)
    tiers = _tiers(options, cost)
    budgets = _budgets(options, cost) if tiers is None else [None]
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ValueError(f"{options.json} cannot be written: there is no such directory")
    specs = _specs(options.policy or (DEFAULT_POLICIES if tiers is None else TIER_POLICIES))
    time = None if options.instant else PAPER
    if options.prefill is not None:
        if options.instant:
            raise ValueError("--instant has no time: leave out --prefill")
        time = PrefillTime.read(options.prefill)
    serving = _serving(options)
    jobs = [
        Job(spec, name, cost, budget, time, options.min_branch_tokens, serving, tiers, losses=True)
        for budget in budgets
        for spec in specs
    ]
    command = shlex.join(["python", "-m", "sglang_hybrid.replay", *arguments])
    runner = Runner({name: requests})
    if options.report is None:
        results = _run(runner, jobs, options.workers, console)
    else:
        from sglang_hybrid.replay.report import Report
        from sglang_hybrid.replay.study import Study

        with Report(options.report, command, options.seed) as report:
            study = Study(runner, jobs)
            study.take(_run(runner, [*jobs, *study.extra_jobs], options.workers, console))
            report.write(study)
        results = study.results
    _show(results, requests, time, console)
    if options.json is not None:
        summary = {
            "command": command,
            "seed": options.seed,
            "rules": options.rules,
            "serving": None if serving is None else asdict(serving),
            "cost": asdict(cost),
            "time": None if time is None else asdict(time),
            "results": [result.as_dict() for result in results],
        }
        _write_json(options.json, summary)
    return 0


def _traffic(options: argparse.Namespace, console: Console) -> tuple[str, Sequence[Request]]:
    """A name for what is replayed, and its requests."""
    if (options.trace is None) == (options.generate is None):
        raise ValueError("give a trace or --generate KIND, one of them")
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit must be 1 or more, not {options.limit}")
    skipped = Skipped(options.skip_bad)
    if options.generate is None:
        rate = 1.0 if options.session_rate is None else options.session_rate
        reading = Reading(
            options.limit,
            options.max_input,
            options.tokenizer,
            rate,
            options.seed,
            skipped,
            options.stitch,
        )
        requests = read_trace(options.trace, reading, options.format)
        name = options.trace.name.split(".")[0]
    else:
        draws = {
            name: None if getattr(options, name) is None else Draw.parse(getattr(options, name))
            for name in ("shared", "turns", "question", "answer", "think")
        }
        how = traffic(
            options.generate,
            sessions=options.sessions,
            session_rate=options.session_rate,
            templates=options.templates,
            max_input=options.max_input,
            azure=None if options.azure is None else Azure.read(options.azure, skipped=skipped),
            **draws,
        )
        requests = generate(options.generate, how, options.seed)[: options.limit]
        name = options.generate
        if not requests:
            raise ValueError("no request was generated: every prompt is longer than --max-input")
    if skipped.count:
        console.print(f"bad lines skipped: {skipped.count:,}")
    if options.hints is not None:
        requests = with_hints(requests, options.hints, options.seed)
    return name, requests


def _cost(options: argparse.Namespace) -> CostModel:
    if options.model is None:
        return PROFILES[options.profile or "paper-7b"]()
    if options.profile is not None:
        raise ValueError("give --model or --profile, not both")
    path = options.model / "config.json" if options.model.is_dir() else options.model
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no model's config ({error})") from error
    return CostModel.from_config(config)


def _serving(options: argparse.Namespace) -> Serving | None:
    given = {name: getattr(options, name) for name in ("chunk", "grid")}
    given = {name: value for name, value in given.items() if value is not None}
    if options.rules == "paper":
        if given:
            raise ValueError(f"--{next(iter(given))} is for --rules served only")
        if options.pools == ONE_MEMORY:
            raise ValueError(
                "--pools one is for --rules served; by the paper's rules it is so anyway"
            )
        return None
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"--{name} must be 1 or more, not {value}")
    return Serving(**given, one_memory=options.pools == ONE_MEMORY)


def _budgets(options: argparse.Namespace, cost: CostModel) -> list[Budget]:
    """Raises ValueError for one that holds less than a state and a token."""
    if options.pools == ONE_MEMORY and options.cache is None:
        raise ValueError("--pools one shares the bytes of --cache; give that too")
    if options.pools != ONE_MEMORY and (options.cache is None) == (options.pools is None):
        raise ValueError("give --cache or --pools, one of them")
    budgets: list[Budget] = []
    if options.cache is not None:
        for text in options.cache.split(","):
            budget = parse_bytes(text)
            if budget < smallest_budget(cost):
                raise ValueError(
                    f"a cache of {text} ({budget:,} bytes) holds no state: one state and one token "
                    f"of this model are {smallest_budget(cost):,} bytes"
                )
            budgets.append(budget)
        return budgets
    for text in options.pools.split(","):
        tokens, _, slots = text.partition(":")
        if not (tokens.isdigit() and slots.isdigit()):
            raise ValueError(f"pools are written as TOKENS:SLOTS, not {text!r}")
        if int(tokens) < 1 or (int(slots) < 1 and cost.state_bytes):
            raise ValueError(f"pools of {text} hold no state: they need 1:1 at least")
        budgets.append(Split(int(tokens), int(slots)))
    return budgets


def _tiers(options: argparse.Namespace, cost: CostModel) -> TierBudgets | None:
    """Raises ValueError for what tiers cannot be combined with, or a device that holds no state."""
    if options.tiers is None:
        return None
    for name in ("cache", "pools"):
        if getattr(options, name) is not None:
            raise ValueError(f"--tiers does not go with --{name}")
    if options.rules == "served":
        raise ValueError("tiers are replayed by the paper's rules: leave out --rules served")
    tiers = TierBudgets.parse(options.tiers)
    if tiers.sizes[0] < smallest_budget(cost):
        raise ValueError(
            f"a device of {tiers.sizes[0]:,} bytes holds no state: one state and one token of this "
            f"model are {smallest_budget(cost):,} bytes"
        )
    return tiers


def _specs(text: str) -> list[Spec]:
    """Policies from a list; options of one policy are separated by commas too (`tlru:a=1,b=2`)."""
    parts: list[str] = []
    for part in text.split(","):
        if parts and "=" in part and ":" not in part:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    specs = [Spec.parse(part.strip()) for part in parts if part.strip()]
    if not specs:
        raise ValueError("--policy is empty")
    return list(dict.fromkeys(specs))


def _run(runner: Runner, jobs: list[Job], workers: int, console: Console) -> list[Result]:
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    with progress:
        total = sum(runner.steps(job) for job in jobs)
        task = progress.add_task("requests replayed", total=total)
        return run_all(runner, jobs, workers, lambda count: progress.advance(task, count))


def _show(
    results: list[Result],
    requests: Sequence[Request],
    time: PrefillTime | None,
    console: Console,
) -> None:
    tokens = sum(request.input_len for request in requests)
    title = f"{results[0].job.trace}: {len(requests):,} requests, {tokens:,} prompt tokens"
    if results[0].job.serving is not None:
        title += ", as served"
    table = Table(title=title, box=SIMPLE, padding=(0, 1), collapse_padding=True)
    table.add_column("cache", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    titles = ["hit\n%", "FLOPs\nsaved %", "TTFT\nP5", "\nP50", "\nP95", "paper\nP50", "\nP95"]
    if time is None:
        del titles[2:5]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for index, result in enumerate(results):
        new_size = index > 0 and results[index - 1].job.budget != result.job.budget
        if new_size:
            table.add_section()
        label = str(result.job.spec)
        if result.chosen is not None:
            label += f" ({result.chosen.options[0][1]:g})"
        cells = [f"{100 * result.hit_rate:.1f}", f"{100 * result.flops_saved:.1f}"]
        if time is not None:
            cells += [f"{1000 * result.ttft_percentile(p):,.0f}" for p in (5, 50, 95)]
        summary = result.as_dict()
        cells += [f"{1000 * summary[f'paper_ttft_p{p}_s']:,.0f}" for p in (50, 95)]
        tiers = result.job.tiers
        cache = size_name(result.job.budget) if tiers is None else str(tiers)
        table.add_row(cache, label, *cells)
    console.print(table)
    if results[0].job.tiers is not None:
        _show_tiers(results, console)
    about = "paper: time to first token (ms) by its linear model, without a queue."
    if time is not None:
        about = f"TTFT: ms, queue included, by {time.about}; {about}"
    console.print(about, highlight=False, soft_wrap=True)


def _show_tiers(results: list[Result], console: Console) -> None:
    """Where hits came from, and what was moved."""
    table = Table(title="tiers", box=SIMPLE, padding=(0, 1), collapse_padding=True)
    table.add_column("policy", no_wrap=True)
    assert results[0].job.tiers is not None
    present = results[0].job.tiers.present
    below = present[1:]
    where = " + ".join(tier.name.lower() for tier in below)
    for title in [f"hit %: device + {where}", "loads", "GB written", "bytes per\nhit token"]:
        table.add_column(title, justify="right", no_wrap=True)
    for result in results:
        counts, tokens = result.tiers, int(result.input_len.sum())
        if counts is None:
            continue
        table.add_row(
            str(result.job.spec),
            " + ".join(f"{100 * counts.hit_tokens[tier] / tokens:.1f}" for tier in present),
            " + ".join(f"{counts.loads[tier]:,}" for tier in below),
            " + ".join(f"{counts.written[tier] / 1e9:.1f}" for tier in below),
            f"{counts.written_per_hit_token:,.0f}",
        )
    console.print(table)
    about = f"loads, GB written: {where}; bytes written per hit token."
    _show_lost({str(result.job.spec): result for result in results}, console)
    console.print(about, highlight=False, soft_wrap=True)


def _show_lost(results: dict[str, Result], console: Console) -> None:
    """Prompt tokens that were computed though they had a state once, by what became of it."""
    lost = lost_tokens(results)
    if not any(lost.values()):
        return
    table = Table(title="lost, % of prompt tokens", box=SIMPLE, padding=(0, 1))
    table.add_column("policy", no_wrap=True)
    for why in next(iter(lost.values())):
        table.add_column(why, justify="right")
    for name, shares in lost.items():
        table.add_row(name, *(f"{share:.1f}" for share in shares.values()))
    console.print(table)


def size_name(budget: Budget) -> str:
    if budget is None:
        return "unbounded"
    if isinstance(budget, Split):
        return f"{budget.kv_tokens:,} + {budget.slots:,} states"
    return f"{budget / 1e9:g} GB" if budget >= 10**8 else f"{budget / 1e6:g} MB"


def _write_json(path: Path, content: object) -> None:
    text = msgspec.json.format(msgspec.json.encode(content), indent=1)
    if str(path) == "-":
        print(text.decode())
        return
    with whole_file(path) as file:
        file.write(text + b"\n")


if __name__ == "__main__":
    sys.exit(main())
