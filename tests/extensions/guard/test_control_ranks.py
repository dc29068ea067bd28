"""Requests that fail on one rank, or on all: two ranks that are processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from sglang.srt.managers.io_struct import FlushCacheReqInput, UpdateWeightVersionReqInput

from sglang_hybrid.extensions.guard.control import ControlFailed, dispatch
from sglang_hybrid.serving.ranks import Ranks
from tests.two_ranks import join, on_two_ranks

SECONDS = 2.0


class Scheduler:
    """The used part of SGLang's scheduler; `handler` is called with the number of its rank."""

    def __init__(self, rank: int) -> None:
        self.dp_tp_group = SimpleNamespace(ranks=[0, 1])
        self._rank = rank

    def does(self, handler: Any) -> Scheduler:
        self._request_dispatcher = lambda request: handler(self._rank)
        return self


def all_do_it(rank: int) -> str:
    return "done"


def all_fail(rank: int) -> None:
    raise KeyError(f"no such key on rank {rank}")


def all_refuse(rank: int) -> None:
    raise ValueError("the version must not be empty.")


def one_fails(rank: int) -> str:
    if rank == 1:
        raise KeyError("no such key")
    return "done"


def one_is_slow(rank: int) -> str:
    time.sleep(2 * SECONDS * rank)
    return "done"


def one_fails_where_the_others_wait(rank: int) -> None:
    if rank == 1:
        raise OSError("no such file")
    dist.barrier()  # as SGLang's handlers do when they have taken weights


def one_breaks(rank: int) -> str:
    assert rank == 0, "a slot has two owners"
    return "done"


def serve(rank: int, folder: str, names: list[str]) -> None:
    """One rank. What becomes of its requests goes into a file, the error that ends it last."""
    join(rank, folder)
    Ranks.apart = classmethod(  # type: ignore[method-assign,assignment]
        lambda cls, ranks: Ranks(dist.new_group(ranks, backend="gloo"), SECONDS)
    )
    scheduler: Any = Scheduler(rank)
    found = []
    try:
        for name in names:
            handler = globals()[name]
            request = FlushCacheReqInput() if "breaks" in name else VERSION
            answer = dispatch(scheduler.does(handler), request)
            found.append(str(answer.status) if isinstance(answer, ControlFailed) else answer)
    except Exception as error:
        found.append(type(error).__name__)
    Path(folder, str(rank)).write_text(" ".join(found))
    os._exit(0)  # without waiting for what other ranks never answered


VERSION = UpdateWeightVersionReqInput(new_version="x")


def outcome(folder: Path, *handlers: Any) -> list[str]:
    """The results of these requests on two ranks; None of one that hangs."""
    names = [handler.__name__ for handler in handlers]
    return [found or "" for found in on_two_ranks(serve, folder, names)]


@pytest.mark.slow
def test_what_fails_on_one_rank_ends_all(tmp_path: Path) -> None:
    first, second = outcome(tmp_path, all_do_it, all_fail, all_refuse, one_is_slow, one_fails)
    assert first == second == "done 500 400 done RanksDiffer"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("handler", "ends"),
    [(one_fails_where_the_others_wait, "RuntimeError"), (one_breaks, "AssertionError")],
)
def test_a_rank_that_others_wait_for_ends(tmp_path: Path, handler: Any, ends: str) -> None:
    """The others end when its process has ended."""
    first, second = outcome(tmp_path, handler)
    assert second == ends
    assert first, "it hung"
    assert first != "done"
