"""python -m sglang_hybrid.replay: what each policy would have been worth on a trace."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_hybrid.replay.command_line import jobs_of, parser, traffic_of
from sglang_hybrid.replay.reports.tables import show_results
from sglang_hybrid.replay.runner import Job, Result, Runner
from sglang_hybrid.replay.simulation.traces.formats import find_format, write_trace
from sglang_hybrid.replay.simulation.traces.lines import whole_file

AVMP = "avmp"
"""In the place of a trace: the comparison of the AVMP paper."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status; what is wrong is one sentence on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == [AVMP]:
            from sglang_hybrid.replay.avmp import command

            return command.main(arguments[1:])
        return _main(parser().parse_args(arguments), arguments)
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        print(f"error: {where}{reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _main(options: argparse.Namespace, arguments: list[str]) -> int:
    console = Console(stderr=options.json is not None and str(options.json) == "-")
    name, requests = traffic_of(options, console)
    if options.record is not None:
        find_format(options.to)
        write_trace(options.record, requests, options.to)
        console.print(f"{len(requests):,} requests written to {options.record} ({options.to})")
        return 0
    if options.workers < 1:
        raise ValueError(f"--workers must be 1 or more, not {options.workers}")
    jobs = jobs_of(options, name)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ValueError(f"{options.json} cannot be written: there is no such directory")
    command = shlex.join(["python", "-m", "sglang_hybrid.replay", *arguments])
    results = _results(options, Runner({name: requests}), jobs, command, console)
    show_results(results, requests, console)
    if options.json is not None:
        _write_json(options.json, _summary(options, jobs[0], results, command))
    return 0


def _results(
    options: argparse.Namespace, runner: Runner, jobs: list[Job], command: str, console: Console
) -> list[Result]:
    """Replay everything; with --report, write its page too."""
    if options.report is None:
        return _run(runner, jobs, options.workers, console)
    from sglang_hybrid.replay.reports.report import Report
    from sglang_hybrid.replay.reports.study import Study

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
    """What --json writes. `job`: one of those that were replayed."""
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


if __name__ == "__main__":
    sys.exit(main())
