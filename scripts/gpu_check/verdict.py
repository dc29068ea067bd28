"""The verdict that the steps of `--one-memory` add up to, and the file that a server reads."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from scripts.gpu_check.findings import Finding
from scripts.gpu_check.steps import NOT_RUN
from sglang_hybrid.serving.gpu_verdict import Row, Verdict, own_file, write_verdict


def rows_of(found: Mapping[str, Sequence[Finding]]) -> dict[str, Row]:
    """A row for each step: right if nothing was wrong, and what was wrong or decided otherwise."""
    rows = {}
    for step, findings in found.items():
        wrong = [it for it in findings if it.ok is False]
        told = wrong or [it for it in findings if it.ok]
        text = "; ".join(f"{it.what}: {it.found}" for it in told)
        rows[step] = Row(bool(told) and not wrong, text)
    return rows


def decide(
    found: Mapping[str, Sequence[Finding]],
    gpu: str | None,
    stand_ins: bool,
    path: Path | None = None,
) -> str:
    """Write the verdict, and say in a sentence what became of it. gpu: None where none ran it.
    path: of the file, by default this user's.
    """
    unrun = [step for step, findings in found.items() if NOT_RUN in findings]
    if unrun:
        return f"No verdict: for {', '.join(unrun)} there was no time."
    rows = rows_of(found)
    passed = all(row.ok for row in rows.values())
    word = "passed" if passed else "failed"
    if gpu is None:
        return f"One memory {word} in rehearsal, which is no verdict."
    if stand_ins:
        return f"One memory {word} without SGLang's CUDA packages, which is no verdict."
    verdict = Verdict(gpu, driver(), version("sglang"), version("torch"), passed, rows)
    path = path or own_file()
    write_verdict(path, verdict)
    return f"One memory {word}. Servers of this user read that from {path}."


def driver() -> str:
    """The version of the GPU's driver; "unknown" where nobody says it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.partition("\n")[0].strip() or "unknown"
