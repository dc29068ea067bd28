"""All allocators on all workloads, models, sizes and seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from sglang_hybrid.extensions.lab.avmp.harness import Counts, run
from sglang_hybrid.extensions.lab.avmp.memory import MODELS, POOLS, ModelBytes, SimulatedMemory
from sglang_hybrid.extensions.lab.avmp.paged import Padded, TwoPools
from sglang_hybrid.extensions.lab.avmp.queueing import Capacity, queue
from sglang_hybrid.extensions.lab.avmp.requests import WORKLOADS
from sglang_hybrid.extensions.lab.avmp.shared import OneWayDonor, PlainShared, SharedByValue
from sglang_hybrid.extensions.lab.simulation.workers import run_all

SGLANGS_SHARE = 0.474
"""Share of the memory for states by SGLang's default --mamba-full-memory-ratio, 0.9 / 1.9."""

STATIC = (0.05, 0.1, 0.2, 0.3, 0.4, SGLANGS_SHARE, 0.5, 0.9)

ALLOCATORS: dict[str, Callable[[ModelBytes, int], SimulatedMemory]] = {
    "padded unified": Padded,
    **{f"two pools, {share:.3g} for states": partial(TwoPools, share=share) for share in STATIC},
    **{
        f"dynamic AVMP, batch 128, from {share:g}": partial(TwoPools, share=share, batch=128)
        for share in (0.5, 0.9, 0.1)
    },
    "SGLang's one-way donor": OneWayDonor,
    "plain shared pool": PlainShared,
    "one memory (ours)": SharedByValue,
}
"""Two pools are the paper's `fixed_dual` and `avmp_static`, which count alike."""


@dataclass(frozen=True)
class Cell:
    """One run: an allocator by name, on a workload by name."""

    allocator: str
    workload: str
    model: ModelBytes
    total: int
    replicate: int


@dataclass(frozen=True)
class Row:
    """An allocator on a workload. Calls that got nothing are summed over models and sizes, as the
    mean of the seeds; shares of requests are means.
    """

    out_of_memory: float
    completed: float
    evicted: float
    unharmed: float


def cells(workloads: Sequence[str], allocators: Sequence[str], seeds: int) -> Iterator[Cell]:
    """Every combination with the paper's models and sizes."""
    for workload in workloads:
        for allocator in allocators:
            for model in MODELS:
                for total in POOLS:
                    for replicate in range(seeds):
                        yield Cell(allocator, workload, model, total, replicate)


def counted(_: None, cell: Cell, count_step: Callable[[], None]) -> Counts:
    """Requests that come when they come."""
    memory = ALLOCATORS[cell.allocator](cell.model, cell.total)
    return run(memory, cell.model, WORKLOADS[cell.workload].requests(cell.replicate))


def compare(
    workloads: Sequence[str], allocators: Sequence[str], seeds: int, workers: int
) -> dict[tuple[str, str], Row]:
    """A row for each allocator and workload."""
    chosen = list(cells(workloads, allocators, seeds))
    found = dict(zip(chosen, run_all(counted, None, chosen, workers), strict=True))
    rows = {}
    for workload in workloads:
        for allocator in allocators:
            mine = [
                counts
                for cell, counts in found.items()
                if (cell.allocator, cell.workload) == (allocator, workload)
            ]
            rows[allocator, workload] = Row(
                sum(counts.out_of_memory for counts in mine) / seeds,
                fmean(counts.completed / counts.requests for counts in mine),
                fmean(counts.evicted / counts.requests for counts in mine),
                fmean(counts.unharmed / counts.requests for counts in mine),
            )
    return rows


@dataclass(frozen=True)
class QueueResult:
    """Results where requests wait for room. makespan: ticks, summed over models and sizes, as the
    mean of the seeds. waited: ticks, per request. refused: of all requests, those that never fit.
    """

    out_of_memory: int
    evicted: int
    makespan: float
    waited: float
    refused: int


QUEUES: dict[str, tuple[float | None, Callable[[ModelBytes, int], SimulatedMemory]]] = {
    f"two pools, {share:.3g} for states": (share, partial(TwoPools, share=share))
    for share in (0.1, SGLANGS_SHARE, 0.5)
}
QUEUES["one memory (ours)"] = (None, SharedByValue)


def compare_queues(workload: str, seeds: int) -> dict[str, QueueResult]:
    """All of them on the requests that fit into SGLang's split: others would make it wait less."""
    rows = {}
    for name, (share, make) in QUEUES.items():
        failed = evicted = refused = served = 0
        makespan = waited = 0.0
        for cell in cells([workload], [name], seeds):
            everyone = WORKLOADS[workload].requests(cell.replicate)
            sglangs = Capacity(cell.model, cell.total, SGLANGS_SHARE)
            own = Capacity(cell.model, cell.total, share)
            fitting = [request for request in everyone if sglangs.holds(cell.model.peak(request))]
            queued = queue(own, fitting)
            counts = run(make(cell.model, cell.total), cell.model, queued.started)
            failed += counts.out_of_memory
            evicted += counts.evicted
            makespan += queued.makespan / seeds
            waited += queued.waited
            served += len(queued.started)
            refused += sum(not own.holds(cell.model.peak(request)) for request in everyone)
        rows[name] = QueueResult(failed, evicted, makespan, waited / served, refused)
    return rows
