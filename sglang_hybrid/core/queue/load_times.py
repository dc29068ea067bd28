"""The time at which the load of a waiting request must start so that it ends when its request has
its turn.

CaR III B 2 starts a transfer at the first t at which

    min over the running requests i of (TPOP * len_i - (t - timer_i))  <=  SIZE / bandwidth

where TPOP is the time per output token, len_i the predicted length of the answer, timer_i when it
began, and SIZE what must be loaded: before that the data would lie on the device unused, after it
the device would wait. That is for one load. Here several wait in the order in which they will run.
`free_k` is when the k-th of them has its turn, and the link carries one load at a time, so each
load must also end early enough for those behind it to follow:

    start_k = min(free_k, start_(k+1)) - seconds_k

`seconds_k` is the whole way, disk to host and host to device. A request that needs nothing takes a
place and no time on the link. With one load and one place this is CaR's rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Decoding:
    """A request that decodes. since: seconds on the clock at its first token. predicted: tokens of
    its answer.
    """

    since: float
    predicted: float

    def seconds_left(self, now: float, per_token: float) -> float:
        """Seconds until it ends: TPOP * len_i - (t - timer_i) of CaR III B 2, not below one token:
        an answer that is longer than predicted may end at any step.
        """
        return max(per_token * self.predicted - (now - self.since), per_token)


def free_places(
    running: Iterable[Decoding], now: float, per_token: float, places: int
) -> list[float]:
    """Seconds from `now` until a waiting request can have the first, second ... place, ascending: 0
    for places that are free already.

    per_token: seconds of a decode step. places: how many requests may run at once.
    """
    ends = sorted(one.seconds_left(now, per_token) for one in running)
    return [0.0] * max(0, places - len(ends)) + ends


def turns(places: Sequence[float], prefills: Sequence[float], busy: float = 0.0) -> list[float]:
    """Seconds until each waiting request is expected to begin, ascending: when a place is free and
    the prefills before it are done. None for those beyond the last place.

    places: `free_places`. prefills: seconds of each, in the order of the requests. busy: seconds
    that the prefill under way still takes.
    """
    begin, found = busy, []
    for place, prefill in zip(places, prefills, strict=False):
        found.append(max(begin, place))
        begin = found[-1] + prefill
    return found


def latest_starts(seconds: Sequence[float], free: Sequence[float]) -> list[float]:
    """Seconds from now at which each load must start so as to end in time; below 0 it ends late.

    seconds: of each load, in the order of the requests; 0 for one that needs none. free: seconds
    until each has its turn, ascending. Loads of requests beyond the last place need not start:
    their start is infinite, unless the link is needed before.
    """
    starts = [math.inf] * len(seconds)
    after = math.inf
    for at in range(min(len(seconds), len(free)) - 1, -1, -1):
        if seconds[at]:
            after = starts[at] = min(free[at], after) - seconds[at]
    return starts
