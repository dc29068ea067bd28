"""Two ranks, each in a process of its own, in a real group of torch's for tensors on the CPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


def join(rank: int, folder: str) -> None:
    """Called in each of them; returns when both are there."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )


def on_two_ranks(
    serve: Callable[[int, str, list[str]], None], folder: Path, names: Sequence[str]
) -> list[str | None]:
    """The results that `serve(rank, folder, names)` writes into the file of its rank's number in
    `folder`, on each of two ranks; None for one that hangs or ends before. serve: a function of a
    module, which is imported once for both.
    """
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload([serve.__module__])
    ranks = [
        start.Process(target=serve, args=(rank, str(folder), list(names))) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        process.kill()
    files = [folder / str(rank) for rank in range(2)]
    return [path.read_text() if path.exists() else None for path in files]
