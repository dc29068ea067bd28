"""How fast a tier gives and takes bytes: a bandwidth and a latency, as text and as numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

TIERS: Final = ("host", "disk")
"""The tiers below the device, the nearest first."""

_BYTES: Final = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LINK: Final = re.compile(
    r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[KMGT]?)B/s"
    r"(?:\+(?P<wait>\d+(?:\.\d+)?)(?P<time>us|ms|s))?"
)


@dataclass(frozen=True)
class TierLink:
    """The way between the device and a tier; both directions have this speed of their own."""

    bytes_per_second: float
    latency_seconds: float = 0.0

    def seconds(self, size: float) -> float:
        """Seconds until `size` bytes have arrived on an idle link."""
        return self.latency_seconds + size / self.bytes_per_second


def parse_links(text: str) -> Mapping[str, TierLink]:
    """`host=25GB/s+20us,disk=3GB/s` as a link per tier; nothing for an empty text.

    Raises ValueError for an unknown tier, a bandwidth of 0, or another form.
    """
    links: dict[str, TierLink] = {}
    for part in filter(None, text.split(",")):
        tier, _, speed = part.partition("=")
        found = _LINK.fullmatch(speed)
        if tier not in TIERS or tier in links or not found:
            raise ValueError(
                f"{part!r} is not a tier's bandwidth; write {' or '.join(TIERS)}, each once, "
                "as in host=25GB/s+20us,disk=3GB/s"
            )
        rate = float(found["number"]) * _BYTES[found["unit"]]
        if not rate:
            raise ValueError(f"{part!r} is a bandwidth of 0; give more, or leave the tier out")
        wait = float(found["wait"] or 0) * _SECONDS[found["time"] or "s"]
        links[tier] = TierLink(rate, wait)
    return links
