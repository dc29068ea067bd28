"""Tiers of memory, how fast their links are, and the prefill: assumed first, then measured.

Seconds are what the tiers are compared in: FLOPs over the prefill rate, bytes over a bandwidth.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from sglang_hybrid.core.costs.cost import FloatArray


class Tier(IntEnum):
    """The tiers in which a copy can be, the fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


TIERS: Final = tuple(Tier)
TIERS_BELOW: Final = (Tier.HOST, Tier.DISK)
"""The tiers below the device: what is there must be loaded before a request can resume from it."""

WINDOW = 64  # measurements that an estimate is made of
FEWEST = 8  # measurements without which the first assumption holds
STEP = 8  # new measurements after which a line is fitted anew
SPREAD = 1.5  # upper over lower quartile of sizes from which a latency can be told from a bandwidth
MOVED = 0.1  # relative change of a rate from which values are computed anew


@dataclass(frozen=True, slots=True)
class Link:
    """A transfer of n bytes takes `latency + n / bandwidth` seconds; of none, none.

    bandwidth: bytes per second, more than 0. latency: seconds of one transfer, 0 or more.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and self.latency >= 0):
            raise ValueError(
                f"a link needs a bandwidth above 0 and a latency of 0 or more, not "
                f"{self.bandwidth} bytes/s and {self.latency} s"
            )

    def seconds(self, size: float) -> float:
        """Seconds to move `size` bytes."""
        return self.latency + size / self.bandwidth if size else 0.0


_BYTES: Final = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LINK: Final = re.compile(
    r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[KMGT]?)B/s"
    r"(?:\+(?P<wait>\d+(?:\.\d+)?)(?P<time>us|ms|s))?"
)


def parse_links(text: str) -> Mapping[str, Link]:
    """`host=25GB/s+20us,disk=3GB/s` as a link per tier; nothing for an empty text.

    Raises ValueError for an unknown tier, a bandwidth of 0, or another form.
    """
    known = [tier.name.lower() for tier in TIERS_BELOW]
    links: dict[str, Link] = {}
    for part in filter(None, text.split(",")):
        tier, _, speed = part.partition("=")
        found = _LINK.fullmatch(speed)
        if tier not in known or tier in links or not found:
            raise ValueError(
                f"{part!r} is not a tier's bandwidth; write {' or '.join(known)}, each once, "
                "as in host=25GB/s+20us,disk=3GB/s"
            )
        rate = float(found["number"]) * _BYTES[found["unit"]]
        if not rate:
            raise ValueError(f"{part!r} is a bandwidth of 0; give more, or leave the tier out")
        wait = float(found["wait"] or 0) * _SECONDS[found["time"] or "s"]
        links[tier] = Link(rate, wait)
    return links


INSTANT: Final = Link(float("inf"))
"""The device itself: nothing is moved."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds that decisions are made with. All ranks of a server must have the same ones at a
    step.

    prefill: FLOPs per second. loads, writes: the link from and to each tier, indexed by `Tier`, the
    device being INSTANT. A load from the disk is the whole way to the device; a write to the disk
    is that from the host.
    """

    prefill: float
    loads: tuple[Link, Link, Link]
    writes: tuple[Link, Link, Link]

    @classmethod
    def of(
        cls,
        prefill: float,
        host: Link,
        disk: Link,
        host_write: Link | None = None,
        disk_write: Link | None = None,
    ) -> Speeds:
        """The speeds of tiers; writes that are not given are as fast as loads."""
        loads = (INSTANT, host, disk)
        return cls(prefill, loads, (INSTANT, host_write or host, disk_write or disk))

    def compute(self, flops: float) -> float:
        """Seconds of a prefill of `flops` FLOPs; what every prefill takes besides is left out."""
        return flops / self.prefill

    def moved_from(self, other: Speeds) -> bool:
        """True if a rate differs by more than MOVED from that of `other`."""
        pairs = [(self.prefill, other.prefill)]
        for ours, theirs in ((self.loads, other.loads), (self.writes, other.writes)):
            for tier in TIERS_BELOW:
                pairs.append((ours[tier].bandwidth, theirs[tier].bandwidth))
                pairs.append((ours[tier].latency, theirs[tier].latency))
        return any(abs(new - old) > MOVED * max(new, old) for new, old in pairs)


class LineEstimate:
    """seconds = base + size / rate, from the last WINDOW measurements.

    The slope is the median over all pairs of measurements (Theil, 1950; Sen, 1968), so that up to
    29 % of them may be wrong by any factor. Where most sizes hardly differ, few measurements would
    decide on the slope. Then the base stays what it was, as far as the measurements allow, and the
    rate alone is estimated, as a median too. In either case the line passes the bulk of the
    measurements. Until FEWEST measurements there is only what was assumed.
    """

    def __init__(self, rate: float, base: float = 0.0) -> None:
        self.rate = rate
        self.base = base
        self.measured = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def seconds(self, size: float) -> float:
        """Seconds that `size` FLOPs or bytes take."""
        return self.base + size / self.rate

    def observe(self, size: float, seconds: float) -> bool:
        """Note the seconds that `size` FLOPs or bytes took. Returns whether the line was fitted
        anew. A measurement without time or size is ignored.
        """
        if size <= 0 or seconds <= 0:
            return False
        self._recent.append((size, seconds))
        self.measured += 1
        if self.measured < FEWEST or self.measured % STEP:
            return False
        self._fit()
        return True

    def _fit(self) -> None:
        sizes, seconds = np.array(self._recent).T
        low, high = np.quantile(sizes, (0.25, 0.75))
        if high >= SPREAD * low:
            slope = median_slope(sizes, seconds)
            base = float(np.median(seconds - slope * sizes))
            if slope > 0 and base >= 0:
                self.base, self.rate = base, 1 / slope
                return
            self.base = 0.0
        self.base = min(self.base, float(np.median(seconds)))
        net = np.maximum(seconds - self.base, seconds / 10)
        self.rate = float(1 / np.median(net / sizes))


def median_slope(x: FloatArray, y: FloatArray) -> float:
    """Median of (y_j - y_i) / (x_j - x_i) over all pairs of points [n] whose x differ; 0 if none
    do.
    """
    first, second = np.triu_indices(len(x), 1)
    run, rise = x[second] - x[first], y[second] - y[first]
    apart = run != 0
    return float(np.median(rise[apart] / run[apart])) if apart.any() else 0.0


class Rates:
    """Measures `Speeds` while serving.

    `speeds` is another object only after a rate changed by more than MOVED, so that values are not
    computed anew for noise. It changes within `observe_*` only; where there are several ranks, all
    must be told the same measurements in the same order, or one rank's `speeds`.
    """

    def __init__(self, first: Speeds) -> None:
        self.speeds = first
        self._prefill = LineEstimate(first.prefill)
        self._loads = {tier: _estimate(first.loads[tier]) for tier in TIERS_BELOW}
        self._writes = {tier: _estimate(first.writes[tier]) for tier in TIERS_BELOW}

    def observe_prefill(self, flops: float, seconds: float) -> None:
        """A forward of `flops` FLOPs took `seconds`."""
        if self._prefill.observe(flops, seconds):
            self._refresh()

    def observe_load(self, tier: Tier, size: int, seconds: float) -> None:
        """`size` bytes came from `tier` to the device in `seconds`."""
        if self._loads[tier].observe(size, seconds):
            self._refresh()

    def observe_write(self, tier: Tier, size: int, seconds: float) -> None:
        """`size` bytes were written to `tier` in `seconds`."""
        if self._writes[tier].observe(size, seconds):
            self._refresh()

    def measured(self, tier: Tier) -> int:
        """Loads from `tier` that were measured."""
        return self._loads[tier].measured

    def _refresh(self) -> None:
        loads, writes = ([INSTANT, *map(_link, of.values())] for of in (self._loads, self._writes))
        now = Speeds(self._prefill.rate, (*loads,), (*writes,))  # type: ignore[arg-type]
        if now.moved_from(self.speeds):
            self.speeds = now


def _estimate(link: Link) -> LineEstimate:
    return LineEstimate(link.bandwidth, link.latency)


def _link(estimate: LineEstimate) -> Link:
    return Link(estimate.rate, estimate.base)
