"""Servers on a machine with NVIDIA GPUs, rehearsed on one without.

    python -m tests.rehearsal                               a table: every machine and model
    python -m tests.rehearsal H100 Nemotron-H-8B -- --page-size 16

What each server would log goes to the standard error.
"""

from __future__ import annotations

import argparse
import sys

from scripts.bench.report import Table
from tests.rehearsal.machine import MACHINES
from tests.rehearsal.models import MODELS
from tests.rehearsal.run import Case, rehearsed
from tests.rehearsal.start import Start

HEAD = (
    *("machine", "model", "state slots a request", "overlap", "page", "attention"),
    *("states of a prefill", "prefill graph", "slots", "MB each", "KV tokens", "running requests"),
)


def row(start: Start) -> list[str]:
    """One start in the columns of `HEAD`."""
    if start.stopped:
        found = [start.machine, start.model, f"does not start: {start.stopped}"]
        return found + [""] * (len(HEAD) - len(found))
    return [
        *(start.machine, start.model, str(start.held), "on" if start.overlap else "off"),
        *(str(start.page), " and ".join(dict.fromkeys(start.attention))),
        "in one pass" if start.planned and start.why_split is None else "split",
        "yes" if start.captured else "no",
        *(f"{start.slots:,}", f"{start.state_bytes / 1e6:.1f}"),
        *(f"{start.tokens:,}", f"{start.running:,}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="machines and models; all of them by default")
    argv = sys.argv[1:]
    flags = argv[argv.index("--") + 1 :] if "--" in argv else []
    names = parser.parse_args(argv[: len(argv) - len(flags) - ("--" in argv)]).names
    for name in names:
        if name not in MACHINES and name not in MODELS:
            parser.error(f"{name} is neither of {', '.join((*MACHINES, *MODELS))}")
    models = [name for name in names if name in MODELS] or list(MODELS)
    table = Table(*HEAD, text=len(HEAD))
    for machine in [name for name in names if name in MACHINES] or MACHINES:
        found = rehearsed(machine, [Case(model, tuple(flags)) for model in models])
        for start in found.starts:
            table.row(*row(start))
            for line in start.lines:
                print(f"    {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
