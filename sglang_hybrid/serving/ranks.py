"""Ranks that do the same thing together, each with its own part of a model.

A rank that fails where the others go on would leave them in a forward that waits for it, or with
another state than theirs. So they agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

T = TypeVar("T")

SECONDS: Final = 60.0
"""Seconds that a rank that failed waits for the others."""


def of_all_stages(value: T, params: CacheInitParams) -> list[T]:
    """The `value` of each stage of a server's pipeline (`--pp-size`), in their order. Every stage
    calls this at the same place, and waits there for the others.
    """
    if params.pp_size == 1:
        return [value]
    values = [value] * params.pp_size
    dist.all_gather_object(values, value, group=params.pp_cache_group)
    return values


class AnotherRankFailed(RuntimeError):
    """Raised on a rank that could have gone on, because another one failed."""


class Ranks:
    """The ranks of `group`, a process group for tensors on the CPU; None: there is one rank only.

    seconds: how long a rank that failed waits until the others have come to where they agree. It
    raises RuntimeError if they do not: they wait for this rank somewhere else.
    """

    def __init__(self, group: dist.ProcessGroup | None, seconds: float = SECONDS) -> None:
        self._group = group
        self._seconds = seconds

    @classmethod
    def apart(cls, ranks: Sequence[int], seconds: float = SECONDS) -> Self:
        """The ranks with these global numbers, in a process group that nothing else uses. Called on
        all of them.
        """
        if len(ranks) < 2:
            return cls(None, seconds)
        group = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        return cls(group, seconds)

    def agree(self, error: float = 0.0) -> float:
        """Called on all ranks at the same places. Returns the largest `error`; one that is no
        number counts as infinite. Raises AnotherRankFailed if a rank gave up instead.
        """
        failed, largest = self._largest(0.0, math.inf if math.isnan(error) else error)
        if failed:
            raise AnotherRankFailed
        return largest

    def give_up(self) -> None:
        """Report that this rank failed; the others learn it when they agree the next time."""
        self._largest(1.0, 0.0)

    def has_equal_end(self, *, failed: bool) -> bool:
        """Called on all ranks when each has done the same thing, or failed at it. Returns whether
        all failed or none did.
        """
        any_failed, none_failed = self._largest(float(failed), float(not failed))
        return not (any_failed and none_failed)

    def _largest(self, failed: float, second: float) -> tuple[float, float]:
        """The largest of all ranks, each for itself."""
        numbers = torch.tensor([failed, second], dtype=torch.float64)
        if self._group is not None:
            self._reduce(numbers, self._seconds if failed else None)
        return float(numbers[0]), float(numbers[1])

    def _reduce(self, numbers: Tensor, seconds: float | None) -> None:
        work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        if seconds is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=seconds))
