"""Runs steps one after another, each within its time, and all within theirs."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from scripts.gpu_check.findings import Finding, told

GRACE = 8.0
"""Seconds that a step has to end its servers when its time is over."""

QUESTIONS = ("traffic", "decode", "copies")
"""The parts of the paired run, a step each."""

NOT_RUN = Finding("time", "none was left; not run", False)


@dataclass(frozen=True)
class Step:
    """A command that reports findings; ``seconds`` is the most that it may take.

    Steps behind each other that run ``together`` share the machine.
    """

    name: str
    command: Sequence[str]
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    together: bool = False


def run_all(steps: Sequence[Step], seconds: float, logs: Path) -> dict[str, list[Finding]]:
    """The findings of each step; all of them take at most so many seconds.

    A step that fails, that does not end in time or that finds no time left gets a finding that says
    so, and the next one begins. The output of step s is in ``logs / s.log``.
    """
    end = time.monotonic() + seconds

    def timed(step: Step) -> list[Finding]:
        left = end - time.monotonic() - GRACE
        if left <= 0:
            return [NOT_RUN]
        most = min(left, step.seconds)
        print(f"{step.name} (at most {most:.0f} s) ...", flush=True)
        begin = time.monotonic()
        findings = run(step, most, logs / f"{step.name}.log")
        print(f"  {step.name}: {time.monotonic() - begin:.0f} s", flush=True)
        return findings

    found: dict[str, list[Finding]] = {}
    for together, group in itertools.groupby(steps, key=lambda step: step.together):
        members = list(group)
        with ThreadPoolExecutor(at_once() if together else 1) as pool:
            names = [step.name for step in members]
            found |= zip(names, pool.map(timed, members), strict=True)
    return found


def at_once() -> int:
    """The number of servers that start beside each other: each keeps about two cores busy."""
    return max(1, (os.cpu_count() or 1) // 2)


def run(step: Step, seconds: float, log: Path) -> list[Finding]:
    """The findings of one step, whose command ends within seconds plus `GRACE`."""
    with log.open("w") as output:
        process = subprocess.Popen(
            step.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **step.environment},
            start_new_session=True,
        )
    try:
        status: int | None = process.wait(seconds)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        end(process)
    lines = log.read_text(errors="replace").splitlines()
    found = [finding for line in lines if (finding := told(line))]
    if status is None:
        found.append(Finding("time", f"not ended after {seconds:.0f} s; see {log}", False))
    elif status:
        last = next((line for line in reversed(lines) if line.strip()), "")
        found.append(Finding("end", f"status {status}: {last.strip()[:160]}; see {log}", False))
    elif not found:
        found.append(Finding("end", f"nothing was reported; see {log}", False))
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C, so that a step can end its servers, then SIGKILL for what is left."""
    if process.poll() is not None:
        return
    started = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE / 2)
    process.kill()
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """The processes that a process and its children have started, as long as they are alive."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    found = list(children.get(pid, []))
    for child in found:
        found += children.get(child, [])
    return found


def table(found: Mapping[str, Sequence[Finding]]) -> str:
    """All findings as a Markdown table."""
    rows = [("step", "what", "found", "")] + [
        (name, *(text.replace("|", "/") for text in (finding.what, finding.found, finding.verdict)))
        for name, findings in found.items()
        for finding in findings
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def new_logs() -> Path:
    return Path(tempfile.mkdtemp(prefix="gpu-check-"))
