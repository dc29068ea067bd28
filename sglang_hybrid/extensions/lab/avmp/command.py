"""python -m sglang_hybrid.replay avmp: the paper's comparison, with ours. Prints Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from sglang_hybrid.core.options import MOST_PROCESSES, integer
from sglang_hybrid.core.programs import Parser
from sglang_hybrid.extensions.lab.avmp.compare import (
    ALLOCATORS,
    QueueResult,
    Row,
    compare,
    compare_queues,
)
from sglang_hybrid.extensions.lab.avmp.requests import IN_TOTALS, WORKLOADS

MOST_SEEDS = 1_000


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status. Raises UsageError."""
    parser = Parser(
        prog="python -m sglang_hybrid.replay avmp",
        description="Running requests in the AVMP paper's allocators and in one memory.",
    )
    about = "of each workload (%(default)s)"
    parser.add_argument("--seeds", type=integer(1, MOST_SEEDS), default=3, help=about)
    parser.add_argument("--workers", type=integer(1, MOST_PROCESSES), default=1, help="processes")
    options = parser.parse_args(arguments)
    command = shlex.join(["python", "-m", "sglang_hybrid.replay", "avmp", *arguments])
    print(f"Command: `{command}`.\n")
    show(compare(list(WORKLOADS), list(ALLOCATORS), options.seeds, options.workers))
    print("\nWhere requests wait for room, first come first served:\n")
    show_queues({name: compare_queues(name, options.seeds) for name in WORKLOADS})
    return 0


def show(rows: Mapping[tuple[str, str], Row]) -> None:
    """Out of memory / evicted % / completed % / unharmed %, and the sums of the paper's totals."""
    workloads = list(dict.fromkeys(workload for _, workload in rows))
    print(f"| allocator | {' | '.join(workloads)} | OOM in all | unharmed in all |")
    print("|---|" + "---:|" * (len(workloads) + 2))
    for allocator in dict.fromkeys(allocator for allocator, _ in rows):
        mine = [rows[allocator, workload] for workload in workloads]
        total = sum(rows[allocator, workload].out_of_memory for workload in IN_TOTALS)
        unharmed = sum(row.unharmed for row in mine) / len(mine)
        shown = " | ".join(
            f"{row.out_of_memory:.1f} / {100 * row.evicted:.1f} / {100 * row.completed:.1f} / "
            f"{100 * row.unharmed:.1f}"
            for row in mine
        )
        print(f"| {allocator} | {shown} | {total:.1f} | {100 * unharmed:.1f} % |")


def show_queues(found: Mapping[str, Mapping[str, QueueResult]]) -> None:
    """Calls that got nothing, requests evicted, refused; makespan and mean wait in ticks."""
    print("| memory | workload | OOM | evicted | never fit | makespan | waited |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for workload, rows in found.items():
        for name, row in rows.items():
            print(
                f"| {name} | {workload} | {row.out_of_memory} | {row.evicted} | {row.refused} | "
                f"{row.makespan:,.0f} | {row.waited:,.0f} |"
            )
