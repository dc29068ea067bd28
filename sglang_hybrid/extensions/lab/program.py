"""python -m sglang_hybrid.replay: what each policy would have been worth on a trace."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_hybrid.core.programs import program
from sglang_hybrid.core.sentences import escape
from sglang_hybrid.extensions.lab.command_line import (
    jobs_of,
    name_of,
    parser,
    reject_useless_options,
    reject_useless_reading,
    specs,
    traffic_of,
)
from sglang_hybrid.extensions.lab.reports.tables import show_results
from sglang_hybrid.extensions.lab.runner import Job, Result, Runner
from sglang_hybrid.extensions.lab.simulation.traces.formats import FORMATS, write_trace
from sglang_hybrid.extensions.lab.simulation.traces.lines import whole_file

AVMP = "avmp"
"""The argument that asks, in the place of a trace, for the comparison of the AVMP paper."""

ASSUMED = "the costs of Marconi's 7B model are assumed; --model DIR takes those of yours"


@program
def main(arguments: Sequence[str]) -> int:
    """Replay what the arguments say; returns the exit status."""
    if arguments[:1] == [AVMP]:
        from sglang_hybrid.extensions.lab.avmp import command

        return command.main(arguments[1:])
    return _main(parser().parse_args(arguments), arguments)


def _main(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    to_stdout = options.json is not None and str(options.json) == "-"
    console = Console(stderr=to_stdout, markup=False, emoji=False)
    name = name_of(options)
    reject_useless_options(options)
    if options.model is None and options.profile is None and options.record is None:
        console.print(ASSUMED)
    if options.follow:
        return _follow(options, console)
    jobs = [] if options.record else jobs_of(options, name)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ValueError(f"{options.json} cannot be written: there is no such directory")
    requests = traffic_of(options, console)
    if options.record is not None:
        write_trace(options.record, requests, options.to)
        written = f"{len(requests):,} requests written to {options.record} ({options.to})"
        console.print(escape(written), soft_wrap=True)
        return 0
    command = escape(shlex.join(["python", "-m", "sglang_hybrid.replay", *arguments]))
    results = _results(options, Runner({name: requests}), jobs, command, console)
    show_results(results, requests, console)
    if options.json is not None:
        _write_json(options.json, _summary(options, jobs[0], results, command))
    return 0


def _follow(options: argparse.Namespace, console: Console) -> int:
    from sglang_hybrid.extensions.lab import shadow

    reject_useless_reading(options, FORMATS["recorded"])
    options.instant = True
    options.policy = options.policy or specs(shadow.POLICIES)
    shadow.follow(options.trace, jobs_of(options, "live"), options.metrics_port, console)
    return 0


def _results(
    options: argparse.Namespace, runner: Runner, jobs: list[Job], command: str, console: Console
) -> list[Result]:
    """Replay everything; with --report, write its page too."""
    if options.report is None:
        return _run(runner, jobs, options.workers, console)
    from sglang_hybrid.extensions.lab.reports.report import Report
    from sglang_hybrid.extensions.lab.reports.study import Study

    with Report(options.report, command, options.seed) as report:
        study = Study(runner, jobs)
        study.take(_run(runner, [*jobs, *study.extra_jobs], options.workers, console))
        report.write(study)
    return study.results


def _run(runner: Runner, jobs: list[Job], workers: int, console: Console) -> list[Result]:
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    with progress:
        total = sum(runner.steps(job) for job in jobs)
        task = progress.add_task("requests replayed", total=total)
        return runner.run_all(jobs, workers, lambda count: progress.advance(task, count))


def _summary(
    options: argparse.Namespace, job: Job, results: Sequence[Result], command: str
) -> dict[str, object]:
    """The object that --json writes. `job`: one of those that were replayed."""
    return {
        "command": command,
        "seed": options.seed,
        "rules": options.rules,
        "serving": None if job.serving is None else asdict(job.serving),
        "cost": asdict(job.cost),
        "time": None if job.time is None else asdict(job.time),
        "results": [result.as_dict() for result in results],
    }


def _write_json(path: Path, content: object) -> None:
    text = msgspec.json.format(msgspec.json.encode(content), indent=1)
    if str(path) == "-":
        print(text.decode())
        return
    with whole_file(path) as file:
        file.write(text + b"\n")
