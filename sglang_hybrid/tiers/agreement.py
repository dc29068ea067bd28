"""Ranks that measure something together, each with its own part of a model, and must find the same.

A rank that fails where the others go on would leave them in a forward that waits for it. So all
ranks agree before each forward, and on each result.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

SECONDS: Final = 60.0
"""How long a rank that failed waits for the others."""


class AnotherRankFailed(RuntimeError):
    """This rank could have gone on."""


class Ranks:
    """The ranks of `group`, a process group for tensors on the CPU; None: there is one rank only.

    seconds: how long a rank that failed waits until the others have come to where they agree.
    """

    def __init__(self, group: dist.ProcessGroup | None, seconds: float = SECONDS) -> None:
        self._group = group
        self._seconds = seconds

    def agree(self, error: float = 0.0) -> float:
        """Called on all ranks at the same places. Returns the largest `error`; one that is no
        number counts as infinite. Raises AnotherRankFailed if a rank gave up instead.
        """
        if math.isnan(error):
            error = math.inf
        if self._group is None:
            return error
        largest = torch.tensor([0.0, error], dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        failed, error = largest.tolist()
        if failed:
            raise AnotherRankFailed
        return float(error)

    def give_up(self) -> None:
        """This rank failed; the others are told when they agree the next time. Raises RuntimeError
        if they do not come so far: they wait for this rank in the middle of a forward.
        """
        if self._group is None:
            return
        failed = torch.tensor([1.0, 0.0], dtype=torch.float64)
        work = dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=self._seconds))
