"""Starts on a pretended machine, in a process of its own: a process cannot stop pretending."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rehearsal.start import Rehearsal, Start

SECONDS = 600


@dataclass(frozen=True)
class Case:
    """A model, flags of the server, and fields of the model's config.json that differ."""

    model: str
    flags: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Rehearsed:
    """starts: one for each case. replaced: packages that were wanted and are not here. log: the
    standard error.
    """

    starts: list[Start]
    replaced: set[str]
    log: str


def rehearsed(machine: str, cases: Sequence[Case]) -> Rehearsed:
    """Raises subprocess.SubprocessError if the process does not end well within `SECONDS`."""
    asked = json.dumps([[case.model, case.flags, case.config] for case in cases])
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", __name__, machine, folder],
            input=asked,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        if done.returncode:
            raise subprocess.SubprocessError(done.stderr[-3_000:])
        *starts, replaced = (Path(folder) / "found").read_text().splitlines()
    return Rehearsed(
        [Start.from_json(line) for line in starts], set(json.loads(replaced)), done.stderr
    )


def main() -> None:
    machine, folder = sys.argv[1], Path(sys.argv[2])
    rehearsal = Rehearsal(machine, folder)
    with (folder / "found").open("w") as out:
        for model, flags, config in json.load(sys.stdin):
            print(rehearsal.start(model, flags, **config).to_json(), file=out)
        print(json.dumps(sorted(rehearsal.pretence.replaced)), file=out)


if __name__ == "__main__":
    main()
